//! A QEMU process as the fold engine sees it.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use memfold_wire::library::{Order, Reply};
use rustix::process::Pid;

use crate::fold::{Guest, GuestError};
use crate::vm::{LibraryError, LibraryLink, Qmp, QmpError, VmConditions};

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
}

/// The VM behind the engine's orders.
pub(super) struct QemuGuest {
    pid: Pid,
    library: LibraryLink,
    monitor: Arc<Monitor>,
    live: (Instant, bool),
    /// Exists while the VM is paused by us: whoever takes over after our death lets it go on.
    pause_marker: PathBuf,
}

impl QemuGuest {
    pub fn new(
        pid: Pid,
        library: LibraryLink,
        monitor: Arc<Monitor>,
        conditions: &VmConditions,
        pause_marker: PathBuf,
    ) -> Self {
        let live = library.facts().can_write_protect && conditions.may_refold_live();
        Self {
            pid,
            library,
            monitor,
            live: (Instant::now(), live),
            pause_marker,
        }
    }

    fn monitor(&self, action: &'static str) -> Result<(), GuestError> {
        let failed = |source: QmpError| GuestError::Pause {
            action,
            source: io::Error::other(source),
        };
        self.monitor.lock().query(action).map(drop).map_err(failed)
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
            Err(error) => Err(GuestError::Library(io::Error::other(error))),
        }
    }

    fn refold_live(&mut self) -> bool {
        if self.library.facts().can_write_protect && self.live.0.elapsed() > CONDITIONS_HOLD {
            let now = crate::vm::conditions::read(&mut self.monitor.lock(), self.pid, true);
            // QEMU that doesn't answer gets no benefit of the doubt.
            self.live = (Instant::now(), now.is_ok_and(|c| c.may_refold_live()));
        }
        self.live.1
    }

    fn pause(&mut self) -> Result<bool, GuestError> {
        let status = self
            .monitor
            .lock()
            .query("query-status")
            .map_err(|source| GuestError::Pause {
                action: "query-status",
                source: io::Error::other(source),
            })?;
        if status["status"] != "running" {
            return Ok(false);
        }
        let marked = std::fs::write(&self.pause_marker, "");
        marked.map_err(|source| GuestError::Pause {
            action: "mark before its stop",
            source,
        })?;
        self.monitor("stop")?;
        Ok(true)
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        self.monitor("cont")?;
        // A marker that stays lets a later daemon say "cont" once too often, which QEMU ignores.
        let _ = std::fs::remove_file(&self.pause_marker);
        Ok(())
    }
}
