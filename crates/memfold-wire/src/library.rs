//! Protocol between the daemon and the library in QEMU.
//!
//! The library listens on a Unix stream socket and serves one daemon at a time; a second connection
//! waits until the first ends. The daemon sends one [`Order`] at a time and reads one [`Reply`].
//! File descriptors come with the order that names them, by `SCM_RIGHTS`. The library decides
//! nothing by itself. The kernel knows all mappings (`/proc/PID/maps`), so a new daemon reads them
//! there.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::frame::{FrameError, Validate};

/// Version of this protocol. The library refuses other versions.
pub const VERSION: u16 = 4;

/// Environment variable of QEMU with the path of the library's socket. Without it the library does
/// nothing.
pub const SOCKET_VARIABLE: &str = "MEMFOLD_QEMU_SOCKET";

/// Environment variable of QEMU that gives the library a QMP connection of its own, by which it
/// stops the VM for [`Freeze::Stopped`]: a socket's path, or the number of a socket whose other end
/// is a QEMU monitor. Without it such orders are refused.
pub const MONITOR_VARIABLE: &str = "MEMFOLD_QEMU_MONITOR";

/// Most runs in one order.
pub const MAX_RUNS: usize = 1024;

/// Longest run in pages. Bounds the time that a vCPU may wait for a frozen page.
pub const MAX_RUN_PAGES: u32 = 512;

/// Most RAM blocks of a VM: 256 slots of memory, and devices with memory of their own.
pub const MAX_BLOCKS: usize = 512;

/// Most page stores of a VM.
pub const MAX_STORES: usize = 64;

/// Longest time for which an order may stop the VM, in microseconds.
pub const MAX_STOP_US: u32 = 1_000_000;

/// Time after which the library starts no further run of an order. On a host without a free core a
/// run takes milliseconds, and the daemon's wait for a reply is limited.
pub const ORDER_TIME: Duration = Duration::from_secs(1);

/// `madvise` advice that QEMU gave a RAM block. A mapping that replaces part of it needs the same
/// advice (from `VmFlags` in `/proc/PID/smaps`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools)]
pub struct Advice {
    /// `mg`: `MADV_MERGEABLE`.
    pub mergeable: bool,
    /// `hg`: `MADV_HUGEPAGE`.
    pub hugepage: bool,
    /// `nh`: `MADV_NOHUGEPAGE`.
    pub nohugepage: bool,
    /// `dc`: `MADV_DONTFORK`.
    pub dontfork: bool,
    /// `dd`: `MADV_DONTDUMP`.
    pub dontdump: bool,
    /// `nr`: mapped with `MAP_NORESERVE`.
    pub noreserve: bool,
}

/// Way in which the library freezes a run while it compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Freeze {
    /// `UFFDIO_MOVE` to a staging area, for anonymous memory. Safe with DMA: the kernel refuses
    /// pinned pages.
    Move,
    /// `UFFDIO_WRITEPROTECT`, for ranges folded before. Only if no block node of the VM uses direct
    /// I/O.
    WriteProtect,
    /// No freeze: the library stops the VM for this order, by QMP, so that vCPUs and I/O are at
    /// rest. It resumes the VM even if the daemon dies. A VM that does not run is left alone.
    Stopped {
        /// Time after the stop at which no further run is started, in microseconds, at most
        /// [`MAX_STOP_US`]. The time in which QEMU stops (it drains I/O) and resumes comes on top.
        limit_us: u32,
    },
}

impl Freeze {
    const fn is_short(self) -> bool {
        !matches!(self, Self::Stopped { limit_us } if limit_us > MAX_STOP_US)
    }
}

/// One run to fold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoldRun {
    /// Host-virtual address in QEMU; page-aligned, inside one RAM block.
    pub hva: u64,
    /// Length in pages, 1 to [`MAX_RUN_PAGES`].
    pub pages: u32,
    /// Number of the store.
    pub store: u32,
    /// First page in the store.
    pub store_page: u64,
}

/// A range of QEMU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// Host-virtual address; page-aligned, inside one RAM block.
    pub hva: u64,
    /// Length in pages.
    pub pages: u64,
}

/// A view of a file, for [`Order::MapRuns`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapRun {
    /// Host-virtual address in QEMU; page-aligned, inside one RAM block.
    pub hva: u64,
    /// Length in pages.
    pub pages: u64,
    /// First page in the file.
    pub file_page: u64,
}

/// Orders from the daemon to the library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// First order on a connection.
    Hello {
        /// [`VERSION`] of the daemon.
        version: u16,
    },
    /// Adds a range of guest RAM, which may be folded from now on.
    AddRam {
        /// Start of the block.
        hva: u64,
        /// Length in pages.
        pages: u64,
        /// Advice to repeat on mappings that replace parts of it.
        advice: Advice,
    },
    /// Adds a page store, with its read-only descriptor. A number that is in use gets a new
    /// descriptor only if it is the same file (device and inode).
    AddStore {
        /// Number of the store in fold runs.
        store: u32,
        /// Most pages that the store may ever have; runs beyond are refused.
        max_pages: u64,
    },
    /// Folds these runs, in this order.
    Fold {
        /// Way to freeze them.
        freeze: Freeze,
        /// The runs, at most [`MAX_RUNS`].
        runs: Vec<FoldRun>,
    },
    /// Replaces folded ranges by anonymous memory with the same bytes.
    Release {
        /// Way to freeze them (not `Move`).
        freeze: Freeze,
        /// The ranges, at most [`MAX_RUNS`], each at most [`MAX_RUN_PAGES`] pages.
        ranges: Vec<Range>,
    },
    /// Gives back anonymous pages that hold only zeroes, for [`ORDER_TIME`] at most. At most
    /// [`MAX_RUNS`] ranges of at most 2^18 pages each.
    DropZero {
        /// Ranges to search.
        ranges: Vec<Range>,
    },
    /// Maps a private view of the file that comes with the order over a range (a template's RAM),
    /// and replaces any mapping there. Only before the VM runs, or if the file has the same bytes
    /// as the range and nobody writes to it (QEMU's copy of a kernel).
    Map {
        /// Address of the range; page-aligned, inside one RAM block.
        hva: u64,
        /// Length in pages.
        pages: u64,
        /// First page in the file.
        file_page: u64,
    },
    /// Asks for the counters since the library was loaded.
    Stats,
    /// Removes the RAM block at this address, because it was unplugged or may no longer be folded.
    /// Its folded pages stay folded.
    RemoveRam {
        /// Start of the block, as it was added.
        hva: u64,
    },
    /// Removes a store; the library closes it. Pages folded onto it stay folded.
    RemoveStore {
        /// Number of the store.
        store: u32,
    },
    /// Stops the VM until [`Order::Continue`], or until this connection ends, so that it also
    /// resumes if the daemon dies. Refused if the VM does not run.
    Stop,
    /// Resumes the VM that [`Order::Stop`] has stopped.
    Continue,
    /// Starts write tracking: `PAGEMAP_SCAN` shows which pages of RAM are written to, until
    /// [`Order::UntrackWrites`] or the end of this connection. Nothing is folded meanwhile. Refused
    /// before Linux 6.7.
    TrackWrites,
    /// Ends [`Order::TrackWrites`].
    UntrackWrites,
    /// Starts a copy before write: before the VM writes to a page of these ranges or discards it,
    /// its bytes are copied into the file that comes with the order ([`crate::past`]). It ends with
    /// [`Order::ForgetPast`] or this connection. Write tracking ends; nothing is folded meanwhile.
    /// The order works whether the VM runs or not, but the saved bytes are of one moment only if
    /// the VM is stopped when it starts.
    KeepPast {
        /// Ranges, 1 to [`MAX_RUNS`], ascending.
        ranges: Vec<Range>,
    },
    /// Ends [`Order::KeepPast`].
    ForgetPast,
    /// [`Order::Map`] of many ranges, all of them views of the file that comes with the order. If
    /// one cannot be mapped, those before it are. A library that does not know this order ends the
    /// connection, so it is only for VMs that are being started.
    MapRuns {
        /// Views to map, 1 to [`MAX_RUNS`].
        runs: Vec<MapRun>,
    },
}

/// Outcome of one run or range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// All of it was done.
    Done,
    /// The bytes of page `folded` of the run differ from the store; the pages before it are folded.
    Differs {
        /// Pages folded, from the start of the run.
        folded: u32,
    },
    /// The kernel refused to freeze a page (`EBUSY`: pinned by DMA or shared by fork). Pages before
    /// it may be folded.
    Busy {
        /// Pages folded, from the start of the run.
        folded: u32,
    },
    /// Part of the run is not in memory (a hole: balloon, never touched), or is no longer
    /// anonymous. Pages before it may be folded.
    Hole {
        /// Pages folded, from the start of the run.
        folded: u32,
    },
    /// Not started: the time of [`Freeze::Stopped`] or [`ORDER_TIME`] was over, or the VM did not
    /// run.
    Late,
    /// The run is invalid (outside RAM, unaligned, unknown store, beyond the store's end, wrong
    /// freeze for the kind of mapping). Nothing was changed.
    Refused,
    /// A system call failed. Pages after the first `folded` were left as they were.
    Failed {
        /// `errno` of the system call.
        errno: i32,
        /// Pages folded, from the start of the run.
        folded: u32,
    },
}

impl Outcome {
    /// Returns the number of pages done, of a run of `asked` pages.
    #[must_use]
    pub fn pages_done(self, asked: u32) -> u32 {
        match self {
            Self::Done => asked,
            Self::Refused | Self::Late => 0,
            Self::Differs { folded }
            | Self::Busy { folded }
            | Self::Hole { folded }
            | Self::Failed { folded, .. } => folded.min(asked),
        }
    }
}

/// Number of buckets of [`Stats::freeze_histogram`].
pub const HISTOGRAM_BUCKETS: usize = 24;

/// Counters of the library since it was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Pages folded from anonymous memory.
    pub folded_pages: u64,
    /// Pages folded again that mapped a file already.
    pub refolded_pages: u64,
    /// Pages given back because they held only zeroes.
    pub zero_pages: u64,
    /// Pages released: replaced by anonymous memory with the same bytes.
    pub released_pages: u64,
    /// Runs that ended at a page whose bytes differed from the store.
    pub differing_pages: u64,
    /// Runs refused because a page was busy (DMA).
    pub busy_runs: u64,
    /// Discards by QEMU (balloon, free page reporting) that met folded pages, in pages.
    pub discarded_pages: u64,
    /// Histogram of the time for which runs were frozen: bucket i counts times of at least 2^i and
    /// less than 2^(i+1) nanoseconds; the last bucket also longer ones.
    pub freeze_histogram: [u64; HISTOGRAM_BUCKETS],
    /// Longest freeze in nanoseconds.
    pub freeze_max_ns: u64,
    /// CPU time of the library's thread in nanoseconds.
    pub thread_cpu_ns: u64,
}

/// Replies from the library to the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Reply to `Hello`.
    Hello {
        /// [`VERSION`] of the library.
        version: u16,
        /// The library's package version.
        library: String,
        /// Whether `Move` works on this host (Linux >= 6.8 and the right to catch kernel-mode
        /// faults).
        can_move: bool,
        /// Whether `WriteProtect` works on this host.
        can_write_protect: bool,
        /// Whether `Stopped` works: the library has a QMP connection of its own.
        can_stop: bool,
        /// Reason why folding cannot work, if it cannot: the condition and what would change it.
        problem: Option<String>,
    },
    /// Reply to `AddRam`, `RemoveRam`, `AddStore`, `RemoveStore`, `Map`, `MapRuns`, `Stop`,
    /// `Continue`, `TrackWrites`, `UntrackWrites`, `KeepPast`, `ForgetPast`: done.
    Ok,
    /// Reply to `Fold` and `Release`: an outcome for each run, in order.
    Outcomes {
        /// Outcomes, one for each run.
        outcomes: Vec<Outcome>,
        /// CPU time of the library's thread for this order, in nanoseconds.
        cpu_ns: u64,
        /// Time for which the VM was stopped for this order, in nanoseconds; 0 if it was not.
        stopped_ns: u64,
    },
    /// Reply to `DropZero`.
    Zero {
        /// Pages examined.
        scanned: u64,
        /// Pages given back.
        dropped: u64,
        /// CPU time of the library's thread for this order, in nanoseconds.
        cpu_ns: u64,
    },
    /// Reply to `Stats`.
    Stats(Box<Stats>),
    /// The whole order was refused.
    Error {
        /// Condition that failed.
        reason: String,
    },
}

fn limit(ok: bool, what: &'static str) -> Result<(), FrameError> {
    if ok {
        Ok(())
    } else {
        Err(FrameError::Limit(what))
    }
}

impl Validate for Order {
    fn validate(&self) -> Result<(), FrameError> {
        match self {
            Self::Fold { freeze, runs } => {
                limit(freeze.is_short(), "a stop of more than a second")?;
                limit(runs.len() <= MAX_RUNS, "more than 1024 runs in an order")?;
                limit(
                    runs.iter().all(|r| (1..=MAX_RUN_PAGES).contains(&r.pages)),
                    "a run of zero or more than 512 pages",
                )
            }
            Self::Release { freeze, ranges } => {
                limit(freeze.is_short(), "a stop of more than a second")?;
                limit(
                    ranges.len() <= MAX_RUNS,
                    "more than 1024 ranges in an order",
                )?;
                limit(
                    ranges
                        .iter()
                        .all(|r| (1..=u64::from(MAX_RUN_PAGES)).contains(&r.pages)),
                    "a range of zero or more than 512 pages",
                )
            }
            Self::DropZero { ranges } => {
                limit(
                    ranges.len() <= MAX_RUNS,
                    "more than 1024 ranges in an order",
                )?;
                limit(
                    ranges.iter().all(|r| (1..=1 << 18).contains(&r.pages)),
                    "a range of zero or more than 2^18 pages",
                )
            }
            Self::KeepPast { ranges } => {
                limit(
                    (1..=MAX_RUNS).contains(&ranges.len()),
                    "no range or more than 1024 in an order",
                )?;
                limit(
                    ranges.iter().all(|r| (1..=1 << 40).contains(&r.pages)),
                    "a range of zero or more than 2^40 pages",
                )
            }
            Self::MapRuns { runs } => limit(
                (1..=MAX_RUNS).contains(&runs.len()),
                "no run or more than 1024 in an order",
            ),
            Self::Hello { .. }
            | Self::AddRam { .. }
            | Self::AddStore { .. }
            | Self::Map { .. }
            | Self::Stats
            | Self::RemoveRam { .. }
            | Self::RemoveStore { .. }
            | Self::Stop
            | Self::Continue
            | Self::TrackWrites
            | Self::UntrackWrites
            | Self::ForgetPast => Ok(()),
        }
    }
}

impl Validate for Reply {
    fn validate(&self) -> Result<(), FrameError> {
        match self {
            Self::Outcomes { outcomes, .. } => limit(
                outcomes.len() <= MAX_RUNS,
                "more than 1024 outcomes in a reply",
            ),
            Self::Hello {
                library, problem, ..
            } => limit(
                library.len() <= 256 && problem.as_ref().is_none_or(|p| p.len() <= 4096),
                "a text longer than its limit",
            ),
            Self::Error { reason } => limit(reason.len() <= 4096, "a text longer than its limit"),
            Self::Ok | Self::Zero { .. } | Self::Stats(_) => Ok(()),
        }
    }
}
