//! Faults in the registry of leases, which is an `SQLite` database: in each call, and when the
//! database is opened and closed. Also faults in the note of KSM's settings. Both are used in a
//! process of their own, without a daemon, so that thousands of faults take seconds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use memfold_ksm::{Controls, Guard, Merged, restore_leftover};
use memfold_lend::registry::{Offer, Registry, Want};
use memfold_lend::{
    Address, Durability, Endpoint, Incarnation, Lease, LeaseId, LenderId, Picture, RegistryError,
    SqliteRegistry, Transport,
};
use memfold_testkit::dose;

use crate::injector::{Fault, Injector};

const TTL: Duration = Duration::from_secs(600);
const MIB: u64 = 1 << 20;

fn lender(host: &str) -> LenderId {
    LenderId {
        host: host.into(),
        incarnation: Incarnation(7),
    }
}

pub fn offer(registry: &SqliteRegistry, host: &str, bytes: u64) -> Result<(), RegistryError> {
    let lender = lender(host);
    registry.offer(&Offer { lender, bytes }, TTL)
}

pub fn take(registry: &SqliteRegistry, vm: &str) -> Result<Lease, RegistryError> {
    let want = Want {
        borrower: "b".into(),
        vm: vm.into(),
        bytes: 64 * MIB,
        disk_bytes: 0,
        durability: Durability::Disk,
        apart_from: Vec::new(),
    };
    registry.take(&want, TTL)
}

/// Makes a registry with two lenders, a lease that is exported, and one that is taken.
fn begin(registry: &SqliteRegistry) {
    offer(registry, "a", 512 * MIB).unwrap();
    offer(registry, "c", 256 * MIB).unwrap();
    let exported = take(registry, "exported").unwrap();
    publish(registry, &exported).unwrap();
    take(registry, "taken").unwrap();
}

pub fn publish(registry: &SqliteRegistry, lease: &Lease) -> Result<(), RegistryError> {
    let endpoint = Endpoint {
        address: Address::Unix("/run/x".into()),
        transport: Transport::Nbd,
        key: None,
    };
    registry.publish(lease.id, &lease.lender, &endpoint)
}

/// Returns what a registry knows, without the times that are left.
pub fn known(registry: &dyn Registry) -> Picture {
    let mut picture = registry.picture().expect("a whole database");
    for lender in &mut picture.lenders {
        (lender.silent_ms, lender.left_ms) = (0, 0);
    }
    for lease in &mut picture.leases {
        lease.left_ms = 0;
        lease.recall_ms = lease.recall_ms.map(|_| 0);
    }
    picture
}

/// Does the same as [`known`], without the number of the lease of VM `new`: the numbers of leases
/// are random.
fn known_but_new(registry: &dyn Registry) -> Picture {
    let mut picture = known(registry);
    let mut leases = picture.leases.iter_mut();
    if let Some(lease) = leases.find(|lease| lease.vm == "new") {
        lease.id = LeaseId(0);
    }
    picture
}

/// A change of the registry, for the lease of a VM.
type Change = fn(&SqliteRegistry, &Lease) -> Result<(), RegistryError>;

const CHANGES: &[(&str, &str, Change)] = &[
    ("offer", "exported", |registry, _| {
        offer(registry, "a", 768 * MIB)
    }),
    ("withdraw", "exported", |registry, _| {
        registry.withdraw(&lender("c"))
    }),
    ("take", "exported", |registry, _| {
        take(registry, "new").map(drop)
    }),
    ("publish", "taken", publish),
    ("renew", "exported", |registry, lease| {
        registry.renew(lease.id, "b", TTL).map(drop)
    }),
    ("lose the copy", "exported", |registry, lease| {
        registry.sole_copy(lease.id, "b").map(drop)
    }),
    ("recall", "exported", |registry, lease| {
        registry.recall(lease.id, &lease.lender, TTL)
    }),
    ("release", "exported", |registry, lease| {
        registry.release(lease.id, "b")
    }),
    ("end", "taken", |registry, lease| {
        registry.ended(lease.id, &lease.lender)
    }),
];

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for file in fs::read_dir(from).unwrap().flatten() {
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

/// Opens the database in a directory, changes it and closes it, with faults from one operation on.
/// Returns the number of faults. What was acknowledged is there, and what was refused is there as a
/// whole or not at all.
fn change_with_fault(
    injector: &Injector,
    directory: &Path,
    (name, vm, change): (&str, &str, Change),
    (at, fault): (i64, Fault),
) -> i64 {
    let file = directory.join("registry.db");
    injector.arm(at, fault);
    let opened = SqliteRegistry::open(&file);
    let found = opened.as_ref().ok().and_then(|registry| {
        let leases = registry.picture().ok()?.leases;
        leases.into_iter().find(|lease| lease.vm == vm)
    });
    let done = match (&opened, found) {
        (Ok(registry), Some(lease)) => change(registry, &lease),
        _ => Err(RegistryError::Unusable {
            place: String::new(),
            why: "it cannot be opened".into(),
        }),
    };
    drop(opened);
    let fired = injector.disarm();
    let told = format!("{name}, {fault:?} at {fired}: {done:?}");
    assert!(done.is_ok() || fired.faults > 0, "{told}");
    let now = known_but_new(&SqliteRegistry::open(&file).expect(&told));
    // The same without a fault.
    let other = directory.with_extension("other");
    copy(&directory.with_file_name("before"), &other);
    let registry = SqliteRegistry::open(&other.join("registry.db")).unwrap();
    let before = known(&registry);
    let lease = before.leases.iter().find(|lease| lease.vm == vm);
    change(&registry, lease.unwrap()).unwrap();
    let after = known_but_new(&registry);
    assert!(
        now == after || done.is_err() && now == before,
        "{told}: {now:?}"
    );
    fired.faults
}

/// Returns the number of faults.
fn changes_with_faults(injector: &Injector, place: &Path, few: usize) -> (i64, u64) {
    let before = place.join("before");
    fs::create_dir(&before).unwrap();
    begin(&SqliteRegistry::open(&before.join("registry.db")).unwrap());
    let (mut faults, mut places) = (0, 0);
    for change in CHANGES {
        for fault in Fault::ALL {
            let (mut at, mut step) = (1, 1);
            for _ in 0..few {
                let directory = place.join("now");
                copy(&before, &directory);
                let fired = change_with_fault(injector, &directory, *change, (at, fault));
                fs::remove_dir_all(&directory).unwrap();
                fs::remove_dir_all(directory.with_extension("other")).unwrap();
                if fired == 0 {
                    break;
                }
                (faults, places) = (faults + fired, places + 1);
                at += step;
                // A small dose is spread over all operations.
                step += if few == usize::MAX { 0 } else { 3 };
            }
        }
    }
    (faults, places)
}

/// Takes over KSM's settings (those of a directory that looks like the kernel's), changes them and
/// puts them back, with a fault at each file operation. Returns the number of faults, and of the
/// operations at which they began.
fn ksm_settings_with_faults(injector: &Injector, place: &Path) -> (i64, u64) {
    let kernel = tempfile::tempdir().unwrap();
    let settings = [
        ("run", "0"),
        ("pages_to_scan", "100"),
        ("sleep_millisecs", "20"),
    ];
    for (name, text) in settings.into_iter().chain([("pages_shared", "0")]) {
        fs::write(kernel.path().join(name), format!("{text}\n")).unwrap();
    }
    let controls = Controls::new(kernel.path());
    let before = controls.settings().unwrap();
    let (mut faults, mut places) = (0, 0);
    for fault in Fault::ALL {
        for at in 1.. {
            injector.arm(at, fault);
            let taken = Guard::take_as(&controls, place, Merged::Stay);
            if taken.is_ok() {
                controls.write("pages_to_scan", &5000).unwrap();
            }
            let restored = taken.and_then(Guard::restore);
            let fired = injector.disarm();
            let told = format!("{fault:?} at {fired}: {restored:?}");
            assert!(restored.is_ok() || fired.faults > 0, "{told}");
            // The next process puts back what this one could not.
            restore_leftover(place).expect(&told);
            assert_eq!(controls.settings().unwrap(), before, "{told}");
            if fired.faults == 0 {
                break;
            }
            (faults, places) = (faults + fired.faults, places + 1);
        }
    }
    (faults, places)
}

/// Environment variable with the directory of [`helper`].
const HELPER: &str = "MEMFOLD_FAULT_HELPER";

#[test]
#[ignore = "is started by the test of the registry, with the library that injects faults"]
fn helper() {
    let Some(place) = std::env::var_os(HELPER).map(PathBuf::from) else {
        return;
    };
    let few = if dose("MEMFOLD_FAULT_ROUNDS", 0) == 0 {
        3
    } else {
        usize::MAX
    };
    let injector = Injector::of_environment();
    let (faults, places) = changes_with_faults(&injector, &place, few);
    println!("faults injected into the registry of leases: {faults}, at {places} operations");
    assert!(places > 50, "{places}");
    let (faults, places) = ksm_settings_with_faults(&injector, &place);
    println!("faults injected into the note of KSM's settings: {faults}, at {places} operations");
    assert!(places > 10, "{places}");
}

#[test]
fn the_registry_of_leases_and_ksm_settings_stay_right_with_a_fault_at_any_file_operation() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("place");
    fs::create_dir(&place).unwrap();
    let Some(injector) = Injector::new(directory.path(), &place) else {
        memfold_testkit::skip!("no C compiler");
    };
    let mut command = Command::new(std::env::current_exe().unwrap());
    let command = command.args(["--exact", "registry::helper", "--ignored", "--nocapture"]);
    let command = command.env(HELPER, &place).envs(injector.environment());
    let output = command.output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}{output:?}");
    let counts = told
        .lines()
        .filter_map(|line| line.find("faults injected").map(|at| &line[at..]));
    let counts: Vec<&str> = counts.collect();
    println!("{}", counts.join("\n"));
    assert_eq!(counts.len(), 2, "{told}");
}
