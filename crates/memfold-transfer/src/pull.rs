//! Copies a snapshot from an object store to this host.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use futures_util::{StreamExt, TryStreamExt, stream};
use memfold_host::progress::Progress;
use memfold_snapshot::{Draft, Manifest, Shelf, SnapshotError, free_above_reserve, portable};
use memfold_units::{ByteSize, PAGE_SIZE};
use memfold_vm::Network;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::chunk::{self, CHUNK_BYTES, ChunkName};
use super::description::{Description, FileEntry};
use super::error::{TransferError, files};
use super::kept::{self, Described, FetchedSnapshot};
use super::push::blocking;
use super::remote::{AT_ONCE, MISSING, Remote, damaged, is_base, most_packed};

/// Input of a pull, which copies a snapshot from an object store to this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullRequest {
    /// Name of the snapshot in the object store.
    pub from: String,
    /// Name that the snapshot gets on this host.
    pub name: String,
    /// Trust domain that the snapshot gets on this host. VMs of other domains do not share memory
    /// with VMs that run from the snapshot.
    pub domain: Option<String>,
    /// Public key in PEM form with which the snapshot's signature is checked; `None`: no signature
    /// is needed.
    pub trust: Option<String>,
    /// Whether a snapshot without a checked signature may start QEMU with arguments of its own.
    pub allow_arguments: bool,
}

/// Result of a pull, which copied a snapshot from an object store to this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PullReport {
    /// Name of the snapshot on this host.
    pub name: String,
    /// URL of the object store.
    pub url: String,
    /// Bytes of the snapshot's files before compression, without chunks that hold only zeroes.
    pub stored_bytes: u64,
    /// Part of `stored_bytes` that was fetched; the rest was on this host already.
    pub fetched_bytes: u64,
    /// Compressed bytes that the store sent for `fetched_bytes`.
    pub received_bytes: u64,
    /// Whether the snapshot's signature was checked with a trusted key.
    pub trusted: bool,
    /// Whether the whole snapshot has arrived. If not, the rest is fetched while VMs run from it.
    pub complete: bool,
    /// Duration of the pull in seconds.
    pub took_s: f64,
}

/// A file of the snapshot that is being pulled.
#[derive(Debug)]
pub(crate) struct Arriving {
    pub(crate) entry: FileEntry,
    pub(crate) chunks: Vec<ChunkName>,
    pub(crate) file: Arc<File>,
    /// Place of a file that other snapshots may have, too.
    pub(crate) shared: Option<PathBuf>,
    /// Whether the whole file is here already.
    pub(crate) is_whole: bool,
}

/// What arrived for one chunk.
#[derive(Debug, Default)]
pub(crate) struct Fetched {
    pub(crate) fetched_bytes: u64,
    pub(crate) received_bytes: u64,
}

/// A pull whose files are ready to receive what arrives.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) described: Described,
    pub(crate) draft: Draft,
    pub(crate) arriving: Vec<Arriving>,
}

/// Copies a snapshot from an object store to `shelf`, this host's snapshot directory. The snapshot
/// is visible there only after all of its chunks have arrived and match their hashes. If a pull is
/// interrupted, the next pull of this name continues.
pub fn pull(
    shelf: &Shelf,
    remote: &Remote,
    request: &PullRequest,
    progress: &Progress,
) -> Result<PullReport, TransferError> {
    let began = Instant::now();
    let begun = begin(shelf, remote, request, None)?;
    let bytes = |file: &Arriving| file.entry.bytes;
    progress.begin("pulled", begun.arriving.iter().map(bytes).sum());
    let fetched = remote.wait(fetch(remote, &begun.arriving, progress))?;
    let description = complete(shelf, begun, request)?;
    Ok(description.report(remote, request, &fetched, began))
}

/// Reads what a snapshot in an object store consists of, and prepares its files on this host. What
/// an earlier fetch of the snapshot `expected` has kept is not read again. A snapshot with another
/// list of chunks than `expected` is refused before any file is touched.
pub(crate) fn begin(
    shelf: &Shelf,
    remote: &Remote,
    request: &PullRequest,
    expected: Option<&FetchedSnapshot>,
) -> Result<Begun, TransferError> {
    let place = shelf.pull_place(&request.name)?;
    let source = (request.from.as_str(), request.trust.as_deref());
    let kept = expected.and_then(|expected| kept::read(&place, source, expected));
    let described = kept.map_or_else(|| kept::describe(remote, source), Ok)?;
    if expected.is_some_and(|expected| expected.index != described.description.index) {
        return Err(SnapshotError::Impossible(format!(
            "the object store has another snapshot under the name '{}' now, and VMs run from the one before; put that one back, or stop these VMs and remove snapshot '{}'",
            request.from, request.name
        ))
        .into());
    }
    check_arguments(&described.description, request)?;
    let draft = shelf.pull_draft(&request.name)?;
    let domain = request.domain.as_deref();
    let arriving = prepare(shelf, &draft, &described, domain)?;
    // VMs run from what is here already, however little room there is for the rest.
    if expected.is_none() {
        check_space(draft.path(), request, &arriving)?;
    }
    Ok(Begun {
        described,
        draft,
        arriving,
    })
}

impl Description {
    /// Returns the names of the files from outside the snapshot, by their paths on the other host.
    pub(crate) fn bases(&self) -> BTreeMap<PathBuf, String> {
        let files = self.files.iter();
        files
            .filter_map(|file| Some((file.origin.clone()?, file.name.clone())))
            .collect()
    }

    /// Returns the manifest without what this host has to decide.
    pub(crate) fn manifest_for(&self, request: &PullRequest) -> Manifest {
        let mut manifest = self.manifest.clone();
        if request.trust.is_none() {
            manifest.spec.forwards.clear();
            if manifest.spec.network.interface().is_some() {
                manifest.spec.network = Network::Disconnected;
            }
            manifest.spec.qemu_directory = None;
            // QEMU runs as a user of its own, and never as root.
            manifest.spec.user = None;
        }
        manifest
    }

    fn report(
        &self,
        remote: &Remote,
        request: &PullRequest,
        fetched: &Fetched,
        began: Instant,
    ) -> PullReport {
        PullReport {
            name: request.name.clone(),
            url: remote.url().to_owned(),
            stored_bytes: self.stored_bytes,
            fetched_bytes: fetched.fetched_bytes,
            received_bytes: fetched.received_bytes,
            trusted: request.trust.is_some(),
            complete: true,
            took_s: began.elapsed().as_secs_f64(),
        }
    }
}

/// Turns a draft whose chunks have all arrived into a snapshot.
pub(crate) fn complete(
    shelf: &Shelf,
    begun: Begun,
    request: &PullRequest,
) -> Result<Description, TransferError> {
    let Begun {
        described: Described { description, .. },
        draft,
        arriving,
    } = begun;
    settle(shelf, &draft, &arriving)?;
    let mut manifest = description.manifest_for(request);
    let places = (draft.path(), draft.place());
    let known_as = (request.name.as_str(), request.domain.as_deref());
    portable::adapt(&mut manifest, places, &description.bases(), known_as)?;
    let place = draft.place().to_owned();
    draft.commit(&manifest)?;
    kept::remove_kept(&place);
    shelf.remove_unused_bases();
    Ok(description)
}

/// Refuses arguments for QEMU from somebody who is not trusted.
fn check_arguments(description: &Description, request: &PullRequest) -> Result<(), TransferError> {
    let spec = &description.manifest.spec;
    let words = spec.foreign.iter().flat_map(|foreign| &foreign.words);
    let arguments: Vec<&str> = spec
        .qemu_args
        .iter()
        .chain(words)
        .map(String::as_str)
        .collect();
    // Other texts of a foreign VM become parts of QEMU's options, too.
    let brings = !arguments.is_empty() || spec.foreign.is_some();
    if !brings || request.trust.is_some() || request.allow_arguments {
        return Ok(());
    }
    let text: String = arguments.join(" ").chars().take(200).collect();
    Err(TransferError::Arguments {
        name: request.from.clone(),
        arguments: text.escape_debug().to_string(),
    })
}

/// Opens the files that will hold what arrives.
fn prepare(
    shelf: &Shelf,
    draft: &Draft,
    described: &Described,
    domain: Option<&str>,
) -> Result<Vec<Arriving>, TransferError> {
    let (description, index) = (&described.description, &described.index);
    let (mut arriving, mut next, mut bases) = (Vec::new(), 0, 0);
    let nofollow = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or(0);
    for entry in &description.files {
        let count = usize::try_from(chunk::count(entry.bytes)).unwrap_or(usize::MAX);
        let chunks = index[next..next + count].to_vec();
        next += count;
        let path = draft.path().join(&entry.name);
        let shared = is_base(&entry.name, bases).then(|| {
            bases += 1;
            let domain = domain?;
            Some(shelf.bases().join(identity(entry, &chunks, domain)))
        });
        let shared = shared.flatten();
        let mut is_whole = false;
        if let Some(shared) = shared.as_ref().filter(|shared| shared.exists()) {
            is_whole = holds(shared, entry, &chunks);
            if !is_whole {
                // It was changed: this snapshot gets its own.
                fs::remove_file(shared).map_err(files(shared))?;
            }
        }
        // What an earlier pull has left here may be another snapshot's file, too.
        let left = fs::symlink_metadata(&path);
        if left.is_ok_and(|left| is_whole || !left.is_file() || left.nlink() > 1) {
            fs::remove_file(&path).map_err(files(&path))?;
        }
        if let (true, Some(shared)) = (is_whole, &shared) {
            match fs::hard_link(shared, &path) {
                // The last other snapshot with this file was removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => is_whole = false,
                linked => linked.map_err(files(&path))?,
            }
        }
        let file = File::options()
            .read(true)
            .write(!is_whole)
            .create(!is_whole)
            .truncate(false)
            .custom_flags(nofollow)
            .open(&path)
            .map_err(files(&path))?;
        if !is_whole {
            file.set_len(entry.bytes).map_err(files(&path))?;
        }
        arriving.push(Arriving {
            entry: entry.clone(),
            chunks,
            file: Arc::new(file),
            shared,
            is_whole,
        });
    }
    Ok(arriving)
}

/// Returns whether a file has exactly these chunks.
fn holds(path: &Path, entry: &FileEntry, chunks: &[ChunkName]) -> bool {
    let Ok(file) = File::open(path) else {
        return false;
    };
    let is_right = |(number, name): (u64, &ChunkName)| {
        let here = chunk::read(&file, entry.bytes, number);
        here.is_ok_and(|here| here.map(|here| blake3::hash(&here)) == *name)
    };
    let is_long = file
        .metadata()
        .is_ok_and(|facts| facts.len() == entry.bytes);
    is_long && (0..).zip(chunks).all(is_right)
}

/// Returns a name for the content of a file that VMs of one trust domain share: the hash of the
/// domain, of the file's length and of its chunks' names.
fn identity(entry: &FileEntry, chunks: &[ChunkName], domain: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(domain.as_bytes());
    hasher.update(&entry.bytes.to_le_bytes());
    hasher.update(&chunk::encode(chunks));
    hasher.finalize().to_hex().to_string()
}

fn check_space(
    draft: &Path,
    request: &PullRequest,
    arriving: &[Arriving],
) -> Result<(), TransferError> {
    let needed: u64 = arriving
        .iter()
        .filter(|file| !file.is_whole)
        .map(|file| {
            let stored = file.chunks.iter().flatten().count() as u64 * CHUNK_BYTES;
            let there = file.file.metadata().map_or(0, |facts| facts.blocks() * 512);
            stored.min(file.entry.bytes).saturating_sub(there)
        })
        .sum();
    let available = free_above_reserve(draft).map_err(files(draft))?;
    if needed > available {
        return Err(TransferError::Space {
            name: request.name.clone(),
            path: draft.to_owned(),
            needed: ByteSize(needed),
            available: ByteSize(available),
        });
    }
    Ok(())
}

/// Fetches all chunks that are not here.
async fn fetch(
    remote: &Remote,
    arriving: &[Arriving],
    progress: &Progress,
) -> Result<Fetched, TransferError> {
    let chunks = arriving.iter().flat_map(|file| {
        let numbered = file.chunks.iter().zip(0..);
        numbered.map(move |(name, number)| (file, *name, number))
    });
    let all = stream::iter(chunks)
        .map(|(file, name, number)| fetch_chunk(remote, file, (name, number, &[]), progress))
        .buffer_unordered(AT_ONCE);
    all.try_fold(Fetched::default(), |mut sum, one| async move {
        sum.fetched_bytes += one.fetched_bytes;
        sum.received_bytes += one.received_bytes;
        Ok(sum)
    })
    .await
}

/// Fetches a chunk, unless it is here. `seen`: pages of the file, within the chunk, that VMs see
/// already. They are not written again: a chunk in which they differ is refused.
pub(crate) async fn fetch_chunk(
    remote: &Remote,
    arriving: &Arriving,
    (name, number, seen): (ChunkName, u64, &[Range<u64>]),
    progress: &Progress,
) -> Result<Fetched, TransferError> {
    let bytes = arriving.entry.bytes;
    let length = chunk::length(bytes, number);
    let file = arriving.file.clone();
    let is_here = arriving.is_whole
        || blocking(move || {
            let here = chunk::read(&file, bytes, number)?;
            let here = here.map(|here| blake3::hash(&here));
            if name.is_none() && here.is_some() {
                // Left by a pull of another snapshot of this name.
                file.write_all_at(&vec![0; length], number * CHUNK_BYTES)?;
                return Ok(true);
            }
            Ok(here == name)
        })
        .await?;
    let mut fetched = Fetched::default();
    if let (false, Some(name)) = (is_here, name) {
        let path = remote.chunk(&name);
        let packed = remote.get(&path, most_packed(length as u64)).await?;
        let packed = packed.ok_or_else(|| damaged(&path, MISSING.into()))?;
        fetched.received_bytes = packed.len() as u64;
        fetched.fetched_bytes = length as u64;
        let (file, seen) = (arriving.file.clone(), seen.to_vec());
        let written = blocking(move || {
            let bytes = match chunk::unpack(&packed, length, &name) {
                Ok(bytes) => bytes,
                Err(why) => return Ok(Err(why)),
            };
            write_around(&file, &bytes, number * CHUNK_BYTES, &seen)
        })
        .await?;
        written.map_err(|why| damaged(&path, why))?;
    }
    let seen: u64 = seen.iter().map(|run| run.end - run.start).sum();
    progress.add((length as u64).saturating_sub(seen * PAGE_SIZE));
    Ok(fetched)
}

/// Writes a chunk that begins at byte `at` of a file, except the pages that VMs see already.
/// Returns why the chunk is refused: these pages must be the same.
fn write_around(
    file: &File,
    bytes: &[u8],
    at: u64,
    seen: &[Range<u64>],
) -> io::Result<Result<(), String>> {
    let within = |page: u64| {
        let byte = (page * PAGE_SIZE).saturating_sub(at);
        usize::try_from(byte).map_or(bytes.len(), |byte| byte.min(bytes.len()))
    };
    for run in seen {
        let (start, end) = (within(run.start), within(run.end));
        if !is_same(file, at + start as u64, &bytes[start..end])? {
            return Ok(Err(differ(run.start)));
        }
    }
    let mut next = 0;
    for run in seen {
        file.write_all_at(&bytes[next..within(run.start)], at + next as u64)?;
        next = within(run.end);
    }
    file.write_all_at(&bytes[next..], at + next as u64).map(Ok)
}

fn is_same(file: &File, at: u64, bytes: &[u8]) -> io::Result<bool> {
    let mut here = vec![0; bytes.len()];
    file.read_exact_at(&mut here, at)?;
    Ok(here == bytes)
}

fn differ(page: u64) -> String {
    format!("its page {page} differs from the same page among the snapshot's first pages")
}

/// Checks that a file holds these first pages, which begin at byte `at`.
pub(crate) fn check_same(arriving: &Arriving, at: u64, bytes: &[u8]) -> Result<(), TransferError> {
    if is_same(&arriving.file, at, bytes).map_err(TransferError::Local)? {
        return Ok(());
    }
    Err(TransferError::Damaged {
        object: arriving.entry.name.clone(),
        why: differ(at / PAGE_SIZE),
    })
}

/// Removes files of earlier pulls, and gives bases their place among those of other snapshots.
fn settle(shelf: &Shelf, draft: &Draft, arriving: &[Arriving]) -> Result<(), TransferError> {
    for entry in fs::read_dir(draft.path()).map_err(files(draft.path()))? {
        let entry = entry.map_err(files(draft.path()))?;
        let is_wanted = |file: &Arriving| entry.file_name() == file.entry.name.as_str();
        // The daemon that goes on after a failure needs what is kept.
        if entry.file_name() != kept::PLACE && !arriving.iter().any(is_wanted) {
            fs::remove_file(entry.path()).map_err(files(&entry.path()))?;
        }
    }
    let bases = shelf.bases();
    let mut builder = DirBuilder::new();
    builder.mode(0o700).recursive(true);
    for file in arriving.iter().filter(|file| !file.is_whole) {
        file.file.sync_all().map_err(files(draft.path()))?;
        let path = draft.path().join(&file.entry.name);
        // A disk that is built on another one gets another header on each host.
        let shared = file.shared.as_ref().filter(|_| !is_qcow2(&file.file));
        if let Some(shared) = shared {
            builder.create(&bases).map_err(files(&bases))?;
            match fs::hard_link(&path, shared) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(files(shared)(error));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Returns whether a file begins as a qcow2 image does.
fn is_qcow2(file: &File) -> bool {
    let mut magic = [0; 4];
    file.read_exact_at(&mut magic, 0).is_ok() && &magic == b"QFI\xfb"
}
