//! Tests of lending RAM between hosts over a network: tokens, certificates, etcd. All hosts are
//! daemons on 127.0.0.1; `real/hosts.rs` has network links.

use std::fs::{Permissions, set_permissions, write};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Signal, kill_process};
use serde_json::Value;

use crate::lending::{self, Swapping, export, wait_free};
use crate::support::{Daemon, code, err, out, program, refusals, refused, server, wait};

/// The certificate authority of one test, which signs certificates of servers and hosts.
pub struct Authority {
    directory: tempfile::TempDir,
}

fn openssl(directory: &Path, arguments: &str) {
    let output = Command::new("openssl")
        .args(arguments.split(' '))
        .current_dir(directory)
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments}: {}", err(&output));
}

impl Authority {
    /// Creates the authority; `None` if openssl is missing.
    pub fn new() -> Option<Self> {
        if Command::new("openssl").arg("version").output().is_err() {
            return memfold_testkit::reports_skip("openssl is not installed");
        }
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path();
        openssl(
            place,
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.crt",
        );
        write(place.join("extensions"), "subjectAltName=IP:127.0.0.1\n").unwrap();
        Some(Self { directory })
    }

    /// Makes a certificate for 127.0.0.1 and its key. With `days` below 0, the certificate has
    /// expired.
    pub fn issue(&self, name: &str, days: i32) {
        let place = self.directory.path();
        openssl(
            place,
            &format!(
                "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name} -keyout {name}.key -out {name}.req"
            ),
        );
        openssl(
            place,
            &format!(
                "x509 -req -in {name}.req -CA ca.crt -CAkey ca.key -CAcreateserial -days {days} -extfile extensions -out {name}.crt"
            ),
        );
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    /// Writes a token to a file that only its owner can read, and returns the path.
    pub fn token(&self, name: &str, token: &str) -> String {
        let path = self.path(name);
        write(&path, token).unwrap();
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        path
    }

    /// Returns the arguments of a daemon that serves over TLS with this certificate.
    pub fn serving(&self, name: &str) -> Vec<String> {
        let words = ["--listen", "127.0.0.1:0", "--tls-cert", "--tls-key"];
        let [listen, address, cert, key] = words.map(str::to_owned);
        let certificate = self.path(&format!("{name}.crt"));
        vec![
            listen,
            address,
            cert,
            certificate,
            key,
            self.path(&format!("{name}.key")),
        ]
    }

    /// Returns the arguments of a daemon that uses the registry at `url`.
    pub fn asking(&self, url: &str, token: &str) -> Vec<String> {
        let words = [
            "--registry",
            url,
            "--registry-ca",
            &self.path("ca.crt"),
            "--registry-token",
            token,
        ];
        words.map(str::to_owned).to_vec()
    }
}

pub fn strs(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// Returns the token for a host, and the URL of the registry.
pub fn admit(registry: &Daemon, host: &str) -> (String, String) {
    let made = registry.json(&["host", "add", host]);
    assert_eq!(made["host"], host);
    let url = made["urls"][0].as_str().unwrap();
    assert!(url.starts_with("https://127.0.0.1:"), "{url}");
    (made["token"].as_str().unwrap().into(), url.into())
}

fn host(name: &str, asking: &[String]) -> Daemon {
    Daemon::start_with(&[&["--host", name], strs(asking).as_slice()].concat())
}

#[test]
fn hosts_lend_and_borrow_over_tls_with_a_separate_token_for_each_host() {
    let Some(authority) = Authority::new() else {
        return;
    };
    authority.issue("server", 2);
    let serving = authority.serving("server");
    let listen = ["--listen", "127.0.0.1"];
    let Some(registry) = lending::lender("a", &strs(&serving), &listen) else {
        return;
    };
    let status = registry.json(&["lend"]);
    assert_eq!(status["listens"], "127.0.0.1");
    // The output is the token alone, so that it can be redirected to a file.
    let output = registry.run(&["host", "add", "b"]);
    assert_eq!(out(&output).trim().len(), 64, "{}", out(&output));
    assert!(err(&output).contains("--registry https://127.0.0.1:"));
    let (token, url) = admit(&registry, "b");
    let token = authority.token("b.token", &token);
    let borrower = host("b", &authority.asking(&url, &token));
    let vm = Swapping::start(&borrower, "v");
    vm.write(1, 0);
    let done = vm.borrow(&[]);
    assert_eq!(done["place"], "lent");
    vm.write(2, 8);
    let leases = borrower.json(&["leases"]);
    assert_eq!(leases["registry"], url.as_str());
    assert_eq!(leases["leases"][0]["borrower"], "b");
    // An unknown client at the export is counted.
    let stranger = strangers(&export_ports(&registry));
    wait("the stranger is counted", || {
        registry.json(&["lend"])["refused"].as_u64() >= Some(stranger)
    });
    kill_process(export(&registry), Signal::KILL).unwrap();
    vm.read(1, 0);
    vm.read(2, 8);
    vm.wait_place("on_copy");
    wait_free(&registry);
    vm.borrow(&[]);
    // The audit log has no entries about renewals, only about actions of users.
    let (_, log) = registry.http("GET", "/v1/audit", b"");
    assert!(!log.contains("/v1/registry"), "{log}");
    assert!(log.contains("/v1/hosts"), "{log}");
    vm.give_back();
    vm.read(2, 8);
    wait_free(&registry);
    // After its token was removed, the host is refused.
    assert_eq!(registry.json(&["host", "list"]), serde_json::json!(["b"]));
    assert_eq!(registry.json(&["host", "remove", "b"]), true);
    refused(&borrower.run(&["borrow", "v"]), 1, &["needs a login"]);
    assert!(refusals(&registry, "credentials") >= 1.0);
}

/// Returns the ports on which the daemon's exporting processes listen.
fn export_ports(lender: &Daemon) -> Vec<u16> {
    let pid = export(lender).as_raw_nonzero();
    let sockets: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter_map(|to| {
            let to = to.to_str()?.strip_prefix("socket:[")?;
            Some(to.strip_suffix(']')?.to_owned())
        })
        .collect();
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap();
    let port = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // A listening socket of one of the processes.
        let is_it = fields[3] == "0A" && sockets.iter().any(|inode| fields[9] == inode);
        let port = fields[1].split_once(':')?.1;
        is_it.then(|| u16::from_str_radix(port, 16).unwrap())
    };
    table.lines().skip(1).filter_map(port).collect()
}

/// Sends text that is not the export's protocol to these ports. Returns the number of ports.
fn strangers(ports: &[u16]) -> u64 {
    assert!(!ports.is_empty());
    for port in ports {
        let mut stream = TcpStream::connect(("127.0.0.1", *port)).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let _ = stream.read(&mut [0; 64]);
    }
    ports.len() as u64
}

#[test]
fn a_lease_registry_refuses_and_counts_wrong_tokens_and_certificates() {
    let Some(authority) = Authority::new() else {
        return;
    };
    authority.issue("server", 2);
    authority.issue("old", -1);
    let registry = Daemon::start_with(&strs(&authority.serving("server")));
    let (token, url) = admit(&registry, "b");
    let read_token = registry.state().join("access/read.token");
    let read_token = std::fs::read_to_string(read_token).unwrap();
    for (name, text, words) in [
        ("garbage", "0".repeat(64), "needs a login"),
        ("read", read_token, "only hosts may use the registry"),
        ("c", admit(&registry, "c").0, "request is for host 'b'"),
    ] {
        let token = authority.token(name, &text);
        let daemon = host("b", &authority.asking(&url, &token));
        let output = daemon.run(&["lend", "--max", "64M", "--listen", "127.0.0.1"]);
        if name == "c" && code(&output) == 0 {
            // The host may read the registry, but is refused when it acts in another host's name.
            wait("it is refused", || {
                let problem = daemon.json(&["lend"])["problem"].clone();
                problem.as_str().is_some_and(|p| p.contains(words))
            });
        } else if code(&output) != 3 {
            refused(&output, 1, &[words]);
        }
    }
    assert!(refusals(&registry, "credentials") >= 1.0);
    assert!(refusals(&registry, "rights") >= 1.0);
    let (_, log) = registry.http("GET", "/v1/audit", b"");
    assert!(log.contains("request is for host 'b'") && !log.contains(&token));
    // A client that does not speak TLS, and one that trusts another authority, are refused.
    let before = refusals(&registry, "tls");
    let mut plain = TcpStream::connect(url.strip_prefix("https://").unwrap()).unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let _ = plain.read_to_end(&mut Vec::new());
    let Some(other) = Authority::new() else {
        return;
    };
    let token = other.token("b.token", &token);
    let foreign = host("b", &other.asking(&url, &token));
    refused(
        &foreign.run(&["leases"]),
        1,
        &["invalid peer certificate", &url],
    );
    wait("both are counted", || {
        refusals(&registry, "tls") >= before + 2.0
    });
    // A server whose certificate has expired gets no request.
    let old = Daemon::start_with(&strs(&authority.serving("old")));
    let (token, url) = admit(&old, "b");
    let token = authority.token("old.token", &token);
    let daemon = host("b", &authority.asking(&url, &token));
    let unusable = format!("cannot use the registry at {url}");
    let output = daemon.run(&["leases"]);
    refused(&output, 1, &[&unusable, "certificate: Expired"]);
    wait("it is counted", || refusals(&old, "tls") >= 1.0);
}

#[test]
fn with_unusable_options_for_the_lease_registry_the_daemon_does_not_start() {
    let Some(authority) = Authority::new() else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let serve = |more: &[&str]| {
        program()
            .arg("--socket")
            .arg(directory.path().join("s"))
            .args(["serve", "--state"])
            .arg(directory.path().join("state"))
            .args(more)
            .output()
            .unwrap()
    };
    let ca = authority.path("ca.crt");
    let open = authority.token("open.token", "abc");
    set_permissions(&open, Permissions::from_mode(0o644)).unwrap();
    let good = authority.token("good.token", "abc");
    let url = ["--registry", "https://127.0.0.1:1"];
    let of = |more: &[&str]| serve(&[url.as_slice(), more].concat());
    refused(&of(&[]), 1, &["--registry-token", "memfold host add"]);
    refused(&of(&["--registry-token", &good]), 1, &["--registry-ca"]);
    let both = ["--registry-ca", &ca, "--registry-token", &open];
    refused(&of(&both), 1, &["chmod 600", &open]);
    let both = ["--registry-ca", &good, "--registry-token", &good];
    refused(&of(&both), 1, &[&good, "no certificate"]);
    refused(
        &serve(&["--registry", "etcd+http://10.0.0.1:2379"]),
        1,
        &["without TLS"],
    );
    refused(
        &serve(&["--registry", "http://10.0.0.1:1"]),
        1,
        &["is not the address of a lease registry"],
    );
    assert_eq!(code(&serve(&["--registry-ca", &ca])), 2);
}

/// An etcd of one member, which is killed when this is dropped.
struct Etcd {
    child: Child,
    command: Vec<String>,
    program: PathBuf,
    url: String,
    _directory: tempfile::TempDir,
}

impl Etcd {
    /// Starts etcd with more arguments; `scheme`: URL scheme of its clients. `None` if etcd is not
    /// installed.
    fn start(scheme: &str, more: &[&str]) -> Option<Self> {
        let program = server("etcd", "etcd", "--version")?;
        let directory = tempfile::tempdir().unwrap();
        let free = || TcpListener::bind("127.0.0.1:0").unwrap();
        let sockets = [free(), free()];
        let [client, peer] = sockets.map(|socket| socket.local_addr().unwrap());
        let (client, peer) = (format!("{scheme}://{client}"), format!("http://{peer}"));
        let place = directory.path().display().to_string();
        let mut command: Vec<String> = [
            ("--data-dir", &place),
            ("--listen-client-urls", &client),
            ("--advertise-client-urls", &client),
            ("--listen-peer-urls", &peer),
        ]
        .into_iter()
        .flat_map(|(option, value)| [option.to_owned(), value.clone()])
        .collect();
        // Only processes are killed, never the host, so written data survives without fsync(2).
        command.push("--unsafe-no-fsync".to_owned());
        command.extend(more.iter().map(|&word| word.to_owned()));
        let mut etcd = Self {
            child: Command::new("true").spawn().unwrap(),
            command,
            program,
            url: format!("etcd+{client}"),
            _directory: directory,
        };
        etcd.start_again();
        Some(etcd)
    }

    fn start_again(&mut self) {
        self.child = Command::new(&self.program)
            .args(&self.command)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // This fails only if etcd has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn kill_daemon(daemon: &mut Daemon) {
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
}

#[test]
fn no_byte_is_lost_or_lent_twice_when_daemons_and_etcd_are_killed() {
    let Some(mut etcd) = Etcd::start("http", &[]) else {
        return;
    };
    let url = etcd.url.clone();
    let registry = ["--registry", url.as_str()];
    // etcd may not answer yet.
    let first = Daemon::start_with(&[&["--host", "x"], registry.as_slice()].concat());
    wait("etcd serves", || code(&first.run(&["leases"])) == 0);
    let Some(mut lender) = lending::lender("a", &registry, &["--listen", "127.0.0.1"]) else {
        return;
    };
    let mut borrower = Daemon::start_with(&[&["--host", "b"], registry.as_slice()].concat());
    let vm = Swapping::start(&borrower, "v");
    vm.write(1, 0);
    assert_eq!(vm.borrow(&[])["place"], "lent");
    vm.write(2, 8);
    // etcd is away for longer than a lender may be silent, and no loan is given up.
    etcd.kill();
    std::thread::sleep(std::time::Duration::from_secs(5));
    vm.read(2, 8);
    // The borrower itself knows its loans.
    let output = borrower.run(&["leases"]);
    refused(
        &output,
        1,
        &["cannot use the registry", "this host itself knows"],
    );
    let text = out(&output);
    assert!(text.contains("swap of 'v' is on 64.0 MiB of a"), "{text}");
    assert!(!text.contains("LENDER"), "{text}");
    etcd.start_again();
    wait("etcd serves", || code(&borrower.run(&["leases"])) == 0);
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(vm.place(), "lent");
    let lent = |daemon: &Daemon| daemon.json(&["leases"])["lenders"][0]["lent_bytes"].clone();
    assert_eq!(lent(&borrower), 64 << 20);
    // The borrower's daemon dies.
    kill_daemon(&mut borrower);
    borrower.start_again();
    let vm = Swapping {
        daemon: &borrower,
        name: "v",
    };
    vm.wait_place("lent");
    vm.read(1, 0);
    // The lender's daemon dies: its exports end, and its leases are gone when it lends again.
    kill_daemon(&mut lender);
    vm.read(2, 8);
    vm.wait_place("on_copy");
    lender.start_again();
    wait("it lends again", || {
        lender.json(&["lend"])["offer_bytes"] == 256 << 20
    });
    wait_free(&lender);
    vm.borrow(&[]);
    vm.read(1, 0);
    assert_eq!(lent(&borrower), 64 << 20);
    vm.give_back();
    vm.read(2, 8);
    wait_free(&lender);
}

#[test]
fn etcd_accepts_memfolds_client_certificate_and_refuses_other_certificates() {
    let Some(authority) = Authority::new() else {
        return;
    };
    authority.issue("server", 2);
    authority.issue("host", 2);
    authority.issue("old", -1);
    let [ca, cert, key] = ["ca.crt", "server.crt", "server.key"].map(|name| authority.path(name));
    let more = [
        "--cert-file",
        &cert,
        "--key-file",
        &key,
        "--client-cert-auth",
        "--trusted-ca-file",
        &ca,
    ];
    let Some(etcd) = Etcd::start("https", &more) else {
        return;
    };
    let daemon = |own: Option<&str>| {
        let mut words = vec![
            "--host".to_owned(),
            "b".into(),
            "--registry".into(),
            etcd.url.clone(),
            "--registry-ca".into(),
            ca.clone(),
        ];
        if let Some(own) = own {
            words.extend([
                "--registry-cert".into(),
                authority.path(&format!("{own}.crt")),
            ]);
            words.extend([
                "--registry-key".into(),
                authority.path(&format!("{own}.key")),
            ]);
        }
        Daemon::start_with(&strs(&words))
    };
    let known = daemon(Some("host"));
    wait("etcd serves", || code(&known.run(&["leases"])) == 0);
    let seen: Value = known.json(&["leases"]);
    assert_eq!(seen["registry"], etcd.url.as_str());
    for stranger in [None, Some("old")] {
        let daemon = daemon(stranger);
        refused(
            &daemon.run(&["leases"]),
            1,
            &[&etcd.url, "cannot use the registry"],
        );
    }
}
