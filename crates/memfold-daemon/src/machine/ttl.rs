//! Time to live of a VM: the VM is switched off when nobody extends it in time. A program that
//! starts VMs extends them again and again, so that they end with the program, however it ends.

use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::error::{DaemonError, refused};
use crate::machine::Machine;

impl Machine {
    /// Begins the VM's time to live again. Returns `false` if the VM is being switched off.
    pub(crate) fn extend(&self) -> bool {
        let mut extended = self.extended.lock();
        if extended.is_some() {
            *extended = Some(Instant::now());
        }
        extended.is_some()
    }

    /// Begins the VM's time to live again.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] if the VM has none, or is being switched off.
    pub(crate) fn extend_ttl(&self) -> Result<(), DaemonError> {
        if self.settings().ttl_s.is_none() {
            let name = self.name();
            return Err(refused(
                format!("VM '{name}' has no time to live"),
                format!("set one: memfold vm set {name} ttl_s=SECONDS"),
            ));
        }
        if !self.extend() {
            return Err(refused(
                format!(
                    "the time to live of VM '{}' ran out, and it is being switched off",
                    self.name()
                ),
                "start the VM again, with a longer time to live",
            ));
        }
        Ok(())
    }

    /// Returns the time until the VM is switched off; `None`: the VM has no time to live.
    pub(crate) fn ttl_left(&self) -> Option<Duration> {
        let ttl = Duration::from_secs(self.settings().ttl_s?.get().into());
        let extended = *self.extended.lock();
        Some(extended.map_or(Duration::ZERO, |since| ttl.saturating_sub(since.elapsed())))
    }

    /// Switches the VM off if its time to live has run out. A VM that is being saved is left alone
    /// until the save ends.
    pub(super) fn end_outlived(&self) {
        let Some(ttl_s) = self.settings().ttl_s else {
            return;
        };
        let ttl = Duration::from_secs(ttl_s.get().into());
        if !self.ttl_left().is_some_and(|left| left.is_zero()) {
            return;
        }
        let Some(_saving) = self.try_save() else {
            return;
        };
        // Stopping can wait for QEMU's monitor. Whoever extends the VM from now on is refused.
        let is_over = |since: &mut Instant| since.elapsed() >= ttl;
        let Some(since) = self.extended.lock().take_if(is_over) else {
            return;
        };
        let stopped = self.stop(Duration::ZERO);
        if stopped.is_err() {
            *self.extended.lock() = Some(since);
        }
        match stopped {
            Ok(_) => info!(
                vm = self.name(),
                ttl_s = self.settings().ttl_s,
                "VM switched off, because its time to live ran out"
            ),
            Err(error) => warn!(
                vm = self.name(),
                error = &error as &dyn std::error::Error,
                "cannot switch off a VM whose time to live ran out; retrying"
            ),
        }
    }
}
