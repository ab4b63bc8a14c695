//! Reads how much memory the host has available (`MemAvailable`). Saves and restores use this
//! figure before they take memory for copies of pages.

use std::{fs, io};

use memfold_units::PAGE_SIZE;

/// Returns `MemAvailable` of `/proc/meminfo`, in pages.
pub(super) fn host_available_pages() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let mut lines = text.lines();
    let line = lines.find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib * 1024 / PAGE_SIZE)
        .ok_or_else(|| io::Error::other("/proc/meminfo has no MemAvailable"))
}
