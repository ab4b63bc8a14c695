//! Which guests may still have to unplug memory.
//!
//! A guest that was told to unplug memory does so whenever it can, also after the daemon that told
//! it has ended. So each VM that has a virtio-mem device is looked at once by each daemon.

use std::collections::BTreeSet;

/// VMs that were told to unplug memory, or of which that is not known. VMs are named by the
/// machine's number.
#[derive(Debug, Default)]
pub(super) struct Unplugs {
    /// VMs whose guests this daemon has told to unplug memory.
    told: BTreeSet<u32>,
    /// VMs of which it is known whether their guests were told.
    known: BTreeSet<u32>,
}

impl Unplugs {
    /// Forgets VMs that have ended.
    pub fn keep(&mut self, is_there: impl Fn(&u32) -> bool) {
        self.told.retain(&is_there);
        self.known.retain(is_there);
    }

    /// Notes what a guest was told last: to unplug memory, or not.
    pub fn note(&mut self, vm: u32, is_unplug: bool) {
        self.known.insert(vm);
        if is_unplug {
            self.told.insert(vm);
        } else {
            self.told.remove(&vm);
        }
    }

    /// Returns whether a guest may still have to unplug memory. `can_plug`: the VM has a virtio-mem
    /// device.
    pub fn may_unplug(&self, vm: u32, can_plug: bool) -> bool {
        self.told.contains(&vm) || (can_plug && !self.known.contains(&vm))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_daemon_looks_once_whether_a_guest_was_told_to_unplug_memory() {
        let mut unplugs = Unplugs::default();
        assert!(unplugs.may_unplug(1, true));
        assert!(!unplugs.may_unplug(1, false));
        unplugs.note(1, false);
        assert!(!unplugs.may_unplug(1, true));
        unplugs.note(1, true);
        assert!(unplugs.may_unplug(1, true));
        // Another VM has the number now.
        unplugs.keep(|_| false);
        assert!(!unplugs.may_unplug(1, false));
        assert!(unplugs.may_unplug(1, true));
    }
}
