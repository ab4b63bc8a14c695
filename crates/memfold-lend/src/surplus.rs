//! Decides how much RAM a host can lend to others. The host offers additional RAM only slowly, and
//! takes RAM back at once.
//!
//! The drawing is a scale of the memory that the host has left, with plenty at the top. It shows
//! what the lender does in each range.
//!
//! ```text
//!   MemAvailable - owed
//!   |---------------------- surplus: offered after it existed for CALM, while no task waits for memory
//!   reserve  - - - - - - -
//!   |                       nothing more is offered, nothing is taken back
//!   low mark - - - - - - -
//!   |                       lent memory is taken back, until the whole reserve is free again
//!   a quarter - - - - - -
//!   |                       borrowers that have a copy get almost no time to return memory
//!   an eighth - - - - - -
//!   |                       exports whose borrowers have a copy end without notice
//! ```
//! Borrowers need time to give memory back, so the lender looks ahead. If the host's memory keeps
//! shrinking as in the last three seconds, and would reach the low mark before lent memory could be
//! back, lent memory is taken back now.
//!
//! *Owed* memory is the memory that this host's own VMs may need at once by writing to pages that
//! they share (the brake's debt x cover). Lent memory cannot serve these writes, so the lender
//! takes it back before the brake has to stop anything.
//!
//! Right-sizing takes lent memory back, too, when trims and balloons of the host's VMs do not
//! suffice. While it is on, the host keeps more than its reserve, so that what was taken back is
//! not offered again at once.
//!
//! Lent memory is locked, so `MemAvailable` no longer contains it. The maximum offer is the memory
//! that is lent now plus the surplus.

use std::collections::VecDeque;
use std::time::Duration;

use super::pressure::Sample;

/// How long a surplus must have existed before it is offered.
const CALM: Duration = Duration::from_secs(10);

/// Minimum of a host's reserve, in bytes.
const LEAST_RESERVE: u64 = 256 << 20;

/// Divisor of the host's RAM that gives the reserve (1/16 of the RAM).
const RESERVE_PART: u64 = 16;

/// Maximum percentage of time in which tasks may wait for memory (PSI `some`). A host above it
/// offers no more.
const BUSY_SOME: f64 = 1.0;

/// Longest time until recalled memory is back, as lending promises.
const GIVE_BACK: Duration = Duration::from_secs(5);

/// Length of a stretch of time. The pace of a loss is the slowest pace of [`STRETCHES`] consecutive
/// stretches, because memory that was taken in one sudden step does not keep shrinking.
const STRETCH: Duration = Duration::from_secs(1);
const STRETCHES: usize = 3;

/// Percentage of time in which all tasks wait for memory (PSI `full`), above which lent memory is
/// taken back.
const BAD_FULL: f64 = 5.0;

/// Refaults per second that ordinary reading of files causes (4 MiB/s). More refaults mean that
/// page cache is short; but if more than 1/[`PLENTY_PART`] of the RAM is available, a control
/// group's limit or proactive reclaim causes them.
const BUSY_REFAULTS: f64 = 1024.0;
const PLENTY_PART: u64 = 4;

/// Offers are rounded down to a multiple of this number of bytes, because small changes are not
/// worth a message.
const GRAIN: u64 = 16 << 20;

/// How urgently a host needs lent memory back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hurry {
    /// The host can wait for borrowers to return memory in their normal time.
    #[default]
    No,
    /// Less than a quarter of the host's reserve is left, after subtracting the memory that VMs may
    /// claim by writing to shared pages. Borrowers that have a copy get almost no time to stop
    /// using the lent RAM.
    Copied,
    /// Less than an eighth of the host's reserve is available. The kernel would soon swap, and then
    /// kill exports before a borrower could react.
    Now,
}

impl Hurry {
    /// Returns how urgently the host needs memory back, from its memory figures at one moment.
    #[must_use]
    pub fn by(now: &Sample) -> Self {
        let reserve = Judge::reserve(now.total_bytes);
        if now.available_bytes < reserve / 8 {
            Self::Now
        } else if spare(now) < reserve / 4 {
            Self::Copied
        } else {
            Self::No
        }
    }
}

/// How much a host can lend and must take back at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Most bytes that the host can lend in all, including those that are lent now.
    pub offer_bytes: u64,
    /// Number of lent bytes that the host needs back from borrowers.
    pub recall_bytes: u64,
    /// Most bytes that new exports may take now. An offer that a borrower has accepted may be some
    /// seconds old. More than this many bytes would have to be taken back at once.
    pub room_bytes: u64,
    /// How urgently the host needs the bytes in `recall_bytes` back.
    pub hurry: Hurry,
    /// Reason why `offer_bytes` is not larger, as text for the operator.
    pub why: String,
}

/// Decides how much RAM a host can lend, from samples of the host's memory figures.
#[derive(Clone, Debug)]
pub struct Judge {
    /// Maximum that may ever be lent.
    pub(super) max_bytes: u64,
    /// Samples of the last [`CALM`], each with the bytes that were lent then.
    looked: VecDeque<(Sample, u64)>,
    /// Number of consecutive samples that showed too little memory.
    short: u32,
}

impl Judge {
    /// Creates a judge of a host that may lend at most `max_bytes` bytes.
    #[must_use]
    pub const fn new(max_bytes: u64) -> Self {
        Self {
            max_bytes,
            looked: VecDeque::new(),
            short: 0,
        }
    }

    /// Returns how many bytes a host with `total_bytes` bytes of RAM keeps for itself: a sixteenth,
    /// at least 256 MiB.
    #[must_use]
    pub fn reserve(total_bytes: u64) -> u64 {
        LEAST_RESERVE.max(total_bytes / RESERVE_PART)
    }

    /// Decides how much the host can lend and must take back, from its newest memory figures.
    /// `lent_bytes` bytes are lent (and so locked) now.
    pub fn judge(&mut self, now: Sample, lent_bytes: u64) -> Verdict {
        let before = self.looked.back().map(|(before, _)| *before);
        self.looked.push_back((now, lent_bytes));
        let is_recent = |look: &Sample| now.at.saturating_sub(look.at) <= CALM;
        self.looked.retain(|(look, _)| is_recent(look));
        let reserve = Self::reserve(now.total_bytes);
        let beyond = lent_bytes.saturating_sub(self.max_bytes);
        let missing = self.recall(&now, reserve, lent_bytes);
        let hurry = match missing {
            0 => Hurry::No,
            _ => Hurry::by(&now),
        };
        let wanted_back = now.wanted_back_bytes.min(lent_bytes);
        let recall_bytes = missing.max(beyond).max(wanted_back);
        let is_needed = recall_bytes > 0 || now.wanted_back_bytes > 0 || self.short >= 2;
        // Exports that are still being allocated will take memory that counts as available.
        let low_mark = (reserve / 2).saturating_add(now.beginning_bytes);
        let room_bytes = if is_needed {
            0
        } else {
            spare(&now).saturating_sub(low_mark)
        };
        // The smallest surplus of all recent samples counts, because memory that comes and goes is
        // no surplus.
        let available = self.looked.iter().map(|(look, _)| spare(look)).min();
        // Memory that is lent but not allocated yet still counts as available, but must not be lent
        // twice.
        let reserve = reserve.max(now.kept_bytes);
        let kept = reserve.saturating_add(now.beginning_bytes);
        let surplus = available.unwrap_or(0).saturating_sub(kept);
        let busy = before.and_then(|before| waits(&before, &now));
        let busy = busy.or_else(|| waited(&now));
        let (more, why) = match busy {
            Some(why) => (0, why),
            None if wanted_back > 0 => (
                0,
                "right-sizing takes lent memory back for VMs of this host".into(),
            ),
            None if surplus < GRAIN => (
                0,
                format!(
                    "{} MiB are available, of which {} MiB are kept for this host",
                    (available.unwrap_or(0) + now.owed_bytes) >> 20,
                    (reserve + now.owed_bytes) >> 20
                ),
            ),
            None if lent_bytes + surplus >= self.max_bytes => {
                (surplus, "the limit of 'memfold lend --max'".into())
            }
            None => (surplus, "all memory that this host can spare".into()),
        };
        let all = lent_bytes.saturating_sub(recall_bytes) + if recall_bytes > 0 { 0 } else { more };
        Verdict {
            offer_bytes: all.min(self.max_bytes) / GRAIN * GRAIN,
            recall_bytes,
            room_bytes: room_bytes.min(self.max_bytes.saturating_sub(lent_bytes)),
            hurry,
            why,
        }
    }

    fn recall(&mut self, now: &Sample, reserve: u64, lent_bytes: u64) -> u64 {
        let going = self.going(now, lent_bytes);
        let soon = spare(now).saturating_sub(going);
        let too_little = spare(now) < reserve / 2;
        let all_wait = now.full_avg10.is_some_and(|percent| percent > BAD_FULL);
        let is_short = too_little || all_wait;
        self.short = if is_short { self.short + 1 } else { 0 };
        // A single sample may show a program that allocates and soon frees, so the host must be
        // short twice, if there is time for a second sample. The pace is measured over a longer
        // time anyway.
        let soon_too_little = going > 0 && soon < reserve / 2;
        let now_too_little = Hurry::by(now) == Hurry::Now;
        if self.short < 2 && !soon_too_little && !now_too_little {
            return 0;
        }
        let missing = (reserve + now.owed_bytes + going).saturating_sub(now.available_bytes);
        missing.max(GRAIN).min(lent_bytes)
    }

    /// Returns how many bytes will be gone when memory recalled now is back, if the present pace
    /// continues.
    // The result is below 2^63.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn going(&self, now: &Sample, lent_bytes: u64) -> u64 {
        let mut slowest = f64::INFINITY;
        let mut end = now;
        for _ in 0..STRETCHES {
            let is_earlier = |look: &&Sample| end.at.saturating_sub(look.at) >= STRETCH;
            let steady = self.looked.iter().rev();
            // Samples while an export is being allocated do not count, because the export takes
            // memory as intended.
            let mut steady =
                steady.take_while(|(look, lent)| *lent == lent_bytes && look.beginning_bytes == 0);
            let Some(begin) = steady.by_ref().map(|(look, _)| look).find(is_earlier) else {
                return 0;
            };
            let gone = begin.available_bytes.saturating_sub(end.available_bytes) as f64;
            slowest = slowest.min(gone / end.at.saturating_sub(begin.at).as_secs_f64());
            end = begin;
        }
        (slowest * GIVE_BACK.as_secs_f64()) as u64
    }
}

/// Returns how much memory is available and not owed to this host's VMs.
const fn spare(sample: &Sample) -> u64 {
    sample.available_bytes.saturating_sub(sample.owed_bytes)
}

/// Returns the reason if tasks of this host have waited for memory, by the kernel's averages.
fn waited(now: &Sample) -> Option<String> {
    let some = now.some_avg10?.max(now.some_avg60?);
    (some > BUSY_SOME).then(|| format!("this host's tasks wait for memory ({some} % of the time)"))
}

/// Returns the reason if this host lacked memory between two samples.
fn waits(before: &Sample, now: &Sample) -> Option<String> {
    let seconds = now.at.saturating_sub(before.at).as_secs_f64();
    if seconds <= 0.0 {
        return None;
    }
    let refaults = now.refaults.saturating_sub(before.refaults) as f64 / seconds;
    if now.swap_ins > before.swap_ins {
        return Some("this host reads its own swap".into());
    }
    if now.short_guests > 0 {
        return Some(match now.short_guests {
            1 => "a guest of this host is short of memory".into(),
            count => format!("{count} guests of this host are short of memory"),
        });
    }
    let is_short = now.available_bytes < now.total_bytes / PLENTY_PART;
    (is_short && refaults > BUSY_REFAULTS)
        .then(|| format!("this host rereads pages that it had dropped ({refaults:.0} a second)"))
}

#[cfg(test)]
mod tests {
    use super::super::pressure::tests::recorded;
    use super::*;

    const GIB: u64 = 1 << 30;

    fn calm(seconds: u64, available: u64) -> Sample {
        Sample {
            at: Duration::from_secs(seconds),
            total_bytes: 16 * GIB,
            available_bytes: available,
            some_avg10: Some(0.0),
            some_avg60: Some(0.0),
            full_avg10: Some(0.0),
            ..Sample::default()
        }
    }

    #[test]
    fn a_host_without_pressure_offers_memory_above_its_reserve_up_to_the_limit() {
        let verdict = Judge::new(64 * GIB).judge(calm(0, 8 * GIB), 0);
        assert_eq!(verdict.offer_bytes, 7 * GIB);
        assert_eq!(verdict.recall_bytes, 0);
        assert_eq!(
            Judge::new(2 * GIB).judge(calm(0, 8 * GIB), 0).offer_bytes,
            2 * GIB
        );
        // Lent memory is missing in the available memory, and still counts for the offer.
        let verdict = Judge::new(64 * GIB).judge(calm(0, 5 * GIB), 3 * GIB);
        assert_eq!(verdict.offer_bytes, 7 * GIB);
        let verdict = Judge::new(64 * GIB).judge(calm(0, GIB), 0);
        assert_eq!(verdict.offer_bytes, 0);
        assert!(verdict.why.contains("1024 MiB are kept"), "{}", verdict.why);
    }

    #[test]
    fn lent_memory_above_a_lowered_limit_is_recalled() {
        let mut judge = Judge::new(8 * GIB);
        assert_eq!(judge.judge(calm(0, 8 * GIB), 4 * GIB).recall_bytes, 0);
        judge.max_bytes = 3 * GIB;
        let verdict = judge.judge(calm(1, 8 * GIB), 4 * GIB);
        assert_eq!((verdict.offer_bytes, verdict.recall_bytes), (3 * GIB, GIB));
    }

    #[test]
    fn new_exports_have_room_only_down_to_the_mark_at_which_memory_is_recalled() {
        // The reserve of this host is 1 GiB, and the mark is the half of it.
        let mut judge = Judge::new(4 * GIB);
        assert_eq!(judge.judge(calm(0, 3 * GIB), 0).room_bytes, 5 * GIB / 2);
        assert_eq!(judge.judge(calm(1, 9 * GIB), GIB).room_bytes, 3 * GIB);
        let beginning = Sample {
            beginning_bytes: GIB,
            ..calm(2, 3 * GIB)
        };
        assert_eq!(judge.judge(beginning, GIB).room_bytes, 3 * GIB / 2);
        // A task that waits for a moment keeps the host from offering more, and takes nothing back.
        let busy = Sample {
            some_avg10: Some(2.0),
            ..calm(3, 3 * GIB)
        };
        let verdict = judge.judge(busy, 0);
        assert_eq!((verdict.offer_bytes, verdict.room_bytes), (0, 5 * GIB / 2));
        let wanted = Sample {
            wanted_back_bytes: GIB,
            ..calm(4, 3 * GIB)
        };
        assert_eq!(judge.judge(wanted, 0).room_bytes, 0);
        // There is no lent memory that could be recalled.
        let verdict = judge.judge(calm(5, GIB / 4), 0);
        assert_eq!((verdict.recall_bytes, verdict.room_bytes), (0, 0));
        judge.max_bytes = GIB;
        assert_eq!(judge.judge(calm(6, 3 * GIB), 2 * GIB).room_bytes, 0);
    }

    #[test]
    fn lent_memory_that_right_sizing_wants_back_is_recalled_and_not_offered_again() {
        let mut judge = Judge::new(64 * GIB);
        let wants = |second, available, wanted_back_bytes| Sample {
            wanted_back_bytes,
            kept_bytes: 2 * GIB,
            ..calm(second, available)
        };
        // The reserve of this host is 1 GiB, so the lender itself would take nothing back.
        let verdict = judge.judge(wants(0, 2 * GIB, GIB), 4 * GIB);
        assert_eq!(
            (verdict.recall_bytes, verdict.offer_bytes, verdict.hurry),
            (GIB, 3 * GIB, Hurry::No)
        );
        assert!(verdict.why.contains("right-sizing"), "{}", verdict.why);
        let verdict = judge.judge(wants(1, 2 * GIB, 9 * GIB), 4 * GIB);
        assert_eq!((verdict.recall_bytes, verdict.offer_bytes), (4 * GIB, 0));
        // Of 3 GiB, 2 GiB are kept.
        let mut judge = Judge::new(64 * GIB);
        let verdict = judge.judge(wants(0, 3 * GIB, 0), GIB);
        assert_eq!((verdict.recall_bytes, verdict.offer_bytes), (0, 2 * GIB));
    }

    #[test]
    fn a_host_with_guests_short_of_memory_offers_no_more_and_recalls_nothing() {
        let mut judge = Judge::new(64 * GIB);
        judge.judge(calm(0, 8 * GIB), GIB);
        let short = Sample {
            short_guests: 2,
            ..calm(1, 8 * GIB)
        };
        let verdict = judge.judge(short, GIB);
        assert_eq!((verdict.offer_bytes, verdict.recall_bytes), (GIB, 0));
        assert!(verdict.why.starts_with("2 guests"), "{}", verdict.why);
    }

    #[test]
    fn surplus_memory_is_offered_for_lending_after_ten_seconds_and_withdrawn_at_once() {
        let mut judge = Judge::new(64 * GIB);
        judge.judge(calm(0, 4 * GIB), 0);
        for second in 1..=10 {
            assert_eq!(judge.judge(calm(second, 8 * GIB), 0).offer_bytes, 3 * GIB);
        }
        assert_eq!(judge.judge(calm(11, 8 * GIB), 0).offer_bytes, 7 * GIB);
        assert_eq!(judge.judge(calm(12, 2 * GIB), 0).offer_bytes, GIB);
    }

    #[test]
    fn a_host_that_swaps_or_has_memory_pressure_offers_only_the_memory_already_lent() {
        type Change = fn(&mut Sample);
        let busy: [(&str, Change); 4] = [
            ("wait for memory", |s| s.some_avg10 = Some(3.0)),
            ("wait for memory", |s| s.some_avg60 = Some(3.0)),
            ("its own swap", |s| s.swap_ins = 1),
            ("dropped", |s| s.refaults = 5000),
        ];
        for (word, change) in busy {
            let mut judge = Judge::new(64 * GIB);
            judge.judge(calm(0, 3 * GIB), GIB);
            let mut now = calm(1, 3 * GIB);
            change(&mut now);
            let verdict = judge.judge(now, GIB);
            assert_eq!(verdict.offer_bytes, GIB, "{word}");
            assert!(verdict.why.contains(word), "{}", verdict.why);
            assert_eq!(verdict.recall_bytes, 0);
        }
        // These refaults are not caused by a lack of memory.
        let mut judge = Judge::new(64 * GIB);
        judge.judge(calm(0, 8 * GIB), GIB);
        let mut now = calm(1, 8 * GIB);
        now.refaults = 5000;
        assert_eq!(judge.judge(now, GIB).offer_bytes, 8 * GIB);
    }

    #[test]
    fn lent_memory_is_recalled_if_two_samples_in_a_row_are_short_of_memory() {
        let mut judge = Judge::new(64 * GIB);
        // Between the reserve and the low mark, nothing more is offered and nothing is taken back.
        for second in 0..20 {
            let verdict = judge.judge(calm(second, 700 << 20), 3 * GIB);
            assert_eq!((verdict.offer_bytes, verdict.recall_bytes), (3 * GIB, 0));
        }
        assert_eq!(judge.judge(calm(20, 300 << 20), 3 * GIB).recall_bytes, 0);
        let verdict = judge.judge(calm(21, 300 << 20), 3 * GIB);
        assert_eq!(verdict.recall_bytes, 724 << 20);
        assert!(verdict.offer_bytes <= 3 * GIB - (724 << 20));
        assert_eq!(
            judge.judge(calm(22, 300 << 20), 100 << 20).recall_bytes,
            100 << 20
        );
        assert_eq!(judge.judge(calm(23, 2 * GIB), 3 * GIB).recall_bytes, 0);
        // All tasks wait for memory, although much is available.
        let mut stuck = calm(24, 8 * GIB);
        stuck.full_avg10 = Some(20.0);
        judge.judge(stuck, GIB);
        assert!(judge.judge(stuck, GIB).recall_bytes > 0);
    }

    #[test]
    fn the_less_of_the_reserve_is_available_the_less_time_borrowers_get_at_a_recall() {
        let mut judge = Judge::new(64 * GIB);
        for (second, available, lent, recalled, hurry) in [
            (0, 8 * GIB, 3 * GIB, false, Hurry::No),
            // One short sample takes nothing back.
            (10, 200 << 20, 3 * GIB, false, Hurry::No),
            (11, 200 << 20, 3 * GIB, true, Hurry::Copied),
            (12, 300 << 20, 3 * GIB, true, Hurry::No),
            // Nothing is lent that could be taken back.
            (13, 200 << 20, 0, false, Hurry::No),
            (14, 8 * GIB, 3 * GIB, false, Hurry::No),
            // There is no time for a second sample.
            (24, 100 << 20, 3 * GIB, true, Hurry::Now),
        ] {
            let verdict = judge.judge(calm(second, available), lent);
            let found = (verdict.recall_bytes > 0, verdict.hurry);
            assert_eq!(found, (recalled, hurry), "{second}");
        }
        // A new limit of the operator is not urgent.
        let mut judge = Judge::new(GIB);
        let verdict = judge.judge(calm(0, 200 << 20), 3 * GIB);
        assert_eq!((verdict.recall_bytes, verdict.hurry), (2 * GIB, Hurry::No));
    }

    /// Simulates a host with 8 GiB available, of which 4 GiB are lent, that loses `pace` bytes each
    /// second from the 10th second on, with two samples per second. Returns the bytes that are
    /// available when memory is taken back for the first time, and how much is taken back.
    fn taken_back(mut pace: impl FnMut(u64) -> u64) -> Option<(u64, u64)> {
        let mut judge = Judge::new(64 * GIB);
        let mut available = 8 * GIB;
        for half in 0..400 {
            let mut now = calm(0, available);
            now.at = Duration::from_millis(half * 500);
            let verdict = judge.judge(now, 4 * GIB);
            if verdict.recall_bytes > 0 {
                return Some((available, verdict.recall_bytes));
            }
            if half >= 20 {
                available = available.saturating_sub(pace(half) / 2);
            }
        }
        None
    }

    #[test]
    fn a_steady_loss_of_available_memory_starts_a_recall_before_the_reserve_is_used() {
        for pace in [GIB / 10, GIB / 4, GIB / 2, GIB] {
            let (left, recalled) = taken_back(|_| pace).unwrap();
            // When the memory is back, after five seconds, the host still has some; and the memory
            // was not recalled much too early.
            assert!(left >= 5 * pace, "{pace}: {left}");
            assert!(left <= 6 * pace + GIB, "{pace}: {left}");
            assert!(recalled >= (GIB / 2).min(5 * pace), "{pace}: {recalled}");
        }
    }

    #[test]
    fn a_sudden_allocation_or_a_new_loan_does_not_count_as_a_steady_loss_of_memory() {
        // The host loses 5 GiB within a second, and then nothing more.
        let stroke = |half| if half < 22 { 5 * GIB } else { 0 };
        assert_eq!(taken_back(stroke), None);
        // For three seconds, a new export of 3 GiB is being allocated.
        let mut judge = Judge::new(64 * GIB);
        for second in 0..20 {
            let filled = second.clamp(10, 13) - 10;
            let mut now = calm(second, 6 * GIB - filled * GIB);
            now.beginning_bytes = if (10..=13).contains(&second) {
                3 * GIB
            } else {
                0
            };
            let lent = if second >= 10 { 4 * GIB } else { GIB };
            assert_eq!(judge.judge(now, lent).recall_bytes, 0, "{second}");
        }
    }

    #[test]
    fn leased_memory_that_is_not_allocated_yet_is_not_offered_a_second_time() {
        let mut judge = Judge::new(64 * GIB);
        assert_eq!(judge.judge(calm(0, 10 * GIB), 0).offer_bytes, 9 * GIB);
        // A lease of 8 GiB is taken: none of it is allocated yet, then half, then all.
        for (second, available, beginning) in [(1, 10, 8), (2, 6, 8), (3, 2, 8), (4, 2, 0)] {
            let mut now = calm(second, available * GIB);
            now.beginning_bytes = beginning * GIB;
            let verdict = judge.judge(now, 8 * GIB);
            assert!(
                (8 * GIB..=9 * GIB).contains(&verdict.offer_bytes),
                "{second}: {verdict:?}"
            );
            assert_eq!(verdict.recall_bytes, 0, "{second}");
        }
    }

    #[test]
    fn memory_that_the_debt_of_local_vms_may_need_is_not_offered_and_is_recalled() {
        let owing = |second, available, owed_bytes| Sample {
            owed_bytes,
            ..calm(second, available)
        };
        let mut judge = Judge::new(64 * GIB);
        assert_eq!(
            judge.judge(owing(0, 8 * GIB, 3 * GIB), 0).offer_bytes,
            4 * GIB
        );
        // The debt grows while all of the offer is lent: exactly the missing memory is taken back.
        assert_eq!(
            judge
                .judge(owing(1, 4 * GIB, 5 * GIB), 4 * GIB)
                .recall_bytes,
            0
        );
        let verdict = judge.judge(owing(2, 4 * GIB, 5 * GIB), 4 * GIB);
        assert_eq!(
            (verdict.recall_bytes, verdict.offer_bytes),
            (2 * GIB, 2 * GIB)
        );
        let verdict = judge.judge(owing(3, 6 * GIB, 5 * GIB), 2 * GIB);
        assert_eq!(verdict.recall_bytes, 0);
        assert!(verdict.why.contains("6144 MiB are kept"), "{}", verdict.why);
    }

    /// Uses the recorded host as if it had lent almost all memory that the program leaves free.
    #[test]
    fn when_a_program_allocates_11_gib_only_the_missing_memory_is_recalled_from_borrowers() {
        let samples = recorded();
        let mut judge = Judge::new(64 * GIB);
        let reserve = Judge::reserve(samples[0].total_bytes);
        let least = samples.iter().map(|s| s.available_bytes).min().unwrap();
        let begun = least - reserve / 4;
        let (mut lent, mut recalled, mut offered) = (begun, 0, Vec::new());
        for sample in &samples {
            let mut now = *sample;
            now.available_bytes = now.available_bytes.saturating_sub(lent);
            let verdict = judge.judge(now, lent);
            offered.push(verdict.offer_bytes);
            // The memory is back at the next sample.
            lent -= verdict.recall_bytes;
            recalled += verdict.recall_bytes;
        }
        assert!(recalled > 0 && recalled <= reserve + GIB, "{recalled}");
        let least = offered.iter().min().unwrap();
        assert!(offered[0] > 19 * GIB && *least < begun, "{offered:?}");
        // The offer never exceeds the memory above the reserve.
        for (sample, offer) in samples.iter().zip(&offered) {
            assert!(*offer <= sample.available_bytes.max(begun), "{offered:?}");
        }
    }
}
