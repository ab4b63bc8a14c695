//! Requests and reports of listing, attaching and stopping VMs, and of running commands in guests.

use std::path::PathBuf;

use memfold_libvirt::KnownVm;
use memfold_snapshot::{ClockStep, Renewal};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::segment::VmSegment;
use crate::snapshot::BootSnapshot;
use crate::swap::VmSwap;

/// A VM as `memfold vm list` shows it.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct VmInfo {
    /// Name of the VM, unique on this host.
    pub name: String,
    /// Trust domain; `null`: the VM shares memory with no other.
    pub domain: Option<String>,
    /// QEMU's process ID.
    pub pid: i32,
    /// Guest RAM in bytes.
    pub ram_bytes: u64,
    /// `started` by memfold, or `attached`.
    pub origin: String,
    /// Name of the domain in libvirt, if libvirt started the VM.
    #[serde(default)]
    pub libvirt: Option<String>,
    /// QEMU's version.
    pub qemu: String,
    /// Kernel version of the guest, if its agent is connected.
    pub agent: Option<String>,
    /// Problems that the agent reports, as text.
    pub agent_problems: Vec<String>,
    /// Reasons why the VM's RAM is not folded; empty: it is.
    pub fold_problems: Vec<String>,
    /// Reasons why folded pages can be folded again only while the VM is paused; empty: at any
    /// time.
    pub refold_problems: Vec<String>,
    /// Settings that cost the host other resources, such as CPUs that the guest never yields.
    #[serde(default)]
    pub costs: Vec<String>,
    /// Segments that the VM maps, in the order of their slots.
    #[serde(default)]
    pub segments: Vec<VmSegment>,
    /// Identities renewed when the VM was restored, if this daemon restored it.
    #[serde(default)]
    pub renewal: Option<Renewal>,
    /// Correction of the guest's wall clock after the VM was stopped. Unset: the VM was not
    /// stopped, or keeps its clock.
    #[serde(default)]
    pub clock: Option<ClockStep>,
    /// Swap disk, if memfold created one.
    #[serde(default)]
    pub swap: Option<VmSwap>,
    /// Status of the boot snapshot, if the VM was started with `boot_snapshot`.
    #[serde(default)]
    pub boot_snapshot: Option<BootSnapshot>,
    /// `running`, or why it is not: QEMU's run state (`paused`, `io-error`, `guest-panicked`, ...:
    /// QEMU's `docs/interop/qemu-qmp-ref`, `RunState`), `starting`, `taking-over`, or `silent`
    /// where QEMU does not answer.
    #[serde(default)]
    pub state: String,
    /// Cause of the state, if known.
    #[serde(default)]
    pub state_cause: Option<String>,
    /// Remedy by which the VM would run again.
    #[serde(default)]
    pub state_fix: Option<String>,
    /// Host ports forwarded into the guest: `ADDRESS:PORT:GUEST-PORT`.
    #[serde(default)]
    pub forwards: Vec<String>,
    /// Host resources that the VM in its snapshot had and this VM lacks, because only one VM can
    /// have them.
    #[serde(default)]
    pub left_out: Vec<String>,
}

impl VmInfo {
    /// Returns the facts for `memfold libvirt status`, if libvirt started the VM.
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
    /// Timeout in seconds; the command is then killed.
    pub timeout_s: f64,
}

/// Result of a command in a guest. Invalid UTF-8 in its output is replaced.
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
    /// Time for the guest to shut down before QEMU is ended, in seconds; 0: the guest is not asked.
    pub timeout_s: f64,
}

/// Result of stopping a VM.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct StopReport {
    /// Name of the VM.
    pub name: String,
    /// `powered_down`: the guest shut down; `already`: the VM had ended before; `quit`: QEMU was
    /// told to quit; `killed`: QEMU did not answer and was killed.
    pub how: String,
    /// Whether the guest was asked to shut down and did not do so in time.
    pub overdue: bool,
    /// Time until the VM had ended, in seconds.
    pub took_s: f64,
    /// Why QEMU was told to quit or killed, as text.
    pub why: Option<String>,
}

/// `POST /v1/vms`, beside the VM's description.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
pub struct RunOptions {
    /// Whether to start the VM although the brake is on.
    #[serde(default)]
    pub despite_brake: bool,
}
