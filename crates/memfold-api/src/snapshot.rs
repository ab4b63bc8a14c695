//! Requests and reports of saving, restoring and verifying snapshots, and of boot snapshots.

use std::path::PathBuf;

use memfold_snapshot::Renew;
use memfold_vm::Forward;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Which of the guest's caches a snapshot keeps.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum KeepChoice {
    /// One of the other choices: the one that saves soonest, by the size of the page cache and the
    /// speed of the disk. Of two that take about as long, the one that keeps more.
    #[default]
    Auto,
    /// No caches: the guest drops its page cache and its caches of names and inodes first.
    None,
    /// The page cache, by reference: data that is on the guest's disks is not saved a second time.
    Hot,
    /// All caches, unchanged.
    All,
}

/// `POST /v1/snapshots`
#[allow(clippy::struct_excessive_bools)] // what was asked for
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct SaveRequest {
    /// Name of the VM to save.
    pub vm: String,
    /// Name of the snapshot.
    pub name: String,
    /// Which of the guest's caches the snapshot keeps.
    #[serde(default)]
    pub keep: KeepChoice,
    /// Whether the VM runs while its RAM is copied. The snapshot is still of one instant.
    #[serde(default)]
    pub live: bool,
    /// Whether the RAM image is compressed. A compressed snapshot has no parent.
    #[serde(default)]
    pub compress: bool,
    /// Snapshot whose pages the new one refers to instead of saving them again. Unset: the snapshot
    /// from which the VM runs, if it runs from one.
    pub parent: Option<String>,
    /// Whether all pages are saved, even if the VM runs from a snapshot.
    #[serde(default)]
    pub whole: bool,
    /// Longest time for the guest to drop its caches, in seconds. Unset: the time that the disk
    /// with the snapshots takes to write the page cache, from 5 s to 120 s. Caches that are not
    /// dropped by then are saved.
    pub drop_s: Option<u32>,
    /// Whether the guest's clock stays behind by the time that the VM was stopped. Unset: the clock
    /// is set to the host's if that time was long.
    #[serde(default)]
    pub keep_clock: bool,
}

impl SaveRequest {
    /// Returns a request with default settings, by which the VM is stopped during the save.
    pub fn new(vm: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            vm: vm.into(),
            name: name.into(),
            ..Self::default()
        }
    }
}

/// Query of `DELETE /v1/snapshots/{name}`: how to remove a snapshot.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct RemoveOptions {
    /// Whether layers that need the snapshot are made complete first.
    #[serde(default)]
    pub merge: bool,
}

/// `POST /v1/vms/{name}/fork`
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkRequest {
    /// Whether the snapshot from which the forks start is kept until somebody removes it. By
    /// default, the daemon removes it when no VM needs it any more.
    #[serde(default)]
    pub keep: bool,
}

/// Answer to `POST /v1/vms/{name}/fork`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ForkReport {
    /// Snapshot of the VM at the instant of the fork; `POST /v1/snapshots/{name}/restore` starts
    /// forks from it.
    pub snapshot: String,
    /// Snapshot that holds the pages which the new one lacks; unset if it has all pages.
    pub parent: Option<String>,
    /// Time for which the VM stood still, in milliseconds.
    pub pause_ms: f64,
    /// Time from the request until the snapshot was complete, in milliseconds.
    pub fork_ms: f64,
    /// Bytes of RAM that the new snapshot holds itself.
    pub own_bytes: u64,
    /// Bytes of RAM that the VM itself shares with the new snapshot since.
    pub shared_bytes: u64,
    /// Reason why the VM shares fewer bytes than the snapshot holds; unset if it shares all that it
    /// has not written since.
    pub not_shared: Option<String>,
}

/// `POST /v1/snapshots/{name}/restore`
#[allow(clippy::struct_excessive_bools)] // what was asked for
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct RestoreRequest {
    /// Name of the restored VM.
    pub vm: String,
    /// Which identities of the VM are renewed.
    #[serde(default)]
    pub renew: Renew,
    /// Whether the VM is started even if another VM with the same memory keeps the same identity.
    #[serde(default)]
    pub force: bool,
    /// Whether the VM is started although the brake is on, or this VM would put it on.
    #[serde(default)]
    pub despite_brake: bool,
    /// Whether the pages that a restored VM accesses first are prefetched, instead of loading each
    /// page when it is accessed.
    #[serde(default)]
    pub prefetch: bool,
    /// Whether the guest's clock continues from the moment of the save. Unset: the clock is set to
    /// the host's when the agent answers.
    #[serde(default)]
    pub keep_clock: bool,
    /// Directory for the VM's own copies of its writable disks (`VM-diskN.qcow2`), which remain
    /// when the VM ends. Unset: writes go to temporary overlays.
    #[schema(value_type = Option<String>)]
    pub disks: Option<PathBuf>,
    /// Host ports to forward into the guest (`[tcp:|udp:][ADDRESS:]PORT:GUEST-PORT`; port 0: any
    /// free port), instead of those of the saved VM.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub forwards: Vec<Forward>,
}

impl RestoreRequest {
    /// Returns a request with default settings, by which the VM continues as the saved one.
    #[must_use]
    pub fn new(vm: impl Into<String>) -> Self {
        Self {
            vm: vm.into(),
            ..Self::default()
        }
    }
}

/// `POST /v1/snapshots/{name}/verify`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct VerifyReport {
    /// Name of the snapshot that was verified.
    pub name: String,
    /// Problems that were found; empty: none.
    pub problems: Vec<String>,
}

/// `POST /v1/snapshots/{name}/push`
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PushBody {
    /// URL of the object store: `file://`, `s3://`, `gs://`, `az://`, `http://` or `https://`.
    pub url: String,
    /// Name of the snapshot in the store; unset: its name here.
    #[serde(default)]
    pub to: Option<String>,
    /// Ed25519 private key in PEM form, with which the snapshot is signed; unset: no signature.
    #[serde(default)]
    pub key: Option<String>,
}

/// `POST /v1/snapshots/{name}/pull`
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PullBody {
    /// URL of the object store.
    pub url: String,
    /// Name of the snapshot in the store; unset: the name that it gets here.
    #[serde(default)]
    pub from: Option<String>,
    /// Trust domain of the snapshot on this host; unset: its VMs share no memory with other VMs.
    #[serde(default)]
    pub domain: Option<String>,
    /// Ed25519 public key in PEM form; a snapshot without a signature of its private key is
    /// refused. Unset: signatures are not checked.
    #[serde(default)]
    pub trust: Option<String>,
    /// Whether a snapshot may bring arguments for QEMU although no signature is checked.
    #[serde(default)]
    pub allow_arguments: bool,
}

/// `POST /v1/remote-snapshots/list` and `POST /v1/remote-snapshots/{name}/remove`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoteStore {
    /// URL of the object store.
    pub url: String,
}

/// Status of a VM's boot snapshot, which is saved right after the boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BootSnapshot {
    /// The guest is still booting.
    Pending,
    /// The boot snapshot exists.
    Ready,
    /// The boot snapshot could not be saved; the text says why.
    Failed(String),
}

/// `POST /v1/vms/{name}/reboot`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RebootRequest {
    /// Whether the VM, disks included, is restored to its state right after its boot, instead of
    /// rebooting the guest.
    #[serde(default)]
    pub from_boot_snapshot: bool,
    /// Longest time until the guest's agent answers again, in seconds.
    pub timeout_s: f64,
}
