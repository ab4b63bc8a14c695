//! The copy-on-write debt, watched: what guests could call in, what there is for it, and the brake.
//!
//! ```text
//!   each second:  MemAvailable (or what a control group of all VMs leaves), counters of engine and KSM  ->  level
//!     when MemAvailable fell, VMs came or went, or it is long ago: the engine looks at the kernel's tables first
//!     warning:  said, and store pages that nobody needs are given back at once, not every six seconds
//!     braked:   no VM is started, and until the level is ok again folding and KSM make no more debt (what is shared stays shared)
//!     braked, and less than the reserve is left: guests are asked to drop clean page cache, one after the other, until it is there again
//! ```
//! No page map is walked for the look of each second.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use memfold_api::DebtRequest;
use memfold_fold::{Command, Owed, VmOwed};
use memfold_host::Group;
use memfold_ksm as ksm;
use memfold_ledger::read::{Proc, ReadError};
use memfold_ledger::{Brake, BrakeEvent, BrakePolicy, DebtReport, Level, Look, VmDebt};
use memfold_units::{ByteSize, PAGE_SIZE, PageCount};
use tracing::{info, warn};

use super::{Daemon, DaemonError};

/// Time between two looks at counters.
const INTERVAL: Duration = Duration::from_secs(1);

/// Longest time without a look at the kernel's tables; and while a level is reached.
const LONGEST: Duration = Duration::from_secs(30);
const LONGEST_IN_NEED: Duration = Duration::from_secs(5);

/// `MemAvailable` fell by so much: somebody may call debt in.
const FELL: u64 = 32 << 20;

/// A look at the kernel's tables may take one part in so many of the time.
const LOOK_SHARE: u32 = 20;

/// How long the engine may take to answer: it may wait for a library that doesn't.
const ANSWER: Duration = Duration::from_secs(2);

/// The same while a VM does not answer.
const LATE_ANSWER: Duration = Duration::from_millis(100);

/// How long an image counts for a VM that has just been started, if no look finds it.
const STARTING: Duration = Duration::from_secs(30);

/// What is remembered of what was done.
const EVENTS: usize = 32;

/// Has a guest drop page cache that it can read again. Dirty pages stay, and so do inodes and directories (`Documentation/admin-guide/sysctl/vm.rst`).
const DROP_CLEAN: &str = "echo 1 > /proc/sys/vm/drop_caches";

/// How long a guest may take for that, how long it takes until its free pages have been reported, and when it may be asked again.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);
const REPORTED: Duration = Duration::from_secs(4);
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// What the daemon knows of its debt.
#[derive(Debug)]
pub(super) struct DebtWatch(Mutex<State>);

#[derive(Debug)]
struct State {
    policy: BrakePolicy,
    /// Whose limits bind all VMs.
    groups: Vec<Group>,
    brake: Brake,
    /// Folding and KSM make no more debt: from `Braked` until `Ok`. At `Warning` already, what they share would soon be too much again.
    held: bool,
    began: Instant,
    owed: Owed,
    ksm_pages: u64,
    given_back_pages: u64,
    /// When the engine looked last, how long that took, how much was available and which VMs ran then.
    looked: Option<(Instant, Duration, u64, Vec<String>)>,
    /// What the engine was asked and has not answered yet.
    pending: Option<Question>,
    /// VMs that are being started, the images that they will run from, and since when they run.
    starting: BTreeMap<String, (u64, Option<Instant>)>,
    /// When guests were asked to drop page cache.
    asked: BTreeMap<String, Instant>,
    relieving: bool,
    events: VecDeque<BrakeEvent>,
}

/// What the engine was asked.
#[derive(Debug)]
struct Question {
    answered: Receiver<Owed>,
    asked: Instant,
    /// If it looks: what was available and which VMs ran when it was asked.
    looks: Option<(u64, Vec<String>)>,
}

impl DebtWatch {
    pub fn new(policy: BrakePolicy) -> Self {
        Self(Mutex::new(State {
            policy,
            groups: Group::of_vms(Vec::new()),
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
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What there is, as far as it matters here.
#[derive(Clone, Copy, Debug)]
struct Memory {
    total: u64,
    available: u64,
    swap_free: u64,
    /// Which group says so.
    limited_by: Option<usize>,
}

impl Memory {
    /// `/proc/meminfo`, and the narrowest limit of a group.
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
    /// Whether the engine should look at the kernel's tables before it answers.
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

    /// The debt and what there is for it.
    fn report(&self, memory: Memory) -> DebtReport {
        let bytes = |pages: u64| PageCount(pages).bytes().0;
        let vms: Vec<VmDebt> = self
            .owed
            .vms
            .iter()
            .map(|vm| VmDebt {
                name: vm.name.clone(),
                folded_bytes: bytes(vm.folded_pages),
                snapshot_bytes: bytes(vm.snapshot_pages),
                zero_bytes: bytes(vm.zero_pages),
            })
            .collect();
        let sum = |of: fn(&VmDebt) -> u64| vms.iter().map(of).sum::<u64>();
        let mut report = DebtReport {
            folded_bytes: sum(|vm| vm.folded_bytes),
            snapshot_bytes: sum(|vm| vm.snapshot_bytes),
            zero_bytes: sum(|vm| vm.zero_bytes),
            ksm_bytes: bytes(self.ksm_pages),
            starting_bytes: self.starting.values().map(|(bytes, _)| bytes).sum(),
            store_bytes: self.owed.store_bytes,
            cover_percent: self.policy.cover_percent,
            mem_available_bytes: memory.available,
            limited_by: memory
                .limited_by
                .and_then(|number| self.groups.get(number))
                .map(|group| group.directory().display().to_string()),
            reserve_bytes: self.policy.reserve.of(memory.total),
            swap_free_bytes: memory.swap_free,
            given_back_bytes: bytes(self.given_back_pages),
            vms,
            events: self.events.iter().cloned().collect(),
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

    /// Forgets of VMs that were being started what a look has found, or should have.
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
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        self.events.push_back(BrakeEvent {
            at_unix_s: now.map_or(0.0, |now| now.as_millis() as f64 / 1e3),
            level: self.brake.level(),
            mem_available_bytes: report.mem_available_bytes,
            debt_bytes: report.debt_bytes,
            what,
        });
    }
}

/// A VM that may be started. If it isn't, nothing is owed for it.
#[must_use]
pub(super) struct Admitted<'a> {
    daemon: &'a Daemon,
    noted: Option<String>,
}

impl Admitted<'_> {
    /// It runs: what it brings is owed until a look finds it.
    pub fn started(mut self) {
        if let Some(vm) = self.noted.take() {
            if let Some((_, since)) = self.daemon.owing.lock().starting.get_mut(&vm) {
                *since = Some(Instant::now());
            }
        }
    }
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        if let Some(vm) = &self.noted {
            self.daemon.owing.lock().starting.remove(vm);
        }
    }
}

/// The figures that decide.
fn words(report: &DebtReport) -> String {
    let group = report.limited_by.as_ref();
    let group = group.map_or_else(String::new, |path| format!(" in control group {path}"));
    format!(
        "guests could call in {} that they share; {} % of it, {}, is to be there, and {} can be had ({} available{group} less {} in reserve)",
        ByteSize(report.debt_bytes),
        report.cover_percent,
        ByteSize(report.needed_bytes),
        ByteSize(report.absorbable_bytes),
        ByteSize(report.mem_available_bytes),
        ByteSize(report.reserve_bytes),
    )
}

/// Why nothing more may be shared, if so.
fn why(report: &DebtReport) -> Option<String> {
    report.sharing_held.then(|| report.why.clone())
}

/// Pages that KSM saves: those that would each need a place of their own. While it stands still, its counter keeps what ended processes
/// had merged, so that processes are asked; only with `look`.
fn ksm_pages(look: bool, before: u64) -> u64 {
    let controls = ksm::Controls::default();
    let number = |name| controls.number(name).ok().flatten().unwrap_or(0);
    let (sharing, zero) = (number("pages_sharing"), number("ksm_zero_pages"));
    if sharing + zero == 0 || number("run") == 1 {
        return sharing + zero;
    }
    if !look {
        return before.min(sharing + zero);
    }
    let merging = ksm::merging_pages(Path::new("/proc"));
    sharing.min(merging.unwrap_or(sharing)) + zero
}

/// Looks each second, as long as the daemon lives.
pub(super) fn watch(daemon: &Weak<Daemon>) {
    // Told when it begins, not each second.
    let mut told = false;
    while let Some(daemon) = daemon.upgrade() {
        let looked = daemon.look_at_debt();
        if let Some(error) = looked.as_ref().err().filter(|_| !told) {
            warn!(
                error = error as &dyn std::error::Error,
                "what guests could call in can't be found out; tried again each second"
            );
        }
        told = looked.is_err();
        drop(daemon);
        std::thread::sleep(INTERVAL);
    }
}

impl Daemon {
    /// What guests could call in, what there is for it, and what the brake does.
    pub fn debt(self: &Arc<Self>) -> Result<DebtReport, DaemonError> {
        let vms = self.lock().keys().cloned().collect();
        self.ask_owed(false, false, (0, vms))?;
        self.judge(self.memory()?)
    }

    /// Changes reserve and cover, until this daemon ends.
    pub fn set_debt(self: &Arc<Self>, request: &DebtRequest) -> Result<DebtReport, DaemonError> {
        let reserve = request.reserve.as_deref().map(str::parse).transpose();
        let reserve = reserve.map_err(|why| DaemonError::BadRequest(format!("reserve: {why}")))?;
        if let Some(percent) = request.cover_percent.filter(|p| !(0.0..=100.0).contains(p)) {
            return Err(DaemonError::BadRequest(format!(
                "cover_percent is {percent}; give 0 to 100"
            )));
        }
        {
            let mut state = self.owing.lock();
            let policy = &mut state.policy;
            policy.reserve = reserve.unwrap_or(policy.reserve);
            policy.cover_percent = request.cover_percent.unwrap_or(policy.cover_percent);
            info!(reserve = %policy.reserve, cover_percent = policy.cover_percent, "the brake's limits");
        }
        self.debt()
    }

    /// Refuses to start a VM while the brake is on, or if what it would share from the start, `brings` bytes, would put it on; unless it is to be
    /// started `despite` that. What it brings is owed from now on.
    pub(super) fn admit(
        &self,
        vm: &str,
        brings: u64,
        despite: bool,
    ) -> Result<Admitted<'_>, DaemonError> {
        let memory = self.memory()?;
        let mut state = self.owing.lock();
        let mut report = state.report(memory);
        report.debt_bytes += brings;
        report.needed_bytes = state.policy.needed_bytes(report.debt_bytes);
        let strain = state.policy.strain(&state.look(&report, memory));
        if despite || report.level < Level::Braked && strain <= 1.0 {
            let noted = (brings > 0).then(|| vm.to_owned());
            if let Some(vm) = &noted {
                // A restore may take minutes: its time begins with its end.
                state.starting.insert(vm.clone(), (brings, None));
            }
            return Ok(Admitted {
                daemon: self,
                noted,
            });
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

    /// Why nothing more may be shared now, if so.
    pub(super) fn braked(&self) -> Result<Option<String>, DaemonError> {
        let memory = self.memory()?;
        Ok(why(&self.owing.lock().report(memory)))
    }

    /// What there is for the VMs.
    fn memory(&self) -> Result<Memory, ReadError> {
        let groups = self.owing.lock().groups.clone();
        Memory::now(&groups)
    }

    /// VMs come and go.
    fn find_groups(&self) {
        let vms = self.lock();
        let pids = vms.values().map(|vm| vm.pid().as_raw_nonzero().get());
        let pids = pids.collect();
        drop(vms);
        let groups = Group::of_vms(pids);
        self.owing.lock().groups = groups;
    }

    fn look_at_debt(self: &Arc<Self>) -> Result<(), DaemonError> {
        self.find_groups();
        let memory = self.memory()?;
        let vms: Vec<String> = self.lock().keys().cloned().collect();
        let (look, level) = {
            let state = self.owing.lock();
            let look = state.look_due(memory.available, &vms);
            (look, state.brake.level())
        };
        self.ask_owed(look, look && level > Level::Ok, (memory.available, vms))?;
        let before = self.owing.lock().ksm_pages;
        let ksm_pages = ksm_pages(look, before);
        self.owing.lock().ksm_pages = ksm_pages;
        let report = self.judge(self.memory()?)?;
        // Each time: steering may have begun meanwhile.
        self.brake_ksm(why(&report));
        if report.level == Level::Braked && report.mem_available_bytes < report.reserve_bytes {
            self.relieve();
        }
        Ok(())
    }

    /// Has the engine say what guests could call in, and waits for it for a while. One question at a time: a look that takes long is waited for
    /// at the next turn, not asked for again.
    fn ask_owed(
        &self,
        look: bool,
        give_back: bool,
        (available, vms): (u64, Vec<String>),
    ) -> Result<(), DaemonError> {
        let (pending, is_due) = {
            let mut state = self.owing.lock();
            let known = !state.owed.vms.is_empty() || !state.starting.is_empty();
            (state.pending.take(), !vms.is_empty() || known)
        };
        let question = match pending {
            Some(question) => question,
            None if is_due => {
                let (answer, answered) = sync_channel(1);
                self.tell(Command::Owed {
                    look,
                    give_back,
                    answer,
                })?;
                Question {
                    answered,
                    asked: Instant::now(),
                    looks: look.then_some((available, vms)),
                }
            }
            None => return Ok(()),
        };
        let is_late = self.machines().iter().any(|vm| vm.is_silent().is_some());
        let patience = if is_late { LATE_ANSWER } else { ANSWER };
        match question.answered.recv_timeout(patience) {
            Ok(owed) => self.note_owed(owed, question),
            Err(RecvTimeoutError::Timeout) => self.owing.lock().pending = Some(question),
            Err(RecvTimeoutError::Disconnected) => {}
        }
        Ok(())
    }

    fn note_owed(&self, owed: Owed, question: Question) {
        let mut state = self.owing.lock();
        state.given_back_pages += owed.given_back_pages;
        state.keep_starting(&owed);
        state.owed = owed;
        if let Some((available, vms)) = question.looks {
            state.looked = Some((Instant::now(), question.asked.elapsed(), available, vms));
        }
    }

    /// Finds the level, and does what follows when it is another.
    fn judge(self: &Arc<Self>, memory: Memory) -> Result<DebtReport, DaemonError> {
        let mut state = self.owing.lock();
        let before = state.brake.level();
        let look = state.look(&state.report(memory), memory);
        let policy = state.policy;
        let level = state.brake.judge(&policy, &look);
        let owed = policy.needed_bytes(look.debt_bytes);
        self.lending.owed.store(owed, Ordering::Relaxed);
        let report = state.report(memory);
        if level == before {
            return Ok(report);
        }
        let was_held = state.held;
        state.held = level == Level::Braked || was_held && level != Level::Ok;
        let follows = match level {
            Level::Braked => {
                "; folding and KSM make no more debt, and no VM is started; what is shared stays shared"
            }
            Level::Warning if was_held => {
                "; VMs may be started, folding and KSM wait until it is ok"
            }
            Level::Ok if was_held => "; folding and KSM go on, and VMs may be started",
            _ => "",
        };
        let what = format!("{before} -> {level}: {}{follows}", report.why);
        if level == Level::Ok {
            info!("debt: {what}");
        } else {
            warn!("debt: {what}");
        }
        state.note(&report, what);
        let report = state.report(memory);
        if state.held != was_held {
            // Still locked, so that two changes reach the engine in their order; it doesn't ask for this lock.
            self.tell(Command::SetBraked(why(&report)))?;
        }
        Ok(report)
    }

    /// Asks guests for clean page cache, beside everything else, until the reserve is whole again.
    fn relieve(self: &Arc<Self>) {
        {
            let mut state = self.owing.lock();
            if state.relieving {
                return;
            }
            state.relieving = true;
        }
        let daemon = self.clone();
        let work = move || {
            let done = daemon.ask_guests();
            daemon.owing.lock().relieving = false;
            if let Err(error) = done {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "guests were not asked for page cache"
                );
            }
        };
        if let Err(error) = std::thread::Builder::new()
            .name("relieve".into())
            .spawn(work)
        {
            self.owing.lock().relieving = false;
            warn!(%error, "no thread to ask guests for page cache");
        }
    }

    fn ask_guests(self: &Arc<Self>) -> Result<(), DaemonError> {
        let mut vms = self.owing.lock().owed.vms.clone();
        vms.sort_by_key(|vm| std::cmp::Reverse(vm.cached_pages));
        for vm in vms {
            let memory = self.memory()?;
            if memory.available >= self.owing.lock().policy.reserve.of(memory.total) {
                break;
            }
            let asked = self.owing.lock().asked.get(&vm.name).copied();
            let Ok(machine) = self.machine(&vm.name) else {
                continue;
            };
            // Without free page reporting the host would not get it.
            let reports = machine.vm().spec().is_some_and(|spec| spec.balloon);
            if !reports || asked.is_some_and(|at| at.elapsed() < ASK_AGAIN) {
                continue;
            }
            // Not while it is being saved, with its cache.
            let Some(_saving) = machine.try_save() else {
                continue;
            };
            let now = Instant::now();
            self.owing.lock().asked.insert(vm.name.clone(), now);
            if !machine
                .run(DROP_CLEAN, DROP_TIMEOUT)
                .is_ok_and(|done| done.code == 0)
            {
                continue;
            }
            std::thread::sleep(REPORTED);
            let after = self.memory()?;
            let what = format!(
                "less than the reserve was left: the guest of '{}' dropped its clean page cache ({} known of); what is available changed by {:+} MiB in {:.0} s, by whatever else went on, too",
                vm.name,
                ByteSize(vm.cached_pages * PAGE_SIZE),
                (i128::from(after.available) - i128::from(memory.available)) / (1 << 20),
                now.elapsed().as_secs_f64(),
            );
            warn!("debt: {what}");
            let mut state = self.owing.lock();
            state.asked.retain(|_, at| at.elapsed() < ASK_AGAIN);
            let report = state.report(after);
            state.note(&report, what);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_ledger::Reserve;

    fn state() -> State {
        let watch = DebtWatch::new(BrakePolicy {
            reserve: Reserve::Bytes(ByteSize::mib(100)),
            cover_percent: 50.0,
        });
        watch.0.into_inner().unwrap()
    }

    #[test]
    fn the_debt_is_the_sum_of_its_parts() {
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
        assert!(report.why.contains("200 MiB can be had"), "{}", report.why);
    }

    #[test]
    fn what_a_start_brings_is_owed_until_a_look_finds_it_however_long_it_takes() {
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
    fn tables_are_looked_at_when_something_changed_and_within_a_part_of_the_time() {
        let mut state = state();
        let vms = vec!["a".to_owned()];
        assert!(state.look_due(1 << 30, &vms));
        let looked = |cost| Some((Instant::now(), cost, 1 << 30, vec!["a".to_owned()]));
        state.looked = looked(Duration::ZERO);
        assert!(!state.look_due(1 << 30, &vms));
        assert!(!state.look_due((1 << 30) - FELL + 1, &vms));
        assert!(state.look_due((1 << 30) - FELL, &vms));
        assert!(state.look_due(1 << 30, &[]));
        // A dear look is not had again at once, whatever happens.
        state.looked = looked(Duration::from_secs(1));
        assert!(!state.look_due(0, &[]));
    }

    #[test]
    fn only_the_last_events_are_kept() {
        let mut state = state();
        for number in 0..=EVENTS {
            state.note(&DebtReport::default(), number.to_string());
        }
        assert_eq!(state.events.len(), EVENTS);
        assert_eq!(state.events[0].what, "1");
    }
}
