//! Fuzzes what memfold reads of disk images, which guests and makers of snapshots write: headers of
//! qcow2 images, partition tables, file systems from which segments are built, and what debugfs
//! reports about one of these.

use std::os::unix::fs::FileExt;

use memfold_segment::{Source, debugfs_facts};
use memfold_vm::block_device;
use memfold_vm::qcow2::{self, NamedBacking};

use crate::place::Place;

/// A header of version 3 with an extension, the format of the backing file, and its name.
fn qcow2_header(version: u32, format: &[u8], name: &[u8]) -> Vec<u8> {
    let header = if version == 2 { 72 } else { 104_u32 };
    let mut extensions = Vec::new();
    for (kind, data) in [(0x6803_f857_u32, &b"\0\0"[..]), (0xe279_2aca, format)] {
        extensions.extend(kind.to_be_bytes());
        extensions.extend(u32::try_from(data.len()).unwrap_or(0).to_be_bytes());
        extensions.extend(data);
        extensions.resize(extensions.len().next_multiple_of(8), 0);
    }
    extensions.extend([0; 8]);
    let name_at = u64::from(header) + extensions.len() as u64;
    let mut bytes = b"QFI\xfb".to_vec();
    bytes.extend(version.to_be_bytes());
    bytes.extend(if name.is_empty() { 0 } else { name_at }.to_be_bytes());
    bytes.extend(u32::try_from(name.len()).unwrap_or(0).to_be_bytes());
    bytes.extend(16_u32.to_be_bytes());
    bytes.extend((1_u64 << 30).to_be_bytes());
    bytes.resize(100, 0);
    if version == 2 {
        bytes.truncate(72);
    } else {
        bytes.extend(header.to_be_bytes());
    }
    bytes.extend(extensions);
    bytes.extend(name);
    bytes
}

pub fn qcow2_headers() -> Vec<Vec<u8>> {
    vec![
        qcow2_header(3, b"qcow2", b"/base.qcow2"),
        qcow2_header(2, b"raw", b"/base.img"),
        qcow2_header(3, b"raw", b""),
    ]
}

pub fn qcow2(data: &[u8]) -> u64 {
    let kind = match qcow2::parse(data) {
        None => 0,
        Some(NamedBacking::None) => 1,
        Some(NamedBacking::Raw(path)) => 2 + path.as_os_str().len().min(1 << 10) as u64,
        Some(NamedBacking::Qcow2(path)) => 1 << 11 | path.as_os_str().len().min(1 << 10) as u64,
    };
    // What the file says is what its bytes say.
    thread_local! {
        static PLACE: Place = Place::new();
    }
    PLACE.with(|place| {
        let path = place.write("image", data);
        assert_eq!(
            qcow2::backing(&path),
            qcow2::parse(&data[..data.len().min(4096)])
        );
        kind << 1 | u64::from(qcow2::virtual_bytes(&path).is_some())
    })
}

/// A disk of 1 MiB, of which only the first bytes are written.
const DISK: u64 = 1 << 20;

pub fn partition_tables() -> Vec<Vec<u8>> {
    let mut mbr = vec![0; 512];
    mbr[510..].copy_from_slice(&[0x55, 0xaa]);
    for (at, start) in [(446, 1_u32), (462, 64)] {
        mbr[at + 4] = 0x83;
        mbr[at + 8..at + 12].copy_from_slice(&start.to_le_bytes());
    }
    let gpt = |sector: usize| {
        let mut disk = vec![0; 3 * sector];
        let header = &mut disk[sector..];
        header[..8].copy_from_slice(b"EFI PART");
        (header[72], header[80], header[84]) = (2, 4, 128);
        for entry in 0..3 {
            let at = 2 * sector + entry * 128;
            disk[at] = 7;
            disk[at + 32] = u8::try_from(entry + 8).unwrap_or(0);
        }
        disk
    };
    vec![mbr, gpt(512), gpt(4096)]
}

pub fn partitions(data: &[u8]) -> u64 {
    thread_local! {
        static FILE: std::fs::File = {
            let place = Place::new();
            let path = place.write("disk", b"");
            std::fs::File::options().read(true).write(true).open(path).expect("the test's file")
        };
    }
    FILE.with(|file| {
        file.set_len(0).expect("the test's file");
        file.write_all_at(data, 0).expect("the test's file");
        file.set_len(DISK).expect("the test's file");
        let found = block_device::partitions(file, DISK);
        assert!(found.len() <= 32 && found.iter().all(|start| *start < DISK));
        1 + found.len() as u64 + (found.iter().fold(0, |sum, at| sum ^ at >> 9) << 6)
    })
}

pub fn sources() -> Vec<Vec<u8>> {
    let image = |at: usize, magic: &[u8]| {
        let mut bytes = vec![0; 2048];
        bytes[at..at + magic.len()].copy_from_slice(magic);
        bytes
    };
    vec![
        image(1080, &[0x53, 0xEF]),
        image(1024, &[0xE2, 0xE1, 0xF5, 0xE0]),
        image(0, b"QFI\xFB"),
        image(510, &[0x55, 0xAA]),
        b"package:libc6".to_vec(),
        b"package:-x".to_vec(),
    ]
}

/// Finds out what a segment's source is: its text, or the bytes of its file.
pub fn source(data: &[u8]) -> u64 {
    thread_local! {
        static PLACE: Place = Place::new();
    }
    let text = String::from_utf8_lossy(data);
    let of_text = text.strip_prefix("package:").map(|name| {
        let found = Source::find(&text);
        if let Ok(Source::Package(package)) = &found {
            // It becomes an argument of apt.
            assert!(package == name && !package.is_empty() && !package.starts_with('-'));
        }
        2 + u64::from(found.is_ok())
    });
    PLACE.with(|place| {
        let path = place.write("image", data);
        let of_file = match Source::find(&path.to_string_lossy()) {
            Ok(Source::Ext(_)) => 1,
            Ok(Source::Erofs(_)) => 2,
            Ok(other) => panic!("{other:?}"),
            Err(error) => 16 + error.to_string().len() as u64,
        };
        of_file << 2 | of_text.unwrap_or(1)
    })
}

pub fn debugfs_reports() -> Vec<Vec<u8>> {
    let report = "Inode: 12   Type: regular    Mode:  04755   Flags: 0x80000\n mtime: 0x68f3b2a1:5f5e1000 -- Sat Oct 18\n\
        Extended attributes:\n  security.capability (20) = 01 00 00 02 00 20 00 00 00 00 00 00 00 00 00 00 00 00 00 00 \n\
        \x20 system.posix_acl_access (28) = 01 00 00 00 01 00 06 00 02 00 04 00 e8 03 00 00 04 00 04 00 10 00 06 00 20 00 04 00 \n\
        Inode: 13   Type: symlink    Mode:  0777   Flags: 0x0\n mtime: 0xffffffff -- Wed Dec 31\n";
    let group = "Inode: 2   Type: directory    Mode:  0755   Flags: 0x80000\n  system.posix_acl_default (12) = 01 00 00 00 08 00 05 00 e8 03 00 00 \n";
    vec![report.into(), group.into()]
}

pub fn debugfs(data: &[u8]) -> u64 {
    match debugfs_facts(&String::from_utf8_lossy(data)) {
        Err(why) => why.len() as u64 % 8,
        Ok(files) => {
            let attributes: usize = files.iter().map(|file| file.attributes.len()).sum();
            let dated = files.iter().filter(|file| file.modified != (0, 0)).count();
            let sum = files.len().min(31) | attributes.min(31) << 5 | dated.min(31) << 10;
            16 + ((sum as u64) << 4)
        }
    }
}
