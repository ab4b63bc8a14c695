//! The lender: judges what this host can spare, offers it, exports what is taken of it, takes it back.
//!
//! One thread does all of it, and every export is its child, since nbdkit ends with the thread that started it (`Export`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use super::export::{Export, Health, Listen};
use super::judge::{Judge, Verdict};
use super::pressure::Sample;
use super::registry::{
    Durability, Incarnation, Lease, LeaseId, LeaseState, LenderId, Offer, Registry, RegistryError,
};

/// Time between two looks.
const TICK: Duration = Duration::from_millis(500);

/// How long an offer holds without being said again.
const OFFER_TTL: Duration = Duration::from_secs(10);

/// Exports that end so fast are waited for.
const AT_ONCE: Duration = Duration::from_millis(100);

/// How long a borrower has to give memory back that this host needs.
pub const GIVE_BACK: Duration = Duration::from_secs(10);

/// What a borrower copies in a second at least, while its guest swaps.
const COPIED_A_SECOND: u64 = 20 << 20;

/// What is lent and how.
#[derive(Clone, Debug)]
pub struct LenderOptions {
    /// This host's name.
    pub host: String,
    /// Most bytes to lend.
    pub max_bytes: u64,
    /// Where exports listen.
    pub listen: Listen,
    /// Directory for exports' files, this lender's alone.
    pub directory: PathBuf,
    /// What this host's VMs may call in at once, in bytes; whoever knows keeps it up to date.
    pub owed: Arc<AtomicU64>,
}

/// What a lender does now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LenderStatus {
    /// Name of the host.
    pub host: String,
    /// Most bytes to lend.
    pub max_bytes: u64,
    /// Bytes offered now, lent ones included.
    pub offer_bytes: u64,
    /// Bytes exported now: allocated and locked.
    pub lent_bytes: u64,
    /// Bytes that borrowers are to give back.
    pub recalled_bytes: u64,
    /// Where exports listen, in words.
    #[serde(default)]
    pub listens: String,
    /// Why no more is offered.
    pub why: String,
    /// What is wrong, if anything is.
    pub problem: Option<String>,
    /// Exports that this daemon has ended, because they were given back, were over, or had failed.
    pub ended: u64,
    /// Of these, those that had failed: their process ended or stood still.
    pub failed: u64,
    /// Connections to exports that broke off or were refused: strangers, without the key.
    #[serde(default)]
    pub refused: u64,
    /// Whether it takes everything back and lends no more.
    pub is_ending: bool,
}

/// A host that lends.
#[derive(Debug)]
pub struct Lender {
    status: Arc<Mutex<LenderStatus>>,
    ending: Arc<AtomicBool>,
    quit: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Lender {
    /// Begins to lend.
    pub fn start(options: LenderOptions, registry: Arc<dyn Registry>) -> std::io::Result<Self> {
        empty(&options.directory)?;
        let status = Arc::new(Mutex::new(LenderStatus {
            host: options.host.clone(),
            max_bytes: options.max_bytes,
            listens: options.listen.to_string(),
            why: "it has just begun".into(),
            ..LenderStatus::default()
        }));
        let (ending, quit) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let mut work = Work {
            lender: LenderId {
                host: options.host.clone(),
                incarnation: Incarnation(now_ms()),
            },
            judge: Judge::new(options.max_bytes),
            begun: Instant::now(),
            exports: BTreeMap::new(),
            dying: BTreeMap::new(),
            status: status.clone(),
            ending: ending.clone(),
            registry,
            options,
        };
        let stop = quit.clone();
        let thread = std::thread::Builder::new()
            .name("lender".into())
            .spawn(move || {
                while !stop.load(Ordering::Acquire) && !work.tick() {
                    std::thread::park_timeout(TICK);
                }
                work.exports.clear();
                work.dying.clear();
                if let Err(error) = work.registry.withdraw(&work.lender) {
                    warn!(%error, "the registry does not know yet that this host lends no more");
                }
            })?;
        Ok(Self {
            status,
            ending,
            quit,
            thread: Some(thread),
        })
    }

    /// What it does now.
    #[must_use]
    pub fn status(&self) -> LenderStatus {
        let mut status = self
            .status
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        status.is_ending = self.ending.load(Ordering::Acquire);
        status
    }

    /// Offers nothing more and takes everything back within [`GIVE_BACK`]; [`has_ended`](Self::has_ended) tells when that is done.
    pub fn end(&self) {
        self.ending.store(true, Ordering::Release);
        self.wake();
    }

    /// Whether everything is taken back.
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
            // It panicked: its exports ended with it.
            let _ = thread.join();
        }
    }
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |time| {
        u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
    })
}

/// Makes the directory, or empties it of what a lender left that was killed.
fn empty(directory: &Path) -> std::io::Result<()> {
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

/// An export and what is known of its lease.
#[derive(Debug)]
struct Lent {
    export: Export,
    /// Whether the borrower has been told where it is.
    published: bool,
    /// When its lease is over, as far as was heard.
    deadline: Instant,
}

#[derive(Debug)]
struct Work {
    options: LenderOptions,
    registry: Arc<dyn Registry>,
    lender: LenderId,
    judge: Judge,
    begun: Instant,
    exports: BTreeMap<LeaseId, Lent>,
    /// Killed, and not gone yet: to free much memory takes a while, and others are to hear of this host meanwhile.
    dying: BTreeMap<LeaseId, Export>,
    status: Arc<Mutex<LenderStatus>>,
    ending: Arc<AtomicBool>,
}

impl Work {
    /// One look. Whether all is done: only when it is ending.
    fn tick(&mut self) -> bool {
        self.bury();
        let problem = match self.keep_up() {
            Ok(done) if done => return true,
            Ok(_) => None,
            Err(error) => {
                if matches!(error, RegistryError::Superseded { .. }) {
                    warn!(%error, "lends no more");
                    self.set(|status| status.problem = Some(error.to_string()));
                    return true;
                }
                self.end_overdue();
                Some(error.to_string())
            }
        };
        let lent = self.lent_bytes();
        self.set(|status| {
            if problem.is_some() && status.problem != problem {
                warn!(problem, "lending");
            }
            status.problem = problem;
            status.lent_bytes = lent;
        });
        false
    }

    fn set(&self, change: impl FnOnce(&mut LenderStatus)) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn lent_bytes(&self) -> u64 {
        let living = self.exports.values().map(|lent| lent.export.bytes());
        let dying = self.dying.values().map(Export::bytes);
        living.chain(dying).sum()
    }

    /// Bytes of exports that are being allocated.
    fn beginning_bytes(&self) -> u64 {
        let begin = self.exports.values().filter(|lent| !lent.published);
        begin.map(|lent| lent.export.bytes()).sum()
    }

    /// Ends exports that have ended by themselves or stand still.
    fn bury(&mut self) {
        let mut dead = Vec::new();
        let mut refused = 0;
        for (id, lent) in &mut self.exports {
            let strangers = lent.export.refused();
            if strangers > 0 {
                refused += strangers;
                warn!(
                    lease = id.0,
                    strangers, "connections to its export broke off or were refused"
                );
            }
            let health = lent.export.health();
            if health != Health::Serving {
                dead.push((*id, health));
            }
        }
        if refused > 0 {
            self.set(|status| status.refused += refused);
        }
        let gone: Vec<LeaseId> = self
            .dying
            .iter_mut()
            .filter_map(|(id, export)| (export.health() == Health::Ended).then_some(*id))
            .collect();
        for id in gone {
            self.buried(id);
        }
        for (id, health) in dead {
            warn!(
                lease = id.0,
                ?health,
                "its export has failed, or its client has gone"
            );
            self.end_export(id, true);
        }
    }

    /// Whether all is done.
    fn keep_up(&mut self) -> Result<bool, RegistryError> {
        let ending = self.ending.load(Ordering::Acquire);
        let verdict = self.judge();
        let offer = Offer {
            lender: self.lender.clone(),
            bytes: if ending { 0 } else { verdict.offer_bytes },
        };
        self.registry.offer(&offer, OFFER_TTL)?;
        let mut leases = self.registry.picture()?.leases;
        leases.retain(|lease| lease.lender == self.lender);
        // What ends makes room for what begins.
        self.end_what_is_over(&leases);
        for lease in &leases {
            self.begin(lease)?;
        }
        let wanted = if ending {
            u64::MAX
        } else {
            verdict.recall_bytes
        };
        self.recall(&leases, wanted)?;
        self.set(|status| {
            status.offer_bytes = offer.bytes;
            status.why = verdict.why;
            let recalled = leases.iter().filter(|lease| lease.recall_ms.is_some());
            status.recalled_bytes = recalled.map(|lease| lease.bytes).sum();
        });
        Ok(ending && leases.is_empty() && self.exports.is_empty() && self.dying.is_empty())
    }

    fn judge(&mut self) -> Verdict {
        let lent = self.lent_bytes();
        match Sample::read(Path::new("/proc"), self.begun.elapsed()) {
            Ok(mut sample) => {
                sample.owed_bytes = self.options.owed.load(Ordering::Relaxed);
                sample.beginning_bytes = self.beginning_bytes();
                self.judge.judge(sample, lent)
            }
            // Unknown is not spare.
            Err(error) => Verdict {
                offer_bytes: lent,
                recall_bytes: 0,
                why: format!("this host's memory can't be read: {error}"),
            },
        }
    }

    /// Ends exports whose lease is over, was given back, or isn't known any more.
    fn end_what_is_over(&mut self, leases: &[Lease]) {
        let over = |lease: &Lease| {
            lease.state == LeaseState::Released || lease.left_ms == 0 || lease.recall_ms == Some(0)
        };
        for lease in leases {
            if over(lease) {
                if lease.state != LeaseState::Released {
                    warn!(
                        lease = lease.id.0,
                        borrower = lease.borrower,
                        vm = lease.vm,
                        "not given back in time; its export is ended"
                    );
                }
                self.end_export(lease.id, false);
            } else if let Some(lent) = self.exports.get_mut(&lease.id) {
                lent.deadline = Instant::now() + Duration::from_millis(lease.left_ms);
            }
        }
        let unknown: Vec<LeaseId> = self
            .exports
            .keys()
            .filter(|id| !leases.iter().any(|lease| lease.id == **id))
            .copied()
            .collect();
        for id in unknown {
            warn!(
                lease = id.0,
                "the registry doesn't know it any more; its export is ended"
            );
            self.end_export(id, false);
        }
    }

    /// While the registry can't be asked, the deadlines that it told hold.
    fn end_overdue(&mut self) {
        let now = Instant::now();
        let over = |lent: &Lent| lent.deadline <= now;
        let ids: Vec<LeaseId> = self
            .exports
            .iter()
            .filter(|(_, lent)| over(lent))
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            warn!(
                lease = id.0,
                "over, and the registry can't be asked; its export is ended"
            );
            self.end_export(id, false);
        }
    }

    fn begin(&mut self, lease: &Lease) -> Result<(), RegistryError> {
        let is_dying = self.dying.contains_key(&lease.id);
        if lease.state != LeaseState::Taken || lease.left_ms == 0 || is_dying {
            return Ok(());
        }
        if !self.exports.contains_key(&lease.id) {
            let place = &self.options.directory;
            match Export::start(place, self.options.listen, lease.id, lease.bytes) {
                Ok(export) => {
                    let lent = Lent {
                        export,
                        published: false,
                        deadline: Instant::now() + Duration::from_millis(lease.left_ms),
                    };
                    self.exports.insert(lease.id, lent);
                }
                Err(error) => {
                    warn!(lease = lease.id.0, error = %chain(&error), "can't be exported");
                    self.end_export(lease.id, true);
                    return Ok(());
                }
            }
        }
        let Some(lent) = self.exports.get_mut(&lease.id) else {
            return Ok(());
        };
        match lent.export.is_ready() {
            Ok(true) if !lent.published => {
                self.registry
                    .publish(lease.id, &self.lender, lent.export.endpoint())?;
                lent.published = true;
                info!(
                    lease = lease.id.0,
                    borrower = lease.borrower,
                    vm = lease.vm,
                    bytes = lease.bytes,
                    "lent"
                );
            }
            Ok(_) => {}
            Err(error) => {
                warn!(lease = lease.id.0, error = %chain(&error), "can't be exported");
                self.end_export(lease.id, true);
            }
        }
        Ok(())
    }

    /// Ends an export, if there is one, and says so as soon as its bytes are free.
    fn end_export(&mut self, id: LeaseId, failed: bool) {
        if self.dying.contains_key(&id) {
            return;
        }
        let was = self.exports.remove(&id);
        self.set(|status| {
            status.ended += u64::from(was.is_some());
            status.failed += u64::from(was.is_some() && failed);
        });
        if let Some(Lent { mut export, .. }) = was {
            if !export.kill(AT_ONCE) {
                self.dying.insert(id, export);
                return;
            }
        }
        self.buried(id);
    }

    /// Its memory is free.
    fn buried(&mut self, id: LeaseId) {
        self.dying.remove(&id);
        // If it isn't heard, the next look finds the lease without an export.
        if let Err(error) = self.registry.ended(id, &self.lender) {
            warn!(lease = id.0, %error, "has ended, and the registry doesn't know yet");
        }
    }

    /// Has borrowers give back so many bytes in all: those first that have a copy and only let go, then the largest, so that few VMs are hurt.
    fn recall(&self, leases: &[Lease], wanted: u64) -> Result<(), RegistryError> {
        let (recalled, mut others): (Vec<&Lease>, Vec<&Lease>) =
            leases.iter().partition(|lease| lease.recall_ms.is_some());
        let mut coming: u64 = recalled.iter().map(|lease| lease.bytes).sum();
        others.sort_by_key(|lease| hurt(lease.durability, lease.bytes));
        for lease in others {
            if coming >= wanted {
                break;
            }
            self.registry.recall(
                lease.id,
                &self.lender,
                time_to_give_back(lease.durability, lease.bytes),
            )?;
            info!(
                lease = lease.id.0,
                borrower = lease.borrower,
                vm = lease.vm,
                bytes = lease.bytes,
                "this host needs it back"
            );
            coming = coming.saturating_add(lease.bytes);
        }
        Ok(())
    }
}

/// Order in which leases are taken back.
fn hurt(durability: Durability, bytes: u64) -> (bool, std::cmp::Reverse<u64>) {
    (durability != Durability::Disk, std::cmp::Reverse(bytes))
}

/// How long a borrower has. Where the lent bytes are the only ones, or one of two, it has to copy them first.
fn time_to_give_back(durability: Durability, bytes: u64) -> Duration {
    match durability {
        Durability::Disk => GIVE_BACK,
        Durability::Replica | Durability::None => {
            GIVE_BACK + Duration::from_secs(bytes / COPIED_A_SECOND)
        }
    }
}

pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let words: Vec<String> = causes.map(ToString::to_string).collect();
    words.join(": ")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::{Pid, Signal, kill_process};

    use super::super::registry::{Address, Want};
    use super::super::sqlite::SqliteRegistry;
    use super::*;

    const MIB: u64 = 1 << 20;

    struct Host {
        registry: Arc<SqliteRegistry>,
        lender: Lender,
        directory: tempfile::TempDir,
    }

    /// `None` where nbdkit is missing, or this host has nothing to spare.
    fn host(max_bytes: u64) -> Option<Host> {
        if Command::new("nbdkit").arg("--version").output().is_err() {
            println!("skipped: nbdkit is not installed");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let registry = SqliteRegistry::open(&directory.path().join("registry.db")).unwrap();
        let registry = Arc::new(registry);
        let options = LenderOptions {
            host: "a".into(),
            max_bytes,
            listen: Listen::Unix,
            directory: directory.path().join("exports"),
            owed: Arc::default(),
        };
        let lender = Lender::start(options, registry.clone()).unwrap();
        let end = Instant::now() + Duration::from_secs(30);
        while lender.status().offer_bytes < max_bytes {
            if Instant::now() > end {
                println!(
                    "skipped: this host has nothing to spare: {:?}",
                    lender.status()
                );
                return None;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(Host {
            registry,
            lender,
            directory,
        })
    }

    impl Host {
        fn take(&self, bytes: u64, ttl: Duration) -> Lease {
            let want = Want {
                borrower: "b".into(),
                vm: "v".into(),
                bytes,
                durability: Durability::Disk,
                apart_from: Vec::new(),
            };
            self.registry.take(&want, ttl).unwrap()
        }

        fn wait(&self, what: &str, mut ready: impl FnMut(&Self) -> bool) {
            let end = Instant::now() + Duration::from_secs(30);
            while !ready(self) {
                assert!(
                    Instant::now() < end,
                    "in vain: {what}: {:?}",
                    self.lender.status()
                );
                std::thread::sleep(Duration::from_millis(20));
            }
        }

        fn wait_exported(&self, id: LeaseId) -> PathBuf {
            let mut found = None;
            self.wait("it is exported", |host| {
                found = host.registry.endpoint(id, "b").unwrap();
                found.is_some()
            });
            match found.unwrap().address {
                Address::Unix(path) => path,
                other @ Address::Tcp { .. } => panic!("{other:?}"),
            }
        }

        fn leases(&self) -> usize {
            self.registry.picture().unwrap().leases.len()
        }

        fn wait_free(&self) {
            self.wait("nothing is lent", |host| {
                host.leases() == 0 && host.lender.status().lent_bytes == 0
            });
            let files = std::fs::read_dir(self.directory.path().join("exports")).unwrap();
            assert_eq!(files.count(), 0);
        }
    }

    #[test]
    fn who_has_a_copy_gives_back_first_and_who_has_none_gets_time_to_make_one() {
        let (disk, replica, none) = (Durability::Disk, Durability::Replica, Durability::None);
        let mut leases = [(none, 8), (disk, 1), (replica, 4), (disk, 2)];
        leases.sort_by_key(|&(durability, gib)| hurt(durability, gib));
        assert_eq!(leases, [(disk, 2), (disk, 1), (none, 8), (replica, 4)]);
        assert_eq!(time_to_give_back(disk, 8192 * MIB), GIVE_BACK);
        let time = time_to_give_back(none, 1000 * MIB);
        assert_eq!(time, GIVE_BACK + Duration::from_secs(50));
    }

    #[test]
    fn what_is_taken_is_exported_and_given_back() {
        let Some(host) = host(64 * MIB) else { return };
        let first = host.take(16 * MIB, Duration::from_secs(60));
        let second = host.take(16 * MIB, Duration::from_secs(60));
        let paths = [first.id, second.id].map(|id| host.wait_exported(id));
        assert_ne!(paths[0], paths[1]);
        host.wait("it is locked", |h| h.lender.status().lent_bytes == 32 * MIB);
        host.registry.release(first.id, "b").unwrap();
        host.wait("it is free", |h| h.leases() == 1);
        assert!(!paths[0].exists() && paths[1].exists());
        host.registry.release(second.id, "b").unwrap();
        host.wait_free();
        assert_eq!(host.lender.status().failed, 0);
    }

    #[test]
    fn an_export_ends_at_its_deadline_and_when_it_is_killed_or_stands_still() {
        let Some(host) = host(64 * MIB) else { return };
        let short = host.take(16 * MIB, Duration::from_secs(3));
        let path = host.wait_exported(short.id);
        host.wait_free();
        assert!(!path.exists());
        for signal in [Signal::KILL, Signal::STOP] {
            let lease = host.take(16 * MIB, Duration::from_secs(60));
            let path = host.wait_exported(lease.id);
            let name = path.to_str().unwrap();
            // Its process is found by the socket's lock on the file of its output.
            let log = name.replace(".sock", ".log");
            let pid = process_with(Path::new(&log));
            kill_process(pid, signal).unwrap();
            host.wait_free();
        }
        assert_eq!(host.lender.status().failed, 2);
    }

    /// A child of ours whose standard error is this file.
    fn process_with(log: &Path) -> Pid {
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            if std::fs::read_link(entry.path().join("fd/2")).is_ok_and(|to| to == log) {
                let name = entry.file_name().to_str().unwrap().parse().unwrap();
                return Pid::from_raw(name).unwrap();
            }
        }
        panic!("no process writes to {}", log.display());
    }

    #[test]
    fn a_lender_that_ends_takes_everything_back_and_one_that_is_dropped_leaves_nothing() {
        let Some(host) = host(64 * MIB) else { return };
        let lease = host.take(16 * MIB, Duration::from_secs(60));
        host.wait_exported(lease.id);
        host.lender.end();
        host.wait("it is recalled", |h| {
            let leases = h.registry.picture().unwrap().leases;
            leases.iter().all(|l| l.recall_ms.is_some())
        });
        assert!(!host.lender.has_ended());
        host.registry.release(lease.id, "b").unwrap();
        host.wait("it has ended", |h| h.lender.has_ended());
        assert_eq!(host.leases(), 0);

        let Some(host) = self::host(64 * MIB) else {
            return;
        };
        let lease = host.take(16 * MIB, Duration::from_secs(60));
        let path = host.wait_exported(lease.id);
        let Host {
            lender,
            registry,
            directory,
        } = host;
        drop(lender);
        assert!(!path.exists());
        // Of the run that has ended: whoever lends next under this name ends it.
        assert_eq!(registry.picture().unwrap().leases.len(), 1);
        drop(directory);
    }
}
