//! Types of the daemon's API for VMs: requests to list, attach and stop them and to run commands in
//! guests, and the reports.

use std::path::PathBuf;

use memfold_libvirt::KnownVm;
use memfold_snapshot::{ClockStep, Renewal};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::lending::VmSwap;
use crate::segment::VmSegment;
use crate::snapshot::BootSnapshot;

/// A VM as `memfold vm list` shows it.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct VmInfo {
    /// Name of the VM, unique on this host.
    pub name: String,
    /// Trust domain of the VM; `null`: the VM shares memory with no other.
    pub domain: Option<String>,
    /// Process ID of the VM's QEMU.
    pub pid: i32,
    /// Size of the VM's guest RAM, in bytes, without memory that virtio-mem can plug.
    pub ram_bytes: u64,
    /// Origin of the VM: `started` if memfold started the VM, or `attached`; `defined` for a VM
    /// that is off, which only `memfold vm list` lists.
    pub origin: String,
    /// Name of the domain in libvirt, if libvirt started the VM.
    pub libvirt: Option<String>,
    /// Version of the VM's QEMU.
    pub qemu: String,
    /// Kernel version of the guest, as the guest's agent reports it; unset if no agent is
    /// connected.
    pub agent: Option<String>,
    /// Seconds until the VM is switched off because nobody has extended its time to live; unset:
    /// it has no time to live.
    #[serde(default)]
    pub ttl_left_s: Option<f64>,
    /// Problems that the guest's agent reports, as text.
    pub agent_problems: Vec<String>,
    /// What the guest's owner lets the host do in the guest, as words of the agent's configuration,
    /// such as `exec`; unset if no agent is connected, or if it is older and allows everything.
    pub allowed: Option<Vec<String>>,
    /// Reasons why memfold does not fold the VM's RAM; empty: memfold folds it.
    pub fold_problems: Vec<String>,
    /// Reasons why pages that the guest rewrote can be folded again only while the VM is paused;
    /// empty: they can be folded again at any time.
    pub refold_problems: Vec<String>,
    /// Settings by which the VM burdens the host, as text: for example, CPUs that the guest never
    /// yields.
    #[serde(default)]
    pub costs: Vec<String>,
    /// Segments that the VM maps, in the order of their device slots in QEMU.
    #[serde(default)]
    pub segments: Vec<VmSegment>,
    /// Identities that were renewed when the VM was restored; unset if this daemon did not restore
    /// the VM.
    pub renewal: Option<Renewal>,
    /// Correction of the guest's wall clock after the VM was stopped. Unset: the VM was not
    /// stopped, or keeps its clock.
    pub clock: Option<ClockStep>,
    /// The VM's swap disk, if memfold created one.
    pub swap: Option<VmSwap>,
    /// Status of the VM's boot snapshot; unset if the VM's description did not ask for one.
    pub boot_snapshot: Option<BootSnapshot>,
    /// State of the VM: `running`; another run state of QEMU (`paused`, `io-error`,
    /// `guest-panicked`, ...: QEMU's `docs/interop/qemu-qmp-ref`, `RunState`); `starting`;
    /// `taking-over`; `silent` if QEMU does not answer; or `off`.
    #[serde(default)]
    pub state: String,
    /// Cause of the VM's `state`, as text, if known.
    pub state_cause: Option<String>,
    /// Action that would make the VM run again, as text.
    pub state_fix: Option<String>,
    /// Host ports forwarded into the guest: `ADDRESS:PORT:GUEST-PORT`.
    #[serde(default)]
    pub forwards: Vec<String>,
    /// Network of the guest's card, if memfold made one: `user`, `bridge=NAME`, `macvtap=NAME`, or
    /// `disconnected`.
    pub network: Option<String>,
    /// MAC address of the guest's card; unset: that of all cards in user-mode networks.
    pub mac: Option<String>,
    /// Host resources that the saved VM had and this restored VM lacks, because only one VM can
    /// have each of them.
    #[serde(default)]
    pub left_out: Vec<String>,
}

impl VmInfo {
    /// Returns what `memfold libvirt status` shows about this VM; `None` if libvirt did not start
    /// the VM.
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

/// Request body of `POST /v1/attach`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttachRequest {
    /// Path of the QMP socket of a running QEMU.
    #[schema(value_type = String)]
    pub qmp: PathBuf,
    /// Name that the VM gets in memfold.
    pub name: String,
    /// Trust domain of the VM; null: the VM shares memory with no other.
    pub domain: Option<String>,
}

/// Request body of `POST /v1/vms/{name}/exec`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ExecRequest {
    /// Text of a shell script, which `/bin/sh -c` runs in the guest.
    pub script: String,
    /// Time limit of the command in seconds, 0 or more. A command that runs longer is killed.
    pub timeout_s: f64,
}

/// Result of a command that ran in a guest. Invalid UTF-8 in the command's output is replaced.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ExecResult {
    /// Standard output of the command.
    pub stdout: String,
    /// Standard error of the command.
    pub stderr: String,
    /// Exit code of the command; 128 + signal if it was killed.
    pub code: i32,
}

/// Request body of `POST /v1/vms/{name}/exec/stream`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecStreamRequest {
    /// Text of a shell script, which `/bin/sh -c` runs in the guest; empty with `copy`.
    #[serde(default)]
    pub script: String,
    /// Copy of files that the guest makes, instead of running a script; null: it runs the script.
    pub copy: Option<GuestCopy>,
    /// Whether the client sends standard input; otherwise the command's input is empty.
    #[serde(default)]
    pub input: bool,
    /// Terminal of the command; null: the command has pipes.
    pub terminal: Option<ExecTerminal>,
}

/// Copy of files between a guest and the client, through the standard input or output of a streamed
/// command. Archives are tar archives as `memfold vm cp` makes them.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GuestCopy {
    /// What the guest does.
    pub kind: GuestCopyKind,
    /// Absolute path in the guest. `receive_archive`: path of the copy, or of the directory for it.
    pub path: String,
    /// Name of the copy in a directory; only with `receive_archive`.
    pub name: Option<String>,
}

/// What a guest does to copy files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum GuestCopyKind {
    /// Writes a file or directory to standard output, as an archive.
    SendArchive,
    /// Writes a file to standard output.
    SendFile,
    /// Makes a file or directory from the archive on standard input.
    ReceiveArchive,
}

/// Terminal of a command that runs in a guest.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecTerminal {
    /// Type of the terminal, for the environment variable `TERM`, such as `xterm-256color`.
    pub kind: String,
    /// Number of rows, in characters.
    pub rows: u16,
    /// Number of columns, in characters.
    pub columns: u16,
}

/// Value of the header `upgrade` of `POST /v1/vms/{name}/console`.
pub const CONSOLE_PROTOCOL: &str = "memfold-console";

/// Logs of a VM: the newest part of each, at most 1 MiB. Invalid UTF-8 is replaced.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct VmLogs {
    /// Output of QEMU.
    pub qemu: String,
    /// Output of the VM's serial console, as the guest wrote it, with escape sequences.
    pub console: String,
}

/// Request body of `POST /v1/vms/{name}/stop`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct StopRequest {
    /// Time for the guest to shut down, in seconds, after which QEMU is ended. 0: QEMU is ended
    /// without asking the guest.
    pub timeout_s: f64,
}

/// Result of stopping a VM.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct StopReport {
    /// Name of the VM that was stopped.
    pub name: String,
    /// How the VM ended: `powered_down`: the guest shut down; `already`: the VM had ended before;
    /// `quit`: QEMU was told to quit; `killed`: QEMU did not answer and was killed.
    pub how: String,
    /// Whether the guest was asked to shut down and did not do so in time.
    pub overdue: bool,
    /// Time from the request to the VM's end, in seconds.
    pub took_s: f64,
    /// Why QEMU was told to quit or was killed, as text; null: it was not.
    pub why: Option<String>,
}

/// Query parameters of `POST /v1/vms`, whose body describes the VM.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct RunOptions {
    /// Whether the VM is started although the brake is on.
    #[serde(default)]
    pub despite_brake: bool,
}

/// Request body of `POST /v1/libvirt/attach` and of `POST /v1/libvirt/disable`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LibvirtRequest {
    /// Name of the domain in libvirt.
    pub domain: String,
}

/// Request body of `POST /v1/libvirt/enable`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LibvirtEnableRequest {
    /// Name of the domain in libvirt.
    pub domain: String,
    /// Trust domain of the VM; null: the VM shares memory with no other.
    pub trust_domain: Option<String>,
}
