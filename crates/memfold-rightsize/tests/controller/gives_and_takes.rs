//! What one order means for the next ones: gives, takes, failures and rests.

use super::*;

#[test]
fn no_balloon_takes_memory_from_a_guest_whose_page_cache_is_folded() {
    let mut vm = Vm::without_agent(1000, 2900);
    let short = host(1000);
    // A half of the page cache and the buffer stay.
    assert!(first_order(std::slice::from_ref(&vm), short, 100).is_some());
    vm.signals.folded_cache = ByteSize::mib(2800);
    assert_eq!(first_order(&[vm.clone()], short, 100), None);
    // The other VM is asked for all of what is missing.
    let vms = [vm, Vm::without_agent(1000, 2900)];
    let (index, ..) = first_order(&vms, short, 100).expect("a balloon");
    assert_eq!(index, 1);
}

#[test]
fn free_memory_of_a_guest_counts_as_a_gain_of_its_balloon_if_the_guest_does_not_report_it() {
    for source in [Source::Agent { trims: false }, Source::BalloonStats] {
        // 3396 MiB are free. The minimum is 1024 MiB, and the host lacks 1560 MiB.
        let mut vm = Vm::new(600, 100);
        vm.signals.source = source;
        let short = host(1000);
        assert_eq!(first_order(&[vm.clone()], short, 100), None);
        vm.signals.reports_free_pages = false;
        let (_, action, _) = first_order(&[vm], short, 100).expect("a balloon");
        let target = ByteSize::mib(4096 - 1560);
        assert_eq!(action, Action::Balloon { target });
    }
}

/// Steps at 10, 12, ... s with reports that were made so many seconds, and looks at the VM's
/// balloon, which holds so many MiB. `swapped`: pages that the guest had swapped out at the report.
/// Returns the gives.
fn gives(vm: &Vm, steps: &[(u64, u64, u64)]) -> Vec<(u64, u64)> {
    let mut controller = Controller::new(policy());
    let mut gives = Vec::new();
    for (now, &(made, held, swapped)) in (10..).step_by(2).zip(steps) {
        let mut vm = vm.clone();
        vm.signals.balloon = Some(Balloon {
            held: ByteSize::mib(1200),
            deflate_on_oom: true,
        });
        let mut signals = vm.report(made);
        signals.balloon = Some(Balloon {
            held: ByteSize::mib(held),
            deflate_on_oom: true,
        });
        if let Some(guest) = &mut signals.guest {
            guest.pswpout = Some(swapped);
        }
        let input = [(VmId(1), vm.limits, signals)];
        let decision = controller.step(Duration::from_secs(now), host(20_000), &input);
        let order = decision.vms[0].order;
        let give = order.filter(|order| order.is_give(decision.vms[0].size));
        gives.extend(give.map(|give| (now, give.bytes.0 / MIB)));
    }
    gives
}

#[test]
fn a_vm_that_is_smaller_than_its_minimum_is_given_memory_and_words_name_the_minimum() {
    let mut vm = Vm::new(1000, 200);
    vm.limits.min = ByteSize::mib(3000);
    vm.signals.balloon = Some(Balloon {
        held: ByteSize::mib(1296),
        deflate_on_oom: true,
    });
    let (_, action, reason) = first_order(&[vm], host(20_000), 3).expect("a give");
    let target = ByteSize::mib(3000);
    assert_eq!(action, Action::Balloon { target });
    assert_eq!(
        reason.to_string(),
        "the VM is smaller than its minimum, so it gets 200 MiB"
    );
}

#[test]
fn one_report_of_a_guest_that_lacks_memory_leads_to_one_give() {
    // The guest swaps, and has little available memory.
    let vm = Vm::without_agent(2300, 100);
    let steps = [
        (9, 1200, 0),
        (11, 1200, 5000),
        // The balloon has given the memory back, and the guest has not reported since.
        (11, 838, 5000),
        (11, 838, 5000),
        (11, 838, 5000),
        // A report of the larger guest, which still swaps.
        (19, 838, 9000),
        (21, 838, 9000),
    ];
    assert_eq!(gives(&vm, &steps), [(12, 362), (20, 407)]);
}

#[test]
fn one_page_that_a_guest_with_available_memory_swaps_out_leads_to_no_give() {
    let vm = Vm::without_agent(1000, 1000);
    let steps = |pages: u64| [(9, 1200, 0), (11, 1200, pages), (13, 1200, pages)];
    assert_eq!(gives(&vm, &steps(1)), []);
    // 2 MiB in two seconds are a real shortage.
    assert_eq!(gives(&vm, &steps(512)), [(12, 362)]);
    // So is one page if less than a quarter of the memory is available.
    assert_eq!(gives(&Vm::without_agent(2300, 100), &steps(1)), [(12, 362)]);
}

/// Steps with a VM whose balloon follows the orders, each second of `seconds`, and returns the
/// orders that moved it, as (second, MiB that the guest gained).
fn balloon_moves(
    controller: &mut Controller,
    vm: &mut Vm,
    seconds: std::ops::Range<u64>,
    host: HostState,
) -> Vec<(u64, i64)> {
    let mut moves = Vec::new();
    for second in seconds {
        let input = [(VmId(1), vm.limits, vm.report(second))];
        let decision = controller.step(Duration::from_secs(second), host, &input);
        let size = decision.vms[0].size.0;
        if let Some(Action::Balloon { target }) = decision.vms[0].order.map(|order| order.action) {
            let mib = |bytes: u64| i64::try_from(bytes / MIB).expect("a size");
            moves.push((second, mib(target.0) - mib(size)));
            let balloon = vm.signals.balloon.as_mut().expect("a balloon");
            balloon.held.0 = vm.signals.ram.0 - target.0;
        }
    }
    moves
}

#[test]
fn memory_that_a_vm_gets_back_without_need_does_not_delay_the_next_take() {
    let mut vm = Vm::without_agent(1000, 1000);
    let mut controller = Controller::new(policy());
    let takes = balloon_moves(&mut controller, &mut vm, 1..60, host(500));
    assert!(takes.iter().all(|(_, gained)| *gained < 0), "{takes:?}");
    // The host has room for ten minutes, and gives everything back.
    let backs = balloon_moves(&mut controller, &mut vm, 60..2500, host(20_000));
    let held = vm.signals.balloon.expect("a balloon").held;
    assert!(!backs.is_empty() && held.0 == 0, "{backs:?}, {held} held");
    let again = balloon_moves(&mut controller, &mut vm, 2500..2530, host(500));
    assert!(
        again.first().is_some_and(|(_, gained)| *gained < 0),
        "{again:?}"
    );
    // A give that the guest needs still begins a rest of five minutes.
    vm.used = vm.signals.size().0 / MIB - 50;
    vm.cached = 0;
    let given = balloon_moves(&mut controller, &mut vm, 2530..2540, host(20_000));
    assert!(
        given.iter().all(|(_, gained)| *gained > 0) && !given.is_empty(),
        "{given:?}"
    );
    (vm.used, vm.cached) = (1000, 1000);
    let rested = balloon_moves(&mut controller, &mut vm, 2540..2800, host(500));
    assert_eq!(rested, []);
}

#[test]
fn a_vm_that_rests_after_a_give_does_not_keep_the_host_from_calling_lent_ram_back() {
    let mut vm = Vm::without_agent(1500, 0);
    vm.signals.balloon = Some(Balloon {
        held: ByteSize::mib(2400),
        deflate_on_oom: true,
    });
    let mut controller = Controller::new(policy());
    let given = balloon_moves(&mut controller, &mut vm, 1..3, host(20_000));
    assert!(
        given.first().is_some_and(|(_, gained)| *gained > 0),
        "{given:?}"
    );
    // The guest could do without page cache now, but its balloon rests for five minutes.
    vm.used = 300;
    vm.cached = 1300;
    let mut short = host(1500);
    short.lent = ByteSize::mib(4096);
    let mut seen = Vec::new();
    for second in 3..20 {
        let input = [(VmId(1), vm.limits, vm.report(second))];
        let decision = controller.step(Duration::from_secs(second), short, &input);
        seen.push((decision.rung, decision.vms[0].reason));
    }
    let first_lent = seen.iter().position(|(rung, _)| *rung == Rung::Lent);
    assert_eq!(first_lent, Some(2), "{seen:?}");
    let (_, reason) = seen[10];
    assert!(matches!(reason, Reason::Waiting { .. }), "{reason}");
}

/// Steps with two VMs without agents on a short host. `end` says what became of the first one's
/// orders, `delay` steps after each. Returns the seconds at which each VM got an order.
fn seconds_of_orders(delay: u64, end: impl Fn(&mut Controller, VmId)) -> [Vec<u64>; 2] {
    let mut vms = [Vm::without_agent(1000, 2900), Vm::without_agent(1000, 2900)];
    vms[1].limits.priority = 200;
    let mut slightly_short = host(190);
    slightly_short.reserve = ByteSize::mib(200);
    let mut controller = Controller::new(policy());
    let mut orders = [Vec::new(), Vec::new()];
    for second in 1..150 {
        if orders[0].last().is_some_and(|at| at + delay == second) {
            end(&mut controller, VmId(0));
        }
        let input = [0, 1].map(|vm| {
            let limits = vms[vm].limits;
            (VmId(vm as u64), limits, vms[vm].report(second))
        });
        let decision = controller.step(Duration::from_secs(second), slightly_short, &input);
        for (vm, decided) in decision.vms.iter().enumerate() {
            if decided.order.is_some() {
                orders[vm].push(second);
            }
        }
    }
    orders
}

#[test]
fn after_a_take_that_failed_the_vm_rests_longer_each_time_and_another_vm_is_asked() {
    for delay in [1, 3] {
        let [failing, other] = seconds_of_orders(delay, Controller::order_failed);
        let first = failing[0];
        // 60 s after the first failure, and 120 s after the second one.
        let is_next = |from: u64, to: u64| (from + 60..from + 80).contains(&to);
        assert!(
            failing.len() == 2 && is_next(first, failing[1]),
            "{failing:?}"
        );
        let soon = first..=first + delay + 1;
        assert!(
            other.iter().any(|at| soon.contains(at)),
            "{first}: {other:?}"
        );
    }
}

#[test]
fn a_postponed_take_comes_at_least_five_seconds_later_and_another_vm_is_asked_meanwhile() {
    let [postponed, other] = seconds_of_orders(1, Controller::postpone_order);
    let waits: Vec<u64> = postponed.windows(2).map(|two| two[1] - two[0]).collect();
    assert!(waits.len() > 10, "{postponed:?}");
    assert!(
        waits.iter().all(|wait| (5..10).contains(wait)),
        "{postponed:?}"
    );
    let first = postponed[0];
    assert!(other.contains(&(first + 1)), "{first}: {other:?}");
}

#[test]
fn a_vm_whose_takes_are_all_postponed_does_not_keep_the_host_from_the_last_rung() {
    let vm = Vm::without_agent(1000, 2900);
    let mut controller = Controller::new(policy());
    let mut rungs = Vec::new();
    for second in 1..60 {
        let input = [(VmId(1), vm.limits, vm.report(second))];
        let decision = controller.step(Duration::from_secs(second), host(1500), &input);
        controller.postpone_order(VmId(1));
        rungs.push(decision.rung);
    }
    assert!(rungs.contains(&Rung::Brake), "{rungs:?}");
}

#[test]
fn a_discarded_trim_does_not_change_the_working_set_that_follows_from_a_missed_trim_before_it() {
    let mut vm = Vm::new(1000, 2000);
    let mut controller = Controller::new(policy());
    let (mut begun, mut discarded) = (None, 0);
    let mut needed = None;
    for second in 1..40 {
        if begun.is_some_and(|at| at + 30 == second) {
            // The trim that began took 5 MiB.
            controller.trim_was_missed(VmId(1), ByteSize::mib(5));
        }
        let input = [(VmId(1), vm.limits, vm.report(second))];
        let decision = controller.step(Duration::from_secs(second), host(20_000), &input);
        needed = Some(decision.vms[0].working_set);
        if decision.vms[0].order.is_none() {
            continue;
        }
        if begun.is_none() {
            begun = Some(second);
            // The trim shows its effect; then the guest reads more files.
            vm.cached = 1990;
        } else {
            controller.discard_order(VmId(1));
            discarded += 1;
            vm.cached = 2600;
        }
    }
    assert!(discarded > 0);
    assert_eq!(needed, Some(ByteSize::mib(1000 + 1995)));
}

#[test]
fn a_host_with_a_few_pages_left_gives_them_only_to_a_guest_about_to_lose_a_process() {
    let squeezed = |used| {
        let mut vm = Vm::new(used, 0);
        vm.signals.balloon = Some(Balloon {
            held: ByteSize::mib(1200),
            deflate_on_oom: true,
        });
        [vm]
    };
    // 8 MiB more than a quarter of the reserve are available.
    assert_eq!(first_order(&squeezed(2700), host(512 + 8), 3), None);
    let mut almost_empty = host(8);
    almost_empty.reserve = ByteSize::mib(4);
    let (_, action, _) = first_order(&squeezed(2850), almost_empty, 3).expect("a give");
    let target = ByteSize::mib(2896 + 8);
    assert_eq!(action, Action::Balloon { target });
}

#[test]
fn a_vm_that_may_not_grow_by_a_whole_block_is_not_told_that_the_host_has_nothing_left() {
    let mut vm = Vm::new(4050, 0);
    vm.signals.virtio_mem = Some(VirtioMem {
        plugged: ByteSize(0),
        max: ByteSize::mib(2048),
        block: ByteSize::mib(128),
        has_driver: true,
    });
    let bytes = ByteSize::mib(128);
    vm.limits.max = ByteSize::mib(4096 + 128);
    let (_, action, _) = first_order(&[vm.clone()], host(20_000), 3).expect("a give");
    assert_eq!(action, Action::Plug { bytes });
    // Its OOM killer could run soon, but a block is more than the operator allows.
    vm.limits.max = ByteSize::mib(4096 + 64);
    let vms = [vm];
    let mut controller = Controller::new(policy());
    steps(&mut controller, 1..9, host(20_000), &vms, |second, step| {
        let decided = &step.vms[0];
        assert_eq!(decided.order, None, "at {second} s");
        let is_exhausted = matches!(decided.reason, Reason::HostExhausted { .. });
        assert!(!is_exhausted, "at {second} s: {}", decided.reason);
    });
}

/// Steps with two VMs. At second 2, the first one is given 404 MiB, and the host has 500 MiB to
/// give at any time. From second 4 on, the VMs use so many MiB that cannot be reclaimed. Returns
/// the gives to the second VM, as (second, MiB).
fn gives_after_another_give(host: HostState, used: [u64; 2]) -> Vec<(u64, u64)> {
    let mut squeezed = Vm::without_agent(2700, 100);
    squeezed.limits.max = ByteSize::mib(3300);
    squeezed.signals.balloon = Some(Balloon {
        held: ByteSize::mib(1200),
        deflate_on_oom: true,
    });
    let mut vms = [squeezed.clone(), squeezed];
    let mut controller = Controller::new(policy());
    let mut gives = [Vec::new(), Vec::new()];
    for second in 1..30 {
        [vms[0].used, vms[1].used] = if second < 4 { [2700, 1000] } else { used };
        let input = [0, 1].map(|vm| {
            let limits = vms[vm].limits;
            (VmId(vm as u64), limits, vms[vm].report(second))
        });
        let decision = controller.step(Duration::from_secs(second), host, &input);
        for (index, decided) in decision.vms.iter().enumerate() {
            let Some(order) = decided.order else { continue };
            assert!(order.is_give(decided.size), "at {second} s: {order:?}");
            gives[index].push((second, order.bytes.0 / MIB));
            let balloon = vms[index].signals.balloon.as_mut();
            balloon.expect("a balloon").held.0 -= order.bytes.0;
        }
    }
    let [first, second] = gives;
    assert_eq!(first, [(2, 404)]);
    second
}

#[test]
fn memory_that_a_vm_was_given_and_has_not_used_yet_is_not_given_to_another_one_for_20_s() {
    let mut roomy = host(501);
    roomy.reserve = ByteSize::mib(4);
    // Both need 404 MiB. The first one does not use them.
    let gives = gives_after_another_give(roomy, [2700, 2700]);
    assert_eq!(gives, [(4, 96), (22, 308)]);
    // The first one uses 400 MiB of them.
    assert_eq!(gives_after_another_give(roomy, [3100, 2700]), [(4, 404)]);
    // The second one could lose a process.
    let mut tight = host(1000);
    tight.reserve = ByteSize::mib(2000);
    assert_eq!(gives_after_another_give(tight, [2700, 2850]), [(4, 404)]);
}

#[test]
fn if_a_trim_ended_because_the_guest_missed_files_the_rest_counts_as_needed_and_probes_wait() {
    for delay in [1, 4] {
        let mut vm = Vm::new(1000, 2000);
        let mut controller = Controller::new(policy());
        let (mut trims, mut after) = (Vec::new(), Vec::new());
        for second in 1..110 {
            if trims.first().is_some_and(|at| at + delay == second) {
                // The trim took 5 of 8 MiB.
                controller.trim_was_missed(VmId(1), ByteSize::mib(5));
            }
            let input = [(VmId(1), vm.limits, vm.report(second))];
            let decision = controller.step(Duration::from_secs(second), host(20_000), &input);
            let decided = &decision.vms[0];
            if decided.order.is_some() {
                trims.push(second);
                vm.cached = 1995;
            }
            if trims.first().is_some_and(|at| at + delay <= second) {
                after.push(decided.working_set);
            }
        }
        assert_eq!(trims.len(), 1, "{trims:?}");
        let needed = ByteSize::mib(1000 + 1995);
        assert!(after.iter().all(|set| *set == needed), "{:?}", after[0]);
    }
}

#[test]
fn a_vm_whose_usual_step_is_larger_than_what_the_host_has_to_spare_gets_its_balloon_back_in_smaller_steps()
 {
    let ram = ByteSize::mib(64 << 10);
    let mut vm = Vm::without_agent(1000, 1000);
    vm.signals.ram = ram;
    vm.limits = Limits::of_vm(ram, ram);
    vm.signals.balloon = Some(Balloon {
        held: ByteSize::mib(2048),
        deflate_on_oom: true,
    });
    // A twentieth of the VM is 3 GiB. The host has 1 GiB more than one and a half of its reserve.
    let mut controller = Controller::new(policy());
    let moves = balloon_moves(&mut controller, &mut vm, 1..1500, host(4096));
    assert_eq!(moves.first().map(|(_, gained)| *gained), Some(512));
    assert_eq!(vm.signals.balloon.expect("a balloon").held, ByteSize(0));
}

#[test]
fn a_ballooned_vm_whose_guest_is_silent_or_not_believed_gets_its_memory_back_and_loses_nothing() {
    for lies in [false, true] {
        let mut vm = Vm::without_agent(1000, 1000);
        vm.signals.balloon = Some(Balloon {
            held: ByteSize::mib(1200),
            deflate_on_oom: true,
        });
        let mut controller = Controller::new(policy());
        let mut moves = Vec::new();
        for second in 1..2600 {
            let mut signals = vm.report(if lies { second } else { second.min(10) });
            if let (true, Some(guest)) = (lies && second > 10, &mut signals.guest) {
                guest.free = ByteSize(u64::MAX);
            }
            // The host has room, and then not even a quarter of its reserve.
            let host = host(if second < 2500 { 20_000 } else { 500 });
            let input = [(VmId(1), vm.limits, signals)];
            let decision = controller.step(Duration::from_secs(second), host, &input);
            let decided = &decision.vms[0];
            if second > 30 && decided.order.is_none() {
                let is_lie = matches!(decided.reason, Reason::Distrusted(_));
                let is_silent = matches!(decided.reason, Reason::Silent { .. });
                assert!(is_lie == lies && is_silent != lies, "{}", decided.reason);
            }
            let Some(order) = decided.order else { continue };
            let Action::Balloon { target } = order.action else {
                panic!("{order:?} moves no balloon");
            };
            assert!(target > decided.size, "at {second} s: {order:?}");
            assert!(matches!(decided.reason, Reason::GiveBack { .. }));
            moves.push(second);
            let balloon = vm.signals.balloon.as_mut().expect("a balloon");
            balloon.held.0 = vm.signals.ram.0 - target.0;
        }
        // After ten minutes of room, one step a minute.
        assert!(
            moves.first().is_some_and(|first| *first >= 600),
            "{moves:?}"
        );
        let mut pauses = moves.windows(2).map(|two| two[1] - two[0]);
        assert!(pauses.all(|pause| pause >= 60), "{moves:?}");
        let held = vm.signals.balloon.expect("a balloon").held;
        assert_eq!(held, ByteSize(0), "{moves:?}");
    }
}

#[test]
fn memory_that_was_given_back_and_taken_again_is_given_back_later_each_time() {
    let mut vm = Vm::without_agent(1000, 1000);
    let mut controller = Controller::new(policy());
    let mut waits = Vec::new();
    let mut from = 1;
    for _ in 0..3 {
        let takes = balloon_moves(&mut controller, &mut vm, from..from + 60, host(500));
        let (last_take, _) = *takes.last().expect("a take");
        let backs = balloon_moves(
            &mut controller,
            &mut vm,
            from + 60..from + 6000,
            host(20_000),
        );
        let (first_back, _) = *backs.first().expect("memory given back");
        waits.push(first_back - last_take);
        from += 6000;
    }
    // Ten minutes of room at first, then 20 and 40 minutes after the take.
    let expected = [600..760, 1200..1300, 2400..2500];
    let fits = waits
        .iter()
        .zip(&expected)
        .all(|(wait, range)| range.contains(wait));
    assert!(fits, "{waits:?}");
}

#[test]
fn nothing_is_taken_from_a_vm_whose_freed_memory_the_host_would_not_get_and_words_say_why() {
    for mut vm in [Vm::new(1000, 2900), Vm::without_agent(1000, 2900)] {
        let vms = std::slice::from_ref(&vm);
        assert!(first_order(vms, host(1000), 100).is_some());
        vm.signals.keeps_freed_ram = true;
        let vms = [vm];
        assert_eq!(first_order(&vms, host(1000), 100), None);
        let mut controller = Controller::new(policy());
        let mut said = None;
        steps(&mut controller, 1..9, host(1000), &vms, |_, decision| {
            said = Some(decision.vms[0].reason);
        });
        assert_eq!(said, Some(Reason::KeepsFreedRam));
    }
}

#[test]
fn an_unplug_that_is_not_done_at_once_or_whose_guest_is_busy_again_is_not_wanted_any_more() {
    let idle = |used| {
        let mut vm = Vm::new(used, 4);
        vm.signals.virtio_mem = Some(VirtioMem {
            plugged: ByteSize::mib(2048),
            max: ByteSize::mib(4096),
            block: ByteSize::mib(128),
            has_driver: true,
        });
        vm
    };
    for busy_again in [false, true] {
        let mut controller = Controller::new(policy());
        let mut ordered = None;
        let mut wanted = Vec::new();
        for second in 1..700 {
            let is_busy = busy_again && ordered.is_some_and(|at| second > at + 4);
            let vm = idle(if is_busy { 5000 } else { 1000 });
            let input = [(VmId(1), vm.limits, vm.report(second))];
            let decision = controller.step(Duration::from_secs(second), host(20_000), &input);
            let order = decision.vms[0].order.map(|order| order.action);
            if let (None, Some(Action::Unplug { .. })) = (ordered, order) {
                ordered = Some(second);
            }
            if controller.may_unplug(VmId(1)) {
                wanted.push(second - ordered.expect("an unplug"));
            }
        }
        // The guest unplugs nothing; after 20 s, or when it is busy, it keeps its memory.
        let until = if busy_again { 5 } else { 20 };
        assert!(wanted.iter().take(5).eq(&[0, 1, 2, 3, 4]), "{wanted:?}");
        assert_eq!(
            wanted.iter().filter(|at| **at < 60).count(),
            until,
            "{wanted:?}"
        );
    }
}
