//! Metrics of the daemon's own process, such as CPU time, memory and open files.

use procfs::process::Process as Proc;

/// Figures of the daemon's process, by the usual names of Prometheus clients. `None`: `/proc` does
/// not report the figure.
#[derive(Debug, Default)]
pub(super) struct Process {
    pub cpu_s: Option<f64>,
    pub resident_bytes: Option<f64>,
    pub virtual_bytes: Option<f64>,
    pub start_unix_s: Option<f64>,
    pub open_files: Option<f64>,
    pub files_limit: Option<f64>,
    pub threads: Option<f64>,
}

impl Process {
    /// Reads the figures of this process.
    pub(super) fn now() -> Self {
        let proc = Proc::myself().and_then(|proc| Ok((proc.stat()?, proc)));
        let Ok((stat, proc)) = proc else {
            return Self::default();
        };
        let ticks = procfs::ticks_per_second() as f64;
        let booted = procfs::boot_time_secs().ok().map(|s| s as f64);
        let limit = proc.limits().ok().map(|l| l.max_open_files.soft_limit);
        Self {
            cpu_s: Some((stat.utime + stat.stime) as f64 / ticks),
            resident_bytes: Some(stat.rss as f64 * procfs::page_size() as f64),
            virtual_bytes: Some(stat.vsize as f64),
            start_unix_s: booted.map(|s| s + stat.starttime as f64 / ticks),
            open_files: proc.fd_count().ok().map(|n| n as f64),
            files_limit: limit.and_then(|limit| match limit {
                procfs::process::LimitValue::Value(n) => Some(n as f64),
                procfs::process::LimitValue::Unlimited => None,
            }),
            threads: Some(stat.num_threads as f64),
        }
    }
}
