//! Daemon and in-QEMU library.
//!
//! The library listens on a Unix stream socket and serves one daemon at a time; a second connection
//! waits until the first ends. The daemon sends one [`Order`] at a time and reads one [`Reply`].
//! File descriptors go with the order that names them, by `SCM_RIGHTS`. The library keeps no
//! decision of its own: what is mapped where is in the kernel (`/proc/PID/maps`), so a new daemon
//! reads it there.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::frame::{FrameError, Validate};

/// Version of this protocol.
pub const VERSION: u16 = 4;

/// Environment variable of QEMU that names the socket's path. The library does nothing without it.
pub const SOCKET_VARIABLE: &str = "MEMFOLD_QEMU_SOCKET";

/// Environment variable of QEMU with a QMP connection of its own for the library, by which it stops
/// the VM for [`Freeze::Stopped`]: a socket's path, or the number of a socket whose other end QEMU
/// has for a monitor. Without it such orders are refused.
pub const MONITOR_VARIABLE: &str = "MEMFOLD_QEMU_MONITOR";

/// Most runs in one order.
pub const MAX_RUNS: usize = 1024;

/// Longest run in pages. Bounds the time that a vCPU may wait for a frozen page.
pub const MAX_RUN_PAGES: u32 = 512;

/// Most RAM blocks a VM may have: 256 slots of memory, and devices that bring their own.
pub const MAX_BLOCKS: usize = 512;

/// Most page stores a VM may have.
pub const MAX_STORES: usize = 64;

/// Longest time that an order may hold the VM, in microseconds.
pub const MAX_STOP_US: u32 = 1_000_000;

/// Time after which the library begins no further run of an order: on a host without a core to
/// spare a run takes milliseconds, and the daemon waits only so long for a reply.
pub const ORDER_TIME: Duration = Duration::from_secs(1);

/// `madvise` advice that QEMU gave a RAM block and that a mapping put in its place must have too
/// (from `VmFlags` in `/proc/PID/smaps`).
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

/// How the library freezes a run while it compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Freeze {
    /// `UFFDIO_MOVE` to a staging area. For anonymous memory. Safe with DMA: pinned pages are
    /// refused by the kernel.
    Move,
    /// `UFFDIO_WRITEPROTECT`. For ranges folded before. Only when no block node of the VM uses
    /// direct I/O.
    WriteProtect,
    /// No freeze: the library stops the VM for this order, by QMP, so that vCPUs and I/O are at
    /// rest, and lets it go on whatever becomes of the daemon. A VM that does not run is left
    /// alone.
    Stopped {
        /// When to begin no further run, in microseconds from the stop, at most [`MAX_STOP_US`].
        /// QEMU's own time for stopping (it drains I/O) and going on comes on top.
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

/// What the daemon asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// First order on a connection.
    Hello {
        /// [`VERSION`] of the daemon.
        version: u16,
    },
    /// This range is guest RAM and may be folded, from now on.
    AddRam {
        /// Start of the block.
        hva: u64,
        /// Length in pages.
        pages: u64,
        /// Advice to repeat on what replaces parts of it.
        advice: Advice,
    },
    /// A page store, with its read-only descriptor. Sending a number again replaces the descriptor
    /// only if it is the same file (device and inode).
    AddStore {
        /// Number that fold runs use.
        store: u32,
        /// Pages that may ever be in it; runs beyond are refused.
        max_pages: u64,
    },
    /// Fold these runs, in this order.
    Fold {
        /// How to freeze them.
        freeze: Freeze,
        /// The runs, at most [`MAX_RUNS`].
        runs: Vec<FoldRun>,
    },
    /// Put anonymous memory with the same bytes in place of folded ranges.
    Release {
        /// How to freeze them (not `Move`).
        freeze: Freeze,
        /// The ranges, at most [`MAX_RUNS`], each at most [`MAX_RUN_PAGES`] pages.
        ranges: Vec<Range>,
    },
    /// Give back anonymous pages that hold only zeroes, for [`ORDER_TIME`] at most. At most
    /// [`MAX_RUNS`] ranges of at most 2^18 pages each.
    DropZero {
        /// Where to look.
        ranges: Vec<Range>,
    },
    /// Map a private view of the file that comes with the order over a range, whatever is there (a
    /// template's RAM). Only before the VM runs, or where the file has the bytes that are there and
    /// nobody writes (QEMU's copy of a kernel).
    Map {
        /// Where.
        hva: u64,
        /// How much.
        pages: u64,
        /// First page in the file.
        file_page: u64,
    },
    /// Counters since the library was loaded.
    Stats,
    /// The RAM block at this address is gone (unplugged), or may no longer be folded. What is
    /// folded of it stays so.
    RemoveRam {
        /// Start of the block, as it was added.
        hva: u64,
    },
    /// This store is needed no more; the library closes it. What is folded onto it stays so.
    RemoveStore {
        /// Number of the store.
        store: u32,
    },
    /// Stop the VM until [`Order::Continue`], or until this connection ends: whatever becomes of
    /// the daemon, the VM goes on. Refused if it does not run.
    Stop,
    /// Let the VM go on that [`Order::Stop`] has stopped.
    Continue,
    /// From now on `PAGEMAP_SCAN` tells which pages of RAM are written to, until
    /// [`Order::UntrackWrites`], or until this connection ends. Nothing is folded meanwhile.
    /// Refused before Linux 6.7.
    TrackWrites,
    /// The end of [`Order::TrackWrites`].
    UntrackWrites,
    /// From now on, before the VM writes to a page of these ranges or gives it away, its bytes are
    /// copied into the file that comes with the order ([`crate::past`]), until
    /// [`Order::ForgetPast`], or until this connection ends. Writes are tracked no more; nothing is
    /// folded meanwhile. What holds now is kept whether the VM runs or not; it is of one moment
    /// only if it stands still.
    KeepPast {
        /// The ranges, 1 to [`MAX_RUNS`], ascending.
        ranges: Vec<Range>,
    },
    /// The end of [`Order::KeepPast`].
    ForgetPast,
    /// [`Order::Map`] of many ranges, all of them views of the file that comes with the order. If
    /// one can't be mapped, those before it are. A library of before this order ends the
    /// connection: it is for VMs that are being started.
    MapRuns {
        /// Where and what, 1 to [`MAX_RUNS`].
        runs: Vec<MapRun>,
    },
}

/// What became of one run or range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// All of it.
    Done,
    /// Bytes differ from the store at the page with this index in the run; the pages before it are
    /// folded.
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
    /// Part of the run is not there (a hole: balloon, never touched), or is no longer anonymous.
    /// Pages before it may be folded.
    Hole {
        /// Pages folded, from the start of the run.
        folded: u32,
    },
    /// Not begun: the time of [`Freeze::Stopped`] or [`ORDER_TIME`] was over, or the VM did not
    /// run.
    Late,
    /// The order itself is wrong (outside RAM, unaligned, unknown store, beyond the store's end,
    /// wrong freeze for the kind of mapping). Nothing was touched.
    Refused,
    /// A system call failed; the run was left as it was.
    Failed {
        /// `errno`.
        errno: i32,
        /// Pages folded, from the start of the run.
        folded: u32,
    },
}

impl Outcome {
    /// Pages done, of a run that asked for `asked`.
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

/// The library's own counters. Totals since it was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Pages folded from anonymous memory.
    pub folded_pages: u64,
    /// Pages folded again over a folded range.
    pub refolded_pages: u64,
    /// Pages given back because they held only zeroes.
    pub zero_pages: u64,
    /// Pages put back into anonymous memory.
    pub released_pages: u64,
    /// Pages whose bytes differed.
    pub differing_pages: u64,
    /// Runs refused because a page was busy (DMA).
    pub busy_runs: u64,
    /// Discards by QEMU (balloon, free page reporting) that met folded pages, in pages.
    pub discarded_pages: u64,
    /// How long runs stayed frozen: bucket i counts times of at least 2^i and less than 2^(i+1)
    /// nanoseconds; the last also those above.
    pub freeze_histogram: [u64; HISTOGRAM_BUCKETS],
    /// Longest freeze in nanoseconds.
    pub freeze_max_ns: u64,
    /// CPU time of the library's thread in nanoseconds.
    pub thread_cpu_ns: u64,
}

/// What the library answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// To `Hello`.
    Hello {
        /// [`VERSION`] of the library.
        version: u16,
        /// The library's package version.
        library: String,
        /// Whether `Move` works here (Linux >= 6.8 and the right to catch kernel-mode faults).
        can_move: bool,
        /// Whether `WriteProtect` works here.
        can_write_protect: bool,
        /// Whether `Stopped` works here: the library has a QMP socket of its own.
        can_stop: bool,
        /// Why folding can't work, if it can't: the condition and what would change it.
        problem: Option<String>,
    },
    /// To `AddRam`, `RemoveRam`, `AddStore`, `RemoveStore`, `Map`, `MapRuns`, `Stop`, `Continue`,
    /// `TrackWrites`, `UntrackWrites`, `KeepPast`, `ForgetPast`.
    Ok,
    /// To `Fold`, `Release`: an outcome for each run, in order.
    Outcomes {
        /// One for each run.
        outcomes: Vec<Outcome>,
        /// CPU time of the library's thread for this order, in nanoseconds.
        cpu_ns: u64,
        /// How long the VM stood still for this order, in nanoseconds; 0 if it was not stopped.
        stopped_ns: u64,
    },
    /// To `DropZero`.
    Zero {
        /// Pages looked at.
        scanned: u64,
        /// Pages given back.
        dropped: u64,
        /// CPU time of the library's thread for this order, in nanoseconds.
        cpu_ns: u64,
    },
    /// To `Stats`.
    Stats(Box<Stats>),
    /// The order was refused as a whole; nothing changed.
    Error {
        /// The condition that failed.
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
