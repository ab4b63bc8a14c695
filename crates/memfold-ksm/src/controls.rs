//! The settings in `/sys/kernel/mm/ksm`, read, written, and put back as they were.
//!
//! Source: `Documentation/admin-guide/mm/ksm.rst`, `mm/ksm.c`.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use memfold_vm::process::boot_id;

/// Why KSM could not be read or set.
#[derive(Debug, thiserror::Error)]
pub enum KsmError {
    /// The kernel has no KSM.
    #[error("this kernel has no KSM: {0} is missing (CONFIG_KSM)")]
    Missing(PathBuf),
    /// A process keeps its memory map locked; 0: it is not known which.
    #[error(
        "what may merge can't be found out: process {0} keeps its memory map locked and waits for something in the kernel (see 'ps -o pid,stat,wchan:30,args -p {0}')"
    )]
    Hung(i32),
    /// A control could not be read.
    #[error("cannot read {path}")]
    Read {
        /// The control.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A control could not be written.
    #[error("cannot write '{value}' to {path}")]
    Write {
        /// The control.
        path: PathBuf,
        /// What was to be written.
        value: String,
        /// Why.
        source: io::Error,
    },
    /// Another memfold holds KSM.
    #[error(
        "another memfold uses KSM (it holds {0}); wait until it is done, or end it: 'memfold ksm stop' where a daemon steers"
    )]
    Busy(PathBuf),
    /// The note with the settings to put back could not be kept.
    #[error("cannot keep the old settings in {path}")]
    Note {
        /// The note.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A kernel file didn't show what it should.
    #[error("{path}: unexpected text '{text}'")]
    Format {
        /// The file.
        path: PathBuf,
        /// What was there.
        text: String,
    },
}

/// What can be set, by the kernel's names. `None`: this kernel lacks it; when written: left as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // the kernel's names, explained in ksm.rst
pub struct Settings {
    pub run: Option<u64>,
    pub pages_to_scan: Option<u64>,
    pub sleep_millisecs: Option<u64>,
    pub merge_across_nodes: Option<u64>,
    pub use_zero_pages: Option<u64>,
    pub max_page_sharing: Option<u64>,
    pub stable_node_chains_prune_millisecs: Option<u64>,
    pub smart_scan: Option<u64>,
    pub advisor_mode: Option<String>,
    pub advisor_max_cpu: Option<u64>,
    pub advisor_min_pages_to_scan: Option<u64>,
    pub advisor_max_pages_to_scan: Option<u64>,
    pub advisor_target_scan_time: Option<u64>,
}

impl Settings {
    /// What a freshly booted kernel has (`mm/ksm.c`), with `run` = 1: 100 pages each 20 ms, smart scan, no advisor.
    #[must_use]
    pub fn kernel_default() -> Self {
        Self {
            run: Some(1),
            pages_to_scan: Some(100),
            sleep_millisecs: Some(20),
            merge_across_nodes: Some(1),
            use_zero_pages: Some(0),
            max_page_sharing: Some(256),
            stable_node_chains_prune_millisecs: Some(2000),
            smart_scan: Some(1),
            advisor_mode: Some("none".to_owned()),
            ..Self::default()
        }
    }
}

/// A directory of KSM controls.
#[derive(Clone, Debug)]
pub struct Controls {
    root: PathBuf,
}

impl Default for Controls {
    fn default() -> Self {
        Self::new("/sys/kernel/mm/ksm")
    }
}

impl Controls {
    /// The controls in `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The text of one control; `None` where the kernel lacks it.
    pub fn text(&self, name: &str) -> Result<Option<String>, KsmError> {
        let path = self.root.join(name);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                if self.root.join("run").exists() {
                    Ok(None)
                } else {
                    Err(KsmError::Missing(self.root.clone()))
                }
            }
            Err(source) => Err(KsmError::Read { path, source }),
        }
    }

    /// Names of all files there, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()))
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// The number in one control or counter; `None` where the kernel lacks it.
    pub fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>, KsmError> {
        let Some(text) = self.text(name)? else {
            return Ok(None);
        };
        let parsed = text.parse().map_err(|_| KsmError::Format {
            path: self.root.join(name),
            text,
        })?;
        Ok(Some(parsed))
    }

    /// Writes one control. Writing 2 to `run` returns when everything is unmerged.
    pub fn write(&self, name: &str, value: &dyn fmt::Display) -> Result<(), KsmError> {
        let (path, value) = (self.root.join(name), value.to_string());
        // No creation: a name that the kernel lacks must not become a file in a test's tree either.
        let written = File::options()
            .write(true)
            .truncate(true)
            .open(&path)
            .and_then(|mut file| io::Write::write_all(&mut file, value.as_bytes()));
        written.map_err(|source| KsmError::Write {
            path,
            value,
            source,
        })
    }

    /// All settings now.
    pub fn settings(&self) -> Result<Settings, KsmError> {
        Ok(Settings {
            run: self.number("run")?,
            pages_to_scan: self.number("pages_to_scan")?,
            sleep_millisecs: self.number("sleep_millisecs")?,
            merge_across_nodes: self.number("merge_across_nodes")?,
            use_zero_pages: self.number("use_zero_pages")?,
            max_page_sharing: self.number("max_page_sharing")?,
            stable_node_chains_prune_millisecs: self
                .number("stable_node_chains_prune_millisecs")?,
            smart_scan: self.number("smart_scan")?,
            // The file shows all modes, the one in use in brackets.
            advisor_mode: self.text("advisor_mode")?.map(|modes| {
                let used = modes.split(['[', ']']).nth(1);
                used.unwrap_or(&modes).to_owned()
            }),
            advisor_max_cpu: self.number("advisor_max_cpu")?,
            advisor_min_pages_to_scan: self.number("advisor_min_pages_to_scan")?,
            advisor_max_pages_to_scan: self.number("advisor_max_pages_to_scan")?,
            advisor_target_scan_time: self.number("advisor_target_scan_time")?,
        })
    }

    /// Writes every setting that `wanted` names, this kernel has, and that differs; `run` last.
    ///
    /// The kernel refuses `merge_across_nodes` and `max_page_sharing` while anything is merged (EBUSY), and `pages_to_scan`
    /// while an advisor runs: unmerge before changing the former; the advisor is switched off first and on last here.
    pub fn apply(&self, wanted: &Settings) -> Result<(), KsmError> {
        let now = self.settings()?;
        let set = |name: &str, now: Option<u64>, wanted: Option<u64>| match (now, wanted) {
            (Some(now), Some(wanted)) if now != wanted => self.write(name, &wanted),
            _ => Ok(()),
        };
        if now.advisor_mode.as_deref().is_some_and(|m| m != "none") {
            self.write("advisor_mode", &"none")?;
        }
        // Without the advisor a kernel goes back to the pages_to_scan of its own choice: read again.
        set(
            "pages_to_scan",
            self.number("pages_to_scan")?,
            wanted.pages_to_scan,
        )?;
        macro_rules! set_all {
            ($($name:ident),*) => { $(set(stringify!($name), now.$name, wanted.$name)?;)* };
        }
        set_all!(
            sleep_millisecs,
            merge_across_nodes,
            use_zero_pages,
            max_page_sharing,
            stable_node_chains_prune_millisecs,
            smart_scan,
            advisor_max_cpu,
            advisor_min_pages_to_scan,
            advisor_max_pages_to_scan,
            advisor_target_scan_time
        );
        if let Some(mode) = wanted.advisor_mode.as_ref().or(now.advisor_mode.as_ref()) {
            if now.advisor_mode.is_some() && mode != "none" {
                self.write("advisor_mode", mode)?;
            }
        }
        set("run", now.run, wanted.run)
    }

    /// Gives every merged page its own copy again (`run` = 2), then sets `run` to `after`.
    pub fn unmerge(&self, after: u64) -> Result<(), KsmError> {
        self.write("run", &2)?;
        // The kernel frees what it merged before the write returns, but counts it off with the next mappings' exit at the latest.
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.number::<u64>("pages_sharing")?.unwrap_or(0) > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.write("run", &after)
    }
}

/// What becomes of pages that were merged while the settings were others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merged {
    /// Each gets its own copy again, if none was merged before.
    AsBefore,
    /// They stay merged: giving each its own copy takes as much memory at once as merging has saved.
    Stay,
}

/// What the note on disk holds.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    root: PathBuf,
    settings: Settings,
    /// Whether pages were merged before: then they stay merged.
    merged_before: bool,
    /// The kernel's boot: after another boot there is nothing to put back.
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

/// Guards that this process holds.
static HELD: AtomicUsize = AtomicUsize::new(0);

/// The settings as they were, put back on drop (also when unwinding), and by [`restore_leftover`] after a kill.
#[derive(Debug)]
pub struct Guard {
    note: Note,
    note_path: PathBuf,
    // Held, not used: the kernel drops the lock with the process.
    _lock: File,
    restored: bool,
}

impl Guard {
    /// Keeps the settings of `controls`, in memory and in a note in `state_dir`, which must exist. One holder at a time.
    /// Puts back first what a killed holder left.
    pub fn take(controls: &Controls, state_dir: &Path) -> Result<Self, KsmError> {
        Self::take_as(controls, state_dir, Merged::AsBefore)
    }

    /// The same, with a word on the pages that are merged by then.
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
            // The counters may be of processes that are gone: ask the live ones, where the kernel tells.
            merged_before: match super::merging_pages(Path::new("/proc")) {
                _ if merged == Merged::Stay => true,
                Some(pages) => pages > 0,
                None => controls.number::<u64>("pages_shared")?.unwrap_or(0) > 0,
            },
            // Empty where the kernel doesn't tell: then notes are always of this boot, which is the careful side.
            boot_id: boot_id(),
        };
        let note_path = note_path(state_dir);
        // Written aside and renamed: a kill never leaves half a note.
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

    /// The settings that will be put back.
    #[must_use]
    pub fn before(&self) -> &Settings {
        &self.note.settings
    }

    /// Puts the settings back now, and says so when it fails (a drop can only log).
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
            tracing::error!(%error, note = %self.note_path.display(), "KSM settings not restored");
        }
    }
}

/// Puts back what a killed process left, if its note is in `state_dir`; whether there was something. An error if its owner lives.
pub fn restore_leftover(state_dir: &Path) -> Result<bool, KsmError> {
    if !note_path(state_dir).exists() {
        return Ok(false);
    }
    let _lock = lock(state_dir)?;
    restore_note(state_dir)
}

/// The same for the process that holds the guard itself, when it ends without unwinding (Ctrl-C). Another process's note is left to it: a
/// daemon may be steering.
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
#[path = "controls_tests.rs"]
mod tests;
