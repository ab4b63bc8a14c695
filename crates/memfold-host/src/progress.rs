//! Progress of a long operation, which other threads can read while it runs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How far a step has come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Step {
    /// What is being done.
    pub step: String,
    /// Bytes that it is done for: of RAM, or of disks.
    pub done_bytes: u64,
    /// Bytes that it is to be done for; 0: that is not known.
    pub total_bytes: u64,
}

/// The steps of something long, one after the other.
#[derive(Debug, Default)]
pub struct Progress {
    step: Mutex<(&'static str, u64)>,
    done: AtomicU64,
}

impl Progress {
    /// Begins a step of so many bytes; 0: nobody knows how many.
    pub fn begin(&self, step: &'static str, total_bytes: u64) {
        let mut now = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        self.done.store(0, Ordering::Relaxed);
        *now = (step, total_bytes);
    }

    /// So many bytes more are done.
    pub fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// How far it is now.
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
