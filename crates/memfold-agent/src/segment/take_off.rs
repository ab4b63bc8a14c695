//! The agent's option `--segment-take-off`: unmounts a segment from the guest's directories, and
//! moves the files that were written meanwhile into these directories.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Instant;

use super::device::unmount_at;
use super::error::{Error, Result};
use super::json::Object;
use super::lay::millis;
use super::layers::Layer;
use super::mount_table::MountTable;
use super::state::Places;

/// Unmounts the segment `name`, merges the written files, and returns a report in JSON. A segment
/// that is not mounted is no error. If a directory fails, its written files stay on disk, and the
/// next run or boot merges them.
pub fn take_off(places: &Places, name: &str) -> Result<String> {
    let _lock = places.lock()?;
    take_off_locked(places, name, false)
}

/// Unmounts all segments before the guest goes down, so that all written files are merged when the
/// guest boots again.
pub fn take_off_all(places: &Places) -> Result<String> {
    let _lock = places.lock()?;
    let names = places.known()?;
    let reports = names.iter().map(|name| take_off_locked(places, name, true));
    Ok(super::json::array(all(reports)?))
}

fn take_off_locked(places: &Places, name: &str, keeps_record: bool) -> Result<String> {
    let start = Instant::now();
    // All directories are checked before one is unmounted, so that a refusal leaves all of them
    // mounted.
    let table = MountTable::read()?;
    let directories = places.layer_directories(name)?;
    for directory in &directories {
        Layer::new(places, name, directory).check_take_off(&table)?;
    }
    // The record is removed first, so that a boot after a crash merges the files and does not mount
    // the segment.
    if !keeps_record {
        places.remove_record(name)?;
    }
    let reports = directories.iter().map(|directory| {
        let start = Instant::now();
        let merged = Layer::new(places, name, directory).take_off()?;
        Ok(Object::new()
            .text("dir", directory)
            .number("moved", merged.moved)
            .number("removed", merged.removed)
            .number("took_ms", millis(start))
            .end())
    });
    let reports = all(reports)?;
    places.forget_if_empty(name);
    let (mut unmounted, mut busy) = (Vec::new(), false);
    for point in mounted(places, name)? {
        busy |= unmount_at(Path::new(OsStr::from_bytes(&point)))?;
        unmounted.push(super::json::string(&point));
    }
    Ok(Object::new()
        .text("name", name)
        .list("dirs", reports)
        .list("unmounted", unmounted)
        .flag("busy", busy)
        .number("took_ms", millis(start))
        .end())
}

/// Returns the reports of all steps. Every step is taken, also after a failure; the first failure
/// is then returned.
fn all(steps: impl Iterator<Item = Result<String>>) -> Result<Vec<String>> {
    let taken: Vec<Result<String>> = steps.collect();
    taken.into_iter().collect()
}

/// Returns the mount points of all generations of a segment.
fn mounted(places: &Places, name: &str) -> Result<Vec<Vec<u8>>> {
    let prefix = places.segments().join(format!("{name}@"));
    let prefix = prefix.as_os_str().as_bytes().to_vec();
    let mut points: Vec<Vec<u8>> = MountTable::read()?
        .0
        .into_iter()
        .map(|m| m.point)
        .filter(|p| p.starts_with(&prefix))
        .collect();
    points.sort();
    points.dedup();
    Ok(points)
}

/// Formats an error as one line, for messages during the boot.
pub fn in_short(error: &Error) -> String {
    error.to_string().replace('\n', " ")
}
