//! Saves of VMs that memfold didn't start. Where the library has no monitor of its own, nobody in QEMU lets such a VM go on when its daemon dies,
//! and how its disks were is in no file of memfold's. So both are noted while a save lasts, and the next daemon puts it right.

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::json;
use tracing::{info, warn};

use super::machine::Machine;
use super::{Daemon, write_json};
use crate::snapshot::save;
use crate::vm::{Identity, VmSpec};

/// A save that is being made.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    process: Identity,
    spec: VmSpec,
    /// Whether the VM was stopped for it.
    stopped: bool,
}

/// The note of a save; it goes with this.
pub(super) struct Noted {
    path: PathBuf,
    note: std::cell::RefCell<Note>,
}

impl Noted {
    /// The VM is about to be stopped, or goes on.
    pub(super) fn stopped(&self, stopped: bool) -> io::Result<()> {
        let mut note = self.note.borrow_mut();
        note.stopped = stopped;
        write_json(&self.path, &*note)
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Daemon {
    fn note_of(&self, vm: &str) -> PathBuf {
        self.options.state.join("saving").join(format!("{vm}.json"))
    }

    /// Notes the save of a VM that memfold didn't start.
    pub(super) fn note_save(&self, machine: &Machine, spec: &VmSpec) -> io::Result<Noted> {
        let path = self.note_of(machine.name());
        std::fs::create_dir_all(self.options.state.join("saving"))?;
        let noted = Noted {
            path,
            note: Note {
                process: machine.vm().process().identity(),
                spec: spec.clone(),
                stopped: false,
            }
            .into(),
        };
        noted.stopped(false)?;
        Ok(noted)
    }

    /// Undoes what a daemon had begun with a VM that memfold didn't start, and was killed. Whoever calls this has the right to save it.
    pub(super) fn undo_cut_off(&self, machine: &Machine) {
        let path = self.note_of(machine.name());
        let Ok(text) = std::fs::read(&path) else {
            return;
        };
        let note = serde_json::from_slice::<Note>(&text);
        // Another VM may have got the name.
        if let Some(note) = note
            .ok()
            .filter(|n| n.process == machine.vm().process().identity())
        {
            if note.stopped {
                go_on(machine);
            }
            save::let_go_of_disks(&note.spec, &|| machine.monitor());
        }
        let _ = std::fs::remove_file(path);
    }
}

/// Lets a VM go on that stands still.
fn go_on(machine: &Machine) {
    let mut qmp = machine.monitor();
    let is_paused = qmp
        .query("query-status")
        .is_ok_and(|now| matches!(now["status"].as_str(), Some("paused" | "save-vm")));
    if is_paused {
        match qmp.execute("cont", json!({})) {
            Ok(_) => info!(vm = machine.name(), "goes on: its save was cut off"),
            Err(error) => {
                warn!(vm = machine.name(), %error, "stands still since its save was cut off");
            }
        }
    }
}
