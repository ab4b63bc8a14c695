use std::fs::{File, FileTimes};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::process::{Child, Command};

use memfold_units::{ByteSize, PAGE_BYTES};
use memfold_vm::{DiskSpec, VmSpec};

use super::*;
use crate::built_on::built_on;
use crate::file_facts::Stamp;
use crate::image::{CHUNK_BYTES, ImageBlock, ImageCounts, pages_sum};
use crate::manifest::{ParentName, disk_name, tests::manifest};
use crate::own_disks::OwnDisks;
use crate::pack;
use crate::users::below;

/// Length of each image: two chunks.
const PAGES: u64 = 2 * CHUNK_PAGES;

/// A snapshot directory with snapshot `p`, layer `l` on it, and the base image of their disk.
///
/// ```text
///   page    0 1 2      3      4 5 ...  20 to 23     30 to 33         512 513     other pages: zeroes
///   p       own pages  ......................................        own page
///   l       of p       own             base image   disk of p        of p, own
/// ```
struct Place {
    directory: tempfile::TempDir,
    shelf: Shelf,
    /// Bytes of the layer's whole image.
    image: Vec<u8>,
}

fn page(fill: u8) -> Vec<u8> {
    vec![fill; PAGE_BYTES]
}

/// Runs a program of QEMU.
fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program}: {words}");
}

/// Makes a disk with a backing file, and writes 64 KiB of bytes `fill` into it, at byte `at`.
fn make_disk(path: &Path, (backing, format): (&Path, &str), fill: u8, at: &str) {
    let (path, backing) = (path.to_str().unwrap(), backing.to_str().unwrap());
    let create = ["create", "-q", "-f", "qcow2", "-F", format, "-b", backing];
    run("qemu-img", &[&create[..], &[path]].concat());
    let write = format!("write -q -P {fill} {at} 64k");
    run("qemu-io", &["-f", "qcow2", "-c", &write, path]);
}

/// Saves a snapshot with one disk by hand. `own` are its own pages, `referred` its references.
fn save(
    shelf: &Shelf,
    of: Manifest,
    own: &[(u64, u8)],
    (references, sources): (&[Reference], Vec<PathBuf>),
    image: &[u8],
    disk: (&Path, &str, u8, &str),
) -> Manifest {
    let draft = shelf.draft(&of.name).unwrap();
    let ram = draft.file(RAM).unwrap();
    ram.set_len(image.len() as u64).unwrap();
    for &(number, fill) in own {
        ram.write_all_at(&page(fill), number * PAGE_SIZE).unwrap();
    }
    let file = |part: &str, bytes: &[u8]| {
        let mut file = draft.file(part).unwrap();
        file.write_all(bytes).unwrap();
        facts(File::open(draft.path().join(part)).unwrap()).unwrap()
    };
    let sums = image.chunks(CHUNK_BYTES);
    let sums: Vec<u8> = sums
        .flat_map(|chunk| pages_sum(0, chunk).to_le_bytes())
        .collect();
    let pages: u64 = references.iter().map(|r| u64::from(r.pages)).sum();
    let name = PathBuf::from(disk_name(0));
    let at = draft.path().join(&name);
    make_disk(&at, (disk.0, disk.1), disk.2, disk.3);
    let saved = SavedDisk {
        file: backing_file(&at, &name).unwrap(),
        format: "qcow2".into(),
        read_only: false,
        xxh3_128: Some(facts_at(&at).unwrap().xxh3_128),
        backing: backing_files(chain(&at).unwrap().into_iter().skip(1)).unwrap(),
    };
    let table = (!references.is_empty()).then(|| References {
        table: file(REFERENCES, &refer::encode(references)),
        sources,
        pages,
        parent_pages: pages,
        mappings: Some(refer::mappings(references)),
    });
    let mut saved = Manifest {
        ram_bytes: image.len() as u64,
        sums: file(SUMS, &sums),
        devices: file(DEVICES, b"devices"),
        references: table,
        blocks: vec![ImageBlock {
            name: "ram0".into(),
            first_page: 0,
            pages: PAGES,
        }],
        counts: ImageCounts {
            pages: PAGES,
            saved_pages: own.len() as u64 + pages,
            ..ImageCounts::default()
        },
        disks: vec![saved],
        ..of
    };
    let mut disk = DiskSpec::new("disk.qcow2");
    disk.snapshot = true;
    saved.spec.disks = vec![disk];
    draft.commit(&saved).unwrap();
    saved
}

fn set(image: &mut [u8], pages: std::ops::Range<u64>, fill: u8) {
    image[bytes(pages.start)..bytes(pages.end)].fill(fill);
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let shelf = Shelf::open(&directory.path().join("shelf"));
        let base = directory.path().join("base.raw");
        fs::write(&base, vec![7; 1 << 20]).unwrap();
        let mut image = vec![0; bytes(PAGES)];
        set(&mut image, 0..3, 1);
        set(&mut image, 3..4, 2);
        set(&mut image, 512..513, 3);
        let own = [(0, 1), (1, 1), (2, 1), (3, 2), (512, 3)];
        let parent = manifest("p", ByteSize::mib(4));
        let on_base = (base.as_path(), "raw", 5, "0");
        let parent = save(&shelf, parent, &own, (&[], Vec::new()), &image, on_base);
        let of = shelf.path("p").unwrap();
        let (ram, disk) = (of.join(RAM), of.join(disk_name(0)));
        let data = fs::read(&disk).unwrap();
        // Where the disk of the parent has its bytes.
        let at = data.chunks(PAGE_BYTES).position(|part| part == page(5));
        let reference = |page, pages, file, block| Reference {
            page,
            pages,
            file,
            block,
        };
        let references = [
            reference(0, 3, 0, 0),
            reference(20, 4, 1, 2),
            reference(30, 4, 2, at.unwrap() as u64),
            reference(512, 1, 0, 512),
        ];
        set(&mut image, 3..4, 4);
        set(&mut image, 20..24, 7);
        set(&mut image, 30..34, 5);
        set(&mut image, 513..514, 6);
        let layer = Manifest {
            parent: Some(ParentName {
                name: "p".into(),
                sums: parent.sums.xxh3_128,
                depth: 1,
            }),
            ..manifest("l", ByteSize::mib(4))
        };
        let sources = vec![ram, base, disk.clone()];
        let on_parent = (disk.as_path(), "qcow2", 8, "128k");
        let own = [(3, 4), (513, 6)];
        save(
            &shelf,
            layer,
            &own,
            (&references, sources),
            &image,
            on_parent,
        );
        Self {
            directory,
            shelf,
            image,
        }
    }

    fn base(&self) -> PathBuf {
        self.directory.path().join("base.raw")
    }

    fn file(&self, name: &str, part: &str) -> PathBuf {
        self.shelf.path(name).unwrap().join(part)
    }

    fn compact(&self) -> Result<Compacted, SnapshotError> {
        let manifest = self.shelf.manifest("l").unwrap();
        compact(&self.shelf, &manifest, &Progress::default())
    }

    /// Checks that the layer is refused for this reason, and is as it was.
    fn refuses(&self, why: &str) {
        let before = self.shelf.manifest("l").unwrap();
        let inode = |part: &str| fs::metadata(self.file("l", part)).unwrap().ino();
        let inodes = [RAM, SUMS, "disk0.qcow2"].map(inode);
        let error = memfold_host::chain(&self.compact().unwrap_err());
        assert!(error.contains(why), "no '{why}' in: {error}");
        assert_eq!(self.shelf.manifest("l").unwrap(), before);
        assert_eq!([RAM, SUMS, "disk0.qcow2"].map(inode), inodes);
        assert_eq!(self.drafts(), [""; 0]);
    }

    /// Returns the names of all drafts.
    fn drafts(&self) -> Vec<String> {
        let entries = fs::read_dir(self.shelf.root()).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().into_string().unwrap());
        names.filter(|name| name.starts_with('.')).collect()
    }

    /// Checks that the layer is complete, and has the bytes of its instant.
    fn check_complete(&self) {
        let layer = self.shelf.manifest("l").unwrap();
        assert!(is_complete(&self.shelf, &layer).unwrap());
        let stored = self.shelf.stored(&layer).unwrap();
        assert_eq!(stored.verify(&Progress::default()).unwrap(), [0_u64; 0]);
        let mut image = vec![0; self.image.len()];
        for (number, chunk) in (0..).zip(image.chunks_mut(CHUNK_BYTES)) {
            stored.read(number * CHUNK_PAGES, chunk).unwrap();
        }
        assert!(image == self.image);
        self.check_disk(&self.file("l", "disk0.qcow2"));
    }

    /// Checks that a disk has the bytes of the layer's disk, and needs only the base image.
    fn check_disk(&self, disk: &Path) {
        assert_eq!(chain(disk).unwrap(), [disk.to_owned(), self.base()]);
        let raw = self.directory.path().join("whole.raw");
        let (from, to) = (disk.to_str().unwrap(), raw.to_str().unwrap());
        run("qemu-img", &["convert", "-O", "raw", from, to]);
        let mut disk = vec![7; 1 << 20];
        disk[..64 << 10].fill(5);
        disk[128 << 10..192 << 10].fill(8);
        assert!(fs::read(&raw).unwrap() == disk);
    }
}

/// A process that has a file open until the value is dropped.
struct User(Child);

impl User {
    fn of(file: &Path) -> Self {
        let mut sleep = Command::new("sleep");
        sleep.arg("600").stdin(File::open(file).unwrap());
        Self(sleep.spawn().unwrap())
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_complete_layer_has_the_same_bytes_without_its_parent() {
    let place = Place::new();
    assert_eq!(built_on(&place.shelf, "p").unwrap(), ["l"]);
    let made = place.compact().unwrap();
    // The pages that the base image holds stay there.
    let references = made.manifest.references.as_ref().unwrap();
    assert_eq!(
        (references.pages, &references.sources),
        (4, &vec![place.base()])
    );
    assert_eq!(made.manifest.own_bytes(), (2 + 8) * PAGE_SIZE);
    let of_disk = made.copied_bytes - 8 * PAGE_SIZE;
    assert!((64 << 10..256 << 10).contains(&of_disk), "{of_disk}");
    assert_eq!(built_on(&place.shelf, "p").unwrap(), [""; 0]);
    place.shelf.remove("p").unwrap();
    place.check_complete();
}

#[test]
fn a_layer_needs_its_parent_and_is_made_complete_by_another_spelling_of_the_directory() {
    let mut place = Place::new();
    let link = place.directory.path().join("link");
    std::os::unix::fs::symlink(place.shelf.root(), &link).unwrap();
    let mut spec = VmSpec::new("web", ByteSize::mib(4));
    spec.disks = vec![DiskSpec::new(place.file("l", "disk0.qcow2"))];
    place.shelf = Shelf::open(&link);
    assert_eq!(below(&place.shelf, &spec), ["l", "p"]);
    assert_eq!(built_on(&place.shelf, "p").unwrap(), ["l"]);
    let made = place.compact().unwrap().manifest;
    assert_eq!(made.references.unwrap().sources, [place.base()]);
    assert_eq!(built_on(&place.shelf, "p").unwrap(), [""; 0]);
    place.shelf.remove("p").unwrap();
    place.check_complete();
}

#[test]
fn disks_that_a_vm_keeps_need_no_snapshot() {
    let place = Place::new();
    let mut spec = VmSpec::new("prod", ByteSize::mib(4));
    let mut disk = DiskSpec::new(place.file("l", "disk0.qcow2"));
    disk.snapshot = true;
    spec.disks = vec![disk];
    let (to, progress) = (place.directory.path(), Progress::default());
    let made = OwnDisks::make((&place.shelf, &mut spec), to, &progress);
    made.unwrap().keep();
    let own = &spec.disks[0];
    assert!(!own.snapshot && own.path.starts_with(to));
    place.shelf.remove("l").unwrap();
    place.shelf.remove("p").unwrap();
    place.check_disk(&own.path);
    assert!(!own.path.with_extension("qcow2.part").exists());
}

#[test]
fn a_changed_page_of_the_parent_is_not_copied_into_a_layer() {
    let place = Place::new();
    let layer = place.shelf.manifest("l").unwrap();
    let ram = File::options()
        .write(true)
        .open(place.file("p", RAM))
        .unwrap();
    ram.write_all_at(b"!", 2 * PAGE_SIZE).unwrap();
    // The change happened unseen: this process believes the image to be right.
    let sources = &layer.references.as_ref().unwrap().sources;
    let stamp = |path: &PathBuf| Stamp::of(&File::open(path).unwrap()).unwrap();
    let stamps: Vec<Stamp> = sources.iter().map(stamp).collect();
    place.shelf.trust(&layer, &stamps);
    assert!(
        place
            .shelf
            .checked_image(&layer, &Progress::default())
            .is_ok()
    );
    place.refuses("was changed since it was saved, in 1 of its chunks");
}

#[test]
fn a_layer_on_a_changed_disk_is_not_made_complete() {
    let place = Place::new();
    // The bytes of the parent's disk change, and its times do not.
    let disk = File::options()
        .read(true)
        .write(true)
        .open(place.file("p", "disk0.qcow2"))
        .unwrap();
    let modified = disk.metadata().unwrap().modified().unwrap();
    let last = disk.metadata().unwrap().len() - 1;
    let mut byte = [0];
    disk.read_exact_at(&mut byte, last).unwrap();
    disk.write_all_at(&[byte[0] ^ 1], last).unwrap();
    disk.set_times(FileTimes::new().set_modified(modified))
        .unwrap();
    place.refuses("disk0.qcow2 was changed since it was saved");
    // So it is neither verified nor pushed.
    let layer = place.shelf.manifest("l").unwrap();
    let changed = restore::changed_disks_below(&place.shelf, &layer);
    assert!(changed[0].contains("snapshot 'p', on which it is built: disk0.qcow2"));
    let told = restore::check_all(&place.shelf, &layer, &Progress::default());
    assert!(memfold_host::chain(&told.unwrap_err()).contains(&changed[0]));
    disk.write_all_at(&byte, last).unwrap();
    disk.set_times(FileTimes::new().set_modified(modified))
        .unwrap();
    fs::write(place.base(), vec![9; 1 << 20]).unwrap();
    place.refuses("base.raw was changed since the save");
}

#[test]
fn compressed_layers_and_layers_on_compressed_parents_are_refused() {
    let place = Place::new();
    // A compressed snapshot of the parent's name has taken its place.
    let ram = place.file("p", RAM);
    let packed = File::create(place.file("p", "ram.zst")).unwrap();
    let plain = File::open(&ram).unwrap();
    pack::pack(&plain, &packed, &Progress::default(), |_| Ok(())).unwrap();
    let aside = place.directory.path().join("ram");
    fs::rename(&ram, &aside).unwrap();
    place.refuses("snapshot 'p': ram");
    fs::rename(&aside, &ram).unwrap();
    let mut layer = place.shelf.manifest("l").unwrap();
    layer.packed = Some(crate::manifest::Packed {
        bytes: 0,
        index: layer.sums.clone(),
    });
    let refused = compact(&place.shelf, &layer, &Progress::default());
    let why = refused.unwrap_err().to_string();
    assert!(why.contains("is compressed"), "{why}");
    place.compact().unwrap();
    place.check_complete();
}

#[test]
fn processes_that_have_replaced_files_open_are_users_of_a_layer() {
    let place = Place::new();
    let layer = place.shelf.manifest("l").unwrap();
    let users = || users(&place.shelf, &layer).unwrap();
    assert_eq!(users(), []);
    for part in [RAM, "disk0.qcow2"] {
        let user = User::of(&place.file("l", part));
        assert_eq!(users(), [Pid::from_child(&user.0)], "{part}");
    }
    // Files that stay the same, and files of other snapshots, may be open.
    let _users = [
        User::of(&place.file("l", DEVICES)),
        User::of(&place.file("p", RAM)),
    ];
    assert_eq!(users(), []);
    place.compact().unwrap();
    let layer = place.shelf.manifest("l").unwrap();
    let _user = User::of(&place.file("l", "disk0.qcow2"));
    assert_eq!(super::users(&place.shelf, &layer).unwrap(), []);
}

/// Copies a directory of a snapshot, as it is on the disk after a crash.
fn copy(from: &Path, to: &Path) {
    run("cp", &["-a", from.to_str().unwrap(), to.to_str().unwrap()]);
}

#[test]
fn after_a_crash_around_the_exchange_the_layer_is_whole_and_the_other_directory_is_removed() {
    let place = Place::new();
    let (layer, draft) = (
        place.shelf.path("l").unwrap(),
        place.shelf.root().join(".l.draft"),
    );
    let aside = |name: &str| place.directory.path().join(name);
    let before = place.shelf.manifest("l").unwrap();
    copy(&layer, &aside("old"));
    place.compact().unwrap();
    copy(&layer, &aside("new"));
    // A part of a draft, a whole one, and one after the exchange, which holds the old files.
    for (now, other, is_half) in [
        ("old", "new", true),
        ("old", "new", false),
        ("new", "old", false),
    ] {
        fs::remove_dir_all(&layer).unwrap();
        copy(&aside(now), &layer);
        copy(&aside(other), &draft);
        if is_half {
            fs::remove_file(draft.join("manifest.json")).unwrap();
            let ram = File::options().write(true).open(draft.join(RAM)).unwrap();
            ram.set_len(4096).unwrap();
        }
        let shelf = Shelf::open(place.shelf.root());
        assert_eq!(place.drafts(), [""; 0]);
        let found = shelf.manifest("l").unwrap();
        assert_eq!(found == before, now == "old");
        shelf.checked_image(&found, &Progress::default()).unwrap();
        // The next attempt completes the layer.
        if now == "old" {
            place.compact().unwrap();
        }
        place.check_complete();
    }
}

#[test]
fn read_only_disks_and_kernels_of_a_pulled_parent_get_a_name_in_the_layer() {
    let place = Place::new();
    let (raw, on_raw, kernel) = (
        place.file("p", "base0"),
        place.file("p", "base1"),
        place.file("p", "base2"),
    );
    fs::write(&raw, vec![1; 1 << 16]).unwrap();
    make_disk(&on_raw, (&raw, "raw"), 2, "0");
    fs::write(&kernel, b"kernel").unwrap();
    let mut layer = place.shelf.manifest("l").unwrap();
    for (path, format) in [(&raw, "raw"), (&on_raw, "qcow2")] {
        let below = chain(&on_raw).unwrap().into_iter().skip(1);
        layer.disks.push(SavedDisk {
            file: backing_file(path, path).unwrap(),
            format: format.into(),
            read_only: true,
            xxh3_128: None,
            backing: backing_files(below.filter(|_| format == "qcow2")).unwrap(),
        });
        let mut disk = DiskSpec::new(path);
        disk.read_only = true;
        layer.spec.disks.push(disk);
    }
    layer.spec.boot.kernel = Some(kernel.clone());
    let (ino, of) = (
        |path: &Path| fs::metadata(path).unwrap().ino(),
        layer.clone(),
    );
    let made = compact(&place.shelf, &of, &Progress::default()).unwrap();
    let now = place.shelf.manifest("l").unwrap();
    assert_eq!(now, made.manifest);
    assert!(is_complete(&place.shelf, &now).unwrap());
    assert_eq!(built_on(&place.shelf, "p").unwrap(), [""; 0]);
    let spec = restore::spec(&place.shelf, &now, "vm").unwrap();
    // A file is linked; a disk that is built on another file of the parent is copied.
    assert_eq!(spec.disks[1].path, place.file("l", "base0"));
    assert_eq!(ino(&spec.disks[1].path), ino(&raw));
    assert_eq!(spec.disks[2].path, place.file("l", "base1"));
    let alone = chain(&spec.disks[2].path).unwrap();
    assert_eq!(alone, [place.file("l", "base1")]);
    assert_eq!(spec.boot.kernel, Some(place.file("l", "base2")));
    place.shelf.remove("p").unwrap();
    assert_eq!(fs::read(spec.boot.kernel.unwrap()).unwrap(), b"kernel");
    place.check_complete();
}
