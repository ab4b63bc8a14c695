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
    /// Returns the scale of a quick study (two VMs of 384 MiB, one round) or of the full study
    /// (four VMs of 1 GiB).
    pub fn of(options: &Options) -> Self {
        let vms = options.vms.map(usize::from);
        let (memory_mib, data_mib) = options.pick((384, 64), (1024, 192));
        Self {
            vms: vms.unwrap_or(options.pick(2, 4)),
            memory: ByteSize::mib(memory_mib),
            data_mib,
            rounds: options.pick(1, 3),
            speeds: options.pick(3, SPEEDS.len()),
        }
    }
}
