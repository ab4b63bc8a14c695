//! Decides how fast ksmd scans, from the cost of a scanned page, the CPU budget, the target time,
//! and the result of earlier passes.
//!
//! ```text
//!               a VM started, or memory grew         two passes that merged nothing
//!    boost  <-------------------------------  steady  ----------------------------->  idle
//!      |          two full scans passed         ^                                       |
//!      +----------------------------------------+---------------------------------------+
//!                                                  pages merged or unmerged, a VM started
//!
//!    boost:  the whole CPU budget           steady: a full scan per target time, within the budget       idle: a tenth of that
//!    each of these drops to a tenth at most while tasks wait for CPU or memory (PSI)
//! ```
//! [`Steer`] only computes; it reads no clock and no file. Each [`Sample`] holds the kernel's
//! figures at one moment.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::pressure::Pressure;
use super::run::pace;

/// Limits and target of steering.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// Most CPU of ksmd, as a part of one CPU.
    pub cpu_share: f64,
    /// Target duration of a full scan of the mergeable memory.
    pub target: Duration,
}

/// Measurements at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Time since steering began.
    pub at: Duration,
    /// CPU time of ksmd, since any fixed moment.
    pub cpu: Duration,
    /// `pages_scanned`; `None` before Linux 6.6.
    pub scanned: Option<u64>,
    /// `full_scans`.
    pub full_scans: u64,
    /// Number of merged pages in live processes, `ksm_zero_pages` included.
    pub merged_pages: u64,
    /// Number of anonymous pages in memory, of the processes with mergeable memory.
    pub mergeable_pages: u64,
    /// Number of VMs that have started since steering began.
    pub arrivals: u64,
    /// Pressure of CPU and memory on this host.
    pub pressure: Pressure,
}

/// Scan mode of steering.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The whole CPU budget: a VM started or memory grew, and two full scans have not passed since.
    Boost,
    /// One full scan per target time.
    Steady,
    /// A tenth of the steady speed: two passes in a row merged nothing.
    Idle,
}

/// Settings until the next step, and their reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Scan mode.
    pub mode: Mode,
    /// Part of the speed that pressure allows, 0.1 to 1.
    pub pressure_factor: f64,
    /// Scan rate in pages a second.
    pub pages_per_second: f64,
    /// Expected CPU of ksmd, as a part of one CPU.
    pub cpu_share: f64,
    /// Value for `pages_to_scan`.
    pub pages_to_scan: u64,
    /// Value for `sleep_millisecs`.
    pub sleep_millisecs: u64,
    /// Description of the reason.
    pub why: String,
}

/// Part of the speed that remains when passes merge nothing, or under full pressure.
const LEAST: f64 = 0.1;

/// Number of passes that a boost lasts, and of fruitless passes in a row until steering idles.
const PASSES: u64 = 2;

/// A pass was useful if at least this part of the mergeable memory merged or unmerged in it...
const WORTH: f64 = 0.001;

/// ...and at least this many pages.
const WORTH_PAGES: u64 = 64;

/// Growth of the mergeable memory that starts a boost.
const GROWTH: f64 = 0.1;

/// Pressure (`some avg10`, in percent) at which ksmd begins to slow down, and at which it reaches
/// [`LEAST`]. On a host with all CPUs busy, tasks wait for CPU nearly all the time, so that limit
/// is high. Waiting for memory is worse, because it means waiting for disks.
const CPU_PRESSURE: (f64, f64) = (50.0, 95.0);
const MEMORY_PRESSURE: (f64, f64) = (10.0, 40.0);

/// Fewest scanned pages from which the cost of a page is measured.
const LEAST_PAGES: f64 = 50.0;

/// Assumed CPU time of ksmd per page in seconds, until it is measured.
const FIRST_COST_S: f64 = 3e-6;

/// The controller of the scan rate.
#[derive(Clone, Debug)]
pub struct Steer {
    goal: Goal,
    last: Option<Sample>,
    cost_s: f64,
    /// Start of the present cost measurement; `None`: it starts with the next step.
    measured: Option<Sample>,
    /// Scan rate set since the last step, in pages a second, and pages set since `measured`. They
    /// replace `pages_scanned` on kernels without it.
    rate: f64,
    asked: f64,
    /// Value of `full_scans` at which the boost ends.
    boost_until: Option<u64>,
    /// Number of mergeable pages when the last boost began.
    boost_pages: u64,
    /// Values of `full_scans` and merged pages when the present pass began.
    pass: (u64, u64),
    /// Consecutive passes that merged nothing.
    barren: u64,
    idle: bool,
    /// Recent CPU of ksmd, as a part of one CPU.
    used_share: f64,
}

impl Steer {
    /// A controller without measurements. It begins with a boost.
    #[must_use]
    pub const fn new(goal: Goal) -> Self {
        Self {
            goal,
            last: None,
            cost_s: FIRST_COST_S,
            measured: None,
            rate: 0.0,
            asked: 0.0,
            boost_until: None,
            boost_pages: 0,
            pass: (0, 0),
            barren: 0,
            idle: false,
            used_share: 0.0,
        }
    }

    /// Recently measured CPU time of ksmd per scanned page, in seconds.
    #[must_use]
    pub const fn cost_s(&self) -> f64 {
        self.cost_s
    }

    /// CPU of ksmd over the last seconds, as a part of one CPU.
    #[must_use]
    pub const fn used_share(&self) -> f64 {
        self.used_share
    }

    /// Discards running measurements, because KSM was paused for another reason.
    pub fn interrupted(&mut self) {
        self.measured = None;
        self.rate = 0.0;
    }

    /// Decides the settings until the next step.
    pub fn step(&mut self, now: &Sample) -> Decision {
        self.measure(now);
        if self.measured.is_none() {
            self.measured = Some(*now);
            self.asked = 0.0;
        }
        self.count_passes(now);
        self.boost(now);
        self.last = Some(*now);
        let decision = self.decide(now);
        self.rate = decision.pages_per_second;
        decision
    }

    fn measure(&mut self, now: &Sample) {
        let Some(last) = self.last else { return };
        let seconds = now.at.saturating_sub(last.at).as_secs_f64();
        if seconds < 1e-3 {
            return;
        }
        let used = now.cpu.saturating_sub(last.cpu).as_secs_f64();
        let share = used / seconds;
        // An average over about five seconds, whatever the interval between steps.
        let weight = 1.0 - (-seconds / 5.0).exp();
        self.used_share += (share - self.used_share) * weight;
        self.asked += self.rate * seconds;
        let Some(from) = self.measured else { return };
        let used = now.cpu.saturating_sub(from.cpu).as_secs_f64();
        let scanned = match (now.scanned, from.scanned) {
            (Some(now), Some(from)) => now.saturating_sub(from) as f64,
            // Linux before 6.6 does not tell. This is an upper bound.
            _ => self.asked,
        };
        // There is no time limit for this many pages: when pages were found costly, few are
        // scanned, and a later lower cost must still be noticed.
        if scanned < LEAST_PAGES || used <= 0.0 {
            return;
        }
        self.measured = Some(*now);
        self.asked = 0.0;
        let cost = used / scanned;
        // A higher cost counts at once, because the budget is a promise. A lower cost counts
        // gradually.
        self.cost_s = if cost > self.cost_s {
            cost
        } else {
            self.cost_s + (cost - self.cost_s) * 0.3
        };
    }

    fn worth(now: &Sample) -> u64 {
        // Below 2^52.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let share = (now.mergeable_pages as f64 * WORTH) as u64;
        share.max(WORTH_PAGES)
    }

    fn count_passes(&mut self, now: &Sample) {
        let (scans, merged) = self.pass;
        // Unmerged pages count as well: memory that is rewritten all the time merges again and
        // again.
        let moved = now.merged_pages.abs_diff(merged) >= Self::worth(now);
        if self.idle && moved {
            self.idle = false;
            self.barren = 0;
            self.pass = (now.full_scans, now.merged_pages);
        } else if self.last.is_none() || now.full_scans < scans {
            self.pass = (now.full_scans, now.merged_pages);
        } else if now.full_scans > scans {
            self.barren = if moved {
                0
            } else {
                self.barren + now.full_scans - scans
            };
            self.pass = (now.full_scans, now.merged_pages);
            self.idle = self.barren >= PASSES && self.boost_until.is_none();
        }
    }

    fn boost(&mut self, now: &Sample) {
        // Writing 2 to `run` unmerges everything, and counts scans from 0 again.
        let came = self
            .last
            .is_none_or(|last| now.arrivals > last.arrivals || now.full_scans < last.full_scans);
        let grown = now.mergeable_pages as f64
            > self.boost_pages as f64 * (1.0 + GROWTH) + WORTH_PAGES as f64;
        if came || grown {
            self.boost_until = Some(now.full_scans + PASSES);
            self.boost_pages = now.mergeable_pages;
            self.barren = 0;
            self.idle = false;
        } else if self.boost_until.is_some_and(|end| now.full_scans >= end) {
            self.boost_until = None;
            self.boost_pages = now.mergeable_pages;
        }
        // A VM that ended makes later growth of others count again.
        self.boost_pages = self.boost_pages.min(now.mergeable_pages);
    }

    /// The mode that [`Self::step`] has determined.
    fn mode(&self) -> Mode {
        match self.boost_until {
            Some(_) => Mode::Boost,
            None if self.idle => Mode::Idle,
            None => Mode::Steady,
        }
    }

    fn decide(&self, now: &Sample) -> Decision {
        let (mode, goal) = (self.mode(), self.goal);
        let within_budget = goal.cpu_share / self.cost_s;
        let for_target = now.mergeable_pages as f64 / goal.target.as_secs_f64().max(1.0);
        let steady = within_budget.min(for_target);
        let (speed, why) = match mode {
            Mode::Boost => (
                within_budget,
                format!(
                    "a VM started or memory grew: the whole CPU budget until full_scans is {}",
                    self.boost_until.unwrap_or(now.full_scans)
                ),
            ),
            Mode::Idle => (
                steady * LEAST,
                format!(
                    "{} passes in a row merged nothing: a tenth of the speed until memory changes",
                    self.barren
                ),
            ),
            Mode::Steady if for_target > within_budget => (
                steady,
                format!(
                    "the CPU budget allows a full scan only every {:.0} s",
                    now.mergeable_pages as f64 / within_budget
                ),
            ),
            Mode::Steady => (
                steady,
                format!("a full scan every {} s", goal.target.as_secs()),
            ),
        };
        let (factor, waits) = factor(now.pressure);
        let why = match waits {
            Some(waits) => format!("{why}; {waits}: {:.0} % of that speed", factor * 100.0),
            None => why,
        };
        let pages_per_second = speed * factor;
        let cpu_share = (pages_per_second * self.cost_s).min(goal.cpu_share);
        // The slowest setting of ksmd: one page every ten seconds.
        let (pages_to_scan, sleep_millisecs) =
            pace(cpu_share.max(1e-9), self.cost_s).unwrap_or((1, 10_000));
        Decision {
            mode,
            pressure_factor: factor,
            pages_per_second,
            cpu_share,
            pages_to_scan,
            sleep_millisecs,
            why,
        }
    }
}

/// Part of the speed that pressure allows, and a description of the pressure.
fn factor(pressure: Pressure) -> (f64, Option<String>) {
    let left = |value: Option<f64>, (from, to): (f64, f64)| {
        let over = (value.unwrap_or(0.0) - from) / (to - from);
        1.0 - over.clamp(0.0, 1.0) * (1.0 - LEAST)
    };
    let cpu = left(pressure.cpu_some_avg10, CPU_PRESSURE);
    let memory = left(pressure.memory_some_avg10, MEMORY_PRESSURE);
    let waits = |what: &str, value: Option<f64>| {
        let value = value.unwrap_or(0.0);
        Some(format!(
            "tasks wait for {what} (some avg10 of /proc/pressure/{what} is {value:.0} %)"
        ))
    };
    if cpu >= 1.0 && memory >= 1.0 {
        (1.0, None)
    } else if memory < cpu {
        (memory, waits("memory", pressure.memory_some_avg10))
    } else {
        (cpu, waits("cpu", pressure.cpu_some_avg10))
    }
}

#[cfg(test)]
#[path = "steer_tests.rs"]
mod tests;
