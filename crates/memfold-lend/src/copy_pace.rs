//! Tells a copy of a swap disk that is slow from one that never ends, because the guest writes to
//! the disk faster than the job copies.
//!
//! 1. As long as the number of bytes left reaches new lows, the copy goes on, however slow it is.
//! 2. If fewer bytes are left at the end of neither of two periods of [`SLOW_AFTER`] than at its
//!    beginning, or the copy has not ended [`CATCH_UP`] after one pass over the disk, the guest's
//!    writes are slowed down. A short burst of writes makes the number higher only once.
//! 3. From then on, [`Copying::stalled`] is the time without a new low. The mover of a disk decides
//!    whether to give up after [`NO_GAIN`].
//! 4. If the mover goes on, the guest's writes are slowed down further, to the next of [`LIMITS`],
//!    and the guest gets the whole time again. A small write of the guest makes QEMU copy a block
//!    of 64 KiB again, so that even a limit far below the speed of the copy can be too high.

use std::time::{Duration, Instant};

/// How long a guest may write faster than the job copies, after the whole disk was copied once.
/// After that time, the guest's writes are slowed down.
pub(super) const CATCH_UP: Duration = Duration::from_secs(3);

/// Period at whose end a copy must be closer to its end than at its beginning. After two periods in
/// a row in which it is not, the guest's writes are slowed down, also before the whole disk was
/// copied once.
const SLOW_AFTER: Duration = Duration::from_secs(30);

/// Limits for the writes of a slowed-down guest to its swap disk, in bytes per second, from the
/// first to the last.
pub(super) const LIMITS: [u64; 4] = [16 << 20, 4 << 20, 1 << 20, 256 << 10];

/// How long a copy may get no closer to its end although the guest's writes are slowed down. After
/// that time, the copy is not expected to end.
pub const NO_GAIN: Duration = Duration::from_secs(60);

/// How far the copy of a swap disk to other block nodes has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copying {
    /// Number of bytes copied so far. Blocks that the guest wrote meanwhile count again.
    pub done_bytes: u64,
    /// Number of bytes to copy in all, as far as is known now; grows while the guest writes. 0: not
    /// known yet.
    pub total_bytes: u64,
    /// How long the copy has come no closer to its end, since the guest's writes were slowed down;
    /// zero before that.
    pub stalled: Duration,
}

/// Progress of a copy job, as QEMU reported it so far.
#[derive(Debug, Default)]
pub(super) struct Pace {
    first_pass: Option<u64>,
    copied_once: Option<Instant>,
    /// Smallest number of bytes left so far, and the time at which it was reached.
    least: Option<(u64, Instant)>,
    /// Number of bytes left at the beginning of the present period, and that beginning.
    period: Option<(u64, Instant)>,
    /// Number of periods in a row without gain.
    lost_periods: u32,
    /// Number of [`LIMITS`] that the guest's writes have got so far.
    slowed: usize,
    seen: Copying,
}

impl Pace {
    /// Records what QEMU reports at the time `now`: the bytes copied so far, and the bytes to copy
    /// in all. Returns the limit for the guest's writes from now on, in bytes per second, if the
    /// limit changes.
    pub fn look(&mut self, done_bytes: u64, total_bytes: u64, now: Instant) -> Option<u64> {
        // QEMU counts the blocks to copy before it copies the first one.
        if total_bytes == 0 {
            return None;
        }
        let left = total_bytes.saturating_sub(done_bytes);
        if self.least.is_none_or(|(least, _)| left < least) {
            self.least = Some((left, now));
        }
        if done_bytes >= *self.first_pass.get_or_insert(total_bytes) {
            self.copied_once = self.copied_once.or(Some(now));
        }
        let (before, began) = *self.period.get_or_insert((left, now));
        if now.duration_since(began) >= SLOW_AFTER {
            let has_gained = left < before;
            self.lost_periods = if has_gained { 0 } else { self.lost_periods + 1 };
            self.period = Some((left, now));
        }
        let is_late = |since: Instant| now.duration_since(since) > CATCH_UP;
        let is_due = if self.slowed == 0 {
            self.copied_once.is_some_and(is_late) || self.lost_periods >= 2
        } else {
            // The mover has seen this time, and has not given up.
            self.seen.stalled >= NO_GAIN
        };
        let limit = LIMITS.get(self.slowed).copied().filter(|_| is_due);
        if limit.is_some() {
            self.slowed += 1;
            // The slower guest gets the whole time again.
            self.least = Some((left, now));
        }
        self.seen = Copying {
            done_bytes,
            total_bytes,
            stalled: if self.slowed > 0 {
                self.without_gain(now)
            } else {
                Duration::ZERO
            },
        };
        limit
    }

    /// Returns the progress at the last [`look`](Self::look).
    pub const fn seen(&self) -> Copying {
        self.seen
    }

    fn without_gain(&self, now: Instant) -> Duration {
        let since = self.least.map(|(_, since)| now.duration_since(since));
        since.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: u64 = 1000;

    /// Looks once a second until the guest is slowed down, or has to be given up. `job`: bytes
    /// copied and bytes to copy after so many seconds. Returns both times in seconds.
    fn follow(seconds: u64, job: impl Fn(u64) -> (u64, u64)) -> (Option<u64>, Option<u64>) {
        let begin = Instant::now();
        let mut pace = Pace::default();
        let mut slowed = None;
        for second in 0..seconds {
            let (done, total) = job(second);
            let limit = pace.look(done, total, begin + Duration::from_secs(second));
            if limit.is_some() {
                assert_eq!(slowed.replace(second), None, "slowed down twice");
            }
            if pace.seen().stalled >= NO_GAIN {
                return (slowed, Some(second));
            }
        }
        (slowed, None)
    }

    #[test]
    fn a_slow_copy_that_comes_closer_to_its_end_is_neither_slowed_down_nor_given_up() {
        // It takes hours, and copies a block only every 20 s.
        let job = |second: u64| (second / 20, DISK);
        assert_eq!(follow(20 * DISK, job), (None, None));
    }

    #[test]
    fn a_copy_that_never_catches_up_slows_the_guest_down_and_is_then_given_up() {
        // The guest writes as fast as the job copies: long before one pass over the disk.
        let job = |second: u64| (second, DISK + second);
        assert_eq!(follow(DISK, job), (Some(60), Some(120)));
    }

    #[test]
    fn a_guest_whose_copy_is_not_given_up_is_slowed_down_further_each_minute() {
        let begin = Instant::now();
        let (mut pace, mut limits) = (Pace::default(), Vec::new());
        for second in 0..600 {
            // The guest writes as fast as the job copies.
            let now = begin + Duration::from_secs(second);
            let limit = pace.look(second, DISK + second, now);
            limits.extend(limit.map(|limit| (second, limit)));
        }
        let kib = [(60, 16384), (121, 4096), (182, 1024), (243, 256)];
        assert_eq!(limits, kib.map(|(second, kib)| (second, kib << 10)));
        // No lower limit is left, and the mover of the disk still sees that the copy stalls.
        assert!(pace.seen().stalled > 5 * NO_GAIN);
    }

    #[test]
    fn a_burst_of_writes_in_a_long_copy_does_not_slow_the_guest_down() {
        // Ten blocks a second; after 30 s, 300 blocks have to be copied again.
        let job = |second: u64| (10 * second, DISK + if second < 30 { 0 } else { 300 });
        assert_eq!(follow(100, job), (None, None));
    }

    #[test]
    fn a_guest_is_slowed_down_3_s_after_one_pass_and_a_copy_that_then_gains_goes_on() {
        let job = |second: u64| match second {
            // QEMU still counts the blocks of the disk.
            0..10 => (0, 0),
            10..20 => (100 * (second - 10), DISK),
            20..24 => (DISK + 100 * (second - 20), DISK + 100 * (second - 19)),
            _ => (DISK + second, DISK + second + 100 - (second - 24).min(100)),
        };
        let (slowed, given_up) = follow(120, job);
        assert_eq!((slowed, given_up), (Some(24), None));
    }
}
