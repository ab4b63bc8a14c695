//! Saves of VMs that memfold didn't start. Where the library has no monitor of its own, nobody in
//! QEMU lets such a VM go on when its daemon dies, and how its disks were is in no file of
//! memfold's. So both are noted while a save lasts; what the save itself doesn't put right, the
//! next one or the next daemon does.

use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memfold_snapshot::{SnapshotError, save};
use memfold_vm::{Identity, VmSpec};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use crate::json_file::write_json;
use crate::machine::Machine;
use crate::machine::rights::SaveRight;

/// A save that is being made.
#[derive(Debug, Serialize, Deserialize)]
struct SaveNote {
    process: Identity,
    spec: VmSpec,
    /// Whether the VM was stopped for it.
    stopped: bool,
}

/// The note of a save. At its end what the note says is undone, if it has to be.
pub(crate) struct NotedSave<'a> {
    state: &'a Path,
    machine: &'a Arc<Machine>,
    right: &'a SaveRight<'a>,
    note: RefCell<SaveNote>,
}

impl<'a> NotedSave<'a> {
    /// Notes a save, in the daemon's directory `state`.
    pub(crate) fn new(
        state: &'a Path,
        machine: &'a Arc<Machine>,
        right: &'a SaveRight<'a>,
        spec: &VmSpec,
    ) -> io::Result<Self> {
        let noted = Self {
            state,
            machine,
            right,
            note: RefCell::new(SaveNote {
                process: machine.vm().process().identity(),
                spec: spec.clone(),
                stopped: false,
            }),
        };
        std::fs::create_dir_all(state.join("saving"))?;
        noted.stopped(false)?;
        Ok(noted)
    }

    /// The VM is about to be stopped, or goes on.
    pub(crate) fn stopped(&self, stopped: bool) -> io::Result<()> {
        let mut note = self.note.borrow_mut();
        note.stopped = stopped;
        write_json(&note_of(self.state, self.machine), &*note)
    }
}

impl Drop for NotedSave<'_> {
    fn drop(&mut self) {
        // Said in the log; the note stays then.
        let _ = undo(self.state, self.machine, self.right);
    }
}

fn note_of(state: &Path, machine: &Machine) -> PathBuf {
    state
        .join("saving")
        .join(format!("{}.json", machine.name()))
}

/// Whether a save of this VM was cut off.
pub(crate) fn is_cut_off(state: &Path, machine: &Machine) -> bool {
    note_of(state, machine).exists()
}

/// Undoes what a save had begun with a VM that memfold didn't start.
pub(crate) fn undo(
    state: &Path,
    machine: &Arc<Machine>,
    _: &SaveRight<'_>,
) -> Result<(), SnapshotError> {
    let path = note_of(state, machine);
    let Ok(text) = std::fs::read(&path) else {
        return Ok(());
    };
    let note = serde_json::from_slice::<SaveNote>(&text).ok();
    // Another VM may have got the name.
    let own = note.filter(|note| note.process == machine.vm().process().identity());
    if let Some(note) = own {
        let goes_on = !note.stopped || go_on(machine);
        let has_disks = save::let_go_of_disks(&note.spec, &|| machine.monitor());
        if !goes_on || !has_disks {
            return Err(SnapshotError::Impossible(
                "the VM's last save was interrupted, and QEMU cannot undo it (the daemon's log says why); try again".into(),
            ));
        }
    }
    let _ = std::fs::remove_file(path);
    Ok(())
}

/// Lets a VM go on that stands still; whether it runs.
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

/// Undoes a save of a VM of others' that was cut off with its daemon. QEMU may take a while.
pub(crate) fn undo_soon(state: PathBuf, machine: Arc<Machine>) {
    let undo = move || {
        if let Some(right) = machine.try_save() {
            // Said in the log.
            let _ = undo(&state, &machine, &right);
        }
    };
    let spawned = std::thread::Builder::new()
        .name("cut-off".into())
        .spawn(undo);
    if let Err(error) = spawned {
        warn!(%error, "no thread to undo an interrupted save; the next save undoes it");
    }
}

/// Has a VM that was taken over use its disks as before a save that was cut off with its daemon.
/// QEMU may take a while to stop copying.
pub(crate) fn let_go_of_disks(machine: Arc<Machine>) {
    let work = move || {
        if let (Some(_saving), Some(spec)) = (machine.try_save(), machine.vm().spec()) {
            save::let_go_of_disks(spec, &|| machine.monitor());
        }
    };
    let spawned = std::thread::Builder::new().name("disks".into()).spawn(work);
    if let Err(error) = spawned {
        warn!(%error, "no thread to release the disks of an interrupted save; the next save releases them");
    }
}
