//! A snapshot from which VMs run while it is being fetched from an object store.
//!
//! ```text
//!   before the first VM   device state, tables, kernel, the beginning of each disk
//!   then, in this order   1. chunks for which a VM waits     wanted   by page faults (bring) and disks (nbd)
//!                         2. chunks that VMs touch at once   soon     by the snapshot's working set
//!                         3. chunks that VMs touch first     rest     by the snapshot's working set
//!                         4. all others                      rest
//!   at the end            the draft becomes an ordinary snapshot
//! ```
//! A chunk is written to its file only after its hash was compared with its name, and VMs see only
//! chunks that are written. If the store is slow, lies or goes away, VMs wait that need what is
//! missing; fetching goes on when the store is right again.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use futures_util::future::{Either, join, join_all, ready, select};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use memfold_host::progress::Progress;
use memfold_snapshot::manifest::{RAM, SavedDisk};
use memfold_snapshot::portable::{self, Layer};
use memfold_snapshot::shelf::CheckedImage;
use memfold_snapshot::working_set::WorkingSet;
use memfold_snapshot::{Manifest, Shelf, SnapshotError};
use memfold_units::PAGE_SIZE;
use memfold_vm::{StreamedDisk, qcow2};
use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::chunk::CHUNK_BYTES;
use super::description::FileEntry;
use super::error::TransferError;
use super::first::FirstPages;
use super::first_pages::{CHUNK_PAGES, Part};
use super::kept::FetchedSnapshot;
use super::nbd::{Exports, MOST_CLIENTS};
use super::places::{self, ImagePlaces, number_by_name, numbers_of};
use super::pull::{self, Arriving, Begun, PullRequest, fetch_chunk};
use super::remote::{AT_ONCE, Remote};
use super::stream_state::{Arrival, Chunk, FilePages, Place, State};

/// Pauses after a failed fetch: the first, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// How long nothing is fetched in advance while the first VM starts.
const QUIET: Duration = Duration::from_secs(1);

/// How long a worker without work sleeps at most.
const IDLE: Duration = Duration::from_secs(1);

/// A snapshot that is being fetched; a handle, of which there may be many.
#[derive(Clone, Debug)]
pub struct StreamedSnapshot(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// `None` for a snapshot that is complete already.
    remote: Option<Remote>,
    request: PullRequest,
    identity: FetchedSnapshot,
    files: Vec<Arriving>,
    begun: Mutex<Option<Begun>>,
    manifest: Manifest,
    image: CheckedImage,
    /// The device state, a file that is there.
    devices: File,
    /// For the files of [`memfold_snapshot::restore::Piece::file`], the number of the file.
    of_pieces: Vec<Option<usize>>,
    /// Pages that VMs touch at once, stored together.
    first: FirstPages,
    /// For each file, whether no earlier pull has left anything in it.
    is_new: Vec<bool>,
    disks: Vec<Option<(Vec<Layer>, u64)>>,
    state: Mutex<State>,
    arrived: Condvar,
    work: Notify,
}

/// How far the fetching of a snapshot is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamStatus {
    /// Bytes that have arrived.
    pub here_bytes: u64,
    /// Bytes that are fetched in all, without chunks that hold only zeroes.
    pub total_bytes: u64,
    /// For how long a VM has waited for a chunk; `None` if none waits.
    pub waits: Option<Duration>,
    /// Why the last fetch failed, and what happens now; `None` if it succeeded.
    pub trouble: Option<String>,
}

impl StreamedSnapshot {
    /// Begins to fetch a snapshot, and returns when its files have what a VM needs to start. Then
    /// [`Self::show`] has to be called, and [`Self::run`] on another thread. `expected`: the
    /// [`Self::identity`] of the snapshot that an earlier daemon began to fetch. Its fetch goes on
    /// although the store is gone.
    pub fn begin(
        shelf: &Shelf,
        remote: Remote,
        request: &PullRequest,
        expected: Option<&FetchedSnapshot>,
    ) -> Result<Self, TransferError> {
        let mut begun = pull::begin(shelf, &remote, request, expected)?;
        let identity = begun.described.identity();
        let mut manifest = begun.described.description.manifest_for(request);
        if let Some(why) = obstacle(&manifest) {
            return Err(SnapshotError::Impossible(format!(
                "snapshot '{}' cannot be used while it is being fetched: {why}; pull it without --stream",
                request.name
            ))
            .into());
        }
        let lazy = lazy_files(&manifest, &begun);
        let progress = Progress::default();
        let is_new: Vec<bool> = begun.arriving.iter().map(Arriving::is_new).collect();
        let files = begun.arriving.iter().enumerate();
        let at_once: Vec<Place> = files
            .flat_map(|(file, of)| (0..of.chunks.len() as u64).map(move |chunk| (file, chunk)))
            .filter(|(file, chunk)| {
                let is_header = *chunk == 0 && begun.arriving[*file].entry.name != RAM;
                is_header || !lazy.contains(file)
            })
            .collect();
        remote.wait(async {
            let fetches = at_once.iter().map(|&(file, number)| {
                let of = &begun.arriving[file];
                let name = of.chunks[usize::try_from(number).unwrap_or(0)];
                fetch_chunk(&remote, of, (name, number, &[]), &progress)
            });
            let fetches = stream::iter(fetches).buffer_unordered(AT_ONCE);
            fetches.try_for_each(|_| ready(Ok(()))).await
        })?;
        let places_of = (begun.draft.path(), begun.draft.place());
        let known_as = (request.name.as_str(), request.domain.as_deref());
        let bases = begun.described.description.bases();
        let chains = portable::adapt_arriving(&mut manifest, places_of, &bases, known_as)?;
        let draft = begun.draft.path().to_owned();
        let image = shelf.arriving_image(&draft, &manifest)?;
        let files = std::mem::take(&mut begun.arriving);
        let disk = |chain: Option<Vec<Layer>>| {
            let chain = chain?;
            let bytes = qcow2::virtual_bytes(&draft.join(&chain[0].0))?;
            Some((chain, bytes))
        };
        let disks = chains.into_iter().map(disk).collect();
        let opened = File::open(draft.join(memfold_snapshot::manifest::DEVICES));
        let devices = opened.map_err(TransferError::Local)?;
        begun.described.keep(&draft)?;
        let entries = &begun.described.description.first_pages;
        let shared = Shared {
            of_pieces: of_pieces(&manifest, &files),
            first: FirstPages::new(entries, &draft, &files),
            is_new,
            remote: Some(remote),
            request: request.clone(),
            identity,
            begun: Mutex::new(Some(begun)),
            state: Mutex::default(),
            arrived: Condvar::new(),
            work: Notify::new(),
            devices,
            manifest,
            image,
            disks,
            files,
        };
        shared.find_work(&draft, &at_once);
        Ok(Self(Arc::new(shared)))
    }

    /// Makes the snapshot's files visible at their final paths, so that VMs can be started from it.
    /// The snapshot's name is taken then. So a file from which the next daemon goes on
    /// ([`Shelf::stream_request`]) has to be there before.
    pub fn show(&self) -> Result<(), SnapshotError> {
        let begun = self.0.begun.lock();
        begun.as_ref().map_or(Ok(()), |begun| begun.draft.show())
    }

    /// Takes back what [`Self::show`] has done, if [`Self::run`] cannot be called.
    pub fn hide(&self) -> Result<(), SnapshotError> {
        let begun = self.0.begun.lock();
        begun.as_ref().map_or(Ok(()), |begun| begun.draft.hide())
    }

    /// Returns a complete snapshot in the same form, for VMs that began to run from it while it was
    /// being fetched.
    pub fn complete(shelf: &Shelf, name: &str) -> Result<Self, SnapshotError> {
        let place = shelf.path(name)?;
        // The files of a draft are visible through a link.
        if !fs::symlink_metadata(&place).is_ok_and(|facts| facts.is_dir()) {
            return Err(SnapshotError::Unknown(name.to_owned()));
        }
        let manifest = shelf.manifest(name)?;
        let image = shelf.arriving_image(&place, &manifest)?;
        let sources = manifest.references.iter().flat_map(|refs| &refs.sources);
        let disks = manifest.disks.iter().flat_map(SavedDisk::files);
        let paths = sources.chain(disks.map(|file| &file.path));
        let names = std::iter::once(RAM.to_owned()).chain(paths.filter_map(|path| file_name(path)));
        let mut files: Vec<Arriving> = Vec::new();
        for name in names {
            if files.iter().any(|file| file.entry.name == name) {
                continue;
            }
            let open = File::open(place.join(&name)).and_then(|file| {
                let bytes = file.metadata()?.len();
                Ok((file, bytes))
            });
            let (file, bytes) = open.map_err(|source| SnapshotError::Files {
                path: place.join(&name),
                source,
            })?;
            files.push(Arriving {
                entry: FileEntry {
                    name,
                    bytes,
                    origin: None,
                },
                chunks: Vec::new(),
                file: Arc::new(file),
                shared: None,
                is_whole: true,
            });
        }
        let shared = Shared {
            of_pieces: of_pieces(&manifest, &files),
            first: FirstPages::default(),
            is_new: Vec::new(),
            devices: shelf.file(name, memfold_snapshot::manifest::DEVICES)?,
            remote: None,
            request: PullRequest {
                name: name.to_owned(),
                ..PullRequest::default()
            },
            identity: FetchedSnapshot {
                index: String::new(),
                description: None,
            },
            begun: Mutex::default(),
            state: Mutex::default(),
            arrived: Condvar::new(),
            work: Notify::new(),
            disks: manifest.disks.iter().map(|_| None).collect(),
            manifest,
            image,
            files,
        };
        Ok(Self(Arc::new(shared)))
    }

    /// Returns the manifest, with the paths that the snapshot's files will have when it is
    /// complete.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.0.manifest
    }

    /// Returns the RAM image, of which parts are missing.
    #[must_use]
    pub fn image(&self) -> &CheckedImage {
        &self.0.image
    }

    /// Opens the device state. Each VM needs a file of its own, because QEMU reads from its offset.
    pub fn devices(&self) -> io::Result<File> {
        File::open(format!("/proc/self/fd/{}", self.0.devices.as_raw_fd()))
    }

    /// Returns the URL of the object store; an empty text for a complete snapshot.
    #[must_use]
    pub fn url(&self) -> &str {
        self.0.remote.as_ref().map_or("", Remote::url)
    }

    /// Returns the request by which the snapshot is fetched.
    #[must_use]
    pub fn request(&self) -> &PullRequest {
        &self.0.request
    }

    /// Notes why the snapshot cannot be completed now.
    pub fn note_trouble(&self, error: &TransferError) {
        let why = in_short(error);
        let trouble = format!("{why}; fix the cause, the daemon tries again");
        self.0.state.lock().trouble = Some(trouble);
    }

    /// Returns what a repeated fetch recognizes the snapshot by; empty for a complete snapshot.
    #[must_use]
    pub fn identity(&self) -> &FetchedSnapshot {
        &self.0.identity
    }

    /// Returns, for each disk, how a VM reads it over the NBD server at `socket`; `None` for disks
    /// that are there.
    #[must_use]
    pub fn disks(&self, socket: &Path) -> Vec<Option<StreamedDisk>> {
        let disk = |of: &Option<(Vec<Layer>, u64)>| {
            let (layers, virtual_bytes) = of.clone()?;
            Some(StreamedDisk {
                socket: socket.to_owned(),
                layers,
                virtual_bytes,
            })
        };
        self.0.disks.iter().map(disk).collect()
    }

    /// Returns the number of the file that [`memfold_snapshot::restore::Piece::file`] names.
    pub(super) fn file_of(&self, piece_file: usize) -> Option<usize> {
        self.0.of_pieces.get(piece_file).copied().flatten()
    }

    /// Returns a file of the snapshot.
    pub(super) fn file(&self, number: usize) -> &File {
        &self.0.files[number].file
    }

    /// Makes the chunk of a page one of those that are fetched first, because somebody waits for
    /// the page.
    pub(super) fn want(&self, file: usize, page: u64) {
        let place = (file, page / CHUNK_PAGES);
        let mut state = self.0.state.lock();
        if !state.has(place, &(page..page + 1)) {
            state.want(place);
            drop(state);
            self.0.work.notify_waiters();
        }
    }

    /// Returns which of these chunks are here, and all pages that are here before their chunks.
    pub(super) fn here(&self, places: impl Iterator<Item = Place>) -> (Vec<Place>, Vec<FilePages>) {
        let state = self.0.state.lock();
        let is_here = |place: &Place| state.get(*place) == Chunk::Here;
        (places.filter(is_here).collect(), state.all_first())
    }

    /// Returns a receiver of what arrives from now on.
    pub(super) fn arrivals(&self) -> Receiver<Arrival> {
        let (listener, arrivals) = channel();
        self.0.state.lock().listeners.push(listener);
        arrivals
    }

    /// Waits until bytes of a file ([`memfold_snapshot::restore::Piece::file`]) are here.
    pub fn wait(&self, file: usize, bytes: Range<u64>) -> io::Result<()> {
        self.0.wait(self.file_of(file).unwrap_or(usize::MAX), bytes)
    }

    /// Notes that a VM is being started. While the first one starts, nothing is fetched that no VM
    /// waits for.
    pub fn note_start(&self) {
        let mut state = self.0.state.lock();
        state.quiet_until.get_or_insert(Instant::now() + QUIET);
    }

    /// Waits until the pages that VMs touch at once are here, if the store has them together. They
    /// arrive while QEMU starts. Returns the number of pages that arrived before their chunks.
    pub fn wait_first(&self) -> u64 {
        let mut state = self.0.state.lock();
        while state.awaits_first && !state.is_stopped {
            self.0.arrived.wait(&mut state);
        }
        state.shown
    }

    /// Returns how far the fetching is.
    #[must_use]
    pub fn status(&self) -> StreamStatus {
        let state = self.0.state.lock();
        StreamStatus {
            here_bytes: (state.total - state.missing) * CHUNK_BYTES
                + state.first_pages() * PAGE_SIZE,
            total_bytes: state.total * CHUNK_BYTES,
            waits: state.waiting.values().min().map(Instant::elapsed),
            trouble: state.trouble.clone(),
        }
    }

    /// Fetches until all is here or [`Self::stop`] was called, and then makes a snapshot of the
    /// draft. Returns whether it is complete.
    pub fn run(&self, shelf: &Shelf, progress: &Progress) -> Result<bool, TransferError> {
        let shared = &self.0;
        let Some(remote) = &shared.remote else {
            return Ok(true);
        };
        {
            let state = shared.state.lock();
            progress.begin("fetched", state.total * CHUNK_BYTES);
            progress.add((state.total - state.missing) * CHUNK_BYTES);
        }
        let chunks = join_all((0..AT_ONCE).map(|_| shared.fetch(remote, progress)));
        remote.wait(join(shared.fetch_first(remote, progress), chunks));
        {
            let mut state = shared.state.lock();
            if state.is_stopped {
                // Nothing arrives any more, and the next pull of this name locks the draft.
                state.listeners.clear();
                drop(state);
                shared.begun.lock().take();
                return Ok(false);
            }
        }
        let Some(mut begun) = shared.begun.lock().take() else {
            return Ok(true);
        };
        begun.arriving = shared.files.iter().map(Arriving::again).collect();
        pull::complete(shelf, begun, &shared.request)?;
        Ok(true)
    }

    /// Returns whether [`Self::stop`] was called.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.state.lock().is_stopped
    }

    /// Ends [`Self::run`]. What has arrived stays for the next pull of this name.
    pub fn stop(&self) {
        self.0.state.lock().is_stopped = true;
        self.0.arrived.notify_all();
        self.0.work.notify_waiters();
    }
}

/// Returns why VMs cannot run from a snapshot while it is being fetched.
fn obstacle(manifest: &Manifest) -> Option<&'static str> {
    if manifest.encryption.is_some() {
        return Some("its memory is encrypted");
    }
    if manifest.packed.is_some() {
        return Some("its memory is compressed");
    }
    let disks = manifest.disks.iter().filter(|disk| !disk.read_only);
    if disks.flat_map(SavedDisk::files).count() > MOST_CLIENTS {
        return Some("its disks consist of more than 64 files; compact it before the push");
    }
    (manifest.spec.foreign.is_some())
        .then_some("memfold did not start its VM, so the VM's disks have options of their own")
}

/// Returns the numbers of the files that are fetched while VMs run: memory, files that the memory
/// refers to (such as that of the layer below), and disks that VMs write to. A file that QEMU opens
/// itself is fetched before.
fn lazy_files(manifest: &Manifest, begun: &Begun) -> Vec<usize> {
    let bases = begun.described.description.bases();
    let disks = manifest.disks.iter().filter(|disk| !disk.read_only);
    let files = disks.flat_map(SavedDisk::files);
    let name_of = |path: &PathBuf| match bases.get(path) {
        Some(name) => Some(name.clone()),
        None => file_name(path),
    };
    let sources = manifest.references.iter().flat_map(|refs| &refs.sources);
    let files = files.map(|file| &file.path).chain(sources);
    let names = files.filter_map(&name_of);
    let spec = &manifest.spec;
    let boot = [&spec.boot.kernel, &spec.boot.initrd, &spec.boot.firmware];
    let of_boot = boot.into_iter().flatten().chain(&spec.files);
    let read_only = manifest.disks.iter().filter(|disk| disk.read_only);
    let read_only = read_only.flat_map(SavedDisk::files).map(|file| &file.path);
    let opened: Vec<String> = of_boot.chain(read_only).filter_map(&name_of).collect();
    let mut names: Vec<String> = names.collect();
    names.push(RAM.to_owned());
    names.retain(|name| !opened.contains(name));
    let files = begun.arriving.iter().enumerate();
    let is_lazy = |file: &Arriving| names.contains(&file.entry.name);
    files
        .filter_map(|(number, file)| is_lazy(file).then_some(number))
        .collect()
}

fn file_name(path: &Path) -> Option<String> {
    Some(path.file_name()?.to_str()?.to_owned())
}

/// Returns the numbers of the files that [`memfold_snapshot::restore::Piece::file`] names.
fn of_pieces(manifest: &Manifest, files: &[Arriving]) -> Vec<Option<usize>> {
    let entries = || files.iter().map(|file| &file.entry);
    numbers_of(manifest, |path| number_by_name(entries(), path))
}

/// Returns the places of all chunks that are not zeroes.
fn places(files: &[Arriving]) -> impl Iterator<Item = Place> + '_ {
    let all = files.iter().enumerate();
    all.flat_map(|(number, file)| {
        let chunks = (0..).zip(&file.chunks);
        chunks.filter_map(move |(chunk, name)| name.map(|_| (number, chunk)))
    })
}

impl Arriving {
    /// Returns whether no earlier pull has left anything in the file.
    fn is_new(&self) -> bool {
        self.file.metadata().is_ok_and(|facts| facts.blocks() == 0)
    }

    fn again(&self) -> Self {
        Self {
            entry: self.entry.clone(),
            chunks: self.chunks.clone(),
            file: Arc::clone(&self.file),
            shared: self.shared.clone(),
            is_whole: self.is_whole,
        }
    }
}

impl Shared {
    /// Finds out which chunks are missing, and in which order they are fetched.
    fn find_work(&self, draft: &Path, here: &[Place]) {
        let mut state = State::default();
        for (file, &is_new) in self.files.iter().zip(&self.is_new) {
            // A chunk of zeroes is a hole, unless an earlier pull has left something there.
            let chunk = |name: &Option<blake3::Hash>| {
                let is_here = file.is_whole || name.is_none() && is_new;
                if is_here { Chunk::Here } else { Chunk::Missing }
            };
            state.chunks.push(file.chunks.iter().map(chunk).collect());
        }
        for &(file, number) in here {
            state.set((file, number), Chunk::Here);
        }
        let image = ImagePlaces::new(&self.manifest, &self.image, self.of_pieces.clone());
        let chunks = |(page, pages): (u64, u64)| {
            image.of(page, pages).flat_map(|(file, pages)| {
                let chunks = pages.start / CHUNK_PAGES..pages.end.div_ceil(CHUNK_PAGES);
                chunks.map(move |chunk| (file, chunk))
            })
        };
        let set = WorkingSet::read(draft, &self.manifest.sums.xxh3_128);
        let soon = places::at_once(&self.manifest, set.as_ref());
        let mut soon: Vec<Place> = soon.flat_map(chunks).collect();
        let runs = set.iter().flat_map(|set| set.runs().iter().copied());
        let mut first: Vec<Place> = runs.flat_map(chunks).collect();
        soon.dedup();
        first.dedup();
        let all = state.chunks.iter().enumerate();
        let all: Vec<Place> = all
            .flat_map(|(file, chunks)| (0..chunks.len() as u64).map(move |chunk| (file, chunk)))
            .filter(|&place| state.get(place) == Chunk::Missing)
            .collect();
        state.missing = all.len() as u64;
        state.total = places(&self.files).count() as u64;
        state.total = state.total.max(state.missing);
        // A chunk that comes twice is fetched once.
        state.soon = soon.into();
        state.awaits_first = !self.first.entries.is_empty() && state.missing > 0;
        // Then VMs of an earlier daemon may see pages of chunks that are not here.
        let mut lazy = self.is_new.iter().zip(&self.files);
        state.is_resumed = lazy.any(|(is_new, file)| !is_new && !file.is_whole);
        state.rest = first.into_iter().chain(all).collect();
        *self.state.lock() = state;
    }

    /// Fetches the pages that VMs touch at once, before other chunks. Without them, VMs only start
    /// later.
    async fn fetch_first(&self, remote: &Remote, progress: &Progress) {
        if !self.state.lock().awaits_first {
            return;
        }
        let began = Instant::now();
        let (fetch, stopped) = (pin!(self.first.fetch(remote)), pin!(self.stopped()));
        let fetched = match select(fetch, stopped).await {
            Either::Left((fetched, _)) => fetched,
            Either::Right(_) => return,
        };
        match fetched.and_then(|parts| self.use_first(&parts)) {
            Ok(pages) => {
                progress.add(pages * PAGE_SIZE);
                tracing::debug!(
                    snapshot = self.request.name,
                    pages,
                    ms = began.elapsed().as_secs_f64() * 1000.0,
                    "pages fetched that VMs touch first"
                );
            }
            Err(error) => tracing::warn!(
                snapshot = self.request.name,
                url = remote.url(),
                error = memfold_host::chain(&error),
                "cannot use the pages of a snapshot that are stored together for a fast start; its VMs start more slowly, with whole chunks"
            ),
        }
        let mut state = self.state.lock();
        state.awaits_first = false;
        // What lies beside these pages is not needed at once.
        let soon = std::mem::take(&mut state.soon);
        let is_later = |place: &Place| !state.first(*place).is_empty();
        let (later, soon): (Vec<Place>, Vec<Place>) = soon.into_iter().partition(is_later);
        for place in later.into_iter().rev() {
            state.rest.push_front(place);
        }
        state.soon = soon.into();
        drop(state);
        self.arrived.notify_all();
        self.work.notify_waiters();
    }

    /// Waits until nothing is fetched any more.
    async fn stopped(&self) {
        loop {
            // Registered before the look, so that no notification is missed.
            let mut notified = pin!(self.work.notified());
            notified.as_mut().enable();
            if self.state.lock().is_stopped {
                return;
            }
            notified.await;
        }
    }

    /// Writes first pages to their files, and shows them to VMs. Pages are left to their chunks if
    /// these are on their way, or are zeroes. Returns the number of pages that VMs see now.
    fn use_first(&self, parts: &[Part]) -> Result<u64, TransferError> {
        // No chunk may be written meanwhile.
        let mut state = self.state.lock();
        let mut shown: Vec<FilePages> = Vec::new();
        for (run, bytes) in parts.iter().flat_map(Part::pages) {
            let file = usize::try_from(run.file).unwrap_or(usize::MAX);
            let (place, of) = ((file, run.chunk()), &self.files[file]);
            let name = of
                .chunks
                .get(usize::try_from(run.chunk()).unwrap_or(usize::MAX));
            let at = run.first * PAGE_SIZE;
            match (state.get(place), name.copied().flatten()) {
                // VMs may see what an earlier daemon has fetched: nothing is written over it.
                (Chunk::Missing, Some(_)) if !self.is_new[file] => {
                    if pull::check_same(of, at, bytes).is_ok() {
                        shown.push((file, run.first..run.end()));
                    }
                }
                (Chunk::Missing, Some(_)) => {
                    of.file
                        .write_all_at(bytes, at)
                        .map_err(TransferError::Local)?;
                    shown.push((file, run.first..run.end()));
                }
                (Chunk::Here, _) => pull::check_same(of, at, bytes)?,
                (Chunk::Missing, None) | (Chunk::OnItsWay, _) => {}
            }
        }
        state.note_first(shown);
        Ok(state.shown)
    }

    /// Fetches chunks until all are here, or nobody wants them any more.
    async fn fetch(&self, remote: &Remote, progress: &Progress) {
        loop {
            // Registered before the look, so that no notification is missed.
            let mut notified = pin!(self.work.notified());
            notified.as_mut().enable();
            let (next, pause) = {
                let mut state = self.state.lock();
                if state.missing == 0 || state.is_stopped {
                    self.work.notify_waiters();
                    return;
                }
                let next = state.next();
                let with_first =
                    next.map(|(place, is_urgent)| (place, is_urgent, state.first(place).to_vec()));
                (with_first, IDLE.min(state.quiet().unwrap_or(IDLE)))
            };
            let Some((place, is_urgent, seen)) = next else {
                // The end of the wait is only a reason to look again.
                let _ = timeout(pause, notified).await;
                continue;
            };
            let of = &self.files[place.0];
            let name = of.chunks[usize::try_from(place.1).unwrap_or(0)];
            let began = Instant::now();
            let chunk = (name, place.1, seen.as_slice());
            let fetched = fetch_chunk(remote, of, chunk, progress).await;
            if is_urgent {
                tracing::debug!(
                    snapshot = self.request.name,
                    file = of.entry.name,
                    chunk = place.1,
                    ms = began.elapsed().as_secs_f64() * 1000.0,
                    "part of a snapshot fetched for which a VM waits"
                );
            }
            let pause = self.note(place, is_urgent, fetched.map(drop));
            if let Some(pause) = pause {
                sleep(pause).await;
            }
        }
    }

    /// Notes the end of a fetch. Returns how long to wait after a failure.
    fn note(
        &self,
        place: Place,
        is_urgent: bool,
        fetched: Result<(), TransferError>,
    ) -> Option<Duration> {
        let mut state = self.state.lock();
        let of_kind = if is_urgent {
            &mut state.urgent
        } else {
            &mut state.in_advance
        };
        *of_kind = of_kind.saturating_sub(1);
        let pause = match fetched {
            Ok(()) => {
                state.note_here(place);
                (state.failures, state.trouble) = (0, None);
                None
            }
            Err(error) => {
                state.set(place, Chunk::Missing);
                let is_wanted = state.waiting.contains_key(&place);
                if is_wanted {
                    state.wanted.push_back(place);
                } else {
                    state.rest.push_front(place);
                }
                if state.trouble.is_none() {
                    tracing::warn!(
                        snapshot = self.request.name,
                        url = remote_url(self.remote.as_ref()),
                        error = memfold_host::chain(&error),
                        "cannot fetch a part of a snapshot from which VMs run; retrying until it succeeds, and VMs that need the part wait"
                    );
                }
                state.trouble = Some(format!("{}; retrying", in_short(&error)));
                let pause = PAUSE.0 * 2_u32.saturating_pow(state.failures.min(8));
                state.failures += 1;
                Some(pause.min(PAUSE.1))
            }
        };
        drop(state);
        self.arrived.notify_all();
        self.work.notify_waiters();
        pause
    }

    /// Waits until bytes of file `number` are here.
    fn wait(&self, number: usize, bytes: Range<u64>) -> io::Result<()> {
        let pages = bytes.start / PAGE_SIZE..bytes.end.div_ceil(PAGE_SIZE);
        let in_chunk = |chunk: u64| {
            let of_chunk = chunk * CHUNK_PAGES..(chunk + 1) * CHUNK_PAGES;
            pages.start.max(of_chunk.start)..pages.end.min(of_chunk.end)
        };
        let chunks = bytes.start / CHUNK_BYTES..bytes.end.div_ceil(CHUNK_BYTES);
        let mut missing: Vec<u64> = chunks.collect();
        let mut state = self.state.lock();
        missing.retain(|&chunk| !state.has((number, chunk), &in_chunk(chunk)));
        for &chunk in &missing {
            state.want((number, chunk));
        }
        self.work.notify_waiters();
        while !missing.is_empty() {
            if state.is_stopped {
                return Err(io::Error::other("the snapshot is not fetched any more"));
            }
            self.arrived.wait(&mut state);
            missing.retain(|&chunk| !state.has((number, chunk), &in_chunk(chunk)));
        }
        Ok(())
    }
}

/// Says what failed and the innermost reason. The library for object stores repeats the others.
fn in_short(error: &TransferError) -> String {
    let first = std::error::Error::source(error);
    let inner = std::iter::successors(first, |error| error.source()).last();
    inner.map_or_else(|| error.to_string(), |inner| format!("{error}: {inner}"))
}

fn remote_url(remote: Option<&Remote>) -> &str {
    remote.map_or("", Remote::url)
}

impl Exports for StreamedSnapshot {
    fn bytes(&self, name: &str) -> Option<u64> {
        let file = self.0.files.iter().find(|file| file.entry.name == name)?;
        Some(file.entry.bytes)
    }

    fn read(&self, name: &str, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut files = self.0.files.iter();
        let number = files.position(|file| file.entry.name == name);
        let number = number.ok_or(io::ErrorKind::NotFound)?;
        self.0.wait(number, at..at + buffer.len() as u64)?;
        self.0.files[number].file.read_exact_at(buffer, at)
    }
}
