//! Commands from the daemon to the engine's thread.

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

/// Command to the engine. Commands with a sender are answered through it.
pub enum Command {
    /// Adds a VM.
    Add {
        /// Number of the VM in hints and commands, for as long as this engine runs.
        id: VmId,
        /// Name of the VM in statistics and log lines.
        name: String,
        /// Trust domain; a VM without one (`None`) shares with no other VM.
        domain: Option<String>,
        /// Layout of the VM's RAM.
        layout: RamLayout,
        /// `madvise` advice of each RAM block, in the order of `layout.blocks`.
        advice: Vec<Advice>,
        /// Interface to the VM.
        guest: Box<dyn Guest>,
        /// Reason why it must not be folded, if there is one. The VM is listed all the same.
        problem: Option<String>,
    },
    /// Replaces the layout of the VM's RAM, after its firmware has run or memory was plugged.
    Layout {
        /// Number of the VM in hints and commands, for as long as this engine runs.
        id: VmId,
        /// New layout of the VM's RAM.
        layout: RamLayout,
        /// `madvise` advice of each RAM block, in the order of `layout.blocks`.
        advice: Vec<Advice>,
    },
    /// Removes a VM that has ended.
    Remove(VmId),
    /// Sets or clears the reason why a VM must not be folded.
    Problem(VmId, Option<String>),
    /// Replaces the failed connection to a VM's library.
    Reached {
        /// Number of the VM in hints and commands, for as long as this engine runs.
        id: VmId,
        /// Interface to the VM through the new connection.
        guest: Box<dyn Guest>,
        /// Reason why it must not be folded, if there is one.
        problem: Option<String>,
    },
    /// Starts a new session of a VM's agent: file numbers and hints start anew.
    AgentSession(VmId),
    /// A message of a VM's agent.
    Agent(VmId, FromAgent),
    /// The agent's connection ended.
    AgentGone(VmId),
    /// Tracks a VM's writes before it is stopped for a snapshot. The VM is not folded until
    /// [`Command::Release`].
    Track(VmId, SyncSender<Result<(), String>>),
    /// Saves the present bytes of ranges of a stopped VM's memory in this file, before the VM
    /// overwrites them ([`Order::KeepPast`]).
    KeepPast(VmId, Vec<Range>, OwnedFd, SyncSender<Result<(), String>>),
    /// Ends the tracking of a held VM's writes.
    Untrack(VmId, SyncSender<Result<(), String>>),
    /// Resumes a stopped VM, which is still held for the rest of its snapshot.
    GoOn(VmId, SyncSender<Result<(), String>>),
    /// Leaves a VM alone until [`Command::Release`], while another component stops it for a
    /// snapshot.
    LeaveAlone(VmId, SyncSender<Result<(), String>>),
    /// Stops a VM for a snapshot. The engine leaves it alone until [`Command::Release`]. The VM
    /// also resumes if this daemon dies.
    Hold(VmId, SyncSender<Result<(), String>>),
    /// Ends the holding of a VM after its snapshot.
    Release(VmId),
    /// Pauses or resumes folding; folded pages stay folded.
    SetPaused(bool),
    /// Stops all new sharing for this reason, or allows it again (`None`). Folded pages stay
    /// folded.
    SetBraked(Option<String>),
    /// Asks how much memory guests could reclaim by writes, as of the last sync with the kernel's
    /// tables.
    Owed {
        /// Sync with the kernel's tables first.
        look: bool,
        /// Also give back store pages that no VM needs any more.
        give_back: bool,
        /// Sender for the answer.
        answer: SyncSender<Owed>,
    },
    /// Sets the budgets.
    SetBudget {
        /// Share of one core, 0 to 1.
        cpu_share: f64,
        /// Most pages processed per second; `None` for no limit.
        pages_per_second: Option<u64>,
    },
    /// Answers at once with the CPU time of [`Command::Stats`] so far, in nanoseconds. Also used to
    /// wait until earlier commands are carried out.
    ReportsCpu(SyncSender<u64>),
    /// Syncs with the kernel's tables. Answers with the statistics, and with the memory that guests
    /// could reclaim.
    Stats(SyncSender<(EngineStats, Owed)>),
    /// Asks for the files that VMs cache.
    FileUses(SyncSender<Vec<FileUse>>),
    /// Asks for the places of cached files in the VMs' memory.
    CachedFiles(SyncSender<CachedFiles>),
    /// Asks for the cached pages of a VM; `None` before its agent's first inventory. The answer
    /// shares the engine's table, so it is cheap.
    CachedPages(VmId, SyncSender<Option<CachedPages>>),
    /// Asks for paths of files of a VM, by its agent's numbers; empty where none is known. Costs a
    /// look-up for each.
    FilePaths(VmId, Vec<FileNumber>, SyncSender<Vec<Vec<u8>>>),
    /// Ends the thread.
    Stop,
}
