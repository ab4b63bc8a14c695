//! Tests of copies: what is kept, what is refused, and that a failed copy leaves nothing behind.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use memfold_copy::{CopyError, Destination, Summary, pack, unpack};
use tar::{Builder, EntryType, Header};
use tempfile::TempDir;

fn packed(source: &Path) -> Vec<u8> {
    let mut archive = Vec::new();
    pack(source, &mut archive).unwrap();
    archive
}

fn to(name: &str, destination: &Path) -> Destination {
    Destination::new(OsStr::new(name), destination).unwrap()
}

/// Makes a file with the given permission bits and modification time.
fn file(path: PathBuf, content: &[u8], mode: u32, mtime: u64) -> PathBuf {
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    let time = UNIX_EPOCH + Duration::from_secs(mtime);
    File::open(&path).unwrap().set_modified(time).unwrap();
    path
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// An entry of an archive: name, kind, link text, content.
type Chosen<'a> = (&'a str, EntryType, &'a str, &'a [u8]);

/// An archive whose entries a test chooses.
fn archive(entries: &[Chosen<'_>]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (name, kind, link, content) in entries {
        let mut header = Header::new_gnu();
        // The library refuses such names, so the bytes are written directly.
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(*kind);
        header.set_mode(0o4755);
        header.set_mtime(7);
        header.set_size(content.len() as u64);
        header.set_cksum();
        builder.append(&header, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

const TOP: Chosen<'static> = ("content", EntryType::Directory, "", b"");
const END: Chosen<'static> = ("end", EntryType::Regular, "", b"");

#[test]
fn a_copied_tree_has_the_same_contents_permission_bits_times_and_links() {
    let place = TempDir::new().unwrap();
    let tree = place.path().join("tree");
    let long = "n".repeat(200);
    let deep = tree.join(&long).join(&long);
    fs::create_dir_all(&deep).unwrap();
    file(tree.join("run"), b"#!/bin/sh\n", 0o751, 1_000_000_000);
    file(deep.join("data"), &vec![7; 300_000], 0o600, 5);
    fs::create_dir(tree.join("empty")).unwrap();
    fs::set_permissions(tree.join("empty"), Permissions::from_mode(0o700)).unwrap();
    symlink("../nowhere", tree.join("link")).unwrap();
    symlink("t".repeat(300), tree.join("long-link")).unwrap();
    let time = UNIX_EPOCH + Duration::from_secs(99);
    File::open(&tree).unwrap().set_modified(time).unwrap();

    let bytes = packed(&tree);
    let destination = to("copy", &place.path().join("")); // ends with a slash
    let summary = unpack(&bytes[..], &destination).unwrap();
    let expected = Summary {
        files: 2,
        directories: 4,
        links: 2,
        bytes: 300_010,
    };
    assert_eq!(summary, expected);
    let copy = place.path().join("copy");
    assert_eq!(destination.path(), copy);
    let found = fs::metadata(copy.join("run")).unwrap();
    assert_eq!(
        (found.mode() & 0o7777, found.mtime()),
        (0o751, 1_000_000_000)
    );
    let data = copy.join(&long).join(&long).join("data");
    assert_eq!(fs::read(&data).unwrap(), vec![7; 300_000]);
    assert_eq!(fs::metadata(&data).unwrap().mode() & 0o7777, 0o600);
    assert_eq!(
        fs::metadata(copy.join("empty")).unwrap().mode() & 0o7777,
        0o700
    );
    assert_eq!(fs::metadata(&copy).unwrap().mtime(), 99);
    let links = ["link", "long-link"].map(|name| fs::read_link(copy.join(name)).unwrap());
    assert_eq!(
        links,
        [PathBuf::from("../nowhere"), PathBuf::from("t".repeat(300))]
    );
    assert_eq!(names(place.path()), ["copy", "tree"]);
}

#[test]
fn a_copied_file_replaces_a_file_but_neither_a_file_nor_a_directory_replaces_a_directory() {
    let place = TempDir::new().unwrap();
    let old = file(place.path().join("old"), b"old", 0o644, 1);
    let new = file(place.path().join("new"), b"new", 0o640, 2);
    unpack(&packed(&new)[..], &to("new", &old)).unwrap();
    assert_eq!(fs::read(&old).unwrap(), b"new");
    assert_eq!(fs::metadata(&old).unwrap().mode() & 0o7777, 0o640);

    let directory = place.path().join("directory");
    fs::create_dir_all(directory.join("new")).unwrap();
    let destination = to("new", &directory);
    let error = unpack(&packed(&new)[..], &destination).unwrap_err();
    assert!(matches!(error, CopyError::Exists(_)), "{error}");
    let error = unpack(&packed(&directory)[..], &destination).unwrap_err();
    assert!(matches!(error, CopyError::Exists(_)), "{error}");
    let error = unpack(&packed(&directory)[..], &to("x", &old)).unwrap_err();
    assert!(matches!(error, CopyError::NoDirectory(_)), "{error}");
    assert_eq!(names(place.path()), ["directory", "new", "old"]);
    assert_eq!(names(&directory), ["new"]);
}

#[test]
fn a_copy_that_is_cut_short_anywhere_leaves_nothing_behind() {
    let place = TempDir::new().unwrap();
    let tree = place.path().join("tree");
    fs::create_dir(&tree).unwrap();
    file(tree.join("one"), &[1; 700], 0o644, 1);
    file(tree.join("two"), &[2; 10], 0o644, 1);
    let bytes = packed(&tree);
    let into = place.path().join("into");
    fs::create_dir(&into).unwrap();
    // The header of the last entry begins three blocks before the end.
    let cuts = (0..bytes.len() - 3 * 512).step_by(128);
    for cut in cuts {
        let error = unpack(&bytes[..cut], &to("tree", &into)).unwrap_err();
        let is_cut = matches!(error, CopyError::Cut | CopyError::Read(_));
        assert!(is_cut, "after {cut} bytes: {error}");
        assert_eq!(names(&into), [""; 0]);
    }
    unpack(&bytes[..], &to("tree", &into)).unwrap();
    assert_eq!(names(&into), ["tree"]);
}

/// Returns the archive of a tree whose deepest path has this many components.
fn deep(components: usize) -> Vec<u8> {
    let name = |components: usize| ["content", &"/d".repeat(components - 1)].concat();
    let mut builder = Builder::new(Vec::new());
    for components in 1..=components {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Directory);
        header.set_mode(0o755);
        header.set_mtime(7);
        header.set_size(0);
        let added = builder.append_data(&mut header, name(components), &[][..]);
        added.unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn a_tree_of_many_nested_directories_is_refused_and_leaves_nothing_behind() {
    let place = TempDir::new().unwrap();
    let into = place.path().join("into");
    fs::create_dir(&into).unwrap();
    // Without its last entry, the archive is cut off.
    let error = unpack(&deep(1900)[..], &to("tree", &into)).unwrap_err();
    assert!(matches!(error, CopyError::Deep), "{error}");
    assert_eq!(names(&into), [""; 0]);
    let error = unpack(&deep(256)[..], &to("tree", &into)).unwrap_err();
    assert!(
        matches!(error, CopyError::Cut | CopyError::Read(_)),
        "{error}"
    );
    assert_eq!(names(&into), [""; 0]);
    // The top is a component, too.
    let tree = place.path().join("tree");
    fs::create_dir_all(tree.join("d/".repeat(255))).unwrap();
    unpack(&packed(&tree)[..], &to("tree", &into)).unwrap();
    fs::create_dir(tree.join("d/".repeat(256))).unwrap();
    let error = pack(&tree, Vec::new()).unwrap_err();
    assert!(matches!(error, CopyError::Deep), "{error}");
}

/// An archive whose reader makes the directory of the copies unwritable, and then ends.
struct Closes<'a>(&'a [u8], &'a Path);

impl std::io::Read for Closes<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.0.read(buffer)?;
        if read == 0 {
            fs::set_permissions(self.1, Permissions::from_mode(0o555))?;
        }
        Ok(read)
    }
}

#[test]
fn a_temporary_directory_that_cannot_be_removed_is_named_in_the_error() {
    let place = TempDir::new().unwrap();
    let into = place.path().join("into");
    fs::create_dir(&into).unwrap();
    let bytes = archive(&[TOP]);
    let destination = to("tree", &into);
    let error = as_user(|| unpack(Closes(&bytes[..512], &into), &destination)).unwrap_err();
    let left = names(&into);
    fs::set_permissions(&into, Permissions::from_mode(0o755)).unwrap();
    assert_eq!(left.len(), 1);
    assert!(matches!(&error, CopyError::Left { path, .. } if *path == into.join(&left[0])));
    assert!(error.to_string().contains("remove it by hand"), "{error}");
}

#[test]
fn a_hostile_archive_writes_nothing_outside_its_destination() {
    let place = TempDir::new().unwrap();
    let into = place.path().join("into");
    fs::create_dir(&into).unwrap();
    let outside = place.path().join("outside");
    let outside_text = outside.to_str().unwrap();
    let (plain, link) = (EntryType::Regular, EntryType::Symlink);
    let here = place.path().to_str().unwrap();
    let cases: [&[Chosen<'_>]; 14] = [
        &[TOP, ("/etc/evil", plain, "", b"x"), END],
        &[TOP, ("../outside", plain, "", b"x"), END],
        &[TOP, ("content/../../outside", plain, "", b"x"), END],
        &[TOP, ("other", plain, "", b"x"), END],
        // The file would be written through the link.
        &[
            TOP,
            ("content/a", link, "..", b""),
            ("content/a/outside", plain, "", b"x"),
            END,
        ],
        // Links are made last: the second would be made through the first.
        &[
            TOP,
            ("content/a", link, here, b""),
            ("content/a/outside", link, "/etc/passwd", b""),
            END,
        ],
        &[
            TOP,
            ("content/a/outside", link, "/etc/passwd", b""),
            ("content/a", link, here, b""),
            END,
        ],
        &[
            TOP,
            ("content/a", link, outside_text, b""),
            ("content/a", plain, "", b"x"),
            END,
        ],
        &[
            ("content", link, outside_text, b""),
            ("content/x", plain, "", b"x"),
            END,
        ],
        &[TOP, ("content/a", EntryType::Link, "/etc/passwd", b""), END],
        &[TOP, ("content/a", EntryType::Block, "", b""), END],
        &[TOP, ("content/a", EntryType::Fifo, "", b""), END],
        &[
            TOP,
            ("content/a", plain, "", b"x"),
            ("content/a", plain, "", b"y"),
            END,
        ],
        &[TOP, END, ("content/late", plain, "", b"x")],
    ];
    for case in cases {
        let bytes = archive(case);
        let error = unpack(&bytes[..], &to("copy", &into)).unwrap_err();
        assert_eq!(names(place.path()), ["into"], "{case:?}: {error}");
        assert_eq!(names(&into), [""; 0], "{case:?}: {error}");
    }
    // Set-user-ID bits are dropped.
    let bytes = archive(&[TOP, ("content/a", plain, "", b"x"), END]);
    unpack(&bytes[..], &to("copy", &into)).unwrap();
    let found = fs::metadata(into.join("copy/a")).unwrap();
    assert_eq!(found.mode() & 0o7777, 0o755);
}

#[test]
fn a_directory_that_its_owner_replaces_by_a_link_during_the_copy_is_not_followed() {
    /// Puts a link to `private` in the place of `tree/sub` when the first file is written.
    struct Swap {
        place: PathBuf,
        written: Vec<u8>,
    }
    impl std::io::Write for Swap {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.written.extend_from_slice(bytes);
            if bytes.ends_with(b"first") {
                let sub = self.place.join("tree/sub");
                fs::rename(&sub, self.place.join("moved"))?;
                symlink(self.place.join("private"), sub)?;
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let directory = TempDir::new().unwrap();
    let place = directory.path();
    for name in ["private", "tree", "tree/sub"] {
        fs::create_dir(place.join(name)).unwrap();
    }
    file(place.join("tree/sub/1"), b"first", 0o644, 1);
    file(place.join("tree/sub/2"), b"second", 0o644, 1);
    file(place.join("private/2"), b"secret", 0o600, 1);
    let mut out = Swap {
        place: place.to_owned(),
        written: Vec::new(),
    };
    pack(&place.join("tree"), &mut out).unwrap();
    assert_eq!(fs::read(place.join("tree/sub/2")).unwrap(), b"secret");
    let text = String::from_utf8_lossy(&out.written);
    assert!(
        text.contains("second") && !text.contains("secret"),
        "{text}"
    );
}

#[test]
fn a_path_that_is_longer_than_any_path_is_refused_before_it_is_read() {
    let place = TempDir::new().unwrap();
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::GNULongName);
    header.set_size(1 << 40);
    header.set_cksum();
    let bytes = header.as_bytes().to_vec();
    let endless = std::io::Read::chain(&bytes[..], std::io::repeat(b'a'));
    let error = unpack(endless, &to("copy", place.path())).unwrap_err();
    assert!(matches!(error, CopyError::Archive(_)), "{error}");
}

#[test]
fn a_directory_with_a_pipe_is_not_copied_and_the_error_names_the_pipe() {
    let place = TempDir::new().unwrap();
    let pipe = place.path().join("pipe");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let kind = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
    let error = pack(place.path(), std::io::sink()).unwrap_err();
    assert!(error.to_string().contains("pipe is neither"), "{error}");
}

/// Does work in a thread that has no rights of root over files, as a user has none.
fn as_user<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
    let none = CapabilitySet::empty();
    let sets = CapabilitySets {
        effective: none,
        permitted: none,
        inheritable: none,
    };
    let work = || {
        set_capabilities(None, sets).unwrap();
        work()
    };
    std::thread::scope(|scope| scope.spawn(work).join().unwrap())
}

#[test]
fn a_user_can_copy_a_directory_that_its_owner_may_not_write_and_a_failed_copy_is_removed() {
    let place = TempDir::new().unwrap();
    let tree = place.path().join("tree");
    fs::create_dir_all(tree.join("below")).unwrap();
    file(tree.join("below/one"), b"one", 0o444, 1);
    for directory in [tree.join("below"), tree.clone()] {
        fs::set_permissions(&directory, Permissions::from_mode(0o555)).unwrap();
    }
    let bytes = packed(&tree);
    let into = place.path().join("into");
    fs::create_dir(&into).unwrap();
    let destination = to("tree", &into);
    // Another copy gets the name meanwhile.
    fs::create_dir(into.join("tree")).unwrap();
    let error = as_user(|| unpack(&bytes[..], &destination)).unwrap_err();
    assert!(error.to_string().contains("rename"), "{error}");
    assert_eq!(names(&into), ["tree"]);
    fs::remove_dir(into.join("tree")).unwrap();
    as_user(|| unpack(&bytes[..], &destination)).unwrap();
    for path in ["tree", "tree/below"] {
        assert_eq!(fs::metadata(into.join(path)).unwrap().mode() & 0o777, 0o555);
    }
    assert_eq!(fs::read(into.join("tree/below/one")).unwrap(), b"one");
    // So that the test's directory can be removed.
    for path in [into.join("tree"), tree] {
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(path.join("below"), Permissions::from_mode(0o755)).unwrap();
    }
}

#[test]
fn an_archive_whose_links_need_much_memory_is_refused() {
    let place = TempDir::new().unwrap();
    let mut builder = Builder::new(Vec::new());
    let mut header = Header::new_gnu();
    let mut append = |kind, name: &str, link: &str| {
        header.set_entry_type(kind);
        header.set_mode(0o755);
        header.set_mtime(7);
        header.set_size(0);
        match kind {
            EntryType::Symlink => builder.append_link(&mut header, name, link).unwrap(),
            _ => builder
                .append_data(&mut header, name, std::io::empty())
                .unwrap(),
        }
    };
    append(EntryType::Directory, "content", "");
    let text = "a".repeat(4000);
    for number in 0..17_000 {
        append(EntryType::Symlink, &format!("content/{number}"), &text);
    }
    let bytes = builder.into_inner().unwrap();
    let error = unpack(&bytes[..], &to("copy", place.path())).unwrap_err();
    assert!(error.to_string().contains("64 MiB of memory"), "{error}");
    assert_eq!(names(place.path()), [""; 0]);
}

#[test]
fn a_destination_without_a_directory_or_a_name_is_refused() {
    let place = TempDir::new().unwrap();
    let missing = place.path().join("missing/copy");
    let error = Destination::new(OsStr::new("x"), &missing).unwrap_err();
    assert!(matches!(error, CopyError::File { .. }), "{error}");
    for name in ["", "..", "a/b", "."] {
        let error = Destination::new(OsStr::new(name), place.path()).unwrap_err();
        assert!(matches!(error, CopyError::NoName(_)), "{name}: {error}");
    }
    let error = Destination::new(OsStr::new("x"), Path::new("/dev/null/x")).unwrap_err();
    assert!(
        matches!(error, CopyError::NoDirectory(_) | CopyError::File { .. }),
        "{error}"
    );
}
