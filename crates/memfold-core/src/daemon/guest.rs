//! A QEMU process as the fold engine sees it.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use memfold_wire::library::{Order, Reply};
use rustix::process::Pid;

use crate::fold::{Guest, GuestError};
use crate::vm::{LibraryError, LibraryLink, Qmp, VmConditions};

/// How long an answer about block nodes holds. A device that is plugged meanwhile is not in use by its guest that soon.
const CONDITIONS_HOLD: Duration = Duration::from_secs(1);

/// QEMU's monitor, shared by the threads that need it.
#[derive(Debug)]
pub(super) struct Monitor(Mutex<Qmp>);

impl Monitor {
    pub fn new(qmp: Qmp) -> Self {
        Self(Mutex::new(qmp))
    }

    /// The monitor, for as long as the guard lives.
    pub fn lock(&self) -> MutexGuard<'_, Qmp> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same if nobody has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, Qmp>> {
        match self.0.try_lock() {
            Ok(qmp) => Some(qmp),
            Err(TryLockError::Poisoned(qmp)) => Some(qmp.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The VM behind the engine's orders.
pub(super) struct QemuGuest {
    pid: Pid,
    library: LibraryLink,
    monitor: Arc<Monitor>,
    live: (Instant, bool),
    lost: Arc<AtomicBool>,
}

impl QemuGuest {
    /// `lost` is set when the library does not answer in time or nonsense: this connection is of no use any more.
    pub fn new(
        pid: Pid,
        library: LibraryLink,
        monitor: Arc<Monitor>,
        conditions: &VmConditions,
        lost: Arc<AtomicBool>,
    ) -> Self {
        let live = library.facts().can_write_protect && conditions.may_refold_live();
        Self {
            pid,
            library,
            monitor,
            live: (Instant::now(), live),
            lost,
        }
    }
}

impl Guest for QemuGuest {
    fn pid(&self) -> Pid {
        self.pid
    }

    fn order(
        &mut self,
        order: &Order,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Reply, GuestError> {
        match self.library.order(order, descriptor) {
            Ok(reply) => Ok(reply),
            Err(LibraryError::Refused(reason)) => Ok(Reply::Error { reason }),
            Err(error) => {
                self.lost.store(true, Ordering::Release);
                Err(GuestError::Library(io::Error::other(error)))
            }
        }
    }

    fn refold_live(&mut self) -> bool {
        if self.library.facts().can_write_protect && self.live.0.elapsed() > CONDITIONS_HOLD {
            // A save may hold the monitor for long, and other VMs wait for this thread. What isn't known is not allowed.
            let Some(mut monitor) = self.monitor.try_lock() else {
                return false;
            };
            let now = crate::vm::conditions::read_refold_live(&mut monitor);
            // QEMU that doesn't answer gets no benefit of the doubt.
            self.live = (Instant::now(), now.is_ok_and(|c| c.may_refold_live()));
        }
        self.live.1
    }

    fn can_stop(&self) -> bool {
        self.library.facts().can_stop
    }
}
