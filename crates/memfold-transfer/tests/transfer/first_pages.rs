//! Tests of first pages: the pages that VMs touch at once, which are stored together.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use memfold_host::progress::Progress;
use memfold_testkit::wait_until;
use memfold_transfer::first_pages::{PageRun, Part};
use memfold_transfer::{FetchedSnapshot, PullRequest, StreamedSnapshot, chunk, remove};
use serde_json::{Value, json};

use super::hosts::{Hosts, MIB, random};

const PAGE: u64 = 4096;

/// First page of the random bytes of [`Hosts::save`].
const FIRST: u64 = 5 * MIB / PAGE + 1;

/// Saves and pushes a snapshot from which VMs touch some pages at once: 20 over the end of a chunk,
/// and 5 of a chunk of zeroes.
fn pushed(hosts: &Hosts, name: &str, seed: u64) {
    let saved = hosts.save(name, seed, |_| {});
    let soonest = json!([[FIRST + 250, 20], [9000, 5]]);
    let set = json!({ "image": saved.sums.xxh3_128, "runs": soonest, "soonest": soonest });
    let place = hosts.here.path(name).unwrap();
    fs::write(place.join("working-set"), set.to_string()).unwrap();
    hosts.push(name);
}

fn begin(hosts: &Hosts, expected: Option<&FetchedSnapshot>) -> StreamedSnapshot {
    let request = PullRequest {
        from: "warm".into(),
        name: "warm".into(),
        domain: Some("bank".into()),
        ..PullRequest::default()
    };
    StreamedSnapshot::begin(&hosts.there, hosts.remote(), &request, expected).unwrap()
}

fn page(stream: &StreamedSnapshot, page: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    let ram = &stream.image().ram;
    ram.read_exact_at(&mut bytes, page * PAGE).unwrap();
    bytes
}

/// Makes all chunks missing in the store.
fn hide_chunks(hosts: &Hosts) {
    fs::rename(hosts.path("store/chunks"), hosts.path("hidden")).unwrap();
}

fn show_chunks(hosts: &Hosts) {
    fs::rename(hosts.path("hidden"), hosts.path("store/chunks")).unwrap();
}

/// Runs `check` while the snapshot is fetched, and then waits until it is complete and equal.
fn complete(hosts: &Hosts, stream: &StreamedSnapshot, check: impl FnOnce()) {
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(stream.run(&hosts.there, &Progress::default()).unwrap()));
        check();
    });
    assert_eq!(hosts.pulled(), ["warm"]);
    let ram = |place: PathBuf| fs::read(place.join("ram")).unwrap();
    let there = hosts.there.path("warm").unwrap();
    assert!(ram(there.clone()) == ram(hosts.here.path("warm").unwrap()));
    assert!(!there.join(".store").exists(), "not a part of the snapshot");
}

fn has_trouble(stream: &StreamedSnapshot, word: &str) {
    wait_until("a fetch fails", Duration::from_secs(10), || {
        let trouble = stream.status().trouble;
        trouble.is_some_and(|trouble| trouble.contains(word))
    });
}

#[test]
fn a_start_gets_the_pages_that_vms_touch_at_once_before_their_chunks() {
    let hosts = Hosts::new();
    pushed(&hosts, "warm", 2);
    assert_eq!(hosts.objects("first-pages").len(), 1);
    let stream = begin(&hosts, None);
    hide_chunks(&hosts);
    let before = stream.status().here_bytes;
    complete(&hosts, &stream, || {
        assert_eq!(stream.wait_first(), 20);
        assert_eq!(stream.status().here_bytes - before, 20 * PAGE);
        // Over the end of a chunk, and without the chunks.
        let bytes = (FIRST + 250) * PAGE..(FIRST + 270) * PAGE;
        for (start, end) in [(bytes.start, 256 * 6 * PAGE), (256 * 6 * PAGE, bytes.end)] {
            stream.wait(0, start..end).unwrap();
        }
        let all = random(2, 2 * MIB);
        for number in 250..270 {
            let at = usize::try_from(number * PAGE).unwrap();
            assert!(
                page(&stream, FIRST + number) == all[at..at + 4096],
                "page {number}"
            );
        }
        has_trouble(&stream, "missing");
        show_chunks(&hosts);
    });
    // A whole pull does not need them, and a push of the same pages does not send them again.
    hosts.there.remove("warm").unwrap();
    fs::remove_dir_all(hosts.path("store/first-pages")).unwrap();
    hosts.pull("warm").unwrap();
}

/// Returns a change of the store that makes its description name one other part.
fn name_part(hosts: &Hosts, part: &[u8]) {
    let name = blake3::hash(part).to_hex().to_string();
    let object = hosts.path("store/first-pages").join(&name);
    fs::write(object, chunk::pack(part).unwrap()).unwrap();
    let path = hosts.path("store/snapshots/warm.json");
    let mut description: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    description["first_pages"] = json!([{ "object": name, "bytes": part.len() }]);
    fs::write(path, description.to_string()).unwrap();
}

fn ram_number(hosts: &Hosts) -> u32 {
    let path = hosts.path("store/snapshots/warm.json");
    let description: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let mut files = description["files"].as_array().unwrap().iter();
    u32::try_from(files.position(|file| file["name"] == "ram").unwrap()).unwrap()
}

#[test]
fn a_part_of_the_first_pages_that_is_damaged_or_lies_is_not_used() {
    let hosts = Hosts::new();
    pushed(&hosts, "warm", 2);
    let file = ram_number(&hosts);
    let object = hosts.objects("first-pages").remove(0);
    let good = fs::read(&object).unwrap();
    let mut bad = good.clone();
    let middle = bad.len() / 2;
    bad[middle] ^= 1;
    let run = |file, first, pages| PageRun { file, first, pages };
    let lies = |runs: &[PageRun]| {
        let bytes = vec![7; runs.iter().map(PageRun::bytes).sum()];
        Part {
            runs: runs.to_vec(),
            bytes,
        }
        .encode()
    };
    let damaged = [bad, good[..middle].to_vec(), vec![0; 8 << 20]];
    let lies = [
        // Outside the file; of a file that QEMU opens itself; twice; another length.
        lies(&[run(file, 64 * MIB / PAGE - 1, 2)]),
        lies(&[run(file + 1, 0, 1)]),
        lies(&[run(file, FIRST, 1), run(file, FIRST, 1)]),
        [lies(&[run(file, FIRST, 1)]), vec![7; 4096]].concat(),
    ];
    let check = |what: &str| {
        let stream = begin(&hosts, None);
        complete(&hosts, &stream, || {
            assert_eq!(stream.wait_first(), 0, "{what}");
        });
        hosts.there.remove("warm").unwrap();
    };
    for bytes in damaged {
        fs::write(&object, bytes).unwrap();
        check("damaged");
    }
    fs::remove_file(&object).unwrap();
    check("missing");
    for part in lies {
        name_part(&hosts, &part);
        check("a lie");
    }
}

#[test]
fn a_chunk_that_differs_from_a_page_that_a_vm_has_seen_is_refused_and_changes_no_byte() {
    let hosts = Hosts::new();
    pushed(&hosts, "warm", 2);
    let runs = vec![PageRun {
        file: ram_number(&hosts),
        first: FIRST + 1,
        pages: 1,
    }];
    let bytes = vec![7; 4096];
    name_part(&hosts, &Part { runs, bytes }.encode());
    let stream = begin(&hosts, None);
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(!stream.run(&hosts.there, &Progress::default()).unwrap()));
        assert_eq!(stream.wait_first(), 1);
        has_trouble(&stream, "differs");
        assert!(page(&stream, FIRST + 1) == [7; 4096]);
        assert!(page(&stream, FIRST + 2) == [0; 4096]);
        // The other chunks arrive.
        stream.wait(0, 6 * MIB..7 * MIB).unwrap();
        stream.stop();
    });
    let identity = stream.identity().clone();
    drop(stream);
    // The next daemon knows which pages VMs have seen.
    let stream = begin(&hosts, Some(&identity));
    fs::remove_dir_all(hosts.path("store/first-pages")).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(!stream.run(&hosts.there, &Progress::default()).unwrap()));
        stream.wait_first();
        has_trouble(&stream, "differs");
        assert!(page(&stream, FIRST + 1) == [7; 4096]);
        stream.stop();
    });
}

#[test]
fn first_pages_never_replace_bytes_that_an_earlier_fetch_has_left() {
    let hosts = Hosts::new();
    pushed(&hosts, "warm", 2);
    let runs = vec![PageRun {
        file: ram_number(&hosts),
        first: FIRST + 1,
        pages: 1,
    }];
    let bytes = vec![7; 4096];
    name_part(&hosts, &Part { runs, bytes }.encode());
    // An earlier fetch used no first pages, and a VM runs from its chunks.
    let parts = hosts.path("store/first-pages");
    fs::rename(&parts, hosts.path("parts")).unwrap();
    let stream = begin(&hosts, None);
    let identity = stream.identity().clone();
    std::thread::scope(|scope| {
        let fetched = scope.spawn(|| stream.run(&hosts.there, &Progress::default()).unwrap());
        stream.wait(0, 5 * MIB..6 * MIB).unwrap();
        stream.stop();
        let _is_complete: bool = fetched.join().unwrap();
    });
    let right = page(&stream, FIRST + 1);
    drop(stream);
    if hosts
        .there
        .path("warm")
        .unwrap()
        .join("manifest.json")
        .exists()
    {
        // All chunks had arrived before the stop.
        return;
    }
    fs::rename(hosts.path("parts"), &parts).unwrap();
    let stream = begin(&hosts, Some(&identity));
    complete(&hosts, &stream, || {
        assert_eq!(stream.wait_first(), 0);
        assert!(page(&stream, FIRST + 1) == right);
    });
}

#[test]
fn removing_a_snapshot_from_an_object_store_removes_its_first_pages_and_no_others() {
    let hosts = Hosts::new();
    pushed(&hosts, "first", 2);
    pushed(&hosts, "second", 3);
    let all = hosts.objects("first-pages");
    assert_eq!(all.len(), 2);
    let old = SystemTime::now() - Duration::from_secs(3 * 24 * 3600);
    for object in &all {
        let object = fs::File::options().write(true).open(object).unwrap();
        object.set_modified(old).unwrap();
    }
    let removed = remove(&hosts.remote(), "first").unwrap();
    assert_eq!(removed.objects_removed, 1, "{removed:?}");
    let left = hosts.objects("first-pages");
    assert_eq!(left.len(), 1);
    let path = hosts.path("store/snapshots/second.json");
    let description = fs::read_to_string(path).unwrap();
    let name = left[0].file_name().unwrap().to_str().unwrap();
    assert!(description.contains(name));
}
