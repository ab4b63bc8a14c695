//! A QEMU process as the fold engine sees it.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_wire::library::{Order, Reply};
use parking_lot::{Condvar, Mutex};
use rustix::process::Pid;

use memfold_fold::{Guest, GuestError, Refold};
use memfold_vm::{LibraryError, LibraryLink, Qmp, VmConditions};

/// How long an answer about block nodes holds. A device that is plugged meanwhile is not in use by
/// its guest that soon.
const CONDITIONS_HOLD: Duration = Duration::from_secs(1);

/// Longest time that one waits for the monitor while others use it. Each of their commands has a
/// deadline of its own.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// QEMU's monitor, shared by the threads that need it.
#[derive(Debug)]
pub(crate) struct Monitor {
    /// `None`: somebody has it.
    qmp: Mutex<Option<Qmp>>,
    free: Condvar,
    path: PathBuf,
}

/// The monitor, which goes back when this is dropped.
#[derive(Debug)]
pub(crate) struct MonitorGuard<'a> {
    /// `None`: nobody let go of the monitor in time, and what is asked fails.
    monitor: Option<&'a Monitor>,
    qmp: Qmp,
}

impl Monitor {
    pub fn new(qmp: Qmp) -> Self {
        let path = qmp.path().to_owned();
        Self {
            qmp: Mutex::new(Some(qmp)),
            free: Condvar::new(),
            path,
        }
    }

    /// The monitor, for as long as the guard lives. If others use it for too long, whatever is
    /// asked fails ([`QmpError::Busy`]): nobody waits for ever behind a QEMU that hangs.
    pub fn lock(&self) -> MonitorGuard<'_> {
        self.lock_within(LOCK_TIMEOUT)
    }

    /// The same with a time of one's own.
    pub fn lock_within(&self, limit: Duration) -> MonitorGuard<'_> {
        let mut qmp = self.qmp.lock();
        self.free
            .wait_while_for(&mut qmp, |qmp| qmp.is_none(), limit);
        let taken = qmp.take();
        drop(qmp);
        let monitor = taken.is_some().then_some(self);
        let qmp = taken.unwrap_or_else(|| Qmp::busy(&self.path, limit));
        MonitorGuard { monitor, qmp }
    }

    /// The same if nobody has it.
    pub fn try_lock(&self) -> Option<MonitorGuard<'_>> {
        let qmp = self.qmp.lock().take()?;
        Some(MonitorGuard {
            monitor: Some(self),
            qmp,
        })
    }
}

impl Deref for MonitorGuard<'_> {
    type Target = Qmp;

    fn deref(&self) -> &Qmp {
        &self.qmp
    }
}

impl DerefMut for MonitorGuard<'_> {
    fn deref_mut(&mut self) -> &mut Qmp {
        &mut self.qmp
    }
}

impl Drop for MonitorGuard<'_> {
    fn drop(&mut self) {
        if let Some(monitor) = self.monitor {
            let qmp = std::mem::replace(&mut self.qmp, Qmp::busy(&monitor.path, Duration::ZERO));
            *monitor.qmp.lock() = Some(qmp);
            monitor.free.notify_one();
        }
    }
}

/// How the library takes the engine's orders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LibraryState {
    /// It waits for orders.
    #[default]
    Free,
    /// It has had an order since then.
    Ordered(Instant),
    /// It did not answer in time, or nonsense: the connection is of no use any more.
    Lost,
}

/// The same, for the engine and those who watch it.
pub(crate) type SharedLibraryState = Arc<Mutex<LibraryState>>;

/// The VM behind the engine's orders.
pub(crate) struct QemuGuest {
    pid: Pid,
    library: LibraryLink,
    monitor: Arc<Monitor>,
    refold: (Instant, Refold),
    state: SharedLibraryState,
}

impl QemuGuest {
    /// `state` is kept up to date.
    pub fn new(
        pid: Pid,
        library: LibraryLink,
        monitor: Arc<Monitor>,
        conditions: &VmConditions,
        state: SharedLibraryState,
    ) -> Self {
        let is_live = library.facts().can_write_protect && conditions.may_refold_live();
        Self {
            pid,
            library,
            monitor,
            refold: (Instant::now(), refold_if(is_live)),
            state,
        }
    }
}

const fn refold_if(is_live: bool) -> Refold {
    if is_live {
        Refold::Live
    } else {
        Refold::Stopped
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
        let note = |state| *self.state.lock() = state;
        note(LibraryState::Ordered(Instant::now()));
        let reply = match self.library.order(order, descriptor) {
            Err(LibraryError::Refused(reason)) => Ok(Reply::Error { reason }),
            reply => reply,
        };
        note(match reply {
            Ok(_) => LibraryState::Free,
            Err(_) => LibraryState::Lost,
        });
        reply.map_err(|error| GuestError::Library(io::Error::other(error)))
    }

    fn refold(&mut self) -> Refold {
        if self.library.facts().can_write_protect && self.refold.0.elapsed() > CONDITIONS_HOLD {
            // A save may hold the monitor for long, and other VMs wait for this thread.
            let Some(mut monitor) = self
                .monitor
                .try_lock()
                .filter(|monitor| !monitor.is_silent())
            else {
                return Refold::Unknown;
            };
            let now = memfold_vm::conditions::read_refold_live(&mut monitor);
            // QEMU that doesn't answer gets no benefit of the doubt.
            let is_live = now.is_ok_and(|c| c.may_refold_live());
            self.refold = (Instant::now(), refold_if(is_live));
        }
        self.refold.1
    }

    fn can_stop(&self) -> bool {
        self.library.facts().can_stop
    }
}
