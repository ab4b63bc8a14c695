//! Runs helper programs of the daemon (qemu-img, virsh, ...) with a time limit, and those that must
//! not be killed (lvm) without.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use memfold_sys::descriptor::wait_readable;
use memfold_sys::session::end_with_thread;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// Largest output of a program on each of its two streams, in bytes. Some programs print what is in
/// files of guests.
const MOST_OUTPUT: usize = 256 << 20;

/// Longest time between two checks of [`output_while`].
const CHECK: Duration = Duration::from_secs(1);

/// Runs a program and collects its output. At the time limit, or if it prints more than
/// [`MOST_OUTPUT`], the program and all processes in its group are killed; the error is `TimedOut`
/// or `FileTooLarge`. If the caller is killed, the program is killed, too: otherwise it would go on
/// writing to files that the next daemon removes or uses. Unless `command` sets standard input, the
/// program uses the caller's.
pub fn output(command: &mut Command, limit: Duration) -> io::Result<Output> {
    output_if(command, limit, || Ok(()))
}

/// Does the same as [`output`], and kills the program if `check` fails, which is called about once
/// a second.
pub fn output_if(
    command: &mut Command,
    limit: Duration,
    check: impl FnMut() -> io::Result<()>,
) -> io::Result<Output> {
    let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = end_with_thread(piped.process_group(0)).spawn()?;
    output_while(child, limit, check)
}

/// Runs a program that must never be killed, and returns its output after it has ended, however
/// long that takes. The program gets a process group of its own, so that a signal to the caller's
/// group does not end it. It continues if the caller ends.
pub fn output_unlimited(command: &mut Command) -> io::Result<Output> {
    // The program writes to memory. A pipe without a reader would kill the program (SIGPIPE).
    let [mut stdout, mut stderr] = [memory()?, memory()?];
    let status = command
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        .process_group(0)
        .status();
    // Otherwise `command` would keep the descriptors.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    Ok(Output {
        status: status?,
        stdout: written(&mut stdout)?,
        stderr: written(&mut stderr)?,
    })
}

fn memory() -> io::Result<File> {
    Ok(memfd_create("memfold-helper", MemfdFlags::CLOEXEC)?.into())
}

fn written(file: &mut File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Collects the output of the running program `child`, like [`output`]. The program must lead its
/// process group. Output is collected only if it goes to pipes.
pub fn output_of(child: Child, limit: Duration) -> io::Result<Output> {
    output_while(child, limit, || Ok(()))
}

/// Does the same as [`output_of`], and kills the program if `check` fails, which is called about
/// once a second.
pub fn output_while(
    mut child: Child,
    limit: Duration,
    check: impl FnMut() -> io::Result<()>,
) -> io::Result<Output> {
    let collected = collect(&mut child, Instant::now() + limit, check);
    if let Ok(Some((stdout, stderr))) = collected {
        return Ok(Output {
            status: child.wait()?,
            stdout,
            stderr,
        });
    }
    // This fails if all processes of the group have ended.
    let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    // A process that waits for a disk ends only when the disk answers.
    let reaped = std::thread::Builder::new()
        .name("reap-helper".into())
        .spawn(move || child.wait());
    if let Err(error) = reaped {
        tracing::warn!(%error, "cannot start the thread that waits for a helper program's end; no action is needed");
    }
    collected?;
    Err(io::Error::new(
        io::ErrorKind::TimedOut,
        format!(
            "the program did not end within {} s and was killed",
            limit.as_secs_f64()
        ),
    ))
}

/// Collects a child's output until the child ends; returns `None` if it did not end in time.
fn collect(
    child: &mut Child,
    deadline: Instant,
    mut check: impl FnMut() -> io::Result<()>,
) -> io::Result<Option<(Vec<u8>, Vec<u8>)>> {
    let end = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let mut checked = Instant::now();
    loop {
        if checked.elapsed() >= CHECK {
            check()?;
            checked = Instant::now();
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        let pipes = [out.as_ref().map(AsFd::as_fd), err.as_ref().map(AsFd::as_fd)];
        let ended = wait(end.as_fd(), left.min(CHECK), &pipes)?;
        // The child's own children may keep the pipes open, so after the child's end only the
        // present contents of the pipes are read.
        let more = read(&mut out, &mut stdout)? | read(&mut err, &mut stderr)?;
        if ended && !more {
            return Ok(Some((stdout, stderr)));
        }
        if stdout.len().max(stderr.len()) > MOST_OUTPUT {
            let why = format!("the program printed more than {MOST_OUTPUT} bytes and was killed");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
        }
    }
}

/// Waits until the process ends or a pipe has data. Returns whether the process has ended.
fn wait(end: BorrowedFd<'_>, left: Duration, pipes: &[Option<BorrowedFd<'_>>]) -> io::Result<bool> {
    let left = Timespec::try_from(left).map_err(io::Error::other)?;
    let all = [end].into_iter().chain(pipes.iter().flatten().copied());
    let mut fds: Vec<_> = all
        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
        .collect();
    match poll(&mut fds, Some(&left)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {
            Ok(fds.first().is_some_and(|end| !end.revents().is_empty()))
        }
        Err(error) => Err(error.into()),
    }
}

/// Reads the available data of a pipe. Returns whether there was some. A pipe at its end is
/// dropped.
fn read<R: Read + AsFd>(pipe: &mut Option<R>, into: &mut Vec<u8>) -> io::Result<bool> {
    let has_data = |open: &&mut R| wait_readable(&**open, Duration::ZERO).unwrap_or(false);
    let Some(open) = pipe.as_mut().filter(has_data) else {
        return Ok(false);
    };
    let mut chunk = [0; 16 << 10];
    let count = open.read(&mut chunk)?;
    into.extend_from_slice(&chunk[..count]);
    if count == 0 {
        *pipe = None;
    }
    Ok(count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> io::Result<Output> {
        output(
            Command::new("/bin/sh")
                .args(["-c", script])
                .stdin(Stdio::null()),
            limit,
        )
    }

    #[test]
    fn the_complete_output_of_an_external_program_is_collected() {
        let said = shell(
            "head -c 300000 /dev/zero; echo no >&2; exit 3",
            Duration::from_secs(60),
        )
        .unwrap();
        assert_eq!(
            (said.stdout.len(), said.stderr.as_slice()),
            (300_000, b"no\n".as_slice())
        );
        assert_eq!(said.status.code(), Some(3));
        // A grandchild that keeps the pipes open does not delay the result.
        let said = shell("sleep 60 & echo $!", Duration::from_secs(30)).unwrap();
        let pid = String::from_utf8(said.stdout).unwrap();
        let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
    }

    #[test]
    fn an_external_program_is_killed_if_its_caller_is_killed() {
        let limit = Duration::from_secs(60);
        let said = output(Command::new("setpriv").arg("--dump"), limit).unwrap();
        let said = String::from_utf8(said.stdout).unwrap();
        assert!(said.contains("Parent death signal: KILL"), "{said}");
    }

    #[test]
    fn a_program_without_a_time_limit_runs_to_its_end_in_a_group_of_its_own() {
        let script = "head -c 300000 /dev/zero; sleep 0.3; echo no >&2; ps -o pgid= -p $$ >&2; echo $$ >&2; exit 3";
        let mut command = Command::new("/bin/sh");
        let said = output_unlimited(command.args(["-c", script]).stdin(Stdio::null())).unwrap();
        assert_eq!((said.stdout.len(), said.status.code()), (300_000, Some(3)));
        let said = String::from_utf8(said.stderr).unwrap();
        let words: Vec<&str> = said.split_whitespace().collect();
        assert_eq!((words[0], words[1]), ("no", words[2]));
        // A grandchild that continues does not delay the result.
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "sleep 60 & echo $!"]);
        let said = output_unlimited(command.stdin(Stdio::null())).unwrap();
        let pid = String::from_utf8(said.stdout).unwrap();
        let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
    }

    #[test]
    fn a_program_that_prints_without_end_or_whose_check_fails_is_killed() {
        let limit = Duration::from_secs(300);
        let error = shell("yes >&2", limit).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        let mut command = Command::new("sleep");
        let child = command.arg("60").process_group(0).spawn().unwrap();
        let began = Instant::now();
        let full = || Err(io::ErrorKind::StorageFull.into());
        let error = output_while(child, limit, full).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(began.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_hanging_external_program_is_killed_at_the_deadline() {
        let began = Instant::now();
        let error = shell("trap '' TERM; sleep 60", Duration::from_millis(200)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "{:?}",
            began.elapsed()
        );
    }
}
