//! `memfold bench`: the program that it becomes, and what it says where there is none.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::support::{code, out, program, refused};

/// The program in a directory where nothing else is.
fn alone() -> TempDir {
    let own = program().get_program().to_owned();
    let own = Path::new(&own);
    // A hard link, which lies where it is called.
    let directory = tempfile::tempdir_in(own.parent().unwrap()).unwrap();
    std::fs::hard_link(own, directory.path().join("memfold")).unwrap();
    directory
}

/// A `memfold-bench` that prints a name and its words, and ends with code 7.
fn put_bench(directory: &Path, name: &str) {
    let file = directory.join("memfold-bench");
    let script = format!("#!/bin/sh\necho {name} \"$@\"\nexit 7\n");
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
fn memfold_bench_beside_the_program_comes_first_and_gets_the_same_words() {
    let (directory, path) = (alone(), tempfile::tempdir().unwrap());
    put_bench(path.path(), "in-path");
    let run = |arguments: &[&str]| run_in(directory.path(), path.path(), arguments);
    let found = run(&["bench", "fold", "--quick", "--json", "f.json"]);
    assert_eq!(out(&found), "in-path fold --quick --json f.json\n");
    assert_eq!(code(&found), 7);
    put_bench(directory.path(), "beside");
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
fn without_memfold_bench_the_error_says_how_to_get_it() {
    let (directory, empty) = (alone(), tempfile::tempdir().unwrap());
    for arguments in [&["bench", "fold"][..], &["bench", "--help"]] {
        refused(
            &run_in(directory.path(), empty.path(), arguments),
            1,
            &["memfold-bench", "package", "cargo build", "beside"],
        );
    }
}
