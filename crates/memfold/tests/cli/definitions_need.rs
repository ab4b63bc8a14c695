//! Tests of what definitions of VMs need: a snapshot from which the VM starts, and segments.

use std::fs;
use std::process::Command;

use memfold_testkit::skip;
use rustix::process::geteuid;
use serde_json::{Value, json};

use super::support::{Daemon, code, err, out, refused};

fn file(daemon: &Daemon, name: &str, more: &str) -> String {
    let file = daemon.directory.path().join(format!("{name}.description"));
    fs::write(&file, format!("name = '{name}'\nmemory = '64M'\n{more}\n")).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn a_definition_with_a_snapshot_restores_the_vm_at_each_start_and_keeps_the_snapshot() {
    if !geteuid().is_root() {
        skip!("only root can restore VMs");
    }
    let daemon = Daemon::start();
    let first = [
        "vm",
        "run",
        "--name",
        "web",
        "--memory",
        "64M",
        "--domain",
        "d",
        "--forward",
        "0:22",
    ];
    daemon.json(&first);
    daemon.json(&["snapshot", "save", "web", "warm", "--keep", "all"]);
    daemon.json(&["vm", "stop", "web", "--timeout", "0"]);

    for (more, words) in [
        ("snapshot = 'cold'\ndomain = 'd'", ["'cold'", ""]),
        (
            "snapshot = '../warm'\ndomain = 'd'",
            ["snapshot", "1 to 64"],
        ),
        (
            "snapshot = 'warm'",
            ["domain: the description says no trust domain", "write d"],
        ),
        (
            "snapshot = 'warm'\ndomain = 'd'\nvcpus = 2",
            ["vcpus: the description says 2", "write 1"],
        ),
    ] {
        let output = daemon.run(&["vm", "define", &file(&daemon, "web", more)]);
        refused(&output, 1, &words);
    }
    let warm = "snapshot = 'warm'\ndomain = 'd'";
    daemon.json(&["vm", "define", &file(&daemon, "web", warm)]);
    // The saved VM had other settings.
    let more = format!("{warm}\nfold = false\nresume_when_room = true");
    daemon.json(&["vm", "define", &file(&daemon, "web2", &more)]);
    let shown = out(&daemon.run(&["vm", "show", "web"]));
    assert!(shown.contains("snapshot = \"warm\""), "{shown}");
    refused(
        &daemon.run(&["snapshot", "remove", "warm"]),
        1,
        &[
            "needed by the definition of VM 'web', the definition of VM 'web2'",
            "vm edit",
        ],
    );
    // A VM of another name is a new VM, and not the saved one.
    for (name, renews) in [("web", "random"), ("web2", "identity")] {
        let vm = daemon.json(&["vm", "start", name]);
        assert_eq!((&vm["name"], &vm["domain"]), (&json!(name), &json!("d")));
        let users = daemon.json(&["snapshot", "list"])[0]["users"].clone();
        assert_eq!(users, json!([name]));
        let plan = daemon.state().join(format!("vms/{name}/renewal.json"));
        let plan: Value = serde_json::from_slice(&fs::read(plan).unwrap()).unwrap();
        assert_eq!(plan["renew"], renews);
        let problems = daemon.json(&["vm", "list"])[0]["fold_problems"].to_string();
        assert_eq!(
            problems.contains("switched off"),
            name == "web2",
            "{problems}"
        );
        let set = daemon.state().join(format!("vms/{name}/settings.json"));
        let set = fs::read(set).ok();
        let set = set.map(|set| serde_json::from_slice::<Value>(&set).unwrap());
        let resumes = set.is_some_and(|set| set["resume_when_room"] == true);
        assert_eq!(resumes, name == "web2");
        daemon.json(&["vm", "stop", name, "--timeout", "0"]);
        daemon.json(&["vm", "undefine", name]);
    }
    let removed = daemon.run(&["snapshot", "remove", "warm"]);
    assert_eq!(code(&removed), 0, "{}", err(&removed));
}

#[test]
fn a_segment_that_only_a_definition_names_cannot_be_removed() {
    let has_erofs = Command::new("mkfs.erofs").arg("--help").output();
    if !geteuid().is_root() || has_erofs.is_err() {
        skip!("segments need root and erofs-utils");
    }
    let segments = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_with(&["--segments", segments.path().to_str().unwrap()]);
    let files = daemon.directory.path().join("files");
    fs::create_dir(&files).unwrap();
    fs::write(files.join("tool"), "text").unwrap();
    let build = [
        "segment",
        "build",
        "tools",
        "--from",
        files.to_str().unwrap(),
        "--domain",
        "d",
        "--include",
        "/**",
    ];
    daemon.json(&build);
    let names = "domain = 'd'\nqemu_args = ['-S']\n[[segments]]\nname = 'tools'";
    daemon.json(&["vm", "define", &file(&daemon, "web", names)]);
    for name in ["tools", "tools@1"] {
        let words = ["used by the definition of VM 'web'"];
        refused(&daemon.run(&["segment", "remove", name]), 1, &words);
    }
    // A new generation is built all the same, and then the old one is not needed.
    fs::write(files.join("tool"), "another text").unwrap();
    daemon.json(&build);
    let left = daemon.json(&["segment", "list"]);
    assert_eq!(left.as_array().unwrap().len(), 1, "{left}");
    daemon.json(&["vm", "undefine", "web"]);
    daemon.json(&["segment", "remove", "tools"]);
}
