//! The controller: one step takes in all signals and returns one decision for each VM.
//!
//! 1. Each VM's signals are checked and its working set is estimated ([`crate::estimate`]).
//! 2. The host's rung follows from what is available and from what could still be taken
//!    ([`crate::ladder`]).
//! 3. VMs that lack memory get it, those with the highest priority first, out of what the host has
//!    beyond the emergency reserve.
//! 4. The others may lose memory: page cache that is not missed, idle plugged memory, and, if the
//!    host is short, RAM by balloon from the VM that is hurt least.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use memfold_units::ByteSize;

use crate::assessment::{Assessment, Call};
use crate::decision::{Decision, VmDecision};
use crate::input::{HostState, Limits, Signals, VmId};
use crate::ladder::{Ladder, Rung, shortage};
use crate::policy::Policy;
use crate::vm_state::VmState;

/// Decides how much memory each VM should have. See the crate's documentation.
#[derive(Clone, Debug)]
pub struct Controller {
    policy: Policy,
    vms: BTreeMap<VmId, VmState>,
    /// VMs that the next step leaves out and does not forget.
    absent: BTreeSet<VmId>,
    ladder: Ladder,
    /// Time that has passed in steps. It never goes back, whatever the caller's clock does.
    clock: Duration,
    last_now: Option<Duration>,
    /// When the host came to the lowest rung, while it is there.
    ample_since: Option<Duration>,
}

/// Longest time that one step can take for the controller. After a longer break, for example
/// because the host was suspended, waits are not over only because of the break.
const LONGEST_STEP: Duration = Duration::from_secs(60);

impl Controller {
    /// Creates a controller that knows no VM yet.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            vms: BTreeMap::new(),
            absent: BTreeSet::new(),
            ladder: Ladder::default(),
            clock: Duration::ZERO,
            last_now: None,
            ample_since: None,
        }
    }

    /// Decides for the moment `now`. Call it every one to five seconds with all running VMs; VMs
    /// that are left out are forgotten, but for those that [`keep`](Self::keep) names.
    ///
    /// The controller expects that the orders are carried out. For an order that is only shown,
    /// call [`discard_order`](Self::discard_order) before the next step; for one that failed, call
    /// [`order_failed`](Self::order_failed); for one that cannot be carried out at this moment,
    /// call [`postpone_order`](Self::postpone_order).
    pub fn step(
        &mut self,
        now: Duration,
        host: HostState,
        vms: &[(VmId, Limits, Signals)],
    ) -> Decision {
        let passed = self
            .last_now
            .map_or(Duration::ZERO, |last| now.saturating_sub(last));
        self.clock = self.clock.saturating_add(passed.min(LONGEST_STEP));
        self.last_now = Some(now);
        let mut known = std::mem::take(&mut self.absent);
        known.extend(vms.iter().map(|(vm, ..)| *vm));
        self.vms.retain(|vm, _| known.contains(vm));

        let mut assessed: Vec<Assessment> = Vec::with_capacity(vms.len());
        for (vm, limits, signals) in vms {
            let state = self.vms.entry(*vm).or_default();
            state.settle_last_order(self.clock, &self.policy);
            assessed.push(state.assess(self.clock, now, (*vm, limits, signals), &self.policy));
        }

        let sum =
            |part: fn(&Assessment) -> u64| assessed.iter().map(part).fold(0, u64::saturating_add);
        let (trimmable, balloonable) = (sum(|vm| vm.trimmable), sum(Assessment::balloonable));
        let (rung, why) = self.ladder.step(self.clock, &host, trimmable, balloonable);
        match rung {
            Rung::Ample => {
                self.ample_since.get_or_insert(self.clock);
            }
            _ => self.ample_since = None,
        }

        let mut calls: Vec<Option<Call>> = vec![None; assessed.len()];
        self.give(&host, &assessed, &mut calls);
        self.take(rung, &host, &assessed, &mut calls);

        let decided = assessed
            .into_iter()
            .zip(calls)
            .map(|(vm, call)| self.decide(vm, call))
            .collect();
        let recall_lent = match rung {
            Rung::Lent | Rung::Brake => ByteSize(shortage(&host).0.min(host.lent.0)),
            _ => ByteSize(0),
        };
        Decision {
            rung,
            why,
            recall_lent,
            vms: decided,
        }
    }

    /// Says that the next step leaves out this VM because nothing can be found out about it at this
    /// moment, for example because QEMU does not answer. What is known of the VM is kept.
    pub fn keep(&mut self, vm: VmId) {
        self.absent.insert(vm);
        if let Some(state) = self.vms.get_mut(&vm) {
            state.note_absence();
        }
    }

    /// Says that an order for `vm` failed: that of the last step, or one in progress. If it was a
    /// take, the VM gets no further one for a while, as after one without effect, and other VMs are
    /// asked.
    pub fn order_failed(&mut self, vm: VmId) {
        if let Some(state) = self.vms.get_mut(&vm) {
            state.order_failed(self.clock);
        }
    }

    /// Says that the last step's order for `vm` cannot be carried out at this moment, for example
    /// because QEMU's monitor is in use. If it was a take, the VM gets the next one after 5 s at
    /// the earliest, and other VMs are asked meanwhile. A give may be ordered again at once.
    pub fn postpone_order(&mut self, vm: VmId) {
        if let Some(state) = self.vms.get_mut(&vm) {
            state.postpone_order(self.clock);
        }
    }

    /// Says that a trim of `vm` ended early, after `reclaimed` bytes, because the guest read the
    /// files again or its tasks waited for memory. What is left counts as needed, and the next
    /// probe waits.
    pub fn trim_was_missed(&mut self, vm: VmId, reclaimed: ByteSize) {
        if let Some(state) = self.vms.get_mut(&vm) {
            state.trim_was_missed(self.clock, reclaimed.0, &self.policy);
        }
    }

    /// Says that the last step's order for `vm` was not carried out because orders are only shown,
    /// or because another one is in progress. The controller then expects no effect, and may give
    /// the same order again.
    pub fn discard_order(&mut self, vm: VmId) {
        if let Some(state) = self.vms.get_mut(&vm) {
            state.discard_order();
        }
    }

    /// Says whether the guest of `vm` should still carry out the last order to unplug memory. If
    /// not, the caller lets it keep what it has not unplugged yet.
    #[must_use]
    pub fn may_unplug(&self, vm: VmId) -> bool {
        let state = self.vms.get(&vm);
        state.is_some_and(|state| state.may_unplug(self.clock))
    }

    /// Gives memory to the VMs that need it, within what the host has and has not promised yet. A
    /// guest whose OOM killer could run soon gets memory although others have not used theirs.
    fn give(&self, host: &HostState, vms: &[Assessment], calls: &mut [Option<Call>]) {
        let promised = vms.iter().filter_map(|vm| {
            let state = self.vms.get(&vm.vm)?;
            Some(state.promised(self.clock, vm.parts.in_use()))
        });
        let promised = promised.fold(0, u64::saturating_add);
        let available = host.available.0.saturating_sub(promised);
        let mut headroom = available.saturating_sub(host.reserve.0 / 4);
        let mut last_resort = host.available.0.min(host.reserve.0 / 4);
        last_resort = last_resort.saturating_add(host.swap_free.0 / 2);
        let mut asking: Vec<usize> = (0..vms.len()).filter(|&i| vms[i].lacks > 0).collect();
        let urgency = |vm: &Assessment| vm.pressure.unwrap_or(0.0).max(vm.pressure_now);
        asking.sort_by(|&a, &b| {
            let (a, b) = (&vms[a], &vms[b]);
            let by_weight = b.weight.cmp(&a.weight);
            by_weight.then(urgency(b).total_cmp(&urgency(a)))
        });
        for index in asking {
            let vm = &vms[index];
            let most = if vm.is_at_risk {
                headroom.saturating_add(last_resort)
            } else {
                headroom
            };
            let call = vm.call_to_give(most);
            let bytes = call.order.map_or(0, |order| order.bytes.0);
            last_resort = last_resort.saturating_sub(bytes.saturating_sub(headroom));
            headroom = headroom.saturating_sub(bytes);
            calls[index] = Some(call);
        }

        // Without need, memory is given back only from what is far above the reserve.
        let calm = self
            .ample_since
            .is_some_and(|since| self.clock.saturating_sub(since) >= self.policy.give_back_after);
        let comfortable = host.reserve.0.saturating_add(host.reserve.0 / 2);
        let mut spare = headroom.min(available.saturating_sub(comfortable)) / 2;
        for (vm, call) in vms.iter().zip(calls.iter_mut()) {
            let state = self.vms.get(&vm.vm);
            if !calm || call.is_some() || !state.is_some_and(|s| s.may_get_back(self.clock)) {
                continue;
            }
            *call = vm.call_to_give_back(spare, &self.policy);
            let bytes = call.and_then(|call| call.order).map_or(0, |o| o.bytes.0);
            spare = spare.saturating_sub(bytes);
        }
    }

    /// Takes memory from VMs that got none in this step.
    fn take(&self, rung: Rung, host: &HostState, vms: &[Assessment], calls: &mut [Option<Call>]) {
        let short = shortage(host).0;
        let mut missing = short;
        for (vm, call) in vms.iter().zip(calls.iter_mut()) {
            let Some(state) = self.vms.get(&vm.vm).filter(|_| call.is_none()) else {
                continue;
            };
            *call = state
                .call_to_trim(self.clock, vm, rung, &self.policy)
                .or_else(|| state.call_to_shrink(self.clock, vm, &self.policy));
            let bytes = call.and_then(|call| call.order).map_or(0, |o| o.bytes.0);
            missing = missing.saturating_sub(bytes);
        }
        if rung < Rung::Balloon {
            return;
        }
        let has_order = |call: &Option<Call>| call.is_some_and(|call| call.order.is_some());
        let mut order: Vec<usize> = (0..vms.len())
            .filter(|&i| vms[i].dispensable() > 0 && !has_order(&calls[i]))
            .collect();
        order.sort_by(|&a, &b| vms[a].harm().total_cmp(&vms[b].harm()));
        for index in order {
            if missing == 0 {
                break;
            }
            let vm = &vms[index];
            let Some(state) = self.vms.get(&vm.vm) else {
                continue;
            };
            let call = state.call_to_balloon(self.clock, vm, missing, short, &self.policy);
            missing = missing.saturating_sub(call.gain);
            calls[index] = Some(call);
        }
    }

    /// Records a VM's order, and makes its part of the answer.
    fn decide(&mut self, mut vm: Assessment, call: Option<Call>) -> VmDecision {
        let mut call = call.unwrap_or_else(|| Call::none(vm.idle_reason()));
        if let (None, Some(reason)) = (call.order, vm.lacks_driver()) {
            call.reason = reason;
        }
        if let (Some(state), Some(_)) = (self.vms.get_mut(&vm.vm), call.order) {
            state.expect(self.clock, &vm, &call);
        }
        if let Some(hot) = call.hot {
            vm.count_as_needed(hot);
        }
        VmDecision {
            vm: vm.vm,
            size: ByteSize(vm.parts.size),
            working_set: ByteSize(vm.working_set),
            basis: vm.basis,
            target: ByteSize(vm.target),
            pressure: vm.pressure,
            order: call.order,
            reason: call.reason,
        }
    }
}
