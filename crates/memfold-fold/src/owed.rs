//! What guests could call in, in figures.

/// What one VM could call in, in pages, each counted in one place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmOwed {
    /// The VM's name.
    pub name: String,
    /// Mapped to the page store and not written since.
    pub folded_pages: u64,
    /// Views of the image that it runs from, where that holds something and the VM hasn't written.
    pub snapshot_pages: u64,
    /// Given back because they held only zeroes, and not written since.
    pub zero_pages: u64,
    /// Of its page cache, what its agent has told of.
    pub cached_pages: u64,
}

/// What all VMs could call in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owed {
    /// VM by VM.
    pub vms: Vec<VmOwed>,
    /// Memory of page stores, which comes back when everything folded has been written.
    pub store_bytes: u64,
    /// Pages of stores that were given back for this answer.
    pub given_back_pages: u64,
}
