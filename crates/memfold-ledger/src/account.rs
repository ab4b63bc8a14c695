//! The types of the ledger's accounts, which show how the host's RAM is used: by each VM, by each
//! page store (the pages that VMs share), and by the rest of the host. Every amount is in bytes, as
//! read from the kernel.

use std::fmt;

use memfold_store::StoreIdentity;
use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

use super::debt::DebtReport;
use super::guest_memory::GuestMemory;

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

/// Memory account of a snapshot's RAM image that was assembled in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageAccount {
    /// Device and inode of the memory file.
    pub identity: StoreIdentity,
    /// Memory that the file allocates (`st_blocks`), whether or not a process maps it.
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
    /// Process number of the VM's QEMU.
    pub pid: i32,

    /// Size of guest RAM, in which each page belongs to one class: private, unfolded, folded
    /// (resident or untouched), file (resident or untouched), zero, swapped or free.
    pub ram_bytes: ByteSize,
    /// Anonymous pages of guest RAM in memory, outside page-store mappings.
    pub private_bytes: ByteSize,
    /// Guest pages that were folded and have been written since: private copies inside page-store
    /// mappings.
    pub unfolded_bytes: ByteSize,
    /// Guest pages that are mapped to a page store, not copied, and present in QEMU's page tables.
    pub folded_resident_bytes: ByteSize,
    /// Guest pages that are mapped to a page store but absent from QEMU's page tables, for example
    /// because the guest has not accessed them since they were folded.
    pub folded_untouched_bytes: ByteSize,
    /// Guest pages in QEMU's page tables that belong to a file other than a page store: a
    /// snapshot's image, or a shared RAM backend.
    pub file_resident_bytes: ByteSize,
    /// Guest pages that are mapped to a file other than a page store but absent from QEMU's page
    /// tables.
    pub file_untouched_bytes: ByteSize,
    /// Guest pages mapped to the kernel's shared zero page, which cost nothing.
    pub zero_bytes: ByteSize,
    /// Guest pages in swap.
    pub swapped_bytes: ByteSize,
    /// Guest pages without memory: never used, or given back to the host.
    pub free_bytes: ByteSize,

    /// Guest RAM that is in memory: the sum of `private_bytes`, `unfolded_bytes`,
    /// `folded_resident_bytes` and `file_resident_bytes`.
    pub backed_bytes: ByteSize,
    /// Guest RAM that is mapped to a page store and not copied: `folded_resident_bytes` +
    /// `folded_untouched_bytes`.
    pub folded_bytes: ByteSize,
    /// Part of `backed_bytes` that ksmd has merged (`KSM` in smaps); `None` before Linux 6.6.
    pub ksm_merged_bytes: Option<ByteSize>,
    /// Part of `backed_bytes` that huge pages map.
    pub huge_bytes: ByteSize,
    /// `Rss` of guest RAM in smaps. It should equal `backed_bytes`, which is computed from the page
    /// map.
    pub ram_rss_bytes: ByteSize,
    /// Proportional set size (PSS) of guest RAM.
    pub ram_pss_bytes: ByteSize,

    /// PSS of the QEMU process outside guest RAM.
    pub qemu_pss_bytes: ByteSize,
    /// Part of `qemu_pss_bytes`: the TCG buffer of translated code (writable and executable
    /// anonymous memory); zero under KVM.
    pub tcg_pss_bytes: ByteSize,
    /// Part of `qemu_pss_bytes`: PSS of the segments that QEMU maps.
    #[serde(default)]
    pub segment_pss_bytes: ByteSize,
    /// Part of `segment_pss_bytes`: PSS of segments whose image is a file in memory (tmpfs). This
    /// amount is also part of `pss_shmem_bytes`.
    #[serde(default)]
    pub segment_shmem_bytes: ByteSize,
    /// `Rss` of the segments that QEMU maps: their pages in QEMU's page tables.
    #[serde(default)]
    pub segment_resident_bytes: ByteSize,
    /// Page tables of the QEMU process (`VmPTE`); not part of any PSS.
    pub page_table_bytes: ByteSize,

    /// PSS of the whole QEMU process (`smaps_rollup`).
    pub pss_bytes: ByteSize,
    /// Part of `pss_bytes`: anonymous memory of the QEMU process.
    pub pss_anon_bytes: ByteSize,
    /// Part of `pss_bytes`: shared memory and memory files of the QEMU process, page stores
    /// included.
    pub pss_shmem_bytes: ByteSize,
    /// Part of `pss_bytes`: QEMU's shares of page-store pages. This figure is never too large. It
    /// may be too small by the pages that KSM merged inside page-store mappings.
    pub store_pss_bytes: ByteSize,
    /// Part of `ram_pss_bytes`: QEMU's shares of pages that belong to files other than page stores,
    /// such as the snapshot image that the VM runs from.
    #[serde(default)]
    pub file_pss_bytes: ByteSize,
    /// Part of `file_pss_bytes`: shares of RAM images that were assembled in memory
    /// (`images_bytes` of the host).
    #[serde(default)]
    pub image_shmem_bytes: ByteSize,
    /// The RAM images that were assembled in memory and that the VM maps; not in the JSON.
    #[serde(skip)]
    pub images: Vec<ImageAccount>,

    /// Number of mappings of the QEMU process. The kernel allows at most `vm.max_map_count`.
    pub mappings: u64,
    /// Number of mappings in guest RAM that map a page store.
    pub store_mappings: u64,

    /// Memory figures that the guest reports about itself; `None`: it reports none.
    #[serde(default)]
    pub guest: Option<GuestMemory>,
}

impl VmAccount {
    /// Returns the memory that the VM's QEMU takes beside guest RAM and segments: the PSS of the
    /// rest of the process, and the process's page tables.
    #[must_use]
    pub fn overhead_bytes(&self) -> ByteSize {
        self.qemu_pss_bytes - self.segment_pss_bytes + self.page_table_bytes
    }

    /// Returns the sum of all classes of guest pages, which should equal `ram_bytes`.
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

/// Memory that the daemon and its relays (helper processes that connect VMs to lent RAM) use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnCost {
    /// PSS of the daemon and its relays (helper processes that connect VMs to lent RAM).
    pub pss_bytes: ByteSize,
    /// Part of `pss_bytes`: anonymous memory.
    pub pss_anon_bytes: ByteSize,
    /// Part of `pss_bytes`: shared memory and memory files.
    pub pss_shmem_bytes: ByteSize,
    /// Part of `pss_bytes`: the daemon's shares of page-store pages that the daemon maps. It is 0
    /// except in tests, because the daemon fills page stores by `write(2)`.
    pub store_pss_bytes: ByteSize,
    /// Page tables of the daemon and its relays.
    pub page_table_bytes: ByteSize,
    /// Part of `pss_bytes`: the fold engine's tables of page attributes, hints and mappings, as
    /// counted by the engine.
    pub metadata_bytes: ByteSize,
}

impl OwnCost {
    /// Returns the memory that memfold itself takes: PSS without shares of page stores, and page
    /// tables.
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
    /// KSM's control `/sys/kernel/mm/ksm/run`: 1 while ksmd scans.
    pub run: u64,
    /// Number of pages in memory that KSM has merged from several equal pages.
    pub pages_shared: u64,
    /// Number of further mappings of merged pages, which is the number of pages saved.
    pub pages_sharing: u64,
    /// Bytes that KSM saves, less the memory of KSM's metadata (`general_profit`); may be negative.
    /// While KSM is stopped, the figure still includes processes that have ended.
    pub general_profit_bytes: i64,
    /// Number of pages merged in live processes (Linux >= 6.1).
    pub merging_pages: Option<u64>,
    /// Number of zero pages in live processes that KSM (`use_zero_pages`) has mapped to the
    /// kernel's zero page; not part of `merging_pages` (Linux >= 6.6).
    #[serde(default)]
    pub zero_pages: Option<u64>,
    /// CPU time of ksmd since the host's boot, in seconds.
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
    /// Free pages in the CPUs' own lists, which `MemAvailable` leaves out. These pages may add up
    /// to more than 1 GiB.
    pub per_cpu_free_bytes: ByteSize,
    /// Anonymous PSS of all processes except the VMs' QEMUs, the daemon and its relays.
    pub others_anon_bytes: ByteSize,
    /// Part of `others_anon_bytes` that this host lends to other hosts. This memory is locked and
    /// never swapped.
    #[serde(default)]
    pub lent_bytes: ByteSize,
    /// Kernel setting `vm.max_map_count`: the largest number of mappings of a process.
    pub max_map_count: u64,

    /// Accounts of the page stores.
    pub stores: Vec<StoreAccount>,
    /// Memory that all page stores together allocate.
    pub stores_bytes: ByteSize,
    /// Memory of snapshots' RAM images that were assembled in memory (`st_blocks`), also by an
    /// earlier daemon, whether or not a VM has accessed it.
    #[serde(default)]
    pub images_bytes: ByteSize,
    /// Figures of KSM; absent if the kernel has no KSM.
    pub ksm: Option<KsmAccount>,
    /// Memory that the daemon and its relays use.
    pub own: OwnCost,

    /// Sum of the PSS of all QEMU processes.
    pub vms_pss_bytes: ByteSize,
    /// Physical memory that VMs, memfold, page stores and assembled RAM images use together, each
    /// page counted once. The page tables of these processes are included.
    pub physical_bytes: ByteSize,
    /// Part of `physical_bytes` that the kernel cannot drop: all but page cache of ordinary files.
    pub unreclaimable_bytes: ByteSize,

    /// Memory saved by folding: `folded_bytes` of all VMs less `stores_bytes`; negative if page
    /// stores take more than they save.
    pub saved_by_folding_bytes: i64,
    /// Memory saved by clones: pages of snapshot images in VMs' page tables, less the VMs' PSS of
    /// these pages (an image page that several VMs map is in memory once), and less the pages of
    /// `images_bytes` that no VM maps.
    #[serde(default)]
    pub saved_by_clones_bytes: i64,
    /// Memory saved by segments: pages of segments in VMs' page tables, less the VMs' PSS of these
    /// pages.
    #[serde(default)]
    pub saved_by_segments_bytes: i64,
    /// Memory saved by KSM: `general_profit`, but at most the pages that are merged in live
    /// processes.
    pub saved_by_ksm_bytes: i64,
    /// Memory saved by giving guests' pages of zeroes back to the host, as counted by the fold
    /// engine.
    pub saved_by_zero_drop_bytes: ByteSize,
    /// Sum of all savings, less the memory that memfold itself takes (PSS without shares of page
    /// stores, and page tables).
    pub saved_net_bytes: i64,
}

/// The ledger's accounts at one moment, as printed by `memfold report --json` and served by the
/// daemon.
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
    /// Names of the two compared sums, as text.
    pub what: String,
    /// Sum that the ledger computed.
    pub ledger_bytes: ByteSize,
    /// Sum that the kernel reports and the ledger's sum should equal.
    pub kernel_bytes: ByteSize,
    /// Difference of the two sums (ledger's less kernel's), in percent of the kernel's sum.
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
