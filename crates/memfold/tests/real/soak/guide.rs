//! Test of the tutorial and the how-tos in docs: runs each command in the documents' `sh` blocks.
//! `console` blocks are for hosts that a test cannot have (packages to install, other hosts,
//! desktops), and are not run.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::support;

/// Returns the text of all blocks of shell commands on a page.
fn commands(page: &str) -> String {
    let mut script = String::new();
    let mut is_inside = false;
    for line in page.lines() {
        match line {
            "```sh" => is_inside = true,
            "```" => is_inside = false,
            line if is_inside => {
                script.push_str(line);
                script.push('\n');
            }
            _ => {}
        }
    }
    script
}

/// Conditions of a page that must hold after the command that ends with the given words.
const CHECKS: [(&str, &str); 3] = [
    (
        "memfold snapshot save web1 warm --live\n",
        "[ \"$(memfold vm exec web1 'cat /run/nonce')\" = only-in-memory ]\n",
    ),
    (
        "memfold plan --kind web=warm-1,warm-2,warm-3 --vms web=10\n",
        "[ \"$(memfold vm exec warm-2 'hostname; cat /run/nonce' | tr '\\n' ' ')\" = 'warm-2 only-in-memory ' ]
         memfold report --json=report.json > /dev/null\n",
    ),
    (
        "memfold snapshot remove warm\n",
        "[ \"$(memfold vm list --json)\" = '[]' ]\n",
    ),
];

/// A page whose commands need a running daemon.
struct HowTo {
    page: &'static str,
    /// State before the first step: descriptions of VMs, or running VMs.
    before: &'static str,
    /// Conditions that must hold after the last step.
    after: &'static str,
}

const HOW_TOS: [HowTo; 8] = [
    HowTo {
        page: "density-homelab",
        before: "memfold vm run --name other --memory 64M; guest/describe trixie-a web > web.toml",
        after: "memfold report --json=report.json > /dev/null
                python3 -c 'import json; assert json.load(open(\"report.json\"))[\"ledger\"][\"host\"][\"saved_by_folding_bytes\"] > 32 << 20'",
    },
    HowTo {
        page: "ci-runners",
        before: "guest/describe trixie-a runner > runner.toml",
        after: "grep -q Linux build.log; grep -q Linux result/build.log
                [ \"$(memfold vm list --json)\" = '[]' ]; [ \"$(memfold snapshot list --json)\" = '[]' ]",
    },
    HowTo {
        page: "agent-sandboxes",
        before: "{ echo 'network = \"none\"'; guest/describe trixie-a base; } > sandbox.toml",
        after: "[ \"$(memfold vm list --json)\" = '[]' ]; [ \"$(memfold snapshot list --json)\" = '[]' ]",
    },
    HowTo {
        page: "vdi",
        before: "{ echo 'network = \"user\"'; guest/describe trixie-a gold; } > desktop.toml",
        after: "[ \"$(memfold vm list --json)\" = '[]' ]; [ \"$(memfold snapshot list --json)\" = '[]' ]",
    },
    HowTo {
        page: "host-that-swaps",
        before: "",
        after: "memfold debt --json | python3 -c 'import json, os, sys
total = os.sysconf(\"SC_PHYS_PAGES\") * 4096
assert abs(json.load(sys.stdin)[\"reserve_bytes\"] / total - 0.1) < 0.001'",
    },
    HowTo {
        page: "read-the-ledger",
        before: "memfold vm run --name web1 --memory 64M",
        after: "grep -q web1 report.json",
    },
    HowTo {
        page: "upgrading",
        before: "touch memfold.toml; export MEMFOLD_CONFIG=$PWD/memfold.toml",
        after: "",
    },
    HowTo {
        page: "ksm-merges-nothing",
        before: "memfold vm run --name web1 --memory 64M",
        after: "memfold ksm explain web1 > explained; grep -q 'no trust domain' explained",
    },
];

fn repository() -> PathBuf {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    repository.canonicalize().unwrap()
}

fn page(name: &str) -> String {
    std::fs::read_to_string(repository().join("docs").join(name)).unwrap()
}

/// Runs commands in a directory of their own, where they find the program, and `guest` and
/// `scripts` as in a checkout. If one fails, all VMs and daemons are ended.
fn run(place: &Path, script: &str) {
    for part in ["guest", "scripts"] {
        let part = repository().join(part);
        std::os::unix::fs::symlink(&part, place.join(part.file_name().unwrap())).unwrap();
    }
    let program = Path::new(env!("CARGO_BIN_EXE_memfold"));
    let path = format!(
        "{}:{}",
        program.parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    let script = format!(
        "trap 'memfold vm stop --all --timeout 0 > /dev/null 2>&1; kill $daemon 2> /dev/null' EXIT\n\
         set -euxo pipefail\n{script}\n\
         trap - EXIT\n"
    );
    let output = Command::new("timeout")
        .args(["-k", "30", "900", "bash", "-c", &script])
        .current_dir(place)
        .env("PATH", path)
        .env("MEMFOLD_SOCKET", place.join("s"))
        .env("MEMFOLD_STATE", place.join("state"))
        .env("MEMFOLD_SNAPSHOTS", place.join("snapshots"))
        .env("MEMFOLD_SEGMENTS", place.join("segments"))
        .output()
        .unwrap();
    let (said, wrong) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{said}\n{wrong}");
    println!("{said}");
}

fn own_directory() -> TempDir {
    let builder = tempfile::Builder::new().prefix("memfold-guide.").tempdir();
    builder.unwrap()
}

#[test]
fn the_commands_of_the_how_to_pages_work_as_documented() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    for HowTo {
        page: name,
        before,
        after,
    } in HOW_TOS
    {
        println!("== {name}");
        let steps = commands(&page(&format!("how-to/{name}.md")));
        assert!(steps.contains("memfold "), "{name} has no commands");
        let directory = own_directory();
        run(
            directory.path(),
            &format!(
                "memfold serve > serve.log 2>&1 &\ndaemon=$!\n\
                 until memfold vm list > /dev/null 2>&1; do sleep 0.2; done\n\
                 {before}\n{steps}\n{after}\n\
                 memfold vm stop --all --timeout 0\nkill $daemon\nwait $daemon"
            ),
        );
    }
}

#[test]
fn the_commands_of_the_tutorial_work_as_documented() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let mut script = commands(&page("guide/tutorial.md"));
    for (after, check) in CHECKS {
        assert_eq!(script.matches(after).count(), 1, "{after}: {script}");
        script = script.replace(after, &format!("{after}{check}"));
    }
    let directory = own_directory();
    let place = directory.path();
    run(place, &script);
    let report = std::fs::read_to_string(place.join("report.json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let saved = &report["ledger"]["host"]["saved_by_folding_bytes"];
    assert!(saved.as_i64() > Some(32 << 20), "{saved}");
    assert_eq!(report["ledger"]["vms"].as_array().unwrap().len(), 5);
    let left: Vec<_> = ["web1.toml", "web2.toml", "serve.log", "s"]
        .into_iter()
        .filter(|name| place.join(name).exists())
        .collect();
    assert_eq!(left, Vec::<&str>::new());
}
