//! Settings of the fold engine that an operator may change, such as its CPU budget.

use std::time::Duration;

use memfold_host::{cores, default_fold_cpu_percent};
use memfold_units::ByteSize;
use memfold_wire::library::{Freeze, MAX_STOP_US};

/// Settings of the fold engine: budgets, intervals and limits.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSettings {
    /// CPU time that folding may use on average, as a fraction of one core, 0 to 1.
    pub cpu_share: f64,
    /// Maximum number of pages that the engine processes per second; `None` for no limit.
    pub pages_per_second: Option<u64>,
    /// Settling time: time for which a hint waits before its pages are folded, so that the guest
    /// has read them from disk.
    pub settle: Duration,
    /// Maximum size of each trust domain's page store.
    pub store_cap: ByteSize,
    /// Maximum number of hints that wait for one VM; the oldest hints beyond it are dropped.
    pub stack_limit: usize,
    /// Minimum time between two pauses of a VM whose disks use direct I/O. In such a pause, the
    /// VM's pages are folded again.
    pub pause_interval: Duration,
    /// Planned maximum length of a pause of a VM whose disks use direct I/O. In such a pause, the
    /// VM's pages are folded again.
    pub pause_length: Duration,
    /// Time between two reads of the kernel's page tables of a VM with recent hints or folds. Other
    /// VMs are read less often.
    pub sync_interval: Duration,
    /// Value of the sysctl `vm.max_map_count`, which limits the mappings of a process.
    pub max_mappings: usize,
    /// Whether memfold discards guest pages that hold only zeroes.
    pub drop_zero: bool,
    /// Minimum time between two fold-back passes over a VM, which search for pages that equal the
    /// image of the VM's snapshot again.
    pub fold_back_interval: Duration,
}

impl EngineSettings {
    /// Returns the freeze mode of orders that stop a VM whose disks use direct I/O.
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
            cpu_share: default_fold_cpu_percent(cores()) / 100.0,
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
