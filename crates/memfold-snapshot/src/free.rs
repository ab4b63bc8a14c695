//! Finds pages of guest RAM that a RAM image can omit, because they are free in the guest and
//! nobody has written to them since the guest said so.
//!
//! ```text
//!   write tracking begins -- the agent lists free pages -- VM is stopped -- result: the list minus written pages
//! ```
//! The daemon begins to track the VM's writes before the agent lists the free pages. A listed page
//! that nobody has written to when the VM is stopped contains nothing of value, because a kernel
//! writes to a newly allocated page before anything reads it. QEMU's device emulation writes
//! through the process's page tables, so its writes are tracked, too. VMs with pinned memory are
//! not asked for a list of free pages.

use std::io;
use std::ops::Range;

use memfold_sys::pagemap::{Filter, Pagemap, category};
use memfold_units::{Hva, Pfn};
use rustix::process::Pid;

use memfold_vm::RamLayout;

use super::ranges::{joined, without};

/// Range of a guest's page frame numbers: first frame, and frame after the last.
pub type Frames = Range<u64>;

/// Number of frames per run at least, on average: the agent reports groups of 16 frames, and runs
/// do not touch.
const FRAMES_A_RUN: u64 = 32;

/// Parses the agent's list of free pages, from a VM with `pages` pages of RAM. Each line has the
/// first frame and the number of frames of one run of free pages. An error tells why the list is
/// refused.
pub fn parse(text: &[u8], pages: u64) -> Result<Vec<Frames>, String> {
    let text = std::str::from_utf8(text).map_err(|_| "the list is not text".to_owned())?;
    let run = |line: &str| -> Option<Frames> {
        let (first, count) = line.split_once(' ')?;
        let first: u64 = first.parse().ok()?;
        Some(first..first.checked_add(count.parse().ok()?)?)
    };
    // A hostile guest may send a list of any length.
    let most = usize::try_from(pages / FRAMES_A_RUN + 64).unwrap_or(usize::MAX);
    if text.lines().nth(most).is_some() {
        return Err(format!("the list has more than {most} lines"));
    }
    let mut runs: Vec<Frames> = Vec::new();
    for line in text.lines() {
        // The agent writes runs in ascending order. Overlapping runs would make later steps process
        // the same memory several times.
        let next = runs.last().map_or(0, |last| last.end);
        let run = run(line).filter(|run| !run.is_empty() && run.start >= next);
        runs.push(run.ok_or_else(|| {
            let shown: String = line.chars().take(40).collect();
            format!("not a line of the list: '{shown}'")
        })?);
    }
    Ok(runs)
}

/// Returns the addresses of those free frames (`free`) that were not written since write tracking
/// began, in ascending order. The addresses are in QEMU's process `pid`. The VM must be stopped.
pub fn unwritten(pid: Pid, layout: &RamLayout, free: &[Frames]) -> io::Result<Vec<Range<Hva>>> {
    let pagemap = Pagemap::open(pid)?;
    let filter = Filter {
        all_of: category::WRITES_TOLD,
        none_of: category::WRITTEN,
        ..Filter::default()
    };
    let mut unwritten = Vec::new();
    for slot in &layout.slots {
        let regions = pagemap.scan(slot.hva, slot.hva.add_pages(slot.pages), filter)?;
        unwritten.extend(regions.iter().map(|region| region.start..region.end));
    }
    let free = free.iter().flat_map(|frames| addresses(layout, frames));
    let mut free: Vec<Range<Hva>> = free.collect();
    free.sort_unstable_by_key(|range| range.start);
    unwritten.sort_unstable_by_key(|range| range.start);
    Ok(intersection(&unwritten, &free))
}

/// Returns the addresses of frames in QEMU's process. Leaves out frames outside RAM.
fn addresses(layout: &RamLayout, frames: &Frames) -> Vec<Range<Hva>> {
    let inside = |slot: &memfold_vm::RamSlot| {
        let first = frames.start.max(slot.pfn.0);
        let end = frames.end.min(slot.pfn.0 + slot.pages);
        let at = |frame: u64| slot.hva.add_pages(Pfn(frame).pages_since(slot.pfn));
        (first < end).then(|| at(first)..at(end))
    };
    layout.slots.iter().filter_map(inside).collect()
}

/// Returns the intersection of two lists of ranges, each sorted by start. Ranges in `b` may
/// overlap.
fn intersection(a: &[Range<Hva>], b: &[Range<Hva>]) -> Vec<Range<Hva>> {
    without(a, &without(a, &joined(b.iter().cloned())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_vm::{RamBlock, RamSlot};
    use proptest::prelude::*;

    fn layout() -> RamLayout {
        let slot = |pfn, pages, hva| RamSlot {
            pfn: Pfn(pfn),
            pages,
            hva: Hva(hva),
            block: 0,
        };
        RamLayout {
            blocks: vec![RamBlock {
                name: "ram0".into(),
                hva: Hva(0x10_0000),
                pages: 200,
            }],
            slots: vec![
                slot(0, 100, 0x10_0000),
                slot(1000, 100, 0x10_0000 + 100 * 4096),
            ],
        }
    }

    #[test]
    fn guest_page_frames_are_converted_to_addresses_and_frames_outside_ram_are_skipped() {
        let base = Hva(0x10_0000);
        let at = |from, to| base.add_pages(from)..base.add_pages(to);
        assert_eq!(
            addresses(&layout(), &(90..1010)),
            [at(90, 100), at(100, 110)]
        );
        assert!(addresses(&layout(), &(100..1000)).is_empty());
        assert!(addresses(&layout(), &(5000..u64::MAX)).is_empty());
    }

    #[test]
    fn lists_of_free_pages_are_parsed_and_malformed_lists_are_refused() {
        assert_eq!(parse(b"16 32\n1000 1\n", 0).unwrap(), [16..48, 1000..1001]);
        assert_eq!(parse(b"", 0).unwrap(), []);
        let list = |lines: u64| {
            let lines: Vec<String> = (0..lines).map(|n| format!("{n} 1")).collect();
            lines.join("\n")
        };
        assert!(parse(list(96).as_bytes(), 1024).is_ok());
        let error = parse(list(97).as_bytes(), 1024).unwrap_err();
        assert_eq!(error, "the list has more than 96 lines");
        // Each case has a list, and the line of it that is wrong.
        for (nonsense, line) in [
            ("16\n", "16"),
            ("16 x\n", "16 x"),
            ("-1 5\n", "-1 5"),
            ("18446744073709551615 1\n", "18446744073709551615 1"),
            ("\n", ""),
            ("1 2 3\n", "1 2 3"),
            ("5 0\n", "5 0"),
            ("5 3\n7 1\n", "7 1"),
            ("5 3\n5 3\n", "5 3"),
        ] {
            let error = parse(nonsense.as_bytes(), 1024).unwrap_err();
            assert_eq!(error, format!("not a line of the list: '{line}'"));
        }
    }

    fn ranges() -> impl Strategy<Value = Vec<Range<Hva>>> {
        proptest::collection::vec((0_u64..200, 0_u64..40), 0..20).prop_map(|mut list| {
            list.sort_unstable();
            let range = |(start, length)| Hva(start)..Hva(start + length);
            list.into_iter().map(range).collect()
        })
    }

    fn apart(list: Vec<Range<Hva>>) -> Vec<Range<Hva>> {
        let mut end = Hva(0);
        let mut kept = Vec::new();
        for range in list {
            if range.start >= end && range.start < range.end {
                end = range.end;
                kept.push(range);
            }
        }
        kept
    }

    proptest! {
        #[test]
        fn an_intersection_of_two_range_lists_contains_each_common_address_once(a in ranges(), b in ranges()) {
            let a = apart(a);
            let both = intersection(&a, &b);
            for at in (0..300).map(Hva) {
                let count = both.iter().filter(|range| range.contains(&at)).count();
                let wanted = a.iter().any(|r| r.contains(&at)) && b.iter().any(|r| r.contains(&at));
                prop_assert_eq!(count, usize::from(wanted));
            }
        }

        #[test]
        fn parsing_an_arbitrary_list_of_free_guest_pages_never_causes_a_panic(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(frames) = parse(&text, 1024) {
                for run in frames {
                    addresses(&layout(), &run);
                }
            }
        }
    }
}
