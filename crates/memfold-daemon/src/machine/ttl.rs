//! Time to live of a VM: the VM is switched off when nobody extends it in time. A program that
//! starts VMs extends them again and again, so that they end with the program, however it ends.

use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::error::{DaemonError, refused};
use crate::machine::Machine;

impl Machine {
    /// Begins the VM's time to live again.
    pub(crate) fn extend(&self) {
        *self.extended.lock() = Instant::now();
    }

    /// Begins the VM's time to live again.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] if the VM has none.
    pub(crate) fn extend_ttl(&self) -> Result<(), DaemonError> {
        if self.settings().ttl_s.is_none() {
            let name = self.name();
            return Err(refused(
                format!("VM '{name}' has no time to live"),
                format!("set one: memfold vm set {name} ttl_s=SECONDS"),
            ));
        }
        self.extend();
        Ok(())
    }

    /// Returns the time until the VM is switched off; `None`: the VM has no time to live.
    pub(crate) fn ttl_left(&self) -> Option<Duration> {
        let ttl = Duration::from_secs(self.settings().ttl_s?.get().into());
        Some(ttl.saturating_sub(self.extended.lock().elapsed()))
    }

    /// Switches the VM off if its time to live has run out. A VM that is being saved is left alone
    /// until the save ends.
    pub(super) fn end_outlived(&self) {
        if !self.ttl_left().is_some_and(|left| left.is_zero()) {
            return;
        }
        let Some(_saving) = self.try_save() else {
            return;
        };
        match self.stop(Duration::ZERO) {
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
