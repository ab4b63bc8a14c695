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

/// What steering is to reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// CPU of ksmd at most, as a share of one CPU.
    pub cpu_share: f64,
    /// Time for one full scan of the mergeable memory.
    pub target: Duration,
}

/// What is measured at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Since steering began.
    pub at: Duration,
    /// ksmd's CPU time, since any moment.
    pub cpu: Duration,
    /// `pages_scanned`; `None` before Linux 6.6.
    pub scanned: Option<u64>,
    /// `full_scans`.
    pub full_scans: u64,
    /// Pages merged now in live processes, `ksm_zero_pages` included.
    pub merged_pages: u64,
    /// Anonymous pages in memory of the processes whose memory may merge.
    pub mergeable_pages: u64,
    /// Counts up when a VM comes.
    pub arrivals: u64,
    /// What waits on this host.
    pub pressure: Pressure,
}

/// How steering scans, and what made it so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The whole budget: a VM came, or memory grew, and two full scans have not passed since.
    Boost,
    /// A full scan each target.
    Steady,
    /// Slowly: two passes in a row brought nothing.
    Idle,
}

/// What to set until the next step.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// How.
    pub mode: Mode,
    /// Share that pressure leaves of the speed, 0.1 to 1.
    pub pressure_factor: f64,
    /// Pages a second.
    pub pages_per_second: f64,
    /// CPU at most, as a share of one.
    pub cpu_share: f64,
    /// `pages_to_scan`.
    pub pages_to_scan: u64,
    /// `sleep_millisecs`.
    pub sleep_millisecs: u64,
    /// Why, in words.
    pub why: String,
}

/// Share of the speed that is left when nothing is found, or everything waits.
const LEAST: f64 = 0.1;

/// Passes in a row that bring nothing until steering idles, and that a boost lasts.
const PASSES: u64 = 2;

/// A pass brought something if this share of the mergeable memory merged, or was lost, in it...
const WORTH: f64 = 0.001;

/// ...and this many pages at least.
const WORTH_PAGES: u64 = 64;

/// Growth of the mergeable memory that begins a boost.
const GROWTH: f64 = 0.1;

/// `some avg10` in percent from which on pressure slows ksmd, and at which it is at [`LEAST`].
/// Tasks on a host whose CPUs are all busy wait for some CPU nearly all the time; memory is another
/// matter: what waits for it waits for disks.
const CPU_PRESSURE: (f64, f64) = (50.0, 95.0);
const MEMORY_PRESSURE: (f64, f64) = (10.0, 40.0);

/// Pages that tell what one costs.
const LEAST_PAGES: f64 = 50.0;

/// The first guess of ksmd's CPU seconds per scanned page; replaced by measurement.
const FIRST_COST_S: f64 = 3e-6;

/// The controller.
#[derive(Clone, Debug)]
pub struct Steer {
    goal: Goal,
    last: Option<Sample>,
    cost_s: f64,
    /// Since when what a page costs is measured; `None`: from the next step on.
    measured: Option<Sample>,
    /// What was asked of ksmd since the last step, in pages a second, and in pages since
    /// `measured`: stands in for `pages_scanned`.
    rate: f64,
    asked: f64,
    /// `full_scans` at which the boost ends.
    boost_until: Option<u64>,
    /// Mergeable pages when the last boost began.
    boost_pages: u64,
    /// `full_scans` and merged pages when the present pass began.
    pass: (u64, u64),
    /// Passes in a row that brought nothing.
    barren: u64,
    idle: bool,
    /// CPU of ksmd lately, as a share of one.
    used_share: f64,
}

impl Steer {
    /// A controller that has seen nothing yet: it begins with a boost.
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

    /// ksmd's CPU seconds per scanned page, as measured lately.
    #[must_use]
    pub const fn cost_s(&self) -> f64 {
        self.cost_s
    }

    /// ksmd's CPU over the last seconds, as a share of one.
    #[must_use]
    pub const fn used_share(&self) -> f64 {
        self.used_share
    }

    /// KSM stood still for another reason: what was used and scanned meanwhile says nothing.
    pub fn interrupted(&mut self) {
        self.measured = None;
        self.rate = 0.0;
    }

    /// Decides from what is now.
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
        // About five seconds long, whatever the interval.
        let weight = 1.0 - (-seconds / 5.0).exp();
        self.used_share += (share - self.used_share) * weight;
        self.asked += self.rate * seconds;
        let Some(from) = self.measured else { return };
        let used = now.cpu.saturating_sub(from.cpu).as_secs_f64();
        let scanned = match (now.scanned, from.scanned) {
            (Some(now), Some(from)) => now.saturating_sub(from) as f64,
            // Before Linux 6.6 nothing tells; at most this many.
            _ => self.asked,
        };
        // However long it takes until there are as many: a page that was found dear is scanned
        // seldom, and has to be found cheap again.
        if scanned < LEAST_PAGES || used <= 0.0 {
            return;
        }
        self.measured = Some(*now);
        self.asked = 0.0;
        let cost = used / scanned;
        // What gets dearer is believed at once, because the budget is a promise; what gets cheaper
        // by and by.
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
        // Losses count as well: what is rewritten all the time merges again and again.
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
        // Writing 2 to `run` takes everything apart and counts scans from 0 again.
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
        // A VM that ended leaves room for the growth of others.
        self.boost_pages = self.boost_pages.min(now.mergeable_pages);
    }

    /// What [`Self::step`] has found: boost, idle or steady.
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
        // The least that ksmd can be told: a page each ten seconds.
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

/// What pressure leaves of the speed, and what waits.
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
