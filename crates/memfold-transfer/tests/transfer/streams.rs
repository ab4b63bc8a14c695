//! Tests of snapshots that are fetched while VMs run from them, without VMs.

use std::fs;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use memfold_host::progress::Progress;
use memfold_snapshot::restore::Piece;
use memfold_testkit::wait_until;
use memfold_transfer::{
    FetchedSnapshot, PullRequest, PushRequest, Remote, StreamedSnapshot, TransferError, push,
    remove,
};
use memfold_wire::encode;
use memfold_wire::library::Awaited;
use serde_json::json;

use super::hosts::{Hosts, MIB, overlay, random};

fn request(name: &str) -> PullRequest {
    PullRequest {
        from: name.into(),
        name: name.into(),
        domain: Some("bank".into()),
        ..PullRequest::default()
    }
}

fn begin(
    hosts: &Hosts,
    expected: Option<&FetchedSnapshot>,
) -> Result<StreamedSnapshot, TransferError> {
    let stream = begin_hidden(hosts, expected)?;
    stream.show()?;
    Ok(stream)
}

fn begin_hidden(
    hosts: &Hosts,
    expected: Option<&FetchedSnapshot>,
) -> Result<StreamedSnapshot, TransferError> {
    StreamedSnapshot::begin(&hosts.there, hosts.remote(), &request("warm"), expected)
}

/// Returns what was kept of the description: the description, the index, a signature.
fn kept(hosts: &Hosts) -> Vec<PathBuf> {
    let place = hosts.path("there/.warm.pull/.store");
    let parts = fs::read_dir(&place).unwrap().flatten();
    let files = parts.flat_map(|part| fs::read_dir(part.path()).unwrap().flatten());
    files.map(|file| file.path()).collect()
}

#[test]
fn a_fetch_that_was_stopped_goes_on_later_and_ends_with_a_whole_snapshot() {
    let hosts = Hosts::new();
    hosts.save("warm", 2, |_| {});
    hosts.push("warm");
    let stream = begin(&hosts, None).unwrap();
    let index = stream.identity().clone();
    let before = stream.status();
    assert!(before.here_bytes < before.total_bytes, "{before:?}");
    assert!(hosts.pulled().is_empty());
    let place = hosts.there.path("warm").unwrap();
    assert!(place.join("ram").exists(), "VMs open files at this path");
    // The draft is locked, and its files are visible but not a snapshot.
    let told = hosts.pull("warm").unwrap_err().to_string();
    assert!(told.contains("being pulled already"), "{told}");
    assert!(StreamedSnapshot::complete(&hosts.there, "warm").is_err());
    stream.stop();
    let is_complete = stream.run(&hosts.there, &Progress::default()).unwrap();
    assert!(!is_complete && stream.wait(0, 0..64 * MIB).is_err());
    // The stopped stream is still held by somebody.
    let next = begin(&hosts, Some(&index)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(next.run(&hosts.there, &Progress::default()).unwrap()));
        next.wait(0, 5 * MIB..8 * MIB).unwrap();
        let mut page = vec![0; 4096];
        let ram = &next.image().ram;
        ram.read_exact_at(&mut page, 5 * MIB + 4096).unwrap();
        assert!(page == random(2, 4096));
    });
    wait_until("the snapshot is whole", Duration::from_secs(10), || {
        hosts.pulled() == ["warm"]
    });
    assert!(fs::symlink_metadata(&place).unwrap().is_dir());
    let there = fs::read(place.join("ram")).unwrap();
    let here = fs::read(hosts.here.path("warm").unwrap().join("ram")).unwrap();
    assert!(there == here);
    assert!(StreamedSnapshot::complete(&hosts.there, "warm").is_ok());
}

#[test]
fn a_fetch_takes_the_name_of_its_snapshot_only_while_it_is_shown() {
    let hosts = Hosts::new();
    hosts.save("warm", 2, |_| {});
    hosts.push("warm");
    let is_taken = || fs::symlink_metadata(hosts.there.path("warm").unwrap()).is_ok();
    let stream = begin_hidden(&hosts, None).unwrap();
    assert!(!is_taken());
    stream.show().unwrap();
    assert!(is_taken());
    stream.hide().unwrap();
    assert!(!is_taken());
    drop(stream);
    hosts.pull("warm").unwrap();
}

#[test]
fn a_fetch_does_not_go_on_with_another_snapshot_of_the_same_name() {
    let hosts = Hosts::new();
    hosts.save("warm", 2, |_| {});
    hosts.push("warm");
    let stream = begin(&hosts, None).unwrap();
    let index = stream.identity().clone();
    drop(stream);
    remove(&hosts.remote(), "warm").unwrap();
    hosts.save("other", 7, |_| {});
    let other = PushRequest {
        name: "other".into(),
        to: "warm".into(),
        key: None,
    };
    push(&hosts.here, &hosts.remote(), &other, &Progress::default()).unwrap();
    let place = hosts.there.path("warm").unwrap();
    let bytes = || fs::read(place.join("disk0.qcow2")).unwrap();
    let before = bytes();
    // What was kept of the first one is still that.
    let again = begin(&hosts, Some(&index)).unwrap();
    assert_eq!(*again.identity(), index);
    drop(again);
    assert!(bytes() == before);
    for file in kept(&hosts) {
        fs::write(file, "{}").unwrap();
    }
    let told = begin(&hosts, Some(&index)).unwrap_err().to_string();
    assert!(told.contains("has another snapshot"), "{told}");
    assert!(bytes() == before);
}

#[test]
fn a_fetch_goes_on_while_the_store_is_gone_with_the_description_that_was_kept_and_checked() {
    let hosts = Hosts::new();
    hosts.save("warm", 2, |_| {});
    let (private, public) = super::keys();
    let to_warm = PushRequest {
        name: "warm".into(),
        to: "warm".into(),
        key: Some(private),
    };
    push(&hosts.here, &hosts.remote(), &to_warm, &Progress::default()).unwrap();
    let request = PullRequest {
        trust: Some(public),
        ..request("warm")
    };
    let url = format!("file://{}", hosts.path("store").display());
    let begin = |expected: Option<&FetchedSnapshot>| {
        let remote = Remote::reopen(&url).unwrap();
        StreamedSnapshot::begin(&hosts.there, remote, &request, expected)
    };
    let first = begin(None).unwrap();
    let identity = first.identity().clone();
    drop(first);
    fs::rename(hosts.path("store"), hosts.path("gone")).unwrap();
    let told = Remote::open(&url).unwrap_err().to_string();
    assert!(told.contains("no such directory"), "{told}");
    assert!(begin(None).is_err(), "a new fetch needs the store");
    let is_refused = |expected: &FetchedSnapshot| begin(Some(expected)).is_err();
    // An earlier version of memfold has noted no hash of the description.
    let older = FetchedSnapshot {
        description: None,
        ..identity.clone()
    };
    assert!(is_refused(&older));
    let files = kept(&hosts);
    assert_eq!(
        files.len(),
        3,
        "description, index and signature: {files:?}"
    );
    for file in &files {
        let good = fs::read(file).unwrap();
        for place in [0, good.len() / 2, good.len() - 1] {
            let mut bad = good.clone();
            bad[place] ^= 1;
            fs::write(file, &bad).unwrap();
            assert!(is_refused(&identity), "byte {place} of {}", file.display());
        }
        fs::write(file, &good[..good.len() - 1]).unwrap();
        assert!(is_refused(&identity), "{} is shorter", file.display());
        fs::remove_file(file).unwrap();
        assert!(is_refused(&identity), "{} is missing", file.display());
        fs::write(file, &good).unwrap();
    }
    let next = begin(Some(&identity)).unwrap();
    let place = hosts.there.path("warm").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(next.run(&hosts.there, &Progress::default()).unwrap()));
        wait_until("the fetch fails", Duration::from_secs(10), || {
            next.status().trouble.is_some()
        });
        assert!(hosts.pulled().is_empty());
        fs::rename(hosts.path("gone"), hosts.path("store")).unwrap();
    });
    assert_eq!(hosts.pulled(), ["warm"]);
    let ram = |place: PathBuf| fs::read(place.join("ram")).unwrap();
    assert!(ram(place.clone()) == ram(hosts.here.path("warm").unwrap()));
    assert!(!place.join(".store").exists(), "not a part of the snapshot");
}

#[test]
fn the_memory_of_a_layer_s_parent_is_fetched_while_vms_run_the_pages_that_they_touch_first() {
    let hosts = Hosts::new();
    hosts.save("parent", 2, |_| {});
    let saved = hosts.save_layer("warm", 2, Some("parent"), |_| {});
    let first = 5 * MIB / 4096 + 1;
    let soonest = json!([[first + 3, 20]]);
    let set = json!({ "image": saved.sums.xxh3_128, "runs": soonest, "soonest": soonest });
    let place = hosts.here.path("warm").unwrap();
    fs::write(place.join("working-set"), set.to_string()).unwrap();
    hosts.push("warm");
    assert_eq!(hosts.objects("first-pages").len(), 1);
    let stream = begin(&hosts, None).unwrap();
    let draft = hosts.path("there/.warm.pull");
    let parent = (0..9)
        .map(|number| draft.join(format!("base{number}")))
        .find(|base| fs::metadata(base).is_ok_and(|facts| facts.len() == 64 * MIB));
    let fetched = fs::metadata(parent.unwrap()).unwrap().blocks() * 512;
    assert!(fetched <= MIB, "{fetched} bytes of the parent's RAM");
    let bytes = random(2, 2 * MIB);
    let mut page = [0; 4096];
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(stream.run(&hosts.there, &Progress::default()).unwrap()));
        assert_eq!(stream.wait_first(), 20);
        let source = &stream.image().sources[0];
        for number in [3, 22, 400] {
            let at = (first + number) * 4096;
            stream.wait(1, at..at + 4096).unwrap();
            source.read_exact_at(&mut page, at).unwrap();
            let of = usize::try_from(number * 4096).unwrap();
            assert!(page == bytes[of..of + 4096], "page {number}");
        }
    });
    let manifest = hosts.there.manifest("warm").unwrap();
    let image = hosts.there.checked_image(&manifest, &Progress::default());
    let pages = image
        .unwrap()
        .references
        .iter()
        .map(|of| of.pages)
        .sum::<u32>();
    assert_eq!(pages, 512);
}

#[test]
fn a_read_only_disk_is_fetched_whole_before_vms_run_and_must_not_name_another_file() {
    let hosts = Hosts::new();
    let secret = hosts.path("secret");
    fs::write(&secret, random(5, MIB)).unwrap();
    let medium = hosts.path("medium.qcow2");
    let save = |name: &str| {
        let facts = super::hosts::facts(&medium);
        hosts.save(name, 2, |manifest| {
            let mut disk = facts.clone();
            disk["format"] = "qcow2".into();
            disk["read_only"] = true.into();
            manifest["disks"].as_array_mut().unwrap().push(disk);
            let of_spec = json!({ "path": medium, "format": "qcow2", "read_only": true });
            let disks = manifest["spec"]["disks"].as_array_mut().unwrap();
            disks.push(of_spec);
        });
        let to_warm = PushRequest {
            name: name.into(),
            to: "warm".into(),
            key: None,
        };
        push(&hosts.here, &hosts.remote(), &to_warm, &Progress::default()).unwrap();
    };
    overlay(&medium, &secret, "raw");
    save("evil");
    let told = begin(&hosts, None).unwrap_err().to_string();
    assert!(told.contains("read-only disk"), "{told}");
    assert!(!hosts.there.path("warm").unwrap().exists());
    remove(&hosts.remote(), "warm").unwrap();
    fs::remove_dir_all(hosts.path("there/.warm.pull")).unwrap();
    super::qemu_img(&[
        "create".as_ref(),
        "-q".as_ref(),
        "-f".as_ref(),
        "qcow2".as_ref(),
        medium.as_os_str(),
        "8M".as_ref(),
    ]);
    super::qemu_io(medium.as_os_str(), "write -P 0x77 0 6M");
    save("good");
    let stream = begin(&hosts, None).unwrap();
    let place = hosts.there.path("warm").unwrap();
    let name = stream.manifest().disks[1].file.path.file_name().unwrap();
    assert!(fs::read(place.join(name)).unwrap() == fs::read(&medium).unwrap());
    assert!(stream.disks(&place).get(1).unwrap().is_none());
}

/// Begins to bring the snapshot's memory to a library, whose end of the connection is returned, and
/// how the connection ends.
fn bring(stream: &StreamedSnapshot) -> (UnixStream, Receiver<bool>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let piece = Piece {
        hva: 1 << 40,
        pages: 64 * MIB / 4096,
        file: 0,
        file_page: 0,
    };
    let (tell, ended) = channel();
    let note = move |is_complete| tell.send(is_complete).unwrap();
    stream.bring(vec![piece], ours, note).unwrap();
    (theirs, ended)
}

#[test]
fn a_connection_to_a_vm_that_ends_on_one_side_ends_and_is_not_taken_for_complete() {
    let hosts = Hosts::new();
    hosts.save("warm", 2, |_| {});
    hosts.push("warm");
    let stream = begin(&hosts, None).unwrap();
    let end = |ended: &Receiver<bool>| ended.recv_timeout(Duration::from_secs(60));
    // The library closes its socket, for example because no file came with a message.
    let (library, ended) = bring(&stream);
    drop(library);
    assert_eq!(end(&ended), Ok(false));
    // The daemon cannot send any more. The library waits for more, and must see the end.
    let (mut library, ended) = bring(&stream);
    library.shutdown(Shutdown::Read).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| stream.run(&hosts.there, &Progress::default()).unwrap());
    });
    assert_eq!(end(&ended), Ok(false));
    assert!(library.write_all(&[0]).is_err());
    // The next connection brings everything.
    let (mut library, ended) = bring(&stream);
    library
        .write_all(&encode(&Awaited::Complete).unwrap())
        .unwrap();
    assert_eq!(end(&ended), Ok(true));
}
