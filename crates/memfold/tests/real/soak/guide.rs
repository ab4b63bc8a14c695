//! The tutorial, as it stands in the guide: each of its commands is run.

use std::path::Path;
use std::process::Command;

use crate::support;

/// The text of all blocks of shell commands.
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

/// What has to be so when the page says so, after the command that ends with these words.
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

#[test]
fn the_tutorial_works_as_it_stands_in_the_guide() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(repository.join("docs/guide/tutorial.md")).unwrap();
    let mut script = commands(&page);
    for (after, check) in CHECKS {
        assert_eq!(script.matches(after).count(), 1, "{after}: {script}");
        script = script.replace(after, &format!("{after}{check}"));
    }
    let directory = tempfile::Builder::new()
        .prefix("memfold-guide.")
        .tempdir()
        .unwrap();
    let place = directory.path();
    // The page is read in a checkout; what it leaves there is to be seen here.
    for part in ["guest", "scripts"] {
        let part = repository.canonicalize().unwrap().join(part);
        std::os::unix::fs::symlink(&part, place.join(part.file_name().unwrap())).unwrap();
    }
    let program = Path::new(env!("CARGO_BIN_EXE_memfold"));
    let path = format!(
        "{}:{}",
        program.parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    // Should a command fail: nothing of it stays.
    let script = format!(
        "trap 'for vm in warm-1 warm-2 warm-3 web1 web2; do memfold vm stop $vm --timeout 0 > /dev/null 2>&1; done; kill $daemon 2> /dev/null' EXIT\n\
         set -euo pipefail\n{script}\n\
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
