//! Tests of VMs on a real QEMU. Most VMs start paused (`-S`): RAM, monitor and process are real,
//! and no guest uses CPU.

mod agent;
mod agent_stream;
mod consent;

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfold_testkit::{bound, patience, wait_for, wait_until};
use memfold_units::{ByteSize, Gpa, Hva, PAGE_BYTES, PAGE_SIZE};
use memfold_vm::{
    AccelChoice, Aio, CacheMode, DiskSpec, MachineError, Qmp, RamLayout, StopKind, Vm, VmDirectory,
    VmSpec, balloon, virtio_mem,
};
use memfold_wire::library::{Order, Range, Reply};
use serde_json::json;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn paused(name: &str, memory: ByteSize) -> VmSpec {
    let mut spec = VmSpec::new(name, memory);
    spec.accel = AccelChoice::Tcg;
    spec.fold = false;
    spec.qemu_args = vec!["-S".into()];
    spec
}

/// A VM that ends with the test, even if the test fails.
struct Running(Vm);

impl Running {
    fn start(state: &Path, spec: VmSpec) -> Self {
        Self(memfold_vm::start(state, spec).unwrap_or_else(|e| panic!("{e:?}")))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.stop(Duration::ZERO);
    }
}

/// A QEMU that memfold did not start.
struct Foreign {
    child: Child,
    dir: tempfile::TempDir,
}

impl Foreign {
    fn start(arguments: &[&str]) -> Self {
        Self::start_by("tcg", arguments)
    }

    fn start_by(accel: &str, arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let child = Command::new("qemu-system-x86_64")
            .args([
                "-S",
                "-nodefaults",
                "-display",
                "none",
                "-accel",
                accel,
                "-qmp",
            ])
            .arg(format!(
                "unix:{}/q,server=on,wait=off",
                dir.path().display()
            ))
            .args(arguments)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let foreign = Self { child, dir };
        wait_for("QEMU starts", Duration::from_secs(60), || {
            Qmp::connect(&foreign.qmp(), Duration::from_secs(2)).map(drop)
        });
        foreign
    }

    fn qmp(&self) -> std::path::PathBuf {
        self.dir.path().join("q")
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes a pattern to the address that the layout gives for `gpa`, and reads it back from QEMU by
/// its guest-physical address.
fn prove(vm: &Vm, qmp: &mut Qmp, layout: &RamLayout, gpa: u64) {
    let (page, _) = layout
        .hva_of(Gpa(gpa).pfn())
        .unwrap_or_else(|| panic!("{gpa:#x} is no RAM"));
    let hva = Hva(page.0 + gpa % PAGE_SIZE);
    let pid = vm.pid().as_raw_nonzero();
    let memory = File::options()
        .write(true)
        .open(format!("/proc/{pid}/mem"))
        .unwrap();
    let pattern: Vec<u8> = (0..PAGE_BYTES)
        .map(|i| (i as u64 * 7 + gpa / 4096).to_le_bytes()[0])
        .collect();
    memory.write_all_at(&pattern, hva.0).unwrap();
    let dump = tempfile::NamedTempFile::new().unwrap();
    memfold_vm::qemu_user::give(dump.path(), vm.user()).unwrap();
    qmp.execute(
        "pmemsave",
        json!({ "val": gpa, "size": PAGE_BYTES, "filename": dump.path() }),
    )
    .unwrap();
    assert!(
        fs::read(dump.path()).unwrap() == pattern,
        "other bytes at {gpa:#x}"
    );
    let mut copy = vec![0; PAGE_BYTES];
    memfold_sys::memory::read(vm.pid(), hva, &mut copy).unwrap();
    assert!(copy == pattern);
}

#[test]
fn the_memory_layout_of_a_small_vm_equals_the_layout_in_qemu() {
    let state = tempfile::tempdir().unwrap();
    let mut spec = paused("small", ByteSize::mib(512));
    // The memory of a VM without a trust domain is not offered to KSM.
    spec.domain = Some("d".into());
    let vm = Running::start(state.path(), spec);
    let mut qmp = vm.0.qmp().unwrap();
    let layout = vm.0.layout(&mut qmp).unwrap();
    for gpa in [0x1000, 0x9_f000, MIB, 300 * MIB, 512 * MIB - 4096] {
        prove(&vm.0, &mut qmp, &layout, gpa);
    }
    assert_eq!(layout.hva_of(Gpa(512 * MIB).pfn()), None);
    let advice = vm.0.advice(&layout.blocks[0]).unwrap();
    assert!(advice.mergeable, "mem-merge=on is not seen: {advice:?}");
}

#[test]
fn the_memory_layout_of_5_gib_and_a_plugged_dimm_equals_the_layout_in_qemu() {
    let state = tempfile::tempdir().unwrap();
    let mut spec = paused("large", ByteSize(5 * GIB));
    (spec.memory_max, spec.memory_slots) = (Some(ByteSize(8 * GIB)), 1);
    let vm = Running::start(state.path(), spec);
    let mut qmp = vm.0.qmp().unwrap();
    let before = vm.0.layout(&mut qmp).unwrap();
    // q35 puts 2 GiB below the hole.
    assert_eq!(before.hva_of(Gpa(2 * GIB).pfn()), None);
    for gpa in [MIB, 2 * GIB - 4096, 4 * GIB, 6 * GIB, 7 * GIB - 4096] {
        prove(&vm.0, &mut qmp, &before, gpa);
    }
    let size = 256 * MIB;
    qmp.execute(
        "object-add",
        json!({"qom-type": "memory-backend-ram", "id": "mem1", "size": size}),
    )
    .unwrap();
    qmp.execute(
        "device_add",
        json!({"driver": "pc-dimm", "id": "dimm1", "memdev": "mem1"}),
    )
    .unwrap();
    let after = vm.0.layout(&mut qmp).unwrap();
    assert_eq!(after.pages() - before.pages(), size / 4096);
    assert_eq!(after.blocks.len(), 2);
    let full = balloon::full_size(&mut qmp).unwrap();
    assert_eq!(full, ByteSize(5 * GIB + size));
    let dimm = after.slots.iter().find(|s| s.block == 1).unwrap();
    let start = dimm.pfn.gpa().unwrap().0;
    for gpa in [start, start + size - 4096, 4 * GIB + 8192] {
        prove(&vm.0, &mut qmp, &after, gpa);
    }
}

#[test]
fn a_vm_that_may_grow_has_a_virtio_mem_device_whose_memory_is_in_the_layout_and_in_no_balloon() {
    let state = tempfile::tempdir().unwrap();
    let mut spec = paused("grows", ByteSize::mib(512));
    spec.memory_max = Some(ByteSize(GIB));
    let vm = Running::start(state.path(), spec);
    let mut qmp = vm.0.qmp().unwrap();
    let layout = vm.0.layout(&mut qmp).unwrap();
    assert_eq!(layout.blocks.len(), 2);
    let plugged = layout.slots.iter().find(|s| s.block == 1).unwrap();
    let start = plugged.pfn.gpa().unwrap().0;
    assert!(start >= 4 * GIB && plugged.pages == 512 * MIB / 4096);
    for gpa in [MIB, start, start + 512 * MIB - 4096] {
        prove(&vm.0, &mut qmp, &layout, gpa);
    }
    let read = |qmp: &mut Qmp| virtio_mem::read(qmp).unwrap().unwrap();
    let device = read(&mut qmp);
    assert_eq!((device.plugged.0, device.requested.0), (0, 0));
    assert_eq!(device.max, ByteSize::mib(512));
    // The guest does not run, so it has no driver and plugs nothing.
    assert!(!virtio_mem::has_driver(&mut qmp).unwrap());
    virtio_mem::request(&mut qmp, ByteSize::mib(256)).unwrap();
    let device = read(&mut qmp);
    assert_eq!(
        (device.plugged, device.requested),
        (ByteSize(0), ByteSize::mib(256))
    );
    let odd = ByteSize(device.block.0 + 1);
    assert!(virtio_mem::request(&mut qmp, odd).is_err());
    assert!(virtio_mem::request(&mut qmp, ByteSize::mib(514)).is_err());
    assert_eq!(balloon::full_size(&mut qmp).unwrap(), ByteSize::mib(512));
    assert_eq!(virtio_mem::plugged(&mut qmp).unwrap(), ByteSize(0));
}

#[test]
fn pages_may_be_folded_again_without_a_pause_only_if_no_disk_uses_direct_io() {
    let state = tempfile::tempdir().unwrap();
    let image = state.path().join("d,1.raw");
    File::create(&image).unwrap().set_len(16 * MIB).unwrap();
    let mut spec = paused("disks", ByteSize::mib(128));
    let mut buffered = DiskSpec::new(&image);
    buffered.snapshot = true;
    spec.disks = vec![buffered.clone()];
    let vm = Running::start(state.path(), spec.clone());
    let mut qmp = vm.0.qmp().unwrap();
    let conditions = vm.0.conditions(&mut qmp).unwrap();
    assert!(
        conditions.may_fold() && conditions.may_refold_live(),
        "{conditions:?}"
    );
    let overlay = vm.0.record().unwrap().overlays[0].clone();
    assert!(overlay.is_file());
    drop(qmp);
    assert_eq!(vm.0.stop(Duration::from_secs(1)).unwrap(), StopKind::Quit);
    assert!(!overlay.exists() && !vm.0.directory().unwrap().path().exists());

    buffered.cache = CacheMode::None;
    buffered.aio = Aio::IoUring;
    spec.disks = vec![buffered];
    let vm = Running::start(state.path(), spec);
    let conditions = vm.0.conditions(&mut vm.0.qmp().unwrap()).unwrap();
    assert!(
        conditions.may_fold() && !conditions.may_refold_live(),
        "{conditions:?}"
    );
    assert!(conditions.refold_live[0].to_string().contains("direct I/O"));
}

#[test]
fn an_attached_vm_reports_whether_it_can_be_folded_and_the_reason_if_not() {
    for (backend, wanted) in [
        ("memory-backend-ram,id=ram0,size=128M", None),
        (
            "memory-backend-memfd,id=ram0,size=128M,share=on",
            Some("shared memory"),
        ),
        (
            "memory-backend-memfd,id=ram0,size=128M,share=on,hugetlb=on,hugetlbsize=2M,reserve=off",
            Some("hugetlbfs"),
        ),
    ] {
        let foreign = Foreign::start(&[
            "-name",
            "guest=other",
            "-machine",
            "q35,memory-backend=ram0",
            "-m",
            "128",
            "-object",
            backend,
        ]);
        let vm = Vm::attach(&foreign.qmp()).unwrap();
        assert_eq!(vm.name(), "other");
        assert_eq!(
            vm.pid().as_raw_nonzero().get(),
            i32::try_from(foreign.child.id()).unwrap()
        );
        let mut qmp = vm.qmp().unwrap();
        let conditions = vm.conditions(&mut qmp).unwrap();
        let words: Vec<_> = conditions
            .fold
            .iter()
            .map(|r| r.condition.as_str())
            .collect();
        match wanted {
            None => assert!(conditions.may_fold(), "{words:?}"),
            Some(part) => assert!(words.iter().any(|w| w.contains(part)), "{words:?}"),
        }
        assert!(!vm.has_library());
        assert!(matches!(
            vm.stop(Duration::ZERO),
            Err(MachineError::NotOurs { .. })
        ));
    }
}

#[test]
fn in_a_qemu_started_by_hand_the_virtio_serial_port_of_the_agent_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let port = dir.path().join("port");
    let foreign = Foreign::start(&[
        "-m",
        "64",
        "-chardev",
        &format!("socket,id=c7,path={},server=on,wait=off", port.display()),
        "-device",
        "virtio-serial-pci",
        "-device",
        "virtserialport,chardev=c7,name=org.memfold.agent.0",
    ]);
    let vm = Vm::attach(&foreign.qmp()).unwrap();
    assert_eq!(vm.agent_socket(), Some(port.as_path()));
    assert!(!vm.has_library());
}

#[test]
fn a_vm_started_with_qemus_option_mem_lock_is_not_folded() {
    let foreign = Foreign::start(&["-m", "64", "-overcommit", "mem-lock=on"]);
    let vm = Vm::attach(&foreign.qmp()).unwrap();
    let conditions = vm.conditions(&mut vm.qmp().unwrap()).unwrap();
    let words = format!("{:?}", conditions.fold);
    assert!(words.contains("mem-lock"), "{words}");
}

#[test]
fn qemus_option_cpu_pm_is_reported_as_costly_for_folding_under_kvm_and_not_under_tcg() {
    let costs = |accel: &str, overcommit: &str| {
        let foreign = Foreign::start_by(accel, &["-m", "64", "-overcommit", overcommit]);
        let vm = Vm::attach(&foreign.qmp()).unwrap();
        let conditions = vm.conditions(&mut vm.qmp().unwrap()).unwrap();
        assert!(conditions.may_fold(), "{:?}", conditions.fold);
        conditions.costs
    };
    assert_eq!(costs("tcg", "cpu-pm=on"), []);
    let opened = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm");
    if let Err(error) = opened {
        memfold_testkit::skip!("/dev/kvm does not open: {error}");
    }
    assert_eq!(costs("kvm", "mem-lock=off"), []);
    let told = costs("kvm", "mem-lock=off,cpu-pm=on");
    assert!(told[0].condition.contains("cpu-pm=on"), "{told:?}");
}

#[test]
fn a_second_vm_of_the_same_name_is_refused_and_the_first_vm_continues() {
    let state = tempfile::tempdir().unwrap();
    let vm = Running::start(state.path(), paused("twin", ByteSize::mib(64)));
    let error = memfold_vm::start(state.path(), paused("twin", ByteSize::mib(64))).unwrap_err();
    assert_eq!(error.to_string(), "a VM named 'twin' is running");
    vm.0.qmp().unwrap().query("query-status").unwrap();
    assert_eq!(Vm::discover(state.path()).unwrap().len(), 1);
}

#[test]
fn a_qemu_that_fails_to_start_reports_its_error_message_and_leaves_no_files() {
    let state = tempfile::tempdir().unwrap();
    let mut spec = paused("bad", ByteSize::mib(64));
    spec.qemu_args = vec!["-device".into(), "no-such-device".into()];
    let error = memfold_vm::start(state.path(), spec)
        .unwrap_err()
        .to_string();
    assert!(error.contains("no-such-device"), "{error}");
    assert!(VmDirectory::all(state.path()).unwrap().is_empty());
}

#[test]
fn a_killed_vm_is_detected_and_its_files_are_removed() {
    let state = tempfile::tempdir().unwrap();
    let vm = Running::start(state.path(), paused("victim", ByteSize::mib(64)));
    assert!(!vm.0.process().has_exited().unwrap());
    vm.0.process().kill().unwrap();
    assert!(vm.0.process().wait_exit(Duration::from_secs(60)).unwrap());
    assert!(Vm::discover(state.path()).unwrap().is_empty());
    assert!(VmDirectory::all(state.path()).unwrap().is_empty());
    // The name can be used again.
    Running::start(state.path(), paused("victim", ByteSize::mib(64)));
}

/// Helper of the next test, which starts it in a separate process.
#[test]
#[ignore = "a part of the next test"]
fn helper_process_starts_a_vm_and_waits_to_be_killed() {
    let Some(state) = std::env::var_os("MEMFOLD_TEST_STATE") else {
        return;
    };
    let vm = memfold_vm::start(Path::new(&state), paused("orphan", ByteSize::mib(64))).unwrap();
    println!("started {}", vm.pid().as_raw_nonzero());
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_vm_survives_the_process_that_started_it_and_another_process_adopts_it() {
    let state = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "helper_process_starts_a_vm_and_waits_to_be_killed",
            "--ignored",
            "--nocapture",
        ])
        .env("MEMFOLD_TEST_STATE", state.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let pid: i32 = lines
        .find_map(|l| l.unwrap().split_once("started ")?.1.trim().parse().ok())
        .unwrap();
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    let mut vms = Vm::discover(state.path()).unwrap();
    assert_eq!(vms.len(), 1);
    let vm = Running(vms.remove(0));
    assert_eq!(
        (vm.0.name(), vm.0.pid().as_raw_nonzero().get()),
        ("orphan", pid)
    );
    let status = vm.0.qmp().unwrap().query("query-status").unwrap();
    assert_eq!(status["status"], "prelaunch");
    assert_eq!(vm.0.stop(Duration::from_secs(5)).unwrap(), StopKind::Quit);
    assert!(Vm::discover(state.path()).unwrap().is_empty());
    // The record contains the pid of another process: that process is never touched, and the
    // directory is stale.
    let directory = VmDirectory::of(state.path(), "stranger");
    directory.create().unwrap();
    let mut record = vm.0.record().unwrap().clone();
    record.process.pid = i32::try_from(std::process::id()).unwrap();
    directory.write_json(&directory.record(), &record).unwrap();
    assert!(Vm::discover(state.path()).unwrap().is_empty());
    assert!(!directory.path().exists());
}

#[test]
fn doctor_finds_the_installed_qemu_and_tests_only_once_whether_kvm_works() {
    let state = tempfile::tempdir().unwrap();
    let began = Instant::now();
    let first = memfold_host::HostFacts::probe(state.path());
    let took = began.elapsed();
    assert!(first.qemu.facts.as_ref().unwrap().is_supported());
    let began = Instant::now();
    let second = memfold_host::HostFacts::probe(state.path());
    assert_eq!(first.kvm, second.kvm);
    assert!(
        began.elapsed() < bound(Duration::from_secs(20)),
        "{:?} after {took:?}",
        began.elapsed()
    );
    let report = memfold_host::examine(second);
    println!("{:#?}", report.checks);
    assert!(
        report
            .checks
            .iter()
            .any(|c| c.name == "QEMU" && c.fix.is_none())
    );
}

#[test]
fn a_guest_in_a_qemu_of_another_user_boots_is_folded_and_shuts_down_on_request() {
    let images = memfold_host::guest_images().unwrap_or_default();
    let (Some(image), Ok(_)) = (images.get("trixie-a"), memfold_host::library()) else {
        memfold_testkit::skip!("no guest image trixie-a, or the library is not built");
    };
    let state = tempfile::tempdir().unwrap();
    let mut spec = VmSpec::new("guest", ByteSize::mib(512));
    spec.boot.kernel = Some(image.kernel.clone());
    spec.boot.initrd = Some(image.initrd.clone());
    spec.boot.cmdline = Some(
        "root=/dev/vda rw console=ttyS0 quiet mitigations=off no_timer_check tsc=reliable".into(),
    );
    let mut disk = DiskSpec::new(&image.disk);
    disk.snapshot = true;
    spec.disks = vec![disk];
    spec.user = Some("nobody".into());
    let vm = Running::start(state.path(), spec);
    assert!(vm.0.has_library());
    let status = fs::read_to_string(format!("/proc/{}/status", vm.0.pid().as_raw_nonzero()));
    let status = status.unwrap();
    assert!(
        status.contains("Uid:\t65534\t65534\t65534\t65534"),
        "{status}"
    );
    let log = vm.0.directory().unwrap().console_log();
    wait_until("the guest has booted", Duration::from_secs(120), || {
        String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).contains("root@")
    });
    let mut qmp = vm.0.qmp().unwrap();
    let layout = vm.0.layout(&mut qmp).unwrap();
    assert!(layout.pages() > (500 << 8), "{layout:?}");
    let conditions = vm.0.conditions(&mut qmp).unwrap();
    assert!(conditions.may_refold_live(), "{conditions:?}");
    drop(qmp);
    let mut link = vm.0.library_link().unwrap().unwrap();
    assert!(
        link.facts().can_move && link.facts().can_stop,
        "{:?}",
        link.facts()
    );
    let block = &layout.blocks[0];
    let advice = vm.0.advice(block).unwrap();
    let (hva, pages) = (block.hva.0, block.pages);
    let add = Order::AddRam { hva, pages, advice };
    assert_eq!(link.order(&add, None).unwrap(), Reply::Ok);
    // Zero pages are dropped: pagemap, userfaultfd and moves also work after QEMU has dropped its
    // rights.
    let ranges = vec![Range { hva, pages }];
    match link.order(&Order::DropZero { ranges }, None).unwrap() {
        Reply::Zero { scanned, .. } => assert!(scanned > 1000, "{scanned}"),
        other => panic!("{other:?}"),
    }
    // The guest's ACPI daemon may not listen yet, so `stop` repeats its request until it does.
    assert_eq!(
        vm.0.stop(patience(Duration::from_secs(60))).unwrap(),
        StopKind::PoweredDown
    );
}
