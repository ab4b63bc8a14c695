//! Tests of VMs with a time to live: they are switched off unless somebody extends them.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use memfold_testkit::{dose, patience, wait_until};
use serde_json::{Value, json};

use super::support::{Daemon, refused, wait};

/// Returns the time to live in these tests, in seconds. It is longer than the start of three VMs.
fn ttl() -> u64 {
    patience(Duration::from_secs(6)).as_secs()
}

/// Time limit, on an idle machine, for the end of VMs whose time to live runs out.
const LIMIT: Duration = Duration::from_secs(120);

/// Program that holds a VM until it is killed, and extends it meanwhile.
const HOLDER: &str = "
import memfold, sys, time
with memfold.Client(sys.argv[1], ttl_s=int(sys.argv[3])).run({'name': sys.argv[2], 'memory': '64M', 'qemu_args': ['-S']}):
    print('started', flush=True)
    time.sleep(600)
";

fn listed(daemon: &Daemon) -> Vec<Value> {
    let vms = daemon.json(&["vm", "list"]);
    vms.as_array().unwrap().clone()
}

/// Returns the seconds that a VM has left.
fn left(daemon: &Daemon, vm: &str) -> Option<f64> {
    let vms = listed(daemon);
    let vm = vms.iter().find(|info| info["name"] == vm);
    vm.unwrap_or_else(|| panic!("no VM '{vm:?}'"))["ttl_left_s"].as_f64()
}

#[test]
fn a_vm_ends_when_its_time_to_live_has_run_out_and_an_extended_vm_runs_on() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let daemon = Daemon::start_logging(log.reopen().unwrap().into(), &[]);
    let seconds = ttl().to_string();
    daemon.paused_vm("forgotten", &["--ttl", &seconds]);
    daemon.paused_vm("wanted", &["--ttl", &seconds]);
    daemon.paused_vm("unlimited", &[]);
    assert!(left(&daemon, "forgotten").is_some_and(|left| left <= ttl() as f64));
    assert_eq!(left(&daemon, "unlimited"), None);
    let extend = || {
        let (status, answer) = daemon.http("POST", "/v1/vms/wanted/extend", b"");
        assert_eq!(status, 200, "{answer}");
    };
    wait_until("the forgotten VM has ended", LIMIT, || {
        extend();
        listed(&daemon).len() == 2
    });
    // Without these extensions, the wanted VM would end meanwhile.
    let (began, longer) = (Instant::now(), Duration::from_secs(ttl() + 2));
    while began.elapsed() < longer {
        extend();
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(left(&daemon, "wanted").is_some());
    let said = std::fs::read_to_string(log.path()).unwrap();
    let said = said
        .lines()
        .find(|line| line.contains("its time to live ran out"));
    assert!(
        said.is_some_and(|line| line.contains("forgotten")),
        "{said:?}"
    );

    // An operator may end the limit, and set a new one.
    daemon.json(&["vm", "set", "wanted", "ttl_s="]);
    assert_eq!(left(&daemon, "wanted"), None);
    let (status, answer) = daemon.http("POST", "/v1/vms/wanted/extend", b"");
    assert_eq!(status, 409, "{answer}");
    assert!(
        answer.contains("memfold vm set wanted ttl_s=SECONDS"),
        "{answer}"
    );
    refused(
        &daemon.run(&["vm", "set", "wanted", "ttl_s=0"]),
        1,
        &["ttl_s=0", "at least 1"],
    );
    daemon.json(&["vm", "set", "wanted", "ttl_s=1"]);
    wait("the VM ends", || listed(&daemon).len() == 1);
}

#[test]
fn extensions_are_not_in_the_audit_log_unless_they_are_refused() {
    let daemon = Daemon::start();
    daemon.paused_vm("held", &["--ttl", "100"]);
    daemon.paused_vm("other", &[]);
    for vm in ["held", "other", "held"] {
        daemon.http("POST", &format!("/v1/vms/{vm}/extend"), b"");
    }
    let log = std::fs::read_to_string(daemon.state().join("audit.jsonl")).unwrap();
    let extensions: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("/extend"))
        .collect();
    assert!(
        matches!(extensions[..], [line] if line.contains("/v1/vms/other/extend")),
        "{log}"
    );
}

#[test]
fn after_a_kill_of_the_daemon_the_next_daemon_begins_the_time_to_live_again() {
    let mut daemon = Daemon::start();
    daemon.paused_vm("held", &["--ttl", "600"]);
    let short = patience(Duration::from_secs(4)).as_secs();
    daemon.json(&["vm", "set", "held", &format!("ttl_s={short}")]);
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    // The time without a daemon does not count.
    std::thread::sleep(Duration::from_secs(short + 1));
    daemon.start_again();
    wait("the VM is adopted", || left(&daemon, "held").is_some());
    wait("the VM ends", || listed(&daemon).is_empty());
}

/// Starts a Python program that holds a VM.
fn holder(socket: &Path, vm: &str) -> std::process::Child {
    Command::new("/usr/bin/python3")
        .args(["-c", HOLDER])
        .arg(socket)
        .arg(vm)
        .arg(ttl().to_string())
        .env(
            "PYTHONPATH",
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients/python"),
        )
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn a_python_program_that_is_killed_at_any_moment_leaves_no_vm() {
    let daemon = Daemon::start();
    let kills = dose("MEMFOLD_PYTHON_KILLS", 6);
    let mut started = 0;
    for number in 0..kills {
        let mut program = holder(&daemon.socket(), &format!("held-{number}"));
        // From before the start until the block.
        std::thread::sleep(Duration::from_millis(1500 * number / kills));
        program.kill().unwrap();
        program.wait().unwrap();
        started += usize::from(!listed(&daemon).is_empty());
    }
    let mut program = holder(&daemon.socket(), "held");
    wait("a VM starts", || {
        listed(&daemon).iter().any(|vm| vm["name"] == "held")
    });
    // The program extends its VM, whose time to live has run out by then.
    std::thread::sleep(Duration::from_secs(ttl() + 2));
    wait_until("only the held VM is left", LIMIT, || {
        let vms = listed(&daemon);
        vms.len() == 1 && vms[0]["name"] == "held"
    });
    program.kill().unwrap();
    program.wait().unwrap();
    wait("no VM is left", || {
        daemon.json(&["vm", "list"]) == json!([])
    });
    println!("{started} of {kills} programs were killed with a VM");
}
