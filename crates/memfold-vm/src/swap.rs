//! A VM's swap disk: a separate virtio-blk disk whose contents are worthless after the VM has
//! ended.
//!
//! The guest's device uses a block node, which uses a file. Each move of the disk to or from lent
//! RAM makes new block nodes, whose names contain the next number, the generation.
//!
//! ```text
//!   virtio-blk "swap", serial memfold-swap
//!        |
//!      swap0  (raw)            another generation, swap1, swap2, ..., after each move to or from lent RAM
//!        |
//!   swap-file0  a temporary file beside overlays, fully allocated, removed with the VM
//! ```
//! The file is created with a swap header, so the guest needs no `mkswap`, only
//! `swapon -L memfold-swap`.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use memfold_units::ByteSize;
use rustix::fs::FallocateFlags;

use super::overlay;
use super::spec::VmSpec;
use super::spec_error::{SpecError, require};

/// Serial number of a VM's swap disk, and label of the swap space on the disk.
pub const SERIAL: &str = memfold_wire::order::SWAP_SERIAL;

/// ID of the swap disk's device in QEMU.
pub const DEVICE: &str = "swap";

/// Minimum size of a swap disk.
const LEAST: ByteSize = ByteSize::mib(1);

/// Page size of guests (x86-64), in bytes.
const PAGE: u64 = 4096;

/// Returns the name of the swap disk's topmost block node, unless the disk is on lent RAM with
/// durability `none`. `generation`: number of the disk's block nodes, from 0, which grows with each
/// move of the disk.
#[must_use]
pub fn node(generation: u64) -> String {
    format!("swap{generation}")
}

/// Returns the name of the block node of the swap disk's file on the host. `generation`: number of
/// the disk's block nodes, from 0, which grows with each move of the disk.
#[must_use]
pub fn file_node(generation: u64) -> String {
    format!("swap-file{generation}")
}

pub(super) fn check(spec: &VmSpec) -> Result<(), SpecError> {
    let Some(size) = spec.swap else {
        return Ok(());
    };
    let why = format!("{} bytes are not a whole number of MiB, at least 1", size.0);
    require(size >= LEAST && size.0 % LEAST.0 == 0, "swap", why)?;
    let why = "a VM with a swap disk cannot be saved, so boot_snapshot cannot be used; set only one of the two";
    require(!spec.boot_snapshot, "swap", why)
}

/// Creates a file of `bytes` bytes for a swap disk, which only its owner can read. All blocks are
/// allocated, because a guest whose swap disk runs out of space loses programs. `fresh`: also
/// writes a swap header. After an error, no file remains.
pub fn create(path: &Path, bytes: u64, fresh: bool) -> io::Result<()> {
    let file = overlay::new_file(path)?;
    fill(&file, bytes, fresh).inspect_err(|_| {
        // The error of `fill` is the one to report.
        let _ = std::fs::remove_file(path);
    })
}

fn fill(file: &File, bytes: u64, fresh: bool) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => {}
        // Such a file system allocates blocks when they are written.
        Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(bytes)?,
        Err(error) => return Err(error.into()),
    }
    if fresh {
        file.write_all_at(&header(bytes)?, 0)?;
    }
    Ok(())
}

/// Returns the first page of a swap space with its header (`union swap_header` in
/// `include/linux/swap.h`).
fn header(bytes: u64) -> io::Result<Vec<u8>> {
    let last = u32::try_from(bytes / PAGE - 1)
        .map_err(|_| io::Error::other("swap disks end at 16 TiB"))?;
    let mut page = vec![0; usize::try_from(PAGE).unwrap_or(4096)];
    page[1024..1028].copy_from_slice(&1_u32.to_le_bytes());
    page[1028..1032].copy_from_slice(&last.to_le_bytes());
    let mut uuid = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut uuid)?;
    page[1036..1052].copy_from_slice(&uuid);
    page[1052..1052 + SERIAL.len()].copy_from_slice(SERIAL.as_bytes());
    page[4086..].copy_from_slice(b"SWAPSPACE2");
    Ok(page)
}

/// Returns a new path for the swap disk of the VM `name`, or for a copy of the disk: in the
/// directory of temporary overlays, which is on a disk and not in RAM.
pub fn place(name: &str) -> io::Result<PathBuf> {
    let unique = overlay::unique();
    Ok(overlay::directory()?.join(format!("memfold-{name}-swap-{unique:x}.raw")))
}

/// Parses the output of [`SwapUse`](memfold_wire::order::GuestOrder::SwapUse) into the number of
/// bytes in use on the swap disk (`proc_swaps(5)`: name, type, size, used in KiB, priority).
#[must_use]
pub fn parse_used(line: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(line).ok()?;
    let used: u64 = text.split_whitespace().nth(3)?.parse().ok()?;
    used.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::process::Command;

    #[test]
    fn a_new_swap_disk_has_its_space_allocated_and_blkid_recognises_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        create(&path, 8 << 20, true).unwrap();
        let facts = std::fs::metadata(&path).unwrap();
        assert_eq!(facts.len(), 8 << 20);
        assert!(facts.blocks() * 512 >= 8 << 20);
        assert_eq!(facts.permissions().mode() & 0o777, 0o600);
        let again = create(&path, 8 << 20, true).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        let said = Command::new("blkid")
            .args(["-p", "-o", "export"])
            .arg(&path)
            .output();
        let Ok(said) = said else {
            memfold_testkit::skip!("in part: no blkid (package util-linux)");
        };
        let said = String::from_utf8(said.stdout).unwrap();
        assert!(
            said.contains("TYPE=swap") && said.contains("LABEL=memfold-swap"),
            "{said}"
        );
    }

    #[test]
    fn a_swap_disk_is_refused_if_its_size_is_invalid_or_the_vm_has_a_boot_snapshot() {
        let mut spec = VmSpec::new("a", ByteSize::mib(128));
        spec.swap = Some(ByteSize::mib(64));
        check(&spec).unwrap();
        spec.boot_snapshot = true;
        let refusal = |spec: &VmSpec| check(spec).unwrap_err().to_string();
        assert!(refusal(&spec).contains("boot_snapshot cannot be used"));
        spec.boot_snapshot = false;
        for bad in [0, 4096, (1 << 20) + 1] {
            spec.swap = Some(ByteSize(bad));
            assert!(
                refusal(&spec).contains("not a whole number of MiB"),
                "{bad}"
            );
        }
    }
}
