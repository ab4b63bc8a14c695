//! Runs KSM for a study or a test with given settings: at the kernel's default speed, or within a
//! CPU budget.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use super::controls::{Controls, Settings};
use super::error::KsmError;
use super::guard::{Guard, lock};
use super::status::{Ksmd, Status};

/// A run of KSM that memfold has started. Dropping this value restores KSM's previous settings.
#[derive(Debug)]
pub struct Run {
    controls: Controls,
    guard: Guard,
}

impl Run {
    /// Saves KSM's present settings (see [`Guard::take`]) and starts KSM with `settings`. Pages
    /// that are merged already stay merged, unless a setting changes that the kernel refuses to
    /// change while pages are merged.
    pub fn start(
        controls: &Controls,
        state_dir: &Path,
        settings: &Settings,
    ) -> Result<Self, KsmError> {
        let guard = Guard::take(controls, state_dir)?;
        let before = guard.before();
        let refused = |now: Option<u64>, wanted: Option<u64>| {
            now.is_some() && wanted.is_some() && now != wanted
        };
        if refused(before.merge_across_nodes, settings.merge_across_nodes)
            || refused(before.max_page_sharing, settings.max_page_sharing)
        {
            controls.unmerge(0)?;
        }
        let settings = Settings {
            run: Some(1),
            ..settings.clone()
        };
        controls.apply(&settings)?;
        Ok(Self {
            controls: controls.clone(),
            guard,
        })
    }

    /// Stops KSM and restores its previous settings. If `unmerge` is set, all pages are unmerged
    /// first. Pages are also unmerged if no page was merged before this run, so that the host is in
    /// its previous state.
    pub fn stop(self, unmerge: bool) -> Result<(), KsmError> {
        self.controls.write("run", &0)?;
        if unmerge {
            self.controls.unmerge(0)?;
        }
        self.guard.restore()
    }

    /// Returns the directory of KSM's settings and counters.
    #[must_use]
    pub fn controls(&self) -> &Controls {
        &self.controls
    }
}

/// A pause of KSM: ksmd is stopped, and no other memfold process starts KSM. Dropping this value
/// restores the previous state.
#[derive(Debug)]
pub struct Paused {
    _settings: Option<Guard>,
    _lock: Option<File>,
}

/// Pauses KSM; merged pages stay merged. ksmd is idle when this function returns (`run_store` in
/// `mm/ksm.c` waits for ksmd). If KSM does not run, nothing is written.
pub fn pause(controls: &Controls, state_dir: &Path) -> Result<Paused, KsmError> {
    let run = match controls.text("run") {
        Err(KsmError::Missing(_)) => None,
        run => run?,
    };
    if run.as_deref() != Some("1") {
        return Ok(Paused {
            _settings: None,
            _lock: Some(lock(state_dir)?),
        });
    }
    let settings = Guard::take(controls, state_dir)?;
    controls.write("run", &0)?;
    Ok(Paused {
        _settings: Some(settings),
        _lock: None,
    })
}

/// Result of one [`EqualCpu::step`]: ksmd's measured CPU time, and its settings until the next
/// step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// CPU time that ksmd has used since [`EqualCpu::new`].
    pub used: Duration,
    /// Whether ksmd runs until the next [`EqualCpu::step`].
    pub running: bool,
    /// Number of pages that ksmd scans before it sleeps.
    pub pages_to_scan: u64,
    /// Time for which ksmd sleeps between two batches, in milliseconds.
    pub sleep_millisecs: u64,
}

/// Limits ksmd's CPU time to a budget that the caller lets grow. In a comparison of KSM with
/// another mechanism, the budget is the CPU time that the other mechanism has used.
///
/// Each step sets ksmd's scan rate until the next step from the measured cost of a scanned page, so
/// that ksmd's total CPU time reaches the budget. Until the next step, ksmd may use what the budget
/// recently grew by, plus a part of the unused budget, which is spread over [`CATCH_UP`].
#[derive(Debug)]
pub struct EqualCpu {
    controls: Controls,
    ksmd: Ksmd,
    at_start: Duration,
    last: Sample,
    cost_s_per_page: f64,
    set: Step,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    used: Duration,
    allowed: Duration,
    scanned: Option<u64>,
}

/// Time over which ksmd uses up the unused part of the budget.
const CATCH_UP: Duration = Duration::from_secs(2);

/// Assumed CPU time of ksmd per page in seconds, until the first step has measured it.
const FIRST_COST_S: f64 = 2e-6;

/// Largest share of one CPU for ksmd. ksmd is a single thread, and must sleep for its settings to
/// take effect.
const MOST: f64 = 0.95;

impl EqualCpu {
    /// Starts to limit ksmd, with a budget of zero. KSM is paused until the first
    /// [`step`](Self::step). `run` is a running KSM.
    ///
    /// # Errors
    /// Fails if ksmd is not visible, or its settings cannot be written.
    pub fn new(run: &Run) -> Result<Self, KsmError> {
        let controls = run.controls().clone();
        let ksmd = Ksmd::find().ok_or_else(|| KsmError::Missing("/proc/*/comm: ksmd".into()))?;
        controls.write("run", &0)?;
        let settings = controls.settings()?;
        let at_start = ksmd.cpu_time()?;
        let scanned = Status::read(&controls)?.pages_scanned;
        Ok(Self {
            at_start,
            last: Sample {
                at: Instant::now(),
                used: Duration::ZERO,
                allowed: Duration::ZERO,
                scanned,
            },
            cost_s_per_page: FIRST_COST_S,
            set: Step {
                used: Duration::ZERO,
                running: false,
                pages_to_scan: settings.pages_to_scan.unwrap_or(100),
                sleep_millisecs: settings.sleep_millisecs.unwrap_or(20),
            },
            controls,
            ksmd,
        })
    }

    /// Measures ksmd's CPU time, and sets its scan rate until the next step. Callers call this
    /// function about once a second. `allowed` is the CPU time that ksmd may have used since
    /// [`new`](Self::new).
    pub fn step(&mut self, allowed: Duration) -> Result<Step, KsmError> {
        let now = Sample {
            at: Instant::now(),
            used: self.ksmd.cpu_time()?.saturating_sub(self.at_start),
            allowed,
            scanned: Status::read(&self.controls)?.pages_scanned,
        };
        let seconds = (now.at - self.last.at).as_secs_f64().max(1e-3);
        let used_s = now.used.saturating_sub(self.last.used).as_secs_f64();
        let scanned = match (now.scanned, self.last.scanned) {
            (Some(now), Some(last)) => now.saturating_sub(last) as f64,
            // Linux before 6.6 does not report scanned pages. This number is an upper bound.
            _ if self.set.running => {
                seconds * 1e3 / self.set.sleep_millisecs.max(1) as f64
                    * self.set.pages_to_scan as f64
            }
            _ => 0.0,
        };
        if scanned >= 50.0 && used_s > 0.0 {
            self.cost_s_per_page = f64::midpoint(self.cost_s_per_page, used_s / scanned);
        }
        let grows = now.allowed.saturating_sub(self.last.allowed).as_secs_f64() / seconds;
        let arrears = now.allowed.as_secs_f64() - now.used.as_secs_f64();
        let rate = grows + arrears / CATCH_UP.as_secs_f64();
        let (running, pages_to_scan, sleep_millisecs) = match pace(rate, self.cost_s_per_page) {
            Some((pages, sleep)) => (true, pages, sleep),
            None => (false, self.set.pages_to_scan, self.set.sleep_millisecs),
        };
        let wanted = Step {
            used: now.used,
            running,
            pages_to_scan,
            sleep_millisecs,
        };
        for (name, now, wanted) in [
            ("pages_to_scan", self.set.pages_to_scan, pages_to_scan),
            ("sleep_millisecs", self.set.sleep_millisecs, sleep_millisecs),
            ("run", self.set.running.into(), running.into()),
        ] {
            if now != wanted {
                self.controls.write(name, &wanted)?;
            }
        }
        self.set = wanted;
        self.last = now;
        Ok(wanted)
    }
}

/// Returns the number of pages per batch, and the pause between batches in milliseconds, with which
/// ksmd uses `rate` seconds of CPU time per second at a cost of `cost` seconds per page. Returns
/// `None` if ksmd must be paused.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the values are clamped
pub(super) fn pace(rate: f64, cost: f64) -> Option<(u64, u64)> {
    // Shortest pause: the kernel's default.
    const PAUSE_MS: f64 = 20.0;
    const MOST_PAGES: f64 = 1e6;
    const LONGEST_PAUSE_MS: f64 = 10_000.0;
    if rate <= 0.0 {
        return None;
    }
    let rate = rate.min(MOST);
    // A batch of n pages takes n * cost, and the pause follows: n * cost / (n * cost + pause) =
    // rate.
    let pages = (rate / (1.0 - rate) * PAUSE_MS / 1e3 / cost)
        .ceil()
        .clamp(1.0, MOST_PAGES);
    let pause_ms = pages * cost * 1e3 * (1.0 - rate) / rate;
    Some((
        pages as u64,
        pause_ms.round().clamp(PAUSE_MS, LONGEST_PAUSE_MS) as u64,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_computed_scan_rate_of_ksmd_yields_the_requested_cpu_share() {
        for rate in [0.0001, 0.01, 0.05, 0.5, 0.9] {
            let cost = 3e-6;
            let (pages, sleep_ms) = pace(rate, cost).unwrap();
            let batch = pages as f64 * cost;
            let got = batch / (batch + sleep_ms as f64 / 1e3);
            assert!(
                (got / rate - 1.0).abs() < 0.02,
                "{rate} asked, {got} got with {pages} pages and {sleep_ms} ms"
            );
        }
    }

    #[test]
    fn a_cpu_budget_of_zero_or_less_stops_ksmd() {
        assert_eq!(pace(0.0, 1e-6), None);
        assert_eq!(pace(-0.3, 1e-6), None);
    }
}
