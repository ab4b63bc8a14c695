//! Settings of the engine that an operator may change.

use std::time::Duration;

use memfold_units::ByteSize;
use memfold_wire::library::{Freeze, MAX_STOP_US};

/// Settings of the engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSettings {
    /// Share of one core that folding may use over time, 0 to 1.
    pub cpu_share: f64,
    /// Most pages processed per second; `None` for no limit.
    pub pages_per_second: Option<u64>,
    /// Time for which a hint waits, so that its page is read from disk first.
    pub settle: Duration,
    /// Most bytes that each domain's page store may hold.
    pub store_cap: ByteSize,
    /// Most hints that wait for one VM.
    pub stack_limit: usize,
    /// Shortest time between two pauses of a VM with direct I/O.
    pub pause_interval: Duration,
    /// Longest planned time of such a pause.
    pub pause_length: Duration,
    /// Time between two syncs of a VM with the kernel's tables while it is active.
    pub sync_interval: Duration,
    /// The sysctl `vm.max_map_count`, which limits the mappings of a process.
    pub max_mappings: usize,
    /// Whether pages that hold only zeroes are given back to the host.
    pub drop_zero: bool,
    /// Shortest time between two fold-back passes, which search for pages that again equal the
    /// image of the VM's snapshot.
    pub fold_back_interval: Duration,
}

impl EngineSettings {
    /// Returns the freeze mode of orders that stop a VM with direct I/O.
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
