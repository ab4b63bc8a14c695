//! Tests of a VM's console and of its logs. What a guest writes to its console, which QEMU keeps in
//! a log file, does not fill the daemon's state directory.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Stdio};
use std::time::Duration;

use memfold_testkit::{patience, wait_until};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Daemon, code, err, refused};

/// Guest program that writes `x` to the first serial port forever, in real mode, from a boot
/// sector.
const SAYS: [u8; 8] = [
    0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, b'x', // mov al, 'x'
    0xee, // say: out dx, al
    0xeb, 0xfd, // jmp say
];

/// Guest program that sends each byte from the first serial port back, likewise.
const ECHOES: [u8; 15] = [
    0xba, 0xfd, 0x03, // wait: mov dx, 0x3fd
    0xec, // in al, dx
    0xa8, 0x01, // test al, 1
    0x74, 0xf8, // jz wait
    0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xec, // in al, dx
    0xee, // out dx, al
    0xeb, 0xf1, // jmp wait
];

/// Starts a VM that runs a program from its boot sector.
fn boot(daemon: &Daemon, name: &str, program: &[u8]) {
    let disk = daemon.state().join(format!("{name}.raw"));
    // The BIOS boots no disk that is smaller than a cylinder.
    let mut bytes = vec![0; 16 << 20];
    bytes[..program.len()].copy_from_slice(program);
    bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    std::fs::write(&disk, bytes).unwrap();
    let run = ["vm", "run", "--name", name, "--memory", "64M", "--no-fold"];
    let ran = daemon.run(&[&run[..], &["--disk", disk.to_str().unwrap()]].concat());
    assert_eq!(code(&ran), 0, "{}", err(&ran));
}

/// A `vm console` with pipes instead of a terminal.
struct Attached(Child);

impl Attached {
    fn new(daemon: &Daemon, name: &str) -> Self {
        let mut command = daemon.command(&["vm", "console", name]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    fn types(&mut self, keys: &[u8]) {
        self.0.stdin.as_mut().unwrap().write_all(keys).unwrap();
    }

    /// Types keys until the guest, which may not have started, sends them back.
    fn wait_for_echo(&mut self) {
        let mut out = self.0.stdout.take().unwrap();
        let reader = std::thread::spawn(move || {
            let mut byte = [0];
            while out.read(&mut byte).unwrap() == 1 && byte != *b"k" {}
            (byte, out)
        });
        wait_until("the guest answers", Duration::from_secs(60), || {
            self.types(b"k");
            reader.is_finished()
        });
        let (byte, out) = reader.join().unwrap();
        assert_eq!(byte, *b"k");
        self.0.stdout = Some(out);
    }

    /// Types Ctrl-], and waits for the end of the command.
    fn ends(mut self) {
        self.types(b"\x1d");
        assert_eq!(self.0.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn vm_console_passes_keys_and_output_for_one_client_until_ctrl_bracket_or_the_vms_end() {
    let daemon = Daemon::start();
    boot(&daemon, "echoes", &ECHOES);
    let mut console = Attached::new(&daemon, "echoes");
    console.wait_for_echo();
    let words = ["console of VM 'echoes' is in use", "Ctrl-]"];
    refused(&daemon.run(&["vm", "console", "echoes"]), 1, &words);
    console.ends();
    let mut next = None;
    wait_until("the console is free", Duration::from_secs(60), || {
        let mut console = Attached::new(&daemon, "echoes");
        std::thread::sleep(patience(Duration::from_millis(200)));
        let is_refused = console.0.try_wait().unwrap().is_some();
        next = (!is_refused).then_some(console);
        next.is_some()
    });
    let mut console = next.unwrap();
    console.wait_for_echo();
    let logs = daemon.run(&["vm", "logs", "echoes"]);
    assert!(String::from_utf8(logs.stdout).unwrap().contains('k'));
    let ended = daemon.run(&["vm", "stop", "echoes", "--timeout", "0"]);
    assert_eq!(code(&ended), 0, "{}", err(&ended));
    assert_eq!(console.0.wait().unwrap().code(), Some(0));
    refused(
        &daemon.run(&["vm", "console", "echoes"]),
        1,
        &["no VM named 'echoes'"],
    );
    refused(
        &daemon.run(&["vm", "logs", "echoes"]),
        1,
        &["no VM named 'echoes'"],
    );
    let (status, _) = daemon.http("POST", "/v1/vms/echoes/console", b"");
    assert_eq!(status, 426);
}

#[test]
fn if_a_guest_writes_endlessly_to_its_console_the_log_is_rotated_and_bounded() {
    const MIB: u64 = 1 << 20;
    let daemon = Daemon::start();
    boot(&daemon, "talks", &SAYS);
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
        std::fs::read(&log).is_ok_and(|text| text.first() == Some(&b'x'))
    });
    let shown = daemon.json(&["vm", "logs", "talks"]);
    let console = shown["console"].as_str().unwrap();
    assert_eq!(console.len() as u64, MIB);
    assert!(console.bytes().all(|byte| byte == b'x'));
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
