//! Activates the swap disk in guests, after they have booted.

use std::sync::Arc;
use std::time::Duration;

use memfold_host::chain;
use memfold_vm::swap;
use tracing::{info, warn};

use crate::machine::{Machine, text};

/// Time limit for a guest to activate its swap disk.
const SWAP_ON_TIMEOUT: Duration = Duration::from_secs(60);

/// Has a guest activate its swap disk as soon as its agent answers.
pub(crate) fn swap_on_when_booted(machine: &Arc<Machine>) {
    if machine.vm().spec().is_none_or(|spec| spec.swap.is_none()) {
        return;
    }
    machine.on_agent_ready("swap-on", |machine| {
        let vm = machine.name();
        let said = match machine.run(&swap::swap_on(), SWAP_ON_TIMEOUT) {
            Ok(done) if done.code == 0 => {
                info!(vm, "swap disk enabled in the guest");
                return;
            }
            Ok(done) => text(&done.stderr),
            Err(error) => chain(&error),
        };
        warn!(
            vm,
            said, "swap disk not enabled in the guest; run 'swapon LABEL=memfold-swap' there"
        );
    });
}
