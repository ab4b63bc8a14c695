//! Test of a snapshot that one daemon copies to a real S3 server, and another daemon copies from
//! there. The two daemons share no files.

use std::path::Path;
use std::time::{Duration, Instant};

use memfold_api::RestoreRequest;
use memfold_lab::{DiskMode, Lab};
use memfold_snapshot::SnapshotInfo;
use memfold_testkit::{S3Server, skip, wait_until};
use memfold_transfer::{PullReport, PushReport, RemoteSnapshot};
use memfold_units::ByteSize;
use serde::de::DeserializeOwned;

use crate::beside::snapshots::{VERIFY, rewrite_memory};
use crate::served::{self, Served, exec, wait_agent};
use crate::support;

const URL: &str = "s3://memfold/fleet";

/// Runs a command of memfold. Returns its answer, or its error.
pub fn memfold<T: DeserializeOwned>(state: &Path, words: &[&str]) -> Result<T, String> {
    let output = served::memfold(state, words).arg("--json").output();
    let output = output.unwrap();
    if output.status.success() {
        return Ok(serde_json::from_slice(&output.stdout).unwrap());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_snapshot_moves_to_another_host_through_an_s3_server_even_if_both_daemons_are_killed() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| {
        let place = directory.path().join(name);
        std::fs::create_dir(&place).unwrap();
        place
    };
    let (here, there, store) = (place("here"), place("there"), place("store"));
    let server = match S3Server::start(&store) {
        Ok(server) => server,
        Err(why) => skip!("{why}"),
    };
    let endpoint = format!("http://127.0.0.1:{}", server.port);
    let environment = [
        ("AWS_ACCESS_KEY_ID", "S3RVER"),
        ("AWS_SECRET_ACCESS_KEY", "S3RVER"),
        ("AWS_ENDPOINT", endpoint.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
    ];
    let mut first = Served::new(&here, &["web"]).environment(&environment);
    let mut second = Served::new(&there, &["copy"]).environment(&environment);
    first.start();
    let client = first.answers();
    let spec = Lab::spec("web", "trixie-a", ByteSize::mib(384), DiskMode::Buffered).unwrap();
    first.run_warm(&spec);
    let vm = wait_agent(&client, "web");
    // A guest that takes its QEMU over must not find the credentials there.
    let environment_of_qemu = std::fs::read(format!("/proc/{}/environ", vm.pid)).unwrap();
    assert!(!String::from_utf8_lossy(&environment_of_qemu).contains("S3RVER"));
    exec(&client, "web", &rewrite_memory());
    let _: serde_json::Value = memfold(&here, &["snapshot", "save", "web", "warm"]).unwrap();

    // The daemon is killed while it pushes: nobody sees a part of the snapshot.
    let push = ["snapshot", "push", "warm", URL];
    std::thread::scope(|scope| {
        let killed = scope.spawn(|| memfold::<PushReport>(&here, &push));
        let sent = || {
            std::fs::read_dir(store.join("memfold/fleet/chunks")).is_ok_and(|all| all.count() > 20)
        };
        wait_until("some chunks are sent", Duration::from_secs(60), sent);
        first.kill();
        assert!(killed.join().unwrap().is_err());
    });
    first.start();
    let client = first.answers();
    let list = ["snapshot", "list", "--remote", URL];
    assert_eq!(memfold::<Vec<RemoteSnapshot>>(&here, &list).unwrap(), []);
    let began = Instant::now();
    let pushed: PushReport = memfold(&here, &push).unwrap();
    println!(
        "pushed in {:.1} s: {pushed:?}",
        began.elapsed().as_secs_f64()
    );
    assert!(pushed.new_bytes < pushed.stored_bytes, "{pushed:?}");
    let list: Vec<RemoteSnapshot> = memfold(&here, &list).unwrap();
    assert_eq!(
        (list.len(), list[0].name.as_str(), list[0].vm.as_str()),
        (1, "warm", "web")
    );
    // The guest's memory is right, and it runs on.
    wait_agent(&client, "web");
    let said = exec(&client, "web", VERIFY).stdout;
    assert!(said.starts_with("errors 0 rounds "), "{said}");
    drop(first);

    // The other daemon is killed while it pulls: it has no part of the snapshot afterwards.
    second.start();
    let _ = second.answers();
    // The laboratory starts its guests with an argument of its own.
    let pull = [
        "snapshot",
        "pull",
        "warm",
        URL,
        "--domain",
        "shop",
        "--allow-arguments",
    ];
    let draft = there.join("snapshots/.warm.pull");
    std::thread::scope(|scope| {
        let killed = scope.spawn(|| memfold::<PullReport>(&there, &pull));
        let arrived = || {
            let files = std::fs::read_dir(&draft).into_iter().flatten().flatten();
            let blocks = |file: std::fs::DirEntry| {
                file.metadata()
                    .map_or(0, |facts| std::os::unix::fs::MetadataExt::blocks(&facts))
            };
            files.map(blocks).sum::<u64>() > (20 << 20) / 512
        };
        wait_until("some chunks have arrived", Duration::from_secs(60), arrived);
        second.kill();
        assert!(killed.join().unwrap().is_err());
    });
    second.start();
    let client = second.answers();
    let all: Vec<SnapshotInfo> = memfold(&there, &["snapshot", "list"]).unwrap();
    assert!(all.is_empty(), "{all:?}");
    let began = Instant::now();
    let pulled: PullReport = memfold(&there, &pull).unwrap();
    println!(
        "pulled in {:.1} s: {pulled:?}",
        began.elapsed().as_secs_f64()
    );
    assert!(pulled.fetched_bytes < pulled.stored_bytes, "{pulled:?}");

    // What the first daemon had is gone; the copy has the memory and the disk of that instant.
    std::fs::remove_dir_all(here.join("snapshots")).unwrap();
    let request = RestoreRequest::new("copy");
    let vm: memfold_api::VmInfo = client.post("/v1/snapshots/warm/restore", &request).unwrap();
    assert_eq!(vm.domain.as_deref(), Some("shop"));
    wait_agent(&client, "copy");
    let said = exec(&client, "copy", VERIFY).stdout;
    assert!(said.starts_with("errors 0 rounds "), "{said}");
    exec(
        &client,
        "copy",
        "echo 3 > /proc/sys/vm/drop_caches; find /usr/lib -type f -name '*.so*' | head -n 300 | xargs cat | sha256sum",
    );
    let problems: memfold_api::VerifyReport =
        memfold(&there, &["snapshot", "verify", "warm"]).unwrap();
    assert!(problems.problems.is_empty(), "{problems:?}");
}
