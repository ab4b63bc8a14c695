//! How much of everything.

use memfold_units::ByteSize;

/// Pages each 20 ms; none: KSM off. 100 is the default.
pub(super) const SPEEDS: [Option<u64>; 5] = [None, Some(100), Some(1000), Some(5000), Some(25_000)];

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Most VMs at once.
    pub(super) vms: usize,
    /// RAM of each.
    pub(super) memory: ByteSize,
    /// Data that a VM holds, where it holds data.
    pub(super) data_mib: u64,
    /// Times that everything is measured that is a time.
    pub(super) rounds: usize,
    /// How many of [`SPEEDS`].
    pub(super) speeds: usize,
}

impl Options {
    /// Two VMs of 384 MiB, once.
    #[must_use]
    pub const fn quick() -> Self {
        Self {
            vms: 2,
            memory: ByteSize::mib(384),
            data_mib: 64,
            rounds: 1,
            speeds: 3,
        }
    }

    /// So many VMs at most.
    #[must_use]
    pub const fn with_vms(mut self, vms: usize) -> Self {
        self.vms = vms;
        self
    }
}

impl Default for Options {
    /// The study's: four VMs of 1 GiB.
    fn default() -> Self {
        Self {
            vms: 4,
            memory: ByteSize::mib(1024),
            data_mib: 192,
            rounds: 3,
            speeds: SPEEDS.len(),
        }
    }
}
