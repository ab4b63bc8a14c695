//! State of the fold engine: what it knows about each VM and each trust domain, and how much CPU
//! time it may still use.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Instant;

use foldhash::{HashMap, HashMapExt};
use memfold_sys::pagemap::Pagemap;
use memfold_units::Hva;
use memfold_wire::agent::{FileFacts, FileNumber};
use memfold_wire::library::Advice;

use super::budget::TokenBucket;
use super::domain::Domain;
use super::fold_back_pass::BackPass;
use super::guest::{Guest, Refold, VmId};
use super::hint_stack::{Hint, HintStack};
use super::huge::HugePages;
use super::member::Member;
use super::schedule::Schedule;
use super::settings::EngineSettings;
use super::stats::{EngineStats, Latencies, VmStats};
use super::task::Task;
use super::vm_map::VmMap;
use super::vm_table::{Index, VmTable};
use super::zero_pass::ZeroPass;

/// Share of the CPU budget that syncs with the kernel's page tables may use.
const SYNC_SHARE: f64 = 0.1;

/// State of a file of a VM that the engine does not fold for a while, because its bytes kept
/// differing from the page store's.
#[derive(Debug)]
pub(super) struct Skip {
    /// Number of times that the engine has skipped the file since pages of it were last folded.
    pub times: u32,
    /// Time until which the engine does not fold the file.
    pub until: Instant,
}

/// State of a VM that the engine does not fold while a snapshot of the VM is made.
pub(super) struct Held {
    /// Reason why the VM must not be folded after the snapshot either; `None` if it may be.
    pub after: Option<String>,
}

#[allow(clippy::struct_excessive_bools)] // the facts are independent
pub(super) struct VmState {
    pub domain: String,
    pub guest: Box<dyn Guest>,
    /// Way in which pages that map a file already may be frozen in this batch, to fold them again;
    /// `None` until a page of the batch needs it.
    pub refold: Option<Refold>,
    pub table: VmTable,
    pub huge: HugePages,
    /// Page map (`/proc/PID/pagemap`) of the VM's QEMU; `None` if it cannot be read.
    pub pagemap: Option<Pagemap>,
    /// Number of folded pages that QEMU has discarded, counted by memfold's library in QEMU.
    pub discarded: u64,
    /// Whether the VM's table may contain mappings of the page store that no longer exist.
    pub maps_stale: bool,
    /// Whether the connection to memfold's library in QEMU failed and no new one exists. The
    /// library may still execute the last order, and map pages of the store.
    pub is_lost: bool,
    pub last_full_sync: Instant,
    pub stack: HintStack,
    /// Files that were skipped since pages of them were last folded.
    pub skips: HashMap<FileNumber, Skip>,
    /// Total length of the paths of the VM's files, in bytes.
    pub path_bytes: usize,
    /// Files whose path or size changes, or whose first path comes, as soon as `moves` allows.
    pub late_files: BTreeMap<FileNumber, FileFacts>,
    /// Rate limit of the work for files that get another path or size.
    pub moves: TokenBucket,
    /// Rate limit of the pages that the VM's agent may report.
    pub allowance: TokenBucket,
    /// Whether memfold's library in QEMU knows the VM's RAM and page store.
    pub introduced: bool,
    /// `madvise` advice that QEMU gave each RAM block.
    pub advice: Vec<Advice>,
    /// Host virtual addresses of RAM blocks that were removed, and about which memfold's library in
    /// QEMU was not told yet.
    pub gone_blocks: Vec<Hva>,
    pub active: bool,
    pub last_sync: Instant,
    /// Earliest time of the next stop of the VM.
    pub next_pause: Instant,
    pub wait_for_pause: Vec<Hint>,
    pub zero: ZeroPass,
    pub back: BackPass,
    pub mappings: usize,
    /// `Some` while a snapshot of the VM is made.
    pub held: Option<Held>,
    pub stats: VmStats,
}

impl VmState {
    /// Returns whether the VM may be folded: no problem is recorded for it.
    pub fn is_foldable(&self) -> bool {
        self.stats.problem.is_none()
    }

    /// Returns how pages that map a file already may be frozen in this batch. Only the first call
    /// of a batch asks the guest, so VMs without such pages are not asked.
    pub fn refold_now(&mut self) -> Refold {
        *self.refold.get_or_insert_with(|| self.guest.refold())
    }

    /// Returns whether pages of a file must not be folded at time `now`.
    pub fn is_skipped(&self, file: FileNumber, now: Instant) -> bool {
        self.skips.get(&file).is_some_and(|skip| now < skip.until)
    }

    /// Puts every cached page of a file on the stack of hints, as if the agent had hinted it at
    /// time `at`.
    pub fn offer_file(&mut self, file: FileNumber, at: Instant) {
        for piece in self.table.pieces(file) {
            self.stack.push(Hint::of_piece(file, piece, at));
        }
    }
}

/// The fold engine: finds file pages that several VMs cache, and folds them. The engine runs on a
/// thread of its own ([`Engine::run`]).
pub struct Engine {
    pub(super) settings: EngineSettings,
    pub(super) vms: VmMap<VmState>,
    /// When which VM is due for which work.
    pub(super) schedule: Schedule,
    pub(super) domains: HashMap<String, Domain>,
    pub(super) stats: EngineStats,
    pub(super) latencies: Latencies,
    pub(super) library_cpu_ns: u64,
    pub(super) cpu: TokenBucket,
    /// CPU time in nanoseconds that syncs with the kernel's page tables, and the search for
    /// unneeded store pages, may use: a tenth of the budget, which all VMs share.
    pub(super) sync_cpu: TokenBucket,
    pub(super) rate: Option<TokenBucket>,
    pub(super) paused: bool,
    /// Reason why no more pages may be shared; `None` if sharing is allowed.
    pub(super) braked: Option<String>,
    /// Time at which folding last resumed after a pause or a stop of sharing.
    pub(super) resumed: Instant,
    pub(super) sweep_wanted: bool,
    pub(super) last_sweep: Instant,
    /// Tasks that a sweep has found, and that no batch has taken yet.
    pub(super) swept: VecDeque<Task>,
    /// Maximum number of hints that wait for each VM.
    pub(super) stack_limit: usize,
    pub(super) last_turn: VmId,
    /// Whether the last turn has processed hints.
    pub(super) has_folded: bool,
    /// Earliest time of the next small batch of hints.
    pub(super) next_small_batch: Instant,
    pub(super) charged_ns: u64,
    pub(super) reports_ns: u64,
}

impl Engine {
    /// Creates a fold engine without VMs.
    #[must_use]
    pub fn new(settings: EngineSettings) -> Self {
        let now = Instant::now();
        let mut engine = Self {
            vms: VmMap::default(),
            schedule: Schedule::default(),
            domains: HashMap::new(),
            stats: EngineStats::default(),
            latencies: Latencies::default(),
            library_cpu_ns: 0,
            cpu: TokenBucket::new(0.0, 0.0, now),
            sync_cpu: TokenBucket::new(0.0, 0.0, now),
            rate: None,
            paused: false,
            braked: None,
            resumed: now,
            sweep_wanted: false,
            last_sweep: now,
            swept: VecDeque::new(),
            stack_limit: settings.stack_limit,
            last_turn: 0,
            has_folded: false,
            next_small_batch: now,
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
        // The unused budget of up to twenty seconds may be spent at once, because much can be
        // folded right after a boot.
        self.cpu = TokenBucket::new(cpu_share * 1e9, cpu_share * 20e9, now);
        let of_syncs = (cpu_share * SYNC_SHARE).max(1e-4);
        self.sync_cpu = TokenBucket::new(of_syncs * 1e9, of_syncs * 20e9, now);
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

/// Returns a VM that can be folded.
pub(super) fn foldable(vms: &mut VmMap<VmState>, id: VmId) -> Option<&mut VmState> {
    vms.get_mut(&id).filter(|vm| vm.is_foldable())
}

/// Returns a VM and its trust domain.
pub(super) fn with_domain<'a>(
    vms: &'a mut VmMap<VmState>,
    domains: &'a mut HashMap<String, Domain>,
    id: VmId,
) -> Option<(&'a mut VmState, &'a mut Domain)> {
    let vm = vms.get_mut(&id)?;
    let domain = domains.get_mut(&vm.domain)?;
    Some((vm, domain))
}

/// Returns the ranges of pages of a VM's file that the VM caches.
pub(super) fn cached_ranges(vms: &VmMap<VmState>, member: Member) -> Vec<Range<u32>> {
    let vm = vms.get(&member.vm);
    vm.map_or_else(Vec::new, |vm| vm.table.cached_ranges(member.file))
}

/// Returns the guest page that caches a file page, unless the page is dirty or was found to differ.
pub(super) fn usable(vm: &VmState, file: u32, page: u32) -> Option<Index> {
    vm.table
        .place(file, page)
        .filter(|&at| !vm.table.is_dirty(at) && !vm.table.is_refused(at))
}
