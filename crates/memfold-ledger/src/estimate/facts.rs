//! A daemon's knowledge of the VMs under estimate that cannot be seen from outside, such as cached
//! files: `GET /v1/estimate`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Consecutive pages in a VM's memory that cache consecutive pages of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileRun {
    /// Address of the first page in QEMU.
    pub hva: u64,
    /// Number of pages.
    pub pages: u32,
    /// The file: an index into [`VmFacts::files`].
    pub file: u32,
    /// Number of the first page in the file.
    pub page: u32,
}

/// A file that VMs cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KnownFile {
    /// Absolute path in the guest. Of several paths with the same bytes, one is named.
    pub path: String,
    /// Length of the file, in bytes.
    pub file_bytes: u64,
}

/// A daemon's knowledge of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KnownVm {
    /// Name of the VM.
    pub name: String,
    /// Trust domain; null: the VM shares with no other VM.
    pub domain: Option<String>,
    /// Process number of QEMU.
    pub pid: i32,
    /// Ranges of the VM's RAM in QEMU: first byte, and byte after the last.
    pub ram: Vec<(u64, u64)>,
    /// `MemFree` of the guest, in bytes; null: its agent does not report it.
    pub free_bytes: Option<u64>,
    /// File pages that the VM caches; null: no agent reports them.
    pub runs: Option<Vec<FileRun>>,
}

/// A daemon's knowledge of all its VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmFacts {
    /// The daemon's VMs.
    pub vms: Vec<KnownVm>,
    /// Files that the VMs' runs refer to.
    pub files: Vec<KnownFile>,
}
