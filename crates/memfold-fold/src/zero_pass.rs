//! Decides when a VM's memory is searched for pages of zeroes, which can be discarded: once after
//! the VM has booted, and again whenever the QEMU process has grown by [`GROWTH_PAGES`] since the
//! last search.

use std::time::{Duration, Instant};

use memfold_wire::library::Range;
use rustix::process::Pid;

/// Time from adding a VM to its first pass, in which the VM boots.
const FIRST: Duration = Duration::from_secs(30);

/// Shortest time between two passes.
const INTERVAL: Duration = Duration::from_secs(60);

/// Growth of the VM's memory in pages (16 MiB) that makes another pass worthwhile.
const GROWTH_PAGES: u64 = 4096;

/// State of the search (pass) of one VM's memory for zero pages.
#[derive(Debug)]
pub(super) struct ZeroPass {
    /// Time at which the next part of the pass is due; `None` if no pass is planned.
    pub due: Option<Instant>,
    pub rest: Vec<Range>,
    pub resident_pages: u64,
    pub last: Instant,
    enabled: bool,
}

impl ZeroPass {
    /// Creates the state before the first pass, which is due 30 s after `added`, the time at which
    /// the VM was added. `None` disables all passes.
    pub fn new(added: Option<Instant>) -> Self {
        let now = added.unwrap_or_else(Instant::now);
        Self {
            due: added.map(|at| at + FIRST),
            rest: Vec::new(),
            resident_pages: 0,
            last: now,
            enabled: added.is_some(),
        }
    }

    /// Plans a pass if the QEMU process `pid` has grown by at least 16 MiB since the last pass.
    pub fn consider(&mut self, now: Instant, pid: Pid) {
        if self.enabled
            && self.due.is_none()
            && resident_pages(pid) >= self.resident_pages + GROWTH_PAGES
        {
            self.due = Some(now.max(self.last + INTERVAL));
        }
    }
}

/// Returns the number of resident pages of a process from `/proc/PID/statm`, a cheap approximation
/// of `RssAnon`.
pub(super) fn resident_pages(pid: Pid) -> u64 {
    std::fs::read_to_string(format!("/proc/{}/statm", pid.as_raw_nonzero()))
        .ok()
        .and_then(|text| text.split_ascii_whitespace().nth(1)?.parse().ok())
        .unwrap_or(0)
}
