//! Carries out the daemon's orders to trim the guest's page cache: reclaims in small steps, looks
//! between them whether the guest misses what was taken, and ends then.
//!
//! ```text
//!   order --> [allowed?] --> groups --> step --> pause --> pressure, refaults, time --> step ...
//! ```
//! The kernel chooses the pages: clean pages of files that were not used for longest. It cannot be
//! told to spare some files, so files whose pages are shared between VMs are not spared either
//! (docs/operating/guest-memory.md).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use memfold_wire::agent::FromAgent;
use memfold_wire::memory::{MemoryReading, TrimEnd, TrimMethod, TrimOrder, TrimResult};

use super::groups::{Groups, Step};
use super::reader::MemoryReader;
use crate::commands::Outbox;

/// Root of the control groups.
const GROUPS: &str = "/sys/fs/cgroup";

/// Smallest and largest step, in bytes. In between, a step is a 32nd of the order.
const STEP: (u64, u64) = (4 << 20, 32 << 20);

/// Pause after each step, in which the guest can show that it misses what was taken.
const PAUSE: Duration = Duration::from_millis(50);

/// Pages that the guest may read again without ending the trim: this many, and
/// 1/[`MISSED_PART`] of what was taken.
const MISSED_PAGES: u64 = 256;
/// See [`MISSED_PAGES`].
const MISSED_PART: u64 = 16;

/// The kernel adds up its pressure totals only every two seconds (`PSI_FREQ` in
/// `kernel/sched/psi.c`), so a difference covers at least this time.
const PSI_PERIOD: Duration = Duration::from_secs(2);

/// Trims the guest's page cache, in a thread of its own for each order.
#[derive(Debug, Default)]
pub(crate) struct Trimmer {
    /// Number of orders so far: a thread whose number is smaller ends.
    newest: Arc<AtomicU32>,
}

impl Trimmer {
    /// Begins to carry out `order`, and ends an earlier one. The answer goes to `outbox`.
    /// `is_allowed`: whether the guest's owner allows trimming.
    pub(crate) fn start(&self, order: TrimOrder, is_allowed: bool, outbox: Outbox) {
        let turn = self.newest.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        let newest = Arc::clone(&self.newest);
        let trim = Trim {
            order,
            is_allowed,
            groups: PathBuf::from(GROUPS),
        };
        let failed = outbox.clone();
        let spawned = std::thread::Builder::new()
            .name("trim".into())
            .stack_size(128 << 10)
            .spawn(move || {
                let mut watch = Watch::new(order.max_some);
                let result = trim.run(&mut watch, &|| newest.load(Ordering::SeqCst) != turn);
                outbox.send(FromAgent::Trimmed(result));
            });
        if let Err(e) = spawned {
            let end = TrimEnd::Failed(e.raw_os_error().unwrap_or(0));
            failed.try_send(FromAgent::Trimmed(result_of(order, end)));
        }
    }

    /// Ends the trim that runs, if one does.
    pub(crate) fn stop(&self) {
        self.newest.fetch_add(1, Ordering::SeqCst);
    }
}

const fn result_of(order: TrimOrder, end: TrimEnd) -> TrimResult {
    TrimResult {
        order: order.order,
        reclaimed_bytes: 0,
        refaults: 0,
        steps: 0,
        method: TrimMethod::None,
        end,
    }
}

/// Watches whether the guest misses memory.
trait Symptoms {
    /// Returns whether the guest has swap space.
    fn has_swap(&self) -> bool;
    /// Returns why the trim must end; `None` if the guest does not miss the `taken` bytes.
    fn why_end(&mut self, taken: u64) -> Option<TrimEnd>;
    /// Returns how many pages of files the guest has read again since the trim began.
    fn refaults(&self) -> u64;
}

/// One order that is being carried out.
struct Trim {
    order: TrimOrder,
    is_allowed: bool,
    groups: PathBuf,
}

impl Trim {
    fn run(&self, symptoms: &mut impl Symptoms, is_replaced: &dyn Fn() -> bool) -> TrimResult {
        let order = self.order;
        if order.bytes == 0 {
            return result_of(order, TrimEnd::Done);
        }
        if !self.is_allowed {
            return result_of(order, TrimEnd::Forbidden);
        }
        let may_swap = !order.spare_swap || !symptoms.has_swap();
        let mut groups = match Groups::open(&self.groups, may_swap) {
            Ok(Some(groups)) => groups,
            Ok(None) => return result_of(order, TrimEnd::Unsupported),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return result_of(order, TrimEnd::Unsupported);
            }
            Err(e) => {
                let end = TrimEnd::Failed(e.raw_os_error().unwrap_or(0));
                return result_of(order, end);
            }
        };
        let until = Instant::now() + Duration::from_millis(order.deadline_ms.into());
        let mut result = TrimResult {
            method: TrimMethod::MemoryReclaim,
            ..result_of(order, TrimEnd::Done)
        };
        result.end = loop {
            let taken = result.reclaimed_bytes;
            if taken >= order.bytes {
                break TrimEnd::Done;
            }
            if is_replaced() {
                break TrimEnd::Replaced;
            }
            if Instant::now() >= until {
                break TrimEnd::Deadline;
            }
            let step = (order.bytes / 32).clamp(STEP.0, STEP.1);
            match groups.step(step.min(order.bytes - taken)) {
                Ok(Step::Reclaimed(bytes)) => result.reclaimed_bytes += bytes,
                Ok(Step::Exhausted) => break TrimEnd::Exhausted,
                Err(e) => break TrimEnd::Failed(e.raw_os_error().unwrap_or(0)),
            }
            result.steps = result.steps.saturating_add(1);
            std::thread::sleep(PAUSE.min(until.saturating_duration_since(Instant::now())));
            if let Some(end) = symptoms.why_end(result.reclaimed_bytes) {
                break end;
            }
        };
        result.refaults = symptoms.refaults();
        result
    }
}

/// Watches the guest's pressure and refaults.
struct Watch {
    reader: MemoryReader,
    max_some: u16,
    /// Refaults when the trim began, and now.
    refaults: (u64, u64),
    /// Pressure total that was last seen to change, and when.
    some: Option<(u64, Instant)>,
    has_swap: bool,
}

impl Watch {
    fn new(max_some: u16) -> Self {
        let mut reader = MemoryReader::new(Path::new("/"));
        let now = reader.read_fast_figures();
        let refaults = now.workingset_refault_file;
        let some = now.pressure.map(|pressure| pressure.some_us);
        Self {
            reader,
            max_some,
            refaults: (refaults, refaults),
            some: some.map(|us| (us, Instant::now())),
            has_swap: now.swap_total_kib > 0,
        }
    }

    fn look(&mut self, now: &MemoryReading, at: Instant, taken: u64) -> Option<TrimEnd> {
        self.refaults.1 = now.workingset_refault_file.max(self.refaults.0);
        let allowed = MISSED_PAGES + taken / memfold_units::PAGE_SIZE / MISSED_PART;
        if self.refaults() > allowed {
            return Some(TrimEnd::Refaults);
        }
        let (some_us, (before_us, since)) = (now.pressure?.some_us, self.some?);
        if some_us == before_us {
            return None;
        }
        self.some = Some((some_us, at));
        let period = at.saturating_duration_since(since).max(PSI_PERIOD);
        let waited = Duration::from_micros(some_us.saturating_sub(before_us));
        let share = waited.as_secs_f64() / period.as_secs_f64() * 1e4;
        (share > f64::from(self.max_some)).then_some(TrimEnd::Pressure)
    }
}

impl Symptoms for Watch {
    fn has_swap(&self) -> bool {
        self.has_swap
    }

    fn why_end(&mut self, taken: u64) -> Option<TrimEnd> {
        let now = self.reader.read_fast_figures();
        self.look(&now, Instant::now(), taken)
    }

    fn refaults(&self) -> u64 {
        self.refaults.1 - self.refaults.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_wire::memory::Pressure;
    use std::fs;

    /// A guest that misses its memory after this many looks.
    struct Misses(u32);

    impl Symptoms for Misses {
        fn has_swap(&self) -> bool {
            true
        }
        fn why_end(&mut self, _: u64) -> Option<TrimEnd> {
            self.0 = self.0.saturating_sub(1);
            (self.0 == 0).then_some(TrimEnd::Refaults)
        }
        fn refaults(&self) -> u64 {
            7
        }
    }

    fn trim(root: &Path, bytes: u64) -> Trim {
        let group = root.join("groups/system.slice");
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("memory.reclaim"), "").unwrap();
        fs::write(
            group.join("memory.stat"),
            "inactive_file 1073741824\npgsteal 5\n",
        )
        .unwrap();
        Trim {
            order: TrimOrder {
                order: 3,
                bytes,
                max_some: 100,
                deadline_ms: 300,
                spare_swap: true,
            },
            is_allowed: true,
            groups: root.join("groups"),
        }
    }

    #[test]
    fn a_trim_ends_when_the_guest_misses_memory_when_time_is_over_or_when_another_order_comes() {
        let root = tempfile::tempdir().unwrap();
        let mut trim = trim(root.path(), 1 << 30);
        let late = trim.run(&mut Misses(1000), &|| false);
        assert_eq!(late.end, TrimEnd::Deadline);
        assert!(late.steps < 10, "{late:?}");
        trim.order.deadline_ms = 60_000;
        let missed = trim.run(&mut Misses(2), &|| false);
        assert_eq!((missed.end, missed.steps), (TrimEnd::Refaults, 2));
        assert_eq!((missed.order, missed.refaults), (3, 7));
        assert_eq!(missed.method, TrimMethod::MemoryReclaim);
        // A step is a 32nd of the order.
        let asked = fs::read_to_string(root.path().join("groups/system.slice/memory.reclaim"));
        assert_eq!(asked.unwrap(), "33554432 swappiness=0");
        let replaced = trim.run(&mut Misses(1000), &|| true);
        assert_eq!((replaced.end, replaced.steps), (TrimEnd::Replaced, 0));
    }

    #[test]
    fn nothing_is_trimmed_if_the_guest_s_owner_forbids_it_or_the_kernel_cannot() {
        let root = tempfile::tempdir().unwrap();
        let mut trim = trim(root.path(), 1 << 20);
        trim.is_allowed = false;
        let forbidden = trim.run(&mut Misses(1), &|| false);
        assert_eq!((forbidden.end, forbidden.steps), (TrimEnd::Forbidden, 0));
        let reclaim = root.path().join("groups/system.slice/memory.reclaim");
        assert_eq!(fs::read(reclaim).unwrap(), b"");
        trim.is_allowed = true;
        trim.groups = root.path().join("none");
        let unsupported = trim.run(&mut Misses(1), &|| false);
        assert_eq!(unsupported.end, TrimEnd::Unsupported);
        trim.order.bytes = 0;
        assert_eq!(trim.run(&mut Misses(1), &|| false).end, TrimEnd::Done);
    }

    #[test]
    fn refaults_or_pressure_above_what_the_order_allows_end_a_trim() {
        let begin = Instant::now();
        let mut watch = Watch::new(500);
        watch.refaults = (1000, 1000);
        watch.some = Some((50_000, begin));
        let reading = |refaults, some_us| MemoryReading {
            workingset_refault_file: refaults,
            pressure: Some(Pressure {
                some_us,
                ..Pressure::default()
            }),
            ..MemoryReading::default()
        };
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mib = 1 << 20;
        assert_eq!(watch.look(&reading(1256, 50_000), at(1), 0), None);
        let end = watch.look(&reading(1257, 50_000), at(1), 0);
        assert_eq!(end, Some(TrimEnd::Refaults));
        // 64 MiB were taken, 4 MiB of them may come back.
        assert_eq!(watch.look(&reading(2000, 50_000), at(1), 64 * mib), None);
        // 5 % of two seconds: the kernel's total stands still in between.
        assert_eq!(watch.look(&reading(2000, 150_000), at(2), 64 * mib), None);
        assert_eq!(watch.look(&reading(2000, 150_000), at(4), 64 * mib), None);
        let end = watch.look(&reading(2000, 400_000), at(4), 64 * mib);
        assert_eq!(end, Some(TrimEnd::Pressure));
        // A kernel without PSI shows refaults only.
        let mut none = reading(2000, 0);
        none.pressure = None;
        assert_eq!(watch.look(&none, at(9), 64 * mib), None);
    }
}
