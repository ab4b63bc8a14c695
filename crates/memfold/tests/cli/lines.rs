//! Tests with QEMUs that other programs started, with various command lines. memfold attaches to
//! them and saves them, and VMs that are restored from the snapshots have the same devices.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use memfold_testkit::{skip, wait_for};
use memfold_vm::Qmp;
use serde_json::{Value, json};

use crate::support::{Daemon, code, err, out, refused};

const MIB: u64 = 1 << 20;

/// A QEMU that runs without a guest, and is ended when this is dropped.
struct Typed {
    child: Child,
    place: PathBuf,
}

impl Typed {
    /// Starts QEMU in a directory of its own below the daemon's. Its arguments are those of `line`,
    /// where `@` stands for the directory.
    fn start(daemon: &Daemon, name: &str, line: &str) -> Self {
        Self::start_by(daemon, name, line, Command::new("qemu-system-x86_64"))
    }

    fn start_by(daemon: &Daemon, name: &str, line: &str, mut command: Command) -> Self {
        let place = daemon.directory.path().join(name);
        std::fs::create_dir_all(&place).unwrap();
        for (file, byte, size) in [
            ("a.img", b'A', 8 * MIB),
            ("b.img", b'B', 8 * MIB),
            ("c.img", b'C', 8 * MIB),
            ("f.img", b'F', 1_474_560),
            ("code.fd", b'\xff', MIB / 2),
            ("vars.fd", b'V', MIB / 2),
            ("t.img", b'T', 512),
        ] {
            let file = place.join(file);
            if !file.exists() {
                std::fs::write(&file, [byte; 512]).unwrap();
                let opened = std::fs::File::options().write(true).open(&file).unwrap();
                opened.set_len(size).unwrap();
            }
        }
        let line = line.replace('@', place.to_str().unwrap());
        let child = command
            .args(["-display", "none", "-accel", "tcg"])
            .args(["-qmp", "unix:q,server=on,wait=off"])
            .args(["-qmp", "unix:spare,server=on,wait=off"])
            .args(line.split_whitespace())
            .current_dir(&place)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut typed = Self { child, place };
        wait_for("QEMU's monitor answers", Duration::from_secs(60), || {
            let ended = typed.child.try_wait().unwrap();
            assert!(ended.is_none(), "{name}: QEMU itself ended: {ended:?}");
            typed.try_monitor()
        });
        typed
    }

    fn try_monitor(&self) -> Result<Qmp, memfold_vm::QmpError> {
        Qmp::connect(&self.place.join("spare"), Duration::from_secs(20))
    }

    fn monitor(&self) -> Qmp {
        self.try_monitor().unwrap()
    }

    fn qmp(&self) -> String {
        self.place.join("q").display().to_string()
    }
}

impl Drop for Typed {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn is_root() -> bool {
    rustix::process::getuid().is_root()
}

#[track_caller]
fn done(daemon: &Daemon, arguments: &[&str]) -> String {
    let output = daemon.run(arguments);
    assert_eq!(code(&output), 0, "{arguments:?}: {}", err(&output));
    out(&output)
}

fn attach(daemon: &Daemon, typed: &Typed, name: &str) {
    done(daemon, &["vm", "attach", &typed.qmp(), "--name", name]);
}

/// Returns the monitor of a VM that runs from a snapshot.
fn monitor_of(daemon: &Daemon, vm: &str) -> Qmp {
    let socket = daemon.state().join(format!("vms/{vm}/qmp.sock"));
    Qmp::connect(&socket, Duration::from_secs(20)).unwrap()
}

/// Returns the first byte of an image that a QEMU with a working directory has open.
fn first_byte(image: &Value, at: &Path) -> String {
    let (file, format) = (image["filename"].as_str(), image["format"].as_str());
    let file = file.unwrap();
    let mut command = Command::new("qemu-io");
    command.args(["-r", "-U", "-c", "read -v 0 1"]);
    if !file.starts_with("json:") {
        command.args(["-f", format.unwrap()]);
    }
    let output = command.arg(file).current_dir(at).output().unwrap();
    let text = out(&output);
    let byte = text.split_whitespace().nth(1).map(str::to_owned);
    byte.unwrap_or_else(|| panic!("{image}: {text}{}", err(&output)))
}

/// Returns properties by which a guest recognizes its machine: devices with ids and addresses, and
/// the first bytes of each disk, by the device's address.
fn hardware(qmp: &mut Qmp, at: &Path) -> BTreeMap<String, String> {
    const TOLD: [&str; 7] = [
        "dev: ",
        "device_id = ",
        "serial = ",
        "addr = ",
        "mac = ",
        "unit = ",
        "index = ",
    ];
    let tree = qmp.human("info qtree").unwrap();
    let lines = tree.lines().map(str::trim);
    let told = lines.filter(|line| TOLD.iter().any(|start| line.starts_with(start)));
    let mut found: BTreeMap<String, String> =
        [("devices".to_owned(), told.collect::<Vec<_>>().join("\n"))].into();
    let queues = qmp.human("info network").unwrap();
    let queues = queues
        .lines()
        .filter(|line| line.contains("index="))
        .count();
    found.insert("queues".into(), queues.to_string());
    for device in qmp.query("query-block").unwrap().as_array().unwrap() {
        let place = format!("{} {}", device["device"], device["qdev"]);
        if device["inserted"].is_null() {
            found.insert(place, "empty".into());
            continue;
        }
        if place.contains("flash") {
            continue;
        }
        found.insert(place, first_byte(&device["inserted"]["image"], at));
    }
    found
}

/// Saves each QEMU, and compares it with the VM of its snapshot.
fn come_back(cases: &[(&str, &str)]) {
    if !is_root() {
        skip!("only root can restore VMs");
    }
    let daemon = Daemon::start();
    for (name, line) in cases {
        let typed = Typed::start(&daemon, name, line);
        let before = hardware(&mut typed.monitor(), &typed.place);
        attach(&daemon, &typed, name);
        done(&daemon, &["snapshot", "save", name, name, "--keep", "all"]);
        drop(typed);
        let (vm, own) = (format!("r-{name}"), daemon.directory.path().join("own"));
        let is_same = |what: &str| {
            let now = hardware(&mut monitor_of(&daemon, &vm), Path::new("/"));
            assert_eq!(now, before, "{name}, {what}: {line}");
        };
        let stop = || done(&daemon, &["vm", "stop", &vm, "--timeout", "0"]);
        done(&daemon, &["snapshot", "restore", name, "--as", &vm]);
        is_same("restored");
        // The VM is saved and restored like others, also with disks of its own.
        let again = format!("again-{name}");
        done(&daemon, &["snapshot", "save", &vm, &again, "--keep", "all"]);
        stop();
        std::fs::create_dir_all(&own).unwrap();
        let own = own.to_str().unwrap();
        done(
            &daemon,
            &["snapshot", "restore", &again, "--as", &vm, "--disks", own],
        );
        is_same("with disks of its own");
        let last = format!("own-{name}");
        done(&daemon, &["snapshot", "save", &vm, &last, "--keep", "all"]);
        stop();
    }
}

#[test]
fn a_restored_vm_has_the_same_disks_for_every_form_of_drive_option() {
    come_back(&[
        (
            "index",
            "-M q35 -m 64 -drive if=virtio,index=1,format=raw,file=b.img -drive if=virtio,index=0,format=raw,file=a.img",
        ),
        (
            "short",
            "-M q35 -m 64 -hdb b.img -fda f.img -cdrom c.img a.img",
        ),
        (
            "pc",
            "-M pc -m 64 -drive file=a.img,format=raw -drive index=3,file=b.img,format=raw,werror=stop -drive if=ide,media=cdrom,file=c.img,format=raw -fdb f.img",
        ),
        (
            "scsi",
            "-M q35 -m 64 -device virtio-scsi-pci -drive if=none,id=d7,format=raw,file=a.img -device scsi-hd,drive=d7 \
             -blockdev driver=raw,node-name=n,file.driver=file,file.filename=b.img -device scsi-hd,drive=n,id=own -drive if=none,format=raw,file=c.img -device scsi-cd,drive=none1",
        ),
        (
            "flash",
            "-M q35 -m 64 -drive if=pflash,format=raw,readonly=on,file=code.fd -drive if=pflash,id=drive-efidisk0,format=raw,file=vars.fd",
        ),
        (
            "empty",
            "-M q35 -m 64 -nodefaults -drive if=none,id=cd -device ide-cd,drive=cd -drive if=ide,index=4,media=cdrom -drive if=floppy,unit=0 -device qemu-xhci -drive if=none,id=u,format=raw,file=a.img -device usb-storage,drive=u",
        ),
    ]);
}

#[test]
fn a_restored_vm_has_the_same_ports_and_networks() {
    come_back(&[
        (
            "first",
            "-M q35 -m 64 -chardev null,id=c -serial chardev:c -watchdog-action reset -device i6300esb -k en-us -mem-prealloc -name x",
        ),
        (
            "shared",
            "-M q35 -m 64 -nodefaults -nographic -chardev socket,path=s,server=on,wait=off,id=c,mux=on -mon chardev=c -device virtio-serial-pci -device virtconsole,chardev=c -serial chardev:c -serial null -debugcon file:log",
        ),
        (
            "usb",
            "-M q35 -m 64 -nodefaults -nographic -chardev socket,id=serial0,path=s,server=on,wait=off -device isa-serial,chardev=serial0 -device qemu-xhci -usbdevice tablet -device usb-ccid -chardev null,id=k -device ccid-card-passthru,chardev=k -chardev null,id=r -device usb-redir,chardev=r -audiodev none,id=s -device intel-hda -device hda-duplex,audiodev=s",
        ),
        (
            "json",
            r#"-M q35 -m 64 -netdev {"type":"socket","id":"n","mcast":"230.0.0.1:17234"} -device {"driver":"virtio-net-pci","netdev":"n","addr":"0x9"} -net nic,model=rtl8139 -net user"#,
        ),
    ]);
}

#[test]
fn a_restored_vm_has_the_same_memory_devices_and_option_files() {
    let dimms = (0..70).map(|n| {
        format!("-object memory-backend-ram,id=m{n},size=2M -device pc-dimm,id=d{n},memdev=m{n}")
    });
    let dimms: Vec<String> = dimms.collect();
    let dimms = format!("-M q35 -m 64,slots=80,maxmem=4G {}", dimms.join(" "));
    come_back(&[
        (
            "plugged",
            "-M q35 -m 64,maxmem=1G -object memory-backend-ram,id=vm0,size=128M -device virtio-mem-pci,memdev=vm0,id=v,requested-size=64M",
        ),
        ("dimms", &dimms),
        (
            "files",
            "-M q35 -m 64 -fw_cfg name=opt/a,file=a.img -smbios type=1,serial=x -acpitable data=t.img,sig=TEST -seed 7 -device e1000,id=n,romfile= -set device.n.addr=7",
        ),
    ]);
}

#[test]
fn a_restored_network_card_has_the_same_number_of_queues() {
    if !Path::new("/dev/net/tun").exists() {
        skip!("there is no /dev/net/tun");
    }
    come_back(&[(
        "queues",
        "-M q35 -m 64 -netdev tap,id=n,queues=2,script=no,downscript=no -device virtio-net-pci,netdev=n,mq=on,vectors=6",
    )]);
}

#[test]
fn a_restored_vm_has_the_same_options_from_a_file_of_qemus_option_readconfig() {
    if !is_root() {
        skip!("only root can restore VMs");
    }
    let daemon = Daemon::start();
    let place = daemon.directory.path().join("config");
    std::fs::create_dir(&place).unwrap();
    let text = "[memory]\n size = \"64\"\n[smp-opts]\n cpus = \"2\"\n[boot-opts]\n menu = \"on\"\n[device \"n\"]\n driver = \"e1000\"\n[drive \"d\"]\n if = \"virtio\"\n file = \"b.img\"\n format = \"raw\"\n";
    std::fs::write(place.join("vm.cfg"), text).unwrap();
    let typed = Typed::start(&daemon, "config", "-M q35 -readconfig vm.cfg");
    let before = hardware(&mut typed.monitor(), &typed.place);
    attach(&daemon, &typed, "config");
    let saved = daemon.json(&["snapshot", "save", "config", "config", "--keep", "all"]);
    assert_eq!(saved["spec"]["vcpus"], 2, "{saved}");
    drop(typed);
    done(&daemon, &["snapshot", "restore", "config", "--as", "r"]);
    assert_eq!(
        hardware(&mut monitor_of(&daemon, "r"), Path::new("/")),
        before
    );
}

/// Checks that a save is refused, that the VM keeps running, and that no snapshot exists.
fn is_refused(daemon: &Daemon, typed: &Typed, name: &str, words: &[&str]) {
    let output = daemon.run(&["snapshot", "save", name, name, "--keep", "all"]);
    refused(&output, 1, words);
    let status = typed.monitor().query("query-status").unwrap();
    assert_eq!(status["status"], "running");
    let list = daemon.json(&["snapshot", "list"]);
    assert_eq!(list, json!([]));
}

#[test]
fn if_a_vm_could_not_be_restored_its_save_is_refused_with_qemus_error() {
    let daemon = Daemon::start();
    let line = "-M q35 -m 64 -fw_cfg name=opt/a,file=gone";
    std::fs::create_dir(daemon.directory.path().join("gone")).unwrap();
    std::fs::write(daemon.directory.path().join("gone/gone"), "text").unwrap();
    let typed = Typed::start(&daemon, "gone", line);
    std::fs::remove_file(typed.place.join("gone")).unwrap();
    attach(&daemon, &typed, "gone");
    is_refused(
        &daemon,
        &typed,
        "gone",
        &["could not be restored", "can't load", "gone"],
    );
    drop(typed);
    // This QEMU starts, but would be another machine.
    let typed = Typed::start(
        &daemon,
        "other",
        "-M q35 -m 64 -device qemu-xhci -device usb-tablet,id=t7",
    );
    typed
        .monitor()
        .execute("device_del", json!({ "id": "t7" }))
        .unwrap();
    wait_for("the device is gone", Duration::from_secs(60), || {
        let tree = typed.monitor().human("info qtree").unwrap();
        if tree.contains("t7") {
            Err("it is there")
        } else {
            Ok(())
        }
    });
    attach(&daemon, &typed, "other");
    is_refused(
        &daemon,
        &typed,
        "other",
        &["machine would differ", "usb-tablet", "t7", "would be new"],
    );
}

#[test]
fn if_a_save_would_crash_qemu_it_is_refused_and_the_vm_keeps_running() {
    let daemon = Daemon::start();
    // QEMU 10.0 crashes when it saves such a card; a QEMU that does not crash is saved.
    let line = "-M q35 -m 64 -device pci-serial-2x,chardev1=a,chardev2=b -chardev null,id=a -chardev null,id=b";
    let typed = Typed::start(&daemon, "fragile", line);
    attach(&daemon, &typed, "fragile");
    let output = daemon.run(&["snapshot", "save", "fragile", "fragile", "--keep", "all"]);
    if code(&output) != 0 {
        refused(&output, 1, &["cannot save the VM's devices"]);
    }
    let status = typed.monitor().query("query-status").unwrap();
    assert_eq!(status["status"], "running");
}

#[test]
fn a_save_of_a_vm_with_an_unsupported_qemu_option_is_refused_and_names_the_option() {
    let daemon = Daemon::start();
    let typed = Typed::start(
        &daemon,
        "ram",
        "-M q35 -m 64 -mem-prealloc -name x -mem-path /dev/shm -vga std",
    );
    attach(&daemon, &typed, "ram");
    is_refused(
        &daemon,
        &typed,
        "ram",
        &["-mem-path /dev/shm", "RAM is a file"],
    );
}

/// Returns the host ports that a QEMU forwards.
fn forwarded(qmp: &mut Qmp) -> Vec<u16> {
    let text = qmp.human("info usernet").unwrap();
    let lines = text.lines().filter(|line| line.contains("HOST_FORWARD"));
    lines
        .filter_map(|line| line.split_whitespace().nth(3)?.parse().ok())
        .collect()
}

#[test]
fn a_clone_does_not_get_the_forwarded_port_of_its_vm_but_another_port_or_none() {
    if !is_root() {
        skip!("only root can restore VMs");
    }
    let daemon = Daemon::start();
    let line = "-M q35 -m 64 -netdev user,id=n,hostfwd=tcp:127.0.0.1:0-:22 -device virtio-net-pci,netdev=n -vnc unix:display";
    let typed = Typed::start(&daemon, "typed", line);
    attach(&daemon, &typed, "typed");
    let said = done(
        &daemon,
        &["snapshot", "save", "typed", "typed", "--keep", "all"],
    );
    for word in [
        "network n: hostfwd=tcp:127.0.0.1:0-:22",
        "-vnc unix:display",
        "--forward",
    ] {
        assert!(said.contains(word), "{said}");
    }
    let none = daemon.json(&["snapshot", "restore", "typed", "--as", "none", "--force"]);
    assert_eq!(none["forwards"], json!([]));
    assert!(none["left_out"].to_string().contains("hostfwd"), "{none}");
    assert!(forwarded(&mut monitor_of(&daemon, "none")).is_empty());
    done(&daemon, &["vm", "stop", "none", "--timeout", "0"]);
    let own = [
        "snapshot",
        "restore",
        "typed",
        "--as",
        "own",
        "--forward",
        "0:22",
        "--force",
    ];
    let own = daemon.json(&own);
    let port = port_of(&own);
    assert_eq!(forwarded(&mut monitor_of(&daemon, "own")), [port]);
    let taken = format!("{port}:22");
    let output = daemon.run(&[
        "snapshot",
        "restore",
        "typed",
        "--as",
        "late",
        "--forward",
        &taken,
        "--force",
    ]);
    refused(&output, 1, &[&taken, "in use", "host port 0"]);
    let output = daemon.run(&["clone", "typed", "-n", "2", "--forward", &taken, "--force"]);
    refused(&output, 1, &["--forward 0:GUEST-PORT"]);
}

fn port_of(vm: &Value) -> u16 {
    let forward = vm["forwards"][0].as_str().unwrap_or_else(|| panic!("{vm}"));
    forward.split(':').nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_second_vm_from_the_same_snapshot_runs_without_the_forwarded_port_of_the_first() {
    if !is_root() {
        skip!("only root can restore VMs");
    }
    let daemon = Daemon::start();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let typed = other.local_addr().unwrap().port();
    drop(other);
    let more = format!("user,id=n,hostfwd=tcp:127.0.0.1:{typed}-:80");
    let run = [
        "vm",
        "run",
        "--name",
        "first",
        "--memory",
        "64M",
        "--forward",
        "0:22",
        "--",
        "-netdev",
        &more,
        "-device",
        "e1000,netdev=n",
    ];
    done(&daemon, &run);
    let vms = daemon.json(&["vm", "list"]);
    let port = port_of(&vms[0]);
    let save = ["snapshot", "save", "first", "s", "--keep", "all"];
    let saved = daemon.json(&save);
    let told = saved["of_one_vm"].to_string();
    for port in [port, typed] {
        assert!(told.contains(&port.to_string()), "{told}");
    }
    let second = daemon.json(&["snapshot", "restore", "s", "--as", "second", "--force"]);
    assert_eq!(second["forwards"], json!([]));
    let left = second["left_out"].to_string();
    for port in [port, typed] {
        assert!(left.contains(&port.to_string()), "{left}");
    }
    assert!(forwarded(&mut monitor_of(&daemon, "second")).is_empty());
    for vm in ["first", "second"] {
        done(&daemon, &["vm", "stop", vm, "--timeout", "0"]);
    }
    // Both ports are free again.
    let third = daemon.json(&["snapshot", "restore", "s", "--as", "third"]);
    assert_eq!((port_of(&third), &third["left_out"]), (port, &json!([])));
    assert_eq!(forwarded(&mut monitor_of(&daemon, "third")).len(), 2);
}

/// Returns the name of a VM's tap.
fn tap(daemon: &Daemon, vm: &str) -> String {
    let text = monitor_of(daemon, vm).human("info network").unwrap();
    let (_, rest) = text
        .split_once("ifname=")
        .unwrap_or_else(|| panic!("{text}"));
    rest.split([',', '\r', '\n']).next().unwrap().to_owned()
}

#[test]
fn a_second_vm_from_the_same_snapshot_gets_another_tap_device() {
    if !is_root() {
        skip!("only root can make taps");
    }
    let daemon = Daemon::start();
    let name = format!("mf{}", std::process::id());
    let net = format!("tap,id=n,ifname={name},script=no,downscript=no");
    let run = [
        "vm", "run", "--name", "first", "--memory", "64M", "--", "-netdev", &net,
    ];
    done(
        &daemon,
        &[&run[..], &["-device", "e1000,netdev=n"]].concat(),
    );
    assert_eq!(tap(&daemon, "first"), name);
    let saved = daemon.json(&["snapshot", "save", "first", "s", "--keep", "all"]);
    assert!(saved["of_one_vm"].to_string().contains(&name), "{saved}");
    let second = daemon.json(&["snapshot", "restore", "s", "--as", "second", "--force"]);
    let left = second["left_out"].to_string();
    assert!(left.contains(&format!("ifname={name}")), "{left}");
    assert_ne!(tap(&daemon, "second"), name);
    for vm in ["first", "second"] {
        done(&daemon, &["vm", "stop", vm, "--timeout", "0"]);
    }
    // The tap is free again.
    let third = daemon.json(&["snapshot", "restore", "s", "--as", "third"]);
    assert_eq!(
        (tap(&daemon, "third"), &third["left_out"]),
        (name, &json!([]))
    );
}

#[test]
fn if_qemu_runs_in_a_mount_namespace_its_files_are_read_in_that_namespace() {
    if !is_root() {
        skip!("only root can make mount namespaces");
    }
    let daemon = Daemon::start();
    let place = daemon.directory.path().join("inside");
    std::fs::create_dir(&place).unwrap();
    for (name, text) in [
        ("of", "the host's"),
        ("inner", "the container's"),
        ("link-target", "the host's, too"),
    ] {
        std::fs::write(place.join(name), text).unwrap();
    }
    std::fs::write(place.join("inner.img"), [b'I'; 4096]).unwrap();
    std::fs::write(place.join("a.img"), [b'H'; 4096]).unwrap();
    // An absolute link leads into the container, too.
    std::os::unix::fs::symlink(place.join("of"), place.join("link")).unwrap();
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        "mount --bind inner of && mount --bind inner.img a.img && exec qemu-system-x86_64 \"$@\"",
        "qemu",
    ]);
    let line = "-M q35 -m 64 -fw_cfg name=opt/a,file=@/of -fw_cfg name=opt/b,file=link -drive if=virtio,format=raw,file=@/a.img";
    let typed = Typed::start_by(&daemon, "inside", line, command);
    attach(&daemon, &typed, "inside");
    done(
        &daemon,
        &["snapshot", "save", "inside", "inside", "--keep", "all"],
    );
    drop(typed);
    for file in ["file0", "file1"] {
        let saved = daemon.directory.path().join("snapshots/inside").join(file);
        assert_eq!(std::fs::read_to_string(saved).unwrap(), "the container's");
    }
    done(
        &daemon,
        &["snapshot", "restore", "inside", "--as", "outside"],
    );
    let restored = hardware(&mut monitor_of(&daemon, "outside"), Path::new("/"));
    let disk = restored.iter().find(|(place, _)| place.contains("virtio0"));
    assert_eq!(disk.unwrap().1, "49", "{restored:?}");
}

#[test]
fn a_new_daemon_does_not_attach_to_another_qemu_at_the_socket_of_an_attached_vm() {
    let mut daemon = Daemon::start();
    let line = "-M q35 -m 32 -S";
    let first = Typed::start(&daemon, "typed", line);
    let socket = first.qmp();
    let attach = |daemon: &Daemon, domain: &str| {
        daemon.json(&["vm", "attach", &socket, "--name", "web", "--domain", domain])
    };
    assert_eq!(attach(&daemon, "shop")["domain"], "shop");
    daemon.terminate();
    daemon.start_again();
    daemon.wait_adopted();
    assert_eq!(daemon.json(&["vm", "list"])[0]["domain"], "shop");
    daemon.terminate();
    drop(first);
    // Its owner may be another customer.
    let _second = Typed::start(&daemon, "typed", line);
    daemon.start_again();
    daemon.wait_adopted();
    assert_eq!(daemon.json(&["vm", "list"]), json!([]));
    assert_eq!(attach(&daemon, "other")["domain"], "other");
}

#[test]
fn of_two_qemus_that_are_attached_under_one_name_at_once_one_is_refused() {
    let daemon = Daemon::start();
    let qemus = ["a", "b"].map(|name| Typed::start(&daemon, name, "-M q35 -m 32 -S"));
    let attach =
        |qemu: &Typed, name: &str| daemon.run(&["vm", "attach", &qemu.qmp(), "--name", name]);
    let outputs = std::thread::scope(|scope| {
        let both = qemus.each_ref();
        let both = both.map(|qemu| scope.spawn(|| attach(qemu, "web")));
        both.map(|thread| thread.join().unwrap())
    });
    let lost: Vec<usize> = (0..2).filter(|&i| code(&outputs[i]) != 0).collect();
    assert_eq!(lost.len(), 1, "{outputs:?}");
    refused(&outputs[lost[0]], 1, &["'web'"]);
    assert_eq!(code(&attach(&qemus[lost[0]], "other")), 0);
    assert_eq!(daemon.json(&["vm", "list"]).as_array().unwrap().len(), 2);
}

#[test]
fn a_segment_build_with_a_wrong_name_is_refused_before_a_guest_copies_its_files() {
    let daemon = Daemon::start();
    let build = [
        "segment",
        "build",
        "web@2",
        "--domain",
        "d",
        "--from",
        "vm:nobody",
    ];
    refused(&daemon.run(&build), 1, &["names a generation"]);
}
