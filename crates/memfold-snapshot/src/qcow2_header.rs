//! Reads which backing file the header of a qcow2 image names. A save asks this several times, and
//! starting `qemu-img` takes 10 to 20 ms.
//!
//! ```text
//!   byte   0  magic "QFI\xfb"        byte  32  encryption method
//!          4  version, 2 or 3              72  incompatible features (version 3)
//!          8  offset of the name          100  length of the header (version 3; 72 in version 2)
//!         16  length of the name     then extensions: type, length, data padded to 8 bytes; type 0 ends the list
//! ```
//! All numbers are big-endian (`docs/interop/qcow2.rst` in QEMU's source). Images with a feature
//! that this module does not know are left to `qemu-img`.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// Length of the part of a file that is read. `qemu-img create` writes the header, its extensions
/// and the name of the backing file into the first kilobyte.
const READ_BYTES: u64 = 4096;

const MAGIC: u32 = u32::from_be_bytes(*b"QFI\xfb");

/// Type of the extension with the format of the backing file.
const BACKING_FORMAT: u32 = 0xe279_2aca;

/// The backing file that a header names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    None,
    Raw(PathBuf),
    Qcow2(PathBuf),
}

/// Returns the backing file of a qcow2 image. `None` if only `qemu-img` can tell: the image cannot
/// be read, has features that are unknown here, or names its backing file by other means than an
/// absolute path.
pub(super) fn backing(image: &Path) -> Option<Backing> {
    // Opening a pipe would wait for its other end.
    if !std::fs::metadata(image).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    let file = File::open(image).ok()?;
    file.take(READ_BYTES).read_to_end(&mut bytes).ok()?;
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> Option<Backing> {
    let part = |at: usize, length: usize| bytes.get(at..at.checked_add(length)?);
    let u32_at = |at| Some(u32::from_be_bytes(part(at, 4)?.try_into().ok()?));
    let u64_at = |at| Some(u64::from_be_bytes(part(at, 8)?.try_into().ok()?));
    let size = |number: u32| usize::try_from(number).ok();
    let header = match (u32_at(0)?, u32_at(4)?) {
        (MAGIC, 2) => 72,
        (MAGIC, 3) if u64_at(72)? == 0 => size(u32_at(100)?)?,
        _ => return None,
    };
    let is_encrypted = u32_at(32)? != 0;
    if is_encrypted {
        return None;
    }
    let (offset, length) = (usize::try_from(u64_at(8)?).ok()?, size(u32_at(16)?)?);
    if offset == 0 {
        return Some(Backing::None);
    }
    let name = part(offset, length)?;
    // Other names are relative, or begin with a protocol such as `json:` or `nbd:`.
    if !name.starts_with(b"/") {
        return None;
    }
    let path = PathBuf::from(OsStr::from_bytes(name));
    let mut at = header;
    loop {
        let (kind, length) = (u32_at(at)?, size(u32_at(at.checked_add(4)?)?)?);
        at = at.checked_add(8)?;
        match (kind, part(at, length)?) {
            (BACKING_FORMAT, b"raw") => return Some(Backing::Raw(path)),
            (BACKING_FORMAT, b"qcow2") => return Some(Backing::Qcow2(path)),
            // Without a format, QEMU guesses it.
            (0 | BACKING_FORMAT, _) => return None,
            _ => at = at.checked_add(length.checked_next_multiple_of(8)?)?,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Creates an image with these options of `qemu-img create`, and returns its backing file.
    fn created(options: &[&str]) -> Option<Backing> {
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
    fn the_backing_file_of_images_from_qemu_img_is_read() {
        if Command::new("qemu-img").arg("--version").output().is_err() {
            memfold_testkit::skip!("no qemu-img");
        }
        let (raw, qcow2) = (
            Backing::Raw("/a/base img".into()),
            Backing::Qcow2("/a/b".into()),
        );
        assert_eq!(created(&[]), Some(Backing::None));
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
    fn damaged_headers_are_left_to_qemu_img() {
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
        assert_eq!(parse(&good), Some(Backing::Raw("/x".into())));
        for bad in [
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
}
