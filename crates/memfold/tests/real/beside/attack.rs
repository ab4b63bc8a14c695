//! Tests of an attack on the daemon's API over TCP while the daemon folds real guests. Guests and
//! folding must not be disturbed, and the daemon's memory must not grow.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memfold_api::{Client, CodeRequest, FullReport, LoginCode, Role, VmInfo};
use memfold_lab::{DiskMode, Lab};
use memfold_testkit::{bound, seconds, slowness, wait_until};
use memfold_units::ByteSize;

use crate::served::{Served, exec};
use crate::support;

const NAMES: [&str; 2] = ["one", "two"];
const MEMORY: ByteSize = ByteSize::mib(512);

/// Shell script that puts load on the guests before the attack. The next constant: during the
/// attack.
const BEFORE: &str = "cat /usr/bin/* | md5sum";
const MEANWHILE: &str = "cat /usr/lib/*-linux-gnu/*.so* | md5sum";

/// Number of requests that are sent together, without waiting for responses.
const TOGETHER: usize = 64;

/// Permitted growth of the daemon's memory in bytes, for its tables of the files that guests read.
const GROWTH: u64 = 64 << 20;

#[track_caller]
fn wait(what: &str, ready: impl FnMut() -> bool) {
    wait_until(what, Duration::from_secs(240), ready);
}

fn folded(client: &Client) -> Vec<u64> {
    let report: FullReport = client.get("/v1/report").unwrap();
    assert!(!report.fold.paused);
    let of = |name: &&str| report.ledger.vms.iter().find(|vm| vm.name == *name);
    let bytes = NAMES.iter().map(|name| of(name).unwrap().folded_bytes.0);
    bytes.collect()
}

/// Returns the resident memory of a process, and its peak since the last reset, in bytes.
fn resident_bytes(pid: i32) -> (u64, u64) {
    let process = procfs::process::Process::new(pid).unwrap();
    let status = process.status().unwrap();
    (status.vmrss.unwrap() << 10, status.vmhwm.unwrap() << 10)
}

/// Returns the largest number in a second, of a count that was sampled often.
fn best_second(seen: &[(Instant, u64)]) -> f64 {
    let rates = seen.iter().enumerate().filter_map(|(i, (from, before))| {
        let mut later = seen[i..].iter();
        let (to, then) = later.find(|(at, _)| *at - *from >= Duration::from_secs(1))?;
        Some((then - before) as f64 / (*to - *from).as_secs_f64())
    });
    rates.fold(0.0, f64::max)
}

/// Opens as many streams of samples as readers may have, and reads none of them.
fn unread_streams(host: &str, state: &Path) -> Vec<TcpStream> {
    let token = std::fs::read_to_string(state.join("access/read.token")).unwrap();
    let request = format!(
        "GET /v1/live HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {}\r\n\r\n",
        token.trim()
    );
    let open = |_| {
        let mut stream = TcpStream::connect(host).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut begin = [0; "HTTP/1.1 200".len()];
        stream.read_exact(&mut begin).unwrap();
        assert_eq!(&begin, b"HTTP/1.1 200");
        stream
    };
    (0..12).map(open).collect()
}

/// Returns requests of attackers: without access, of readers who want to operate, from another
/// site's page, with broken bodies, with `..` in paths.
fn requests(host: &str, state: &Path) -> [String; 5] {
    let token = |role: &str| {
        let file = state.join("access").join(format!("{role}.token"));
        std::fs::read_to_string(file).unwrap().trim().to_owned()
    };
    let (read, operate) = (token("read"), token("operate"));
    let request = |line: &str, more: &str, body: &str| {
        let length = body.len();
        format!(
            "{line} HTTP/1.1\r\nhost: {host}\r\n{more}content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        )
    };
    let bearer = |token: &str| format!("authorization: Bearer {token}\r\n");
    let stop = "{\"timeout_s\": 0}";
    let pause = "{\"paused\": true}";
    let other_site = format!("{}origin: http://evil.example\r\n", bearer(&operate));
    [
        request("POST /v1/vms/one/stop", "", stop),
        request("POST /v1/vms/one/stop", &bearer(&read), stop),
        request("PUT /v1/fold", &other_site, pause),
        request("PUT /v1/fold", &bearer(&operate), "{\"paused\": tru"),
        request("GET /../../etc/shadow", &bearer(&read), ""),
    ]
}

/// Sends a request again and again, and counts the responses by their beginning.
fn flood(host: &str, request: &str, end: Instant, answers: &AtomicU64, granted: &AtomicU64) {
    let together = request.repeat(TOGETHER);
    // The daemon may disconnect a client that sends too much.
    while Instant::now() < end {
        let Ok(mut stream) = TcpStream::connect(host) else {
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        let mut reader = stream.try_clone().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let (mut some, mut text) = (vec![0; 1 << 16], String::new());
                while let Ok(read @ 1..) = reader.read(&mut some) {
                    text += &String::from_utf8_lossy(&some[..read]);
                    let count = |class: char| {
                        let line = format!("HTTP/1.1 {class}");
                        text.matches(&line).count() as u64
                    };
                    let all = ['2', '3', '4', '5'].map(count);
                    answers.fetch_add(all.iter().sum(), Ordering::Relaxed);
                    granted.fetch_add(all[0], Ordering::Relaxed);
                    // Keeps the beginning of a response that is cut here.
                    let keep = text.len().saturating_sub("HTTP/1.1 ".len());
                    let keep = (keep..=text.len()).find(|&at| text.is_char_boundary(at));
                    text = text.split_off(keep.unwrap_or(text.len()));
                }
            });
            while Instant::now() < end && stream.write_all(together.as_bytes()).is_ok() {}
            let _ = stream.shutdown(std::net::Shutdown::Both);
        });
    }
}

#[test]
fn a_flood_of_requests_to_the_http_api_does_not_affect_guests_and_folding() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path();
    let mut served = Served::new(state, &NAMES).with(&["--listen", "127.0.0.1:0"]);
    served.start();
    let client = served.answers();
    for (name, image) in NAMES.iter().zip(["trixie-a", "trixie-b"]) {
        served.run_warm(&Lab::spec(name, image, MEMORY, DiskMode::Buffered).unwrap());
    }
    let vms = || -> Vec<VmInfo> { client.get("/v1/vms").unwrap() };
    wait("agents answer", || {
        vms().iter().all(|vm| vm.agent.is_some())
    });
    let sums = NAMES.map(|name| exec(&client, name, BEFORE).stdout);
    wait("what they read is folded", || {
        folded(&client).iter().all(|&bytes| bytes > 8 << 20)
    });
    let (before, pids) = (
        folded(&client),
        vms().iter().map(|vm| vm.pid).collect::<Vec<_>>(),
    );

    let role = CodeRequest { role: Role::Read };
    let login: LoginCode = client.post("/v1/session/codes", &role).unwrap();
    let address = login.urls.last().unwrap();
    let host = address
        .split("//")
        .nth(1)
        .unwrap()
        .split('/')
        .next()
        .unwrap();
    let pid: memfold_api::VersionInfo = client.get("/v1/version").unwrap();
    let unread = unread_streams(host, state);
    // Resets the process's peak memory (proc_pid_clear_refs(5)).
    std::fs::write(format!("/proc/{}/clear_refs", pid.pid), "5").unwrap();
    let (resident, _) = resident_bytes(pid.pid);
    let requests = requests(host, state);
    let time = seconds("MEMFOLD_FLOOD_SECONDS", 10);
    let (answers, granted, slowest) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let (end, mut seen) = (Instant::now() + time, Vec::new());
    std::thread::scope(|scope| {
        for request in &requests {
            scope.spawn(|| flood(host, request, end, &answers, &granted));
        }
        // A client that does not read the response to its request.
        let mut silent = TcpStream::connect(host).unwrap();
        let _ = silent.write_all(requests[4].repeat(10_000).as_bytes());
        for name in NAMES {
            let client = &client;
            scope.spawn(move || exec(client, name, MEANWHILE));
        }
        while Instant::now() < end {
            let asked = Instant::now();
            assert_eq!(vms().len(), NAMES.len());
            let took = u64::try_from(asked.elapsed().as_millis()).unwrap();
            slowest.fetch_max(took, Ordering::Relaxed);
            seen.push((Instant::now(), answers.load(Ordering::Relaxed)));
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    let count = answers.load(Ordering::Relaxed);
    let (best, grown) = (
        best_second(&seen),
        resident_bytes(pid.pid).1.saturating_sub(resident),
    );
    drop(unread);
    println!(
        "{} answers a second for {time:?}, {best:.0} in the best one; the daemon grew by {} KiB at most; whoever asked on the host waited {} ms at most",
        count / time.as_secs(),
        grown >> 10,
        slowest.load(Ordering::Relaxed)
    );
    // Guests, attackers and other tests use the same cores as the daemon.
    assert!(best >= 1_000.0 / slowness(), "no flood: {best:.0} a second");
    assert_eq!(granted.load(Ordering::Relaxed), 0);
    assert!(grown < GROWTH, "{grown} bytes");
    let slowest = Duration::from_millis(slowest.load(Ordering::Relaxed));
    assert!(slowest < bound(Duration::from_secs(10)), "{slowest:?}");

    // Files that the guests have read meanwhile are folded as well, and folded pages have stayed
    // folded.
    let more = |bytes: &u64, then: &u64| *bytes > *then + (4 << 20);
    wait("what they read meanwhile is folded", || {
        folded(&client)
            .iter()
            .zip(&before)
            .all(|(now, then)| more(now, then))
    });
    let now = vms();
    assert_eq!(now.iter().map(|vm| vm.pid).collect::<Vec<_>>(), pids);
    for vm in &now {
        assert!(vm.fold_problems.is_empty(), "{:?}", vm.fold_problems);
    }
    assert_eq!(NAMES.map(|name| exec(&client, name, BEFORE).stdout), sums);
}
