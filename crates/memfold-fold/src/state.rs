//! The engine's tables: VMs, domains, budgets.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt};
use memfold_sys::pagemap::Pagemap;
use memfold_units::Hva;
use memfold_wire::agent::FileNumber;
use memfold_wire::library::Advice;

use super::budget::TokenBucket;
use super::domain::Domain;
use super::fold_back_pass::BackPass;
use super::guest::{Guest, Refold, VmId};
use super::hint_stack::{Hint, HintStack};
use super::huge::HugePages;
use super::settings::EngineSettings;
use super::stats::{EngineStats, Latencies, VmStats};
use super::task::Task;
use super::vm_table::{Index, VmTable};
use super::zero_pass::ZeroPass;

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
    /// How folded ranges may be folded again, as of this batch.
    pub refold: Refold,
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
    pub zero: ZeroPass,
    pub back: BackPass,
    pub mappings: usize,
    /// While a snapshot is made of it.
    pub held: Option<Held>,
    pub stats: VmStats,
}

impl VmState {
    /// Puts every page of a file that the VM caches on the stack.
    pub fn offer_file(&mut self, file: FileNumber, at: Instant) {
        for piece in self.table.pieces(file).collect::<Vec<_>>() {
            self.stack.push(Hint::of_piece(file, piece, at));
        }
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

    pub(super) fn set_budget(&mut self, cpu_share: f64, pages_per_second: Option<u64>) {
        let now = Instant::now();
        self.settings.cpu_share = cpu_share;
        self.settings.pages_per_second = pages_per_second;
        // Twenty seconds of unused budget may be spent at once: right after a boot there is much to
        // fold.
        self.cpu = TokenBucket::new(cpu_share * 1e9, cpu_share * 20e9, now);
        self.rate = pages_per_second.map(|n| TokenBucket::new(n as f64, n as f64, now));
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("vms", &self.vms.len())
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// The guest page that caches a file page, unless it is being written or was found to differ.
pub(super) fn usable(vm: &VmState, file: u32, page: u32) -> Option<Index> {
    vm.table
        .place(file, page)
        .filter(|&at| !vm.table.is_dirty(at) && !vm.table.is_refused(at))
}
