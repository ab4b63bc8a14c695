//! Tests of the preloaded library in a real QEMU: a guest counts in 64 pages while they are folded.

mod support;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfold_sys::{descriptor, memory};
use memfold_testkit::{patience, seconds, wait_until};
use memfold_units::Hva;
use memfold_wire::library::{Advice, FoldRun, Freeze, Order, Outcome, Range, Reply, VERSION};
use memfold_wire::{Decoder, encode};
use support::Random;

const RAM_BYTES: u64 = 64 << 20;
const TABLE: u64 = 0x1000;
const RUNNING: u64 = 0x1100;
const PAGES: u64 = 0x20000;

struct Vm {
    process: Child,
    ram: u64,
    folder: tempfile::TempDir,
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the path of this build's cdylib, which is beside the directory of test programs.
fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let release = program.parent().and_then(Path::parent).unwrap();
    let path = [
        release.join("libmemfold_qemu.so"),
        release.join("deps/libmemfold_qemu.so"),
    ]
    .into_iter()
    .find(|path| path.exists());
    path.expect("libmemfold_qemu.so is not built")
}

/// Builds the guest: a program that QEMU starts in place of a firmware.
fn firmware(folder: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/counter_guest.S");
    let run = |program: &str, arguments: &[&str]| {
        let done = Command::new(program)
            .args(arguments)
            .current_dir(folder)
            .status()
            .unwrap();
        assert!(done.success(), "{program} failed");
    };
    run("as", &["--32", "-o", "guest.o", source.to_str().unwrap()]);
    let linked = ["-m", "elf_i386", "-Ttext", "0", "--oformat", "binary"];
    run(
        "ld",
        &[&linked[..], &["-o", "guest.rom", "guest.o"]].concat(),
    );
    folder.join("guest.rom")
}

/// Time limit of a start.
const START_TIMEOUT: Duration = Duration::from_secs(5);

impl Vm {
    /// Starts a guest. Returns `None`, and reports the reason, if such a QEMU cannot run here.
    fn start(accel: &str, extra: &[&str]) -> Option<Self> {
        if let Err(error) = Command::new("qemu-system-x86_64").arg("-version").output() {
            return memfold_testkit::reports_skip(&format!("no qemu-system-x86_64: {error}"));
        }
        let opened = File::options().read(true).write(true).open("/dev/kvm");
        if let (Err(error), "kvm") = (opened, accel) {
            return memfold_testkit::reports_skip(&format!("/dev/kvm does not open: {error}"));
        }
        if let Some(vm) = Self::boot(accel, extra, true) {
            return Some(vm);
        }
        assert!(
            Self::boot(accel, extra, false).is_none(),
            "the guest counts without the library only"
        );
        assert_eq!(accel, "kvm", "the emulator runs no guest here");
        memfold_testkit::reports_skip("-accel kvm runs no guest here, with the library or without")
    }

    /// Boots the guest. Returns `None` if QEMU ends, or if the guest does not count in time.
    fn boot(accel: &str, extra: &[&str], preloaded: bool) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let firmware = firmware(folder.path());
        let mut qemu = Command::new("qemu-system-x86_64");
        if preloaded {
            qemu.env("LD_PRELOAD", library())
                .env("MEMFOLD_QEMU_SOCKET", folder.path().join("library"))
                .env("MEMFOLD_QEMU_MONITOR", folder.path().join("monitor"));
        }
        let process = qemu
            .args([
                "-accel",
                accel,
                "-m",
                "64",
                "-machine",
                "pc,memory-backend=ram0",
            ])
            .args(["-object", "memory-backend-ram,id=ram0,size=64M"])
            .arg("-bios")
            .arg(firmware)
            .args(["-display", "none", "-nic", "none"])
            .args(["-serial", "none", "-monitor", "none"])
            .args(["qmp", "monitor"].iter().flat_map(|name| {
                let path = folder.path().join(name);
                let socket = format!("unix:{},server=on,wait=off", path.display());
                ["-qmp".to_owned(), socket]
            }))
            .args(extra)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut vm = Self {
            process,
            ram: 0,
            folder,
        };
        let end = Instant::now() + patience(START_TIMEOUT);
        while Instant::now() < end {
            if let Some(status) = vm.process.try_wait().unwrap() {
                println!("QEMU with -accel {accel} ended by itself: {status}");
                return None;
            }
            vm.find_ram();
            if vm.ram != 0 && vm.words(RUNNING, 1) == [0x4d46] {
                return Some(vm);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        println!("the guest did not start to count in time with -accel {accel}");
        None
    }

    fn find_ram(&mut self) {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.process.id()))
            .unwrap_or_default();
        for line in maps.lines() {
            let Some((start, end)) = line.split(' ').next().and_then(|r| r.split_once('-')) else {
                continue;
            };
            let (Ok(start), Ok(end)) =
                (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16))
            else {
                continue;
            };
            if end - start == RAM_BYTES {
                self.ram = start;
            }
        }
    }

    fn bytes(&self, gpa: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let pid = rustix::process::Pid::from_child(&self.process);
        assert_eq!(
            memory::read(pid, Hva(self.ram + gpa), &mut bytes).unwrap_or(0),
            length
        );
        bytes
    }

    fn words(&self, gpa: u64, count: usize) -> Vec<u16> {
        self.bytes(gpa, count * 2)
            .chunks(2)
            .map(|c| u16::from_le_bytes([c[0], c[1]]))
            .collect()
    }

    fn connect(&self) -> Client {
        let path = self.folder.path().join("library");
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        Client {
            stream: UnixStream::connect(path).unwrap(),
            decoder: Decoder::new(),
        }
    }

    fn qmp(&self) -> Qmp {
        let stream = UnixStream::connect(self.folder.path().join("qmp")).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(150)))
            .unwrap();
        let mut qmp = Qmp {
            lines: BufReader::new(stream),
        };
        qmp.line();
        qmp.ask("qmp_capabilities");
        qmp
    }

    fn stop(&self) {
        self.qmp().ask("stop");
    }
}

struct Qmp {
    lines: BufReader<UnixStream>,
}

impl Qmp {
    fn line(&mut self) -> serde_json::Value {
        let mut line = String::new();
        assert!(self.lines.read_line(&mut line).unwrap() > 0);
        serde_json::from_str(&line).unwrap()
    }

    fn ask(&mut self, command: &str) -> serde_json::Value {
        writeln!(self.lines.get_mut(), "{{\"execute\":\"{command}\"}}").unwrap();
        loop {
            let line = self.line();
            if let Some(answer) = line.get("return") {
                return answer.clone();
            }
        }
    }

    fn event(&mut self) -> String {
        self.line()["event"].as_str().unwrap_or("").to_owned()
    }
}

struct Client {
    stream: UnixStream,
    decoder: Decoder,
}

impl Client {
    fn order(&mut self, order: &Order, file: Option<&OwnedFd>) -> Reply {
        let frame = encode(order).unwrap();
        descriptor::send(&self.stream, &frame, file.map(AsFd::as_fd)).unwrap();
        let mut buffer = [0; 4096];
        loop {
            if let Some(reply) = self.decoder.next().unwrap() {
                return reply;
            }
            let (n, _) = descriptor::receive(&self.stream, &mut buffer).unwrap();
            assert!(n > 0, "the library hung up on {order:?}");
            self.decoder.push(&buffer[..n]);
        }
    }

    fn greet(&mut self, vm: &Vm, store: &File) {
        match self.order(&Order::Hello { version: VERSION }, None) {
            Reply::Hello {
                problem: None,
                can_move: true,
                can_write_protect: true,
                ..
            } => {}
            other => panic!("{other:?}"),
        }
        let ram = Order::AddRam {
            hva: vm.ram,
            pages: RAM_BYTES / 4096,
            advice: Advice {
                mergeable: true,
                dontfork: true,
                ..Advice::default()
            },
        };
        assert_eq!(self.order(&ram, None), Reply::Ok);
        let file = OwnedFd::from(store.try_clone().unwrap());
        assert_eq!(
            self.order(
                &Order::AddStore {
                    store: 1,
                    max_pages: 1 << 24
                },
                Some(&file)
            ),
            Reply::Ok
        );
    }
}

#[test]
fn if_the_daemon_dies_while_a_vm_is_stopped_for_folding_the_vm_resumes() {
    let Some(vm) = Vm::start("tcg", &[]) else {
        return;
    };
    let store =
        File::from(rustix::fs::memfd_create("store", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    store.set_len(1 << 20).unwrap();
    let mut qmp = vm.qmp();
    for death in 0..30_u64 {
        let before = vm.words(TABLE, 64);
        let mut client = vm.connect();
        client.greet(&vm, &store);
        let run = FoldRun {
            hva: vm.ram + PAGES,
            pages: 64,
            store: 1,
            store_page: 0,
        };
        let order = Order::Fold {
            freeze: Freeze::Stopped { limit_us: 20_000 },
            runs: vec![run; 64],
        };
        (&client.stream)
            .write_all(&encode(&order).unwrap())
            .unwrap();
        std::thread::sleep(Duration::from_micros(death * 200));
        drop(client);
        while qmp.event() != "STOP" {}
        while qmp.event() != "RESUME" {}
        // The library serves the next daemon after the order has ended.
        vm.connect().greet(&vm, &store);
        assert_eq!(qmp.ask("query-status")["status"], "running");
        wait_until("the guest counts on", Duration::from_secs(60), || {
            vm.words(TABLE, 64) != before
        });
    }
}

#[allow(clippy::too_many_lines)] // One story from boot to stop.
fn counts_stay_right(accel: &str, extra: &[&str]) {
    let Some(vm) = Vm::start(accel, extra) else {
        return;
    };
    let store =
        File::from(rustix::fs::memfd_create("store", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    let mut client = vm.connect();
    // The library answers orders before Hello with an error.
    assert!(matches!(
        client.order(&Order::Stats, None),
        Reply::Error { .. }
    ));
    client.greet(&vm, &store);
    let mut random = Random(4242);
    let mut next = 0u64;
    let mut tally = std::collections::BTreeMap::new();
    let end = Instant::now() + seconds("MEMFOLD_STRESS_SECONDS", 5);
    while Instant::now() < end && next < 1 << 20 {
        let first = random.below(64);
        let pages = 1 + random.below(64 - first);
        let hva = vm.ram + PAGES + first * 4096;
        let order = if random.below(10) == 0 {
            Order::Release {
                freeze: Freeze::WriteProtect,
                ranges: vec![Range { hva, pages }],
            }
        } else {
            let bytes = vm.bytes(PAGES + first * 4096, usize::try_from(pages * 4096).unwrap());
            store.write_all_at(&bytes, next * 4096).unwrap();
            let runs = (0..pages)
                .map(|page| FoldRun {
                    hva: hva + page * 4096,
                    pages: 1,
                    store: 1,
                    store_page: next + page,
                })
                .collect();
            next += pages;
            Order::Fold {
                freeze: Freeze::WriteProtect,
                runs,
            }
        };
        if random.below(50) == 0 {
            // The daemon dies in the middle of an order, or sends garbage; another daemon takes
            // over.
            let frame = encode(&order).unwrap();
            let cut = usize::try_from(random.below(frame.len() as u64 + 1)).unwrap();
            (&client.stream).write_all(&frame[..cut]).unwrap();
            if random.below(2) == 0 {
                let _ = (&client.stream).write_all(&[0xff; 300]);
            }
            drop(client);
            client = vm.connect();
            client.greet(&vm, &store);
            *tally.entry("new daemon".to_owned()).or_insert(0) += 1;
            continue;
        }
        match client.order(&order, None) {
            Reply::Outcomes { outcomes, .. } => {
                for outcome in outcomes {
                    assert_ne!(outcome, Outcome::Refused);
                    let kind = if matches!(order, Order::Release { .. }) {
                        "release"
                    } else {
                        "fold"
                    };
                    let name = format!("{kind} {outcome:?}");
                    let name = name.split('{').next().unwrap_or_default().trim().to_owned();
                    *tally.entry(name).or_insert(0) += 1;
                }
            }
            other => panic!("{other:?}"),
        }
    }
    let zero = Order::DropZero {
        ranges: vec![Range {
            hva: vm.ram,
            pages: RAM_BYTES / 4096,
        }],
    };
    let zero = client.order(&zero, None);
    let running = vm.words(TABLE, 64);
    wait_until("the guest counts on", Duration::from_secs(60), || {
        vm.words(TABLE, 64) != running
    });
    // QEMU answers when its vCPUs are stopped.
    vm.stop();
    let table = vm.words(TABLE, 64);
    let wrong: Vec<_> = (0..64u64)
        .map(|page| {
            (
                page,
                vm.words(PAGES + page * 4096, 1)[0],
                table[usize::try_from(page).unwrap()],
            )
        })
        .filter(|(_, counted, expected)| counted != expected)
        .collect();
    println!(
        "-accel {accel} {extra:?}: {tally:?}; {zero:?}; {:?}",
        client.order(&Order::Stats, None)
    );
    // The guest may have been stopped between its two increments of a page.
    assert!(
        wrong.len() <= 1
            && wrong
                .iter()
                .all(|(_, counted, expected)| counted.wrapping_sub(*expected) == 1),
        "{wrong:?}"
    );
    assert!(
        tally.get("fold Done").is_some_and(|n| *n > 100),
        "{tally:?}"
    );
}

#[test]
fn a_guest_under_kvm_loses_no_memory_write_during_folding() {
    counts_stay_right("kvm", &[]);
}

#[test]
fn a_guest_under_tcg_in_a_sandbox_loses_no_memory_write_during_folding() {
    counts_stay_right(
        "tcg",
        &[
            "-sandbox",
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        ],
    );
}

#[test]
fn without_its_environment_variable_the_preload_library_does_nothing() {
    let output = Command::new("qemu-system-x86_64")
        .env("LD_PRELOAD", library())
        .env_remove("MEMFOLD_QEMU_SOCKET")
        .arg("-version")
        .output();
    match output {
        Ok(output) => assert!(
            output.status.success() && output.stderr.is_empty(),
            "{output:?}"
        ),
        Err(error) => memfold_testkit::report_skip(&format!("no qemu-system-x86_64: {error}")),
    }
}
