//! Tests of the command line of `memfold-bench`: output and exit codes. No study runs.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

const STUDIES: [&str; 9] = [
    "fold",
    "hints",
    "snapshots",
    "clones",
    "segments",
    "ksm",
    "desktops",
    "remote",
    "mappings",
];

fn run(arguments: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_memfold-bench"));
    program.args(arguments).output().unwrap()
}

#[test]
fn the_help_text_lists_every_benchmark_and_no_internal_subcommand() {
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
fn wrong_arguments_of_memfold_bench_end_it_with_exit_code_2() {
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
fn an_option_that_belongs_to_another_benchmark_is_refused_and_the_error_names_it() {
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

/// Runs the demo of a program that is installed below `prefix`, without guest images.
fn demo_without_images(prefix: &Path) -> Output {
    Command::new(prefix.join("bin/memfold-bench"))
        .args(["demo", "--ksm", "1", "--memory", "512M"])
        .env("MEMFOLD_CACHE", prefix.join("images"))
        .env("MEMFOLD_QEMU_LIBRARY", memfold_host::library().unwrap())
        // The builder of the test notes them, if they are set.
        .env("SUDO_USER", "somebody")
        .output()
        .unwrap()
}

#[test]
fn if_guest_images_are_missing_and_cannot_be_built_the_demo_exits_with_code_3() {
    let prefix = tempfile::tempdir().unwrap();
    let [bin, share] = ["bin", "share/memfold/guest"].map(|name| prefix.path().join(name));
    fs::create_dir_all(&bin).unwrap();
    fs::create_dir_all(&share).unwrap();
    let state = tempfile::tempdir().unwrap();
    if !memfold_host::examine(memfold_host::HostFacts::probe(state.path())).can_run {
        memfold_testkit::skip!("VMs cannot run on this host: see memfold doctor");
    }
    let program = bin.join("memfold-bench");
    fs::copy(env!("CARGO_BIN_EXE_memfold-bench"), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();

    let none = demo_without_images(prefix.path());
    let said = String::from_utf8_lossy(&none.stderr).into_owned();
    assert_eq!(none.status.code(), Some(3), "{said}");
    assert!(said.contains("no guest image 'trixie-a'"), "{said}");

    for (ends, code, words) in [
        (3, 3, "has printed the reason"),
        (1, 1, "the lines above say why"),
        (0, 1, "succeeded, but there is no guest image 'trixie-a'"),
    ] {
        let builder = share.join("build");
        let script = format!(
            "#!/bin/sh\necho \"built: $* in $MEMFOLD_CACHE for ${{SUDO_USER:-nobody}}\"\nexit {ends}\n"
        );
        fs::write(&builder, script).unwrap();
        fs::set_permissions(&builder, fs::Permissions::from_mode(0o755)).unwrap();
        let output = demo_without_images(prefix.path());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{said}");
        let images = prefix.path().join("images");
        let built = format!(
            "built: trixie-a trixie-b in {} for nobody",
            images.display()
        );
        assert!(said.contains(&built) && said.contains(words), "{said}");
        assert!(output.stdout.is_empty(), "standard output is for JSON");
    }
}

/// Runs the self-test with a report, and returns what it printed and the report.
fn self_test(arguments: &[&str]) -> Option<(Output, String)> {
    let place = tempfile::tempdir().unwrap();
    let host = memfold_host::examine(memfold_host::HostFacts::probe(place.path()));
    if !host.can_run || memfold_host::guest_images().is_ok_and(|images| images.is_empty()) {
        return None;
    }
    let file = place.path().join("report.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_memfold-bench"));
    command.args(["self-test", "--report"]).arg(&file);
    let output = command.args(arguments).env("TMPDIR", place.path());
    let output = output.output().unwrap();
    let text = fs::read_to_string(&file).unwrap_or_default();
    let left = fs::read_dir(place.path()).unwrap().flatten();
    let left: Vec<_> = left.map(|entry| entry.file_name()).collect();
    assert!(
        !left
            .iter()
            .any(|name| name.to_string_lossy().starts_with("memfold-")),
        "{left:?}"
    );
    Some((output, text))
}

#[test]
fn the_report_of_one_part_is_written_with_a_reason_for_each_figure_of_the_others() {
    let Some((output, text)) = self_test(&["--image", "trixie-a", "--part", "huge-pages"]) else {
        memfold_testkit::skip!("VMs cannot run on this host, or there are no guest images");
    };
    let (said, log) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{log}");
    assert!(said.contains("# memfold self-test report"), "{said}");
    assert!(
        said.contains("leaves no process and no file behind"),
        "{said}"
    );
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    for figure in report["figures"].as_array().unwrap() {
        let is_measured = figure["part"] == "huge-pages" && figure["values"].is_object();
        assert!(is_measured || figure["why"].is_string(), "{figure}");
    }
    for part in report["parts"].as_array().unwrap() {
        let end = if part["name"] == "huge-pages" {
            "done"
        } else {
            "not-asked"
        };
        assert_eq!(part["end"], end, "{part}");
    }
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    for word in ["/tmp", "/var", "/root", "/home"] {
        assert!(!text.contains(word), "the report contains '{word}': {text}");
    }
    let mut words = text.split(|c: char| !c.is_alphanumeric());
    assert!(
        words.all(|word| word != host.trim()),
        "the host's name: {text}"
    );
}

#[test]
fn a_part_that_does_not_fit_into_the_time_limit_is_left_out_with_the_reason() {
    let Some((output, text)) = self_test(&["--limit", "1", "--part", "proof"]) else {
        memfold_testkit::skip!("VMs cannot run on this host, or there are no guest images");
    };
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let proof = &report["parts"][0];
    assert_eq!(proof["end"], "left-out", "{proof}");
    assert!(
        proof["why"]
            .as_str()
            .unwrap()
            .contains("of --limit are left"),
        "{proof}"
    );
    let log = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert!(
        log.contains("no part of the self-test could be measured"),
        "{log}"
    );
}

#[test]
fn a_report_is_refused_for_an_image_that_does_not_exist_or_a_file_that_cannot_be_written() {
    let Some((output, text)) = self_test(&["--image", "no-such-image"]) else {
        memfold_testkit::skip!("VMs cannot run on this host, or there are no guest images");
    };
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert!(
        log.contains("no guest image 'no-such-image'; the images here: "),
        "{log}"
    );
    assert_eq!(text, "");
    let output = run(&[
        "self-test",
        "--image",
        "trixie-a",
        "--report",
        "/proc/no/report",
    ]);
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(log.contains("cannot write /proc/no/report"), "{log}");
}
