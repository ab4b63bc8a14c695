//! Calls of LVM's tools, whose reports are read as JSON. `lvm` is one program with all tools.
//!
//! The tools are never killed: a tool that has suspended a device must resume it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;

use super::error::LvmError;
use super::lent_disk::DATA_START;
use super::run::{failed, run, said};
use super::volume::Volume;

/// How long a program of LVM may take: it waits for others that have LVM's locks, and for disks.
const LIMIT: Duration = Duration::from_secs(600);

/// Whether LVM is there.
pub fn check() -> Result<(), LvmError> {
    lvm(&["version"]).map(drop)
}

/// A logical volume, as `lvs` has it.
#[derive(Clone, Debug, PartialEq)]
pub struct Logical {
    /// `linear`, `raid,raid1`, ...
    pub layout: String,
    /// Bytes.
    pub bytes: u64,
    /// Bytes of an extent of its group.
    pub extent: u64,
    /// Whether it has a device.
    pub is_active: bool,
    /// How much of a mirror is the same on all images, in percent; unset: it is none.
    pub synced: Option<f64>,
}

impl Logical {
    /// Whether it is a mirror.
    #[must_use]
    pub fn is_mirror(&self) -> bool {
        self.layout.split(',').any(|word| word == "raid1")
    }
}

/// A physical volume, as `pvs` has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Physical {
    /// Its device, or something in brackets for one that is missing.
    pub device: String,
    /// Its UUID.
    pub uuid: String,
    /// Whether its disk isn't there, or can't be read.
    pub is_missing: bool,
    /// Bytes that nothing has.
    pub free: u64,
    /// Logical volumes that have something on it, hidden ones too.
    pub volumes: Vec<String>,
}

/// Looks a volume up.
pub fn logical(volume: &Volume) -> Result<Logical, LvmError> {
    let place = volume.to_string();
    let fields = "lv_name,lv_layout,lv_size,vg_extent_size,lv_active,sync_percent";
    let select = format!(
        "vg_name=\"{}\" && lv_name=\"{}\"",
        volume.group, volume.name
    );
    // Of a group that isn't there nothing is selected.
    let words = report(&["lvs", "--select", &select, "-o", fields]);
    let said = lvm(&words)?;
    parse_logical(&said)
        .map_err(|why| LvmError::Report {
            command: format!("lvs {place}"),
            why,
        })?
        .ok_or_else(|| LvmError::NoVolume(volume.clone()))
}

/// All physical volumes of a group; none: there is no such group.
pub fn physical(group: &str) -> Result<Vec<Physical>, LvmError> {
    let select = format!("vg_name=\"{group}\"");
    let fields = "pv_name,pv_uuid,pv_missing,pv_free,lv_name";
    let words = report(&["pvs", "--select", &select, "-o", fields]);
    let said = lvm(&words)?;
    parse_physical(&said).map_err(|why| LvmError::Report {
        command: "pvs".into(),
        why,
    })
}

/// The device of a physical volume that is in no group yet.
pub fn orphan(uuid: &str) -> Result<Option<String>, LvmError> {
    let select = format!("pv_uuid=\"{uuid}\"");
    let words = report(&["pvs", "--select", &select, "-o", "pv_name,vg_name"]);
    let said = lvm(&words)?;
    let rows = parse(&said, "pv").map_err(|why| LvmError::Report {
        command: "pvs".into(),
        why,
    })?;
    let orphan = rows.iter().find(|row| text(row, "vg_name") == Ok(""));
    Ok(orphan.and_then(|row| row.get("pv_name").cloned()))
}

/// Makes a disk a physical volume of a group. No metadata of the group are written to it: what a
/// lender serves is not asked for them.
pub fn add_disk(group: &str, device: &str, uuid: &str) -> Result<(), LvmError> {
    let start = format!("{DATA_START}b");
    lvm(&[
        "pvcreate",
        "--yes",
        "--uuid",
        uuid,
        "--norestorefile",
        "--metadatacopies",
        "0",
        "--dataalignment",
        &start,
        device,
    ])?;
    lvm(&["vgextend", group, device]).map(drop)
}

/// Takes a disk that nothing lies on out of its group, and makes it no physical volume any more.
pub fn remove_disk(group: &str, device: &str) -> Result<(), LvmError> {
    lvm(&["vgreduce", group, device])?;
    forget_disk(device)
}

/// Makes a disk that is in no group no physical volume any more.
pub fn forget_disk(device: &str) -> Result<(), LvmError> {
    lvm(&["pvremove", "--yes", device]).map(drop)
}

/// Takes disks that are missing out of their group; `used`: also those that mirrors' images lie on,
/// which have nothing below them then.
pub fn remove_missing(group: &str, used: bool) -> Result<(), LvmError> {
    let mut words = vec!["vgreduce", "--yes", "--removemissing"];
    if used {
        words.push("--force");
    }
    words.push(group);
    lvm(&words).map(drop)
}

/// Begins to make a volume a mirror, with a second image on a disk.
pub fn add_image(volume: &Volume, device: &str) -> Result<(), LvmError> {
    let place = volume.to_string();
    load("raid")?;
    lvm(&[
        "lvconvert",
        "--yes",
        "--type",
        "raid1",
        "--mirrors",
        "1",
        &place,
        device,
    ])?;
    Ok(())
}

/// How fast images are made the same at least, also while the volume is used; the kernel's own
/// least is 1 MB/s.
pub fn hurry(volume: &Volume) -> Result<(), LvmError> {
    let place = volume.to_string();
    lvm(&["lvchange", "--yes", "--minrecoveryrate", "16m", &place]).map(drop)
}

/// Has a mirror read from other images than those on these disks, as long as there is one.
pub fn write_mostly(volume: &Volume, devices: &[String]) -> Result<(), LvmError> {
    let place = volume.to_string();
    let marks: Vec<String> = devices.iter().map(|device| format!("{device}:y")).collect();
    let mut words = vec!["lvchange", "--yes"];
    for mark in &marks {
        words.extend(["--writemostly", mark]);
    }
    words.push(&place);
    lvm(&words).map(drop)
}

/// Takes the image on a disk out of a mirror; `None`: the one that has nothing below it any more.
pub fn remove_image(volume: &Volume, device: Option<&str>) -> Result<(), LvmError> {
    let place = volume.to_string();
    let mut words = vec!["lvconvert", "--yes", "--mirrors", "0", &place];
    words.extend(device);
    lvm(&words).map(drop)
}

/// Moves a volume off a disk; `to`: to this one.
pub fn move_off(volume: &Volume, device: &str, to: Option<&str>) -> Result<(), LvmError> {
    load("mirror")?;
    let mut words = vec!["pvmove", "--yes", "--interval", "1", "--atomic", "--name"];
    words.extend([volume.name.as_str(), device]);
    words.extend(to);
    lvm(&words).map(drop)
}

/// Undoes a move off a disk that was begun.
pub fn stop_move(device: &str) -> Result<(), LvmError> {
    lvm(&["pvmove", "--abort", device]).map(drop)
}

/// Images of a mirror in their order, as the kernel has them: `A` whole, `a` not yet the same, `D`
/// failed (`Documentation/admin-guide/device-mapper/dm-raid.rst`); `None`: it is no mirror.
pub fn images(volume: &Volume) -> Result<Option<String>, LvmError> {
    let device = volume.device();
    let said = said_by("dmsetup", &["status", &device])?;
    // START LENGTH raid raid1 2 AA 1024/1024 idle 0 0 -
    let words: Vec<&str> = said.split_ascii_whitespace().collect();
    let mirror = words.get(2..4) == Some(&["raid", "raid1"][..]);
    Ok(words
        .get(5)
        .filter(|_| mirror)
        .map(|images| (*images).to_owned()))
}

/// Has the kernel load what maps a device so (`raid`, `mirror`), if it isn't there. LVM would run
/// modprobe, which a service may be forbidden (`ProtectKernelModules=`); the kernel's own request
/// isn't.
fn load(target: &str) -> Result<(), LvmError> {
    said_by("dmsetup", &["target-version", target]).map(drop)
}

fn report<'a>(words: &[&'a str]) -> Vec<&'a str> {
    let (command, rest) = words.split_at(1);
    let mut all = command.to_vec();
    all.extend(["--reportformat", "json", "--units", "b", "--nosuffix"]);
    all.extend(rest);
    all
}

fn lvm(words: &[&str]) -> Result<String, LvmError> {
    said_by("lvm", words)
}

fn said_by(program: &'static str, words: &[&str]) -> Result<String, LvmError> {
    let output = run((program, "lvm2"), words, LIMIT)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = Some(said(&output)).filter(|said| !said.is_empty());
    let said = said.unwrap_or_else(|| output.status.to_string());
    Err(failed(program, words, said))
}

type Row = BTreeMap<String, String>;

#[derive(Deserialize)]
struct Report {
    report: Vec<BTreeMap<String, Vec<Row>>>,
}

fn parse(said: &str, kind: &str) -> Result<Vec<Row>, String> {
    let mut report: Report = serde_json::from_str(said).map_err(|error| error.to_string())?;
    let rows = report
        .report
        .iter_mut()
        .filter_map(|part| part.remove(kind));
    Ok(rows.flatten().collect())
}

fn text<'a>(row: &'a Row, field: &str) -> Result<&'a str, String> {
    row.get(field)
        .map(String::as_str)
        .ok_or_else(|| format!("no {field}"))
}

fn number<T: std::str::FromStr>(row: &Row, field: &str) -> Result<T, String> {
    let text = text(row, field)?;
    text.parse().map_err(|_| format!("{field} is '{text}'"))
}

/// Fields that are a word or nothing, or 1 or 0 where `lvm.conf` says so
/// (`report/binary_values_as_numeric`).
fn is_set(row: &Row, field: &str) -> Result<bool, String> {
    text(row, field).map(|text| !["", "0"].contains(&text))
}

fn parse_logical(said: &str) -> Result<Option<Logical>, String> {
    let rows = parse(said, "lv")?;
    let Some(row) = rows.first() else {
        return Ok(None);
    };
    Ok(Some(Logical {
        layout: text(row, "lv_layout")?.to_owned(),
        bytes: number(row, "lv_size")?,
        extent: number(row, "vg_extent_size")?,
        is_active: is_set(row, "lv_active")?,
        synced: number(row, "sync_percent").ok(),
    }))
}

fn parse_physical(said: &str) -> Result<Vec<Physical>, String> {
    let mut all: Vec<Physical> = Vec::new();
    // One row for each piece that something has, and for each that is free.
    let mut rows = parse(said, "pv")?;
    rows.extend(parse(said, "pvseg")?);
    for row in &rows {
        let uuid = text(row, "pv_uuid")?;
        let known = all.iter().position(|one| one.uuid == uuid);
        let at = known.unwrap_or(all.len());
        if known.is_none() {
            all.push(Physical {
                device: text(row, "pv_name")?.to_owned(),
                uuid: uuid.to_owned(),
                is_missing: is_set(row, "pv_missing")?,
                free: number(row, "pv_free")?,
                volumes: Vec::new(),
            });
        }
        let name = text(row, "lv_name")?.trim_matches(['[', ']']);
        let volumes = &mut all[at].volumes;
        if !name.is_empty() && !volumes.iter().any(|known| known == name) {
            volumes.push(name.to_owned());
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_read_from_what_lvs_reports() {
        let none = r#"{"report": [{"lv": []}], "log": []}"#;
        assert_eq!(parse_logical(none).unwrap(), None);
        let mirror = r#"{"report": [{"lv": [{"lv_name":"swap", "lv_layout":"raid,raid1", "lv_size":"536870912", "vg_extent_size":"4194304", "lv_active":"active", "sync_percent":"42.19"}]}], "log": []}"#;
        let volume = parse_logical(mirror).unwrap().unwrap();
        assert!(volume.is_mirror() && volume.is_active);
        assert_eq!((volume.bytes, volume.synced), (512 << 20, Some(42.19)));
        let linear = mirror
            .replace("raid,raid1", "linear")
            .replace("42.19", "")
            .replace("\"active\"", "\"\"");
        let volume = parse_logical(&linear).unwrap().unwrap();
        assert!(!volume.is_mirror() && !volume.is_active && volume.synced.is_none());
        for bad in [
            "",
            "{}",
            &mirror.replace("lv_size", "size"),
            &mirror.replace("536870912", "512m"),
        ] {
            parse_logical(bad).unwrap_err();
        }
    }

    #[test]
    fn disks_are_read_with_what_lies_on_them_hidden_or_not() {
        let row = |name: &str, uuid: &str, missing: &str, volume: &str| {
            format!(
                r#"{{"pv_name":"{name}", "pv_uuid":"{uuid}", "pv_missing":"{missing}", "pv_free":"8388608", "lv_name":"{volume}"}}"#
            )
        };
        let rows = [
            row("/dev/vdc", "a", "", "[swap_rimage_0]"),
            row("/dev/vdc", "a", "", "[swap_rmeta_0]"),
            row("/dev/vdc", "a", "", "other"),
            row("/dev/vdc", "a", "", "other"),
            row("/dev/vdc", "a", "", ""),
            row("[unknown]", "b", "missing", "[swap_rimage_1]"),
        ];
        for kind in ["pv", "pvseg"] {
            let said = format!(r#"{{"report": [{{"{kind}": [{}]}}]}}"#, rows.join(","));
            let disks = parse_physical(&said).unwrap();
            assert_eq!(disks.len(), 2);
            assert_eq!(disks[0].volumes, ["swap_rimage_0", "swap_rmeta_0", "other"]);
            assert!(!disks[0].is_missing && disks[1].is_missing);
            assert_eq!(disks[0].free, 8 << 20);
        }
    }
}
