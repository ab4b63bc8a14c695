//! Task of a batch.

use super::content::ContentId;
use super::guest::VmId;
use super::hint_stack::Hint;

/// Most pages taken from the stacks for one batch.
pub(super) const BATCH_PAGES: u32 = 2048;

/// A range of one content to be folded in all VMs.
pub(super) struct Task {
    pub domain: String,
    pub content: ContentId,
    pub vm: VmId,
    pub hint: Hint,
    pub swept: bool,
}
