//! Finds the QEMU processes that libvirt runs, and in each of them the QMP socket that memfold's
//! daemon uses.

use std::io;
use std::path::{Path, PathBuf};

use rustix::process::Pid;

use memfold_vm::{Identity, endpoints};

/// Directory in which libvirt records the process ID of each domain's QEMU, as `NAME.pid`.
pub const DEFAULT_RUN: &str = "/run/libvirt/qemu";

/// File name of the QMP socket that the wrapper makes QEMU create, beside the library's socket.
const QMP: &str = "memfold-qmp.sock";

/// The QEMU process of a running libvirt domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// Name of the libvirt domain that runs in the process.
    pub domain: String,
    /// The domain's QEMU process.
    pub process: Identity,
}

impl Running {
    /// Returns the processes with a `.pid` file in `run`, libvirt's directory; none if the
    /// directory does not exist. libvirt's own process (`driver.pid`) is one of them and has none
    /// of memfold's sockets.
    pub fn all(run: &Path) -> io::Result<Vec<Self>> {
        let entries = match std::fs::read_dir(run) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut found = Vec::new();
        for entry in entries {
            // A domain may end meanwhile.
            found.extend(Self::of(&entry?.path()));
        }
        Ok(found)
    }

    fn of(file: &Path) -> Option<Self> {
        file.extension().filter(|kind| *kind == "pid")?;
        let pid = std::fs::read_to_string(file).ok()?.trim().parse().ok()?;
        Some(Self {
            domain: file.file_stem()?.to_str()?.to_owned(),
            process: Identity::of(Pid::from_raw(pid)?).ok()?,
        })
    }

    /// Returns the path of the QMP socket that QEMU opened for memfold's daemon; `None` if QEMU was
    /// not started by memfold's wrapper script.
    #[must_use]
    pub fn qmp(&self) -> Option<PathBuf> {
        let library = endpoints::library(Pid::from_raw(self.process.pid)?).ok()?;
        Some(library.socket?.with_file_name(QMP))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn running_libvirt_domains_are_found_by_their_pid_files_and_processes() {
        let run = tempfile::tempdir().unwrap();
        let mut child = Command::new("sleep")
            .arg("60")
            .env(
                memfold_wire::library::SOCKET_VARIABLE,
                "/lib/domain-1-a/memfold-library.sock",
            )
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        for (file, text) in [
            ("Web 1.pid", child.id().to_string()),
            ("own.pid", std::process::id().to_string() + "\n"),
            ("gone.pid", "999999999".into()),
            ("broken.pid", "x".into()),
            ("Web 1.xml", child.id().to_string()),
        ] {
            std::fs::write(run.path().join(file), text).unwrap();
        }
        // After the start of a child, its parent may continue before the kernel has set up the
        // child's environment (fs/binfmt_elf.c).
        let environment = format!("/proc/{}/environ", child.id());
        while std::fs::read(&environment).unwrap().is_empty() {
            std::thread::yield_now();
        }
        let mut found = Running::all(run.path()).unwrap();
        found.sort_by(|a, b| a.domain.cmp(&b.domain));
        let names: Vec<_> = found.iter().map(|r| r.domain.as_str()).collect();
        assert_eq!(names, ["Web 1", "own"]);
        assert_eq!(
            found[0].qmp(),
            Some("/lib/domain-1-a/memfold-qmp.sock".into())
        );
        assert_eq!(found[1].qmp(), None);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(Running::all(&run.path().join("none")).unwrap(), []);
    }
}
