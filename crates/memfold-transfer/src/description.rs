//! Description of a snapshot in an object store, `snapshots/NAME.json`: the snapshot's manifest,
//! its files, and the hash of the index that lists the files' chunks.

use memfold_snapshot::encryption::HEADER_BYTES;
use memfold_snapshot::manifest::FORMATS;
use memfold_snapshot::{Manifest, portable};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::PathBuf;

use super::chunk;
use super::first_pages::{self, PartEntry};

/// Version of the layout.
pub(crate) const FORMAT: u32 = 1;

/// Maximum length in bytes of a description.
pub(crate) const MOST_BYTES: u64 = 16 << 20;

/// Most chunks of a snapshot: 4 TiB.
const MOST_CHUNKS: u64 = 4 << 20;

/// Most files of a snapshot.
const MOST_FILES: usize = 1024;

/// Most disks of a snapshot. The work of a pull grows with their number.
const MOST_DISKS: usize = 64;

/// Most bytes of QEMU's device state, and of RAM blocks other than the VM's memory: firmware, video
/// memory.
const MOST_BESIDE_RAM: u64 = 1 << 30;

/// Bytes by which an encrypted table is longer.
const TAG_BYTES: u64 = 16;

/// Most bytes of the list of pages that a restore prefetches.
const MOST_WORKING_SET: u64 = 16 << 20;

/// Most bytes of a table that is read into memory as a whole: enough for checksums of 32 TiB of
/// RAM, or for 11 million references to runs of pages.
const MOST_TABLE: u64 = 256 << 20;

/// A file of a snapshot that is in an object store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Name of the file in the snapshot; `baseN` for a file from outside the snapshot's directory.
    pub name: String,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Path on the pushing host of a file from outside the snapshot's directory; unset for other
    /// files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<PathBuf>,
}

/// Description of a snapshot in an object store, `snapshots/NAME.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// Version of the format of snapshots in object stores.
    pub format: u32,
    /// Name of the snapshot in the object store.
    pub name: String,
    /// Length of a chunk in bytes; the last chunk of a file may be shorter.
    pub chunk_bytes: u64,
    /// Bytes of the snapshot's files before compression, without chunks that hold only zeroes.
    pub stored_bytes: u64,
    /// BLAKE3 hash of the index, which lists the names of the chunks of all files.
    pub index: String,
    /// The snapshot's files, in the order in which the index lists their chunks.
    pub files: Vec<FileEntry>,
    /// Parts of the first pages: pages that VMs touch at once, which the chunks hold, too. Empty if
    /// they are not known, and in descriptions by older versions of memfold, which ignore them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub first_pages: Vec<PartEntry>,
    /// Manifest of the snapshot, with the paths of the pushing host.
    pub manifest: Manifest,
}

impl Description {
    /// Parses the description of snapshot `name`, and checks everything that can be checked without
    /// the index: names, numbers and lengths of files.
    ///
    /// # Errors
    ///
    /// The reason why the description is refused, as text.
    pub fn parse(bytes: &[u8], name: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let version: Version = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if version.format != FORMAT {
            return Err(format!(
                "its format is {}, and this memfold reads format {FORMAT}; update memfold",
                version.format
            ));
        }
        let description: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if description.name != name {
            return Err(format!("it describes snapshot '{}'", description.name));
        }
        if description.chunk_bytes != chunk::CHUNK_BYTES {
            return Err(format!("its chunks have {} bytes", description.chunk_bytes));
        }
        if description.files.len() > MOST_FILES {
            return Err(format!("it has {} files", description.files.len()));
        }
        let mut names = HashSet::new();
        let mut chunks = 0_u64;
        for file in &description.files {
            let is_right = portable::is_member_name(&description.manifest, &file.name)
                && file.name.starts_with("base") == file.origin.is_some();
            if !is_right || !names.insert(&file.name) {
                return Err(format!("it names a file {:?}", file.name));
            }
            chunks = chunks.saturating_add(chunk::count(file.bytes));
        }
        if chunks > MOST_CHUNKS {
            return Err(format!("it has {chunks} chunks"));
        }
        first_pages::check_entries(&description.first_pages)?;
        description.check_parts()?;
        description.index_hash()?;
        Ok(description)
    }

    /// Checks that the files that the manifest needs are there, with lengths that a snapshot can
    /// have. The tables among them are read into memory as a whole.
    fn check_parts(&self) -> Result<(), String> {
        let manifest = &self.manifest;
        if !FORMATS.contains(&manifest.format) {
            return Err(format!(
                "the format of its snapshot is {}, and this memfold reads {} to {}; update memfold",
                manifest.format,
                FORMATS.start(),
                FORMATS.end()
            ));
        }
        if let Some(why) = manifest.misplaced() {
            return Err(why);
        }
        check_disks(manifest)?;
        let most = manifest.spec.largest_memory().0.saturating_mul(2);
        if manifest.ram_bytes > most.saturating_add(MOST_BESIDE_RAM) {
            return Err(format!("its RAM image has {} bytes", manifest.ram_bytes));
        }
        let chunks = manifest.ram_bytes.div_ceil(2 << 20);
        let tag = manifest.encryption.as_ref().map_or(0, |_| TAG_BYTES);
        for (part, bytes, _) in manifest.parts() {
            let most = match part {
                "ram.sums" | "ram.index" => (chunks * 16).min(MOST_TABLE) + tag,
                "ram.refs" => (manifest.ram_bytes / 4096 * 24).min(MOST_TABLE) + tag,
                "devices" => MOST_BESIDE_RAM,
                "key" => HEADER_BYTES as u64,
                _ => u64::MAX,
            };
            let found = self.files.iter().find(|file| file.name == part);
            if bytes > most || found.is_none_or(|file| file.bytes != bytes) {
                return Err(format!(
                    "its file {part} is missing, has another length, or is too long"
                ));
            }
        }
        let working_set = self.files.iter().find(|file| file.name == "working-set");
        if working_set.is_some_and(|file| file.bytes > MOST_WORKING_SET) {
            return Err("its list of pages to prefetch is too long".to_owned());
        }
        Ok(())
    }

    /// Returns the number of chunks of all files together, at most 4 Mi.
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.files.iter().map(|file| chunk::count(file.bytes)).sum()
    }

    /// Returns [`Self::index`] as a hash, or an error text for the user.
    pub(crate) fn index_hash(&self) -> Result<blake3::Hash, String> {
        blake3::Hash::from_hex(&self.index).map_err(|_| "its index has no valid name".to_owned())
    }
}

/// Checks the numbers of disks, backing files, media and other files that a manifest names, and
/// that no two disks are one file of the snapshot. A pull reads the file of each disk as a whole.
pub(crate) fn check_disks(manifest: &Manifest) -> Result<(), String> {
    let disks = &manifest.disks;
    if disks.len().max(manifest.spec.disks.len()) > MOST_DISKS {
        let count = disks.len().max(manifest.spec.disks.len());
        return Err(format!(
            "it has {count} disks, and at most {MOST_DISKS} are allowed"
        ));
    }
    let foreign = manifest.spec.foreign.iter();
    let of_disks: usize = disks.iter().map(|disk| disk.files().count()).sum();
    let of_spec = manifest.spec.files.len() + foreign.map(|of| of.files.len()).sum::<usize>();
    let others = manifest.files.len().max(of_spec);
    let count = of_disks
        .saturating_add(others)
        .saturating_add(manifest.media.len());
    if count > MOST_FILES {
        return Err(format!(
            "its manifest names {count} files, and at most {MOST_FILES} are allowed"
        ));
    }
    let mut names = HashSet::new();
    let own = disks.iter().map(|disk| &disk.file.path);
    match own
        .filter(|path| path.is_relative())
        .find(|path| !names.insert(*path))
    {
        Some(path) => Err(format!(
            "two of its disks are the file {:?}",
            path.to_string_lossy()
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use memfold_snapshot::image::ImageCounts;
    use memfold_snapshot::manifest::{BackingFile, SavedDisk};
    use memfold_units::ByteSize;
    use memfold_vm::{DiskSpec, VmSpec};
    use serde_json::{Value, json};

    use super::*;

    fn file(path: &str) -> BackingFile {
        BackingFile {
            path: path.into(),
            bytes: 7,
            modified_ns: 0,
            device: None,
        }
    }

    /// Returns the manifest of a snapshot with `count` disks of its own.
    fn manifest(count: usize) -> Value {
        let mut spec = VmSpec::new("web", ByteSize::mib(64));
        spec.disks = vec![DiskSpec::new("disk.qcow2"); count];
        let disk = |number: usize| SavedDisk {
            file: file(&format!("disk{number}.qcow2")),
            format: "qcow2".into(),
            read_only: false,
            xxh3_128: None,
            backing: Vec::new(),
        };
        let none = json!({ "bytes": 0, "xxh3_128": "" });
        json!({
            "format": 3, "name": "warm", "vm": "web", "created_s": 1, "memfold": "0.1.0",
            "keep": "none", "spec": spec, "qemu": [10, 0, 2], "machine": "q35", "accel": "tcg",
            "blocks": [], "counts": ImageCounts::default(), "ram_bytes": 0, "sums": none,
            "devices": none, "disks": (0..count).map(disk).collect::<Vec<_>>(), "pause_ms": 1.0,
            "save_ms": 1.0,
        })
    }

    /// Parses the description of a snapshot with this manifest.
    fn parse(manifest: &Value) -> Result<Description, String> {
        let entry = |name: &str| json!({ "name": name, "bytes": 0 });
        let files = ["ram", "ram.sums", "devices"].map(entry);
        let description = json!({
            "format": FORMAT, "name": "warm", "chunk_bytes": chunk::CHUNK_BYTES, "stored_bytes": 0,
            "index": blake3::hash(b"").to_hex().to_string(), "manifest": manifest,
            "files": files,
        });
        Description::parse(description.to_string().as_bytes(), "warm")
    }

    #[test]
    fn a_description_with_too_many_disks_or_files_or_one_file_for_two_disks_is_refused() {
        parse(&manifest(MOST_DISKS)).unwrap();
        let refused = |manifest: &Value, why: &str| {
            let told = parse(manifest).unwrap_err();
            assert!(told.contains(why), "no '{why}' in: {told}");
        };
        refused(&manifest(MOST_DISKS + 1), "65 disks");
        let mut twice = manifest(2);
        twice["disks"][1]["path"] = "disk0.qcow2".into();
        refused(&twice, "two of its disks are the file");
        // Disks may have a file from outside the snapshot in common.
        for disk in 0..2 {
            twice["disks"][disk]["path"] = "/iso".into();
        }
        parse(&twice).unwrap();
        let mut many = manifest(2);
        many["disks"][0]["backing"] = json!(vec![file("/base"); MOST_FILES - 2]);
        parse(&many).unwrap();
        many["media"] = json!([file("/cd")]);
        refused(&many, "1025 files");
    }
}
