//! The manifest of a snapshot, `manifest.json`: what was saved, how, and from which VM.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use memfold_units::ByteSize;
use memfold_vm::VmSpec;
use memfold_vm::block_device::BlockDevice;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use xxhash_rust::xxh3::xxh3_128;

use super::cpu::Cpu;
use super::error::{SnapshotError, failed};
use super::image::{ImageBlock, ImageCounts};

/// Version of the format of an image that lies in `ram` alone; see `docs/snapshot-format.md`.
pub const FORMAT: u32 = 1;

/// Version of the format of one that is compressed or refers to disks. Newer ones are refused.
pub const FORMAT_IN_PARTS: u32 = 2;

/// File name of the manifest, which is written last.
pub const MANIFEST: &str = "manifest.json";
/// File name of the manifest's checksum.
pub(super) const MANIFEST_SUM: &str = "manifest.sum";
/// File name of the RAM image.
pub const RAM: &str = "ram";
/// File name of the image's checksums.
pub const SUMS: &str = "ram.sums";
/// File name of a compressed image.
pub const PACKED: &str = "ram.zst";
/// File name of the index of a compressed image's chunks.
pub const INDEX: &str = "ram.index";
/// File name of the table of pages that disks hold.
pub const REFERENCES: &str = "ram.refs";
/// File name of QEMU's device state.
pub const DEVICES: &str = "devices";

/// Which of the guest's caches a snapshot keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Keep {
    /// Nothing: the guest drops its page cache and its caches of names and inodes first.
    None,
    /// The page cache, by reference: what the disks hold is not saved a second time.
    Hot,
    /// All, as it is.
    All,
}

/// A file of the snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFacts {
    /// Length in bytes.
    pub bytes: u64,
    /// XXH3-128 of its bytes, as 32 hexadecimal digits.
    pub xxh3_128: String,
}

/// A compressed image: `ram.zst` and `ram.index` instead of `ram`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packed {
    /// Length of `ram.zst`, in bytes. `ram.sums` has the checksums of the uncompressed image.
    pub bytes: u64,
    /// `ram.index`.
    pub index: FileFacts,
}

/// Pages that are kept by reference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct References {
    /// `ram.refs`.
    pub table: FileFacts,
    /// Files that it refers to, in the order of their numbers. A path without a slash lies in the
    /// snapshot's directory.
    pub sources: Vec<PathBuf>,
    /// Number of pages kept by reference.
    pub pages: u64,
    /// Number of mappings that they need: one for consecutive references, and one for each gap
    /// between them. Unset in snapshots from before 2026-11-26, which refer to single pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mappings: Option<u64>,
}

/// Most mappings of disks' files, and of the gaps between them, for one image. A process may have
/// 65,530 mappings (`vm.max_map_count`); folding needs the rest.
pub(super) const MOST_MAPPINGS: usize = 40_960;

/// A disk at the instant of the snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedDisk {
    /// File that holds the saved contents: frozen, or always read-only. A path without a slash is
    /// in the snapshot's directory.
    pub path: PathBuf,
    /// QEMU's name of the format.
    pub format: String,
    /// Whether the VM cannot write it; then clones need no overlay.
    pub read_only: bool,
    /// Length in bytes when the disk was frozen. With `modified_ns`, it reveals a later change; a
    /// changed disk no longer matches the saved RAM.
    pub bytes: u64,
    /// Modification time when the disk was frozen, in nanoseconds since 1970.
    pub modified_ns: i128,
    /// Identity of a block device, whose device node has no length, and whose time changes with
    /// each boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<BlockDevice>,
    /// XXH3 (128 bits, hexadecimal) of a disk in the snapshot's directory, for `snapshot verify`.
    /// Unset for other disks, and in older snapshots.
    #[serde(default)]
    pub xxh3_128: Option<String>,
    /// Backing files, nearest first.
    #[serde(default)]
    pub backing: Vec<BackingFile>,
}

/// A backing file of a disk, as it was when the disk was frozen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Length in bytes.
    pub bytes: u64,
    /// Modification time, in nanoseconds since 1970.
    pub modified_ns: i128,
    /// Identity, if it is a block device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<BlockDevice>,
}

/// The manifest of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`] or [`FORMAT_IN_PARTS`].
    pub format: u32,
    /// Its name.
    pub name: String,
    /// Trust domain of the VM, and so of the snapshot.
    pub domain: Option<String>,
    /// The VM that was saved.
    pub vm: String,
    /// When, in seconds since 1970.
    pub created_s: u64,
    /// The memfold that saved it.
    pub memfold: String,
    /// Which of the guest's caches were kept.
    pub keep: Keep,
    /// Why memfold chose to keep these; unset: that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_reason: Option<String>,
    /// The VM's description.
    pub spec: VmSpec,
    /// QEMU's version: major, minor, micro.
    pub qemu: (u64, u64, u64),
    /// QEMU's machine type, with its version.
    pub machine: String,
    /// Accelerator: `kvm` or `tcg`.
    pub accel: String,
    /// CPU that the guest saw; unset in older snapshots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Cpu>,
    /// RAM blocks in `ram`.
    pub blocks: Vec<ImageBlock>,
    /// Numbers of pages in the file, by kind.
    pub counts: ImageCounts,
    /// Set for a boot snapshot (`vm reboot`): the process of the VM (`daemon::reboot`).
    #[serde(default)]
    pub of_boot: Option<String>,
    /// Whether the VM ran while its RAM was copied.
    #[serde(default)]
    pub live: bool,
    /// Pages that the VM wrote before they were copied, so that their old contents were kept.
    #[serde(default)]
    pub kept_pages: u64,
    /// Why free pages of the guest were saved; unset: they were left out.
    #[serde(default)]
    pub free_kept: Option<String>,
    /// Why caches that should have been dropped were saved; unset: they were dropped.
    #[serde(default)]
    pub cache_kept: Option<String>,
    /// Whether memfold's agent ran in the guest.
    #[serde(default)]
    pub agent: bool,
    /// Whether the guest's kernel knew its VM generation ID (`snapshot::identity`).
    #[serde(default)]
    pub generation_id: bool,
    /// Length of the uncompressed image, in bytes.
    pub ram_bytes: u64,
    /// Set if the image is compressed.
    #[serde(default)]
    pub packed: Option<Packed>,
    /// Set if pages of the image are kept by reference.
    #[serde(default)]
    pub references: Option<References>,
    /// `ram.sums`.
    pub sums: FileFacts,
    /// `devices`: QEMU's device state.
    pub devices: FileFacts,
    /// Disks, in the order of the description.
    pub disks: Vec<SavedDisk>,
    /// Read-only media other than disks, such as CDs, of a VM that memfold started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub media: Vec<BackingFile>,
    /// Copied files `file0`, `file1`, ...: of a VM that memfold did not start, the files that its
    /// command line names; of others, the files that QEMU writes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileFacts>,
    /// Host resources of the VM that only one VM can have: forwarded ports, sockets, displays.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub of_one_vm: Vec<String>,
    /// Time from the VM's stop until it resumed, in milliseconds.
    pub pause_ms: f64,
    /// Duration of the whole save, in milliseconds.
    pub save_ms: f64,
    /// Durations of the save's steps.
    #[serde(default)]
    pub steps: Steps,
}

/// Durations of a save's steps, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Steps {
    /// The guest drops its caches.
    pub drop_ms: f64,
    /// The guest lists what is free.
    pub list_ms: f64,
    /// QEMU's device state.
    pub devices_ms: f64,
    /// The RAM image; in a live save, only examining and protecting it while the VM was stopped.
    pub ram_ms: f64,
    /// Writing the RAM image of a live save, while the VM runs.
    #[serde(default)]
    pub copy_ms: f64,
    /// Writing the references to disks, while the VM runs.
    #[serde(default)]
    pub refer_ms: f64,
    /// Compressing the image, while the VM runs.
    #[serde(default)]
    pub pack_ms: f64,
    /// Disks frozen.
    pub disks_ms: f64,
    /// Disks that the VM writes in place are copied, while it runs.
    #[serde(default)]
    pub disks_copy_ms: f64,
}

/// Summary of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotInfo {
    /// Its name.
    pub name: String,
    /// Its trust domain.
    pub domain: Option<String>,
    /// The VM that was saved.
    pub vm: String,
    /// When, in seconds since 1970.
    pub created_s: u64,
    /// RAM of the VM, in bytes.
    pub memory_bytes: u64,
    /// Bytes that the snapshot takes on disk now.
    pub disk_bytes: u64,
    /// VMs that run from the snapshot.
    pub users: Vec<String>,
    /// Why the snapshot cannot be used; unset: it can.
    pub problem: Option<String>,
}

impl Manifest {
    /// Returns the RAM size of the VM.
    #[must_use]
    pub const fn memory(&self) -> ByteSize {
        self.spec.memory
    }

    /// Returns whether the RAM image can be mapped directly, with mappings of the disks' files over
    /// it.
    #[must_use]
    pub fn is_mappable(&self) -> bool {
        let can_map = |of: &References| {
            of.mappings
                .is_some_and(|count| count <= MOST_MAPPINGS as u64)
        };
        self.packed.is_none() && self.references.as_ref().is_none_or(can_map)
    }

    /// Returns the snapshot's files other than manifest and disks: names, lengths in bytes, and
    /// checksums where they exist.
    #[must_use]
    pub fn parts(&self) -> Vec<(&'static str, u64, Option<&FileFacts>)> {
        fn whole<'a>(
            part: &'static str,
            facts: &'a FileFacts,
        ) -> (&'static str, u64, Option<&'a FileFacts>) {
            (part, facts.bytes, Some(facts))
        }
        let mut parts = vec![whole(SUMS, &self.sums), whole(DEVICES, &self.devices)];
        if let Some(packed) = &self.packed {
            parts.push((PACKED, packed.bytes, None));
            parts.push(whole(INDEX, &packed.index));
        } else {
            parts.push((RAM, self.ram_bytes, None));
        }
        parts.extend(
            self.references
                .iter()
                .map(|refs| whole(REFERENCES, &refs.table)),
        );
        parts
    }

    /// Returns whether VMs that run from the snapshot can be given different identities.
    #[must_use]
    pub const fn tells_twins_apart(&self) -> bool {
        self.agent || self.generation_id
    }
}

/// Reads and checks the manifest of snapshot `name` in its directory.
pub(super) fn read_manifest(path: &Path, name: &str) -> Result<Manifest, SnapshotError> {
    let file = |part: &str| {
        fs::read(path.join(part)).map_err(|source| {
            if source.kind() == io::ErrorKind::NotFound && !path.exists() {
                SnapshotError::Unknown(name.into())
            } else {
                failed(&path.join(part))(source)
            }
        })
    };
    let text = file(MANIFEST)?;
    let sum = file(MANIFEST_SUM)?;
    let bad = |why: String| SnapshotError::Broken {
        name: name.into(),
        why,
    };
    if sum.trim_ascii() != hex(xxh3_128(&text)).as_bytes() {
        return Err(bad(format!("{MANIFEST} was changed after it was written")));
    }
    let version: serde_json::Value =
        serde_json::from_slice(&text).map_err(|e| bad(format!("{MANIFEST}: {e}")))?;
    if version["format"] != FORMAT && version["format"] != FORMAT_IN_PARTS {
        return Err(bad(format!(
            "the format is {}, this memfold reads formats {FORMAT} and {FORMAT_IN_PARTS}",
            version["format"]
        )));
    }
    let manifest: Manifest =
        serde_json::from_value(version).map_err(|e| bad(format!("{MANIFEST}: {e}")))?;
    for (part, bytes, _) in manifest.parts() {
        let length = fs::metadata(path.join(part)).map(|m| m.len());
        match length {
            Ok(length) if length == bytes => {}
            Ok(length) => {
                return Err(bad(format!("{part} has {length} bytes instead of {bytes}")));
            }
            Err(error) => return Err(bad(format!("{part}: {error}"))),
        }
    }
    Ok(manifest)
}

/// A checksum as 32 hexadecimal digits.
pub(super) fn hex(sum: u128) -> String {
    format!("{sum:032x}")
}

/// Name of a frozen disk in a snapshot.
pub(super) fn disk_name(disk: usize) -> String {
    format!("disk{disk}.qcow2")
}

/// Name of a file of [`memfold_vm::foreign`], or of `written_files`, in a snapshot.
pub(super) fn file_name(number: usize) -> String {
    format!("file{number}")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A manifest of nothing.
    pub fn manifest(name: &str, memory: ByteSize) -> Manifest {
        let none = FileFacts {
            bytes: 0,
            xxh3_128: String::new(),
        };
        Manifest {
            format: FORMAT,
            name: name.into(),
            domain: None,
            vm: "web1".into(),
            created_s: 1,
            memfold: "0.1.0".into(),
            keep: Keep::None,
            keep_reason: None,
            spec: VmSpec::new("web1", memory),
            qemu: (10, 0, 2),
            machine: "pc-q35-10.0".into(),
            accel: "tcg".into(),
            cpu: None,
            blocks: Vec::new(),
            counts: ImageCounts::default(),
            of_boot: None,
            live: false,
            kept_pages: 0,
            free_kept: None,
            cache_kept: None,
            agent: true,
            generation_id: true,
            ram_bytes: 0,
            packed: None,
            references: None,
            sums: none.clone(),
            devices: none,
            disks: Vec::new(),
            media: Vec::new(),
            files: Vec::new(),
            of_one_vm: Vec::new(),
            pause_ms: 1.5,
            save_ms: 2.0,
            steps: Steps::default(),
        }
    }
}
