//! A test lab for tests and studies: a daemon that runs within this process, with real VMs. When
//! the lab is dropped or interrupted (Ctrl-C, SIGTERM), all its VMs end and their files are
//! removed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use memfold_units::ByteSize;
use serde_json::json;
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

use crate::wait::{last_words, wait_for};
use crate::warm::{Warm, note_guest};

use memfold_api::{FoldRequest, FullReport, RightsizeMode};
use memfold_daemon::{BorrowWhen, Daemon, DaemonOptions};
use memfold_fold::{EngineSettings, EngineStats};
use memfold_host::{GuestImage, guest_images};
use memfold_ksm as ksm;
use memfold_ledger::BrakePolicy;
use memfold_lend::RegistryAt;
use memfold_snapshot::keys::KeySource;
use memfold_snapshot::{Keys, NamedKey};
use memfold_testkit::patience;
use memfold_vm::{Aio, BootSpec, CacheMode, DiskSpec, Qmp, VmDirectory, VmSpec};

/// Daemon and directory of the lab, which an interrupt must clean up.
static CURRENT: Mutex<Option<(Arc<Daemon>, PathBuf)>> = Mutex::new(None);

/// Cleanup functions of resources outside the lab, in the order of their creation.
static MADE: Mutex<Vec<Box<dyn FnOnce() + Send>>> = Mutex::new(Vec::new());

/// Registers a cleanup function for resources outside the lab. After an interrupt (Ctrl-C, SIGTERM)
/// and the end of the lab's VMs, these functions run, the last one first. A function must be
/// harmless if its resource is already removed, because a run that ends normally also cleans up.
pub fn undo_at_interrupt(undo: impl FnOnce() + Send + 'static) {
    lock(&MADE).push(Box::new(undo));
    clean_up_at_interrupt();
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `work` with each item, each call on its own thread, at the same time. Returns the results
/// in the order of the items.
pub fn at_once<I: Send, T: Send>(
    items: impl IntoIterator<Item = I>,
    work: impl Fn(I) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<Vec<T>> {
    std::thread::scope(|scope| {
        let work = &work;
        let start = |item| scope.spawn(move || work(item));
        let running: Vec<_> = items.into_iter().map(start).collect();
        let panicked = |_| bail!("the thread that works with a guest panicked");
        let results = running.into_iter().map(ScopedJoinHandle::join);
        results.map(|one| one.unwrap_or_else(panicked)).collect()
    })
}

/// Kernel command line of the lab's guests: quiet and quick. The kernel does not check whether
/// timer interrupts arrive (`no_timer_check`): on a busy host, an emulated guest gets too few of
/// them in the time of the check, and would stop forever. For the same reason it trusts its TSC
/// (`tsc=reliable`): it would take the clock `acpi_pm` instead, and then time stands still in an
/// idle guest, which sleeps just as long as that clock needs to begin anew (4.7 s).
const CMDLINE: &str =
    "root=/dev/vda rw console=ttyS0 quiet mitigations=off no_timer_check tsc=reliable";

/// CPU model of the lab's guests: the oldest one that QEMU has. Guests boot with it in 10.2 s of
/// CPU time, and in 12.4 s with `max`, whose AVX and five-level page tables cost the emulator time
/// (measured with QEMU 10.0.2, `-accel tcg`).
const CPU: &str = "qemu64";

/// File in the lab's directory with the key of its encrypted snapshots, which is named `lab`.
pub const SNAPSHOT_KEY: &str = "snapshot.key";

/// Writes a key for the lab's encrypted snapshots.
fn key_of_snapshots(directory: &Path) -> anyhow::Result<Keys> {
    let file = directory.join(SNAPSHOT_KEY);
    let mut random = [[0; 16]; 2];
    for half in &mut random {
        File::open("/dev/urandom")?.read_exact(half)?;
    }
    let [first, second] = random.map(u128::from_le_bytes);
    let digits = format!("{first:032x}{second:032x}");
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o600);
    options.open(&file)?.write_all(digits.as_bytes())?;
    let key = NamedKey {
        name: "lab".into(),
        source: KeySource::File(file),
    };
    Ok(Keys::new([key])?)
}

/// Text on the console of a guest that has booted.
const BOOTED: &str = "login:";

/// A test lab: a daemon within this process, with its VMs. Dropping the lab ends its VMs.
#[derive(Debug)]
pub struct Lab {
    daemon: Arc<Daemon>,
    directory: TempDir,
    /// Start times of guests that still boot, by VM name.
    booting: Mutex<BTreeMap<String, Instant>>,
}

/// How a VM of the lab accesses its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskMode {
    /// `cache=writeback`: through the host's page cache.
    Buffered,
    /// `cache=none` with `io_uring`: DMA into guest RAM.
    Direct,
}

impl Lab {
    /// Starts the lab's daemon, with folding paused and no VMs.
    pub fn new(settings: EngineSettings) -> anyhow::Result<Self> {
        Self::at(settings, None)
    }

    /// Starts a lab whose daemon is host `lab` at a lease registry. `registry`: Unix socket of the
    /// daemon that serves the registry.
    pub fn with_registry(settings: EngineSettings, registry: &Path) -> anyhow::Result<Self> {
        Self::at(settings, Some(RegistryAt::Socket(registry.to_owned())))
    }

    fn at(settings: EngineSettings, registry: Option<RegistryAt>) -> anyhow::Result<Self> {
        let notes = std::fs::create_dir_all(ksm::NOTES);
        notes.with_context(|| format!("cannot make {}", ksm::NOTES))?;
        if ksm::restore_leftover(Path::new(ksm::NOTES)).unwrap_or(false) {
            eprintln!("memfold: put KSM's settings back that a killed run had left");
        }
        let directory = tempfile::Builder::new().prefix("memfold-lab.").tempdir();
        let directory =
            directory.context("cannot create a temporary directory for the private daemon")?;
        let options = DaemonOptions {
            state: directory.path().to_owned(),
            settings,
            include: Vec::new(),
            exclude: Vec::new(),
            paused: true,
            brake: BrakePolicy::default(),
            rightsize: RightsizeMode::Off,
            shelf: directory.path().join("snapshots"),
            snapshot_keys: key_of_snapshots(directory.path())?,
            segments: directory.path().join("segments"),
            definitions: directory.path().join("definitions"),
            host: Some("lab".into()),
            registry,
            borrow: BorrowWhen::Asked,
            lend: None,
            history: None,
            libvirt: None,
            pve: None,
        };
        let daemon = Daemon::start(&options)?;
        *lock(&CURRENT) = Some((daemon.clone(), directory.path().to_owned()));
        clean_up_at_interrupt();
        Ok(Self {
            daemon,
            directory,
            booting: Mutex::default(),
        })
    }

    /// Returns the lab's daemon, which runs within this process.
    #[must_use]
    pub const fn daemon(&self) -> &Arc<Daemon> {
        &self.daemon
    }

    /// Returns the lab's temporary directory, which is also the daemon's state directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the description of a VM that boots the guest image `image`. The VM writes to a
    /// temporary overlay, and never to the image. `name`: name of the VM; `memory`: its RAM.
    pub fn spec(
        name: &str,
        image: &str,
        memory: ByteSize,
        disk: DiskMode,
    ) -> anyhow::Result<VmSpec> {
        let image = guest_image(image)?;
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
            (root.cache, root.aio) = (CacheMode::None, Aio::IoUring);
        }
        spec.disks.push(root);
        Ok(spec)
    }

    /// Starts a VM of the lab, without waiting for its boot.
    pub fn start(&self, spec: VmSpec) -> anyhow::Result<()> {
        let name = spec.name.clone();
        self.run(spec)?;
        lock(&self.booting).insert(name, Instant::now());
        Ok(())
    }

    /// Boots VMs at the same time, and waits for each of them until it is ready
    /// ([`Lab::wait_ready`]), for `timeout` at most.
    pub fn boot(&self, specs: Vec<VmSpec>, timeout: Duration) -> anyhow::Result<()> {
        let names: Vec<String> = specs.iter().map(|spec| spec.name.clone()).collect();
        specs.into_iter().try_for_each(|spec| self.start(spec))?;
        names
            .iter()
            .try_for_each(|name| self.wait_ready(name, timeout))
    }

    fn run(&self, spec: VmSpec) -> anyhow::Result<()> {
        let name = spec.name.clone();
        let running = self.daemon.boots().run(spec).map(drop);
        running.with_context(|| format!("VM '{name}' did not start"))
    }

    /// Starts a VM that need not boot: it is restored from the saved state of a guest with the same
    /// description. If there is no saved state, such a guest boots first, and is saved ([`Warm`]).
    pub fn start_warm(&self, mut spec: VmSpec) -> anyhow::Result<()> {
        let name = spec.name.clone();
        let Some(warm) = Warm::prepare(&mut spec)? else {
            return self.start(spec);
        };
        self.run(spec)?;
        warm.load(&VmDirectory::of(self.directory(), &name))
    }

    /// Waits until the agent of a VM answers and has reported its first inventory of the guest's
    /// page cache, for `timeout` at most, longer on a slow machine ([`patience`]). If a guest hangs
    /// during its boot, its last console output is printed, and the guest boots once more.
    pub fn wait_ready(&self, name: &str, timeout: Duration) -> anyhow::Result<()> {
        let timeout = patience(timeout);
        let wait = || self.daemon.vms().wait_agent(name, timeout);
        if let Err(error) = wait() {
            let vm = VmDirectory::of(self.directory(), name);
            let words = last_words(&vm);
            let limit_s = timeout.as_secs();
            let failed =
                format!("VM '{name}' did not come up in {limit_s} s; its last output:\n{words}\n");
            // A guest that has come up, and whose agent doesn't answer, is no matter of the
            // emulator's.
            if words.contains(BOOTED) {
                return Err(error).context(failed);
            }
            eprintln!("{failed}it boots once more");
            Qmp::connect(&vm.qmp(), Duration::from_secs(60))?.execute("system_reset", json!({}))?;
            wait().with_context(|| {
                format!(
                    "{failed}the second boot failed, too; output: {}",
                    last_words(&vm)
                )
            })?;
        }
        let what = format!("the agent in '{name}' reported no inventory of its page cache");
        wait_for(what, (timeout, Duration::from_millis(200)), || {
            let stats = self.stats()?;
            let is_ready = stats.vms.iter().any(|vm| vm.name == name && vm.agent_ready);
            Ok(is_ready.then_some(()))
        })?;
        if let Some(began) = lock(&self.booting).remove(name) {
            note_guest("booted", name, began.elapsed());
        }
        Ok(())
    }

    /// Runs a shell command in a guest, for `timeout` at most, longer on a slow machine
    /// ([`patience`]), and returns its output.
    pub fn exec(&self, name: &str, script: &str, timeout: Duration) -> anyhow::Result<String> {
        let result = self.daemon.vms().exec(name, script, patience(timeout));
        let result = result.with_context(|| format!("in the guest of VM '{name}': {script}"))?;
        let [said, errors] =
            [result.stdout, result.stderr].map(|s| String::from_utf8_lossy(&s).into_owned());
        let (code, output, errors) = (result.code, said.trim(), errors.trim());
        ensure!(
            code == 0,
            "a script in VM '{name}' failed with exit code {code}: {errors} {output}; the script: {script}"
        );
        Ok(said)
    }

    /// Runs a shell command in several guests in parallel. Returns their outputs in the order of
    /// `names`.
    pub fn exec_all(
        &self,
        names: &[&str],
        script: &str,
        timeout: Duration,
    ) -> anyhow::Result<Vec<String>> {
        at_once(names, |name| self.exec(name, script, timeout))
    }

    /// Resumes folding (`on`), or pauses it.
    pub fn fold(&self, on: bool) -> anyhow::Result<()> {
        let request = FoldRequest {
            paused: Some(!on),
            ..FoldRequest::default()
        };
        Ok(self.daemon.folding().set(&request).map(drop)?)
    }

    /// Returns the figures of the lab's fold engine.
    pub fn stats(&self) -> anyhow::Result<EngineStats> {
        Ok(self.daemon.folding().stats()?)
    }

    /// Returns the ledger's report on the lab's VMs.
    pub fn report(&self) -> anyhow::Result<FullReport> {
        Ok(self.daemon.reports().report()?)
    }

    /// Returns the PID of a VM's QEMU process.
    pub fn pid(&self, name: &str) -> anyhow::Result<i32> {
        let vms = self.daemon.vms().list();
        let vm = vms.iter().find(|vm| vm.name == name);
        Ok(vm
            .with_context(|| format!("the lab has no VM '{name}'"))?
            .pid)
    }

    /// Ends a VM of the lab.
    pub fn stop(&self, name: &str) -> anyhow::Result<()> {
        Ok(self.daemon.vms().stop(name, Duration::ZERO).map(drop)?)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        *lock(&CURRENT) = None;
        stop_all(&self.daemon);
        self.daemon.shut_down();
    }
}

fn stop_all(daemon: &Daemon) {
    for vm in daemon.vms().list() {
        if let Err(error) = daemon.vms().stop(&vm.name, Duration::ZERO) {
            let (name, pid) = (vm.name, vm.pid);
            eprintln!("memfold: VM '{name}' (process {pid}) could not be ended: {error}");
        }
    }
    daemon.segments().unprotect();
}

/// Makes an interrupt (Ctrl-C, SIGTERM) end this process's lab, restore KSM's settings, and run the
/// functions of [`undo_at_interrupt`]. QEMU processes survive the process that started them, so an
/// interrupted lab has to end them itself.
pub fn clean_up_at_interrupt() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let wait = || {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            runtime.enable_all().build()?.block_on(async {
                let mut terminate = signal(SignalKind::terminate())?;
                tokio::select! {
                    _ = terminate.recv() => Ok(()),
                    result = tokio::signal::ctrl_c() => result,
                }
            })
        };
        let watch = move || {
            if wait().is_ok() {
                eprintln!("\nmemfold: interrupted; ending the VMs of this run");
                let current = lock(&CURRENT).take();
                if let Some((daemon, directory)) = current {
                    daemon.close();
                    stop_all(&daemon);
                    // What is left there is of no use to anybody.
                    let _ = std::fs::remove_dir_all(directory);
                }
                if let Err(error) = ksm::restore_own(Path::new(ksm::NOTES)) {
                    eprintln!("memfold: KSM's settings could not be restored: {error}");
                }
                let made = std::mem::take(&mut *lock(&MADE));
                made.into_iter().rev().for_each(|undo| undo());
                // 128 + SIGINT, as shells have it.
                std::process::exit(130);
            }
        };
        let thread = std::thread::Builder::new().name("interrupt".into());
        if let Err(error) = thread.spawn(watch) {
            eprintln!("memfold: Ctrl-C will leave VMs behind: {error}");
        }
    });
}

/// Returns the guest image with this name, built by `memfold demo` or `make setup`.
pub fn guest_image(name: &str) -> anyhow::Result<GuestImage> {
    let mut images = guest_images()
        .context("no guest images found; 'memfold demo' builds them, in a checkout 'make setup'")?;
    let image = images.remove(name);
    image.with_context(|| {
        format!("no guest image '{name}'; 'memfold demo' builds images, in a checkout 'make setup'")
    })
}
