//! Tests that secrets (tokens of hosts, keys of leases, credentials of object stores) are found
//! nowhere but in files and memory of their owner.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use memfold_testkit::wait_until;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

use crate::cluster::Authority;
use crate::lending::{Swapping, export};
use crate::support::{Daemon, code, err};

const CREDENTIAL: &str = "object-store-credential-5f0c2a";

fn read(path: impl AsRef<Path>) -> Vec<u8> {
    fs::read(path).unwrap_or_default()
}

fn contains(bytes: &[u8], secret: &str) -> bool {
    let secret = secret.as_bytes();
    bytes.windows(secret.len()).any(|part| part == secret)
}

/// Returns the daemons' processes: themselves, their children, and those that outlive them.
fn processes(daemons: &[&Daemon]) -> BTreeSet<u32> {
    let mut found: BTreeSet<u32> = daemons.iter().map(|daemon| daemon.child.id()).collect();
    let places: Vec<PathBuf> = daemons.iter().map(|daemon| daemon.state()).collect();
    let is_of_daemon = |line: &[u8]| {
        places
            .iter()
            .any(|place| contains(line, place.to_str().unwrap()))
    };
    let parent = |pid: u32| -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let after = stat.rsplit_once(')')?.1;
        after.split_whitespace().nth(1)?.parse().ok()
    };
    let all = || {
        let entries = fs::read_dir("/proc").unwrap().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
    };
    loop {
        let more: Vec<u32> = all()
            .filter(|pid| !found.contains(pid))
            .filter(|pid| {
                let is_child = parent(*pid).is_some_and(|parent| found.contains(&parent));
                let log = fs::read_link(format!("/proc/{pid}/fd/2")).unwrap_or_default();
                let is_relay = places.iter().any(|place| log.starts_with(place));
                is_child || is_relay || is_of_daemon(&read(format!("/proc/{pid}/cmdline")))
            })
            .collect();
        if more.is_empty() {
            return found;
        }
        found.extend(more);
    }
}

/// Returns all files below `directory`.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(files(&path)),
            Ok(kind) if kind.is_file() => found.push(path),
            _ => {}
        }
    }
    found
}

/// Returns whether others than the owner may do anything with a file.
fn is_open_to_others(file: &Path) -> bool {
    fs::metadata(file).unwrap().permissions().mode() & 0o077 != 0
}

/// Returns the key of the lease that the exporting process serves: the file that is its argument.
fn lease_key(lender: &Daemon) -> String {
    let line = read(format!("/proc/{}/cmdline", export(lender).as_raw_nonzero()));
    let line = String::from_utf8(line).unwrap();
    let file = line
        .split('\0')
        .find_map(|word| word.strip_prefix("--tls-psk="));
    let text = fs::read_to_string(file.unwrap()).unwrap();
    let key = text.trim().rsplit(':').next().unwrap().to_owned();
    assert_eq!(key.len(), 64);
    key
}

/// Ends a process by a signal that dumps core, without a limit of cores. Returns whether the kernel
/// has dumped one.
fn dumps_core(child: &mut Child) -> bool {
    let pid = Pid::from_child(child);
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    prlimit(Some(pid), Resource::Core, unlimited).unwrap();
    kill_process(pid, Signal::ABORT).unwrap();
    child.wait().unwrap().core_dumped()
}

#[test]
fn no_secret_is_in_a_command_line_an_environment_a_log_or_a_file_that_others_can_read() {
    let Some(authority) = Authority::new() else {
        return;
    };
    authority.issue("server", 2);
    let logs = tempfile::tempdir().unwrap();
    let log = |name: &str| -> Stdio {
        let file = File::create(logs.path().join(name)).unwrap();
        file.into()
    };
    let start = |name: &str, more: &[String]| {
        let mut words = vec!["--host", name, "--log", "trace"];
        words.extend(more.iter().map(String::as_str));
        let environment = [("AWS_SECRET_ACCESS_KEY", CREDENTIAL), ("AWS_REGION", "x")];
        Daemon::start_in(&environment, log(name), &words)
    };
    // The key of encrypted snapshots is in a private file elsewhere.
    let key_of_snapshots = authority.token("snapshots.key", &"7a5e0c1d".repeat(8));
    let mut serving = authority.serving("server");
    serving.push(format!("--snapshot-key=k=file:{key_of_snapshots}"));
    let registry = start("a", &serving);
    crate::forks::run(&registry, "saved", &[]);
    registry.json(&["snapshot", "save", "saved", "s", "--encrypt"]);
    let key_of_snapshots = fs::read_to_string(key_of_snapshots).unwrap();
    let lend = registry.run(&["lend", "--max", "256M", "--listen", "127.0.0.1"]);
    if code(&lend) == 3 {
        memfold_testkit::skip!("{}", err(&lend));
    }
    assert_eq!(code(&lend), 0, "{}", err(&lend));
    let made = registry.json(&["host", "add", "b"]);
    let token = made["token"].as_str().unwrap().to_owned();
    let file = authority.token("b.token", &token);
    let borrower = start(
        "b",
        &authority.asking(made["urls"][0].as_str().unwrap(), &file),
    );
    let vm = Swapping::start(&borrower, "v");
    wait_until("the lender lends", Duration::from_secs(120), || {
        code(&borrower.run(&["borrow", "v"])) == 0
    });
    vm.write(1, 0);
    let key = lease_key(&registry);
    let credential = CREDENTIAL.to_owned();
    let secrets = [&token, &key, &credential, &key_of_snapshots];
    let daemons = [&registry, &borrower];

    let pids = processes(&daemons);
    assert!(
        pids.len() >= 6,
        "two daemons, an export, a relay, two QEMUs: {pids:?}"
    );
    let mut lines = 0;
    for pid in &pids {
        for name in ["cmdline", "environ"] {
            let bytes = read(format!("/proc/{pid}/{name}"));
            // A helper of a daemon may have ended.
            lines += usize::from(name == "cmdline" && !bytes.is_empty());
            for secret in secrets {
                assert!(
                    !contains(&bytes, secret),
                    "{name} of {pid} contains {secret}"
                );
            }
        }
    }
    assert!(lines >= 6, "{lines} of {pids:?}");
    let mut seen = 0;
    let roots = daemons.map(|daemon| daemon.state().parent().unwrap().to_owned());
    for root in &roots {
        for file in files(root) {
            let bytes = read(&file);
            for secret in secrets {
                let is_kept = contains(&bytes, secret);
                seen += usize::from(is_kept);
                let is_open = is_kept && is_open_to_others(&file);
                assert!(!is_open, "others can read {secret} in {}", file.display());
            }
            assert!(!contains(&bytes, CREDENTIAL), "{}", file.display());
        }
    }
    assert!(seen > 0, "the lease's key is in a private file");
    for file in files(logs.path()) {
        let bytes = read(&file);
        assert!(contains(&bytes, "serving"), "{} is a log", file.display());
        for secret in secrets {
            assert!(
                !contains(&bytes, secret),
                "{} contains {secret}",
                file.display()
            );
        }
    }
}

#[test]
fn the_kernel_dumps_no_core_of_an_aborted_daemon() {
    let place = tempfile::tempdir().unwrap();
    let mut sleep = Command::new("sleep")
        .arg("60")
        .current_dir(place.path())
        .spawn()
        .unwrap();
    if !dumps_core(&mut sleep) {
        memfold_testkit::skip!("this kernel dumps no core of any program (core_pattern)");
    }
    let mut daemon = Daemon::start();
    assert!(!dumps_core(&mut daemon.child));
}
