//! Finds out which snapshots are built on another one: a snapshot that others need is not removed.
//!
//! What a manifest says:
//! - It can be read: the files that it names, and those that its disks' headers name, count.
//! - It or another file is damaged, but it is still JSON: the paths count that the JSON has in the
//!   known places. The snapshot may become whole again when its files come back.
//! - It cannot be read just now, or its format is unknown: nobody can tell what it needs, so
//!   nothing below it may be removed.
//! - It is no JSON, or it is missing: the same, but such a snapshot does not protect another one
//!   that has lost its own manifest. Otherwise neither of the two could ever be removed.
//! - The header of one of its disks, or of a backing file, cannot be read: likewise. Such a
//!   snapshot does not protect another one that has such a disk and was saved later: only older
//!   snapshots can be below its disks. So the latest of such snapshots can be removed.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::disk_chain::{is_built_in, known_chain};
use super::error::{SnapshotError, failed};
use super::image::SUMS;
use super::links::{is_in, real};
use super::manifest::{FORMATS, MANIFEST};
use super::shelf::Shelf;

/// What an operator does about a snapshot whose manifest is lost.
const REMOVE: &str = "remove that snapshot first";

/// Returns the names of the other snapshots that need files of snapshot `name`: as backing files of
/// their disks, as read-only disks, or as kernels.
///
/// # Errors
///
/// [`SnapshotError::Impossible`] if nothing tells what one of the other snapshots needs; the error
/// names that snapshot.
pub fn built_on(shelf: &Shelf, name: &str) -> Result<Vec<String>, SnapshotError> {
    let mut found = Vec::new();
    for other in shelf.names().map_err(failed(shelf.root()))? {
        if other != name && is_built_on(shelf, &other, name)? {
            found.push(other);
        }
    }
    Ok(found)
}

/// Returns whether snapshot `other` needs files of snapshot `name`.
fn is_built_on(shelf: &Shelf, other: &str, name: &str) -> Result<bool, SnapshotError> {
    let place = shelf.path(name)?;
    // No snapshot has a name like `lost+found`.
    let Ok(own) = shelf.path(other) else {
        return Ok(false);
    };
    let manifest = match shelf.manifest(other) {
        Ok(manifest) => manifest,
        // The snapshot was removed meanwhile.
        Err(SnapshotError::Unknown(_)) => return Ok(false),
        Err(error) => return is_damaged_built_on((&own, other), (&place, name), error),
    };
    // Files of a pulled snapshot may be another one's kernel or read-only disk.
    if manifest.outside().iter().any(|file| is_in(file, &place)) {
        return Ok(true);
    }
    let written = manifest.disks.iter().filter(|disk| !disk.read_only);
    let disks = written.map(|disk| own.join(&disk.file.path));
    has_disk_built_on((other, disks), (name, &place))
}

/// Returns whether one of these qcow2 disks of snapshot `other` is built on a file of the snapshot
/// at `place`.
fn has_disk_built_on(
    (other, disks): (&str, impl Iterator<Item = PathBuf>),
    (name, place): (&str, &Path),
) -> Result<bool, SnapshotError> {
    for disk in disks {
        match is_built_in(&disk, place) {
            Ok(false) => {}
            Ok(true) => return Ok(true),
            Err(_) if !is_later(other, (name, place)) && has_unreadable_disk(place) => {}
            Err(error) => {
                let hint = format!("try again, or {REMOVE}");
                return Err(unknown((other, name), &error.to_string(), &hint));
            }
        }
    }
    Ok(false)
}

/// Returns whether snapshot `other` was saved after snapshot `name` at `place`, as far as their
/// manifests tell. Of two snapshots, at most one is the later one.
fn is_later(other: &str, (name, place): (&str, &Path)) -> bool {
    let created = |place: &Path| {
        let text = fs::read(place.join(MANIFEST)).ok()?;
        let json = serde_json::from_slice::<Value>(&text).ok()?;
        json["created_s"].as_u64()
    };
    let other = created(&place.with_file_name(other)).map(|time| (time, other));
    let own = created(place).map(|time| (time, name));
    other.zip(own).is_some_and(|(other, own)| other > own)
}

/// Returns whether nothing tells what a disk of the snapshot at `place` is built on.
fn has_unreadable_disk(place: &Path) -> bool {
    let entries = fs::read_dir(place).into_iter().flatten().flatten();
    let mut paths = entries.map(|entry| entry.path());
    paths.any(|path| path.extension() == Some("qcow2".as_ref()) && known_chain(&path).1.is_some())
}

/// Returns the error that nothing tells whether snapshot `other` needs files of snapshot `name`.
fn unknown((other, name): (&str, &str), why: &str, hint: &str) -> SnapshotError {
    SnapshotError::Impossible(format!(
        "cannot find out whether snapshot '{other}' needs files of snapshot '{name}': {why}; {hint}"
    ))
}

/// Returns whether a snapshot, whose manifest could not be read because of `error`, needs files of
/// the snapshot at `place`.
fn is_damaged_built_on(
    (own, other): (&Path, &str),
    (place, name): (&Path, &str),
    error: SnapshotError,
) -> Result<bool, SnapshotError> {
    let unknown = |why: &str, hint: &str| Err(unknown((other, name), why, hint));
    let text = match error {
        SnapshotError::Files { ref source, .. } if source.kind() != ErrorKind::NotFound => {
            Err(error)
        }
        _ => text_of(&own.join(MANIFEST)),
    };
    let text = match text {
        Ok(text) => text,
        Err(error) => {
            let why = memfold_host::chain(&error);
            return unknown(&why, &format!("try again, or {REMOVE}"));
        }
    };
    let Some(text) = text else {
        // A directory without checksums is no snapshot that has lost its manifest.
        return if own.join(SUMS).exists() && !has_lost_manifest(place) {
            unknown("its manifest is missing", REMOVE)
        } else {
            Ok(false)
        };
    };
    let Ok(json) = serde_json::from_slice::<Value>(&text) else {
        let text = String::from_utf8_lossy(&text);
        let mentions = |place: &Path| text.contains(&format!("{}/", place.display()));
        let is_mentioned = mentions(place) || mentions(&real(place));
        return if is_mentioned || has_lost_manifest(place) {
            Ok(is_mentioned)
        } else {
            unknown("its manifest is damaged", REMOVE)
        };
    };
    let disks = json["disks"].as_array().into_iter().flatten();
    // A raw disk has no header, whatever its guest has written there.
    let disks = disks.filter(|disk| disk["format"] != "raw");
    let disks = disks.filter_map(|disk| Some(own.join(path(&disk["path"])?)));
    if json["parent"]["name"] == name
        || outside(&json).any(|file| is_in(file, place))
        || has_disk_built_on((other, disks), (name, place))?
    {
        return Ok(true);
    }
    let format = json["format"]
        .as_u64()
        .and_then(|format| u32::try_from(format).ok());
    if format.is_none_or(|format| !FORMATS.contains(&format)) {
        let why = format!("this memfold does not know its format, {}", json["format"]);
        return unknown(&why, &format!("update memfold, or {REMOVE}"));
    }
    Ok(false)
}

/// Returns the text of a manifest; `None` if there is none.
fn text_of(manifest: &Path) -> Result<Option<Vec<u8>>, SnapshotError> {
    match fs::read(manifest) {
        Err(source) if source.kind() == ErrorKind::NotFound => Ok(None),
        text => text.map(Some).map_err(failed(manifest)),
    }
}

/// Returns whether nothing tells any more what the snapshot at `place` needs.
fn has_lost_manifest(place: &Path) -> bool {
    match fs::read(place.join(MANIFEST)) {
        Err(error) => error.kind() == ErrorKind::NotFound,
        Ok(text) => serde_json::from_slice::<Value>(&text).is_err(),
    }
}

/// Returns the paths of the disks' own files in a manifest that may be damaged.
fn of_disks(json: &Value) -> impl Iterator<Item = &Path> {
    let disks = json["disks"].as_array().into_iter().flatten();
    disks.filter_map(|disk| path(&disk["path"]))
}

/// Returns the paths outside the snapshot in a manifest that may be damaged.
fn outside(json: &Value) -> impl Iterator<Item = &Path> {
    let disks = json["disks"].as_array().into_iter().flatten();
    let backing = disks
        .filter_map(|disk| disk["backing"].as_array())
        .flatten();
    let backing = backing.filter_map(|file| path(&file["path"]));
    let sources = json["references"]["sources"].as_array().into_iter();
    let boot = ["kernel", "initrd", "firmware"].map(|part| &json["spec"]["boot"][part]);
    let others = sources.flatten().chain(boot).filter_map(path);
    let all = of_disks(json).chain(backing).chain(others);
    all.filter(|path| path.is_absolute())
}

fn path(value: &Value) -> Option<&Path> {
    value.as_str().map(Path::new)
}

#[cfg(test)]
mod tests {
    use memfold_units::ByteSize;
    use serde_json::json;
    use xxhash_rust::xxh3::xxh3_128;

    use super::*;
    use crate::file_facts::{backing_file, facts};
    use crate::manifest::{MANIFEST_SUM, Manifest, RAM, SavedDisk, hex, tests::manifest};
    use crate::shelf::DEVICES;

    /// Saves a snapshot whose kernel is a file of another one.
    fn save(shelf: &Shelf, name: &str, on: Option<&str>) {
        save_with_disk(shelf, name, on, None);
    }

    /// Saves such a snapshot that has a disk with these bytes.
    fn save_with_disk(shelf: &Shelf, name: &str, on: Option<&str>, disk: Option<&[u8]>) {
        let draft = shelf.draft(name).unwrap();
        let file = |part: &str| facts(draft.file(part).unwrap()).unwrap();
        file(RAM);
        let mut saved = Manifest {
            sums: file(SUMS),
            devices: file(DEVICES),
            ..manifest(name, ByteSize::mib(64))
        };
        saved.spec.boot.kernel = on.map(|on| shelf.path(on).unwrap().join("kernel"));
        if let Some(bytes) = disk {
            let path = draft.path().join("disk0.qcow2");
            fs::write(&path, bytes).unwrap();
            saved.disks.push(SavedDisk {
                file: backing_file(&path, Path::new("disk0.qcow2")).unwrap(),
                format: "qcow2".into(),
                read_only: false,
                xxh3_128: None,
                backing: Vec::new(),
            });
        }
        draft.commit(&saved).unwrap();
    }

    /// Returns a directory with the snapshots `p`, `l` that is built on `p`, and `x`.
    fn shelf() -> (tempfile::TempDir, Shelf) {
        let directory = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(directory.path());
        save(&shelf, "p", None);
        save(&shelf, "l", Some("p"));
        save(&shelf, "x", None);
        for other in ["lost+found", "other"] {
            fs::create_dir(directory.path().join(other)).unwrap();
        }
        (directory, shelf)
    }

    fn why(shelf: &Shelf, name: &str) -> String {
        built_on(shelf, name).unwrap_err().to_string()
    }

    #[test]
    fn a_layer_whose_files_are_missing_or_changed_still_protects_its_parent() {
        let (_directory, shelf) = shelf();
        let place = shelf.path("l").unwrap();
        let aside = place.join("aside");
        for part in [RAM, SUMS, DEVICES, MANIFEST_SUM] {
            fs::rename(place.join(part), &aside).unwrap();
            assert!(shelf.manifest("l").is_err());
            assert_eq!(built_on(&shelf, "p").unwrap(), ["l"], "{part}");
            assert_eq!(built_on(&shelf, "x").unwrap(), [""; 0], "{part}");
            fs::rename(&aside, place.join(part)).unwrap();
        }
        fs::write(place.join(MANIFEST_SUM), "wrong").unwrap();
        let names = json!({ "name": "p" });
        let source = json!({ "sources": [shelf.path("p").unwrap().join(RAM)] });
        let disk =
            json!([{ "path": "disk0.qcow2", "backing": [{ "path": source["sources"][0] }] }]);
        for (field, value) in [("parent", names), ("references", source), ("disks", disk)] {
            let text = json!({ "format": 3, field: value }).to_string();
            fs::write(place.join(MANIFEST), text).unwrap();
            assert_eq!(built_on(&shelf, "p").unwrap(), ["l"], "{field}");
        }
    }

    #[test]
    fn a_manifest_that_cannot_be_read_now_or_has_a_newer_format_protects_all_other_snapshots() {
        let (_directory, shelf) = shelf();
        let file = shelf.path("l").unwrap().join(MANIFEST);
        let text = fs::read_to_string(&file).unwrap();
        let newer = text.replace("\"format\": 3", "\"format\": 5");
        fs::write(&file, &newer).unwrap();
        let sum = file.with_file_name(MANIFEST_SUM);
        fs::write(sum, hex(xxh3_128(newer.as_bytes()))).unwrap();
        assert_eq!(built_on(&shelf, "p").unwrap(), ["l"]);
        let told = why(&shelf, "x");
        assert!(
            told.contains("'l'") && told.contains("update memfold"),
            "{told}"
        );
        // Reading a directory as a file is an I/O error.
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        let told = why(&shelf, "x");
        assert!(
            told.contains("'l'") && told.contains("try again, or remove"),
            "{told}"
        );
        // The snapshot itself can be removed.
        assert_eq!(built_on(&shelf, "l").unwrap(), [""; 0]);
    }

    #[test]
    fn snapshots_that_have_lost_their_manifests_can_be_removed_and_then_the_others() {
        let (_directory, shelf) = shelf();
        let of = |name: &str| shelf.path(name).unwrap().join(MANIFEST);
        fs::write(of("l"), &fs::read(of("l")).unwrap()[..40]).unwrap();
        fs::remove_file(of("x")).unwrap();
        for (lost, cause) in [("l", "is damaged"), ("x", "is missing")] {
            let told = why(&shelf, "p");
            let named = format!("snapshot '{lost}'");
            for words in [&*named, cause, "remove that snapshot first"] {
                assert!(told.contains(words), "no '{words}' in: {told}");
            }
            assert_eq!(built_on(&shelf, lost).unwrap(), [""; 0]);
            shelf.remove(lost).unwrap();
        }
        assert_eq!(built_on(&shelf, "p").unwrap(), [""; 0]);
        // What is left of a manifest may still tell.
        save(&shelf, "y", None);
        let mention = format!(
            "\"path\": \"{}/disk0.qcow2\", ",
            shelf.path("p").unwrap().display()
        );
        fs::write(of("y"), mention).unwrap();
        fs::remove_file(of("p")).unwrap();
        assert_eq!(built_on(&shelf, "p").unwrap(), ["y"]);
    }

    #[test]
    fn a_disk_whose_header_cannot_be_read_protects_all_other_snapshots_and_is_named() {
        let (_directory, shelf) = shelf();
        save_with_disk(&shelf, "y", Some("l"), Some(b"no header"));
        let disk = shelf.path("y").unwrap().join("disk0.qcow2");
        let sum = disk.with_file_name(MANIFEST_SUM);
        for _ in 0..2 {
            let told = why(&shelf, "x");
            for words in ["'y'", disk.to_str().unwrap(), "try again, or remove"] {
                assert!(told.contains(words), "no '{words}' in: {told}");
            }
            // The manifest tells.
            assert_eq!(built_on(&shelf, "l").unwrap(), ["y"]);
            assert_eq!(built_on(&shelf, "y").unwrap(), [""; 0]);
            // The same if the manifest is damaged.
            fs::write(&sum, "wrong").unwrap();
        }
        // Of two such snapshots, the later one may be built on the other, and can be removed. The
        // tests' snapshots are of one second, so their names decide.
        save_with_disk(&shelf, "z", None, Some(b"no header"));
        assert!(why(&shelf, "y").contains("snapshot 'z' needs files of snapshot 'y'"));
        assert_eq!(built_on(&shelf, "z").unwrap(), [""; 0]);
        // A snapshot that has lost its manifest tells no time.
        let file = shelf.path("y").unwrap().join(MANIFEST);
        let manifest = fs::read(&file).unwrap();
        fs::remove_file(&file).unwrap();
        assert_eq!(built_on(&shelf, "y").unwrap(), [""; 0]);
        fs::write(&file, manifest).unwrap();
        shelf.remove("z").unwrap();
        assert_eq!(built_on(&shelf, "y").unwrap(), [""; 0]);
        // A disk that is missing is built on nothing.
        fs::remove_file(&disk).unwrap();
        assert_eq!(built_on(&shelf, "x").unwrap(), [""; 0]);
    }

    #[test]
    fn of_two_snapshots_with_unreadable_disks_the_older_is_kept_until_the_later_is_removed() {
        let (_directory, shelf) = shelf();
        for name in ["later", "old"] {
            save_with_disk(&shelf, name, None, Some(b"no header"));
        }
        let file = shelf.path("later").unwrap().join(MANIFEST);
        let text = fs::read_to_string(&file).unwrap();
        let later = text.replace("\"created_s\": 1,", "\"created_s\": 2,");
        assert!(later != text, "{text}");
        fs::write(&file, &later).unwrap();
        let sum = hex(xxh3_128(later.as_bytes()));
        fs::write(file.with_file_name(MANIFEST_SUM), sum).unwrap();
        let told = why(&shelf, "old");
        assert!(
            told.contains("'later'") && told.contains("remove that snapshot first"),
            "{told}"
        );
        assert_eq!(built_on(&shelf, "later").unwrap(), [""; 0]);
        shelf.remove("later").unwrap();
        assert_eq!(built_on(&shelf, "old").unwrap(), [""; 0]);
    }
}
