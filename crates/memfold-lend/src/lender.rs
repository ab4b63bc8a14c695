//! Lends RAM of this host: decides how much RAM it can spare, offers this RAM in the lease
//! registry, serves the RAM to borrowers, and takes it back when this host needs it.
//!
//! One thread does all of this. That thread starts the server of each lease (nbdkit), because
//! nbdkit ends with the thread that started it (`Export`).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use tracing::warn;

use super::lease::{Incarnation, LenderId, ms};
use super::lender_status::{LenderOptions, LenderStatus};
use super::lender_thread::Work;
use super::registry::Registry;
use super::surplus::Judge;

/// How long a lender that stops waits for its borrowers. systemd gives a daemon 90 s to stop.
const GOOD_BYE: Duration = Duration::from_secs(45);

/// A running lender. Dropping this value ends all its exports at once, without asking the
/// borrowers.
#[derive(Debug)]
pub struct Lender {
    status: Arc<Mutex<LenderStatus>>,
    quit: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Lender {
    /// Starts the thread that lends this host's RAM.
    ///
    /// # Errors
    /// Fails if the directory for the exports' files cannot be created or emptied, or the thread
    /// cannot be started.
    pub fn start(options: LenderOptions, registry: Arc<dyn Registry>) -> std::io::Result<Self> {
        empty(&options.directory)?;
        let status = Arc::new(Mutex::new(LenderStatus {
            host: options.host.clone(),
            max_bytes: options.max_bytes,
            listens: options.listen.to_string(),
            why: "lending has just begun".into(),
            ..LenderStatus::default()
        }));
        let quit = Arc::<AtomicBool>::default();
        let mut work = Work {
            lender: LenderId {
                host: options.host.clone(),
                incarnation: Incarnation(now_ms()),
            },
            announced: false,
            is_superseded: false,
            name_taken_since: None,
            judge: Judge::new(options.max_bytes),
            begun: Instant::now(),
            exports: BTreeMap::new(),
            dying: BTreeMap::new(),
            status: status.clone(),
            registry,
            options,
            proc: "/proc".into(),
        };
        let stop = quit.clone();
        let thread = std::thread::Builder::new()
            .name("lender".into())
            .spawn(move || {
                while !stop.load(Ordering::Acquire) && !work.tick() {
                    work.rest();
                }
                work.exports.clear();
                work.dying.clear();
                if let Err(error) = work.registry.withdraw(&work.lender) {
                    warn!(%error, "cannot withdraw this host's offer of memory from the registry; the offer expires in 10 s");
                }
            })?;
        Ok(Self {
            status,
            quit,
            thread: Some(thread),
        })
    }

    /// Returns the lender's status now.
    #[must_use]
    pub fn status(&self) -> LenderStatus {
        self.locked().clone()
    }

    fn locked(&self) -> MutexGuard<'_, LenderStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets how many bytes the lender may lend. Lent memory beyond this limit is taken back.
    pub fn set_max(&self, bytes: u64) {
        self.locked().max_bytes = bytes;
        self.wake();
    }

    /// Withdraws the lender's offer and asks borrowers to give all lent memory back. Each borrower
    /// has [`Durability::time_to_give_back`](super::lease::Durability::time_to_give_back).
    /// [`has_ended`](Self::has_ended) tells when all memory is back.
    pub fn end(&self) {
        self.locked().is_ending = true;
        self.wake();
    }

    /// Takes all lent memory back, and waits while borrowers copy bytes that exist nowhere else.
    /// The wait ends after 45 s, or when `hurry` returns true. Exports that remain then end when
    /// this value is dropped.
    pub fn end_and_wait(&self, hurry: &dyn Fn() -> bool) {
        self.end();
        let end = Instant::now() + GOOD_BYE;
        let is_done = || self.has_ended() || self.status().lent_bytes == 0;
        while !is_done() && Instant::now() < end && !hurry() {
            self.wake();
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns whether all lent memory is back and the lender's thread has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Lender {
    /// Ends all exports at once.
    fn drop(&mut self) {
        self.quit.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take() {
            // An error means that the thread has panicked; its exports ended with it.
            let _ = thread.join();
        }
    }
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, ms)
}

/// Creates the directory. If it exists, removes the files that a killed lender left in it.
pub(super) fn empty(directory: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)?;
    for entry in std::fs::read_dir(directory)? {
        std::fs::remove_file(entry?.path())?;
    }
    Ok(())
}
