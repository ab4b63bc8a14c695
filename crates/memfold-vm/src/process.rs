//! Identifies QEMU processes by process ID *and* start time. The kernel uses process IDs again, so
//! a process ID alone could lead to another process than the VM's.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// Returns the boot ID of the host (`/proc/sys/kernel/random/boot_id`, `proc_sys_kernel(5)`); empty
/// if it cannot be read.
#[must_use]
pub fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// Returns whether `SIGSTOP` or a debugger has stopped process `pid` (`proc_pid_stat(5)`).
#[must_use]
pub fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    state.is_some_and(|state| state.starts_with(['T', 't']))
}

/// Returns the process at the other end of a Unix socket (`SO_PEERCRED`: the process that created
/// the listening socket).
pub(super) fn peer_pid(socket: &UnixStream) -> Option<Pid> {
    Some(rustix::net::sockopt::socket_peercred(socket).ok()?.pid)
}

/// Process ID and start time of a process, which no other process of this boot shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// ID of the process.
    pub pid: i32,
    /// Start time of the process in clock ticks since boot (field 22 of `/proc/PID/stat`,
    /// `proc_pid_stat(5)`).
    pub start_ticks: u64,
}

impl Identity {
    /// Reads the start time of the process that has the ID `pid` now.
    pub fn of(pid: Pid) -> io::Result<Self> {
        let pid = pid.as_raw_nonzero().get();
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let start_ticks = start_ticks(&stat)
            .ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat has no start time")))?;
        Ok(Self { pid, start_ticks })
    }
}

/// Parses the start time from `/proc/PID/stat`. Fields are counted from the end of the command's
/// name, which is in parentheses and may contain any character; field 3 follows it.
#[must_use]
pub fn start_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(22 - 3)?.parse().ok()
}

/// A handle to one process (pidfd). The handle never refers to another process, even if the kernel
/// reuses the process ID.
#[derive(Debug)]
pub struct Process {
    identity: Identity,
    pid: Pid,
    handle: OwnedFd,
}

impl Process {
    /// Opens the process with this ID and start time. Fails with `NotFound` if the process has
    /// ended, even if another process has its ID now. Any other error says nothing about that.
    pub fn open(identity: Identity) -> io::Result<Self> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let pid = Pid::from_raw(identity.pid).ok_or_else(gone)?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| match e {
            Errno::SRCH => gone(),
            e => e.into(),
        })?;
        let process = Self {
            identity,
            pid,
            handle,
        };
        // The identity is read after pidfd_open: if it is the wanted one and the handle's process
        // has not ended, the handle is the right one.
        match Identity::of(pid) {
            Ok(now) if now == identity && !process.has_exited()? => Ok(process),
            Ok(_) => Err(gone()),
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => Err(gone()),
            Err(error) => Err(error),
        }
    }

    /// Returns ID and start time of the process.
    #[must_use]
    pub const fn identity(&self) -> Identity {
        self.identity
    }

    /// Returns the process ID, which is valid as long as [`has_exited`](Self::has_exited) returns
    /// false.
    #[must_use]
    pub const fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns a descriptor that becomes readable when the process ends (`pidfd_open(2)`).
    #[must_use]
    pub const fn pidfd(&self) -> &OwnedFd {
        &self.handle
    }

    /// Returns whether the process has ended.
    pub fn has_exited(&self) -> io::Result<bool> {
        self.wait_exit(Duration::ZERO)
    }

    /// Waits until the process has ended. Returns whether it ended within `timeout`.
    pub fn wait_exit(&self, timeout: Duration) -> io::Result<bool> {
        memfold_sys::descriptor::wait_readable(&self.handle, timeout)
    }

    /// Sends SIGKILL to the process and does not wait. No error if the process has already ended.
    pub fn kill(&self) -> io::Result<()> {
        self.signal(Signal::KILL)
    }

    /// Resumes the process after SIGSTOP (sends SIGCONT). No error if the process has already
    /// ended, or if a debugger keeps it stopped.
    pub fn resume(&self) -> io::Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.handle, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use std::os::fd::AsRawFd as _;
    use std::process::Command;

    #[test]
    fn the_start_time_is_parsed_from_proc_stat_despite_parentheses_in_the_command_name() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 8 9";
        assert_eq!(start_ticks(stat), Some(4711));
        assert_eq!(start_ticks("7 (a"), None);
    }

    #[test]
    fn a_process_that_cannot_be_looked_at_does_not_count_as_ended() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let identity = Identity::of(Pid::from_child(&child)).unwrap();
        let next = fs::File::open("/dev/null").unwrap().as_raw_fd();
        let limit = getrlimit(Resource::Nofile);
        let few = Rlimit {
            current: Some(u64::try_from(next).unwrap() + 1),
            ..limit
        };
        // The descriptor of the process is the last one that may be open.
        setrlimit(Resource::Nofile, few).unwrap();
        let opened = Process::open(identity);
        setrlimit(Resource::Nofile, limit).unwrap();
        let error = opened.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::MFILE.raw_os_error()));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_with_a_reused_pid_is_not_opened() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let identity = Identity::of(pid).unwrap();
        let other = Identity {
            start_ticks: identity.start_ticks + 1,
            ..identity
        };
        assert_eq!(
            Process::open(other).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        let process = Process::open(identity).unwrap();
        assert!(!process.wait_exit(Duration::from_millis(20)).unwrap());
        process.kill().unwrap();
        assert!(process.wait_exit(Duration::from_secs(60)).unwrap());
        child.wait().unwrap();
        process.kill().unwrap();
        assert!(Process::open(identity).is_err());
    }
}
