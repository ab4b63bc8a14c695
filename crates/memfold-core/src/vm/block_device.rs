//! Block devices, by what survives a boot: a name like `/dev/sdb` and the node's number and time are of this boot, and the next may give them to another
//! disk.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::process::boot_id;

/// Where udev gives devices names that stay, best first.
const LINKS: [&str; 3] = ["/dev/disk/by-id", "/dev/disk/by-partuuid", "/dev/mapper"];

/// Bytes of each sample: superblocks, partition tables and their copies lie in the first and the last.
const SAMPLE: u64 = 64 << 10;

/// How many samples there are in between.
const SAMPLES: u64 = 256;

/// What a block device was at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockDevice {
    /// Who made it, in its driver's words: a device mapper's UUID, a WWID, a serial number, the file of a loop device.
    pub id: Option<String>,
    /// Length in bytes.
    pub bytes: u64,
    /// XXH3 (128 bits, hexadecimal) of samples of its content.
    pub samples: String,
    /// The host's boot of the next two.
    pub boot: String,
    /// The kernel's number of this disk since its boot.
    pub disk_number: Option<u64>,
    /// Sectors that the kernel has written to it since then.
    pub sectors_written: Option<u64>,
}

impl BlockDevice {
    /// What a path leads to; `None`: no block device.
    pub fn of(path: &Path) -> io::Result<Option<Self>> {
        let facts = fs::metadata(path)?;
        if !facts.file_type().is_block_device() {
            return Ok(None);
        }
        let mut file = File::open(path)?;
        // What the kernel is still to write would count as written later.
        file.sync_all()?;
        let bytes = file.seek(SeekFrom::End(0))?;
        let place = kernel_place(&facts)?;
        let stat = text(&place.join("stat"));
        // Documentation/block/stat.rst: the seventh.
        let written = stat
            .as_deref()
            .and_then(|stat| stat.split_whitespace().nth(6)?.parse().ok());
        let disk = if place.join("partition").exists() {
            place.join("..")
        } else {
            place.clone()
        };
        Ok(Some(Self {
            id: id(&place),
            bytes,
            samples: samples(&file, bytes)?,
            boot: boot_id(),
            disk_number: text(&disk.join("diskseq")).and_then(|number| number.parse().ok()),
            sectors_written: written,
        }))
    }

    /// Why this, which was saved, is not what is there now.
    #[must_use]
    pub fn differs(&self, now: &Self) -> Option<String> {
        let same_disk = self.boot == now.boot
            && self.disk_number == now.disk_number
            && self.disk_number.is_some();
        match (&self.id, &now.id) {
            (Some(then), Some(id)) if then != id => {
                let here = find(then).map_or(String::new(), |path| {
                    format!("; that is {} now", path.display())
                });
                return Some(format!(
                    "leads to another device ({id}), and was {then}{here}"
                ));
            }
            _ => {}
        }
        if self.bytes != now.bytes {
            return Some(format!("has {} bytes, and had {}", now.bytes, self.bytes));
        }
        if self.samples != now.samples {
            return Some("has another content than it had".into());
        }
        if same_disk && self.sectors_written != now.sectors_written {
            return Some("was written to since".into());
        }
        None
    }
}

/// Where the kernel tells of a device.
fn kernel_place(facts: &fs::Metadata) -> io::Result<PathBuf> {
    let device = facts.rdev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"))
}

fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?.trim().to_owned();
    (!text.is_empty()).then_some(text)
}

/// By what a device's driver knows it.
fn id(place: &Path) -> Option<String> {
    if let Some(number) = text(&place.join("partition")) {
        return Some(format!("partition {number} of {}", id(place.parent()?)?));
    }
    let named = |file: &str, kind: &str| text(&place.join(file)).map(|id| format!("{kind} {id}"));
    if let Some(file) = named("loop/backing_file", "loop over") {
        let offset = text(&place.join("loop/offset")).filter(|offset| offset != "0");
        return Some(offset.map_or(file.clone(), |offset| format!("{file} from byte {offset}")));
    }
    named("dm/uuid", "device mapper's")
        .or_else(|| named("md/uuid", "RAID"))
        .or_else(|| named("wwid", "disk"))
        .or_else(|| named("device/wwid", "disk"))
        .or_else(|| named("serial", "disk"))
        .or_else(|| named("device/serial", "disk"))
}

/// The device that a driver knows by this.
fn find(wanted: &str) -> Option<PathBuf> {
    let all = fs::read_dir("/sys/dev/block").ok()?.flatten();
    let mut places = all.filter_map(|entry| fs::canonicalize(entry.path()).ok());
    let place = places.find(|place| id(place).as_deref() == Some(wanted))?;
    Some(Path::new("/dev").join(place.file_name()?))
}

fn samples(file: &File, bytes: u64) -> io::Result<String> {
    let mut hash = Xxh3::new();
    let mut buffer = vec![0; usize::try_from(SAMPLE).unwrap_or(0)];
    let last = bytes.saturating_sub(SAMPLE);
    let step = (last / SAMPLES).max(SAMPLE);
    let between = (0..last).step_by(usize::try_from(step).unwrap_or(usize::MAX));
    for at in between.chain([last]) {
        let length = usize::try_from(SAMPLE.min(bytes - at)).unwrap_or(0);
        file.read_exact_at(&mut buffer[..length], at)?;
        hash.update(&buffer[..length]);
    }
    Ok(format!("{:032x}", hash.digest128()))
}

/// A path that leads to the same block device after the next boot: as it was given, if it is a link; else a link of udev's, if there is one. What is no
/// block device has its real path.
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
        let is_link = fs::symlink_metadata(link).is_ok_and(|facts| facts.is_symlink());
        is_link
            && fs::metadata(link).is_ok_and(|there| {
                there.rdev() == facts.rdev() && there.file_type().is_block_device()
            })
    };
    let mut links: Vec<PathBuf> = Vec::new();
    for place in LINKS {
        let entries = fs::read_dir(place)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path());
        let mut found: Vec<PathBuf> = entries.filter(leads_here).collect();
        found.sort();
        links.extend(found);
    }
    Ok(links.into_iter().next().unwrap_or(real))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(id: &str) -> BlockDevice {
        BlockDevice {
            id: Some(id.into()),
            bytes: 8,
            samples: "s".into(),
            boot: "b".into(),
            disk_number: Some(1),
            sectors_written: Some(10),
        }
    }

    #[test]
    fn the_same_device_after_a_boot_is_the_same_and_what_changed_is_said() {
        let saved = device("disk a");
        let mut now = saved.clone();
        assert_eq!(saved.differs(&now), None);
        now.sectors_written = Some(11);
        assert!(saved.differs(&now).unwrap().contains("written"));
        (now.boot, now.disk_number) = ("another".into(), Some(7));
        assert_eq!(saved.differs(&now), None);
        now.samples = "t".into();
        assert!(saved.differs(&now).unwrap().contains("content"));
        now.bytes = 9;
        assert!(saved.differs(&now).unwrap().contains("9 bytes"));
        now.id = Some("disk b".into());
        let why = saved.differs(&now).unwrap();
        assert!(why.contains("disk a") && why.contains("disk b"), "{why}");
        // A driver that tells nothing: the content decides.
        now = BlockDevice {
            id: None,
            ..saved.clone()
        };
        assert_eq!(saved.differs(&now), None);
    }

    #[test]
    fn every_sample_counts_and_a_short_device_is_read_whole() {
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
}
