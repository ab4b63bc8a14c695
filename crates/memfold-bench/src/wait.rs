//! Waits until the memory use of VMs no longer changes, so that a study can measure it.

use std::time::{Duration, Instant};

use memfold_fold::{EngineStats, VmStats};
use memfold_lab::Lab;

/// Calls `measure` again and again, with the pause `rest` between two calls, until `value` of the
/// result changes by less than the fraction `part`, or until `times` further calls were made.
/// Returns the last result, and whether the value was steady.
pub fn wait_steady<T>(
    (rest, times, part): (Duration, u64, f64),
    measure: impl Fn() -> anyhow::Result<T>,
    value: impl Fn(&T) -> f64,
) -> anyhow::Result<(T, bool)> {
    let mut last = measure()?;
    for _ in 0..times {
        std::thread::sleep(rest);
        let before = value(&last);
        last = measure()?;
        if (value(&last) - before).abs() < before * part {
            return Ok((last, true));
        }
    }
    Ok((last, false))
}

/// Waits until the number of folded pages (`pages` of all VMs) stops growing, for a minute at most.
/// Returns the counters of folding, and the time of the last growth.
pub fn most_folded(
    lab: &Lab,
    pages: fn(&VmStats) -> u64,
) -> anyhow::Result<(EngineStats, Instant)> {
    let began = Instant::now();
    let (mut best, mut grew) = (0, began);
    loop {
        let stats = lab.stats()?;
        let folded: u64 = stats.vms.iter().map(pages).sum();
        if folded > best + best / 200 {
            (best, grew) = (folded, Instant::now());
        }
        if grew.elapsed() > Duration::from_secs(5) || began.elapsed() > Duration::from_secs(60) {
            return Ok((stats, grew));
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}
