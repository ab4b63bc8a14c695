//! Reads this host's memory figures, by which it decides how much RAM it lends to other hosts.
//!
//! Sources: `Documentation/filesystems/proc.rst` (meminfo), `Documentation/accounting/psi.rst`,
//! `mm/vmstat.c` (refaults: pages that were reclaimed and needed again; counted in
//! `mm/workingset.c`).

use std::io;
use std::path::Path;
use std::time::Duration;

/// Memory figures of this host at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Time at which the host's figures were read, counted from a fixed moment such as the lender's
    /// start.
    pub at: Duration,
    /// Size of the host's RAM in bytes (`MemTotal` of `/proc/meminfo`).
    pub total_bytes: u64,
    /// Bytes of memory that the host's programs can get without swapping (`MemAvailable` of
    /// `/proc/meminfo`).
    pub available_bytes: u64,
    /// Percentage of the last 10 s in which at least one task of the host waited for memory (PSI
    /// `some`). `None` if the kernel has no PSI.
    pub some_avg10: Option<f64>,
    /// Percentage of the last 60 s in which at least one task of the host waited for memory (PSI
    /// `some`). `None` if the kernel has no PSI.
    pub some_avg60: Option<f64>,
    /// Percentage of the last 10 s in which all tasks of the host waited for memory (PSI `full`).
    /// `None` if the kernel has no PSI.
    pub full_avg10: Option<f64>,
    /// Number of the host's pages that were reclaimed and needed again, since boot.
    pub refaults: u64,
    /// Number of pages that the host has read from its swap, since boot.
    pub swap_ins: u64,
    /// Bytes that the host's VMs may claim at once by writing to shared pages (the brake's debt x
    /// cover). The daemon sets this field; the kernel does not report it.
    pub owed_bytes: u64,
    /// Number of guests on the host that report a lack of memory. The daemon sets this field.
    pub short_guests: u32,
    /// Bytes of lent memory that right-sizing wants back for the host's VMs. The daemon sets this
    /// field.
    pub wanted_back_bytes: u64,
    /// Bytes that must stay available beside what is offered. The daemon sets this field.
    pub kept_bytes: u64,
    /// Size in bytes of the host's exports that are still being allocated. Until they are
    /// allocated, available memory shrinks for them by at most this much. Nobody knows how much is
    /// allocated already.
    pub beginning_bytes: u64,
}

impl Sample {
    /// Reads the host's figures now. `proc` is `/proc`; a test uses another directory.
    pub fn read(proc: &Path, at: Duration) -> io::Result<Self> {
        let text = |name: &str| std::fs::read_to_string(proc.join(name));
        let (meminfo, vmstat) = (text("meminfo")?, text("vmstat")?);
        // A kernel without PSI does not have this file.
        let pressure = text("pressure/memory").unwrap_or_default();
        Self::parse(&format!("{meminfo}\n{vmstat}\n{pressure}"), at)
    }

    /// Reads only the host's total and available memory, which takes almost no time.
    pub fn glance(proc: &Path) -> io::Result<Self> {
        let meminfo = std::fs::read_to_string(proc.join("meminfo"))?;
        Self::parse(&meminfo, Duration::ZERO)
    }

    /// Parses the lines of the three files: meminfo, vmstat, pressure/memory.
    fn parse(text: &str, at: Duration) -> io::Result<Self> {
        let parsed = Self::parse_lines(text, at);
        parsed.ok_or_else(|| io::Error::other("/proc/meminfo has no MemAvailable"))
    }

    fn parse_lines(text: &str, at: Duration) -> Option<Self> {
        let mut sample = Self {
            at,
            ..Self::default()
        };
        let mut available = None;
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let name = words.next().unwrap_or_default();
            let number = || words.clone().next().and_then(|w| w.parse::<u64>().ok());
            let average = |of: &str| {
                let mut values = words.clone();
                values.find_map(|word| word.strip_prefix(of)?.parse::<f64>().ok())
            };
            match name {
                "MemTotal:" => sample.total_bytes = number()?.checked_mul(1024)?,
                "MemAvailable:" => available = number()?.checked_mul(1024),
                "workingset_refault_anon" | "workingset_refault_file" => {
                    sample.refaults = sample.refaults.saturating_add(number()?);
                }
                "pswpin" => sample.swap_ins = number()?,
                "some" => {
                    sample.some_avg10 = average("avg10=");
                    sample.some_avg60 = average("avg60=");
                }
                "full" => sample.full_avg10 = average("avg10="),
                _ => {}
            }
        }
        sample.available_bytes = available?;
        Some(sample)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns the figures of a real host with 23.5 GiB, one sample each second: half a minute with
    /// little activity, then a program that allocates 11 GiB in 45 seconds.
    pub fn recorded() -> Vec<Sample> {
        include_str!("fixtures/allocation.txt")
            .split("@ ")
            .filter(|look| !look.trim().is_empty())
            .map(|look| {
                let (ms, rest) = look.split_once('\n').unwrap();
                Sample::parse(rest, Duration::from_millis(ms.parse().unwrap())).unwrap()
            })
            .collect()
    }

    #[test]
    fn a_recorded_series_of_memory_samples_is_read() {
        let samples = recorded();
        assert_eq!(samples.len(), 75);
        let first = samples[0];
        assert_eq!(first.total_bytes, 24_684_096 << 10);
        assert_eq!(first.available_bytes, 22_845_204 << 10);
        assert_eq!((first.refaults, first.swap_ins), (525_313, 0));
        assert_eq!(first.some_avg60, Some(0.0));
        assert!(samples.iter().any(|s| s.available_bytes < 13 << 30));
    }

    #[test]
    fn memory_samples_are_read_on_hosts_with_and_without_psi() {
        let here = Sample::read(Path::new("/proc"), Duration::ZERO).unwrap();
        assert!(here.available_bytes > 0 && here.available_bytes <= here.total_bytes);
        let tree = tempfile::tempdir().unwrap();
        assert!(Sample::read(tree.path(), Duration::ZERO).is_err());
        std::fs::write(
            tree.path().join("meminfo"),
            "MemTotal: 8 kB\nMemAvailable: 4 kB\n",
        )
        .unwrap();
        std::fs::write(tree.path().join("vmstat"), "pswpin 7\n").unwrap();
        let sample = Sample::read(tree.path(), Duration::ZERO).unwrap();
        assert_eq!((sample.available_bytes, sample.swap_ins), (4096, 7));
        assert_eq!(sample.some_avg10, None);
    }
}
