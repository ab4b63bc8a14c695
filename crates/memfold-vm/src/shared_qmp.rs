//! A VM's QMP connection that several threads use, one at a time.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::qmp::Qmp;

/// Longest time to wait for the monitor while other threads use it. Each of their commands has its
/// own deadline.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// A QMP connection, shared by several threads.
#[derive(Debug)]
pub struct SharedQmp {
    qmp: Mutex<Qmp>,
    path: PathBuf,
}

/// The locked monitor of a VM. Dropping the guard unlocks the monitor.
#[derive(Debug)]
pub enum QmpGuard<'a> {
    /// The monitor is locked.
    Locked(MutexGuard<'a, Qmp>),
    /// The monitor was not free in time; all commands fail.
    Busy(Qmp),
}

impl SharedQmp {
    /// Shares a connection.
    pub fn new(qmp: Qmp) -> Self {
        let path = qmp.path().to_owned();
        let qmp = Mutex::new(qmp);
        Self { qmp, path }
    }

    /// Locks the monitor. If others use the monitor for over 30 s, all commands of the guard fail
    /// with [`QmpError::Busy`](crate::qmp::QmpError::Busy), so no thread waits forever for a QEMU
    /// that hangs.
    pub fn lock(&self) -> QmpGuard<'_> {
        self.lock_within(LOCK_TIMEOUT)
    }

    /// Locks the monitor as [`SharedQmp::lock`] does, with another time limit.
    pub fn lock_within(&self, limit: Duration) -> QmpGuard<'_> {
        let locked = self.qmp.try_lock_for(limit).map(QmpGuard::Locked);
        locked.unwrap_or_else(|| QmpGuard::Busy(Qmp::busy(&self.path, limit)))
    }

    /// Locks the monitor if it is free; returns `None` if not.
    pub fn try_lock(&self) -> Option<QmpGuard<'_>> {
        self.qmp.try_lock().map(QmpGuard::Locked)
    }
}

impl Deref for QmpGuard<'_> {
    type Target = Qmp;

    fn deref(&self) -> &Qmp {
        match self {
            Self::Locked(qmp) => qmp,
            Self::Busy(qmp) => qmp,
        }
    }
}

impl DerefMut for QmpGuard<'_> {
    fn deref_mut(&mut self) -> &mut Qmp {
        match self {
            Self::Locked(qmp) => qmp,
            Self::Busy(qmp) => qmp,
        }
    }
}
