//! Memory and disk that the report may use beside other VMs: only what is free above a reserve.

use std::path::Path;

use anyhow::Context as _;
use memfold_host::Group;
use memfold_units::ByteSize;

use super::parts::Needs;

/// Part of the host's RAM that stays free, and the least that stays free.
const RESERVE_PART: u64 = 16;
const LEAST_RESERVE: ByteSize = ByteSize::mib(1024);

/// Room on the disk that stays free.
const DISK_RESERVE: ByteSize = ByteSize::mib(1024);

/// Memory of the host, and free disk, at one moment.
#[derive(Clone, Copy, Debug)]
pub struct FreeRoom {
    total: ByteSize,
    /// `MemAvailable`, or what the limit of this process's control group leaves, if that is less.
    available: ByteSize,
    disk: ByteSize,
}

impl FreeRoom {
    /// Reads the free memory, and the free disk at `place`.
    pub fn read(place: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string("/proc/meminfo")?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_ascii_whitespace().next()?.parse().ok());
            let kib: u64 = number.with_context(|| format!("/proc/meminfo has no {name}"))?;
            anyhow::Ok(ByteSize(kib << 10))
        };
        let groups = Group::of_all(&[rustix::process::getpid().as_raw_nonzero().get()]);
        let rooms = groups.iter().filter_map(Group::room);
        let group = rooms.map(|room| room.available).min().unwrap_or(u64::MAX);
        let disk = rustix::fs::statvfs(place)?;
        Ok(Self {
            total: field("MemTotal:")?,
            available: ByteSize(field("MemAvailable:")?.0.min(group)),
            disk: ByteSize(disk.f_bavail * disk.f_frsize),
        })
    }

    fn reserve(self) -> ByteSize {
        LEAST_RESERVE.max(ByteSize(self.total.0 / RESERVE_PART))
    }

    /// Returns why a part with these needs cannot run; `None` if it can.
    pub fn lacks(self, needs: &Needs) -> Option<String> {
        let (reserve, disk) = (self.reserve(), self.disk);
        if self.available.0 < needs.memory.0 + reserve.0 {
            return Some(format!(
                "{} of memory are available; {} are needed, and {reserve} stay free for others",
                self.available, needs.memory
            ));
        }
        (disk.0 < needs.disk.0 + DISK_RESERVE.0).then(|| {
            format!(
                "{disk} of disk are free; {} are needed, and {DISK_RESERVE} stay free (TMPDIR names another disk)",
                needs.disk
            )
        })
    }

    /// Returns whether other programs of the host need the memory that a part has taken.
    pub fn is_short(self) -> bool {
        self.available.0 < self.reserve().0 / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_refused_if_its_memory_or_disk_is_not_free_above_the_reserve() {
        let mib = ByteSize::mib;
        let needs = Needs {
            memory: mib(1000),
            disk: mib(500),
            usual_s: 1,
            limit_s: 1,
        };
        let room = |available, disk| FreeRoom {
            total: mib(32 << 10),
            available: mib(available),
            disk: mib(disk),
        };
        assert_eq!(room(3048, 1524).lacks(&needs), None);
        let memory = room(3047, 1524).lacks(&needs).unwrap();
        assert!(memory.contains("2.00 GiB stay free"), "{memory}");
        let disk = room(3048, 1523).lacks(&needs).unwrap();
        assert!(disk.contains("of disk are free"), "{disk}");
        assert!(!room(1024, 0).is_short() && room(1023, 0).is_short());
    }
}
