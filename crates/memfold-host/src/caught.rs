//! Runs code that may panic on data from outside, for example from a guest, and turns a panic into
//! an error. Any other panic in one of the daemon's threads ends the daemon.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread runs inside [`caught`], which catches a panic.
#[must_use]
pub fn is_caught() -> bool {
    CAUGHT.get()
}

/// Calls `work`, which may panic, for example on data from a guest. Data that `work` changes must
/// be consistent at any time, or unused after a panic.
///
/// # Errors
///
/// [`Panicked`] if `work` panicked. The log has the panic's message.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, Panicked> {
    let before = CAUGHT.replace(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    CAUGHT.set(before);
    done.map_err(|_| Panicked)
}

/// Error of [`caught`]: the called function panicked.
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
