//! Lets several threads of the daemon use a VM's one QMP connection to QEMU, one thread at a time.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::qmp::Qmp;

/// Longest time to wait for the monitor while other threads use it. Each of their commands has its
/// own deadline.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// A VM's QMP connection that several threads share.
#[derive(Debug)]
pub struct SharedQmp {
    qmp: Mutex<Qmp>,
    path: PathBuf,
}

/// The right to use a VM's shared QMP connection. Dropping the guard lets other threads use it.
#[derive(Debug)]
pub enum QmpGuard<'a> {
    /// The caller has the connection.
    Locked(MutexGuard<'a, Qmp>),
    /// Other threads used the connection for too long. All commands of this guard fail.
    Busy(Qmp),
}

impl SharedQmp {
    /// Makes a connection usable by several threads.
    pub fn new(qmp: Qmp) -> Self {
        let path = qmp.path().to_owned();
        let qmp = Mutex::new(qmp);
        Self { qmp, path }
    }

    /// Waits until no other thread uses the connection. If that takes over 30 s, all commands of
    /// the guard fail with [`QmpError::Busy`](crate::qmp::QmpError::Busy), so no thread waits
    /// forever for a QEMU that hangs.
    pub fn lock(&self) -> QmpGuard<'_> {
        self.lock_within(LOCK_TIMEOUT)
    }

    /// Waits for the connection like [`SharedQmp::lock`], but for `limit` instead of 30 s.
    pub fn lock_within(&self, limit: Duration) -> QmpGuard<'_> {
        let locked = self.qmp.try_lock_for(limit).map(QmpGuard::Locked);
        locked.unwrap_or_else(|| QmpGuard::Busy(Qmp::busy(&self.path, limit)))
    }

    /// Returns the connection if no other thread uses it now, else `None`.
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
