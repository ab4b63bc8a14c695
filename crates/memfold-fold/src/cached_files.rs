//! Which files VMs cache, and where.

use memfold_units::Hva;

/// What one VM caches of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileUse {
    /// The VM's name.
    pub vm: String,
    /// Its trust domain, or `vm/NAME` of one that has none.
    pub domain: String,
    /// Absolute path in the guest; where files of several paths have the same bytes, one of these.
    pub path: Vec<u8>,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Pages of it in the guest's page cache.
    pub cached_pages: u64,
}

/// Pages that follow one another in QEMU's memory and in the file that they cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedRun {
    /// Address of the first in QEMU.
    pub hva: Hva,
    /// How many.
    pub pages: u32,
    /// The file: its place in [`CachedFiles::files`].
    pub file: u32,
    /// The first one's number in the file.
    pub page: u32,
}

/// Which files lie where in the memory of VMs whose agents say so.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CachedFiles {
    /// Path and length in bytes. Files of a domain that are thought to hold the same bytes are one.
    pub files: Vec<(Vec<u8>, u64)>,
    /// By VM name.
    pub vms: Vec<(String, Vec<CachedRun>)>,
}
