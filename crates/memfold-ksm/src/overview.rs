//! KSM on this host at one moment: settings, counters, ksmd, and figures of each process.

use std::collections::BTreeMap;
use std::path::Path;

use memfold_units::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::controls::Controls;
use super::error::KsmError;
use super::facts::HostSide;
use super::files::{Entry, entries};
use super::passes::pass_s;
use super::pressure::Pressure;
use super::processes::{self, Process};
use super::steer::Mode;

/// KSM's figures of one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[allow(missing_docs)] // the kernel's names, explained in ksm.rst
pub struct Part {
    /// Name of the VM, or of the process if no daemon knows it as a VM.
    pub name: String,
    /// Trust domain, if a daemon knows the VM.
    pub domain: Option<String>,
    /// Number of the process.
    pub pid: i32,
    /// Whether KSM may merge some of the process's memory.
    pub mergeable: bool,
    /// Number of merged pages (mapped to a page that others map too), without pages on the kernel's
    /// zero page.
    pub ksm_merging_pages: Option<u64>,
    /// Number of zero pages that KSM has mapped to the kernel's zero page.
    pub ksm_zero_pages: Option<u64>,
    /// Number of ksmd's metadata items, one for each page that it tracks.
    pub ksm_rmap_items: Option<u64>,
    /// Bytes that KSM saves in this process according to the kernel; negative if KSM's metadata
    /// take more.
    pub ksm_process_profit: Option<i64>,
    /// Whether the process has offered all of its memory (`PR_SET_MEMORY_MERGE`).
    pub ksm_merge_any: Option<bool>,
    /// Bytes of ksmd's metadata about this process: `ksm_merging_pages` and `ksm_zero_pages` in
    /// bytes less `ksm_process_profit`.
    pub rmap_overhead_bytes: Option<u64>,
}

impl Part {
    fn of(process: &Process, known: &Names) -> Self {
        let status = &process.status;
        let vm = known.get(&process.pid);
        Self {
            name: vm.map_or_else(|| process.comm.clone(), |(name, _)| name.clone()),
            domain: vm.and_then(|(_, domain)| domain.clone()),
            pid: process.pid,
            mergeable: process.mergeable,
            ksm_merging_pages: status.ksm_merging_pages,
            ksm_zero_pages: status.ksm_zero_pages,
            ksm_rmap_items: status.ksm_rmap_items,
            ksm_process_profit: status.ksm_process_profit,
            ksm_merge_any: status.ksm_merge_any,
            rmap_overhead_bytes: process.rmap_overhead_bytes(),
        }
    }
}

/// Sums over the processes shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[allow(missing_docs)] // the kernel's names, explained in ksm.rst
pub struct Totals {
    /// Number of merged pages (mapped to a page that others map too), without pages on the kernel's
    /// zero page.
    pub ksm_merging_pages: u64,
    /// Number of zero pages that KSM has mapped to the kernel's zero page.
    pub ksm_zero_pages: u64,
    /// Number of ksmd's metadata items, one for each page that it tracks.
    pub ksm_rmap_items: u64,
    /// Bytes that KSM saves in these processes according to the kernel; negative if KSM's metadata
    /// take more.
    pub ksm_process_profit: i64,
    /// Bytes of ksmd's metadata about these processes.
    pub rmap_overhead_bytes: u64,
}

/// State of a daemon that steers KSM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Steering {
    /// Trust domain that KSM runs for.
    pub domain: String,
    /// Most CPU of ksmd, in percent of one CPU.
    pub cpu_percent: f64,
    /// Target duration of a full scan, in seconds.
    pub target_s: f64,
    /// Whether the kernel's advisor sets the scan rate.
    pub advisor: bool,
    /// Scan mode; null while KSM is paused.
    pub mode: Option<Mode>,
    /// Description of the reason for the mode.
    pub why: String,
    /// Reason why KSM is paused; null while KSM runs.
    pub held: Option<String>,
    /// Present value of `pages_to_scan`.
    pub pages_to_scan: u64,
    /// Present value of `sleep_millisecs`.
    pub sleep_millisecs: u64,
    /// CPU of ksmd over the last seconds, in percent of one CPU.
    pub ksmd_cpu_percent: f64,
    /// CPU of ksmd per scanned page, in microseconds.
    pub cost_us_per_page: f64,
    /// Full scans since steering began.
    pub full_scans: u64,
    /// Seconds since steering began.
    pub running_s: f64,
    /// CPU of ksmd since steering began, in seconds.
    pub ksmd_cpu_s: f64,
    /// VMs of other trust domains that were started with `mem-merge=off` meanwhile.
    pub kept_out: Vec<String>,
}

/// KSM on this host: settings, counters, and processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Overview {
    /// Whether the kernel has KSM.
    pub available: bool,
    /// All files of `/sys/kernel/mm/ksm`.
    pub files: Vec<Entry>,
    /// CPU time of ksmd since the host's boot, in seconds; null if it cannot be read.
    pub ksmd_cpu_s: Option<f64>,
    /// Anonymous memory of the processes with mergeable memory, in bytes: the memory that a full
    /// scan examines, and a little of QEMU's own.
    pub mergeable_bytes: u64,
    /// Duration of a full scan at the present settings, in seconds.
    pub pass_s: Option<f64>,
    /// Pressure of CPU and memory on this host.
    pub pressure: Pressure,
    /// Whether a daemon was asked. Only then VMs have names and trust domains.
    pub daemon: bool,
    /// State of the daemon's steering; null if the daemon does not steer KSM.
    pub steering: Option<Steering>,
    /// VMs: those of the daemon, and all QEMUs with mergeable memory.
    pub vms: Vec<Part>,
    /// Other processes with mergeable memory.
    pub others: Vec<Part>,
    /// Sums over `vms` and `others`.
    pub totals: Totals,
}

/// Name and trust domain of each VM that a daemon knows, by process number.
pub type Names = BTreeMap<i32, (String, Option<String>)>;

impl Overview {
    /// Reads the figures of this host. `known` contains the daemon's VMs; `None` if no daemon was
    /// asked.
    pub fn now(known: Option<&Names>) -> Result<Self, KsmError> {
        Self::read(&Controls::default(), Path::new("/proc"), known)
    }

    fn read(
        controls: &Controls,
        proc_root: &Path,
        known: Option<&Names>,
    ) -> Result<Self, KsmError> {
        let host = HostSide::read(controls, proc_root)?;
        let files = match &host {
            Some(_) => entries(controls)?,
            None => Vec::new(),
        };
        let none = Names::new();
        let names = known.unwrap_or(&none);
        let shown: Vec<Process> = processes::all(proc_root)?
            .into_iter()
            .filter(|process| process.mergeable || names.contains_key(&process.pid))
            .collect();
        let is_vm = |process: &Process| process.qemu || names.contains_key(&process.pid);
        let (vms, others): (Vec<&Process>, Vec<&Process>) = shown.iter().partition(|p| is_vm(p));
        let parts = |list: Vec<&Process>| -> Vec<Part> {
            list.into_iter().map(|p| Part::of(p, names)).collect()
        };
        let (vms, others) = (parts(vms), parts(others));
        let mut totals = Totals::default();
        for part in vms.iter().chain(&others) {
            totals.ksm_merging_pages += part.ksm_merging_pages.unwrap_or(0);
            totals.ksm_zero_pages += part.ksm_zero_pages.unwrap_or(0);
            totals.ksm_rmap_items += part.ksm_rmap_items.unwrap_or(0);
            totals.ksm_process_profit += part.ksm_process_profit.unwrap_or(0);
            totals.rmap_overhead_bytes += part.rmap_overhead_bytes.unwrap_or(0);
        }
        Ok(Self {
            available: host.is_some(),
            files,
            ksmd_cpu_s: host.as_ref().and_then(|host| host.ksmd_cpu_s),
            mergeable_bytes: host.as_ref().map_or(0, |h| h.mergeable_pages) * PAGE_SIZE,
            pass_s: host.as_ref().and_then(pass_s),
            pressure: Pressure::now(),
            daemon: known.is_some(),
            steering: None,
            vms,
            others,
            totals,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ksm_overview_names_vms_as_the_daemon_does_and_sums_all_processes() {
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path();
        std::fs::create_dir(root.join("ksm")).unwrap();
        std::fs::write(root.join("ksm/run"), "1\n").unwrap();
        for (pid, comm, merging) in [(5, "qemu-system-x86", 100), (6, "java", 10)] {
            let directory = root.join(pid.to_string());
            std::fs::create_dir(&directory).unwrap();
            std::fs::write(directory.join("comm"), comm).unwrap();
            std::fs::write(directory.join("statm"), "900 500 100 1 0 1 0").unwrap();
            let profit = merging * 4096 - 64 * 200;
            let stat = format!(
                "ksm_rmap_items 200\nksm_zero_pages 0\nksm_merging_pages {merging}\nksm_process_profit {profit}\nksm_mergeable: yes\n"
            );
            std::fs::write(directory.join("ksm_stat"), stat).unwrap();
        }
        let controls = Controls::new(root.join("ksm"));
        let names = Names::from([(5, ("web".to_owned(), Some("d".to_owned())))]);
        let seen = Overview::read(&controls, root, Some(&names)).unwrap();
        assert_eq!(
            (seen.vms[0].name.as_str(), seen.vms[0].domain.as_deref()),
            ("web", Some("d"))
        );
        assert_eq!(seen.others[0].name, "java");
        assert_eq!(seen.vms[0].rmap_overhead_bytes, Some(64 * 200));
        assert_eq!(seen.totals.ksm_merging_pages, 110);
        assert_eq!(seen.totals.ksm_process_profit, 110 * 4096 - 2 * 64 * 200);
        assert_eq!(seen.mergeable_bytes, 800 * 4096);
        let alone = Overview::read(&controls, root, None).unwrap();
        assert_eq!(alone.vms[0].name, "qemu-system-x86");
        assert!(!alone.daemon && alone.available);
        let without = Overview::read(&Controls::new(root.join("none")), root, None).unwrap();
        assert!(!without.available && without.files.is_empty());
    }
}
