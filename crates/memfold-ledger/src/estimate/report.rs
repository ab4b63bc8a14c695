//! The result of an estimate of possible savings, as returned by the API and printed by `memfold
//! estimate --json`.

use memfold_units::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::facts::KnownFile;
use super::look::{Looked, Pages};
use super::mechanisms::{self, Mechanism};
use super::pace::Pace;
use super::split::{DomainSplit, FileSplit, Split, VmSplit};
use super::statistics::{Estimate, Sum, whole};
use super::targets::Target;

/// Estimate for one VM: its pages by class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmEstimate {
    /// Name of the VM.
    pub name: String,
    /// Process number of the VM's QEMU.
    pub pid: i32,
    /// Trust domain of the VM; null: the VM shares with no other VM.
    pub domain: Option<String>,
    /// Size of the VM's memory in bytes, whether or not the host holds it in RAM.
    pub memory_bytes: u64,
    /// Bytes of the VM in the host's RAM that the estimate examines. `zero`, `within`, `between`,
    /// `merged`, `volatile` and `rest_bytes` add up to them.
    pub private_bytes: u64,
    /// Bytes of the VM's memory that are pages of files or shared memory; not part of
    /// `private_bytes`.
    pub file_bytes: u64,
    /// Bytes mapped to the kernel's zero page; not part of `private_bytes`.
    pub kernel_zero_bytes: u64,
    /// Bytes of the VM in swap; not part of `private_bytes`.
    pub swapped_bytes: u64,
    /// Bytes of the VM in hugetlbfs; not part of `private_bytes`.
    pub hugetlb_bytes: u64,
    /// Part of `private_bytes` that is offered to KSM (`MADV_MERGEABLE`).
    pub mergeable_bytes: u64,
    /// Pages of the VM that hold only zeroes, and could be given back.
    pub zero: Estimate,
    /// Pages whose content occurs several times in the VM: all copies but the first.
    pub within: Estimate,
    /// Saving by sharing with other VMs of the trust domain: all copies but one could be saved, and
    /// this is the VM's part of them.
    pub between: Estimate,
    /// Pages of the VM that KSM has merged already.
    pub merged: Estimate,
    /// Pages of the VM that changed between the two reads, and are therefore not worth sharing.
    pub volatile: Estimate,
    /// Rest of `private_bytes`: unique contents, and the VM's part of the copies that remain of
    /// shared contents.
    pub rest_bytes: u64,
    /// Part of `private_bytes` that huge pages map.
    pub huge_bytes: u64,
    /// Number of the VM's huge pages that sharing would split.
    pub broken_huge_pages: u64,
    /// Error bar (95 %) of `broken_huge_pages`.
    pub plus_minus_huge_pages: u64,
    /// Bytes of page cache in the guest, according to its agent; null: no agent reports them.
    pub cached_bytes: Option<u64>,
    /// Bytes that disappeared from the host's RAM before the estimate could read them.
    pub gone_bytes: u64,
}

/// Estimated savings by sharing memory within one trust domain, or within one VM that has none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DomainEstimate {
    /// Name of the trust domain; null: the estimate is for one VM without a domain.
    pub domain: Option<String>,
    /// Names of the VMs in the trust domain.
    pub vms: Vec<String>,
    /// Bytes that sharing within the domain could save: the sum of `zero`, `within` and `between`.
    pub saved: Estimate,
    /// Pages of the domain's VMs that hold only zeroes.
    pub zero: Estimate,
    /// Pages whose content occurs several times in one VM of the domain: all copies but the first
    /// in each VM.
    pub within: Estimate,
    /// Contents that several VMs of the domain hold: one page for each of these VMs but one.
    pub between: Estimate,
    /// Part of `within` and `between` that is page cache of files; null: no agent reports files.
    pub of_files: Option<Estimate>,
    /// Pages that KSM would save in memory that is offered to KSM (`MADV_MERGEABLE`).
    pub ksm: Estimate,
}

/// Estimated saving by sharing the cached pages of one file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FileEstimate {
    /// Path of the file in the guests.
    pub path: String,
    /// Trust domain of the VMs that cache the file; null: a VM without a trust domain.
    pub domain: Option<String>,
    /// Bytes of the file that VMs of the domain cache.
    pub cached_bytes: u64,
    /// Part of `cached_bytes` that sharing would save.
    pub saved: Estimate,
}

/// How an estimate read the VMs' memory, and what reading cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct How {
    /// Duration of the estimate, in seconds.
    pub seconds: f64,
    /// CPU time of the estimate, in seconds.
    pub cpu_seconds: f64,
    /// CPU time of the estimate, in percent of one core.
    pub cpu_percent: f64,
    /// CPU time that the estimate was allowed to use, in percent of one core.
    pub cpu_limit_percent: f64,
    /// Bytes of VMs' memory that the first of the two reads covered.
    pub read_bytes: u64,
    /// Percent of the private memory that was read. Below 100, copies in the unread memory were not
    /// found: `within` and `between` are then lower bounds.
    pub read_percent: f64,
    /// Bytes of VMs' memory that were read a second time, to find pages that change.
    pub read_again_bytes: u64,
    /// Size of the sample: one page content in this many was sampled. 1: all contents.
    pub one_in: f64,
}

/// Result of an estimate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EstimateReport {
    /// Estimate for each VM.
    pub vms: Vec<VmEstimate>,
    /// Estimate for each trust domain, and for each VM without one.
    pub domains: Vec<DomainEstimate>,
    /// Saving that is possible in all trust domains together.
    pub saved: Estimate,
    /// Contents that several trust domains hold: one page for each of these domains but one. These
    /// pages must not be shared, and are part of no sum.
    pub across_domains: Estimate,
    /// Number of huge pages of all VMs that sharing would split.
    pub broken_huge_pages: u64,
    /// Error bar (95 %) of `broken_huge_pages`.
    pub plus_minus_huge_pages: u64,
    /// Estimates by file, largest saving first.
    pub files: Vec<FileEstimate>,
    /// Expected result of each mechanism. The savings overlap and cannot be added.
    pub mechanisms: Vec<Mechanism>,
    /// How the memory was read, and what reading cost.
    pub how: How,
    /// Whether a daemon reported the names, trust domains and cached files of VMs.
    pub daemon: bool,
}

const fn bytes(pages: u64) -> u64 {
    pages * PAGE_SIZE
}

fn vm(target: &Target, pages: &Pages, split: &VmSplit) -> VmEstimate {
    let classes = [
        split.zero,
        split.within,
        split.between,
        split.merged,
        split.volatile,
    ];
    let found: f64 = classes.iter().map(Sum::total).sum();
    let looked_at = pages.private - pages.gone;
    let cached = target.runs.as_ref();
    let cached = cached.map(|runs| runs.iter().map(|run| u64::from(run.pages)).sum());
    VmEstimate {
        name: target.name.clone(),
        pid: target.pid,
        domain: target.domain.clone(),
        memory_bytes: bytes(pages.memory),
        private_bytes: bytes(looked_at),
        file_bytes: bytes(pages.file),
        kernel_zero_bytes: bytes(pages.kernel_zero),
        swapped_bytes: bytes(pages.swapped),
        hugetlb_bytes: bytes(pages.hugetlb),
        mergeable_bytes: bytes(pages.mergeable),
        zero: split.zero.bytes(),
        within: split.within.bytes(),
        between: split.between.bytes(),
        merged: split.merged.bytes(),
        volatile: split.volatile.bytes(),
        rest_bytes: bytes(whole(looked_at as f64 - found)),
        huge_bytes: bytes(pages.huge),
        broken_huge_pages: whole(split.broken_huge_pages.total()),
        plus_minus_huge_pages: whole(split.broken_huge_pages.plus_minus()),
        cached_bytes: cached.map(bytes),
        gone_bytes: bytes(pages.gone),
    }
}

fn domain(split: &DomainSplit, looked: &Looked) -> DomainEstimate {
    let vms = || split.vms.iter().map(|&vm| &looked.targets[vm]);
    DomainEstimate {
        domain: split.name.clone(),
        vms: vms().map(|target| target.name.clone()).collect(),
        saved: split.saved.bytes(),
        zero: split.zero.bytes(),
        within: split.within.bytes(),
        between: split.between.bytes(),
        of_files: vms()
            .any(|target| target.runs.is_some())
            .then(|| split.of_files.bytes()),
        ksm: split.ksm.bytes(),
    }
}

/// Makes the report of an estimate from the pages read (`looked`) and their classes (`split`).
#[must_use]
pub fn report(
    looked: &Looked,
    split: &Split,
    files: &[KnownFile],
    pace: &Pace<'_>,
) -> EstimateReport {
    let vms = looked.targets.iter().zip(&looked.vms).zip(&split.vms);
    let vms = vms
        .map(|((target, pages), split)| vm(target, pages, split))
        .collect();
    let saved: Sum = split.domains.iter().map(|domain| domain.saved).sum();
    let broken: Sum = split.vms.iter().map(|vm| vm.broken_huge_pages).sum();
    let of_file = |file: &FileSplit| {
        let known = files.get(file.file as usize)?;
        Some(FileEstimate {
            path: known.path.clone(),
            domain: split.domains[file.domain].name.clone(),
            cached_bytes: bytes(file.cached_pages),
            saved: file.saved.bytes(),
        })
    };
    EstimateReport {
        vms,
        domains: split.domains.iter().map(|d| domain(d, looked)).collect(),
        saved: saved.bytes(),
        across_domains: split.across.bytes(),
        broken_huge_pages: whole(broken.total()),
        plus_minus_huge_pages: whole(broken.plus_minus()),
        files: split.files.iter().filter_map(of_file).collect(),
        mechanisms: mechanisms::all(looked, split, files),
        daemon: false,
        // This comes last, so that the report's own CPU cost is included.
        how: how(looked, pace),
    }
}

fn how(looked: &Looked, pace: &Pace<'_>) -> How {
    let private: u64 = looked.vms.iter().map(|p| p.private - p.gone).sum();
    let read: u64 = looked.vms.iter().map(|pages| pages.read).sum();
    let (seconds, cpu_seconds) = (pace.elapsed().as_secs_f64(), pace.cpu().as_secs_f64());
    let read_percent = if looked.complete {
        100.0
    } else {
        read as f64 * 100.0 / private.max(1) as f64
    };
    How {
        seconds,
        cpu_seconds,
        cpu_percent: cpu_seconds * 100.0 / seconds.max(1e-3),
        cpu_limit_percent: pace.share * 100.0,
        read_bytes: bytes(read),
        read_percent,
        read_again_bytes: bytes(looked.again_pages),
        one_in: looked.sample.weight(),
    }
}
