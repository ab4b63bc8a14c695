//! Finds the processes whose memory KSM may merge, and tells which of them are QEMUs.
//!
//! Before the kernel answers a read of `/proc/PID/ksm_stat` or `smaps`, it takes the process's
//! `mmap` lock. If a process hangs while it holds this lock, for example because of an unreachable
//! file server, the reader hangs, too. Therefore a separate thread reads, and the caller stops
//! waiting after [`PATIENCE`]. While such a read hangs, no second one is started.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use memfold_units::PAGE_SIZE;

use super::error::KsmError;
use super::ranges;
use super::status::ProcessStatus;

/// Time limit for reading all processes. Thousands of processes take some milliseconds of CPU time.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reads whose callers have stopped waiting, and which still hang.
static HANGING: Mutex<Vec<Look>> = Mutex::new(Vec::new());

/// KSM's figures of one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process number in the daemon's PID namespace.
    pub pid: i32,
    /// Name of the process from `/proc/PID/comm`.
    pub comm: String,
    /// Whether the process is a QEMU.
    pub qemu: bool,
    /// Whether KSM may merge some of the process's memory.
    pub mergeable: bool,
    /// KSM's counters of the process, as the kernel reports them.
    pub status: ProcessStatus,
    /// Number of the process's anonymous pages in memory.
    pub anonymous_pages: u64,
}

impl Process {
    /// Reads KSM's figures of process `pid`. Returns `None` if the process has ended or is a kernel
    /// thread.
    #[must_use]
    pub fn read(proc_root: &Path, pid: i32) -> Option<Self> {
        Self::look(proc_root, pid, Wanted::Any)
    }

    fn look(proc_root: &Path, pid: i32, wanted: Wanted) -> Option<Self> {
        let directory = proc_root.join(pid.to_string());
        let status = ProcessStatus::read(proc_root, pid).ok()?;
        let any = status.ksm_merge_any.filter(|any| *any);
        let told = any.or(status.ksm_mergeable);
        if wanted == Wanted::Mergeable && told == Some(false) {
            return None;
        }
        // The kernel cuts names at 15 bytes, even within a character, and a name can contain any
        // bytes.
        let comm = fs::read(directory.join("comm")).ok()?;
        let comm = String::from_utf8_lossy(&comm).trim_end().to_owned();
        let named_qemu = comm.starts_with("qemu-system") || comm == "qemu-kvm";
        // Linux reports this since about version 6.13. Before, the mappings of a QEMU show it, and
        // for other processes a number of merged or scanned pages.
        let mergeable = told.unwrap_or_else(|| {
            let visited = |pages: Option<u64>| pages.is_some_and(|pages| pages > 0);
            visited(status.ksm_merging_pages)
                || visited(status.ksm_rmap_items)
                || ((named_qemu || runs_qemu(&directory)) && has_mergeable_mapping(&directory))
        });
        let is_wanted = match wanted {
            Wanted::Any => true,
            Wanted::MergeableOrQemu => mergeable || named_qemu,
            Wanted::Mergeable => mergeable,
        };
        if !is_wanted {
            return None;
        }
        Some(Self {
            pid,
            comm,
            qemu: named_qemu || runs_qemu(&directory),
            mergeable,
            status,
            anonymous_pages: anonymous_pages(&directory)?,
        })
    }

    /// Returns the number of the process's pages that KSM has merged, including zero pages on the
    /// kernel's zero page.
    #[must_use]
    pub fn merged_pages(&self) -> u64 {
        self.status.ksm_merging_pages.unwrap_or(0) + self.status.ksm_zero_pages.unwrap_or(0)
    }

    /// Returns the size of ksmd's metadata about the process in bytes, by the kernel's formula
    /// (profit = saved bytes - metadata). Returns `None` if the kernel does not report the profit.
    #[must_use]
    pub fn rmap_overhead_bytes(&self) -> Option<u64> {
        let profit = self.status.ksm_process_profit?;
        let saved = self.merged_pages() * PAGE_SIZE;
        Some(saved.saturating_add_signed(profit.saturating_neg()))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Any,
    MergeableOrQemu,
    Mergeable,
}

/// Returns KSM's figures of all processes with mergeable memory and of all QEMUs, sorted by process
/// number.
///
/// # Errors
/// Fails with [`KsmError::Hung`] after [`PATIENCE`], or at once while an earlier read hangs.
pub fn all(proc_root: &Path) -> Result<Vec<Process>, KsmError> {
    look(proc_root, Wanted::MergeableOrQemu)
}

/// Returns KSM's figures of all processes with mergeable memory, sorted by process number. Since
/// about Linux 6.13, this costs only one read of a small file for each other process.
///
/// # Errors
/// Fails as [`all`] does.
pub fn mergeable(proc_root: &Path) -> Result<Vec<Process>, KsmError> {
    look(proc_root, Wanted::Mergeable)
}

/// A read of all processes by a thread of its own.
struct Look {
    proc_root: PathBuf,
    /// Number of the process that is being read.
    at: Arc<AtomicI32>,
    found: Receiver<Vec<Process>>,
}

impl Look {
    fn begin(proc_root: &Path, wanted: Wanted) -> Result<Self, KsmError> {
        let at = Arc::new(AtomicI32::new(0));
        let (done, found) = sync_channel(1);
        let (root, pid) = (proc_root.to_owned(), at.clone());
        std::thread::Builder::new()
            .name("processes".into())
            .spawn(move || drop(done.send(find(&root, wanted, &pid))))
            .map_err(KsmError::read(proc_root))?;
        Ok(Self {
            proc_root: proc_root.into(),
            at,
            found,
        })
    }

    fn hung(&self) -> KsmError {
        KsmError::Hung(self.at.load(Ordering::Relaxed))
    }
}

fn look(proc_root: &Path, wanted: Wanted) -> Result<Vec<Process>, KsmError> {
    // The lock is held during the whole read. Otherwise other callers would hang at the same
    // process, each with a thread.
    let mut hanging = HANGING.lock().unwrap_or_else(PoisonError::into_inner);
    hanging.retain(|look| matches!(look.found.try_recv(), Err(TryRecvError::Empty)));
    if let Some(look) = hanging.iter().find(|look| look.proc_root == proc_root) {
        return Err(look.hung());
    }
    let look = Look::begin(proc_root, wanted)?;
    if let Ok(found) = look.found.recv_timeout(PATIENCE) {
        return Ok(found);
    }
    let error = look.hung();
    hanging.push(look);
    Err(error)
}

fn find(proc_root: &Path, wanted: Wanted, at: &AtomicI32) -> Vec<Process> {
    let entries = fs::read_dir(proc_root).into_iter().flatten().flatten();
    let mut found: Vec<Process> = entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| {
            at.store(pid, Ordering::Relaxed);
            Process::look(proc_root, pid, wanted)
        })
        .collect();
    found.sort_by_key(|process| process.pid);
    found
}

/// Returns the resident minus the shared pages of `/proc/PID/statm` (`proc_pid_statm(5)`); `None`
/// for a kernel thread, which has no memory.
fn anonymous_pages(directory: &Path) -> Option<u64> {
    let text = fs::read_to_string(directory.join("statm")).ok()?;
    let mut fields = text.split_ascii_whitespace().map_while(|f| f.parse().ok());
    let [size, resident, shared]: [u64; 3] = std::array::from_fn(|_| fields.next().unwrap_or(0));
    (size > 0).then_some(resident.saturating_sub(shared))
}

/// Returns whether the process's program is a QEMU, whatever the process's name is
/// (`-name process=`).
fn runs_qemu(directory: &Path) -> bool {
    fs::read_link(directory.join("exe")).is_ok_and(|program| {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("qemu-system") || name.starts_with("qemu-kvm")
    })
}

fn has_mergeable_mapping(directory: &Path) -> bool {
    fs::read(directory.join("smaps")).is_ok_and(|smaps| {
        let mappings = ranges::parse(&String::from_utf8_lossy(&smaps));
        mappings.iter().any(ranges::Mapping::is_mergeable)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(root: &Path, pid: i32, files: &[(&str, &str)]) {
        let directory = root.join(pid.to_string());
        fs::create_dir_all(&directory).unwrap();
        for (name, text) in files {
            fs::write(directory.join(name), text).unwrap();
        }
    }

    #[test]
    fn processes_with_mergeable_memory_and_qemu_processes_are_found_on_new_and_old_kernels() {
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path();
        let statm = "100 60 20 1 0 50 0";
        let mergeable =
            "ksm_rmap_items 9\nksm_zero_pages 2\nksm_merging_pages 8\nksm_mergeable: yes\n";
        process(
            root,
            5,
            &[
                ("comm", "java\n"),
                ("statm", statm),
                ("ksm_stat", mergeable),
            ],
        );
        let not = "ksm_rmap_items 0\nksm_merging_pages 0\nksm_mergeable: no\n";
        process(
            root,
            6,
            &[("comm", "bash\n"), ("statm", statm), ("ksm_stat", not)],
        );
        process(
            root,
            7,
            &[
                ("comm", "qemu-system-x86\n"),
                ("statm", statm),
                ("ksm_stat", not),
            ],
        );
        let old = "7f00-7f01 rw-p 0 0:0 0\nVmFlags: rd wr mg\n";
        process(
            root,
            8,
            &[
                ("comm", "qemu-system-x86\n"),
                ("statm", statm),
                ("smaps", old),
            ],
        );
        process(root, 9, &[("comm", "ksmd\n"), ("statm", "0 0 0 0 0 0 0")]);
        let all = all(root).unwrap();
        let found: Vec<_> = all.iter().map(|p| (p.pid, p.qemu, p.mergeable)).collect();
        assert_eq!(found, [(5, false, true), (7, true, false), (8, true, true)]);
        let pids: Vec<i32> = super::mergeable(root)
            .unwrap()
            .iter()
            .map(|p| p.pid)
            .collect();
        assert_eq!(pids, [5, 8]);
        assert_eq!((all[0].merged_pages(), all[0].anonymous_pages), (10, 40));
    }

    #[test]
    fn if_a_proc_file_of_a_process_hangs_the_error_names_it_until_the_file_can_be_read() {
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path();
        let statm = "100 60 20 1 0 50 0";
        process(root, 5, &[("comm", "java\n"), ("statm", statm)]);
        // A reader of this pipe waits until somebody writes.
        let stat = root.join("5/ksm_stat");
        rustix::fs::mkfifoat(rustix::fs::CWD, &stat, rustix::fs::Mode::RWXU).unwrap();
        for _ in 0..2 {
            assert!(matches!(mergeable(root), Err(KsmError::Hung(5))));
        }
        let others = tempfile::tempdir().unwrap();
        assert_eq!(mergeable(others.path()).unwrap(), []);
        fs::write(&stat, "ksm_mergeable: no\n").unwrap();
        fs::remove_file(&stat).unwrap();
        fs::write(&stat, "ksm_mergeable: yes\n").unwrap();
        let limit = Duration::from_secs(60);
        let found = memfold_testkit::wait_for("the file is read", limit, || mergeable(root));
        assert_eq!(found[0].pid, 5);
    }
}
