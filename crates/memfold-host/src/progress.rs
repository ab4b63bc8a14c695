//! Counts how far a long operation, such as a save, has come. Other threads read the count while
//! the operation runs, to show it to users.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Progress of one step of a long operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Step {
    /// Name of the operation's current step.
    pub step: String,
    /// Bytes of RAM or of disks that the step has processed; 0 if `total_bytes` is 0.
    pub done_bytes: u64,
    /// Bytes of RAM or of disks that the step has to process; 0: unknown.
    pub total_bytes: u64,
}

/// Progress of a long operation that consists of consecutive steps.
#[derive(Debug, Default)]
pub struct Progress {
    step: Mutex<(&'static str, u64)>,
    done: AtomicU64,
}

impl Progress {
    /// Begins the operation's next step, which has to process `total_bytes` bytes (0: unknown).
    pub fn begin(&self, step: &'static str, total_bytes: u64) {
        let mut now = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        self.done.store(0, Ordering::Relaxed);
        *now = (step, total_bytes);
    }

    /// Records that the current step has processed `bytes` more bytes.
    pub fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the progress of the operation's current step.
    #[must_use]
    pub fn now(&self) -> Step {
        let (step, total_bytes) = *self.step.lock().unwrap_or_else(PoisonError::into_inner);
        Step {
            step: step.to_owned(),
            done_bytes: self.done.load(Ordering::Relaxed).min(total_bytes),
            total_bytes,
        }
    }
}
