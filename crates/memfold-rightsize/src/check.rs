//! Checks whether a guest's report can be true. A guest that contradicts itself keeps its size.
//!
//! These checks find no consistent lie. They need not: a guest that claims to need more than it
//! does gets at most its maximum, and nothing is taken for it from another VM's working set.

use std::fmt;
use std::time::Duration;

use memfold_units::{ByteSize, PAGE_SIZE};

use crate::input::GuestSignals;

/// Fastest reading that is believed, in bytes a second. No disk and no page cache is as fast.
const FASTEST_READ: u64 = 100 << 30;

/// Errors of reports that are read while the guest's memory changes, as a part of all memory.
const SLACK_DIVISOR: u64 = 16;

/// A part of a guest's report that cannot be true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contradiction {
    /// The guest claims more memory than the VM has.
    TotalAboveInstalled {
        /// What the guest claims.
        total: ByteSize,
        /// What QEMU says.
        installed: ByteSize,
    },
    /// A part of the guest's memory is larger than all of it.
    PartAboveTotal {
        /// The part's name in `/proc/meminfo`.
        part: &'static str,
        /// What the guest claims.
        bytes: ByteSize,
    },
    /// Free memory, page cache and anonymous memory together exceed all memory.
    SumAboveTotal {
        /// Their sum.
        sum: ByteSize,
    },
    /// Tasks waited for longer than time has passed.
    PressureAboveTime,
    /// All tasks waited for longer than some did.
    FullAboveSome,
    /// The guest claims to have read faster than any machine can.
    ReadTooFast,
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::TotalAboveInstalled { total, installed } => write!(
                f,
                "the guest claims {total} of memory but the VM has {installed}"
            ),
            Self::PartAboveTotal { part, bytes } => write!(
                f,
                "the guest claims {bytes} of {part}, more than all of its memory"
            ),
            Self::SumAboveTotal { sum } => write!(
                f,
                "the guest claims {sum} of free, cached and anonymous memory, more than all of \
                 its memory"
            ),
            Self::PressureAboveTime => {
                f.write_str("the guest claims that tasks waited longer than time passed")
            }
            Self::FullAboveSome => {
                f.write_str("the guest claims that all tasks waited longer than some tasks did")
            }
            Self::ReadTooFast => {
                f.write_str("the guest claims to have read faster than any machine can")
            }
        }
    }
}

/// Looks for a contradiction within one report of a VM with `installed` memory.
pub(crate) fn check_report(guest: &GuestSignals, installed: ByteSize) -> Option<Contradiction> {
    let slack = installed.0 / SLACK_DIVISOR;
    if guest.total.0 > installed.0.saturating_add(slack) {
        return Some(Contradiction::TotalAboveInstalled {
            total: guest.total,
            installed,
        });
    }
    let parts = [
        ("MemFree", guest.free),
        ("MemAvailable", guest.available),
        ("Dirty", guest.dirty),
        ("AnonPages", guest.anonymous),
        ("Cached", guest.file_cache),
    ];
    for (part, bytes) in parts {
        if bytes.0 > guest.total.0 {
            return Some(Contradiction::PartAboveTotal { part, bytes });
        }
    }
    let sum = (guest.free.0)
        .saturating_add(guest.file_cache.0)
        .saturating_add(guest.anonymous.0);
    if sum > guest.total.0.saturating_add(slack) {
        return Some(Contradiction::SumAboveTotal { sum: ByteSize(sum) });
    }
    let full_above_some = |totals: crate::input::PressureTotals| totals.full_us > totals.some_us;
    if guest.pressure.is_some_and(full_above_some) {
        return Some(Contradiction::FullAboveSome);
    }
    None
}

/// Says whether a counter has gone back between two reports: the guest booted again, or another
/// program reports now.
pub(crate) fn has_counted_anew(before: &GuestSignals, now: &GuestSignals) -> bool {
    let some = |guest: &GuestSignals| guest.pressure.map(|totals| totals.some_us);
    let full = |guest: &GuestSignals| guest.pressure.map(|totals| totals.full_us);
    let counters: [fn(&GuestSignals) -> Option<u64>; 10] = [
        some,
        full,
        |guest| guest.workingset_refault_file,
        |guest| guest.workingset_refault_anon,
        |guest| guest.pgsteal,
        |guest| guest.pswpin,
        |guest| guest.pswpout,
        |guest| guest.allocstall,
        |guest| guest.pgmajfault,
        |guest| guest.oom_kill,
    ];
    let went_back = |count: fn(&GuestSignals) -> Option<u64>| {
        let both = count(before).zip(count(now));
        both.is_some_and(|(before, now)| now < before)
    };
    counters.into_iter().any(went_back)
}

/// Looks for a contradiction between two reports of which the second continues the first. The
/// guest's time must have gone on by `elapsed`, which is not zero.
pub(crate) fn check_change(
    before: &GuestSignals,
    now: &GuestSignals,
    elapsed: Duration,
) -> Option<Contradiction> {
    let some = |guest: &GuestSignals| guest.pressure.map(|totals| totals.some_us);
    // The kernel adds up pressure when it is read or every two seconds, so a report may contain
    // time from before the last one.
    let longest_us = elapsed.as_micros().saturating_mul(11) / 10 + 2_500_000;
    let waited = grown(some(before), some(now));
    if u128::from(waited) > longest_us {
        return Some(Contradiction::PressureAboveTime);
    }
    let read = [
        grown(before.workingset_refault_file, now.workingset_refault_file),
        grown(before.workingset_refault_anon, now.workingset_refault_anon),
    ]
    .into_iter()
    .fold(0, u64::saturating_add);
    let seconds = u128::from(elapsed.as_secs()) + 1;
    if u128::from(read) * u128::from(PAGE_SIZE) > seconds * u128::from(FASTEST_READ) {
        return Some(Contradiction::ReadTooFast);
    }
    None
}

/// Returns by how much a counter has grown; 0 if either value is missing.
pub(crate) fn grown(before: Option<u64>, now: Option<u64>) -> u64 {
    before
        .zip(now)
        .map_or(0, |(before, now)| now.saturating_sub(before))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::PressureTotals;

    fn plausible() -> GuestSignals {
        GuestSignals {
            uptime: Duration::from_secs(100),
            total: ByteSize::mib(4000),
            free: ByteSize::mib(500),
            available: ByteSize::mib(2500),
            anonymous: ByteSize::mib(1000),
            file_cache: ByteSize::mib(2200),
            pressure: Some(PressureTotals {
                some_us: 5000,
                full_us: 3000,
            }),
            workingset_refault_file: Some(1000),
            ..GuestSignals::default()
        }
    }

    #[test]
    fn a_plausible_report_is_believed() {
        assert_eq!(check_report(&plausible(), ByteSize::mib(4096)), None);
        let mut next = plausible();
        next.workingset_refault_file = Some(2000);
        let elapsed = Duration::from_secs(1);
        assert_eq!(check_change(&plausible(), &next, elapsed), None);
    }

    #[test]
    fn each_contradiction_within_a_report_is_found() {
        let installed = ByteSize::mib(4096);
        let found = |change: fn(&mut GuestSignals)| {
            let mut guest = plausible();
            change(&mut guest);
            check_report(&guest, installed).map(|what| what.to_string())
        };
        let says = |change: fn(&mut GuestSignals), words: &str| {
            let text = found(change).unwrap_or_default();
            assert!(text.contains(words), "'{text}' lacks '{words}'");
        };
        says(|g| g.total = ByteSize::mib(8192), "but the VM has 4.00 GiB");
        says(|g| g.free = ByteSize::mib(4001), "MemFree");
        says(|g| g.available = ByteSize(u64::MAX), "MemAvailable");
        says(|g| g.anonymous = ByteSize::mib(3000), "anonymous memory");
        says(
            |g| {
                g.pressure = Some(PressureTotals {
                    some_us: 1,
                    full_us: 2,
                });
            },
            "all tasks waited",
        );
    }

    #[test]
    fn a_counter_that_goes_back_or_runs_too_fast_is_found() {
        let elapsed = Duration::from_secs(2);
        let mut next = plausible();
        assert!(!has_counted_anew(&plausible(), &next));
        next.workingset_refault_file = Some(999);
        assert!(has_counted_anew(&plausible(), &next));
        let mut next = plausible();
        next.pressure = Some(PressureTotals::default());
        assert!(has_counted_anew(&plausible(), &next));
        next.workingset_refault_file = Some(u64::MAX);
        assert_eq!(
            check_change(&plausible(), &next, elapsed),
            Some(Contradiction::ReadTooFast)
        );
        let mut next = plausible();
        next.pressure = Some(PressureTotals {
            some_us: 10_000_000,
            full_us: 3000,
        });
        assert_eq!(
            check_change(&plausible(), &next, elapsed),
            Some(Contradiction::PressureAboveTime)
        );
    }
}
