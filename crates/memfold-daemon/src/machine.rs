//! One VM of the daemon: its connections (QEMU's monitor, fold library, agent), its state, and its
//! part of the ledger.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use memfold_api::{AttachRequest, BootSnapshot, SegmentState};
use memfold_fold::{
    Command, Guest, LibraryState, NO_LIBRARY, QemuGuest, SharedLibraryState, Unfolded, VmId,
};
use memfold_ledger::VmAccount;
use memfold_snapshot::Renewal;
use memfold_snapshot::clock::ClockStep;
use memfold_store::StoreIdentity;
use memfold_vm::{
    AgentError, AgentEvent, AgentLink, AgentOptions, CommandResult, GuestTask, QmpGuard, RamBlock,
    RamLayout, SegmentSpec, SharedQmp, StreamEvent, StreamRequest, StreamedCommand, Vm,
    VmConditions,
};
use memfold_wire::agent::FromAgent;
use memfold_wire::library::Advice;
use memfold_wire::order::GuestOrder;
use parking_lot::{Condvar, Mutex};
use rustix::process::Pid;
use tracing::{debug, info, warn};

pub(crate) use self::guest_reading::GuestReading;
use self::pauses::Pauses;
use self::settings::Settings;
use crate::arrivals::AttachedVm;
use crate::error::{DaemonError, refused};
use crate::locks::{SaveRight, SwapRight};
use crate::run_state::RunState;

mod agent_ready;
mod clock;
mod guest_memory;
mod guest_reading;
mod info;
mod pace;
pub(crate) mod pauses;
mod renewal;
mod running;
mod set;
pub(crate) mod settings;
mod ttl;
mod watch;

/// Time between two reads of a VM's conditions for folding and its memory layout.
const INTERVAL: Duration = Duration::from_secs(10);

/// Age of the connection to the fold library, and the pause before the next attempt to connect.
#[derive(Debug)]
struct LibraryWatch {
    connected: Instant,
    /// Time after `connected` during which no new connection is attempted.
    pause: Duration,
}

/// Facts about the VM that may change while the VM runs, as last read.
#[derive(Debug)]
struct Seen {
    layout: RamLayout,
    conditions: VmConditions,
}

/// The daemon's data about a VM: name, number, trust domain, and the program that started the VM.
#[derive(Debug)]
pub(crate) struct Role {
    /// Number by which the fold engine knows the VM.
    pub id: VmId,
    pub name: String,
    pub domain: Option<String>,
    pub origin: Origin,
}

/// The program that started a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// memfold started the VM.
    Started,
    /// Another program started the VM; a user gave the path of its QMP socket.
    Attached(PathBuf),
    /// libvirt started the VM, as a domain of this name.
    Libvirt(String),
}

/// What is recorded about a VM while it runs; all empty in the beginning.
#[derive(Debug, Default)]
struct Marks {
    /// The VM's run state, and the reason if it is not running.
    state: Mutex<RunState>,
    saving: Mutex<()>,
    /// Whether the VM is stopped for a snapshot that is being saved.
    being_saved: AtomicBool,
    pauses: Mutex<Pauses>,
    /// Whether the guest's agent has ever answered this daemon.
    had_agent: AtomicBool,
    /// Held while the block nodes of the swap disk are changed.
    swapping: Mutex<()>,
    renewal: Mutex<Option<Renewal>>,
    /// State of setting the guest's clock after a pause. `clock_set` is notified when it changes.
    clock: Mutex<Option<ClockStep>>,
    clock_set: Condvar,
    /// How often setting the guest's clock was wanted since it was done last. Above 0, a thread
    /// does it.
    clock_wanted: AtomicU64,
    /// Smallest unused number for the swap disk's next block nodes in QEMU.
    swap_generation: Mutex<u64>,
    /// Whether the swap disk was moved back to the local disk because one of its copies was lost.
    lost_a_copy: AtomicBool,
    boot_snapshot: Mutex<Option<BootSnapshot>>,
    /// Whether a client is connected to the serial console.
    console_in_use: AtomicBool,
    /// State of each segment in the guest, by the segment's name.
    segments: Mutex<BTreeMap<String, SegmentState>>,
    agent: Mutex<Option<Arc<AgentLink>>>,
    guest_memory: Mutex<GuestReading>,
    /// Whether the balloon of a VM that another program describes has free page reporting; empty
    /// until QEMU has said it.
    reports_free_pages: OnceLock<bool>,
    /// How far the fetching of the snapshot is from which the VM runs; `None` if nothing is
    /// missing.
    arriving: Mutex<Option<String>>,
    /// Whether the VM has come from another QEMU by a migration, and the daemon does not know yet
    /// what its balloon held then.
    has_unseen_balloon: AtomicBool,
}

/// A VM that the daemon manages.
#[derive(Debug)]
pub(crate) struct Machine {
    vm: Vm,
    role: Role,
    monitor: Arc<SharedQmp>,
    seen: Mutex<Seen>,
    /// The reason why the fold library cannot be used, whatever the VM's state; `None` if it can.
    library_problem: Mutex<Option<String>>,
    /// Settings that an operator can change.
    settings: Mutex<Settings>,
    /// When the VM's time to live began or was last extended.
    extended: Mutex<Option<Instant>>,
    library_state: Mutex<SharedLibraryState>,
    library_watch: Mutex<LibraryWatch>,
    marks: Marks,
    can_stop: AtomicBool,
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
        let mut qmp = vm.daemon_qmp()?;
        let (major, minor, micro) = qmp.version();
        let (layout, conditions) = vm.layout_and_conditions(&mut qmp)?;
        let state = RunState::ask(&role.name, &mut qmp)?;
        let monitor = Arc::new(SharedQmp::new(qmp));
        let library = SharedLibraryState::default();
        let is_arriving = (vm.directory()).is_some_and(|place| place.arriving().exists());
        let is_incoming = state.is_incoming();
        let (guest, library_problem) = match vm.library_link() {
            None => (None, Some(NO_LIBRARY.to_owned())),
            Some(Err(error)) => {
                if error.may_pass() {
                    // The daemon connects later, as to a library that stopped answering.
                    *library.lock() = LibraryState::Lost;
                }
                let why = format!("cannot reach memfold's library in QEMU: {error}");
                (None, Some(why))
            }
            Some(Ok(link)) => {
                let problem = link.facts().problem.clone();
                let (monitor, state) = (monitor.clone(), library.clone());
                let guest = QemuGuest::new(vm.pid(), link, monitor, &conditions, state);
                (Some(guest), problem)
            }
        };
        let machine = Arc::new(Self {
            can_stop: AtomicBool::new(guest.as_ref().is_some_and(Guest::can_stop)),
            role,
            monitor,
            seen: Mutex::new(Seen { layout, conditions }),
            library_problem: Mutex::new(library_problem),
            settings: Mutex::new(Settings::of(&vm)),
            extended: Mutex::new(Some(Instant::now())),
            library_state: Mutex::new(library),
            library_watch: Mutex::new(LibraryWatch {
                connected: Instant::now(),
                pause: INTERVAL,
            }),
            marks: Marks {
                arriving: Mutex::new(is_arriving.then(|| "being fetched".to_owned())),
                has_unseen_balloon: AtomicBool::new(is_incoming),
                ..Marks::default()
            },
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
            id: machine.id(),
            name: machine.role.name.clone(),
            domain: machine.role.domain.clone(),
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
        *machine.marks.agent.lock() = link.map(Arc::new);
        machine.renew();
        Ok(machine)
    }

    fn tell(&self, command: Command) {
        // Sending fails only if the engine has ended, which happens when the daemon ends.
        let _ = self.commands.send(command);
    }

    fn agent_event(&self, event: AgentEvent) {
        match event {
            AgentEvent::Session(facts) => {
                self.marks.had_agent.store(true, Ordering::Relaxed);
                info!(
                    vm = self.name(),
                    kernel = facts.kernel,
                    agent = facts.agent,
                    "guest agent connected"
                );
                // The firmware has run by now, so RAM is where the guest's kernel expects it.
                self.look_again();
                self.tell(Command::AgentSession(self.role.id));
            }
            AgentEvent::Message(FromAgent::Memory(reading)) => self.note_agent_memory(&reading),
            AgentEvent::Message(message) => self.tell(Command::Agent(self.role.id, message)),
            AgentEvent::Lost { reason } => {
                info!(vm = self.name(), reason, "guest agent disconnected");
                self.tell(Command::AgentGone(self.role.id));
            }
        }
    }

    /// Returns the layout of the VM's RAM.
    pub(crate) fn layout(&self) -> RamLayout {
        self.seen.lock().layout.clone()
    }

    /// Reads again the layout of the VM's RAM and whether the VM can be folded. Tells the fold
    /// engine about changes.
    pub fn look_again(&self) {
        let looked = self.vm.layout_and_conditions(&mut self.monitor.lock());
        let (layout, conditions) = match looked {
            Ok(looked) => looked,
            Err(error) => {
                // That QEMU does not answer is logged once, with the VM's state.
                debug!(
                    vm = self.name(),
                    error = &error as &dyn std::error::Error,
                    "QEMU does not report the VM's RAM layout"
                );
                return;
            }
        };
        let seen = Seen {
            layout: layout.clone(),
            conditions: conditions.clone(),
        };
        let before = std::mem::replace(&mut *self.seen.lock(), seen);
        if before.layout != layout {
            let advice = self.advice(&layout);
            self.tell(Command::Layout {
                id: self.role.id,
                layout,
                advice,
            });
        }
        if before.conditions.fold != conditions.fold {
            self.tell(Command::Problem(self.role.id, self.problem()));
        }
    }

    fn advice(&self, layout: &RamLayout) -> Vec<Advice> {
        let read = |block| {
            self.vm.advice(block).unwrap_or_else(|error| {
                warn!(vm = self.name(), %error, "cannot read madvise flags of a RAM block; shared (folded) memory may lack these flags until the daemon restarts");
                Advice::default()
            })
        };
        layout.blocks.iter().map(read).collect()
    }

    /// Returns the first reason why the VM is not folded, in one line; `None` if it can be folded.
    pub fn problem(&self) -> Option<String> {
        self.fold_problems().into_iter().next()
    }

    /// Returns whether memory that the guest frees, or that its balloon takes, stays in use on the
    /// host: its RAM is pinned for a device, locked, or in huge pages.
    pub fn keeps_freed_ram(&self) -> bool {
        self.seen.lock().conditions.keeps_freed_ram
    }

    fn fold_problems(&self) -> Vec<String> {
        let seen = self.seen.lock();
        let conditions = seen.conditions.fold.iter().map(ToString::to_string);
        let library = self.library_problem.lock().clone();
        let arriving = self.arriving();
        let arriving = arriving.map(|how| format!("the VM's snapshot is still {how}"));
        let switched_off = self.switched_off();
        let now = switched_off.into_iter().chain(library).chain(arriving);
        now.chain(conditions).collect()
    }

    /// Returns how far the fetching of the snapshot is from which the VM runs; `None` if nothing is
    /// missing.
    pub(crate) fn arriving(&self) -> Option<String> {
        self.marks.arriving.lock().clone()
    }

    /// Notes how far the fetching of the VM's snapshot is.
    pub(crate) fn note_stream(&self, how: Option<String>) {
        let mut arriving = self.marks.arriving.lock();
        if let (Some(now), Some(how)) = (arriving.as_mut(), how) {
            *now = how;
        }
    }

    /// Notes that nothing of the VM's snapshot is missing any more.
    pub(crate) fn arrived(&self) {
        if let Some(place) = self.vm.directory() {
            // If the file stays, the next daemon finds out the same.
            let _ = std::fs::remove_file(place.arriving());
        }
        *self.marks.arriving.lock() = None;
        self.tell(Command::Problem(self.role.id, self.problem()));
    }

    /// Removes the VM's files after the VM has ended.
    pub fn clean_up(&self) {
        // Dropping the link waits for its thread, so the lock is released before.
        let link = self.marks.agent.lock().take();
        drop(link);
        if let Some(directory) = self.vm.directory() {
            if let Err(error) = Vm::clear_if_stale(directory) {
                warn!(vm = self.name(), %error, "cannot remove the files of the ended VM; the daemon tries again at its next start");
            }
        }
    }

    pub const fn vm(&self) -> &Vm {
        &self.vm
    }

    /// Locks QEMU's monitor until the guard is dropped.
    pub fn monitor(&self) -> QmpGuard<'_> {
        self.monitor.lock()
    }

    /// Locks QEMU's monitor like [`Self::monitor`]. If others use it for longer than `limit`, all
    /// commands of the guard fail.
    pub fn monitor_within(&self, limit: Duration) -> QmpGuard<'_> {
        self.monitor.lock_within(limit)
    }

    /// Returns QEMU's monitor if nobody uses it at this moment.
    pub fn idle_monitor(&self) -> Option<QmpGuard<'_>> {
        self.monitor.try_lock()
    }

    pub fn domain(&self) -> Option<&str> {
        self.role.domain.as_deref()
    }

    /// Returns whether the fold library in QEMU can stop the VM for the daemon. The library resumes
    /// the VM if the daemon dies.
    pub fn can_stop(&self) -> bool {
        self.can_stop.load(Ordering::Relaxed)
    }

    pub const fn id(&self) -> VmId {
        self.role.id
    }

    pub fn name(&self) -> &str {
        &self.role.name
    }

    pub const fn pid(&self) -> Pid {
        self.vm.pid()
    }

    /// Returns the PID of the VM's QEMU process.
    pub fn raw_pid(&self) -> i32 {
        self.pid().as_raw_nonzero().get()
    }

    /// Returns whether QEMU's process has ended. After that, the table of VMs still lists the VM
    /// for a moment.
    pub fn has_exited(&self) -> bool {
        self.vm.process().has_exited().unwrap_or(false)
    }

    /// Returns the VM's domain name in libvirt; `None` if libvirt did not start it.
    pub fn libvirt(&self) -> Option<&str> {
        match &self.role.origin {
            Origin::Libvirt(domain) => Some(domain),
            Origin::Started | Origin::Attached(_) => None,
        }
    }

    /// Returns the VM's entry in `attached.json`, by which the next daemon attaches to it again.
    /// `None` for libvirt domains: the next daemon finds such domains itself, and their trust
    /// domain may have changed by then.
    pub fn attached(&self) -> Option<AttachedVm> {
        let Origin::Attached(qmp) = &self.role.origin else {
            return None;
        };
        let request = AttachRequest {
            qmp: qmp.clone(),
            name: self.role.name.clone(),
            domain: self.role.domain.clone(),
        };
        Some(AttachedVm {
            request,
            process: self.vm.process().identity(),
        })
    }

    pub fn segment_state(&self, name: &str) -> Option<SegmentState> {
        self.marks.segments.lock().get(name).cloned()
    }

    pub fn set_segment_state(&self, name: &str, state: SegmentState) {
        self.marks.segments.lock().insert(name.to_owned(), state);
    }

    pub fn set_boot_snapshot(&self, now: BootSnapshot) {
        *self.marks.boot_snapshot.lock() = Some(now);
    }

    /// Takes the right to use the serial console. Returns `false` if another client has it.
    pub fn take_console(&self) -> bool {
        !self.marks.console_in_use.swap(true, Ordering::AcqRel)
    }

    pub fn release_console(&self) {
        self.marks.console_in_use.store(false, Ordering::Release);
    }

    pub fn account(&self, stores: &[StoreIdentity]) -> Option<VmAccount> {
        let layout = self.layout();
        let pid = self.raw_pid();
        let segments: Vec<_> = self.segment_identities().into_iter().map(|s| s.1).collect();
        let domain = self.role.domain.as_deref();
        let mut account = memfold_ledger::take::vm(pid, &self.role.name, domain, &layout, stores, &segments)
            .inspect_err(|error| warn!(vm = self.name(), %error, "cannot read the VM's page tables, so the memory report omits the VM; no action is needed if the VM is ending"))
            .ok()?;
        account.guest = self.guest_memory().map(|(_, memory)| memory);
        Some(account)
    }

    /// Returns name and image file of each segment that the VM maps.
    pub fn segment_identities(&self) -> Vec<(String, StoreIdentity)> {
        let identity = |segment: SegmentSpec| {
            let file = std::fs::File::open(segment.image.as_ref()?).ok()?;
            Some((segment.name, StoreIdentity::of(file).ok()?))
        };
        let segments = self.vm.segments().into_iter();
        segments.filter_map(identity).collect()
    }

    /// Returns the connection to the guest's agent; `None` if there is no connection. The
    /// connection is shared, so that a long command does not block other callers.
    pub fn agent(&self) -> Option<Arc<AgentLink>> {
        self.marks.agent.lock().clone()
    }

    fn agent_or_error(&self) -> Result<Arc<AgentLink>, AgentError> {
        self.agent()
            .ok_or_else(|| AgentError::NoSession("the VM has no port for the agent".into()))
    }

    pub fn run(
        &self,
        task: impl Into<GuestTask>,
        timeout: Duration,
    ) -> Result<CommandResult, AgentError> {
        self.agent_or_error()?.run(task, timeout)
    }

    pub fn stream(
        &self,
        request: StreamRequest,
        sink: impl Fn(StreamEvent) + Send + 'static,
    ) -> Result<StreamedCommand, AgentError> {
        self.agent_or_error()?.stream(request, sink)
    }

    /// Runs an order in the guest that prints a line or two. An order that prints more than 4096
    /// bytes ([`SHORT`]) is killed.
    pub fn run_short(
        &self,
        order: GuestOrder,
        timeout: Duration,
    ) -> Result<CommandResult, AgentError> {
        let mut result = CommandResult::default();
        result.code = self
            .agent_or_error()?
            .run_streaming(order, timeout, |_, bytes| {
                result.stdout.extend_from_slice(bytes);
                result.stdout.len() <= SHORT
            })?;
        Ok(result)
    }

    /// Locks the VM for a save or for a change of its memory mappings. Waits without a time limit.
    pub fn save_right(&self) -> SaveRight<'_> {
        SaveRight::take(|| self.marks.saving.lock())
    }

    /// Locks the VM for a save or for a change of its memory mappings, for a user's request. Waits
    /// for 30 s at most.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`] after [`RIGHT_TIMEOUT`]: the holder may wait for a guest that does
    /// not answer.
    pub fn save_right_soon(&self) -> Result<SaveRight<'_>, DaemonError> {
        let right = SaveRight::try_take(|| self.marks.saving.try_lock_for(RIGHT_TIMEOUT));
        let vm = self.name();
        let busy = || {
            refused(
                format!("VM '{vm}' is being saved, or its segments are being changed"),
                "try again when the save or change is complete",
            )
        };
        right.ok_or_else(busy)
    }

    /// Locks the VM's swap disk for changes. The right to save the VM is a separate lock: a lender
    /// that needs its memory back does not wait for an hour-long copy of files from the guest. (A
    /// VM with a swap disk is not saved, so the two do not conflict.)
    pub fn swap_right(&self) -> SwapRight<'_> {
        SwapRight::take(|| self.marks.swapping.lock())
    }

    /// Locks the VM's swap disk for changes if no other thread has locked it; `None` if one has.
    pub(crate) fn try_swap_right(&self) -> Option<SwapRight<'_>> {
        SwapRight::try_take(|| self.marks.swapping.try_lock())
    }

    /// Locks the VM for a save that a user has asked for. Waits for whatever else holds the lock
    /// for a moment, such as the record of the pages that a restored VM needs first.
    ///
    /// # Errors
    ///
    /// [`DaemonError::Refused`]: at once if the VM is being saved, and after [`SAVE_TIMEOUT`]
    /// otherwise.
    pub(crate) fn save_right_unless_saved(&self) -> Result<SaveRight<'_>, DaemonError> {
        let end = Instant::now() + SAVE_TIMEOUT;
        let is_saved = || self.marks.being_saved.load(Ordering::Relaxed);
        let right = SaveRight::take_unless(
            || self.marks.saving.try_lock_for(SAVE_POLL),
            || is_saved() || Instant::now() >= end,
        );
        right.ok_or_else(|| save_refusal(self.name(), is_saved()))
    }

    /// Locks the VM for a save if no other thread holds this lock.
    pub fn try_save(&self) -> Option<SaveRight<'_>> {
        SaveRight::try_take(|| self.marks.saving.try_lock())
    }

    /// Reserves a number for the swap disk's next block nodes: `free`, or the smallest greater
    /// number that was not used. Returns the number.
    pub fn use_generation(&self, free: u64) -> u64 {
        let mut least = self.marks.swap_generation.lock();
        let number = free.max(*least);
        *least = number + 1;
        number
    }

    /// Records that the swap disk is about to return to the local disk. `lost_a_copy`: whether it
    /// returns because one of its copies was lost.
    pub fn comes_home(&self, lost_a_copy: bool) {
        self.marks.lost_a_copy.store(lost_a_copy, Ordering::Release);
    }

    /// Returns whether the swap disk returned to the local disk because a copy was lost, as far as
    /// this daemon knows.
    pub fn has_lost_a_copy(&self) -> bool {
        self.marks.lost_a_copy.load(Ordering::Acquire)
    }

    /// Returns begin and end (exclusive) of each block of the VM's RAM, as addresses in QEMU.
    pub fn ram_ranges(&self) -> Vec<(u64, u64)> {
        let range = |block: &RamBlock| (block.hva.0, block.hva.add_pages(block.pages).0);
        self.seen.lock().layout.blocks.iter().map(range).collect()
    }

    pub fn take_inventory(&self) -> Result<(), AgentError> {
        self.agent_or_error()?.take_inventory()
    }

    /// Waits for the agent if it may not have connected yet, because the daemon or the VM has just
    /// started: until 5 s after that start.
    pub fn wait_first_session(&self) {
        if let Some(agent) = self.agent() {
            agent.wait_first_session();
        }
    }

    pub fn wait_agent(&self, timeout: Duration) -> Result<(), AgentError> {
        self.agent_or_error()?.wait_session(timeout).map(drop)
    }
}

/// Longest time that a request waits for the right to save a VM.
const RIGHT_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest time that a user's save waits for another holder of the right to save the VM, and how
/// often it looks whether that holder is a save.
const SAVE_TIMEOUT: Duration = Duration::from_secs(5);
const SAVE_POLL: Duration = Duration::from_millis(50);

/// Largest output of a short command, in bytes.
const SHORT: usize = 4096;

/// Returns a command's output as text, without white space at its ends.
pub(crate) fn text(output: &[u8]) -> String {
    String::from_utf8_lossy(output).trim().to_owned()
}

/// Returns whether the agent's connection was lost, so that a caller may try again.
pub(crate) const fn is_disconnected(error: &AgentError) -> bool {
    matches!(
        error,
        AgentError::NoSession(_) | AgentError::Lost | AgentError::Write(_)
    )
}

/// Makes the error of a save that another user of the VM's memory prevents. `is_saved`: whether
/// that is another save.
fn save_refusal(vm: &str, is_saved: bool) -> DaemonError {
    if is_saved {
        return refused(
            format!("a snapshot of VM '{vm}' is being made"),
            "wait until it is complete",
        );
    }
    refused(
        format!("the daemon is changing memory of VM '{vm}' or waits for its guest to free some"),
        "try again in some seconds",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_save_during_another_one_is_refused_in_the_present_state_and_is_no_bad_request() {
        for (is_saved, word) in [(true, "is being made"), (false, "is changing memory")] {
            match save_refusal("web", is_saved) {
                DaemonError::Refused { why, fix } => {
                    assert!(why.contains("'web'") && why.contains(word), "{why}");
                    assert!(!fix.is_empty());
                }
                error => panic!("{error}"),
            }
        }
    }
}
