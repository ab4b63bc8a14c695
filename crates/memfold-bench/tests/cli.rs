//! Tests of the command line: output and exit codes. No study runs.

use std::process::{Command, Output};

const STUDIES: [&str; 8] = [
    "fold",
    "hints",
    "snapshots",
    "clones",
    "segments",
    "ksm",
    "desktops",
    "remote",
];

fn run(arguments: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_memfold-bench"));
    program.args(arguments).output().unwrap()
}

#[test]
fn help_lists_every_study_and_no_internal_subcommand() {
    let output = run(&["--help"]);
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for word in STUDIES.iter().chain(&[
        "Usage: memfold-bench",
        "--quick",
        "--arm",
        "--vms",
        "--json",
        "--figures",
    ]) {
        assert!(help.contains(word), "no '{word}' in: {help}");
    }
    assert!(!help.contains("Commands:"), "{help}");
}

#[test]
fn wrong_usage_exits_with_code_2() {
    for arguments in [
        &[][..],
        &["no-such-study"],
        &["ksm", "--vms", "0"],
        &["--json", "fold"],
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn an_option_of_another_study_is_refused_and_the_error_names_the_option() {
    for (arguments, words) in [
        (["fold", "--arm", "x"], "'fold' has no arms"),
        (["fold", "--vms", "3"], "--vms is for 'ksm'"),
    ] {
        let output = run(&arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(words), "no '{words}' in: {said}");
    }
}

#[test]
fn a_man_page_and_shell_completions_are_generated() {
    let directory = tempfile::tempdir().unwrap();
    let [man, completions] = ["man", "completions"].map(|name| directory.path().join(name));
    let output = run(&[
        "generate",
        "--man",
        man.to_str().unwrap(),
        "--completions",
        completions.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{output:?}");
    let page = std::fs::read_to_string(man.join("memfold-bench.1")).unwrap();
    assert!(page.contains("snapshots"), "{page}");
    assert_eq!(man.read_dir().unwrap().count(), 1);
    for name in ["memfold-bench", "_memfold-bench", "memfold-bench.fish"] {
        assert!(completions.join(name).is_file(), "{name}");
    }
}
