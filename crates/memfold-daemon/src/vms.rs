//! Operations on VMs: list, start, attach, adopt, stop.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use memfold_api::VmInfo;
use memfold_fold::Command;
use memfold_vm::kernel_copy::KernelCopies;
use memfold_vm::{AgentOptions, Vm};
use parking_lot::Mutex;
use tracing::{debug, info, warn};

use crate::arrivals::AttachedVm;
use crate::error::DaemonError;
use crate::machine::{Machine, Origin, Role};
use crate::mechanisms::Mechanisms;
use crate::options::DaemonOptions;
use crate::{threads, vm_registry};

mod adoption;
mod attach;
mod console;
mod control;
mod launch;

pub use console::Console;

/// The service that starts, attaches, adopts and stops VMs.
#[derive(Debug)]
pub struct Vms {
    below: Arc<Mechanisms>,
    kernels: KernelCopies,
    /// Glob patterns of the paths whose page cache agents report.
    agents: AgentOptions,
    /// Attached VMs, by name, as last recorded for the next daemon.
    attached: Mutex<BTreeMap<String, AttachedVm>>,
}

impl Vms {
    pub(crate) fn new(below: Arc<Mechanisms>, options: &DaemonOptions) -> Self {
        Self {
            below,
            kernels: KernelCopies::default(),
            agents: AgentOptions {
                include: options.include.clone(),
                exclude: options.exclude.clone(),
                ..AgentOptions::default()
            },
            attached: Mutex::default(),
        }
    }

    /// Inserts a running VM into the table, and begins to watch and fold the VM.
    fn take_on(
        self: &Arc<Self>,
        vm: Vm,
        name: &str,
        domain: Option<String>,
        origin: Origin,
    ) -> Result<Arc<Machine>, DaemonError> {
        let role = Role {
            id: self.below.registry.new_id(),
            name: name.to_owned(),
            domain,
            origin,
        };
        let machine =
            Machine::take_on(vm, role, self.below.folding.commands(), self.agents.clone())?;
        if let Err(known) = self.below.registry.insert(machine.clone()) {
            let _ = self.below.folding.tell(Command::Remove(machine.id()));
            return Err(vm_registry::known_as(&known));
        }
        let (watched, vms) = (machine.clone(), Arc::downgrade(self));
        let begun = threads::begin("vm-watch", move || {
            watched.watch();
            if let Some(vms) = vms.upgrade() {
                vms.forget(&watched);
            }
        });
        if begun.is_err() {
            // Nobody would notice the VM's end.
            self.below.registry.remove(&machine);
            let _ = self.below.folding.tell(Command::Remove(machine.id()));
            return Err(DaemonError::Internal("no thread to watch the VM"));
        }
        Ok(machine)
    }

    /// Removes a VM whose process has ended from all services, and removes its files.
    fn forget(&self, machine: &Machine) {
        let said = machine.vm().directory().and_then(memfold_vm::last_words);
        if let Some(said) = said {
            let vm = machine.name();
            warn!(
                vm,
                said, "QEMU ended unexpectedly; 'said' is QEMU's last message"
            );
        } else {
            info!(vm = machine.name(), "VM ended");
        }
        self.below.segments.end_writer(machine.name());
        // The files are removed before the VM's name becomes free, because the next VM of this name
        // uses the same paths.
        machine.clean_up();
        // The next VM of this name may borrow memory at once. To return this VM's may take long.
        let loan = self.below.swap_disks.take(machine);
        self.below.registry.remove(machine);
        // Sending fails if the engine has ended already.
        let _ = self.below.folding.tell(Command::Remove(machine.id()));
        self.below.snapshots.let_go();
        self.below.swap_disks.end(loan);
        self.below.segments.left();
        if machine.attached().is_some() {
            self.write_attached();
        }
    }

    /// Returns all VMs, sorted by name, including those that are being started or adopted.
    #[must_use]
    pub fn list(&self) -> Vec<VmInfo> {
        // `swaps` takes another lock, so it is called before the table is locked.
        let lent = self.below.swap_disks.swaps();
        let arriving = self.below.registry.arrivals().all();
        let machines = self.below.registry.machines();
        let mut vms: Vec<VmInfo> = machines.iter().map(|m| m.info()).collect();
        // A VM that has moved from the list of arrivals to the table meanwhile is listed once.
        let known: BTreeSet<&str> = machines.iter().map(|m| m.name()).collect();
        let missing = arriving.iter().filter(|a| !known.contains(a.name()));
        vms.extend(missing.map(|arrival| arrival.info(self.below.registry.state())));
        vms.sort_by(|a, b| a.name.cmp(&b.name));
        for vm in &mut vms {
            if let Some(swap) = lent.get(&vm.name) {
                vm.swap = Some(swap.clone());
            }
        }
        vms
    }

    /// Shares one copy of the kernel image among VMs that boot with `-kernel`.
    pub(crate) fn share_kernel(&self, vm: &Vm) {
        match self.kernels.share(vm) {
            Ok(bytes) => debug!(
                vm = vm.name(),
                bytes, "VM shares part of its kernel image with other VMs"
            ),
            Err(error) => {
                debug!(vm = vm.name(), %error, "VM cannot share its kernel image with other VMs, and keeps its own copy");
            }
        }
    }
}
