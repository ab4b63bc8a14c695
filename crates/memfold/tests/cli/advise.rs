//! Tests of `memfold advise`, on a history that was recorded over six days.

use std::time::{SystemTime, UNIX_EPOCH};

use memfold_ledger::history::{HOST_SERIES, History, VM_SERIES};

use super::support::{Daemon, code, out, refused, run};

const HALF_HOUR: i64 = 1800;

/// Time between two samples of the history.
const STEP: i64 = 600;

/// Returns the working set of the VM in MiB: each day 22 hours at 900, 1.5 hours at 1700, and half
/// an hour at 2600.
fn working_set_mib(at: i64) -> i64 {
    match at / HALF_HOUR % 48 {
        0 => 2600,
        1..=3 => 1700,
        _ => 900,
    }
}

/// Writes the history of a VM over the last six days.
fn record(daemon: &Daemon, vm: &str) {
    let path = daemon.directory.path().join("state/history.sqlite");
    let mut history = History::open(&path).unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let now = i64::try_from(now.as_secs()).unwrap();
    let host = [Some(0); HOST_SERIES.len()];
    let index = |name: &str| VM_SERIES.iter().position(|known| *known == name).unwrap();
    let mut at = now - now % HALF_HOUR - 6 * 24 * 3600;
    while at < now {
        let mut values = [Some(0); VM_SERIES.len()];
        values[index("working_set_bytes")] = Some(working_set_mib(at) << 20);
        values[index("working_set_probed_percent")] = Some(100);
        let vms = [(vm.to_owned(), values)];
        history.add(at, &host, &vms, &[]).unwrap();
        at += STEP;
    }
}

#[test]
fn memfold_advise_says_percentiles_size_cost_and_savings_from_a_recorded_history() {
    let mut daemon = Daemon::start();
    daemon.terminate();
    record(&daemon, "db");
    daemon.start_again();
    for (name, memory) in [("db", "4G"), ("new", "64M")] {
        let vm = ["vm", "run", "--name", name, "--memory", memory, "--", "-S"];
        assert_eq!(code(&daemon.run(&vm)), 0);
    }
    let report = daemon.json(&["advise"]);
    let vms = report["vms"].as_array().unwrap();
    assert_eq!(
        (&vms[0]["vm"], &vms[1]["vm"]),
        (&"db".into(), &"new".into())
    );
    assert!(vms[1]["advice"].is_null(), "{report}");
    let advice = &vms[0]["advice"];
    let mib = |field: &str| advice[field].as_u64().unwrap() >> 20;
    let percentiles = ["p50_bytes", "p95_bytes", "p99_bytes", "largest_bytes"].map(mib);
    assert_eq!(percentiles, [900, 1700, 2600, 2600], "{advice}");
    // 2600 MiB and 20 % are 3120 MiB, rounded up to 25 times 128 MiB.
    assert_eq!(mib("advised_bytes"), 3200);
    let short = advice["short_time_with_one_gib_less"].as_f64().unwrap();
    assert!((0.015..0.03).contains(&short), "{advice}");
    assert_eq!(mib("lack_with_one_gib_less_bytes"), 2600 - (3200 - 1024));
    let hours = advice["covered_s"].as_u64().unwrap() / 3600;
    assert!((143..=146).contains(&hours), "{advice}");
    assert_eq!(report["given_bytes"], (4096_u64 + 64) << 20);
    assert_eq!(report["saved_bytes"], (4096_u64 - 3200) << 20);

    let text = out(&daemon.run(&["advise"]));
    for words in [
        "424 MiB too little for 2.",
        "h, measured",
        "no recorded working set",
        "the host would save 896 MiB",
    ] {
        assert!(text.contains(words), "no '{words}' in:\n{text}");
    }
    // The last day has no half-hour means.
    let day = daemon.json(&["advise", "--days", "1"]);
    assert_eq!(day["vms"][0]["advice"]["p50_bytes"], 900 << 20);
    refused(&run(&["advise", "--days", "91"]), 2, &["1..=90"]);
}
