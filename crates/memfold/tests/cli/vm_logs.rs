//! Tests that a guest's console output, which QEMU writes to a log file, does not fill the daemon's
//! state directory.

use std::fs::File;
use std::io::Write as _;
use std::time::Duration;

use memfold_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Daemon, code, err};

/// Guest program that writes `x` to the first serial port forever, in real mode, from a boot
/// sector.
const SAYS: [u8; 8] = [
    0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, b'x', // mov al, 'x'
    0xee, // say: out dx, al
    0xeb, 0xfd, // jmp say
];

#[test]
fn if_a_guest_writes_endlessly_to_its_console_the_log_is_rotated_and_bounded() {
    const MIB: u64 = 1 << 20;
    let daemon = Daemon::start();
    let disk = daemon.state().join("talks.raw");
    // The BIOS boots no disk that is smaller than a cylinder.
    let mut bytes = vec![0; 16 << 20];
    bytes[..SAYS.len()].copy_from_slice(&SAYS);
    bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    std::fs::write(&disk, bytes).unwrap();
    let run = [
        "vm",
        "run",
        "--name",
        "talks",
        "--memory",
        "64M",
        "--no-fold",
        "--disk",
    ];
    let ran = daemon.run(&[&run[..], &[disk.to_str().unwrap()]].concat());
    assert_eq!(code(&ran), 0, "{}", err(&ran));
    let log = daemon.state().join("vms/talks/console.log");
    let before = log.with_extension("log.1");
    let bytes = |path: &std::path::Path| path.metadata().map_or(0, |file| file.len());
    wait_until("it is shortened", Duration::from_secs(60), || {
        bytes(&before) > 0
    });
    assert_eq!(bytes(&before), MIB);
    let text = std::fs::read(&before).unwrap();
    assert!(text.iter().all(|&byte| byte == b'x'));
    // QEMU continues at the beginning of the file, and leaves no hole before its output.
    wait_until("it is written on", Duration::from_secs(60), || {
        bytes(&log) > 0
    });
    let begin = std::fs::read(&log).unwrap();
    assert!(begin.first().is_some_and(|&byte| byte == b'x'));
    let ended = daemon.run(&["vm", "stop", "talks", "--timeout", "0"]);
    assert_eq!(code(&ended), 0, "{}", err(&ended));
    assert!(!log.parent().unwrap().exists());
}

#[test]
fn if_qemu_crashes_its_last_output_is_written_to_the_log_of_the_daemon() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let daemon = Daemon::start_logging(log.reopen().unwrap().into(), &[]);
    let asked = daemon.paused_vm("asked", &[]);
    let fails = daemon.paused_vm("fails", &[]);
    assert_ne!(asked["pid"], fails["pid"]);
    let words = "malloc(): unsorted double linked list corrupted";
    let said = daemon.state().join("vms/fails/qemu.log");
    let mut said = File::options().append(true).open(said).unwrap();
    writeln!(said, "an older line\n{words}").unwrap();
    let pid = i32::try_from(fails["pid"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::ABORT).unwrap();
    let ended = daemon.run(&["vm", "stop", "asked", "--timeout", "0"]);
    assert_eq!(code(&ended), 0, "{}", err(&ended));
    wait_until("both have ended", Duration::from_secs(60), || {
        daemon.json(&["vm", "list"]) == serde_json::json!([])
    });
    let lines = std::fs::read_to_string(log.path()).unwrap();
    let end_of = |vm: &str| {
        let name = format!("vm=\"{vm}\"");
        let is_it = |line: &&str| line.contains(&name) && line.contains("ended");
        lines
            .lines()
            .find(is_it)
            .unwrap_or_else(|| panic!("{lines}"))
    };
    let failed = end_of("fails");
    assert!(
        failed.contains("WARN") && failed.contains(words),
        "{failed}"
    );
    assert!(end_of("asked").contains("INFO"), "{lines}");
}
