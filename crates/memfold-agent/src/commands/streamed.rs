//! Streamed commands: commands in the guest whose input and output are sent while they run, with or
//! without a terminal.
//!
//! ```text
//!   main loop: Inbox (input, room for output, size, signals, hang-up) --wake--> thread of the command
//!                                                                                 |       ^
//!                                                        pipes, or the terminal's master  |
//!                                                                                 v       |
//!   main loop <--Output, InputRoom, Exited-- channel of all commands <---------- poll ----+
//! ```
//! The inbox holds at most [`INPUT_WINDOW`] bytes of input, and the thread reads output only while
//! the daemon has room for it ([`OUTPUT_WINDOW`]). So a command that does not read, or a client
//! that does not read, takes no further memory here; the other side waits.
//!
//! Each command leads a session of its own (`setsid(2)`). After a hang-up, the agent ends every
//! process of that session, and sends nothing more about the command.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use memfold_sys::session::{detach, lead_terminal};
use memfold_wire::agent::{
    FromAgent, INPUT_WINDOW, MAX_STREAMS, OUTPUT_COST, OUTPUT_WINDOW, OutputStream, Terminal,
    TerminalSize,
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, kill_process_group, pidfd_open};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcgetpgrp, tcsetwinsize};

use super::shell::{PIECE, ROUNDS_AFTER_END, exit_code, prepare};
use crate::wake::Wake;

/// Most bytes of input that are written to the command at once.
const INPUT_PIECE: usize = 64 << 10;
/// Number of bytes that the command has taken after which the daemon is told, even if more input
/// waits.
const TELL_INPUT: usize = INPUT_WINDOW / 4;
/// Most signals that wait for the command's thread; more are dropped.
const MAX_SIGNALS: usize = 16;
/// Time from `SIGHUP` to `SIGKILL` for the processes of a command whose client is gone.
const GRACE: Duration = Duration::from_secs(2);
/// Longest time for which `SIGKILL` is repeated: a process may fork meanwhile.
const KILL_TIME: Duration = Duration::from_secs(5);
/// Interval at which the processes of a session are looked for.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// The character that ends the input of a terminal (Ctrl-D).
const END_OF_INPUT: u8 = 4;

/// Epoch (number of the connection) and number of a command.
type Key = (u32, u32);

/// Orders for a command's thread.
#[derive(Debug, Default)]
struct Inbox {
    input: VecDeque<u8>,
    input_ended: bool,
    /// Cost of the output that may still be sent.
    room: usize,
    size: Option<TerminalSize>,
    signals: Vec<u8>,
    hang_up: bool,
}

#[derive(Debug)]
struct Stream {
    inbox: Mutex<Inbox>,
    wake: Wake,
}

impl Stream {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self, change: impl FnOnce(&mut Inbox)) {
        change(&mut self.lock());
        self.wake.up();
    }
}

type Running = Arc<Mutex<HashMap<Key, Arc<Stream>>>>;

fn lock(running: &Running) -> MutexGuard<'_, HashMap<Key, Arc<Stream>>> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The streamed commands that run, of all connections.
#[derive(Debug, Default)]
pub(super) struct Streams {
    running: Running,
}

/// What a streamed command is started with.
pub(super) struct Request {
    pub script: String,
    pub has_input: bool,
    pub terminal: Option<Terminal>,
}

impl Streams {
    /// Starts a command. At most 16 run at a time. A failure is reported as exit code 127, with a
    /// message on the command's standard error.
    pub(super) fn start(
        &self,
        key: Key,
        request: Request,
        sender: SyncSender<(u32, FromAgent)>,
        wake: Arc<Wake>,
    ) -> io::Result<()> {
        let inbox = Inbox {
            room: OUTPUT_WINDOW,
            ..Inbox::default()
        };
        let stream = Arc::new(Stream {
            inbox: Mutex::new(inbox),
            wake: Wake::new()?,
        });
        let is_refused = {
            let mut running = lock(&self.running);
            let refused = running.len() >= MAX_STREAMS || running.contains_key(&key);
            if !refused {
                running.insert(key, Arc::clone(&stream));
            }
            refused
        };
        let task = Task {
            key,
            stream,
            sender,
            wake,
        };
        let running = Arc::clone(&self.running);
        let spawned = std::thread::Builder::new()
            .name("stream".into())
            .stack_size(192 << 10)
            .spawn(move || {
                if is_refused {
                    let number = key.1;
                    task.fail(&format!(
                        "memfold-agent: command {number} is already running, or {MAX_STREAMS} others are\n"
                    ));
                    return;
                }
                task.run(&request);
                lock(&running).remove(&key);
            });
        if spawned.is_err() && !is_refused {
            lock(&self.running).remove(&key);
        }
        spawned.map(drop)
    }

    fn order(&self, key: Key, change: impl FnOnce(&mut Inbox)) {
        // A command that has ended needs no orders.
        let stream = lock(&self.running).get(&key).cloned();
        if let Some(stream) = stream {
            stream.order(change);
        }
    }

    /// Adds standard input. A daemon that sends more than it may loses the command.
    pub(super) fn input(&self, key: Key, bytes: &[u8]) {
        self.order(key, |inbox| {
            if inbox.input.len() + bytes.len() > INPUT_WINDOW {
                inbox.hang_up = true;
            } else {
                inbox.input.extend(bytes);
            }
        });
    }

    pub(super) fn end_input(&self, key: Key) {
        self.order(key, |inbox| inbox.input_ended = true);
    }

    pub(super) fn output_room(&self, key: Key, cost: u32) {
        let cost = usize::try_from(cost).unwrap_or(OUTPUT_WINDOW);
        self.order(key, |inbox| {
            inbox.room = inbox.room.saturating_add(cost).min(OUTPUT_WINDOW);
        });
    }

    pub(super) fn resize(&self, key: Key, size: TerminalSize) {
        self.order(key, |inbox| inbox.size = Some(size));
    }

    pub(super) fn signal(&self, key: Key, signal: u8) {
        self.order(key, |inbox| {
            if inbox.signals.len() < MAX_SIGNALS {
                inbox.signals.push(signal);
            }
        });
    }

    pub(super) fn hang_up(&self, key: Key) {
        self.order(key, |inbox| inbox.hang_up = true);
    }

    /// Ends all commands, because the connection to their daemon is lost.
    pub(super) fn hang_up_all(&self) {
        for stream in lock(&self.running).values() {
            stream.order(|inbox| inbox.hang_up = true);
        }
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        lock(&self.running).len()
    }
}

/// The agent's ends of a command's input and output.
struct Ends {
    input: Option<Arc<OwnedFd>>,
    output: Vec<(Arc<OwnedFd>, OutputStream)>,
    terminal: Option<Arc<OwnedFd>>,
}

struct Task {
    key: Key,
    stream: Arc<Stream>,
    sender: SyncSender<(u32, FromAgent)>,
    wake: Arc<Wake>,
}

/// How the forwarding of a command's input and output ended.
enum Outcome {
    Exited,
    HungUp,
}

impl Task {
    fn send(&self, message: FromAgent) {
        // This fails only while the agent ends.
        let _ = self.sender.send((self.key.0, message));
        self.wake.up();
    }

    fn output(&self, stream: OutputStream, bytes: &[u8]) {
        self.send(FromAgent::Output {
            command: self.key.1,
            stream,
            bytes: bytes.to_vec(),
        });
    }

    fn exited(&self, code: i32) {
        let command = self.key.1;
        self.send(FromAgent::Exited { command, code });
    }

    fn fail(&self, text: &str) {
        self.output(OutputStream::Stderr, text.as_bytes());
        self.exited(127);
    }

    fn run(&self, request: &Request) {
        // A child inherits the nice value of the thread that starts it.
        let _ = rustix::process::setpriority_process(None, 0);
        let (mut child, ends) = match spawn(request) {
            Ok(spawned) => spawned,
            Err(e) => {
                self.fail(&format!("memfold-agent: cannot start /bin/sh: {e}\n"));
                return;
            }
        };
        let pid = Pid::from_child(&child);
        let outcome = self.pass_on(pid, ends);
        if !matches!(outcome, Ok(Outcome::Exited)) {
            end_session(pid);
        }
        if let Err(e) = &outcome {
            let text = format!("memfold-agent: {e}\n");
            self.output(OutputStream::Stderr, text.as_bytes());
        }
        let code = exit_code(&mut child);
        if !matches!(outcome, Ok(Outcome::HungUp)) {
            self.exited(code);
        }
    }

    /// Forwards input and output until the command has ended and its output is sent. Does not wait
    /// for background children that hold the pipes open.
    fn pass_on(&self, pid: Pid, mut ends: Ends) -> io::Result<Outcome> {
        let ended = pidfd_open(pid, PidfdFlags::empty())?;
        let mut input = Input::default();
        let mut has_ended = false;
        let mut rounds_after_end = 0;
        let mut buffer = vec![0; PIECE];
        loop {
            self.stream.wake.rest();
            let mut room = {
                let mut inbox = self.stream.lock();
                if inbox.hang_up {
                    return Ok(Outcome::HungUp);
                }
                input.take(&mut inbox);
                carry_out(&mut inbox, pid, &ends);
                inbox.room
            };
            input.write(&mut ends)?;
            // The wake for the rest of the input is already spent.
            while !input.waits() && !self.stream.lock().input.is_empty() {
                input.take(&mut self.stream.lock());
                input.write(&mut ends)?;
            }
            if let Some(bytes) = input.take_told() {
                let command = self.key.1;
                self.send(FromAgent::InputRoom { command, bytes });
            }
            let can_read = room > OUTPUT_COST;
            let ready = {
                let (wake, none) = (self.stream.wake.as_fd(), PollFlags::empty());
                let mut set = vec![PollFd::from_borrowed_fd(wake, PollFlags::IN)];
                let end = if has_ended { none } else { PollFlags::IN };
                set.push(PollFd::new(&ended, end));
                let wants = if can_read { PollFlags::IN } else { none };
                if can_read {
                    set.extend(ends.output.iter().map(|(fd, _)| PollFd::new(fd, wants)));
                }
                if let (Some(fd), true) = (&ends.input, input.waits()) {
                    set.push(PollFd::new(fd, PollFlags::OUT));
                }
                // After the command's end, the output that is there is read without waiting.
                let at_once = has_ended && can_read;
                let none = rustix::event::Timespec::default();
                match poll(&mut set, at_once.then_some(&none)) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(e) => return Err(e.into()),
                }
                set.iter().map(PollFd::revents).collect::<Vec<_>>()
            };
            let mut has_read = false;
            if can_read {
                let mut index = 0;
                ends.output.retain(|(fd, stream)| {
                    index += 1;
                    if ready[1 + index].is_empty() || room <= OUTPUT_COST {
                        return true;
                    }
                    let most = PIECE.min(room - OUTPUT_COST);
                    match rustix::io::read(fd, &mut buffer[..most]) {
                        Ok(0) => false,
                        Ok(n) => {
                            has_read = true;
                            room -= n + OUTPUT_COST;
                            self.stream.lock().room -= n + OUTPUT_COST;
                            self.output(*stream, &buffer[..n]);
                            true
                        }
                        Err(Errno::AGAIN | Errno::INTR) => true,
                        // A terminal that no process has open any more returns EIO.
                        Err(_) => false,
                    }
                });
            }
            if has_ended && can_read {
                rounds_after_end += 1;
                if !has_read || rounds_after_end > ROUNDS_AFTER_END {
                    return Ok(Outcome::Exited);
                }
            }
            has_ended |= !ready[1].is_empty();
        }
    }
}

/// Applies the new size and the signals of an inbox.
fn carry_out(inbox: &mut Inbox, pid: Pid, ends: &Ends) {
    if let (Some(size), Some(terminal)) = (inbox.size.take(), &ends.terminal) {
        // A size that the kernel does not accept changes nothing.
        let _ = set_size(terminal.as_fd(), size);
    }
    for signal in inbox.signals.drain(..) {
        let Some(signal) = Signal::from_named_raw(signal.into()) else {
            continue;
        };
        let foreground = ends.terminal.as_ref().and_then(|fd| tcgetpgrp(fd).ok());
        // The command may have ended.
        let _ = kill_process_group(foreground.unwrap_or(pid), signal);
    }
}

/// Input of a command that was taken out of the inbox.
#[derive(Default)]
struct Input {
    bytes: Vec<u8>,
    written: usize,
    ends: bool,
    taken: usize,
}

impl Input {
    fn waits(&self) -> bool {
        self.written < self.bytes.len()
    }

    fn take(&mut self, inbox: &mut Inbox) {
        if self.waits() {
            return;
        }
        let most = inbox.input.len().min(INPUT_PIECE);
        self.bytes = inbox.input.drain(..most).collect();
        self.written = 0;
        // The end comes after all input, and only once: a terminal would get Ctrl-D again.
        if inbox.input.is_empty() {
            self.ends |= std::mem::take(&mut inbox.input_ended);
        }
    }

    /// Writes to the command until it accepts no more. If the command has closed its input, drops
    /// the input.
    fn write(&mut self, ends: &mut Ends) -> io::Result<()> {
        while self.waits() {
            let Some(fd) = &ends.input else {
                self.count(self.bytes.len() - self.written);
                break;
            };
            match rustix::io::write(fd, &self.bytes[self.written..]) {
                Ok(n) => self.count(n),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::IO) => ends.input = None,
                Err(e) => return Err(e.into()),
            }
        }
        if std::mem::take(&mut self.ends) {
            match &ends.terminal {
                Some(_) => self.bytes.push(END_OF_INPUT),
                None => ends.input = None,
            }
        }
        Ok(())
    }

    fn count(&mut self, bytes: usize) {
        self.written += bytes;
        self.taken += bytes;
    }

    /// Returns how many bytes more the daemon may send, if this is worth a message.
    fn take_told(&mut self) -> Option<u32> {
        let is_due = self.taken >= TELL_INPUT || (self.taken > 0 && !self.waits());
        if !is_due {
            return None;
        }
        u32::try_from(std::mem::take(&mut self.taken)).ok()
    }
}

/// Starts the shell, with pipes or with a terminal.
fn spawn(request: &Request) -> io::Result<(Child, Ends)> {
    let mut command = Command::new("/bin/sh");
    prepare(&mut command, &request.script);
    let Some(terminal) = &request.terminal else {
        return spawn_with_pipes(&mut command, request.has_input);
    };
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = openpt(flags)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let user = ioctl_tiocgptpeer(&master, flags)?;
    set_size(user.as_fd(), terminal.size)?;
    command
        .env("TERM", &terminal.kind)
        .stdin(user.try_clone()?)
        .stdout(user.try_clone()?)
        .stderr(user);
    let child = lead_terminal(&mut command).spawn()?;
    do_not_block(master.as_fd())?;
    let master = Arc::new(master);
    let ends = Ends {
        input: request.has_input.then(|| Arc::clone(&master)),
        output: vec![(Arc::clone(&master), OutputStream::Stdout)],
        terminal: Some(master),
    };
    Ok((child, ends))
}

fn spawn_with_pipes(command: &mut Command, has_input: bool) -> io::Result<(Child, Ends)> {
    command
        .stdin(if has_input {
            Stdio::piped()
        } else {
            Stdio::null()
        })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = detach(command).spawn()?;
    let own = |fd: OwnedFd| {
        do_not_block(fd.as_fd())?;
        Ok::<_, io::Error>(Arc::new(fd))
    };
    let input = child.stdin.take().map(|pipe| own(pipe.into()));
    let stdout = child.stdout.take().map(|pipe| own(pipe.into()));
    let stderr = child.stderr.take().map(|pipe| own(pipe.into()));
    let mut output = Vec::new();
    if let Some(fd) = stdout.transpose()? {
        output.push((fd, OutputStream::Stdout));
    }
    if let Some(fd) = stderr.transpose()? {
        output.push((fd, OutputStream::Stderr));
    }
    let ends = Ends {
        input: input.transpose()?,
        output,
        terminal: None,
    };
    Ok((child, ends))
}

fn do_not_block(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::io::ioctl_fionbio(fd, true)?)
}

fn set_size(terminal: BorrowedFd<'_>, size: TerminalSize) -> io::Result<()> {
    let size = Winsize {
        ws_row: size.rows,
        ws_col: size.columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(tcsetwinsize(terminal, size)?)
}

/// Ends all processes of the session that `leader` leads. The leader was not waited for yet, so its
/// number belongs to no other session.
fn end_session(leader: Pid) {
    for pid in of_session(leader) {
        // A stopped process notices SIGHUP only after SIGCONT. A process may have ended already.
        let _ = kill_process(pid, Signal::HUP);
        let _ = kill_process(pid, Signal::CONT);
    }
    let hung_up = Instant::now();
    while !of_session(leader).is_empty() && hung_up.elapsed() < GRACE {
        std::thread::sleep(LOOK_AGAIN);
    }
    let killing = Instant::now();
    loop {
        let left = of_session(leader);
        if left.is_empty() || killing.elapsed() > KILL_TIME {
            return;
        }
        for pid in left {
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Returns the processes of a session that still run (`proc_pid_stat(5)`: state, parent, process
/// group and session follow the name in parentheses).
fn of_session(leader: Pid) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let session = leader.as_raw_nonzero().to_string();
    let of_entry = |entry: fs::DirEntry| {
        let number: i32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read(entry.path().join("stat")).ok()?;
        let stat = String::from_utf8_lossy(&stat);
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let state = fields.next()?;
        let is_in = fields.nth(2)? == session && !matches!(state, "Z" | "X");
        is_in.then(|| Pid::from_raw(number)).flatten()
    };
    entries.flatten().filter_map(of_entry).collect()
}

#[cfg(test)]
mod tests;
