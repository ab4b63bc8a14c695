//! Test harness for the fold engine: VMs whose RAM is a buffer of the test's process, and an engine
//! that folds them.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use memfold_fold::{
    Command, Engine, EngineSettings, EngineStats, Guest, GuestError, Refold, VmId, VmStats,
};
use memfold_folder::Folder;
use memfold_sys::pagemap::Pagemap;
use memfold_testkit::wait_for;
use memfold_units::Hva;
use memfold_vm::RamLayout;
use memfold_wire::agent::{FileFacts, FromAgent, HintRun};
use memfold_wire::library::{Advice, Freeze, MapRun, Order, Outcome, Reply, VERSION};
use rustix::process::Pid;

pub const PAGE: usize = 4096;
pub const RAM_PAGES: usize = 4096;

pub struct InProcess {
    folder: Arc<Folder>,
    live: bool,
    busy: Arc<AtomicBool>,
    pauses: Arc<AtomicU32>,
    slow_stop: Option<SlowStop>,
    lost: Arc<AtomicBool>,
}

/// A QEMU whose disks are so slow that the time of a stop suffices for no run.
#[derive(Clone, Copy)]
pub struct SlowStop {
    /// Duration of each stop.
    pub takes: Duration,
    /// Whether QEMU answers so late that the library refuses the order.
    pub is_refused: bool,
}

impl SlowStop {
    fn reply(self, runs: usize) -> Reply {
        std::thread::sleep(self.takes);
        if self.is_refused {
            let reason = "QEMU did not stop the VM".to_owned();
            return Reply::Error { reason };
        }
        Reply::Outcomes {
            outcomes: vec![Outcome::Late; runs],
            cpu_ns: 0,
            stopped_ns: u64::try_from(self.takes.as_nanos()).unwrap(),
        }
    }
}

impl Guest for InProcess {
    fn pid(&self) -> Pid {
        rustix::process::getpid()
    }

    fn order(
        &mut self,
        order: &Order,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Reply, GuestError> {
        if self.lost.load(Ordering::SeqCst) {
            let error = std::io::Error::from(std::io::ErrorKind::TimedOut);
            return Err(GuestError::Library(error));
        }
        let descriptor: Option<OwnedFd> =
            descriptor.map(|fd| fd.as_fd().try_clone_to_owned().unwrap());
        // Nothing runs in this VM between two steps of a test, so write protection can replace a
        // stop.
        let Order::Fold {
            freeze: Freeze::Stopped { limit_us },
            runs,
        } = order
        else {
            return Ok(self.folder.execute(order, descriptor));
        };
        assert!(*limit_us > 0);
        self.pauses.fetch_add(1, Ordering::SeqCst);
        if let Some(slow) = self.slow_stop {
            return Ok(slow.reply(runs.len()));
        }
        let order = Order::Fold {
            freeze: Freeze::WriteProtect,
            runs: runs.clone(),
        };
        let mut reply = self.folder.execute(&order, descriptor);
        if let Reply::Outcomes { stopped_ns, .. } = &mut reply {
            *stopped_ns = 1;
        }
        Ok(reply)
    }

    fn refold(&mut self) -> Refold {
        if self.busy.load(Ordering::SeqCst) {
            Refold::Unknown
        } else if self.live {
            Refold::Live
        } else {
            Refold::Stopped
        }
    }

    fn can_stop(&self) -> bool {
        true
    }
}

/// A page-aligned buffer that serves as a VM's RAM. The buffer is never freed, because folding
/// replaces its mappings, and the allocator would give memory that maps a store to the next test.
pub struct Ram {
    buffer: &'static mut [u8],
    skip: usize,
    pub folder: Arc<Folder>,
    pub pauses: Arc<AtomicU32>,
    /// `None` if stops of the VM take no time. VMs that are added later use it.
    pub slow_stop: Option<SlowStop>,
    /// Whether QEMU's monitor counts as busy, so that the way to fold again is unknown.
    pub busy: Arc<AtomicBool>,
    /// Whether the connection to memfold's library in the VM counts as broken, so that orders fail.
    pub lost: Arc<AtomicBool>,
}

impl Ram {
    pub fn new() -> Self {
        let buffer = vec![0; (RAM_PAGES + 1) * PAGE].leak();
        let skip = buffer.as_ptr().align_offset(PAGE);
        let folder = Arc::new(Folder::new(None, None));
        assert!(matches!(
            folder.execute(&Order::Hello { version: VERSION }, None),
            Reply::Hello { problem: None, .. }
        ));
        Self {
            buffer,
            skip,
            folder,
            pauses: Arc::default(),
            slow_stop: None,
            busy: Arc::default(),
            lost: Arc::default(),
        }
    }

    pub fn guest(&self, live: bool) -> InProcess {
        InProcess {
            folder: self.folder.clone(),
            live,
            busy: self.busy.clone(),
            pauses: self.pauses.clone(),
            slow_stop: self.slow_stop,
            lost: self.lost.clone(),
        }
    }

    /// Creates RAM that is a private mapping of `image`, like the RAM of a VM that runs from a
    /// snapshot.
    pub fn of_image(image: &File) -> Self {
        let ram = Self::new();
        let (hva, pages) = (ram.hva().0, RAM_PAGES as u64);
        let add = Order::AddRam {
            hva,
            pages,
            advice: Advice::default(),
        };
        let map = Order::Map {
            hva,
            pages,
            file_page: 0,
        };
        assert_eq!(ram.folder.execute(&add, None), Reply::Ok);
        let descriptor = image.as_fd().try_clone_to_owned().unwrap();
        assert_eq!(ram.folder.execute(&map, Some(descriptor)), Reply::Ok);
        ram
    }

    /// Maps pages of the file `disk` over the image, as in a VM whose snapshot refers to blocks of
    /// its disk.
    pub fn map_disk(&self, pages: std::ops::Range<u64>, disk: &File) {
        let run = MapRun {
            hva: self.hva().add_pages(pages.start).0,
            pages: pages.end - pages.start,
            file_page: pages.start,
        };
        let map = Order::MapRuns { runs: vec![run] };
        let descriptor = disk.as_fd().try_clone_to_owned().unwrap();
        assert_eq!(self.folder.execute(&map, Some(descriptor)), Reply::Ok);
    }

    pub fn hva(&self) -> Hva {
        Hva(self.buffer[self.skip..].as_ptr().expose_provenance() as u64)
    }

    pub fn page(&mut self, at: usize) -> &mut [u8] {
        &mut self.buffer[self.skip + at * PAGE..][..PAGE]
    }

    pub fn fill(&mut self, at: usize, pages: usize, seed: u64) {
        for page in 0..pages {
            let bytes = pattern(seed, page);
            self.page(at + page).copy_from_slice(&bytes);
        }
    }

    /// Fills page `at` of the RAM with the bytes of page `at` of the test file with number `seed`.
    pub fn fill_page(&mut self, at: usize, seed: u64) {
        let bytes = pattern(seed, at);
        self.page(at).copy_from_slice(&bytes);
    }

    pub fn holds(&mut self, at: usize, pages: usize, seed: u64) -> bool {
        (0..pages).all(|page| self.page(at + page) == pattern(seed, page))
    }

    pub fn layout(&self) -> RamLayout {
        RamLayout::one_block(self.hva(), RAM_PAGES as u64)
    }

    pub fn frames(&self, at: usize, pages: usize) -> Vec<Option<u64>> {
        let map = Pagemap::open(rustix::process::getpid()).unwrap();
        map.frames(self.hva().add_pages(at as u64), pages).unwrap()
    }
}

/// Returns the bytes of page `page` of the test file with number `seed`. Any two pages of any two
/// files differ.
pub fn pattern(seed: u64, page: usize) -> Vec<u8> {
    let mut state = (seed << 32 | page as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..PAGE / 8)
        .flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        })
        .collect()
}

pub struct Running {
    pub commands: SyncSender<Command>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Running {
    pub fn start() -> Self {
        Self::start_with(&EngineSettings::default())
    }

    pub fn start_with(settings: &EngineSettings) -> Self {
        // With --nocapture, the log shows why the engine refuses something. The first test of the
        // process sets the subscriber.
        let _ = tracing_subscriber::fmt().with_test_writer().try_init();
        let settings = EngineSettings {
            cpu_share: 1.0,
            settle: Duration::from_millis(50),
            sync_interval: Duration::from_millis(100),
            pause_interval: Duration::from_millis(100),
            drop_zero: false,
            ..settings.clone()
        };
        let (commands, receiver) = sync_channel(256);
        let thread = std::thread::spawn(move || Engine::new(settings).run(&receiver));
        Self {
            commands,
            thread: Some(thread),
        }
    }

    pub fn add(&self, id: VmId, domain: &str, ram: &Ram, live: bool) {
        self.add_with(id, domain, ram, live, ram.layout());
    }

    pub fn add_with(&self, id: VmId, domain: &str, ram: &Ram, live: bool, layout: RamLayout) {
        let guest = ram.guest(live);
        self.commands
            .send(Command::Add {
                id,
                name: format!("vm{id}"),
                domain: Some(domain.to_owned()),
                advice: vec![Advice::default(); layout.blocks.len()],
                layout,
                guest: Box::new(guest),
                problem: None,
            })
            .unwrap();
        self.commands.send(Command::AgentSession(id)).unwrap();
    }

    pub fn say(&self, id: VmId, message: FromAgent) {
        self.commands.send(Command::Agent(id, message)).unwrap();
    }

    /// Sends the hint that VM `id` has read file number `file` (`pages` pages) into page frames
    /// from `pfn` on.
    pub fn cached(&self, id: VmId, file: u32, path: &str, pfn: usize, pages: usize) {
        let facts = FileFacts {
            file,
            path: path.into(),
            size_bytes: (pages * PAGE) as u64,
        };
        self.say(id, FromAgent::Files(vec![facts]));
        self.hint(id, file, pfn, pages);
    }

    pub fn hint(&self, id: VmId, file: u32, pfn: usize, pages: usize) {
        let run = HintRun {
            file,
            page: 0,
            pfn: pfn as u64,
            pages: u32::try_from(pages).unwrap(),
        };
        self.say(id, FromAgent::Hints(vec![run]));
    }

    pub fn stats(&self) -> EngineStats {
        let (answer, stats) = sync_channel(1);
        self.commands.send(Command::Stats(answer)).unwrap();
        stats.recv().unwrap().0
    }

    #[track_caller]
    pub fn wait(&self, what: &str, done: impl Fn(&EngineStats) -> bool) -> EngineStats {
        wait_for(what, Duration::from_secs(120), || {
            let stats = self.stats();
            if done(&stats) {
                Ok(stats)
            } else {
                Err(Box::new(stats))
            }
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

pub fn vm(stats: &EngineStats, id: VmId) -> &VmStats {
    stats
        .vms
        .iter()
        .find(|v| v.name == format!("vm{id}"))
        .unwrap()
}

/// Returns whether each of the VMs `ids` has exactly `pages` folded pages.
pub fn folded(stats: &EngineStats, ids: &[VmId], pages: u64) -> bool {
    ids.iter()
        .all(|&id| vm(stats, id).matched_folded_pages == pages)
}

/// Starts an engine with VMs 1 and 2 of one trust domain, whose RAM begins with the same pages.
pub fn two_vms(test: &str, pages: usize, seed: u64) -> (Ram, Ram, Running) {
    let domain = domain(test);
    let (mut a, mut b) = (Ram::new(), Ram::new());
    a.fill(0, pages, seed);
    b.fill(0, pages, seed);
    let engine = Running::start();
    engine.add(1, &domain, &a, true);
    engine.add(2, &domain, &b, true);
    (a, b, engine)
}

/// Returns a trust domain's name that is unique to the test, because adoption searches this process
/// for stores by name.
pub fn domain(test: &str) -> String {
    format!("{test}-{}", std::process::id())
}
