//! The running whole: VMs, engine and ledger together.
//!
//! ```text
//!   api ---> Daemon --- vms: name -> Machine --- watch thread   ended? conditions, layout changed?
//!              |                     `--------- agent link      hints, as commands to the engine
//!              `------- engine thread (fold)                    orders, through each VM's library link
//! ```
//! The daemon holds nothing that a new one couldn't find: VMs are in the state directory, mappings and the page store in the
//! kernel. It may be killed at any instant.

mod arriving;
mod auto_borrow;
mod booted;
mod borrow_again;
mod borrowing;
mod brake;
mod changes;
mod clock;
mod comparing;
mod copy_out;
mod cut_off;
mod error;
mod estimate;
mod figures;
mod folding;
mod guest;
mod joined;
mod ksm;
mod leasing;
mod lending;
mod libvirt;
mod machine;
mod reboot;
mod relays;
mod run_state;
mod sampling;
mod segments;
mod settling;
mod short_guests;
mod snapshots;
mod trial;
mod tries;
mod turns;
mod uses;
mod views;
mod vm_logs;
mod volume_keeper;
mod volumes;
mod watched;
mod watching;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError, Weak};
use std::time::{Duration, Instant};

use memfold_units::{ByteSize, PageCount};
use rustix::fs::FlockOperation;
use tracing::{debug, info, warn};

use arriving::{Arriving, Entry, Way};
pub use auto_borrow::BorrowWhen;
use brake::DebtWatch;
pub use error::DaemonError;
pub use figures::{Figures, LEAST_AGE, OnShelf};
use ksm::SteeredKsm;
use lending::Lending;
use machine::{Machine, Origin, Role};
pub use memfold_host::chain;
use run_state::RunState;
pub use sampling::Live;
use sampling::Sampling;
use uses::Uses;
use views::Views;
pub use views::{EstimateOrder, PlaceOrder, SwapUse};
use watched::Guard;

use memfold_api::{AttachRequest, FullReport, LendRequest, VersionInfo, VmInfo, VmSwap};
use memfold_fold::{Command, Engine, EngineSettings, VmId};
use memfold_ledger::{self as ledger, BrakePolicy, StoreAccount};
use memfold_lend::RegistryAt;
use memfold_segment as segment;
use memfold_snapshot::{Shelf, save};
use memfold_store::StoreIdentity;
use memfold_vm::kernel_copy::KernelCopies;
use memfold_vm::{
    AgentOptions, Cancel, CommandResult, MachineError, SegmentSpec, Stopped, Vm, VmDirectory,
    VmSpec,
};

/// Commands that wait for the engine; a guest that talks faster than the engine works waits.
const MAILBOX: usize = 1024;

/// How the daemon is to be.
#[derive(Clone, Debug)]
pub struct DaemonOptions {
    /// Directory of VMs and their sockets.
    pub state: PathBuf,
    /// Folding.
    pub settings: EngineSettings,
    /// Globs of guest paths to report; empty means all.
    pub include: Vec<String>,
    /// Globs of guest paths to leave out.
    pub exclude: Vec<String>,
    /// Whether folding begins paused.
    pub paused: bool,
    /// When too much is shared.
    pub brake: BrakePolicy,
    /// Directory of snapshots.
    pub shelf: PathBuf,
    /// Directory of segments.
    pub segments: PathBuf,
    /// Name of this host among those that lend and borrow; unset: the kernel's.
    pub host: Option<String>,
    /// Who serves the registry of leases; unset: this daemon does.
    pub registry: Option<RegistryAt>,
    /// When VMs borrow.
    pub borrow: BorrowWhen,
    /// What this host lends after a boot; unset: nothing.
    pub lend: Option<LendRequest>,
    /// The file of the history; unset: there is none.
    pub history: Option<PathBuf>,
    /// Directory where libvirt notes its QEMUs; unset: its domains are left alone.
    pub libvirt: Option<PathBuf>,
}

/// The daemon.
#[derive(Debug)]
pub struct Daemon {
    options: DaemonOptions,
    commands: SyncSender<Command>,
    shelf: Shelf,
    kernels: KernelCopies,
    segments: segment::Shelf,
    /// Write-locked while segments are removed; read-locked from the moment one is looked up until it is mapped.
    removing: RwLock<()>,
    vms: Mutex<BTreeMap<String, Arc<Machine>>>,
    next: Mutex<VmId>,
    /// Whether VMs may no longer be started.
    closed: AtomicBool,
    /// Write-locked while KSM begins to be steered; read-locked while it is decided whether a new VM's memory may merge.
    starts: RwLock<()>,
    /// VMs that are being started or taken over.
    arriving: Arriving,
    /// Held while a VM is restored that nothing sets apart from others of its snapshot.
    twins: Mutex<()>,
    /// Held while KSM stands still for a live save, and while steering it begins or ends.
    merging: Mutex<()>,
    /// KSM, while the daemon steers it.
    ksm: Mutex<Option<SteeredKsm>>,
    /// What guests could call in.
    owing: DebtWatch,
    /// What is done with snapshots now.
    uses: Uses,
    /// Memory that is lent and borrowed.
    lending: Lending,
    /// What the engine said last of folding.
    folding: folding::LastStats,
    /// Figures for scrapes, taken not long ago.
    kept: figures::Kept,
    /// Samples, of which the history is made.
    sampling: Arc<Sampling>,
    /// What is shown of memory, for some seconds.
    views: Views,
    /// Locked as long as the daemon lives: two daemons on one state directory would fold against each other.
    _lock: File,
}

impl Daemon {
    /// Starts the engine and takes over the VMs that run under the state directory.
    pub fn start(options: &DaemonOptions) -> Result<Arc<Self>, DaemonError> {
        let state = &options.state;
        let files = |source| DaemonError::State {
            path: state.clone(),
            source,
        };
        std::fs::create_dir_all(state).map_err(files)?;
        let lock = File::create(state.join("daemon.lock")).map_err(files)?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| DaemonError::StateTaken(state.clone()))?;
        ksm::restore();
        let mut settings = options.settings.clone();
        settings.max_mappings = max_map_count().unwrap_or(settings.max_mappings);
        let (commands, receiver) = sync_channel(MAILBOX);
        std::thread::Builder::new()
            .name("fold-engine".into())
            .spawn(move || Engine::new(settings).run(&receiver))
            .map_err(files)?;
        let daemon = Arc::new(Self {
            commands,
            shelf: Shelf::open(&options.shelf),
            kernels: KernelCopies::default(),
            segments: segment::Shelf::open(&options.segments, &state.join("pinned")),
            removing: RwLock::default(),
            vms: Mutex::default(),
            next: Mutex::new(1),
            closed: AtomicBool::new(false),
            starts: RwLock::default(),
            arriving: Arriving::default(),
            twins: Mutex::default(),
            merging: Mutex::default(),
            ksm: Mutex::default(),
            owing: DebtWatch::new(options.brake),
            uses: Uses::default(),
            lending: Lending::open(options)?,
            folding: folding::LastStats::default(),
            kept: figures::Kept::default(),
            sampling: Arc::new(Sampling::new(options.history.as_deref())),
            views: Views::default(),
            _lock: lock,
            options: options.clone(),
        });
        if options.paused {
            daemon.tell(Command::SetPaused(true))?;
        }
        trial::clear(state);
        daemon.begin_adoption().map_err(files)?;
        daemon.begin_settling().map_err(files)?;
        daemon.begin_sampling()?;
        daemon.begin_watching(options).map_err(files)?;
        Ok(daemon)
    }

    /// Takes up what the daemon before has left, once the VMs are known that are there: programs and other hosts may keep it waiting.
    fn begin_settling(self: &Arc<Self>) -> std::io::Result<()> {
        let (daemon, unsettled) = (self.clone(), self.unsettled());
        let work = move || {
            daemon.resume_volumes();
            daemon.lend_again();
            drop(unsettled);
            daemon.wait_for_adoption();
            daemon.tidy_segments();
        };
        std::thread::Builder::new()
            .name("settle".into())
            .spawn(work)
            .map(drop)
    }

    /// Begins what goes on by itself until the daemon ends.
    fn begin_watching(self: &Arc<Self>, options: &DaemonOptions) -> std::io::Result<()> {
        let begin = |name: &str, watch: fn(&Weak<Self>)| {
            let watched = Arc::downgrade(self);
            let thread = std::thread::Builder::new().name(name.into());
            thread.spawn(move || watch(&watched)).map(drop)
        };
        begin("debt", brake::watch)?;
        begin("guests", short_guests::watch)?;
        begin("wishes", borrow_again::watch)?;
        begin("vm-logs", vm_logs::watch)?;
        if options.borrow == BorrowWhen::Auto {
            begin("borrow", auto_borrow::watch)?;
        }
        if let Some(run) = options.libvirt.clone() {
            let watched = Arc::downgrade(self);
            std::thread::Builder::new()
                .name("libvirt".into())
                .spawn(move || libvirt::watch(&watched, &run))?;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Machine>>> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, command: Command) -> Result<(), DaemonError> {
        self.commands
            .send(command)
            .map_err(|_| DaemonError::Internal("the fold engine has ended"))
    }

    /// Puts a running VM into the tables and begins to watch and fold it.
    fn take_on(
        self: &Arc<Self>,
        vm: Vm,
        name: &str,
        domain: Option<String>,
        origin: Origin,
    ) -> Result<Arc<Machine>, DaemonError> {
        let id = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            *next += 1;
            *next
        };
        let options = AgentOptions {
            include: self.options.include.clone(),
            exclude: self.options.exclude.clone(),
            ..AgentOptions::default()
        };
        let role = Role {
            id,
            name: name.to_owned(),
            domain,
            origin,
        };
        let machine = Machine::take_on(vm, role, &self.commands, options)?;
        self.lock().insert(name.to_owned(), machine.clone());
        let (watched, daemon) = (machine.clone(), Arc::downgrade(self));
        let watch = move || {
            watched.watch();
            if let Some(daemon) = daemon.upgrade() {
                daemon.forget(&watched);
            }
        };
        std::thread::Builder::new()
            .name("vm-watch".into())
            .spawn(watch)
            .map_err(|_| DaemonError::Internal("no thread to watch the VM"))?;
        Ok(machine)
    }

    /// The VM's process has ended.
    fn forget(&self, machine: &Machine) {
        info!(vm = machine.name(), "ended");
        let segments = machine.vm().segments();
        self.end_writer(machine.name(), &segments);
        // Its name is free only when its files are gone: they would be taken for those of the next VM.
        machine.clean_up();
        {
            let mut vms = self.lock();
            if vms
                .get(machine.name())
                .is_some_and(|m| m.id() == machine.id())
            {
                vms.remove(machine.name());
            }
        }
        // The engine may have ended before us.
        let _ = self.tell(Command::Remove(machine.id()));
        self.shelf.let_go();
        self.forget_borrowing(machine);
        self.left_segments(&segments);
        if machine.attach_request().is_some() {
            self.write_attached();
        }
    }

    /// What answers.
    #[must_use]
    pub fn version(&self) -> VersionInfo {
        VersionInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: rustix::process::getpid().as_raw_nonzero().get(),
            state: self.options.state.clone(),
        }
    }

    /// All VMs, by name.
    #[must_use]
    pub fn list(&self) -> Vec<VmInfo> {
        // Not both locked at once.
        let lent: BTreeMap<String, VmSwap> = {
            let guards = self.lending.guards();
            let swap = |(vm, guard): (&String, &Arc<Guard>)| (vm.clone(), guard.swap());
            guards.iter().map(swap).collect()
        };
        let arriving = self.arriving.all();
        let machines: Vec<Arc<Machine>> = self.lock().values().cloned().collect();
        let mut vms: Vec<VmInfo> = machines.iter().map(|m| m.info()).collect();
        // One that has arrived meanwhile is listed once.
        for arrival in arriving {
            if vms.iter().all(|vm| vm.name != arrival.name()) {
                vms.push(arrival.info(&self.options.state));
            }
        }
        vms.sort_by(|a, b| a.name.cmp(&b.name));
        for vm in &mut vms {
            if let Some(swap) = lent.get(&vm.name) {
                vm.swap = Some(swap.clone());
            }
        }
        vms
    }

    /// Starts a VM, unless the brake is on.
    pub fn run_vm(self: &Arc<Self>, spec: VmSpec) -> Result<VmInfo, DaemonError> {
        self.admit(&spec.name, 0, false)?.started();
        self.run_vm_despite_brake(spec)
    }

    /// Starts a VM, however much guests could call in.
    pub fn run_vm_despite_brake(self: &Arc<Self>, spec: VmSpec) -> Result<VmInfo, DaemonError> {
        if let Some(name) = memfold_vm::segments::twice(&spec) {
            return Err(DaemonError::BadRequest(format!(
                "segments: '{name}' is named twice"
            )));
        }
        let boots = spec.boot_snapshot;
        let name = spec.name.clone();
        let info = self.launch(spec, |state, spec, cancel| {
            let vm = memfold_vm::start_unless(cancel, state, spec, None)?;
            self.share_kernel(&vm);
            Ok(vm)
        })?;
        // It may have ended already.
        let Ok(machine) = self.machine(&name) else {
            return Ok(info);
        };
        borrowing::swap_on_when_booted(&machine);
        if boots {
            self.save_when_booted(&machine);
        } else {
            segments::lay_when_booted(&machine);
        }
        Ok(machine.info())
    }

    /// Of an image that a VM boots with `-kernel` one copy is enough.
    fn share_kernel(&self, vm: &Vm) {
        match self.kernels.share(vm) {
            Ok(bytes) => debug!(vm = vm.name(), bytes, "of its kernel's image are common"),
            Err(error) => {
                debug!(vm = vm.name(), %error, "it has a copy of its kernel's image for itself");
            }
        }
    }

    /// Starts a VM in some way, and takes it on.
    pub fn launch(
        self: &Arc<Self>,
        mut spec: VmSpec,
        how: impl FnOnce(&Path, VmSpec, &Cancel) -> Result<Vm, DaemonError>,
    ) -> Result<VmInfo, DaemonError> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(DaemonError::Internal("the daemon is ending"));
        }
        let gate = self.starts.read().unwrap_or_else(PoisonError::into_inner);
        let entry = self.arrive(&spec, Way::Starting)?;
        let (name, domain) = (spec.name.clone(), spec.domain.clone());
        let uses = {
            let _kept = self.removing.read().unwrap_or_else(PoisonError::into_inner);
            self.find_segments(&mut spec)?;
            let used =
                |segment: &SegmentSpec| self.uses.begin(&segments::being_saved(&segment.name));
            spec.segments
                .iter()
                .map(used)
                .collect::<Result<Vec<_>, _>>()?
        };
        self.keep_from_merging(&mut spec);
        drop(gate);
        let vm = how(&self.options.state, spec, &entry.arrival.cancel)?;
        let came = vm.came_in().map_err(|source| DaemonError::State {
            path: self.options.state.clone(),
            source,
        });
        let machine = came.and_then(|()| self.take_on(vm, &name, domain, Origin::Started));
        if machine.is_err() {
            // Nobody would know of it.
            let state = &self.options.state;
            let ended = match Vm::find(state, &name) {
                Ok(vm) => vm.stop(Duration::ZERO).map(drop),
                // It has ended by itself, and has left its files.
                Err(MachineError::NotFound { .. }) => {
                    Vm::clear_if_stale(&VmDirectory::of(state, &name))
                        .map(drop)
                        .map_err(|source| MachineError::Look {
                            name: name.clone(),
                            source,
                        })
                }
                Err(error) => Err(error),
            };
            if let Err(error) = ended {
                warn!(
                    vm = name,
                    error = &error as &dyn std::error::Error,
                    "could not be taken on, and is left as it is"
                );
            }
        }
        drop((entry, uses));
        Ok(machine?.info())
    }

    /// Takes on a QEMU that is running already.
    pub fn attach(self: &Arc<Self>, request: &AttachRequest) -> Result<VmInfo, DaemonError> {
        self.check_free(request)?;
        self.attach_as(Vm::attach(&request.qmp)?, request, None, None)
    }

    fn check_free(&self, request: &AttachRequest) -> Result<(), DaemonError> {
        let name = &request.name;
        for (field, text) in [("name", Some(name)), ("domain", request.domain.as_ref())] {
            if let Some(text) = text {
                memfold_vm::check_name(field, text)
                    .map_err(|e| DaemonError::BadRequest(e.to_string()))?;
            }
        }
        // Not both locked at once.
        let is_arriving = self.arriving.get(name).is_some();
        if is_arriving || self.lock().contains_key(name) {
            return Err(DaemonError::NameTaken(name.clone()));
        }
        Ok(())
    }

    /// Takes on a QEMU that has been reached, libvirt's domain or not.
    fn attach_as(
        self: &Arc<Self>,
        vm: Vm,
        request: &AttachRequest,
        libvirt: Option<String>,
        entry: Option<&Entry>,
    ) -> Result<VmInfo, DaemonError> {
        if entry.is_none() {
            self.check_free(request)?;
        }
        let name = &request.name;
        if let Some(known) = self.lock().values().find(|m| m.pid() == vm.pid()) {
            return Err(DaemonError::BadRequest(format!(
                "this QEMU is known already, as '{}'",
                known.name()
            )));
        }
        let origin = match libvirt {
            Some(domain) => Origin::Libvirt(domain),
            None => Origin::Attached(request.qmp.clone()),
        };
        let machine = self.take_on(vm, name, request.domain.clone(), origin)?;
        self.write_attached();
        if cut_off::is_cut_off(&self.options.state, &machine) {
            undo_save(self.options.state.clone(), machine.clone());
        }
        Ok(machine.info())
    }

    /// Shuts a VM down, or ends one that is still being started.
    pub fn stop_vm(&self, name: &str, timeout: Duration) -> Result<Stopped, DaemonError> {
        if let Some(stopped) = self.stop_arriving(name, timeout)? {
            return Ok(stopped);
        }
        let stopped = self.machine(name)?.stop(timeout)?;
        // Its watch thread sees the end and forgets it; who asked wants to see it gone.
        let end = Instant::now() + Duration::from_secs(10);
        while self.lock().contains_key(name) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(stopped)
    }

    /// Lets a VM go on that stands still.
    pub fn resume_vm(&self, name: &str) -> Result<VmInfo, DaemonError> {
        let machine = self.machine(name)?;
        if let Some(domain) = machine.libvirt() {
            return Err(DaemonError::BadRequest(format!(
                "VM '{name}' is libvirt's domain '{domain}'; let it go on with virsh resume"
            )));
        }
        let now = machine.resume()?;
        if !now.is_running() {
            return Err(still(name, &now, "it does not go on"));
        }
        Ok(machine.info())
    }

    /// Runs a command in a guest.
    pub fn exec(
        &self,
        name: &str,
        script: &str,
        timeout: Duration,
    ) -> Result<CommandResult, DaemonError> {
        let machine = self.machine(name)?;
        machine.check_runs("no command was run")?;
        machine.wait_clock();
        machine
            .run(script, timeout)
            .map_err(|error| match machine.stands_still() {
                Some(state) => still(name, &state, &error.to_string()),
                None => error.into(),
            })
    }

    /// Waits until a guest's agent has connected.
    pub fn wait_agent(&self, name: &str, timeout: Duration) -> Result<(), DaemonError> {
        Ok(self.machine(name)?.wait_agent(timeout)?)
    }

    /// The ledger of this moment.
    pub fn report(self: &Arc<Self>) -> Result<FullReport, DaemonError> {
        let fold = self.fold_stats()?;
        let stores: Vec<StoreAccount> = fold
            .domains
            .iter()
            .map(|d| StoreAccount {
                domain: d.domain.clone(),
                identity: StoreIdentity {
                    dev: d.store_dev,
                    ino: d.store_ino,
                },
                allocated_bytes: ByteSize(d.store_bytes),
            })
            .collect();
        let identities: Vec<StoreIdentity> = stores.iter().map(|s| s.identity).collect();
        let machines: Vec<Arc<Machine>> = self.lock().values().cloned().collect();
        // A VM that ends while we look is left out.
        let vms: Vec<_> = machines
            .iter()
            .filter_map(|m| m.account(&identities))
            .collect();
        let own = ledger::take::own(
            ByteSize(fold.own_bytes),
            &identities,
            &self.lending.relays(),
        )?;
        let zero: u64 = fold.vms.iter().map(|vm| vm.zero_saved_pages).sum();
        let mut host = ledger::take::host(&vms, &stores, own, PageCount(zero).bytes())?;
        host.images_bytes = self.shelf.laid_out_bytes();
        host.lent_bytes = ByteSize(self.lender_status().map_or(0, |status| status.lent_bytes));
        let mut ledger = ledger::Report::new(host, vms);
        ledger.debt = Some(self.debt()?);
        Ok(FullReport { ledger, fold })
    }

    /// Starts no more VMs, and waits for those that are being started: from then on the list is whole.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.wait_for_starts();
    }

    /// Ends the engine and steering KSM. VMs go on.
    pub fn shut_down(&self) {
        self.end_sampling();
        self.end_steering();
        self.lending.shut_down();
        // It may have ended already.
        let _ = self.tell(Command::Stop);
    }

    fn attached_file(&self) -> PathBuf {
        self.options.state.join("attached.json")
    }

    fn read_attached(&self) -> Vec<AttachRequest> {
        std::fs::read(self.attached_file())
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default()
    }

    /// Remembers attached VMs for the next daemon.
    fn write_attached(&self) {
        let list: Vec<AttachRequest> = self
            .lock()
            .values()
            .filter_map(|m| m.attach_request())
            .collect();
        // Those that could not be reached yet, too.
        let arriving = self.arriving.all();
        let missing = arriving
            .iter()
            .filter_map(|arrival| arrival.attach_request());
        let mut list: Vec<AttachRequest> = list;
        for request in missing {
            if list.iter().all(|known| known.name != request.name) {
                list.push(request.clone());
            }
        }
        if let Err(error) = write_json(&self.attached_file(), &list) {
            warn!(%error, "attached VMs won't be known to the next daemon");
        }
    }
}

/// What is not done because a VM stands still.
fn still(vm: &str, state: &RunState, what: &str) -> DaemonError {
    DaemonError::StandsStill {
        why: format!("VM '{vm}' stands still ({}): {what}", state.words()),
        fix: state.fix.clone().unwrap_or_default(),
    }
}

/// Takes a lock within a time.
fn lock_within<T>(lock: &Mutex<T>, limit: Duration) -> Option<MutexGuard<'_, T>> {
    let end = Instant::now() + limit;
    loop {
        match lock.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(guard)) => return Some(guard.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() >= end => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> std::io::Result<()> {
    let temporary = path.with_extension("new");
    std::fs::write(&temporary, serde_json::to_vec_pretty(value)?)?;
    std::fs::rename(temporary, path)
}

/// `vm.max_map_count` (`Documentation/admin-guide/sysctl/vm.rst`).
fn max_map_count() -> Option<usize> {
    std::fs::read_to_string("/proc/sys/vm/max_map_count")
        .ok()?
        .trim()
        .parse()
        .ok()
}
/// Undoes a save of a VM of others' that was cut off with its daemon. QEMU may take a while.
fn undo_save(state: PathBuf, machine: Arc<Machine>) {
    let undo = move || {
        if let Some(_saving) = machine.try_save() {
            // Said in the log.
            let _ = cut_off::undo(&state, &machine);
        }
    };
    let spawned = std::thread::Builder::new()
        .name("cut-off".into())
        .spawn(undo);
    if let Err(error) = spawned {
        warn!(%error, "a save that was cut off is undone by the next");
    }
}

/// Has a VM that was taken over use its disks as before a save that was cut off with its daemon. QEMU may take a while to stop copying.
fn let_go_of_disks(machine: Arc<Machine>) {
    let work = move || {
        if let (Some(_saving), Some(spec)) = (machine.try_save(), machine.vm().spec()) {
            save::let_go_of_disks(spec, &|| machine.monitor());
        }
    };
    let spawned = std::thread::Builder::new().name("disks".into()).spawn(work);
    if let Err(error) = spawned {
        warn!(%error, "disks of a save that was cut off are let go of by the next save");
    }
}
