//! Helper of the dashboard's test: compares the figures that the dashboard shows in a browser with
//! those that the daemon reports.

use std::collections::BTreeMap;
use std::path::Path;

use memfold_api::{Borrowed, Client, FullReport, LeaseReport, SwapPlace};
use memfold_ledger::memory_map::STATES;
use memfold_ledger::sharing::Sharing;
use memfold_units::ByteSize;
use serde_json::Value;

use super::dashboard::{KIND, NAMES, json, report};

/// Figures, by the names that pages give them.
pub type Figures = BTreeMap<String, i128>;

/// Adds the whole numbers among the fields of an object, with names that begin with `prefix`.
fn numbers(all: &mut Figures, prefix: &str, of: &Value) {
    for (key, figure) in of.as_object().unwrap() {
        if let Some(figure) = figure.as_i64() {
            all.insert(format!("{prefix}.{key}"), figure.into());
        }
    }
}

/// Adds the expected figures of `plan --json`.
pub fn wanted_of_plan(all: &mut Figures, plan: &Value) {
    numbers(all, "plan", plan);
    for kind in plan["kinds"].as_array().unwrap() {
        numbers(
            all,
            &format!("plan.{}", kind["name"].as_str().unwrap()),
            kind,
        );
    }
}

/// Returns the figures of the command line (`report`, `debt`, `plan`, `leases`, `vm list`), and of
/// the API for shared pages.
pub fn told(state: &Path, client: &Client) -> Figures {
    let mut all = wanted(&report(state));
    let sharing: Sharing = client.get("/v1/sharing?pairs=5000").unwrap();
    for vm in &sharing.vms {
        all.insert(format!("mapped.{}", vm.vm), vm.mapped_bytes.into());
    }
    for pair in &sharing.pairs {
        let bytes = pair.folded_bytes + pair.template_bytes + pair.segment_bytes;
        for (a, b) in [(&pair.a, &pair.b), (&pair.b, &pair.a)] {
            all.insert(format!("pair.{a}.{b}"), bytes.into());
        }
    }
    let leases: LeaseReport = serde_json::from_value(json(state, &["leases"])).unwrap();
    if let Some(lending) = &leases.lending {
        all.insert("lending.lent_bytes".into(), lending.lent_bytes.into());
    }
    let lent = |b: &&Borrowed| matches!(b.place, SwapPlace::Lent | SwapPlace::Degraded);
    let borrowed = leases.borrowed.iter().filter(lent).map(|b| b.bytes);
    all.insert("borrowed".into(), borrowed.sum::<u64>().into());
    let debt = json(state, &["debt"]);
    numbers(&mut all, "debt", &debt);
    for vm in debt["vms"].as_array().unwrap() {
        let parts = ["folded_bytes", "snapshot_bytes", "zero_bytes"];
        let owed: i64 = parts.iter().map(|part| vm[part].as_i64().unwrap()).sum();
        let name = vm["name"].as_str().unwrap();
        all.insert(format!("debt.{name}.owed"), owed.into());
    }
    wanted_of_plan(&mut all, &json(state, &["plan"]));
    for vm in json(state, &["vm", "list"]).as_array().unwrap() {
        if let Some(bytes) = vm["swap"]["bytes"].as_i64() {
            all.insert(
                format!("swap.{}", vm["name"].as_str().unwrap()),
                bytes.into(),
            );
        }
    }
    all
}

/// Returns the expected figures of a page by name, from `report --json`.
fn wanted(report: &FullReport) -> Figures {
    let value = serde_json::to_value(&report.ledger).unwrap();
    let mut all = Figures::new();
    let host = &report.ledger.host;
    let own = host.own.pss_bytes - host.own.store_pss_bytes + host.own.page_table_bytes;
    let vms = host.physical_bytes - host.stores_bytes - own;
    for (name, bytes) in [
        ("place.vms_bytes", vms),
        ("place.stores_bytes", host.stores_bytes),
        ("place.memfold_bytes", own),
        ("place.others_bytes", host.others_anon_bytes),
        ("place.kernel_bytes", host.kernel_bytes),
        ("own", own),
        ("own.metadata", host.own.metadata_bytes),
    ] {
        all.insert(name.into(), bytes.0.into());
    }
    all.insert("ksm.saved".into(), host.saved_by_ksm_bytes.into());
    for domain in &report.fold.domains {
        all.insert(
            format!("store.{}", domain.domain),
            domain.store_bytes.into(),
        );
    }
    for (key, figure) in value["host"].as_object().unwrap() {
        if let Some(figure) = figure.as_i64() {
            all.insert(format!("host.{key}"), figure.into());
        }
    }
    for vm in value["vms"].as_array().unwrap() {
        let name = vm["name"].as_str().unwrap();
        for (key, figure) in vm.as_object().unwrap() {
            if let Some(figure) = figure.as_i64() {
                all.insert(format!("vm.{name}.{key}"), figure.into());
                // The sums of the memory map are those of the same places.
                if let Some(place) = key.strip_suffix("_bytes").filter(|p| STATES.contains(p)) {
                    all.insert(format!("map.{name}.{place}"), figure.into());
                }
            }
        }
        let template = vm["file_resident_bytes"].as_i64().unwrap()
            + vm["file_untouched_bytes"].as_i64().unwrap();
        all.insert(format!("vm.{name}.template_bytes"), template.into());
        all.insert(format!("map.{name}.template"), template.into());
    }
    all
}

/// Returns whether a figure is constant while VMs are stopped. Others change, because other
/// processes map QEMU's libraries and the host has other load.
fn is_exact(figure: &str) -> bool {
    let of_vm = figure.starts_with("vm.") && !figure.ends_with("pss_bytes");
    of_vm || figure.starts_with("map.") || figure.starts_with("swap.")
}

/// Returns by how much the kernel may change a figure of a stopped VM meanwhile: it moves single
/// pages, and khugepaged fills free pages up to 2 MiB, but not of clones, which map a file.
fn by_kernel(figure: &str) -> i128 {
    let booted = figure
        .strip_prefix("vm.")
        .or_else(|| figure.strip_prefix("map."))
        .and_then(|rest| rest.strip_prefix(NAMES[0]))
        .is_some_and(|rest| rest.starts_with('.'));
    if booted { 16 << 20 } else { 64 << 10 }
}

/// Returns the text of a figure, as the command line writes it.
fn words(value: i128) -> String {
    let sign = if value < 0 { "-" } else { "" };
    let size = ByteSize(u64::try_from(value.unsigned_abs()).unwrap());
    format!("{sign}{size}")
}

/// Returns every figure that a page showed, by name.
pub fn shown(said: &Value) -> Figures {
    let mut all = Figures::new();
    for figure in said["figures"].as_array().unwrap() {
        let name = figure["figure"].as_str().unwrap();
        let value: i128 = figure["value"].as_str().unwrap().parse().unwrap();
        assert_eq!(figure["text"], words(value), "{name}");
        all.insert(name.to_owned(), value);
    }
    for count in said["counts"].as_array().into_iter().flatten() {
        let name = count["figure"].as_str().unwrap();
        all.insert(
            name.to_owned(),
            count["value"].as_str().unwrap().parse().unwrap(),
        );
    }
    all
}

/// Compares the figures of a page with those of the command line before and after: each named
/// figure must exist and lie between the two.
pub fn compare(page: &str, shown: &Figures, before: &Figures, after: &Figures) -> (usize, usize) {
    let (mut compared, mut exact) = (0, 0);
    for (name, &value) in shown {
        let (Some(&a), Some(&b)) = (before.get(name), after.get(name)) else {
            panic!("{page}: {name} is in no answer of the command line");
        };
        compared += 1;
        if is_exact(name) {
            let moved = (a - b).abs();
            let slack = by_kernel(name);
            assert!(
                moved <= slack,
                "{name} moved from {a} to {b} though the VMs stand still"
            );
            // The page's sample may be older than the first answer.
            assert!(
                value >= a.min(b) - slack && value <= a.max(b) + slack,
                "{page}: {name} is {value}, before {a}, after {b}"
            );
            exact += usize::from(a == b && value == a);
        } else {
            // The host is not idle, so these figures may change by as much as they usually do
            // meanwhile.
            let least = match name.rsplit('.').next() {
                // As many VMs as fit in the memory by which the page's used memory differs, and a
                // quarter: the number is a quotient by means over paused VMs, which change as well.
                Some(part) if part.starts_with("more_fit") => {
                    let own = after[&name.replace(part, "own_bytes")].max(1);
                    let used = "plan.used_bytes";
                    let differs = (shown[used] - before[used]).abs();
                    4 + differs.max((shown[used] - after[used]).abs()) / own + a.max(b) / 4
                }
                // All used memory of the host may change as much as that of other tests does.
                Some("used_bytes" | "predicted_bytes" | "others_bytes" | "kernel_bytes") => {
                    after["plan.memory_bytes"] / 6
                }
                Some("owed") => 4 << 20,
                // Memory that paused VMs map, and the stores' memory for them.
                _ if ["mapped.", "pair.", "store."]
                    .iter()
                    .any(|p| name.starts_with(p)) =>
                {
                    1 << 20
                }
                // Means over paused VMs, one of which khugepaged may change.
                _ if name.starts_with(&format!("plan.{KIND}.")) => 8 << 20,
                _ => 64 << 20,
            };
            let slack = (a.abs().max(b.abs()) / 20).max(least);
            // The brake reads page tables every half minute, so its figure may lack the last folds.
            let lowest = match name.rsplit('.').next() {
                Some("owed") => 0,
                _ => a.min(b) - slack,
            };
            assert!(
                value >= lowest && value <= a.max(b) + slack,
                "{page}: {name} is {value}, before {a}, after {b}"
            );
        }
    }
    (compared, exact)
}
