//! Chooses the files that a segment will contain, copies them to a build directory, and computes a
//! digest of the copies.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use memfold_host::progress::Progress;
use memfold_store::data_ranges;
use rustix::fs::{AtFlags, CWD, FileType, Timespec, Timestamps, XattrFlags};

use super::error::SegmentError;
use super::tools::{CopyRoom, check_room};

/// Default glob patterns of the files in a segment, for guests that have their own root file
/// system.
pub const PROGRAMS: [&str; 2] = ["/usr/**", "/opt/**"];

/// Names of the extended attributes that are copied with a segment's files: those that the kernel
/// evaluates when a file is used.
pub const ATTRIBUTES: [&str; 3] = [
    "security.capability",
    "system.posix_acl_access",
    "system.posix_acl_default",
];

/// Longest value of an extended attribute (`XATTR_SIZE_MAX`).
const MAX_ATTRIBUTE: usize = 64 << 10;

/// Number of bytes that are copied at once.
const PIECE: usize = 1 << 20;

/// Bytes of a hole for the digest.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// Choice of the files to copy into a segment, by their paths in guests, which begin with a slash.
#[derive(Debug)]
pub struct Filter {
    include: GlobSet,
    exclude: GlobSet,
    /// If set, the only regular files that are chosen.
    only: Option<std::collections::BTreeSet<Vec<u8>>>,
}

impl Filter {
    /// Creates a filter that chooses the paths that match a glob pattern in `include` and none in
    /// `exclude`. Without `include` patterns, every path matches.
    pub fn new(include: &[String], exclude: &[String]) -> Result<Self, SegmentError> {
        let all = ["/**".to_owned()];
        let include = if include.is_empty() { &all } else { include };
        Ok(Self {
            include: globs(include)?,
            exclude: globs(exclude)?,
            only: None,
        })
    }

    /// Restricts the filter to those regular files that are in `paths`, each beginning with a
    /// slash. Other kinds of entries are not affected.
    #[must_use]
    pub fn only(mut self, paths: impl IntoIterator<Item = Vec<u8>>) -> Self {
        self.only = Some(paths.into_iter().collect());
        self
    }

    fn wants(&self, path: &Path, is_file: bool) -> bool {
        let only = self.only.as_ref().filter(|_| is_file);
        self.include.is_match(path)
            && !self.exclude.is_match(path)
            && only.is_none_or(|only| only.contains(path.as_os_str().as_bytes()))
    }
}

/// Compiles glob patterns of guest paths, each beginning with a slash. Fails if a pattern is
/// invalid.
pub fn globs(texts: &[String]) -> Result<GlobSet, SegmentError> {
    let mut set = GlobSetBuilder::new();
    for text in texts {
        let bad = |why: &str| SegmentError::Name(format!("'{text}' is not a glob of paths: {why}"));
        if !text.starts_with('/') {
            return Err(bad("a glob begins with a slash, as in '/usr/lib/**'"));
        }
        let glob = GlobBuilder::new(text).literal_separator(true).build();
        set.add(glob.map_err(|error| bad(&error.to_string()))?);
    }
    set.build()
        .map_err(|error| SegmentError::Name(error.to_string()))
}

/// One entry of the chosen tree.
#[derive(Clone, Debug)]
struct Entry {
    /// Path of the entry, relative to the tree's root.
    path: PathBuf,
    facts: fs::Metadata,
}

/// The files and directories below a root that a filter has chosen for a segment.
#[derive(Debug)]
pub struct Tree {
    root: PathBuf,
    /// The chosen entries, sorted by path: a directory comes before its contents.
    entries: Vec<Entry>,
}

/// Digest and size of the files that were copied for a segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// BLAKE3 digest of all copied files and directories, 64 hexadecimal digits.
    pub digest: String,
    /// Number of copied regular files; a file with several names counts once for each name.
    pub files: u64,
    /// Total size of the copied regular files in bytes; a file with several names counts once.
    pub bytes: u64,
}

impl Tree {
    /// Chooses the files below `root` that `filter` matches, and the directories that contain them.
    /// With `everything`, also chooses empty directories that the filter matches.
    pub fn choose(root: &Path, filter: &Filter, everything: bool) -> io::Result<Self> {
        let mut entries = Vec::new();
        walk(root, Path::new(""), filter, everything, &mut entries)?;
        // The entries are sorted by bytes, because the order in the file system must not influence
        // the build.
        entries.sort_by(|a, b| a.path.as_os_str().cmp(b.path.as_os_str()));
        let root = root.to_owned();
        Ok(Self { root, entries })
    }

    /// Returns whether the tree has no files, but only directories or nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.iter().all(|entry| entry.facts.is_dir())
    }

    /// Returns the paths of the tree's top directories, each beginning with a slash.
    #[must_use]
    pub fn tops(&self) -> Vec<String> {
        let directories = self.entries.iter().filter(|entry| entry.facts.is_dir());
        directories
            .filter(|entry| entry.path.components().count() == 1)
            .filter_map(|entry| Some(format!("/{}", entry.path.to_str()?)))
            .collect()
    }

    /// Returns the total size of the chosen regular files in bytes; a file with several names
    /// counts once.
    fn bytes(&self) -> u64 {
        let mut seen = HashSet::new();
        let files = self.entries.iter().map(|entry| &entry.facts);
        let distinct = files.filter(|facts| {
            facts.is_file() && (facts.nlink() == 1 || seen.insert((facts.dev(), facts.ino())))
        });
        distinct.fold(0_u64, |sum, facts| sum.saturating_add(facts.len()))
    }

    /// Copies the chosen files into the empty directory `to`, with owners, modes, times, links,
    /// holes and the extended attributes that the kernel evaluates. Returns the digest and size of
    /// the copied files. Fails before the file system of `to` has less than a reserve left, and at
    /// once if an image of the files cannot fit there: an image has no holes.
    pub fn copy(&self, to: &Path, progress: &Progress) -> io::Result<Contents> {
        let bytes = self.bytes();
        check_room(to, bytes)?;
        progress.begin("files copied", bytes);
        let mut room = CopyRoom::new(to);
        let mut sum = blake3::Hasher::new();
        let mut contents = Contents::default();
        let mut first_names: HashMap<(u64, u64), PathBuf> = HashMap::new();
        for entry in &self.entries {
            let (from, place) = (self.root.join(&entry.path), to.join(&entry.path));
            // If a disk is full, it is that of the copy, so the error names the copy.
            let at = |error: io::Error| {
                let file = if is_full(&error) { &place } else { &from };
                io::Error::new(error.kind(), format!("{}: {error}", file.display()))
            };
            note(&mut sum, entry);
            let facts = &entry.facts;
            if facts.is_dir() {
                fs::create_dir(&place).map_err(at)?;
            } else if facts.is_file() {
                contents.files += 1;
                if facts.nlink() > 1 {
                    let inode = (facts.dev(), facts.ino());
                    if let Some(first) = first_names.get(&inode) {
                        sum.update(b"=").update(first.as_os_str().as_bytes());
                        fs::hard_link(to.join(first), &place).map_err(at)?;
                        continue;
                    }
                    first_names.insert(inode, entry.path.clone());
                }
                contents.bytes += copy_file(
                    (from.as_path(), place.as_path()),
                    &mut room,
                    &mut sum,
                    progress,
                )
                .map_err(at)?;
            } else if facts.is_symlink() {
                let target = fs::read_link(&from).map_err(at)?;
                sum.update(target.as_os_str().as_bytes());
                std::os::unix::fs::symlink(target, &place).map_err(at)?;
            } else {
                let kind = FileType::from_raw_mode(facts.mode());
                let mode = rustix::fs::Mode::from_raw_mode(facts.mode() & 0o7777);
                sum.update(&facts.rdev().to_le_bytes());
                rustix::fs::mknodat(CWD, &place, kind, mode, facts.rdev())
                    .map_err(|errno| at(errno.into()))?;
            }
            attributes(&from, &place, entry, &mut sum).map_err(at)?;
        }
        // Times are set last, and from the deepest directory up, because creating an entry changes
        // its directory's time.
        for entry in self.entries.iter().rev() {
            let time = Timespec {
                tv_sec: entry.facts.mtime(),
                tv_nsec: entry.facts.mtime_nsec(),
            };
            set_times(&to.join(&entry.path), time)?;
        }
        contents.digest = sum.finalize().to_hex().to_string();
        Ok(contents)
    }
}

fn walk(
    root: &Path,
    below: &Path,
    filter: &Filter,
    everything: bool,
    entries: &mut Vec<Entry>,
) -> io::Result<()> {
    let place = root.join(below);
    let named =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", place.display()));
    for entry in fs::read_dir(&place).map_err(named)? {
        let entry = entry.map_err(named)?;
        let path = below.join(entry.file_name());
        let facts = entry.metadata().map_err(named)?;
        let seen = Path::new("/").join(&path);
        if facts.file_type().is_socket() {
            continue;
        }
        if facts.is_dir() {
            let before = entries.len();
            let below = path.clone();
            entries.push(Entry { path, facts });
            walk(root, &below, filter, everything, entries)?;
            let is_used = entries.len() > before + 1;
            if !(is_used || everything && filter.wants(&seen, false)) {
                entries.truncate(before);
            }
        } else if filter.wants(&seen, facts.is_file()) {
            entries.push(Entry { path, facts });
        }
    }
    Ok(())
}

/// Adds an entry's facts, except its bytes, to the sum, so that no two different trees give the
/// same sum.
fn note(sum: &mut blake3::Hasher, entry: &Entry) {
    let facts = &entry.facts;
    let path = entry.path.as_os_str().as_bytes();
    sum.update(&(path.len() as u64).to_le_bytes()).update(path);
    for number in [facts.mode(), facts.uid(), facts.gid()] {
        sum.update(&number.to_le_bytes());
    }
    // The length of a directory or a link depends on its file system, so it is not added.
    if facts.is_file() {
        sum.update(&facts.len().to_le_bytes());
    }
    for number in [facts.mtime(), facts.mtime_nsec()] {
        sum.update(&number.to_le_bytes());
    }
}

/// Returns whether an error says that the disk is full or a quota is exceeded.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Copies the bytes of a file, but not its holes, and adds the bytes to a sum, holes as zeroes.
/// Returns the length of the copy.
fn copy_file(
    (from, to): (&Path, &Path),
    room: &mut CopyRoom<'_>,
    sum: &mut blake3::Hasher,
    progress: &Progress,
) -> io::Result<u64> {
    let nofollow = i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).unwrap_or(0);
    let from = File::options()
        .read(true)
        .custom_flags(nofollow)
        .open(from)?;
    let to = File::options().write(true).create_new(true).open(to)?;
    let (mut piece, mut done) = (vec![0; PIECE], 0);
    for data in data_ranges(&from)? {
        sum_up_hole(data.start - done, sum, progress);
        done = data.start;
        while done < data.end {
            let most = usize::try_from(data.end - done).unwrap_or(PIECE).min(PIECE);
            let length = from.read_at(&mut piece[..most], done)?;
            if length == 0 {
                // Somebody has shortened the file.
                break;
            }
            room.take(length as u64)?;
            to.write_all_at(&piece[..length], done)?;
            sum.update(&piece[..length]);
            done += length as u64;
            progress.add(length as u64);
        }
    }
    // Somebody may have lengthened or shortened the file.
    let length = from.metadata()?.len().max(done);
    sum_up_hole(length - done, sum, progress);
    to.set_len(length)?;
    Ok(length)
}

/// Adds so many zeroes to a sum.
fn sum_up_hole(mut bytes: u64, sum: &mut blake3::Hasher, progress: &Progress) {
    progress.add(bytes);
    while bytes > 0 {
        let length = usize::try_from(bytes).map_or(ZEROES.len(), |bytes| bytes.min(ZEROES.len()));
        sum.update(&ZEROES[..length]);
        bytes -= length as u64;
    }
}

/// Adds the bytes of a file to a sum.
pub(super) fn sum_up(
    file: &mut File,
    sum: &mut blake3::Hasher,
    progress: &Progress,
) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        let length = file.read(&mut piece)?;
        if length == 0 {
            return Ok(());
        }
        sum.update(&piece[..length]);
        progress.add(length as u64);
    }
}

/// Copies owner, mode and extended attributes of an entry.
fn attributes(from: &Path, to: &Path, entry: &Entry, sum: &mut blake3::Hasher) -> io::Result<()> {
    let facts = &entry.facts;
    std::os::unix::fs::lchown(to, Some(facts.uid()), Some(facts.gid()))?;
    if facts.is_symlink() {
        return Ok(());
    }
    // The mode is set after the owner, whose change clears set-user-ID and capabilities.
    fs::set_permissions(to, fs::Permissions::from_mode(facts.mode() & 0o7777))?;
    for name in ATTRIBUTES {
        let mut value = vec![0; MAX_ATTRIBUTE];
        match rustix::fs::lgetxattr(from, name, &mut value[..]) {
            Ok(length) => {
                value.truncate(length);
                sum.update(name.as_bytes())
                    .update(&(length as u64).to_le_bytes())
                    .update(&value);
                rustix::fs::lsetxattr(to, name, &value, XattrFlags::empty())?;
            }
            Err(rustix::io::Errno::NODATA | rustix::io::Errno::NOTSUP) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Sets access and modification time of an entry. For a link, sets those of the link itself.
pub(super) fn set_times(place: &Path, time: Timespec) -> io::Result<()> {
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    rustix::fs::utimensat(CWD, place, &times, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::small_disk::SmallDisk;

    fn filled(root: &Path) {
        fs::create_dir_all(root.join("usr/lib/empty")).unwrap();
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::write(root.join("usr/lib/a.so"), vec![7; 5000]).unwrap();
        fs::hard_link(root.join("usr/lib/a.so"), root.join("usr/lib/b.so")).unwrap();
        std::os::unix::fs::symlink("a.so", root.join("usr/lib/c.so")).unwrap();
        fs::write(root.join("etc/passwd"), "x").unwrap();
        fs::set_permissions(
            root.join("usr/lib/a.so"),
            fs::Permissions::from_mode(0o4755),
        )
        .unwrap();
        for path in [
            "usr/lib/a.so",
            "usr/lib/c.so",
            "usr/lib",
            "usr",
            "etc/passwd",
            "etc",
        ] {
            let time = Timespec {
                tv_sec: 1000,
                tv_nsec: 5,
            };
            set_times(&root.join(path), time).unwrap();
        }
    }

    fn built(root: &Path, include: &[&str]) -> (tempfile::TempDir, Contents, Tree) {
        let include: Vec<String> = include.iter().map(ToString::to_string).collect();
        let filter = Filter::new(&include, &[]).unwrap();
        let tree = Tree::choose(root, &filter, false).unwrap();
        let to = tempfile::tempdir().unwrap();
        let contents = tree.copy(to.path(), &Progress::default()).unwrap();
        (to, contents, tree)
    }

    #[test]
    fn the_file_tree_for_a_segment_has_the_chosen_files_with_their_modes_times_and_links() {
        let from = tempfile::tempdir().unwrap();
        filled(from.path());
        let (to, contents, tree) = built(from.path(), &["/usr/**"]);
        assert_eq!((contents.files, contents.bytes), (2, 5000));
        assert_eq!(tree.tops(), ["/usr"]);
        assert!(!to.path().join("etc").exists() && !to.path().join("usr/lib/empty").exists());
        let a = fs::metadata(to.path().join("usr/lib/a.so")).unwrap();
        let b = fs::metadata(to.path().join("usr/lib/b.so")).unwrap();
        assert_eq!((a.ino(), a.mode() & 0o7777), (b.ino(), 0o4755));
        assert_eq!((a.mtime(), a.mtime_nsec()), (1000, 5));
        let directory = fs::metadata(to.path().join("usr/lib")).unwrap();
        assert_eq!(directory.mtime(), 1000);
        assert_eq!(
            fs::read_link(to.path().join("usr/lib/c.so")).unwrap(),
            Path::new("a.so")
        );
    }

    #[test]
    fn equal_file_trees_have_the_same_digest_and_a_changed_file_tree_has_another_digest() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        filled(one.path());
        filled(two.path());
        let digest = |root: &Path| built(root, &["/usr/**"]).1.digest;
        let first = digest(one.path());
        assert_eq!(first, digest(two.path()));
        fs::write(two.path().join("etc/passwd"), "other").unwrap();
        assert_eq!(
            first,
            digest(two.path()),
            "what was not chosen does not count"
        );
        let c = two.path().join("usr/lib/c.so");
        let time = Timespec {
            tv_sec: 1001,
            tv_nsec: 5,
        };
        set_times(&c, time).unwrap();
        assert_ne!(first, digest(two.path()));
    }

    #[test]
    fn the_copy_of_a_sparse_file_keeps_the_holes_and_has_the_digest_of_the_whole_bytes() {
        let (sparse, whole) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut bytes = vec![0_u8; 8 << 20];
        bytes[3 << 20..][..5000].fill(7);
        fs::write(whole.path().join("file"), &bytes).unwrap();
        let file = File::create(sparse.path().join("file")).unwrap();
        file.write_all_at(&[7; 5000], 3 << 20).unwrap();
        file.set_len(8 << 20).unwrap();
        let digests = [&sparse, &whole].map(|root| {
            let time = Timespec {
                tv_sec: 1000,
                tv_nsec: 0,
            };
            set_times(&root.path().join("file"), time).unwrap();
            let (to, contents, _) = built(root.path(), &["/**"]);
            let copy = to.path().join("file");
            assert!(fs::read(&copy).unwrap() == bytes, "the copy differs");
            (contents, fs::metadata(&copy).unwrap().blocks())
        });
        let [(sparse, blocks), (whole, _)] = digests;
        assert_eq!((&sparse.digest, sparse.bytes), (&whole.digest, 8 << 20));
        // Half of the file, in blocks of 512 bytes.
        assert!(blocks < 8192, "{blocks} blocks");
    }

    #[test]
    fn files_that_do_not_fit_above_the_reserve_are_not_copied_at_all() {
        let Some(disk) = SmallDisk::mount() else {
            memfold_testkit::skip!("no right to mount a file system");
        };
        let from = tempfile::tempdir().unwrap();
        for name in ["a", "b"] {
            // The copies would take no room, because the files are only holes. The image would.
            let file = File::create(from.path().join(name)).unwrap();
            file.set_len(1 << 40).unwrap();
        }
        let filter = Filter::new(&[], &[]).unwrap();
        let tree = Tree::choose(from.path(), &filter, false).unwrap();
        let before = disk.free_bytes();
        let error = tree.copy(disk.path(), &Progress::default()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        let text = error.to_string();
        assert!(text.contains("writing 2.00 TiB would leave"), "{text}");
        assert_eq!(disk.free_bytes(), before);
    }

    #[test]
    fn only_listed_files_and_symbolic_links_of_a_file_tree_are_put_into_a_segment() {
        let from = tempfile::tempdir().unwrap();
        filled(from.path());
        let filter = Filter::new(&[], &[])
            .unwrap()
            .only([b"/usr/lib/b.so".to_vec()]);
        let tree = Tree::choose(from.path(), &filter, false).unwrap();
        let names: Vec<_> = tree
            .entries
            .iter()
            .map(|e| e.path.display().to_string())
            .collect();
        assert_eq!(names, ["usr", "usr/lib", "usr/lib/b.so", "usr/lib/c.so"]);
    }

    #[test]
    fn a_segment_glob_without_a_leading_slash_is_refused() {
        let refusal = |glob: &str| {
            let error = Filter::new(&[glob.to_owned()], &[]).unwrap_err();
            error.to_string()
        };
        assert!(refusal("usr/**").contains("begins with a slash"));
        assert!(!refusal("/usr/[").contains("begins with a slash"));
        Filter::new(&["/usr/**".into()], &[]).unwrap();
    }
}
