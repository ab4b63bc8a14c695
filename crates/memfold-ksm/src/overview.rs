//! Collects all figures that `memfold ksm status` shows, at one moment: KSM's settings and
//! counters, the CPU time of ksmd, and figures of each process.

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

/// KSM's figures of one process (a VM's QEMU or another).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[allow(missing_docs)] // the kernel's names, explained in ksm.rst
pub struct Part {
    /// Name of the VM, or name of the process (`/proc/PID/comm`) if no daemon knows the process as
    /// a VM.
    pub name: String,
    /// Trust domain of the VM; null if the VM has none or no daemon knows the VM.
    pub domain: Option<String>,
    /// Process number of the VM's QEMU, or of the other process.
    pub pid: i32,
    /// Whether KSM may merge some of the process's memory.
    pub mergeable: bool,
    /// Number of the process's merged pages (mapped to a page that others map too), without pages
    /// on the kernel's zero page.
    pub ksm_merging_pages: Option<u64>,
    /// Number of the process's zero pages that KSM has mapped to the kernel's zero page.
    pub ksm_zero_pages: Option<u64>,
    /// Number of ksmd's metadata items about the process, one for each page that ksmd tracks.
    pub ksm_rmap_items: Option<u64>,
    /// Memory that KSM saves in the process, in bytes, by the kernel's count; negative if KSM's
    /// metadata take more than merging saves.
    pub ksm_process_profit: Option<i64>,
    /// Whether the process has let KSM merge all of its memory (`PR_SET_MEMORY_MERGE`).
    pub ksm_merge_any: Option<bool>,
    /// Size of ksmd's metadata about the process, in bytes: the size of the pages that KSM has
    /// merged or mapped to the zero page, less the profit that the kernel reports.
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

/// Sums of KSM's figures over all processes in an `Overview`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[allow(missing_docs)] // the kernel's names, explained in ksm.rst
pub struct Totals {
    /// Number of merged pages of all processes (mapped to a page that others map too), without
    /// pages on the kernel's zero page.
    pub ksm_merging_pages: u64,
    /// Number of zero pages of all processes that KSM has mapped to the kernel's zero page.
    pub ksm_zero_pages: u64,
    /// Number of ksmd's metadata items about all processes, one for each page that ksmd tracks.
    pub ksm_rmap_items: u64,
    /// Memory that KSM saves in all processes, in bytes, by the kernel's count; negative if KSM's
    /// metadata take more than merging saves.
    pub ksm_process_profit: i64,
    /// Size of ksmd's metadata about all processes, in bytes.
    pub rmap_overhead_bytes: u64,
}

/// State of a daemon that steers KSM, that is, sets ksmd's scan rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Steering {
    /// Trust domain for which the daemon runs KSM.
    pub domain: String,
    /// Maximum CPU use of ksmd, in percent of one CPU.
    pub cpu_percent: f64,
    /// Target duration of ksmd's full scan of all mergeable memory, in seconds.
    pub target_s: f64,
    /// Whether the kernel's advisor sets ksmd's scan rate instead of the daemon.
    pub advisor: bool,
    /// Scan mode that the daemon has chosen for ksmd; null while KSM is paused.
    pub mode: Option<Mode>,
    /// Description of the reason for ksmd's scan mode, or for the pause of KSM.
    pub why: String,
    /// Reason why the daemon has paused KSM; null while KSM runs.
    pub held: Option<String>,
    /// Present value of KSM's setting `pages_to_scan`: pages that ksmd scans before it sleeps.
    pub pages_to_scan: u64,
    /// Present value of KSM's setting `sleep_millisecs`: pause of ksmd between two batches, in
    /// milliseconds.
    pub sleep_millisecs: u64,
    /// CPU use of ksmd over the last seconds, in percent of one CPU.
    pub ksmd_cpu_percent: f64,
    /// CPU time of ksmd per scanned page, in microseconds.
    pub cost_us_per_page: f64,
    /// Number of full scans that ksmd has completed since the daemon began to steer KSM.
    pub full_scans: u64,
    /// Time since the daemon began to steer KSM, in seconds.
    pub running_s: f64,
    /// CPU time of ksmd since the daemon began to steer KSM, in seconds.
    pub ksmd_cpu_s: f64,
    /// Names of VMs of other trust domains that the daemon started with `mem-merge=off` while it
    /// steers KSM, so that KSM does not merge their memory.
    pub kept_out: Vec<String>,
}

/// State of KSM on this host: settings, counters, ksmd's CPU time, and figures of each process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Overview {
    /// Whether the host's kernel has KSM.
    pub available: bool,
    /// All files of `/sys/kernel/mm/ksm` (settings and counters), with their values.
    pub files: Vec<Entry>,
    /// CPU time of ksmd since the host's boot, in seconds; null if it cannot be read.
    pub ksmd_cpu_s: Option<f64>,
    /// Size of the anonymous memory of the processes with mergeable memory, in bytes. This is the
    /// memory that a full scan examines, and a little of QEMU's own.
    pub mergeable_bytes: u64,
    /// Duration of a full scan by ksmd at the present settings, in seconds; null if ksmd scans
    /// nothing.
    pub pass_s: Option<f64>,
    /// Pressure of CPU and memory on this host.
    pub pressure: Pressure,
    /// Whether a daemon was asked about VMs. Only then do VMs have names and trust domains.
    pub daemon: bool,
    /// State of the daemon that steers KSM (sets ksmd's scan rate); null if the daemon does not
    /// steer KSM.
    pub steering: Option<Steering>,
    /// KSM's figures of each VM: the daemon's VMs, and all other QEMUs with mergeable memory.
    pub vms: Vec<Part>,
    /// KSM's figures of each other process with mergeable memory.
    pub others: Vec<Part>,
    /// Sums of KSM's figures over all VMs and other processes.
    pub totals: Totals,
}

/// Name and trust domain of each VM that a daemon knows, by the process number of its QEMU.
pub type Names = BTreeMap<i32, (String, Option<String>)>;

impl Overview {
    /// Reads KSM's figures of this host. `known` contains the daemon's VMs; `None` if no daemon was
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
    fn ksm_status_names_vms_as_the_daemon_does_and_sums_up_all_processes() {
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
