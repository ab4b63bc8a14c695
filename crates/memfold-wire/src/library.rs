//! Protocol between the daemon and memfold's library in QEMU, which changes mappings of guest RAM.
//!
//! The library listens on a Unix stream socket and serves one daemon at a time; a second connection
//! waits until the first ends. The daemon sends one [`Order`] at a time and reads one [`Reply`]. An
//! order's file descriptors are sent with the order (`SCM_RIGHTS`). The library makes no decisions.
//! The kernel knows all mappings (`/proc/PID/maps`), so a new daemon reads them from there.
//!
//! To *fold* a run of RAM pages is to replace the run by a private mapping of the same bytes in a
//! *page store*, a file whose pages many VMs map.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::frame::{FrameError, Validate};

/// Version of this protocol. The library refuses other versions.
pub const VERSION: u16 = 4;

/// Environment variable of QEMU with the path of the library's socket. The library does nothing if
/// the variable is not set.
pub const SOCKET_VARIABLE: &str = "MEMFOLD_QEMU_SOCKET";

/// Environment variable of QEMU that gives the library a QMP connection of its own, by which the
/// library stops the VM for [`Freeze::Stopped`]. The value is a socket's path, or the descriptor
/// number of a socket whose other end is a QEMU monitor. If the variable is not set, the library
/// refuses orders with [`Freeze::Stopped`].
pub const MONITOR_VARIABLE: &str = "MEMFOLD_QEMU_MONITOR";

/// Maximum number of runs in one order.
pub const MAX_RUNS: usize = 1024;

/// Maximum length of a run in pages. The limit bounds the time that a vCPU may wait for a frozen
/// page.
pub const MAX_RUN_PAGES: u32 = 512;

/// Maximum number of RAM blocks of a VM: 256 memory slots, and devices with memory of their own.
pub const MAX_BLOCKS: usize = 512;

/// Maximum number of page stores of a VM.
pub const MAX_STORES: usize = 64;

/// Maximum time for which an order may stop the VM, in microseconds.
pub const MAX_STOP_US: u32 = 1_000_000;

/// Time limit of an order, after which the library starts no further run. On a host without a free
/// core a run takes milliseconds, and the daemon waits for a reply only for a limited time.
pub const ORDER_TIME: Duration = Duration::from_secs(1);

/// `madvise` advice that QEMU gave a RAM block (from `VmFlags` in `/proc/PID/smaps`). A mapping
/// that replaces part of the block needs the same advice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools)]
pub struct Advice {
    /// Whether `VmFlags` has `mg`: `MADV_MERGEABLE`.
    pub mergeable: bool,
    /// Whether `VmFlags` has `hg`: `MADV_HUGEPAGE`.
    pub hugepage: bool,
    /// Whether `VmFlags` has `nh`: `MADV_NOHUGEPAGE`.
    pub nohugepage: bool,
    /// Whether `VmFlags` has `dc`: `MADV_DONTFORK`.
    pub dontfork: bool,
    /// Whether `VmFlags` has `dd`: `MADV_DONTDUMP`.
    pub dontdump: bool,
    /// Whether `VmFlags` has `nr`: mapped with `MAP_NORESERVE`.
    pub noreserve: bool,
}

/// Way in which the library freezes a run of pages while it compares them with the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Freeze {
    /// `UFFDIO_MOVE` to a staging area, for anonymous memory. This way is safe with DMA, because
    /// the kernel refuses to move pinned pages.
    Move,
    /// `UFFDIO_WRITEPROTECT`, for ranges that were folded before. Allowed only if no block node of
    /// the VM uses direct I/O.
    WriteProtect,
    /// Pause of the VM: the library stops the VM by QMP for this order, so that vCPUs and I/O are
    /// at rest, and resumes the VM even if the daemon dies. If the VM does not run, the library
    /// does nothing: each outcome is [`Outcome::Late`].
    Stopped {
        /// Time in microseconds after the stop at which the library starts no further run, at most
        /// [`MAX_STOP_US`]. The VM is stopped for longer, because QEMU also needs time to stop (it
        /// drains I/O) and to resume.
        limit_us: u32,
    },
}

impl Freeze {
    const fn is_short(self) -> bool {
        !matches!(self, Self::Stopped { limit_us } if limit_us > MAX_STOP_US)
    }
}

/// Run of RAM pages to fold, with the place of the same bytes in a page store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoldRun {
    /// Host virtual address of the run in QEMU; page-aligned, inside one RAM block.
    pub hva: u64,
    /// Length of the run in pages, 1 to [`MAX_RUN_PAGES`].
    pub pages: u32,
    /// Number of the page store, from [`Order::AddStore`].
    pub store: u32,
    /// Index in the store of the run's first page.
    pub store_page: u64,
}

/// Range of guest RAM in QEMU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// Host virtual address of the range; page-aligned, inside one RAM block.
    pub hva: u64,
    /// Length of the range in pages.
    pub pages: u64,
}

/// Range of guest RAM and the part of a file to map there, for [`Order::MapRuns`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapRun {
    /// Host virtual address of the range in QEMU; page-aligned, inside one RAM block.
    pub hva: u64,
    /// Length of the range in pages.
    pub pages: u64,
    /// Index in the file of the first page to map.
    pub file_page: u64,
}

/// Orders from the daemon to the library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// First order on a connection: the daemon tells its version.
    Hello {
        /// [`VERSION`] of the daemon.
        version: u16,
    },
    /// Adds a block of guest RAM, which the daemon may fold from now on.
    AddRam {
        /// Host virtual address of the block in QEMU.
        hva: u64,
        /// Length of the block in pages.
        pages: u64,
        /// Advice to repeat on mappings that replace parts of the block.
        advice: Advice,
    },
    /// Adds a page store, whose read-only descriptor comes with the order. A number that is in use
    /// gets a new descriptor only if both descriptors are of the same file (device and inode).
    AddStore {
        /// Number by which fold runs name the store.
        store: u32,
        /// Maximum number of pages that the store may ever have; the library refuses runs beyond.
        max_pages: u64,
    },
    /// Folds the runs, in the order of the list.
    Fold {
        /// Way to freeze the runs.
        freeze: Freeze,
        /// Runs to fold, at most [`MAX_RUNS`].
        runs: Vec<FoldRun>,
    },
    /// Replaces folded ranges by anonymous memory with the same bytes.
    Release {
        /// Way to freeze the ranges (not `Move`).
        freeze: Freeze,
        /// Folded ranges, at most [`MAX_RUNS`], each of at most [`MAX_RUN_PAGES`] pages.
        ranges: Vec<Range>,
    },
    /// Discards anonymous pages that hold only zeroes. The order takes at most [`ORDER_TIME`].
    DropZero {
        /// Ranges to search, at most [`MAX_RUNS`], each of at most 2^18 pages.
        ranges: Vec<Range>,
    },
    /// Maps a private view of the file that comes with the order (a template's RAM) over a range,
    /// and replaces any mapping there. Allowed only before the VM runs, or if the file has the same
    /// bytes as the range and nobody writes to the range (QEMU's copy of a kernel).
    Map {
        /// Host virtual address of the range; page-aligned, inside one RAM block.
        hva: u64,
        /// Length of the range in pages.
        pages: u64,
        /// Index in the file of the first page to map.
        file_page: u64,
    },
    /// Asks for the library's counters since it was loaded.
    Stats,
    /// Removes a RAM block, because the block was unplugged or may no longer be folded. Folded
    /// pages of the block stay folded.
    RemoveRam {
        /// Host virtual address of the block, as in `AddRam`.
        hva: u64,
    },
    /// Removes a page store; the library closes the store's file. Pages that were folded onto the
    /// store stay folded.
    RemoveStore {
        /// Number of the store, as in `AddStore`.
        store: u32,
    },
    /// Stops the VM until [`Order::Continue`] or the end of this connection, so that the VM also
    /// resumes if the daemon dies. The library refuses the order if the VM does not run.
    Stop,
    /// Resumes the VM that [`Order::Stop`] has stopped.
    Continue,
    /// Starts write tracking: `PAGEMAP_SCAN` shows which pages of RAM were written to, until
    /// [`Order::UntrackWrites`] or the end of this connection. The library folds nothing while it
    /// tracks writes. It refuses the order before Linux 6.7.
    TrackWrites,
    /// Ends [`Order::TrackWrites`].
    UntrackWrites,
    /// Starts a copy before write: before the VM writes to a page of the ranges or discards the
    /// page, the library copies its bytes into the file that comes with the order
    /// ([`crate::past`]). The copy ends with [`Order::ForgetPast`] or this connection. The order
    /// ends write tracking; the library folds nothing during the copy. The order works whether the
    /// VM runs or not, but the saved bytes are of one moment only if the VM is stopped when the
    /// copy starts.
    KeepPast {
        /// Ranges to copy, 1 to [`MAX_RUNS`], by ascending address.
        ranges: Vec<Range>,
    },
    /// Ends [`Order::KeepPast`].
    ForgetPast,
    /// Maps many ranges as [`Order::Map`] does, all of them views of the file that comes with the
    /// order. If one view cannot be mapped, the views before it stay mapped. A library that does
    /// not know this order ends the connection, so the daemon sends the order only to VMs that are
    /// being started.
    MapRuns {
        /// Views to map, 1 to [`MAX_RUNS`].
        runs: Vec<MapRun>,
    },
}

/// Outcome of one run or range of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The library did all of the run or range.
    Done,
    /// The bytes of page `folded` of the run differ from the store; the pages before it are folded.
    Differs {
        /// Pages folded from the start of the run.
        folded: u32,
    },
    /// The kernel refused to freeze a page (`EBUSY`: pinned by DMA or shared by fork). Pages before
    /// the refused page may be folded.
    Busy {
        /// Pages folded from the start of the run.
        folded: u32,
    },
    /// A page of the run is not in memory (a hole: balloon, never touched), or is no longer
    /// anonymous. Pages before this page may be folded.
    Hole {
        /// Pages folded from the start of the run.
        folded: u32,
    },
    /// The library did not start the run: the time of [`Freeze::Stopped`] or [`ORDER_TIME`] was
    /// over, or the VM did not run.
    Late,
    /// The run is invalid (outside RAM, unaligned, unknown store, beyond the store's end, wrong
    /// freeze for the kind of mapping). Nothing was changed.
    Refused,
    /// A system call failed. Pages after the first `folded` pages are unchanged.
    Failed {
        /// `errno` of the system call.
        errno: i32,
        /// Pages folded from the start of the run.
        folded: u32,
    },
}

impl Outcome {
    /// Returns the number of pages done in a run of `asked` pages.
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

    /// Returns this outcome with `folded` as the number of pages folded from the start.
    #[must_use]
    pub const fn at(self, folded: u32) -> Self {
        match self {
            Self::Done | Self::Refused | Self::Late => self,
            Self::Differs { .. } => Self::Differs { folded },
            Self::Busy { .. } => Self::Busy { folded },
            Self::Hole { .. } => Self::Hole { folded },
            Self::Failed { errno, .. } => Self::Failed { errno, folded },
        }
    }
}

/// Number of buckets of [`Stats::freeze_histogram`].
pub const HISTOGRAM_BUCKETS: usize = 24;

/// Counters of the library since it was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Anonymous pages that were folded.
    pub folded_pages: u64,
    /// Folded or template-mapped pages that were folded again.
    pub refolded_pages: u64,
    /// Anonymous pages that were discarded because they held only zeroes.
    pub zero_pages: u64,
    /// Folded pages that were released: replaced by anonymous memory with the same bytes.
    pub released_pages: u64,
    /// Runs that ended at a page whose bytes differed from the store.
    pub differing_pages: u64,
    /// Runs that stopped at a page that the kernel refused to freeze (DMA).
    pub busy_runs: u64,
    /// Folded pages that QEMU discarded (balloon, free page reporting).
    pub discarded_pages: u64,
    /// Histogram of the times for which runs were frozen: bucket i counts times of at least 2^i and
    /// less than 2^(i+1) nanoseconds; the last bucket also counts longer times.
    pub freeze_histogram: [u64; HISTOGRAM_BUCKETS],
    /// Longest time for which a run was frozen, in nanoseconds.
    pub freeze_max_ns: u64,
    /// CPU time of the library's thread in nanoseconds.
    pub thread_cpu_ns: u64,
}

/// Replies from the library to the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Reply to [`Order::Hello`].
    Hello {
        /// [`VERSION`] of the library.
        version: u16,
        /// Package version of the library.
        library: String,
        /// Whether [`Freeze::Move`] works on this host (Linux >= 6.8 and the right to catch
        /// kernel-mode faults).
        can_move: bool,
        /// Whether [`Freeze::WriteProtect`] works on this host.
        can_write_protect: bool,
        /// Whether [`Freeze::Stopped`] works: the library has a QMP connection of its own.
        can_stop: bool,
        /// Reason why folding cannot work, if it cannot: the failed condition, and the change that
        /// would fix it.
        problem: Option<String>,
    },
    /// Reply to an order that has no other reply (`AddRam`, `RemoveRam`, `AddStore`, `RemoveStore`,
    /// `Map`, `MapRuns`, `Stop`, `Continue`, `TrackWrites`, `UntrackWrites`, `KeepPast`,
    /// `ForgetPast`): the library did all of the order.
    Ok,
    /// Reply to `Fold` and `Release`.
    Outcomes {
        /// Outcomes, one for each run or range, in the order of the list.
        outcomes: Vec<Outcome>,
        /// CPU time of the library's thread for this order, in nanoseconds.
        cpu_ns: u64,
        /// Time for which the VM was stopped for this order, in nanoseconds; 0 if the VM was not
        /// stopped.
        stopped_ns: u64,
    },
    /// Reply to [`Order::DropZero`].
    Zero {
        /// Anonymous pages that the library examined.
        scanned: u64,
        /// Pages that held only zeroes and were discarded.
        dropped: u64,
        /// CPU time of the library's thread for this order, in nanoseconds.
        cpu_ns: u64,
    },
    /// Reply to [`Order::Stats`].
    Stats(Box<Stats>),
    /// The library refused the whole order.
    Error {
        /// Reason of the refusal: the condition that failed.
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
