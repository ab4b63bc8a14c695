//! Writes a note before a save that the VM cannot recover from by itself if the daemon dies. Such a
//! VM was not started by memfold (an attached VM), so no other file says how its disks were
//! attached; or memfold's library does not stop it for the save, so nothing in QEMU resumes it. The
//! VM's next save, or the next daemon, reads the note and undoes the interrupted save.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memfold_snapshot::{SnapshotError, save};
use memfold_vm::{Identity, Process, VmSpec};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use crate::json_file::write_json;
use crate::locks::SaveRight;
use crate::machine::Machine;
use crate::threads;

/// Directory of the notes, in the state directory.
const NOTES: &str = "saving";

/// Contents of the note about a save in progress; stored as JSON.
#[derive(Debug, Serialize, Deserialize)]
struct SaveNote {
    process: Identity,
    spec: VmSpec,
    /// Whether the VM was stopped for the save.
    stopped: bool,
}

/// The note about a save in progress. Dropping it undoes the steps that the note records.
pub(crate) struct NotedSave<'a> {
    state: &'a Path,
    machine: &'a Arc<Machine>,
    right: &'a SaveRight<'a>,
    spec: &'a VmSpec,
}

impl<'a> NotedSave<'a> {
    /// Writes the note about a save of this VM below the state directory `state`.
    pub(crate) fn new(
        state: &'a Path,
        machine: &'a Arc<Machine>,
        right: &'a SaveRight<'a>,
        spec: &'a VmSpec,
    ) -> io::Result<Self> {
        let noted = Self {
            state,
            machine,
            right,
            spec,
        };
        std::fs::create_dir_all(state.join(NOTES))?;
        remove_old_notes(state);
        noted.stopped(false)?;
        Ok(noted)
    }

    /// Records in the note that the VM is about to be stopped (`true`), or was resumed (`false`).
    pub(crate) fn stopped(&self, stopped: bool) -> io::Result<()> {
        let note = SaveNote {
            process: self.machine.vm().process().identity(),
            spec: self.spec.clone(),
            stopped,
        };
        write_json(&note_of(self.state, self.machine), &note)
    }
}

impl Drop for NotedSave<'_> {
    fn drop(&mut self) {
        // If `undo` fails, it logs the failure, and the note stays.
        let _ = undo(self.state, self.machine, self.right);
    }
}

/// Returns the path of a VM's note. VMs can have one name after the other, so the file is named by
/// the QEMU process.
fn note_of(state: &Path, machine: &Machine) -> PathBuf {
    let process = machine.vm().process().identity();
    let name = format!("{}-{}.json", process.pid, process.start_ticks);
    state.join(NOTES).join(name)
}

/// Removes notes about VMs that have ended.
fn remove_old_notes(state: &Path) {
    for entry in std::fs::read_dir(state.join(NOTES))
        .into_iter()
        .flatten()
        .flatten()
    {
        let note = std::fs::read(entry.path());
        let note = note.map(|text| serde_json::from_slice::<SaveNote>(&text));
        let Ok(Ok(note)) = note else { continue };
        let ended = Process::open(note.process);
        if ended.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Returns whether a save of this VM was interrupted.
pub(crate) fn is_cut_off(state: &Path, machine: &Machine) -> bool {
    note_of(state, machine).exists()
}

/// Resumes the VM and releases its disks, as the note of an interrupted save records.
///
/// # Errors
///
/// [`SnapshotError::Busy`] if QEMU cannot resume the VM or release its disks; the note then stays.
pub(crate) fn undo(
    state: &Path,
    machine: &Arc<Machine>,
    _: &SaveRight<'_>,
) -> Result<(), SnapshotError> {
    let path = note_of(state, machine);
    let Ok(text) = std::fs::read(&path) else {
        return Ok(());
    };
    if let Ok(note) = serde_json::from_slice::<SaveNote>(&text) {
        let goes_on = !note.stopped || go_on(machine);
        let has_disks = save::let_go_of_disks(&note.spec, &|| machine.monitor());
        if !goes_on || !has_disks {
            return Err(SnapshotError::Busy(
                "the VM's last save was interrupted, and QEMU cannot undo it (the daemon's log says why); try again".into(),
            ));
        }
    }
    let _ = std::fs::remove_file(path);
    Ok(())
}

/// Resumes a VM that is paused. Returns `false` if a command of QEMU's monitor failed.
fn go_on(machine: &Arc<Machine>) -> bool {
    let mut qmp = machine.monitor();
    let went_on = qmp.query("query-status").and_then(|now| {
        if matches!(now["status"].as_str(), Some("paused" | "save-vm")) {
            qmp.query("cont")?;
            machine.set_clock_soon();
            info!(vm = machine.name(), "VM resumed after an interrupted save");
        }
        Ok(())
    });
    if let Err(error) = &went_on {
        warn!(vm = machine.name(), %error, "cannot resume the VM after an interrupted save; run 'memfold vm resume'");
    }
    went_on.is_ok()
}

/// Undoes an interrupted save about which there is a note. This runs on a thread, because QEMU may
/// take a while.
pub(crate) fn undo_soon(state: PathBuf, machine: Arc<Machine>) {
    let undo = move || {
        let right = machine.save_right();
        // `undo` logs a failure.
        let _ = undo(&state, &machine, &right);
    };
    if let Err(error) = threads::begin("cut-off", undo) {
        warn!(%error, "cannot start the thread that undoes an interrupted save; the VM's next save undoes the interrupted one");
    }
}

/// Makes an adopted VM use its disks as before an interrupted save. This runs on a thread, because
/// QEMU may take a while to stop copying.
pub(crate) fn let_go_of_disks(machine: Arc<Machine>) {
    let work = move || {
        if let (Some(_saving), Some(spec)) = (machine.try_save(), machine.vm().spec()) {
            save::let_go_of_disks(spec, &|| machine.monitor());
        }
    };
    if let Err(error) = threads::begin("disks", work) {
        warn!(%error, "cannot start the thread that removes the disk copy jobs of an interrupted save; the VM's next save removes the jobs");
    }
}
