//! A daemon's knowledge of the VMs under estimate that cannot be seen from outside, such as cached
//! files: `GET /v1/estimate`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Pages that follow one another in a VM's memory and in the file that they cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileRun {
    /// Address in QEMU of the first.
    pub hva: u64,
    /// How many.
    pub pages: u32,
    /// The file: its place in [`VmFacts::files`].
    pub file: u32,
    /// The first one's number in the file.
    pub page: u32,
}

/// A file that VMs of a domain have in common, or one has alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KnownFile {
    /// Absolute path in the guest; where files of several paths have the same bytes, one of these.
    pub path: String,
    /// Its length.
    pub file_bytes: u64,
}

/// A VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KnownVm {
    /// Its name.
    pub name: String,
    /// Its trust domain; null: it shares with nobody.
    pub domain: Option<String>,
    /// QEMU's process.
    pub pid: i32,
    /// Where its RAM lies in QEMU: first byte, byte after the last.
    pub ram: Vec<(u64, u64)>,
    /// `MemFree` of the guest; null: its agent doesn't say.
    pub free_bytes: Option<u64>,
    /// What its memory caches of files; null: it has no agent that says so.
    pub runs: Option<Vec<FileRun>>,
}

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmFacts {
    /// The daemon's VMs.
    pub vms: Vec<KnownVm>,
    /// Files that their runs speak of.
    pub files: Vec<KnownFile>,
}
