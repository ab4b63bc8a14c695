//! Helpers for tests of memfold's library in QEMU: memory, a page store, and a simulated QEMU
//! monitor.
#![allow(dead_code)]

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use memfold_folder::Folder;
use memfold_sys::region::{Area, Mapping};
use memfold_units::PAGE_SIZE;
use memfold_wire::library::{
    Advice, FoldRun, Freeze, Order, Outcome, Range, Reply, Stats, VERSION,
};

pub const PAGE: usize = 4096;

/// Anonymous memory that serves as guest RAM, and a memfd that serves as a page store.
pub struct Bench {
    pub folder: &'static Folder,
    pub ram: Mapping,
    pub store: File,
    pub next: u64,
    pub number: u32,
}

impl Bench {
    /// Creates `pages` pages of RAM that `folder` knows, and an empty store with `number`. Returns
    /// `None`, and reports the reason, if this machine cannot fold.
    pub fn with(folder: &'static Folder, pages: u64, number: u32) -> Option<Self> {
        match folder.execute(&Order::Hello { version: VERSION }, None) {
            Reply::Hello { problem: None, .. } => {}
            Reply::Hello { problem, .. } => {
                return memfold_testkit::reports_skip(&problem.unwrap_or_default());
            }
            other => panic!("{other:?}"),
        }
        let ram = Mapping::anonymous(pages, true).unwrap();
        let store = new_store();
        let bench = Self {
            folder,
            ram,
            store,
            next: 0,
            number,
        };
        bench.add_ram(pages);
        bench.add_store();
        Some(bench)
    }

    pub fn add_ram(&self, pages: u64) {
        self.ok(
            &Order::AddRam {
                hva: self.hva(0),
                pages,
                advice: Advice {
                    dontfork: true,
                    noreserve: true,
                    ..Advice::default()
                },
            },
            None,
        );
    }

    fn add_store(&self) {
        let path = format!("/proc/self/fd/{}", self.store.as_raw_fd());
        let order = Order::AddStore {
            store: self.number,
            max_pages: 1 << 22,
        };
        self.ok(&order, Some(File::open(path).unwrap().into()));
    }

    /// Replaces the store by an empty one. The old store lives only as long as some of it is
    /// mapped.
    pub fn renew_store(&mut self) {
        self.replace_store(new_store());
    }

    /// Replaces the store by an empty file.
    pub fn replace_store(&mut self, file: File) {
        self.ok(&Order::RemoveStore { store: self.number }, None);
        self.store = file;
        self.number += 1;
        self.next = 0;
        self.add_store();
    }

    pub fn new(pages: u64) -> Option<Self> {
        Self::with(Box::leak(Box::new(Folder::new(None, None))), pages, 1)
    }

    pub fn hva(&self, page: u64) -> u64 {
        self.ram.area().start().0 + page * PAGE_SIZE
    }

    /// Returns RAM as words, for tests that read and write like a guest.
    pub fn words(&self) -> *mut u64 {
        std::ptr::with_exposed_provenance_mut(usize::try_from(self.hva(0)).unwrap())
    }

    pub fn ok(&self, order: &Order, descriptor: Option<OwnedFd>) {
        assert_eq!(
            self.folder.execute(order, descriptor),
            Reply::Ok,
            "{order:?}"
        );
    }

    /// Copies the present bytes of `count` pages of RAM to new pages of the store. Returns the
    /// first of these pages.
    pub fn publish(&mut self, page: u64, count: u64) -> u64 {
        let mut bytes = vec![0; usize::try_from(count).unwrap() * PAGE];
        memfold_sys::memory::read(
            rustix::process::getpid(),
            memfold_units::Hva(self.hva(page)),
            &mut bytes,
        )
        .unwrap();
        let at = self.next;
        self.next += count;
        self.store.write_all_at(&bytes, at * PAGE_SIZE).unwrap();
        at
    }

    pub fn run(&self, page: u64, pages: u32, store_page: u64) -> FoldRun {
        FoldRun {
            hva: self.hva(page),
            pages,
            store: self.number,
            store_page,
        }
    }

    pub fn fold(&self, freeze: Freeze, run: FoldRun) -> Outcome {
        let order = Order::Fold {
            freeze,
            runs: vec![run],
        };
        match self.folder.execute(&order, None) {
            Reply::Outcomes { outcomes, .. } => outcomes[0],
            other => panic!("{other:?}"),
        }
    }

    /// Folds a run, all of which must be folded.
    #[track_caller]
    pub fn assert_folds(&self, freeze: Freeze, run: FoldRun) {
        assert_eq!(self.fold(freeze, run), Outcome::Done);
    }

    pub fn release(&self, freeze: Freeze, page: u64, pages: u64) -> Outcome {
        let order = Order::Release {
            freeze,
            ranges: vec![self.range(page, pages)],
        };
        match self.folder.execute(&order, None) {
            Reply::Outcomes { outcomes, .. } => outcomes[0],
            other => panic!("{other:?}"),
        }
    }

    pub fn range(&self, page: u64, pages: u64) -> Range {
        Range {
            hva: self.hva(page),
            pages,
        }
    }

    pub fn drop_zero(&self, page: u64, pages: u64) -> (u64, u64) {
        let order = Order::DropZero {
            ranges: vec![self.range(page, pages)],
        };
        match self.folder.execute(&order, None) {
            Reply::Zero {
                scanned, dropped, ..
            } => (scanned, dropped),
            other => panic!("{other:?}"),
        }
    }

    pub fn stats(&self) -> Stats {
        match self.folder.execute(&Order::Stats, None) {
            Reply::Stats(stats) => *stats,
            other => panic!("{other:?}"),
        }
    }

    /// Fills all pages with words that differ from page to page.
    pub fn fill(&self, seed: u64) {
        let area = self.ram.area();
        for page in 0..area.pages() {
            area.part(page, 1).write(&pattern(seed, page));
        }
    }

    /// Returns the pages that do not have the bytes written by [`Self::fill`].
    pub fn wrong(&self, seed: u64, first: u64, count: u64) -> Vec<u64> {
        let expected = Mapping::anonymous(1, true).unwrap();
        (first..first + count)
            .filter(|&page| {
                expected.area().write(&pattern(seed, page));
                self.area(page, 1).equal_pages(expected.area()) == 0
            })
            .collect()
    }

    pub fn assert_holds(&self, seed: u64, first: u64, count: u64) {
        let wrong = self.wrong(seed, first, count);
        assert!(wrong.is_empty(), "wrong pages: {wrong:?}");
    }

    pub fn area(&self, page: u64, pages: u64) -> Area {
        self.ram.area().part(page, pages)
    }
}

fn new_store() -> File {
    let fd = rustix::fs::memfd_create("store", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let store = File::from(fd);
    store.set_len(1 << 34).unwrap();
    store
}

/// A QMP server that behaves like the monitor of a VM's QEMU. It records commands, and whether the
/// VM runs.
pub struct FakeQemu {
    pub path: PathBuf,
    pub commands: Arc<Mutex<Vec<String>>>,
    pub running: Arc<AtomicBool>,
    /// Number of connections that the fake monitor ends instead of answering the next `cont`.
    pub hang_ups: Arc<AtomicU32>,
    /// States that the next answers to `query-status` name, whatever the VM does.
    pub states: Arc<Mutex<VecDeque<&'static str>>>,
    /// State of the VM's migration.
    pub migration: Arc<Mutex<&'static str>>,
    _directory: tempfile::TempDir,
}

impl FakeQemu {
    pub fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let fake = Self {
            path: directory.path().join("qmp"),
            commands: Arc::default(),
            running: Arc::new(true.into()),
            hang_ups: Arc::default(),
            states: Arc::default(),
            migration: Arc::new(Mutex::new("none")),
            _directory: directory,
        };
        let listener = UnixListener::bind(&fake.path).unwrap();
        let (commands, running) = (fake.commands.clone(), fake.running.clone());
        let hang_ups = fake.hang_ups.clone();
        let (states, migration) = (fake.states.clone(), fake.migration.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                writeln!(stream, r#"{{"QMP": {{"version": {{}}}}}}"#).unwrap();
                for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                    let command: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
                    let id = command["id"].clone();
                    let command = command["execute"].as_str().unwrap().to_owned();
                    commands.lock().unwrap().push(command.clone());
                    let left = hang_ups.load(Ordering::SeqCst);
                    if command == "cont" && left > 0 {
                        hang_ups.store(left - 1, Ordering::SeqCst);
                        break;
                    }
                    let is_running = running.load(Ordering::SeqCst);
                    let now = if is_running { "running" } else { "paused" };
                    let answer = match command.as_str() {
                        "query-status" => {
                            let forced = states.lock().unwrap().pop_front();
                            format!(r#"{{"status": "{}"}}"#, forced.unwrap_or(now))
                        }
                        "query-migrate" => {
                            format!(r#"{{"status": "{}"}}"#, migration.lock().unwrap())
                        }
                        _ => "{}".to_owned(),
                    };
                    match command.as_str() {
                        "stop" => running.store(false, Ordering::SeqCst),
                        "cont" => running.store(true, Ordering::SeqCst),
                        _ => {}
                    }
                    writeln!(stream, r#"{{"event": "SOMETHING", "data": {{}}}}"#).unwrap();
                    writeln!(stream, r#"{{"return": {answer}, "id": {id}}}"#).unwrap();
                }
            }
        });
        fake
    }
}

pub fn pattern(seed: u64, page: u64) -> Vec<u64> {
    (0..512)
        .map(|word| (seed << 40 | page << 10 | word).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
        .collect()
}

pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 3
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}
