//! Names of what the fold engine shares: a file of one VM, and the bytes that files have in common.

use memfold_wire::agent::FileNumber;

use super::guest::VmId;

/// Number of a content (the bytes of a file) in its trust domain; never reused.
pub type ContentId = u32;

/// A file of one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Member {
    pub vm: VmId,
    /// Number of the file, assigned by the VM's agent.
    pub file: FileNumber,
}
