//! Tests of the Debian packages in clean installations of Debian 12 and 13, and of the unit under a
//! systemd. They run `scripts/test-deb` and `scripts/test-unit`, which print what they check.

use std::path::Path;
use std::process::Command;

const PROGRAM: &str = env!("CARGO_BIN_EXE_memfold");

fn script(name: &str) -> Command {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts");
    Command::new(directory.join(name))
}

/// Returns the output of a script that succeeded; `None` if this host lacks something that the
/// script needs.
fn said(command: &mut Command, may_be_left_out: bool) -> Option<String> {
    let output = command.output().unwrap();
    let wrong = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(3) && may_be_left_out {
        return memfold_testkit::reports_skip(&wrong);
    }
    let done = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{done}{wrong}");
    Some(done.into_owned())
}

#[test]
fn packages_are_installed_upgraded_and_purged_in_clean_root_directories() {
    // The oldest supported suite; `make soak` tests both.
    let suites = std::env::var("MEMFOLD_SUITES").unwrap_or_else(|_| "bookworm".into());
    let suites: Vec<&str> = suites.split(',').collect();
    let mut test = script("test-deb");
    test.args(&suites)
        .env("MEMFOLD_BUILT", Path::new(PROGRAM).parent().unwrap());
    let Some(done) = said(&mut test, std::env::var_os("MEMFOLD_REAL").is_none()) else {
        return;
    };
    for suite in suites {
        let words = format!("packages on {suite}: installed, upgraded, purged");
        assert!(done.contains(&words), "{done}");
    }
}

#[test]
fn vms_keep_running_when_the_hardened_daemon_is_restarted_or_killed_under_systemd() {
    let library = Path::new(PROGRAM).with_file_name("libmemfold_qemu.so");
    // This host may be a container in which no other container can run.
    let Some(done) = said(script("test-unit").arg(PROGRAM).arg(library), true) else {
        return;
    };
    assert!(done.contains("its VMs went on"), "{done}");
}
