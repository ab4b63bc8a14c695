//! Reads KSM's counters of the host and of a process, and ksmd's CPU time.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::controls::Controls;
use super::error::KsmError;

/// Counters of Linux 6.18: name, unit, first Linux version that has the counter, meaning.
#[rustfmt::skip] // this is a table
pub(super) const COUNTERS: [[&str; 4]; 11] = [
    ["pages_shared", "pages", "2.6.32", "merged pages in memory"],
    ["pages_sharing", "pages", "2.6.32", "further mappings of merged pages: the pages saved"],
    ["pages_unshared", "pages", "2.6.32", "pages whose content was nowhere else, scanned again in each pass"],
    ["pages_volatile", "pages", "2.6.32", "pages that change too fast to be compared with others"],
    ["pages_scanned", "pages, total", "6.6", "pages that ksmd has scanned"],
    ["pages_skipped", "pages, total", "6.7", "pages that smart_scan has skipped"],
    ["full_scans", "passes, total", "2.6.32", "complete passes over all mergeable memory"],
    ["stable_node_chains", "chains", "4.13", "contents with more than one page, because of max_page_sharing"],
    ["stable_node_dups", "pages", "4.13", "pages in these chains"],
    ["ksm_zero_pages", "pages", "6.6", "pages of zeroes that use_zero_pages has mapped to the kernel's zero page"],
    ["general_profit", "bytes", "6.4", "bytes that merging saves less its metadata; while KSM is stopped, ended processes still count"],
];

/// KSM's counters of the host in `/sys/kernel/mm/ksm`, by the names of the kernel's files, in pages
/// unless ksm.rst says otherwise. A counter is `None` if the kernel does not have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // the kernel's names, explained in ksm.rst
pub struct Status {
    pub pages_shared: Option<u64>,
    pub pages_sharing: Option<u64>,
    pub pages_unshared: Option<u64>,
    pub pages_volatile: Option<u64>,
    pub pages_skipped: Option<u64>,
    pub pages_scanned: Option<u64>,
    pub full_scans: Option<u64>,
    pub stable_node_chains: Option<u64>,
    pub stable_node_dups: Option<u64>,
    pub ksm_zero_pages: Option<u64>,
    /// Memory that KSM saves on the host, less its metadata, in bytes; negative while the metadata
    /// use more than merging saves.
    pub general_profit: Option<i64>,
}

impl Status {
    /// Reads all of KSM's counters in the directory of `controls`.
    pub fn read(controls: &Controls) -> Result<Self, KsmError> {
        controls.read(&COUNTERS)
    }
}

/// KSM's figures of one process, by the names of the kernel, from `/proc/PID/ksm_stat` and
/// `/proc/PID/ksm_merging_pages`. A figure is `None` if the kernel does not have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // the kernel's names, explained in ksm.rst
pub struct ProcessStatus {
    pub ksm_rmap_items: Option<u64>,
    pub ksm_zero_pages: Option<u64>,
    pub ksm_merging_pages: Option<u64>,
    /// Memory that KSM saves in the process, less its metadata, in bytes; may be negative.
    pub ksm_process_profit: Option<i64>,
    pub ksm_merge_any: Option<bool>,
    pub ksm_mergeable: Option<bool>,
}

impl ProcessStatus {
    /// Reads KSM's figures of process `pid` in the directory `proc_root`. Before Linux 6.1, all
    /// figures are `None`.
    pub fn read(proc_root: &Path, pid: i32) -> Result<Self, KsmError> {
        let directory = proc_root.join(pid.to_string());
        let mut status = Self::default();
        let figures = text(&directory.join("ksm_stat"))?.unwrap_or_default();
        for line in figures.lines() {
            let mut words = line.split_whitespace();
            let (Some(key), Some(value)) = (words.next(), words.next()) else {
                continue;
            };
            match key {
                "ksm_rmap_items" => status.ksm_rmap_items = value.parse().ok(),
                "ksm_zero_pages" => status.ksm_zero_pages = value.parse().ok(),
                "ksm_merging_pages" => status.ksm_merging_pages = value.parse().ok(),
                "ksm_process_profit" => status.ksm_process_profit = value.parse().ok(),
                "ksm_merge_any:" => status.ksm_merge_any = Some(value == "yes"),
                "ksm_mergeable:" => status.ksm_mergeable = Some(value == "yes"),
                _ => {}
            }
        }
        if status.ksm_merging_pages.is_none() {
            status.ksm_merging_pages = text(&directory.join("ksm_merging_pages"))?
                .and_then(|pages| pages.trim().parse().ok());
        }
        Ok(status)
    }
}

/// Returns the number of merged pages of all live processes: the sum of `ksm_merging_pages`. `None`
/// before Linux 6.1.
///
/// While ksmd is stopped, `pages_shared`, `pages_sharing` and `general_profit` still include ended
/// processes, because only ksmd removes their items (`mm/ksm.c`). The sum here does not include
/// them.
#[must_use]
pub fn merging_pages(proc_root: &Path) -> Option<u64> {
    let pages = |process: fs::DirEntry| -> Option<u64> {
        let text = fs::read_to_string(process.path().join("ksm_merging_pages")).ok()?;
        text.trim().parse().ok()
    };
    let processes = fs::read_dir(proc_root).ok()?.flatten();
    processes.filter_map(pages).reduce(|a, b| a + b)
}

fn text(path: &Path) -> Result<Option<String>, KsmError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(KsmError::read(path)(source)),
    }
}

/// ksmd, the kernel thread that merges pages.
#[derive(Clone, Debug)]
pub struct Ksmd {
    directory: PathBuf,
}

impl Ksmd {
    /// Finds ksmd of this host. Returns `None` if ksmd is not visible (no KSM, or a PID namespace
    /// that hides it).
    #[must_use]
    pub fn find() -> Option<Self> {
        Self::find_in(Path::new("/proc"))
    }

    /// Finds ksmd in the directory `proc_root`, which is `/proc` except in tests: the process named
    /// ksmd whose parent is kthreadd (PID 2).
    #[must_use]
    pub fn find_in(proc_root: &Path) -> Option<Self> {
        let is_ksmd = |directory: &PathBuf| {
            fs::read_to_string(directory.join("stat"))
                .is_ok_and(|stat| stat.contains(" (ksmd) ") && stat_field(&stat, 4) == Some(2))
        };
        let mut processes = fs::read_dir(proc_root).ok()?.flatten();
        let directory = processes.find_map(|entry| Some(entry.path()).filter(is_ksmd))?;
        Some(Self { directory })
    }

    /// Returns ksmd's CPU time since the host's boot, from `schedstat` (nanoseconds), or from
    /// `utime` and `stime` (ticks of 10 ms) if the kernel does not have `schedstat`.
    pub fn cpu_time(&self) -> Result<Duration, KsmError> {
        let scheduled = text(&self.directory.join("schedstat"))?.unwrap_or_default();
        let nanoseconds = scheduled.split_whitespace().next();
        if let Some(nanoseconds) = nanoseconds.and_then(|number| number.parse().ok()) {
            return Ok(Duration::from_nanos(nanoseconds));
        }
        let path = self.directory.join("stat");
        let stat = text(&path)?.unwrap_or_default();
        match (stat_field(&stat, 14), stat_field(&stat, 15)) {
            (Some(user), Some(system)) => Ok(Duration::from_secs_f64(
                (user + system) as f64 / rustix::param::clock_ticks_per_second() as f64,
            )),
            _ => Err(KsmError::Format { path, text: stat }),
        }
    }
}

/// Returns field `number` of `/proc/PID/stat`, as `proc_pid_stat(5)` counts fields, from 3 on.
/// These fields follow the process's name, which may contain any characters.
#[must_use]
pub fn stat_field(stat: &str, number: usize) -> Option<u64> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    fields.nth(number.checked_sub(3)?)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = tree.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        tree
    }

    /// The line as Linux 6.18 shows it.
    const KSMD: &str =
        "37 (ksmd) S 2 0 0 0 -1 2097216 0 0 0 0 7 25 0 0 25 5 1 0 27 0 0 18446744073709551615 0 0";

    #[test]
    fn ksmd_is_found_as_a_kernel_thread_and_not_as_a_program_of_that_name() {
        let impostor = KSMD.replace("37 (ksmd) S 2", "99 (ksmd) S 1");
        let tree = tree(&[("99/stat", &impostor), ("37/stat", KSMD)]);
        let ksmd = Ksmd::find_in(tree.path()).unwrap();
        assert!(ksmd.directory.ends_with("37"));
        assert_eq!(ksmd.cpu_time().unwrap(), Duration::from_millis(320));
        fs::write(tree.path().join("37/schedstat"), "34631 262170 4\n").unwrap();
        assert_eq!(ksmd.cpu_time().unwrap(), Duration::from_nanos(34631));
    }

    #[test]
    fn ksm_figures_of_a_process_are_read_on_new_and_old_kernels() {
        let stat = "ksm_rmap_items 10\nksm_zero_pages 1\nksm_merging_pages 8\nksm_process_profit -640\nksm_merge_any: no\nksm_mergeable: yes\n";
        let tree = tree(&[
            ("5/ksm_stat", stat),
            ("6/ksm_merging_pages", "3\n"),
            ("7/comm", "x"),
        ]);
        let new = ProcessStatus::read(tree.path(), 5).unwrap();
        assert_eq!(
            (
                new.ksm_merging_pages,
                new.ksm_process_profit,
                new.ksm_merge_any,
                new.ksm_mergeable
            ),
            (Some(8), Some(-640), Some(false), Some(true))
        );
        let old = ProcessStatus::read(tree.path(), 6).unwrap();
        assert_eq!((old.ksm_merging_pages, old.ksm_rmap_items), (Some(3), None));
        assert_eq!(
            ProcessStatus::read(tree.path(), 7).unwrap(),
            ProcessStatus::default()
        );
    }

    #[test]
    fn the_numbers_of_ksm_pages_of_all_processes_are_added_up() {
        let tree = tree(&[
            ("5/ksm_merging_pages", "8\n"),
            ("6/ksm_merging_pages", "0\n"),
            ("7/comm", "an old kernel has none"),
        ]);
        assert_eq!(merging_pages(tree.path()), Some(8));
        fs::remove_file(tree.path().join("5/ksm_merging_pages")).unwrap();
        assert_eq!(merging_pages(tree.path()), Some(0));
        fs::remove_file(tree.path().join("6/ksm_merging_pages")).unwrap();
        assert_eq!(merging_pages(tree.path()), None);
    }

    #[test]
    fn a_negative_ksm_counter_is_read_and_a_missing_ksm_counter_has_no_value() {
        let tree = tree(&[
            ("run", "0\n"),
            ("pages_sharing", "12\n"),
            ("general_profit", "-64\n"),
        ]);
        let status = Status::read(&Controls::new(tree.path())).unwrap();
        assert_eq!(
            (
                status.pages_sharing,
                status.general_profit,
                status.pages_skipped
            ),
            (Some(12), Some(-64), None)
        );
    }
}
