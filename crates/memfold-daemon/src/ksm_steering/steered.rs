//! While the daemon steers KSM, measures KSM once a second, and sets KSM's controls in
//! `/sys/kernel/mm/ksm` accordingly.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use memfold_ksm::pressure::Pressure;
use memfold_ksm::processes::{self, Process};
use memfold_ksm::steer::{Decision, Goal, Sample, Steer};
use memfold_ksm::{Controls, Guard, KsmError, Ksmd, Merged, NOTES, Settings, Status, Steering};
use tracing::{info, warn};

/// Longest time that may be requested for a full scan, in seconds: the limit of the kernel's
/// advisor (`mm/ksm.c`).
pub(crate) const LONGEST_TARGET_S: f64 = 86_400.0;

/// The reason why KSM is stopped although the daemon steers it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum HoldReason {
    /// A process outside the trust domain has mergeable memory.
    #[error("{0}; merged pages stay merged, and KSM resumes when no such memory is left")]
    Others(String),
    /// Another program wrote this value to `run`.
    #[error(
        "another program wrote {0} to /sys/kernel/mm/ksm/run; steering resumes when that file is 1 again"
    )]
    Overruled(u64),
    /// The brake on copy-on-write debt is on, for this reason.
    #[error(
        "the brake is on ({0}); merged pages stay merged, and KSM resumes when enough memory is available"
    )]
    Braked(String),
    /// The daemon cannot determine which processes have mergeable memory (error message).
    #[error("{0}; merged pages stay merged, and KSM resumes when this process goes on")]
    Blind(String),
}

/// State of KSM while the daemon steers it.
#[derive(Debug)]
pub(crate) struct SteeredKsm {
    pub domain: String,
    goal: Goal,
    advisor: bool,
    pub controls: Controls,
    guard: Guard,
    ksmd: Ksmd,
    steer: Steer,
    pub began: Instant,
    /// ksmd's CPU time and `full_scans` when steering began.
    at_start: (Duration, u64),
    /// ksmd's CPU time at the last measurement.
    cpu: Duration,
    full_scans: u64,
    /// PIDs of the domain's VMs. The next field: number of VMs that have joined since the start.
    members: BTreeSet<i32>,
    arrivals: u64,
    held: Option<HoldReason>,
    /// Why the brake on copy-on-write debt is on; `None` while the brake is off.
    pub braked: Option<String>,
    /// Whether a VM is being saved while it runs. KSM is stopped during such a save.
    pub saving: bool,
    /// Whether `run` is 0 because this daemon wrote it.
    stopped: bool,
    decision: Option<Decision>,
    /// Value that the daemon wrote last to each control (file of `/sys/kernel/mm/ksm`).
    written: BTreeMap<&'static str, u64>,
    /// Controls that another program has written since steering began.
    contested: BTreeSet<&'static str>,
    pub kept_out: BTreeSet<String>,
}

/// PIDs of this daemon's VMs.
pub(crate) struct Ours {
    /// PIDs of VMs in the trust domain that KSM is steered for.
    pub members: BTreeSet<i32>,
    /// PIDs of VMs in another trust domain, or in none.
    pub strangers: BTreeSet<i32>,
}

impl SteeredKsm {
    pub fn start(domain: String, goal: Goal, advisor: bool, ours: Ours) -> Result<Self, KsmError> {
        let controls = Controls::default();
        let now = controls.settings()?;
        let notes = notes()?;
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
        // From here on, dropping the guard restores the settings, whatever fails.
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

    /// Measures KSM once, and then stops KSM, resumes it, or changes its scan speed. A failure is
    /// logged.
    pub fn look(&mut self, ours: &Ours) {
        if let Err(error) = self.try_look(ours) {
            warn!(%error, "cannot read or write KSM's settings in /sys/kernel/mm/ksm; retrying");
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
        let is_overruled = self.is_overruled(run);
        if is_overruled {
            self.stopped = false;
        }
        self.guard.leave_run(is_overruled)?;
        let processes = match processes::mergeable(Path::new("/proc")) {
            Err(hung @ KsmError::Hung(_)) => {
                return self.hold(run, HoldReason::Blind(hung.to_string()));
            }
            processes => processes?,
        };
        // VMs that are being started are children of this daemon, and not in its table yet. Such a
        // VM belongs to this domain or has no mergeable memory.
        let starting = |pid: &i32| !ours.strangers.contains(pid) && is_own_child(*pid);
        let mut known = members.clone();
        known.extend(processes.iter().map(|p| p.pid).filter(starting));
        let others = others(&processes, &known).map(HoldReason::Others);
        let braked = || self.braked.clone().map(HoldReason::Braked);
        let overruled = || is_overruled.then_some(HoldReason::Overruled(run));
        if let Some(why) = others.or_else(braked).or_else(overruled) {
            return self.hold(run, why);
        }
        if self.held.take().is_some() {
            info!(domain = self.domain, "KSM resumed");
        }
        self.scan(&processes)?;
        if run != 1 {
            self.controls.write("run", &1)?;
        }
        self.stopped = false;
        Ok(())
    }

    /// Returns whether another program wrote `run`, the control's present value.
    const fn is_overruled(&self, run: u64) -> bool {
        run != 1 && !(self.stopped && run == 0)
    }

    /// Ends steering: restores KSM's settings, except `run` if another program wrote it. With
    /// `unmerge`, unmerges all merged pages first.
    pub fn end(mut self, unmerge: bool) -> Result<(), KsmError> {
        let run = self.controls.number("run")?;
        let of_others = run.filter(|run| self.is_overruled(*run));
        // If the file cannot be written, it is removed nevertheless.
        let _ = self.guard.leave_run(of_others.is_some());
        if unmerge {
            self.controls.unmerge(of_others.unwrap_or(0))?;
        }
        self.guard.restore()
    }

    /// Stops KSM. Returns after ksmd has stopped working (`run_store` in `mm/ksm.c` waits for it).
    /// Merged pages stay merged.
    pub fn stop(&mut self) -> Result<(), KsmError> {
        // A write that is late takes effect later, and is no other program's.
        self.stopped = true;
        self.controls.write("run", &0)
    }

    /// Keeps KSM stopped; `run`: the control's present value.
    fn hold(&mut self, run: u64, why: HoldReason) -> Result<(), KsmError> {
        if run == 1 {
            self.stop()?;
        }
        if self.held.as_ref() != Some(&why) {
            warn!(domain = self.domain, "KSM paused: {why}");
        }
        self.held = Some(why);
        self.steer.interrupted();
        Ok(())
    }

    /// Returns why the daemon keeps KSM stopped, as text; `None` if KSM is not stopped.
    pub fn still(&self) -> Option<String> {
        if self.saving {
            return Some("a VM is being saved live".to_owned());
        }
        self.held.as_ref().map(ToString::to_string)
    }

    /// Measures ksmd, and sets its scan speed until the next measurement.
    fn scan(&mut self, processes: &[Process]) -> Result<(), KsmError> {
        let status = Status::read(&self.controls)?;
        self.cpu = self.ksmd.cpu_time()?;
        let full_scans = status.full_scans.unwrap_or(0);
        if full_scans < self.full_scans {
            // Another program unmerged all pages, so the kernel counts full scans from 0 again.
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

    /// Passes the decision to the kernel's advisor, which computes `pages_to_scan` at the end of
    /// each full scan.
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
                // A change of up to a twentieth is measurement noise.
                return Ok(());
            }
        }
        self.controls.write(name, &value)?;
        self.written.insert(name, value);
        Ok(())
    }

    /// Keeps the advisor's mode. While the advisor is on, it sets `pages_to_scan`, and the kernel
    /// refuses other writes to it (`mm/ksm.c`).
    fn keep_advisor(&mut self) -> Result<(), KsmError> {
        let Some(found) = self.controls.settings()?.advisor_mode else {
            return Ok(());
        };
        let wanted = if self.advisor { "scan-time" } else { "none" };
        if found != wanted {
            self.contest("advisor_mode", &found);
            self.controls.write("advisor_mode", &wanted)?;
            // The kernel changes these controls when the mode changes.
            self.written.clear();
        }
        Ok(())
    }

    /// Logs, once for each control, that another program wrote `found` to it. The daemon then
    /// writes its own value again, because the CPU budget is a promise.
    fn contest(&mut self, name: &'static str, found: impl std::fmt::Display) {
        if self.contested.insert(name) {
            warn!(
                "another program wrote {found} to /sys/kernel/mm/ksm/{name}, and memfold restored its own value; stop that program (often ksmtuned)"
            );
        }
    }

    /// Returns the state of steering as `memfold ksm status` shows it.
    pub fn view(&self) -> Steering {
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

    /// Returns the controls that another program writes, as text.
    fn contests(&self) -> String {
        let names: Vec<&str> = self.contested.iter().copied().collect();
        if names.is_empty() {
            return String::new();
        }
        format!(
            "; another program also writes {}, and memfold resets it each time (if the program is ksmtuned: systemctl disable --now ksmtuned)",
            names.join(" and ")
        )
    }

    pub const fn scans(&self) -> u64 {
        self.full_scans.saturating_sub(self.at_start.1)
    }
}

/// Makes the directory of notes about KSM's settings, and returns its path.
pub(super) fn notes() -> Result<&'static Path, KsmError> {
    let notes = Path::new(NOTES);
    let made = std::fs::create_dir_all(notes).map_err(|source| KsmError::Note {
        path: notes.into(),
        source,
    });
    made.map(|()| notes)
}

/// Returns whether a process is a child of this one (field 4 of `proc_pid_stat(5)`, after the name
/// in parentheses, which may contain any character).
fn is_own_child(pid: i32) -> bool {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let stat = String::from_utf8_lossy(&stat);
    let rest = stat.rsplit(')').next();
    let parent = rest.and_then(|rest| rest.split_ascii_whitespace().nth(1));
    parent.and_then(|parent| parent.parse().ok()) == Some(own)
}

/// Returns the processes outside `members` that have mergeable memory, as text.
fn others(processes: &[Process], members: &BTreeSet<i32>) -> Option<String> {
    let is_other = |p: &&Process| p.mergeable && !members.contains(&p.pid);
    let others = processes.iter().filter(is_other);
    let named = others.map(|p| format!("process {} ({})", p.pid, p.comm));
    let others: Vec<String> = named.collect();
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns steering of an imitation of KSM's files in `root`, whose `run` was 1 before.
    fn steered(root: &Path) -> SteeredKsm {
        let (sysfs, state, ksmd) = (root.join("ksm"), root.join("state"), root.join("proc/7"));
        for directory in [&sysfs, &state, &ksmd] {
            std::fs::create_dir_all(directory).unwrap();
        }
        std::fs::write(ksmd.join("stat"), "7 (ksmd) S 2 0 0").unwrap();
        for (name, value) in [("run", 1), ("pages_to_scan", 100), ("sleep_millisecs", 20)] {
            std::fs::write(sysfs.join(name), format!("{value}\n")).unwrap();
        }
        let controls = Controls::new(sysfs);
        let goal = Goal {
            cpu_share: 0.2,
            target: Duration::from_secs(60),
        };
        let steered = SteeredKsm {
            domain: "d".into(),
            goal,
            advisor: false,
            guard: Guard::take_as(&controls, &state, Merged::Stay).unwrap(),
            ksmd: Ksmd::find_in(&root.join("proc")).unwrap(),
            steer: Steer::new(goal),
            began: Instant::now(),
            at_start: (Duration::ZERO, 0),
            cpu: Duration::ZERO,
            full_scans: 0,
            members: BTreeSet::new(),
            arrivals: 0,
            held: None,
            braked: None,
            saving: false,
            stopped: false,
            decision: None,
            written: BTreeMap::new(),
            contested: BTreeSet::new(),
            kept_out: BTreeSet::new(),
            controls,
        };
        steered.controls.write("pages_to_scan", &5000).unwrap();
        steered
    }

    #[test]
    fn when_steering_ends_run_is_restored_unless_another_program_wrote_it() {
        // `written`: by another program. `stops`: memfold has stopped KSM before.
        for (stops, written, unmerge, wanted) in [
            (false, None, false, 1),
            (true, None, false, 1),
            (false, None, true, 1),
            (false, Some(0), false, 0),
            (false, Some(2), false, 2),
            (true, Some(2), false, 2),
            (false, Some(2), true, 2),
        ] {
            let root = tempfile::tempdir().unwrap();
            let mut steered = steered(root.path());
            if stops {
                steered.stop().unwrap();
            }
            let controls = steered.controls.clone();
            if let Some(run) = written {
                controls.write("run", &run).unwrap();
            }
            steered.end(unmerge).unwrap();
            let number = |name| controls.number::<u64>(name).unwrap();
            let case = format!("{stops} {written:?} {unmerge}");
            assert_eq!(number("run"), Some(wanted), "{case}");
            assert_eq!(number("pages_to_scan"), Some(100), "{case}");
        }
    }

    #[test]
    fn if_foreign_processes_have_mergeable_memory_the_message_names_them() {
        let process = |pid, mergeable| Process {
            pid,
            comm: format!("p{pid}"),
            qemu: false,
            mergeable,
            status: memfold_ksm::ProcessStatus::default(),
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
