//! Facts about VMs that only the daemon knows, such as the files that a guest caches. An estimate
//! of possible savings asks the daemon for them (`GET /v1/estimate`).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A run of pages in a VM's memory that cache consecutive pages of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileRun {
    /// Address of the run's first page in QEMU's address space.
    pub hva: u64,
    /// Number of pages of the run.
    pub pages: u32,
    /// The cached file, as an index into [`VmFacts::files`].
    pub file: u32,
    /// Number of the run's first page within the file, from 0.
    pub page: u32,
}

/// A file that VMs cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KnownFile {
    /// Absolute path of the file in the guest. If several paths lead to files with the same
    /// content, one of these paths.
    pub path: String,
    /// Length of the file, in bytes.
    pub file_bytes: u64,
}

/// Facts about a VM that an estimate uses and only the daemon knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KnownVm {
    /// Name of the VM.
    pub name: String,
    /// Trust domain of the VM; null: the VM shares with no other VM.
    pub domain: Option<String>,
    /// Process number of QEMU.
    pub pid: i32,
    /// Address ranges of the VM's RAM in QEMU: the address of the first byte, and the address after
    /// the last.
    pub ram: Vec<(u64, u64)>,
    /// `MemFree` of the guest, in bytes; null: the guest's agent does not report the value.
    pub free_bytes: Option<u64>,
    /// Pages of files that the guest caches, as runs; null: no agent reports them.
    pub runs: Option<Vec<FileRun>>,
}

/// Facts about all VMs that an estimate uses and only the daemon knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmFacts {
    /// Facts about each of the daemon's VMs.
    pub vms: Vec<KnownVm>,
    /// Files that the VMs cache. [`FileRun::file`] is an index into this list.
    pub files: Vec<KnownFile>,
}
