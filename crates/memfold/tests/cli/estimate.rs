//! Tests of `memfold estimate`: its options, its output and its errors.

use serde_json::{Value, json};

use crate::support::{Daemon, code, err, out, refused, run};

#[test]
fn an_estimate_works_without_a_daemon_and_with_one_uses_its_vm_names_and_trust_domains() {
    if !rustix::process::getuid().is_root() {
        memfold_testkit::skip!("other processes' memory needs root");
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
    // Each VM is alone in its domain, so the firmware, which both have, is not counted.
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
    // In a pipe, no progress is printed.
    assert_eq!(err(&text), "");
    refused(&alone(&["ghost"]), 1, &["ghost", "memfold ksm status"]);
    let ghost = format!("{}=x", std::process::id());
    refused(
        &alone(&["--domain-of", &ghost]),
        1,
        &["no running QEMU has"],
    );
}

#[test]
fn memfold_estimate_reports_the_memory_of_a_program_by_kind_of_mapping() {
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

#[test]
fn memory_fingerprints_of_two_hosts_with_the_same_key_can_be_compared() {
    if !rustix::process::getuid().is_root() {
        memfold_testkit::skip!("other processes' memory needs root");
    }
    let daemon = Daemon::start();
    for name in ["one", "two"] {
        daemon.paused_vm(name, &["--domain", "d"]);
    }
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    let make = |host: &str, file: &str, key: &str| {
        let (file, key) = (path(file), path(key));
        let arguments = [
            "estimate",
            "--cpu",
            "100",
            "--fingerprint",
            &file,
            "--key",
            &key,
        ];
        daemon.json(&[&arguments[..], &["--host", host]].concat())
    };
    let made = make("north", "north.json", "key");
    assert_eq!(made["key_is_new"], true);
    // VMs of other tests may run, too.
    assert!(made["vms"].as_u64() >= Some(2), "{made}");
    assert_eq!(make("south", "south.json", "key")["key_is_new"], false);
    make("west", "west.json", "other-key");
    let plan = |files: &[&str]| {
        let paths: Vec<String> = files.iter().map(|name| path(name)).collect();
        let mut arguments = vec!["plan", "--json", "--least", "1K", "--place"];
        arguments.extend(paths.iter().map(String::as_str));
        run(&arguments)
    };
    let output = plan(&["north.json", "south.json"]);
    assert_eq!(code(&output), 0, "{}", err(&output));
    let proposal: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(proposal["hosts"][0]["host"], "north");
    assert!(proposal["now_bytes"].as_u64() >= proposal["then_bytes"].as_u64());
    std::fs::write(path("text"), "{}").unwrap();
    for (files, words) in [
        (["north.json", "west.json"], "different keys"),
        (
            ["north.json", "north.json"],
            "two fingerprints are of host 'north'",
        ),
        (
            ["north.json", "text"],
            "fingerprint of a host; 'memfold estimate --fingerprint",
        ),
        (["north.json", "nowhere"], "cannot read"),
    ] {
        refused(&plan(&files), 1, &[words]);
    }
}

#[test]
fn a_placement_proposal_over_http_equals_the_proposal_of_the_command_line() {
    let daemon = Daemon::start();
    let place = tempfile::tempdir().unwrap();
    // Two hosts each have a VM with the same contents; the request is larger than other requests
    // may be.
    let print = |host: &str| {
        let contents: Vec<u64> = (0..60_000).map(|n| (1 << 62) + n).collect();
        let vm = json!({"name": format!("vm-{host}"), "domain": "d", "ram_bytes": 256 << 20, "beside_bytes": 0, "contents": contents});
        json!({"format": 1, "host": host, "key": "k", "level": 0, "memory_bytes": 1_u64 << 33, "others_bytes": 0, "vms": [vm]})
    };
    let prints = ["north", "south"].map(print);
    let paths = ["north", "south"].map(|host| place.path().join(host));
    for (path, print) in paths.iter().zip(&prints) {
        std::fs::write(path, print.to_string()).unwrap();
    }
    let [north, south] = paths.each_ref().map(|path| path.to_str().unwrap());
    let arguments = ["plan", "--json", "--leave", "20", "--place", north, south];
    let told: Value = serde_json::from_str(&out(&run(&arguments))).unwrap();
    assert_eq!(told["moves"][0]["saves_bytes"], 60_000 * 4096);
    let order = |prints: &[Value], least: u64, leave: f64| {
        let order = json!({"fingerprints": prints, "least_bytes": least, "leave_percent": leave});
        let (status, body) = daemon.http("POST", "/v1/plan/place", order.to_string().as_bytes());
        (status, serde_json::from_str::<Value>(&body).unwrap())
    };
    assert_eq!(order(&prints, 64 << 20, 20.0), (200, told));
    let mut other = print("west");
    other["key"] = "other".into();
    for (prints, leave, word) in [
        (&prints[..1], 10.0, "at least two hosts"),
        (
            &[prints[0].clone(), prints[0].clone()],
            10.0,
            "two fingerprints",
        ),
        (&[prints[0].clone(), other], 10.0, "different keys"),
        (&prints, 100.0, "leave_percent"),
        (&[json!({}), json!({})], 10.0, "no fingerprints"),
    ] {
        let (status, refusal) = order(prints, 1, leave);
        let words = refusal["error"].as_str().unwrap();
        assert!(status == 400 && words.contains(word), "{refusal}");
    }
    let (status, _) = order(&prints, u64::MAX, 10.0);
    assert_eq!(status, 400);
}
