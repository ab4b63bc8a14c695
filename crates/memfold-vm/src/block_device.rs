//! Recognizes a block device that a snapshot uses as a disk: tells whether a path still leads to
//! the same device with the same content. Names such as `/dev/sdb`, device numbers and the times of
//! device nodes are no help, because they may belong to another disk after the host's next boot.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::process::boot_id;

/// Directories of udev's persistent device names, best first.
const LINKS: [&str; 3] = ["/dev/disk/by-id", "/dev/disk/by-partuuid", "/dev/mapper"];

/// Length of each sample of a device's content, in bytes. The first and the last sample contain
/// superblocks, partition tables and their backups.
const SAMPLE: u64 = 64 << 10;

/// Number of samples between the first and the last sample.
const SAMPLES: u64 = 256;

/// Identity and content of a block device at one moment, for a later comparison.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockDevice {
    /// Identifier of the device from its driver: a device mapper's UUID, a WWID, a serial number,
    /// or the file of a loop device; `None`: the driver has none.
    pub id: Option<String>,
    /// Length of the device in bytes.
    pub bytes: u64,
    /// XXH3 (128 bits, hexadecimal) of samples of the device's content.
    pub samples: String,
    /// XXH3 (128 bits, hexadecimal) of the parts of the device that a file system writes when it is
    /// mounted: the first [`HEAD`] bytes of the device and of each partition in its table. Unset in
    /// snapshots of older versions of memfold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heads: Option<String>,
    /// Boot ID of the host in the boot in which `disk_number` and `sectors_written` were read.
    pub boot: String,
    /// Sequence number that the kernel gave the disk in this boot (`diskseq` in sysfs).
    pub disk_number: Option<u64>,
    /// Number of sectors that the kernel has written to the device since the host's boot.
    pub sectors_written: Option<u64>,
}

impl BlockDevice {
    /// Reads identity and samples of the block device at `path`; returns `None` if the path leads
    /// to another kind of file.
    pub fn of(path: &Path) -> io::Result<Option<Self>> {
        let facts = fs::metadata(path)?;
        if !facts.file_type().is_block_device() {
            return Ok(None);
        }
        let mut file = File::open(path)?;
        // Without this, data that the kernel has not written yet would later count as a change.
        file.sync_all()?;
        let bytes = file.seek(SeekFrom::End(0))?;
        let place = kernel_place(&facts)?;
        let stat = text(&place.join("stat"));
        // Sectors written: the seventh field of the file (Documentation/block/stat.rst).
        let written = stat.and_then(|stat| stat.split_whitespace().nth(6)?.parse().ok());
        let is_part = place.join("partition").exists();
        let disk = if is_part {
            place.join("..")
        } else {
            place.clone()
        };
        Ok(Some(Self {
            id: id(&place),
            bytes,
            samples: samples(&file, bytes)?,
            heads: Some(heads(&file, bytes)?),
            boot: boot_id(),
            disk_number: text(&disk.join("diskseq")).and_then(|number| number.parse().ok()),
            sectors_written: written,
        }))
    }

    /// Compares this device, as it was recorded, with `now`, the same path read again. Returns the
    /// difference as text, or `None` if device and content are unchanged.
    #[must_use]
    pub fn differs(&self, now: &Self) -> Option<String> {
        let same_disk = self.boot == now.boot
            && self.disk_number == now.disk_number
            && self.disk_number.is_some();
        let ids = self.id.as_ref().zip(now.id.as_ref());
        if let Some((then, id)) = ids.filter(|(then, id)| then != id) {
            let here = find(then).map(|path| format!("; that is {} now", path.display()));
            let here = here.unwrap_or_default();
            return Some(format!(
                "leads to another device ({id}) than before ({then}{here})"
            ));
        }
        if self.bytes != now.bytes {
            return Some(format!("has {} bytes instead of {}", now.bytes, self.bytes));
        }
        let heads = self.heads.as_ref().zip(now.heads.as_ref());
        if self.samples != now.samples || heads.is_some_and(|(then, now)| then != now) {
            return Some("has other content than before".into());
        }
        if same_disk && self.sectors_written != now.sectors_written {
            return Some("was written to since then".into());
        }
        None
    }
}

/// Returns the device's directory in sysfs.
fn kernel_place(facts: &fs::Metadata) -> io::Result<PathBuf> {
    let device = facts.rdev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"))
}

fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?.trim().to_owned();
    (!text.is_empty()).then_some(text)
}

/// Returns the identifier that the device's driver uses.
fn id(place: &Path) -> Option<String> {
    if let Some(number) = text(&place.join("partition")) {
        return Some(format!("partition {number} of {}", id(place.parent()?)?));
    }
    let named = |file: &str, kind: &str| text(&place.join(file)).map(|id| format!("{kind} {id}"));
    if let Some(file) = named("loop/backing_file", "loop over") {
        let offset = text(&place.join("loop/offset")).filter(|offset| offset != "0");
        return Some(offset.map_or(file.clone(), |offset| format!("{file} from byte {offset}")));
    }
    let disk = ["wwid", "device/wwid", "serial", "device/serial"];
    named("dm/uuid", "device mapper's")
        .or_else(|| named("md/uuid", "RAID"))
        .or_else(|| disk.into_iter().find_map(|file| named(file, "disk")))
}

/// Finds the device with the driver's identifier `wanted`.
fn find(wanted: &str) -> Option<PathBuf> {
    let all = fs::read_dir("/sys/dev/block").ok()?.flatten();
    let mut places = all.filter_map(|entry| fs::canonicalize(entry.path()).ok());
    let place = places.find(|place| id(place).as_deref() == Some(wanted))?;
    Some(Path::new("/dev").join(place.file_name()?))
}

fn samples(file: &File, bytes: u64) -> io::Result<String> {
    let last = bytes.saturating_sub(SAMPLE);
    let step = (last / SAMPLES).max(SAMPLE);
    let between = (0..last).step_by(usize::try_from(step).unwrap_or(usize::MAX));
    digest(file, bytes, between.chain([last]), SAMPLE)
}

/// Returns the XXH3 of the parts of this `length` at these offsets, cut at the end of the device.
fn digest(
    file: &File,
    bytes: u64,
    starts: impl Iterator<Item = u64>,
    length: u64,
) -> io::Result<String> {
    let mut hash = Xxh3::new();
    let mut buffer = vec![0; usize::try_from(length).unwrap_or(0)];
    for start in starts {
        let length = usize::try_from(length.min(bytes.saturating_sub(start))).unwrap_or(0);
        file.read_exact_at(&mut buffer[..length], start)?;
        hash.update(&buffer[..length]);
    }
    Ok(format!("{:032x}", hash.digest128()))
}

/// Bytes at the start of a device or partition that hold superblocks: `ext4` at 1 KiB, `XFS` at 0,
/// btrfs at 64 KiB, LVM's and RAID's records within 1 MiB.
const HEAD: u64 = 1 << 20;

/// Most partitions that are read.
const MOST_PARTITIONS: usize = 32;

fn heads(file: &File, bytes: u64) -> io::Result<String> {
    let mut starts = BTreeSet::from([0]);
    starts.extend(partitions(file, bytes));
    digest(file, bytes, starts.into_iter(), HEAD)
}

/// Returns the offsets in bytes of the partitions in a device's table (GPT, or primary partitions
/// of an MBR). A guest may have written the table, so offsets outside the device are left out.
#[must_use]
pub fn partitions(file: &File, bytes: u64) -> Vec<u64> {
    let read = |at: u64, length: usize| {
        let mut buffer = vec![0; length];
        file.read_exact_at(&mut buffer, at).ok()?;
        Some(buffer)
    };
    let number = |bytes: &[u8], at: usize, length: usize| {
        let bytes = bytes.get(at..at + length).unwrap_or_default().iter().rev();
        bytes.fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let mut sectors = Vec::new();
    let mut sector_bytes = 512;
    // The header of the table is in the second sector (UEFI specification, "GUID Partition Table").
    for size in [512, 4096] {
        let Some(header) = read(size, 92).filter(|header| header.starts_with(b"EFI PART")) else {
            continue;
        };
        sector_bytes = size;
        let first = number(&header, 72, 8).saturating_mul(size);
        let length = number(&header, 84, 4).clamp(128, 4096);
        for entry in 0..number(&header, 80, 4).min(128) {
            let at = first.saturating_add(entry * length);
            let Some(entry) = read(at, 40) else { break };
            if number(&entry, 0, 8) != 0 {
                sectors.push(number(&entry, 32, 8));
            }
        }
    }
    if sectors.is_empty() {
        let table = read(0, 512).filter(|sector| sector.ends_with(&[0x55, 0xaa]));
        for entry in table.iter().flat_map(|sector| sector[446..510].chunks(16)) {
            if entry[4] != 0 {
                sectors.push(number(entry, 8, 4));
            }
        }
    }
    let sectors = sectors.into_iter();
    let starts = sectors.map(|sector| sector.saturating_mul(sector_bytes));
    let inside = starts.filter(|start| *start < bytes);
    inside.take(MOST_PARTITIONS).collect()
}

/// Returns a path that leads to the same block device after the next boot: `path` itself if it is a
/// symbolic link, else a persistent link of udev, if there is one. For other files, returns the
/// canonical path.
pub fn lasting_path(path: &Path) -> io::Result<PathBuf> {
    let real = path.canonicalize()?;
    let facts = fs::metadata(&real)?;
    if !facts.file_type().is_block_device() {
        return Ok(real);
    }
    let given = std::path::absolute(path)?;
    if fs::symlink_metadata(&given)?.is_symlink() {
        return Ok(given);
    }
    let leads_here = |link: &PathBuf| {
        let there = fs::metadata(link).ok().filter(|_| link.is_symlink());
        there.is_some_and(|there| {
            there.rdev() == facts.rdev() && there.file_type().is_block_device()
        })
    };
    let first = |place| {
        let entries = fs::read_dir(place).into_iter().flatten().flatten();
        let links = entries.map(|entry| entry.path()).filter(leads_here);
        links.min()
    };
    Ok(LINKS.into_iter().find_map(first).unwrap_or(real))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(id: &str) -> BlockDevice {
        BlockDevice {
            id: Some(id.into()),
            bytes: 8,
            samples: "s".into(),
            heads: Some("h".into()),
            boot: "b".into(),
            disk_number: Some(1),
            sectors_written: Some(10),
        }
    }

    #[test]
    fn a_saved_block_device_is_recognised_after_a_reboot_and_changes_of_it_are_named() {
        let saved = device("disk a");
        let mut now = saved.clone();
        assert_eq!(saved.differs(&now), None);
        now.sectors_written = Some(11);
        assert!(saved.differs(&now).unwrap().contains("written"));
        (now.boot, now.disk_number) = ("another".into(), Some(7));
        assert_eq!(saved.differs(&now), None);
        now.samples = "t".into();
        assert!(saved.differs(&now).unwrap().contains("content"));
        now.samples = saved.samples.clone();
        now.heads = Some("i".into());
        assert!(saved.differs(&now).unwrap().contains("content"));
        // A device that was saved by an older version of memfold.
        let old = BlockDevice {
            heads: None,
            ..saved.clone()
        };
        assert_eq!(old.differs(&now), None);
        now.bytes = 9;
        assert!(saved.differs(&now).unwrap().contains("9 bytes"));
        now.id = Some("disk b".into());
        let why = saved.differs(&now).unwrap();
        assert!(why.contains("disk a") && why.contains("disk b"), "{why}");
        // A driver without an identifier: the content decides.
        now = BlockDevice {
            id: None,
            ..saved.clone()
        };
        assert_eq!(saved.differs(&now), None);
    }

    #[test]
    fn each_sampled_byte_of_a_block_device_changes_its_checksum() {
        let file = tempfile::tempfile().unwrap();
        let sum = |bytes: u64| {
            file.set_len(bytes).unwrap();
            samples(&file, bytes).unwrap()
        };
        let bytes = 64 << 20;
        let mut seen = vec![sum(bytes)];
        for at in [0, 1, (bytes - SAMPLE) / SAMPLES * 128, bytes - 1] {
            file.write_all_at(&[7], at).unwrap();
            seen.push(sum(bytes));
        }
        seen.extend([sum(100), sum(0), sum(SAMPLE)]);
        let count = seen.len();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), count, "{seen:?}");
    }
    /// Makes a disk of 8 GiB with a file system from 131 MiB on, in a partition of an MBR or a GPT.
    fn partitioned(is_gpt: bool, sector_bytes: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 << 30).unwrap();
        let start = (131 << 20) / sector_bytes;
        file.write_all_at(&[0x55, 0xaa], 510).unwrap();
        let kind = if is_gpt { 0xee } else { 0x83 };
        file.write_all_at(&[kind], 450).unwrap();
        let lba = u32::try_from(if is_gpt { 1 } else { start }).unwrap();
        file.write_all_at(&lba.to_le_bytes(), 454).unwrap();
        if is_gpt {
            let mut header = [0; 92];
            header[..8].copy_from_slice(b"EFI PART");
            header[72] = 2;
            header[80] = 128;
            header[84] = 128;
            file.write_all_at(&header, sector_bytes).unwrap();
            let entry = 2 * sector_bytes + 128 * 14;
            file.write_all_at(&[7], entry).unwrap();
            file.write_all_at(&start.to_le_bytes(), entry + 32).unwrap();
        }
        file
    }

    #[test]
    fn if_a_partition_of_a_block_device_was_mounted_meanwhile_the_change_is_detected() {
        for (is_gpt, sector_bytes) in [(false, 512), (true, 512), (true, 4096)] {
            let file = partitioned(is_gpt, sector_bytes);
            let (before, sampled) = (heads(&file, 8 << 30).unwrap(), samples(&file, 8 << 30));
            // Changes times and counts in the superblock of ext4.
            file.write_all_at(&[1], (131 << 20) + 1024 + 0x2c).unwrap();
            assert_ne!(
                heads(&file, 8 << 30).unwrap(),
                before,
                "{is_gpt} {sector_bytes}"
            );
            // This part of the disk is in no sample.
            assert_eq!(samples(&file, 8 << 30).unwrap(), sampled.unwrap());
        }
        // A partition table that names sectors beyond the disk.
        let file = partitioned(false, 512);
        file.write_all_at(&u32::MAX.to_le_bytes(), 454).unwrap();
        assert_eq!(partitions(&file, 8 << 30), Vec::<u64>::new());
        file.set_len(100).unwrap();
        heads(&file, 100).unwrap();
    }
}
