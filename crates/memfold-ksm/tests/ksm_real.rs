//! Tests of this host's KSM on memory of the test's process. Each test restores KSM's settings.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use memfold_ksm::{
    Controls, EqualCpu, Ksmd, ProcessStatus, Run, Settings, Status, merging_pages, restore_leftover,
};
use memfold_ledger::estimate::{Options, Pace, Range, Target, estimate};
use memfold_ledger::{StoreAccount, take};
use memfold_snapshot::past::Past;
use memfold_store::StoreIdentity;
use memfold_sys::pagemap::{Filter, Pagemap};
use memfold_sys::region::{Area, Mapping};
use memfold_testkit::{start_helper, wait_for, wait_until};
use memfold_units::{ByteSize, PageCount};
use memfold_vm::{RamBlock, RamLayout};
use memfold_wire::library::{Order, Reply, VERSION};
use rustix::mm::Advice;

const ROLE: &str = "MEMFOLD_TEST_KSM_CHILD";

/// Time limit for ksmd, which has a low priority and works in small batches.
const LIMIT: Duration = Duration::from_secs(60);

/// Takes a lock that lets one test run at a time on the whole machine.
fn alone() -> std::fs::File {
    let path = std::env::temp_dir().join("memfold-ksm.lock");
    let file = std::fs::File::create(path).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    file
}

/// Returns the controls, or reports why the test cannot run here.
fn controls() -> Option<Controls> {
    let controls = Controls::default();
    match controls.settings() {
        Ok(now) if rustix::process::getuid().is_root() => {
            // If another program uses KSM, the counts would not be this test's, and its settings
            // must not be changed.
            let in_use = now.run != Some(0) || merging_pages(Path::new("/proc")) != Some(0);
            if in_use {
                memfold_testkit::report_skip(&format!("KSM is in use on this host: {now:?}"));
            }
            (!in_use).then_some(controls)
        }
        Ok(_) => memfold_testkit::reports_skip("setting KSM needs root"),
        Err(e) => memfold_testkit::reports_skip(&e.to_string()),
    }
}

fn fast() -> Settings {
    Settings {
        pages_to_scan: Some(20_000),
        sleep_millisecs: Some(1),
        smart_scan: Some(0),
        ..Settings::kernel_default()
    }
}

/// A page that KSM merges loses its write protection, so writes to it go unnoticed. A copy of such
/// a page must not be trusted.
#[test]
fn if_ksm_merges_a_page_during_a_live_save_the_saved_copy_of_the_page_is_not_trusted() {
    let _alone = alone();
    let Some(controls) = controls() else { return };
    let me = rustix::process::getpid();
    let memory = Mapping::anonymous(64, true).unwrap();
    let area = memory.area();
    area.write(&vec![7; 64 * 512]);
    area.advise(Advice::LinuxMergeable).unwrap();
    let folder = memfold_folder::Folder::new(None, None);
    folder.execute(&Order::Hello { version: VERSION }, None);
    let (hva, pages) = (area.start().0, area.pages());
    let advice = memfold_wire::library::Advice {
        mergeable: true,
        noreserve: true,
        ..memfold_wire::library::Advice::default()
    };
    let added = folder.execute(&Order::AddRam { hva, pages, advice }, None);
    assert_eq!(added, Reply::Ok);
    let whole = area.start()..area.end();
    let past = Past::new(
        me,
        std::slice::from_ref(&whole),
        std::slice::from_ref(&whole),
        64,
    );
    let past = past.unwrap().unwrap();
    let order = Order::KeepPast {
        ranges: past.ranges(),
    };
    let kept = folder.execute(&order, Some(past.descriptor().unwrap()));
    assert_eq!(kept, Reply::Ok);
    let state = tempfile::tempdir().unwrap();
    let run = Run::start(&controls, state.path(), &fast()).unwrap();
    let pagemap = Pagemap::open(me).unwrap();
    let is_protected = |page: &Area| {
        let passes = pagemap.all_pass(page.start(), page.end(), Filter::PROTECTED);
        passes.unwrap()
    };
    let merged = || {
        let status = ProcessStatus::read(Path::new("/proc"), own()).unwrap();
        status.ksm_merging_pages.unwrap_or(0)
    };
    wait_until("KSM merges", LIMIT, || merged() >= 32);
    let pages = (0..64).map(|page| area.part(page, 1));
    let lost: Vec<Area> = pages.filter(|page| !is_protected(page)).collect();
    let [first, second, ..] = lost[..] else {
        panic!("KSM keeps protection in this kernel")
    };
    // No thread waits for this write, and nothing keeps the old bytes.
    first.write(&[9; 512]);
    let mut bytes = vec![0; 4096];
    memfold_sys::memory::read(me, first.start(), &mut bytes).unwrap();
    let error = past.settle(first.start(), &mut bytes).unwrap_err();
    assert!(error.to_string().contains("KSM"), "{error}");
    // A copy that is made before a discard must not be trusted either.
    second.write(&[9; 512]);
    let address = usize::try_from(second.start().0).unwrap();
    folder.discard(address, 4096).unwrap().unwrap();
    assert_eq!(past.kept_pages(), 0);
    let error = past.settle(second.start(), &mut bytes).unwrap_err();
    assert!(error.to_string().contains("KSM"), "{error}");
    run.stop(true).unwrap();
}

fn own() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

fn merging() -> u64 {
    ProcessStatus::read(Path::new("/proc"), own())
        .unwrap()
        .ksm_merging_pages
        .unwrap()
}

/// Creates mergeable pages, each filled with its number plus `first`, so that ksmd merges pages of
/// the same number.
fn mergeable(pages: u64, first: u64) -> Mapping {
    let mapping = Mapping::anonymous(pages, true).unwrap();
    mapping.area().advise(Advice::LinuxNoHugepage).unwrap();
    for page in 0..pages {
        mapping.area().part(page, 1).write(&[first + page]);
    }
    mapping.area().advise(Advice::LinuxMergeable).unwrap();
    mapping
}

/// Returns the CPU time of ksmd in ticks of 10 ms (`proc_pid_stat(5)`). [`EqualCpu`] uses another
/// source, `schedstat`.
fn ksmd_ticks() -> u64 {
    let is_ksmd = |stat: &String| stat.contains(" (ksmd) ");
    let stat = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|process| std::fs::read_to_string(process.path().join("stat")).ok())
        .find(is_ksmd)
        .expect("no ksmd");
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split(' ').collect();
    // utime and stime are fields 14 and 15; field 3 has index 1 here.
    fields[12].parse::<u64>().unwrap() + fields[13].parse::<u64>().unwrap()
}

#[test]
fn ksm_merges_equal_memory_and_after_a_panic_the_ksm_settings_are_restored() {
    const PAGES: u64 = 1024;
    const FIRST: u64 = 0x6d65_6d66_0000_0000;
    let _alone = alone();
    let Some(controls) = controls() else { return };
    let state = tempfile::tempdir().unwrap();
    let before = controls.settings().unwrap();
    let regions: Vec<_> = (0..2).map(|_| mergeable(PAGES, FIRST)).collect();
    let layout = RamLayout {
        blocks: regions
            .iter()
            .map(|r| RamBlock {
                name: "ram".into(),
                hva: r.area().start(),
                pages: PAGES,
            })
            .collect(),
        slots: vec![],
    };
    let panicked = std::panic::catch_unwind(|| {
        let ksmd = Ksmd::find().unwrap();
        let cpu = ksmd.cpu_time().unwrap();
        let run = Run::start(&controls, state.path(), &fast()).unwrap();
        wait_until("merging", LIMIT, || merging() == 2 * PAGES);
        let status = Status::read(run.controls()).unwrap();
        assert!(status.pages_sharing.unwrap() >= PAGES, "{status:?}");
        assert!(status.pages_shared.unwrap() >= PAGES);
        assert!(ksmd.cpu_time().unwrap() > cpu);
        let account = take::vm(own(), "self", None, &layout, &[], &[]).unwrap();
        assert_eq!(account.ksm_merged_bytes, Some(PageCount(2 * PAGES).bytes()));
        // Each merged page has two mappings, so PSS is half.
        assert_eq!(account.ram_pss_bytes, PageCount(PAGES).bytes());
        assert_eq!(account.backed_bytes, PageCount(2 * PAGES).bytes());
        println!("{status:?}");
        panic!("as a failing bench would");
    });
    let message = panicked.unwrap_err();
    assert_eq!(
        message.downcast_ref::<&str>(),
        Some(&"as a failing bench would")
    );
    assert_eq!(controls.settings().unwrap(), before);
    assert_eq!(merging(), 0);
    let untouched = mergeable(PAGES, FIRST);
    assert_eq!(regions[0].area().equal_pages(untouched.area()), PAGES);
}

/// A folded range is a view of a file: ksmd scans none of its pages, not even copies that were
/// written since. The ledger counts each page once.
#[test]
fn ksmd_does_not_scan_folded_ranges_and_the_ledger_counts_each_page_once() {
    const PAGES: u64 = 1024;
    const FIRST: u64 = 0x666f_6c64_0000_0000;
    let _alone = alone();
    let Some(controls) = controls() else { return };
    let state = tempfile::tempdir().unwrap();
    let store = rustix::fs::memfd_create("store", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut store = std::fs::File::from(store);
    for page in 0..PAGES {
        let words = (FIRST + page).to_ne_bytes().repeat(512);
        std::io::Write::write_all(&mut store, &words).unwrap();
    }
    let (ram, other) = (mergeable(2 * PAGES, FIRST), mergeable(PAGES, FIRST));
    let folded = ram.area().part(PAGES, PAGES);
    folded.map_file(store.as_fd(), 0).unwrap();
    assert_eq!(folded.zero_pages(), 0);
    for page in 0..PAGES {
        assert!(!folded.part(page, 1).is_zero());
    }
    // Writes as a guest does: the range then has private copies whose content other pages have,
    // too.
    for page in 0..16 {
        folded.part(page, 1).write(&[FIRST + page]);
    }
    let layout = RamLayout::one_block(ram.area().start(), 2 * PAGES);
    let run = Run::start(&controls, state.path(), &fast()).unwrap();
    wait_until("merging", LIMIT, || merging() == 2 * PAGES);
    let scans = || Status::read(&controls).unwrap().full_scans.unwrap();
    let then = scans();
    wait_until("three more passes", LIMIT, || scans() >= then + 3);
    let part = ProcessStatus::read(Path::new("/proc"), own()).unwrap();
    assert_eq!(part.ksm_merging_pages, Some(2 * PAGES));
    assert_eq!(part.ksm_rmap_items, Some(2 * PAGES), "{part:?}");
    let id = StoreIdentity::of(&store).unwrap();
    let account = take::vm(own(), "self", Some("d"), &layout, &[id], &[]).unwrap();
    let bytes = |pages: u64| PageCount(pages).bytes();
    assert_eq!(account.sum_of_parts(), account.ram_bytes);
    assert_eq!(account.private_bytes, bytes(PAGES));
    assert_eq!(account.folded_resident_bytes, bytes(PAGES - 16));
    assert_eq!(account.unfolded_bytes, bytes(16));
    assert_eq!(account.ksm_merged_bytes, Some(bytes(PAGES)));
    // Each merged page is shared by two mappings; each page of the store has only this one.
    assert_eq!(account.ram_pss_bytes, bytes(PAGES / 2 + PAGES));
    let store = StoreAccount::of("d", &store).unwrap();
    let own_cost = take::own(ByteSize(0), &[id], &[]).unwrap();
    let host = take::host(&take::Parts {
        vms: &[account],
        stores: &[store],
        own: own_cost,
        ..take::Parts::default()
    })
    .unwrap();
    // KSM has saved one of each two anonymous pages.
    let saved = host.saved_by_ksm_bytes;
    let most = i64::try_from(bytes(PAGES).0).unwrap();
    assert!(saved <= most && saved > most / 2, "{saved} of {most}");
    assert_eq!(host.saved_by_folding_bytes, -16 * 4096);
    run.stop(true).unwrap();
    drop((ram, other));
}

#[test]
fn the_benchmark_of_ksm_at_equal_cpu_time_limits_ksmd_to_the_given_cpu_time() {
    const PAGES: u64 = 1 << 15;
    const BUDGET: Duration = Duration::from_millis(700);
    const TICK: Duration = Duration::from_millis(10);
    let _alone = alone();
    let Some(controls) = controls() else { return };
    let state = tempfile::tempdir().unwrap();
    let before = controls.settings().unwrap();
    let _region = mergeable(PAGES, 1);
    let settings = Settings {
        smart_scan: Some(0),
        ..Settings::kernel_default()
    };
    let run = Run::start(&controls, state.path(), &settings).unwrap();
    let mut equal = EqualCpu::new(&run).unwrap();
    let (start, ticks) = (Instant::now(), ksmd_ticks());
    let used = || TICK * u32::try_from(ksmd_ticks() - ticks).unwrap();
    // The budget grows by 5 % of a CPU up to its end.
    let allowed = || start.elapsed().mul_f64(0.05).min(BUDGET);
    let mut step = |allowed: Duration| {
        let step = equal.step(allowed).unwrap();
        std::thread::sleep(Duration::from_millis(500));
        step
    };
    let mut most: f64 = 0.0;
    // ksmd has a low priority: if other tasks want all cores, ksmd is late, but never early.
    wait_for("ksmd uses its budget", 2 * LIMIT, || {
        // The allowance grows meanwhile, so it is read last.
        let used = used();
        let allowed = allowed();
        if allowed >= BUDGET / 2 {
            most = most.max(used.as_secs_f64() / allowed.as_secs_f64());
        }
        let step = step(allowed);
        if used >= BUDGET.mul_f64(0.9) {
            Ok(())
        } else {
            Err(format!("{used:?} of {allowed:?}: {step:?}"))
        }
    });
    assert!(most < 1.2, "{most} times of what was allowed by then");
    // Without more budget, ksmd must stop.
    for _ in 0..6 {
        step(BUDGET);
    }
    let (used, last) = (used(), step(BUDGET));
    println!("ksmd used {used:?} of {BUDGET:?}, {most} times at most: {last:?}");
    assert!(used < BUDGET.mul_f64(1.2), "{used:?}: {last:?}");
    // The CPU time that `EqualCpu` measures must be the same, except for a tick at each end.
    assert!(used.abs_diff(last.used) <= 3 * TICK, "{used:?}: {last:?}");
    run.stop(true).unwrap();
    assert_eq!(controls.settings().unwrap(), before);
}

#[test]
#[ignore = "the process that the next test kills; does nothing by itself"]
fn helper_process_that_changes_the_ksm_settings_until_another_test_kills_it() {
    let Ok(state) = std::env::var(ROLE) else {
        return;
    };
    let _run = Run::start(&Controls::default(), Path::new(&state), &fast()).unwrap();
    println!("\nREADY");
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn after_a_run_of_ksm_was_killed_the_next_run_restores_the_original_ksm_settings() {
    let _alone = alone();
    let Some(controls) = controls() else { return };
    let state = tempfile::tempdir().unwrap();
    let before = controls.settings().unwrap();
    let test = "helper_process_that_changes_the_ksm_settings_until_another_test_kills_it";
    let (mut child, _) = start_helper(test, ROLE, state.path());
    let during = controls.settings().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(during.run, Some(1));
    assert_ne!(during, before);
    assert!(restore_leftover(state.path()).unwrap());
    assert_eq!(controls.settings().unwrap(), before);
    assert!(!restore_leftover(state.path()).unwrap());
}

/// KSM must save as much as an estimate has promised, and a second estimate must not promise it
/// again.
#[test]
fn ksm_merges_as_much_as_the_estimate_predicted_and_a_new_estimate_predicts_no_more() {
    const PAGES: u64 = 4096;
    const FIRST: u64 = 0x6573_7469_0000_0000;
    let _alone = alone();
    let Some(controls) = controls() else { return };
    let state = tempfile::tempdir().unwrap();
    let regions: Vec<_> = (0..3).map(|_| mergeable(PAGES, FIRST)).collect();
    // One content has more copies than a merged page may have, and some pages are zero.
    let same = mergeable(2000, FIRST);
    for page in 0..2000 {
        same.area()
            .part(page, 1)
            .write(&[if page < 1000 { FIRST } else { 0 }]);
    }
    let range = |region: &Mapping| Range {
        start: region.area().start().0,
        end: region.area().end().0,
        mergeable: true,
        hugetlb: false,
    };
    let mut ranges: Vec<Range> = regions.iter().chain([&same]).map(range).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let stop = AtomicBool::new(false);
    let look = || {
        let target = Target {
            name: "self".to_owned(),
            pid: own(),
            ranges: ranges.clone(),
            ..Target::default()
        };
        let pace = Pace::new(1.0, None, &stop);
        let options = Options::here();
        estimate(vec![target], &[], &options, &pace, &mut |_, _, _| ()).unwrap()
    };
    let before = look();
    let promised = before.domains[0].ksm.bytes / 4096;
    let run = Run::start(&controls, state.path(), &fast()).unwrap();
    wait_until("merging", LIMIT, || merging() == 3 * PAGES + 2000);
    let scans = || Status::read(&controls).unwrap().full_scans.unwrap();
    let then = scans();
    wait_until("two more passes", LIMIT, || scans() >= then + 2);
    controls.write("run", &0).unwrap();
    // Count only frames of this process, because other processes of this host may have merged
    // pages, too.
    let pagemap = Pagemap::open(rustix::process::getpid()).unwrap();
    let areas = regions.iter().chain([&same]).map(Mapping::area);
    let frames: Vec<u64> = areas
        .flat_map(|area| {
            let count = usize::try_from(area.pages()).unwrap();
            pagemap.frames(area.start(), count).unwrap()
        })
        .flatten()
        .collect();
    let distinct: std::collections::BTreeSet<u64> = frames.iter().copied().collect();
    let sharing = (frames.len() - distinct.len()) as u64;
    println!("promised {promised}, merged {sharing}");
    assert!(
        promised.abs_diff(sharing) * 100 <= sharing,
        "{promised} and {sharing}"
    );
    let after = look();
    println!("{}", memfold_ledger::estimate::table::render(&after));
    let vm = &after.vms[0];
    assert!(vm.merged.bytes / 4096 >= sharing - 16, "{vm:?}");
    assert!(after.domains[0].ksm.bytes / 4096 <= 16, "{after:?}");
    // The result may be a few pages, for merged zero pages and for a content that has several
    // frames.
    assert!(after.saved.bytes / 4096 <= 32, "{:?}", after.saved);
    run.stop(true).unwrap();
}
