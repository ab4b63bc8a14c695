//! `--segment-take-off`: unmounts a segment's overlays and merges the files written meanwhile.

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

/// Whether the segment is to be laid again at the next boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// Do not lay it again.
    Remove,
    /// Lay it again: the guest is going down.
    Keep,
}

/// Takes a segment off and returns the report. A segment that is not laid is no error. If a
/// directory fails, its written files stay on disk, and the next run or boot continues with it.
pub fn take_off(places: &Places, name: &str) -> Result<String> {
    let _lock = places.lock()?;
    take_off_locked(places, name, Record::Remove)
}

/// Takes all segments off before the guest goes down, so that all written files are merged when it
/// boots again.
pub fn take_off_all(places: &Places) -> Result<String> {
    let _lock = places.lock()?;
    let (mut reports, mut first) = (Vec::new(), None);
    for name in places.known()? {
        match take_off_locked(places, &name, Record::Keep) {
            Ok(report) => reports.push(report),
            Err(e) => first = first.or(Some(e)),
        }
    }
    match first {
        None => Ok(super::json::array(reports)),
        Some(e) => Err(e),
    }
}

fn take_off_locked(places: &Places, name: &str, record: Record) -> Result<String> {
    let start = Instant::now();
    // All before any: a refusal leaves everything laid.
    let table = MountTable::read()?;
    let directories = places.layer_directories(name)?;
    for directory in &directories {
        Layer::new(places, name, directory).check_take_off(&table)?;
    }
    // First of the changes, so that a boot after a crash from here on merges and does not lay.
    if record == Record::Remove {
        places.remove_record(name)?;
    }
    let (mut reports, mut first) = (Vec::new(), None);
    for directory in directories {
        let start = Instant::now();
        match Layer::new(places, name, &directory).take_off() {
            Ok(merged) => reports.push(
                Object::new()
                    .text("dir", &directory)
                    .number("moved", merged.moved)
                    .number("removed", merged.removed)
                    .number("took_ms", millis(start))
                    .end(),
            ),
            Err(e) => first = first.or(Some(e)),
        }
    }
    if let Some(error) = first {
        return Err(error);
    }
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

/// Formats an error as one line, for boot messages.
pub fn in_short(error: &Error) -> String {
    error.to_string().replace('\n', " ")
}
