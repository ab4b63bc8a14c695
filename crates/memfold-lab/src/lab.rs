//! A laboratory: real VMs in a daemon within this process. Dropping or interrupting it removes all
//! of them and their files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use memfold_units::ByteSize;
use serde_json::json;
use tempfile::TempDir;

use crate::warm::{Warm, note_guest};

use memfold_api::{FoldRequest, FullReport};
use memfold_daemon::{BorrowWhen, Daemon, DaemonOptions};
use memfold_fold::{EngineSettings, EngineStats};
use memfold_host::{GuestImage, guest_images};
use memfold_ksm as ksm;
use memfold_ledger::BrakePolicy;
use memfold_lend::RegistryAt;
use memfold_vm::{Aio, BootSpec, CacheMode, DiskSpec, Qmp, VmDirectory, VmSpec, log_tail};

/// Daemon and directory that an interrupt must clean up.
static CURRENT: Mutex<Option<(Arc<Daemon>, PathBuf)>> = Mutex::new(None);

/// Cleanup functions of resources outside the laboratory, in the order of their creation.
static MADE: Mutex<Vec<Box<dyn FnOnce() + Send>>> = Mutex::new(Vec::new());

/// Registers a cleanup function for resources outside the laboratory. An interrupt runs these
/// functions after the VMs have ended, the last one first. A repeated cleanup must be harmless,
/// because a run that ends normally also cleans up.
pub fn undo_at_interrupt(undo: impl FnOnce() + Send + 'static) {
    MADE.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(Box::new(undo));
    clean_up_at_interrupt();
}

/// Kernel command line of laboratory guests: quiet and quick. Whether timer interrupts come is not
/// checked: on a busy host an emulated guest gets too few of them in the time it gives them, and
/// stands still for ever.
const CMDLINE: &str = "root=/dev/vda rw console=ttyS0 quiet mitigations=off no_timer_check";

/// The oldest model that QEMU has. Guests boot with it in 10.2 s of CPU time where they take 12.4 s
/// with `max`, whose AVX and five levels of page tables cost the emulator time (measured with QEMU
/// 10.0.2, `-accel tcg`).
const CPU: &str = "qemu64";

/// Console text that shows that a guest has booted.
const BOOTED: &str = "login:";

/// Bytes of console output shown if a guest does not boot.
const LAST_WORDS: usize = 2000;

/// A daemon with its VMs.
#[derive(Debug)]
pub struct Lab {
    daemon: Arc<Daemon>,
    directory: TempDir,
    /// Booting guests, and the start times of their boots.
    booting: Mutex<BTreeMap<String, Instant>>,
}

/// How a laboratory VM reads its disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskMode {
    /// `cache=writeback`: through the host's page cache.
    #[default]
    Buffered,
    /// `cache=none` with `io_uring`: DMA into guest RAM.
    Direct,
}

impl Lab {
    /// Creates a laboratory with folding paused.
    pub fn new(settings: EngineSettings) -> anyhow::Result<Self> {
        Self::at(settings, None)
    }

    /// Creates a laboratory that is host `lab` at the registry of leases served by the daemon at
    /// socket `registry`.
    pub fn with_registry(settings: EngineSettings, registry: &Path) -> anyhow::Result<Self> {
        Self::at(settings, Some(RegistryAt::Socket(registry.to_owned())))
    }

    fn at(settings: EngineSettings, registry: Option<RegistryAt>) -> anyhow::Result<Self> {
        std::fs::create_dir_all(ksm::NOTES)
            .with_context(|| format!("cannot make {}", ksm::NOTES))?;
        if ksm::restore_leftover(Path::new(ksm::NOTES)).unwrap_or(false) {
            eprintln!("memfold: put KSM's settings back that a killed run had left");
        }
        let directory = tempfile::Builder::new()
            .prefix("memfold-lab.")
            .tempdir()
            .context("cannot create a temporary directory for the private daemon")?;
        let options = DaemonOptions {
            state: directory.path().to_owned(),
            settings,
            include: Vec::new(),
            exclude: Vec::new(),
            paused: true,
            brake: BrakePolicy::default(),
            shelf: directory.path().join("snapshots"),
            segments: directory.path().join("segments"),
            host: Some("lab".into()),
            registry,
            borrow: BorrowWhen::Asked,
            lend: None,
            history: None,
            libvirt: None,
        };
        let daemon = Daemon::start(&options)?;
        *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) =
            Some((daemon.clone(), directory.path().to_owned()));
        clean_up_at_interrupt();
        Ok(Self {
            daemon,
            directory,
            booting: Mutex::default(),
        })
    }

    /// Returns the daemon.
    #[must_use]
    pub const fn daemon(&self) -> &Arc<Daemon> {
        &self.daemon
    }

    /// Returns the laboratory's directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the description of a VM with a guest image, which the VM does not change.
    pub fn spec(
        name: &str,
        image: &str,
        memory: ByteSize,
        disk: DiskMode,
    ) -> anyhow::Result<VmSpec> {
        let image = image_named(image)?;
        let mut spec = VmSpec::new(name, memory);
        spec.domain = Some("lab".into());
        spec.cpu = Some(CPU.into());
        spec.boot = BootSpec {
            kernel: Some(image.kernel),
            initrd: Some(image.initrd),
            cmdline: Some(CMDLINE.into()),
            ..BootSpec::default()
        };
        let mut root = DiskSpec::new(image.disk);
        root.snapshot = true;
        if disk == DiskMode::Direct {
            root.cache = CacheMode::None;
            root.aio = Aio::IoUring;
        }
        spec.disks.push(root);
        Ok(spec)
    }

    /// Starts a VM, without waiting for its boot.
    pub fn start(&self, spec: VmSpec) -> anyhow::Result<()> {
        let name = spec.name.clone();
        self.run(spec)?;
        self.booting().insert(name, Instant::now());
        Ok(())
    }

    fn run(&self, spec: VmSpec) -> anyhow::Result<()> {
        let name = spec.name.clone();
        self.daemon
            .boots()
            .run(spec)
            .with_context(|| format!("'{name}' did not start"))?;
        Ok(())
    }

    fn booting(&self) -> MutexGuard<'_, BTreeMap<String, Instant>> {
        self.booting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a VM from the saved state of an equal VM right after its boot; the first such VM
    /// boots ([`Warm`]).
    pub fn start_warm(&self, mut spec: VmSpec) -> anyhow::Result<()> {
        let name = spec.name.clone();
        let Some(warm) = Warm::prepare(&mut spec)? else {
            return self.start(spec);
        };
        self.run(spec)?;
        warm.load(&VmDirectory::of(self.directory(), &name))
    }

    /// Waits until the agent of a VM answers and its first inventory is complete. If a guest hangs
    /// during its boot, its last console output is printed, and it boots once more.
    pub fn wait_ready(&self, name: &str, timeout: Duration) -> anyhow::Result<()> {
        let mut end = Instant::now() + timeout;
        if let Err(error) = self.daemon.vms().wait_agent(name, timeout) {
            let vm = VmDirectory::of(self.directory(), name);
            let words = last_words(&vm);
            let failed = format!(
                "'{name}' did not come up in {} s; its last words:\n{words}\n",
                timeout.as_secs()
            );
            // A guest that has come up, and whose agent doesn't answer, is no matter of the
            // emulator's.
            if words.contains(BOOTED) {
                return Err(error).context(failed);
            }
            eprintln!("{failed}it boots once more");
            Qmp::connect(&vm.qmp(), Duration::from_secs(60))?.execute("system_reset", json!({}))?;
            end = Instant::now() + timeout;
            self.daemon
                .vms()
                .wait_agent(name, timeout)
                .with_context(|| format!("{failed}nor once more: {}", last_words(&vm)))?;
        }
        while Instant::now() < end {
            let stats = self.stats()?;
            if stats.vms.iter().any(|vm| vm.name == name && vm.agent_ready) {
                if let Some(began) = self.booting().remove(name) {
                    note_guest("booted", name, began.elapsed());
                }
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        bail!(
            "the agent in '{name}' reported no inventory of its page cache within {} s",
            timeout.as_secs()
        )
    }

    /// Runs a command in a guest, and returns its output.
    pub fn exec(&self, name: &str, script: &str, timeout: Duration) -> anyhow::Result<String> {
        let result = self
            .daemon
            .vms()
            .exec(name, script, timeout)
            .with_context(|| format!("in '{name}': {script}"))?;
        if result.code != 0 {
            bail!(
                "a script in VM '{name}' failed with exit code {}: {} {}; the script: {script}",
                result.code,
                String::from_utf8_lossy(&result.stderr).trim(),
                String::from_utf8_lossy(&result.stdout).trim()
            );
        }
        Ok(String::from_utf8_lossy(&result.stdout).into_owned())
    }

    /// Runs a command in several guests in parallel, and returns their outputs, in order.
    pub fn exec_all(
        &self,
        names: &[&str],
        script: &str,
        timeout: Duration,
    ) -> anyhow::Result<Vec<String>> {
        std::thread::scope(|scope| {
            let running: Vec<_> = names
                .iter()
                .map(|name| scope.spawn(move || self.exec(name, script, timeout)))
                .collect();
            running
                .into_iter()
                .map(|thread| {
                    thread.join().unwrap_or_else(|_| {
                        bail!("the thread that runs a script in a guest panicked")
                    })
                })
                .collect()
        })
    }

    /// Resumes or pauses folding.
    pub fn fold(&self, on: bool) -> anyhow::Result<()> {
        self.daemon.folding().set(&FoldRequest {
            paused: Some(!on),
            ..FoldRequest::default()
        })?;
        Ok(())
    }

    /// Returns the counters of folding.
    pub fn stats(&self) -> anyhow::Result<EngineStats> {
        Ok(self.daemon.folding().stats()?)
    }

    /// Returns the daemon's memory report.
    pub fn report(&self) -> anyhow::Result<FullReport> {
        Ok(self.daemon.reports().report()?)
    }

    /// Returns the CPU time of a VM's QEMU process, in seconds.
    pub fn vm_cpu_s(&self, name: &str) -> anyhow::Result<f64> {
        let vms = self.daemon.vms().list();
        let vm = vms
            .iter()
            .find(|vm| vm.name == name)
            .with_context(|| format!("no VM '{name}'"))?;
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", vm.pid))?;
        // Fields 14 and 15 of proc_pid_stat(5), counted behind the command's name, which may hold
        // spaces.
        let fields: Vec<&str> = stat
            .rsplit(')')
            .next()
            .unwrap_or("")
            .split_ascii_whitespace()
            .collect();
        let ticks: u64 = fields
            .iter()
            .skip(11)
            .take(2)
            .filter_map(|f| f.parse::<u64>().ok())
            .sum();
        Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
    }

    /// Stops one VM.
    pub fn stop(&self, name: &str) -> anyhow::Result<()> {
        self.daemon.vms().stop(name, Duration::ZERO)?;
        Ok(())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = None;
        stop_all(&self.daemon);
        self.daemon.segments().unprotect();
        self.daemon.shut_down();
    }
}

fn stop_all(daemon: &Daemon) {
    for vm in daemon.vms().list() {
        if let Err(error) = daemon.vms().stop(&vm.name, Duration::ZERO) {
            eprintln!(
                "memfold: VM '{}' (process {}) could not be ended: {error}",
                vm.name, vm.pid
            );
        }
    }
}

/// VMs live on when their starter dies; an interrupted laboratory has to end them itself.
fn clean_up_at_interrupt() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let wait = || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            runtime.block_on(async {
                let mut terminate =
                    tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
                tokio::select! {
                    _ = terminate.recv() => Ok(()),
                    result = tokio::signal::ctrl_c() => result,
                }
            })
        };
        let watch = move || {
            if wait().is_ok() {
                eprintln!("\nmemfold: interrupted; ending the VMs of this run");
                if let Some((daemon, directory)) = CURRENT
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take()
                {
                    daemon.close();
                    stop_all(&daemon);
                    daemon.segments().unprotect();
                    if let Err(error) = ksm::restore_own(Path::new(ksm::NOTES)) {
                        eprintln!("memfold: KSM's settings could not be restored: {error}");
                    }
                    // What is left there is of no use to anybody.
                    let _ = std::fs::remove_dir_all(directory);
                }
                let made =
                    std::mem::take(&mut *MADE.lock().unwrap_or_else(PoisonError::into_inner));
                for undo in made.into_iter().rev() {
                    undo();
                }
                // 128 + SIGINT, as shells have it.
                std::process::exit(130);
            }
        };
        if let Err(error) = std::thread::Builder::new()
            .name("interrupt".into())
            .spawn(watch)
        {
            eprintln!("memfold: Ctrl-C will leave VMs behind: {error}");
        }
    });
}

/// Returns the last output of a guest's console and of QEMU.
fn last_words(vm: &VmDirectory) -> String {
    let console = std::fs::read(vm.console_log()).unwrap_or_default();
    let tail = &console[console.len().saturating_sub(LAST_WORDS)..];
    let tail: String = String::from_utf8_lossy(tail)
        .chars()
        .filter(|c| *c == '\n' || !c.is_control())
        .collect();
    format!("{tail}\nQEMU: {}", log_tail(vm))
}

fn image_named(name: &str) -> anyhow::Result<GuestImage> {
    let images = guest_images()
        .context("no guest images found; 'memfold demo' builds them, in a checkout 'make setup'")?;
    images.get(name).cloned().with_context(|| {
        format!("no guest image '{name}'; 'memfold demo' builds images, in a checkout 'make setup'")
    })
}
