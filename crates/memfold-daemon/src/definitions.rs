//! Definitions of VMs. The daemon starts VMs with `autostart` after each boot of the host.
//!
//! ```text
//!   first start of a daemon after a boot   STATE/autostart.json names no boot, or another one: all VMs with
//!                                          autostart become its `waiting`, by order and name
//!   thread 'autostart'                     waits until running VMs are adopted; then, for the first of `waiting`:
//!                                          VM runs -> nothing; else start it; then remove it from `waiting`
//!   `vm start` and `vm stop`               remove the VM from `waiting`
//!   later starts of a daemon               the thread goes on with the rest of `waiting`
//! ```
//!
//! So a restart of the daemon starts no VM that somebody has stopped, and a daemon that dies in the
//! middle forgets no VM.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use memfold_api::{DefinitionInfo, RestoreRequest, VmInfo};
use memfold_host::chain;
use memfold_snapshot::identity::Renew;
use memfold_vm::{Definition, LaunchError, VmSpec, boot_id};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use crate::boots::Boots;
use crate::definition_files::DefinitionFiles;
use crate::error::DaemonError;
use crate::json_file::write_json;
use crate::options::DaemonOptions;
use crate::threads;

mod set;

/// State of a defined VM that neither runs nor is being started.
const OFF: &str = "off";

/// Why a VM was not started after the host's boot, and what the operator can do.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct StartProblem {
    why: String,
    fix: String,
}

/// The starts of VMs after one boot of the host.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Autostart {
    /// Boot id of the host.
    boot: String,
    /// VMs that were not started yet, in the order of their starts.
    waiting: Vec<String>,
    /// VMs that could not be started, by name.
    problems: BTreeMap<String, StartProblem>,
}

/// Service for definitions of VMs.
#[derive(Debug)]
pub struct Definitions {
    boots: Arc<Boots>,
    files: Arc<DefinitionFiles>,
    /// File of the [`Autostart`].
    note: PathBuf,
    autostart: Mutex<Autostart>,
}

impl Definitions {
    pub(crate) fn new(boots: Arc<Boots>, options: &DaemonOptions) -> Self {
        let note = options.state.join("autostart.json");
        // A daemon that finds no file is the first one after a boot.
        let known = std::fs::read(&note).unwrap_or_default();
        let autostart = serde_json::from_slice(&known).unwrap_or_default();
        Self {
            files: boots.below.definitions.clone(),
            boots,
            note,
            autostart: Mutex::new(autostart),
        }
    }

    /// Returns all defined VMs, sorted by name.
    pub fn list(&self) -> Result<Vec<DefinitionInfo>, DaemonError> {
        let vms = self.boots.vms.list();
        let names = self.files.names()?.into_iter();
        Ok(names.map(|name| self.info(name, &vms)).collect())
    }

    /// Returns a defined VM.
    pub fn get(&self, name: &str) -> Result<DefinitionInfo, DaemonError> {
        let mut all = self.list()?.into_iter();
        let found = all.find(|definition| definition.name == name);
        found.ok_or_else(|| DaemonError::NoSuchDefinition(name.to_owned()))
    }

    fn info(&self, name: String, vms: &[VmInfo]) -> DefinitionInfo {
        let vm = vms.iter().find(|vm| vm.name == name);
        let (definition, problem) = match self.files.read(&name) {
            Ok(definition) => {
                let autostart = self.autostart.lock();
                let problem = autostart.problems.get(&name).filter(|_| vm.is_none());
                (Some(definition), problem.cloned())
            }
            Err(error) => (None, Some(problem_of(&name, &error))),
        };
        let (problem, fix) = problem.map(|problem| (problem.why, problem.fix)).unzip();
        DefinitionInfo {
            name,
            state: vm.map_or(OFF, |vm| &vm.state).to_owned(),
            problem,
            fix,
            definition,
        }
    }

    /// Checks and writes the definition of VM `name`, and replaces an older one. A running VM of
    /// this name is not changed.
    pub fn define(
        &self,
        name: &str,
        mut definition: Definition,
    ) -> Result<DefinitionInfo, DaemonError> {
        if definition.vm.name != name {
            return Err(DaemonError::BadRequest(format!(
                "name: the description is of VM '{}', and the request is for VM '{name}'",
                definition.vm.name
            )));
        }
        self.boots.check(&mut definition)?;
        self.check_snapshot(&definition)?;
        self.files.write(&definition)?;
        self.forget_problem(name);
        self.get(name)
    }

    /// Removes a definition. A running VM of this name is not changed.
    pub fn undefine(&self, name: &str) -> Result<(), DaemonError> {
        self.files.remove(name)?;
        self.forget_problem(name);
        Ok(())
    }

    /// Sets whether the daemon starts a VM after each boot of the host.
    pub fn set_autostart(&self, name: &str, is_on: bool) -> Result<DefinitionInfo, DaemonError> {
        loop {
            let before = self.files.read(name)?;
            let mut new = before.clone();
            new.autostart = is_on;
            if self.files.replace(&before, &new)? {
                return self.get(name);
            }
        }
    }

    /// Starts a defined VM.
    ///
    /// # Errors
    ///
    /// [`DaemonError::NameTaken`] if the VM runs; [`DaemonError::Braked`] while the brake is on,
    /// unless `despite_brake` is set.
    pub fn start(&self, name: &str, despite_brake: bool) -> Result<VmInfo, DaemonError> {
        let started = self.launch(self.files.read(name)?, despite_brake)?;
        self.forget_problem(name);
        self.no_longer_waits(name);
        Ok(started)
    }

    /// Starts a VM by its definition: boots the VM, or restores it from its snapshot.
    fn launch(&self, definition: Definition, despite_brake: bool) -> Result<VmInfo, DaemonError> {
        let renew = self.check_snapshot(&definition)?;
        let vm = definition.vm;
        match definition.snapshot {
            Some(snapshot) => {
                let request = RestoreRequest {
                    renew,
                    despite_brake,
                    forwards: vm.forwards,
                    ttl_s: vm.ttl_s,
                    ..RestoreRequest::new(vm.name)
                };
                let restored = self.boots.snapshots.restore(&snapshot, &request)?;
                let machine = self.boots.below.registry.machine(&restored.name)?;
                // The saved VM may have had other settings and limits.
                let (fold, when_room) = (vm.fold, vm.resume_when_room);
                let set = self.boots.set(&machine, fold, when_room, vm.sizing.into());
                set.inspect_err(|_| {
                    // A VM that was not started as described must not run.
                    let _ = machine.vm().stop(Duration::ZERO);
                })?;
                Ok(restored)
            }
            None if despite_brake => self.boots.run_despite_brake(vm),
            None => self.boots.run(vm),
        }
    }

    /// Checks that a definition's snapshot exists, and that the description agrees with it. Returns
    /// which identities the VM gets: a VM with the saved VM's name is that VM, and any other VM is
    /// a new one.
    fn check_snapshot(&self, definition: &Definition) -> Result<Renew, DaemonError> {
        let (Some(name), vm) = (&definition.snapshot, &definition.vm) else {
            return Ok(Renew::Random);
        };
        let saved = self.boots.snapshots.manifest(name)?;
        let (is, was) = (vm, &saved.spec);
        let differs = |field, is: String, was: String| {
            (is != was).then(|| {
                DaemonError::BadRequest(format!(
                    "{field}: the description says {is}, and the VM of snapshot '{name}' has {was}; write {was}"
                ))
            })
        };
        let domain = |of: &VmSpec| {
            of.domain
                .clone()
                .unwrap_or_else(|| "no trust domain".into())
        };
        let most = |of: &VmSpec| match of.pluggable() {
            Some(_) => of.largest_memory().to_string(),
            None => "none".into(),
        };
        let found = differs("memory", is.memory.to_string(), was.memory.to_string())
            .or_else(|| differs("memory_max", most(is), most(was)))
            .or_else(|| differs("vcpus", is.vcpus.to_string(), was.vcpus.to_string()))
            .or_else(|| differs("domain", domain(is), domain(was)));
        match found {
            Some(error) => Err(error),
            None if saved.vm == vm.name => Ok(Renew::Random),
            None => Ok(Renew::Identity),
        }
    }

    fn forget_problem(&self, name: &str) {
        let mut autostart = self.autostart.lock();
        if autostart.problems.remove(name).is_some() {
            self.write(&autostart);
        }
    }

    fn write(&self, autostart: &Autostart) {
        if let Err(error) = write_json(&self.note, autostart) {
            warn!(path = %self.note.display(), %error, "cannot record which VMs were started after the host's boot, so the next daemon may start VMs that were stopped; free space in the state directory");
        }
    }

    /// Starts the thread that starts VMs after a boot of the host, unless all VMs of this boot were
    /// started.
    pub(crate) fn begin_autostart(self: &Arc<Self>) -> io::Result<()> {
        let mut autostart = self.autostart.lock();
        let boot = boot_id();
        if autostart.boot != boot {
            *autostart = Autostart {
                boot,
                waiting: self.in_order(),
                problems: BTreeMap::new(),
            };
            self.write(&autostart);
        }
        if autostart.waiting.is_empty() {
            return Ok(());
        }
        drop(autostart);
        let (weak, arrivals) = (
            Arc::downgrade(self),
            self.boots.below.registry.arrivals().clone(),
        );
        threads::begin("autostart", move || {
            arrivals.wait_for_adoption();
            while weak.upgrade().is_some_and(|service| service.start_next()) {}
        })
    }

    /// Returns the names of the VMs with `autostart`, in the order of their starts.
    fn in_order(&self) -> Vec<String> {
        let names = self.files.names().unwrap_or_else(|error| {
            warn!(
                error = chain(&error),
                "cannot read the definitions of VMs, so no VM is started; fix the cause and run 'memfold vm start'"
            );
            Vec::new()
        });
        let mut found = Vec::new();
        for name in names {
            match self.files.read(&name) {
                Ok(definition) if definition.autostart => found.push((definition.order, name)),
                Ok(_) => {}
                Err(error) => warn!(
                    vm = name,
                    error = chain(&error),
                    "cannot read the definition of a VM, so the VM is not started; correct the file and run 'memfold vm start'"
                ),
            }
        }
        found.sort();
        found.into_iter().map(|(_, name)| name).collect()
    }

    /// Starts the VM that has waited longest. Returns `false` if none waits, or if the daemon ends.
    fn start_next(&self) -> bool {
        let Some(name) = self.autostart.lock().waiting.first().cloned() else {
            return false;
        };
        // Right after the daemon's start, the brake may not know the debt of adopted VMs yet. The
        // brake's own thread reports a failure.
        let _ = self.boots.below.brake.look_at_debt();
        let problem = self.start_waiting(&name).err();
        if self.boots.below.registry.is_closed() {
            // The next daemon continues with this VM.
            return false;
        }
        let problem = problem.map(|error| {
            warn!(
                vm = name,
                error = chain(&error),
                "VM not started after the host's boot; fix the cause and run 'memfold vm start'"
            );
            problem_of(&name, &error)
        });
        let mut autostart = self.autostart.lock();
        autostart.waiting.retain(|waiting| *waiting != name);
        autostart
            .problems
            .extend(problem.map(|problem| (name, problem)));
        self.write(&autostart);
        true
    }

    /// Leaves out a VM that somebody has started or stopped since the host's boot: what an operator
    /// does counts more than the start that was planned.
    pub fn no_longer_waits(&self, name: &str) {
        let mut autostart = self.autostart.lock();
        let before = autostart.waiting.len();
        autostart.waiting.retain(|waiting| waiting != name);
        if autostart.waiting.len() < before {
            self.write(&autostart);
        }
    }

    /// Starts a VM, unless it runs, or its definition has been removed or changed since the boot.
    fn start_waiting(&self, name: &str) -> Result<(), DaemonError> {
        let definition = match self.files.read(name) {
            Err(DaemonError::NoSuchDefinition(_)) => return Ok(()),
            definition => definition?,
        };
        let registry = &self.boots.below.registry;
        // Each of the two locks is released before the other is taken.
        let is_there = registry.arrivals().get(name).is_some() || registry.contains(name);
        // An operator may have started and stopped the VM since it was chosen.
        let waits = self.autostart.lock().waiting.iter().any(|vm| vm == name);
        if is_there || !waits || !definition.autostart {
            return Ok(());
        }
        match self.launch(definition, false) {
            Ok(_) => {
                info!(vm = name, "VM started after the host's boot");
                Ok(())
            }
            // A user has started the VM in the meantime.
            Err(DaemonError::NameTaken(_) | DaemonError::Launch(LaunchError::NameTaken { .. })) => {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

/// Returns the problem of a VM that was not started because of `error`.
fn problem_of(name: &str, error: &DaemonError) -> StartProblem {
    let first = error.hint().unwrap_or_else(|| "fix the cause".into());
    StartProblem {
        why: chain(error),
        fix: format!("{first}; then: memfold vm start {name}"),
    }
}
