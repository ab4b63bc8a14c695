//! Requests and reports of saving, restoring and verifying snapshots, and of boot snapshots.

use std::path::PathBuf;

use memfold_snapshot::{Keep, Renew};
use memfold_vm::Forward;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `POST /v1/snapshots`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct SaveRequest {
    /// The VM to save.
    pub vm: String,
    /// Name of the snapshot.
    pub name: String,
    /// What is kept of what the guest can get again.
    #[serde(default)]
    pub keep: Keep,
    /// Whether the VM goes on while its RAM is copied. The snapshot is of one instant all the same.
    #[serde(default)]
    pub live: bool,
    /// Whether the RAM image is compressed.
    #[serde(default)]
    pub compress: bool,
    /// How long the guest may take to drop its caches, in seconds (120 if not given). What it has
    /// not dropped by then is saved.
    #[serde(default)]
    pub drop_s: Option<u32>,
    /// Whether the guest's clock stays behind by what the VM stood still. Unset: it is set to the
    /// host's if that was long.
    #[serde(default)]
    pub keep_clock: bool,
}

impl SaveRequest {
    /// A save that keeps nothing of what the guest can get again, of a VM that stands still
    /// meanwhile.
    pub fn new(vm: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            vm: vm.into(),
            name: name.into(),
            keep: Keep::None,
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
    /// Name of the VM that is to run from it.
    pub vm: String,
    /// What it gets anew.
    #[serde(default)]
    pub renew: Renew,
    /// Start it though nothing would set it apart from another VM that runs from the same memory.
    #[serde(default)]
    pub force: bool,
    /// Start it though the brake is on, or would be with it.
    #[serde(default)]
    pub despite_brake: bool,
    /// Have its memory at hand that a VM used first of all, instead of one page at a time as it
    /// asks for them.
    #[serde(default)]
    pub prefetch: bool,
    /// Whether the guest's clock stays at the moment of the save. Unset: it is set to the host's
    /// when the agent answers.
    #[serde(default)]
    pub keep_clock: bool,
    /// A directory that gets the disks which the VM writes, as files of its own (`VM-diskN.qcow2`)
    /// that stay when it ends. Unset: its writes go to temporary overlays.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub disks: Option<PathBuf>,
    /// Ports of the host that lead into the guest (`[tcp:|udp:][ADDRESS:]PORT:GUEST-PORT`; port 0:
    /// a free one), in the place of those that the saved VM had.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub forwards: Vec<Forward>,
}

impl RestoreRequest {
    /// To go on as the VM that was saved.
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
    /// What is wrong with it; empty: nothing.
    pub problems: Vec<String>,
}

/// The snapshot of a VM right after its boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BootSnapshot {
    /// The guest boots.
    Pending,
    /// It is there.
    Ready,
    /// There is none, and why.
    Failed(String),
}

/// `POST /v1/vms/{name}/reboot`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RebootRequest {
    /// Go back to what the VM was right after its boot, disks included, instead of having the guest
    /// reboot.
    #[serde(default)]
    pub from_boot_snapshot: bool,
    /// Seconds that the guest has until its agent answers again.
    pub timeout_s: f64,
}
