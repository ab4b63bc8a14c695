//! Tests of snapshots of VMs without a guest: firmware that finds nothing to boot has enough state
//! to be saved.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use memfold_vm::{Qmp, VmDirectory};
use serde_json::{Value, json};

use crate::make_description_newer;
use crate::support::{Daemon, Small, code, err, out, refused};

/// Starts a VM that runs only its firmware.
fn run(daemon: &Daemon, name: &str, more: &[&str], words: &[&str]) -> Value {
    let start = ["vm", "run", "--name", name, "--memory", "32M", "--json"];
    let output = daemon.run(&[&start, more, &["--"], words].concat());
    assert_eq!(code(&output), 0, "{}", err(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn save(daemon: &Daemon, vm: &str, name: &str) -> Value {
    let saved = daemon.json(&["snapshot", "save", vm, name]);
    assert_eq!(saved["keep"], "all");
    let reason = saved["keep_reason"].as_str().unwrap();
    // Of a VM that runs from a snapshot, few pages have to be saved.
    let words = match &saved["parent"] {
        Value::Null => "no memfold-agent",
        _ => "differ from snapshot",
    };
    assert!(reason.contains(words), "{reason}");
    saved
}

fn stop(daemon: &Daemon, name: &str) {
    daemon.json(&["vm", "stop", name, "--timeout", "0"]);
}

fn qmp(daemon: &Daemon, vm: &str) -> Qmp {
    let socket = daemon.state().join("vms").join(vm).join("qmp.sock");
    Qmp::connect(&socket, Duration::from_secs(20)).unwrap()
}

fn write(path: &Path, bytes: &[u8]) -> String {
    std::fs::write(path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Returns the file of a VM's firmware variables, as QEMU names it.
fn flash(daemon: &Daemon, vm: &str) -> PathBuf {
    let devices = qmp(daemon, vm).query("query-block").unwrap();
    let device = devices
        .as_array()
        .unwrap()
        .iter()
        .find(|d| d["device"] == "pflash1")
        .unwrap();
    device["inserted"]["file"].as_str().unwrap().into()
}

#[test]
fn a_boot_snapshot_that_was_not_saved_before_the_daemon_ended_is_reported_by_the_next_daemon() {
    let mut daemon = Daemon::start();
    run(&daemon, "v", &["--boot-snapshot"], &["-S"]);
    let status = |daemon: &Daemon| daemon.json(&["vm", "list"])[0]["boot_snapshot"].clone();
    assert_eq!(status(&daemon), "pending");
    // The second restart says the same as the first.
    for _ in 0..2 {
        daemon.terminate();
        daemon.start_again();
        daemon.wait_adopted();
        let now = status(&daemon);
        let why = now["failed"].as_str().unwrap_or_default();
        assert!(why.contains("ended while the guest booted"), "{now}");
    }
}

#[test]
fn a_save_is_refused_while_only_the_reserve_of_its_file_system_is_free() {
    let daemon = Daemon::start();
    let shelf = Small::mount(&daemon.directory.path().join("snapshots"), "64m");
    run(&daemon, "v", &[], &[]);
    // A twentieth must stay free; the VM's small memory would fit.
    let filler = shelf.0.join(".filler");
    std::fs::write(&filler, vec![1; 61 << 20]).unwrap();
    let saved = daemon.run(&["snapshot", "save", "v", "s"]);
    let words = ["cannot save VM 'v'", "must stay free for VMs", "free space"];
    refused(&saved, 1, &words);
    assert_eq!(daemon.json(&["snapshot", "list"]), json!([]));
    std::fs::remove_file(&filler).unwrap();
    save(&daemon, "v", "s");
}

#[test]
fn no_snapshot_is_removed_while_the_description_of_a_running_vm_cannot_be_read() {
    let daemon = Daemon::start();
    run(&daemon, "v", &[], &[]);
    save(&daemon, "v", "s");
    stop(&daemon, "v");
    daemon.paused_vm("web", &[]);
    let place = VmDirectory::of(&daemon.state(), "web");
    let description = std::fs::read(place.spec()).unwrap();
    make_description_newer(&place);
    let remove = || daemon.run(&["snapshot", "remove", "s"]);
    let fix = format!("mend {}, or stop the VM", place.spec().display());
    refused(&remove(), 1, &["VM 'web'", "snapshot 's'", &fix]);
    std::fs::write(place.spec(), description).unwrap();
    let removed = remove();
    assert_eq!(code(&removed), 0, "{}", err(&removed));
}

#[test]
fn each_restored_vm_has_a_private_copy_of_the_firmware_variables() {
    let daemon = Daemon::start();
    let place = daemon.directory.path();
    let firmware = std::fs::read("/usr/share/seabios/bios-256k.bin").unwrap();
    let flash_code = write(&place.join("code.fd"), &firmware);
    let before = vec![0xff; 128 << 10];
    let vars = write(&place.join("va,rs.fd"), &before);
    let flashes = [
        "-drive".to_owned(),
        format!("if=pflash,unit=0,format=raw,readonly=on,file={flash_code}"),
        "-drive".to_owned(),
        format!(
            "if=pflash,unit=1,format=raw,file={}",
            vars.replace(',', ",,")
        ),
        "-serial".to_owned(),
        format!("file:{}", place.join("said").display()),
    ];
    let flashes: Vec<&str> = flashes.iter().map(String::as_str).collect();
    run(&daemon, "first", &[], &flashes);
    save(&daemon, "first", "one");
    let writes = |vm: &str, byte: &str| {
        let line = format!("qemu-io pflash1 \"write -P {byte} 4096 512\"");
        let said =
            qmp(&daemon, vm).execute("human-monitor-command", json!({ "command-line": line }));
        let said = said.unwrap();
        assert!(!said.as_str().unwrap().contains("error"), "{said}");
    };
    let byte = |path: &Path| std::fs::read(path).unwrap()[4096];
    // A VM beside the first, whose file the second could not have opened; and a VM from a snapshot
    // of a VM that itself was restored.
    daemon.json(&["snapshot", "restore", "one", "--as", "second", "--force"]);
    writes("second", "0x5a");
    let of_second = flash(&daemon, "second");
    assert_eq!(byte(&of_second), 0x5a);
    assert!(
        std::fs::read(&vars).unwrap() == before,
        "a clone wrote the variables of the VM that was saved"
    );
    save(&daemon, "second", "two");
    stop(&daemon, "second");
    assert!(!of_second.exists());
    daemon.json(&["snapshot", "restore", "two", "--as", "third", "--force"]);
    writes("third", "0x5b");
    assert!(std::fs::read(&vars).unwrap() == before);
    // It does not matter that the firmware's package was updated since, because the firmware's
    // contents are in the saved RAM.
    write(Path::new(&flash_code), &vec![0; firmware.len()]);
    // The VM gets disks of its own that stay.
    let own = place.join("own");
    std::fs::create_dir(&own).unwrap();
    daemon.json(&[
        "snapshot",
        "restore",
        "two",
        "--as",
        "fourth",
        "--force",
        "--disks",
        own.to_str().unwrap(),
    ]);
    writes("fourth", "0x5c");
    let kept = flash(&daemon, "fourth");
    assert!(kept.starts_with(&own), "{}", kept.display());
    save(&daemon, "fourth", "three");
    stop(&daemon, "fourth");
    assert_eq!(byte(&kept), 0x5c);
    // The snapshot's files are unchanged.
    for name in ["one", "two", "three"] {
        let output = daemon.run(&["snapshot", "verify", name]);
        assert!(
            out(&output).contains("unchanged since it was saved"),
            "{}{}",
            out(&output),
            err(&output)
        );
    }
    std::fs::write(place.join("snapshots/two/file0"), "other").unwrap();
    refused(
        &daemon.run(&["snapshot", "restore", "two", "--as", "fifth"]),
        1,
        &["file0"],
    );
    assert!(std::fs::read(&vars).unwrap() == before);
}

#[test]
fn a_save_is_refused_if_the_vm_writes_a_file_that_cannot_be_copied() {
    let daemon = Daemon::start();
    let place = daemon.directory.path();
    let memory = write(&place.join("memory"), &vec![0; 1 << 20]);
    let floppy = write(&place.join("floppy"), &vec![0; 1_474_560]);
    let card = write(&place.join("unused"), &vec![0; 1 << 20]);
    let shared = format!("memory-backend-file,id=m,size=1M,share=on,mem-path={memory}");
    let large = place.join("large");
    std::fs::File::create(&large)
        .unwrap()
        .set_len(65 << 20)
        .unwrap();
    let log = format!("file,id=c,append=on,path={}", large.display());
    let node = format!("driver=raw,node-name=n,file.driver=file,file.filename={card}");
    for (words, named) in [
        (vec!["-object", &shared], memory.as_str()),
        (vec!["-fda", &floppy], "floppy0"),
        (vec!["-chardev", &log], large.to_str().unwrap()),
    ] {
        run(&daemon, "one", &[], &words);
        let output = daemon.run(&["snapshot", "save", "one", "x", "--keep", "all"]);
        refused(&output, 1, &[named]);
        stop(&daemon, "one");
    }
    // A file that no device uses is copied like a log.
    run(&daemon, "one", &[], &["-blockdev", &node]);
    save(&daemon, "one", "x");
    daemon.json(&["snapshot", "restore", "x", "--as", "two", "--force"]);
    let pid = daemon
        .json(&["vm", "list"])
        .as_array()
        .unwrap()
        .iter()
        .find(|vm| vm["name"] == "two")
        .unwrap()["pid"]
        .clone();
    let inode = std::fs::metadata(&card).unwrap().ino();
    let open = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten();
    assert!(
        open.filter_map(|fd| std::fs::metadata(fd.path()).ok())
            .all(|facts| facts.ino() != inode)
    );
}

/// A loop device, which is removed when this is dropped.
struct Loop(PathBuf);

impl Loop {
    fn of(file: &Path) -> Option<Self> {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(file)
            .output()
            .ok()?;
        let name = out(&output).trim().to_owned();
        output.status.success().then(|| Self(name.into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.0)
            .status();
    }
}

fn link(link: &Path, to: &Loop) {
    let _ = std::fs::remove_file(link);
    std::os::unix::fs::symlink(&to.0, link).unwrap();
}

#[test]
fn a_restore_accepts_the_same_block_device_after_a_reboot_and_refuses_a_changed_device() {
    let daemon = Daemon::start();
    let place = daemon.directory.path();
    let (a, b) = (place.join("a"), place.join("b"));
    write(&a, &[1].repeat(8 << 20));
    write(&b, &[2].repeat(8 << 20));
    let Some(first) = Loop::of(&a) else {
        memfold_testkit::skip!("no loop devices");
    };
    let disk = place.join("disk");
    link(&disk, &first);
    let path = disk.to_str().unwrap();
    run(&daemon, "one", &["--disk", path, "--snapshot"], &[]);
    let saved = save(&daemon, "one", "x");
    assert_eq!(
        saved["spec"]["disks"][0]["path"], path,
        "the link was not kept"
    );
    let verify = |name: &str| daemon.run(&["snapshot", "verify", name]);
    let restore = |name: &str| daemon.run(&["snapshot", "restore", name, "--as", "two", "--force"]);
    let fits = |name: &str| {
        let output = verify(name);
        assert_eq!(code(&output), 0, "{}{}", out(&output), err(&output));
        let output = restore(name);
        assert_eq!(code(&output), 0, "{}", err(&output));
        stop(&daemon, "two");
    };
    let broken = |name: &str, words: &[&str]| {
        let output = verify(name);
        assert_eq!(code(&output), 1);
        for word in words {
            assert!(
                out(&output).contains(word),
                "no '{word}' in {}",
                out(&output)
            );
        }
        refused(&restore(name), 1, words);
    };
    fits("x");
    stop(&daemon, "one");
    // As after a boot of the host, another device has this number now.
    drop(first);
    let other = Loop::of(&b).unwrap();
    let again = Loop::of(&a).unwrap();
    link(&disk, &other);
    broken("x", &["another device", path, again.0.to_str().unwrap()]);
    link(&disk, &again);
    fits("x");
    let put = |byte: u8, at: u64| {
        let device = std::fs::File::options().write(true).open(&again.0).unwrap();
        device.write_all_at(&[byte], at).unwrap();
        device.sync_all().unwrap();
    };
    put(9, 5 << 20);
    broken("x", &["other content", path]);
    put(1, 5 << 20);
    fits("x");
    // A change within one boot is also found in a part that is not sampled, and if the bytes are
    // the same again.
    run(&daemon, "one", &["--disk", path, "--snapshot"], &[]);
    save(&daemon, "one", "y");
    fits("y");
    // The file that the last save has replaced is still open, and has no name any more.
    save(&daemon, "one", "z");
    put(1, 5 << 20);
    broken("y", &["was written to", path]);
    stop(&daemon, "one");
}

/// Changes a field in a snapshot's manifest.
fn change(daemon: &Daemon, name: &str, field: &str, value: Value) {
    let place = daemon.directory.path().join("snapshots").join(name);
    let text = std::fs::read_to_string(place.join("manifest.json")).unwrap();
    let mut manifest: Value = serde_json::from_str(&text).unwrap();
    manifest[field] = value;
    let text = serde_json::to_string(&manifest).unwrap();
    let sum = xxhash_rust::xxh3::xxh3_128(text.as_bytes());
    std::fs::write(place.join("manifest.json"), text).unwrap();
    std::fs::write(place.join("manifest.sum"), format!("{sum:032x}\n")).unwrap();
}

#[test]
fn a_restore_is_refused_if_the_cpu_or_machine_type_or_qemu_lacks_a_saved_feature() {
    let words = tempfile::NamedTempFile::new().unwrap();
    let say = |text: &str| std::fs::write(words.path(), text).unwrap();
    let daemon = Daemon::start_with_words(words.path());
    let restore = |name: &str| daemon.run(&["snapshot", "restore", name, "--as", "two", "--force"]);
    run(&daemon, "one", &[], &[]);
    let saved = save(&daemon, "one", "x");
    assert!(
        saved["cpu"]["features"]
            .as_array()
            .unwrap()
            .contains(&json!("popcnt"))
    );
    say("-cpu max,popcnt=off,smep=off");
    refused(&restore("x"), 1, &["popcnt", "smep", "lacks"]);
    let verified = daemon.run(&["snapshot", "verify", "x"]);
    assert_eq!(code(&verified), 1);
    assert!(out(&verified).contains("popcnt"), "{}", out(&verified));
    assert_eq!(
        daemon.json(&["vm", "list"]).as_array().unwrap().len(),
        1,
        "what was refused is left"
    );
    say("");
    assert_eq!(code(&restore("x")), 0);
    stop(&daemon, "two");
    // All hosts of a fleet support this CPU model; further features of this host do not matter.
    run(&daemon, "old", &["--cpu", "Nehalem-v1"], &[]);
    let old = save(&daemon, "old", "y");
    assert_eq!(old["cpu"]["model"], "Nehalem-v1-x86_64-cpu");
    say("-cpu max");
    assert_eq!(code(&restore("y")), 0);
    stop(&daemon, "two");
    say("");
    change(&daemon, "x", "machine", json!("pc-q35-1.0"));
    refused(&restore("x"), 1, &["machine type", "pc-q35-1.0"]);
    change(&daemon, "x", "qemu", json!([99, 0, 0]));
    refused(&restore("x"), 1, &["QEMU", "99.0.0"]);
}

#[test]
fn snapshot_verify_tests_a_restore_without_disturbing_running_vms() {
    let words = tempfile::NamedTempFile::new().unwrap();
    let say = |text: &str| std::fs::write(words.path(), text).unwrap();
    let daemon = Daemon::start_with_words(words.path());
    let place = daemon.directory.path();
    let iso = write(&place.join("cd.iso"), &[3].repeat(1 << 20));
    let socket = place.join("serial");
    let serial = format!("socket,id=c,server=on,wait=off,path={}", socket.display());
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let net = format!("user,id=n,hostfwd=tcp:127.0.0.1:{port}-:22");
    run(
        &daemon,
        "one",
        &[],
        &[
            "-cdrom",
            &iso,
            "-chardev",
            &serial,
            "-device",
            "isa-serial,chardev=c",
            "-netdev",
            &net,
            "-device",
            "e1000,netdev=n,romfile=",
        ],
    );
    save(&daemon, "one", "x");
    let verify = || {
        let output = daemon.run(&["snapshot", "verify", "x"]);
        (code(&output), out(&output) + &err(&output))
    };
    let before = std::fs::metadata(&socket).unwrap().ino();
    assert_eq!(
        verify(),
        (0, "x: unchanged since it was saved\n".to_owned())
    );
    assert_eq!(
        std::fs::metadata(&socket).unwrap().ino(),
        before,
        "the VM that runs has lost its socket"
    );
    assert_eq!(daemon.json(&["vm", "list"]).as_array().unwrap().len(), 1);
    let left = std::fs::read_dir(daemon.state().join("trial/vms"))
        .unwrap()
        .count();
    assert_eq!(left, 0, "files of a trial");
    // This QEMU refuses the command line.
    say("-device nonesuch");
    let (failed, said) = verify();
    assert!(failed == 1 && said.contains("nonesuch"), "{said}");
    say("");
    // The medium was replaced by another one, or removed.
    let as_it_was = std::fs::metadata(&iso).unwrap().modified().unwrap();
    write(Path::new(&iso), &[4].repeat(1 << 20));
    let (failed, said) = verify();
    assert!(
        failed == 1 && said.contains("medium") && said.contains(&iso),
        "{said}"
    );
    refused(
        &daemon.run(&["snapshot", "restore", "x", "--as", "two", "--force"]),
        1,
        &["medium", &iso],
    );
    std::fs::remove_file(&iso).unwrap();
    let (failed, said) = verify();
    assert!(failed == 1 && said.contains(&iso), "{said}");
    write(Path::new(&iso), &[3].repeat(1 << 20));
    std::fs::File::options()
        .write(true)
        .open(&iso)
        .unwrap()
        .set_modified(as_it_was)
        .unwrap();
    assert_eq!(verify().0, 0);
}

#[test]
fn a_disk_image_has_the_given_format_and_a_format_that_contradicts_its_header_is_refused() {
    let daemon = Daemon::start();
    let place = daemon.directory.path();
    let image = place.join("disk.img");
    let path = image.to_str().unwrap();
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", path, "3M"])
        .status();
    assert!(made.unwrap().success());
    let start = |disk: &str| {
        daemon.run(&[
            "vm", "run", "--name", "one", "--memory", "32M", "--disk", disk, "--", "-S",
        ])
    };
    refused(&start(path), 1, &[path, "format=qcow2", "format=raw"]);
    refused(
        &start(&format!("{path},format=vmdk")),
        2,
        &["vmdk", "qcow2"],
    );
    let description = place.join("vm.toml");
    let described = |format: &str| {
        let text = format!(
            "name = 'one'\nmemory = '32M'\nqemu_args = ['-S']\n[[disks]]\npath = 'disk.img'\n{format}"
        );
        std::fs::write(&description, text).unwrap();
        daemon.run(&["vm", "run", "--file", description.to_str().unwrap()])
    };
    refused(&described(""), 1, &[path, "format=qcow2"]);
    // Returns the drivers of the disk, and bytes that the guest sees.
    let disk = || {
        let devices = qmp(&daemon, "one").query("query-block").unwrap();
        let devices = devices.as_array().unwrap().iter();
        let inserted = devices
            .map(|device| device["inserted"].clone())
            .find(|inserted| inserted["node-name"] == "disk0");
        let inserted = inserted.unwrap();
        (
            inserted["drv"].as_str().unwrap().to_owned(),
            inserted["image"]["virtual-size"].as_u64().unwrap(),
        )
    };
    let started = |output: Output| {
        assert_eq!(code(&output), 0, "{}", err(&output));
        let found = disk();
        stop(&daemon, "one");
        found
    };
    assert_eq!(
        started(start(&format!("{path},format=qcow2"))),
        ("qcow2".into(), 3 << 20)
    );
    assert_eq!(
        started(described("format = 'qcow2'")),
        ("qcow2".into(), 3 << 20)
    );
    // A raw disk to which its guest has written a header stays raw.
    let length = std::fs::metadata(&image)
        .unwrap()
        .len()
        .next_multiple_of(512);
    assert_eq!(
        started(start(&format!("{path},format=raw"))),
        ("raw".into(), length)
    );
    write(&place.join("x.qcow2"), &[0].repeat(1 << 20));
    let named = place.join("x.qcow2");
    refused(
        &start(named.to_str().unwrap()),
        1,
        &["not a qcow2 image", "format=raw"],
    );
}

#[test]
fn if_a_later_clone_does_not_start_the_json_output_names_the_clones_that_run() {
    let daemon = Daemon::start();
    run(&daemon, "one", &[], &[]);
    save(&daemon, "one", "warm");
    run(&daemon, "c-2", &[], &[]);
    let clone = ["clone", "warm", "--prefix", "c", "-n", "3"];
    let output = daemon.run(&[&clone[..], &["--no-wait", "--force", "--json"]].concat());
    refused(&output, 1, &["VM 'c-2' did not start; 1 others run"]);
    let clones: Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<&Value> = clones
        .as_array()
        .unwrap()
        .iter()
        .map(|clone| &clone["vm"]["name"])
        .collect();
    assert_eq!(names, ["c-1"]);
    for vm in ["one", "c-1", "c-2"] {
        stop(&daemon, vm);
    }
}

#[test]
fn a_vm_does_not_start_if_the_header_of_its_disk_names_other_files_than_at_its_first_start() {
    let daemon = Daemon::start();
    let place = daemon.directory.path();
    let base = write(&place.join("base.img"), &[1].repeat(1 << 20));
    let disk = place.join("disk.qcow2").to_str().unwrap().to_owned();
    let image = |arguments: &[&str]| {
        let made = Command::new("qemu-img").args(arguments).arg(&disk).status();
        assert!(made.unwrap().success());
    };
    let rebase = |base: &str| {
        image(&["rebase", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", base]);
    };
    image(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &base]);
    run(&daemon, "one", &["--disk", &disk], &[]);
    stop(&daemon, "one");
    rebase("/etc/hosts");
    refused(
        &daemon.run(&[
            "vm", "run", "--name", "one", "--memory", "32M", "--disk", &disk,
        ]),
        1,
        &["/etc/hosts", &base, "setfattr -x trusted.memfold.header"],
    );
    assert_eq!(daemon.json(&["vm", "list"]), serde_json::json!([]));
    // The disk is whole and usable as it was.
    rebase(&base);
    run(&daemon, "one", &["--disk", &disk], &[]);
    stop(&daemon, "one");
}

#[test]
fn a_snapshot_whose_disk_a_definition_or_a_running_vm_names_is_not_removed_and_the_user_is_named() {
    let daemon = Daemon::start();
    let place = daemon.directory.path();
    let disk = write(&place.join("disk.img"), &[1].repeat(1 << 20));
    run(
        &daemon,
        "one",
        &["--disk", &format!("{disk},format=raw"), "--snapshot"],
        &[],
    );
    save(&daemon, "one", "x");
    stop(&daemon, "one");
    let of_snapshot = place.join("snapshots/x/disk0.qcow2");
    let of_snapshot = of_snapshot.to_str().unwrap();
    // A disk of the user's own, built on the snapshot's.
    let own = place.join("own.qcow2");
    let made = Command::new("qemu-img")
        .args([
            "create",
            "-q",
            "-f",
            "qcow2",
            "-F",
            "qcow2",
            "-b",
            of_snapshot,
        ])
        .arg(&own)
        .status();
    assert!(made.unwrap().success());
    let file = place.join("web.toml");
    let remove = |more: &[&str]| daemon.run(&[&["snapshot", "remove", "x"], more].concat());
    for path in [of_snapshot, own.to_str().unwrap()] {
        let text = format!(
            "name = 'web'\nmemory = '32M'\nqemu_args = ['-S']\n[[disks]]\npath = '{path}'\nformat = 'qcow2'\nsnapshot = true\n"
        );
        daemon.json(&["vm", "define", &write(&file, text.as_bytes())]);
        for more in [&[][..], &["--merge"]] {
            refused(
                &remove(more),
                1,
                &["the definition of VM 'web'", "'x'", "vm undefine"],
            );
        }
        // A VM that was started like any other maps nothing of the snapshot.
        daemon.json(&["vm", "start", "web"]);
        daemon.json(&["vm", "undefine", "web"]);
        for more in [&[][..], &["--merge"]] {
            refused(
                &remove(more),
                1,
                &["in use by VM 'web'", "stop VM 'web' first"],
            );
        }
        stop(&daemon, "web");
    }
    assert_eq!(code(&daemon.run(&["snapshot", "verify", "x"])), 0);
    assert_eq!(code(&remove(&[])), 0);
}
