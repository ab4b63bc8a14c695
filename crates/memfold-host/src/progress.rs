//! Progress of a long operation, which other threads can read while it runs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Progress of one step of an operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Step {
    /// Name of the step.
    pub step: String,
    /// Bytes of the step that are done, of RAM or of disks.
    pub done_bytes: u64,
    /// Bytes of the whole step; 0: unknown.
    pub total_bytes: u64,
}

/// Progress of an operation with consecutive steps.
#[derive(Debug, Default)]
pub struct Progress {
    step: Mutex<(&'static str, u64)>,
    done: AtomicU64,
}

impl Progress {
    /// Begins a step of `total_bytes` bytes (0: unknown).
    pub fn begin(&self, step: &'static str, total_bytes: u64) {
        let mut now = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        self.done.store(0, Ordering::Relaxed);
        *now = (step, total_bytes);
    }

    /// Adds `bytes` to the bytes of the current step that are done.
    pub fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the present progress.
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
