//! Renews the leases of a swap disk's lent RAM, and reacts to leases, lenders and relay processes
//! that seem lost.
//!
//! QEMU's connection to lent RAM is ended on such a suspicion only if another copy of the bytes is
//! known to be complete. Otherwise the swap disk is moved to this host's disk while the lender may
//! still answer. If the lender does not, the relay between QEMU and the lender ends by itself.

use std::time::{Duration, Instant};

use memfold_lend::RegistryError;
use memfold_lend::graph::Part;
use memfold_lend::relay::start::Running;
use memfold_lend::wire::{MOVE_AFTER, PATIENCE};
use tracing::warn;

use crate::leases::{Leases, lease_ttl};
use crate::swap_disks::guard::Guard;

/// Reasons to move a swap disk of which no other complete copy is known.
const UNKNOWN_LEASE: &str =
    "lease ended or unknown to the registry, and the copy on this host is not verified";
const SILENT: &str = "lender's daemon does not report, and no other complete copy is known";

/// Time after which the second lender of a replica is late. If the first lender has gone silent at
/// about the same time, it has been given up by then, also if no request waits for it: the kernel
/// ends an idle connection after [`PATIENCE`].
const LATE: Duration = Duration::from_secs(5);

/// Time limit for a relay, which runs on this host, to answer a question.
const RELAY_ANSWER: Duration = Duration::from_millis(200);

/// Renews the leases of a loan once. Returns whether a lender wants its memory back.
pub(super) fn renew_leases(leases: &Leases, guard: &Guard) -> bool {
    let vm = &guard.vm;
    let borrowing = guard.borrowing();
    let ttl = lease_ttl(borrowing.durability_now(), borrowing.bytes);
    let mut wanted = false;
    // Earliest end of all leases, according to the registry.
    let mut holds: Option<Instant> = None;
    let mut heard_all = true;
    let mut doubt = None;
    for (number, part) in borrowing.reached() {
        for stripe in part.stripes() {
            let alone = borrowing.copy_failed;
            match leases.renew_lease(stripe.lease, ttl, alone) {
                Ok(lease) => {
                    wanted |= lease.recall_ms.is_some();
                    let until = Instant::now() + Duration::from_millis(lease.left_ms);
                    holds = Some(holds.map_or(until, |holds| holds.min(until)));
                }
                Err(error @ (RegistryError::NoLease { .. } | RegistryError::State { .. }))
                    if borrowing.has_whole_copy() =>
                {
                    warn!(vm, %error, "lease ended or unknown to the registry, lender no longer used; swap disk continues on its other copy");
                    guard.cut(number);
                }
                Err(RegistryError::NoLease { .. } | RegistryError::State { .. })
                    if borrowing.has_copy() =>
                {
                    doubt = Some(UNKNOWN_LEASE);
                    heard_all = false;
                }
                // The lease still holds for a while, and its end is also known to the lender.
                Err(_) => heard_all = false,
            }
        }
    }
    let has_spare = borrowing
        .reached()
        .all(|(part, _)| guard.is_elsewhere(part));
    let patience = if has_spare { PATIENCE } else { MOVE_AFTER };
    for part in leases.silent_parts(&borrowing, patience) {
        if guard.is_elsewhere(part) {
            let lenders = borrowing.parts[part].lenders();
            warn!(
                vm,
                lenders,
                "lender does not answer and is no longer used; check the lender's daemon and network"
            );
            guard.cut(part);
        } else {
            doubt = Some(SILENT);
        }
    }
    let mut state = guard.state.lock();
    state.doubt = doubt;
    if heard_all {
        state.holds = holds;
    }
    wanted
}

/// Cuts off the second lender of a replica if it lets QEMU wait and the first lender does not. If
/// both are silent, this host's own network may be away: the first lender is then given up after
/// 3 s, and the second one is the only copy.
pub(super) fn cut_late_copy(guard: &Guard) {
    cut_late(guard, waited);
}

/// Returns for how long QEMU has waited for a relay; `None` if the relay does not say it.
pub(super) fn waited(relay: &Running) -> Option<Duration> {
    relay.waited(RELAY_ANSWER).ok()
}

fn cut_late(guard: &Guard, waited: impl Fn(&Running) -> Option<Duration>) {
    let borrowing = guard.borrowing();
    let reached: Vec<_> = borrowing.reached().collect();
    let [(_, first), (late, second)] = reached[..] else {
        return;
    };
    let waited = |part: &Part| part.relay.as_ref().and_then(&waited);
    let is_late = waited(second).is_some_and(|waited| waited >= LATE);
    let is_prompt = || waited(first).is_some_and(|waited| waited < PATIENCE / 2);
    if is_late && is_prompt() && guard.is_elsewhere(late) {
        warn!(
            vm = guard.vm,
            lenders = second.lenders(),
            "lender does not answer and is no longer used; check the lender's daemon and network"
        );
        guard.cut(late);
    }
}

/// Reacts to relay processes that are stopped, so that QEMU waits for them. A relay is cut off if
/// its bytes are elsewhere, and is resumed otherwise. `is_told`: whether a stop was logged before.
pub(super) fn end_stop(guard: &Guard, is_told: &mut bool) {
    let mut has_resumed = false;
    for (part, lent) in guard.borrowing().reached() {
        let Some(relay) = lent.relay.as_ref().filter(|relay| relay.is_stopped()) else {
            continue;
        };
        if guard.is_elsewhere(part) {
            warn!(
                vm = guard.vm,
                "relay process between QEMU and the lender was stopped (SIGSTOP), so the lender is no longer used; do not stop relay processes"
            );
            guard.cut(part);
        } else {
            // A relay that has ended meanwhile is found by its connection.
            has_resumed |= relay.resume().is_ok();
        }
    }
    if has_resumed && !std::mem::replace(is_told, true) {
        warn!(
            vm = guard.vm,
            "relay process between QEMU and the lender was stopped, and was resumed because the lender has the only complete copy of the swap disk; do not stop or debug relay processes"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::process::{Child, Command};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI64, Ordering};

    use memfold_lend::graph::{Borrowing, Phase, Stripe};
    use memfold_lend::wire::Wire;
    use memfold_lend::{
        Address, Durability, Incarnation, LeaseId, LenderId, Offer, Registry, SqliteRegistry, Want,
    };
    use memfold_vm::{Identity, Process};
    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    const MIB: u64 = 1 << 20;
    const TTL: Duration = Duration::from_secs(600);

    /// A loan of a VM, and a registry whose time the test advances.
    struct Fixture {
        _directory: tempfile::TempDir,
        leases: Leases,
        clock: Arc<AtomicI64>,
        registry: Arc<SqliteRegistry>,
        guard: Arc<Guard>,
        /// Both ends of each connection.
        _relays: Vec<[UnixStream; 2]>,
    }

    /// Returns a loan whose copy, with durability `disk`, is not verified.
    fn fixture(durability: Durability) -> Fixture {
        let directory = tempfile::tempdir().unwrap();
        let clock = Arc::new(AtomicI64::new(1));
        let now = clock.clone();
        let registry = SqliteRegistry::open_at(
            &directory.path().join("registry.db"),
            Arc::new(move || now.load(Ordering::Relaxed)),
            "boot",
        );
        let registry = Arc::new(registry.unwrap());
        offer(&registry);
        let want = Want {
            borrower: "borrower".into(),
            vm: "v".into(),
            bytes: MIB,
            disk_bytes: 0,
            durability,
            apart_from: Vec::new(),
        };
        let copies = if durability == Durability::Replica {
            2
        } else {
            1
        };
        let (mut parts, mut wires, mut relays) = (Vec::new(), Vec::new(), Vec::new());
        for copy in 0..copies {
            let (address, ends) = connection(&directory.path().join(format!("relay-{copy}")));
            wires.push(Wire::find(&own_process(), &address).unwrap());
            relays.push(ends);
            parts.push(Part {
                first: Stripe {
                    lease: registry.take(&want, TTL).unwrap().id,
                    lender: "lender".into(),
                    address,
                },
                others: Vec::new(),
                relay: None,
                lost: false,
            });
        }
        let borrowing = Borrowing {
            generation: 1,
            durability,
            bytes: MIB,
            parts,
            copy: (durability == Durability::Disk).then(|| "/copy".into()),
            copy_failed: false,
            copy_unwatched: durability == Durability::Disk,
            phase: Phase::Lent,
            by_itself: false,
        };
        let leases = Leases::of_registry("borrower", registry.clone(), directory.path());
        Fixture {
            leases,
            clock,
            registry,
            guard: Guard::new("v", borrowing, wires),
            _relays: relays,
            _directory: directory,
        }
    }

    fn offer(registry: &SqliteRegistry) {
        let offer = Offer {
            lender: LenderId {
                host: "lender".into(),
                incarnation: Incarnation(1),
            },
            bytes: 16 * MIB,
        };
        registry.offer(&offer, TTL).unwrap();
    }

    fn own_process() -> Process {
        Process::open(Identity::of(rustix::process::getpid()).unwrap()).unwrap()
    }

    /// Returns a connection of this process, which takes the place of QEMU and of a relay.
    fn connection(path: &Path) -> (Address, [UnixStream; 2]) {
        let listener = UnixListener::bind(path).unwrap();
        let client = UnixStream::connect(path).unwrap();
        let (relay, _) = listener.accept().unwrap();
        (Address::Unix(path.to_owned()), [client, relay])
    }

    impl Fixture {
        /// Makes the lender silent for so many seconds, while the registry answers all the time.
        fn silence(&self, seconds: i64) {
            self.clock.fetch_add(1000 * seconds, Ordering::Relaxed);
            self.leases.heard_for(TTL);
        }

        fn verified(&self) {
            self.guard.state.lock().borrowing.copy_unwatched = false;
        }

        fn forget_lease(&self) {
            let id = self.guard.borrowing().parts[0].first.lease;
            self.registry.release(id, "borrower").unwrap();
        }

        /// Renews the leases. Returns whether the connection was cut, and whether the swap disk is
        /// to be moved.
        fn renew(&self) -> (bool, bool) {
            assert!(!renew_leases(&self.leases, &self.guard));
            let is_cut = !self.guard.ended().is_empty();
            (is_cut, self.guard.is_in_danger().is_some())
        }
    }

    #[test]
    fn a_silent_lender_is_cut_off_only_if_the_copy_on_disk_is_verified() {
        let fixture = fixture(Durability::Disk);
        assert_eq!(fixture.renew(), (false, false));
        fixture.silence(40);
        assert_eq!(fixture.renew(), (false, true));
        // The lender's daemon answers again before the disk was moved.
        offer(&fixture.registry);
        assert_eq!(fixture.renew(), (false, false));
        fixture.silence(40);
        fixture.verified();
        assert_eq!(fixture.renew(), (true, false));
    }

    #[test]
    fn a_silent_lender_with_the_only_copy_is_not_cut_off_and_the_disk_is_moved_after_30_seconds() {
        let fixture = fixture(Durability::None);
        fixture.silence(25);
        assert_eq!(fixture.renew(), (false, false));
        fixture.silence(10);
        assert_eq!(fixture.renew(), (false, true));
        fixture.silence(600);
        assert_eq!(fixture.renew(), (false, true));
    }

    #[test]
    fn of_two_silent_lenders_with_a_copy_each_only_one_is_cut_off() {
        let fixture = fixture(Durability::Replica);
        assert_eq!(fixture.renew(), (false, false));
        fixture.silence(5);
        for silent in [0, 600] {
            fixture.silence(silent);
            assert!(fixture.renew().0);
            assert_eq!(fixture.guard.ended(), [0]);
        }
    }

    #[test]
    fn the_second_lender_of_a_replica_is_cut_off_only_if_it_alone_lets_the_vm_wait() {
        let seconds = |s: &[u64; 2]| s.map(Duration::from_secs);
        for (waits, is_cut) in [
            ([0, 0], false),
            ([0, 4], false),
            ([0, 6], true),
            ([2, 6], false),
            ([6, 6], false),
        ] {
            let fixture = fixture(Durability::Replica);
            let waits = seconds(&waits);
            for part in 0..2 {
                fixture.guard.state.lock().borrowing.parts[part].relay = Some(Running {
                    process: Identity::of(rustix::process::getpid()).unwrap(),
                    socket: format!("/relay-{part}").into(),
                });
            }
            cut_late(&fixture.guard, |relay| {
                Some(waits[usize::from(relay.socket.ends_with("relay-1"))])
            });
            let ended: &[usize] = if is_cut { &[1] } else { &[] };
            assert_eq!(fixture.guard.ended(), ended, "{waits:?}");
        }
    }

    #[test]
    fn while_it_is_unknown_whether_qemu_is_connected_no_lender_counts_as_lost() {
        let fixture = fixture(Durability::None);
        let guard = &fixture.guard;
        let mut state = guard.state.lock();
        state.wires[0] = None;
        state.unknown.insert(0);
        drop(state);
        assert!(guard.ended().is_empty());
        let two = self::fixture(Durability::Replica);
        assert!(two.guard.is_elsewhere(0));
        two.guard.state.lock().unknown.insert(1);
        assert!(!two.guard.is_elsewhere(0));
        // This process is connected to the part's address.
        guard.find_unknown(&own_process()).unwrap();
        assert!(guard.ended().is_empty());
        guard.cut(0);
        assert_eq!(guard.ended(), [0]);
    }

    #[test]
    fn a_lender_whose_lease_has_ended_is_cut_off_only_if_the_copy_on_disk_is_verified() {
        let fixture = fixture(Durability::Disk);
        fixture.forget_lease();
        assert_eq!(fixture.renew(), (false, true));
        fixture.verified();
        assert_eq!(fixture.renew(), (true, false));
        let other = fixture_of_unknown_lease();
        assert_eq!(other.renew(), (false, true));
    }

    /// Starts a process that takes the place of a part's relay, and stops it.
    fn stopped_relay(fixture: &Fixture, part: usize) -> Child {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let relay = Running {
            process: Identity::of(pid).unwrap(),
            socket: "/relay".into(),
        };
        kill_process(pid, Signal::STOP).unwrap();
        while !relay.is_stopped() {
            std::thread::yield_now();
        }
        fixture.guard.state.lock().borrowing.parts[part].relay = Some(relay);
        child
    }

    /// Reacts to a stopped relay of copy 0. Returns whether its connection was cut, and whether the
    /// relay was resumed.
    fn stop(fixture: &Fixture) -> (bool, bool) {
        let mut child = stopped_relay(fixture, 0);
        let relay = fixture.guard.relays().remove(0);
        end_stop(&fixture.guard, &mut false);
        // A signal takes effect when its process runs.
        let end = Instant::now() + Duration::from_secs(60);
        let is_cut = fixture.guard.ended() == [0];
        while !is_cut && relay.is_stopped() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        let is_resumed = !relay.is_stopped();
        child.kill().unwrap();
        child.wait().unwrap();
        (is_cut, is_resumed)
    }

    #[test]
    fn a_stopped_relay_is_resumed_if_it_leads_to_the_only_complete_copy_and_is_cut_off_otherwise() {
        for (durability, is_verified, wanted) in [
            (Durability::None, false, (false, true)),
            (Durability::Disk, false, (false, true)),
            (Durability::Disk, true, (true, false)),
            (Durability::Replica, false, (true, false)),
        ] {
            let fixture = fixture(durability);
            if is_verified {
                fixture.verified();
            }
            assert_eq!(stop(&fixture), wanted, "{durability:?} {is_verified}");
        }
    }

    /// A registry that lost its database does not know the lease.
    fn fixture_of_unknown_lease() -> Fixture {
        let fixture = fixture(Durability::Disk);
        fixture.guard.state.lock().borrowing.parts[0].first.lease = LeaseId(u64::from(u32::MAX));
        fixture
    }
}
