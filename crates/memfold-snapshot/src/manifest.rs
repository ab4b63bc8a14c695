//! The manifest of a snapshot (`manifest.json`): what was saved, how, and from which VM.

use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use memfold_units::{ByteSize, PAGE_SIZE};
use memfold_vm::VmSpec;
use memfold_vm::block_device::BlockDevice;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use xxhash_rust::xxh3::xxh3_128;

use super::cpu::Cpu;
use super::error::{SnapshotError, failed};
use super::image::{CHUNK_PAGES, ImageBlock, ImageCounts, SUMS};

/// Format versions that this memfold reads; see `docs/snapshot-format.md`.
pub const FORMATS: RangeInclusive<u32> = 1..=FORMAT_OF_ENCRYPTION;

/// Format version of new snapshots, and the first in which the checksum of a chunk is the sum of
/// its pages' checksums, so that layers can be built on them.
pub const FORMAT_OF_LAYERS: u32 = 3;

/// Format version of encrypted snapshots, which an older memfold must not take for others. Newer
/// versions are refused.
pub const FORMAT_OF_ENCRYPTION: u32 = 4;

/// File name of the manifest in a snapshot's directory.
pub const MANIFEST: &str = "manifest.json";
/// File name of the manifest's checksum.
pub(super) const MANIFEST_SUM: &str = "manifest.sum";
/// File name of the RAM image in a snapshot's directory.
pub const RAM: &str = "ram";
/// File name of a compressed RAM image, which replaces [`RAM`].
pub const PACKED: &str = "ram.zst";
/// File name of the index that locates the chunks of a compressed RAM image.
pub const INDEX: &str = "ram.index";
/// File name of the table of references: pages of the RAM image that only disks hold.
pub const REFERENCES: &str = "ram.refs";
/// File name of an encrypted RAM image, which replaces [`RAM`].
pub const SEALED: &str = "ram.sealed";
/// File name of the encrypted data key of a snapshot.
pub const KEY: &str = "key";
/// File name of QEMU's device state in a snapshot's directory.
pub const DEVICES: &str = "devices";

/// Which of the guest's caches a snapshot keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Keep {
    /// No cache: before the save, the guest drops its page cache and its caches of names and
    /// inodes.
    None,
    /// The page cache, by reference: pages that the snapshot's disks contain are not saved a second
    /// time.
    Hot,
    /// All caches, which are saved as part of RAM.
    All,
}

/// Length and checksum of a file of the snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFacts {
    /// Length of the file in bytes.
    pub bytes: u64,
    /// XXH3-128 of the file's bytes, as 32 hexadecimal digits.
    pub xxh3_128: String,
}

/// Facts about a compressed RAM image, which consists of the files `ram.zst` and `ram.index`
/// instead of `ram`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packed {
    /// Length of `ram.zst` or `ram.sealed`, in bytes. `ram.sums` has the checksums of the image
    /// itself.
    pub bytes: u64,
    /// Length and checksum of `ram.index`.
    pub index: FileFacts,
}

/// Facts about the encryption of a snapshot's memory: the image is `ram.sealed` with `ram.index`
/// ([`Packed`]), and the tables and the device state are encrypted, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Encryption {
    /// Name of the operator's key.
    pub key: String,
    /// Length and checksum of the file `key`, which holds the encrypted data key.
    pub header: FileFacts,
    /// Whether the chunks were compressed before they were encrypted.
    pub compressed: bool,
    /// Whether the user accepted that disks and other files in the snapshot are not encrypted.
    #[serde(default)]
    pub plain_disks: bool,
}

/// Facts about the pages that a RAM image holds by reference: the snapshot's disks contain these
/// pages, and the image only says where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct References {
    /// Length and checksum of `ram.refs`.
    pub table: FileFacts,
    /// Files that the references name by index. A path without a slash is in the snapshot's
    /// directory.
    pub sources: Vec<PathBuf>,
    /// Number of pages of the RAM image that are held by reference.
    pub pages: u64,
    /// Number of pages, among `pages`, that files of the parent hold.
    #[serde(default)]
    pub parent_pages: u64,
    /// Number of mappings that the references need: one for consecutive references, and one for
    /// each gap between references. Unset in snapshots from before 2026-11-26, which refer to
    /// single pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mappings: Option<u64>,
}

/// Maximum number of files to which one image refers: files of a snapshot and of all below it.
const MOST_SOURCES: usize = 4096;

/// Maximum number of mappings for one image: of disks' files, and of the gaps between them. A
/// process may have 65,530 mappings (`vm.max_map_count`); folding needs the rest.
pub(super) const MOST_MAPPINGS: usize = 40_960;

/// A disk of the saved VM, as it was at the instant of the snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedDisk {
    /// File with the disk's saved contents, which nobody writes any more. A path without a slash is
    /// in the snapshot's directory. Length and modification time reveal a later change; a changed
    /// disk no longer matches the saved RAM.
    #[serde(flatten)]
    pub file: BackingFile,
    /// QEMU's name of the disk's format: `qcow2` or `raw`.
    pub format: String,
    /// Whether VMs that run from the snapshot cannot write to the disk, so that they need no
    /// overlay over it.
    pub read_only: bool,
    /// XXH3-128 of the disk's file in the snapshot's directory, as 32 hexadecimal digits. Unset for
    /// disks outside this directory, and in older snapshots.
    #[serde(default)]
    pub xxh3_128: Option<String>,
    /// Backing files of the disk, beginning with the nearest.
    #[serde(default)]
    pub backing: Vec<BackingFile>,
}

impl SavedDisk {
    /// Returns the disk's own file, and then its backing files, beginning with the nearest.
    pub fn files(&self) -> impl Iterator<Item = &BackingFile> {
        std::iter::once(&self.file).chain(&self.backing)
    }
}

/// State of a file that a snapshot needs, when it was saved: of a disk, a backing file or a medium.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingFile {
    /// Path of the file; without a slash, the file is in the snapshot's directory.
    pub path: PathBuf,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Modification time of the file, in nanoseconds since 1970.
    pub modified_ns: i64,
    /// Identity of the block device, if the file is one; otherwise unset. Length and modification
    /// time do not identify a device: a device node has no length, and its time changes at each
    /// boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<BlockDevice>,
}

/// The parent of a layer, when the layer was saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParentName {
    /// Name of the parent.
    pub name: String,
    /// Checksum of the parent's `ram.sums`, which tells a snapshot of the same name apart.
    pub sums: String,
    /// Number of layers below the layer that is built on this parent, from 1.
    pub depth: u32,
}

/// The manifest of a snapshot.
#[allow(clippy::struct_excessive_bools)] // independent facts
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Format version, from 1 to [`FORMAT_OF_ENCRYPTION`].
    pub format: u32,
    /// Name of the snapshot.
    pub name: String,
    /// Trust domain of the saved VM, and so of the snapshot; unset: the VM shared with no other VM.
    pub domain: Option<String>,
    /// Name of the VM that was saved.
    pub vm: String,
    /// Time at which the save ended, in seconds since 1970.
    pub created_s: u64,
    /// Snapshot whose pages this one lacks and refers to; unset if it has all pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ParentName>,
    /// Version of the memfold that saved the snapshot.
    pub memfold: String,
    /// Which of the guest's caches the snapshot keeps.
    pub keep: Keep,
    /// Reason why memfold chose `keep`; unset if the user chose it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_reason: Option<String>,
    /// Reason why all pages were saved although the VM ran from a snapshot; unset if the snapshot
    /// is a layer, if the VM ran from no snapshot, or if the user asked for all pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole_reason: Option<String>,
    /// Description of the saved VM, from which VMs are started that run from the snapshot.
    pub spec: VmSpec,
    /// Version of the saved VM's QEMU: major, minor, micro.
    pub qemu: (u64, u64, u64),
    /// Machine type of the saved VM in QEMU, with its version.
    pub machine: String,
    /// Accelerator of the saved VM: `kvm` or `tcg`.
    pub accel: String,
    /// CPU that the guest saw before the save; unset in older snapshots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Cpu>,
    /// Places of QEMU's RAM blocks in the RAM image.
    pub blocks: Vec<ImageBlock>,
    /// Numbers of pages in the RAM image, by kind.
    pub counts: ImageCounts,
    /// Mark of the QEMU process that was saved, in a boot snapshot (which `vm reboot` restores);
    /// unset in other snapshots.
    #[serde(default)]
    pub of_boot: Option<String>,
    /// Whether the snapshot was made by `memfold fork`, and is removed when no VM needs it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fork: bool,
    /// Whether the VM ran while its RAM was copied.
    #[serde(default)]
    pub live: bool,
    /// Number of pages whose old contents were copied during a live save, because the VM wrote to
    /// them before they were saved.
    #[serde(default)]
    pub kept_pages: u64,
    /// Reason why the guest's free pages were saved, too; unset if they were left out of the image.
    #[serde(default)]
    pub free_kept: Option<String>,
    /// Reason why the guest's caches were saved although they should have been dropped; unset if
    /// they were dropped or should be kept.
    #[serde(default)]
    pub cache_kept: Option<String>,
    /// Whether memfold's agent ran in the guest at the save.
    #[serde(default)]
    pub agent: bool,
    /// Whether the guest's kernel had a driver for the VM generation ID, and so reseeds its random
    /// numbers in each restored VM.
    #[serde(default)]
    pub generation_id: bool,
    /// Boot ID of the guest's kernel at the save, by the guest's agent; unset without an agent, and
    /// in older snapshots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_boot: Option<String>,
    /// Length of the uncompressed RAM image, in bytes.
    pub ram_bytes: u64,
    /// Facts about the compressed RAM image; unset if the image is not compressed.
    #[serde(default)]
    pub packed: Option<Packed>,
    /// Facts about the encryption of the memory; unset if it is not encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<Encryption>,
    /// Facts about the pages that the RAM image holds by reference; unset if there are none.
    #[serde(default)]
    pub references: Option<References>,
    /// Length and checksum of `ram.sums`, which contains the checksums of the RAM image.
    pub sums: FileFacts,
    /// Length and checksum of `devices`, QEMU's device state.
    pub devices: FileFacts,
    /// Disks of the saved VM, in the order of the description.
    pub disks: Vec<SavedDisk>,
    /// Read-only media other than disks, such as CDs, of a saved VM that memfold started. Media of
    /// other VMs are copied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub media: Vec<BackingFile>,
    /// Facts about copies of other files, which are `file0`, `file1`, ... in the snapshot. For a VM
    /// that memfold started, these are the files that QEMU writes; for other VMs, the files that
    /// QEMU's command line names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileFacts>,
    /// Host resources of the saved VM that only one VM can have: forwarded ports, sockets,
    /// displays.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub of_one_vm: Vec<String>,
    /// Time for which the save stopped the VM, in milliseconds.
    pub pause_ms: f64,
    /// Duration of the whole save, in milliseconds.
    pub save_ms: f64,
    /// Durations of the steps of the save.
    #[serde(default)]
    pub steps: Steps,
}

/// Durations of the steps of a save, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Steps {
    /// Milliseconds in which the guest dropped its caches.
    pub drop_ms: f64,
    /// Milliseconds for which the save waited for the guest's list of free pages.
    pub list_ms: f64,
    /// Milliseconds in which QEMU wrote its device state.
    pub devices_ms: f64,
    /// Milliseconds to write the RAM image while the VM was stopped. In a live save, RAM is only
    /// examined and protected in this time.
    pub ram_ms: f64,
    /// Milliseconds to write the RAM image of a live save while the VM ran.
    #[serde(default)]
    pub copy_ms: f64,
    /// Milliseconds to find out where disks hold the guest's cached pages.
    #[serde(default)]
    pub refer_ms: f64,
    /// Milliseconds to compress the RAM image while the VM ran.
    #[serde(default)]
    pub pack_ms: f64,
    /// Milliseconds to freeze the disks.
    pub disks_ms: f64,
    /// Milliseconds to copy disks that the VM writes in place while the VM ran.
    #[serde(default)]
    pub disks_copy_ms: f64,
}

/// Summary of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotInfo {
    /// Name of the snapshot.
    pub name: String,
    /// Trust domain of the snapshot; null: its VMs share memory only with each other.
    pub domain: Option<String>,
    /// Name of the VM that was saved.
    pub vm: String,
    /// Time at which the save ended, in seconds since 1970.
    pub created_s: u64,
    /// Size of the saved VM's RAM, in bytes.
    pub memory_bytes: u64,
    /// Bytes that the snapshot's files use on disk now.
    pub disk_bytes: u64,
    /// Snapshot that this one is a layer on; unset if it has all pages.
    pub parent: Option<String>,
    /// Bytes of RAM that the layer lacks, because files of its parent hold them.
    pub parent_bytes: u64,
    /// Whether forks start from the snapshot, so that it is removed when no VM and no other
    /// snapshot needs it.
    pub fork: bool,
    /// Name of the key with which the snapshot's memory is encrypted; unset if it is not encrypted.
    pub key: Option<String>,
    /// Names of the VMs that run from the snapshot.
    pub users: Vec<String>,
    /// Reason why the snapshot cannot be used; unset if it can be used.
    pub problem: Option<String>,
}

impl Manifest {
    /// Parses the text of a manifest, and checks what can be checked without the snapshot's files.
    ///
    /// # Errors
    ///
    /// The reason why the manifest is refused, as text.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let unreadable = |error: serde_json::Error| format!("{MANIFEST}: {error}");
        let version: serde_json::Value = serde_json::from_slice(text).map_err(unreadable)?;
        let format = version["format"].as_u64();
        let format = format.and_then(|format| u32::try_from(format).ok());
        if !format.is_some_and(|format| FORMATS.contains(&format)) {
            return Err(format!(
                "the format is {}, this memfold reads formats 1 to {FORMAT_OF_ENCRYPTION}",
                version["format"]
            ));
        }
        let manifest: Self = serde_json::from_value(version).map_err(unreadable)?;
        match manifest.misplaced() {
            Some(why) => Err(format!("{MANIFEST}: {why}")),
            None => Ok(manifest),
        }
    }

    /// Returns what is wrong with the places of the RAM blocks and the numbers of pages. A pulled
    /// manifest has right checksums whatever its author wrote into it.
    #[must_use]
    pub fn misplaced(&self) -> Option<String> {
        let all = self.ram_bytes / PAGE_SIZE;
        let mut next = 0;
        for block in &self.blocks {
            let end = block.first_page.checked_add(block.pages);
            let is_right = block.first_page >= next && block.first_page % CHUNK_PAGES == 0;
            let Some(end) = end.filter(|end| is_right && *end <= all) else {
                return Some(format!(
                    "RAM block '{}' cannot begin at page {} of {all} and have {} pages",
                    block.name, block.first_page, block.pages
                ));
            };
            next = end;
        }
        let is_numbered = self.format >= FORMAT_OF_ENCRYPTION;
        if self.encryption.is_some() && !(is_numbered && self.packed.is_some()) {
            return Some("it says that the snapshot is encrypted, but its format is older than 4 or it has no encrypted image".into());
        }
        let referred = self.references.as_ref();
        let is_wrong = referred.is_some_and(|of| of.pages > all || of.parent_pages > of.pages);
        if is_wrong {
            return Some("it refers to more pages than there are".into());
        }
        let sources = referred.map_or(0, |of| of.sources.len());
        (sources > MOST_SOURCES).then(|| {
            format!("it refers to {sources} files, and at most {MOST_SOURCES} are allowed")
        })
    }

    /// Returns the paths outside the snapshot that the manifest names, each once.
    pub(super) fn outside(&self) -> Vec<PathBuf> {
        let of_disks = self.disks.iter().flat_map(SavedDisk::files);
        let sources = self.references.iter().flat_map(|refs| &refs.sources);
        let boot = &self.spec.boot;
        let boot = [&boot.kernel, &boot.initrd, &boot.firmware];
        let mut found: Vec<PathBuf> = Vec::new();
        let all = of_disks.map(|file| &file.path).chain(sources);
        for path in all.chain(boot.into_iter().flatten()) {
            if path.is_absolute() && !found.contains(path) {
                found.push(path.clone());
            }
        }
        found
    }

    /// Returns the RAM size of the saved VM.
    #[must_use]
    pub const fn memory(&self) -> ByteSize {
        self.spec.memory
    }

    /// Returns whether a VM can map the file `ram` directly, with mappings of disks' files over it
    /// for the references. Otherwise the image must be assembled in memory first.
    #[must_use]
    pub fn is_mappable(&self) -> bool {
        let most = MOST_MAPPINGS as u64;
        let can_map = |of: &References| of.mappings.is_some_and(|count| count <= most);
        self.packed.is_none() && self.references.as_ref().is_none_or(can_map)
    }

    /// Returns the snapshot's files other than manifest, disks and copied files. Each has a name,
    /// its length in bytes, and its facts if the manifest has a checksum of the whole file.
    #[must_use]
    pub fn parts(&self) -> Vec<(&'static str, u64, Option<&FileFacts>)> {
        let mut whole = vec![(SUMS, &self.sums), (DEVICES, &self.devices)];
        whole.extend(self.packed.iter().map(|packed| (INDEX, &packed.index)));
        whole.extend(self.references.iter().map(|refs| (REFERENCES, &refs.table)));
        whole.extend(self.encryption.iter().map(|of| (KEY, &of.header)));
        let image = match (&self.packed, &self.encryption) {
            (Some(packed), Some(_)) => (SEALED, packed.bytes, None),
            (Some(packed), None) => (PACKED, packed.bytes, None),
            (None, _) => (RAM, self.ram_bytes, None),
        };
        let whole = whole.into_iter();
        let mut parts: Vec<_> = whole.map(|(part, of)| (part, of.bytes, Some(of))).collect();
        parts.insert(2, image);
        parts
    }

    /// Returns the number of layers below this one; 0 for a snapshot that has all pages.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.parent.as_ref().map_or(0, |parent| parent.depth)
    }

    /// Returns how many bytes of the image the snapshot holds itself.
    #[must_use]
    pub fn own_bytes(&self) -> u64 {
        let referred = self.references.as_ref().map_or(0, |refs| refs.pages);
        let own = self.counts.saved_pages.saturating_sub(referred);
        own.saturating_mul(PAGE_SIZE)
    }

    /// Returns how many bytes of the image files of the parent hold.
    #[must_use]
    pub fn parent_bytes(&self) -> u64 {
        let references = self.references.as_ref();
        let pages = references.map_or(0, |refs| refs.parent_pages);
        pages.saturating_mul(PAGE_SIZE)
    }

    /// Returns why no layer can be built on this snapshot; `None` if one can.
    #[must_use]
    pub fn no_parent(&self) -> Option<&'static str> {
        if self.format < FORMAT_OF_LAYERS {
            return Some("an older memfold saved it; save the VM once without --parent");
        }
        if self.encryption.is_some() {
            return Some("its memory is encrypted");
        }
        (!self.is_mappable())
            .then_some("its image is compressed, or in too many parts to be mapped")
    }

    pub(super) fn broken(&self, why: impl Into<String>) -> SnapshotError {
        SnapshotError::broken(&self.name, why)
    }

    /// Returns whether VMs that run from the snapshot generate different random numbers, because
    /// the guest has memfold's agent or a driver for VM generation IDs.
    #[must_use]
    pub const fn tells_twins_apart(&self) -> bool {
        self.agent || self.generation_id
    }
}

/// Reads the manifest of snapshot `name` in its directory, and checks it.
pub(super) fn read_manifest(path: &Path, name: &str) -> Result<Manifest, SnapshotError> {
    let directory = || fs::metadata(path).map(|facts| facts.ino()).ok();
    loop {
        let before = directory();
        let read = read_manifest_once(path, name);
        // `compact` and `rekey` put another directory in this one's place, and remove this one.
        if read.is_ok() || directory() == before {
            return read;
        }
    }
}

fn read_manifest_once(path: &Path, name: &str) -> Result<Manifest, SnapshotError> {
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
    let bad = |why: String| SnapshotError::broken(name, why);
    if sum.trim_ascii() != hex(xxh3_128(&text)).as_bytes() {
        return Err(bad(format!("{MANIFEST} was changed after it was written")));
    }
    let manifest = Manifest::parse(&text).map_err(bad)?;
    for (part, bytes, _) in manifest.parts() {
        let facts = fs::metadata(path.join(part)).map_err(|e| bad(format!("{part}: {e}")))?;
        if facts.len() != bytes {
            let length = facts.len();
            return Err(bad(format!("{part} has {length} bytes instead of {bytes}")));
        }
    }
    Ok(manifest)
}

/// Returns a checksum as 32 hexadecimal digits.
pub(super) fn hex(sum: u128) -> String {
    format!("{sum:032x}")
}

/// Returns the file name of a frozen disk in a snapshot.
pub(super) fn disk_name(disk: usize) -> String {
    format!("disk{disk}.qcow2")
}

/// Returns the file name in a snapshot of a file from [`memfold_vm::foreign`] or `written_files`.
pub(super) fn file_name(number: usize) -> String {
    format!("file{number}")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[test]
    fn a_disk_in_the_json_manifest_of_a_snapshot_reads_back_equal() {
        let text = r#"{"path":"disk0.qcow2","bytes":7,"modified_ns":1764210000123456789,"format":"qcow2","read_only":false,"xxh3_128":null,"backing":[{"path":"/base","bytes":8,"modified_ns":-1}]}"#;
        let value: serde_json::Value = serde_json::from_str(text).unwrap();
        let disk: SavedDisk = serde_json::from_value(value).unwrap();
        assert_eq!(disk.file.modified_ns, 1_764_210_000_123_456_789);
        assert_eq!(disk.backing[0].modified_ns, -1);
        assert_eq!(serde_json::to_string(&disk).unwrap(), text);
    }

    #[test]
    fn a_snapshot_manifest_with_ram_blocks_that_overlap_or_exceed_the_image_is_refused() {
        let chunk = CHUNK_PAGES;
        let with = |blocks: &[(u64, u64)]| {
            let block = |&(first_page, pages): &(u64, u64)| ImageBlock {
                name: "ram0".into(),
                first_page,
                pages,
            };
            Manifest {
                ram_bytes: 4 * chunk * PAGE_SIZE,
                blocks: blocks.iter().map(block).collect(),
                ..manifest("a", ByteSize::mib(64))
            }
        };
        let right = [(0, chunk + 1), (2 * chunk, 2 * chunk)];
        assert_eq!(with(&right).misplaced(), None);
        for wrong in [
            &[(1, 1)][..],
            &[(0, 4 * chunk + 1)],
            &[(4 * chunk, 1)],
            &[(chunk, u64::MAX)],
            &[(0, chunk + 1), (chunk, 1)],
            &[(chunk, 1), (0, 1)],
        ] {
            let why = with(wrong).misplaced().unwrap();
            assert!(why.contains("'ram0'"), "{why}");
        }
        let table = FileFacts {
            bytes: 0,
            xxh3_128: String::new(),
        };
        let mut many = with(&right);
        many.references = Some(References {
            table,
            sources: Vec::new(),
            pages: 4,
            parent_pages: u64::MAX,
            mappings: None,
        });
        assert!(many.misplaced().is_some());
        let references = many.references.as_mut().unwrap();
        references.parent_pages = 4;
        references.sources = vec![RAM.into(); MOST_SOURCES];
        assert_eq!(many.misplaced(), None);
        let references = many.references.as_mut().unwrap();
        references.sources.push(RAM.into());
        assert!(many.misplaced().unwrap().contains("4097 files"));
    }

    /// Returns the manifest of an empty snapshot.
    pub fn manifest(name: &str, memory: ByteSize) -> Manifest {
        let none = FileFacts {
            bytes: 0,
            xxh3_128: String::new(),
        };
        Manifest {
            format: FORMAT_OF_LAYERS,
            parent: None,
            name: name.into(),
            domain: None,
            vm: "web1".into(),
            created_s: 1,
            memfold: "0.1.0".into(),
            keep: Keep::None,
            keep_reason: None,
            whole_reason: None,
            spec: VmSpec::new("web1", memory),
            qemu: (10, 0, 2),
            machine: "pc-q35-10.0".into(),
            accel: "tcg".into(),
            cpu: None,
            blocks: Vec::new(),
            counts: ImageCounts::default(),
            of_boot: None,
            fork: false,
            live: false,
            kept_pages: 0,
            free_kept: None,
            cache_kept: None,
            agent: true,
            generation_id: true,
            guest_boot: None,
            ram_bytes: 0,
            packed: None,
            encryption: None,
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
