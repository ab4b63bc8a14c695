//! Decides how fast KSM's kernel thread, ksmd, scans memory. The decision depends on the cost of a
//! scanned page, the CPU budget, the target time of a full scan, and the results of earlier passes.
//! (This control of KSM by the daemon is called *steering*.)
//!
//! The drawing shows the three scan modes, and what changes the mode.
//!
//! ```text
//!               a VM started, or memory grew         two passes that merged nothing
//!    boost  <-------------------------------  steady  ----------------------------->  idle
//!      |          two full scans passed         ^                                       |
//!      +----------------------------------------+---------------------------------------+
//!                                                  pages merged or unmerged, a VM started
//!
//!    boost:  the whole CPU budget           steady: a full scan per target time, within the budget       idle: a tenth of that
//!    While tasks wait for CPU or memory (PSI), each of these speeds is reduced, to no less than a tenth.
//! ```
//! Scanning is fast after a VM has started or memory has grown (boost), slower afterwards (steady),
//! and very slow while nothing merges (idle). [`Steer`] only computes, from [`Sample`]s of the
//! kernel's figures.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::pressure::Pressure;
use super::run::pace;

/// The operator's limits for steering KSM: CPU use of ksmd, and target time of a full scan.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Goal {
    /// Maximum CPU use of ksmd, as a fraction of one CPU.
    pub cpu_share: f64,
    /// Target duration of ksmd's full scan of all mergeable memory.
    pub target: Duration,
}

/// Figures of KSM and of the host at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Time at which the figures were read, since the daemon began to steer KSM.
    pub at: Duration,
    /// CPU time of ksmd, since a moment that is the same for all samples.
    pub cpu: Duration,
    /// KSM's counter `pages_scanned`: pages that ksmd has scanned; `None` before Linux 6.6.
    pub scanned: Option<u64>,
    /// KSM's counter `full_scans`: completed scans of all mergeable memory.
    pub full_scans: u64,
    /// Number of merged pages of all live processes, including pages on the kernel's zero page.
    pub merged_pages: u64,
    /// Number of anonymous pages in memory of all processes that have mergeable memory.
    pub mergeable_pages: u64,
    /// Number of VMs that have started since the daemon began to steer KSM.
    pub arrivals: u64,
    /// Pressure of CPU and memory on this host.
    pub pressure: Pressure,
}

/// Scan mode that the daemon chooses for ksmd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// ksmd uses the whole CPU budget, because a VM started or memory grew. The mode lasts for two
    /// full scans.
    Boost,
    /// ksmd completes one full scan per target time, if the CPU budget allows that.
    Steady,
    /// ksmd scans at a tenth of the speed of [`Mode::Steady`], because two full scans in a row
    /// merged nothing.
    Idle,
}

/// Settings of ksmd until the next call of [`Steer::step`], and the reason for them.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Scan mode from which ksmd's settings follow.
    pub mode: Mode,
    /// Factor of ksmd's scan rate because of CPU and memory pressure on the host, 0.1 (high
    /// pressure) to 1.
    pub pressure_factor: f64,
    /// Scan rate of ksmd in pages per second.
    pub pages_per_second: f64,
    /// Expected CPU use of ksmd, as a fraction of one CPU.
    pub cpu_share: f64,
    /// Value for KSM's setting `pages_to_scan`: pages that ksmd scans before it sleeps.
    pub pages_to_scan: u64,
    /// Value for KSM's setting `sleep_millisecs`: pause of ksmd between two batches, in
    /// milliseconds.
    pub sleep_millisecs: u64,
    /// Description of the reason for ksmd's settings, for the operator.
    pub why: String,
}

/// Fraction of the speed that remains when passes merge nothing, or under full pressure.
const LEAST: f64 = 0.1;

/// Number of passes that a boost lasts, and number of consecutive passes without merges after which
/// ksmd idles.
const PASSES: u64 = 2;

/// Fraction of the mergeable memory that must merge or unmerge in a pass for the pass to count as
/// useful.
const WORTH: f64 = 0.001;

/// Number of pages that must merge or unmerge, at least, for a pass to count as useful.
const WORTH_PAGES: u64 = 64;

/// Fraction by which the mergeable memory must grow to start a boost.
const GROWTH: f64 = 0.1;

/// Pressure (`some avg10`, in percent) at which ksmd begins to slow down, and pressure at which its
/// speed reaches [`LEAST`]. On a host with all CPUs busy, tasks wait for CPU nearly all the time,
/// so the limits for CPU are high. Waiting for memory is worse, because it means waiting for disks.
const CPU_PRESSURE: (f64, f64) = (50.0, 95.0);
const MEMORY_PRESSURE: (f64, f64) = (10.0, 40.0);

/// Minimum number of scanned pages for a measurement of the cost of a page.
const LEAST_PAGES: f64 = 50.0;

/// Assumed CPU time of ksmd per page in seconds, until it is measured.
const FIRST_COST_S: f64 = 3e-6;

/// Controller of ksmd's scan rate; keeps the measurements on which a decision depends.
#[derive(Clone, Debug, Default)]
pub struct Steer {
    goal: Goal,
    last: Option<Sample>,
    cost_s: f64,
    /// Start of the present cost measurement; `None` if it starts with the next step.
    measured: Option<Sample>,
    /// Scan rate since the last step in pages per second; `asked` is the number of pages that the
    /// rates allowed since `measured`. Both replace `pages_scanned` on kernels without this
    /// counter.
    rate: f64,
    asked: f64,
    /// Value of `full_scans` at which the present boost ends; `None` without a boost.
    boost_until: Option<u64>,
    /// Number of mergeable pages when the last boost began or ended.
    boost_pages: u64,
    /// Values of `full_scans` and of merged pages when the present pass began.
    pass: (u64, u64),
    /// Number of consecutive passes that merged nothing.
    barren: u64,
    idle: bool,
    /// Recent CPU use of ksmd, as a fraction of one CPU.
    used_share: f64,
}

impl Steer {
    /// Creates a controller without measurements. Its first decision is [`Mode::Boost`].
    #[must_use]
    pub fn new(goal: Goal) -> Self {
        Self {
            goal,
            cost_s: FIRST_COST_S,
            ..Self::default()
        }
    }

    /// Returns the CPU time of ksmd per scanned page, in seconds, as last measured.
    #[must_use]
    pub const fn cost_s(&self) -> f64 {
        self.cost_s
    }

    /// Returns the CPU use of ksmd over the last seconds, as a fraction of one CPU.
    #[must_use]
    pub const fn used_share(&self) -> f64 {
        self.used_share
    }

    /// Discards the unfinished measurement of a page's cost, because KSM was paused meanwhile.
    pub fn interrupted(&mut self) {
        self.measured = None;
        self.rate = 0.0;
    }

    /// Decides ksmd's settings until the next call, from the present figures of KSM and the host.
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
        // The average covers about five seconds, whatever the interval between steps is.
        let weight = 1.0 - (-seconds / 5.0).exp();
        self.used_share += (share - self.used_share) * weight;
        self.asked += self.rate * seconds;
        let Some(from) = self.measured else { return };
        let used = now.cpu.saturating_sub(from.cpu).as_secs_f64();
        let scanned = match (now.scanned, from.scanned) {
            (Some(now), Some(from)) => now.saturating_sub(from) as f64,
            // Linux before 6.6 does not report scanned pages. This number is an upper bound.
            _ => self.asked,
        };
        // The measurement has no time limit: when pages were found costly, few are scanned, and a
        // later, lower cost must still be measured.
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
        // The result is below 2^52.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let share = (now.mergeable_pages as f64 * WORTH) as u64;
        share.max(WORTH_PAGES)
    }

    fn count_passes(&mut self, now: &Sample) {
        let (scans, merged) = self.pass;
        // Unmerged pages count as well, because memory that is rewritten all the time merges again
        // and again.
        let moved = now.merged_pages.abs_diff(merged) >= Self::worth(now);
        if self.idle && moved {
            self.idle = false;
            self.barren = 0;
        } else if self.last.is_some() && now.full_scans == scans {
            return;
        } else if self.last.is_some() && now.full_scans > scans {
            self.barren = if moved {
                0
            } else {
                self.barren + now.full_scans - scans
            };
            self.idle = self.barren >= PASSES && self.boost_until.is_none();
        }
        self.pass = (now.full_scans, now.merged_pages);
    }

    fn boost(&mut self, now: &Sample) {
        // Somebody may have written 2 to `run`, which unmerges all pages and resets the count of
        // scans to 0.
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
        // After a VM has ended, growth of other VMs counts again.
        self.boost_pages = self.boost_pages.min(now.mergeable_pages);
    }

    /// Returns the mode that [`Self::step`] has determined.
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
        // The slowest settings of ksmd are one page every ten seconds.
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

/// Returns the fraction of the speed that the pressure allows, and a description of the pressure.
fn factor(pressure: Pressure) -> (f64, Option<String>) {
    let [cpu, memory] = [
        ("cpu", pressure.cpu_some_avg10, CPU_PRESSURE),
        ("memory", pressure.memory_some_avg10, MEMORY_PRESSURE),
    ]
    .map(|(what, value, (from, to))| {
        let value = value.unwrap_or(0.0);
        let over = ((value - from) / (to - from)).clamp(0.0, 1.0);
        (1.0 - over * (1.0 - LEAST), what, value)
    });
    let (left, what, value) = if memory.0 < cpu.0 { memory } else { cpu };
    let waits = (left < 1.0).then(|| {
        format!("tasks wait for {what} (some avg10 of /proc/pressure/{what} is {value:.0} %)")
    });
    (left, waits)
}

#[cfg(test)]
#[path = "steer_tests.rs"]
mod tests;
