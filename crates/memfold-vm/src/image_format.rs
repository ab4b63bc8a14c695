//! Determines the format of a VM's disk image (raw, qcow2, ...) when the VM is described for the
//! first time. The format comes from the VM's description or from the image's file name.
//!
//! The first bytes of the file alone cannot decide, because the guest can write any bytes to a raw
//! disk. The file name alone may be wrong. So memfold refuses the VM if the first bytes show
//! another format than the file name, unless the description says that the image is raw.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use super::spec::{DiskFormat, DiskSpec};
use super::spec_error::{SpecError, value};

/// Formats with the offset and bytes of their magic numbers (QEMU: block/*.c, `bdrv_probe`). LUKS
/// is not listed, because a disk that its guest encrypts is raw.
const MARKS: [(&str, usize, &[u8]); 7] = [
    ("qcow2", 0, b"QFI\xfb"),
    ("VMDK", 0, b"KDMV"),
    ("VMDK", 0, b"# Disk DescriptorFile"),
    ("VDI", 0x40, b"\x7f\x10\xda\xbe"),
    ("VHDX", 0, b"vhdxfile"),
    ("VHD", 0, b"conectix"),
    ("QED", 0, b"QED\0"),
];

/// Sets a disk's format if the description does not name one; refuses a format that contradicts the
/// content.
pub(super) fn settle(disk: &mut DiskSpec) -> Result<(), SpecError> {
    // Errors about missing files come from other checks: this process may have less rights than the
    // one that starts the VM.
    let Ok(Some(head)) = head(&disk.path) else {
        return Ok(());
    };
    let mut marks = MARKS.into_iter();
    let mark = marks.find(|(_, at, mark)| head.get(*at..at + mark.len()) == Some(*mark));
    let holds = mark.map(|(format, ..)| format);
    let path = disk.path.display();
    let wrong = |why: String| Err(value("disks.format", why));
    match (disk.format.is_some(), disk.format(), holds) {
        // A user who names the format explicitly is right.
        (true, DiskFormat::Raw, _)
        | (false, DiskFormat::Raw, None)
        | (_, DiskFormat::Qcow2, Some("qcow2")) => {
            disk.format = Some(disk.format());
            Ok(())
        }
        (false, DiskFormat::Raw, Some("qcow2")) => wrong(format!(
            "{path} begins like a qcow2 image, but its name does not end in '.qcow2'; pass format=qcow2, or format=raw if a guest has written that header to a raw disk"
        )),
        (false, DiskFormat::Raw, Some(other)) => wrong(format!(
            "{path} begins like a {other} image, a format that memfold does not support; convert it (qemu-img convert -O qcow2), or pass format=raw if a guest has written that header to a raw disk"
        )),
        (is_given, DiskFormat::Qcow2, _) => {
            let name = if is_given {
                ""
            } else {
                ", though its name ends so"
            };
            wrong(format!(
                "{path} is not a qcow2 image{name}; pass format=raw if the file holds the disk's plain bytes"
            ))
        }
    }
}

/// Returns the first bytes of a file or block device; `None` if the path leads to another kind of
/// file.
fn head(path: &Path) -> io::Result<Option<Vec<u8>>> {
    // Without this flag, opening a FIFO would wait for a writer.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Ok(None);
    }
    let mut head = Vec::new();
    file.take(512).read_to_end(&mut head)?;
    Ok(Some(head))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_of_a_disk_image_is_detected_and_an_option_that_contradicts_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let mut vdi = vec![0; 512];
        vdi[0x40..0x44].copy_from_slice(b"\x7f\x10\xda\xbe");
        let settled = |name: &str, head: &[u8], format| {
            let path = place.path().join(name);
            std::fs::write(&path, head).unwrap();
            let mut disk = DiskSpec::new(&path);
            disk.format = format;
            settle(&mut disk)
                .map(|()| disk.format.unwrap())
                .map_err(|error| error.to_string())
        };
        let (raw, qcow2) = (Some(DiskFormat::Raw), Some(DiskFormat::Qcow2));
        assert_eq!(settled("a.img", b"", None), Ok(DiskFormat::Raw));
        assert_eq!(settled("a.img", b"LUKS\xba\xbe", None), Ok(DiskFormat::Raw));
        assert_eq!(settled("a.qcow2", b"QFI\xfb", None), Ok(DiskFormat::Qcow2));
        assert_eq!(settled("a.img", b"QFI\xfb", qcow2), Ok(DiskFormat::Qcow2));
        // A raw disk to which the guest has written a header.
        assert_eq!(settled("a.img", b"QFI\xfb", raw), Ok(DiskFormat::Raw));
        let why = settled("a.img", b"QFI\xfb", None).unwrap_err();
        assert!(
            why.contains("format=qcow2") && why.contains("format=raw"),
            "{why}"
        );
        assert!(settled("a.img", &vdi, None).unwrap_err().contains("VDI"));
        assert_eq!(settled("a.img", &vdi, raw), Ok(DiskFormat::Raw));
        for format in [None, qcow2] {
            let why = settled("a.qcow2", b"\0", format).unwrap_err();
            assert!(
                why.contains("not a qcow2") && why.contains("format=raw"),
                "{why}"
            );
        }
        // Devices other than block devices are not read.
        let mut null = DiskSpec::new("/dev/null");
        settle(&mut null).unwrap();
        assert_eq!(null.format, None);
    }
}
