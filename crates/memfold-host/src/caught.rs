//! Catches panics in work where a panic is expected. All other panics end the daemon, because a
//! daemon with a dead thread is of no use.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread would be caught by [`caught`].
#[must_use]
pub fn is_caught() -> bool {
    CAUGHT.get()
}

/// Does some work that may panic, such as with what a guest has sent. What the work changes must be
/// of no use afterwards, or whole at any time.
///
/// # Errors
/// It has panicked, which the log tells.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, Panicked> {
    let before = CAUGHT.replace(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    CAUGHT.set(before);
    done.map_err(|_| Panicked)
}

/// The work has panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Panicked;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_caught_and_known_to_be() {
        assert!(!is_caught());
        assert_eq!(caught(is_caught), Ok(true));
        assert_eq!(caught(|| panic!("of this test")), Err::<(), _>(Panicked));
        assert!(!is_caught());
    }
}
