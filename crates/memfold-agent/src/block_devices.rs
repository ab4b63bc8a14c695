//! Finds the disk that a partition of the guest belongs to, and where on the disk the partition
//! begins, in `/sys/dev/block`. The agent needs both to report where files are stored.
//!
//! Source: `Documentation/ABI/stable/sysfs-block`. The directory of a partition is inside the
//! directory of its disk.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Bytes of a sector in sysfs. It is 512 for every disk.
const SECTOR: u64 = 512;

/// Position of a block device (a disk or a partition) on its disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Device number of the disk, as text `major:minor`.
    pub disk: String,
    /// Offset of the block device's first byte on the disk, in bytes; 0 for the disk itself.
    pub start: u64,
}

/// Cache of the positions of block devices on their disks.
#[derive(Debug)]
pub struct BlockDevices {
    sys: PathBuf,
    known: HashMap<u64, Option<Place>>,
}

impl BlockDevices {
    /// Creates an empty cache. `sys` is `/sys`, or another directory in tests.
    pub fn new(sys: &Path) -> Self {
        Self {
            sys: sys.to_owned(),
            known: HashMap::new(),
        }
    }

    /// Returns where the device with number `number` (`st_dev`) starts on its disk. The result is
    /// `None` if the device is neither a disk nor a partition: a device built on others (device
    /// mapper, md, loop), or a number without a device (btrfs, overlayfs).
    pub fn place(&mut self, number: u64) -> Option<&Place> {
        let sys = &self.sys;
        let place = self
            .known
            .entry(number)
            .or_insert_with(|| look_up(sys, number));
        place.as_ref()
    }
}

fn look_up(sys: &Path, number: u64) -> Option<Place> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    if major == 0 {
        return None;
    }
    let device = fs::canonicalize(sys.join(format!("dev/block/{major}:{minor}"))).ok()?;
    let (disk, start) = if device.join("partition").exists() {
        let sectors: u64 = read(&device.join("start"))?.parse().ok()?;
        (device.parent()?, sectors.checked_mul(SECTOR)?)
    } else {
        (device.as_path(), 0)
    };
    fs::symlink_metadata(disk.join("device")).ok()?;
    let disk = read(&disk.join("dev"))?;
    Some(Place { disk, start })
}

fn read(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Creates a `/sys` with a disk that has a partition, and a device-mapper disk with another.
    fn sys() -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        let root = sys.path();
        let device = |place: &str, number: &str, start: Option<&str>| {
            let directory = root.join("devices").join(place);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("dev"), format!("{number}\n")).unwrap();
            if let Some(start) = start {
                fs::write(directory.join("partition"), "1\n").unwrap();
                fs::write(directory.join("start"), start).unwrap();
            }
            fs::create_dir_all(root.join("dev/block")).unwrap();
            let link = root.join("dev/block").join(number);
            symlink(format!("../../devices/{place}"), link).unwrap();
        };
        device("pci0/virtio1/block/vda", "254:0", None);
        device("pci0/virtio1/block/vda/vda1", "254:1", Some("2048\n"));
        device(
            "pci0/virtio1/block/vda/vda2",
            "259:7",
            Some("99999999999999999999\n"),
        );
        symlink(
            "../../../virtio1",
            root.join("devices/pci0/virtio1/block/vda/device"),
        )
        .unwrap();
        device("virtual/block/dm-0", "253:0", None);
        device("virtual/block/dm-0/dm-0p1", "253:1", Some("8\n"));
        sys
    }

    #[test]
    fn a_partition_is_located_on_its_disk_and_a_device_mapper_device_is_located_on_no_disk() {
        let sys = sys();
        let mut devices = BlockDevices::new(sys.path());
        let mut place = |major, minor| devices.place(rustix::fs::makedev(major, minor)).cloned();
        let on_disk = |start| {
            Some(Place {
                disk: "254:0".into(),
                start,
            })
        };
        assert_eq!(place(254, 0), on_disk(0));
        assert_eq!(place(254, 1), on_disk(1 << 20));
        assert_eq!(place(259, 7), None, "a start that is no number");
        assert_eq!(place(253, 0), None);
        assert_eq!(place(253, 1), None);
        assert_eq!(place(0, 35), None);
        assert_eq!(place(8, 0), None, "a device that is not there");
        fs::remove_dir_all(sys.path().join("devices")).unwrap();
        assert_eq!(place(254, 1), on_disk(1 << 20), "looked up once");
    }
}
