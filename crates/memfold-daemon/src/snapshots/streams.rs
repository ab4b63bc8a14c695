//! What the daemon knows of VMs that run from a snapshot while it is being fetched, and its ends of
//! their connections.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use memfold_snapshot::restore::{PageSource, Piece};
use memfold_transfer::nbd::{self, Exports};
use memfold_transfer::{FetchedSnapshot, PullRequest, StreamedSnapshot};
use memfold_vm::{LibraryError, QemuUser, RamBlock, RamLayout, Vm, qemu_user};
use memfold_wire::library::Order;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::threads;

/// Snapshots that are being fetched while VMs run from them, and these VMs.
#[derive(Debug, Default)]
pub(super) struct Streams {
    pub(super) snapshots: Mutex<BTreeMap<String, StreamedSnapshot>>,
    pub(super) vms: Mutex<BTreeMap<String, StreamingVm>>,
    /// VMs that are being started, and their snapshots. Locked before the others.
    pub(super) starting: Arc<Mutex<BTreeMap<String, String>>>,
}

/// A VM whose memory or disks may still be missing.
#[derive(Debug)]
pub(super) struct StreamingVm {
    pub(super) note: Note,
    pub(super) pages: Arc<Mutex<PageLink>>,
    pub(super) disks: DiskLink,
    /// Whether the VM needs no NBD server any more.
    pub(super) is_over: Arc<AtomicBool>,
    /// Since when the library in QEMU cannot be connected to, and whether the log tells so.
    pub(super) cut_off: Option<(Instant, bool)>,
    /// When the log last told that the library in QEMU was connected to again.
    pub(super) reconnected: Option<Instant>,
    /// Whether the log tells why the VM cannot be made an ordinary one.
    pub(super) is_told: bool,
}

/// The connection to the library in QEMU, over which the pages of a VM's memory are brought.
#[derive(Debug, Default)]
pub(super) enum PageLink {
    /// There is none: it could not be made, or has ended too early. It is made again.
    #[default]
    Missing,
    /// No stream uses it yet.
    Unused(UnixStream),
    /// A stream brings pages.
    InUse,
    /// The library has mapped all pages.
    Complete,
}

impl PageLink {
    /// Begins to bring a VM's pages, and notes in `link` when that ends.
    pub(super) fn begin(
        link: &Arc<Mutex<Self>>,
        stream: &StreamedSnapshot,
        pieces: Vec<Piece>,
        socket: UnixStream,
    ) -> io::Result<()> {
        *link.lock() = Self::InUse;
        let of_end = Arc::clone(link);
        let ended = move |is_complete| {
            *of_end.lock() = if is_complete {
                Self::Complete
            } else {
                Self::Missing
            };
        };
        let begun = stream.bring(pieces, socket, ended);
        begun.inspect_err(|_| *link.lock() = Self::Missing)
    }
}

/// The NBD server for the disks of a VM.
#[derive(Debug)]
pub(super) enum DiskLink {
    Missing,
    /// QEMU can connect, and waits for an answer.
    Listens(UnixListener),
    Serves,
}

/// What the next daemon has to know of such a VM: `arriving.json` in the VM's directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Note {
    pub(super) snapshot: String,
    /// Checksum of the snapshot's memory, so that no other snapshot is taken for it; `None` if an
    /// earlier version of memfold has written this.
    #[serde(default)]
    pub(super) sums: Option<String>,
    /// RAM blocks whose pages arrive: name, host virtual address in QEMU, number of pages.
    pub(super) blocks: Vec<(String, u64, u64)>,
}

impl Note {
    pub(super) fn layout(&self) -> RamLayout {
        let blocks = self.blocks.iter().map(|(name, hva, pages)| RamBlock {
            name: name.clone(),
            hva: memfold_units::Hva(*hva),
            pages: *pages,
        });
        RamLayout {
            blocks: blocks.collect(),
            ..RamLayout::default()
        }
    }
}

/// The request that is repeated by the next daemon: `SHELF/.NAME.stream`.
#[derive(Serialize, Deserialize)]
pub(super) struct SavedRequest {
    pub(super) url: String,
    pub(super) request: PullRequest,
    /// The snapshot that was begun: the next daemon fetches no other.
    #[serde(flatten)]
    pub(super) snapshot: FetchedSnapshot,
}

/// A VM that is being started, as the source of its pages.
pub(super) struct NewVm<'a> {
    pub stream: &'a StreamedSnapshot,
    pub link: Arc<Mutex<PageLink>>,
}

impl PageSource for NewVm<'_> {
    fn wait(&self, file: usize, bytes: Range<u64>) -> io::Result<()> {
        self.stream.wait(file, bytes)
    }

    fn begin(&self, pieces: Vec<Piece>, socket: UnixStream) -> io::Result<()> {
        PageLink::begin(&self.link, self.stream, pieces, socket)
    }
}

/// The NBD server of a VM that is being started. As long as this value exists, the snapshot's
/// fetching cannot be ended.
pub(super) struct DiskServer {
    pub(super) is_over: Arc<AtomicBool>,
    pub(super) is_kept: bool,
    pub(super) vm: String,
    pub(super) starting: Arc<Mutex<BTreeMap<String, String>>>,
}

impl DiskServer {
    /// Keeps the server running until the VM needs it no more.
    pub(super) fn keep(&mut self) -> Arc<AtomicBool> {
        self.is_kept = true;
        Arc::clone(&self.is_over)
    }
}

impl Drop for DiskServer {
    fn drop(&mut self) {
        self.starting.lock().remove(&self.vm);
        if !self.is_kept {
            self.is_over.store(true, Ordering::Relaxed);
        }
    }
}

/// Returns the path of the NBD server's socket for a VM's disks. It is outside the VM's directory,
/// which QEMU's start makes.
pub(super) fn disk_socket(state: &Path, vm: &str) -> PathBuf {
    state.join("arriving").join(format!("{vm}.sock"))
}

/// Listens at `path` for the QEMU of a VM. `user`: user that QEMU has switched to.
pub(super) fn listen(path: &Path, user: Option<QemuUser>) -> io::Result<UnixListener> {
    if let Some(place) = path.parent() {
        fs::create_dir_all(place)?;
        // A QEMU that runs as a user has to reach its own socket when it connects again.
        fs::set_permissions(place, fs::Permissions::from_mode(0o711))?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    qemu_user::give(path, user)?;
    Ok(listener)
}

/// Serves the files of a snapshot to a VM by NBD on a thread, until `is_over` is true.
pub(super) fn serve(
    vm: &str,
    listener: UnixListener,
    stream: &StreamedSnapshot,
    is_over: &Arc<AtomicBool>,
) -> io::Result<()> {
    let exports: Arc<dyn Exports> = Arc::new(stream.clone());
    let (is_over, vm) = (Arc::clone(is_over), vm.to_owned());
    threads::begin("disks", move || {
        let served = nbd::serve(&vm, &listener, &exports, || {
            !is_over.load(Ordering::Relaxed)
        });
        if let Err(error) = served {
            warn!(%error, "cannot serve disks that are being fetched; restart the daemon");
        }
    })
}

/// Why a VM that runs from a stream cannot be connected to.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("QEMU runs without memfold's library")]
    NoLibrary,
    #[error(transparent)]
    Library(#[from] LibraryError),
    #[error("memfold's library in QEMU refused the order: {0}")]
    Engine(String),
    #[error("cannot make a socket")]
    Socket(#[from] io::Error),
}

/// Gives the library in a VM's QEMU a new socket, and returns the other end. The library serves one
/// connection at a time, so the fold engine must have none.
pub(super) fn connect(vm: &Vm) -> Result<UnixStream, ConnectError> {
    let mut link = vm.library_link().ok_or(ConnectError::NoLibrary)??;
    let (socket, of_library) = UnixStream::pair()?;
    let order = Order::Await { ranges: Vec::new() };
    link.order(&order, Some(of_library.as_fd()))?;
    Ok(socket)
}
