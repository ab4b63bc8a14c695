//! Test that folding corrupts no data: guests do everything that moves pages while the daemon folds
//! as much as it can, and every byte is compared.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use memfold_fold::{EngineSettings, EngineStats, VmStats};
use memfold_lab::{DiskMode, Lab};
use memfold_testkit::seconds;
use serde_json::json;

use super::{domains, vm_killed};
use crate::support::{self, BOOT, MEMORY};

/// Names of the VMs: with buffered I/O, with direct I/O, and a copy of the first in another trust
/// domain.
pub const VMS: [&str; 3] = ["buffered", "direct", "stranger"];

#[test]
fn under_load_folding_changes_no_byte_and_shares_no_page_between_trust_domains() {
    let Some(_turn) = support::turn_beside() else {
        return;
    };
    let settings = EngineSettings {
        cpu_share: 0.5,
        pause_interval: Duration::from_millis(500),
        ..EngineSettings::default()
    };
    let lab = Lab::new(settings).unwrap();
    for (name, image, disk, domain) in [
        (VMS[0], "trixie-a", DiskMode::Buffered, "lab"),
        (VMS[1], "trixie-b", DiskMode::Direct, "lab"),
        (VMS[2], "trixie-a", DiskMode::Buffered, "other"),
    ] {
        let mut spec = Lab::spec(name, image, MEMORY, disk).unwrap();
        spec.domain = Some(domain.into());
        // One QEMU keeps the daemon's rights, and the others have almost none.
        spec.user = (name == VMS[0]).then(|| "nobody".into());
        lab.start_warm(spec).unwrap();
    }
    for name in VMS {
        lab.wait_ready(name, BOOT).unwrap();
    }
    let sums = support::prepare(&lab, &VMS);
    assert_eq!(sums[0], sums[2], "copies of one image hold the same files");
    lab.fold(true).unwrap();
    domains::nothing_is_shared_across_them(&lab);
    lab.stop(VMS[2]).unwrap();
    under_attack(&lab, &VMS[..2]);
    vm_killed::the_other_does_not_notice(&lab, VMS[1], VMS[0]);
}

fn under_attack(lab: &Lab, names: &[&str]) {
    let time = seconds("MEMFOLD_ATTACK_SECONDS", 15);
    let over = AtomicBool::new(false);
    let script = format!("/opt/attack.sh {} 200", time.as_secs());
    let (printed, moves) = std::thread::scope(|scope| {
        let balloons = scope.spawn(|| move_balloons(lab, names, &over));
        let printed = lab.exec_all(names, &script, time + Duration::from_secs(300));
        over.store(true, Ordering::SeqCst);
        (printed, balloons.join().unwrap())
    });
    let total = |stats: &EngineStats, count: fn(&VmStats) -> u64| -> u64 {
        names.iter().map(|n| count(support::vm(stats, n))).sum()
    };
    let stats = support::wait_stats(
        "pages are folded again",
        Duration::from_secs(60),
        || lab.stats().unwrap(),
        |stats| {
            total(stats, |vm| vm.folded_pages) > 10_000 && total(stats, |vm| vm.refolded_pages) > 0
        },
    );
    println!("balloons moved {moves} times");
    for (name, printed) in names.iter().zip(printed.unwrap()) {
        println!(
            "{name}:\n{printed}{}",
            support::line(support::vm(&stats, name))
        );
        assert!(printed.ends_with("all errors 0\n"), "{name}: {printed}");
    }
    assert!(moves > 4);
    let script = format!(
        "{} && sums /run/sums.after && cmp /run/sums.before /run/sums.after",
        support::sums()
    );
    lab.exec_all(names, &script, Duration::from_secs(300))
        .unwrap();
}

/// Moves balloons down by a quarter and up again, until `over`. Returns the number of moves.
fn move_balloons(lab: &Lab, names: &[&str], over: &AtomicBool) -> u32 {
    let mut monitors: Vec<_> = names
        .iter()
        .map(|n| support::qmp(lab.directory(), n))
        .collect();
    let mut moves = 0;
    while !over.load(Ordering::SeqCst) {
        for size in [MEMORY.0 / 4 * 3, MEMORY.0] {
            for qmp in &mut monitors {
                qmp.execute("balloon", json!({ "value": size })).unwrap();
                moves += 1;
            }
            std::thread::sleep(Duration::from_secs(6));
        }
    }
    moves
}
