//! The copy-on-write debt: memory that guests can claim at any time by writing to shared pages.
//! This module compares the debt with the host's available memory, and decides whether a VM may be
//! started.
//!
//! The [`brake`] keeps these figures up to date.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use memfold_fold::{Owed, VmOwed};
use memfold_host::Group;
use memfold_ledger::read::{Proc, ReadError};
use memfold_ledger::{Brake, BrakeEvent, BrakePolicy, DebtReport, Level, Look, VmDebt};
use memfold_rightsize::Rung;
use memfold_units::{ByteSize, PageCount};
use parking_lot::{Mutex, MutexGuard};

use crate::error::{DaemonError, refused};
use crate::threads::unix_time;

pub(crate) mod brake;

/// Longest time between two reads of the kernel's page tables at the brake's level `ok`. The next
/// constant is that time at the brake's higher levels.
const LONGEST: Duration = Duration::from_secs(30);
const LONGEST_IN_NEED: Duration = Duration::from_secs(5);

/// A fall of `MemAvailable` by this many bytes causes a read of the page tables: guests may be
/// claiming debt.
const FELL: u64 = 32 << 20;

/// Divisor: reading the page tables may take at most 1/`LOOK_SHARE` of the time.
const LOOK_SHARE: u32 = 20;

/// Longest time between two reads of the VMs' control groups while no VM comes or goes. Another
/// program may move a QEMU to another group at any time.
const SAME_GROUPS: Duration = Duration::from_secs(10);

/// Time for which the snapshot image of a VM that was just started counts as debt, unless the page
/// tables show the image earlier.
const STARTING: Duration = Duration::from_secs(30);

/// Number of the brake's most recent events that are kept.
const EVENTS: usize = 32;

/// State of the copy-on-write debt. The brake and the code that starts VMs share this state.
#[derive(Debug)]
pub(crate) struct DebtWatch(Mutex<State>);

#[derive(Debug)]
struct State {
    policy: BrakePolicy,
    /// Control groups that contain all VMs and limit their memory.
    groups: Vec<Group>,
    /// When `groups` were last read, and of which QEMU processes; `None`: not yet.
    grouped: Option<(Instant, Vec<i32>)>,
    brake: Brake,
    /// Whether folding and KSM are stopped: from level `Braked` until level `Ok`. Both stay stopped
    /// at `Warning`, because their sharing would soon exceed the limit again.
    held: bool,
    began: Instant,
    owed: Owed,
    ksm_pages: u64,
    given_back_pages: u64,
    /// Last read of the page tables: when the read ended, how long it took, how much memory was
    /// available (bytes), and names of the VMs that ran.
    looked: Option<(Instant, Duration, u64, Vec<String>)>,
    /// Question to the fold engine that the engine has not answered yet.
    pending: Option<Question>,
    /// VMs that are being started, by name: bytes of the snapshot image that the VM runs from, and
    /// since when the VM runs (`None`: not yet).
    starting: BTreeMap<String, (u64, Option<Instant>)>,
    /// Time at which each guest was last asked to drop page cache, by VM name.
    asked: BTreeMap<String, Instant>,
    relieving: bool,
    events: VecDeque<BrakeEvent>,
    /// Where the host is on right-sizing's ladder; `None`: right-sizing is off.
    rung: Option<LadderNote>,
}

/// Where the host is on right-sizing's ladder.
#[derive(Clone, Debug)]
pub(crate) struct LadderNote {
    pub rung: Rung,
    /// Why the host is there, as a sentence.
    pub why: String,
    /// Right-sizing acts, and does not only say what it would do.
    pub is_on: bool,
}

/// A question to the fold engine about the debt.
#[derive(Debug)]
struct Question {
    answered: Receiver<Owed>,
    asked: Instant,
    /// Available memory in bytes, and names of the VMs, at the time of the question; `None` if the
    /// engine need not read page tables for the answer.
    looks: Option<(u64, Vec<String>)>,
}

impl DebtWatch {
    pub fn new(policy: BrakePolicy) -> Self {
        Self(Mutex::new(State {
            policy,
            groups: Group::of_vms(Vec::new()),
            grouped: None,
            brake: Brake::default(),
            held: false,
            began: Instant::now(),
            owed: Owed::default(),
            ksm_pages: 0,
            given_back_pages: 0,
            looked: None,
            pending: None,
            starting: BTreeMap::new(),
            asked: BTreeMap::new(),
            relieving: false,
            events: VecDeque::new(),
            rung: None,
        }))
    }

    /// Notes the rung of right-sizing's ladder, and why the host is on it.
    pub fn note_rung(&self, rung: Option<LadderNote>) {
        self.lock().rung = rung;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Admits the start of a VM whose snapshot image adds `brings` bytes of debt. These bytes count
    /// as debt from now on.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Braked`] if the brake is on or these bytes would put it on, unless `despite`
    /// is set; [`DaemonError::Refused`] while another VM of this name is being restored.
    pub fn admit(&self, vm: &str, brings: u64, despite: bool) -> Result<Admitted<'_>, DaemonError> {
        let memory = self.memory()?;
        let mut state = self.lock();
        let mut report = state.report(memory);
        report.debt_bytes += brings;
        report.needed_bytes = state.policy.needed_bytes(report.debt_bytes);
        let strain = state.policy.strain(&state.look(&report, memory));
        if despite || report.level < Level::Braked && strain <= 1.0 {
            let noted = (brings > 0).then(|| vm.to_owned());
            if let Some(vm) = &noted {
                // The end of this restore would remove the other one's bytes.
                let other = state.starting.get(vm);
                if other.is_some_and(|(_, since)| since.is_none()) {
                    return Err(refused(
                        format!("'{vm}' is being restored already"),
                        "choose another --name, or wait until that restore has ended",
                    ));
                }
                // A restore may take minutes, so `STARTING` counts from the end of the restore.
                state.starting.insert(vm.clone(), (brings, None));
            }
            return Ok(Admitted { debt: self, noted });
        }
        let with = if brings > 0 {
            format!(", with the {} of its snapshot", ByteSize(brings))
        } else {
            String::new()
        };
        Err(DaemonError::Braked {
            what: format!("'{vm}' is not started{with}"),
            why: words(&report),
        })
    }

    /// Reports the debt of the last read of the page tables, and the memory that is available now.
    pub fn report_now(&self) -> Result<DebtReport, DaemonError> {
        let memory = self.memory()?;
        Ok(self.lock().report(memory))
    }

    /// Returns why the brake has stopped folding and KSM; `None` while folding and KSM may share
    /// pages.
    pub fn braked(&self) -> Result<Option<String>, DaemonError> {
        let memory = self.memory()?;
        Ok(why(&self.lock().report(memory)))
    }

    /// Reads how much memory is available to the VMs.
    fn memory(&self) -> Result<Memory, ReadError> {
        let groups = self.lock().groups.clone();
        Memory::now(&groups)
    }

    /// Finds the control groups that limit all VMs, by `find`; `pids`: QEMU processes. Called each
    /// second. `find` reads a file of each process, so it is called only if VMs have come or gone,
    /// and every [`SAME_GROUPS`].
    fn find_groups(&self, pids: Vec<i32>, find: impl FnOnce(Vec<i32>) -> Vec<Group>) {
        let is_same = |(at, of): &(Instant, Vec<i32>)| at.elapsed() < SAME_GROUPS && *of == pids;
        if self.lock().grouped.as_ref().is_some_and(is_same) {
            return;
        }
        let groups = find(pids.clone());
        let mut state = self.lock();
        state.groups = groups;
        state.grouped = Some((Instant::now(), pids));
    }
}

/// Memory of the host, or of the control group with the least available memory, in bytes.
#[derive(Clone, Copy, Debug)]
struct Memory {
    total: u64,
    available: u64,
    swap_free: u64,
    /// Index of the control group that limits `available`; `None` if only the host's memory limits
    /// it.
    limited_by: Option<usize>,
}

impl Memory {
    /// Reads `/proc/meminfo` and applies the narrowest limit of `groups`.
    fn now(groups: &[Group]) -> Result<Self, ReadError> {
        let info = Proc::default().meminfo()?;
        let field = |name: &str| info.get(name).map_or(0, |bytes| bytes.0);
        let mut memory = Self {
            total: field("MemTotal"),
            available: field("MemAvailable"),
            swap_free: field("SwapFree"),
            limited_by: None,
        };
        for (number, group) in groups.iter().enumerate() {
            let Some(room) = group.room() else { continue };
            memory.total = memory.total.min(room.limit);
            if room.available < memory.available {
                memory.available = room.available;
                memory.limited_by = Some(number);
            }
        }
        Ok(memory)
    }
}

impl State {
    /// Returns whether the fold engine should read the kernel's page tables before it answers.
    fn look_due(&self, available: u64, vms: &[String]) -> bool {
        let Some((at, cost, then, of)) = &self.looked else {
            return true;
        };
        let longest = if self.brake.level() == Level::Ok {
            LONGEST
        } else {
            LONGEST_IN_NEED
        };
        let wanted = at.elapsed() >= longest || available + FELL <= *then || of != vms;
        wanted && at.elapsed() >= *cost * LOOK_SHARE
    }

    /// Reports the debt, the available memory and the level of the brake.
    fn report(&self, memory: Memory) -> DebtReport {
        let bytes = |pages: u64| PageCount(pages).bytes().0;
        let debt = |vm: &VmOwed| VmDebt {
            name: vm.name.clone(),
            folded_bytes: bytes(vm.folded_pages),
            snapshot_bytes: bytes(vm.snapshot_pages),
            zero_bytes: bytes(vm.zero_pages),
        };
        let vms: Vec<VmDebt> = self.owed.vms.iter().map(debt).collect();
        let sum = |of: fn(&VmDebt) -> u64| vms.iter().map(of).sum::<u64>();
        let limits = memory.limited_by.and_then(|number| self.groups.get(number));
        let mut report = DebtReport {
            folded_bytes: sum(|vm| vm.folded_bytes),
            snapshot_bytes: sum(|vm| vm.snapshot_bytes),
            zero_bytes: sum(|vm| vm.zero_bytes),
            ksm_bytes: bytes(self.ksm_pages),
            starting_bytes: self.starting.values().map(|(bytes, _)| bytes).sum(),
            store_bytes: self.owed.store_bytes,
            cover_percent: self.policy.cover_percent,
            mem_available_bytes: memory.available,
            mem_total_bytes: memory.total,
            limited_by: limits.map(|group| group.directory().display().to_string()),
            reserve_bytes: self.policy.reserve.of(memory.total),
            swap_free_bytes: memory.swap_free,
            given_back_bytes: bytes(self.given_back_pages),
            vms,
            events: self.events.iter().cloned().collect(),
            rung: self.rung.as_ref().map(|of| of.rung.name().to_owned()),
            rung_why: self.rung.as_ref().map(|of| of.why.clone()),
            ..DebtReport::default()
        };
        report.debt_bytes = report.folded_bytes
            + report.snapshot_bytes
            + report.zero_bytes
            + report.ksm_bytes
            + report.starting_bytes;
        let look = self.look(&report, memory);
        report.needed_bytes = self.policy.needed_bytes(report.debt_bytes);
        report.absorbable_bytes = self.policy.absorbable_bytes(&look);
        report.level = self.brake.level();
        report.sharing_held = self.held;
        report.why = words(&report);
        report
    }

    fn look(&self, report: &DebtReport, memory: Memory) -> Look {
        Look {
            at: self.began.elapsed(),
            debt_bytes: report.debt_bytes,
            total_bytes: memory.total,
            available_bytes: memory.available,
        }
    }

    /// Removes VMs from `starting` if the page tables now show their snapshot image, or if they
    /// started over [`STARTING`] ago.
    fn keep_starting(&mut self, owed: &Owed) {
        self.starting.retain(|name, (_, since)| {
            let seen = |vm: &VmOwed| vm.name == *name && vm.snapshot_pages > 0;
            since.is_none_or(|at| at.elapsed() < STARTING) && !owed.vms.iter().any(seen)
        });
    }

    fn note(&mut self, report: &DebtReport, what: String) {
        if self.events.len() == EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(BrakeEvent {
            at_unix_s: unix_time().as_millis() as f64 / 1e3,
            level: self.brake.level(),
            mem_available_bytes: report.mem_available_bytes,
            debt_bytes: report.debt_bytes,
            what,
        });
    }
}

/// Permission to start a VM. If the permission is dropped before [`Admitted::started`], the VM's
/// debt is removed.
#[must_use]
pub(crate) struct Admitted<'a> {
    debt: &'a DebtWatch,
    noted: Option<String>,
}

impl Admitted<'_> {
    /// Records that the VM runs. Its snapshot image counts as debt until the page tables show the
    /// image, but no longer than [`STARTING`].
    pub fn started(mut self) {
        if let Some(vm) = self.noted.take() {
            if let Some((_, since)) = self.debt.lock().starting.get_mut(&vm) {
                *since = Some(Instant::now());
            }
        }
    }
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        if let Some(vm) = &self.noted {
            self.debt.lock().starting.remove(vm);
        }
    }
}

/// Returns the figures that determine the brake's level, as text.
fn words(report: &DebtReport) -> String {
    let group = report.limited_by.as_ref();
    let group = group.map_or_else(String::new, |path| format!(" in control group {path}"));
    format!(
        "guests could claim {} that they share by writing to it; {} % of that, {}, must be available, but only {} is ({} available{group} less {} in reserve)",
        ByteSize(report.debt_bytes),
        report.cover_percent,
        ByteSize(report.needed_bytes),
        ByteSize(report.absorbable_bytes),
        ByteSize(report.mem_available_bytes),
        ByteSize(report.reserve_bytes),
    )
}

/// Returns why the brake has stopped folding and KSM; `None` while folding and KSM may share pages.
fn why(report: &DebtReport) -> Option<String> {
    report.sharing_held.then(|| report.why.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_ledger::Reserve;
    use memfold_units::PAGE_SIZE;

    fn state() -> State {
        let watch = DebtWatch::new(BrakePolicy {
            reserve: Reserve::Bytes(ByteSize::mib(100)),
            cover_percent: 50.0,
        });
        watch.0.into_inner()
    }

    #[test]
    fn a_second_restore_of_a_name_is_refused_and_the_first_keeps_its_debt() {
        let watch = DebtWatch::new(BrakePolicy {
            reserve: Reserve::Bytes(ByteSize(0)),
            cover_percent: 0.0,
        });
        let starting = || watch.lock().starting.get("v").map(|(bytes, _)| *bytes);
        let first = watch.admit("v", 4096, true).unwrap();
        let second = watch.admit("v", 8192, true).err().unwrap();
        assert_eq!(second.to_string(), "'v' is being restored already");
        assert_eq!(starting(), Some(4096));
        drop(first);
        assert_eq!(starting(), None);
        watch.admit("v", 8192, true).unwrap().started();
        assert_eq!(starting(), Some(8192));
    }

    #[test]
    fn the_debt_is_the_sum_of_folded_snapshot_zero_ksm_and_starting_memory() {
        let mut state = state();
        state.owed.vms = vec![
            VmOwed {
                name: "a".into(),
                folded_pages: 1,
                snapshot_pages: 2,
                zero_pages: 4,
                cached_pages: 99,
            },
            VmOwed {
                name: "b".into(),
                folded_pages: 8,
                ..VmOwed::default()
            },
        ];
        state.owed.store_bytes = 7;
        state.ksm_pages = 16;
        state.starting.insert("c".into(), (32 * PAGE_SIZE, None));
        let report = state.report(Memory {
            total: 0,
            available: 300 << 20,
            swap_free: 5,
            limited_by: None,
        });
        assert_eq!(report.debt_bytes, 63 * PAGE_SIZE);
        assert_eq!(report.needed_bytes, 63 * PAGE_SIZE / 2);
        assert_eq!(report.absorbable_bytes, 200 << 20);
        assert_eq!((report.store_bytes, report.swap_free_bytes), (7, 5));
        assert_eq!(report.vms[0].total_bytes(), 7 * PAGE_SIZE);
        assert!(report.why.contains("only 200 MiB is"), "{}", report.why);
    }

    #[test]
    fn a_starting_vm_counts_as_debt_until_it_is_measured() {
        let mut state = state();
        let long_ago = Instant::now().checked_sub(STARTING);
        assert!(long_ago.is_some(), "this host runs for less than that");
        for (name, since) in [
            ("slow", None),
            ("new", Some(Instant::now())),
            ("old", long_ago),
            ("seen", None),
        ] {
            state.starting.insert(name.into(), (1, since));
        }
        let seen = VmOwed {
            name: "seen".into(),
            snapshot_pages: 1,
            ..VmOwed::default()
        };
        state.keep_starting(&Owed {
            vms: vec![seen],
            ..Owed::default()
        });
        assert!(state.starting.keys().eq(["new", "slow"]));
    }

    #[test]
    fn page_tables_are_read_again_after_vms_changed_unless_the_last_read_took_long() {
        let mut state = state();
        let vms = vec!["a".to_owned()];
        assert!(state.look_due(1 << 30, &vms));
        let looked = |cost| Some((Instant::now(), cost, 1 << 30, vec!["a".to_owned()]));
        state.looked = looked(Duration::ZERO);
        assert!(!state.look_due(1 << 30, &vms));
        assert!(!state.look_due((1 << 30) - FELL + 1, &vms));
        assert!(state.look_due((1 << 30) - FELL, &vms));
        assert!(state.look_due(1 << 30, &[]));
        // After a read that took a second, the next read waits, even if available memory and VMs
        // changed.
        state.looked = looked(Duration::from_secs(1));
        assert!(!state.look_due(0, &[]));
    }

    #[test]
    fn control_groups_are_read_again_when_vms_come_or_go_and_not_each_second() {
        let watch = DebtWatch::new(BrakePolicy::default());
        let mut reads = Vec::new();
        for pids in [&[5][..], &[5, 6], &[5, 6], &[5, 6], &[5, 6, 7], &[5, 6, 7]] {
            watch.find_groups(pids.to_vec(), |pids| {
                reads.push(pids.len());
                Vec::new()
            });
        }
        assert_eq!(reads, [1, 2, 3]);
        let long_ago = Instant::now().checked_sub(SAME_GROUPS).unwrap();
        watch.lock().grouped = Some((long_ago, vec![5, 6, 7]));
        watch.find_groups(vec![5, 6, 7], |pids| {
            reads.push(pids.len());
            Vec::new()
        });
        assert_eq!(reads, [1, 2, 3, 3]);
    }

    #[test]
    fn only_the_newest_debt_events_are_kept() {
        let mut state = state();
        for number in 0..=EVENTS {
            state.note(&DebtReport::default(), number.to_string());
        }
        assert_eq!(state.events.len(), EVENTS);
        assert_eq!(state.events[0].what, "1");
    }
}
