//! Study D: a VM that swaps to this host's disk, and to RAM that another host lends over a link of
//! 10 Gbit/s.
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

use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use guest::{Arm, Done, GivenBack, Guest, VM};
use lender::Lender;
use link::Link;
use memfold_fold::EngineSettings;
use memfold_lab::Lab;
use memfold_units::ByteSize;
use serde_json::{Map, Value, json};

use super::figure::{self, Axis, Figure, Series};
use super::record::{median, spread};
use super::study::Options;

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
    /// Returns the scale of a quick study: one array, three rounds.
    fn quick() -> Self {
        Self {
            ram: ByteSize::mib(320),
            percents: vec![HEADLINE],
            blocks: vec![PAGE],
            rounds: 3,
            seconds: 5,
            kills: 50,
            rows: 250_000,
            memory: ByteSize::mib(20),
        }
    }

    fn full() -> Self {
        Self {
            ram: ByteSize::mib(320),
            percents: vec![50, 100, HEADLINE, 400],
            blocks: vec![PAGE, 64 << 10, 1 << 20],
            rounds: 3,
            seconds: 4,
            kills: 50,
            rows: 400_000,
            memory: ByteSize::mib(32),
        }
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

/// Runs the study. Returns `results` and `samples`.
pub fn run(options: &Options) -> anyhow::Result<Value> {
    let scale = options.pick(Scale::quick(), Scale::full());
    let path_alone = options.is_only("remote", PATH)?;
    let most = scale.percents.iter().max().copied().unwrap_or(0);
    // The swap disk has twice the needed size: if more than half of it were used, the kernel would
    // free the place of each page that is read (vm_swap_full). Pages that are only read would then
    // be written again, so reads would measure writes.
    let swap = scale.array(most) + scale.array(most) + ByteSize::mib(128);
    let (arms, left_out) = arms();
    let link = Link::new().context("cannot create the simulated link to a second host")?;
    let round_trips = link.round_trips()?;
    let lender = Lender::start(&link, swap)?;
    let block_path = path::measure(&lender)?;
    if path_alone {
        return Ok(json!({
            "vms": [],
            "samples": [],
            "results": { "round_trip": round_trips, "block_path": block_path },
        }));
    }
    let lab = Lab::with_registry(EngineSettings::default(), &lender.socket())?;
    let guest = Guest {
        lab: &lab,
        lender: &lender,
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
                each_arm(
                    &scale,
                    &arms,
                    &guest,
                    (percent, round, patterns),
                    &mut samples,
                    &mut switches,
                )?;
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
    let wrong: u64 = samples.iter().map(|s| s.done.wrong_words).sum();
    let mut results = ratios(&samples);
    results.insert("limit".into(), limit(&round_trips, &samples));
    results.insert("round_trip".into(), round_trips);
    results.insert("block_path".into(), block_path);
    results.insert("wrong_words".into(), wrong.into());
    results.insert("switch_ms".into(), spread(&switches.to_lent));
    results.insert("give_back_ms".into(), spread(&switches.back));
    let kills = kills.as_object().cloned().unwrap_or_default();
    results.extend(kills);
    results.insert("give_back_1_gib".into(), given_back);
    results.insert("sort".into(), sort);
    results.insert("left_out".into(), left_out);
    Ok(json!({
        "vms": [{"name": VM, "ram_bytes": scale.ram.0, "swap_bytes": swap.0}],
        "samples": samples.iter().map(sample).collect::<Vec<_>>(),
        "results": results,
    }))
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
    samples: &mut Vec<Sample>,
    switches: &mut Switches,
) -> anyhow::Result<()> {
    for turn in 0..arms.len() {
        let arm = arms[(turn + round) % arms.len()];
        let is_lent = arm.transport().is_some();
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
        if is_lent {
            switches.to_lent.push(switched as f64);
            switches.back.push(back as f64);
        }
    }
    Ok(())
}

/// Measures the return of a GiB that is in use while the program continues, with a copy on disk and
/// without one.
fn give_back(scale: &Scale, guest: &Guest<'_>) -> anyhow::Result<Value> {
    guest.fill(ByteSize(scale.ram.0 + GIB))?;
    let mut results = Map::new();
    for arm in [Arm::Lent, Arm::LentAlone] {
        let mut all = Vec::new();
        for _ in 0..scale.rounds {
            let given = guest.give_back(arm)?;
            eprintln!(
                "{}: {} in use given back in {} ms",
                arm.name(),
                given.used,
                given.took_ms
            );
            all.push(given);
        }
        let each = |what: fn(&GivenBack) -> f64| spread(&all.iter().map(what).collect::<Vec<_>>());
        let found = json!({
            "ms": each(|given| given.took_ms as f64),
            "ms_a_gib": each(|given| given.took_ms as f64 * GIB as f64 / given.used.0.max(1) as f64),
            "used_mib": each(|given| given.used.0 as f64 / 1_048_576.0),
            "longest_stall_s": each(|given| given.mixed.longest_ns as f64 / 1e9),
            "wrong_words": all.iter().map(|given| given.mixed.wrong_words).sum::<u64>(),
        });
        results.insert(arm.name().to_owned(), found);
    }
    let wrong = guest.order("check")?.wrong_words;
    ensure!(wrong == 0, "{wrong} words of the array are wrong");
    guest.end()?;
    Ok(json!(results))
}

/// Measures the sort of `PostgreSQL` in each arm.
fn sort(scale: &Scale, guest: &Guest<'_>) -> anyhow::Result<Value> {
    let arms = [Arm::HardDisk, Arm::Lent, Arm::Disk];
    let mut results = Map::new();
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
    for (arm, times) in arms.iter().zip(&all) {
        results.insert(format!("{}_s", arm.name()), spread(times));
    }
    results.insert(
        "hdd_over_lent".into(),
        (median(&all[0]) / median(&all[1])).into(),
    );
    results.insert("rows".into(), scale.rows.into());
    results.insert("swapped_out_mib".into(), (swapped / 1_048_576.0).into());
    Ok(json!(results))
}

fn sample(sample: &Sample) -> Value {
    let mut value = sample.done.json();
    value["array_percent_of_ram"] = sample.percent.into();
    value["round"] = sample.round.into();
    value["arm"] = sample.arm.name().into();
    value["pattern"] = sample.pattern.into();
    value["block_bytes"] = sample.block.into();
    value
}

/// Returns the throughput of an arm over that of another, round by round, for the middle array and
/// single pages.
fn ratio(samples: &[Sample], pattern: &str, arm: Arm, other: Arm) -> Vec<f64> {
    let of = |arm: Arm, round: usize| {
        samples
            .iter()
            .find(|s| {
                s.arm == arm
                    && s.round == round
                    && s.pattern == pattern
                    && s.block == PAGE
                    && s.percent == HEADLINE
            })
            .map(|s| s.done.mb_per_s())
    };
    (0..)
        .map_while(|round| Some(of(arm, round)? / of(other, round)?))
        .collect()
}

fn ratios(samples: &[Sample]) -> Map<String, Value> {
    let mut results = Map::new();
    let mut add = |name: &str, values: &[f64]| {
        // An arm that was left out has no figure.
        let (middle, all) = match values {
            [] => (Value::Null, Value::Null),
            values => (median(values).into(), spread(values)),
        };
        results.insert(name.to_owned(), middle);
        results.insert(format!("{name}_spread"), all);
    };
    for pattern in PATTERNS {
        // Writes also go to the copy, which is not limited, so writes are compared in the arm
        // without a copy.
        let lent = if pattern.ends_with("write") {
            Arm::LentAlone
        } else {
            Arm::Lent
        };
        let of = |other| ratio(samples, pattern, lent, other);
        add(&format!("{pattern}_ratio"), &of(Arm::HardDisk));
        add(&format!("{pattern}_ratio_to_disk_as_is"), &of(Arm::Disk));
        let iscsi = ratio(samples, pattern, Arm::Iscsi, Arm::HardDisk);
        add(&format!("{pattern}_ratio_iscsi"), &iscsi);
        if pattern.starts_with("seq") {
            add(
                &format!("{pattern}_ratio_to_stream"),
                &of(Arm::HardDiskStream),
            );
        }
    }
    let p50 = of_lent(samples, "randread").map(|s| s.done.p50_ns as f64 / 1e3);
    add("randread_p50_us", &p50.collect::<Vec<_>>());
    results
}

/// Returns the samples of lent RAM with a copy, for the middle array and single pages.
fn of_lent<'a>(samples: &'a [Sample], pattern: &'a str) -> impl Iterator<Item = &'a Sample> {
    samples.iter().filter(move |s| {
        s.arm == Arm::Lent && s.pattern == pattern && s.block == PAGE && s.percent == HEADLINE
    })
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
    let page_us = round_trips[format!("{PAGE}_bytes_us")]["median"].as_f64();
    let pages = PAGE as f64 / page_us.unwrap_or(f64::NAN);
    let percent = |pattern: &str| {
        let percents = of_lent(samples, pattern).map(|s| s.done.mb_per_s() * 100.0 / pages);
        spread(&percents.collect::<Vec<_>>())
    };
    json!({
        "memory_copy_mb_s": spread(&copied),
        "page_after_page_mb_s": pages,
        "seqread_percent": percent("seqread"),
        "randread_percent": percent("randread"),
    })
}

/// Draws the throughput by size of the array, for each pattern.
#[must_use]
pub fn figures(study: &Value) -> Vec<Figure> {
    let samples = study["samples"].as_array().cloned().unwrap_or_default();
    let mut sizes: Vec<u64> = samples
        .iter()
        .filter_map(|s| s["array_percent_of_ram"].as_u64())
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    let point = |arm: Arm, pattern: &str, size: u64| {
        let values: Vec<f64> = samples
            .iter()
            .filter(|s| {
                s["arm"] == arm.name()
                    && s["pattern"] == pattern
                    && s["block_bytes"] == PAGE
                    && s["array_percent_of_ram"] == size
            })
            .filter_map(|s| s["mb_per_s"].as_f64())
            .collect();
        (size as f64 / 100.0, median(&values))
    };
    PATTERNS
        .iter()
        .map(|pattern| {
            let series: Vec<Series> = ARMS
                .iter()
                .map(|arm| Series {
                    name: arm.name().to_owned(),
                    points: sizes.iter().map(|s| point(*arm, pattern, *s)).collect(),
                    dashed: arm.transport().is_none(),
                })
                .collect();
            let svg = figure::lines(
                &format!("{pattern}, one page at a time"),
                &Axis::linear("array / the VM's RAM"),
                &Axis::log("MB/s"),
                &series,
            );
            (format!("remote-{pattern}"), svg)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skipped_study_arm_has_null_results() {
        let results = ratios(&[]);
        assert!(results["randread_ratio_iscsi"].is_null());
        assert!(results["randread_ratio_iscsi_spread"].is_null());
    }
}
