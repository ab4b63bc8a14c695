//! Protocol between the daemon and memfold's library in QEMU, which changes mappings of guest RAM.
//!
//! The library listens on a Unix stream socket and serves one daemon at a time; a second connection
//! waits until the first ends. The daemon sends one [`Order`] at a time and waits for its
//! [`Reply`]. If an order has a file descriptor, the daemon sends the descriptor with the order
//! (`SCM_RIGHTS`). The library makes no decisions. A new daemon reads all mappings from the kernel
//! (`/proc/PID/maps`).
//!
//! To *fold* a run of RAM pages is to replace the run by a private mapping of the same bytes in a
//! *page store*, a file whose pages many VMs map.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::frame::{FrameError, Validate};

/// Version of the protocol between the daemon and the library in QEMU. The library refuses a daemon
/// with another version.
pub const VERSION: u16 = 4;

/// Environment variable of QEMU with the path of the socket on which the library listens. The
/// library does nothing if the variable is not set.
pub const SOCKET_VARIABLE: &str = "MEMFOLD_QEMU_SOCKET";

/// Environment variable of QEMU that gives the library a QMP connection of its own, by which the
/// library stops the VM for [`Freeze::Stopped`]. The value is a socket's path, or the descriptor
/// number of a socket whose other end is a QEMU monitor. If the variable is not set, the library
/// refuses orders with [`Freeze::Stopped`].
pub const MONITOR_VARIABLE: &str = "MEMFOLD_QEMU_MONITOR";

/// Maximum number of runs or ranges in one order to the library.
pub const MAX_RUNS: usize = 1024;

/// Maximum length in pages of a run to fold or a range to release. The limit bounds the time that a
/// vCPU may wait for a frozen page.
pub const MAX_RUN_PAGES: u32 = 512;

/// Maximum number of RAM blocks of a VM: 256 memory slots, and devices with memory of their own.
pub const MAX_BLOCKS: usize = 512;

/// Maximum number of page stores of a VM.
pub const MAX_STORES: usize = 64;

/// Maximum of `limit_us` in [`Freeze::Stopped`], in microseconds: one second.
pub const MAX_STOP_US: u32 = 1_000_000;

/// Time after which the library starts no further run of an order, because the daemon waits for a
/// reply only for a limited time. On a host without a free core, one run takes milliseconds.
pub const ORDER_TIME: Duration = Duration::from_secs(1);

/// `madvise` advice that QEMU gave a RAM block (from `VmFlags` in `/proc/PID/smaps`). A mapping
/// that replaces a part of the block needs the same advice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools)]
pub struct Advice {
    /// Whether QEMU gave the block `MADV_MERGEABLE` (`mg` in `VmFlags`).
    pub mergeable: bool,
    /// Whether QEMU gave the block `MADV_HUGEPAGE` (`hg` in `VmFlags`).
    pub hugepage: bool,
    /// Whether QEMU gave the block `MADV_NOHUGEPAGE` (`nh` in `VmFlags`).
    pub nohugepage: bool,
    /// Whether QEMU gave the block `MADV_DONTFORK` (`dc` in `VmFlags`).
    pub dontfork: bool,
    /// Whether QEMU gave the block `MADV_DONTDUMP` (`dd` in `VmFlags`).
    pub dontdump: bool,
    /// Whether QEMU mapped the block with `MAP_NORESERVE` (`nr` in `VmFlags`).
    pub noreserve: bool,
}

/// Method by which the library keeps a run of pages from changing while it compares them with the
/// page store and replaces them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Freeze {
    /// Moves the pages to a staging area (`UFFDIO_MOVE`), for anonymous memory. A move is safe with
    /// DMA, because the kernel refuses to move pinned pages. VMs with direct I/O that does not pin
    /// pages (NFS, for example) are not folded.
    Move,
    /// Write-protects the pages (`UFFDIO_WRITEPROTECT`), for ranges that were folded before.
    /// Allowed only if no block node of the VM uses direct I/O.
    WriteProtect,
    /// Stops the VM by QMP for this order, so that vCPUs and I/O are at rest. The library resumes
    /// the VM even if the daemon dies. If the VM does not run, the library does nothing, and each
    /// outcome is [`Outcome::Late`].
    Stopped {
        /// Time in microseconds, counted from the stop, after which the library starts no further
        /// run; at most [`MAX_STOP_US`]. The VM is stopped for longer, because QEMU also needs time
        /// to stop (it drains I/O) and to resume.
        limit_us: u32,
    },
}

impl Freeze {
    const fn is_short(self) -> bool {
        !matches!(self, Self::Stopped { limit_us } if limit_us > MAX_STOP_US)
    }
}

/// Run of RAM pages to fold, and the pages of a page store that have the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoldRun {
    /// Host virtual address of the run in QEMU; page-aligned, inside one RAM block.
    pub hva: u64,
    /// Length of the run in pages, 1 to [`MAX_RUN_PAGES`].
    pub pages: u32,
    /// Number of the page store that has the run's bytes, from [`Order::AddStore`].
    pub store: u32,
    /// Index in the page store of the page with the bytes of the run's first page: file offset
    /// divided by 4096.
    pub store_page: u64,
}

/// Range of guest RAM in QEMU's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// Host virtual address of the range in QEMU; page-aligned, inside one RAM block.
    pub hva: u64,
    /// Length of the range in pages.
    pub pages: u64,
}

/// Range of guest RAM, and the part of a file to map there, for [`Order::MapRuns`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapRun {
    /// Host virtual address of the range in QEMU; page-aligned, inside one RAM block.
    pub hva: u64,
    /// Length of the range in pages.
    pub pages: u64,
    /// Index in the file of the page to map at the start of the range: file offset divided by 4096.
    pub file_page: u64,
}

/// Orders from the daemon to the library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// First order on a connection: the daemon tells the library its version. An open
    /// `/dev/userfaultfd` may come with the order, for a QEMU that may not open the device itself.
    Hello {
        /// [`VERSION`] of the daemon.
        version: u16,
    },
    /// Adds a block of guest RAM, which the daemon may fold from now on.
    AddRam {
        /// Host virtual address of the RAM block in QEMU.
        hva: u64,
        /// Length of the RAM block in pages.
        pages: u64,
        /// `madvise` advice that the library repeats for mappings that replace parts of the block.
        advice: Advice,
    },
    /// Adds a page store, whose read-only descriptor comes with the order. If the number is in use
    /// for another file (device and inode), the library refuses the order; for the same file, it
    /// takes the new descriptor.
    AddStore {
        /// Number by which [`FoldRun::store`] names the page store, chosen by the daemon.
        store: u32,
        /// Maximum number of pages that the page store may ever have. The library refuses to fold
        /// onto later pages.
        max_pages: u64,
    },
    /// Folds the runs, in the order of the list.
    Fold {
        /// Method by which the library freezes each run.
        freeze: Freeze,
        /// Runs to fold, at most [`MAX_RUNS`].
        runs: Vec<FoldRun>,
    },
    /// Replaces folded ranges by anonymous memory with the same bytes.
    Release {
        /// Method by which the library freezes each range; [`Freeze::Move`] is refused.
        freeze: Freeze,
        /// Folded ranges to release, at most [`MAX_RUNS`], each of at most [`MAX_RUN_PAGES`] pages.
        ranges: Vec<Range>,
    },
    /// Discards anonymous pages that hold only zeroes. The order takes at most [`ORDER_TIME`].
    DropZero {
        /// Ranges to search, at most [`MAX_RUNS`], each of at most 2^18 pages.
        ranges: Vec<Range>,
    },
    /// Maps a private view of a file over a range, and replaces any mapping there. The file, such
    /// as a snapshot's RAM image, comes with the order. Allowed only before the VM runs, or if the
    /// file has the same bytes as the range and nobody writes to the range (QEMU's copy of a
    /// kernel).
    Map {
        /// Host virtual address of the range in QEMU; page-aligned, inside one RAM block.
        hva: u64,
        /// Length of the range in pages.
        pages: u64,
        /// Index in the file of the page to map at the start of the range: file offset divided
        /// by 4096.
        file_page: u64,
    },
    /// Asks for the library's counters, which the library keeps since it was loaded.
    Stats,
    /// Removes a RAM block, because the block was unplugged or may no longer be folded. Folded
    /// pages of the block stay folded.
    RemoveRam {
        /// Host virtual address of the RAM block, as in `AddRam`.
        hva: u64,
    },
    /// Removes a page store; the library closes the store's file. Pages that were folded onto the
    /// store stay folded.
    RemoveStore {
        /// Number of the page store, as in `AddStore`.
        store: u32,
    },
    /// Stops the VM until [`Order::Continue`] or the end of this connection; so the VM resumes even
    /// if the daemon dies. The library refuses the order if the VM does not run.
    Stop,
    /// Resumes the VM that [`Order::Stop`] has stopped.
    Continue,
    /// Starts write tracking: until [`Order::UntrackWrites`] or the end of this connection,
    /// `PAGEMAP_SCAN` shows which pages of RAM the VM has written to. The library folds nothing
    /// while it tracks writes. It refuses the order before Linux 6.7.
    TrackWrites,
    /// Ends [`Order::TrackWrites`].
    UntrackWrites,
    /// Starts a copy before write: before the VM writes to a page of the ranges or discards the
    /// page, the library copies the page's bytes into the file that comes with the order
    /// ([`crate::past`]). The copy ends with [`Order::ForgetPast`] or this connection. The order
    /// ends write tracking; the library folds nothing during the copy. The order works whether the
    /// VM runs or not, but the saved bytes are of one moment only if the VM is stopped when the
    /// copy starts.
    KeepPast {
        /// Ranges whose old bytes are copied, 1 to [`MAX_RUNS`], by ascending address.
        ranges: Vec<Range>,
    },
    /// Ends [`Order::KeepPast`].
    ForgetPast,
    /// Maps many ranges, each as [`Order::Map`] does, to parts of the one file that comes with the
    /// order. If one range cannot be mapped, the ranges before it stay mapped. A library that does
    /// not know this order ends the connection, so the daemon sends the order only to VMs that are
    /// being started.
    MapRuns {
        /// Ranges to map, 1 to [`MAX_RUNS`].
        runs: Vec<MapRun>,
    },
    /// Makes each access to the ranges wait until the pages have arrived on this host: the VM runs
    /// while its snapshot is being fetched. A connected Unix stream socket comes with the order. On
    /// it the library sends [`Awaited`], and the daemon sends [`Arrived`]. Until all pages have
    /// arrived, the library refuses all orders that change mappings. Ranges are allowed only before
    /// the VM runs. Without ranges, the socket takes the place of that of an earlier daemon, and
    /// the library repeats what it wants.
    Await {
        /// Ranges of which no page is in memory, at most [`MAX_RUNS`].
        ranges: Vec<Range>,
    },
}

/// Message from the library on the socket of [`Order::Await`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Awaited {
    /// A thread of QEMU waits for a page.
    Wanted {
        /// Host virtual address of the page in QEMU; page-aligned.
        hva: u64,
    },
    /// All pages have arrived and are mapped.
    Complete,
}

/// Message from the daemon on the socket of [`Order::Await`], with a read-only descriptor of the
/// file: pages have arrived. The library maps them as [`Order::MapRuns`] does, except pages for
/// which it does not wait.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arrived {
    /// Ranges that have arrived, 1 to [`MAX_RUNS`].
    pub runs: Vec<MapRun>,
}

impl Validate for Awaited {
    fn validate(&self) -> Result<(), FrameError> {
        match self {
            Self::Wanted { hva } => limit(hva % 4096 == 0, "an address inside a page"),
            Self::Complete => Ok(()),
        }
    }
}

impl Validate for Arrived {
    fn validate(&self) -> Result<(), FrameError> {
        limit(
            (1..=MAX_RUNS).contains(&self.runs.len()),
            "no run or more than 1024 that have arrived",
        )
    }
}

/// Outcome of one run or range of an order. `folded` counts the pages that were folded or released,
/// from the start of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The library folded or released all pages of the run.
    Done,
    /// Page number `folded` of the run (from 0) has other bytes than the page store. The pages
    /// before that page are folded.
    Differs {
        /// Number of pages that were folded, from the start of the run.
        folded: u32,
    },
    /// The kernel refused to freeze a page (`EBUSY`), because the page is pinned by DMA or shared
    /// by fork. Pages before that page may be folded.
    Busy {
        /// Number of pages that were folded, from the start of the run.
        folded: u32,
    },
    /// A page of the run is not in memory (ballooned, or never touched), or is no longer anonymous.
    /// Pages before that page may be folded.
    Hole {
        /// Number of pages that were folded, from the start of the run.
        folded: u32,
    },
    /// The library did not start the run, because the time of [`Freeze::Stopped`] or [`ORDER_TIME`]
    /// was over, or because the VM did not run.
    Late,
    /// The run is invalid, and nothing was changed: it is outside RAM, unaligned, beyond the
    /// store's end, of an unknown store, or its kind of mapping needs another freeze.
    Refused,
    /// A system call failed. Pages after the first `folded` pages of the run are unchanged.
    Failed {
        /// `errno` of the failed system call.
        errno: i32,
        /// Number of pages that were folded or released, from the start of the run.
        folded: u32,
    },
}

impl Outcome {
    /// Returns the number of pages that were folded or released in a run of `asked` pages, 0 to
    /// `asked`.
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

    /// Returns this outcome with another number of folded pages. Outcomes without such a number
    /// stay as they are.
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

/// Number of buckets of the histogram [`Stats::freeze_histogram`].
pub const HISTOGRAM_BUCKETS: usize = 24;

/// Counters of the library in one QEMU since the library was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Number of anonymous pages that were folded.
    pub folded_pages: u64,
    /// Number of folds of pages that were not anonymous: the pages were folded before, or mapped by
    /// [`Order::Map`].
    pub refolded_pages: u64,
    /// Number of anonymous pages that were discarded because they held only zeroes.
    pub zero_pages: u64,
    /// Number of folded pages that were released: replaced by anonymous memory with the same bytes.
    pub released_pages: u64,
    /// Number of runs that ended at a page whose bytes differed from the page store.
    pub differing_pages: u64,
    /// Number of runs that ended at a page that the kernel refused to freeze (DMA).
    pub busy_runs: u64,
    /// Number of folded pages that QEMU discarded (balloon, free page reporting).
    pub discarded_pages: u64,
    /// Histogram of the times for which runs were frozen: bucket i counts times of at least 2^i and
    /// less than 2^(i+1) nanoseconds; the last bucket also counts longer times.
    pub freeze_histogram: [u64; HISTOGRAM_BUCKETS],
    /// Longest time for which one run was frozen, in nanoseconds.
    pub freeze_max_ns: u64,
    /// CPU time of the library's thread since its start, in nanoseconds.
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
        /// Whether [`Freeze::Stopped`] works on this VM: the library has a QMP connection of its
        /// own.
        can_stop: bool,
        /// Reason why the library cannot fold: the failed condition, and the change that would fix
        /// it. `None` if folding works.
        problem: Option<String>,
    },
    /// Reply to an order that has no other reply (`AddRam`, `RemoveRam`, `AddStore`, `RemoveStore`,
    /// `Map`, `MapRuns`, `Await`, `Stop`, `Continue`, `TrackWrites`, `UntrackWrites`, `KeepPast`,
    /// `ForgetPast`): the library did all of the order.
    Ok,
    /// Reply to [`Order::Fold`] and [`Order::Release`].
    Outcomes {
        /// One outcome for each run or range, sorted like the list in the order.
        outcomes: Vec<Outcome>,
        /// CPU time of the library's thread for this order, in nanoseconds.
        cpu_ns: u64,
        /// Time for which the VM was stopped for this order, in nanoseconds; 0 if the VM was not
        /// stopped.
        stopped_ns: u64,
    },
    /// Reply to [`Order::DropZero`].
    Zero {
        /// Number of anonymous pages that the library examined.
        scanned: u64,
        /// Number of pages that held only zeroes and were discarded.
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

impl Reply {
    /// Limits the times that the reply names to `took_ns`, the time that the order took in
    /// nanoseconds: a guest may control its library, and these times are charged to all VMs.
    #[must_use]
    pub fn with_times_within(mut self, took_ns: u64) -> Self {
        match &mut self {
            Self::Outcomes {
                cpu_ns, stopped_ns, ..
            } => {
                *cpu_ns = took_ns.min(*cpu_ns);
                *stopped_ns = took_ns.min(*stopped_ns);
            }
            Self::Zero { cpu_ns, .. } => *cpu_ns = took_ns.min(*cpu_ns),
            Self::Hello { .. } | Self::Ok | Self::Stats(_) | Self::Error { .. } => {}
        }
        self
    }
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
            Self::Await { ranges } => limit(
                ranges.len() <= MAX_RUNS,
                "more than 1024 ranges in an order",
            ),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_names_no_longer_times_than_its_order_took() {
        let outcomes = Reply::Outcomes {
            outcomes: Vec::new(),
            cpu_ns: u64::MAX,
            stopped_ns: 5,
        };
        match outcomes.with_times_within(7) {
            Reply::Outcomes {
                cpu_ns, stopped_ns, ..
            } => assert_eq!((cpu_ns, stopped_ns), (7, 5)),
            other => panic!("{other:?}"),
        }
        let zero = Reply::Zero {
            scanned: 1,
            dropped: 1,
            cpu_ns: u64::MAX,
        };
        assert!(matches!(
            zero.with_times_within(7),
            Reply::Zero { cpu_ns: 7, .. }
        ));
    }
}
