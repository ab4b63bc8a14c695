//! Faults of the network between hosts, by a proxy that harms TCP connections: between the borrower
//! of memory and the lender's export, between a host and the registry of leases, and between a host
//! and an object store. A lost packet is a delay for TCP, so there is no fault of its own for it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;

use memfold_testkit::{S3Server, dose};

use crate::cluster::{Authority, admit, strs};
use crate::lending::{self, Swapping, wait_free};
use crate::support::{Daemon, code, err, refused, wait};

/// What the network does to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// All further bytes arrive late.
    Delay,
    /// The connection ends, with what is on its way.
    Cut,
    /// One side ends after half of a message.
    Truncate,
    /// Two pieces change places.
    Reorder,
    /// Nothing arrives any more, and nobody is told.
    HalfOpen,
}

impl Fault {
    const ALL: [Self; 5] = [
        Self::Delay,
        Self::Cut,
        Self::Truncate,
        Self::Reorder,
        Self::HalfOpen,
    ];
}

/// Which connections are harmed.
#[derive(Clone, Copy, Debug)]
struct Plan {
    number: u64,
    fault: Fault,
    /// Number of bytes, of both directions, that a connection carries before.
    after: u64,
    /// Number of connections that are still to be harmed.
    left: usize,
}

#[derive(Debug, Default)]
struct State {
    plan: Mutex<Option<Plan>>,
    plans: AtomicU64,
    harmed: AtomicU64,
}

/// A proxy on one port. It serves until the test's process ends.
#[derive(Debug)]
struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
}

/// A connection through the proxy.
#[derive(Debug, Default)]
struct Link {
    passed: AtomicU64,
    /// The number of the last plan by which the connection was harmed.
    plan: AtomicU64,
    is_dead: AtomicBool,
}

impl Proxy {
    fn start(listen: &str, to: SocketAddr) -> Self {
        let listener = TcpListener::bind(listen).unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::<State>::default();
        let shared = state.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(to) else {
                    continue;
                };
                let link = Arc::<Link>::default();
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let streams = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let (link, state) = (link.clone(), shared.clone());
                    std::thread::spawn(move || pump(streams, &link, &state));
                }
            }
        });
        Self { address, state }
    }

    /// Harms the next `connections`, each after some bytes.
    fn harm(&self, fault: Fault, after: u64, connections: usize) {
        let plan = Plan {
            number: self.state.plans.fetch_add(1, Ordering::SeqCst) + 1,
            fault,
            after,
            left: connections,
        };
        *self.state.plan.lock().unwrap() = Some(plan);
    }

    /// Ends the faults, and returns how many connections were harmed.
    fn heal(&self) -> u64 {
        *self.state.plan.lock().unwrap() = None;
        self.state.harmed.swap(0, Ordering::SeqCst)
    }
}

/// Copies one direction of a connection.
fn pump((mut from, mut to): (TcpStream, TcpStream), link: &Link, state: &State) {
    let mut buffer = vec![0; 64 << 10];
    let mut held = Vec::new();
    loop {
        let read = from.read(&mut buffer).unwrap_or(0);
        if link.is_dead.load(Ordering::SeqCst) {
            // Both ends believe that the other one lives.
            std::thread::sleep(Duration::from_secs(3600));
        }
        if read == 0 {
            let _ = to.write_all(&held);
            let _ = to.shutdown(Shutdown::Write);
            return;
        }
        let piece = &buffer[..read];
        let passed = link.passed.fetch_add(read as u64, Ordering::SeqCst) + read as u64;
        let begun = fault_of(link, state, passed);
        let written = match begun {
            Some(Fault::Cut) => Err(()),
            Some(Fault::Truncate) => {
                let _ = to.write_all(&piece[..read / 2]);
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
            Some(Fault::HalfOpen) => {
                link.is_dead.store(true, Ordering::SeqCst);
                continue;
            }
            Some(Fault::Reorder) if held.is_empty() => {
                held = piece.to_vec();
                // A message that nothing follows would never arrive.
                let wait = Some(Duration::from_millis(100));
                from.set_read_timeout(wait).unwrap();
                if from.peek(&mut [0]).is_ok_and(|count| count > 0) {
                    Ok(())
                } else {
                    to.write_all(&std::mem::take(&mut held)).map_err(drop)
                }
            }
            Some(Fault::Delay) => {
                std::thread::sleep(Duration::from_millis(5));
                to.write_all(piece).map_err(drop)
            }
            Some(Fault::Reorder) | None => to
                .write_all(piece)
                .and_then(|()| to.write_all(&std::mem::take(&mut held)))
                .map_err(drop),
        };
        from.set_read_timeout(None).unwrap();
        if written.is_err() {
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
            return;
        }
    }
}

/// Returns the fault of a connection that has carried so many bytes.
fn fault_of(link: &Link, state: &State, passed: u64) -> Option<Fault> {
    let mut plan = state.plan.lock().unwrap();
    let plan = plan.as_mut()?;
    if link.plan.load(Ordering::SeqCst) == plan.number {
        return Some(plan.fault);
    }
    if plan.left == 0 || passed <= plan.after {
        return None;
    }
    plan.left -= 1;
    link.plan.store(plan.number, Ordering::SeqCst);
    state.harmed.fetch_add(1, Ordering::SeqCst);
    Some(plan.fault)
}

/// Returns a free port on 127.0.0.1 and 127.0.0.2.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// Returns where the swap disk of the only VM is, as its own host knows.
fn place(borrower: &Daemon) -> String {
    let vms = borrower.json(&["vm", "list"]);
    vms[0]["swap"]["place"].as_str().unwrap().to_owned()
}

#[test]
fn if_the_network_to_a_lender_fails_no_byte_of_a_swap_disk_is_lost() {
    let port = free_port();
    let ports = format!("{port}-{port}");
    let listen = [
        "--listen",
        "127.0.0.1",
        "--announce",
        "127.0.0.2",
        "--ports",
        &ports,
    ];
    let Some(lender) = lending::lender("a", &[], &listen) else {
        return;
    };
    let there = SocketAddr::from(([127, 0, 0, 1], port));
    let proxy = Proxy::start(&format!("127.0.0.2:{port}"), there);
    let borrower = lending::borrower(&lender);
    let vm = Swapping::start(&borrower, "v");
    let rounds = usize::try_from(dose("MEMFOLD_NETWORK_FAULTS", 1)).unwrap();
    let mut harmed = 0;
    for round in 0..rounds {
        for (number, fault) in Fault::ALL.into_iter().enumerate() {
            let pattern = u8::try_from(1 + (round * 5 + number) % 200).unwrap();
            vm.write(pattern, 0);
            // While it borrows, or later, while it writes.
            let after = [300, 1 << 20, 9 << 20, 2000][(round + number) % 4];
            proxy.harm(fault, after, 1 + round % 3);
            let output = borrower.run(&["borrow", "v"]);
            for at in [8, 16, 24, 32] {
                vm.write(pattern, at);
            }
            for at in [0, 8, 16, 24, 32] {
                vm.read(pattern, at);
            }
            harmed += proxy.heal();
            let told = err(&output);
            assert!(
                code(&output) == 0 || told.starts_with("memfold: "),
                "{told}"
            );
            wait("the disk is back", || {
                code(&borrower.run(&["return", "v"])) == 0 && place(&borrower) == "on_disk"
            });
            for at in [0, 8, 16, 24, 32] {
                vm.read(pattern, at);
            }
            wait_free(&lender);
        }
    }
    println!("network faults between borrower and lender: {harmed}");
    assert!(harmed > 0);
}

#[test]
fn if_the_network_to_the_registry_fails_loans_stay_and_requests_fail_with_a_message() {
    let Some(authority) = Authority::new() else {
        return;
    };
    authority.issue("server", 2);
    let serving = authority.serving("server");
    let Some(lender) = lending::lender("a", &strs(&serving), &["--listen", "127.0.0.1"]) else {
        return;
    };
    let (token, url) = admit(&lender, "b");
    let there = url.strip_prefix("https://").unwrap().parse().unwrap();
    let proxy = Proxy::start("127.0.0.1:0", there);
    let token = authority.token("b", &token);
    let asking = authority.asking(&format!("https://{}", proxy.address), &token);
    let borrower = Daemon::start_with(&[&["--host", "b"], strs(&asking).as_slice()].concat());
    let vm = Swapping::start(&borrower, "v");
    vm.write(1, 0);
    let mut harmed = 0;
    for round in 0..dose("MEMFOLD_NETWORK_FAULTS", 1) {
        for fault in Fault::ALL {
            vm.borrow(&[]);
            vm.write(2, 8);
            proxy.harm(fault, 40 + 311 * (round % 8), 3);
            for _ in 0..3 {
                let output = borrower.run(&["leases"]);
                let told = err(&output);
                assert!(code(&output) == 0 || told.contains("registry"), "{told}");
            }
            assert_eq!(place(&borrower), "lent", "{fault:?}");
            vm.read(1, 0);
            vm.read(2, 8);
            // The borrower ends its loan, whatever the registry is told.
            borrower.run(&["return", "v"]);
            vm.read(2, 8);
            harmed += proxy.heal();
            wait("the disk is back", || {
                code(&borrower.run(&["return", "v"])) == 0 && place(&borrower) == "on_disk"
            });
            wait_free(&lender);
        }
    }
    println!("network faults between a host and the registry: {harmed}");
    assert!(harmed > 0);
}

#[test]
fn if_the_network_to_an_object_store_fails_pushed_and_pulled_snapshots_are_whole_or_not_there() {
    let directory = tempfile::tempdir().unwrap();
    let server = match S3Server::start(directory.path()) {
        Ok(server) => server,
        Err(why) => memfold_testkit::skip!("{why}"),
    };
    let proxy = Proxy::start(
        "127.0.0.1:0",
        SocketAddr::from(([127, 0, 0, 1], server.port)),
    );
    let endpoint = format!("http://{}", proxy.address);
    let environment = [
        ("AWS_ACCESS_KEY_ID", "S3RVER"),
        ("AWS_SECRET_ACCESS_KEY", "S3RVER"),
        ("AWS_ENDPOINT", endpoint.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
    ];
    let daemon = Daemon::start_with_environment(&environment);
    daemon.paused_vm("v", &[]);
    daemon.json(&["snapshot", "save", "v", "a"]);
    let url = "s3://memfold/fleet";
    let listed = || -> Vec<Value> {
        let list = daemon.json(&["snapshot", "list", "--remote", url]);
        list.as_array().unwrap().clone()
    };
    // A half-open connection ends after the store's 30 s.
    let rounds = usize::try_from(dose("MEMFOLD_NETWORK_FAULTS", 1)).unwrap();
    let kinds = if rounds == 1 {
        &Fault::ALL[..4]
    } else {
        &Fault::ALL[..]
    };
    let mut harmed = 0;
    for round in 0..rounds {
        for (number, &fault) in kinds.iter().enumerate() {
            let after = [100, 700, 2000, 9000][(round + number) % 4];
            proxy.harm(fault, after, 1 + round % 2);
            let pushed = daemon.run(&["snapshot", "push", "a", url]);
            harmed += proxy.heal();
            let told = err(&pushed);
            assert!(
                code(&pushed) == 0 || told.starts_with("memfold: "),
                "{told}"
            );
            let there = listed();
            assert!(code(&pushed) != 0 || there.len() == 1, "{fault:?}");
            assert!(
                there
                    .iter()
                    .all(|snapshot| snapshot["problem"] == Value::Null)
            );
            if there.is_empty() {
                daemon.json(&["snapshot", "push", "a", url]);
            }
            let pull = ["snapshot", "pull", "a", url, "--as", "copy"];
            proxy.harm(fault, after, 1 + round % 2);
            let pulled = daemon.run(&pull);
            harmed += proxy.heal();
            if code(&pulled) != 0 {
                refused(&pulled, 1, &["memfold: "]);
                daemon.json(&pull);
            }
            assert_eq!(code(&daemon.run(&["snapshot", "verify", "copy"])), 0);
            daemon.json(&["snapshot", "remove", "copy"]);
            daemon.json(&["snapshot", "remove", "a", "--remote", url]);
        }
    }
    println!("network faults between a host and an object store: {harmed}");
    assert!(harmed > 0);
}
