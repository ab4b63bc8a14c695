//! Helpers for the daemon's threads: start a thread, repeat a check, wait with a time limit, and
//! measure CPU time.

use std::io;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
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

/// Most threads of [`on_all_cores`].
const MAX_WORKERS: usize = 8;

/// Calls `work` with each item, on threads for all cores, at most 8. Returns the results in the
/// order of the items, and the CPU time of all these threads except the caller's.
pub(crate) fn on_all_cores<I: Sync, R: Send>(
    items: &[I],
    work: impl Fn(&I) -> R + Sync,
) -> (Vec<R>, Duration) {
    let next = AtomicUsize::new(0);
    let worker = || {
        let (began, mut done) = (thread_cpu(), Vec::new());
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(number) else {
                return (done, thread_cpu().saturating_sub(began));
            };
            done.push((number, work(item)));
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let workers = cores.min(MAX_WORKERS).min(items.len());
    let (mut done, cpu) = std::thread::scope(|scope| {
        // A panic counts as one of the caller's thread. Without a thread, the others do its work.
        let current = std::thread::current();
        let name = current.name().unwrap_or("worker");
        let begin = |_| {
            Builder::new()
                .name(name.into())
                .spawn_scoped(scope, worker)
                .ok()
        };
        let others: Vec<_> = (1..workers).filter_map(begin).collect();
        let (mut done, _) = worker();
        let mut cpu = Duration::ZERO;
        for other in others {
            let (more, used) = other.join().unwrap_or_else(|panic| resume_unwind(panic));
            done.extend(more);
            cpu += used;
        }
        (done, cpu)
    });
    done.sort_unstable_by_key(|(number, _)| *number);
    (done.into_iter().map(|(_, result)| result).collect(), cpu)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_on_all_cores_returns_the_result_of_each_item_in_order() {
        let items: Vec<u64> = (0..1000).collect();
        let (squares, _) = on_all_cores(&items, |item| item * item);
        assert!(squares.into_iter().eq(items.iter().map(|item| item * item)));
        assert!(on_all_cores(&[] as &[u64], |item| *item).0.is_empty());
    }

    #[test]
    fn work_on_all_cores_tells_the_cpu_time_of_all_its_threads() {
        let spin = |_: &u64| {
            let began = thread_cpu();
            while thread_cpu().saturating_sub(began) < Duration::from_millis(20) {}
        };
        let began = thread_cpu();
        let (done, others) = on_all_cores(&[0; 16], spin);
        let all = others + thread_cpu().saturating_sub(began);
        // The time is that of all threads, on hosts with one core, too.
        let expected = Duration::from_millis(16 * 20)..Duration::from_millis(16 * 40);
        assert!(done.len() == 16 && expected.contains(&all), "{all:?}");
    }
}
