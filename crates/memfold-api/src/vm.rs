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
    /// What its wall clock showed when it went on after it had stood still, and what became of
    /// that. Unset: it has not stood still, or keeps its clock.
    #[serde(default)]
    pub clock: Option<ClockStep>,
    /// Its swap disk, if memfold made one.
    #[serde(default)]
    pub swap: Option<VmSwap>,
    /// The snapshot to which it can go back, if it was started with `boot_snapshot`.
    #[serde(default)]
    pub boot_snapshot: Option<BootSnapshot>,
    /// `running`, or why it is not: QEMU's run state (`paused`, `io-error`, `guest-panicked`, ...:
    /// QEMU's `docs/interop/qemu-qmp-ref`, `RunState`), `starting`, `taking-over`, or `silent`
    /// where QEMU does not answer.
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
    /// Seconds that the guest has to shut down by itself before it is switched off; 0: it is not
    /// asked.
    pub timeout_s: f64,
}

/// How a VM was ended.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct StopReport {
    /// The VM.
    pub name: String,
    /// `powered_down`: its guest shut down; `already`: it had ended before; `quit`, or `killed`
    /// where QEMU did not answer: it was switched off.
    pub how: String,
    /// Whether its guest was to shut down and did not in the time that it had.
    pub overdue: bool,
    /// Seconds until it had ended.
    pub took_s: f64,
    /// Why it was switched off, in words.
    pub why: Option<String>,
}

/// `POST /v1/vms`, beside the VM's description.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
pub struct RunOptions {
    /// Start it though the brake is on.
    #[serde(default)]
    pub despite_brake: bool,
}
