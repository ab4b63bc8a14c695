//! Single decisions of the controller, from signals that the tests write down.

use std::time::Duration;

use memfold_rightsize::{
    Action, Balloon, Controller, Decision, GuestSignals, HostState, Limits, Policy, PressureTotals,
    Reason, Rung, Signals, Source, VirtioMem, VmId,
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

fn first_order(vms: &[Vm], host: HostState, seconds: u64) -> Option<(usize, Action, Reason)> {
    let mut controller = Controller::new(Policy::default());
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
    let mut carried_out = Controller::new(Policy::default());
    let mut seen = Vec::new();
    let ample = host(20_000);
    steps(&mut carried_out, 1..60, ample, &vms, |_, decision| {
        seen.push(decision.vms[0].reason);
    });
    // The model's page cache does not change, so the order had no effect.
    let ineffective = |reason: &Reason| matches!(reason, Reason::Ineffective { .. });
    assert!(seen.iter().any(ineffective));

    let mut only_shown = Controller::new(Policy::default());
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
fn lent_ram_is_called_back_only_after_trims_and_balloons_were_tried() {
    let vms = [Vm::without_agent(1000, 2900)];
    let mut controller = Controller::new(Policy::default());
    let mut short = host(1500);
    short.lent = ByteSize::mib(4096);
    let mut rungs = Vec::new();
    steps(&mut controller, 1..60, short, &vms, |_, decision| {
        let lent = decision.recall_lent;
        assert_eq!(lent.0 > 0, decision.rung >= Rung::Lent);
        if rungs.last() != Some(&decision.rung) {
            rungs.push(decision.rung);
        }
    });
    assert_eq!(rungs, [Rung::Trim, Rung::Balloon, Rung::Lent]);
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
