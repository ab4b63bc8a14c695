//! Resumes VMs that were stopped by a full disk, when the disk has free space again (option
//! `resume_when_room`).

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::machine::Machine;
use crate::run_state::RunState;

/// Free bytes that the file system of each full disk must have before the VM is resumed.
const LEAST: u64 = 16 << 20;

/// Shortest time between two attempts to resume a VM; the next constant: the longest. The time
/// grows if the guest fills the free space at once.
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// Time at which the VM was last resumed, and the pause before the next attempt.
#[derive(Debug, Default)]
pub(crate) struct RoomWatch {
    resumed: Option<Instant>,
    pause: Duration,
}

impl RoomWatch {
    /// Resumes the VM if the option `resume_when_room` is set and its disks have free space.
    pub fn look(&mut self, machine: &Arc<Machine>, now: &RunState) {
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
    fn resume_attempts_become_rarer_if_the_vm_fills_the_free_space_at_once() {
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
