//! Reports the guest's memory figures at the interval that the daemon asks for, and less often
//! while they do not change.
//!
//! ```text
//!   due --> sizes and pressure --> as in the last report, which was calm and is young?
//!                                    | yes         | no
//!                                    v             v
//!                                 left out       all figures --> FromAgent::Memory
//! ```
//! So a guest whose memory does not change costs itself and the host less. A report is calm if it
//! says the same as the one before. One such report follows each change: from it, the daemon learns
//! that the change is over.

use std::path::Path;
use std::time::{Duration, Instant};

use memfold_wire::agent::FromAgent;
use memfold_wire::memory::MemoryReading;

use super::reader::MemoryReader;

/// Longest time between two reports while the guest's memory does not change, unless the daemon's
/// interval is longer. Right-sizing does not believe reports that are older than 15 s, and takes
/// memory from a VM every 10 s, after a new report (`Policy` in memfold-rightsize).
const CALM: Duration = Duration::from_secs(7);

/// Smallest change of a size that counts, in KiB. Right-sizing tolerates that a guest reads 512 KiB
/// a second again, so as much as this in two seconds.
const CHANGE_KIB: u64 = 1024;

/// The reports that the daemon asked for; none in the beginning.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    wanted: Option<Wanted>,
}

#[derive(Debug)]
struct Wanted {
    reader: MemoryReader,
    interval: Duration,
    due: Instant,
    last: Option<LastReport>,
}

/// The last report that was not left out.
#[derive(Debug)]
struct LastReport {
    at: Instant,
    reading: MemoryReading,
    /// Whether the guest's memory had not changed since the report before.
    is_calm: bool,
}

impl Reports {
    /// Sets the interval of the reports, in milliseconds; 0 ends them. The first is due at once.
    pub(crate) fn set_interval(&mut self, interval_ms: u32) {
        let interval = Duration::from_millis(interval_ms.into());
        self.wanted = (interval_ms > 0).then(|| Wanted::new(Path::new("/"), interval));
    }

    /// Returns when the next report is due; `None` if the daemon wants none.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.wanted.as_ref().map(|wanted| wanted.due)
    }

    /// Returns a report if one is due now and is not left out.
    pub(crate) fn next(&mut self) -> Option<FromAgent> {
        let now = Instant::now();
        let wanted = self.wanted.as_mut().filter(|wanted| wanted.due <= now)?;
        wanted.due = now + wanted.interval;
        let reading = wanted.report(now)?;
        Some(FromAgent::Memory(Box::new(reading)))
    }
}

impl Wanted {
    fn new(root: &Path, interval: Duration) -> Self {
        Self {
            reader: MemoryReader::new(root),
            interval,
            due: Instant::now(),
            last: None,
        }
    }

    /// Returns the report that is due at `now`; `None` if it is left out.
    fn report(&mut self, now: Instant) -> Option<MemoryReading> {
        let mut reading = self.reader.read_sizes();
        let last = self.last.as_ref();
        let is_same = last.is_some_and(|last| !is_changed(&last.reading, &reading));
        let may_wait =
            last.is_some_and(|last| last.is_calm && now + self.interval <= last.at + CALM);
        if is_same && may_wait {
            return None;
        }
        self.reader.complete(&mut reading);
        let is_calm = is_same && last.is_some_and(|last| !has_counted(&last.reading, &reading));
        self.last = Some(LastReport {
            at: now,
            reading: reading.clone(),
            is_calm,
        });
        Some(reading)
    }
}

/// Returns whether sizes or pressure have changed between two readings. A guest without PSI always
/// counts as changed: its sizes do not show that it reclaims memory and reads it again, but its
/// pressure would (`balance_pgdat` in the kernel's `mm/vmscan.c`).
fn is_changed(before: &MemoryReading, now: &MemoryReading) -> bool {
    let sizes: [fn(&MemoryReading) -> u64; 9] = [
        |of| of.mem_total_kib,
        |of| of.mem_free_kib,
        |of| of.mem_available_kib,
        |of| of.dirty_kib,
        |of| of.anon_pages_kib,
        |of| of.cached_kib,
        |of| of.shmem_kib,
        |of| of.swap_total_kib,
        |of| of.swap_free_kib,
    ];
    let has_moved =
        |size: fn(&MemoryReading) -> u64| size(before).abs_diff(size(now)) >= CHANGE_KIB;
    let totals = before.pressure.zip(now.pressure);
    let waits = totals.is_none_or(|(before, now)| before.some_us != now.some_us);
    waits || sizes.into_iter().any(has_moved)
}

/// Returns whether a counter has changed between two readings.
fn has_counted(before: &MemoryReading, now: &MemoryReading) -> bool {
    let counters: [fn(&MemoryReading) -> u64; 10] = [
        |of| of.workingset_refault_file,
        |of| of.workingset_refault_anon,
        |of| of.workingset_activate_file,
        |of| of.workingset_activate_anon,
        |of| of.pgscan,
        |of| of.pgsteal,
        |of| of.pswpin,
        |of| of.pswpout,
        |of| of.allocstall,
        |of| of.oom_kill,
    ];
    counters
        .into_iter()
        .any(|count| count(before) != count(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::fs;

    /// A guest of whose memory a report is due every two seconds.
    struct Guest {
        root: tempfile::TempDir,
        wanted: Wanted,
        now: Instant,
    }

    impl Guest {
        fn new(has_psi: bool) -> Self {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir_all(root.path().join("proc/pressure")).unwrap();
            for file in ["meminfo", "vmstat", "pressure/memory"] {
                if has_psi || file != "pressure/memory" {
                    fs::write(root.path().join("proc").join(file), "").unwrap();
                }
            }
            let guest = Self {
                wanted: Wanted::new(root.path(), Duration::from_secs(2)),
                root,
                now: Instant::now(),
            };
            guest.has(100_000, 0);
            if has_psi {
                guest.has_waited(7);
            }
            guest
        }

        fn write(&self, file: &str, text: &str) {
            fs::write(self.root.path().join(file), text).unwrap();
        }

        /// Sets the anonymous memory, and the number of pages that were read again.
        fn has(&self, anon_kib: u64, refaults: u64) {
            let meminfo = format!("MemTotal: 500000 kB\nAnonPages: {anon_kib} kB\n");
            self.write("proc/meminfo", &meminfo);
            let vmstat = format!("workingset_refault_file {refaults}\noom_kill 0\n");
            self.write("proc/vmstat", &vmstat);
        }

        /// Sets the total time in which tasks waited for memory.
        fn has_waited(&self, some_us: u64) {
            let text = format!("some avg10=0.00 total={some_us}\nfull avg10=0.00 total=0\n");
            self.write("proc/pressure/memory", &text);
        }

        /// Says of the next `count` reports whether each is sent.
        fn sends(&mut self, count: usize) -> Vec<bool> {
            let mut sent = Vec::new();
            for _ in 0..count {
                sent.push(self.wanted.report(self.now).is_some());
                // The agent wakes up a little late.
                self.now += self.wanted.interval + Duration::from_millis(20);
            }
            sent
        }
    }

    #[test]
    fn while_the_memory_of_a_guest_does_not_change_two_of_three_reports_are_left_out() {
        let mut guest = Guest::new(true);
        let expected = [true, true, false, false, true, false, false, true];
        assert_eq!(guest.sends(8), expected);
        // The daemon waits no longer than it has said.
        guest.wanted.interval = Duration::from_secs(10);
        assert_eq!(guest.sends(3), [true; 3]);
    }

    #[test]
    fn a_change_of_a_size_by_a_mebibyte_or_any_pressure_is_reported_at_once_and_when_it_is_over() {
        let mut guest = Guest::new(true);
        assert_eq!(guest.sends(2), [true, true]);
        guest.has(101_023, 0);
        assert_eq!(guest.sends(1), [false]);
        guest.has(101_024, 0);
        assert_eq!(guest.sends(3), [true, true, false]);
        guest.has_waited(8);
        assert_eq!(guest.sends(3), [true, true, false]);
    }

    #[test]
    fn a_report_with_changed_counters_is_followed_by_another_one() {
        let mut guest = Guest::new(true);
        assert_eq!(guest.sends(2), [true, true]);
        guest.has(100_000, 5);
        assert_eq!(guest.sends(5), [false, false, true, true, false]);
    }

    #[test]
    fn a_guest_without_psi_sends_every_report() {
        let mut guest = Guest::new(false);
        assert_eq!(guest.sends(5), [true; 5]);
    }

    #[test]
    fn memory_figures_are_reported_only_while_the_daemon_wants_them() {
        let mut reports = Reports::default();
        assert!(reports.due().is_none() && reports.next().is_none());
        reports.set_interval(7_200_000);
        assert!(matches!(reports.next(), Some(FromAgent::Memory(_))));
        assert!(reports.next().is_none(), "the next is due in two hours");
        assert!(reports.due().unwrap() > Instant::now() + Duration::from_secs(3_599));
        reports.set_interval(0);
        assert!(reports.due().is_none() && reports.next().is_none());
    }
}
