//! The engine: its state, its messages, its loop.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt};
use memfold_store::{Source, Store, StoreError};
use memfold_sys::pagemap::Pagemap;
use memfold_units::{ByteSize, Hva, StorePage};
use memfold_vm::RamLayout;
use memfold_wire::agent::{FileNumber, FromAgent};
use memfold_wire::library::{Advice, Order, Range};
use tracing::warn;

use super::alias::Candidates;
use super::budget::TokenBucket;
use super::content::Contents;
use super::debt::Owed;
use super::huge::HugePages;
use super::stack::{Hint, HintStack};
use super::stats::{EngineStats, Latencies, VmStats};
use super::table::VmTable;
use super::uses::{CachedFiles, FileUse};
use super::work::Task;
use super::{Guest, VmId};

/// What an operator may set.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSettings {
    /// Share of one core that folding may use over time, 0 to 1.
    pub cpu_share: f64,
    /// Most pages looked at in a second; `None` for no limit.
    pub pages_per_second: Option<u64>,
    /// How long a hint waits for its page to be read from disk.
    pub settle: Duration,
    /// Bytes that each domain's page store may hold.
    pub store_cap: ByteSize,
    /// Hints that wait for one VM at most.
    pub stack_limit: usize,
    /// Shortest time between two pauses of a VM with direct I/O.
    pub pause_interval: Duration,
    /// Longest time that such a pause may last by plan.
    pub pause_length: Duration,
    /// Time between two looks at the kernel's tables while something happens.
    pub sync_interval: Duration,
    /// `vm.max_map_count`.
    pub max_mappings: usize,
    /// Whether pages of zeroes are given back to the host.
    pub drop_zero: bool,
    /// Shortest time between two passes that look for pages that are again as in the snapshot that their VM runs from.
    pub fold_back_interval: Duration,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            cpu_share: 0.05,
            pages_per_second: None,
            settle: Duration::from_secs(1),
            store_cap: ByteSize::mib(16 << 10),
            stack_limit: 16_384,
            pause_interval: Duration::from_secs(1),
            pause_length: Duration::from_millis(5),
            sync_interval: Duration::from_secs(3),
            max_mappings: 65_530,
            drop_zero: true,
            fold_back_interval: Duration::from_secs(60),
        }
    }
}

/// What the engine is told and asked.
pub enum Command {
    /// A VM to fold.
    Add {
        /// Its number.
        id: VmId,
        /// Its name.
        name: String,
        /// Its trust domain; `None` shares with nobody.
        domain: Option<String>,
        /// Its RAM.
        layout: RamLayout,
        /// Advice of each RAM block, in the order of `layout.blocks`.
        advice: Vec<Advice>,
        /// The VM itself.
        guest: Box<dyn Guest>,
        /// Why it must not be folded, if so; it is still listed.
        problem: Option<String>,
    },
    /// The VM's RAM is laid out otherwise now: its firmware has run, or memory was plugged.
    Layout {
        /// Its number.
        id: VmId,
        /// Its RAM.
        layout: RamLayout,
        /// Advice of each RAM block, in the order of `layout.blocks`.
        advice: Vec<Advice>,
    },
    /// The VM is gone.
    Remove(VmId),
    /// Conditions have changed: why the VM must not be folded now, if so.
    Problem(VmId, Option<String>),
    /// A new connection to the library of a VM whose old one failed.
    Reached {
        /// Its number.
        id: VmId,
        /// The VM by the new connection.
        guest: Box<dyn Guest>,
        /// Why it must not be folded, if so.
        problem: Option<String>,
    },
    /// The agent of a VM begins a session: its file numbers and hints start anew.
    AgentSession(VmId),
    /// The agent of a VM says something.
    Agent(VmId, FromAgent),
    /// The agent's connection ended.
    AgentGone(VmId),
    /// Have a VM's writes tracked before it is stopped for a snapshot; it is not folded until [`Command::Release`].
    Track(VmId, SyncSender<Result<(), String>>),
    /// Keep what ranges of a stopped VM's memory hold, in this file ([`Order::KeepPast`]).
    KeepPast(VmId, Vec<Range>, OwnedFd, SyncSender<Result<(), String>>),
    /// Track a held VM's writes no more.
    Untrack(VmId, SyncSender<Result<(), String>>),
    /// Let a VM go on that was stopped, still held for the rest of its snapshot.
    GoOn(VmId, SyncSender<Result<(), String>>),
    /// Do nothing with a VM, which others stop for a snapshot, until [`Command::Release`].
    LeaveAlone(VmId, SyncSender<Result<(), String>>),
    /// Stop a VM for a snapshot; nothing else is done with it until [`Command::Release`]. It also goes on when this daemon dies.
    Hold(VmId, SyncSender<Result<(), String>>),
    /// The snapshot needs the VM no longer.
    Release(VmId),
    /// Stop or go on folding; what is folded stays.
    SetPaused(bool),
    /// Why nothing more may be shared from now on; `None`: it may again. What is folded stays.
    SetBraked(Option<String>),
    /// How much guests could call in, as of the last looks at the kernel's tables.
    Owed {
        /// Look at them first.
        look: bool,
        /// And give back store pages that no VM needs any more.
        give_back: bool,
        /// For the answer.
        answer: SyncSender<Owed>,
    },
    /// New budgets.
    SetBudget {
        /// Share of one core.
        cpu_share: f64,
        /// Pages per second.
        pages_per_second: Option<u64>,
    },
    /// Answer at once with the CPU time of [`Command::Stats`] so far, in nanoseconds; also for who wants to know that commands are carried out.
    ReportsCpu(SyncSender<u64>),
    /// Look at the kernel's tables and answer with figures.
    Stats(SyncSender<EngineStats>),
    /// Which files VMs cache.
    FileUses(SyncSender<Vec<FileUse>>),
    /// Where they lie in their memory.
    CachedFiles(SyncSender<CachedFiles>),
    /// End the thread.
    Stop,
}

/// What is remembered of a VM's file.
#[derive(Debug, Default)]
pub(super) struct FileState {
    /// Whether its path is another than its content's.
    pub alias: bool,
    /// Pages that were equal.
    pub equal: u32,
    /// Pages that differed.
    pub differing: u32,
    /// How often it was given up.
    pub given_up: u32,
    /// Not to be tried before.
    pub skip_until: Option<Instant>,
}

/// A VM that is held for a snapshot.
pub(super) struct Held {
    /// The problem that it has afterwards.
    pub after: Option<String>,
}

#[allow(clippy::struct_excessive_bools)] // independent facts, each asked by name
pub(super) struct VmState {
    pub domain: String,
    pub guest: Box<dyn Guest>,
    /// Whether folded ranges may be folded again while the VM runs, as of this batch.
    pub live: bool,
    pub table: VmTable,
    pub huge: HugePages,
    /// Its process's page tables; `None` if they can't be read.
    pub pagemap: Option<Pagemap>,
    /// Pages that QEMU has discarded, as the library counts.
    pub discarded: u64,
    /// Whether our table of mappings may name too much.
    pub maps_stale: bool,
    pub last_full_sync: Instant,
    /// Shortest time between two looks at the kernel's tables, from what the last one cost.
    pub sync_cost: Duration,
    pub stack: HintStack,
    pub files: HashMap<FileNumber, FileState>,
    /// Bytes of paths that the agent has told in this session.
    pub path_bytes: usize,
    /// Pages that the agent may speak of.
    pub allowance: TokenBucket,
    /// Whether the library knows RAM and store.
    pub introduced: bool,
    /// Advice of the RAM blocks.
    pub advice: Vec<Advice>,
    /// Blocks that are gone and of which the library was not told yet.
    pub gone_blocks: Vec<Hva>,
    pub active: bool,
    pub last_sync: Instant,
    pub last_pause: Instant,
    pub wait_for_pause: Vec<Hint>,
    pub zero: super::zero::ZeroPass,
    pub back: super::back::BackPass,
    pub mappings: usize,
    /// While a snapshot is made of it.
    pub held: Option<Held>,
    pub stats: VmStats,
}

pub(super) struct Domain {
    pub store: Store,
    pub contents: Contents,
    pub candidates: Candidates,
    pub full: bool,
    /// Processes that mapped the store when it was taken over from a former daemon. Nothing is punched while one of them
    /// lives that this engine doesn't know.
    pub guardians: Vec<rustix::process::Pid>,
    pub appended: u64,
    pub punched: u64,
    pub last_reclaim: Instant,
    /// Pages reserved in the store from the first on, to be filled before anything is folded.
    pub reserved: Option<(StorePage, Vec<Source>)>,
    /// When its holes may be searched again for room.
    pub next_search: Option<Instant>,
}

impl Domain {
    /// Number that fold orders name the store by: the same for every daemon that uses the file.
    pub fn store_number(&self) -> u32 {
        // Stores in a tmpfs of their own all have the same inode number and differ in the device; memfds the other way round.
        let identity = self.store.identity();
        let minor = rustix::fs::minor(identity.dev);
        #[allow(clippy::cast_possible_truncation)]
        // Numbers are small; should two meet, the library refuses the other file.
        let inode = identity.ino as u32;
        inode ^ minor.rotate_right(12)
    }
}

/// Owns every table of folding. Runs on its own thread by [`Engine::run`].
pub struct Engine {
    pub(super) settings: EngineSettings,
    pub(super) vms: BTreeMap<VmId, VmState>,
    pub(super) domains: HashMap<String, Domain>,
    pub(super) stats: EngineStats,
    pub(super) latencies: Latencies,
    pub(super) library_cpu_ns: u64,
    pub(super) cpu: TokenBucket,
    pub(super) rate: Option<TokenBucket>,
    pub(super) paused: bool,
    /// Why nothing more may be shared, while that is so.
    pub(super) braked: Option<String>,
    /// When folding went on after the last pause by the operator.
    pub(super) resumed: Instant,
    pub(super) sweep_wanted: bool,
    pub(super) last_sweep: Instant,
    /// What a sweep has found and no batch has taken yet.
    pub(super) swept: VecDeque<Task>,
    pub(super) last_turn: VmId,
    /// When hints were last worked on.
    pub(super) last_batch: Instant,
    pub(super) charged_ns: u64,
    pub(super) reports_ns: u64,
}

impl Engine {
    /// An engine without VMs.
    #[must_use]
    pub fn new(settings: EngineSettings) -> Self {
        let now = Instant::now();
        let mut engine = Self {
            vms: BTreeMap::new(),
            domains: HashMap::new(),
            stats: EngineStats::default(),
            latencies: Latencies::default(),
            library_cpu_ns: 0,
            cpu: TokenBucket::new(0.0, 0.0, now),
            rate: None,
            paused: false,
            braked: None,
            resumed: now,
            sweep_wanted: false,
            last_sweep: now,
            swept: VecDeque::new(),
            last_turn: 0,
            last_batch: now,
            charged_ns: 0,
            reports_ns: 0,
            settings,
        };
        engine.set_budget(engine.settings.cpu_share, engine.settings.pages_per_second);
        engine
    }

    fn set_budget(&mut self, cpu_share: f64, pages_per_second: Option<u64>) {
        let now = Instant::now();
        self.settings.cpu_share = cpu_share;
        self.settings.pages_per_second = pages_per_second;
        // Twenty seconds of unused budget may be spent at once: right after a boot there is much to fold.
        self.cpu = TokenBucket::new(cpu_share * 1e9, cpu_share * 20e9, now);
        self.rate = pages_per_second.map(|n| TokenBucket::new(n as f64, n as f64, now));
    }

    /// Serves commands until [`Command::Stop`] or until every sender is gone. Waits without a timeout when nothing is to
    /// be done.
    pub fn run(mut self, commands: &Receiver<Command>) {
        loop {
            let now = Instant::now();
            let first = match self.next_due(now) {
                Some(due) => match commands.recv_timeout(due.saturating_duration_since(now)) {
                    Ok(command) => Some(command),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return,
                },
                None => match commands.recv() {
                    Ok(command) => Some(command),
                    Err(_) => return,
                },
            };
            // Take what else has come before the next batch, but not for ever: a flood must not starve the work.
            for command in first.into_iter().chain(commands.try_iter().take(64)) {
                if matches!(command, Command::Stop) {
                    return;
                }
                self.handle(command);
            }
            let now = Instant::now();
            if self.next_due(now).is_some_and(|due| due <= now) {
                self.turn(now);
            }
            self.charge(Instant::now());
        }
    }

    /// Takes the CPU used since the last call from the budget.
    fn charge(&mut self, now: Instant) {
        let used = thread_cpu_ns() + self.library_cpu_ns;
        self.cpu
            .spend((used - self.charged_ns.min(used)) as f64, now);
        self.charged_ns = used;
    }

    /// When there will be something to do.
    fn next_due(&mut self, now: Instant) -> Option<Instant> {
        if self.paused {
            return None;
        }
        if self.braked.is_some() {
            return self.look_again_due(now);
        }
        let settings = &self.settings;
        let work = self
            .vms
            .values()
            .filter(|vm| vm.stats.problem.is_none())
            .flat_map(|vm| {
                let sync = vm.look_due(settings.sync_interval);
                let pause = (!vm.wait_for_pause.is_empty())
                    .then(|| vm.last_pause + settings.pause_interval);
                let back = vm.back_due();
                [self.hints_due(vm, now), sync, pause, vm.zero.due(), back]
            })
            .flatten();
        let aliases = self.domains.values().filter_map(|d| d.candidates.due());
        let sweep = self
            .sweep_wanted
            .then(|| self.last_sweep + super::work::SWEEP_INTERVAL);
        let swept = (!self.swept.is_empty()).then_some(now);
        let due = work.chain(aliases).chain(sweep).chain(swept).min()?;
        let budget = [
            self.cpu.wait(now),
            self.rate.as_mut().and_then(|r| r.wait(now)),
        ]
        .into_iter()
        .flatten()
        .max();
        Some(due.max(now + budget.unwrap_or_default()))
    }

    /// When hints of a VM are to be worked on: gathered for a while, unless they are enough for a batch.
    pub(super) fn hints_due(&self, vm: &VmState, now: Instant) -> Option<Instant> {
        let due = vm.stack.due(now)?;
        let enough = vm.stack.pages() >= u64::from(super::work::BATCH_PAGES);
        Some(if enough {
            due
        } else {
            due.max(self.last_batch + super::work::GATHER)
        })
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Add {
                id,
                name,
                domain,
                layout,
                advice,
                guest,
                problem,
            } => {
                self.add(id, name, domain, layout, &advice, guest, problem);
            }
            Command::Remove(id) => self.remove(id),
            Command::Problem(id, problem) => self.set_problem(id, problem),
            Command::Layout { id, layout, advice } => self.set_layout(id, &layout, advice),
            Command::Reached { id, guest, problem } => {
                if let Some(vm) = self.vms.get_mut(&id) {
                    vm.guest = guest;
                    // What the last orders have done is not known.
                    vm.introduced = false;
                    self.set_problem(id, problem);
                }
            }
            Command::AgentSession(id) => self.agent_session(id),
            Command::Agent(id, message) => self.agent(id, message),
            Command::AgentGone(id) => {
                if let Some(vm) = self.vms.get_mut(&id) {
                    vm.stats.agent_ready = false;
                }
            }
            Command::Track(id, answer) => {
                let held = self.hold(id, &Order::TrackWrites, None);
                self.tell_held(id, &answer, held);
            }
            Command::KeepPast(id, ranges, file, answer) => {
                let held = self.hold(id, &Order::KeepPast { ranges }, Some(file.as_fd()));
                self.tell_held(id, &answer, held);
            }
            Command::Untrack(id, answer) => {
                let held = self.hold(id, &Order::UntrackWrites, None);
                self.tell_held(id, &answer, held);
            }
            Command::GoOn(id, answer) => {
                let held = self.hold(id, &Order::Continue, None);
                self.tell_held(id, &answer, held);
            }
            Command::LeaveAlone(id, answer) => {
                let held = self.leave_alone(id);
                self.tell_held(id, &answer, held);
            }
            Command::Hold(id, answer) => {
                let held = self.hold(id, &Order::Stop, None);
                self.tell_held(id, &answer, held);
            }
            Command::Release(id) => self.release(id),
            Command::SetPaused(paused) => {
                if self.paused && !paused {
                    self.resumed = Instant::now();
                }
                self.paused = paused;
                self.sweep_wanted = true;
            }
            Command::SetBraked(why) => self.set_braked(why),
            Command::Owed {
                look,
                give_back,
                answer,
            } => self.tell_owed(look, give_back, &answer),
            Command::SetBudget {
                cpu_share,
                pages_per_second,
            } => self.set_budget(cpu_share, pages_per_second),
            Command::ReportsCpu(answer) => {
                let _ = answer.send(self.reports_ns);
            }
            Command::FileUses(answer) => {
                // Who asked may have gone away.
                let _ = answer.send(self.file_uses());
            }
            Command::CachedFiles(answer) => {
                let _ = answer.send(self.cached_files());
            }
            Command::Stats(answer) => {
                // The asker may have gone away meanwhile.
                let _ = answer.send(self.stats());
                self.charged_ns = thread_cpu_ns() + self.library_cpu_ns;
            }
            Command::Stop => {}
        }
    }

    fn stats(&mut self) -> EngineStats {
        let began_ns = thread_cpu_ns();
        // The engine's own looks at the kernel's tables go on at their own times.
        self.sync_all();
        let mut report = self.report();
        // Reporting is not folding: who watches often must not slow it down, nor see its own cost as folding's.
        report.engine_cpu_s = began_ns.saturating_sub(self.reports_ns) as f64 / 1e9;
        self.reports_ns += thread_cpu_ns() - began_ns;
        report.report_cpu_s = self.reports_ns as f64 / 1e9;
        report
    }
}

/// CPU time of the calling thread in nanoseconds.
#[must_use]
pub fn thread_cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000
        + u64::try_from(time.tv_nsec).unwrap_or(0)
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("vms", &self.vms.len())
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// Logs a store failure once a state change, not once a page.
pub(super) fn note_store_error(domain_name: &str, domain: &mut Domain, error: &StoreError) {
    if !domain.full {
        warn!(domain = domain_name, error = %error, "new content stays out of the page store");
        domain.full = true;
    }
}
