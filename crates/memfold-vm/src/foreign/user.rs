//! Looks up the user that a QEMU process runs as.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::process::Pid;

/// Name, user ID and group ID of the user that a QEMU process runs as.
pub(super) struct User {
    pub(super) name: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// Returns the name of the user that a process runs as; `None`: root.
pub(super) fn user(pid: Pid) -> io::Result<Result<Option<String>, String>> {
    let facts = fs::metadata(format!("/proc/{}", pid.as_raw_nonzero()))?;
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()))?;
    // The directory of a process that cannot be dumped belongs to root, so `status` is read first.
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let effective = line.and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok());
    let uid = effective.unwrap_or_else(|| facts.uid());
    if uid == 0 {
        return Ok(Ok(None));
    }
    let name = memfold_sys::peer::user_name(uid)?;
    Ok(name.map(Some).ok_or_else(|| {
        format!(
            "QEMU's user {uid} has no name on this host, so another QEMU cannot switch to that user"
        )
    }))
}
