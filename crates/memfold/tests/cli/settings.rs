//! Tests of `memfold vm set`: settings of running and of defined VMs.

use std::fs;

use serde_json::{Value, json};

use super::support::{Daemon, code, err, out, refused};

/// Defines a VM whose guest never runs.
fn define(daemon: &Daemon, name: &str) {
    let file = daemon.directory.path().join("description.toml");
    let text = format!("name = '{name}'\nmemory = '64M'\nqemu_args = ['-S']\n");
    fs::write(&file, text).unwrap();
    daemon.json(&["vm", "define", file.to_str().unwrap()]);
}

fn field(daemon: &Daemon, vm: &str, field: &str) -> Value {
    daemon.json(&["vm", "show", vm])["definition"]["vm"][field].clone()
}

/// Returns the first reason why a VM is not folded.
fn problem(daemon: &Daemon, vm: &str) -> String {
    let vms = daemon.json(&["vm", "list"]);
    let vm = vms
        .as_array()
        .unwrap()
        .iter()
        .find(|info| info["name"] == vm);
    vm.unwrap()["fold_problems"][0]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

#[test]
fn a_setting_changes_the_running_vm_at_once_and_its_definition_for_the_next_start() {
    let mut daemon = Daemon::start();
    define(&daemon, "web");
    daemon.json(&["vm", "start", "web"]);
    let said = daemon.run(&["vm", "set", "web", "fold=false", "vcpus=2", "domain=shop"]);
    assert_eq!(code(&said), 0, "{}", err(&said));
    let lines = "domain=shop: from the next start on\n\
                 fold=false: now and at later starts\n\
                 vcpus=2: from the next start on\n";
    assert_eq!(out(&said), lines);
    assert_eq!(field(&daemon, "web", "vcpus"), 2);
    assert_eq!(field(&daemon, "web", "fold"), false);
    assert_eq!(field(&daemon, "web", "domain"), "shop");
    assert!(problem(&daemon, "web").contains("switched off"));
    // The next daemon knows the setting.
    daemon.terminate();
    daemon.start_again();
    daemon.wait_adopted();
    assert!(problem(&daemon, "web").contains("memfold vm set web fold=true"));
    // Only the running VM changes, then only the definition.
    daemon.json(&["vm", "set", "web", "fold=true", "--now"]);
    assert!(!problem(&daemon, "web").contains("switched off"));
    assert_eq!(field(&daemon, "web", "fold"), false);
    daemon.json(&[
        "vm",
        "set",
        "web",
        "fold=true",
        "autostart=true",
        "--next-start",
    ]);
    assert_eq!(field(&daemon, "web", "fold"), true);
    assert_eq!(
        daemon.json(&["vm", "show", "web"])["definition"]["autostart"],
        true
    );
    // An empty value restores the default.
    daemon.json(&["vm", "set", "web", "domain="]);
    assert_eq!(field(&daemon, "web", "domain"), Value::Null);
    // The VM has the new settings from its next start on.
    daemon.json(&["vm", "stop", "web", "--timeout", "0"]);
    daemon.json(&["vm", "set", "web", "domain=shop"]);
    assert_eq!(daemon.json(&["vm", "start", "web"])["domain"], "shop");
}

#[test]
fn a_setting_that_cannot_take_effect_is_refused_with_the_reason_and_nothing_changes() {
    let daemon = Daemon::start();
    daemon.paused_vm("alone", &[]);
    daemon.paused_vm("unfolded", &["--no-fold"]);
    define(&daemon, "off");
    let before = daemon.json(&["vm", "show", "off"]);
    for (arguments, words) in [
        (
            &["alone", "vcpus=2"][..],
            ["'vcpus' of VM 'alone' cannot change", "memfold vm define"],
        ),
        (
            &["alone", "fold=false", "domain=x", "--now"],
            ["memory may be shared", "leave out --now"],
        ),
        (
            &["alone", "fold=false", "--next-start"],
            ["has no definition", "memfold vm define"],
        ),
        (
            &["unfolded", "fold=true"],
            ["without memfold's library", "--next-start"],
        ),
        (
            &["off", "fold=true", "--now"],
            ["'off' does not run", "leave out --now"],
        ),
        (&["off", "vcpsu=2"], ["vcpsu=2", "unknown field"]),
        (&["off", "vcpus=2", "memory=lots"], ["memory=lots", "lots"]),
        (&["off", "swap=7"], ["swap", "MiB"]),
        (&["off", "name=on"], ["name=on", "keeps its name"]),
        (&["nobody", "fold=true"], ["'nobody'", "memfold vm"]),
    ] {
        let output = daemon.run(&[&["vm", "set"], arguments].concat());
        refused(&output, 1, &words);
    }
    refused(
        &daemon.run(&["vm", "set", "alone", "fold=maybe"]),
        1,
        &["fold=maybe", "true or false"],
    );
    refused(
        &daemon.run(&["vm", "set", "off", "fold"]),
        2,
        &["FIELD=VALUE"],
    );
    assert_eq!(daemon.json(&["vm", "show", "off"]), before);
    assert!(!problem(&daemon, "alone").contains("switched off"));
    // Settings of a VM without a definition end with the VM.
    let said = daemon.json(&["vm", "set", "alone", "resume_when_room=true"]);
    assert_eq!(
        said["settings"],
        json!([{ "name": "resume_when_room", "value": "true", "now": true, "next_start": false }])
    );
}

#[test]
fn two_commands_that_change_one_definition_at_once_both_take_effect() {
    let daemon = Daemon::start();
    define(&daemon, "web");
    for round in 1..=50 {
        let is_on = round % 2 == 1;
        let autostart = json!({ "autostart": is_on }).to_string();
        let order = json!({ "settings": { "order": round.to_string() } }).to_string();
        let statuses = std::thread::scope(|scope| {
            [
                ("PUT", "/v1/definitions/web/autostart", &autostart),
                ("POST", "/v1/vms/web/settings", &order),
            ]
            .map(|(method, path, body)| {
                let daemon = &daemon;
                scope.spawn(move || daemon.http(method, path, body.as_bytes()).0)
            })
            .map(|request| request.join().unwrap())
        });
        assert_eq!(statuses, [200, 200]);
        let (_, shown) = daemon.http("GET", "/v1/definitions", b"");
        let shown: Value = serde_json::from_str(&shown).unwrap();
        let definition = &shown[0]["definition"];
        assert_eq!(
            [&definition["autostart"], &definition["order"]],
            [&json!(is_on), &json!(round)]
        );
    }
}
