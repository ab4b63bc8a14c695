//! Tests that a VM is rarely stopped if each stop takes long.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memfold_fold::EngineSettings;
use memfold_testkit::wait_until;

use super::harness::{Ram, Running, SlowStop, domain, folded, pattern};
use super::snapshots::image;

const LIMIT: Duration = Duration::from_secs(60);

const TAKES: Duration = Duration::from_millis(300);

const fn slow(is_refused: bool) -> SlowStop {
    SlowStop {
        takes: TAKES,
        is_refused,
    }
}

/// Waits for the first stop of the VM, and checks that the VM then runs most of the time.
fn assert_runs_mostly(ram: &Ram, case: &str) {
    let pauses = || ram.pauses.load(Ordering::SeqCst);
    wait_until("the VM is stopped", LIMIT, || pauses() > 0);
    let (first, begun) = (pauses(), Instant::now());
    std::thread::sleep(TAKES * 8);
    let (more, elapsed) = (pauses() - first, begun.elapsed());
    // This thread may have been late to see the first.
    assert!(TAKES * more <= elapsed / 10 + TAKES, "{case}: {more} stops");
}

#[test]
fn a_vm_whose_stops_take_long_is_stopped_at_most_a_tenth_of_the_time() {
    for is_refused in [false, true] {
        let domain = domain(&format!("slow-stops-{is_refused}"));
        let (mut a, mut b) = (Ram::new(), Ram::new());
        a.slow_stop = Some(slow(is_refused));
        a.fill(0, 64, 60);
        b.fill(0, 64, 60);
        let engine = Running::start();
        engine.add(1, &domain, &a, false);
        engine.add(2, &domain, &b, true);
        engine.cached(1, 1, "/f", 0, 64);
        engine.cached(2, 1, "/f", 0, 64);
        engine.wait("both folded", |s| folded(s, &[1, 2], 64));
        for (id, ram) in [(1, &mut a), (2, &mut b)] {
            ram.fill(0, 64, 61);
            engine.cached(id, 2, "/g", 0, 64);
        }
        assert_runs_mostly(&a, &format!("folding again, refused: {is_refused}"));
        assert!(a.holds(0, 64, 61));
    }
}

#[test]
fn a_clone_whose_stops_take_long_is_stopped_at_most_a_tenth_of_the_time() {
    for is_refused in [false, true] {
        let domain = domain(&format!("slow-back-{is_refused}"));
        let image = image(62);
        let mut ram = Ram::of_image(&image);
        ram.slow_stop = Some(slow(is_refused));
        let engine = Running::start_with(&EngineSettings {
            fold_back_interval: Duration::from_millis(100),
            ..EngineSettings::default()
        });
        engine.add(1, &domain, &ram, false);
        for at in 0..100 {
            ram.page(at).fill(7);
            ram.fill_page(at, 62);
        }
        assert_runs_mostly(&ram, &format!("folding back, refused: {is_refused}"));
        assert!((0..100).all(|at| ram.page(at) == pattern(62, at)));
    }
}
