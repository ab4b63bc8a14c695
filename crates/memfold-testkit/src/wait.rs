//! Waits in tests for a condition, with a deadline. Deadlines are longer if this machine is now
//! slower than the machines that they were chosen for.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Environment variable with the factor for deadlines.
const SLOW: &str = "MEMFOLD_TEST_SLOW";

/// Number of steps of the work whose time is measured: about 20 ms of one idle core.
const STEPS: u64 = 12_000_000;

/// Time of these steps on the machines for which the deadlines were chosen.
const USUAL: Duration = Duration::from_millis(20);

/// Largest factor for deadlines. On a slower machine, tests of timing are meaningless.
const MOST: f64 = 10.0;

/// Returns how slow this machine is, 1 or more: the value of
/// `MEMFOLD_TEST_SLOW`, or else how slow this machine is, measured once.
///
/// # Panics
///
/// If the variable holds no number of 1 or more.
pub fn slowness() -> f64 {
    static KNOWN: OnceLock<f64> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let Ok(text) = std::env::var(SLOW) else {
            return measure_slowness();
        };
        let factor = text.parse().ok().filter(|factor| *factor >= 1.0);
        factor.unwrap_or_else(|| panic!("{SLOW}='{text}' is not a number of 1 or more"))
    })
}

/// Returns the deadline for this machine from `usual`, the deadline that suits a test that has an
/// idle machine to itself. It is four times as long at least, because tests take the machine from
/// each other, and because its neighbours may become busy after it was measured.
pub fn patience(usual: Duration) -> Duration {
    let factor = slowness();
    usual.mul_f64((2.0 * factor.max(2.0)).min(MOST.max(factor)))
}

/// Returns the longest time that something may take on this machine, from `usual`, the longest on
/// an idle machine: `usual` times [`slowness`]. A test that passes takes less; unlike [`patience`],
/// it holds a promise.
pub fn bound(usual: Duration) -> Duration {
    usual.mul_f64(slowness())
}

/// Measures the factor as the median of five runs of a fixed amount of arithmetic. Wall time is
/// measured, so that other load on the machine counts, too.
fn measure_slowness() -> f64 {
    let mut took: Vec<Duration> = (0..5).map(|round| work(round + 1)).collect();
    took.sort_unstable();
    (took[2].as_secs_f64() / USUAL.as_secs_f64()).clamp(1.0, MOST)
}

fn work(seed: u64) -> Duration {
    let began = Instant::now();
    let mut state = seed;
    for _ in 0..STEPS {
        // xorshift64: each step needs the one before, so no compiler and no core makes it shorter.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
    }
    assert!(std::hint::black_box(state) != 0);
    began.elapsed()
}

/// Interval between two checks of a condition.
const LOOK: Duration = Duration::from_millis(20);

/// Waits until `condition` returns `true`.
///
/// # Panics
///
/// After the time `limit`, lengthened by [`patience`]. The message contains `what`.
#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    wait_for(what, limit, || condition().then_some(()).ok_or(""));
}

/// Calls `look` repeatedly until it returns a value, and returns the value.
///
/// # Panics
///
/// After the time `limit`, lengthened by [`patience`]. The message contains `what` and the last
/// error of `look`.
#[track_caller]
pub fn wait_for<T, E: std::fmt::Debug>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> Result<T, E>,
) -> T {
    let (began, limit) = (Instant::now(), patience(limit));
    loop {
        match look() {
            Ok(value) => return value,
            Err(instead) if began.elapsed() >= limit => {
                panic!("not within {limit:?}: {what}; last seen: {instead:?}")
            }
            Err(_) => std::thread::sleep(LOOK),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_of_a_test_ends_with_the_value_of_its_condition() {
        let mut looks = 0;
        let found = wait_for("three looks", Duration::from_secs(5), || {
            looks += 1;
            if looks == 3 {
                Ok(looks)
            } else {
                Err("too few")
            }
        });
        assert_eq!(found, 3);
    }

    #[test]
    #[should_panic(expected = "a condition that never comes; last seen: \"still not\"")]
    fn a_wait_of_a_test_that_times_out_fails_with_the_last_observed_state() {
        wait_for(
            "a condition that never comes",
            Duration::from_millis(30),
            || Err::<(), _>("still not"),
        );
    }

    #[test]
    fn on_a_slow_machine_the_deadlines_of_tests_are_lengthened_by_the_measured_factor() {
        let factor = measure_slowness();
        assert!((1.0..=MOST).contains(&factor), "{factor}");
        assert!(patience(Duration::from_secs(1)) >= Duration::from_secs(1));
    }
}
