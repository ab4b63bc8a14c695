//! VMs that run from a snapshot while it is being fetched from an object store.
//!
//! ```text
//!   NAME.stream    the request, beside the snapshots: the next daemon goes on fetching, also while the store is gone,
//!                  because the draft holds the snapshot's description and list of chunks
//!   stream         fetches chunks (memfold-transfer), and says which have arrived
//!   VM             pages: over a socket to the library in QEMU; disks: over an NBD server of this daemon
//!   at the end     VM's disks are switched to the snapshot's files, and the VM is one like any other
//! ```
//! If the daemon ends, VMs that need what is missing wait for the next daemon. It connects to them
//! before QEMU's monitor is asked, because QEMU's main loop may be what waits.

use std::fmt::Write;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use memfold_api::PullBody;
use memfold_fold::Command;
use memfold_host::chain;
use memfold_snapshot::{SnapshotError, SnapshotInfo, fetched_disks, restore};
use memfold_transfer::{PullReport, PullRequest, Remote, StreamStatus, StreamedSnapshot};
use memfold_units::ByteSize;
use memfold_vm::{MachineError, RamLayout, Vm, VmDirectory, VmSpec, qemu_user};
use parking_lot::Mutex;
use tracing::{debug, info, warn};

use crate::backoff::LONGEST_WAIT;
use crate::error::DaemonError;
use crate::json_file::write_json;
use crate::machine::Machine;
use crate::snapshots::Snapshots;
use crate::snapshots::streams::{
    ConnectError, DiskLink, DiskServer, Note, PageLink, SavedRequest, StreamingVm, connect,
    disk_socket, listen, serve,
};
use crate::threads;

/// How often VMs and fetches are looked after.
const LOOK: Duration = Duration::from_secs(1);

/// Pause before a snapshot that an earlier daemon was fetching is tried again, and the first pause
/// before one that could not be completed is.
const PAUSE: Duration = Duration::from_secs(5);

/// How long a QEMU cannot be connected to before the log tells so.
const CUT_OFF: Duration = Duration::from_secs(10);

/// Shortest time between two messages that a VM was connected to again.
const QUIET: Duration = Duration::from_secs(60);

impl Snapshots {
    /// Begins to fetch a snapshot, and returns when VMs can be started from it. The rest is fetched
    /// while they run.
    pub(super) fn stream(
        self: &Arc<Self>,
        name: &str,
        body: PullBody,
    ) -> Result<PullReport, DaemonError> {
        let began = Instant::now();
        let remote = Remote::open(&body.url)?;
        let request = request(name, body);
        let url = remote.url().to_owned();
        let is_other =
            |stream: &StreamedSnapshot| stream.url() != url || *stream.request() != request;
        if self.streamed(name).as_ref().is_some_and(is_other) {
            return Err(SnapshotError::Busy(format!(
                "snapshot '{name}' is being fetched already, from another place or with other options; wait until it is complete, or remove '{name}' first"
            ))
            .into());
        }
        if self.streamed(name).is_none() {
            let path = self.saved_request(name)?;
            self.refuse_if_interrupted(name)?;
            let stream = {
                let _used = self.below.snapshot_locks.begin(name)?;
                StreamedSnapshot::begin(&self.below.snapshots, remote, &request, None)?
            };
            let saved = SavedRequest {
                url,
                request: request.clone(),
                snapshot: stream.identity().clone(),
            };
            let written = write_json(&path, &saved);
            let written = written.map_err(|source| SnapshotError::Files {
                path: path.clone(),
                source,
            });
            // The name is taken from here on: the next daemon must know why.
            let begun = written
                .and_then(|()| stream.show())
                .map_err(DaemonError::from)
                .and_then(|()| self.begin_fetching(name, &stream, 0));
            begun.inspect_err(|_| {
                // If the link stays, the next daemon removes it.
                let _ = stream.hide();
                let _ = fs::remove_file(&path);
            })?;
        }
        let stream = self.streamed(name).ok_or_else(|| unknown(name))?;
        let status = stream.status();
        Ok(PullReport {
            name: name.to_owned(),
            url: stream.url().to_owned(),
            stored_bytes: status.total_bytes,
            fetched_bytes: status.here_bytes,
            received_bytes: 0,
            trusted: stream.request().trust.is_some(),
            complete: false,
            took_s: began.elapsed().as_secs_f64(),
        })
    }

    /// Returns the snapshot of this name if it is being fetched while VMs run from it.
    pub(super) fn streamed(&self, name: &str) -> Option<StreamedSnapshot> {
        self.streams.snapshots.lock().get(name).cloned()
    }

    /// Returns the entries of the list of snapshots for those that are being fetched.
    pub(super) fn streamed_infos(&self) -> Vec<SnapshotInfo> {
        let vms = self.streams.vms.lock();
        let users = |name: &str| {
            let all = vms.iter().filter(|(_, vm)| vm.note.snapshot == name);
            all.map(|(vm, _)| vm.clone()).collect()
        };
        let all = self.streams.snapshots.lock();
        let infos = all.iter().map(|(name, stream)| {
            let manifest = stream.manifest();
            SnapshotInfo {
                name: name.clone(),
                domain: manifest.domain.clone(),
                vm: manifest.vm.clone(),
                created_s: manifest.created_s,
                memory_bytes: manifest.memory().0,
                disk_bytes: stream.status().here_bytes,
                parent: None,
                parent_bytes: 0,
                fork: false,
                key: None,
                users: users(name),
                problem: Some(describe(stream)),
            }
        });
        infos.collect()
    }

    fn saved_request(&self, name: &str) -> Result<PathBuf, SnapshotError> {
        self.below.snapshots.stream_request(name)
    }

    /// Refuses to save or fetch a snapshot under the name of one that is being fetched while VMs
    /// run from it, perhaps since the daemon before this one.
    pub(super) fn refuse_if_interrupted(&self, name: &str) -> Result<(), SnapshotError> {
        if !self.saved_request(name)?.exists() {
            return Ok(());
        }
        Err(SnapshotError::Busy(format!(
            "snapshot '{name}' is being fetched already, and the daemon tries again every {} s; choose another name, or remove '{name}' first",
            PAUSE.as_secs()
        )))
    }

    /// Begins to fetch what is missing of a snapshot on a thread. `failures`: how often the
    /// snapshot could not be completed.
    fn begin_fetching(
        self: &Arc<Self>,
        name: &str,
        stream: &StreamedSnapshot,
        failures: u32,
    ) -> Result<(), DaemonError> {
        let mut all = self.streams.snapshots.lock();
        all.insert(name.to_owned(), stream.clone());
        drop(all);
        let (this, stream, of_thread) = (Arc::clone(self), stream.clone(), name.to_owned());
        let begun = threads::begin("stream", move || {
            this.fetch(&of_thread, &stream, failures);
        });
        begun.map_err(|_| {
            self.streams.snapshots.lock().remove(name);
            DaemonError::Internal("no thread to fetch the snapshot")
        })
    }

    fn fetch(self: &Arc<Self>, name: &str, stream: &StreamedSnapshot, failures: u32) {
        let fetched = match self.below.snapshot_locks.begin(name) {
            Ok(progress) => stream.run(&self.below.snapshots, &progress),
            Err(error) => {
                debug!(%error, "snapshot is not fetched");
                Ok(false)
            }
        };
        match fetched {
            Ok(true) => info!(snapshot = name, url = stream.url(), "snapshot pulled"),
            Ok(false) => info!(snapshot = name, "fetching of the snapshot stopped"),
            Err(error) => {
                stream.note_trouble(&error);
                warn!(
                    snapshot = name,
                    error = chain(&error),
                    "cannot complete a snapshot whose parts have all been fetched; VMs run on; retrying until it succeeds"
                );
                self.complete_later(name, stream, failures);
                return;
            }
        }
        // VMs of the complete snapshot are looked after as soon as it is no stream any more.
        self.streams.snapshots.lock().remove(name);
        if let Ok(path) = self.saved_request(name) {
            let _ = fs::remove_file(path);
        }
    }

    /// Tries again to complete a snapshot, after a pause that doubles with each failure: all parts
    /// are read and compared with their hashes again.
    fn complete_later(self: &Arc<Self>, name: &str, stream: &StreamedSnapshot, failures: u32) {
        let Ok(path) = self.saved_request(name) else {
            return;
        };
        let pause = PAUSE.saturating_mul(1 << failures.min(8)).min(LONGEST_WAIT);
        let is_removed = || stream.is_stopped() || !path.exists();
        if threads::wait_until(pause, LOOK, is_removed) {
            return;
        }
        let saved = SavedRequest {
            url: stream.url().to_owned(),
            request: stream.request().clone(),
            snapshot: stream.identity().clone(),
        };
        self.go_on_fetching(name, &saved, failures.saturating_add(1));
    }

    /// Ends the fetching of a snapshot, also for later daemons.
    ///
    /// # Errors
    ///
    /// [`SnapshotError::Busy`] if a VM needs what is missing.
    pub(super) fn stop_stream(&self, name: &str) -> Result<(), DaemonError> {
        let starting = self.streams.starting.lock();
        let vms = self.streams.vms.lock();
        let running = vms.iter().map(|(vm, of)| (vm, &of.note.snapshot));
        let users = running.chain(&*starting);
        let users = users.filter(|(_, snapshot)| *snapshot == name);
        let users: Vec<&str> = users.map(|(vm, _)| vm.as_str()).collect();
        if !users.is_empty() {
            return Err(SnapshotError::Busy(format!(
                "VMs run from snapshot '{name}', which is still being fetched: {}; stop them first",
                users.join(", ")
            ))
            .into());
        }
        drop(vms);
        if self.streamed(name).is_some() {
            // A VM that was started with a disk of the snapshot.
            self.refuse_if_in_vms(name)?;
        }
        // Without this file, nobody begins again.
        let _ = fs::remove_file(self.saved_request(name)?);
        let Some(stream) = self.streamed(name) else {
            return Ok(());
        };
        stream.stop();
        drop(starting);
        // Nobody fetches a snapshot any more that could not be completed, but until it is removed,
        // VMs can be started from it.
        let is_idle = || self.below.snapshot_locks.now(name).is_none();
        let is_over = || self.streamed(name).is_none() || is_idle();
        if threads::wait_until(Duration::from_secs(30), Duration::from_millis(20), is_over) {
            self.streams.snapshots.lock().remove(name);
            return Ok(());
        }
        Err(SnapshotError::Busy(format!(
            "snapshot '{name}' is still being fetched; try again"
        ))
        .into())
    }

    /// Starts the NBD server for the disks of a VM that is going to be started from a stream, and
    /// notes in the description how QEMU reads them.
    pub(super) fn serve_disks(
        &self,
        stream: &StreamedSnapshot,
        spec: &mut VmSpec,
    ) -> Result<DiskServer, DaemonError> {
        let server = DiskServer {
            is_over: Arc::default(),
            is_kept: false,
            vm: spec.name.clone(),
            starting: Arc::clone(&self.streams.starting),
        };
        let snapshot = stream.manifest().name.clone();
        {
            let mut starting = self.streams.starting.lock();
            if stream.is_stopped() {
                return Err(unknown(&snapshot));
            }
            starting.insert(spec.name.clone(), snapshot);
        }
        let path = disk_socket(self.below.registry.state(), &spec.name);
        for (disk, streamed) in spec.disks.iter_mut().zip(stream.disks(&path)) {
            disk.streamed = streamed;
        }
        // QEMU connects as root, before it switches to its user.
        let listener = listen(&path, None);
        let listener = listener.map_err(|source| SnapshotError::Files { path, source })?;
        serve(&spec.name, listener, stream, &server.is_over)
            .map_err(|_| DaemonError::Internal("no thread to serve disks"))?;
        Ok(server)
    }

    /// Notes a VM that was just started from a stream, so that the next daemon brings it what is
    /// missing.
    pub(super) fn note_streaming(
        &self,
        vm: &Vm,
        layout: &RamLayout,
        stream: &StreamedSnapshot,
        mut server: DiskServer,
        pages: Arc<Mutex<PageLink>>,
    ) -> io::Result<()> {
        let socket = disk_socket(self.below.registry.state(), vm.name());
        qemu_user::give(&socket, vm.user())?;
        let blocks = layout.blocks.iter();
        let note = Note {
            snapshot: stream.manifest().name.clone(),
            sums: Some(stream.manifest().sums.xxh3_128.clone()),
            blocks: blocks
                .map(|block| (block.name.clone(), block.hva.0, block.pages))
                .collect(),
        };
        if let Some(directory) = vm.directory() {
            directory.write_json(&directory.arriving(), &note)?;
        }
        let streaming = StreamingVm {
            note,
            pages,
            disks: DiskLink::Serves,
            is_over: server.keep(),
            cut_off: None,
            reconnected: None,
            is_told: false,
        };
        let earlier = self
            .streams
            .vms
            .lock()
            .insert(vm.name().to_owned(), streaming);
        // A VM of this name that has just ended.
        if let Some(earlier) = earlier {
            earlier.is_over.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Connects to the VMs that ran from streams of the earlier daemon. Called before VMs are
    /// adopted.
    pub(crate) fn find_streaming_vms(&self) {
        let state = self.below.registry.state();
        for directory in VmDirectory::all(state).unwrap_or_default() {
            let Ok(note) = VmDirectory::read_json::<Note>(&directory.arriving()) else {
                continue;
            };
            let vm = match Vm::open(&directory) {
                Ok(vm) => vm,
                // Adoption removes the files of a VM that has ended.
                Err(MachineError::NotFound { .. }) => continue,
                Err(error) => {
                    warn!(
                        vm = directory.name(),
                        error = chain(&error),
                        "cannot open a VM whose snapshot is being fetched; restart the daemon if the VM still runs"
                    );
                    continue;
                }
            };
            let mut streaming = StreamingVm {
                note,
                pages: Arc::default(),
                // If this fails, it is tried again.
                disks: listen(&disk_socket(state, vm.name()), vm.user())
                    .map_or(DiskLink::Missing, DiskLink::Listens),
                is_over: Arc::default(),
                cut_off: None,
                reconnected: None,
                is_told: false,
            };
            match connect(&vm) {
                Ok(socket) => *streaming.pages.lock() = PageLink::Unused(socket),
                Err(error) => {
                    warn_of_cut_off(vm.name(), &error);
                    streaming.cut_off = Some((Instant::now(), true));
                }
            }
            let mut vms = self.streams.vms.lock();
            vms.insert(vm.name().to_owned(), streaming);
        }
    }

    /// Goes on fetching what the earlier daemon has fetched, and looks after VMs that run from
    /// streams from now on.
    pub(crate) fn begin_streams(self: &Arc<Self>) -> io::Result<()> {
        let entries = fs::read_dir(self.below.snapshots.root());
        for entry in entries.into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let hidden = name.strip_prefix('.');
            // A daemon that was killed while it wrote a request has left a part of it.
            if hidden.is_some_and(|n| n.strip_suffix(".new").is_some()) {
                let _ = fs::remove_file(entry.path());
                continue;
            }
            let name = hidden.and_then(|n| n.strip_suffix(".stream"));
            let text = name.and_then(|_| fs::read(entry.path()).ok());
            let Some((name, text)) = name.zip(text) else {
                continue;
            };
            match serde_json::from_slice::<SavedRequest>(&text) {
                Ok(saved) => self.resume(name, saved)?,
                Err(error) => warn!(
                    path = %entry.path().display(),
                    %error,
                    "cannot read the request of an interrupted pull; remove the file, and pull the snapshot again"
                ),
            }
        }
        threads::repeat("streams", LOOK, self, |this| this.look_after_vms())
    }

    fn resume(self: &Arc<Self>, name: &str, saved: SavedRequest) -> io::Result<()> {
        let (this, name) = (Arc::clone(self), name.to_owned());
        threads::begin("resume", move || this.go_on_fetching(&name, &saved, 0))
    }

    /// Goes on fetching a snapshot that was begun. Tries until that is possible, or until the
    /// snapshot is removed.
    fn go_on_fetching(self: &Arc<Self>, name: &str, saved: &SavedRequest, failures: u32) {
        let shelf = &self.below.snapshots;
        let Ok(path) = self.saved_request(name) else {
            return;
        };
        let mut is_told = false;
        loop {
            // The files of a draft are visible through a link.
            let place = shelf.root().join(name);
            let is_whole = fs::symlink_metadata(&place).is_ok_and(|facts| facts.is_dir());
            if is_whole && shelf.manifest(name).is_ok() {
                // The earlier attempt ended right after the snapshot was complete.
                memfold_transfer::remove_kept(&place);
                self.streams.snapshots.lock().remove(name);
                let _ = fs::remove_file(&path);
            }
            // A removal of the snapshot removes the file, too.
            if !path.exists() {
                return;
            }
            let begun = Remote::reopen(&saved.url).and_then(|remote| {
                StreamedSnapshot::begin(shelf, remote, &saved.request, Some(&saved.snapshot))
            });
            let begun = begun.map_err(DaemonError::from).and_then(|stream| {
                // A removal holds this lock while it removes the file and stops the stream.
                let _starting = self.streams.starting.lock();
                if path.exists() {
                    stream.show()?;
                    self.begin_fetching(name, &stream, failures)?;
                }
                Ok(())
            });
            let Err(error) = begun else { return };
            self.show_again(name, &path);
            if !is_told {
                is_told = true;
                warn!(
                    snapshot = name,
                    url = saved.url,
                    error = chain(&error),
                    "cannot go on fetching a snapshot; retrying until it succeeds"
                );
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Makes the files of a snapshot visible again if VMs can be started from it, although it could
    /// not be completed. `path`: its request.
    fn show_again(&self, name: &str, path: &Path) {
        let _starting = self.streams.starting.lock();
        if !path.exists() || self.streamed(name).is_none() {
            return;
        }
        let draft = self.below.snapshots.pull_draft(name);
        if let Err(error) = draft.and_then(|draft| draft.show()) {
            debug!(
                snapshot = name,
                error = chain(&error),
                "files of the snapshot are not visible"
            );
        }
    }

    /// Brings VMs of the earlier daemon what is missing, and makes VMs that need nothing more
    /// ordinary ones.
    fn look_after_vms(&self) {
        let names: Vec<String> = self.streams.vms.lock().keys().cloned().collect();
        for name in names {
            if let Err(error) = self.look_after(&name) {
                debug!(
                    vm = name,
                    error = chain(&error),
                    "the VM still needs its stream"
                );
            }
        }
    }

    fn look_after(&self, name: &str) -> Result<(), DaemonError> {
        let state = self.below.registry.state();
        let (vm, note, pages) = {
            let starting = self.streams.starting.lock();
            let mut vms = self.streams.vms.lock();
            let Some(streaming) = vms.get_mut(name) else {
                return Ok(());
            };
            let opened = Vm::open(&VmDirectory::of(state, name));
            if matches!(opened, Err(MachineError::NotFound { .. })) {
                streaming.is_over.store(true, Ordering::Relaxed);
                vms.remove(name);
                // Another VM of this name may be starting, and has its own socket there.
                if !starting.contains_key(name) {
                    let _ = fs::remove_file(disk_socket(state, name));
                }
                return Ok(());
            }
            let pages = Arc::clone(&streaming.pages);
            (opened?, streaming.note.clone(), pages)
        };
        let snapshot = note.snapshot.clone();
        let stream = self.streamed(&snapshot);
        if let Err(why) = self.check_same(&note, stream.as_ref()) {
            let mut vms = self.streams.vms.lock();
            if let Some(vm) = vms.get_mut(name).filter(|vm| !vm.is_told) {
                vm.is_told = true;
                warn!(
                    vm = name,
                    snapshot,
                    "the VM waits for its snapshot, and another one has the snapshot's name; put the first one back, or stop the VM"
                );
            }
            return Err(why.into());
        }
        self.serve_again(&vm, &note, stream.as_ref())?;
        self.bring_again(&vm, &note, stream.as_ref(), &pages)?;
        let Ok(machine) = self.below.registry.machine(name) else {
            return Ok(());
        };
        machine.note_stream(stream.as_ref().map(describe));
        if stream.is_some() || !matches!(*pages.lock(), PageLink::Complete) {
            return Ok(());
        }
        if let Err(error) = self.settle(&machine, &snapshot) {
            let mut vms = self.streams.vms.lock();
            let vm = vms.get_mut(name).filter(|vm| !vm.is_told);
            if let Some(vm) = vm {
                vm.is_told = true;
                warn!(
                    vm = name,
                    snapshot,
                    error = chain(&error),
                    "cannot switch the VM's disks to the snapshot's files, so this daemon goes on serving them; retrying"
                );
            }
            return Err(error);
        }
        if let Some(vm) = self.streams.vms.lock().remove(name) {
            vm.is_over.store(true, Ordering::Relaxed);
        }
        let _ = fs::remove_file(disk_socket(state, name));
        Ok(())
    }

    /// Returns `stream`, or the complete snapshot in the same form. Fails if the daemon has not
    /// begun to fetch the snapshot yet.
    fn stream_or_complete(
        &self,
        note: &Note,
        stream: Option<&StreamedSnapshot>,
    ) -> Result<StreamedSnapshot, SnapshotError> {
        match stream {
            Some(stream) => Ok(stream.clone()),
            None => StreamedSnapshot::complete(&self.below.snapshots, &note.snapshot),
        }
    }

    /// Checks that the snapshot from which a VM runs still has its name.
    fn check_same(
        &self,
        note: &Note,
        stream: Option<&StreamedSnapshot>,
    ) -> Result<(), SnapshotError> {
        let complete = match stream {
            Some(_) => None,
            None => self.below.snapshots.manifest(&note.snapshot).ok(),
        };
        let now = stream.map(StreamedSnapshot::manifest).or(complete.as_ref());
        let is_other = |sums: &String| now.is_some_and(|now| now.sums.xxh3_128 != *sums);
        if !note.sums.as_ref().is_some_and(is_other) {
            return Ok(());
        }
        Err(SnapshotError::Impossible(format!(
            "the VM runs from another snapshot than the one that is now named '{}'",
            note.snapshot
        )))
    }

    /// Serves the disks of a VM, unless that is done.
    fn serve_again(
        &self,
        vm: &Vm,
        note: &Note,
        stream: Option<&StreamedSnapshot>,
    ) -> Result<(), DaemonError> {
        {
            let vms = self.streams.vms.lock();
            let is_served = |vm: &StreamingVm| matches!(vm.disks, DiskLink::Serves);
            if vms.get(vm.name()).is_none_or(is_served) {
                return Ok(());
            }
        }
        let stream = self.stream_or_complete(note, stream)?;
        let mut vms = self.streams.vms.lock();
        let Some(streaming) = vms.get_mut(vm.name()) else {
            return Ok(());
        };
        let path = disk_socket(self.below.registry.state(), vm.name());
        let listener = match std::mem::replace(&mut streaming.disks, DiskLink::Missing) {
            DiskLink::Listens(listener) => Ok(listener),
            DiskLink::Missing | DiskLink::Serves => listen(&path, vm.user()),
        };
        let served =
            listener.and_then(|listener| serve(vm.name(), listener, &stream, &streaming.is_over));
        served.map_err(|source| SnapshotError::Files { path, source })?;
        streaming.disks = DiskLink::Serves;
        Ok(())
    }

    /// Brings a VM the pages of its memory, unless that is done. Makes a new connection to the
    /// library in QEMU if there is none, or if it has ended too early.
    fn bring_again(
        &self,
        vm: &Vm,
        note: &Note,
        stream: Option<&StreamedSnapshot>,
        pages: &Arc<Mutex<PageLink>>,
    ) -> Result<(), DaemonError> {
        if matches!(*pages.lock(), PageLink::InUse | PageLink::Complete) {
            return Ok(());
        }
        let stream = self.stream_or_complete(note, stream)?;
        let unused = std::mem::take(&mut *pages.lock());
        let (socket, is_new) = match unused {
            PageLink::Unused(socket) => (Ok(socket), false),
            _ => (self.connect_again(vm), true),
        };
        let mut vms = self.streams.vms.lock();
        let Some(streaming) = vms.get_mut(vm.name()) else {
            return Ok(());
        };
        let socket = socket.inspect_err(|error| {
            let (since, is_told) = streaming.cut_off.get_or_insert((Instant::now(), false));
            // A QEMU that is ending does not answer either.
            if !*is_told && since.elapsed() >= CUT_OFF {
                *is_told = true;
                warn_of_cut_off(vm.name(), error);
            }
        });
        let socket = socket.map_err(|error| SnapshotError::Impossible(chain(&error)))?;
        let pieces = restore::pieces(stream.manifest(), &streaming.note.layout(), stream.image());
        PageLink::begin(pages, &stream, pieces, socket)
            .map_err(|_| DaemonError::Internal("no thread to bring a VM its memory"))?;
        streaming.cut_off = None;
        let is_told = streaming.reconnected.is_some_and(|at| at.elapsed() < QUIET);
        if is_new && !is_told {
            streaming.reconnected = Some(Instant::now());
            warn!(
                vm = vm.name(),
                snapshot = note.snapshot,
                "memory of the VM is brought to QEMU over a new connection; the earlier one had failed"
            );
        }
        Ok(())
    }

    /// Gives the library in a VM's QEMU a new socket, and returns the other end.
    fn connect_again(&self, vm: &Vm) -> Result<UnixStream, ConnectError> {
        let machines = self.below.registry.machines();
        let of_vm = |machine: &&Arc<Machine>| machine.name() == vm.name();
        let machine = machines.iter().find(of_vm);
        let Some(machine) = machine.filter(|machine| !machine.has_lost_library()) else {
            return connect(vm);
        };
        // The fold engine has the only connection to the library.
        let (socket, of_library) = UnixStream::pair()?;
        let id = machine.id();
        let order = |answer| Command::Await(id, of_library.into(), answer);
        let done = self.below.folding.ask(order);
        let done = done
            .map_err(|error| error.to_string())
            .and_then(|done| done);
        done.map_err(ConnectError::Engine)?;
        Ok(socket)
    }

    /// Makes a VM, whose snapshot is complete and whose memory is mapped, one like any other.
    fn settle(&self, machine: &Machine, snapshot: &str) -> Result<(), DaemonError> {
        let shelf = &self.below.snapshots;
        let manifest = shelf.manifest(snapshot)?;
        if let Some(spec) = machine.vm().spec() {
            fetched_disks::use_files(&mut machine.monitor(), spec, shelf, &manifest)?;
        }
        machine.arrived();
        info!(
            vm = machine.name(),
            snapshot, "VM has all of its snapshot, which was fetched while it ran"
        );
        Ok(())
    }
}

fn warn_of_cut_off(vm: &str, error: &ConnectError) {
    warn!(
        vm,
        error = chain(error),
        "cannot bring the VM what is missing of its snapshot; retrying until QEMU answers or ends"
    );
}

/// Says how far the fetching of a snapshot is, and whether VMs wait.
fn describe(stream: &StreamedSnapshot) -> String {
    let StreamStatus {
        here_bytes,
        total_bytes,
        waits,
        trouble,
    } = stream.status();
    let mut words = format!(
        "being fetched from {}: {} of {}",
        stream.url(),
        ByteSize(here_bytes),
        ByteSize(total_bytes)
    );
    if let Some(waits) = waits.filter(|waits| *waits >= LOOK) {
        let _ = write!(words, ", a VM waits since {} s", waits.as_secs());
    }
    if let Some(trouble) = trouble {
        let _ = write!(words, "; {trouble}");
    }
    words
}

fn unknown(name: &str) -> DaemonError {
    SnapshotError::Unknown(name.to_owned()).into()
}

/// Returns the input of a pull for a request body.
pub(super) fn request(name: &str, body: PullBody) -> PullRequest {
    PullRequest {
        from: body.from.unwrap_or_else(|| name.to_owned()),
        name: name.to_owned(),
        domain: body.domain,
        trust: body.trust,
        allow_arguments: body.allow_arguments,
    }
}
