//! Metrics of the mechanisms that save or move memory: folding, page stores, KSM, snapshots,
//! segments and lending.

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;

use memfold_api::{Borrowed, SwapPlace};
use memfold_daemon::OnShelf;
use memfold_fold::{DomainStats, EngineStats};
use memfold_ledger::KsmAccount;
use memfold_lend::LenderStatus;
use memfold_lend::waits::Waits;

use super::families::{Family, Labels, Samples, Scrape, any, bytes, families, flag, maybe, one};
use crate::exec_stream::StreamCounts;

pub(super) static FAMILIES: &[Family] = families! {
    Gauge Numbers "memfold_fold_paused" "1: folding is paused by the operator" fold |f| flag(f.paused);
    Gauge Ratio "memfold_fold_cpu_limit" "CPU that folding may use over time, as a share of one core" fold |f| f.cpu_share;
    Counter Seconds "memfold_fold_engine_cpu" "CPU time of the fold engine" fold |f| f.engine_cpu_s;
    Counter Seconds "memfold_fold_library_cpu" "CPU time of memfold's library in QEMU processes, for orders" fold |f| f.library_cpu_s;
    Counter Seconds "memfold_fold_report_cpu" "CPU time of the fold engine for reports such as this one" fold |f| f.report_cpu_s;
    Gauge Seconds "memfold_fold_delay_median" "Median time from hint to fold; absent before the first fold"
        maybe |s| s.figures.report.fold.hint_to_fold_p50_s;
    Gauge Seconds "memfold_fold_delay_p95" "95th percentile of the time from hint to fold; absent before the first fold"
        maybe |s| s.figures.report.fold.hint_to_fold_p95_s;
    Counter Numbers "memfold_fold_judged_pages" "Pages compared, by whether path and content of both files are equal" any judged;
    Counter Numbers "memfold_fold_files_given_up" "Times that a file was skipped because its bytes kept differing"
        fold |f| f.files_given_up as f64;
    Counter Bytes "memfold_fold_huge_kept" "Memory left in huge pages because too little of them could be folded"
        fold |f| bytes(f.huge_kept_pages);
    Counter Numbers "memfold_fold_mapping_limit_runs" "Runs not folded because the VM has nearly as many mappings as the kernel allows"
        fold |f| f.mapping_budget_runs as f64;
    Gauge Numbers "memfold_fold_hints_waiting" "Hints that wait to be processed" fold |f| f.hints_waiting as f64;
    Gauge Bytes "memfold_store" "Memory that the page store of a trust domain holds" stores |store| store.store_bytes as f64;
    Gauge Bytes "memfold_store_limit" "Cap of the trust domain's page store" stores |store| store.store_cap_bytes as f64;
    Gauge Numbers "memfold_store_full" "1: the page store is full and takes no new content" stores |store| flag(store.store_full);
    Counter Bytes "memfold_store_appended" "Memory copied into the page store" stores |store| bytes(store.appended_pages);
    Counter Bytes "memfold_store_punched" "Memory that the page store gave back to the host" stores |store| bytes(store.punched_pages);
    Gauge Numbers "memfold_ksm_running" "1: ksmd runs; all KSM metrics are absent where the kernel lacks KSM" ksm |ksm| Some(flag(ksm.run == 1));
    Gauge Numbers "memfold_ksm_steered" "1: this daemon steers KSM" one |s| flag(s.figures.steers_ksm);
    Gauge Bytes "memfold_ksm_shared" "Shared pages that KSM keeps in place of merged ones: pages_shared" ksm |ksm| Some(bytes(ksm.pages_shared));
    Gauge Bytes "memfold_ksm_sharing" "Memory that KSM saves: pages_sharing" ksm |ksm| Some(bytes(ksm.pages_sharing));
    Gauge Bytes "memfold_ksm_zero" "Zero pages that KSM mapped to the kernel's zero page; absent before Linux 6.6"
        ksm |ksm| ksm.zero_pages.map(bytes);
    Gauge Bytes "memfold_ksm_profit" "Memory that KSM saves less its metadata: general_profit; may be negative" ksm |ksm| Some(ksm.general_profit_bytes as f64);
    Counter Seconds "memfold_ksmd_cpu" "CPU time of ksmd since boot" ksm |ksm| Some(ksm.ksmd_cpu_s);
    Gauge Numbers "memfold_snapshots" "Snapshots" snapshots |all| all.count;
    Gauge Numbers "memfold_snapshots_broken" "Snapshots that cannot be used" snapshots |all| all.broken;
    Gauge Bytes "memfold_snapshots_disk" "Disk space of all snapshots" snapshots |all| all.bytes.0;
    Gauge Bytes "memfold_snapshots_memory" "Memory of snapshot images that are kept uncompressed for the VMs that run from them"
        one |s| s.figures.report.ledger.host.images_bytes.0 as f64;
    Gauge Numbers "memfold_segments" "Segments" segments |all| all.count;
    Gauge Numbers "memfold_segments_broken" "Segments that cannot be used" segments |all| all.broken;
    Gauge Bytes "memfold_segments_resident" "Segment bytes that are in the host's memory" segments |all| all.bytes.0;
    Gauge Numbers "memfold_segments_attached" "Attached segments, summed over all VMs"
        one |s| s.figures.vms.iter().map(|vm| vm.segments.len()).sum::<usize>() as f64;
    Gauge Bytes "memfold_lend_limit" "Most RAM that this host lends; all memfold_lend_* metrics are absent while the host does not lend"
        lending |lender| lender.max_bytes as f64;
    Gauge Bytes "memfold_lend_offered" "RAM that this host offers now, lent RAM included" lending |lender| lender.offer_bytes as f64;
    Gauge Bytes "memfold_lend_lent" "RAM that this host has lent: allocated and locked" lending |lender| lender.lent_bytes as f64;
    Gauge Bytes "memfold_lend_recalled" "Lent RAM that borrowers were asked to return" lending |lender| lender.recalled_bytes as f64;
    Gauge Numbers "memfold_lend_problem" "1: something keeps this host from lending ('memfold lend' says what)"
        lending |lender| flag(lender.problem.is_some());
    Counter Numbers "memfold_lend_exports_ended" "Exports that ended" lending |lender| lender.ended as f64;
    Counter Numbers "memfold_lend_exports_failed" "Exports that ended because they had failed" lending |lender| lender.failed as f64;
    Counter Numbers "memfold_lend_refused" "Connections to exports that were refused or broken off, such as those without the key"
        lending |lender| lender.refused as f64;
    Gauge Numbers "memfold_borrowed_vms" "VMs and swap volumes of this host that asked for lent RAM, by where their swap disk is"
        borrowed |_| 1;
    Gauge Bytes "memfold_borrowed" "Size of swap disks that asked for lent RAM, by where they are" borrowed |one| one.bytes;
    Counter Numbers "memfold_borrowed_requests" "Requests that swap disks on lent RAM have answered" requests |waits| waits.requests;
    Counter Numbers "memfold_borrowed_slow_requests" "Requests to swap disks on lent RAM that took longer than the label says" any slow;
    Counter Numbers "memfold_borrow_lies" "Wrong blocks that lenders served; no VM saw any, and the lender was dropped"
        one |s| s.figures.lies as f64;
    Gauge Numbers "memfold_lenders_distrusted" "Lenders that are not used for a while because they served wrong bytes"
        one |s| s.figures.distrusted as f64;
    Gauge Numbers "memfold_registry_reachable" "1: the registry of leases answers" one |s| flag(s.figures.leases.is_some());
    Gauge Numbers "memfold_leases" "Leases of this host; absent while the registry does not answer" any leases;
    Gauge Numbers "memfold_streamed_commands" "Streamed commands that run in guests: 'vm exec -i', 'vm cp' and the like"
        streams |counts| counts.started.load(Relaxed).saturating_sub(counts.ended.load(Relaxed));
    Counter Numbers "memfold_streamed_commands_started" "Streamed commands that were started" streams |counts| counts.started.load(Relaxed);
    Counter Bytes "memfold_streamed" "Input that streamed commands got, and output that their clients got" any streamed;
    Counter Numbers "memfold_access_refused" "Connections and requests that were refused, over TCP and the socket" any refused;
};

fn streams(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    figure: fn(&StreamCounts) -> u64,
) -> fmt::Result {
    out.one(figure(&scrape.streams) as f64)
}

fn streamed(scrape: &Scrape, out: &mut Samples<'_>) -> fmt::Result {
    let counts = &scrape.streams;
    out.with(
        &[("direction", "input")],
        counts.input_bytes.load(Relaxed) as f64,
    )?;
    out.with(
        &[("direction", "output")],
        counts.output_bytes.load(Relaxed) as f64,
    )
}

fn refused(scrape: &Scrape, out: &mut Samples<'_>) -> fmt::Result {
    let mut all = scrape.refused.iter();
    all.try_for_each(|(why, count)| out.with(&[("why", why)], *count as f64))
}

/// Writes the numbers of compared pages by equality of path and of content: the four cases of study
/// C.
fn judged(scrape: &Scrape, out: &mut Samples<'_>) -> fmt::Result {
    let fold = &scrape.figures.report.fold;
    for (path, content, pages) in [
        ("same", "same", fold.case_same_path_same_content),
        ("same", "different", fold.case_same_path_different_content),
        ("different", "same", fold.case_different_path_same_content),
        (
            "different",
            "different",
            fold.case_different_path_different_content,
        ),
    ] {
        out.with(&[("path", path), ("content", content)], pages as f64)?;
    }
    Ok(())
}

fn fold(scrape: &Scrape, out: &mut Samples<'_>, figure: fn(&EngineStats) -> f64) -> fmt::Result {
    out.one(figure(&scrape.figures.report.fold))
}

fn stores(scrape: &Scrape, out: &mut Samples<'_>, figure: fn(&DomainStats) -> f64) -> fmt::Result {
    for store in &scrape.figures.report.fold.domains {
        out.with(&[("domain", &store.domain)], figure(store))?;
    }
    Ok(())
}

fn ksm(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    figure: fn(&KsmAccount) -> Option<f64>,
) -> fmt::Result {
    let ksm = scrape.figures.report.ledger.host.ksm.as_ref();
    out.maybe(ksm.and_then(figure))
}

fn snapshots(scrape: &Scrape, out: &mut Samples<'_>, figure: fn(&OnShelf) -> u64) -> fmt::Result {
    let all = scrape.figures.snapshots.as_ref();
    out.maybe(all.map(|all| figure(all) as f64))
}

fn segments(scrape: &Scrape, out: &mut Samples<'_>, figure: fn(&OnShelf) -> u64) -> fmt::Result {
    let all = scrape.figures.segments.as_ref();
    out.maybe(all.map(|all| figure(all) as f64))
}

fn lending(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    figure: fn(&LenderStatus) -> f64,
) -> fmt::Result {
    out.maybe(scrape.figures.lending.as_ref().map(figure))
}

/// Writes the sum of a figure for each place of swap disks. Every place is written, also with 0, so
/// that an alert can see a change.
fn borrowed(scrape: &Scrape, out: &mut Samples<'_>, figure: fn(&Borrowed) -> u64) -> fmt::Result {
    for (place, word) in [
        (SwapPlace::Lent, "lent"),
        (SwapPlace::Degraded, "degraded"),
        (SwapPlace::OnCopy, "on_copy"),
        (SwapPlace::OnDisk, "on_disk"),
        (SwapPlace::Lost, "lost"),
    ] {
        let there = scrape.figures.borrowed.iter();
        let sum: u64 = there.filter(|one| one.place == place).map(figure).sum();
        out.with(&[("place", word)], sum as f64)?;
    }
    Ok(())
}

/// Writes a figure of each VM for which requests to the swap disk were counted.
fn waits(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    more: Labels<'_>,
    figure: fn(&Waits) -> u64,
) -> fmt::Result {
    for one in &scrape.figures.borrowed {
        if let Some(waits) = &one.waits {
            let labels = [&[("vm", &*one.vm)], more].concat();
            out.with(&labels, figure(waits) as f64)?;
        }
    }
    Ok(())
}

fn requests(scrape: &Scrape, out: &mut Samples<'_>, figure: fn(&Waits) -> u64) -> fmt::Result {
    waits(scrape, out, &[], figure)
}

fn slow(scrape: &Scrape, out: &mut Samples<'_>) -> fmt::Result {
    let mut longer = |than, figure| waits(scrape, out, &[("longer_than_seconds", than)], figure);
    longer("0.1", |waits| waits.over_100_ms)?;
    longer("1", |waits| waits.over_1_s)?;
    longer("5", |waits| waits.over_5_s)
}

fn leases(scrape: &Scrape, out: &mut Samples<'_>) -> fmt::Result {
    let Some(leases) = &scrape.figures.leases else {
        return Ok(());
    };
    let host = &scrape.figures.host;
    let lent = leases.iter().filter(|l| l.lender.host == *host).count();
    let borrowed = leases.iter().filter(|l| l.borrower == *host).count();
    out.with(&[("role", "lender")], lent as f64)?;
    out.with(&[("role", "borrower")], borrowed as f64)
}
