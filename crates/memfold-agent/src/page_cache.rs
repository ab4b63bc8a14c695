//! Tells the daemon which files the guest's page cache holds. For this, the module turns the
//! kernel's trace events about cached pages, and the paths that the worker thread finds, into
//! messages. It also keeps the number of each file, and what the daemon already knows about the
//! file.

use std::collections::{HashMap, HashSet};
use std::fs;

use memfold_units::PAGE_SIZE;
use memfold_wire::agent::{
    AgentCounters, FileFacts, FileRange, HintRun, MAX_PATH, MAX_RUN_PAGES, PfnRun,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::batch::Batch;
use crate::files::{Files, Inode};
use crate::glob::Rules;
use crate::mounts::{Kind, Mounts};
use crate::resolve::{Found, Resolver};
use crate::trace::{Event, UNNAMED_DISK, What};
use crate::worker::{Finding, inode_on};

/// Most files that wait for a walk to find their paths.
const MAX_WANTED: usize = 4096;

/// Most files that are looked up again in one round because they have grown.
const MAX_GROWN: usize = 64;

/// Number of walks that look for a file before the agent stops searching for its path.
const WALKS: u8 = 4;

/// What the agent reports of the guest's page cache in one connection to the daemon.
#[derive(Debug, Default)]
pub struct PageCache {
    /// Messages of this connection that are not sent yet.
    pub batch: Batch,
    /// Counters since the agent's start. The fields `cpu_us` and `rss_bytes` are zero here; they
    /// are filled in when the counters are sent.
    pub counters: AgentCounters,
    files: Files,
    /// Current table of the guest's mounts; [`Self::set_mounts`] replaces it.
    pub mounts: Mounts,
    /// Device numbers of the file systems on each disk, because writeback events name only the
    /// disk.
    disks: HashMap<u32, Vec<u32>>,
    /// Rules of the daemon for the files that the agent reports.
    pub rules: Rules,
    wanted: HashSet<Inode>,
    /// Files with cached pages beyond the size that was reported.
    grown: HashSet<Inode>,
    resolver: Resolver,
    last: Option<Last>,
    last_device: Option<(u32, Option<u32>)>,
}

/// The file of the last event. It is kept because consecutive events mostly concern one file.
#[derive(Clone, Copy, Debug)]
struct Last {
    inode: Inode,
    number: u32,
    allowed: bool,
    order: u8,
    /// Length of the file in pages, according to the size that was reported.
    known_pages: u64,
}

impl PageCache {
    /// Forgets everything that was reported, and sets the daemon's rules, for a new connection.
    pub fn reset(&mut self, rules: Rules) {
        self.batch = Batch::default();
        self.files = Files::default();
        self.wanted = HashSet::new();
        self.grown = HashSet::new();
        self.rules = rules;
        self.last = None;
    }

    /// Returns how many file numbers this session has used.
    pub fn numbers_used(&self) -> u32 {
        self.files.numbers_used()
    }

    /// Replaces the table of the guest's mounts, after a mount or unmount.
    pub fn set_mounts(&mut self, mounts: Mounts) {
        self.disks.clear();
        for mount in &mounts.list {
            let disk = match mount.kind {
                Kind::Btrfs | Kind::Overlay => UNNAMED_DISK,
                _ => disk_of(mount.device),
            };
            let devices = self.disks.entry(disk).or_default();
            if !devices.contains(&mount.hint_device()) {
                devices.push(mount.hint_device());
            }
        }
        self.resolver.close();
        self.mounts = mounts;
        self.last_device = None;
    }

    /// Returns and removes the files whose paths a directory walk has to find; `None` if there are
    /// none.
    pub fn take_wanted(&mut self) -> Option<HashSet<Inode>> {
        (!self.wanted.is_empty()).then(|| std::mem::take(&mut self.wanted))
    }

    /// Returns whether there are files whose paths a directory walk has to find.
    pub fn wants(&self) -> bool {
        !self.wanted.is_empty()
    }

    /// Turns the trace events that were read in one round into messages.
    pub fn events(&mut self, events: &[Event]) {
        self.files.tick();
        for event in events {
            match event.what {
                What::Add => self.add(event),
                What::Delete => {
                    if self.device(event.device).is_some() {
                        self.batch.gone(PfnRun {
                            pfn: event.pfn,
                            pages: 1 << event.order,
                        });
                    }
                }
                What::Dirty => self.dirty(event),
                What::Written => self.written(event),
            }
        }
    }

    /// Forgets which files were introduced to the daemon, because a dropped message may have
    /// introduced some of them. The files are introduced again when they are seen.
    pub fn forget_files(&mut self) {
        self.files.forget_all();
        self.last = None;
    }

    /// Ends a round of reading trace events: looks up files again that have grown, and closes all
    /// mount points so that they can be unmounted.
    pub fn end_round(&mut self) {
        // These files were looked up while they were being written, and writeback did not report
        // their full size. They are looked up once a round, because a growing file has a page
        // behind its known end in every event.
        for inode in std::mem::take(&mut self.grown) {
            self.look_again(inode);
        }
        self.resolver.close();
    }

    /// Looks up the path and size of a known file again.
    fn look_again(&mut self, inode: Inode) {
        match self.resolver.by_handle(&self.mounts, inode.0, inode.1) {
            Found::Unknown => self.want(inode, 1),
            found => self.news(inode, found),
        }
    }

    fn device(&mut self, event_device: u32) -> Option<u32> {
        match self.last_device {
            Some((from, to)) if from == event_device => to,
            _ => {
                let to = self.mounts.hint_device(event_device);
                self.last_device = Some((event_device, to));
                to
            }
        }
    }

    fn add(&mut self, event: &Event) {
        let Some(device) = self.device(event.device) else {
            return;
        };
        let inode = inode_on(device, event.inode);
        let file = match self.last {
            Some(last) if last.inode == inode && event.order <= last.order => last,
            _ => self.file(inode, event.order),
        };
        self.last = Some(file);
        let pages = 1_u32 << event.order;
        if event.page >= file.known_pages && self.grown.len() < MAX_GROWN {
            self.grown.insert(inode);
        }
        if file.allowed {
            self.batch.hint(HintRun {
                file: file.number,
                page: event.page,
                pfn: event.pfn,
                pages,
            });
        } else {
            self.counters.pages_excluded += u64::from(pages);
        }
    }

    /// Looks a file up in the table, and introduces it to the daemon if it is new.
    fn file(&mut self, inode: Inode, order: u8) -> Last {
        let (entry, new) = self.files.entry(inode);
        entry.order = entry.order.max(order);
        let walks = entry.walks;
        if new {
            let found = self.resolver.by_handle(&self.mounts, inode.0, inode.1);
            if found == Found::Unknown {
                self.want(inode, WALKS);
            }
            self.introduce(inode, found);
        } else if walks > 0 {
            self.want(inode, walks);
        }
        let (entry, _) = self.files.entry(inode);
        Last {
            inode,
            number: entry.number,
            allowed: entry.allowed,
            order: entry.order,
            known_pages: match entry.path_hash {
                0 => u64::MAX,
                _ => entry.size.div_ceil(PAGE_SIZE),
            },
        }
    }

    /// Queues a file for the next walk, if there is space. `walks`: number of walks that may still
    /// look for the file.
    fn want(&mut self, inode: Inode, walks: u8) {
        if self.wanted.len() < MAX_WANTED && self.wanted.insert(inode) {
            let (entry, _) = self.files.entry(inode);
            entry.walks = walks - 1;
        }
    }

    /// Reports path and size of a file, whatever was reported before.
    fn introduce(&mut self, inode: Inode, found: Found) {
        let (path, size) = match found {
            Found::Path(path, size) if path.len() <= MAX_PATH => (path, size),
            Found::Path(..) | Found::Nameless => {
                self.counters.files_unresolved += 1;
                (Vec::new(), 0)
            }
            Found::Unknown => (Vec::new(), 0),
        };
        let hash = if path.is_empty() {
            0
        } else {
            xxh3_64(&path) | 1
        };
        let (entry, _) = self.files.entry(inode);
        if entry.path_hash == 0 && hash != 0 {
            self.counters.files_resolved += 1;
        }
        (entry.path_hash, entry.size) = (hash, size);
        if hash != 0 {
            entry.walks = 0;
        }
        entry.allowed = self.rules.allow(&path);
        let number = entry.number;
        self.last = self.last.filter(|l| l.inode != inode);
        self.batch.file(FileFacts {
            file: number,
            path,
            size_bytes: size,
        });
    }

    /// Returns the files that a writeback event may mean.
    fn candidates(&self, event: &Event) -> Vec<Inode> {
        let unnamed = || self.disks.get(&UNNAMED_DISK);
        let devices = self.disks.get(&event.device).or_else(unnamed);
        let devices = devices.into_iter().flatten();
        devices
            .map(|device| inode_on(*device, event.inode))
            .collect()
    }

    fn dirty(&mut self, event: &Event) {
        for inode in self.candidates(event) {
            let Some(entry) = self.files.get(inode) else {
                continue;
            };
            // The event names the first page of a folio and not its size. A folio is aligned to its
            // size, and is no larger than any folio seen before.
            let order = u32::from(entry.order).min(event.page.trailing_zeros());
            let pages = 1_u32 << order;
            if entry.mark_dirty(event.page, event.page.saturating_add(pages.into()))
                && entry.allowed
            {
                let file = entry.number;
                self.batch.dirty(FileRange {
                    file,
                    page: event.page,
                    pages,
                });
            }
        }
    }

    fn written(&mut self, event: &Event) {
        for inode in self.candidates(event) {
            let Some(entry) = self.files.get(inode).filter(|e| e.is_dirty()) else {
                continue;
            };
            let (file, allowed) = (entry.number, entry.allowed);
            let ranges = entry.take_dirty();
            // The file may have been renamed to its final name, and may have grown.
            self.look_again(inode);
            for (start, end) in ranges.into_iter().filter(|_| allowed) {
                let mut page = start;
                while page < end {
                    let pages = u32::try_from(end - page)
                        .unwrap_or(u32::MAX)
                        .min(MAX_RUN_PAGES);
                    self.batch.clean(FileRange { file, page, pages });
                    page += u64::from(pages);
                }
            }
        }
    }

    /// Reports path and size of a known file if one of them has changed, or was never reported.
    fn news(&mut self, inode: Inode, found: Found) {
        let Found::Path(path, size) = &found else {
            return;
        };
        let hash = xxh3_64(path) | 1;
        let known = self.files.get(inode);
        if known.is_none_or(|e| (e.path_hash, e.size) != (hash, *size)) {
            self.introduce(inode, found);
        }
    }

    /// Turns a finding of the worker thread into messages and counts. (The main loop handles the
    /// ends of jobs.)
    pub fn finding(&mut self, finding: Finding) {
        match finding {
            Finding::Cached {
                inode,
                path,
                size,
                runs,
            } => {
                self.files.entry(inode);
                self.news(inode, Found::Path(path, size));
                let (entry, _) = self.files.entry(inode);
                let file = entry.number;
                for (page, pfn, pages) in runs {
                    self.batch.hint(HintRun {
                        file,
                        page,
                        pfn,
                        pages,
                    });
                }
            }
            Finding::Excluded(pages) => self.counters.pages_excluded += pages,
            Finding::Path(inode, path, size) => self.news(inode, Found::Path(path, size)),
            Finding::FindDone { missing } => self.counters.files_unresolved += missing,
            Finding::InventoryDone { .. } => {}
        }
    }
}

/// Returns the device number of a partition's disk; for other devices, the number itself.
fn disk_of(device: u32) -> u32 {
    let (major, minor) = (device >> 20, device & ((1 << 20) - 1));
    let link = format!("/sys/dev/block/{major}:{minor}");
    let parent = || {
        fs::metadata(format!("{link}/partition")).ok()?;
        let text = fs::read_to_string(format!("{link}/../dev")).ok()?;
        let (major, minor) = text.trim().split_once(':')?;
        Some(major.parse::<u32>().ok()? << 20 | minor.parse::<u32>().ok()?)
    };
    parent().unwrap_or(device)
}
