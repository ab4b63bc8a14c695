//! Commands from the daemon to the engine's thread.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::mpsc::SyncSender;

use memfold_vm::RamLayout;
use memfold_wire::agent::{FileNumber, FromAgent};
use memfold_wire::library::{Advice, MapRun, Range};

use super::cached_pages::CachedPages;
use super::debt::Owed;
use super::file_uses::{CachedFiles, FileUse};
use super::guest::{Guest, VmId};
use super::stats::EngineStats;

/// Command to the engine. The engine answers a command that contains a sender through this sender.
pub enum Command {
    /// Adds a VM, whose memory may be folded from now on.
    Add {
        /// Number of the VM in hints and commands, valid for as long as this engine runs.
        id: VmId,
        /// Name of the VM, for statistics and log lines.
        name: String,
        /// Trust domain of the VM; a VM without a domain (`None`) shares with no other VM.
        domain: Option<String>,
        /// Layout of the VM's RAM.
        layout: RamLayout,
        /// `madvise` advice of each RAM block, in the order of `layout.blocks`.
        advice: Vec<Advice>,
        /// Interface through which the engine sends orders to the VM.
        guest: Box<dyn Guest>,
        /// Reason why the VM must not be folded, if there is one. Statistics contain the VM anyway.
        problem: Option<String>,
    },
    /// Replaces the layout of a VM's RAM, after the VM's firmware has run or memory was plugged.
    Layout {
        /// Number of the VM from [`Command::Add`].
        id: VmId,
        /// New layout of the VM's RAM.
        layout: RamLayout,
        /// `madvise` advice of each RAM block, in the order of `layout.blocks`.
        advice: Vec<Advice>,
    },
    /// Removes a VM that has ended.
    Remove(VmId),
    /// Sets the reason why a VM must not be folded, or clears the reason (`None`).
    Problem(VmId, Option<String>),
    /// Replaces the failed connection to a VM's library by a new one.
    Reached {
        /// Number of the VM from [`Command::Add`].
        id: VmId,
        /// Interface to the VM through the new connection.
        guest: Box<dyn Guest>,
        /// Reason why the VM must not be folded, if there is one.
        problem: Option<String>,
    },
    /// Starts a new session of a VM's agent: file numbers and hints of the previous session are
    /// invalid.
    AgentSession(VmId),
    /// Message of a VM's agent.
    Agent(VmId, FromAgent),
    /// The connection to a VM's agent has ended.
    AgentGone(VmId),
    /// Tracks a VM's writes before the VM is stopped for a snapshot. The engine does not fold the
    /// VM until [`Command::Release`].
    Track(VmId, SyncSender<Result<(), String>>),
    /// Saves the present bytes of ranges of a stopped VM's memory in this file, before the VM
    /// overwrites them (`Order::KeepPast`).
    KeepPast(VmId, Vec<Range>, OwnedFd, SyncSender<Result<(), String>>),
    /// Ends the tracking of a VM's writes. The engine still does not fold the VM.
    Untrack(VmId, SyncSender<Result<(), String>>),
    /// Resumes a VM that [`Command::Hold`] has stopped. The engine still does not fold the VM.
    GoOn(VmId, SyncSender<Result<(), String>>),
    /// Makes the engine leave a VM alone until [`Command::Release`], while another component stops
    /// the VM for a snapshot.
    LeaveAlone(VmId, SyncSender<Result<(), String>>),
    /// Stops a VM for a snapshot. The engine leaves the VM alone until [`Command::Release`]. The VM
    /// also resumes if this daemon dies.
    Hold(VmId, SyncSender<Result<(), String>>),
    /// Folds ranges of a VM onto a file that held the same bytes a moment ago. The answer is the
    /// number of folded pages.
    FoldOnto(VmId, File, Vec<MapRun>, SyncSender<Result<u64, String>>),
    /// Ends the effects of all commands for a snapshot: the VM runs, and the engine may fold it
    /// again.
    Release(VmId),
    /// Pauses folding or resumes it; folded pages stay folded.
    SetPaused(bool),
    /// Stops all new sharing for a reason, or allows it again (`None`). Folded pages stay folded.
    SetBraked(Option<String>),
    /// Asks for the debt: the memory that the host would need if guests wrote to all pages that
    /// they share. The figures are from the last sync with the kernel's tables.
    Owed {
        /// Whether the engine must first sync with the kernel's tables.
        look: bool,
        /// Whether the engine must also free store pages that no VM needs.
        give_back: bool,
        /// Sender for the answer.
        answer: SyncSender<Owed>,
    },
    /// Sets the budgets of folding.
    SetBudget {
        /// Share of one core that folding may use, 0 to 1.
        cpu_share: f64,
        /// Maximum number of pages processed per second; `None` for no limit.
        pages_per_second: Option<u64>,
    },
    /// Asks for the CPU time of all [`Command::Stats`] so far, in nanoseconds. The engine answers
    /// at once, so a caller can also wait in this way until earlier commands are done.
    ReportsCpu(SyncSender<u64>),
    /// Syncs with the kernel's tables, and asks for the statistics and the debt.
    Stats(SyncSender<(EngineStats, Owed)>),
    /// Asks which files VMs cache.
    FileUses(SyncSender<Vec<FileUse>>),
    /// Asks at which places in the VMs' memory files are cached.
    CachedFiles(SyncSender<CachedFiles>),
    /// Asks for the cached pages of a VM; the answer is `None` before the agent's first inventory.
    /// The answer shares memory with the engine's table, so this command is cheap.
    CachedPages(VmId, SyncSender<Option<CachedPages>>),
    /// Asks for the paths of files of a VM, by the agent's file numbers. A path is empty if it is
    /// unknown. Each file costs a look-up.
    FilePaths(VmId, Vec<FileNumber>, SyncSender<Vec<Vec<u8>>>),
    /// Ends the engine's thread.
    Stop,
}
