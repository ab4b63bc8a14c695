//! Tests of each order that the daemon can give to memfold's library in QEMU, such as to fold
//! pages: what the order does, and when the library refuses the order.

#[path = "../src/preload.rs"]
mod preload;
mod support;

use std::sync::atomic::Ordering;

use memfold_folder::{Folder, Monitor};
use memfold_sys::pagemap::{Filter, Pagemap, category};
use memfold_sys::region::{Area, Mapping};
use memfold_units::PAGE_SIZE;
use memfold_wire::library::{Advice, FoldRun, Freeze, MapRun, Order, Outcome, Range, Reply};
use proptest::prelude::*;
use support::{Bench, FakeQemu, PAGE};

#[test]
fn equal_pages_are_folded_and_a_write_to_a_folded_page_makes_a_private_copy() {
    let Some(mut bench) = Bench::new(64) else {
        return;
    };
    bench.fill(1);
    let at = bench.publish(0, 64);
    bench.assert_folds(Freeze::Move, bench.run(0, 64, at));
    bench.assert_holds(1, 0, 64);
    bench.area(5, 1).write(&[9]);
    assert_eq!(bench.wrong(1, 0, 64), [5]);
    let mut stored = [0; 8];
    std::os::unix::fs::FileExt::read_exact_at(&bench.store, &mut stored, 5 * PAGE_SIZE).unwrap();
    assert_eq!(u64::from_ne_bytes(stored), support::pattern(1, 5)[0]);
}

#[test]
fn folding_stops_before_a_page_that_differs_and_the_page_keeps_its_bytes() {
    let Some(mut bench) = Bench::new(64) else {
        return;
    };
    bench.fill(1);
    let at = bench.publish(0, 64);
    bench.area(20, 1).write(&[7]);
    assert_eq!(
        bench.fold(Freeze::Move, bench.run(0, 64, at)),
        Outcome::Differs { folded: 20 }
    );
    assert_eq!(bench.wrong(1, 0, 64), [20]);
    // After this page, another run can be folded.
    bench.assert_folds(Freeze::Move, bench.run(21, 43, at + 21));
    assert_eq!(bench.wrong(1, 0, 64), [20]);
}

#[test]
fn folding_stops_before_a_page_that_is_not_in_memory() {
    let Some(mut bench) = Bench::new(8) else {
        return;
    };
    bench.fill(1);
    let at = bench.publish(0, 8);
    bench
        .area(3, 1)
        .advise(rustix::mm::Advice::LinuxDontNeed)
        .unwrap();
    assert_eq!(
        bench.fold(Freeze::Move, bench.run(0, 8, at)),
        Outcome::Hole { folded: 3 }
    );
    assert!(bench.area(3, 1).is_zero());
    bench.assert_holds(1, 4, 4);
}

/// Linux 6.16 to 6.18.19 maps memory that does not exist when this page is moved (CVE-2026-31397).
#[test]
fn the_kernels_shared_huge_page_of_zeroes_stays_where_it_is() {
    const HUGE: u64 = memfold_units::HUGE_PAGE_PAGES;
    let Some(mut bench) = Bench::new(2 * HUGE) else {
        return;
    };
    let first = (bench.hva(0) / PAGE_SIZE).next_multiple_of(HUGE) - bench.hva(0) / PAGE_SIZE;
    let huge = bench.area(first, HUGE);
    huge.advise(rustix::mm::Advice::LinuxHugepage).unwrap();
    // Reading maps the page of zeroes, if the kernel has one.
    assert!(huge.part(7, 1).is_zero());
    let zero = Filter {
        all_of: category::ZERO | category::HUGE,
        ..Filter::default()
    };
    let map = Pagemap::open(rustix::process::getpid()).unwrap();
    let is_mapped = || map.all_pass(huge.start(), huge.end(), zero).unwrap();
    if !is_mapped() {
        memfold_testkit::skip!("this kernel maps no huge page of zeroes");
    }
    let at = bench.publish(first, HUGE);
    assert_eq!(
        bench.fold(Freeze::Move, bench.run(first, 512, at)),
        Outcome::Hole { folded: 0 }
    );
    assert!(is_mapped());
    assert!(huge.is_zero());
    // After a write, the huge page is the guest's own and is folded.
    huge.part(3, 1).write(&[9]);
    let at = bench.publish(first, HUGE);
    bench.assert_folds(Freeze::Move, bench.run(first, 512, at));
    assert!(huge.part(0, 3).is_zero() && !huge.part(3, 1).is_zero());
}

#[test]
fn no_core_dump_contains_the_folded_pages_of_ram_that_qemu_keeps_out_of_core_dumps() {
    let Some(mut bench) = Bench::new(64) else {
        return;
    };
    let (hva, pages) = (bench.hva(0), 64);
    let advice = Advice {
        dontdump: true,
        ..Advice::default()
    };
    bench.ok(&Order::AddRam { hva, pages, advice }, None);
    bench.fill(1);
    let at = bench.publish(0, 32);
    bench.assert_folds(Freeze::Move, bench.run(0, 32, at));
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{hva:x}-");
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
    let flags = lines
        .find_map(|line| line.strip_prefix("VmFlags:"))
        .unwrap();
    assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
}

#[test]
fn folded_pages_can_be_folded_again_or_unfolded_and_their_bytes_do_not_change() {
    let Some(mut bench) = Bench::new(64) else {
        return;
    };
    bench.fill(1);
    let at = bench.publish(0, 64);
    bench.assert_folds(Freeze::Move, bench.run(0, 64, at));
    // The pages are no longer anonymous, so only write protection or a stop of the VM can freeze
    // them.
    assert_eq!(
        bench.fold(Freeze::Move, bench.run(0, 64, at)),
        Outcome::Refused
    );
    bench.fill(2);
    assert_eq!(
        bench.fold(Freeze::WriteProtect, bench.run(0, 64, at)),
        Outcome::Differs { folded: 0 }
    );
    let again = bench.publish(0, 64);
    bench.assert_folds(Freeze::WriteProtect, bench.run(0, 64, again));
    bench.assert_holds(2, 0, 64);
    assert_eq!(bench.release(Freeze::Move, 0, 64), Outcome::Refused);
    assert_eq!(bench.release(Freeze::WriteProtect, 0, 64), Outcome::Done);
    bench.assert_holds(2, 0, 64);
    // The pages are anonymous again, so they can be moved again.
    bench.assert_folds(Freeze::Move, bench.run(0, 64, again));
    bench.assert_holds(2, 0, 64);
    let stats = bench.stats();
    assert_eq!(
        (
            stats.folded_pages,
            stats.refolded_pages,
            stats.released_pages
        ),
        (128, 64, 64)
    );
    assert_eq!(stats.freeze_histogram.iter().sum::<u64>(), 5);
    assert!(stats.freeze_max_ns > 0);
}

#[test]
fn folding_a_run_stops_before_a_part_that_was_folded_before_and_goes_on_behind_it() {
    let Some(mut bench) = Bench::new(30) else {
        return;
    };
    bench.fill(3);
    let at = bench.publish(0, 30);
    bench.assert_folds(Freeze::Move, bench.run(10, 10, at + 10));
    assert_eq!(
        bench.fold(Freeze::Move, bench.run(0, 30, at)),
        Outcome::Hole { folded: 10 }
    );
    bench.assert_folds(Freeze::WriteProtect, bench.run(0, 30, at));
    bench.assert_holds(3, 0, 30);
}

#[test]
fn a_run_across_several_mappings_is_folded() {
    let Some(mut bench) = Bench::new(200) else {
        return;
    };
    bench.fill(1);
    // Memory that was touched elsewhere keeps its own anon_vma, so the kernel cannot merge its
    // mapping with the neighbouring mappings.
    for (page, count) in [(13, 1), (64, 29), (93, 7)] {
        let other = Mapping::anonymous(count, true).unwrap();
        for i in 0..count {
            other
                .area()
                .part(i, 1)
                .write(&support::pattern(1, page + i));
        }
        other.move_over(bench.area(page, count)).unwrap();
    }
    assert!(
        mappings_in(bench.area(0, 200)) >= 6,
        "the kernel merged them"
    );
    let at = bench.publish(0, 200);
    bench.assert_folds(Freeze::Move, bench.run(0, 200, at));
    bench.assert_holds(1, 0, 200);
    assert_eq!(mappings_in(bench.area(0, 200)), 1);
}

#[test]
fn pages_that_were_folded_before_the_library_knew_their_ram_block_count_as_folded() {
    let Some(mut bench) = Bench::new(64) else {
        return;
    };
    bench.fill(1);
    let at = bench.publish(0, 64);
    bench.assert_folds(Freeze::Move, bench.run(8, 24, at + 8));
    bench.ok(&Order::RemoveRam { hva: bench.hva(0) }, None);
    bench.add_ram(64);
    // The run has pages of both kinds. It is moved up to the folded part, which only another way of
    // freezing can change.
    assert_eq!(
        bench.fold(Freeze::Move, bench.run(0, 64, at)),
        Outcome::Hole { folded: 8 }
    );
    bench.assert_folds(Freeze::WriteProtect, bench.run(0, 64, at));
    bench.assert_holds(1, 0, 64);
    assert_eq!(bench.release(Freeze::WriteProtect, 0, 64), Outcome::Done);
    assert_eq!(bench.stats().released_pages, 64);
}

/// Returns the number of mappings in `area`.
fn mappings_in(area: Area) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter_map(|line| line.split_once(' ')?.0.split_once('-'))
        .map(|(start, end)| [start, end].map(|text| u64::from_str_radix(text, 16).unwrap()))
        .filter(|[start, end]| *start < area.end().0 && area.start().0 < *end)
        .count()
}

#[test]
fn after_the_guest_discards_pages_they_read_as_zeroes_whether_folded_or_not() {
    let Some(mut bench) = Bench::new(64) else {
        return;
    };
    preload::install(bench.folder);
    bench.fill(1);
    let at = bench.publish(0, 64);
    bench.assert_folds(Freeze::Move, bench.run(8, 48, at + 8));
    // The test's program interposes the C library's `madvise`, as in QEMU.
    // SAFETY: the range is memory of this test.
    let result = unsafe {
        libc::madvise(
            bench.words().add(4 * 512).cast(),
            16 * 4096,
            libc::MADV_DONTNEED,
        )
    };
    assert_eq!(result, 0);
    assert_eq!(bench.area(4, 16).zero_pages(), 16);
    bench.assert_holds(1, 0, 4);
    bench.assert_holds(1, 20, 44);
    assert_eq!(bench.stats().discarded_pages, 12);
    // SAFETY: the range is memory of this test. The kernel refuses it, because its address is
    // within a page.
    let result = unsafe { libc::madvise(bench.words().add(1).cast(), 4096, libc::MADV_DONTNEED) };
    assert_eq!(result, -1);
    assert_eq!(
        std::io::Error::last_os_error().raw_os_error(),
        Some(libc::EINVAL)
    );
    // These pages are anonymous again.
    bench.area(4, 16).write(&vec![5; 16 * 512]);
    let at = bench.publish(4, 16);
    bench.assert_folds(Freeze::Move, bench.run(4, 16, at));
}

#[test]
fn ram_that_qemu_unmaps_is_forgotten_before_its_addresses_are_used_again() {
    let Some(mut bench) = Bench::new(64) else {
        return;
    };
    preload::install(bench.folder);
    bench.fill(1);
    let at = bench.publish(0, 64);
    // QEMU unmaps the RAM of an unplugged memory device, with a guard page behind it, and gets the
    // addresses again for something else.
    let unplugged = bench.words().cast();
    // SAFETY: the test uses this memory no more; the mapping is replaced below, before `bench`
    // unmaps it.
    assert_eq!(unsafe { libc::munmap(unplugged, 64 * PAGE) }, 0);
    // SAFETY: nothing is mapped at these addresses.
    let other = unsafe {
        libc::mmap(
            unplugged,
            64 * PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
            -1,
            0,
        )
    };
    assert_eq!(other, unplugged);
    for freeze in [Freeze::Move, Freeze::WriteProtect] {
        let outcome = bench.fold(freeze, bench.run(0, 64, at));
        assert_eq!(outcome, Outcome::Refused);
    }
    assert_eq!(bench.area(0, 64).zero_pages(), 64);
    // A new memory device at the same addresses is another RAM block.
    bench.add_ram(64);
    bench.fill(1);
    let outcome = bench.fold(Freeze::Move, bench.run(0, 64, at));
    assert_eq!(outcome, Outcome::Done);
}

#[test]
fn while_writes_are_tracked_written_pages_are_reported_and_no_page_is_folded() {
    let Some(mut bench) = Bench::new(1024) else {
        return;
    };
    bench.fill(1);
    let at = bench.publish(0, 64);
    let run = |bench: &Bench| bench.run(0, 32, at);
    bench.assert_folds(Freeze::Move, run(&bench));
    // These pages have never been touched since.
    let hole = bench.area(900, 10);
    hole.advise(rustix::mm::Advice::LinuxDontNeed).unwrap();
    let unwritten = |bench: &Bench| -> Vec<u64> {
        let filter = Filter {
            all_of: category::WRITES_TOLD,
            none_of: category::WRITTEN,
            ..Filter::default()
        };
        let map = Pagemap::open(rustix::process::getpid()).unwrap();
        let all = bench.area(0, 1024);
        let regions = map.scan(all.start(), all.end(), filter).unwrap();
        let page = |at: memfold_units::Hva| at.pages_since(all.start());
        regions
            .iter()
            .flat_map(|r| page(r.start)..page(r.end))
            .collect()
    };
    assert!(unwritten(&bench).is_empty(), "nothing is told before");
    assert_eq!(bench.folder.execute(&Order::TrackWrites, None), Reply::Ok);
    assert_eq!(unwritten(&bench).len(), 1024);
    // Write to a folded page, an anonymous page, and an untouched page; and to one page through the
    // kernel.
    for page in [5, 600, 905] {
        bench.area(page, 1).write(&[9]);
    }
    let me = rustix::process::getpid();
    memfold_sys::memory::write(me, bench.area(700, 1).start(), &[1, 2, 3]).unwrap();
    let written = [5, 600, 700, 905];
    let left: Vec<u64> = (0..1024).filter(|page| !written.contains(page)).collect();
    assert_eq!(unwritten(&bench), left);
    assert!(!matches!(
        bench.fold(Freeze::Move, bench.run(32, 32, at + 32)),
        Outcome::Done
    ));
    assert_eq!(bench.folder.execute(&Order::UntrackWrites, None), Reply::Ok);
    assert!(unwritten(&bench).is_empty());
    bench.assert_folds(Freeze::Move, bench.run(32, 32, at + 32));
    // After a daemon's death, nothing is tracked.
    assert_eq!(bench.folder.execute(&Order::TrackWrites, None), Reply::Ok);
    bench.folder.disconnected();
    assert!(unwritten(&bench).is_empty());
}

#[test]
fn when_zero_pages_of_a_guest_are_freed_all_other_pages_are_kept() {
    let Some(bench) = Bench::new(1024) else {
        return;
    };
    bench.fill(1);
    for page in (0..1024).filter(|page| page % 7 != 0) {
        bench.area(page, 1).write(&[0; 512]);
    }
    // This page is zero except for its last word.
    bench.area(1, 1).write(&[&[0; 511][..], &[1]].concat());
    let (scanned, dropped) = bench.drop_zero(0, 1024);
    let kept = 147 + 1;
    assert_eq!((scanned, dropped), (1024, 1024 - kept));
    for page in 0..1024 {
        let zero = page % 7 != 0 && page != 1;
        assert_eq!(bench.area(page, 1).is_zero(), zero, "page {page}");
    }
    // The examined pages now map the kernel's zero page, and are not examined again.
    assert_eq!(bench.drop_zero(0, 1024), (kept, 0));
}

#[test]
fn pages_that_equal_the_snapshot_again_after_a_change_are_folded_back_to_its_file() {
    let Some(bench) = Bench::new(16) else { return };
    bench.fill(4);
    let expected: Vec<u8> = (0..16)
        .flat_map(|p| support::pattern(5, p))
        .flat_map(u64::to_ne_bytes)
        .collect();
    std::os::unix::fs::FileExt::write_all_at(&bench.store, &expected, 100 * PAGE_SIZE).unwrap();
    let order = Order::Map {
        hva: bench.hva(0),
        pages: 16,
        file_page: 100,
    };
    bench.ok(&order, Some(bench.store.try_clone().unwrap().into()));
    bench.assert_holds(5, 0, 16);
    let (start, end) = (bench.hva(0), bench.hva(16));
    let maps = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let starts = maps.lines().filter_map(|line| {
            let (start, _) = line.split_once('-')?;
            u64::from_str_radix(start, 16).ok()
        });
        starts.filter(|at| (start..end).contains(at)).count()
    };
    let mappings = maps();
    assert_eq!(mappings, 1);
    // The guest writes the pages and restores their bytes: the private copies are dropped, and the
    // mapping stays whole.
    bench.area(3, 2).write(&[1; 600]);
    bench
        .area(3, 2)
        .write(&[support::pattern(5, 3), support::pattern(5, 4)].concat());
    bench.assert_folds(Freeze::WriteProtect, bench.run(3, 2, 103));
    bench.assert_holds(5, 0, 16);
    assert_eq!(maps(), mappings);
    let beyond = Order::Map {
        hva: bench.hva(0),
        pages: 16,
        file_page: (1 << 22) - 8,
    };
    let file = bench.store.try_clone().unwrap().into();
    assert!(matches!(
        bench.folder.execute(&beyond, Some(file)),
        Reply::Error { .. }
    ));
}

#[test]
fn blocks_of_a_disk_are_mapped_over_a_snapshot_image_up_to_the_first_invalid_run() {
    let Some(bench) = Bench::new(16) else { return };
    let write = |file: &std::fs::File, seed, pages: std::ops::Range<u64>, at: u64| {
        let bytes: Vec<u8> = pages
            .flat_map(|page| support::pattern(seed, page))
            .flat_map(u64::to_ne_bytes)
            .collect();
        std::os::unix::fs::FileExt::write_all_at(file, &bytes, at * PAGE_SIZE).unwrap();
    };
    write(&bench.store, 5, 0..16, 100);
    let whole = Order::Map {
        hva: bench.hva(0),
        pages: 16,
        file_page: 100,
    };
    bench.ok(&whole, Some(bench.store.try_clone().unwrap().into()));
    let disk = tempfile::tempfile().unwrap();
    write(&disk, 6, 4..6, 7);
    write(&disk, 6, 10..13, 3);
    let run = |page, pages, file_page| MapRun {
        hva: bench.hva(page),
        pages,
        file_page,
    };
    let map = |runs: Vec<MapRun>| {
        let order = Order::MapRuns { runs };
        let file = disk.try_clone().unwrap().into();
        bench.folder.execute(&order, Some(file))
    };
    assert_eq!(map(vec![run(10, 3, 3), run(4, 2, 7)]), Reply::Ok);
    for (seed, page, pages) in [(5, 0, 4), (6, 4, 2), (5, 6, 4), (6, 10, 3), (5, 13, 3)] {
        bench.assert_holds(seed, page, pages);
    }
    for refused in [
        vec![],
        vec![run(0, 1, 1 << 30)],
        vec![run(15, 2, 3)],
        vec![run(13, 2, 7), run(0, 10, 0)],
    ] {
        assert!(matches!(map(refused), Reply::Error { .. }));
    }
    bench.assert_holds(5, 0, 4);
    assert_eq!(bench.area(13, 2).equal_pages(bench.area(4, 2)), 2);
}

#[test]
fn runs_beyond_the_end_of_the_page_store_are_refused() {
    let Some(bench) = Bench::new(4) else { return };
    bench.fill(1);
    bench.store.set_len(2 * PAGE_SIZE).unwrap();
    assert_eq!(
        bench.fold(Freeze::Move, bench.run(0, 4, 0)),
        Outcome::Refused
    );
    assert_eq!(
        bench.fold(Freeze::Move, bench.run(0, 1, u64::MAX)),
        Outcome::Refused
    );
    bench.assert_holds(1, 0, 4);
}

#[test]
fn the_preload_library_refuses_shared_or_unmapped_memory_as_guest_ram() {
    let Some(bench) = Bench::new(4) else { return };
    let add = |hva, pages| {
        let order = Order::AddRam {
            hva,
            pages,
            advice: Advice::default(),
        };
        match bench.folder.execute(&order, None) {
            Reply::Error { reason } => reason,
            other => panic!("{other:?}"),
        }
    };
    // SAFETY: a new mapping at a place that the kernel chooses replaces no other mapping.
    let shared = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            8192,
            rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
            rustix::mm::MapFlags::SHARED,
            &bench.store,
            0,
        )
    }
    .unwrap();
    assert!(add(shared.expose_provenance() as u64, 2).contains("share=off"));
    // SAFETY: this is the mapping made above, and nothing refers to it.
    unsafe { rustix::mm::munmap(shared, 8192) }.unwrap();
    assert!(add(1 << 40, 1 << 10).contains("no private writable memory"));
    assert!(add(bench.hva(1), 2).contains("overlaps"));
    assert!(add(bench.hva(0) + 1, 2).contains("unaligned"));
}

fn freezes() -> impl Strategy<Value = Freeze> {
    prop_oneof![
        Just(Freeze::Move),
        Just(Freeze::WriteProtect),
        Just(Freeze::Stopped { limit_us: 5000 })
    ]
}

/// Sends random orders for addresses near the edges of RAM and far from them. The library must not
/// crash, and no byte may change.
#[test]
fn no_valid_or_invalid_request_to_the_preload_library_changes_a_byte_of_guest_ram() {
    let bench = |qemu: &FakeQemu| {
        let folder = Folder::new(None, Some(Monitor::new(qemu.path.clone())));
        Bench::with(Box::leak(Box::new(folder)), 32, 1)
    };
    // If userfaultfd is not available, report the skip once, and not for each case.
    if bench(&FakeQemu::start()).is_none() {
        return;
    }
    let cases = std::env::var("PROPTEST_CASES").map_or(64, |n| n.parse().unwrap());
    proptest!(ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }, |(
        orders in proptest::collection::vec((freezes(), -2i64..34, 0u32..40, 0u32..3, 0u64..70, any::<bool>(), 0u8..4), 1..30),
        wild in any::<(u64, u64)>(),
    )| {
        let qemu = FakeQemu::start();
        let mut bench = bench(&qemu).expect("the first could be made");
        bench.fill(6);
        bench.publish(0, 32);
        bench.publish(0, 32);
        for (freeze, page, pages, store, store_page, odd, what) in orders {
            let hva = bench.hva(0).wrapping_add_signed(page * 4096) + u64::from(odd && page > 20);
            let inside = hva % 4096 == 0 && page >= 0 && page + i64::from(pages) <= 32;
            let order = match what {
                0 | 1 => Order::Fold { freeze, runs: vec![FoldRun { hva, pages, store, store_page }] },
                2 => Order::Release { freeze, ranges: vec![Range { hva, pages: pages.into() }] },
                _ => Order::DropZero { ranges: vec![Range { hva, pages: pages.into() }] },
            };
            match bench.folder.execute(&order, None) {
                Reply::Outcomes { outcomes, .. } => {
                    if !inside { prop_assert_eq!(outcomes[0], Outcome::Refused); }
                    if what < 2 && store != 1 { prop_assert_eq!(outcomes[0], Outcome::Refused); }
                }
                Reply::Zero { dropped, .. } => prop_assert!(inside && dropped == 0),
                Reply::Error { .. } => prop_assert!(!inside || pages == 0),
                other => prop_assert!(false, "{:?}", other),
            }
        }
        let order = Order::Fold { freeze: Freeze::Move, runs: vec![FoldRun { hva: wild.0, pages: 1, store: 1, store_page: wild.1 }] };
        bench.folder.execute(&order, None);
        prop_assert!(qemu.running.load(Ordering::SeqCst));
        prop_assert_eq!(bench.wrong(6, 0, 32), Vec::<u64>::new());
    });
}
