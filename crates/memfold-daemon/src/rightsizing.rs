//! Right-sizing: gives each VM the memory that it needs, and lets the host have the rest.
//!
//! ```text
//!   every 2 s:  figures of guests (agent or balloon driver), balloons (QEMU), host  --> Controller (memfold-rightsize)
//!                                                                                         v
//!     mode watch: the decision is only shown      mode on: a thread for each VM with an order trims or moves its balloon
//! ```
//! The controller decides; this service reads the figures and carries the orders out. A VM has at
//! most one order at a time, and a second one only if its guest is trimmed and needs memory. While
//! right-sizing is not on, guests get back what it has put into their balloons, also if an earlier
//! daemon did that.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{RightsizeMode, RightsizeReport, Sizing, VmRightsize};
use memfold_ledger::DebtReport;
use memfold_ledger::history::VmSize;
use memfold_rightsize::{Action, Controller, Decision, Limits, Order, Policy, Signals, VmId};
use memfold_units::ByteSize;
use memfold_vm::{Trim, balloon, virtio_mem};
use memfold_wire::memory::TrimEnd;
use memfold_wire::permission::Permission;
use parking_lot::{Mutex, MutexGuard};
use tracing::{debug, info};

use self::in_progress::InProgress;
use self::last::{DecidedVm, Last, absence, left_out};
use self::order_log::OrderLog;
use self::signals::{QemuMemories, QemuMemory};
use self::unplugs::Unplugs;
use self::untrimmable::{Untrimmable, is_refusal};
use crate::debt::{DebtWatch, LadderNote};
use crate::error::{DaemonError, refused};
use crate::lending::Lending;
use crate::machine::Machine;
use crate::size_records::{MovedBalloon, SizeRecords};
use crate::threads;
use crate::vm_registry::VmRegistry;

mod give_back;
mod in_progress;
mod last;
mod order_log;
mod signals;
mod unplugs;
mod untrimmable;

/// Time between two looks at all VMs.
const INTERVAL: Duration = Duration::from_secs(2);

/// Longest time that a guest may take for a trim.
const TRIM_LIMIT: Duration = Duration::from_secs(10);

/// Longest time that an order waits for QEMU's monitor. After that, the figures from which it was
/// decided are too old, and the next look decides again.
const MONITOR_WAIT: Duration = Duration::from_secs(1);

/// Time after an order that changes a VM's size, in which QEMU is asked for that size at each look.
const EFFECT: Duration = Duration::from_secs(60);

/// Share of time for which tasks of a guest may wait for memory while it is trimmed.
const TRIM_PRESSURE: f64 = 0.01;

/// What a guest needs so that its agent can trim.
const NEEDED_TO_TRIM: &str = "trimming needs Linux 5.19 and cgroup v2 with its memory controller in the guest, and 'swappiness=' of memory.reclaim if the guest has swap space; until then memfold moves the VM's balloon";

/// Number of the last orders in a report, unless the request says otherwise.
pub const EVENTS: usize = 100;

/// Service that sizes VMs.
#[derive(Debug)]
pub struct Rightsizing {
    registry: Arc<VmRegistry>,
    debt: Arc<DebtWatch>,
    lending: Arc<Lending>,
    began: Instant,
    records: Arc<SizeRecords>,
    /// Held while somebody reads and then changes settings of a running VM.
    changes: Mutex<()>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    mode: RightsizeMode,
    controller: Controller,
    memories: QemuMemories,
    orders: InProgress,
    /// When VMs got the last order that changes their size, by the machine's number.
    ordered: BTreeMap<u32, Instant>,
    unplugs: Unplugs,
    untrimmable: Untrimmable,
    /// VMs that did not get back what is in their balloons, and about which a line was logged.
    owed: BTreeSet<u32>,
    last: Option<Last>,
    log: OrderLog,
}

impl State {
    /// Returns whether a VM must keep memory that it has not unplugged yet.
    fn controller_forbids_unplugs(&self, id: u32) -> bool {
        !self.controller.may_unplug(VmId(u64::from(id)))
    }

    /// Begins the orders of a decision that can be carried out now, and discards the others.
    /// Returns each order with its VM and its number in the log.
    fn begin_orders(
        &mut self,
        decision: &Decision,
        looked: &[Looked],
    ) -> Vec<(Arc<Machine>, Order, u64)> {
        let mut begun = Vec::new();
        for (vm, looked) in decision.vms.iter().zip(looked) {
            let Some(order) = vm.order else { continue };
            let machine = &looked.machine;
            let id = machine.id();
            let is_trim = matches!(order.action, Action::Trim { .. });
            let is_admitted = self.orders.admits(id, order, vm.size);
            if self.mode != RightsizeMode::On || !is_admitted {
                self.controller.discard_order(vm.vm);
                continue;
            }
            // While the VM is saved, for example, the monitor is in use for a long time.
            if !is_trim && machine.idle_monitor().is_none() {
                self.controller.postpone_order(vm.vm);
                continue;
            }
            let event = self.log.note(machine.name(), order, vm.reason);
            self.orders.begin(id, order, event);
            if !is_trim {
                self.ordered.insert(id, Instant::now());
            }
            begun.push((machine.clone(), order, event));
        }
        begun
    }
}

/// One VM with what the controller gets.
struct Looked {
    machine: Arc<Machine>,
    sizing: Sizing,
    input: (VmId, Limits, Signals),
}

impl Looked {
    fn decided(&self) -> DecidedVm {
        let (.., signals) = &self.input;
        DecidedVm::of(self.machine.name(), self.sizing, signals)
    }
}

impl Rightsizing {
    pub(crate) fn new(
        registry: Arc<VmRegistry>,
        debt: Arc<DebtWatch>,
        lending: Arc<Lending>,
        records: Arc<SizeRecords>,
        mode: RightsizeMode,
    ) -> Self {
        Self {
            registry,
            debt,
            lending,
            began: Instant::now(),
            records,
            changes: Mutex::default(),
            state: Mutex::new(State {
                mode,
                controller: Controller::new(Policy::default()),
                memories: QemuMemories::default(),
                orders: InProgress::default(),
                ordered: BTreeMap::new(),
                unplugs: Unplugs::default(),
                untrimmable: Untrimmable::default(),
                owed: BTreeSet::new(),
                last: None,
                log: OrderLog::default(),
            }),
        }
    }

    /// Starts the thread that looks at all VMs until the daemon ends.
    pub(crate) fn begin(self: &Arc<Self>) -> std::io::Result<()> {
        threads::repeat("rightsize", INTERVAL, self, |service| {
            if let Err(error) = service.look() {
                debug!(%error, "cannot read the host's memory; VMs keep their sizes until the next look");
            }
        })
    }

    /// Changes the mode until the daemon ends.
    pub fn set_mode(self: &Arc<Self>, mode: RightsizeMode) -> RightsizeReport {
        let before = std::mem::replace(&mut self.state.lock().mode, mode);
        if before != mode {
            info!(?before, now = ?mode, "mode of right-sizing changed");
        }
        if mode != RightsizeMode::On {
            self.lending.claim(0, 0);
            for machine in self.registry.machines() {
                self.give_all_back(&machine);
            }
        }
        self.report(EVENTS)
    }

    /// Replaces the controller by one with these settings, which knows no VM yet. For tests and
    /// studies: no operator needs other settings.
    pub fn set_policy(&self, policy: Policy) {
        self.state.lock().controller = Controller::new(policy);
    }

    /// Changes the limits of a VM's size; absent fields keep their values.
    ///
    /// # Errors
    ///
    /// [`DaemonError::BadRequest`] if the limits contradict each other or the VM's RAM.
    pub fn set_sizing(&self, vm: &str, changes: Sizing) -> Result<Sizing, DaemonError> {
        let machine = self.registry.machine(vm)?;
        let _alone = self.one_change();
        let new = self.sizing(&machine).with(changes);
        Self::check_sizing(&machine, new)?;
        self.replace_sizing(&machine, new)?;
        Ok(new)
    }

    /// Waits until no other request changes settings or limits of a running VM. Two requests that
    /// changed different ones at once would undo each other's.
    pub(crate) fn one_change(&self) -> MutexGuard<'_, ()> {
        self.changes.lock()
    }

    /// Checks whether a VM can have these limits.
    ///
    /// # Errors
    ///
    /// [`DaemonError::BadRequest`] if the limits contradict each other or the VM's RAM.
    pub(crate) fn check_sizing(machine: &Machine, new: Sizing) -> Result<(), DaemonError> {
        let checked = new.check(signals::largest(machine));
        checked.map_err(DaemonError::BadRequest)
    }

    /// Gives a VM these limits, which were checked.
    pub(crate) fn replace_sizing(&self, machine: &Machine, new: Sizing) -> Result<(), DaemonError> {
        self.records.change(machine, |record| record.sizing = new)?;
        if new.pinned == Some(true) {
            self.give_all_back(machine);
        }
        Ok(())
    }

    /// Returns the limits of a VM's size.
    pub(crate) fn sizing(&self, machine: &Machine) -> Sizing {
        self.records.get(machine).sizing
    }

    /// Returns the last decision, and the last `events` orders.
    #[must_use]
    pub fn report(&self, events: usize) -> RightsizeReport {
        let state = self.state.lock();
        let mut report = RightsizeReport {
            mode: state.mode,
            events: state.log.events(events),
            rungs: state.log.rungs(),
            orders: state.log.counts(),
            ..RightsizeReport::default()
        };
        let is_on = state.mode == RightsizeMode::On;
        let last = state.last.as_ref();
        if let Some(last) = last.filter(|_| state.mode != RightsizeMode::Off) {
            report.rung = Some(last.decision.rung.name().to_owned());
            report.why = last.decision.why.sentence(is_on);
            report.available_bytes = last.host.available.0;
            report.reserve_bytes = last.host.reserve.0;
            report.vms = last.vms(is_on);
        }
        report
    }

    /// Returns what right-sizing knows about each VM, for the history; empty while it is off.
    pub(crate) fn sizes(&self) -> BTreeMap<String, VmSize> {
        let state = self.state.lock();
        state.last.as_ref().map(Last::sizes).unwrap_or_default()
    }

    /// Returns the memory that a VM was given: its RAM, and what is plugged according to the last
    /// decision.
    pub(crate) fn given(&self, machine: &Machine) -> ByteSize {
        let state = self.state.lock();
        let last = state.last.as_ref();
        let installed = last.and_then(|last| last.installed(machine.name()));
        installed.unwrap_or_else(|| signals::ram(machine))
    }

    /// Takes what QEMU said about the memory of these VMs out of the state, because QEMU may answer
    /// late and the state is not locked meanwhile. Returns also when VMs were given an order that
    /// may still have an effect. Forgets other VMs.
    fn take_memories(&self, machines: &[Arc<Machine>]) -> (QemuMemories, BTreeMap<u32, Instant>) {
        let mut state = self.state.lock();
        let is_there = |id: &u32| machines.iter().any(|machine| machine.id() == *id);
        state.owed.retain(is_there);
        state.orders.keep(is_there);
        state
            .ordered
            .retain(|id, at| is_there(id) && at.elapsed() < EFFECT);
        let mut memories = std::mem::take(&mut state.memories);
        memories.keep(machines);
        (memories, state.ordered.clone())
    }

    /// Finds out what the controller gets about each VM. A VM that is paused, or of which QEMU or
    /// memfold's library does not answer, is absent: it gets no order until it answers. Returns
    /// absent VMs with what reports show of them.
    fn look_at(
        &self,
        machines: Vec<Arc<Machine>>,
        debt: &DebtReport,
        memories: &mut QemuMemories,
        ordered: &BTreeMap<u32, Instant>,
    ) -> (Vec<Looked>, Vec<(VmId, VmRightsize)>) {
        let (mut looked, mut absent) = (Vec::new(), Vec::new());
        for machine in machines {
            let id = VmId(u64::from(machine.id()));
            let answers = machine.state().is_running() && machine.is_silent().is_none();
            let may_move = ordered.contains_key(&machine.id());
            let report = machine.guest_memory();
            let claimed = report.as_ref().map(|(_, guest)| guest.mem_total_bytes);
            let memory = answers.then(|| memories.look(&machine, may_move, claimed));
            let Some(memory) = memory.flatten() else {
                absent.push((id, self.describe_absent(&machine, memories)));
                continue;
            };
            let folded = debt.vms.iter().find(|vm| vm.name == machine.name());
            let folded = ByteSize(folded.map_or(0, |vm| vm.folded_bytes));
            let is_untrimmable = self.state.lock().untrimmable.contains(machine.id());
            let trims = !is_untrimmable && signals::may_trim(&machine);
            let signals = signals::of_vm(&machine, self.began, report, memory, folded, trims);
            let sizing = self.sizing(&machine);
            let limits = signals::limits(sizing, signals.ram, self.ceiling(&machine, &signals));
            looked.push(Looked {
                machine,
                sizing,
                input: (id, limits, signals),
            });
        }
        (looked, absent)
    }

    /// Describes a VM that gets no order, with the reason.
    fn describe_absent(&self, machine: &Machine, memories: &QemuMemories) -> VmRightsize {
        let known = memories.known(machine.id());
        let size = known.map_or_else(|| signals::ram(machine), QemuMemory::size);
        let device = known.and_then(|known| known.virtio_mem);
        let reason = absence(&machine.state(), machine.is_silent().as_deref());
        let plugged = device.map(|device| device.plugged.0);
        left_out(machine.name(), self.sizing(machine), size, plugged, reason)
    }

    /// Looks at the host and all VMs once, and carries the decision out.
    fn look(self: &Arc<Self>) -> Result<(), DaemonError> {
        let mode = self.state.lock().mode;
        let machines: Vec<Arc<Machine>> = self.registry.machines();
        self.records.keep(&machines);
        let is_there = |id: &u32| machines.iter().any(|machine| machine.id() == *id);
        let mut state = self.state.lock();
        state.unplugs.keep(is_there);
        state.untrimmable.keep(is_there);
        drop(state);
        for machine in &machines {
            self.note_received(machine);
            if mode != RightsizeMode::On || self.records.is_pinned(machine) {
                self.give_all_back(machine);
            }
        }
        if mode == RightsizeMode::Off {
            self.state.lock().last = None;
            self.debt.note_rung(None);
            return Ok(());
        }
        let debt = self.debt.report_now()?;
        let lent = self.lending.status().map_or(0, |lender| lender.lent_bytes);
        let mut host = signals::host(&debt, lent);
        let now = self.began.elapsed();
        let (mut memories, ordered) = self.take_memories(&machines);
        let (looked, absent) = self.look_at(machines, &debt, &mut memories, &ordered);
        let input: Vec<_> = looked.iter().map(|vm| vm.input.clone()).collect();
        let mut state = self.state.lock();
        // An operator may have changed the mode meanwhile.
        let mode = state.mode;
        state.memories = memories;
        for (vm, _) in &absent {
            state.controller.keep(*vm);
        }
        let is_on = mode == RightsizeMode::On;
        host.recalls_lent = is_on;
        let decision = state.controller.step(now, host, &input);
        if state.last.as_ref().map(|last| last.decision.rung) != Some(decision.rung) {
            let (rung, why) = (decision.rung.name(), decision.why.sentence(is_on));
            info!(rung, why, "right-sizing: the host's rung changed");
            state.log.note_rung(rung, why);
        }
        let begun = state.begin_orders(&decision, &looked);
        let machines = looked.iter().map(|looked| &looked.machine);
        let stopped: Vec<_> = machines
            .filter(|machine| is_on && state.controller_forbids_unplugs(machine.id()))
            .cloned()
            .collect();
        let kept = host.reserve.0.saturating_add(host.reserve.0 / 2);
        let (recalled, kept) = if is_on {
            (decision.recall_lent.0, kept)
        } else {
            (0, 0)
        };
        self.lending.claim(recalled, kept);
        let why = decision.why.sentence(is_on);
        self.debt.note_rung(Some(LadderNote {
            rung: decision.rung,
            why,
            is_on,
        }));
        state.last = Some(Last {
            host,
            decision,
            vms: looked.iter().map(Looked::decided).collect(),
            absent: absent.into_iter().map(|(_, vm)| vm).collect(),
        });
        drop(state);
        for machine in stopped {
            self.stop_unplugging(&machine);
        }
        for (machine, order, event) in begun {
            let service = self.clone();
            let id = machine.id();
            let work = move || service.carry_out(&machine, order, event);
            if threads::begin("rightsize-vm", work).is_err() {
                let mut state = self.state.lock();
                state.orders.end(id, order, event);
                state.controller.order_failed(VmId(u64::from(id)));
            }
        }
        Ok(())
    }

    /// Carries an order out, and notes what became of it.
    fn carry_out(&self, machine: &Machine, order: Order, event: u64) {
        let done = match order.action {
            Action::Trim { bytes, .. } => self.trim(machine, bytes),
            Action::Balloon { target } => {
                let set = self.move_balloon(machine, target);
                set.map(|()| format!("balloon target is {target}"))
            }
            Action::Plug { bytes } => self.plug(machine, |plugged, max| {
                ByteSize(plugged.0.saturating_add(bytes.0).min(max.0))
            }),
            Action::Unplug { bytes } => self.plug(machine, |plugged, _| {
                ByteSize(plugged.0.saturating_sub(bytes.0))
            }),
        };
        let failed = done.is_err();
        let is_trim = matches!(order.action, Action::Trim { .. });
        let text = done.unwrap_or_else(|error| error.to_string());
        let mut state = self.state.lock();
        let is_last = state.orders.end(machine.id(), order, event);
        if failed && is_last {
            let vm = VmId(u64::from(machine.id()));
            // A guest that cannot trim is not asked again, so its balloon need not wait.
            let cannot_trim = is_trim && state.untrimmable.contains(machine.id());
            if cannot_trim {
                state.controller.discard_order(vm);
            } else {
                state.controller.order_failed(vm);
            }
        }
        state.log.note_result(event, text, failed);
        let is_on = state.mode == RightsizeMode::On;
        drop(state);
        // Right-sizing may have been turned off, or the VM pinned, while the order was carried out.
        if !is_on || self.records.is_pinned(machine) {
            self.give_all_back(machine);
        }
    }

    /// Makes a guest reclaim clean page cache. Returns what became of it, as text.
    fn trim(&self, machine: &Machine, bytes: ByteSize) -> Result<String, DaemonError> {
        let result = machine.trim(&Trim {
            bytes: bytes.0,
            max_pressure: TRIM_PRESSURE,
            limit: TRIM_LIMIT,
            spare_swap: true,
        })?;
        let reclaimed = ByteSize(result.reclaimed_bytes);
        let mut state = self.state.lock();
        state.untrimmable.note(machine.id(), result.end);
        if matches!(result.end, TrimEnd::Refaults | TrimEnd::Pressure) {
            let vm = VmId(u64::from(machine.id()));
            state.controller.trim_was_missed(vm, reclaimed);
        }
        drop(state);
        let text = format!("{reclaimed} reclaimed, {}", trim_end(result.end));
        match result.end {
            TrimEnd::Forbidden => Err(refused(text, "see /etc/memfold/agent.toml in the guest")),
            end if is_refusal(end) => Err(refused(text, NEEDED_TO_TRIM)),
            _ => Ok(text),
        }
    }

    /// Returns the size above which a VM gets nothing unless the operator says otherwise: its size
    /// before right-sizing moved its balloon, or its present size if that is larger, and what
    /// virtio-mem can plug. The balloon of a VM that memfold started is moved by no other program;
    /// a snapshot may have been saved with memory in it.
    fn ceiling(&self, machine: &Machine, signals: &Signals) -> ByteSize {
        let device = signals.virtio_mem;
        let plugged = device.map_or(0, |device| device.plugged.0);
        let pluggable = device.map_or(0, |device| device.max.0);
        let size = ByteSize(signals.size().0.saturating_sub(plugged));
        let ceiling = self.balloon_ceiling(machine, signals, size);
        ByteSize(ceiling.0.saturating_add(pluggable))
    }

    /// The same without memory that virtio-mem can plug. `size`: the VM's present size without
    /// that.
    fn balloon_ceiling(&self, machine: &Machine, signals: &Signals, size: ByteSize) -> ByteSize {
        let Some(moved) = self.records.get(machine).moved else {
            let is_own = machine.vm().directory().is_some();
            return if is_own { signals.ram } else { size };
        };
        let seen = moved.seen(size, signals.ram, is_shared(machine));
        if signals.balloon.is_none() || seen == Some(moved) {
            return moved.before().max(size);
        }
        if let Err(error) = self.records.change(machine, |record| record.moved = seen) {
            debug!(vm = machine.name(), %error, "cannot record that another program has changed the VM's size; trying again at the next look");
        }
        seen.map_or(size, |moved| moved.before().max(size))
    }

    /// Changes the memory that a guest's virtio-mem device should plug. `target` makes it from what
    /// is plugged now and the most that can be. Returns what was asked for, as text.
    fn plug(
        &self,
        machine: &Machine,
        target: impl FnOnce(ByteSize, ByteSize) -> ByteSize,
    ) -> Result<String, DaemonError> {
        let mut qmp = machine.monitor_within(MONITOR_WAIT);
        let Some(device) = virtio_mem::read(&mut qmp)? else {
            return Err(refused(
                "the VM has no virtio-mem device",
                "set memory_max and start the VM again",
            ));
        };
        let target = target(device.plugged, device.max);
        virtio_mem::request(&mut qmp, target)?;
        drop(qmp);
        let is_unplug = target < device.plugged;
        self.state.lock().unplugs.note(machine.id(), is_unplug);
        Ok(format!(
            "plugged memory: {} now, {target} requested",
            device.plugged
        ))
    }

    /// Sets the size that a guest should have, with the memory that virtio-mem has plugged. The
    /// record is written first, so that the next daemon knows of each balloon that this one has
    /// moved.
    fn move_balloon(&self, machine: &Machine, target: ByteSize) -> Result<(), DaemonError> {
        let mut qmp = machine.monitor_within(MONITOR_WAIT);
        // QEMU's balloon does not count plugged memory.
        let plugged = virtio_mem::plugged(&mut qmp)?;
        let target = ByteSize(target.0.saturating_sub(plugged.0));
        let (ram, size) = balloon::sizes(&mut qmp)?;
        let now = if is_shared(machine) { size } else { ram };
        let old = self.records.get(machine).moved;
        let new = Some(MovedBalloon::moved(old, now, target, ram));
        self.records.change(machine, |record| record.moved = new)?;
        let set = balloon::set_target(&mut qmp, target);
        // If it is not known whether the balloon moves, the record says that it does.
        if set.as_ref().is_err_and(|error| !error.may_have_moved()) {
            self.records.change(machine, |record| record.moved = old)?;
        }
        Ok(set?)
    }
}

/// Returns whether other programs may move a VM's balloon, too: memfold did not start the VM.
fn is_shared(machine: &Machine) -> bool {
    machine.vm().directory().is_none()
}

fn trim_end(end: TrimEnd) -> String {
    match end {
        TrimEnd::Done => "all that was asked for".into(),
        TrimEnd::Pressure => "then tasks of the guest waited for memory".into(),
        TrimEnd::Refaults => "then the guest read it again".into(),
        TrimEnd::Deadline => "then the time was over".into(),
        TrimEnd::Exhausted => "then there was nothing left to reclaim".into(),
        TrimEnd::Replaced => "then another order came".into(),
        TrimEnd::Forbidden => Permission::Trim.refusal(),
        TrimEnd::Unsupported => "the guest's kernel cannot reclaim page cache alone".into(),
        TrimEnd::Failed(errno) => format!("then the kernel refused (errno {errno})"),
    }
}
