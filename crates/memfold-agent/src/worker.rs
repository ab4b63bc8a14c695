//! The agent's background thread. It finds all files in the guest's page cache (an inventory), and
//! walks directories to find the paths of files.

use std::cell::RefCell;
use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};

use rustix::fs::FileType;

use crate::files::Inode;
use crate::glob::Rules;
use crate::mounts::{Kind, Mount, Mounts, OVERLAY_DEVICE};
use crate::residency::{Residency, Run};
use crate::throttle::Throttle;
use crate::wake::Wake;
use crate::walk;

/// Most runs of cached pages in one finding.
const RUNS_A_FINDING: usize = 1024;
/// Weight of findings at which they are handed over to the main thread. A run weighs 1, a file 8.
const WEIGHT: usize = 1024;
/// Number of hand-overs that may wait for the main thread before the worker blocks.
const FINDINGS: usize = 4;

/// A job for the worker thread.
#[derive(Debug)]
pub enum Job {
    /// Reports all cached pages of the files that are on these mounts and that the rules allow.
    Inventory(Mounts, Rules),
    /// Finds the paths of these inodes on these mounts.
    Find(Mounts, HashSet<Inode>),
}

/// Result of a worker's job, or a part of the result.
#[derive(Debug)]
pub enum Finding {
    /// Cached pages of a file, found by an inventory. A file with many runs is reported in several
    /// parts.
    Cached {
        /// Device and inode number of the file.
        inode: Inode,
        /// Path of the file in the guest's root.
        path: Vec<u8>,
        /// Size of the file in bytes.
        size: u64,
        /// Runs of cached pages of the file.
        runs: Vec<Run>,
    },
    /// Number of cached pages of a file that the rules exclude.
    Excluded(u64),
    /// End of an inventory ([`Job::Inventory`]).
    InventoryDone {
        /// Number of files that the inventory examined.
        files: u64,
        /// Number of cached pages that the inventory found.
        pages: u64,
    },
    /// Inode, path and size in bytes of a file that [`Job::Find`] looked for.
    Path(Inode, Vec<u8>, u64),
    /// End of a search for paths ([`Job::Find`]).
    FindDone {
        /// Number of wanted files that the search did not find.
        missing: u64,
    },
}

/// Handle of the worker thread, with its channels.
#[derive(Debug)]
pub struct Worker {
    jobs: Sender<(u32, Job)>,
    findings: Receiver<(u32, Vec<Finding>)>,
    epoch: Arc<AtomicU32>,
    /// Descriptor that is readable when findings of the worker thread may be ready. Make it
    /// unreadable (`Wake::rest`) before calling [`Self::next`].
    pub wake: Arc<Wake>,
}

impl Worker {
    /// Starts the worker thread, which runs until this value is dropped.
    pub fn start() -> io::Result<Self> {
        let (jobs, to_do) = mpsc::channel();
        let (found, findings) = mpsc::sync_channel(FINDINGS);
        let epoch = Arc::new(AtomicU32::new(0));
        let wake = Arc::new(Wake::new()?);
        let mut thread = Thread {
            found,
            epoch: Arc::clone(&epoch),
            wake: Arc::clone(&wake),
            pending: RefCell::default(),
            now: 0,
        };
        std::thread::Builder::new()
            .name("inventory".into())
            .stack_size(256 << 10)
            .spawn(move || thread.run(&to_do))?;
        Ok(Self {
            jobs,
            findings,
            epoch,
            wake,
        })
    }

    /// Queues a job for the worker thread, after the jobs that were submitted before.
    pub fn submit(&self, job: Job) {
        let _ = self.jobs.send((self.epoch.load(Ordering::Relaxed), job));
    }

    /// Drops all jobs and findings, because the connection that they belong to is lost.
    pub fn cancel(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
        while self.findings.try_recv().is_ok() {}
    }

    /// Returns the next findings of the worker thread; `None` if there are none.
    pub fn next(&self) -> Option<Vec<Finding>> {
        loop {
            let (epoch, findings) = self.findings.try_recv().ok()?;
            if epoch == self.epoch.load(Ordering::Relaxed) {
                return Some(findings);
            }
        }
    }
}

struct Thread {
    found: SyncSender<(u32, Vec<Finding>)>,
    /// Findings that are not handed over yet, and their weight.
    pending: RefCell<(Vec<Finding>, usize)>,
    epoch: Arc<AtomicU32>,
    wake: Arc<Wake>,
    now: u32,
}

impl Thread {
    fn run(&mut self, jobs: &Receiver<(u32, Job)>) {
        while let Ok((epoch, job)) = jobs.recv() {
            self.now = epoch;
            self.pending.take();
            if !self.wanted() {
                continue;
            }
            match job {
                Job::Inventory(mounts, rules) => self.inventory(&mounts, &rules),
                Job::Find(mounts, wanted) => self.find(&mounts, wanted),
            }
        }
    }

    fn wanted(&self) -> bool {
        self.now == self.epoch.load(Ordering::Relaxed)
    }

    /// Queues a finding. Returns false if the job was cancelled. Findings are handed over in
    /// groups, because waking the main thread for each one would cost more than making it.
    fn send(&self, finding: Finding) -> bool {
        let (weight, last) = match &finding {
            Finding::Cached { runs, .. } => (8 + runs.len(), false),
            Finding::Excluded(_) => (1, false),
            Finding::Path(..) => (8, false),
            Finding::InventoryDone { .. } | Finding::FindDone { .. } => (1, true),
        };
        let mut pending = self.pending.borrow_mut();
        pending.0.push(finding);
        pending.1 += weight;
        if pending.1 < WEIGHT && !last {
            return self.wanted();
        }
        let (findings, _) = std::mem::take(&mut *pending);
        let sent = self.found.send((self.now, findings)).is_ok();
        self.wake.up();
        sent && self.wanted()
    }

    fn inventory(&self, mounts: &Mounts, rules: &Rules) {
        let mut throttle = Throttle::of_this_thread();
        let (mut files, mut pages) = (0, 0);
        // A file with several names is offered once.
        let mut seen = HashSet::new();
        if let Ok(mut residency) = Residency::new() {
            for mount in mounts.to_walk() {
                // A mount that cannot be opened was just unmounted.
                let _ = walk::cached_files(mount, |entry| {
                    throttle.step();
                    files += 1;
                    let Some(file) = entry.open() else {
                        return true;
                    };
                    let mut offer = Offer {
                        mount,
                        rules,
                        residency: &mut residency,
                        throttle: &mut throttle,
                        seen: &mut seen,
                        pages: &mut pages,
                    };
                    // An error concerns only this file.
                    self.offer(entry, &file, &mut offer).unwrap_or(true)
                });
            }
        }
        self.send(Finding::InventoryDone { files, pages });
    }

    fn offer(
        &self,
        entry: &walk::Entry<'_>,
        file: &OwnedFd,
        o: &mut Offer<'_>,
    ) -> io::Result<bool> {
        let quick = match o.mount.kind {
            Kind::Overlay => None,
            _ => o.residency.quick(file),
        };
        if quick == Some(0) {
            return Ok(true);
        }
        let stat = rustix::fs::fstat(file)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if size == 0 || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(true);
        }
        let inode = inode_on(o.mount.hint_device(), stat.st_ino);
        if stat.st_nlink > 1 && !o.seen.insert(inode) {
            return Ok(true);
        }
        let path = entry.path(o.mount);
        if !o.rules.allow(&path) {
            return Ok(quick.is_none_or(|cached| self.send(Finding::Excluded(cached))));
        }
        let mut runs = Vec::new();
        let mut go_on = true;
        let pages = size.div_ceil(memfold_units::PAGE_SIZE);
        let throttle = &mut *o.throttle;
        let mut flush = |runs: &mut Vec<Run>| {
            let runs = std::mem::take(runs);
            if runs.is_empty() {
                return true;
            }
            *o.pages += runs.iter().map(|r| u64::from(r.2)).sum::<u64>();
            let path = path.clone();
            self.send(Finding::Cached {
                inode,
                path,
                size,
                runs,
            })
        };
        let result = o.residency.runs(
            file,
            pages,
            || throttle.step(),
            |run| {
                runs.push(run);
                if runs.len() >= RUNS_A_FINDING {
                    go_on = flush(&mut runs);
                }
                go_on
            },
        );
        go_on = go_on && flush(&mut runs);
        result.map(|()| go_on)
    }

    fn find(&self, mounts: &Mounts, mut wanted: HashSet<Inode>) {
        let mut throttle = Throttle::of_this_thread();
        for mount in mounts.to_walk() {
            let device = mount.hint_device();
            if !wanted.iter().any(|(d, _)| *d == device) {
                continue;
            }
            // On these file systems, inode numbers in directories differ from those of stat, so
            // every cached file has to be opened.
            let ask_each = matches!(mount.kind, Kind::Packed | Kind::Overlay);
            let _ = walk::cached_files(mount, |entry| {
                throttle.step();
                if !ask_each && !wanted.contains(&(device, entry.inode)) {
                    return true;
                }
                let Some(stat) = entry.open().and_then(|f| rustix::fs::fstat(f).ok()) else {
                    return true;
                };
                let inode = inode_on(device, stat.st_ino);
                if !wanted.remove(&inode) {
                    return true;
                }
                let size = u64::try_from(stat.st_size).unwrap_or(0);
                self.send(Finding::Path(inode, entry.path(mount), size)) && !wanted.is_empty()
            });
        }
        self.send(Finding::FindDone {
            missing: wanted.len() as u64,
        });
    }
}

/// Arguments of [`Thread::offer`] that are the same for all files of a mount.
struct Offer<'a> {
    mount: &'a Mount,
    rules: &'a Rules,
    residency: &'a mut Residency,
    throttle: &'a mut Throttle,
    seen: &'a mut HashSet<Inode>,
    pages: &'a mut u64,
}

/// Returns device number and inode number of a file. On an overlay, the inode number's upper 32
/// bits are cleared: with `xino`, overlayfs stores the number of the layer's file system there
/// (Documentation/filesystems/overlayfs.rst).
pub fn inode_on(device: u32, inode: u64) -> Inode {
    let is_overlay = device == OVERLAY_DEVICE;
    (
        device,
        if is_overlay {
            inode & 0xffff_ffff
        } else {
            inode
        },
    )
}
