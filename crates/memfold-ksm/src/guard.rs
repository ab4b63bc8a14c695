//! Restores KSM's settings after memfold has used KSM. The earlier settings are saved in memory and
//! in a file, so that the next daemon can restore them after a crash.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use memfold_vm::process::boot_id;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::controls::{Controls, Settings, UNMERGE};
use super::error::KsmError;
use super::status::merging_pages;

/// What happens to the pages that were merged while memfold used KSM, when KSM's previous settings
/// are restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merged {
    /// All pages are unmerged if no page was merged before memfold used KSM. Otherwise merged pages
    /// stay merged.
    AsBefore,
    /// The pages stay merged. To unmerge them would take as much memory at once as merging has
    /// saved.
    Stay,
}

/// Contents of the file with KSM's previous settings.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    root: PathBuf,
    settings: Settings,
    /// Whether pages were merged before memfold used KSM. If so, merged pages stay merged.
    merged_before: bool,
    /// ID of the host's boot in which the settings were saved. After another boot there is nothing
    /// to restore.
    boot_id: String,
    /// Whether another program has written `run` since. The value then stays.
    #[serde(default)]
    leaves_run: bool,
}

impl Note {
    /// Writes the file under another name, syncs and renames it, so that neither a kill nor a power
    /// failure leaves half a file.
    fn write(&self, path: &Path) -> io::Result<()> {
        let aside = path.with_extension("new");
        let mut file = File::create(&aside)?;
        file.write_all(&serde_json::to_vec_pretty(self)?)?;
        file.sync_all()?;
        fs::rename(aside, path)
    }

    fn restore(&self) -> Result<(), KsmError> {
        let controls = Controls::new(&self.root);
        if self.leaves_run {
            return controls.apply(&Settings {
                run: None,
                ..self.settings.clone()
            });
        }
        if !self.merged_before {
            controls.unmerge(0)?;
        }
        let mut settings = self.settings.clone();
        if self.merged_before && settings.run == Some(UNMERGE) {
            // An operator has unmerged all pages before, and KSM has stood still since then.
            // Writing 2 again would unmerge what was merged meanwhile.
            settings.run = Some(0);
        }
        controls.apply(&settings)
    }
}

/// Number of guards that this process holds.
static HELD: AtomicUsize = AtomicUsize::new(0);

/// KSM's settings from before memfold used KSM. They are restored when this value is dropped (also
/// in a panic); after a kill, [`restore_leftover`] restores them.
#[derive(Debug)]
pub struct Guard {
    note: Note,
    note_path: PathBuf,
    // The file's lock is held; the kernel releases the lock when the process ends.
    _lock: File,
    restored: bool,
}

impl Guard {
    /// Saves KSM's present settings in memory and in a file in `state_dir`, which must exist. If a
    /// process was killed while it held a guard, restores that process's saved settings first. Only
    /// one process can hold a guard.
    ///
    /// # Errors
    /// Fails with [`KsmError::Busy`] if another process holds a guard, and with other errors if
    /// files cannot be read or written.
    pub fn take(controls: &Controls, state_dir: &Path) -> Result<Self, KsmError> {
        Self::take_as(controls, state_dir, Merged::AsBefore)
    }

    /// Does the same as [`Guard::take`]. `merged` determines what happens to pages that KSM merges
    /// until the guard is dropped.
    pub fn take_as(
        controls: &Controls,
        state_dir: &Path,
        merged: Merged,
    ) -> Result<Self, KsmError> {
        let lock = lock(state_dir)?;
        restore_note(state_dir)?;
        let note = Note {
            root: controls.root.clone(),
            settings: controls.settings()?,
            // The host's counters may include ended processes, so the counters of live processes
            // are used if the kernel has them.
            merged_before: match merging_pages(Path::new("/proc")) {
                _ if merged == Merged::Stay => true,
                Some(pages) => pages > 0,
                None => controls.number::<u64>("pages_shared")?.unwrap_or(0) > 0,
            },
            // The ID is empty if the kernel does not report it. Saved settings then always count as
            // settings of this boot, which is the safe assumption.
            boot_id: boot_id(),
            leaves_run: false,
        };
        let note_path = note_path(state_dir);
        note.write(&note_path).map_err(KsmError::note(&note_path))?;
        HELD.fetch_add(1, Ordering::AcqRel);
        Ok(Self {
            note,
            note_path,
            _lock: lock,
            restored: false,
        })
    }

    /// Returns KSM's settings from before memfold used KSM, which will be restored.
    #[must_use]
    pub fn before(&self) -> &Settings {
        &self.note.settings
    }

    /// Sets whether `run` keeps its present value when the previous settings are restored, because
    /// another program has written it meanwhile. The file is changed, too, for the next process.
    ///
    /// # Errors
    /// Fails if the file cannot be written. The setting is valid for this value nevertheless.
    pub fn leave_run(&mut self, leaves: bool) -> Result<(), KsmError> {
        if std::mem::replace(&mut self.note.leaves_run, leaves) == leaves {
            return Ok(());
        }
        let written = self.note.write(&self.note_path);
        written.map_err(KsmError::note(&self.note_path))
    }

    /// Restores KSM's previous settings now. Returns an error if that fails, whereas a drop can
    /// only log the error.
    pub fn restore(mut self) -> Result<(), KsmError> {
        self.put_back()
    }

    fn put_back(&mut self) -> Result<(), KsmError> {
        if self.restored {
            return Ok(());
        }
        self.note.restore()?;
        self.restored = true;
        HELD.fetch_sub(1, Ordering::AcqRel);
        match fs::remove_file(&self.note_path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(KsmError::note(&self.note_path)(source))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Err(error) = self.put_back() {
            tracing::error!(%error, note = %self.note_path.display(), "cannot restore KSM settings; the daemon tries again at its next start");
        }
    }
}

/// Restores KSM's settings that a killed memfold process saved in `state_dir`. Returns whether
/// there were saved settings of this boot.
///
/// # Errors
/// Fails with [`KsmError::Busy`] if the process that saved the settings still runs.
pub fn restore_leftover(state_dir: &Path) -> Result<bool, KsmError> {
    if !note_path(state_dir).exists() {
        return Ok(false);
    }
    let _lock = lock(state_dir)?;
    restore_note(state_dir)
}

/// Restores KSM's settings that this process has saved in `state_dir`. Callers call this function
/// when the process ends without unwinding (Ctrl-C). Settings that another process has saved, such
/// as a daemon that steers KSM, stay unchanged. Returns whether settings were restored.
pub fn restore_own(state_dir: &Path) -> Result<bool, KsmError> {
    if HELD.load(Ordering::Acquire) == 0 {
        return Ok(false);
    }
    restore_note(state_dir)
}

fn restore_note(state_dir: &Path) -> Result<bool, KsmError> {
    let path = note_path(state_dir);
    let text = match fs::read(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        text => text.map_err(KsmError::note(&path))?,
    };
    let note: Note = serde_json::from_slice(&text)
        .map_err(io::Error::other)
        .map_err(KsmError::note(&path))?;
    let this_boot = note.boot_id == boot_id();
    if this_boot {
        note.restore()?;
    }
    fs::remove_file(&path).map_err(KsmError::note(path))?;
    Ok(this_boot)
}

fn note_path(state_dir: &Path) -> PathBuf {
    state_dir.join("ksm-settings.json")
}

pub(super) fn lock(state_dir: &Path) -> Result<File, KsmError> {
    let path = state_dir.join("ksm.lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(KsmError::note(&path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(KsmError::Busy(path)),
        Err(e) => Err(KsmError::note(path)(e.into())),
    }
}

#[cfg(test)]
#[path = "guard_tests.rs"]
mod tests;
