//! A VM's memory figures as its guest reports them, by its agent or its balloon driver; trimming of
//! its page cache; and its balloon.
//!
//! A guest can lie. The daemon keeps only the newest figures, and only those that are possible in a
//! guest of this size ([`GuestMemory::check`]).

use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memfold_ledger::{GuestLruGen, GuestMemory, GuestMemorySource, GuestPressure};
use memfold_units::{ByteSize, PAGE_SIZE, PageCount};
use memfold_vm::balloon::{self, GuestStats};
use memfold_vm::{AgentError, Trim, VmSpec};
use memfold_wire::memory::{AGE_CLASSES_S, MemoryReading, TrimResult};
use tracing::{debug, warn};

use crate::error::DaemonError;
use crate::machine::Machine;

/// While the agent's figures are younger than this, the balloon driver is not asked.
const AGENT_REPORTS: Duration = Duration::from_secs(15);

/// Number of impossible readings in succession after which the log says so. After memory was
/// plugged in, the daemon may learn of it later than the guest.
const REFUSALS: u32 = 10;

fn kib(kib: u64) -> ByteSize {
    ByteSize(kib.saturating_mul(1024))
}

fn pages(pages: u64) -> ByteSize {
    ByteSize(pages.saturating_mul(PAGE_SIZE))
}

fn of_agent(reading: &MemoryReading) -> GuestMemory {
    let pressure = reading.pressure.map(|pressure| GuestPressure {
        some_us: pressure.some_us,
        full_us: pressure.full_us,
        some_avg10: f64::from(pressure.some_avg10) / 1e4,
        full_avg10: f64::from(pressure.full_avg10) / 1e4,
    });
    let classes = reading.lru_gen.into_iter().flatten().zip(AGE_CLASSES_S);
    let lru_gen = classes.map(|(class, age_s)| GuestLruGen {
        age_s,
        anon_bytes: pages(class.anon),
        file_bytes: pages(class.file),
    });
    GuestMemory {
        source: GuestMemorySource::Agent,
        age_ms: 0,
        mem_total_bytes: kib(reading.mem_total_kib),
        mem_free_bytes: Some(kib(reading.mem_free_kib)),
        mem_available_bytes: kib(reading.mem_available_kib),
        dirty_bytes: Some(kib(reading.dirty_kib)),
        anon_pages_bytes: Some(kib(reading.anon_pages_kib)),
        cached_bytes: Some(kib(reading.cached_kib)),
        shmem_bytes: Some(kib(reading.shmem_kib)),
        swap_total_bytes: Some(kib(reading.swap_total_kib)),
        swap_free_bytes: Some(kib(reading.swap_free_kib)),
        pressure,
        workingset_refault_file: Some(reading.workingset_refault_file),
        workingset_refault_anon: Some(reading.workingset_refault_anon),
        workingset_activate_file: Some(reading.workingset_activate_file),
        workingset_activate_anon: Some(reading.workingset_activate_anon),
        pgscan: Some(reading.pgscan),
        pgsteal: Some(reading.pgsteal),
        pswpin: Some(reading.pswpin),
        pswpout: Some(reading.pswpout),
        allocstall: Some(reading.allocstall),
        oom_kill: Some(reading.oom_kill),
        pgmajfault: None,
        lru_gen: lru_gen.collect(),
        cgroup_limit_bytes: reading.cgroup_limit_kib.map(kib),
    }
}

fn of_balloon(stats: &GuestStats) -> GuestMemory {
    GuestMemory {
        source: GuestMemorySource::Balloon,
        mem_total_bytes: ByteSize(stats.total),
        mem_free_bytes: stats.free.map(ByteSize),
        mem_available_bytes: ByteSize(stats.available),
        cached_bytes: stats.disk_caches.map(ByteSize),
        pgscan: stats.scanned_pages,
        pgsteal: stats.reclaimed_pages,
        pswpin: stats.swap_in.map(|bytes| bytes / PAGE_SIZE),
        pswpout: stats.swap_out.map(|bytes| bytes / PAGE_SIZE),
        allocstall: stats.alloc_stalls,
        oom_kill: stats.oom_kills,
        pgmajfault: stats.major_faults,
        ..GuestMemory::default()
    }
}

/// Returns whether a VM has free page reporting. memfold gives it to each balloon of its own VMs;
/// only of other VMs, QEMU is asked by `ask`, until it has said it once (`known`). Until then, the
/// VM counts as one without.
fn has_reporting(
    spec: Option<&VmSpec>,
    known: &OnceLock<bool>,
    ask: impl FnOnce() -> Option<bool>,
) -> bool {
    if let Some(spec) = spec.filter(|spec| spec.foreign.is_none()) {
        return spec.balloon;
    }
    let answer = known.get().copied().or_else(ask);
    answer.is_some_and(|reports| *known.get_or_init(|| reports))
}

impl Machine {
    /// Keeps memory figures that the guest's agent reports.
    pub(super) fn note_agent_memory(&self, reading: &MemoryReading) {
        self.note_guest_memory(of_agent(reading), Duration::ZERO);
    }

    /// Keeps memory figures that the guest's balloon driver has reported, `age` ago.
    pub(crate) fn note_balloon_stats(&self, stats: &GuestStats, age: Duration) {
        self.note_guest_memory(of_balloon(stats), age);
    }

    fn note_guest_memory(&self, memory: GuestMemory, age: Duration) {
        let ram = PageCount(self.seen.lock().layout.pages()).bytes();
        let mut reading = self.marks.guest_memory.lock();
        match memory.check(ram) {
            Ok(()) => {
                let now = Instant::now();
                reading.note(now.checked_sub(age).unwrap_or(now), memory);
            }
            Err(figure) => {
                reading.refused = reading.refused.saturating_add(1);
                if reading.refused >= REFUSALS && !reading.is_logged {
                    reading.is_logged = true;
                    warn!(
                        vm = self.name(),
                        figure,
                        "guest reported impossible memory figures, which are ignored; check memfold-agent in the guest"
                    );
                }
            }
        }
    }

    /// Returns the newest memory figures of the guest, and when they arrived; `None` if it has
    /// reported none.
    pub(crate) fn guest_memory(&self) -> Option<(Instant, GuestMemory)> {
        self.marks.guest_memory.lock().newest()
    }

    /// Returns whether the guest's agent reports memory figures now.
    pub(crate) fn agent_reports_memory(&self) -> bool {
        let reading = self.marks.guest_memory.lock();
        reading.newest.as_ref().is_some_and(|(at, memory)| {
            memory.source == GuestMemorySource::Agent && at.elapsed() < AGENT_REPORTS
        })
    }

    /// Makes the guest's agent reclaim clean page cache, and waits for the result.
    pub(crate) fn trim(&self, trim: &Trim) -> Result<TrimResult, DaemonError> {
        let not_there = || AgentError::NoSession("the VM is ending".into());
        Ok(self.agent().ok_or_else(not_there)?.trim(trim)?)
    }

    /// Returns whether the host gets pages that are free in the guest, by free page reporting of
    /// its balloon. If QEMU must be asked and its monitor is in use, the next call asks again.
    pub(crate) fn reports_free_pages(&self) -> bool {
        let ask = || {
            let mut qmp = self.idle_monitor()?;
            let asked = qmp.briefly(balloon::reports_free_pages);
            let answer = asked.inspect_err(|error| {
                debug!(vm = self.name(), %error, "cannot ask QEMU whether the VM has free page reporting; asking again later");
            });
            answer.ok()
        };
        has_reporting(self.vm.spec(), &self.marks.reports_free_pages, ask)
    }

    /// Returns the size that the guest really has: its RAM without the pages in the balloon.
    pub(crate) fn balloon_size(&self) -> Result<ByteSize, DaemonError> {
        Ok(balloon::actual(&mut self.monitor())?)
    }

    /// Returns whether the VM has come from another QEMU by a migration, and the daemon does not
    /// know yet what its balloon held then.
    pub(crate) fn has_unseen_balloon(&self) -> bool {
        self.marks.has_unseen_balloon.load(Ordering::Relaxed)
    }

    /// Notes that the daemon knows what the balloon held when the VM came from another QEMU, or
    /// that somebody has moved the balloon since.
    pub(crate) fn note_balloon_known(&self) {
        self.marks
            .has_unseen_balloon
            .store(false, Ordering::Relaxed);
    }

    /// Sets the size that the guest should have. The guest reaches it later.
    pub(crate) fn set_balloon(&self, target: ByteSize) -> Result<(), DaemonError> {
        self.note_balloon_known();
        Ok(balloon::set_target(&mut self.monitor(), target)?)
    }

    /// Gives the guest back what is in its balloon.
    pub(crate) fn restore_balloon(&self) -> Result<(), DaemonError> {
        Ok(balloon::restore(&mut self.monitor(), None)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_vm::foreign::Foreign;
    use memfold_wire::memory::{LruGen, Pressure};

    #[test]
    fn figures_of_an_agent_and_of_a_balloon_driver_become_bytes_shares_and_pages() {
        let reading = MemoryReading {
            mem_total_kib: 1 << 20,
            mem_available_kib: 512 << 10,
            pressure: Some(Pressure {
                some_avg10: 250,
                ..Pressure::default()
            }),
            lru_gen: Some([LruGen { anon: 1, file: 2 }; 4]),
            cgroup_limit_kib: Some(64),
            ..MemoryReading::default()
        };
        let memory = of_agent(&reading);
        assert_eq!(memory.used_bytes(), ByteSize::mib(512));
        let share = memory.pressure.unwrap().some_avg10;
        assert!((share - 0.025).abs() < 1e-9, "{share}");
        let ages: Vec<u32> = memory.lru_gen.iter().map(|class| class.age_s).collect();
        assert_eq!(ages, [0, 60, 600, 3600]);
        assert_eq!(memory.lru_gen[3].file_bytes, ByteSize(8192));
        assert_eq!(memory.cgroup_limit_bytes, Some(ByteSize(65_536)));
        assert_eq!(memory.check(ByteSize(1 << 30)), Ok(()));

        let stats = GuestStats {
            total: 1 << 30,
            available: 1 << 29,
            swap_in: Some(8192),
            disk_caches: Some(1 << 28),
            major_faults: Some(7),
            ..GuestStats::default()
        };
        let memory = of_balloon(&stats);
        assert_eq!(memory.source, GuestMemorySource::Balloon);
        assert_eq!((memory.pswpin, memory.pgscan), (Some(2), None));
        // Right-sizing needs these two of guests without an agent.
        assert_eq!(memory.cached_bytes, Some(ByteSize(1 << 28)));
        assert_eq!(memory.pgmajfault, Some(7));
    }

    #[test]
    fn qemu_is_asked_once_whether_a_vm_that_another_program_describes_has_free_page_reporting() {
        let never = || -> Option<bool> { panic!("QEMU is asked") };
        // Attached to by its QMP socket, as VMs of libvirt and of Proxmox VE are.
        let known = OnceLock::new();
        assert!(!has_reporting(None, &known, || None), "not said yet");
        assert!(has_reporting(None, &known, || Some(true)));
        assert!(has_reporting(None, &known, never));
        let known = OnceLock::new();
        assert!(!has_reporting(None, &known, || Some(false)));
        assert!(!has_reporting(None, &known, never));
        // Started by memfold from the command line of such a VM.
        let mut spec = VmSpec::new("copy", ByteSize::mib(512));
        spec.foreign = Some(Foreign::default());
        let known = OnceLock::new();
        assert!(!has_reporting(Some(&spec), &known, || Some(false)));
        // memfold's own.
        spec.foreign = None;
        let known = OnceLock::new();
        assert!(has_reporting(Some(&spec), &known, never));
        spec.balloon = false;
        assert!(!has_reporting(Some(&spec), &known, never));
    }

    #[test]
    fn figures_that_overflow_are_possible_in_no_guest() {
        let reading = MemoryReading {
            mem_total_kib: u64::MAX,
            lru_gen: Some(
                [LruGen {
                    anon: u64::MAX,
                    file: u64::MAX,
                }; 4],
            ),
            ..MemoryReading::default()
        };
        let memory = of_agent(&reading);
        assert_eq!(memory.check(ByteSize(1 << 62)), Err("MemTotal"));
    }
}
