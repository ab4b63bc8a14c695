//! Figures of the memory that guests could reclaim by writes.

/// Pages that one VM could reclaim by writes. Each page is counted once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmOwed {
    /// Name of the VM.
    pub name: String,
    /// Pages that map the page store and were not written since.
    pub folded_pages: u64,
    /// Pages of views of the snapshot's image that hold data there and that the VM has not written.
    pub snapshot_pages: u64,
    /// Pages that were given back because they held only zeroes, and were not written since.
    pub zero_pages: u64,
    /// Pages of its page cache, as its agent reports them.
    pub cached_pages: u64,
}

/// Memory that all VMs could reclaim by writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owed {
    /// Figures of each VM.
    pub vms: Vec<VmOwed>,
    /// Memory of page stores in bytes. It becomes free when everything folded has been written.
    pub store_bytes: u64,
    /// Store pages that were given back for this answer.
    pub given_back_pages: u64,
}
