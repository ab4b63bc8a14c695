//! The part `warmth` of the study `snapshots`: measures how fast a program runs in the first 30
//! seconds after the restore of its VM, when the guest's page cache may be cold.
//!
//! A program reads random files of the disk without pause: while the VM is saved, and in every
//! restored VM. The number of files that it reads in 30 s is compared with the number in the 30 s
//! before the first save.
//!
//! | arm | snapshot | how it is restored |
//! |---|---|---|
//! | `qemu` | all of RAM, saved by QEMU itself | QEMU loads all RAM before the VM runs; this shows the cost of a new emulator process, whatever RAM contains |
//! | `cold` | `--keep none` | without options |
//! | `cold_prefetch` | `--keep none` | `--prefetch` |
//! | `hot` | `--keep hot` | without options |
//! | `hot_prefetch` | `--keep hot` | `--prefetch` |
//!
//! `hot_memory_over_cold_percent` compares the memory of the two VMs at the end of the 30 s: their
//! QEMUs' proportional set sizes (`Pss`), in which the files that a cold VM reads count as its own
//! copies.
//! A cold VM reads from the host's page cache; reading from a disk would be slower.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use memfold_api::{KeepChoice, RestoreRequest, SaveRequest};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_units::{ByteSize, PAGE_SIZE};
use serde_json::json;

use crate::qemu_way::{self, Form};
use crate::record::{Found, ratios, spread};

const MEMORY: ByteSize = ByteSize::mib(1024);

const BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// Time limit of one command in the guest.
const LIMIT: Duration = Duration::from_secs(300);

/// Time for which the program's throughput is measured, in seconds.
const SPAN_S: f64 = 30.0;

const VM: &str = "reader";

/// Name of the restored VM.
const AGAIN: &str = "again";

/// Shell script that starts a program which reads all files once, and then random files without
/// end. The program logs every tenth of a second the time and the number of files that it has read.
const READ: &str = r#"cat > /run/read.py <<'END'
import random, subprocess, time
files = subprocess.run("find /usr -type f -size +15k -size -4096k | sort", shell=True, capture_output=True, text=True).stdout.split()
# Its next choice is not in what is saved.
system = random.SystemRandom()
done, last = 0, 0
with open("/dev/shm/log", "w", buffering=1) as log:
    while True:
        with open(system.choice(files), "rb") as file:
            file.read()
        done += 1
        now = time.monotonic()
        if now - last >= 0.1:
            log.write(f"{now:.2f} {done}\n")
            last = now
END
find /usr -type f -size +15k -size -4096k -exec cat {} + > /dev/null
systemd-run -q --unit=reader python3 /run/read.py
while [ ! -s /dev/shm/log ]; do sleep 0.2; done"#;

/// Shell command that prints the guest's clock, as the program reads it.
const CLOCK: &str = "python3 -c 'import time; print(time.monotonic())'";

/// Arms: name; and for arms that memfold restores, the snapshot and whether it is prefetched.
const ARMS: [(&str, Option<(&str, bool)>); 5] = [
    ("qemu", None),
    ("cold", Some(("none", false))),
    ("hot", Some(("hot", false))),
    ("cold_prefetch", Some(("none", true))),
    ("hot_prefetch", Some(("hot", true))),
];

/// Indices of the arms that are compared.
const QEMU: usize = 0;
const COLD: usize = 1;
const HOT: usize = 2;

/// Measures each arm `rounds` times. Returns entries for the study's `results`.
pub fn run(rounds: usize) -> anyhow::Result<Found> {
    let lab = Lab::new(EngineSettings::default())?;
    let spec = Lab::spec(VM, "trixie-a", MEMORY, DiskMode::Buffered)?;
    lab.boot(vec![spec.clone()], BOOT_TIMEOUT)?;
    lab.exec(VM, READ, LIMIT)?;
    // The arms are compared with this time, when all files are cached.
    let since = clock(&lab, VM)?;
    std::thread::sleep(Duration::from_secs_f64(SPAN_S + 1.0));
    let before = read_since(&lab, VM, since)?;
    let image = lab.directory().join("qemu.img");
    let disk = lab.directory().join("disk.qcow2");
    qemu_way::save(&lab, VM, Form::MappedRam, &image, &disk)?;
    let mut sizes = Vec::new();
    for (name, keep) in [("hot", KeepChoice::Hot), ("none", KeepChoice::None)] {
        let request = SaveRequest {
            keep,
            live: true,
            ..SaveRequest::new(VM, name)
        };
        let saved = lab.daemon().snapshots().save(&request)?;
        let referred = saved.references.as_ref().map_or(0, |r| r.pages) * PAGE_SIZE;
        let bytes = image_bytes(&lab.directory().join("snapshots").join(name))?;
        let (size, referred) = (ByteSize(bytes), ByteSize(referred));
        eprintln!("--keep {name}: image of {size}, {referred} by reference");
        sizes.push((bytes, saved));
    }
    lab.stop(VM)?;
    let mut percents = vec![Vec::new(); ARMS.len()];
    let mut memory = percents.clone();
    for _ in 0..rounds {
        for (((arm, ours), percents), memory) in ARMS.iter().zip(&mut percents).zip(&mut memory) {
            if let Some((snapshot, prefetch)) = *ours {
                let request = RestoreRequest {
                    prefetch,
                    ..RestoreRequest::new(AGAIN)
                };
                lab.daemon().snapshots().restore(snapshot, &request)?;
            } else {
                let mut spec = spec.clone();
                spec.name = AGAIN.into();
                let like = &sizes[0].1;
                qemu_way::restore(&lab, spec, like, Form::MappedRam, &image, &disk)?;
            }
            let (read, resident) = read_after_restore(&lab)?;
            let percent = read as f64 / before as f64 * 100.0;
            eprintln!(
                "{arm}: {read} files in {SPAN_S} s, {percent:.1} % of {before}; {} of memory",
                ByteSize(resident)
            );
            percents.push(percent);
            memory.push(resident as f64);
        }
    }
    // The ratio of arms in the same round excludes the cost of the new emulator process.
    let percent = |ours: &[f64], theirs: &[f64]| {
        let ratios = ratios(ours, theirs).into_iter();
        spread(ratios.map(|ratio| ratio * 100.0))
    };
    let mut found = Found {
        results: json!({
            "hot_size_over_cold": sizes[0].0 as f64 / sizes[1].0 as f64,
            "hot_over_qemu_percent": percent(&percents[HOT], &percents[QEMU]),
            "hot_memory_over_cold_percent": percent(&memory[HOT], &memory[COLD]),
        }),
        ..Found::default()
    };
    for ((arm, ..), percents) in ARMS.iter().zip(&percents) {
        found.results[format!("{arm}_throughput_percent")] = spread(percents);
    }
    Ok(found)
}

/// Returns the bytes that a snapshot's files take on disk, without its disks: only the first
/// snapshot's disk contains the data written since the previous save.
pub fn image_bytes(place: &Path) -> anyhow::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(place)? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with("disk") {
            bytes += entry.metadata()?.blocks() * 512;
        }
    }
    Ok(bytes)
}

/// Returns the number of files that the program read in the first 30 s of the VM that was just
/// restored, and the proportional set size of its QEMU in bytes (`Pss` of `smaps_rollup`). Ends the
/// VM.
fn read_after_restore(lab: &Lab) -> anyhow::Result<(u64, u64)> {
    let ran = Instant::now();
    lab.daemon().vms().wait_agent(AGAIN, BOOT_TIMEOUT)?;
    let asked = clock(lab, AGAIN)?;
    let since = asked - ran.elapsed().as_secs_f64();
    let left = Duration::from_secs_f64(SPAN_S + 1.0).saturating_sub(ran.elapsed());
    std::thread::sleep(left);
    let read = read_since(lab, AGAIN, since)?;
    let rollup = memfold_ledger::read::Proc::default().rollup(lab.pid(AGAIN)?)?;
    let rollup = rollup.context("cannot read the memory use of the restored VM's QEMU")?;
    let memory = rollup.pss_bytes.0;
    lab.stop(AGAIN)?;
    Ok((read, memory))
}

fn clock(lab: &Lab, vm: &str) -> anyhow::Result<f64> {
    let said = lab.exec(vm, CLOCK, LIMIT)?;
    let time = said.trim().parse();
    time.context("cannot parse the time of the guest's clock")
}

/// Returns the number of files that the program read in the 30 s since the guest's clock showed
/// `since`.
fn read_since(lab: &Lab, vm: &str, since: f64) -> anyhow::Result<u64> {
    let log = lab.exec(vm, "cat /dev/shm/log", LIMIT)?;
    between(&log, since, since + SPAN_S)
        .context("the log of the program in the guest does not cover the measured time")
}

fn between(log: &str, since: f64, until: f64) -> Option<u64> {
    let line = |line: &str| {
        let (time, done) = line.split_once(' ')?;
        Some((time.parse::<f64>().ok()?, done.parse::<u64>().ok()?))
    };
    let lines: Vec<(f64, u64)> = log.lines().filter_map(line).collect();
    let at = |time: f64| lines.iter().rev().find(|line| line.0 <= time);
    // A log that stops early counts as few files; a log without lines is an error.
    Some(at(until)?.1 - at(since)?.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_files_read_between_two_times_is_computed_from_the_guests_log() {
        let log = "9.95 10\n10.05 20\n20.00 520\n39.99 1500\n40.10 1510\n";
        assert_eq!(between(log, 10.0, 40.0), Some(1490));
        assert_eq!(between(log, 15.0, 15.0), Some(0));
        assert_eq!(between(log, 1.0, 40.0), None, "nothing is known of then");
    }
}
