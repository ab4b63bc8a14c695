//! Why VMs are saved: for somebody who asked, after a boot, or for forks.

/// Why a VM is saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SaveKind {
    /// Somebody asked for the snapshot.
    Asked,
    /// The snapshot of a VM that has just booted; the text marks the VM's process.
    Boot(Option<String>),
    /// VMs that fork from this one start from the snapshot, which is removed with them.
    Fork,
    /// The same, but the snapshot is kept.
    KeptFork,
}

impl SaveKind {
    /// Returns whether VMs fork from the saved one.
    pub(super) const fn is_fork(&self) -> bool {
        matches!(self, Self::Fork | Self::KeptFork)
    }
}
