//! Chaos test: processes and file systems are stopped, killed, filled and slowed at random while
//! clients call every command. Every call returns within its deadline, the daemon ends when asked,
//! no guest byte is wrong, and nothing is left over.
//!
//! ```text
//!   what is disturbed   disturb.rs     QEMUs, daemon, lender, nbdkit, relay, libvirtd, file systems; agents from within their guests (guest/pest.sh)
//!   what is called      call.rs        every command of 'memfold --help', by its words and its deadline
//!   what is checked     guests.rs      guests check their own data; here: deadlines, exit codes, logs, what is left over
//!   where               testbed.rs     file systems of its own, two daemons, and who starts them again
//!                       libvirt.rs     a libvirtd with two domains
//! ```
//!
//! `MEMFOLD_CHAOS_SEED` repeats the same disturbances and calls in the same order, but not at the
//! same instants. `MEMFOLD_CHAOS_WITHOUT` leaves some out (names of the tables at the end,
//! separated by commas), which helps to find the cause of a failure.

mod call;
mod disturb;
mod guests;
mod libvirt;
mod testbed;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memfold_api::VmInfo;
use memfold_snapshot::SnapshotInfo;
use memfold_testkit::{patience, seconds, wait_until};

use self::call::Calls;
use self::disturb::{Deck, KEPT, names};
use self::testbed::{END, LENDER_END, Testbed};
use crate::served::Random;
use crate::support;

/// Number of threads that disturb. The next constant: number of threads that call commands.
const DISTURBERS: usize = 2;
const CALLERS: usize = 3;

/// Duration from which on each disturbance must have come, and each command must have succeeded at
/// least once.
const LONG: Duration = Duration::from_secs(1500);

/// Most snapshots whose VMs are started at the end for checks.
const CHECKED: usize = 2;

fn seed() -> u64 {
    let given = std::env::var("MEMFOLD_CHAOS_SEED").ok();
    given.map_or_else(
        || memfold_vm::overlay::unique() | 1,
        |text| text.parse().unwrap(),
    )
}

#[test]
fn under_random_kills_stops_and_full_disks_every_request_ends_and_no_byte_is_wrong() {
    let Some(_turn) = support::turn() else {
        return;
    };
    if !libvirt::is_there() {
        return;
    }
    let time = seconds("MEMFOLD_CHAOS_SECONDS", 120);
    let seed = seed();
    let without = std::env::var("MEMFOLD_CHAOS_WITHOUT").unwrap_or_default();
    let without: Vec<String> = without
        .split(',')
        .map(str::to_owned)
        .filter(|name| !name.is_empty())
        .collect();
    println!(
        "MEMFOLD_CHAOS_SEED={seed} MEMFOLD_CHAOS_SECONDS={}",
        time.as_secs()
    );
    let testbed = Testbed::new();
    assert_eq!(
        call::forgotten(&testbed),
        Vec::<String>::new(),
        "commands without a call, or calls without a command"
    );
    let faults = &testbed.faults;
    for service in testbed.services() {
        service.wait_serving(faults, &testbed.is_full);
    }
    let ksm = ksm_settings();
    guests::copy_programs(&testbed);
    let mut foreign = Ended(guests::foreign(&testbed));
    guests::begin(&testbed, seed);
    faults.note("it begins");

    let mut random = Random(seed);
    let deck = Deck::new(random.below(u64::MAX) | 1, &without);
    let calls = Calls::new(random.below(u64::MAX) | 1, &without);
    chaos(&testbed, &deck, &calls, time);
    faults.note("it is over");

    for service in testbed.services() {
        service.wait_serving(faults, &testbed.is_full);
    }
    guests::settle(&testbed);
    settled(&testbed, &mut foreign);
    println!("\n{}\n\n{}", deck.table(), calls.table());
    for service in testbed.services() {
        println!(
            "the {} could not start {} times while a disk was full",
            service.name,
            service.failed_starts()
        );
        for line in service
            .log()
            .lines()
            .filter(|line| line.contains("panicked"))
        {
            faults.add(format!("the {}'s log: {line}", service.name));
        }
    }
    if ksm_settings() != ksm {
        faults.add(format!(
            "KSM's settings are not as before: {ksm:?}, now {:?}",
            ksm_settings()
        ));
    }
    if time >= LONG {
        for name in deck.missing().into_iter().chain(calls.never_done()) {
            faults.add(format!("'{name}' never came, or never succeeded"));
        }
    }
    let found = faults.all();
    assert!(
        found.is_empty(),
        "MEMFOLD_CHAOS_SEED={seed}: {} faults:\n{}",
        found.len(),
        found.join("\n")
    );
}

fn chaos(testbed: &Testbed, deck: &Deck, calls: &Calls, time: Duration) {
    let (over, quiet) = (AtomicBool::new(false), AtomicBool::new(false));
    let (over, quiet) = (&over, &quiet);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while !quiet.load(Ordering::Relaxed) {
                for service in testbed.services() {
                    service.look_after(&testbed.faults, &testbed.is_full);
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let disturbers = [(); DISTURBERS].map(|()| scope.spawn(move || deck.run(testbed, over)));
        let callers = [(); CALLERS].map(|()| scope.spawn(move || calls.run(testbed, over)));
        std::thread::sleep(time);
        over.store(true, Ordering::Relaxed);
        // A thread that panics has printed its message; the others end all the same.
        let ends: Vec<_> = disturbers
            .into_iter()
            .chain(callers)
            .map(std::thread::ScopedJoinHandle::join)
            .collect();
        quiet.store(true, Ordering::Relaxed);
        assert!(
            ends.iter().all(Result::is_ok),
            "a thread of the test panicked"
        );
    });
}

/// Ends all disturbances, checks the results, and ends the testbed.
fn settled(testbed: &Testbed, foreign: &mut Ended) {
    let faults = &testbed.faults;
    say(testbed, &["fold", "pause"], &[0]);
    guests::check_so_far(testbed);
    // This save must succeed, whatever happened to others.
    say(
        testbed,
        &["snapshot", "save", "writer", "after", "--keep", "hot"],
        &[0],
    );
    for name in KEPT {
        let pages = guests::unfold(testbed, name);
        faults.note(&format!("{name}: {pages} pages unfolded"));
    }
    guests::check(testbed);
    say(testbed, &["return", "swapper"], &[0, 1]);
    say(
        testbed,
        &["vm", "stop", "--all", "--timeout", "60"],
        &[0, 4],
    );
    check_snapshots(testbed);
    foreign.end();
    let _ = std::fs::remove_file(testbed.root.join("foreign.sock"));
    for name in names(&testbed.snapshots.place.join("segments")) {
        if !name.contains('.') {
            say(testbed, &["segment", "remove", &name], &[0]);
        }
    }
    testbed.libvirt.destroy_domains();
    for domain in libvirt::DOMAINS {
        say(testbed, &["libvirt", "disable", domain], &[0]);
    }
    wait_until(
        "the daemon forgets libvirt's domains",
        libvirt::FORGOTTEN,
        || list(testbed).iter().all(|vm| vm.libvirt.is_none()),
    );
    // KSM may not be steered.
    say(testbed, &["ksm", "stop"], &[0, 1]);
    let left: Vec<String> = list(testbed)
        .into_iter()
        .map(|vm| format!("{} ({})", vm.name, vm.origin))
        .collect();
    if left.iter().any(|vm| !vm.starts_with("foreign")) {
        faults.add(format!("VMs are left: {left:?}"));
    }
    testbed.daemon.end(END, faults);
    testbed.libvirt.end(faults);
    testbed.lender.end(LENDER_END, faults);
    left_over(testbed);
}

fn list(testbed: &Testbed) -> Vec<VmInfo> {
    testbed.client().get("/v1/vms").unwrap()
}

/// Checks that snapshots saved meanwhile are complete or reported as broken, and starts VMs from
/// some of them.
fn check_snapshots(testbed: &Testbed) {
    let faults = &testbed.faults;
    let mut list: Vec<SnapshotInfo> = testbed.client().get("/v1/snapshots").unwrap();
    // The newest comes first, because it may build on an older one.
    list.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.created_s));
    let mut checked = 0;
    for snapshot in &list {
        if let Some(problem) = &snapshot.problem {
            faults.add(format!(
                "snapshot '{}' is listed with a problem: {problem}",
                snapshot.name
            ));
            continue;
        }
        say(testbed, &["snapshot", "verify", &snapshot.name], &[0]);
        let has_writer = snapshot.vm == "writer" || snapshot.vm == "clone-1";
        if has_writer && snapshot.name != "seed" && checked < CHECKED {
            guests::check_saved(testbed, &snapshot.name);
            checked += 1;
        }
    }
    faults.note(&format!(
        "{} snapshots verified, VMs of {checked} checked",
        list.len()
    ));
    for snapshot in list {
        say(testbed, &["snapshot", "remove", &snapshot.name], &[0]);
    }
}

/// Runs a command, which must end with one of these codes.
fn say(testbed: &Testbed, words: &[&str], codes: &[i32]) {
    let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
    let began = Instant::now();
    let done = testbed.command(&words).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    testbed.faults.note(&format!(
        "memfold {}: {} after {:.1} s",
        words.join(" "),
        done.status,
        began.elapsed().as_secs_f64()
    ));
    if done.status.code().is_none_or(|code| !codes.contains(&code)) {
        testbed.faults.add(format!(
            "memfold {}: {}: {said}",
            words.join(" "),
            done.status
        ));
    }
}

/// Checks that no processes, mounts, loop devices, sockets or overlays are left when daemons and
/// VMs have ended.
fn left_over(testbed: &Testbed) {
    let faults = &testbed.faults;
    let end = Instant::now() + patience(Duration::from_secs(20));
    let mut processes = testbed.processes();
    while !processes.is_empty() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(200));
        processes = testbed.processes();
    }
    for (pid, words) in processes {
        faults.add(format!("process {} is left: {words}", pid.as_raw_nonzero()));
    }
    let mut places = vec![
        testbed.overlays.place.clone(),
        testbed.state.place.join("vms"),
        testbed.snapshots.place.join("shelf"),
        testbed.snapshots.place.join("segments"),
        testbed.root.join("lending/lend"),
    ];
    places.retain(|place| place.exists());
    for place in places {
        // The number of a segment's last generation is kept forever.
        let left: Vec<String> = names(&place)
            .into_iter()
            .filter(|name| Path::new(name).extension().is_none_or(|end| end != "last"))
            .collect();
        if !left.is_empty() {
            faults.add(format!("{} holds {left:?}", place.display()));
        }
    }
    for socket in sockets_below(&testbed.root) {
        faults.add(format!("a socket is left: {socket}"));
    }
    let own = [
        &testbed.state.place,
        &testbed.overlays.place,
        &testbed.snapshots.place,
    ]
    .map(|place| place.display().to_string());
    let root = testbed.root.display().to_string();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    for place in mounts.lines().filter_map(|line| line.split(' ').nth(4)) {
        if place.starts_with(&root) && !own.iter().any(|own| own == place) {
            faults.add(format!("a mount is left: {place}"));
        }
    }
    for device in names(Path::new("/sys/block")) {
        let file = std::fs::read_to_string(format!("/sys/block/{device}/loop/backing_file"));
        let file = file.unwrap_or_default();
        if file.starts_with(&root)
            && file.trim()
                != testbed
                    .snapshots
                    .place
                    .with_extension("image")
                    .display()
                    .to_string()
        {
            faults.add(format!("a loop device is left: {device} of {file}"));
        }
    }
}

/// Returns the settings of KSM that memfold changes.
fn ksm_settings() -> Vec<String> {
    let read = |name: &str| {
        let value = std::fs::read_to_string(format!("/sys/kernel/mm/ksm/{name}"));
        format!("{name}={}", value.unwrap_or_default().trim())
    };
    [
        "run",
        "sleep_millisecs",
        "pages_to_scan",
        "advisor_mode",
        "use_zero_pages",
        "smart_scan",
    ]
    .map(read)
    .into()
}

fn sockets_below(place: &Path) -> Vec<String> {
    let found = std::process::Command::new("find")
        .arg(place)
        .args(["-type", "s"])
        .output()
        .unwrap();
    let found = String::from_utf8(found.stdout).unwrap();
    found.lines().map(str::to_owned).collect()
}

/// A process that is killed when this is dropped.
struct Ended(std::process::Child);

impl Ended {
    fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.end();
    }
}
