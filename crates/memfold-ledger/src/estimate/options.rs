//! Options of an estimate.

/// Pages of the sample at most: 40 bytes each.
pub const SAMPLE_PAGES: usize = 1 << 20;

/// Options of an estimate.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Pages of the sample at most.
    pub sample_pages: usize,
    /// Chooses the sample. By chance, so that no guest can keep contents out of it.
    pub seed: u64,
    /// How KSM is set here: pages that one merged page stands for (`max_page_sharing`).
    pub max_page_sharing: u64,
    /// And whether zeroes become the kernel's own zero page (`use_zero_pages`).
    pub use_zero_pages: bool,
    /// Read pages of files too: what is folded, or of a snapshot's image, already.
    pub reads_files: bool,
}

impl Options {
    /// Everything, with KSM as it is set here, or at its defaults where there is none.
    #[must_use]
    pub fn here() -> Self {
        use std::hash::{BuildHasher, Hasher};
        let settings = memfold_ksm::Controls::default()
            .settings()
            .unwrap_or_default();
        Self {
            sample_pages: SAMPLE_PAGES,
            seed: std::collections::hash_map::RandomState::new()
                .build_hasher()
                .finish(),
            max_page_sharing: settings.max_page_sharing.unwrap_or(256).max(2),
            use_zero_pages: settings.use_zero_pages == Some(1),
            reads_files: false,
        }
    }
}
