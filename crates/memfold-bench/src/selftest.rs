//! The self-test: proves on the user's own hardware that folding loses no byte.
//!
//! ```text
//!   library    pages of this process are folded and refolded while threads count in them      no count is lost
//!   guests     two boot; /usr hashed  |  hashed while folding, beside a program that writes    all hashes equal,
//!              before folding         |  and checks files  |  hashed again, read from disk      no page wrong
//!   kernel     physical page frames of both guests are compared                               some are the same
//! ```

mod library;
pub mod table;

use std::time::{Duration, Instant};

use anyhow::Context;
use memfold_units::{ByteSize, PageCount};
use serde::Serialize;

pub use library::LibraryProof;

use memfold_fold::{EngineSettings, EngineStats};
use memfold_lab::{DiskMode, Lab};
use memfold_ledger as ledger;
use memfold_vm::Vm;

/// Name and image of the two guests. The images are built separately, as those of users' VMs are.
pub const GUESTS: [(&str, &str); 2] = [("self-test-a", "trixie-a"), ("self-test-b", "trixie-b")];
const MEMORY: ByteSize = ByteSize::mib(384);
const LIBRARY_TIME: Duration = Duration::from_secs(5);
const BOOT_TIMEOUT: Duration = Duration::from_secs(240);
const WORK_TIMEOUT: Duration = Duration::from_secs(300);
/// Fewest folded pages that count as proof. Two Debian guests have more pages than this in common
/// in `/usr`.
const FEWEST_PAGES: u64 = 2048;
/// Time for which the guests write and check, in seconds.
const CHURN_SECONDS: u64 = 45;

/// Shell script that hashes a part of the files in `/usr`, about 60 MB: the same files in every
/// Debian of one version.
const HASH: &str = "find /usr/bin /usr/sbin /usr/lib/x86_64-linux-gnu -xdev -type f -size -4M -print0 | sort -z | \
    head -z -n 900 | xargs -0 sha256sum | sha256sum";
const HASH_FROM_DISK: &str = "sync; echo 3 > /proc/sys/vm/drop_caches; ";
const CHURN: &str = include_str!("selftest/churn.pl");

/// Result of the self-test.
#[derive(Clone, Debug, Serialize)]
pub struct SelfTest {
    /// Whether all claims hold.
    pub passed: bool,
    /// Accelerator that QEMU reports: `kvm` or `tcg`.
    pub accelerator: String,
    /// All claims, with their results.
    pub claims: Vec<Claim>,
    /// Result of the stress test of the library in this process.
    pub library: LibraryProof,
    /// Figures of both guests.
    pub guests: GuestFigures,
    /// Duration of the self-test, in seconds.
    pub seconds: f64,
}

/// A claim that the self-test checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Claim {
    /// The claim, as text.
    pub what: &'static str,
    /// Whether the claim holds.
    pub holds: bool,
    /// Observed values, as text.
    pub seen: String,
}

/// Figures of both guests together.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GuestFigures {
    /// Number of pages mapped to the page store when most pages were folded.
    pub folded_pages: u64,
    /// Number of pages that were folded again.
    pub refolded_pages: u64,
    /// Number of folded pages that the guests have written to since, so that the kernel copied
    /// them.
    pub written_pages: u64,
    /// Number of pages that differed when compared, and were therefore not folded.
    pub differing_pages: u64,
    /// Number of physical pages that both guests map.
    pub shared_frames: u64,
    /// Memory saved by folding, in bytes, before memfold's own memory is subtracted.
    pub saved_bytes: i64,
    /// Number of pages written by the guests' programs.
    pub churn_writes: u64,
    /// Number of pages checked by the guests' programs.
    pub churn_checks: u64,
    /// Number of pages that held other bytes than the programs had written.
    pub churn_errors: u64,
    /// Longest time that a page was frozen.
    pub freeze_max_us: f64,
    /// Median time for which pages were frozen, rounded up to a power of two nanoseconds, in
    /// microseconds.
    pub freeze_median_us: f64,
    /// CPU time of the fold engine, in seconds.
    pub engine_cpu_s: f64,
    /// CPU time of the library in both QEMUs, in seconds.
    pub library_cpu_s: f64,
}

/// Runs the self-test. `progress` is called with the name of each step.
pub fn run(progress: &dyn Fn(&str)) -> anyhow::Result<SelfTest> {
    let began = Instant::now();
    progress("folding memory of this process while threads write to it");
    let library = library::stress(LIBRARY_TIME)
        .context("memfold cannot share (fold) memory of a process on this host")?;

    let lab = Lab::new(EngineSettings::default())?;
    let names: Vec<&str> = GUESTS.iter().map(|(name, _)| *name).collect();
    progress("booting two Debian guests");
    for (name, image) in GUESTS {
        lab.start(Lab::spec(name, image, MEMORY, DiskMode::Buffered)?)?;
    }
    for name in &names {
        lab.wait_ready(name, BOOT_TIMEOUT)?;
    }
    let accelerator = accelerator(&lab)?;
    progress(&format!(
        "hashing files in both, before folding ({accelerator})"
    ));
    let before = lab.exec_all(&names, HASH, WORK_TIMEOUT)?;
    progress("hashing again while folding, beside a program that writes");
    let (during, churn) = fold_under_writes(&lab, &names)?;
    let stats = most_folded(&lab)?;
    let frames = shared_frames(&lab)?;
    let report = lab.report()?;
    progress("hashing once more, what is cached and then from disk");
    let after = lab.exec_all(&names, HASH, WORK_TIMEOUT)?;
    let from_disk = lab.exec_all(&names, &format!("{HASH_FROM_DISK}{HASH}"), WORK_TIMEOUT)?;
    let last = lab.stats()?;

    let guests = figures(
        &stats,
        &last,
        &churn,
        frames,
        report.ledger.host.saved_by_folding_bytes,
    );
    let mut claims = library_claims(&library);
    let equal = |sums: &[String]| sums == before;
    claims.push(claim(
        "guests read the same bytes before, during and after folding, and from disk",
        equal(&during) && equal(&after) && equal(&from_disk),
        format!(
            "hashes during {}, after {}, from disk {}",
            word(equal(&during)),
            word(equal(&after)),
            word(equal(&from_disk))
        ),
    ));
    claims.extend(guest_claims(&guests));
    let disagreements: Vec<_> = report
        .ledger
        .disagreements
        .iter()
        .map(|d| &*d.what)
        .collect();
    claims.push(claim(
        "the ledger's sums agree with the kernel's within 2 %",
        disagreements.is_empty(),
        if disagreements.is_empty() {
            "all".to_owned()
        } else {
            disagreements.join("; ")
        },
    ));
    Ok(SelfTest {
        passed: claims.iter().all(|c| c.holds),
        accelerator,
        claims,
        library,
        guests,
        seconds: began.elapsed().as_secs_f64(),
    })
}

fn claim(what: &'static str, holds: bool, seen: impl Into<String>) -> Claim {
    Claim {
        what,
        holds,
        seen: seen.into(),
    }
}

const fn word(equal: bool) -> &'static str {
    if equal { "equal" } else { "DIFFERENT" }
}

fn size(pages: u64) -> String {
    PageCount(pages).bytes().to_string()
}

/// Returns the accelerator that QEMU reports.
fn accelerator(lab: &Lab) -> anyhow::Result<String> {
    let vm = Vm::find(lab.directory(), GUESTS[0].0)?;
    let answer = vm.qmp()?.query("query-kvm")?;
    let kvm = answer["enabled"].as_bool().unwrap_or(false);
    Ok(if kvm { "kvm" } else { "tcg" }.to_owned())
}

/// Folds while both guests hash and write. Returns the guests' hashes, and the output of their
/// writers.
fn fold_under_writes(lab: &Lab, names: &[&str]) -> anyhow::Result<(Vec<String>, Vec<String>)> {
    std::thread::scope(|scope| {
        let writers: Vec<_> = (1..)
            .zip(names)
            .map(|(seed, name)| {
                let script = format!(
                    "perl - /var/tmp/memfold-self-test {CHURN_SECONDS} {seed} <<'MEMFOLD_CHURN'\n{CHURN}\nMEMFOLD_CHURN\n"
                );
                scope.spawn(move || lab.exec(name, &script, WORK_TIMEOUT))
            })
            .collect();
        lab.fold(true)?;
        let during = lab.exec_all(names, HASH, WORK_TIMEOUT)?;
        let churn = writers
            .into_iter()
            .map(|w| {
                w.join().unwrap_or_else(|_| {
                    anyhow::bail!("the thread that writes files in a guest panicked")
                })
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        Ok((during, churn))
    })
}

/// Waits until the number of folded pages no longer grows, for a minute at most.
pub(super) fn most_folded(lab: &Lab) -> anyhow::Result<EngineStats> {
    let began = Instant::now();
    let mut best = 0;
    let mut grew = began;
    loop {
        let stats = lab.stats()?;
        let folded: u64 = stats.vms.iter().map(|vm| vm.mapped_pages).sum();
        if folded > best + best / 200 {
            best = folded;
            grew = Instant::now();
        }
        if grew.elapsed() > Duration::from_secs(5) || began.elapsed() > Duration::from_secs(60) {
            return Ok(stats);
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Returns the number of physical page frames that both guests map, from the kernel's page map.
fn shared_frames(lab: &Lab) -> anyhow::Result<u64> {
    let read = |name: &str| {
        let vm = Vm::find(lab.directory(), name)?;
        let layout = vm.layout(&mut vm.qmp()?)?;
        anyhow::Ok((vm.pid().as_raw_nonzero().get(), layout))
    };
    let (a, b) = (read(GUESTS[0].0)?, read(GUESTS[1].0)?);
    Ok(ledger::shared_frames((a.0, &a.1), (b.0, &b.1))?)
}

fn figures(
    stats: &EngineStats,
    last: &EngineStats,
    churn: &[String],
    shared_frames: u64,
    saved_bytes: i64,
) -> GuestFigures {
    let mut figures = GuestFigures {
        shared_frames,
        saved_bytes,
        engine_cpu_s: last.engine_cpu_s,
        library_cpu_s: last.library_cpu_s,
        ..GuestFigures::default()
    };
    for vm in &stats.vms {
        figures.folded_pages += vm.mapped_pages;
        figures.written_pages += vm.copied_pages;
    }
    let mut freezes: Vec<u64> = Vec::new();
    for vm in &last.vms {
        figures.refolded_pages += vm.refolded_pages;
        figures.differing_pages += vm.differing_pages;
        figures.freeze_max_us = figures.freeze_max_us.max(vm.freeze_max_ns as f64 / 1000.0);
        freezes.resize(freezes.len().max(vm.freeze_histogram.len()), 0);
        for (all, one) in freezes.iter_mut().zip(&vm.freeze_histogram) {
            *all += one;
        }
    }
    figures.freeze_median_us = median_us(&freezes);
    for line in churn {
        let mut numbers = line.split_ascii_whitespace().map(str::parse::<u64>);
        match [numbers.next(), numbers.next(), numbers.next()] {
            [Some(Ok(writes)), Some(Ok(checks)), Some(Ok(errors))] => {
                figures.churn_writes += writes;
                figures.churn_checks += checks;
                figures.churn_errors += errors;
            }
            // A writer without output counts as an error, because it proves nothing.
            _ => figures.churn_errors += 1,
        }
    }
    figures
}

/// Returns the upper end of the bucket with the median freeze. Bucket i holds times of 2^i to
/// 2^(i+1) ns.
fn median_us(buckets: &[u64]) -> f64 {
    let half = buckets.iter().sum::<u64>().div_ceil(2);
    let mut sum = 0;
    let middle = (1..).zip(buckets).find(|(_, n)| {
        sum += **n;
        sum >= half && half > 0
    });
    middle.map_or(0.0, |(end, _)| f64::exp2(f64::from(end)) / 1000.0)
}

fn library_claims(proof: &LibraryProof) -> Vec<Claim> {
    vec![
        claim(
            "no write is lost while pages of this process are folded",
            proof.wrong_pages == 0 && proof.writes > 0,
            format!(
                "{} writes in {:.0} s, {} pages wrong",
                proof.writes, proof.seconds, proof.wrong_pages
            ),
        ),
        claim(
            "the kernel folds, and folds again",
            proof.folded_pages > 0 && proof.refolded_pages > 0,
            format!(
                "{} pages folded, {} again, {} runs changed meanwhile and left alone",
                proof.folded_pages, proof.refolded_pages, proof.changed_runs
            ),
        ),
    ]
}

fn guest_claims(guests: &GuestFigures) -> Vec<Claim> {
    vec![
        claim(
            "guests' pages were folded",
            guests.folded_pages >= FEWEST_PAGES,
            format!(
                "{}, {} again",
                size(guests.folded_pages),
                size(guests.refolded_pages)
            ),
        ),
        claim(
            "both guests map the same physical pages",
            guests.shared_frames >= FEWEST_PAGES / 2,
            format!(
                "{} ({} page frames)",
                size(guests.shared_frames),
                guests.shared_frames
            ),
        ),
        claim(
            "programs in the guests find what they wrote, beside folding",
            guests.churn_errors == 0 && guests.churn_writes > 0 && guests.churn_checks > 0,
            format!(
                "{} pages written, {} checked, {} wrong",
                guests.churn_writes, guests.churn_checks, guests.churn_errors
            ),
        ),
        claim(
            "folded pages that were written have copies of their own",
            guests.written_pages > 0,
            size(guests.written_pages),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_reported_by_writer_guests_are_summed_and_a_missing_report_is_an_error() {
        let stats = EngineStats::default();
        let churn = ["10 20 0\n".to_owned(), "1 2 3".to_owned(), String::new()];
        let figures = figures(&stats, &stats, &churn, 5, -1);
        assert_eq!(
            (
                figures.churn_writes,
                figures.churn_checks,
                figures.churn_errors
            ),
            (11, 22, 4)
        );
        let failed: Vec<_> = guest_claims(&figures)
            .into_iter()
            .filter(|c| !c.holds)
            .collect();
        assert_eq!(failed.len(), 4, "{failed:?}");
    }

    #[test]
    fn the_median_freeze_time_is_the_upper_bound_of_its_histogram_bucket() {
        assert!(median_us(&[]).abs() < f64::EPSILON);
        // The upper end is 2^11 ns.
        assert!((median_us(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 3, 1]) - 2.048).abs() < 1e-9);
    }
}
