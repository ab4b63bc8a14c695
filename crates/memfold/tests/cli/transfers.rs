//! Attacks on copies of snapshots to an object store and back, without a guest: daemons that are
//! killed while they push, pull or stream, and a store that is gone when the next daemon starts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use memfold_testkit::dose;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::forks::{AT, MIB, Memory, random, run, stop};
use crate::support::{Daemon, code, err, out, refused, wait};

/// Bytes of the VM's memory that do not compress, in MiB.
pub const RANDOM_MIB: u64 = 24;

/// Saves a VM as snapshot `warm`, and ends the VM. Returns the URL and the directory of an object
/// store.
pub fn save(daemon: &Daemon) -> (String, PathBuf) {
    run(daemon, "web", &[]);
    Memory::of(daemon, "web").write(AT, &random(1, RANDOM_MIB * MIB));
    daemon.json(&["snapshot", "save", "web", "warm"]);
    stop(daemon, "web");
    let store = daemon.directory.path().join("store");
    fs::create_dir(&store).unwrap();
    (format!("file://{}", store.display()), store)
}

pub fn kill(daemon: &mut Daemon) {
    kill_process(Pid::from_child(&daemon.child), Signal::KILL).unwrap();
    daemon.child.wait().unwrap();
}

fn ram(daemon: &Daemon, name: &str) -> Vec<u8> {
    let place = daemon.directory.path().join("snapshots").join(name);
    fs::read(place.join("ram")).unwrap()
}

/// Returns the problem of a listed snapshot; `None` if it is not listed.
fn problem(daemon: &Daemon, name: &str) -> Option<Value> {
    let list = daemon.json(&["snapshot", "list"]);
    let mut list = list.as_array().unwrap().iter();
    let found = list.find(|snapshot| snapshot["name"] == name)?;
    Some(found["problem"].clone())
}

/// Runs a command `kills` times, whose daemon is killed at another moment each time, and then once
/// to its end. `usual`: how long the command takes. Checks after each kill.
fn killed_at_many_moments(
    daemon: &mut Daemon,
    (words, usual): (&[&str], Duration),
    kills: u32,
    check: impl Fn(&Daemon),
) {
    for number in 0..kills {
        let mut command = daemon.command(words);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut client = command.spawn().unwrap();
        std::thread::sleep(usual * (number + 1) / (kills + 1));
        kill(daemon);
        client.wait().unwrap();
        daemon.start_again();
        check(daemon);
    }
    succeeds(daemon, words);
}

/// Runs a command, which must succeed, and returns how long it took.
pub fn succeeds(daemon: &Daemon, words: &[&str]) -> Duration {
    let began = Instant::now();
    let output = daemon.run(words);
    assert_eq!(code(&output), 0, "{words:?}: {}", err(&output));
    began.elapsed()
}

#[test]
fn a_push_or_pull_whose_daemon_is_killed_at_any_moment_shows_no_part_and_the_next_one_completes_it()
{
    let mut daemon = Daemon::start();
    let (url, store) = save(&daemon);
    let kills = u32::try_from(dose("MEMFOLD_TRANSFER_KILLS", 3)).unwrap();
    let other = daemon.directory.path().join("other");
    fs::create_dir(&other).unwrap();
    let other = format!("file://{}", other.display());
    let usual = succeeds(&daemon, &["snapshot", "push", "warm", &other]);
    let push = ["snapshot", "push", "warm", &url];
    killed_at_many_moments(&mut daemon, (&push, usual), kills, |daemon| {
        // What the store lists is whole.
        let remote = daemon.json(&["snapshot", "list", "--remote", &url]);
        for snapshot in remote.as_array().unwrap() {
            assert_eq!(snapshot["problem"], Value::Null, "{snapshot}");
            succeeds(daemon, &["snapshot", "pull", "warm", &url, "--as", "early"]);
            assert!(ram(daemon, "early") == ram(daemon, "warm"));
            daemon.json(&["snapshot", "remove", "early"]);
            // The next push begins anew.
            daemon.json(&["snapshot", "remove", "warm", "--remote", &url]);
        }
    });
    let objects = fs::read_dir(store.join("snapshots")).unwrap().count();
    assert_eq!(objects, 1);
    let usual = succeeds(
        &daemon,
        &["snapshot", "pull", "warm", &url, "--as", "timed"],
    );
    let pull = ["snapshot", "pull", "warm", &url, "--as", "copy"];
    killed_at_many_moments(&mut daemon, (&pull, usual), kills, |daemon| {
        if let Some(problem) = problem(daemon, "copy") {
            assert_eq!(problem, Value::Null);
            assert!(ram(daemon, "copy") == ram(daemon, "warm"));
            daemon.json(&["snapshot", "remove", "copy"]);
        }
    });
    assert!(ram(&daemon, "copy") == ram(&daemon, "warm"));
    let verified = daemon.run(&["snapshot", "verify", "copy"]);
    assert_eq!(code(&verified), 0, "{}{}", out(&verified), err(&verified));
}

/// Moves the chunks that hold random bytes away, and returns where they are.
pub fn take_large_chunks(store: &Path) -> PathBuf {
    let aside = store.with_extension("aside");
    fs::create_dir(&aside).unwrap();
    for directory in fs::read_dir(store.join("chunks")).unwrap().flatten() {
        for chunk in fs::read_dir(directory.path()).unwrap().flatten() {
            if chunk.metadata().unwrap().len() > MIB * 9 / 10 {
                fs::rename(chunk.path(), aside.join(chunk.file_name())).unwrap();
            }
        }
    }
    aside
}

pub fn put_back(store: &Path, aside: &Path) {
    for chunk in fs::read_dir(aside).unwrap().flatten() {
        let name = chunk.file_name().into_string().unwrap();
        let place = store.join("chunks").join(&name[..2]);
        fs::rename(chunk.path(), place.join(&name)).unwrap();
    }
}

#[test]
fn a_killed_daemon_is_followed_by_one_that_goes_on_with_a_streamed_snapshot_while_the_store_is_gone()
 {
    let mut daemon = Daemon::start();
    let (url, store) = save(&daemon);
    succeeds(&daemon, &["snapshot", "push", "warm", &url]);
    let aside = take_large_chunks(&store);
    assert!(fs::read_dir(&aside).unwrap().count() >= 8);
    let stream = ["snapshot", "pull", "warm", &url, "--as", "copy", "--stream"];
    succeeds(&daemon, &stream);
    succeeds(&daemon, &stream);
    let other = daemon.run(&[&stream[..], &["--domain", "shop"]].concat());
    refused(&other, 1, &["with other options", "remove 'copy' first"]);
    let says = |daemon: &Daemon, words: &str| {
        problem(daemon, "copy").is_some_and(|why| why.as_str().unwrap_or("").contains(words))
    };
    wait("the fetch waits for missing chunks", || {
        says(&daemon, "is missing")
    });
    let gone = store.with_extension("gone");
    fs::rename(&store, &gone).unwrap();
    kill(&mut daemon);
    daemon.start_again();
    wait("the next daemon goes on", || {
        says(&daemon, "being fetched from")
    });
    assert!(
        !daemon
            .directory
            .path()
            .join("snapshots/copy/manifest.json")
            .exists()
    );
    // VMs may run from it, so no other snapshot gets its name.
    run(&daemon, "web", &[]);
    let save = daemon.run(&["snapshot", "save", "web", "copy"]);
    refused(&save, 1, &["choose another name"]);
    stop(&daemon, "web");
    fs::rename(&gone, &store).unwrap();
    put_back(&store, &aside);
    wait("the snapshot is whole", || {
        problem(&daemon, "copy") == Some(Value::Null)
    });
    assert!(ram(&daemon, "copy") == ram(&daemon, "warm"));
    let verified = daemon.run(&["snapshot", "verify", "copy"]);
    assert_eq!(code(&verified), 0, "{}{}", out(&verified), err(&verified));
    let kept = daemon.directory.path().join("snapshots/copy/.store");
    wait("what was kept for the next daemon is removed", || {
        !kept.exists()
    });
}

#[test]
fn a_streamed_snapshot_that_cannot_be_completed_is_completed_when_the_cause_is_gone() {
    let daemon = Daemon::start();
    let (url, store) = save(&daemon);
    succeeds(&daemon, &["snapshot", "push", "warm", &url]);
    let aside = take_large_chunks(&store);
    let stream = ["snapshot", "pull", "warm", &url, "--as", "copy", "--stream"];
    succeeds(&daemon, &stream);
    // The daemon removes files that are not the snapshot's, but no directories.
    let obstacle = daemon.directory.path().join("snapshots/.copy.pull/other");
    fs::create_dir(&obstacle).unwrap();
    put_back(&store, &aside);
    wait("the daemon reports that it tries again", || {
        let why = problem(&daemon, "copy");
        why.is_some_and(|why| {
            why.as_str()
                .unwrap_or("")
                .contains("the daemon tries again")
        })
    });
    fs::remove_dir(&obstacle).unwrap();
    wait("the snapshot is complete", || {
        problem(&daemon, "copy") == Some(Value::Null)
    });
    assert!(ram(&daemon, "copy") == ram(&daemon, "warm"));
}

#[test]
fn a_streamed_snapshot_that_is_removed_while_the_next_daemon_resumes_it_stays_removed() {
    let mut daemon = Daemon::start();
    let (url, store) = save(&daemon);
    succeeds(&daemon, &["snapshot", "push", "warm", &url]);
    let aside = take_large_chunks(&store);
    let pull = ["snapshot", "pull", "warm", &url, "--as", "copy"];
    for _ in 0..4 {
        succeeds(&daemon, &[&pull[..], &["--stream"]].concat());
        kill(&mut daemon);
        daemon.start_again();
        // A removal is refused while the draft is being opened.
        wait("the snapshot is removed", || {
            code(&daemon.run(&["snapshot", "remove", "copy"])) == 0
        });
    }
    put_back(&store, &aside);
    // A snapshot that came back would hold the draft.
    succeeds(&daemon, &pull);
    assert_eq!(problem(&daemon, "copy"), Some(Value::Null));
    assert!(ram(&daemon, "copy") == ram(&daemon, "warm"));
}
