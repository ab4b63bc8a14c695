//! One guest: how a Linux kernel would divide its memory, in a few numbers.
//!
//! Page cache is reclaimed in the order of a perfect LRU, except for [`IMPERFECT`]: files that were
//! read once, then the sets that were read longest ago, then the set in use. A set that is only
//! partly cached causes misses by its distribution of reuse distances, so a trim that goes too far
//! is paid with refaults, at once or when the phase comes back.

use std::time::Duration;

use memfold_units::{ByteSize, PAGE_SIZE};

use super::fault::{Fault, Lie};
use super::random::Random;
use super::spec::VmSpec;
use super::workload::Phase;
use crate::input::{Balloon, GuestSignals, PressureTotals, Signals, Source, VirtioMem};

const MIB: f64 = 1_048_576.0;
const PAGE: f64 = PAGE_SIZE as f64;

/// Time that a task waits for one page that is read again, and for one that is swapped.
const REFAULT_SECONDS: f64 = 30e-6;
const SWAP_SECONDS: f64 = 80e-6;

/// Part of what is reclaimed that comes from the set in use although older pages exist.
const IMPERFECT: f64 = 0.02;

/// Page cache that the kernel does not reclaim.
const LEAST_CACHE: f64 = 8.0 * MIB;

/// Fastest reading, swapping, inflating and deflating, in bytes a second.
const READ_RATE: f64 = 500.0 * MIB;
const SWAP_RATE: f64 = 200.0 * MIB;
const INFLATE_RATE: f64 = 300.0 * MIB;
const DEFLATE_RATE: f64 = 1024.0 * MIB;

/// Allocations up to this rate are served by the kernel's background reclaim.
const KSWAPD_RATE: f64 = 400.0 * MIB;

/// Rate at which free pages are reported to the host.
const REPORT_RATE: f64 = 512.0 * MIB;

/// Time in which each swapped page is needed again once.
const SWAP_PERIOD: f64 = 120.0;

/// What a guest's kernel has counted, in bytes, events or seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Bytes of files read again.
    pub refaults: f64,
    /// Bytes read from swap.
    pub swapped_in: f64,
    /// Bytes written to swap.
    pub swapped_out: f64,
    /// Bytes reclaimed.
    pub reclaimed: f64,
    /// Allocations that waited.
    pub stalls: f64,
    /// Time that tasks waited for memory.
    pub waited: f64,
    /// Time that the guest stood still because the host swapped. The guest does not see it.
    pub waited_for_host: f64,
    /// Processes ended by the OOM killer.
    pub kills: u32,
}

#[derive(Clone, Copy, Debug)]
struct CachedSet {
    cached: f64,
    /// Most that was ever cached: reading that again is a refault.
    loaded: f64,
    /// When the set was last in use.
    used_at: f64,
}

/// A guest in the model. All amounts are bytes, all times seconds.
#[derive(Clone, Debug)]
pub struct ModelGuest {
    spec: VmSpec,
    ram: f64,
    held: f64,
    balloon_target: f64,
    plugged: f64,
    anonymous: f64,
    swapped: f64,
    sets: Vec<CachedSet>,
    /// Page cache of files that were read once.
    stream: f64,
    /// Memory of the host that the guest's pages take, without what is folded.
    backed: f64,
    reports_free_pages: bool,
    phase: usize,
    phase_time: f64,
    /// The phase's program was killed.
    killed: bool,
    uptime: f64,
    noise: Random,
    served_after: Option<f64>,
    /// The last report, and when it arrived.
    reported: Option<(Duration, GuestSignals)>,
    /// What the kernel counted.
    pub counters: Counters,
    /// The counters at the last boot: the guest's own begin there.
    counters_at_boot: Counters,
}

impl Counters {
    /// Returns what was counted after `before`, which are earlier values of these counters.
    fn since(self, before: Self) -> Self {
        Self {
            refaults: self.refaults - before.refaults,
            swapped_in: self.swapped_in - before.swapped_in,
            swapped_out: self.swapped_out - before.swapped_out,
            reclaimed: self.reclaimed - before.reclaimed,
            stalls: self.stalls - before.stalls,
            waited: self.waited - before.waited,
            waited_for_host: self.waited_for_host - before.waited_for_host,
            kills: self.kills - before.kills,
        }
    }
}

impl ModelGuest {
    /// Boots a guest.
    #[must_use]
    pub fn new(spec: &VmSpec, reports_free_pages: bool, plugged: f64) -> Self {
        let sets = spec.workload.sets.iter();
        Self {
            ram: spec.ram,
            held: 0.0,
            balloon_target: 0.0,
            plugged,
            anonymous: spec.workload.base,
            swapped: 0.0,
            sets: sets
                .map(|_| CachedSet {
                    cached: 0.0,
                    loaded: 0.0,
                    used_at: 0.0,
                })
                .collect(),
            stream: 0.0,
            backed: 0.0,
            reports_free_pages,
            phase: 0,
            phase_time: 0.0,
            killed: false,
            uptime: 1.0,
            noise: Random::new(spec.ram.to_bits()),
            served_after: None,
            reported: None,
            counters: Counters::default(),
            counters_at_boot: Counters::default(),
            spec: spec.clone(),
        }
    }

    /// Memory that the guest may use.
    #[must_use]
    pub fn size(&self) -> f64 {
        self.ram + self.plugged - self.held
    }

    /// Memory of the host that the guest takes.
    #[must_use]
    pub fn backed(&self) -> f64 {
        self.backed
    }

    /// Memory that the kernel keeps for itself.
    fn kernel(&self) -> f64 {
        40.0 * MIB + (self.ram + self.plugged) * 0.016
    }

    fn cache(&self) -> f64 {
        self.stream + self.sets.iter().map(|set| set.cached).sum::<f64>()
    }

    fn folded(&self) -> f64 {
        self.sets[0].cached * self.spec.folded_share
    }

    fn free(&self) -> f64 {
        (self.size() - self.kernel() - self.anonymous - self.cache()).max(0.0)
    }

    fn phase(&self) -> Phase {
        self.spec.workload.phases[self.phase]
    }

    /// Time since the running phase began.
    #[must_use]
    pub fn phase_time(&self) -> f64 {
        self.phase_time
    }

    /// Time from the beginning of the running phase until it had all its anonymous memory.
    #[must_use]
    pub fn served_after(&self) -> Option<f64> {
        self.served_after
    }

    fn is_frozen(&self) -> bool {
        matches!(self.spec.fault, Fault::Frozen(from, to)
            if self.uptime >= f64::from(from) && self.uptime < f64::from(to))
    }

    fn agent_is_dead(&self) -> bool {
        matches!(self.spec.fault, Fault::AgentKilled(at) if self.uptime >= f64::from(at))
    }

    /// Sets the balloon so that the guest has `size`.
    pub fn set_balloon(&mut self, size: f64) {
        if self.spec.has_balloon && self.spec.fault != Fault::NoBalloonDriver {
            self.balloon_target = (self.ram + self.plugged - size).clamp(0.0, self.ram);
        }
    }

    /// Plugs memory.
    pub fn plug(&mut self, bytes: f64) {
        self.plugged = (self.plugged + bytes).min(self.spec.virtio_mem_max);
    }

    /// Unplugs memory, as far as it is free.
    pub fn unplug(&mut self, bytes: f64) {
        let bytes = bytes.min(self.plugged).min(self.free());
        self.plugged -= (bytes / self.spec.block).floor() * self.spec.block;
    }

    /// Trims page cache: what the agent does.
    pub fn trim(&mut self, bytes: f64) {
        let is_deaf = self.agent_is_dead() || self.is_frozen();
        if !is_deaf && self.spec.fault != Fault::TrimsNothing {
            let clean = self.cache() - self.phase().dirty - self.folded();
            self.evict(bytes.min(clean.max(0.0)));
        }
    }

    /// Reclaims up to `bytes` of page cache, and returns how much.
    fn evict(&mut self, bytes: f64) -> f64 {
        let wanted = bytes.min(self.cache() - LEAST_CACHE).max(0.0);
        let in_use = self.phase().files;
        let take = |from: &mut f64, most: f64| {
            let taken = most.min(*from);
            *from -= taken;
            taken
        };
        let mut left = wanted - take(&mut self.sets[in_use].cached, wanted * IMPERFECT);
        left -= take(&mut self.stream, left);
        while left > 0.5 {
            let oldest = (0..self.sets.len())
                .filter(|&i| i != in_use && self.sets[i].cached > 0.0)
                .min_by(|&a, &b| self.sets[a].used_at.total_cmp(&self.sets[b].used_at));
            left -= take(&mut self.sets[oldest.unwrap_or(in_use)].cached, left);
            if oldest.is_none() {
                break;
            }
        }
        let evicted = wanted - left.max(0.0);
        self.counters.reclaimed += evicted;
        evicted
    }

    /// Lets the guest run for `dt` seconds. Returns whether a new phase began.
    pub fn tick(&mut self, dt: f64) -> bool {
        if self.is_frozen() {
            // The clock of a stopped guest stands still; the model's moves on, to end the fault.
            self.uptime += dt;
            return false;
        }
        self.uptime += dt;
        if let Fault::Unplugged(at) = self.spec.fault {
            if self.uptime >= f64::from(at) && self.ram >= self.spec.ram {
                self.ram = self.spec.ram * 0.75;
                self.balloon_target = self.balloon_target.min(self.ram * 0.75);
            }
        }
        if let Fault::Reboots(at) = self.spec.fault {
            let at = f64::from(at);
            if self.uptime >= at && self.uptime - dt < at {
                self.reboot();
            }
        }
        let is_new = self.next_phase(dt);
        self.move_balloon(dt);
        let mut waited = self.allocate(dt);
        waited += self.swap_in(dt);
        waited += self.read_files(dt);
        self.counters.waited += waited.min(dt);
        self.count_backed(dt);
        is_new
    }

    fn next_phase(&mut self, dt: f64) -> bool {
        self.phase_time += dt;
        if self.phase_time < self.phase().seconds {
            return false;
        }
        let files = self.phase().files;
        self.sets[files].used_at = self.uptime;
        self.phase = (self.phase + 1) % self.spec.workload.phases.len();
        self.phase_time = 0.0;
        self.killed = false;
        self.served_after = None;
        true
    }

    fn move_balloon(&mut self, dt: f64) {
        let gap = self.balloon_target - self.held;
        let change = gap.clamp(-DEFLATE_RATE * dt, INFLATE_RATE * dt);
        self.held += change;
        self.make_room(0.0, dt, f64::INFINITY);
    }

    /// Frees memory for `bytes` more, and returns the time that tasks wait for it. Page cache goes
    /// first, then memory is swapped out, then the balloon deflates, then the OOM killer runs.
    fn make_room(&mut self, bytes: f64, dt: f64, rate: f64) -> f64 {
        let used = self.kernel() + self.anonymous + self.cache();
        let mut lacks = used + bytes - self.size();
        if lacks <= 0.0 {
            return 0.0;
        }
        let mut waited = 0.0;
        let evicted = self.evict(lacks);
        lacks -= evicted;
        let direct = (evicted - KSWAPD_RATE * dt).max(0.0);
        if rate.is_finite() && direct > 0.0 {
            self.counters.stalls += (direct / PAGE / 32.0).ceil();
            waited += direct / PAGE * 2e-6;
        }
        let room = self.spec.swap - self.swapped;
        let swapped = lacks.min(room).min(SWAP_RATE * dt).min(self.anonymous);
        if swapped > 0.0 {
            self.swapped += swapped;
            self.anonymous -= swapped;
            self.counters.swapped_out += swapped;
            waited += swapped / PAGE * SWAP_SECONDS;
            lacks -= swapped;
        }
        if lacks > 0.0 && self.spec.deflate_on_oom && self.held > 0.0 {
            let back = lacks.min(self.held);
            self.held -= back;
            self.balloon_target = self.balloon_target.min(self.held);
            lacks -= back;
        }
        if lacks > PAGE {
            self.kill();
        }
        waited
    }

    fn kill(&mut self) {
        self.counters.kills += 1;
        self.killed = true;
        self.swapped = 0.0;
        self.anonymous = self.anonymous.min(self.spec.workload.base);
        // Whatever the balloon still wants is not there; a guest gives it up.
        let room = self.ram + self.plugged - self.kernel() - self.anonymous - LEAST_CACHE;
        self.held = self.held.min(room.max(0.0));
        self.balloon_target = self.balloon_target.min(self.held);
    }

    fn allocate(&mut self, dt: f64) -> f64 {
        let phase = self.phase();
        let wanted = if self.killed {
            self.spec.workload.base
        } else {
            phase.anonymous + phase.leak * self.phase_time
        };
        let has = self.anonymous + self.swapped;
        if wanted < has {
            let share = wanted / has;
            self.anonymous *= share;
            self.swapped *= share;
        }
        let mut waited = 0.0;
        if wanted > has {
            let bytes = (wanted - has).min(phase.allocation_rate * dt);
            waited = self.make_room(bytes, dt, phase.allocation_rate);
            if self.killed {
                return waited;
            }
            self.anonymous += bytes;
        }
        if wanted - self.anonymous - self.swapped < PAGE {
            self.served_after.get_or_insert(self.phase_time);
        }
        waited
    }

    fn swap_in(&mut self, dt: f64) -> f64 {
        if self.swapped <= 0.0 {
            return 0.0;
        }
        let needed = self.swapped * (1.0 - (-dt / SWAP_PERIOD).exp());
        let bytes = needed.min(SWAP_RATE * dt);
        let pushed_out = (bytes - self.free() - (self.cache() - LEAST_CACHE).max(0.0)).max(0.0);
        self.counters.swapped_in += bytes;
        self.counters.swapped_out += pushed_out;
        self.swapped -= bytes - pushed_out;
        self.make_room(bytes - pushed_out, dt, f64::INFINITY);
        self.anonymous += bytes - pushed_out;
        (bytes + pushed_out) / PAGE * SWAP_SECONDS
    }

    fn read_files(&mut self, dt: f64) -> f64 {
        let phase = self.phase();
        let spec = self.spec.workload.sets[phase.files];
        let set = self.sets[phase.files];
        let missing = (spec.bytes - set.cached).max(0.0);
        let mut read = 0.0;
        if missing > PAGE {
            let share = (set.cached / spec.bytes).clamp(0.0, 1.0);
            let miss_ratio = 1.0 - share.powf(spec.skew);
            // While pages come back, fewer are missed.
            let speed = miss_ratio / (1.0 - share).max(1e-9);
            let reads = missing * (1.0 - (-dt / spec.period * speed).exp());
            read = reads.min(READ_RATE * dt);
        }
        let known = (set.loaded - set.cached).max(0.0);
        let again = read * (known / missing.max(1.0)).min(1.0);
        self.counters.refaults += again;
        let once = phase.stream * dt;
        let room = self.free();
        let lacks = read + once - room;
        if lacks > 0.0 {
            self.evict(lacks);
        }
        let fits = (self.free() / (read + once).max(1.0)).min(1.0);
        self.stream += once * fits;
        let set = &mut self.sets[phase.files];
        set.cached = (set.cached + read * fits).min(spec.bytes);
        set.loaded = set.loaded.max(set.cached);
        set.used_at = self.uptime;
        again / PAGE * REFAULT_SECONDS
    }

    fn count_backed(&mut self, dt: f64) {
        let used = self.kernel() + self.anonymous + self.cache() - self.folded();
        if self.reports_free_pages {
            self.backed -= REPORT_RATE * dt;
        }
        self.backed = self.backed.max(used).min(self.size());
    }

    /// Makes the guest stand still, because the host swaps.
    pub fn wait_for_host(&mut self, seconds: f64) {
        self.counters.waited_for_host += seconds;
    }

    /// Boots the guest again within the VM, which keeps the balloon's target.
    fn reboot(&mut self) {
        let (target, backed) = (self.balloon_target, self.backed);
        self.boot_again();
        (self.balloon_target, self.backed) = (target, backed);
        for set in &mut self.sets {
            set.loaded = 0.0;
        }
        self.counters_at_boot = self.counters;
    }

    /// Boots the guest again after the host killed it.
    pub fn boot_again(&mut self) {
        self.anonymous = self.anonymous.min(self.spec.workload.base);
        self.swapped = 0.0;
        self.stream = 0.0;
        for set in &mut self.sets {
            set.cached = 0.0;
        }
        self.held = 0.0;
        self.balloon_target = 0.0;
        self.backed = 0.0;
    }

    /// `MemFree`, as Proxmox VE reads it from the balloon's statistics.
    #[must_use]
    pub fn mem_free(&self) -> f64 {
        self.free()
    }

    /// What the daemon would know of this guest at `now`.
    pub fn signals(&mut self, now: Duration) -> Signals {
        let is_silent =
            self.spec.fault == Fault::Silent || self.agent_is_dead() || self.is_frozen();
        let balloon = self.spec.has_balloon.then_some(Balloon {
            held: bytes(self.held),
            deflate_on_oom: self.spec.deflate_on_oom,
        });
        let virtio_mem = (self.spec.virtio_mem_max > 0.0).then_some(VirtioMem {
            plugged: bytes(self.plugged),
            max: bytes(self.spec.virtio_mem_max),
            block: bytes(self.spec.block),
            has_driver: true,
        });
        let is_due = self.reported.as_ref().is_none_or(|(at, _)| {
            // A clock that jumped back does not stop reports.
            let age = now.checked_sub(*at);
            age.is_none_or(|age| age.as_secs_f64() >= self.spec.report_interval)
        });
        if is_due && !is_silent {
            self.reported = Some((now, self.report()));
        }
        let reported = self.reported.clone();
        let (at, guest) = reported.unzip();
        Signals {
            at: at.unwrap_or_default(),
            ram: bytes(self.ram),
            balloon,
            virtio_mem,
            keeps_freed_ram: false,
            reports_free_pages: self.reports_free_pages,
            folded_cache: bytes(self.folded()),
            source: self.spec.source,
            guest,
        }
    }

    fn report(&mut self) -> GuestSignals {
        let cache = self.cache();
        let free = self.free();
        let reserve = (self.ram * 0.004).min(cache / 2.0);
        let has_agent = matches!(self.spec.source, Source::Agent { .. });
        let counters = self.counters.since(self.counters_at_boot);
        let agent = |value: f64| has_agent.then_some(count(value));
        let honest = GuestSignals {
            uptime: Duration::from_secs_f64(self.uptime),
            total: bytes((self.ram + self.plugged) * 0.984),
            free: bytes(free),
            available: bytes((free + cache - reserve).max(0.0)),
            dirty: bytes(self.phase().dirty.min(cache)),
            anonymous: bytes(self.anonymous),
            file_cache: bytes(cache),
            pressure: has_agent.then_some(PressureTotals {
                some_us: count(counters.waited * 1e6),
                full_us: count(counters.waited * 0.6e6),
            }),
            workingset_refault_file: agent(counters.refaults / PAGE),
            workingset_refault_anon: agent(counters.swapped_in / PAGE),
            workingset_activate_file: agent(counters.refaults / PAGE / 2.0),
            pgscan: agent(counters.reclaimed / PAGE * 1.2),
            pgsteal: agent(counters.reclaimed / PAGE),
            pswpin: Some(count(counters.swapped_in / PAGE)),
            pswpout: Some(count(counters.swapped_out / PAGE)),
            allocstall: Some(count(counters.stalls)),
            pgmajfault: Some(count(
                (counters.refaults + counters.swapped_in) / PAGE / 4.0,
            )),
            oom_kill: Some(u64::from(counters.kills)),
        };
        match self.spec.fault {
            Fault::Lies(lie) => self.falsify(lie, honest),
            _ => honest,
        }
    }

    fn falsify(&mut self, lie: Lie, mut told: GuestSignals) -> GuestSignals {
        let total = told.total;
        match lie {
            Lie::NeedsAll => {
                told.free = ByteSize(total.0 / 100);
                told.available = ByteSize(total.0 / 50);
                told.file_cache = ByteSize(total.0 / 50);
                told.anonymous = ByteSize(total.0 / 100 * 95);
                told.dirty = ByteSize(0);
                told.pressure = Some(PressureTotals {
                    some_us: count(self.uptime * 0.5e6),
                    full_us: count(self.uptime * 0.3e6),
                });
                told.allocstall = Some(count(self.uptime * 100.0));
            }
            Lie::NeedsNothing => {
                told.free = total;
                told.available = total;
                told.anonymous = ByteSize(0);
                told.file_cache = ByteSize(0);
                told.dirty = ByteSize(0);
            }
            Lie::Contradicts => told.available = ByteSize(total.0 * 2),
            Lie::Noise => {
                told.free = ByteSize(self.noise.next_u64());
                told.available = ByteSize(self.noise.next_u64() >> 30);
                told.file_cache = ByteSize(self.noise.next_u64() >> 31);
                told.workingset_refault_file = Some(self.noise.next_u64());
            }
        }
        told
    }
}

// Amounts of the model are never negative and far below 2^63.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn count(value: f64) -> u64 {
    value.max(0.0) as u64
}

fn bytes(value: f64) -> ByteSize {
    ByteSize(count(value) / PAGE_SIZE * PAGE_SIZE)
}
