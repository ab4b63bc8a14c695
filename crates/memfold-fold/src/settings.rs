//! What an operator may set.

use std::time::Duration;

use memfold_units::ByteSize;
use memfold_wire::library::{Freeze, MAX_STOP_US};

/// What an operator may set.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSettings {
    /// Share of one core that folding may use over time, 0 to 1.
    pub cpu_share: f64,
    /// Most pages looked at in a second; `None` for no limit.
    pub pages_per_second: Option<u64>,
    /// How long a hint waits for its page to be read from disk.
    pub settle: Duration,
    /// Bytes that each domain's page store may hold.
    pub store_cap: ByteSize,
    /// Hints that wait for one VM at most.
    pub stack_limit: usize,
    /// Shortest time between two pauses of a VM with direct I/O.
    pub pause_interval: Duration,
    /// Longest time that such a pause may last by plan.
    pub pause_length: Duration,
    /// Time between two looks at the kernel's tables while something happens.
    pub sync_interval: Duration,
    /// `vm.max_map_count`.
    pub max_mappings: usize,
    /// Whether pages of zeroes are given back to the host.
    pub drop_zero: bool,
    /// Shortest time between two passes that look for pages that are again as in the snapshot that
    /// their VM runs from.
    pub fold_back_interval: Duration,
}

impl EngineSettings {
    /// A fold order's way to stop a VM with direct I/O.
    pub(super) fn pause(&self) -> Freeze {
        let limit = self.pause_length.as_micros();
        Freeze::Stopped {
            limit_us: u32::try_from(limit).unwrap_or(MAX_STOP_US).min(MAX_STOP_US),
        }
    }
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            cpu_share: 0.05,
            pages_per_second: None,
            settle: Duration::from_secs(1),
            store_cap: ByteSize::mib(16 << 10),
            stack_limit: 16_384,
            pause_interval: Duration::from_secs(1),
            pause_length: Duration::from_millis(5),
            sync_interval: Duration::from_secs(3),
            max_mappings: 65_530,
            drop_zero: true,
            fold_back_interval: Duration::from_secs(60),
        }
    }
}
