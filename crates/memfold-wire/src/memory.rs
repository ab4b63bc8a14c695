//! A guest's memory figures, and orders to trim its page cache: messages between the daemon and the
//! guest agent.
//!
//! Agents and daemons of protocol version 1 exist that know none of these messages, and a message
//! that is not known ends the connection. So an agent adds [`FEATURE`] to its version in
//! [`Hello`](crate::agent::FromAgent::Hello), the daemon sends these messages only to an agent that
//! did, and the agent sends figures only after the daemon has asked for them.
//!
//! All figures are the guest's word, so they are untrusted. Their names are the kernel's: fields of
//! `/proc/meminfo`, `/proc/vmstat`, `/proc/pressure/memory` and `lru_gen`.

use serde::{Deserialize, Serialize};

use crate::frame::FrameError;

/// Feature of an agent that knows the messages of this module.
pub const FEATURE: &str = "memory";

/// Lower bounds of the age classes of [`LruGen`], in seconds.
pub const AGE_CLASSES_S: [u32; 4] = [0, 60, 600, 3600];

/// Shortest interval between two readings that the daemon may ask for, in milliseconds.
pub const MIN_INTERVAL_MS: u32 = 100;

/// Returns the text by which an agent of version `package` announces that it knows `features`:
/// build metadata of [Semantic Versioning](https://semver.org), such as `0.1.0+memory`.
#[must_use]
pub fn version_with(package: &str, features: &[&str]) -> String {
    if features.is_empty() {
        return package.to_owned();
    }
    format!("{package}+{}", features.join("."))
}

/// Returns whether the agent with this version text knows `feature`.
#[must_use]
pub fn has_feature(agent: &str, feature: &str) -> bool {
    let features = agent.split_once('+').map_or("", |(_, features)| features);
    features.split('.').any(|known| known == feature)
}

/// Memory pressure (PSI) of the whole guest: `/proc/pressure/memory`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pressure {
    /// Time in which at least one task waited for memory, in microseconds since boot
    /// (`some total`).
    pub some_us: u64,
    /// Time in which all tasks that were not idle waited for memory, in microseconds since boot
    /// (`full total`).
    pub full_us: u64,
    /// Share of the last ten seconds in which a task waited, in hundredths of a percent
    /// (`some avg10`).
    pub some_avg10: u16,
    /// Share of the last ten seconds in which all tasks waited, in hundredths of a percent
    /// (`full avg10`).
    pub full_avg10: u16,
}

/// Pages of the multi-gen LRU's generations of one age class, of all control groups together
/// (`/sys/kernel/debug/lru_gen`). Age: time since a generation was created, so each of its pages
/// was last seen to be used before that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LruGen {
    /// Number of anonymous pages.
    pub anon: u64,
    /// Number of pages of files.
    pub file: u64,
}

/// A guest's memory figures at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReading {
    /// `MemTotal` in KiB.
    pub mem_total_kib: u64,
    /// `MemFree` in KiB.
    pub mem_free_kib: u64,
    /// `MemAvailable` in KiB.
    pub mem_available_kib: u64,
    /// `Dirty` in KiB.
    pub dirty_kib: u64,
    /// `AnonPages` in KiB.
    pub anon_pages_kib: u64,
    /// `Cached` in KiB: page cache, files in memory (tmpfs) included.
    pub cached_kib: u64,
    /// `Shmem` in KiB: the part of `Cached` that no disk holds.
    pub shmem_kib: u64,
    /// `SwapTotal` in KiB.
    pub swap_total_kib: u64,
    /// `SwapFree` in KiB.
    pub swap_free_kib: u64,
    /// `workingset_refault_file`: pages of files that were read again soon after their eviction.
    pub workingset_refault_file: u64,
    /// `workingset_refault_anon`: the same of anonymous pages.
    pub workingset_refault_anon: u64,
    /// `workingset_activate_file`: refaulted pages of files that were in use shortly before their
    /// eviction.
    pub workingset_activate_file: u64,
    /// `workingset_activate_anon`: the same of anonymous pages.
    pub workingset_activate_anon: u64,
    /// Pages scanned for reclaim: `pgscan_kswapd` + `pgscan_direct`.
    pub pgscan: u64,
    /// Pages reclaimed: `pgsteal_kswapd` + `pgsteal_direct`.
    pub pgsteal: u64,
    /// `pswpin`: pages read from swap.
    pub pswpin: u64,
    /// `pswpout`: pages written to swap.
    pub pswpout: u64,
    /// `allocstall_*`: allocations that had to reclaim memory themselves.
    pub allocstall: u64,
    /// `oom_kill`: processes that the kernel killed for lack of memory.
    pub oom_kill: u64,
    /// Memory pressure; `None`: the kernel has no PSI, or PSI is off.
    pub pressure: Option<Pressure>,
    /// Pages by age, in the order of [`AGE_CLASSES_S`]; `None`: the kernel does not use the
    /// multi-gen LRU, or does not show it (debugfs).
    pub lru_gen: Option<[LruGen; AGE_CLASSES_S.len()]>,
    /// Smallest `memory.max` or `memory.high` of the agent's control group and the groups above it,
    /// in KiB; `None`: no limit.
    pub cgroup_limit_kib: Option<u64>,
}

/// Order to trim the guest's page cache: to reclaim clean pages of files that the guest has not
/// used for longest. A new order ends an earlier one; an order for 0 bytes only does that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrimOrder {
    /// Number of the order, chosen by the daemon, which the answer repeats.
    pub order: u32,
    /// Most bytes to reclaim.
    pub bytes: u64,
    /// Target pressure: the trim ends when tasks waited for memory (`some`) for more than this
    /// share of the time between two steps, in hundredths of a percent.
    pub max_some: u16,
    /// Time after which the trim ends, in milliseconds.
    pub deadline_ms: u32,
    /// Whether anonymous memory must stay out of swap. If false, the kernel may swap as it does
    /// for its own reclaim.
    pub spare_swap: bool,
}

/// Why a trim ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TrimEnd {
    /// All bytes of the order were reclaimed.
    Done,
    /// Tasks of the guest waited for memory longer than the order allows.
    Pressure,
    /// The guest read again what was taken (refaults).
    Refaults,
    /// The order's time was over.
    Deadline,
    /// The kernel found no more pages to reclaim.
    Exhausted,
    /// Another order came, or the daemon ended this one.
    Replaced,
    /// The guest's owner forbids trimming.
    Forbidden,
    /// The guest's kernel has no interface to reclaim page cache alone.
    Unsupported,
    /// The kernel refused to reclaim; the error number.
    Failed(i32),
}

/// How a trim reclaimed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TrimMethod {
    /// None: nothing was tried.
    None,
    /// `memory.reclaim` of the control groups below the root (Linux 5.19; with `swappiness=`,
    /// Linux 6.7).
    MemoryReclaim,
}

/// Answer to a [`TrimOrder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrimResult {
    /// Number of the [`TrimOrder`] that this answers.
    pub order: u32,
    /// Bytes that the kernel reclaimed, as it counts them.
    pub reclaimed_bytes: u64,
    /// Pages of files that the guest read again while the trim ran.
    pub refaults: u64,
    /// Number of steps in which the agent reclaimed.
    pub steps: u32,
    /// How memory was reclaimed.
    pub method: TrimMethod,
    /// Why the trim ended.
    pub end: TrimEnd,
}

/// Checks the interval of [`ToAgent::ReportMemory`](crate::agent::ToAgent::ReportMemory).
pub(crate) fn validate_interval(interval_ms: u32) -> Result<(), FrameError> {
    if interval_ms != 0 && interval_ms < MIN_INTERVAL_MS {
        return Err(FrameError::Limit("memory readings more than ten a second"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::{FromAgent, ToAgent};
    use crate::frame::{HEADER, decode_body, encode};

    #[test]
    fn an_agent_announces_its_features_in_its_version_text_which_older_daemons_only_show() {
        let agent = version_with("0.1.0", &["stream", FEATURE]);
        assert_eq!(agent, "0.1.0+stream.memory");
        assert!(has_feature(&agent, FEATURE) && has_feature(&agent, "stream"));
        for older in ["0.1.0", "0.1.0+", "memory", "0.1.0+memoryless", ""] {
            assert!(!has_feature(older, FEATURE), "{older}");
        }
        assert_eq!(version_with("0.1.0", &[]), "0.1.0");
    }

    #[test]
    fn a_memory_reading_of_a_guest_of_8_gib_after_a_month_takes_less_than_160_bytes() {
        let reading = MemoryReading {
            mem_total_kib: 8 << 20,
            mem_free_kib: 1 << 20,
            mem_available_kib: 6 << 20,
            dirty_kib: 12_000,
            anon_pages_kib: 1 << 20,
            cached_kib: 5 << 20,
            shmem_kib: 9_000,
            swap_total_kib: 2 << 20,
            swap_free_kib: 2 << 20,
            workingset_refault_file: 90_000_000,
            workingset_refault_anon: 1_000_000,
            workingset_activate_file: 40_000_000,
            workingset_activate_anon: 500_000,
            pgscan: 400_000_000,
            pgsteal: 300_000_000,
            pswpin: 1_000_000,
            pswpout: 2_000_000,
            allocstall: 20_000,
            oom_kill: 3,
            pressure: Some(Pressure {
                some_us: 90_000_000_000,
                full_us: 60_000_000_000,
                some_avg10: 812,
                full_avg10: 402,
            }),
            lru_gen: Some(
                [LruGen {
                    anon: 90_000,
                    file: 400_000,
                }; 4],
            ),
            cgroup_limit_kib: Some(4 << 20),
        };
        let frame = encode(&FromAgent::Memory(Box::new(reading.clone()))).unwrap();
        assert!(frame.len() < 160, "{}", frame.len());
        let read: FromAgent = decode_body(&frame[HEADER..]).unwrap();
        assert_eq!(read, FromAgent::Memory(Box::new(reading)));
    }

    #[test]
    fn a_daemon_that_asks_for_more_than_ten_memory_readings_a_second_breaks_the_protocol() {
        for (interval_ms, is_valid) in [(0, true), (99, false), (100, true), (u32::MAX, true)] {
            let frame = encode(&ToAgent::ReportMemory { interval_ms }).unwrap();
            let read = decode_body::<ToAgent>(&frame[HEADER..]);
            assert_eq!(read.is_ok(), is_valid, "{interval_ms}");
        }
    }
}
