//! What the controller of right-sizing gets: figures of the host and of each VM, from the ledger,
//! the guests and QEMU.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use memfold_api::Sizing;
use memfold_ledger::{DebtReport, GuestMemory, GuestMemorySource, Level};
use memfold_rightsize::{
    Balloon, BrakeLevel, GuestSignals, HostState, Limits, PressureTotals, Signals, Source,
};
use memfold_units::{ByteSize, PageCount};
use memfold_vm::balloon;

use crate::machine::Machine;

/// Balloons of all VMs.
#[derive(Debug, Default)]
pub(super) struct Balloons {
    /// By the machine's number; `None`: the VM has no balloon.
    known: BTreeMap<u32, Option<Known>>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    deflate_on_oom: bool,
    held: ByteSize,
}

impl Known {
    const fn balloon(self) -> Balloon {
        Balloon {
            held: self.held,
            deflate_on_oom: self.deflate_on_oom,
        }
    }
}

impl Balloons {
    /// Forgets the balloons of VMs that have ended.
    pub fn keep(&mut self, machines: &[Arc<Machine>]) {
        self.known
            .retain(|id, _| machines.iter().any(|machine| machine.id() == *id));
    }

    /// Asks QEMU for a VM's balloon. While the VM is saved, for example, the monitor is in use, and
    /// the last answer is returned. `None`: the VM has no balloon, or QEMU has not answered yet.
    pub fn look(&mut self, machine: &Machine) -> Option<Balloon> {
        let Some(mut qmp) = machine.idle_monitor() else {
            let known = self.known.get(&machine.id()).copied().flatten()?;
            return Some(known.balloon());
        };
        let known = if let Some(known) = self.known.get(&machine.id()) {
            *known
        } else {
            let found = match balloon::find(&mut qmp) {
                Ok(device) => Some(Known {
                    deflate_on_oom: balloon::deflates_on_oom(&mut qmp, &device).ok()?,
                    held: ByteSize(0),
                }),
                Err(balloon::BalloonError::NoDevice) => None,
                Err(_) => return None,
            };
            self.known.insert(machine.id(), found);
            found
        };
        let known = known?;
        let full = balloon::full_size(&mut qmp).ok()?;
        let actual = balloon::actual(&mut qmp).ok()?;
        let held = ByteSize(full.0.saturating_sub(actual.0));
        let known = Known { held, ..known };
        self.known.insert(machine.id(), Some(known));
        Some(known.balloon())
    }
}

/// Returns the state of the host.
pub(super) fn host(debt: &DebtReport, lent_bytes: u64) -> HostState {
    HostState {
        available: ByteSize(debt.mem_available_bytes),
        reserve: ByteSize(debt.reserve_bytes),
        swap_free: ByteSize(debt.swap_free_bytes),
        brake: match debt.level {
            Level::Ok => BrakeLevel::Ok,
            Level::Warning => BrakeLevel::Warning,
            Level::Braked => BrakeLevel::Braked,
        },
        lent: ByteSize(lent_bytes),
    }
}

/// Returns the limits of a VM with this RAM.
pub(super) fn limits(sizing: Sizing, ram: ByteSize) -> Limits {
    let default = Limits::of_vm(ram, ram);
    Limits {
        min: sizing.min_bytes.map_or(default.min, ByteSize),
        max: sizing.max_bytes.map_or(default.max, ByteSize),
        buffer_percent: sizing.buffer_percent.unwrap_or(default.buffer_percent),
        priority: sizing.priority.unwrap_or(default.priority),
        pinned: sizing.pinned.unwrap_or(default.pinned),
    }
}

/// Returns the RAM that a VM was started with. The layout of a PC's RAM has a hole for its graphics
/// memory, so it counts only for VMs whose description is not known.
pub(super) fn ram(machine: &Machine) -> ByteSize {
    let spec = machine.vm().spec();
    let layout = || PageCount(machine.layout().pages()).bytes();
    spec.map_or_else(layout, |spec| spec.memory)
}

/// Returns the signals of one VM at the time `now` of the service's clock.
pub(super) fn of_vm(
    machine: &Machine,
    now: Duration,
    balloon: Option<Balloon>,
    folded_cache: ByteSize,
) -> Signals {
    let memory = machine.guest_memory();
    let age = memory.as_ref().map_or(0, |memory| memory.age_ms);
    let at = now.saturating_sub(Duration::from_millis(age));
    let is_agent = |memory: &GuestMemory| memory.source == GuestMemorySource::Agent;
    let from_agent = memory.as_ref().is_some_and(is_agent);
    let has_reporting = machine.vm().spec().is_some_and(|spec| spec.balloon);
    Signals {
        at,
        ram: ram(machine),
        balloon,
        virtio_mem: None,
        folded_cache,
        source: if from_agent {
            Source::Agent {
                trims: has_reporting,
            }
        } else {
            Source::BalloonStats
        },
        guest: memory.map(|memory| guest(&memory, at, balloon)),
    }
}

/// Converts a guest's figures. `at`: when they arrived. The agent does not say the guest's own
/// time, so the host's stands for it. A balloon that deflates before an OOM kill does not lower the
/// guest's `MemTotal` (`drivers/virtio/virtio_balloon.c`), so what it holds is subtracted here.
fn guest(memory: &GuestMemory, at: Duration, balloon: Option<Balloon>) -> GuestSignals {
    let held = balloon
        .filter(|of| of.deflate_on_oom)
        .map_or(0, |of| of.held.0);
    let pressure = memory.pressure.map(|pressure| PressureTotals {
        some_us: pressure.some_us,
        full_us: pressure.full_us,
    });
    GuestSignals {
        uptime: at,
        total: ByteSize(memory.mem_total_bytes.0.saturating_sub(held)),
        free: memory.mem_free_bytes.unwrap_or_default(),
        available: memory.mem_available_bytes,
        dirty: memory.dirty_bytes.unwrap_or_default(),
        anonymous: memory.anon_pages_bytes.unwrap_or_default(),
        file_cache: memory.cached_bytes.unwrap_or_default(),
        inactive_file: None,
        pressure,
        workingset_refault_file: memory.workingset_refault_file,
        workingset_refault_anon: memory.workingset_refault_anon,
        workingset_activate_file: memory.workingset_activate_file,
        pgscan: memory.pgscan,
        pgsteal: memory.pgsteal,
        pswpin: memory.pswpin,
        pswpout: memory.pswpout,
        allocstall: memory.allocstall,
        pgmajfault: None,
        oom_kill: memory.oom_kill,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_the_operator_did_not_set_have_their_defaults() {
        let ram = ByteSize::mib(2048);
        let all = limits(Sizing::default(), ram);
        assert_eq!(
            (all.min, all.max, all.pinned),
            (ByteSize::mib(512), ram, false)
        );
        let set = Sizing {
            min_bytes: Some(1 << 30),
            pinned: Some(true),
            ..Sizing::default()
        };
        let some = limits(set, ram);
        assert_eq!(
            (some.min, some.max, some.pinned),
            (ByteSize::mib(1024), ram, true)
        );
        assert_eq!(some.priority, Limits::PRIORITY);
    }
}
