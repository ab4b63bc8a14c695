//! The last decision of right-sizing, as reports and the history show it.

use std::collections::BTreeMap;

use memfold_api::{Sizing, VmRightsize};
use memfold_ledger::history::VmSize;
use memfold_rightsize::{Basis, Decision, HostState, Signals};
use memfold_units::ByteSize;

use crate::rightsizing::order_log;
use crate::run_state::RunState;

/// The last decision.
#[derive(Debug)]
pub(super) struct Last {
    pub host: HostState,
    pub decision: Decision,
    /// The VMs of the decision, in its order.
    pub vms: Vec<DecidedVm>,
    /// VMs that the decision leaves out, with the reason.
    pub absent: Vec<VmRightsize>,
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
    /// Returns the VMs of the decision and those that it leaves out, by name. `is_on`: orders are
    /// carried out.
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
            .chain(self.absent.iter().cloned())
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

/// Describes a VM that a decision leaves out. `size`: memory that the guest may use, as QEMU last
/// said; `plugged`: the part of it that virtio-mem has plugged.
pub(super) fn left_out(
    name: &str,
    sizing: Sizing,
    size: ByteSize,
    plugged: Option<u64>,
    reason: String,
) -> VmRightsize {
    VmRightsize {
        vm: name.to_owned(),
        size_bytes: size.0,
        plugged_bytes: plugged,
        working_set_bytes: size.0,
        basis: basis(Basis::Unknown).to_owned(),
        target_bytes: size.0,
        pressure: None,
        order: None,
        reason,
        sizing,
    }
}

/// Says why a decision leaves a VM out. `silence`: why QEMU or memfold's library does not answer.
pub(super) fn absence(state: &RunState, silence: Option<&str>) -> String {
    match silence {
        Some(why) => format!("the VM does not answer ({why}), so it keeps its size"),
        None if !state.is_running() => format!(
            "the VM does not run ({}), so it keeps its size",
            state.words()
        ),
        None => {
            "QEMU has not said yet how much memory the VM has now, so the VM keeps its size".into()
        }
    }
}

fn basis(basis: Basis) -> &'static str {
    match basis {
        Basis::Probed => "probed",
        Basis::UpperBound => "upper bound",
        Basis::Unknown => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use memfold_rightsize::{Controller, Policy};

    use super::*;

    /// Returns a decision about no VM, as reports show it with these VMs.
    fn last(vms: Vec<DecidedVm>, absent: Vec<VmRightsize>) -> Last {
        let host = HostState::default();
        let mut controller = Controller::new(Policy::default());
        Last {
            host,
            decision: controller.step(Duration::ZERO, host, &[]),
            vms,
            absent,
        }
    }

    #[test]
    fn plugged_memory_is_part_of_what_a_vm_was_given() {
        let db = DecidedVm {
            name: "db".into(),
            sizing: Sizing::default(),
            plugged: Some(4 << 30),
            installed: ByteSize::mib(6144),
        };
        let last = last(vec![db], Vec::new());
        assert_eq!(last.installed("db"), Some(ByteSize::mib(6144)));
        assert_eq!(last.installed("web"), None);
    }

    #[test]
    fn a_vm_that_a_decision_leaves_out_is_shown_with_its_last_size_and_the_reason() {
        let away = RunState {
            name: "postmigrate".into(),
            cause: Some("the VM was migrated away by another program".into()),
            ..RunState::default()
        };
        let words = "the VM does not run (postmigrate: the VM was migrated away by another \
                     program), so it keeps its size";
        let reason = absence(&away, None);
        assert_eq!(reason, words);
        let size = ByteSize::mib(640);
        let web = left_out("web", Sizing::default(), size, None, reason);
        let last = last(Vec::new(), vec![web]);
        let shown = last.vms(true);
        assert_eq!((shown.len(), &*shown[0].vm), (1, "web"));
        assert_eq!((shown[0].size_bytes, &*shown[0].reason), (size.0, words));
        assert_eq!((&*shown[0].basis, &shown[0].order), ("unknown", &None));
        // The history has only what is known.
        assert!(last.sizes().is_empty());

        let running = RunState::default();
        let late = "QEMU's library has not answered for 2.0 s";
        assert_eq!(
            absence(&running, Some(late)),
            format!("the VM does not answer ({late}), so it keeps its size")
        );
        assert!(absence(&running, None).contains("has not said yet"));
    }
}
