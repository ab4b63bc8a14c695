//! The last decision of right-sizing, as reports and the history show it.

use std::collections::BTreeMap;

use memfold_api::{Sizing, VmRightsize};
use memfold_ledger::history::VmSize;
use memfold_rightsize::{Basis, Decision, HostState, Signals};
use memfold_units::ByteSize;

use crate::rightsizing::order_log;

/// The last decision.
#[derive(Debug)]
pub(super) struct Last {
    pub host: HostState,
    pub decision: Decision,
    /// The VMs of the decision, in its order.
    pub vms: Vec<DecidedVm>,
}

/// What the decision does not say of a VM.
#[derive(Debug)]
pub(super) struct DecidedVm {
    name: String,
    sizing: Sizing,
    plugged: Option<u64>,
    /// RAM and plugged memory, with what the balloon holds.
    installed: ByteSize,
}

impl DecidedVm {
    pub fn of(name: &str, sizing: Sizing, signals: &Signals) -> Self {
        Self {
            name: name.to_owned(),
            sizing,
            plugged: signals.virtio_mem.map(|device| device.plugged.0),
            installed: signals.installed(),
        }
    }
}

impl Last {
    /// Returns the VMs of the decision, by name. `is_on`: orders are carried out.
    pub fn vms(&self, is_on: bool) -> Vec<VmRightsize> {
        let would = if is_on { "" } else { "would " };
        let vms = self.decision.vms.iter().zip(&self.vms);
        let mut vms: Vec<VmRightsize> = vms
            .map(|(vm, known)| VmRightsize {
                vm: known.name.clone(),
                size_bytes: vm.size.0,
                plugged_bytes: known.plugged,
                working_set_bytes: vm.working_set.0,
                basis: basis(vm.basis).to_owned(),
                target_bytes: vm.target.0,
                pressure: vm.pressure,
                order: vm
                    .order
                    .map(|order| format!("{would}{}", order_log::text(order))),
                reason: vm.reason.sentence(is_on),
                sizing: known.sizing,
            })
            .collect();
        vms.sort_by(|a, b| a.vm.cmp(&b.vm));
        vms
    }

    /// Returns what is known about the size of each VM, for the history.
    pub fn sizes(&self) -> BTreeMap<String, VmSize> {
        let vms = self.decision.vms.iter().zip(&self.vms);
        let sizes = vms.map(|(vm, DecidedVm { name, .. })| {
            let known = |bytes: ByteSize| (vm.basis != Basis::Unknown).then_some(bytes.0);
            let size = VmSize {
                size_bytes: vm.size.0,
                working_set_bytes: known(vm.working_set),
                target_bytes: known(vm.target),
                is_probed: vm.basis == Basis::Probed,
            };
            (name.clone(), size)
        });
        sizes.collect()
    }

    /// Returns the RAM and the plugged memory of a VM.
    pub fn installed(&self, vm: &str) -> Option<ByteSize> {
        let found = self.vms.iter().find(|known| known.name == vm);
        found.map(|known| known.installed)
    }
}

fn basis(basis: Basis) -> &'static str {
    match basis {
        Basis::Probed => "probed",
        Basis::KernelLists => "kernel lists",
        Basis::UpperBound => "upper bound",
        Basis::Unknown => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use memfold_rightsize::{Controller, Policy};

    use super::*;

    #[test]
    fn plugged_memory_is_part_of_what_a_vm_was_given() {
        let last = Last {
            host: HostState::default(),
            decision: Controller::new(Policy::default()).step(
                Duration::ZERO,
                HostState::default(),
                &[],
            ),
            vms: vec![DecidedVm {
                name: "db".into(),
                sizing: Sizing::default(),
                plugged: Some(4 << 30),
                installed: ByteSize::mib(6144),
            }],
        };
        assert_eq!(last.installed("db"), Some(ByteSize::mib(6144)));
        assert_eq!(last.installed("web"), None);
    }
}
