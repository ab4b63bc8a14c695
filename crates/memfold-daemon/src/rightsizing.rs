//! Right-sizing: gives each VM the memory that it needs, and lets the host have the rest.
//!
//! ```text
//!   every 2 s:  figures of guests (agent or balloon driver), balloons (QEMU), host  --> Controller (memfold-rightsize)
//!                                                                                         v
//!     mode watch: the decision is only shown      mode on: a thread for each VM with an order trims or moves its balloon
//! ```
//! The controller decides; this service reads the figures and carries the orders out. A VM has at
//! most one order at a time. When right-sizing is turned off, guests get back what is in their
//! balloons.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{RightsizeEvent, RightsizeMode, RightsizeReport, Sizing, VmRightsize};
use memfold_rightsize::{Action, Basis, Controller, Decision, HostState, Limits, Order, VmId};
use memfold_units::ByteSize;
use memfold_vm::{Trim, VmDirectory};
use memfold_wire::memory::TrimEnd;
use parking_lot::Mutex;
use tracing::{debug, info, warn};

use self::signals::Balloons;
use crate::debt::DebtWatch;
use crate::error::{DaemonError, refused, state_error};
use crate::lending::Lending;
use crate::machine::Machine;
use crate::threads;
use crate::vm_registry::VmRegistry;

mod signals;

/// Time between two looks at all VMs.
const INTERVAL: Duration = Duration::from_secs(2);

/// Longest time that a guest may take for a trim.
const TRIM_LIMIT: Duration = Duration::from_secs(10);

/// Share of time for which tasks of a guest may wait for memory while it is trimmed.
const TRIM_PRESSURE: f64 = 0.01;

/// Number of orders that are remembered.
const EVENTS: usize = 256;

/// Service that sizes VMs.
#[derive(Debug)]
pub struct Rightsizing {
    registry: Arc<VmRegistry>,
    debt: Arc<DebtWatch>,
    lending: Arc<Lending>,
    began: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    mode: RightsizeMode,
    controller: Controller,
    balloons: Balloons,
    /// Limits of VMs that have no directory, by the machine's number.
    sizings: BTreeMap<u32, Sizing>,
    /// VMs whose last order is still carried out, by the machine's number.
    busy: BTreeSet<u32>,
    /// VMs whose balloon this service has moved, by the machine's number. Balloons that another
    /// program moves are left alone.
    moved: BTreeSet<u32>,
    last: Option<Last>,
    events: VecDeque<RightsizeEvent>,
    /// Number of the oldest event in `events`, counted from the daemon's start.
    first_event: u64,
}

/// The last decision.
#[derive(Debug)]
struct Last {
    host: HostState,
    decision: Decision,
    names: Vec<(String, Sizing)>,
}

/// One VM with what the controller gets.
struct Looked {
    machine: Arc<Machine>,
    sizing: Sizing,
    input: (VmId, Limits, memfold_rightsize::Signals),
}

impl Rightsizing {
    pub(crate) fn new(
        registry: Arc<VmRegistry>,
        debt: Arc<DebtWatch>,
        lending: Arc<Lending>,
        mode: RightsizeMode,
    ) -> Self {
        Self {
            registry,
            debt,
            lending,
            began: Instant::now(),
            state: Mutex::new(State {
                mode,
                controller: Controller::new(memfold_rightsize::Policy::default()),
                balloons: Balloons::default(),
                sizings: BTreeMap::new(),
                busy: BTreeSet::new(),
                moved: BTreeSet::new(),
                last: None,
                events: VecDeque::new(),
                first_event: 0,
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
        if before == RightsizeMode::On && mode != RightsizeMode::On {
            for machine in self.registry.machines() {
                self.give_all_back(&machine);
            }
        }
        self.report()
    }

    /// Changes the limits of a VM's size; absent fields keep their values.
    ///
    /// # Errors
    ///
    /// [`DaemonError::BadRequest`] if the limits contradict each other or the VM's RAM.
    pub fn set_sizing(&self, vm: &str, changes: Sizing) -> Result<Sizing, DaemonError> {
        let machine = self.registry.machine(vm)?;
        let new = self.sizing(&machine).with(changes);
        new.check(signals::ram(&machine))
            .map_err(DaemonError::BadRequest)?;
        match machine.vm().directory() {
            Some(directory) => {
                let path = directory.sizing();
                let written = directory.write_json(&path, &new);
                written.map_err(state_error(&path))?;
            }
            None => drop(self.state.lock().sizings.insert(machine.id(), new)),
        }
        if new.pinned == Some(true) {
            self.give_all_back(&machine);
        }
        Ok(new)
    }

    /// Returns the limits that the operator set for a VM.
    fn sizing(&self, machine: &Machine) -> Sizing {
        if let Some(directory) = machine.vm().directory() {
            return VmDirectory::read_json(&directory.sizing()).unwrap_or_default();
        }
        let sizings = &self.state.lock().sizings;
        sizings.get(&machine.id()).copied().unwrap_or_default()
    }

    /// Returns the last decision, and the last orders.
    #[must_use]
    pub fn report(&self) -> RightsizeReport {
        let state = self.state.lock();
        let mut report = RightsizeReport {
            mode: state.mode,
            events: state.events.iter().cloned().collect(),
            ..RightsizeReport::default()
        };
        let last = state.last.as_ref();
        if let Some(last) = last.filter(|_| state.mode != RightsizeMode::Off) {
            report.rung = Some(last.decision.rung.name().to_owned());
            report.why = last.decision.why.to_string();
            report.available_bytes = last.host.available.0;
            report.reserve_bytes = last.host.reserve.0;
            let vms = last.decision.vms.iter().zip(&last.names);
            report.vms = vms
                .map(|(vm, (name, sizing))| VmRightsize {
                    vm: name.clone(),
                    size_bytes: vm.size.0,
                    working_set_bytes: vm.working_set.0,
                    basis: basis(vm.basis).to_owned(),
                    target_bytes: vm.target.0,
                    pressure: vm.pressure,
                    order: vm.order.map(order_text),
                    reason: vm.reason.to_string(),
                    sizing: *sizing,
                })
                .collect();
            report.vms.sort_by(|a, b| a.vm.cmp(&b.vm));
        }
        report
    }

    /// Looks at the host and all VMs once, and carries the decision out.
    fn look(self: &Arc<Self>) -> Result<(), DaemonError> {
        let mode = self.state.lock().mode;
        if mode == RightsizeMode::Off {
            self.state.lock().last = None;
            return Ok(());
        }
        let debt = self.debt.report_now()?;
        let lent = self.lending.status().map_or(0, |lender| lender.lent_bytes);
        let host = signals::host(&debt, lent);
        let now = self.began.elapsed();
        let machines = self.registry.machines();
        // QEMU may answer late, so the state is not locked meanwhile.
        let mut balloons = {
            let mut state = self.state.lock();
            let is_there = |id: &u32| machines.iter().any(|machine| machine.id() == *id);
            state.sizings.retain(|id, _| is_there(id));
            state.moved.retain(is_there);
            std::mem::take(&mut state.balloons)
        };
        balloons.keep(&machines);
        let looked: Vec<Looked> = machines
            .into_iter()
            .filter(|machine| machine.state().is_running() && machine.is_silent().is_none())
            .map(|machine| {
                let sizing = self.sizing(&machine);
                let folded = debt.vms.iter().find(|vm| vm.name == machine.name());
                let folded = ByteSize(folded.map_or(0, |vm| vm.folded_bytes));
                let balloon = balloons.look(&machine);
                let signals = signals::of_vm(&machine, now, balloon, folded);
                let limits = signals::limits(sizing, signals.ram);
                let id = VmId(u64::from(machine.id()));
                Looked {
                    machine,
                    sizing,
                    input: (id, limits, signals),
                }
            })
            .collect();
        let input: Vec<_> = looked.iter().map(|vm| vm.input.clone()).collect();
        let mut state = self.state.lock();
        // An operator may have changed the mode meanwhile.
        let mode = state.mode;
        state.balloons = balloons;
        let decision = state.controller.step(now, host, &input);
        if state.last.as_ref().map(|last| last.decision.rung) != Some(decision.rung) {
            info!(rung = decision.rung.name(), why = %decision.why, "right-sizing: the host's rung changed");
        }
        let mut begun = Vec::new();
        for (vm, looked) in decision.vms.iter().zip(&looked) {
            let Some(order) = vm.order else { continue };
            let id = looked.machine.id();
            let is_busy = state.busy.contains(&id);
            if mode != RightsizeMode::On || is_busy {
                state.controller.discard_order(vm.vm);
            }
            if mode == RightsizeMode::On && !is_busy {
                let event = state.note(looked.machine.name(), order, vm.reason.to_string());
                state.busy.insert(id);
                begun.push((looked.machine.clone(), order, event));
            }
        }
        let names = looked
            .iter()
            .map(|vm| (vm.machine.name().to_owned(), vm.sizing));
        state.last = Some(Last {
            host,
            decision,
            names: names.collect(),
        });
        drop(state);
        for (machine, order, event) in begun {
            let service = self.clone();
            let id = machine.id();
            let work = move || service.carry_out(&machine, order, event);
            if threads::begin("rightsize-vm", work).is_err() {
                let mut state = self.state.lock();
                state.busy.remove(&id);
                state.controller.discard_order(VmId(u64::from(id)));
            }
        }
        Ok(())
    }

    /// Carries an order out, and notes what became of it.
    fn carry_out(&self, machine: &Machine, order: Order, event: u64) {
        let done = match order.action {
            Action::Trim { bytes, .. } => {
                let trim = Trim {
                    bytes: bytes.0,
                    max_pressure: TRIM_PRESSURE,
                    limit: TRIM_LIMIT,
                    spare_swap: true,
                };
                machine.trim(&trim).and_then(|result| {
                    let reclaimed = ByteSize(result.reclaimed_bytes);
                    let text = format!("{reclaimed} reclaimed, {}", trim_end(result.end));
                    match result.end {
                        TrimEnd::Forbidden | TrimEnd::Unsupported | TrimEnd::Failed(_) => {
                            Err(refused(text, "see the agent's configuration"))
                        }
                        _ => Ok(text),
                    }
                })
            }
            Action::Balloon { target } => {
                self.state.lock().moved.insert(machine.id());
                let set = machine.set_balloon(target);
                set.map(|()| format!("balloon target is {target}"))
            }
            Action::Plug { .. } | Action::Unplug { .. } => Err(refused(
                "memory is not plugged or unplugged",
                "use a balloon",
            )),
        };
        let failed = done.is_err();
        let text = done.unwrap_or_else(|error| error.to_string());
        let mut state = self.state.lock();
        state.busy.remove(&machine.id());
        if failed {
            state
                .controller
                .discard_order(VmId(u64::from(machine.id())));
        }
        if let Some(event) = state.event(event) {
            event.result = Some(text);
        }
        let is_on = state.mode == RightsizeMode::On;
        drop(state);
        // Right-sizing may have been turned off, or the VM pinned, while the order was carried out.
        if !is_on || self.sizing(machine).pinned == Some(true) {
            self.give_all_back(machine);
        }
    }

    /// Gives a guest back what is in its balloon, if this service has put it there.
    fn give_all_back(&self, machine: &Machine) {
        if !self.state.lock().moved.remove(&machine.id()) {
            return;
        }
        if let Err(error) = machine.restore_balloon() {
            self.state.lock().moved.insert(machine.id());
            warn!(vm = machine.name(), %error, "cannot give a VM back what is in its balloon; try 'memfold rightsize on' and 'memfold rightsize off' again");
        }
    }
}

impl State {
    /// Notes an order, and returns its number.
    fn note(&mut self, vm: &str, order: Order, reason: String) -> u64 {
        if self.events.len() == EVENTS {
            self.events.pop_front();
            self.first_event += 1;
        }
        self.events.push_back(RightsizeEvent {
            at_unix_s: threads::unix_time().as_millis() as f64 / 1e3,
            vm: vm.to_owned(),
            order: order_text(order),
            reason,
            result: None,
        });
        self.first_event + self.events.len() as u64 - 1
    }

    fn event(&mut self, number: u64) -> Option<&mut RightsizeEvent> {
        let index = number.checked_sub(self.first_event)?;
        self.events.get_mut(usize::try_from(index).ok()?)
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

fn order_text(order: Order) -> String {
    match order.action {
        Action::Trim { bytes, .. } => format!("trim {bytes} of page cache"),
        Action::Balloon { target } => format!("set the balloon so that the guest has {target}"),
        Action::Plug { bytes } => format!("plug {bytes}"),
        Action::Unplug { bytes } => format!("unplug {bytes}"),
    }
}

fn trim_end(end: TrimEnd) -> String {
    match end {
        TrimEnd::Done => "all that was asked for".into(),
        TrimEnd::Pressure => "then tasks of the guest waited for memory".into(),
        TrimEnd::Refaults => "then the guest read it again".into(),
        TrimEnd::Deadline => "then the time was over".into(),
        TrimEnd::Exhausted => "then there was nothing left to reclaim".into(),
        TrimEnd::Replaced => "then another order came".into(),
        TrimEnd::Forbidden => "the guest's owner forbids trimming".into(),
        TrimEnd::Unsupported => "the guest's kernel cannot reclaim page cache alone".into(),
        TrimEnd::Failed(errno) => format!("then the kernel refused (errno {errno})"),
    }
}
