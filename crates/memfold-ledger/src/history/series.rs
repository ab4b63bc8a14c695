//! Selects the figures that the history of memory use stores from each report of the ledger, for
//! the host and for each VM.

use memfold_fold::EngineStats;
use memfold_units::ByteSize;

use crate::account::signed;
use crate::{GuestMemory, Report, VmAccount};

/// Names of the host's figures in the history, in the order of the database's columns; new names
/// are appended. The first five figures, the page cache and free memory add up to `MemTotal`.
pub const HOST_SERIES: [&str; 20] = [
    "vms_bytes",
    "stores_bytes",
    "memfold_bytes",
    "others_bytes",
    "kernel_bytes",
    "available_bytes",
    "mem_total_bytes",
    "saved_by_folding_bytes",
    "saved_by_clones_bytes",
    "saved_by_segments_bytes",
    "saved_by_ksm_bytes",
    "saved_by_zero_drop_bytes",
    "saved_net_bytes",
    "engine_cpu_ms",
    "library_cpu_ms",
    "ksmd_cpu_ms",
    "debt_bytes",
    "debt_absorbable_bytes",
    "lent_bytes",
    "borrowed_bytes",
];

/// Names of a VM's figures in the history, in the order of the database's columns; new names are
/// appended. Those that begin with `guest_` are as the guest reports them; counters count from the
/// guest's boot. The last four are those of right-sizing.
pub const VM_SERIES: [&str; 19] = [
    "private_bytes",
    "unfolded_bytes",
    "folded_bytes",
    "template_bytes",
    "zero_bytes",
    "swapped_bytes",
    "free_bytes",
    "pss_bytes",
    "guest_mem_total_bytes",
    "guest_mem_available_bytes",
    "guest_anon_pages_bytes",
    "guest_cached_bytes",
    "guest_swap_used_bytes",
    "guest_workingset_refault_file",
    "guest_psi_some_us",
    "size_bytes",
    "working_set_bytes",
    "target_bytes",
    "working_set_probed_percent",
];

fn milliseconds(seconds: f64) -> i64 {
    // CPU seconds since boot are far below 2^53 milliseconds.
    #[allow(clippy::cast_possible_truncation)]
    let ms = (seconds * 1e3) as i64;
    ms
}

/// Memory that the host lends and borrows, which the ledger's report does not contain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lent {
    /// Bytes of this host's memory that are lent to other hosts.
    pub lent_bytes: u64,
    /// Bytes of swap disks of this host's VMs that are stored in other hosts' memory.
    pub borrowed_bytes: u64,
}

/// What right-sizing knows about a VM, which the ledger's report does not contain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmSize {
    /// Memory that the guest may use, in bytes.
    pub size_bytes: u64,
    /// Memory that the guest would miss, in bytes; `None`: no believable report of the guest.
    pub working_set_bytes: Option<u64>,
    /// Size that the VM should have, in bytes; `None` as above.
    pub target_bytes: Option<u64>,
    /// Whether the working set was found by taking page cache until the guest read it again; if
    /// not, it is an upper bound.
    pub is_probed: bool,
}

/// Returns the host's values in the order of [`HOST_SERIES`]; `None`: unknown. CPU times are in
/// milliseconds since the daemon's or the system's start, not since the last sample.
#[must_use]
pub fn host_values(
    ledger: &Report,
    fold: &EngineStats,
    lent: Lent,
) -> [Option<i64>; HOST_SERIES.len()] {
    let (host, debt) = (&ledger.host, ledger.debt.as_ref());
    let memfold = host.own.total_bytes();
    let vms = host.physical_bytes - host.stores_bytes - memfold;
    [
        Some(signed(vms)),
        Some(signed(host.stores_bytes)),
        Some(signed(memfold)),
        Some(signed(host.others_anon_bytes)),
        Some(signed(host.kernel_bytes)),
        Some(signed(host.mem_available_bytes)),
        Some(signed(host.mem_total_bytes)),
        Some(host.saved_by_folding_bytes),
        Some(host.saved_by_clones_bytes),
        Some(host.saved_by_segments_bytes),
        Some(host.saved_by_ksm_bytes),
        Some(signed(host.saved_by_zero_drop_bytes)),
        Some(host.saved_net_bytes),
        Some(milliseconds(fold.engine_cpu_s)),
        Some(milliseconds(fold.library_cpu_s)),
        Some(milliseconds(host.ksm.map_or(0.0, |ksm| ksm.ksmd_cpu_s))),
        debt.map(|debt| signed(ByteSize(debt.debt_bytes))),
        debt.map(|debt| signed(ByteSize(debt.absorbable_bytes))),
        Some(signed(ByteSize(lent.lent_bytes))),
        Some(signed(ByteSize(lent.borrowed_bytes))),
    ]
}

/// Returns the figures of a VM's account, and those of right-sizing, in the order of [`VM_SERIES`];
/// `None`: the guest does not report the figure now. `sized`: `None` while right-sizing is off.
#[must_use]
pub fn vm_values(vm: &VmAccount, sized: Option<VmSize>) -> [Option<i64>; VM_SERIES.len()] {
    let whole = |bytes: u64| signed(ByteSize(bytes));
    let guest = vm.guest.as_ref().filter(|guest| guest.is_fresh());
    let bytes = |figure: fn(&GuestMemory) -> Option<ByteSize>| guest.and_then(figure).map(signed);
    let number = |figure: fn(&GuestMemory) -> Option<u64>| {
        let figure = guest.and_then(figure)?;
        i64::try_from(figure).ok()
    };
    [
        Some(signed(vm.private_bytes)),
        Some(signed(vm.unfolded_bytes)),
        Some(signed(vm.folded_bytes)),
        Some(signed(vm.file_resident_bytes + vm.file_untouched_bytes)),
        Some(signed(vm.zero_bytes)),
        Some(signed(vm.swapped_bytes)),
        Some(signed(vm.free_bytes)),
        Some(signed(vm.pss_bytes)),
        bytes(|guest| Some(guest.mem_total_bytes)),
        bytes(|guest| Some(guest.mem_available_bytes)),
        bytes(|guest| guest.anon_pages_bytes),
        bytes(|guest| guest.cached_bytes),
        bytes(|guest| Some(guest.swap_total_bytes? - guest.swap_free_bytes?)),
        number(|guest| guest.workingset_refault_file),
        number(|guest| guest.pressure.map(|pressure| pressure.some_us)),
        sized.map(|sized| whole(sized.size_bytes)),
        sized.and_then(|sized| sized.working_set_bytes).map(whole),
        sized.and_then(|sized| sized.target_bytes).map(whole),
        sized
            .filter(|sized| sized.working_set_bytes.is_some())
            .map(|sized| if sized.is_probed { 100 } else { 0 }),
    ]
}
