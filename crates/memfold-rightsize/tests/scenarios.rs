//! Single situations on model hosts: a spike, four spikes at once, a change of phase, a lie, a
//! fault. Each states what must hold in it.

use memfold_rightsize::sim::{
    Arm, Fault, FileSet, HostSpec, Lie, ModelHost, Outcome, Phase, VmSpec, Workload,
};
use memfold_rightsize::{Reason, Rung, Source};

const MIB: f64 = 1_048_576.0;
const GIB: f64 = 1024.0 * MIB;
const HOUR: f64 = 3600.0;

/// A phase with `anonymous` bytes that reads file set `files`.
fn phase(seconds: f64, anonymous: f64, files: usize) -> Phase {
    Phase {
        seconds,
        anonymous,
        leak: 0.0,
        allocation_rate: GIB,
        files,
        stream: 0.0,
        dirty: MIB,
    }
}

/// File sets of 100 MiB that are read slowly, and of 1 GiB that are read every 20 s.
fn workload(phases: Vec<Phase>) -> Workload {
    let set = |bytes, period| FileSet {
        bytes,
        period,
        skew: 0.8,
    };
    Workload {
        base: 200.0 * MIB,
        sets: vec![set(100.0 * MIB, 200.0), set(GIB, 20.0)],
        phases,
    }
}

/// A VM of 4 GiB that reads a lot of files once, is idle, and then does `last`.
fn idle_then(idle: f64, last: Vec<Phase>) -> VmSpec {
    let fill = Phase {
        stream: 100.0 * MIB,
        ..phase(60.0, 400.0 * MIB, 1)
    };
    let mut phases = vec![fill, phase(idle, 300.0 * MIB, 0)];
    phases.extend(last);
    VmSpec::new(4.0 * GIB, workload(phases))
}

fn run(host: &mut ModelHost, until: f64, tick: f64) {
    while host.time() < until {
        host.tick(tick);
    }
}

fn simulate(spec: &HostSpec, arm: Arm, seconds: f64) -> Outcome {
    let mut host = ModelHost::new(spec, arm);
    run(&mut host, seconds, 1.0);
    host.outcome()
}

#[test]
fn a_spike_of_512_mib_in_a_trimmed_vm_is_served_within_one_second_without_swap() {
    let spike = phase(120.0, 812.0 * MIB, 0);
    let vm = idle_then(HOUR, vec![spike, phase(HOUR, 300.0 * MIB, 0)]);
    let mut host = ModelHost::new(&HostSpec::for_vms(vec![vm], 1.0), Arm::Memfold);
    run(&mut host, HOUR + 59.0, 0.1);
    let trimmed = host.guests[0].backed();
    assert!(
        trimmed < 0.8 * GIB,
        "{} MiB were not trimmed",
        trimmed / MIB
    );
    run(&mut host, HOUR + 100.0, 0.1);
    let served = host.guests[0].served_after().expect("the spike is served");
    assert!(served <= 1.0, "the spike was served after {served:.1} s");
    assert!(host.guests[0].counters.swapped_out == 0.0);
    assert_eq!(host.outcome().kills(), 0);
}

/// A host that is short because of a pinned VM, so that the balloon takes from the first VM, which
/// is not trimmed. That VM needs `spike` bytes at [`SPIKE_AT`], and 300 MiB before.
fn host_with_a_ballooned_vm(source: Source, fault: Fault, spike: f64) -> ModelHost {
    let spike = phase(300.0, spike, 0);
    let mut vm = idle_then(2.0 * HOUR, vec![spike, phase(HOUR, 300.0 * MIB, 0)]);
    vm.source = source;
    vm.fault = fault;
    let mut pinned = VmSpec::new(4.0 * GIB, workload(vec![phase(9.0 * HOUR, 3.0 * GIB, 0)]));
    pinned.limits.pinned = true;
    let mut spec = HostSpec::for_vms(vec![vm, pinned], 1.0);
    spec.ram = 7.0 * GIB;
    spec.reserve = 1.5 * GIB;
    ModelHost::new(&spec, Arm::Memfold)
}

const SPIKE_AT: f64 = 2.0 * HOUR + 60.0;

#[test]
fn a_spike_of_512_mib_in_a_ballooned_vm_kills_nothing_and_is_given_memory_within_two_seconds() {
    let mut host = host_with_a_ballooned_vm(Source::BalloonStats, Fault::None, 812.0 * MIB);
    run(&mut host, SPIKE_AT - 1.0, 0.5);
    let size = host.guests[0].size();
    assert!(size < 2.0 * GIB, "the VM still has {} MiB", size / MIB);
    run(&mut host, SPIKE_AT + 3.0, 0.5);
    assert!(host.guests[0].size() >= size + 256.0 * MIB);
    run(&mut host, SPIKE_AT + 60.0, 0.5);
    assert_eq!(host.outcome().kills(), 0);
}

#[test]
fn a_ballooned_vm_that_booted_again_is_given_memory_when_it_needs_it_and_words_say_that_it_booted()
{
    let source = Source::Agent { trims: false };
    let mut host = host_with_a_ballooned_vm(source, Fault::Reboots(7240), 2.0 * GIB);
    run(&mut host, 7230.0, 0.5);
    let size = host.guests[0].size();
    let mut reasons = Vec::new();
    while host.time() < SPIKE_AT + 5.0 {
        host.tick(0.5);
        reasons.push(host.decision.as_ref().expect("a decision").vms[0].reason);
    }
    assert!(reasons.contains(&Reason::Restarted), "{reasons:?}");
    let is_distrusted = |reason: &Reason| matches!(reason, Reason::Distrusted(_));
    assert!(!reasons.iter().any(is_distrusted), "{reasons:?}");
    let now = host.guests[0].size();
    assert!(
        now >= size + 256.0 * MIB,
        "{} MiB, {} MiB before",
        now / MIB,
        size / MIB
    );
    assert_eq!(host.outcome().kills(), 0);
}

#[test]
fn four_spikes_at_once_on_a_host_at_its_reserve_follow_the_ladder_and_kill_nothing() {
    let spike = phase(1200.0, 1000.0 * MIB, 0);
    let idle = phase(HOUR, 300.0 * MIB, 0);
    let spiking = VmSpec::new(4.0 * GIB, workload(vec![idle, spike, idle]));
    let mut vms = vec![spiking; 4];
    // Four more VMs hold page cache that they read all the time, one of them without an agent.
    let steady = VmSpec::new(4.0 * GIB, workload(vec![phase(9.0 * HOUR, GIB, 1)]));
    vms.extend(vec![steady; 4]);
    vms[7].source = Source::BalloonStats;
    let mut spec = HostSpec::for_vms(vms, 1.0);
    spec.reserve = 2.5 * GIB;
    spec.lent = 1.0 * GIB;
    // What the VMs take when they are trimmed, and the reserve with a quarter: the host is at its
    // limit when the spikes come.
    spec.ram = GIB + 4.0 * 0.5 * GIB + 4.0 * 2.3 * GIB + spec.lent + 3.2 * GIB;
    let mut host = ModelHost::new(&spec, Arm::Memfold);
    let mut rungs = vec![Rung::Ample];
    while host.time() < 2.0 * HOUR {
        host.tick(0.5);
        assert!(
            host.available() > 0.0,
            "the host swaps at {} s",
            host.time()
        );
        let rung = host
            .decision
            .as_ref()
            .map_or(Rung::Ample, |decision| decision.rung);
        if rungs.last() != Some(&rung) {
            rungs.push(rung);
        }
        if host.time() == HOUR + 2.0 {
            for guest in &host.guests[..4] {
                let served = guest.served_after().unwrap_or(f64::INFINITY);
                assert!(served <= 1.0, "a spike was served after {served:.1} s");
            }
        }
    }
    let place = |rung: Rung| Rung::ALL.iter().position(|&r| r == rung).unwrap_or(0);
    for pair in rungs.windows(2) {
        let (from, to) = (place(pair[0]), place(pair[1]));
        assert_eq!(from.abs_diff(to), 1, "a rung was left out: {rungs:?}");
    }
    println!("rungs: {rungs:?}, lent {} MiB", host.lent() / MIB);
    assert!(
        rungs.contains(&Rung::Balloon),
        "the host was not short: {rungs:?}"
    );
    let outcome = host.outcome();
    assert_eq!(outcome.kills(), 0);
    assert!(
        outcome.swapped == 0.0,
        "{} MiB were swapped",
        outcome.swapped / MIB
    );
}

#[test]
fn after_a_change_of_phase_a_vm_reaches_its_new_size_within_five_minutes() {
    // Busy with 1 GiB of files and as much anonymous memory, then idle, then busy again.
    let busy = Phase {
        stream: 2.0 * MIB,
        ..phase(HOUR, 1.2 * GIB, 1)
    };
    let idle = phase(HOUR, 300.0 * MIB, 0);
    for ram in [2.5, 4.0, 8.0, 16.0] {
        let vm = VmSpec::new(ram * GIB, workload(vec![busy, idle]));
        let mut host = ModelHost::new(&HostSpec::for_vms(vec![vm], 1.0), Arm::Memfold);
        for change in 1..6 {
            let at = f64::from(change) * HOUR;
            run(&mut host, at + 300.0, 1.0);
            let soon = host.guests[0].backed();
            run(&mut host, at + 0.9 * HOUR, 1.0);
            let late = host.guests[0].backed();
            let off = (soon - late).abs();
            assert!(
                off <= 0.1 * ram * GIB,
                "VM of {ram} GiB, change {change}: {:.0} MiB after five minutes, {:.0} MiB later",
                soon / MIB,
                late / MIB
            );
        }
    }
}

#[test]
fn a_liar_costs_the_other_vms_no_memory_that_they_miss() {
    let busy = || VmSpec::new(4.0 * GIB, workload(vec![phase(HOUR, 1.2 * GIB, 1)]));
    let host = |fault| {
        let mut vms = vec![busy(), busy(), busy(), busy()];
        vms[3].fault = fault;
        HostSpec::for_vms(vms, 1.25)
    };
    let others = |spec: &HostSpec| {
        let mut host = ModelHost::new(spec, Arm::Memfold);
        run(&mut host, 6.0 * HOUR, 1.0);
        let guests = &host.guests[..3];
        let refaults: f64 = guests.iter().map(|guest| guest.counters.refaults).sum();
        let swapped: f64 = guests.iter().map(|guest| guest.counters.swapped_out).sum();
        (refaults, swapped, host.outcome().host_kills)
    };
    let (honest, ..) = others(&host(Fault::None));
    for lie in [
        Lie::NeedsAll,
        Lie::NeedsNothing,
        Lie::Contradicts,
        Lie::Noise,
    ] {
        let (refaults, swapped, kills) = others(&host(Fault::Lies(lie)));
        assert!(
            refaults <= honest * 1.1 + 64.0 * MIB,
            "{lie:?}: the others read {:.0} MiB again, {:.0} MiB beside an honest VM",
            refaults / MIB,
            honest / MIB
        );
        assert!(swapped == 0.0, "{lie:?}: the others swapped");
        assert_eq!(kills, 0, "{lie:?}: the host killed a VM");
    }
}

#[test]
fn guests_that_are_silent_or_contradict_themselves_keep_their_size_and_words_say_so() {
    let cases: [(Fault, &str); 3] = [
        (Fault::Silent, "never reported"),
        (Fault::Lies(Lie::Contradicts), "more than all of its memory"),
        (Fault::Lies(Lie::Noise), "more than all of its memory"),
    ];
    for (fault, words) in cases {
        let mut vm = idle_then(HOUR, Vec::new());
        vm.fault = fault;
        let mut host = ModelHost::new(&HostSpec::for_vms(vec![vm], 1.4), Arm::Memfold);
        while host.time() < HOUR {
            host.tick(1.0);
            let decided = &host.decision.as_ref().expect("a decision").vms[0];
            assert_eq!(decided.order, None, "{fault:?}");
            let said = decided.reason.to_string();
            assert!(said.contains(words), "{fault:?}: '{said}'");
        }
    }
}

#[test]
fn a_guest_whose_agent_was_killed_or_that_stands_still_keeps_its_size_until_it_reports_again() {
    for (fault, until) in [
        (Fault::AgentKilled(1000), 3000.0),
        (Fault::Frozen(1000, 2000), 1990.0),
    ] {
        let mut vm = idle_then(HOUR, Vec::new());
        vm.fault = fault;
        let mut host = ModelHost::new(&HostSpec::for_vms(vec![vm], 1.0), Arm::Memfold);
        run(&mut host, 1020.0, 1.0);
        while host.time() < until {
            host.tick(1.0);
            let decided = &host.decision.as_ref().expect("a decision").vms[0];
            assert_eq!(decided.order, None, "{fault:?}");
            assert!(matches!(decided.reason, Reason::Silent { .. }), "{fault:?}");
        }
        run(&mut host, 3500.0, 1.0);
        let decision = host.decision.as_ref().expect("a decision");
        let is_silent = matches!(decision.vms[0].reason, Reason::Silent { .. });
        assert_eq!(is_silent, fault == Fault::AgentKilled(1000), "{fault:?}");
    }
}

#[test]
fn no_fault_of_a_guest_and_no_jump_of_the_clock_kills_what_a_fixed_size_would_have_spared() {
    let leak = Phase {
        leak: 0.4 * MIB,
        ..phase(2.0 * HOUR, 500.0 * MIB, 0)
    };
    let busy = phase(HOUR, 1.2 * GIB, 1);
    let vm = idle_then(HOUR, vec![busy, leak, phase(HOUR, 1.5 * GIB, 0)]);
    let faults = [
        Fault::None,
        Fault::AgentKilled(5000),
        Fault::Frozen(5000, 5600),
        Fault::NoBalloonDriver,
        Fault::TrimsNothing,
        Fault::Unplugged(5000),
        Fault::Reboots(5000),
    ];
    for fault in faults {
        for jump in [None, Some((4000, -3600)), Some((4000, 3600))] {
            for source in [Source::Agent { trims: true }, Source::BalloonStats] {
                let mut vm = vm.clone();
                vm.fault = fault;
                vm.source = source;
                vm.virtio_mem_max = GIB;
                vm.limits.max.0 += 1 << 30;
                let mut spec = HostSpec::for_vms(vec![vm.clone(), vm], 1.2);
                spec.clock_jump = jump;
                let fixed = simulate(&spec, Arm::Fixed, 6.0 * HOUR);
                let memfold = simulate(&spec, Arm::Memfold, 6.0 * HOUR);
                assert!(
                    memfold.kills() <= fixed.kills(),
                    "{fault:?}, {jump:?}, {source:?}: {} kills, {} with fixed sizes",
                    memfold.kills(),
                    fixed.kills()
                );
            }
        }
    }
}

#[test]
fn trims_that_have_no_effect_become_rare_and_words_say_so() {
    let mut vm = idle_then(3.0 * HOUR, Vec::new());
    vm.fault = Fault::TrimsNothing;
    let mut host = ModelHost::new(&HostSpec::for_vms(vec![vm], 1.0), Arm::Memfold);
    run(&mut host, HOUR, 1.0);
    let orders = |host: &ModelHost| host.outcome().orders[0];
    let before = orders(&host);
    let mut said = false;
    while host.time() < 2.0 * HOUR {
        host.tick(1.0);
        let reason = host.decision.as_ref().expect("a decision").vms[0].reason;
        said |= matches!(reason, Reason::Ineffective { .. });
    }
    assert!(said);
    let later = orders(&host) - before;
    assert!(later <= 5, "{later} trims in an hour");
}
