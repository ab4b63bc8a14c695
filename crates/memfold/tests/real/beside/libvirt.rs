//! Tests with domains of a real libvirtd. One command enables them for memfold, and they are folded
//! together with a VM of memfold. libvirt saves, restores, reboots, shuts down and migrates them as
//! usual.
//!
//! The tests use this host's libvirt, and, in the line `libvirt-11` of scripts/soak.txt, Debian
//! 13's (11.3) with its QEMU. libvirt 12 is not tested: Debian's backports for 13 do not have it.

use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use memfold_api::{
    Client, ClientError, ExecRequest, ExecResult, FullReport, LibvirtEnableRequest, LibvirtRequest,
    RestoreRequest, SaveRequest, VmInfo,
};
use memfold_fold::{EngineStats, VmStats};
use memfold_lab::{DiskMode, Lab};
use memfold_libvirt::{Change, DomainStatus, tag};
use memfold_snapshot::{Manifest, Renew};
use memfold_testkit::{patience, wait_until};
use serde_json::Value;

use super::libvirt_host::{self as libvirt, Host};
use crate::served::{Served, exec, wait_agent};
use crate::support::{self, BOOT, MEMORY};

/// A domain whose name is not valid for memfold's VMs. The next constant: its name in memfold.
pub const DOMAIN: &str = "Web 1";
pub const VM: &str = "web-1";

/// Folded pages of a VM that count as folding: 24 MiB.
const ENOUGH_PAGES: u64 = 6 << 10;

/// Shell script that reads some 200 files of the system, and prints a sum of all their sums.
pub const SUM: &str = "find /usr/lib/x86_64-linux-gnu -maxdepth 1 -type f -size -2M -print0 | LC_ALL=C sort -z | xargs -0 md5sum | md5sum";

/// Shell script that puts data into the guest's memory that is in no file on disk, and prints its
/// sum.
pub const HOLD: &str = "mkdir -p /run/held && mount -t tmpfs held /run/held && dd if=/dev/urandom of=/run/held/data bs=1M count=32 2>/dev/null && md5sum < /run/held/data";
/// Shell script that waits until the guest has started all its services.
const STARTED: &str = "systemctl is-system-running --wait || true";
pub const HELD: &str = "md5sum < /run/held/data";

/// Runs memfold's commands on a host.
pub struct Cli<'a> {
    pub host: &'a Host,
    pub place: &'a Path,
    pub state: &'a Path,
}

impl Cli<'_> {
    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = self.host.command(env!("CARGO_BIN_EXE_memfold"));
        command.arg("--socket").arg(self.state.join("s"));
        command.args(arguments);
        command.env(
            "MEMFOLD_QEMU_LIBRARY",
            self.place.join("lib/libmemfold_qemu.so"),
        );
        command.output().unwrap()
    }

    #[track_caller]
    pub fn said(&self, arguments: &[&str]) -> String {
        let began = Instant::now();
        let output = self.run(arguments);
        let took = began.elapsed().as_secs_f64();
        let wrong = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {wrong}");
        let said = String::from_utf8(output.stdout).unwrap();
        println!(
            "memfold {} ({took:.1} s): {}",
            arguments.join(" "),
            said.trim()
        );
        said
    }

    #[track_caller]
    fn refused(&self, arguments: &[&str], words: &[&str]) {
        let output = self.run(arguments);
        let wrong = String::from_utf8_lossy(&output.stderr);
        println!("memfold {}: {}", arguments.join(" "), wrong.trim());
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        for word in words {
            assert!(wrong.contains(word), "no '{word}' in: {wrong}");
        }
    }

    /// Returns the status of a domain.
    fn status(&self, domain: &str) -> Value {
        let said = self.run(&["libvirt", "status", "--json"]).stdout;
        let rows: Value = serde_json::from_slice(&said).unwrap();
        let row = rows
            .as_array()
            .unwrap()
            .iter()
            .find(|r| r["domain"] == domain);
        row.cloned().unwrap_or_default()
    }
}

fn vm(client: &Client, name: &str) -> Option<VmInfo> {
    let vms: Vec<VmInfo> = client.get("/v1/vms").unwrap();
    vms.into_iter().find(|vm| vm.name == name)
}

/// Waits until enough of a VM is folded, and returns its figures.
#[track_caller]
pub fn wait_folded(client: &Client, name: &str) -> VmStats {
    let enough = |vm: &VmStats| vm.mapped_pages - vm.copied_pages > ENOUGH_PAGES;
    let stats = support::wait_stats(
        &format!("{name} is folded"),
        Duration::from_secs(300),
        || client.get::<EngineStats>("/v1/fold").unwrap(),
        |stats| stats.vms.iter().any(|vm| vm.name == name && enough(vm)),
    );
    let found = support::vm(&stats, name).clone();
    println!("{}", support::line(&found));
    found
}

/// Returns the guest's boot id; `None` if the guest does not answer.
pub fn boot_id(client: &Client, name: &str) -> Option<String> {
    said(client, name, "cat /proc/sys/kernel/random/boot_id")
}

/// Returns what a script in the guest printed; `None` if the guest does not answer, or if the
/// script failed. (A guest that shuts down kills the agent's scripts, which then print nothing.)
fn said(client: &Client, name: &str, script: &str) -> Option<String> {
    let request = ExecRequest {
        script: script.to_owned(),
        timeout_s: patience(Duration::from_secs(30)).as_secs_f64(),
    };
    let result = client.post(&format!("/v1/vms/{name}/exec"), &request);
    let done: ExecResult = result.ok()?;
    (done.code == 0).then_some(done.stdout)
}

/// Returns the memory of the guest, without the pages in its balloon, in KiB.
fn total_kib(client: &Client) -> u64 {
    let said = exec(client, VM, "awk '/^MemTotal:/ { print $2 }' /proc/meminfo").stdout;
    said.trim().parse().unwrap()
}

/// Waits until the balloon has moved far enough.
#[track_caller]
fn wait_total(client: &Client, far_enough: impl Fn(u64) -> bool) {
    let end = Instant::now() + patience(Duration::from_secs(120));
    loop {
        let now = total_kib(client);
        if far_enough(now) {
            return;
        }
        assert!(Instant::now() < end, "the guest has {now} KiB");
        std::thread::sleep(Duration::from_millis(300));
    }
}

#[track_caller]
fn wait_state(host: &Host, domain: &str, state: &str) {
    let end = Instant::now() + patience(Duration::from_secs(300));
    while host.state(domain) != state {
        assert!(Instant::now() < end, "{domain}: {}", host.state(domain));
        std::thread::sleep(Duration::from_millis(300));
    }
}

#[track_caller]
pub fn wait_gone(client: &Client, name: &str) {
    let end = Instant::now() + patience(Duration::from_secs(120));
    while vm(client, name).is_some() {
        assert!(Instant::now() < end, "{name} is still known");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Makes a directory that every user may enter.
pub fn place() -> tempfile::TempDir {
    let place = tempfile::Builder::new()
        .prefix("memfold-libvirt.")
        .tempdir();
    let place = place.unwrap();
    libvirt::prepare(place.path());
    place
}

pub fn run_options(state: &Path) -> [String; 2] {
    std::fs::create_dir_all(state).unwrap();
    ["--libvirt".into(), "/run/libvirt/qemu".into()]
}

/// Returns every line of `after` that is not in `before`.
fn added<'a>(before: &str, after: &'a str) -> Vec<&'a str> {
    let known: Vec<&str> = before.lines().collect();
    after.lines().filter(|line| !known.contains(line)).collect()
}

/// Saves a domain with memfold; it stays libvirt's. VMs restored from the snapshot are memfold's,
/// and run beside the domain.
fn saved_by_memfold(host: &Host, folded: &Folded) {
    let (client, sum, held) = (&folded.client, &folded.sums[0], &folded.held);
    let disks = host.ask(&["domblklist", DOMAIN]);
    for (name, live) in [("still", false), ("live", true)] {
        let request = SaveRequest {
            live,
            ..SaveRequest::new(VM, name)
        };
        let saved: Manifest = client.post("/v1/snapshots", &request).unwrap();
        println!(
            "{name}: paused {:.0} ms, {} MiB of RAM, {:.1} s of it the disk, user {:?}",
            saved.pause_ms,
            saved.counts.saved_pages / 256,
            saved.steps.disks_copy_ms / 1000.0,
            saved.spec.user
        );
        assert_eq!((saved.vm.as_str(), &saved.free_kept), (VM, &None));
        assert_eq!(saved.spec.user.as_deref(), Some("libvirt-qemu"));
        assert_eq!(host.state(DOMAIN), "running");
        assert_eq!(&exec(client, VM, HELD).stdout, held);
    }
    assert_eq!(host.ask(&["domblklist", DOMAIN]), disks);
    let clone = RestoreRequest {
        renew: Renew::Identity,
        ..RestoreRequest::new("copy")
    };
    for (snapshot, request) in [("live", clone), ("still", RestoreRequest::new("twin"))] {
        let path = format!("/v1/snapshots/{snapshot}/restore");
        let info: VmInfo = client.post(&path, &request).unwrap();
        wait_agent(client, &request.vm);
        assert_eq!((info.libvirt, info.domain.as_deref()), (None, Some("lab")));
        assert_eq!(&exec(client, &request.vm, HELD).stdout, held);
        let status = std::fs::read_to_string(format!("/proc/{}/status", info.pid)).unwrap();
        assert!(status.contains("Uid:\t64055\t64055"), "{status}");
    }
    wait_until("the copy has its own name", BOOT, || {
        said(client, "copy", "hostname").as_deref() == Some("copy\n")
    });
    // The restored VMs have disks of their own.
    exec(client, "copy", "echo mine > /var/tmp/copy && sync");
    exec(client, "twin", "test ! -e /var/tmp/copy");
    exec(client, VM, "test ! -e /var/tmp/copy");
    assert_eq!(&exec(client, "copy", SUM).stdout, sum);
    wait_folded(client, "copy");
    for name in ["copy", "twin"] {
        let stop = serde_json::json!({ "timeout_s": 0.0 });
        let _: Value = client.post(&format!("/v1/vms/{name}/stop"), &stop).unwrap();
    }
    for name in ["still", "live"] {
        let _: Value = client.delete(&format!("/v1/snapshots/{name}")).unwrap();
    }
}

/// Waits until the daemon has changed the XML of a domain so that `done`.
#[track_caller]
fn wait_xml(host: &Host, what: &str, done: impl Fn(&str) -> bool) {
    let end = Instant::now() + patience(Duration::from_secs(60));
    loop {
        let xml = host.xml(DOMAIN);
        if done(&xml) {
            return;
        }
        assert!(Instant::now() < end, "not {what}: {xml}");
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// A libvirtd with a domain that is not enabled yet, and a daemon that is not started yet.
struct Stage<'a> {
    host: Host,
    place: &'a Path,
    state: &'a Path,
    daemon: Served<'a>,
    /// XML of the domain.
    before: String,
}

impl Stage<'_> {
    const fn cli(&self) -> Cli<'_> {
        Cli {
            host: &self.host,
            place: self.place,
            state: self.state,
        }
    }

    /// Enables the domain, starts it with the daemon, and waits for its agent.
    fn start_enabled(&mut self) -> (Client, VmInfo) {
        self.cli()
            .said(&["libvirt", "enable", DOMAIN, "--domain", "lab"]);
        self.host.ask(&["start", DOMAIN]);
        self.daemon.start();
        let client = self.daemon.answers();
        let info = wait_agent(&client, VM);
        (client, info)
    }
}

/// Runs a test on a host with its own libvirtd, if libvirt is there. `number`: differs between
/// tests that run at the same time.
fn on_a_host(number: u32, test: impl FnOnce(&mut Stage)) {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    if !libvirt::is_there() {
        return;
    }
    let place = place();
    let place = place.path();
    let host = Host::start(place, "host", number);
    if libvirt::suite().is_some() {
        assert!(host.libvirt_major() > 9, "Debian 12 has 9.0");
    }
    let disk = libvirt::disk(place, "web1", "trixie-a");
    let xml = place.join("web1.xml");
    std::fs::write(&xml, libvirt::domain_xml(place, DOMAIN, &disk, "trixie-a")).unwrap();
    host.ask(&["define", xml.to_str().unwrap()]);
    let before = host.xml(DOMAIN);
    let state = place.join("state");
    let options = run_options(&state);
    let more: Vec<&str> = options.iter().map(String::as_str).collect();
    let daemon = Served::new(&state, &["mate", "copy", "twin"])
        .with(&more)
        .inside(host.pid());
    test(&mut Stage {
        host,
        place,
        state: &state,
        daemon,
        before,
    });
}

/// A domain and a VM of memfold that are folded together.
struct Folded {
    client: Client,
    /// Sums of files in the domain's guest and in the VM's guest.
    sums: [String; 2],
    /// Sum of data in the memory of the domain's guest.
    held: String,
}

impl Folded {
    /// Starts a VM of memfold beside the domain, and waits until both are folded.
    fn beside_a_vm(daemon: &Served, client: Client) -> Self {
        let mut mate = Lab::spec("mate", "trixie-b", MEMORY, DiskMode::Buffered).unwrap();
        mate.domain = Some("lab".into());
        if libvirt::suite().is_some() {
            // This QEMU is not the one that saved the warm guests.
            daemon.run(&mate);
        } else {
            daemon.run_warm(&mate);
        }
        wait_agent(&client, "mate");
        let sums = [VM, "mate"].map(|name| exec(&client, name, SUM).stdout);
        let held = exec(&client, VM, HOLD).stdout;
        let folded = Self { client, sums, held };
        wait_folded(&folded.client, "mate");
        folded.assert_whole("folded");
        folded
    }

    /// Checks that the domain is folded, and that files and memory of both guests have their sums.
    #[track_caller]
    fn assert_whole(&self, moment: &str) {
        let client = &self.client;
        wait_folded(client, VM);
        std::thread::scope(|scope| {
            let mate = scope.spawn(|| exec(client, "mate", SUM).stdout);
            assert_eq!(exec(client, VM, SUM).stdout, self.sums[0], "{moment}");
            assert_eq!(mate.join().unwrap(), self.sums[1], "{moment}");
        });
        assert_eq!(exec(client, VM, HELD).stdout, self.held, "{moment}");
    }
}

/// Enables and disables the domain without a daemon: only the named elements of its XML change, and
/// are restored. The domain then starts without a daemon, and the next daemon finds it.
fn enabled_and_disabled_without_a_daemon(cli: &Cli, before: &str) {
    let host = cli.host;
    assert_eq!(cli.status(DOMAIN)["folding"], "no: not enabled");
    cli.refused(&["libvirt", "enable", "ghost"], &["ghost"]);
    cli.refused(
        &["libvirt", "enable", DOMAIN, "--domain", "No Good"],
        &["No Good"],
    );
    assert_eq!(host.xml(DOMAIN), before);
    let enable = ["libvirt", "enable", DOMAIN, "--domain", "lab"];
    cli.said(&enable);
    let enabled = host.xml(DOMAIN);
    let lines = added(before, &enabled);
    println!("{}", lines.join("\n"));
    for word in [
        "memfold-qemu-system-x86_64</emulator>",
        "org.memfold.agent.0",
        "domain=\"lab\"",
    ] {
        assert!(
            lines.iter().any(|line| line.contains(word)),
            "{word}: {lines:#?}"
        );
    }
    assert!(enabled.contains("passwd='secret'") && enabled.contains("  kept &amp; whole "));
    assert!(cli.said(&enable).contains("already"));
    assert_eq!(host.xml(DOMAIN), enabled);
    cli.said(&["libvirt", "disable", DOMAIN]);
    assert_eq!(host.xml(DOMAIN), before);
    assert!(
        cli.said(&["libvirt", "disable", DOMAIN])
            .contains("already")
    );
    cli.said(&enable);
    assert_eq!(host.xml(DOMAIN), enabled);
    // The domain starts without a daemon, and the next daemon finds it.
    host.ask(&["start", DOMAIN]);
    let row = cli.status(DOMAIN);
    assert!(
        row["folding"]
            .as_str()
            .unwrap()
            .contains("daemon does not answer"),
        "{row}"
    );
}

/// Checks that QEMU is the domain's, can be folded, and runs as an unprivileged user in libvirt's
/// sandbox, where it cannot open the device for userfaultfd.
fn unprivileged(info: &VmInfo) {
    assert_eq!(info.libvirt.as_deref(), Some(DOMAIN));
    assert_eq!(info.domain.as_deref(), Some("lab"));
    assert_eq!(info.fold_problems, Vec::<String>::new());
    let status = std::fs::read_to_string(format!("/proc/{}/status", info.pid)).unwrap();
    let field = |name: &str| {
        status
            .lines()
            .find(|l| l.starts_with(name))
            .unwrap()
            .to_owned()
    };
    println!(
        "{} {} {}",
        field("Uid:"),
        field("CapEff:"),
        field("Seccomp:")
    );
    assert!(!field("Uid:").contains("\t0\t") && field("Seccomp:").ends_with('2'));
    assert!(field("CapEff:").ends_with("0000000000000000"));
}

#[test]
fn an_enabled_libvirt_domain_is_folded_with_a_vm_of_memfold_and_survives_both_daemons() {
    on_a_host(1, |stage| {
        enabled_and_disabled_without_a_daemon(&stage.cli(), &stage.before);
        stage.daemon.start();
        let client = stage.daemon.answers();
        let info = wait_agent(&client, VM);
        unprivileged(&info);
        let mut folded = Folded::beside_a_vm(&stage.daemon, client);
        let client = &folded.client;
        let report: FullReport = client.get("/v1/report").unwrap();
        let account = report.ledger.vms.iter().find(|vm| vm.name == VM).unwrap();
        assert_eq!(account.sum_of_parts(), account.ram_bytes);
        println!(
            "saved by folding: {} bytes",
            report.ledger.host.saved_by_folding_bytes
        );
        assert!(report.ledger.host.saved_by_folding_bytes > 0);
        // memfold refuses operations that it cannot do with a domain of libvirt.
        let stop = serde_json::json!({ "timeout_s": 1.0 });
        let refused = client.post::<_, Value>(&format!("/v1/vms/{VM}/stop"), &stop);
        match refused.unwrap_err() {
            ClientError::Refused { body, .. } => {
                assert!(body.error.contains("not started by memfold"), "{body:?}");
            }
            error => panic!("{error}"),
        }

        // The daemon and libvirtd die, and the next ones find the domain.
        stage.daemon.kill();
        stage.host.restart_libvirtd(Duration::ZERO);
        stage.daemon.start();
        stage.daemon.answers();
        wait_agent(client, VM);
        wait_agent(client, "mate");
        folded.assert_whole("both daemons are others");
        let cli = stage.cli();
        let row = cli.status(DOMAIN);
        assert_eq!(
            (&row["vm"], &row["folding"]),
            (&VM.into(), &"yes".into()),
            "{row}"
        );
        cli.said(&["libvirt", "status"]);
        assert!(cli.said(&["libvirt", "attach", DOMAIN]).contains(VM));
        // After a reboot, the process is the same.
        wait_agent(client, VM);
        // A guest that still starts may not notice that its button is pressed.
        exec(client, VM, STARTED);
        let boot = boot_id(client, VM).unwrap();
        stage.host.ask(&["reboot", DOMAIN]);
        wait_until("the guest has rebooted", BOOT, || {
            boot_id(client, VM).is_some_and(|now| now != boot)
        });
        assert_eq!(wait_agent(client, VM).pid, info.pid);
        exec(client, VM, SUM);
        folded.held = exec(client, VM, HOLD).stdout;
        folded.assert_whole("rebooted");
        // The domain is enabled in another trust domain while it runs: it stays in this one until
        // its next start. The daemon does it here, as for the dashboard.
        let request = LibvirtEnableRequest {
            domain: DOMAIN.into(),
            trust_domain: Some("other".into()),
        };
        let done: Change = client.post("/v1/libvirt/enable", &request).unwrap();
        assert!(done.changed && done.running, "{done:?}");
        let domains: Option<Vec<DomainStatus>> = client.get("/v1/libvirt").unwrap();
        let domains = domains.unwrap();
        let status = domains.iter().find(|d| d.domain == DOMAIN).unwrap();
        let trust = status.mark.as_ref().and_then(|mark| mark.domain.as_deref());
        assert_eq!(trust, Some("other"), "{status:?}");
        assert_eq!(status.vm.as_deref(), Some(VM), "{status:?}");
        assert_eq!(vm(client, VM).unwrap().domain.as_deref(), Some("lab"));

        // The guest is shut down.
        exec(client, VM, STARTED);
        stage.host.ask(&["shutdown", DOMAIN]);
        wait_state(&stage.host, DOMAIN, "shut off");
        wait_gone(client, VM);
        let row = stage.cli().status(DOMAIN);
        assert_eq!(row["folding"], "when it is started", "{row}");
        stage
            .cli()
            .refused(&["libvirt", "attach", DOMAIN], &["runs no domain"]);

        // memfold is gone: the domain starts as before memfold was installed, and the wrapper logs
        // that.
        let library = stage.place.join("lib/libmemfold_qemu.so");
        let away = stage.place.join("lib/away.so");
        std::fs::rename(&library, &away).unwrap();
        stage.daemon.kill();
        stage.host.ask(&["start", DOMAIN]);
        assert_eq!(stage.host.state(DOMAIN), "running");
        let log = stage.host.qemu_log(DOMAIN);
        assert!(log.contains("memfold: this VM can't be folded"), "{log}");
        stage.host.ask(&["destroy", DOMAIN]);
        std::fs::rename(&away, &library).unwrap();

        // The domain's XML is restored byte for byte.
        stage.daemon.start();
        let client = stage.daemon.answers();
        let request = LibvirtRequest {
            domain: DOMAIN.into(),
        };
        let done: Change = client.post("/v1/libvirt/disable", &request).unwrap();
        assert!(done.changed && !done.running, "{done:?}");
        assert_eq!(stage.host.xml(DOMAIN), stage.before);
        stage.host.ask(&["start", DOMAIN]);
        stage
            .cli()
            .refused(&["libvirt", "attach", DOMAIN], &["without memfold"]);
        stage.host.ask(&["destroy", DOMAIN]);
    });
}

#[test]
fn libvirt_saves_restores_dumps_and_reverts_a_folded_domain_and_no_byte_changes() {
    on_a_host(5, |stage| {
        let (client, info) = stage.start_enabled();
        let folded = Folded::beside_a_vm(&stage.daemon, client);
        let (client, host) = (&folded.client, &stage.host);
        // The domain is saved while it is folded, and restored in another process.
        let file = stage.place.join("disks/web1.save");
        let boot = boot_id(client, VM).unwrap();
        wait_folded(client, VM);
        host.ask(&["save", DOMAIN, file.to_str().unwrap()]);
        wait_gone(client, VM);
        host.ask(&["restore", file.to_str().unwrap()]);
        let restored = wait_agent(client, VM);
        assert_ne!(restored.pid, info.pid);
        assert_eq!(restored.domain.as_deref(), Some("lab"));
        assert_eq!(boot_id(client, VM).as_ref(), Some(&boot));
        folded.assert_whole("restored");

        // The same, with the file that libvirt itself keeps.
        host.ask(&["managedsave", DOMAIN]);
        wait_gone(client, VM);
        host.ask(&["start", DOMAIN]);
        wait_agent(client, VM);
        assert_eq!(boot_id(client, VM).as_ref(), Some(&boot));
        folded.assert_whole("started from its saved memory");

        // The domain is paused and resumed, and its memory is dumped.
        host.ask(&["suspend", DOMAIN]);
        assert_eq!(host.state(DOMAIN), "paused");
        host.ask(&["resume", DOMAIN]);
        let dump = stage.place.join("disks/web1.dump");
        host.ask(&[
            "dump",
            "--memory-only",
            "--live",
            DOMAIN,
            dump.to_str().unwrap(),
        ]);
        assert!(dump.metadata().unwrap().len() > 100 << 20);
        std::fs::remove_file(dump).unwrap();
        folded.assert_whole("paused, resumed, dumped");

        // The balloon takes memory while it is folded, and returns it.
        let had = total_kib(client);
        host.ask(&["setmem", DOMAIN, "352M", "--live"]);
        wait_total(client, |now| now + (128 << 10) < had);
        assert_eq!(exec(client, VM, HELD).stdout, folded.held);
        host.ask(&["setmem", DOMAIN, "512M", "--live"]);
        wait_total(client, |now| now >= had);
        folded.assert_whole("its memory was less, and is as before");

        // libvirt makes a snapshot with memory, and reverts to it.
        host.ask(&["snapshot-create-as", DOMAIN, "then"]);
        exec(
            client,
            VM,
            "rm /run/held/data; echo 3 > /proc/sys/vm/drop_caches",
        );
        host.ask(&["snapshot-revert", DOMAIN, "then"]);
        // The daemon may know the QEMU before for a moment.
        wait_until("the guest has its data back", BOOT, || {
            said(client, VM, HELD).as_ref() == Some(&folded.held)
        });
        folded.assert_whole("back at libvirt's snapshot");
        host.ask(&["snapshot-delete", DOMAIN, "then"]);
    });
}

#[test]
fn memfold_saves_a_libvirt_domain_and_restored_vms_run_beside_it() {
    on_a_host(6, |stage| {
        let (client, _) = stage.start_enabled();
        let folded = Folded::beside_a_vm(&stage.daemon, client);
        saved_by_memfold(&stage.host, &folded);
    });
}

/// The domain's owner writes a tag into its XML. The daemon enables the domain without a command,
/// follows changes of the tag, and restores the XML when the tag is removed. The guest does not
/// boot.
#[test]
fn a_tag_in_the_xml_of_a_libvirt_domain_enables_it_and_without_the_tag_its_xml_is_as_before() {
    on_a_host(4, |stage| {
        stage.daemon.start();
        let client = stage.daemon.answers();
        enabled_by_tag(&stage.cli(), &client, &stage.before);
    });
}

fn enabled_by_tag(cli: &Cli, client: &Client, before: &str) {
    let host = cli.host;
    let define = |xml: &str| {
        let file = cli.place.join("tagged.xml");
        std::fs::write(&file, xml).unwrap();
        host.ask(&["define", file.to_str().unwrap()]);
    };
    let tag = |domain: &str| {
        let uri = tag::NAMESPACE;
        format!("<memfold:vm xmlns:memfold=\"{uri}\" domain=\"{domain}\"/>")
    };
    let tagged = |domain: &str| {
        let end = format!("\n    {}\n  </metadata>", tag(domain));
        before.replace("\n  </metadata>", &end)
    };
    let mark = |domain: &str| format!("domain=\"{domain}\" by=\"tag\"");

    let set = "metadata --config --key memfold --set";
    let mut set: Vec<&str> = set.split(' ').collect();
    set.extend([r#"<vm domain="No Good"/>"#, DOMAIN, tag::NAMESPACE]);
    host.ask(&set);
    let row = cli.status(DOMAIN);
    let problem = row["tag_problem"].as_str().unwrap();
    assert!(problem.contains("No Good"), "{row}");
    assert!(cli.said(&["libvirt", "status"]).contains("no: wrong tag"));
    define(&tagged("other"));
    // Until the daemon has noted the controllers that libvirt added, it may overwrite another
    // change.
    wait_xml(host, "enabled", |xml| {
        xml.contains(&mark("other")) && xml.contains("controllers=")
    });
    // As 'virsh edit' and virt-manager do: memfold's changes stay in the XML.
    define(&host.xml(DOMAIN).replace(&tag("other"), &tag("lab")));
    wait_xml(host, "in the other domain", |xml| {
        xml.contains(&mark("lab"))
    });
    let row = cli.status(DOMAIN);
    assert_eq!(
        (&row["tag"], &row["mark"]["by_tag"]),
        (&"lab".into(), &true.into())
    );
    assert!(cli.said(&["libvirt", "status"]).contains("by tag"));
    cli.refused(
        &["libvirt", "disable", DOMAIN],
        &["tag for trust domain 'lab'"],
    );
    let enable = ["libvirt", "enable", DOMAIN, "--domain"];
    cli.refused(&[&enable[..], &["shop"]].concat(), &["virsh metadata"]);
    assert!(
        cli.said(&[&enable[..], &["lab"]].concat())
            .contains("already")
    );

    host.ask(&["start", DOMAIN]);
    wait_until("the domain is attached", BOOT, || {
        vm(client, VM).is_some_and(|info| info.domain.as_deref() == Some("lab"))
    });
    // The running domain keeps its trust domain until it ends.
    host.ask(&["metadata", DOMAIN, tag::NAMESPACE, "--config", "--remove"]);
    wait_xml(host, "as before", |xml| xml == before);
    assert_eq!(vm(client, VM).unwrap().domain.as_deref(), Some("lab"));
    host.ask(&["destroy", DOMAIN]);
}
