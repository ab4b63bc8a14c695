//! Single decisions of the controller, from signals that the tests write down.

mod gives_and_takes;

use std::time::Duration;

use memfold_rightsize::{
    Action, Balloon, Controller, Decision, GuestSignals, HostState, Limits, Order, Policy,
    PressureTotals, Reason, Rung, Signals, Source, VirtioMem, VmDecision, VmId,
};
use memfold_units::ByteSize;

const MIB: u64 = 1 << 20;

/// A VM of 4 GiB with `used` MiB that cannot be reclaimed and `cached` MiB of page cache.
#[derive(Clone)]
struct Vm {
    limits: Limits,
    signals: Signals,
    used: u64,
    cached: u64,
}

impl Vm {
    fn new(used: u64, cached: u64) -> Self {
        let ram = ByteSize::mib(4096);
        let signals = Signals {
            at: Duration::ZERO,
            ram,
            balloon: Some(Balloon {
                held: ByteSize(0),
                deflate_on_oom: true,
            }),
            virtio_mem: None,
            keeps_freed_ram: false,
            reports_free_pages: true,
            folded_cache: ByteSize(0),
            source: Source::Agent { trims: true },
            guest: None,
        };
        Self {
            limits: Limits::of_vm(ram, ByteSize::mib(8192)),
            signals,
            used,
            cached,
        }
    }

    fn without_agent(used: u64, cached: u64) -> Self {
        let mut vm = Self::new(used, cached);
        vm.signals.source = Source::BalloonStats;
        vm
    }

    fn report(&self, now: u64) -> Signals {
        let mut signals = self.signals.clone();
        let now = Duration::from_secs(now);
        signals.at = now;
        let size = signals.size().0 / MIB;
        let free = size.saturating_sub(self.used + self.cached);
        signals.guest = Some(GuestSignals {
            uptime: now,
            total: signals.installed(),
            free: ByteSize::mib(free),
            available: ByteSize::mib(size.saturating_sub(self.used)),
            anonymous: ByteSize::mib(self.used / 2),
            file_cache: ByteSize::mib(self.cached),
            pressure: Some(PressureTotals::default()),
            workingset_refault_file: Some(0),
            ..GuestSignals::default()
        });
        signals
    }
}

fn host(available_mib: u64) -> HostState {
    HostState {
        available: ByteSize::mib(available_mib),
        reserve: ByteSize::mib(2048),
        ..HostState::default()
    }
}

/// Steps once a second until `until`, with guests whose memory never changes. `see` gets each
/// decision.
fn steps(
    controller: &mut Controller,
    seconds: std::ops::Range<u64>,
    host: HostState,
    vms: &[Vm],
    mut see: impl FnMut(u64, &Decision),
) {
    for second in seconds {
        let input: Vec<_> = (0..)
            .map(VmId)
            .zip(vms)
            .map(|(id, vm)| (id, vm.limits, vm.report(second)))
            .collect();
        let decision = controller.step(Duration::from_secs(second), host, &input);
        see(second, &decision);
    }
}

/// The default settings, but for guests that have booted long ago.
fn policy() -> Policy {
    Policy {
        young: Duration::ZERO,
        ..Policy::default()
    }
}

fn first_order(vms: &[Vm], host: HostState, seconds: u64) -> Option<(usize, Action, Reason)> {
    let mut controller = Controller::new(policy());
    let mut found = None;
    steps(&mut controller, 1..seconds, host, vms, |_, decision| {
        let ordered = decision.vms.iter().enumerate();
        let mut orders = ordered.filter_map(|(index, vm)| Some((index, vm.order?, vm.reason)));
        if let (None, Some((index, order, reason))) = (found, orders.next()) {
            found = Some((index, order.action, reason));
        }
    });
    found
}

#[test]
fn the_first_trim_is_small_and_takes_no_folded_page_cache() {
    let vm = Vm::new(1000, 2000);
    let (_, action, reason) =
        first_order(std::slice::from_ref(&vm), host(20_000), 10).expect("a trim");
    // 0.25 % of 3000 MiB in use are less than the smallest trim.
    assert_eq!(
        action,
        Action::Trim {
            bytes: ByteSize::mib(8),
            may_drop_folded: false
        }
    );
    assert_eq!(
        reason.to_string(),
        "the guest has not missed page cache that was trimmed, so 8.00 MiB more are trimmed"
    );
    let mut folded = vm;
    folded.signals.folded_cache = ByteSize::mib(1996);
    assert_eq!(first_order(&[folded], host(20_000), 100), None);
}

#[test]
fn a_pinned_vm_gets_no_order_even_on_a_short_host() {
    let mut vm = Vm::without_agent(1000, 2900);
    assert!(first_order(std::slice::from_ref(&vm), host(1000), 100).is_some());
    vm.limits.pinned = true;
    assert_eq!(first_order(&[vm], host(1000), 100), None);
}

#[test]
fn of_two_equal_vms_the_one_with_less_priority_gives_first() {
    let mut vms = [Vm::without_agent(1000, 2900), Vm::without_agent(1000, 2900)];
    vms[0].limits.priority = 200;
    // 60 MiB are missing, which one VM can give alone.
    let mut slightly_short = host(190);
    slightly_short.reserve = ByteSize::mib(200);
    let (index, action, reason) = first_order(&vms, slightly_short, 100).expect("a balloon");
    assert_eq!(index, 1);
    assert!(matches!(action, Action::Balloon { .. }), "{action:?}");
    assert!(matches!(reason, Reason::HostShort { .. }), "{reason}");
}

#[test]
fn an_order_that_was_discarded_is_given_again_and_its_effect_is_not_expected() {
    let vms = [Vm::new(1000, 2000)];
    let mut carried_out = Controller::new(policy());
    let mut seen = Vec::new();
    let ample = host(20_000);
    steps(&mut carried_out, 1..60, ample, &vms, |_, decision| {
        seen.push(decision.vms[0].reason);
    });
    // The model's page cache does not change, so the order had no effect.
    let ineffective = |reason: &Reason| matches!(reason, Reason::Ineffective { .. });
    assert!(seen.iter().any(ineffective));

    let mut only_shown = Controller::new(policy());
    let mut orders = 0;
    for second in 1..60 {
        let input = [(VmId(0), vms[0].limits, vms[0].report(second))];
        let decision = only_shown.step(Duration::from_secs(second), ample, &input);
        assert!(!ineffective(&decision.vms[0].reason));
        orders += usize::from(decision.vms[0].order.is_some());
        only_shown.discard_order(VmId(0));
    }
    assert!(orders > 50, "{orders} orders were shown");
}

#[test]
fn a_guest_that_lacks_memory_gets_it_at_once_and_within_what_the_host_has() {
    let mut vm = Vm::new(2700, 100);
    vm.signals.balloon = Some(Balloon {
        held: ByteSize::mib(1200),
        deflate_on_oom: true,
    });
    // 2896 MiB are left, and 2800 MiB and 20 % are needed.
    let vms = [vm];
    let (_, action, reason) = first_order(&vms, host(20_000), 3).expect("a give");
    assert_eq!(
        action,
        Action::Balloon {
            target: ByteSize::mib(3360)
        }
    );
    assert!(matches!(reason, Reason::GiveNeeded { .. }), "{reason}");
    let (_, action, _) = first_order(&vms, host(512 + 100), 3).expect("a give");
    assert_eq!(
        action,
        Action::Balloon {
            target: ByteSize::mib(2996)
        }
    );
    assert_eq!(first_order(&vms, host(512), 3), None);
}

#[test]
fn a_guest_about_to_lose_a_process_gets_memory_from_the_last_quarter_of_the_reserve() {
    let mut vm = Vm::new(2850, 0);
    vm.signals.balloon = Some(Balloon {
        held: ByteSize::mib(1200),
        deflate_on_oom: true,
    });
    let (_, action, _) = first_order(&[vm], host(300), 3).expect("a give");
    let Action::Balloon { target } = action else {
        panic!("{action:?} is no balloon");
    };
    assert_eq!(target, ByteSize::mib(2896 + 300));
}

#[test]
fn memory_is_plugged_in_whole_blocks_when_short_and_unplugged_after_ten_idle_minutes() {
    let block = ByteSize::mib(128);
    let device = |plugged| VirtioMem {
        plugged: ByteSize::mib(plugged),
        max: ByteSize::mib(4096),
        block,
        has_driver: true,
    };
    let mut short = Vm::new(3900, 100);
    short.signals.virtio_mem = Some(device(0));
    let (_, action, _) = first_order(&[short], host(20_000), 3).expect("a plug");
    // 4000 MiB and 20 % are 4800 MiB: 704 MiB are missing, which are six blocks.
    assert_eq!(
        action,
        Action::Plug {
            bytes: ByteSize::mib(768)
        }
    );

    let mut idle = Vm::new(1000, 4);
    idle.signals.virtio_mem = Some(device(2048));
    let vms = [idle];
    assert_eq!(first_order(&vms, host(20_000), 600), None);
    let (_, action, reason) = first_order(&vms, host(20_000), 620).expect("an unplug");
    assert_eq!(
        action,
        Action::Unplug {
            bytes: ByteSize::mib(512)
        }
    );
    assert!(matches!(reason, Reason::IdleMemory { .. }));
}

#[test]
fn trims_between_gives_do_not_delay_the_unplugging_of_idle_memory() {
    let mut controller = Controller::new(policy());
    let (mut plugged, mut trims, mut unplugged_at, mut cached) = (0, 0, None, 0);
    for second in 1..1200 {
        // The guest needs more at 20, 60, 100, ... s, and is trimmed in between.
        let used = if second < 300 {
            3000 + second / 40 * 250
        } else {
            1000
        };
        if second < 300 && second % 40 == 0 {
            cached = 300;
        }
        let mut vm = Vm::new(used, cached);
        vm.signals.virtio_mem = Some(VirtioMem {
            plugged: ByteSize::mib(plugged),
            max: ByteSize::mib(4096),
            block: ByteSize::mib(128),
            has_driver: true,
        });
        let input = [(VmId(1), vm.limits, vm.report(second))];
        let decision = controller.step(Duration::from_secs(second), host(20_000), &input);
        match decision.vms[0].order.map(|order| order.action) {
            Some(Action::Plug { bytes }) => plugged += bytes.0 / MIB,
            Some(Action::Trim { bytes, .. }) => {
                trims += 1;
                cached -= cached.min(bytes.0 / MIB);
            }
            Some(Action::Unplug { .. }) => {
                unplugged_at.get_or_insert(second);
            }
            _ => {}
        }
    }
    assert!(plugged > 1000 && trims > 3, "{plugged} MiB, {trims} trims");
    // Ten minutes of idleness, and not the longer rest after gives.
    let at = unplugged_at.expect("an unplug");
    assert!((890..=930).contains(&at), "{at}");
}

#[test]
fn a_short_guest_without_a_driver_for_plugged_memory_gets_no_order_and_words_say_what_it_needs() {
    let mut short = Vm::new(4000, 0);
    short.limits.max = ByteSize::mib(4500);
    short.signals.virtio_mem = Some(VirtioMem {
        plugged: ByteSize(0),
        max: ByteSize::mib(4096),
        block: ByteSize::mib(2),
        has_driver: false,
    });
    let vms = [short];
    assert_eq!(first_order(&vms, host(20_000), 60), None);
    let mut controller = Controller::new(Policy::default());
    let mut said = None;
    steps(&mut controller, 1..4, host(20_000), &vms, |_, decision| {
        said = Some(decision.vms[0].reason);
    });
    // The maximum allows 404 MiB more than the VM's 4096 MiB.
    let needs = ByteSize::mib(404);
    assert_eq!(said, Some(Reason::NoPlugDriver { needs }));
}

#[test]
fn lent_ram_is_called_back_only_after_trims_and_balloons_were_tried() {
    let vms = [Vm::without_agent(1000, 2900)];
    let mut controller = Controller::new(Policy::default());
    let mut short = host(1500);
    (short.lent, short.recalls_lent) = (ByteSize::mib(4096), true);
    let mut rungs = Vec::new();
    steps(&mut controller, 1..60, short, &vms, |_, decision| {
        let lent = decision.recall_lent;
        assert_eq!(lent.0 > 0, decision.rung >= Rung::Lent);
        if rungs.last() != Some(&decision.rung) {
            rungs.push(decision.rung);
        }
    });
    // The model's lent RAM does not come back.
    assert_eq!(rungs, [Rung::Trim, Rung::Balloon, Rung::Lent, Rung::Brake]);
}

#[test]
fn an_old_report_counts_as_silence() {
    let vm = Vm::new(1000, 2000);
    let mut controller = Controller::new(Policy::default());
    let mut said = Vec::new();
    for second in 1..40 {
        let report = vm.report(second.min(10));
        let input = [(VmId(7), vm.limits, report)];
        let decision = controller.step(Duration::from_secs(second), host(20_000), &input);
        said.push(decision.vms[0].reason.to_string());
    }
    assert_eq!(
        said.last().map(String::as_str),
        Some("the guest has not reported for 29 s, so the VM keeps its size")
    );
}

#[test]
fn a_guest_that_may_still_boot_is_trimmed_only_if_the_host_is_short() {
    let trims = |host| {
        let mut first = None;
        let mut said = Vec::new();
        let mut controller = Controller::new(Policy::default());
        let vms = [Vm::new(1000, 2000)];
        steps(&mut controller, 1..90, host, &vms, |second, decision| {
            let is_trim =
                |order: memfold_rightsize::Order| matches!(order.action, Action::Trim { .. });
            if decision.vms[0].order.is_some_and(is_trim) {
                first.get_or_insert(second);
            }
            said.push(decision.vms[0].reason.to_string());
        });
        (first.expect("a trim"), said)
    };
    let (first, said) = trims(host(20_000));
    assert_eq!(first, 61);
    let words = "the guest may still boot, so nothing is trimmed for 50 s";
    assert!(said.iter().any(|text| text == words), "{said:?}");
    let (first, _) = trims(host(700));
    assert!(first < 10, "{first}");
}

#[test]
fn a_guest_that_booted_again_is_estimated_anew() {
    let vm = Vm::new(1000, 2000);
    let mut controller = Controller::new(Policy::default());
    let mut step = |now: u64, uptime: u64| {
        let mut report = vm.report(now);
        if let Some(guest) = &mut report.guest {
            guest.uptime = Duration::from_secs(uptime);
        }
        let input = [(VmId(1), vm.limits, report)];
        controller
            .step(Duration::from_secs(now), host(20_000), &input)
            .vms[0]
            .reason
    };
    assert_eq!(step(100, 5000), Reason::FirstReport);
    step(102, 5002);
    assert_eq!(step(104, 3), Reason::Restarted);
}

#[test]
fn a_guest_whose_counters_begin_again_is_estimated_anew_although_the_time_of_its_reports_goes_on() {
    let mut squeezed = Vm::new(2700, 100);
    squeezed.signals.balloon = Some(Balloon {
        held: ByteSize::mib(1200),
        deflate_on_oom: true,
    });
    let mut controller = Controller::new(policy());
    let mut step = |now: u64, refaults: u64| {
        let mut report = squeezed.report(now);
        if let Some(guest) = &mut report.guest {
            guest.workingset_refault_file = Some(refaults);
        }
        let input = [(VmId(1), squeezed.limits, report)];
        let decision = controller.step(Duration::from_secs(now), host(512), &input);
        decision.vms[0].reason
    };
    step(100, 5000);
    step(102, 5000);
    assert_eq!(step(104, 3), Reason::Restarted);
    // The host has nothing left for it, but it would get it.
    let needs = ByteSize::mib(464);
    let left = ByteSize(0);
    assert_eq!(step(106, 3), Reason::HostExhausted { needs, left });
    // A guest that says so all the time keeps its size.
    for turn in 0..10 {
        let reason = step(108 + turn, 1000 - turn);
        assert!(turn == 0 || reason == Reason::Restarted, "{reason}");
    }
}

/// Looks at a VM whose balloon holds so many MiB now, and held `then` MiB when its report was made.
fn look(
    controller: &mut Controller,
    vm: &Vm,
    (now, held): (u64, u64),
    (made, then): (u64, u64),
) -> VmDecision {
    let balloon = |mib| Balloon {
        held: ByteSize::mib(mib),
        deflate_on_oom: true,
    };
    let mut vm = vm.clone();
    vm.signals.balloon = Some(balloon(then));
    let mut signals = vm.report(made);
    signals.balloon = Some(balloon(held));
    let input = [(VmId(1), vm.limits, signals)];
    let decision = controller.step(Duration::from_secs(now), host(20_000), &input);
    decision.vms[0].clone()
}

#[test]
fn a_report_from_before_the_balloon_moved_counts_for_the_size_that_the_vm_has_now() {
    let vm = Vm::without_agent(1000, 500);
    let mut controller = Controller::new(policy());
    for second in [8, 10] {
        look(&mut controller, &vm, (second, 0), (second, 0));
    }
    // A half of the page cache counts as needed.
    for (now, held) in [(12, 1500), (14, 2300), (16, 2500)] {
        let decided = look(&mut controller, &vm, (now, held), (11, 0));
        assert_eq!(decided.working_set, ByteSize::mib(1250), "{decided:?}");
        assert_eq!(decided.order, None, "{decided:?}");
    }
}

#[test]
fn memory_is_not_given_twice_because_of_one_report() {
    let vm = Vm::new(2700, 100);
    let mut controller = Controller::new(policy());
    let step = |controller: &mut Controller, now, held, made| {
        look(controller, &vm, (now, held), (made, 1200)).order
    };
    step(&mut controller, 8, 1200, 8);
    let given = step(&mut controller, 10, 1200, 10).expect("a give");
    assert_eq!(given.bytes, ByteSize::mib(464));
    // The last report may be from before or after the balloon gave the memory back.
    for (now, held, made) in [(12, 736, 10), (14, 736, 10), (18, 736, 10), (20, 0, 19)] {
        let order = step(&mut controller, now, held, made);
        let is_trim = |order: Order| matches!(order.action, Action::Trim { .. });
        assert!(order.is_none_or(is_trim), "at {now} s: {order:?}");
    }
}

#[test]
fn a_vm_that_is_left_out_of_a_step_and_kept_still_rests_after_a_give_and_is_not_estimated_anew() {
    let mut squeezed = Vm::without_agent(2700, 100);
    squeezed.signals.balloon = Some(Balloon {
        held: ByteSize::mib(1200),
        deflate_on_oom: true,
    });
    // Afterwards the guest has much page cache, of which a balloon could take a half.
    let calm = Vm::without_agent(500, 3000);
    let takes_after_absence = |keep: bool| {
        let mut controller = Controller::new(policy());
        let step = |controller: &mut Controller, second, host, vm: &Vm| {
            let input = [(VmId(1), vm.limits, vm.report(second))];
            let decision = controller.step(Duration::from_secs(second), host, &input);
            decision.vms[0].clone()
        };
        step(&mut controller, 1, host(20_000), &squeezed);
        let given = step(&mut controller, 2, host(20_000), &squeezed);
        assert!(given.order.is_some(), "{}", given.reason);
        step(&mut controller, 3, host(20_000), &calm);
        if keep {
            controller.keep(VmId(1));
        }
        controller.step(Duration::from_secs(5), host(20_000), &[]);
        let after = step(&mut controller, 7, host(1500), &calm);
        assert_eq!(
            after.reason == Reason::FirstReport,
            !keep,
            "{}",
            after.reason
        );
        let mut took = |second| {
            step(&mut controller, second, host(1500), &calm)
                .order
                .is_some()
        };
        (8..60).any(&mut took)
    };
    assert!(takes_after_absence(false));
    assert!(!takes_after_absence(true));
}
