use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicI64};

use memfold_testkit::{patience, wait_for, wait_until};
use memfold_vm::process::is_stopped;
use rustix::process::{Pid, Signal, kill_process};

use super::super::calls::{Answer, Call, CallRegistry, answer};
use super::super::endpoint::Address;
use super::super::endpoint::Listen;
use super::super::lease::{GIVE_BACK, Incarnation, MAX_TTL};
use super::super::lender::{Lender, empty};
use super::super::registry::Want;
use super::super::sqlite::SqliteRegistry;
use super::*;

const MIB: u64 = 1 << 20;

struct Host {
    registry: Arc<SqliteRegistry>,
    lender: Lender,
    directory: tempfile::TempDir,
}

/// Starts a lender. Returns `None` if nbdkit is missing or this host has no memory to spare.
fn host(max_bytes: u64) -> Option<Host> {
    if Command::new("nbdkit").arg("--version").output().is_err() {
        return memfold_testkit::reports_skip("nbdkit is not installed");
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
        short_guests: Arc::default(),
        wanted_back: Arc::default(),
        kept: Arc::default(),
    };
    let lender = Lender::start(options, registry.clone()).unwrap();
    // A host whose tasks wait for memory lends nothing; other tests may make tasks wait now.
    let end = Instant::now() + patience(Duration::from_secs(120)).min(Duration::from_secs(300));
    while lender.status().offer_bytes < max_bytes {
        if Instant::now() > end {
            return memfold_testkit::reports_skip(&format!(
                "this host has nothing to spare: {:?}",
                lender.status()
            ));
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
            disk_bytes: 0,
            durability: Durability::Disk,
            apart_from: Vec::new(),
        };
        // Other tests may press this host so that it offers less for a moment.
        wait_for("a lease", Duration::from_secs(60), || {
            self.registry.take(&want, ttl)
        })
    }

    #[track_caller]
    fn wait(&self, what: &str, mut ready: impl FnMut(&Self) -> bool) {
        wait_for(what, Duration::from_secs(120), || {
            if ready(self) {
                Ok(())
            } else {
                Err(Box::new(self.lender.status()))
            }
        });
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
fn borrowers_with_a_disk_copy_return_lent_memory_first_and_others_get_time_to_copy() {
    let (disk, replica, none) = (Durability::Disk, Durability::Replica, Durability::None);
    let mut leases = [(none, 8), (disk, 1), (replica, 4), (disk, 2)];
    leases.sort_by_key(|&(durability, gib)| hurt(durability, gib));
    assert_eq!(leases, [(disk, 2), (disk, 1), (none, 8), (replica, 4)]);
    assert_eq!(disk.time_to_give_back(8192 * MIB), GIVE_BACK);
    let time = none.time_to_give_back(1000 * MIB);
    assert_eq!(time, GIVE_BACK + Duration::from_secs(50));
    // The time is at most the longest time that a registry accepts.
    assert_eq!(none.time_to_give_back(1 << 50), MAX_TTL);
}

#[test]
fn if_the_lender_is_short_of_memory_a_borrower_with_a_copy_gets_a_shorter_deadline() {
    let (disk, none) = (Durability::Disk, Durability::None);
    for (durability, recall_ms, hurries) in [
        (disk, Some(9_000), true),
        (disk, Some(1_500), false),
        (disk, None, false),
        (none, Some(9_000), false),
    ] {
        let lease = Lease {
            id: LeaseId(1),
            lender: LenderId {
                host: "a".into(),
                incarnation: Incarnation(1),
            },
            borrower: "b".into(),
            vm: "v".into(),
            bytes: MIB,
            disk_bytes: 0,
            durability,
            state: LeaseState::Exported,
            left_ms: 60_000,
            recall_ms,
        };
        assert_eq!(
            has_to_hurry(&lease),
            hurries,
            "{durability:?} {recall_ms:?}"
        );
    }
}

#[test]
fn leased_memory_is_exported_and_is_freed_when_the_lease_is_released() {
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
fn the_lender_frees_lent_memory_when_its_lease_expires_or_its_export_process_fails() {
    let Some(host) = host(64 * MIB) else { return };
    let short = host.take(16 * MIB, patience(Duration::from_secs(12)));
    let path = host.wait_exported(short.id);
    host.wait_free();
    assert!(!path.exists());
    for signal in [Signal::KILL, Signal::STOP] {
        let lease = host.take(16 * MIB, Duration::from_secs(60));
        let path = host.wait_exported(lease.id);
        let name = path.to_str().unwrap();
        // The export's process is the one whose output goes to the log file beside the socket.
        let log = name.replace(".sock", ".log");
        let pid = process_with(Path::new(&log));
        kill_process(pid, signal).unwrap();
        host.wait_free();
    }
    assert_eq!(host.lender.status().failed, 2);
}

#[test]
fn a_stopped_export_that_may_hold_the_only_copy_is_resumed_and_others_are_ended() {
    let (disk, replica, none) = (Durability::Disk, Durability::Replica, Durability::None);
    for (durability, is_kept) in [(disk, false), (replica, true), (none, true)] {
        let directory = tempfile::tempdir().unwrap();
        let Some((registry, mut work)) = work(directory.path()) else {
            return;
        };
        let lease = take_with(&registry, durability);
        look_until_exported(&registry, &mut work, lease.id);
        let pid = work.exports[&lease.id].export.pid();
        let process = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        kill_process(process, Signal::STOP).unwrap();
        wait_until("it is stopped", Duration::from_secs(60), || is_stopped(pid));
        // Two looks in a row must find the process stopped.
        work.bury();
        work.bury();
        assert_eq!(
            work.exports.contains_key(&lease.id),
            is_kept,
            "{durability:?}"
        );
        if is_kept {
            wait_until("it runs", Duration::from_secs(60), || !is_stopped(pid));
            assert_eq!(work.set(|status| status.failed), 0);
            // Its lease's end still ends it.
            registry.release(lease.id, "b").unwrap();
            wait_until("its end", Duration::from_secs(60), || {
                work.bury();
                work.keep_up().unwrap();
                work.exports.is_empty() && work.dying.is_empty()
            });
        }
    }
}

/// Returns the child process whose standard error is the file `log`.
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
fn a_lender_told_to_end_recalls_all_leases_and_one_that_stops_at_once_leaves_no_export() {
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
    // The lease of the ended run stays; the next lender with this name ends it.
    assert_eq!(registry.picture().unwrap().leases.len(), 1);
    drop(directory);
}

/// Creates a lender without a thread: each round is one call. Returns `None` if nbdkit is missing.
fn work(directory: &Path) -> Option<(Arc<SqliteRegistry>, Work)> {
    if Command::new("nbdkit").arg("--version").output().is_err() {
        return memfold_testkit::reports_skip("nbdkit is not installed");
    }
    let registry = SqliteRegistry::open(&directory.join("registry.db")).unwrap();
    let registry = Arc::new(registry);
    let exports = directory.join("exports");
    empty(&exports).unwrap();
    let work = Work {
        lender: LenderId {
            host: "a".into(),
            incarnation: Incarnation(1),
        },
        announced: true,
        is_superseded: false,
        name_taken_since: None,
        proc: "/proc".into(),
        judge: Judge::new(64 * MIB),
        begun: Instant::now(),
        exports: BTreeMap::new(),
        dying: BTreeMap::new(),
        status: Arc::new(Mutex::new(LenderStatus {
            max_bytes: 64 * MIB,
            ..LenderStatus::default()
        })),
        registry: registry.clone(),
        options: LenderOptions {
            host: "a".into(),
            max_bytes: 64 * MIB,
            listen: Listen::Unix,
            directory: exports,
            owed: Arc::default(),
            short_guests: Arc::default(),
            wanted_back: Arc::default(),
            kept: Arc::default(),
        },
    };
    let offer = Offer {
        lender: work.lender.clone(),
        bytes: 64 * MIB,
    };
    registry.offer(&offer, OFFER_TTL).unwrap();
    Some((registry, work))
}

fn take(registry: &SqliteRegistry) -> Lease {
    take_with(registry, Durability::Disk)
}

fn take_with(registry: &SqliteRegistry, durability: Durability) -> Lease {
    let want = Want {
        borrower: "b".into(),
        vm: "v".into(),
        bytes: 16 * MIB,
        disk_bytes: 0,
        durability,
        apart_from: Vec::new(),
    };
    registry.take(&want, Duration::from_secs(60)).unwrap()
}

fn look_until_exported(registry: &SqliteRegistry, work: &mut Work, id: LeaseId) {
    wait_until("it is exported", Duration::from_secs(60), || {
        work.keep_up().unwrap();
        registry.endpoint(id, "b").unwrap().is_some()
    });
}

#[test]
fn if_the_registrys_answer_is_lost_the_lender_notices_that_its_export_is_registered() {
    let directory = tempfile::tempdir().unwrap();
    let Some((registry, mut work)) = work(directory.path()) else {
        return;
    };
    let lease = take(&registry);
    look_until_exported(&registry, &mut work, lease.id);
    work.exports.get_mut(&lease.id).unwrap().published = false;
    assert_eq!(work.beginning_bytes(), 16 * MIB);
    work.keep_up().unwrap();
    assert_eq!(work.beginning_bytes(), 0);
}

#[test]
fn lent_memory_that_right_sizing_wants_back_is_asked_for_once() {
    let directory = tempfile::tempdir().unwrap();
    let Some((registry, mut work)) = work(directory.path()) else {
        return;
    };
    let leases = [take(&registry), take(&registry)];
    for lease in &leases {
        look_until_exported(&registry, &mut work, lease.id);
    }
    let recalled = |registry: &SqliteRegistry| {
        let leases = registry.picture().unwrap().leases;
        leases.iter().filter(|l| l.recall_ms.is_some()).count()
    };
    assert_eq!(recalled(&registry), 0);
    work.options.wanted_back.store(MIB, Ordering::Relaxed);
    // The second round knows that enough memory is coming back.
    work.keep_up().unwrap();
    work.keep_up().unwrap();
    assert_eq!(recalled(&registry), 1);
}

#[test]
fn a_lease_that_has_ended_meanwhile_does_not_keep_others_from_being_recalled() {
    let directory = tempfile::tempdir().unwrap();
    let Some((registry, mut work)) = work(directory.path()) else {
        return;
    };
    let leases = [take(&registry), take(&registry)];
    registry.ended(leases[0].id, &leases[0].lender).unwrap();
    work.recall(&leases, u64::MAX).unwrap();
    let now = registry.picture().unwrap().leases;
    let recalled: Vec<_> = now
        .iter()
        .filter(|lease| lease.recall_ms.is_some())
        .collect();
    assert_eq!(recalled.len(), 1);
    assert_eq!(recalled[0].id, leases[1].id);
}

#[test]
fn if_memory_is_short_only_leases_with_a_copy_elsewhere_are_ended() {
    let directory = tempfile::tempdir().unwrap();
    let Some((registry, mut work)) = work(directory.path()) else {
        return;
    };
    let leases = [take(&registry), take(&registry)];
    for lease in &leases {
        look_until_exported(&registry, &mut work, lease.id);
    }
    registry.sole_copy(leases[1].id, "b").unwrap();
    work.keep_up().unwrap();
    work.cut(u64::MAX);
    let left: Vec<LeaseId> = work.exports.keys().copied().collect();
    assert_eq!(left, [leases[1].id]);
}

#[test]
fn while_the_registry_is_slow_the_lender_still_checks_the_memory_of_its_host() {
    let directory = tempfile::tempdir().unwrap();
    let Some((registry, mut work)) = work(directory.path()) else {
        return;
    };
    let lease = take(&registry);
    look_until_exported(&registry, &mut work, lease.id);
    work.proc = directory.path().join("proc");
    std::fs::create_dir(&work.proc).unwrap();
    std::fs::write(work.proc.join("vmstat"), "pswpin 0\n").unwrap();
    let meminfo = work.proc.join("meminfo");
    let has = move |kib: u64| {
        let text = format!("MemTotal: 8388608 kB\nMemAvailable: {kib} kB\n");
        std::fs::write(&meminfo, text).unwrap();
    };
    has(8_000_000);
    // During the call to the registry, the memory disappears for longer than the time between two
    // checks.
    let slow = move |call: &Call| {
        has(1000);
        std::thread::sleep(patience(Duration::from_secs(1)));
        Ok(answer(&*registry, call))
    };
    work.registry = Arc::new(CallRegistry::new("slow".into(), slow));
    assert_eq!(work.exports.len(), 1);
    work.ask(|registry| registry.picture()).unwrap();
    assert!(work.exports.is_empty(), "it hasn't looked");
}

#[test]
fn if_the_registry_refuses_to_publish_an_export_lent_memory_is_still_recalled() {
    let directory = tempfile::tempdir().unwrap();
    let Some((registry, mut work)) = work(directory.path()) else {
        return;
    };
    let lent = take(&registry);
    look_until_exported(&registry, &mut work, lent.id);
    let inner = registry.clone();
    let refuses = move |call: &Call| {
        if matches!(call, Call::Publish { .. }) {
            return Ok(Answer::Refused(RegistryError::Value {
                field: "endpoint".into(),
                why: "not accepted".into(),
            }));
        }
        Ok(answer(&*inner, call))
    };
    work.registry = Arc::new(CallRegistry::new("refusing".into(), refuses));
    take(&registry);
    wait_until("it is refused", Duration::from_secs(60), || {
        work.keep_up().is_err()
    });
    work.options.wanted_back.store(MIB, Ordering::Relaxed);
    work.keep_up().unwrap_err();
    let leases = registry.picture().unwrap().leases;
    assert!(leases.iter().any(|lease| lease.recall_ms.is_some()));
}

#[test]
fn a_lease_recalled_before_its_export_is_not_exported() {
    let directory = tempfile::tempdir().unwrap();
    let Some((registry, mut work)) = work(directory.path()) else {
        return;
    };
    let lease = take(&registry);
    registry
        .recall(lease.id, &lease.lender, Duration::ZERO)
        .unwrap();
    work.keep_up().unwrap();
    assert!(work.exports.is_empty());
    assert!(registry.picture().unwrap().leases.is_empty());
}

#[test]
fn a_lease_is_ended_before_its_export_if_the_lender_stops_or_has_too_little_memory() {
    let directory = tempfile::tempdir().unwrap();
    let Some((registry, mut work)) = work(directory.path()) else {
        return;
    };
    work.proc = directory.path().join("proc");
    std::fs::create_dir(&work.proc).unwrap();
    std::fs::write(work.proc.join("vmstat"), "pswpin 0\n").unwrap();
    let meminfo = work.proc.join("meminfo");
    // The reserve of this host is 512 MiB.
    let has = |mib: u64| {
        let text = format!("MemTotal: 8388608 kB\nMemAvailable: {} kB\n", mib << 10);
        std::fs::write(&meminfo, text).unwrap();
    };
    let is_refused = |work: &mut Work| {
        let lease = take(&registry);
        work.keep_up().unwrap();
        assert!(work.exports.is_empty());
        assert!(registry.endpoint(lease.id, "b").is_err());
        assert!(registry.picture().unwrap().leases.is_empty());
        // The registry grants leases until it knows a smaller offer.
        let offer = Offer {
            lender: work.lender.clone(),
            bytes: 64 * MIB,
        };
        registry.offer(&offer, OFFER_TTL).unwrap();
    };
    has(257);
    is_refused(&mut work);
    has(7000);
    work.set(|status| status.max_bytes = 8 * MIB);
    is_refused(&mut work);
    work.set(|status| status.max_bytes = 64 * MIB);
    work.options.wanted_back.store(MIB, Ordering::Relaxed);
    is_refused(&mut work);
    work.options.wanted_back.store(0, Ordering::Relaxed);
    work.set(|status| status.is_ending = true);
    is_refused(&mut work);
    work.set(|status| status.is_ending = false);
    let lease = take(&registry);
    look_until_exported(&registry, &mut work, lease.id);
}

#[test]
fn a_released_lease_is_not_recalled() {
    let directory = tempfile::tempdir().unwrap();
    let Some((registry, mut work)) = work(directory.path()) else {
        return;
    };
    let lease = take(&registry);
    registry.release(lease.id, "b").unwrap();
    work.set(|status| status.is_ending = true);
    work.keep_up().unwrap();
    assert!(work.keep_up().unwrap());
}

#[test]
fn if_the_registry_loses_a_lease_the_lender_keeps_the_lent_memory_until_the_deadline() {
    let Some(host) = host(64 * MIB) else { return };
    let lease = host.take(16 * MIB, patience(Duration::from_secs(5)));
    let path = host.wait_exported(lease.id);
    // The registry loses the lease, as it would with a new database.
    host.registry.ended(lease.id, &lease.lender).unwrap();
    host.wait("what is exported is not offered again", |host| {
        let lenders = host.registry.picture().unwrap().lenders;
        lenders[0].offered_bytes <= 48 * MIB
    });
    assert!(path.exists());
    host.wait("it is ended when its time is over", |_| !path.exists());
    host.wait("all is offered", |host| {
        host.lender.status().offer_bytes == 64 * MIB
    });
}

#[test]
fn a_renewal_that_a_restored_registry_has_lost_ends_no_export_before_its_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let Some((registry, mut work)) = work(directory.path()) else {
        return;
    };
    let lease = take(&registry);
    look_until_exported(&registry, &mut work, lease.id);
    // The registry's data now says that the lease has expired, as a backup does.
    registry.renew(lease.id, "b", Duration::ZERO).unwrap();
    work.keep_up().unwrap();
    assert!(work.exports.contains_key(&lease.id));
    assert!(work.exports[&lease.id].deadline > Instant::now());
    // A lease that nobody renews ends at the deadline that the lender knew before.
    work.exports.get_mut(&lease.id).unwrap().deadline = Instant::now();
    work.keep_up().unwrap();
    assert!(!work.exports.contains_key(&lease.id));
}

#[test]
fn if_the_clock_was_set_back_a_restarted_lender_still_counts_as_the_newer_one() {
    let Some(host) = host(64 * MIB) else { return };
    let directory = host.directory.path().join("others");
    let lender = LenderId {
        host: "c".into(),
        incarnation: Incarnation(u64::MAX / 4),
    };
    let offer = Offer { lender, bytes: 0 };
    host.registry.offer(&offer, OFFER_TTL).unwrap();
    let options = LenderOptions {
        host: "c".into(),
        max_bytes: MIB,
        listen: Listen::Unix,
        directory,
        owed: Arc::default(),
        short_guests: Arc::default(),
        wanted_back: Arc::default(),
        kept: Arc::default(),
    };
    let later = Lender::start(options, host.registry.clone()).unwrap();
    host.wait("it has followed on", |host| {
        let lenders = host.registry.picture().unwrap().lenders;
        let known = lenders.iter().find(|view| view.lender.host == "c");
        known.unwrap().lender.incarnation == Incarnation(u64::MAX / 4 + 1)
    });
    assert_eq!(later.status().problem, None);
}

#[test]
fn a_lender_ends_only_after_lent_memory_is_returned_unless_it_is_interrupted() {
    for hurried in [false, true] {
        let Some(host) = host(64 * MIB) else { return };
        let lease = host.take(16 * MIB, Duration::from_secs(60));
        host.wait_exported(lease.id);
        host.wait("it is lent", |h| h.lender.status().lent_bytes > 0);
        let (released, hurry) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                host.wait("it is asked for", |host| {
                    host.registry.picture().unwrap().leases[0]
                        .recall_ms
                        .is_some()
                });
                if hurried {
                    hurry.store(true, Ordering::Release);
                    return;
                }
                // The lender still waits after one second.
                std::thread::sleep(Duration::from_secs(1));
                assert_eq!(host.lender.status().lent_bytes, 16 * MIB);
                released.store(true, Ordering::Release);
                host.registry.release(lease.id, "b").unwrap();
            });
            host.lender.end_and_wait(&|| hurry.load(Ordering::Acquire));
            assert_eq!(released.load(Ordering::Acquire), !hurried);
        });
        let lent = host.lender.status().lent_bytes;
        assert_eq!(lent, if hurried { 16 * MIB } else { 0 });
    }
}

#[test]
fn a_lender_whose_name_another_daemon_has_taken_serves_its_leases_until_their_deadlines() {
    let directory = tempfile::tempdir().unwrap();
    let Some((registry, mut work)) = work(directory.path()) else {
        return;
    };
    // A host that is short of memory would end the export of a lease with a copy.
    let lease = take_with(&registry, Durability::None);
    look_until_exported(&registry, &mut work, lease.id);
    let mut other = work.lender.clone();
    other.incarnation.0 += 1;
    let offer = Offer {
        lender: other,
        bytes: 0,
    };
    registry.offer(&offer, OFFER_TTL).unwrap();
    for _ in 0..2 {
        assert!(!work.tick());
        assert_eq!(work.exports.len(), 1);
    }
    let status = work.set(|status| status.clone());
    assert!(status.is_ending && status.problem.is_some(), "{status:?}");
    work.exports.get_mut(&lease.id).unwrap().deadline = Instant::now();
    wait_until("the lender ends", Duration::from_secs(60), || work.tick());
    assert!(work.exports.is_empty());
}

#[test]
fn a_lender_waits_while_another_daemon_lends_under_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let Some((_, mut work)) = work(directory.path()) else {
        return;
    };
    let clock = Arc::new(AtomicI64::new(1));
    let now = clock.clone();
    let registry = SqliteRegistry::open_at(
        &directory.path().join("other.db"),
        Arc::new(move || now.load(Ordering::Relaxed)),
        "boot",
    );
    let registry = Arc::new(registry.unwrap());
    let mut other = work.lender.clone();
    other.incarnation.0 += 7;
    let offer = Offer {
        lender: other.clone(),
        bytes: 64 * MIB,
    };
    registry.offer(&offer, OFFER_TTL).unwrap();
    let lease = take(&registry);
    work.registry = registry.clone();
    work.announced = false;
    let mut look = |after_ms: i64| {
        clock.fetch_add(after_ms, Ordering::Relaxed);
        assert!(!work.keep_up().unwrap());
        let lenders = registry.picture().unwrap().lenders;
        (
            lenders[0].lender.clone(),
            work.set(|status| status.why.clone()),
        )
    };
    let (lender, why) = look(1000);
    assert_eq!(lender, other);
    assert!(why.contains("earlier daemon"), "{why}");
    assert_eq!(registry.picture().unwrap().leases[0].id, lease.id);
    // The other daemon has ended: its offer is not repeated any more.
    let (lender, _) = look(3000);
    assert_eq!(lender.incarnation.0, other.incarnation.0 + 1);
}
