//! Power failures: the file operations of a run are recorded in their order, and disks are built as
//! they may be after a power failure at some point of it (`recorded.rs` has the rules). What was
//! acknowledged before the point is there; everything else is gone or whole.
//!
//! One disk in four has lied: it acknowledged a sync that it had not done. What was acknowledged
//! can be gone then, but what is there is whole, or is told to be damaged.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use memfold_lend::registry::Registry;
use memfold_lend::{LeaseState, SqliteRegistry};
use memfold_snapshot::{Progress, Shelf, restore};
use memfold_testkit::dose;
use memfold_transfer::{PullRequest, Remote, pull};
use serde_json::Value;
use tempfile::TempDir;

use crate::daemon::{Daemon, LISTEN};
use crate::encrypted::KeyFiles;
use crate::injector::Injector;
use crate::random::Random;
use crate::recorded::{Marks, Run};
use crate::registry;

/// The things on a disk: what each is, or why it is damaged.
type Found = BTreeMap<String, Result<String, String>>;

/// Makes a directory on a file system that builds disks quickly.
fn quick_directory() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = tempfile::tempdir_in(memory);
    made.unwrap_or_else(|_| tempfile::tempdir().unwrap())
}

/// Checks what is on a disk after a power failure at a point.
fn check(run: &Run, point: usize, found: &Found, has_lied: bool) -> Result<(), String> {
    let promised = run.promised(point);
    if let Some(unknown) = found.keys().find(|thing| !promised.contains_key(*thing)) {
        return Err(format!("nobody has made {unknown}"));
    }
    for (thing, promised) in promised {
        let now = match found.get(&thing) {
            None => "",
            Some(Ok(now)) => now,
            Some(Err(_)) if has_lied => continue,
            Some(Err(why)) => return Err(format!("{thing} is damaged: {why}")),
        };
        let done = promised.done.as_deref().unwrap_or("");
        let is_begun = promised.begun.iter().any(|begun| begun == now);
        let was = now.is_empty() || promised.ever.iter().any(|ever| ever == now);
        if now != done && !is_begun && !(has_lied && was) {
            return Err(format!("{thing} is '{now}', and not as {promised:?}"));
        }
    }
    Ok(())
}

/// Number of power failures, and of those after which a disk had lied.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    all: u64,
    lied: u64,
}

/// Builds `number` disks at `place`, and checks each. `look` finds what is on a disk; `more` checks
/// disks that have not lied in another way.
fn fail(
    run: &Run,
    place: &Path,
    number: u64,
    look: impl Fn(&Path) -> Found,
    mut more: impl FnMut(u64, &Found),
) -> Count {
    let mut count = Count::default();
    for seed in 0..number {
        let mut random = Random::new(seed);
        let point = random.below(run.points());
        let lies = seed % 4 == 3;
        let lost = lies.then(|| random.below(run.syncs()));
        let _ = fs::remove_dir_all(place);
        fs::create_dir(place).unwrap();
        run.build(place, point, lost, &mut random);
        let found = look(place);
        if let Err(why) = check(run, point, &found, lies) {
            let points = run.points();
            let last = run.last(point);
            panic!("seed {seed}, point {point} of {points}, lost sync {lost:?}: {why}\n{last}");
        }
        count.all += 1;
        count.lied += u64::from(lies);
        if !lies {
            more(seed, &found);
        }
    }
    count
}

fn tell(what: &str, run: &Run, count: Count) {
    let (points, syncs) = (run.points(), run.syncs());
    println!(
        "power failures while {what}: {}, of them {} with a lost sync; {points} points, {syncs} syncs",
        count.all, count.lied
    );
}

/// Returns whether a snapshot is complete, its key, or which one it is a layer of; or what is
/// wrong.
fn snapshot(shelf: &Shelf, name: &str) -> Result<String, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let manifest = shelf.manifest(name).map_err(|error| text(&error))?;
    let changed = shelf.changed_parts(&manifest);
    let changed = changed.map_err(|error| text(&error))?;
    let disks = restore::changed_disks(shelf, &manifest);
    let disks = disks.map_err(|error| text(&error))?;
    let stored = shelf.stored(&manifest).map_err(|error| text(&error))?;
    let wrong = stored.verify(&Progress::default());
    let wrong = wrong.map_err(|error| text(&error))?;
    if !changed.is_empty() || !disks.is_empty() || !wrong.is_empty() {
        return Err(format!("{changed:?}, {disks:?}, chunks {wrong:?}"));
    }
    let key = manifest.encryption.map(|of| format!("with key {}", of.key));
    let parent = manifest.parent.map(|parent| parent.name);
    Ok(key.or(parent).unwrap_or_else(|| "complete".into()))
}

fn snapshots(shelf: &Shelf, found: &mut Found) {
    for name in shelf.names().unwrap() {
        found.insert(format!("snapshot {name}"), snapshot(shelf, &name));
    }
}

fn definitions_and_tokens(place: &Path, found: &mut Found) {
    let directory = place.join("state/definitions");
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let file = entry.file_name().into_string().unwrap();
        let Some(name) = file.strip_suffix(".toml") else {
            continue;
        };
        let text = fs::read_to_string(entry.path()).unwrap();
        let read = memfold_vm::Definition::parse(&text);
        let memory = read.map(|definition| (definition.vm.memory.0 >> 20).to_string());
        let memory = memory.map_err(|error| error.to_string());
        found.insert(format!("definition {name}"), memory);
    }
    let Ok(text) = fs::read(place.join("state/hosts.json")) else {
        return;
    };
    match serde_json::from_slice::<BTreeMap<String, String>>(&text) {
        Ok(hosts) => found.extend(
            hosts
                .into_keys()
                .map(|name| (format!("token {name}"), Ok("there".into()))),
        ),
        Err(error) => drop(found.insert("token x".into(), Err(error.to_string()))),
    }
}

/// Makes a recording daemon with more arguments for `serve`, and the marks of its record.
fn recording(more: &[&str]) -> Option<(Daemon, PathBuf, Marks)> {
    let directory = quick_directory();
    let record = directory.path().join("record");
    let daemon = Daemon::start_recording(directory, more, &record)?;
    let marks = Marks::of(&record);
    Some((daemon, record, marks))
}

/// Ends the daemon and its VMs, and reads the record.
fn read(daemon: &mut Daemon, record: &Path) -> Run {
    daemon.kill();
    for vm in memfold_vm::Vm::discover(&daemon.place().join("state")).unwrap() {
        vm.stop(Duration::ZERO).unwrap();
    }
    Run::read(record)
}

/// Asserts that a daemon that starts on a disk knows what was found there.
fn daemon_knows(daemon: &mut Daemon, found: &Found) {
    daemon.start_again();
    let list = |command: &[&str], thing: &str| {
        let names = daemon.names(command).into_iter();
        names
            .map(|name| format!("{thing} {name}"))
            .collect::<Vec<_>>()
    };
    let mut known = list(&["vm", "list"], "definition");
    known.extend(list(&["snapshot", "list"], "snapshot"));
    known.extend(list(&["host", "list"], "token"));
    known.sort();
    assert_eq!(known, found.keys().cloned().collect::<Vec<_>>());
    for snapshot in daemon.succeeds(&["snapshot", "list"]).as_array().unwrap() {
        assert_eq!(snapshot["problem"], Value::Null);
    }
    daemon.kill();
}

#[test]
fn after_a_power_failure_at_any_point_definitions_tokens_and_snapshots_are_as_acknowledged() {
    let Some((mut daemon, record, marks)) = recording(&LISTEN) else {
        memfold_testkit::skip!("no C compiler");
    };
    let file = |name: &str| {
        let path = daemon.place().with_file_name(format!("{name}.toml"));
        fs::write(&path, format!("name = '{name}'\nmemory = '64MiB'\n")).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (a, b) = (file("a"), file("b"));
    let does = |thing: &str, becomes: &str, command: &[&str]| {
        marks.around(thing, becomes, || drop(daemon.succeeds(command)));
    };
    does("definition a", "64", &["vm", "define", &a]);
    does("definition a", "128", &["vm", "set", "a", "memory=128MiB"]);
    does("definition b", "64", &["vm", "define", &b]);
    does("definition b", "", &["vm", "undefine", "b"]);
    does("token x", "there", &["host", "add", "x"]);
    does("token y", "there", &["host", "add", "y"]);
    does("token x", "", &["host", "remove", "x"]);
    let disk = daemon.place().with_file_name("disk.img");
    fs::write(&disk, vec![7; 1 << 20]).unwrap();
    let disk = format!("{},format=raw", disk.display());
    let run = [
        "vm", "run", "--name", "v", "--memory", "64M", "--disk", &disk,
    ];
    daemon.succeeds(&[&run[..], &["--snapshot"]].concat());
    let save = |vm: &str, name: &str, becomes: &str| {
        let thing = format!("snapshot {name}");
        does(&thing, becomes, &["snapshot", "save", vm, name]);
    };
    save("v", "first", "complete");
    save("v", "other", "complete");
    does("snapshot other", "", &["snapshot", "remove", "other"]);
    for (vm, layer) in [("w", "layer"), ("x", "next")] {
        daemon.succeeds(&["snapshot", "restore", "first", "--as", vm, "--force"]);
        save(vm, layer, "first");
        daemon.succeeds(&["vm", "stop", vm, "--timeout", "0"]);
    }
    let compact = ["snapshot", "compact", "layer"];
    does("snapshot layer", "complete", &compact);
    daemon.succeeds(&["vm", "stop", "v", "--timeout", "0"]);
    marks.around("snapshot next", "complete", || {
        does(
            "snapshot first",
            "",
            &["snapshot", "remove", "--merge", "first"],
        );
    });
    let run = read(&mut daemon, &record);
    let look = |place: &Path| {
        let mut found = Found::new();
        definitions_and_tokens(place, &mut found);
        snapshots(&Shelf::open(&place.join("snapshots")), &mut found);
        found
    };
    let place = daemon.place();
    let (number, starts) = (
        dose("MEMFOLD_POWER_FAILURES", 80),
        dose("MEMFOLD_POWER_STARTS", 2),
    );
    let count = fail(&run, &place, number, look, |seed, found| {
        if starts > 0 && seed % (number / starts).max(1) == 0 {
            daemon_knows(&mut daemon, found);
        }
    });
    tell("VMs are defined and saved", &run, count);
}

#[test]
fn after_a_power_failure_at_any_point_an_encrypted_snapshot_is_whole_with_its_old_or_its_new_key() {
    let keys = KeyFiles::new();
    let options = keys.options();
    let options = options.each_ref().map(String::as_str);
    let Some((mut daemon, record, marks)) = recording(&options) else {
        memfold_testkit::skip!("no C compiler");
    };
    let becomes = |key: &str, command: &[&str]| {
        let key = format!("with key {key}");
        marks.around("snapshot s", &key, || drop(daemon.succeeds(command)));
    };
    daemon.succeeds(&["vm", "run", "--name", "v", "--memory", "64M"]);
    becomes("a", &["snapshot", "save", "v", "s", "--encrypt=a"]);
    for key in ["b", "a", "b"] {
        becomes(key, &["snapshot", "rekey", "s", "--key", key]);
    }
    daemon.succeeds(&["vm", "stop", "v", "--timeout", "0"]);
    let run = read(&mut daemon, &record);
    let look = |place: &Path| {
        let shelf = Shelf::open(&place.join("snapshots")).with_keys(keys.keys());
        let mut found = Found::new();
        snapshots(&shelf, &mut found);
        found
    };
    let place = daemon.place();
    let number = dose("MEMFOLD_POWER_FAILURES", 80);
    let count = fail(&run, &place, number, look, |_, _| {});
    tell("the key of a snapshot is changed", &run, count);
}

/// Environment variable with the directory of [`helper`], and with the record of its calls.
const HELPER: &str = "MEMFOLD_FAULT_HELPER";
const RECORD: &str = "MEMFOLD_FAULT_RECORD";

/// Makes calls of the registry of leases, which are recorded.
#[test]
#[ignore = "is started by the test of the registry, with the library that records"]
fn helper() {
    let Some(place) = std::env::var_os(HELPER).map(PathBuf::from) else {
        return;
    };
    let marks = Marks::of(Path::new(&std::env::var_os(RECORD).unwrap()));
    let file = place.join("registry.db");
    for round in 0..3 {
        let registry = SqliteRegistry::open(&file).unwrap();
        for (host, mib) in [("a", 1000 + round), ("c", 500 + round)] {
            marks.around(&format!("lender {host}"), &mib.to_string(), || {
                registry::offer(&registry, host, mib << 20).unwrap();
            });
        }
        for number in 0..4 {
            let vm = format!("vm{round}{number}");
            let thing = format!("lease of {vm}");
            let lease = marks.around(&thing, "taken", || registry::take(&registry, &vm));
            let lease = lease.unwrap();
            if number == 0 {
                continue;
            }
            marks.around(&thing, "exported", || {
                registry::publish(&registry, &lease).unwrap();
            });
            if number == 1 {
                continue;
            }
            marks.around(&thing, "released", || {
                registry.release(lease.id, "b").unwrap();
            });
            if number == 3 {
                marks.around(&thing, "", || {
                    registry.ended(lease.id, &lease.lender).unwrap();
                });
            }
        }
    }
}

fn leases(place: &Path) -> Found {
    let file = place.join("registry.db");
    if !file.exists() {
        return Found::new();
    }
    let damaged = |why: String| Found::from([("lender a".into(), Err(why))]);
    let registry = match SqliteRegistry::open(&file) {
        Ok(registry) => registry,
        Err(error) => return damaged(error.to_string()),
    };
    let picture = match registry.picture() {
        Ok(picture) => picture,
        Err(error) => return damaged(error.to_string()),
    };
    let lenders = picture.lenders.into_iter().map(|lender| {
        let thing = format!("lender {}", lender.lender.host);
        (thing, Ok((lender.offered_bytes >> 20).to_string()))
    });
    let leases = picture.leases.into_iter().map(|lease| {
        let state: LeaseState = lease.state;
        (format!("lease of {}", lease.vm), Ok(state.to_string()))
    });
    lenders.chain(leases).collect()
}

#[test]
fn after_a_power_failure_at_any_point_the_registry_of_leases_is_as_acknowledged() {
    let directory = quick_directory();
    let place = directory.path().join("place");
    fs::create_dir(&place).unwrap();
    let Some(mut injector) = Injector::new(directory.path(), &place) else {
        memfold_testkit::skip!("no C compiler");
    };
    let record = directory.path().join("record");
    injector.record(&record);
    let mut command = Command::new(std::env::current_exe().unwrap());
    let command = command.args(["--exact", "power::helper", "--ignored", "--nocapture"]);
    let command = command.env(HELPER, &place).envs(injector.environment());
    let output = command.output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}{output:?}");
    let run = Run::read(&record);
    assert!(run.syncs() > 30, "{}", run.syncs());
    let number = dose("MEMFOLD_POWER_FAILURES", 80) * 2;
    let count = fail(&run, &place, number, leases, |_, _| {});
    tell("memory is lent", &run, count);
}

/// Pulls each snapshot of a store.
fn stored(place: &Path, found: &mut Found) {
    let store = place.join("store");
    if !store.is_dir() {
        return;
    }
    let remote = Remote::open(&format!("file://{}", store.display())).unwrap();
    let directory = quick_directory();
    let shelf = Shelf::open(directory.path());
    for listed in remote.list().unwrap() {
        let name = listed.name;
        let pulled = || -> Result<String, String> {
            let request = PullRequest {
                from: name.clone(),
                name: name.clone(),
                ..PullRequest::default()
            };
            let pulled = pull(&shelf, &remote, &request, &Progress::default());
            pulled.map_err(|error| error.to_string())?;
            snapshot(&shelf, &name)
        };
        found.insert(format!("stored {name}"), pulled());
    }
}

#[test]
fn after_a_power_failure_at_any_point_pushed_and_pulled_snapshots_are_as_acknowledged() {
    let Some((mut daemon, record, marks)) = recording(&LISTEN) else {
        memfold_testkit::skip!("no C compiler");
    };
    let store = daemon.place().join("store");
    let url = format!("file://{}", store.display());
    let does = |thing: &str, becomes: &str, command: &[&str]| {
        marks.around(thing, becomes, || drop(daemon.succeeds(command)));
    };
    let save = |name: &str| {
        let thing = format!("snapshot {name}");
        does(&thing, "complete", &["snapshot", "save", "v", name]);
    };
    daemon.succeeds(&["vm", "run", "--name", "v", "--memory", "64M"]);
    save("a");
    save("b");
    daemon.succeeds(&["vm", "stop", "v", "--timeout", "0"]);
    fs::create_dir(&store).unwrap();
    does("stored a", "complete", &["snapshot", "push", "a", &url]);
    does("stored b", "complete", &["snapshot", "push", "b", &url]);
    does(
        "snapshot copy",
        "complete",
        &["snapshot", "pull", "b", &url, "--as", "copy"],
    );
    does(
        "stored a",
        "",
        &["snapshot", "remove", "a", "--remote", &url],
    );
    does("snapshot copy", "", &["snapshot", "remove", "copy"]);
    let run = read(&mut daemon, &record);
    let look = |place: &Path| {
        let mut found = Found::new();
        snapshots(&Shelf::open(&place.join("snapshots")), &mut found);
        stored(place, &mut found);
        found
    };
    let place = daemon.place();
    let number = dose("MEMFOLD_POWER_FAILURES", 80) / 2;
    let count = fail(&run, &place, number, look, |_, _| {});
    tell("snapshots are pushed and pulled", &run, count);
}
