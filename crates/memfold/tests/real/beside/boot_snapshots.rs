//! Tests of boot snapshots: a VM is restored to the state after its boot, and unsuitable snapshots
//! are refused.

use std::time::{Duration, Instant};

use memfold_api::{BootSnapshot, RebootRequest, SaveRequest, SetRequest, SetWhen};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_testkit::patience;
use memfold_units::ByteSize;

use super::segments;
use crate::support::{self, BOOT};

const MEMORY: ByteSize = ByteSize::mib(384);

#[test]
fn a_reboot_from_the_boot_snapshot_restores_the_state_right_after_boot() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let mut spec = Lab::spec("booted", "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    spec.boot_snapshot = true;
    lab.start(spec).unwrap();
    let daemon = lab.daemon();
    let limit = Duration::from_secs(300);
    let reboot = |from_boot_snapshot| {
        let request = RebootRequest {
            from_boot_snapshot,
            timeout_s: 0.0,
        };
        daemon.boots().reboot("booted", &request, limit)
    };
    let error = reboot(true).unwrap_err().to_string();
    assert!(error.contains("no boot snapshot of VM 'booted'"), "{error}");
    let snapshot = || daemon.vms().list()[0].boot_snapshot.clone();
    let end = Instant::now() + memfold_testkit::patience(BOOT);
    while snapshot() == Some(BootSnapshot::Pending) {
        assert!(Instant::now() < end, "it is never up");
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(snapshot(), Some(BootSnapshot::Ready));
    let boot_id = || {
        let script = "cat /proc/sys/kernel/random/boot_id";
        lab.exec("booted", script, limit).unwrap()
    };
    let first = boot_id();
    // All VMs share one copy of the kernel that they boot.
    let has_view_of_kernel = || {
        let (pid, _) = support::ram(lab.directory(), "booted");
        let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        let (_, of_it) = smaps
            .split_once("/memfd:memfold-kernel")
            .expect("it has a copy of its own");
        let kib = |key| {
            let line = of_it.lines().find_map(|l| l.strip_prefix(key)).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
        };
        assert!(kib("Size:") > 4096);
        assert_eq!(kib("Anonymous:"), 0);
    };
    has_view_of_kernel();
    // What was set since the boot stays set.
    let settings = [
        ("fold", "false"),
        ("resume_when_room", "true"),
        ("sizing.min", "256M"),
    ];
    let request = SetRequest {
        settings: settings
            .map(|(name, value)| (name.into(), value.into()))
            .into(),
        when: SetWhen::Now,
    };
    daemon.definitions().set("booted", &request).unwrap();
    let recorded = |file: &str, field: &str| {
        let path = lab.directory().join("vms/booted").join(file);
        let text = std::fs::read(path).unwrap();
        serde_json::from_slice::<serde_json::Value>(&text).unwrap()[field].clone()
    };
    let is_set = || {
        assert_eq!(recorded("settings.json", "fold"), false);
        assert_eq!(recorded("settings.json", "resume_when_room"), true);
        assert_eq!(
            recorded("rightsize.json", "sizing")["min_bytes"],
            256_u64 << 20
        );
    };
    is_set();
    // The second time, the VM was itself restored.
    for _ in 0..2 {
        let mark = "echo since > /run/since; echo since > /var/tmp/since; sync";
        lab.exec("booted", mark, limit).unwrap();
        let began = Instant::now();
        let info = reboot(true).unwrap();
        println!("back after {:.0} ms", began.elapsed().as_secs_f64() * 1e3);
        assert_eq!(info.boot_snapshot, Some(BootSnapshot::Ready));
        is_set();
        daemon.vms().wait_agent("booted", patience(BOOT)).unwrap();
        let gone = "test ! -e /run/since && test ! -e /var/tmp/since";
        lab.exec("booted", gone, limit).unwrap();
        assert_eq!(boot_id(), first, "it was booted anew");
        has_view_of_kernel();
    }
    // The VM is rebooted by its guest, while it runs from the snapshot.
    let began = Instant::now();
    reboot(false).unwrap();
    println!("booted anew in {:.1} s", began.elapsed().as_secs_f64());
    assert_ne!(boot_id(), first);
    // A later VM has the same name.
    lab.stop("booted").unwrap();
    let later = segments::spec("booted", &[], segments::SLOTS);
    lab.start_warm(later).unwrap();
    let error = reboot(true).unwrap_err().to_string();
    assert!(error.contains("an earlier VM of this name"), "{error}");
    assert_eq!(snapshot(), None);
    refuses_what_a_snapshot_would_lack(&lab, "booted");
}

/// Checks that a VM that is stopped, or that has more than its description says, is not saved and
/// stays unchanged.
fn refuses_what_a_snapshot_would_lack(lab: &Lab, vm: &str) {
    lab.wait_ready(vm, BOOT).unwrap();
    let mut qmp = support::qmp(lab.directory(), vm);
    let refused = || {
        let request = SaveRequest::new(vm, "lacking");
        lab.daemon()
            .snapshots()
            .save(&request)
            .unwrap_err()
            .to_string()
    };
    qmp.query("stop").unwrap();
    let why = refused();
    assert!(
        why.contains("stands still") && why.contains("'paused'"),
        "{why}"
    );
    qmp.query("cont").unwrap();
    let device =
        serde_json::json!({ "driver": "virtio-rng-pci", "id": "plugged", "bus": "segport0" });
    qmp.execute("device_add", device).unwrap();
    let why = refused();
    assert!(why.contains("'plugged'"), "{why}");
    // The monitor for users adds a disk that memfold does not know. (Read-only disks would be
    // accepted.)
    let file = lab.directory().join("foreign.img");
    std::fs::File::create(&file)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let add = |mode: &str| {
        format!(
            "drive_add dummy file={},format=raw,if=none,id=foreign{mode}",
            file.display()
        )
    };
    let plug = |qmp: &mut memfold_vm::Qmp, mode: &str| {
        qmp.human(&add(mode)).unwrap();
        refused()
    };
    assert!(plug(&mut qmp, ",readonly=on").contains("'plugged'"));
    qmp.human("drive_del foreign").unwrap();
    let why = plug(&mut qmp, "");
    assert!(why.contains("'foreign'"), "{why}");
    qmp.human("drive_del foreign").unwrap();
    assert!(
        lab.daemon()
            .snapshots()
            .list()
            .unwrap()
            .iter()
            .all(|info| info.name != "lacking")
    );
    assert_eq!(lab.exec(vm, "echo on", BOOT).unwrap(), "on\n");
}
