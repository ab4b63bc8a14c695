//! Test of a host that lends RAM and then gets short of it: the RAM must come back.
//!
//! Filling a real host's memory would take a minute and slow down all other tests. So the lender
//! sees a simulated host of 8 GiB that runs only the test's processes: its `/proc/meminfo` is a
//! file that the test writes, as lxcfs does for containers, from the memory use of these processes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memfold_api::{BorrowRequest, Client, LendRequest, RightsizeReport, SwapPlace};
use memfold_fold::EngineSettings;
use memfold_lab::Lab;
use memfold_lend::{LenderStatus, Transport};
use memfold_units::ByteSize;

use super::lend::{heard, swapping, wait};
use crate::served::Served;
use crate::support;

/// Memory of the host that the lender sees. The next constant: free memory when no VM runs.
pub const HOST: u64 = 8 << 30;
pub const FREE: u64 = 7 << 30;

/// Available bytes at which nearly nothing is left: less than an eighth of the reserve.
const NEXT_TO_NOTHING: u64 = 40 << 20;

/// Shell script that binds the file over `/proc/meminfo`, and keeps its namespace until it is
/// killed. Other tests' swapping and stalls on memory are not to be seen there.
const NAMESPACE: &str = r#"set -e
echo "pswpin 0" > "$1.vmstat"
: > "$1.pressure"
mount --bind "$1" /proc/meminfo
mount --bind "$1.vmstat" /proc/vmstat
[ ! -e /proc/pressure/memory ] || mount --bind "$1.pressure" /proc/pressure/memory
touch "$1.ready"
exec sleep infinity"#;

/// Returns the memory of this test's VMs and exports, in bytes: of processes with the environment
/// variable in which nextest stores the test's name. Without nextest, of all VMs and exports on
/// this machine, on which no other test may then run.
pub fn taken() -> u64 {
    let test = std::env::var("NEXTEST_TEST_NAME").unwrap_or_default();
    let pages = |directory: &Path| {
        let comm = std::fs::read_to_string(directory.join("comm")).ok()?;
        if !comm.starts_with("qemu-system") && !comm.starts_with("nbdkit") {
            return None;
        }
        let environment = std::fs::read(directory.join("environ")).ok()?;
        if !String::from_utf8_lossy(&environment).contains(&test) {
            return None;
        }
        let statm = std::fs::read_to_string(directory.join("statm")).ok()?;
        statm.split(' ').nth(1)?.parse::<u64>().ok()
    };
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter_map(|entry| pages(&entry.path()))
        .map(|pages| pages * 4096)
        .sum()
}

/// A mount namespace whose `/proc/meminfo` is that of a small host.
pub struct SmallHost {
    /// Process in the namespace.
    pub holder: Child,
    ended: Arc<AtomicBool>,
    /// Fewest bytes that were available.
    pub least: Arc<AtomicU64>,
    /// Most bytes that are available, whatever runs.
    most: Arc<AtomicU64>,
}

impl SmallHost {
    pub fn start(directory: &Path) -> Self {
        let path = directory.join("meminfo");
        let file = File::create(&path).unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let least = Arc::new(AtomicU64::new(u64::MAX));
        let most = Arc::new(AtomicU64::new(u64::MAX));
        Self::write(&file, u64::MAX);
        let (is_over, lowest, limit) = (ended.clone(), least.clone(), most.clone());
        std::thread::spawn(move || {
            while !is_over.load(Ordering::Acquire) {
                let most = limit.load(Ordering::Acquire);
                lowest.fetch_min(Self::write(&file, most), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let holder = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", NAMESPACE])
            .arg("sh")
            .arg(&path)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let ready = PathBuf::from(format!("{}.ready", path.display()));
        wait("the namespace", || ready.exists());
        Self {
            holder,
            ended,
            least,
            most,
        }
    }

    /// Writes the present figures, with at most `most` bytes available, and returns the available
    /// bytes. The text is written at once and has a fixed length, so that no reader sees a part of
    /// it.
    fn write(file: &File, most: u64) -> u64 {
        let available = FREE.saturating_sub(taken()).min(most);
        let text = format!(
            "MemTotal:       {:>9} kB\nMemFree:        {:>9} kB\nMemAvailable:   {:>9} kB\nSwapTotal:              0 kB\nSwapFree:               0 kB\n",
            HOST >> 10,
            available >> 10,
            available >> 10
        );
        file.write_all_at(text.as_bytes(), 0).unwrap();
        available
    }
}

impl Drop for SmallHost {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Makes the host lend at most `most`, over NBD.
pub fn lend(client: &Client, most: ByteSize) {
    let request = LendRequest {
        max_bytes: most.0,
        listen: Some([127, 0, 0, 1].into()),
        announce: None,
        ports: None,
        transport: Transport::Nbd,
        cleartext: false,
    };
    client
        .post::<_, LenderStatus>("/v1/lend", &request)
        .unwrap();
}

pub fn lender_status(client: &Client) -> LenderStatus {
    let status: Option<LenderStatus> = client.get("/v1/lend").unwrap();
    status.unwrap()
}

/// Checks for five seconds, several looks of the lender at its memory, that it recalls nothing.
pub fn stays_lent(client: &Client, lent: ByteSize) {
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        assert_eq!(lender_status(client).lent_bytes, lent.0);
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Moves the swap disk of the borrower's VM to lent RAM. Returns how long that took, in ms.
pub fn borrow(lab: &Lab) -> u64 {
    let disks = lab.daemon().swap_disks();
    let done = disks.borrow_memory("v", &BorrowRequest::default()).unwrap();
    assert_eq!(done.place, SwapPlace::Lent);
    done.took_ms
}

/// Checks that the borrower's VM has read no wrong byte, and that it goes on.
pub fn borrower_goes_on(lab: &Lab) {
    let (checked, wrong, longest) = heard(lab);
    assert_eq!(wrong, 0);
    wait("it checks on", || heard(lab).0 > checked);
    println!("borrower: {checked} pages checked, longest access {longest:.3} s");
}

/// Reserve of the host in the test of the ladder. The lender itself keeps only a half of it.
const RESERVE: &str = "1G";

/// Available bytes at which right-sizing calls lent RAM back: less than its reserve, and more than
/// the lender takes back by itself.
const BELOW_RESERVE: u64 = 800 << 20;

/// RAM that is lent in the test of the ladder.
const LENT: ByteSize = ByteSize::mib(256);

#[test]
fn a_lease_is_recalled_at_the_rung_lent_and_ended_when_the_host_is_almost_out_of_memory() {
    let Some(_turn) = support::turn_ahead() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path();
    let host = SmallHost::start(state);
    let more = ["--rightsize", "on", "--reserve", RESERVE];
    let mut served = Served::new(state, &[]).with(&more).inside(host.holder.id());
    served.start();
    let client = served.answers();
    lend(&client, LENT);
    let status = || lender_status(&client);
    let sizing = || -> RightsizeReport { client.get("/v1/rightsize").unwrap() };
    wait("it has so much to spare", || status().offer_bytes >= LENT.0);
    let lab = Lab::with_registry(EngineSettings::default(), &state.join("s")).unwrap();
    swapping(&lab, LENT);
    borrow(&lab);
    // As long as the host has room, nothing is recalled.
    stays_lent(&client, LENT);
    assert_eq!(sizing().rung.as_deref(), Some("ample"));

    host.most.store(BELOW_RESERVE, Ordering::Release);
    let began = Instant::now();
    wait("nothing is lent any more", || status().lent_bytes == 0);
    println!("{LENT} free again after {:?}", began.elapsed());
    let report = sizing();
    println!("{:?}\n{:?}", report.rungs, status());
    let lent = report.rungs.iter().find(|change| change.rung == "lent");
    let why = &lent.expect("the rung 'lent'").why;
    assert!(why.contains("lent RAM is called back"), "{why}");
    let log = std::fs::read_to_string(state.join("daemon.log")).unwrap();
    assert!(!log.contains("host almost out of memory"), "{log}");
    // The borrower goes on with its copy.
    borrower_goes_on(&lab);
    // What was called back is not offered again.
    assert_eq!(status().offer_bytes, 0);

    // The memory is gone at once, so the lender ends the export without asking the borrower.
    host.most.store(u64::MAX, Ordering::Release);
    wait("it has so much to spare again", || {
        status().offer_bytes >= LENT.0
    });
    borrow(&lab);
    let ended = status().ended;
    let began = Instant::now();
    host.most.store(NEXT_TO_NOTHING, Ordering::Release);
    wait("its export has ended", || status().lent_bytes == 0);
    println!("{LENT} free again after {:?}", began.elapsed());
    assert_eq!(status().ended, ended + 1);
    let log = std::fs::read_to_string(state.join("daemon.log")).unwrap();
    assert!(log.contains("host almost out of memory"), "{log}");
    host.most.store(u64::MAX, Ordering::Release);
    borrower_goes_on(&lab);
    lab.stop("v").unwrap();
}
