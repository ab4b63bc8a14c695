//! Tests `memfold estimate` on child processes with known pages: the result is exact, or the exact
//! value lies within the error bars.
//!
//! Each child has this memory; numbers are pages:
//!
//! ```text
//!   | zeroes 700 | pairs 2 x 300 | common 1000 | own 2000 | rewritten 64 | file 256 | zero page 40 | holes 84 | huge 1024 |
//! ```
//! Contents of `pairs` are twice in one child and in no other; those of `common` are in all
//! children. The first of the two huge pages begins with ten pages of `common`; all other contents
//! of the huge pages occur only there.

use std::io::Write;
use std::os::fd::AsFd;
use std::process::Child;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use memfold_ledger::estimate::statistics::Estimate;
use memfold_ledger::estimate::{
    EstimateError, EstimateReport, FileRun, KnownFile, Options, Pace, Range, Target, estimate,
};
use memfold_sys::region::{Area, Mapping};
use memfold_testkit::{bound, start_helper};
use memfold_units::PAGE_SIZE;
use rustix::mm::Advice;

const ROLE: &str = "MEMFOLD_TEST_ESTIMATE_CHILD";
const ZERO: u64 = 700;
const PAIRS: u64 = 300;
const COMMON: u64 = 1000;
const OWN: u64 = 2000;
const REWRITTEN: u64 = 64;
const FILE: u64 = 256;
const KERNEL_ZERO: u64 = 40;
const HUGE: u64 = 1024;
const IN_HUGE: u64 = 10;
/// Number of pages before the huge pages, rounded up to whole huge pages.
const SMALL: u64 = 10 << 9;
const PAGES: u64 = SMALL + HUGE;

/// Runs in the child process; [`Actor`] is the other side.
#[test]
#[ignore = "the other process of the tests here; does nothing by itself"]
fn helper_process_whose_memory_the_other_tests_estimate() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let own = role.parse::<u64>().unwrap() << 32;
    let mapping = Mapping::anonymous(PAGES, true).unwrap();
    let memory = mapping.area();
    let small = memory.part(0, SMALL);
    small.advise(Advice::LinuxNoHugepage).unwrap();
    let mut at = 0;
    let mut next = |pages: u64| {
        let part = small.part(at, pages);
        at += pages;
        part
    };
    next(ZERO).write(&vec![0; 512 * 700]);
    fill(next(PAIRS), own);
    fill(next(PAIRS), own);
    fill(next(COMMON), 1 << 60);
    fill(next(OWN), own + (1 << 20));
    let rewritten = next(REWRITTEN);
    let file = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = std::fs::File::from(file);
    file.write_all(&vec![5; 4096 * 256]).unwrap();
    let view = next(FILE);
    view.map_file(file.as_fd(), 0).unwrap();
    for page in 0..FILE {
        assert!(!view.part(page, 1).is_zero());
    }
    assert_eq!(next(KERNEL_ZERO).zero_pages(), KERNEL_ZERO);
    let huge = memory.after(SMALL);
    huge.advise(Advice::LinuxHugepage).unwrap();
    fill(huge, own + (2 << 20));
    fill(huge.part(0, IN_HUGE), 1 << 60);
    fill(rewritten, own + (3 << 20));
    println!("\nREADY {}", memory.start().0);
    std::thread::spawn(move || {
        for round in 1.. {
            for page in 0..REWRITTEN {
                rewritten
                    .part(page, 1)
                    .write(&[own + (4 << 20), round, page]);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    // The child waits until the parent ends it or dies.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Fills each page with a content of its own.
fn fill(area: Area, first: u64) {
    for page in 0..area.pages() {
        area.part(page, 1).write(&[first + page + 1]);
    }
}

struct Actor {
    child: Child,
    start: u64,
}

impl Actor {
    fn start(number: u64) -> Self {
        let test = "helper_process_whose_memory_the_other_tests_estimate";
        let (child, start) = start_helper(test, ROLE, number.to_string());
        let start = start.parse().unwrap();
        Self { child, start }
    }

    fn target(&self, name: &str, domain: Option<&str>) -> Target {
        Target {
            name: name.to_owned(),
            pid: i32::try_from(self.child.id()).unwrap(),
            domain: domain.map(str::to_owned),
            ranges: vec![Range {
                start: self.start,
                end: self.start + PAGES * PAGE_SIZE,
                mergeable: false,
                hugetlb: false,
            }],
            runs: None,
            free_bytes: None,
        }
    }

    fn huge_pages(&self) -> u64 {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", self.child.id())).unwrap();
        let mappings = memfold_ksm::ranges::parse(&smaps);
        let ours = mappings
            .iter()
            .filter(|m| m.start >= self.start && m.start < self.start + PAGES * PAGE_SIZE);
        ours.map(|mapping| mapping.huge_pages).sum()
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn root() -> bool {
    let root = rustix::process::getuid().is_root();
    if !root {
        memfold_testkit::report_skip("other processes' memory and frame numbers need root");
    }
    root
}

/// Estimates with half of a core, because tests run beside each other.
fn look(targets: Vec<Target>, files: &[KnownFile], options: &Options) -> EstimateReport {
    let stop = AtomicBool::new(false);
    let pace = Pace::new(0.5, None, &stop);
    estimate(targets, files, options, &pace, &mut |_, _, _| ()).unwrap()
}

fn options() -> Options {
    Options {
        seed: 7,
        ..Options::here()
    }
}

/// Returns the number of pages, and checks that every page was read.
#[track_caller]
fn exact(estimate: Estimate) -> u64 {
    assert_eq!(estimate.plus_minus_bytes, 0, "{estimate:?}");
    estimate.bytes / PAGE_SIZE
}

#[test]
fn an_estimate_counts_every_page_of_a_process_in_the_correct_class() {
    if !root() {
        return;
    }
    let actors = [Actor::start(1), Actor::start(2), Actor::start(3)];
    let targets = vec![
        actors[0].target("a", Some("d")),
        actors[1].target("b", Some("d")),
        actors[2].target("c", None),
    ];
    let report = look(targets, &[], &options());
    println!("{}", memfold_ledger::estimate::table::render(&report));
    for (vm, actor) in report.vms.iter().zip(&actors) {
        let pages = |bytes: u64| bytes / PAGE_SIZE;
        assert_eq!(pages(vm.memory_bytes), PAGES);
        let private = ZERO + 2 * PAIRS + COMMON + OWN + REWRITTEN + HUGE;
        assert_eq!(pages(vm.private_bytes), private);
        assert_eq!(pages(vm.file_bytes), FILE);
        assert_eq!(pages(vm.kernel_zero_bytes), KERNEL_ZERO);
        assert_eq!(vm.swapped_bytes + vm.hugetlb_bytes + vm.mergeable_bytes, 0);
        assert_eq!(exact(vm.zero), ZERO);
        assert_eq!(exact(vm.within), PAIRS + IN_HUGE);
        assert_eq!(exact(vm.merged), 0);
        let between = if vm.name == "c" { 0 } else { COMMON / 2 };
        assert_eq!(exact(vm.between), between);
        // Of pages without a twin, one in eight is read again.
        let (found, bar) = (vm.volatile.bytes, vm.volatile.plus_minus_bytes);
        let truth = REWRITTEN * PAGE_SIZE;
        assert!(found.abs_diff(truth) <= bar * 3 / 2, "{:?}", vm.volatile);
        let sum = vm.zero.bytes + vm.within.bytes + vm.between.bytes + found + vm.rest_bytes;
        assert_eq!(sum, vm.private_bytes);
        let huge = actor.huge_pages();
        if huge < HUGE {
            println!("no huge pages to be had: {huge} of {HUGE} pages");
        }
        assert_eq!(pages(vm.huge_bytes), huge);
        if huge == HUGE {
            assert_eq!((vm.broken_huge_pages, vm.plus_minus_huge_pages), (1, 0));
        }
    }
    let within = 2 * (PAIRS + IN_HUGE);
    let d = &report.domains[0];
    assert_eq!(d.domain.as_deref(), Some("d"));
    assert_eq!(
        (exact(d.zero), exact(d.within), exact(d.between)),
        (2 * ZERO, within, COMMON)
    );
    assert_eq!(exact(d.saved), 2 * ZERO + within + COMMON);
    assert_eq!(d.of_files, None);
    let alone = &report.domains[1];
    assert_eq!(alone.domain, None);
    assert_eq!(exact(alone.saved), ZERO + PAIRS + IN_HUGE);
    // Contents that both domains have are shown, but are part of no sum.
    assert_eq!(exact(report.across_domains), COMMON);
    let saved = exact(report.saved);
    assert_eq!(saved, exact(d.saved) + exact(alone.saved));
    assert!((report.how.read_percent - 100.0).abs() < 1e-9 && report.how.one_in < 1.5);
    assert!(report.how.cpu_percent <= 50.0, "{:?}", report.how);
}

/// The sample has room for a fifth of the contents.
#[test]
fn the_exact_count_lies_within_the_error_bars_of_a_sampled_estimate() {
    if !root() {
        return;
    }
    let actors = [Actor::start(1), Actor::start(2)];
    for seed in [1, 2, 3] {
        let targets = vec![
            actors[0].target("a", Some("d")),
            actors[1].target("b", Some("d")),
        ];
        let options = Options {
            sample_pages: 2048,
            seed,
            ..options()
        };
        let report = look(targets, &[], &options);
        let d = &report.domains[0];
        println!("one in {}: {d:?}", report.how.one_in);
        assert!(report.how.one_in >= 4.0);
        // Pages of zeroes are counted separately; only their changes are sampled.
        let zero = d.zero;
        assert!(zero.bytes.abs_diff(2 * ZERO * PAGE_SIZE) <= zero.plus_minus_bytes);
        assert!(zero.plus_minus_bytes < zero.bytes / 50);
        for (found, truth) in [
            (d.within, 2 * (PAIRS + IN_HUGE)),
            (d.between, COMMON),
            (d.saved, 2 * (ZERO + PAIRS + IN_HUGE) + COMMON),
        ] {
            let truth = truth * PAGE_SIZE;
            let bar = found.plus_minus_bytes;
            assert!(bar > 0 && bar < truth, "{found:?}");
            // The error bar is extended by half: one of twenty values lies outside, and these are
            // nine.
            assert!(
                found.bytes.abs_diff(truth) <= bar * 3 / 2,
                "{found:?}, and it is {truth}"
            );
        }
    }
}

#[test]
fn estimated_savings_are_attributed_to_the_files_that_the_pages_cache() {
    if !root() {
        return;
    }
    let actors = [Actor::start(1), Actor::start(2)];
    let common = ZERO + 2 * PAIRS;
    let target = |actor: &Actor, name, shift: u64| {
        let run = |first: u64, pages: u64, file, page: u64| FileRun {
            hva: actor.start + first * PAGE_SIZE,
            pages: u32::try_from(pages).unwrap(),
            file,
            page: u32::try_from(page).unwrap(),
        };
        Target {
            // 600 pages of the common contents are file pages: 400 at the same place of file 0, and
            // 200 of file 1, which one VM has at another place. 100 further pages are a VM's own.
            runs: Some(vec![
                run(common, 400, 0, 50),
                run(common + 400, 200, 1, shift),
                run(common + COMMON, 100, 2, 0),
            ]),
            ..actor.target(name, Some("d"))
        }
    };
    let targets = vec![target(&actors[0], "a", 0), target(&actors[1], "b", 1000)];
    let file = |path: &str| KnownFile {
        path: path.to_owned(),
        file_bytes: 1000 * PAGE_SIZE,
    };
    let files = [
        file("/usr/lib/same"),
        file("/usr/lib/moved"),
        file("/etc/own"),
    ];
    let report = look(targets, &files, &options());
    let found: Vec<_> = report
        .files
        .iter()
        .map(|f| (f.path.as_str(), f.cached_bytes / PAGE_SIZE, exact(f.saved)))
        .collect();
    // In each VM, ten of the pages also lie in a huge page, which belongs to no file: three of the
    // four copies can be freed.
    let (same, moved) = (390 + 10, 200);
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!((found[0].0, found[0].1), ("/usr/lib/same", 800));
    assert!(found[0].2.abs_diff(same) <= 5, "{found:?}");
    assert_eq!(found[1], ("/usr/lib/moved", 400, moved));
    let of_files = exact(report.domains[0].of_files.unwrap());
    assert_eq!(of_files, found[0].2 + moved);
    let mechanism = |name: &str| {
        let way = serde_json::to_value(&report.mechanisms).unwrap();
        let way = way.as_array().unwrap().iter().find(|m| m["way"] == name);
        way.unwrap().clone()
    };
    // Folding finds equal pages at the same place of the same file.
    assert_eq!(mechanism("fold")["saved"]["bytes"], 400 * PAGE_SIZE);
    // The two files have 2 * 1000 pages, whose descriptions take 1/64 of that in each VM.
    let segment = 400 + 200 - 2 * 2 * 1000 / 64;
    let found = mechanism("segment")["saved"]["bytes"].as_u64().unwrap() / PAGE_SIZE;
    assert!(found.abs_diff(segment) <= 2, "{found} and not {segment}");
    // None of this memory is offered to KSM.
    assert_eq!(mechanism("ksm")["saved"]["bytes"], 0);
    let all = mechanism("ksm_if_offered")["saved"]["bytes"]
        .as_u64()
        .unwrap()
        / PAGE_SIZE;
    let saved = exact(report.saved);
    assert!(all <= saved && all + saved / 50 > saved, "{all} of {saved}");
}

#[test]
fn an_estimate_at_its_time_limit_reports_the_share_read_and_a_lower_bound() {
    if !root() {
        return;
    }
    let actors = [Actor::start(1), Actor::start(2)];
    let targets = vec![
        actors[0].target("a", Some("d")),
        actors[1].target("b", Some("d")),
    ];
    let stop = AtomicBool::new(false);
    let pace = Pace::new(0.005, Some(Duration::from_secs(1)), &stop);
    let report = estimate(targets, &[], &options(), &pace, &mut |_, _, _| ()).unwrap();
    let how = report.how;
    println!("{how:?} {:?}", report.domains);
    assert!(how.read_percent < 90.0 && how.read_percent > 0.0);
    assert!(how.seconds < bound(Duration::from_secs(4)).as_secs_f64());
    let d = &report.domains[0];
    assert!(d.within.bytes <= 2 * (PAIRS + IN_HUGE) * PAGE_SIZE);
    assert!(d.between.bytes <= COMMON * PAGE_SIZE);
    // The number of zero pages is extrapolated from the pages read.
    let zero = d.zero.bytes / PAGE_SIZE;
    assert!(zero < 8 * ZERO, "{zero}");
    assert!(memfold_ledger::estimate::table::render(&report).contains("--seconds"));
}

#[test]
fn an_estimate_skips_an_ended_vm_and_stops_on_ctrl_c() {
    if !root() {
        return;
    }
    let (here, gone) = (Actor::start(1), Actor::start(2));
    let targets = || {
        vec![
            here.target("here", Some("d")),
            gone.target("gone", Some("d")),
        ]
    };
    let both = targets();
    let stop = AtomicBool::new(true);
    let pace = Pace::new(0.5, None, &stop);
    let error = estimate(targets(), &[], &options(), &pace, &mut |_, _, _| ()).unwrap_err();
    assert!(matches!(error, EstimateError::Interrupted), "{error}");
    drop(gone);
    let report = look(both, &[], &options());
    assert_eq!(report.vms.len(), 1);
    assert_eq!(exact(report.domains[0].between), 0);
}
