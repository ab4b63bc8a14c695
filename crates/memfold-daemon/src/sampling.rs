//! Takes samples of the ledger periodically. Each sample is written to the history of memory use.
//! While a user watches the live view (`memfold top` or the dashboard), samples are taken more
//! often.
//!
//! The cost of a sample depends on the host, because a sample reads all processes. So the CPU time
//! of each sample is measured, and the interval is set so that samples take at most [`IDLE_SHARE`]
//! of a core, or [`LIVE_SHARE`] while somebody watches. After a change by a request, watchers get a
//! sample earlier; such samples take at most [`CHANGE_SHARE`] of a core.

use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use memfold_api::{Borrowed, FullReport, SwapPlace, VmInfo};
use memfold_host::chain;
use memfold_ledger::history::{
    Event, History, HistoryError, KEEP_FINE_S, Lent, Series, Trends, growth, host_values, vm_values,
};
use memfold_ledger::plan::Growths;
use parking_lot::{Condvar, Mutex};
use serde::Serialize;
use tokio::sync::watch;
use tracing::warn;
use utoipa::ToSchema;

use crate::error::DaemonError;
use crate::events::{Beside, Seen, changes, event};
use crate::mechanisms::Mechanisms;
use crate::reports::Reports;
use crate::threads::{self, thread_cpu, unix_time};
use crate::vms::Vms;

/// Shortest time between two samples for the history.
const IDLE_INTERVAL: Duration = Duration::from_secs(30);
/// Shortest time between two samples while somebody watches the live view.
const LIVE_INTERVAL: Duration = Duration::from_secs(2);
/// Longest time between two samples, whatever they cost.
const LONGEST_INTERVAL: Duration = Duration::from_secs(600);
/// Part of one core that samples may take while nobody watches the live view.
const IDLE_SHARE: f64 = 0.001;
/// Part of one core that samples may take while somebody watches the live view.
const LIVE_SHARE: f64 = 0.008;
/// Part of one core that samples may take while somebody watches the live view and VMs are changed.
const CHANGE_SHARE: f64 = 0.1;
/// If the last sample is older than this, the first watcher of the live view gets a new one. The
/// limit also bounds the cost of watchers that come and go.
const YOUNG: Duration = Duration::from_secs(10);
/// Most events that are kept until the history can be written. The oldest are dropped.
const MOST_UNWRITTEN: usize = 1000;

/// One sample for the live view, as sent to watchers.
#[derive(Serialize, ToSchema)]
pub struct Live<'a> {
    /// The ledger's report with the fold engine's figures, as `memfold report --json` prints it.
    #[serde(flatten)]
    pub report: &'a FullReport,
    /// All VMs, as `memfold vm list` shows them.
    pub vms: &'a [VmInfo],
    /// CPU time that taking this sample cost, in milliseconds.
    pub sample_cpu_ms: f64,
    /// Time until the next sample, in milliseconds.
    pub interval_ms: u64,
}

/// State shared by the sampling thread and the watchers.
#[derive(Debug)]
struct Samples {
    history: Option<Mutex<History>>,
    latest: watch::Sender<Arc<str>>,
    wanted: Mutex<Wanted>,
    /// Notified when the daemon ends, when a watcher of the live view connects, and after a change.
    woken: Condvar,
}

/// What the sampling thread is to do before the next sample is due.
#[derive(Debug, Default)]
struct Wanted {
    /// Whether the daemon is ending.
    end: bool,
    /// Whether a request has changed something since the last sample began.
    after_change: bool,
}

impl Samples {
    /// Opens the history at `path`. If it cannot be opened, no history is kept: a daemon without
    /// history is better than none.
    fn new(path: Option<&Path>) -> Self {
        let open = |path: &Path| {
            let opened = History::open(path);
            if let Err(error) = &opened {
                warn!(
                    error = chain(error),
                    "cannot open the history of memory use; no history is kept until the daemon restarts"
                );
            }
            opened.ok()
        };
        Self {
            history: path.and_then(open).map(Mutex::new),
            latest: watch::Sender::new(Arc::from("")),
            wanted: Mutex::default(),
            woken: Condvar::new(),
        }
    }

    /// Wakes the thread to compute again when the next sample is due, after `want` has noted why.
    fn wake(&self, want: impl FnOnce(&mut Wanted)) {
        want(&mut self.wanted.lock());
        self.woken.notify_all();
    }

    fn is_watched(&self) -> bool {
        self.latest.receiver_count() > 0
    }

    /// Waits until the next sample is due. Returns `false` when the daemon ends. Without history
    /// and without watchers, no sample is due.
    fn wait(&self, cost: Duration, taken: Option<Instant>) -> bool {
        let was_watched = self.is_watched();
        let mut wanted = self.wanted.lock();
        loop {
            if wanted.end {
                return false;
            }
            let watched = self.is_watched();
            let mut due = interval(cost, watched);
            if watched && !was_watched {
                due = due.min(YOUNG);
            }
            if watched && wanted.after_change {
                due = due.min(interval_after_change(cost));
            }
            let is_wanted = watched || self.history.is_some();
            let left = match taken.map(|taken| due.checked_sub(taken.elapsed())) {
                _ if !is_wanted => LONGEST_INTERVAL,
                Some(Some(left)) => left,
                None | Some(None) => {
                    wanted.after_change = false;
                    return true;
                }
            };
            self.woken.wait_for(&mut wanted, left);
        }
    }
}

/// Returns the time until the next sample, after a sample that took `cost` of CPU time.
fn interval(cost: Duration, watched: bool) -> Duration {
    let (least, share) = if watched {
        (LIVE_INTERVAL, LIVE_SHARE)
    } else {
        (IDLE_INTERVAL, IDLE_SHARE)
    };
    cost.div_f64(share).clamp(least, LONGEST_INTERVAL)
}

/// Returns the time from a sample that took `cost` of CPU time to a sample after a change.
fn interval_after_change(cost: Duration) -> Duration {
    cost.div_f64(CHANGE_SHARE)
        .clamp(LIVE_INTERVAL, LONGEST_INTERVAL)
}

fn now_unix_s() -> i64 {
    i64::try_from(unix_time().as_secs()).unwrap_or(i64::MAX)
}

/// Service that takes samples of the ledger and writes them to the history.
#[derive(Debug)]
pub struct Sampling {
    below: Arc<Mechanisms>,
    vms: Arc<Vms>,
    reports: Arc<Reports>,
    samples: Arc<Samples>,
}

impl Sampling {
    /// Creates the service. `history`: the history's file; `None`: no history is kept.
    pub(crate) fn new(
        below: Arc<Mechanisms>,
        vms: Arc<Vms>,
        reports: Arc<Reports>,
        history: Option<&Path>,
    ) -> Self {
        Self {
            below,
            vms,
            reports,
            samples: Arc::new(Samples::new(history)),
        }
    }

    pub(crate) fn begin(self: &Arc<Self>) -> Result<(), DaemonError> {
        let (sampling, samples) = (Arc::downgrade(self), self.samples.clone());
        threads::begin("sampling", move || sample_on(&sampling, &samples))
            .map_err(|_| DaemonError::Internal("no thread to take samples"))
    }

    pub(crate) fn end(&self) {
        self.samples.wake(|wanted| wanted.end = true);
    }

    /// Notes that a request has changed something: watchers of the live view get a sample soon, at
    /// least 2 s after the last one.
    pub fn note_change(&self) {
        self.samples.wake(|wanted| wanted.after_change = true);
    }

    /// Returns a channel of live samples as JSON ([`Live`]). Its first value is the last sample.
    /// Slow receivers miss samples.
    pub fn samples(&self) -> watch::Receiver<Arc<str>> {
        let receiver = self.samples.latest.subscribe();
        self.samples.wake(|_| ());
        receiver
    }

    fn history<T>(
        &self,
        read: impl FnOnce(&History, i64) -> Result<T, HistoryError>,
    ) -> Result<T, DaemonError> {
        let Some(history) = &self.samples.history else {
            return Err(DaemonError::NoHistory);
        };
        let history = history.lock();
        Ok(read(&history, now_unix_s())?)
    }

    /// Returns memory figures from the history over the last `seconds`, in at most `points` points.
    /// `vm`: name of a VM; `None`: the whole host.
    pub fn history_of(
        &self,
        vm: Option<&str>,
        seconds: i64,
        points: i64,
    ) -> Result<Series, DaemonError> {
        self.history(|history, now| match vm {
            None => history.host(now, now - seconds, points),
            Some(vm) => history.vm(vm, now, now - seconds, points),
        })
    }

    /// Returns the PSS of each VM from the history, over the last `seconds` (at most 24 h), in at
    /// most `points` points.
    pub fn trends(&self, seconds: i64, points: i64) -> Result<Trends, DaemonError> {
        self.history(|history, now| history.trends(now, now - seconds, points))
    }

    /// Returns the growth of memory during the last day, for each VM with enough samples.
    pub(crate) fn growths(&self) -> Growths {
        let names = self.below.registry.names();
        let of = |name: String| {
            let series = self.history_of(Some(&name), KEEP_FINE_S, KEEP_FINE_S / 30);
            let found = growth(&series.ok()?)?;
            Some((name, found.bytes_per_hour))
        };
        names.into_iter().filter_map(of).collect()
    }

    /// Returns the last `count` events of this host and its VMs, newest first.
    pub fn events(&self, count: i64) -> Result<Vec<Event>, DaemonError> {
        self.history(|history, _| history.events(count))
    }

    /// Returns the events after the one with the number `after`, oldest first, at most `count`,
    /// each with its number. Numbers are consecutive; old events are dropped.
    pub fn events_after(&self, after: i64, count: i64) -> Result<Vec<(i64, Event)>, DaemonError> {
        self.history(|history, _| history.events_after(after, count))
    }

    /// Returns the number of the newest event; 0 if there is none.
    pub fn last_event(&self) -> Result<i64, DaemonError> {
        self.history(|history, _| history.last_event())
    }

    /// Takes one sample. Returns the CPU time that the sample took.
    fn sample(&self, past: &mut Past) -> Result<Duration, DaemonError> {
        let before = thread_cpu();
        let (report, workers) = self.reports.report_and_cpu()?;
        let beside = Beside {
            vms: self.vms.list(),
            distrusted: self.below.leases.lies().0,
            borrowed: self.reports.borrowed(),
            lending: self.below.lending.status(),
            snapshots: self.below.snapshots.names().ok(),
        };
        let seen = Seen::of(&report, &beside);
        let began = || format!("memfold {} began", env!("CARGO_PKG_VERSION"));
        let mut events = match &past.seen {
            Some(last) => changes(last, &seen),
            None => vec![event("daemon", false, None, began())],
        };
        past.seen = Some(seen);
        let now = now_unix_s();
        for event in &mut events {
            event.at_unix_s = now;
        }
        past.unwritten.append(&mut events);
        let too_many = past.unwritten.len().saturating_sub(MOST_UNWRITTEN);
        past.unwritten.drain(..too_many);
        if let Some(history) = &self.samples.history {
            let is_lent = |b: &&Borrowed| matches!(b.place, SwapPlace::Lent | SwapPlace::Degraded);
            let borrowed = beside.borrowed.iter().filter(is_lent);
            let lent = Lent {
                lent_bytes: beside.lending.as_ref().map_or(0, |l| l.lent_bytes),
                borrowed_bytes: borrowed.map(|b| b.bytes).sum(),
            };
            let host = host_values(&report.ledger, &report.fold, lent);
            let sizes = self.below.rightsizing.sizes();
            let of_vm = |vm: &memfold_ledger::VmAccount| {
                let sized = sizes.get(&vm.name).copied();
                (vm.name.clone(), vm_values(vm, sized))
            };
            let of_vms: Vec<_> = report.ledger.vms.iter().map(of_vm).collect();
            let mut history = history.lock();
            match history.add(now, &host, &of_vms, &past.unwritten) {
                Ok(()) => past.unwritten.clear(),
                Err(error) => warn!(
                    error = chain(&error),
                    "cannot write a sample to the history; free space in the --records directory"
                ),
            }
        }
        let cost = workers + thread_cpu().saturating_sub(before);
        let live = Live {
            report: &report,
            vms: &beside.vms,
            sample_cpu_ms: cost.as_secs_f64() * 1e3,
            interval_ms: u64::try_from(interval(cost, true).as_millis()).unwrap_or(u64::MAX),
        };
        // This sample is also kept without watchers: the next watcher gets it at once.
        match serde_json::to_string(&live) {
            Ok(text) => drop(self.samples.latest.send_replace(text.into())),
            Err(error) => warn!(%error, "cannot encode a sample as JSON; report this bug"),
        }
        Ok(workers + thread_cpu().saturating_sub(before))
    }
}

/// What earlier samples leave to the next one.
#[derive(Default)]
struct Past {
    /// What the last sample saw.
    seen: Option<Seen>,
    /// Events that could not be written to the history yet.
    unwritten: Vec<Event>,
}

fn sample_on(sampling: &Weak<Sampling>, samples: &Samples) {
    let (mut past, mut cost, mut taken) = (Past::default(), Duration::ZERO, None);
    while samples.wait(cost, taken) {
        let Some(sampling) = sampling.upgrade() else {
            return;
        };
        taken = Some(Instant::now());
        cost = sampling.sample(&mut past).unwrap_or_else(|error| {
            warn!(
                error = chain(&error),
                "cannot take a sample of memory use; retrying at the next interval"
            );
            Duration::ZERO
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_between_memory_samples_grows_with_the_cost_of_a_sample() {
        for (cost_ms, watched, wanted_s) in [
            (1, false, 30),
            (60, false, 60),
            (10_000, false, 600),
            (1, true, 2),
            (44, true, 5),
        ] {
            let found = interval(Duration::from_millis(cost_ms), watched);
            assert_eq!(found.as_secs(), wanted_s, "{cost_ms} {watched}");
        }
    }

    fn waits(sampling: &Arc<Samples>, taken: Option<Instant>) -> std::thread::JoinHandle<bool> {
        let waiting = sampling.clone();
        std::thread::spawn(move || waiting.wait(Duration::ZERO, taken))
    }

    #[test]
    fn if_a_new_viewer_connects_memory_is_sampled_immediately() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("history.sqlite");
        let sampling = Arc::new(Samples::new(Some(&path)));
        assert!(sampling.wait(Duration::ZERO, None), "the first is due");
        let began = Instant::now();
        let thread = waits(&sampling, Some(began));
        let _look = sampling.latest.subscribe();
        sampling.wake(|_| ());
        assert!(thread.join().unwrap());
        assert!(began.elapsed() < IDLE_INTERVAL / 2, "{:?}", began.elapsed());
        let thread = waits(&sampling, Some(Instant::now()));
        sampling.wake(|wanted| wanted.end = true);
        assert!(!thread.join().unwrap());
    }

    #[test]
    fn if_no_ledger_history_is_recorded_memory_is_sampled_only_while_a_viewer_is_connected() {
        let sampling = Arc::new(Samples::new(None));
        let thread = waits(&sampling, None);
        sampling.wake(|_| ());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!thread.is_finished());
        let _look = sampling.latest.subscribe();
        sampling.wake(|_| ());
        assert!(thread.join().unwrap());
    }

    #[test]
    fn after_a_change_viewers_get_a_sample_soon_but_samples_stay_bounded() {
        for (cost_ms, wanted_s) in [(1, 2), (200, 2), (5000, 50)] {
            let found = interval_after_change(Duration::from_millis(cost_ms));
            assert_eq!(found.as_secs(), wanted_s, "{cost_ms}");
        }
        let sampling = Arc::new(Samples::new(None));
        let look = sampling.latest.subscribe();
        // Without the change, the next sample would be due after more than two minutes.
        let cost = Duration::from_secs(1);
        let long_ago = Some(Instant::now().checked_sub(Duration::from_secs(11)).unwrap());
        sampling.wake(|wanted| wanted.after_change = true);
        let began = Instant::now();
        assert!(sampling.wait(cost, long_ago));
        assert!(began.elapsed() < Duration::from_secs(60));
        assert!(!sampling.wanted.lock().after_change, "one sample a change");
        drop(look);
    }
}
