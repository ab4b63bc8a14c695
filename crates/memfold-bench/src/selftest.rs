//! The self-test (`memfold doctor --self-test`): proves on the user's own hardware that folding
//! loses no byte. The drawing shows what is tested (left), how, and what must be true (right).
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

use anyhow::{Context, bail};
use memfold_units::{ByteSize, PageCount};
use serde::Serialize;

pub use library::LibraryProof;

use memfold_fold::{EngineSettings, EngineStats};
use memfold_lab::{DiskMode, Lab, at_once};
use memfold_ledger as ledger;
use memfold_vm::Vm;

use crate::wait::most_folded;

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
pub const CHURN_SECONDS: u64 = 45;

/// Shell script that hashes a part of the files in `/usr`, about 60 MB: the same files in every
/// Debian of one version.
pub const HASH: &str = "find /usr/bin /usr/sbin /usr/lib/x86_64-linux-gnu -xdev -type f -size -4M -print0 | sort -z | \
    head -z -n 900 | xargs -0 sha256sum | sha256sum";
const HASH_FROM_DISK: &str = "sync; echo 3 > /proc/sys/vm/drop_caches; ";
const CHURN: &str = include_str!("selftest/churn.pl");

/// Results of the self-test.
#[derive(Clone, Debug, Serialize)]
pub struct SelfTest {
    /// Whether all claims of the self-test hold.
    pub passed: bool,
    /// Accelerator of the guests, as QEMU reports it: `kvm` or `tcg`.
    pub accelerator: String,
    /// All claims that the self-test checks, with their results.
    pub claims: Vec<Claim>,
    /// Results of the stress test of the fold library in this process.
    pub library: LibraryProof,
    /// Figures of folding in both guests.
    pub guests: GuestFigures,
    /// Duration of the whole self-test, in seconds.
    pub seconds: f64,
}

/// A claim that the self-test checks, with the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Claim {
    /// The claim, as a sentence.
    pub what: &'static str,
    /// Whether the claim holds.
    pub holds: bool,
    /// What the self-test observed about the claim, as text.
    pub seen: String,
}

/// Figures of folding in both guests of the self-test together.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GuestFigures {
    /// Number of guest pages mapped to the page store, at the time when most pages were folded.
    pub folded_pages: u64,
    /// Number of guest pages that were folded again after a write.
    pub refolded_pages: u64,
    /// Number of folded guest pages that were written to afterwards, so that the kernel copied
    /// them.
    pub written_pages: u64,
    /// Number of guest pages that differed from the page store when they were compared, and were
    /// therefore not folded.
    pub differing_pages: u64,
    /// Number of physical page frames that both guests map.
    pub shared_frames: u64,
    /// Memory that folding saves, in bytes, before memfold's own memory is subtracted.
    pub saved_bytes: i64,
    /// Number of pages that the guests' test programs have written.
    pub churn_writes: u64,
    /// Number of pages that the guests' test programs have checked.
    pub churn_checks: u64,
    /// Number of checked pages that held other bytes than the test program had written; any number
    /// but 0 is a failure.
    pub churn_errors: u64,
    /// Longest time that a page was protected against writes during folding, in microseconds.
    pub freeze_max_us: f64,
    /// Median time that pages were protected against writes during folding, in microseconds. It is
    /// rounded up to a power of two of nanoseconds.
    pub freeze_median_us: f64,
    /// CPU time of the fold engine during the self-test, in seconds.
    pub engine_cpu_s: f64,
    /// CPU time of the fold library in both QEMU processes, in seconds.
    pub library_cpu_s: f64,
}

/// Runs the self-test. `images`: guest images that the two guests boot; `churn_s`: time for which
/// the guests write and check, in seconds. `progress` is called with the name of each step when the
/// step begins.
pub fn run(images: [&str; 2], churn_s: u64, progress: &dyn Fn(&str)) -> anyhow::Result<SelfTest> {
    let began = Instant::now();
    progress("folding memory of this process while threads write to it");
    let library = library::stress(LIBRARY_TIME)
        .context("memfold cannot share (fold) memory of a process on this host")?;

    let lab = Lab::new(EngineSettings::default())?;
    let names: Vec<&str> = GUESTS.iter().map(|(name, _)| *name).collect();
    progress("booting two Debian guests");
    let spec = |(name, image)| Lab::spec(name, image, MEMORY, DiskMode::Buffered);
    let specs = names.iter().copied().zip(images).map(spec);
    lab.boot(specs.collect::<Result<_, _>>()?, BOOT_TIMEOUT)?;
    let accelerator = accelerator(&lab)?;
    progress(&format!(
        "hashing files in both, before folding ({accelerator})"
    ));
    let before = lab.exec_all(&names, HASH, WORK_TIMEOUT)?;
    progress("hashing again while folding, beside a program that writes");
    let (during, churn) = fold_under_writes(&lab, &names, churn_s)?;
    let (stats, _) = most_folded(&lab, |vm| vm.mapped_pages)?;
    let frames = shared_frames(&lab)?;
    let ledger = lab.report()?.ledger;
    progress("hashing once more, what is cached and then from disk");
    let after = lab.exec_all(&names, HASH, WORK_TIMEOUT)?;
    let from_disk = lab.exec_all(&names, &format!("{HASH_FROM_DISK}{HASH}"), WORK_TIMEOUT)?;
    let last = lab.stats()?;

    let saved_bytes = ledger.host.saved_by_folding_bytes;
    let guests = figures(&stats, &last, &churn, frames, saved_bytes);
    let is_equal = [&during, &after, &from_disk].map(|sums| *sums == before);
    let [during, after, from_disk] = is_equal.map(word);
    let mut claims = library_claims(&library).to_vec();
    claims.push(claim(
        "guests read the same bytes before, during and after folding, and from disk",
        is_equal == [true; 3],
        format!("hashes during {during}, after {after}, from disk {from_disk}"),
    ));
    claims.extend(guest_claims(&guests));
    let disagreements = ledger.disagreements.iter().map(|d| &*d.what);
    let disagreements = disagreements.collect::<Vec<_>>().join("; ");
    let agrees = ledger.disagreements.is_empty();
    claims.push(claim(
        "the ledger's sums agree with the kernel's within 2 %",
        agrees,
        if agrees { "all".into() } else { disagreements },
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

const fn claim(what: &'static str, holds: bool, seen: String) -> Claim {
    Claim { what, holds, seen }
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
fn fold_under_writes(
    lab: &Lab,
    names: &[&str],
    churn_s: u64,
) -> anyhow::Result<(Vec<String>, Vec<String>)> {
    let write = |(seed, name): (usize, &&str)| {
        let script = format!(
            "perl - /var/tmp/memfold-self-test {churn_s} {seed} <<'MEMFOLD_CHURN'\n{CHURN}\nMEMFOLD_CHURN\n"
        );
        lab.exec(name, &script, WORK_TIMEOUT)
    };
    std::thread::scope(|scope| {
        let writers = scope.spawn(|| at_once((1..).zip(names), write));
        lab.fold(true)?;
        let during = lab.exec_all(names, HASH, WORK_TIMEOUT)?;
        let panicked = |_| bail!("the thread that waits for the guests panicked");
        Ok((during, writers.join().unwrap_or_else(panicked)?))
    })
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

/// Returns the upper end of the histogram bucket with the median time, in microseconds. Bucket i
/// holds times of 2^i to 2^(i+1) ns.
fn median_us(buckets: &[u64]) -> f64 {
    let half = buckets.iter().sum::<u64>().div_ceil(2);
    let mut sum = 0;
    let middle = (1..).zip(buckets).find(|(_, n)| {
        sum += **n;
        sum >= half && half > 0
    });
    middle.map_or(0.0, |(end, _)| f64::exp2(f64::from(end)) / 1000.0)
}

fn library_claims(proof: &LibraryProof) -> [Claim; 2] {
    let LibraryProof {
        writes,
        wrong_pages,
        folded_pages,
        refolded_pages,
        changed_runs,
        ..
    } = proof;
    [
        claim(
            "no write is lost while pages of this process are folded",
            *wrong_pages == 0 && *writes > 0,
            format!(
                "{writes} writes in {:.0} s, {wrong_pages} pages wrong",
                proof.seconds
            ),
        ),
        claim(
            "the kernel folds, and folds again",
            *folded_pages > 0 && *refolded_pages > 0,
            format!(
                "{folded_pages} pages folded, {refolded_pages} again, {changed_runs} runs changed meanwhile and left alone"
            ),
        ),
    ]
}

fn guest_claims(guests: &GuestFigures) -> [Claim; 4] {
    let (writes, checks, errors) = (
        guests.churn_writes,
        guests.churn_checks,
        guests.churn_errors,
    );
    let (frames, folded) = (guests.shared_frames, guests.folded_pages);
    [
        claim(
            "guests' pages were folded",
            folded >= FEWEST_PAGES,
            format!("{}, {} again", size(folded), size(guests.refolded_pages)),
        ),
        claim(
            "both guests map the same physical pages",
            frames >= FEWEST_PAGES / 2,
            format!("{} ({frames} page frames)", size(frames)),
        ),
        claim(
            "programs in the guests find what they wrote, beside folding",
            errors == 0 && writes > 0 && checks > 0,
            format!("{writes} pages written, {checks} checked, {errors} wrong"),
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
    fn write_counts_of_self_test_guests_are_summed_and_a_missing_count_is_an_error() {
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
