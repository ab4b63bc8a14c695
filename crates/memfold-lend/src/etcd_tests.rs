//! Tests of the lease registry in real etcd servers, which are killed, stopped and started again.

use std::collections::HashSet;
use std::net::TcpListener;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use memfold_testkit::{bound, patience};
use rustix::process::{Pid, Signal, kill_process};

use super::endpoint::Listen;
use super::etcd_keys::EtcdRegistry;
use super::lease::{Lease, Picture};
use super::place::Member;
use super::registry::Registry;
use super::registry_error::RegistryError;
use super::registry_tests::{Fixture, Several, UNIT, check, lender, offer, suite, take, want};
use super::{Lender, LenderOptions};

/// Returns the path of Debian's etcd as `scripts/setup tests` unpacks it, or of the etcd in `PATH`;
/// `None` if there is none, and the test is skipped.
fn program() -> Option<PathBuf> {
    let unpacked = std::env::var_os("MEMFOLD_CACHE")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/memfold")))
        .map(|cache| cache.join("etcd/etcd"));
    let in_path = PathBuf::from("etcd");
    for program in unpacked.into_iter().chain([in_path]) {
        let output = Command::new(&program).arg("--version").output();
        if output.is_ok_and(|output| output.status.success()) {
            return Some(program);
        }
    }
    assert!(
        std::env::var_os("MEMFOLD_REAL").is_none(),
        "MEMFOLD_REAL is set and there is no etcd: scripts/setup tests"
    );
    memfold_testkit::reports_skip("etcd is not there (scripts/setup tests)")
}

/// One etcd member with a directory of its own.
struct Server {
    child: Child,
    command: Vec<String>,
    program: PathBuf,
    member: Member,
}

/// A cluster of etcd members on ports of 127.0.0.1.
struct Cluster {
    servers: Vec<Server>,
    directory: tempfile::TempDir,
}

fn free_ports(count: usize) -> Vec<u16> {
    let held: Vec<TcpListener> = (0..count)
        .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    let port = |socket: &TcpListener| socket.local_addr().unwrap().port();
    held.iter().map(port).collect()
}

impl Server {
    fn spawn(program: &Path, command: &[String]) -> Child {
        Command::new(program)
            .args(command)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn start_again(&mut self) {
        self.child = Self::spawn(&self.program, &self.command);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The call fails only for a member that has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Cluster {
    fn start(count: usize) -> Option<Self> {
        let program = program()?;
        let directory = tempfile::tempdir().unwrap();
        let ports = free_ports(2 * count);
        let (clients, peers) = ports.split_at(count);
        let names = peers.iter().enumerate();
        let names: Vec<String> = names
            .map(|(n, port)| format!("m{n}=http://127.0.0.1:{port}"))
            .collect();
        let names = names.join(",");
        let server = |n: usize| {
            let (client, peer) = (clients[n], peers[n]);
            let (client_url, peer_url) = (
                format!("http://127.0.0.1:{client}"),
                format!("http://127.0.0.1:{peer}"),
            );
            let place = directory.path().join(format!("m{n}")).display().to_string();
            let command = [
                ("--name", format!("m{n}")),
                ("--data-dir", place),
                ("--listen-client-urls", client_url.clone()),
                ("--advertise-client-urls", client_url),
                ("--listen-peer-urls", peer_url.clone()),
                ("--initial-advertise-peer-urls", peer_url),
                ("--initial-cluster", names.clone()),
                ("--logger", "zap".into()),
                // Guests of other tests write to the same disk. With etcd's defaults, the members
                // elect another leader when an fsync takes a second.
                ("--heartbeat-interval", "200".into()),
                ("--election-timeout", "2000".into()),
            ];
            let command: Vec<String> = command
                .into_iter()
                .flat_map(|(option, value)| [option.to_owned(), value])
                .collect();
            Server {
                child: Server::spawn(&program, &command),
                command,
                program: program.clone(),
                member: Member {
                    host: "127.0.0.1".into(),
                    port: client,
                },
            }
        };
        let cluster = Self {
            servers: (0..count).map(server).collect(),
            directory,
        };
        cluster.wait_serving();
        Some(cluster)
    }

    fn wait_serving(&self) {
        for n in 0..self.servers.len() {
            let registry = self.registry("wait", &[n]);
            wait("etcd serves", || registry.picture().is_ok());
        }
    }

    /// Returns a registry with a key prefix of its own that asks these members.
    fn registry(&self, name: &str, members: &[usize]) -> EtcdRegistry {
        let members = members.iter().map(|n| self.servers[*n].member.clone());
        let prefix = format!("/test/{name}/");
        let mut registry = EtcdRegistry::new("the test's etcd".into(), members.collect(), None);
        registry.prefix = prefix;
        registry
    }
}

#[track_caller]
fn wait(what: &str, ready: impl FnMut() -> bool) {
    memfold_testkit::wait_until(what, Duration::from_secs(60), ready);
}

/// Lets time pass: waits for the time, and for `more`, the time that etcd takes to expire keys.
fn advance(more: Duration) -> Box<dyn Fn(Duration)> {
    Box::new(move |by| std::thread::sleep(by + more))
}

#[test]
fn a_lease_registry_in_etcd_passes_the_test_suite_of_lease_registries() {
    let Some(cluster) = Cluster::start(1) else {
        return;
    };
    let made = AtomicU64::new(0);
    suite(&|| {
        let name = made.fetch_add(1, Ordering::Relaxed).to_string();
        Fixture {
            registry: Arc::new(cluster.registry(&name, &[0])),
            advance: advance(Duration::ZERO),
        }
    });
}

/// Several clients share the registry; each client may see a key later than the others.
#[test]
fn several_clients_of_one_etcd_pass_the_test_suite_of_lease_registries() {
    let Some(cluster) = Cluster::start(1) else {
        return;
    };
    let made = AtomicU64::new(0);
    suite(&|| {
        let name = made.fetch_add(1, Ordering::Relaxed).to_string();
        let all = (0..3).map(|_| cluster.registry(&name, &[0])).collect();
        Fixture {
            registry: Arc::new(Several::new(all)),
            advance: advance(Duration::from_secs(2)),
        }
    });
}

/// Borrower and lender are processes of their own, so each has a registry here.
#[test]
fn a_borrower_that_has_just_started_renews_a_lease_at_once_and_then_only_when_it_has_to() {
    let Some(cluster) = Cluster::start(1) else {
        return;
    };
    let [lender, before, after] = [(); 3].map(|()| cluster.registry("started", &[0]));
    offer(&lender, "a", 1, 100);
    let ttl = Duration::from_secs(60);
    let id = before.take(&want("vm", UNIT), ttl).unwrap().id;
    // Numbers begin at random, because lenders may still export leases of data that etcd has lost.
    assert!(id.0 > 100, "{id}");
    let left = || lender.picture().unwrap().leases[0].left_ms;
    wait("the lease is 3 s old", || left() <= 57_000);
    let renewed = |registry: &EtcdRegistry| {
        registry.renew(id, "borrower", ttl).unwrap();
        let [renewed] = lender.get([&lender.lease_keys(id).renewed]).unwrap();
        renewed.unwrap().revision
    };
    let first = renewed(&after);
    assert!(left() > 57_000, "{}", left());
    assert_eq!(renewed(&after), first);
}

fn is_unusable(error: &RegistryError) -> bool {
    matches!(error, RegistryError::Unusable { .. })
}

/// Checks that each lease in `given` exists once, and that no lender has lent more than it offers.
fn check_given(picture: &Picture, given: &[Lease]) {
    check(picture);
    let numbers: HashSet<u64> = given.iter().map(|lease| lease.id.0).collect();
    assert_eq!(numbers.len(), given.len(), "a number twice");
    for lease in given {
        let known = picture.leases.iter().find(|l| l.id == lease.id);
        let known = known.unwrap_or_else(|| panic!("{lease:?} is forgotten"));
        assert_eq!((known.bytes, &known.vm), (lease.bytes, &lease.vm));
    }
}

#[test]
fn a_restarted_etcd_loses_no_lease_and_grants_no_memory_twice() {
    const BYTES: u64 = 1000 * UNIT;
    let Some(mut cluster) = Cluster::start(1) else {
        return;
    };
    let registry = cluster.registry("killed", &[0]);
    let long = Duration::from_secs(600);
    let ours = super::registry::Offer {
        lender: lender("a", 1),
        bytes: BYTES,
    };
    registry.offer(&ours, long).unwrap();
    let (given, failed) = (Mutex::new(Vec::new()), AtomicU64::new(0));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for taker in 0..3 {
            let (registry, given, failed, over) =
                (cluster.registry("killed", &[0]), &given, &failed, &over);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    match registry.take(&want(&format!("vm{taker}"), 3 * UNIT), long) {
                        Ok(lease) => given.lock().unwrap().push(lease),
                        Err(error) if is_unusable(&error) => {
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(RegistryError::NothingToSpare { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
        }
        for _ in 0..3 {
            let before = given.lock().unwrap().len();
            wait("leases are given", || {
                given.lock().unwrap().len() > before + 7
            });
            cluster.servers[0].kill();
            let before = failed.load(Ordering::Relaxed);
            wait("requests fail", || {
                failed.load(Ordering::Relaxed) > before + 1
            });
            cluster.servers[0].start_again();
            wait("it serves again", || registry.picture().is_ok());
        }
        over.store(true, Ordering::Relaxed);
    });
    let given = given.into_inner().unwrap();
    let picture = registry.picture().unwrap();
    check_given(&picture, &given);
    println!(
        "{} leases given, {} known, {} requests failed",
        given.len(),
        picture.leases.len(),
        failed.load(Ordering::Relaxed)
    );
    assert!(given.len() > 20 && failed.load(Ordering::Relaxed) > 3);
    // Leases that no borrower knows are ended by their lender like all others, and then all bytes
    // are free again.
    for lease in &picture.leases {
        registry.ended(lease.id, &lease.lender).unwrap();
    }
    registry.take(&want("all", BYTES), long).unwrap();
}

#[test]
fn etcd_forgets_a_lender_after_a_long_silence_unless_a_lease_of_it_is_still_renewed() {
    let Some(cluster) = Cluster::start(1) else {
        return;
    };
    let mut registry = cluster.registry("forgotten", &[0]);
    // Instead of 30 days.
    registry.forgotten = Duration::from_secs(3);
    let [short, long] = [1, 600].map(Duration::from_secs);
    offer(&registry, "gone", 1, 4);
    registry.take(&want("lost", UNIT), short).unwrap();
    let renewed = registry.take(&want("renewed", UNIT), long).unwrap().id;
    registry.withdraw(&lender("gone", 1)).unwrap();
    let known = || {
        offer(&registry, "here", 1, 9);
        let picture = registry.picture().unwrap();
        let hosts = picture.lenders.into_iter().map(|view| view.lender.host);
        let leases = picture.leases.iter().map(|lease| lease.id);
        (hosts.collect::<Vec<_>>(), leases.collect::<Vec<_>>())
    };
    let both = vec!["gone".to_owned(), "here".to_owned()];
    wait("a lease is forgotten", || known().1 == [renewed]);
    assert_eq!(known(), (both.clone(), vec![renewed]));
    // The account no longer counts the bytes of the forgotten lease.
    assert_eq!(registry.picture().unwrap().lenders[0].lent_bytes, UNIT);
    registry.ended(renewed, &lender("gone", 1)).unwrap();
    let here = vec!["here".to_owned()];
    wait("the lender is forgotten", || {
        known() == (here.clone(), Vec::new())
    });
    // The lender may return nevertheless.
    offer(&registry, "gone", 1, 4);
    assert_eq!(known(), (both, Vec::new()));
}

/// Copies a directory with all that is in it. As etcd wants it, only the owner can read the copy.
fn copy_all(from: &Path, to: &Path) {
    let mut builder = std::fs::DirBuilder::new();
    builder.mode(0o700).create(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() {
            copy_all(&from, &to);
        } else {
            std::fs::copy(from, to).unwrap();
        }
    }
}

#[test]
fn after_etcd_was_restored_from_a_backup_no_used_lease_looks_expired_and_no_lender_silent() {
    let Some(mut cluster) = Cluster::start(1) else {
        return;
    };
    let [watching, borrower, another] = [(); 3].map(|()| cluster.registry("restored", &[0]));
    let long = Duration::from_secs(600);
    let offer = |units: u64| {
        let ours = super::registry::Offer {
            lender: lender("a", 1),
            bytes: units * UNIT,
        };
        // The connection to an etcd that was started again is lost at the first use.
        wait("the offer is stored", || {
            watching.offer(&ours, long).is_ok()
        });
    };
    offer(100);
    let kept = borrower.take(&want("vm", UNIT), long).unwrap().id;
    let renew = |registry: &EtcdRegistry| {
        wait("the renewal is stored", || {
            registry.renew(kept, "borrower", long).is_ok()
        });
    };
    let place = cluster.directory.path();
    let (data, backup) = (place.join("m0"), place.join("backup"));
    cluster.servers[0].kill();
    copy_all(&data, &backup);
    cluster.servers[0].start_again();
    cluster.wait_serving();
    // After the backup, the lender reports, and the lease is renewed by a daemon that has just
    // started.
    offer(99);
    renew(&another);
    renew(&borrower);
    let newer = borrower.take(&want("vm", UNIT), long).unwrap().id;
    wait("the renewal is 3 s old", || {
        watching.picture().unwrap().leases[0].left_ms <= 597_000
    });
    cluster.servers[0].kill();
    std::fs::remove_dir_all(&data).unwrap();
    std::fs::rename(&backup, &data).unwrap();
    cluster.servers[0].start_again();
    let mut picture = None;
    wait("it serves the backup", || {
        picture = watching.picture().ok();
        picture.is_some()
    });
    let picture = picture.unwrap();
    let (lender, leases) = (&picture.lenders[0], &picture.leases);
    assert_eq!(leases.iter().map(|l| l.id).collect::<Vec<_>>(), [kept]);
    assert!(leases[0].left_ms > 599_000, "{leases:?}");
    assert!(lender.silent_ms < 1000, "{lender:?}");
    assert!(lender.left_ms > 599_000, "{lender:?}");
    // The borrower no longer knows when its lease was renewed last, so it renews the lease now.
    let revision = || {
        let [renewed] = watching.get([&watching.lease_keys(kept).renewed]).unwrap();
        renewed.unwrap().revision
    };
    let before = revision();
    renew(&borrower);
    assert!(revision() > before);
    assert!(matches!(
        borrower.renew(newer, "borrower", long),
        Err(RegistryError::NoLease { .. })
    ));
    // The lender may still export the lease that etcd has lost.
    let next = borrower.take(&want("vm", UNIT), long).unwrap().id;
    assert!(next > kept && next != newer, "{next} {newer}");
}

#[test]
fn a_host_cut_off_from_the_etcd_majority_gets_no_lease_and_no_memory_is_granted_twice() {
    let Some(cluster) = Cluster::start(3) else {
        return;
    };
    let (alone, most) = (
        cluster.registry("cut", &[0]),
        cluster.registry("cut", &[1, 2]),
    );
    wait("all agree", || {
        offer(&alone, "a", 1, 100);
        most.picture().is_ok_and(|p| p.lenders.len() == 1)
    });
    let first = take(&alone, 10).unwrap();
    cluster.servers[0].signal(Signal::STOP);
    // The cut-off client requests the remaining bytes before it can know that it is cut off; the
    // request waits.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let begun = Instant::now();
            (take(&alone, 90), begun.elapsed())
        });
        // The other members may need to elect a leader first.
        let mut taken = None;
        wait("the others go on", || {
            offer_until(&most);
            taken = take(&most, 90).ok();
            taken.is_some()
        });
        let (refused, after) = waiting.join().unwrap();
        assert!(is_unusable(&refused.unwrap_err()));
        // The request is tried twice for 3 s; without a time limit it would wait until the cut
        // ends.
        assert!(after < bound(Duration::from_secs(20)), "{after:?}");
    });
    cluster.servers[0].signal(Signal::CONT);
    // The waiting request was compared with the changed account, and was refused.
    let mut picture = None;
    wait("it is heard again", || {
        picture = alone.picture().ok();
        picture.is_some()
    });
    let picture = picture.unwrap();
    check(&picture);
    assert_eq!(picture.leases.len(), 2);
    offer_until(&most);
    assert!(matches!(
        take(&alone, 1),
        Err(RegistryError::NothingToSpare { largest: 0, .. })
    ));
    assert!(picture.leases.iter().any(|lease| lease.id == first.id));
    // Without most of the members, no client gets anything.
    cluster.servers[0].signal(Signal::STOP);
    cluster.servers[1].signal(Signal::STOP);
    for error in [take(&most, 1).unwrap_err(), take(&most, 1).unwrap_err()] {
        assert!(is_unusable(&error), "{error}");
    }
    assert!(is_unusable(&most.picture().unwrap_err()));
    for server in &cluster.servers[..2] {
        server.signal(Signal::CONT);
    }
    let mut picture = None;
    wait("all go on", || {
        picture = most.picture().ok();
        picture.is_some()
    });
    check(&picture.unwrap());
}

/// Repeats the offer until the cluster accepts it; a cluster without a leader does not.
fn offer_until(registry: &EtcdRegistry) {
    let ours = super::registry::Offer {
        lender: lender("a", 1),
        bytes: 100 * UNIT,
    };
    wait("the offer is heard", || {
        registry.offer(&ours, super::registry_tests::TTL).is_ok()
    });
}

#[test]
fn if_one_member_of_an_etcd_cluster_is_down_leases_are_granted_through_the_others() {
    let Some(mut cluster) = Cluster::start(3) else {
        return;
    };
    let registry = cluster.registry("gone", &[0, 1, 2]);
    wait("all agree", || registry.picture().is_ok());
    for gone in 0..3 {
        cluster.servers[gone].kill();
        wait("the others have a leader", || registry.picture().is_ok());
        offer(&registry, "a", 1, 100);
        take(&registry, 10).unwrap();
        cluster.servers[gone].start_again();
        cluster.wait_serving();
    }
    assert_eq!(registry.picture().unwrap().leases.len(), 3);
}

#[test]
fn while_etcd_is_stopped_an_export_of_lent_memory_still_ends_at_its_deadline() {
    const MIB: u64 = 1 << 20;
    let nbdkit = Command::new("nbdkit").arg("--version").output();
    if nbdkit.is_err() {
        memfold_testkit::skip!("nbdkit is not installed");
    }
    let Some(cluster) = Cluster::start(1) else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let registry = Arc::new(cluster.registry("orphan", &[0]));
    let options = LenderOptions {
        host: "a".into(),
        max_bytes: 64 * MIB,
        listen: Listen::Unix,
        directory: directory.path().join("exports"),
        owed: Arc::default(),
        short_guests: Arc::default(),
        wanted_back: Arc::default(),
        kept: Arc::default(),
    };
    let host = Lender::start(options, registry.clone()).unwrap();
    let end = Instant::now() + patience(Duration::from_secs(120)).min(Duration::from_secs(300));
    while host.status().offer_bytes < 64 * MIB {
        if Instant::now() > end {
            memfold_testkit::skip!("nothing to spare here: {:?}", host.status());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let ttl = patience(Duration::from_secs(15));
    let taken = Instant::now();
    let lease = registry.take(&want("v", 16 * MIB), ttl).unwrap();
    let exported = || registry.endpoint(lease.id, "borrower").unwrap();
    wait("it is exported", || exported().is_some());
    let socket = exported().unwrap().address;
    let super::Address::Unix(socket) = socket else {
        panic!("{socket:?}");
    };
    let is_served = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
    assert!(is_served());
    cluster.servers[0].signal(Signal::STOP);
    wait("its export ends", || !is_served());
    let after = taken.elapsed();
    println!("ended {after:?} after it was taken for {ttl:?}");
    // The lender's thread may wait for etcd for up to 3 s, and this machine may be busy. Etcd stays
    // stopped all the time.
    assert!(after >= ttl && after < ttl + bound(Duration::from_secs(30)));
    // No borrower gets these bytes before etcd has learned that they are free.
    cluster.servers[0].signal(Signal::CONT);
    wait("etcd knows", || {
        registry.picture().is_ok_and(|p| p.leases.is_empty())
    });
    wait("it lends again", || {
        registry.take(&want("v", 64 * MIB), ttl).is_ok()
    });
}

#[test]
fn an_unreachable_etcd_and_a_malformed_etcd_answer_are_reported() {
    let port = free_ports(1)[0];
    let member = Member {
        host: "127.0.0.1".into(),
        port,
    };
    let place = format!("etcd+http://{member}");
    let registry = EtcdRegistry::new(place.clone(), vec![member], None);
    let error = registry.picture().unwrap_err().to_string();
    assert!(
        error.contains(&place) && error.contains("refused"),
        "{error}"
    );
    let nonsense = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let answering = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = nonsense.accept().unwrap();
        let _ = stream.read(&mut [0; 4096]).unwrap();
        let body = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]";
        stream.write_all(body.as_bytes()).unwrap();
    });
    let error = registry.picture().unwrap_err().to_string();
    assert!(error.contains("cannot parse etcd"), "{error}");
    answering.join().unwrap();
}
