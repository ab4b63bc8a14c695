//! A VM's QMP connection that several threads use, one at a time.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::qmp::Qmp;

/// Longest time to wait for the monitor while other threads use it. Each of their commands has its
/// own deadline.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// A QMP connection, shared by several threads.
#[derive(Debug)]
pub struct SharedQmp {
    /// `None` while a guard has the connection.
    qmp: Mutex<Option<Qmp>>,
    free: Condvar,
    path: PathBuf,
}

/// The connection, locked. Dropping the guard unlocks it.
#[derive(Debug)]
pub struct QmpGuard<'a> {
    /// `None` if the monitor was not free in time; all commands then fail.
    monitor: Option<&'a SharedQmp>,
    qmp: Qmp,
}

impl SharedQmp {
    /// Shares a connection.
    pub fn new(qmp: Qmp) -> Self {
        let path = qmp.path().to_owned();
        Self {
            qmp: Mutex::new(Some(qmp)),
            free: Condvar::new(),
            path,
        }
    }

    /// Locks the monitor. If others use the monitor for over 30 s, all commands of the guard fail
    /// with [`QmpError::Busy`](crate::qmp::QmpError::Busy), so no thread waits forever for a QEMU
    /// that hangs.
    pub fn lock(&self) -> QmpGuard<'_> {
        self.lock_within(LOCK_TIMEOUT)
    }

    /// Locks the monitor as [`SharedQmp::lock`] does, with another time limit.
    pub fn lock_within(&self, limit: Duration) -> QmpGuard<'_> {
        let mut qmp = self.qmp.lock();
        self.free
            .wait_while_for(&mut qmp, |qmp| qmp.is_none(), limit);
        let taken = qmp.take();
        drop(qmp);
        let monitor = taken.is_some().then_some(self);
        let qmp = taken.unwrap_or_else(|| Qmp::busy(&self.path, limit));
        QmpGuard { monitor, qmp }
    }

    /// Locks the monitor if it is free; returns `None` if not.
    pub fn try_lock(&self) -> Option<QmpGuard<'_>> {
        let qmp = self.qmp.lock().take()?;
        Some(QmpGuard {
            monitor: Some(self),
            qmp,
        })
    }
}

impl Deref for QmpGuard<'_> {
    type Target = Qmp;

    fn deref(&self) -> &Qmp {
        &self.qmp
    }
}

impl DerefMut for QmpGuard<'_> {
    fn deref_mut(&mut self) -> &mut Qmp {
        &mut self.qmp
    }
}

impl Drop for QmpGuard<'_> {
    fn drop(&mut self) {
        if let Some(monitor) = self.monitor {
            let qmp = std::mem::replace(&mut self.qmp, Qmp::busy(&monitor.path, Duration::ZERO));
            *monitor.qmp.lock() = Some(qmp);
            monitor.free.notify_one();
        }
    }
}
