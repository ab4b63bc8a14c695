//! Estimates, for each mechanism that saves memory (folding, KSM, segments, clones, free page
//! reporting), how much memory it would save on this host, and how much CPU time it would take.
//!
//! The savings cannot be added, because they overlap. For example, KSM would find most pages that
//! folding finds. CPU costs were measured in memfold's studies (`docs/results`, decision 21). On
//! other machines, they show only the order of magnitude.

use memfold_fold::FileUse;
use memfold_segment::rank;
use memfold_units::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::facts::KnownFile;
use super::look::{Looked, Pages};
use super::split::{DomainSplit, Split};
use super::statistics::{Estimate, Sum};
use super::targets::Target;

/// CPU time of ksmd for each merged page in microseconds, scanning included (`bench ksm`: steered,
/// median of three rounds, two VMs of 1 GiB).
const KSM_US: f64 = 10.3;

/// CPU time for folding one page in microseconds, by the length of its run in pages (`bench fold`,
/// median).
const FOLD_US: [(f64, f64); 5] = [
    (1.0, 8.74),
    (4.0, 3.01),
    (16.0, 1.36),
    (64.0, 0.91),
    (512.0, 0.77),
];

/// CPU time of the host in microseconds for giving back a 4 KiB page in a 2 MiB block
/// (`MADV_DONTNEED`, median of seven rounds; 0.01 in a huge page, decision 23).
const GIVE_BACK_US: f64 = 0.25;

/// A mechanism that saves memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Segments: files in a shared segment instead of in each guest's page cache.
    Segment,
    /// Clones: VMs that run from one snapshot.
    Clone,
    /// Folding: equal pages of equal files are stored once.
    Fold,
    /// Zero pages: guests' pages of zeroes are given back to the host.
    Zero,
    /// KSM, in the memory that is offered to it now (`MADV_MERGEABLE`).
    Ksm,
    /// KSM, if all VMs offered all of their memory.
    KsmIfOffered,
    /// Free page reporting: guests' free memory is given back to the host.
    FreePageReporting,
}

/// Expected saving and cost of one mechanism that saves memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Mechanism {
    /// Mechanism whose saving is estimated.
    pub way: Way,
    /// Expected saving; null if it cannot be known from outside the guests (`words` tells why).
    pub saved: Option<Estimate>,
    /// Upper limit of the saving in bytes, if the saving depends on unknown facts; otherwise null.
    pub at_most_bytes: Option<u64>,
    /// CPU time that the saving costs, in seconds of one core; null: not measured.
    pub cpu_seconds: Option<f64>,
    /// Text that describes where the saving comes from, and its conditions.
    pub words: String,
}

impl Mechanism {
    fn new(way: Way, saved: Option<Estimate>, words: impl Into<String>) -> Self {
        Self {
            way,
            saved,
            at_most_bytes: None,
            cpu_seconds: None,
            words: words.into(),
        }
    }
}

/// Estimates the saving and the cost of each mechanism from the pages read (`looked`) and their
/// classes (`split`).
#[must_use]
pub fn all(looked: &Looked, split: &Split, files: &[KnownFile]) -> Vec<Mechanism> {
    let mut all = vec![
        segment(looked, split, files),
        clone(looked, split),
        fold(looked, split),
        zero(split),
        ksm(Way::Ksm, split, |domain| domain.ksm),
    ];
    if looked.vms.iter().any(|vm| vm.mergeable < vm.private) {
        all.push(ksm(Way::KsmIfOffered, split, |domain| {
            domain.ksm_if_offered
        }));
    }
    all.push(free_page_reporting(looked));
    all
}

const NO_AGENT: &str =
    "needs a memfold daemon and agents in the guests, which report which pages belong to files";

fn knows_files(looked: &Looked) -> bool {
    looked.targets.iter().any(|vm| vm.runs.is_some())
}

fn segment(looked: &Looked, split: &Split, files: &[KnownFile]) -> Mechanism {
    let free = |saved, words| Mechanism {
        cpu_seconds: Some(0.0),
        ..Mechanism::new(Way::Segment, saved, words)
    };
    if !knows_files(looked) {
        return free(None, NO_AGENT);
    }
    let chosen = rank::chosen(&[]).ok();
    let mut net = 0;
    for domain in &split.domains {
        let vms = domain.vms.iter().map(|&vm| &looked.targets[vm]);
        let mut uses: Vec<FileUse> = vms.flat_map(|vm| uses(vm, files)).collect();
        uses.retain(|used| chosen.as_ref().is_none_or(|chosen| chosen(&used.path)));
        net += rank::sums(&rank::rank(&uses, domain.vms.len() as u64, None)).1;
    }
    free(
        Some(Estimate::exactly(u64::try_from(net).unwrap_or(0))),
        "files below /usr and /opt that several VMs cache, less 1/64 of their size for each VM; costs no CPU while VMs run",
    )
}

fn uses(vm: &Target, files: &[KnownFile]) -> Vec<FileUse> {
    let mut cached = std::collections::BTreeMap::<u32, u64>::new();
    for run in vm.runs.iter().flatten() {
        *cached.entry(run.file).or_default() += u64::from(run.pages);
    }
    let used = cached.into_iter().filter_map(|(file, cached_pages)| {
        let known = files.get(file as usize)?;
        Some(FileUse {
            vm: vm.name.clone(),
            domain: vm.group(),
            path: known.path.clone().into_bytes(),
            file_bytes: known.file_bytes,
            cached_pages,
        })
    });
    used.collect()
}

fn clone(looked: &Looked, split: &Split) -> Mechanism {
    let domains = || split.domains.iter().filter(|d| d.vms.len() > 1);
    let between: Sum = domains().map(|domain| domain.between).sum();
    let most = domains().map(|domain| {
        let private = || domain.vms.iter().map(|&vm| looked.vms[vm].private);
        private().sum::<u64>() - private().max().unwrap_or(0)
    });
    Mechanism {
        at_most_bytes: Some(most.sum::<u64>() * PAGE_SIZE),
        cpu_seconds: Some(0.0),
        ..Mechanism::new(
            Way::Clone,
            Some(between.bytes()),
            "if VMs were clones of one snapshot: from what they have in common now up to all memory but one VM's, while they write little",
        )
    }
}

fn fold(looked: &Looked, split: &Split) -> Mechanism {
    if !knows_files(looked) {
        return Mechanism::new(Way::Fold, None, NO_AGENT);
    }
    let domains = split.domains.iter().filter(|d| d.name.is_some());
    let saved: Sum = domains.map(|domain| domain.folded).sum();
    let runs = || {
        looked
            .targets
            .iter()
            .flat_map(|vm| vm.runs.iter().flatten())
    };
    let pages: u64 = runs().map(|run| u64::from(run.pages)).sum();
    let mean = pages as f64 / runs().count().max(1) as f64;
    let words = format!(
        "the same pages of the same files in VMs of a domain; runs of {mean:.0} pages on average"
    );
    Mechanism {
        // Of `k` copies, all `k` are folded and `k - 1` are saved, so at most two folds for each
        // saved page.
        cpu_seconds: Some(saved.total() * 2.0 * fold_us(mean) / 1e6),
        ..Mechanism::new(Way::Fold, Some(saved.bytes()), words)
    }
}

/// Returns the CPU time per page for folding a run of `pages` pages, in microseconds. Between
/// measured lengths, it is interpolated linearly in the logarithms of both.
fn fold_us(pages: f64) -> f64 {
    let last = FOLD_US[FOLD_US.len() - 1];
    if pages <= 1.0 {
        return FOLD_US[0].1;
    }
    let pair = FOLD_US.windows(2).find(|pair| pages <= pair[1].0);
    pair.map_or(last.1, |pair| {
        let part = (pages / pair[0].0).ln() / (pair[1].0 / pair[0].0).ln();
        pair[0].1 * (pair[1].1 / pair[0].1).powf(part)
    })
}

fn zero(split: &Split) -> Mechanism {
    let zero: Sum = split.vms.iter().map(|vm| vm.zero_given_back).sum();
    let words =
        "freed by memfold's library while folding; not from huge pages that hold other data";
    Mechanism::new(Way::Zero, Some(zero.bytes()), words)
}

fn ksm(way: Way, split: &Split, saving: impl Fn(&DomainSplit) -> Sum) -> Mechanism {
    let total = |domain: &DomainSplit| saving(domain).total();
    let best = split
        .domains
        .iter()
        .max_by(|a, b| total(a).total_cmp(&total(b)));
    let saved = best.map(&saving).unwrap_or_default();
    let alone = match best.and_then(|domain| domain.name.as_deref()) {
        _ if split.domains.len() < 2 => String::new(),
        Some(name) => {
            format!("; for trust domain '{name}' only, because KSM does not know trust domains")
        }
        None => "; for one VM only, because KSM does not know trust domains".to_owned(),
    };
    let words = match way {
        Way::KsmIfOffered => format!("if all VMs offered their memory (mem-merge=on){alone}"),
        _ if saved.total() < 1.0 => {
            "no memory that is offered to KSM (mem-merge=on) merges".to_owned()
        }
        _ => format!("of the memory that is offered to KSM; scanning continues afterwards{alone}"),
    };
    Mechanism {
        cpu_seconds: Some(saved.total() * KSM_US / 1e6),
        ..Mechanism::new(way, Some(saved.bytes()), words)
    }
}

fn free_page_reporting(looked: &Looked) -> Mechanism {
    let known = looked.targets.iter().zip(&looked.vms);
    let known: Vec<u64> = known
        .filter_map(|(vm, pages)| Some(free_and_backed(vm.free_bytes? / PAGE_SIZE, pages)))
        .collect();
    let most = known.iter().sum::<u64>();
    let words = match known.len() {
        0 => "known only where agents in the guests report free pages".to_owned(),
        n => format!(
            "memory that {n} guests have free and the host still backs; less in practice, because only whole blocks (2 MiB by default) are reported; CPU is the host's, without the guests' share"
        ),
    };
    Mechanism {
        at_most_bytes: (!known.is_empty()).then_some(most * PAGE_SIZE),
        cpu_seconds: (!known.is_empty()).then_some(most as f64 * GIVE_BACK_US / 1e6),
        ..Mechanism::new(Way::FreePageReporting, None, words)
    }
}

/// Returns the number of free pages of the guest that are in the host's memory. Pages of the
/// guest's RAM that are not in memory are assumed to be free.
fn free_and_backed(free: u64, pages: &Pages) -> u64 {
    let there = pages.private + pages.file + pages.swapped + pages.hugetlb;
    let missing = pages.memory.saturating_sub(there);
    free.saturating_sub(missing).min(pages.private)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimated_cost_of_folding_is_interpolated_between_measured_run_lengths() {
        for (pages, us) in FOLD_US {
            assert!(
                (fold_us(pages) - us).abs() < 1e-9,
                "{pages}: {}",
                fold_us(pages)
            );
        }
        let between = fold_us(8.0);
        assert!(between > 1.36 && between < 3.01, "{between}");
        assert!((fold_us(4096.0) - 0.77).abs() < 1e-9);
        assert!((fold_us(0.0) - 8.74).abs() < 1e-9);
    }

    #[test]
    fn free_guest_pages_without_host_memory_are_not_counted_as_possible_savings() {
        let pages = Pages {
            memory: 1000,
            private: 600,
            file: 100,
            kernel_zero: 50,
            ..Pages::default()
        };
        // 300 pages are not in memory or are the kernel's zero page.
        assert_eq!(free_and_backed(500, &pages), 200);
        assert_eq!(free_and_backed(200, &pages), 0);
        assert_eq!(free_and_backed(5000, &pages), 600);
    }
}
