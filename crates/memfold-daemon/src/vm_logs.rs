//! Limits the size of VMs' logs, because the state directory is a tmpfs, and no VM starts when the
//! tmpfs is full.
//!
//! ```text
//!   console.log, qemu.log     QEMU appends (O_APPEND), so after the file is emptied, QEMU writes at its beginning
//!   more than MOST bytes:     the last MOST go to NAME.log.1, then NAME.log is emptied
//! ```
//!
//! The end of a long log is copied to another file, and then the log is emptied. As with
//! logrotate's `copytruncate`, bytes that QEMU writes between these two steps are lost.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use memfold_vm::{VmDirectory, missing_is_fine};
use tracing::{info, warn};

use crate::threads;
use crate::vm_registry::VmRegistry;

/// Time between two checks of the logs' sizes.
const LOOK: Duration = Duration::from_secs(2);

/// Largest size of a log, and of its previous part (`NAME.log.1`), in bytes.
const MOST: u64 = 1 << 20;

/// Percent of the state directory's file system in use at which a warning begins, and below which
/// the warning ends. The next constant: the warning also needs less than this many bytes free,
/// because a large file system may well be 80 % full.
const FULL: (u64, u64) = (80, 75);
const LEFT: u64 = 1 << 30;

/// Starts the thread that checks logs until the daemon ends.
pub(crate) fn begin(registry: &Arc<VmRegistry>) -> io::Result<()> {
    let mut is_told = false;
    threads::repeat("vm-logs", LOOK, registry, move |registry| {
        let state = registry.state();
        shorten_all(state);
        is_told = tell_full(state, is_told);
    })
}

fn shorten_all(state: &Path) {
    for vm in VmDirectory::all(state).unwrap_or_default() {
        for log in [vm.console_log(), vm.qemu_log()] {
            match shorten(&log) {
                Ok(_) => {}
                // The VM has ended, or has no log of this name.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    warn!(vm = vm.name(), path = %log.display(), %error, "cannot shorten a VM's log; free space in the state directory");
                }
            }
        }
    }
}

/// Moves the end of a log that is larger than [`MOST`] to `NAME.log.1` and empties the log. Returns
/// whether it was larger.
fn shorten(log: &Path) -> io::Result<bool> {
    let length = log.metadata()?.len();
    if length <= MOST {
        return Ok(false);
    }
    let file = File::options().read(true).write(true).open(log)?;
    let mut end = vec![0; usize::try_from(MOST).unwrap_or(0)];
    file.read_exact_at(&mut end, length - MOST)?;
    // The log is emptied first: on a full file system, that frees space for the copy.
    file.set_len(0)?;
    // Readers see the whole copy, or the one before.
    let new = log.with_extension("log.new");
    let replaced = std::fs::write(&new, end)
        .and_then(|()| std::fs::set_permissions(&new, Permissions::from_mode(0o600)))
        .and_then(|()| std::fs::rename(&new, log.with_extension("log.1")));
    if replaced.is_err() {
        // A part of it would only take space.
        let _ = std::fs::remove_file(&new);
    }
    replaced.map(|()| true)
}

/// Returns the newest part of a log, at most [`MOST`] bytes; empty if there is no log. Invalid
/// UTF-8 is replaced.
pub(crate) fn end_of(log: &Path) -> io::Result<String> {
    let read = |path: &Path| missing_is_fine(memfold_vm::file_end(path, MOST));
    let mut text = read(&log.with_extension("log.1"))?;
    text.extend(read(log)?);
    let most = usize::try_from(MOST).unwrap_or(0);
    let end = &text[text.len().saturating_sub(most)..];
    Ok(String::from_utf8_lossy(end).into_owned())
}

/// Warns once when the file system of `state` is nearly full, and reports once when it is no longer
/// so. Returns whether a warning is in force.
fn tell_full(state: &Path, is_told: bool) -> bool {
    let Ok(room) = rustix::fs::statvfs(state) else {
        return is_told;
    };
    let percent = percent_used(room.f_blocks, room.f_bavail);
    let left = room.f_bavail.saturating_mul(room.f_frsize);
    match is_told {
        false if percent >= FULL.0 && left < LEFT => {
            warn!(
                path = %state.display(), percent,
                "state directory's file system is nearly full, and no VM starts once it is full; remove other files there, or enlarge it (mount -o remount,size=)"
            );
            true
        }
        true if percent < FULL.1 => {
            info!(path = %state.display(), percent, "state directory's file system has free space again");
            false
        }
        told => told,
    }
}

fn percent_used(blocks: u64, available: u64) -> u64 {
    let used = blocks.saturating_sub(available);
    used.saturating_mul(100).checked_div(blocks).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn after_a_vm_log_is_rotated_its_end_is_kept_and_qemu_appends_to_the_new_file() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("console.log");
        let mut writer = File::options()
            .append(true)
            .create(true)
            .open(&log)
            .unwrap();
        let most = usize::try_from(MOST).unwrap();
        writer.write_all(&vec![b'a'; most]).unwrap();
        assert!(!shorten(&log).unwrap());
        writer.write_all(b"the end").unwrap();
        assert!(shorten(&log).unwrap());
        writer.write_all(b"goes on").unwrap();
        assert_eq!(std::fs::read(&log).unwrap(), b"goes on");
        let before = std::fs::read(directory.path().join("console.log.1")).unwrap();
        assert_eq!(before.len(), most);
        assert!(before.ends_with(b"the end"));
        let end = end_of(&log).unwrap();
        assert!(end.len() == most && end.ends_with("the endgoes on"));
        assert_eq!(end_of(&directory.path().join("qemu.log")).unwrap(), "");
    }

    #[test]
    fn the_used_percentage_of_a_disk_counts_all_space_that_is_not_available() {
        assert_eq!(percent_used(1000, 200), 80);
        assert_eq!(percent_used(1000, 0), 100);
        assert_eq!(percent_used(0, 0), 0);
    }
}
