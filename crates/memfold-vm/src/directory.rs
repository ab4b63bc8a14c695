//! A VM's files: `STATE/vms/NAME/`.
//!
//! ```text
//!   spec.json      what was asked for                process.json   pid, start time, what was started
//!   qmp.sock       QMP for people and commands       daemon.sock    QMP for the daemon
//!   library.sock   the library in QEMU               agent.sock     the guest agent's port
//!   console.sock   the serial console
//!   console.log    output of the serial console      qemu.log       QEMU's own output
//!   launch.lock    locked while QEMU is started      overlays.json  overlays, until process.json is there
//!   incoming       exists while it is restored       renewal.json   identities still to be renewed
//!   segments.json  segments that the VM maps now     borrowed.json  lent RAM under its swap disk
//!   lentN-M        socket of a relay, for QEMU       relay.log      output of relays
//!   wish.json      lent RAM that an operator asked for
//! ```

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::process::Identity;

/// Where VMs' state lies if nothing else is said. On tmpfs: gone after a reboot, as the VMs are.
pub const DEFAULT_STATE: &str = "/run/memfold";

/// Longest path of a Unix socket in bytes (`sun_path` less the final zero, unix(7)).
pub const MAX_SOCKET_PATH: usize = 107;

/// What was started. Written right after the start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// QEMU's process.
    pub process: Identity,
    /// The QEMU program.
    pub qemu: PathBuf,
    /// Its version.
    pub version: (u64, u64, u64),
    /// Versioned machine type, and options that device states depend on.
    pub machine: String,
    /// `kvm` or `tcg`.
    pub accel: String,
    /// memfold's library, if it was preloaded.
    pub library: Option<PathBuf>,
    /// Temporary disk overlays, removed with the VM.
    pub overlays: Vec<PathBuf>,
}

/// The directory of one VM.
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
    /// Where VM `name` has its files.
    #[must_use]
    pub fn of(state: &Path, name: &str) -> Self {
        Self(state.join("vms").join(name))
    }

    /// All VMs' directories, sorted; none if there is no state yet.
    pub fn all(state: &Path) -> io::Result<Vec<Self>> {
        let entries = match fs::read_dir(state.join("vms")) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                found.push(Self(entry.path()));
            }
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    /// The directory itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The VM's name.
    #[must_use]
    pub fn name(&self) -> String {
        let name = self.0.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    files! {
        /// The description.
        spec = "spec.json";
        /// The [`Record`].
        record = "process.json";
        /// QMP for people and commands.
        qmp = "qmp.sock";
        /// QMP for the daemon.
        daemon_qmp = "daemon.sock";
        /// The guest agent's port.
        agent = "agent.sock";
        /// The library's socket.
        library = "library.sock";
        /// The serial console.
        console = "console.sock";
        /// All that the serial console said.
        console_log = "console.log";
        /// QEMU's output.
        qemu_log = "qemu.log";
        /// Segments that it maps, in the order of their slots: those of the description and those
        /// that were attached since.
        segments = "segments.json";
        /// Temporary overlays, until the [`Record`] names them.
        overlays = "overlays.json";
        /// Lent RAM under its swap disk, or to be.
        borrowed = "borrowed.json";
        /// What an operator has asked to borrow for it.
        wish = "wish.json";
        /// What relays between its swap disk and lenders had to say.
        relay_log = "relay.log";
        /// There as long as the VM waits for what it is restored from.
        incoming = "incoming";
        /// Locked while the VM is being started or removed.
        lock_file = "launch.lock";
    }

    /// Where the relay of a lent part of its swap disk listens.
    #[must_use]
    pub fn relay(&self, generation: u64, part: usize) -> PathBuf {
        self.0.join(format!("lent{generation}-{part}"))
    }

    /// Its own copy of a file that its arguments name, and that it writes.
    #[must_use]
    pub fn own_file(&self, number: usize) -> PathBuf {
        self.0.join(format!("file{number}"))
    }

    /// Makes the directory, readable for its owner only; `AlreadyExists` if there is one.
    pub fn create(&self) -> io::Result<()> {
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        if let Some(parent) = self.0.parent() {
            builder.recursive(true).create(parent)?;
        }
        builder.recursive(false).create(&self.0)
    }

    /// Takes the lock, held until the file is dropped; `None` if another process has it.
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

    /// Writes one of the JSON files, whole or not at all.
    pub fn write_json<T: Serialize>(&self, path: &Path, content: &T) -> io::Result<()> {
        let part = path.with_extension("part");
        fs::write(&part, serde_json::to_vec_pretty(content)?)?;
        fs::rename(part, path)
    }

    /// Reads one of the JSON files.
    pub fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> io::Result<T> {
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }

    /// Removes the directory and these overlays; what is gone already is no error.
    pub fn remove(&self, overlays: &[PathBuf]) -> io::Result<()> {
        for overlay in overlays {
            missing_is_fine(fs::remove_file(overlay))?;
        }
        // Who else looks whether the VM is gone makes the lock's file anew, between our last file
        // and the directory.
        for _ in 0..20 {
            match fs::remove_dir_all(&self.0) {
                Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                other => return missing_is_fine(other),
            }
        }
        missing_is_fine(fs::remove_dir_all(&self.0))
    }
}

fn missing_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_made_once_and_locked_once() {
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
