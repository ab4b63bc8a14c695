//! Helpers for the daemon's threads: start a thread, repeat a check, wait with a time limit, and
//! measure CPU time.

use std::io;
use std::sync::Arc;
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant, SystemTime};

use rustix::time::{ClockId, clock_gettime};

/// Starts a thread that runs `work`.
pub(crate) fn begin(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    Builder::new().name(name.into()).spawn(work).map(drop)
}

/// Starts a thread that calls `look` with `service`, and pauses for `interval` after each call. The
/// thread ends when the service is dropped.
pub(crate) fn repeat<T: Send + Sync + 'static>(
    name: &str,
    interval: Duration,
    service: &Arc<T>,
    mut look: impl FnMut(&Arc<T>) + Send + 'static,
) -> io::Result<()> {
    let weak = Arc::downgrade(service);
    begin(name, move || {
        while let Some(service) = weak.upgrade() {
            look(&service);
            drop(service);
            sleep(interval);
        }
    })
}

/// Waits until `done` returns `true`, for `limit` at most, with `pause` between two checks. Returns
/// whether `done` returned `true`.
pub(crate) fn wait_until(limit: Duration, pause: Duration, done: impl Fn() -> bool) -> bool {
    let end = Instant::now() + limit;
    while !done() {
        if Instant::now() >= end {
            return false;
        }
        sleep(pause);
    }
    true
}

/// Returns the time since 1970.
pub(crate) fn unix_time() -> Duration {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default()
}

/// Returns the CPU time of the calling thread.
pub(crate) fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // The conversion cannot fail, because the clock is never negative.
    Duration::try_from(time).unwrap_or_default()
}
