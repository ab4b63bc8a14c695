//! Tests of `memfold debt` and of the brake, which stops VMs from being started when memory is
//! short. The daemon is another process, the VMs run no guest, and all of the host's memory is set
//! as reserve.

use std::time::Duration;

use serde_json::{Value, json};

use super::support::{Daemon, code, err, out, refused, run, wait};

fn level(daemon: &Daemon) -> Value {
    daemon.json(&["debt"])["level"].clone()
}

/// Returns doctor's check of the debt, from the API and from the command line.
fn doctor(daemon: &Daemon) -> (Value, String) {
    let (status, body) = daemon.http("GET", "/v1/doctor", b"");
    assert_eq!(status, 200, "{body}");
    let report: Value = serde_json::from_str(&body).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let debt = checks.iter().find(|check| check["name"] == "debt");
    // Other checks may fail on this host.
    (debt.unwrap().clone(), out(&daemon.run(&["doctor"])))
}

#[test]
fn memfold_debt_shows_and_sets_limits_of_the_debt_and_refuses_values_out_of_range() {
    let daemon = Daemon::start_with(&["--reserve", "3G", "--cover", "70"]);
    let debt = daemon.json(&["debt"]);
    assert_eq!(debt["reserve_bytes"], 3_u64 << 30);
    assert_eq!(debt["cover_percent"], 70.0);
    assert_eq!(debt["debt_bytes"], debt["ksm_bytes"]);
    let number = |name: &str| debt[name].as_u64().unwrap();
    assert_eq!(
        number("absorbable_bytes"),
        number("mem_available_bytes").saturating_sub(3 << 30)
    );
    let debt = daemon.json(&["debt", "--reserve", "50%", "--cover", "0"]);
    let info = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = info.lines().find_map(|l| l.strip_prefix("MemTotal:"));
    let total = total.unwrap().trim().trim_end_matches(" kB");
    let total = total.parse::<u64>().unwrap() * 1024;
    assert_eq!(debt["reserve_bytes"], total / 2);
    assert_eq!(debt["cover_percent"], 0.0);
    let text = out(&daemon.run(&["debt"]));
    for word in [
        "brake: ok",
        "(0 %)",
        "available for it",
        "free swap, not counted",
    ] {
        assert!(text.contains(word), "no '{word}' in {text}");
    }
    let (debt, words) = doctor(&daemon);
    assert_eq!(
        (&debt["status"], &debt["fix"]),
        (&"ok".into(), &Value::Null)
    );
    assert!(words.contains("the brake is off"), "{words}");
    // Without a daemon, there is no such check.
    let missing = daemon.directory.path().join("nobody");
    let alone = run(&["--socket", missing.to_str().unwrap(), "doctor"]);
    assert!(!out(&alone).contains("the brake"), "{}", out(&alone));
    // The ledger shows the debt, too.
    let report = daemon.json(&["report"]);
    assert_eq!(report["ledger"]["debt"]["reserve_bytes"], total / 2);
    assert!(out(&daemon.run(&["report"])).contains("owed when written to"));
    for wrong in [
        &["debt", "--reserve", "101%"][..],
        &["debt", "--cover", "nan"],
        &["serve", "--reserve", "many"],
        &["serve", "--cover", "-1"],
    ] {
        let output = run(wrong);
        assert_eq!(code(&output), 2, "{wrong:?}: {}", err(&output));
    }
    for body in [&json!({"reserve": "x"}), &json!({"cover_percent": 101})] {
        let (status, text) = daemon.http("PUT", "/v1/debt", body.to_string().as_bytes());
        assert_eq!(status, 400, "{text}");
    }
}

#[test]
fn while_the_brake_is_active_new_vms_are_refused_with_a_reason() {
    let daemon = Daemon::start();
    // The firmware of this VM runs and finds nothing to boot, because a paused VM cannot be saved.
    let one = [
        "vm", "run", "--name", "one", "--memory", "64M", "--domain", "d",
    ];
    let one = daemon.run(&one);
    assert_eq!(code(&one), 0, "{}", err(&one));
    let saved = daemon.json(&["snapshot", "save", "one", "warm", "--keep", "all"]);
    let held = saved["counts"]["saved_pages"].as_u64().unwrap() * 4096;
    assert!(held > 0, "{saved}");
    daemon.json(&["vm", "stop", "one", "--timeout", "0"]);
    // No VM shares memory yet, but the first clone would.
    let all = daemon.json(&["debt", "--reserve", "100%"]);
    if all["debt_bytes"] != 0 {
        memfold_testkit::skip!("KSM has merged memory on this host, whose debt puts the brake on");
    }
    assert_eq!(all["level"], "ok");
    let clone = ["clone", "warm", "--no-wait", "--force"];
    let words = [
        "'warm-1' is not started, with the",
        "the brake is on",
        "must be available",
        "memfold debt",
        "--despite-brake",
    ];
    refused(&daemon.run(&clone), 1, &words);
    assert_eq!(daemon.json(&["vm", "list"]), json!([]));
    let restore = daemon.run(&["snapshot", "restore", "warm"]);
    refused(&restore, 1, &["'one' is not started"]);
    let forced = daemon.run(&[&clone[..], &["--despite-brake"]].concat());
    assert_eq!(code(&forced), 0, "{}", err(&forced));

    // The clone shares its image now, which counts as debt.
    wait("the brake", || level(&daemon) == "braked");
    wait("the clone is looked at", || {
        daemon.json(&["debt"])["starting_bytes"] == 0
    });
    let debt = daemon.json(&["debt"]);
    let owed = debt["snapshot_bytes"].as_u64().unwrap();
    assert!(owed > 0 && owed <= held, "{debt}, {held} in the image");
    assert_eq!(debt["vms"][0]["name"], "warm-1");
    let event = debt["events"][0]["what"].as_str().unwrap();
    assert!(event.contains("ok -> BRAKED"), "{debt}");
    let start = ["vm", "run", "--name", "two", "--memory", "64M"];
    let paused = ["--", "-S"];
    let plain = daemon.run(&[&start[..], &paused].concat());
    refused(
        &plain,
        1,
        &[
            "'two' is not started, because the brake is on",
            "--despite-brake",
        ],
    );
    let (status, _) = daemon.http(
        "POST",
        "/v1/vms",
        json!({"name": "two", "memory": "64M"})
            .to_string()
            .as_bytes(),
    );
    assert_eq!(status, 409);
    let forced = daemon.run(&[&start[..], &["--despite-brake"], &paused].concat());
    assert_eq!(code(&forced), 0, "{}", err(&forced));
    let status = daemon.json(&["fold", "status"]);
    assert!(
        status["braked"]
            .as_str()
            .unwrap()
            .contains("must be available")
    );
    assert!(out(&daemon.run(&["fold", "status"])).contains("folding: braked"));
    let ksm = daemon.run(&["ksm", "start", "--domain", "d"]);
    refused(&ksm, 1, &["KSM is not steered, because the brake is on"]);

    // Enough memory is available again: the brake stays on for a while, and then all VMs may start.
    let again = std::time::Instant::now();
    let (debt, words) = doctor(&daemon);
    assert_eq!(debt["status"], "warn", "{debt}");
    let fix = debt["fix"].as_str().unwrap();
    assert!(
        fix.contains("memfold debt") && fix.contains("vm stop"),
        "{debt}"
    );
    for words in [&words, debt["meaning"].as_str().unwrap()] {
        assert!(words.contains("no VM is started"), "{words}");
        assert!(
            words.contains(" is available beside the reserve"),
            "{words}"
        );
    }
    assert_eq!(daemon.json(&["debt", "--reserve", "1M"])["level"], "braked");
    wait("the level falls", || level(&daemon) == "ok");
    assert!(again.elapsed() > Duration::from_secs(8));
    assert_eq!(daemon.json(&["fold", "status"])["braked"], Value::Null);
    daemon.paused_vm("three", &[]);
    let second = ["clone", "warm", "--prefix", "other", "--no-wait", "--force"];
    let second = daemon.run(&second);
    assert_eq!(code(&second), 0, "{}", err(&second));
}
