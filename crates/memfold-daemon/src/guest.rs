//! The fold engine's access to a QEMU process: sends orders to the fold library in QEMU, and asks
//! QEMU's monitor.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_wire::library::{Order, Reply};
use parking_lot::{Mutex, MutexGuard};
use rustix::process::Pid;

use memfold_fold::{Guest, GuestError, Refold};
use memfold_vm::{LibraryError, LibraryLink, Qmp, VmConditions};

/// Time for which the monitor's answer about block nodes is cached. A guest needs longer before it
/// uses a device that was plugged in.
const CONDITIONS_HOLD: Duration = Duration::from_secs(1);

/// Longest time to wait for the monitor while other threads use it. Each of their commands has its
/// own deadline.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// A QMP connection, shared by several threads.
#[derive(Debug)]
pub(crate) struct Monitor {
    qmp: Mutex<Qmp>,
    path: PathBuf,
}

/// The locked monitor of a VM. Dropping the guard unlocks the monitor.
#[derive(Debug)]
pub(crate) enum MonitorGuard<'a> {
    Locked(MutexGuard<'a, Qmp>),
    /// The monitor was not free in time; all commands fail.
    Busy(Qmp),
}

impl Monitor {
    pub fn new(qmp: Qmp) -> Self {
        let path = qmp.path().to_owned();
        let qmp = Mutex::new(qmp);
        Self { qmp, path }
    }

    /// Locks the monitor. If others use the monitor for over 30 s, all commands of the guard fail
    /// with [`QmpError::Busy`](memfold_vm::QmpError::Busy), so no thread waits forever for a QEMU
    /// that hangs.
    pub fn lock(&self) -> MonitorGuard<'_> {
        self.lock_within(LOCK_TIMEOUT)
    }

    /// Locks the monitor as [`Monitor::lock`] does, with another time limit.
    pub fn lock_within(&self, limit: Duration) -> MonitorGuard<'_> {
        let locked = self.qmp.try_lock_for(limit).map(MonitorGuard::Locked);
        locked.unwrap_or_else(|| MonitorGuard::Busy(Qmp::busy(&self.path, limit)))
    }
}

impl Deref for MonitorGuard<'_> {
    type Target = Qmp;

    fn deref(&self) -> &Qmp {
        match self {
            Self::Locked(qmp) => qmp,
            Self::Busy(qmp) => qmp,
        }
    }
}

impl DerefMut for MonitorGuard<'_> {
    fn deref_mut(&mut self) -> &mut Qmp {
        match self {
            Self::Locked(qmp) => qmp,
            Self::Busy(qmp) => qmp,
        }
    }
}

/// State of the fold library's connection in QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LibraryState {
    /// The library waits for orders.
    #[default]
    Free,
    /// The library received an order at this time and has not answered.
    Ordered(Instant),
    /// The library did not answer in time or sent an invalid answer: the connection can no longer
    /// be used.
    Lost,
}

/// The library's state, shared by the engine and by threads that watch it.
pub(crate) type SharedLibraryState = Arc<Mutex<LibraryState>>;

/// A VM as the target of the engine's orders.
pub(crate) struct QemuGuest {
    pid: Pid,
    library: LibraryLink,
    monitor: Arc<Monitor>,
    refold: (Instant, Refold),
    state: SharedLibraryState,
}

impl QemuGuest {
    /// Creates a target. The target stores changes of the fold library's state in `state`.
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
            // A save may hold the monitor for long, and meanwhile other VMs would wait for the
            // engine's thread.
            let monitor = self.monitor.qmp.try_lock();
            let Some(mut monitor) = monitor.filter(|monitor| !monitor.is_silent()) else {
                return Refold::Unknown;
            };
            let now = memfold_vm::conditions::read_refold_live(&mut monitor);
            // If QEMU does not answer, pages of this VM are not refolded while the VM runs.
            let is_live = now.is_ok_and(|c| c.may_refold_live());
            self.refold = (Instant::now(), refold_if(is_live));
        }
        self.refold.1
    }

    fn can_stop(&self) -> bool {
        self.library.facts().can_stop
    }
}

/// Reason why a VM without the fold library is not folded.
pub(crate) const NO_LIBRARY: &str = "QEMU runs without memfold's library; start the VM with 'memfold vm run', or with LD_PRELOAD=libmemfold_qemu.so and MEMFOLD_QEMU_SOCKET=PATH in its environment";

/// A VM without the fold library. The fold engine lists such a VM and gives it no orders.
pub(crate) struct Unfolded(pub Pid);

impl Guest for Unfolded {
    fn pid(&self) -> Pid {
        self.0
    }

    fn order(&mut self, _: &Order, _: Option<BorrowedFd<'_>>) -> Result<Reply, GuestError> {
        Err(GuestError::Library(io::Error::other(NO_LIBRARY)))
    }

    fn refold(&mut self) -> Refold {
        Refold::Stopped
    }

    fn can_stop(&self) -> bool {
        false
    }
}
