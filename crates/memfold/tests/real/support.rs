//! Helpers of the tests on real guests: decide which tests run at the same time, connect to VMs,
//! and provide programs that guests run.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use memfold_fold::{EngineStats, VmStats};
use memfold_host::{QemuFacts, guest_images};
use memfold_lab::Lab;
use memfold_testkit::{patience, reports_skip, wait_until};
use memfold_units::ByteSize;
use memfold_vm::{Qmp, RamLayout, Vm, VmDirectory};
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

pub const BOOT: Duration = Duration::from_secs(180);
pub const MEMORY: ByteSize = ByteSize::mib(512);

/// Returns the shell function `sums FILE`, which writes checksums of files of `/usr` to a file: of
/// programs and libraries, 2,300 files of up to 1 MiB, 113 MB. With `MEMFOLD_SUMS=all`, of all of
/// `/usr`: 13,400 files (99 of 100), including the compiler's of up to 34 MB, which an emulated
/// guest reads in half a minute.
pub fn sums() -> String {
    let places = match std::env::var("MEMFOLD_SUMS").as_deref() {
        Ok("all") => "/usr",
        _ => "/usr/bin /usr/sbin /usr/lib/x86_64-linux-gnu",
    };
    format!(
        "files_of_usr() {{ find {places} -xdev -type f \\( -size -2M -o -path '/usr/libexec/*' \\) -print0 | LC_ALL=C sort -z; }}
sums() {{ files_of_usr | xargs -0 md5sum > $1; }}"
    )
}

/// Program that causes all kinds of page movements inside a guest.
pub const ATTACK: &str = include_str!("guest/attack.sh");
/// Program that rewrites files whose every page is known.
pub const REWRITE: &str = include_str!("guest/rewrite.py");
/// Program that causes memory pressure.
pub const PRESSURE: &str = include_str!("guest/pressure.py");

/// Number of tests that may boot guests at the same time, each with a lock on a file. A test that
/// runs alone takes all of these locks.
const TURNS: u32 = 2;

/// Nice value of a test that takes precedence: it gets nine times the CPU time of others on a core
/// (`kernel/sched/core.c`, `sched_prio_to_weight`).
const AHEAD: i32 = -10;

/// The right to boot guests, across all processes that use the same lock files.
pub struct Turn {
    _host: Vec<File>,
    began: Instant,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let thread = std::thread::current();
        let (name, took) = (thread.name().unwrap_or("?"), self.began.elapsed());
        // Written directly to standard error, because the output of passing tests is held back, and
        // a user who waits half an hour wants to know for which test.
        let _ = writeln!(std::io::stderr(), "{:5.0} s  {name}", took.as_secs_f64());
    }
}

/// Waits until this test may run alone; `None`, with the reason printed, if guests cannot be booted
/// here.
pub fn turn() -> Option<Turn> {
    take_turn(|| (0..TURNS).map(|number| locked(turn_file(number))).collect())
}

/// Waits until this test may run beside other tests, [`TURNS`] in all.
pub fn turn_beside() -> Option<Turn> {
    take_turn(|| {
        loop {
            for number in 0..TURNS {
                let file = turn_file(number);
                if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
                    return vec![file];
                }
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    })
}

/// Takes the right to boot guests before other tests, for tests that measure how long a guest
/// waits. Threads and processes that this thread starts later inherit the priority.
pub fn turn_ahead() -> Option<Turn> {
    let turn = turn_beside()?;
    rustix::process::setpriority_process(None, AHEAD).unwrap();
    Some(turn)
}

fn turn_file(number: u32) -> File {
    let name = match number {
        0 => "memfold-guests.lock".to_owned(),
        _ => format!("memfold-guests-{number}.lock"),
    };
    File::create(std::env::temp_dir().join(name)).unwrap()
}

fn locked(file: File) -> File {
    flock(&file, FlockOperation::LockExclusive).unwrap();
    file
}

fn take_turn(wait: impl FnOnce() -> Vec<File>) -> Option<Turn> {
    if let Err(why) = able() {
        assert!(
            std::env::var_os("MEMFOLD_REAL").is_none(),
            "MEMFOLD_REAL is set and real guests can't be booted: {why}"
        );
        return reports_skip(&why);
    }
    // The log shows why the daemon refuses a request. It is set up once for all tests of the
    // process.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(
            std::env::var("MEMFOLD_LOG")
                .unwrap_or_else(|_| "warn,memfold_daemon::daemon=info,memfold_fold=info".into()),
        )
        .with_test_writer()
        .try_init();
    // The first test to wait comes first: otherwise, two tests beside each other could keep out a
    // test that wants to run alone.
    let door = locked(File::create(std::env::temp_dir().join("memfold-guests-door.lock")).unwrap());
    let host = wait();
    drop(door);
    Some(Turn {
        _host: host,
        began: Instant::now(),
    })
}

fn able() -> Result<(), String> {
    if !rustix::process::getuid().is_root() {
        return Err("userfaultfd and page frame numbers need root".into());
    }
    let qemu = QemuFacts::probe().map_err(|e| e.to_string())?;
    if !qemu.is_supported() {
        return Err("QEMU is older than 10.0".into());
    }
    let images = guest_images().map_err(|e| format!("no guest images ({e}); run 'make setup'"))?;
    for name in ["trixie-a", "trixie-b"] {
        if !images.contains_key(name) {
            return Err(format!("no guest image '{name}'; run 'make setup'"));
        }
    }
    memfold_host::library().map_err(|e| e.to_string())?;
    Ok(())
}

/// Connects to a VM's monitor, beside the daemon's own connection.
pub fn qmp(state: &Path, name: &str) -> Qmp {
    Qmp::connect(&VmDirectory::of(state, name).qmp(), Duration::from_secs(60)).unwrap()
}

/// Returns QEMU's process number, and the layout of guest RAM in it.
pub fn ram(state: &Path, name: &str) -> (i32, RamLayout) {
    let vm = Vm::find(state, name).unwrap();
    let layout = vm.layout(&mut qmp(state, name)).unwrap();
    (vm.pid().as_raw_nonzero().get(), layout)
}

/// Swap space of this host in a file, until this is dropped.
pub struct Swap(TempDir);

impl Swap {
    pub fn on(mib: u64) -> Result<Self, String> {
        // The file must not be on a tmpfs.
        let swap = Self(tempfile::tempdir_in("/var/tmp").map_err(|error| error.to_string())?);
        swap.sh(&format!(
            "dd if=/dev/zero of=swap bs=1M count={mib} status=none && chmod 600 swap && mkswap -q swap && swapon swap"
        ))?;
        Ok(swap)
    }

    /// Brings all swapped memory back.
    pub fn off(&self) {
        self.sh("swapoff swap").unwrap();
    }

    fn sh(&self, line: &str) -> Result<(), String> {
        let mut shell = Command::new("sh");
        shell.args(["-c", line]).current_dir(self.0.path());
        let said = shell.output().map_err(|error| error.to_string())?;
        if said.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&said.stderr).into_owned())
        }
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // If swapon has failed, this fails, too.
        let _ = self.sh("swapoff swap");
    }
}

/// Program that makes the kernel swap out the mergeable memory of the process named by its
/// argument.
const SWAPS_OUT: &str = r"
import ctypes, re, struct, sys
libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
handle = libc.syscall(434, pid, 0)
assert handle >= 0
ranges, here = [], None
for line in open(f'/proc/{pid}/smaps'):
    if found := re.match('([0-9a-f]+)-([0-9a-f]+) ', line):
        here = [int(end, 16) for end in found.groups()]
    elif line.startswith('VmFlags:') and ' mg' in line:
        ranges.append(here)
for begin, end in ranges:
    area = ctypes.create_string_buffer(struct.pack('QQ', begin, end - begin))
    assert libc.syscall(440, handle, area, 1, 21, 0) >= 0, ctypes.get_errno()
";

/// Makes the kernel swap out a VM's RAM, as far as it is anonymous memory that KSM may merge.
pub fn swap_out(pid: u32) {
    let mut python = Command::new("python3");
    let done = python.args(["-c", SWAPS_OUT, &pid.to_string()]).output();
    let done = done.unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
}

pub fn vm<'a>(stats: &'a EngineStats, name: &str) -> &'a VmStats {
    let found = stats.vms.iter().find(|vm| vm.name == name);
    found.unwrap_or_else(|| panic!("the engine doesn't know '{name}'"))
}

/// Returns the percentage of matched pages that are folded; 100 if no page is matched.
pub fn folded_percent(vm: &VmStats) -> f64 {
    if vm.matched_pages == 0 {
        return 100.0;
    }
    vm.matched_folded_pages as f64 * 100.0 / vm.matched_pages as f64
}

/// Formats a VM's figures in one line.
pub fn line(vm: &VmStats) -> String {
    format!(
        "{}: folded {} again {} back {} differing {} busy {} | matched {} of these folded {:.1} % | mapped {} copied {} mappings {} | pauses {} longest {} ms, longest freeze {} us, bogus {} over limit {} problem {}",
        vm.name,
        vm.folded_pages,
        vm.refolded_pages,
        vm.folded_back_pages,
        vm.differing_pages,
        vm.busy_pages,
        vm.matched_pages,
        folded_percent(vm),
        vm.mapped_pages,
        vm.copied_pages,
        vm.mappings,
        vm.pauses,
        vm.pause_max_ms,
        vm.freeze_max_ns / 1000,
        vm.bogus_pages,
        vm.over_limit_pages,
        vm.problem.as_deref().unwrap_or("none"),
    )
}

/// Waits until `done` returns true for the figures. On failure, prints the figures.
pub fn wait_stats(
    what: &str,
    timeout: Duration,
    mut stats: impl FnMut() -> EngineStats,
    done: impl Fn(&EngineStats) -> bool,
) -> EngineStats {
    let timeout = patience(timeout);
    let end = Instant::now() + timeout;
    loop {
        let now = stats();
        if done(&now) {
            return now;
        }
        if Instant::now() > end {
            let lines: Vec<_> = now.vms.iter().map(line).collect();
            panic!(
                "{what}: not after {timeout:?}:\n{}\n{:?}",
                lines.join("\n"),
                now.domains
            );
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Returns the shell script that writes a program to a guest's `/opt`.
pub fn file(name: &str, text: &str) -> String {
    format!("cat > /opt/{name} <<'END-OF-FILE'\n{text}\nEND-OF-FILE\nchmod +x /opt/{name}\n")
}

/// Returns the shell script that installs the attack's programs in a guest.
pub fn install() -> String {
    file("attack.sh", ATTACK) + &file("rewrite.py", REWRITE) + &file("pressure.py", PRESSURE)
}

/// Installs the attack's programs in guests, and returns the checksums of `/usr` before the attack.
pub fn prepare(lab: &Lab, names: &[&str]) -> Vec<String> {
    let script = format!(
        "{}\n{}\nsums /run/sums.before && md5sum < /run/sums.before",
        install(),
        sums()
    );
    lab.exec_all(names, &script, Duration::from_secs(300))
        .unwrap()
}

/// Changes what a guest's owner allows, and restarts the agent. `words`: a JSON array.
pub fn set_allowed(lab: &Lab, vm: &str, words: &str) {
    let allowed = || {
        let vms = lab.daemon().vms().list();
        vms.into_iter().find(|info| info.name == vm)?.allowed
    };
    let script = format!(
        "echo 'allow = {words}' > /etc/memfold/agent.toml; systemctl --no-block restart memfold-agent"
    );
    // The answer may be lost with the agent.
    let _ = lab.exec(vm, &script, BOOT);
    let words: Vec<String> = serde_json::from_str(words).unwrap();
    wait_until("the agent says what is allowed", BOOT, || {
        allowed().as_ref() == Some(&words)
    });
}
