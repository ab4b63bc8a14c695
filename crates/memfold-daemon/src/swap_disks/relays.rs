//! Starts, supervises and ends relay processes. A relay passes the requests of QEMU to a VM's swap
//! disk on to the host whose RAM holds that disk.

use std::fs::File;
use std::io;
use std::time::Duration;

use memfold_host::{chain, own_program};
use memfold_lend::graph::{self, Borrowing, Part};
use memfold_lend::relay::asks::Ask;
use memfold_lend::relay::start::{self, RelayError, Running};
use memfold_lend::relay::{Orders, Why};
use memfold_lend::wire::{LAST_PATIENCE, Wire, patience};
use memfold_lend::{Address, Endpoint};
use memfold_vm::VmDirectory;
use tracing::{error, warn};

use crate::error::{DaemonError, refused, state_error};
use crate::leases::Leases;
use crate::machine::Machine;
use crate::swap_disks::guard::Guard;

/// Starts a relay to the lenders of a loan's part, and connects QEMU to the relay. Returns the
/// relay and the connection.
pub(crate) fn connect(
    machine: &Machine,
    directory: &VmDirectory,
    borrowing: &Borrowing,
    number: usize,
    endpoints: &[Endpoint],
) -> Result<(Running, Wire), DaemonError> {
    let failed = state_error(directory.path());
    let log = directory.relay_log();
    let log = File::options().create(true).append(true).open(log);
    let patience = patience(borrowing.durability, number);
    let orders = Orders {
        socket: directory.relay(borrowing.generation, number),
        bytes: borrowing.bytes,
        lenders: endpoints.to_vec(),
        patience_ms: u64::try_from(patience.as_millis()).unwrap_or(u64::MAX),
    };
    let part = &borrowing.parts[number];
    let program = own_program().map_err(failed)?;
    let running = start::start(&program, &orders, log.map_err(failed)?)
        .map_err(|error| relay_failed(&error, part))?;
    let address = Address::Unix(running.socket.clone());
    let node = borrowing.lent(number);
    let connected = graph::connect(&mut machine.monitor(), &node, &running.socket);
    let ended = || {
        let lenders = part.lenders();
        refused(
            format!("the connection to the relay of lenders {lenders} ended right after it began"),
            format!("try again; {} may say why", directory.relay_log().display()),
        )
    };
    let wire = connected
        .map_err(DaemonError::from)
        .and_then(|()| Wire::find(machine.vm().process(), &address).map_err(failed))
        .and_then(|wire| wire.ok_or_else(ended));
    if wire.is_err() {
        // The relay has no client, or one that is about to disconnect.
        drop(running.end());
    }
    Ok((running, wire?))
}

fn relay_failed(error: &RelayError, part: &Part) -> DaemonError {
    let fix = "the log of the lender's daemon says why; 'memfold leases' shows other offers";
    match error {
        RelayError::Failed {
            lender: Some(lender),
            why,
        } => {
            let name = part.stripes().nth(*lender).map(|s| s.lender.clone());
            let name = name.unwrap_or_default();
            DaemonError::LenderFailed {
                why: format!("cannot use lender '{name}': {why}"),
                lender: name,
                fix: fix.into(),
            }
        }
        error => refused(
            format!("no relay to {}: {}", part.lenders(), chain(error)),
            "relay.log in the VM's directory may say more",
        ),
    }
}

/// Extends the relays' timeout because lent RAM has the only copy, or the only one that is known to
/// be complete: a guest that waits for a minute loses less than a guest whose swap disk is lost.
pub(crate) fn wait_longer(guard: &Guard) {
    for relay in guard.relays() {
        if let Err(error) = change_patience(&relay, LAST_PATIENCE) {
            warn!(vm = guard.vm, %error, "cannot tell the relay process to wait longer for the lender, which has the only complete copy of the swap disk; run 'memfold return'");
        }
    }
}

/// Sets the relays' timeout to its usual value again, because there is another complete copy.
pub(crate) fn wait_as_usual(guard: &Guard) {
    let borrowing = guard.borrowing();
    for (number, part) in borrowing.reached() {
        let patience = patience(borrowing.durability, number);
        let told = part
            .relay
            .as_ref()
            .map(|relay| change_patience(relay, patience));
        if let Some(Err(error)) = told {
            warn!(vm = guard.vm, %error, "cannot tell the relay process to leave a silent lender after the usual time again; no action is needed");
        }
    }
}

/// Tells a relay how long to wait for a lender's answer. The relay's answer to this request is not
/// needed.
fn change_patience(relay: &Running, patience: Duration) -> io::Result<()> {
    let ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
    relay.ask(&Ask::Patience(ms)).map(drop)
}

/// Collects the result of a part's relay. Returns why the relay ended, as text; `None` if the part
/// has no relay or the relay left no result. A lender that served wrong bytes is distrusted from
/// then on.
pub(crate) fn hear_end_of(leases: &Leases, vm: &str, part: &Part) -> Option<String> {
    let ended = part.relay.as_ref()?.end()?;
    let stripe = ended.lender.and_then(|number| part.stripes().nth(number));
    let lender = stripe.map(|stripe| &stripe.lender);
    let Some(lender) = lender else {
        warn!(
            vm,
            what = ended.what,
            "relay process between QEMU and the lender ended; see relay.log in the VM's directory"
        );
        return Some(ended.what);
    };
    if ended.why == Why::Lied {
        error!(
            vm,
            lender,
            what = ended.what,
            "lender served wrong bytes; the VM did not get these bytes, and the lender is not used for an hour"
        );
        leases.distrust().lied(lender, vm, &ended.what);
    }
    Some(format!("lender '{lender}': {}", ended.what))
}

/// Collects the results of a loan's relays and releases the loan's leases. Called when nothing uses
/// the loan any more.
pub(crate) fn let_go(leases: &Leases, guard: &Guard) {
    let borrowing = guard.borrowing();
    for part in &borrowing.parts {
        hear_end_of(leases, &guard.vm, part);
    }
    leases.release(borrowing.leases());
}
