//! Catches panics in work where panics are expected. All other panics end the daemon, because a
//! daemon that lacks a thread is of no use.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread is inside [`caught`], so that a panic would be caught.
#[must_use]
pub fn is_caught() -> bool {
    CAUGHT.get()
}

/// Runs work that may panic, for example on data from a guest. Data that the work changes must be
/// unused afterwards, or consistent at any time.
///
/// # Errors
///
/// [`Panicked`] if the work panicked; the panic is in the log.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, Panicked> {
    let before = CAUGHT.replace(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    CAUGHT.set(before);
    done.map_err(|_| Panicked)
}

/// Error of work that panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Panicked;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_in_a_closure_is_caught_and_returned_as_an_error() {
        assert!(!is_caught());
        assert_eq!(caught(is_caught), Ok(true));
        assert_eq!(caught(|| panic!("of this test")), Err::<(), _>(Panicked));
        assert!(!is_caught());
    }
}
