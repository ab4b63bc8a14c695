//! What a guest says on its console does not fill the state directory.

use std::time::Duration;

use memfold_testkit::wait_until;

use crate::support::{Daemon, code, err};

/// Says `x` on the first serial port for ever: real mode, from a boot sector.
const SAYS: [u8; 8] = [
    0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, b'x', // mov al, 'x'
    0xee, // say: out dx, al
    0xeb, 0xfd, // jmp say
];

#[test]
fn a_console_that_never_stops_talking_keeps_its_end_and_a_little_before_it() {
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
    // QEMU goes on at the beginning of the file, and leaves no hole before it.
    wait_until("it is written on", Duration::from_secs(60), || {
        bytes(&log) > 0
    });
    let begin = std::fs::read(&log).unwrap();
    assert!(begin.first().is_some_and(|&byte| byte == b'x'));
    let ended = daemon.run(&["vm", "stop", "talks", "--timeout", "0"]);
    assert_eq!(code(&ended), 0, "{}", err(&ended));
    assert!(!log.parent().unwrap().exists());
}
