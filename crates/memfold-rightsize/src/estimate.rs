//! The working set of one VM: memory that the guest would miss.
//!
//! ```text
//!   size = RAM + plugged - balloon
//!   |<-------- used hard --------->|<------------ page cache ------------>|<------ free ------>|
//!    size - MemAvailable            reclaimable: MemAvailable - MemFree
//!   |<-------- working set: used hard + hot -------->|<- not missed: cold ->|
//! ```
//! `hot` is found by taking: each take that is not missed lowers it by one step, and files that the
//! guest reads again (refaults) raise it. Until the first take it is a guess from above.

use std::time::Duration;

use memfold_units::PAGE_SIZE;

use crate::check::{Contradiction, check_change, check_report, grown, has_counted_anew};
use crate::decision::{Basis, Reason};
use crate::input::{GuestSignals, Signals, Source};
use crate::policy::Policy;
use crate::sizes::{Growth, Sizes};

/// Time over which the shown pressure is averaged.
const AVERAGE: f64 = 10.0;

/// Misses that follow each other within this time are one episode.
const EPISODE: Duration = Duration::from_secs(30);

/// Misses within this time after a take may be its fault.
const BLAMED: Duration = Duration::from_secs(60);

/// Misses and pressure that exceed this multiple of what was usual are worse than usual.
const WORSE: f64 = 1.25;

/// Bytes a second that a guest swaps out if it lacks memory, however much is available.
const SWAP_OUT_RATE: f64 = 1_048_576.0;

/// Smallest change of the memory in use that is a new phase of the guest.
const CHANGE: u64 = 64 << 20;

/// Probes without a miss after which the wait after a miss starts at its shortest again.
const CALM_PROBES: u32 = 6;

/// What one VM's reports say, over time.
// Each flag is one fact of its own; together they make no state.
#[allow(clippy::struct_excessive_bools)]
#[derive(Clone, Debug, Default)]
pub(crate) struct Estimate {
    last: Option<GuestSignals>,
    sizes: Sizes,
    /// When the first report came that all others continue.
    pub(crate) begun: Duration,
    distrusted: Option<(Contradiction, Duration)>,
    /// Share of time in which tasks waited, averaged; `None` if the guest does not say it.
    pub(crate) pressure: Option<f64>,
    /// The same, between the last two reports.
    pub(crate) pressure_now: f64,
    /// Bytes of files that were read again, between the last two reports.
    pub(crate) missed: u64,
    /// The guest swapped out, waited in allocations, or lost a process to its OOM killer between
    /// the last two reports.
    pub(crate) stalled: bool,
    /// Files that the guest read again forbid takes.
    pub(crate) is_missing: bool,
    /// The guest reads more files again than is tolerated, for whatever reason.
    misses_files: bool,
    swaps_in: bool,
    /// Bytes of files that are read again a second, averaged; and that, and the pressure, before
    /// the first of the takes that follow each other.
    miss_rate: f64,
    usual_miss_rate: f64,
    usual_pressure: f64,
    /// Page cache that is needed, as far as takes have shown it.
    pub(crate) hot: Option<u64>,
    /// A miss has been seen since the first take.
    probed: bool,
    /// Next step, as a share of the memory in use.
    step: f64,
    calm_probes: u32,
    last_miss: Option<Duration>,
    last_take: Option<Duration>,
    /// Memory in use without page cache, when it last changed much.
    used_before: u64,
    /// How often takes went too far, since the last calm probes.
    back_offs: u32,
    /// No probe before this time.
    pub(crate) next_probe: Duration,
}

/// The parts of a VM's memory, from one believed report.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Parts {
    /// Memory that the guest may use.
    pub(crate) size: u64,
    pub(crate) free: u64,
    pub(crate) available: u64,
    /// Memory that the kernel cannot reclaim without swapping.
    pub(crate) used_hard: u64,
    /// Page cache that the kernel could reclaim.
    pub(crate) cache: u64,
    /// The part of `cache` that a trim may take: clean, and not folded.
    pub(crate) trimmable: u64,
    /// The part of `cache` that is folded.
    pub(crate) folded: u64,
    /// So much more may be free and available: the size has changed at about the time of the
    /// report.
    pub(crate) unsure: u64,
    /// By how much the VM may have grown since the report was made.
    pub(crate) grown: u64,
}

impl Parts {
    /// Parts of a VM of which only the size is known.
    pub(crate) fn unknown(size: u64) -> Self {
        Self {
            size,
            used_hard: size,
            ..Self::default()
        }
    }

    /// Parts of a VM that has grown by `growth` since the report of its guest was made. A balloon
    /// takes free memory first, and what is plugged is free at first.
    fn of(signals: &Signals, guest: &GuestSignals, growth: Growth) -> Self {
        let size = signals.size().0;
        let available = growth.at_least(guest.available.0).min(size);
        let free = growth.at_least(guest.free.0).min(available);
        let cache = (available - free).min(guest.file_cache.0);
        let folded = signals.folded_cache.0.min(cache);
        let clean = guest.file_cache.0.saturating_sub(guest.dirty.0);
        Self {
            size,
            free,
            available,
            used_hard: size - available,
            cache,
            trimmable: cache.min(clean).saturating_sub(folded),
            folded,
            unsure: growth.uncertainty(),
            grown: u64::try_from(growth.most).unwrap_or(0),
        }
    }

    pub(crate) fn in_use(&self) -> u64 {
        self.size - self.free
    }
}

/// What a report is good for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Heard {
    /// Nothing is known: the VM keeps its size, for this reason.
    Nothing(Reason),
    /// The guest is believed. `fresh`: there are new rates since the last step.
    Report { parts: Parts, fresh: bool },
}

impl Estimate {
    /// Takes in the signals of one step. `now` is the caller's clock, `clock` the controller's.
    pub(crate) fn hear(
        &mut self,
        clock: Duration,
        now: Duration,
        signals: &Signals,
        policy: &Policy,
    ) -> Heard {
        self.sizes.note(now, signals);
        let Some(guest) = &signals.guest else {
            return Heard::Nothing(Reason::Silent { since: None });
        };
        let age = now.saturating_sub(signals.at);
        if age > policy.report_timeout {
            return Heard::Nothing(Reason::Silent { since: Some(age) });
        }
        let before = self.last.as_ref();
        let elapsed = before.map(|last| guest.uptime.saturating_sub(last.uptime));
        // The guest's time can be the host's, which goes on while the guest boots.
        let restarted =
            before.is_some_and(|last| guest.uptime < last.uptime || has_counted_anew(last, guest));
        let changed = elapsed.filter(|elapsed| !elapsed.is_zero());
        let contradiction = check_report(guest, self.sizes.most_installed()).or_else(|| {
            let (before, elapsed) = before.zip(changed).filter(|_| !restarted)?;
            check_change(before, guest, elapsed)
        });
        if let Some(what) = contradiction {
            self.distrusted = Some((what, clock));
            self.last = Some(guest.clone());
            return Heard::Nothing(Reason::Distrusted(what));
        }
        if let Some((what, since)) = self.distrusted {
            if clock.saturating_sub(since) < policy.distrust {
                self.last = Some(guest.clone());
                return Heard::Nothing(Reason::Distrusted(what));
            }
            self.start_again(clock, guest, policy);
            return Heard::Nothing(Reason::FirstReport);
        }
        if restarted || before.is_none() {
            self.start_again(clock, guest, policy);
            let reason = if restarted {
                Reason::Restarted
            } else {
                Reason::FirstReport
            };
            return Heard::Nothing(reason);
        }
        let parts = Parts::of(signals, guest, self.sizes.growth_since(signals.at));
        if let Some(elapsed) = changed {
            self.measure(guest, elapsed, &parts);
            self.last = Some(guest.clone());
            self.judge_misses(clock, elapsed, &parts, policy);
        }
        Heard::Report {
            parts,
            fresh: changed.is_some(),
        }
    }

    /// Forgets everything but the first of new reports.
    fn start_again(&mut self, clock: Duration, guest: &GuestSignals, policy: &Policy) {
        *self = Self {
            last: Some(guest.clone()),
            sizes: std::mem::take(&mut self.sizes),
            begun: clock,
            step: policy.first_step,
            ..Self::default()
        };
    }

    /// Derives rates from the last report and `guest`.
    fn measure(&mut self, guest: &GuestSignals, elapsed: Duration, parts: &Parts) {
        let Some(before) = &self.last else { return };
        let seconds = elapsed.as_secs_f64().max(0.001);
        let pages = match (
            before.workingset_refault_file,
            guest.workingset_refault_file,
        ) {
            (Some(before), Some(now)) => now.saturating_sub(before),
            // Without counts of refaults, major faults show files that are read again, and others.
            _ => grown(before.pgmajfault, guest.pgmajfault),
        };
        self.missed = pages.saturating_mul(PAGE_SIZE);
        let totals = before.pressure.zip(guest.pressure);
        self.pressure_now = totals.map_or(0.0, |(before, now)| {
            let waited = now.some_us.saturating_sub(before.some_us);
            (waited as f64 / 1e6 / seconds).min(1.0)
        });
        let share = seconds / (seconds + AVERAGE);
        self.pressure = totals.map(|_| {
            let old = self.pressure.unwrap_or(0.0);
            old + (self.pressure_now - old) * share
        });
        // A guest with much available memory swaps out a page now and then.
        let swapped = grown(before.pswpout, guest.pswpout).saturating_mul(PAGE_SIZE);
        let is_low = parts.available < parts.size / 4;
        let swaps_out = swapped as f64 / seconds >= SWAP_OUT_RATE || (swapped > 0 && is_low);
        let waits = grown(before.allocstall, guest.allocstall) > 0;
        self.stalled = swaps_out || waits || grown(before.oom_kill, guest.oom_kill) > 0;
        self.swaps_in = grown(before.pswpin, guest.pswpin) > 0;
        self.miss_rate += (self.missed as f64 / seconds - self.miss_rate) * share;
    }

    /// Finds out whether files that the guest reads again say that too much was taken.
    ///
    /// Shortly after takes, they do if there are more of them than before these takes. Long after
    /// the last take, the guest has begun to use files that it did not use before: takes pause for
    /// a moment, and then go on as long as that makes it no worse.
    fn judge_misses(&mut self, clock: Duration, elapsed: Duration, parts: &Parts, policy: &Policy) {
        let seconds = elapsed.as_secs_f64().max(0.001);
        let rate = self.missed as f64 / seconds;
        let is_slow = self.pressure.is_some_and(|p| p > policy.pressure_target);
        let tolerated = policy.miss_rate.0 as f64 * if is_slow { 0.125 } else { 1.0 };
        self.misses_files = rate > tolerated;
        self.is_missing = self.swaps_in;
        self.notice_change(clock, parts, policy);
        if !self.misses_files && !self.swaps_in {
            return;
        }
        self.raise(parts);
        let is_new = !is_within(clock, self.last_miss, EPISODE);
        self.last_miss = Some(clock);
        if self.takes_are_recent(clock) {
            if self.swaps_in || rate > self.usual_miss_rate * WORSE + tolerated {
                self.is_missing = true;
                self.back_off(clock, is_new, policy);
            }
        } else {
            if is_new {
                self.back_offs = 0;
                self.step = policy.first_step;
                self.next_probe = clock.saturating_add(EPISODE);
            }
            self.is_missing = self.swaps_in || clock < self.next_probe;
        }
    }

    fn takes_are_recent(&self, clock: Duration) -> bool {
        is_within(clock, self.last_take, BLAMED)
    }

    /// Returns the pressure above which nothing may be taken.
    pub(crate) fn pressure_limit(&self, clock: Duration, policy: &Policy) -> f64 {
        if self.takes_are_recent(clock) {
            policy.pressure_target.max(self.usual_pressure * WORSE)
        } else if self.misses_files && clock >= self.next_probe {
            policy.pressure_give
        } else {
            policy.pressure_target
        }
    }

    /// Counts what was read again as needed, beyond what was left.
    fn raise(&mut self, parts: &Parts) {
        if let Some(hot) = self.hot {
            let raised = hot.min(parts.cache).saturating_add(self.missed);
            self.hot = Some(raised.max(hot).min(parts.size));
            self.probed = true;
        }
    }

    /// Stops probing for a while.
    fn back_off(&mut self, clock: Duration, is_new: bool, policy: &Policy) {
        if is_new || self.back_offs == 0 {
            self.back_offs = self.back_offs.saturating_add(1);
        }
        let doubled = 1 << (self.back_offs - 1).min(16);
        let wait = policy.miss_wait.saturating_mul(doubled);
        self.calm_probes = 0;
        self.step = policy.first_step;
        self.next_probe = clock.saturating_add(wait.min(policy.longest_wait));
    }

    /// A trim ended because the guest missed what it took. `hot`: the page cache that was left.
    pub(crate) fn note_miss(&mut self, clock: Duration, hot: Option<u64>, policy: &Policy) {
        let is_new = !is_within(clock, self.last_miss, EPISODE);
        self.last_miss = Some(clock);
        self.hot = hot;
        self.probed = true;
        self.back_off(clock, is_new, policy);
    }

    /// Probes again soon if the guest does something else now: its use of other memory than page
    /// cache has changed. What it misses then is not the fault of earlier takes.
    fn notice_change(&mut self, clock: Duration, parts: &Parts, policy: &Policy) {
        let change = parts.used_hard.abs_diff(self.used_before);
        if change > (parts.size / 20).max(CHANGE).saturating_add(parts.unsure) {
            self.used_before = parts.used_hard;
            self.last_take = None;
            self.last_miss = None;
            self.step = self.step.max(policy.first_step);
            self.back_offs = 0;
            let soon = clock.saturating_add(policy.take_interval);
            self.next_probe = self.next_probe.min(soon);
        }
    }

    /// Returns by how much the next probe may lower `hot`, in bytes.
    // Shares are at most 1, so the product fits.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub(crate) fn next_step(&self, parts: &Parts, largest: f64) -> u64 {
        (parts.in_use() as f64 * self.step.clamp(0.0, largest)) as u64
    }

    /// Records a take. If it was a probe, it left `hot` bytes of page cache, and the next step is
    /// larger.
    pub(crate) fn record_take(&mut self, hot: Option<u64>, at: Duration, policy: &Policy) {
        let pressure = self.pressure.unwrap_or(0.0).max(self.pressure_now);
        if self.takes_are_recent(at) {
            self.usual_miss_rate = self.usual_miss_rate.min(self.miss_rate);
            self.usual_pressure = self.usual_pressure.min(pressure);
        } else {
            self.usual_miss_rate = self.miss_rate;
            self.usual_pressure = pressure;
        }
        self.last_take = Some(at);
        if hot.is_none() {
            return;
        }
        self.hot = hot;
        self.step = (self.step * 2.0).min(policy.largest_step_short);
        self.calm_probes = self.calm_probes.saturating_add(1);
        if self.calm_probes >= CALM_PROBES {
            self.back_offs = 0;
        }
    }

    /// Returns the page cache that the guest needs, and what that is based on.
    pub(crate) fn hot(&self, parts: &Parts, source: Source) -> (u64, Basis) {
        let is_trimmed = source == Source::Agent { trims: true };
        let guess = if is_trimmed {
            parts.cache
        } else {
            parts.cache / 2
        };
        match self.hot {
            Some(hot) if self.probed || hot <= guess => (hot.min(parts.cache), Basis::Probed),
            _ => (guess, Basis::UpperBound),
        }
    }
}

/// Says whether `then` was at most `time` before `clock`.
fn is_within(clock: Duration, then: Option<Duration>, time: Duration) -> bool {
    then.is_some_and(|then| clock.saturating_sub(then) <= time)
}
