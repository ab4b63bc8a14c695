//! Who needs a snapshot: processes that map its files, VMs and definitions whose description names
//! its files, and other snapshots. A snapshot that is needed is not removed.

use memfold_host::chain;
use memfold_snapshot::{Manifest, SnapshotError, compact, restore};
use memfold_vm::{MachineError, Vm, VmDirectory};
use rustix::process::Pid;

use crate::error::{DaemonError, state_error};
use crate::snapshots::Snapshots;

impl Snapshots {
    /// Refuses a snapshot that VMs or other snapshots need.
    pub(super) fn refuse_if_used(&self, name: &str) -> Result<(), DaemonError> {
        self.refuse_if_in_vms(name)?;
        self.refuse_if_built_on(name)
    }

    /// Refuses a snapshot on which other snapshots are built.
    pub(super) fn refuse_if_built_on(&self, name: &str) -> Result<(), DaemonError> {
        let others = restore::built_on(&self.below.snapshots, name)?;
        if !others.is_empty() {
            let (name, others) = (name.to_owned(), others.join(", "));
            return Err(SnapshotError::BuiltOn { name, others }.into());
        }
        Ok(())
    }

    /// Refuses a snapshot whose files VMs map, or name in their descriptions.
    pub(super) fn refuse_if_in_vms(&self, name: &str) -> Result<(), DaemonError> {
        let pids = restore::holders(&self.below.snapshots, name)?;
        let mut users = self.called(&pids);
        for vm in self.vms_that_name(name)? {
            let vm = format!("VM '{vm}'");
            if !users.contains(&vm) {
                users.push(vm);
            }
        }
        if users.is_empty() {
            return Ok(());
        }
        let (name, users) = (name.to_owned(), users.join(", "));
        Err(SnapshotError::InUse { name, users }.into())
    }

    /// Returns the running VMs whose description names files of a snapshot. Such a VM may not map
    /// them: it was started like any other, with a disk or kernel of the snapshot.
    ///
    /// # Errors
    ///
    /// [`SnapshotError::Impossible`] if nothing tells whether a VM that may be running needs the
    /// snapshot; the error names the file that cannot be read.
    pub(super) fn vms_that_name(&self, name: &str) -> Result<Vec<String>, DaemonError> {
        let place = self.below.snapshots.path(name)?;
        let state = self.below.registry.state();
        let mut found = Vec::new();
        for directory in VmDirectory::all(state).map_err(state_error(state))? {
            let user = directory.name();
            let unknown = |why: &str, fix: &str| {
                SnapshotError::Impossible(format!(
                    "cannot find out whether VM '{user}' needs files of snapshot '{name}': {why}; {fix}, or stop the VM"
                ))
            };
            let vm = match Vm::open(&directory) {
                Ok(vm) => vm,
                // A VM that has ended needs nothing.
                Err(MachineError::NotFound { .. }) => continue,
                Err(error) => {
                    let file = match &error {
                        MachineError::Description { path, .. } => path.clone(),
                        _ => directory.record(),
                    };
                    let fix = format!("mend {}", file.display());
                    return Err(unknown(&chain(&error), &fix).into());
                }
            };
            let Some(spec) = vm.spec() else {
                continue;
            };
            let names_it = restore::names_files_of(spec, &place)
                .map_err(|error| unknown(&chain(&error), "try again"))?;
            if names_it {
                found.push(user);
            }
        }
        Ok(found)
    }

    /// Refuses a snapshot from which a defined VM starts, or whose files its definition names.
    pub fn refuse_if_defined(&self, name: &str) -> Result<(), DaemonError> {
        let place = self.below.snapshots.path(name)?;
        let users = self.below.definitions.users(|definition| {
            if definition.snapshot.as_deref() == Some(name) {
                return Ok(true);
            }
            restore::names_files_of(&definition.vm, &place).map_err(|error| chain(&error))
        })?;
        if users.is_empty() {
            return Ok(());
        }
        let (name, users) = (name.to_owned(), users.join(", "));
        Err(SnapshotError::Named { name, users }.into())
    }

    /// Refuses a snapshot whose files would be replaced while processes use them.
    pub(super) fn refuse_if_open(&self, manifest: &Manifest) -> Result<(), DaemonError> {
        let pids = compact::users(&self.below.snapshots, manifest)?;
        if pids.is_empty() {
            return Ok(());
        }
        let (name, users) = (manifest.name.clone(), self.called(&pids).join(", "));
        Err(SnapshotError::Open { name, users }.into())
    }

    /// Returns what processes are called in messages.
    fn called(&self, pids: &[Pid]) -> Vec<String> {
        let machines = self.below.registry.machines();
        let called = |pid: &Pid| match machines.iter().find(|vm| vm.pid() == *pid) {
            Some(machine) => format!("VM '{}'", machine.name()),
            None => format!("process {}", pid.as_raw_nonzero()),
        };
        pids.iter().map(called).collect()
    }
}
