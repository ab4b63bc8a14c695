//! CPU time of threads.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time of the calling thread.
pub(crate) fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // The conversion cannot fail, because the clock is never negative.
    Duration::try_from(time).unwrap_or_default()
}
