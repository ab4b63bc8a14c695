//! Tests of the Python client (`clients/python`) without guests: its types, its package (wheel),
//! and its own tests, in which a simulated daemon answers.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::support::{code, err, out, program};

/// Debian's Python, to which Debian's packages of Python modules belong.
const PYTHON: &str = "/usr/bin/python3";

fn client() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients/python")
}

/// Runs Python in the client's directory. Fails if Python does.
#[track_caller]
fn python(directory: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(PYTHON);
    command.args(arguments).current_dir(directory);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    let output = command.output().unwrap();
    assert_eq!(code(&output), 0, "{}{}", out(&output), err(&output));
    output
}

/// Returns whether Python has these modules; otherwise the skip is reported.
fn has(modules: &[&str]) -> bool {
    let import = format!("import {}", modules.join(", "));
    let found = Command::new(PYTHON).args(["-c", &import]).output();
    let is_there = found.is_ok_and(|output| output.status.success());
    assert!(
        is_there || std::env::var_os("MEMFOLD_REAL").is_none(),
        "{PYTHON} lacks one of {modules:?}: scripts/setup tests"
    );
    if !is_there {
        memfold_testkit::report_skip(&format!("{PYTHON} lacks one of {modules:?}"));
    }
    is_there
}

#[test]
fn the_types_of_the_python_client_equal_the_types_generated_from_the_http_api() {
    if !has(&["json"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let api = directory.path().join("api.json");
    let described = program()
        .args(["generate", "--openapi"])
        .arg(&api)
        .output()
        .unwrap();
    assert_eq!(code(&described), 0, "{}", err(&described));
    python(&client(), &["generate", "--check", api.to_str().unwrap()]);
}

#[test]
fn the_python_client_passes_its_own_tests() {
    if !has(&["pytest"]) {
        return;
    }
    let tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider"];
    println!("{}", out(&python(&client(), &tests)));
}

#[test]
fn a_type_checker_finds_no_error_in_the_python_client_and_its_examples() {
    if !has(&["mypy", "pytest", "pandas"]) {
        return;
    }
    let check = ["-m", "mypy", "--cache-dir=/dev/null"];
    // Both places have a module `conftest`.
    for files in [&["memfold", "tests"][..], &["examples"][..]] {
        python(&client(), &[&check[..], files].concat());
    }
}

#[test]
fn a_wheel_of_the_python_client_can_be_built_and_imported() {
    if !has(&["setuptools", "wheel"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("python");
    // The build writes beside its sources.
    let copied = Command::new("cp")
        .arg("-r")
        .arg(client())
        .arg(&copy)
        .status()
        .unwrap();
    assert!(copied.success());
    let build = "from setuptools.build_meta import build_wheel; build_wheel('dist')";
    python(&copy, &["-c", build]);
    let wheel = format!("memfold-{}-py3-none-any.whl", env!("CARGO_PKG_VERSION"));
    let import = format!(
        "import sys, zipfile; wheel = 'dist/{wheel}'; sys.path.insert(0, wheel)
import memfold.aio; assert wheel in memfold.__file__, memfold.__file__
assert 'memfold/py.typed' in zipfile.ZipFile(wheel).namelist()"
    );
    python(&copy, &["-I", "-c", &import]);
}
