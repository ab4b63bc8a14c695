//! CPU time of threads.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CPU time of the calling thread.
pub(crate) fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // The clock is never negative.
    Duration::try_from(time).unwrap_or_default()
}
