//! Checks a segment once more, right after it was mounted over a directory of the guest as an
//! overlay.
//!
//! Before the mount, the agent compared the guest's own files with the segment's files. A program
//! may have changed a file since. So this module searches for compared files that have changed, and
//! for compared files that a program still has open for writing. It also checks that programs see
//! the right files through the overlay. After the mount no path leads to the guest's own files, so
//! they cannot change in any other way. The search also precedes the mount, so that a file which is
//! open for writing then is not shown from the segment even for a moment.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::OwnedFd;

use memfold_sys::guest::{self, signal};
use rustix::fs::{FileType, OFlags};

use super::compare::{Facts, Plan, split};
use super::error::{During, Error, Result, shown};
use super::tree;

/// Number of paths of each kind that are checked through the overlay.
const SAMPLES: usize = 64;

/// Result of checking the compared files a second time.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No compared file has changed or is open for writing.
    Unchanged,
    /// The compared files at these paths are open for writing.
    Writers(Vec<Vec<u8>>),
    /// The compared file at this path has changed since the comparison.
    Changed(Vec<u8>),
}

/// Checks through the overlay that a sample of the files looks like the guest's own. The first
/// difference is an error.
pub fn merged(plan: &Plan, merged: &OwnedFd, own: &OwnedFd) -> Result<()> {
    let top = [(&[][..], Facts::of(&stat(own, b"")?))];
    let same = sampled(&plan.same).map(|s| (&s.path[..], s.own));
    let links = sampled(&plan.hidden).filter_map(|h| Some((&h.path[..], h.own?)));
    for (path, own) in top.into_iter().chain(same).chain(links) {
        let seen = Facts::of(&stat(merged, path)?);
        if !seen.looks_like(&own) {
            return Err(wrong(path));
        }
    }
    for hidden in sampled(&plan.hidden).filter(|h| h.own.is_none()) {
        if find(merged, &hidden.path)? {
            return Err(wrong(&hidden.path));
        }
    }
    Ok(())
}

/// Returns up to 64 items of a list, spread evenly.
fn sampled<T>(list: &[T]) -> impl Iterator<Item = &T> {
    list.iter().step_by(list.len().div_ceil(SAMPLES).max(1))
}

fn wrong(path: &[u8]) -> Error {
    Error::refused(
        format!("{} differs through the overlay", shown(path)),
        "this is a bug of memfold or of the kernel: please report it",
    )
}

/// Checks that the guest's own directory still has the metadata in the plan, change times and inode
/// numbers included.
pub fn unchanged(plan: &Plan, own: &OwnedFd) -> Result<Verdict> {
    // The kernel sends SIGIO if a process wants to write to a file while this process holds a lease
    // on it.
    let _signal = guest::signal_descriptor(&[signal::IO]).during(|| "blocking SIGIO".into())?;
    let mut writers = Vec::new();
    // The entries of a directory are consecutive in the plan, so the directory is opened once for
    // all of them.
    let mut open: Option<(&[u8], OwnedFd)> = None;
    for same in &plan.same {
        let what = || format!("looking at {} again", shown(&same.path));
        let (parent, name) = split(&same.path);
        let directory = match open.take() {
            Some((path, directory)) if path == parent => directory,
            _ => tree::directory_below(own, parent).during(what)?,
        };
        let stat = tree::stat(&directory, &name).during(what)?;
        if Facts::of(&stat) != same.own {
            return Ok(Verdict::Changed(same.path.clone()));
        }
        if same.own.kind() == FileType::RegularFile
            && is_open_for_writing(&directory, &name).during(what)?
        {
            writers.push(same.path.clone());
        }
        open = Some((parent, directory));
    }
    for hidden in &plan.hidden {
        let is_there = find(own, &hidden.path)?;
        let as_before = match hidden.own {
            None => !is_there,
            Some(before) => is_there && before.ino == stat(own, &hidden.path)?.stx_ino,
        };
        if !as_before {
            return Ok(Verdict::Changed(hidden.path.clone()));
        }
    }
    Ok(if writers.is_empty() {
        Verdict::Unchanged
    } else {
        Verdict::Writers(writers)
    })
}

fn is_open_for_writing(directory: &OwnedFd, name: &CStr) -> io::Result<bool> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOATIME;
    guest::is_open_for_writing(tree::open_below(directory, name.to_bytes(), flags)?)
}

fn stat(top: &OwnedFd, path: &[u8]) -> Result<rustix::fs::Statx> {
    let name = name(path);
    tree::stat(top, &name).during(|| format!("looking at {} again", shown(path)))
}

fn find(top: &OwnedFd, path: &[u8]) -> Result<bool> {
    let found = tree::find(top, &name(path)).during(|| format!("looking for {}", shown(path)))?;
    Ok(found.is_some())
}

fn name(path: &[u8]) -> CString {
    let path = if path.is_empty() { b"." } else { path };
    CString::new(path).unwrap_or_default()
}
