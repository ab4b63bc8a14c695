//! Starts, watches and ends the child processes that lending needs: relays (between QEMU and a
//! lender), exports (servers of lent RAM), and helpers for iSCSI.

use std::io::{self, Read as _};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdout, Command};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;

/// Maximum length in bytes of the line with which a child reports that it is ready.
const MAX_LINE: usize = 4096;

/// Returns a command for a child process, without the daemon's own variables (`sd_notify(3)`).
pub(crate) fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command
        .current_dir("/")
        .env_remove("NOTIFY_SOCKET")
        .env_remove("WATCHDOG_USEC")
        .env_remove("WATCHDOG_PID");
    command
}

/// A child process that is killed on drop.
#[derive(Debug)]
pub(crate) struct Owned(pub(crate) Child);

impl Drop for Owned {
    fn drop(&mut self) {
        // The call fails only for a child that has ended. SIGKILL also ends a stopped process.
        let _ = self.0.kill();
        // The child's memory may be in use until the child is reaped.
        let _ = self.0.wait();
    }
}

/// Waits for a child's end in a thread of its own, so that the child does not stay a zombie, and
/// then calls `after`.
pub(crate) fn reap(mut child: Child, after: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("reap".into());
    let reaped = thread.spawn(move || {
        let _ = child.wait();
        after();
    });
    reaped.map(drop)
}

/// Waits until a descriptor is readable. Returns false at the time limit.
pub(crate) fn is_readable(descriptor: impl AsFd, limit: Duration) -> io::Result<bool> {
    let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
    let mut fds = [PollFd::new(&descriptor, PollFlags::IN)];
    Ok(retry_on_intr(|| poll(&mut fds, Some(&limit)))? > 0)
}

/// Reads the first line of a child's output. The line is not complete if the child has ended.
///
/// # Errors
/// `TimedOut` at the time limit.
pub(crate) fn first_line(output: &mut ChildStdout, limit: Duration) -> io::Result<Vec<u8>> {
    let end = Instant::now() + limit;
    let mut said = Vec::new();
    while !said.ends_with(b"\n") && said.len() < MAX_LINE {
        if !is_readable(&*output, end.saturating_duration_since(Instant::now()))? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut some = [0; 512];
        match output.read(&mut some)? {
            0 => break,
            count => said.extend_from_slice(&some[..count]),
        }
    }
    Ok(said)
}
