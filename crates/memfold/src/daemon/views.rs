//! Views of memory for persons: each is made when it is asked for, one at a time, and kept for some seconds, however many ask.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::machine::Machine;
use super::{Daemon, DaemonError};
use crate::estimate::{Domains, EstimateReport, Options, Pace, estimate, targets};
use crate::host::{HostFacts, examine};
use crate::ledger::memory_map::{MemoryMap, memory_map};
use crate::ledger::sharing::{Sharing, files_of, sharing};
use crate::store::StoreIdentity;

/// How long maps of memory are good.
const MEMORY_LIFE: Duration = Duration::from_secs(4);
/// How long doctor's report is good: it tries QEMU, which takes a second.
const DOCTOR_LIFE: Duration = Duration::from_secs(60);
/// Longest an estimate may take, in seconds.
const LONGEST_ESTIMATE_S: f64 = 300.0;
/// Maps of VMs that are kept.
const MOST_MAPS: usize = 64;

/// `POST /v1/estimate`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EstimateOrder {
    /// VMs to look at, by name or QEMU's process number; none: all QEMUs of the host.
    #[serde(default)]
    pub vms: Vec<String>,
    /// CPU that it may use, in percent of one core (above 0, to 50).
    pub cpu_percent: f64,
    /// Time after which it ends with what was found, in seconds (1 to 300).
    pub seconds: f64,
    /// As if all VMs were of one trust domain.
    #[serde(default)]
    pub one_domain: bool,
}

/// Something that was made a while ago.
type Kept<T> = Mutex<Option<(Instant, T)>>;

#[derive(Debug, Default)]
pub(super) struct Views {
    maps: Mutex<BTreeMap<(String, u64), (Instant, MemoryMap)>>,
    sharing: Kept<Sharing>,
    doctor: Kept<serde_json::Value>,
    /// Held while an estimate is made.
    estimating: Mutex<()>,
    ends: AtomicBool,
}

/// What is kept, if it is still good, else a new one. Others that ask meanwhile wait for it.
fn fresh<T: Clone>(
    kept: &Kept<T>,
    life: Duration,
    make: impl FnOnce() -> Result<T, DaemonError>,
) -> Result<T, DaemonError> {
    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((made, value)) = kept.as_ref() {
        if made.elapsed() < life {
            return Ok(value.clone());
        }
    }
    let value = make()?;
    *kept = Some((Instant::now(), value.clone()));
    Ok(value)
}

impl Daemon {
    /// The daemon ends: so does an estimate that is being made.
    pub fn end_views(&self) {
        self.views.ends.store(true, Ordering::Relaxed);
    }

    fn store_identities(&self) -> Result<Vec<StoreIdentity>, DaemonError> {
        let fold = self.fold_stats()?;
        let identity = |d: &crate::fold::DomainStats| StoreIdentity {
            dev: d.store_dev,
            ino: d.store_ino,
        };
        Ok(fold.domains.iter().map(identity).collect())
    }

    /// A VM's RAM from end to end, in about `cells` cells.
    pub fn memory_map(&self, name: &str, cells: u64) -> Result<MemoryMap, DaemonError> {
        let machine = self.machine(name)?;
        let mut maps = self
            .views
            .maps
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        maps.retain(|_, (made, _)| made.elapsed() < MEMORY_LIFE);
        let key = (name.to_owned(), cells);
        if let Some((_, map)) = maps.get(&key) {
            return Ok(map.clone());
        }
        let stores = self.store_identities()?;
        let pid = machine.pid().as_raw_nonzero().get();
        let segments = machine.segment_identities();
        let map = memory_map((pid, name), &machine.layout(), &stores, &segments, cells)?;
        if maps.len() < MOST_MAPS {
            maps.insert(key, (Instant::now(), map.clone()));
        }
        Ok(map)
    }

    /// Who has pages in common with whom.
    pub fn sharing(&self) -> Result<Sharing, DaemonError> {
        fresh(&self.views.sharing, MEMORY_LIFE, || {
            let stores = self.store_identities()?;
            let machines: Vec<Arc<Machine>> = self.lock().values().cloned().collect();
            let files = machines.iter().filter_map(|machine| {
                let pid = machine.pid().as_raw_nonzero().get();
                let segments = machine.segment_identities();
                let segments: Vec<StoreIdentity> = segments.into_iter().map(|(_, id)| id).collect();
                let of = (pid, machine.name(), machine.domain());
                // A VM that ends while we look is left out.
                files_of(of, &machine.layout(), &stores, &segments).ok()
            });
            Ok(sharing(&files.collect::<Vec<_>>()))
        })
    }

    /// What works on this host, as `memfold doctor --json` prints it.
    pub fn doctor(&self) -> Result<serde_json::Value, DaemonError> {
        fresh(&self.views.doctor, DOCTOR_LIFE, || {
            serde_json::to_value(examine(HostFacts::probe(&self.options.state)))
                .map_err(|_| DaemonError::Internal("doctor's report can't be written as JSON"))
        })
    }

    /// What could be saved. One estimate at a time.
    pub fn estimate(&self, order: &EstimateOrder) -> Result<EstimateReport, DaemonError> {
        let wrong = |text: String| Err(DaemonError::BadRequest(text));
        if !(order.cpu_percent > 0.0 && order.cpu_percent <= 50.0) {
            return wrong(format!(
                "cpu_percent is {}; give more than 0, and 50 at most",
                order.cpu_percent
            ));
        }
        if !(1.0..=LONGEST_ESTIMATE_S).contains(&order.seconds) {
            return wrong(format!(
                "seconds is {}; give 1 to {LONGEST_ESTIMATE_S}",
                order.seconds
            ));
        }
        let _turn = match self.views.estimating.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(DaemonError::Busy {
                    why: "another estimate is being made".into(),
                    fix: "wait until it is done".into(),
                });
            }
        };
        let facts = self.estimate_facts()?;
        let limit = Duration::from_secs_f64(order.seconds);
        let pace = Pace::new(order.cpu_percent / 100.0, Some(limit), &self.views.ends);
        let domains = Domains {
            one: order.one_domain,
            of: Vec::new(),
        };
        let targets = targets::find(Path::new("/proc"), &order.vms, &domains, &facts)?;
        let report = estimate(
            targets,
            &facts.files,
            &Options::here(),
            &pace,
            &mut |_, _, _| {},
        )?;
        Ok(EstimateReport {
            daemon: true,
            ..report
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_good_is_not_made_again_and_a_failure_is_not_kept() {
        let kept: Kept<u32> = Mutex::default();
        let life = Duration::from_secs(60);
        let failed = fresh(&kept, life, || Err(DaemonError::NoSuchPath));
        assert!(failed.is_err());
        assert_eq!(fresh(&kept, life, || Ok(1)).unwrap(), 1);
        assert_eq!(fresh(&kept, life, || Ok(2)).unwrap(), 1);
        assert_eq!(fresh(&kept, Duration::ZERO, || Ok(3)).unwrap(), 3);
    }
}
