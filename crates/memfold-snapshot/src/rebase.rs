//! Makes a copy of a disk independent of other snapshots: copies into it what their disks, which
//! are below it in its chain, hold of it (`qemu-img rebase`).

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use memfold_host::helper;

use super::disk_chain::header;
use super::error::{SnapshotError, failed};
use super::links::is_in;
use super::room::enough_room;
use super::shelf::Shelf;

/// Time limit for `qemu-img` to copy what a disk has in other files.
const REBASE_LIMIT: Duration = Duration::from_secs(24 * 3600);

/// Time limit for `qemu-img` to check a file.
const CHECK_LIMIT: Duration = Duration::from_secs(3600);

/// Returns whether a file belongs to another snapshot than the one at `place`.
pub(super) fn is_of_another(shelf: &Shelf, place: &Path, path: &Path) -> bool {
    is_in(path, shelf.root()) && !is_in(path, place)
}

/// Returns how many bytes of its file system a file uses.
pub(super) fn used(file: &Path) -> u64 {
    fs::metadata(file).map_or(0, |facts| facts.blocks() * 512)
}

/// Returns the files of a disk's chain that become one file if the disk shall need none of those
/// for which `must_go` is true, and the files that stay below it. The disk is the first of `files`.
pub(super) fn split(
    files: &[PathBuf],
    must_go: impl Fn(&Path) -> bool,
) -> (&[PathBuf], &[PathBuf]) {
    let last = files.iter().skip(1).rposition(|file| must_go(file));
    files.split_at(last.map_or(1, |below| below + 2))
}

/// Copies into the disk `to` what the files `merged` hold of it, which [`split`] has returned with
/// the files `left`. `to` is a copy of the first of `merged`.
///
/// # Errors
///
/// [`SnapshotError::Files`] if its file system gets full, or [`SnapshotError::Qemu`] if `qemu-img`
/// fails. `to` is then useless.
pub(super) fn merge(to: &Path, merged: &[PathBuf], left: &[PathBuf]) -> Result<(), SnapshotError> {
    let Some(last) = merged.get(1..).and_then(<[PathBuf]>::last) else {
        return Ok(());
    };
    let format = header(last).map_err(failed(last))?;
    let format = format["backing-filename-format"].as_str();
    let base = left.first().map(PathBuf::as_path);
    rebase(to, base.zip(format.or(Some(""))))?;
    match damage(to)? {
        None => Ok(()),
        Some(why) => {
            let why = format!("{} is damaged after 'qemu-img rebase': {why}", to.display());
            Err(SnapshotError::Qemu(why))
        }
    }
}

/// Gives a disk another backing file, and copies what differs into the disk.
fn rebase(disk: &Path, base: Option<(&Path, &str)>) -> Result<(), SnapshotError> {
    let mut command = Command::new("qemu-img");
    command.args(["rebase", "-f", "qcow2", "-b"]);
    match base {
        Some((path, format)) => command.arg(path).args(["-F", format]),
        None => command.arg(""),
    };
    command.arg(disk).stdin(Stdio::null());
    let has_room = || enough_room(disk, 0).map_err(io::Error::other);
    let output = helper::output_if(&mut command, REBASE_LIMIT, has_room).map_err(failed(disk))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(SnapshotError::Qemu(format!("qemu-img: {}", words.trim())))
}

/// Returns why a qcow2 file cannot be used; `None` if it can. QEMU does not report errors from
/// closing a file.
pub(super) fn damage(file: &Path) -> Result<Option<String>, SnapshotError> {
    /// Exit code of `qemu-img check` if only clusters are lost that nothing uses.
    const LEAKED: i32 = 3;
    let mut command = Command::new("qemu-img");
    command.args(["check", "-f", "qcow2"]).arg(file);
    let output = helper::output(command.stdin(Stdio::null()), CHECK_LIMIT).map_err(failed(file))?;
    if output.status.success() || output.status.code() == Some(LEAKED) {
        return Ok(None);
    }
    let said = [&output.stderr, &output.stdout].map(|text| String::from_utf8_lossy(text));
    Ok(Some(said.concat().trim().to_owned()))
}
