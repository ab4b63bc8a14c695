//! Tests of the guarantees of a lease registry, for example that no byte is lent twice. They run on
//! each implementation: `SQLite` and etcd.

use std::collections::HashSet;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;

use memfold_testkit::patience;

use super::calls::{CallRegistry, answer};
use super::endpoint::{Address, Endpoint};
use super::lease::{Durability, Incarnation, Lease, LeaseId, LeaseState, LenderId, Picture};
use super::registry::{Offer, Registry, Want};
use super::registry_error::{LEAST_LEASE, MOST_OF_LENDER, RegistryError};
use super::sqlite::SqliteRegistry;

pub(super) const TTL: Duration = Duration::from_secs(10);

/// Unit in which the functions [`offer`], [`take`] and [`largest`] count: the smallest lease.
pub(super) const UNIT: u64 = LEAST_LEASE;

/// An empty registry, and a function that lets time pass for this registry.
pub(super) struct Fixture {
    pub registry: Arc<dyn Registry>,
    pub advance: Box<dyn Fn(Duration)>,
}

pub(super) fn lender(host: &str, incarnation: u64) -> LenderId {
    LenderId {
        host: host.into(),
        incarnation: Incarnation(incarnation),
    }
}

pub(super) fn offer(registry: &dyn Registry, host: &str, incarnation: u64, units: u64) {
    let offer = Offer {
        lender: lender(host, incarnation),
        bytes: units * UNIT,
    };
    registry.offer(&offer, TTL).unwrap();
}

pub(super) fn want(vm: &str, bytes: u64) -> Want {
    Want {
        borrower: "borrower".into(),
        vm: vm.into(),
        bytes,
        disk_bytes: 0,
        durability: Durability::Disk,
        apart_from: Vec::new(),
    }
}

pub(super) fn take(registry: &dyn Registry, units: u64) -> Result<Lease, RegistryError> {
    registry.take(&want("vm", units * UNIT), TTL)
}

fn endpoint(path: &str) -> Endpoint {
    Endpoint {
        address: Address::Unix(path.into()),
        key: None,
        transport: super::endpoint::Transport::Nbd,
    }
}

fn largest(refused: Result<Lease, RegistryError>) -> (u64, usize) {
    match refused {
        Err(RegistryError::NothingToSpare {
            largest, lenders, ..
        }) => (largest / UNIT, lenders),
        other => panic!("{other:?}"),
    }
}

/// Checks that no lender has lent more than it offered.
pub(super) fn check(picture: &Picture) {
    for lender in &picture.lenders {
        let of_it = |lease: &&Lease| lease.lender.host == lender.lender.host;
        let lent: u64 = picture.leases.iter().filter(of_it).map(|l| l.bytes).sum();
        assert_eq!(lent, lender.lent_bytes);
        assert!(lent <= lender.offered_bytes, "{picture:?}");
    }
}

/// Runs all tests of the suite on new registries that `make` creates.
pub(super) fn suite(make: &dyn Fn() -> Fixture) {
    bytes_are_lent_once_and_come_back_by_their_lender_alone(&make());
    deadlines(&make());
    who_has_no_other_copy_has_time_to_make_one(&make());
    the_borrower_of_a_part_of_a_disk_has_time_to_copy_the_whole_disk(&make());
    incarnations(&make());
    an_export_is_for_its_borrower(&make());
    choices(&make());
    nonsense_is_refused(&make());
    takers_at_once(&make());
}

fn bytes_are_lent_once_and_come_back_by_their_lender_alone(fixture: &Fixture) {
    let registry = &*fixture.registry;
    assert_eq!(largest(take(registry, 1)), (0, 0));
    offer(registry, "a", 1, 100);
    let first = take(registry, 60).unwrap();
    assert_eq!(first.state, LeaseState::Taken);
    assert_eq!(largest(take(registry, 60)), (40, 1));
    // The lender now offers less than it has lent, and then more again.
    offer(registry, "a", 1, 50);
    assert_eq!(largest(take(registry, 1)), (0, 1));
    offer(registry, "a", 1, 100);
    registry.release(first.id, "borrower").unwrap();
    assert_eq!(largest(take(registry, 60)), (40, 1));
    // Neither another lender nor another run of the lender can end the lease.
    registry.ended(first.id, &lender("b", 1)).unwrap();
    registry.ended(first.id, &lender("a", 2)).unwrap();
    assert_eq!(largest(take(registry, 60)), (40, 1));
    registry.ended(first.id, &lender("a", 1)).unwrap();
    registry.ended(first.id, &lender("a", 1)).unwrap();
    registry.release(first.id, "borrower").unwrap();
    let second = take(registry, 100).unwrap();
    assert!(second.id > first.id);
    check(&registry.picture().unwrap());
}

fn deadlines(fixture: &Fixture) {
    let registry = &*fixture.registry;
    offer(registry, "a", 1, 100);
    let lease = take(registry, 60).unwrap();
    assert!(lease.left_ms > 0 && lease.left_ms <= 10_000 && lease.recall_ms.is_none());
    (fixture.advance)(TTL);
    // The lease has expired, but nobody else gets its bytes before the lender has ended it.
    offer(registry, "a", 1, 100);
    assert_eq!(registry.picture().unwrap().leases[0].left_ms, 0);
    assert_eq!(largest(take(registry, 60)), (40, 1));
    assert!(registry.renew(lease.id, "borrower", TTL).unwrap().left_ms > 0);
    let long = Duration::from_secs(60);
    registry.recall(lease.id, &lender("a", 1), long).unwrap();
    registry.recall(lease.id, &lender("a", 1), TTL).unwrap();
    registry.recall(lease.id, &lender("a", 1), long).unwrap();
    let recalled = registry.renew(lease.id, "borrower", long).unwrap();
    assert!(recalled.recall_ms.unwrap() <= 10_000, "{recalled:?}");
    assert!(matches!(
        registry.recall(lease.id, &lender("b", 1), TTL),
        Err(RegistryError::NoLease { .. })
    ));
    // The lender sends no more messages.
    (fixture.advance)(TTL);
    let picture = registry.picture().unwrap();
    assert!(picture.lenders[0].silent_ms >= 10_000 && picture.lenders[0].left_ms == 0);
    assert_eq!(largest(take(registry, 1)), (0, 0));
}

fn who_has_no_other_copy_has_time_to_make_one(fixture: &Fixture) {
    const MIB: u64 = 1 << 20;
    let registry = &*fixture.registry;
    offer(registry, "a", 1, 4000 * MIB / UNIT);
    let ours = lender("a", 1);
    let [asked, other] = [0; 2].map(|_| take(registry, 2000 * MIB / UNIT).unwrap().id);
    registry.recall(asked, &ours, Duration::ZERO).unwrap();
    assert!(matches!(
        registry.sole_copy(asked, "other"),
        Err(RegistryError::NoLease { .. })
    ));
    // A call of etcd may take seconds on a busy machine.
    let late = u64::try_from(patience(Duration::from_secs(2)).as_millis()).unwrap();
    // The borrower has 10 s, and one second for each 20 MiB, which are granted only once.
    let is_110_s = |ms: Option<u64>| ms.is_some_and(|ms| (110_000 - late..=110_000).contains(&ms));
    let lease = registry.sole_copy(asked, "borrower").unwrap();
    assert_eq!(lease.durability, Durability::None);
    assert!(is_110_s(lease.recall_ms), "{lease:?}");
    // With several clients of an etcd, each counts the time from when it first saw the deadline.
    for _ in 0..8 {
        registry.picture().unwrap();
    }
    (fixture.advance)(Duration::from_secs(3));
    let again = registry.sole_copy(asked, "borrower").unwrap();
    assert!(again.recall_ms.unwrap() <= 107_000, "{again:?}");
    // A lost copy alone does not recall the lease. A recall after that grants the time to copy,
    // although the lender does not know yet that the copy is lost.
    let lease = registry.sole_copy(other, "borrower").unwrap();
    assert_eq!(
        (lease.durability, lease.recall_ms),
        (Durability::None, None)
    );
    registry.recall(other, &ours, TTL).unwrap();
    let lease = registry.renew(other, "borrower", TTL).unwrap();
    assert_eq!(lease.durability, Durability::None);
    assert!(lease.recall_ms.unwrap() >= 100_000 - late, "{lease:?}");
    assert!(lease.recall_ms.unwrap() <= 100_000, "{lease:?}");
    let all = registry.picture().unwrap().leases;
    assert!(all.iter().all(|l| l.durability == Durability::None));
}

fn the_borrower_of_a_part_of_a_disk_has_time_to_copy_the_whole_disk(fixture: &Fixture) {
    const MIB: u64 = 1 << 20;
    let registry = &*fixture.registry;
    offer(registry, "a", 1, 4000 * MIB / UNIT);
    let ours = lender("a", 1);
    // A call of etcd may take seconds on a busy machine.
    let late = u64::try_from(patience(Duration::from_secs(2)).as_millis()).unwrap();
    // To copy the part alone would take 25 s, and to copy the whole disk takes 100 s.
    let part = |durability| Want {
        disk_bytes: 2000 * MIB,
        durability,
        ..want("vm", 500 * MIB)
    };
    let none = registry.take(&part(Durability::None), TTL).unwrap();
    assert_eq!((none.bytes, none.disk_bytes), (500 * MIB, 2000 * MIB));
    assert_eq!(none.time_to_give_back().as_secs(), 110);
    registry.recall(none.id, &ours, TTL).unwrap();
    let recalled = registry.renew(none.id, "borrower", TTL).unwrap();
    let left_ms = recalled.recall_ms.unwrap();
    assert!(
        (100_000 - late..=100_000).contains(&left_ms),
        "{recalled:?}"
    );
    // A borrower that loses its copy gets that time, too.
    let disk = registry.take(&part(Durability::Disk), TTL).unwrap();
    assert_eq!(disk.time_to_give_back().as_secs(), 10);
    registry.recall(disk.id, &ours, Duration::ZERO).unwrap();
    let alone = registry.sole_copy(disk.id, "borrower").unwrap();
    let left_ms = alone.recall_ms.unwrap();
    assert!((110_000 - late..=110_000).contains(&left_ms), "{alone:?}");
}

fn incarnations(fixture: &Fixture) {
    let registry = &*fixture.registry;
    offer(registry, "a", 1, 100);
    offer(registry, "b", 7, 10);
    let lease = take(registry, 60).unwrap();
    // The lease ends with the run of the daemon that exported it, and an earlier run cannot lend
    // again.
    offer(registry, "a", 2, 100);
    assert!(registry.picture().unwrap().leases.is_empty());
    let old = Offer {
        lender: lender("a", 1),
        bytes: 1000,
    };
    assert!(matches!(
        registry.offer(&old, TTL),
        Err(RegistryError::Superseded { .. })
    ));
    assert!(matches!(
        registry.renew(lease.id, "borrower", TTL),
        Err(RegistryError::NoLease { .. })
    ));
    let lease = take(registry, 100).unwrap();
    registry.withdraw(&lender("a", 1)).unwrap();
    registry.ended(lease.id, &lender("a", 1)).unwrap();
    let mut left = registry.picture().unwrap().leases;
    // Time may have passed, so the remaining time is not compared.
    for left in &mut left {
        left.left_ms = lease.left_ms;
    }
    assert_eq!(left, vec![lease]);
    registry.withdraw(&lender("a", 2)).unwrap();
    assert_eq!(largest(take(registry, 50)), (10, 1));
    assert_eq!(registry.picture().unwrap().leases.len(), 1);
}

fn an_export_is_for_its_borrower(fixture: &Fixture) {
    let registry = &*fixture.registry;
    offer(registry, "a", 1, 100);
    let id = take(registry, 60).unwrap().id;
    let (ours, place) = (lender("a", 1), endpoint("/run/x"));
    assert_eq!(registry.endpoint(id, "borrower").unwrap(), None);
    for foreign in [lender("a", 2), lender("b", 1)] {
        let refused = registry.publish(id, &foreign, &place);
        assert!(
            matches!(refused, Err(RegistryError::NoLease { .. })),
            "{refused:?}"
        );
    }
    registry.publish(id, &ours, &place).unwrap();
    assert!(matches!(
        registry.publish(id, &ours, &place),
        Err(RegistryError::State { .. })
    ));
    assert_eq!(registry.endpoint(id, "borrower").unwrap(), Some(place));
    for unwelcome in [
        registry.endpoint(id, "other").map(drop),
        registry.renew(id, "other", TTL).map(drop),
        registry.endpoint(LeaseId(id.0 + 1), "borrower").map(drop),
    ] {
        assert!(matches!(unwelcome, Err(RegistryError::NoLease { .. })));
    }
    // A release by another host has no effect.
    registry.release(id, "other").unwrap();
    let now = registry.renew(id, "borrower", TTL).unwrap();
    assert_eq!(now.state, LeaseState::Exported);
    registry.release(id, "borrower").unwrap();
    assert_eq!(registry.endpoint(id, "borrower").unwrap(), None);
    // Only its lender can change a released lease, and only by ending it.
    for refused in [
        registry.renew(id, "borrower", TTL).map(drop),
        registry.publish(id, &ours, &endpoint("/run/y")),
    ] {
        assert!(
            matches!(refused, Err(RegistryError::State { .. })),
            "{refused:?}"
        );
    }
}

fn choices(fixture: &Fixture) {
    let registry = &*fixture.registry;
    offer(registry, "a", 1, 100);
    offer(registry, "b", 1, 90);
    offer(registry, "borrower", 1, 1000);
    let of = |apart: &[&str]| {
        let mut want = want("vm", 50 * UNIT);
        want.apart_from = apart.iter().map(|s| (*s).to_owned()).collect();
        registry.take(&want, TTL)
    };
    let from = |apart: &[&str]| of(apart).unwrap().lender.host;
    // The lender with the most free bytes is chosen, and never the borrower itself.
    assert_eq!(from(&[]), "a");
    assert_eq!(from(&[]), "b");
    // Lender a now has 50 free bytes, and lender b has 40.
    assert_eq!(largest(of(&["a"])).0, 40);
    assert_eq!(from(&[]), "a");
    assert_eq!(largest(of(&[])).0, 40);
}

fn nonsense_is_refused(fixture: &Fixture) {
    let registry = &*fixture.registry;
    let is_value = |r: Result<(), RegistryError>| matches!(r, Err(RegistryError::Value { .. }));
    let bad = |host: &str, bytes| Offer {
        lender: lender(host, 1),
        bytes,
    };
    assert!(is_value(registry.offer(&bad("a/b", 1), TTL)));
    assert!(is_value(registry.offer(&bad("a", u64::MAX), TTL)));
    assert!(is_value(registry.offer(&bad("a", 1), Duration::MAX)));
    offer(registry, "a", 1, 100);
    for bytes in [0, UNIT - 1, u64::MAX] {
        assert!(is_value(registry.take(&want("vm", bytes), TTL).map(drop)));
    }
    assert!(is_value(registry.take(&want("../vm", UNIT), TTL).map(drop)));
    let id = take(registry, 1).unwrap().id;
    let relative = endpoint("x");
    assert!(is_value(registry.publish(id, &lender("a", 1), &relative)));
    check(&registry.picture().unwrap());
}

/// Tests that leases stay consistent while several threads take, release and end them at once, and
/// another thread reads all records.
fn takers_at_once(fixture: &Fixture) {
    const TAKERS: u64 = 4;
    const TURNS: u64 = 40;
    let registry = &fixture.registry;
    for (host, units) in [("a", 1000), ("b", 500)] {
        let offer = Offer {
            lender: lender(host, 1),
            bytes: units * UNIT,
        };
        // Etcd counts real time, and a busy machine needs much of it.
        registry.offer(&offer, patience(TTL)).unwrap();
    }
    let (taken, refused) = (Mutex::new(HashSet::new()), AtomicU64::new(0));
    let running = AtomicU64::new(TAKERS);
    std::thread::scope(|scope| {
        for taker in 0..TAKERS {
            let (taken, refused, running) = (&taken, &refused, &running);
            scope.spawn(move || {
                let mut held: Vec<Lease> = Vec::new();
                for turn in 0..TURNS {
                    match take(&**registry, 100 + taker * 37 + turn) {
                        Ok(lease) => {
                            assert!(taken.lock().unwrap().insert(lease.id), "given out twice");
                            held.push(lease);
                        }
                        Err(_) => _ = refused.fetch_add(1, Ordering::Relaxed),
                    }
                    if turn % 3 == taker % 3 {
                        if let Some(lease) = held.pop() {
                            registry.release(lease.id, "borrower").unwrap();
                            registry.ended(lease.id, &lease.lender).unwrap();
                        }
                    }
                }
                running.fetch_sub(1, Ordering::Relaxed);
            });
        }
        scope.spawn(|| {
            while running.load(Ordering::Relaxed) > 0 {
                check(&registry.picture().unwrap());
            }
        });
    });
    check(&registry.picture().unwrap());
    // Without refusals and many leases, the test would have tested nothing.
    assert!(refused.load(Ordering::Relaxed) > 0 && taken.lock().unwrap().len() > 20);
}

fn sqlite_in(directory: &std::path::Path, clock: &Arc<AtomicI64>) -> SqliteRegistry {
    let clock = clock.clone();
    let now = move || clock.load(Ordering::Relaxed);
    SqliteRegistry::open_at(&directory.join("registry.db"), Arc::new(now), "boot").unwrap()
}

fn advance(clock: Arc<AtomicI64>, kept: tempfile::TempDir) -> Box<dyn Fn(Duration)> {
    Box::new(move |by| {
        let _ = kept.path();
        clock.fetch_add(i64::try_from(by.as_millis()).unwrap(), Ordering::Relaxed);
    })
}

#[test]
fn a_lease_registry_in_sqlite_passes_the_test_suite_of_lease_registries() {
    suite(&|| {
        let (directory, clock) = (tempfile::tempdir().unwrap(), Arc::new(AtomicI64::new(1)));
        Fixture {
            registry: Arc::new(sqlite_in(directory.path(), &clock)),
            advance: advance(clock, directory),
        }
    });
}

#[test]
fn a_lease_registry_called_over_the_network_passes_the_test_suite_of_lease_registries() {
    suite(&|| {
        let (directory, clock) = (tempfile::tempdir().unwrap(), Arc::new(AtomicI64::new(1)));
        let behind = sqlite_in(directory.path(), &clock);
        // The call and its answer pass through JSON text, as they do on a network.
        let transport = move |call: &_| {
            let call = serde_json::to_string(call).unwrap();
            let said = answer(&behind, &serde_json::from_str(&call).unwrap());
            serde_json::from_str(&serde_json::to_string(&said).unwrap()).map_err(|e| e.to_string())
        };
        Fixture {
            registry: Arc::new(CallRegistry::new("elsewhere".into(), transport)),
            advance: advance(clock, directory),
        }
    });
}

/// A registry that uses the next of several registries for each call.
pub(super) struct Several<R>(Vec<R>, AtomicU64);

impl<R> Several<R> {
    pub fn new(all: Vec<R>) -> Self {
        Self(all, AtomicU64::new(0))
    }

    fn one(&self) -> &R {
        let turn = self.1.fetch_add(1, Ordering::Relaxed);
        &self.0[usize::try_from(turn).unwrap() % self.0.len()]
    }
}

impl<R: Registry> Registry for Several<R> {
    fn offer(&self, offer: &Offer, ttl: Duration) -> Result<(), RegistryError> {
        self.one().offer(offer, ttl)
    }
    fn withdraw(&self, lender: &LenderId) -> Result<(), RegistryError> {
        self.one().withdraw(lender)
    }
    fn take(&self, want: &Want, ttl: Duration) -> Result<Lease, RegistryError> {
        self.one().take(want, ttl)
    }
    fn publish(&self, id: LeaseId, l: &LenderId, e: &Endpoint) -> Result<(), RegistryError> {
        self.one().publish(id, l, e)
    }
    fn endpoint(&self, id: LeaseId, borrower: &str) -> Result<Option<Endpoint>, RegistryError> {
        self.one().endpoint(id, borrower)
    }
    fn renew(&self, id: LeaseId, borrower: &str, ttl: Duration) -> Result<Lease, RegistryError> {
        self.one().renew(id, borrower, ttl)
    }
    fn sole_copy(&self, id: LeaseId, borrower: &str) -> Result<Lease, RegistryError> {
        self.one().sole_copy(id, borrower)
    }
    fn recall(&self, id: LeaseId, l: &LenderId, within: Duration) -> Result<(), RegistryError> {
        self.one().recall(id, l, within)
    }
    fn release(&self, id: LeaseId, borrower: &str) -> Result<(), RegistryError> {
        self.one().release(id, borrower)
    }
    fn ended(&self, id: LeaseId, lender: &LenderId) -> Result<(), RegistryError> {
        self.one().ended(id, lender)
    }
    fn picture(&self) -> Result<Picture, RegistryError> {
        self.one().picture()
    }
}

/// Several clients of one database never lend the same bytes twice.
#[test]
fn several_connections_to_one_database_pass_the_test_suite_of_lease_registries() {
    suite(&|| {
        let (directory, clock) = (tempfile::tempdir().unwrap(), Arc::new(AtomicI64::new(1)));
        let all = (0..3)
            .map(|_| sqlite_in(directory.path(), &clock))
            .collect();
        Fixture {
            registry: Arc::new(Several::new(all)),
            advance: advance(clock, directory),
        }
    });
}

#[test]
fn leases_survive_a_daemon_restart_in_database_files_that_only_their_owner_can_read() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(AtomicI64::new(1));
    let lease = {
        let registry = sqlite_in(directory.path(), &clock);
        offer(&registry, "a", 1, 100);
        take(&registry, 60).unwrap()
    };
    let registry = sqlite_in(directory.path(), &clock);
    assert_eq!(registry.picture().unwrap().leases, vec![lease]);
    for entry in std::fs::read_dir(directory.path()).unwrap() {
        let entry = entry.unwrap();
        let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{:?}", entry.path());
    }
}

#[test]
fn after_a_registry_reboot_leases_hold_with_time_to_copy_and_their_numbers_are_not_reused() {
    const MIB: u64 = 1 << 20;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("registry.db");
    let open =
        |now: i64, boot: &str| SqliteRegistry::open_at(&path, Arc::new(move || now), boot).unwrap();
    let lender = LenderId {
        host: "a".into(),
        incarnation: Incarnation(1),
    };
    let before = open(1_000_000_000, "first");
    let offer = Offer {
        lender: lender.clone(),
        bytes: 8000 * MIB,
    };
    before.offer(&offer, Duration::from_secs(10)).unwrap();
    let want = Want {
        borrower: "b".into(),
        vm: "v".into(),
        bytes: 2000 * MIB,
        disk_bytes: 0,
        durability: Durability::None,
        apart_from: Vec::new(),
    };
    let take = |registry: &SqliteRegistry, want: &Want| {
        registry.take(want, Duration::from_secs(5)).unwrap().id
    };
    let [first, second] = [(), ()].map(|()| take(&before, &want));
    let stripe = take(
        &before,
        &Want {
            bytes: MIB,
            disk_bytes: 2000 * MIB,
            ..want.clone()
        },
    );
    let copied = take(
        &before,
        &Want {
            durability: Durability::Disk,
            ..want.clone()
        },
    );
    for id in [second, stripe, copied] {
        before.recall(id, &lender, Duration::from_secs(1)).unwrap();
    }
    drop(before);
    // In the same boot, 3 s later, the lease has 3 s less.
    let picture = open(1_000_003_000, "first").picture().unwrap();
    assert_eq!(picture.leases[0].left_ms, 2000);
    let picture = open(7, "second").picture().unwrap();
    let lender = &picture.lenders[0];
    assert_eq!((lender.left_ms, lender.silent_ms), (0, 0));
    let lefts = picture
        .leases
        .iter()
        .map(|l| (l.id, l.left_ms, l.recall_ms));
    // To copy a disk takes 100 s. Its borrower moves it when half of the lease's time has passed.
    let (minute, holds, recall) = (60_000, 60_000 + 2 * 100_000, Some(110_000));
    assert_eq!(
        lefts.collect::<Vec<_>>(),
        [
            (first, holds, None),
            (second, holds, recall),
            (stripe, holds, recall),
            (copied, minute, Some(minute)),
        ]
    );
    std::fs::remove_file(&path).unwrap();
    let anew = open(8, "second");
    anew.offer(&offer, Duration::from_secs(10)).unwrap();
    let other = take(&anew, &want);
    assert!(![first, second, stripe, copied].contains(&other));
}

#[test]
fn a_registry_restored_from_a_backup_does_not_use_the_numbers_of_newer_leases_again() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(AtomicI64::new(1));
    let [path, backup] = ["registry.db", "backup.db"].map(|name| directory.path().join(name));
    let registry = sqlite_in(directory.path(), &clock);
    offer(&registry, "a", 1, 100);
    let kept = take(&registry, 1).unwrap().id;
    drop(registry);
    std::fs::copy(&path, &backup).unwrap();
    let take_five = || {
        let registry = sqlite_in(directory.path(), &clock);
        [(); 5].map(|()| take(&registry, 1).unwrap().id)
    };
    let before = take_five();
    assert!(before.is_sorted() && before[0] > kept, "{before:?}");
    std::fs::copy(&backup, &path).unwrap();
    let after = take_five();
    // The lender may still export the newer leases, which this registry does not know.
    assert!(
        after.iter().all(|id| !before.contains(id)),
        "{before:?} {after:?}"
    );
    assert!(after.is_sorted() && after[0] > kept, "{after:?}");
}

#[test]
fn a_lender_is_forgotten_after_30_silent_days_unless_a_lease_of_it_is_still_renewed() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(AtomicI64::new(1));
    let registry = sqlite_in(directory.path(), &clock);
    offer(&registry, "gone", 1, 4);
    let [lost, renewed] = [(), ()].map(|()| take(&registry, 1).unwrap().id);
    offer(&registry, "here", 1, 9);
    let overdue = take(&registry, 1).unwrap().id;
    let day = |day: i64| clock.store(day * 24 * 3600 * 1000, Ordering::Relaxed);
    let known = || {
        offer(&registry, "here", 1, 9);
        let picture = registry.picture().unwrap();
        let hosts = picture.lenders.into_iter().map(|view| view.lender.host);
        let leases = picture.leases.iter().map(|lease| lease.id);
        (hosts.collect::<Vec<_>>(), leases.collect::<Vec<_>>())
    };
    let both = vec!["gone".to_owned(), "here".to_owned()];
    day(29);
    assert_eq!(known(), (both.clone(), vec![lost, renewed, overdue]));
    day(31);
    registry.renew(renewed, "borrower", TTL).unwrap();
    // Only its lender, which still reports, ends the lease `overdue`.
    assert_eq!(known(), (both.clone(), vec![renewed, overdue]));
    day(62);
    assert_eq!(known(), (vec!["here".to_owned()], vec![overdue]));
    // The lender may return nevertheless.
    offer(&registry, "gone", 1, 4);
    assert_eq!(known(), (both, vec![overdue]));
}

/// Adds `count` leases of lender `host` to a database: as many as take long to request.
fn add_leases(directory: &std::path::Path, (host, borrower): (&str, &str), count: usize) {
    let by_hand = rusqlite::Connection::open(directory.join("registry.db")).unwrap();
    let add = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?3)
        INSERT INTO leases (host, incarnation, borrower, vm, bytes, state, expires_ms, durability)
        SELECT ?1, 1, ?2, 'vm', 65536, 'taken', 60000, 'disk' FROM n";
    let done = by_hand.execute(add, rusqlite::params![host, borrower, count]);
    assert_eq!(done.unwrap(), count);
}

#[test]
fn a_lender_with_256_leases_is_not_chosen_and_a_host_with_1024_leases_gets_no_more() {
    let directory = tempfile::tempdir().unwrap();
    let registry = sqlite_in(directory.path(), &Arc::new(AtomicI64::new(1)));
    offer(&registry, "a", 1, 100_000);
    add_leases(directory.path(), ("a", "other"), MOST_OF_LENDER - 1);
    let last = take(&registry, 1).unwrap();
    assert_eq!(largest(take(&registry, 1)), (0, 1));
    offer(&registry, "b", 1, 10);
    assert_eq!(take(&registry, 1).unwrap().lender.host, "b");
    registry.ended(last.id, &last.lender).unwrap();
    assert_eq!(take(&registry, 1).unwrap().lender.host, "a");
    // The borrower holds two leases now, of lenders a and b.
    add_leases(directory.path(), ("gone", "borrower"), 1022);
    let refused = take(&registry, 1).unwrap_err().to_string();
    assert!(refused.contains("holds 1024 leases"), "{refused}");
    let id = registry.picture().unwrap().leases.pop().unwrap().id;
    registry.release(id, "borrower").unwrap();
    take(&registry, 1).unwrap();
    take(&registry, 1).unwrap_err();
}

#[test]
fn a_lease_of_the_previous_database_version_counts_as_a_whole_disk() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(AtomicI64::new(1));
    let registry = sqlite_in(directory.path(), &clock);
    offer(&registry, "a", 1, 100);
    let lease = take(&registry, 60).unwrap();
    drop(registry);
    let by_hand = rusqlite::Connection::open(directory.path().join("registry.db")).unwrap();
    let before = "ALTER TABLE leases DROP COLUMN disk_bytes; PRAGMA user_version = 2;";
    by_hand.execute_batch(before).unwrap();
    drop(by_hand);
    let registry = sqlite_in(directory.path(), &clock);
    let known = registry.picture().unwrap().leases.pop().unwrap();
    assert_eq!((known.id, known.disk_bytes), (lease.id, 0));
    assert_eq!(known.bytes_to_copy(), 60 * UNIT);
}

#[test]
fn a_lease_database_of_another_version_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("registry.db");
    drop(SqliteRegistry::open(&path).unwrap());
    let by_hand = rusqlite::Connection::open(&path).unwrap();
    by_hand.pragma_update(None, "user_version", 99).unwrap();
    drop(by_hand);
    let error = SqliteRegistry::open(&path).unwrap_err().to_string();
    assert!(error.contains("version 99"), "{error}");
    let garbage = directory.path().join("garbage");
    std::fs::write(&garbage, "this is no database, it is a text of some length").unwrap();
    let error = SqliteRegistry::open(&garbage).unwrap_err().to_string();
    assert!(error.contains("not a database"), "{error}");
}

/// A step of the property test, in any order.
#[derive(Clone, Debug)]
enum Step {
    Offer(u8, u64),
    Restart(u8),
    Take(u64),
    Release(u8),
    Ended(u8),
    Pass(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0_u8..3, 0_u64..1000).prop_map(|(l, b)| Step::Offer(l, b)),
        (0_u8..3).prop_map(Step::Restart),
        (1_u64..400).prop_map(Step::Take),
        (1_u64..400).prop_map(Step::Take),
        any::<u8>().prop_map(Step::Release),
        any::<u8>().prop_map(Step::Ended),
        (0_u64..6000).prop_map(Step::Pass),
    ];
    proptest::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// After any steps, a lease was only given if the lender's offer at that time had room for it
    /// and for all leases that have not ended.
    #[test]
    fn a_lease_is_granted_only_if_the_offer_has_room_for_all_active_leases_too(steps in steps()) {
        let (directory, clock) = (tempfile::tempdir().unwrap(), Arc::new(AtomicI64::new(1)));
        let registry = sqlite_in(directory.path(), &clock);
        let mut runs = [1_u64; 3];
        let mut held: Vec<Lease> = Vec::new();
        for step in steps {
            match step {
                Step::Offer(host, bytes) => {
                    offer(&registry, &format!("h{host}"), runs[usize::from(host)], bytes);
                }
                Step::Restart(host) => {
                    runs[usize::from(host)] += 1;
                    offer(&registry, &format!("h{host}"), runs[usize::from(host)], 500);
                    held.retain(|l| l.lender.host != format!("h{host}"));
                }
                Step::Take(bytes) => if let Ok(lease) = take(&registry, bytes) {
                    let picture = registry.picture().unwrap();
                    let of = picture.lenders.iter().find(|l| l.lender == lease.lender).unwrap();
                    prop_assert!(of.left_ms > 0 && of.lent_bytes <= of.offered_bytes);
                    held.push(lease);
                },
                Step::Release(n) if !held.is_empty() => {
                    registry.release(held[usize::from(n) % held.len()].id, "borrower").unwrap();
                }
                Step::Ended(n) if !held.is_empty() => {
                    let lease = held.remove(usize::from(n) % held.len());
                    registry.ended(lease.id, &lease.lender).unwrap();
                }
                Step::Pass(ms) => _ = clock.fetch_add(i64::try_from(ms).unwrap(), Ordering::Relaxed),
                Step::Release(_) | Step::Ended(_) => {}
            }
            let mut known: Vec<LeaseId> = registry.picture().unwrap().leases.iter().map(|l| l.id).collect();
            let mut ours: Vec<LeaseId> = held.iter().map(|l| l.id).collect();
            known.sort();
            ours.sort();
            prop_assert_eq!(known, ours);
        }
    }
}
