//! What the controller is told: limits and signals of each VM, and the state of the host.
//!
//! Counters have the names of the kernel's files (`/proc/vmstat`, `/proc/pressure/memory`). They
//! count from the guest's boot. All times are durations since one moment that the caller chooses;
//! the caller's clock should be monotonic, but nothing breaks if it is not.

use std::time::Duration;

use memfold_units::ByteSize;

/// A VM's number. The caller chooses it, and must not use it for another VM later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId(pub u64);

/// What the operator set for one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The VM is never made smaller than this.
    pub min: ByteSize,
    /// The VM is never made larger than this. A `max` below `min` counts as `min`.
    pub max: ByteSize,
    /// Memory that the VM has beyond its working set, in percent of the working set.
    pub buffer_percent: u16,
    /// Weight of what the VM loses, against other VMs: of two VMs, the one with half the weight is
    /// asked first. 0 counts as 1.
    pub priority: u16,
    /// The VM's size is never changed.
    pub pinned: bool,
}

impl Limits {
    /// Default of [`Limits::buffer_percent`]. Hyper-V's default memory buffer is 20 %, too.
    pub const BUFFER_PERCENT: u16 = 20;

    /// Default of [`Limits::priority`].
    pub const PRIORITY: u16 = 100;

    /// Returns the default limits of a VM that was started with `ram` and can grow to `max`: it may
    /// shrink to a quarter of `ram`, but not below 256 MiB. A `max` below that is the minimum, too.
    #[must_use]
    pub fn of_vm(ram: ByteSize, max: ByteSize) -> Self {
        Self {
            min: ByteSize((ram.0 / 4).max(ByteSize::mib(256).0).min(ram.0).min(max.0)),
            max,
            buffer_percent: Self::BUFFER_PERCENT,
            priority: Self::PRIORITY,
            pinned: false,
        }
    }
}

/// Everything that is known about one VM at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signals {
    /// When `guest` arrived, by the caller's clock (the one of the `now` of each step).
    pub at: Duration,
    /// RAM that the VM was started with, without virtio-mem. From QEMU.
    pub ram: ByteSize,
    /// The VM's balloon device, if it has one. From QEMU.
    pub balloon: Option<Balloon>,
    /// The VM's virtio-mem device, if it has one. From QEMU.
    pub virtio_mem: Option<VirtioMem>,
    /// The host gets no memory back that the guest frees or that the balloon takes: the RAM is
    /// pinned for a device or locked, or has huge pages. From QEMU.
    pub keeps_freed_ram: bool,
    /// The host gets pages back that are free in the guest, by free page reporting of the balloon.
    /// From QEMU.
    pub reports_free_pages: bool,
    /// Bytes of the guest's page cache that are folded, and so cost the host almost nothing. From
    /// memfold's account.
    pub folded_cache: ByteSize,
    /// Who reported `guest`, and whether the guest can trim its page cache.
    pub source: Source,
    /// The guest's last report, or `None` if there was none. The guest may lie.
    pub guest: Option<GuestSignals>,
}

impl Signals {
    /// Returns the memory that the guest may use now: RAM and plugged memory, less what the balloon
    /// holds. The guest cannot change this figure by a lie.
    #[must_use]
    pub fn size(&self) -> ByteSize {
        let held = self.balloon.map_or(0, |balloon| balloon.held.0);
        ByteSize(self.installed().0.saturating_sub(held))
    }

    /// Returns RAM and plugged memory, with what the balloon holds.
    #[must_use]
    pub fn installed(&self) -> ByteSize {
        let plugged = self.virtio_mem.map_or(0, |device| device.plugged.0);
        ByteSize(self.ram.0.saturating_add(plugged))
    }
}

/// Where the guest's report comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// memfold's agent. `trims`: it can reclaim page cache, and the guest reports free pages to the
    /// host.
    Agent {
        /// The agent carries out [`Action::Trim`](crate::Action::Trim).
        trims: bool,
    },
    /// Statistics of the balloon device (`guest-stats`), for a VM without an agent.
    BalloonStats,
}

/// A VM's balloon device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Balloon {
    /// Memory that the balloon holds: RAM that the guest cannot use. QEMU's `query-balloon` says
    /// how much is left (`actual`).
    pub held: ByteSize,
    /// The guest takes memory back from the balloon before its OOM killer runs. The controller
    /// inflates no balloon without that.
    pub deflate_on_oom: bool,
}

/// A VM's virtio-mem device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtioMem {
    /// Memory that is plugged now (`size` of QEMU's `query-memory-devices`).
    pub plugged: ByteSize,
    /// Largest memory that can be plugged (`max-size`).
    pub max: ByteSize,
    /// Smallest amount that can be plugged or unplugged (`block-size`).
    pub block: ByteSize,
    /// The guest's driver is ready. Without it, nothing is plugged or unplugged.
    pub has_driver: bool,
}

/// One report of a guest. A field is `None` if this guest cannot say it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestSignals {
    /// Guest's time since its boot (`CLOCK_BOOTTIME`), when the report was made. For statistics of
    /// the balloon: their `last-update`.
    pub uptime: Duration,
    /// `MemTotal`. What the balloon holds is part of it if the balloon deflates before an OOM kill
    /// (`drivers/virtio/virtio_balloon.c`).
    pub total: ByteSize,
    /// `MemFree`.
    pub free: ByteSize,
    /// `MemAvailable`: free memory, and what the kernel could reclaim without swapping.
    pub available: ByteSize,
    /// `Dirty` and `Writeback`: page cache that must be written before it can be reclaimed.
    pub dirty: ByteSize,
    /// `AnonPages`.
    pub anonymous: ByteSize,
    /// `Cached` and `Buffers`: page cache, with shared memory.
    pub file_cache: ByteSize,
    /// Totals of `/proc/pressure/memory`.
    pub pressure: Option<PressureTotals>,
    /// Pages of files that were read again after they had been reclaimed.
    pub workingset_refault_file: Option<u64>,
    /// Pages of anonymous memory that were read again from swap.
    pub workingset_refault_anon: Option<u64>,
    /// Pages of files that were read again so soon that the kernel takes them for working set.
    pub workingset_activate_file: Option<u64>,
    /// Pages that were scanned for reclaim.
    pub pgscan: Option<u64>,
    /// Pages that were reclaimed.
    pub pgsteal: Option<u64>,
    /// Pages that were read from swap.
    pub pswpin: Option<u64>,
    /// Pages that were written to swap.
    pub pswpout: Option<u64>,
    /// Allocations that had to wait for reclaim (`allocstall_*`, added up).
    pub allocstall: Option<u64>,
    /// Major page faults (`pgmajfault`).
    pub pgmajfault: Option<u64>,
    /// Processes that the OOM killer has ended.
    pub oom_kill: Option<u64>,
}

/// Totals of `/proc/pressure/memory`, in microseconds since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PressureTotals {
    /// Time in which at least one task waited for memory.
    pub some_us: u64,
    /// Time in which all tasks waited for memory.
    pub full_us: u64,
}

/// The state of the host at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostState {
    /// `MemAvailable`.
    pub available: ByteSize,
    /// Memory that must stay available: the reserve of the brake.
    pub reserve: ByteSize,
    /// `SwapFree`. Half of it is given to guests that would otherwise lose a process.
    pub swap_free: ByteSize,
    /// Level of the brake on copy-on-write debt.
    pub brake: BrakeLevel,
    /// RAM of this host that is lent to VMs of other hosts.
    pub lent: ByteSize,
    /// Lent RAM is called back when a decision says so. Not so while decisions are only shown.
    pub recalls_lent: bool,
}

/// Level of the brake on copy-on-write debt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum BrakeLevel {
    /// Available memory covers the debt.
    #[default]
    Ok,
    /// Available memory covers the debt only just.
    Warning,
    /// Available memory does not cover the debt: no VM starts and nothing more is shared.
    Braked,
}
