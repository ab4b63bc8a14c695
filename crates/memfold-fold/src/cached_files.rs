//! Types of reports about the files that VMs cache, and their places in memory.

use memfold_units::Hva;

/// Pages of one file in the page cache of one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileUse {
    /// Name of the VM.
    pub vm: String,
    /// Trust domain of the VM, or `vm/NAME` for a VM without one.
    pub domain: String,
    /// Absolute path in the guest. If files of several paths have the same bytes, one of these
    /// paths.
    pub path: Vec<u8>,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Pages of it in the guest's page cache.
    pub cached_pages: u64,
}

/// Pages that are consecutive in QEMU's memory and in the file that they cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedRun {
    /// Address of the first page in QEMU.
    pub hva: Hva,
    /// Number of pages.
    pub pages: u32,
    /// Index of the file in [`CachedFiles::files`].
    pub file: u32,
    /// Number of the first page in the file.
    pub page: u32,
}

/// Cached files and their places in memory, of all VMs whose agents have completed an inventory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CachedFiles {
    /// Path and length in bytes of each file. Files of a domain that probably have the same bytes
    /// are one entry.
    pub files: Vec<(Vec<u8>, u64)>,
    /// Name and runs of each VM.
    pub vms: Vec<(String, Vec<CachedRun>)>,
}
