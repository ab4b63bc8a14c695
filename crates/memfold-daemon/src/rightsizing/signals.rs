//! What the controller of right-sizing gets: figures of the host and of each VM, from the ledger,
//! the guests and QEMU.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::Sizing;
use memfold_ledger::{DebtReport, GuestMemory, GuestMemorySource, Level};
use memfold_rightsize::{
    Balloon, BrakeLevel, GuestSignals, HostState, Limits, PressureTotals, Signals, Source,
    VirtioMem,
};
use memfold_units::{ByteSize, PageCount};
use memfold_vm::balloon::{self, BalloonError};
use memfold_vm::{Qmp, QmpError, VmSpec, virtio_mem};
use memfold_wire::permission::Permission;
use tracing::debug;

use crate::machine::Machine;

/// Time between two questions to QEMU about the memory of a VM in which nothing can change without
/// an order.
const STILL: Duration = Duration::from_secs(30);

/// What QEMU says about the memory of one VM.
#[derive(Clone, Copy, Debug)]
pub(super) struct QemuMemory {
    /// RAM that the VM was started with.
    pub ram: ByteSize,
    /// The VM's balloon; `None`: it has none.
    pub balloon: Option<Balloon>,
    /// The VM's virtio-mem device. Whoever started the VM plugs its memory, so the device of a VM
    /// that memfold did not start can plug no more than it has, and counts as one without a driver.
    pub virtio_mem: Option<VirtioMem>,
}

impl QemuMemory {
    /// Returns RAM and plugged memory, with what the balloon holds.
    fn installed(self) -> ByteSize {
        let plugged = self.virtio_mem.map_or(0, |device| device.plugged.0);
        ByteSize(self.ram.0.saturating_add(plugged))
    }

    /// Returns the memory that the guest may use.
    pub fn size(self) -> ByteSize {
        let held = self.balloon.map_or(0, |balloon| balloon.held.0);
        ByteSize(self.installed().0.saturating_sub(held))
    }
}

/// What QEMU says about the memory of all VMs.
#[derive(Debug, Default)]
pub(super) struct QemuMemories {
    /// By the machine's number.
    known: BTreeMap<u32, Known>,
}

/// What QEMU said about one VM, and when.
#[derive(Debug)]
struct Known {
    /// Whether the guest's balloon deflates before an OOM kill; `None`: the VM has no balloon.
    deflate_on_oom: Option<bool>,
    memory: QemuMemory,
    /// The guest was told to plug or to unplug memory, and has not done it yet.
    is_pending: bool,
    at: Instant,
}

/// What became of a question to QEMU.
enum Answer {
    /// QEMU has said the VM's memory.
    Said(Known),
    /// QEMU was not asked, or could not say it. What it last said counts.
    NotSaid,
    /// QEMU has not answered in time. What it last said may be wrong by now, or is.
    Late,
}

impl Answer {
    /// `asked`: what QEMU answered; `None`: its monitor is in use. `is_outgrown`: the guest claims
    /// more memory than QEMU has last said.
    fn of(asked: Option<Result<Known, BalloonError>>, is_outgrown: bool) -> Self {
        let is_late = |error: &BalloonError| {
            matches!(
                error,
                BalloonError::Qmp(QmpError::Timeout { .. } | QmpError::NoGreeting { .. })
            )
        };
        match asked {
            Some(Ok(known)) => Self::Said(known),
            Some(Err(error)) if is_late(&error) => Self::Late,
            _ if is_outgrown => Self::Late,
            _ => Self::NotSaid,
        }
    }
}

impl Known {
    /// Returns whether the memory of a VM stays as it is unless right-sizing gives an order. The
    /// balloon of a VM that memfold started (`is_own`) is moved by no other program; a guest takes
    /// memory from it, plugs memory late, or loses plugged memory when it boots again.
    fn is_still(&self, is_own: bool) -> bool {
        let is_empty = self.memory.balloon.is_none_or(|of| of.held.0 == 0);
        let device = self.memory.virtio_mem;
        let is_unplugged = device.is_none_or(|of| of.plugged.0 == 0 && of.has_driver);
        is_own && is_empty && is_unplugged && !self.is_pending
    }
}

impl QemuMemories {
    /// Forgets VMs that have ended.
    pub fn keep(&mut self, machines: &[Arc<Machine>]) {
        self.known
            .retain(|id, _| machines.iter().any(|machine| machine.id() == *id));
    }

    /// Returns what QEMU last said about the machine number `id`.
    pub fn known(&self, id: u32) -> Option<QemuMemory> {
        self.known.get(&id).map(|known| known.memory)
    }

    /// Asks QEMU for a VM's memory. `may_move`: right-sizing has given the VM an order, so an
    /// answer from before does not count. `claimed`: memory that the guest claims. While the VM is
    /// saved, for example, the monitor is in use, and the last answer is returned. `None`: QEMU has
    /// never answered, or answers late now, or has last said less than the guest claims.
    pub fn look(
        &mut self,
        machine: &Machine,
        may_move: bool,
        claimed: Option<ByteSize>,
    ) -> Option<QemuMemory> {
        let is_own = machine.vm().spec().is_some();
        let is_outgrown = self.is_outgrown(machine.id(), claimed);
        let may_differ = may_move || is_outgrown;
        self.look_with(machine.id(), is_own, may_differ, |known| {
            let asked = machine
                .idle_monitor()
                .map(|mut qmp| qmp.briefly(|qmp| read(machine, qmp, known)));
            if let Some(Err(error)) = &asked {
                debug!(vm = machine.name(), %error, "cannot ask QEMU for the VM's memory; asking again at the next look");
            }
            Answer::of(asked, is_outgrown)
        })
    }

    /// Returns whether a guest claims more memory than QEMU has last said. Another program may have
    /// plugged memory since; if not, the guest lies.
    fn is_outgrown(&self, id: u32, claimed: Option<ByteSize>) -> bool {
        let known = self.known(id).map(QemuMemory::installed);
        known
            .zip(claimed)
            .is_some_and(|(known, claimed)| claimed > known)
    }

    /// The same as [`look`](Self::look) for the machine number `id`, with `ask` instead of QEMU.
    fn look_with(
        &mut self,
        id: u32,
        is_own: bool,
        may_move: bool,
        ask: impl FnOnce(Option<&Known>) -> Answer,
    ) -> Option<QemuMemory> {
        let known = self.known.get(&id);
        let is_new = |known: &Known| known.at.elapsed() < STILL && known.is_still(is_own);
        let is_known = known.is_some_and(is_new);
        if may_move || !is_known {
            match ask(known) {
                Answer::Said(new) => {
                    self.known.insert(id, new);
                }
                Answer::NotSaid => {}
                Answer::Late => return None,
            }
        }
        self.known(id)
    }
}

/// Asks QEMU for the virtio-mem device that memfold gave a VM. Returns also whether the guest has
/// yet to plug or unplug memory.
fn own_device(qmp: &mut Qmp) -> Result<Option<(VirtioMem, bool)>, QmpError> {
    let Some(device) = virtio_mem::read(qmp)? else {
        return Ok(None);
    };
    let memory = VirtioMem {
        plugged: device.plugged,
        max: device.max,
        block: device.block,
        has_driver: virtio_mem::has_driver(qmp)?,
    };
    Ok(Some((memory, device.requested != device.plugged)))
}

/// Asks QEMU for a VM's memory.
fn read(machine: &Machine, qmp: &mut Qmp, known: Option<&Known>) -> Result<Known, BalloonError> {
    let deflate_on_oom = match known {
        Some(known) => known.deflate_on_oom,
        None => match balloon::find(qmp) {
            Ok(device) => Some(balloon::deflates_on_oom(qmp, &device)?),
            Err(BalloonError::NoDevice) => None,
            Err(error) => return Err(error),
        },
    };
    let spec = machine.vm().spec().filter(|spec| spec.foreign.is_none());
    // Only DIMMs change the RAM of a VM.
    let fixed = spec.filter(|spec| spec.memory_slots == 0);
    let (ram, size) = match (fixed, deflate_on_oom) {
        (Some(spec), Some(_)) => (spec.memory, balloon::actual(qmp)?),
        (Some(spec), None) => (spec.memory, spec.memory),
        (None, Some(_)) => balloon::sizes(qmp)?,
        (None, None) => {
            let ram = balloon::full_size(qmp)?;
            (ram, ram)
        }
    };
    let balloon = deflate_on_oom.map(|deflate_on_oom| Balloon {
        held: ByteSize(ram.0.saturating_sub(size.0)),
        deflate_on_oom,
    });
    let device = match spec {
        Some(spec) if spec.pluggable().is_none() => None,
        Some(_) => own_device(qmp)?,
        None => {
            let plugged = virtio_mem::plugged(qmp)?;
            let memory = VirtioMem {
                plugged,
                max: plugged,
                block: plugged,
                has_driver: false,
            };
            (plugged.0 > 0).then_some((memory, false))
        }
    };
    let (virtio_mem, is_pending) = device.unzip();
    Ok(Known {
        deflate_on_oom,
        memory: QemuMemory {
            ram,
            balloon,
            virtio_mem,
        },
        is_pending: is_pending.unwrap_or(false),
        at: Instant::now(),
    })
}

/// Returns the state of the host. The caller says whether lent RAM is called back.
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
        recalls_lent: false,
    }
}

/// Returns the limits of a VM with this RAM. It gets no more than `ceiling` unless the operator set
/// another maximum. A minimum that the operator did not set is not above the maximum.
pub(super) fn limits(sizing: Sizing, ram: ByteSize, ceiling: ByteSize) -> Limits {
    let max = sizing.max_bytes.map_or(ceiling, ByteSize);
    let default = Limits::of_vm(ram, max);
    Limits {
        min: sizing.min_bytes.map_or(default.min, ByteSize),
        max,
        buffer_percent: sizing.buffer_percent.unwrap_or(default.buffer_percent),
        priority: sizing.priority.unwrap_or(default.priority),
        pinned: sizing.pinned.unwrap_or(default.pinned),
    }
}

/// Returns the largest size that a VM can have.
pub(super) fn largest(machine: &Machine) -> ByteSize {
    let spec = machine.vm().spec();
    spec.map_or_else(|| ram(machine), VmSpec::largest_memory)
}

/// Returns the RAM that a VM was started with. The layout of a PC's RAM has a hole for its graphics
/// memory, so it counts only for VMs whose description is not known.
pub(super) fn ram(machine: &Machine) -> ByteSize {
    let spec = machine.vm().spec();
    let layout = || PageCount(machine.layout().pages()).bytes();
    spec.map_or_else(layout, |spec| spec.memory)
}

/// Returns whether a guest's owner allows that its agent trims. Older agents do not say what is
/// allowed.
pub(super) fn may_trim(machine: &Machine) -> bool {
    let allowed = machine.agent().and_then(|agent| agent.allowed());
    allowed.is_none_or(|all| all.contains(&Permission::Trim))
}

/// Returns the signals of one VM. `began`: the zero of the service's clock. `memory`: the guest's
/// newest report before QEMU was asked for `qemu`; memory that is plugged in between would make a
/// later one a lie. `trims`: the VM's agent, if it has one, can trim page cache, and may. Without
/// free page reporting, the host would not get that.
pub(super) fn of_vm(
    machine: &Machine,
    began: Instant,
    memory: Option<(Instant, GuestMemory)>,
    qemu: QemuMemory,
    folded_cache: ByteSize,
    trims: bool,
) -> Signals {
    let is_agent = |memory: &GuestMemory| memory.source == GuestMemorySource::Agent;
    let from_agent = memory.as_ref().is_some_and(|(_, memory)| is_agent(memory));
    let (at, guest) = report(memory, began).unzip();
    let reports_free_pages = machine.reports_free_pages();
    Signals {
        at: at.unwrap_or_default(),
        ram: qemu.ram,
        balloon: qemu.balloon,
        virtio_mem: qemu.virtio_mem,
        keeps_freed_ram: machine.keeps_freed_ram(),
        reports_free_pages,
        folded_cache,
        source: if from_agent {
            Source::Agent {
                trims: trims && reports_free_pages,
            }
        } else {
            Source::BalloonStats
        },
        guest,
    }
}

/// Converts a guest's report, and returns when it arrived by the service's clock. That time is the
/// same at each look at one report, so the controller sees that it is no new one.
fn report(
    newest: Option<(Instant, GuestMemory)>,
    began: Instant,
) -> Option<(Duration, GuestSignals)> {
    let (arrived, memory) = newest?;
    let at = arrived.saturating_duration_since(began);
    Some((at, guest(&memory, at)))
}

/// Converts a guest's figures. `at`: when they arrived. The agent does not say the guest's own
/// time, so the host's stands for it.
fn guest(memory: &GuestMemory, at: Duration) -> GuestSignals {
    let pressure = memory.pressure.map(|pressure| PressureTotals {
        some_us: pressure.some_us,
        full_us: pressure.full_us,
    });
    GuestSignals {
        uptime: at,
        total: memory.mem_total_bytes,
        free: memory.mem_free_bytes.unwrap_or_default(),
        available: memory.mem_available_bytes,
        dirty: memory.dirty_bytes.unwrap_or_default(),
        anonymous: memory.anon_pages_bytes.unwrap_or_default(),
        file_cache: memory.cached_bytes.unwrap_or_default(),
        pressure,
        workingset_refault_file: memory.workingset_refault_file,
        workingset_refault_anon: memory.workingset_refault_anon,
        workingset_activate_file: memory.workingset_activate_file,
        pgscan: memory.pgscan,
        pgsteal: memory.pgsteal,
        pswpin: memory.pswpin,
        pswpout: memory.pswpout,
        allocstall: memory.allocstall,
        pgmajfault: memory.pgmajfault,
        oom_kill: memory.oom_kill,
    }
}

#[cfg(test)]
mod tests {
    use memfold_rightsize::{Controller, Policy, Reason, VmId};

    use super::*;
    use crate::machine::GuestReading;

    const RAM: ByteSize = ByteSize::mib(2048);

    /// Returns the signals of a VM with the guest's newest report.
    fn signals_of(reading: &GuestReading, began: Instant) -> Signals {
        let (at, guest) = report(reading.newest(), began).unzip();
        Signals {
            at: at.expect("a report"),
            ram: RAM,
            balloon: None,
            virtio_mem: None,
            keeps_freed_ram: false,
            reports_free_pages: true,
            folded_cache: ByteSize(0),
            source: Source::BalloonStats,
            guest,
        }
    }

    #[test]
    fn one_report_that_is_looked_at_twice_is_neither_a_new_one_nor_a_reboot() {
        let mut controller = Controller::new(Policy::default());
        let mut step = |reading: &GuestReading, began: Instant| {
            // The monitor of the VM, for example, answers at once or late.
            std::thread::sleep(Duration::from_millis(3));
            let signals = signals_of(reading, began);
            let vms = [(VmId(1), Limits::of_vm(RAM, RAM), signals.clone())];
            let host = HostState::default();
            let decision = controller.step(began.elapsed(), host, &vms);
            (signals.at, decision.vms[0].reason)
        };
        let began = Instant::now();
        let memory = GuestMemory {
            mem_total_bytes: RAM,
            mem_available_bytes: ByteSize::mib(1024),
            ..GuestMemory::default()
        };
        let arrived = began + Duration::from_micros(500);
        let mut reading = GuestReading::default();
        reading.note(arrived, memory);
        let (at, _) = step(&reading, began);
        for _ in 0..20 {
            let (again, reason) = step(&reading, began);
            assert_eq!(again, at, "one report has arrived twice");
            assert_ne!(reason, Reason::Restarted);
        }
    }

    #[test]
    fn a_guest_whose_report_is_from_before_its_balloon_moved_does_not_contradict_itself() {
        let began = Instant::now();
        let memory = |available_mib| GuestMemory {
            mem_total_bytes: RAM,
            mem_free_bytes: Some(ByteSize::mib(available_mib)),
            mem_available_bytes: ByteSize::mib(available_mib),
            ..GuestMemory::default()
        };
        let mut controller = Controller::new(Policy::default());
        let mut reading = GuestReading::default();
        for (second, held) in [(2, 0), (4, 0), (6, 700), (8, 1400), (10, 1400)] {
            if second < 6 {
                let arrived = began + Duration::from_secs(second);
                reading.note(arrived, memory(1700));
            }
            let mut signals = signals_of(&reading, began);
            signals.balloon = Some(Balloon {
                held: ByteSize::mib(held),
                deflate_on_oom: true,
            });
            let vms = [(VmId(1), Limits::of_vm(RAM, RAM), signals)];
            let now = Duration::from_secs(second);
            let decision = controller.step(now, HostState::default(), &vms);
            let decided = &decision.vms[0];
            let is_distrusted = matches!(decided.reason, Reason::Distrusted(_));
            assert!(!is_distrusted, "{}", decided.reason);
            if second > 2 {
                assert_eq!(decided.working_set, ByteSize::mib(348), "at {second} s");
            }
        }
    }

    /// An answer of QEMU about a VM that can plug 2 GiB.
    fn answer(plugged: u64, is_pending: bool) -> Known {
        Known {
            deflate_on_oom: None,
            memory: QemuMemory {
                ram: RAM,
                balloon: None,
                virtio_mem: Some(VirtioMem {
                    plugged: ByteSize::mib(plugged),
                    max: RAM,
                    block: ByteSize::mib(2),
                    has_driver: true,
                }),
            },
            is_pending,
            at: Instant::now(),
        }
    }

    /// Returns the plugged memory in MiB, or `None` if the memory of the VM is not known. `answer`:
    /// QEMU's; `None`: the monitor is in use.
    fn plugged(memories: &mut QemuMemories, answer: Option<Known>) -> Option<u64> {
        let answer = answer.map_or(Answer::NotSaid, Answer::Said);
        let memory = memories.look_with(1, true, false, |_| answer)?;
        memory.virtio_mem.map(|device| device.plugged.0 >> 20)
    }

    #[test]
    fn a_vm_of_which_qemu_has_never_said_the_memory_is_left_out() {
        let mut memories = QemuMemories::default();
        assert_eq!(plugged(&mut memories, None), None);
        assert_eq!(
            plugged(&mut memories, Some(answer(1024, false))),
            Some(1024)
        );
        // The monitor is in use.
        assert_eq!(plugged(&mut memories, None), Some(1024));
    }

    #[test]
    fn a_vm_whose_qemu_answers_late_is_left_out_until_it_answers_and_its_last_size_is_kept() {
        let mut memories = QemuMemories::default();
        assert_eq!(plugged(&mut memories, Some(answer(1024, true))), Some(1024));
        let late = || QmpError::Timeout {
            command: "query-balloon".into(),
            seconds: 1.0,
        };
        for _ in 0..3 {
            let answer = Answer::of(Some(Err(late().into())), false);
            assert!(memories.look_with(1, true, false, |_| answer).is_none());
            // Reports show this size.
            let known = memories.known(1).map(QemuMemory::installed);
            assert_eq!(known, Some(ByteSize::mib(2048 + 1024)));
        }
        assert_eq!(plugged(&mut memories, Some(answer(512, true))), Some(512));
        // QEMU cannot say it for another reason, so what it last said counts.
        let answer = Answer::of(Some(Err(BalloonError::NoDevice)), false);
        assert!(memories.look_with(1, true, false, |_| answer).is_some());
    }

    #[test]
    fn qemu_is_asked_at_each_look_while_a_guest_has_yet_to_plug_memory() {
        let mut memories = QemuMemories::default();
        assert_eq!(plugged(&mut memories, Some(answer(0, true))), Some(0));
        assert_eq!(plugged(&mut memories, Some(answer(512, false))), Some(512));
        assert_eq!(plugged(&mut memories, Some(answer(0, false))), Some(0));
        // Nothing can change any more, so QEMU is not asked.
        assert_eq!(plugged(&mut memories, Some(answer(256, false))), Some(0));
    }

    #[test]
    fn qemu_is_asked_at_once_if_a_guest_claims_memory_that_another_program_may_have_plugged() {
        let mut memories = QemuMemories::default();
        assert_eq!(plugged(&mut memories, Some(answer(0, false))), Some(0));
        let claims =
            |memories: &QemuMemories, mib| memories.is_outgrown(1, Some(ByteSize::mib(mib)));
        assert!(!claims(&memories, 2048) && claims(&memories, 2049));
        memories.look_with(1, true, true, |_| Answer::Said(answer(512, false)));
        assert!(!claims(&memories, 2560) && claims(&memories, 2561));
        assert!(!memories.is_outgrown(1, None));
        assert!(!memories.is_outgrown(2, Some(ByteSize::mib(1))));
    }

    #[test]
    fn a_vm_whose_guest_outgrew_what_qemu_last_said_is_left_out_until_qemu_can_be_asked() {
        let mut memories = QemuMemories::default();
        assert_eq!(plugged(&mut memories, Some(answer(0, false))), Some(0));
        let mut look = |asked| memories.look_with(1, true, true, |_| Answer::of(asked, true));
        // The monitor is in use, or the connection was lost.
        assert!(look(None).is_none());
        let lost = QmpError::Lost {
            command: "query-balloon".into(),
            source: std::io::ErrorKind::UnexpectedEof.into(),
        };
        assert!(look(Some(Err(lost.into()))).is_none());
        // QEMU says the same again, so the guest lies, and the controller is told so.
        assert!(look(Some(Ok(answer(0, false)))).is_some());
    }

    #[test]
    fn limits_that_the_operator_did_not_set_have_their_defaults() {
        let (ram, ceiling) = (ByteSize::mib(2048), ByteSize::mib(1536));
        let all = limits(Sizing::default(), ram, ceiling);
        assert_eq!(
            (all.min, all.max, all.pinned),
            (ByteSize::mib(512), ceiling, false)
        );
        let set = Sizing {
            min_bytes: Some(1 << 30),
            max_bytes: Some(2 << 30),
            pinned: Some(true),
            ..Sizing::default()
        };
        let some = limits(set, ram, ceiling);
        assert_eq!(
            (some.min, some.max, some.pinned),
            (ByteSize::mib(1024), ram, true)
        );
        assert_eq!(some.priority, Limits::PRIORITY);
    }

    #[test]
    fn a_minimum_that_the_operator_did_not_set_is_not_above_the_maximum() {
        let (ram, low) = (ByteSize::mib(8192), ByteSize::mib(1024));
        // libvirt's `currentMemory` is less than a quarter of the RAM.
        let unset = limits(Sizing::default(), ram, low);
        assert_eq!((unset.min, unset.max), (low, low));
        // The operator set a maximum only.
        let set = Sizing {
            max_bytes: Some(low.0),
            ..Sizing::default()
        };
        let maximum = limits(set, ram, ram);
        assert_eq!((maximum.min, maximum.max), (low, low));
        // A minimum that the operator set counts.
        let set = Sizing {
            min_bytes: Some(2 << 30),
            ..Sizing::default()
        };
        assert_eq!(limits(set, ram, low).min, ByteSize::mib(2048));
    }
}
