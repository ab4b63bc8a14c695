//! Tests of KSM, the kernel's same-page merging, while a separate daemon process sets its speed
//! (steers it), on two real guests with the same data.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use memfold_api::{
    Client, ClientError, DebtRequest, FoldRequest, FullReport, KsmStartRequest, KsmStopRequest,
    SaveRequest, StopRequest, VmInfo,
};
use memfold_ksm::steer::Mode;
use memfold_ksm::{
    Cause, Controls, Explanation, NOTES, Overview, Settings, Steering, merging_pages,
    restore_leftover,
};
use memfold_lab::{DiskMode, Lab};
use memfold_ledger::DebtReport;
use memfold_testkit::{patience, wait_for};
use memfold_units::ByteSize;
use memfold_vm::VmSpec;
use serde_json::Value;

use super::ksm_explain::take;
use super::served::{Served, exec};
use super::support;

const MEMORY: ByteSize = ByteSize::mib(512);
const NAMES: [&str; 2] = ["one", "two"];
const DATA_MIB: u64 = 48;

/// Program that holds the same data in both guests, without duplicates in one guest. The memory is
/// anonymous, so that folding does not find it.
const HOLD: &str = r#"cat > /run/hold.py <<'END'
import time
held = b"".join(b"%015d\n" % page * 256 for page in range(48 << 8))
open("/run/held", "w").close()
time.sleep(3600)
END
systemd-run -q --unit=hold python3 /run/hold.py
while [ ! -e /run/held ]; do sleep 0.2; done"#;

fn request(domain: Option<&str>) -> KsmStartRequest {
    KsmStartRequest {
        domain: domain.map(str::to_owned),
        cpu_percent: 60.0,
        target_s: 20.0,
        advisor: false,
    }
}

fn ksm(client: &Client) -> Overview {
    client.get("/v1/ksm").unwrap()
}

fn explain(client: &Client, name: &str) -> Explanation {
    client.get(&format!("/v1/ksm/explain/{name}")).unwrap()
}

/// Returns the number of pages of a cause, which must be present.
#[track_caller]
fn pages(explanation: &Explanation, cause: Cause) -> u64 {
    let found = explanation.causes.iter().find(|f| f.cause == cause);
    let found = found.unwrap_or_else(|| panic!("no {cause:?}: {explanation:#?}"));
    found.pages
}

/// Requests steering. Other tests on this machine may have mergeable memory for a moment.
fn ask(client: &Client, request: &KsmStartRequest) -> Result<Overview, ClientError> {
    let end = Instant::now() + patience(Duration::from_secs(240));
    loop {
        match client.post("/v1/ksm/start", request) {
            Err(error) if error.to_string().contains("not a VM of this daemon") => {
                assert!(Instant::now() < end, "{error}");
                std::thread::sleep(Duration::from_millis(500));
            }
            answer => return answer,
        }
    }
}

fn start(client: &Client, domain: Option<&str>) -> Overview {
    ask(client, &request(domain)).unwrap()
}

#[track_caller]
fn refused(result: Result<Overview, ClientError>, words: &[&str]) {
    let Err(ClientError::Refused { body, .. }) = result else {
        panic!("{result:?}");
    };
    let text = format!("{} {}", body.error, body.hint.unwrap_or_default());
    for word in words {
        assert!(text.contains(word), "no '{word}' in: {text}");
    }
}

#[track_caller]
fn wait<T>(what: &str, ready: impl FnMut() -> Result<T, String>) -> T {
    wait_for(what, Duration::from_secs(240), ready)
}

fn settings() -> Settings {
    Controls::default().settings().unwrap()
}

/// Starts two guests that hold the data, and a daemon.
fn guests<'a>(state: &'a Path, names: &'a [&'a str]) -> (Served<'a>, Client) {
    let mut served = Served::new(state, names);
    served.start();
    let client = served.answers();
    // At first, only KSM works on this memory.
    let pause = FoldRequest {
        paused: Some(true),
        ..FoldRequest::default()
    };
    client.put::<_, Value>("/v1/fold", &pause).unwrap();
    for (name, image) in NAMES.iter().zip(["trixie-a", "trixie-b"]) {
        served.run_warm(&Lab::spec(name, image, MEMORY, DiskMode::Buffered).unwrap());
    }
    wait("agents answer", || {
        let vms: Vec<VmInfo> = client.get("/v1/vms").unwrap();
        let ready = vms.iter().all(|vm| vm.agent.is_some());
        if ready {
            Ok(())
        } else {
            Err(format!("{vms:?}"))
        }
    });
    std::thread::scope(|scope| {
        for name in NAMES {
            scope.spawn(move || exec(&Client::new(&state.join("s")).unwrap(), name, HOLD));
        }
    });
    (served, client)
}

pub fn paused(name: &str, domain: Option<&str>) -> VmSpec {
    let mut spec = VmSpec::new(name, ByteSize::mib(64));
    spec.domain = domain.map(str::to_owned);
    spec.qemu_args = vec!["-S".into()];
    spec
}

/// Restores the settings that a killed daemon left, if a test fails.
pub struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        let _ = restore_leftover(Path::new(NOTES));
    }
}

/// A QEMU without a trust domain, with mergeable memory.
struct Stranger(Child);

impl Stranger {
    fn start() -> Self {
        let child = Command::new("qemu-system-x86_64")
            .args(["-S", "-nodefaults", "-display", "none", "-accel", "tcg"])
            .args(["-m", "64"])
            .stdin(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn ksm_merges_equal_pages_within_one_trust_domain_and_afterwards_has_its_old_settings() {
    let Some(_turn) = support::turn() else { return };
    // The guard is dropped here, because the daemon will use KSM.
    if take().is_none() {
        return;
    }
    let directory = tempfile::Builder::new()
        .prefix("memfold-ksm.")
        .tempdir()
        .unwrap();
    let state = directory.path();
    let _restore = Restore;
    let names = ["one", "two", "other", "loner", "sly"];
    let (mut served, client) = guests(state, &names);
    let before = settings();
    assert_eq!(before.run, Some(0));
    assert!(pages(&explain(&client, NAMES[0]), Cause::Stopped) > DATA_MIB << 8);

    refused(
        ask(&client, &request(Some("elsewhere"))),
        &["'lab' (VM 'one')", "--merge never"],
    );
    assert_eq!(settings(), before);
    merges(&client);
    it_idles_and_makes_way(&client);
    others_stay_out(&client, &served, state);
    a_live_save_has_ksm_stand_still(&client);
    it_stands_still_while_the_brake_is_on(&client);
    it_stands_still_while_a_process_hangs(&client);
    what_others_write_is_set_back(&client);
    it_makes_way_no_longer(&client);
    beside_folding(&client);

    let overview: Overview = client
        .post("/v1/ksm/stop", &KsmStopRequest::default())
        .unwrap();
    assert_eq!(settings(), before);
    assert!(
        overview.totals.ksm_merging_pages > DATA_MIB << 8,
        "{overview:?}"
    );
    refused(
        client.post("/v1/ksm/stop", &KsmStopRequest::default()),
        &["does not steer", "memfold ksm start"],
    );

    start(&client, Some("lab"));
    assert_ne!(settings(), before);
    served.kill();
    assert_ne!(settings(), before);
    served.start();
    let client = served.answers();
    assert_eq!(settings(), before);
    assert_eq!(ksm(&client).steering, None);
    assert!(merging_pages(Path::new("/proc")) > Some(DATA_MIB << 8));

    // Now the kernel's own advisor is used, and the end unmerges all pages.
    let by_advisor = KsmStartRequest {
        advisor: true,
        ..request(None)
    };
    if before.advisor_mode.is_some() {
        start(&client, None);
        ask(&client, &by_advisor).unwrap();
        assert_eq!(settings().advisor_mode.as_deref(), Some("scan-time"));
        // ksmd gets less CPU while tasks wait for a core.
        let most = settings().advisor_max_cpu;
        assert!(
            most.is_some_and(|percent| (1..=60).contains(&percent)),
            "{most:?}"
        );
    } else {
        refused(ask(&client, &by_advisor), &["no advisor"]);
        start(&client, None);
    }
    let unmerge = KsmStopRequest { unmerge: true };
    let _: Overview = client.post("/v1/ksm/stop", &unmerge).unwrap();
    assert_eq!(settings(), before);
    assert_eq!(merging_pages(Path::new("/proc")), Some(0));
}

/// Checks that all data that both guests hold is merged, within the CPU budget.
fn merges(client: &Client) {
    let began = Instant::now();
    let overview = start(client, None);
    let steering = overview.steering.unwrap();
    assert_eq!(steering.domain, "lab");
    let young = explain(client, NAMES[0]);
    println!(
        "{}: first merge within {:?} s",
        young.verdict, young.first_merge_s
    );
    let done = wait("the data is merged", || {
        let overview = ksm(client);
        let vms: BTreeMap<&str, u64> = overview
            .vms
            .iter()
            .map(|vm| (vm.name.as_str(), vm.ksm_merging_pages.unwrap()))
            .collect();
        if NAMES.iter().all(|name| vms[name] > DATA_MIB << 8) {
            return Ok(overview);
        }
        Err(format!("{vms:?} {:?}", overview.steering))
    });
    let steering = done.steering.unwrap();
    let share = steering.ksmd_cpu_s / steering.running_s;
    println!(
        "{} merged pages in {:.1} s, {:.2} s of ksmd ({:.1} % of a CPU): {steering:?}",
        done.totals.ksm_merging_pages,
        began.elapsed().as_secs_f64(),
        steering.ksmd_cpu_s,
        share * 100.0
    );
    assert!(share < 0.7, "{share} of a CPU, and 0.6 were allowed");
    // Pages that the guests have written since stay in the kernel's count until ksmd's next pass,
    // but not in smaps.
    wait("what is mapped is merged", || {
        let explained = explain(client, NAMES[0]);
        if explained.merged_bytes > DATA_MIB << 20 {
            println!("{}", explained.verdict);
            return Ok(());
        }
        Err(explained.verdict)
    });
}

/// Programs that each want a whole core.
struct Busy(Vec<Child>);

impl Busy {
    fn start() -> Self {
        let cores = std::thread::available_parallelism().unwrap().get();
        let one = |_| {
            let mut shell = Command::new("sh");
            shell.args(["-c", "while :; do :; done"]).spawn().unwrap()
        };
        Self((0..4 * cores).map(one).collect())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Checks that ksmd slows down when passes merge nothing more, and further when tasks wait for a
/// core.
fn it_idles_and_makes_way(client: &Client) {
    let quick = KsmStartRequest {
        target_s: 2.0,
        ..request(None)
    };
    ask(client, &quick).unwrap();
    let until = |what: &str, is_so: &dyn Fn(&Steering) -> bool| {
        wait(what, || {
            let steering = ksm(client).steering.unwrap();
            if is_so(&steering) {
                println!(
                    "{what}: {} ({} pages each {} ms)",
                    steering.why, steering.pages_to_scan, steering.sleep_millisecs
                );
                return Ok(steering);
            }
            Err(format!("{steering:?}"))
        })
    };
    let speed = |steering: &Steering| {
        steering.pages_to_scan as f64 / steering.sleep_millisecs.max(1) as f64
    };
    until("it scans each 2 s", &|s| s.mode == Some(Mode::Steady));
    let idle = until("it idles", &|s| s.mode == Some(Mode::Idle));
    let busy = Busy::start();
    let waits = |s: &Steering| s.why.contains("tasks wait for cpu");
    let slow = until("it makes way", &|s| {
        waits(s) && speed(s) < 0.7 * speed(&idle)
    });
    assert!(slow.held.is_none(), "{slow:?}");
    drop(busy);
    start(client, None);
}

/// Checks that ksmd does not make way any more once no task has waited for a core for a while.
fn it_makes_way_no_longer(client: &Client) {
    wait("it is as before", || {
        let steering = ksm(client).steering.unwrap();
        if steering.why.contains("tasks wait for cpu") {
            return Err(steering.why);
        }
        Ok(())
    });
}

/// Checks that a VM of another domain is started without mergeable memory, and that a VM of
/// somebody else stops KSM as long as it runs.
fn others_stay_out(client: &Client, served: &Served<'_>, state: &Path) {
    served.run(&paused("other", Some("other")));
    served.run(&paused("loner", None));
    let explained = explain(client, "other");
    assert_eq!(explained.mergeable_bytes, 0);
    assert!(pages(&explained, Cause::AnotherDomain) >= 64 << 8);
    assert!(pages(&explain(client, "loner"), Cause::NoDomain) >= 64 << 8);
    let overview = ksm(client);
    assert_eq!(overview.steering.unwrap().kept_out, ["other"]);
    let part = overview.vms.iter().find(|vm| vm.name == "other").unwrap();
    assert!(!part.mergeable);
    assert_eq!(part.ksm_merging_pages, Some(0));
    refused(ask(client, &request(Some("other"))), &["'lab'"]);

    // This VM is made to offer its memory all the same, without memfold's knowledge.
    let config = state.join("sly.conf");
    std::fs::write(&config, "[machine]\nmem-merge = \"on\"\n").unwrap();
    let mut sly = paused("sly", Some("other"));
    let words = ["-readconfig".to_owned(), config.display().to_string()];
    sly.qemu_args.extend(words);
    served.run(&sly);
    stands_still(client, "has mergeable memory");
    let stop = StopRequest { timeout_s: 0.0 };
    let _: Value = client.post("/v1/vms/sly/stop", &stop).unwrap();
    runs(client);

    let stranger = Stranger::start();
    stands_still(client, "has mergeable memory");
    let held = explain(client, NAMES[0]);
    assert!(
        held.causes.iter().any(|f| f.cause == Cause::Held),
        "{held:#?}"
    );
    drop(stranger);
    runs(client);
}

fn stands_still(client: &Client, why: &str) {
    wait("KSM stands still", || {
        let steering = ksm(client).steering.unwrap();
        let held = steering.held.as_deref().unwrap_or("");
        if settings().run == Some(0) && held.contains(why) {
            Ok(())
        } else {
            Err(format!("{steering:?}"))
        }
    });
}

fn runs(client: &Client) {
    wait("KSM goes on", || {
        // A measurement that hung ends soon after the process continues; until then, requests get
        // an error.
        let overview: Overview = client.get("/v1/ksm").map_err(|error| chain(&error))?;
        let steering = overview.steering.unwrap();
        let runs = settings().run == Some(1) && steering.held.is_none();
        if runs {
            Ok(())
        } else {
            Err(format!("{steering:?}"))
        }
    });
}

fn a_live_save_has_ksm_stand_still(client: &Client) {
    let request = SaveRequest {
        live: true,
        ..SaveRequest::new(NAMES[0], "live")
    };
    let _: Value = client.post("/v1/snapshots", &request).unwrap();
    runs(client);
    let _: Value = client.delete("/v1/snapshots/live").unwrap();
}

fn it_stands_still_while_the_brake_is_on(client: &Client) {
    let reserve = |reserve: &str| {
        let request = DebtRequest {
            reserve: Some(reserve.into()),
            ..DebtRequest::default()
        };
        let report: DebtReport = client.put("/v1/debt", &request).unwrap();
        println!("reserve {reserve}: {} ({})", report.level, report.why);
    };
    reserve("100%");
    stands_still(client, "the brake is on");
    let merged = merging_pages(Path::new("/proc"));
    assert!(merged > Some(DATA_MIB << 8), "{merged:?}");
    reserve("0");
    runs(client);
}

/// A process that keeps its memory map locked, so that every reader of its mergeable memory waits;
/// here, a pipe in place of the kernel's file.
struct Hung {
    child: Child,
    pipe: PathBuf,
    _directory: tempfile::TempDir,
}

impl Hung {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        let child = Command::new("sleep").arg("3600").spawn().unwrap();
        let hung = Self {
            child,
            pipe,
            _directory: directory,
        };
        rustix::mount::mount_bind(&hung.pipe, hung.file()).unwrap();
        hung
    }

    fn file(&self) -> PathBuf {
        format!("/proc/{}/ksm_stat", self.child.id()).into()
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.file(), rustix::mount::UnmountFlags::DETACH);
        let _ = self.child.kill();
        let _ = self.child.wait();
        // This fails if no reader waits.
        let writer = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NONBLOCK;
        drop(rustix::fs::open(
            &self.pipe,
            writer,
            rustix::fs::Mode::empty(),
        ));
    }
}

fn it_stands_still_while_a_process_hangs(client: &Client) {
    let hung = Hung::start();
    let number = format!("process {}", hung.child.id());
    let stopped = |held: &str| held.contains(&number) && settings().run == Some(0);
    // Requests get an error, and do not hang as well.
    wait("a process that hangs stops KSM", || {
        match client.get::<Overview>("/v1/ksm") {
            Err(error) if stopped(&chain(&error)) => Ok(()),
            answer => Err(format!("{answer:?}")),
        }
    });
    drop(hung);
    runs(client);
}

fn chain(error: &ClientError) -> String {
    match error {
        ClientError::Refused { body, .. } => body.error.clone(),
        error => error.to_string(),
    }
}

fn what_others_write_is_set_back(client: &Client) {
    let controls = Controls::default();
    controls.write("pages_to_scan", &7_654_321).unwrap();
    wait("pages_to_scan is steered again", || {
        let steering = ksm(client).steering.unwrap();
        let told = steering
            .why
            .contains("another program also writes pages_to_scan");
        if told && settings().pages_to_scan != Some(7_654_321) {
            Ok(())
        } else {
            Err(format!("{steering:?}"))
        }
    });
    if settings().advisor_mode.is_none() {
        return;
    }
    controls.write("advisor_mode", &"scan-time").unwrap();
    wait("the advisor is off again", || {
        let now = settings();
        let by_us = now.pages_to_scan == Some(ksm(client).steering.unwrap().pages_to_scan);
        if now.advisor_mode.as_deref() == Some("none") && by_us {
            Ok(())
        } else {
            Err(format!("{now:?}"))
        }
    });
    runs(client);
}

/// Checks that ksmd does not scan folded memory, and that the ledger counts no page in two places.
fn beside_folding(client: &Client) {
    let go_on = FoldRequest {
        paused: Some(false),
        ..FoldRequest::default()
    };
    client.put::<_, Value>("/v1/fold", &go_on).unwrap();
    let read = "cat /usr/bin/[a-p]* > /dev/null";
    for name in NAMES {
        exec(client, name, read);
    }
    let report: FullReport = wait("pages are folded", || {
        let report: FullReport = client.get("/v1/report").unwrap();
        let of = |name: &str| report.ledger.vms.iter().find(|vm| vm.name == name);
        let folded = |name: &&str| of(name).is_some_and(|vm| vm.folded_bytes > ByteSize::mib(8));
        if NAMES.iter().all(folded) {
            Ok(report)
        } else {
            Err(format!("{:?}", report.fold))
        }
    });
    for name in NAMES {
        let vm = report.ledger.vms.iter().find(|vm| vm.name == name).unwrap();
        assert_eq!(vm.sum_of_parts(), vm.ram_bytes);
        // Merged pages are private pages of mappings that are not the store's.
        let merged = vm.ksm_merged_bytes.unwrap();
        println!(
            "{name}: folded {}, merged {merged}, private {}",
            vm.folded_bytes, vm.private_bytes
        );
        assert!(merged > ByteSize::mib(DATA_MIB) && merged <= vm.private_bytes);
        let explained = explain(client, name);
        let folded = pages(&explained, Cause::Folded) << 12;
        assert!(
            folded >= vm.folded_bytes.0 / 2,
            "{folded} of {}",
            vm.folded_bytes
        );
        assert!(explained.mergeable_bytes + folded <= explained.guest_bytes);
    }
    let double = report.ledger.disagreements.iter().find(|d| {
        let text = format!("{d:?}");
        text.contains("merged by KSM")
    });
    assert!(double.is_none(), "{double:?}");
}
