//! Ends a segment's mount over a guest directory: the files that were written while it was mounted
//! move from the overlay's upper layer into the guest's own directory.
//!
//! ```text
//!   upper (files written meanwhile)       own (the guest's own directory)
//!   file, symlink, device    --rename-->  replaces the name
//!   whiteout (device 0/0)    --delete-->  the name is removed, then the whiteout
//!   directory                --merge--->  entry by entry, then its owner, mode, times, attributes
//!   opaque directory         --rename-->  replaces the directory as a whole
//! ```
//! Each step is one atomic change that takes an entry out of the upper layer. After a crash, the
//! upper layer contains exactly what must still be merged, so the next run continues. Files are
//! renamed, not copied. So a program that has a file open for writing continues to write to the
//! file in the guest's directory.

use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, FileType, Statx};
use rustix::io::Errno;

use super::state::Steps;
use super::tree;

/// Most attempts to empty a directory. A process whose working directory is in the detached overlay
/// may add files meanwhile.
const ROUNDS: u32 = 100;

/// Numbers of files that a merge has changed in the guest's own directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Number of names that the merge moved into the guest's own directory; a directory renamed as
    /// a whole counts once.
    pub moved: u64,
    /// Number of names that the merge removed from the guest's own directory.
    pub removed: u64,
}

/// Merges the written files in the overlay directory `upper` into `own`, the guest's own directory;
/// `upper` is empty afterwards.
pub fn merge(upper: &OwnedFd, own: &OwnedFd, steps: &Steps) -> io::Result<Merged> {
    let mut merge = Merge {
        steps,
        merged: Merged::default(),
    };
    merge.directory(upper, own)?;
    rustix::fs::syncfs(own)?;
    Ok(merge.merged)
}

struct Merge<'a> {
    steps: &'a Steps,
    merged: Merged,
}

impl Merge<'_> {
    fn directory(&mut self, upper: &OwnedFd, own: &OwnedFd) -> io::Result<()> {
        self.steps.step()?;
        let times = tree::note_times(upper)?;
        for name in tree::names(upper)? {
            self.entry(upper, own, &name)
                .map_err(|e| named(&name, &e))?;
        }
        self.steps.step()?;
        tree::copy_directory_facts(upper, own, Some(times))
    }

    fn entry(&mut self, upper: &OwnedFd, own: &OwnedFd, name: &CStr) -> io::Result<()> {
        let Some(stat) = tree::find(upper, name)? else {
            return Ok(());
        };
        if tree::is_whiteout(&stat) {
            self.steps.step()?;
            tree::remove(own, name)?;
            self.steps.step()?;
            tree::remove(upper, name)?;
            self.merged.removed += 1;
            return Ok(());
        }
        let there = tree::find(own, name)?;
        if tree::kind(&stat) == FileType::Directory {
            let inner = tree::open_in(upper, name)?;
            let both = there.is_some_and(|s| tree::kind(&s) == FileType::Directory);
            if both && !tree::is_opaque(&inner) {
                return self.both(upper, own, name, &inner);
            }
        }
        self.whole(upper, own, name, &stat, there.as_ref())
    }

    /// Merges a directory that both sides have.
    fn both(
        &mut self,
        upper: &OwnedFd,
        own: &OwnedFd,
        name: &CStr,
        inner: &OwnedFd,
    ) -> io::Result<()> {
        let target = tree::open_in(own, name)?;
        for _ in 0..ROUNDS {
            self.directory(inner, &target)?;
            self.steps.step()?;
            match rustix::fs::unlinkat(upper, name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => return Ok(()),
                Err(Errno::NOTEMPTY) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Err(io::Error::other("files keep being added to the directory"))
    }

    /// Moves a file or a directory of the upper layer that replaces the existing one as a whole. A
    /// directory's opaque mark is removed after the existing name: otherwise, after a crash between
    /// the two steps, the directory would be merged.
    fn whole(
        &mut self,
        upper: &OwnedFd,
        own: &OwnedFd,
        name: &CStr,
        stat: &Statx,
        there: Option<&Statx>,
    ) -> io::Result<()> {
        let flags = tree::protection(upper, name, stat);
        let is_directory = |s: &Statx| tree::kind(s) == FileType::Directory;
        // Renaming replaces only a file by a file.
        if there.is_some_and(|there| is_directory(stat) || is_directory(there)) {
            self.steps.step()?;
            tree::remove(own, name)?;
        }
        if is_directory(stat) {
            clean(&tree::open_in(upper, name)?)?;
        }
        self.steps.step()?;
        tree::strip(upper, name)?;
        self.steps.step()?;
        match rustix::fs::renameat(upper, name, own, name) {
            Err(Errno::PERM) if tree::unprotect(own, name) => {
                rustix::fs::renameat(upper, name, own, name)?;
            }
            other => other?,
        }
        if there.is_some_and(|s| s.stx_ino == stat.stx_ino) {
            // Renaming a file's name to another name of the same file does nothing (rename(2)).
            tree::remove(upper, name)?;
        }
        tree::protect(own, name, flags)?;
        self.merged.moved += 1;
        Ok(())
    }
}

/// Removes overlayfs' marks from everything in a directory that is to be renamed as a whole.
/// Entries that cannot be reached by a path stay unchanged, because the marks have no meaning
/// outside of an upper layer.
fn clean(directory: &OwnedFd) -> io::Result<()> {
    let times = tree::times_of(&tree::stat_of(directory)?);
    let mut removed = false;
    for name in tree::names(directory)? {
        let Some(stat) = tree::find(directory, &name)? else {
            continue;
        };
        if tree::is_whiteout(&stat) {
            tree::remove(directory, &name)?;
            removed = true;
            continue;
        }
        tree::strip(directory, &name)?;
        if tree::kind(&stat) == FileType::Directory {
            clean(&tree::open_in(directory, &name)?)?;
        }
    }
    if removed {
        rustix::fs::futimens(directory, &times)?;
    }
    Ok(())
}

/// Puts the name in front of the error text, so that the error of a deep entry shows its path.
fn named(name: &CStr, error: &io::Error) -> io::Error {
    let name = super::error::shown(name.to_bytes());
    let text = error.to_string();
    // Each level adds its name in front: "a/b: reason".
    let text = match text.strip_prefix(MARK) {
        Some(rest) => format!("{MARK}{name}/{rest}"),
        None => format!("{MARK}{name}: {text}"),
    };
    io::Error::new(error.kind(), text)
}

/// Start of the text of an error that contains a path already.
const MARK: &str = "at ";
