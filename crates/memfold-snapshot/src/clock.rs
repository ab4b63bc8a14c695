//! Corrects the wall clock of a guest that was stopped. When such a guest resumes, its clock still
//! shows the time of the stop. The correction has three steps:
//!
//! ```text
//!   look   the guest reports its time; the host's clock is read before and after
//!   step   the guest adds the difference to its own clock (settimeofday: monotonic time stays, and the kernel notifies programs
//!          that wait for clock changes: timerfd_create(2), TFD_TIMER_CANCEL_ON_SET; adjtimex(2) reports "unsynchronized" until a
//!          time daemon has checked the clock)
//!   look   measures the error that is left: the error of the first look, and the duration of the step
//! ```
//! The guest itself adds the difference to its clock, so it does not matter how long the request
//! takes to reach the guest. Only the run time of the guest's program `date` adds an error.

use std::time::{Duration, SystemTime};

use memfold_wire::order::GuestOrder;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Error up to which a guest's clock counts as correct.
pub const TOLERANCE: Duration = Duration::from_millis(50);

const SECOND: i128 = 1_000_000_000;

/// Correction of a guest's wall clock after the VM was stopped.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClockStep {
    /// Whether the guest's agent has not answered yet; the other fields are then unset.
    pub pending: bool,
    /// Milliseconds by which the guest's clock was behind the host's clock before the correction;
    /// negative if it was ahead.
    pub behind_ms: Option<f64>,
    /// Milliseconds by which the guest's clock was still behind after the correction, as measured;
    /// negative if it was ahead.
    pub left_ms: Option<f64>,
    /// Largest error of `left_ms` in both directions, in milliseconds.
    pub uncertainty_ms: Option<f64>,
    /// Reason why the guest's clock or RTC is not correct; unset if both are.
    pub problem: Option<String>,
}

impl ClockStep {
    /// Returns the correction's state before the guest has answered.
    #[must_use]
    pub fn pending() -> Self {
        Self {
            pending: true,
            ..Self::default()
        }
    }
}

/// Error of a guest's clock, measured once, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offset {
    /// Nanoseconds by which the guest's clock is behind the host's clock; negative if it is ahead.
    pub behind: i128,
    /// Largest error of `behind` in both directions, in nanoseconds.
    pub uncertainty: i128,
}

impl Offset {
    /// Computes the offset from `said`, the time that the guest's `date` printed between the host's
    /// times `before` and `after`. Returns `None` if the text is not a time.
    #[must_use]
    pub fn of(said: &[u8], before: SystemTime, after: SystemTime) -> Option<Self> {
        let text = std::str::from_utf8(said).ok()?.trim();
        let (seconds, decimals) = text.split_once('.').unwrap_or((text, ""));
        let seconds = i128::from(seconds.parse::<u32>().ok()?);
        // The `date` of a small system does not support "%N".
        let is_fine = decimals.len() == 9 && decimals.bytes().all(|b| b.is_ascii_digit());
        let nanoseconds = decimals.parse().ok().filter(|_| is_fine);
        let coarse = if is_fine { 0 } else { SECOND / 2 };
        let guest = seconds * SECOND + nanoseconds.unwrap_or(SECOND / 2);
        let (before, after) = (nanoseconds_of(before)?, nanoseconds_of(after)?);
        Some(Self {
            behind: (before + after) / 2 - guest,
            uncertainty: (after - before).abs() / 2 + coarse,
        })
    }

    /// Returns whether the clock's error is at most [`TOLERANCE`], or at most the uncertainty of
    /// the measurement.
    #[must_use]
    pub fn is_right(self) -> bool {
        let tolerance = i128::try_from(TOLERANCE.as_nanos()).unwrap_or(0);
        self.behind.abs() <= tolerance.max(self.uncertainty)
    }

    /// Returns whether the method of correction explains the error that is left: whether the error
    /// is at most the sum of the uncertainty of the measurement `before`, the duration `step` of
    /// the correction, and the uncertainty of this measurement.
    #[must_use]
    pub fn is_explained(self, before: Self, step: Duration) -> bool {
        let step = i128::try_from(step.as_nanos()).unwrap_or(i128::MAX / 4);
        self.is_right() || self.behind.abs() <= before.uncertainty + step + self.uncertainty
    }

    /// Returns the order that corrects the guest's clock by this offset. A guest whose `date`
    /// supports only whole seconds sets its clock to `now`, the host's time.
    #[must_use]
    pub fn step(self, now: SystemTime) -> GuestOrder {
        GuestOrder::StepClock {
            behind_ns: self.behind,
            now_s: nanoseconds_of(now).map_or(0, |now| (now + SECOND / 2) / SECOND),
        }
    }
}

/// Maximum number of attempts to set a clock. (A busy guest may take long between two
/// instructions.)
const MOST_STEPS: usize = 3;

/// Sets a guest's clock, in up to three attempts. `look` measures the clock's offset; `None` if the
/// guest does not report its time. `step` corrects the clock, and returns how long the correction
/// took, or `None` if it failed.
pub fn set<E>(
    mut look: impl FnMut() -> Result<Option<Offset>, E>,
    mut step: impl FnMut(Offset) -> Result<Option<Duration>, E>,
) -> Result<ClockStep, E> {
    let no_time = || ClockStep {
        problem: Some("the guest does not report its time (date +%s.%N)".to_owned()),
        ..ClockStep::default()
    };
    let Some(first) = look()? else {
        return Ok(no_time());
    };
    let (mut now, mut problem) = (first, None);
    for _ in 0..MOST_STEPS {
        if now.is_right() {
            problem = None;
            break;
        }
        let Some(took) = step(now)? else {
            problem = Some("'date -s' failed in the guest".to_owned());
            break;
        };
        let before = now;
        now = match look()? {
            Some(now) => now,
            None => return Ok(no_time()),
        };
        problem = (!now.is_explained(before, took)).then(|| {
            "the clock was set and is wrong again: something else in the guest sets it".to_owned()
        });
    }
    Ok(ClockStep {
        pending: false,
        behind_ms: Some(milliseconds(first.behind)),
        left_ms: Some(milliseconds(now.behind)),
        uncertainty_ms: Some(milliseconds(now.uncertainty)),
        problem,
    })
}

fn nanoseconds_of(time: SystemTime) -> Option<i128> {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    i128::try_from(since.as_nanos()).ok()
}

/// Returns a clock's offset, given in milliseconds, as text for people, such as "102.3 s behind".
#[must_use]
pub fn in_words(behind_ms: f64) -> String {
    let side = if behind_ms < 0.0 { "ahead" } else { "behind" };
    format!("{:.1} s {side}", behind_ms.abs() / 1000.0)
}

/// Converts nanoseconds to milliseconds, exact to a microsecond.
#[must_use]
#[allow(clippy::cast_precision_loss)] // even centuries are exact in milliseconds
pub fn milliseconds(nanoseconds: i128) -> f64 {
    (nanoseconds / 1000) as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::*;

    fn at(nanoseconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_nanos(nanoseconds)
    }

    #[test]
    fn a_measured_guest_clock_offset_is_uncertain_by_half_of_the_guests_answer_time() {
        let found = Offset::of(
            b"1700000000.250000000\n",
            at(1_700_000_101_000_000_000),
            at(1_700_000_101_500_000_000),
        );
        let found = found.unwrap();
        assert_eq!(
            (found.behind, found.uncertainty),
            (101 * SECOND, SECOND / 4)
        );
        assert!(!found.is_right());
        let ahead = Offset::of(
            b"1700000000.000000000",
            at(1_699_999_990_000_000_000),
            at(1_699_999_990_000_000_000),
        );
        assert_eq!(ahead.unwrap().behind, -10 * SECOND);
        // These are whole seconds from a `date` that does not support decimals.
        for said in ["1700000000", "1700000000.%N", "1700000000.N"] {
            let found = Offset::of(
                said.as_bytes(),
                at(1_700_000_000_700_000_000),
                at(1_700_000_000_700_000_000),
            )
            .unwrap();
            assert!(found.is_right(), "{said}: {found:?}");
        }
        for said in ["", "x", "-1.0", "99999999999999999999.0", "1e9"] {
            assert_eq!(Offset::of(said.as_bytes(), at(1), at(2)), None, "{said}");
        }
    }

    /// Returns the time that the script sets if the guest's `date` answers `now`.
    fn told(now: &str, offset: Offset, host: SystemTime) -> String {
        let place = tempfile::tempdir().unwrap();
        let date = place.path().join("date");
        let text = format!(
            "#!/bin/sh\ncase $1 in +*) echo '{now}' ;; *) echo \"$@\" > {}/told ;; esac\n",
            place.path().display()
        );
        std::fs::write(&date, text).unwrap();
        std::fs::set_permissions(&date, std::fs::Permissions::from_mode(0o755)).unwrap();
        let path = format!("{}:/usr/bin:/bin", place.path().display());
        let done = Command::new("/bin/sh")
            .args(["-c", &offset.step(host).script()])
            .env("PATH", path)
            .status();
        assert!(done.unwrap().success());
        std::fs::read_to_string(place.path().join("told"))
            .unwrap()
            .trim()
            .to_owned()
    }

    /// Simulates a guest whose clock is `behind` ns behind. The guest stops for `stands` ns between
    /// reading and setting its clock, a measurement takes `look` ns, and `other` ns are subtracted
    /// by another program after each correction.
    fn set_in(behind: i128, look: i128, stands: i128, other: i128) -> (ClockStep, usize) {
        let clock = std::cell::Cell::new(behind);
        let steps = std::cell::Cell::new(0);
        let done = set::<()>(
            || {
                // The guest reads its clock at the end of the measurement, but no side knows when.
                Ok(Some(Offset {
                    behind: clock.get() - look / 2,
                    uncertainty: look / 2,
                }))
            },
            |offset| {
                steps.set(steps.get() + 1);
                clock.set(clock.get() - offset.behind + stands + other);
                Ok(Some(Duration::from_nanos(
                    u64::try_from(stands + look).unwrap(),
                )))
            },
        );
        (done.unwrap(), steps.get())
    }

    #[test]
    fn if_a_guest_is_too_busy_to_set_its_clock_no_other_program_is_blamed_for_it() {
        let ms = SECOND / 1000;
        let (quick, steps) = set_in(102 * SECOND, 4 * ms, ms, 0);
        assert_eq!((quick.problem, steps), (None, 1));
        // The guest stops for 700 ms at each correction, and measurements take 80 ms.
        let (busy, steps) = set_in(102 * SECOND, 80 * ms, 700 * ms, 0);
        assert_eq!((busy.problem, steps), (None, MOST_STEPS));
        assert!(busy.left_ms.unwrap() > 500.0);
        let (other, _) = set_in(102 * SECOND, 80 * ms, 10 * ms, 5 * SECOND);
        assert!(other.problem.unwrap().contains("something else"));
        // On a slow host, an error that a measurement cannot detect is not reported.
        let (slow, _) = set_in(102 * SECOND, 3 * SECOND, 700 * ms, 0);
        assert_eq!(slow.problem, None);
    }

    #[test]
    fn after_a_restore_the_guest_is_told_to_add_the_offset_to_its_own_clock() {
        let offset = |behind| Offset {
            behind,
            uncertainty: 0,
        };
        let host = at(1_700_000_050_700_000_000);
        let step = |now: &str, behind| told(now, offset(behind), host);
        assert_eq!(
            step("1700000000000000005", 102 * SECOND + 7),
            "-u -s @1700000102.000000012"
        );
        assert_eq!(
            step("1700000000500000000", -SECOND),
            "-u -s @1699999999.500000000"
        );
        for coarse in ["1700000000", "1700000000%N", "1700000000N"] {
            assert_eq!(step(coarse, SECOND), "-u -s @1700000051", "{coarse}");
        }
    }
}
