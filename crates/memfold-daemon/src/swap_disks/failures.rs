//! Failed requests of a swap disk, as QEMU's events report them.

use memfold_lend::graph::{self, Failed};
use tracing::error;

use crate::machine::Machine;
use crate::swap_disks::guard::Guard;
use crate::swap_disks::note::note;
use crate::swap_disks::relays::wait_longer;

/// Receives QEMU's events about failed requests of a swap disk, and reacts to them.
pub(crate) fn hear(machine: &Machine, guard: &Guard) {
    let mut qmp = machine.monitor();
    // QEMU delivers events together with answers.
    if qmp.query("query-status").is_err() {
        return;
    }
    let events = qmp.take_events_named(&["QUORUM_REPORT_BAD"]);
    let heard_on = qmp.connections();
    drop(qmp);
    let before = guard.borrowing();
    let last = guard.state.lock().heard_on.replace(heard_on);
    if before.copy.is_some() && last.is_some_and(|last| last != heard_on) {
        guard.state.lock().borrowing.copy_unwatched = true;
    }
    for event in events {
        match graph::failed(&event, &before) {
            // The lent part lacks a write now, so its connection is cut even if it works.
            Some(Failed::Lent(part)) => guard.cut(part),
            // If no lent part is left, the guest itself has received the error.
            Some(Failed::Copy) if before.reached().next().is_some() => {
                guard.state.lock().borrowing.copy_failed = true;
            }
            Some(Failed::Copy) | None => {}
        }
    }
    let now = guard.borrowing();
    if now == before {
        return;
    }
    if now.copy_failed && !before.copy_failed {
        copy_has_failed(guard);
    }
    note(machine, &now);
}

/// Logs that the copy on this host has failed, so that lent RAM has the only copy, and extends the
/// relays' timeout.
pub(crate) fn copy_has_failed(guard: &Guard) {
    error!(
        vm = guard.vm,
        "swap disk's copy on this host failed; free space for a new copy, and keep the lender running meanwhile"
    );
    wait_longer(guard);
}
