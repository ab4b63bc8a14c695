//! The part `guests` of the report: what folding costs a guest. Two guests keep a file with the
//! same pages, which are folded, and a file of their own, whose pages are not. A program reads and
//! writes single pages of both. Then both guests hash files while the files' pages are folded.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use memfold_fold::EngineSettings;
use memfold_ksm::ranges;
use memfold_lab::{DiskMode, Lab};
use memfold_units::ByteSize;
use serde_json::{Value, json};

use crate::host::{Stat, numbers};
use crate::record::{ratios, spread};
use crate::selftest::HASH;
use crate::wait::most_folded;

const VMS: [&str; 2] = ["cost-a", "cost-b"];
const MEMORY: ByteSize = ByteSize::mib(512);
const BOOT_TIMEOUT: Duration = Duration::from_secs(240);
const LIMIT: Duration = Duration::from_secs(300);

const PROGRAM: &str = include_str!("guest.py");

/// Files of the guests: pages that both have, and pages that only one has.
const SAME: &str = "/var/tmp/memfold-same";
const OWN: &str = "/var/tmp/memfold-own";

/// Most times that a guest hashes its files in one measurement.
const MOST_TIMES: u32 = 60;

/// Part of the written pages that must have been folded, in percent.
const LEAST_FOLDED: f64 = 75.0;

/// Measures two guests. `pages`: length of each file; `rounds`, `seconds`: how often the guests'
/// speed is measured, and how long.
pub fn measure(
    images: [&str; 2],
    pages: u64,
    (rounds, seconds): (usize, u32),
) -> anyhow::Result<Value> {
    let lab = Lab::new(EngineSettings::default())?;
    let specs = VMS.iter().zip(images);
    let specs = specs.map(|(name, image)| Lab::spec(name, image, MEMORY, DiskMode::Buffered));
    lab.boot(specs.collect::<Result<_, _>>()?, BOOT_TIMEOUT)?;
    let fill = format!(
        "cat > /run/report.py <<'END-OF-FILE'\n{PROGRAM}\nEND-OF-FILE\n\
         python3 /run/report.py fill {SAME} {pages} 7 && python3 /run/report.py fill {OWN} {pages}"
    );
    lab.exec_all(&VMS, &fill, LIMIT)?;
    let huge = huge_percent(&lab)?;
    lab.fold(true)?;
    most_folded(&lab, |vm| vm.mapped_pages)?;
    lab.fold(false)?;
    let mut results = faults(&lab, pages)?;
    results["huge_percent"] = huge.into();
    results["huge_folded_percent"] = huge_percent(&lab)?.into();
    slowdown(&lab, (rounds, seconds), &mut results)?;
    Ok(results)
}

/// Returns the part of the guests' RAM that is in transparent huge pages, in percent.
fn huge_percent(lab: &Lab) -> anyhow::Result<f64> {
    let (mut huge, mut all) = (0, 0);
    for name in VMS {
        for of in ranges::guest(Path::new("/proc"), lab.pid(name)?, &[])? {
            huge += of.huge_pages;
            all += of.pages();
        }
    }
    Ok(huge as f64 * 100.0 / all.max(1) as f64)
}

/// Measures accesses of the first guest to single pages. The first slice of the files only warms
/// the program up.
fn faults(lab: &Lab, pages: u64) -> anyhow::Result<Value> {
    let run = |files: &str| -> anyhow::Result<Vec<Vec<f64>>> {
        let said = lab.exec(
            VMS[0],
            &format!("python3 /run/report.py {files} {pages}"),
            LIMIT,
        )?;
        let slices: Vec<Vec<f64>> = said.lines().skip(1).map(numbers).collect();
        ensure!(slices.len() > 1, "the program in the guest said '{said}'");
        let words = files.split(' ').count();
        let columns = (0..words).map(|at| {
            let column = slices.iter().map(|slice| slice.get(at).copied());
            column.collect::<Option<Vec<f64>>>()
        });
        let columns: Option<Vec<_>> = columns.collect();
        columns.with_context(|| format!("the program in the guest said '{said}'"))
    };
    let first = run(&format!("{OWN}:read {SAME}:read {OWN}:write"))?;
    // Faults of the program's start are no faults of the written pages.
    let start = minor_faults(lab)?;
    run(&format!("{OWN}:read"))?;
    let before = minor_faults(lab)?;
    let second = run(&format!("{SAME}:write"))?;
    let faults = (minor_faults(lab)? - before).saturating_sub(before - start);
    let copied = faults as f64 * 100.0 / pages as f64;
    let [read, read_folded, write] = &first[..] else {
        anyhow::bail!("the program in the guest measured too little");
    };
    let mut results = json!({
        "read_us": spread(read),
        "read_folded_us": spread(read_folded),
        "write_us": spread(write),
        "faults_per_written_page_percent": copied,
    });
    // Without a fault for each page, the pages were not folded.
    if copied < LEAST_FOLDED {
        let why = format!("only {copied:.0} % of the written pages were folded");
        results["not_measured"] = json!({ "write_folded_us": why, "copy_fault_us": why });
        return Ok(results);
    }
    let difference = second[0]
        .iter()
        .zip(write)
        .map(|(folded, own)| folded - own);
    results["copy_fault_us"] = spread(difference.collect::<Vec<_>>());
    results["write_folded_us"] = spread(&second[0]);
    Ok(results)
}

/// Returns the minor page faults of the first VM's QEMU.
fn minor_faults(lab: &Lab) -> anyhow::Result<u64> {
    let stat = Stat::read(format!("/proc/{}/stat", lab.pid(VMS[0])?).as_ref())?;
    Ok(stat.field(10))
}

/// Measures how long both guests hash cached files before their pages are folded, meanwhile, and
/// afterwards.
fn slowdown(lab: &Lab, (rounds, seconds): (usize, u32), results: &mut Value) -> anyhow::Result<()> {
    let hash = |times: u32| -> anyhow::Result<(f64, String)> {
        let script = format!(
            "began=$(date +%s%N); for i in $(seq {times}); do {HASH} > /run/sum; done
             echo $(( ($(date +%s%N) - began) / 1000 )); cat /run/sum"
        );
        let (mut us, mut sums) = (0.0, String::new());
        for said in lab.exec_all(&VMS, &script, LIMIT)? {
            let (time, sum) = said.split_once('\n').unwrap_or_default();
            us += time
                .trim()
                .parse::<f64>()
                .context("the guest told no time")?;
            sums.push_str(sum);
        }
        Ok((us / VMS.len() as f64, sums))
    };
    // The files are read into new pages, none of which is folded.
    let read_anew = || {
        let drop = "sync; echo 3 > /proc/sys/vm/drop_caches";
        lab.exec_all(&VMS, drop, LIMIT)?;
        hash(1).map(drop_times)
    };
    let sums = read_anew()?;
    let once_us = hash(1)?.0;
    let all = (1..=MOST_TIMES).rev();
    let fits = |times: &u32| f64::from(*times) * once_us <= f64::from(seconds) * 1e6;
    let times = all.into_iter().find(fits).unwrap_or(1);
    let [mut before, mut during, mut after, mut folded] = [(); 4].map(|()| Vec::new());
    for _ in 0..rounds {
        read_anew()?;
        before.push(hash(times)?.0);
        let pages = folded_pages(lab)?;
        lab.fold(true)?;
        let (us, others) = hash(times)?;
        during.push(us);
        most_folded(lab, |vm| vm.mapped_pages)?;
        lab.fold(false)?;
        folded.push((folded_pages(lab)? - pages) as f64);
        after.push(hash(times)?.0);
        ensure!(
            others == sums,
            "a guest hashed other bytes while its pages were folded"
        );
    }
    let percent = |times: &[f64]| {
        let slower = ratios(times, &before).into_iter();
        spread(
            slower
                .map(|ratio| (ratio - 1.0) * 100.0)
                .collect::<Vec<_>>(),
        )
    };
    results["slowdown_percent"] = percent(&during);
    results["slowdown_after_percent"] = percent(&after);
    results["hash_s"] = spread(before.iter().map(|us| us / 1e6).collect::<Vec<_>>());
    results["folded_pages_in_round"] = spread(folded);
    Ok(())
}

fn drop_times((_, sums): (f64, String)) -> String {
    sums
}

/// Returns how many pages of both guests were folded, or folded again, until now.
fn folded_pages(lab: &Lab) -> anyhow::Result<u64> {
    let vms = lab.stats()?.vms;
    Ok(vms
        .iter()
        .map(|vm| vm.folded_pages + vm.refolded_pages)
        .sum())
}
