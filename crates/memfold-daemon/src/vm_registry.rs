//! The daemon's table of VMs: the VMs that run, and those that are being started or adopted. All
//! services of the daemon find VMs here. The table itself uses no service.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use memfold_fold::VmId;
use memfold_vm::VmSpec;
use parking_lot::{Mutex, RwLock};
use rustix::fs::FlockOperation;
use rustix::process::Pid;

use crate::arrivals::{Arrivals, Entry, Way};
use crate::error::{DaemonError, state_error};
use crate::json_file;
use crate::locks::{NoStarts, StartRight};
use crate::machine::Machine;

/// Longest time that a request waits for the adoption of a VM.
pub(crate) const ADOPTION_PATIENCE: Duration = Duration::from_secs(10);

/// The table of the daemon's VMs.
#[derive(Debug)]
pub(crate) struct VmRegistry {
    /// State directory: files and sockets of the VMs.
    state: PathBuf,
    vms: Mutex<BTreeMap<String, Arc<Machine>>>,
    /// VMs that are being started or adopted.
    arrivals: Arc<Arrivals>,
    next: AtomicU32,
    /// Whether starting VMs is refused from now on, because the daemon ends.
    closed: AtomicBool,
    /// Write-locked while KSM steering begins. Read-locked while a thread decides whether a new
    /// VM's memory may merge.
    starts: RwLock<()>,
    /// Lock of the state directory, held until the last part of the daemon is dropped: two daemons
    /// on one state directory would disturb each other's folding.
    _lock: File,
}

impl VmRegistry {
    /// Locks a state directory, and creates the empty table of its VMs.
    ///
    /// # Errors
    ///
    /// [`DaemonError::StateTaken`] if another daemon uses the directory.
    pub fn open(state: &Path) -> Result<Self, DaemonError> {
        let files = state_error(state);
        std::fs::create_dir_all(state).map_err(files)?;
        // A user who could open it could lock it, too, and no daemon would start any more.
        let lock = json_file::private(&state.join("daemon.lock")).map_err(files)?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| DaemonError::StateTaken(state.to_owned()))?;
        Ok(Self {
            state: state.to_owned(),
            vms: Mutex::default(),
            arrivals: Arc::default(),
            next: AtomicU32::new(2),
            closed: AtomicBool::new(false),
            starts: RwLock::default(),
            _lock: lock,
        })
    }

    /// Returns the state directory, which contains the files and sockets of the VMs.
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// Returns the VMs that are being started or adopted.
    pub fn arrivals(&self) -> &Arc<Arrivals> {
        &self.arrivals
    }

    /// Returns the running VMs, sorted by name.
    pub fn machines(&self) -> Vec<Arc<Machine>> {
        self.vms.lock().values().cloned().collect()
    }

    /// Returns the names of the running VMs, sorted.
    pub fn names(&self) -> Vec<String> {
        self.vms.lock().keys().cloned().collect()
    }

    /// Returns whether QEMU or the fold library of a VM does not answer at this moment.
    pub fn has_silent(&self) -> bool {
        let machines = self.machines();
        machines.iter().any(|vm| vm.is_silent().is_some())
    }

    pub fn contains(&self, name: &str) -> bool {
        self.vms.lock().contains_key(name)
    }

    /// Returns whether a VM of this name runs, or is being started or adopted.
    pub fn is_taken(&self, name: &str) -> bool {
        // Each of the two locks is released before the other is taken.
        self.arrivals.get(name).is_some() || self.contains(name)
    }

    /// Returns the VM whose QEMU process has this PID.
    pub fn with_pid(&self, pid: Pid) -> Option<Arc<Machine>> {
        self.vms.lock().values().find(|vm| vm.pid() == pid).cloned()
    }

    /// Returns a running VM by its name. Waits for a VM that is being adopted, for
    /// [`ADOPTION_PATIENCE`] at most.
    ///
    /// # Errors
    ///
    /// [`DaemonError::NoSuchVm`] if there is no such VM, [`DaemonError::Refused`] while the VM is
    /// being started or adopted.
    pub fn machine(&self, name: &str) -> Result<Arc<Machine>, DaemonError> {
        let find = || self.vms.lock().get(name).cloned();
        if let Some(found) = find() {
            return Ok(found);
        }
        if let Some(arrival) = self.arrivals.get(name) {
            let limit = match arrival.way {
                Way::Starting => Duration::ZERO,
                Way::Adopting | Way::Attaching(_) => ADOPTION_PATIENCE,
            };
            if !self.arrivals.wait_gone(&arrival, limit) {
                return Err(arrival.refusal());
            }
        }
        find().ok_or_else(|| DaemonError::NoSuchVm(name.to_owned()))
    }

    /// Returns a number that no VM of this daemon has had, for a new VM.
    pub fn new_id(&self) -> VmId {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Adds a VM to the table, unless its QEMU is there by another name. Returns that VM then.
    pub fn insert(&self, machine: Arc<Machine>) -> Result<(), Arc<Machine>> {
        let mut vms = self.vms.lock();
        let known = vms.values().find(|vm| vm.pid() == machine.pid());
        if let Some(known) = known.filter(|known| known.name() != machine.name()) {
            return Err(known.clone());
        }
        vms.insert(machine.name().to_owned(), machine);
        Ok(())
    }

    /// Removes a VM from the table, unless another VM has its name by now.
    pub fn remove(&self, machine: &Machine) {
        let mut vms = self.vms.lock();
        let named = vms.get(machine.name());
        if named.is_some_and(|named| named.id() == machine.id()) {
            vms.remove(machine.name());
        }
    }

    /// Adds a VM that is being started or adopted, if its name is free.
    pub fn arrive(&self, spec: &VmSpec, way: Way) -> Result<Entry, DaemonError> {
        self.arrivals.add(spec, way, |name| self.contains(name))
    }

    /// Returns whether starting VMs is refused, because the daemon ends.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Returns the right to start a VM. KSM steering does not begin as long as the right exists.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Internal`] while the daemon ends.
    pub fn start_right(&self) -> Result<StartRight<'_>, DaemonError> {
        if self.is_closed() {
            return Err(DaemonError::Internal("the daemon is ending"));
        }
        Ok(StartRight::take(|| self.starts.read()))
    }

    /// Waits until no VM is being started, and prevents the start of VMs until the result is
    /// dropped. Returns `None` if the wait takes too long.
    pub fn none_starts(&self) -> Option<NoStarts<'_>> {
        for _ in 0..2 {
            let none = NoStarts::take(|| self.starts.write());
            if !self.arrivals.is_starting() {
                return Some(none);
            }
            drop(none);
            self.arrivals.wait_for_starts();
        }
        None
    }

    /// Refuses to start VMs from now on, and waits until VMs that are being started run or have
    /// failed. Afterwards no VM is added to the table.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.arrivals.wait_for_starts();
    }
}

/// Returns the error of an attach whose QEMU is a VM already.
pub(crate) fn known_as(known: &Machine) -> DaemonError {
    DaemonError::BadRequest(format!("this QEMU is already known as '{}'", known.name()))
}
