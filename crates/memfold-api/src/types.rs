//! What goes over the interface. Units are in the names of fields.

use std::path::PathBuf;

use memfold_fold::EngineStats;
use memfold_ledger as ledger;
use memfold_lend::Durability;
use memfold_libvirt::KnownVm;
use memfold_snapshot::{ClockStep, Keep, Renew, Renewal};
use memfold_vm::Forward;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::lending::SwapPlace;

/// `GET /v1/version`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct VersionInfo {
    /// The daemon's package version.
    pub version: String,
    /// Its process id.
    pub pid: i32,
    /// Where it keeps its VMs.
    #[schema(value_type = String)]
    pub state: PathBuf,
}

/// A VM as `memfold vm list` shows it.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct VmInfo {
    /// Unique on this host.
    pub name: String,
    /// Trust domain; `null`: it shares with nobody.
    pub domain: Option<String>,
    /// QEMU's process.
    pub pid: i32,
    /// Guest RAM in bytes.
    pub ram_bytes: u64,
    /// `started` by memfold, or `attached`.
    pub origin: String,
    /// Its name in libvirt, if that has started it.
    #[serde(default)]
    pub libvirt: Option<String>,
    /// QEMU's version.
    pub qemu: String,
    /// Whether the guest's agent is connected, with its kernel.
    pub agent: Option<String>,
    /// Conditions that the agent reports, in words.
    pub agent_problems: Vec<String>,
    /// Why its RAM is not folded; empty: it is.
    pub fold_problems: Vec<String>,
    /// Why folded pages can be folded again only at a pause; empty: they can any time.
    pub refold_problems: Vec<String>,
    /// What it costs the host besides, such as CPUs that its guest never gives back.
    #[serde(default)]
    pub costs: Vec<String>,
    /// Segments that it maps, in the order of their slots.
    #[serde(default)]
    pub segments: Vec<VmSegment>,
    /// What it got anew when it was restored, if this daemon saw to that.
    #[serde(default)]
    pub renewal: Option<Renewal>,
    /// What its wall clock showed when it went on after it had stood still, and what became of that. Unset: it has not stood still, or keeps
    /// its clock.
    #[serde(default)]
    pub clock: Option<ClockStep>,
    /// Its swap disk, if memfold made one.
    #[serde(default)]
    pub swap: Option<VmSwap>,
    /// The snapshot to which it can go back, if it was started with `boot_snapshot`.
    #[serde(default)]
    pub boot_snapshot: Option<BootSnapshot>,
    /// `running`, or why it is not: QEMU's run state (`paused`, `io-error`, `guest-panicked`, ...: QEMU's `docs/interop/qemu-qmp-ref`,
    /// `RunState`), `starting`, `taking-over`, or `silent` where QEMU does not answer.
    #[serde(default)]
    pub state: String,
    /// What has brought that about, as far as it is known.
    #[serde(default)]
    pub state_cause: Option<String>,
    /// What would have it run again.
    #[serde(default)]
    pub state_fix: Option<String>,
    /// Ports of the host that lead into the guest: `ADDRESS:PORT:GUEST-PORT`.
    #[serde(default)]
    pub forwards: Vec<String>,
    /// What it lacks of the host that the VM in its snapshot had, and one VM alone can have.
    #[serde(default)]
    pub left_out: Vec<String>,
}

impl VmInfo {
    /// What `memfold libvirt status` needs of a VM, if libvirt has started it.
    #[must_use]
    pub fn of_libvirt(&self) -> Option<KnownVm> {
        Some(KnownVm {
            name: self.name.clone(),
            domain: self.libvirt.clone()?,
            fold_problem: self.fold_problems.first().cloned(),
            folds_again: self.refold_problems.is_empty(),
        })
    }
}

/// A VM's swap disk. What lies on it is no part of guest RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmSwap {
    /// Bytes of the disk.
    pub bytes: u64,
    /// Where it is.
    pub place: SwapPlace,
    /// What keeps the bytes if a lender dies; null: nothing is lent.
    pub durability: Option<Durability>,
    /// What lies on lent memory, by lender: first all of one copy, then those of the next.
    pub lent: Vec<LentPart>,
}

/// What one lender holds of a VM's swap disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LentPart {
    /// Who lends.
    pub lender: String,
    /// So much of the disk; rounded up, if it is laid out over several lenders.
    pub bytes: u64,
    /// Which copy this is a part of: 0, or 1 where there are two.
    pub copy: usize,
}

/// A segment that a VM maps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmSegment {
    /// `NAME@GENERATION`.
    pub segment: String,
    /// What the guest does with it.
    pub state: SegmentState,
}

/// What a guest does with a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SegmentState {
    /// It sees the device; nothing is known of more.
    Attached,
    /// It is the guest's root.
    Root,
    /// It lies over the guest's own files.
    Laid,
    /// It was taken off again; the device stays until the VM ends.
    TakenOff,
    /// It could not be laid over the guest's own files, and why.
    Failed(String),
}

/// `POST /v1/segments`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BuildRequest {
    /// Name of the segment.
    pub name: String,
    /// Its trust domain.
    pub domain: String,
    /// One directory or disk image of the daemon's host, packages (`.deb` files, `package:NAME`), or a running VM (`vm:NAME`).
    pub from: Vec<String>,
    /// Globs of paths, beginning with a slash; none: `/usr/**` and `/opt/**`, or everything with `root`.
    #[serde(default)]
    pub include: Vec<String>,
    /// Globs of paths to leave out.
    #[serde(default)]
    pub exclude: Vec<String>,
    /// Take only the best files for the domain's VMs, by what they cache now, in so many bytes.
    #[serde(default)]
    pub top_files_bytes: Option<u64>,
    /// How many VMs are to map it, for that choice; unset: those that run.
    #[serde(default)]
    pub for_vms: Option<u64>,
    /// Build a whole root file system.
    #[serde(default)]
    pub root: bool,
    /// Hold it in memory.
    #[serde(default)]
    pub pinned: bool,
}

/// What a build made.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct BuildResult {
    /// The newest generation.
    pub segment: memfold_segment::Manifest,
    /// Whether it is new; `false`: the newest one held the same files already.
    pub is_new: bool,
}

/// `POST /v1/segments/rank`
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RankRequest {
    /// VMs whose files are ranked; none: all of the domain.
    #[serde(default)]
    pub vms: Vec<String>,
    /// Trust domain; unset: all.
    #[serde(default)]
    pub domain: Option<String>,
    /// How many VMs are to map the segment; unset: as many as cache a file now.
    #[serde(default)]
    pub for_vms: Option<u64>,
    /// Only files of which one of these globs is true; none: `/usr/**` and `/opt/**`.
    #[serde(default)]
    pub include: Vec<String>,
}

/// `POST /v1/vms/{name}/segments`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachSegmentRequest {
    /// `NAME` or `NAME@GENERATION`.
    pub segment: String,
    /// Only attach the device; don't have the guest lay it over its files.
    #[serde(default)]
    pub no_lay: bool,
    /// Have the guest compare all bytes with its own files first, not only names, sizes and times.
    #[serde(default)]
    pub content: bool,
    /// Only if no other VM maps any generation of it, and none may until this VM takes it off or ends: what its guest writes becomes the
    /// next generation (`from` = `vm:NAME`).
    #[serde(default)]
    pub writer: bool,
}

/// What a guest has done with a segment.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct AttachedSegment {
    /// The segment.
    pub segment: VmSegment,
    /// What the agent said of it, if it did something.
    #[schema(value_type = Option<Object>)]
    pub report: Option<serde_json::Value>,
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
    /// Go back to what the VM was right after its boot, disks included, instead of having the guest reboot.
    #[serde(default)]
    pub from_boot_snapshot: bool,
    /// Seconds that the guest has until its agent answers again.
    pub timeout_s: f64,
}

/// `POST /v1/attach`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttachRequest {
    /// QMP socket of a running QEMU.
    #[schema(value_type = String)]
    pub qmp: PathBuf,
    /// Name to give the VM.
    pub name: String,
    /// Trust domain.
    pub domain: Option<String>,
}

/// `POST /v1/vms/{name}/exec`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ExecRequest {
    /// Shell text, run by `/bin/sh -c` in the guest.
    pub script: String,
    /// Longest time it may take, in seconds.
    pub timeout_s: f64,
}

/// What a command in a guest gave. Output that is not UTF-8 has replacement characters.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ExecResult {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Exit code; 128 + signal if it was killed.
    pub code: i32,
}

/// `POST /v1/vms/{name}/stop`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct StopRequest {
    /// Seconds that the guest has to shut down by itself before it is switched off; 0: it is not asked.
    pub timeout_s: f64,
}

/// How a VM was ended.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct StopReport {
    /// The VM.
    pub name: String,
    /// `powered_down`: its guest shut down; `already`: it had ended before; `quit`, or `killed` where QEMU did not answer: it was
    /// switched off.
    pub how: String,
    /// Whether its guest was to shut down and did not in the time that it had.
    pub overdue: bool,
    /// Seconds until it had ended.
    pub took_s: f64,
    /// Why it was switched off, in words.
    pub why: Option<String>,
}

/// `PUT /v1/fold`: fields that are absent stay as they are.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FoldRequest {
    /// Stop folding, or go on. What is folded stays folded.
    pub paused: Option<bool>,
    /// CPU that folding may use over time, in percent of one core (0 to 100).
    pub cpu_percent: Option<f64>,
    /// Pages looked at in a second at most; 0 for no limit.
    pub pages_per_second: Option<u64>,
}

/// `PUT /v1/debt`: fields that are absent stay as they are.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DebtRequest {
    /// What the host keeps for itself: a size (`2G`), or a part of its RAM (`5%`).
    pub reserve: Option<String>,
    /// How much of the debt must be there for guests that call it in at once, in percent (0 to 100; 0: no brake).
    pub cover_percent: Option<f64>,
}

/// `POST /v1/vms`, beside the VM's description.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
pub struct RunOptions {
    /// Start it though the brake is on.
    #[serde(default)]
    pub despite_brake: bool,
}

/// `POST /v1/ksm/start`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KsmStartRequest {
    /// For the VMs of this trust domain; null: the only one whose VMs have mergeable memory.
    #[serde(default)]
    pub domain: Option<String>,
    /// CPU that ksmd may use, in percent of one (above 0, to 95).
    pub cpu_percent: f64,
    /// Time that a full scan is to take, in seconds (1 or more).
    pub target_s: f64,
    /// Have the kernel's advisor set `pages_to_scan` (Linux 6.8).
    #[serde(default)]
    pub advisor: bool,
}

/// `POST /v1/ksm/stop`
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct KsmStopRequest {
    /// Give each merged page its own copy again, which takes as much memory at once as merging saves.
    #[serde(default)]
    pub unmerge: bool,
}

/// `GET /v1/report`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct FullReport {
    /// Where every byte is.
    #[schema(value_type = Object)]
    pub ledger: ledger::Report,
    /// What folding has done.
    pub fold: EngineStats,
}

/// What comes instead, with a status of 400 and above.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// Which condition failed.
    pub error: String,
    /// What would change it, if known.
    pub hint: Option<String>,
    /// Whether this host can't do it at all (the command line exits with 3).
    #[serde(default)]
    pub impossible_here: bool,
}

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
    /// How long the guest may take to drop its caches, in seconds (120 if not given). What it has not dropped by then is saved.
    #[serde(default)]
    pub drop_s: Option<u32>,
    /// Whether the guest's clock stays behind by what the VM stood still. Unset: it is set to the host's if that was long.
    #[serde(default)]
    pub keep_clock: bool,
}

impl SaveRequest {
    /// A save that keeps nothing of what the guest can get again, of a VM that stands still meanwhile.
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
    /// Have its memory at hand that a VM used first of all, instead of one page at a time as it asks for them.
    #[serde(default)]
    pub prefetch: bool,
    /// Whether the guest's clock stays at the moment of the save. Unset: it is set to the host's when the agent answers.
    #[serde(default)]
    pub keep_clock: bool,
    /// A directory that gets the disks which the VM writes, as files of its own (`VM-diskN.qcow2`) that stay when it ends. Unset: its
    /// writes go to temporary overlays.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub disks: Option<PathBuf>,
    /// Ports of the host that lead into the guest (`[tcp:|udp:][ADDRESS:]PORT:GUEST-PORT`; port 0: a free one), in the place of those that the saved VM had.
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
    /// The snapshot.
    pub name: String,
    /// What is wrong with it; empty: nothing.
    pub problems: Vec<String>,
}
