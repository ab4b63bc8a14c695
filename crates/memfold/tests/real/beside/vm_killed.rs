//! Test of a QEMU that is killed while the daemon folds its VM.

use std::time::Duration;

use memfold_lab::Lab;
use memfold_units::PAGE_SIZE;
use rustix::process::{Pid, Signal, kill_process};

use crate::support;

/// Kills the VM `victim` while both VMs read and are folded. `other` is the only other VM of the
/// domain.
pub fn the_other_does_not_notice(lab: &Lab, victim: &str, other: &str) {
    let reading = format!(
        "{} && echo 3 > /proc/sys/vm/drop_caches && sums /run/sums.after && cmp /run/sums.before /run/sums.after",
        support::sums()
    );
    let limit = Duration::from_secs(300);
    let before = lab.stats().unwrap();
    std::thread::scope(|scope| {
        let survivor = scope.spawn(|| lab.exec(other, &reading, limit));
        // The guest reads until it dies, however fast it is.
        let on_and_on = format!("while :; do ( {reading} ) || exit 1; done");
        let dead = scope.spawn(move || lab.exec(victim, &on_and_on, limit));
        support::wait_stats(
            "folding goes on",
            Duration::from_secs(300),
            || lab.stats().unwrap(),
            |stats| {
                [victim, other].iter().all(|name| {
                    let count = |stats| {
                        let vm = support::vm(stats, name);
                        vm.folded_pages + vm.refolded_pages
                    };
                    count(stats) > count(&before) + 500
                })
            },
        );
        let pid = lab
            .daemon()
            .vms()
            .list()
            .iter()
            .find(|vm| vm.name == victim)
            .unwrap()
            .pid;
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        assert!(
            dead.join().unwrap().is_err(),
            "the victim's command can't have ended well"
        );
        survivor
            .join()
            .unwrap()
            .expect("the other VM reads what it read before");
    });
    // Only pages that the other VM maps are still needed.
    let stats = support::wait_stats(
        "store pages of the dead VM are given back",
        Duration::from_secs(300),
        || lab.stats().unwrap(),
        |stats| {
            let vm = support::vm(stats, other);
            let needed = (vm.mapped_pages - vm.copied_pages) * PAGE_SIZE;
            let domain = stats.domains.iter().find(|d| d.domain == "lab").unwrap();
            stats.vms.iter().all(|vm| vm.name != victim)
                && domain.store_bytes <= needed + needed / 20 + (4 << 20)
        },
    );
    assert!(support::vm(&stats, other).problem.is_none());
    println!(
        "after the death: {}",
        support::line(support::vm(&stats, other))
    );
    let status = support::qmp(lab.directory(), other)
        .query("query-status")
        .unwrap();
    assert_eq!(status["status"], "running");
    lab.stop(other).unwrap();
    support::wait_stats(
        "the domain's store is gone with its last VM",
        Duration::from_secs(60),
        || lab.stats().unwrap(),
        |left| left.domains.iter().all(|d| d.domain != "lab"),
    );
}
