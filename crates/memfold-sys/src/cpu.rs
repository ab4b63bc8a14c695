//! Reads how much CPU time a thread has used (`clock_gettime(2)`), so that memfold keeps to its CPU
//! budgets.

use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time of the calling thread in nanoseconds.
#[must_use]
pub fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // Seconds and nanoseconds are never negative, because the clock counts from the thread's start.
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000
        + u64::try_from(time.tv_nsec).unwrap_or(0)
}
