//! Unit of work of a batch.

use super::content::ContentId;
use super::guest::VmId;
use super::hint_stack::Hint;

/// Maximum number of pages in one batch.
pub(super) const BATCH_PAGES: u32 = 2048;

/// Range of one content that must be folded in all VMs that cache it.
pub(super) struct Task {
    pub domain: String,
    pub content: ContentId,
    pub vm: VmId,
    pub hint: Hint,
    pub swept: bool,
}
