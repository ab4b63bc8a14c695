//! Controls a running VM while it is saved as a snapshot: tracks which memory the VM writes, and
//! stops and resumes the VM.

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use memfold_fold::{Command, VmId};
use memfold_snapshot::free::{self, Frames};
use memfold_snapshot::save;
use memfold_vm::{AgentLink, Qmp};
use memfold_wire::library::Range;
use memfold_wire::order::GuestOrder;

use crate::folding::Folding;
use crate::interrupted_save::NotedSave;
use crate::ksm_steering::MergingStops;
use crate::machine::{Machine, text};
use crate::threads;

/// Time limit for a guest to list its free pages.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);

/// Why free pages are not known if few pages have to be saved.
pub(super) const NOT_ASKED: &str = "few pages have to be saved, so the guest was not asked";

/// Page frames that the guest has free; or why they are not known.
type FreePages = Result<Vec<Frames>, String>;

/// A VM whose writes are tracked, or that is stopped, for its save. Dropping it resumes the VM and
/// ends tracking.
pub(super) struct HeldVm<'a> {
    folding: &'a Folding,
    machine: &'a Arc<Machine>,
    agent: Option<&'a AgentLink>,
    /// Whether the library stops the VM. The daemon may connect to the library during the save.
    can_stop: bool,
    /// Held while the VM is stopped, so that nothing is sent to the guest's agent.
    quiet: RefCell<Option<MutexGuard<'a, ()>>>,
    merging: RefCell<Option<MergingStops<'a>>>,
    /// Time at which the save stopped the VM; `None` while it runs.
    stopped: Cell<Option<Instant>>,
    /// Total time for which the save has stopped the VM.
    stood: Cell<Duration>,
    /// The guest's answer about its free pages, when it arrives; or why the guest gives no answer.
    listing: RefCell<Result<Receiver<FreePages>, String>>,
    /// The note about this save; only for a VM that memfold did not start, or that the library does
    /// not stop.
    noted: Option<NotedSave<'a>>,
}

impl<'a> HeldVm<'a> {
    /// Takes control of a VM for its save. The VM still runs, and its writes are not tracked yet.
    pub fn new(
        folding: &'a Folding,
        machine: &'a Arc<Machine>,
        can_stop: bool,
        agent: Option<&'a AgentLink>,
        merging: Option<MergingStops<'a>>,
        noted: Option<NotedSave<'a>>,
    ) -> Self {
        Self {
            folding,
            machine,
            agent,
            can_stop,
            quiet: RefCell::default(),
            merging: RefCell::new(merging),
            stopped: Cell::new(None),
            stood: Cell::new(Duration::ZERO),
            listing: RefCell::new(Err(NOT_ASKED.into())),
            noted,
        }
    }

    pub fn stood_still(&self) -> Duration {
        let since = self.stopped.get();
        self.stood.get() + since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Begins to track the VM's writes, and then asks the guest for its free pages. The guest
    /// answers while the save is prepared further.
    pub fn ask_free_pages(&self) {
        *self.listing.borrow_mut() = self.begin_listing();
    }

    /// # Errors
    ///
    /// A text that says why free pages cannot be left out of the snapshot.
    fn begin_listing(&self) -> Result<Receiver<FreePages>, String> {
        // Conditions may have changed. For example, a device that writes to pinned memory bypasses
        // the page tables.
        self.machine.look_again();
        if let Some(problem) = self.machine.problem() {
            return Err(problem);
        }
        if self.agent.is_none() {
            return Err("the guest has no memfold-agent".to_owned());
        }
        self.tell("tracked", Command::Track)?;
        let (answer, answered) = sync_channel(1);
        let machine = self.machine.clone();
        // The save may have failed meanwhile.
        let list = move || drop(answer.send(list_free_pages(&machine)));
        threads::begin("free pages", list)
            .map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(answered)
    }

    /// Sends the fold engine a command for this VM that [`Command::Release`] undoes. `what`
    /// completes the error message "the VM cannot be ...".
    fn tell(
        &self,
        what: &str,
        command: impl FnOnce(VmId, SyncSender<Result<(), String>>) -> Command,
    ) -> Result<(), String> {
        let command = |answer| command(self.machine.id(), answer);
        let done = self.folding.ask(command).map_err(|error| error.to_string());
        let done = done.and_then(|done| done);
        done.map_err(|why| format!("the VM cannot be {what}: {why}"))
    }
}

fn list_free_pages(machine: &Machine) -> FreePages {
    let listed = machine.run(GuestOrder::ListFreePages, LIST_TIMEOUT);
    let listed = listed.map_err(|error| error.to_string())?;
    if listed.code != 0 {
        let words = text(&listed.stderr);
        return Err(format!("the guest cannot list its free pages: {words}"));
    }
    free::parse(&listed.stdout, machine.layout().pages())
}

impl save::Hold for HeldVm<'_> {
    fn free_pages(&self) -> FreePages {
        let before = Err("the guest was asked before".into());
        let listing = self.listing.replace(before)?.recv();
        listing.unwrap_or_else(|_| Err("the thread that asked the guest has ended".into()))
    }

    fn stop(&self, qmp: &mut Qmp) -> Result<(), String> {
        self.quiet.replace(self.agent.map(AgentLink::quiet));
        if self.can_stop {
            self.tell("stopped", Command::Hold)?;
            self.stopped.set(Some(Instant::now()));
            return Ok(());
        }
        // The library has no monitor connection, so nothing in QEMU resumes the VM if the daemon
        // dies. The next daemon resumes it.
        let failed = |error: &dyn std::fmt::Display| format!("cannot stop the VM: {error}");
        if self.machine.vm().has_library() {
            self.tell("left alone", Command::LeaveAlone)?;
        }
        if let Some(noted) = &self.noted {
            noted.stopped(true).map_err(|error| failed(&error))?;
        }
        self.stopped.set(Some(Instant::now()));
        qmp.execute_on_disks("stop", serde_json::Value::Null)
            .map_err(|error| failed(&error))?;
        Ok(())
    }

    fn untrack(&self) -> Result<(), String> {
        if !self.machine.vm().has_library() {
            return Ok(());
        }
        self.tell("left untracked", Command::Untrack)
    }

    fn keep_past(&self, ranges: Vec<Range>, file: OwnedFd) -> Result<(), String> {
        self.tell("saved while it runs", |id, answer| {
            Command::KeepPast(id, ranges, file, answer)
        })
    }

    fn go_on(&self, qmp: &mut Qmp) -> Result<(), String> {
        let Some(since) = self.stopped.get() else {
            return Ok(());
        };
        if self.can_stop {
            self.tell("resumed", Command::GoOn)?;
        } else {
            qmp.query("cont").map_err(|error| error.to_string())?;
            if let Some(noted) = &self.noted {
                // If the note cannot be written, the next daemon resumes a VM that already runs,
                // which is harmless.
                let _ = noted.stopped(false);
            }
        }
        self.stopped.set(None);
        self.stood.set(self.stood.get() + since.elapsed());
        self.quiet.take();
        Ok(())
    }

    fn let_go(&self) {
        // Sending fails only when the daemon ends, and then the library resumes the VM.
        let _ = self.folding.tell(Command::Release(self.machine.id()));
        self.quiet.take();
        self.merging.take();
    }
}

impl Drop for HeldVm<'_> {
    fn drop(&mut self) {
        save::Hold::let_go(self);
    }
}
