//! Tests of the daemon as a service: configuration file, notifications to systemd, log, unit file
//! and manual pages.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use memfold_testkit::patience;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::commands::COMMANDS;
use super::support::{Daemon, code, err, out, program, refused, run, wait};

fn unit(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../deploy/systemd")
        .join(name)
}

fn write(directory: &Path, text: &str) -> String {
    let file = directory.join("memfold.toml");
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn config_check_names_each_invalid_field_and_its_line() {
    let directory = tempfile::tempdir().unwrap();
    let file = write(
        directory.path(),
        "cpu = 500\nstore_cap = \"8G\"\ncolour = \"red\"\n",
    );
    let output = run(&["config", "check", &file]);
    assert_eq!(code(&output), 1);
    let lines: Vec<String> = out(&output).lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].starts_with(&format!("{file}:1: cpu: invalid value '500'")));
    assert!(lines[1].starts_with(&format!("{file}:3: colour: no such field")));
    let output = run(&["config", "check", &file, "--json"]);
    let checked: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(checked["problems"][1]["line"], 3);
    assert_eq!(checked["problems"][1]["field"], "colour");

    let file = write(directory.path(), "cpu = 7\n");
    let output = run(&["config", "check", &file]);
    assert_eq!(code(&output), 0, "{}", err(&output));
    assert_eq!(out(&output), format!("{file}: right\n"));
    refused(
        &run(&["config", "check", "/nowhere"]),
        1,
        &["cannot read /nowhere"],
    );
}

#[test]
fn config_check_reports_configured_files_groups_and_addresses_that_cannot_be_used() {
    let directory = tempfile::tempdir().unwrap();
    let checked = |text: &str| {
        let output = run(&["config", "check", &write(directory.path(), text), "--json"]);
        let checked: Value = serde_json::from_slice(&output.stdout).unwrap();
        let problems = checked["problems"].as_array().unwrap().clone();
        assert_eq!(code(&output), i32::from(!problems.is_empty()), "{checked}");
        let texts = problems.iter().map(|problem| {
            let text = |key: &str| problem[key].as_str().unwrap();
            format!("{} {}: {}", problem["line"], text("field"), text("what"))
        });
        texts.collect::<Vec<String>>()
    };
    let one = |text: &str, begins: &str| {
        let problems = checked(text);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].starts_with(begins), "{problems:?}");
    };
    one(
        "\nlisten = \"0.0.0.0:7070\"\n",
        "2 listen: 0.0.0.0:7070 can be reached from other hosts",
    );
    let files =
        "listen = \"127.0.0.1:7070\"\ntls_cert = \"/nowhere\"\ntls_key = \"/nowhere.key\"\n";
    one(files, "2 tls_cert: cannot use /nowhere for TLS");
    one(
        "read_group = \"nobodys-group\"\n",
        "1 read_group: no group 'nobodys-group'",
    );
    one(
        "registry = \"https://a:1\"\n",
        "1 registry: a registry at https://a:1 needs --registry-token",
    );
    let token = directory.path().join("token");
    std::fs::write(&token, "abc\n").unwrap();
    std::fs::set_permissions(&token, Permissions::from_mode(0o600)).unwrap();
    let files = format!(
        "registry_ca = \"/nowhere.pem\"\nregistry = \"https://a:1\"\nregistry_token = \"{}\"\n",
        token.display()
    );
    one(&files, "1 registry_ca: cannot use /nowhere.pem");
    let files = "registry = \"https://a:1\"\nregistry_ca = \"/nowhere.pem\"\n\nregistry_token = \"/nowhere\"\n";
    one(files, "4 registry_token: cannot use /nowhere");
    let files = "registry = \"/run/s\"\nregistry_token = \"/nowhere\"\n";
    one(
        files,
        "2 registry_token: --registry-token does not apply to the registry at /run/s",
    );
    one(
        "lend = \"1G\"\nlend_transport = \"iscsi\"\nlend_listen = \"10.0.0.1\"\n",
        "1 lend: iSCSI encrypts nothing",
    );
    one("host = \"a b\"\n", "1 host: invalid value 'a b'");
    // All problems are named, in the order of their lines.
    let both = checked("operate_group = \"nobodys-group\"\ncpu = 7\nlisten = \"0.0.0.0:7070\"\n");
    let begins: Vec<&str> = both.iter().filter_map(|p| p.split(':').next()).collect();
    assert_eq!(begins, ["1 operate_group", "3 listen"], "{both:?}");
    assert_eq!(checked("listen = \"127.0.0.1:7070\"\n"), [""; 0]);
}

#[test]
fn the_daemon_reads_its_options_from_the_file_and_the_command_line_overrides_them() {
    let directory = tempfile::tempdir().unwrap();
    let file = write(
        directory.path(),
        "cpu = 7\npaused = true\npages_per_second = 1000\n",
    );
    let daemon = Daemon::start_with(&["--config", &file, "--pages-per-second", "2000"]);
    let status = daemon.json(&["fold", "status"]);
    assert_eq!(status["cpu_share"], 0.07);
    assert_eq!(status["paused"], true);
    assert_eq!(status["pages_per_second"], 2000);

    let file = write(directory.path(), "cpu = 7\n\nsettle = \"soon\"\n");
    let state = directory.path().join("state");
    let socket = directory.path().join("s");
    let serve = |file: &str| {
        let mut command = program();
        command.arg("--socket").arg(&socket);
        command.args(["serve", "--config", file, "--state"]);
        command.arg(&state).output().unwrap()
    };
    refused(&serve(&file), 1, &["3: settle: invalid value 'soon'"]);
    refused(&serve("/nowhere"), 1, &["cannot read /nowhere"]);
    assert!(!state.exists(), "nothing was begun");
}

/// Receiver of a daemon's notifications to its service manager. Like systemd, it always reads its
/// socket: if the socket's queue were full, the daemon would wait.
struct Manager {
    messages: Receiver<String>,
    heard: Vec<String>,
}

impl Manager {
    fn new(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).unwrap();
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            let mut message = [0; 4096];
            while let Ok(length) = socket.recv(&mut message) {
                let text = String::from_utf8_lossy(&message[..length]).into_owned();
                if sender.send(text).is_err() {
                    return;
                }
            }
        });
        Self {
            messages,
            heard: Vec::new(),
        }
    }

    /// Waits until the notification `word` comes.
    fn hear(&mut self, word: &str) {
        let end = Instant::now() + patience(Duration::from_secs(60));
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let text = self.messages.recv_timeout(left);
            let text = text.unwrap_or_else(|e| panic!("no {word} after {:?}: {e}", self.heard));
            self.heard.extend(text.lines().map(str::to_owned));
            if text.lines().any(|line| line == word) {
                return;
            }
        }
    }

    /// Returns how often the notification `word` has come so far.
    fn times(&mut self, word: &str) -> usize {
        for text in self.messages.try_iter() {
            self.heard.extend(text.lines().map(str::to_owned));
        }
        self.heard.iter().filter(|heard| *heard == word).count()
    }
}

/// A daemon as systemd starts it, with a watchdog of 300 ms. It is ended when this is dropped.
struct Served(Child);

impl Drop for Served {
    fn drop(&mut self) {
        // The daemon may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Served {
    fn start(directory: &Path, manager: &Path) -> Self {
        let mut command = Command::new("sh");
        command
            // The watchdog applies to the process that systemd starts.
            .args(["-c", "WATCHDOG_PID=$$ exec \"$@\"", "sh"])
            .arg(program().get_program())
            .arg("--socket")
            .arg(directory.join("s"))
            .args(["serve", "--config", "/dev/null", "--state"])
            .arg(directory.join("state"))
            .env("NOTIFY_SOCKET", manager)
            .env("WATCHDOG_USEC", "300000")
            .env_remove("MEMFOLD_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit());
        Self(command.spawn().unwrap())
    }

    fn terminate(&mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
    }
}

#[test]
fn the_daemon_notifies_systemd_when_it_is_ready_alive_or_stopping_and_a_restart_keeps_vms() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let notify = directory.path().join("notify");
    let mut manager = Manager::new(&notify);
    let mut first = Served::start(directory.path(), &notify);
    manager.hear("READY=1");
    // The daemon answers from then on.
    std::os::unix::net::UnixStream::connect(&socket).unwrap();
    for _ in 0..3 {
        manager.hear("WATCHDOG=1");
    }

    let mut command = program();
    command.arg("--socket").arg(&socket);
    command.args(["vm", "run", "--name", "a", "--memory", "64M", "--json"]);
    let vm = command.args(["--", "-S"]).output().unwrap();
    assert_eq!(code(&vm), 0, "{}", err(&vm));
    let vm: Value = serde_json::from_slice(&vm.stdout).unwrap();
    let pid = Pid::from_raw(i32::try_from(vm["pid"].as_i64().unwrap()).unwrap()).unwrap();
    // Only the daemon may notify the service manager, not a VM.
    let environment = std::fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).unwrap();
    let environment = String::from_utf8_lossy(&environment);
    assert!(!environment.contains("NOTIFY_SOCKET") && !environment.contains("WATCHDOG"));

    assert_eq!(manager.times("STOPPING=1"), 0);
    first.terminate();
    manager.hear("STOPPING=1");
    assert_eq!(first.0.wait().unwrap().code(), Some(0));
    rustix::process::test_kill_process(pid).expect("the VM goes on");

    let _second = Served::start(directory.path(), &notify);
    manager.hear("READY=1");
    assert_eq!(manager.times("STATUS=serving; 1 VMs adopted"), 1);
    let list = program()
        .arg("--socket")
        .arg(&socket)
        .args(["vm", "list", "--json"])
        .output()
        .unwrap();
    let list: Value = serde_json::from_slice(&list.stdout).unwrap();
    assert_eq!(list[0]["pid"], vm["pid"]);
    kill_process(pid, Signal::KILL).unwrap();
    wait("the VM is forgotten", || {
        !directory.path().join("state/vms/a").exists()
    });
}

/// Part of the warning of a daemon whose shutdown takes too long, as may happen on a slow machine.
const LATE: &str = "shutdown timed out";

#[test]
fn the_daemon_answers_requests_while_systemd_reads_no_notifications() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let notify = directory.path().join("notify");
    let manager = UnixDatagram::bind(&notify).unwrap();
    let _served = Served::start(directory.path(), &notify);
    // No more messages fit into the socket's queue, so the daemon waits in the next one.
    let other = UnixDatagram::unbound().unwrap();
    other.set_nonblocking(true).unwrap();
    wait("the queue of notifications is full", || {
        let is_there = std::os::unix::net::UnixStream::connect(&socket).is_ok();
        is_there && other.send_to(b"FILLED=1", &notify).is_err()
    });
    std::thread::sleep(Duration::from_secs(1));
    let mut command = program();
    command.arg("--socket").arg(&socket).args(["vm", "list"]);
    let mut list = command.stdout(Stdio::null()).spawn().unwrap();
    let mut ended = None;
    wait("the daemon answers", || {
        ended = list.try_wait().unwrap();
        ended.is_some()
    });
    assert!(ended.unwrap().success());
    drop(manager);
}

/// Returns the log of a daemon that starts, fails to attach a VM, and ends.
fn logged(more: &[&str], journal: bool) -> String {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(directory.path().join("state")).unwrap();
    let log = directory.path().join("log");
    let file = std::fs::File::create(&log).unwrap();
    let attached = json!([{
        "request": {"name": "gone", "qmp": "/nowhere/qmp", "domain": null},
        "process": {"pid": 1, "start_ticks": 0},
    }]);
    std::fs::write(
        directory.path().join("state/attached.json"),
        attached.to_string(),
    )
    .unwrap();
    let mut command = program();
    if journal {
        let it = file.metadata().unwrap();
        command.env("JOURNAL_STREAM", format!("{}:{}", it.dev(), it.ino()));
    }
    let mut child = command
        .arg("--socket")
        .arg(directory.path().join("s"))
        .args(["serve", "--state"])
        .arg(directory.path().join("state"))
        .args(more)
        .stderr(file)
        .spawn()
        .unwrap();
    // The line about the VM is one of level info.
    let logs_info = !more.contains(&"warn");
    wait("it has logged", || {
        let connected = std::os::unix::net::UnixStream::connect(directory.path().join("s"));
        // VMs are adopted by a thread of their own.
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        connected.is_ok() && (!logs_info || text.contains("gone"))
    });
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    child.wait().unwrap();
    let mut text = String::new();
    std::fs::File::open(&log)
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    text
}

#[test]
fn with_log_format_json_the_log_has_json_lines_with_the_causes_of_errors() {
    let text = logged(&["--log-format", "json"], false);
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect();
    for line in &lines {
        assert!(line["time"].as_str().unwrap().ends_with('Z'), "{line}");
        assert!(line["level"].is_string() && line["message"].is_string());
    }
    let gone = lines.iter().find(|line| line["vm"] == "gone").unwrap();
    assert_eq!(gone["level"], "info");
    let error = gone["error"].as_str().unwrap();
    assert!(error.contains("No such file or directory"), "{error}");
}

#[test]
fn log_lines_for_the_systemd_journal_have_a_level_prefix_and_no_timestamp() {
    let text = logged(&[], true);
    assert!(text.lines().count() >= 3, "{text}");
    for line in text.lines().filter(|line| !line.contains(LATE)) {
        // A timestamp would begin with the year.
        let said = line.strip_prefix("<6>").unwrap_or_else(|| panic!("{line}"));
        assert!(
            said.starts_with(|c: char| c.is_ascii_alphabetic()),
            "{line}"
        );
        assert!(!line.contains('\u{1b}'), "{line}");
    }
    assert!(logged(&[], false).starts_with("20"), "elsewhere with time");
    let warnings = logged(&["--log", "warn"], true);
    assert!(
        warnings.lines().all(|line| line.contains(LATE)),
        "{warnings}"
    );
}

#[test]
fn a_manual_page_for_each_command_and_shell_completions_are_generated() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let output = run(&[
        "generate",
        "--man",
        &at("man"),
        "--completions",
        &at("completions"),
    ]);
    assert_eq!(code(&output), 0, "{}", err(&output));
    let pages = std::fs::read_dir(at("man")).unwrap();
    let pages: BTreeSet<String> = pages
        .map(|page| page.unwrap().file_name().into_string().unwrap())
        .collect();
    // Every command (the list of commands is tested elsewhere), and every group of commands, has a
    // page.
    let mut wanted = BTreeSet::from(["memfold.1".to_owned()]);
    for (command, words, _) in COMMANDS {
        // The page of `memfold-bench` is in the package of that program.
        if command == ["bench"] {
            continue;
        }
        for depth in 1..=command.len() {
            wanted.insert(format!("memfold-{}.1", command[..depth].join("-")));
        }
        let name = format!("memfold-{}.1", command.join("-"));
        let page = std::fs::read_to_string(directory.path().join("man").join(name)).unwrap();
        assert!(page.contains(".SH NAME") && page.contains(".SH SYNOPSIS"));
        // In manual pages, apostrophes are \*(Aq, and hyphens \-.
        let page = page.replace("\\*(Aq", "'").replace('\\', "");
        for word in words {
            assert!(
                page.contains(word),
                "no '{word}' in the page of {command:?}"
            );
        }
    }
    assert_eq!(pages, wanted);
    for (file, word) in [
        ("memfold", "complete -F _memfold"),
        ("_memfold", "#compdef memfold"),
        ("memfold.fish", "complete -c memfold"),
    ] {
        let text = std::fs::read_to_string(directory.path().join("completions").join(file));
        assert!(text.unwrap().contains(word), "{file}");
    }
    let bash = directory.path().join("completions/memfold");
    let parsed = Command::new("bash").arg("-n").arg(bash).status().unwrap();
    assert!(parsed.success());
}

#[test]
fn the_systemd_unit_is_valid_and_has_the_documented_settings() {
    let text = std::fs::read_to_string(unit("memfold.service")).unwrap();
    // VMs outlive a restart of the daemon, and the next daemon finds them.
    for setting in [
        "Type=notify",
        "KillMode=process",
        "OOMPolicy=continue",
        "RuntimeDirectoryPreserve=yes",
        // VMs with autostart find the host's bridges.
        "Wants=network-online.target",
    ] {
        assert!(text.lines().any(|line| line == setting), "{setting}");
    }
    // The daemon gives up the other capabilities by itself, too.
    let kept: BTreeSet<String> = memfold_host::privileges::kept()
        .iter_names()
        .map(|(name, _)| format!("CAP_{name}"))
        .collect();
    let bounding = text
        .lines()
        .find_map(|line| line.strip_prefix("CapabilityBoundingSet="))
        .unwrap();
    let bounding: BTreeSet<String> = bounding.split(' ').map(str::to_owned).collect();
    assert_eq!(bounding, kept);
    for setting in ["PrivateTmp=", "MemoryMax="] {
        assert!(
            !text.lines().any(|line| line.starts_with(setting)),
            "{setting}"
        );
    }
    let Ok(version) = Command::new("systemd-analyze").arg("--version").output() else {
        assert!(
            std::env::var_os("MEMFOLD_REAL").is_none(),
            "no systemd-analyze to rate the unit's exposure; install package systemd (scripts/setup tests)"
        );
        memfold_testkit::skip!("no systemd-analyze");
    };
    assert!(version.status.success());
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("memfold.service");
    let here = text
        .replace("/usr/bin/memfold", env!("CARGO_BIN_EXE_memfold"))
        .lines()
        .filter(|line| !line.starts_with("Documentation="))
        .collect::<Vec<_>>()
        .join("\n");
    std::fs::write(&copy, here).unwrap();
    let verify = Command::new("systemd-analyze")
        .arg("verify")
        .arg(&copy)
        .output()
        .unwrap();
    // The output also mentions other units of this host.
    let said = err(&verify);
    assert!(!said.contains("memfold.service"), "{said}");
    // systemd rates exposure in tenths, at most 100. docs/operating/hardening.md names the reasons
    // for what remains.
    let security = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--threshold=54"])
        .arg(&copy)
        .output()
        .unwrap();
    assert!(security.status.success(), "{}", out(&security));
}
