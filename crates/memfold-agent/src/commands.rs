//! Runs shell commands that the daemon sends to the agent in the guest.
//!
//! A separate thread for each command starts the shell, in a process group of its own, and forwards
//! the shell's output to the main thread. The shell runs at normal priority (the agent's is lower).
//! Only little output is buffered: if the daemon reads slowly, the command's pipe fills up and the
//! command waits.
//!
//! `streamed` runs commands whose input and output are sent while they run.

mod shell;
mod streamed;

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};

use memfold_wire::agent::{FromAgent, OutputStream, ToAgent};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use self::shell::{PIECE, ROUNDS_AFTER_END, exit_code, prepare};
use self::streamed::{Request, Streams};
use crate::wake::Wake;

/// Largest number of commands that run at the same time.
const MAX_COMMANDS: usize = 16;
/// Number of messages that the channel to the main thread can hold.
const MESSAGES: usize = 8;

/// Running commands, by epoch (number of the connection) and number of the command. `None`: not
/// started yet; such a command is killed by removing its entry.
type Running = Arc<Mutex<HashMap<(u32, u32), Option<Pid>>>>;

/// Sends messages of another thread of the agent to the daemon, as long as the connection lasts.
#[derive(Clone, Debug)]
pub struct Outbox {
    epoch: u32,
    sender: SyncSender<(u32, FromAgent)>,
    wake: Arc<Wake>,
}

impl Outbox {
    /// Sends a message; waits while many are queued, so the main thread must not call this.
    pub fn send(&self, message: FromAgent) {
        let _ = self.sender.send((self.epoch, message));
        self.wake.up();
    }

    /// Sends a message, or drops it if many are queued.
    pub fn try_send(&self, message: FromAgent) {
        let _ = self.sender.try_send((self.epoch, message));
        self.wake.up();
    }
}

/// Shell commands that the agent runs for the daemon.
#[derive(Debug)]
pub struct Commands {
    running: Running,
    sender: SyncSender<(u32, FromAgent)>,
    receiver: Receiver<(u32, FromAgent)>,
    /// Descriptor that is readable when a message of a command may be ready. Make it unreadable
    /// (`Wake::rest`) before calling [`Self::next`].
    pub wake: Arc<Wake>,
    streams: Streams,
    epoch: u32,
}

impl Commands {
    /// Creates an empty set of running commands.
    pub fn new() -> io::Result<Self> {
        let (sender, receiver) = mpsc::sync_channel(MESSAGES);
        Ok(Self {
            running: Running::default(),
            sender,
            receiver,
            wake: Arc::new(Wake::new()?),
            streams: Streams::default(),
            epoch: 0,
        })
    }

    /// Starts `/bin/sh -c script` as command number `command`; at most 16 commands run at a time. A
    /// failure to start is reported as exit code 127 with a message on the command's standard
    /// error.
    pub fn run(&self, command: u32, script: String) {
        let key = (self.epoch, command);
        let mut task = Task {
            key,
            running: Arc::clone(&self.running),
            sender: self.sender.clone(),
            wake: Arc::clone(&self.wake),
        };
        {
            let mut running = lock(&self.running);
            if running.len() >= MAX_COMMANDS || running.contains_key(&key) {
                drop(running);
                let text = format!(
                    "memfold-agent: command {command} is already running, or {MAX_COMMANDS} others are\n"
                );
                self.answer(failure(command, &text));
                return;
            }
            running.insert(key, None);
        }
        let spawned = std::thread::Builder::new()
            .name("command".into())
            .stack_size(128 << 10)
            .spawn(move || task.run(&script));
        if let Err(e) = spawned {
            lock(&self.running).remove(&key);
            self.no_thread(command, &e);
        }
    }

    /// Sends messages to the daemon among those of the commands.
    pub fn answer(&self, messages: Vec<FromAgent>) {
        let outbox = self.outbox();
        let sent = messages.clone();
        // The main thread also empties the queue, so it must not wait while the queue is full.
        let send = move || sent.into_iter().for_each(|message| outbox.send(message));
        let background = std::thread::Builder::new().stack_size(64 << 10);
        if background.spawn(send).is_err() {
            self.try_answer(messages);
        }
    }

    /// Sends messages as [`Self::answer`] does, but drops those for which the queue has no room.
    fn try_answer(&self, messages: Vec<FromAgent>) {
        let outbox = self.outbox();
        for message in messages {
            outbox.try_send(message);
        }
    }

    /// Answers that a command cannot run.
    fn no_thread(&self, command: u32, error: &io::Error) {
        let text = format!("memfold-agent: cannot start a thread for the command: {error}\n");
        self.try_answer(failure(command, &text));
    }

    /// Kills the shell of command number `command` and its children (the process group). Does
    /// nothing if that command does not run.
    pub fn kill(&self, command: u32) {
        // The entry is removed before the process is reaped, so this process number belongs to the
        // command.
        let mut running = lock(&self.running);
        let key = (self.epoch, command);
        match running.get(&key) {
            Some(Some(pid)) => drop(kill_process_group(*pid, Signal::KILL)),
            // The command's thread kills the shell as soon as it has started.
            Some(None) => drop(running.remove(&key)),
            None => {}
        }
    }

    /// Carries out the daemon's message about a streamed command. Returns the message if it is
    /// about something else.
    pub fn stream(&self, message: ToAgent) -> Option<ToAgent> {
        let key = |command| (self.epoch, command);
        match message {
            ToAgent::Stream {
                command,
                script,
                has_input,
                terminal,
            } => {
                let request = Request {
                    script,
                    has_input,
                    terminal,
                };
                let (sender, wake) = (self.sender.clone(), Arc::clone(&self.wake));
                if let Err(e) = self.streams.start(key(command), request, sender, wake) {
                    self.no_thread(command, &e);
                }
            }
            ToAgent::Input { command, bytes } => self.streams.input(key(command), &bytes),
            ToAgent::EndInput { command } => self.streams.end_input(key(command)),
            ToAgent::OutputRoom { command, cost } => {
                self.streams.output_room(key(command), cost);
            }
            ToAgent::Resize { command, size } => self.streams.resize(key(command), size),
            ToAgent::Signal { command, signal } => self.streams.signal(key(command), signal),
            ToAgent::HangUp { command } => self.streams.hang_up(key(command)),
            other => return Some(other),
        }
        None
    }

    /// Drops the output of the commands that a lost connection has started. These commands keep
    /// running, except for the streamed ones, whose clients are gone.
    pub fn forget(&mut self) {
        self.streams.hang_up_all();
        self.epoch = self.epoch.wrapping_add(1);
    }

    /// Returns a sender for messages that go to the daemon the same way. They are dropped like a
    /// command's output when the connection is lost.
    pub fn outbox(&self) -> Outbox {
        Outbox {
            epoch: self.epoch,
            sender: self.sender.clone(),
            wake: Arc::clone(&self.wake),
        }
    }

    /// Returns whether nothing that was started for the daemon runs: every message is in the queue
    /// that [`Self::next`] empties.
    pub fn is_idle(&self) -> bool {
        // Each thread that may send a message has a reference of its own.
        Arc::strong_count(&self.wake) == 1
    }

    /// Returns the next message of a command to send to the daemon; `None` if there is none.
    pub fn next(&self) -> Option<FromAgent> {
        loop {
            let (epoch, message) = self.receiver.try_recv().ok()?;
            if epoch == self.epoch {
                return Some(message);
            }
        }
    }
}

/// Returns the messages of a command that did not run: a text on its standard error, and exit code
/// 127.
fn failure(command: u32, text: &str) -> Vec<FromAgent> {
    let output = FromAgent::Output {
        command,
        stream: OutputStream::Stderr,
        bytes: text.as_bytes().to_vec(),
    };
    vec![output, FromAgent::Exited { command, code: 127 }]
}

fn lock(running: &Running) -> std::sync::MutexGuard<'_, HashMap<(u32, u32), Option<Pid>>> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Task {
    key: (u32, u32),
    running: Running,
    sender: SyncSender<(u32, FromAgent)>,
    wake: Arc<Wake>,
}

impl Task {
    fn send(&self, message: FromAgent) {
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

    fn fail(&mut self, text: &str) {
        for message in failure(self.key.1, text) {
            self.send(message);
        }
    }

    fn exited(&self, code: i32) {
        let command = self.key.1;
        self.send(FromAgent::Exited { command, code });
    }

    fn run(&mut self, script: &str) {
        // A child inherits the nice value of the thread that starts it. On Linux, `None` stands for
        // the calling thread.
        let _ = rustix::process::setpriority_process(None, 0);
        let mut command = Command::new("/bin/sh");
        prepare(&mut command, script);
        command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        match command.spawn() {
            Ok(mut child) => {
                let code = self.follow(&mut child);
                self.exited(code);
            }
            Err(e) => {
                lock(&self.running).remove(&self.key);
                self.fail(&format!("memfold-agent: /bin/sh: {e}\n"));
            }
        }
    }

    /// Forwards output until the shell has ended and its pipes are empty. Does not wait for
    /// background children that hold the pipes open. Returns the exit code, or 128 plus the signal.
    fn follow(&self, child: &mut Child) -> i32 {
        let pid = Pid::from_child(child);
        match lock(&self.running).get_mut(&self.key) {
            Some(slot) => *slot = Some(pid),
            // The command was killed before it had started.
            None => drop(kill_process_group(pid, Signal::KILL)),
        }
        if let Err(e) = self.pass_on(child, pid) {
            let text = format!("memfold-agent: {e}\n");
            self.output(OutputStream::Stderr, text.as_bytes());
        }
        lock(&self.running).remove(&self.key);
        exit_code(child)
    }

    fn pass_on(&self, child: &mut Child, pid: Pid) -> io::Result<()> {
        let ended = pidfd_open(pid, PidfdFlags::empty())?;
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            return Ok(());
        };
        let mut open = vec![
            (stdout.as_fd(), OutputStream::Stdout),
            (stderr.as_fd(), OutputStream::Stderr),
        ];
        let mut buffer = vec![0; PIECE];
        let mut rounds_after_end = 0;
        loop {
            let mut set = vec![PollFd::new(&ended, PollFlags::IN)];
            let pipes = open.iter();
            set.extend(pipes.map(|(pipe, _)| PollFd::from_borrowed_fd(*pipe, PollFlags::IN)));
            poll(&mut set, None)?;
            let ready: Vec<bool> = set.iter().map(|p| !p.revents().is_empty()).collect();
            let (mut said, mut still_open) = (false, Vec::new());
            for ((pipe, stream), is_ready) in open.into_iter().zip(&ready[1..]) {
                if *is_ready {
                    // The pipe is readable, so this does not block.
                    let n = rustix::io::read(pipe, &mut buffer[..])?;
                    if n == 0 {
                        continue;
                    }
                    said = true;
                    self.output(stream, &buffer[..n]);
                }
                still_open.push((pipe, stream));
            }
            open = still_open;
            rounds_after_end += u32::from(ready[0]);
            if ready[0] && (!said || rounds_after_end > ROUNDS_AFTER_END) {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testkit::wait_until;
    use std::time::Duration;

    const LIMIT: Duration = Duration::from_secs(20);

    /// Output and exit codes of commands in a test.
    #[derive(Default)]
    struct Heard {
        out: Vec<u8>,
        err: Vec<u8>,
        codes: Vec<(u32, i32)>,
    }

    impl Heard {
        fn hear(&mut self, commands: &Commands) {
            while let Some(message) = commands.next() {
                match message {
                    FromAgent::Output { stream, bytes, .. } => match stream {
                        OutputStream::Stdout => self.out.extend(bytes),
                        OutputStream::Stderr => self.err.extend(bytes),
                    },
                    FromAgent::Exited { command, code } => self.codes.push((command, code)),
                    other => panic!("{other:?}"),
                }
            }
        }

        fn of(commands: &Commands, count: usize) -> Self {
            let mut heard = Self::default();
            wait_until("so many commands have ended", LIMIT, || {
                heard.hear(commands);
                heard.codes.len() >= count
            });
            heard
        }

        fn lines(&self) -> Vec<&str> {
            std::str::from_utf8(&self.out).unwrap().lines().collect()
        }
    }

    /// Returns whether a process runs: it exists and is no zombie.
    fn is_running(pid: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    }

    #[test]
    fn the_agent_returns_the_complete_output_and_the_exit_code_of_a_command() {
        let commands = Commands::new().unwrap();
        commands.run(1, "seq 1 200000; echo end >&2; exit 3".into());
        let heard = Heard::of(&commands, 1);
        assert_eq!(heard.out.len(), 1_288_895);
        assert_eq!(heard.err, b"end\n");
        assert_eq!(heard.codes, [(1, 3)]);
        assert!(lock(&commands.running).is_empty());
    }

    #[test]
    fn a_command_that_the_agent_runs_finds_the_path_of_the_agent_in_its_environment() {
        let commands = Commands::new().unwrap();
        commands.run(1, "echo \"$MEMFOLD_AGENT\"".into());
        let heard = Heard::of(&commands, 1);
        assert_eq!(heard.codes, [(1, 0)]);
        let own = std::env::current_exe().unwrap();
        assert_eq!(heard.lines(), [own.to_str().unwrap()]);
    }

    #[test]
    fn a_command_of_the_agent_ends_although_its_background_child_still_runs() {
        let commands = Commands::new().unwrap();
        commands.run(1, "sleep 30 & echo $!".into());
        let heard = Heard::of(&commands, 1);
        assert_eq!(heard.codes, [(1, 0)]);
        let pid = Pid::from_raw(heard.lines()[0].parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
    }

    #[test]
    fn killing_a_command_kills_its_children_and_a_17th_command_at_once_is_refused() {
        let commands = Commands::new().unwrap();
        for i in 0..17 {
            commands.run(i, "sleep 100 & echo $!; wait".into());
        }
        let mut heard = Heard::default();
        wait_until("sixteen run and one is refused", LIMIT, || {
            heard.hear(&commands);
            heard.lines().len() == 16 && heard.codes == [(16, 127)]
        });
        let children = heard.lines();
        assert!(children.iter().all(|pid| is_running(pid)), "{children:?}");
        (0..16).for_each(|i| commands.kill(i));
        let codes = Heard::of(&commands, 16).codes;
        assert!(codes.iter().all(|c| c.1 == 137), "{codes:?}");
        wait_until("no child is left", LIMIT, || {
            !children.iter().any(|pid| is_running(pid))
        });
    }
    #[test]
    fn a_command_that_is_killed_before_its_shell_has_started_does_not_run() {
        let commands = Commands::new().unwrap();
        // After the guest stood still, the agent reads both messages at once.
        for i in 0..50 {
            commands.run(i, "sleep 100".into());
            commands.kill(i);
            assert_eq!(Heard::of(&commands, 1).codes, [(i, 137)]);
        }
        assert!(lock(&commands.running).is_empty());
    }
}
