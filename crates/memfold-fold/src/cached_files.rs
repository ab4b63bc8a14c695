//! Types of reports about the files that guests cache, and their places in the VMs' memory.

use memfold_units::Hva;

/// Number of pages of one file in the page cache of one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileUse {
    /// Name of the VM.
    pub vm: String,
    /// Trust domain of the VM, or `vm/NAME` for a VM without one.
    pub domain: String,
    /// Absolute path of the file in the guest. If files of several paths have the same bytes, one
    /// of these paths.
    pub path: Vec<u8>,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Number of the file's pages in the guest's page cache.
    pub cached_pages: u64,
}

/// Run of pages that are consecutive in QEMU's memory and in the file that they cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedRun {
    /// Host virtual address of the run in QEMU.
    pub hva: Hva,
    /// Number of pages in the run.
    pub pages: u32,
    /// Index of the file in [`CachedFiles::files`].
    pub file: u32,
    /// Index in the file of the run's first page, in pages.
    pub page: u32,
}

/// Cached files and their places in memory, for all VMs whose agents have completed an inventory of
/// the page cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CachedFiles {
    /// Path and length in bytes of each file. Files of a domain that probably have the same bytes
    /// are one entry.
    pub files: Vec<(Vec<u8>, u64)>,
    /// Name and runs of each VM.
    pub vms: Vec<(String, Vec<CachedRun>)>,
}
