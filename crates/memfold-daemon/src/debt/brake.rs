//! The brake: measures the copy-on-write debt each second and limits it. The debt is the memory
//! that guests can claim at any time by writing to shared pages.
//!
//! ```text
//!   each second:  MemAvailable (or what a control group of all VMs leaves), counters of engine and KSM  ->  level
//!     when MemAvailable fell, VMs came or went, or the last read is old: the engine reads the kernel's page tables first
//!     warning:  logged; unused pages of the page store are freed at once, not every six seconds
//!     braked:   no VM is started, and until the level is ok again folding and KSM share no more pages (shared pages stay shared)
//!     braked, and less than the reserve is left: guests that are not pinned are asked in turn to drop clean page cache, until the reserve is available;
//!       while right-sizing is on, only from its rung `brake` on
//! ```
//! Most measurements only read counters. The kernel's page tables are read less often, because that
//! takes longer.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use memfold_api::DebtRequest;
use memfold_fold::{Command, Owed};
use memfold_host::Group;
use memfold_ksm as ksm;
use memfold_ledger::{DebtReport, Level};
use memfold_rightsize::Rung;
use memfold_units::{ByteSize, PAGE_SIZE};
use memfold_wire::order::GuestOrder;
use tracing::{info, warn};

use crate::debt::{DebtWatch, LadderNote, Memory, Question, why};
use crate::error::{DaemonError, check};
use crate::folding::Folding;
use crate::ksm_steering::KsmSteering;
use crate::machine::Machine;
use crate::size_records::SizeRecords;
use crate::threads;
use crate::vm_registry::VmRegistry;

/// Time between two measurements.
const INTERVAL: Duration = Duration::from_secs(1);

/// Time limit for the fold engine's answer. The engine may wait for a VM's fold library.
const ANSWER: Duration = Duration::from_secs(2);

/// Time limit for the fold engine's answer while the engine waits for a VM.
const LATE_ANSWER: Duration = Duration::from_millis(100);

/// Time limit for a guest to drop its clean page cache. The two below: time until the freed pages
/// have been reported to the host, and shortest time between two requests to one guest.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);
const REPORTED: Duration = Duration::from_secs(4);
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// Service that measures the copy-on-write debt. While the debt is too large, the brake refuses new
/// VMs and stops folding and KSM.
#[derive(Debug)]
pub struct DebtBrake {
    pub(crate) registry: Arc<VmRegistry>,
    pub(crate) folding: Arc<Folding>,
    pub(crate) debt: Arc<DebtWatch>,
    pub(crate) ksm: Arc<KsmSteering>,
    /// Which VMs are pinned.
    pub(crate) records: Arc<SizeRecords>,
    /// Bytes that must stay available for the debt and are therefore not lent. The brake sets this
    /// value.
    pub(crate) needed: Arc<AtomicU64>,
}

impl DebtBrake {
    /// Starts the thread that measures the debt each second.
    pub(crate) fn begin(self: &Arc<Self>) -> io::Result<()> {
        // A failure is logged when it begins, not each second.
        let mut told = false;
        threads::repeat("debt", INTERVAL, self, move |brake| {
            let looked = brake.look_at_debt();
            if let Some(error) = looked.as_ref().err().filter(|_| !told) {
                warn!(
                    error = error as &dyn std::error::Error,
                    "cannot measure copy-on-write debt; retrying every second"
                );
            }
            told = looked.is_err();
        })
    }

    /// Measures the copy-on-write debt and the memory that is available for it. Returns both, with
    /// the brake's level.
    pub fn debt(self: &Arc<Self>) -> Result<DebtReport, DaemonError> {
        let vms = self.registry.names();
        self.ask_owed(false, false, (0, vms))?;
        self.judge(self.debt.memory()?)
    }

    /// Makes the same report as [`Self::debt`] from `owed`, which the fold engine has just returned
    /// with other figures. `None`: the engine waits for a VM, and its last answer is used.
    pub(crate) fn debt_of(self: &Arc<Self>, owed: Option<Owed>) -> Result<DebtReport, DaemonError> {
        if let Some(owed) = owed {
            self.note_owed(owed);
        }
        self.judge(self.debt.memory()?)
    }

    /// Changes the memory reserve, and the percentage of the debt that available memory must cover.
    /// The change lasts until this daemon ends.
    pub fn set_debt(self: &Arc<Self>, request: &DebtRequest) -> Result<DebtReport, DaemonError> {
        let reserve = request.reserve.as_deref().map(str::parse).transpose();
        let reserve = reserve.map_err(|why| DaemonError::BadRequest(format!("reserve: {why}")))?;
        if let Some(percent) = request.cover_percent {
            let is_fine = (0.0..=100.0).contains(&percent);
            check("cover_percent", percent, is_fine, "0 to 100")?;
        }
        let mut state = self.debt.lock();
        let policy = &mut state.policy;
        policy.reserve = reserve.unwrap_or(policy.reserve);
        policy.cover_percent = request.cover_percent.unwrap_or(policy.cover_percent);
        info!(reserve = %policy.reserve, cover_percent = policy.cover_percent, "limits of the brake, which stops sharing while memory is short, changed");
        drop(state);
        self.debt()
    }

    /// Measures the debt, and applies the brake.
    pub(crate) fn look_at_debt(self: &Arc<Self>) -> Result<(), DaemonError> {
        let pids = |vm: &Arc<Machine>| vm.raw_pid();
        let pids = self.registry.machines().iter().map(pids).collect();
        self.debt.find_groups(pids, Group::of_vms);
        let memory = self.debt.memory()?;
        let vms: Vec<String> = self.registry.names();
        let state = self.debt.lock();
        let look = state.look_due(memory.available, &vms);
        let level = state.brake.level();
        drop(state);
        self.ask_owed(look, look && level > Level::Ok, (memory.available, vms))?;
        let before = self.debt.lock().ksm_pages;
        let ksm_pages = ksm_pages(look, before);
        self.debt.lock().ksm_pages = ksm_pages;
        let report = self.judge(self.debt.memory()?)?;
        // The brake is applied each second, because KSM steering may have begun since.
        self.ksm.brake(why(&report));
        if report.level == Level::Braked && report.mem_available_bytes < report.reserve_bytes {
            self.relieve();
        }
        Ok(())
    }

    /// Asks the fold engine for the debt of each VM, and waits a short time for the answer. Only
    /// one question is open at a time; a late answer is collected at the next call.
    fn ask_owed(
        &self,
        look: bool,
        give_back: bool,
        (available, vms): (u64, Vec<String>),
    ) -> Result<(), DaemonError> {
        let mut state = self.debt.lock();
        let is_known = !state.owed.vms.is_empty() || !state.starting.is_empty();
        let (pending, is_due) = (state.pending.take(), is_known || !vms.is_empty());
        drop(state);
        let question = match pending {
            Some(question) => question,
            None if is_due => {
                let (answer, answered) = sync_channel(1);
                self.folding.tell(Command::Owed {
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
        match wait_for(&question.answered, || self.registry.has_silent()) {
            Ok(owed) => {
                self.note_owed(owed);
                if let Some((available, vms)) = question.looks {
                    let looked = (Instant::now(), question.asked.elapsed(), available, vms);
                    self.debt.lock().looked = Some(looked);
                }
            }
            Err(RecvTimeoutError::Timeout) => self.debt.lock().pending = Some(question),
            Err(RecvTimeoutError::Disconnected) => {}
        }
        Ok(())
    }

    fn note_owed(&self, owed: Owed) {
        let mut state = self.debt.lock();
        state.given_back_pages += owed.given_back_pages;
        state.keep_starting(&owed);
        state.owed = owed;
    }

    /// Determines the brake's level. When the level has changed, logs it, and stops or resumes
    /// folding.
    fn judge(self: &Arc<Self>, memory: Memory) -> Result<DebtReport, DaemonError> {
        let mut state = self.debt.lock();
        let before = state.brake.level();
        let look = state.look(&state.report(memory), memory);
        let policy = state.policy;
        let level = state.brake.judge(&policy, &look);
        let owed = policy.needed_bytes(look.debt_bytes);
        self.needed.store(owed, Ordering::Relaxed);
        let report = state.report(memory);
        if level == before {
            return Ok(report);
        }
        let was_held = state.held;
        state.held = level == Level::Braked || was_held && level != Level::Ok;
        let follows = match level {
            Level::Braked => {
                "; folding and KSM share no more memory, and no VM is started; shared memory stays shared"
            }
            Level::Warning if was_held => {
                "; VMs may be started, folding and KSM wait until the level is ok"
            }
            Level::Ok if was_held => "; folding and KSM continue, and VMs may be started",
            _ => "",
        };
        let what = format!("{before} -> {level}: {}{follows}", report.why);
        if level == Level::Ok {
            info!(
                "change of the memory that guests can claim by writing to shared pages (debt): {what}"
            );
        } else {
            warn!(
                "change of the memory that guests can claim by writing to shared pages (debt): {what}"
            );
        }
        state.note(&report, what);
        let report = state.report(memory);
        if state.held != was_held {
            // The lock is still held, so that two changes reach the engine in order. The engine
            // never takes this lock.
            self.folding.tell(Command::SetBraked(why(&report)))?;
        }
        Ok(report)
    }

    /// Asks guests to drop clean page cache, on a thread of its own, until the reserve is available
    /// again. While right-sizing is on, guests are asked only at its rung `brake`: trims, balloons
    /// and lent RAM hurt guests less.
    fn relieve(self: &Arc<Self>) {
        if !drops_are_due(self.debt.lock().rung.as_ref()) {
            return;
        }
        if std::mem::replace(&mut self.debt.lock().relieving, true) {
            return;
        }
        let brake = self.clone();
        let work = move || {
            let done = brake.ask_guests();
            brake.debt.lock().relieving = false;
            if let Err(error) = done {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot ask guests to drop page cache; retrying while memory is short"
                );
            }
        };
        if let Err(error) = threads::begin("relieve", work) {
            self.debt.lock().relieving = false;
            warn!(%error, "cannot start the thread that asks guests to drop page cache; retrying every second");
        }
    }

    fn ask_guests(self: &Arc<Self>) -> Result<(), DaemonError> {
        let mut vms = self.debt.lock().owed.vms.clone();
        vms.sort_by_key(|vm| std::cmp::Reverse(vm.cached_pages));
        for vm in vms {
            let memory = self.debt.memory()?;
            if memory.available >= self.debt.lock().policy.reserve.of(memory.total) {
                break;
            }
            if !drops_are_due(self.debt.lock().rung.as_ref()) {
                break;
            }
            let asked = self.debt.lock().asked.get(&vm.name).copied();
            let Ok(machine) = self.registry.machine(&vm.name) else {
                continue;
            };
            if self.records.is_pinned(&machine) {
                continue;
            }
            if asked.is_some_and(|at| at.elapsed() < ASK_AGAIN) {
                continue;
            }
            // The guest of a stopped VM cannot answer.
            if !machine.state().is_running() {
                continue;
            }
            if !can_gain(machine.keeps_freed_ram(), machine.reports_free_pages()) {
                continue;
            }
            // A VM that is being saved keeps its cache, which is part of the snapshot.
            let Some(saving) = machine.try_save() else {
                continue;
            };
            let now = Instant::now();
            self.debt.lock().asked.insert(vm.name.clone(), now);
            let dropped = machine.run(GuestOrder::DropClean, DROP_TIMEOUT);
            drop(saving);
            if !dropped.is_ok_and(|done| done.code == 0) {
                continue;
            }
            std::thread::sleep(REPORTED);
            let after = self.debt.memory()?;
            let what = format!(
                "less than the reserve was available: the guest of '{}' dropped its clean page cache ({} known); available memory changed by {:+} MiB in {:.0} s, other causes included",
                vm.name,
                ByteSize(vm.cached_pages * PAGE_SIZE),
                (i128::from(after.available) - i128::from(memory.available)) / (1 << 20),
                now.elapsed().as_secs_f64(),
            );
            warn!(
                "change of the memory that guests can claim by writing to shared pages (debt): {what}"
            );
            let mut state = self.debt.lock();
            state.asked.retain(|_, at| at.elapsed() < ASK_AGAIN);
            let report = state.report(after);
            state.note(&report, what);
        }
        Ok(())
    }
}

/// Returns whether guests may be asked to drop all of their clean page cache. While right-sizing is
/// on, trims, balloons and lent RAM come first.
fn drops_are_due(ladder: Option<&LadderNote>) -> bool {
    ladder.is_none_or(|ladder| !ladder.is_on || ladder.rung == Rung::Brake)
}

/// Returns whether the host gets the memory that a guest frees. `keeps_freed_ram`: the host keeps
/// it in use for the VM, as right-sizing knows, too. `reports`: the VM has free page reporting,
/// without which freed pages would not return to the host.
fn can_gain(keeps_freed_ram: bool, reports: bool) -> bool {
    reports && !keeps_freed_ram
}

/// Waits for the fold engine's answer: for [`LATE_ANSWER`] while the engine waits for a VM, else
/// for [`ANSWER`]. Whether a VM is silent is only asked when the answer is late, because that reads
/// a file of each VM's process.
fn wait_for<T>(
    answered: &Receiver<T>,
    has_silent: impl FnOnce() -> bool,
) -> Result<T, RecvTimeoutError> {
    let answer = answered.recv_timeout(LATE_ANSWER);
    if matches!(answer, Err(RecvTimeoutError::Timeout)) && !has_silent() {
        return answered.recv_timeout(ANSWER.saturating_sub(LATE_ANSWER));
    }
    answer
}

/// Returns how many pages KSM saves: each would need its own frame if it was written to. While KSM
/// is stopped, its counters still contain pages of ended processes. With `look`, this function
/// therefore reads the processes; without `look`, it returns at most `before`, the last count.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn while_right_sizing_is_on_guests_drop_page_cache_only_at_the_rung_brake() {
        let due = |rung, is_on| {
            let why = String::new();
            drops_are_due(Some(&LadderNote { rung, why, is_on }))
        };
        assert_eq!(
            Rung::ALL.map(|rung| due(rung, true)),
            [false, false, false, false, true]
        );
        // In the modes `watch` and `off`, right-sizing frees nothing, so guests are asked at every
        // rung.
        assert_eq!(Rung::ALL.map(|rung| due(rung, false)), [true; 5]);
        assert!(drops_are_due(None));
    }

    #[test]
    fn no_guest_drops_page_cache_whose_memory_the_host_would_not_get() {
        // RAM that VFIO pins, that is locked or in huge pages, stays in use.
        assert!(!can_gain(true, true));
        // Without free page reporting, the host does not learn which pages are free.
        assert!(!can_gain(false, false));
        assert!(can_gain(false, true));
    }

    #[test]
    fn vms_are_asked_whether_they_are_silent_only_if_the_engines_answer_is_late() {
        let (answer, answered) = sync_channel(1);
        answer.send(1).unwrap();
        let never = || -> bool { panic!("the answer is here") };
        assert_eq!(wait_for(&answered, never), Ok(1));
        let late = |has_silent: bool| wait_for(&answered, || has_silent);
        assert_eq!(late(true), Err(RecvTimeoutError::Timeout));
        let sent_late = wait_for(&answered, || {
            answer.send(2).unwrap();
            false
        });
        assert_eq!(sent_late, Ok(2));
    }
}
