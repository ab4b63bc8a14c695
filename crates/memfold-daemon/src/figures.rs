//! Figures for a metrics scrape, taken at most so often that they stay cheap however often somebody
//! asks.
//!
//! Most of them are of a [`FullReport`], which reads the page maps of all VMs and the sums of all
//! processes. So they are taken together and kept: for [`LEAST_AGE`], and for so long that taking
//! them takes at most a hundredth of a core. That goes by CPU time: on a busy host it takes long,
//! but costs no more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{Borrowed, FullReport, VmInfo};
use memfold_lend::{Lease, LenderStatus};
use parking_lot::Mutex;

use crate::on_shelf::OnShelf;

/// Figures that are not older are not taken again.
pub const LEAST_AGE: Duration = Duration::from_secs(10);

/// Figures are kept for this many times the CPU time that it took to take them.
const KEPT_FOR: u32 = 100;

/// But no longer.
const GREATEST_AGE: Duration = Duration::from_secs(300);

/// What a scrape shows, of one moment.
#[derive(Clone, Debug)]
pub struct Figures {
    /// When they were taken.
    pub taken: Instant,
    /// How long that took.
    pub took: Duration,
    /// CPU time that it took.
    pub cpu: Duration,
    /// The ledger and folding.
    pub report: FullReport,
    /// VMs.
    pub vms: Vec<VmInfo>,
    /// Whether this daemon steers KSM.
    pub steers_ksm: bool,
    /// Snapshots; `None` if their directory can't be read.
    pub snapshots: Option<OnShelf>,
    /// Segments; `None` if their directory can't be read.
    pub segments: Option<OnShelf>,
    /// Name of this host among those that lend and borrow.
    pub host: String,
    /// What this host lends; `None`: it doesn't.
    pub lending: Option<LenderStatus>,
    /// What VMs of this host borrow.
    pub borrowed: Vec<Borrowed>,
    /// All leases; `None` if the registry doesn't answer.
    pub leases: Option<Vec<Lease>>,
    /// Lenders that aren't believed.
    pub distrusted: u64,
    /// Wrong bytes that lenders have served since this daemon began.
    pub lies: u64,
}

impl Figures {
    /// Whether they may be shown again.
    fn is_fresh(&self) -> bool {
        self.taken.elapsed() < keep_for(self.cpu)
    }
}

fn keep_for(cpu: Duration) -> Duration {
    cpu.saturating_mul(KEPT_FOR).clamp(LEAST_AGE, GREATEST_AGE)
}

/// The figures taken last.
#[derive(Debug, Default)]
pub(crate) struct CachedFigures {
    last: Mutex<Option<Arc<Figures>>>,
    /// Held while new ones are taken.
    taking: Mutex<()>,
}

impl CachedFigures {
    fn last(&self) -> Option<Arc<Figures>> {
        self.last.lock().clone()
    }

    fn fresh(&self) -> Option<Arc<Figures>> {
        self.last().filter(|figures| figures.is_fresh())
    }

    /// The last figures if they are fresh; else new ones, by `take`. While somebody else takes
    /// these, old ones: many who ask at once don't wait for each other.
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
        // Somebody may have taken them while we waited.
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
        }
    }

    #[test]
    fn figures_are_kept_so_long_that_they_cost_a_hundredth_of_a_core() {
        assert_eq!(keep_for(Duration::from_millis(3)), LEAST_AGE);
        assert_eq!(
            keep_for(Duration::from_millis(400)),
            Duration::from_secs(40)
        );
        assert_eq!(keep_for(Duration::MAX), GREATEST_AGE);
    }

    #[test]
    fn figures_are_cached_for_their_age_and_taken_anew_afterwards() {
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
    fn while_new_figures_are_taken_old_ones_are_shown_and_a_failure_is_passed_on() {
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
