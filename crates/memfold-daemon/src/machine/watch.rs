//! Checks a VM periodically until its QEMU ends: whether the VM runs, whether its memory may be
//! folded, and whether memfold's library in QEMU answers. A full disk of the host may have stopped
//! the VM. If the VM has the option `resume_when_room`, it is resumed when the disk has free space
//! again.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memfold_fold::{Command, LibraryState, QemuGuest, SharedLibraryState};
use tracing::{debug, info, warn};

use crate::machine::pace::{Due, Pace};
use crate::machine::{INTERVAL, Machine};
use crate::run_state::{RunState, SILENT};

/// Time between two checks of the VM's run state.
const STATE: Duration = Duration::from_secs(1);

/// Longest pause before the next attempt to connect to a fold library that keeps failing.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Longest time that the fold library needs for an order: it begins no further run of pages after
/// one second.
const ORDER: Duration = Duration::from_millis(1500);

impl Machine {
    /// Checks the VM periodically until QEMU's process ends.
    pub fn watch(self: &Arc<Self>) {
        let (mut pace, mut seen) = (Pace::new(Instant::now()), self.state());
        let mut connections = 0;
        let mut room = RoomWatch::default();
        let mut is_told = false;
        let mut has_ended = || match self.vm.process().wait_exit(STATE) {
            Ok(has_ended) => has_ended,
            // A VM that runs must not be taken for one that has ended: its pages would be freed.
            Err(error) => {
                if !std::mem::replace(&mut is_told, true) {
                    warn!(vm = self.name(), %error, "cannot see whether QEMU's process has ended; the daemon tries again each second");
                }
                std::thread::sleep(STATE);
                false
            }
        };
        while !has_ended() {
            self.end_outlived();
            let is_unchanged = self.seems_unchanged(&seen, &mut connections);
            if pace.ask_is_due(Instant::now(), is_unchanged) {
                // A state counts only after two checks: the fold library may stop the VM for a
                // moment.
                let now = self.look_at_state(Duration::ZERO);
                if now == seen {
                    self.note_state(&now);
                    room.look(self, &now);
                }
                seen = now;
            }
            let due = pace.due(Instant::now(), is_unchanged && seen.is_at_rest());
            if due == Due::Nothing {
                continue;
            }
            // Nobody needs to know more of a VM at rest, unless its QEMU got something that must
            // not meet folding.
            let is_wanted = due == Due::All || self.vm.process_forbids_folding();
            if is_wanted && seen.name != SILENT {
                self.look_again();
            }
            self.reach_library_again();
        }
    }

    /// Returns whether a VM that ran or was at rest at the last check (`seen`) seems to do so
    /// still. QEMU is not asked. `connections`: how often the monitor was connected to QEMU by
    /// then; events that QEMU sends between two connections are lost.
    fn seems_unchanged(&self, seen: &RunState, connections: &mut u64) -> bool {
        let mut has_news = || {
            let Some(mut qmp) = self.monitor.try_lock() else {
                return false;
            };
            let before = std::mem::replace(connections, qmp.connections());
            before != *connections || RunState::may_have_changed(&mut qmp)
        };
        let would_tell = seen.is_running() || seen.is_at_rest();
        would_tell && self.state() == *seen && self.stopped().is_none() && !has_news()
    }

    /// Reconnects to the fold library after it did not answer the engine, or answered nothing when
    /// the VM was adopted. QEMU may have been
    /// stopped, the host may swap, or the library's thread got no CPU. The pause grows while the
    /// library keeps failing, because the engine waits for it each time.
    fn reach_library_again(&self) {
        let mut watch = self.library_watch.lock();
        if !self.has_lost_library() || watch.connected.elapsed() < watch.pause {
            return;
        }
        let link = match self.vm.library_link() {
            Some(Ok(link)) => link,
            // The next check tries again. Most VMs whose library does not answer are ending.
            Some(Err(error)) => {
                return debug!(vm = self.name(), %error, "cannot connect to memfold's library in this VM's QEMU; retrying");
            }
            None => return,
        };
        warn!(
            vm = self.name(),
            "fold library in QEMU did not answer in time; the daemon reconnected, and folding continues"
        );
        watch.pause = if watch.connected.elapsed() > LONGEST_PAUSE {
            INTERVAL
        } else {
            (watch.pause * 2).min(LONGEST_PAUSE)
        };
        watch.connected = Instant::now();
        // The new connection gets a new state, because an order in progress may still mark the old
        // one as lost.
        let state = SharedLibraryState::default();
        *self.library_state.lock() = state.clone();
        self.look_again();
        self.library_problem
            .lock()
            .clone_from(&link.facts().problem);
        self.can_stop
            .store(link.facts().can_stop, Ordering::Relaxed);
        let conditions = self.seen.lock().conditions.clone();
        let guest = QemuGuest::new(self.pid(), link, self.monitor.clone(), &conditions, state);
        self.tell(Command::Reached {
            id: self.role.id,
            guest: Box::new(guest),
            problem: self.problem(),
        });
    }

    /// Returns whether the connection to the fold library has failed. The daemon then makes a new
    /// one.
    pub fn has_lost_library(&self) -> bool {
        self.library_state() == LibraryState::Lost
    }

    fn library_state(&self) -> LibraryState {
        let shared = self.library_state.lock().clone();
        *shared.lock()
    }

    /// Returns why QEMU or its fold library does not answer at this moment; `None` if both answer.
    pub fn is_silent(&self) -> Option<String> {
        let state = self.stopped().unwrap_or_else(|| self.state());
        if state.name == SILENT {
            return Some(state.words());
        }
        let LibraryState::Ordered(since) = self.library_state() else {
            return None;
        };
        let seconds = since.elapsed().as_secs_f64();
        (since.elapsed() > ORDER)
            .then(|| format!("QEMU's library has not answered for {seconds:.1} s"))
    }
}

/// Free bytes that the file system of each full disk must have before the VM is resumed.
const LEAST: u64 = 16 << 20;

/// Shortest time between two attempts to resume a VM; the next constant: the longest. The time
/// grows if the guest fills the free space at once.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// Time at which the VM was last resumed, and the pause before the next attempt.
#[derive(Debug, Default)]
struct RoomWatch {
    resumed: Option<Instant>,
    pause: Duration,
}

impl RoomWatch {
    /// Resumes the VM if the option `resume_when_room` is set and its disks have free space.
    fn look(&mut self, machine: &Arc<Machine>, now: &RunState) {
        if now.full.is_empty() || !machine.may_resume_when_room() {
            return;
        }
        let since = self.resumed.map_or(LONGEST, |at| at.elapsed());
        let has_room = |file| free_bytes(file).is_ok_and(|bytes| bytes >= LEAST);
        if since < self.pause || !now.full.iter().all(|file| has_room(file)) {
            return;
        }
        self.pause = next_pause(self.pause, since);
        self.resumed = Some(Instant::now());
        match machine.resume() {
            Ok(state) if state.is_running() => info!(
                vm = machine.name(),
                files = ?now.full,
                "VM resumed: its disk has free space again"
            ),
            // `note_state` logs the new state.
            Ok(_) => {}
            Err(error) => warn!(
                vm = machine.name(),
                error = &error as &dyn std::error::Error,
                "cannot resume the VM although its disk has free space again; retrying"
            ),
        }
    }
}

/// Returns the pause after an attempt, from the previous pause and the time since the last attempt.
fn next_pause(pause: Duration, since: Duration) -> Duration {
    if since < LONGEST {
        (pause * 2).clamp(SHORTEST, LONGEST)
    } else {
        SHORTEST
    }
}

/// Returns the free bytes of the file's file system for unprivileged processes (`f_bavail`).
fn free_bytes(file: &Path) -> io::Result<u64> {
    let facts = rustix::fs::statvfs(file)?;
    Ok(facts.f_bavail.saturating_mul(facts.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn if_a_resumed_vm_fills_the_disk_again_at_once_the_next_attempt_to_resume_waits_longer() {
        let soon = Duration::from_secs(3);
        let mut pauses = vec![next_pause(Duration::ZERO, LONGEST)];
        for _ in 0..7 {
            pauses.push(next_pause(pauses[pauses.len() - 1], soon));
        }
        let seconds: Vec<u64> = pauses.iter().map(Duration::as_secs).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(next_pause(LONGEST, LONGEST), SHORTEST);
    }
}
