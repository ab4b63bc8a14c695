//! Selects the figures that the history of memory use stores from each report of the ledger, for
//! the host and for each VM.

use memfold_fold::EngineStats;
use memfold_units::ByteSize;

use crate::account::signed;
use crate::{Report, VmAccount};

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

/// Names of a VM's figures in the history, in the order of the database's columns.
pub const VM_SERIES: [&str; 8] = [
    "private_bytes",
    "unfolded_bytes",
    "folded_bytes",
    "template_bytes",
    "zero_bytes",
    "swapped_bytes",
    "free_bytes",
    "pss_bytes",
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

/// Returns the figures of a VM's account in the order of [`VM_SERIES`], in bytes.
#[must_use]
pub fn vm_values(vm: &VmAccount) -> [i64; VM_SERIES.len()] {
    [
        signed(vm.private_bytes),
        signed(vm.unfolded_bytes),
        signed(vm.folded_bytes),
        signed(vm.file_resident_bytes + vm.file_untouched_bytes),
        signed(vm.zero_bytes),
        signed(vm.swapped_bytes),
        signed(vm.free_bytes),
        signed(vm.pss_bytes),
    ]
}
