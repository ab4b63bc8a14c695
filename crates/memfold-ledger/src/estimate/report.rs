//! The report of an estimate, as the API and `--json` show it.

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

/// A VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmEstimate {
    /// Its name.
    pub name: String,
    /// QEMU's process.
    pub pid: i32,
    /// Its trust domain; null: it shares with nobody.
    pub domain: Option<String>,
    /// Its memory, there or not.
    pub memory_bytes: u64,
    /// In memory, of its own, and looked at: the sum of the classes below.
    pub private_bytes: u64,
    /// Of files or shared memory, the kernel's zero page, swapped out, of hugetlbfs: not looked at.
    pub file_bytes: u64,
    /// See above.
    pub kernel_zero_bytes: u64,
    /// See above.
    pub swapped_bytes: u64,
    /// See above.
    pub hugetlb_bytes: u64,
    /// Of the private: KSM may merge it.
    pub mergeable_bytes: u64,
    /// Of zeroes.
    pub zero: Estimate,
    /// Copies within the VM beyond the first.
    pub within: Estimate,
    /// Its part of what VMs of its domain have in common, all but one copy.
    pub between: Estimate,
    /// Merged by KSM already.
    pub merged: Estimate,
    /// Changed between the two looks.
    pub volatile: Estimate,
    /// What stays: contents of its own, and its part of the one copy that stays of the others.
    pub rest_bytes: u64,
    /// Mapped by huge pages.
    pub huge_bytes: u64,
    /// Huge pages that sharing would break.
    pub broken_huge_pages: u64,
    /// The error bar of that.
    pub plus_minus_huge_pages: u64,
    /// Page cache of files, by the agent; null: nobody says so.
    pub cached_bytes: Option<u64>,
    /// Not there any more when it was to be read.
    pub gone_bytes: u64,
}

/// A trust domain, or a VM that has none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DomainEstimate {
    /// Its name; null: a VM without a domain.
    pub domain: Option<String>,
    /// Its VMs.
    pub vms: Vec<String>,
    /// Zero, within and between together.
    pub saved: Estimate,
    /// Pages of zeroes.
    pub zero: Estimate,
    /// Copies within VMs.
    pub within: Estimate,
    /// Copies in other VMs of the domain.
    pub between: Estimate,
    /// Of within and between: page cache of files; null: no agent says what is one.
    pub of_files: Option<Estimate>,
    /// What KSM merges of memory that is offered to it (`MADV_MERGEABLE`).
    pub ksm: Estimate,
}

/// A file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FileEstimate {
    /// Its path in the guests.
    pub path: String,
    /// The trust domain.
    pub domain: Option<String>,
    /// What VMs of the domain cache of it.
    pub cached_bytes: u64,
    /// What sharing would save of that.
    pub saved: Estimate,
}

/// How it was looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct How {
    /// Time that it took.
    pub seconds: f64,
    /// CPU time that it took.
    pub cpu_seconds: f64,
    /// Of one core, while it lasted.
    pub cpu_percent: f64,
    /// What was allowed.
    pub cpu_limit_percent: f64,
    /// Read in the first look.
    pub read_bytes: u64,
    /// Of the private memory, in percent. Below 100, copies in the rest weren't found: what is
    /// between and within is at least this.
    pub read_percent: f64,
    /// Read a second time.
    pub read_again_bytes: u64,
    /// One content in so many was remembered; 1: all.
    pub one_in: f64,
}

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EstimateReport {
    /// By VM.
    pub vms: Vec<VmEstimate>,
    /// By trust domain.
    pub domains: Vec<DomainEstimate>,
    /// What could be saved in all domains together.
    pub saved: Estimate,
    /// Copies in other domains beyond one. Not allowed to be shared, and in none of the sums.
    pub across_domains: Estimate,
    /// Huge pages that it would break.
    pub broken_huge_pages: u64,
    /// The error bar of that.
    pub plus_minus_huge_pages: u64,
    /// By file, most saving first.
    pub files: Vec<FileEstimate>,
    /// What each mechanism would bring. They overlap: no sum.
    pub mechanisms: Vec<Mechanism>,
    /// How it was looked.
    pub how: How,
    /// Whether a daemon said what it knows: names, trust domains, files.
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

/// Puts everything together.
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
    let (mut saved, mut broken) = (Sum::default(), Sum::default());
    for domain in &split.domains {
        saved.join(domain.saved);
    }
    for vm in &split.vms {
        broken.join(vm.broken_huge_pages);
    }
    let of_file = |file: &FileSplit| {
        let known = files.get(file.file as usize)?;
        Some(FileEstimate {
            path: known.path.clone(),
            domain: split.domains[file.domain].name.clone(),
            cached_bytes: bytes(file.cached_pages),
            saved: file.saved.bytes(),
        })
    };
    let mut report = EstimateReport {
        vms,
        domains: split.domains.iter().map(|d| domain(d, looked)).collect(),
        saved: saved.bytes(),
        across_domains: split.across.bytes(),
        broken_huge_pages: whole(broken.total()),
        plus_minus_huge_pages: whole(broken.plus_minus()),
        files: split.files.iter().filter_map(of_file).collect(),
        mechanisms: mechanisms::all(looked, split, files),
        how: How::default(),
        daemon: false,
    };
    // Last, so that its own cost is in it.
    report.how = how(looked, pace);
    report
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
        cpu_limit_percent: pace.share() * 100.0,
        read_bytes: bytes(read),
        read_percent,
        read_again_bytes: bytes(looked.again_pages),
        one_in: looked.sample.weight(),
    }
}
