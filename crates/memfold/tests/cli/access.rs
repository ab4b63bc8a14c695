//! Tests of access control: the roles of users of the Unix socket, and all requests that the TCP
//! endpoint refuses.

use std::fmt::Write as _;
use std::fs::{Permissions, read_to_string, set_permissions};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memfold_testkit::{bound, patience, slowness, wait_for};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
use serde_json::{Value, json};

use super::flood::{best_second, count_answers};
use crate::support::{Daemon, code, err, refusals, refused, run, wait};

/// A daemon that serves browsers, and the addresses in its log.
pub struct Door {
    pub daemon: Daemon,
    /// Address of the TCP endpoint, `127.0.0.1:PORT`.
    pub host: String,
}

pub struct Answer {
    pub status: u16,
    head: String,
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().skip(1);
        let mut fields = lines.filter_map(|line| line.split_once(": "));
        fields
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }
}

impl Door {
    pub fn open(more: &[&str]) -> Self {
        let daemon = Daemon::start_with(&[&["--listen", "127.0.0.1:0"], more].concat());
        let url = code_url(&daemon, "read");
        let host = url.split('/').nth(2).unwrap().to_owned();
        Self { daemon, host }
    }

    /// Sends a request with `headers`. A header `host` is added unless `headers` has one.
    pub fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut stream = TcpStream::connect(&self.host).unwrap();
        let limit = Some(patience(Duration::from_secs(20)));
        stream.set_read_timeout(limit).unwrap();
        let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
        if !headers.iter().any(|(name, _)| *name == "host") {
            let _ = write!(head, "host: {}\r\n", self.host);
        }
        if !body.is_empty() {
            let _ = write!(
                head,
                "content-type: application/json\r\ncontent-length: {}\r\n",
                body.len()
            );
        }
        for (name, value) in headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        // The daemon may refuse the request before it has received the whole body.
        let _ = stream.write_all(body.as_bytes());
        answer(&mut stream)
    }

    fn token(&self, role: &str) -> String {
        read_to_string(self.token_file(role))
            .unwrap()
            .trim()
            .to_owned()
    }

    fn token_file(&self, role: &str) -> PathBuf {
        self.daemon
            .state()
            .join("access")
            .join(format!("{role}.token"))
    }

    /// Logs in with a token, and returns the cookie of the session.
    fn session(&self, role: &str) -> String {
        let body = json!({ "secret": self.token(role) }).to_string();
        let answer = self.ask("POST", "/v1/session", &[], &body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(answer.json(), role);
        cookie(&answer)
    }

    fn audit(&self) -> Vec<Value> {
        let (status, body) = self.daemon.http("GET", "/v1/audit", b"");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }
}

fn connect_from(address: Ipv4Addr, to: &str) -> TcpStream {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddrV4::new(address, 0)).unwrap();
    let to: SocketAddr = to.parse().unwrap();
    connect(&socket, &to).unwrap();
    TcpStream::from(socket)
}

fn answer(stream: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").expect("an answer");
    Answer {
        status: head.split(' ').nth(1).unwrap().parse().unwrap(),
        head: head.to_owned(),
        body: body.to_owned(),
    }
}

pub fn cookie(answer: &Answer) -> String {
    let set = answer.header("set-cookie").expect("a cookie");
    set.split(';').next().unwrap().to_owned()
}

pub fn code_url(daemon: &Daemon, role: &str) -> String {
    let body = json!({ "role": role }).to_string();
    let (status, body) = daemon.http("POST", "/v1/session/codes", body.as_bytes());
    assert_eq!(status, 200, "{body}");
    let made: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(made["role"], role);
    // URLs with addresses come after those with names.
    let urls = made["urls"].as_array().unwrap();
    urls.last().unwrap().as_str().unwrap().to_owned()
}

#[test]
fn tcp_requests_without_a_login_are_refused() {
    let door = Door::open(&[]);
    for path in [
        "/v1/vms",
        "/v1/report",
        "/v1/session",
        "/v1/audit",
        "/openapi.json",
        "/nothing",
        "/../etc/passwd",
        "/..%2f..%2fetc/passwd",
        "//v1/report",
    ] {
        let answer = door.ask("GET", path, &[], "");
        assert_eq!(answer.status, 401, "{path}: {}", answer.body);
        assert!(
            answer.json()["hint"]
                .as_str()
                .unwrap()
                .contains("memfold dashboard")
        );
    }
    for (method, path) in [("POST", "/v1/vms"), ("PUT", "/v1/fold"), ("PATCH", "/x")] {
        assert_eq!(door.ask(method, path, &[], "{}").status, 401, "{path}");
    }
    for wrong in [
        "Bearer x",
        "Basic cm9vdDo=",
        "Bearer ",
        &format!("Bearer {}", "0".repeat(64)),
    ] {
        let answer = door.ask("GET", "/v1/vms", &[("authorization", wrong)], "");
        assert_eq!(answer.status, 401, "{wrong}");
    }
    let answer = door.ask("GET", "/v1/vms", &[("cookie", "memfold-1=1")], "");
    assert_eq!(answer.status, 401);
    for wrong in [json!({"secret": ""}), json!({"secret": "0".repeat(64)})] {
        let answer = door.ask("POST", "/v1/session", &[], &wrong.to_string());
        assert_eq!(answer.status, 401, "{wrong}");
        assert_eq!(answer.header("set-cookie"), None);
    }
}

#[test]
fn the_token_of_a_host_allows_only_lease_registry_requests_in_the_name_of_the_host() {
    let door = Door::open(&[]);
    let made = door.daemon.json(&["host", "add", "b"]);
    let token = made["token"].as_str().unwrap().to_owned();
    let bearer = format!("Bearer {token}");
    let headers = [("authorization", bearer.as_str())];
    let ask = |call: &Value| door.ask("POST", "/v1/registry", &headers, &call.to_string());
    let offer = |host: &str| {
        let lender = json!({"host": host, "incarnation": 1});
        json!({"offer": {"offer": {"lender": lender, "bytes": 1 << 20}, "ttl_ms": 9000}})
    };
    assert_eq!(ask(&offer("b")).json(), "done");
    let picture = ask(&json!({"picture": {}})).json();
    assert_eq!(picture["picture"]["lenders"][0]["lender"]["host"], "b");
    let lender = json!({"host": "a", "incarnation": 1});
    let want = json!({"borrower": "a", "vm": "v", "bytes": 1});
    for foreign in [
        offer("a"),
        json!({"withdraw": {"lender": lender}}),
        json!({"take": {"want": want, "ttl_ms": 9000}}),
        json!({"endpoint": {"id": 1, "borrower": "a"}}),
        json!({"renew": {"id": 1, "borrower": "a", "ttl_ms": 9000}}),
        json!({"recall": {"id": 1, "lender": lender, "within_ms": 1}}),
        json!({"release": {"id": 1, "borrower": "a"}}),
        json!({"ended": {"id": 1, "lender": lender}}),
    ] {
        let answer = ask(&foreign);
        assert_eq!(answer.status, 403, "{foreign}: {}", answer.body);
        assert!(answer.body.contains("host 'b'"), "{}", answer.body);
    }
    // The path would be one of this host's files.
    let lender = json!({"host": "b", "incarnation": 1});
    let endpoint = json!({"address": {"unix": "/run/x"}, "key": null});
    let publish = json!({"publish": {"id": 1, "lender": lender, "endpoint": endpoint}});
    let answer = ask(&publish).json();
    assert_eq!(answer["refused"]["value"]["field"], "address", "{answer}");
    for (method, path) in [
        ("GET", "/v1/vms"),
        ("GET", "/v1/leases"),
        ("GET", "/v1/hosts"),
        ("POST", "/v1/hosts"),
        ("POST", "/v1/vms"),
        ("POST", "/v1/lend"),
        ("GET", "/v1/audit"),
        ("POST", "/v1/session/codes"),
    ] {
        let answer = door.ask(method, path, &headers, "{}");
        assert_eq!(answer.status, 403, "{method} {path}: {}", answer.body);
    }
    // A host's token begins no session, and readers may not call the registry.
    let login = json!({ "secret": token }).to_string();
    assert_eq!(door.ask("POST", "/v1/session", &[], &login).status, 401);
    let (status, _) = door
        .daemon
        .http("POST", "/v1/session/codes", br#"{"role": "host"}"#);
    assert_eq!(status, 400);
    let reader = format!("Bearer {}", door.token("read"));
    let picture = json!({"picture": {}}).to_string();
    let reader = [("authorization", reader.as_str())];
    let answer = door.ask("POST", "/v1/registry", &reader, &picture);
    assert_eq!(answer.status, 403, "{}", answer.body);
    // Refusals are logged; calls that come several times a second are not.
    let audit = door.audit();
    let asked = audit.iter().filter(|entry| entry["path"] == "/v1/registry");
    assert!(asked.clone().count() >= 8);
    assert!(asked.clone().all(|entry| entry["status"] == 403));
    refused(&run(&["host", "add"]), 2, &["<HOST>"]);
    let bad = door.daemon.run(&["host", "add", "a/b"]);
    refused(&bad, 1, &["letters, digits"]);
    // Without an address that other hosts can reach, a token would be of no use.
    let closed = Daemon::start();
    refused(&closed.run(&["host", "add", "b"]), 1, &["--listen"]);
}

#[test]
fn the_read_token_allows_reading_and_the_operate_token_allows_changes() {
    let door = Door::open(&[]);
    for role in ["read", "operate"] {
        let mode = std::fs::metadata(door.token_file(role)).unwrap();
        assert_eq!(mode.permissions().mode() & 0o777, 0o600);
        let bearer = format!("Bearer {}", door.token(role));
        let headers = [("authorization", bearer.as_str())];
        assert_eq!(door.ask("GET", "/v1/vms", &headers, "").status, 200);
        let may = role == "operate";
        let change = door.ask("PUT", "/v1/fold", &headers, r#"{"paused":true}"#);
        assert_eq!(
            change.status,
            if may { 200 } else { 403 },
            "{}",
            change.body
        );
        let audit = door.ask("GET", "/v1/audit", &headers, "");
        assert_eq!(audit.status, if may { 200 } else { 403 });
    }
    let bearer = format!("Bearer {}", door.token("read"));
    let more = door.ask(
        "POST",
        "/v1/session/codes",
        &[("authorization", &bearer)],
        r#"{"role":"operate"}"#,
    );
    assert_eq!(more.status, 403, "{}", more.body);
}

#[test]
fn a_dashboard_session_starts_with_a_login_code_and_ends_on_logout() {
    let door = Door::open(&[]);
    let wrong = || refusals(&door.daemon, "credentials");
    let before = wrong();
    let url = code_url(&door.daemon, "operate");
    let secret = url.split_once("#login=").unwrap().1;
    let body = json!({ "secret": secret }).to_string();
    let first = door.ask("POST", "/v1/session", &[], &body);
    assert_eq!(first.status, 200, "{}", first.body);
    let set = first.header("set-cookie").unwrap();
    for word in ["HttpOnly", "SameSite=Strict", "Path=/", "Max-Age="] {
        assert!(set.contains(word), "no {word} in {set}");
    }
    assert_eq!(door.ask("POST", "/v1/session", &[], &body).status, 401);
    assert!((wrong() - before - 1.0).abs() < 0.1, "it is counted once");
    let cookie = cookie(&first);
    let headers = [("cookie", cookie.as_str()), ("x-memfold", "1")];
    let session = door.ask("GET", "/v1/session", &headers[..1], "");
    assert_eq!(session.json()["role"], "operate");
    assert_eq!(session.json()["via"], "tcp");
    let paused = door.ask("PUT", "/v1/fold", &headers, r#"{"paused":true}"#);
    assert_eq!(paused.json()["paused"], true);
    assert_eq!(door.ask("DELETE", "/v1/session", &headers, "").status, 200);
    assert_eq!(door.ask("GET", "/v1/vms", &headers, "").status, 401);
}

#[test]
fn web_pages_of_other_origins_can_neither_read_nor_change_data() {
    let door = Door::open(&["--allow-host", "vm1.example"]);
    let cookie = door.session("operate");
    let origin = format!("http://{}", door.host);
    let pause = |headers: &[(&str, &str)]| {
        let all = [&[("cookie", cookie.as_str())], headers].concat();
        door.ask("PUT", "/v1/fold", &all, r#"{"paused":true}"#)
            .status
    };
    let own = ("x-memfold", "1");
    assert_eq!(pause(&[own]), 200);
    assert_eq!(pause(&[own, ("origin", &origin)]), 200);
    assert_eq!(pause(&[]), 403, "a form can't send the header");
    assert_eq!(pause(&[own, ("origin", "http://attacker.example")]), 403);
    assert_eq!(pause(&[own, ("origin", "null")]), 403);
    assert_eq!(pause(&[own, ("sec-fetch-site", "cross-site")]), 403);
    assert_eq!(pause(&[own, ("sec-fetch-site", "same-site")]), 403);
    // Host names of the attacker that resolve to this address.
    for host in ["attacker.example", "localhost.attacker.example:80"] {
        let headers = [("cookie", cookie.as_str()), ("host", host), own];
        let answer = door.ask("GET", "/v1/vms", &headers, "");
        assert_eq!(answer.status, 421, "{host}");
        assert!(answer.body.contains("--allow-host"), "{}", answer.body);
        assert_eq!(pause(&[("host", host), own]), 421);
    }
    let named = [("cookie", cookie.as_str()), ("host", "vm1.example:1")];
    assert_eq!(door.ask("GET", "/v1/vms", &named, "").status, 200);
    // No other site is ever allowed to read a response or to send the header.
    let asked = [
        ("origin", "http://attacker.example"),
        ("access-control-request-method", "PUT"),
        ("access-control-request-headers", "x-memfold"),
    ];
    let preflight = door.ask("OPTIONS", "/v1/fold", &asked, "");
    assert_ne!(preflight.status, 200);
    for answer in [preflight, door.ask("GET", "/v1/vms", &named, "")] {
        assert_eq!(answer.header("access-control-allow-origin"), None);
        let policy = answer.header("content-security-policy").unwrap();
        for word in [
            "default-src 'none'",
            "script-src 'self'",
            "frame-ancestors 'none'",
        ] {
            assert!(policy.contains(word), "{policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(answer.header("referrer-policy"), Some("no-referrer"));
        assert_eq!(answer.header("cache-control"), Some("no-store"));
    }
}

#[test]
fn http_requests_that_are_too_long_too_slow_or_too_many_are_refused() {
    let door = Door::open(&[]);
    let bearer = format!("Bearer {}", door.token("operate"));
    let headers = [("authorization", bearer.as_str())];
    let long = format!(r#"{{"paused":{}true}}"#, " ".repeat(1 << 20));
    assert_eq!(door.ask("PUT", "/v1/fold", &headers, &long).status, 413);
    let wild = "x".repeat(64 << 10);
    let answer = door.ask("GET", "/v1/vms", &[("x-long", &wild)], "");
    assert_eq!(answer.status, 431);
    for body in ["{", "[]", "nul", r#"{"paused":1}"#, "\u{0}"] {
        assert_eq!(door.ask("PUT", "/v1/fold", &headers, body).status, 400);
    }
    // A client that never sends a request is disconnected.
    let mut silent = TcpStream::connect(&door.host).unwrap();
    silent
        .set_read_timeout(Some(patience(Duration::from_secs(25))))
        .unwrap();
    silent.write_all(b"GET /v1/vms HTTP/1.1\r\nhost:").unwrap();
    if let Err(error) = silent.read_to_end(&mut Vec::new()) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "not let go");
    }
    // More connections than the limit keep out neither users of this host nor other addresses.
    let held: Vec<TcpStream> = (0..400)
        .map(|_| connect_from([127, 0, 0, 2].into(), &door.host))
        .collect();
    assert_eq!(door.daemon.http("GET", "/v1/vms", b"").0, 200);
    let bearer = format!("Bearer {}", door.token("read"));
    let answer = door.ask("GET", "/v1/vms", &[("authorization", &bearer)], "");
    assert_eq!(answer.status, 200);
    drop(held);
    // A client that is not known yet may only send a short body.
    let long = json!({ "secret": "x".repeat(8 << 10) }).to_string();
    assert_eq!(
        door.ask("POST", "/v1/session", &[("x-memfold", "1")], &long)
            .status,
        413
    );
}

#[test]
fn during_a_flood_of_http_requests_the_daemon_needs_no_more_memory_and_serves_local_clients() {
    // The rate is measured between requests of a local client, which take long on a slow machine.
    let flood = patience(Duration::from_secs(2)).max(Duration::from_secs(5));
    let door = Door::open(&[]);
    let bearer = format!("Bearer {}", door.token("read"));
    // Meanwhile, as many clients as permitted do not read the samples that they requested.
    let unread: Vec<_> = (0..12).map(|_| stream(&door, &bearer)).collect();
    assert!(unread.iter().all(|(_, status)| *status == 200));
    let pid = door.daemon.child.id();
    let kib = |field: &str| -> u64 {
        let status = read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix(field));
        let words = line.unwrap().trim().strip_suffix(" kB").unwrap();
        words.parse().unwrap()
    };
    // Resets the process's peak memory (proc_pid_clear_refs(5)).
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").unwrap();
    let before = kib("VmRSS:");
    let request = format!("GET /v1/report HTTP/1.1\r\nhost: {}\r\n\r\n", door.host).repeat(64);
    let (answers, mut seen) = (AtomicU64::new(0), Vec::new());
    let end = Instant::now() + flood;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut stream = TcpStream::connect(&door.host).unwrap();
                let reader = stream.try_clone().unwrap();
                let counted = scope.spawn(|| count_answers(reader, &answers));
                while Instant::now() < end && stream.write_all(request.as_bytes()).is_ok() {}
                let _ = stream.shutdown(std::net::Shutdown::Both);
                counted.join().unwrap();
            });
        }
        while Instant::now() < end {
            assert_eq!(door.daemon.http("GET", "/v1/vms", b"").0, 200);
            seen.push((Instant::now(), answers.load(Ordering::Relaxed)));
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    let grown = kib("VmHWM:").saturating_sub(before);
    let best = best_second(&seen);
    println!(
        "{} answers a second for {flood:?}, {best:.0} in the best one; the daemon grew by {grown} KiB at most",
        answers.into_inner() / flood.as_secs()
    );
    assert!(best >= 1_000.0 / slowness(), "no flood: {best:.0} a second");
    assert!(grown < 32 << 10, "{grown} KiB more");
    // This client can no longer add entries to the log.
    let noted = door.audit().len();
    assert!(noted <= 130, "{noted}");
}

/// Requests the stream of samples, and reads only the head of the response.
fn stream(door: &Door, bearer: &str) -> (TcpStream, u16) {
    let mut stream = TcpStream::connect(&door.host).unwrap();
    let limit = Some(patience(Duration::from_secs(20)));
    stream.set_read_timeout(limit).unwrap();
    let head = format!(
        "GET /v1/live HTTP/1.1\r\nhost: {}\r\nauthorization: {bearer}\r\n\r\n",
        door.host
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut begin = [0; 12];
    stream.read_exact(&mut begin).unwrap();
    let status = std::str::from_utf8(&begin[9..]).unwrap().parse().unwrap();
    (stream, status)
}

#[test]
fn too_many_open_event_streams_are_refused_and_other_requests_are_still_served() {
    let mut door = Door::open(&[]);
    let bearer = format!("Bearer {}", door.token("read"));
    assert_eq!(stream(&door, "Bearer no").1, 401);
    let held: Vec<_> = (0..12).map(|_| stream(&door, &bearer)).collect();
    assert!(held.iter().all(|(_, status)| *status == 200));
    assert_eq!(stream(&door, &bearer).1, 503);
    // Operators have streams of their own.
    let operator = format!("Bearer {}", door.token("operate"));
    let operates: Vec<_> = (0..4).map(|_| stream(&door, &operator)).collect();
    assert!(operates.iter().all(|(_, status)| *status == 200));
    assert_eq!(stream(&door, &operator).1, 503);
    assert_eq!(door.daemon.http("GET", "/v1/report", b"").0, 200);
    drop((held, operates));
    let mut open = wait_for("places are free again", Duration::from_secs(60), || {
        let (open, status) = stream(&door, &bearer);
        (status == 200).then_some(open).ok_or(status)
    });
    // Open streams do not keep the daemon from ending.
    let mut text = String::new();
    while !text.contains("event: sample") || !text.contains("\"ledger\"") {
        let mut some = [0; 4096];
        let read = open.read(&mut some).unwrap();
        assert!(read > 0, "ended without a sample: {text}");
        text += &String::from_utf8_lossy(&some[..read]);
    }
    let began = Instant::now();
    door.daemon.terminate();
    assert!(began.elapsed() < bound(Duration::from_secs(10)));
}

#[test]
fn over_tls_the_session_cookie_is_host_only_and_secure() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let (certificate, key) = (path("certificate.pem"), path("key.pem"));
    let make = |certificate: &str, key: &str| {
        Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec"])
            .args(["-pkeyopt", "ec_paramgen_curve:P-256"])
            .args(["-nodes", "-days", "2", "-subj", "/CN=localhost"])
            .args(["-addext", "subjectAltName=IP:127.0.0.1"])
            .args(["-keyout", key, "-out", certificate])
            .output()
    };
    let made = make(&certificate, &key);
    if !made.as_ref().is_ok_and(|output| output.status.success()) {
        memfold_testkit::skip!("openssl can't make a certificate: {made:?}");
    }
    let tls = ["--tls-cert", &certificate, "--tls-key", &key];
    let door = Door::open(&tls);
    let url = code_url(&door.daemon, "read");
    assert!(url.starts_with("https://127.0.0.1:"), "{url}");
    let (url, secret) = url.split_once("#login=").unwrap();
    let body = json!({ "secret": secret }).to_string();
    let output = Command::new("curl")
        .args(["-sSi", "--cacert", &certificate, "--data", &body])
        .args(["-H", "content-type: application/json"])
        .arg(format!("{url}v1/session"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.starts_with("HTTP/1.1 200"), "{text}{}", err(&output));
    let set = text.lines().find(|line| line.starts_with("set-cookie"));
    let set = set.unwrap();
    assert!(
        set.contains("__Host-memfold-") && set.contains("; Secure"),
        "{set}"
    );
    // A client that speaks plain HTTP is refused.
    let mut plain = TcpStream::connect(&door.host).unwrap();
    plain
        .write_all(b"GET /v1/vms HTTP/1.1\r\nhost: localhost\r\n\r\n")
        .unwrap();
    let mut bytes = Vec::new();
    let _ = plain.read_to_end(&mut bytes);
    assert!(!bytes.starts_with(b"HTTP/"));

    // The certificate is replaced while the daemon runs. The daemon keeps the old one until the new
    // key is there, too.
    let [new, new_key] = [path("new.pem"), path("new-key.pem")];
    assert!(make(&new, &new_key).unwrap().status.success());
    let old = path("old.pem");
    std::fs::copy(&certificate, &old).unwrap();
    let is_shown = |authority: &str| {
        let curl = Command::new("curl")
            .args(["-sS", "-o", "/dev/null", "--cacert", authority, url])
            .output();
        curl.unwrap().status.success()
    };
    std::fs::rename(&new, &certificate).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(is_shown(&old) && !is_shown(&certificate));
    std::fs::rename(&new_key, &key).unwrap();
    wait("the new certificate is shown", || is_shown(&certificate));
    assert!(!is_shown(&old));
}

#[test]
fn listening_on_a_non_loopback_address_is_refused_without_tls() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    let socket = directory.path().join("s");
    let arguments = |more: &[&str]| {
        let mut all = vec!["--socket", socket.to_str().unwrap(), "serve", "--state"];
        all.push(state.to_str().unwrap());
        all.extend(more);
        run(&all)
    };
    let open = arguments(&["--listen", "0.0.0.0:0"]);
    refused(&open, 1, &["TLS", "--tls-cert", "127.0.0.1"]);
    let missing = arguments(&[
        "--listen",
        "0.0.0.0:0",
        "--tls-cert",
        "/no/c",
        "--tls-key",
        "/no/k",
    ]);
    refused(&missing, 1, &["/no/c", "TLS"]);
    let unknown = arguments(&["--read-group", "no-such-group-here"]);
    refused(&unknown, 1, &["no-such-group-here", "groupadd"]);
    assert_eq!(code(&arguments(&["--tls-cert", "c"])), 2);
    assert_eq!(code(&arguments(&["--allow-host", "c"])), 2);
    // A daemon without a TCP endpoint accepts no login.
    let daemon = Daemon::start();
    let (status, body) = daemon.http("POST", "/v1/session/codes", br#"{"role":"read"}"#);
    assert_eq!(status, 409);
    assert!(body.contains("--listen"), "{body}");
    assert!(!daemon.state().join("access").exists());
}

/// Sends a request over the socket as user 65534 with this group. Returns status and body.
fn as_nobody(socket: &Path, group: &str, method: &str, path: &str) -> (u16, String) {
    let output = Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--groups", group])
        .args(["curl", "-sS", "-X", method, "-w", "\n%{http_code}"])
        .args(["-H", "content-type: application/json", "--data", "{}"])
        .arg("--unix-socket")
        .arg(socket)
        .arg(format!("http://memfold{path}"))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let (body, status) = text
        .rsplit_once('\n')
        .unwrap_or_else(|| panic!("{}", err(&output)));
    (status.parse().unwrap(), body.to_owned())
}

/// Holds two hundred idle connections of user 65534 with this group, until the standard input of
/// the process ends.
fn hold_as_nobody(socket: &Path, group: &str) -> Child {
    let hold = "my @held = map { IO::Socket::UNIX->new(Peer => $ARGV[0]) } 1 .. 200; $| = 1; print \"held\\n\"; <STDIN>";
    let mut child = Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--groups", group])
        .args(["perl", "-MIO::Socket::UNIX", "-e", hold])
        .arg(socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 5];
    let stdout = child.stdout.as_mut().unwrap();
    stdout.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"held\n");
    child
}

#[test]
fn a_client_of_the_unix_socket_has_the_rights_of_its_user_and_group() {
    if !rustix::process::getuid().is_root() {
        memfold_testkit::skip!("only root can be somebody else");
    }
    // Every Debian has these groups; here, the user nobody is in neither.
    let daemon = Daemon::start_with(&["--read-group", "games", "--operate-group", "news"]);
    let reachable = Permissions::from_mode(0o755);
    set_permissions(daemon.directory.path(), reachable).unwrap();
    let socket = daemon.socket();
    wait_rights(&socket, 0o666);
    let gid = |name: &str| memfold_sys_group(name).to_string();
    let (games, news, users) = (gid("games"), gid("news"), gid("users"));
    for (group, read, change) in [(&games, 200, 403), (&news, 200, 200), (&users, 403, 403)] {
        let of = |method, path| as_nobody(&socket, group, method, path);
        assert_eq!(of("GET", "/v1/vms").0, read, "{group}");
        assert_eq!(of("PUT", "/v1/fold").0, change, "{group}");
        assert_eq!(of("GET", "/v1/audit").0, change, "{group}");
    }
    let (_, body) = as_nobody(&socket, &users, "GET", "/v1/vms");
    assert!(body.contains("memfold-operate"), "{body}");
    // However many connections users without access hold, readers are served.
    let mut strangers = hold_as_nobody(&socket, &users);
    let answer = as_nobody(&socket, &games, "GET", "/v1/vms");
    assert_eq!(answer.0, 200, "{}", answer.1);
    drop(strangers.stdin.take());
    strangers.wait().unwrap();
    // If no group has access, only root does.
    let closed = Daemon::start();
    if memfold_server::Groups::find(None, None).unwrap().any() {
        memfold_testkit::report_skip("in part: this host has memfold's groups");
    } else {
        wait_rights(&closed.socket(), 0o600);
    }
}

/// Waits until a daemon that starts has set these rights of its socket. Before, only root can
/// connect.
fn wait_rights(socket: &std::path::Path, wanted: u32) {
    wait_for("the socket's rights", Duration::from_secs(60), || {
        let mode = std::fs::metadata(socket).unwrap().permissions().mode() & 0o777;
        (mode == wanted).then_some(()).ok_or(mode)
    });
}

fn memfold_sys_group(name: &str) -> u32 {
    let groups = memfold_server::Groups::find(Some(name), None).unwrap();
    groups.read.unwrap()
}

#[test]
fn the_audit_log_records_the_user_the_action_and_the_outcome_of_each_request() {
    let door = Door::open(&[]);
    let cookie = door.session("operate");
    let headers = [("cookie", cookie.as_str()), ("x-memfold", "1")];
    let budget = door.ask("PUT", "/v1/fold", &headers, r#"{"cpu_percent":3.0}"#);
    assert_eq!(budget.status, 200);
    let missing = r#"{"timeout_s":1.0}"#;
    assert_eq!(
        door.ask("POST", "/v1/vms/ghost/stop", &headers, missing)
            .status,
        404
    );
    let exec = r#"{"script":"echo secret","timeout_s":1.0}"#;
    door.ask("POST", "/v1/vms/ghost/exec", &headers, exec);
    door.ask("GET", "/v1/vms", &[], "");
    door.daemon.http("PUT", "/v1/fold", br#"{"paused":true}"#);
    let log = door.audit();
    let own = format!("process {}", std::process::id());
    let entry = |at: usize| &log[at];
    assert!(entry(0)["who"].as_str().unwrap().contains(&own), "{log:?}");
    assert_eq!(entry(0)["details"], json!({"paused": true}));
    assert_eq!(
        (&entry(1)["status"], &entry(1)["role"]),
        (&json!(401), &Value::Null)
    );
    assert_eq!(entry(2)["details"], json!({"timeout_s": 1.0}));
    assert_eq!(entry(3)["status"], 404);
    let error = entry(3)["error"].as_str().unwrap();
    assert!(error.contains("no VM named 'ghost'"), "{error}");
    assert_eq!(entry(4)["details"], json!({"cpu_percent": 3.0}));
    assert_eq!(entry(4)["role"], "operate");
    assert!(entry(4)["who"].as_str().unwrap().starts_with("session "));
    assert_eq!(entry(5)["path"], "/v1/session");
    let begun = json!({"begins": "session 1 of the operate token", "role": "operate"});
    assert_eq!(entry(5)["details"], begun);
    let file = read_to_string(door.daemon.state().join("audit.jsonl")).unwrap();
    assert!(!file.contains("echo secret"));
    assert!(!file.contains(&door.token("operate")));
}

#[test]
fn a_request_is_audited_even_if_its_client_disconnects_before_the_response() {
    let door = Door::open(&[]);
    door.daemon.paused_vm("web1", &[]);
    let bearer = format!("authorization: Bearer {}", door.token("operate"));
    // The guest never shuts down, so the response takes time; the client does not wait for it.
    let timeout = patience(Duration::from_secs(2));
    let body = json!({ "timeout_s": timeout.as_secs_f64() }).to_string();
    let mut stream = TcpStream::connect(&door.host).unwrap();
    write!(
        stream,
        "POST /v1/vms/web1/stop HTTP/1.1\r\nhost: {}\r\n{bearer}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        door.host,
        body.len()
    )
    .unwrap();
    // The request must have begun.
    std::thread::sleep(patience(Duration::from_millis(300)));
    drop(stream);
    let noted = |path: &str| {
        let log = door.audit();
        log.iter().filter(|entry| entry["path"] == path).count()
    };
    wait("the stop is noted", || noted("/v1/vms/web1/stop") == 1);

    let read = format!("Bearer {}", door.token("read"));
    let headers = [("authorization", read.as_str())];
    for _ in 0..200 {
        door.ask("POST", "/v1/session/codes", &headers, r#"{"role":"read"}"#);
    }
    let codes = noted("/v1/session/codes");
    // The limit is sixty a minute, and a minute may end meanwhile.
    assert!((1..=130).contains(&codes), "{codes}");
    // Requests of operators are logged all the same.
    let change = br#"{"paused":true}"#;
    assert_eq!(door.daemon.http("PUT", "/v1/fold", change).0, 200);
    assert_eq!(noted("/v1/fold"), 1);
}

#[test]
fn cross_site_browser_requests_over_the_unix_socket_are_refused() {
    let daemon = Daemon::start();
    let socket = daemon.socket();
    let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
    let request = "GET /v1/vms HTTP/1.1\r\nhost: localhost\r\nsec-fetch-site: cross-site\r\nconnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    assert!(said.starts_with("HTTP/1.1 403"), "{said}");
}
