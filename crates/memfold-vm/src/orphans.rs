//! Removes temporary overlays and swap disks of VMs that ended with the host. Only the state
//! directory names these files, and it is gone after a boot of the host, but their own directory is
//! not.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::directory::VmDirectory;
use super::overlay;

/// What was done about files that VMs of an earlier boot have left.
#[derive(Debug, Default)]
pub struct Orphans {
    /// Files that were removed.
    pub removed: Vec<PathBuf>,
    /// Files that could not be removed, and why.
    pub failed: Vec<(PathBuf, io::Error)>,
}

/// Removes temporary overlays and swap disks that no process has open, whose VM does not exist in
/// the state directory, and that nobody has written to since the host's boot.
///
/// # Errors
///
/// The directory of these files, or `/proc`, cannot be read.
pub fn remove_orphans(state: &Path) -> io::Result<Orphans> {
    let booted_s = booted_s(&fs::read_to_string("/proc/stat")?)
        .ok_or_else(|| io::Error::other("/proc/stat has no 'btime'"))?;
    remove_in(&overlay::directory()?, state, booted_s)
}

fn remove_in(place: &Path, state: &Path, booted_s: i64) -> io::Result<Orphans> {
    let mut old = Vec::new();
    for entry in fs::read_dir(place)?.flatten() {
        let name = entry.file_name();
        let Some(vm) = name.to_str().and_then(vm_of) else {
            continue;
        };
        // The directory may be open to all users: nothing is followed, and what a link names is not
        // ours.
        let Ok(facts) = fs::symlink_metadata(entry.path()) else {
            continue;
        };
        let is_old = facts.is_file() && facts.mtime() < booted_s;
        if is_old && !VmDirectory::of(state, vm).path().exists() {
            old.push((entry.path(), facts));
        }
    }
    let mut orphans = Orphans::default();
    if old.is_empty() {
        return Ok(orphans);
    }
    let open = open_files()?;
    old.retain(|(_, facts)| !open.contains(&identity(facts)));
    for (path, _) in old {
        match fs::remove_file(&path) {
            Ok(()) => orphans.removed.push(path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => orphans.failed.push((path, error)),
        }
    }
    Ok(orphans)
}

/// Returns the name of the VM whose temporary overlay or swap disk a file is, by the file's name:
/// `memfold-VM-NUMBER-TIME.qcow2`, `memfold-VM-diskNUMBER-TIME.qcow2` or
/// `memfold-VM-swap-TIME.raw`.
#[must_use]
pub fn vm_of(name: &str) -> Option<&str> {
    let (stem, kind) = name.strip_prefix("memfold-")?.rsplit_once('.')?;
    let (stem, time) = stem.rsplit_once('-')?;
    let (vm, part) = stem.rsplit_once('-')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let is_part = match kind {
        "qcow2" => is_number(part.strip_prefix("disk").unwrap_or(part)),
        "raw" => part == "swap",
        _ => false,
    };
    // Nanoseconds since 1970, which have 16 hexadecimal digits from 2006 on.
    let is_time = time.len() == 16 && time.bytes().all(|b| b.is_ascii_hexdigit());
    (is_part && is_time && super::check_name("name", vm).is_ok()).then_some(vm)
}

/// Returns the time of the host's boot in seconds since 1970 (`proc_stat(5)`).
fn booted_s(stat: &str) -> Option<i64> {
    let mut lines = stat.lines();
    lines
        .find_map(|line| line.strip_prefix("btime "))?
        .trim()
        .parse()
        .ok()
}

fn identity(facts: &Metadata) -> (u64, u64) {
    (facts.dev(), facts.ino())
}

/// Returns the files that any process has open.
fn open_files() -> io::Result<Vec<(u64, u64)>> {
    let mut open = Vec::new();
    for process in fs::read_dir("/proc")?.flatten() {
        // What is no process has no such directory, and a process may end meanwhile.
        let files = fs::read_dir(process.path().join("fd"))
            .into_iter()
            .flatten();
        let facts = files
            .flatten()
            .filter_map(|file| fs::metadata(file.path()).ok());
        open.extend(facts.map(|facts| identity(&facts)));
    }
    Ok(open)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn only_names_that_memfold_gives_are_taken_for_temporary_overlays_and_swap_disks() {
        let unique = format!("{:x}", overlay::unique());
        for (name, vm) in [
            (format!("memfold-web-1-0-{unique}.qcow2"), Some("web-1")),
            (format!("memfold-web-disk3-{unique}.qcow2"), Some("web")),
            (format!("memfold-web-swap-{unique}.raw"), Some("web")),
            (format!("memfold-web-swap-{unique}.qcow2"), None),
            (format!("memfold-web-{unique}.qcow2"), None),
            (format!("memfold-web-0-{unique}.raw"), None),
            (format!("memfold-web-0-{unique}"), None),
            (format!("memfold-web-disk-{unique}.qcow2"), None),
            (format!("memfold--0-{unique}.qcow2"), None),
            (format!("memfold-a/b-0-{unique}.qcow2"), None),
            (format!("other-web-0-{unique}.qcow2"), None),
            ("memfold-web-0-backup.qcow2".into(), None),
            ("memfold-web-0-12.qcow2".into(), None),
        ] {
            assert_eq!(vm_of(&name), vm, "{name}");
        }
    }

    #[test]
    fn overlays_of_an_earlier_boot_are_removed_unless_a_process_or_a_vm_needs_them() {
        let directory = tempfile::tempdir().unwrap();
        let (place, state) = (directory.path().join("tmp"), directory.path().join("state"));
        fs::create_dir(&place).unwrap();
        let now = SystemTime::now();
        let booted = now - Duration::from_secs(3600);
        let make = |name: &str, written: SystemTime| {
            let path = place.join(name);
            let file = File::create(&path).unwrap();
            file.set_modified(written).unwrap();
            (path, file)
        };
        let before = booted - Duration::from_secs(60);
        let time = "18a0000000000000";
        let (gone, _) = make(&format!("memfold-web-0-{time}.qcow2"), before);
        let (swap, _) = make(&format!("memfold-web-swap-{time}.raw"), before);
        let (open, held) = make(&format!("memfold-web-1-{time}.qcow2"), before);
        let (fresh, _) = make(&format!("memfold-web-2-{time}.qcow2"), now);
        let (known, _) = make(&format!("memfold-db-0-{time}.qcow2"), before);
        let (users, _) = make("memfold-web-0-mine.qcow2", before);
        let link = place.join(format!("memfold-web-3-{time}.qcow2"));
        std::os::unix::fs::symlink(&users, &link).unwrap();
        VmDirectory::of(&state, "db").create().unwrap();
        let booted_s = booted.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let booted_s = i64::try_from(booted_s.as_secs()).unwrap();
        let remove = || remove_in(&place, &state, booted_s).unwrap();
        let mut first = remove();
        first.removed.sort();
        assert_eq!(first.removed, [gone, swap]);
        assert!(first.failed.is_empty());
        for kept in [&open, &fresh, &known, &users] {
            assert!(kept.exists(), "{}", kept.display());
        }
        assert!(fs::symlink_metadata(&link).is_ok());
        drop(held);
        assert_eq!(remove().removed, [open]);
        assert!(remove().removed.is_empty());
    }

    #[test]
    fn the_time_of_the_hosts_boot_is_read_from_proc_stat() {
        assert_eq!(
            booted_s("cpu 1 2\nctxt 5\nbtime 1700000000\n"),
            Some(1_700_000_000)
        );
        assert_eq!(booted_s("cpu 1 2\n"), None);
        let stat = fs::read_to_string("/proc/stat").unwrap();
        assert!(booted_s(&stat).unwrap() > 1_500_000_000);
    }
}
