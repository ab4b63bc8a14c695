//! Exclusive rights to operations on one VM.

use std::time::Duration;

use crate::error::DaemonError;
use crate::locks::{SaveRight, SwapRight};
use crate::machine::Machine;

/// Longest time that a request waits for the right to save a VM.
const RIGHT_TIMEOUT: Duration = Duration::from_secs(30);

impl Machine {
    /// Takes the right to save the VM or to change its memory mappings. Waits without a time limit.
    pub fn save_right(&self) -> SaveRight<'_> {
        SaveRight::take(|| self.saving.lock())
    }

    /// Takes the right to save the VM or to change its memory mappings, for a user's request.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Busy`] after [`RIGHT_TIMEOUT`]: the holder may wait for a guest that does not
    /// answer.
    pub fn save_right_soon(&self) -> Result<SaveRight<'_>, DaemonError> {
        let right = SaveRight::try_take(|| self.saving.try_lock_for(RIGHT_TIMEOUT));
        right.ok_or_else(|| DaemonError::Busy {
            why: format!(
                "VM '{}' is being saved, or its segments are being changed",
                self.name()
            ),
            fix: "try again when the save or change is complete".into(),
        })
    }

    /// Takes the right to change the VM's swap disk. This right is separate from the right to save:
    /// a lender that needs its memory back does not wait for an hour-long copy of files from the
    /// guest. (A VM with a swap disk is not saved, so the two do not conflict.)
    pub fn swap_right(&self) -> SwapRight<'_> {
        SwapRight::take(|| self.swapping.lock())
    }

    /// Takes the right to save the VM if it is free.
    pub fn try_save(&self) -> Option<SaveRight<'_>> {
        SaveRight::try_take(|| self.saving.try_lock())
    }
}
