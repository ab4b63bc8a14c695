//! KSM, steered by the daemon: for the VMs of one trust domain, within a CPU budget, and put back as it was.
//!
//! ```text
//!   start --- refused while memory of others may merge --- settings noted, ksmd runs
//!     each second: memory of others?  yes: run = 0, until it is gone
//!                  a live save?       yes: run = 0 (the save did that), until it is over
//!                  somebody else wrote run?  hands off, until it is 1 again
//!                  else: pages_to_scan, sleep_millisecs by the controller (`ksm::steer`)
//!   stop, the daemon's end, the next daemon after a kill: the settings as they were; what is merged stays merged
//! ```
//! `run` = 0 keeps what is merged; only `run` = 2 takes it apart, and needs as much memory at once as merging has saved. So nothing
//! here writes 2 but a stop that asks for it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use memfold_api::{KsmStartRequest, KsmStopRequest};
use memfold_ksm::explain::Steered;
use memfold_ksm::pressure::Pressure;
use memfold_ksm::processes::{self, Process};
use memfold_ksm::steer::{Decision, Goal, Sample, Steer};
use memfold_ksm::{
    self as ksm, Controls, Explanation, Facts, Guard, Known, KsmError, Ksmd, Merged, NOTES, Names,
    Overview, Paused, Settings, Status, Steering,
};
use memfold_vm::{MergeChoice, VmSpec};
use tracing::{info, warn};

use super::machine::Machine;
use super::{Daemon, DaemonError};

/// Time between two looks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Longest target, in seconds: the advisor's knob takes no more (`mm/ksm.c`).
const LONGEST_TARGET_S: f64 = 86_400.0;

/// Why KSM stands still though it is steered.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Held {
    /// Memory of others may merge.
    Others(String),
    /// Somebody else wrote `run`.
    Overruled(u64),
    /// The brake is on.
    Braked(String),
    /// Whose memory may merge can't be found out.
    Blind(String),
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Others(who) => write!(
                f,
                "{who}; what is merged stays merged, and KSM goes on when that memory is gone"
            ),
            Self::Braked(why) => write!(
                f,
                "the brake is on ({why}); what is merged stays merged, and KSM goes on when there is enough again"
            ),
            Self::Blind(why) => write!(
                f,
                "{why}; what is merged stays merged, and KSM goes on when that process does"
            ),
            Self::Overruled(run) => write!(
                f,
                "somebody else wrote {run} to /sys/kernel/mm/ksm/run; steering goes on when it is 1 again"
            ),
        }
    }
}

/// KSM while the daemon steers it.
#[derive(Debug)]
pub(super) struct SteeredKsm {
    domain: String,
    goal: Goal,
    advisor: bool,
    controls: Controls,
    guard: Guard,
    ksmd: Ksmd,
    steer: Steer,
    began: Instant,
    /// ksmd's CPU time and `full_scans` when it began.
    at_start: (Duration, u64),
    /// ksmd's CPU time now.
    cpu: Duration,
    full_scans: u64,
    /// The domain's VMs, and how many have come.
    members: BTreeSet<i32>,
    arrivals: u64,
    held: Option<Held>,
    /// Why nothing more may be shared, while that is so.
    braked: Option<String>,
    /// A VM is being saved live.
    saving: bool,
    /// `run` is 0 because this wrote it.
    stopped: bool,
    decision: Option<Decision>,
    /// What was written last, by the control's name.
    written: BTreeMap<&'static str, u64>,
    /// Controls that others have written meanwhile.
    contested: BTreeSet<&'static str>,
    kept_out: BTreeSet<String>,
}

/// Processes of this daemon's VMs.
struct Ours {
    /// Of the domain that KSM is steered for.
    members: BTreeSet<i32>,
    /// Of another domain, or of none.
    strangers: BTreeSet<i32>,
}

/// KSM stands still, until this is dropped.
pub(super) enum Still<'a> {
    /// It was not steered.
    Paused(#[expect(dead_code, reason = "held, not used")] Box<Paused>),
    /// It was; steering goes on then.
    Steered(&'a Daemon),
}

impl Drop for Still<'_> {
    fn drop(&mut self) {
        if let Self::Steered(daemon) = self {
            if let Some(steered) = &mut *daemon.steered() {
                steered.saving = false;
                steered.look(&daemon.ours(&steered.domain));
            }
        }
    }
}

/// Puts back what a daemon that died had set.
pub(super) fn restore() {
    match ksm::restore_leftover(NOTES.as_ref()) {
        Ok(false) => {}
        Ok(true) => info!(
            "KSM's settings are put back as they were before a memfold that died changed them; 'memfold ksm start' steers it again"
        ),
        Err(KsmError::Busy(_)) => info!("another memfold uses KSM"),
        Err(error) => warn!(%error, "KSM's settings were left changed"),
    }
}

impl SteeredKsm {
    fn start(domain: String, goal: Goal, advisor: bool, ours: Ours) -> Result<Self, KsmError> {
        let controls = Controls::default();
        let now = controls.settings()?;
        let notes = Path::new(NOTES);
        std::fs::create_dir_all(notes).map_err(|source| KsmError::Note {
            path: notes.into(),
            source,
        })?;
        let ksmd = Ksmd::find().ok_or_else(|| KsmError::Missing("/proc/*/comm: ksmd".into()))?;
        let status = Status::read(&controls)?;
        let (cpu, full_scans) = (ksmd.cpu_time()?, status.full_scans.unwrap_or(0));
        let guard = Guard::take_as(&controls, notes, Merged::Stay)?;
        let advisor_mode = if advisor { "scan-time" } else { "none" };
        let mut steered = Self {
            domain,
            goal,
            advisor,
            guard,
            ksmd,
            steer: Steer::new(goal),
            began: Instant::now(),
            at_start: (cpu, full_scans),
            cpu,
            full_scans,
            members: ours.members,
            arrivals: 0,
            held: None,
            braked: None,
            saving: false,
            stopped: false,
            decision: None,
            written: BTreeMap::new(),
            contested: BTreeSet::new(),
            kept_out: BTreeSet::new(),
            controls: controls.clone(),
        };
        // From here on the guard puts back what was changed, whatever fails.
        controls.apply(&Settings {
            sleep_millisecs: advisor.then_some(20),
            advisor_mode: now.advisor_mode.map(|_| advisor_mode.to_owned()),
            ..Settings::default()
        })?;
        let processes = processes::mergeable(Path::new("/proc"))?;
        steered.scan(&processes)?;
        controls.write("run", &1)?;
        Ok(steered)
    }

    /// One look: what is the case, and what follows.
    fn look(&mut self, ours: &Ours) {
        if let Err(error) = self.try_look(ours) {
            warn!(%error, "KSM can't be steered at this moment");
        }
    }

    fn try_look(&mut self, ours: &Ours) -> Result<(), KsmError> {
        let members = &ours.members;
        let came = members.difference(&self.members).count();
        self.arrivals += u64::try_from(came).unwrap_or(0);
        self.members.clone_from(members);
        if self.saving {
            self.steer.interrupted();
            return Ok(());
        }
        let run = self.controls.number("run")?.unwrap_or(0);
        let processes = match processes::mergeable(Path::new("/proc")) {
            Err(hung @ KsmError::Hung(_)) => {
                if run == 1 {
                    self.stop()?;
                }
                self.hold(Held::Blind(hung.to_string()));
                return Ok(());
            }
            processes => processes?,
        };
        // VMs that are being started are children of this daemon, and no VMs yet: of this domain, or without mergeable memory.
        let starting = |pid: &i32| !ours.strangers.contains(pid) && is_own_child(*pid);
        let mut known = members.clone();
        known.extend(processes.iter().map(|p| p.pid).filter(starting));
        if let Some(who) = others(&processes, &known) {
            if run == 1 {
                self.stop()?;
            }
            self.hold(Held::Others(who));
        } else if let Some(why) = self.braked.clone() {
            if run == 1 {
                self.stop()?;
            }
            self.hold(Held::Braked(why));
        } else if run != 1 && !self.stopped {
            self.hold(Held::Overruled(run));
        } else {
            if self.held.take().is_some() {
                info!(domain = self.domain, "KSM goes on");
            }
            self.scan(&processes)?;
            if run != 1 {
                self.controls.write("run", &1)?;
            }
            self.stopped = false;
        }
        Ok(())
    }

    /// Returns when ksmd is not at work any more (`run_store` in `mm/ksm.c` waits for it). What is merged stays merged.
    fn stop(&mut self) -> Result<(), KsmError> {
        self.controls.write("run", &0)?;
        self.stopped = true;
        Ok(())
    }

    fn hold(&mut self, why: Held) {
        if self.held.as_ref() != Some(&why) {
            warn!(domain = self.domain, "KSM stands still: {why}");
        }
        self.held = Some(why);
        self.steer.interrupted();
    }

    /// Why KSM stands still, in words.
    fn still(&self) -> Option<String> {
        if self.saving {
            return Some("a VM is being saved live".to_owned());
        }
        self.held.as_ref().map(ToString::to_string)
    }

    /// Measures, and sets the speed until the next look.
    fn scan(&mut self, processes: &[Process]) -> Result<(), KsmError> {
        let status = Status::read(&self.controls)?;
        self.cpu = self.ksmd.cpu_time()?;
        let full_scans = status.full_scans.unwrap_or(0);
        if full_scans < self.full_scans {
            // Somebody took everything apart: the kernel counts from 0 again.
            self.at_start.1 = 0;
        }
        self.full_scans = full_scans;
        let sample = Sample {
            at: self.began.elapsed(),
            cpu: self.cpu,
            scanned: status.pages_scanned,
            full_scans: self.full_scans,
            merged_pages: processes.iter().map(Process::merged_pages).sum(),
            mergeable_pages: processes.iter().map(|p| p.anonymous_pages).sum(),
            arrivals: self.arrivals,
            pressure: Pressure::now(),
        };
        let decision = self.steer.step(&sample);
        self.keep_advisor()?;
        if self.advisor {
            self.advise(&decision, sample.mergeable_pages)?;
        } else {
            self.set("pages_to_scan", decision.pages_to_scan)?;
            self.set("sleep_millisecs", decision.sleep_millisecs)?;
        }
        self.decision = Some(decision);
        Ok(())
    }

    /// Tells the kernel's advisor what was decided. It computes `pages_to_scan` at the end of each full scan.
    // Within what is asked for, see `start_ksm`.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn advise(&mut self, decision: &Decision, mergeable_pages: u64) -> Result<(), KsmError> {
        let pass_s = mergeable_pages as f64 / decision.pages_per_second.max(1e-3);
        let target = pass_s.ceil().clamp(1.0, LONGEST_TARGET_S);
        let percent = (self.goal.cpu_share * decision.pressure_factor * 100.0).ceil();
        self.set("advisor_target_scan_time", target as u64)?;
        self.set("advisor_max_cpu", percent.clamp(1.0, 100.0) as u64)
    }

    fn set(&mut self, name: &'static str, value: u64) -> Result<(), KsmError> {
        if let Some(&written) = self.written.get(name) {
            let found = self.controls.number::<u64>(name)?;
            if found != Some(written) {
                self.contest(name, found.unwrap_or(0));
            } else if written.abs_diff(value) * 20 <= written {
                // A change of a twentieth, which measurement alone makes.
                return Ok(());
            }
        }
        self.controls.write(name, &value)?;
        self.written.insert(name, value);
        Ok(())
    }

    /// The kernel's advisor sets `pages_to_scan`, and refuses that others do (`mm/ksm.c`).
    fn keep_advisor(&mut self) -> Result<(), KsmError> {
        let Some(found) = self.controls.settings()?.advisor_mode else {
            return Ok(());
        };
        let wanted = if self.advisor { "scan-time" } else { "none" };
        if found != wanted {
            self.contest("advisor_mode", &found);
            self.controls.write("advisor_mode", &wanted)?;
            // The kernel has changed these with it.
            self.written.clear();
        }
        Ok(())
    }

    /// Somebody else has written a control: the budget is a promise, so what steering wants is written again.
    fn contest(&mut self, name: &'static str, found: impl std::fmt::Display) {
        if self.contested.insert(name) {
            warn!(
                "somebody else wrote {found} to /sys/kernel/mm/ksm/{name}: it is set back, from now on each time; is ksmtuned running?"
            );
        }
    }

    /// What `memfold ksm status` shows.
    fn view(&self) -> Steering {
        let decision = self.decision.as_ref();
        let number = |name| self.controls.number(name).ok().flatten().unwrap_or(0);
        let held = self.still();
        Steering {
            domain: self.domain.clone(),
            cpu_percent: self.goal.cpu_share * 100.0,
            target_s: self.goal.target.as_secs_f64(),
            advisor: self.advisor,
            mode: decision.filter(|_| held.is_none()).map(|d| d.mode),
            why: match &held {
                Some(held) => held.clone(),
                None => decision.map_or_else(String::new, |d| d.why.clone()) + &self.contests(),
            },
            held,
            pages_to_scan: number("pages_to_scan"),
            sleep_millisecs: number("sleep_millisecs"),
            ksmd_cpu_percent: self.steer.used_share() * 100.0,
            cost_us_per_page: self.steer.cost_s() * 1e6,
            full_scans: self.scans(),
            running_s: self.began.elapsed().as_secs_f64(),
            ksmd_cpu_s: self.cpu.saturating_sub(self.at_start.0).as_secs_f64(),
            kept_out: self.kept_out.iter().cloned().collect(),
        }
    }

    /// Who writes the same controls, in words.
    fn contests(&self) -> String {
        if self.contested.is_empty() {
            return String::new();
        }
        let names: Vec<&str> = self.contested.iter().copied().collect();
        format!(
            "; somebody else writes {}, too, and it is set back each time (systemctl disable --now ksmtuned, if it is that)",
            names.join(" and ")
        )
    }

    const fn scans(&self) -> u64 {
        self.full_scans.saturating_sub(self.at_start.1)
    }
}

/// Whether a process was started by this one (field 4 of `proc_pid_stat(5)`, behind the name, which may hold anything).
fn is_own_child(pid: i32) -> bool {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let stat = String::from_utf8_lossy(&stat);
    let parent = stat
        .rsplit(')')
        .next()
        .and_then(|rest| rest.split_ascii_whitespace().nth(1));
    parent.and_then(|parent| parent.parse().ok()) == Some(own)
}

/// Whose memory may merge beside the members', in words.
fn others(processes: &[Process], members: &BTreeSet<i32>) -> Option<String> {
    let others: Vec<String> = processes
        .iter()
        .filter(|process| process.mergeable && !members.contains(&process.pid))
        .map(|process| format!("process {} ({})", process.pid, process.comm))
        .collect();
    match others.len() {
        0 => None,
        n if n > 3 => Some(format!(
            "{} and {} other processes of no or another trust domain have mergeable memory",
            others[..3].join(", "),
            n - 3
        )),
        _ => Some(format!(
            "{} of no or another trust domain has mergeable memory",
            others.join(", ")
        )),
    }
}

fn refused(why: impl Into<String>, fix: impl Into<String>) -> DaemonError {
    DaemonError::Merging {
        why: why.into(),
        fix: fix.into(),
    }
}

impl Daemon {
    fn steered(&self) -> MutexGuard<'_, Option<SteeredKsm>> {
        self.ksm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn machines(&self) -> Vec<Arc<Machine>> {
        self.lock().values().cloned().collect()
    }

    fn ours(&self, domain: &str) -> Ours {
        let machines = self.machines();
        let pids = |members: bool| {
            let wanted = machines
                .iter()
                .filter(|m| (m.domain() == Some(domain)) == members);
            wanted.map(|m| m.pid().as_raw_nonzero().get()).collect()
        };
        Ours {
            members: pids(true),
            strangers: pids(false),
        }
    }

    /// The right to begin, end or interrupt merging.
    fn alone(&self) -> Result<MutexGuard<'_, ()>, DaemonError> {
        match self.merging.try_lock() {
            Ok(alone) => Ok(alone),
            Err(TryLockError::Poisoned(alone)) => Ok(alone.into_inner()),
            Err(TryLockError::WouldBlock) => Err(refused(
                "a VM is being saved live, and KSM has to stand still meanwhile",
                "wait until the snapshot is made",
            )),
        }
    }

    /// KSM on this host, and how it is steered.
    pub fn ksm(&self) -> Result<Overview, DaemonError> {
        let names: Names = self
            .machines()
            .iter()
            .map(|m| {
                let vm = (m.name().to_owned(), m.domain().map(str::to_owned));
                (m.pid().as_raw_nonzero().get(), vm)
            })
            .collect();
        let mut overview = Overview::now(Some(&names))?;
        overview.steering = self.steered().as_ref().map(SteeredKsm::view);
        Ok(overview)
    }

    /// Steers KSM from now on, or in another way.
    pub fn start_ksm(self: &Arc<Self>, request: &KsmStartRequest) -> Result<Overview, DaemonError> {
        let goal = goal(request)?;
        let _alone = self.alone()?;
        // Nobody starts a VM between the look at whose memory may merge, and ksmd's start.
        let _none_starts = self.none_starts().ok_or_else(|| {
            refused(
                "a VM is being started, and it is not known yet whether its memory may merge",
                "wait until it runs, or stop it if its QEMU hangs ('memfold vm list' shows it)",
            )
        })?;
        if let Some(why) = self.braked()? {
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
                "leave --advisor out, or Linux 6.8 or newer",
            ));
        }
        let mut steered = self.steered();
        if let Some(old) = &*steered {
            if old.domain != domain {
                return Err(refused(
                    format!("it is steered for trust domain '{}'", old.domain),
                    "memfold ksm stop; one trust domain a host",
                ));
            }
        }
        // Its settings first, so that they are what is put back in the end.
        let mut kept_out = BTreeSet::new();
        if let Some(old) = steered.take() {
            old.guard.restore()?;
            kept_out = old.kept_out;
        }
        let ours = self.ours(&domain);
        info!(domain, cpu_percent = request.cpu_percent, "KSM is steered");
        let mut new = SteeredKsm::start(domain, goal, request.advisor, ours)?;
        new.kept_out = kept_out;
        let began = new.began;
        *steered = Some(new);
        drop(steered);
        let daemon = Arc::downgrade(self);
        std::thread::Builder::new()
            .name("ksm-steer".into())
            .spawn(move || keep_steering(&daemon, began))
            .map_err(|_| DaemonError::Internal("no thread to steer KSM"))?;
        self.ksm()
    }

    /// The domain whose memory KSM is to merge; refused if memory of others may merge.
    fn only_domain(&self, asked: Option<&str>) -> Result<String, DaemonError> {
        let mergeable = processes::mergeable(Path::new("/proc"))?;
        let machines = self.machines();
        let vm = |process: &Process| {
            let mut vms = machines.iter();
            vms.find(|m| m.pid().as_raw_nonzero().get() == process.pid)
        };
        let mut domains: BTreeMap<&str, &str> = BTreeMap::new();
        for process in &mergeable {
            match vm(process).map(|m| (m.name(), m.domain())) {
                Some((name, Some(domain))) => {
                    domains.entry(domain).or_insert(name);
                }
                Some((name, None)) => {
                    return Err(refused(
                        format!(
                            "VM '{name}' has mergeable memory and no trust domain, and KSM merges all mergeable memory of a host"
                        ),
                        "end it, or start it with --domain or with --merge never",
                    ));
                }
                None => {
                    return Err(refused(
                        format!(
                            "process {} ({}) has mergeable memory and is no VM of this daemon, and KSM merges all mergeable memory of a host",
                            process.pid, process.comm
                        ),
                        "end it, have it not advise its memory (QEMU: -machine mem-merge=off), or if it is a QEMU take it on: memfold vm attach QMP-SOCKET --name NAME --domain D",
                    ));
                }
            }
        }
        let first = domains.keys().next().copied();
        let Some(wanted) = asked.or(first) else {
            return Err(refused(
                "no VM has mergeable memory",
                "start VMs with --domain, or say for which trust domain: --domain D",
            ));
        };
        memfold_vm::check_name("domain", wanted)
            .map_err(|error| DaemonError::BadRequest(error.to_string()))?;
        if domains.keys().any(|domain| *domain != wanted) {
            let list: Vec<String> = domains
                .iter()
                .map(|(domain, vm)| format!("'{domain}' (VM '{vm}')"))
                .collect();
            return Err(refused(
                format!(
                    "VMs of trust domain {} have mergeable memory, and KSM merges all mergeable memory of a host; it may run for one trust domain",
                    list.join(" and ")
                ),
                format!(
                    "end those that are not of '{wanted}', or start them anew with --merge never; while KSM is steered, memfold starts VMs of other trust domains so by itself"
                ),
            ));
        }
        Ok(wanted.to_owned())
    }

    /// Steers no more.
    pub fn stop_ksm(&self, request: &KsmStopRequest) -> Result<Overview, DaemonError> {
        let _alone = self.alone()?;
        let Some(old) = self.steered().take() else {
            return Err(refused(
                "this daemon doesn't steer it",
                "memfold ksm start begins; who else runs KSM is not asked to stop: echo 0 > /sys/kernel/mm/ksm/run",
            ));
        };
        if request.unmerge {
            old.controls.unmerge(0)?;
        }
        old.guard.restore()?;
        info!(domain = old.domain, "KSM is steered no more");
        self.ksm()
    }

    /// The daemon ends.
    pub(super) fn end_steering(&self) {
        if let Some(old) = self.steered().take() {
            match old.guard.restore() {
                Ok(()) => info!(
                    domain = old.domain,
                    "KSM is steered no more; its settings are put back"
                ),
                Err(error) => warn!(%error, "KSM's settings were left changed"),
            }
        }
    }

    /// Why a VM's memory merges, or doesn't.
    pub(super) fn explain_merging(&self, name: &str) -> Result<Explanation, DaemonError> {
        let machine = self.machine(name)?;
        let blocks = machine.layout().blocks;
        let known = Known {
            name: machine.name().to_owned(),
            domain: machine.domain().map(str::to_owned),
            ram: blocks
                .iter()
                .map(|block| (block.hva.0, block.hva.add_pages(block.pages).0))
                .collect(),
        };
        let steered = self.steered().as_ref().map(|steered| Steered {
            domain: steered.domain.clone(),
            held: steered.still(),
            scans: steered.scans(),
        });
        let facts = Facts::read(
            &Controls::default(),
            Path::new("/proc"),
            machine.pid().as_raw_nonzero().get(),
            Some(&known),
            steered,
        )?;
        Ok(ksm::weigh(&facts))
    }

    /// Has a VM that is to be started not offer its memory while KSM runs for another trust domain. Called with `closed` read-locked,
    /// so that steering doesn't begin meanwhile.
    pub(super) fn keep_from_merging(&self, spec: &mut VmSpec) {
        let mut steered = self.steered();
        let Some(steered) = &mut *steered else { return };
        if spec.merges() && spec.domain.as_ref() != Some(&steered.domain) {
            info!(
                vm = spec.name,
                domain = steered.domain,
                "started with mem-merge=off: KSM runs for another trust domain"
            );
            spec.merge = MergeChoice::Never;
            steered.kept_out.insert(spec.name.clone());
        }
    }

    /// Has KSM merge nothing more, with the reason, or go on.
    pub(super) fn brake_ksm(&self, why: Option<String>) {
        if let Some(steered) = &mut *self.steered() {
            // With the figures of when it came: each second's would be said anew.
            if steered.braked.is_some() != why.is_some() {
                steered.braked = why;
            }
        }
    }

    /// Has KSM stand still. The caller holds `merging`.
    pub(super) fn still(&self) -> Result<Still<'_>, KsmError> {
        if let Some(steered) = &mut *self.steered() {
            if steered.controls.number("run")? == Some(1) {
                steered.stop()?;
            }
            steered.saving = true;
            return Ok(Still::Steered(self));
        }
        let notes = Path::new(NOTES);
        std::fs::create_dir_all(notes).map_err(|source| KsmError::Note {
            path: notes.into(),
            source,
        })?;
        let paused = ksm::pause(&Controls::default(), notes)?;
        Ok(Still::Paused(Box::new(paused)))
    }
}

fn goal(request: &KsmStartRequest) -> Result<Goal, DaemonError> {
    let cpu = request.cpu_percent;
    if !(cpu > 0.0 && cpu <= 95.0) {
        return Err(DaemonError::BadRequest(format!(
            "cpu_percent is {cpu}; give more than 0, and 95 at most: ksmd is one thread, and has to sleep for its settings to hold"
        )));
    }
    let target = request.target_s;
    if !(1.0..=LONGEST_TARGET_S).contains(&target) {
        return Err(DaemonError::BadRequest(format!(
            "target_s is {target}; give 1 to {LONGEST_TARGET_S}"
        )));
    }
    Ok(Goal {
        cpu_share: cpu / 100.0,
        target: Duration::from_secs_f64(target),
    })
}

/// Looks each second, until steering that began at `began` has ended.
fn keep_steering(daemon: &Weak<Daemon>, began: Instant) {
    loop {
        std::thread::sleep(INTERVAL);
        let Some(daemon) = daemon.upgrade() else {
            return;
        };
        let domain = match &*daemon.steered() {
            Some(steered) if steered.began == began => steered.domain.clone(),
            _ => return,
        };
        let ours = daemon.ours(&domain);
        match &mut *daemon.steered() {
            Some(steered) if steered.began == began => steered.look(&ours),
            _ => return,
        }
    }
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
    fn goals_that_make_no_sense_are_refused_with_their_range() {
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

    #[test]
    fn others_are_named() {
        let process = |pid, mergeable| Process {
            pid,
            comm: format!("p{pid}"),
            qemu: false,
            mergeable,
            status: ksm::ProcessStatus::default(),
            anonymous_pages: 0,
        };
        let members = BTreeSet::from([1]);
        assert_eq!(
            others(&[process(1, true), process(2, false)], &members),
            None
        );
        let one = others(&[process(1, true), process(3, true)], &members).unwrap();
        assert!(one.starts_with("process 3 (p3) of no or another"), "{one}");
        let many: Vec<Process> = (1..=6).map(|pid| process(pid, true)).collect();
        let many = others(&many, &members).unwrap();
        assert!(many.contains("p4)") && many.contains("2 other"), "{many}");
    }
}
