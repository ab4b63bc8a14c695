use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use memfold_api::{
    Borrowed, FullReport, OrderCount, RightsizeMode, RightsizeReport, SwapPlace, VmInfo,
    VmRightsize,
};
use memfold_daemon::{Figures, OnShelf};
use memfold_fold::{DomainStats, EngineStats, VmStats};
use memfold_ledger::{
    DebtReport, GuestMemory, GuestPressure, KsmAccount, Level, Report, VmAccount,
};
use memfold_lend::LenderStatus;
use memfold_lend::waits::Waits;
use memfold_units::ByteSize;

use super::*;

/// Returns figures of a host on which every metric exists.
#[allow(clippy::too_many_lines)] // a value for each field
fn everything() -> Figures {
    let mut ledger = Report::default();
    ledger.host.mem_total_bytes = ByteSize(24 << 30);
    ledger.host.saved_by_folding_bytes = -4096;
    ledger.debt = Some(DebtReport {
        level: Level::Braked,
        ..DebtReport::default()
    });
    ledger.host.ksm = Some(KsmAccount {
        zero_pages: Some(2),
        general_profit_bytes: -1,
        ..KsmAccount::default()
    });
    let guest = GuestMemory {
        mem_available_bytes: ByteSize(1 << 20),
        mem_free_bytes: Some(ByteSize(4096)),
        dirty_bytes: Some(ByteSize(0)),
        anon_pages_bytes: Some(ByteSize(4096)),
        cached_bytes: Some(ByteSize(4096)),
        swap_total_bytes: Some(ByteSize(8192)),
        swap_free_bytes: Some(ByteSize(4096)),
        pressure: Some(GuestPressure {
            some_us: 2_500_000,
            ..GuestPressure::default()
        }),
        workingset_refault_file: Some(2),
        pgsteal: Some(3),
        pswpin: Some(4),
        oom_kill: Some(5),
        ..GuestMemory::default()
    };
    for (name, domain) in [("web1", Some("shop")), ("alone", None)] {
        ledger.vms.push(VmAccount {
            guest: Some(guest.clone()),
            name: name.into(),
            domain: domain.map(str::to_owned),
            ksm_merged_bytes: Some(ByteSize(8192)),
            private_bytes: ByteSize(1 << 20),
            ..VmAccount::default()
        });
    }
    let vm = |name: &str, domain: &str| VmStats {
        name: name.into(),
        domain: domain.into(),
        folded_pages: 3,
        agent_cpu_us: 1_500_000,
        ..VmStats::default()
    };
    let fold = EngineStats {
        hint_to_fold_p50_s: Some(1.5),
        hint_to_fold_p95_s: Some(2.0),
        vms: vec![vm("web1", "shop"), vm("alone", "vm/alone")],
        domains: vec![DomainStats {
            domain: "shop".into(),
            store_full: true,
            ..DomainStats::default()
        }],
        ..EngineStats::default()
    };
    Figures {
        taken: Instant::now(),
        took: Duration::from_millis(20),
        cpu: Duration::from_millis(10),
        report: FullReport { ledger, fold },
        vms: vec![VmInfo {
            name: "web1".to_owned(),
            state: "io-error".to_owned(),
            ..VmInfo::default()
        }],
        steers_ksm: true,
        snapshots: Some(OnShelf::default()),
        segments: Some(OnShelf::default()),
        host: "a".into(),
        lending: Some(LenderStatus::default()),
        borrowed: vec![Borrowed {
            vm: "web1".into(),
            place: SwapPlace::Lost,
            bytes: 1 << 20,
            durability: None,
            lenders: Vec::new(),
            stripes: None,
            waits: Some(Waits::default()),
            changed: false,
            took_ms: 0,
        }],
        leases: Some(Vec::new()),
        distrusted: 1,
        lies: 2,
        rightsizing: RightsizeReport {
            mode: RightsizeMode::On,
            rung: Some("lent".into()),
            orders: vec![OrderCount {
                kind: "trim".into(),
                reason: "cache_not_missed".into(),
                count: 7,
                failed: 1,
            }],
            vms: vec![VmRightsize {
                vm: "web1".into(),
                size_bytes: 2 << 20,
                plugged_bytes: Some(1 << 20),
                basis: "probed".into(),
                pressure: Some(0.25),
                ..VmRightsize::default()
            }],
            ..RightsizeReport::default()
        },
    }
}

fn scraped(figures: Figures) -> String {
    let scrape = Scrape {
        figures: Arc::new(figures),
        process: Process::now(),
        refused: [("tls", 1), ("credentials", 2), ("rights", 3), ("other", 4)],
        streams: Arc::default(),
    };
    scrape.text().unwrap()
}

/// Returns type, labels and help text of each family, by the names of its samples.
fn exported(text: &str) -> BTreeMap<String, (String, BTreeSet<String>, String)> {
    let mut all: BTreeMap<String, (String, BTreeSet<String>, String)> = BTreeMap::new();
    let mut help = "";
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ').unwrap().1;
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            let known = all.insert(
                name.to_owned(),
                (kind.to_owned(), BTreeSet::new(), help.to_owned()),
            );
            assert!(known.is_none(), "{name} twice");
        } else {
            let (name, rest) = line.split_at(line.find(['{', ' ']).unwrap());
            let labels = rest.strip_prefix('{').map(|r| r.split_once('}').unwrap().0);
            let family = all.get_mut(name).unwrap_or_else(|| panic!("{line}"));
            for label in labels
                .unwrap_or_default()
                .split(',')
                .filter(|l| !l.is_empty())
            {
                family.1.insert(label.split_once('=').unwrap().0.to_owned());
            }
        }
    }
    all
}

/// Returns the rows of the metrics tables in docs/metrics.md: name, type, labels, meaning.
fn documented() -> BTreeMap<String, (String, BTreeSet<String>, String)> {
    let document = include_str!("../../../../docs/metrics.md");
    let section = document.split("\n## ").find(|s| s.starts_with("Scraped"));
    let rows = section
        .unwrap()
        .lines()
        .filter(|line| line.starts_with("| `memfold_") || line.starts_with("| `process_"));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, kind, labels, meaning] = cells[..] else {
            panic!("not four cells: {row}")
        };
        let labels = labels.split(", ").map(|label| label.trim_matches('`'));
        let labels = labels.filter(|label| !label.is_empty());
        (
            name.trim_matches('`').to_owned(),
            (
                kind.to_owned(),
                labels.map(str::to_owned).collect(),
                meaning.to_owned(),
            ),
        )
    })
    .collect()
}

#[test]
fn exported_metrics_and_documented_metrics_are_the_same() {
    let exported = exported(&text::prometheus(&scraped(everything())));
    let documented = documented();
    for (name, said) in &exported {
        assert_eq!(
            documented.get(name),
            Some(said),
            "{name} in docs/metrics.md"
        );
    }
    for name in documented.keys() {
        assert!(exported.contains_key(name), "{name} is not exported");
    }
}

/// Lints all metrics, including those that a small daemon lacks (`tests/cli/metrics.rs` lints a
/// running daemon).
#[test]
fn promtool_reports_no_problem_in_any_metric_family() {
    let cache = std::env::var_os("MEMFOLD_CACHE").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/memfold"),
        PathBuf::from,
    );
    let kept = cache.join("prometheus/promtool");
    let promtool = if kept.exists() {
        kept
    } else {
        "promtool".into()
    };
    let check = Command::new(&promtool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut check) = check else {
        let wanted = std::env::var_os("MEMFOLD_REAL").is_some();
        assert!(!wanted, "no promtool: scripts/setup tests");
        memfold_testkit::skip!("no promtool; scripts/setup tests");
    };
    let text = text::prometheus(&scraped(everything()));
    check
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let output = check.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
}

#[test]
fn metrics_are_exported_with_sign_unit_and_labels() {
    let text = scraped(everything());
    for line in [
        "memfold_host_memory_bytes 25769803776.0",
        r#"memfold_ledger_saved_bytes{mechanism="folding"} -4096.0"#,
        r#"memfold_vm_ram_place_bytes{vm="web1",domain="shop",place="private"} 1048576.0"#,
        r#"memfold_vm_ram_place_bytes{vm="alone",domain="vm/alone",place="private"} 1048576.0"#,
        r#"memfold_vm_folded_bytes_total{vm="alone",domain="vm/alone"} 12288.0"#,
        r#"memfold_vm_agent_cpu_seconds_total{vm="web1",domain="shop"} 1.5"#,
        r#"memfold_vm_guest_pressure_some_seconds_total{vm="web1",domain="shop"} 2.5"#,
        r#"memfold_vm_guest_refaulted_bytes_total{vm="web1",domain="shop"} 8192.0"#,
        r#"memfold_vm_guest_swap_used_bytes{vm="alone",domain="vm/alone"} 4096.0"#,
        "memfold_rightsize_mode 2.0",
        "memfold_rightsize_rung 3.0",
        r#"memfold_rightsize_orders_total{kind="trim",reason="cache_not_missed"} 7.0"#,
        r#"memfold_vm_size_bytes{vm="web1",domain="shop"} 2097152.0"#,
        r#"memfold_vm_plugged_bytes{vm="web1",domain="shop"} 1048576.0"#,
        r#"memfold_vm_memory_pressure_ratio{vm="web1",domain="shop"} 0.25"#,
        "memfold_ksm_profit_bytes -1.0",
        "memfold_ksm_zero_bytes 8192.0",
        r#"memfold_store_full{domain="shop"} 1.0"#,
        r#"memfold_borrowed_vms{place="lost"} 1.0"#,
        r#"memfold_borrowed_vms{place="lent"} 0.0"#,
        r#"memfold_borrowed_bytes{place="lost"} 1048576.0"#,
        "memfold_figures_took_seconds 0.02",
        "memfold_figures_cpu_seconds 0.01",
        "# UNIT memfold_fold_engine_cpu_seconds seconds",
        "# TYPE memfold_fold_engine_cpu_seconds counter",
    ] {
        assert!(text.lines().any(|l| l == line), "no '{line}' in:\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn quotes_and_line_feeds_in_a_label_forge_no_sample() {
    let mut figures = everything();
    figures.vms[0].state = "x\"} 1\nmemfold_vms 99 \\".into();
    let open = scraped(figures);
    let expected = r#"memfold_vm_state{vm="web1",state="x\"} 1\nmemfold_vms 99 \\"} 1.0"#;
    for text in [text::prometheus(&open), open] {
        let states = |line: &&str| line.starts_with("memfold_vm_state{");
        assert_eq!(text.lines().find(states), Some(expected));
        let vms = |line: &&str| line.starts_with("memfold_vms ");
        assert_eq!(text.lines().filter(vms).count(), 1, "{text}");
    }
}

#[test]
fn metrics_that_a_host_cannot_measure_are_omitted() {
    let mut figures = everything();
    figures.report.ledger.host.ksm = None;
    figures.report.fold.hint_to_fold_p50_s = None;
    figures.lending = None;
    figures.leases = None;
    figures.snapshots = None;
    figures.rightsizing.rung = None;
    figures.rightsizing.vms[0].basis = "unknown".into();
    let text = scraped(figures);
    for name in [
        "memfold_ksm_shared_bytes",
        "memfold_fold_delay_median_seconds",
        "memfold_lend_lent_bytes",
        "memfold_leases",
        "memfold_snapshots",
        "memfold_rightsize_rung",
        "memfold_vm_working_set_bytes",
    ] {
        let sample = |line: &&str| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with([' ', '{']))
        };
        assert_eq!(text.lines().find(sample), None);
    }
    assert!(text.contains("\nmemfold_registry_reachable 0.0\n"));
}
