//! Checks that the host has room: for a fork, which begins at once and must not fail halfway, when
//! the VM stands still; and for saves and copies, which must leave free space for VMs' disks.

use std::io;
use std::path::{Path, PathBuf};

use memfold_units::{ByteSize, PAGE_SIZE};
use parking_lot::Mutex;

use super::error::{SnapshotError, failed};
use super::host_memory::host_available_pages;
use super::shelf::Shelf;

/// Free space in bytes that saves and copies must leave on their file system; on a small file
/// system, a twentieth of its size.
const MOST_RESERVE: u64 = 1 << 30;

/// Most bytes that a save writes before it looks again how much space is free.
const LOOK: u64 = 16 << 20;

/// Most bytes of a layer beside its pages: checksums, references, device state.
const BESIDE: u64 = 1 << 20;

/// Refuses a fork for which the host has not enough free disk or memory. `pages`: most pages that
/// the fork's snapshot stores. `is_layer`: whether the snapshot is a layer, whose pages are copied
/// in memory first.
///
/// # Errors
///
/// [`SnapshotError::Impossible`], which names what is missing.
pub fn check_room(
    shelf: &Shelf,
    vm: &str,
    pages: u64,
    is_layer: bool,
) -> Result<(), SnapshotError> {
    let place = existing(shelf.root());
    let free = free_above_reserve(place).map_err(failed(place))?;
    let memory = is_layer.then(host_available_pages).transpose();
    let memory = memory.map_err(failed(Path::new("/proc/meminfo")))?;
    let available = memory.map(|pages| pages * PAGE_SIZE);
    match missing(pages * PAGE_SIZE, (place, free), available) {
        Some(why) => Err(SnapshotError::Impossible(format!(
            "cannot fork VM '{vm}': {why}"
        ))),
        None => Ok(()),
    }
}

/// Refuses a save if the reserve of the snapshots' file system is in use already.
///
/// # Errors
///
/// [`SnapshotError::Impossible`], which names what is free and what must stay free.
pub fn check_reserve(shelf: &Shelf, vm: &str) -> Result<(), SnapshotError> {
    let place = existing(shelf.root());
    enough_room(place, BESIDE).map_err(|why| {
        let place = place.display();
        SnapshotError::Impossible(format!(
            "cannot save VM '{vm}' to {place} ({why}); free space there, or remove snapshots"
        ))
    })
}

/// Returns the nearest directory above a path, or the path itself, that exists.
fn existing(path: &Path) -> &Path {
    let mut above = path.ancestors();
    above.find(|path| path.exists()).unwrap_or(path)
}

/// Returns what is missing for a fork that stores `bytes`: disk above the reserve or, if pages are
/// copied first, memory.
fn missing(bytes: u64, (place, free): (&Path, u64), available: Option<u64>) -> Option<String> {
    let needed = bytes + BESIDE;
    if needed > free {
        return Some(format!(
            "its snapshot may take {}, and the file system of {} has {} free beyond its reserve for VMs; free space there, or remove snapshots",
            ByteSize(needed),
            place.display(),
            ByteSize(free)
        ));
    }
    let available = available.filter(|available| bytes > *available)?;
    Some(format!(
        "copies of its changed pages take {}, and this host has {} of memory available; stop other VMs, or save the VM with 'memfold snapshot save' and clone the snapshot",
        ByteSize(bytes),
        ByteSize(available)
    ))
}

/// Checks that the file system of `place` has space for `bytes` bytes and for a reserve. Disks of
/// VMs may be on the same file system, and QEMU stops a VM whose disk is full.
pub(super) fn enough_room(place: &Path, bytes: u64) -> Result<(), String> {
    let (free, reserve) = free_and_reserve(place).map_err(|error| error.to_string())?;
    if free >= bytes + reserve {
        return Ok(());
    }
    let (free, needed, reserve) = (ByteSize(free), ByteSize(bytes), ByteSize(reserve));
    Err(format!(
        "No space left: {free} free, {needed} more needed, and {reserve} must stay free for VMs"
    ))
}

/// Does the same as [`enough_room`], for functions with I/O errors.
pub(super) fn check_free(place: &Path, bytes: u64) -> io::Result<()> {
    enough_room(place, bytes).map_err(|why| io::Error::new(io::ErrorKind::StorageFull, why))
}

/// Keeps the reserve of a file system while threads of a save write there. The bytes that a save
/// will write are not known before: zeroes, and pages that a disk contains, are left out.
#[derive(Debug)]
pub(super) struct ReserveGuard {
    place: PathBuf,
    /// Number of bytes that may be written before the free space is looked up again.
    left: Mutex<u64>,
}

impl ReserveGuard {
    /// Creates the guard for files in the directory `place`.
    pub(super) fn new(place: &Path) -> Self {
        Self {
            place: place.to_owned(),
            left: Mutex::new(0),
        }
    }

    /// Takes room for `bytes` bytes before they are written.
    ///
    /// # Errors
    ///
    /// `StorageFull` if less than the reserve would stay free.
    pub(super) fn take(&self, bytes: u64) -> io::Result<()> {
        let mut left = self.left.lock();
        if bytes > *left {
            check_free(&self.place, bytes)?;
            *left = free_above_reserve(&self.place)?.min(LOOK).max(bytes);
        }
        *left -= bytes;
        Ok(())
    }
}

/// Returns how many bytes copies may take of the file system of `place`: its free bytes without the
/// reserve for disks of VMs, which is 1 GiB, or a twentieth of the file system if that is less.
///
/// # Errors
///
/// That of `statvfs(3)`.
pub fn free_above_reserve(place: &Path) -> io::Result<u64> {
    let (free, reserve) = free_and_reserve(place)?;
    Ok(free.saturating_sub(reserve))
}

/// Returns the number of free bytes of the file system of `place`, and how many of them copies must
/// leave.
fn free_and_reserve(place: &Path) -> io::Result<(u64, u64)> {
    let room = rustix::fs::statvfs(place)?;
    let reserve = MOST_RESERVE.min(room.f_blocks * room.f_frsize / 20);
    Ok((room.f_bavail * room.f_frsize, reserve))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_fork_is_refused_with_the_disk_or_the_memory_named_that_its_pages_do_not_fit_into() {
        let place = Path::new("/shelf");
        let fits = |bytes, free, available| missing(bytes, (place, free), available);
        assert_eq!(fits(8 * MIB, 9 * MIB, Some(8 * MIB)), None);
        let why = fits(8 * MIB, 9 * MIB - 1, Some(8 * MIB)).unwrap();
        assert!(why.contains("/shelf") && why.contains("9.00 MiB"), "{why}");
        let why = fits(8 * MIB, 9 * MIB, Some(8 * MIB - 1)).unwrap();
        assert!(why.contains("memory available"), "{why}");
        assert_eq!(fits(8 * MIB, 9 * MIB, None), None, "written at once");
        let shelf = Shelf::open(Path::new("/nowhere/snapshots"));
        check_room(&shelf, "web", 1, true).unwrap();
        let told = check_room(&shelf, "web", 1 << 50, false).unwrap_err();
        assert!(told.to_string().contains("cannot fork VM 'web'"), "{told}");
    }

    #[test]
    fn a_save_may_write_what_is_free_above_the_reserve_and_not_more() {
        let place = tempfile::tempdir().unwrap();
        let (free, reserve) = free_and_reserve(place.path()).unwrap();
        if free < reserve + 64 * MIB {
            memfold_testkit::skip!("the file system of temporary files is nearly full");
        }
        let guard = ReserveGuard::new(place.path());
        for _ in 0..64 {
            guard.take(MIB / 2).unwrap();
        }
        let told = guard.take(free).unwrap_err();
        assert_eq!(told.kind(), io::ErrorKind::StorageFull);
        let told = told.to_string();
        assert!(told.contains("must stay free for VMs"), "{told}");
        // Nothing is free in a file system of the kernel's.
        let shelf = Shelf::open(Path::new("/proc/snapshots"));
        let told = check_reserve(&shelf, "web").unwrap_err().to_string();
        for words in [
            "cannot save VM 'web' to /proc (No space left: ",
            "free space there",
        ] {
            assert!(told.contains(words), "no '{words}' in: {told}");
        }
    }
}
