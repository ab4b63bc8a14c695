//! Builds a VM's entry in the list that `memfold vm list` shows.

use memfold_api::{SegmentState, SwapPlace, VmInfo, VmSegment, VmSwap};
use memfold_units::PAGE_SIZE;
use memfold_vm::{SegmentSpec, VmConditions, VmSpec};

use crate::machine::{Machine, Origin};

const NO_MONITOR: &str = "and not at pauses either: the library has no QMP socket of its own; start QEMU with -qmp unix:PATH,server=on,wait=off and MEMFOLD_QEMU_MONITOR=PATH in its environment";

const NOT_STOPPED: &str = "and not at pauses either: only libvirt stops and resumes its domains";

/// Returns the reasons why folded pages that the guest wrote to are not folded again while the VM
/// runs. `why` is added if they cannot be folded during a short stop either.
fn refold_problems(conditions: &VmConditions, can_stop: bool, why: &str) -> Vec<String> {
    let reasons = conditions.refold_live.iter().map(ToString::to_string);
    let no_stop = (!conditions.refold_live.is_empty() && !can_stop).then(|| why.to_owned());
    reasons.chain(no_stop).collect()
}

impl Machine {
    pub fn info(&self) -> VmInfo {
        let link = self.agent();
        let agent = link.as_ref().and_then(|link| link.session());
        let allowed = link.and_then(|link| link.allowed());
        let (fold_problems, state) = (self.fold_problems(), self.state());
        let seen = self.seen.lock();
        let costs = seen.conditions.costs.iter();
        let spec = self.vm().spec();
        let forwards = spec.into_iter().flat_map(|spec| &spec.forwards);
        VmInfo {
            forwards: forwards.map(ToString::to_string).collect(),
            network: spec
                .filter(|spec| spec.foreign.is_none() && spec.cards() > 0)
                .map(|spec| spec.network.to_string()),
            mac: spec.and_then(|spec| spec.mac).map(|mac| mac.to_string()),
            left_out: spec.map_or_else(Vec::new, |spec| spec.left_out.clone()),
            name: self.role.name.clone(),
            domain: self.role.domain.clone(),
            pid: self.raw_pid(),
            // The layout has the place of all memory that virtio-mem can plug.
            ram_bytes: (seen.layout.pages() * PAGE_SIZE)
                .saturating_sub(spec.and_then(VmSpec::pluggable).map_or(0, |size| size.0)),
            origin: match &self.role.origin {
                Origin::Started => "started",
                Origin::Attached(_) | Origin::Libvirt(_) => "attached",
            }
            .into(),
            libvirt: self.libvirt().map(str::to_owned),
            qemu: self.qemu.clone(),
            ttl_left_s: self.ttl_left().map(|left| left.as_secs_f64()),
            agent_problems: agent
                .as_ref()
                .map_or_else(Vec::new, |facts| facts.problems.clone()),
            allowed: allowed.map(|all| all.iter().map(|p| p.word().to_owned()).collect()),
            agent: agent.map(|facts| format!("Linux {}", facts.kernel)),
            fold_problems,
            refold_problems: refold_problems(
                &seen.conditions,
                self.can_stop(),
                self.libvirt().map_or(NO_MONITOR, |_| NOT_STOPPED),
            ),
            costs: costs.map(ToString::to_string).collect(),
            segments: self.segments(),
            clock: self.clock_step(),
            renewal: self.marks.renewal.lock().clone(),
            // This is right unless the swap disk is lent; the daemon then replaces this value.
            swap: spec.and_then(|spec| spec.swap).map(|size| VmSwap {
                bytes: size.0,
                place: SwapPlace::OnDisk,
                durability: None,
                lent: Vec::new(),
            }),
            boot_snapshot: self.marks.boot_snapshot.lock().clone(),
            state: state.name,
            state_cause: state.cause,
            state_fix: state.fix,
        }
    }

    fn segments(&self) -> Vec<VmSegment> {
        let state = |segment: SegmentSpec| VmSegment {
            state: match self.segment_state(&segment.name) {
                _ if segment.root => SegmentState::Root,
                known => known.unwrap_or(SegmentState::Attached),
            },
            segment: segment.name,
        };
        self.vm.segments().into_iter().map(state).collect()
    }
}
