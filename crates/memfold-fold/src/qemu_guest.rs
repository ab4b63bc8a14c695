//! Carries the fold engine's orders to a real VM: sends them to memfold's library in QEMU, and asks
//! QEMU whether pages may be folded again while the VM runs.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_vm::{LibraryError, LibraryLink, SharedQmp, VmConditions};
use memfold_wire::library::{Order, Reply};
use parking_lot::Mutex;
use rustix::process::Pid;

use crate::guest::{Guest, GuestError, Refold};

/// Time for which the monitor's answer about block nodes is cached. A guest needs longer before it
/// uses a device that was plugged in.
const CONDITIONS_HOLD: Duration = Duration::from_secs(1);

/// State of the connection to memfold's fold library in a QEMU process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LibraryState {
    /// The library executes no order and waits for the next one.
    #[default]
    Free,
    /// The library received an order at this time and has not answered yet.
    Ordered(Instant),
    /// The library did not answer in time or sent an invalid answer: the connection can no longer
    /// be used.
    Lost,
}

/// State of the connection to a fold library, shared by the engine and by threads that watch it.
pub type SharedLibraryState = Arc<Mutex<LibraryState>>;

/// A VM whose QEMU has the fold library, as the target of the engine's orders.
pub struct QemuGuest {
    pid: Pid,
    library: LibraryLink,
    monitor: Arc<SharedQmp>,
    refold: (Instant, Refold),
    state: SharedLibraryState,
}

impl QemuGuest {
    /// Creates the target for the VM of QEMU process `pid`. The target writes each change of the
    /// connection's state to `state`.
    pub fn new(
        pid: Pid,
        library: LibraryLink,
        monitor: Arc<SharedQmp>,
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
        let began = Instant::now();
        note(LibraryState::Ordered(began));
        let reply = match self.library.order(order, descriptor) {
            Err(LibraryError::Refused(reason)) => Ok(Reply::Error { reason }),
            reply => reply,
        };
        let took_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let reply = reply.map(|reply| reply.with_times_within(took_ns));
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
            let Some(mut monitor) = self
                .monitor
                .try_lock()
                .filter(|monitor| !monitor.is_silent())
            else {
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

/// Text for the operator: the reason why a VM without the fold library is not folded.
pub const NO_LIBRARY: &str = "QEMU runs without memfold's library; start the VM with 'memfold vm run', or with LD_PRELOAD=libmemfold_qemu.so and MEMFOLD_QEMU_SOCKET=PATH in its environment";

/// A VM without the fold library, identified by its QEMU process. The fold engine lists such a VM
/// and gives it no orders.
pub struct Unfolded(pub Pid);

impl Guest for Unfolded {
    fn pid(&self) -> Pid {
        self.0
    }

    fn has_library(&self) -> bool {
        false
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
