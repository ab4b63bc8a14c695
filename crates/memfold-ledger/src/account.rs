//! The data model of the ledger: VMs, page stores, and the host. All amounts are bytes, as they
//! were when they were read. JSON keys name the unit.

use std::fmt;

use memfold_store::StoreIdentity;
use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

use super::debt::DebtReport;

/// Memory account of one page store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreAccount {
    /// Trust domain whose VMs may map the page store.
    pub domain: String,
    /// Device and inode of the page store's file.
    pub identity: StoreIdentity,
    /// Memory that the page store's file allocates (`st_blocks`), whether or not a process maps it.
    pub allocated_bytes: ByteSize,
}

/// Memory account of one VM: its guest RAM, with each page in exactly one class, and its QEMU
/// process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmAccount {
    /// The VM's name.
    pub name: String,
    /// Trust domain of the VM; `None`: the VM shares with no other VM.
    pub domain: Option<String>,
    /// Process number of QEMU.
    pub pid: i32,

    /// Size of guest RAM. It is the sum of these classes: private, unfolded, folded (two), file
    /// (two), zero, swapped, free.
    pub ram_bytes: ByteSize,
    /// Anonymous guest pages in memory, outside page-store mappings.
    pub private_bytes: ByteSize,
    /// Private copies inside page-store mappings: guest pages that were folded and have been
    /// written since.
    pub unfolded_bytes: ByteSize,
    /// Guest pages mapped to a page store, not copied, and present in QEMU's page tables.
    pub folded_resident_bytes: ByteSize,
    /// Guest pages mapped to a page store that QEMU has not accessed since.
    pub folded_untouched_bytes: ByteSize,
    /// Guest pages of other files in QEMU's page tables: of a snapshot's image, or of a shared RAM
    /// backend.
    pub file_resident_bytes: ByteSize,
    /// Guest pages mapped to other files that QEMU has not accessed.
    pub file_untouched_bytes: ByteSize,
    /// Guest pages mapped to the kernel's shared zero page, which cost nothing.
    pub zero_bytes: ByteSize,
    /// Guest pages in swap.
    pub swapped_bytes: ByteSize,
    /// Guest pages without memory: never used, or given back.
    pub free_bytes: ByteSize,

    /// Guest RAM in memory: private + unfolded + folded resident + file resident.
    pub backed_bytes: ByteSize,
    /// Folded memory: folded resident + folded untouched.
    pub folded_bytes: ByteSize,
    /// Part of the guest RAM in memory that ksmd has merged (smaps `KSM`, Linux >= 6.6).
    pub ksm_merged_bytes: Option<ByteSize>,
    /// Part of the guest RAM in memory that huge pages map.
    pub huge_bytes: ByteSize,
    /// Resident guest RAM according to smaps: a second figure of the kernel for `backed_bytes`.
    pub ram_rss_bytes: ByteSize,
    /// Proportional set size (PSS) of guest RAM.
    pub ram_pss_bytes: ByteSize,

    /// PSS of the QEMU process outside guest RAM.
    pub qemu_pss_bytes: ByteSize,
    /// Part of `qemu_pss_bytes`: the TCG buffer of translated code (writable and executable
    /// anonymous memory); zero under KVM.
    pub tcg_pss_bytes: ByteSize,
    /// Part of `qemu_pss_bytes`: QEMU's shares of segments' pages.
    #[serde(default)]
    pub segment_pss_bytes: ByteSize,
    /// Part of `segment_pss_bytes`: images that are stored in memory (tmpfs). Also part of
    /// `pss_shmem_bytes`.
    #[serde(default)]
    pub segment_shmem_bytes: ByteSize,
    /// Pages of segments in QEMU's page tables.
    #[serde(default)]
    pub segment_resident_bytes: ByteSize,
    /// Page tables of the QEMU process (`VmPTE`); not part of any PSS.
    pub page_table_bytes: ByteSize,

    /// PSS of the whole QEMU process (`smaps_rollup`).
    pub pss_bytes: ByteSize,
    /// Part of `pss_bytes`: anonymous memory.
    pub pss_anon_bytes: ByteSize,
    /// Part of `pss_bytes`: shared memory and memory files, page stores included.
    pub pss_shmem_bytes: ByteSize,
    /// Part of `pss_bytes`: QEMU's shares of page-store pages. This figure is never too large. It
    /// may be too small by the pages that KSM merged inside page-store mappings.
    pub store_pss_bytes: ByteSize,
    /// Part of `ram_pss_bytes`: QEMU's shares of pages of other files, such as the image that the
    /// VM runs from.
    #[serde(default)]
    pub file_pss_bytes: ByteSize,

    /// Number of mappings of the QEMU process. The kernel allows at most `vm.max_map_count`.
    pub mappings: u64,
    /// Number of page-store mappings in guest RAM.
    pub store_mappings: u64,
}

impl VmAccount {
    /// Returns the memory of the VM's QEMU beside guest RAM and segments: PSS of the rest of the
    /// process, and its page tables.
    #[must_use]
    pub fn overhead_bytes(&self) -> ByteSize {
        self.qemu_pss_bytes - self.segment_pss_bytes + self.page_table_bytes
    }

    /// Returns the sum of all classes of guest pages; equals `ram_bytes`.
    #[must_use]
    pub fn sum_of_parts(&self) -> ByteSize {
        self.private_bytes
            + self.unfolded_bytes
            + self.folded_resident_bytes
            + self.folded_untouched_bytes
            + self.file_resident_bytes
            + self.file_untouched_bytes
            + self.zero_bytes
            + self.swapped_bytes
            + self.free_bytes
    }
}

/// Memory used by memfold itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnCost {
    /// PSS of the daemon and its relays (helper processes that connect VMs to lent RAM).
    pub pss_bytes: ByteSize,
    /// Part of the daemon's PSS: anonymous memory, without relays.
    pub pss_anon_bytes: ByteSize,
    /// Part of the daemon's PSS: shared memory and memory files.
    pub pss_shmem_bytes: ByteSize,
    /// Part of `pss_bytes`: shares of page-store pages that the daemon maps. The daemon fills page
    /// stores by `write(2)`, so this is 0 except in tests.
    pub store_pss_bytes: ByteSize,
    /// Page tables of the daemon and its relays.
    pub page_table_bytes: ByteSize,
    /// Part of `pss_bytes`: the fold engine's tables about pages (attributes, hints, maps), as
    /// counted by the engine.
    pub metadata_bytes: ByteSize,
}

impl OwnCost {
    /// Returns the whole cost: PSS without shares of page stores, and page tables.
    #[must_use]
    pub fn total_bytes(&self) -> ByteSize {
        self.pss_bytes - self.store_pss_bytes + self.page_table_bytes
    }
}

/// Returns a number of bytes as a signed one.
pub(crate) fn signed(bytes: ByteSize) -> i64 {
    i64::try_from(bytes.0).unwrap_or(i64::MAX)
}

/// Figures of KSM, the kernel's same-page merging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KsmAccount {
    /// KSM's control `run`: 1 while ksmd runs.
    pub run: u64,
    /// Number of merged pages in memory.
    pub pages_shared: u64,
    /// Number of further mappings of merged pages, which is the number of pages saved.
    pub pages_sharing: u64,
    /// Bytes that KSM saves less its metadata (`general_profit`); may be negative. While KSM is
    /// stopped, this still includes processes that have ended.
    pub general_profit_bytes: i64,
    /// Number of pages merged in live processes (Linux >= 6.1).
    pub merging_pages: Option<u64>,
    /// Number of zero pages in live processes that KSM (`use_zero_pages`) has mapped to the
    /// kernel's zero page; not part of `merging_pages` (Linux >= 6.6).
    #[serde(default)]
    pub zero_pages: Option<u64>,
    /// CPU time of ksmd since boot, seconds.
    pub ksmd_cpu_s: f64,
}

/// Memory account of the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostAccount {
    /// `MemTotal` of `/proc/meminfo`.
    pub mem_total_bytes: ByteSize,
    /// `MemAvailable` of `/proc/meminfo`.
    pub mem_available_bytes: ByteSize,
    /// `AnonPages` of `/proc/meminfo`.
    pub anon_pages_bytes: ByteSize,
    /// `Shmem` of `/proc/meminfo`.
    pub shmem_bytes: ByteSize,
    /// The kernel's own memory: `SUnreclaim`, `KernelStack`, `PageTables`, `SecPageTables`,
    /// `Percpu`.
    pub kernel_bytes: ByteSize,
    /// Memory that `MemAvailable` excludes: zone reserves, and the part of caches below the low
    /// watermark.
    pub reserve_bytes: ByteSize,
    /// Free pages in the CPUs' own lists, which `MemAvailable` leaves out. They may sum up to more
    /// than 1 GiB.
    pub per_cpu_free_bytes: ByteSize,
    /// Anonymous PSS of all processes except VMs and memfold.
    pub others_anon_bytes: ByteSize,
    /// Part of `others_anon_bytes` that this host lends to other hosts. This memory is locked and
    /// never swapped.
    #[serde(default)]
    pub lent_bytes: ByteSize,
    /// Kernel setting `vm.max_map_count`.
    pub max_map_count: u64,

    /// Accounts of the page stores.
    pub stores: Vec<StoreAccount>,
    /// Memory allocated by all page stores.
    pub stores_bytes: ByteSize,
    /// Memory of the snapshot images that VMs run from (`st_blocks`), whether or not a VM has
    /// accessed it.
    #[serde(default)]
    pub images_bytes: ByteSize,
    /// Figures of KSM; absent if the kernel has no KSM.
    pub ksm: Option<KsmAccount>,
    /// Memory used by memfold itself.
    pub own: OwnCost,

    /// Sum of the PSS of all QEMU processes.
    pub vms_pss_bytes: ByteSize,
    /// Memory of VMs, memfold and page stores in all, each physical page counted once. Page tables
    /// of these processes are included.
    pub physical_bytes: ByteSize,
    /// Part of `physical_bytes` that the kernel cannot drop: all but page cache of ordinary files.
    pub unreclaimable_bytes: ByteSize,

    /// Saving by folding: VMs' pages that are mapped to a page store and not copied, less the page
    /// stores' own pages.
    pub saved_by_folding_bytes: i64,
    /// Saving by clones: image pages in VMs' page tables, less the VMs' shares of them. (Pages of
    /// one image that several VMs map are in memory once.)
    #[serde(default)]
    pub saved_by_clones_bytes: i64,
    /// Saving by segments: segments' pages in VMs' page tables, less the VMs' shares of them.
    #[serde(default)]
    pub saved_by_segments_bytes: i64,
    /// Saving by KSM: `general_profit`, limited to the pages merged in live processes.
    pub saved_by_ksm_bytes: i64,
    /// Saving by pages of zeroes that were given back, as counted by the fold engine.
    pub saved_by_zero_drop_bytes: ByteSize,
    /// Sum of all savings, less memfold's own PSS (without its shares of page stores) and page
    /// tables.
    pub saved_net_bytes: i64,
}

/// The ledger at one moment, as printed by `memfold report --json` and served by the daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Time of the report, in seconds since 1970.
    pub taken_unix_s: f64,
    /// Account of the host.
    pub host: HostAccount,
    /// Accounts of the VMs.
    pub vms: Vec<VmAccount>,
    /// Copy-on-write debt: memory that guests could claim by writing. Absent if no daemon made the
    /// report.
    #[serde(default)]
    pub debt: Option<DebtReport>,
    /// Pairs of sums that should be equal and differ by more than 2 %; normally empty.
    #[serde(default)]
    pub disagreements: Vec<Disagreement>,
}

/// Two sums of memory that should be equal and are not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Disagreement {
    /// Name of the VM whose sums differ; `None`: sums of the host.
    pub vm: Option<String>,
    /// Description of the compared sums.
    pub what: String,
    /// Sum according to the ledger.
    pub ledger_bytes: ByteSize,
    /// Sum according to the kernel.
    pub kernel_bytes: ByteSize,
    /// The difference in percent of the kernel's sum.
    pub off_percent: f64,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {}: ledger {}, kernel {} ({:+.1} %)",
            self.vm.as_deref().unwrap_or("host"),
            self.what,
            self.ledger_bytes,
            self.kernel_bytes,
            self.off_percent
        )
    }
}
