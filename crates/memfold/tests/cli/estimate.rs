//! `memfold estimate`.

use serde_json::{Value, json};

use crate::support::{Daemon, code, err, out, refused, run};

#[test]
fn an_estimate_needs_no_daemon_and_takes_names_and_domains_from_one() {
    if !rustix::process::getuid().is_root() {
        println!("skipped: other processes' memory needs root");
        return;
    }
    let daemon = Daemon::start();
    let names = ["a", "b"].map(|name| format!("estimate-{name}-{}", std::process::id()));
    let vms = [&names[0], &names[1]].map(|name| daemon.paused_vm(name, &["--domain", "d"]));
    let pids = [&vms[0], &vms[1]].map(|vm| vm["pid"].to_string());
    let known = daemon.json(&["estimate", &names[0], &pids[1]]);
    assert_eq!(known["daemon"], true);
    assert_eq!(known["domains"].as_array().unwrap().len(), 1);
    assert_eq!(known["domains"][0]["domain"], "d");
    assert_eq!(known["domains"][0]["vms"], json!(names));
    assert!(known["vms"][0]["memory_bytes"].as_u64().unwrap() >= 64 << 20);
    assert!(
        known["how"]["cpu_percent"].as_f64().unwrap() <= 10.0,
        "{known}"
    );
    let nobody = daemon.directory.path().join("nobody");
    let alone = |arguments: &[&str]| {
        let first = ["--socket", nobody.to_str().unwrap(), "estimate"];
        run(&[&first, arguments].concat())
    };
    let parse = |output: std::process::Output| -> Value {
        assert_eq!(code(&output), 0, "{}", err(&output));
        serde_json::from_str(&out(&output)).unwrap()
    };
    let foreign = parse(alone(&[&pids[0], &names[1], "--json"]));
    assert_eq!(foreign["daemon"], false);
    // Each is on its own: what both have, the firmware, is not counted.
    assert_eq!(foreign["domains"].as_array().unwrap().len(), 2);
    assert_eq!(foreign["vms"][0]["domain"], Value::Null);
    assert_eq!(foreign["vms"][1]["between"]["bytes"], 0);
    let across = foreign["across_domains"]["bytes"].as_u64().unwrap();
    assert!(across > 0, "{foreign}");
    let said = format!("{}=x", pids[0]);
    let said = parse(alone(&[&pids[0], "--domain-of", &said, "--json"]));
    assert_eq!(said["vms"][0]["domain"], "x");
    let one = parse(alone(&[&pids[0], &pids[1], "--one-domain", "--json"]));
    assert_eq!(one["domains"][0]["between"]["bytes"], across);
    assert_eq!(one["across_domains"]["bytes"], 0);
    let text = alone(&[&names[0], "--seconds", "30"]);
    for word in [
        "COULD BE SAVED",
        "free page reporting",
        "no memfold daemon",
        &names[0],
    ] {
        assert!(out(&text).contains(word), "no '{word}' in: {}", out(&text));
    }
    // No progress in a pipe.
    assert_eq!(err(&text), "");
    refused(&alone(&["ghost"]), 1, &["ghost", "memfold ksm status"]);
    let ghost = format!("{}=x", std::process::id());
    refused(&alone(&["--domain-of", &ghost]), 1, &["no QEMU has"]);
}

#[test]
fn a_program_is_split_by_how_it_is_mapped() {
    let own = std::process::id().to_string();
    let output = run(&["estimate", "--program", &own, "--json"]);
    assert_eq!(code(&output), 0, "{}", err(&output));
    let report: Value = serde_json::from_str(&out(&output)).unwrap();
    let bytes = |name: &str| report[name].as_u64().unwrap();
    assert!(bytes("shareable_bytes") > 1 << 20, "{report}");
    assert!(bytes("shareable_bytes") < bytes("resident_bytes"));
    let modes = report["modes"].as_array().unwrap();
    let sum: u64 = modes
        .iter()
        .map(|m| m["resident_bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(sum, bytes("resident_bytes"));
    assert!(
        modes
            .iter()
            .any(|m| m["kind"] == "text" && m["permissions"] == "r-xp")
    );
    let text = out(&run(&["estimate", "--program", &own]));
    assert!(text.contains("shareable between VMs"), "{text}");
    refused(
        &run(&["estimate", "--program", "no-such-program"]),
        1,
        &["no-such-program", "ps -e"],
    );
}
