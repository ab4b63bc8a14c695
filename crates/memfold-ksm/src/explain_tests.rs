use super::*;
use crate::controls::Settings;
use crate::facts::HostSide;
use crate::processes::Process;
use crate::ranges::Mapping;
use crate::status::{ProcessStatus, Status};

const MIB_PAGES: u64 = 256;

fn mapping(flags: &str, path: &str, pages: u64) -> Mapping {
    Mapping {
        start: 1 << 40,
        end: (1 << 40) + pages * PAGE_SIZE,
        permissions: "rw-p".into(),
        path: path.into(),
        flags: flags.split(' ').map(str::to_owned).collect(),
        resident_pages: pages,
        anonymous_pages: pages,
        merged_pages: Some(0),
        ..Mapping::default()
    }
}

/// Returns the facts of a VM with 64 MiB of mergeable memory that ksmd has scanned for an hour, on
/// a host whose ksmd has the kernel's default settings.
fn facts() -> Facts {
    Facts {
        vm: "v".into(),
        domain: Some("d".into()),
        known: true,
        process: Process {
            pid: 1,
            comm: "qemu-system-x86".into(),
            qemu: true,
            mergeable: true,
            status: ProcessStatus {
                ksm_rmap_items: Some(64 * MIB_PAGES),
                ksm_zero_pages: Some(0),
                ksm_merging_pages: Some(0),
                ksm_process_profit: Some(-64 * 64 * 256),
                ksm_merge_any: Some(false),
                ksm_mergeable: Some(true),
            },
            anonymous_pages: 64 * MIB_PAGES,
        },
        mappings: vec![mapping("rd wr dd mg", "", 64 * MIB_PAGES)],
        merge_off: false,
        filtered: false,
        zero_pages: Some(0),
        age_s: 3600.0,
        host: Some(HostSide {
            settings: Settings::kernel_default(),
            status: Status {
                full_scans: Some(100),
                pages_unshared: Some(3000),
                pages_volatile: Some(1000),
                ..Status::default()
            },
            ksmd_cpu_s: Some(10.0),
            mergeable_pages: 64 * MIB_PAGES,
            nodes: 1,
        }),
        steered: None,
    }
}

fn host(facts: &mut Facts) -> &mut HostSide {
    facts.host.as_mut().unwrap()
}

fn causes(facts: &Facts) -> Vec<(Cause, u64)> {
    let explained = weigh(facts).causes;
    for finding in &explained {
        assert!(!finding.words.is_empty() && !finding.fix.is_empty());
        assert_eq!(finding.bytes, finding.pages * PAGE_SIZE);
    }
    explained.iter().map(|f| (f.cause, f.pages)).collect()
}

#[test]
fn ksm_explain_splits_unmerged_pages_into_unique_and_volatile_by_the_ratio_of_the_host() {
    assert_eq!(
        causes(&facts()),
        [
            (Cause::Unique, 48 * MIB_PAGES),
            (Cause::Volatile, 16 * MIB_PAGES)
        ]
    );
}

#[test]
fn if_ksmd_is_stopped_ksm_explain_names_that_as_the_first_cause() {
    for (run, cause) in [(0, Cause::Stopped), (2, Cause::Unmerged)] {
        let mut facts = facts();
        facts
            .mappings
            .push(mapping("rd wr sh", "/memfd:ram", 16 * MIB_PAGES));
        host(&mut facts).settings.run = Some(run);
        assert_eq!(
            causes(&facts),
            [(cause, 64 * MIB_PAGES), (Cause::Shared, 16 * MIB_PAGES)]
        );
        assert_eq!(weigh(&facts).first_merge_s, None);
    }
    let mut facts = facts();
    facts.host = None;
    assert_eq!(causes(&facts), [(Cause::NoKsm, 64 * MIB_PAGES)]);
}

#[test]
fn ksm_explain_names_the_reason_why_steering_stopped_ksm() {
    let mut facts = facts();
    host(&mut facts).settings.run = Some(0);
    facts.steered = Some(Steered {
        domain: "d".into(),
        held: Some("process 7 (java) has mergeable memory".into()),
        scans: 5,
    });
    let explained = weigh(&facts);
    assert_eq!(explained.causes[0].cause, Cause::Held);
    assert!(
        explained.verdict.contains("process 7"),
        "{}",
        explained.verdict
    );
}

#[test]
fn ksm_explain_reports_a_cause_and_a_page_count_for_each_kind_of_memory() {
    for (flags, path, cause) in [
        (
            "rd wr sh",
            "/memfd:memory-backend-memfd (deleted)",
            Cause::Shared,
        ),
        ("rd wr ht", "/dev/hugepages/x (deleted)", Cause::Hugetlb),
        ("rd wr sh ht", "/memfd:x", Cause::Hugetlb),
        ("rd sh", "/var/lib/segments/web.erofs", Cause::Pmem),
        ("rd wr", "/memfold:d (deleted)", Cause::Folded),
        ("rd wr", "/var/lib/memfold/snapshots/a/ram", Cause::FileView),
        ("rd wr", "", Cause::NotAdvised),
    ] {
        let mut facts = facts();
        facts.mappings = vec![mapping(flags, path, 32 * MIB_PAGES)];
        assert_eq!(causes(&facts), [(cause, 32 * MIB_PAGES)], "{flags} {path}");
    }
}

#[test]
fn ksm_explain_distinguishes_the_reasons_why_memory_is_not_mergeable() {
    let steered = |domain: &str| {
        Some(Steered {
            domain: domain.into(),
            held: None,
            scans: 9,
        })
    };
    for (off, filtered, known, domain, steered, cause) in [
        (true, true, false, None, None, Cause::MergeOff),
        (true, true, true, Some("e"), None, Cause::MergeOff),
        (
            true,
            true,
            true,
            Some("e"),
            steered("d"),
            Cause::AnotherDomain,
        ),
        (true, true, true, Some("d"), steered("d"), Cause::MergeOff),
        (true, true, true, None, steered("d"), Cause::NoDomain),
        (false, true, false, None, None, Cause::Refused),
        (false, false, true, Some("d"), None, Cause::NotAdvised),
    ] {
        let mut facts = facts();
        facts.mappings = vec![mapping("rd wr", "", 8)];
        (facts.merge_off, facts.filtered, facts.known) = (off, filtered, known);
        facts.domain = domain.map(str::to_owned);
        facts.steered = steered;
        assert_eq!(causes(&facts), [(cause, 8)]);
    }
}

#[test]
fn ksm_explain_predicts_when_pages_of_a_new_vm_are_first_merged() {
    let mut young = facts();
    young.process.status.ksm_rmap_items = Some(0);
    let host = host(&mut young);
    // 10 million pages were scanned in 10 s of CPU time: 1 us each.
    host.status.pages_scanned = Some(10_000_000);
    host.mergeable_pages = 1_000_000;
    let explained = weigh(&young);
    assert_eq!(explained.causes[0].cause, Cause::TooYoung);
    // 10,000 batches take 20 ms between them, and 1 s of CPU time.
    assert!((explained.pass_s.unwrap() - 201.0).abs() < 0.1);
    assert!((explained.first_merge_s.unwrap() - 402.0).abs() < 0.1);
    let words = &explained.causes[0].words;
    assert!(
        words.contains("pages_to_scan 100") && words.contains("0 %"),
        "{words}"
    );
    young.process.status.ksm_rmap_items = Some(32 * MIB_PAGES);
    assert!((weigh(&young).first_merge_s.unwrap() - 301.5).abs() < 0.1);
    young.mappings[0].merged_pages = Some(5);
    assert_eq!(weigh(&young).first_merge_s, None);
    // All pages were scanned twice, so a page without a match is not promised to merge.
    assert_eq!(weigh(&facts()).first_merge_s, None);
}

#[test]
fn ksm_explain_counts_untouched_swapped_unscanned_and_huge_pages() {
    let mut facts = facts();
    let ram = &mut facts.mappings[0];
    ram.anonymous_pages = 50 * MIB_PAGES;
    ram.swapped_pages = 4 * MIB_PAGES;
    ram.merged_pages = Some(10 * MIB_PAGES);
    ram.huge_pages = 2 * MIB_PAGES;
    facts.process.status.ksm_merging_pages = Some(10 * MIB_PAGES);
    facts.process.status.ksm_rmap_items = Some(46 * MIB_PAGES);
    host(&mut facts).status.pages_volatile = Some(0);
    let mut found = causes(&facts);
    found.sort();
    let mut expected = [
        (Cause::NotPresent, 10 * MIB_PAGES),
        (Cause::Swapped, 4 * MIB_PAGES),
        (Cause::NotVisited, 4 * MIB_PAGES),
        (Cause::Unique, 36 * MIB_PAGES),
        (Cause::HugePages, 2 * MIB_PAGES),
    ];
    expected.sort();
    assert_eq!(found, expected);
    let explained = weigh(&facts);
    assert_eq!(explained.merged_bytes, 10 << 20);
    assert!(
        explained.verdict.starts_with("10.0 MiB of 50.0 MiB"),
        "{}",
        explained.verdict
    );
}

#[test]
fn ksm_explain_names_the_ksm_settings_of_the_host_that_limit_merging() {
    let mut facts = facts();
    let host = host(&mut facts);
    host.settings.merge_across_nodes = Some(0);
    host.nodes = 2;
    host.status.stable_node_chains = Some(1);
    host.status.stable_node_dups = Some(77);
    host.status.pages_skipped = Some(5);
    facts.zero_pages = Some(30);
    let found = causes(&facts);
    for cause in [
        (Cause::AcrossNodes, 64 * MIB_PAGES),
        (Cause::MaxPageSharing, 0),
        (Cause::UseZeroPages, 30),
        (Cause::SmartScan, 0),
    ] {
        assert!(found.contains(&cause), "{cause:?} of {found:?}");
    }
}

#[test]
fn ksm_metadata_bytes_are_computed_from_the_count_of_rmap_items() {
    let explained = weigh(&facts());
    assert_eq!(explained.rmap_overhead_bytes, Some(64 * 64 * 256));
    assert_eq!(explained.profit_bytes, Some(-64 * 64 * 256));
}
