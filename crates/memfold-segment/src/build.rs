//! Builds a segment's next image: chooses files, copies them, and packs them into an EROFS image
//! that guests can map. Each image of a segment has a number, its generation. The drawing shows the
//! image's layout in bytes.
//!
//! ```text
//!   byte 0       1024                                                     padded to 2 MiB
//!   | nothing  | superblock | inodes, names | bytes of files, each from the beginning of a page | zeroes |
//! ```
//! Files are neither compressed nor stored inline with their inodes, so that guests can map all
//! their pages directly (DAX). Builds are reproducible: the same files give the same bytes.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use memfold_host::progress::Progress;
use memfold_units::ByteSize;

use super::error::{SegmentError, failed};
use super::manifest::{FORMAT, Manifest};
use super::name::Reference;
use super::rank::Ranked;
use super::shelf::{Draft, IMAGE, Shelf, digest};
use super::source::{EROFS_MAGIC, Source};
use super::tools::{check_room, run_in, tool};
use super::tree::{Filter, PROGRAMS, Tree, is_full};

/// Size of the pieces in which guests add device memory (`SUBSECTION_SIZE` of Linux on x86-64).
const ALIGN: u64 = 2 << 20;

/// Name of the file in the root directory of a segment's image that describes the segment to
/// guests.
pub const MARK: &str = ".memfold-segment";

/// Directories over which guests never mount a segment, because they belong to the guest or its
/// kernel.
const OWN: [&str; 9] = [
    "proc", "sys", "dev", "run", "tmp", "boot", "var", "etc", "root",
];

/// Most directories that a guest mounts a segment over, and longest path of one, in bytes. The
/// agent has the same limits (`segment/manifest.rs` of memfold-agent).
const MAX_LAY: usize = 64;
const MAX_LAY_PATH: usize = 85;

/// Offset of the superblock (`fs/erofs/erofs_fs.h`). The next constants: offsets of its checksum,
/// its features, and the build time.
const SUPERBLOCK: u64 = 1024;
const CHECKSUM: u64 = SUPERBLOCK + 4;
const FEATURES: u64 = SUPERBLOCK + 8;
const BUILT: u64 = SUPERBLOCK + 24;
const BUILT_BYTES: usize = 12;
/// Feature flag `EROFS_FEATURE_COMPAT_SB_CHKSUM`.
const HAS_CHECKSUM: u32 = 1;

/// Request to build the next generation (numbered image) of a segment.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of the segment to build.
    pub name: String,
    /// Trust domain of the segment. Only VMs of this domain may map the image.
    pub domain: String,
    /// Sources of the segment's files: the path of one directory or one image, or any number of
    /// packages (`.deb` files or `package:NAME`).
    pub from: Vec<String>,
    /// Source of the files to record in the manifest, if the files come from a copy that was made
    /// for this build. `None`: the sources of the build are recorded.
    pub origin: Option<String>,
    /// Glob patterns of the guest paths to include, each beginning with a slash. Without patterns,
    /// programs and libraries (`/usr`, `/opt`) are included, or everything for a root file system.
    pub include: Vec<String>,
    /// Glob patterns of the guest paths to exclude, each beginning with a slash; they take
    /// precedence.
    pub exclude: Vec<String>,
    /// Maximum total size of the segment's files, and a ranking of files: only the best ranked
    /// files that fit are included. `None`: all files that match the patterns are included.
    pub top: Option<(ByteSize, Vec<Ranked>)>,
    /// Whether the segment is built to be a VM's root file system.
    pub root: bool,
    /// Whether a copy of the image is kept in memory (tmpfs) while VMs use the segment.
    pub pinned: bool,
}

/// Checks a request as far as that is possible without its sources, which may take long to fetch.
pub fn check(shelf: &Shelf, request: &Request) -> Result<(), SegmentError> {
    begin(shelf, request)?;
    Filter::new(&request.include, &request.exclude)?;
    Ok(())
}

/// Checks the name, the domain and the tool of a build. Returns the segment's name, the tool, and
/// the newest generation.
fn begin(
    shelf: &Shelf,
    request: &Request,
) -> Result<(Reference, PathBuf, Option<Manifest>), SegmentError> {
    let name = Reference::parse(&request.name)?;
    if name.generation.is_some() {
        return Err(SegmentError::Name(format!(
            "'{}' names a generation; a build makes the next one of '{}'",
            request.name, name.name
        )));
    }
    memfold_vm::check_name("domain", &request.domain)
        .map_err(|error| SegmentError::Name(error.to_string()))?;
    let mkfs = tool("mkfs.erofs", "makes EROFS images", "erofs-utils")?;
    let newest = shelf.newest(&name.name)?;
    if let Some(other) = newest.as_ref().filter(|m| m.domain != request.domain) {
        return Err(SegmentError::Name(format!(
            "segment '{}' belongs to trust domain '{}'; build one of another name for '{}'",
            name.name, other.domain, request.domain
        )));
    }
    Ok((name, mkfs, newest))
}

/// Builds a segment's next generation, and returns its manifest with `true`. If the newest
/// generation has the same content, builds nothing and returns that generation's manifest with
/// `false`.
pub fn build(
    shelf: &Shelf,
    request: &Request,
    progress: &Progress,
) -> Result<(Manifest, bool), SegmentError> {
    let (name, mkfs, newest) = begin(shelf, request)?;
    let draft = shelf.draft(&name.name)?;
    let files = draft.path().join("tree");
    fs::create_dir(&files).map_err(failed(&files))?;
    progress.begin("source read", 0);
    let root = open_sources(&request.from, &draft)?;
    let tree = choose(request, &root)?;
    let lay = lay_over(request, &tree)?;
    let contents = tree.copy(&files, progress).map_err(|error| {
        let place = if is_full(&error) { &files } else { &root };
        failed(place)(error)
    })?;
    let is_same = |old: &Manifest| {
        (&old.content, old.root, old.pinned, &old.lay)
            == (&contents.digest, request.root, request.pinned, &lay)
    };
    if let Some(old) = newest.as_ref().filter(|old| is_same(old)) {
        // If the image was damaged since, the generation is built again.
        if shelf.image(&Reference::parse(&old.reference())?).is_ok() {
            return Ok((old.clone(), false));
        }
    }
    let generation = shelf.next_generation(&name.name)?;
    write_mark(&files, &name.name, generation, &lay).map_err(failed(&files))?;
    progress.begin("image made", 0);
    let image = draft.path().join(IMAGE);
    let uuid = uuid(&name.name, generation, &contents.digest);
    let options = ["-U", &uuid, "-E", "noinline_data,force-inode-extended"];
    let mut command = Command::new(mkfs);
    command.arg("--quiet").args(options).args([&image, &files]);
    // The image contains each byte of the files. The check while mkfs.erofs runs comes too late if
    // it writes quickly.
    check_room(draft.path(), contents.bytes).map_err(failed(&image))?;
    run_in("mkfs.erofs", &mut command, draft.path())?;
    let image_bytes = finish(&image).map_err(failed(&image))?;
    let digest = digest(&image, progress).map_err(failed(&image))?;
    let manifest = Manifest {
        format: FORMAT,
        name: name.name,
        generation,
        domain: request.domain.clone(),
        image_bytes,
        digest,
        content: contents.digest,
        files: contents.files,
        content_bytes: contents.bytes,
        lay,
        root: request.root,
        pinned: request.pinned,
        from: match &request.origin {
            Some(origin) => vec![origin.clone()],
            None => request.from.clone(),
        },
        created_s: SystemTime::UNIX_EPOCH
            .elapsed()
            .map_or(0, |time| time.as_secs()),
        memfold: env!("CARGO_PKG_VERSION").to_owned(),
    };
    shelf.publish(&draft, &manifest)?;
    Ok((manifest, true))
}

/// Opens all sources, and returns the root directory of their files.
fn open_sources(from: &[String], draft: &Draft) -> Result<std::path::PathBuf, SegmentError> {
    let sources = from.iter().map(|text| Source::find(text));
    let sources: Vec<Source> = sources.collect::<Result<_, _>>()?;
    let is_package = |s: &Source| matches!(s, Source::Package(_) | Source::PackageFile(_));
    if sources.is_empty() {
        return Err(refused(from, "give a directory, a disk image or packages"));
    }
    if sources.len() > 1 && !sources.iter().all(is_package) {
        return Err(refused(from, "only packages can be given several times"));
    }
    let room = draft.path().join("source");
    fs::create_dir(&room).map_err(failed(&room))?;
    let mut root = room.clone();
    for source in &sources {
        root = source.open(&room)?;
    }
    Ok(root)
}

fn choose(request: &Request, root: &Path) -> Result<Tree, SegmentError> {
    let include: Vec<String> = if request.include.is_empty() && !request.root {
        PROGRAMS.map(String::from).to_vec()
    } else {
        request.include.clone()
    };
    let filter = Filter::new(&include, &request.exclude)?;
    let filter = match &request.top {
        None => filter,
        Some((budget, ranked)) => filter.only(best(ranked, *budget, root)),
    };
    let tree = Tree::choose(root, &filter, request.root).map_err(failed(root))?;
    if tree.is_empty() {
        let (include, exclude) = (include.join(" "), request.exclude.join(" "));
        let or = match request.top {
            Some(_) => ", or no ranked file is among them",
            None => "",
        };
        let why = format!("no file is chosen (include: {include}; exclude: {exclude}){or}");
        return Err(refused(&request.from, why));
    }
    Ok(tree)
}

fn refused(from: &[String], why: impl Into<String>) -> SegmentError {
    SegmentError::Source {
        from: from.join(", "),
        why: why.into(),
    }
}

/// Returns the files with the highest savings per byte of the image that fit into `budget`. Lengths
/// of files are taken from the source, because lengths reported by guests are untrusted. Files
/// missing in the source are left out.
fn best(ranked: &[Ranked], budget: ByteSize, root: &Path) -> Vec<Vec<u8>> {
    let mut left = budget.0;
    let mut taken = Vec::new();
    for file in ranked {
        let facts = fs::symlink_metadata(root.join(file.path.trim_start_matches('/')));
        let Some(facts) = facts.ok().filter(fs::Metadata::is_file) else {
            continue;
        };
        let bytes = facts.len().div_ceil(4096).saturating_mul(4096);
        if file.net_bytes > 0 && bytes <= left {
            left -= bytes;
            taken.push(file.path.clone().into_bytes());
        }
    }
    taken
}

/// Returns the directories over which guests mount the segment: the top directories of the tree,
/// except those that belong to the guest.
fn lay_over(request: &Request, tree: &Tree) -> Result<Vec<String>, SegmentError> {
    if request.root {
        return Ok(Vec::new());
    }
    let mut tops = tree.tops();
    let is_own = |top: &&String| OWN.contains(&top.trim_start_matches('/'));
    if let Some(own) = tops.iter().find(is_own) {
        let why = format!(
            "{own} is each guest's own, so no segment can be laid over it; leave it out (--include '/usr/**'), or build a whole root (--root)"
        );
        return Err(refused(&request.from, why));
    }
    tops.retain(|top| top.len() > 1);
    if let Some(why) = why_guests_refuse(&tops) {
        let fix = "leave the directory out (--include, --exclude), or build a whole root (--root)";
        return Err(refused(&request.from, format!("{why}; {fix}")));
    }
    Ok(tops)
}

/// Returns why guests would refuse to mount a segment over the directories `tops`; `None` if they
/// would not. The agent parses the image's manifest by the same rules (`segment/manifest.rs` of
/// memfold-agent), and refuses the whole segment if one directory breaks them.
fn why_guests_refuse(tops: &[String]) -> Option<String> {
    let separates = |c: char| matches!(c, ':' | ',' | '\\' | '"' | ' ') || c.is_ascii_control();
    for top in tops {
        if top.contains(separates) {
            return Some(format!(
                "guests cannot mount a segment over {top:?}: a directory's name must have no blank, no control character, and none of : , \\ \""
            ));
        }
        if top.len() > MAX_LAY_PATH {
            return Some(format!(
                "guests cannot mount a segment over {top:?}: a directory's path must have at most {MAX_LAY_PATH} bytes"
            ));
        }
    }
    let extra = tops.get(MAX_LAY)?;
    Some(format!(
        "guests mount a segment over at most {MAX_LAY} directories, and the files are in {}, among them {extra:?}",
        tops.len()
    ))
}

/// Writes the mark into `files`, the copied tree. The source may contain a link of the mark's name,
/// and the build runs as root. So the name is removed first: a write through a symbolic link would
/// overwrite a file of the host, and through a hard link another file of the segment.
fn write_mark(files: &Path, name: &str, generation: u32, lay: &[String]) -> io::Result<()> {
    let mut text = format!("format {FORMAT}\nname {name}\ngeneration {generation}\n");
    text.extend(lay.iter().map(|directory| format!("lay {directory}\n")));
    let place = files.join(MARK);
    match fs::remove_file(&place) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut mark = File::options().write(true).create_new(true).open(&place)?;
    mark.write_all(text.as_bytes())?;
    let times = fs::FileTimes::new()
        .set_modified(SystemTime::UNIX_EPOCH)
        .set_accessed(SystemTime::UNIX_EPOCH);
    mark.set_times(times)?;
    // The time of the root directory is that of the build, so it is replaced.
    File::open(files)?.set_times(times)
}

/// Returns a UUID for the file system, derived from all that determines the bytes of the image.
fn uuid(name: &str, generation: u32, content: &str) -> String {
    let sum = blake3::hash(format!("{name}\n{generation}\n{content}").as_bytes());
    let mut uuid = sum.to_hex()[..32].to_owned();
    // The UUID has version 8, "custom" (RFC 9562).
    for at in [12, 16] {
        uuid.replace_range(at..=at, "8");
    }
    for at in [20, 16, 12, 8] {
        uuid.insert(at, '-');
    }
    uuid
}

/// Removes the build time and the checksum from the superblock (the kernel does not need the
/// checksum), and pads the image. Returns the image's length.
fn finish(image: &Path) -> io::Result<u64> {
    let file = File::options().read(true).write(true).open(image)?;
    let mut magic = [0; 4];
    file.read_exact_at(&mut magic, EROFS_MAGIC.0)?;
    if magic != EROFS_MAGIC.1 {
        return Err(io::Error::other("mkfs.erofs made no EROFS image"));
    }
    let mut features = [0; 4];
    file.read_exact_at(&mut features, FEATURES)?;
    let features = u32::from_le_bytes(features) & !HAS_CHECKSUM;
    file.write_all_at(&features.to_le_bytes(), FEATURES)?;
    file.write_all_at(&[0; 4], CHECKSUM)?;
    file.write_all_at(&[0; BUILT_BYTES], BUILT)?;
    let bytes = file.metadata()?.len().next_multiple_of(ALIGN);
    file.set_len(bytes)?;
    file.sync_all()?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::small_disk::SmallDisk;

    fn request(from: &Path) -> Request {
        Request {
            name: "web".into(),
            domain: "blue".into(),
            from: vec![from.display().to_string()],
            origin: None,
            include: Vec::new(),
            exclude: Vec::new(),
            top: None,
            root: false,
            pinned: false,
        }
    }

    fn source() -> tempfile::TempDir {
        let from = tempfile::tempdir().unwrap();
        fs::create_dir_all(from.path().join("usr/bin")).unwrap();
        fs::write(from.path().join("usr/bin/a"), vec![1; 10_000]).unwrap();
        fs::write(from.path().join("usr/bin/b"), vec![2; 3000]).unwrap();
        from
    }

    fn has_mkfs() -> bool {
        let there = memfold_host::files::program("mkfs.erofs").is_some();
        if !there {
            memfold_testkit::report_skip("no mkfs.erofs (package erofs-utils)");
        }
        there
    }

    #[test]
    fn if_a_segment_is_built_twice_from_the_same_files_both_images_are_identical() {
        if !has_mkfs() {
            return;
        }
        let from = source();
        let mut digests = Vec::new();
        for _ in 0..2 {
            let place = tempfile::tempdir().unwrap();
            let shelf = Shelf::open(place.path(), &place.path().join("run"));
            let (manifest, is_new) =
                build(&shelf, &request(from.path()), &Progress::default()).unwrap();
            assert!(is_new);
            assert_eq!((manifest.files, manifest.content_bytes), (2, 13_000));
            assert_eq!(manifest.image_bytes % ALIGN, 0);
            assert_eq!(manifest.lay, ["/usr"]);
            digests.push(manifest.digest);
            shelf.unprotect();
            // The superblock's time has a resolution of one second.
            std::thread::sleep(std::time::Duration::from_millis(1100));
        }
        assert_eq!(digests[0], digests[1]);
    }

    #[test]
    fn a_build_that_would_fill_the_file_system_fails_and_the_next_one_succeeds() {
        if !has_mkfs() {
            return;
        }
        let Some(disk) = SmallDisk::mount() else {
            memfold_testkit::skip!("no right to mount a file system");
        };
        let from = source();
        let shelf = Shelf::open(disk.path(), &disk.path().join("run"));
        // The copy of the shorter file would fit, but not the image beside it.
        for (mib, is_built) in [(63, false), (40, false), (20, true)] {
            fs::write(from.path().join("usr/bin/large"), vec![1; mib << 20]).unwrap();
            let built = build(&shelf, &request(from.path()), &Progress::default());
            assert_eq!(built.is_ok(), is_built, "{mib} MiB: {built:?}");
            if let Err(error) = built {
                let text = memfold_host::chain(&error);
                assert!(
                    text.contains("would leave less than 3.20 MiB free"),
                    "{text}"
                );
            }
        }
        shelf.unprotect();
    }

    #[test]
    fn building_a_segment_again_makes_a_new_generation_only_if_its_files_changed() {
        if !has_mkfs() {
            return;
        }
        let from = source();
        let place = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(place.path(), &place.path().join("run"));
        let build = |request: &Request| super::build(&shelf, request, &Progress::default());
        assert_eq!(build(&request(from.path())).unwrap().0.generation, 1);
        let (same, is_new) = build(&request(from.path())).unwrap();
        assert_eq!((same.generation, is_new), (1, false));
        fs::write(from.path().join("usr/bin/b"), "other").unwrap();
        assert_eq!(build(&request(from.path())).unwrap().0.generation, 2);
        let mut foreign = request(from.path());
        foreign.domain = "red".into();
        assert!(build(&foreign).unwrap_err().to_string().contains("blue"));
        let mut nothing = request(from.path());
        nothing.include = vec!["/nowhere/**".into()];
        assert!(build(&nothing).unwrap_err().to_string().contains("no file"));
        // The failed builds left no files.
        let all = shelf.all().unwrap();
        assert_eq!(all.len(), 2);
        assert!(!place.path().join(".web.draft").exists());
        // A generation's number is never used again, because snapshots and users refer to the
        // generation by this number.
        for manifest in all {
            shelf.remove(&manifest).unwrap();
        }
        assert!(shelf.all().unwrap().is_empty());
        assert_eq!(build(&request(from.path())).unwrap().0.generation, 3);
        shelf.unprotect();
    }

    #[test]
    fn a_segment_that_is_pinned_in_memory_is_copied_to_memory_and_cannot_be_truncated() {
        if !has_mkfs() {
            return;
        }
        let from = source();
        let mut pinned = request(from.path());
        pinned.pinned = true;
        let place = tempfile::tempdir().unwrap();
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        let shelf = Shelf::open(place.path(), &memory.path().join("run"));
        build(&shelf, &pinned, &Progress::default()).unwrap();
        let reference = Reference::parse("web").unwrap();
        let (manifest, image) = shelf.image(&reference).unwrap();
        assert!(image.starts_with(memory.path()));
        // The kernel supports the flag on tmpfs since Linux 6.6.
        if shelf.protection(&manifest) == "immutable" {
            assert!(File::options().write(true).open(&image).is_err());
        }
        shelf.let_go();
        assert!(!image.exists());
        shelf.unprotect();
        // A directory on a disk is not accepted for copies in memory.
        let disk = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let shelf = Shelf::open(place.path(), &disk.path().join("run"));
        let refused = shelf.image(&reference).unwrap_err().to_string();
        assert!(refused.contains("--state"), "{refused}");
        shelf.unprotect();
    }

    #[test]
    fn the_files_that_save_most_are_put_into_a_segment_up_to_its_size() {
        let file = |path: &str, bytes, net| Ranked {
            path: path.into(),
            file_bytes: bytes,
            touched_bytes: bytes,
            vms: 2,
            net_bytes: net,
        };
        let ranked = [
            file("/usr/a", 8192, 8000),
            file("/usr/b", 1 << 20, 500_000),
            file("/usr/c", 100, 90),
            file("/usr/d", 100, -5),
        ];
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("usr")).unwrap();
        for (name, bytes) in [("a", 8192), ("b", 1 << 20), ("c", 100), ("d", 100)] {
            fs::write(root.path().join("usr").join(name), vec![1; bytes]).unwrap();
        }
        let fit = || best(&ranked, ByteSize(16_384), root.path());
        assert_eq!(fit(), [b"/usr/a".to_vec(), b"/usr/c".to_vec()]);
        // The length in the source counts, whatever length guests report.
        fs::write(root.path().join("usr/a"), vec![1; 20_000]).unwrap();
        assert_eq!(fit(), [b"/usr/c".to_vec()]);
        fs::remove_file(root.path().join("usr/c")).unwrap();
        assert!(fit().is_empty());
    }

    #[test]
    fn a_segment_that_would_hide_a_guests_own_directories_is_refused() {
        if !has_mkfs() {
            return;
        }
        let from = source();
        fs::create_dir(from.path().join("etc")).unwrap();
        fs::write(from.path().join("etc/passwd"), "x").unwrap();
        let place = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(place.path(), &place.path().join("run"));
        let mut all = request(from.path());
        all.include = vec!["/**".into()];
        let error = build(&shelf, &all, &Progress::default()).unwrap_err();
        assert!(error.to_string().contains("/etc"), "{error}");
        all.root = true;
        let (manifest, _) = build(&shelf, &all, &Progress::default()).unwrap();
        assert!(manifest.root && manifest.lay.is_empty() && manifest.files == 3);
        shelf.unprotect();
    }

    /// Makes a link to `target`.
    fn link(target: &Path, place: &Path, is_symbolic: bool) {
        let made = if is_symbolic {
            std::os::unix::fs::symlink(target, place)
        } else {
            fs::hard_link(target, place)
        };
        made.unwrap();
    }

    #[test]
    fn a_source_with_a_link_named_like_the_mark_does_not_make_a_build_write_through_the_link() {
        if !has_mkfs() {
            return;
        }
        let outside = tempfile::tempdir().unwrap();
        let canary = outside.path().join("canary");
        fs::write(&canary, "canary").unwrap();
        for is_symbolic in [true, false] {
            let from = source();
            link(&canary, &from.path().join(MARK), is_symbolic);
            let place = tempfile::tempdir().unwrap();
            let shelf = Shelf::open(place.path(), &place.path().join("run"));
            let mut whole = request(from.path());
            whole.root = true;
            build(&shelf, &whole, &Progress::default()).unwrap();
            shelf.unprotect();
            let bytes = fs::read_to_string(&canary).unwrap();
            assert_eq!(bytes, "canary", "symbolic: {is_symbolic}");
        }
    }

    #[test]
    fn the_mark_replaces_a_link_in_the_copied_tree_and_the_links_target_is_unchanged() {
        for is_symbolic in [true, false] {
            let files = tempfile::tempdir().unwrap();
            let (canary, mark) = (files.path().join("canary"), files.path().join(MARK));
            fs::write(&canary, "canary").unwrap();
            link(&canary, &mark, is_symbolic);
            write_mark(files.path(), "web", 3, &["/usr".to_owned()]).unwrap();
            let bytes = fs::read_to_string(&canary).unwrap();
            assert_eq!(bytes, "canary", "symbolic: {is_symbolic}");
            let facts = fs::symlink_metadata(&mark).unwrap();
            assert!(facts.is_file(), "symbolic: {is_symbolic}");
            assert_eq!(facts.modified().unwrap(), SystemTime::UNIX_EPOCH);
            let text = fs::read_to_string(&mark).unwrap();
            assert_eq!(text, "format 1\nname web\ngeneration 3\nlay /usr\n");
        }
    }

    /// Returns the directories over which guests would mount a segment of the named directories.
    fn lay_of(names: &[String], is_root: bool) -> Result<Vec<String>, SegmentError> {
        let from = tempfile::tempdir().unwrap();
        for name in names {
            fs::create_dir(from.path().join(name)).unwrap();
            fs::write(from.path().join(name).join("file"), "x").unwrap();
        }
        let filter = Filter::new(&[], &[]).unwrap();
        let tree = Tree::choose(from.path(), &filter, false).unwrap();
        let mut request = request(from.path());
        request.root = is_root;
        lay_over(&request, &tree)
    }

    #[test]
    fn a_build_refuses_directories_over_which_guests_would_not_mount_the_segment() {
        let (long, longest) = ("x".repeat(MAX_LAY_PATH), "x".repeat(MAX_LAY_PATH - 1));
        for (name, rule) in [
            ("a b", "no blank"),
            ("a:b", "none of :"),
            ("a,b", "none of :"),
            ("a\\b", "none of :"),
            ("a\"b", "none of :"),
            ("a\nlay", "no control character"),
            ("a\u{7f}", "no control character"),
            (&*long, "at most 85 bytes"),
        ] {
            let names = ["usr".to_owned(), name.to_owned()];
            let error = lay_of(&names, false).unwrap_err().to_string();
            let shown = format!("{:?}", format!("/{name}"));
            assert!(error.contains(&shown), "{error}");
            assert!(error.contains(rule), "{error}");
            assert!(lay_of(&names, true).unwrap().is_empty());
        }
        assert_eq!(lay_of(&[longest], false).unwrap().len(), 1);
        let mut many: Vec<String> = (0..=MAX_LAY).map(|i| format!("d{i:02}")).collect();
        let error = lay_of(&many, false).unwrap_err().to_string();
        assert!(error.contains("at most 64 directories"), "{error}");
        assert!(error.contains("\"/d64\""), "{error}");
        many.pop();
        assert_eq!(lay_of(&many, false).unwrap().len(), MAX_LAY);
    }
}
