//! VMs that are on their way into the daemon's table: being started, or being taken over from the daemon before. They are listed and can
//! be stopped meanwhile, however long their QEMU hangs.
//!
//! ```text
//!   vm run, restore    begin(Starting) --- QEMU answers ---> table of VMs
//!                                       `- deadline, or stopped ---> error, nothing is left
//!   daemon starts      begin(Adopting) --- QEMU answers ---> table of VMs
//!                        ^-- again after a pause --'  `- QEMU has ended ---> its files are removed
//! ```
//! An entry lives as long as its [`Entry`]. It is never held together with the table of VMs: that one's lock comes second.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLockWriteGuard, Weak};
use std::time::{Duration, Instant};

use memfold_api::{AttachRequest, VmInfo};
use memfold_vm::{
    Cancel, MachineError, Process, QmpError, Record, StopKind, Stopped, Vm, VmDirectory, VmSpec,
};
use tracing::{info, warn};

use super::machine::{Machine, Origin};
use super::{Daemon, DaemonError, chain, let_go_of_disks, segments};

/// Pauses between two tries to take a VM over: the first, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// Time between two looks whether a VM was stopped that is to be taken over.
const LOOK: Duration = Duration::from_millis(100);

/// How long requests wait at the daemon's start for VMs whose QEMU answers.
const SETTLE: Duration = Duration::from_secs(2);

/// How long a start, and a first try to take a VM over, may take in all.
const START_PATIENCE: Duration = Duration::from_secs(60);

/// How long a request for a VM waits until that VM is taken over.
const ADOPTION_PATIENCE: Duration = Duration::from_secs(10);

/// Why a VM is on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Starting,
    Adopting,
    /// Attached to the daemon before.
    Attaching(AttachRequest),
}

/// A VM on its way.
#[derive(Debug)]
pub(super) struct Arrival {
    name: String,
    domain: Option<String>,
    ram_bytes: u64,
    way: Way,
    pub cancel: Cancel,
    problem: Mutex<Option<String>>,
}

impl Arrival {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn attach_request(&self) -> Option<&AttachRequest> {
        match &self.way {
            Way::Attaching(request) => Some(request),
            Way::Starting | Way::Adopting => None,
        }
    }

    fn problem(&self) -> Option<String> {
        self.problem
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Notes why a try failed; whether that is news.
    fn set_problem(&self, why: &str) -> bool {
        let mut problem = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = problem.as_deref() != Some(why);
        *problem = Some(why.to_owned());
        is_new
    }

    fn state(&self) -> &'static str {
        match self.way {
            Way::Starting => "starting",
            Way::Adopting | Way::Attaching(_) => "taking-over",
        }
    }

    /// What refuses a request for it.
    fn refusal(&self) -> DaemonError {
        let what = match self.way {
            Way::Starting => "is being started",
            Way::Adopting | Way::Attaching(_) => "is not taken over yet",
        };
        let why = self
            .problem()
            .map_or_else(String::new, |why| format!(": {why}"));
        DaemonError::Busy {
            why: format!("VM '{}' {what}{why}", self.name),
            fix: format!(
                "wait until 'memfold vm list' shows it as running, or end it: memfold vm stop {}",
                self.name
            ),
        }
    }

    /// As VMs are listed.
    pub fn info(&self, state: &std::path::Path) -> VmInfo {
        let record: Option<Record> =
            VmDirectory::read_json(&VmDirectory::of(state, &self.name).record()).ok();
        let version = record.as_ref().map(|record| record.version);
        VmInfo {
            name: self.name.clone(),
            domain: self.domain.clone(),
            pid: record.map_or(0, |record| record.process.pid),
            ram_bytes: self.ram_bytes,
            origin: if self.attach_request().is_some() {
                "attached"
            } else {
                "started"
            }
            .to_owned(),
            qemu: version.map_or_else(String::new, |(a, b, c)| format!("{a}.{b}.{c}")),
            state: self.state().to_owned(),
            state_cause: self.problem(),
            ..VmInfo::default()
        }
    }
}

#[derive(Debug, Default)]
struct State {
    all: BTreeMap<String, Arc<Arrival>>,
    /// What is to be done before the daemon counts as settled, and is not done yet.
    unsettled: usize,
}

impl State {
    fn is_starting(&self) -> bool {
        self.all
            .values()
            .any(|arrival| arrival.way == Way::Starting)
    }
}

/// All VMs on their way.
#[derive(Debug)]
pub(super) struct Arriving {
    state: Mutex<State>,
    changed: Condvar,
    began: Instant,
}

impl Default for Arriving {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            began: Instant::now(),
        }
    }
}

impl Arriving {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, name: &str) -> Option<Arc<Arrival>> {
        self.lock().all.get(name).cloned()
    }

    pub fn all(&self) -> Vec<Arc<Arrival>> {
        self.lock().all.values().cloned().collect()
    }

    pub fn is_empty(&self) -> bool {
        self.lock().all.is_empty()
    }

    /// Waits until `done`, or the time is over; whether it was.
    fn wait(&self, limit: Duration, done: impl Fn(&State) -> bool) -> bool {
        let state = self.lock();
        let waited = self
            .changed
            .wait_timeout_while(state, limit, |state| !done(state));
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Waits until this VM is on its way no more; whether it isn't.
    fn wait_gone(&self, arrival: &Arc<Arrival>, limit: Duration) -> bool {
        self.wait(limit, |state| {
            let now = state.all.get(&arrival.name);
            now.is_none_or(|now| !Arc::ptr_eq(now, arrival))
        })
    }
}

/// Keeps a VM among those on their way.
#[derive(Debug)]
pub(super) struct Entry {
    daemon: Weak<Daemon>,
    pub arrival: Arc<Arrival>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.upgrade() {
            daemon.arriving.lock().all.remove(&self.arrival.name);
            daemon.arriving.changed.notify_all();
        }
    }
}

/// Until this is dropped, requests wait for the daemon to settle, if not for long.
#[derive(Debug)]
pub(super) struct Unsettled(Weak<Daemon>);

impl Drop for Unsettled {
    fn drop(&mut self) {
        if let Some(daemon) = self.0.upgrade() {
            daemon.arriving.lock().unsettled -= 1;
            daemon.arriving.changed.notify_all();
        }
    }
}

impl Daemon {
    /// Puts a VM among those on their way, if its name is free.
    pub(super) fn arrive(self: &Arc<Self>, spec: &VmSpec, way: Way) -> Result<Entry, DaemonError> {
        let arrival = Arc::new(Arrival {
            name: spec.name.clone(),
            domain: spec.domain.clone(),
            ram_bytes: spec.memory.0,
            way,
            cancel: Cancel::default(),
            problem: Mutex::default(),
        });
        let mut state = self.arriving.lock();
        if state.all.contains_key(&spec.name) || self.lock().contains_key(&spec.name) {
            return Err(DaemonError::NameTaken(spec.name.clone()));
        }
        state.all.insert(spec.name.clone(), arrival.clone());
        Ok(Entry {
            daemon: Arc::downgrade(self),
            arrival,
        })
    }

    /// Waits until no VM is being started; whether none is.
    pub(super) fn wait_for_starts(&self) -> bool {
        self.arriving
            .wait(START_PATIENCE, |state| !state.is_starting())
    }

    /// Keeps VMs from being started, once none is; `None`: one still is.
    pub(super) fn none_starts(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        for _ in 0..2 {
            let gate = self.starts.write().unwrap_or_else(PoisonError::into_inner);
            if !self.arriving.lock().is_starting() {
                return Some(gate);
            }
            drop(gate);
            self.wait_for_starts();
        }
        None
    }

    /// Waits until every VM that runs was taken over, or cannot be now.
    pub(super) fn wait_for_adoption(&self) {
        self.arriving
            .wait(START_PATIENCE, |state| state.unsettled == 0);
    }

    pub(super) fn unsettled(self: &Arc<Self>) -> Unsettled {
        self.arriving.lock().unsettled += 1;
        Unsettled(Arc::downgrade(self))
    }

    /// Waits at the daemon's start, for two seconds at most, until the VMs are taken over whose QEMU answers: who asks right after a restart
    /// finds them.
    pub fn settle_first(&self) {
        let left = SETTLE.saturating_sub(self.arriving.began.elapsed());
        if !left.is_zero() {
            self.arriving.wait(left, |state| state.unsettled == 0);
        }
    }

    /// A VM by its name; one that is being taken over is waited for.
    pub(super) fn machine(&self, name: &str) -> Result<Arc<Machine>, DaemonError> {
        let find = || self.lock().get(name).cloned();
        if let Some(found) = find() {
            return Ok(found);
        }
        if let Some(arrival) = self.arriving.get(name) {
            let limit = if arrival.way == Way::Starting {
                Duration::ZERO
            } else {
                ADOPTION_PATIENCE
            };
            if !self.arriving.wait_gone(&arrival, limit) {
                return Err(arrival.refusal());
            }
        }
        find().ok_or_else(|| DaemonError::NoSuchVm(name.to_owned()))
    }

    /// Ends a VM that is on its way, if there is one of this name.
    pub(super) fn stop_arriving(
        &self,
        name: &str,
        timeout: Duration,
    ) -> Result<Option<Stopped>, DaemonError> {
        let Some(arrival) = self.arriving.get(name) else {
            return Ok(None);
        };
        if arrival.attach_request().is_some() {
            return Err(MachineError::NotOurs {
                name: name.to_owned(),
            }
            .into());
        }
        // A VM that answers is asked in the usual way.
        if arrival.way == Way::Adopting && self.arriving.wait_gone(&arrival, SETTLE) {
            return Ok(None);
        }
        let (began, state) = (Instant::now(), &self.options.state);
        let stopped = if arrival.way == Way::Adopting {
            let stopped = Vm::find(state, name).and_then(|vm| vm.end(timeout, &|| false, None));
            arrival.cancel.set();
            stopped?
        } else {
            warn!(vm = name, "stopped while it started; QEMU is killed");
            arrival
                .cancel
                .cancel(state, name)
                .map_err(|source| MachineError::Look {
                    name: name.to_owned(),
                    source,
                })?;
            Stopped {
                kind: StopKind::Killed,
                overdue: false,
                took: began.elapsed(),
                why: Some("it was still being started".into()),
            }
        };
        if !self.arriving.wait_gone(&arrival, ADOPTION_PATIENCE) {
            let record = VmDirectory::read_json::<Record>(&VmDirectory::of(state, name).record());
            let pid = record.map_or(0, |record| record.process.pid);
            return Err(MachineError::Undying {
                name: name.to_owned(),
                pid,
            }
            .into());
        }
        Ok(Some(stopped))
    }

    /// Begins to take over the VMs that run under the state directory, and those that the daemon before was attached to: each on a thread
    /// of its own, again and again.
    pub(super) fn begin_adoption(self: &Arc<Self>) -> std::io::Result<()> {
        for directory in VmDirectory::all(&self.options.state)? {
            // A directory without a description is of a start that was cut off.
            let spec: Option<VmSpec> = VmDirectory::read_json(&directory.spec()).ok();
            let spec =
                spec.unwrap_or_else(|| VmSpec::new(directory.name(), memfold_units::ByteSize(0)));
            let entry = self.arrive(&spec, Way::Adopting);
            self.begin_try("adopt", entry, move |daemon, entry| {
                daemon.adopt(&directory, entry)
            });
        }
        for request in self.read_attached() {
            let mut spec = VmSpec::new(request.name.clone(), memfold_units::ByteSize(0));
            spec.domain.clone_from(&request.domain);
            let entry = self.arrive(&spec, Way::Attaching(request.clone()));
            self.begin_try("attach", entry, move |daemon, entry| {
                daemon.attach_again(&request, entry)
            });
        }
        Ok(())
    }

    /// `attempt`: whether no more tries are needed.
    fn begin_try(
        self: &Arc<Self>,
        thread: &str,
        entry: Result<Entry, DaemonError>,
        attempt: impl Fn(&Arc<Self>, &Entry) -> bool + Send + 'static,
    ) {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => return warn!(error = chain(&error), "a VM is not taken over"),
        };
        let (weak, first) = (Arc::downgrade(self), self.unsettled());
        let work = move || {
            let (mut pause, mut first) = (PAUSE.0, Some(first));
            while let Some(daemon) = weak.upgrade() {
                if attempt(&daemon, &entry) {
                    return;
                }
                first.take();
                drop(daemon);
                let again = Instant::now() + pause;
                while Instant::now() < again && !entry.arrival.cancel.is_set() {
                    std::thread::sleep(LOOK);
                }
                pause = (pause * 2).min(PAUSE.1);
            }
        };
        if let Err(error) = std::thread::Builder::new().name(thread.into()).spawn(work) {
            warn!(%error, "no thread to take a VM over; restart the daemon");
        }
    }

    /// One try to take over what has its files in `directory`; whether that is settled.
    fn adopt(self: &Arc<Self>, directory: &VmDirectory, entry: &Entry) -> bool {
        let name = entry.arrival.name();
        match self.try_adopt(directory) {
            Ok(()) => true,
            Err(error) => {
                if has_ended(directory) {
                    if let Err(error) = Vm::clear_if_stale(directory) {
                        warn!(vm = name, %error, "cannot remove the files of a VM that ended");
                    }
                    return true;
                }
                let why = chain(&error);
                if entry.arrival.set_problem(&why) {
                    warn!(
                        vm = name,
                        error = why,
                        "cannot be taken over; tried again until QEMU answers or ends ('memfold vm stop' ends it)"
                    );
                }
                false
            }
        }
    }

    fn try_adopt(self: &Arc<Self>, directory: &VmDirectory) -> Result<(), DaemonError> {
        let vm = Vm::open(directory)?;
        let (name, domain) = (vm.name().to_owned(), vm.domain().map(str::to_owned));
        if vm.is_half_restored() {
            warn!(
                vm = name,
                "a VM that was being restored when the daemon died is ended"
            );
            vm.kill()?;
            return Ok(());
        }
        let pid = vm.pid().as_raw_nonzero();
        let machine = self.take_on(vm, &name, domain, Origin::Started)?;
        info!(vm = name, pid, "taken over");
        self.find_boot_snapshot(&machine);
        self.resume_borrowing(&machine);
        segments::recall_segments(&machine);
        let_go_of_disks(machine);
        Ok(())
    }

    fn attach_again(self: &Arc<Self>, request: &AttachRequest, entry: &Entry) -> bool {
        let attached = Vm::attach(&request.qmp).map_err(DaemonError::from);
        let attached = attached.and_then(|vm| self.attach_as(vm, request, None, Some(entry)));
        let Err(error) = attached else {
            return true;
        };
        // Nobody listens there any more, or somebody else does.
        let is_gone = matches!(
            &error,
            DaemonError::Machine(
                MachineError::Qmp(QmpError::Connect { .. }) | MachineError::Peer { .. }
            ) | DaemonError::BadRequest(_)
                | DaemonError::NameTaken(_)
        );
        let why = chain(&error);
        if is_gone {
            info!(vm = request.name, error = why, "no longer attached");
        } else if entry.arrival.set_problem(&why) {
            warn!(
                vm = request.name,
                error = why,
                "cannot be attached to; tried again until QEMU answers or ends"
            );
        }
        is_gone
    }
}

/// Whether the process is gone that was started for these files, or there never was one.
fn has_ended(directory: &VmDirectory) -> bool {
    match VmDirectory::read_json::<Record>(&directory.record()) {
        Ok(record) => Process::open(record.process)
            .is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}
