//! What the engine is told and asked.

use std::os::fd::OwnedFd;
use std::sync::mpsc::SyncSender;

use memfold_vm::RamLayout;
use memfold_wire::agent::{FileNumber, FromAgent};
use memfold_wire::library::{Advice, Range};

use super::cached_files::{CachedFiles, FileUse};
use super::cached_pages::CachedPages;
use super::guest::{Guest, VmId};
use super::owed::Owed;
use super::stats::EngineStats;

/// What the engine is told and asked.
pub enum Command {
    /// A VM to fold.
    Add {
        /// Number that its hints and commands name it by, for as long as this engine runs.
        id: VmId,
        /// Name that its figures and log lines carry.
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
        /// Number that its hints and commands name it by, for as long as this engine runs.
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
        /// Number that its hints and commands name it by, for as long as this engine runs.
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
    /// Have a VM's writes tracked before it is stopped for a snapshot; it is not folded until
    /// [`Command::Release`].
    Track(VmId, SyncSender<Result<(), String>>),
    /// Keep what ranges of a stopped VM's memory hold, in this file ([`Order::KeepPast`]).
    KeepPast(VmId, Vec<Range>, OwnedFd, SyncSender<Result<(), String>>),
    /// Track a held VM's writes no more.
    Untrack(VmId, SyncSender<Result<(), String>>),
    /// Let a VM go on that was stopped, still held for the rest of its snapshot.
    GoOn(VmId, SyncSender<Result<(), String>>),
    /// Do nothing with a VM, which others stop for a snapshot, until [`Command::Release`].
    LeaveAlone(VmId, SyncSender<Result<(), String>>),
    /// Stop a VM for a snapshot; nothing else is done with it until [`Command::Release`]. It also
    /// goes on when this daemon dies.
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
    /// Answer at once with the CPU time of [`Command::Stats`] so far, in nanoseconds; also for who
    /// wants to know that commands are carried out.
    ReportsCpu(SyncSender<u64>),
    /// Look at the kernel's tables and answer with figures, and with what guests could call in as
    /// of that look.
    Stats(SyncSender<(EngineStats, Owed)>),
    /// Which files VMs cache.
    FileUses(SyncSender<Vec<FileUse>>),
    /// Where they lie in their memory.
    CachedFiles(SyncSender<CachedFiles>),
    /// What each page of a VM caches; `None` before its agent's first inventory. Costs the engine
    /// no more than references to its table.
    CachedPages(VmId, SyncSender<Option<CachedPages>>),
    /// Paths of files of a VM, by its agent's numbers; empty where none is known. Costs a search
    /// for each.
    FilePaths(VmId, Vec<FileNumber>, SyncSender<Vec<Vec<u8>>>),
    /// End the thread.
    Stop,
}
