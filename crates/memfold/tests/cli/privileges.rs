//! Tests of the rights of a running daemon: capabilities and seccomp filters of its threads, and
//! its `AppArmor` profile.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{read_dir, read_to_string};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use memfold_host::privileges::kept;
use memfold_testkit::wait_for;

use super::access::Door;
use super::support::{Daemon, err};

/// Fields of `/proc/PID/task/TID/status` by name.
type Fields = BTreeMap<String, String>;

fn fields(status: &Path) -> Option<Fields> {
    let text = read_to_string(status).ok()?;
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    Some(
        fields
            .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
            .collect(),
    )
}

/// Returns the status of all threads of the daemon.
fn threads(daemon: &Daemon) -> Vec<Fields> {
    let tasks = read_dir(format!("/proc/{}/task", daemon.child.id())).unwrap();
    let statuses = tasks.map(|task| fields(&task.unwrap().path().join("status")));
    // A thread may end meanwhile.
    statuses.flatten().collect()
}

fn mask(fields: &Fields, name: &str) -> u64 {
    u64::from_str_radix(&fields[name], 16).unwrap()
}

/// Returns the number of seccomp filters of a thread. The test may run below a filter itself.
fn filters(fields: &Fields) -> u32 {
    fields["Seccomp_filters"].parse().unwrap()
}

#[test]
fn threads_that_parse_foreign_bytes_have_no_capability_and_others_have_only_the_listed_ones() {
    let door = Door::open(&[]);
    let daemon = &door.daemon;
    let own = fields(Path::new("/proc/thread-self/status")).unwrap();
    let (before, outside) = (mask(&own, "CapBnd"), filters(&own));

    // The requests start threads of both kinds.
    assert_eq!(daemon.http("GET", "/v1/report", b"").0, 200);
    assert_eq!(door.ask("GET", "/", &[], "").status, 200);
    // A thread has its name before it gives up its rights.
    let threads = wait_for("parsers are confined", Duration::from_secs(60), || {
        let all = threads(daemon);
        let mut parsers = all.iter().filter(|thread| thread["Name"] == "http");
        let are_confined = parsers.all(|parser| filters(parser) == outside + 1);
        are_confined.then_some(all.clone()).ok_or(all)
    });
    let (parsers, others): (Vec<_>, Vec<_>) =
        threads.iter().partition(|thread| thread["Name"] == "http");
    assert!(parsers.len() >= 2, "{threads:?}");
    for parser in parsers {
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            assert_eq!(mask(parser, set), 0, "{set} of {parser:?}");
        }
        assert_eq!(parser["Seccomp"], "2");
        assert_eq!(filters(parser), outside + 1, "{parser:?}");
        assert_eq!(parser["NoNewPrivs"], "1");
    }
    let is_root = rustix::process::geteuid().is_root();
    assert!(others.iter().any(|thread| thread["Name"] == "request"));
    for other in others {
        let left = before & kept().bits();
        let effective = if is_root { left } else { 0 };
        assert_eq!(mask(other, "CapEff"), effective, "{other:?}");
        assert_eq!(mask(other, "CapPrm"), effective, "{other:?}");
        assert_eq!(filters(other), outside, "{other:?}");
        if is_root {
            assert_eq!(mask(other, "CapBnd"), left, "{other:?}");
            assert_eq!(other["NoNewPrivs"], "1", "{other:?}");
        }
    }
}

#[test]
fn the_thread_that_parses_an_agents_messages_has_no_capability_and_names_no_file() {
    let daemon = Daemon::start();
    daemon.paused_vm("a", &[]);
    let parser = || {
        let mut threads = threads(&daemon).into_iter();
        threads.find(|thread| thread["Name"] == "agent-parser")
    };
    let own = fields(Path::new("/proc/thread-self/status")).unwrap();
    // The thread begins when the daemon connects to the agent's port, and gives its rights up one
    // after the other.
    wait_for("the parser is confined", Duration::from_secs(180), || {
        let found = parser();
        let is_confined = found.as_ref().is_some_and(|thread| {
            mask(thread, "CapEff") == 0
                && mask(thread, "CapPrm") == 0
                && filters(thread) == filters(&own) + 1
        });
        is_confined.then_some(()).ok_or(found)
    });
    daemon.json(&["vm", "stop", "a", "--timeout", "0"]);
}

#[test]
fn a_qemu_that_the_daemon_starts_has_no_capability_beside_the_daemons() {
    let daemon = Daemon::start();
    let vm = daemon.paused_vm("a", &[]);
    let status = format!("/proc/{}/status", vm["pid"]);
    let qemu = fields(Path::new(&status)).unwrap();
    assert_eq!(mask(&qemu, "CapBnd") & !kept().bits(), 0, "{qemu:?}");
    assert_eq!(mask(&qemu, "CapEff") & !kept().bits(), 0, "{qemu:?}");
    assert_eq!(qemu["NoNewPrivs"], "1");
    daemon.json(&["vm", "stop", "a", "--timeout", "0"]);
}

/// Returns the lines of the `AppArmor` profile of the daemon that grant a capability.
fn granted(profile: &str) -> BTreeSet<String> {
    let daemon = profile.split("profile qemu ").next().unwrap();
    let lines = daemon.lines().map(str::trim);
    let names = lines.filter_map(|line| line.strip_prefix("capability ")?.strip_suffix(','));
    names.map(str::to_uppercase).collect()
}

#[test]
fn the_apparmor_profile_compiles_and_grants_the_capabilities_that_the_daemon_keeps() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/apparmor");
    let file = directory.join("memfold-daemon");
    let mut kept: BTreeSet<String> = kept()
        .iter_names()
        .map(|(name, _)| name.to_owned())
        .collect();
    // Only to give up the others.
    kept.insert("SETPCAP".into());
    let profile = read_to_string(&file).unwrap();
    assert_eq!(granted(&profile), kept);
    // AppArmor sees the kernel's names of disks: ZFS, Ceph, DRBD, bcache, SD cards and others.
    let mut lines = profile.lines().map(str::trim);
    let disks = lines.find_map(|line| line.strip_prefix("/dev/{sd,")?.strip_suffix("}* rwk,"));
    let disks: BTreeSet<&str> = disks.unwrap().split(',').collect();
    for name in ["vd", "nvme", "zd", "rbd", "drbd", "bcache", "mmcblk"] {
        assert!(disks.contains(name), "{name}");
    }
    assert!(profile.contains("    /usr/{,local/}{bin,libexec}/qemu-system-* mr,"));

    let mut parser = Command::new("apparmor_parser");
    parser.args(["--skip-kernel-load", "--skip-cache"]);
    let Ok(output) = parser.arg(&file).output() else {
        assert!(
            std::env::var_os("MEMFOLD_REAL").is_none(),
            "no apparmor_parser to compile the profile; install package apparmor (scripts/setup tests)"
        );
        memfold_testkit::skip!("no apparmor_parser (package apparmor)");
    };
    assert!(output.status.success(), "{}", err(&output));
}

#[test]
fn the_selinux_module_for_qemus_of_libvirt_compiles() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/selinux/memfold.te");
    let directory = tempfile::tempdir().unwrap();
    let mut compiler = Command::new("checkmodule");
    // The file's name must be the module's.
    compiler.args(["-M", "-m", "-o"]);
    compiler.arg(directory.path().join("memfold.mod")).arg(file);
    let Ok(output) = compiler.output() else {
        assert!(
            std::env::var_os("MEMFOLD_REAL").is_none(),
            "no checkmodule to compile the SELinux module; install package checkpolicy (scripts/setup tests)"
        );
        memfold_testkit::skip!("no checkmodule (package checkpolicy)");
    };
    assert!(output.status.success(), "{}", err(&output));
}

#[test]
fn the_page_about_hardening_lists_the_capabilities_that_the_daemon_keeps() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operating/hardening.md");
    let page = read_to_string(page).unwrap();
    let section = page.split("## ").find(|s| s.starts_with("Capabilities"));
    let rows = section
        .unwrap()
        .lines()
        .filter(|line| line.starts_with("| `"));
    let cells = rows.map(|row| row.split(" | ").next().unwrap());
    let listed: BTreeSet<&str> = cells
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .collect();
    let kept = kept();
    assert_eq!(listed, kept.iter_names().map(|(name, _)| name).collect());
}
