//! Reads the memory limits of control groups. If VMs are in a control group with a limit, memfold
//! uses this limit in place of the host's memory size.
//!
//! Sources: the kernel's `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Directory where systemd mounts the control groups.
const ROOT: &str = "/sys/fs/cgroup";

/// File names of one version of the control group interface.
#[derive(Debug, PartialEq, Eq)]
struct Files {
    limit: &'static str,
    used: &'static str,
    /// Lines of `memory.stat` that count page cache, which the kernel reclaims first.
    cached: [&'static str; 2],
}

const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_inactive_file", "total_active_file"],
};

const V2: Files = Files {
    limit: "memory.max",
    used: "memory.current",
    cached: ["inactive_file", "active_file"],
};

/// A control group (cgroup) that contains processes and may limit their memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    directory: PathBuf,
    files: &'static Files,
}

/// Memory limit of a control group, and the memory that is left below the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Memory limit of the control group in bytes. A group of cgroup version 1 without a limit has
    /// a huge number here.
    pub limit: u64,
    /// Bytes that the control group's processes can still use until the limit is reached. Page
    /// cache counts as free.
    pub available: u64,
}

impl Group {
    /// Returns the control groups that contain all of the processes `pids`, so that their limits
    /// apply to all of these processes together. Ended processes are ignored.
    #[must_use]
    pub fn of_all(pids: &[i32]) -> Vec<Self> {
        Self::of_all_in(Path::new("/proc"), Path::new(ROOT), pids)
    }

    /// Returns the control groups whose limits apply to all VMs, including the VM that is started
    /// next. `pids`: QEMU processes. If only one VM runs, only groups that also contain this
    /// process are returned: a limit set for the one VM must not stop others.
    #[must_use]
    pub fn of_vms(pids: Vec<i32>) -> Vec<Self> {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        Self::of_vms_in(Path::new("/proc"), Path::new(ROOT), own, pids)
    }

    fn of_vms_in(proc_root: &Path, root: &Path, own: i32, mut pids: Vec<i32>) -> Vec<Self> {
        if pids.len() < 2 {
            pids.push(own);
        }
        Self::of_all_in(proc_root, root, &pids)
    }

    fn of_all_in(proc_root: &Path, root: &Path, pids: &[i32]) -> Vec<Self> {
        let mut each = pids.iter().filter_map(|pid| {
            let path = proc_root.join(pid.to_string()).join("cgroup");
            let text = std::fs::read_to_string(path).ok()?;
            Some(Self::around(root, &text))
        });
        let first = each.next().unwrap_or_default();
        each.fold(first, |mut common, of| {
            common.retain(|group| of.contains(group));
            common
        })
    }

    /// Returns the group named in `/proc/PID/cgroup`, and all groups that contain it.
    fn around(root: &Path, text: &str) -> Vec<Self> {
        // The lines have the form hierarchy:controllers:path; in version 2, there are no
        // controllers.
        let lines = text.lines().filter_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            Some((parts.next()?, parts.next()?))
        });
        let lines: Vec<(&str, &str)> = lines.collect();
        let named = |wanted: &str| {
            let is = |controllers: &&str| controllers.split(',').any(|one| one == wanted);
            lines.iter().find(|(controllers, _)| is(controllers))
        };
        let (root, files, (_, path)) = match (named("memory"), named("")) {
            (Some(line), _) => (root.join("memory"), &V1, line),
            (None, Some(line)) => (root.to_owned(), &V2, line),
            (None, None) => return Vec::new(),
        };
        let path = Path::new(path.trim_start_matches('/'));
        path.ancestors()
            .map(|part| Self {
                directory: root.join(part),
                files,
            })
            .collect()
    }

    /// Returns the control group's memory limit and what is left of it, in bytes; `None` if the
    /// group has no limit.
    #[must_use]
    pub fn room(&self) -> Option<Room> {
        let read = |name| std::fs::read_to_string(self.directory.join(name)).ok();
        let number = |name| read(name)?.trim().parse::<u64>().ok();
        let limit = number(self.files.limit)?;
        let used = number(self.files.used)?;
        let stat = read("memory.stat")?;
        let stat: BTreeMap<&str, u64> = stat
            .lines()
            .filter_map(|line| line.split_once(' '))
            .filter_map(|(name, value)| Some((name, value.parse().ok()?)))
            .collect();
        let cached = self.files.cached.iter().filter_map(|name| stat.get(name));
        let taken = used.saturating_sub(cached.sum());
        Some(Room {
            limit,
            available: limit.saturating_sub(taken),
        })
    }

    /// Returns the control group's directory in the cgroup file system.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn names(root: &Path, groups: &[Group]) -> Vec<String> {
        let name = |group: &Group| group.directory.strip_prefix(root).unwrap().to_owned();
        let all = groups.iter().map(name);
        all.map(|path| path.display().to_string()).collect()
    }

    #[test]
    fn a_control_group_is_listed_only_if_it_contains_all_given_processes() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        put(root, "1/cgroup", "0::/machine.slice/a.scope\n");
        put(root, "2/cgroup", "0::/machine.slice/b.scope\n");
        put(root, "3/cgroup", "0::/system.slice/memfold.service\n");
        put(
            root,
            "4/cgroup",
            "9:cpu,memory:/vms\n1:name=systemd:/x\n0::/\n",
        );
        let of = |pids: &[i32]| names(root, &Group::of_all_in(root, root, pids));
        assert_eq!(of(&[1]), ["machine.slice/a.scope", "machine.slice", ""]);
        assert_eq!(of(&[1, 2, 99]), ["machine.slice", ""]);
        assert_eq!(of(&[1, 2, 3]), [""]);
        assert_eq!(of(&[4]), ["memory/vms", "memory"]);
        // Process 3 stands for the daemon.
        let of_vms = |pids: &[i32]| names(root, &Group::of_vms_in(root, root, 3, pids.to_vec()));
        assert_eq!(of_vms(&[1, 2]), ["machine.slice", ""]);
        assert_eq!(of_vms(&[1]), [""]);
        assert_eq!(
            of_vms(&[]),
            ["system.slice/memfold.service", "system.slice", ""]
        );
        assert!(of(&[1, 4]).is_empty() && of(&[99]).is_empty() && of(&[]).is_empty());
    }

    #[test]
    fn page_cache_of_a_control_group_counts_as_available_memory() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        put(root, "1/cgroup", "0::/a\n");
        put(root, "2/cgroup", "3:memory:/a\n");
        let groups = Group::of_all_in(root, root, &[1]);
        put(root, "a/memory.max", "1000\n");
        put(root, "a/memory.current", "700\n");
        let stat = "anon 500\ninactive_file 150\nactive_file 30\n";
        put(root, "a/memory.stat", stat);
        let room = Room {
            limit: 1000,
            available: 480,
        };
        assert_eq!(groups[0].room(), Some(room));
        put(root, "a/memory.max", "max\n");
        assert_eq!(groups[0].room(), None);
        // The root group lacks the files of a limit.
        assert_eq!(groups[1].room(), None);

        let groups = Group::of_all_in(root, root, &[2]);
        put(root, "memory/a/memory.limit_in_bytes", "1000\n");
        put(root, "memory/a/memory.usage_in_bytes", "1200\n");
        let stat = "total_inactive_file 40\ntotal_active_file 10\ninactive_file 900\n";
        put(root, "memory/a/memory.stat", stat);
        let room = Room {
            limit: 1000,
            available: 0,
        };
        assert_eq!(groups[0].room(), Some(room));
    }
}
