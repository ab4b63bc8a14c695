//! The study `memfold bench remote`, which repeats a published study (study D): measures a VM that
//! swaps to this host's disk, and one that swaps to RAM which another host lends over a link of 10
//! Gbit/s.
//!
//! | arm | the swap disk |
//! |---|---|
//! | `disk` | a file on this host's disk, through its page cache: RAM, as long as the host has some |
//! | `hdd` | as `disk`, limited by QEMU's throttle to 150 requests and 120 MB a second |
//! | `hdd_stream` | as `disk`, limited to 120 MB a second: a hard disk whose head need not move. Sequential accesses only |
//! | `lent` | lent RAM; writes also go to a copy on disk (not limited: it goes through the page cache) |
//! | `lent_alone` | lent RAM without a copy, as in the study |
//! | `lent_alone_iscsi` | lent RAM without a copy, by the study's transport, iSCSI, which is not encrypted |
//!
//! One VM runs one program, which reads and writes an array of 0.5 to 4 times the VM's RAM in
//! blocks, sequentially and at random, and checks every word. The arms are measured in turn, in
//! several rounds; the program keeps its array while the swap disk is switched. Then lenders are
//! killed at random instants while the array is read and written, a GiB of lent RAM in use is
//! returned, and `PostgreSQL` sorts with too little RAM.
//!
//! Before that, `block_path` measures the cost of QEMU's block layer to a lender, without a guest.
//!
//! The link is a pair of virtual interfaces between two network namespaces, shaped by `tc`. Its
//! round-trip time is measured, too.

mod guest;
mod lender;
mod link;
mod path;

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use guest::{Arm, Done, GivenBack, Guest, VM};
use lender::Lender;
use link::{Link, THERE};
use memfold_fold::EngineSettings;
use memfold_host::own_program;
use memfold_lab::Lab;
use memfold_units::ByteSize;
use serde_json::{Value, json};

use crate::figure::{self, Axis, Figure, Series};
use crate::record::{Found, median, mib, ratios, spread};
use crate::study::Options;

const ARMS: [Arm; 6] = [
    Arm::HardDisk,
    Arm::Lent,
    Arm::Disk,
    Arm::LentAlone,
    Arm::HardDiskStream,
    Arm::Iscsi,
];

const PATTERNS: [&str; 4] = ["seqread", "randread", "seqwrite", "randwrite"];

const READS: &[&str] = PATTERNS.split_at(2).0;
const WRITES: &[&str] = PATTERNS.split_at(2).1;

const PAGE: u64 = 4096;
const GIB: u64 = 1 << 30;

/// Number of bytes that are copied to measure the speed of memory. The next constant: number of
/// copies.
const COPIED: usize = 64 << 20;
const COPIES: usize = 9;

/// Name of the part of the study that needs no guest.
const PATH: &str = "block-path";

/// Size of the array for which ratios are given, in percent of the RAM: the middle of the study's
/// sizes.
const HEADLINE: u64 = 200;

/// The measurements to make.
#[derive(Clone, Debug)]
struct Scale {
    ram: ByteSize,
    /// Sizes of the array, in percent of the RAM.
    percents: Vec<u64>,
    blocks: Vec<u64>,
    /// Number of rounds for the array and the blocks for which ratios are given; the others have
    /// one round.
    rounds: usize,
    /// Duration of each phase, in seconds.
    seconds: u32,
    kills: usize,
    /// Number of rows that `PostgreSQL` sorts. The next field: memory in which it sorts.
    rows: u64,
    memory: ByteSize,
}

impl Scale {
    fn of(options: &Options) -> Self {
        Self {
            ram: ByteSize::mib(320),
            percents: options.pick(vec![HEADLINE], vec![50, 100, HEADLINE, 400]),
            blocks: options.pick(vec![PAGE], vec![PAGE, 64 << 10, 1 << 20]),
            rounds: 3,
            seconds: options.pick(5, 4),
            kills: 50,
            rows: options.pick(250_000, 400_000),
            memory: ByteSize::mib(options.pick(20, 32)),
        }
    }

    /// Returns the size of the swap disk for an array of `percent` of the RAM. The disk has twice
    /// the needed size: if more than half of it were used, the kernel would free the place of each
    /// page that is read (`vm_swap_full`). Pages that are only read would then be written again, so
    /// reads would measure writes.
    fn swap(&self, percent: u64) -> ByteSize {
        self.array(percent) + self.array(percent) + ByteSize::mib(128)
    }

    /// Returns the size of an array of `percent` of the RAM.
    fn array(&self, percent: u64) -> ByteSize {
        ByteSize::mib((self.ram.0 >> 20) * percent / 100)
    }
}

/// Measurements of one phase.
struct Sample {
    percent: u64,
    round: usize,
    arm: Arm,
    pattern: &'static str,
    block: u64,
    done: Done,
}

/// Runs the study `remote`. Returns its JSON record, with the parts `results` and `samples`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    let scale = Scale::of(options);
    options.check_arms("remote", &[PATH])?;
    let most = scale.percents.iter().max().copied().unwrap_or(0);
    let swap = scale.swap(most);
    let (arms, left_out) = arms();
    let link = Link::new().context("cannot create the simulated link to a second host")?;
    let round_trips = link.round_trips()?;
    let lender = Lender::start(link.there(&own_program()?), THERE.parse()?, swap)?;
    let block_path = path::measure(&lender)?;
    if !options.arms.is_empty() {
        return Ok(json!(Found {
            results: json!({ "round_trip": round_trips, "block_path": block_path }),
            ..Found::default()
        }));
    }
    let lab = Lab::with_registry(EngineSettings::default(), &lender.socket())?;
    let guest = Guest {
        lab: &lab,
        lender: &lender,
        image: "trixie-b",
        swap,
    };
    guest.boot(scale.ram)?;
    let mut samples = Vec::new();
    let mut switches = Switches::default();
    for &percent in &scale.percents {
        guest.fill(scale.array(percent))?;
        let rounds = if percent == HEADLINE { scale.rounds } else { 1 };
        for round in 0..rounds {
            // After this, no page has to be written before it can be read.
            guest.order("check")?;
            for patterns in [READS, WRITES] {
                let phase = (percent, round, patterns);
                let more = each_arm(&scale, &arms, &guest, phase, &mut switches)?;
                samples.extend(more);
            }
        }
        guest.end()?;
    }
    guest.fill(scale.array(HEADLINE))?;
    let kills = guest.kills(scale.kills)?;
    guest.end()?;
    let given_back = give_back(&scale, &guest)?;
    let sort = sort(&scale, &guest)?;
    lab.stop(VM)?;
    let mut results = throughput_ratios(&samples);
    results["limit"] = limit(&round_trips, &samples);
    results["round_trip"] = round_trips;
    results["block_path"] = block_path;
    results["wrong_words"] = samples
        .iter()
        .map(|s| s.done.wrong_words)
        .sum::<u64>()
        .into();
    results["switch_ms"] = spread(&switches.to_lent);
    results["give_back_ms"] = spread(&switches.back);
    for (key, value) in kills.as_object().into_iter().flatten() {
        results[key] = value.clone();
    }
    results["give_back_1_gib"] = given_back;
    results["sort"] = sort;
    results["left_out"] = left_out;
    Ok(json!(Found {
        vms: vec![json!({"name": VM, "ram_bytes": scale.ram.0, "swap_bytes": swap.0})],
        samples: samples.iter().map(Sample::json).collect(),
        results,
    }))
}

/// Measures reads of memory that a daemon on this host lends over the loopback interface, without a
/// guest and by a guest, and compares the latter with a hard disk. Returns `results` and `samples`.
/// `image`: guest image with gcc; `ram`: RAM of the VM; `rounds`, `seconds`: how often and how long
/// each pattern is measured.
pub fn measure_over_loopback(
    image: &str,
    ram: ByteSize,
    (rounds, seconds): (usize, u32),
) -> anyhow::Result<Value> {
    let scale = Scale {
        ram,
        blocks: vec![PAGE],
        rounds,
        seconds,
        ..Scale::of(&Options::default())
    };
    let swap = scale.swap(HEADLINE);
    let own = Command::new(own_program()?);
    let lender = Lender::start(own, Ipv4Addr::LOCALHOST.into(), swap)?;
    let block_path = path::measure(&lender)?;
    let lab = Lab::with_registry(EngineSettings::default(), &lender.socket())?;
    let guest = Guest {
        lab: &lab,
        lender: &lender,
        image,
        swap,
    };
    guest.boot(ram)?;
    guest.fill(scale.array(HEADLINE))?;
    let (mut samples, mut switches) = (Vec::new(), Switches::default());
    for round in 0..rounds {
        guest.order("check")?;
        let arms = [Arm::HardDisk, Arm::Lent];
        let phase = (HEADLINE, round, READS);
        samples.extend(each_arm(&scale, &arms, &guest, phase, &mut switches)?);
    }
    let wrong = guest.order("check")?.wrong_words;
    let mut results = throughput_ratios(&samples);
    let lent_us = |of: fn(&Done) -> u64| {
        let samples = headline(&samples, Arm::Lent, "randread");
        spread(samples.map(|s| of(&s.done) as f64 / 1e3))
    };
    results["randread_p50_us"] = lent_us(|done| done.p50_ns);
    results["randread_p99_us"] = lent_us(|done| done.p99_ns);
    results["block_path"] = block_path;
    results["wrong_words"] =
        (wrong + samples.iter().map(|s| s.done.wrong_words).sum::<u64>()).into();
    results["switch_ms"] = spread(&switches.to_lent);
    results["give_back_ms"] = spread(&switches.back);
    Ok(
        json!({ "results": results, "samples": samples.iter().map(Sample::json).collect::<Vec<_>>() }),
    )
}

/// Returns the arms that can be measured here, and those that cannot, each with its reason, which
/// is also printed now.
fn arms() -> (Vec<Arm>, Value) {
    let tgtd = Command::new("tgtd").arg("--version").output();
    if tgtd.is_ok_and(|said| said.status.success()) {
        return (ARMS.to_vec(), json!([]));
    }
    let (arm, why) = (
        Arm::Iscsi.name(),
        "tgtd is not installed; install it (apt install tgt; tgt's own service is not needed)",
    );
    eprintln!("left out: {arm}: {why}");
    let others = ARMS.into_iter().filter(|arm| *arm != Arm::Iscsi);
    (others.collect(), json!([{ "arm": arm, "why": why }]))
}

/// Milliseconds that moves of the swap disk took.
#[derive(Default)]
struct Switches {
    to_lent: Vec<f64>,
    back: Vec<f64>,
}

/// Measures each arm once, beginning with another arm in each round.
fn each_arm(
    scale: &Scale,
    arms: &[Arm],
    guest: &Guest<'_>,
    (percent, round, patterns): (u64, usize, &[&'static str]),
    switches: &mut Switches,
) -> anyhow::Result<Vec<Sample>> {
    let mut samples = Vec::new();
    for turn in 0..arms.len() {
        let arm = arms[(turn + round) % arms.len()];
        let switched = guest.switch(arm)?;
        for &pattern in patterns {
            if arm == Arm::HardDiskStream && pattern.starts_with("rand") {
                continue;
            }
            let blocks = scale.blocks.iter();
            for &block in blocks.filter(|block| round == 0 || **block == PAGE) {
                let done = guest.order(&format!("{pattern} {block} {}", scale.seconds))?;
                eprintln!(
                    "array of {percent} % of RAM, round {}, {}, {pattern} of {}: {:.2} MB/s",
                    round + 1,
                    arm.name(),
                    ByteSize(block),
                    done.mb_per_s()
                );
                samples.push(Sample {
                    percent,
                    round,
                    arm,
                    pattern,
                    block,
                    done,
                });
            }
        }
        let back = guest.back()?;
        if arm.transport().is_some() {
            switches.to_lent.push(switched as f64);
            switches.back.push(back as f64);
        }
    }
    Ok(samples)
}

/// Measures the return of a GiB that is in use while the program continues, with a copy on disk and
/// without one.
fn give_back(scale: &Scale, guest: &Guest<'_>) -> anyhow::Result<Value> {
    guest.fill(ByteSize(scale.ram.0 + GIB))?;
    let mut results = json!({});
    for arm in [Arm::Lent, Arm::LentAlone] {
        let name = arm.name();
        let mut all = Vec::new();
        for _ in 0..scale.rounds {
            let given = guest.give_back(arm)?;
            let (used, took_ms) = (given.used, given.took_ms);
            eprintln!("{name}: {used} in use given back in {took_ms} ms");
            all.push(given);
        }
        let each = |what: fn(&GivenBack) -> f64| spread(all.iter().map(what));
        results[name] = json!({
            "ms": each(|given| given.took_ms as f64),
            "ms_a_gib": each(|given| given.took_ms as f64 * GIB as f64 / given.used.0.max(1) as f64),
            "used_mib": each(|given| mib(given.used.0 as f64)),
            "longest_stall_s": each(|given| given.mixed.longest_ns as f64 / 1e9),
            "wrong_words": all.iter().map(|given| given.mixed.wrong_words).sum::<u64>(),
        });
    }
    let wrong = guest.order("check")?.wrong_words;
    ensure!(wrong == 0, "{wrong} words of the array are wrong");
    guest.end()?;
    Ok(results)
}

/// Measures the sort of `PostgreSQL` in each arm.
fn sort(scale: &Scale, guest: &Guest<'_>) -> anyhow::Result<Value> {
    let arms = [Arm::HardDisk, Arm::Lent, Arm::Disk];
    let mut all: Vec<Vec<f64>> = vec![Vec::new(); arms.len()];
    let mut swapped = 0.0_f64;
    // This first sort brings the program and its files into memory for all arms.
    guest.sort(1000, scale.memory)?;
    for _ in 0..scale.rounds {
        for (arm, times) in arms.iter().zip(&mut all) {
            guest.switch(*arm)?;
            let (took_ms, peak) = guest.sort(scale.rows, scale.memory)?;
            eprintln!("{}: sorted in {:.1} s", arm.name(), took_ms / 1e3);
            times.push(took_ms / 1e3);
            swapped = swapped.max(peak);
            guest.back()?;
        }
    }
    let mut results = json!({
        "hdd_over_lent": median(&all[0]) / median(&all[1]),
        "rows": scale.rows,
        "swapped_out_mib": mib(swapped),
    });
    for (arm, times) in arms.iter().zip(&all) {
        results[format!("{}_s", arm.name())] = spread(times);
    }
    Ok(results)
}

impl Sample {
    fn json(&self) -> Value {
        let mut value = self.done.json();
        value["array_percent_of_ram"] = self.percent.into();
        value["round"] = self.round.into();
        value["arm"] = self.arm.name().into();
        value["pattern"] = self.pattern.into();
        value["block_bytes"] = self.block.into();
        value
    }
}

/// Returns the samples of an arm for the middle array and single pages.
fn headline<'a>(
    samples: &'a [Sample],
    arm: Arm,
    pattern: &'a str,
) -> impl Iterator<Item = &'a Sample> {
    samples.iter().filter(move |s| {
        s.arm == arm && s.pattern == pattern && s.block == PAGE && s.percent == HEADLINE
    })
}

fn throughput_ratios(samples: &[Sample]) -> Value {
    let mut results = json!({});
    let mut add = |name: String, values: Vec<f64>| {
        // An arm that was left out has no figure.
        if values.is_empty() {
            results[format!("{name}_spread")] = Value::Null;
        } else {
            results[format!("{name}_spread")] = spread(&values);
        }
        results[name] = median(&values).into();
    };
    for pattern in PATTERNS {
        // Writes also go to the copy, which is not limited, so writes are compared in the arm
        // without a copy.
        let lent = if pattern.ends_with("write") {
            Arm::LentAlone
        } else {
            Arm::Lent
        };
        let of = |arm| -> Vec<f64> {
            let samples = headline(samples, arm, pattern);
            samples.map(|s| s.done.mb_per_s()).collect()
        };
        let over = |other| ratios(&of(lent), &of(other));
        add(format!("{pattern}_ratio"), over(Arm::HardDisk));
        add(format!("{pattern}_ratio_to_disk_as_is"), over(Arm::Disk));
        let iscsi = ratios(&of(Arm::Iscsi), &of(Arm::HardDisk));
        add(format!("{pattern}_ratio_iscsi"), iscsi);
        if pattern.starts_with("seq") {
            add(
                format!("{pattern}_ratio_to_stream"),
                over(Arm::HardDiskStream),
            );
        }
    }
    let p50 = headline(samples, Arm::Lent, "randread").map(|s| s.done.p50_ns as f64 / 1e3);
    add("randread_p50_us".into(), p50.collect());
    results
}

/// Returns the speed of copying memory on one core, and of fetching one page after the other over
/// the link, in MB a second; and the throughput of a guest on lent RAM in percent of the latter.
fn limit(round_trips: &Value, samples: &[Sample]) -> Value {
    let (from, mut to) = (vec![1_u8; COPIED], vec![0_u8; COPIED]);
    let copied = || {
        let began = Instant::now();
        to.copy_from_slice(&from);
        std::hint::black_box(&to);
        COPIED as f64 / 1e6 / began.elapsed().as_secs_f64()
    };
    let copied: Vec<f64> = std::iter::repeat_with(copied).take(COPIES).collect();
    let page_us = figure::number(&round_trips[format!("{PAGE}_bytes_us")]["median"]);
    let pages = PAGE as f64 / page_us;
    let percent = |pattern| {
        let lent = headline(samples, Arm::Lent, pattern);
        spread(lent.map(|s| s.done.mb_per_s() * 100.0 / pages))
    };
    json!({
        "memory_copy_mb_s": spread(&copied),
        "page_after_page_mb_s": pages,
        "seqread_percent": percent("seqread"),
        "randread_percent": percent("randread"),
    })
}

/// Draws the throughput of swapping over the size of the array, one figure for each pattern.
pub fn figures(study: &Value) -> Vec<Figure> {
    let samples = figure::samples(study);
    let sizes = samples
        .iter()
        .filter_map(|s| s["array_percent_of_ram"].as_u64());
    let sizes: BTreeSet<u64> = sizes.collect();
    let drawn = |pattern: &str| {
        let line = |arm: &Arm| {
            let mine = samples.iter().filter(|s| {
                s["arm"] == arm.name() && s["pattern"] == pattern && s["block_bytes"] == PAGE
            });
            let point = |&size: &u64| {
                let of_size = mine.clone().filter(|s| s["array_percent_of_ram"] == size);
                let middle = median(of_size.filter_map(|s| s["mb_per_s"].as_f64()));
                (size as f64 / 100.0, middle)
            };
            Series {
                name: arm.name().to_owned(),
                points: sizes.iter().map(point).collect(),
                dashed: arm.transport().is_none(),
            }
        };
        let title = format!("{pattern}, one page at a time");
        let (x, y) = (Axis::Linear("array / the VM's RAM"), Axis::Log("MB/s"));
        let lines = ARMS.each_ref().map(line);
        figure::drawn(&format!("remote-{pattern}"), &title, x, y, &lines)
    };
    PATTERNS.into_iter().filter_map(drawn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn if_the_iscsi_part_of_a_benchmark_was_skipped_its_results_are_null() {
        let results = throughput_ratios(&[]);
        assert!(results["randread_ratio_iscsi"].is_null());
        assert!(results["randread_ratio_iscsi_spread"].is_null());
    }
}
