//! Test of an LVM volume whose data is moved to another host's RAM. The borrowing host is simulated
//! by a guest: its swap, an LVM volume, moves to RAM that this host lends by iSCSI, and back.
//! Lenders die, hang and are disconnected meanwhile.
//!
//! ```text
//!   this host: memfold serve (lends, has the registry), tgtd <--- QEMU's user-mode network ---  guest: memfold.service, iscsid, LVM,
//!              127.0.0.1                                     10.0.2.2                           a program that swaps
//! ```

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use memfold_api::{ClientError, HostRequest, HostToken, LendRequest};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_lend::{LenderStatus, Transport};
use memfold_testkit::{skip, wait_until};
use memfold_units::ByteSize;
use memfold_vm::{DiskSpec, Network};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

use super::hosts::certificate;
use crate::beside::lend::{Host, SWAPPER, figures};
use crate::support::{self, BOOT};

/// Address of this host for guests (QEMU's `-netdev user`).
const THIS_HOST: &str = "10.0.2.2";

const IMAGE: &str = "trixie-host";
const UNIT: &str = include_str!("../../../../../deploy/systemd/memfold.service");

const RAM: ByteSize = ByteSize::mib(256);
const SWAP_MIB: u64 = 128;
const ARRAY_MIB: u64 = 192;
/// Memory that this host lends, enough for one volume at a time.
const LENT: ByteSize = ByteSize::mib(144);

/// Longest time that the guest may wait for one page when a lender dies, in seconds: the promise.
const LONGEST_STALL: f64 = 10.0;

/// Longest access in seconds while LVM's tools move the volume. The tools suspend the volume
/// several times; under emulation, each time takes seconds of CPU.
const LONGEST_CHANGE: f64 = 30.0;

const LIMIT: Duration = Duration::from_secs(300);

/// Shell script that starts the daemon with the unit that packages install, except for the
/// program's path. Without `Restart=`, a daemon that the test kills is not restarted before the
/// test does it.
const SET_UP: &str = r#"
set -e
mkdir -p /opt/payload && mount -o ro /dev/vdb /opt/payload
until [ -e /sys/class/net/e* ]; do sleep 0.2; done
udevadm settle
card=$(basename /sys/class/net/e*)
ip link set lo up && ip link set "$card" up
ip addr add 10.0.2.15/24 dev "$card" && ip route add default via 10.0.2.2
mkdir -p /etc/memfold /etc/systemd/system/memfold.service.d
cp /opt/payload/memfold.service /etc/systemd/system/
install -m 600 /opt/payload/token /etc/memfold/token
cat > /etc/systemd/system/memfold.service.d/test.conf <<END
[Service]
ExecStart=
ExecStart=/opt/payload/memfold serve --paused --host guest --config /dev/null --log info,memfold_lend::lvm=debug --registry https://10.0.2.2:PORT --registry-ca /opt/payload/registry.crt --registry-token /etc/memfold/token
END
ln -sf /opt/payload/memfold /usr/local/bin/memfold
systemctl daemon-reload
vgcreate -q vg /dev/vdc
lvcreate -q -y -W y -L SWAPm -n swap vg
lvcreate -q -y -W y -L 16m -n other vg
mkswap /dev/vg/swap && swapon /dev/vg/swap
systemctl start memfold
"#;

/// Starts a lender that serves the registry to guests. Returns it and the registry's port.
fn start_lender() -> (Host, u16) {
    let directory = tempfile::tempdir().unwrap();
    let (certificate, key) = certificate(directory.path(), THIS_HOST);
    // This port was free a moment ago.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let listen = format!("127.0.0.1:{port}");
    let more = [
        "--paused",
        "--listen",
        &listen,
        "--tls-cert",
        certificate.to_str().unwrap(),
        "--tls-key",
        key.to_str().unwrap(),
    ];
    let program = Command::new(env!("CARGO_BIN_EXE_memfold"));
    (Host::start(directory, program, "lender", &more), port)
}

impl Host {
    fn lend_by(&self, transport: Transport) {
        let request = LendRequest {
            max_bytes: LENT.0,
            listen: Some([127, 0, 0, 1].into()),
            announce: Some(THIS_HOST.parse().unwrap()),
            ports: None,
            transport,
            cleartext: transport == Transport::Iscsi,
        };
        // Memory that was lent before may still be in the process of being returned.
        wait("it lends", || {
            let lends: Result<LenderStatus, ClientError> = self.client.post("/v1/lend", &request);
            lends.is_ok()
        });
        self.wait_free(LENT);
    }

    fn lend_no_more(&self) {
        let _: Option<LenderStatus> = self.client.delete("/v1/lend").unwrap();
        wait("it lends nothing", || {
            let status: Option<LenderStatus> = self.client.get("/v1/lend").unwrap();
            status.is_none_or(|status| status.lent_bytes == 0)
        });
    }

    fn token(&self) -> String {
        let request = HostRequest {
            host: "guest".into(),
        };
        let made: HostToken = self.client.post("/v1/hosts", &request).unwrap();
        made.token
    }
}

#[track_caller]
fn wait(what: &str, ready: impl FnMut() -> bool) {
    wait_until(what, Duration::from_secs(120), ready);
}

fn run(program: &str, words: &[&Path]) {
    let done = Command::new(program).args(words).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{program}: {said}");
}

/// Makes the guest's disks: one with programs and files, and one for its volume group.
fn disks(directory: &Path, lender: &Host) -> [PathBuf; 2] {
    let payload = directory.join("payload");
    std::fs::create_dir(&payload).unwrap();
    let source = directory.join("swapper.c");
    std::fs::write(&source, SWAPPER).unwrap();
    let path = |name: &str| payload.join(name);
    let options = ["-O2", "-static", "-o"].map(Path::new);
    run("cc", &[&options[..], &[&path("swapper"), &source]].concat());
    let own = Path::new(env!("CARGO_BIN_EXE_memfold"));
    run("strip", &[Path::new("-o"), &path("memfold"), own]);
    let certificate = lender.directory.path().join("registry.crt");
    std::fs::copy(certificate, path("registry.crt")).unwrap();
    std::fs::write(path("token"), lender.token()).unwrap();
    std::fs::write(path("memfold.service"), UNIT).unwrap();
    let image = directory.join("payload.img");
    let words = ["-q", "-t", "ext4", "-d"].map(Path::new);
    run(
        "mke2fs",
        &[&words[..], &[&payload, &image, Path::new("128M")]].concat(),
    );
    let group = directory.join("group.img");
    let file = std::fs::File::create(&group).unwrap();
    file.set_len((2 * SWAP_MIB) << 20).unwrap();
    [image, group]
}

/// The guest that acts as a host without VMs.
struct Guest<'a>(&'a Lab);

/// Seconds from which on an access is reported, together with messages of the guest's kernel and
/// services.
const LONG: f64 = 3.0;

impl Guest<'_> {
    fn run(&self, script: &str) -> String {
        match self.0.exec("h", script, LIMIT) {
            Ok(said) => said,
            Err(error) => {
                self.tell();
                panic!("{error:#}");
            }
        }
    }

    /// Prints the log of the guest's kernel and services, and the layout of its volumes.
    fn tell(&self) {
        let log = "journalctl -q -o short-monotonic -b _TRANSPORT=kernel + _SYSTEMD_UNIT=memfold.service + _SYSTEMD_UNIT=iscsid.service | tail -n 90; lvs -a -o +devices; pvs";
        println!("{}", self.0.exec("h", log, LIMIT).unwrap_or_default());
    }

    /// Returns the number of the next line of the program's output. Since `line`, no access may
    /// have taken more than `most` seconds.
    fn since(&self, line: usize, what: &str, most: f64) -> usize {
        let said = self.run("cut -d ' ' -f 4 /run/swapper");
        let all: Vec<f64> = said.lines().map(|us| us.parse().unwrap()).collect();
        let longest = all[line..].iter().fold(0.0, |a: f64, &b| a.max(b)) / 1e6;
        println!("{what}: longest access {longest:.3} s");
        if longest > LONG {
            self.tell();
        }
        assert!(longest < most, "{what}: {longest} s");
        all.len()
    }

    fn json(&self, command: &str) -> Value {
        serde_json::from_str(&self.run(&format!("memfold --json {command}"))).unwrap()
    }

    /// Returns the loans of the guest. The registry may be unreachable, because links are cut here
    /// and a guest's network recovers slowly.
    fn borrowed(&self) -> Vec<Value> {
        let said = self.run("memfold --json leases || [ $? = 1 ]");
        let mut report: Value = serde_json::from_str(&said).unwrap();
        match report["borrowed"].take() {
            Value::Array(borrowed) => borrowed,
            other => panic!("{other}"),
        }
    }

    /// Runs a command in the guest that must fail, and returns its message.
    fn refused(&self, command: &str) -> String {
        self.run(&format!("! memfold {command} 2>&1"))
    }

    /// Returns figures that the program has printed so far: pages checked, wrong words, longest
    /// access in seconds.
    fn heard(&self) -> (u64, u64, f64) {
        figures(&self.run("cat /run/swapper"))
    }

    /// Waits until more pages have been checked, and checks that no word is wrong.
    fn goes_on(&self) {
        let (before, ..) = self.heard();
        wait("it checks on", || self.heard().0 > before + 500);
        assert_eq!(self.heard().1, 0);
    }

    /// Returns the number of reads of the group's disk and of the lent disk so far.
    fn reads(&self) -> (u64, u64) {
        let said =
            self.run("cat /sys/block/vdc/stat; cat /sys/block/sd*/stat 2>/dev/null || echo 0");
        let mut lines = said.lines().map(|line| {
            let first = line.split_ascii_whitespace().next();
            first.and_then(|n| n.parse().ok()).unwrap_or(0)
        });
        (lines.next().unwrap_or(0), lines.next().unwrap_or(0))
    }

    /// Returns the reads of both disks while at least a thousand pages are checked.
    fn reads_meanwhile(&self) -> (u64, u64) {
        let before = self.reads();
        self.goes_on();
        let after = self.reads();
        (after.0 - before.0, after.1 - before.1)
    }

    /// Checks that nothing of a loan is left.
    fn is_as_before(&self) {
        let said = self.run(
            "lvs --noheadings -o lv_layout,devices vg/swap; pvs --noheadings -o pv_name; ls /sys/class/iscsi_session 2>/dev/null; find /etc/iscsi/nodes /var/lib/iscsi/nodes -type f 2>/dev/null | cat; ls /dev/sd* 2>/dev/null | cat",
        );
        let words: Vec<&str> = said.split_ascii_whitespace().collect();
        assert_eq!(words, ["linear", "/dev/vdc(0)", "/dev/vdc"], "{said}");
        assert_eq!(self.borrowed(), [] as [Value; 0]);
    }

    fn place(&self) -> String {
        let borrowed = self.borrowed();
        let place = borrowed.first().and_then(|one| one["place"].as_str());
        place.unwrap_or("none").to_owned()
    }

    fn wait_off(&self, lender: &Host) -> Duration {
        let begun = Instant::now();
        wait("it is off by itself", || self.place() == "none");
        let took = begun.elapsed();
        self.is_as_before();
        self.goes_on();
        lender.wait_free(LENT);
        took
    }
}

fn able() -> Result<(), String> {
    let there = |program: &str, word: &str| {
        let said = Command::new(program)
            .arg(word)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        said.is_ok_and(|status| status.success())
    };
    for (program, word, how) in [
        ("tgtd", "--version", "scripts/setup tests"),
        ("openssl", "version", "apt install openssl"),
        ("cc", "--version", "apt install gcc"),
        ("strip", "--version", "apt install binutils"),
    ] {
        if !there(program, word) {
            return Err(format!("no {program} ({how})"));
        }
    }
    match memfold_host::guest_images() {
        Ok(images) if images.contains_key(IMAGE) => Ok(()),
        _ => Err(format!("no guest image '{IMAGE}' (guest/build {IMAGE})")),
    }
}

#[test]
fn an_lvm_volume_for_swap_moves_to_lent_memory_and_back_and_survives_lost_lenders() {
    let Some(_turn) = support::turn_ahead() else {
        return;
    };
    if let Err(why) = able() {
        assert!(
            std::env::var_os("MEMFOLD_REAL").is_none(),
            "MEMFOLD_REAL is set: {why}"
        );
        skip!("{why}");
    }
    let (lender, port) = start_lender();
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let files = tempfile::tempdir().unwrap();
    let mut spec = Lab::spec("h", IMAGE, RAM, DiskMode::Buffered).unwrap();
    spec.network = Network::User;
    spec.disks
        .extend(disks(files.path(), &lender).map(DiskSpec::new));
    lab.start(spec).unwrap();
    lab.wait_ready("h", BOOT).unwrap();
    let guest = Guest(&lab);
    let set_up = SET_UP.replace("PORT", &port.to_string());
    guest.run(&set_up.replace("SWAP", &SWAP_MIB.to_string()));
    guest.run(&format!("systemd-run -q --unit=swapper -p OOMScoreAdjust=-500 -p Nice=10 /opt/payload/swapper {ARRAY_MIB} /run/swapper /run/swapper.stop"));
    wait_until("it has begun to check", LIMIT, || {
        let lines = guest.run("wc -l < /run/swapper || echo 0");
        lines.trim().parse::<u64>().unwrap_or(0) > 3
    });

    // Impossible requests are refused, and nothing changes.
    for (command, words) in [
        ("borrow --lvm vg/swap", "to spare"),
        ("borrow --lvm vg/nothing", "no logical volume vg/nothing"),
        ("borrow --lvm vg/other", "holds no swap space"),
        ("borrow --lvm vg/swap 64M", "cannot hold it"),
        (
            "borrow --lvm vg/swap --durability replica",
            "uses one lender",
        ),
    ] {
        let said = guest.refused(command);
        assert!(said.contains(words), "{command}: {said}");
    }
    lender.lend_by(Transport::Nbd);
    let said = guest.refused("borrow --lvm vg/swap");
    assert!(said.contains("because they export by NBD"), "{said}");
    lender.lend_no_more();
    guest.is_as_before();
    lender.lend_by(Transport::Iscsi);

    let (own, _) = guest.reads_meanwhile();
    let (.., on_disk) = guest.heard();
    println!("on its own disk: {own} reads, longest access {on_disk:.3} s");
    assert!(own > 0);

    // The volume moves to lent RAM, and back while it is in use.
    let line = guest.since(0, "before", LONGEST_CHANGE);
    let done = guest.json("borrow --lvm vg/swap");
    assert_eq!(
        (&done["place"], &done["vm"]),
        (&"lent".into(), &"vg/swap".into()),
        "{done}"
    );
    let (own, lent) = guest.reads_meanwhile();
    println!(
        "on lent RAM after {} ms: {own} reads of its own disk, {lent} of the lent one",
        done["took_ms"]
    );
    assert!(lent > 100 && own * 20 < lent, "{own} {lent}");
    let line = guest.since(line, "put there", LONGEST_CHANGE);
    assert_eq!(guest.json("borrow --lvm vg/swap")["changed"], false);
    // All data that the volume needs without the lender is on its own disk.
    let parts = guest.run("lvs -a --noheadings -o lv_name,devices vg | tr -d '[]' | grep _0");
    assert_eq!(parts.matches("/dev/vdc").count(), 2, "{parts}");
    assert_eq!(lender.status().lent_bytes, (SWAP_MIB + 4 + 2) << 20);
    let said = guest.run("stat -c %a $(find /etc/iscsi/nodes /var/lib/iscsi/nodes -type f 2>/dev/null); grep -c lvm.vg.swap /run/memfold/volumes.json || echo");
    assert_eq!(said.split_ascii_whitespace().next(), Some("600"), "{said}");
    let back = guest.json("return --lvm vg/swap");
    println!("given back in {} ms", back["took_ms"]);
    assert_eq!(
        (&back["place"], &back["changed"]),
        (&"on_disk".into(), &true.into())
    );
    guest.is_as_before();
    assert_eq!(guest.json("return --lvm vg/swap")["changed"], false);
    lender.wait_free(LENT);
    guest.goes_on();
    let mut line = guest.since(line, "given back", LONGEST_CHANGE);

    // The lender is killed, hangs, is cut off, or recalls its memory.
    for how in ["killed", "stopped", "cut off", "recalled"] {
        let done = guest.json("borrow --lvm vg/swap");
        assert_eq!(done["place"], "lent", "{done}");
        guest.goes_on();
        assert_eq!(guest.place(), "lent");
        line = guest.since(line, "put there again", LONGEST_CHANGE);
        match how {
            "killed" => kill_process(lender.export(), Signal::KILL).unwrap(),
            "stopped" => kill_process(lender.export(), Signal::STOP).unwrap(),
            "recalled" => lender.lend_no_more(),
            _ => set_link(&lab, false),
        }
        if how == "cut off" {
            wait("the volume is off by itself", || {
                guest.run("lvs --noheadings -o lv_layout vg/swap").trim() == "linear"
            });
            guest.goes_on();
            set_link(&lab, true);
        }
        if how == "recalled" {
            lender.lend_by(Transport::Iscsi);
        }
        let took = guest.wait_off(&lender);
        let (checked, wrong, _) = guest.heard();
        println!("{how}: off after {took:.1?}; {checked} pages checked, {wrong} wrong");
        line = guest.since(line, how, LONGEST_STALL);
    }

    // The daemon dies while it puts the volume on lent RAM, and while the volume is there.
    guest.run("(memfold borrow --lvm vg/swap >/dev/null 2>&1 &); until lvs --noheadings -o lv_layout vg/swap | grep -q raid; do sleep 0.05; done; systemctl kill --kill-whom=main -s KILL memfold");
    wait("the next daemon has undone it", || {
        guest.run("lvs --noheadings -o lv_layout vg/swap").trim() == "linear"
    });
    guest.wait_off(&lender);
    guest.json("borrow --lvm vg/swap");
    guest.run("systemctl kill --kill-whom=main -s KILL memfold");
    wait("the next daemon answers", || {
        guest
            .run("memfold --json leases 2>/dev/null || echo null")
            .contains("\"lent\"")
    });
    guest.goes_on();

    // A daemon without its notes finds the loan from LVM's reports.
    guest.run("systemctl stop memfold && rm /run/memfold/volumes.json && systemctl start memfold");
    guest.json("return --lvm vg/swap");
    guest.run("iscsiadm -m node -u >/dev/null; iscsiadm -m node -o delete");
    guest.is_as_before();
    lender.wait_free(LENT);

    let line = guest.since(line, "daemons killed", LONGEST_CHANGE);

    // The volume is moved without a copy, as in the study.
    let done = guest.json("borrow --lvm vg/swap --durability none");
    let (own, lent) = guest.reads_meanwhile();
    println!(
        "moved in {} ms: {own} reads of its own disk, {lent} of the lent one",
        done["took_ms"]
    );
    assert!(lent > 100 && own * 20 < lent, "{own} {lent}");
    let back = guest.json("return --lvm vg/swap");
    println!("moved back in {} ms", back["took_ms"]);
    guest.is_as_before();
    lender.wait_free(LENT);
    guest.since(line, "moved", LONGEST_CHANGE);

    guest.run("touch /run/swapper.stop");
    let mut said = String::new();
    wait_until("all pages are checked", Duration::from_secs(900), || {
        said = guest.run("sed -n /^end/p /run/swapper");
        !said.is_empty()
    });
    assert_eq!(
        said.trim(),
        format!("end {} pages, 0 words wrong", ARRAY_MIB * 256)
    );
    guest.run("sed -i /^end/d /run/swapper");
    let (checked, wrong, longest) = guest.heard();
    println!(
        "{checked} pages checked, {wrong} words wrong, longest access {longest:.3} s, {on_disk:.3} s on its own disk"
    );
    lab.stop("h").unwrap();
}

/// Disconnects the guest's network link, or connects it again.
fn set_link(lab: &Lab, is_up: bool) {
    let mut qmp = support::qmp(lab.directory(), "h");
    let arguments = serde_json::json!({"name": "net0", "up": is_up});
    qmp.execute("set_link", arguments).unwrap();
}
