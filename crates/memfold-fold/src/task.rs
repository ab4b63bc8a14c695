//! A task of the fold engine: one range of a file's pages that has to be folded in all VMs that
//! cache it.

use super::guest::VmId;
use super::hint_stack::Hint;
use super::member::ContentId;

/// Maximum number of pages in one batch.
pub(super) const BATCH_PAGES: u32 = 2048;

/// Range of pages of one content (the bytes of a file) that must be folded in all VMs that cache
/// them.
pub(super) struct Task {
    pub domain: String,
    pub content: ContentId,
    pub vm: VmId,
    pub hint: Hint,
    pub swept: bool,
}
