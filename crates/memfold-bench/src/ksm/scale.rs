//! The scale of study B: number and size of VMs, data, and repetitions.

use memfold_units::ByteSize;

use crate::study::Options;

/// Speeds of ksmd: pages each 20 ms; `None`: KSM off. 100 is the kernel's default.
pub(super) const SPEEDS: [Option<u64>; 5] = [None, Some(100), Some(1000), Some(5000), Some(25_000)];

/// The measurements to make.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    /// Most VMs at the same time.
    pub vms: usize,
    /// RAM of each VM.
    pub memory: ByteSize,
    /// Amount of data in a VM that holds data, in MiB.
    pub data_mib: u64,
    /// Number of measurements of everything whose time is measured.
    pub rounds: usize,
    /// Number of speeds among [`SPEEDS`] to measure.
    pub speeds: usize,
}

impl Scale {
    /// Returns the scale of a quick study: two VMs of 384 MiB, one round.
    const fn quick() -> Self {
        Self {
            vms: 2,
            memory: ByteSize::mib(384),
            data_mib: 64,
            rounds: 1,
            speeds: 3,
        }
    }

    /// Returns the scale of the full study: four VMs of 1 GiB.
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
