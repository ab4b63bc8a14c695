//! Puts the frozen disk overlays of a saved VM into the snapshot's directory, as hard links or as
//! copies, and records the files of all its disks for the manifest.

use std::fs::{self, File};
use std::io::{self, Seek as _, SeekFrom};
use std::path::Path;

use memfold_vm::{DiskFormat, DiskSpec, VmSpec, qcow2};

use super::chain_check;
use super::disk_chain::chain;
use super::disk_copy::Copied;
use super::draft::Draft;
use super::error::{SnapshotError, failed};
use super::file_facts::{backing_file, backing_files, facts_at};
use super::freeze::Frozen;
use super::manifest::{SavedDisk, disk_name};
use super::own_overlay;
use super::rebase::used;
use super::room::check_free;
use super::sparse_copy::copy_file;

/// Gives frozen overlays a name in the draft, and returns the file of every disk.
pub(super) fn take_over(
    spec: &VmSpec,
    frozen: &[Frozen],
    copies: &[Copied],
    draft: &Draft,
) -> Result<Vec<SavedDisk>, SnapshotError> {
    let mut disks = Vec::new();
    for (number, disk) in spec.disks.iter().enumerate() {
        let own = draft.path.join(disk_name(number));
        let found = frozen.iter().find(|f| f.disk == number);
        if let Some(frozen) = found {
            let failed = failed(&frozen.path);
            if spec.keeps_rights() {
                keep_file(&frozen.path, &own).map_err(failed)?;
            } else {
                own_overlay::take(&frozen.path, &own, most_bytes(disk)).map_err(failed)?;
                chain_check::check_header(&own, spec, number, draft)?;
            }
        }
        let is_ours = found.is_some() || copies.iter().any(|copy| copy.disk == number);
        let (file, format, sum) = if is_ours {
            let file = backing_file(&own, Path::new(&disk_name(number)))?;
            (file, DiskFormat::Qcow2, Some(facts_at(&own)?.xxh3_128))
        } else {
            (backing_file(&disk.path, &disk.path)?, disk.format(), None)
        };
        // The guest writes the contents of a raw disk, which may look like a header that names
        // files of the host.
        let is_copy = is_ours && found.is_none();
        if is_copy {
            chain_check::check_alone(&own)?;
        }
        let files = match format {
            DiskFormat::Qcow2 if !is_copy => chain(if is_ours { &own } else { &disk.path })?,
            DiskFormat::Qcow2 | DiskFormat::Raw => Vec::new(),
        };
        disks.push(SavedDisk {
            file,
            format: format.driver().to_owned(),
            read_only: !is_ours || disk.read_only,
            xxh3_128: sum,
            // The first file of the chain is the disk itself.
            backing: backing_files(files.into_iter().skip(1))?,
        });
    }
    Ok(disks)
}

/// Returns the largest length that an overlay of a disk can have. QEMU writes the overlay, and a
/// guest may control it.
fn most_bytes(disk: &DiskSpec) -> u64 {
    let virtual_bytes = match disk.format() {
        DiskFormat::Qcow2 => qcow2::virtual_bytes(&disk.path),
        DiskFormat::Raw => File::open(&disk.path)
            .and_then(|mut file| file.seek(SeekFrom::End(0)))
            .ok(),
    };
    // Beside the disk's bytes, an overlay has tables, and clusters that it does not use any more.
    virtual_bytes.map_or(u64::MAX, |bytes| {
        bytes.saturating_mul(2).saturating_add(1 << 30)
    })
}

/// Gives a file that nobody writes any more a second name, or copies it to another file system.
fn keep_file(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
            check_free(to.parent().unwrap_or(to), used(from))?;
            copy_file(from, to)
        }
        other => other,
    }
}
