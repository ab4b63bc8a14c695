//! The files that memfold keeps for each running VM, in the directory `STATE/vms/NAME/`.
//!
//! ```text
//!   spec.json      description of the VM             process.json   pid, start time, QEMU, machine type
//!   qmp.sock       QMP for people and commands       daemon.sock    QMP for the daemon
//!   library.sock   the library in QEMU               agent.sock     the guest agent's port
//!   console.sock   the serial console
//!   console.log    output of the serial console      qemu.log       QEMU's own output
//!   launch.lock    locked while QEMU is started      overlays.json  overlays, until process.json exists
//!   incoming       exists while it is restored       renewal.json   identities still to be renewed
//!   segments.json  segments that the VM maps now     borrowed.json  lent RAM that its swap disk uses
//!   lentN-M        socket of a relay, for QEMU       relay.log      output of relays
//!   wish.json      an operator's request for lent RAM
//!   settings.json  settings that `vm set` has changed
//!   seed.img       seed disk for cloud-init
//!   macvtap        name of the VM's macvtap, which is removed with the directory
//! ```
//! The VM's copies of files that QEMU writes are beside these directories, in `STATE/files/NAME.N`.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::connection;
use super::process::Identity;
use super::qemu_user::QemuUser;

/// Default state directory, in which all VMs have their files. It is on tmpfs: like the VMs, its
/// contents are gone after a reboot.
pub const DEFAULT_STATE: &str = "/run/memfold";

/// Longest path of a Unix socket, in bytes (`sun_path` without the final zero, unix(7)).
pub const MAX_SOCKET_PATH: usize = 107;

/// Name of the directory in the state directory with the VMs' copies of files that QEMU writes. Its
/// mode is 0711: each file belongs to its QEMU's user, who can open it, but not replace it.
const OWN_FILES: &str = "files";

/// What memfold records about a QEMU right after its start, for later daemons.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// PID and start time of the QEMU process.
    pub process: Identity,
    /// Path of the QEMU program that the VM runs in.
    pub qemu: PathBuf,
    /// Version of the VM's QEMU: major, minor, micro.
    pub version: (u64, u64, u64),
    /// Machine type of the VM with its version, and the machine options on which device states
    /// depend.
    pub machine: String,
    /// Accelerator of the VM: `kvm` or `tcg`.
    pub accel: String,
    /// Path of memfold's library that was preloaded into QEMU; `None`: QEMU runs without the
    /// library.
    pub library: Option<PathBuf>,
    /// Paths of the VM's temporary overlays and of its swap disk, which are removed with the VM.
    pub overlays: Vec<PathBuf>,
    /// User that QEMU has switched to. `None`: QEMU has kept the daemon's user, or an older memfold
    /// started the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<QemuUser>,
}

/// The directory with memfold's files of one running VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmDirectory(PathBuf);

macro_rules! files {
    ($($(#[$doc:meta])* $method:ident = $file:literal;)*) => {
        $($(#[$doc])*
        #[must_use]
        pub fn $method(&self) -> PathBuf {
            self.0.join($file)
        })*
    };
}

impl VmDirectory {
    /// Returns the directory of VM `name` below the state directory, whether it exists or not.
    #[must_use]
    pub fn of(state: &Path, name: &str) -> Self {
        Self(state.join("vms").join(name))
    }

    /// Returns the directories of all VMs below the state directory, sorted by path; empty if there
    /// are none.
    pub fn all(state: &Path) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for entry in missing_is_fine(fs::read_dir(state.join("vms")).map(Some))?
            .into_iter()
            .flatten()
        {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                found.push(Self(entry.path()));
            }
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    /// Returns the path of the VM's directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the VM's name, which is the last part of the directory's path.
    #[must_use]
    pub fn name(&self) -> String {
        let name = self.0.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    files! {
        /// The VM's description ([`VmSpec`](super::VmSpec)).
        spec = "spec.json";
        /// The [`Record`] of the VM's QEMU.
        record = "process.json";
        /// QMP socket for users and commands.
        qmp = "qmp.sock";
        /// QMP socket for the daemon.
        daemon_qmp = "daemon.sock";
        /// Socket that QEMU connects to the guest agent's port.
        agent = "agent.sock";
        /// Socket of memfold's library in QEMU.
        library = "library.sock";
        /// Socket of the serial console.
        console = "console.sock";
        /// Log of the serial console's output.
        console_log = "console.log";
        /// Log of QEMU's own output.
        qemu_log = "qemu.log";
        /// Segments that the VM maps now, in the order of their slots: those of the VM's
        /// description, and those attached later.
        segments = "segments.json";
        /// Paths of temporary overlays, until the [`Record`] contains them.
        overlays = "overlays.json";
        /// Record of the lent RAM that the VM's swap disk uses or is being moved to.
        borrowed = "borrowed.json";
        /// An operator's saved request to move the VM's swap disk to lent RAM.
        wish = "wish.json";
        /// Name of the VM's macvtap interface, which is removed with the VM.
        macvtap = "macvtap";
        /// Settings that were changed while the VM ran.
        settings = "settings.json";
        /// Image of the VM's seed disk.
        seed = "seed.img";
        /// Limits of the VM's size that the operator set, and what right-sizing did to its balloon.
        rightsize = "rightsize.json";
        /// Log of the relays between the swap disk and lenders.
        relay_log = "relay.log";
        /// Marker that exists until the guest was told to enable its swap disk after the boot.
        swap_pending = "swap-pending";
        /// Marker that exists until the guest was told to mount its segments after the boot.
        segments_pending = "segments-pending";
        /// Marker that exists until the VM's boot snapshot was saved, or could not be saved.
        boot_snapshot_pending = "boot-snapshot-pending";
        /// Marker that exists once the log has said that the boot snapshot was not saved.
        boot_snapshot_told = "boot-snapshot-told";
        /// Marker that exists until the restore of the VM is complete.
        incoming = "incoming";
        /// Name of the snapshot that is still being fetched, from which the VM runs.
        arriving = "arriving.json";
        /// Socket of the NBD server for disks that are still being fetched.
        arriving_disks = "arriving.sock";
        /// Lock file, locked while the VM is started or removed.
        lock_file = "launch.lock";
    }

    /// Returns the path of the socket on which a relay of the VM's swap disk listens. `generation`:
    /// number in the names of the disk's block nodes; `part`: number of the disk's copy on lent
    /// RAM.
    #[must_use]
    pub fn relay(&self, generation: u64, part: usize) -> PathBuf {
        self.0.join(format!("lent{generation}-{part}"))
    }

    /// Returns the path of the VM's copy of file `number`. These are files other than disks that
    /// QEMU writes and that the VM's additional QEMU arguments name. They are outside the VM's
    /// directory, because QEMU opens them again after it has switched to its user.
    #[must_use]
    pub fn own_file(&self, number: usize) -> PathBuf {
        let state = self.0.parent().and_then(Path::parent).unwrap_or(&self.0);
        let file = format!("{}.{number}", self.name());
        state.join(OWN_FILES).join(file)
    }

    /// Creates the VM's directory, accessible only to its owner. Fails with `AlreadyExists` if the
    /// directory exists.
    pub fn create(&self) -> io::Result<()> {
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        if let Some(parent) = self.0.parent() {
            builder.recursive(true).create(parent)?;
        }
        builder.recursive(false).create(&self.0)
    }

    /// Locks the VM's directory (`launch.lock`) until the caller drops the returned file; `None` if
    /// another process holds the lock.
    pub fn lock(&self) -> io::Result<Option<File>> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(self.lock_file())?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Writes `content` as JSON to a file of the VM's directory, and replaces an older file
    /// atomically. The bytes are synced before, so that a power failure leaves no empty file if the
    /// state directory is on a disk.
    pub fn write_json<T: Serialize>(&self, path: &Path, content: &T) -> io::Result<()> {
        let part = path.with_extension("part");
        let mut file = File::create(&part)?;
        file.write_all(&serde_json::to_vec_pretty(content)?)?;
        file.sync_all()?;
        fs::rename(part, path)
    }

    /// Reads a JSON file of the VM's directory.
    pub fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> io::Result<T> {
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }

    /// Removes the VM's directory, the files in `overlays`, and the VM's own files and macvtap.
    /// Missing files are no error.
    pub fn remove(&self, overlays: &[PathBuf]) -> io::Result<()> {
        for overlay in overlays {
            missing_is_fine(fs::remove_file(overlay))?;
        }
        connection::remove(&self.macvtap())?;
        for number in 0.. {
            let own = self.own_file(number);
            if own.symlink_metadata().is_err() {
                break;
            }
            fs::remove_file(own)?;
        }
        // Another process that checks whether the VM has ended may create the lock file again,
        // after the directory was emptied and before it is removed.
        let mut removed = fs::remove_dir_all(&self.0);
        for _ in 0..20 {
            if !matches!(&removed, Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
            removed = fs::remove_dir_all(&self.0);
        }
        missing_is_fine(removed)
    }
}

/// Turns the error `NotFound` of a file operation into success with the default value.
pub fn missing_is_fine<T: Default>(result: io::Result<T>) -> io::Result<T> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(T::default()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_directory_of_a_vm_can_be_created_only_once_and_locked_by_one_process() {
        let state = tempfile::tempdir().unwrap();
        assert!(VmDirectory::all(state.path()).unwrap().is_empty());
        let directory = VmDirectory::of(state.path(), "a");
        directory.create().unwrap();
        assert_eq!(
            directory.create().unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
        let all = VmDirectory::all(state.path()).unwrap();
        assert_eq!(all, std::slice::from_ref(&directory));
        let lock = directory.lock().unwrap();
        assert!(lock.is_some());
        assert!(directory.lock().unwrap().is_none());
        drop(lock);
        assert!(directory.lock().unwrap().is_some());
        directory.remove(&["/nowhere/overlay".into()]).unwrap();
        directory.remove(&[]).unwrap();
        assert!(!directory.path().exists());
    }
}
