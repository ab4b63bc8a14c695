//! The part `huge-pages` of the report: how many transparent huge pages of this process are left
//! when a part of each is folded, what that costs, and how many khugepaged makes again after
//! unfolding.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use memfold_ksm::ranges;
use memfold_sys::region::{Area, Mapping};
use memfold_wire::library::{Advice, Freeze, MAX_RUNS, Order, Outcome, Range};
use rustix::mm::Advice as Madvise;
use serde_json::{Value, json};

use crate::fold::{fill, fill_random, fold_all};
use crate::folding::Library;

/// Number of pages in a huge page, and number of them that are folded: memfold splits no huge page
/// for fewer.
const HUGE: u64 = 512;
const FOLDED: u64 = HUGE / 8;

/// Measures `number` huge pages. `wait_s`: seconds to wait for khugepaged at most.
pub fn measure(number: u64, wait_s: u64) -> anyhow::Result<Value> {
    // One more, because the first one begins at an address that is a multiple of its size.
    let ram = Mapping::anonymous((number + 1) * HUGE, true)?;
    let ram = ram.area();
    let bytes = HUGE * memfold_units::PAGE_SIZE;
    let skipped =
        (ram.start().0.next_multiple_of(bytes) - ram.start().0) / memfold_units::PAGE_SIZE;
    let area = ram.part(skipped, number * HUGE);
    area.advise(Madvise::LinuxHugepage)?;
    fill_random(area);
    let before = huge_pages(area)?;
    if before < number / 2 {
        return Ok(not_measured(&format!(
            "the kernel gave {before} of {number} huge pages; see transparent_hugepage/enabled and free memory"
        )));
    }
    let library = Library::new()?;
    let (hva, pages) = (area.start().0, area.pages());
    let advice = Advice {
        hugepage: true,
        dontfork: true,
        noreserve: true,
        ..Advice::default()
    };
    library.give(&Order::AddRam { hva, pages, advice }, None)?;
    let (store, places, _) = fill(1, area, FOLDED, HUGE)?;
    let (fold_ns, _) = fold_all(&library, 1, &store, &places)?;
    let folded = huge_pages(area)?;

    let ranges: Vec<Range> = places
        .iter()
        .map(|(from, _)| Range {
            hva: from.start().0,
            pages: from.pages(),
        })
        .collect();
    for ranges in ranges.chunks(MAX_RUNS) {
        let (freeze, ranges) = (Freeze::WriteProtect, ranges.to_vec());
        let (outcomes, _) = library.outcomes(&Order::Release { freeze, ranges })?;
        if let Some(other) = outcomes.iter().find(|outcome| **outcome != Outcome::Done) {
            bail!("the fold library did not release a range of pages: {other:?}");
        }
    }
    let unfolded = huge_pages(area)?;
    let began = Instant::now();
    let limit = Duration::from_secs(wait_s);
    let mut refilled = unfolded;
    while refilled < before && began.elapsed() < limit {
        std::thread::sleep(Duration::from_millis(500));
        refilled = huge_pages(area)?;
    }
    let percent = |pages: u64| pages as f64 * 100.0 / before as f64;
    let folded_pages = places.len() as u64 * FOLDED;
    ensure!(folded_pages > 0, "no page was folded");
    Ok(json!({
        "huge_before": before,
        "huge_left_percent": percent(folded),
        "fold_us_per_page": fold_ns as f64 / 1e3 / folded_pages as f64,
        "huge_unfolded_percent": percent(unfolded),
        "huge_refilled_percent": percent(refilled),
        "refill_s": began.elapsed().as_secs_f64(),
    }))
}

fn not_measured(why: &str) -> Value {
    let keys = [
        "huge_left_percent",
        "huge_fold_us_per_page",
        "huge_refilled_percent",
        "huge_refill_s",
    ];
    let all = keys.map(|key| (key.to_owned(), Value::from(why)));
    json!({ "not_measured": all.into_iter().collect::<serde_json::Map<_, _>>() })
}

/// Returns the number of huge pages in an area of this process.
fn huge_pages(area: Area) -> anyhow::Result<u64> {
    let (start, end) = (area.start().0, area.end().0);
    let all = ranges::parse(&std::fs::read_to_string("/proc/self/smaps")?);
    let mine = all.iter().filter(|of| of.start < end && of.end > start);
    Ok(mine.map(|of| of.huge_pages).sum::<u64>() / HUGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folding_an_eighth_of_each_huge_page_is_measured_or_the_reason_is_told() {
        let found = measure(8, 0).unwrap();
        println!("{found}");
        if let Some(why) = found["not_measured"]["huge_left_percent"].as_str() {
            assert!(why.contains("of 8 huge pages"), "{why}");
            return;
        }
        assert!(
            found["huge_left_percent"].as_f64().unwrap() < 100.0,
            "{found}"
        );
        assert!(found["fold_us_per_page"].as_f64().unwrap() > 0.0, "{found}");
    }
}
