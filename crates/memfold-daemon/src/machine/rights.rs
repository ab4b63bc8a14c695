//! Rights that one at a time has of a VM.

use std::time::Duration;

use parking_lot::MutexGuard;

use crate::error::DaemonError;
use crate::locks::{Rank, Ranked};
use crate::machine::Machine;

/// How long a request waits until nobody saves a VM or changes what it maps.
const RIGHT_TIMEOUT: Duration = Duration::from_secs(30);

/// The right to save a VM or to change what it maps, as long as this is kept.
#[derive(Debug)]
pub(crate) struct SaveRight<'a> {
    _right: MutexGuard<'a, ()>,
    _rank: Ranked,
}

/// The right to change what a VM's swap disk uses, as long as this is kept.
#[derive(Debug)]
pub(crate) struct SwapRight<'a> {
    _right: MutexGuard<'a, ()>,
    _rank: Ranked,
}

impl Machine {
    /// The right to save it or to change what it maps, as soon as nobody else has it.
    pub fn save_right(&self) -> SaveRight<'_> {
        SaveRight {
            _rank: Ranked::begin(Rank::Save),
            _right: self.saving.lock(),
        }
    }

    /// The right to save it or to change what it maps, for a request. It does not wait longer than
    /// [`RIGHT_TIMEOUT`]: whoever has it may wait for a guest that does not answer.
    pub fn save_right_soon(&self) -> Result<SaveRight<'_>, DaemonError> {
        let rank = Ranked::begin(Rank::Save);
        let right = self.saving.try_lock_for(RIGHT_TIMEOUT);
        let right = right.ok_or_else(|| DaemonError::Busy {
            why: format!(
                "VM '{}' is being saved, or its segments are being changed",
                self.name()
            ),
            fix: "try again when the save or change is complete".into(),
        })?;
        Ok(SaveRight {
            _right: right,
            _rank: rank,
        })
    }

    /// The right to change what its swap disk uses. A VM that has one isn't saved, so nobody waits
    /// here for who saves, or copies files out of the guest for an hour: a lender that needs its
    /// memory doesn't either.
    pub fn swap_right(&self) -> SwapRight<'_> {
        SwapRight {
            _rank: Ranked::begin(Rank::Swap),
            _right: self.swapping.lock(),
        }
    }

    /// The right to save it, which one at a time has.
    pub fn try_save(&self) -> Option<SaveRight<'_>> {
        Some(SaveRight {
            _rank: Ranked::begin(Rank::Save),
            _right: self.saving.try_lock()?,
        })
    }
}
