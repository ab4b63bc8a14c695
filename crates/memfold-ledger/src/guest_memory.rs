//! A VM's memory figures as its guest reports them: what the guest needs, beside what the VM takes
//! of the host.
//!
//! A guest can report false figures. They are shown, and kept within bounds
//! ([`GuestMemory::check`]), but no figure of the host is computed from them.

use memfold_units::ByteSize;
use serde::{Deserialize, Serialize};

/// Largest number of pages that a counter may show: 2^60 bytes, in pages.
const MOST_PAGES: u64 = 1 << 48;

/// Largest size of a guest's swap space.
const MOST_SWAP: u64 = 1 << 50;

/// Age up to which figures count as present, in milliseconds.
const FRESH_MS: u64 = 60_000;

/// Program that reported a guest's memory figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestMemorySource {
    /// memfold's agent in the guest.
    #[default]
    Agent,
    /// The guest's balloon driver, which knows fewer figures.
    Balloon,
}

/// Memory pressure (PSI) of a whole guest, from its `/proc/pressure/memory`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GuestPressure {
    /// Time in which at least one task of the guest waited for memory, in microseconds since the
    /// guest's boot.
    pub some_us: u64,
    /// Time in which all tasks of the guest that were not idle waited for memory, in microseconds
    /// since the guest's boot.
    pub full_us: u64,
    /// Share of the last ten seconds in which at least one task waited, from 0 to 1.
    pub some_avg10: f64,
    /// Share of the last ten seconds in which all tasks waited, from 0 to 1.
    pub full_avg10: f64,
}

/// Guest pages of one age class of the multi-gen LRU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestLruGen {
    /// Lower bound of the class's ages in seconds. The age is the time since the kernel made the
    /// generation to which a page belongs.
    pub age_s: u32,
    /// Anonymous memory.
    pub anon_bytes: ByteSize,
    /// Page cache.
    pub file_bytes: ByteSize,
}

/// Memory figures of a guest, as the guest reports them. Names are those of the guest's kernel
/// (`/proc/meminfo`, `/proc/vmstat`); counters count from the guest's boot. Null: the guest does
/// not report the figure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GuestMemory {
    /// Which program reported the figures.
    pub source: GuestMemorySource,
    /// Age of the figures in milliseconds, when this report was made.
    pub age_ms: u64,
    /// `MemTotal`: memory that the guest's kernel manages. Pages in the balloon are part of it if
    /// the balloon deflates on OOM, and then count as used.
    pub mem_total_bytes: ByteSize,
    /// `MemFree`: unused memory.
    pub mem_free_bytes: Option<ByteSize>,
    /// `MemAvailable`: memory that programs could get without swapping.
    pub mem_available_bytes: ByteSize,
    /// `Dirty`: page cache that is not on disk yet.
    pub dirty_bytes: Option<ByteSize>,
    /// `AnonPages`: memory of programs.
    pub anon_pages_bytes: Option<ByteSize>,
    /// `Cached`: page cache and files in memory.
    pub cached_bytes: Option<ByteSize>,
    /// `Shmem`: the part of `Cached` that no disk holds.
    pub shmem_bytes: Option<ByteSize>,
    /// `SwapTotal`.
    pub swap_total_bytes: Option<ByteSize>,
    /// `SwapFree`.
    pub swap_free_bytes: Option<ByteSize>,
    /// Memory pressure.
    pub pressure: Option<GuestPressure>,
    /// `workingset_refault_file`: number of pages of files that were read again soon after their
    /// eviction.
    pub workingset_refault_file: Option<u64>,
    /// `workingset_refault_anon`: the same of anonymous pages.
    pub workingset_refault_anon: Option<u64>,
    /// `workingset_activate_file`: number of refaulted pages of files that were in use shortly
    /// before their eviction.
    pub workingset_activate_file: Option<u64>,
    /// `workingset_activate_anon`: the same of anonymous pages.
    pub workingset_activate_anon: Option<u64>,
    /// `pgscan_*`: number of pages scanned for reclaim.
    pub pgscan: Option<u64>,
    /// `pgsteal_*`: number of pages reclaimed.
    pub pgsteal: Option<u64>,
    /// `pswpin`: number of pages read from swap.
    pub pswpin: Option<u64>,
    /// `pswpout`: number of pages written to swap.
    pub pswpout: Option<u64>,
    /// `allocstall_*`: number of allocations that had to reclaim memory themselves.
    pub allocstall: Option<u64>,
    /// `oom_kill`: number of processes that the guest's kernel killed for lack of memory.
    pub oom_kill: Option<u64>,
    /// `pgmajfault`: number of page faults for which the guest read from a disk. Only the balloon
    /// driver reports it: it stands for the refaults, which only the agent reports.
    #[serde(default)]
    pub pgmajfault: Option<u64>,
    /// Guest pages by age, from the multi-gen LRU; empty: the guest's kernel does not show it.
    #[serde(default)]
    pub lru_gen: Vec<GuestLruGen>,
    /// Smallest memory limit of the control groups that contain the agent; null: no limit.
    pub cgroup_limit_bytes: Option<ByteSize>,
}

impl GuestMemory {
    /// Checks that the figures are possible in a guest with `ram` bytes of RAM. Returns the name of
    /// the first figure that is not.
    pub fn check(&self, ram: ByteSize) -> Result<(), &'static str> {
        let total = self.mem_total_bytes.0;
        let fits = |bytes: Option<ByteSize>, most: u64| bytes.is_none_or(|b| b.0 <= most);
        let swap_total = self.swap_total_bytes.map_or(0, |bytes| bytes.0);
        let counters = [
            self.workingset_refault_file,
            self.workingset_refault_anon,
            self.workingset_activate_file,
            self.workingset_activate_anon,
            self.pgscan,
            self.pgsteal,
            self.pswpin,
            self.pswpout,
            self.allocstall,
            self.oom_kill,
            self.pgmajfault,
        ];
        let shares = self
            .pressure
            .iter()
            .flat_map(|p| [p.some_avg10, p.full_avg10]);
        let lru_gen = self.lru_gen.iter().map(|class| {
            let both = class.anon_bytes.0.checked_add(class.file_bytes.0);
            both.unwrap_or(u64::MAX)
        });
        for (is_possible, name) in [
            (total > 0 && total <= ram.0, "MemTotal"),
            (fits(self.mem_free_bytes, total), "MemFree"),
            (self.mem_available_bytes.0 <= total, "MemAvailable"),
            (fits(self.dirty_bytes, total), "Dirty"),
            (fits(self.anon_pages_bytes, total), "AnonPages"),
            (fits(self.cached_bytes, total), "Cached"),
            (fits(self.shmem_bytes, total), "Shmem"),
            (swap_total <= MOST_SWAP, "SwapTotal"),
            (fits(self.swap_free_bytes, swap_total), "SwapFree"),
            (
                counters.iter().flatten().all(|count| *count <= MOST_PAGES),
                "a counter of /proc/vmstat",
            ),
            (
                shares.into_iter().all(|share| (0.0..=1.0).contains(&share)),
                "avg10 of PSI",
            ),
            (
                lru_gen.into_iter().all(|bytes| bytes <= total),
                "a generation of the multi-gen LRU",
            ),
        ] {
            if !is_possible {
                return Err(name);
            }
        }
        Ok(())
    }

    /// Returns whether the figures are from the last minute. Older ones are shown with their age,
    /// but are no sample of the present.
    #[must_use]
    pub const fn is_fresh(&self) -> bool {
        self.age_ms <= FRESH_MS
    }

    /// Returns the part of the guest's memory that is not available to programs: what the guest
    /// needs now.
    #[must_use]
    pub const fn used_bytes(&self) -> ByteSize {
        let used = self
            .mem_total_bytes
            .0
            .saturating_sub(self.mem_available_bytes.0);
        ByteSize(used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: ByteSize = ByteSize(1 << 30);

    fn possible() -> GuestMemory {
        GuestMemory {
            mem_total_bytes: ByteSize::mib(1000),
            mem_free_bytes: Some(ByteSize::mib(100)),
            mem_available_bytes: ByteSize::mib(700),
            swap_total_bytes: Some(ByteSize::mib(64)),
            swap_free_bytes: Some(ByteSize::mib(64)),
            pressure: Some(GuestPressure {
                some_avg10: 1.0,
                ..GuestPressure::default()
            }),
            ..GuestMemory::default()
        }
    }

    #[test]
    fn a_guest_s_impossible_memory_figures_are_named() {
        type Lie = fn(&mut GuestMemory);
        assert_eq!(possible().check(GIB), Ok(()));
        assert_eq!(possible().used_bytes(), ByteSize::mib(300));
        let lies: [(Lie, &str); 9] = [
            (|m| m.mem_total_bytes = ByteSize(0), "MemTotal"),
            (|m| m.mem_total_bytes = ByteSize(u64::MAX), "MemTotal"),
            (|m| m.mem_available_bytes = GIB, "MemAvailable"),
            (|m| m.mem_free_bytes = Some(GIB), "MemFree"),
            (|m| m.cached_bytes = Some(ByteSize(u64::MAX)), "Cached"),
            (|m| m.swap_free_bytes = Some(GIB), "SwapFree"),
            (|m| m.pgsteal = Some(u64::MAX), "a counter of /proc/vmstat"),
            (
                |m| {
                    m.pressure = Some(GuestPressure {
                        full_avg10: f64::NAN,
                        ..GuestPressure::default()
                    });
                },
                "avg10 of PSI",
            ),
            (
                |m| {
                    m.lru_gen = vec![GuestLruGen {
                        age_s: 0,
                        anon_bytes: ByteSize(u64::MAX),
                        file_bytes: ByteSize(u64::MAX),
                    }];
                },
                "a generation of the multi-gen LRU",
            ),
        ];
        for (lie, name) in lies {
            let mut memory = possible();
            lie(&mut memory);
            assert_eq!(memory.check(GIB), Err(name));
        }
    }
}
