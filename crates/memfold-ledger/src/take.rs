//! Makes the ledger: reads the kernel's present figures, and builds from them the accounts of VMs,
//! page stores, memfold's own processes and the host.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;

use memfold_ksm as ksm;
use memfold_store::StoreIdentity;
use memfold_sys::pagemap::{Filter, Pagemap, Region};
use memfold_units::{ByteSize, Hva, PageCount};
use memfold_vm::RamLayout;
use rustix::fs::Stat;

use super::account::{
    HostAccount, ImageAccount, KsmAccount, OwnCost, StoreAccount, VmAccount, signed,
};
use super::agree::unmapped_images;
use super::memory::{Kind, Place, Stretch, ram_ranges, sort_pages, stretches};
use super::read::{Proc, ReadError, Smap, Vma, pagemap_of};

/// Number of attempts to read figures that change while they are read.
const ATTEMPTS: usize = 3;

impl StoreAccount {
    /// Makes the account of the page store of trust domain `domain`, whose open file is `file`.
    pub fn of(domain: &str, file: impl AsFd) -> std::io::Result<Self> {
        Ok(Self {
            domain: domain.to_owned(),
            identity: StoreIdentity::of(&file)?,
            allocated_bytes: allocated(&rustix::fs::fstat(&file)?),
        })
    }
}

/// Makes the account of one VM. `pid` is its QEMU process; `stores` and `segments` are the files of
/// all page stores and segments.
///
/// The VM keeps running while its memory is read. Two sums may therefore differ by what the VM
/// changes in the few milliseconds between two reads.
///
/// # Errors
///
/// A [`ReadError`] if the process ended, may not be read (that needs root), or if the kernel has no
/// `PAGEMAP_SCAN` (Linux < 6.7).
pub fn vm(
    pid: i32,
    name: &str,
    domain: Option<&str>,
    layout: &RamLayout,
    stores: &[StoreIdentity],
    segments: &[StoreIdentity],
) -> Result<VmAccount, ReadError> {
    let proc = Proc::default();
    vm_from(&proc, (pid, name, domain), layout, stores, segments)
}

fn vm_from(
    proc: &Proc,
    (pid, name, domain): (i32, &str, Option<&str>),
    layout: &RamLayout,
    stores: &[StoreIdentity],
    segments: &[StoreIdentity],
) -> Result<VmAccount, ReadError> {
    let ram = ram_ranges(layout);
    let pagemap = pagemap_of(pid)?;
    let smaps = proc.smaps(pid)?;
    // Each read of `maps` takes the kernel 0.6 us a mapping (docs/results/scale.md), so the
    // mappings before the scan come from `smaps`.
    let before = smaps.iter().map(|smap| smap.vma.clone()).collect();
    let looked = look(proc, pid, &pagemap, &ram, stores, before)?;
    let places = sort_pages(&looked.stretches, &looked.regions);
    let store_mappings = looked.stretches.iter().filter(|s| s.kind == Kind::Store);
    let rollup = proc.rollup(pid)?.unwrap_or_default();
    let shares = shares(&smaps, &ram, stores, |start, end| {
        // A process that has ended meanwhile has no resident pages. Reading its status below
        // reports the end.
        resident(&pagemap, start, end).unwrap_or(0)
    });
    let bytes = |place: Place| PageCount(places.pages[place as usize]).bytes();
    let folded_resident_bytes = bytes(Place::FoldedResident);
    let file_resident_bytes = bytes(Place::FileResident);
    Ok(VmAccount {
        name: name.to_owned(),
        domain: domain.map(str::to_owned),
        pid,
        ram_bytes: ByteSize(ram.iter().map(|(start, end)| end.0 - start.0).sum()),
        private_bytes: bytes(Place::Private),
        unfolded_bytes: bytes(Place::Unfolded),
        folded_resident_bytes,
        folded_untouched_bytes: bytes(Place::FoldedUntouched),
        file_resident_bytes,
        file_untouched_bytes: bytes(Place::FileUntouched),
        zero_bytes: bytes(Place::Zero),
        swapped_bytes: bytes(Place::Swapped),
        free_bytes: bytes(Place::Free),
        backed_bytes: bytes(Place::Private)
            + bytes(Place::Unfolded)
            + folded_resident_bytes
            + file_resident_bytes,
        folded_bytes: folded_resident_bytes + bytes(Place::FoldedUntouched),
        huge_bytes: PageCount(places.huge).bytes(),
        segment_pss_bytes: of_segments(&smaps, segments, |smap| smap.pss_bytes),
        segment_shmem_bytes: of_segments(&smaps, segments, |smap| {
            let in_memory = is_in_memory(pid, smap).then_some(smap.pss_bytes);
            in_memory.unwrap_or_default()
        }),
        segment_resident_bytes: of_segments(&smaps, segments, |smap| smap.rss_bytes),
        images: images(pid, &smaps),
        page_table_bytes: proc.page_tables(pid)?,
        pss_bytes: rollup.pss_bytes,
        pss_anon_bytes: rollup.pss_anon_bytes,
        pss_shmem_bytes: rollup.pss_shmem_bytes,
        mappings: looked.mappings.len() as u64,
        store_mappings: store_mappings.count() as u64,
        ..shares
    })
}

impl ImageAccount {
    /// Makes the account of a RAM image that was assembled in memory.
    pub fn of(file: impl AsFd) -> std::io::Result<Self> {
        Ok(Self {
            identity: StoreIdentity::of(&file)?,
            allocated_bytes: allocated(&rustix::fs::fstat(&file)?),
        })
    }
}

/// Returns the memory that a memory file allocates (`st_blocks`, in units of 512 bytes, stat(2)).
fn allocated(file: &Stat) -> ByteSize {
    ByteSize(u64::try_from(file.st_blocks).unwrap_or(0) * 512)
}

/// Returns the assembled RAM images that a process maps, each once.
fn images(pid: i32, smaps: &[Smap]) -> Vec<ImageAccount> {
    let mut all: Vec<ImageAccount> = Vec::new();
    for smap in smaps.iter().filter(|smap| smap.is_image) {
        let Some(identity) = smap.vma.file else {
            continue;
        };
        if all.iter().any(|image| image.identity == identity) {
            continue;
        }
        let (start, end) = (smap.vma.start.0, smap.vma.end.0);
        // A process that has ended meanwhile has no mappings.
        let stat = rustix::fs::stat(format!("/proc/{pid}/map_files/{start:x}-{end:x}"));
        all.extend(stat.ok().map(|stat| ImageAccount {
            identity,
            allocated_bytes: allocated(&stat),
        }));
    }
    all
}

/// Sums a figure over the mappings of segments, which are outside RAM.
fn of_segments(
    smaps: &[Smap],
    segments: &[StoreIdentity],
    bytes: impl Fn(&Smap) -> ByteSize,
) -> ByteSize {
    let of_one = |smap: &&Smap| smap.vma.file.is_some_and(|file| segments.contains(&file));
    smaps.iter().filter(of_one).map(bytes).sum()
}

/// Returns whether the mapped file is stored in memory (`TMPFS_MAGIC` in `linux/magic.h`); false
/// for a process that has ended.
fn is_in_memory(pid: i32, smap: &Smap) -> bool {
    let (start, end) = (smap.vma.start.0, smap.vma.end.0);
    rustix::fs::statfs(format!("/proc/{pid}/map_files/{start:x}-{end:x}"))
        .is_ok_and(|place| place.f_type == 0x0102_1994)
}

/// Makes the account of this process (the daemon) and of its relays, which connect VMs to lent RAM.
/// `metadata_bytes` is the size of the fold engine's tables; `relays` are process numbers.
pub fn own(
    metadata_bytes: ByteSize,
    stores: &[StoreIdentity],
    relays: &[i32],
) -> Result<OwnCost, ReadError> {
    let proc = Proc::default();
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    let rollup = proc.rollup(pid)?.unwrap_or_default();
    let mut own = OwnCost {
        pss_bytes: rollup.pss_bytes,
        pss_anon_bytes: rollup.pss_anon_bytes,
        pss_shmem_bytes: rollup.pss_shmem_bytes,
        store_pss_bytes: store_pss(&proc, pid, stores)?,
        page_table_bytes: proc.page_tables(pid)?,
        metadata_bytes,
    };
    for relay in relays {
        // A relay that has ended meanwhile costs nothing.
        if let Ok(Some(rollup)) = proc.rollup(*relay) {
            own.pss_bytes += rollup.pss_bytes;
            own.pss_anon_bytes += rollup.pss_anon_bytes;
            own.pss_shmem_bytes += rollup.pss_shmem_bytes;
            own.page_table_bytes += proc.page_tables(*relay).unwrap_or_default();
        }
    }
    Ok(own)
}

/// Returns a process's shares of page-store pages. The daemon maps no page store, but two ranges
/// for each of its threads, and the kernel needs microseconds for each mapping in `smaps`. So
/// `smaps` is read only if `maps` names a page store.
fn store_pss(proc: &Proc, pid: i32, stores: &[StoreIdentity]) -> Result<ByteSize, ReadError> {
    let is_store = |vma: &Vma| vma.file.is_some_and(|file| stores.contains(&file));
    if !proc.maps(pid)?.iter().any(is_store) {
        return Ok(ByteSize(0));
    }
    Ok(shares(&proc.smaps(pid)?, &[], stores, |_, _| 0).store_pss_bytes)
}

/// The parts of a host's memory, of which the host's account is made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parts<'a> {
    /// Accounts of the VMs.
    pub vms: &'a [VmAccount],
    /// Accounts of the page stores.
    pub stores: &'a [StoreAccount],
    /// RAM images that the daemon has assembled in memory. Those that VMs map may be left out.
    pub images: &'a [ImageAccount],
    /// Memory of the daemon and of its relays.
    pub own: OwnCost,
    /// Process numbers of the relays.
    pub relays: &'a [i32],
    /// Guests' pages of zeroes that were given back and not written since, as counted by the fold
    /// engine.
    pub zero_dropped_bytes: ByteSize,
}

/// Makes the account of the host.
pub fn host(parts: &Parts<'_>) -> Result<HostAccount, ReadError> {
    let proc = Proc::default();
    let mut attempt = 1;
    loop {
        let anon = proc.meminfo()?.get("AnonPages").copied();
        let others_anon_bytes = others(&proc, parts)?;
        let host = host_from(&proc, KsmAccount::read(), others_anon_bytes, parts)?;
        // Processes start and end while their memory is added up. If the sum changed by more than a
        // percent, it is computed again.
        let moved = host.anon_pages_bytes.0.abs_diff(anon.unwrap_or_default().0);
        if attempt == ATTEMPTS || moved <= host.anon_pages_bytes.0 / 100 {
            return Ok(host);
        }
        attempt += 1;
    }
}

fn host_from(
    proc: &Proc,
    ksm: Option<KsmAccount>,
    others_anon_bytes: ByteSize,
    parts: &Parts<'_>,
) -> Result<HostAccount, ReadError> {
    let Parts {
        vms,
        stores,
        own,
        zero_dropped_bytes,
        ..
    } = *parts;
    let info = proc.meminfo()?;
    let field = |key: &str| info.get(key).copied().unwrap_or_default();
    let zones = proc.zones()?;
    // As in the kernel's si_mem_available, caches count only down to the low watermark, and at most
    // half of them is kept.
    let kept = |cache: u64| (cache / 2).min(zones.low_bytes.0);
    let file_cache = field("Active(file)").0 + field("Inactive(file)").0;
    let reserve_bytes =
        ByteSize(zones.total_reserve_bytes.0 + kept(file_cache) + kept(field("KReclaimable").0));

    let stores_bytes: ByteSize = stores.iter().map(|s| s.allocated_bytes).sum();
    let of_vms = vms.iter().flat_map(|vm| &vm.images);
    let images = parts.images.iter().chain(of_vms);
    let images: HashMap<_, _> = images.map(|i| (i.identity, i.allocated_bytes)).collect();
    let images_bytes = images.into_values().sum();
    let unmapped_images = unmapped_images(images_bytes, vms);
    let mut physical = stores_bytes + unmapped_images + own.total_bytes();
    let mut unreclaimable =
        stores_bytes + unmapped_images + own.pss_anon_bytes + own.pss_shmem_bytes
            - own.store_pss_bytes
            + own.page_table_bytes;
    for vm in vms {
        physical += vm.pss_bytes - vm.store_pss_bytes + vm.page_table_bytes;
        unreclaimable +=
            vm.pss_anon_bytes + vm.pss_shmem_bytes - vm.store_pss_bytes + vm.page_table_bytes;
    }

    let folded: ByteSize = vms.iter().map(|v| v.folded_bytes).sum();
    let saved_by_folding_bytes = signed(folded) - signed(stores_bytes);
    let images = |bytes: fn(&VmAccount) -> ByteSize| signed(vms.iter().map(bytes).sum());
    let saved_by_clones_bytes = images(|vm| vm.file_resident_bytes)
        - images(|vm| vm.file_pss_bytes)
        - signed(unmapped_images);
    let saved_by_segments_bytes =
        images(|vm| vm.segment_resident_bytes) - images(|vm| vm.segment_pss_bytes);
    let saved_by_ksm_bytes = ksm.map_or(0, |k| k.saved_bytes());
    Ok(HostAccount {
        mem_total_bytes: field("MemTotal"),
        mem_available_bytes: field("MemAvailable"),
        anon_pages_bytes: field("AnonPages"),
        shmem_bytes: field("Shmem"),
        kernel_bytes: [
            "SUnreclaim",
            "KernelStack",
            "PageTables",
            "SecPageTables",
            "Percpu",
        ]
        .into_iter()
        .map(field)
        .sum(),
        reserve_bytes,
        per_cpu_free_bytes: zones.per_cpu_free_bytes,
        others_anon_bytes,
        lent_bytes: ByteSize(0),
        max_map_count: proc.max_map_count()?,
        stores: stores.to_vec(),
        stores_bytes,
        images_bytes,
        ksm,
        own,
        vms_pss_bytes: vms.iter().map(|v| v.pss_bytes).sum(),
        physical_bytes: physical,
        unreclaimable_bytes: unreclaimable,
        saved_by_folding_bytes,
        saved_by_clones_bytes,
        saved_by_segments_bytes,
        saved_by_ksm_bytes,
        saved_by_zero_drop_bytes: zero_dropped_bytes,
        saved_net_bytes: saved_by_folding_bytes
            + saved_by_clones_bytes
            + saved_by_segments_bytes
            + saved_by_ksm_bytes
            + signed(zero_dropped_bytes)
            - signed(own.total_bytes()),
    })
}

impl KsmAccount {
    /// Reads KSM's present figures from `/sys/kernel/mm/ksm` and `/proc`; `None` on a kernel
    /// without KSM.
    #[must_use]
    pub fn read() -> Option<Self> {
        let controls = ksm::Controls::default();
        let status = ksm::Status::read(&controls).ok()?;
        let run = controls.settings().ok()?.run?;
        let cpu = ksm::Ksmd::find().and_then(|d| d.cpu_time().ok());
        Some(Self {
            run,
            pages_shared: status.pages_shared?,
            pages_sharing: status.pages_sharing?,
            general_profit_bytes: status.general_profit.unwrap_or(0),
            merging_pages: ksm::merging_pages(std::path::Path::new("/proc")),
            zero_pages: status.ksm_zero_pages,
            ksmd_cpu_s: cpu.map_or(0.0, |t| t.as_millis() as f64 / 1e3),
        })
    }

    /// Returns the bytes that KSM saves: `general_profit_bytes`, but at most the bytes that are
    /// merged in live processes.
    #[must_use]
    pub fn saved_bytes(&self) -> i64 {
        let most = self
            .merging_pages
            .map(|pages| PageCount(pages + self.zero_pages.unwrap_or(0)).bytes())
            .map_or(i64::MAX, signed);
        self.general_profit_bytes.min(most)
    }
}

/// Mappings and page map of a QEMU process at one moment.
pub(super) struct Looked {
    /// Mappings of guest RAM, in address order.
    pub stretches: Vec<Stretch>,
    /// Pages of guest RAM that are present or swapped.
    pub regions: Vec<Region>,
    /// All mappings of the QEMU process, guest RAM included.
    pub mappings: Vec<Vma>,
}

/// Reads the page map of the ranges `ram`, and mappings. Repeats this if the mappings changed
/// meanwhile. `before`: the mappings that the caller has just read.
pub(super) fn look(
    proc: &Proc,
    pid: i32,
    pagemap: &Pagemap,
    ram: &[(Hva, Hva)],
    stores: &[StoreIdentity],
    mut before: Vec<Vma>,
) -> Result<Looked, ReadError> {
    let failed = |source| ReadError::Pagemap { pid, source };
    let mut attempt = 1;
    loop {
        let mut all = Vec::new();
        let mut regions = Vec::new();
        for (start, end) in ram {
            all.extend(stretches(&before, *start, *end, stores));
            regions.extend(pagemap.scan(*start, *end, Filter::THERE).map_err(failed)?);
        }
        let after = proc.maps(pid)?;
        if attempt == ATTEMPTS || same_in(ram, &before, &after) {
            return Ok(Looked {
                stretches: all,
                regions,
                mappings: before,
            });
        }
        before = after;
        attempt += 1;
    }
}

/// Returns the number of pages of `[start, end)` in memory, counted like `Rss`: without the zero
/// page.
fn resident(pagemap: &Pagemap, start: Hva, end: Hva) -> std::io::Result<u64> {
    let regions = pagemap.scan(start, end, Filter::RESIDENT)?;
    Ok(regions.iter().map(Region::pages).sum())
}

/// Returns whether guest RAM is mapped to the same files in both lists of mappings.
fn same_in(ram: &[(Hva, Hva)], before: &[Vma], after: &[Vma]) -> bool {
    fn files<'a>(ram: &'a [(Hva, Hva)], vmas: &'a [Vma]) -> impl Iterator<Item = &'a Vma> {
        vmas.iter()
            .filter(|v| v.file.is_some() && ram.iter().any(|(s, e)| v.start < *e && *s < v.end))
    }
    files(ram, before).eq(files(ram, after))
}

/// Splits the PSS of a process into guest RAM and the rest. Returns an account of only these
/// figures.
///
/// `resident` returns the number of pages in memory in a range. It is called for mappings of which
/// only a part is guest RAM.
fn shares(
    smaps: &[Smap],
    ram: &[(Hva, Hva)],
    stores: &[StoreIdentity],
    resident: impl Fn(Hva, Hva) -> u64,
) -> VmAccount {
    let mut sum = VmAccount::default();
    for smap in smaps {
        let vma = &smap.vma;
        let of_file = smap.pss_bytes - smap.anonymous_bytes;
        let is_store = vma.file.is_some_and(|f| stores.contains(&f));
        if is_store {
            sum.store_pss_bytes += of_file;
        }
        let parts: Vec<(Hva, Hva)> = ram
            .iter()
            .map(|(start, end)| (vma.start.max(*start), vma.end.min(*end)))
            .filter(|(start, end)| start < end)
            .collect();
        let (inside, whole) = match parts[..] {
            [] => (0, 1),
            [(start, end)] if (start, end) == (vma.start, vma.end) => (1, 1),
            // Only a part of this mapping is guest RAM: the kernel merged anonymous memory with its
            // neighbour. This is rare, because QEMU aligns each block's start and adds a guard page
            // behind it. The PSS is divided by the resident pages.
            _ => {
                let inside = parts.iter().map(|part| resident(part.0, part.1)).sum();
                (inside, resident(vma.start, vma.end).max(inside).max(1))
            }
        };
        let part = |bytes: ByteSize| {
            let share = u128::from(bytes.0) * u128::from(inside) / u128::from(whole);
            ByteSize(u64::try_from(share).unwrap_or(bytes.0))
        };
        let pss_inside = part(smap.pss_bytes);
        sum.ram_rss_bytes += part(smap.rss_bytes);
        sum.ram_pss_bytes += pss_inside;
        if vma.file.is_some() && !is_store {
            sum.file_pss_bytes += part(of_file);
        }
        if smap.is_image {
            sum.image_shmem_bytes += part(of_file);
        }
        if let Some(ksm) = smap.ksm_bytes {
            *sum.ksm_merged_bytes.get_or_insert_default() += part(ksm);
        }
        let outside = smap.pss_bytes - pss_inside;
        sum.qemu_pss_bytes += outside;
        // QEMU's translation buffer is its only writable and executable mapping.
        if vma.file.is_none() && vma.write && vma.execute {
            sum.tcg_pss_bytes += outside;
        }
    }
    sum
}

/// Returns the anonymous PSS of all other processes. Kernel threads, and processes that end
/// meanwhile, are left out. For a process with more rights than this one, which hides its shares
/// (ptrace(2), access mode checks), `RssAnon` is used.
fn others(proc: &Proc, parts: &Parts<'_>) -> Result<ByteSize, ReadError> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let vms = parts.vms.iter().map(|vm| vm.pid);
    let counted = vms.chain(parts.relays.iter().copied()).chain([own]);
    let counted: HashSet<i32> = counted.collect();
    Ok(proc
        .pids()?
        .into_iter()
        .filter(|pid| !counted.contains(pid))
        .filter_map(|pid| match proc.rollup(pid) {
            Ok(rollup) => Some(rollup?.pss_anon_bytes),
            Err(_) => proc.rss_anon(pid).ok(),
        })
        .sum())
}

#[cfg(test)]
#[path = "take_tests.rs"]
mod tests;
