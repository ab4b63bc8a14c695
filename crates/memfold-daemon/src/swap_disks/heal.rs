//! Reacts when a host that lends RAM to a swap disk is lost or wants its memory back: QEMU goes on
//! without that host.

use std::time::Instant;

use memfold_lend::graph;
use tracing::{error, info, warn};

use crate::error::DaemonError;
use crate::leases::ms;
use crate::machine::Machine;
use crate::swap_disks::SwapDisks;
use crate::swap_disks::failures::hear;
use crate::swap_disks::guard::Guard;
use crate::swap_disks::note::note;
use crate::swap_disks::relays::{hear_end_of, wait_longer};
use crate::swap_disks::renew::renew_leases;

impl SwapDisks {
    /// Removes a part of a loan that cannot be reached from QEMU's block nodes. QEMU already
    /// continues without the part. If one copy is left, the relays get a longer timeout.
    pub(super) fn heal(
        &self,
        machine: &Machine,
        guard: &Guard,
        part: usize,
    ) -> Result<(), DaemonError> {
        let began = Instant::now();
        let right = machine.swap_right();
        self.reconcile(machine, guard, &right)?;
        if guard.is_stopped() || guard.borrowing().parts[part].lost {
            return Ok(());
        }
        guard.cut(part);
        hear(machine, guard);
        let borrowing = guard.borrowing();
        let lost = &borrowing.parts[part];
        let lenders = lost.lenders();
        let why = hear_end_of(&self.leases, machine.name(), lost);
        if borrowing.is_alone(part) {
            if borrowing.copy_failed {
                // The copy on this host lacks writes. Reads must fail rather than return older
                // data.
                graph::take_copy_out(&mut machine.monitor(), &borrowing)?;
            }
            error!(
                vm = machine.name(),
                lenders,
                durability = ?borrowing.durability,
                copy_failed = borrowing.copy_failed,
                "swap disk lost: its lender failed, and no other copy exists; stop the VM and start it again"
            );
        } else {
            graph::take_out(&mut machine.monitor(), &borrowing, part)?;
        }
        let mut state = guard.state.lock();
        state.borrowing.parts[part].lost = true;
        state.wires[part] = None;
        let now = state.borrowing.clone();
        drop(state);
        note(machine, &now);
        if now.hangs_on_one() {
            wait_longer(guard);
        }
        self.leases
            .release(lost.stripes().map(|stripe| stripe.lease));
        if now.has_copy() && now.copy_unwatched {
            error!(
                vm = machine.name(),
                "swap disk now uses a copy that was not verified after a daemon restart; reboot the guest if the host's kernel log shows errors of the copy's disk"
            );
        }
        if !borrowing.is_alone(part) {
            warn!(
                vm = machine.name(),
                lenders,
                why,
                healed_ms = ms(began),
                "lender no longer used; swap disk continues on its other copy"
            );
        }
        Ok(())
    }

    /// Renews the leases of a loan, and moves the disk back if a lender recalls its memory.
    pub(super) fn renew(&self, machine: &Machine, guard: &Guard) -> Result<(), DaemonError> {
        let wanted = renew_leases(&self.leases, guard);
        if wanted && !guard.is_stopped() {
            info!(
                vm = machine.name(),
                "lender needs its memory back; moving the swap disk to this host's disk"
            );
            machine.comes_home(false);
            self.return_as(machine.name(), false)?;
        }
        Ok(())
    }
}
