//! VMs that are not in the daemon's table yet: VMs that are being started, and running VMs that are
//! being adopted from an earlier daemon. Users can list and stop these VMs, even if QEMU of such a
//! VM hangs.
//!
//! ```text
//!   vm run, restore    begin(Starting) --- QEMU answers ---> table of VMs
//!                                       `- deadline, or stopped ---> error, nothing is left
//!   daemon starts      begin(Adopting) --- QEMU answers ---> table of VMs
//!                        ^-- again after a pause --'  `- QEMU has ended ---> its files are removed
//! ```
//! A VM stays in this list as long as its [`Entry`] exists. A thread that needs the locks of both
//! this list and the daemon's table of VMs takes the lock of this list first.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use memfold_api::{AttachRequest, VmInfo};
use memfold_vm::{Cancel, Identity, Record, VmDirectory, VmSpec};
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

use crate::error::{DaemonError, refused};

/// Longest time that requests wait, at the daemon's start, for the adoption of VMs whose QEMU
/// answers.
pub(crate) const SETTLE: Duration = Duration::from_secs(2);

/// Time limit of a VM's start, and of the first attempt to adopt a VM.
const START_PATIENCE: Duration = Duration::from_secs(60);

/// A VM that the daemon is attached to, as `attached.json` records it. A later QEMU with the same
/// socket can be another VM, which may not get into the recorded trust domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AttachedVm {
    pub request: AttachRequest,
    pub process: Identity,
}

/// Why the daemon's table of running VMs does not contain a VM yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Starting,
    Adopting,
    /// The daemon attaches to the VM. The value is the VM's entry in `attached.json`; `None` for a
    /// libvirt domain, which is not recorded there.
    Attaching(Option<AttachedVm>),
}

/// A VM that is being started or adopted.
#[derive(Debug)]
pub(crate) struct Arrival {
    name: String,
    domain: Option<String>,
    ram_bytes: u64,
    pub way: Way,
    pub cancel: Cancel,
    problem: Mutex<Option<String>>,
}

impl Arrival {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the VM's entry in `attached.json`, if the daemon attaches to the VM and records
    /// that.
    pub fn attached(&self) -> Option<&AttachedVm> {
        match &self.way {
            Way::Attaching(recorded) => recorded.as_ref(),
            Way::Starting | Way::Adopting => None,
        }
    }

    fn problem(&self) -> Option<String> {
        self.problem.lock().clone()
    }

    /// Records why an attempt to start or adopt the VM failed. Returns whether the reason differs
    /// from that of the previous attempt.
    pub fn set_problem(&self, why: &str) -> bool {
        let mut problem = self.problem.lock();
        let is_new = problem.as_deref() != Some(why);
        *problem = Some(why.to_owned());
        is_new
    }

    /// Returns the error for a request that needs this VM to run, while the VM is being started or
    /// adopted.
    pub fn refusal(&self) -> DaemonError {
        let is_starting = self.way == Way::Starting;
        let what = if is_starting {
            "is being started"
        } else {
            "is not adopted yet"
        };
        let problem = self.problem();
        let why = problem.map_or_else(String::new, |why| format!(": {why}"));
        refused(
            format!("VM '{}' {what}{why}", self.name),
            format!(
                "wait until 'memfold vm list' shows the VM as running, or run: memfold vm stop {}",
                self.name
            ),
        )
    }

    /// Returns this VM's entry for the list of VMs that users see.
    pub fn info(&self, state: &Path) -> VmInfo {
        let record: Option<Record> =
            VmDirectory::read_json(&VmDirectory::of(state, &self.name).record()).ok();
        let origin = match &self.way {
            Way::Attaching(Some(_)) => "attached",
            Way::Attaching(None) => "libvirt",
            Way::Starting | Way::Adopting => "started",
        };
        let is_starting = self.way == Way::Starting;
        let state_name = if is_starting {
            "starting"
        } else {
            "taking-over"
        };
        let version = record.as_ref().map(|record| record.version);
        VmInfo {
            name: self.name.clone(),
            domain: self.domain.clone(),
            pid: record.map_or(0, |record| record.process.pid),
            ram_bytes: self.ram_bytes,
            origin: origin.to_owned(),
            qemu: version.map_or_else(String::new, |(a, b, c)| format!("{a}.{b}.{c}")),
            state: state_name.to_owned(),
            state_cause: self.problem(),
            ..VmInfo::default()
        }
    }
}

#[derive(Debug, Default)]
struct State {
    all: BTreeMap<String, Arc<Arrival>>,
    /// Number of [`Unsettled`] tokens: steps of the daemon's start that are not complete.
    unsettled: usize,
}

impl State {
    fn is_starting(&self) -> bool {
        let mut all = self.all.values();
        all.any(|arrival| arrival.way == Way::Starting)
    }
}

/// All VMs that are being started or adopted.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    state: Mutex<State>,
    changed: Condvar,
}

impl Arrivals {
    pub fn get(&self, name: &str) -> Option<Arc<Arrival>> {
        self.state.lock().all.get(name).cloned()
    }

    pub fn all(&self) -> Vec<Arc<Arrival>> {
        self.state.lock().all.values().cloned().collect()
    }

    pub fn is_empty(&self) -> bool {
        self.state.lock().all.is_empty()
    }

    /// Waits until `done` holds, for `limit` at most. Returns whether `done` holds.
    fn wait(&self, limit: Duration, done: impl Fn(&State) -> bool) -> bool {
        let mut state = self.state.lock();
        self.changed
            .wait_while_for(&mut state, |state| !done(state), limit);
        done(&state)
    }

    /// Waits until the VM `arrival` is no longer being started or adopted. Returns `false` if that
    /// takes longer than `limit`.
    pub fn wait_gone(&self, arrival: &Arc<Arrival>, limit: Duration) -> bool {
        self.wait(limit, |state| {
            let now = state.all.get(&arrival.name);
            now.is_none_or(|now| !Arc::ptr_eq(now, arrival))
        })
    }

    /// Adds a VM that is being started or adopted.
    ///
    /// # Errors
    ///
    /// [`DaemonError::NameTaken`] if another VM of this name is being started or adopted, or if
    /// `is_taken` returns true for the name.
    pub fn add(
        self: &Arc<Self>,
        spec: &VmSpec,
        way: Way,
        is_taken: impl FnOnce(&str) -> bool,
    ) -> Result<Entry, DaemonError> {
        let arrival = Arc::new(Arrival {
            name: spec.name.clone(),
            domain: spec.domain.clone(),
            ram_bytes: spec.memory.0,
            way,
            cancel: Cancel::default(),
            problem: Mutex::default(),
        });
        let mut state = self.state.lock();
        if state.all.contains_key(&spec.name) || is_taken(&spec.name) {
            return Err(DaemonError::NameTaken(spec.name.clone()));
        }
        state.all.insert(spec.name.clone(), arrival.clone());
        Ok(Entry {
            arrivals: Arc::downgrade(self),
            arrival,
        })
    }

    pub fn is_starting(&self) -> bool {
        self.state.lock().is_starting()
    }

    /// Waits until no VM is being started, for [`START_PATIENCE`] at most. Returns `true` if no VM
    /// is being started.
    pub fn wait_for_starts(&self) -> bool {
        self.wait(START_PATIENCE, |state| !state.is_starting())
    }

    /// Waits until each running VM has been adopted or its first attempt has failed, for
    /// [`START_PATIENCE`] at most.
    pub fn wait_for_adoption(&self) {
        self.wait(START_PATIENCE, |state| state.unsettled == 0);
    }

    pub fn unsettled(self: &Arc<Self>) -> Unsettled {
        self.state.lock().unsettled += 1;
        Unsettled(Arc::downgrade(self))
    }

    /// Waits until all steps of the daemon's start are complete, for at most [`SETTLE`] from the
    /// start. `since`: time that has passed since the start.
    pub fn settle_first(&self, since: Duration) {
        let left = SETTLE.saturating_sub(since);
        if !left.is_zero() {
            self.wait(left, |state| state.unsettled == 0);
        }
    }
}

/// Keeps a VM in the list of [`Arrivals`]; dropping the entry removes the VM from the list.
#[derive(Debug)]
pub(crate) struct Entry {
    arrivals: Weak<Arrivals>,
    pub arrival: Arc<Arrival>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(arrivals) = self.arrivals.upgrade() {
            arrivals.state.lock().all.remove(&self.arrival.name);
            arrivals.changed.notify_all();
        }
    }
}

/// A step of the daemon's start. Requests wait as long as such a token exists, for at most
/// [`SETTLE`].
#[derive(Debug)]
pub(crate) struct Unsettled(Weak<Arrivals>);

impl Drop for Unsettled {
    fn drop(&mut self) {
        if let Some(arrivals) = self.0.upgrade() {
            arrivals.state.lock().unsettled -= 1;
            arrivals.changed.notify_all();
        }
    }
}
