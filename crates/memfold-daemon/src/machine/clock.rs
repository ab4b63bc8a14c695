//! Corrects the clock of a guest after its VM was stopped for a time. As soon as memfold's agent in
//! the guest answers, the guest's clock is set to the host's. Commands of users run in the guest
//! only afterwards.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use memfold_snapshot::clock::{self, ClockStep, Offset, in_words};
use memfold_vm::{AgentError, Qmp};
use memfold_wire::order::GuestOrder;
use tracing::{info, warn};

use crate::machine::pauses::LONG;
use crate::machine::{Machine, is_disconnected, text};
use crate::run_state::{CHANGING, RunState};
use crate::threads::unix_time;

/// Time limit for a guest to report its time, or to set its clock.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Longest wait for the agent of a guest that this daemon has only seen stopped.
const AGENT_PATIENCE: Duration = Duration::from_secs(300);

/// Longest time that a user's command waits until the guest's clock is set.
const PATIENCE: Duration = Duration::from_secs(30);

/// File in the VM's directory that exists while the guest keeps the clock of its snapshot.
const KEEPS_CLOCK: &str = "keeps-clock";

impl Machine {
    /// Records that the guest's clock is wrong. Commands of users wait until it is set.
    pub(crate) fn clock_is_wrong(&self) {
        self.set_clock_state(ClockStep::pending());
    }

    /// Sets the clock of a guest whose VM was stopped. This runs on a thread, so that the caller
    /// that resumes the VM does not wait for the guest.
    pub(crate) fn set_clock_soon(self: &Arc<Self>) {
        self.clock_is_wrong();
        // Many pauses must not begin many threads, whose commands would slow the guest down.
        if self.marks.clock_wanted.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        if let Err(error) = self.on_agent("clock", Duration::MAX, set_clock_for_all) {
            self.marks.clock_wanted.store(0, Ordering::Release);
            self.clock_failed(format!("no thread to set the clock: {error}"));
        }
    }

    /// Sets the guest's clock. Returns `false` if the agent's connection was lost and the caller
    /// should try again.
    pub(crate) fn set_clock(&self) -> bool {
        let step = match self.step_clock() {
            Ok(step) => step,
            Err(error) if is_disconnected(&error) => return false,
            Err(error) => {
                self.clock_failed(error.to_string());
                return true;
            }
        };
        if let (Some(behind), None) = (step.behind_ms, &step.problem) {
            info!(
                vm = self.name(),
                clock = in_words(behind),
                left_ms = step.left_ms,
                "guest's clock set"
            );
        }
        self.set_clock_state(step.clone());
        if let Ok(done) = self.run_short(GuestOrder::SetRtc, TIMEOUT) {
            let said = (done.code != 0).then(|| text(&done.stdout));
            let problem = step.problem.or(said);
            if let Some(why) = &problem {
                warn!(
                    vm = self.name(),
                    why,
                    "guest's system clock or hardware clock (RTC) is wrong; set the clock in the guest"
                );
            }
            self.set_clock_state(ClockStep { problem, ..step });
        }
        true
    }

    fn step_clock(&self) -> Result<ClockStep, AgentError> {
        clock::set(
            || self.look_at_clock(),
            |offset| {
                let began = Instant::now();
                let done = self.run_short(offset.step(SystemTime::now()), TIMEOUT)?;
                Ok((done.code == 0).then(|| began.elapsed()))
            },
        )
    }

    fn look_at_clock(&self) -> Result<Option<Offset>, AgentError> {
        let before = SystemTime::now();
        let said = self.run_short(GuestOrder::ReadClock, TIMEOUT)?;
        Ok(Offset::of(&said.stdout, before, SystemTime::now()))
    }

    fn clock_failed(&self, why: String) {
        warn!(
            vm = self.name(),
            why, "cannot set the guest's clock; set the clock in the guest"
        );
        self.set_clock_state(ClockStep {
            problem: Some(why),
            ..ClockStep::default()
        });
    }

    fn set_clock_state(&self, step: ClockStep) {
        *self.marks.clock.lock() = Some(step);
        self.marks.clock_set.notify_all();
    }

    /// Returns the state of setting the guest's clock; `None` if setting was never necessary.
    pub(crate) fn clock_step(&self) -> Option<ClockStep> {
        self.marks.clock.lock().clone()
    }

    /// Waits until the guest's clock is set, so that a command sees the right time. Waits for 10 s
    /// at most, and only while the agent answers.
    pub(crate) fn wait_clock(&self) {
        let end = Instant::now() + PATIENCE;
        let has_agent = || self.agent().is_some_and(|agent| agent.session().is_some());
        let mut clock = self.marks.clock.lock();
        while clock.as_ref().is_some_and(|step| step.pending) && has_agent() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.marks.clock_set.wait_for(&mut clock, left);
        }
    }

    /// Processes QEMU's STOP and RESUME events. After a long pause, sets the guest's clock.
    /// `before`: the VM's state when it was last read.
    pub(crate) fn hear_pauses(self: &Arc<Self>, qmp: &mut Qmp, before: &RunState) {
        let events = qmp.take_events_named(&CHANGING);
        let length = {
            let mut pauses = self.marks.pauses.lock();
            pauses.see(before);
            pauses.hear(&events)
        };
        if length.is_none_or(|length| length < LONG) || self.keeps_clock() {
            return;
        }
        let set = |machine: &Arc<Self>| {
            info!(
                vm = machine.name(),
                "VM runs again after a pause; the daemon now sets the guest's clock"
            );
            machine.set_clock_soon();
            true
        };
        if self.marks.had_agent.load(Ordering::Relaxed) {
            set(self);
        } else if length == Some(Duration::MAX) {
            // The guest stood still since this daemon's start, so its agent could not answer yet.
            if let Err(error) = self.on_agent("clock", AGENT_PATIENCE, set) {
                self.clock_failed(format!("no thread to set the clock: {error}"));
            }
        }
    }

    /// Returns whether the guest keeps the clock of its snapshot.
    fn keeps_clock(&self) -> bool {
        let directory = self.vm.directory();
        directory.is_some_and(|directory| directory.path().join(KEEPS_CLOCK).exists())
    }

    /// Records in the VM's directory that the guest keeps its clock, also for later daemons.
    pub(crate) fn keep_clock(&self) {
        let file = self.vm.directory().map(|d| d.path().join(KEEPS_CLOCK));
        let noted = file.map(|file| std::fs::write(file, ""));
        if let Some(Err(error)) = noted {
            warn!(
                vm = self.name(),
                %error,
                "cannot record --keep-clock for this guest, so its clock is set after the next pause; free space in the state directory"
            );
        }
    }

    /// Records that the VM is stopped by the save of a snapshot, until the result is dropped.
    pub fn note_saving(&self) -> impl Drop + '_ {
        self.marks.being_saved.store(true, Ordering::Relaxed);
        BeingSaved(self, unix_time())
    }
}

/// Sets the guest's clock for all who wanted that before. Returns `false` if the caller should try
/// again: the agent's connection was lost, or the VM was paused meanwhile.
fn set_clock_for_all(machine: &Arc<Machine>) -> bool {
    let wanted = &machine.marks.clock_wanted;
    let seen = wanted.load(Ordering::Acquire);
    machine.set_clock()
        && wanted
            .compare_exchange(seen, 0, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
}

struct BeingSaved<'a>(&'a Machine, Duration);

impl Drop for BeingSaved<'_> {
    fn drop(&mut self) {
        let mut pauses = self.0.marks.pauses.lock();
        pauses.saved = Some((self.1, unix_time()));
        self.0.marks.being_saved.store(false, Ordering::Relaxed);
    }
}
