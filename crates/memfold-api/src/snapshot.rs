//! Requests and reports of saving, restoring and verifying snapshots, and of boot snapshots.

use std::path::PathBuf;

use memfold_snapshot::Renew;
use memfold_vm::Forward;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Which of the guest's caches a snapshot keeps.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum KeepChoice {
    /// What saves soonest: one of the others, by the page cache and the speed of the disk. Of two
    /// that take about as long, the one that keeps more.
    #[default]
    Auto,
    /// Nothing: the guest drops its page cache and its caches of names and inodes first.
    None,
    /// The page cache, by reference: what the disks hold is not saved a second time.
    Hot,
    /// All, as it is.
    All,
}

/// `POST /v1/snapshots`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct SaveRequest {
    /// The VM to save.
    pub vm: String,
    /// Name of the snapshot.
    pub name: String,
    /// Which of the guest's caches are kept.
    #[serde(default)]
    pub keep: KeepChoice,
    /// Whether the VM runs while its RAM is copied. The snapshot is still of one instant.
    #[serde(default)]
    pub live: bool,
    /// Whether the RAM image is compressed.
    #[serde(default)]
    pub compress: bool,
    /// Longest time for the guest to drop its caches, in seconds. Unset: as long as the disk of
    /// snapshots takes to write the page cache, from 5 s to 120 s. Caches not dropped by then are
    /// saved.
    #[serde(default)]
    pub drop_s: Option<u32>,
    /// Whether the guest's clock is left behind by the time that the VM was stopped. Unset: the
    /// clock is set to the host's if that time was long.
    #[serde(default)]
    pub keep_clock: bool,
}

impl SaveRequest {
    /// Returns a request with default settings: the VM is stopped meanwhile.
    pub fn new(vm: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            vm: vm.into(),
            name: name.into(),
            keep: KeepChoice::Auto,
            live: false,
            compress: false,
            drop_s: None,
            keep_clock: false,
        }
    }
}

/// `POST /v1/snapshots/{name}/restore`
#[allow(clippy::struct_excessive_bools)] // what was asked for
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RestoreRequest {
    /// Name of the restored VM.
    pub vm: String,
    /// Which identities of the VM are renewed.
    #[serde(default)]
    pub renew: Renew,
    /// Whether to start the VM although it could not be given an identity that differs from another
    /// VM with the same memory.
    #[serde(default)]
    pub force: bool,
    /// Whether to start the VM although the brake is on, or would be on with it.
    #[serde(default)]
    pub despite_brake: bool,
    /// Whether to prefetch the pages that a restored VM touches first, instead of loading each page
    /// when it is touched.
    #[serde(default)]
    pub prefetch: bool,
    /// Whether the guest's clock continues from the moment of the save. Unset: it is set to the
    /// host's when the agent answers.
    #[serde(default)]
    pub keep_clock: bool,
    /// Directory for the VM's own copies of its writable disks (`VM-diskN.qcow2`), which remain
    /// when the VM ends. Unset: writes go to temporary overlays.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub disks: Option<PathBuf>,
    /// Host ports to forward into the guest (`[tcp:|udp:][ADDRESS:]PORT:GUEST-PORT`; port 0: any
    /// free port), in place of the saved VM's.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub forwards: Vec<Forward>,
}

impl RestoreRequest {
    /// Returns a request to continue as the saved VM, with default settings.
    #[must_use]
    pub fn new(vm: impl Into<String>) -> Self {
        Self {
            vm: vm.into(),
            renew: Renew::default(),
            force: false,
            despite_brake: false,
            prefetch: false,
            keep_clock: false,
            disks: None,
            forwards: Vec::new(),
        }
    }
}

/// `POST /v1/snapshots/{name}/verify`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct VerifyReport {
    /// Name of the snapshot that was verified.
    pub name: String,
    /// Problems found; empty: none.
    pub problems: Vec<String>,
}

/// The snapshot of a VM right after its boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BootSnapshot {
    /// The guest is still booting.
    Pending,
    /// The snapshot exists.
    Ready,
    /// The snapshot could not be taken; the text says why.
    Failed(String),
}

/// `POST /v1/vms/{name}/reboot`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RebootRequest {
    /// Whether to restore the VM, disks included, to its state right after its boot, instead of
    /// rebooting the guest.
    #[serde(default)]
    pub from_boot_snapshot: bool,
    /// Longest time until the guest's agent answers again, in seconds.
    pub timeout_s: f64,
}
