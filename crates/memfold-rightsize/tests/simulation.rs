//! The controller against model hosts and guests (`memfold_rightsize::sim`): whole days of random
//! hosts, beside the same hosts with fixed sizes, with free page reporting alone and with Proxmox
//! VE's rule.

mod support;

use std::sync::atomic::{AtomicU64, Ordering};

use memfold_rightsize::sim::{Arm, Fault, HostSpec, Outcome, simulate};
use support::{DAY, Table, assert_sizes_are_steady, table};

/// Returns the number of random hosts: `MEMFOLD_SIMULATED_HOSTS`, or `usual`.
fn hosts(usual: u64) -> u64 {
    std::env::var("MEMFOLD_SIMULATED_HOSTS").map_or(usual, |text| {
        text.parse().expect("MEMFOLD_SIMULATED_HOSTS is a number")
    })
}

/// Runs `work` for each seed, on all cores, and returns the results in the order of the seeds.
fn for_each_seed<T: Send>(seeds: u64, work: impl Fn(u64) -> T + Sync) -> Vec<T> {
    let next = AtomicU64::new(0);
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let mut results: Vec<(u64, T)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers)
            .map(|_| {
                scope.spawn(|| {
                    let seeds = std::iter::from_fn(|| {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        (seed < seeds).then_some(seed)
                    });
                    seeds.map(|seed| (seed, work(seed))).collect::<Vec<_>>()
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().expect("a simulation does not panic"))
            .collect()
    });
    results.sort_by_key(|(seed, _)| *seed);
    results.into_iter().map(|(_, result)| result).collect()
}

#[test]
fn on_random_hosts_nothing_is_killed_that_fixed_sizes_would_have_spared_and_sizes_do_not_oscillate()
{
    let hosts = hosts(100);
    let runs = for_each_seed(hosts, |seed| {
        let spec = HostSpec::random(seed);
        let fixed = simulate(&spec, Arm::Fixed, DAY);
        let memfold = simulate(&spec, Arm::Memfold, DAY);
        (fixed, memfold)
    });
    for (seed, (fixed, memfold)) in (0..hosts).zip(&runs) {
        let spec = HostSpec::random(seed);
        // A guest that says that it needs nothing can lose its own programs, and only these.
        let is_honest = |vm: usize| !matches!(spec.vms[vm].fault, Fault::Lies(_));
        let honest = (0..spec.vms.len()).filter(|&vm| is_honest(vm));
        let kills = |outcome: &Outcome| {
            let guests: u32 = honest.clone().map(|vm| outcome.guest_kills[vm]).sum();
            guests + outcome.host_kills
        };
        assert!(
            kills(memfold) <= kills(fixed),
            "host {seed}: {} kills, {} with fixed sizes",
            kills(memfold),
            kills(fixed)
        );
        assert!(
            memfold.host_kills <= fixed.host_kills,
            "host {seed}: the host kills {} VMs, {} with fixed sizes",
            memfold.host_kills,
            fixed.host_kills
        );
        // Where the host kills VMs of fixed size, their guests start again and are not comparable.
        if fixed.host_kills == 0 {
            for vm in honest {
                assert!(
                    memfold.guest_kills[vm] <= fixed.guest_kills[vm],
                    "host {seed}, VM {vm}: {} kills, {} with a fixed size",
                    memfold.guest_kills[vm],
                    fixed.guest_kills[vm]
                );
            }
        }
        assert_sizes_are_steady(&format!("host {seed}"), memfold);
    }
    let (fixed, memfold): (Vec<_>, Vec<_>) = runs.into_iter().unzip();
    table(Arm::Fixed, &fixed);
    table(Arm::Memfold, &memfold);
    let most = |part: fn(&Outcome) -> usize| memfold.iter().map(part).max();
    println!(
        "most orders an hour {:?}, most turns an hour {:?}",
        most(|outcome| outcome.orders_an_hour),
        most(|outcome| outcome.turns_an_hour)
    );
}

fn all_arms(seeds: u64, spec: impl Fn(u64) -> HostSpec + Sync) -> [Table; 4] {
    [Arm::Fixed, Arm::Reporting, Arm::Proxmox, Arm::Memfold].map(|arm| {
        let outcomes = for_each_seed(seeds, |seed| simulate(&spec(seed), arm, DAY));
        table(arm, &outcomes)
    })
}

#[test]
fn on_random_hosts_vms_take_less_memory_and_read_less_again_than_with_the_proxmox_rule() {
    let [_, reporting, proxmox, memfold] = all_arms(hosts(50), HostSpec::random);
    assert!(memfold.backed < 0.85 * reporting.backed);
    assert!(memfold.backed < proxmox.backed);
    assert!(memfold.refaults < 0.5 * proxmox.refaults);
    assert!(memfold.swapped < proxmox.swapped);
    assert!(memfold.guest_kills <= proxmox.guest_kills);
    assert!(memfold.host_kills <= proxmox.host_kills);
}

#[test]
fn on_hosts_with_agents_vms_take_30_percent_less_memory_and_wait_less_than_1_percent_longer() {
    let [_, reporting, proxmox, memfold] = all_arms(hosts(50), HostSpec::random_healthy);
    assert!(memfold.backed < 0.7 * reporting.backed);
    assert!(memfold.backed < 0.7 * proxmox.backed);
    assert!(memfold.waited < reporting.waited + 0.01);
    assert!(memfold.swapped <= reporting.swapped);
    assert_eq!(memfold.guest_kills, reporting.guest_kills);
}
