//! Tests of `memfold ksm`.

use serde_json::{Value, json};

use crate::support::{Daemon, code, err, out, refused, run};

#[test]
fn ksm_status_and_ksm_explain_work_with_and_without_a_daemon() {
    if !std::path::Path::new("/sys/kernel/mm/ksm/run").exists() {
        memfold_testkit::skip!("no KSM here");
    }
    let daemon = Daemon::start();
    // The name differs from those of other QEMUs on this host.
    let one = format!("ksm-{}", std::process::id());
    let one = one.as_str();
    let vm = daemon.paused_vm(one, &["--domain", "d"]);
    let pid = vm["pid"].as_i64().unwrap();
    let alone = |arguments: &[&str]| {
        let socket = daemon.directory.path().join("nobody");
        let output = run(&[&["--socket", socket.to_str().unwrap()], arguments].concat());
        assert_eq!(code(&output), 0, "{}", err(&output));
        out(&output)
    };
    let parse = |text: &str| -> Value { serde_json::from_str(text).unwrap() };
    let part = |status: &Value| -> Value {
        let vms = status["vms"].as_array().unwrap();
        vms.iter().find(|vm| vm["pid"] == pid).unwrap().clone()
    };
    let status = daemon.json(&["ksm", "status"]);
    assert_eq!(status["daemon"], true);
    assert_eq!(part(&status)["name"], one);
    assert_eq!(part(&status)["domain"], "d");
    assert_eq!(part(&status)["mergeable"], true);
    let status = parse(&alone(&["ksm", "status", "--json"]));
    assert_eq!(
        (&status["daemon"], &status["steering"]),
        (&json!(false), &Value::Null)
    );
    assert_eq!(part(&status)["domain"], Value::Null);
    let text = out(&daemon.run(&["ksm", "status"]));
    for word in [
        "pages_to_scan",
        "sleep_millisecs",
        "general_profit",
        "bytes",
        one,
        "PROFIT",
    ] {
        assert!(text.contains(word), "no '{word}' in: {text}");
    }
    let name = pid.to_string();
    for explained in [
        daemon.json(&["ksm", "explain", one]),
        parse(&alone(&["ksm", "explain", one, "--json"])),
        parse(&alone(&["ksm", "explain", &name, "--json"])),
    ] {
        assert_eq!(explained["pid"], pid);
        assert_eq!(explained["mergeable_bytes"], 64 << 20);
        let causes = explained["causes"].as_array().unwrap();
        assert!(
            causes.iter().any(|c| c["cause"] == "not_present"),
            "{causes:?}"
        );
    }
    let text = out(&daemon.run(&["ksm", "explain", one]));
    assert!(text.contains("never used by the guest"), "{text}");
    let socket = daemon.directory.path().join("nobody");
    let ghost = [
        "--socket",
        socket.to_str().unwrap(),
        "ksm",
        "explain",
        "ghost",
    ];
    refused(&run(&ghost), 1, &["ghost", "memfold ksm status"]);
}

#[test]
fn if_a_ksm_command_is_refused_the_error_names_the_condition_and_the_fix() {
    let daemon = Daemon::start();
    refused(
        &daemon.run(&["ksm", "explain", "ghost"]),
        1,
        &["ghost", "memfold vm list"],
    );
    refused(
        &daemon.run(&["ksm", "start", "--cpu", "200"]),
        1,
        &["cpu_percent is 200", "95 at most"],
    );
    refused(
        &daemon.run(&["ksm", "start", "--target", "0"]),
        1,
        &["target_s is 0", "give 1 to"],
    );
    refused(
        &daemon.run(&["ksm", "stop"]),
        1,
        &["does not steer", "memfold ksm start"],
    );
}
