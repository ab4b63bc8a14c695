//! Calls LVM's tools and parses their JSON reports. The program `lvm` contains all tools.
//!
//! memfold never kills such a tool, because the tool may have suspended a device and must resume
//! the device. So calls have no time limit: moving a volume (`pvmove`) takes as long as copying it.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::error::LvmError;
use super::loan::DATA_START;
use super::run::run;
use super::volume::Volume;

/// Checks that LVM is installed; an error if not.
pub fn check() -> Result<(), LvmError> {
    lvm("version", &[])
}

/// A logical volume, as `lvs` reports it.
#[derive(Clone, Debug, PartialEq)]
pub struct Logical {
    /// Layout of the logical volume, in LVM's words: `linear`, `raid,raid1`, ...
    pub layout: String,
    /// Size of the logical volume in bytes.
    pub bytes: u64,
    /// Size of an extent of the logical volume's group, in bytes.
    pub extent: u64,
    /// Whether the logical volume is active, that is, has a device.
    pub is_active: bool,
    /// How much of a mirror is synchronized, in percent; `None` if the volume is no mirror.
    pub synced: Option<f64>,
}

impl Logical {
    /// Returns whether the logical volume is a mirror (RAID 1).
    #[must_use]
    pub fn is_mirror(&self) -> bool {
        self.layout.split(',').any(|word| word == "raid1")
    }
}

/// A physical volume (a disk of a volume group), as `pvs` reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Physical {
    /// Path of the physical volume's device; a text in brackets if the device is missing.
    pub device: String,
    /// LVM's UUID of the physical volume.
    pub uuid: String,
    /// Whether the physical volume's disk is missing or unreadable.
    pub is_missing: bool,
    /// Number of bytes of the physical volume that no logical volume uses.
    pub free: u64,
    /// Names of the logical volumes that use this physical volume, including LVM's hidden ones.
    pub volumes: Vec<String>,
}

/// Returns LVM's report of a logical volume.
///
/// # Errors
/// Fails with [`LvmError::NoVolume`] if the volume does not exist.
pub fn logical(volume: &Volume) -> Result<Logical, LvmError> {
    let (group, name) = (&volume.group, &volume.name);
    let select = format!("vg_name=\"{group}\" && lv_name=\"{name}\"");
    let fields = "lv_name,lv_layout,lv_size,vg_extent_size,lv_active,sync_percent";
    // If the volume group does not exist, the report has no rows.
    let logical = report(("lvs", &volume.to_string()), &select, fields, parse_logical)?;
    logical.ok_or_else(|| LvmError::NoVolume(volume.clone()))
}

/// Returns all physical volumes of a volume group; empty if the group does not exist.
pub fn physical(group: &str) -> Result<Vec<Physical>, LvmError> {
    let select = format!("vg_name=\"{group}\"");
    let fields = "pv_name,pv_uuid,pv_missing,pv_free,lv_name";
    report(("pvs", group), &select, fields, parse_physical)
}

/// Returns the path of the device with the LVM physical volume `uuid`, if the volume belongs to no
/// volume group yet.
pub fn orphan(uuid: &str) -> Result<Option<String>, LvmError> {
    let select = format!("pv_uuid=\"{uuid}\"");
    let parse = |said: &str| parse(said, "pv");
    let rows = report(("pvs", uuid), &select, "pv_name,vg_name", parse)?;
    let orphan = rows.iter().find(|row| text(row, "vg_name") == Ok(""));
    Ok(orphan.and_then(|row| row.get("pv_name").cloned()))
}

/// Makes a disk a physical volume of a volume group. The disk gets no metadata area, so that LVM
/// never reads the group's metadata from a lender.
pub fn add_disk(group: &str, device: &str, uuid: &str) -> Result<(), LvmError> {
    let options = format!("--metadatacopies 0 --dataalignment {DATA_START}b");
    let create = format!("pvcreate --yes --norestorefile {options} --uuid");
    lvm(&create, &[uuid, device])?;
    lvm("vgextend", &[group, device])
}

/// Removes an unused disk from its volume group, and removes LVM's label from the disk.
pub fn remove_disk(group: &str, device: &str) -> Result<(), LvmError> {
    lvm("vgreduce", &[group, device])?;
    forget_disk(device)
}

/// Removes LVM's label from a disk that is in no volume group.
pub fn forget_disk(device: &str) -> Result<(), LvmError> {
    lvm("pvremove --yes", &[device])
}

/// Removes missing disks from their volume group. With `used`, this includes disks on which mirrors
/// have images; these images then have no disk.
pub fn remove_missing(group: &str, used: bool) -> Result<(), LvmError> {
    let force = if used { " --force" } else { "" };
    lvm(&format!("vgreduce --yes --removemissing{force}"), &[group])
}

/// Starts to make a logical volume a mirror whose second image is on the disk `device`.
pub fn add_image(volume: &Volume, device: &str) -> Result<(), LvmError> {
    load("raid")?;
    let convert = "lvconvert --yes --type raid1 --mirrors 1";
    lvm(convert, &[&volume.to_string(), device])
}

/// Makes LVM synchronize a mirror at 16 MiB/s or faster, even while the logical volume is in use.
/// The kernel's default is 1 MB/s.
pub fn hurry(volume: &Volume) -> Result<(), LvmError> {
    lvm(
        "lvchange --yes --minrecoveryrate 16m",
        &[&volume.to_string()],
    )
}

/// Marks a mirror's images on these disks as write-mostly: the kernel reads from other images as
/// long as there are any.
pub fn write_mostly(volume: &Volume, devices: &[String]) -> Result<(), LvmError> {
    let place = volume.to_string();
    let marks: Vec<String> = devices.iter().map(|device| format!("{device}:y")).collect();
    let marks = marks.iter().flat_map(|mark| ["--writemostly", mark]);
    let values: Vec<&str> = marks.chain([&*place]).collect();
    lvm("lvchange --yes", &values)
}

/// Removes a mirror's image on the disk `device`. If `device` is `None`, removes the image whose
/// disk is missing.
pub fn remove_image(volume: &Volume, device: Option<&str>) -> Result<(), LvmError> {
    let place = volume.to_string();
    let values: Vec<&str> = [&*place].into_iter().chain(device).collect();
    lvm("lvconvert --yes --mirrors 0", &values)
}

/// Moves a logical volume's extents off the disk `device`, to the disk `to`; `None`: to any disk of
/// the volume group.
pub fn move_off(volume: &Volume, device: &str, to: Option<&str>) -> Result<(), LvmError> {
    load("mirror")?;
    let values: Vec<&str> = [&*volume.name, device].into_iter().chain(to).collect();
    lvm("pvmove --yes --interval 1 --atomic --name", &values)
}

/// Continues an unfinished move off the disk `device` ([`move_off`]), whose `pvmove` was ended. The
/// move goes to the disks that were chosen when it began.
pub fn resume_move(device: &str) -> Result<(), LvmError> {
    load("mirror")?;
    lvm("pvmove --yes --interval 1", &[device])
}

/// An unfinished move of extents (`pvmove`) in a volume group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Name of the hidden logical volume that has the extents during the move.
    pub name: String,
    /// Path of the disk that the extents are moved off.
    pub source: String,
}

/// Returns the unfinished moves in a volume group.
pub fn moves(group: &str) -> Result<Vec<Move>, LvmError> {
    let select = format!("vg_name=\"{group}\"");
    report(
        ("lvs --all", group),
        &select,
        "lv_name,move_pv",
        parse_moves,
    )
}

/// Returns how much of a logical volume LVM has copied, in hundredths of a percent: to another
/// image of a mirror, or to another disk (`pvmove`). `None` if LVM copies nothing of the volume.
pub fn copied(volume: &Volume) -> Result<Option<u64>, LvmError> {
    let (group, name) = (&volume.group, &volume.name);
    let select = format!("vg_name=\"{group}\"");
    let fields = "lv_name,copy_percent";
    let parse = |said: &str| parse_copied(said, name);
    report(("lvs --all", group), &select, fields, parse)
}

/// Aborts an unfinished move off the disk `device` ([`move_off`]). LVM identifies a move by the
/// disk that the extents come from: with another disk, this call does nothing and succeeds.
pub fn stop_move(device: &str) -> Result<(), LvmError> {
    lvm("pvmove --abort", &[device])
}

/// Returns the state of a mirror's images, one letter an image, as the kernel reports it: `A` in
/// sync, `a` not yet in sync, `D` failed (`Documentation/admin-guide/device-mapper/dm-raid.rst`).
/// `None` if the volume is no mirror.
pub fn images(volume: &Volume) -> Result<Option<String>, LvmError> {
    let said = said_by("dmsetup", "status", &[&volume.device()])?;
    // The line has the form: START LENGTH raid raid1 2 AA 1024/1024 idle 0 0 -
    let words: Vec<&str> = said.split_ascii_whitespace().collect();
    let is_mirror = words.get(2..4) == Some(&["raid", "raid1"]);
    let images = words.get(5).filter(|_| is_mirror);
    Ok(images.map(|images| (*images).to_owned()))
}

/// Makes the kernel load a device-mapper target (`raid`, `mirror`). LVM would run modprobe, which
/// `ProtectKernelModules=` may forbid to a service; a load by the kernel itself is not forbidden.
fn load(target: &str) -> Result<(), LvmError> {
    said_by("dmsetup", "target-version", &[target]).map(drop)
}

/// Runs a report of LVM (`lvs`, `pvs`) about `subject`, and parses it.
fn report<T>(
    (tool, subject): (&str, &str),
    select: &str,
    fields: &str,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, LvmError> {
    let options = format!("{tool} --reportformat json --units b --nosuffix --select");
    let said = said_by("lvm", &options, &[select, "-o", fields])?;
    parse(&said).map_err(|why| LvmError::Report {
        command: format!("{tool} {subject}"),
        why,
    })
}

fn lvm(words: &str, values: &[&str]) -> Result<(), LvmError> {
    said_by("lvm", words, values).map(drop)
}

/// Runs a program with words that are separated by spaces, and with values, which may contain
/// spaces. Returns what the program printed.
fn said_by(program: &'static str, words: &str, values: &[&str]) -> Result<String, LvmError> {
    let words: Vec<&str> = words.split(' ').chain(values.iter().copied()).collect();
    run((program, "lvm2"), &words, None, 0)
}

type Row = BTreeMap<String, String>;

#[derive(Deserialize)]
struct Report {
    report: Vec<BTreeMap<String, Vec<Row>>>,
}

fn parse(said: &str, kind: &str) -> Result<Vec<Row>, String> {
    let mut report: Report = serde_json::from_str(said).map_err(|error| error.to_string())?;
    let parts = report.report.iter_mut();
    Ok(parts
        .filter_map(|part| part.remove(kind))
        .flatten()
        .collect())
}

fn text<'a>(row: &'a Row, field: &str) -> Result<&'a str, String> {
    let text = row.get(field).map(String::as_str);
    text.ok_or_else(|| format!("no {field}"))
}

fn number<T: std::str::FromStr>(row: &Row, field: &str) -> Result<T, String> {
    let text = text(row, field)?;
    text.parse().map_err(|_| format!("{field} is '{text}'"))
}

/// Returns whether a yes/no field is set. The field contains a word or nothing, or 1 or 0 if
/// `lvm.conf` says so (`report/binary_values_as_numeric`).
fn is_set(row: &Row, field: &str) -> Result<bool, String> {
    text(row, field).map(|text| !["", "0"].contains(&text))
}

/// Parses the report of `lvs` (`--reportformat json`) about one logical volume; `None` if there is
/// no such volume.
///
/// # Errors
///
/// The field that is missing or wrong, as text.
pub fn parse_logical(said: &str) -> Result<Option<Logical>, String> {
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

/// Parses the report of `lvs --all` (`--reportformat json`) about the moves in a group.
///
/// # Errors
///
/// The field that is missing or wrong, as text.
pub fn parse_moves(said: &str) -> Result<Vec<Move>, String> {
    let mut moves = Vec::new();
    for row in &parse(said, "lv")? {
        let source = text(row, "move_pv")?;
        if !source.is_empty() {
            moves.push(Move {
                name: text(row, "lv_name")?.trim_matches(['[', ']']).to_owned(),
                source: source.to_owned(),
            });
        }
    }
    Ok(moves)
}

/// Parses the report of `lvs --all` (`--reportformat json`) about how much LVM has copied of the
/// logical volume `name`, in hundredths of a percent. The copy of a `pvmove` is reported for a
/// hidden volume.
///
/// # Errors
///
/// The field that is missing, as text.
fn parse_copied(said: &str, name: &str) -> Result<Option<u64>, String> {
    let mut moved = None;
    for row in &parse(said, "lv")? {
        let volume = text(row, "lv_name")?.trim_matches(['[', ']']);
        // LVM writes two digits after the point, and nothing for a volume that is not copied.
        let percent = text(row, "copy_percent")?.replace('.', "");
        let Ok(copied) = percent.parse() else {
            continue;
        };
        if volume == name {
            return Ok(Some(copied));
        }
        if volume.starts_with("pvmove") {
            moved = Some(copied);
        }
    }
    Ok(moved)
}

/// Parses the report of `pvs` (`--reportformat json`) about the physical volumes of a group.
///
/// # Errors
///
/// The field that is missing or wrong, as text.
pub fn parse_physical(said: &str) -> Result<Vec<Physical>, String> {
    let mut all: Vec<Physical> = Vec::new();
    // The report has one row for each allocated segment, and one for each free segment.
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
    fn a_logical_volume_is_parsed_from_the_report_of_lvs() {
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
    fn unfinished_moves_are_parsed_with_the_disk_that_they_come_from() {
        let said = r#"{"report": [{"lv": [{"lv_name":"swap", "move_pv":""}, {"lv_name":"[pvmove0]", "move_pv":"/dev/sda"}]}], "log": []}"#;
        let moved = Move {
            name: "pvmove0".into(),
            source: "/dev/sda".into(),
        };
        assert_eq!(parse_moves(said), Ok(vec![moved]));
        parse_moves(&said.replace("move_pv", "move")).unwrap_err();
    }

    #[test]
    fn the_copied_share_of_a_mirror_or_of_a_move_is_parsed_from_the_report_of_lvs() {
        let said = |rows: &[(&str, &str)]| {
            let row = |(name, percent): &(&str, &str)| {
                format!(r#"{{"lv_name":"{name}", "copy_percent":"{percent}"}}"#)
            };
            let rows: Vec<String> = rows.iter().map(row).collect();
            format!(r#"{{"report": [{{"lv": [{}]}}]}}"#, rows.join(","))
        };
        for (rows, copied) in [
            ([("swap", ""), ("other", "12.00")], None),
            ([("swap", "42.19"), ("other", "12.00")], Some(4219)),
            ([("swap", ""), ("[pvmove0]", "7.50")], Some(750)),
            ([("[pvmove0]", "7.50"), ("swap", "100.00")], Some(10_000)),
        ] {
            let said = said(&rows);
            assert_eq!(parse_copied(&said, "swap"), Ok(copied), "{said}");
        }
        parse_copied(r#"{"report": [{"lv": [{"lv_name":"swap"}]}]}"#, "swap").unwrap_err();
    }

    #[test]
    fn physical_volumes_are_parsed_with_their_visible_and_hidden_logical_volumes() {
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
