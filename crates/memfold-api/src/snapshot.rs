//! Types of the daemon's API for snapshots: requests to save, restore and verify them, and the
//! reports.

use std::num::NonZeroU32;
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

/// Request body of `POST /v1/snapshots`.
#[allow(clippy::struct_excessive_bools)] // what was asked for
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct SaveRequest {
    /// Name of the VM to save.
    pub vm: String,
    /// Name that the snapshot gets.
    pub name: String,
    /// Which of the guest's caches the snapshot keeps.
    #[serde(default)]
    pub keep: KeepChoice,
    /// Whether the VM runs while its RAM is copied. The snapshot is of one instant in either case.
    #[serde(default)]
    pub live: bool,
    /// Whether the snapshot's RAM image is compressed. A compressed snapshot has no parent.
    #[serde(default)]
    pub compress: bool,
    /// Snapshot whose pages the new one refers to instead of saving them again. Unset: the snapshot
    /// from which the VM runs, if it runs from one.
    pub parent: Option<String>,
    /// Whether all pages are saved, even if the VM runs from a snapshot.
    #[serde(default)]
    pub whole: bool,
    /// Longest time for the guest to drop its caches, in seconds; caches that remain are saved.
    /// Unset: the time to write the page cache to the disk with the snapshots, 5 s to 120 s.
    pub drop_s: Option<u32>,
    /// Whether the guest's clock stays behind by the time for which the save stopped the VM.
    /// `false`: after a stop of 100 ms or longer, the guest's clock is set to the host's.
    #[serde(default)]
    pub keep_clock: bool,
    /// Whether the snapshot's memory and device state are encrypted. An encrypted snapshot has no
    /// parent.
    #[serde(default)]
    pub encrypt: bool,
    /// Name of the key with which the snapshot is encrypted. Unset: the only key that the daemon
    /// has.
    pub key: Option<String>,
    /// Whether disks and other files in an encrypted snapshot may be unencrypted. `false`: a save
    /// that would put such files into the snapshot is refused.
    #[serde(default)]
    pub plain_disks: bool,
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

/// Request body of `POST /v1/vms/{name}/fork`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkRequest {
    /// Whether the snapshot from which the forks start is kept until somebody removes it. By
    /// default, the daemon removes it when no VM needs it any more.
    #[serde(default)]
    pub keep: bool,
    /// Whether the response waits until the VM shares the snapshot's memory. By default, that
    /// happens in the background, and forks can be started meanwhile.
    #[serde(default)]
    pub wait: bool,
}

/// Response of `POST /v1/vms/{name}/fork`.
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
    /// Bytes of RAM that the VM itself shares with the new snapshot since; unset without `wait`.
    pub shared_bytes: Option<u64>,
    /// Reason why the VM shares fewer bytes than the snapshot holds; unset if it shares all that it
    /// has not written since, and without `wait`.
    pub not_shared: Option<String>,
}

/// Request body of `POST /v1/snapshots/{name}/restore`.
#[allow(clippy::struct_excessive_bools)] // what was asked for
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct RestoreRequest {
    /// Name of the restored VM.
    pub vm: String,
    /// Which identities of the saved VM are replaced in the restored VM.
    #[serde(default)]
    pub renew: Renew,
    /// Whether the VM is started even if another VM runs from the same snapshot and the guest
    /// cannot renew its identity.
    #[serde(default)]
    pub force: bool,
    /// Whether the VM is started although the brake is on, or would be on with this VM.
    #[serde(default)]
    pub despite_brake: bool,
    /// Whether memfold prefetches the pages that an earlier VM of the snapshot accessed first.
    /// `false`: each page is loaded when the guest accesses it.
    #[serde(default)]
    pub prefetch: bool,
    /// Whether the guest's clock continues from the moment of the save. `false`: the guest's clock
    /// is set to the host's when the agent answers.
    #[serde(default)]
    pub keep_clock: bool,
    /// Directory for the restored VM's own copies of its writable disks (`VM-diskN.qcow2`), which
    /// remain when the VM ends. Unset: the VM writes to temporary overlays.
    #[schema(value_type = Option<String>)]
    pub disks: Option<PathBuf>,
    /// Host ports that are forwarded into the guest, instead of those of the saved VM:
    /// `[tcp:|udp:][ADDRESS:]PORT:GUEST-PORT`; PORT 0: any free port.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub forwards: Vec<Forward>,
    /// Time to live of the VM in seconds, as in a VM's description. Unset: no limit.
    #[serde(default)]
    #[schema(value_type = Option<u32>, minimum = 1)]
    pub ttl_s: Option<NonZeroU32>,
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

/// Response of `POST /v1/snapshots/{name}/verify`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct VerifyReport {
    /// Name of the snapshot that was verified.
    pub name: String,
    /// Problems that were found; empty: none.
    pub problems: Vec<String>,
}

/// Response of `POST /v1/snapshots/{name}/compact`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct CompactReport {
    /// Name of the snapshot, which needs no other snapshot now.
    pub name: String,
    /// Bytes of RAM and of disks that were copied from other snapshots; 0 if the snapshot was
    /// complete before.
    pub copied_bytes: u64,
    /// Bytes of RAM that the snapshot holds itself now.
    pub own_bytes: u64,
    /// Bytes that the snapshot's files use on disk now.
    pub disk_bytes: u64,
}

/// Request body of `POST /v1/snapshots/{name}/rekey`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RekeyRequest {
    /// Name of the new key, among those of the daemon. The daemon needs the old key, too.
    pub key_name: String,
}

/// Response of `POST /v1/snapshots/{name}/rekey`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RekeyReport {
    /// Name of the snapshot.
    pub name: String,
    /// Name of the key with which the snapshot is encrypted now.
    pub key: String,
    /// Name of the key before; unset if the snapshot had this key already.
    pub old_key: Option<String>,
}

/// Request body of `POST /v1/snapshots/{name}/push`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PushBody {
    /// URL of the object store: `file://`, `s3://`, `gs://`, `az://`, `http://` or `https://`.
    pub url: String,
    /// Name that the snapshot gets in the object store; unset: its name on this host.
    #[serde(default)]
    pub to: Option<String>,
    /// Ed25519 private key in PEM form, with which the snapshot is signed; unset: the snapshot is
    /// not signed.
    #[serde(default)]
    pub key: Option<String>,
}

/// Request body of `POST /v1/snapshots/{name}/pull`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PullBody {
    /// URL of the object store.
    pub url: String,
    /// Name of the snapshot in the object store; unset: the name that the snapshot gets on this
    /// host.
    #[serde(default)]
    pub from: Option<String>,
    /// Trust domain of the snapshot on this host; unset: its VMs share no memory with other VMs.
    #[serde(default)]
    pub domain: Option<String>,
    /// Ed25519 public key in PEM form. A snapshot that the matching private key has not signed is
    /// refused. Unset: signatures are not checked.
    #[serde(default)]
    pub trust: Option<String>,
    /// Whether a pulled snapshot may bring arguments for QEMU although no signature is checked.
    #[serde(default)]
    pub allow_arguments: bool,
    /// Whether the request ends as soon as VMs can be started from the snapshot. The rest is then
    /// fetched while they run.
    #[serde(default)]
    pub stream: bool,
}

/// Request body of `POST /v1/remote-snapshots/list` and of
/// `POST /v1/remote-snapshots/{name}/remove`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoteStore {
    /// URL of the object store.
    pub url: String,
}

/// Status of a VM's boot snapshot: a snapshot that memfold saves right after the guest's boot.
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

/// Request body of `POST /v1/vms/{name}/reboot`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct RebootRequest {
    /// Whether memfold restores the VM, disks included, to its state right after its boot. `false`:
    /// the guest reboots.
    #[serde(default)]
    pub from_boot_snapshot: bool,
    /// Longest wait for the guest's agent to answer after the reboot, in seconds, 0 or more.
    pub timeout_s: f64,
}
