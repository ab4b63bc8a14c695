//! Descriptions of hosts and VMs, and random ones.

use super::fault::{Fault, Lie};
use super::random::Random;
use super::workload::Workload;
use crate::input::{Limits, Source};
use memfold_units::ByteSize;

const GIB: f64 = 1_073_741_824.0;
const MIB: f64 = 1_048_576.0;

/// One VM. All amounts are bytes.
#[derive(Clone, Debug)]
pub struct VmSpec {
    /// RAM at its start.
    pub ram: f64,
    /// Memory that can be plugged in addition; 0 without virtio-mem.
    pub virtio_mem_max: f64,
    /// Block size of virtio-mem.
    pub block: f64,
    /// Size of the guest's swap; 0 if it has none.
    pub swap: f64,
    /// It has a balloon device.
    pub has_balloon: bool,
    /// The balloon deflates before the guest's OOM killer runs.
    pub deflate_on_oom: bool,
    /// Who reports.
    pub source: Source,
    /// Seconds between two reports; 0: one at each look.
    pub report_interval: f64,
    /// Part of the operating system's page cache that is folded (0 to 1).
    pub folded_share: f64,
    /// What goes wrong.
    pub fault: Fault,
    /// What the guest does.
    pub workload: Workload,
    /// What the operator set.
    pub limits: Limits,
}

/// One host. All amounts are bytes.
#[derive(Clone, Debug)]
pub struct HostSpec {
    /// All RAM.
    pub ram: f64,
    /// RAM of the host's own programs.
    pub base: f64,
    /// Memory that must stay available.
    pub reserve: f64,
    /// RAM that is lent to other hosts at the beginning.
    pub lent: f64,
    /// Borrowers return RAM that is called back.
    pub borrowers_return: bool,
    /// Share of orders that fail (0 to 1).
    pub order_failures: f64,
    /// The brake on copy-on-write debt is on between these two seconds.
    pub braked: Option<(f64, f64)>,
    /// Size of the host's swap.
    pub swap: f64,
    /// The clock that the controller sees jumps by this many seconds, at this second.
    pub clock_jump: Option<(u32, i32)>,
    /// VMs that the host runs from the beginning.
    pub vms: Vec<VmSpec>,
}

impl VmSpec {
    /// Makes a VM with `ram` that does `workload`, with an agent, a balloon and no fault.
    #[must_use]
    pub fn new(ram: f64, workload: Workload) -> Self {
        let ram_bytes = ByteSize::mib(0).0 + whole(ram);
        Self {
            ram,
            virtio_mem_max: 0.0,
            block: 128.0 * MIB,
            swap: GIB,
            has_balloon: true,
            deflate_on_oom: true,
            source: Source::Agent { trims: true },
            report_interval: 0.0,
            folded_share: 0.0,
            fault: Fault::None,
            workload,
            limits: Limits::of_vm(ByteSize(ram_bytes), ByteSize(ram_bytes)),
        }
    }

    /// Makes a random VM.
    #[must_use]
    pub fn random(random: &mut Random) -> Self {
        let ram = random.choose(&[1.0, 2.0, 2.0, 4.0, 4.0, 8.0, 16.0]) * GIB;
        let mut vm = Self::new(ram, Workload::random(random, ram));
        vm.swap = random.choose(&[0.0, 0.0, 0.5, 1.0, 2.0]) * GIB;
        vm.folded_share = random.choose(&[0.0, 0.5, 0.9]);
        vm.source = random.choose(&[
            Source::Agent { trims: true },
            Source::Agent { trims: true },
            Source::Agent { trims: true },
            Source::Agent { trims: false },
            Source::BalloonStats,
        ]);
        vm.has_balloon = random.chance(0.95);
        vm.deflate_on_oom = random.chance(0.9);
        if random.chance(0.15) {
            vm.virtio_mem_max = ram;
            vm.limits.max = ByteSize(whole(2.0 * ram));
        }
        vm.limits.priority = random.choose(&[50, 100, 100, 200]);
        let at = whole_u32(random.between(600.0, 80_000.0));
        if random.chance(0.2) {
            vm.fault = random.choose(&[
                Fault::Silent,
                Fault::AgentKilled(at),
                Fault::Frozen(at, at + 600),
                Fault::Lies(Lie::NeedsAll),
                Fault::Lies(Lie::NeedsNothing),
                Fault::Lies(Lie::Contradicts),
                Fault::Lies(Lie::Noise),
                Fault::NoBalloonDriver,
                Fault::TrimsNothing,
                Fault::Unplugged(at),
            ]);
        }
        vm.limits.pinned = random.chance(0.05);
        vm
    }
}

impl HostSpec {
    /// Makes a host for `vms` whose RAM is their sum, divided by `overcommit`.
    #[must_use]
    pub fn for_vms(vms: Vec<VmSpec>, overcommit: f64) -> Self {
        let given: f64 = vms.iter().map(|vm| vm.ram + vm.virtio_mem_max).sum();
        let base = GIB;
        let ram = base + given / overcommit;
        Self {
            ram,
            base,
            reserve: (ram / 16.0).max(512.0 * MIB),
            lent: 0.0,
            borrowers_return: true,
            order_failures: 0.0,
            braked: None,
            swap: 4.0 * GIB,
            clock_jump: None,
            vms,
        }
    }

    /// Makes a random host on which nothing goes wrong: all guests have an agent and a balloon, and
    /// the VMs have at most the host's memory.
    #[must_use]
    pub fn random_healthy(seed: u64) -> Self {
        let mut host = Self::random(seed);
        for vm in &mut host.vms {
            vm.source = Source::Agent { trims: true };
            vm.has_balloon = true;
            vm.deflate_on_oom = true;
            vm.fault = Fault::None;
            vm.limits.pinned = false;
        }
        let mut random = Random::new(!seed);
        Self::for_vms(host.vms, random.between(0.7, 1.0))
    }

    /// Makes a random host: two to eight VMs, whose memory is 0.7 to 1.4 times the host's.
    #[must_use]
    pub fn random(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let count = random.choose(&[2, 3, 4, 5, 6, 7, 8]);
        let vms = (0..count).map(|_| VmSpec::random(&mut random)).collect();
        let mut host = Self::for_vms(vms, random.between(0.7, 1.4));
        if random.chance(0.3) {
            host.lent = host.ram * random.between(0.02, 0.1);
        }
        if random.chance(0.1) {
            let at = whole_u32(random.between(600.0, 80_000.0));
            host.clock_jump = Some((at, random.choose(&[-7200, -30, 30, 7200])));
        }
        host.borrowers_return = random.chance(0.8);
        host.order_failures = random.choose(&[0.0, 0.0, 0.02, 0.2]);
        if random.chance(0.2) {
            let at = random.between(600.0, 80_000.0);
            host.braked = Some((at, at + random.between(60.0, 7200.0)));
        }
        for vm in &mut host.vms {
            vm.report_interval = random.choose(&[0.0, 2.0, 7.0]);
        }
        host
    }
}

// Amounts of specifications are positive and far below 2^63.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(value: f64) -> u64 {
    value as u64
}

// Seconds of one day.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole_u32(value: f64) -> u32 {
    value as u32
}
