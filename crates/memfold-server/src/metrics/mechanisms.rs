//! Folding, page stores, KSM, snapshots, segments, lending.

use std::fmt;

use memfold_api::{Borrowed, SwapPlace};
use memfold_daemon::OnShelf;
use memfold_fold::DomainStats;
use memfold_ledger::KsmAccount;
use memfold_lend::LenderStatus;
use memfold_lend::waits::Waits;
use memfold_units::PAGE_SIZE;

use super::Scrape;
use super::families::In::{Bytes, Numbers, Ratio, Seconds};
use super::families::{Family, Labels, Samples, counter, flag, gauge};

pub(super) static FAMILIES: &[Family] = &[
    gauge(
        "memfold_fold_paused",
        Numbers,
        "1: folding is paused by the operator",
        |s, out| out.one(flag(s.figures.report.fold.paused)),
    ),
    gauge(
        "memfold_fold_cpu_limit",
        Ratio,
        "CPU that folding may use over time, as a share of one core",
        |s, out| out.one(s.figures.report.fold.cpu_share),
    ),
    counter(
        "memfold_fold_engine_cpu",
        Seconds,
        "CPU time of the engine",
        |s, out| out.one(s.figures.report.fold.engine_cpu_s),
    ),
    counter(
        "memfold_fold_library_cpu",
        Seconds,
        "CPU time of the library in the QEMUs, for orders",
        |s, out| out.one(s.figures.report.fold.library_cpu_s),
    ),
    counter(
        "memfold_fold_report_cpu",
        Seconds,
        "CPU time of the engine for reports such as this",
        |s, out| out.one(s.figures.report.fold.report_cpu_s),
    ),
    gauge(
        "memfold_fold_delay_median",
        Seconds,
        "Half of the hinted pages were folded within this time; absent before the first",
        |s, out| out.maybe(s.figures.report.fold.hint_to_fold_p50_s),
    ),
    gauge(
        "memfold_fold_delay_p95",
        Seconds,
        "95 % of the hinted pages were folded within this time; absent before the first",
        |s, out| out.maybe(s.figures.report.fold.hint_to_fold_p95_s),
    ),
    counter(
        "memfold_fold_judged_pages",
        Numbers,
        "Pages judged, by whether path and content of both files are the same",
        judged,
    ),
    counter(
        "memfold_fold_files_given_up",
        Numbers,
        "Times a file was left alone because its bytes keep differing",
        |s, out| out.one(s.figures.report.fold.files_given_up as f64),
    ),
    counter(
        "memfold_fold_huge_kept",
        Bytes,
        "Left in huge pages because too little of them could be folded",
        |s, out| out.one(bytes(s.figures.report.fold.huge_kept_pages)),
    ),
    counter(
        "memfold_fold_mapping_limit_runs",
        Numbers,
        "Runs left because the VM has nearly as many mappings as the kernel allows",
        |s, out| out.one(s.figures.report.fold.mapping_budget_runs as f64),
    ),
    gauge(
        "memfold_fold_hints_waiting",
        Numbers,
        "Hints that wait",
        |s, out| out.one(s.figures.report.fold.hints_waiting as f64),
    ),
    gauge(
        "memfold_store",
        Bytes,
        "Memory that the page store of a trust domain holds",
        |s, out| stores(s, out, |store| store.store_bytes as f64),
    ),
    gauge("memfold_store_limit", Bytes, "Its cap", |s, out| {
        stores(s, out, |store| store.store_cap_bytes as f64)
    }),
    gauge(
        "memfold_store_full",
        Numbers,
        "1: the cap keeps new content out",
        |s, out| stores(s, out, |store| flag(store.store_full)),
    ),
    counter("memfold_store_appended", Bytes, "Copied in", |s, out| {
        stores(s, out, |store| bytes(store.appended_pages))
    }),
    counter("memfold_store_punched", Bytes, "Given back", |s, out| {
        stores(s, out, |store| bytes(store.punched_pages))
    }),
    gauge(
        "memfold_ksm_running",
        Numbers,
        "1: ksmd runs; all of KSM is absent where the kernel lacks it",
        |s, out| ksm(s, out, |ksm| Some(flag(ksm.run == 1))),
    ),
    gauge(
        "memfold_ksm_steered",
        Numbers,
        "1: this daemon steers it",
        |s, out| out.one(flag(s.figures.steers_ksm)),
    ),
    gauge(
        "memfold_ksm_shared",
        Bytes,
        "Pages that merged pages were replaced by: pages_shared",
        |s, out| ksm(s, out, |ksm| Some(bytes(ksm.pages_shared))),
    ),
    gauge(
        "memfold_ksm_sharing",
        Bytes,
        "Saved by them: pages_sharing",
        |s, out| ksm(s, out, |ksm| Some(bytes(ksm.pages_sharing))),
    ),
    gauge(
        "memfold_ksm_zero",
        Bytes,
        "Pages of zeroes on the zero page of the kernel; absent before Linux 6.6",
        |s, out| ksm(s, out, |ksm| ksm.zero_pages.map(bytes)),
    ),
    gauge(
        "memfold_ksm_profit",
        Bytes,
        "general_profit: saved less metadata; may be negative",
        |s, out| ksm(s, out, |ksm| Some(ksm.general_profit_bytes as f64)),
    ),
    counter(
        "memfold_ksmd_cpu",
        Seconds,
        "CPU time of ksmd since boot",
        |s, out| ksm(s, out, |ksm| Some(ksm.ksmd_cpu_s)),
    ),
    gauge("memfold_snapshots", Numbers, "Snapshots", |s, out| {
        shelf(s.figures.snapshots, out, |all| all.count)
    }),
    gauge(
        "memfold_snapshots_broken",
        Numbers,
        "Of them, those that can not be used",
        |s, out| shelf(s.figures.snapshots, out, |all| all.broken),
    ),
    gauge(
        "memfold_snapshots_disk",
        Bytes,
        "What they take on disk",
        |s, out| shelf(s.figures.snapshots, out, |all| all.bytes.0),
    ),
    gauge(
        "memfold_snapshots_memory",
        Bytes,
        "Memory of images that are laid out for the VMs that run from them",
        |s, out| out.one(s.figures.report.ledger.host.images_bytes.0 as f64),
    ),
    gauge("memfold_segments", Numbers, "Segments", |s, out| {
        shelf(s.figures.segments, out, |all| all.count)
    }),
    gauge(
        "memfold_segments_broken",
        Numbers,
        "Of them, those that can not be used",
        |s, out| shelf(s.figures.segments, out, |all| all.broken),
    ),
    gauge(
        "memfold_segments_resident",
        Bytes,
        "What of them is in the memory of the host",
        |s, out| shelf(s.figures.segments, out, |all| all.bytes.0),
    ),
    gauge(
        "memfold_segments_attached",
        Numbers,
        "Segments of all VMs, added up",
        |s, out| {
            out.one(
                s.figures
                    .vms
                    .iter()
                    .map(|vm| vm.segments.len())
                    .sum::<usize>() as f64,
            )
        },
    ),
    gauge(
        "memfold_lend_limit",
        Bytes,
        "Most that this host lends; all of memfold_lend_* is absent while it does not lend",
        |s, out| lending(s, out, |lender| lender.max_bytes as f64),
    ),
    gauge(
        "memfold_lend_offered",
        Bytes,
        "What it offers now, lent bytes included",
        |s, out| lending(s, out, |lender| lender.offer_bytes as f64),
    ),
    gauge(
        "memfold_lend_lent",
        Bytes,
        "What it has lent: allocated and locked",
        |s, out| lending(s, out, |lender| lender.lent_bytes as f64),
    ),
    gauge(
        "memfold_lend_recalled",
        Bytes,
        "What borrowers are to give back",
        |s, out| lending(s, out, |lender| lender.recalled_bytes as f64),
    ),
    gauge(
        "memfold_lend_problem",
        Numbers,
        "1: something keeps it from lending (memfold lend says what)",
        |s, out| lending(s, out, |lender| flag(lender.problem.is_some())),
    ),
    counter(
        "memfold_lend_exports_ended",
        Numbers,
        "Exports that were ended",
        |s, out| lending(s, out, |lender| lender.ended as f64),
    ),
    counter(
        "memfold_lend_exports_failed",
        Numbers,
        "Of them, those that had failed",
        |s, out| lending(s, out, |lender| lender.failed as f64),
    ),
    counter(
        "memfold_lend_refused",
        Numbers,
        "Connections to exports that broke off or were refused, such as those without the key",
        |s, out| lending(s, out, |lender| lender.refused as f64),
    ),
    gauge(
        "memfold_borrowed_vms",
        Numbers,
        "VMs, and swap volumes of the host, that asked for lent RAM, by where their swap disk is",
        |s, out| borrowed(s, out, |_| 1),
    ),
    gauge(
        "memfold_borrowed",
        Bytes,
        "Their swap disks, by where they are",
        |s, out| borrowed(s, out, |one| one.bytes),
    ),
    counter(
        "memfold_borrowed_requests",
        Numbers,
        "Answers of swap disks that are lent, or were",
        |s, out| waits(s, out, &[], |waits| waits.requests),
    ),
    counter(
        "memfold_borrowed_slow_requests",
        Numbers,
        "Of them, those that took longer",
        slow,
    ),
    counter(
        "memfold_borrow_lies",
        Numbers,
        "Wrong bytes that lenders have served; no VM was given any, the lender was given up",
        |s, out| out.one(s.figures.lies as f64),
    ),
    gauge(
        "memfold_lenders_distrusted",
        Numbers,
        "Lenders of which nothing is borrowed for a while, because they served wrong bytes",
        |s, out| out.one(s.figures.distrusted as f64),
    ),
    gauge(
        "memfold_registry_reachable",
        Numbers,
        "1: the registry of leases answers",
        |s, out| out.one(flag(s.figures.leases.is_some())),
    ),
    gauge(
        "memfold_leases",
        Numbers,
        "Leases of this host; absent while the registry does not answer",
        leases,
    ),
    counter(
        "memfold_access_refused",
        Numbers,
        "Connections and requests over TCP and the socket that were refused",
        |s, out| {
            let mut all = s.refused.iter();
            all.try_for_each(|(why, count)| out.with(&[("why", why)], *count as f64))
        },
    ),
];

fn bytes(pages: u64) -> f64 {
    (pages * PAGE_SIZE) as f64
}

/// The four cases of study C.
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

fn shelf(
    shelf: Option<OnShelf>,
    out: &mut Samples<'_>,
    figure: fn(&OnShelf) -> u64,
) -> fmt::Result {
    out.maybe(shelf.as_ref().map(|all| figure(all) as f64))
}

fn lending(
    scrape: &Scrape,
    out: &mut Samples<'_>,
    figure: fn(&LenderStatus) -> f64,
) -> fmt::Result {
    out.maybe(scrape.figures.lending.as_ref().map(figure))
}

/// Sums by place; every place is shown, so that an alert sees one come.
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

/// Of each VM whose guest has been waited for.
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
