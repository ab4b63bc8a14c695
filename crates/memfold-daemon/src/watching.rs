//! The thread that watches what a VM has borrowed: lenders that are lost, relays that stand still, leases, what QEMU reports.

use std::sync::Weak;
use std::time::{Duration, Instant};

use memfold_lend::graph::{self, Failed};
use memfold_lend::waits;
use tracing::warn;

use super::borrowing::{RENEW, write_note};
use super::comparing::{Comparison, copy_has_failed};
use super::machine::Machine;
use super::relays::is_relay_stopped;
use super::watched::Guard;
use super::{Daemon, chain};

/// Time between two looks at connections, and between two at leases.
const WATCH: Duration = Duration::from_millis(100);

/// After that a swap disk that couldn't be moved away from a single lender is tried again.
const MOVE_AGAIN: Duration = Duration::from_secs(15);

/// Looks in a row that find a relay standing still, until it is given up: one may catch a debugger's blink.
const STOPPED_LOOKS: u32 = 5;

pub(super) fn keep_watch(daemon: &Weak<Daemon>, machine: &Weak<Machine>, guard: &Guard) {
    let mut renewed = Instant::now();
    let mut moved: Option<Instant> = None;
    let mut comparison = Comparison::default();
    // Until nothing is left to watch.
    while !guard.is_stopped() && guard.borrowing().reached().next().is_some() {
        std::thread::sleep(WATCH);
        let (Some(daemon), Some(machine)) = (daemon.upgrade(), machine.upgrade()) else {
            return;
        };
        for part in guard.ended() {
            if let Err(error) = daemon.heal(&machine, guard, part) {
                // Tried again at the next look. A VM that ends takes its monitor with it.
                warn!(
                    vm = guard.vm,
                    error = chain(&error),
                    "a lender is lost, and its node can't be taken out"
                );
                std::thread::sleep(RENEW);
            }
        }
        if stands_still(guard) {
            warn!(vm = guard.vm, "its relay stands still, and is given up");
            for (part, _) in guard.borrowing().reached() {
                guard.cut(part);
            }
        }
        hear(&machine, guard);
        comparison.step(&machine, guard);
        if renewed.elapsed() >= RENEW {
            renewed = Instant::now();
            if let Err(error) = daemon.settle_alone(&machine, guard) {
                warn!(
                    vm = guard.vm,
                    error = chain(&error),
                    "QEMU does not say what its swap disk uses"
                );
            }
            // Figures that aren't had are had a second later.
            if let Ok(Some(counted)) = waits::look(&mut machine.monitor()) {
                guard.state().waits = Some(counted);
            }
            if let Err(error) = daemon.renew(&machine, guard) {
                warn!(
                    vm = guard.vm,
                    error = chain(&error),
                    "what it has borrowed can't be given back"
                );
            }
        }
        let is_due = moved.is_none_or(|moved| moved.elapsed() >= MOVE_AGAIN);
        if let Some(why) = guard.is_in_danger().filter(|_| is_due) {
            moved = Some(Instant::now());
            warn!(
                vm = guard.vm,
                why, "its swap disk is moved to this host's disk"
            );
            machine.comes_home(guard.borrowing().hangs_on_one());
            if let Err(error) = daemon.return_as(machine.name(), false) {
                warn!(
                    vm = guard.vm,
                    error = chain(&error),
                    "its swap disk can't be moved; tried again"
                );
            }
        }
    }
}

/// Whether a relay stands still for longer than a blink. QEMU isn't asked anything meanwhile: its monitor may wait for that relay.
fn stands_still(guard: &Guard) -> bool {
    (0..STOPPED_LOOKS).all(|look| {
        if look > 0 {
            std::thread::sleep(WATCH);
        }
        is_relay_stopped(guard)
    })
}

/// Hears from QEMU which requests have failed.
pub(super) fn hear(machine: &Machine, guard: &Guard) {
    let (events, heard_on) = {
        let mut qmp = machine.monitor();
        // Events come with answers.
        if qmp.query("query-status").is_err() {
            return;
        }
        (
            qmp.take_events_named(&["QUORUM_REPORT_BAD"]),
            qmp.connections(),
        )
    };
    let before = guard.borrowing();
    let last = guard.state().heard_on.replace(heard_on);
    if before.copy.is_some() && last.is_some_and(|last| last != heard_on) {
        guard.state().borrowing.copy_unwatched = true;
    }
    for event in events {
        match graph::failed(&event, &before) {
            // Even if the connection stands: it lacks that write.
            Some(Failed::Lent(part)) => guard.cut(part),
            // With nothing else left, the guest has heard of it itself.
            Some(Failed::Copy) if before.reached().next().is_some() => {
                guard.state().borrowing.copy_failed = true;
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
    let directory = machine.vm().directory();
    if let Some(Err(error)) = directory.map(|d| write_note(d, &now)) {
        warn!(vm = guard.vm, %error, "its note can't be written");
    }
}
