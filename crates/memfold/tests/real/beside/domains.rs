//! Tests that VMs of different trust domains share no page. The tests compare the physical page
//! frames of the VMs.

use std::time::Duration;

use memfold_lab::Lab;
use memfold_ledger::shared_frames;
use memfold_testkit::wait_until;

use super::integrity::VMS;
use crate::support;

/// Time limit of a program in the guests.
const LIMIT: Duration = Duration::from_secs(300);

/// Checks three VMs: the first two are in one domain; the third is a copy of the first, with the
/// same files in memory, in another domain.
pub fn nothing_is_shared_across_them(lab: &Lab) {
    // The files that are read, about 100 MB, stay in memory.
    let read = "find /usr/bin /usr/sbin -xdev -type f -print0 | xargs -0 cat | md5sum";
    lab.exec_all(&VMS, read, LIMIT).unwrap();
    let stats = support::wait_stats(
        "folding in one domain",
        Duration::from_secs(300),
        || lab.stats().unwrap(),
        |stats| {
            VMS[..2].iter().all(|name| {
                let vm = support::vm(stats, name);
                vm.mapped_pages - vm.copied_pages > 12_000
            })
        },
    );
    // Both VMs may have folded many pages, and few of them the same ones yet.
    wait_until(
        "two VMs of one domain share frames",
        Duration::from_secs(180),
        || {
            std::thread::sleep(Duration::from_secs(2));
            let (same, across) = shared(lab, read);
            println!("frames shared in one domain {same}, across domains {across:?}");
            assert_eq!(across, [0, 0], "frames shared across domains");
            lab.fold(true).unwrap();
            same > 10_000
        },
    );
    let stranger = support::vm(&stats, VMS[2]);
    assert!(stranger.cached_pages > 10_000, "it offered its pages, too");
    // The third VM may fold its own files onto each other, from its own domain's store.
    println!("{}", support::line(stranger));
}

/// Returns the number of frames that the first two VMs share, and of those that each of them shares
/// with the third. Folding is paused afterwards.
fn shared(lab: &Lab, read: &str) -> (u64, [u64; 2]) {
    // The answer comes when the engine's current work has ended. After that, no VM may move a page
    // while two VMs are compared.
    lab.fold(false).unwrap();
    lab.stats().unwrap();
    // A folded page is in a VM's page tables from its next use on.
    lab.exec_all(&VMS, read, LIMIT).unwrap();
    let ram = VMS.map(|name| support::ram(lab.directory(), name));
    let mut monitors = VMS.map(|name| support::qmp(lab.directory(), name));
    for qmp in &mut monitors {
        qmp.query("stop").unwrap();
    }
    let shared =
        |a: usize, b: usize| shared_frames((ram[a].0, &ram[a].1), (ram[b].0, &ram[b].1)).unwrap();
    let found = (shared(0, 1), [shared(0, 2), shared(1, 2)]);
    for qmp in &mut monitors {
        qmp.query("cont").unwrap();
    }
    found
}
