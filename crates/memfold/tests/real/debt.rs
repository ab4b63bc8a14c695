//! Test of the brake, which limits how much memory guests can claim by writing to shared pages.
//! Clones of one snapshot rewrite their shared memory at the same time, in a control group whose
//! limit leaves little memory.
//!
//! If the test cannot make a control group, it sets the brake's reserve so high that memory counts
//! as short after a few hundred MiB. Everything except the OOM killer then behaves as on a small
//! host.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memfold_api::{DebtRequest, RestoreRequest, SaveRequest};
use memfold_daemon::DaemonError;
use memfold_fold::{EngineSettings, VmStats};
use memfold_lab::{DiskMode, Lab};
use memfold_ledger::{DebtReport, Level};
use memfold_testkit::{dose, patience, wait_until};
use memfold_units::ByteSize;
use memfold_vm::MergeChoice;

use super::support::{self, BOOT};

const MEMORY: ByteSize = ByteSize::mib(512);
/// Memory that each clone holds, in MiB. The next constant: the rate of rewriting, in MiB.
const HELD: u64 = 200;
const RATE: u64 = 20;
/// Bytes of debt until the brake must act. Other processes on this host must stay below this.
const MARGIN: u64 = 160 << 20;

/// Number of pages of each clone that must be folded.
const FOLDED: u64 = 5_000;

const STORM: &str = include_str!("guest/storm.py");
const CLONES: [&str; 4] = ["held-1", "held-2", "held-3", "held-4"];
const VMS: u64 = CLONES.len() as u64;

/// Shell script that gives each clone page cache of its own, all of it clean.
const OWN: &str = "head -c 60M /dev/urandom > /var/tmp/own && sync && md5sum < /var/tmp/own";
/// Shell script that reads page cache that all clones have: 100 MiB.
const READ: &str = "find /usr/lib /usr/share -xdev -type f -size +32k -print0 | LC_ALL=C sort -z | xargs -0 cat | head -c 100M | md5sum";

/// Bytes in the group that must stay available after everything that the brake permits.
const RESERVE: u64 = 512 << 20;

/// A control group that contains this process, and with it daemon and VMs, until this is dropped.
struct Group {
    directory: PathBuf,
    /// Control group of this process before the test.
    before: PathBuf,
    limit: &'static str,
}

impl Group {
    fn new() -> Option<Self> {
        let of = memfold_host::Group::of_all(&[i32::try_from(std::process::id()).unwrap()]);
        let before = of.first()?.directory().to_owned();
        let directory = before.join(format!("memfold-storm-{}", std::process::id()));
        std::fs::create_dir(&directory).ok()?;
        let limit = ["memory.limit_in_bytes", "memory.max"];
        let limit = limit.into_iter().find(|file| directory.join(file).exists());
        let group = Self {
            directory,
            before,
            limit: limit.unwrap_or(""),
        };
        // The group is removed when this is dropped.
        (limit.is_some() && move_to(&group.directory).is_ok()).then_some(group)
    }

    /// Sets the group's limit to the memory in use plus `bytes`.
    fn leave(&self, bytes: u64) {
        let room = |limit: &str| {
            std::fs::write(self.directory.join(self.limit), limit).unwrap();
            let pid = i32::try_from(std::process::id()).unwrap();
            let groups = memfold_host::Group::of_all(&[pid]);
            groups[0].room().unwrap()
        };
        // A limit far above the memory in use, to read how much is used.
        let room = room(&(64_u64 << 30).to_string());
        let limit = room.limit - room.available + bytes;
        std::fs::write(self.directory.join(self.limit), limit.to_string()).unwrap();
    }
}

fn move_to(group: &Path) -> std::io::Result<()> {
    std::fs::write(group.join("cgroup.procs"), std::process::id().to_string())
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = move_to(&self.before);
        // Processes that have just ended may still be in the group.
        let end = Instant::now() + patience(Duration::from_secs(10));
        while std::fs::remove_dir(&self.directory).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

fn show(when: &str, debt: &DebtReport) {
    println!(
        "{when}: {} debt {} MiB (folded {}, snapshot {}, zero {}, KSM {}), needed {} of {} MiB; available {} MiB, reserve {} MiB; given back {} MiB",
        debt.level,
        mib(debt.debt_bytes),
        mib(debt.folded_bytes),
        mib(debt.snapshot_bytes),
        mib(debt.zero_bytes),
        mib(debt.ksm_bytes),
        mib(debt.needed_bytes),
        mib(debt.absorbable_bytes),
        mib(debt.mem_available_bytes),
        mib(debt.reserve_bytes),
        mib(debt.given_back_bytes),
    );
}

fn wait(lab: &Lab, what: &str, limit: Duration, done: impl Fn(&DebtReport) -> bool) -> DebtReport {
    let end = Instant::now() + patience(limit);
    loop {
        let debt = lab.daemon().brake().debt().unwrap();
        if done(&debt) {
            show(what, &debt);
            return debt;
        }
        assert!(Instant::now() < end, "never came: {what}\n{debt:#?}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn set_reserve(lab: &Lab, bytes: u64) -> DebtReport {
    let request = DebtRequest {
        reserve: Some(format!("{}K", bytes >> 10)),
        cover_percent: Some(50.0),
    };
    lab.daemon().brake().set_debt(&request).unwrap()
}

fn oom_kills() -> u64 {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap();
    let line = text.lines().find_map(|l| l.strip_prefix("oom_kill "));
    line.unwrap().parse().unwrap()
}

fn refused(error: &DaemonError) {
    assert!(
        matches!(error, DaemonError::Braked { why, .. } if why.contains("must be available")),
        "{error}"
    );
    assert!(error.hint().unwrap().contains("memfold debt"));
}

#[test]
fn if_guests_rewrite_all_shared_pages_the_brake_activates_in_time_and_no_vm_is_lost() {
    let group = Group::new();
    // In a group of its own, memory of other tests does not matter.
    let turn = if group.is_some() {
        support::turn_beside()
    } else {
        println!("no control group for memory can be made here: the OOM killer is not provoked");
        support::turn()
    };
    let Some(_turn) = turn else { return };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let limit = Duration::from_secs(120);
    let killed = oom_kills();
    let mut spec = Lab::spec("source", "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    // Another test may steer KSM meanwhile.
    spec.merge = MergeChoice::Never;
    lab.start_warm(spec.clone()).unwrap();
    lab.wait_ready("source", BOOT).unwrap();
    let hold = format!(
        "{}systemd-run -q --unit=storm python3 /opt/storm.py {HELD} {RATE}\n\
         while [ ! -e /run/held ]; do sleep 0.2; done",
        support::file("storm.py", STORM)
    );
    lab.exec("source", &hold, limit).unwrap();
    let saved = SaveRequest::new("source", "held");
    let saved = lab.daemon().snapshots().save(&saved).unwrap();
    let image = saved.counts.saved_pages * 4096;
    lab.stop("source").unwrap();

    set_reserve(&lab, 1 << 20);
    for name in CLONES {
        let request = RestoreRequest::new(name);
        lab.daemon().snapshots().restore("held", &request).unwrap();
    }
    // Before any read of page tables, a VM that was just started already counts as debt.
    let debt = lab.daemon().brake().debt().unwrap();
    assert!(debt.debt_bytes >= VMS * (HELD << 20), "{debt:#?}");
    lab.fold(true).unwrap();
    for name in CLONES {
        lab.wait_ready(name, BOOT).unwrap();
    }
    let sums = lab.exec_all(&CLONES, READ, limit).unwrap();
    let own = lab.exec_all(&CLONES, OWN, limit).unwrap();
    // Clones are folded at pauses, a little at a time, so this does not wait for all pages.
    let folded = |vm: &VmStats| vm.mapped_pages - vm.copied_pages > FOLDED;
    let stats = || lab.stats().unwrap();
    support::wait_stats("their page cache is folded", limit, stats, |s| {
        CLONES.iter().all(|name| folded(support::vm(s, name)))
    });
    lab.fold(false).unwrap();
    let debt = wait(&lab, "before the storm", limit, |debt| {
        debt.starting_bytes == 0 && debt.vms.iter().all(|vm| vm.snapshot_bytes > HELD << 20)
    });
    assert_eq!(debt.level, Level::Ok);
    assert!(
        debt.snapshot_bytes <= VMS * image,
        "more than the image holds"
    );
    assert!(debt.folded_bytes > VMS * FOLDED * 4096);
    // The ledger's figure, from page maps and PSS: pages mapped to the store and not copied.
    let ledger = lab.report().unwrap().ledger;
    let mapped: u64 = ledger.vms.iter().map(|vm| vm.folded_bytes.0).sum();
    let off = mapped.abs_diff(ledger.debt.unwrap().folded_bytes) as f64 / mapped as f64;
    assert!(off < 0.05, "{off}");
    lab.fold(true).unwrap();

    // The debt is read at this moment, because other processes are active on this host.
    let debt = lab.daemon().brake().debt().unwrap();
    let needed = debt.debt_bytes / 2 + MARGIN;
    let debt = if let Some(group) = &group {
        group.leave(RESERVE + needed);
        set_reserve(&lab, RESERVE)
    } else {
        set_reserve(&lab, debt.mem_available_bytes - needed)
    };
    assert_eq!(debt.limited_by.is_some(), group.is_some(), "{debt:#?}");
    show("the reserve is set", &debt);
    assert!(debt.level < Level::Braked, "{debt:#?}");
    let reserve = debt.reserve_bytes;
    let rewrite =
        "touch /run/rewrite; while [ ! -e /run/rewritten ]; do sleep 0.2; done; cat /run/rewritten";
    let said = std::thread::scope(|scope| {
        let storm = scope.spawn(|| lab.exec_all(&CLONES, rewrite, limit).unwrap());
        let debt = wait(&lab, "braked", limit, |debt| debt.level == Level::Braked);
        assert!(
            !storm.is_finished(),
            "all was rewritten before the brake came"
        );
        let event = debt
            .events
            .iter()
            .rev()
            .find(|event| event.what.contains("-> BRAKED"))
            .unwrap();
        println!("{}", event.what);
        assert!(
            event.mem_available_bytes > reserve,
            "the reserve was touched: {event:?}"
        );
        // New VMs of both kinds are refused.
        let request = RestoreRequest::new("late");
        refused(
            &lab.daemon()
                .snapshots()
                .restore("held", &request)
                .unwrap_err(),
        );
        let mut late = spec.clone();
        late.name = "late".into();
        refused(&lab.daemon().boots().run(late).unwrap_err());
        assert_eq!(lab.daemon().vms().list().len(), CLONES.len());
        assert!(lab.stats().unwrap().braked.is_some());
        storm.join().unwrap()
    });
    for (name, said) in CLONES.iter().zip(&said) {
        println!("{name}: {said}");
        assert!(said.starts_with("wrong 0 of "), "{name}: {said}");
    }

    // Far less than the reserve is left, whatever other processes do: each guest is asked to drop
    // page cache.
    let before = lab.daemon().brake().debt().unwrap();
    assert_eq!(before.level, Level::Braked);
    let taken = || {
        let vms = lab.report().unwrap().ledger.vms;
        vms.iter().map(|vm| vm.private_bytes.0).sum::<u64>()
    };
    let taken_before = taken();
    let reserve = before.mem_available_bytes + (2 << 30);
    show("a higher reserve", &set_reserve(&lab, reserve));
    let dropped = |debt: &DebtReport| {
        let events = debt.events.iter();
        let dropped = events.filter(|event| event.what.contains("dropped its clean page cache"));
        dropped.map(|event| event.what.clone()).collect::<Vec<_>>()
    };
    let after = wait(&lab, "all have dropped their page cache", limit, |debt| {
        dropped(debt).len() == CLONES.len()
    });
    println!("{:#?}", dropped(&after));
    assert!(after.folded_bytes < debt.folded_bytes / 2, "{after:#?}");
    assert_eq!(after.level, Level::Braked);
    // Some guests may have dropped their page cache earlier; at least that of the last one must
    // come back. Guests report free pages some seconds later.
    let given_back = || taken_before.saturating_sub(taken());
    wait_until("the host has memory back", Duration::from_secs(60), || {
        given_back() > 48 << 20
    });
    println!("given back to the host: {} MiB", mib(given_back()));

    // No VM is lost, and no byte that a guest reads.
    assert_eq!(lab.exec_all(&CLONES, READ, limit).unwrap(), sums);
    let again = "md5sum < /var/tmp/own";
    assert_eq!(lab.exec_all(&CLONES, again, limit).unwrap(), own);
    assert_eq!(oom_kills(), killed, "the OOM killer came");

    // Enough memory is available again: the page cache of three guests is back, and the reserve is
    // as before.
    set_reserve(&lab, 1 << 20);
    for name in &CLONES[1..] {
        lab.stop(name).unwrap();
    }
    wait(&lab, "ok again", limit, |debt| debt.level == Level::Ok);
    assert_eq!(lab.stats().unwrap().braked, None);
    let request = RestoreRequest::new("late");
    lab.daemon().snapshots().restore("held", &request).unwrap();
    for name in [CLONES[0], "late"] {
        lab.stop(name).unwrap();
    }
    if let (Some(group), 1..) = (&group, dose("MEMFOLD_DEBT_AT_ONCE", 0)) {
        at_once(&lab, group);
    }
    assert_eq!(oom_kills(), killed, "the OOM killer came");
}

/// Rewrites all memory that clones share at once, as fast as possible, in a group whose limit
/// leaves exactly the debt beyond the reserve: with memory for all of the debt (`--cover 100`), no
/// VM is lost.
fn at_once(lab: &Lab, group: &Group) {
    let limit = Duration::from_secs(120);
    group.leave(16 << 30);
    let names = ["all-1", "all-2", "all-3", "all-4"];
    for name in names {
        let request = RestoreRequest::new(name);
        lab.daemon().snapshots().restore("held", &request).unwrap();
    }
    for name in names {
        lab.wait_ready(name, BOOT).unwrap();
    }
    let debt = wait(lab, "all of it is owed", limit, |debt| {
        debt.starting_bytes == 0 && debt.vms.iter().all(|vm| vm.snapshot_bytes > HELD << 20)
    });
    group.leave(RESERVE + debt.debt_bytes);
    let request = DebtRequest {
        reserve: Some(format!("{}M", RESERVE >> 20)),
        cover_percent: Some(100.0),
    };
    show(
        "all of it is kept",
        &lab.daemon().brake().set_debt(&request).unwrap(),
    );
    let rewrite = "echo 100000 > /run/rewrite.new; mv /run/rewrite.new /run/rewrite
        while [ ! -e /run/rewritten ]; do sleep 0.2; done; cat /run/rewritten";
    let said = lab.exec_all(&names, rewrite, limit).unwrap();
    show("all is rewritten", &lab.daemon().brake().debt().unwrap());
    for (name, said) in names.iter().zip(&said) {
        println!("{name}: {said}");
        assert!(said.starts_with("wrong 0 of "), "{name}: {said}");
    }
    assert_eq!(lab.daemon().vms().list().len(), names.len());
}
