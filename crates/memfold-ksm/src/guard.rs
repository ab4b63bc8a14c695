//! Saves KSM's settings while memfold uses KSM, in memory and in a file, and restores them
//! afterwards.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use memfold_vm::process::boot_id;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::controls::{Controls, Settings};
use super::error::KsmError;
use super::status::merging_pages;

/// Fate of pages that were merged while the settings were changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merged {
    /// Each page gets its own copy again, if nothing was merged before.
    AsBefore,
    /// The pages stay merged. Giving each its own copy takes as much memory at once as merging has
    /// saved.
    Stay,
}

/// Contents of the file with the previous settings.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    root: PathBuf,
    settings: Settings,
    /// Whether pages were merged before. Then merged pages stay merged.
    merged_before: bool,
    /// Identifier of the boot. After another boot there is nothing to restore.
    boot_id: String,
}

impl Note {
    fn restore(&self) -> Result<(), KsmError> {
        let controls = Controls::new(&self.root);
        if !self.merged_before {
            controls.unmerge(0)?;
        }
        controls.apply(&self.settings)
    }
}

/// Number of guards that this process holds.
static HELD: AtomicUsize = AtomicUsize::new(0);

/// KSM's previous settings. They are restored on drop (also when unwinding), and by
/// [`restore_leftover`] after a kill.
#[derive(Debug)]
pub struct Guard {
    note: Note,
    note_path: PathBuf,
    // Held for its lock, which the kernel releases when the process ends.
    _lock: File,
    restored: bool,
}

impl Guard {
    /// Saves the settings of `controls`, in memory and in a file in `state_dir`, which must exist.
    /// Only one process can hold a guard. First restores the settings that a killed holder left.
    ///
    /// # Errors
    /// [`KsmError::Busy`] if another process holds a guard; others if files cannot be read or
    /// written.
    pub fn take(controls: &Controls, state_dir: &Path) -> Result<Self, KsmError> {
        Self::take_as(controls, state_dir, Merged::AsBefore)
    }

    /// Like [`Guard::take`], and chooses the fate of pages that get merged meanwhile.
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
            // The host's counters may include ended processes. Live processes are asked if the
            // kernel tells.
            merged_before: match merging_pages(Path::new("/proc")) {
                _ if merged == Merged::Stay => true,
                Some(pages) => pages > 0,
                None => controls.number::<u64>("pages_shared")?.unwrap_or(0) > 0,
            },
            // Empty if the kernel does not tell. Saved settings then always count as those of this
            // boot, which is the safe assumption.
            boot_id: boot_id(),
        };
        let note_path = note_path(state_dir);
        // Written to another file and renamed, so that a kill never leaves half a file.
        let aside = note_path.with_extension("new");
        serde_json::to_vec_pretty(&note)
            .map_err(io::Error::other)
            .and_then(|text| fs::write(&aside, text))
            .and_then(|()| fs::rename(&aside, &note_path))
            .map_err(|source| KsmError::Note {
                path: note_path.clone(),
                source,
            })?;
        HELD.fetch_add(1, Ordering::AcqRel);
        Ok(Self {
            note,
            note_path,
            _lock: lock,
            restored: false,
        })
    }

    /// The settings that will be restored.
    #[must_use]
    pub fn before(&self) -> &Settings {
        &self.note.settings
    }

    /// Restores the settings now and returns an error if that fails. (A drop can only log it.)
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
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(KsmError::Note {
                path: self.note_path.clone(),
                source,
            }),
            _ => Ok(()),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Err(error) = self.put_back() {
            tracing::error!(%error, note = %self.note_path.display(), "cannot restore KSM settings; the next daemon retries");
        }
    }
}

/// Restores the settings that a killed process left in `state_dir`. Returns whether there were any.
///
/// # Errors
/// [`KsmError::Busy`] if their owner lives.
pub fn restore_leftover(state_dir: &Path) -> Result<bool, KsmError> {
    if !note_path(state_dir).exists() {
        return Ok(false);
    }
    let _lock = lock(state_dir)?;
    restore_note(state_dir)
}

/// Restores the settings that this process itself saved, when it ends without unwinding (Ctrl-C).
/// Settings saved by another process, such as a steering daemon, are left alone.
pub fn restore_own(state_dir: &Path) -> Result<bool, KsmError> {
    if HELD.load(Ordering::Acquire) == 0 {
        return Ok(false);
    }
    restore_note(state_dir)
}

fn restore_note(state_dir: &Path) -> Result<bool, KsmError> {
    let path = note_path(state_dir);
    let failed = |source| KsmError::Note {
        path: path.clone(),
        source,
    };
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(source) => return Err(failed(source)),
    };
    let note: Note = serde_json::from_slice(&text)
        .map_err(io::Error::other)
        .map_err(failed)?;
    let this_boot = note.boot_id == boot_id();
    if this_boot {
        note.restore()?;
    }
    fs::remove_file(&path).map_err(failed)?;
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
        .map_err(|source| KsmError::Note {
            path: path.clone(),
            source,
        })?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(KsmError::Busy(path)),
        Err(e) => Err(KsmError::Note {
            path,
            source: e.into(),
        }),
    }
}

#[cfg(test)]
#[path = "guard_tests.rs"]
mod tests;
