//! Waits for a condition, with a deadline.

use std::time::{Duration, Instant};

use crate::slow::patience;

/// Interval between two checks of a condition.
const LOOK: Duration = Duration::from_millis(20);

/// Waits until `condition` holds.
///
/// # Panics
///
/// After `limit`, lengthened by [`patience`], with the words of `what`.
#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    wait_for(what, limit, || condition().then_some(()).ok_or(""));
}

/// Waits until `look` returns a value, and returns it. If it never does, its last error is shown.
///
/// # Panics
///
/// After `limit`, lengthened by [`patience`], with `what` and the last error of `look`.
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
    fn a_wait_ends_with_the_value_of_its_condition() {
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
    fn a_wait_without_success_fails_with_the_last_observed_state() {
        wait_for(
            "a condition that never comes",
            Duration::from_millis(30),
            || Err::<(), _>("still not"),
        );
    }
}
