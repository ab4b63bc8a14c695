//! Merges disk overlays that a failed or interrupted save has left. The save had switched the VM to
//! a new overlay for each disk, which is not needed without the snapshot. This module switches the
//! VM back to the older overlay:
//!
//! ```text
//!   base <-- older (frozen) <-- newer (the VM writes)
//!   base <-- older (the VM writes)                      newer's contents were written to older (block-commit)
//! ```
//! The merge writes to the older overlay, so two kinds of overlays are left alone: one that is part
//! of a snapshot (it has a second name, a hard link), and one that a VM maps as its memory, which
//! would change.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use memfold_host::progress::Progress;
use memfold_vm::{QemuUser, VmSpec};
use serde_json::{Value, json};

use super::block_job::{self, Monitor};
use super::disk_chain::{Below, Chains, reopen};
use super::error::{SnapshotError, failed};
use super::own_overlay;
use super::users::mappers;

/// Time limit for QEMU to write the newer overlay's contents into the older one.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Makes QEMU write to the older of `overlays` again (all temporary overlays of the VM), and
/// removes the newer ones. `user`: user that QEMU runs as.
pub(super) fn merge_overlays(
    monitor: &impl Monitor,
    (spec, user): (&VmSpec, Option<QemuUser>),
    overlays: &[PathBuf],
) -> Result<(), SnapshotError> {
    for (disk, _) in spec.disks.iter().enumerate().filter(|(_, d)| d.snapshot) {
        loop {
            // The monitor is locked only for this statement.
            let Some(active) = Chains::read(&mut monitor.qmp())?.active(spec, disk) else {
                break;
            };
            let (top, file) = (active.node, active.file);
            // The guest may control this QEMU, so root removes only files that are recorded.
            if !spec.keeps_rights() && !overlays.contains(&file) {
                break;
            }
            // An overlay with a second name is in a snapshot.
            let has_one_name = |file: &Path| fs::metadata(file).is_ok_and(|f| f.nlink() == 1);
            let is_own =
                |below: &Below| overlays.contains(&below.file) && has_one_name(&below.file);
            let Some(below) = active.below.filter(is_own) else {
                break;
            };
            refuse_mapped(disk, &below.file)?;
            own_overlay::give_back(&below.file, user).map_err(failed(&below.file))?;
            if user.is_some() {
                // If QEMU refuses, the merge fails and says why.
                let place = (below.node.as_str(), below.file.as_path());
                let _ = reopen(&mut monitor.qmp(), (spec, disk), place, false);
            }
            commit(monitor, disk, &top, &below).map_err(|why| {
                SnapshotError::Impossible(format!(
                    "disk {disk} has an extra overlay of a failed save, and QEMU cannot merge it with the older overlay: {why}"
                ))
            })?;
            monitor
                .qmp()
                .execute_on_disks("blockdev-del", json!({ "node-name": top }))?;
            tracing::info!(overlay = %file.display(), "extra overlay of a failed save merged with the older overlay");
            // If the file cannot be removed now, it is removed with the VM.
            let _ = fs::remove_file(&file);
        }
    }
    Ok(())
}

/// Refuses to write to a file that is mapped as a VM's memory.
fn refuse_mapped(disk: usize, file: &Path) -> Result<(), SnapshotError> {
    let Some(&pid) = mappers(file)?.first() else {
        return Ok(());
    };
    Err(SnapshotError::Impossible(format!(
        "disk {disk} builds on {}, which has to be written to first and is the memory of another VM (process {}), restored from a snapshot that is gone: stop that VM",
        file.display(),
        pid.as_raw_nonzero()
    )))
}

/// Writes the contents of `top` into the overlay below it, and makes the VM write to that overlay.
fn commit(monitor: &impl Monitor, disk: usize, top: &str, below: &Below) -> Result<(), String> {
    let id = format!("memfold-disk{disk}");
    let begun = block_job::find(monitor, &id)?;
    let is_over = |job: &Value| job["status"] == "concluded";
    if begun.as_ref().is_some_and(is_over) {
        // The old job's result was never read, and says nothing about the present state.
        block_job::dismiss(monitor, &id)?;
    }
    // A job that an earlier daemon has started continues.
    if begun.as_ref().is_none_or(is_over) {
        let commit =
            json!({ "job-id": id, "device": top, "base-node": below.node, "auto-dismiss": false });
        let done = monitor.qmp().execute_on_disks("block-commit", commit);
        done.map_err(|error| error.to_string())?;
    }
    block_job::finish(monitor, &id, TIMEOUT, &Progress::default(), || Ok(()))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_disk_overlay_that_a_process_has_mapped_is_not_written() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[7; 8192]).unwrap();
        assert!(refuse_mapped(0, file.path()).is_ok());
        // The Python process maps its standard input, as QEMU maps a file as RAM.
        let script = "import mmap, time; view = mmap.mmap(0, 4096, mmap.MAP_PRIVATE); print('mapped', flush=True); time.sleep(60)";
        let input = file.reopen().unwrap();
        let child = Command::new("python3")
            .args(["-c", script])
            .stdin(Stdio::from(input))
            .stdout(Stdio::piped())
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(why) => memfold_testkit::skip!("no python3: {why}"),
        };
        let mut line = String::new();
        let mut said = std::io::BufReader::new(child.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut said, &mut line).unwrap();
        let refused = refuse_mapped(3, file.path());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(line, "mapped\n");
        let refused = refused.unwrap_err().to_string();
        assert!(
            refused.contains("disk 3") && refused.contains("stop that VM"),
            "{refused}"
        );
        assert!(refuse_mapped(0, file.path()).is_ok());
    }
}
