//! The data model of the ledger: VMs, page stores, and the host. All amounts are bytes at the
//! moment of reading. JSON keys name the unit.

use memfold_store::StoreIdentity;
use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

use super::debt::DebtReport;
use super::disagreement::Disagreement;

/// One page store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreAccount {
    /// Its trust domain.
    pub domain: String,
    /// Its file.
    pub identity: StoreIdentity,
    /// Memory that the file holds (`st_blocks`), mapped by somebody or not.
    pub allocated_bytes: ByteSize,
}

/// One VM: its guest RAM, each page in exactly one place, and the QEMU process around it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmAccount {
    /// The VM's name.
    pub name: String,
    /// Its trust domain; without one it shares with nobody.
    pub domain: Option<String>,
    /// Its QEMU process.
    pub pid: i32,

    /// Guest RAM as QEMU made it. The sum of the parts below: private, unfolded, folded (two), file
    /// (two), zero, swapped, free.
    pub ram_bytes: ByteSize,
    /// Anonymous memory present outside page-store mappings.
    pub private_bytes: ByteSize,
    /// Private copies inside page-store mappings: folded once, written since.
    pub unfolded_bytes: ByteSize,
    /// Mapped to a page store, not copied, and in this process's page tables.
    pub folded_resident_bytes: ByteSize,
    /// Mapped to a page store and not touched since.
    pub folded_untouched_bytes: ByteSize,
    /// Present pages of other files: a template's image, or a shared RAM backend.
    pub file_resident_bytes: ByteSize,
    /// Mapped to other files and not touched.
    pub file_untouched_bytes: ByteSize,
    /// Backed by the shared zero page: costs nothing.
    pub zero_bytes: ByteSize,
    /// Swapped out.
    pub swapped_bytes: ByteSize,
    /// Not backed by anything: never used, or given back.
    pub free_bytes: ByteSize,

    /// In memory: private + unfolded + folded resident + file resident.
    pub backed_bytes: ByteSize,
    /// Folded: resident + untouched.
    pub folded_bytes: ByteSize,
    /// Of the backed pages, those that ksmd merged (smaps `KSM`, Linux >= 6.6).
    pub ksm_merged_bytes: Option<ByteSize>,
    /// Of the backed pages, those mapped by huge pages.
    pub huge_bytes: ByteSize,
    /// Guest RAM resident, by smaps: the kernel's second opinion on `backed_bytes`.
    pub ram_rss_bytes: ByteSize,
    /// Guest RAM's proportional set size.
    pub ram_pss_bytes: ByteSize,

    /// PSS of the process outside guest RAM.
    pub qemu_pss_bytes: ByteSize,
    /// Of `qemu_pss_bytes`, TCG's buffer of translated code (writable and executable anonymous
    /// memory); zero under KVM.
    pub tcg_pss_bytes: ByteSize,
    /// Of `qemu_pss_bytes`, its shares of segments' pages.
    #[serde(default)]
    pub segment_pss_bytes: ByteSize,
    /// Of `segment_pss_bytes`, of images that are held in memory (tmpfs): part of
    /// `pss_shmem_bytes`, too.
    #[serde(default)]
    pub segment_shmem_bytes: ByteSize,
    /// Pages of segments in this process's page tables.
    #[serde(default)]
    pub segment_resident_bytes: ByteSize,
    /// Page tables of the process (`VmPTE`); no part of any PSS.
    pub page_table_bytes: ByteSize,

    /// PSS of the whole process (`smaps_rollup`).
    pub pss_bytes: ByteSize,
    /// Of it, anonymous memory.
    pub pss_anon_bytes: ByteSize,
    /// Of it, memory files, page stores among them.
    pub pss_shmem_bytes: ByteSize,
    /// Of the process's PSS, its shares of page-store pages. Never too large; too small by at most
    /// what KSM merged inside page-store mappings.
    pub store_pss_bytes: ByteSize,
    /// Of `ram_pss_bytes`, its shares of other files' pages: those of the image that it runs from.
    #[serde(default)]
    pub file_pss_bytes: ByteSize,

    /// Mappings of the process; the kernel refuses more than `vm.max_map_count`.
    pub mappings: u64,
    /// Of them, page-store mappings in guest RAM.
    pub store_mappings: u64,
}

impl VmAccount {
    /// What the VM's QEMU costs beside guest RAM and segments: PSS of the rest of the process, and
    /// its page tables.
    #[must_use]
    pub fn overhead_bytes(&self) -> ByteSize {
        self.qemu_pss_bytes - self.segment_pss_bytes + self.page_table_bytes
    }

    /// The sum of all places that a guest page can be in; equals `ram_bytes`.
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

/// What memfold itself costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnCost {
    /// PSS of memfold's process.
    pub pss_bytes: ByteSize,
    /// Of it, anonymous memory.
    pub pss_anon_bytes: ByteSize,
    /// Of it, memory files.
    pub pss_shmem_bytes: ByteSize,
    /// Of it, shares of page-store pages that the daemon itself maps. It fills stores by
    /// `write(2)`, so 0 but in tests.
    pub store_pss_bytes: ByteSize,
    /// Page tables of the process.
    pub page_table_bytes: ByteSize,
    /// Of it, tables about pages (attributes, hints, maps), as the engine counts them.
    pub metadata_bytes: ByteSize,
}

/// The kernel's own merging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KsmAccount {
    /// 1 while ksmd runs.
    pub run: u64,
    /// Pages that merged pages were replaced by.
    pub pages_shared: u64,
    /// Mappings that would each have a page of their own: the pages saved.
    pub pages_sharing: u64,
    /// What KSM saved less its metadata (`general_profit`); may be negative. While KSM is stopped,
    /// ended processes stay in it.
    pub general_profit_bytes: i64,
    /// Pages merged in live processes (Linux >= 6.1).
    pub merging_pages: Option<u64>,
    /// Pages of zeroes that `use_zero_pages` has mapped to the kernel's zero page, in live
    /// processes; not in `merging_pages` (Linux >= 6.6).
    #[serde(default)]
    pub zero_pages: Option<u64>,
    /// CPU time of ksmd since boot, seconds.
    pub ksmd_cpu_s: f64,
}

/// The host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostAccount {
    /// `MemTotal`.
    pub mem_total_bytes: ByteSize,
    /// `MemAvailable`.
    pub mem_available_bytes: ByteSize,
    /// `AnonPages`.
    pub anon_pages_bytes: ByteSize,
    /// `Shmem`.
    pub shmem_bytes: ByteSize,
    /// The kernel's own: `SUnreclaim`, `KernelStack`, `PageTables`, `SecPageTables`, `Percpu`.
    pub kernel_bytes: ByteSize,
    /// What `MemAvailable` keeps back: zone reserves, and the part of caches below the low
    /// watermark.
    pub reserve_bytes: ByteSize,
    /// Free pages in the CPUs' own lists, which `MemAvailable` leaves out; may exceed 1 GiB.
    pub per_cpu_free_bytes: ByteSize,
    /// Anonymous PSS of all processes that are neither a VM nor memfold.
    pub others_anon_bytes: ByteSize,
    /// Of these, what this host lends to others: locked, and never swapped.
    #[serde(default)]
    pub lent_bytes: ByteSize,
    /// `vm.max_map_count`.
    pub max_map_count: u64,

    /// The page stores.
    pub stores: Vec<StoreAccount>,
    /// What they allocate together.
    pub stores_bytes: ByteSize,
    /// Memory of snapshots' images that are laid out for the VMs that run from them, whoever has
    /// touched it (`st_blocks`).
    #[serde(default)]
    pub images_bytes: ByteSize,
    /// KSM, where the kernel has it.
    pub ksm: Option<KsmAccount>,
    /// memfold.
    pub own: OwnCost,

    /// Sum of the PSS of all QEMU processes.
    pub vms_pss_bytes: ByteSize,
    /// Sum over VMs, memfold and page stores, each physical page once; page tables of these
    /// processes included.
    pub physical_bytes: ByteSize,
    /// Of `physical_bytes`, what the kernel can't drop: all but page cache of ordinary files.
    pub unreclaimable_bytes: ByteSize,

    /// Pages of VMs mapped to a store and not copied, less the store's pages.
    pub saved_by_folding_bytes: i64,
    /// Pages of snapshots' images that VMs have in their page tables, less their shares of them:
    /// what VMs that run from one image have in common is in memory once.
    #[serde(default)]
    pub saved_by_clones_bytes: i64,
    /// Pages of segments that VMs have in their page tables, less their shares of them.
    #[serde(default)]
    pub saved_by_segments_bytes: i64,
    /// KSM's `general_profit`, but never more than the pages merged in live processes.
    pub saved_by_ksm_bytes: i64,
    /// Zero pages given back, as the engine counts them.
    pub saved_by_zero_drop_bytes: ByteSize,
    /// All four less memfold's own PSS (without its shares of the store) and page tables.
    pub saved_net_bytes: i64,
}

/// The ledger of one moment: what `memfold report --json` prints and the daemon serves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// When it was taken, seconds since 1970.
    pub taken_unix_s: f64,
    /// The host.
    pub host: HostAccount,
    /// The VMs.
    pub vms: Vec<VmAccount>,
    /// What guests could call in by writing; where no daemon has taken the report: nothing is known
    /// of it.
    #[serde(default)]
    pub debt: Option<DebtReport>,
    /// Sums that don't agree within 2 %; empty is right.
    #[serde(default)]
    pub disagreements: Vec<Disagreement>,
}
