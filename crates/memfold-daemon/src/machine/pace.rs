//! How often the daemon asks QEMU about a VM. QEMU takes a command byte by byte, with several
//! system calls for each (docs/decisions/0068-questions-to-qemu.md), so it is asked less about a VM
//! that stands still.
//!
//! ```text
//!                            runs    at rest    else
//!   run state                 5 s        5 s     1 s    at once after an event of QEMU
//!   QEMU's process           10 s       10 s    10 s    from /proc: locked memory, devices
//!   RAM layout, conditions   10 s       30 s    10 s    at once when the VM is no longer at rest
//! ```

use std::time::{Duration, Instant};

use crate::machine::INTERVAL;

/// Longest time for which QEMU is not asked for the run state of a VM that runs or is at rest. QEMU
/// tells of most changes itself.
const ASK: Duration = Duration::from_secs(5);

/// Longest time for which QEMU is not asked about RAM and conditions of a VM at rest. Only another
/// client of QEMU's monitor can change them then.
const AT_REST: Duration = Duration::from_secs(30);

/// What is to be read of a VM's RAM layout and conditions for folding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// What `/proc` shows of QEMU's process.
    Process,
    /// All, for which QEMU is asked.
    All,
}

/// When a VM was last looked at.
#[derive(Debug)]
pub(super) struct Pace {
    /// When QEMU was last asked for the run state.
    asked: Instant,
    /// When the process, or all, was last read; and when all was.
    looked: Instant,
    read: Instant,
    /// Whether the VM was at rest at the last check.
    rested: bool,
}

impl Pace {
    pub fn new(now: Instant) -> Self {
        Self {
            asked: now,
            looked: now,
            read: now,
            rested: false,
        }
    }

    /// Returns whether QEMU is to be asked for the run state now. `is_unchanged`: it seems to be
    /// what it was, and QEMU would tell of a change.
    pub fn ask_is_due(&mut self, now: Instant, is_unchanged: bool) -> bool {
        let is_due = !is_unchanged || now.duration_since(self.asked) >= ASK;
        if is_due {
            self.asked = now;
        }
        is_due
    }

    /// Returns what is to be read now. `rests`: the VM is at rest, and was so at the last check.
    pub fn due(&mut self, now: Instant, rests: bool) -> Due {
        let has_left = std::mem::replace(&mut self.rested, rests) && !rests;
        if !has_left && now.duration_since(self.looked) < INTERVAL {
            return Due::Nothing;
        }
        self.looked = now;
        if rests && now.duration_since(self.read) < AT_REST {
            return Due::Process;
        }
        self.read = now;
        Due::All
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// Returns how often, in the minute after `began`, QEMU is asked for the run state, its process
    /// is looked at, and QEMU is asked for all.
    fn minute(pace: &mut Pace, began: Instant, rests: bool) -> [u32; 3] {
        let mut counts = [0; 3];
        for second in 1..=60 {
            let now = began + Duration::from_secs(second);
            counts[0] += u32::from(pace.ask_is_due(now, true));
            match pace.due(now, rests) {
                Due::Nothing => {}
                Due::Process => counts[1] += 1,
                Due::All => counts[2] += 1,
            }
        }
        counts
    }

    #[test]
    fn qemu_is_asked_less_about_a_vm_at_rest_and_at_once_when_the_rest_ends() {
        let began = Instant::now();
        let mut pace = Pace::new(began);
        assert_eq!(minute(&mut pace, began, false), [12, 0, 6], "it runs");
        let rests = minute(&mut pace, began + MINUTE, true);
        assert_eq!(rests, [12, 4, 2], "it rests");
        let now = began + MINUTE * 2 + Duration::from_secs(1);
        assert!(!pace.ask_is_due(now, true));
        assert!(pace.ask_is_due(now, false), "an event came");
        assert_eq!(pace.due(now, false), Due::All, "the rest has ended");
        assert_eq!(pace.due(now, false), Due::Nothing);
    }
}
