//! Tests with guests that swap to RAM of another host (a lender). The swap disk moves there and
//! back, and lenders die: no byte may be lost.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use memfold_api::{BorrowRequest, Client, LendRequest, SwapPlace};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_lend::wire::Wire;
use memfold_lend::{Address, Durability, LenderStatus, Transport};
use memfold_testkit::{bound, dose, slowness, wait_until};
use memfold_units::ByteSize;
use memfold_vm::{Identity, Process, Vm, VmDirectory};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{self, BOOT};

/// Program that uses more memory than the guest has, and checks every word of it.
pub const SWAPPER: &str = include_str!("../guest/swapper.c");

const RAM: ByteSize = ByteSize::mib(224);
const SWAP: ByteSize = ByteSize::mib(512);
const ARRAY_MIB: u64 = 320;

/// Longest time that the guest may wait for one page when a lender dies, in seconds: the promise.
const LONGEST_STALL: f64 = 5.0;

/// The daemon of a host that lends or borrows. The daemon and its VMs end when this is dropped.
pub struct Host {
    child: Child,
    /// Directory with the socket `s`, the state directory `state` and the log `log`.
    pub directory: tempfile::TempDir,
    pub client: Client,
}

impl Host {
    /// Starts a daemon by `program`, a command that runs `memfold`, with more arguments for
    /// `serve`.
    pub fn start(
        directory: tempfile::TempDir,
        mut program: Command,
        name: &str,
        more: &[&str],
    ) -> Self {
        let path = |file: &str| directory.path().join(file);
        let log = std::fs::File::create(path("log")).unwrap();
        let child = program
            .arg("--socket")
            .arg(path("s"))
            .args(["serve", "--host", name, "--config", "/dev/null", "--state"])
            .arg(path("state"))
            .args(more)
            .stderr(log)
            .spawn()
            .unwrap();
        let client = Client::new(&path("s")).unwrap();
        let host = Self {
            child,
            directory,
            client,
        };
        wait(&format!("the daemon of '{name}' answers"), || {
            host.client.get::<serde_json::Value>("/v1/version").is_ok()
        });
        host
    }

    /// Starts the daemon of a lender that serves the registry.
    fn lender() -> Self {
        Self::named("lender", &[])
    }

    /// Starts the daemon of a host with this name, with more arguments for `serve`.
    fn named(name: &str, more: &[&str]) -> Self {
        let program = Command::new(env!("CARGO_BIN_EXE_memfold"));
        Self::start(tempfile::tempdir().unwrap(), program, name, more)
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("s")
    }

    fn lend(&self, max: ByteSize, transport: Transport) {
        let request = LendRequest {
            max_bytes: max.0,
            listen: Some([127, 0, 0, 1].into()),
            announce: None,
            ports: None,
            transport,
            cleartext: false,
        };
        self.client
            .post::<_, LenderStatus>("/v1/lend", &request)
            .unwrap();
        self.wait_free(max);
    }

    pub fn status(&self) -> LenderStatus {
        let status: Option<LenderStatus> = self.client.get("/v1/lend").unwrap();
        status.unwrap()
    }

    pub fn wait_free(&self, bytes: ByteSize) {
        wait("it has so much to spare", || {
            let status = self.status();
            status.offer_bytes >= bytes.0 && status.lent_bytes == 0
        });
    }

    /// Returns the process that exports the lender's only lease.
    pub fn export(&self) -> Pid {
        server_of(&self.directory.path().join("state/lend"))
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Ok(vms) = Vm::discover(&self.directory.path().join("state")) {
            for vm in vms {
                let _ = vm.stop(Duration::ZERO);
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            println!("{}", self.log());
        }
    }
}

/// Returns the export process of a daemon that has its exports' logs in `place`.
fn server_of(place: &Path) -> Pid {
    let is_server = |comm: String| ["nbdkit", "tgtd"].contains(&comm.trim());
    let found = std::fs::read_dir("/proc").unwrap().flatten().find(|entry| {
        std::fs::read_link(entry.path().join("fd/2")).is_ok_and(|to| to.starts_with(place))
            && std::fs::read_to_string(entry.path().join("comm")).is_ok_and(is_server)
    });
    let name = found.expect("nothing is exported").file_name();
    Pid::from_raw(name.to_str().unwrap().parse().unwrap()).unwrap()
}

#[track_caller]
pub fn wait(what: &str, ready: impl FnMut() -> bool) {
    wait_until(what, Duration::from_secs(300), ready);
}

/// Returns figures that the guest's program has printed so far: pages checked, wrong words, longest
/// access in seconds.
pub fn heard(lab: &Lab) -> (u64, u64, f64) {
    let said = lab.exec("v", "cat /run/swapper", Duration::from_secs(300));
    figures(&said.unwrap())
}

/// Reads the figures of [`heard`] from all lines that the program has printed.
pub fn figures(said: &str) -> (u64, u64, f64) {
    let (mut checked, mut wrong, mut longest) = (0, 0, 0.0_f64);
    for line in said.lines() {
        let mut words = line.split(' ').skip(1);
        let mut next = || words.next().unwrap().parse::<u64>().unwrap();
        (checked, wrong) = (next(), next());
        longest = longest.max(next() as f64 / 1e6);
    }
    (checked, wrong, longest)
}

/// Starts the VM `v` with a swap disk, whose name the guest keeps in `/run/swap-disk`.
fn start_with_swap(lab: &Lab, swap: ByteSize) {
    let mut spec = Lab::spec("v", "trixie-b", RAM, DiskMode::Buffered).unwrap();
    spec.swap = Some(swap);
    lab.start_warm(spec).unwrap();
    lab.wait_ready("v", BOOT).unwrap();
    wait("the guest uses its swap disk", || {
        let find = "awk '/^.dev.vd/ { print $1 }' /proc/swaps | tee /run/swap-disk";
        let disk = lab.exec("v", find, Duration::from_secs(300)).unwrap();
        !disk.is_empty()
    });
}

/// Starts the VM `v`, whose program uses more memory than the guest has, so that the guest swaps.
pub fn swapping(lab: &Lab, swap: ByteSize) {
    let limit = Duration::from_secs(300);
    start_with_swap(lab, swap);
    let begin = format!(
        "{}gcc -O2 -o /opt/swapper /opt/swapper.c && systemd-run -q --unit=swapper -p OOMScoreAdjust=-500 /opt/swapper {ARRAY_MIB} /run/swapper /run/swapper.stop",
        support::file("swapper.c", SWAPPER)
    );
    lab.exec("v", &begin, limit).unwrap();
    wait("it has begun to check", || {
        let lines = lab
            .exec("v", "wc -l < /run/swapper || echo 0", limit)
            .unwrap();
        lines.trim().parse::<u64>().unwrap_or(0) > 3
    });
}

/// Makes each write to the copy of the swap disk fail from now on. Returns the block node that does
/// this.
fn break_copy(lab: &Lab) -> &'static str {
    let mut qmp = support::qmp(lab.directory(), "v");
    let nodes = qmp.query("query-named-block-nodes").unwrap();
    let copy = nodes.as_array().unwrap().iter().find(|node| {
        let name = node["node-name"].as_str().unwrap();
        name.starts_with("swap-copy")
    });
    let copy = copy.expect("there is no copy");
    let broken = "broken";
    qmp.execute(
        "blockdev-add",
        serde_json::json!({
            "driver": "blkdebug", "node-name": broken,
            "image": { "driver": "file", "filename": copy["file"], "locking": "off" },
            "inject-error": [{ "event": "none", "iotype": "write", "errno": 5 }],
        }),
    )
    .unwrap();
    let reopened = serde_json::json!({ "driver": "raw", "node-name": copy["node-name"], "file": broken,
        "cache": { "direct": false, "no-flush": true } });
    qmp.execute(
        "blockdev-reopen",
        serde_json::json!({ "options": [reopened] }),
    )
    .unwrap();
    broken
}

/// Returns a number below `below` that differs from run to run.
fn chance(below: u64) -> u64 {
    memfold_vm::overlay::unique() / 1000 % below
}

pub fn kills(by_default: u64) -> u64 {
    dose("MEMFOLD_LENDER_KILLS", by_default)
}

#[test]
fn when_lenders_die_a_guest_that_swaps_to_lent_memory_loses_no_byte() {
    swap_while_lenders_die(Transport::Nbd, kills(2));
}

pub fn swap_while_lenders_die(transport: Transport, kills: u64) {
    let Some(_turn) = support::turn_ahead() else {
        return;
    };
    let limit = Duration::from_secs(300);
    let lender = Host::lender();
    lender.lend(SWAP, transport);
    let lab = Lab::with_registry(EngineSettings::default(), &lender.socket()).unwrap();
    let daemon = lab.daemon();
    swapping(&lab, SWAP);
    let (checked, _, on_disk) = heard(&lab);
    let used = lab
        .exec("v", "grep SwapFree /proc/meminfo; cat /proc/swaps", limit)
        .unwrap();
    println!(
        "on disk: {checked} pages checked, longest access {on_disk:.3} s; {}",
        used.replace('\n', "; ")
    );
    // The dashboard shows the same figure.
    let said = daemon.views().swap_use("v").unwrap();
    let is_some_of_it = |bytes: u64| bytes > (ARRAY_MIB << 20) - RAM.0 && bytes <= SWAP.0;
    assert!(said.used_bytes.is_some_and(is_some_of_it), "{said:?}");
    // The VM's own host lends it nothing, however much memory it has.
    let offered = LendRequest {
        max_bytes: 64 << 20,
        listen: None,
        announce: None,
        ports: None,
        transport: Transport::Nbd,
        cleartext: false,
    };
    daemon.lending().lend(&offered).unwrap();
    wait("its host knows that it is short", || {
        let status = daemon.lending().status().unwrap();
        status.offer_bytes == 0 && status.why.contains("guest of this host")
    });
    daemon.lending().stop();
    wait("its host lends no more", || {
        daemon.lending().status().is_none()
    });
    let request = BorrowRequest {
        durability: Durability::Disk,
        ..BorrowRequest::default()
    };
    let place = || place_of(&lab);
    for kill in 0..kills {
        let done = daemon.swap_disks().borrow_memory("v", &request).unwrap();
        assert_eq!(done.place, SwapPlace::Lent);
        let after = Duration::from_millis(500 + chance(3000));
        std::thread::sleep(after);
        kill_process(lender.export(), Signal::KILL).unwrap();
        let begun = Instant::now();
        wait("it goes on, on its copy", || place() == SwapPlace::OnCopy);
        println!(
            "kill {kill}: switched in {} ms, killed after {after:?}, copy alone after {:?}",
            done.took_ms,
            begun.elapsed()
        );
        let (checked, wrong, _) = heard(&lab);
        assert_eq!(wrong, 0, "after kill {kill}");
        wait("it checks on", || heard(&lab).0 > checked);
        // Without this, the VM would borrow again later.
        daemon.swap_disks().return_memory("v").unwrap();
        lender.wait_free(SWAP);
    }
    let (.., with_kills) = heard(&lab);
    // The next lender hangs instead of dying.
    daemon.swap_disks().borrow_memory("v", &request).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    kill_process(lender.export(), Signal::STOP).unwrap();
    wait("it goes on, on its copy", || place() == SwapPlace::OnCopy);
    let (checked, ..) = heard(&lab);
    wait("it checks on", || heard(&lab).0 > checked);
    daemon.swap_disks().return_memory("v").unwrap();
    lender.wait_free(SWAP);
    // The memory is returned while it is in use.
    let done = daemon.swap_disks().borrow_memory("v", &request).unwrap();
    let back = daemon.swap_disks().return_memory("v").unwrap();
    println!(
        "borrowed in {} ms, given back in {} ms",
        done.took_ms, back.took_ms
    );
    assert!(back.changed, "{back:?}");
    let took = Duration::from_millis(back.took_ms);
    assert!(took < bound(Duration::from_secs(15)), "{back:?}");
    lender.wait_free(SWAP);
    let (checked, wrong, longest) = all_checked(&lab);
    println!(
        "{kills} kills and a hang: {checked} pages checked, {wrong} words wrong, longest access {on_disk:.3} s on disk, {with_kills:.3} s with kills, {longest:.3} s in all"
    );
    assert!(longest < LONGEST_STALL * slowness(), "{longest} s");
    lab.stop("v").unwrap();
}

#[test]
fn if_a_write_to_the_disk_copy_of_lent_memory_fails_a_swapping_guest_moves_and_loses_no_byte() {
    copy_fails(Transport::Nbd);
}

#[test]
fn a_disk_copy_of_lent_memory_that_lacks_the_latest_write_is_never_read() {
    lack_writes(Transport::Nbd);
}

/// Tests a failed write to the copy on disk, of which QEMU's event is received: the copy is
/// incomplete, and the VM moves to a new file before its lender can die.
pub fn copy_fails(transport: Transport) {
    let Some(_turn) = support::turn_ahead() else {
        return;
    };
    let lender = Host::lender();
    lender.lend(SWAP, transport);
    let lab = Lab::with_registry(EngineSettings::default(), &lender.socket()).unwrap();
    let daemon = lab.daemon();
    swapping(&lab, SWAP);
    let request = BorrowRequest {
        durability: Durability::Disk,
        ..BorrowRequest::default()
    };
    let place = || place_of(&lab);
    // A write to the copy on disk fails, so that the copy is incomplete: it must not be read when
    // the lender dies.
    daemon.swap_disks().borrow_memory("v", &request).unwrap();
    let broken = break_copy(&lab);
    let begun = Instant::now();
    let mut known = false;
    wait("it is on disk again, in a new file", || {
        let leases = daemon.reports().leases().unwrap().leases;
        known |= leases.iter().any(|l| l.durability == Durability::None);
        place() == SwapPlace::OnDisk
    });
    assert!(known, "its lender wasn't told that it has the only copy");
    println!("its copy failed; moved after {:?}", begun.elapsed());
    let (checked, wrong, _) = heard(&lab);
    assert_eq!(wrong, 0, "after its copy failed");
    wait("it checks on", || heard(&lab).0 > checked);
    let mut qmp = support::qmp(lab.directory(), "v");
    // If the node were still in use, it could not be removed.
    qmp.execute("blockdev-del", serde_json::json!({ "node-name": broken }))
        .unwrap();
    drop(qmp);
    daemon.swap_disks().return_memory("v").unwrap();
    lender.wait_free(SWAP);
    all_checked(&lab);
    lab.stop("v").unwrap();
}

/// Tests failed writes to the copy on disk, of which QEMU's event is not received, or after which
/// the lender dies: data from before the failed write is never read. The guest uses the disk
/// without a file system.
pub fn lack_writes(transport: Transport) {
    let Some(_turn) = support::turn_ahead() else {
        return;
    };
    let lender = Host::lender();
    lender.lend(SWAP, transport);
    let lab = Lab::with_registry(EngineSettings::default(), &lender.socket()).unwrap();
    start_with_swap(&lab, SWAP);
    lab.exec("v", "swapoff -a", Duration::from_secs(300))
        .unwrap();
    let request = BorrowRequest {
        durability: Durability::Disk,
        ..BorrowRequest::default()
    };
    miss_what_qemu_reports(&lab, &lender, &request);
    lose_copy_and_lender(&lab, &lender, &request);
    lab.stop("v").unwrap();
}

/// Waits until the guest's program has checked all of its data, with no wrong word and no I/O error
/// in the kernel's log. Returns the figures of [`heard`].
fn all_checked(lab: &Lab) -> (u64, u64, f64) {
    let limit = Duration::from_secs(300);
    lab.exec("v", "touch /run/swapper.stop", limit).unwrap();
    let mut said = String::new();
    wait_until("all pages are checked", Duration::from_secs(600), || {
        said = lab.exec("v", "sed -n /^end/p /run/swapper", limit).unwrap();
        !said.is_empty()
    });
    assert_eq!(
        said.trim(),
        format!("end {} pages, 0 words wrong", ARRAY_MIB * 256)
    );
    lab.exec("v", "sed -i /^end/d /run/swapper", limit).unwrap();
    let errors =
        "dmesg | awk '/I\\/O error|[Ww]rite-error|[Rr]ead-error/ { n++ } END { print n + 0 }'";
    let errors = lab.exec("v", errors, limit).unwrap();
    assert_eq!(errors.trim(), "0", "the guest has seen errors");
    heard(lab)
}

/// Fills the first block of the swap disk, which the guest no longer uses, with a letter.
fn write_block(lab: &Lab, letter: &str) {
    let write = format!(
        "tr '\\0' '{letter}' < /dev/zero | dd of=$(cat /run/swap-disk) bs=4096 count=1 iflag=fullblock oflag=direct status=none"
    );
    lab.exec("v", &write, Duration::from_secs(300)).unwrap();
}

/// Reads the block. Returns its first letter, or `EIO` for an I/O error of the disk; any other
/// failure fails the test.
fn read_block(lab: &Lab) -> String {
    let read = "letter=$(dd if=$(cat /run/swap-disk) bs=4096 count=1 iflag=direct status=none 2> /run/dd.said | tr -d '\\0' | head -c 1)
        if [ ! -s /run/dd.said ]; then printf %s \"$letter\"
        elif grep -q 'Input/output error' /run/dd.said; then printf EIO
        else cat /run/dd.said >&2; exit 1; fi";
    lab.exec("v", read, Duration::from_secs(300)).unwrap()
}

fn place_of(lab: &Lab) -> SwapPlace {
    let borrowed = lab.daemon().reports().leases().unwrap().borrowed;
    let of_it = borrowed.into_iter().find(|b| b.vm == "v");
    of_it.map_or(SwapPlace::OnDisk, |b| b.place)
}

/// Tests that QEMU's event about a failed write is not received: the copy is compared with the
/// written blocks, and is no longer used if it lacks some.
fn miss_what_qemu_reports(lab: &Lab, lender: &Host, request: &BorrowRequest) {
    let directory = VmDirectory::of(lab.directory(), "v");
    let note = || -> serde_json::Value {
        let text = std::fs::read(directory.borrowed()).unwrap();
        serde_json::from_slice(&text).unwrap()
    };
    let daemon = Process::open(Identity::of(rustix::process::getpid()).unwrap()).unwrap();
    // Simulates that the daemon was killed and another one started.
    let disconnect = || {
        let monitor = Address::Unix(directory.daemon_qmp());
        wait("it knows that it may have missed something", || {
            if note()["copy_unwatched"] == false {
                // The connection is missing while QEMU reconnects.
                if let Some(wire) = Wire::find(&daemon, &monitor).unwrap() {
                    wire.cut();
                }
                std::thread::sleep(Duration::from_secs(2));
            }
            note()["copy_unwatched"] == true
        });
    };
    lab.daemon()
        .swap_disks()
        .borrow_memory("v", request)
        .unwrap();
    write_block(lab, "A");
    disconnect();
    let begun = Instant::now();
    wait("its copy is found whole", || {
        note()["copy_unwatched"] == false
    });
    println!("its copy was compared after {:?}", begun.elapsed());
    assert_eq!(place_of(lab), SwapPlace::Lent);
    // Imitates the copy after a failed write.
    let copy = note()["copy"].as_str().unwrap().to_owned();
    let copy = std::fs::File::options().write(true).open(copy).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&copy, &[b'C'; 4096], 0).unwrap();
    disconnect();
    let begun = Instant::now();
    wait("it is on disk again, in a new file", || {
        place_of(lab) == SwapPlace::OnDisk
    });
    println!("its copy lacked a write; moved after {:?}", begun.elapsed());
    assert_eq!(read_block(lab), "A");
    lab.daemon().swap_disks().return_memory("v").unwrap();
    lender.wait_free(SWAP);
}

/// Tests that the copy lacks a write and that the lender dies at once: data from before this write
/// is never read.
fn lose_copy_and_lender(lab: &Lab, lender: &Host, request: &BorrowRequest) {
    lab.daemon()
        .swap_disks()
        .borrow_memory("v", request)
        .unwrap();
    write_block(lab, "A");
    break_copy(lab);
    write_block(lab, "B");
    let after = Duration::from_millis(chance(200));
    std::thread::sleep(after);
    kill_process(lender.export(), Signal::KILL).unwrap();
    let mut place = SwapPlace::Lent;
    wait("it is lost, or safe", || {
        place = place_of(lab);
        matches!(place, SwapPlace::Lost | SwapPlace::OnDisk)
    });
    let read = read_block(lab);
    println!("its copy failed, its lender was killed {after:?} later: {place:?}, '{read}' is read");
    let right = if place == SwapPlace::Lost { "EIO" } else { "B" };
    assert_eq!(read, right);
}

/// Overwrites the last word of most pages that an export holds. Returns the number of these pages.
fn garble(export: Pid) -> u64 {
    use std::os::unix::fs::FileExt;
    let pid = export.as_raw_nonzero();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let memory = std::fs::File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{pid}/mem"))
        .unwrap();
    let mut changed = 0;
    for line in maps.lines().filter(|line| line.contains("rw-p")) {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let [from, to] = [from, to].map(|n| u64::from_str_radix(n, 16).unwrap());
        // The lent memory is a large mapping; small ones belong to the process itself.
        if to - from < 16 << 20 {
            continue;
        }
        let mut word = [0; 8];
        for at in (from + 8192..to).step_by(4096) {
            let is_used = memory.read_exact_at(&mut word, at - 8).is_ok() && word != [0; 8];
            if is_used {
                let other = word.map(|byte| byte ^ 0x55);
                if memory.write_all_at(&other, at - 8).is_err() {
                    // The export has ended meanwhile, because the change was noticed.
                    assert!(changed > 0, "nothing could be changed");
                    return changed;
                }
                changed += 1;
            }
        }
    }
    changed
}

#[test]
fn if_lenders_return_wrong_data_a_guest_that_swaps_to_lent_memory_reads_no_wrong_byte() {
    let Some(_turn) = support::turn_ahead() else {
        return;
    };
    let lender = Host::lender();
    lender.lend(SWAP, Transport::Nbd);
    let registry = lender.socket();
    let other = Host::named("other", &["--registry", registry.to_str().unwrap()]);
    other.lend(SWAP, Transport::Nbd);
    let lab = Lab::with_registry(EngineSettings::default(), &lender.socket()).unwrap();
    let daemon = lab.daemon();
    swapping(&lab, SWAP);
    let place = || place_of(&lab);
    // The bytes of the lender in use are changed; the VM then moves to the other lender by itself.
    let request = BorrowRequest::default();
    let mut liars = Vec::new();
    for _ in 0..2 {
        let done = daemon.swap_disks().borrow_memory("v", &request).unwrap();
        let name = done.lenders[0].clone();
        let lies = if name == "other" { &other } else { &lender };
        let changed = garble(lies.export());
        let begun = Instant::now();
        wait("it goes on, on its copy", || place() == SwapPlace::OnCopy);
        println!(
            "'{name}': {changed} pages changed, found out after {:?}",
            begun.elapsed()
        );
        let (checked, wrong, _) = heard(&lab);
        assert_eq!(wrong, 0);
        wait("it checks on", || heard(&lab).0 > checked);
        daemon.swap_disks().return_memory("v").unwrap();
        lies.wait_free(SWAP);
        liars.push(name);
    }
    liars.sort_unstable();
    assert_eq!(liars, ["lender", "other"]);
    let report = daemon.reports().leases().unwrap();
    assert_eq!((report.lies, report.distrusted.len()), (2, 2));
    daemon
        .swap_disks()
        .borrow_memory("v", &request)
        .unwrap_err();
    for name in &liars {
        assert!(daemon.leases().trust(name));
    }
    // The disk is striped over both lenders, and one of them is killed.
    let striped = BorrowRequest {
        stripes: Some(2),
        ..BorrowRequest::default()
    };
    for victim in [&lender, &other] {
        let done = daemon.swap_disks().borrow_memory("v", &striped).unwrap();
        assert_eq!((done.place, done.lenders.len()), (SwapPlace::Lent, 2));
        std::thread::sleep(Duration::from_millis(500 + chance(3000)));
        kill_process(victim.export(), Signal::KILL).unwrap();
        wait("it goes on, on its copy", || place() == SwapPlace::OnCopy);
        let (checked, wrong, _) = heard(&lab);
        assert_eq!(wrong, 0);
        wait("it checks on", || heard(&lab).0 > checked);
        daemon.swap_disks().return_memory("v").unwrap();
        lender.wait_free(SWAP);
        other.wait_free(SWAP);
        println!("over two lenders in {} ms, one killed", done.took_ms);
    }
    let (checked, wrong, longest) = all_checked(&lab);
    println!("{checked} pages checked, {wrong} words wrong, longest access {longest:.3} s");
    assert!(longest < LONGEST_STALL * slowness(), "{longest} s");
    lab.stop("v").unwrap();
}
