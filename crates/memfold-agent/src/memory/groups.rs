//! The control groups below the root (cgroup v2), and the reclaim of clean page cache from them by
//! `memory.reclaim` (the kernel's `Documentation/admin-guide/cgroup-v2.rst`).
//!
//! The root itself has no `memory.reclaim`, so page cache that is charged to the root, such as that
//! of the guest's boot, is not reclaimed.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::io::Errno;

use super::parse::GroupStat;
use super::reader::read_again;

/// A control group directly below the root.
#[derive(Debug)]
struct Group {
    reclaim: File,
    stat: File,
    /// Whether the kernel found nothing to reclaim in this group.
    is_exhausted: bool,
}

/// The control groups below the root.
#[derive(Debug)]
pub(super) struct Groups {
    list: Vec<Group>,
    /// Text that follows the number of bytes, which keeps the kernel from swapping; empty: not
    /// needed.
    argument: &'static str,
    buffer: Vec<u8>,
}

/// What one step reclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The kernel reclaimed this many bytes.
    Reclaimed(u64),
    /// No group has anything left to reclaim.
    Exhausted,
}

impl Groups {
    /// Opens the control groups below `root`, the root of the hierarchy. `may_swap`: a step may
    /// swap, or there is no swap. Returns `None` if the kernel cannot reclaim so: there are no such
    /// groups, or it must not swap and does not know `swappiness=` (before Linux 6.7).
    pub(super) fn open(root: &Path, may_swap: bool) -> io::Result<Option<Self>> {
        let mut list = Vec::new();
        for entry in fs::read_dir(root)? {
            let path = entry?.path();
            let reclaim = File::options()
                .write(true)
                .open(path.join("memory.reclaim"));
            // A file, or a group that was just removed.
            let (Ok(reclaim), Ok(stat)) = (reclaim, File::open(path.join("memory.stat"))) else {
                continue;
            };
            list.push(Group {
                reclaim,
                stat,
                is_exhausted: false,
            });
        }
        let argument = if may_swap { "" } else { " swappiness=0" };
        // Reclaiming 0 bytes succeeds if the kernel knows the argument.
        let knows = |group: &Group| match order(group, 0, argument) {
            Err(e) => e.raw_os_error() != Some(Errno::INVAL.raw_os_error()),
            Ok(()) => true,
        };
        let is_possible = list.first().is_some_and(knows);
        Ok(is_possible.then_some(Self {
            list,
            argument,
            buffer: Vec::new(),
        }))
    }

    /// Reclaims at most about `bytes` from the group that has most page cache not used recently.
    pub(super) fn step(&mut self, bytes: u64) -> io::Result<Step> {
        let buffer = &mut self.buffer;
        let mut stat_of =
            |group: &Group| GroupStat::parse(read_again(Some(&group.stat), &mut *buffer));
        let open = self.list.iter_mut().filter(|group| !group.is_exhausted);
        let with_stat = open.map(|group| (stat_of(group), group));
        let most = with_stat
            .filter(|(stat, _)| stat.clean_file() > 0)
            .max_by_key(|(stat, _)| (stat.inactive_file, stat.active_file));
        let Some((before, group)) = most else {
            return Ok(Step::Exhausted);
        };
        let wanted = bytes.min(before.clean_file());
        match order(group, wanted, self.argument) {
            Ok(()) => {}
            // The kernel reclaimed less than that, or the group was removed.
            Err(e) if is_any(&e, &[Errno::AGAIN, Errno::NODEV, Errno::NOENT]) => {
                group.is_exhausted = true;
            }
            Err(e) if is_any(&e, &[Errno::INTR]) => {}
            Err(e) => return Err(e),
        }
        let after = GroupStat::parse(read_again(Some(&group.stat), &mut self.buffer));
        let pages = after.pgsteal.saturating_sub(before.pgsteal);
        Ok(Step::Reclaimed(pages * memfold_units::PAGE_SIZE))
    }
}

fn order(group: &Group, bytes: u64, argument: &str) -> io::Result<()> {
    let text = format!("{bytes}{argument}");
    group.reclaim.write_at(text.as_bytes(), 0).map(drop)
}

fn is_any(error: &io::Error, list: &[Errno]) -> bool {
    let is = |errno: &Errno| error.raw_os_error() == Some(errno.raw_os_error());
    list.iter().any(is)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(root: &Path, name: &str, inactive_file: u64) {
        let path = root.join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("memory.reclaim"), "").unwrap();
        let stat =
            format!("active_file 0\ninactive_file {inactive_file}\nfile_dirty 4096\npgsteal 0\n");
        fs::write(path.join("memory.stat"), stat).unwrap();
    }

    #[test]
    fn a_trim_step_asks_the_control_group_with_most_unused_clean_cache_and_for_no_more_than_that() {
        let root = tempfile::tempdir().unwrap();
        group(root.path(), "init.scope", 8_192);
        group(root.path(), "system.slice", 1 << 20);
        fs::write(root.path().join("cgroup.controllers"), "memory\n").unwrap();
        let mut groups = Groups::open(root.path(), false).unwrap().unwrap();
        assert_eq!(groups.step(64 << 20).unwrap(), Step::Reclaimed(0));
        let asked = |name: &str| fs::read_to_string(root.path().join(name).join("memory.reclaim"));
        let most = asked("system.slice").unwrap();
        assert_eq!(most, format!("{} swappiness=0", (1 << 20) - 4096));
    }

    #[test]
    fn without_control_groups_or_without_clean_cache_nothing_is_trimmed() {
        let root = tempfile::tempdir().unwrap();
        assert!(Groups::open(root.path(), true).unwrap().is_none());
        group(root.path(), "system.slice", 4_096);
        let mut groups = Groups::open(root.path(), true).unwrap().unwrap();
        assert_eq!(groups.step(1 << 20).unwrap(), Step::Exhausted);
    }
}
