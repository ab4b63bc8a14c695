//! Tests with a QEMU that was started by hand: memfold saves it, stopped or running (`--live`),
//! also while daemons are killed. VMs with the same devices run from its snapshots.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfold_api::{AttachRequest, Client, KeepChoice, RestoreRequest, SaveRequest, VmInfo};
use memfold_host::guest_images;
use memfold_snapshot::{Manifest, Renew, SnapshotInfo};
use memfold_testkit::{dose, patience, wait_for, wait_until};
use memfold_vm::{Qmp, VmDirectory};
use serde_json::Value;

use super::disks::{self, verify};
use super::snapshots::rewrite_memory;
use crate::served::{Random, Served, exec, wait_agent};
use crate::support::{self, BOOT};

const VM: &str = "typed";

/// Content of the CD, repeated over its length.
const MEDIUM: &[u8; 32] = b"what is read and never written. ";

/// Shell script that reads the CD past the guest's cache, and prints the sum of its first 2 MiB.
const READ_CD: &str = "modprobe -a virtio_scsi sr_mod; for left in $(seq 60); do test -b /dev/sr0 && break; sleep 1; done; \
    dd if=/dev/sr0 bs=2048 count=1024 iflag=direct status=none | md5sum";

/// A QEMU that was started by hand, and is ended when this is dropped.
struct Typed {
    place: PathBuf,
    child: Child,
}

impl Typed {
    /// Starts a QEMU with a typical manual command line: files by relative names, drives in three
    /// notations, a CD, a terminal that does not exist, a forwarded port.
    fn start(place: &Path) -> Self {
        let images = guest_images().unwrap();
        let image = &images["trixie-a"];
        std::os::unix::fs::symlink(&image.kernel, place.join("vmlinuz")).unwrap();
        std::os::unix::fs::symlink(&image.initrd, place.join("initrd")).unwrap();
        let make = |name: &str, more: &[&str], size: &str| {
            let made = Command::new("qemu-img")
                .args(["create", "-q", "-f"])
                .args(more)
                .arg(name)
                .args((!size.is_empty()).then_some(size))
                .current_dir(place)
                .status();
            assert!(made.unwrap().success());
        };
        let base = image.disk.to_str().unwrap();
        make("root.qcow2", &["qcow2", "-F", "raw", "-b", base], "");
        make("one.raw", &["raw"], "64M");
        make("two.qcow2", &["qcow2"], "64M");
        std::fs::write(place.join("cd.iso"), MEDIUM.repeat(1 << 16)).unwrap();
        let line = "-M q35,memory-backend=ram -m 384 -object memory-backend-ram,id=ram,size=384M \
             -accel tcg,thread=multi -cpu max -nographic -kernel vmlinuz -initrd initrd \
             -drive file=root.qcow2,if=virtio,format=qcow2 \
             -drive file=one.raw,if=none,id=one,format=raw -device virtio-blk-pci,drive=one,id=first \
             -blockdev driver=file,node-name=two-file,filename=two.qcow2 -blockdev driver=qcow2,node-name=two,file=two-file \
             -device virtio-blk-pci,drive=two,id=second -drive file=cd.iso,if=none,id=cd,media=cdrom,readonly=on,format=raw -readconfig devices.cfg \
             -device scsi-cd,drive=cd -device vmgenid,guid=auto \
             -netdev user,id=lan,hostfwd=tcp:127.0.0.1:0-:22 -device virtio-net-pci,netdev=lan,romfile= \
             -device virtio-balloon-pci,free-page-reporting=on -device virtio-serial-pci -chardev socket,path=agent.sock,server=on,wait=off,id=agent \
             -device virtserialport,chardev=agent,name=org.memfold.agent.0 -qmp unix:qmp.sock,server=on,wait=off";
        let devices = "[device \"bridge\"]\n  driver = \"pcie-root-port\"\n  chassis = \"1\"\n\n[device]\n  driver = \"virtio-scsi-pci\"\n";
        std::fs::write(place.join("devices.cfg"), devices).unwrap();
        let log = File::create(place.join("qemu.log")).unwrap();
        let child = Command::new("qemu-system-x86_64")
            .args(line.split_whitespace())
            .args([
                "-append",
                "root=/dev/vdc rw console=ttyS0 quiet mitigations=off no_timer_check tsc=reliable",
            ])
            .env("LD_PRELOAD", memfold_host::library().unwrap())
            .env("MEMFOLD_QEMU_SOCKET", place.join("library.sock"))
            .current_dir(place)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let typed = Self {
            place: place.to_owned(),
            child,
        };
        let end = Instant::now() + patience(Duration::from_secs(60));
        while !place.join("qmp.sock").exists() {
            assert!(Instant::now() < end, "{}", typed.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        typed
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.place.join("qemu.log")).unwrap_or_default()
    }

    fn end(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Typed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the typed QEMU's last words:\n{}", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Saves the VM. The guest then checks all of its data, in memory and on disks.
fn save(
    client: &Client,
    vm: &str,
    name: &str,
    live: bool,
    keep: KeepChoice,
) -> Result<Manifest, String> {
    let request = SaveRequest {
        live,
        keep,
        ..SaveRequest::new(vm, name)
    };
    let saved = client.post("/v1/snapshots", &request);
    saved.map_err(|error| format!("{error:#}"))
}

/// Saves the attached VM, and checks that nothing was left out.
fn save_whole(client: &Client, name: &str, live: bool, keep: KeepChoice) {
    let saved = save(client, VM, name, live, keep).unwrap();
    println!(
        "{name}: paused {:.0} ms, {} MiB of RAM, free pages kept: {:?}",
        saved.pause_ms,
        saved.counts.saved_pages / 256,
        saved.free_kept
    );
    assert_eq!((saved.free_kept, saved.vm.as_str()), (None, VM));
    assert!(saved.generation_id && saved.agent);
}

fn restore(client: &Client, snapshot: &str, request: &RestoreRequest) -> VmInfo {
    let path = format!("/v1/snapshots/{snapshot}/restore");
    let began = Instant::now();
    let info = client.post(&path, request).unwrap();
    println!(
        "{snapshot} -> {} in {:.2} s",
        request.vm,
        began.elapsed().as_secs_f64()
    );
    info
}

/// Ends a VM that is no longer needed, because its guest would use a core that others wait for.
fn stop(client: &Client, vm: &str) {
    let at_once = serde_json::json!({ "timeout_s": 0.0 });
    let path = format!("/v1/vms/{vm}/stop");
    client.post::<_, Value>(&path, &at_once).unwrap();
}

/// Checks that the VM runs, and that a save has left nothing in it. No daemon may run, because it
/// would hold the only monitor.
fn is_as_before(qmp: &Path) {
    let mut qmp = Qmp::connect(qmp, Duration::from_secs(60)).unwrap();
    assert_eq!(qmp.query("query-status").unwrap()["status"], "running");
    let devices = qmp.query("query-block").unwrap();
    let nodes = devices.as_array().unwrap().iter();
    let nodes: Vec<&str> = nodes
        .filter_map(|device| device["inserted"]["node-name"].as_str())
        .collect();
    assert!(
        nodes.len() == 4 && nodes.iter().all(|node| !node.starts_with("save-")),
        "{nodes:?}"
    );
}

/// A QEMU that was started by hand, attached to a daemon; its guest writes to memory and disks all
/// the time.
struct Attached<'a> {
    typed: Typed,
    served: Served<'a>,
    client: Client,
    /// Directories of the daemon, and of the disks.
    state: &'a Path,
    disks: &'a Path,
}

impl Attached<'_> {
    /// Returns QEMU's monitor.
    fn qmp(&self) -> PathBuf {
        self.disks.join("qmp.sock")
    }
}

/// Runs a test with an attached QEMU.
fn with_attached(test: impl FnOnce(&mut Attached)) {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::Builder::new()
        .prefix("memfold-typed.")
        .tempdir()
        .unwrap();
    let state = directory.path();
    let disks = tempfile::Builder::new()
        .prefix("memfold-typed.")
        .tempdir_in("/var/tmp")
        .unwrap();
    let typed = Typed::start(disks.path());
    let vms = ["copied", "clone", "again"];
    let mut served = Served::new(state, &vms).temporary(disks.path());
    served.start();
    let client = served.answers();
    let attach = AttachRequest {
        qmp: disks.path().join("qmp.sock"),
        name: VM.into(),
        domain: Some("lab".into()),
    };
    client.post::<_, VmInfo>("/v1/attach", &attach).unwrap();
    wait_agent(&client, VM);
    exec(&client, VM, &rewrite_memory());
    exec(&client, VM, &disks::write_to("/dev/vda /dev/vdb"));
    test(&mut Attached {
        typed,
        served,
        client,
        state,
        disks: disks.path(),
    });
}

#[test]
fn a_qemu_that_was_started_by_hand_runs_on_after_saves_even_if_the_daemon_dies_in_one() {
    with_attached(|attached| {
        let (qmp, state) = (attached.qmp(), attached.state);
        let (served, client) = (&mut attached.served, &attached.client);
        // The VM is saved while it is stopped. The test below saves it live.
        let began = Instant::now();
        save_whole(client, "still", false, KeepChoice::None);
        let span = u64::try_from(began.elapsed().as_millis()).unwrap();
        verify(client, VM);

        // Daemons die meanwhile. Nothing in this QEMU resumes the VM, so the next daemon does.
        let mut random = Random(u64::from(std::process::id()) << 20 | 1);
        println!("seed {}", random.0);
        let mut stood = 0;
        let deaths = dose("MEMFOLD_SAVE_KILLS", 2);
        for death in 0..deaths {
            let name = format!("cut-{death}");
            let draft = state.join(format!("snapshots/.{name}.draft"));
            std::thread::scope(|scope| {
                let name = &name;
                let live = death % 2 == 1;
                let saving = scope.spawn(move || save(client, VM, name, live, KeepChoice::All));
                match death % 3 {
                    // The daemon dies while the VM is stopped.
                    0 | 1 => {
                        let end = Instant::now() + patience(Duration::from_secs(60));
                        while !draft.join("devices").exists() && Instant::now() < end {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                    // The daemon dies at any instant.
                    _ => std::thread::sleep(random.below_ms(span)),
                }
                served.kill();
                let _ = saving.join().unwrap();
            });
            let status = Qmp::connect(&qmp, Duration::from_secs(60))
                .unwrap()
                .query("query-status")
                .unwrap();
            stood += usize::from(status["running"] == false);
            served.start();
            served.answers();
            verify(client, VM);
            // The daemon holds the monitor.
            let end = Instant::now() + patience(Duration::from_secs(60));
            while std::fs::read_dir(state.join("saving")).is_ok_and(|notes| notes.count() > 0) {
                assert!(Instant::now() < end, "the cut save is not undone");
                std::thread::sleep(Duration::from_millis(50));
            }
            served.kill();
            is_as_before(&qmp);
            served.start();
            served.answers();
        }
        println!("{stood} of {deaths} daemons died while it stood still");
        assert!(stood > 0);
    });
}

#[test]
fn vms_restored_from_a_save_of_an_attached_qemu_have_the_same_devices() {
    with_attached(|attached| {
        let (client, state, disks) = (&attached.client, attached.state, attached.disks);
        let nonce = exec(
            client,
            VM,
            "head -c 16 /dev/urandom | sha256sum | tee /run/nonce",
        )
        .stdout;

        let cd = exec(client, VM, READ_CD).stdout;
        let wanted = Command::new("md5sum")
            .arg(disks.join("cd.iso"))
            .output()
            .unwrap();
        assert_eq!(cd[..32], String::from_utf8_lossy(&wanted.stdout)[..32]);
        let began = Instant::now();
        for (name, keep) in [("live", KeepChoice::None), ("warm", KeepChoice::Hot)] {
            save_whole(client, name, true, keep);
        }
        let save_takes = began.elapsed() / 2;
        verify(client, VM);

        // The guests of clone and attached VM write at the same time.
        let clone = RestoreRequest {
            renew: Renew::Identity,
            ..RestoreRequest::new("clone")
        };
        restore(client, "warm", &clone);
        verify(client, "clone");
        let renewal = wait_for("the clone is set apart", BOOT, || {
            let renewal = wait_agent(client, "clone").renewal.unwrap();
            if renewal.pending {
                return Err(renewal);
            }
            Ok(renewal)
        });
        assert_eq!(
            exec(client, "clone", "cat /run/nonce; hostname").stdout,
            format!("{nonce}clone\n")
        );
        println!("{renewal:?}");
        assert!(renewal.left.is_empty() && renewal.done.iter().any(|done| done.contains("MAC")));
        stop(client, "clone");
        verify(client, VM);
        // QEMU dies during a save: the snapshot is complete or absent.
        let dead = std::thread::scope(|scope| {
            let saving = scope.spawn(|| save(client, VM, "dead", true, KeepChoice::All));
            std::thread::sleep(save_takes / 2);
            attached.typed.end();
            saving.join().unwrap()
        });
        println!(
            "a VM that died: {:?}",
            dead.as_ref().map(|manifest| manifest.save_ms)
        );
        let listed: Vec<SnapshotInfo> = client.get("/v1/snapshots").unwrap();
        assert_eq!(listed.iter().any(|info| info.name == "dead"), dead.is_ok());
        assert!(!state.join("snapshots/.dead.draft").exists());

        // A VM with the same devices is restored.
        restore(client, "live", &RestoreRequest::new("copied"));
        verify(client, "copied");
        assert_eq!(exec(client, "copied", "cat /run/nonce").stdout, nonce);
        assert_eq!(exec(client, "copied", READ_CD).stdout, cd);
        // The restored VM is memfold's: when it is saved again, its overlays are frozen; it can
        // also reboot.
        let saved = save(client, "copied", "again", false, KeepChoice::None).unwrap();
        assert_eq!(saved.free_kept, None);
        verify(client, "copied");
        // The snapshot has copies of the kernel and the CD.
        std::fs::remove_file(disks.join("cd.iso")).unwrap();
        stop(client, "copied");
        restore(client, "again", &RestoreRequest::new("again"));
        verify(client, "again");
        assert_eq!(exec(client, "again", "cat /run/nonce").stdout, nonce);
        assert_eq!(exec(client, "again", READ_CD).stdout, cd);
        let boot = "cat /proc/sys/kernel/random/boot_id";
        let before = exec(client, "again", boot).stdout;
        let reboot = serde_json::json!({ "timeout_s": patience(BOOT).as_secs_f64() });
        client
            .post::<_, Value>("/v1/vms/again/reboot", &reboot)
            .unwrap();
        wait_agent(client, "again");
        assert_ne!(exec(client, "again", boot).stdout, before);
        // The agent answers before the guest has found all of its devices.
        let there = "test ! -e /run/nonce && test -b /dev/vdc && for left in $(seq 60); do ls -d /sys/class/net/e* && exit 0; sleep 1; done; exit 1";
        exec(client, "again", there);
        let console = VmDirectory::of(state, "again").console_log();
        wait_until("the guest asks for a login", BOOT, || {
            String::from_utf8_lossy(&std::fs::read(&console).unwrap()).contains("login:")
        });
    });
}
