//! Copies a snapshot's disks and files for one VM that is started from the snapshot. Without
//! copies, the VM writes to temporary overlays, which are removed when the VM ends. The copies
//! remain.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Seek as _, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use memfold_host::progress::Progress;
use memfold_vm::{DiskFormat, DiskSpec, QemuUser, VmSpec, own_files, qemu_user};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::disk_chain::chain;
use super::draft::is_at;
use super::error::{SnapshotError, failed};
use super::links::is_in;
use super::rebase::{merge, split, used};
use super::room::enough_room;
use super::shelf::Shelf;
use super::sparse_copy::{copy_data, is_shared};

/// Disks and other files that were copied for one VM. Dropping this value removes the copies,
/// unless [`OwnDisks::keep`] was called.
#[derive(Debug, Default)]
pub struct OwnDisks(Vec<PathBuf>);

impl OwnDisks {
    /// Copies the disks of a VM that will run from a snapshot of `shelf` to the directory `place`,
    /// and puts the copies into the VM's description `spec`. The VM then needs no temporary
    /// overlays, and the copies need no snapshot. An existing file is an error, and is not
    /// replaced.
    pub fn make(
        (shelf, spec): (&Shelf, &mut VmSpec),
        place: &Path,
        progress: &Progress,
    ) -> Result<Self, SnapshotError> {
        let is_of_snapshot = |file: &Path| is_in(file, shelf.root());
        let mut bytes = 0;
        for disk in spec.disks.iter().filter(|disk| disk.snapshot) {
            let files = chain_of(disk)?;
            let (merged, _) = split(&files, is_of_snapshot);
            // The first file is copied; what the others hold is written into the copy.
            let copied = merged
                .iter()
                .skip(usize::from(is_shared(&disk.path, place)));
            bytes += copied.map(|file| used(file)).sum::<u64>();
        }
        // Copies that take no space need no reserve either. If the directory is missing, the copy
        // of the first disk says so.
        if bytes > 0 && place.exists() {
            enough_room(place, bytes).map_err(|why| {
                let place = place.display();
                SnapshotError::Impossible(format!(
                    "cannot copy the VM's disks to {place} ({why}); free space there, or name another directory with --disks"
                ))
            })?;
        }
        let written = spec.disks.iter().filter(|disk| disk.snapshot);
        let bytes = written.map(|disk| fs::metadata(&disk.path).map_or(0, |facts| facts.len()));
        progress.begin("disks copied", bytes.sum());
        let mut made = Self::default();
        let disks = spec.disks.iter_mut().enumerate();
        for (number, disk) in disks.filter(|(_, disk)| disk.snapshot) {
            let file = place.join(format!("{}-disk{number}.qcow2", spec.name));
            let files = chain_of(disk)?;
            let complete = |copy: &Path| {
                let (merged, left) = split(&files, is_of_snapshot);
                if merged.len() > 1 {
                    progress.begin("disks of other snapshots copied", 0);
                }
                merge(copy, merged, left)
            };
            copy(&disk.path, &file, progress, complete)?;
            made.0.push(file.clone());
            disk.path = file;
            disk.snapshot = false;
        }
        for (number, from) in std::mem::take(&mut spec.files).iter().enumerate() {
            let file = place.join(format!("{}-file{number}", spec.name));
            copy(from, &file, progress, |_| Ok(()))?;
            let token = own_files::token(number);
            let is_token = |path: &Path| path == Path::new(&token);
            let path = file.to_string_lossy();
            for argument in &mut spec.qemu_args {
                if let Some(renamed) = own_files::rename(argument, &is_token, &path) {
                    *argument = renamed;
                }
            }
            made.0.push(file);
        }
        // A reboot from a boot snapshot would take the VM back in time without its own disks.
        spec.boot_snapshot &= made.0.is_empty();
        Ok(made)
    }

    /// Makes the user that QEMU has switched to the owner of the copies: QEMU opens some of them
    /// again when it loads the device state. Later starts open them as root.
    pub fn give(&self, user: Option<QemuUser>) -> Result<(), SnapshotError> {
        let mut files = self.0.iter();
        files.try_for_each(|file| qemu_user::give(file, user).map_err(failed(file)))
    }

    /// Keeps the copies when this value is dropped. Called after the VM was started with them.
    pub fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for OwnDisks {
    fn drop(&mut self) {
        for file in &self.0 {
            let _ = fs::remove_file(file);
        }
    }
}

/// Returns the files of a disk's chain, beginning with its own.
fn chain_of(disk: &DiskSpec) -> Result<Vec<PathBuf>, SnapshotError> {
    match disk.format() {
        DiskFormat::Qcow2 => chain(&disk.path),
        // A guest writes the contents of a raw disk, so a header in it must not be believed.
        DiskFormat::Raw => Ok(vec![disk.path.clone()]),
    }
}

/// Copies a file to a new one ([`copy_data`]). The copy gets its name when `complete` has changed
/// it. A killed daemon leaves a file that ends in `.part`, which is not used as a disk.
fn copy(
    from: &Path,
    to: &Path,
    progress: &Progress,
    complete: impl FnOnce(&Path) -> Result<(), SnapshotError>,
) -> Result<(), SnapshotError> {
    if to.exists() {
        return Err(failed(to)(ErrorKind::AlreadyExists.into()));
    }
    let part = to.with_extension("qcow2.part");
    let source = File::open(from).map_err(failed(from))?;
    let file = write_alone(&part).map_err(failed(&part))?;
    let copy_bytes = || -> io::Result<()> {
        file.set_len(0)?;
        let length = (&source).seek(SeekFrom::End(0))?;
        copy_data(&source, &file, length, |bytes| progress.add(bytes))
    };
    let copied = copy_bytes()
        .map_err(failed(to))
        .and_then(|()| complete(&part));
    // A hard link does not replace a file that was created meanwhile.
    let name = || file.sync_all().and_then(|()| fs::hard_link(&part, to));
    let named = copied.and_then(|()| name().map_err(failed(to)));
    let _ = fs::remove_file(&part);
    named?;
    let place = to.parent().unwrap_or(Path::new("/"));
    let synced = File::open(place).and_then(|place| place.sync_all());
    synced.map_err(failed(to))
}

/// Opens a file that only its owner can read. A file that a killed daemon left is overwritten, but
/// a file that somebody writes now is refused. A file that has another name, too, is a finished
/// disk: the daemon was killed before it removed this name. Such a file is not touched.
fn write_alone(path: &Path) -> io::Result<File> {
    let nofollow = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or(0);
    let mut options = File::options();
    options.write(true).create(true).truncate(false).mode(0o600);
    options.custom_flags(nofollow);
    loop {
        let file = options.open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => {
                let why = "another restore is writing the disk";
                return Err(io::Error::new(ErrorKind::AlreadyExists, why));
            }
            locked => locked?,
        }
        if !is_at(&file, path) {
            // Another restore has finished the file meanwhile, and it is a disk now.
            continue;
        }
        // Some network file systems tell 0.
        if file.metadata()?.nlink() <= 1 {
            return Ok(file);
        }
        fs::remove_file(path)?;
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use memfold_units::ByteSize;

    use super::*;

    #[test]
    fn copies_that_take_no_space_are_made_on_a_full_file_system() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("full");
        fs::create_dir(&place).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=1m", "none"]);
        if !mount.arg(&place).status().is_ok_and(|done| done.success()) {
            memfold_testkit::skip!("cannot mount a file system; run as root");
        }
        // Less is left than the reserve, a twentieth of the file system.
        let filled = fs::write(place.join("filler"), vec![7; (1 << 20) - 8192]);
        let shelf = Shelf::open(&directory.path().join("shelf"));
        let mut spec = VmSpec::new("web", ByteSize::mib(64));
        let made = OwnDisks::make((&shelf, &mut spec), &place, &Progress::default());
        let refused = enough_room(&place, 1);
        let _ = Command::new("umount").arg("-l").arg(&place).status();
        filled.unwrap();
        refused.unwrap_err();
        made.unwrap();
    }

    #[test]
    fn a_copy_takes_no_space_where_the_file_system_can_share_blocks() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let file = |name: &str| directory.path().join(name);
        fs::write(file("saved"), vec![7; 1 << 20]).unwrap();
        let mut cp = Command::new("cp");
        let cp = cp.args(["--reflink=always".into(), file("saved"), file("copy")]);
        let can_share = cp.output().unwrap().status.success();
        assert_eq!(is_shared(&file("saved"), directory.path()), can_share);
        assert!(!is_shared(&file("saved"), Path::new("/proc")));
        // The attempt leaves nothing.
        let _ = fs::remove_file(file("copy"));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_disk_that_a_killed_restore_has_finished_is_not_overwritten_by_the_next_restore() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| directory.path().join(name);
        fs::write(file("saved"), "saved").unwrap();
        fs::write(file("disk0.qcow2"), "live").unwrap();
        // The daemon was killed between the link and the removal of the other name, and then the
        // disk was moved.
        fs::hard_link(file("disk0.qcow2"), file("disk0.qcow2.part")).unwrap();
        fs::rename(file("disk0.qcow2"), file("moved")).unwrap();
        let (from, to) = (file("saved"), file("disk0.qcow2"));
        copy(&from, &to, &Progress::default(), |_| Ok(())).unwrap();
        assert_eq!(fs::read_to_string(file("moved")).unwrap(), "live");
        assert_eq!(fs::read_to_string(&to).unwrap(), "saved");
        assert!(!file("disk0.qcow2.part").exists());
        // What is left of a copy that was not finished is overwritten.
        fs::remove_file(&to).unwrap();
        fs::write(file("disk0.qcow2.part"), "a part of something").unwrap();
        copy(&from, &to, &Progress::default(), |_| Ok(())).unwrap();
        assert_eq!(fs::read_to_string(&to).unwrap(), "saved");
    }
}
