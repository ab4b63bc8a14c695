//! The study `memfold bench clones`: measures how long each clone of one saved VM takes to start,
//! and how much memory it uses.
//!
//! A Debian VM boots, a program in it fills memory with random bytes, and the VM is saved without
//! its page cache. Then clones are started one after the other, and all keep running. Each clone
//! starts when the identity of the previous one has been renewed. Then all clones are ended, and
//! the same number is started in a burst: each as soon as the previous one runs. The burst depends
//! mainly on the CPU time that guests use right after their start.
//!
//! | key | meaning |
//! |---|---|
//! | `p50_ms`, `p95_ms`, `max_ms` | time from the start of the command until guest code has written a byte to the clone's serial console and the command has ended |
//! | `burst` | the same times in the burst |
//! | `clones_ok` | clones that hold the program's random bytes in memory (restored, not rebooted), have a machine ID, a MAC address and a host name of their own, and began their random numbers anew |
//! | `pss_percent_of_booted` | mean proportional set size (`smaps_rollup`) of a clone's QEMU, in percent of that of the booted VM's QEMU, which shares with no VM. Measured after the clones have folded pages that they read since; also before folding, and without translated code of the emulator (none under KVM) |
//! | `freed_back_percent` | part of the private memory (`RssAnon`) that a clone took by reading files and that the host had back 6 s after the clone dropped its caches |

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use memfold_api::{RestoreRequest, SaveRequest, VmInfo};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab, wait_for};
use memfold_ledger::read::Proc;
use memfold_snapshot::Renew;
use memfold_units::ByteSize;
use memfold_vm::{Network, VmDirectory};
use serde_json::{Value, json};

use crate::figure::{self, Axis, Figure, Series};
use crate::record::{mib, sorted, spread};
use crate::study::Options;
use crate::wait::most_folded;

const BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// Time limit of one operation in a guest.
const LIMIT: Duration = Duration::from_secs(300);

/// RAM of each VM.
pub const MEMORY: ByteSize = ByteSize::mib(512);

const TEMPLATE: &str = "template";

/// Time after which the host must have freed memory back.
const BACK: Duration = Duration::from_secs(6);

/// Starts a program with a secret in its memory, which it prints at SIGUSR1, and a program that
/// keeps writing to the console.
pub const HOLD: &str = r#"cat > /run/hold.py <<'END'
import hashlib, os, signal
held = os.urandom(32 << 20)
def tell(*_):
    open("/run/held.new", "w").write(hashlib.sha256(held).hexdigest())
    os.rename("/run/held.new", "/run/held")
signal.signal(signal.SIGUSR1, tell)
tell()
while True:
    signal.pause()
END
cat > /run/tick.py <<'END'
import os, time
console = os.open("/dev/ttyS0", os.O_WRONLY)
while True:
    os.write(console, b"tick\n")
    time.sleep(0.02)
END
systemctl is-system-running --wait
systemd-run -q --unit=hold python3 /run/hold.py
systemd-run -q --unit=tick python3 /run/tick.py
while [ ! -s /run/held ]; do sleep 0.2; done; sleep 3; cat /run/held"#;

const CHECK: &str =
    "rm -f /run/held; systemctl kill -s USR1 hold; while [ ! -s /run/held ]; do sleep 0.1; done
cat /run/held; echo; cat /etc/machine-id; hostname; cat /sys/class/net/e*/address";

const READ: &str = "find /usr -xdev -type f | xargs cat > /dev/null";

const DROP: &str = "sync; echo 3 > /proc/sys/vm/drop_caches";

/// A VM that was started from a snapshot.
pub struct Clone {
    name: String,
    pid: i32,
    /// Milliseconds until its guest has written to the console.
    pub ms: f64,
}

/// Runs the study `clones`. Returns its JSON record, with the parts `results` and `samples`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    measure("trixie-a", options.pick(10, 30))
}

/// Measures `number_of_clones` clones of a VM that boots the guest image `image`.
pub fn measure(image: &str, number_of_clones: usize) -> anyhow::Result<Value> {
    let lab = Lab::new(EngineSettings::default())?;
    let mut spec = Lab::spec(TEMPLATE, image, MEMORY, DiskMode::Buffered)?;
    spec.network = Network::User;
    lab.boot(vec![spec], BOOT_TIMEOUT)?;
    let held = lab.exec(TEMPLATE, HOLD, LIMIT)?;
    let held = held.lines().last().unwrap_or_default().to_owned();
    let template = lab.exec(TEMPLATE, CHECK, LIMIT)?;
    let booted = sizes(&lab)?.remove(TEMPLATE);
    let booted = booted.context("the daemon's memory report lacks the template VM")?;
    let request = SaveRequest::new(TEMPLATE, TEMPLATE);
    let saved = lab.daemon().snapshots().save(&request)?;
    lab.stop(TEMPLATE)?;

    let began = Instant::now();
    let mut clones = Vec::new();
    for number in 1..=number_of_clones {
        let name = format!("clone-{number}");
        let clone = start(&lab, TEMPLATE, &name, Renew::Identity)?;
        wait_renewed(&lab)?;
        // The program that measures the start is no longer needed.
        lab.exec(&clone.name, "systemctl stop tick", LIMIT)?;
        clones.push(clone);
    }
    let all_s = began.elapsed().as_secs_f64();
    let idle = || -> anyhow::Result<Vec<Size>> {
        let sizes = sizes(&lab)?;
        let of = |clone: &Clone| sizes.get(&clone.name).copied();
        Ok(clones.iter().filter_map(of).collect())
    };
    let apart = idle()?;
    lab.fold(true)?;
    most_folded(&lab, |vm| vm.mapped_pages)?;
    let idle = idle()?;
    lab.fold(false)?;
    let names: Vec<&str> = clones.iter().map(|clone| clone.name.as_str()).collect();
    let said = lab.exec_all(&names, CHECK, LIMIT)?;
    let ok = different(&held, &template, &said);
    let back = free(&lab, &clones[0])?;
    names.iter().try_for_each(|name| lab.stop(name))?;
    // Each clone starts as soon as the previous one runs.
    let burst = |n| start(&lab, TEMPLATE, &format!("burst-{n}"), Renew::Identity);
    let burst = (1..=number_of_clones).map(|n| Ok(burst(n)?.ms));
    let burst = burst.collect::<anyhow::Result<Vec<f64>>>()?;
    let times: Vec<f64> = clones.iter().map(|clone| clone.ms).collect();
    let of = |part: fn(&Size) -> f64| idle.iter().map(part).collect::<Vec<f64>>();
    let percent = |sizes: &[Size], part: fn(&Size) -> f64| {
        sizes.iter().map(part).sum::<f64>() / sizes.len() as f64 * 100.0 / part(&booted)
    };
    Ok(json!({
        "samples": {
            "start_ms": times,
            "burst_start_ms": burst,
            "pss_mib": of(|size| size.pss),
            "pss_before_folding_mib": apart.iter().map(|size| size.pss).collect::<Vec<f64>>(),
            "emulated_code_mib": of(|size| size.emulated_code),
            "snapshot_pages": saved.counts,
            "freed": back,
        },
        "results": {
            "clones": number_of_clones,
            "clones_ok": ok,
            "p50_ms": percentile(&times, 50),
            "p95_ms": percentile(&times, 95),
            "max_ms": percentile(&times, 100),
            "all_set_apart_s": all_s,
            "burst": {
                "p50_ms": percentile(&burst, 50),
                "p95_ms": percentile(&burst, 95),
                "max_ms": percentile(&burst, 100),
            },
            "pss_mib": spread(of(|size| size.pss)),
            "booted_pss_mib": booted.pss,
            "pss_percent_of_booted": percent(&idle, |size| size.pss),
            "pss_percent_of_booted_before_folding": percent(&apart, |size| size.pss),
            "emulated_code_mib": spread(of(|size| size.emulated_code)),
            "booted_emulated_code_mib": booted.emulated_code,
            "pss_percent_of_booted_without_emulated_code": percent(&idle, |size| size.pss - size.emulated_code),
            "freed_back_percent": back["back_percent"],
        },
    }))
}

/// Starts VM `name` from a snapshot, and waits until its guest has written to the console.
pub fn start(lab: &Lab, snapshot: &str, name: &str, renew: Renew) -> anyhow::Result<Clone> {
    let request = RestoreRequest {
        renew,
        ..RestoreRequest::new(name)
    };
    let console = VmDirectory::of(lab.directory(), name).console_log();
    let began = Instant::now();
    let vm = lab.daemon().snapshots().restore(snapshot, &request)?;
    let late = format!("the guest of '{name}' wrote nothing to its serial console");
    wait_for(late, (LIMIT, Duration::from_millis(1)), || {
        let is_written = std::fs::metadata(&console).is_ok_and(|facts| facts.len() > 0);
        Ok(is_written.then_some(()))
    })?;
    Ok(Clone {
        ms: began.elapsed().as_secs_f64() * 1000.0,
        pid: vm.pid,
        name: name.to_owned(),
    })
}

fn wait_renewed(lab: &Lab) -> anyhow::Result<()> {
    let late = "the agents in the clones did not answer";
    wait_for(late, (LIMIT, Duration::from_millis(50)), || {
        let vms = lab.daemon().vms().list();
        let renewal = |vm: &VmInfo| vm.renewal.clone().unwrap_or_default();
        let mut left = vms.iter().map(|vm| (&vm.name, renewal(vm).left));
        if let Some((vm, left)) = left.find_map(|(vm, mut left)| Some((vm, left.pop()?))) {
            bail!("the guest of VM '{vm}' still has identities of the snapshot: {left}");
        }
        if vms.iter().any(|vm| renewal(vm).pending) {
            return Ok(None);
        }
        let random = |vm: &VmInfo| renewal(vm).done.iter().any(|done| done == "random numbers");
        let is_anew = vms.iter().all(random);
        ensure!(is_anew, "random number generator not reseeded");
        Ok(Some(()))
    })
}

/// Returns the number of guests that hold the same bytes in memory and differ in every other line
/// of their answer.
fn different(held: &str, template: &str, said: &[String]) -> usize {
    let mut seen: HashSet<_> = template.lines().skip(1).enumerate().collect();
    let mut ok = 0;
    for said in said {
        let (first, others) = said.split_once('\n').unwrap_or_default();
        // A line that was seen before counts against the later guest.
        let own = others.lines().enumerate().filter(|line| seen.insert(*line));
        ok += usize::from(own.count() == 3 && first == held.trim());
    }
    ok
}

/// Makes a clone take private memory by reading files, and then free it. Measures how much of the
/// memory the host gets back.
fn free(lab: &Lab, clone: &Clone) -> anyhow::Result<Value> {
    let private = || anyhow::Ok(Proc::default().rss_anon(clone.pid)?.0);
    let dropped = || {
        lab.exec(&clone.name, DROP, LIMIT)?;
        std::thread::sleep(BACK);
        private()
    };
    let before = dropped()?;
    lab.exec(&clone.name, READ, LIMIT)?;
    let full = private()?;
    let after = dropped()?;
    let taken = full.saturating_sub(before);
    let is_much = taken > 64 << 20;
    ensure!(is_much, "reading took {taken} bytes of private memory only");
    let back = full.saturating_sub(after);
    Ok(json!({
        "before_bytes": before, "full_bytes": full, "after_bytes": after,
        "back_percent": back as f64 * 100.0 / taken as f64,
    }))
}

/// Measured memory of a VM's QEMU process, in MiB.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Proportional set size of the process.
    pub pss: f64,
    /// Part of `pss`: code that the emulator has translated; none under KVM.
    pub emulated_code: f64,
}

/// Returns the memory of all VMs by name.
pub fn sizes(lab: &Lab) -> anyhow::Result<BTreeMap<String, Size>> {
    let vms = lab.report()?.ledger.vms.into_iter();
    let named = vms.map(|vm| {
        let size = Size {
            pss: mib(vm.pss_bytes.0 as f64),
            emulated_code: mib(vm.tcg_pss_bytes.0 as f64),
        };
        (vm.name, size)
    });
    Ok(named.collect())
}

/// Returns a percentile of values, by the method of the nearest rank.
pub fn percentile(values: &[f64], percent: usize) -> f64 {
    let rank = (values.len() * percent).div_ceil(100).max(1);
    let value = sorted(values).get(rank - 1).copied();
    value.unwrap_or(f64::NAN)
}

/// Draws the figure of the study `clones` from its record `study`.
pub fn figures(study: &Value) -> Vec<Figure> {
    let series = |key: &str, name: &str| {
        let times = study["samples"][key].as_array();
        let times = times.into_iter().flatten().filter_map(Value::as_f64);
        Series {
            name: name.into(),
            points: times
                .zip(1..)
                .map(|(ms, clone)| (f64::from(clone), ms))
                .collect(),
            dashed: false,
        }
    };
    let all = [
        series("start_ms", "each when the one before is set apart"),
        series("burst_start_ms", "each when the one before runs"),
    ];
    let title = "Time until a clone runs, by how many run already";
    let (x, y) = (Axis::Linear("clone"), Axis::Log("milliseconds"));
    let drawn = figure::drawn("clones-start", title, x, y, &all);
    drawn.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_always_one_of_the_measured_values() {
        let values: Vec<f64> = (1..=30).rev().map(f64::from).collect();
        assert!((percentile(&values, 95) - 29.0).abs() < 1e-9);
        assert!((percentile(&values, 50) - 15.0).abs() < 1e-9);
        assert!((percentile(&values, 100) - 30.0).abs() < 1e-9);
    }

    #[test]
    fn a_clone_is_counted_as_correct_only_if_it_has_the_saved_memory_and_a_unique_identity() {
        let guest = |held: &str, own: &str| format!("{held}\nid{own}\nhost{own}\nmac{own}\n");
        let template = guest("h", "0");
        let ok = |said: &[String]| different("h", &template, said);
        let mut said = vec![guest("h", "1"), guest("h", "2"), guest("x", "3")];
        assert_eq!(ok(&said), 2);
        said.push(guest("h", "4").replace("mac4", "mac2"));
        assert_eq!(ok(&said), 2);
        said.push(guest("h", "5").replace("host5", "host0"));
        assert_eq!(ok(&said), 2, "the template's");
        said.push("h\nid5\n".into());
        assert_eq!(ok(&said), 2);
    }
}
