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

/// What it says of itself, written last.
pub const MANIFEST: &str = "manifest.json";
/// The checksum of that.
pub(super) const MANIFEST_SUM: &str = "manifest.sum";
/// RAM image.
pub const RAM: &str = "ram";
/// Its checksums.
pub const SUMS: &str = "ram.sums";
/// A compressed one.
pub const PACKED: &str = "ram.zst";
/// Where its chunks lie.
pub const INDEX: &str = "ram.index";
/// Pages that disks hold.
pub const REFERENCES: &str = "ram.refs";
/// QEMU's device state.
pub const DEVICES: &str = "devices";

/// What is kept of what the guest can get again.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Keep {
    /// Nothing: the guest drops its page cache and its caches of names and inodes first.
    #[default]
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
    /// Length of `ram.zst`, in bytes. What it unpacks to has checksums of its own.
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
    /// How many pages.
    pub pages: u64,
    /// How many mappings show them: references that go on where the last one ends are one.
    /// Snapshots of before 2026-11-26 don't say, and refer to single pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mappings: Option<u64>,
}

/// Mappings of disks' files in one image that a VM can have: with the gaps between them, and what
/// folding needs, a process may have 65,530.
pub(super) const MOST_MAPPINGS: u64 = 20_480;

/// A disk at the instant of the snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedDisk {
    /// The file that holds the disk as it was: frozen, or read-only from the beginning. A path
    /// without a slash lies in the snapshot's directory.
    pub path: PathBuf,
    /// Its format, as QEMU calls it.
    pub format: String,
    /// Whether the VM can't write it, so that clones need no overlay.
    pub read_only: bool,
    /// Length in bytes and time of the last change in nanoseconds since 1970, when it was frozen: a
    /// disk that was changed since doesn't belong to the RAM any more.
    pub bytes: u64,
    /// See `bytes`.
    pub modified_ns: i128,
    /// What it was, if it is a block device: its node has no length, and its time is the boot's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<BlockDevice>,
    /// XXH3 (128 bits, hexadecimal) of a disk that lies in the snapshot, compared when that is
    /// verified; of others, and of older snapshots, none.
    #[serde(default)]
    pub xxh3_128: Option<String>,
    /// Files that it is built on, nearest first.
    #[serde(default)]
    pub backing: Vec<BackingFile>,
}

/// A file that a disk is built on, as it was when the disk was frozen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingFile {
    /// Where it lies.
    pub path: PathBuf,
    /// Length in bytes.
    pub bytes: u64,
    /// Time of its last change, in nanoseconds since 1970.
    pub modified_ns: i128,
    /// What it was, if it is a block device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<BlockDevice>,
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// Its name.
    pub name: String,
    /// Its trust domain: that of the VM.
    pub domain: Option<String>,
    /// The VM that was saved.
    pub vm: String,
    /// When, in seconds since 1970.
    pub created_s: u64,
    /// The memfold that saved it.
    pub memfold: String,
    /// What was kept.
    pub keep: Keep,
    /// The VM's description.
    pub spec: VmSpec,
    /// QEMU's version: major, minor, micro.
    pub qemu: (u64, u64, u64),
    /// QEMU's machine type, with its version.
    pub machine: String,
    /// What carried it out: `kvm` or `tcg`.
    pub accel: String,
    /// The CPU that it gave the guest; of older snapshots, none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Cpu>,
    /// RAM blocks in `ram`.
    pub blocks: Vec<ImageBlock>,
    /// What of them is in the file.
    pub counts: ImageCounts,
    /// Set if it was taken right after a boot, for `vm reboot`: which process the VM was
    /// (`daemon::reboot`).
    #[serde(default)]
    pub of_boot: Option<String>,
    /// Whether the VM went on while its RAM was copied.
    #[serde(default)]
    pub live: bool,
    /// Pages that it wrote to before they had been copied, so that they were kept for that.
    #[serde(default)]
    pub kept_pages: u64,
    /// Why pages that the guest had free were saved like others, if they were.
    #[serde(default)]
    pub free_kept: Option<String>,
    /// Why caches that were to be dropped were saved, as far as they were.
    #[serde(default)]
    pub cache_kept: Option<String>,
    /// Whether memfold's agent ran in the guest.
    #[serde(default)]
    pub agent: bool,
    /// Whether the guest's kernel knew its VM generation ID (`snapshot::identity`).
    #[serde(default)]
    pub generation_id: bool,
    /// Length of `ram`, in bytes; of a compressed image, what it would be.
    pub ram_bytes: u64,
    /// Set if it is compressed.
    #[serde(default)]
    pub packed: Option<Packed>,
    /// Set if pages of it are kept by reference.
    #[serde(default)]
    pub references: Option<References>,
    /// `ram.sums`.
    pub sums: FileFacts,
    /// `devices`: QEMU's device state.
    pub devices: FileFacts,
    /// Disks, in the order of the description.
    pub disks: Vec<SavedDisk>,
    /// Media that it could only read and that are none of its disks, such as CDs, of a VM that
    /// memfold started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub media: Vec<BackingFile>,
    /// `file0` and so on: files that its command line names, of a VM that memfold didn't start; of
    /// others, those that it writes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileFacts>,
    /// What the VM had of its host that one VM alone can have: forwarded ports, sockets, displays.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub of_one_vm: Vec<String>,
    /// Time from the VM's stop to its going on, in milliseconds.
    pub pause_ms: f64,
    /// Time of the whole save, in milliseconds.
    pub save_ms: f64,
    /// Its steps.
    #[serde(default)]
    pub steps: Steps,
}

/// Times of a save's steps, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Steps {
    /// The guest drops its caches.
    pub drop_ms: f64,
    /// The guest lists what is free.
    pub list_ms: f64,
    /// QEMU's device state.
    pub devices_ms: f64,
    /// The RAM image; of a live save, what was looked at and protected while the VM stood still.
    pub ram_ms: f64,
    /// Of a live save: the RAM image, while the VM runs.
    #[serde(default)]
    pub copy_ms: f64,
    /// What the disks hold is found and taken out, while the VM runs.
    #[serde(default)]
    pub refer_ms: f64,
    /// The rest is compressed, while the VM runs.
    #[serde(default)]
    pub pack_ms: f64,
    /// Disks frozen.
    pub disks_ms: f64,
    /// Disks that the VM writes in place are copied, while it runs.
    #[serde(default)]
    pub disks_copy_ms: f64,
}

/// A snapshot in short.
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
    /// Bytes that it takes on disk now.
    pub disk_bytes: u64,
    /// VMs that run from it.
    pub users: Vec<String>,
    /// Why it can't be used, if it can't.
    pub problem: Option<String>,
}

impl Manifest {
    /// RAM of the VM.
    #[must_use]
    pub const fn memory(&self) -> ByteSize {
        self.spec.memory
    }

    /// Whether its RAM image can be mapped as it lies there, with what disks hold over it.
    #[must_use]
    pub fn is_mappable(&self) -> bool {
        let can_map = |of: &References| of.mappings.is_some_and(|count| count <= MOST_MAPPINGS);
        self.packed.is_none() && self.references.as_ref().is_none_or(can_map)
    }

    /// Its files next to `manifest.json` and the disks: names, lengths in bytes, and checksums of
    /// those that have one.
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

    /// Whether VMs that run from it can be told to be different from each other.
    #[must_use]
    pub const fn tells_twins_apart(&self) -> bool {
        self.agent || self.generation_id
    }
}

/// What the snapshot `name` in a directory of its own says of itself.
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
