//! Runs one arm of the study `hints`, which compares mechanisms that share memory: boots fresh VMs,
//! starts one mechanism (folding, KSM or none), and measures while the VMs compile.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use memfold_fold::{EngineSettings, EngineStats};
use memfold_ksm as ksm;
use memfold_lab::{Lab, at_once};
use memfold_units::PAGE_SIZE;
use memfold_vm::VmSpec;
use serde::Serialize;
use serde_json::{Value, json};

use crate::host::{Stat, check_ksm_is_off, ksmd, numbers, start_ksm};

/// Number of pages in a MiB.
pub(super) const PAGES_PER_MIB: f64 = 256.0;

/// The software that the study's guests compile.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub what: &'static str,
    /// Shell script that compiles the software in a fresh directory `/var/tmp/work`.
    pub build: &'static str,
    /// Shell script that prints the hash of the compiled software.
    pub output: &'static str,
    /// Disk that the compilation reads besides the root disk; `None`: no such disk.
    pub disk: Option<PathBuf>,
    pub timeout: Duration,
}

const BOOT_TIMEOUT: Duration = Duration::from_secs(300);
const HASH_TIMEOUT: Duration = Duration::from_secs(300);

/// Time between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(2);

/// Shell script that hashes files in `/usr`, about 165 MB: every file with its name, so that it can
/// be checked later.
const HASH: &str = "find /usr/bin /usr/sbin /usr/lib -xdev -type f -size -8M -print0 | sort -z | head -z -n 4000 | \
    xargs -0 md5sum > /var/tmp/before.md5 && sync && wc -l < /var/tmp/before.md5";

/// Shell script that stops the events of the agent, which afterwards only runs commands.
const SILENCE: &str = "echo 0 > /sys/kernel/tracing/instances/memfold/events/enable && cat /sys/kernel/tracing/instances/memfold/events/enable";

/// Shell script that reads all hashed files again, and prints the number of files that differ or
/// cannot be read.
const CHECK: &str = "md5sum --check --quiet /var/tmp/before.md5 2>/dev/null | wc -l";

/// Rates of folding that are measured: most pages that folding may examine in a second. The first
/// one is KSM's default rate.
pub(super) const BUDGETS: [u64; 3] = [5000, 1000, 500];

/// The mechanism that shares memory in an arm of the study. The number is the rate of folding: the
/// most pages that folding may examine in a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mechanism {
    None,
    Fold(u64),
    /// Folding in half of the VMs, while as many VMs do the same work without memfold.
    FoldBesideNone(u64),
    KsmDefault,
    /// KSM, with a rate that makes its CPU time follow that of folding at this rate.
    KsmEqualCpu(u64),
}

impl Mechanism {
    pub fn name(self) -> String {
        match self {
            Self::None => "none".into(),
            Self::Fold(rate) => format!("fold_{rate}"),
            Self::FoldBesideNone(rate) => format!("fold_{rate}_beside_none"),
            Self::KsmDefault => "ksm_default".into(),
            Self::KsmEqualCpu(rate) => format!("ksm_equal_cpu_{rate}"),
        }
    }

    /// Returns the most pages that folding may examine in a second; `None` if the mechanism is not
    /// folding.
    pub const fn fold_rate(self) -> Option<u64> {
        match self {
            Self::Fold(rate) | Self::FoldBesideNone(rate) => Some(rate),
            _ => None,
        }
    }
}

/// CPU time of a mechanism over time, both in seconds: (time since time 0, CPU time until then).
pub(super) type CpuCurve = Vec<(f64, f64)>;

/// Measurements of an arm at one moment.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Sample {
    /// Time of the sample, in seconds since time 0 (the beginning of the compilation).
    pub t_s: f64,
    /// Memory that the mechanism has saved, in pages.
    pub shared_pages: u64,
    /// CPU time of the mechanism, in seconds: of the fold engine and the fold libraries, or of
    /// ksmd.
    pub scanner_cpu_s: f64,
    /// CPU time of the agents in both guests since the boot, in seconds, as the agents last
    /// reported it.
    pub agent_cpu_s: f64,
    pub matched_pages: u64,
    pub matched_folded_pages: u64,
    pub zero_pages: u64,
    pub hints_waiting: u64,
    /// Pages that ksmd has scanned since time 0. The number may be below ksmd's rate, if ksmd gets
    /// too little CPU time.
    pub ksm_scanned_pages: Option<u64>,
}

/// Measurements of one VM during its compilation.
#[derive(Clone, Debug)]
pub(super) struct VmWork {
    /// Elapsed time of the compilation in the VM, in seconds.
    pub wall_s: f64,
    /// Part of `wall_s` in which the VM's vCPU was ready to run but waited for a core.
    pub delay_s: f64,
    /// CPU time of the VM's vCPU thread during the compilation, in seconds.
    pub vcpu_s: f64,
    /// Part of `vcpu_s` that the host's kernel used, for page faults and for requests of other
    /// cores.
    pub system_s: f64,
    /// Number of page faults of the VM's vCPU thread during the compilation.
    pub faults: f64,
    /// CPU time of the agent in the VM's guest during the compilation, in seconds.
    pub agent_s: f64,
    /// Hash of the software that the guest has compiled.
    pub output: String,
}

/// Results of one arm of the study.
#[derive(Clone, Debug)]
pub(super) struct ArmRun {
    pub mechanism: Mechanism,
    pub repeat: usize,
    pub samples: Vec<Sample>,
    pub work: Vec<VmWork>,
    pub checked_files: u64,
    pub differing_files: u64,
    /// CPU time of the host that neither VMs nor memfold nor ksmd used, in percent of all cores.
    pub other_load_percent: f64,
    /// Counters of folding at the end of the arm.
    pub fold: EngineStats,
}

/// Runs one arm of the study: boots the VMs, lets them compile, and checks their files. `allowed`:
/// CPU time over time that ksmd may use; `None`: no limit.
pub(super) fn run(
    specs: Vec<VmSpec>,
    work: &Work,
    mechanism: Mechanism,
    allowed: Option<CpuCurve>,
    repeat: usize,
) -> anyhow::Result<ArmRun> {
    check_ksm_is_off()?;
    let lab = Lab::new(EngineSettings {
        pages_per_second: mechanism.fold_rate(),
        ..EngineSettings::default()
    })?;
    let names: Vec<String> = specs.iter().map(|spec| spec.name.clone()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut starts = specs;
    if repeat % 2 == 1 {
        // The VM that boots first gets better memory, so the halves boot first in turn.
        starts.reverse();
    }
    lab.boot(starts, BOOT_TIMEOUT)?;
    let counts = |script: &str| -> anyhow::Result<Vec<Option<u64>>> {
        let said = lab.exec_all(&names, script, HASH_TIMEOUT)?;
        Ok(said.iter().map(|n| n.trim().parse().ok()).collect())
    };
    let checked_files = counts(HASH)?.into_iter().flatten().sum();
    ensure!(checked_files > 0, "the guests hashed no file");

    if matches!(mechanism, Mechanism::FoldBesideNone(_)) {
        let plain = &names[names.len() / 2..];
        for state in lab.exec_all(plain, SILENCE, HASH_TIMEOUT)? {
            let state = state.trim();
            ensure!(state == "0", "an agent beside is not silent: {state}");
        }
    }
    let load = Load::now(&lab)?;
    let (samples, work) = share_and_work(&lab, &names, work, mechanism, allowed)?;
    let other_load_percent = Load::now(&lab)?.other_percent_since(&load);
    // The guests now read the shared pages: folding is still on, and KSM's pages stay merged until
    // the guard is dropped.
    let differing = counts(CHECK)?.into_iter();
    let differing_files =
        differing.fold(0, |sum: u64, n| sum.saturating_add(n.unwrap_or(u64::MAX)));
    let fold = lab.stats()?;
    Ok(ArmRun {
        mechanism,
        repeat,
        samples,
        work,
        checked_files,
        differing_files,
        other_load_percent,
        fold,
    })
}

/// Lets the guests work while the mechanism shares memory, and takes samples.
fn share_and_work(
    lab: &Lab,
    names: &[&str],
    work: &Work,
    mechanism: Mechanism,
    allowed: Option<CpuCurve>,
) -> anyhow::Result<(Vec<Sample>, Vec<VmWork>)> {
    let mut scanner = Scanner::start(lab, mechanism, allowed)?;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| at_once(names, |name| work_in(lab, name, work)));
        let mut samples = vec![scanner.sample(lab, began)?];
        let mut next = began + SAMPLE_INTERVAL;
        // A guest that ends its work before the other still holds its memory.
        while !running.is_finished() {
            std::thread::sleep(Duration::from_millis(200));
            scanner.pace(began)?;
            if Instant::now() >= next {
                samples.push(scanner.sample(lab, began)?);
                next += SAMPLE_INTERVAL;
            }
        }
        samples.push(scanner.sample(lab, began)?);
        let panicked = |_| bail!("the thread that waits for the guests panicked");
        let work = running.join().unwrap_or_else(panicked)?;
        scanner.stop()?;
        Ok((samples, work))
    })
}

fn work_in(lab: &Lab, name: &str, work: &Work) -> anyhow::Result<VmWork> {
    let ticks = "awk '{print $14+$15}' /proc/$(pgrep -o -x memfold-agent)/stat";
    let before = vcpu_times(lab, name)?;
    let began = Instant::now();
    let script = format!(
        "rm -rf /var/tmp/work; {ticks}; ({}) >/var/tmp/build.log 2>&1 || {{ tail -n 5 /var/tmp/build.log >&2; exit 1; }}; {ticks}; {}",
        work.build, work.output
    );
    let text = lab.exec(name, &script, work.timeout)?;
    let wall_s = began.elapsed().as_secs_f64();
    let after = vcpu_times(lab, name)?;
    let lines: Vec<&str> = text.lines().collect();
    let [first, second, output] = lines[..] else {
        bail!("cannot parse the output of the workload in VM '{name}': {text}");
    };
    // The agent's times are in ticks of the guest, of which Linux shows 100 a second (USER_HZ).
    let agent_s = (second.parse::<f64>()? - first.parse::<f64>()?) / 100.0;
    Ok(VmWork {
        wall_s,
        delay_s: after.delay_s - before.delay_s,
        vcpu_s: after.on_s - before.on_s,
        system_s: after.system_s - before.system_s,
        faults: after.faults - before.faults,
        agent_s,
        output: output.to_owned(),
    })
}

/// Times of a VM's vCPU threads, in seconds.
#[derive(Default)]
struct VcpuTimes {
    on_s: f64,
    delay_s: f64,
    system_s: f64,
    faults: f64,
}

/// Reads the times of the vCPU threads from their `schedstat` and `stat`.
fn vcpu_times(lab: &Lab, name: &str) -> anyhow::Result<VcpuTimes> {
    let mut sum = VcpuTimes::default();
    for task in std::fs::read_dir(format!("/proc/{}/task", lab.pid(name)?))? {
        let task = task?.path();
        if !std::fs::read_to_string(task.join("comm"))?.starts_with("CPU ") {
            continue;
        }
        let text = std::fs::read_to_string(task.join("schedstat"))?;
        if let [on, waiting, ..] = numbers(&text)[..] {
            sum.on_s += on / 1e9;
            sum.delay_s += waiting / 1e9;
        }
        let stat = Stat::read(&task.join("stat"))?;
        sum.faults += (stat.field(10) + stat.field(12)) as f64;
        sum.system_s += stat.field(15) as f64 / ticks_per_s();
    }
    Ok(sum)
}

/// The mechanism that runs in an arm: `Some` for KSM, `None` for folding or no mechanism.
struct Scanner(Option<KsmRun>);

struct KsmRun {
    run: ksm::Run,
    ksmd: ksm::Ksmd,
    cpu_at_start: Duration,
    scanned_at_start: Option<u64>,
    budget: Option<Budget>,
}

/// Limit of ksmd's CPU time in an arm.
struct Budget {
    hold: ksm::EqualCpu,
    /// CPU time that ksmd may use, over the time since time 0, both in seconds.
    allowed: CpuCurve,
    next: Instant,
}

impl Scanner {
    fn start(lab: &Lab, mechanism: Mechanism, allowed: Option<CpuCurve>) -> anyhow::Result<Self> {
        if !matches!(mechanism, Mechanism::KsmDefault | Mechanism::KsmEqualCpu(_)) {
            lab.fold(mechanism.fold_rate().is_some())?;
            return Ok(Self(None));
        }
        let run = start_ksm(&ksm::Settings::kernel_default())?;
        // This also removes pages of ended VMs from KSM's counters.
        run.controls().unmerge(1)?;
        let ksmd = ksmd()?;
        let budget = allowed.map(|allowed| {
            anyhow::Ok(Budget {
                hold: ksm::EqualCpu::new(&run)?,
                allowed,
                next: Instant::now(),
            })
        });
        Ok(Self(Some(KsmRun {
            cpu_at_start: ksmd.cpu_time()?,
            scanned_at_start: ksm::Status::read(run.controls())?.pages_scanned,
            budget: budget.transpose()?,
            run,
            ksmd,
        })))
    }

    /// Sets ksmd's rate once a second, if ksmd has a budget.
    fn pace(&mut self, began: Instant) -> anyhow::Result<()> {
        let budget = self.0.as_mut().and_then(|ksm| ksm.budget.as_mut());
        if let Some(budget) = budget.filter(|budget| Instant::now() >= budget.next) {
            let allowed = value_at(&budget.allowed, began.elapsed().as_secs_f64());
            budget.hold.step(Duration::from_secs_f64(allowed))?;
            budget.next = Instant::now() + Duration::from_secs(1);
        }
        Ok(())
    }

    fn sample(&self, lab: &Lab, began: Instant) -> anyhow::Result<Sample> {
        let stats = lab.stats()?;
        let sum = |of: fn(&memfold_fold::VmStats) -> u64| stats.vms.iter().map(of).sum::<u64>();
        let mapped = sum(|vm| vm.mapped_pages.saturating_sub(vm.copied_pages));
        let store: u64 = stats.domains.iter().map(|d| d.store_bytes).sum();
        let mut sample = Sample {
            t_s: began.elapsed().as_secs_f64(),
            shared_pages: mapped.saturating_sub(store / PAGE_SIZE),
            scanner_cpu_s: stats.engine_cpu_s + stats.library_cpu_s,
            agent_cpu_s: sum(|vm| vm.agent_cpu_us) as f64 / 1e6,
            matched_pages: sum(|vm| vm.matched_pages),
            matched_folded_pages: sum(|vm| vm.matched_folded_pages),
            zero_pages: sum(|vm| vm.zero_pages),
            hints_waiting: stats.hints_waiting,
            ksm_scanned_pages: None,
        };
        if let Some(ksm) = &self.0 {
            let used = ksm.ksmd.cpu_time()?.saturating_sub(ksm.cpu_at_start);
            sample.scanner_cpu_s = used.as_secs_f64();
            let counters = ksm::Status::read(ksm.run.controls())?;
            sample.shared_pages = counters.pages_sharing.unwrap_or(0);
            let scanned = counters.pages_scanned.zip(ksm.scanned_at_start);
            sample.ksm_scanned_pages = scanned.map(|(now, then)| now.saturating_sub(then));
        }
        Ok(sample)
    }

    fn stop(self) -> anyhow::Result<()> {
        Ok(self.0.map_or(Ok(()), |ksm| ksm.run.stop(true))?)
    }
}

/// Returns the value of a curve at `t`: interpolated linearly between its points, and constant
/// after the last one.
fn value_at(curve: &[(f64, f64)], t: f64) -> f64 {
    let after = curve.partition_point(|point| point.0 <= t);
    match (after.checked_sub(1).map(|at| curve[at]), curve.get(after)) {
        (Some((t0, v0)), Some(&(t1, v1))) => v0 + (v1 - v0) * (t - t0) / (t1 - t0),
        (Some((_, v)), None) | (None, Some(&(_, v))) => v,
        (None, None) => 0.0,
    }
}

fn ticks_per_s() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

/// CPU seconds of the whole host, and of everything that belongs to the study.
struct Load {
    at: Instant,
    busy_s: f64,
    ours_s: f64,
}

impl Load {
    fn now(lab: &Lab) -> anyhow::Result<Self> {
        let stat = std::fs::read_to_string("/proc/stat")?;
        // Fields of the first line in proc_stat(5): cpu user nice system idle iowait irq softirq
        // steal.
        let fields = numbers(stat.lines().next().unwrap_or_default());
        let busy = [1, 2, 3, 6, 7].iter().filter_map(|&at| fields.get(at));
        let ksmd = ksm::Ksmd::find().and_then(|ksmd| ksmd.cpu_time().ok());
        let own = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let own_s = own.tv_sec as f64 + own.tv_nsec as f64 / 1e9;
        let mut ours_s = own_s + ksmd.unwrap_or_default().as_secs_f64();
        for vm in lab.daemon().vms().list() {
            let stat = Stat::read(format!("/proc/{}/stat", vm.pid).as_ref())?;
            ours_s += (stat.field(14) + stat.field(15)) as f64 / ticks_per_s();
        }
        Ok(Self {
            at: Instant::now(),
            busy_s: busy.sum::<f64>() / ticks_per_s(),
            ours_s,
        })
    }

    fn other_percent_since(&self, before: &Self) -> f64 {
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        let seconds = (self.at - before.at).as_secs_f64().max(1e-3);
        let other = (self.busy_s - before.busy_s) - (self.ours_s - before.ours_s);
        (other / seconds / cores * 100.0).max(0.0)
    }
}

impl ArmRun {
    /// Returns the CPU time of the mechanism over the time since time 0, both in seconds.
    pub fn scanner_cpu(&self) -> CpuCurve {
        let samples = self.samples.iter();
        samples.map(|s| (s.t_s, s.scanner_cpu_s)).collect()
    }

    /// Returns the last sample of the arm, or zeroes if there is none.
    pub fn end(&self) -> Sample {
        self.samples.last().cloned().unwrap_or_default()
    }

    /// Returns the number of pages that the mechanism saved, averaged over the time of the arm.
    pub fn mean_shared(&self) -> f64 {
        let (mut area, mut time) = (0.0, 0.0);
        for pair in self.samples.windows(2) {
            let step = pair[1].t_s - pair[0].t_s;
            area += step * f64::midpoint(pair[0].shared_pages as f64, pair[1].shared_pages as f64);
            time += step;
        }
        if time > 0.0 { area / time } else { 0.0 }
    }

    /// Returns the CPU time of the mechanism from time 0 to the end of the work, in seconds.
    pub fn scanner_cpu_s(&self) -> f64 {
        let first = self.samples.first().map_or(0.0, |s| s.scanner_cpu_s);
        self.end().scanner_cpu_s - first
    }

    pub fn samples_json(&self) -> Vec<Value> {
        let json = |sample: &Sample| {
            let mut value = json!(sample);
            value["arm"] = self.mechanism.name().into();
            value["repeat"] = self.repeat.into();
            value
        };
        self.samples.iter().map(json).collect()
    }

    /// Returns the mean of a value over the VMs of the arm.
    pub fn mean(&self, of: impl Fn(&VmWork) -> f64) -> f64 {
        self.work.iter().map(of).sum::<f64>() / self.work.len() as f64
    }

    /// Returns the results of the arm in one line, for the user who waits.
    pub fn in_short(&self) -> String {
        let vms = self.work.len() as f64;
        let sum = |of: fn(&VmWork) -> f64| self.mean(of) * vms;
        let walls = self.work.iter().map(|w| format!("{:.1}", w.wall_s));
        format!(
            "{:.0} MiB shared at the end, {:.0} on average, {:.2} s of CPU ({:.2} s of it in the VMs' libraries); work took {} s, {:.1} s of vCPU ({:.1} s in the kernel, {:.0} faults), {:.2} s of agents ({:.0} % of the host was busy with other things)",
            self.end().shared_pages as f64 / PAGES_PER_MIB,
            self.mean_shared() / PAGES_PER_MIB,
            self.scanner_cpu_s(),
            self.fold.library_cpu_s,
            walls.collect::<Vec<_>>().join(", "),
            sum(|w| w.vcpu_s),
            sum(|w| w.system_s),
            sum(|w| w.faults),
            sum(|w| w.agent_s),
            self.other_load_percent,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measured_curve_is_interpolated_linearly_and_is_constant_outside_its_points() {
        let curve = [(1.0, 10.0), (3.0, 20.0)];
        for (t, value) in [
            (0.0, 10.0),
            (1.0, 10.0),
            (2.0, 15.0),
            (3.0, 20.0),
            (9.0, 20.0),
        ] {
            assert!((value_at(&curve, t) - value).abs() < 1e-9, "{t}");
        }
        assert!(value_at(&[], 1.0).abs() < 1e-9);
    }
}
