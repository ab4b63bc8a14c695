//! Why a VM's memory merges, or doesn't: every cause with the pages that it concerns.
//!
//! The pages of the guest's mappings are in one place each: of a kind that KSM leaves alone, not advised, not in memory, merged,
//! not looked at twice yet, or looked at without a like. Causes of the whole host (KSM stands still) concern what isn't merged.
//! [`weigh`] only computes; [`super::facts`] reads.

use memfold_units::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::controls::Settings;
use super::explain_words::{fix, words};
use super::processes::Process;
use super::ranges::Mapping;
use super::status::Status;

/// A reason why memory isn't merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The kernel has no KSM.
    NoKsm,
    /// `run` is 0: ksmd stands still.
    Stopped,
    /// `run` is 2: everything was unmerged.
    Unmerged,
    /// memfold steers KSM and has it stand still for now.
    Held,
    /// KSM runs for another trust domain.
    AnotherDomain,
    /// The VM has no trust domain: it shares with nobody.
    NoDomain,
    /// QEMU was told not to offer its memory (`mem-merge=off`).
    MergeOff,
    /// QEMU offered it, and the kernel refused: a seccomp filter is on the process that isn't QEMU's own.
    Refused,
    /// The memory is not advised mergeable, for another reason.
    NotAdvised,
    /// Shared memory.
    Shared,
    /// Pages of hugetlbfs.
    Hugetlb,
    /// A shared view of a file: persistent memory, a DAX segment.
    Pmem,
    /// Folded: it lies in memfold's page store.
    Folded,
    /// A private view of another file: the image of a snapshot, a memory backend on a file.
    FileView,
    /// Not in memory: never used, or given back.
    NotPresent,
    /// Swapped out.
    Swapped,
    /// ksmd has not passed twice yet.
    TooYoung,
    /// ksmd has not looked at it yet, though it has passed: new since.
    NotVisited,
    /// Its content was nowhere else.
    Unique,
    /// It changes too fast.
    Volatile,
    /// It lies in transparent huge pages.
    HugePages,
    /// More mappings than `max_page_sharing` have this content.
    MaxPageSharing,
    /// Pages of zeroes are merged as any others (`use_zero_pages` is 0).
    UseZeroPages,
    /// Pages of different NUMA nodes don't merge (`merge_across_nodes` is 0).
    AcrossNodes,
    /// `smart_scan` leaves pages out for a while.
    SmartScan,
}

impl Cause {
    /// Whether these pages don't merge at all until somebody changes something.
    #[must_use]
    pub const fn blocks(self) -> bool {
        matches!(
            self,
            Self::NoKsm
                | Self::Stopped
                | Self::Unmerged
                | Self::Held
                | Self::AnotherDomain
                | Self::NoDomain
                | Self::MergeOff
                | Self::Refused
                | Self::NotAdvised
                | Self::Shared
                | Self::Hugetlb
                | Self::Pmem
        )
    }
}

/// A cause in a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// Which.
    pub cause: Cause,
    /// Whether these pages don't merge at all until somebody changes something.
    pub blocks: bool,
    /// Pages that it concerns.
    pub pages: u64,
    /// The same in bytes.
    pub bytes: u64,
    /// What is the case.
    pub words: String,
    /// What would change it.
    pub fix: String,
}

/// Why a VM's memory merges, or doesn't.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// The VM.
    pub vm: String,
    /// QEMU's process.
    pub pid: i32,
    /// Its trust domain.
    pub domain: Option<String>,
    /// Its guest memory: mappings of RAM, and other large ones that the guest sees.
    pub guest_bytes: u64,
    /// Of it, advised mergeable.
    pub mergeable_bytes: u64,
    /// Of the mergeable, in memory.
    pub present_bytes: u64,
    /// Of that, merged (mapped to a page that others map too); pages of zeroes on the kernel's zero page included.
    pub merged_bytes: u64,
    /// What merging saves in this process less its metadata (`ksm_process_profit`).
    pub profit_bytes: Option<i64>,
    /// ksmd's metadata about this process.
    pub rmap_overhead_bytes: Option<u64>,
    /// Time since QEMU's start, seconds.
    pub age_s: f64,
    /// A full scan of the host's mergeable memory at the present `pages_to_scan` and `sleep_millisecs`, seconds.
    pub pass_s: Option<f64>,
    /// Until the first pages merge, at most, if some are equal to others; null: some are merged, or nothing can merge.
    pub first_merge_s: Option<f64>,
    /// All of it in one line.
    pub verdict: String,
    /// Why, those that block first, by the pages that they concern.
    pub causes: Vec<Finding>,
}

/// The host's side.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostSide {
    /// Its controls.
    pub settings: Settings,
    /// Its counters.
    pub status: Status,
    /// CPU seconds of ksmd since boot.
    pub ksmd_cpu_s: Option<f64>,
    /// Anonymous pages in memory of all processes with mergeable memory.
    pub mergeable_pages: u64,
    /// NUMA nodes.
    pub nodes: u64,
}

/// What a daemon that steers KSM knows of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steered {
    /// For which trust domain.
    pub domain: String,
    /// Why KSM stands still for now.
    pub held: Option<String>,
    /// Full scans since it began.
    pub scans: u64,
}

/// All that explains a VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// The VM's name.
    pub vm: String,
    /// Its trust domain.
    pub domain: Option<String>,
    /// Whether a daemon knows the VM: then it has its trust domain, or none.
    pub known: bool,
    /// Its process.
    pub process: Process,
    /// Its guest memory.
    pub mappings: Vec<Mapping>,
    /// QEMU was told not to offer its memory.
    pub merge_off: bool,
    /// A seccomp filter is on the process that isn't QEMU's own (`-sandbox`), which lets `madvise` pass.
    pub filtered: bool,
    /// Pages of zeroes in its mergeable memory, by a sample; `None`: unknown.
    pub zero_pages: Option<u64>,
    /// Seconds since its start.
    pub age_s: f64,
    /// `None`: the kernel has no KSM.
    pub host: Option<HostSide>,
    /// `None`: no daemon steers KSM, or none was asked.
    pub steered: Option<Steered>,
}

/// The pages of a VM by what becomes of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    guest: u64,
    mergeable: u64,
    present: u64,
    merged: u64,
    swapped: u64,
    huge: u64,
    shared: u64,
    hugetlb: u64,
    pmem: u64,
    folded: u64,
    file: u64,
    unadvised: u64,
}

impl Places {
    fn of(facts: &Facts) -> Self {
        let mut sum = Self::default();
        let mut told = false;
        for mapping in &facts.mappings {
            let pages = mapping.pages();
            sum.guest += pages;
            if mapping.has("ht") {
                sum.hugetlb += pages;
            } else if mapping.has("sh") || mapping.permissions.ends_with('s') {
                // Memory files are shared memory; other files are meant to be there after the VM.
                let memory = ["/memfd:", "/dev/shm/", "/dev/zero"];
                if memory.iter().any(|root| mapping.path.starts_with(root)) {
                    sum.shared += pages;
                } else {
                    sum.pmem += pages;
                }
            } else if mapping.path.contains("memfold:") {
                sum.folded += pages;
            } else if !mapping.path.is_empty() && !mapping.is_mergeable() {
                sum.file += pages;
            } else if mapping.is_mergeable() {
                sum.mergeable += pages;
                sum.present += mapping.anonymous_pages;
                sum.swapped += mapping.swapped_pages;
                sum.huge += mapping.huge_pages;
                sum.merged += mapping.merged_pages.unwrap_or(0);
                told |= mapping.merged_pages.is_some();
            } else {
                sum.unadvised += pages;
            }
        }
        if !told {
            sum.merged = facts.process.status.ksm_merging_pages.unwrap_or(0);
        }
        sum.merged = sum.merged.min(sum.present);
        sum
    }

    /// In memory and not merged.
    const fn unmerged(&self) -> u64 {
        self.present - self.merged
    }
}

/// What passes mean for a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Passes {
    /// Seconds.
    pub pass_s: Option<f64>,
    /// Share of its mergeable pages that ksmd has looked at.
    pub visited: f64,
    /// Two passes have not been complete since it was there.
    pub young: bool,
}

impl Passes {
    fn of(facts: &Facts, places: &Places) -> Self {
        let Some(host) = &facts.host else {
            return Self::default();
        };
        let pass_s = pass_s(host);
        let items = facts.process.status.ksm_rmap_items;
        let present = places.present.max(1) as f64;
        let visited = items.map_or(1.0, |items| (items as f64 / present).min(1.0));
        let twice = |pass: f64| facts.age_s < 2.0 * pass;
        let scans = facts.steered.as_ref().map(|s| s.scans);
        let scans = scans.or(host.status.full_scans);
        let young =
            visited < 0.9 || pass_s.is_some_and(twice) || scans.is_some_and(|scans| scans < 2);
        Self {
            pass_s,
            visited,
            young: young && places.unmerged() > 0,
        }
    }

    /// Two passes, less what of the first is done.
    fn first_merge_s(&self) -> Option<f64> {
        Some((2.0 - self.visited) * self.pass_s?)
    }
}

/// The first guess of ksmd's CPU seconds per scanned page, where nothing was scanned yet.
const COST_S: f64 = 3e-6;

/// A full scan at the present settings, seconds. `None`: ksmd is told to scan nothing.
#[must_use]
pub fn pass_s(host: &HostSide) -> Option<f64> {
    let batch = host.settings.pages_to_scan.filter(|&pages| pages > 0)? as f64;
    let sleep_s = host.settings.sleep_millisecs? as f64 / 1e3;
    let cost_s = match (host.ksmd_cpu_s, host.status.pages_scanned) {
        (Some(cpu), Some(scanned)) if scanned >= 1000 => cpu / scanned as f64,
        _ => COST_S,
    };
    let batches = (host.mergeable_pages as f64 / batch).ceil();
    Some(batches * sleep_s + host.mergeable_pages as f64 * cost_s)
}

/// Finds the causes and what each concerns.
#[must_use]
pub fn weigh(facts: &Facts) -> Explanation {
    let places = Places::of(facts);
    let passes = Passes::of(facts, &places);
    let mut found = Vec::new();
    of_host(facts, &places, &mut found);
    of_kind(facts, &places, &mut found);
    of_content(facts, &places, &passes, &mut found);
    found.sort_by_key(|(cause, pages)| (!cause.blocks(), std::cmp::Reverse(*pages), *cause));
    let causes: Vec<Finding> = found
        .into_iter()
        .map(|(cause, pages)| Finding {
            cause,
            blocks: cause.blocks(),
            pages,
            bytes: pages * PAGE_SIZE,
            words: words(cause, facts, &passes),
            fix: fix(cause, facts),
        })
        .collect();
    let zero = facts.process.status.ksm_zero_pages.unwrap_or(0);
    let status = &facts.process.status;
    let saved = (status.ksm_merging_pages.unwrap_or(0) + zero) * PAGE_SIZE;
    let merged = places.merged + zero;
    let run = facts.host.as_ref().and_then(|host| host.settings.run);
    let waits = run == Some(1) && merged == 0 && passes.young;
    let first_merge_s = waits.then(|| passes.first_merge_s()).flatten();
    Explanation {
        vm: facts.vm.clone(),
        pid: facts.process.pid,
        domain: facts.domain.clone(),
        guest_bytes: places.guest * PAGE_SIZE,
        mergeable_bytes: places.mergeable * PAGE_SIZE,
        present_bytes: places.present * PAGE_SIZE,
        merged_bytes: merged * PAGE_SIZE,
        profit_bytes: status.ksm_process_profit,
        // The kernel's own formula, turned round: profit = saved - metadata.
        rmap_overhead_bytes: status
            .ksm_process_profit
            .map(|profit| saved.saturating_add_signed(profit.saturating_neg())),
        age_s: facts.age_s,
        pass_s: passes.pass_s,
        first_merge_s,
        verdict: verdict(&places, merged, &causes),
        causes,
    }
}

fn verdict(places: &Places, merged: u64, causes: &[Finding]) -> String {
    let size = |pages: u64| memfold_units::PageCount(pages).bytes();
    // What is shared already, or not there, keeps nobody from merging.
    let rests = |finding: &&Finding| {
        !matches!(
            finding.cause,
            Cause::Folded
                | Cause::FileView
                | Cause::NotPresent
                | Cause::HugePages
                | Cause::UseZeroPages
        )
    };
    let first = causes.iter().find(rests).map(|finding| &finding.words);
    let begins = match merged {
        0 => "nothing is merged".to_owned(),
        merged => format!(
            "{} of {} of mergeable memory are merged",
            size(merged),
            size(places.present.max(merged))
        ),
    };
    match first {
        Some(first) => format!("{begins}; first of all: {first}"),
        None => begins,
    }
}

type Found = Vec<(Cause, u64)>;

fn of_host(facts: &Facts, places: &Places, found: &mut Found) {
    let Some(host) = &facts.host else {
        found.push((Cause::NoKsm, places.guest));
        return;
    };
    let held = facts.steered.as_ref().is_some_and(|s| s.held.is_some());
    match host.settings.run {
        _ if held => found.push((Cause::Held, places.unmerged())),
        Some(1) => {}
        Some(2) => found.push((Cause::Unmerged, places.unmerged())),
        _ => found.push((Cause::Stopped, places.unmerged())),
    }
    if host.settings.merge_across_nodes == Some(0) && host.nodes > 1 {
        found.push((Cause::AcrossNodes, places.unmerged()));
    }
    // Of how many of this VM's pages, the kernel doesn't say.
    if places.mergeable > 0 && host.status.stable_node_chains.is_some_and(|n| n > 0) {
        found.push((Cause::MaxPageSharing, 0));
    }
    let zeroes = facts.zero_pages.filter(|&pages| pages > 0);
    if let (Some(pages), Some(0)) = (zeroes, host.settings.use_zero_pages) {
        found.push((Cause::UseZeroPages, pages));
    }
}

fn of_kind(facts: &Facts, places: &Places, found: &mut Found) {
    let unadvised = if places.unadvised == 0 {
        None
    } else if facts.merge_off && facts.known && facts.domain.is_none() {
        Some(Cause::NoDomain)
    } else if facts.merge_off
        && facts.known
        && facts
            .steered
            .as_ref()
            .is_some_and(|s| facts.domain.as_ref() != Some(&s.domain))
    {
        Some(Cause::AnotherDomain)
    } else if facts.merge_off {
        Some(Cause::MergeOff)
    } else if facts.filtered {
        Some(Cause::Refused)
    } else {
        Some(Cause::NotAdvised)
    };
    let kinds = [
        (unadvised, places.unadvised),
        (Some(Cause::Shared), places.shared),
        (Some(Cause::Hugetlb), places.hugetlb),
        (Some(Cause::Pmem), places.pmem),
        (Some(Cause::Folded), places.folded),
        (Some(Cause::FileView), places.file),
        (Some(Cause::Swapped), places.swapped),
        (
            Some(Cause::NotPresent),
            places
                .mergeable
                .saturating_sub(places.present + places.swapped),
        ),
        (Some(Cause::HugePages), places.huge),
    ];
    found.extend(kinds.into_iter().filter_map(|(cause, pages)| {
        let cause = cause?;
        (pages > 0).then_some((cause, pages))
    }));
}

fn of_content(facts: &Facts, places: &Places, passes: &Passes, found: &mut Found) {
    let Some(host) = &facts.host else { return };
    if host.settings.run != Some(1) || places.unmerged() == 0 {
        return;
    }
    if passes.young {
        found.push((Cause::TooYoung, places.unmerged()));
        return;
    }
    let status = &facts.process.status;
    let visited = match status.ksm_rmap_items {
        Some(items) => items.saturating_sub(facts.process.merged_pages()),
        None => places.unmerged(),
    }
    .min(places.unmerged());
    // The kernel counts these two for the whole host alone: their ratio there is taken for this VM's.
    let (unshared, volatile) = (
        host.status.pages_unshared.unwrap_or(0),
        host.status.pages_volatile.unwrap_or(0),
    );
    let volatile = match unshared + volatile {
        0 => 0,
        both => (u128::from(visited) * u128::from(volatile) / u128::from(both))
            .try_into()
            .unwrap_or(0),
    };
    let skipped = host.status.pages_skipped.is_some_and(|n| n > 0);
    for (cause, pages) in [
        (Cause::NotVisited, places.unmerged() - visited),
        (Cause::Unique, visited - volatile),
        (Cause::Volatile, volatile),
    ] {
        if pages > 0 {
            found.push((cause, pages));
        }
    }
    if host.settings.smart_scan == Some(1) && skipped && visited > volatile {
        found.push((Cause::SmartScan, 0));
    }
}

#[cfg(test)]
#[path = "explain_tests.rs"]
mod tests;
