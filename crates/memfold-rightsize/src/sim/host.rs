//! One host: its guests, and the arm that sizes them.

use std::collections::VecDeque;
use std::time::Duration;

use memfold_units::ByteSize;

use super::guest::ModelGuest;
use super::proxmox::{BalloonedVm, GOAL, INTERVAL, LARGEST_CHANGE, autoballoon};
use super::random::Random;
use super::spec::HostSpec;
use crate::control::Controller;
use crate::decision::{Action, Decision};
use crate::input::{BrakeLevel, HostState, Signals, VmId};
use crate::ladder::Rung;
use crate::policy::Policy;

const MIB: f64 = 1_048_576.0;

/// Rate at which lent RAM comes back, in bytes a second.
const RECALL_RATE: f64 = 100.0 * MIB;

/// Part of the time that guests wait while the host swaps.
const HOST_SWAP_WAIT: f64 = 0.3;

/// Ticks are short for this time after something has happened.
const AFTERMATH: f64 = 40.0;

/// Length of short and of long ticks, in seconds.
const SHORT_TICK: f64 = 1.0;
const LONG_TICK: f64 = 10.0;

/// Who sizes the VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arm {
    /// Nobody. What a guest has used once, it keeps.
    Fixed,
    /// Nobody, but guests report free pages to the host.
    Reporting,
    /// Proxmox VE's rule, with free page reporting.
    Proxmox,
    /// memfold's controller, with free page reporting.
    Memfold,
}

/// What an arm did and cost in one run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Simulated time in seconds.
    pub seconds: f64,
    /// Memory of the host that guests took, on average, in bytes.
    pub mean_backed: f64,
    /// Bytes of files that guests read again.
    pub refaults: f64,
    /// Bytes that guests swapped, in and out.
    pub swapped: f64,
    /// Share of time that guests waited for memory, their own or the host's, on average of the
    /// guests.
    pub waited: f64,
    /// Processes ended by OOM killers of guests, for each VM.
    pub guest_kills: Vec<u32>,
    /// VMs ended by the OOM killer of the host.
    pub host_kills: u32,
    /// Time for which the host swapped, in seconds.
    pub host_swapping: f64,
    /// Most orders that one VM got within an hour.
    pub orders_an_hour: usize,
    /// Most changes between gives and takes of one VM by balloon or plug within an hour.
    pub turns_an_hour: usize,
    /// Orders of each kind: trims, balloons, plugs and unplugs.
    pub orders: [usize; 4],
    /// Ticks on each rung.
    pub rungs: [usize; 5],
}

impl Outcome {
    /// Returns all kills: by the guests' OOM killers, and by the host's.
    #[must_use]
    pub fn kills(&self) -> u32 {
        self.guest_kills.iter().sum::<u32>() + self.host_kills
    }
}

/// Orders that one VM got.
#[derive(Clone, Debug, Default)]
struct OrderLog {
    recent: VecDeque<f64>,
    turns: VecDeque<f64>,
    last_is_give: Option<bool>,
}

/// A host that runs.
#[derive(Clone, Debug)]
pub struct ModelHost {
    spec: HostSpec,
    arm: Arm,
    /// The guests, in the order of the specification.
    pub guests: Vec<ModelGuest>,
    controller: Controller,
    lent: f64,
    time: f64,
    busy_until: f64,
    next_rule: f64,
    log: Vec<OrderLog>,
    outcome: Outcome,
    /// Decides which orders fail.
    random: Random,
    /// The controller's last decision.
    pub decision: Option<Decision>,
}

/// Runs a host for `seconds`.
#[must_use]
pub fn simulate(spec: &HostSpec, arm: Arm, seconds: f64) -> Outcome {
    let mut host = ModelHost::new(spec, arm);
    while host.time < seconds {
        host.tick(host.next_tick());
    }
    host.outcome()
}

impl ModelHost {
    /// Boots a host and its guests.
    #[must_use]
    pub fn new(spec: &HostSpec, arm: Arm) -> Self {
        let guests = spec.vms.iter();
        Self {
            guests: guests
                .map(|vm| ModelGuest::new(vm, arm != Arm::Fixed, vm.virtio_mem_max))
                .collect(),
            controller: Controller::new(Policy::default()),
            lent: spec.lent,
            time: 0.0,
            busy_until: AFTERMATH,
            next_rule: 0.0,
            log: vec![OrderLog::default(); spec.vms.len()],
            outcome: Outcome::default(),
            random: Random::new(spec.ram.to_bits()),
            decision: None,
            spec: spec.clone(),
            arm,
        }
    }

    /// `MemAvailable` of the host. Negative: so much is swapped.
    #[must_use]
    pub fn available(&self) -> f64 {
        let backed: f64 = self.guests.iter().map(ModelGuest::backed).sum();
        self.spec.ram - self.spec.base - self.lent - backed
    }

    /// RAM that is lent to other hosts.
    #[must_use]
    pub fn lent(&self) -> f64 {
        self.lent
    }

    /// Simulated time in seconds.
    #[must_use]
    pub fn time(&self) -> f64 {
        self.time
    }

    /// How long the next tick should be: short after changes and on a short host.
    #[must_use]
    pub fn next_tick(&self) -> f64 {
        if self.time < self.busy_until {
            SHORT_TICK
        } else {
            LONG_TICK
        }
    }

    /// Lets all guests run for `dt` seconds, and sizes them.
    pub fn tick(&mut self, dt: f64) {
        self.time += dt;
        for guest in &mut self.guests {
            if guest.tick(dt) {
                self.busy_until = self.time + AFTERMATH;
            }
        }
        match self.arm {
            Arm::Fixed | Arm::Reporting => {}
            Arm::Proxmox => self.apply_proxmox_rule(),
            Arm::Memfold => self.apply_controller(),
        }
        self.run_short(dt);
        self.outcome.seconds += dt;
        let backed: f64 = self.guests.iter().map(ModelGuest::backed).sum();
        self.outcome.mean_backed += backed * dt;
    }

    /// Returns how much lent RAM is called back now: by memfold's controller, or, in the other
    /// arms, by a lender that keeps the reserve for itself.
    fn bytes_called_back(&self) -> f64 {
        if self.arm != Arm::Memfold {
            return self.lent;
        }
        let decision = self.decision.as_ref();
        decision.map_or(0.0, |decision| decision.recall_lent.0 as f64)
    }

    /// Gets lent RAM back, swaps, and kills, if the host is short.
    fn run_short(&mut self, dt: f64) {
        let available = self.available();
        if available < self.spec.reserve {
            if self.spec.borrowers_return {
                let returned = self.bytes_called_back().min(RECALL_RATE * dt);
                self.lent -= self.lent.min(returned);
            }
            self.busy_until = self.busy_until.max(self.time + SHORT_TICK);
        }
        if available >= 0.0 {
            return;
        }
        self.outcome.host_swapping += dt;
        for guest in &mut self.guests {
            guest.wait_for_host(dt * HOST_SWAP_WAIT);
        }
        if -available <= self.spec.swap {
            return;
        }
        let largest = self
            .guests
            .iter_mut()
            .max_by(|a, b| a.backed().total_cmp(&b.backed()));
        if let Some(guest) = largest {
            guest.boot_again();
            self.outcome.host_kills += 1;
        }
    }

    fn apply_proxmox_rule(&mut self) {
        if self.time < self.next_rule {
            return;
        }
        self.next_rule = self.time + INTERVAL;
        let used = self.spec.ram - self.available();
        let goal = self.spec.ram * GOAL - used;
        let mut members = Vec::new();
        let mut vms = Vec::new();
        for (index, (spec, guest)) in self.spec.vms.iter().zip(&self.guests).enumerate() {
            if !spec.has_balloon || spec.limits.pinned {
                continue;
            }
            members.push(index);
            vms.push(BalloonedVm {
                balloon: guest.size(),
                min: spec.limits.min.0 as f64,
                max: spec.ram + spec.virtio_mem_max,
                shares: 10.0 * f64::from(spec.limits.priority),
                free: guest.mem_free(),
            });
        }
        let new = autoballoon(&vms, goal, LARGEST_CHANGE);
        for (index, new) in members.into_iter().zip(new) {
            if (new - self.guests[index].size()).abs() > 1.0 {
                self.guests[index].set_balloon(new);
                self.outcome.orders[1] += 1;
            }
        }
    }

    fn apply_controller(&mut self) {
        let jump = self
            .spec
            .clock_jump
            .filter(|(at, _)| self.time >= f64::from(*at));
        let jump = jump.map_or(0.0, |(_, seconds)| f64::from(seconds));
        let now = Duration::from_secs_f64((self.time + 10_000.0 + jump).max(0.0));
        let state = HostState {
            available: bytes(self.available()),
            reserve: bytes(self.spec.reserve),
            swap_free: bytes(self.spec.swap + self.available().min(0.0)),
            brake: match self.spec.braked {
                Some((from, to)) if (from..to).contains(&self.time) => BrakeLevel::Braked,
                _ => BrakeLevel::Ok,
            },
            lent: bytes(self.lent),
            recalls_lent: true,
        };
        let mut input: Vec<(VmId, _, Signals)> = Vec::with_capacity(self.guests.len());
        for (id, (spec, guest)) in (0..).zip(self.spec.vms.iter().zip(&mut self.guests)) {
            input.push((VmId(id), spec.limits, guest.signals(now)));
        }
        let decision = self.controller.step(now, state, &input);
        self.outcome.rungs[decision.rung as usize] += 1;
        if decision.rung > Rung::Trim {
            self.busy_until = self.busy_until.max(self.time + 5.0);
        }
        for (index, decided) in decision.vms.iter().enumerate() {
            let Some(order) = decided.order else { continue };
            if self.random.chance(self.spec.order_failures) {
                self.controller.order_failed(decided.vm);
                continue;
            }
            let guest = &mut self.guests[index];
            let kind = match order.action {
                Action::Trim { bytes, .. } => {
                    guest.trim(bytes.0 as f64);
                    0
                }
                Action::Balloon { target } => {
                    guest.set_balloon(target.0 as f64);
                    1
                }
                Action::Plug { bytes } => {
                    guest.plug(bytes.0 as f64);
                    2
                }
                Action::Unplug { bytes } => {
                    guest.unplug(bytes.0 as f64);
                    3
                }
            };
            self.outcome.orders[kind] += 1;
            let turn = (kind > 0).then(|| order.is_give(decided.size));
            self.log_order(index, turn);
        }
        self.decision = Some(decision);
    }

    fn log_order(&mut self, index: usize, is_give: Option<bool>) {
        let now = self.time;
        let log = &mut self.log[index];
        let count = |times: &mut VecDeque<f64>| {
            times.push_back(now);
            while times.front().is_some_and(|first| now - first > 3600.0) {
                times.pop_front();
            }
            times.len()
        };
        let orders = count(&mut log.recent);
        self.outcome.orders_an_hour = self.outcome.orders_an_hour.max(orders);
        if let Some(is_give) = is_give {
            if log.last_is_give.is_some_and(|last| last != is_give) {
                let turns = count(&mut log.turns);
                self.outcome.turns_an_hour = self.outcome.turns_an_hour.max(turns);
            }
            log.last_is_give = Some(is_give);
        }
    }

    /// Returns what happened until now.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        let mut outcome = self.outcome.clone();
        outcome.mean_backed /= outcome.seconds.max(1.0);
        let sum = |part: fn(&ModelGuest) -> f64| self.guests.iter().map(part).sum::<f64>();
        outcome.refaults = sum(|guest| guest.counters.refaults);
        outcome.swapped = sum(|guest| guest.counters.swapped_in + guest.counters.swapped_out);
        let waited = sum(|guest| guest.counters.waited + guest.counters.waited_for_host);
        outcome.waited = waited / outcome.seconds.max(1.0) / self.guests.len().max(1) as f64;
        outcome.guest_kills = self
            .guests
            .iter()
            .map(|guest| guest.counters.kills)
            .collect();
        outcome
    }
}

// Amounts of the model are far below 2^63.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn bytes(value: f64) -> ByteSize {
    ByteSize(value.max(0.0) as u64)
}
