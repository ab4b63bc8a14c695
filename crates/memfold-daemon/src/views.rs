//! Makes the memory maps, tables and estimates that the dashboard and the command line show. They
//! are made only on request, one at a time, and cached for some seconds.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use memfold_api::AdviceReport;
use memfold_fold::{Command, DomainStats, PageRun};
use memfold_host::{HostFacts, Report, chain, examine};
use memfold_ksm::Explanation;
use memfold_ledger::estimate::fingerprint::Fingerprint;
use memfold_ledger::estimate::place::{Proposal, propose};
use memfold_ledger::estimate::{
    Domains, EstimateReport, FileRun, KnownFile, KnownVm, Options, Pace, VmFacts, estimate, targets,
};
use memfold_ledger::memory_map::{MOST_CELLS, MemoryMap, memory_map};
use memfold_ledger::plan::{Order, Plan};
use memfold_ledger::sharing::{Sharing, files_of, sharing};
use memfold_lend::graph::GraphError;
use memfold_store::StoreIdentity;
use memfold_vm::{AgentError, CommandResult, swap};
use memfold_wire::order::GuestOrder;
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::advice::advise;
use crate::error::{DaemonError, check, refused};
use crate::folding::ended;
use crate::machine::Machine;
use crate::mechanisms::Mechanisms;
use crate::reports::Reports;
use crate::sampling::Sampling;

/// Longest search for a placement. Meanwhile, no estimate is made.
const PLACE_LIMIT: Duration = Duration::from_secs(60);

/// Time for which maps of memory are cached.
const MEMORY_LIFE: Duration = Duration::from_secs(4);
/// Time for which doctor's report is cached: making it starts QEMU, which takes a second.
const DOCTOR_LIFE: Duration = Duration::from_secs(60);
/// Longest time that an estimate may run, in seconds.
const LONGEST_ESTIMATE_S: f64 = 300.0;
/// Number of memory maps, and of answers of guests, that are cached.
const MOST_CACHED: usize = 4096;
/// Largest `least_bytes` of a placement request, in bytes: more than the memory of any host.
const MOST_LEAST: u64 = 1 << 50;
/// Time limit for a guest to report the use of its swap disk. The next constant: time for which the
/// answer is cached.
const SWAP_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit for a guest to report its free memory.
const ANSWER: Duration = Duration::from_secs(5);

/// Body of `POST /v1/estimate`: the VMs to read, and limits.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EstimateOrder {
    /// VMs to read, by name or QEMU's process number; an empty list means all QEMUs of the host.
    #[serde(default)]
    pub vms: Vec<String>,
    /// CPU limit of the estimate, in percent of one core (above 0, to 50).
    pub cpu_percent: f64,
    /// Time after which the estimate ends with the results so far, in seconds (1 to 300).
    pub seconds: f64,
    /// Whether all VMs are treated as members of one trust domain.
    #[serde(default)]
    pub one_domain: bool,
}

/// Body of `POST /v1/plan/place`: the hosts, and limits for proposals.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlaceOrder {
    /// Fingerprints of two or more hosts, as `memfold estimate --fingerprint` writes them.
    #[schema(value_type = Vec<Object>)]
    pub fingerprints: Vec<Fingerprint>,
    /// Smallest saving for which moving a VM is proposed, in bytes.
    pub least_bytes: u64,
    /// Part of each host's memory that must stay free, in percent (0 to less than 100).
    pub leave_percent: f64,
}

/// Response of `GET /v1/vms/{name}/swap`: the use of a VM's swap disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SwapUse {
    /// Bytes of the swap disk that are in use, as the guest reports; null if the guest does not
    /// report them.
    pub used_bytes: Option<u64>,
    /// Why the guest does not report the use of its swap disk, as text; null if it does.
    pub why_not: Option<String>,
}

impl SwapUse {
    /// Converts the guest's answer to [`GuestOrder::SwapUse`].
    fn of(said: Result<CommandResult, AgentError>) -> Self {
        let no_sense = || "cannot parse the guest's answer".to_owned();
        let used = match said {
            Ok(said) if said.code != 0 => Err("the guest does not use the swap disk".to_owned()),
            Ok(said) => swap::parse_used(&said.stdout).ok_or_else(no_sense),
            Err(AgentError::TooMuchOutput) => Err(no_sense()),
            Err(error) => Err(chain(&error)),
        };
        Self {
            why_not: used.as_ref().err().cloned(),
            used_bytes: used.ok(),
        }
    }
}

/// Values of a cache by their keys, and the time at which each value was made.
type Cached<K, T> = Mutex<BTreeMap<K, (Instant, T)>>;

/// Service that makes maps and tables of memory for user interfaces, and caches them.
#[derive(Debug)]
pub struct Views {
    below: Arc<Mechanisms>,
    reports: Arc<Reports>,
    sampling: Arc<Sampling>,
    maps: Cached<(String, u64), MemoryMap>,
    sharing: Cached<(), Arc<Sharing>>,
    doctor: Cached<(), Report>,
    swaps: Cached<String, SwapUse>,
    /// Held while a VM's pages are read for an explanation of KSM.
    explaining: Mutex<()>,
    /// Held while an estimate or a placement is computed.
    estimating: Mutex<()>,
    ends: AtomicBool,
}

/// Returns the cached value if it is younger than `life`, else makes a new one, which is cached
/// unless [`MOST_CACHED`] others are. Concurrent callers wait for the new one.
fn fresh<K: Ord, T: Clone>(
    kept: &Cached<K, T>,
    key: K,
    life: Duration,
    make: impl FnOnce() -> Result<T, DaemonError>,
) -> Result<T, DaemonError> {
    let mut kept = kept.lock();
    kept.retain(|_, (made, _)| made.elapsed() < life);
    if let Some((_, value)) = kept.get(&key) {
        return Ok(value.clone());
    }
    let value = make()?;
    if kept.len() < MOST_CACHED {
        kept.insert(key, (Instant::now(), value.clone()));
    }
    Ok(value)
}

impl Views {
    pub(crate) fn new(
        below: Arc<Mechanisms>,
        reports: Arc<Reports>,
        sampling: Arc<Sampling>,
    ) -> Self {
        Self {
            below,
            reports,
            sampling,
            maps: Mutex::default(),
            sharing: Mutex::default(),
            doctor: Mutex::default(),
            swaps: Mutex::default(),
            explaining: Mutex::default(),
            estimating: Mutex::default(),
            ends: AtomicBool::new(false),
        }
    }

    /// Ends an estimate that is being computed, because the daemon ends.
    pub fn end(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }

    fn store_identities(&self) -> Result<Vec<StoreIdentity>, DaemonError> {
        let fold = self.below.folding.stats()?;
        Ok(fold.domains.iter().map(DomainStats::store).collect())
    }

    /// Returns a map of a VM's RAM: a grid of about `cells` cells.
    pub fn memory_map(&self, name: &str, cells: u64) -> Result<MemoryMap, DaemonError> {
        let machine = self.below.registry.machine(name)?;
        let cells = cells.clamp(1, MOST_CELLS);
        fresh(&self.maps, (name.to_owned(), cells), MEMORY_LIFE, || {
            let (of, layout) = ((machine.raw_pid(), name), machine.layout());
            let (stores, segments) = (self.store_identities()?, machine.segment_identities());
            Ok(memory_map(of, &layout, &stores, &segments, cells)?)
        })
    }

    /// Returns how many pages the two VMs of a pair share, for the `most` pairs that share most.
    /// The number is limited because 500 VMs have 125,000 pairs.
    pub fn sharing(&self, most: usize) -> Result<Sharing, DaemonError> {
        let all = fresh(&self.sharing, (), MEMORY_LIFE, || {
            let stores = self.store_identities()?;
            let machines = self.below.registry.machines();
            let files = machines.iter().filter_map(|machine| {
                let pid = machine.raw_pid();
                let segments = machine.segment_identities().into_iter();
                let segments: Vec<_> = segments.map(|(_, identity)| identity).collect();
                let of = (pid, machine.name(), machine.domain());
                // A VM that ends meanwhile is left out.
                files_of(of, &machine.layout(), &stores, &segments).ok()
            });
            Ok(Arc::new(sharing(&files.collect::<Vec<_>>())))
        })?;
        Ok(all.largest(most))
    }

    /// Returns the checks of this host, as `memfold doctor --json` prints them.
    pub fn doctor(&self) -> Result<Report, DaemonError> {
        let mut report = fresh(&self.doctor, (), DOCTOR_LIFE, || {
            Ok(examine(HostFacts::probe(self.below.registry.state())))
        })?;
        // The brake's state is not cached.
        report.checks.push(self.below.brake.debt()?.check());
        Ok(report)
    }

    /// Explains why a VM's memory merges, or why it does not. One explanation at a time.
    pub fn explain_ksm(&self, name: &str) -> Result<Explanation, DaemonError> {
        let _turn = self.explaining.lock();
        self.below.ksm.explain(name)
    }

    /// Computes from the running VMs how many VMs fit on this host.
    pub fn plan(&self, order: &Order) -> Result<Plan, DaemonError> {
        let report = self.reports.joint_report()?;
        let plan = order.plan(&report.ledger, &report.fold, &self.sampling.growths());
        plan.map_err(|error| DaemonError::BadRequest(error.to_string()))
    }

    /// Advises what memory each running VM should be given, from the history of the last `days`.
    ///
    /// # Errors
    ///
    /// [`DaemonError::NoHistory`] if no history is kept; [`DaemonError::BadRequest`] for a wrong
    /// number of days.
    pub fn advise(&self, days: Option<u32>) -> Result<AdviceReport, DaemonError> {
        advise(&self.below, &self.sampling, days)
    }

    /// Proposes which VMs of several hosts to place together. Searches for a minute at most.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] while another proposal or estimate is computed.
    pub fn place(&self, order: &PlaceOrder) -> Result<Proposal, DaemonError> {
        let (bytes, percent) = (order.least_bytes, order.leave_percent);
        let is_fine = (0.0..100.0).contains(&percent);
        check("leave_percent", percent, is_fine, "0 to less than 100")?;
        let most = format!("{MOST_LEAST} at most");
        check("least_bytes", bytes, bytes <= MOST_LEAST, &most)?;
        let _turn = self.estimate_turn()?;
        let proposal = propose(&order.fingerprints, bytes, percent, Some(PLACE_LIMIT));
        proposal.map_err(|error| DaemonError::BadRequest(error.to_string()))
    }

    /// Takes the right to compute an estimate or a proposal; only one is computed at a time.
    fn estimate_turn(&self) -> Result<MutexGuard<'_, ()>, DaemonError> {
        self.estimating.try_lock().ok_or_else(|| {
            refused(
                "another estimate is being made",
                "wait until that estimate is complete",
            )
        })
    }

    /// Returns the use of a VM's swap disk, as the guest reports it.
    pub fn swap_use(&self, name: &str) -> Result<SwapUse, DaemonError> {
        let machine = self.below.registry.machine(name)?;
        if machine.vm().spec().is_none_or(|spec| spec.swap.is_none()) {
            return Err(GraphError::NoSwapDisk(name.to_owned()).into());
        }
        let mut is_known = true;
        let said = fresh(&self.swaps, name.to_owned(), SWAP_TIMEOUT, || {
            is_known = false;
            Ok(SwapUse {
                used_bytes: None,
                why_not: Some("the guest is being asked".into()),
            })
        })?;
        if is_known {
            return Ok(said);
        }
        // However many requests there are, one command at a time runs in the guest. No lock is
        // held, because the guest may be slow.
        let said = SwapUse::of(machine.run_short(GuestOrder::SwapUse, SWAP_TIMEOUT));
        let kept = (Instant::now(), said.clone());
        self.swaps.lock().insert(name.to_owned(), kept);
        Ok(said)
    }

    /// Estimates how much memory could be saved on this host, by reading the memory of VMs.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] while another proposal or estimate is computed.
    pub fn estimate(&self, order: &EstimateOrder) -> Result<EstimateReport, DaemonError> {
        let (cpu, seconds) = (order.cpu_percent, order.seconds);
        let is_fine = cpu > 0.0 && cpu <= 50.0;
        check("cpu_percent", cpu, is_fine, "more than 0, and 50 at most")?;
        let (wanted, range) = (
            1.0..=LONGEST_ESTIMATE_S,
            format!("1 to {LONGEST_ESTIMATE_S}"),
        );
        check("seconds", seconds, wanted.contains(&seconds), &range)?;
        let _turn = self.estimate_turn()?;
        let facts = self.estimate_facts()?;
        let limit = Duration::from_secs_f64(seconds);
        let pace = Pace::new(cpu / 100.0, Some(limit), &self.ends);
        let domains = Domains {
            one: order.one_domain,
            of: Vec::new(),
        };
        let targets = targets::find(Path::new("/proc"), &order.vms, &domains, &facts)?;
        let options = Options::here();
        let report = estimate(targets, &facts.files, &options, &pace, &mut |_, _, _| {})?;
        Ok(EstimateReport {
            daemon: true,
            ..report
        })
    }

    /// Returns names, trust domains, RAM ranges and cached files of all VMs, and the guests' free
    /// memory.
    pub fn estimate_facts(&self) -> Result<VmFacts, DaemonError> {
        let (answer, cached) = sync_channel(1);
        self.below.folding.tell(Command::CachedFiles(answer))?;
        let machines = self.below.registry.machines();
        // All guests are asked at the same time, so a guest that does not answer delays only its
        // own part.
        let free: Vec<Option<u64>> = std::thread::scope(|scope| {
            let asked = machines.iter().map(|vm| scope.spawn(|| free_bytes(vm)));
            let asked: Vec<_> = asked.collect();
            let answers = asked.into_iter();
            answers.map(|thread| thread.join().ok().flatten()).collect()
        });
        let cached = cached.recv().map_err(|_| ended())?;
        let mut runs: HashMap<String, Vec<PageRun>> = cached.vms.into_iter().collect();
        let known = |(machine, free_bytes): (&Arc<Machine>, Option<u64>)| {
            let runs = runs.remove(machine.name());
            KnownVm {
                name: machine.name().to_owned(),
                domain: machine.domain().map(str::to_owned),
                pid: machine.raw_pid(),
                ram: machine.ram_ranges(),
                free_bytes,
                runs: runs.map(|runs| runs.into_iter().map(file_run).collect()),
            }
        };
        let vms = machines.iter().zip(free).map(known);
        let file = |(path, file_bytes): (Vec<u8>, u64)| KnownFile {
            path: String::from_utf8_lossy(&path).into_owned(),
            file_bytes,
        };
        Ok(VmFacts {
            vms: vms.collect(),
            files: cached.files.into_iter().map(file).collect(),
        })
    }
}

fn file_run(run: PageRun) -> FileRun {
    FileRun {
        hva: run.hva.0,
        pages: run.pages,
        file: run.file,
        page: run.page,
    }
}

/// Returns `MemFree` of a guest, in bytes; `None` if the guest's agent does not answer.
fn free_bytes(machine: &Machine) -> Option<u64> {
    machine.info().agent?;
    let answer = machine.run(GuestOrder::MemoryInfo, ANSWER).ok()?;
    let text = String::from_utf8_lossy(&answer.stdout);
    let mut lines = text.lines();
    let line = lines.find_map(|line| line.strip_prefix("MemFree:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_malformed_swap_use_report_from_a_guest_is_rejected() {
        let said = |stdout: &str, code| {
            let stdout = stdout.as_bytes().to_vec();
            let mut result = CommandResult::default();
            (result.stdout, result.code) = (stdout, code);
            SwapUse::of(Ok(result))
        };
        let line = "/dev/vdb                                partition\t65532\t\t1024\t\t-2\n";
        assert_eq!(said(line, 0).used_bytes, Some(1 << 20));
        assert_eq!(said(line, 0).why_not, None);
        for (text, code, why) in [
            ("", 1, "does not use the swap disk"),
            ("/dev/vdb partition 65532 -1 -2", 0, "cannot parse"),
            (
                "/dev/vdb partition 65532 18446744073709551615 -2",
                0,
                "cannot parse",
            ),
            ("\u{1}", 0, "cannot parse"),
        ] {
            let said = said(text, code);
            assert_eq!(said.used_bytes, None);
            assert!(said.why_not.unwrap().contains(why), "{text}");
        }
        let gone = SwapUse::of(Err(AgentError::Lost));
        assert!(gone.why_not.unwrap().contains("disconnected"));
    }

    #[test]
    fn a_computed_answer_is_cached_until_it_expires_and_a_failure_is_not_cached() {
        let kept: Cached<(), u32> = Mutex::default();
        let life = Duration::from_secs(60);
        let failed = fresh(&kept, (), life, || Err(DaemonError::NoSuchPath));
        assert!(failed.is_err());
        assert_eq!(fresh(&kept, (), life, || Ok(1)).unwrap(), 1);
        assert_eq!(fresh(&kept, (), life, || Ok(2)).unwrap(), 1);
        assert_eq!(fresh(&kept, (), Duration::ZERO, || Ok(3)).unwrap(), 3);
    }
}
