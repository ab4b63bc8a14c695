//! Checks that the host has room: for a fork, which begins at once and must not fail halfway, when
//! the VM stands still; and for copies, which must leave free space for VMs' disks.

use std::io;
use std::path::Path;

use memfold_units::{ByteSize, PAGE_SIZE};

use super::error::{SnapshotError, failed};
use super::host_memory::host_available_pages;
use super::shelf::Shelf;

/// Free space in bytes that copies must leave on their file system; on a small file system, a
/// twentieth of its size.
const MOST_RESERVE: u64 = 1 << 30;

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
    let disk = rustix::fs::statvfs(place).map_err(|errno| failed(place)(errno.into()))?;
    let free = disk.f_bavail * disk.f_frsize;
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

/// Returns the nearest directory above a path, or the path itself, that exists.
fn existing(path: &Path) -> &Path {
    let mut above = path.ancestors();
    above.find(|path| path.exists()).unwrap_or(path)
}

/// Returns what is missing for a fork that stores `bytes`: disk or, if pages are copied first,
/// memory.
fn missing(bytes: u64, (place, free): (&Path, u64), available: Option<u64>) -> Option<String> {
    let needed = bytes + BESIDE;
    if needed > free {
        return Some(format!(
            "its snapshot may take {}, and the file system of {} has {} free; free space there, or remove snapshots",
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
}
