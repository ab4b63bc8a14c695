//! Tests of snapshots that are copied to an object store and back. The copy equals the original, or
//! there is no copy.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use memfold_host::progress::Progress;
use memfold_snapshot::Shelf;
use memfold_testkit::S3Server;
use memfold_transfer::{PullRequest, PushRequest, Remote, TransferError, push, remove};
use serde_json::{Value, json};

mod first_pages;
mod hosts;
mod streams;

use hosts::{Hosts, MIB, overlay, qemu_img, qemu_io, random, sum};

#[test]
fn a_snapshot_pulled_from_an_object_store_has_the_same_bytes_and_base_disks_of_its_own() {
    let hosts = Hosts::new();
    let saved = hosts.save("warm", 2, |_| {});
    let pushed = hosts.push("warm");
    assert_eq!(pushed.new_bytes, pushed.stored_bytes);
    let pulled = hosts.pull("warm").unwrap();
    assert_eq!(pulled.fetched_bytes, pulled.stored_bytes);
    let manifest = hosts.there.manifest("warm").unwrap();
    // The domain is the pulling host's choice.
    assert_eq!(
        (manifest.domain.as_deref(), manifest.sums),
        (Some("bank"), saved.sums)
    );
    for part in ["ram", "ram.sums", "devices"] {
        let read = |shelf: &Shelf| fs::read(shelf.path("warm").unwrap().join(part)).unwrap();
        assert!(read(&hosts.here) == read(&hosts.there), "{part}");
    }
    let place = hosts.there.path("warm").unwrap();
    let ram = fs::metadata(place.join("ram")).unwrap();
    assert!(ram.blocks() * 512 <= 7 * MIB, "holes stay holes");
    let info = ["info", "--output=json", "-f", "qcow2"].map(std::ffi::OsStr::new);
    let disk = place.join("disk0.qcow2");
    let info = qemu_img(&[&info[..], &[disk.as_os_str()]].concat());
    let info: Value = serde_json::from_str(&info).unwrap();
    assert_eq!(
        info["backing-filename"],
        place.join("base0").to_str().unwrap()
    );
    // The host of the push may be far away.
    fs::remove_file(hosts.path("base.img")).unwrap();
    qemu_io(disk.as_os_str(), "read -P 0x5a 64k 64k");
    qemu_io(disk.as_os_str(), "read -P 0 5M 64k");
    let restored = memfold_snapshot::restore::spec(
        &hosts.there,
        &hosts.there.manifest("warm").unwrap(),
        "web1",
    );
    assert_eq!(restored.unwrap().disks[0].path, disk);
}

#[test]
fn a_push_sends_only_chunks_missing_in_the_object_store_and_a_pull_fetches_only_new_ones() {
    let hosts = Hosts::new();
    hosts.save("first", 2, |_| {});
    hosts.save("second", 3, |_| {});
    hosts.save("third", 3, |_| {});
    let first = hosts.push("first");
    let second = hosts.push("second");
    // Of RAM, three of five chunks differ: 2 MiB that begin within a chunk.
    assert!(second.new_bytes < first.new_bytes && second.new_bytes >= 3 * MIB);
    assert!(
        hosts.push("third").new_bytes < 2 * MIB,
        "an overlay's header"
    );
    hosts.pull("first").unwrap();
    // The base image is there already.
    let second = hosts.pull("second").unwrap();
    assert!(second.fetched_bytes < second.stored_bytes - 2 * MIB);
    let inode = |name: &str| {
        let place = hosts.there.path(name).unwrap().join("base0");
        fs::metadata(place).unwrap().ino()
    };
    assert_eq!(inode("first"), inode("second"));
    hosts.there.remove("first").unwrap();
    hosts.there.remove("second").unwrap();
    hosts.pull("third").unwrap();
    assert_eq!(fs::read_dir(hosts.there.bases()).unwrap().count(), 1);
}

#[test]
fn if_a_chunk_is_damaged_or_missing_the_pull_of_a_snapshot_fails_and_a_later_one_goes_on() {
    let hosts = Hosts::new();
    hosts.save("warm", 2, |_| {});
    hosts.push("warm");
    let objects = hosts.objects("chunks");
    for object in &objects {
        let good = fs::read(object).unwrap();
        let mut bad = good.clone();
        let middle = bad.len() / 2;
        bad[middle] ^= 1;
        for wrong in [Some(bad), Some(good[..middle].to_vec()), None] {
            match &wrong {
                Some(bytes) => fs::write(object, bytes).unwrap(),
                None => fs::remove_file(object).unwrap(),
            }
            let told = hosts.pull("warm").unwrap_err();
            let hash = object.file_name().unwrap().to_str().unwrap();
            assert!(
                matches!(&told, TransferError::Damaged { object, .. } if object.ends_with(hash)),
                "{told}"
            );
            assert!(hosts.pulled().is_empty());
            // Otherwise the next pull would find what has arrived.
            hosts.there.remove("warm").unwrap();
            fs::write(object, &good).unwrap();
        }
    }
    hosts.pull("warm").unwrap();
    // As if the pull had been killed before its last step, and a page had not reached the disk.
    let place = hosts.there.path("warm").unwrap();
    let draft = place.with_file_name(".warm.pull");
    fs::rename(&place, &draft).unwrap();
    let ram = File::options().write(true).open(draft.join("ram")).unwrap();
    ram.write_all_at(&[0; 4096], 40 * MIB).unwrap();
    let disk = fs::metadata(draft.join("disk0.qcow2")).unwrap().len();
    let pulled = hosts.pull("warm").unwrap();
    // The disk has another header in the store.
    assert_eq!(pulled.fetched_bytes, MIB + disk);
    let ram = |shelf: &Shelf| fs::read(shelf.path("warm").unwrap().join("ram")).unwrap();
    assert!(ram(&hosts.here) == ram(&hosts.there));
    assert_eq!(hosts.pulled(), ["warm"]);
    let told = hosts.pull("warm").unwrap_err();
    assert!(told.to_string().contains("'warm' exists"), "{told}");
}

#[test]
fn a_snapshot_whose_memory_disk_or_device_state_was_changed_is_not_pushed() {
    for part in ["ram", "disk0.qcow2", "devices"] {
        let hosts = Hosts::new();
        hosts.save("warm", 2, |_| {});
        let path = hosts.here.path("warm").unwrap().join(part);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        let last = file.metadata().unwrap().len() - 1;
        let mut byte = [0];
        file.read_exact_at(&mut byte, last).unwrap();
        file.write_all_at(&[byte[0] ^ 1], last).unwrap();
        // Then nothing but a checksum shows the change.
        file.set_modified(modified).unwrap();
        let why = hosts.try_push("warm").unwrap_err();
        let why = memfold_host::chain(&why);
        assert!(
            why.contains("was changed since it was saved"),
            "{part}: {why}"
        );
        assert_eq!(hosts.remote().list().unwrap(), []);
    }
}

#[test]
fn after_an_interrupted_push_no_snapshot_is_listed_and_a_later_push_sends_the_rest() {
    let hosts = Hosts::new();
    hosts.save("warm", 2, |_| {});
    let all = hosts.push("warm");
    // As if the push had been killed before its last steps.
    for object in hosts
        .objects("snapshots")
        .iter()
        .chain(&hosts.objects("indexes"))
    {
        fs::remove_file(object).unwrap();
    }
    fs::remove_file(&hosts.objects("chunks")[0]).unwrap();
    assert!(hosts.remote().list().unwrap().is_empty());
    let told = hosts.pull("warm").unwrap_err();
    assert!(matches!(told, TransferError::Unknown { .. }), "{told}");
    let again = hosts.push("warm");
    assert!(again.new_bytes <= MIB && again.stored_bytes == all.stored_bytes);
    let request = PushRequest {
        name: "warm".into(),
        to: "warm".into(),
        key: None,
    };
    let told = push(&hosts.here, &hosts.remote(), &request, &Progress::default()).unwrap_err();
    assert!(matches!(told, TransferError::Taken { .. }), "{told}");
    let list = hosts.remote().list().unwrap();
    assert_eq!(
        (list.len(), list[0].vm.as_str(), list[0].signed),
        (1, "web1", false)
    );
}

/// Returns hosts with a pushed snapshot `warm`, and its description.
fn pushed() -> (Hosts, Value) {
    let hosts = Hosts::new();
    hosts.save("warm", 2, |_| {});
    hosts.push("warm");
    let text = fs::read(hosts.path("store/snapshots/warm.json")).unwrap();
    (hosts, serde_json::from_slice(&text).unwrap())
}

/// Returns why a description that was changed in the store is refused.
fn refusal(hosts: &Hosts, good: &Value, change: &dyn Fn(&mut Value)) -> String {
    let mut bad = good.clone();
    change(&mut bad);
    let path = hosts.path("store/snapshots/warm.json");
    fs::write(path, serde_json::to_vec(&bad).unwrap()).unwrap();
    let told = hosts.pull("warm").unwrap_err().to_string();
    assert!(hosts.pulled().is_empty());
    told
}

/// Returns a change of one value of a description.
fn set(pointer: &str, value: impl Into<Value>) -> impl Fn(&mut Value) {
    let (pointer, value) = (pointer.to_owned(), value.into());
    move |of| *of.pointer_mut(&pointer).unwrap() = value.clone()
}

#[test]
fn a_pulled_snapshot_whose_description_names_files_of_this_host_is_refused() {
    let (hosts, good) = pushed();
    let with = |change: &dyn Fn(&mut Value)| refusal(&hosts, &good, change);
    let disk = "/manifest/disks/0";
    for value in ["/etc/shadow", "../disk0.qcow2", "x/disk0.qcow2", ""] {
        let told = with(&set(&format!("{disk}/path"), value));
        let is_refused = ["not among its files", "a kind that no snapshot has"];
        assert!(
            is_refused.iter().any(|why| told.contains(why)),
            "{value}: {told}"
        );
    }
    let told = with(&set(&format!("{disk}/backing/0/path"), "/etc/shadow"));
    assert!(told.contains("/etc/shadow, which is not"), "{told}");
    let told = with(&set(&format!("{disk}/backing"), json!([])));
    assert!(
        told.contains("a backing file that its manifest does not name"),
        "{told}"
    );
    let told = with(&set(&format!("{disk}/format"), "raw"));
    assert!(told.contains("a kind that no snapshot has"), "{told}");
    let refers =
        json!({ "table": { "bytes": 0, "xxh3_128": "" }, "sources": ["/etc/shadow"], "pages": 0 });
    let told = with(&|of: &mut Value| {
        of["manifest"]["references"] = refers.clone();
        let files = of["files"].as_array_mut().unwrap();
        files.push(json!({ "name": "ram.refs", "bytes": 0 }));
    });
    assert!(told.contains("/etc/shadow"), "{told}");
    let told = with(&|of: &mut Value| of["manifest"]["spec"]["files"] = json!(["/etc/shadow"]));
    assert!(told.contains("/etc/shadow"), "{told}");
    let told =
        with(&|of: &mut Value| of["manifest"]["spec"]["boot"] = json!({ "kernel": "/etc/shadow" }));
    assert!(told.contains("/etc/shadow"), "{told}");
    for cloud_init in [
        json!({ "user_data": "/etc/shadow" }),
        json!({ "ssh_keys": ["/etc/ssh/ssh_host_ed25519_key"] }),
    ] {
        let told =
            with(&|of: &mut Value| of["manifest"]["spec"]["cloud_init"] = cloud_init.clone());
        assert!(told.contains("cloud-init"), "{told}");
    }
    for name in [
        "../x",
        "manifest.json",
        "base",
        "base0x",
        "disk0",
        "ram.zst",
    ] {
        let told = with(&set("/files/0/name", name));
        assert!(told.contains("names a file"), "{name}: {told}");
    }
    let told = with(&set("/files/0/bytes", u64::MAX));
    assert!(told.contains("chunks"), "{told}");
    let told = with(&set("/files/0/bytes", 65 * MIB));
    assert!(told.contains("has another length"), "{told}");
    // A table of 300 MiB, which would be read into memory as a whole. RAM of 1 TiB would allow it.
    let table = json!({ "bytes": 300 * MIB, "xxh3_128": "" });
    let told = with(&|of: &mut Value| {
        let ram = 1_u64 << 40;
        of["manifest"]["references"] = json!({ "table": table, "sources": [], "pages": 0 });
        of["manifest"]["spec"]["memory"] = json!(ram);
        of["manifest"]["ram_bytes"] = json!(ram);
        let files = of["files"].as_array_mut().unwrap();
        let of_ram = files.iter_mut().find(|file| file["name"] == "ram");
        of_ram.unwrap()["bytes"] = json!(ram);
        files.push(json!({ "name": "ram.refs", "bytes": 300 * MIB }));
    });
    assert!(told.contains("its file ram.refs"), "{told}");
    let told = with(&set("/format", 2));
    assert!(told.contains("update memfold"), "{told}");
}

#[test]
fn a_pulled_snapshot_with_other_disks_options_or_sizes_than_a_save_makes_is_refused() {
    let (hosts, good) = pushed();
    let with = |change: &dyn Fn(&mut Value)| refusal(&hosts, &good, change);
    // Disks that no snapshot has: one more than was saved, a raw one of its own, a base that can be
    // written.
    let told = with(&|of: &mut Value| {
        let disks = of["manifest"]["spec"]["disks"].as_array_mut().unwrap();
        disks.push(json!({ "path": "/dev/sda", "format": "raw" }));
    });
    assert!(told.contains("other disks than were saved"), "{told}");
    let told = with(&|of: &mut Value| {
        let saved = &mut of["manifest"]["disks"][0];
        (saved["format"], saved["backing"]) = ("raw".into(), json!([]));
    });
    assert!(told.contains("a kind that no snapshot has"), "{told}");
    let told = with(&|of: &mut Value| {
        let base = of["manifest"]["disks"][0]["backing"][0]["path"].clone();
        let saved = &mut of["manifest"]["disks"][0];
        (saved["path"], saved["format"], saved["backing"]) = (base, "raw".into(), json!([]));
    });
    assert!(told.contains("a kind that no snapshot has"), "{told}");
    // Texts that become parts of QEMU's options.
    for machine in [
        "pc,initrd=/etc/shadow",
        "pc,hpet=off,kernel=on/x",
        "pc,",
        ",hpet=off",
        "a b",
    ] {
        let told = with(&set("/manifest/machine", machine));
        assert!(told.contains("machine type"), "{machine}: {told}");
    }
    let told = with(&|of: &mut Value| of["manifest"]["spec"]["cpu"] = "max file=/etc".into());
    assert!(told.contains("CPU model"), "{told}");
    let told = with(&set("/manifest/vm", "../web1"));
    assert!(told.contains("no valid name"), "{told}");
    let told = with(&|of: &mut Value| of["manifest"]["spec"]["swap"] = "1GiB".into());
    assert!(told.contains("swap disk"), "{told}");
    let agent = json!({ "words": [], "disks": [], "agent": "a,logfile=/etc/cron.d/x" });
    let told = with(&|of: &mut Value| of["manifest"]["spec"]["foreign"] = agent.clone());
    assert!(told.contains("--trust"), "{told}");
    // Tables that would fill the daemon's memory.
    let told = with(&|of: &mut Value| {
        of["manifest"]["sums"]["bytes"] = (1_u64 << 40).into();
        let files = of["files"].as_array_mut().unwrap();
        let sums = files
            .iter_mut()
            .find(|file| file["name"] == "ram.sums")
            .unwrap();
        sums["bytes"] = (1_u64 << 40).into();
    });
    assert!(told.contains("ram.sums"), "{told}");
    let arguments = json!(["-chardev", "file,id=x,path=/etc/passwd"]);
    let told = with(&|of: &mut Value| of["manifest"]["spec"]["qemu_args"] = arguments.clone());
    assert!(
        told.contains("-chardev") && told.contains("--trust"),
        "{told}"
    );
}

#[test]
fn a_pulled_disk_whose_qcow2_header_names_another_file_of_this_host_is_refused() {
    let hosts = Hosts::new();
    let secret = hosts.path("secret");
    fs::write(&secret, random(5, MIB)).unwrap();
    hosts.save("warm", 2, |_| {});
    let place = hosts.here.path("warm").unwrap();
    let disk = place.join("disk0.qcow2");
    // A base that is a qcow2 image with a backing file of its own, told as the end of the chain.
    let base = hosts.path("base.img");
    fs::remove_file(&base).unwrap();
    overlay(&base, &secret, "raw");
    fs::remove_file(&disk).unwrap();
    overlay(&disk, &base, "qcow2");
    fs::remove_dir_all(&place).unwrap();
    let path = hosts.here.path("evil").unwrap();
    hosts.save("evil", 2, |_| {});
    let disk = path.join("disk0.qcow2");
    let words = ["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b"].map(std::ffi::OsStr::new);
    qemu_img(&[&words[..], &[base.as_os_str(), disk.as_os_str()]].concat());
    let text = fs::read(path.join("manifest.json")).unwrap();
    let mut manifest: Value = serde_json::from_slice(&text).unwrap();
    let facts = fs::metadata(&disk).unwrap();
    manifest["disks"][0]["modified_ns"] =
        (facts.mtime() * 1_000_000_000 + facts.mtime_nsec()).into();
    manifest["disks"][0]["xxh3_128"] = sum(&fs::read(&disk).unwrap()).into();
    let text = serde_json::to_vec(&manifest).unwrap();
    fs::write(path.join("manifest.json"), &text).unwrap();
    fs::write(path.join("manifest.sum"), format!("{}\n", sum(&text))).unwrap();
    hosts.push("evil");
    let told = hosts.pull("evil").unwrap_err().to_string();
    assert!(
        told.contains("a backing file that its manifest does not name"),
        "{told}"
    );
    assert!(hosts.pulled().is_empty());
}

#[test]
fn if_a_trusted_key_is_given_only_a_snapshot_signed_with_it_is_pulled() {
    let hosts = Hosts::new();
    hosts.save("warm", 2, |manifest| {
        manifest["spec"]["qemu_args"] = json!(["-device", "pvpanic"]);
    });
    let (private, public) = keys();
    let (_, other) = keys();
    let pull = |trust: &str| {
        hosts.pull_as(&PullRequest {
            from: "warm".into(),
            name: "warm".into(),
            domain: Some("shop".into()),
            trust: Some(trust.into()),
            allow_arguments: false,
        })
    };
    hosts.push("warm");
    let told = pull(&public).unwrap_err();
    assert!(matches!(told, TransferError::Unsigned { .. }), "{told}");
    fs::remove_file(hosts.path("store/snapshots/warm.json")).unwrap();
    let request = PushRequest {
        name: "warm".into(),
        to: "warm".into(),
        key: Some(private),
    };
    assert!(
        push(&hosts.here, &hosts.remote(), &request, &Progress::default())
            .unwrap()
            .signed
    );
    let told = pull(&other).unwrap_err();
    assert!(matches!(told, TransferError::Signature { .. }), "{told}");
    let path = hosts.path("store/snapshots/warm.json");
    let good = fs::read(&path).unwrap();
    let text = String::from_utf8(good.clone()).unwrap();
    fs::write(&path, text.replace("pvpanic", "pvpanik")).unwrap();
    let told = pull(&public).unwrap_err();
    assert!(matches!(told, TransferError::Unsigned { .. }), "{told}");
    fs::write(&path, good).unwrap();
    assert!(pull(&public).unwrap().trusted);
    let domain = hosts.there.manifest("warm").unwrap().spec.domain;
    assert_eq!(domain.as_deref(), Some("shop"));
}

/// Returns a private and a public key in PEM form.
fn keys() -> (String, String) {
    let key = openssl::pkey::PKey::generate_ed25519().unwrap();
    let text = |pem: Vec<u8>| String::from_utf8(pem).unwrap();
    (
        text(key.private_key_to_pem_pkcs8().unwrap()),
        text(key.public_key_to_pem().unwrap()),
    )
}

#[test]
fn removing_a_snapshot_from_an_object_store_removes_old_chunks_no_other_snapshot_uses() {
    let hosts = Hosts::new();
    hosts.save("first", 2, |_| {});
    hosts.save("second", 3, |_| {});
    hosts.push("first");
    hosts.push("second");
    let told = remove(&hosts.remote(), "none").unwrap_err();
    assert!(matches!(told, TransferError::Unknown { .. }), "{told}");
    // A push may be under way that needs young chunks.
    let young = remove(&hosts.remote(), "first").unwrap();
    assert!(
        young.objects_removed == 0 && young.objects_left > 3,
        "{young:?}"
    );
    let old = SystemTime::now() - Duration::from_secs(3 * 24 * 3600);
    for object in hosts
        .objects("chunks")
        .iter()
        .chain(&hosts.objects("indexes"))
    {
        File::options()
            .write(true)
            .open(object)
            .unwrap()
            .set_modified(old)
            .unwrap();
    }
    hosts.pull("second").unwrap();
    hosts.here.remove("first").unwrap();
    hosts.save("first", 4, |_| {});
    // A push sends old chunks again, so that no removal takes them meanwhile.
    let pushed = hosts.push("first");
    assert_eq!(pushed.new_bytes, pushed.stored_bytes);
    let removed = remove(&hosts.remote(), "first").unwrap();
    assert_eq!(removed.objects_removed, young.objects_left);
    hosts.there.remove("second").unwrap();
    fs::remove_dir_all(hosts.there.bases()).unwrap();
    hosts.pull("second").unwrap();
}

#[test]
fn a_snapshot_is_pushed_listed_pulled_and_removed_through_an_s3_server() {
    let mut hosts = Hosts::new();
    let server = match S3Server::start(&hosts.path("store")) {
        Ok(server) => server,
        Err(why) => memfold_testkit::skip!("{why}"),
    };
    hosts.s3 = Some(server.port);
    hosts.save("warm", 2, |_| {});
    hosts.save("other", 3, |_| {});
    assert!(hosts.remote().list().unwrap().is_empty());
    hosts.push("warm");
    assert!(hosts.push("other").new_bytes < 6 * MIB);
    let names = || -> Vec<String> {
        let list = hosts.remote().list().unwrap();
        list.into_iter().map(|snapshot| snapshot.name).collect()
    };
    assert_eq!(names(), ["other", "warm"]);
    let removed = remove(&hosts.remote(), "other").unwrap();
    assert!(removed.objects_left > 0, "{removed:?}");
    assert_eq!(names(), ["warm"]);
    hosts.pull("warm").unwrap();
    let ram = |shelf: &Shelf| fs::read(shelf.path("warm").unwrap().join("ram")).unwrap();
    assert!(ram(&hosts.here) == ram(&hosts.there));
    let told = hosts.pull("other").unwrap_err();
    assert!(matches!(told, TransferError::Unknown { .. }), "{told}");
}

#[test]
fn a_pull_does_not_write_to_a_base_disk_that_another_snapshot_uses() {
    let hosts = Hosts::new();
    hosts.save("first", 2, |_| {});
    hosts.push("first");
    hosts.pull("first").unwrap();
    let base = hosts.there.path("first").unwrap().join("base0");
    let before = fs::read(&base).unwrap();
    // A pull was killed after it had found the base here; then another snapshot got its name.
    let draft = base.parent().unwrap().with_file_name(".second.pull");
    fs::create_dir(&draft).unwrap();
    fs::hard_link(&base, draft.join("base0")).unwrap();
    let other = File::options().write(true).open(hosts.path("base.img"));
    other
        .unwrap()
        .write_all_at(&random(98, MIB), 2 * MIB)
        .unwrap();
    hosts.save("second", 3, |_| {});
    hosts.push("second");
    hosts.pull("second").unwrap();
    assert!(
        fs::read(&base).unwrap() == before,
        "the first snapshot's base has changed"
    );
    let second = fs::read(hosts.there.path("second").unwrap().join("base0")).unwrap();
    assert!(second == fs::read(hosts.path("base.img")).unwrap());
    // A base that was damaged here is fetched again, and does not spread.
    let file = File::options().write(true).open(&base).unwrap();
    file.write_all_at(b"damaged", MIB).unwrap();
    let request = PullRequest {
        from: "first".into(),
        name: "third".into(),
        domain: Some("bank".into()),
        ..PullRequest::default()
    };
    hosts.pull_as(&request).unwrap();
    let third = fs::read(hosts.there.path("third").unwrap().join("base0")).unwrap();
    assert!(third == before);
}

#[test]
fn pulled_snapshots_share_base_disks_only_within_a_trust_domain() {
    let hosts = Hosts::new();
    hosts.save("warm", 2, |_| {});
    hosts.push("warm");
    let pull = |name: &str, domain: Option<&str>| {
        let request = PullRequest {
            from: "warm".into(),
            name: name.into(),
            domain: domain.map(str::to_owned),
            ..PullRequest::default()
        };
        hosts.pull_as(&request).unwrap();
        fs::metadata(hosts.there.path(name).unwrap().join("base0"))
            .unwrap()
            .ino()
    };
    let bank = [pull("one", Some("bank")), pull("two", Some("bank"))];
    assert_eq!(bank[0], bank[1]);
    let others = [
        pull("three", Some("shop")),
        pull("four", None),
        pull("five", None),
    ];
    assert!(others[0] != bank[0] && others[1] != others[2]);
    for name in ["one", "two", "three", "four", "five"] {
        hosts.there.remove(name).unwrap();
    }
    assert_eq!(fs::read_dir(hosts.there.bases()).unwrap().count(), 0);
}

#[test]
fn a_missing_object_store_is_not_created_and_foreign_files_in_a_store_are_kept() {
    let hosts = Hosts::new();
    let missing = format!("file://{}/none", hosts.path("store").display());
    let told = Remote::open(&missing).unwrap_err();
    assert!(told.to_string().contains("no such directory"), "{told}");
    hosts.save("warm", 2, |_| {});
    hosts.push("warm");
    let data = hosts.path("data");
    fs::create_dir(&data).unwrap();
    let old = SystemTime::now() - Duration::from_secs(3 * 24 * 3600);
    let write = |path: PathBuf| {
        fs::write(&path, b"of another program").unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_modified(old).unwrap();
        path
    };
    let name = "0".repeat(64);
    let kept = [
        write(data.join("table")),
        write(data.join(&name)),
        write(hosts.path("store/chunks/notes")),
    ];
    std::os::unix::fs::symlink(&data, hosts.path("store/chunks/link")).unwrap();
    remove(&hosts.remote(), "warm").unwrap();
    assert!(kept.iter().all(|path| path.exists()));
}

/// A mounted file system, unmounted when the value is dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts a file system of `mib` MiB; `None` without the right to do so.
    fn mount(place: PathBuf, mib: u64) -> Option<Self> {
        fs::create_dir_all(&place).unwrap();
        let size = format!("size={mib}m");
        let mut command = Command::new("mount");
        command
            .args(["-t", "tmpfs", "-o", &size, "none"])
            .arg(&place);
        let is_done = command.status().is_ok_and(|status| status.success());
        is_done.then_some(Self(place))
    }

    fn resize(&self, options: &str) {
        let options = format!("remount,{options}");
        let mut command = Command::new("mount");
        let status = command.args(["-o", &options]).arg(&self.0).status();
        assert!(status.unwrap().success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_pull_to_a_full_disk_fails_with_the_missing_space_named_and_leaves_no_snapshot() {
    let hosts = Hosts::new();
    let Some(disk) = SmallDisk::mount(hosts.path("there"), 16) else {
        memfold_testkit::skip!("cannot mount a file system; run as root");
    };
    hosts.save("warm", 2, |_| {});
    hosts.push("warm");
    // Names with a dot are no snapshots.
    let filler = disk.0.join(".filler");
    fs::write(&filler, random(7, 11 * MIB)).unwrap();
    let told = hosts.pull("warm").unwrap_err();
    assert!(matches!(told, TransferError::Space { .. }), "{told}");
    let said = told.to_string();
    assert!(said.contains("free space there"), "{said}");
    assert!(hosts.pulled().is_empty());
    // QEMU stops VMs whose disks are on a full file system, so a twentieth of it stays free.
    let TransferError::Space { needed, .. } = &told else {
        panic!("{told}");
    };
    let free = needed.0 + (16 * MIB) / 20 / 2;
    fs::write(&filler, random(7, 16 * MIB - free)).unwrap();
    let told = hosts.pull("warm").unwrap_err();
    assert!(matches!(told, TransferError::Space { .. }), "{told}");
    fs::remove_file(&filler).unwrap();
    hosts.pull("warm").unwrap();
    let ram = |shelf: &Shelf| fs::read(shelf.path("warm").unwrap().join("ram")).unwrap();
    assert!(ram(&hosts.here) == ram(&hosts.there));
}

#[test]
fn a_pull_fails_at_every_step_at_which_its_disk_is_full_and_the_next_one_completes_the_snapshot() {
    let hosts = Hosts::new();
    let Some(disk) = SmallDisk::mount(hosts.path("there"), 64) else {
        memfold_testkit::skip!("cannot mount a file system; run as root");
    };
    hosts.save("warm", 2, |_| {});
    hosts.push("warm");
    let ram = |shelf: &Shelf| fs::read(shelf.path("warm").unwrap().join("ram")).unwrap();
    let original = ram(&hosts.here);
    // Each file needs an entry, so that each step that makes one fails in turn.
    let mut failed = 0;
    for entries in 2.. {
        disk.resize(&format!("nr_inodes={entries}"));
        let Err(told) = hosts.pull("warm") else { break };
        failed += 1;
        let told = memfold_host::chain(&told);
        assert!(told.contains("No space left"), "{entries} entries: {told}");
        assert!(hosts.pulled().is_empty());
    }
    assert!(failed >= 4, "failed {failed} times");
    assert!(ram(&hosts.there) == original);
    disk.resize("nr_inodes=1000");
    // Somebody else fills the disk while chunks arrive.
    let began = Instant::now();
    hosts.there.remove("warm").unwrap();
    hosts.pull("warm").unwrap();
    let usual = began.elapsed();
    let moments = std::env::var("MEMFOLD_PULL_FULL_DISKS").map_or(4, |n| n.parse().unwrap());
    let filler = disk.0.join(".filler");
    for moment in 0..moments {
        hosts.there.remove("warm").unwrap();
        let pulled = std::thread::scope(|scope| {
            let pull = scope.spawn(|| hosts.pull("warm"));
            std::thread::sleep(usual * moment / moments);
            // As much as fits.
            let _ = fs::write(&filler, vec![1; 80 << 20]);
            pull.join().unwrap()
        });
        assert_eq!(pulled.is_ok(), hosts.pulled() == ["warm"]);
        fs::remove_file(&filler).unwrap();
        if pulled.is_err() {
            hosts.pull("warm").unwrap();
        }
        assert!(ram(&hosts.there) == original);
    }
}
