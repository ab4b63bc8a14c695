//! Reads and writes the settings of KSM, the kernel's same-page merging, in `/sys/kernel/mm/ksm`.
//!
//! Source: `Documentation/admin-guide/mm/ksm.rst`, `mm/ksm.c`.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::error::KsmError;

/// How long a write of a setting may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Writes whose callers have stopped waiting, and which may still hang, by their files.
static STUCK: Mutex<Vec<(PathBuf, Receiver<io::Result<()>>)>> = Mutex::new(Vec::new());

/// Value of `run` that unmerges all pages. The kernel keeps the value afterwards, so it is also
/// that of a KSM that stands still.
pub(super) const UNMERGE: u64 = 2;

/// KSM's settings, by the names of the kernel's files. In settings that were read, `None` means
/// that the kernel does not have the setting. In settings to write, `None` means that the present
/// value stays.
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
    /// Returns the settings of a freshly booted kernel (`mm/ksm.c`), but with `run` = 1: 100 pages
    /// every 20 ms, smart scan, no advisor.
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

/// Settings of Linux 6.18: name, unit, first Linux version that has the setting, meaning.
#[rustfmt::skip] // this is a table
pub(super) const CONTROLS: [[&str; 4]; 13] = [
    ["run", "state", "2.6.32", "0: ksmd is stopped, merged pages stay merged; 1: ksmd runs; 2: ksmd is stopped and everything was unmerged"],
    ["pages_to_scan", "pages", "2.6.32", "pages that ksmd scans before it sleeps; set by the advisor while one is on"],
    ["sleep_millisecs", "ms", "2.6.32", "how long ksmd sleeps between two batches"],
    ["merge_across_nodes", "0 or 1", "3.9", "1: pages of different NUMA nodes may merge; can be changed only while nothing is merged"],
    ["use_zero_pages", "0 or 1", "4.11", "1: pages of zeroes are mapped to the kernel's zero page instead of being merged with each other"],
    ["max_page_sharing", "mappings", "4.13", "most mappings that share one merged page; further mappings get a copy; can be changed only while nothing is merged"],
    ["stable_node_chains_prune_millisecs", "ms", "4.13", "how often the copies due to max_page_sharing are searched for stale ones"],
    ["smart_scan", "0 or 1", "6.7", "1: pages that did not merge in several passes are skipped in some later ones"],
    ["advisor_mode", "mode", "6.8", "none, or scan-time: the kernel sets pages_to_scan itself after each full scan"],
    ["advisor_max_cpu", "percent of a CPU", "6.8", "most CPU that the advisor lets ksmd use"],
    ["advisor_target_scan_time", "s", "6.8", "time that the advisor wants a full scan to take"],
    ["advisor_min_pages_to_scan", "pages", "6.8", "lowest pages_to_scan that the advisor sets"],
    ["advisor_max_pages_to_scan", "pages", "6.8", "highest pages_to_scan that the advisor sets"],
];

/// The directory with the kernel's files for KSM: settings and counters.
#[derive(Clone, Debug)]
pub struct Controls {
    pub(super) root: PathBuf,
}

impl Default for Controls {
    fn default() -> Self {
        Self::new("/sys/kernel/mm/ksm")
    }
}

impl Controls {
    /// Uses the kernel's files in directory `root`, which is `/sys/kernel/mm/ksm` except in tests.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the text of the file `name`; `None` if the kernel does not have the file.
    pub fn text(&self, name: &str) -> Result<Option<String>, KsmError> {
        let path = self.root.join(name);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(KsmError::read(path)(e)),
            Err(_) if self.root.join("run").exists() => Ok(None),
            Err(_) => Err(KsmError::Missing(self.root.clone())),
        }
    }

    /// Returns the names of all of the kernel's files for KSM (settings and counters), sorted.
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

    /// Returns the number in the file `name`; `None` if the kernel does not have the file.
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

    /// Writes `value` to the setting `name`. A write of 2 to `run` returns when all pages are
    /// unmerged; every other write fails after [`PATIENCE`].
    pub fn write(&self, name: &str, value: &dyn fmt::Display) -> Result<(), KsmError> {
        let (path, value) = (self.root.join(name), value.to_string());
        let written = if name == "run" && value == UNMERGE.to_string() {
            write(&path, &value)
        } else {
            write_soon(&path, &value)
        };
        written.map_err(|source| KsmError::Write {
            path,
            value,
            source,
        })
    }

    /// Reads all of KSM's settings.
    pub fn settings(&self) -> Result<Settings, KsmError> {
        self.read(&CONTROLS)
    }

    /// Reads the files that `table` names into a structure whose fields have the same names.
    pub(super) fn read<T: DeserializeOwned>(&self, table: &[[&str; 4]]) -> Result<T, KsmError> {
        let bad = |path: PathBuf, text: String| KsmError::Format { path, text };
        let mut found = Map::new();
        for &[name, ..] in table {
            let Some(text) = self.text(name)? else {
                continue;
            };
            let value = match text.parse() {
                Ok(number) => Value::Number(number),
                // The file lists all modes; the mode in use is in brackets.
                Err(_) if name == "advisor_mode" => {
                    text.split(['[', ']']).nth(1).unwrap_or(&text).into()
                }
                Err(_) => return Err(bad(self.root.join(name), text)),
            };
            found.insert(name.to_owned(), value);
        }
        serde_json::from_value(found.into()).map_err(|e| bad(self.root.clone(), e.to_string()))
    }

    /// Writes every setting in `wanted` that this kernel has and whose present value differs. The
    /// setting `run` is written last.
    ///
    /// While any page is merged, the kernel refuses changes of `merge_across_nodes` and
    /// `max_page_sharing` (EBUSY); the caller must unmerge first. While an advisor runs, the kernel
    /// refuses changes of `pages_to_scan`; this function switches the advisor off first, and on
    /// last.
    pub fn apply(&self, wanted: &Settings) -> Result<(), KsmError> {
        let mut now = self.settings()?;
        if now.advisor_mode.as_deref().is_some_and(|m| m != "none") {
            self.write("advisor_mode", &"none")?;
        }
        // Without the advisor, the kernel returns to its own choice of pages_to_scan, so the value
        // must be read again.
        now.pages_to_scan = self.number("pages_to_scan")?;
        let [has, wants] = [&now, wanted].map(|settings| json!(settings));
        let set = |name: &str| match (has[name].as_u64(), wants[name].as_u64()) {
            (Some(now), Some(wanted)) if now != wanted => self.write(name, &wanted),
            _ => Ok(()),
        };
        let [run, others @ ..] = CONTROLS.map(|[name, ..]| name);
        others.iter().try_for_each(|name| set(name))?;
        if let Some(mode) = wanted.advisor_mode.as_ref().or(now.advisor_mode.as_ref()) {
            if now.advisor_mode.is_some() && mode != "none" {
                self.write("advisor_mode", mode)?;
            }
        }
        set(run)
    }

    /// Unmerges all pages (`run` = 2), so that every process has its own copy of each page again.
    /// Then sets `run` to `after`.
    pub fn unmerge(&self, after: u64) -> Result<(), KsmError> {
        self.write("run", &UNMERGE)?;
        // The kernel frees merged pages before the write returns, but its counters may change only
        // when the next process exits.
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.number::<u64>("pages_sharing")?.unwrap_or(0) > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.write("run", &after)
    }
}

fn write(path: &Path, value: &str) -> io::Result<()> {
    // No file is created, because a name that the kernel does not have must not become a file in a
    // test's directory.
    let mut file = File::options().write(true).truncate(true).open(path)?;
    file.write_all(value.as_bytes())
}

/// Writes a setting on a thread of its own, and stops waiting after [`PATIENCE`]. The kernel takes
/// the lock that ksmd holds, and ksmd may wait for a process that hangs with its memory map locked.
fn write_soon(path: &Path, value: &str) -> io::Result<()> {
    let late = || {
        let why = "ksmd does not answer; a mergeable process may hang in the kernel (see 'ps -eo pid,stat,wchan:30,args')";
        io::Error::new(io::ErrorKind::TimedOut, why)
    };
    let mut stuck = STUCK.lock().unwrap_or_else(PoisonError::into_inner);
    stuck.retain(|(_, written)| matches!(written.try_recv(), Err(TryRecvError::Empty)));
    if stuck.iter().any(|(of, _)| of == path) {
        return Err(late());
    }
    let (answer, written) = channel();
    let (place, value) = (path.to_owned(), value.to_owned());
    // The caller may have stopped waiting.
    let work = move || drop(answer.send(write(&place, &value)));
    thread::Builder::new()
        .name("ksm-write".into())
        .spawn(work)?;
    written.recv_timeout(PATIENCE).unwrap_or_else(|_| {
        stuck.push((path.to_owned(), written));
        Err(late())
    })
}
