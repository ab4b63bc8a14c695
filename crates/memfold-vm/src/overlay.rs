//! Creates temporary disk overlays: empty qcow2 files above a VM's disk images. A VM's writes go to
//! the overlay, and the overlay is removed when the VM ends.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use memfold_host::helper;

use super::qcow2;

/// Longest time that `qemu-img` may take to create an overlay. The backing file may be on a remote
/// host that does not answer.
const LIMIT: Duration = Duration::from_secs(60);

/// The backing file of a qcow2 overlay: the image that the overlay lies above.
pub struct Backing<'a> {
    /// Absolute path of the backing file, written into the overlay's header.
    pub file: &'a Path,
    /// Format of the backing file, in QEMU's words: `raw` or `qcow2`.
    pub format: &'a str,
    /// Size of the disk in bytes, if the backing file does not exist yet; `None`: `qemu-img` reads
    /// the size from the backing file.
    pub virtual_bytes: Option<u64>,
}

impl Backing<'_> {
    /// Returns the size of the disk in a regular file; `None` if `qemu-img` has to tell.
    fn bytes(&self) -> Option<u64> {
        match self.format {
            "raw" => {
                let facts = std::fs::metadata(self.file).ok()?;
                facts.is_file().then_some(facts.len())
            }
            "qcow2" => qcow2::virtual_bytes(self.file),
            _ => None,
        }
    }
}

/// Creates an empty qcow2 overlay at `path`. Only its owner can read it, because other users may be
/// able to write to the directory. Fails with `AlreadyExists` if the file exists. After an error,
/// no file remains.
pub fn create(path: &Path, backing: &Backing) -> io::Result<()> {
    let known = backing.virtual_bytes.or_else(|| backing.bytes());
    if let (Some(bytes), true) = (known, backing.file.is_absolute()) {
        return written(path, |file| {
            qcow2::write_empty(file, bytes, Some((backing.file, backing.format)))
        });
    }
    let mut options: Vec<&OsStr> = ["-F", backing.format, "-b"].map(OsStr::new).into();
    options.push(backing.file.as_os_str());
    written(path, |file| format(file, &options))
}

/// Creates an empty qcow2 disk of `virtual_bytes` bytes at `path`, without a backing file. Only its
/// owner can read it. After an error, no file remains.
pub fn create_empty(path: &Path, virtual_bytes: u64) -> io::Result<()> {
    written(path, |file| qcow2::write_empty(file, virtual_bytes, None))
}

/// Returns the directory of temporary overlays: `TMPDIR` or `/var/tmp`. The state directory is
/// unsuitable, because it is in RAM.
pub(super) fn directory() -> io::Result<PathBuf> {
    let place = std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from);
    let failed =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", place.display()));
    place.canonicalize().map_err(failed)
}

/// Creates a new file, accessible only to its owner. Fails if the file exists.
pub(super) fn new_file(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// Creates a new file, and lets `write` write it. After an error, no file remains.
fn written(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    write(&new_file(path)?).inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })
}

/// Formats a qcow2 file as large as its backing file. `qemu-img` gets the open file instead of its
/// path: `qemu-img` may outlive this process, and would create the file again after it was removed.
fn format(file: &File, options: &[&OsStr]) -> io::Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2"]).args(options);
    command.arg("/proc/self/fd/0");
    let output = helper::output(command.stdin(Stdio::from(file.try_clone()?)), LIMIT)
        .map_err(|error| io::Error::new(error.kind(), format!("qemu-img: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("qemu-img: {}", words.trim())))
}

/// Returns a number for unique names of a VM's overlays: nanoseconds since 1970. It is short enough
/// for the name of a QEMU block node.
#[must_use]
pub fn unique() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(path: &Path) -> Backing<'_> {
        Backing {
            file: path,
            format: "raw",
            virtual_bytes: None,
        }
    }

    #[test]
    fn a_qcow2_overlay_has_the_size_of_its_disk_and_an_existing_one_is_not_overwritten() {
        let place = tempfile::tempdir().unwrap();
        let disk = place.path().join("disk");
        File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        let overlay = place.path().join("overlay");
        create(&overlay, &raw(&disk)).unwrap();
        let header = std::fs::read(&overlay).unwrap();
        assert_eq!(header[..4], *b"QFI\xfb");
        // The header (docs/interop/qcow2 in QEMU): the size is at byte 24, and the offset of the
        // backing file's name is at byte 8.
        assert_eq!(header[24..32], (1_u64 << 20).to_be_bytes());
        let name = disk.to_str().unwrap().as_bytes();
        assert!(header.windows(name.len()).any(|part| part == name));
        let error = create(&overlay, &raw(&disk)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&overlay).unwrap(), header);
    }

    #[test]
    fn without_a_size_an_overlay_on_a_missing_disk_is_refused_and_leaves_no_file() {
        let place = tempfile::tempdir().unwrap();
        let disk = place.path().join("nowhere");
        let overlay = place.path().join("overlay");
        let error = create(&overlay, &raw(&disk)).unwrap_err().to_string();
        assert!(error.starts_with("qemu-img: "), "{error}");
        assert!(!overlay.exists());
        let later = Backing {
            virtual_bytes: Some(3 << 20),
            ..raw(&disk)
        };
        create(&overlay, &later).unwrap();
        let header = std::fs::read(&overlay).unwrap();
        assert_eq!(header[24..32], (3_u64 << 20).to_be_bytes());
    }

    #[test]
    fn an_overlay_removed_during_formatting_is_not_recreated() {
        let place = tempfile::tempdir().unwrap();
        let disk = place.path().join("disk");
        File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        let overlay = place.path().join("overlay");
        let file = File::create_new(&overlay).unwrap();
        std::fs::remove_file(&overlay).unwrap();
        let options = ["-F", "raw", "-b", disk.to_str().unwrap()].map(OsStr::new);
        format(&file, &options).unwrap();
        assert!(!overlay.exists());
    }
}
