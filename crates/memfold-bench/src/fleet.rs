//! The part `daemon` of the study `memfold bench scale`: what a daemon costs by the number of VMs.
//!
//! `memfold serve` runs as a process of its own and starts real QEMU processes, whose guests never
//! run (QEMU's option `-S`). So there are no agents, and the VMs have touched almost none of their
//! memory: what hints cost is measured by the study's part `engine`.
//!
//! | key | what is measured, for each number of VMs |
//! |---|---|
//! | `list_ms` | time of `GET /v1/vms` (`memfold vm list`) |
//! | `report_ms` | time of `GET /v1/report` (`memfold report`) |
//! | `scrape_ms` | time of `GET /metrics` |
//! | `first_view_ms` | from the dashboard's request for live data (`GET /v1/live`) until the first sample is here |
//! | `takeover_ms` | from the start of the next daemon, after the first was killed, until it has adopted all VMs |
//! | `idle_cpu_percent` | CPU time of the daemon while nobody asks it anything, as a share of one core |
//! | `idle_qemu_percent` | CPU time of all QEMUs meanwhile, for the daemon's questions: their guests do nothing |
//! | `daemon_mib` | memory of the daemon (`VmRSS`) |
//! | `start_ms` | median time to start one of these VMs, [`STARTS`] at once |
//!
//! The first four are medians of [`ROUNDS`] requests, and `takeover_ms` is measured once.
//! `exponents`: slope of a figure's logarithm over the logarithm of the number of VMs, between the
//! first and the last number of VMs.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use memfold_api::{Client, VmInfo};
use memfold_lab::{at_once, undo_at_interrupt, wait_for};
use memfold_units::ByteSize;
use memfold_vm::{Vm, VmSpec};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::figure::number;
use crate::host::{Stat, memory};
use crate::record::{median, mib};
use crate::study::Options;

/// RAM of each VM.
const MEMORY: ByteSize = ByteSize::mib(64);

/// Numbers of VMs; a quick study has the first two.
const VMS: [usize; 5] = [10, 30, 100, 300, 1000];

/// Number of requests of each kind, and for how long the idle daemon is watched.
const ROUNDS: usize = 5;
const IDLE: Duration = Duration::from_secs(20);

/// Number of VMs that start at once.
const STARTS: usize = 4;

/// Time limit of each step.
const LIMIT: Duration = Duration::from_secs(600);

/// Figures that grow with the number of VMs.
const GROWING: [&str; 8] = [
    "list_ms",
    "report_ms",
    "scrape_ms",
    "first_view_ms",
    "takeover_ms",
    "idle_cpu_percent",
    "idle_qemu_percent",
    "daemon_mib",
];

/// A daemon with VMs, in a directory of its own. All of it ends when this is dropped.
struct Fleet {
    /// The program `memfold`.
    program: PathBuf,
    directory: TempDir,
    daemon: Arc<Mutex<Child>>,
    vms: usize,
}

impl Fleet {
    fn start(program: PathBuf) -> anyhow::Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("memfold-scale-")
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .tempdir_in("/var/tmp")?;
        let daemon = Arc::new(Mutex::new(serve(&program, directory.path())?));
        let (process, place) = (daemon.clone(), directory.path().to_owned());
        undo_at_interrupt(move || {
            end(&process, &place);
            let _ = std::fs::remove_dir_all(place);
        });
        let fleet = Self {
            program,
            directory,
            daemon,
            vms: 0,
        };
        fleet.wait_running()?;
        Ok(fleet)
    }

    fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::new(&self.directory.path().join("s"))?.within(LIMIT))
    }

    /// Starts VMs until there are `vms`. Returns the median time of a start, in milliseconds.
    fn grow(&mut self, vms: usize) -> anyhow::Result<f64> {
        let first = self.vms;
        let starts = at_once(0..STARTS, |start| {
            let client = self.client()?;
            let mut times = Vec::new();
            for number in (first..vms).filter(|number| number % STARTS == start) {
                let mut spec = VmSpec::new(format!("vm-{number}"), MEMORY);
                spec.qemu_args = vec!["-S".into()];
                let began = Instant::now();
                let started = client.post::<_, VmInfo>("/v1/vms", &spec);
                started.with_context(|| format!("VM {number} did not start"))?;
                times.push(milliseconds(began));
            }
            Ok(times)
        })?;
        self.vms = vms;
        Ok(median(starts.into_iter().flatten()))
    }

    /// Waits until the daemon answers and has all VMs in its table.
    fn wait_running(&self) -> anyhow::Result<()> {
        let client = self.client()?;
        let pause = (LIMIT, Duration::from_millis(10));
        wait_for("the daemon does not have all VMs", pause, || {
            let mut daemon = self.daemon.lock().unwrap_or_else(PoisonError::into_inner);
            let has_ended = daemon.try_wait()?;
            drop(daemon);
            if has_ended.is_some() {
                let log = std::fs::read_to_string(self.directory.path().join("log"));
                bail!("the daemon has ended: {}", log.unwrap_or_default());
            }
            let Ok(vms) = client.get::<Vec<VmInfo>>("/v1/vms") else {
                return Ok(None);
            };
            let adopted = vms.iter().filter(|vm| vm.state != "taking-over").count();
            Ok((adopted == self.vms).then_some(()))
        })
    }

    /// Kills the daemon, and returns how long the next one needs to adopt all VMs.
    fn take_over(&mut self) -> anyhow::Result<f64> {
        let mut daemon = self.daemon.lock().unwrap_or_else(PoisonError::into_inner);
        daemon.kill()?;
        daemon.wait()?;
        let began = Instant::now();
        *daemon = serve(&self.program, self.directory.path())?;
        drop(daemon);
        self.wait_running()?;
        Ok(milliseconds(began))
    }

    /// Returns the median time of a request in milliseconds.
    fn time(&self, request: impl Fn(&Client) -> anyhow::Result<()>) -> anyhow::Result<f64> {
        let client = self.client()?;
        let once = |_| {
            let began = Instant::now();
            request(&client)?;
            Ok(milliseconds(began))
        };
        let times = (0..ROUNDS).map(once);
        Ok(median(times.collect::<anyhow::Result<Vec<f64>>>()?))
    }

    fn proc(&self, file: &str) -> PathBuf {
        let daemon = self.daemon.lock().unwrap_or_else(PoisonError::into_inner);
        format!("/proc/{}/{file}", daemon.id()).into()
    }

    /// Returns the CPU time of the daemon while it is idle, and of all QEMUs, in percent of one
    /// core.
    fn idle_percent(&self, watched: Duration) -> anyhow::Result<(f64, f64)> {
        let vms: Vec<VmInfo> = self.client()?.get("/v1/vms")?;
        let ticks = || {
            let of_qemus = vms
                .iter()
                .map(|vm| ticks(Path::new(&format!("/proc/{}/stat", vm.pid))));
            let of_qemus = of_qemus.sum::<anyhow::Result<u64>>()?;
            anyhow::Ok((ticks(&self.proc("stat"))?, of_qemus))
        };
        let (before, began) = (ticks()?, Instant::now());
        std::thread::sleep(watched);
        let after = ticks()?;
        let seconds = began.elapsed().as_secs_f64();
        // A tick is 10 ms, so a tick in each second is 1 % of a core.
        let percent = |before, after| (after - before) as f64 / seconds;
        Ok((percent(before.0, after.0), percent(before.1, after.1)))
    }

    /// Starts VMs until there are `vms`, and measures the daemon, which is idle for `idle`.
    fn measure(&mut self, vms: usize, idle: Duration) -> anyhow::Result<Value> {
        let start_ms = self.grow(vms)?;
        let takeover_ms = self.take_over()?;
        let (idle_cpu_percent, idle_qemu_percent) = self.idle_percent(idle)?;
        let json =
            |path: &'static str| move |client: &Client| Ok(client.get::<Value>(path).map(drop)?);
        Ok(json!({
            "part": "daemon",
            "vms": vms,
            "start_ms": start_ms,
            "takeover_ms": takeover_ms,
            "idle_cpu_percent": idle_cpu_percent,
            "idle_qemu_percent": idle_qemu_percent,
            "list_ms": self.time(json("/v1/vms"))?,
            "report_ms": self.time(json("/v1/report"))?,
            "scrape_ms": self.time(|client| {
                let mut text = client.stream("/metrics", None)?;
                while text.next_piece()?.is_some() {}
                Ok(())
            })?,
            "first_view_ms": self.time(first_view)?,
            "daemon_mib": mib(memory(&self.proc("status"))? as f64),
        }))
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        end(&self.daemon, self.directory.path());
    }
}

/// Ends a daemon with its files in `place`, so that no further VM starts, and then its VMs.
fn end(daemon: &Mutex<Child>, place: &Path) {
    let mut daemon = daemon.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = daemon.kill();
    let _ = daemon.wait();
    for vm in Vm::discover(&place.join("state")).into_iter().flatten() {
        let _ = vm.stop(Duration::ZERO);
    }
}

/// Starts `memfold serve` with all its files in `place`.
fn serve(program: &Path, place: &Path) -> anyhow::Result<Child> {
    let log = File::options()
        .append(true)
        .create(true)
        .open(place.join("log"))?;
    let mut command = Command::new(program);
    command.env("MEMFOLD_CONFIG", "/dev/null");
    command.arg("--socket").arg(place.join("s")).arg("serve");
    for directory in ["state", "snapshots", "segments", "definitions", "records"] {
        command
            .arg(format!("--{directory}"))
            .arg(place.join(directory));
    }
    let started = command.stdin(Stdio::null()).stderr(log).spawn();
    started.with_context(|| format!("cannot start {}", program.display()))
}

/// Waits for the first sample of the dashboard's live data.
fn first_view(client: &Client) -> anyhow::Result<()> {
    let mut pieces = client.stream("/v1/live", None)?;
    let mut text = Vec::new();
    while let Some(piece) = pieces.next_piece()? {
        text.extend_from_slice(&piece);
        // An event ends with an empty line.
        if text.windows(2).any(|bytes| bytes == b"\n\n") {
            return Ok(());
        }
    }
    bail!(
        "the daemon sent no sample: {}",
        String::from_utf8_lossy(&text)
    )
}

/// Returns the CPU time in a process's file `stat`, in ticks of 10 ms.
fn ticks(stat: &Path) -> anyhow::Result<u64> {
    let stat = Stat::read(stat)?;
    Ok(stat.field(14) + stat.field(15))
}

fn milliseconds(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1000.0
}

/// Runs this part of the study. Returns its results, and a sample for each number of VMs.
pub fn run(options: &Options) -> anyhow::Result<(Value, Vec<Value>)> {
    let mut fleet = Fleet::start(std::env::current_exe()?.with_file_name("memfold"))?;
    let mut samples = Vec::new();
    for &vms in options.pick(&VMS[..2], &VMS[..]) {
        let sample = fleet.measure(vms, IDLE)?;
        eprintln!("{sample}");
        samples.push(sample);
    }
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else {
        return Ok((Value::Null, samples));
    };
    let vms = number(&last["vms"]) / number(&first["vms"]);
    let mut results = json!({ "vms": last["vms"], "start_ms": last["start_ms"] });
    for key in GROWING {
        results[key] = last[key].clone();
        let growth = number(&last[key]) / number(&first[key]);
        results["exponents"][key] = json!(growth.log(vms));
    }
    Ok((results, samples))
}

#[cfg(test)]
mod tests {
    use memfold_testkit::wait_until;

    use super::*;

    #[test]
    fn a_daemon_with_two_vms_is_measured_and_nothing_of_it_is_left() {
        if memfold_host::QemuFacts::probe().is_err() {
            memfold_testkit::skip!("no QEMU");
        }
        // The program lies above the tests.
        let own = std::env::current_exe().unwrap();
        let program = own.ancestors().nth(2).unwrap().join("memfold");
        let mut fleet = Fleet::start(program).unwrap();
        let place = fleet.directory.path().to_owned();
        let found = fleet.measure(2, Duration::from_millis(200)).unwrap();
        for key in [
            "list_ms",
            "report_ms",
            "scrape_ms",
            "first_view_ms",
            "takeover_ms",
        ] {
            assert!(number(&found[key]) > 0.0, "{key}: {found}");
        }
        assert!(
            (1.0..500.0).contains(&number(&found["daemon_mib"])),
            "{found}"
        );
        let vms = fleet
            .client()
            .unwrap()
            .get::<Vec<VmInfo>>("/v1/vms")
            .unwrap();
        assert_eq!(vms.len(), 2);
        drop(fleet);
        assert!(!place.exists());
        for vm in vms {
            let stat = format!("/proc/{}/stat", vm.pid);
            // Whoever started the daemon may not have noticed yet that QEMU has ended.
            let has_ended = || std::fs::read_to_string(&stat).map_or(true, |s| s.contains(") Z "));
            wait_until("QEMU ends", Duration::from_secs(10), has_ended);
        }
    }
}
