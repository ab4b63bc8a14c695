//! Steers KSM (the kernel's page merging) for the VMs of one trust domain: sets how fast ksmd scans
//! their memory, within a CPU budget. When steering ends, the kernel's earlier settings are
//! restored.
//!
//! ```text
//!   start --- refused while memory outside the trust domain is mergeable --- settings recorded, ksmd runs
//!     each second: mergeable memory outside?  yes: run = 0, until it is gone
//!                  a live save?       yes: run = 0 (written by the save), until the save ends
//!                  another program wrote run?  run is left alone, until it is 1 again
//!                  else: pages_to_scan, sleep_millisecs by the controller (`ksm::steer`)
//!   stop, the daemon's end, the next daemon after a kill: the old settings are restored (but not run, if another
//!     program wrote it); merged pages stay merged
//! ```
//! If 0 is written to KSM's file `run`, merged pages stay merged. If 2 is written, they are
//! unmerged, which needs as much memory at once as merging has saved. So memfold writes 2 only if
//! the operator asks for it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use memfold_api::{KsmStartRequest, KsmStopRequest};
use memfold_ksm::explain::Steered;
use memfold_ksm::processes;
use memfold_ksm::steer::Goal;
use memfold_ksm::{
    self as ksm, Controls, Explanation, Facts, Known, KsmError, NOTES, Names, Overview, Paused,
};
use memfold_snapshot::SnapshotError;
use memfold_vm::{MergeChoice, VmSpec};
use parking_lot::Mutex;
use tracing::{info, warn};

use self::steered::{LONGEST_TARGET_S, Ours, SteeredKsm, notes};
use crate::debt::DebtWatch;
use crate::error::{self, DaemonError, check};
use crate::locks::{MergingRight, StartRight};
use crate::machine::Machine;
use crate::threads;
use crate::vm_registry::VmRegistry;

mod steered;

/// Longest time that a live save waits for another daemon's live save, which also stops KSM.
const MERGING_PATIENCE: Duration = Duration::from_secs(60);

/// Time between two measurements of KSM.
const INTERVAL: Duration = Duration::from_secs(1);

/// Service that steers KSM (the kernel's page merging) for one trust domain. Steering is off until
/// [`Self::start`].
#[derive(Debug)]
pub struct KsmSteering {
    registry: Arc<VmRegistry>,
    debt: Arc<DebtWatch>,
    /// Held while KSM is stopped for a live save, and while steering begins or ends.
    merging: Mutex<()>,
    /// Steering in progress; `None` while the daemon does not steer KSM.
    steered: Mutex<Option<SteeredKsm>>,
}

/// Keeps KSM stopped for a live save, until it is dropped.
pub(crate) struct MergingStops<'a> {
    /// KSM's settings, if this daemon did not steer KSM; else steering resumes in the end.
    paused: Option<Paused>,
    steering: &'a KsmSteering,
    /// Admits one live save at a time: the end of one save would resume KSM during another.
    _alone: MergingRight<'a>,
}

impl Drop for MergingStops<'_> {
    fn drop(&mut self) {
        if self.paused.is_some() {
            return;
        }
        if let Some(steered) = &mut *self.steering.steered.lock() {
            steered.saving = false;
            steered.look(&self.steering.ours(&steered.domain));
        }
    }
}

/// Restores KSM's settings if an earlier daemon died while it steered KSM.
pub(crate) fn restore() {
    match ksm::restore_leftover(NOTES.as_ref()) {
        Ok(false) => {}
        Ok(true) => info!(
            "KSM's settings restored after an earlier daemon died; 'memfold ksm start' steers KSM again"
        ),
        Err(KsmError::Busy(_)) => {
            info!("KSM settings not restored: another memfold process uses KSM");
        }
        Err(error) => {
            warn!(%error, "cannot restore KSM settings; the daemon tries again at its next start");
        }
    }
}

fn refused(why: impl std::fmt::Display, fix: impl Into<String>) -> DaemonError {
    error::refused(format!("cannot steer KSM: {why}"), fix)
}

impl KsmSteering {
    pub(crate) fn new(registry: Arc<VmRegistry>, debt: Arc<DebtWatch>) -> Self {
        Self {
            registry,
            debt,
            merging: Mutex::default(),
            steered: Mutex::default(),
        }
    }

    fn ours(&self, domain: &str) -> Ours {
        let machines = self.registry.machines();
        let vms = machines.iter();
        let (members, strangers): (Vec<_>, Vec<_>) = vms.partition(|m| m.domain() == Some(domain));
        Ours {
            members: members.iter().map(|m| m.raw_pid()).collect(),
            strangers: strangers.iter().map(|m| m.raw_pid()).collect(),
        }
    }

    /// Takes the right to begin, end or interrupt KSM's merging.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] while a VM is saved live.
    fn alone(&self) -> Result<MergingRight<'_>, DaemonError> {
        MergingRight::try_take(|| self.merging.try_lock()).ok_or_else(|| {
            refused(
                "a VM is being saved live, and KSM must be stopped meanwhile",
                "wait until the snapshot is complete",
            )
        })
    }

    /// Returns the state of KSM on this host, and of this daemon's steering of KSM.
    pub fn overview(&self) -> Result<Overview, DaemonError> {
        let named = |m: &Arc<Machine>| {
            let vm = (m.name().to_owned(), m.domain().map(str::to_owned));
            (m.raw_pid(), vm)
        };
        let names: Names = self.registry.machines().iter().map(named).collect();
        let mut overview = Overview::now(Some(&names))?;
        overview.steering = self.steered.lock().as_ref().map(SteeredKsm::view);
        Ok(overview)
    }

    /// Starts to steer KSM with the CPU budget and scan time of `request`, or changes them if KSM
    /// is steered already.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] if a VM is being started or saved live, or if memory outside one
    /// trust domain is mergeable; [`DaemonError::Braked`] while the brake is on.
    pub fn start(self: &Arc<Self>, request: &KsmStartRequest) -> Result<Overview, DaemonError> {
        if !rustix::process::geteuid().is_root() {
            return Err(refused(
                "only root may change KSM's settings, and this daemon runs without root's rights",
                "start KSM with a daemon that runs as root",
            ));
        }
        let goal = goal(request)?;
        let _alone = self.alone()?;
        // No VM may start between this check of mergeable memory and the start of ksmd.
        let _none_starts = self.registry.none_starts().ok_or_else(|| {
            refused(
                "a VM is being started, and whether its memory may merge is not known yet",
                "wait until the VM runs, or stop it if its QEMU hangs ('memfold vm list' shows the VM)",
            )
        })?;
        if let Some(why) = self.debt.braked()? {
            return Err(DaemonError::Braked {
                what: "KSM is not steered".into(),
                why,
            });
        }
        let domain = self.only_domain(request.domain.as_deref())?;
        let has_advisor = Controls::default().text("advisor_mode")?.is_some();
        if request.advisor && !has_advisor {
            return Err(refused(
                "this kernel has no advisor",
                "leave out --advisor, or use Linux 6.8 or newer",
            ));
        }
        let mut steered = self.steered.lock();
        if let Some(old) = steered.as_ref().filter(|old| old.domain != domain) {
            return Err(refused(
                format!("KSM is already steered for trust domain '{}'", old.domain),
                "run 'memfold ksm stop' first; KSM serves one trust domain a host",
            ));
        }
        // Dropping the old guard first restores the old settings, so that the new guard records
        // those.
        let mut kept_out = BTreeSet::new();
        if let Some(mut old) = steered.take() {
            kept_out = std::mem::take(&mut old.kept_out);
            old.end(false)?;
        }
        let ours = self.ours(&domain);
        info!(
            domain,
            cpu_percent = request.cpu_percent,
            "memfold now steers KSM for a trust domain"
        );
        let mut new = SteeredKsm::start(domain, goal, request.advisor, ours)?;
        new.kept_out = kept_out;
        let began = new.began;
        *steered = Some(new);
        drop(steered);
        let steering = Arc::downgrade(self);
        threads::begin("ksm-steer", move || keep_steering(&steering, began))
            .map_err(|_| DaemonError::Internal("no thread to steer KSM"))?;
        self.overview()
    }

    /// Determines the trust domain whose memory KSM is to merge; `asked`: the requested one.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] if memory outside this domain is mergeable.
    fn only_domain(&self, asked: Option<&str>) -> Result<String, DaemonError> {
        let mergeable = processes::mergeable(Path::new("/proc"))?;
        let machines = self.registry.machines();
        let mut domains: BTreeMap<&str, &str> = BTreeMap::new();
        for process in &mergeable {
            let vm = machines.iter().find(|m| m.raw_pid() == process.pid);
            match vm.map(|m| (m.name(), m.domain())) {
                Some((name, Some(domain))) => {
                    domains.entry(domain).or_insert(name);
                }
                Some((name, None)) => {
                    return Err(refused(
                        format!(
                            "VM '{name}' has mergeable memory and no trust domain, and KSM merges all mergeable memory of a host"
                        ),
                        "end the VM, or start it with --domain or with --merge never",
                    ));
                }
                None => {
                    return Err(refused(
                        format!(
                            "process {} ({}) has mergeable memory and is not a VM of this daemon, and KSM merges all mergeable memory of a host",
                            process.pid, process.comm
                        ),
                        "end that process, or have it offer no memory to KSM (QEMU: -machine mem-merge=off), or attach it if it is a QEMU: memfold vm attach QMP-SOCKET --name NAME --domain D",
                    ));
                }
            }
        }
        let first = domains.keys().next().copied();
        let Some(wanted) = asked.or(first) else {
            return Err(refused(
                "no VM has mergeable memory",
                "start VMs with --domain, or name the trust domain: --domain D",
            ));
        };
        memfold_vm::check_name("domain", wanted)
            .map_err(|error| DaemonError::BadRequest(error.to_string()))?;
        if domains.keys().any(|domain| *domain != wanted) {
            let named = |(domain, vm): (&&str, &&str)| format!("'{domain}' (VM '{vm}')");
            let list: Vec<String> = domains.iter().map(named).collect();
            return Err(refused(
                format!(
                    "VMs of trust domain {} have mergeable memory, and KSM merges all mergeable memory of a host; KSM may run for one trust domain only",
                    list.join(" and ")
                ),
                format!(
                    "end VMs outside '{wanted}', or restart them with --merge never; while KSM is steered, memfold starts VMs of other trust domains that way by itself"
                ),
            ));
        }
        Ok(wanted.to_owned())
    }

    /// Ends steering of KSM. Also unmerges all merged pages if the request says so.
    pub fn stop(&self, request: &KsmStopRequest) -> Result<Overview, DaemonError> {
        let _alone = self.alone()?;
        let Some(old) = self.steered.lock().take() else {
            return Err(refused(
                "this daemon does not steer KSM",
                "run 'memfold ksm start' to steer KSM; to stop KSM that another program runs: echo 0 > /sys/kernel/mm/ksm/run",
            ));
        };
        let domain = old.domain.clone();
        old.end(request.unmerge)?;
        info!(domain, "memfold no longer steers KSM");
        self.overview()
    }

    /// Ends steering and restores KSM's settings, because the daemon ends.
    pub(crate) fn end(&self) {
        let Some(old) = self.steered.lock().take() else {
            return;
        };
        let domain = old.domain.clone();
        match old.end(false) {
            Ok(()) => info!(
                domain,
                "memfold no longer steers KSM; KSM's settings restored"
            ),
            Err(error) => {
                warn!(%error, "cannot restore KSM settings; the daemon tries again at its next start");
            }
        }
    }

    /// Returns whether this daemon steers KSM.
    pub(crate) fn is_steered(&self) -> bool {
        self.steered.lock().is_some()
    }

    /// Explains why a VM's memory merges, or why it does not.
    pub(crate) fn explain(&self, name: &str) -> Result<Explanation, DaemonError> {
        let machine = self.registry.machine(name)?;
        let known = Known {
            name: machine.name().to_owned(),
            domain: machine.domain().map(str::to_owned),
            ram: machine.ram_ranges(),
        };
        let steered = self.steered.lock().as_ref().map(|steered| Steered {
            domain: steered.domain.clone(),
            held: steered.still(),
            scans: steered.scans(),
        });
        let facts = Facts::read(
            &Controls::default(),
            Path::new("/proc"),
            machine.raw_pid(),
            Some(&known),
            steered,
        )?;
        Ok(ksm::weigh(&facts))
    }

    /// Excludes the memory of a VM that is about to be started from KSM, if KSM is steered for
    /// another trust domain. The `StartRight` prevents steering from beginning at the same time.
    pub(crate) fn keep_from_merging(&self, spec: &mut VmSpec, _: &StartRight<'_>) {
        let mut steered = self.steered.lock();
        let Some(steered) = &mut *steered else { return };
        if spec.merges() && spec.domain.as_ref() != Some(&steered.domain) {
            info!(
                vm = spec.name,
                domain = steered.domain,
                "VM started with mem-merge=off: KSM now merges only VMs of another trust domain"
            );
            spec.merge = MergeChoice::Never;
            steered.kept_out.insert(spec.name.clone());
        }
    }

    /// Stops KSM's merging because of the brake (`why`: the brake's reason), or resumes it
    /// (`None`).
    pub(crate) fn brake(&self, why: Option<String>) {
        if let Some(steered) = &mut *self.steered.lock() {
            // The reason stays as it was when the brake came on: its figures change each second,
            // and each change would be logged.
            if steered.braked.is_some() != why.is_some() {
                steered.braked = why;
            }
        }
    }

    /// Stops KSM until the result is dropped, because a page that KSM merges loses the write
    /// protection that a live save needs.
    ///
    /// # Errors
    ///
    /// [`SnapshotError::Busy`] if another process has KSM for 60 s, [`SnapshotError::Impossible`]
    /// if KSM cannot be stopped.
    pub(crate) fn stop_merging(&self) -> Result<MergingStops<'_>, DaemonError> {
        let alone = MergingRight::take(|| self.merging.lock());
        let end = Instant::now() + MERGING_PATIENCE;
        loop {
            match self.still(&alone) {
                Ok(paused) => {
                    return Ok(MergingStops {
                        paused,
                        steering: self,
                        _alone: alone,
                    });
                }
                // Another daemon may be saving a VM live; its save soon ends.
                Err(KsmError::Busy(_)) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(error) => {
                    let why = format!(
                        "cannot stop KSM for a live snapshot ({error}); save the VM without --live"
                    );
                    return Err(match error {
                        KsmError::Busy(_) => SnapshotError::Busy(why),
                        _ => SnapshotError::Impossible(why),
                    }
                    .into());
                }
            }
        }
    }

    /// Stops KSM. Returns what restores KSM's settings, if this daemon does not steer KSM.
    fn still(&self, _: &MergingRight<'_>) -> Result<Option<Paused>, KsmError> {
        if let Some(steered) = &mut *self.steered.lock() {
            if steered.controls.number("run")? == Some(1) {
                steered.stop()?;
            }
            steered.saving = true;
            return Ok(None);
        }
        ksm::pause(&Controls::default(), notes()?).map(Some)
    }
}

/// Measures KSM each second, until the steering that began at `began` has ended.
fn keep_steering(steering: &Weak<KsmSteering>, began: Instant) {
    let look = || {
        let steering = steering.upgrade()?;
        let is_same = |steered: &SteeredKsm| steered.began == began;
        let domain = {
            let steered = steering.steered.lock();
            steered.as_ref().filter(|s| is_same(s))?.domain.clone()
        };
        let ours = steering.ours(&domain);
        let mut steered = steering.steered.lock();
        steered.as_mut().filter(|s| is_same(s))?.look(&ours);
        Some(())
    };
    std::thread::sleep(INTERVAL);
    while look().is_some() {
        std::thread::sleep(INTERVAL);
    }
}

fn goal(request: &KsmStartRequest) -> Result<Goal, DaemonError> {
    let cpu = request.cpu_percent;
    let range =
        "more than 0, and 95 at most: ksmd is one thread, and must sleep for its settings to hold";
    check("cpu_percent", cpu, cpu > 0.0 && cpu <= 95.0, range)?;
    let target = request.target_s;
    let (wanted, range) = (1.0..=LONGEST_TARGET_S, format!("1 to {LONGEST_TARGET_S}"));
    check("target_s", target, wanted.contains(&target), &range)?;
    Ok(Goal {
        cpu_share: cpu / 100.0,
        target: Duration::from_secs_f64(target),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(cpu_percent: f64, target_s: f64) -> KsmStartRequest {
        KsmStartRequest {
            domain: None,
            cpu_percent,
            target_s,
            advisor: false,
        }
    }

    #[test]
    fn a_ksm_goal_out_of_range_is_refused_and_the_error_names_the_range() {
        assert!(goal(&request(20.0, 120.0)).is_ok());
        for (cpu, target, word) in [
            (0.0, 120.0, "more than 0"),
            (96.0, 120.0, "95 at most"),
            (f64::NAN, 120.0, "95"),
            (20.0, 0.5, "1 to 86400"),
            (20.0, f64::INFINITY, "1 to 86400"),
        ] {
            let error = goal(&request(cpu, target)).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
