//! Periodic checks of a VM: its run state, its conditions for folding, and its fold library.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_fold::{Command, LibraryState, QemuGuest, SharedLibraryState};
use tracing::{debug, warn};

use crate::machine::room::RoomWatch;
use crate::machine::{INTERVAL, Machine};
use crate::run_state::SILENT;

/// Time between two checks of the VM's run state.
const STATE: Duration = Duration::from_secs(1);

/// Longest pause before the next attempt to connect to a fold library that keeps failing.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Longest time that the fold library needs for an order: it begins no further run of pages after
/// one second.
const ORDER: Duration = Duration::from_millis(1500);

impl Machine {
    /// Checks the VM periodically until its process ends.
    pub fn watch(self: &Arc<Self>) {
        let (mut looked, mut seen) = (Instant::now(), self.state());
        let mut room = RoomWatch::default();
        let has_ended = || {
            self.vm.process().wait_exit(STATE).unwrap_or_else(|error| {
                warn!(vm = self.name(), %error, "cannot watch QEMU's process; restart the daemon to adopt the VM again");
                true
            })
        };
        while !has_ended() {
            // A state counts only after two checks: the fold library may stop the VM for a moment.
            let now = self.look_at_state(Duration::ZERO);
            if now == seen {
                self.note_state(&now);
                room.look(self, &now);
            }
            seen = now;
            if looked.elapsed() >= INTERVAL {
                looked = Instant::now();
                if seen.name != SILENT {
                    self.look_again();
                }
                self.reach_library_again();
            }
        }
    }

    /// Reconnects to the fold library after it did not answer the engine. QEMU may have been
    /// stopped, the host may swap, or the library's thread got no CPU. The pause grows while the
    /// library keeps failing, because the engine waits for it each time.
    fn reach_library_again(&self) {
        let mut watch = self.library_watch.lock();
        if self.library_state() != LibraryState::Lost || watch.connected.elapsed() < watch.pause {
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
        let conditions = self.seen.lock().conditions.clone();
        let guest = QemuGuest::new(self.pid(), link, self.monitor.clone(), &conditions, state);
        self.tell(Command::Reached {
            id: self.role.id,
            guest: Box::new(guest),
            problem: self.problem(),
        });
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
