//! What a guest's programs want: anonymous memory and files, in phases.

use super::random::Random;

const MIB: f64 = 1_048_576.0;

/// Files that a program reads again and again.
#[derive(Clone, Copy, Debug)]
pub struct FileSet {
    /// Bytes of all files.
    pub bytes: f64,
    /// Time in which as many bytes are read as the set has, in seconds.
    pub period: f64,
    /// How much of the reading goes to few of the bytes: a page cache that holds the share `x` of
    /// the set serves `x` to the power of `skew` of all reads (the distribution of reuse
    /// distances). 1: all bytes are read equally often; less: some more often.
    pub skew: f64,
}

/// A time in which a guest does one thing.
#[derive(Clone, Copy, Debug)]
pub struct Phase {
    /// Its length in seconds.
    pub seconds: f64,
    /// Anonymous memory at its beginning, in bytes.
    pub anonymous: f64,
    /// Growth of anonymous memory, in bytes a second: a leak.
    pub leak: f64,
    /// How fast memory is allocated, in bytes a second.
    pub allocation_rate: f64,
    /// Index of the file set that is read.
    pub files: usize,
    /// Files that are read once, in bytes a second.
    pub stream: f64,
    /// Page cache that is written and not yet on the disk, in bytes.
    pub dirty: f64,
}

/// A guest's phases and files.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Anonymous memory that the guest always needs; what is left after the OOM killer.
    pub base: f64,
    /// The files. The first set is the operating system's own.
    pub sets: Vec<FileSet>,
    /// The phases. After the last one, the first begins again.
    pub phases: Vec<Phase>,
}

impl Workload {
    /// Makes the workload of a guest with `ram` bytes for one day.
    #[must_use]
    pub fn random(random: &mut Random, ram: f64) -> Self {
        let base = 60.0 * MIB + ram * random.between(0.04, 0.12);
        let mut set = |low: f64, high: f64, shortest: f64, longest: f64| FileSet {
            bytes: ram * random.between(low, high),
            period: random.between(shortest, longest),
            skew: random.between(0.4, 1.0),
        };
        let sets = vec![
            set(0.02, 0.06, 100.0, 300.0),
            set(0.10, 0.40, 30.0, 90.0),
            set(0.10, 0.35, 10.0, 60.0),
            set(0.05, 0.25, 5.0, 30.0),
        ];
        let mut phases = Vec::new();
        let mut day = 0.0;
        while day < 86_400.0 {
            let phase = Self::random_phase(random, ram, base);
            day += phase.seconds;
            phases.push(phase);
        }
        Self { base, sets, phases }
    }

    fn random_phase(random: &mut Random, ram: f64, base: f64) -> Phase {
        let minutes = |random: &mut Random, low, high| 60.0 * random.between(low, high);
        let idle = Phase {
            seconds: minutes(random, 10.0, 120.0),
            anonymous: base,
            leak: 0.0,
            allocation_rate: 200.0 * MIB,
            files: 0,
            stream: random.between(0.0, 0.2) * MIB,
            dirty: MIB,
        };
        match random.choose(&[0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5]) {
            0 => idle,
            1 => Phase {
                seconds: minutes(random, 5.0, 60.0),
                anonymous: base + ram * random.between(0.05, 0.3),
                files: 1,
                stream: random.between(1.0, 10.0) * MIB,
                dirty: ram * 0.02,
                ..idle
            },
            2 => Phase {
                seconds: minutes(random, 30.0, 240.0),
                anonymous: base + ram * random.between(0.1, 0.35),
                files: 2,
                stream: random.between(0.0, 1.0) * MIB,
                dirty: ram * 0.01,
                ..idle
            },
            3 => Phase {
                seconds: minutes(random, 30.0, 240.0),
                anonymous: base + ram * random.between(0.05, 0.2),
                files: 3,
                stream: random.between(0.5, 3.0) * MIB,
                ..idle
            },
            4 => {
                let seconds = minutes(random, 60.0, 180.0);
                Phase {
                    seconds,
                    leak: ram * random.between(0.3, 1.6) / seconds,
                    ..idle
                }
            }
            _ => Phase {
                seconds: minutes(random, 1.0, 5.0),
                anonymous: base + (512.0 * MIB).min(ram / 3.0),
                allocation_rate: 1024.0 * MIB,
                ..idle
            },
        }
    }
}
