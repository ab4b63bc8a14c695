//! Test of lending RAM between several hosts, simulated on one: network namespaces, connected by
//! links with delay, loss and interruptions. A guest of the first host swaps to RAM of the second,
//! and the lease registry is on the third.
//!
//! ```text
//!   borrower (VM) 10.77.0.2 ---.
//!   lender        10.77.0.1 ----+-- wire.py: delay and loss; bandwidth by tc at each host
//!   registry      10.77.0.3 ---'
//! ```

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfold_api::{
    BorrowRequest, Borrowed, ClientError, ExecRequest, ExecResult, HostRequest, HostToken,
    LeaseReport, LendRequest, StopRequest, SwapPlace, VmInfo,
};
use memfold_lab::{DiskMode, Lab};
use memfold_lend::{Durability, LenderStatus, Transport};
use memfold_testkit::{skip, slowness, wait_until};
use memfold_units::ByteSize;

use crate::beside::lend::{Host, SWAPPER, figures, wait};
use crate::support::{self, BOOT};

const WIRE: &str = include_str!("../wire.py");

const RAM: ByteSize = ByteSize::mib(320);
const SWAP: ByteSize = ByteSize::mib(512);
const ARRAY_MIB: u64 = 448;

/// Delay of the wire in one direction. The next constant: part of the packets that are lost.
const DELAY_MS: &str = "0.25";
const LOSS_PERCENT: &str = "0.05";
const BANDWIDTH: &str = "1gbit";

/// Longest time that the guest may wait for one page when a link is cut, in seconds: the promise.
const LONGEST_STALL: f64 = 5.0;

fn run(command: &str) {
    let mut words = command.split(' ');
    let program = words.next().unwrap();
    let output = Command::new(program).args(words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {said}");
}

/// Returns whether namespaces and links can be made here; the error says why not.
fn able() -> Result<(), String> {
    let name = format!("mf{}-able", std::process::id());
    let made = Command::new("ip").args(["netns", "add", &name]).output();
    match made {
        Ok(output) if output.status.success() => {}
        Ok(output) => return Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => return Err(format!("ip: {error}; apt install iproute2")),
    }
    let link = format!("-n {name} link add veth0 type veth peer name veth1");
    let linked = Command::new("ip").args(link.split(' ')).output().unwrap();
    run(&format!("ip netns del {name}"));
    let python = Command::new("python3").arg("--version").output();
    if python.is_err() {
        return Err("python3 is missing".into());
    }
    let openssl = Command::new("openssl").arg("version").output();
    if openssl.is_err() {
        return Err("openssl is missing".into());
    }
    if linked.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&linked.stderr).into_owned())
    }
}

/// Network namespaces of the hosts, and of the wire that connects them.
struct Net {
    prefix: String,
    wire: Child,
    hosts: Vec<&'static str>,
}

impl Net {
    fn new(hosts: &[&'static str]) -> Self {
        let prefix = format!("mf{}", std::process::id());
        let middle = format!("{prefix}-wire");
        run(&format!("ip netns add {middle}"));
        let mut ends = Vec::new();
        for (number, host) in hosts.iter().enumerate() {
            let (space, end) = (format!("{prefix}-{host}"), format!("w{number}"));
            run(&format!("ip netns add {space}"));
            run(&format!(
                "ip link add {end} netns {middle} type veth peer name eth0 netns {space}"
            ));
            run(&format!(
                "ip -n {space} addr add {}/24 dev eth0",
                address(number)
            ));
            for (space, device) in [(&space, "lo"), (&space, "eth0"), (&middle, end.as_str())] {
                run(&format!("ip -n {space} link set {device} up"));
            }
            run(&format!(
                "nsenter --net=/run/netns/{space} tc qdisc add dev eth0 root tbf rate {BANDWIDTH} burst 512kb latency 50ms"
            ));
            ends.push(end);
        }
        let script = std::env::temp_dir().join(format!("{prefix}-wire.py"));
        std::fs::write(&script, WIRE).unwrap();
        let mut wire = Command::new("nsenter")
            .arg(format!("--net=/run/netns/{middle}"))
            .arg("python3")
            .arg(&script)
            .args([DELAY_MS, LOSS_PERCENT])
            .args(&ends)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = [0; 6];
        std::io::Read::read_exact(wire.stdout.as_mut().unwrap(), &mut said).unwrap();
        assert_eq!(&said, b"ready\n");
        std::fs::remove_file(&script).unwrap();
        Self {
            prefix,
            wire,
            hosts: hosts.to_vec(),
        }
    }

    fn space(&self, host: &str) -> String {
        format!("{}-{host}", self.prefix)
    }

    /// Disconnects a host, or connects it again.
    fn link(&self, host: &str, state: &str) {
        let number = self.hosts.iter().position(|h| *h == host).unwrap();
        run(&format!(
            "ip -n {}-wire link set w{number} {state}",
            self.prefix
        ));
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let _ = self.wire.kill();
        let _ = self.wire.wait();
        let spaces = self.hosts.iter().copied().chain(["wire"]);
        for space in spaces {
            let name = self.space(space);
            let _ = Command::new("ip").args(["netns", "del", &name]).status();
        }
    }
}

fn address(number: usize) -> String {
    format!("10.77.0.{}", number + 1)
}

impl Host {
    /// Starts a daemon in a network namespace.
    fn start_in(net: &Net, name: &str, more: &[&str]) -> Self {
        let mut program = Command::new("nsenter");
        program
            .arg(format!("--net=/run/netns/{}", net.space(name)))
            .arg(env!("CARGO_BIN_EXE_memfold"));
        let more = [&["--paused"], more].concat();
        Self::start(tempfile::tempdir().unwrap(), program, name, &more)
    }

    fn lend_at(&self, max: ByteSize, address: &str) {
        let request = LendRequest {
            max_bytes: max.0,
            listen: Some(address.parse().unwrap()),
            announce: None,
            ports: Some((10900, 10999)),
            transport: Transport::Nbd,
            cleartext: false,
        };
        let _: LenderStatus = self.client.post("/v1/lend", &request).unwrap();
        self.wait_offered(max);
    }

    /// Waits until the host and the registry report that this much memory is free.
    fn wait_offered(&self, bytes: ByteSize) {
        wait("it has so much to spare", || {
            let status = self.status();
            let report: Result<LeaseReport, ClientError> = self.client.get("/v1/leases");
            let is_offered = report.is_ok_and(|report| {
                let mut ours = report.lenders.iter();
                ours.any(|lender| {
                    lender.lender.host == status.host
                        && lender.left_ms > 0
                        && lender.lent_bytes == 0
                        && lender.offered_bytes >= bytes.0
                })
            });
            is_offered && status.lent_bytes == 0 && status.problem.is_none()
        });
    }

    fn borrow(&self, durability: Durability) -> Borrowed {
        let request = BorrowRequest {
            durability,
            ..BorrowRequest::default()
        };
        self.client.post("/v1/vms/v/borrow", &request).unwrap()
    }

    fn give_back(&self) -> Borrowed {
        self.client.post("/v1/vms/v/return", &()).unwrap()
    }

    fn place(&self) -> SwapPlace {
        let report: Result<LeaseReport, ClientError> = self.client.get("/v1/leases");
        let borrowed = report.map(|report| report.borrowed).unwrap_or_default();
        let of_it = borrowed.into_iter().find(|b| b.vm == "v");
        of_it.map_or(SwapPlace::OnDisk, |b| b.place)
    }

    fn exec(&self, script: &str) -> Result<String, String> {
        let request = ExecRequest {
            script: script.to_owned(),
            timeout_s: 300.0,
        };
        let done: ExecResult = self
            .client
            .post("/v1/vms/v/exec", &request)
            .map_err(|error| error.to_string())?;
        if done.code == 0 {
            Ok(done.stdout)
        } else {
            Err(done.stderr)
        }
    }

    /// Returns figures that the guest's program has printed so far: pages checked, wrong words,
    /// longest access in seconds.
    fn heard(&self) -> (u64, u64, f64) {
        figures(&self.exec("cat /run/swapper").unwrap())
    }
}

/// Makes a self-signed certificate for the registry's address, as
/// docs/how-to/lending-between-hosts.md does.
pub fn certificate(directory: &Path, ip: &str) -> (PathBuf, PathBuf) {
    let (certificate, key) = (
        directory.join("registry.crt"),
        directory.join("registry.key"),
    );
    run(&format!(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=registry -addext subjectAltName=IP:{ip} -addext basicConstraints=critical,CA:FALSE -keyout {} -out {}",
        key.display(),
        certificate.display()
    ));
    (certificate, key)
}

#[test]
fn a_guest_that_swaps_to_memory_of_another_host_survives_network_failures() {
    let Some(_turn) = support::turn_ahead() else {
        return;
    };
    if let Err(why) = able() {
        assert!(
            std::env::var_os("MEMFOLD_REAL").is_none(),
            "MEMFOLD_REAL is set and there are no network namespaces: {why}"
        );
        skip!("no network namespaces: {why}");
    }
    let net = Net::new(&["lender", "borrower", "registry"]);
    let files = tempfile::tempdir().unwrap();
    let (certificate, key) = certificate(files.path(), &address(2));
    let path = |path: &Path| path.display().to_string();
    let listen = format!("{}:8420", address(2));
    let registry = Host::start_in(
        &net,
        "registry",
        &[
            "--listen",
            &listen,
            "--tls-cert",
            &path(&certificate),
            "--tls-key",
            &path(&key),
        ],
    );
    let admitted = |name: &str| {
        let request = HostRequest { host: name.into() };
        let made: HostToken = registry.client.post("/v1/hosts", &request).unwrap();
        let token = files.path().join(name);
        std::fs::write(&token, made.token).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&token, mode).unwrap();
        let url = format!("https://{listen}");
        Host::start_in(
            &net,
            name,
            &[
                "--registry",
                &url,
                "--registry-ca",
                &path(&certificate),
                "--registry-token",
                &path(&token),
            ],
        )
    };
    let (lender, borrower) = (admitted("lender"), admitted("borrower"));
    lender.lend_at(SWAP, &address(0));

    let mut spec = Lab::spec("v", "trixie-b", RAM, DiskMode::Buffered).unwrap();
    spec.swap = Some(SWAP);
    let _: VmInfo = borrower.client.post("/v1/vms", &spec).unwrap();
    wait_until("the guest uses its swap disk", BOOT, || {
        let swaps = borrower.exec("cat /proc/swaps");
        swaps.is_ok_and(|swaps| swaps.contains("/dev/vd"))
    });
    let begin = format!(
        "{}gcc -O2 -o /opt/swapper /opt/swapper.c && systemd-run -q --unit=swapper -p OOMScoreAdjust=-500 /opt/swapper {ARRAY_MIB} /run/swapper /run/swapper.stop",
        support::file("swapper.c", SWAPPER)
    );
    borrower.exec(&begin).unwrap();
    wait("it has begun to check", || {
        let lines = borrower.exec("wc -l < /run/swapper || echo 0").unwrap();
        lines.trim().parse::<u64>().unwrap_or(0) > 3
    });
    let (_, _, on_disk) = borrower.heard();

    // The swap disk moves over the link.
    let done = borrower.borrow(Durability::Disk);
    assert_eq!(
        (done.place, &*done.lenders),
        (SwapPlace::Lent, &["lender".to_owned()][..])
    );
    assert_eq!(lender.status().lent_bytes, SWAP.0);
    std::thread::sleep(Duration::from_secs(5));
    let (checked, _, borrowed) = borrower.heard();

    // The link is cut: the VM continues with its copy, and both sides end the loan by themselves.
    net.link("lender", "down");
    let cut = Instant::now();
    wait("it goes on, on its copy", || {
        borrower.place() == SwapPlace::OnCopy
    });
    let healed = cut.elapsed();
    wait("it checks on", || borrower.heard().0 > checked);
    // The lender does not know whether the borrower has another copy.
    let limit = Duration::from_secs(180);
    wait_until("the lender has ended the export", limit, || {
        lender.status().lent_bytes == 0
    });
    let let_go = cut.elapsed();
    assert!(lender.status().problem.is_some());
    let (_, wrong, with_cut) = borrower.heard();
    assert_eq!(wrong, 0);
    println!(
        "borrowed in {} ms; longest access {on_disk:.3} s on disk, {borrowed:.3} s with lent RAM, {with_cut:.3} s with the cut; on the copy alone after {healed:.2?}, the lender let go after {let_go:.2?}",
        done.took_ms
    );
    // The link is back. The VM does not borrow again before it is asked to.
    borrower.give_back();
    net.link("lender", "up");
    lender.wait_offered(SWAP);
    let again = borrower.borrow(Durability::Disk);
    assert_eq!(again.place, SwapPlace::Lent);
    let (checked, ..) = borrower.heard();
    // The registry's link is cut: no loan is given up.
    net.link("registry", "down");
    std::thread::sleep(Duration::from_secs(8));
    net.link("registry", "up");
    wait("the registry is heard", || {
        let report: Result<LeaseReport, ClientError> = borrower.client.get("/v1/leases");
        report.is_ok_and(|report| report.registry_away.is_none())
    });
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(borrower.place(), SwapPlace::Lent);
    assert!(borrower.heard().0 > checked);
    let back = borrower.give_back();
    assert!(back.changed && back.took_ms < 15_000, "{back:?}");
    lender.wait_offered(SWAP);

    // A second lender holds a copy. One lender is cut off, and the other's data goes to disk
    // automatically.
    registry.lend_at(SWAP, &address(2));
    let done = borrower.borrow(Durability::Replica);
    assert_eq!((done.place, done.lenders.len()), (SwapPlace::Lent, 2));
    net.link("lender", "down");
    let cut = Instant::now();
    wait("there is redundancy again", || {
        borrower.place() == SwapPlace::OnDisk
    });
    let restored = cut.elapsed();
    borrower.give_back();
    net.link("lender", "up");
    lender.wait_offered(SWAP);
    registry.wait_offered(SWAP);

    let (_, _, longest) = borrower.heard();
    assert!(longest < LONGEST_STALL * slowness(), "{longest} s");

    // If the lender holds the only copy, a cut link is waited for; if the registry stays away, the
    // data is moved to a disk in time.
    let done = borrower.borrow(Durability::None);
    assert_eq!(
        (done.place, &*done.lenders),
        (SwapPlace::Lent, &["lender".to_owned()][..])
    );
    net.link("lender", "down");
    std::thread::sleep(Duration::from_secs(8));
    net.link("lender", "up");
    // Lines about a long access come late.
    let (checked, ..) = borrower.heard();
    wait("it checks on", || borrower.heard().0 > checked + 4096);
    assert_eq!(borrower.place(), SwapPlace::Lent);
    let (_, _, waited) = borrower.heard();
    assert!(waited > LONGEST_STALL, "it didn't wait: {waited} s");
    wait("its wait is counted", || {
        let report: LeaseReport = borrower.client.get("/v1/leases").unwrap();
        let waits = report.borrowed[0].waits;
        waits.is_some_and(|waits| waits.over_5_s > 0 && waits.requests > waits.over_1_s)
    });
    net.link("registry", "down");
    let cut = Instant::now();
    wait_until("it is on disk", Duration::from_secs(300), || {
        // Leases come from the registry; this does not.
        let vms: Vec<VmInfo> = borrower.client.get("/v1/vms").unwrap();
        let swap = vms[0].swap.as_ref().unwrap();
        swap.place == SwapPlace::OnDisk
    });
    let moved = cut.elapsed();
    assert!(lender.status().lent_bytes > 0, "it was over before");
    borrower.give_back();
    net.link("registry", "up");
    lender.wait_offered(SWAP);
    println!(
        "without a copy: longest access {waited:.3} s with a cut of 8 s; on disk {moved:.2?} after the registry was cut off"
    );

    borrower.exec("touch /run/swapper.stop").unwrap();
    let mut said = String::new();
    wait_until("all pages are checked", Duration::from_secs(600), || {
        said = borrower.exec("sed -n /^end/p /run/swapper").unwrap();
        !said.is_empty()
    });
    let whole = format!("end {} pages, 0 words wrong", ARRAY_MIB * 256);
    assert_eq!(said.trim(), whole);
    borrower.exec("sed -i /^end/d /run/swapper").unwrap();
    let (checked, wrong, _) = borrower.heard();
    let errors =
        "dmesg | awk '/I\\/O error|[Ww]rite-error|[Rr]ead-error/ { n++ } END { print n + 0 }'";
    assert_eq!(borrower.exec(errors).unwrap().trim(), "0");
    println!(
        "{checked} pages checked, {wrong} words wrong; given back in {} ms; a replica was on disk {restored:.2?} after the cut; longest access with another copy {longest:.3} s",
        back.took_ms
    );
    let stop = StopRequest { timeout_s: 0.0 };
    let _: serde_json::Value = borrower.client.post("/v1/vms/v/stop", &stop).unwrap();
}
