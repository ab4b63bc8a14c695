//! The directory that contains all snapshots of a host (in the code: shelf). Each snapshot is a
//! subdirectory, which gets its name only when the snapshot is complete.
//!
//! ```text
//!   SHELF/NAME/            0700
//!     manifest.json        describes the snapshot; written last
//!     manifest.sum         XXH3-128 of manifest.json, 32 hexadecimal digits and a line feed
//!     ram, ram.sums        RAM image and its checksums
//!     ram.zst, ram.index   a compressed image, instead of ram
//!     ram.sealed, key      an encrypted image, instead of ram.zst, and the encrypted data key
//!     ram.refs             references to pages that disks contain
//!     working-set          pages that a restored VM touched first (a hint for --prefetch)
//!     devices              QEMU's device state
//!     disk0.qcow2 ...      frozen disks
//!   SHELF/.NAME.pull/      a running or interrupted pull from an object store
//!   SHELF/.NAME.stream     request of a pull whose files VMs use already
//!   SHELF/.NAME.new        such a request, half written (removed by the next daemon)
//!   SHELF/NAME             link to .NAME.pull of such a pull; never without .NAME.stream
//!   SHELF/.bases/ID        disks that several pulled snapshots have in common
//!   SHELF/.NAME.draft/     a running save (locked), or an interrupted one (removed by the next daemon)
//! ```

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memfold_host::progress::Progress;
use memfold_store::{IMAGE_PREFIX, SEALED_IMAGE_PREFIX, StoreIdentity};
use memfold_units::{ByteSize, PAGE_SIZE};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};
use xxhash_rust::xxh3::xxh3_128;

use super::candidates::SourceFile;
use super::draft::{Draft, clean_up, remove_leftover, stream_request, sync_fork};
use super::encryption::{self, DataKey, HeaderError, SealedPages};
use super::error::{SnapshotError, failed};
use super::file_facts::{Stamp, facts};
use super::host_memory::host_available_pages;
use super::image::{CHUNK_BYTES, SUMS};
use super::keys::Keys;
use super::manifest::{
    FORMAT_OF_LAYERS, INDEX, KEY, Manifest, PACKED, ParentName, REFERENCES, SEALED, hex,
    read_manifest,
};
use super::parent::Parent;
use super::refer::Reference;
use super::stored::{Pages, Stored};
use super::{pack, refer};

pub use super::manifest::{DEVICES, RAM};

/// Default path of the snapshot directory.
pub const DEFAULT_SHELF: &str = "/var/lib/memfold/snapshots";

/// The snapshot directory of a host, and the RAM images that this process has verified or assembled
/// in memory (*laid out*).
#[derive(Clone, Debug)]
pub struct Shelf {
    root: PathBuf,
    /// The keys with which snapshots are encrypted.
    keys: Arc<Keys>,
    /// For each snapshot, the stamps of `ram` and of the files that it refers to, at the time when
    /// this process saved or verified them.
    right: Arc<Mutex<HashMap<String, Vec<Stamp>>>>,
    /// Images that are assembled in memory, by snapshot. The entry of an image is locked while the
    /// image is being assembled.
    laid_out: Arc<Mutex<HashMap<String, LaidOut>>>,
    /// Lock that lets only one thread at a time free unused images.
    letting_go: Arc<Mutex<()>>,
}

/// A verified RAM image of a snapshot, ready to be mapped by a VM.
#[derive(Clone, Debug)]
pub struct CheckedImage {
    /// The file `ram`, or the memory in which the image was assembled.
    pub ram: Arc<File>,
    /// References to pages that are mapped over `ram` from disks' files, by ascending page.
    pub references: Vec<Reference>,
    /// Disks' files that the references name by index.
    pub sources: Vec<Arc<File>>,
}

impl CheckedImage {
    /// Reads pages of the image, from page `first` on, at most one chunk.
    pub(super) fn read(&self, first: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.ram.read_exact_at(buffer, first * PAGE_SIZE)?;
        let sources = self.sources.iter().map(|source| &**source);
        refer::fill(
            &self.references,
            &sources.collect::<Vec<_>>(),
            first,
            buffer,
        )
    }
}

/// Checksum of an image's checksums, and the memory that contains the image.
type LaidOut = Arc<Mutex<Option<(String, Arc<File>)>>>;

/// Percentage of the host's available memory that an assembled image may use.
const LAID_OUT_PERCENT: u64 = 90;

impl Shelf {
    /// Opens the snapshot directory `root`, which need not exist yet. Removes unfinished saves of
    /// daemons that have died, and links to pulls that no daemon will finish.
    pub fn open(root: &Path) -> Self {
        let shelf = Self {
            // The path is used in headers of disks and in QEMU's options, so it must be absolute.
            root: std::path::absolute(root).unwrap_or_else(|_| root.into()),
            keys: Arc::default(),
            right: Arc::default(),
            laid_out: Arc::default(),
            letting_go: Arc::default(),
        };
        clean_up(&shelf.root);
        shelf
    }

    /// Sets the keys with which snapshots are encrypted.
    #[must_use]
    pub fn with_keys(mut self, keys: Keys) -> Self {
        self.keys = Arc::new(keys);
        self
    }

    /// Returns the keys with which snapshots are encrypted.
    #[must_use]
    pub fn keys(&self) -> &Keys {
        &self.keys
    }

    /// Returns the absolute path of the snapshot directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directory of the snapshot `name`, which need not exist. Returns an error if a
    /// snapshot cannot have this name.
    pub fn path(&self, name: &str) -> Result<PathBuf, SnapshotError> {
        memfold_vm::check_name("snapshot", name)
            .map_err(|error| SnapshotError::Name(error.to_string()))?;
        Ok(self.root.join(name))
    }

    /// Returns the names of all snapshots, sorted.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        // The link to a snapshot that is being fetched is no directory.
        let is_whole = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
        let names = entries
            .flatten()
            .filter(is_whole)
            .map(|e| e.file_name().into_string());
        let mut names: Vec<String> = names.flatten().collect();
        names.retain(|name| !name.starts_with('.'));
        names.sort();
        Ok(names)
    }

    /// Creates the draft of a snapshot `name` that is about to be saved. Fails if the snapshot or
    /// its draft exists.
    pub fn draft(&self, name: &str) -> Result<Draft, SnapshotError> {
        Draft::begin(&self.root, self.path(name)?, name)
    }

    /// Creates a draft that will replace snapshot `name`.
    pub(super) fn replacement(&self, name: &str) -> Result<Draft, SnapshotError> {
        Draft::begin_replacement(&self.root, self.path(name)?, name)
    }

    /// Forgets what this process knows about a snapshot's image, because its files were replaced.
    pub(super) fn forget(&self, name: &str) {
        self.right.lock().remove(name);
    }

    /// Begins or continues the draft of snapshot `name`, which comes from elsewhere.
    pub fn pull_draft(&self, name: &str) -> Result<Draft, SnapshotError> {
        Draft::resume(&self.root, self.path(name)?, name)
    }

    /// Returns the directory of the draft of snapshot `name`, if it comes from elsewhere.
    pub fn pull_place(&self, name: &str) -> Result<PathBuf, SnapshotError> {
        self.path(name)?;
        Ok(Draft::of_pull(&self.root, name))
    }

    /// Returns the file that says how snapshot `name`, which VMs use already, is fetched further.
    /// The file is there before [`Draft::show`] makes the snapshot's files visible.
    pub fn stream_request(&self, name: &str) -> Result<PathBuf, SnapshotError> {
        self.path(name)?;
        Ok(stream_request(&self.root, name))
    }

    /// Returns the directory for disks that several pulled snapshots have in common, `.bases`.
    #[must_use]
    pub fn bases(&self) -> PathBuf {
        self.root.join(".bases")
    }

    /// Reads a snapshot's manifest, and checks the manifest's checksum and the lengths of the
    /// snapshot's files.
    pub fn manifest(&self, name: &str) -> Result<Manifest, SnapshotError> {
        read_manifest(&self.path(name)?, name)
    }

    /// Syncs the RAM image of a layer that forks start from to the disk. Other snapshots were
    /// synced when they were saved.
    ///
    /// # Errors
    ///
    /// [`SnapshotError::Files`] if the disk failed; the layer cannot be used any more then.
    pub fn sync_layer(&self, manifest: &Manifest) -> Result<(), SnapshotError> {
        if manifest.fork {
            sync_fork(&self.path(&manifest.name)?)?;
        }
        Ok(())
    }

    /// Verifies the RAM image, its tables and the device state of a snapshot, and returns the
    /// image. A VM may map it when [`Shelf::sync_layer`] has succeeded, too. The whole image is
    /// read, unless this process has saved or verified it, and the identities, lengths and times of
    /// its files are unchanged since.
    pub fn checked_image(
        &self,
        manifest: &Manifest,
        progress: &Progress,
    ) -> Result<CheckedImage, SnapshotError> {
        let name = &manifest.name;
        if let Some(part) = self.changed_parts(manifest)?.first() {
            return Err(manifest.broken(format!("{part} was changed since it was saved")));
        }
        if !manifest.is_mappable() {
            return Ok(CheckedImage {
                ram: self.lay_out(manifest, progress)?,
                references: Vec::new(),
                sources: Vec::new(),
            });
        }
        let ram = self.file(name, RAM)?;
        let (references, sources) = self.references(manifest, None)?;
        let stamps = || stamps(&ram, &sources);
        // The stamps are taken before the files are read, so that a later write changes them.
        let before = stamps().map_err(self.failed(name, RAM))?;
        if self.right.lock().get(name) != Some(&before) {
            let stored = self.stored(manifest)?;
            progress.begin("checksums compared", stored.bytes);
            let wrong = stored.verify(progress).map_err(self.failed(name, RAM))?;
            if !wrong.is_empty() {
                return Err(Self::wrong(manifest, &wrong));
            }
            // If a stamp has changed, a part that was written meanwhile may have been read before.
            if stamps().map_err(self.failed(name, RAM))? != before {
                let image = Self::image_of(manifest);
                return Err(manifest.broken(format!("{image} was written to while it was checked")));
            }
            self.right.lock().insert(name.clone(), before);
        }
        Ok(CheckedImage {
            ram: Arc::new(ram),
            references,
            sources: sources.into_iter().map(Arc::new).collect(),
        })
    }

    /// Records that the image of a snapshot is right, because this process has just saved it, so
    /// that a restore by this process need not read the whole image. `compared` contains the stamps
    /// of files outside the snapshot with which memory was compared, from before the comparison.
    /// Records nothing if such a file was changed since.
    pub(super) fn trust(&self, manifest: &Manifest, compared: &[Stamp]) {
        let files = self.file(&manifest.name, RAM).ok();
        let files = files.zip(self.references(manifest, None).ok());
        let Some(Ok(stamps)) = files.map(|(ram, (_, sources))| stamps(&ram, &sources)) else {
            return;
        };
        let sources = manifest.references.iter().flat_map(|refs| &refs.sources);
        let mut of_sources = sources.zip(&stamps[1..]);
        if of_sources.all(|(path, stamp)| path.is_relative() || compared.contains(stamp)) {
            self.right.lock().insert(manifest.name.clone(), stamps);
        }
    }

    /// Opens a snapshot as the parent of layers, after its image was verified as for a restore.
    ///
    /// # Errors
    ///
    /// [`SnapshotError::Impossible`] if the snapshot cannot be a parent, and errors as of a
    /// restore.
    pub fn parent(
        &self,
        manifest: &Manifest,
        progress: &Progress,
    ) -> Result<Parent, SnapshotError> {
        let name = &manifest.name;
        if let Some(why) = manifest.no_parent() {
            let why = format!("snapshot '{name}' cannot be the parent of a layer: {why}");
            return Err(SnapshotError::Impossible(why));
        }
        self.checked_image(manifest, progress)?;
        self.sync_layer(manifest)?;
        let sources = manifest.references.iter().flat_map(|refs| &refs.sources);
        let parts = std::iter::once(Path::new(RAM)).chain(sources.map(PathBuf::as_path));
        let open = |part: &Path| {
            let path = self.root.join(name).join(part);
            let file = File::open(&path).map_err(failed(&path))?;
            Ok(SourceFile {
                overlay_of: None,
                in_parent: true,
                stamp: Stamp::of(&file).ok(),
                path,
                file,
            })
        };
        let files = parts.map(open).collect::<Result<Vec<_>, SnapshotError>>()?;
        let id = ParentName {
            name: name.clone(),
            sums: manifest.sums.xxh3_128.clone(),
            depth: manifest.depth() + 1,
        };
        let stored = self.stored(manifest)?;
        Parent::new(id, manifest.blocks.clone(), stored, files).map_err(self.failed(name, RAM))
    }

    /// Returns the names of the files with a checksum of their own whose contents have changed.
    pub fn changed_parts(&self, manifest: &Manifest) -> Result<Vec<&'static str>, SnapshotError> {
        let mut changed = Vec::new();
        for (part, _, saved) in manifest.parts() {
            let Some(saved) = saved else { continue };
            let file = self.file(&manifest.name, part)?;
            if facts(file).map_err(self.failed(&manifest.name, part))? != *saved {
                changed.push(part);
            }
        }
        Ok(changed)
    }

    /// Opens the RAM image of a snapshot for reading, without verifying it.
    pub fn stored(&self, manifest: &Manifest) -> Result<Stored, SnapshotError> {
        let name = &manifest.name;
        let key = self.data_key(manifest)?;
        let key = key.as_ref();
        let pages = if manifest.packed.is_some() {
            let chunks = manifest.ram_bytes.div_ceil(CHUNK_BYTES as u64);
            let layout = encryption::bound_layout(manifest.ram_bytes, &manifest.blocks);
            let index = self.read(manifest, INDEX, (key, &layout))?;
            let frames = pack::frames(&index, chunks);
            let frames = frames.map_err(|why| manifest.broken(format!("{INDEX}: {why}")))?;
            match key.zip(manifest.encryption.as_ref()) {
                Some((key, of)) => Pages::Sealed(SealedPages {
                    file: self.file(name, SEALED)?,
                    frames,
                    sealer: key.of_file(SEALED).map_err(self.failed(name, SEALED))?,
                    is_compressed: of.compressed,
                }),
                None => Pages::Packed(self.file(name, PACKED)?, frames),
            }
        } else {
            Pages::plain(self.file(name, RAM)?).map_err(self.failed(name, RAM))?
        };
        let (references, sources) = self.references(manifest, key)?;
        Ok(Stored {
            bytes: manifest.ram_bytes,
            sums: self.read(manifest, SUMS, (key, &[]))?,
            sums_of_pages: manifest.format >= FORMAT_OF_LAYERS,
            pages,
            references,
            sources,
        })
    }

    /// Returns the references to pages of a snapshot's image that disks contain, and the disks'
    /// files. `key`: the snapshot's data key, if it is encrypted.
    fn references(
        &self,
        manifest: &Manifest,
        key: Option<&DataKey>,
    ) -> Result<(Vec<Reference>, Vec<File>), SnapshotError> {
        let name = &manifest.name;
        let Some(saved) = &manifest.references else {
            return Ok((Vec::new(), Vec::new()));
        };
        let table = self.read(manifest, REFERENCES, (key, &[]))?;
        let pages = manifest.ram_bytes / PAGE_SIZE;
        let references = refer::decode(&table, pages, saved.sources.len())
            .map_err(|why| manifest.broken(format!("{REFERENCES}: {why}")))?;
        let open = |source: &PathBuf| {
            let path = self.root.join(name).join(source);
            File::open(&path).map_err(failed(&path))
        };
        let sources = saved.sources.iter().map(open).collect::<Result<_, _>>()?;
        Ok((references, sources))
    }

    /// Reads a whole file of a snapshot, and decrypts it with the snapshot's data key, if there is
    /// one, and the bytes to which the file is bound. The file must be small.
    fn read(
        &self,
        manifest: &Manifest,
        part: &str,
        (key, bound): (Option<&DataKey>, &[u8]),
    ) -> Result<Vec<u8>, SnapshotError> {
        let name = &manifest.name;
        let mut bytes = Vec::new();
        let read = self.file(name, part)?.read_to_end(&mut bytes);
        read.map_err(self.failed(name, part))?;
        let Some(key) = key else { return Ok(bytes) };
        let opened = key.open_file(part, bound, bytes);
        opened.map_err(|error| manifest.broken(format!("{part}: {error}")))
    }

    /// Returns the data key of a snapshot; `None` if the snapshot is not encrypted.
    pub(super) fn data_key(&self, manifest: &Manifest) -> Result<Option<DataKey>, SnapshotError> {
        let Some(of) = &manifest.encryption else {
            return Ok(None);
        };
        let header = self.read(manifest, KEY, (None, &[]))?;
        let key = self
            .keys
            .load(&of.key)
            .map_err(|source| SnapshotError::Locked {
                name: manifest.name.clone(),
                source,
            })?;
        let key = DataKey::unwrap(&header, &key).map_err(|error| match error {
            HeaderError::OtherKey => manifest.broken(format!(
                "the key '{0}' of this daemon is not the one with which the snapshot was encrypted; give that one the name '{0}' in snapshot_key, and this one another name",
                of.key
            )),
            error => manifest.broken(format!("{KEY}: {error}")),
        })?;
        Ok(Some(key))
    }

    /// Returns a snapshot's device state: its file, or memory with the decrypted state.
    pub fn devices(&self, manifest: &Manifest) -> Result<File, SnapshotError> {
        let name = &manifest.name;
        let Some(key) = self.data_key(manifest)? else {
            return self.file(name, DEVICES);
        };
        let state = self.read(manifest, DEVICES, (Some(&key), &[]))?;
        encryption::in_memory(&state).map_err(self.failed(name, DEVICES))
    }

    /// Opens the RAM image of a snapshot that is still being fetched into `draft`, without
    /// verifying the image. Its table of references has arrived.
    pub fn arriving_image(
        &self,
        draft: &Path,
        manifest: &Manifest,
    ) -> Result<CheckedImage, SnapshotError> {
        let place = self.path(&manifest.name)?;
        let now = |path: &Path| draft.join(path.strip_prefix(&place).unwrap_or(path));
        let open = |path: &Path| File::open(now(path)).map(Arc::new).map_err(failed(path));
        let (mut references, mut sources) = (Vec::new(), Vec::new());
        if let Some(saved) = &manifest.references {
            let table = fs::read(draft.join(REFERENCES)).map_err(failed(draft))?;
            let pages = manifest.ram_bytes / PAGE_SIZE;
            references = refer::decode(&table, pages, saved.sources.len())
                .map_err(|why| manifest.broken(format!("{REFERENCES}: {why}")))?;
            let opened = saved.sources.iter().map(|path| open(path));
            sources = opened.collect::<Result<_, _>>()?;
        }
        Ok(CheckedImage {
            ram: open(Path::new(RAM))?,
            references,
            sources,
        })
    }

    /// Assembles the image of a snapshot in memory, once for all VMs that run from it.
    fn lay_out(
        &self,
        manifest: &Manifest,
        progress: &Progress,
    ) -> Result<Arc<File>, SnapshotError> {
        let name = &manifest.name;
        let place = (self.laid_out.lock().entry(name.clone()))
            .or_default()
            .clone();
        // The lock is held meanwhile, so that another thread that wants the same image waits for
        // it.
        let mut laid_out = place.lock();
        // The assembled bytes belong to these places in the VM's RAM and to no others.
        let layout = encryption::bound_layout(manifest.ram_bytes, &manifest.blocks);
        let sum = format!("{} {}", manifest.sums.xxh3_128, hex(xxh3_128(&layout)));
        if let Some((_, ram)) = laid_out.as_ref().filter(|(of, _)| *of == sum) {
            return Ok(ram.clone());
        }
        // The manifest's own figure may be wrong: it may come from elsewhere.
        let stored = self.stored(manifest)?;
        let needed = ByteSize(stored.most_bytes());
        let available = host_available_pages().map_err(self.failed(name, RAM))? * PAGE_SIZE;
        if needed.0 > available / 100 * LAID_OUT_PERCENT {
            let available = ByteSize(available);
            return Err(SnapshotError::Impossible(format!(
                "the uncompressed or decrypted memory of snapshot '{name}' takes {needed}, and this host has {available} available"
            )));
        }
        let called = self.laid_out_name(name, manifest.encryption.is_some())?;
        let step = match manifest.encryption {
            Some(_) => "memory decrypted",
            None => "memory uncompressed",
        };
        progress.begin(step, stored.bytes);
        let laid = stored.lay_out(&called, progress);
        let ram = match laid.map_err(self.failed(name, RAM))? {
            Ok(ram) => Arc::new(ram),
            Err(wrong) => return Err(Self::wrong(manifest, &wrong)),
        };
        *laid_out = Some((sum, ram.clone()));
        Ok(ram)
    }

    /// Returns the name that the assembled RAM image of snapshot `name` has in `/proc/PID/maps`.
    /// The name is the same for every daemon, so VMs of an earlier daemon are found, too.
    pub fn laid_out_name(&self, name: &str, is_encrypted: bool) -> Result<String, SnapshotError> {
        let file = self.file(name, SUMS)?;
        let facts = file.metadata().map_err(self.failed(name, SUMS))?;
        let prefix = if is_encrypted {
            SEALED_IMAGE_PREFIX
        } else {
            IMAGE_PREFIX
        };
        Ok(format!("{prefix}{:x}:{}", facts.dev(), facts.ino()))
    }

    /// Returns the assembled RAM images, without images that are being assembled now and without
    /// those of a daemon before this one.
    #[must_use]
    pub fn laid_out(&self) -> Vec<Arc<File>> {
        let ram = |place: &LaidOut| Some(place.try_lock()?.as_ref()?.1.clone());
        self.laid_out.lock().values().filter_map(ram).collect()
    }

    /// Frees the assembled RAM images from which no VM runs or is being started.
    pub fn let_go(&self) {
        // Only one thread at a time does this; a later one sees more VMs that have ended.
        let _turn = self.letting_go.lock();
        let places: Vec<LaidOut> = self.laid_out.lock().values().cloned().collect();
        for place in places {
            // A locked image is being assembled, so somebody needs it.
            let Some(mut laid_out) = place.try_lock() else {
                continue;
            };
            let is_wanted =
                |(_, ram): &(_, Arc<File>)| Arc::strong_count(ram) > 1 || is_mapped(ram);
            if !laid_out.as_ref().is_some_and(is_wanted) {
                *laid_out = None;
            }
        }
        // Entries that only this map holds, and that contain no image, are removed.
        self.laid_out.lock().retain(|_, place| {
            Arc::strong_count(place) > 1 || place.try_lock().is_none_or(|l| l.is_some())
        });
    }

    /// Returns the name of the file that contains the bytes of a snapshot's RAM image, for error
    /// messages.
    #[must_use]
    pub const fn image_of(manifest: &Manifest) -> &'static str {
        match (&manifest.references, &manifest.packed, &manifest.encryption) {
            (Some(_), ..) => "the RAM image, or a disk that it refers to,",
            (None, _, Some(_)) => SEALED,
            (None, Some(_), None) => PACKED,
            (None, None, None) => RAM,
        }
    }

    /// Returns the error for an image whose chunks with these numbers do not match their checksums.
    pub(super) fn wrong(manifest: &Manifest, chunks: &[u64]) -> SnapshotError {
        let (image, number) = (Self::image_of(manifest), chunks.len());
        manifest.broken(format!(
            "{image} was changed since it was saved, in {number} of its chunks of 2 MiB"
        ))
    }

    fn failed(&self, name: &str, part: &str) -> impl FnOnce(io::Error) -> SnapshotError + use<> {
        let path = self.root.join(name).join(part);
        move |source| SnapshotError::Files { path, source }
    }

    /// Opens the file `part` of the snapshot `name` for reading.
    pub fn file(&self, name: &str, part: &str) -> Result<File, SnapshotError> {
        let path = self.path(name)?.join(part);
        File::open(&path).map_err(failed(&path))
    }

    /// Returns the number of bytes that a snapshot's files use on disk.
    pub fn disk_bytes(&self, name: &str) -> io::Result<u64> {
        let mut bytes = 0;
        for entry in fs::read_dir(self.root.join(name))?.flatten() {
            bytes += entry.metadata()?.blocks() * 512;
        }
        Ok(bytes)
    }

    /// Removes the snapshot `name`, or an interrupted pull of this name. A crash meanwhile leaves
    /// no incomplete snapshot under this name.
    pub fn remove(&self, name: &str) -> Result<(), SnapshotError> {
        let path = self.path(name)?;
        let pulled = Draft::of_pull(&self.root, name);
        if !path.exists() && !pulled.exists() {
            return Err(SnapshotError::Unknown(name.into()));
        }
        if path.exists() {
            let gone = self.root.join(format!(".{name}.draft"));
            let failed = failed(path.as_path());
            if gone.exists() {
                remove_leftover(&gone, name)?;
            }
            // Until all files are removed, no save may take the directory for a leftover.
            let lock = File::open(&path).map_err(failed)?;
            let _ = flock(&lock, FlockOperation::NonBlockingLockExclusive);
            fs::rename(&path, &gone).map_err(failed)?;
            self.right.lock().remove(name);
            self.let_go();
            // Otherwise the snapshot could be back after a power failure.
            let synced = File::open(&self.root).and_then(|root| root.sync_all());
            synced.map_err(failed)?;
            fs::remove_dir_all(&gone).map_err(failed)?;
        }
        // A pull of this name may have been interrupted.
        if pulled.exists() {
            let draft = self.pull_draft(name)?;
            fs::remove_dir_all(draft.path()).map_err(failed(draft.path()))?;
        }
        self.remove_unused_bases();
        Ok(())
    }

    /// Removes disks in `.bases` that no pulled snapshot has any more.
    pub fn remove_unused_bases(&self) {
        for entry in fs::read_dir(self.bases()).into_iter().flatten().flatten() {
            let is_unused = entry.metadata().is_ok_and(|facts| facts.nlink() == 1);
            if is_unused {
                // The next removal or pull tries again.
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// Returns whether any process maps a file.
fn is_mapped(file: &File) -> bool {
    let pids = StoreIdentity::of(file).and_then(memfold_store::mapped::processes);
    // If this cannot be found out, the image stays.
    pids.map_or(true, |pids| !pids.is_empty())
}

/// Returns the stamps of a RAM image and of the files that it refers to.
fn stamps(ram: &File, sources: &[File]) -> io::Result<Vec<Stamp>> {
    std::iter::once(ram).chain(sources).map(Stamp::of).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use xxhash_rust::xxh3::xxh3_128;

    use crate::manifest::{MANIFEST, MANIFEST_SUM, hex, tests::manifest};

    fn shelf() -> (tempfile::TempDir, Shelf) {
        let directory = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(&directory.path().join("shelf"));
        (directory, shelf)
    }

    fn save(shelf: &Shelf, name: &str) -> Manifest {
        let draft = shelf.draft(name).unwrap();
        let file = |part: &str, text: &[u8]| {
            let mut file = draft.file(part).unwrap();
            file.write_all(text).unwrap();
            facts(file).unwrap()
        };
        let ram = file(RAM, b"ram");
        let manifest = Manifest {
            domain: Some("shop".into()),
            ram_bytes: ram.bytes,
            sums: file(SUMS, b"sums"),
            devices: file(DEVICES, b"devices"),
            ..manifest(name, ByteSize::mib(64))
        };
        draft.commit(&manifest).unwrap();
        manifest
    }

    #[test]
    fn only_a_completed_snapshot_is_listed() {
        let (_directory, shelf) = shelf();
        assert!(shelf.names().unwrap().is_empty());
        {
            let draft = shelf.draft("a").unwrap();
            draft.file(RAM).unwrap();
            assert!(matches!(shelf.draft("a"), Err(SnapshotError::Taken(_))));
            assert!(shelf.names().unwrap().is_empty());
        }
        let saved = save(&shelf, "a");
        assert_eq!(shelf.names().unwrap(), ["a"]);
        assert_eq!(shelf.manifest("a").unwrap(), saved);
        assert!(matches!(shelf.draft("a"), Err(SnapshotError::Taken(_))));
        shelf.remove("a").unwrap();
        assert!(matches!(
            shelf.manifest("a"),
            Err(SnapshotError::Unknown(_))
        ));
        assert!(matches!(shelf.remove("a"), Err(SnapshotError::Unknown(_))));
        assert!(matches!(shelf.draft("../a"), Err(SnapshotError::Name(_))));
    }

    #[test]
    fn a_restarted_daemon_removes_unfinished_snapshots_unless_their_save_still_runs() {
        let (_directory, shelf) = shelf();
        save(&shelf, "whole");
        let under_way = shelf.draft("under-way").unwrap();
        fs::create_dir(shelf.root.join(".cut-off.draft")).unwrap();
        let other = Shelf::open(&shelf.root);
        assert!(under_way.path.exists());
        assert!(!shelf.root.join(".cut-off.draft").exists());
        assert_eq!(other.names().unwrap(), ["whole"]);
    }

    #[test]
    fn a_snapshot_is_verified_unless_this_process_saved_it_and_its_files_are_unchanged() {
        let (_directory, shelf) = shelf();
        // Reading the image would show that its checksums are wrong.
        let saved = save(&shelf, "a");
        let check = |shelf: &Shelf| shelf.checked_image(&saved, &Progress::default());
        assert!(check(&shelf).is_err());
        shelf.trust(&saved, &[]);
        assert_eq!(check(&shelf).unwrap().references, []);
        assert!(check(&Shelf::open(&shelf.root)).is_err());
        fs::write(shelf.path("a").unwrap().join(RAM), b"ram").unwrap();
        assert!(check(&shelf).is_err());
    }

    #[test]
    fn a_changed_or_truncated_snapshot_file_is_reported() {
        let (_directory, shelf) = shelf();
        save(&shelf, "a");
        let why = || match shelf.manifest("a") {
            Err(SnapshotError::Broken { why, .. }) => why,
            other => panic!("{other:?}"),
        };
        let place = shelf.path("a").unwrap();
        fs::write(place.join(RAM), b"r").unwrap();
        assert_eq!(why(), "ram has 1 bytes instead of 3");
        fs::remove_file(place.join(RAM)).unwrap();
        assert!(why().starts_with("ram: "), "{}", why());
        fs::write(place.join(RAM), b"ram").unwrap();
        for (part, whole) in [(SUMS, "sums"), (DEVICES, "devices")] {
            for length in 0..whole.len() {
                fs::write(place.join(part), &whole[..length]).unwrap();
                let expected = format!("{part} has {length} bytes instead of {}", whole.len());
                assert_eq!(why(), expected);
            }
            fs::write(place.join(part), whole).unwrap();
        }
        for part in [MANIFEST, MANIFEST_SUM] {
            let whole = fs::read(place.join(part)).unwrap();
            for length in 0..whole.len() - 1 {
                fs::write(place.join(part), &whole[..length]).unwrap();
                assert!(
                    why().contains("changed"),
                    "{part} of {length} bytes: {}",
                    why()
                );
            }
            fs::write(place.join(part), whole).unwrap();
        }
        assert!(shelf.manifest("a").is_ok());
        let text = fs::read_to_string(place.join(MANIFEST)).unwrap();
        fs::write(place.join(MANIFEST), text.replace("web1", "web2")).unwrap();
        assert!(why().contains("changed"), "{}", why());
        let newer = text.replace("\"format\": 3", "\"format\": 5");
        fs::write(place.join(MANIFEST), &newer).unwrap();
        fs::write(place.join(MANIFEST_SUM), hex(xxh3_128(newer.as_bytes()))).unwrap();
        assert!(why().contains("the format is 5"), "{}", why());
    }
}
