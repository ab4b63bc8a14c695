//! Commands that the daemon sends to the thread that folds VMs' memory (the fold engine).

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::mpsc::SyncSender;

use memfold_vm::RamLayout;
use memfold_wire::agent::{FileNumber, FromAgent};
use memfold_wire::library::{Advice, MapRun, Range};

use super::cached_pages::CachedPages;
use super::debt::Owed;
use super::file_uses::{CachedFiles, FileUse};
use super::fold_onto::FoldedOnto;
use super::guest::{Guest, VmId};
use super::stats::EngineStats;

/// Command to the fold engine. If the command contains a `SyncSender`, the engine sends its answer
/// through it.
pub enum Command {
    /// Adds a VM to the engine, which may fold the VM's memory from now on.
    Add {
        /// Number by which later commands name the VM, valid for as long as this engine runs.
        id: VmId,
        /// Name of the VM, for statistics and log lines.
        name: String,
        /// Trust domain of the VM; a VM without a domain (`None`) shares with no other VM.
        domain: Option<String>,
        /// Layout of the VM's RAM: guest page frames and their addresses in QEMU.
        layout: RamLayout,
        /// `madvise` advice that QEMU gave each RAM block, in the order of `layout.blocks`.
        advice: Vec<Advice>,
        /// Interface through which the engine sends orders to memfold's library in the VM's QEMU.
        guest: Box<dyn Guest>,
        /// Reason why the VM must not be folded; `None` if it may be. The engine lists the VM in
        /// its statistics in either case.
        problem: Option<String>,
    },
    /// Replaces the layout of a VM's RAM, after the VM's firmware has run or memory was plugged.
    Layout {
        /// Number of the VM, as in [`Command::Add`].
        id: VmId,
        /// New layout of the VM's RAM: guest page frames and their addresses in QEMU.
        layout: RamLayout,
        /// `madvise` advice that QEMU gave each RAM block, in the order of `layout.blocks`.
        advice: Vec<Advice>,
    },
    /// Removes a VM that has ended from the engine.
    Remove(VmId),
    /// Sets the reason why a VM must not be folded, or clears the reason (`None`).
    Problem(VmId, Option<String>),
    /// Gives the library of a VM, whose memory is still arriving, a new socket over which pages are
    /// brought (`Order::Await`). The library serves one connection at a time, which the engine has.
    Await(VmId, OwnedFd, SyncSender<Result<(), String>>),
    /// Replaces the failed connection to memfold's library in a VM's QEMU by a new one.
    Reached {
        /// Number of the VM, as in [`Command::Add`].
        id: VmId,
        /// Interface through which the engine sends orders to the library over the new connection.
        guest: Box<dyn Guest>,
        /// Reason why the VM must not be folded; `None` if it may be.
        problem: Option<String>,
    },
    /// Starts a new session of a VM's agent: file numbers and hints of the previous session are
    /// invalid.
    AgentSession(VmId),
    /// Passes on a message from a VM's agent.
    Agent(VmId, FromAgent),
    /// Reports that the connection to a VM's agent has ended.
    AgentGone(VmId),
    /// Starts to track which pages a VM writes, before the VM is stopped for a snapshot. The engine
    /// does not fold the VM until [`Command::Release`].
    Track(VmId, SyncSender<Result<(), String>>),
    /// Starts a copy before write of a stopped VM (`Order::KeepPast`). When the VM runs again, the
    /// old bytes of these memory ranges are saved in this file before the VM overwrites them.
    KeepPast(VmId, Vec<Range>, OwnedFd, SyncSender<Result<(), String>>),
    /// Ends the tracking of a VM's writes. The engine still does not fold the VM.
    Untrack(VmId, SyncSender<Result<(), String>>),
    /// Resumes a VM that [`Command::Hold`] has stopped. The engine still does not fold the VM.
    GoOn(VmId, SyncSender<Result<(), String>>),
    /// Makes the engine neither fold nor examine a VM until [`Command::Release`], while another
    /// component stops the VM for a snapshot.
    LeaveAlone(VmId, SyncSender<Result<(), String>>),
    /// Stops a VM for a snapshot, until [`Command::GoOn`] or [`Command::Release`]. The engine does
    /// not fold the VM until [`Command::Release`]. The VM also resumes if this daemon dies.
    Hold(VmId, SyncSender<Result<(), String>>),
    /// Folds ranges of a VM onto a file that held the same bytes a moment ago. The VM is stopped
    /// once, for about 10 ms at most; the answer contains the ranges that are left.
    FoldOnto(
        VmId,
        File,
        Vec<MapRun>,
        SyncSender<Result<FoldedOnto, String>>,
    ),
    /// Ends the effects of all commands for a snapshot: the VM runs, and the engine may fold it
    /// again.
    Release(VmId),
    /// Pauses folding of all VMs (`true`) or resumes it (`false`). Folded pages stay folded.
    SetPaused(bool),
    /// Makes the engine share no more pages, for the given reason, or allows sharing again
    /// (`None`). Folded pages stay folded.
    SetBraked(Option<String>),
    /// Asks for the debt: the memory that the host would need if guests wrote to all pages that
    /// they share. Without `look` and `give_back`, the figures are from the last sync with the
    /// kernel's page tables.
    Owed {
        /// Whether the engine must first read the kernel's page tables, so that the figures are up
        /// to date.
        look: bool,
        /// Whether the engine must first free store pages that no VM needs.
        give_back: bool,
        /// Sender through which the engine answers with the debt.
        answer: SyncSender<Owed>,
    },
    /// Limits the CPU time and the page rate of folding.
    SetBudget {
        /// CPU time that folding may use on average, as a fraction of one core, 0 to 1.
        cpu_share: f64,
        /// Maximum number of pages that the engine processes per second; `None` for no limit.
        pages_per_second: Option<u64>,
    },
    /// Asks for the CPU time that the engine has used to answer [`Command::Stats`] and
    /// [`Command::Owed`], in nanoseconds. Because the engine answers commands in order, a caller
    /// can also use this command to wait for earlier commands.
    ReportsCpu(SyncSender<u64>),
    /// Asks for the statistics and the debt. The engine first reads the kernel's page tables, so
    /// that the figures are up to date.
    Stats(SyncSender<(EngineStats, Owed)>),
    /// Asks which files each guest caches, and how many pages of each file.
    FileUses(SyncSender<Vec<FileUse>>),
    /// Asks which ranges of the VMs' memory cache which files.
    CachedFiles(SyncSender<CachedFiles>),
    /// Asks which pages of a VM cache which file pages; the answer is `None` before the agent's
    /// first inventory. The answer shares memory with the engine's table, so this command is cheap.
    CachedPages(VmId, SyncSender<Option<CachedPages>>),
    /// Asks for the paths of files in a guest, given the agent's file numbers. The path of an
    /// unknown file is empty. Each file costs a look-up.
    FilePaths(VmId, Vec<FileNumber>, SyncSender<Vec<Vec<u8>>>),
    /// Ends the engine's thread.
    Stop,
}
