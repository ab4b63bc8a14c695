//! Finds the files other than disks that a VM's QEMU writes, such as firmware variables,
//! file-backed memory and logs. A second VM with the same command line would write to the same
//! files, so a snapshot needs copies of them. QEMU's open file descriptors show which files these
//! are; the command line does not decide.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use memfold_store::StoreIdentity;
use memfold_vm::own_files;
use rustix::fs::OFlags;
use rustix::process::Pid;
use serde_json::Value;

use super::disk_chain::{identity, images};
use super::error::{SnapshotError, failed};

/// Maximum size in bytes of a file that is copied. (Firmware variables have less than one MiB.)
const MOST_BYTES: u64 = 64 << 20;

/// Returns the files and block devices that a process has open for writing. Leaves out the
/// process's standard input and outputs, which its arguments do not name, and files that no longer
/// have a name, such as a temporary overlay that became part of an earlier snapshot.
pub(super) fn of(pid: Pid) -> io::Result<Vec<PathBuf>> {
    let place = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
    let standard = (0..3).map(|number| identity(&place.join(format!("fd/{number}"))));
    let mut seen: HashSet<StoreIdentity> = standard.flatten().collect();
    let mut found = Vec::new();
    for entry in fs::read_dir(place.join("fd"))?.flatten() {
        let at = entry.path();
        // The process may have closed the file meanwhile.
        let (Ok(facts), Ok(path)) = (fs::metadata(&at), fs::read_link(&at)) else {
            continue;
        };
        let id = StoreIdentity::from(&facts);
        let is_kept = facts.is_file() || facts.file_type().is_block_device();
        let is_named = path.is_absolute() && identity(&path).is_ok_and(|named| named == id);
        if is_kept
            && is_named
            && is_writable(&place.join("fdinfo").join(entry.file_name()))
            && seen.insert(id)
        {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Returns whether `flags` in `/proc/PID/fdinfo/N` (`proc_pid_fdinfo(5)`) allow writing.
fn is_writable(info: &Path) -> bool {
    let text = fs::read_to_string(info).unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|octal| u32::from_str_radix(octal.trim(), 8).ok());
    flags.is_some_and(|flags| flags & (OFlags::WRONLY | OFlags::RDWR).bits() != 0)
}

/// Returns the files in `written` that are neither disks of the VM (`disks`) nor in its directory.
pub(super) fn foreign(written: Vec<PathBuf>, disks: &[PathBuf], directory: &Path) -> Vec<PathBuf> {
    let known = disks.iter().flat_map(|path| identity(path));
    let known: HashSet<StoreIdentity> = known.collect();
    let directory = directory.canonicalize().unwrap_or(directory.into());
    let mut left = written;
    left.retain(|path| {
        let is_known = identity(path).is_ok_and(|id| known.contains(&id));
        !path.starts_with(&directory) && !is_known
    });
    left
}

/// Returns the files of a device's image and of its backing images (from `query-block`).
pub(super) fn chain(device: &Value) -> Vec<&str> {
    let files = images(device).map_while(|image| image["filename"].as_str());
    files.collect()
}

/// Returns whether a process has a shared mapping of a file (`/proc/PID/maps`). Overlay file
/// systems report another device there than `stat`, so paths are compared.
fn is_shared(pid: Pid, path: &Path) -> io::Result<bool> {
    let maps = fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero()))?;
    let path = path.to_string_lossy();
    Ok(maps.lines().any(|line| {
        let flags = line.split_whitespace().nth(1).unwrap_or_default();
        flags.ends_with('s') && line.ends_with(&*path)
    }))
}

/// Replaces a file's path in a VM's arguments by the token for file `number`, and opens the file.
/// Returns an error that names the file if it cannot be copied.
pub(super) fn take(
    pid: Pid,
    path: &Path,
    arguments: &mut [String],
    number: usize,
) -> Result<File, SnapshotError> {
    let refused = |why: &str| {
        SnapshotError::Impossible(format!(
            "QEMU writes {}, which {why}: VMs of the snapshot would write the same file; start the VM without it",
            path.display()
        ))
    };
    let failed = failed(path);
    let flags = i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).unwrap_or(0);
    let mut options = File::options();
    let file = options.read(true).custom_flags(flags).open(path);
    let file = file.map_err(failed)?;
    let facts = file.metadata().map_err(failed)?;
    let problem = if !facts.is_file() {
        Some("is neither a regular file nor one of the VM's disks")
    } else if facts.len() > MOST_BYTES {
        Some("is not one of the VM's disks, and is larger than the 64 MiB that are copied")
    } else {
        (is_shared(pid, path).map_err(failed)?)
            .then_some("is memory shared with every process that maps that file (share=on)")
    };
    if let Some(why) = problem {
        return Err(refused(why));
    }
    let is_it = |named: &Path| identity(named).is_ok_and(|named| named == (&facts).into());
    let mut is_named = false;
    for argument in arguments {
        if let Some(renamed) = own_files::rename(argument, &is_it, &own_files::token(number)) {
            *argument = renamed;
            is_named = true;
        }
    }
    let unnamed = || refused("no argument of QEMU names by its whole path");
    is_named.then_some(file).ok_or_else(unnamed)
}

#[cfg(test)]
mod tests {
    use memfold_units::ByteSize;
    use serde_json::json;

    use super::*;

    #[test]
    fn only_regular_files_that_qemu_has_open_for_writing_are_listed() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().canonicalize().unwrap().join(name);
        let open = |name: &str| {
            File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path(name))
                .unwrap()
        };
        let (_written, _disk, _gone) = (open("written"), open("disk"), open("gone"));
        drop(open("read"));
        let _read = File::open(path("read")).unwrap();
        fs::remove_file(path("gone")).unwrap();
        fs::create_dir(path("vm")).unwrap();
        let _log = open("vm/log");
        let here = |found: Vec<PathBuf>| {
            found
                .into_iter()
                .filter(|file| file.starts_with(path("")))
                .collect::<Vec<_>>()
        };
        let found = here(of(rustix::process::getpid()).unwrap());
        assert_eq!(found, [path("disk"), path("vm/log"), path("written")]);
        assert_eq!(
            foreign(found, &[path("disk")], &path("vm")),
            [path("written")]
        );
        let device = json!({ "inserted": { "image": { "filename": "x", "backing-image": { "filename": "y" } } } });
        assert_eq!(chain(&device), ["x", "y"]);
        assert!(chain(&json!({})).is_empty());
    }

    #[test]
    fn a_save_copies_a_file_that_qemu_writes_only_if_an_argument_of_qemu_names_it() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("vars");
        fs::write(&path, "v").unwrap();
        let own = rustix::process::getpid();
        let mut arguments = vec![
            "-drive".to_owned(),
            format!("if=pflash,file={}", path.display()),
        ];
        take(own, &path, &mut arguments, 3).unwrap();
        assert_eq!(arguments[1], "if=pflash,file=/memfold/own003");
        let why = |path: &Path| {
            take(own, path, &mut ["-serial".to_owned()], 0)
                .unwrap_err()
                .to_string()
        };
        assert!(why(&path).contains(&format!("{}, which no argument", path.display())));
        assert!(why(Path::new("/dev/null")).contains("neither a regular file"));
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(ByteSize::mib(65).0)
            .unwrap();
        assert!(why(&path).contains("64 MiB"));
    }
}
