//! Makes a file or a directory from an archive that may be hostile.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use tar::{Archive, Entry, EntryType};

use crate::{CONTENT, CopyError, END, MAX_DEPTH, Summary, failed};

/// Longest path or link text in an archive, in bytes (Linux `PATH_MAX`).
const MAX_PATH: u64 = 4096;
/// Largest number of entries in an archive.
const MAX_ENTRIES: usize = 1 << 20;
/// Most memory in bytes for the directories and links, which are kept until the end.
const MAX_KEPT: usize = 64 << 20;
/// Modification times after the year 9999 are refused by some file systems.
const MAX_MTIME: u64 = 253_402_300_799;

/// Where an archive is unpacked to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    directory: PathBuf,
    path: PathBuf,
    /// Whether the destination must become a directory: its path ends with a slash.
    found: Option<Found>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Directory,
    Other,
}

impl Destination {
    /// Finds out where a copy of something named `name` goes to: into the directory `destination`
    /// if this directory exists or the path ends with a slash, and else to the path `destination`.
    ///
    /// # Errors
    ///
    /// [`CopyError::NoName`] if there is no name; [`CopyError::File`] if there is no directory for
    /// the copy.
    pub fn new(name: &OsStr, destination: &Path) -> Result<Self, CopyError> {
        let ends_with_slash = destination.as_os_str().as_bytes().ends_with(b"/");
        let (directory, last) = if ends_with_slash || destination.is_dir() {
            if name.is_empty() {
                return Err(CopyError::NoName(destination.to_owned()));
            }
            (destination.to_owned(), name)
        } else {
            let last = destination.file_name();
            let last = last.ok_or_else(|| CopyError::NoName(destination.to_owned()))?;
            let parent = destination.parent().unwrap_or(Path::new(""));
            let is_here = parent.as_os_str().is_empty();
            let parent = if is_here { Path::new(".") } else { parent };
            (parent.to_owned(), last)
        };
        let plain = Path::new(last).components().collect::<Vec<_>>();
        if !matches!(plain[..], [Component::Normal(plain)] if plain == last) {
            return Err(CopyError::NoName(PathBuf::from(last)));
        }
        if !fs::metadata(&directory)
            .map_err(failed("find", &directory))?
            .is_dir()
        {
            return Err(CopyError::NoDirectory(directory));
        }
        let path = directory.join(last);
        let found = match fs::symlink_metadata(&path) {
            Ok(found) if found.is_dir() => Some(Found::Directory),
            Ok(_) => Some(Found::Other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed("find", &path)(error)),
        };
        Ok(Self {
            directory,
            path,
            found,
        })
    }

    /// Returns the path that the copy gets.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn check(&self, is_directory: bool) -> Result<(), CopyError> {
        match (self.found, is_directory) {
            (None, _) | (Some(Found::Other), false) => Ok(()),
            (Some(Found::Other), true) => Err(CopyError::NoDirectory(self.path.clone())),
            (Some(Found::Directory), _) => Err(CopyError::Exists(self.path.clone())),
        }
    }
}

/// Unpacks an archive that [`pack`](crate::pack) has made, and reads it to its end. A file replaces
/// an older file.
///
/// # Errors
///
/// [`CopyError`]; the destination is then unchanged, and the temporary directory is removed.
/// [`CopyError::Left`] if it cannot be removed.
pub fn unpack(archive: impl Read, destination: &Destination) -> Result<Summary, CopyError> {
    let temporary = Temporary::new(&destination.directory)?;
    let unpacked = unpack_in(&temporary.0, archive, destination);
    unpacked.map_err(|error| match temporary.remove() {
        Ok(()) => error,
        Err(source) => CopyError::Left {
            error: Box::new(error),
            path: temporary.0.clone(),
            source,
        },
    })
}

/// Unpacks an archive in a temporary directory, and moves the copy to its destination.
fn unpack_in(
    temporary: &Path,
    archive: impl Read,
    destination: &Destination,
) -> Result<Summary, CopyError> {
    let content = temporary.join(CONTENT);
    let mut unpacker = Unpacker {
        content: &content,
        destination,
        summary: Summary::default(),
        directories: Vec::new(),
        links: Vec::new(),
        kept: 0,
        has_ended: false,
    };
    let mut archive = Archive::new(archive);
    let mut long = Long::default();
    let entries = archive.entries().map_err(CopyError::Read)?.raw(true);
    for (count, entry) in entries.enumerate() {
        if count >= MAX_ENTRIES {
            return Err(CopyError::Archive("it has more than 1,048,576 entries"));
        }
        let mut entry = entry.map_err(CopyError::Read)?;
        match entry.header().entry_type() {
            EntryType::GNULongName => long.name = Some(text_of(&mut entry)?),
            EntryType::GNULongLink => long.link = Some(text_of(&mut entry)?),
            _ => unpacker.entry(&mut entry, std::mem::take(&mut long))?,
        }
    }
    let top = unpacker.finish()?;
    // A directory never replaces anything, not even an empty directory that has appeared meanwhile.
    let flags = if top.is_some() {
        RenameFlags::NOREPLACE
    } else {
        RenameFlags::empty()
    };
    let summary = unpacker.summary;
    let path = &destination.path;
    renameat_with(CWD, &content, CWD, path, flags)
        .map_err(|e| failed("rename the finished copy to", path)(e.into()))?;
    // A directory that its owner may not write cannot be moved.
    if let Some((top, mode)) = top {
        let set = top.set_permissions(Permissions::from_mode(mode));
        set.and_then(|()| top.sync_all())
            .map_err(failed("set the permission bits of", path))?;
    }
    sync(&destination.directory)?;
    Ok(summary)
}

/// Long name and link text for the next entry.
#[derive(Default)]
struct Long {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

fn text_of(entry: &mut Entry<'_, impl Read>) -> Result<Vec<u8>, CopyError> {
    let size = entry.header().entry_size().map_err(CopyError::Read)?;
    if size > MAX_PATH + 1 {
        return Err(CopyError::Archive("it has a path of more than 4,096 bytes"));
    }
    let mut text = Vec::new();
    entry.read_to_end(&mut text).map_err(CopyError::Read)?;
    if text.last() == Some(&0) {
        text.pop();
    }
    Ok(text)
}

/// A directory beside the destination, removed with everything in it when this is dropped.
struct Temporary(PathBuf);

impl Temporary {
    fn new(directory: &Path) -> Result<Self, CopyError> {
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        let mut number = 0;
        loop {
            let name = format!(".memfold-copy-{}-{number}", std::process::id());
            let path = directory.join(name);
            match builder.create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < 1000 => {
                    number += 1;
                }
                Err(error) => return Err(failed("create", &path)(error)),
            }
        }
    }

    /// Removes the directory, unless it is removed already.
    fn remove(&self) -> io::Result<()> {
        // Files cannot be removed from a directory that its owner may not write.
        if fs::remove_dir_all(&self.0).is_ok() {
            return Ok(());
        }
        make_writable(&self.0);
        match fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // If the removal fails, the directory's name tells what it is.
        let _ = self.remove();
    }
}

/// Lets the owner write into a directory and all below it.
fn make_writable(directory: &Path) {
    let _ = fs::set_permissions(directory, Permissions::from_mode(0o700));
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        // Links are not followed.
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            make_writable(&entry.path());
        }
    }
}

/// A directory whose permission bits and time are set after its content.
struct Directory {
    path: PathBuf,
    mode: u32,
    mtime: SystemTime,
}

struct Unpacker<'a> {
    /// Path of the copy in the temporary directory.
    content: &'a Path,
    destination: &'a Destination,
    summary: Summary,
    directories: Vec<Directory>,
    /// Path and text of each symbolic link. The links are made last, so that no path leads through
    /// one of them.
    links: Vec<(PathBuf, Vec<u8>)>,
    /// Size of `directories` and `links` in bytes.
    kept: usize,
    has_ended: bool,
}

impl Unpacker<'_> {
    fn entry(&mut self, entry: &mut Entry<'_, impl Read>, long: Long) -> Result<(), CopyError> {
        if self.has_ended {
            return Err(CopyError::Archive("an entry follows its last one"));
        }
        let header = entry.header().clone();
        let name = long
            .name
            .unwrap_or_else(|| header.path_bytes().into_owned());
        if name == END.as_bytes() {
            self.has_ended = true;
            return Ok(());
        }
        let path = self.place(&name)?;
        let is_first = self.summary == Summary::default();
        if is_first != (path == self.content) {
            return Err(CopyError::Archive("its first entry is not its top"));
        }
        let mode = header.mode().map_err(CopyError::Read)? & 0o777;
        let mtime = header.mtime().map_err(CopyError::Read)?.min(MAX_MTIME);
        let mtime = UNIX_EPOCH + Duration::from_secs(mtime);
        match header.entry_type() {
            EntryType::Directory => {
                if is_first {
                    self.destination.check(true)?;
                }
                DirBuilder::new()
                    .mode(0o700)
                    .create(&path)
                    .map_err(failed("create", &path))?;
                self.keep(path.as_os_str().len())?;
                self.directories.push(Directory { path, mode, mtime });
                self.summary.directories += 1;
            }
            EntryType::Regular => {
                if is_first {
                    self.destination.check(false)?;
                }
                let size = header.entry_size().map_err(CopyError::Read)?;
                self.file(entry, &path, size, mode, mtime)?;
            }
            EntryType::Symlink if !is_first => {
                // Links are made last, in order: this one must not be made through another. No link
                // takes the place of a directory that exists.
                let parent = path.parent().map(fs::symlink_metadata);
                if !parent.is_some_and(|found| found.is_ok_and(|found| found.is_dir())) {
                    return Err(CopyError::Archive("it has a path that leads elsewhere"));
                }
                let text = header.link_name_bytes().map(Cow::into_owned);
                let text = long.link.or(text).unwrap_or_default();
                self.keep(path.as_os_str().len() + text.len())?;
                self.links.push((path, text));
                self.summary.links += 1;
            }
            _ => {
                return Err(CopyError::Archive(
                    "it has an entry that is neither a file nor a directory nor a symbolic link",
                ));
            }
        }
        Ok(())
    }

    /// Counts a directory or a link whose texts have `length` bytes.
    fn keep(&mut self, length: usize) -> Result<(), CopyError> {
        self.kept += length + size_of::<Directory>();
        if self.kept > MAX_KEPT {
            return Err(CopyError::Archive(
                "its directories and symbolic links need more than 64 MiB of memory",
            ));
        }
        Ok(())
    }

    /// Returns the path in the temporary directory for an entry's name.
    fn place(&self, name: &[u8]) -> Result<PathBuf, CopyError> {
        let name = Path::new(OsStr::from_bytes(name));
        let mut components = name.components();
        let is_plain = components.next() == Some(Component::Normal(OsStr::new(CONTENT)))
            && components.all(|part| matches!(part, Component::Normal(_)))
            && name.as_os_str().len() as u64 <= MAX_PATH;
        if !is_plain {
            return Err(CopyError::Archive("it has a path that leads elsewhere"));
        }
        if name.components().count() > MAX_DEPTH {
            return Err(CopyError::Deep);
        }
        let below = name.strip_prefix(CONTENT).unwrap_or(Path::new(""));
        Ok(if below.as_os_str().is_empty() {
            self.content.to_owned()
        } else {
            self.content.join(below)
        })
    }

    fn file(
        &mut self,
        entry: &mut Entry<'_, impl Read>,
        path: &Path,
        size: u64,
        mode: u32,
        mtime: SystemTime,
    ) -> Result<(), CopyError> {
        // `create_new` neither follows a link nor opens what is there already.
        let mut options = File::options();
        let opened = options.write(true).create_new(true).mode(0o600).open(path);
        let mut file = opened.map_err(failed("create", path))?;
        let mut buffer = vec![0; 64 << 10];
        let mut written = 0;
        loop {
            let read = match entry.read(&mut buffer) {
                Ok(0) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => read.map_err(CopyError::Read)?,
            };
            io::Write::write_all(&mut file, &buffer[..read]).map_err(failed("write", path))?;
            written += read as u64;
        }
        if written != size {
            return Err(CopyError::Cut);
        }
        file.set_permissions(Permissions::from_mode(mode))
            .and_then(|()| file.set_modified(mtime))
            .and_then(|()| file.sync_all())
            .map_err(failed("write", path))?;
        self.summary.files += 1;
        self.summary.bytes += size;
        Ok(())
    }

    /// Makes the links, and sets times and permission bits of directories. If the copy is a
    /// directory, returns it and the permission bits that it gets in its place.
    fn finish(&mut self) -> Result<Option<(File, u32)>, CopyError> {
        if !self.has_ended || self.summary == Summary::default() {
            return Err(CopyError::Cut);
        }
        for (path, text) in &self.links {
            let made = std::os::unix::fs::symlink(OsStr::from_bytes(text), path);
            made.map_err(failed("create the symbolic link", path))?;
        }
        let mut top = None;
        // The content of a directory comes after the directory.
        for directory in self.directories.iter().rev() {
            let Directory { path, mode, mtime } = directory;
            let is_top = path == self.content;
            let opened = File::open(path);
            let set = opened.and_then(|file| {
                file.set_modified(*mtime)?;
                if !is_top {
                    file.set_permissions(Permissions::from_mode(*mode))?;
                }
                file.sync_all()?;
                Ok(file)
            });
            let file = set.map_err(failed("write", path))?;
            top = is_top.then_some((file, *mode));
        }
        Ok(top)
    }
}

fn sync(directory: &Path) -> Result<(), CopyError> {
    let opened = File::open(directory);
    opened
        .and_then(|directory| directory.sync_all())
        .map_err(failed("write", directory))
}
