//! The part `neighbours` of the study `mappings`: how many mappings the folded runs of a real guest
//! need.
//!
//! Two guests read the same files, and memfold folds them. A *boundary* is where two runs of cached
//! pages touch in guest memory, both folded. At a boundary the kernel merges the two mappings if
//! the runs are neighbours in the page store, too. The engine fills the store in the order of guest
//! memory, so that they are.
//!
//! From the lengths of the runs, the part also computes how much of a larger guest's cache a limit
//! of mappings allows to fold: in the order in which the runs appear, with the engine's rule (the
//! closer the limit, the longer a run has to be), and with the longest runs first, as if the engine
//! unfolded short runs for longer ones.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use memfold_fold::{EngineSettings, PageRun, shortest_run};
use memfold_lab::{DiskMode, Lab};
use memfold_units::{ByteSize, PAGE_SIZE};
use serde_json::{Value, json};

use crate::figure::number;
use crate::record::Found;

const VMS: [&str; 2] = ["one", "two"];
const IMAGE: &str = "trixie-a";
const MEMORY: ByteSize = ByteSize::mib(1024);

const BOOT: Duration = Duration::from_secs(300);
const READ: Duration = Duration::from_secs(600);

/// The engine has folded what it can if it has folded nothing for this time.
const QUIET: Duration = Duration::from_secs(15);
const LIMIT: Duration = Duration::from_secs(600);

/// Cached files of the guest whose folding is computed, in bytes, and limits of mappings.
const LARGE_CACHES: [ByteSize; 5] = [
    ByteSize::mib(1 << 10),
    ByteSize::mib(2 << 10),
    ByteSize::mib(4 << 10),
    ByteSize::mib(8 << 10),
    ByteSize::mib(16 << 10),
];
const MAP_COUNTS: [usize; 2] = [65_530, 1_048_576];

/// Mappings of a folded run if none is merged: its own, and the rest of the mapping that it splits.
const UNMERGED: f64 = 2.0;

/// Mappings of a QEMU process in which nothing is folded.
const OWN_MAPPINGS: f64 = 500.0;

/// Range of addresses, and the page of the store that is mapped at its start.
#[derive(Clone, Copy, Debug)]
struct StoreMapping {
    start: u64,
    end: u64,
    store_page: u64,
}

/// Boots two guests that read the same files, and counts their mappings.
pub fn measure() -> anyhow::Result<Found> {
    let lab = Lab::new(EngineSettings::default())?;
    let specs = VMS.map(|name| Lab::spec(name, IMAGE, MEMORY, DiskMode::Buffered));
    lab.boot(specs.into_iter().collect::<Result<_, _>>()?, BOOT)?;
    lab.fold(true)?;
    let read = "find /usr /var/lib /etc -xdev -type f -exec cat {} + >/dev/null; sync; sleep 3";
    lab.exec_all(&VMS, read, READ)?;
    wait_until_folded(&lab)?;
    let mut samples = Vec::new();
    let mut lengths = Vec::new();
    for name in VMS {
        let cached = lab.daemon().folding().cached_pages(name)?;
        let cached = cached.context("the guest's agent reported no page cache")?;
        let mut runs: Vec<PageRun> = cached.runs().collect();
        runs.sort_by_key(|run| run.hva);
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", lab.pid(name)?))?;
        let mappings = store_mappings(&maps);
        let mut sample = count(&runs, &mappings);
        sample["vm"] = json!(name);
        sample["mappings"] = json!(maps.lines().count());
        sample["runs_by_pages"] = by_pages(&runs);
        eprintln!("{sample}");
        samples.push(sample);
        if lengths.is_empty() {
            lengths = runs.iter().map(|run| run.pages).collect();
        }
    }
    let first = samples.first().cloned().unwrap_or_default();
    Ok(Found {
        vms: vec![json!({ "image": IMAGE, "memory_mib": MEMORY.0 >> 20, "count": VMS.len() })],
        samples,
        results: json!({
            "folded_percent_unmerged": budgets(&lengths, UNMERGED),
            "folded_percent": budgets(&lengths, number(&first["store_mappings_per_folded_run"])),
            "neighbours": first,
        }),
    })
}

/// Waits until the engine folds no more.
fn wait_until_folded(lab: &Lab) -> anyhow::Result<()> {
    let began = Instant::now();
    for vm in lab.stats()?.vms {
        let problem = vm.problem.unwrap_or_default();
        ensure!(
            problem.is_empty(),
            "VM '{}' cannot be folded: {problem}",
            vm.name
        );
    }
    let (mut last, mut since) = (0, Instant::now());
    while since.elapsed() < QUIET {
        let stats = lab.stats()?;
        let folded = stats
            .vms
            .iter()
            .map(|vm| vm.folded_pages + vm.refolded_pages)
            .sum();
        if folded != last {
            (last, since) = (folded, Instant::now());
        }
        ensure!(
            began.elapsed() < LIMIT,
            "the engine has not finished folding two guests in {} s",
            LIMIT.as_secs()
        );
        std::thread::sleep(Duration::from_millis(500));
    }
    ensure!(
        last > 0,
        "the engine has folded no page of two guests that read the same files"
    );
    Ok(())
}

/// Returns the private mappings of page stores in a text of `/proc/PID/maps`, by address.
fn store_mappings(maps: &str) -> Vec<StoreMapping> {
    let parse = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let is_private = fields.next()?.ends_with('p');
        let offset = fields.next()?;
        let number = |hex| u64::from_str_radix(hex, 16).ok();
        is_private.then_some(StoreMapping {
            start: number(start)?,
            end: number(end)?,
            store_page: number(offset)? / PAGE_SIZE,
        })
    };
    let is_store = |line: &&str| line.contains("memfold:");
    maps.lines().filter(is_store).filter_map(parse).collect()
}

/// Counts runs, boundaries between runs, and mappings. `runs` and `mappings` are sorted by address.
fn count(runs: &[PageRun], mappings: &[StoreMapping]) -> Value {
    // Index of the mapping that contains the page at this address.
    let mapping_at = |address: u64| {
        let at = mappings.partition_point(|mapping| mapping.start <= address);
        at.checked_sub(1).filter(|&at| address < mappings[at].end)
    };
    let range = |run: &PageRun| (run.hva.0, run.hva.0 + u64::from(run.pages) * PAGE_SIZE);
    let (mut folded, mut pages, mut whole, mut splits) = (0_u64, 0_u64, 0_u64, 0_u64);
    for run in runs {
        let (start, end) = range(run);
        let steps = (start..end).step_by(4096).map(mapping_at);
        let steps: Vec<Option<usize>> = steps.collect();
        let there = steps.iter().flatten().count() as u64;
        pages += there;
        folded += u64::from(there > 0);
        whole += u64::from(there == u64::from(run.pages));
        let both = steps
            .windows(2)
            .filter(|pair| pair[0].is_some() && pair[1].is_some());
        splits += both.filter(|pair| pair[0] != pair[1]).count() as u64;
    }
    let (mut boundaries, mut merged) = (0_u64, 0_u64);
    for pair in runs.windows(2) {
        let (end, start) = (range(&pair[0]).1, range(&pair[1]).0);
        if end != start {
            continue;
        }
        if let (Some(before), Some(after)) = (mapping_at(end - PAGE_SIZE), mapping_at(start)) {
            boundaries += 1;
            merged += u64::from(before == after);
        }
    }
    // Mappings that touch in memory, but are no neighbours in the store.
    let apart = mappings.windows(2).filter(|pair| {
        let [a, b] = [pair[0], pair[1]];
        a.end == b.start && a.store_page + (a.end - a.start) / PAGE_SIZE != b.store_page
    });
    json!({
        "cached_runs": runs.len(),
        "cached_pages": runs.iter().map(|run| u64::from(run.pages)).sum::<u64>(),
        "folded_runs": folded,
        "wholly_folded_runs": whole,
        "folded_pages": pages,
        "store_mappings": mappings.len(),
        "store_mappings_per_folded_run": mappings.len() as f64 / folded.max(1) as f64,
        "splits_inside_runs": splits,
        "boundaries": boundaries,
        "merged_boundaries": merged,
        "merged_percent": merged as f64 * 100.0 / boundaries.max(1) as f64,
        "mappings_that_touch_unmerged": apart.count(),
    })
}

/// Returns number and total pages of the runs whose length is at least the key, and less than the
/// next key.
fn by_pages(runs: &[PageRun]) -> Value {
    let mut all = json!({});
    for power in 0..=9 {
        let range = 1_u32 << power..if power == 9 { u32::MAX } else { 2 << power };
        let inside = runs.iter().filter(|run| range.contains(&run.pages));
        let lengths: Vec<u32> = inside.map(|run| run.pages).collect();
        let pages: u64 = lengths.iter().map(|pages| u64::from(*pages)).sum();
        all[range.start.to_string()] = json!({ "runs": lengths.len(), "pages": pages });
    }
    all
}

/// Computes the share of a guest's cached pages that can be folded, for caches of several sizes and
/// limits of mappings, if the cache consists of runs of these lengths. `per_run`: mappings that a
/// folded run takes.
fn budgets(lengths: &[u32], per_run: f64) -> Value {
    let mut all = json!({});
    for limit in MAP_COUNTS {
        for cache in LARGE_CACHES {
            let mut pages = 0;
            let wanted = cache.0 / PAGE_SIZE;
            let runs: Vec<u32> = lengths
                .iter()
                .copied()
                .cycle()
                // A run has at least one page.
                .take(usize::try_from(wanted).unwrap_or(usize::MAX))
                .take_while(|run| {
                    pages += u64::from(*run);
                    pages <= wanted
                })
                .collect();
            let total: u64 = runs.iter().map(|run| u64::from(*run)).sum();
            let percent = |folded: u64| folded as f64 * 100.0 / total.max(1) as f64;
            let mut sorted = runs.clone();
            sorted.sort_unstable_by_key(|run| std::cmp::Reverse(*run));
            let any = |used| (used < limit * 9 / 10).then_some(1);
            all[format!("limit_{limit}")][format!("cache_{}_mib", cache.0 >> 20)] = json!({
                "runs": runs.len(),
                "in_order_of_appearance": percent(fold_within(&runs, per_run, any)),
                "engine": percent(fold_within(&runs, per_run, |used| shortest_run(used, limit))),
                "longest_first": percent(fold_within(&sorted, per_run, any)),
            });
        }
    }
    all
}

/// Returns the number of pages that are folded, if runs appear in this order and take `per_run`
/// mappings each. `shortest`: the shortest run that is folded when the process has so many
/// mappings; `None` for no run.
fn fold_within(runs: &[u32], per_run: f64, shortest: impl Fn(usize) -> Option<u32>) -> u64 {
    let mut used = OWN_MAPPINGS;
    let mut pages = 0;
    for &run in runs {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // never negative
        let now = used as usize;
        if shortest(now).is_some_and(|least| run >= least) {
            used += per_run;
            pages += u64::from(run);
        }
    }
    pages
}

#[cfg(test)]
mod tests {
    use memfold_units::Hva;

    use super::*;

    #[test]
    fn a_boundary_of_two_folded_runs_is_merged_if_one_mapping_covers_both() {
        // Pages 0-3 and 4-7 are one mapping; 8-9 touches it, but is elsewhere in the store. Page 20
        // is not folded.
        let maps = "\
10000-18000 rw-p 00005000 00:01 1043   /memfold:lab (deleted)
18000-1a000 rw-p 00050000 00:01 1043   /memfold:lab (deleted)
1a000-24000 rw-p 00000000 00:00 0
24000-25000 rw-p 00000000 00:00 0
70000-80000 r--s 00000000 00:01 1043   /memfold:lab (deleted)
";
        let run = |page: u64, pages| PageRun {
            hva: Hva(0x10000 + page * PAGE_SIZE),
            pages,
            file: 1,
            page: 0,
        };
        let mappings = store_mappings(maps);
        assert_eq!(mappings.len(), 2);
        let found = count(&[run(0, 4), run(4, 4), run(8, 2), run(20, 1)], &mappings);
        for (key, expected) in [
            ("cached_runs", 4),
            ("folded_runs", 3),
            ("wholly_folded_runs", 3),
            ("folded_pages", 10),
            ("boundaries", 2),
            ("merged_boundaries", 1),
            ("splits_inside_runs", 0),
            ("mappings_that_touch_unmerged", 1),
        ] {
            assert_eq!(found[key], expected, "{key}: {found}");
        }
        let lengths = by_pages(&[run(0, 4), run(4, 7), run(20, 1000)]);
        assert_eq!(lengths["4"], json!({ "runs": 2, "pages": 11 }));
        assert_eq!(lengths["512"], json!({ "runs": 1, "pages": 1000 }));
        // One run over two mappings.
        let found = count(&[run(6, 4)], &mappings);
        assert_eq!(found["splits_inside_runs"], 1, "{found}");
    }

    #[test]
    fn the_longest_runs_first_fold_at_least_as_much_as_the_rule_of_the_engine() {
        let mut lengths = vec![1; 3000];
        lengths.extend([64; 1000]);
        let limit = 4000;
        let folded = |runs: &[u32]| fold_within(runs, 2.0, |used| shortest_run(used, limit));
        let engine = folded(&lengths);
        assert!(engine > 64 * 500, "{engine}");
        lengths.reverse();
        assert!(folded(&lengths) > engine);
        assert_eq!(fold_within(&lengths, 2.0, |_| None), 0);
        let found = budgets(&lengths, 2.0);
        let small = &found["limit_65530"]["cache_1024_mib"];
        let percent = |key: &str| small[key].as_f64().unwrap();
        assert!(percent("longest_first") >= percent("engine"), "{small}");
    }
}
