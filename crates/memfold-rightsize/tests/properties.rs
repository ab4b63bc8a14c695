//! Properties that hold for any input: the controller is called with whatever a hostile guest, a
//! broken host or a wrong clock could send.

use std::time::Duration;

use memfold_rightsize::{
    Action, Balloon, BrakeLevel, Controller, Decision, GuestSignals, HostState, Limits, Policy,
    PressureTotals, Signals, Source, VirtioMem, VmId,
};
use memfold_units::ByteSize;
use proptest::prelude::*;
use proptest::sample::select;

/// Bytes or counts: often an edge, often a size that a VM can have.
fn amount() -> impl Strategy<Value = u64> {
    prop_oneof![
        1 => select(vec![0, 1, 4095, 4096, 1 << 27, u64::MAX - 1, u64::MAX]),
        1 => any::<u64>(),
        6 => (0_u64..16 << 30).prop_map(|bytes| bytes / 4096 * 4096),
    ]
}

fn size() -> impl Strategy<Value = ByteSize> {
    amount().prop_map(ByteSize)
}

fn time() -> impl Strategy<Value = Duration> {
    prop_oneof![
        1 => select(vec![Duration::ZERO, Duration::MAX]),
        6 => (0_u64..2000).prop_map(Duration::from_secs),
    ]
}

fn counter() -> impl Strategy<Value = Option<u64>> {
    proptest::option::of(amount())
}

prop_compose! {
    /// A report of which each figure is arbitrary.
    fn any_guest()(
        uptime in time(),
        sizes in proptest::array::uniform6(size()),
        pressure in proptest::option::of((amount(), amount())),
        counters in proptest::collection::vec(counter(), 10),
    ) -> GuestSignals {
        GuestSignals {
            uptime,
            total: sizes[0],
            free: sizes[1],
            available: sizes[2],
            dirty: sizes[3],
            anonymous: sizes[4],
            file_cache: sizes[5],
            pressure: pressure.map(|(some_us, full_us)| PressureTotals { some_us, full_us }),
            workingset_refault_file: counters[0],
            workingset_refault_anon: counters[1],
            workingset_activate_file: counters[2],
            pgscan: counters[3],
            pgsteal: counters[4],
            pswpin: counters[5],
            pswpout: counters[6],
            allocstall: counters[7],
            pgmajfault: counters[8],
            oom_kill: counters[9],
        }
    }
}

prop_compose! {
    /// A report whose figures are consistent with `ram`, so that it is believed.
    fn plausible_guest(ram: u64)(
        used in 1_u64..=60,
        cached in 0_u64..=39,
        dirty in 0_u64..=5,
        misses in prop_oneof![4 => Just(0_u64), 1 => 0_u64..100_000],
        waits in prop_oneof![4 => Just(0_u64), 1 => 0_u64..1_000_000],
        stalls in prop_oneof![9 => Just(0_u64), 1 => 0_u64..10],
    ) -> (GuestSignals, u64, u64, u64) {
        let percent = |part: u64| ByteSize(ram / 100 * part);
        let guest = GuestSignals {
            total: ByteSize(ram),
            free: percent(100 - used - cached),
            available: percent(100 - used),
            dirty: percent(dirty.min(cached)),
            anonymous: percent(used / 2),
            file_cache: percent(cached),
            ..GuestSignals::default()
        };
        (guest, misses, waits, stalls)
    }
}

fn limits() -> impl Strategy<Value = Limits> {
    (size(), size(), any::<u16>(), any::<u16>(), any::<bool>()).prop_map(
        |(min, max, buffer_percent, priority, pinned)| Limits {
            min,
            max,
            buffer_percent,
            priority,
            pinned,
        },
    )
}

fn sane_limits(ram: u64) -> impl Strategy<Value = Limits> {
    (
        0..=ram / 4,
        ram / 2..=ram * 2,
        0_u16..100,
        1_u16..500,
        0_u8..10,
    )
        .prop_map(|(min, max, buffer_percent, priority, pinned)| Limits {
            min: ByteSize(min),
            max: ByteSize(max),
            buffer_percent,
            priority,
            pinned: pinned == 0,
        })
}

fn source() -> impl Strategy<Value = Source> {
    select(vec![
        Source::Agent { trims: true },
        Source::Agent { trims: false },
        Source::BalloonStats,
    ])
}

fn brake() -> impl Strategy<Value = BrakeLevel> {
    select(vec![
        BrakeLevel::Ok,
        BrakeLevel::Warning,
        BrakeLevel::Braked,
    ])
}

fn any_host() -> impl Strategy<Value = HostState> {
    (size(), size(), size(), brake(), size()).prop_map(
        |(available, reserve, swap_free, brake, lent)| HostState {
            available,
            reserve,
            swap_free,
            brake,
            lent,
            recalls_lent: true,
        },
    )
}

prop_compose! {
    fn any_vm()(
        limits in limits(),
        at in time(),
        ram in size(),
        balloon in proptest::option::of((size(), any::<bool>())),
        device in proptest::option::of((size(), size(), size(), any::<bool>())),
        folded_cache in size(),
        source in source(),
        reports_free_pages in any::<bool>(),
        guest in proptest::option::weighted(0.9, any_guest()),
    ) -> (Limits, Signals) {
        let signals = Signals {
            at,
            ram,
            balloon: balloon.map(|(held, deflate_on_oom)| Balloon { held, deflate_on_oom }),
            virtio_mem: device.map(|(plugged, max, block, has_driver)| VirtioMem { plugged, max, block, has_driver }),
            keeps_freed_ram: false,
            reports_free_pages,
            folded_cache,
            source,
            guest,
        };
        (limits, signals)
    }
}

/// One VM whose guest is honest, with what it reports at each step.
#[derive(Clone, Debug)]
struct HonestVm {
    limits: Limits,
    ram: u64,
    source: Source,
    plugged: Option<u64>,
    steps: Vec<(GuestSignals, u64, u64, u64)>,
}

prop_compose! {
    fn honest_vm(steps: usize)(ram_mib in 512_u64..16_384)(
        limits in sane_limits(ram_mib << 20),
        source in source(),
        plugged in proptest::option::of(0_u64..8),
        steps in proptest::collection::vec(plausible_guest(ram_mib << 20), steps),
        ram in Just(ram_mib << 20),
    ) -> HonestVm {
        HonestVm { limits, ram, source, plugged: plugged.map(|blocks| blocks << 27), steps }
    }
}

/// What must hold for each decision on `vms`.
fn check(host: HostState, vms: &[(VmId, Limits, Signals)], decision: &Decision) {
    assert_eq!(decision.vms.len(), vms.len());
    let mut given = 0_u128;
    for ((vm, limits, signals), decided) in vms.iter().zip(&decision.vms) {
        assert_eq!(*vm, decided.vm);
        assert_eq!(signals.size(), decided.size);
        let max = limits.max.max(limits.min);
        assert!(
            (limits.min..=max).contains(&decided.target),
            "target {} is not within {} and {max}",
            decided.target.0,
            limits.min.0
        );
        assert!(!decided.reason.to_string().is_empty());
        let Some(order) = decided.order else { continue };
        assert!(!limits.pinned, "a pinned VM got an order: {order:?}");
        let size = decided.size;
        let buffer = u128::from(decided.working_set.0) * u128::from(limits.buffer_percent) / 100;
        let needed = u128::from(decided.working_set.0) + buffer;
        match order.action {
            Action::Balloon { target } if target > size => {
                assert!(target <= max, "a give exceeds the maximum");
                given += u128::from(order.bytes.0);
            }
            Action::Balloon { target } => {
                assert!(target >= limits.min, "a take leaves less than the minimum");
                assert!(
                    u128::from(target.0) >= needed,
                    "a take leaves {} of {needed} needed bytes: {decided:?}",
                    target.0
                );
            }
            Action::Plug { bytes } => {
                let device = signals.virtio_mem.expect("a device that can plug");
                assert_eq!(bytes.0 % device.block.0, 0);
                assert!(device.plugged.0 + bytes.0 <= device.max.0);
                given += u128::from(order.bytes.0);
            }
            Action::Unplug { bytes } => {
                let left = size - bytes;
                assert!(u128::from(left.0) >= needed && left >= limits.min);
            }
            Action::Trim { bytes, .. } => {
                let guest = signals.guest.as_ref().expect("a guest that can trim");
                let in_use = size - guest.free;
                let left = in_use - bytes;
                assert!(left >= decided.working_set, "a trim takes working set");
                assert!(bytes <= guest.file_cache);
            }
        }
    }
    let at_risk = vms.iter().any(|(_, _, signals)| {
        let available = signals.guest.as_ref().map(|guest| guest.available);
        available.is_some_and(|available| available.0 < signals.size().0 / 32)
    });
    let headroom = if at_risk {
        host.available.0.saturating_add(host.swap_free.0 / 2)
    } else {
        host.available.0.saturating_sub(host.reserve.0 / 4)
    };
    assert!(
        given <= u128::from(headroom),
        "one step gives {given} of {headroom} bytes"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_input_makes_the_controller_panic_or_break_a_bound(
        steps in proptest::collection::vec(
            (time(), any_host(), proptest::collection::vec(any_vm(), 0..4)),
            1..12,
        ),
    ) {
        let mut controller = Controller::new(Policy::default());
        for (now, host, vms) in steps {
            let vms: Vec<_> = (0..)
                .map(VmId)
                .zip(vms)
                .map(|(vm, (limits, signals))| (vm, limits, signals))
                .collect();
            let decision = controller.step(now, host, &vms);
            check(host, &vms, &decision);
        }
    }

    #[test]
    fn orders_for_honest_guests_stay_within_limits_and_what_the_host_has(
        vms in proptest::collection::vec(honest_vm(60), 1..4),
        hosts in proptest::collection::vec((0_u64..4096, 0_u64..4096), 60),
        gap in 1_u64..12,
    ) {
        let mut controller = Controller::new(Policy::default());
        let mut held = vec![0_u64; vms.len()];
        let mut counters = vec![(0_u64, 0_u64, 0_u64); vms.len()];
        for (step, (available, reserve)) in hosts.into_iter().enumerate() {
            let now = Duration::from_secs(step as u64 * gap);
            let host = HostState {
                available: ByteSize::mib(available),
                reserve: ByteSize::mib(reserve),
                ..HostState::default()
            };
            let mut input = Vec::new();
            for (index, vm) in vms.iter().enumerate() {
                let (guest, misses, waits, stalls) = &vm.steps[step];
                let counted = &mut counters[index];
                counted.0 += misses;
                counted.1 += waits;
                counted.2 += stalls;
                let mut guest = guest.clone();
                guest.uptime = now + Duration::from_secs(1);
                guest.workingset_refault_file = Some(counted.0);
                guest.pressure = Some(PressureTotals { some_us: counted.1, full_us: 0 });
                guest.allocstall = Some(counted.2);
                // The balloon took its memory from what was free.
                guest.free = ByteSize(guest.free.0.saturating_sub(held[index]));
                guest.available = ByteSize(guest.available.0.saturating_sub(held[index]));
                let signals = Signals {
                    at: now,
                    ram: ByteSize(vm.ram),
                    balloon: Some(Balloon { held: ByteSize(held[index]), deflate_on_oom: true }),
                    virtio_mem: vm.plugged.map(|plugged| VirtioMem {
                        plugged: ByteSize(plugged),
                        max: ByteSize(1 << 30),
                        block: ByteSize(1 << 27),
                        has_driver: true,
                    }),
                    keeps_freed_ram: false,
                    reports_free_pages: index % 2 == 0,
                    folded_cache: ByteSize(0),
                    source: vm.source,
                    guest: Some(guest),
                };
                input.push((VmId(index as u64), vm.limits, signals));
            }
            let decision = controller.step(now, host, &input);
            check(host, &input, &decision);
            for (index, decided) in decision.vms.iter().enumerate() {
                if let Some(Action::Balloon { target }) = decided.order.map(|order| order.action) {
                    held[index] = (decided.size.0 + held[index]).saturating_sub(target.0);
                }
            }
        }
    }
}
