//! Starts child processes that outlive their parent (`setsid(2)`), or must not. VMs outlive the
//! daemon, and programs that write files for it do not.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

use crate::result::check;

/// Makes the child that `command` will start the leader of a session of its own (`setsid(2)`), so
/// that neither a terminal's hang-up nor Ctrl-C reaches the child.
pub fn detach(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec only setsid(2) is called, which is async-signal-safe and takes
    // no lock.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(())
        })
    }
}

/// Makes the kernel kill the child that `command` will start when the thread that starts it ends
/// (`PR_SET_PDEATHSIG`, `prctl(2)`), so also when this process is killed. That thread must wait for
/// the child's end.
pub fn end_with_thread(command: &mut Command) -> &mut Command {
    let parent = getpid();
    // SAFETY: between fork and exec only prctl(2) and getppid(2) are called, which are
    // async-signal-safe and take no lock.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have ended just before.
            if getppid() != Some(parent) {
                return Err(Errno::SRCH.into());
            }
            Ok(())
        })
    }
}

/// Makes the child that `command` will start the leader of a session of its own (`setsid(2)`),
/// whose terminal is the child's standard input (`TIOCSCTTY`, `ioctl_tty(2)`).
pub fn lead_terminal(command: &mut Command) -> &mut Command {
    detach(command);
    // SAFETY: between fork and exec only ioctl(2) is called, with a number as its argument. It is
    // async-signal-safe and takes no lock.
    unsafe {
        command.pre_exec(|| {
            let result = libc::ioctl(libc::STDIN_FILENO, libc::TIOCSCTTY, 0);
            Ok(check(result)?)
        })
    }
}

/// Passes `descriptor` to the child that `command` will start, under the same number. No other
/// child that this process starts meanwhile gets the descriptor. Returns the number.
pub fn pass(command: &mut Command, descriptor: OwnedFd) -> RawFd {
    let number = descriptor.as_raw_fd();
    // SAFETY: between fork and exec only fcntl(2) is called, which is async-signal-safe and takes
    // no lock.
    unsafe {
        command.pre_exec(move || {
            // The flag FD_CLOEXEC is cleared in the child only.
            rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::empty())?;
            Ok(())
        });
    }
    number
}

/// Lets the child that `command` will start lock any amount of memory (`RLIMIT_MEMLOCK`,
/// `setrlimit(2)`). Needs `CAP_SYS_RESOURCE`.
pub fn lift_lock_limit(command: &mut Command) -> &mut Command {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    // SAFETY: between fork and exec only prlimit(2) is called, which is async-signal-safe and takes
    // no lock.
    unsafe {
        command.pre_exec(move || {
            setrlimit(Resource::Memlock, unlimited)?;
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_passed_descriptor_is_inherited_only_by_the_given_child_process() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut command = Command::new("sh");
        let number = pass(&mut command, theirs.into());
        let there = format!("[ -S /proc/self/fd/{number} ]");
        assert!(command.args(["-c", &there]).status().unwrap().success());
        let mut other = Command::new("sh");
        assert!(!other.args(["-c", &there]).status().unwrap().success());
        // Dropping the command closes this process's own copy.
        drop(command);
        assert_eq!(std::io::Read::read(&mut &ours, &mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_child_is_killed_when_the_thread_that_started_it_ends() {
        let start = || end_with_thread(Command::new("sleep").arg("60")).spawn();
        let mut child = std::thread::spawn(start).join().unwrap().unwrap();
        let status = child.wait().unwrap();
        let killed = std::os::unix::process::ExitStatusExt::signal(&status);
        assert_eq!(killed, Some(Signal::KILL.as_raw()));
    }

    #[test]
    fn a_detached_child_leads_its_own_session() {
        let mut child = detach(Command::new("sleep").arg("10")).spawn().unwrap();
        let pid = i32::try_from(child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        let session = rustix::process::getsid(pid).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(Some(session), pid);
    }
}
