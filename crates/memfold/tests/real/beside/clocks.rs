//! Tests of the wall clock of a guest whose VM was stopped: it is set to the host's, unless the
//! user asks to keep the old time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use memfold_api::{KeepChoice, RestoreRequest, SaveRequest};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_snapshot::ClockStep;
use memfold_testkit::{patience, slowness, wait_for};
use rustix::process::{Pid, Signal, kill_process};

use super::snapshots::MEMORY;
use crate::support::{self, BOOT};

const LIMIT: Duration = Duration::from_secs(300);

/// Seconds by which the tests set the guest's clock back.
const BACK: f64 = 3600.0;

/// Seconds that an emulated guest may take to answer on a busy machine.
fn slack() -> f64 {
    10.0 * slowness()
}

fn host() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64()
}

/// Returns the seconds that a guest's wall clock is behind the host's, its uptime, and the seconds
/// that its RTC is behind.
fn times(lab: &Lab, vm: &str) -> [f64; 3] {
    let script = "date +%s.%N; cut -d' ' -f1 /proc/uptime; cat /sys/class/rtc/rtc0/since_epoch";
    let said = lab.exec(vm, script, LIMIT).unwrap();
    let now = host();
    let numbers: Vec<f64> = said.lines().map(|line| line.parse().unwrap()).collect();
    println!(
        "{vm}: {:.3} s behind, up for {:.3} s, RTC {:.1} s behind",
        now - numbers[0],
        numbers[1],
        now - numbers[2]
    );
    [now - numbers[0], numbers[1], now - numbers[2]]
}

fn is_near(value: f64, wanted: f64) -> bool {
    (value - wanted).abs() < slack()
}

/// Returns the clock's state in `vm list` after the clock was set.
fn clock(lab: &Lab, vm: &str) -> ClockStep {
    wait_for("its clock is set", BOOT, || {
        let vms = lab.daemon().vms().list();
        let found = vms.iter().find(|info| info.name == vm).unwrap();
        found.clock.clone().filter(|step| !step.pending).ok_or(())
    })
}

/// Stops the VM's QEMU for a moment as soon as the VM is paused, so that the pause of a save is
/// long on any machine. Returns false if the save was over before.
fn hold_when_it_stands_still(lab: &Lab, vm: &str, is_over: &AtomicBool) -> bool {
    let (pid, _) = support::ram(lab.directory(), vm);
    let pid = Pid::from_raw(pid).unwrap();
    let mut qmp = support::qmp(lab.directory(), vm);
    while qmp.query("query-status").unwrap()["status"] == "running" {
        if is_over.load(Ordering::SeqCst) {
            return false;
        }
    }
    kill_process(pid, Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    kill_process(pid, Signal::CONT).unwrap();
    true
}

#[test]
fn a_resumed_guest_gets_the_host_time_and_its_monotonic_clock_does_not_jump() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let spec = Lab::spec("first", "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    lab.start_warm(spec).unwrap();
    lab.wait_ready("first", BOOT).unwrap();
    let set_back = || {
        let back = format!("date -u -s @{} > /dev/null", host() - BACK);
        lab.exec("first", &back, LIMIT).unwrap();
    };
    set_back();
    let past = SaveRequest {
        keep: KeepChoice::All,
        keep_clock: true,
        ..SaveRequest::new("first", "past")
    };
    lab.daemon().snapshots().save(&past).unwrap();
    let [behind, up, _] = times(&lab, "first");
    assert!(is_near(behind, BACK), "who keeps the clock keeps it");

    // The first command after a restore already sees the right time.
    lab.daemon()
        .snapshots()
        .restore("past", &RestoreRequest::new("copy"))
        .unwrap();
    lab.daemon()
        .vms()
        .wait_agent("copy", patience(BOOT))
        .unwrap();
    let [now, later, rtc] = times(&lab, "copy");
    assert!(is_near(now, 0.0) && is_near(rtc, 0.0));
    assert!(
        later > up - slack() && later < up + BACK / 4.0,
        "monotonic time jumped from {up} to {later}"
    );
    let step = clock(&lab, "copy");
    println!("{step:?}");
    assert_eq!(step.problem, None);
    assert!(is_near(step.behind_ms.unwrap() / 1000.0, BACK));
    assert!(step.left_ms.unwrap().abs() < 2000.0 * slowness());
    lab.stop("copy").unwrap();

    let kept = RestoreRequest {
        keep_clock: true,
        ..RestoreRequest::new("kept")
    };
    lab.daemon().snapshots().restore("past", &kept).unwrap();
    lab.daemon()
        .vms()
        .wait_agent("kept", patience(BOOT))
        .unwrap();
    let [behind, ..] = times(&lab, "kept");
    assert!(behind > BACK - slack(), "it was to keep its clock");
    let vms = lab.daemon().vms().list();
    assert_eq!(vms.iter().find(|vm| vm.name == "kept").unwrap().clock, None);

    // A VM that was saved and continued.
    let saved = (1..20).find_map(|number| {
        let request = SaveRequest {
            keep: KeepChoice::All,
            ..SaveRequest::new("first", format!("now-{number}"))
        };
        let is_over = AtomicBool::new(false);
        // A save whose pause was not seen has set the clock.
        set_back();
        std::thread::scope(|scope| {
            let holding = scope.spawn(|| hold_when_it_stands_still(&lab, "first", &is_over));
            let saved = lab.daemon().snapshots().save(&request).unwrap();
            is_over.store(true, Ordering::SeqCst);
            holding.join().unwrap().then_some(saved)
        })
    });
    let saved = saved.expect("the pause was never seen");
    assert!(
        saved.pause_ms > 100.0,
        "it stood still for {} ms only",
        saved.pause_ms
    );
    let step = clock(&lab, "first");
    assert!(is_near(step.behind_ms.unwrap() / 1000.0, BACK), "{step:?}");
    let [behind, ..] = times(&lab, "first");
    assert!(is_near(behind, 0.0));

    // Another program pauses and resumes both VMs. The VM that keeps its clock comes first, so that
    // its pause is noticed before that of the other.
    set_back();
    for vm in ["kept", "first"] {
        let mut other = support::qmp(lab.directory(), vm);
        other.query("stop").unwrap();
        wait_for("the daemon sees it standing still", LIMIT, || {
            let vms = lab.daemon().vms().list();
            let state = &vms.iter().find(|info| info.name == vm).unwrap().state;
            (state == "paused").then_some(()).ok_or(state.clone())
        });
        other.query("cont").unwrap();
    }
    wait_for(
        "the clock of a guest that others stopped is set",
        LIMIT,
        || {
            let [behind, ..] = times(&lab, "first");
            is_near(behind, 0.0).then_some(()).ok_or(behind)
        },
    );
    let [behind, ..] = times(&lab, "kept");
    assert!(behind > BACK - slack(), "it was to keep its clock");
}
