//! Finds the files of a segment that equal the guest's own files, by their metadata.
//!
//! Two files are equal if they have the same type, mode, owner, group and extended attributes.
//! Regular files must also have the same size and modification time, and the same bytes if the
//! operator asked for this (`content`). Symbolic links must have the same target, and devices the
//! same number. If two equal files are taken for different ones, this only costs memory: the guest
//! then uses its own file.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Advice, FileType, OFlags, Statx, StatxAttributes};

use super::error::{During, Error, Result, shown};
use super::tree;

/// Most levels of a directory tree. Deeper trees are refused.
const MAX_DEPTH: usize = 200;
/// Number of differing paths that a report names.
const MAX_NAMED: usize = 10;
/// Number of bytes compared in one step.
const PIECE: usize = 128 << 10;

/// A file or directory of the segment that the guest must not see.
#[derive(Debug)]
pub struct Hidden {
    /// Path of the hidden file or directory, relative to the directory over which the segment is
    /// mounted.
    pub path: Vec<u8>,
    /// Metadata of the guest's own file at this path, if there is one. A hard link to that file
    /// hides the segment's file; without such a file, a whiteout does.
    pub own: Option<Facts>,
}

/// A file or directory of the segment that equals the guest's own, so the guest may see the
/// segment's.
#[derive(Debug)]
pub struct Same {
    /// Path of the equal file or directory, relative to the directory over which the segment is
    /// mounted.
    pub path: Vec<u8>,
    /// Metadata of the guest's own file or directory at this path.
    pub own: Facts,
}

/// Result of comparing a segment's directory with the guest's: the segment's files and directories
/// to show and to hide.
#[derive(Debug, Default)]
pub struct Plan {
    /// Number of files in the segment's directory, of all types except directories.
    pub files: u64,
    /// Total size of the regular files in the segment's directory, in bytes.
    pub bytes: u64,
    /// Number of files of the segment that differ from the guest's, or that the guest lacks.
    pub differing: u64,
    /// Number of regular files of the segment that the kernel would map with DAX.
    pub dax_files: u64,
    /// Number of regular files in the segment's directory.
    pub regular_files: u64,
    /// Paths of the first files that differ, at most ten, each with the reason.
    pub first_differing: Vec<(Vec<u8>, &'static str)>,
    /// Files and directories of the segment to hide.
    pub hidden: Vec<Hidden>,
    /// Paths of the directories whose owner, mode, times or attributes differ; the guest sees those
    /// of its own directory.
    pub masked: Vec<Vec<u8>>,
    /// Files and directories of the segment to show.
    pub same: Vec<Same>,
}

/// Metadata of a file: what programs can see, and what reveals a change of the file (change time
/// and inode number).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Type and permissions of the file (`st_mode`).
    pub mode: u16,
    /// User ID of the file's owner.
    pub uid: u32,
    /// Group ID of the file.
    pub gid: u32,
    /// Size of the file in bytes; 0 for a directory, whose size depends on the file system.
    pub size: u64,
    /// Modification time of the file: seconds since 1970, and nanoseconds.
    pub mtime: (i64, u32),
    /// Device number (major, minor) of a device file; 0, 0 for other files.
    pub rdev: (u32, u32),
    /// Change time of the file (`st_ctime`): seconds since 1970, and nanoseconds.
    pub ctime: (i64, u32),
    /// Inode number of the file.
    pub ino: u64,
}

impl Facts {
    /// Extracts a file's metadata from the result of `statx`.
    pub fn of(stat: &Statx) -> Self {
        let directory = tree::kind(stat) == FileType::Directory;
        Self {
            mode: stat.stx_mode,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            size: if directory { 0 } else { stat.stx_size },
            mtime: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
            rdev: (stat.stx_rdev_major, stat.stx_rdev_minor),
            ctime: (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec),
            ino: stat.stx_ino,
        }
    }

    /// Returns the type of the file.
    pub const fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode as u32)
    }

    /// Returns whether a program would take both files for equal, by their metadata. Change times
    /// and inode numbers are not compared.
    pub fn looks_like(&self, other: &Self) -> bool {
        self.why_different(other, false).is_none()
    }

    /// Returns the first difference between two files; `None` if they are equal. Many image
    /// builders keep whole seconds only, so the nanoseconds of a modification time count only if
    /// both files have them, or with `strict`.
    fn why_different(&self, other: &Self, strict: bool) -> Option<&'static str> {
        let nanoseconds = strict || (self.mtime.1 != 0 && other.mtime.1 != 0);
        if self.kind() != other.kind() {
            Some("type")
        } else if self.mode != other.mode {
            Some("mode")
        } else if (self.uid, self.gid) != (other.uid, other.gid) {
            Some("owner")
        } else if self.size != other.size {
            Some("size")
        } else if self.rdev != other.rdev {
            Some("device number")
        } else if self.mtime.0 != other.mtime.0 || nanoseconds && self.mtime.1 != other.mtime.1 {
            Some("modification time")
        } else {
            None
        }
    }
}

/// Compares the segment's directory with the guest's own directory; with `content`, also the bytes
/// of files. Paths in `hide` count as different.
pub fn compare(
    segment: &OwnedFd,
    own: &OwnedFd,
    content: bool,
    hide: &BTreeSet<Vec<u8>>,
) -> Result<Plan> {
    let mut walk = Walk {
        segment,
        own,
        content,
        hide,
        plan: Plan::default(),
        pending: vec![(Vec::new(), 0, true)],
    };
    while let Some((path, depth, present)) = walk.pending.pop() {
        if depth > MAX_DEPTH {
            return Err(Error::refused(
                format!("the segment's directory {} is too deep", shown(&path)),
                "leave it out of the segment",
            ));
        }
        walk.directory(&path, depth, present)?;
    }
    Ok(walk.plan)
}

struct Walk<'a> {
    segment: &'a OwnedFd,
    own: &'a OwnedFd,
    content: bool,
    hide: &'a BTreeSet<Vec<u8>>,
    plan: Plan,
    /// Directories to compare: path, depth, and whether the guest has this directory too.
    pending: Vec<(Vec<u8>, usize, bool)>,
}

/// The directories of the segment and of the guest that contain the same entry.
struct Pair<'a> {
    segment: &'a OwnedFd,
    own: OwnedFd,
}

impl Walk<'_> {
    fn directory(&mut self, path: &[u8], depth: usize, present: bool) -> Result<()> {
        let segment = tree::directory_below(self.segment, path)
            .during(|| format!("opening the segment's {}", shown(path)))?;
        let pair = if present {
            let own = tree::directory_below(self.own, path)
                .during(|| format!("opening the guest's {}", shown(path)))?;
            let segment = &segment;
            Some(Pair { segment, own })
        } else {
            None
        };
        if let (Some(pair), true) = (&pair, path.is_empty()) {
            // This only refuses wrong attributes: the facts of the top directory come from the
            // upper layer.
            same_xattrs(pair, path, &[c"."])?;
        }
        for entry in entries(&segment, pair.as_ref(), path)? {
            let is_directory = tree::kind(&entry.theirs) == FileType::Directory;
            if !is_directory {
                self.count(&entry.theirs);
            }
            let present = match &pair {
                Some(pair) => self.entry(pair, &entry)?,
                None => false,
            };
            if is_directory {
                self.pending.push((entry.path, depth + 1, present));
            } else if pair.is_none() {
                self.differs(&entry.path, "the guest lacks the file's directory");
            }
        }
        Ok(())
    }

    fn count(&mut self, stat: &Statx) {
        self.plan.files += 1;
        if tree::kind(stat) == FileType::RegularFile {
            self.plan.bytes += stat.stx_size;
            self.plan.regular_files += 1;
            self.plan.dax_files += u64::from(stat.stx_attributes.contains(StatxAttributes::DAX));
        }
    }

    fn differs(&mut self, path: &[u8], why: &'static str) {
        self.plan.differing += 1;
        if self.plan.first_differing.len() < MAX_NAMED {
            self.plan.first_differing.push((path.to_vec(), why));
        }
    }

    /// Compares an entry of a directory that both sides have. Returns true if the entry is a
    /// directory that the guest has too.
    fn entry(&mut self, pair: &Pair<'_>, entry: &Entry) -> Result<bool> {
        let path = &entry.path[..];
        let theirs = Facts::of(&entry.theirs);
        let is_directory = theirs.kind() == FileType::Directory;
        let Some(own) = &entry.own else {
            self.hide(path, None);
            if !is_directory {
                self.differs(path, "the guest has no such file");
            }
            return Ok(false);
        };
        let facts = Facts::of(own);
        if is_directory && facts.kind() == FileType::Directory {
            if !entry.same_xattrs || facts.why_different(&theirs, true).is_some() {
                self.plan.masked.push(path.to_vec());
            }
            self.keep(path, facts);
            return Ok(true);
        }
        if facts.kind() == FileType::Directory {
            return Err(Error::refused(
                format!(
                    "{} is a directory in the guest and something else in the segment",
                    shown(path)
                ),
                "build the segment from a guest of this kind",
            ));
        }
        let why = if self.hide.contains(path) {
            Some("open for writing")
        } else {
            self.why_different(pair, entry, &facts, &theirs)?
        };
        let Some(why) = why else {
            self.keep(path, facts);
            return Ok(false);
        };
        self.hide(path, Some(facts));
        if !is_directory {
            self.differs(path, why);
        }
        Ok(false)
    }

    fn keep(&mut self, path: &[u8], own: Facts) {
        let path = path.to_vec();
        self.plan.same.push(Same { path, own });
    }

    fn hide(&mut self, path: &[u8], own: Option<Facts>) {
        let path = path.to_vec();
        self.plan.hidden.push(Hidden { path, own });
    }

    /// Compares two entries that are no directories, or that have different types.
    fn why_different(
        &self,
        pair: &Pair<'_>,
        entry: &Entry,
        own: &Facts,
        theirs: &Facts,
    ) -> Result<Option<&'static str>> {
        if let Some(why) = own.why_different(theirs, false) {
            return Ok(Some(why));
        }
        if !entry.same_xattrs {
            return Ok(Some("extended attributes"));
        }
        let name = &entry.name;
        let what = || format!("comparing {}", shown(&entry.path));
        Ok(match own.kind() {
            FileType::Symlink => {
                let target = |directory: &OwnedFd| {
                    rustix::fs::readlinkat(directory, name, Vec::new()).during(what)
                };
                (target(&pair.own)? != target(pair.segment)?).then_some("target")
            }
            FileType::RegularFile if self.content => {
                (!same_bytes(pair, name).during(what)?).then_some("content")
            }
            _ => None,
        })
    }
}

/// An entry of a segment's directory.
struct Entry {
    name: CString,
    /// Path of the entry, relative to the directory over which the segment is mounted.
    path: Vec<u8>,
    theirs: Statx,
    own: Option<Statx>,
    /// Whether the extended attributes are equal; known only if both files have the same type.
    same_xattrs: bool,
}

/// Lists a segment's directory, together with the guest's entries of the same names.
fn entries(segment: &OwnedFd, pair: Option<&Pair<'_>>, path: &[u8]) -> Result<Vec<Entry>> {
    let names = tree::names(segment).during(|| format!("reading the segment's {}", shown(path)))?;
    let mut entries = Vec::with_capacity(names.len());
    for name in names {
        let path = join(path, &name);
        let theirs = tree::stat(segment, &name)
            .during(|| format!("looking at the segment's {}", shown(&path)))?;
        let own = pair.map_or(Ok(None), |pair| {
            tree::find(&pair.own, &name)
                .during(|| format!("looking at the guest's {}", shown(&path)))
        })?;
        entries.push(Entry {
            name,
            path,
            theirs,
            own,
            same_xattrs: true,
        });
    }
    if let Some(pair) = pair {
        let of_one_type = |e: &&mut Entry| {
            let own = e.own.as_ref().map(tree::kind);
            own == Some(tree::kind(&e.theirs))
        };
        let mut asked: Vec<&mut Entry> = entries.iter_mut().filter(of_one_type).collect();
        let names: Vec<&CStr> = asked.iter().map(|e| e.name.as_c_str()).collect();
        let same = same_xattrs(pair, path, &names)?;
        for (entry, same) in asked.iter_mut().zip(same) {
            entry.same_xattrs = same;
        }
    }
    Ok(entries)
}

/// Compares extended attributes of the named entries. Refuses overlayfs' own attributes in a
/// segment: such an attribute could make a directory hide the guest's directory, or a file use
/// another file's bytes.
fn same_xattrs(pair: &Pair<'_>, path: &[u8], names: &[&CStr]) -> Result<Vec<bool>> {
    let of = |directory: &OwnedFd| {
        tree::xattrs_of(directory, names.iter().copied())
            .during(|| format!("reading attributes in {}", shown(path)))
    };
    let (theirs, own) = (of(pair.segment)?, of(&pair.own)?);
    for (name, xattrs) in names.iter().zip(&theirs) {
        if let Some(key) = xattrs.keys().find(|k| k.starts_with(tree::OVERLAY_XATTRS)) {
            return Err(Error::refused(
                format!(
                    "the segment's {} has the attribute {}",
                    shown(&join(path, name)),
                    shown(key)
                ),
                "build the segment from files, not from a layer of an overlay",
            ));
        }
    }
    let own = own.into_iter().map(tree::without_overlay);
    Ok(own
        .zip(&theirs)
        .map(|(own, theirs)| own == *theirs)
        .collect())
}

/// Compares the bytes of both files. Drops the guest's own file from the page cache, because the
/// segment's file replaces it from now on.
fn same_bytes(pair: &Pair<'_>, name: &CStr) -> io::Result<bool> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOATIME;
    let own = tree::open_below(&pair.own, name.to_bytes(), flags)?;
    let segment = tree::open_below(pair.segment, name.to_bytes(), flags)?;
    let (mut a, mut b) = (vec![0; PIECE], vec![0; PIECE]);
    let same = loop {
        let n = fill(&own, &mut a)?;
        if n != fill(&segment, &mut b)? || a[..n] != b[..n] {
            break false;
        }
        if n < PIECE {
            break true;
        }
    };
    for file in [&own, &segment] {
        let _ = rustix::fs::fadvise(file, 0, None, Advice::DontNeed);
    }
    Ok(same)
}

fn fill(file: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match rustix::io::read(file, &mut buffer[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(filled)
}

/// Joins a relative path and a name: `a/b` and `c` give `a/b/c`; an empty path gives the name.
pub fn join(directory: &[u8], name: &CStr) -> Vec<u8> {
    let mut path = directory.to_vec();
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend(name.to_bytes());
    path
}

/// Splits a relative path into directory and name: `a/b/c` gives `a/b` and `c`.
pub fn split(path: &[u8]) -> (&[u8], CString) {
    let (parent, name) = match path.iter().rposition(|b| *b == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&path[..0], path),
    };
    (parent, CString::new(name).unwrap_or_default())
}
