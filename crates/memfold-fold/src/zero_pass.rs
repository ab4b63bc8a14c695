//! When a VM's memory is searched for pages of zeroes: once after the VM has come up, and again
//! whenever its memory has grown by [`GROWTH_PAGES`] since.

use std::time::{Duration, Instant};

use memfold_wire::library::Range;
use rustix::process::Pid;

/// Time between the VM's coming and the first pass: it is to have booted.
const FIRST: Duration = Duration::from_secs(30);

/// Shortest time between two passes.
const INTERVAL: Duration = Duration::from_secs(60);

/// Growth in pages that makes another pass worth it (16 MiB).
const GROWTH_PAGES: u64 = 4096;

/// Where a VM's pass stands.
#[derive(Debug)]
pub(super) struct ZeroPass {
    /// When the next order is to be sent.
    pub due: Option<Instant>,
    pub rest: Vec<Range>,
    pub resident_pages: u64,
    pub last: Instant,
    enabled: bool,
}

impl ZeroPass {
    /// The first pass comes due some time after `added`; none ever if that is `None`.
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

    /// Starts a pass if the process has grown enough since the last.
    pub fn consider(&mut self, now: Instant, pid: Pid) {
        if self.enabled
            && self.due.is_none()
            && resident_pages(pid) >= self.resident_pages + GROWTH_PAGES
        {
            self.due = Some(now.max(self.last + INTERVAL));
        }
    }
}

/// `RssAnon`-like figure that is cheap to read: resident pages of `/proc/PID/statm`.
pub(super) fn resident_pages(pid: Pid) -> u64 {
    std::fs::read_to_string(format!("/proc/{}/statm", pid.as_raw_nonzero()))
        .ok()
        .and_then(|text| text.split_ascii_whitespace().nth(1)?.parse().ok())
        .unwrap_or(0)
}
