//! Tests of every cause that `memfold ksm explain` reports and that can be provoked, on stopped
//! QEMUs with options that provoke it.
//!
//! The causes "another domain", "no domain", "KSM stopped" and "folded memory" need a daemon: see
//! [`super::ksm`]. NUMA nodes need a machine with two nodes: see [`super::beside::nodes`].

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfold_ksm::{
    self as ksm, Cause, Controls, Explanation, Facts, Finding, KsmError, Merged, NOTES, Settings,
    merging_pages,
};
use memfold_testkit::{patience, report_skip, reports_skip, skip, slowness};
use memfold_vm::Qmp;
use serde_json::json;
use tempfile::TempDir;

use super::support;

const MIB: u64 = 1 << 20;

/// A QEMU whose guest does not run, and which is ended with the test.
struct Still {
    child: Child,
    directory: TempDir,
}

impl Still {
    fn start(arguments: &[&str]) -> Self {
        Self::start_by(Command::new("qemu-system-x86_64"), arguments)
    }

    fn start_by(mut command: Command, arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let qmp = directory.path().join("q");
        let qmp = format!("unix:{},server=on,wait=off", qmp.display());
        let child = command
            .args(["-nodefaults", "-display", "none", "-accel", "tcg"])
            .args(["-qmp", &qmp])
            .args(arguments)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut still = Self { child, directory };
        // QEMU listens before it has allocated its memory, and answers afterwards.
        let end = Instant::now() + patience(Duration::from_secs(30));
        while still.qmp().is_none() {
            let ended = still.child.try_wait().unwrap();
            assert!(
                ended.is_none() && Instant::now() < end,
                "{arguments:?}: {ended:?}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        still
    }

    fn qmp(&self) -> Option<Qmp> {
        let path = self.directory.path().join("q");
        Qmp::connect(&path, Duration::from_secs(5)).ok()
    }

    fn explain(&self) -> Explanation {
        let pid = i32::try_from(self.child.id()).unwrap();
        let proc_root = Path::new("/proc");
        let facts = Facts::read(&Controls::default(), proc_root, pid, None, None).unwrap();
        ksm::weigh(&facts)
    }

    /// Waits until a cause concerns at least `bytes` of QEMU's memory.
    fn wait(&self, cause: Cause, bytes: u64) -> Finding {
        let end = Instant::now() + patience(Duration::from_secs(60));
        loop {
            let explained = self.explain();
            let found = explained.causes.iter().find(|f| f.cause == cause);
            if let Some(found) = found.filter(|found| found.bytes >= bytes) {
                println!("{cause:?}: {} MiB: {}", found.bytes / MIB, found.words);
                return found.clone();
            }
            assert!(Instant::now() < end, "no {cause:?}: {explained:#?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Takes KSM for one test; `None`, with the reason printed, if that is impossible. Dropping the
/// guard restores KSM's settings and merged pages.
pub fn take() -> Option<ksm::Guard> {
    let controls = Controls::default();
    let end = Instant::now() + patience(Duration::from_secs(60));
    std::fs::create_dir_all(NOTES).unwrap();
    loop {
        match ksm::Guard::take_as(&controls, Path::new(NOTES), Merged::AsBefore) {
            Ok(guard)
                if guard.before().run == Some(0)
                    && merging_pages(Path::new("/proc")) == Some(0) =>
            {
                return Some(guard);
            }
            Ok(guard) => {
                return reports_skip(&format!("KSM is in use on this host: {:?}", guard.before()));
            }
            Err(KsmError::Busy(_)) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(error) => {
                return reports_skip(&error.to_string());
            }
        }
    }
}

fn fast(controls: &Controls) {
    let settings = Settings {
        run: Some(1),
        pages_to_scan: Some(20_000),
        sleep_millisecs: Some(1),
        ..Settings::default()
    };
    controls.apply(&settings).unwrap();
}

#[test]
fn ksm_explain_names_the_kind_of_memory_that_ksm_cannot_merge() {
    let Some(_turn) = support::turn() else { return };
    let Some(_ksm) = take() else { return };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, []).unwrap();
    let backend = |kind: &str| format!("memory-backend-{kind},id=r,size=64M");
    let file = format!("file,mem-path={}", file.display());
    let machine = "pc,memory-backend=r";
    for (machine, backend, cause) in [
        (machine, backend("memfd") + ",share=on", Cause::Shared),
        (
            machine,
            backend("memfd") + ",share=on,hugetlb=on,hugetlbsize=2M,reserve=off",
            Cause::Hugetlb,
        ),
        (machine, backend(&file) + ",share=on", Cause::Pmem),
        (
            "pc,memory-backend=r,mem-merge=off",
            backend(&file) + ",share=off",
            Cause::FileView,
        ),
        (
            "pc,memory-backend=r,mem-merge=off",
            backend("ram"),
            Cause::MergeOff,
        ),
    ] {
        let arguments = ["-S", "-m", "64", "-M", machine, "-object", &backend];
        let vm = Still::start(&arguments);
        let found = vm.wait(cause, 64 * MIB);
        assert_eq!(found.blocks, cause.blocks());
    }
    let segment = directory.path().join("segment");
    std::fs::File::create(&segment)
        .unwrap()
        .set_len(128 * MIB)
        .unwrap();
    let segment = format!(
        "memory-backend-file,id=p,share=on,readonly=on,size=128M,mem-path={}",
        segment.display()
    );
    let arguments = [
        "-S",
        "-M",
        "q35",
        "-m",
        "64,slots=1,maxmem=1G",
        "-object",
        &segment,
    ];
    let arguments = [&arguments[..], &["-device", "virtio-pmem-pci,memdev=p"]].concat();
    Still::start(&arguments).wait(Cause::Pmem, 128 * MIB);
}

/// Program that makes the kernel refuse `madvise(MADV_MERGEABLE)` with EINVAL, and then executes
/// its arguments.
const REFUSES: &str = r"
import ctypes, os, struct, sys
rules = [(0x20, 0, 0, 0), (0x15, 0, 3, 28), (0x20, 0, 0, 32), (0x15, 0, 1, 12), (6, 0, 0, 0x50016), (6, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *rule) for rule in rules))
program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', len(rules), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
os.execvp(sys.argv[1], sys.argv[1:])
";

#[test]
fn ksm_explain_names_the_setting_that_excludes_memory_from_ksm() {
    let Some(_turn) = support::turn() else { return };
    let Some(_ksm) = take() else { return };
    let ram = "memory-backend-ram,id=r,size=64M";
    let arguments = [
        "-S",
        "-m",
        "64",
        "-M",
        "pc,memory-backend=r",
        "-object",
        ram,
    ];
    let vm = Still::start(&arguments);
    vm.wait(Cause::NotPresent, 60 * MIB);
    let mut qmp = vm.qmp().unwrap();
    let back = json!({ "path": "/objects/r", "property": "merge", "value": false });
    qmp.execute("qom-set", back).unwrap();
    vm.wait(Cause::NotAdvised, 64 * MIB);

    // QEMU's own seccomp filter does not refuse the call.
    let vm = Still::start(&[&arguments[..], &["-sandbox", "on"]].concat());
    let back = json!({ "path": "/objects/r", "property": "merge", "value": false });
    vm.qmp().unwrap().execute("qom-set", back).unwrap();
    vm.wait(Cause::NotAdvised, 64 * MIB);

    let mut python = Command::new("python3");
    if cfg!(not(target_arch = "x86_64")) || python.arg("--version").output().is_err() {
        report_skip("a seccomp filter, for want of Python on x86-64");
        return;
    }
    let mut python = Command::new("python3");
    python.args(["-c", REFUSES, "qemu-system-x86_64"]);
    let found = Still::start_by(python, &arguments).wait(Cause::Refused, 64 * MIB);
    assert!(found.fix.contains("madvise"), "{}", found.fix);
}

#[test]
fn ksm_explain_distinguishes_pages_not_yet_scanned_from_pages_that_stay_unmerged() {
    let Some(_turn) = support::turn() else { return };
    let Some(_ksm) = take() else { return };
    let controls = Controls::default();
    // All pages are equal, but not zeroes: when a huge page is split, zero pages are mapped to the
    // zero page before KSM could merge them.
    let directory = tempfile::tempdir().unwrap();
    let alike = directory.path().join("alike");
    std::fs::write(&alike, vec![0xaa; 32 << 20]).unwrap();
    let loader = format!(
        "loader,addr=0x1000000,force-raw=on,file={}",
        alike.display()
    );
    let arguments = ["-S", "-M", "pc", "-m", "64", "-device", &loader];
    let vm = Still::start(&arguments);
    vm.wait(Cause::Stopped, 32 * MIB);
    if std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|mode| !mode.contains("[never]"))
    {
        vm.wait(Cause::HugePages, 2 * MIB);
    }
    let slow = Settings {
        run: Some(1),
        pages_to_scan: Some(1),
        sleep_millisecs: Some(1000),
        ..Settings::default()
    };
    controls.apply(&slow).unwrap();
    vm.wait(Cause::TooYoung, 32 * MIB);
    let first = vm.explain().first_merge_s.unwrap();
    // 8,192 pages at one a second, scanned twice; and other mergeable memory on this host.
    assert!(first > 15_000.0, "{first} s");

    let other = Still::start(&arguments);
    first_merge_is_when_it_was_said(&controls, &vm);
    fast(&controls);
    vm.wait(Cause::MaxPageSharing, 0);
    let end = Instant::now() + patience(Duration::from_secs(30));
    while vm.explain().merged_bytes < 31 * MIB {
        assert!(Instant::now() < end, "{:#?}", vm.explain());
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("{}", vm.explain().verdict);
    drop((vm, other));
    controls.unmerge(0).unwrap();
    let vm = Still::start(&arguments);
    controls.write("run", &2).unwrap();
    vm.wait(Cause::Unmerged, 32 * MIB);
}

/// Checks that the predicted time of the first merge is an upper bound, and not far above the real
/// time.
fn first_merge_is_when_it_was_said(controls: &Controls, vm: &Still) {
    let medium = Settings {
        pages_to_scan: Some(100),
        sleep_millisecs: Some(20),
        ..Settings::default()
    };
    controls.apply(&medium).unwrap();
    let said = vm.explain().first_merge_s.unwrap();
    let began = Instant::now();
    while vm.explain().first_merge_s.is_some() {
        assert!(
            began.elapsed().as_secs_f64() < said * 1.25 * slowness() + 1.0,
            "{said} s"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    let took = began.elapsed().as_secs_f64();
    println!("first merge after {took:.1} s, said: within {said:.1} s");
    // The prediction includes memory of QEMU itself, where the loader has its file a second time.
    assert!(took > said * 0.1, "{took} s of {said} s");
    assert!(vm.explain().merged_bytes > 0);
}

#[test]
fn ksm_explain_names_memory_that_was_allocated_after_the_last_scan() {
    let Some(_turn) = support::turn() else { return };
    let Some(_ksm) = take() else { return };
    let controls = Controls::default();
    let directory = tempfile::tempdir().unwrap();
    let alike = directory.path().join("alike");
    std::fs::write(&alike, vec![0xaa; 256 << 20]).unwrap();
    let loader = format!(
        "loader,addr=0x1000000,force-raw=on,file={}",
        alike.display()
    );
    let vm = Still::start(&["-S", "-M", "pc", "-m", "320", "-device", &loader]);
    fast(&controls);
    let end = Instant::now() + patience(Duration::from_secs(60));
    while vm.explain().merged_bytes < 255 * MIB {
        assert!(Instant::now() < end, "{:#?}", vm.explain());
        std::thread::sleep(Duration::from_millis(100));
    }
    controls.write("pages_to_scan", &0).unwrap();
    let mut qmp = vm.qmp().unwrap();
    let more = json!({ "qom-type": "memory-backend-ram", "id": "more", "size": 16 * MIB, "prealloc": true });
    qmp.execute("object-add", more).unwrap();
    let found = vm.wait(Cause::NotVisited, 15 * MIB);
    assert!(!found.blocks);
    // QEMU's pages are zeroes, and there are no others.
    let zeroes = vm.wait(Cause::UseZeroPages, 8 * MIB);
    assert!(zeroes.bytes < 40 * MIB, "{} bytes", zeroes.bytes);
    controls.write("use_zero_pages", &1).unwrap();
    let explained = vm.explain();
    let told = explained
        .causes
        .iter()
        .any(|f| f.cause == Cause::UseZeroPages);
    assert!(!told, "{explained:#?}");
}

#[test]
fn on_a_kernel_without_ksm_ksm_explain_says_so() {
    let Some(_turn) = support::turn() else { return };
    let vm = Still::start(&["-S", "-M", "pc", "-m", "64"]);
    let mut shell = Command::new("unshare");
    let line = format!(
        "mount -t tmpfs none /sys/kernel/mm && exec {} --json --socket /nowhere ksm explain {}",
        env!("CARGO_BIN_EXE_memfold"),
        vm.child.id()
    );
    let done = shell.args(["--mount", "sh", "-c", &line]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    let explained: Explanation =
        serde_json::from_slice(&done.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    assert_eq!(explained.causes[0].cause, Cause::NoKsm, "{explained:#?}");
    assert!(
        explained.verdict.contains("no KSM"),
        "{}",
        explained.verdict
    );
}

/// Guest program that increments a byte of each of 112 pages, again and again, in real mode, from a
/// boot sector.
const COUNTS: [u8; 29] = [
    0xfa, // cli
    0xb8, 0x00, 0x20, // mov ax, 0x2000
    0x8e, 0xc0, // segment: mov es, ax
    0x31, 0xff, // xor di, di
    0x26, 0xfe, 0x05, // page: inc byte es:[di]
    0x81, 0xc7, 0x00, 0x10, // add di, 0x1000
    0x73, 0xf7, // jnc page
    0x8c, 0xc0, // mov ax, es
    0x80, 0xc4, 0x10, // add ah, 0x10
    0x80, 0xfc, 0x90, // cmp ah, 0x90
    0x75, 0xe9, // jne segment
    0xeb, 0xe4, // jmp to mov ax, 0x2000
];

#[test]
fn ksm_explain_distinguishes_unique_content_from_changing_content() {
    let Some(_turn) = support::turn() else { return };
    let Some(_ksm) = take() else { return };
    let controls = Controls::default();
    let directory = tempfile::tempdir().unwrap();
    let random = directory.path().join("random");
    let mut bytes = vec![0; 32 << 20];
    let mut urandom = std::fs::File::open("/dev/urandom").unwrap();
    std::io::Read::read_exact(&mut urandom, &mut bytes).unwrap();
    std::fs::write(&random, &bytes).unwrap();
    let mut sector = [0; 512];
    sector[..COUNTS.len()].copy_from_slice(&COUNTS);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    let disk = directory.path().join("disk");
    std::fs::write(&disk, sector.repeat(64)).unwrap();
    let loader = format!(
        "loader,addr=0x1000000,force-raw=on,file={}",
        random.display()
    );
    let drive = format!("if=ide,format=raw,file={}", disk.display());
    let vm = Still::start(&["-M", "pc", "-m", "64", "-device", &loader, "-drive", &drive]);
    fast(&controls);
    let unique = vm.wait(Cause::Unique, 28 * MIB);
    assert!(!unique.blocks);
    vm.wait(Cause::Volatile, 4096);
    if controls.number::<u64>("smart_scan").unwrap() == Some(1) {
        vm.wait(Cause::SmartScan, 0);
    }
    let explained = vm.explain();
    println!("{explained:#?}");
    assert!(explained.profit_bytes.is_none_or(|profit| profit < 8 << 20));
}

#[test]
fn ksm_explain_names_memory_that_is_swapped_out() {
    let Some(_turn) = support::turn() else { return };
    let Some(_ksm) = take() else { return };
    let swap = match support::Swap::on(96) {
        Ok(swap) => swap,
        Err(why) => skip!("no swap: {why}"),
    };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, vec![0x5a; 32 << 20]).unwrap();
    let loader = format!("loader,addr=0x1000000,force-raw=on,file={}", file.display());
    let vm = Still::start(&["-S", "-M", "pc", "-m", "64", "-device", &loader]);
    support::swap_out(vm.child.id());
    let found = vm.wait(Cause::Swapped, 16 * MIB);
    assert_eq!(found.blocks, Cause::Swapped.blocks());
    drop(vm);
    swap.off();
}
