//! Reads and writes the settings in `/sys/kernel/mm/ksm`.
//!
//! Source: `Documentation/admin-guide/mm/ksm.rst`, `mm/ksm.c`.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::KsmError;

/// KSM's settings, by the names of the kernel's files. `None` in a read setting: the kernel does
/// not have it. `None` in a setting to write: the present value stays.
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

/// Directory of KSM's settings and counters.
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
    /// Creates the controls in directory `root`, which is `/sys/kernel/mm/ksm` except in tests.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the text of one file; `None` if the kernel does not have the file.
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

    /// Returns the names of all files in the directory, sorted.
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

    /// Returns the number in one file; `None` if the kernel does not have the file.
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

    /// Writes one setting. A write of 2 to `run` returns when all pages are unmerged.
    pub fn write(&self, name: &str, value: &dyn fmt::Display) -> Result<(), KsmError> {
        let (path, value) = (self.root.join(name), value.to_string());
        // No file is created, because a name that the kernel does not have must not become a file
        // in a test's directory.
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

    /// Reads all settings from the directory.
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
            // The file lists all modes; the mode in use is in brackets.
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

    /// Writes every setting in `wanted` that this kernel has and that differs; `run` comes last.
    ///
    /// While any page is merged, the kernel refuses changes of `merge_across_nodes` and
    /// `max_page_sharing` (EBUSY); the caller must unmerge first. While an advisor runs, the kernel
    /// refuses changes of `pages_to_scan`; this function switches the advisor off first, and on
    /// last.
    pub fn apply(&self, wanted: &Settings) -> Result<(), KsmError> {
        let now = self.settings()?;
        let set = |name: &str, now: Option<u64>, wanted: Option<u64>| match (now, wanted) {
            (Some(now), Some(wanted)) if now != wanted => self.write(name, &wanted),
            _ => Ok(()),
        };
        if now.advisor_mode.as_deref().is_some_and(|m| m != "none") {
            self.write("advisor_mode", &"none")?;
        }
        // Without the advisor, the kernel returns to its own choice of pages_to_scan, so the value
        // must be read again.
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

    /// Gives every process its own copy of each merged page again (`run` = 2), then sets `run` to
    /// `after`.
    pub fn unmerge(&self, after: u64) -> Result<(), KsmError> {
        self.write("run", &2)?;
        // The kernel frees merged pages before the write returns, but its counters may change only
        // when the next process exits.
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.number::<u64>("pages_sharing")?.unwrap_or(0) > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.write("run", &after)
    }
}
