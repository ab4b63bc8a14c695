//! What right-sizing costs while nothing happens: CPU time of the daemon with idle VMs, in each
//! mode in turns within one run, and CPU time of the agent in an idle guest.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use memfold_api::{Client, RightsizeMode, RightsizeReport, RightsizeRequest, VersionInfo};
use memfold_lab::{DiskMode, Lab};

use crate::served::{Served, exec, wait_agent};
use crate::support::{self, MEMORY};

const NAMES: [&str; 10] = [
    "idle-0", "idle-1", "idle-2", "idle-3", "idle-4", "idle-5", "idle-6", "idle-7", "idle-8",
    "idle-9",
];

const ROUNDS: u32 = 3;

/// Modes of right-sizing in each round.
const MODES: [RightsizeMode; 3] = [RightsizeMode::Off, RightsizeMode::Watch, RightsizeMode::On];

/// Most CPU time of the daemon's thread that sizes VMs, as a share of one core, with up to ten VMs.
const DAEMON: f64 = 0.001;

/// Most CPU time of the agent, as a share of one vCPU. Under emulation, an instruction of the guest
/// costs about ten times as much as on the processor.
const AGENT: f64 = 0.02;

/// Prints the CPU time of all threads of the agent, in nanoseconds, and the guest's uptime.
const AGENT_TIME: &str = "cat /proc/$(systemctl show -P MainPID memfold-agent)/task/*/schedstat \
    | awk '{ sum += $1 } END { printf \"%d \", sum }'; cut -d' ' -f1 /proc/uptime";

/// CPU time of the daemon's threads, in seconds, by the thread's name.
fn threads(pid: i32) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap()
        .flatten()
    {
        let read = |name: &str| std::fs::read_to_string(thread.path().join(name));
        // A thread may end meanwhile.
        let (Ok(name), Ok(time)) = (read("comm"), read("schedstat")) else {
            continue;
        };
        let ns: f64 = time.split(' ').next().unwrap().parse().unwrap();
        *sums.entry(name.trim().to_owned()).or_insert(0.0) += ns / 1e9;
    }
    sums
}

/// CPU time of an agent, and uptime of its guest, in seconds.
fn agent(client: &Client) -> (f64, f64) {
    let said = exec(client, NAMES[0], AGENT_TIME).stdout;
    let (ns, uptime) = said.trim().split_once(' ').unwrap();
    let ns: f64 = ns.parse().unwrap();
    (ns / 1e9, uptime.parse().unwrap())
}

/// Shares of one core that the daemon's threads use within `time`, in a mode.
fn measure(
    client: &Client,
    pid: i32,
    mode: RightsizeMode,
    time: Duration,
) -> BTreeMap<String, f64> {
    let request = RightsizeRequest { mode };
    let _: RightsizeReport = client.put("/v1/rightsize", &request).unwrap();
    std::thread::sleep(Duration::from_secs(5));
    let (before, began) = (threads(pid), Instant::now());
    std::thread::sleep(time);
    let (after, passed) = (threads(pid), began.elapsed().as_secs_f64());
    let share = |(name, time): (String, f64)| {
        let used = time - before.get(&name).unwrap_or(&0.0);
        (name, used.max(0.0) / passed)
    };
    after.into_iter().map(share).collect()
}

#[test]
fn sizing_ten_idle_vms_takes_less_than_a_thousandth_of_a_core_and_their_agents_little() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let time = Duration::from_secs(30);
    let directory = tempfile::Builder::new().prefix("memfold-idle.").tempdir();
    let directory = directory.unwrap();
    let mut served = Served::new(directory.path(), &NAMES).with(&["--rightsize", "off"]);
    served.start();
    let client = served.answers();
    let version: VersionInfo = client.get("/v1/version").unwrap();
    for name in NAMES {
        served.run_warm(&Lab::spec(name, "trixie-a", MEMORY, DiskMode::Buffered).unwrap());
        wait_agent(&client, name);
    }
    // What the guests do after their start, and what is folded of it.
    std::thread::sleep(time);

    // What the command itself costs the agent is measured first.
    let first = agent(&client);
    let begun = agent(&client);
    let mut shares: BTreeMap<String, BTreeMap<String, f64>> = BTreeMap::new();
    for round in 0..ROUNDS {
        for mode in MODES {
            let used = measure(&client, version.pid, mode, time);
            let all: f64 = used.values().sum();
            println!("round {round}, {mode:?}: {:.4} % of a core", all * 100.0);
            let sums = shares.entry(format!("{mode:?}")).or_default();
            for (name, share) in used {
                *sums.entry(name).or_insert(0.0) += share / f64::from(ROUNDS);
            }
        }
    }
    let ended = agent(&client);
    let command = begun.0 - first.0;
    let agent = (ended.0 - begun.0 - command).max(0.0) / (ended.1 - begun.1);
    println!("agent: {:.4} % of a vCPU", agent * 100.0);
    for (mode, used) in &shares {
        let mut used: Vec<_> = used.iter().filter(|(_, share)| **share > 1e-6).collect();
        used.sort_by(|a, b| b.1.total_cmp(a.1));
        println!("{mode}:");
        for (name, share) in used {
            println!("  {name:16} {:.4} %", share * 100.0);
        }
    }
    for mode in [RightsizeMode::Watch, RightsizeMode::On] {
        let share = shares[&format!("{mode:?}")]
            .get("rightsize")
            .copied()
            .unwrap_or(0.0);
        assert!(
            share <= DAEMON,
            "{mode:?}: {:.4} % of a core",
            share * 100.0
        );
    }
    assert!(
        agent <= AGENT,
        "the agent takes {:.3} % of a vCPU",
        agent * 100.0
    );
}
