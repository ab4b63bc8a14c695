//! Tests of `memfold bench`: it starts the program `memfold-bench`, and reports a missing one.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{code, out, program, refused};

/// Copies the program to a directory where no other program is.
fn alone() -> TempDir {
    let own = program().get_program().to_owned();
    let own = Path::new(&own);
    // A hard link makes the program believe that it is in the new directory.
    let directory = tempfile::tempdir_in(own.parent().unwrap()).unwrap();
    std::fs::hard_link(own, directory.path().join("memfold")).unwrap();
    directory
}

/// Makes a `memfold-bench` that runs a line of shell, and exits with code 7.
fn put_bench(directory: &Path, line: &str) {
    let file = directory.join("memfold-bench");
    let script = format!("#!/bin/sh\n{line}\nexit 7\n");
    std::fs::write(&file, script).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
}

fn run_in(directory: &Path, path: &Path, arguments: &[&str]) -> Output {
    Command::new(directory.join("memfold"))
        .args(arguments)
        .env("PATH", path)
        .output()
        .unwrap()
}

#[test]
fn memfold_runs_memfold_bench_from_its_own_directory_first_and_passes_all_arguments() {
    let (directory, path) = (alone(), tempfile::tempdir().unwrap());
    put_bench(path.path(), "echo in-path \"$@\"");
    let run = |arguments: &[&str]| run_in(directory.path(), path.path(), arguments);
    let found = run(&["bench", "fold", "--quick", "--json", "f.json"]);
    assert_eq!(out(&found), "in-path fold --quick --json f.json\n");
    assert_eq!(code(&found), 7);
    put_bench(directory.path(), "echo beside \"$@\"");
    for (arguments, words) in [
        (&["bench", "--help"][..], "--help"),
        (&["bench"], ""),
        (&["--json", "bench", "fold"], "--json=- fold"),
        (
            &["--json=f", "--socket", "s", "bench", "fold"],
            "--json=f fold",
        ),
    ] {
        let found = run(arguments);
        assert_eq!(out(&found).trim_end(), format!("beside {words}").trim_end());
        assert_eq!(code(&found), 7, "{arguments:?}");
    }
}

#[test]
fn if_memfold_bench_is_not_installed_the_error_names_the_package_and_the_build_command() {
    let (directory, empty) = (alone(), tempfile::tempdir().unwrap());
    for arguments in [&["bench", "fold"][..], &["bench", "--help"]] {
        refused(
            &run_in(directory.path(), empty.path(), arguments),
            1,
            &["memfold-bench", "package", "cargo build", "beside"],
        );
    }
}

#[test]
fn memfold_doctor_passes_its_report_on_the_host_to_the_self_test() {
    let (directory, state) = (alone(), tempfile::tempdir().unwrap());
    put_bench(directory.path(), "echo \"$@\"; /bin/cat");
    let run = |arguments: &[&str]| {
        let mut memfold = Command::new(directory.path().join("memfold"));
        memfold.args(arguments).env("MEMFOLD_STATE", state.path());
        memfold.output().unwrap()
    };
    let alone = run(&["doctor"]);
    if code(&alone) == 3 {
        memfold_testkit::skip!("no VM can run here");
    }
    let tested = run(&["doctor", "--self-test", "--json"]);
    let (words, report) = out(&tested).split_once('\n').map(own).unwrap();
    assert_eq!((code(&tested), words.as_str()), (7, "self-test --json=-"));
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["can_run"], true);
    let tested = run(&["doctor", "--self-test"]);
    let (text, rest) = out(&tested).split_once("\n\nself-test\n").map(own).unwrap();
    assert_eq!(code(&tested), 7);
    assert!(text.contains("The main job can run here"), "{text}");
    assert!(rest.starts_with('{'), "{rest}");
}

#[test]
fn memfold_self_test_passes_its_options_to_memfold_bench_and_refuses_options_without_a_report() {
    let (directory, state) = (alone(), tempfile::tempdir().unwrap());
    put_bench(directory.path(), "echo \"$@\"");
    let run = |arguments: &[&str]| {
        let mut memfold = Command::new(directory.path().join("memfold"));
        memfold.args(arguments).env("MEMFOLD_STATE", state.path());
        memfold.output().unwrap()
    };
    let compared = run(&["self-test", "--compare", "a.json", "b.json"]);
    assert_eq!(out(&compared), "self-test --compare a.json b.json\n");
    for wrong in [
        &["self-test", "--limit", "5"][..],
        &["self-test", "--report", "r", "--limit", "0"],
        &["self-test", "--compare", "a.json"],
        &["self-test", "--report", "r", "--compare", "a", "b"],
    ] {
        assert_eq!(code(&run(wrong)), 2, "{wrong:?}");
    }
    let options = ["--limit", "5", "--image", "i", "--part", "fold"];
    let reported = run(&[&["--json", "self-test", "--report", "r"], &options[..]].concat());
    if code(&reported) == 3 {
        memfold_testkit::skip!("no VM can run here");
    }
    let words = "self-test --report r --limit 5 --image i --part fold --json=-\n";
    assert_eq!((code(&reported), out(&reported).as_str()), (7, words));
}

fn own((a, b): (&str, &str)) -> (String, String) {
    (a.to_owned(), b.to_owned())
}
