//! How large the study `ksm` is: number and size of VMs, amount of data, and repetitions. With
//! `--quick`, all are smaller.

use memfold_units::ByteSize;

use crate::study::Options;

/// Speeds of ksmd that are measured: pages that it scans every 20 ms; `None`: KSM off. 100 is the
/// kernel's default.
pub(super) const SPEEDS: [Option<u64>; 5] = [None, Some(100), Some(1000), Some(5000), Some(25_000)];

/// Numbers and sizes of the study's measurements.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    /// Largest number of VMs that run at the same time.
    pub vms: usize,
    /// RAM of each VM.
    pub memory: ByteSize,
    /// Amount of data that a VM keeps in its memory, in MiB, unless it keeps none.
    pub data_mib: u64,
    /// Number of times that every timed measurement is repeated.
    pub rounds: usize,
    /// Number of ksmd's speeds that are measured: the first ones of [`SPEEDS`].
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
