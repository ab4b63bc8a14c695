//! Watches the copy on this host's disk of a swap disk that is on another host's RAM. Processes
//! QEMU's events about failed writes. After a time in which no daemon received such events, has the
//! copy compared with the written data.
//!
//! The relay, a process between QEMU and the lending host, knows which blocks were written, and
//! compares them ([`compare`](memfold_lend::relay::compare)). Until then, the copy may contain old
//! data, which the VM would read if the lender were lost.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use memfold_lend::graph::{self, Borrowing, Failed};
use memfold_lend::relay::asks::{Answer, Ask};
use memfold_lend::relay::start::Asked;
use tracing::{error, info, warn};

use crate::machine::Machine;
use crate::swap_disks::guard::Guard;
use crate::swap_disks::note::note;
use crate::swap_disks::relays::{wait_as_usual, wait_longer};

/// Pause before a failed verification of the copy is repeated.
const AGAIN: Duration = Duration::from_secs(60);

/// State of the verification of a swap disk's copy.
#[derive(Debug, Default)]
pub(crate) struct Comparison {
    asked: Option<Asked>,
    /// Number of the monitor connection at the request. If it is the same at the end, this daemon
    /// received all events about failed writes in between.
    heard_on: Option<u64>,
    tried: Option<Instant>,
    /// Whether the relay's version cannot verify; the whole disk is then copied when it is
    /// returned.
    is_old: bool,
}

impl Comparison {
    /// Requests the verification of the disk's copy from the relay if it is needed, and processes
    /// the relay's answer.
    pub fn step(&mut self, machine: &Machine, guard: &Guard) {
        let borrowing = guard.borrowing();
        let relay = guard.relays().into_iter().next();
        let copy = borrowing.copy.as_ref().filter(|_| !borrowing.copy_failed);
        let (true, Some(relay), Some(copy)) = (borrowing.copy_unwatched, relay, copy) else {
            self.asked = None;
            return;
        };
        let heard_on = guard.state.lock().heard_on;
        if heard_on.is_none() || self.asked.is_some() && heard_on != self.heard_on {
            self.asked = None;
            self.tried = None;
            return;
        }
        let Some(asked) = &mut self.asked else {
            if !self.is_old && self.tried.is_none_or(|tried| tried.elapsed() >= AGAIN) {
                self.tried = Some(Instant::now());
                self.heard_on = heard_on;
                match relay.ask(&Ask::Compare(copy.clone())) {
                    Ok(asked) => self.asked = Some(asked),
                    Err(error) => {
                        self.is_old = error.kind() == ErrorKind::NotFound;
                        warn!(vm = guard.vm, %error, "cannot ask the relay process (between QEMU and the lender) to verify the swap disk's copy on this host; run 'memfold return', then 'memfold borrow'");
                    }
                }
            }
            return;
        };
        let Some(answer) = asked.answer().transpose() else {
            return;
        };
        self.asked = None;
        let failed = match answer {
            Ok(Answer::Same) => {
                info!(
                    vm = guard.vm,
                    "swap disk's copy on this host verified: the copy contains every write"
                );
                false
            }
            Ok(Answer::Differs(block)) => {
                error!(
                    vm = guard.vm,
                    block,
                    "swap disk's copy on this host lacks writes made while the daemon was away; free space for a new copy"
                );
                true
            }
            Ok(other) => {
                warn!(vm = guard.vm, answer = ?other, "relay process (between QEMU and the lender) cannot compare the swap disk's copy on this host with the written data; retrying in 60 s");
                return;
            }
            Err(error) => {
                warn!(vm = guard.vm, %error, "relay process (between QEMU and the lender) did not say whether the swap disk's copy on this host is complete; retrying in 60 s");
                return;
            }
        };
        self.tried = None;
        let mut state = guard.state.lock();
        if failed {
            state.borrowing.copy_failed = true;
        } else {
            state.borrowing.copy_unwatched = false;
        }
        drop(state);
        changed(machine, guard, &borrowing);
    }
}

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
    changed(machine, guard, &before);
}

/// Takes a copy on this host that has failed out of QEMU's block nodes, before anything that may
/// take long. If the lender is lost meanwhile, reads then fail instead of returning the older data
/// of the copy. `is_out`: whether the copy was taken out before.
pub(crate) fn take_failed_copy_out(machine: &Machine, guard: &Guard, is_out: &mut bool) {
    if *is_out || !guard.borrowing().must_drop_copy() {
        return;
    }
    // A thread that moves the disk may hold the right for minutes, and leases must be renewed.
    let Some(_right) = machine.try_swap_right() else {
        return;
    };
    let borrowing = guard.borrowing();
    // After a failure, the next check tries again. The move to a new file tries, too, and logs it.
    *is_out = !guard.is_stopped()
        && borrowing.must_drop_copy()
        && graph::take_copy_out(&mut machine.monitor(), &borrowing).is_ok();
}

/// Records a loan that differs from `before`. If lent RAM has the only copy that is known to be
/// complete from now on, extends the relays' timeout. Logs a failure of the copy on this host.
fn changed(machine: &Machine, guard: &Guard, before: &Borrowing) {
    let now = guard.borrowing();
    if now == *before {
        return;
    }
    if now.copy_failed && !before.copy_failed {
        error!(
            vm = guard.vm,
            "swap disk's copy on this host failed; free space for a new copy, and keep the lender running meanwhile"
        );
    }
    match new_wait(before, &now) {
        Some(RelayWait::Longer) => wait_longer(guard),
        Some(RelayWait::AsUsual) => wait_as_usual(guard),
        None => {}
    }
    note(machine, &now);
}

/// How long relays wait for a lender that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RelayWait {
    Longer,
    AsUsual,
}

/// Returns how long relays must wait from now on; `None` if nothing changes. `before` and `now`:
/// the loan before and after a change of the copy on this host.
fn new_wait(before: &Borrowing, now: &Borrowing) -> Option<RelayWait> {
    let has_failed = now.copy_failed && !before.copy_failed;
    let is_new = has_failed || now.copy_unwatched != before.copy_unwatched;
    let wait = if now.has_whole_copy() {
        RelayWait::AsUsual
    } else {
        RelayWait::Longer
    };
    (now.copy.is_some() && is_new).then_some(wait)
}

#[cfg(test)]
mod tests {
    use memfold_lend::Durability;
    use memfold_lend::graph::Phase;

    use super::*;

    #[test]
    fn relays_wait_longer_while_the_copy_on_disk_is_not_known_to_be_complete() {
        let loan = |copy_failed, copy_unwatched| Borrowing {
            generation: 1,
            durability: Durability::Disk,
            bytes: 1,
            parts: Vec::new(),
            copy: Some("/copy".into()),
            copy_failed,
            copy_unwatched,
            phase: Phase::Lent,
            by_itself: false,
        };
        let [whole, unwatched, failed, both] = [
            loan(false, false),
            loan(false, true),
            loan(true, false),
            loan(true, true),
        ];
        for (before, now, wait) in [
            (&whole, &unwatched, Some(RelayWait::Longer)),
            (&unwatched, &whole, Some(RelayWait::AsUsual)),
            (&whole, &failed, Some(RelayWait::Longer)),
            (&unwatched, &both, Some(RelayWait::Longer)),
            (&unwatched, &unwatched, None),
            (&failed, &failed, None),
        ] {
            assert_eq!(new_wait(before, now), wait, "{before:?} {now:?}");
        }
    }
}
