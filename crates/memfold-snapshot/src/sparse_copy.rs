//! Copies files whose holes stay holes. A copy by `copy_file_range(2)` alone writes zeroes for
//! them, so the copy of a disk with much unused space could fill the file system.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use rustix::fs::{Mode, OFlags, ioctl_ficlone};
use rustix::io::Errno;

/// Number of bytes that one call copies.
const PART: u64 = 64 << 20;

/// Copies the first `length` bytes of a file into the empty file `to`, which gets this length. The
/// copy shares blocks with the original if the file system can. `is_past`: called with the number
/// of bytes, holes included, that were dealt with since the last call.
pub(super) fn copy_data(
    mut from: &File,
    mut to: &File,
    length: u64,
    mut is_past: impl FnMut(u64),
) -> io::Result<()> {
    to.set_len(length)?;
    let ranges = match memfold_store::data_ranges(from) {
        // A block device does not tell its holes.
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            std::iter::once(0..length).collect()
        }
        told => told?,
    };
    let mut past = 0;
    for range in ranges {
        let (mut at, end) = (range.start, range.end.min(length));
        while at < end {
            from.seek(SeekFrom::Start(at))?;
            to.seek(SeekFrom::Start(at))?;
            let copied = io::copy(&mut from.take(PART.min(end - at)), &mut to)?;
            if copied == 0 {
                let why = "the file became shorter while it was copied";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
            }
            at += copied;
            is_past(at - past);
            past = at;
        }
    }
    is_past(length - past);
    Ok(())
}

/// Copies a file to the new file `to`, with its permissions ([`copy_data`]).
pub(super) fn copy_file(from: &Path, to: &Path) -> io::Result<()> {
    let from = File::open(from)?;
    let facts = from.metadata()?;
    let copy = File::create_new(to)?;
    copy.set_permissions(facts.permissions())?;
    copy_data(&from, &copy, facts.len(), |_| {})
}

/// Returns whether a copy of a file in a directory shares the file's blocks, so that it takes no
/// space.
pub(super) fn is_shared(file: &Path, place: &Path) -> bool {
    let clone = || -> io::Result<()> {
        let from = File::open(file)?;
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        let to = rustix::fs::open(place, flags, Mode::RUSR | Mode::WUSR)?;
        Ok(ioctl_ficlone(&to, &from)?)
    };
    clone().is_ok()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileExt as _, MetadataExt as _};

    use super::*;

    #[test]
    fn a_copy_has_the_same_bytes_and_holes_as_its_original() {
        let place = tempfile::tempdir_in("/var/tmp").unwrap();
        let (from, to) = (place.path().join("from"), place.path().join("to"));
        let file = File::create_new(&from).unwrap();
        let length = (300 << 20) + 5;
        file.set_len(length).unwrap();
        let data = [(0, 3), (70 << 20, 66 << 20), (290 << 20, 4096)];
        for (at, bytes) in data {
            file.write_all_at(&vec![9; bytes], at).unwrap();
        }
        let copy = File::create_new(&to).unwrap();
        let mut parts = Vec::new();
        copy_data(&File::open(&from).unwrap(), &copy, length, |bytes| {
            parts.push(bytes);
        })
        .unwrap();
        assert!(fs::read(&from).unwrap() == fs::read(&to).unwrap());
        let used = |path| fs::metadata(path).unwrap().blocks() * 512;
        assert!(used(&to) <= used(&from) + (1 << 20), "{}", used(&to));
        assert_eq!(parts.iter().sum::<u64>(), length);
        assert!(parts.len() >= 4, "progress within a long part: {parts:?}");
    }
}
