//! Forks this process for a moment (`fork(2)`), to measure what a fork costs a process with many
//! memory mappings.

use std::io;
use std::time::{Duration, Instant};

use crate::result::{check, last_error};

/// Times of a fork whose child ended at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forked {
    /// Duration of the system call in the parent, which copies the mappings and page tables.
    pub call: Duration,
    /// Time until the child had ended and its memory was freed.
    pub whole: Duration,
}

/// Forks this process. The child does nothing but end. Memory marked with `MADV_DONTFORK` is not
/// part of the child.
pub fn fork_for_a_moment() -> io::Result<Forked> {
    fork_and_wait().map(|(_, forked)| forked)
}

/// Also returns the number of the child, which has ended.
fn fork_and_wait() -> io::Result<(libc::pid_t, Forked)> {
    let began = Instant::now();
    // SAFETY: the child calls only _exit(2), which is async-signal-safe, so it does not matter in
    // what state other threads have left locks.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends the child, without destructors and buffers of the parent.
        unsafe { libc::_exit(0) };
    }
    if child < 0 {
        return Err(last_error().into());
    }
    let call = began.elapsed();
    let mut status = 0;
    loop {
        // SAFETY: the kernel writes one integer, which lives through the call.
        let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
        if ended == child {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    check(status)?;
    let whole = began.elapsed();
    Ok((child, Forked { call, whole }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_child_of_a_fork_for_a_moment_has_ended_when_the_function_returns() {
        let (child, forked) = fork_and_wait().unwrap();
        assert!(forked.call <= forked.whole, "{forked:?}");
        // SAFETY: the call has no output but its result.
        let again = unsafe { libc::waitpid(child, std::ptr::null_mut(), libc::WNOHANG) };
        let error = io::Error::last_os_error().raw_os_error();
        assert_eq!((again, error), (-1, Some(libc::ECHILD)));
    }
}
