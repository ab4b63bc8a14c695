//! Figures of the debt: the memory that the host would need if guests wrote to all pages that they
//! share.

/// Pages for which one VM would need memory if its guest wrote to them. Each page is counted once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmOwed {
    /// Name of the VM.
    pub name: String,
    /// Pages that map the page store and that the guest has not written since they were folded.
    pub folded_pages: u64,
    /// Pages that map data of the snapshot's image and that the guest has not written.
    pub snapshot_pages: u64,
    /// Pages that were discarded because they held only zeroes, and that the guest has not written
    /// since.
    pub zero_pages: u64,
    /// Pages of the guest's page cache, as the VM's agent reports them.
    pub cached_pages: u64,
}

/// Memory that all VMs would need if their guests wrote to all shared pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owed {
    /// Figures of each VM.
    pub vms: Vec<VmOwed>,
    /// Memory that page stores use, in bytes. It becomes free when guests have written to all
    /// folded pages.
    pub store_bytes: u64,
    /// Number of store pages that were freed for this answer.
    pub given_back_pages: u64,
}
