//! Test of daemons that are killed at random instants while guests read and write. VMs keep
//! running, and the next daemon adopts them.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use memfold_api::{Client, FullReport, VmInfo};
use memfold_lab::{DiskMode, Lab};
use memfold_ledger::shared_frames;
use memfold_testkit::{bound, dose, patience, wait_for};

use crate::served::{Random, Served, exec};
use crate::support::{self, BOOT, MEMORY};

const NAMES: [&str; 2] = ["buffered", "direct"];
/// Longest time that a VM may be seen stopped. Its own library stops it for milliseconds; a loaded
/// machine delays the VM and the observer.
const LONGEST_STOP: Duration = Duration::from_secs(3);

/// Waits until the agents of both VMs have reported their inventory.
fn wait_ready(client: &Client) {
    let end = Instant::now() + patience(BOOT);
    loop {
        let report: FullReport = client.get("/v1/report").unwrap();
        let ready = |name: &&str| {
            report
                .fold
                .vms
                .iter()
                .any(|vm| vm.name == **name && vm.agent_ready)
        };
        if NAMES.iter().all(ready) {
            return;
        }
        assert!(
            Instant::now() < end,
            "agents are not back: {:?}",
            report.fold.vms
        );
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// Watches the run state of a VM, until `over`. Returns its longest time in another state than
/// running, and how often it was seen so.
fn watch(state: &Path, name: &str, over: &AtomicBool) -> (Duration, u32) {
    let mut qmp = support::qmp(state, name);
    let (mut longest, mut times) = (Duration::ZERO, 0);
    let mut stopped: Option<Instant> = None;
    while !over.load(Ordering::SeqCst) {
        let status = qmp.query("query-status").unwrap();
        if status["status"] == "running" {
            stopped = None;
        } else {
            times += u32::from(stopped.is_none());
            let since = *stopped.get_or_insert_with(Instant::now);
            longest = longest.max(since.elapsed());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    (longest, times)
}

#[test]
fn if_the_daemon_is_killed_vms_run_on_and_the_next_daemon_continues_folding() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::Builder::new()
        .prefix("memfold-killed.")
        .tempdir()
        .unwrap();
    let state = directory.path();
    let mut served = Served::new(state, &NAMES);
    served.start();
    let client = served.answers();
    for (name, image, disk) in [
        (NAMES[0], "trixie-a", DiskMode::Buffered),
        (NAMES[1], "trixie-b", DiskMode::Direct),
    ] {
        served.run_warm(&Lab::spec(name, image, MEMORY, disk).unwrap());
    }
    wait_ready(&client);
    let pids: Vec<i32> = client
        .get::<Vec<VmInfo>>("/v1/vms")
        .unwrap()
        .iter()
        .map(|vm| vm.pid)
        .collect();
    // The agent must not run the work, because the agent ends its commands when its daemon is gone.
    let deaths = dose("MEMFOLD_DAEMON_KILLS", 3);
    // Each kill takes 5 s at most.
    let seconds = 10 + 5 * deaths;
    let work = format!(
        "{}\n{}\nsums /run/sums.before; systemd-run -q --unit=attack --property=StandardOutput=file:/run/attack.out --property=StandardError=file:/run/attack.err /opt/attack.sh {seconds} 150",
        support::install(),
        support::sums()
    );
    std::thread::scope(|scope| {
        for name in NAMES {
            let (state, work) = (state, &work);
            scope.spawn(move || exec(&Client::new(&state.join("s")).unwrap(), name, work));
        }
    });

    let seed = u64::from(std::process::id()) << 20 | 1;
    println!("seed {seed}");
    let mut random = Random(seed);
    let over = AtomicBool::new(false);
    let stops = std::thread::scope(|scope| {
        let watches = NAMES.map(|name| scope.spawn(|| watch(state, name, &over)));
        for death in 0..deaths {
            // A third of the daemons dies while it adopts the VMs, the others while they fold.
            let life = if death % 3 == 0 {
                random.below_ms(500)
            } else {
                served.answers();
                random.below_ms(7000)
            };
            std::thread::sleep(life);
            served.kill();
            std::thread::sleep(random.below_ms(400));
            served.start();
        }
        let client = served.answers();
        wait_ready(&client);
        over.store(true, Ordering::SeqCst);
        watches.map(|watch| watch.join().unwrap())
    });
    for (name, (longest, times)) in NAMES.iter().zip(stops) {
        println!("{name}: seen stopped {times} times, longest {longest:?}");
        assert!(
            longest < bound(LONGEST_STOP),
            "{name} stood still for {longest:?}"
        );
    }
    assert_eq!(stops[0].1, 0, "a VM with buffered I/O is never stopped");

    let client = Client::new(&state.join("s")).unwrap();
    let now: Vec<VmInfo> = client.get("/v1/vms").unwrap();
    assert_eq!(now.iter().map(|vm| vm.pid).collect::<Vec<_>>(), pids);
    let stats = || client.get::<FullReport>("/v1/report").unwrap().fold;
    let done = |name: &str| {
        let wait = "while systemctl is-active -q attack; do sleep 1; done; cat /run/attack.out";
        (name.to_owned(), exec(&client, name, wait).stdout)
    };
    for (name, printed) in NAMES.map(done) {
        println!("{name}:\n{printed}");
        assert!(printed.ends_with("all errors 0\n"), "{name}: {printed}");
    }
    // The guests read files again, so there is something to fold.
    let first = stats();
    for name in NAMES {
        let read = "echo 1 > /proc/sys/vm/drop_caches; find /usr/bin /usr/lib/x86_64-linux-gnu -maxdepth 1 -type f -exec cat {} + > /dev/null";
        exec(&client, name, read);
    }
    let last = support::wait_stats(
        "folding goes on after the last daemon",
        Duration::from_secs(300),
        stats,
        |now| {
            NAMES.iter().all(|name| {
                let (now, first) = (support::vm(now, name), support::vm(&first, name));
                let done = |vm: &memfold_fold::VmStats| vm.folded_pages + vm.refolded_pages;
                done(now) > done(first) + 1000
            })
        },
    );
    for name in NAMES {
        println!("{}", support::line(support::vm(&last, name)));
        let status = support::qmp(state, name).query("query-status").unwrap();
        assert_eq!(status["status"], "running");
    }
    for name in NAMES {
        let script = format!(
            "{}; sums /run/sums.after; cmp /run/sums.before /run/sums.after",
            support::sums()
        );
        exec(&client, name, &script);
    }
    the_store_is_one(state, stats);
    guests_that_stood_still_get_the_time(&mut served, state);
}

/// A VM that is paused while the daemon is replaced gets the host's time when it runs again,
/// whether the daemon resumes it or another program does.
fn guests_that_stood_still_get_the_time(served: &mut Served, state: &Path) {
    let now = || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    let client = served.answers();
    for name in NAMES {
        let back = format!("date -u -s @{} > /dev/null", now() - 3600.0);
        exec(&client, name, &back);
        support::qmp(state, name).query("stop").unwrap();
    }
    served.kill();
    served.start();
    let client = served.answers();
    wait_for("the next daemon sees both standing still", BOOT, || {
        let vms: Vec<VmInfo> = client.get("/v1/vms").unwrap();
        let states: Vec<String> = vms.into_iter().map(|vm| vm.state).collect();
        (states == ["paused", "paused"]).then_some(()).ok_or(states)
    });
    let [first, second] = NAMES;
    let _: VmInfo = client
        .post(&format!("/v1/vms/{first}/resume"), &())
        .unwrap();
    support::qmp(state, second).query("cont").unwrap();
    for name in NAMES {
        wait_for("the guest has the host's time", BOOT, || {
            let guest: f64 = exec(&client, name, "date +%s")
                .stdout
                .trim()
                .parse()
                .unwrap();
            let behind = now() - guest;
            (behind < bound(Duration::from_secs(30)).as_secs_f64())
                .then_some(())
                .ok_or((name, behind))
        });
    }
}

/// Checks that both VMs map the store of the first daemon and no other, and share its frames.
/// First, pages that the sums have read must be folded (which happens pause by pause for a VM with
/// direct I/O), and unused pages of earlier daemons must be given back.
fn the_store_is_one(state: &Path, stats: impl FnMut() -> memfold_fold::EngineStats) {
    let in_use = |stats: &memfold_fold::EngineStats| -> (u64, u64) {
        let mapped = |vm: &memfold_fold::VmStats| vm.mapped_pages - vm.copied_pages;
        let stored = stats.domains[0].store_bytes / 4096;
        (stats.vms.iter().map(mapped).sum(), stored)
    };
    let stats = support::wait_stats(
        "a store page serves 1.3 VM pages",
        Duration::from_secs(300),
        stats,
        |now| {
            let (mapped, stored) = in_use(now);
            mapped * 10 > stored * 13
        },
    );
    let (mapped, stored) = in_use(&stats);
    let ram = NAMES.map(|name| support::ram(state, name));
    let mut inodes = std::collections::BTreeSet::new();
    for (pid, _) in &ram {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        inodes.extend(
            maps.lines()
                .filter(|l| l.contains("memfold:lab"))
                .filter_map(|l| {
                    let inode = l.split_whitespace().nth(4)?;
                    Some(inode.to_owned())
                }),
        );
    }
    let shared = shared_frames((ram[0].0, &ram[0].1), (ram[1].0, &ram[1].1)).unwrap();
    println!(
        "stores mapped: {inodes:?}; pages mapped {mapped}, in the store {stored}; frames shared {shared}"
    );
    assert_eq!(inodes.len(), 1);
    // Only pages that both guests have accessed since they were mapped are in both page tables.
    assert!(shared > 500, "{shared} frames shared");
}
