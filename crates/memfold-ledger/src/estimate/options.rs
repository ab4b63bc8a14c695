//! Options of an estimate.

/// Default limit of the sample, in pages. Each page of the sample takes 40 bytes.
pub const SAMPLE_PAGES: usize = 1 << 20;

/// Options of an estimate.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Most pages in the sample.
    pub sample_pages: usize,
    /// Seed of the sampling hash. It is random, so that no guest can keep contents out of the
    /// sample.
    pub seed: u64,
    /// KSM's `max_page_sharing`: number of pages that one merged page can stand for.
    pub max_page_sharing: u64,
    /// KSM's `use_zero_pages`: whether pages of zeroes are mapped to the kernel's zero page.
    pub use_zero_pages: bool,
    /// Whether file pages are read too, that is pages that are folded or mapped from a snapshot's
    /// image.
    pub reads_files: bool,
}

impl Options {
    /// Returns options with KSM's present settings, or with KSM's defaults on a kernel without KSM.
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
