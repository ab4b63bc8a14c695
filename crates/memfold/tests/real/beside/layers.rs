//! Tests of layers. A layer is a snapshot that holds only what differs from the snapshot from which
//! the VM runs.

use std::time::Duration;

use memfold_api::{RestoreRequest, SaveRequest};
use memfold_fold::EngineSettings;
use memfold_lab::{DiskMode, Lab};
use memfold_snapshot::{Manifest, Renew};
use memfold_testkit::patience;
use memfold_units::{ByteSize, PAGE_SIZE};

use super::snapshots::{MEMORY, VERIFY, rewrite_memory};
use crate::support::{self, BOOT};

const LIMIT: Duration = Duration::from_secs(300);

/// Generations of layers.
const GENERATIONS: u64 = 3;

/// Bytes that a clone writes to its memory before it is saved.
const WRITTEN: ByteSize = ByteSize::mib(12);

/// Bytes that a guest may change by itself until it is saved: what renewing its identity and the
/// test's commands touch, and the memory that is rewritten all the time.
const BESIDE: ByteSize = ByteSize::mib(128);

/// Shell script that puts random bytes into memory, and prints their checksum.
fn fill(generation: u64) -> String {
    let mib = WRITTEN.0 >> 20;
    format!(
        "set -e; mkdir -p /dev/shm/held; head -c {mib}M /dev/urandom > /dev/shm/held/{generation}\n\
         echo {generation} > /var/tmp/generation; head -c 1M /dev/urandom > /var/tmp/held-{generation}; sync\n\
         cat /dev/shm/held/* /var/tmp/held-* | md5sum"
    )
}

const SUMS: &str = "cat /dev/shm/held/* /var/tmp/held-* | md5sum";

fn clone(lab: &Lab, snapshot: &str, vm: &str) {
    let request = RestoreRequest {
        renew: Renew::Network,
        ..RestoreRequest::new(vm)
    };
    let snapshots = lab.daemon().snapshots();
    snapshots.restore(snapshot, &request).unwrap();
    lab.daemon().vms().wait_agent(vm, patience(BOOT)).unwrap();
}

fn own_bytes(manifest: &Manifest) -> ByteSize {
    let referred = manifest.references.as_ref().map_or(0, |refs| refs.pages);
    ByteSize((manifest.counts.saved_pages - referred) * PAGE_SIZE)
}

#[test]
fn a_save_of_a_clone_stores_only_changed_pages_and_restores_all_memory_of_that_instant() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let lab = Lab::new(EngineSettings::default()).unwrap();
    let spec = Lab::spec("first", "trixie-a", MEMORY, DiskMode::Buffered).unwrap();
    lab.start_warm(spec).unwrap();
    lab.wait_ready("first", BOOT).unwrap();
    // Memory that is allocated, written and freed all the time, and checked by the guest itself.
    lab.exec("first", &rewrite_memory(), LIMIT).unwrap();
    let mut sums = lab.exec("first", &fill(0), LIMIT).unwrap();
    let snapshots = lab.daemon().snapshots();
    let base = SaveRequest::new("first", "generation-0");
    assert_eq!(snapshots.save(&base).unwrap().parent, None);
    lab.stop("first").unwrap();
    for generation in 1..=GENERATIONS {
        let (parent, vm) = (
            format!("generation-{}", generation - 1),
            format!("vm-{generation}"),
        );
        clone(&lab, &parent, &vm);
        assert_eq!(lab.exec(&vm, SUMS, LIMIT).unwrap(), sums);
        sums = lab.exec(&vm, &fill(generation), LIMIT).unwrap();
        let request = SaveRequest {
            live: generation % 2 == 0,
            ..SaveRequest::new(&vm, format!("generation-{generation}"))
        };
        let saved = snapshots.save(&request).unwrap();
        let own = own_bytes(&saved);
        println!(
            "generation {generation}: {own} saved, {} in the parent, stood still for {:.1} ms, {:.0} ms in all, {:?}, {:?}",
            ByteSize(saved.parent_bytes()),
            saved.pause_ms,
            saved.save_ms,
            saved
                .references
                .as_ref()
                .map(|refs| (refs.sources.len(), refs.mappings)),
            saved.steps
        );
        let named = saved.parent.as_ref().unwrap();
        assert_eq!(
            (&named.name, named.depth),
            (&parent, u32::try_from(generation).unwrap())
        );
        assert!(own.0 >= WRITTEN.0 && own.0 <= WRITTEN.0 + BESIDE.0, "{own}");
        // The VM goes on as if nothing had happened, and the snapshot is right.
        assert!(
            lab.exec(&vm, VERIFY, LIMIT)
                .unwrap()
                .starts_with("errors 0 rounds ")
        );
        assert_eq!(lab.exec(&vm, SUMS, LIMIT).unwrap(), sums);
        assert_eq!(snapshots.verify(&request.name).unwrap().problems, [""; 0]);
        if generation > 1 {
            lab.stop(&format!("vm-{}", generation - 1)).unwrap();
        }
    }
    let last = format!("generation-{GENERATIONS}");
    clone(&lab, &last, "last");
    assert!(
        lab.exec("last", VERIFY, LIMIT)
            .unwrap()
            .starts_with("errors 0 rounds ")
    );
    assert_eq!(lab.exec("last", SUMS, LIMIT).unwrap(), sums);
    // A VM runs from its own snapshot alone, although it maps files of all of them.
    let listed = snapshots.list().unwrap();
    let users = |name: &str| {
        let found = listed.iter().find(|snapshot| snapshot.name == name);
        found.map(|snapshot| snapshot.users.clone()).unwrap()
    };
    assert_eq!(users(&last), ["last"]);
    assert_eq!(users("generation-0"), [""; 0]);
    // A parent stays as long as a layer needs it.
    lab.stop("last").unwrap();
    lab.stop(&format!("vm-{GENERATIONS}")).unwrap();
    let refused = snapshots.remove("generation-1").unwrap_err().to_string();
    assert!(refused.contains(&last), "{refused}");
    for generation in (0..=GENERATIONS).rev() {
        snapshots
            .remove(&format!("generation-{generation}"))
            .unwrap();
    }
}
