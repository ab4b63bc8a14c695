//! Collects the figures that a metrics scrape shows, and caches them, so that frequent scrapes cost
//! little.
//!
//! Most figures come from a [`FullReport`]. To make it, the daemon reads the page maps of all VMs
//! and the memory use of all processes. So all figures are collected together. They are cached for
//! at least [`LEAST_AGE`], and for 100 times the CPU time of collecting them: scrapes take at most
//! a hundredth of a core. CPU time is measured, because elapsed time is longer on a busy host.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{Borrowed, FullReport, RightsizeReport, VmInfo};
use memfold_lend::{Lease, LenderStatus};
use memfold_units::ByteSize;
use parking_lot::Mutex;

/// Shortest time for which the figures of a metrics scrape are cached.
pub const LEAST_AGE: Duration = Duration::from_secs(10);

/// Factor: figures are cached for this many times the CPU time of taking them.
const KEPT_FOR: u32 = 100;

/// Longest time for which figures for a scrape are cached.
const GREATEST_AGE: Duration = Duration::from_secs(300);

/// All figures of one metrics scrape, read together.
#[derive(Clone, Debug)]
pub struct Figures {
    /// Time at which reading the figures began. The age of the figures counts from this time.
    pub taken: Instant,
    /// Elapsed time that reading the figures took.
    pub took: Duration,
    /// CPU time that reading the figures took.
    pub cpu: Duration,
    /// The ledger's report, with the fold engine's figures.
    pub report: FullReport,
    /// All VMs of the daemon, as `memfold vm list` shows them.
    pub vms: Vec<VmInfo>,
    /// Whether this daemon steers KSM.
    pub steers_ksm: bool,
    /// Number and size of this host's snapshots; `None` if the snapshot directory cannot be read.
    pub snapshots: Option<OnShelf>,
    /// Number and size of this host's segments; `None` if the segment directory cannot be read.
    pub segments: Option<OnShelf>,
    /// Name of this host, as lender and borrower of memory.
    pub host: String,
    /// State of this host as a lender of memory; `None` if this host does not lend.
    pub lending: Option<LenderStatus>,
    /// This host's swap disks and volumes that are on lent RAM.
    pub borrowed: Vec<Borrowed>,
    /// All leases in the registry; `None` if the registry does not answer.
    pub leases: Option<Vec<Lease>>,
    /// Number of lenders that served wrong bytes and are not used.
    pub distrusted: u64,
    /// Number of times that lenders served wrong bytes since the daemon's start.
    pub lies: u64,
    /// What right-sizing knows and has done, without single orders.
    pub rightsizing: RightsizeReport,
}

fn keep_for(cpu: Duration) -> Duration {
    cpu.saturating_mul(KEPT_FOR).clamp(LEAST_AGE, GREATEST_AGE)
}

/// Number and size of all snapshots, or of all segments, of this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnShelf {
    /// Number of snapshots or segments in the directory.
    pub count: u64,
    /// Number of snapshots or segments that cannot be used.
    pub broken: u64,
    /// Size in bytes. For snapshots: the space that they take on disk. For segments: the part of
    /// their images that the host's page cache holds.
    pub bytes: ByteSize,
}

impl OnShelf {
    fn add(&mut self, is_broken: bool, bytes: u64) {
        self.count += 1;
        self.broken += u64::from(is_broken);
        self.bytes += ByteSize(bytes);
    }

    /// Counts all snapshots; `None` if their directory cannot be read.
    pub(crate) fn of_snapshots(shelf: &memfold_snapshot::Shelf) -> Option<Self> {
        let mut all = Self::default();
        for name in shelf.names().ok()? {
            // Another thread may remove the snapshot at this moment.
            let bytes = shelf.disk_bytes(&name).unwrap_or(0);
            all.add(shelf.manifest(&name).is_err(), bytes);
        }
        Some(all)
    }

    /// Counts all segments; `None` if their directory cannot be read.
    pub(crate) fn of_segments(shelf: &memfold_segment::Shelf) -> Option<Self> {
        let mut all = Self::default();
        for segment in shelf.all().ok()? {
            let is_broken = shelf.problem(&segment).is_some();
            all.add(is_broken, shelf.resident_bytes(&segment));
        }
        Some(all)
    }
}

/// Cache of the last figures for a scrape.
#[derive(Debug, Default)]
pub(crate) struct CachedFigures {
    last: Mutex<Option<Arc<Figures>>>,
    /// Lock of the thread that takes new figures.
    taking: Mutex<()>,
}

impl CachedFigures {
    fn last(&self) -> Option<Arc<Figures>> {
        self.last.lock().clone()
    }

    fn fresh(&self) -> Option<Arc<Figures>> {
        let is_fresh = |figures: &Arc<Figures>| figures.taken.elapsed() < keep_for(figures.cpu);
        self.last().filter(is_fresh)
    }

    /// Returns the cached figures if they are fresh, else new figures from `take`. While another
    /// thread takes new figures, this function returns the old figures, so that callers do not
    /// wait.
    pub fn get<E>(&self, take: impl FnOnce() -> Result<Figures, E>) -> Result<Arc<Figures>, E> {
        if let Some(figures) = self.fresh() {
            return Ok(figures);
        }
        let _taking = match self.taking.try_lock() {
            Some(taking) => taking,
            None => match self.last() {
                Some(old) => return Ok(old),
                None => self.taking.lock(),
            },
        };
        // Another thread may have taken new figures while this one waited for the lock.
        if let Some(figures) = self.fresh() {
            return Ok(figures);
        }
        let figures = Arc::new(take()?);
        *self.last.lock() = Some(figures.clone());
        Ok(figures)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn figures(taken: Instant, cpu: Duration) -> Figures {
        Figures {
            taken,
            took: Duration::ZERO,
            cpu,
            report: FullReport {
                ledger: memfold_ledger::Report::default(),
                fold: memfold_fold::EngineStats::default(),
            },
            vms: Vec::new(),
            steers_ksm: false,
            snapshots: None,
            segments: None,
            host: String::new(),
            lending: None,
            borrowed: Vec::new(),
            leases: None,
            distrusted: 0,
            lies: 0,
            rightsizing: RightsizeReport::default(),
        }
    }

    #[test]
    fn metrics_are_cached_so_long_that_reading_them_costs_at_most_one_percent_of_a_core() {
        assert_eq!(keep_for(Duration::from_millis(3)), LEAST_AGE);
        assert_eq!(
            keep_for(Duration::from_millis(400)),
            Duration::from_secs(40)
        );
        assert_eq!(keep_for(Duration::MAX), GREATEST_AGE);
    }

    #[test]
    fn metrics_are_served_from_the_cache_until_they_expire() {
        let kept = CachedFigures::default();
        let taken = Cell::new(0);
        let old = Instant::now().checked_sub(LEAST_AGE).unwrap();
        let ask = |when: Instant| {
            kept.get(|| {
                taken.set(taken.get() + 1);
                Ok::<_, ()>(figures(when, Duration::ZERO))
            })
            .unwrap()
        };
        ask(old);
        let fresh = ask(Instant::now());
        assert_eq!(taken.get(), 2);
        assert!(Arc::ptr_eq(&fresh, &ask(Instant::now())));
        assert_eq!(taken.get(), 2);
    }

    #[test]
    fn while_metrics_are_measured_again_other_requests_get_the_cached_metrics() {
        let kept = CachedFigures::default();
        let old = Instant::now().checked_sub(LEAST_AGE).unwrap();
        let first = kept
            .get(|| Ok::<_, ()>(figures(old, Duration::ZERO)))
            .unwrap();
        let meanwhile = kept.get(|| {
            let seen = std::thread::scope(|scope| {
                let asks = || kept.get(|| Err::<Figures, ()>(())).unwrap();
                scope.spawn(asks).join().unwrap()
            });
            assert!(Arc::ptr_eq(&first, &seen));
            Err::<Figures, &str>("no")
        });
        assert_eq!(meanwhile.unwrap_err(), "no");
    }
}
