//! Tests of orders for which memfold's library in QEMU stops the VM for a moment. The VM must
//! resume in every case.

mod support;

use std::sync::atomic::Ordering;

use memfold_folder::{Folder, Monitor};
use memfold_wire::library::{Freeze, Order, Outcome, Reply};
use support::{Bench, FakeQemu};

const STOPPED: Freeze = Freeze::Stopped {
    limit_us: 1_000_000,
};

/// Creates 64 folded pages that were then written. Returns the RAM, and the store page at which a
/// run has the pages' new bytes.
fn bench(monitor: Option<Monitor>) -> Option<(Bench, u64)> {
    let mut bench = Bench::with(Box::leak(Box::new(Folder::new(None, monitor))), 64, 1)?;
    bench.fill(1);
    let at = bench.publish(0, 64);
    bench.assert_folds(Freeze::Move, bench.run(0, 64, at));
    bench.fill(2);
    let again = bench.publish(0, 64);
    Some((bench, again))
}

#[test]
fn if_folding_needs_a_stopped_vm_the_vm_is_stopped_once_for_all_runs_and_resumed() {
    let qemu = FakeQemu::start();
    let Some((bench, again)) = bench(Some(Monitor::new(qemu.path.clone()))) else {
        return;
    };
    let order = Order::Fold {
        freeze: STOPPED,
        runs: vec![bench.run(0, 32, again), bench.run(32, 32, again + 32)],
    };
    match bench.folder.execute(&order, None) {
        Reply::Outcomes {
            outcomes,
            stopped_ns,
            ..
        } => {
            assert_eq!(outcomes, [Outcome::Done; 2]);
            assert!(stopped_ns > 0);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(bench.release(STOPPED, 32, 32), Outcome::Done);
    bench.assert_holds(2, 0, 64);
    let once = [
        "query-status",
        "query-migrate",
        "stop",
        "query-status",
        "cont",
    ];
    let commands = qemu.commands.lock().unwrap().clone();
    assert_eq!(commands[0], "qmp_capabilities");
    assert_eq!(commands[1..], [once, once].concat());
}

#[test]
fn if_a_vm_was_stopped_before_folding_it_is_not_resumed_afterwards() {
    let qemu = FakeQemu::start();
    let Some((bench, again)) = bench(Some(Monitor::new(qemu.path.clone()))) else {
        return;
    };
    qemu.running.store(false, Ordering::SeqCst);
    assert_eq!(bench.fold(STOPPED, bench.run(0, 64, again)), Outcome::Late);
    assert!(!qemu.running.load(Ordering::SeqCst));
    bench.assert_holds(2, 0, 64);
}

#[test]
fn after_the_time_limit_of_a_vm_stop_no_further_run_is_folded() {
    let qemu = FakeQemu::start();
    let Some((bench, again)) = bench(Some(Monitor::new(qemu.path.clone()))) else {
        return;
    };
    let none = Freeze::Stopped { limit_us: 0 };
    assert_eq!(bench.fold(none, bench.run(0, 64, again)), Outcome::Late);
    assert!(qemu.running.load(Ordering::SeqCst));
    let order = Order::Fold {
        freeze: Freeze::Stopped {
            limit_us: 1_000_001,
        },
        runs: vec![bench.run(0, 64, again)],
    };
    assert!(matches!(
        bench.folder.execute(&order, None),
        Reply::Error { .. }
    ));
}

#[test]
fn if_qemus_monitor_closes_the_connection_the_command_cont_is_repeated() {
    let qemu = FakeQemu::start();
    let Some((bench, again)) = bench(Some(Monitor::new(qemu.path.clone()))) else {
        return;
    };
    qemu.hang_ups.store(3, Ordering::SeqCst);
    bench.assert_folds(STOPPED, bench.run(0, 64, again));
    assert!(qemu.running.load(Ordering::SeqCst));
    // The next pause works, too.
    bench.assert_folds(STOPPED, bench.run(0, 64, again));
}

#[test]
fn without_a_qemu_monitor_folding_that_stops_the_vm_is_refused() {
    let Some((bench, again)) = bench(None) else {
        return;
    };
    let order = Order::Fold {
        freeze: STOPPED,
        runs: vec![bench.run(0, 64, again)],
    };
    match bench.folder.execute(&order, None) {
        Reply::Error { reason } => assert!(reason.contains("MEMFOLD_QEMU_MONITOR"), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_vm_stopped_by_the_daemon_resumes_on_request_or_when_the_connection_ends() {
    let qemu = FakeQemu::start();
    let folder = Folder::new(None, Some(Monitor::new(qemu.path.clone())));
    let runs = || qemu.running.load(Ordering::SeqCst);
    assert!(matches!(
        folder.execute(&Order::Continue, None),
        Reply::Error { .. }
    ));
    assert_eq!(folder.execute(&Order::Stop, None), Reply::Ok);
    assert!(!runs());
    assert!(
        matches!(folder.execute(&Order::Stop, None), Reply::Error { .. }),
        "it does not run"
    );
    assert_eq!(folder.execute(&Order::Continue, None), Reply::Ok);
    assert!(runs());
    assert_eq!(folder.execute(&Order::Stop, None), Reply::Ok);
    folder.disconnected();
    assert!(runs());
    // The library must not resume a VM that somebody else has stopped.
    qemu.running.store(false, Ordering::SeqCst);
    folder.disconnected();
    assert!(!runs());
}

#[test]
fn a_vm_that_is_migrated_is_not_stopped_and_does_not_run_again_after_its_migration() {
    let qemu = FakeQemu::start();
    let folder = Folder::new(None, Some(Monitor::new(qemu.path.clone())));
    *qemu.migration.lock().unwrap() = "active";
    assert!(matches!(
        folder.execute(&Order::Stop, None),
        Reply::Error { .. }
    ));
    assert!(qemu.running.load(Ordering::SeqCst));
    // A migration that begins and ends while the VM is stopped.
    *qemu.migration.lock().unwrap() = "none";
    assert_eq!(folder.execute(&Order::Stop, None), Reply::Ok);
    let ends = ["finish-migrate", "finish-migrate", "postmigrate"];
    qemu.states.lock().unwrap().extend(ends);
    assert_eq!(folder.execute(&Order::Continue, None), Reply::Ok);
    assert!(qemu.states.lock().unwrap().is_empty());
    let sent = |command: &str| qemu.commands.lock().unwrap().iter().any(|c| c == command);
    assert!(!sent("cont"), "another QEMU runs the VM");
    // A migration that fails while the VM is stopped.
    qemu.running.store(true, Ordering::SeqCst);
    assert_eq!(folder.execute(&Order::Stop, None), Reply::Ok);
    qemu.states.lock().unwrap().push_back("finish-migrate");
    assert_eq!(folder.execute(&Order::Continue, None), Reply::Ok);
    assert!(sent("cont") && qemu.running.load(Ordering::SeqCst));
}

#[test]
fn a_vm_that_qemu_does_not_resume_in_time_resumes_at_the_next_order_or_disconnection() {
    let qemu = FakeQemu::start();
    let folder = Folder::new(None, Some(Monitor::new(qemu.path.clone())));
    let runs = || qemu.running.load(Ordering::SeqCst);
    for is_disconnected in [false, true] {
        assert_eq!(folder.execute(&Order::Stop, None), Reply::Ok);
        // The library tries a hundred times.
        qemu.hang_ups.store(101, Ordering::SeqCst);
        assert_eq!(folder.execute(&Order::Continue, None), Reply::Ok);
        folder.execute(&Order::Stats, None);
        assert!(!runs());
        if is_disconnected {
            folder.disconnected();
        } else {
            folder.execute(&Order::Stats, None);
        }
        assert!(runs());
    }
    // The VM was resumed only once: somebody else stops it.
    qemu.running.store(false, Ordering::SeqCst);
    folder.execute(&Order::Stats, None);
    folder.disconnected();
    assert!(!runs());
}
