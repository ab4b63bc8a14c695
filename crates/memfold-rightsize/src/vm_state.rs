//! One VM over time: what it needs, what may be taken from it, and what the last order did.

use std::time::Duration;

use memfold_units::{ByteSize, PAGE_SIZE};

use crate::assessment::{Assessment, Call, SMALLEST_CHANGE, SMALLEST_GIVE, share_of};
use crate::check::grown;
use crate::decision::{Action, Basis, Order, Reason};
use crate::estimate::{Estimate, Heard, Parts};
use crate::input::{Limits, Signals, Source, VmId};
use crate::ladder::Rung;
use crate::policy::Policy;

/// Time within which an order must show an effect.
const EFFECT: Duration = Duration::from_secs(20);

/// Shortest time between a postponed take and the VM's next take.
const POSTPONED: Duration = Duration::from_secs(5);

/// Gives within this time of each other grow.
const REPEATED: Duration = Duration::from_secs(60);

/// Time in which a guest should use what it was given: until then, nobody else is given it.
const PROMISED: Duration = Duration::from_secs(20);

/// Time without a give after which the wait before takes is at its shortest again.
const FORGOTTEN: Duration = Duration::from_secs(2 * 3600);

/// What the controller remembers of one VM.
#[derive(Clone, Debug, Default)]
pub(crate) struct VmState {
    estimate: Estimate,
    /// The last step's order; it takes effect on this state at the next step.
    issued: Option<Issued>,
    /// The last order that was carried out, until its effect was seen.
    watched: Option<Issued>,
    /// Takes that may still be ordered at once, and when that was counted.
    tokens: Option<(f64, Duration)>,
    next_take: Duration,
    /// After an order without effect: no further one before this time, and the wait that follows
    /// the next failure.
    blocked_until: Duration,
    fail_wait: Duration,
    /// After a take that was postponed: no further one before this time.
    postponed_until: Duration,
    /// No balloon and no unplug takes memory before this time.
    settled_at: Duration,
    settle: Duration,
    last_take: Option<Duration>,
    /// Page cache of the guest when the last trim that began was ordered.
    trim_cache: Option<u64>,
    /// The last take that made the VM smaller: by balloon or unplug.
    last_shrink: Option<Duration>,
    /// The last give that the guest needed, and the last one without need.
    last_give: Option<Duration>,
    last_back: Option<Duration>,
    /// What the VM was given lately, and has perhaps not used yet.
    promise: Option<Promise>,
    /// Time after a take without gives that the guest does not need, because such a give was taken
    /// away again.
    back_rest: Duration,
    gives_in_a_row: u32,
    idle_since: Option<Duration>,
    /// When the guest was last told to unplug memory.
    last_unplug: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
struct Issued {
    order: Order,
    at: Duration,
    is_give: bool,
    /// The VM was given memory without need.
    is_back: bool,
    size: u64,
    cache: u64,
    free: u64,
    pgsteal: Option<u64>,
    /// What `hot` becomes, and what it was.
    hot: Option<u64>,
    hot_before: Option<u64>,
    /// When the guest was told to unplug memory before this order.
    unplug_before: Option<Duration>,
}

/// Gives to one VM that followed each other.
#[derive(Clone, Copy, Debug)]
struct Promise {
    /// When the last one was ordered.
    at: Duration,
    /// Their sum.
    bytes: u64,
    /// What the guest used before the first one.
    in_use: u64,
}

impl Issued {
    fn is_trim(&self) -> bool {
        matches!(self.order.action, Action::Trim { .. })
    }
}

impl Promise {
    fn counts(&self, clock: Duration) -> bool {
        clock.saturating_sub(self.at) < PROMISED
    }
}

impl VmState {
    /// Applies the last step's order to this state. Called at the beginning of each step.
    pub(crate) fn settle_last_order(&mut self, clock: Duration, policy: &Policy) {
        self.refill(clock, policy);
        let Some(issued) = self.issued.take() else {
            return;
        };
        self.watched = Some(issued);
        if issued.is_give {
            self.record_promise(&issued);
        }
        if issued.is_back {
            let since_shrink = self.last_shrink.map(|at| issued.at.saturating_sub(at));
            if since_shrink.is_none_or(|time| time >= FORGOTTEN) {
                self.back_rest = Duration::ZERO;
            }
            self.last_back = Some(issued.at);
            return;
        }
        if issued.is_give {
            self.record_give(issued.at, policy);
            return;
        }
        if let Some((tokens, _)) = &mut self.tokens {
            *tokens -= 1.0;
        }
        self.last_take = Some(issued.at);
        if issued.is_trim() {
            self.trim_cache = Some(issued.cache);
        } else {
            if self.last_back > self.last_shrink {
                let longer = self.back_rest.saturating_mul(2);
                self.back_rest = longer.clamp(policy.give_back_after * 2, FORGOTTEN);
            }
            self.last_shrink = Some(issued.at);
        }
        self.next_take = issued.at.saturating_add(policy.take_interval);
        self.estimate.record_take(issued.hot, issued.at, policy);
    }

    pub(crate) fn discard_order(&mut self) {
        if let Some(discarded) = self.issued.take() {
            self.last_unplug = discarded.unplug_before;
        }
    }

    /// The last step's order cannot be carried out at this moment. Nothing is taken for a few
    /// seconds, so that other VMs are asked.
    pub(crate) fn postpone_order(&mut self, clock: Duration) {
        let Some(postponed) = self.issued.take() else {
            return;
        };
        self.last_unplug = postponed.unplug_before;
        if !postponed.is_give {
            self.postponed_until = clock.saturating_add(POSTPONED);
        }
    }

    /// The last order failed. A take then waits like one without effect; a VM that needs memory
    /// may get the same give at once.
    pub(crate) fn order_failed(&mut self, clock: Duration) {
        let Some(failed) = self.issued.take().or_else(|| self.watched.take()) else {
            return;
        };
        if !failed.is_give {
            self.block(clock, failed.hot_before);
        }
    }

    /// The guest missed what the last trim took, after it had reclaimed `reclaimed` bytes: the page
    /// cache that is left is needed.
    pub(crate) fn trim_was_missed(&mut self, clock: Duration, reclaimed: u64, policy: &Policy) {
        let new = self.issued.as_mut().filter(|issued| issued.is_trim());
        let cache = new.as_ref().map(|issued| issued.cache).or(self.trim_cache);
        let Some(cache) = cache else { return };
        let hot = Some(cache.saturating_sub(reclaimed));
        if let Some(issued) = new {
            issued.hot = hot;
        }
        if let Some(watched) = self.watched.as_mut().filter(|watched| watched.is_trim()) {
            watched.hot_before = hot;
        }
        self.estimate.note_miss(clock, hot, policy);
    }

    /// Waits before the next take, because the last one took nothing. `hot`: the needed page cache
    /// from before it.
    fn block(&mut self, clock: Duration, hot: Option<u64>) {
        self.fail_wait = (self.fail_wait.saturating_mul(2))
            .clamp(Duration::from_secs(60), Duration::from_secs(900));
        self.blocked_until = clock.saturating_add(self.fail_wait);
        self.estimate.hot = hot;
    }

    /// Notes that nothing is known of the VM at this moment: it may not be idle any more.
    pub(crate) fn note_absence(&mut self) {
        self.idle_since = None;
    }

    /// Remembers an order of this step.
    pub(crate) fn expect(&mut self, clock: Duration, vm: &Assessment, call: &Call) {
        let Some(order) = call.order else { return };
        let unplug_before = self.last_unplug;
        if let Action::Unplug { .. } = order.action {
            self.last_unplug = Some(clock);
        }
        self.issued = Some(Issued {
            order,
            at: clock,
            is_give: order.is_give(ByteSize(vm.parts.size)),
            is_back: matches!(call.reason, Reason::GiveBack { .. }),
            size: vm.parts.size,
            cache: vm.parts.cache,
            free: vm.parts.free,
            pgsteal: vm.pgsteal,
            hot: call.hot,
            hot_before: self.estimate.hot,
            unplug_before,
        });
    }

    /// Says whether the guest should still carry out the last order to unplug memory. A guest that
    /// did not do it at once would do it when it frees memory, which may be when it is busy.
    pub(crate) fn may_unplug(&self, clock: Duration) -> bool {
        let is_new = |at| clock.saturating_sub(at) < EFFECT;
        self.idle_since.is_some() && self.last_unplug.is_some_and(is_new)
    }

    /// Says whether memory may be given back to this VM without need.
    pub(crate) fn may_get_back(&self, clock: Duration) -> bool {
        let long_ago =
            |at: Option<Duration>, time| at.is_none_or(|at| clock.saturating_sub(at) >= time);
        let minute = Duration::from_secs(60);
        let no_balloon_order = self.watched.is_none_or(|last| last.is_trim());
        no_balloon_order
            && long_ago(self.last_give, minute)
            && long_ago(self.last_back, minute)
            && long_ago(self.last_shrink, self.back_rest)
    }

    fn record_promise(&mut self, give: &Issued) {
        let before = self.promise.filter(|promise| promise.counts(give.at));
        let bytes = before.map_or(0, |promise| promise.bytes);
        self.promise = Some(Promise {
            at: give.at,
            bytes: bytes.saturating_add(give.order.bytes.0),
            in_use: before.map_or(give.size - give.free, |promise| promise.in_use),
        });
    }

    /// Returns what the VM was given lately and has not used yet. It is still part of what the host
    /// has available. `in_use`: memory that the guest uses now.
    pub(crate) fn promised(&self, clock: Duration, in_use: u64) -> u64 {
        let promise = self.promise.filter(|promise| promise.counts(clock));
        promise.map_or(0, |promise| {
            let used = in_use.saturating_sub(promise.in_use);
            promise.bytes.saturating_sub(used)
        })
    }

    fn record_give(&mut self, at: Duration, policy: &Policy) {
        let since = |then: Option<Duration>| then.map(|then| at.saturating_sub(then));
        let is_repeated = since(self.last_give).is_some_and(|time| time <= REPEATED);
        self.gives_in_a_row = if is_repeated {
            self.gives_in_a_row.saturating_add(1)
        } else {
            0
        };
        if since(self.last_give).is_none_or(|time| time >= FORGOTTEN) {
            self.settle = policy.settle;
        } else if self.last_shrink > self.last_give {
            self.settle = self.settle.saturating_mul(2).min(FORGOTTEN);
        }
        self.settled_at = at.saturating_add(self.settle);
        self.last_give = Some(at);
        self.idle_since = None;
    }

    fn refill(&mut self, clock: Duration, policy: &Policy) {
        let most = f64::from(policy.takes_an_hour) / 2.0;
        let (tokens, at) = self.tokens.unwrap_or((most, clock));
        let passed = clock.saturating_sub(at).as_secs_f64();
        let new = passed * f64::from(policy.takes_an_hour) / 3600.0;
        self.tokens = Some(((tokens + new).min(most), clock));
    }

    /// Checks the signals and estimates what the VM needs.
    pub(crate) fn assess(
        &mut self,
        clock: Duration,
        now: Duration,
        (vm, limits, signals): (VmId, &Limits, &Signals),
        policy: &Policy,
    ) -> Assessment {
        let heard = self.estimate.hear(clock, now, signals, policy);
        let min = limits.min.0;
        let max = limits.max.0.max(min);
        let size = signals.size().0;
        let balloon = signals.balloon;
        let device = signals.virtio_mem.filter(|device| device.has_driver);
        let plugged = signals.virtio_mem.map_or(0, |device| device.plugged.0);
        let mut assessment = Assessment {
            vm,
            weight: u64::from(limits.priority.max(1)),
            parts: Parts::unknown(size),
            working_set: size,
            basis: Basis::Unknown,
            target: size.clamp(min, max),
            pressure: None,
            pressure_now: 0.0,
            lacks: 0,
            is_pressing: false,
            is_at_risk: false,
            trimmable: 0,
            keeps: limits.pinned.then_some(Reason::Pinned),
            rests: false,
            fresh: false,
            unwilling: None,
            need: size,
            buffer_percent: u64::from(limits.buffer_percent),
            hot: 0,
            min,
            max,
            held: balloon.map_or(0, |balloon| balloon.held.0),
            pluggable: device.map_or(0, |d| d.max.0.saturating_sub(d.plugged.0)),
            plugged,
            block: device.map_or(0, |d| d.block.0),
            needs_driver: signals.virtio_mem.map_or(0, |d| {
                let more = d.max.0.saturating_sub(d.plugged.0);
                if d.has_driver { 0 } else { more }
            }),
            has_balloon: balloon.is_some(),
            keeps_freed_ram: signals.keeps_freed_ram,
            reports_free_pages: signals.reports_free_pages,
            can_balloon: !signals.keeps_freed_ram && balloon.is_some_and(|of| of.deflate_on_oom),
            trims: !signals.keeps_freed_ram && signals.source == Source::Agent { trims: true },
            pgsteal: signals.guest.as_ref().and_then(|guest| guest.pgsteal),
        };
        let (parts, fresh) = match heard {
            Heard::Nothing(reason) => {
                assessment.keeps = assessment.keeps.or(Some(reason));
                // QEMU says the size, whatever the guest does.
                if self.watched.is_some_and(|last| !last.is_trim()) {
                    self.watch_effect(clock, &assessment);
                }
                self.idle_since = None;
                return assessment;
            }
            Heard::Report { parts, fresh } => (parts, fresh),
        };
        let (hot, basis) = self.estimate.hot(&parts, signals.source);
        let estimate = &self.estimate;
        assessment = Assessment {
            parts,
            basis,
            pressure: estimate.pressure,
            pressure_now: estimate.pressure_now,
            fresh,
            trimmable: match estimate.hot {
                Some(_) => parts.trimmable.min(parts.cache - hot),
                None => parts.trimmable / 2,
            },
            ..assessment
        };
        assessment.count_as_needed(hot);
        if !assessment.trims || assessment.keeps.is_some() {
            assessment.trimmable = 0;
        }
        self.watch_effect(clock, &assessment);
        let rests_until = self.settled_at.max(self.blocked_until);
        assessment.rests = clock < rests_until.max(self.postponed_until);
        if clock < self.blocked_until {
            assessment.trimmable = 0;
        }
        self.weigh(clock, &mut assessment, policy);
        if assessment.unwilling.is_some() {
            assessment.trimmable = 0;
        }
        assessment
    }

    /// Finds out what the VM lacks, and whether anything may be taken from it.
    fn weigh(&mut self, clock: Duration, vm: &mut Assessment, policy: &Policy) {
        let estimate = &self.estimate;
        let Parts {
            size,
            available,
            free,
            unsure,
            ..
        } = vm.parts;
        let waits = estimate.pressure_now >= policy.pressure_give;
        let is_pressing = waits || estimate.stalled;
        let is_curable =
            estimate.stalled || available < size / 4 || (free < size / 20 && estimate.missed > 0);
        let pressure = vm.pressure.unwrap_or(0.0).max(vm.pressure_now);
        vm.unwilling = if is_pressing && !is_curable {
            Some(Reason::PressureNotCured {
                available: ByteSize(available),
            })
        } else if estimate.is_missing {
            Some(Reason::Missed {
                bytes: ByteSize(estimate.missed),
                wait: estimate.next_probe.saturating_sub(clock),
            })
        } else if is_pressing || pressure > estimate.pressure_limit(clock, policy) {
            Some(Reason::UnderPressure { pressure })
        } else {
            None
        };
        if vm.keeps.is_some() {
            return;
        }
        // What the guest may have is no reason to give it memory; the next report says more.
        let mut lacks = vm.surely_needs().saturating_sub(size);
        if lacks < SMALLEST_CHANGE.max(size / 64) {
            lacks = 0;
        }
        // A report from before the VM grew says nothing about whether that sufficed.
        let is_news = vm.parts.grown < SMALLEST_CHANGE;
        if is_pressing && is_curable && is_news {
            let more = (size / 8).max(SMALLEST_GIVE) << self.gives_in_a_row.min(3);
            lacks = lacks.max(more);
            vm.is_pressing = true;
        }
        vm.is_at_risk = available.saturating_add(unsure) < size / 32;
        // A give takes a moment: QEMU and the guest carry it out.
        let is_coming = self.watched.is_some_and(|last| last.is_give);
        let most = lacks.min(vm.room());
        // One give either empties the balloon or plugs whole blocks, so it can be less than `most`,
        // however much the host has.
        let given = vm.growth(most, u64::MAX).map_or(0, |(_, bytes)| bytes);
        let is_worth_it = given >= SMALLEST_CHANGE || (given > 0 && vm.is_at_risk);
        vm.lacks = if is_coming || !is_worth_it { 0 } else { most };
        let unmet = lacks.saturating_sub(vm.room());
        let allowed = vm.max.saturating_sub(size);
        vm.needs_driver = vm.needs_driver.min(unmet).min(allowed);
        let wants = vm
            .target
            .saturating_add(vm.target / 4)
            .saturating_add(vm.block);
        if size > wants && vm.unwilling.is_none() {
            self.idle_since.get_or_insert(clock);
        } else {
            self.idle_since = None;
        }
    }

    /// Looks whether the last order has shown an effect.
    fn watch_effect(&mut self, clock: Duration, vm: &Assessment) {
        let Some(last) = self.watched else { return };
        let quarter = last.order.bytes.0 / 4;
        let has_effect = match last.order.action {
            // Not every kernel counts what `memory.reclaim` takes in `/proc/vmstat`.
            Action::Trim { .. } => {
                grown(last.pgsteal, vm.pgsteal) >= (quarter / PAGE_SIZE).max(1)
                    || vm.parts.cache.saturating_add(quarter) <= last.cache
                    || vm.parts.free >= last.free.saturating_add(quarter)
            }
            _ if last.is_give => vm.parts.size >= last.size.saturating_add(quarter),
            _ => vm.parts.size.saturating_add(quarter) <= last.size,
        };
        if has_effect {
            self.watched = None;
            self.fail_wait = Duration::ZERO;
        } else if clock.saturating_sub(last.at) >= EFFECT {
            self.watched = None;
            if !last.is_give {
                self.block(clock, last.hot_before);
            }
        }
    }

    /// Returns why no take is due now, if that is so.
    fn not_yet(&self, clock: Duration, vm: &Assessment) -> Option<Reason> {
        if let Some(reason) = vm.keeps.or(vm.unwilling) {
            return Some(reason);
        }
        if clock < self.blocked_until {
            let wait = self.blocked_until.saturating_sub(clock);
            return Some(Reason::Ineffective { wait });
        }
        let tokens = self.tokens.map_or(0.0, |(tokens, _)| tokens);
        let next_take = self.next_take.max(self.postponed_until);
        let is_due = clock >= next_take && tokens >= 1.0 && vm.fresh;
        if is_due && self.watched.is_none() {
            return None;
        }
        let wait = next_take.saturating_sub(clock);
        Some(Reason::Waiting { wait })
    }

    /// Trims page cache that the guest does not miss, if its agent can. `None` if trimming has
    /// nothing to say about this VM.
    pub(crate) fn call_to_trim(
        &self,
        clock: Duration,
        vm: &Assessment,
        rung: Rung,
        policy: &Policy,
    ) -> Option<Call> {
        if !vm.trims {
            return None;
        }
        if let Some(reason) = self.not_yet(clock, vm) {
            return Some(Call::none(reason));
        }
        let grown_up = self.estimate.begun.saturating_add(policy.young);
        if clock < grown_up && rung < Rung::Balloon {
            let wait = grown_up.saturating_sub(clock);
            return Some(Call::none(Reason::Young { wait }));
        }
        let is_short = rung >= Rung::Trim;
        let (largest, interval) = if is_short {
            (policy.largest_step_short, policy.take_interval)
        } else {
            (policy.largest_step, policy.regrown_interval)
        };
        let cap = share_of(vm.parts.in_use(), largest).max(policy.smallest_trim.0);
        let cache = vm.parts.cache;
        let base = self.estimate.hot.unwrap_or(cache).min(cache);
        let grown = cache - base;
        let trim = |bytes: u64, may_drop_folded| Action::Trim {
            bytes: ByteSize(bytes),
            may_drop_folded,
        };
        if clock >= self.estimate.next_probe {
            let step = self
                .estimate
                .next_step(&vm.parts, largest)
                .max(policy.smallest_trim.0);
            let bytes = grown.saturating_add(step).min(cap).min(vm.parts.trimmable);
            if bytes >= policy.smallest_trim.0 {
                let reason = Reason::CacheNotMissed {
                    bytes: ByteSize(bytes),
                };
                let mut call = Call::order(trim(bytes, false), bytes, reason);
                call.hot = Some(base.min(cache - bytes));
                return Some(call);
            }
        }
        let regrown = grown.min(cap).min(vm.parts.trimmable);
        let is_worth_it = regrown >= policy.smallest_trim.0.saturating_mul(2)
            && regrown >= vm.parts.in_use() / 20;
        let rested = self
            .last_take
            .is_none_or(|last| clock.saturating_sub(last) >= interval);
        if is_worth_it && rested {
            let reason = Reason::CacheGrewBack {
                bytes: ByteSize(regrown),
            };
            return Some(Call::order(trim(regrown, false), regrown, reason));
        }
        let droppable = vm.parts.folded.min(cap);
        if rung >= Rung::Lent && droppable >= policy.smallest_trim.0 && base == 0 {
            let reason = Reason::DropFolded {
                bytes: ByteSize(droppable),
            };
            return Some(Call::order(trim(droppable, true), droppable, reason));
        }
        None
    }

    /// Shrinks a VM that is larger than its maximum, or whose plugged memory has been idle.
    pub(crate) fn call_to_shrink(
        &self,
        clock: Duration,
        vm: &Assessment,
        policy: &Policy,
    ) -> Option<Call> {
        if clock < self.settled_at || self.not_yet(clock, vm).is_some() {
            return None;
        }
        let size = vm.parts.size;
        let is_idle = self
            .idle_since
            .is_some_and(|since| clock.saturating_sub(since) >= policy.idle);
        if is_idle && vm.block > 0 && vm.plugged > 0 {
            let wants = vm.target.saturating_add(vm.target / 4).max(vm.floor());
            // Only free memory is unplugged, and the buffer stays.
            let stays = (vm.need - vm.working_set).saturating_add(policy.unplug_leaves_free.0);
            let free = vm.parts.free.saturating_sub(stays);
            let most = (vm.plugged / 4).max(vm.block);
            let bytes = size
                .saturating_sub(wants)
                .min(free)
                .min(most)
                .min(vm.plugged);
            let bytes = bytes / vm.block * vm.block;
            if bytes > 0 {
                let bytes = ByteSize(bytes);
                let action = Action::Unplug { bytes };
                return Some(Call::order(action, bytes.0, Reason::IdleMemory { bytes }));
            }
        }
        if size > vm.max && vm.can_balloon {
            let smallest = vm.max.max(vm.floor());
            let bytes = size.saturating_sub(smallest).min(vm.balloon_step(policy));
            if bytes >= SMALLEST_CHANGE {
                let action = Action::Balloon {
                    target: ByteSize(size - bytes),
                };
                let bytes = ByteSize(bytes);
                return Some(Call::order(action, bytes.0, Reason::AboveMaximum { bytes }));
            }
        }
        None
    }

    /// Takes memory by balloon because the host lacks `missing` more bytes, of `short` in all.
    pub(crate) fn call_to_balloon(
        &self,
        clock: Duration,
        vm: &Assessment,
        missing: u64,
        short: u64,
        policy: &Policy,
    ) -> Call {
        if let Some(reason) = self.not_yet(clock, vm) {
            return Call::none(reason);
        }
        if clock < self.settled_at {
            let wait = self.settled_at.saturating_sub(clock);
            return Call::none(Reason::Waiting { wait });
        }
        let size = vm.parts.size;
        let useful = missing.saturating_add(vm.returned());
        let bytes = size
            .saturating_sub(vm.floor())
            .min(vm.balloon_step(policy))
            .min(useful)
            / PAGE_SIZE
            * PAGE_SIZE;
        let gain = vm.gain(bytes);
        if gain < SMALLEST_CHANGE {
            return Call::none(Reason::AtTarget);
        }
        let action = Action::Balloon {
            target: ByteSize(size - bytes),
        };
        let reason = Reason::HostShort {
            bytes: ByteSize(bytes),
            shortage: ByteSize(short),
        };
        Call {
            gain,
            ..Call::order(action, bytes, reason)
        }
    }
}
