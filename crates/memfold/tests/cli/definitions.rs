//! Tests of defined VMs: their files, and their starts after a boot of the host, which a test
//! simulates by another boot id in `autostart.json`.

use std::fs;
use std::path::Path;

use memfold_vm::{Record, VmDirectory};
use serde_json::{Value, json};

use super::support::{Daemon, Small, code, err, out, refused, wait};

/// Writes a description of a VM whose guest never runs, and returns the file's path.
fn file(daemon: &Daemon, name: &str, more: &str) -> String {
    let file = daemon.directory.path().join(format!("{name}.description"));
    let text = format!("{more}\nname = '{name}'\nmemory = '64M'\nqemu_args = ['-S']\n");
    fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_owned()
}

fn define(daemon: &Daemon, name: &str, more: &str) -> Value {
    daemon.json(&["vm", "define", &file(daemon, name, more)])
}

/// Returns name and state of each listed VM.
fn states(daemon: &Daemon) -> Vec<(String, String)> {
    let vms = daemon.json(&["vm", "list"]);
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let vms = vms.as_array().unwrap().iter();
    vms.map(|vm| (text(&vm["name"]), text(&vm["state"])))
        .collect()
}

fn assert_states(daemon: &Daemon, wanted: &[(&str, &str)]) {
    let is = states(daemon);
    let is: Vec<_> = is.iter().map(|(n, s)| (n.as_str(), s.as_str())).collect();
    assert_eq!(is, wanted);
}

fn autostart_file(daemon: &Daemon) -> std::path::PathBuf {
    daemon.state().join("autostart.json")
}

/// Restarts the daemon; if `boots`, as after a boot of the host. VMs keep running. Returns when the
/// daemon has started all VMs that it starts by itself, and has taken over those that run.
fn restart(daemon: &mut Daemon, boots: bool) {
    let read = |daemon: &Daemon| -> Value {
        serde_json::from_slice(&fs::read(autostart_file(daemon)).unwrap()).unwrap()
    };
    daemon.terminate();
    if boots {
        let mut said = read(daemon);
        said["boot"] = "another".into();
        fs::write(autostart_file(daemon), said.to_string()).unwrap();
    }
    daemon.start_again();
    wait("no VM waits", || {
        let said = read(daemon);
        said["boot"] != "another" && said["waiting"] == json!([])
    });
    daemon.wait_adopted();
}

fn record(daemon: &Daemon, name: &str) -> Record {
    VmDirectory::read_json(&VmDirectory::of(&daemon.state(), name).record()).unwrap()
}

#[test]
fn a_defined_vm_is_listed_shown_started_edited_and_undefined() {
    let daemon = Daemon::start();
    let info = define(&daemon, "web", "autostart = true\norder = 5\ndomain = 'd'");
    assert_eq!(info["state"], "off");
    assert_eq!(info["definition"]["order"], 5);
    let vms = daemon.json(&["vm", "list"]);
    assert_eq!(
        (&vms[0]["state"], &vms[0]["domain"], &vms[0]["origin"]),
        (&json!("off"), &json!("d"), &json!("defined"))
    );
    let text = out(&daemon.run(&["vm", "list"]));
    assert!(text.contains("web") && text.contains("off"), "{text}");
    // What `show` prints is a definition.
    let shown = out(&daemon.run(&["vm", "show", "web"]));
    assert!(
        shown.starts_with("# web is off\nautostart = true\n"),
        "{shown}"
    );
    let copy = daemon.directory.path().join("copy.toml");
    fs::write(&copy, shown).unwrap();
    let again = daemon.json(&["vm", "define", copy.to_str().unwrap()]);
    assert_eq!(again, info);
    daemon.json(&["vm", "autostart", "web", "--disable"]);
    assert_eq!(
        daemon.json(&["vm", "show", "web"])["definition"]["autostart"],
        false
    );
    assert_eq!(daemon.json(&["vm", "autostart", "web"]), info);

    // The editor adds a field, then makes a mistake, then changes nothing.
    let edit = |editor: &str| {
        let mut command = daemon.command(&["vm", "edit", "web"]);
        command.env("VISUAL", "").env("EDITOR", editor);
        command.env("TMPDIR", daemon.directory.path());
        command.output().unwrap()
    };
    let edited = edit("sed -i 's/^order = .*/order = 9/'");
    assert_eq!(code(&edited), 0, "{}", err(&edited));
    assert!(out(&edited).contains("order 9"), "{}", out(&edited));
    let wrong = edit("sed -i s/^order/ordre/");
    let copy = err(&wrong);
    let (_, copy) = copy.split_once("vm define ").unwrap();
    let (copy, _) = copy.split_once('\'').unwrap();
    refused(
        &wrong,
        1,
        &["'web' was not stored", "line 2", "ordre", copy],
    );
    assert!(fs::read_to_string(copy).unwrap().contains("ordre = 9"));
    refused(
        &edit("sed -i 's/^name = .*/name = \"db\"/'"),
        1,
        &["'db'", "'web'"],
    );
    refused(&edit("false"), 1, &["'false' failed"]);
    // Another command changes the definition while the editor is open.
    let meanwhile = format!(
        "{} --socket {} vm autostart web --disable > /dev/null; sed -i 's/^order = .*/order = 7/'",
        env!("CARGO_BIN_EXE_memfold"),
        daemon.socket().display()
    );
    let words = ["'web' was not stored", "another command has changed it"];
    refused(&edit(&meanwhile), 1, &words);
    let shown = daemon.json(&["vm", "show", "web"]);
    assert_eq!(shown["definition"]["autostart"], false);
    assert!(out(&edit("true")).contains("web was not changed"));
    assert_eq!(
        daemon.json(&["vm", "show", "web"])["definition"]["order"],
        9
    );

    daemon.json(&["vm", "start", "web"]);
    assert_states(&daemon, &[("web", "prelaunch")]);
    assert_eq!(daemon.json(&["vm", "show", "web"])["state"], "prelaunch");
    refused(
        &daemon.run(&["vm", "start", "web"]),
        1,
        &["'web' is running", "memfold vm stop web"],
    );
    daemon.json(&["vm", "undefine", "web"]);
    assert_states(&daemon, &[("web", "prelaunch")]);
    for command in ["show", "start", "undefine", "autostart", "edit"] {
        let words = ["no VM named 'web' is defined", "memfold vm define"];
        refused(&daemon.run(&["vm", command, "web"]), 1, &words);
    }
    daemon.json(&["vm", "stop", "web", "--timeout", "0"]);
    assert_states(&daemon, &[]);
}

#[test]
fn a_wrong_definition_is_refused_with_its_line_or_field_and_changes_nothing() {
    let daemon = Daemon::start();
    let before = define(&daemon, "web", "order = 1");
    for (more, words) in [
        ("autostrat = true", ["line 1", "autostrat"]),
        ("\norder = 'first'", ["line 2", "order"]),
        ("domain = 'x'\n\nswap = 7", ["swap", "MiB"]),
        (
            "[[disks]]\npath = '/no/disk'\n[boot]",
            ["/no/disk", "No such file"],
        ),
    ] {
        let text = format!("name = 'web'\nmemory = '64M'\n{more}\n");
        let text = if more.starts_with('[') {
            text
        } else {
            format!("{more}\nname = 'web'\nmemory = '64M'\n")
        };
        let file = daemon.directory.path().join("wrong.toml");
        fs::write(&file, text).unwrap();
        refused(
            &daemon.run(&["vm", "define", file.to_str().unwrap()]),
            1,
            &words,
        );
    }
    let put = |name: &str, body: &Value| {
        daemon.http(
            "PUT",
            &format!("/v1/definitions/{name}"),
            body.to_string().as_bytes(),
        )
    };
    let good = json!({ "vm": before["definition"]["vm"] });
    let mut unknown = good.clone();
    unknown["sise"] = 1.into();
    let mut path = good.clone();
    path["vm"]["name"] = "../../x".into();
    let mut of_snapshots = good.clone();
    of_snapshots["vm"]["files"] = json!(["/x"]);
    for (name, body, word) in [
        ("web", &unknown, "sise"),
        ("db", &good, "'db'"),
        ("..%2F..%2Fx", &path, "1 to 64 characters"),
        ("web", &of_snapshots, "snapshots only"),
    ] {
        let (status, answer) = put(name, body);
        assert!(status == 400 && answer.contains(word), "{status}: {answer}");
    }
    assert_eq!(
        daemon.http("GET", "/v1/definitions/..%2Fautostart", b"").0,
        404
    );
    assert_eq!(daemon.json(&["vm", "show", "web"]), before);

    // Users put files there, too.
    let place = daemon.state().join("definitions");
    fs::write(place.join("bad.toml"), "name = 'bad'\nmemory = \n").unwrap();
    fs::write(place.join("notes.txt"), "no definition").unwrap();
    assert_states(&daemon, &[("bad", "off"), ("web", "off")]);
    let text = out(&daemon.run(&["vm", "list"]));
    assert!(
        text.contains("bad is off") && text.contains("line 2"),
        "{text}"
    );
    let shown = out(&daemon.run(&["vm", "show", "bad"]));
    assert!(shown.contains("# ") && shown.contains("line 2"), "{shown}");
    refused(
        &daemon.run(&["vm", "start", "bad"]),
        1,
        &["bad.toml", "line 2"],
    );
}

#[test]
fn a_definition_that_a_full_disk_does_not_take_leaves_the_old_one() {
    let place = tempfile::tempdir().unwrap();
    let small = Small::mount(&place.path().join("vms"), "64k");
    let daemon = Daemon::start_with(&["--definitions", small.0.to_str().unwrap()]);
    let before = define(&daemon, "web", "order = 1");
    fs::write(small.0.join("fill"), vec![0; 1 << 20]).unwrap_err();
    refused(
        &daemon.run(&["vm", "define", &file(&daemon, "web", "order = 2")]),
        1,
        &["web.toml", "No space left", "free space"],
    );
    assert_eq!(daemon.json(&["vm", "show", "web"]), before);
    let names = fs::read_dir(&small.0).unwrap();
    let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["fill", "web.toml"]);
}

#[test]
fn if_a_definition_cannot_be_written_vm_set_leaves_the_running_vm_as_it_was() {
    let place = tempfile::tempdir().unwrap();
    let small = Small::mount(&place.path().join("vms"), "64k");
    let daemon = Daemon::start_with(&["--definitions", small.0.to_str().unwrap()]);
    define(&daemon, "web", "order = 1");
    daemon.json(&["vm", "start", "web"]);
    let filler = small.0.join("fill");
    fs::write(&filler, vec![0; 1 << 20]).unwrap_err();
    let set = ["vm", "set", "web", "fold=false"];
    refused(&daemon.run(&set), 1, &["web.toml", "No space left"]);
    let changed = VmDirectory::of(&daemon.state(), "web").settings();
    assert!(!changed.exists());
    fs::remove_file(filler).unwrap();
    daemon.json(&set);
    assert!(changed.exists());
}

#[test]
fn swap_that_a_guest_was_not_told_to_enable_yet_stays_noted_for_the_next_daemon() {
    let mut daemon = Daemon::start();
    daemon.paused_vm("web", &["--swap", "64M"]);
    let pending = VmDirectory::of(&daemon.state(), "web").swap_pending();
    assert!(pending.exists());
    daemon.terminate();
    daemon.start_again();
    daemon.wait_adopted();
    assert!(pending.exists(), "nobody has told the guest");
}

#[test]
fn vms_with_autostart_start_in_order_after_a_boot_and_not_after_a_restart() {
    let mut daemon = Daemon::start();
    define(&daemon, "a", "autostart = true\norder = 2");
    define(&daemon, "b", "autostart = true\norder = 1");
    define(&daemon, "c", "order = 0");
    restart(&mut daemon, false);
    assert_states(&daemon, &[("a", "off"), ("b", "off"), ("c", "off")]);
    restart(&mut daemon, true);
    let running = [("a", "prelaunch"), ("b", "prelaunch"), ("c", "off")];
    assert_states(&daemon, &running);
    let [a, b] = ["a", "b"].map(|name| record(&daemon, name).process);
    assert!(b.start_ticks < a.start_ticks, "{b:?} {a:?}");
    // A VM that was stopped stays off, and a VM that runs is adopted.
    daemon.json(&["vm", "stop", "a", "--timeout", "0"]);
    restart(&mut daemon, false);
    assert_states(&daemon, &[("a", "off"), ("b", "prelaunch"), ("c", "off")]);
    restart(&mut daemon, true);
    assert_states(&daemon, &running);
    assert_eq!(record(&daemon, "b").process, b);
}

#[test]
fn a_daemon_that_died_during_the_starts_is_continued_by_the_next_one() {
    let mut daemon = Daemon::start();
    for name in ["a", "b", "c", "d"] {
        define(&daemon, name, "autostart = true");
    }
    daemon.json(&["vm", "start", "b"]);
    daemon.json(&["vm", "autostart", "c", "--disable"]);
    daemon.terminate();
    // The first daemon after the boot has started 'a', which has been stopped since, and 'b'.
    let mut said: Value =
        serde_json::from_slice(&fs::read(autostart_file(&daemon)).unwrap()).unwrap();
    said["waiting"] = json!(["b", "gone", "c", "d"]);
    fs::write(autostart_file(&daemon), said.to_string()).unwrap();
    daemon.start_again();
    wait("no VM waits", || {
        let now = fs::read(autostart_file(&daemon)).unwrap();
        serde_json::from_slice::<Value>(&now).unwrap()["waiting"] == json!([])
    });
    daemon.wait_adopted();
    let wanted = [
        ("a", "off"),
        ("b", "prelaunch"),
        ("c", "off"),
        ("d", "prelaunch"),
    ];
    assert_states(&daemon, &wanted);
}

#[test]
fn a_vm_that_is_started_and_stopped_by_hand_while_others_start_after_a_boot_stays_off() {
    let empty = Path::new("/dev/null");
    let mut daemon = Daemon::start_with_words(empty);
    define(&daemon, "slow", "autostart = true\norder = 1");
    define(&daemon, "b", "autostart = true\norder = 2");
    daemon.terminate();
    // QEMU of 'slow' starts when the gate is open.
    let gate = daemon.directory.path().join("gate");
    let wait_for_gate = format!("until [ -e {} ]; do sleep 0.05; done", gate.display());
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *slow*) {wait_for_gate};; esac\nexec qemu-system-x86_64 \"$@\"\n"
    );
    fs::write(daemon.directory.path().join("qemu"), script).unwrap();
    let read = |daemon: &Daemon| -> Value {
        serde_json::from_slice(&fs::read(autostart_file(daemon)).unwrap()).unwrap()
    };
    let mut said = read(&daemon);
    said["boot"] = "another".into();
    fs::write(autostart_file(&daemon), said.to_string()).unwrap();
    daemon.start_again();
    wait("'slow' is being started", || {
        states(&daemon).contains(&("slow".into(), "starting".into()))
    });
    assert_eq!(read(&daemon)["waiting"], json!(["slow", "b"]));
    daemon.json(&["vm", "start", "b"]);
    daemon.json(&["vm", "stop", "b", "--timeout", "0"]);
    assert_eq!(read(&daemon)["waiting"], json!(["slow"]));
    fs::write(gate, "").unwrap();
    wait("no VM waits", || read(&daemon)["waiting"] == json!([]));
    assert_states(&daemon, &[("b", "off"), ("slow", "prelaunch")]);
}

fn set_reserve(config: &Path, reserve: &str) {
    fs::write(config, format!("reserve = \"{reserve}\"\n")).unwrap();
}

#[test]
fn a_vm_that_cannot_be_started_after_a_boot_is_reported_and_the_others_start() {
    let config = tempfile::NamedTempFile::new().unwrap();
    set_reserve(config.path(), "1M");
    let mut daemon = Daemon::start_with(&["--config", config.path().to_str().unwrap()]);
    let disk = daemon.directory.path().join("disk");
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let text = format!(
        "autostart = true\nname = 'a'\nmemory = '64M'\n[[disks]]\npath = '{}'\n",
        disk.display()
    );
    let with_disk = daemon.directory.path().join("a.toml");
    fs::write(&with_disk, text).unwrap();
    daemon.json(&["vm", "define", with_disk.to_str().unwrap()]);
    define(&daemon, "b", "autostart = true\norder = 1");
    fs::remove_file(&disk).unwrap();
    restart(&mut daemon, true);
    assert_states(&daemon, &[("a", "off"), ("b", "prelaunch")]);
    let text = out(&daemon.run(&["vm", "list"]));
    for word in ["a is off", disk.to_str().unwrap(), "memfold vm start a"] {
        assert!(text.contains(word), "no '{word}' in {text}");
    }
    // Its autostart can be disabled although its disk is missing.
    daemon.json(&["vm", "autostart", "a", "--disable"]);
    daemon.json(&["vm", "autostart", "a"]);
    // The reason is known to the next daemon, too.
    let problem = daemon.json(&["vm", "show", "a"])["problem"].clone();
    restart(&mut daemon, false);
    assert_eq!(daemon.json(&["vm", "show", "a"])["problem"], problem);

    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    daemon.json(&["vm", "stop", "b", "--timeout", "0"]);
    // A clone shares its snapshot's memory, which counts as debt. Its firmware finds no disk.
    let one = ["vm", "run", "--name", "one", "--memory", "64M"];
    assert_eq!(code(&daemon.run(&one)), 0);
    daemon.json(&["snapshot", "save", "one", "warm", "--keep", "all"]);
    daemon.json(&["vm", "stop", "one", "--timeout", "0"]);
    let clone = daemon.run(&["clone", "warm", "--no-wait", "--force"]);
    assert_eq!(code(&clone), 0, "{}", err(&clone));
    set_reserve(config.path(), "100%");
    restart(&mut daemon, true);
    assert_states(
        &daemon,
        &[("a", "off"), ("b", "off"), ("warm-1", "running")],
    );
    for name in ["a", "b"] {
        let info = daemon.json(&["vm", "show", name]);
        let (problem, fix) = (info["problem"].to_string(), info["fix"].to_string());
        assert!(problem.contains("the brake is on"), "{problem}");
        assert!(
            fix.contains("memfold debt") && fix.contains("vm start"),
            "{fix}"
        );
    }
    refused(&daemon.run(&["vm", "start", "b"]), 1, &["the brake is on"]);
    daemon.json(&["vm", "start", "b", "--despite-brake"]);
    daemon.json(&["vm", "stop", "b", "--timeout", "0"]);
    assert_eq!(daemon.json(&["vm", "show", "b"])["problem"], Value::Null);
}
