//! Reads the name of the backing file in the header of a qcow2 image, and writes empty images.
//! Forking a VM needs this several times, and `qemu-img` would be slow: its start takes 10 to 20
//! ms, and `qemu-img create` waits for a busy disk for up to 200 ms.
//!
//! ```text
//!   byte   0  magic "QFI\xfb"        byte  40  offset of the L1 table
//!          4  version, 2 or 3              48  offset of the refcount table
//!          8  offset of the name           56  clusters of the refcount table
//!         16  length of the name           72  incompatible features (version 3)
//!         20  bits of a cluster            96  order of refcounts (version 3)
//!         24  size of the disk            100  length of the header (version 3; 72 in version 2)
//!         32  encryption method           then extensions: type, length, data padded to 8 bytes; type 0 ends the list
//!         36  entries of the L1 table     then the name of the backing file
//!
//!   empty image   header | refcount table | refcount block | L1 table of zeroes      each a cluster or more
//! ```
//! All numbers are big-endian (`docs/interop/qcow2.rst` in QEMU's source). Images with a feature
//! that this module does not know are left to `qemu-img`.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _};
use std::path::{Path, PathBuf};

/// Length of the part of a file that is read. `qemu-img create` writes the header, its extensions
/// and the name of the backing file into the first kilobyte.
const READ_BYTES: u64 = 4096;

/// Length of the part that is read of images made by other programs, whose headers may be longer.
const LONG_HEADER: u64 = 64 << 10;

const MAGIC: u32 = u32::from_be_bytes(*b"QFI\xfb");

/// Length of the header of version 3, without the optional compression type.
const HEADER_BYTES: u64 = 104;

/// Clusters of 64 KiB, `qemu-img`'s default.
const CLUSTER_BITS: u32 = 16;

/// Bytes of a disk that an entry of the L1 table stands for: an L2 table is one cluster of entries
/// of 8 bytes.
const L1_ENTRY_BYTES: u64 = 1 << (CLUSTER_BITS + CLUSTER_BITS - 3);

/// Most entries of an L1 table (`QCOW_MAX_L1_SIZE` of QEMU is 32 MiB), 2 PiB of disk.
const MOST_L1_ENTRIES: u32 = 4 << 20;

/// Longest name of a backing file.
const LONGEST_NAME: usize = 1023;

const SECTOR_BYTES: u64 = 512;

/// Type of the extension that ends the list.
const END: u32 = 0;

/// Type of the extension with the format of the backing file.
const BACKING_FORMAT: u32 = 0xe279_2aca;

/// Type of the extension with the name of a file that holds the disk's data.
const DATA_FILE: u32 = 0x4441_5441;

/// Incompatible feature: another file holds the disk's data.
const HAS_DATA_FILE: u64 = 4;

/// The backing file that a header names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamedBacking {
    /// The image has no backing file.
    None,
    /// A raw disk.
    Raw(PathBuf),
    /// Another qcow2 image.
    Qcow2(PathBuf),
}

/// Returns the backing file of a qcow2 image. `None` if only `qemu-img` can tell: the image cannot
/// be read, has features that are unknown here, or names its backing file by other means than an
/// absolute path.
#[must_use]
pub fn backing(image: &Path) -> Option<NamedBacking> {
    parse(&beginning(image, READ_BYTES)?)
}

/// Returns the path of the file that an image is built on. `None` if that is a raw disk. A
/// relative name counts from the image's directory.
#[must_use]
pub fn below(image: &Path) -> Option<PathBuf> {
    let bytes = beginning(image, LONG_HEADER)?;
    let header = Header::parse(&bytes)?;
    if header.name.is_empty() || header.texts(BACKING_FORMAT).last() == Some(&&b"raw"[..]) {
        return None;
    }
    Some(image.parent()?.join(OsStr::from_bytes(header.name)))
}

/// Returns a text that tells which other files the header of a qcow2 image names, and how it says
/// to read them. `None` if the header cannot be read.
#[must_use]
pub fn named_files(image: &Path) -> Option<String> {
    named_in(&beginning(image, LONG_HEADER)?)
}

/// Returns the size of a qcow2 image's disk in bytes; `None` as for [`backing`].
#[must_use]
pub fn virtual_bytes(image: &Path) -> Option<u64> {
    let bytes = beginning(image, READ_BYTES)?;
    parse(&bytes)?;
    Some(u64::from_be_bytes(bytes.get(24..32)?.try_into().ok()?))
}

/// Reads the beginning of a file or block device. (Opening a pipe would wait for its other end.)
fn beginning(image: &Path, most: u64) -> Option<Vec<u8>> {
    let kind = std::fs::metadata(image).ok()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    let mut bytes = Vec::new();
    let file = File::open(image).ok()?;
    file.take(most).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Writes an empty qcow2 image into an empty file: a disk of `bytes` bytes, above a backing file
/// with this absolute path and format (`raw` or `qcow2`), if there is one. The file is not synced.
pub(super) fn write_empty(
    file: &File,
    bytes: u64,
    backing: Option<(&Path, &str)>,
) -> io::Result<()> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what);
    let bytes = (bytes.checked_next_multiple_of(SECTOR_BYTES))
        .ok_or_else(|| invalid("the disk is too large"))?;
    let l1_entries = u32::try_from(bytes.div_ceil(L1_ENTRY_BYTES));
    let l1_entries = l1_entries
        .ok()
        .filter(|entries| *entries <= MOST_L1_ENTRIES);
    let l1_entries =
        l1_entries.ok_or_else(|| invalid("the disk is too large for a qcow2 image"))?;
    let (name, format) = backing.map_or((&b""[..], ""), |(path, format)| {
        (path.as_os_str().as_bytes(), format)
    });
    if name.len() > LONGEST_NAME {
        return Err(invalid(
            "the path of the backing file is too long for a qcow2 image",
        ));
    }
    let mut extensions = Vec::new();
    if !format.is_empty() {
        extensions.extend(BACKING_FORMAT.to_be_bytes());
        extensions.extend(u32::try_from(format.len()).unwrap_or(0).to_be_bytes());
        extensions.extend(format.as_bytes());
        extensions.resize(extensions.len().next_multiple_of(8), 0);
    }
    extensions.extend([0; 8]);
    let name_at = HEADER_BYTES + extensions.len() as u64;
    let name_at = if name.is_empty() { 0 } else { name_at };
    let name_length = u32::try_from(name.len()).unwrap_or(0);
    let mut header = Vec::new();
    header.extend(MAGIC.to_be_bytes());
    header.extend(3_u32.to_be_bytes());
    header.extend(name_at.to_be_bytes());
    header.extend(name_length.to_be_bytes());
    header.extend(CLUSTER_BITS.to_be_bytes());
    header.extend(bytes.to_be_bytes());
    header.extend([0; 4]); // not encrypted
    header.extend(l1_entries.to_be_bytes());
    header.extend((3_u64 << CLUSTER_BITS).to_be_bytes());
    header.extend((1_u64 << CLUSTER_BITS).to_be_bytes());
    header.extend(1_u32.to_be_bytes()); // cluster of the refcount table
    header.extend([0; 12]); // no internal snapshots
    header.extend([0; 24]); // no features
    header.extend(4_u32.to_be_bytes()); // refcounts of 16 bits
    header.extend(u32::try_from(HEADER_BYTES).unwrap_or(0).to_be_bytes());
    header.extend(extensions);
    header.extend(name);
    let l1_clusters = (u64::from(l1_entries) * 8)
        .div_ceil(1 << CLUSTER_BITS)
        .max(1);
    let clusters = 3 + l1_clusters;
    let counts: Vec<u8> = (0..clusters).flat_map(|_| 1_u16.to_be_bytes()).collect();
    file.set_len(clusters << CLUSTER_BITS)?;
    file.write_all_at(&(2_u64 << CLUSTER_BITS).to_be_bytes(), 1 << CLUSTER_BITS)?;
    file.write_all_at(&counts, 2 << CLUSTER_BITS)?;
    file.write_all_at(&header, 0)
}

/// Returns the backing file that the first bytes of a qcow2 image name; `None` as for [`backing`].
#[must_use]
pub fn parse(bytes: &[u8]) -> Option<NamedBacking> {
    let header = Header::parse(bytes)?;
    if header.features != 0 || header.encryption != 0 {
        return None;
    }
    if header.name.is_empty() {
        return Some(NamedBacking::None);
    }
    // Other names are relative, or begin with a protocol such as `json:` or `nbd:`.
    if !header.name.starts_with(b"/") {
        return None;
    }
    let path = PathBuf::from(OsStr::from_bytes(header.name));
    // Without a format, QEMU guesses it. Of two formats, it takes the last; memfold writes one.
    match header.texts(BACKING_FORMAT)[..] {
        [b"raw"] => Some(NamedBacking::Raw(path)),
        [b"qcow2"] => Some(NamedBacking::Qcow2(path)),
        _ => None,
    }
}

fn named_in(bytes: &[u8]) -> Option<String> {
    let header = Header::parse(bytes)?;
    let mut named = Vec::new();
    if !header.name.is_empty() {
        named.push(format!("the backing file '{}'", header.name.escape_ascii()));
    }
    for format in header.texts(BACKING_FORMAT) {
        named.push(format!("its format '{}'", format.escape_ascii()));
    }
    for file in header.texts(DATA_FILE) {
        named.push(format!("the data file '{}'", file.escape_ascii()));
    }
    if header.features & HAS_DATA_FILE != 0 {
        named.push("data in another file".into());
    }
    if header.encryption != 0 {
        named.push(format!("encryption method {}", header.encryption));
    }
    if named.is_empty() {
        named.push("no other file".into());
    }
    Some(named.join(", "))
}

/// What this module reads of a header.
struct Header<'a> {
    /// Incompatible features.
    features: u64,
    encryption: u32,
    /// Name of the backing file; empty if there is none.
    name: &'a [u8],
    /// Types and data of the extensions.
    extensions: Vec<(u32, &'a [u8])>,
}

impl<'a> Header<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let part = |at: usize, length: usize| bytes.get(at..at.checked_add(length)?);
        let u32_at = |at| Some(u32::from_be_bytes(part(at, 4)?.try_into().ok()?));
        let u64_at = |at| Some(u64::from_be_bytes(part(at, 8)?.try_into().ok()?));
        let size = |number: u32| usize::try_from(number).ok();
        let (length, features) = match (u32_at(0)?, u32_at(4)?) {
            (MAGIC, 2) => (72, 0),
            (MAGIC, 3) => (
                size(u32_at(100)?).filter(|length| *length >= 104)?,
                u64_at(72)?,
            ),
            _ => return None,
        };
        let offset = usize::try_from(u64_at(8)?).ok()?;
        let name = match offset {
            0 => &[],
            _ => part(offset, size(u32_at(16)?)?)?,
        };
        let cluster = 1_usize.checked_shl(u32_at(20)?)?;
        // QEMU reads extensions up to the name of the backing file (`qcow2_read_extensions`).
        let end = if offset == 0 { cluster } else { offset };
        let (mut at, mut extensions) = (length, Vec::new());
        while at < end {
            let (kind, length) = (u32_at(at)?, size(u32_at(at.checked_add(4)?)?)?);
            if kind == END {
                break;
            }
            at = at.checked_add(8)?;
            extensions.push((kind, part(at, length)?));
            at = at.checked_add(length.checked_next_multiple_of(8)?)?;
        }
        // An extension that crosses the name is an error of QEMU.
        (at <= end.next_multiple_of(8)).then_some(Self {
            features,
            encryption: u32_at(32)?,
            name,
            extensions,
        })
    }

    /// Returns the data of all extensions of a type.
    fn texts(&self, kind: u32) -> Vec<&'a [u8]> {
        let of_kind = self.extensions.iter().filter(|(is, _)| *is == kind);
        of_kind.map(|(_, text)| *text).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Creates an image with these options of `qemu-img create`, and returns its backing file.
    fn created(options: &[&str]) -> Option<NamedBacking> {
        let place = tempfile::tempdir().unwrap();
        let image = place.path().join("image");
        let output = Command::new("qemu-img")
            .args(["create", "-q", "-u", "-f", "qcow2"])
            .args(options)
            .args([image.to_str().unwrap(), "1M"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        backing(&image)
    }

    #[test]
    fn the_backing_file_is_read_from_the_header_of_a_qcow2_image_made_by_qemu_img() {
        if Command::new("qemu-img").arg("--version").output().is_err() {
            memfold_testkit::skip!("no qemu-img");
        }
        let (raw, qcow2) = (
            NamedBacking::Raw("/a/base img".into()),
            NamedBacking::Qcow2("/a/b".into()),
        );
        assert_eq!(created(&[]), Some(NamedBacking::None));
        assert_eq!(created(&["-F", "raw", "-b", "/a/base img"]), Some(raw));
        for more in ["compat=1.1", "compat=0.10", "cluster_size=4096"] {
            let options = ["-F", "qcow2", "-b", "/a/b", "-o", more];
            assert_eq!(created(&options), Some(qcow2.clone()), "{more}");
        }
        // `qemu-img` has to tell.
        for other in [
            &["-F", "qcow2", "-b", "relative"][..],
            &["-F", "raw", "-b", "nbd://127.0.0.1:1/x"],
            &["-F", "vmdk", "-b", "/a/b"],
            &["-F", "qcow2", "-b", "/a/b", "-o", "extended_l2=on"],
        ] {
            assert_eq!(created(other), None, "{other:?}");
        }
    }

    #[test]
    fn a_qcow2_image_with_a_damaged_header_is_left_to_qemu_img() {
        let image = |name: &[u8], offset: u64, length: u32| {
            let mut bytes = vec![0; 512];
            bytes[..4].copy_from_slice(b"QFI\xfb");
            bytes[4..8].copy_from_slice(&3_u32.to_be_bytes());
            bytes[8..16].copy_from_slice(&offset.to_be_bytes());
            bytes[16..20].copy_from_slice(&length.to_be_bytes());
            bytes[100..104].copy_from_slice(&112_u32.to_be_bytes());
            bytes[112..116].copy_from_slice(&BACKING_FORMAT.to_be_bytes());
            bytes[116..120].copy_from_slice(&3_u32.to_be_bytes());
            bytes[120..123].copy_from_slice(b"raw");
            bytes[256..256 + name.len()].copy_from_slice(name);
            bytes
        };
        let good = image(b"/x", 256, 2);
        assert_eq!(parse(&good), Some(NamedBacking::Raw("/x".into())));
        // Of two formats, QEMU takes the last.
        let mut twice = good.clone();
        twice[128..132].copy_from_slice(&BACKING_FORMAT.to_be_bytes());
        twice[132..136].copy_from_slice(&5_u32.to_be_bytes());
        twice[136..141].copy_from_slice(b"qcow2");
        // QEMU reads no extension behind the name, and then guesses the format.
        let mut behind = image(b"/x", 112, 2);
        behind[100..104].copy_from_slice(&256_u32.to_be_bytes());
        behind[112..114].copy_from_slice(b"/x");
        behind[256..260].copy_from_slice(&BACKING_FORMAT.to_be_bytes());
        behind[260..264].copy_from_slice(&3_u32.to_be_bytes());
        behind[264..267].copy_from_slice(b"raw");
        let short_header = {
            let mut bytes = good.clone();
            bytes[100..104].copy_from_slice(&96_u32.to_be_bytes());
            bytes
        };
        for bad in [
            twice,
            behind,
            short_header,
            image(b"/x", 511, 2),
            image(b"/x", u64::MAX, 2),
            image(b"/x", 256, u32::MAX),
            image(b"x", 256, 1),
        ] {
            assert_eq!(parse(&bad), None);
        }
        for length in 0..good.len() {
            let short = parse(&good[..length]);
            assert!(short.is_none() || length >= 258, "{length}");
        }
        for at in 0..128 {
            for byte in [0, 1, 0x7f, 0xff] {
                let mut changed = good.clone();
                changed[at] = byte;
                // Any answer is allowed, a panic is not.
                let _ = parse(&changed);
            }
        }
        assert_eq!(backing(Path::new("/dev/null")), None);
        assert_eq!(backing(Path::new("/nowhere")), None);
    }

    #[test]
    fn qemu_img_finds_no_error_in_an_empty_qcow2_image_that_memfold_wrote() {
        let info = |image: &Path| {
            let run = |args: &[&str]| {
                let mut command = Command::new("qemu-img");
                command.args(args).arg(image).output().unwrap()
            };
            let checked = run(&["check", "-q", "-f", "qcow2"]);
            assert!(checked.status.success(), "{checked:?}");
            let told = run(&["info", "--output=json", "-f", "qcow2"]);
            serde_json::from_slice::<serde_json::Value>(&told.stdout).unwrap()
        };
        if Command::new("qemu-img").arg("--version").output().is_err() {
            memfold_testkit::skip!("no qemu-img");
        }
        let place = tempfile::tempdir().unwrap();
        let base = place.path().join("base image");
        File::create(&base).unwrap().set_len(3 << 20).unwrap();
        let sizes = [
            512,
            1 << 20,
            (3 << 20) + 1,
            1 << 29,
            (1 << 29) + 512,
            6 << 40,
        ];
        for (number, size) in sizes.into_iter().enumerate() {
            let image = place.path().join(format!("image{number}"));
            let file = File::create(&image).unwrap();
            write_empty(&file, size, Some((&base, "raw"))).unwrap();
            assert_eq!(backing(&image), Some(NamedBacking::Raw(base.clone())));
            let size = size.next_multiple_of(SECTOR_BYTES);
            assert_eq!(virtual_bytes(&image), Some(size));
            let told = info(&image);
            assert_eq!(told["virtual-size"], size);
            assert_eq!(told["backing-filename"], base.to_str().unwrap());
            assert_eq!(told["backing-filename-format"], "raw");
            let above = place.path().join(format!("above{number}"));
            write_empty(
                &File::create(&above).unwrap(),
                size,
                Some((&image, "qcow2")),
            )
            .unwrap();
            assert_eq!(backing(&above), Some(NamedBacking::Qcow2(image)));
            let empty = place.path().join(format!("empty{number}"));
            write_empty(&File::create(&empty).unwrap(), size, None).unwrap();
            assert_eq!(backing(&empty), Some(NamedBacking::None));
            assert_eq!(info(&empty)["virtual-size"], size);
        }
        let file = File::create(place.path().join("x")).unwrap();
        let long = PathBuf::from(format!("/{}", "x".repeat(LONGEST_NAME)));
        assert!(write_empty(&file, 1, Some((&long, "raw"))).is_err());
        assert!(write_empty(&file, u64::MAX, None).is_err());
        assert!(write_empty(&file, 1 << 52, None).is_err());
    }
}
