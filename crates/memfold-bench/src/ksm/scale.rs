//! The scale of study B: number and size of VMs, data, and repetitions.

use memfold_units::ByteSize;

use crate::study::Options;

/// Pages each 20 ms; none: KSM off. 100 is the default.
pub(super) const SPEEDS: [Option<u64>; 5] = [None, Some(100), Some(1000), Some(5000), Some(25_000)];

/// What to measure.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    /// Most VMs at once.
    pub vms: usize,
    /// RAM of each.
    pub memory: ByteSize,
    /// Data that a VM holds, where it holds data.
    pub data_mib: u64,
    /// Times that everything is measured that is a time.
    pub rounds: usize,
    /// How many of [`SPEEDS`].
    pub speeds: usize,
}

impl Scale {
    /// Two VMs of 384 MiB, once.
    const fn quick() -> Self {
        Self {
            vms: 2,
            memory: ByteSize::mib(384),
            data_mib: 64,
            rounds: 1,
            speeds: 3,
        }
    }

    /// The study's: four VMs of 1 GiB.
    const fn full() -> Self {
        Self {
            vms: 4,
            memory: ByteSize::mib(1024),
            data_mib: 192,
            rounds: 3,
            speeds: SPEEDS.len(),
        }
    }

    pub fn of(options: &Options) -> Self {
        let mut scale = options.pick(Self::quick(), Self::full());
        scale.vms = options.vms.map_or(scale.vms, usize::from);
        scale
    }
}
