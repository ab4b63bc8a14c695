//! Tests of `memfold self-test --report`: all parts run, in small doses if guests are emulated; the
//! report names neither the host nor its users; an interrupt leaves nothing behind.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use memfold_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::support;

/// Prefix of the directory of the self-test's temporary files.
const PREFIX: &str = "memfold-report.";

fn self_test(place: &TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_memfold"));
    command.args(["self-test", "--report"]);
    command.arg(place.path().join("report.json"));
    // QEMUs run as users of their own, and open their overlays there.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o711);
    fs::set_permissions(place.path(), mode).unwrap();
    command.args(arguments).env("TMPDIR", place.path());
    command
}

/// Returns the processes in whose command lines the path stands.
fn processes_of(path: &Path) -> Vec<String> {
    let path = path.to_string_lossy();
    let all = fs::read_dir("/proc").unwrap().flatten();
    let lines = all.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines
        .filter(|line| line.contains(&*path) && line.contains(PREFIX))
        .collect()
}

/// Returns the directories of self-tests at this place.
fn directories(place: &TempDir) -> Vec<String> {
    let names = fs::read_dir(place.path()).unwrap().flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(PREFIX)).collect()
}

fn ksm_settings() -> Vec<(String, String)> {
    let names = [
        "run",
        "pages_to_scan",
        "sleep_millisecs",
        "merge_across_nodes",
    ];
    let read = |name: &str| fs::read_to_string(format!("/sys/kernel/mm/ksm/{name}"));
    let all = names
        .iter()
        .filter_map(|name| Some(((*name).into(), read(name).ok()?)));
    all.collect()
}

/// Fails if the report contains something by which its host or a user could be recognized.
fn check_private(text: &str) {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    for word in ["/tmp", "/var", "/root", "/home", "/usr", "/dev"] {
        assert!(!text.contains(word), "the report contains '{word}'");
    }
    let of_word = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == ':';
    for word in text.split(|c| !of_word(c)) {
        assert_ne!(word, host.trim(), "the host's name");
        assert!(word.parse::<Ipv4Addr>().is_err(), "an address: {word}");
        let bytes: Vec<&str> = word.split(':').collect();
        let is_mac = bytes.len() == 6 && bytes.iter().all(|byte| byte.len() == 2);
        assert!(!is_mac, "a MAC address: {word}");
        let digits = word.chars().filter(char::is_ascii_hexdigit).count();
        assert!(digits < 32, "an identifier: {word}");
    }
}

#[test]
fn the_self_test_measures_every_part_and_its_report_names_neither_host_nor_user() {
    let Some(_turn) = support::turn() else {
        return;
    };
    let place = tempfile::tempdir().unwrap();
    let ksm = ksm_settings();
    let output = self_test(&place, &["--limit", "90"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{said}");
    let log = String::from_utf8_lossy(&output.stderr);
    let text = fs::read_to_string(place.path().join("report.json")).unwrap();
    assert!(output.status.success(), "{log}");
    check_private(&text);
    check_private(&said);

    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["schema"], "memfold-self-test-report");
    let is_emulated = report["accelerator"] == "tcg";
    let note = report["note"].as_str().unwrap_or_default();
    assert_eq!(is_emulated, note.contains("not a KVM host's"), "{note}");
    assert_eq!(is_emulated, said.contains("not a KVM host's"));
    let list = |key: &str| report[key].as_array().unwrap().clone();
    for part in list("parts") {
        assert_eq!(part["end"], "done", "{part}");
    }
    let claims = list("claims");
    assert!(
        claims.len() >= 8 && claims.iter().all(|of| of["holds"] == true),
        "{claims:?}"
    );
    let not_measured: Vec<Value> = list("figures")
        .into_iter()
        .filter(|figure| figure["values"].is_null())
        .collect();
    println!("not measured: {not_measured:?}");
    // A host may lack KSM or huge pages, and on a busy one few pages may be folded in time.
    assert!(not_measured.iter().all(|figure| figure["why"].is_string()));
    assert!(not_measured.len() <= 6, "{not_measured:?}");
    assert_eq!(ksm_settings(), ksm);
    assert_eq!(directories(&place), Vec::<String>::new());
    assert_eq!(processes_of(place.path()), Vec::<String>::new());

    let file = place.path().join("report.json");
    let compared = Command::new(env!("CARGO_BIN_EXE_memfold"))
        .args(["self-test", "--compare"])
        .args([&file, &file])
        .output()
        .unwrap();
    let table = String::from_utf8_lossy(&compared.stdout).into_owned();
    assert!(
        compared.status.success() && table.contains("| 1.00 |"),
        "{table}"
    );
}

#[test]
fn an_interrupted_self_test_ends_its_vms_and_removes_its_files() {
    let Some(_turn) = support::turn() else {
        return;
    };
    let place = tempfile::tempdir().unwrap();
    let mut command = self_test(&place, &["--part", "guests"]);
    let mut child: Child = command
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let is_running = || {
        let lines = processes_of(place.path());
        lines.iter().any(|line| line.contains("qemu-system"))
    };
    wait_until(
        "a VM of the self-test runs",
        Duration::from_secs(120),
        is_running,
    );
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
    wait_until("no process is left", Duration::from_secs(10), || {
        processes_of(place.path()).is_empty()
    });
    assert_eq!(directories(&place), Vec::<String>::new());
}
