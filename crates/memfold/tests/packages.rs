//! Tests of the Debian packages, of a release's other files, and of the systemd unit, in clean
//! installations of Debian 12 and 13. They run `scripts/test-deb`, `scripts/test-release`,
//! `scripts/test-unit` and `scripts/test-ansible`, which print what they check.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

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
fn the_bill_of_materials_lists_every_crate_that_a_program_is_linked_with() {
    let output = script("sbom").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let bom: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&bom["bomFormat"], &bom["specVersion"]),
        (&"CycloneDX".into(), &"1.5".into())
    );
    let components = bom["components"].as_array().unwrap();
    let find = |name: &str| components.iter().find(|c| c["name"] == name).unwrap();
    // Linked, only compiled with, and of the dashboard.
    for (name, scope) in [
        ("rustix", "required"),
        ("cc", "excluded"),
        ("preact", "required"),
    ] {
        assert_eq!(find(name)["scope"], scope, "{name}");
    }
    assert!(
        components.iter().all(|c| c["name"] != "proptest"),
        "tests are not shipped"
    );
    for component in components {
        let purl = component["purl"].as_str().unwrap_or_default();
        if purl.starts_with("pkg:cargo/") {
            let digest = component["hashes"][0]["content"].as_str().unwrap();
            assert_eq!(digest.len(), 64, "{component}");
            assert!(
                component["licenses"][0]["expression"].is_string(),
                "{component}"
            );
        }
    }
    let known: Vec<&Value> = components.iter().map(|c| &c["bom-ref"]).collect();
    for entry in bom["dependencies"].as_array().unwrap() {
        for needed in entry["dependsOn"].as_array().unwrap() {
            assert!(known.contains(&needed), "{needed} is no component");
        }
    }
}

#[test]
fn if_systemd_restarts_or_kills_the_hardened_daemon_vms_keep_running() {
    let library = Path::new(PROGRAM).with_file_name("libmemfold_qemu.so");
    // This host may be a container in which no other container can run.
    let Some(done) = said(script("test-unit").arg(PROGRAM).arg(library), true) else {
        return;
    };
    assert!(done.contains("its VMs went on"), "{done}");
}

/// The second ring.
mod soak {
    use super::*;

    #[test]
    fn the_ansible_roles_install_configure_and_remove_memfold_and_repeated_change_nothing() {
        let Some(done) = said(&mut script("test-ansible"), true) else {
            return;
        };
        assert!(done.contains("repeated without a change"), "{done}");
    }

    #[test]
    fn the_five_commands_of_the_readme_fold_vms_on_a_clean_debian_13() {
        let mut test = script("test-release");
        test.arg("trixie")
            .env("MEMFOLD_BUILT", Path::new(PROGRAM).parent().unwrap());
        let Some(done) = said(&mut test, false) else {
            return;
        };
        assert!(
            done.contains("five commands on trixie: VMs were folded"),
            "{done}"
        );
    }
}
