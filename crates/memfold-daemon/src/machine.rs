//! One VM of the daemon: its links, its watch, its account.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use memfold_api::{
    AttachRequest, BootSnapshot, SegmentState, SwapPlace, VmInfo, VmSegment, VmSwap,
};
use memfold_fold::{Command, Guest, GuestError, VmId};
use memfold_ledger::VmAccount;
use memfold_snapshot::Renewal;
use memfold_snapshot::clock::ClockStep;
use memfold_snapshot::identity::Plan;
use memfold_store::StoreIdentity;
use memfold_vm::{
    AgentError, AgentEvent, AgentLink, AgentOptions, CommandResult, LibraryError, RamLayout,
    SegmentSpec, Vm, VmConditions,
};
use memfold_wire::library::Advice;
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::process::Pid;
use tracing::{debug, info, warn};

use self::library_watch::LibraryWatch;
use self::pauses::Pauses;
use crate::error::DaemonError;
use crate::guest::{Monitor, MonitorGuard, QemuGuest, SharedLibraryState};
use crate::locks::{Rank, Ranked};
use crate::run_state::RunState;
use crate::semaphore::Semaphore;

mod clock;
mod library_watch;
pub(crate) mod pauses;
mod room;
mod running;
mod watch;

/// How long a guest may take to be set apart from others: keys are made.
const RENEW_TIMEOUT: Duration = Duration::from_secs(120);

/// How long one waits for its turn before it goes without.
const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a request waits until nobody saves a VM or changes what it maps.
const RIGHT_TIMEOUT: Duration = Duration::from_secs(30);

/// Permits of those that are being set apart: half of the host's CPUs.
static RENEWING: OnceLock<Semaphore> = OnceLock::new();

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What is known of the VM and changes.
#[derive(Debug)]
struct Seen {
    layout: RamLayout,
    conditions: VmConditions,
}

/// What the daemon makes of a VM that it takes on.
#[derive(Debug)]
pub(crate) struct Role {
    /// The engine's number for it.
    pub id: VmId,
    pub name: String,
    pub domain: Option<String>,
    pub origin: Origin,
}

/// Who has started a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// memfold.
    Started,
    /// Somebody who has said where its QMP socket is.
    Attached(PathBuf),
    /// libvirt, by this name.
    Libvirt(String),
}

/// The right to save a VM or to change what it maps, as long as this is kept.
#[derive(Debug)]
pub(crate) struct SaveRight<'a> {
    _right: MutexGuard<'a, ()>,
    _rank: Ranked,
}

/// The right to change what a VM's swap disk uses, as long as this is kept.
#[derive(Debug)]
pub(crate) struct SwapRight<'a> {
    _right: MutexGuard<'a, ()>,
    _rank: Ranked,
}

/// A VM that the daemon has taken on.
#[derive(Debug)]
pub(crate) struct Machine {
    id: VmId,
    vm: Vm,
    name: String,
    domain: Option<String>,
    origin: Origin,
    monitor: Arc<Monitor>,
    seen: Mutex<Seen>,
    /// Whether it runs, and why not.
    state: Mutex<RunState>,
    /// Why the library can't fold, whatever the conditions.
    library_problem: Option<String>,
    library_state: Mutex<SharedLibraryState>,
    library_watch: Mutex<LibraryWatch>,
    saving: Mutex<()>,
    /// A snapshot is being made, for which it stands still.
    being_saved: AtomicBool,
    pauses: Mutex<Pauses>,
    /// Whether its guest's agent has ever answered this daemon.
    had_agent: AtomicBool,
    /// Held while what its swap disk uses is changed.
    swapping: Mutex<()>,
    renewal: Mutex<Option<Renewal>>,
    /// What became of its clock when it went on; `clock_set` says that this has changed.
    pub(crate) clock: Mutex<Option<ClockStep>>,
    pub(crate) clock_set: Condvar,
    /// Least number for the next nodes of its swap disk.
    swap_generation: Mutex<u64>,
    /// Whether its swap disk came home because one of its copies was lost.
    lost_a_copy: AtomicBool,
    boot_snapshot: Mutex<Option<BootSnapshot>>,
    /// What the guest has done with its segments, by name.
    segments: Mutex<BTreeMap<String, SegmentState>>,
    can_stop: bool,
    agent: Mutex<Option<Arc<AgentLink>>>,
    commands: SyncSender<Command>,
    qemu: String,
}

impl Machine {
    pub fn take_on(
        vm: Vm,
        role: Role,
        commands: &SyncSender<Command>,
        options: AgentOptions,
    ) -> Result<Arc<Self>, DaemonError> {
        let Role {
            id,
            name,
            domain,
            origin,
        } = role;
        let mut qmp = vm.daemon_qmp()?;
        let (major, minor, micro) = qmp.version();
        let layout = vm.layout(&mut qmp)?;
        let conditions = vm.conditions(&mut qmp)?;
        let state = RunState::ask(&name, &mut qmp)?;
        let monitor = Arc::new(Monitor::new(qmp));
        let library = SharedLibraryState::default();
        let (guest, library_problem) = match vm.library_link() {
            None => (None, Some(NO_LIBRARY.to_owned())),
            Some(Err(error)) => (None, Some(library_words(&error))),
            Some(Ok(link)) => {
                let problem = link.facts().problem.clone();
                let (monitor, state) = (monitor.clone(), library.clone());
                let guest = QemuGuest::new(vm.pid(), link, monitor, &conditions, state);
                (Some(guest), problem)
            }
        };
        let machine = Arc::new(Self {
            can_stop: guest.as_ref().is_some_and(Guest::can_stop),
            id,
            name,
            domain,
            origin,
            monitor,
            seen: Mutex::new(Seen { layout, conditions }),
            state: Mutex::default(),
            library_problem,
            library_state: Mutex::new(library),
            library_watch: Mutex::new(LibraryWatch::new()),
            saving: Mutex::default(),
            being_saved: AtomicBool::new(false),
            pauses: Mutex::default(),
            had_agent: AtomicBool::new(false),
            swapping: Mutex::default(),
            renewal: Mutex::default(),
            clock: Mutex::default(),
            clock_set: Condvar::new(),
            swap_generation: Mutex::default(),
            lost_a_copy: AtomicBool::new(false),
            boot_snapshot: Mutex::default(),
            segments: Mutex::default(),
            agent: Mutex::default(),
            commands: commands.clone(),
            qemu: format!("{major}.{minor}.{micro}"),
            vm,
        });
        let guest: Box<dyn Guest> = match guest {
            Some(guest) => Box::new(guest),
            None => Box::new(Unfolded(machine.pid())),
        };
        machine.note_state(&machine.with_own_fix(state));
        let layout = machine.layout();
        let advice = machine.advice(&layout);
        machine.tell(Command::Add {
            id,
            name: machine.name.clone(),
            domain: machine.domain.clone(),
            problem: machine.problem(),
            layout,
            advice,
            guest,
        });
        let weak = Arc::downgrade(&machine);
        let link = machine.vm.agent_link(options, move |event| {
            if let Some(machine) = weak.upgrade() {
                machine.agent_event(event);
            }
        });
        *machine.agent.lock() = link.map(Arc::new);
        machine.renew();
        Ok(machine)
    }

    /// Sees to it that a restored VM is set apart from others, as soon as its agent answers.
    fn renew(self: &Arc<Self>) {
        let plan = self.vm.directory().map_or(Ok(None), Plan::read);
        let plan = match plan {
            Ok(Some(plan)) => plan,
            Ok(None) => return,
            Err(error) => {
                self.set_renewal(Renewal::failed(&error.to_string()));
                return;
            }
        };
        self.set_renewal(Renewal::pending());
        if plan.keeps_clock() {
            self.keep_clock();
        } else {
            self.set_clock_soon();
        }
        let weak = Arc::downgrade(self);
        let work = move || {
            // Not kept alive by a guest that never answers.
            while let Some((machine, agent)) = weak.upgrade().and_then(|m| {
                let agent = m.agent()?;
                Some((m, agent))
            }) {
                if agent.wait_session(Duration::from_secs(1)).is_err() {
                    continue;
                }
                // Dozens of guests at work would keep the next clone from starting. But none may keep others waiting for long.
                let _turn = RENEWING
                    .get_or_init(|| Semaphore::new(cpus().div_ceil(2)))
                    .take(TURN_TIMEOUT);
                // What is begun and cut off is done again: that does no harm.
                if machine.carry_out(&plan) {
                    return;
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("renew".into()).spawn(work) {
            self.set_renewal(Renewal::failed(&error.to_string()));
        }
    }

    /// Returns whether that is all this daemon can do.
    fn carry_out(&self, plan: &Plan) -> bool {
        let renewal = match self.run(&plan.script(), RENEW_TIMEOUT) {
            Ok(done) => Renewal::read(&String::from_utf8_lossy(&done.stdout)),
            Err(AgentError::NoSession(_) | AgentError::Lost | AgentError::Write(_)) => {
                return false;
            }
            Err(error) => Err(error.to_string()),
        };
        match renewal {
            Ok(renewal) => {
                info!(vm = self.name, done = ?renewal.done, left = ?renewal.left, "set apart from others of its snapshot");
                if let Some(Err(error)) = self.vm.directory().map(Plan::remove) {
                    warn!(vm = self.name, %error, "the next daemon will give this VM its identity again");
                }
                self.set_renewal(renewal);
            }
            // The plan stays for the next daemon.
            Err(why) => {
                warn!(
                    vm = self.name,
                    why, "not set apart from others of its snapshot"
                );
                self.set_renewal(Renewal::failed(&why));
            }
        }
        true
    }

    fn set_renewal(&self, renewal: Renewal) {
        *self.renewal.lock() = Some(renewal);
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock()
    }

    fn tell(&self, command: Command) {
        // The engine ends only when the daemon does.
        let _ = self.commands.send(command);
    }

    fn agent_event(&self, event: AgentEvent) {
        match event {
            AgentEvent::Session(facts) => {
                self.had_agent.store(true, Ordering::Relaxed);
                info!(
                    vm = self.name,
                    kernel = facts.kernel,
                    agent = facts.agent,
                    "agent connected"
                );
                // The firmware has run by now: RAM lies where the guest's kernel knows it.
                self.look_again();
                self.tell(Command::AgentSession(self.id));
            }
            AgentEvent::Message(message) => self.tell(Command::Agent(self.id, message)),
            AgentEvent::Lost { reason } => {
                info!(vm = self.name, reason, "agent gone");
                self.tell(Command::AgentGone(self.id));
            }
        }
    }

    /// Where its RAM lies.
    pub(crate) fn layout(&self) -> RamLayout {
        self.seen().layout.clone()
    }

    /// Reads layout and conditions anew and tells the engine what has changed.
    pub fn look_again(&self) {
        let looked = {
            let mut qmp = self.monitor.lock();
            self.vm
                .layout(&mut qmp)
                .and_then(|layout| Ok((layout, self.vm.conditions(&mut qmp)?)))
        };
        let (layout, conditions) = match looked {
            Ok(looked) => looked,
            Err(error) => {
                // What keeps QEMU from answering is told once, with its state.
                debug!(
                    vm = self.name,
                    error = &error as &dyn std::error::Error,
                    "QEMU does not tell this VM's layout"
                );
                return;
            }
        };
        let (changed, before) = {
            let mut seen = self.seen();
            let changed = seen.layout != layout;
            seen.layout = layout.clone();
            let before = std::mem::replace(&mut seen.conditions, conditions.clone());
            (changed, before)
        };
        if changed {
            let advice = self.advice(&layout);
            self.tell(Command::Layout {
                id: self.id,
                layout,
                advice,
            });
        }
        if before.fold != conditions.fold {
            self.tell(Command::Problem(self.id, self.problem()));
        }
    }

    fn advice(&self, layout: &RamLayout) -> Vec<Advice> {
        let read = |block| {
            self.vm.advice(block).unwrap_or_else(|error| {
                warn!(vm = self.name, %error, "advice of a RAM block cannot be read");
                Advice::default()
            })
        };
        layout.blocks.iter().map(read).collect()
    }

    /// Why the VM is not folded, in one line.
    pub fn problem(&self) -> Option<String> {
        self.fold_problems().into_iter().next()
    }

    fn fold_problems(&self) -> Vec<String> {
        let conditions = self
            .seen()
            .conditions
            .fold
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>();
        self.library_problem
            .clone()
            .into_iter()
            .chain(conditions)
            .collect()
    }

    /// Removes what the VM's end left over.
    pub fn clean_up(&self) {
        // The link's thread ends with it: nobody waits for that with the lock.
        let link = self.agent.lock().take();
        drop(link);
        if let Some(directory) = self.vm.directory() {
            if let Err(error) = Vm::clear_if_stale(directory) {
                warn!(vm = self.name, %error, "its files could not be removed");
            }
        }
    }

    pub const fn vm(&self) -> &Vm {
        &self.vm
    }

    /// QEMU's monitor, for as long as the guard lives.
    pub fn monitor(&self) -> MonitorGuard<'_> {
        self.monitor.lock()
    }

    pub fn domain(&self) -> Option<&str> {
        self.domain.as_deref()
    }

    /// Whether its library can stop it, and lets it go on when this daemon dies.
    pub const fn can_stop(&self) -> bool {
        self.can_stop
    }

    pub const fn id(&self) -> VmId {
        self.id
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub const fn pid(&self) -> Pid {
        self.vm.pid()
    }

    /// Its name in libvirt.
    pub fn libvirt(&self) -> Option<&str> {
        match &self.origin {
            Origin::Libvirt(domain) => Some(domain),
            Origin::Started | Origin::Attached(_) => None,
        }
    }

    /// What the next daemon has to be told of it. Domains of libvirt it finds by itself, and they may have another trust domain by then.
    pub fn attach_request(&self) -> Option<AttachRequest> {
        let Origin::Attached(qmp) = &self.origin else {
            return None;
        };
        Some(AttachRequest {
            qmp: qmp.clone(),
            name: self.name.clone(),
            domain: self.domain.clone(),
        })
    }

    pub fn info(&self) -> VmInfo {
        let agent = self.agent().and_then(|link| link.session());
        let (fold_problems, state) = (self.fold_problems(), self.state());
        let seen = self.seen();
        let spec = self.vm().spec();
        let forwards = spec.map_or_else(Vec::new, |spec| spec.forwards.clone());
        VmInfo {
            forwards: forwards.iter().map(ToString::to_string).collect(),
            left_out: spec.map_or_else(Vec::new, |spec| spec.left_out.clone()),
            name: self.name.clone(),
            domain: self.domain.clone(),
            pid: self.pid().as_raw_nonzero().get(),
            ram_bytes: seen.layout.pages() * memfold_units::PAGE_SIZE,
            origin: match &self.origin {
                Origin::Started => "started",
                Origin::Attached(_) | Origin::Libvirt(_) => "attached",
            }
            .into(),
            libvirt: self.libvirt().map(str::to_owned),
            qemu: self.qemu.clone(),
            agent_problems: agent
                .as_ref()
                .map(|facts| facts.problems.clone())
                .unwrap_or_default(),
            agent: agent.map(|facts| format!("Linux {}", facts.kernel)),
            fold_problems,
            refold_problems: refold_problems(
                &seen.conditions,
                self.can_stop,
                self.libvirt().map_or(NO_MONITOR, |_| NOT_STOPPED),
            ),
            costs: seen
                .conditions
                .costs
                .iter()
                .map(ToString::to_string)
                .collect(),
            segments: self.segments(),
            clock: self.clock_step(),
            renewal: self.renewal.lock().clone(),
            // Unless it is lent, which the daemon knows.
            swap: self
                .vm()
                .spec()
                .and_then(|spec| spec.swap)
                .map(|size| VmSwap {
                    bytes: size.0,
                    place: SwapPlace::OnDisk,
                    durability: None,
                    lent: Vec::new(),
                }),
            boot_snapshot: self.boot_snapshot.lock().clone(),
            state: state.name,
            state_cause: state.cause,
            state_fix: state.fix,
        }
    }

    fn segments(&self) -> Vec<VmSegment> {
        let state = |segment: SegmentSpec| {
            let known = self.segment_state(&segment.name);
            let state = if segment.root {
                SegmentState::Root
            } else {
                known.unwrap_or(SegmentState::Attached)
            };
            VmSegment {
                segment: segment.name,
                state,
            }
        };
        self.vm.segments().into_iter().map(state).collect()
    }

    pub fn segment_state(&self, name: &str) -> Option<SegmentState> {
        self.segments.lock().get(name).cloned()
    }

    pub fn set_segment_state(&self, name: &str, state: SegmentState) {
        self.segments.lock().insert(name.to_owned(), state);
    }

    pub fn set_boot_snapshot(&self, now: BootSnapshot) {
        *self.boot_snapshot.lock() = Some(now);
    }

    pub fn account(&self, stores: &[StoreIdentity]) -> Option<VmAccount> {
        let layout = self.layout();
        let pid = self.pid().as_raw_nonzero().get();
        let segments = self.segment_identities().into_iter();
        let segments: Vec<StoreIdentity> = segments.map(|(_, identity)| identity).collect();
        let domain = self.domain.as_deref();
        memfold_ledger::take::vm(pid, &self.name, domain, &layout, stores, &segments)
            .inspect_err(|error| warn!(vm = self.name, %error, "left out of the ledger"))
            .ok()
    }

    /// The images of the segments that it maps, with their names.
    pub fn segment_identities(&self) -> Vec<(String, StoreIdentity)> {
        let identity = |segment: SegmentSpec| {
            let file = std::fs::File::open(segment.image.as_ref()?).ok()?;
            Some((segment.name, StoreIdentity::of(file).ok()?))
        };
        self.vm
            .segments()
            .into_iter()
            .filter_map(identity)
            .collect()
    }

    /// A handle of its own, so that a long command doesn't keep others out.
    pub fn agent(&self) -> Option<Arc<AgentLink>> {
        self.agent.lock().clone()
    }

    fn agent_or_error(&self) -> Result<Arc<AgentLink>, AgentError> {
        self.agent()
            .ok_or_else(|| AgentError::NoSession("the VM has no port for it".into()))
    }

    pub fn run(&self, script: &str, timeout: Duration) -> Result<CommandResult, AgentError> {
        self.agent_or_error()?.run(script, timeout)
    }

    /// The same of a command that prints a line or two: more than [`SHORT`] bytes are not kept, and it is killed.
    pub fn run_short(&self, script: &str, timeout: Duration) -> Result<CommandResult, AgentError> {
        let mut result = CommandResult::default();
        result.code = self
            .agent_or_error()?
            .run_streaming(script, timeout, |_, bytes| {
                result.stdout.extend_from_slice(bytes);
                result.stdout.len() <= SHORT
            })?;
        Ok(result)
    }

    /// Uses a number for nodes of its swap disk, or a greater one if it was used before; gives it.
    pub fn use_generation(&self, free: u64) -> u64 {
        let mut least = self.swap_generation.lock();
        let number = free.max(*least);
        *least = number + 1;
        number
    }

    /// Notes why its swap disk is about to be moved home: whether one of its copies was lost.
    pub fn comes_home(&self, lost_a_copy: bool) {
        self.lost_a_copy.store(lost_a_copy, Ordering::Release);
    }

    /// Whether that was why, as far as this daemon knows.
    pub fn has_lost_a_copy(&self) -> bool {
        self.lost_a_copy.load(Ordering::Acquire)
    }

    /// The right to save it or to change what it maps, as soon as nobody else has it.
    pub fn save_right(&self) -> SaveRight<'_> {
        SaveRight {
            _rank: Ranked::begin(Rank::Save),
            _right: self.saving.lock(),
        }
    }

    /// The right to save it or to change what it maps, for a request. It does not wait longer than [`RIGHT_TIMEOUT`]: whoever has it may wait for a guest that does not answer.
    pub fn save_right_soon(&self) -> Result<SaveRight<'_>, DaemonError> {
        let rank = Ranked::begin(Rank::Save);
        let right = self.saving.try_lock_for(RIGHT_TIMEOUT);
        let right = right.ok_or_else(|| DaemonError::Busy {
            why: format!(
                "VM '{}' is being saved, or its segments are being changed",
                self.name()
            ),
            fix: "try again when that is done".into(),
        })?;
        Ok(SaveRight {
            _right: right,
            _rank: rank,
        })
    }

    /// The right to change what its swap disk uses. A VM that has one isn't saved, so nobody waits here for who saves, or copies files out of
    /// the guest for an hour: a lender that needs its memory doesn't either.
    pub fn swap_right(&self) -> SwapRight<'_> {
        SwapRight {
            _rank: Ranked::begin(Rank::Swap),
            _right: self.swapping.lock(),
        }
    }

    /// The right to save it, which one at a time has.
    pub fn try_save(&self) -> Option<SaveRight<'_>> {
        Some(SaveRight {
            _rank: Ranked::begin(Rank::Save),
            _right: self.saving.try_lock()?,
        })
    }

    /// Pages of its RAM.
    pub fn ram_pages(&self) -> u64 {
        self.seen().layout.pages()
    }

    pub fn take_inventory(&self) -> Result<(), AgentError> {
        self.agent_or_error()?.take_inventory()
    }

    pub fn wait_agent(&self, timeout: Duration) -> Result<(), AgentError> {
        self.agent_or_error()?.wait_session(timeout).map(drop)
    }
}

/// What a command that prints little may print, in bytes.
const SHORT: usize = 4096;

const NO_LIBRARY: &str = "memfold's library is not in this QEMU; start the VM with 'memfold vm run', or with LD_PRELOAD=libmemfold_qemu.so and MEMFOLD_QEMU_SOCKET=PATH in its environment";

const NO_MONITOR: &str = "and not at pauses either: the library has no QMP socket of its own; start QEMU with -qmp unix:PATH,server=on,wait=off and MEMFOLD_QEMU_MONITOR=PATH in its environment";

const NOT_STOPPED: &str =
    "and not at pauses either: only libvirt stops its domains and lets them go on";

/// Why what is folded is not folded again at once, or not at all. `why`: it is not even when the VM stands still for a moment.
fn refold_problems(conditions: &VmConditions, can_stop: bool, why: &str) -> Vec<String> {
    let reasons = conditions.refold_live.iter().map(ToString::to_string);
    let no_stop = (!conditions.refold_live.is_empty() && !can_stop).then(|| why.to_owned());
    reasons.chain(no_stop).collect()
}

fn library_words(error: &LibraryError) -> String {
    format!("memfold's library in this QEMU cannot be reached: {error}")
}

/// Stands for a VM without the library: the engine lists it and gives it no order.
struct Unfolded(Pid);

impl Guest for Unfolded {
    fn pid(&self) -> Pid {
        self.0
    }

    fn order(
        &mut self,
        _: &memfold_wire::library::Order,
        _: Option<std::os::fd::BorrowedFd<'_>>,
    ) -> Result<memfold_wire::library::Reply, GuestError> {
        Err(GuestError::Library(std::io::Error::other(NO_LIBRARY)))
    }

    fn refold_live(&mut self) -> bool {
        false
    }

    fn can_stop(&self) -> bool {
        false
    }
}
