//! Finds, sandboxes and runs the external programs that fetch, unpack and pack the files of
//! segments.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use memfold_host::files::program;
use memfold_host::helper;
use memfold_sys::session::end_with_thread;
use memfold_units::ByteSize;

use super::error::SegmentError;

/// Time limit for an external program.
const LIMIT: Duration = Duration::from_secs(3600);

/// Bytes of a file system that builds leave free: this, or a twentieth of the file system if that
/// is less.
const MOST_RESERVE: u64 = 1 << 30;

/// Number of bytes that are copied before the free space is looked up again.
const LOOK: u64 = 64 << 20;

/// Size of a block of most file systems, in bytes. A file takes whole blocks.
const BLOCK: u64 = 4096;

/// Returns a command that runs `program` in a sandbox (bubblewrap). The program reads untrusted
/// images and packages as root, and file names in these may lead anywhere. So it sees the host
/// read-only, without devices and network, and can write only to `room`.
pub fn confined(program: &Path, room: &Path) -> Result<Command, SegmentError> {
    let what = "confines the programs that unpack images and packages";
    let bwrap = tool("bwrap", what, "bubblewrap")?;
    let mut command = Command::new(bwrap);
    command
        .args(["--ro-bind", "/", "/", "--dev", "/dev"])
        .args(["--proc", "/proc", "--bind"])
        .args([room, room])
        // The program needs capabilities to set the owners of files.
        .args(["--cap-add", "ALL", "--unshare-net"])
        .args(["--unshare-pid", "--unshare-ipc", "--die-with-parent"])
        .args(["--chdir", "/", "--"])
        .arg(program);
    Ok(command)
}

/// Returns the path of the external program `name`. If the program is not installed, the error
/// names its purpose `what` and the `package` that contains it.
pub fn tool(
    name: &'static str,
    what: &'static str,
    package: &'static str,
) -> Result<PathBuf, SegmentError> {
    program(name).ok_or(SegmentError::Missing {
        program: name,
        what,
        package,
    })
}

/// Runs `command` without input, for at most one hour, and returns its standard error. Fails if the
/// program fails; the error has its last output. `name` names the program in errors.
pub fn run(name: &'static str, command: &mut Command) -> Result<String, SegmentError> {
    run_with_input(name, command.stdin(Stdio::null()))
}

/// Runs a program with the standard input that the command has, and returns its standard error.
pub(super) fn run_with_input(
    name: &'static str,
    command: &mut Command,
) -> Result<String, SegmentError> {
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    said(name, output(command, || Ok(())))
}

/// Runs a program that unpacks files into the directory `room`, as [`run`] does, and kills it when
/// it has nearly filled the file system: VMs may have disks there, and files of a few bytes on disk
/// can claim any length.
pub(super) fn run_in(
    name: &'static str,
    command: &mut Command,
    room: &Path,
) -> Result<String, SegmentError> {
    command.stdin(Stdio::null()).stdout(Stdio::null());
    said(
        name,
        output(command.stderr(Stdio::piped()), || has_room(room)),
    )
}

/// Runs a program with the descriptors that the command has, and returns the output that goes to
/// pipes.
pub(super) fn output(
    command: &mut Command,
    check: impl FnMut() -> io::Result<()>,
) -> io::Result<Output> {
    let child = end_with_thread(command.process_group(0)).spawn()?;
    helper::output_while(child, LIMIT, check)
}

fn has_room(place: &Path) -> io::Result<()> {
    let (free, reserve) = free_and_reserve(place)?;
    if free >= reserve {
        return Ok(());
    }
    let what = format!("less than {} is free", ByteSize(reserve));
    Err(too_full(&what, place))
}

/// Returns the number of free bytes of the file system of `place`, and how many of them builds
/// leave free.
fn free_and_reserve(place: &Path) -> io::Result<(u64, u64)> {
    let disk = rustix::fs::statvfs(place)?;
    let reserve = MOST_RESERVE.min(disk.f_blocks * disk.f_frsize / 20);
    Ok((disk.f_bavail * disk.f_frsize, reserve))
}

/// Returns how many bytes a build may still write to the file system of `place`: the free bytes
/// above a reserve of 1 GiB, or of a twentieth of the file system if that is less.
///
/// # Errors
///
/// An I/O error of `statvfs(3)`.
pub fn free_above_reserve(place: &Path) -> io::Result<u64> {
    let (free, reserve) = free_and_reserve(place)?;
    Ok(free.saturating_sub(reserve))
}

/// Checks that `bytes` more bytes fit on the file system of `place` above the reserve.
pub(super) fn check_room(place: &Path, bytes: u64) -> io::Result<()> {
    let (free, reserve) = free_and_reserve(place)?;
    if bytes <= free.saturating_sub(reserve) {
        return Ok(());
    }
    let (bytes, reserve) = (ByteSize(bytes), ByteSize(reserve));
    let what = format!("writing {bytes} would leave less than {reserve} free");
    Err(too_full(&what, place))
}

fn too_full(what: &str, place: &Path) -> io::Error {
    let why = format!(
        "{what} on the file system of {}; leave out large and sparse files in the source, or use a larger file system for segments",
        place.display()
    );
    io::Error::new(io::ErrorKind::StorageFull, why)
}

/// Keeps the reserve of a file system while files are copied there.
#[derive(Debug)]
pub(super) struct CopyRoom<'a> {
    place: &'a Path,
    /// Number of bytes that may be written before the free space is looked up again.
    left: u64,
}

impl<'a> CopyRoom<'a> {
    /// Creates the guard for copies to the file system of `place`.
    pub(super) const fn new(place: &'a Path) -> Self {
        Self { place, left: 0 }
    }

    /// Takes room for `bytes` bytes of a file before they are written.
    ///
    /// # Errors
    ///
    /// `StorageFull` if less than the reserve would stay free.
    pub(super) fn take(&mut self, bytes: u64) -> io::Result<()> {
        let bytes = bytes.next_multiple_of(BLOCK);
        if bytes > self.left {
            check_room(self.place, bytes)?;
            self.left = free_above_reserve(self.place)?.min(LOOK).max(bytes);
        }
        self.left -= bytes;
        Ok(())
    }
}

fn said(name: &'static str, done: io::Result<Output>) -> Result<String, SegmentError> {
    let why = |why: String| SegmentError::Tool { program: name, why };
    let done = done.map_err(|error| why(error.to_string()))?;
    let said = String::from_utf8_lossy(&done.stderr).trim().to_owned();
    if done.status.success() {
        return Ok(said);
    }
    let lines: Vec<&str> = said.lines().collect();
    let tail = &lines[lines.len().saturating_sub(3)..];
    Err(why(format!("{} ({})", tail.join("; "), done.status)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::small_disk::SmallDisk;

    #[test]
    fn a_sandboxed_program_that_unpacks_files_can_write_only_to_its_own_directory() {
        if program("bwrap").is_none() || !rustix::process::getuid().is_root() {
            memfold_testkit::skip!("no bwrap (package bubblewrap), or not root");
        }
        let (room, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let script = format!(
            "echo in > {0}/file; ln -s {1} {0}/link; echo out > {0}/link/file; echo out > {1}/file; chown 7 {0}/file",
            room.path().display(),
            other.path().display()
        );
        let mut shell = confined(Path::new("/bin/sh"), room.path()).unwrap();
        let _ = run("sh", shell.args(["-c", &script]));
        assert_eq!(
            fs::read_to_string(room.path().join("file")).unwrap(),
            "in\n"
        );
        assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
        let facts = fs::metadata(room.path().join("file")).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&facts), 7);
    }

    #[test]
    fn a_program_that_nearly_fills_the_file_system_of_segments_is_killed() {
        let Some(room) = SmallDisk::mount() else {
            memfold_testkit::skip!("no right to mount a file system");
        };
        let fill = |mib: u32| {
            let script = format!("head -c {mib}M /dev/zero > {}/file", room.path().display());
            let script = format!("{script}; test {mib} -lt 32 || exec sleep 600");
            run_in("sh", Command::new("sh").args(["-c", &script]), room.path())
        };
        let (half, all) = (fill(30), fill(63));
        assert_eq!(half.unwrap(), "");
        let error = all.unwrap_err().to_string();
        assert!(error.contains("less than 3.20 MiB is free"), "{error}");
    }

    #[test]
    fn a_copy_to_a_nearly_full_file_system_ends_while_the_reserve_is_free() {
        let Some(disk) = SmallDisk::mount() else {
            memfold_testkit::skip!("no right to mount a file system");
        };
        let (mut room, piece) = (CopyRoom::new(disk.path()), vec![1_u8; 1 << 20]);
        let error = (0..64).find_map(|number| {
            if let Err(error) = room.take(1 << 20) {
                return Some(error);
            }
            fs::write(disk.path().join(format!("{number}")), &piece).unwrap();
            None
        });
        let error = error.expect("the file system is too small").to_string();
        assert!(
            error.contains("writing 1.00 MiB would leave less than 3.20 MiB free"),
            "{error}"
        );
        let reserve = (64 << 20) / 20;
        let free = disk.free_bytes();
        assert!((reserve..reserve + (1 << 20)).contains(&free), "{free}");
    }

    #[test]
    fn if_a_program_fails_that_builds_a_segment_the_error_contains_its_last_output() {
        let error = run(
            "sh",
            Command::new("sh").args(["-c", "echo one >&2; echo two >&2; exit 3"]),
        );
        let text = error.unwrap_err().to_string();
        assert!(text.contains("one; two") && text.contains('3'), "{text}");
    }
}
