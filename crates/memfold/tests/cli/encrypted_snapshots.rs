//! Tests of encrypted snapshots of VMs without a guest. The memory of these VMs holds random bytes
//! that the test puts there.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::forks::{AT, MIB, Memory, random, run, stop};
use crate::support::{Daemon, code, err, out, refused};

/// A daemon with the keys `a` (a file), `b` (a command) and `c` (a credential) for snapshots.
struct Place {
    keys: TempDir,
    daemon: Daemon,
}

/// Returns a key of 64 digits.
fn digits(key: &str) -> String {
    let word = xxhash_rust::xxh3::xxh3_128(key.as_bytes());
    format!("{word:032x}{:032x}", !word)
}

fn write_key(path: &Path, key: &str) {
    fs::write(path, digits(key)).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
}

impl Place {
    fn new() -> Self {
        let keys = tempfile::tempdir().unwrap();
        let path = |name: &str| keys.path().join(name);
        write_key(&path("a"), "a");
        write_key(&path("b"), "b");
        write_key(&path("c"), "c");
        let a = format!("--snapshot-key=a=file:{}", path("a").display());
        let b = format!("--snapshot-key=b=command:/bin/cat {}", path("b").display());
        let words = [&*a, &b, "--snapshot-key=c=credential:c"];
        // As systemd sets it.
        let environment = [("CREDENTIALS_DIRECTORY", keys.path().to_str().unwrap())];
        let daemon = Daemon::start_in(&environment, Stdio::null(), &words);
        Self { keys, daemon }
    }

    fn key(&self, name: &str) -> PathBuf {
        self.keys.path().join(name)
    }

    fn snapshot(&self, name: &str) -> PathBuf {
        self.daemon.directory.path().join("snapshots").join(name)
    }

    /// Starts a VM whose memory holds the returned bytes.
    fn run(&self, name: &str, more: &[&str]) -> Vec<u8> {
        run(&self.daemon, name, more);
        let bytes = random(7, 3 * MIB + 4096);
        Memory::of(&self.daemon, name).write(AT, &bytes);
        bytes
    }

    fn save(&self, vm: &str, name: &str, more: &[&str]) -> Output {
        let words = ["snapshot", "save", vm, name, "--json"];
        self.daemon.run(&[&words, more].concat())
    }

    fn restore(&self, name: &str, vm: &str) -> Output {
        let words = ["snapshot", "restore", name, "--as", vm, "--force"];
        self.daemon.run(&words)
    }

    fn rekey(&self, key: &str, more: &[&str]) -> Output {
        let words = ["snapshot", "rekey", "--key", key];
        self.daemon.run(&[&words, more].concat())
    }

    fn names(&self, what: &str) -> Vec<String> {
        let list = self.daemon.json(&[what, "list"]);
        let names = list.as_array().unwrap().iter();
        names
            .map(|one| one["name"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Returns the memory file that a VM maps as the image of its snapshot: its inode.
    fn image_of(&self, vm: &str) -> String {
        let process = self
            .daemon
            .state()
            .join("vms")
            .join(vm)
            .join("process.json");
        let process: Value = serde_json::from_slice(&fs::read(process).unwrap()).unwrap();
        let maps = format!("/proc/{}/maps", process["process"]["pid"]);
        let maps = fs::read_to_string(maps).unwrap();
        let line = maps.lines().find(|line| line.contains("memfold-image:"));
        let fields = line.unwrap().split_whitespace();
        fields.into_iter().nth(4).unwrap().to_owned()
    }
}

fn done(output: &Output) -> Value {
    assert_eq!(code(output), 0, "{}", err(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|found| found == part)
}

#[test]
fn an_encrypted_snapshot_shows_no_byte_of_memory_and_its_clones_share_the_decrypted_image() {
    let place = Place::new();
    let bytes = place.run("one", &[]);
    for (name, more) in [
        ("plain", "--whole"),
        ("hidden", "--encrypt=a"),
        ("small", "--encrypt=b"),
    ] {
        let more = [more, "--compress"];
        let more = &more[..=usize::from(name == "small")];
        let saved = done(&place.save("one", name, more));
        let is_encrypted = name != "plain";
        assert_eq!(saved["format"], if is_encrypted { 4 } else { 3 });
        assert_eq!(saved["encryption"]["key"].is_string(), is_encrypted);
        let mut shows = false;
        for file in fs::read_dir(place.snapshot(name)).unwrap().flatten() {
            let found = fs::read(file.path()).unwrap();
            for at in [0, 4096, 1 << 20, 3 << 20] {
                shows |= contains(&found, &bytes[at..at + 32]);
            }
            // Beginning of QEMU's device state (QEMU_VM_FILE_MAGIC).
            shows |= contains(&found, b"QEVM");
        }
        assert_eq!(shows, !is_encrypted, "{name}");
    }
    let list = place.daemon.json(&["snapshot", "list"]);
    let keys: Vec<Value> = list
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s["key"].clone())
        .collect();
    assert_eq!(keys, [Value::from("a"), Value::Null, Value::from("b")]);
    for (name, vms) in [("hidden", ["two", "three"]), ("small", ["four", "five"])] {
        for vm in vms {
            assert_eq!(code(&place.restore(name, vm)), 0);
            Memory::of(&place.daemon, vm).holds(AT, &bytes);
        }
        assert_eq!(place.image_of(vms[0]), place.image_of(vms[1]));
        let verified = place.daemon.run(&["snapshot", "verify", name]);
        assert!(out(&verified).contains("unchanged"), "{}", out(&verified));
    }
    // A write of one clone is its own.
    Memory::of(&place.daemon, "two").write(AT, b"changed");
    Memory::of(&place.daemon, "three").holds(AT, &bytes);
    // Clones go on without the key, and further ones need it.
    fs::remove_file(place.key("a")).unwrap();
    Memory::of(&place.daemon, "three").holds(AT, &bytes);
    refused(&place.restore("hidden", "six"), 1, &["cannot read key 'a'"]);
}

#[test]
fn a_snapshot_with_a_wrong_missing_or_public_key_or_a_changed_file_starts_no_vm_and_stays() {
    let place = Place::new();
    let bytes = place.run("one", &[]);
    done(&place.save("one", "hidden", &["--encrypt=a"]));
    let refuses = |words: &[&str]| {
        refused(&place.restore("hidden", "two"), 1, words);
        assert_eq!(place.names("vm"), ["one"]);
    };
    let key = place.key("a");
    write_key(&key, "other");
    refuses(&["snapshot 'hidden'", "key 'a'", "not the one"]);
    fs::write(&key, "short").unwrap();
    refuses(&["key 'a'", "64 hexadecimal digits"]);
    write_key(&key, "a");
    fs::set_permissions(&key, Permissions::from_mode(0o644)).unwrap();
    refuses(&["may be read by others", "chmod 600"]);
    fs::remove_file(&key).unwrap();
    refuses(&["cannot read key 'a'"]);
    write_key(&key, "a");
    for (part, at, word) in [
        ("key", 0, "key was changed"),
        ("key", 111, "key was changed"),
        ("ram.index", 3, "ram.index was changed"),
        ("ram.sums", 0, "ram.sums was changed"),
        ("devices", 9, "devices was changed"),
        ("ram.sealed", 70, "ram.sealed was changed"),
    ] {
        let path = place.snapshot("hidden").join(part);
        let file = fs::File::options()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
        refuses(&[word]);
        file.write_all_at(&byte, at).unwrap();
        let length = file.metadata().unwrap().len();
        let whole = fs::read(&path).unwrap();
        file.set_len(length - 1).unwrap();
        refuses(&[part, "bytes instead of"]);
        fs::write(&path, whole).unwrap();
    }
    assert_eq!(code(&place.restore("hidden", "two")), 0);
    Memory::of(&place.daemon, "two").holds(AT, &bytes);
}

#[test]
fn a_snapshot_whose_key_was_changed_needs_only_the_new_key_and_its_vms_go_on() {
    let mut place = Place::new();
    let bytes = place.run("one", &[]);
    done(&place.save("one", "plain", &["--whole"]));
    done(&place.save("one", "hidden", &["--encrypt=a"]));
    assert_eq!(code(&place.restore("hidden", "two")), 0);
    let words = ["'hidden'", "'d'", "a, b, c", "--snapshot-key d=SOURCE"];
    refused(&place.rekey("d", &["hidden"]), 1, &words);
    fs::write(place.key("b"), "").unwrap();
    let words = ["'hidden'", "key 'b'", "64 hexadecimal digits"];
    refused(&place.rekey("b", &["hidden"]), 1, &words);
    write_key(&place.key("b"), "b");
    let changed = done(&place.rekey("c", &["hidden", "--json"]));
    let report = |key: &str, old: &str| json!([{ "name": "hidden", "key": key, "old_key": old }]);
    assert_eq!(changed, report("c", "a"));
    // A failure does not keep other snapshots from their new key.
    let output = place.rekey("b", &["plain", "hidden", "--json"]);
    let words = ["key of snapshot 'plain'", "not encrypted", "--encrypt=b"];
    refused(&output, 1, &words);
    let changed: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(changed, report("b", "c"));
    for old in ["a", "c"] {
        fs::remove_file(place.key(old)).unwrap();
    }
    assert_eq!(code(&place.restore("hidden", "three")), 0);
    assert_eq!(place.image_of("two"), place.image_of("three"));
    let again = place.rekey("b", &["hidden"]);
    assert_eq!(out(&again), "hidden was encrypted with key 'b' already\n");
    // The next daemon has decrypted nothing.
    place.daemon.terminate();
    place.daemon.start_again();
    place.daemon.wait_adopted();
    assert_eq!(code(&place.restore("hidden", "four")), 0);
    for vm in ["two", "three", "four"] {
        Memory::of(&place.daemon, vm).holds(AT, &bytes);
    }
    let verified = place.daemon.run(&["snapshot", "verify", "hidden"]);
    assert!(out(&verified).contains("unchanged"), "{}", out(&verified));
    let log = fs::read_to_string(place.daemon.state().join("audit.jsonl")).unwrap();
    assert!(log.contains(r#""key_name":"b""#), "{log}");
}

#[test]
fn a_save_names_the_keys_the_disks_and_the_options_that_do_not_fit_encryption() {
    let place = Place::new();
    place.run("one", &[]);
    refused(
        &place.save("one", "s", &["--encrypt"]),
        1,
        &["a, b, c", "--encrypt=NAME"],
    );
    refused(
        &place.save("one", "s", &["--encrypt=d"]),
        1,
        &["'d'", "a, b, c"],
    );
    let both = ["--encrypt=a", "--parent", "p"];
    refused(&place.save("one", "s", &both), 2, &["--parent"]);
    let request = br#"{"vm":"one","name":"s","encrypt":true,"key":"a","parent":"p"}"#;
    let (status, told) = place.daemon.http("POST", "/v1/snapshots", request);
    assert!(status == 400 && told.contains("parent"), "{status} {told}");
    let request = br#"{"vm":"one","name":"s","key":"a"}"#;
    let (status, told) = place.daemon.http("POST", "/v1/snapshots", request);
    assert!(status == 400 && told.contains("encrypt"), "{status} {told}");
    fs::write(place.key("b"), "").unwrap();
    let words = ["key 'b'", "64 hexadecimal digits"];
    refused(&place.save("one", "s", &["--encrypt=b"]), 1, &words);
    // The contents of its disk would not be encrypted.
    let disk = place.daemon.directory.path().join("disk");
    fs::write(&disk, vec![1; 1 << 20]).unwrap();
    let path = disk.to_str().unwrap();
    run(&place.daemon, "disk", &["--disk", path, "--snapshot"]);
    refused(
        &place.save("disk", "s", &["--encrypt=a"]),
        1,
        &[path, "unencrypted", "--plain-disks"],
    );
    assert!(place.names("snapshot").is_empty());
    let saved = done(&place.save("disk", "s", &["--encrypt=a", "--plain-disks"]));
    assert_eq!(saved["encryption"]["plain_disks"], true);
    assert_eq!(code(&place.restore("s", "again")), 0);
}

#[test]
fn an_encrypted_snapshot_is_pushed_and_pulled_as_it_is_and_not_streamed() {
    let place = Place::new();
    let bytes = place.run("one", &[]);
    done(&place.save("one", "hidden", &["--encrypt=a"]));
    let store = tempfile::tempdir().unwrap();
    let url = format!("file://{}", store.path().display());
    place.daemon.json(&["snapshot", "push", "hidden", &url]);
    place
        .daemon
        .json(&["snapshot", "pull", "hidden", &url, "--as", "copy"]);
    assert_eq!(code(&place.restore("copy", "two")), 0);
    Memory::of(&place.daemon, "two").holds(AT, &bytes);
    let words = [
        "snapshot", "pull", "hidden", &url, "--as", "other", "--stream",
    ];
    refused(&place.daemon.run(&words), 1, &["its memory is encrypted"]);
}

#[test]
fn a_vm_that_runs_from_an_encrypted_snapshot_is_saved_encrypted_or_not_at_all() {
    let place = Place::new();
    let bytes = place.run("one", &["--domain", "shop"]);
    done(&place.save("one", "hidden", &["--encrypt=a"]));
    stop(&place.daemon, "one");
    assert_eq!(code(&place.restore("hidden", "two")), 0);
    for more in [
        &[][..],
        &["--whole"],
        &["--compress"],
        &["--parent", "hidden"],
    ] {
        let words = ["encrypted snapshot 'hidden'", "--encrypt"];
        refused(&place.save("two", "plain", more), 1, &words);
    }
    let fork = ["fork", "two", "--name", "f", "--force", "--no-wait"];
    let words = ["encrypted snapshot 'hidden'", "memfold clone hidden"];
    refused(&place.daemon.run(&fork), 1, &words);
    assert_eq!(place.names("snapshot"), ["hidden"]);
    // Other VMs cannot refer to it either.
    place.run("three", &["--domain", "shop"]);
    let words = ["cannot be the parent", "encrypted"];
    refused(
        &place.save("three", "layer", &["--parent", "hidden"]),
        1,
        &words,
    );
    let saved = done(&place.save("two", "next", &["--encrypt=c"]));
    assert_eq!(saved["parent"], Value::Null);
    // The new one needs neither the first snapshot nor its key.
    stop(&place.daemon, "two");
    place.daemon.json(&["snapshot", "remove", "hidden"]);
    fs::remove_file(place.key("a")).unwrap();
    assert_eq!(code(&place.restore("next", "four")), 0);
    Memory::of(&place.daemon, "four").holds(AT, &bytes);
}
