//! Writes a file or a directory as an archive.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use tar::{Builder, EntryType, Header};

use crate::{CONTENT, CopyError, END, MAX_DEPTH, Summary, failed};

/// Writes the file or directory `source` to `out` as an archive. If `source` itself is a symbolic
/// link, the link's target is copied.
///
/// # Errors
///
/// [`CopyError::Kind`] for a device, socket or pipe, also within a directory.
pub fn pack(source: &Path, out: impl Write) -> Result<Summary, CopyError> {
    let mut packer = Packer {
        builder: Builder::new(out),
        summary: Summary::default(),
    };
    let found = fs::metadata(source).map_err(failed("read", source))?;
    let top = Place {
        open_path: source.to_owned(),
        shown_path: source.to_owned(),
        is_top: true,
    };
    packer.add(&top, Path::new(CONTENT), &found)?;
    let mut end = header(EntryType::Regular, 0, 0, 0);
    let written = packer.builder.append_data(&mut end, END, io::empty());
    let written = written.and_then(|()| packer.builder.into_inner());
    let flushed = written.and_then(|mut out| out.flush());
    flushed.map_err(CopyError::Write)?;
    Ok(packer.summary)
}

struct Packer<W: Write> {
    builder: Builder<W>,
    summary: Summary,
}

fn header(kind: EntryType, mode: u32, mtime: u64, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode & 0o777);
    header.set_mtime(mtime);
    header.set_size(size);
    header
}

/// Returns the modification time in seconds since 1970; 0 for an earlier time.
fn mtime(found: &Metadata) -> u64 {
    u64::try_from(found.mtime()).unwrap_or(0)
}

impl<W: Write> Packer<W> {
    fn add(&mut self, at: &Place, name: &Path, found: &Metadata) -> Result<(), CopyError> {
        if name.components().count() > MAX_DEPTH {
            return Err(CopyError::Deep);
        }
        let kind = found.file_type();
        if kind.is_dir() {
            self.add_directory(at, name, found)
        } else if kind.is_file() {
            self.add_file(at, name)
        } else if kind.is_symlink() {
            let target = fs::read_link(&at.open_path).map_err(failed("read", &at.shown_path))?;
            self.summary.links += 1;
            let mut header = header(EntryType::Symlink, 0o777, mtime(found), 0);
            let added = self.builder.append_link(&mut header, name, target);
            added.map_err(CopyError::Write)
        } else {
            Err(CopyError::Kind(at.shown_path.clone()))
        }
    }

    fn add_directory(
        &mut self,
        at: &Place,
        name: &Path,
        found: &Metadata,
    ) -> Result<(), CopyError> {
        self.summary.directories += 1;
        let mut header = header(EntryType::Directory, found.mode(), mtime(found), 0);
        let added = self.builder.append_data(&mut header, name, io::empty());
        added.map_err(CopyError::Write)?;
        let directory = at.open(OFlags::DIRECTORY)?;
        // This path leads to the open directory even if its owner has put a link in its place.
        let open_path = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
        let entries = fs::read_dir(&open_path).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let entries = entries.map_err(failed("list", &at.shown_path))?;
        let mut names: Vec<OsString> = entries.iter().map(fs::DirEntry::file_name).collect();
        names.sort();
        for last in names {
            let at = Place {
                open_path: open_path.join(&last),
                shown_path: at.shown_path.join(&last),
                is_top: false,
            };
            let found =
                fs::symlink_metadata(&at.open_path).map_err(failed("read", &at.shown_path))?;
            self.add(&at, &name.join(last), &found)?;
        }
        Ok(())
    }

    fn add_file(&mut self, at: &Place, name: &Path) -> Result<(), CopyError> {
        let path = &at.shown_path;
        // A path that has become a pipe meanwhile must not block.
        let file = at.open(OFlags::NONBLOCK)?;
        let found = file.metadata().map_err(failed("read", path))?;
        if !found.is_file() {
            return Err(CopyError::Kind(path.clone()));
        }
        let mut header = header(EntryType::Regular, found.mode(), mtime(&found), found.len());
        let mut reader = Exact {
            file,
            left: found.len(),
            failure: None,
        };
        let added = self.builder.append_data(&mut header, name, &mut reader);
        match (reader.failure, added) {
            (Some(Failure::Read(error)), _) => Err(failed("read", path)(error)),
            (Some(Failure::Shorter), _) => Err(CopyError::Changed(path.clone())),
            (None, added) => added.map_err(CopyError::Write),
        }?;
        self.summary.files += 1;
        self.summary.bytes += found.len();
        Ok(())
    }
}

/// A file or directory that is being packed. Its owner may replace it by a link meanwhile, to
/// something that only the packing user can read.
struct Place {
    /// Path by which it is opened: below an open directory.
    open_path: PathBuf,
    /// Path for messages.
    shown_path: PathBuf,
    /// Whether the user has named it; then links in its path are followed.
    is_top: bool,
}

impl Place {
    fn open(&self, flags: OFlags) -> Result<File, CopyError> {
        let links = if self.is_top {
            OFlags::empty()
        } else {
            OFlags::NOFOLLOW
        };
        let flags = flags | links | OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::open(&self.open_path, flags, Mode::empty());
        Ok(File::from(
            file.map_err(|e| failed("open", &self.shown_path)(e.into()))?,
        ))
    }
}

/// Reads the number of bytes that the header has told, or fails. Notes errors of the file, to
/// tell them from errors of the archive's writer.
struct Exact {
    file: File,
    left: u64,
    failure: Option<Failure>,
}

/// Why the whole file could not be read.
enum Failure {
    Read(io::Error),
    /// The file has become shorter.
    Shorter,
}

impl Read for Exact {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).map_or(buffer.len(), |left| left.min(buffer.len()));
        if most == 0 {
            return Ok(0);
        }
        match self.file.read(&mut buffer[..most]) {
            Ok(0) => {
                self.failure = Some(Failure::Shorter);
                Err(io::ErrorKind::UnexpectedEof.into())
            }
            Ok(n) => {
                self.left -= n as u64;
                Ok(n)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
            Err(error) => {
                self.failure = Some(Failure::Read(error));
                Err(io::ErrorKind::Other.into())
            }
        }
    }
}
