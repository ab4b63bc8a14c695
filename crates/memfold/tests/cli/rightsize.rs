//! Tests of `memfold rightsize`. The daemon is another process, and the VMs run no guest, so no
//! guest reports figures.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use memfold_vm::{Qmp, QmpError, VmDirectory};
use serde_json::{Value, json};

use super::support::{Daemon, code, err, out, refused, run, wait};

/// Returns what right-sizing says about a VM.
fn vm(daemon: &Daemon, name: &str) -> Option<Value> {
    let report = daemon.json(&["rightsize", "status"]);
    let vms = report["vms"].as_array().unwrap();
    vms.iter().find(|vm| vm["vm"] == name).cloned()
}

/// Waits until right-sizing gives a reason with these words, and returns what it says about the VM.
fn wait_reason(daemon: &Daemon, name: &str, words: &str) -> Value {
    let mut found = Value::Null;
    wait(&format!("the reason has the words '{words}'"), || {
        found = vm(daemon, name).unwrap_or_default();
        found["reason"]
            .as_str()
            .is_some_and(|reason| reason.contains(words))
    });
    found
}

/// Connects to the monitor of a VM that the daemon does not use.
fn monitor(daemon: &Daemon, vm: &str) -> Qmp {
    let socket = VmDirectory::of(&daemon.state(), vm).qmp();
    Qmp::connect(&socket, Duration::from_secs(60)).unwrap()
}

#[test]
fn a_vm_that_does_not_run_keeps_its_size_and_rightsize_status_says_why() {
    let daemon = Daemon::start();
    daemon.paused_vm("still", &[]);
    let still = wait_reason(
        &daemon,
        "still",
        "the VM does not run (prelaunch: QEMU was started with -S",
    );
    assert_eq!(still["order"], Value::Null, "{still}");
    assert_eq!(still["size_bytes"], 64_u64 << 20, "{still}");
    daemon.run(&["vm", "resume", "still"]);
    wait_reason(&daemon, "still", "never reported");
    daemon.run(&["vm", "pause", "still"]);
    wait_reason(&daemon, "still", "the VM does not run (paused: ");
    daemon.run(&["vm", "stop", "still"]);
    wait("right-sizing forgets the VM", || {
        vm(&daemon, "still").is_none()
    });
}

#[test]
fn a_vm_whose_qemu_does_not_answer_keeps_its_size_and_rightsize_status_says_why() {
    let daemon = Daemon::start();
    daemon.paused_vm("mute", &[]);
    daemon.run(&["vm", "resume", "mute"]);
    wait_reason(&daemon, "mute", "never reported");
    // QEMU waits for this server, and executes no other command meanwhile.
    let place = daemon.directory.path().join("server");
    let server = UnixListener::bind(&place).unwrap();
    std::fs::set_permissions(&place, Permissions::from_mode(0o777)).unwrap();
    let node = json!({
        "driver": "nbd",
        "node-name": "never",
        "server": { "type": "unix", "path": place },
    });
    let limit = Duration::from_secs(1);
    let added = monitor(&daemon, "mute").execute_within(limit, "blockdev-add", node);
    assert!(matches!(added, Err(QmpError::Timeout { .. })), "{added:?}");

    let words = "the VM does not answer (silent: QEMU does not answer: ";
    let mute = wait_reason(&daemon, "mute", words);
    assert_eq!(mute["order"], Value::Null, "{mute}");
    assert_eq!(mute["size_bytes"], 64_u64 << 20, "{mute}");
    drop(server);
    wait_reason(&daemon, "mute", "never reported");
}

#[test]
fn a_vm_that_moves_to_another_daemon_gets_no_order_there_until_it_runs_and_words_say_why() {
    let (from, to) = (Daemon::start(), Daemon::start());
    from.paused_vm("moves", &[]);
    from.run(&["vm", "resume", "moves"]);
    let run = ["vm", "run", "--name", "moves", "--memory", "64M", "--"];
    let arrives = to.run(&[&run[..], &["-incoming", "defer"]].concat());
    assert_eq!(code(&arrives), 0, "{}", err(&arrives));
    let words = "the VM's memory is still being received";
    let moves = wait_reason(&to, "moves", words);
    assert_eq!(moves["order"], Value::Null, "{moves}");

    let (mut source, mut target) = (monitor(&from, "moves"), monitor(&to, "moves"));
    let any_port = json!({ "uri": "tcp:127.0.0.1:0" });
    target.execute("migrate-incoming", any_port).unwrap();
    let listens = target.query("query-migrate").unwrap();
    let port = listens["socket-address"][0]["port"].as_str();
    let port = port.unwrap_or_else(|| panic!("{listens}"));
    let there = json!({ "uri": format!("tcp:127.0.0.1:{port}") });
    source.execute("migrate", there).unwrap();
    wait_reason(&to, "moves", "never reported");
    let words = "the VM does not run (postmigrate: the VM was migrated away by another program";
    wait_reason(&from, "moves", words);
}

#[test]
fn a_vm_whose_guest_reports_nothing_keeps_its_size_and_rightsize_status_says_why() {
    let daemon = Daemon::start();
    assert_eq!(daemon.json(&["rightsize", "status"])["mode"], "watch");
    daemon.paused_vm("quiet", &[]);
    daemon.run(&["vm", "resume", "quiet"]);
    assert_eq!(daemon.json(&["rightsize", "on"])["mode"], "on");
    let quiet = wait_reason(&daemon, "quiet", "never reported");
    assert_eq!(quiet["order"], Value::Null, "{quiet}");
    assert_eq!(quiet["size_bytes"], 64_u64 << 20, "{quiet}");
    let text = out(&daemon.run(&["rightsize", "status"]));
    assert!(
        text.contains("right-sizing: on\nhost: rung ample"),
        "{text}"
    );
    assert!(text.contains("never reported"), "{text}");
    assert!(out(&daemon.run(&["rightsize", "off"])).contains("left alone"));
    assert_eq!(daemon.json(&["rightsize", "status"])["vms"], json!([]));
}

#[test]
fn limits_of_a_vms_size_survive_a_daemon_restart_and_wrong_limits_are_refused() {
    let mut daemon = Daemon::start_with(&["--rightsize", "watch"]);
    daemon.paused_vm("sized", &[]);
    let set = &[
        "rightsize",
        "set",
        "sized",
        "--min",
        "48M",
        "--pin",
        "--priority",
        "7",
    ];
    let sizing = daemon.json(set);
    assert_eq!(sizing["min_bytes"], 48_u64 << 20);
    daemon.terminate();
    daemon.start_again();
    daemon.run(&["vm", "resume", "sized"]);
    let sized = wait_reason(&daemon, "sized", "pinned");
    assert_eq!(
        (&sized["sizing"]["priority"], &sized["sizing"]["pinned"]),
        (&json!(7), &json!(true))
    );
    let sizing = daemon.json(&["rightsize", "set", "sized", "--unpin"]);
    assert_eq!(
        (&sizing["pinned"], &sizing["priority"]),
        (&json!(false), &json!(7))
    );

    let too_large = daemon.run(&["rightsize", "set", "sized", "--min", "1G"]);
    refused(&too_large, 1, &["min is 1.00 GiB", "can have 64.0 MiB"]);
    refused(
        &daemon.run(&["rightsize", "set", "nobody", "--pin"]),
        1,
        &["no VM named 'nobody'"],
    );
    // A name with a slash is not taken for another path of the API.
    refused(
        &daemon.run(&["rightsize", "set", "sized/pause", "--pin"]),
        1,
        &["name 'sized/pause'"],
    );
    for wrong in [
        &["rightsize", "set", "sized", "--pin", "--unpin"][..],
        &["rightsize", "set", "sized", "--priority", "0"],
        &["rightsize", "maybe"],
        &["serve", "--rightsize", "maybe"],
    ] {
        let output = run(wrong);
        assert_eq!(code(&output), 2, "{wrong:?}: {}", err(&output));
    }
}

#[test]
fn limits_of_a_vms_size_come_from_its_description_and_vm_set_changes_them_now_and_for_later() {
    let daemon = Daemon::start();
    let file = daemon.directory.path().join("web.toml");
    let text = "name = 'web'\nmemory = '64M'\nqemu_args = ['-S']\n\
                [sizing]\nmin = '48M'\npriority = 7\n";
    std::fs::write(&file, text).unwrap();
    daemon.json(&["vm", "define", file.to_str().unwrap()]);
    daemon.json(&["vm", "start", "web"]);
    daemon.run(&["vm", "resume", "web"]);
    let sizing = |name: &str| vm(&daemon, name).map(|vm| vm["sizing"].clone());
    wait("right-sizing shows the VM", || sizing("web").is_some());
    let described = json!({ "min_bytes": 48_u64 << 20, "priority": 7 });
    assert_eq!(sizing("web"), Some(described));

    let said = daemon.run(&["vm", "set", "web", "sizing.pinned=true", "sizing.min="]);
    let lines = "sizing.min=: now and at later starts\n\
                 sizing.pinned=true: now and at later starts\n";
    assert_eq!(out(&said), lines, "{}", err(&said));
    let changed = Some(json!({ "priority": 7, "pinned": true }));
    wait("right-sizing knows the new limits", || {
        sizing("web") == changed
    });
    let definition = daemon.json(&["vm", "show", "web"])["definition"]["vm"]["sizing"].clone();
    assert_eq!(Some(definition), changed);

    for (wrong, words) in [
        ("sizing.min=1G", "min is 1.00 GiB"),
        ("sizing.least=1G", "there is no limit 'least'"),
        ("sizing.priority=0", "priority is not 1 to 10000"),
    ] {
        refused(&daemon.run(&["vm", "set", "web", wrong]), 1, &[words]);
    }
    assert_eq!(sizing("web"), changed);

    let flags = ["--sizing", "max=32M,buffer=30"];
    daemon.paused_vm("flags", &flags);
    daemon.run(&["vm", "resume", "flags"]);
    let wanted = Some(json!({ "max_bytes": 32_u64 << 20, "buffer_percent": 30 }));
    wait("right-sizing shows the limits of the flag", || {
        sizing("flags") == wanted
    });
    let run = |sizing| {
        let vm = ["vm", "run", "--name", "x", "--memory", "64M"];
        daemon.run(&[&vm[..], &["--sizing", sizing]].concat())
    };
    refused(&run("min=1G"), 1, &["sizing: min is 1.00 GiB"]);
    refused(&run("min=lots"), 2, &["'lots' is not a size"]);
}
