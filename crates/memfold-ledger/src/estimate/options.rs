//! Options of an estimate of possible savings (`memfold estimate`): the size and seed of its
//! sample, and the settings of KSM to assume.

/// Default of the largest number of pages in an estimate's sample. Each page of the sample takes 40
/// bytes of memory.
pub const SAMPLE_PAGES: usize = 1 << 20;

/// Options of an estimate of savings.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Largest number of pages in the sample.
    pub sample_pages: usize,
    /// Seed of the hash that decides which contents are sampled. It is random, so that no guest can
    /// keep contents out of the sample.
    pub seed: u64,
    /// KSM's `max_page_sharing`: largest number of mappings of one merged page.
    pub max_page_sharing: u64,
    /// KSM's `use_zero_pages`: whether pages of zeroes are mapped to the kernel's zero page.
    pub use_zero_pages: bool,
    /// Whether file pages of guest RAM are read too: pages that are folded or mapped from a
    /// snapshot's image.
    pub reads_files: bool,
}

impl Options {
    /// Returns options with a random seed and with this host's KSM settings, or KSM's defaults on a
    /// kernel without KSM.
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
