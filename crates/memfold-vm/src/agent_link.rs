//! The daemon's end of the connection to memfold's agent in a guest.
//!
//! ```text
//!   connect -> [Hello -> Welcome, Inventory -> Allowed -> messages ...] -> error or end -> wait, connect again
//!                 ^------------- a new Hello: the guest rebooted, or its agent began anew
//! ```
//! One thread reads the agent's messages and passes each to a callback (the sink). While the
//! callback blocks, the thread does not read, QEMU's buffer fills, and the guest waits. So a flood
//! of messages takes only limited memory of the host. The messages are decoded and checked for
//! limits ([`memfold_wire`]), but what they say stays untrusted.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memfold_host::caught::caught;
use memfold_host::privileges::{Files, confine_thread_or_warn};
use memfold_wire::agent::{
    FromAgent, OLDEST_VERSION, ORDERS_VERSION, OutputStream, ToAgent, VERSION,
};
use memfold_wire::memory::TrimResult;
use memfold_wire::permission::Permission;
use memfold_wire::{Decoder, encode};

use super::agent_budget::{Budget, weight};
use super::agent_facts::{AgentEvent, AgentFacts, AgentOptions, AgentStats};
use super::agent_held::{Held, is_about_pages};
use super::agent_task::{AgentError, CommandResult, GuestTask, StreamEvent};
use super::agent_windows::{LinkStream, Passed};

/// Shortest and longest wait before a reconnect.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Shortest and longest time to wait for an agent's Hello. An agent may not notice that the host
/// closed and reopened the connection, above all in a restored VM; then the agent waits for the
/// host as the host waits for the agent. The next connection is another chance.
const SILENCE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(16));
/// After a connection of at least this length, the next wait before a reconnect is the shortest
/// again.
const GOOD_CONNECTION: Duration = Duration::from_secs(10);
/// Longest time that QEMU may take to accept a connection. Dropping a link may take as long.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time that a write to the guest may take.
const WRITE_TIMEOUT: Duration = Duration::from_secs(15);
/// Longest time that a command waits for the next session of an agent that had one before. An agent
/// on a busy host repeats its Hello, because the answer came late, and each Hello begins a session.
/// A user's command waits as long for the first session after the start of the link.
const NEXT_SESSION: Duration = Duration::from_secs(5);
/// Queue length of a command's output, in pieces of 64 KiB.
const OUTPUT_PIECES: usize = 64;
/// Most Hello messages that a guest may send on one connection, and the time in which they are
/// counted. More are a flood, which delays the next agent's messages: the connection is then
/// closed, and QEMU discards the data in transit. (A systemd unit that restarts its agent every
/// second causes ten.)
const GREETINGS: (usize, Duration) = (16, Duration::from_secs(10));

/// Why a connection ended that its own link has ended.
const ENDED: &str = "the link ends";

enum CommandEvent {
    Output(OutputStream, Vec<u8>),
    Exited(i32),
    NotAllowed(Permission),
}

/// A connection to memfold's agent in a guest. A thread reconnects as needed, until this value is
/// dropped.
#[derive(Debug)]
pub struct AgentLink {
    pub(super) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
pub(super) struct Shared {
    path: PathBuf,
    options: AgentOptions,
    /// When the link was started.
    began: Instant,
    state: Mutex<State>,
    changed: Condvar,
    /// Serializes writes to the agent. This lock is separate from the state's lock, so that a slow
    /// guest does not block readers of the state.
    writer: Mutex<()>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    stop: bool,
    stats: AgentStats,
    stream: Option<UnixStream>,
    session: Option<AgentFacts>,
    /// Facts of an agent that was welcomed, and has not yet said what the guest's owner allows.
    greeted: Option<AgentFacts>,
    /// Number of the session, or of the next one.
    pub(super) number: u64,
    last_error: String,
    /// Version of the session's protocol.
    pub(super) version: u16,
    /// What the guest's owner allows; `None`: the agent has not said, and may allow everything.
    allowed: Option<BTreeSet<Permission>>,
    commands: HashMap<u32, SyncSender<CommandEvent>>,
    pub(super) streams: HashMap<u32, LinkStream>,
    next_command: u32,
    /// Receivers of results of trims, by number. The agent ends a trim when a new one comes.
    pub(super) trims: HashMap<u32, SyncSender<TrimResult>>,
    pub(super) next_trim: u32,
}

impl AgentLink {
    /// Starts a thread that connects to the agent's socket at `path` and reconnects until the link
    /// is dropped. The thread calls `sink` with each event. `sink` may block (the guest then
    /// waits), and must not call [`run`](Self::run).
    pub fn start(
        path: &Path,
        options: AgentOptions,
        sink: impl FnMut(AgentEvent) + Send + 'static,
    ) -> Self {
        let shared = Arc::new(Shared {
            path: path.into(),
            options,
            began: Instant::now(),
            state: Mutex::default(),
            changed: Condvar::new(),
            writer: Mutex::default(),
        });
        shared.lock().last_error = "not connected yet".into();
        let reader = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("agent-link".into())
            .spawn(move || reader.serve(sink))
            .map_err(|e| {
                shared.lock().last_error =
                    format!("cannot start a thread for the agent's link: {e}");
            })
            .ok();
        Self { shared, thread }
    }

    /// Returns what the agent said about itself at the start of the current session; `None` if
    /// there is no session.
    #[must_use]
    pub fn session(&self) -> Option<AgentFacts> {
        self.shared.lock().session.clone()
    }

    /// Waits until a session with the agent exists. Fails after `timeout`.
    pub fn wait_session(&self, timeout: Duration) -> Result<AgentFacts, AgentError> {
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(self.shared.lock(), timeout, |state| state.session.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        state.facts().cloned()
    }

    /// Waits for a session, until this link is 5 s old: if the daemon or the VM has just started,
    /// the agent had no time to connect.
    pub fn wait_first_session(&self) {
        let left = NEXT_SESSION.saturating_sub(self.shared.began.elapsed());
        // A caller without a session gets an error that says why.
        let _ = self.wait_session(left);
    }

    /// Returns what the guest's owner allows the daemon; `None` if there is no session, or if the
    /// agent is older than protocol version 3, which allows everything.
    #[must_use]
    pub fn allowed(&self) -> Option<BTreeSet<Permission>> {
        self.shared.lock().allowed.clone()
    }

    /// Returns the counters of this link since it was started.
    #[must_use]
    pub fn stats(&self) -> AgentStats {
        self.shared.lock().stats
    }

    /// Sends a message to the agent. Fails if there is no connection to the agent.
    pub fn send(&self, message: &ToAgent) -> Result<(), AgentError> {
        self.shared.send(message)
    }

    /// Blocks all sending to the agent until the caller drops the guard. QEMU would write sent data
    /// into the guest's memory even while the VM is stopped.
    pub fn quiet(&self) -> MutexGuard<'_, ()> {
        self.shared.quiet()
    }

    /// Asks the agent to report the guest's whole page cache. Entries that the agent reported
    /// before, and does not report again, become invalid.
    pub fn take_inventory(&self) -> Result<(), AgentError> {
        drop(self.shared.lock_in_session()?);
        self.shared.send(&ToAgent::Inventory)
    }

    /// Runs a script or an order in the guest and returns output and exit code. The command is
    /// killed after `timeout`, or when it has printed more than 64 MiB, or more than 256 MiB
    /// together with other commands whose results exist.
    ///
    /// # Errors
    ///
    /// [`AgentError::NotAllowed`] if the guest's owner does not allow it.
    pub fn run(
        &self,
        task: impl Into<GuestTask>,
        timeout: Duration,
    ) -> Result<CommandResult, AgentError> {
        let mut result = CommandResult::default();
        let mut refused = None;
        let code = self.run_streaming(task, timeout, |stream, bytes| {
            refused = result.kept.add(bytes.len()).err();
            match stream {
                OutputStream::Stdout => &mut result.stdout,
                OutputStream::Stderr => &mut result.stderr,
            }
            .extend_from_slice(bytes);
            refused.is_none()
        });
        result.code = code.map_err(|error| refused.unwrap_or(error))?;
        Ok(result)
    }

    /// Runs a script or an order in the guest, calls `output` with each piece of the command's
    /// output, and returns the exit code. The command is killed after `timeout`, or when `output`
    /// returns false ([`AgentError::TooMuchOutput`]).
    pub fn run_streaming(
        &self,
        task: impl Into<GuestTask>,
        timeout: Duration,
        mut output: impl FnMut(OutputStream, &[u8]) -> bool,
    ) -> Result<i32, AgentError> {
        let (sender, receiver) = sync_channel(OUTPUT_PIECES);
        let (command, run, session) = {
            let mut state = self.shared.lock_in_session()?;
            let command = state.new_number();
            state.commands.insert(command, sender);
            let run = task.into().message(command, state.version);
            (command, run, state.number)
        };
        let deadline = Instant::now() + timeout;
        let late = || AgentError::Timeout {
            seconds: timeout.as_secs_f64(),
        };
        let outcome = self.shared.send_in(session, &run).and_then(|()| {
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                match receiver.recv_timeout(left) {
                    Ok(CommandEvent::Output(stream, bytes)) => {
                        if !output(stream, &bytes) {
                            return Err(AgentError::TooMuchOutput);
                        }
                        if Instant::now() >= deadline {
                            return Err(late());
                        }
                    }
                    Ok(CommandEvent::Exited(code)) => return Ok(code),
                    Ok(CommandEvent::NotAllowed(permission)) => {
                        return Err(AgentError::NotAllowed(permission));
                    }
                    Err(RecvTimeoutError::Timeout) => return Err(late()),
                    Err(RecvTimeoutError::Disconnected) => return Err(AgentError::Lost),
                }
            }
        });
        // The receiver is dropped first, because the reader may wait for room in the channel.
        drop(receiver);
        self.shared.lock().commands.remove(&command);
        if matches!(
            outcome,
            Err(AgentError::Timeout { .. } | AgentError::TooMuchOutput)
        ) {
            // The caller gets the first error in any case. If sending fails, the session is over,
            // and the command with it.
            let _ = self.shared.send(&ToAgent::Kill { command });
        }
        outcome
    }
}

impl Drop for AgentLink {
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.stop = true;
            state.end_session();
            if let Some(stream) = &state.stream {
                // This wakes the reader. It fails if the socket is closed already, which wakes the
                // reader as well.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        self.shared.changed.notify_all();
        let ended = self.thread.take().map(JoinHandle::join);
        if matches!(ended, Some(Err(_))) {
            tracing::error!(path = %self.shared.path.display(), "thread for the connection to the guest's agent panicked; report this bug");
        }
    }
}

impl State {
    pub(super) fn facts(&self) -> Result<&AgentFacts, AgentError> {
        self.session.as_ref().ok_or_else(|| self.no_session())
    }

    const fn is_greeted(&self) -> bool {
        self.session.is_some() || self.greeted.is_some()
    }

    pub(super) fn new_number(&mut self) -> u32 {
        let number = self.next_command;
        self.next_command = number.wrapping_add(1);
        number
    }

    fn no_session(&self) -> AgentError {
        AgentError::NoSession(self.last_error.clone())
    }

    /// Ends the session: drops the senders of its commands, which wakes the waiting callers.
    fn end_session(&mut self) {
        self.number += 1;
        self.greeted = None;
        self.session = None;
        self.commands.clear();
        self.streams.clear();
        self.trims.clear();
        self.allowed = None;
    }
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state when there is a session. If there was one before, waits up to
    /// [`NEXT_SESSION`] for the next.
    pub(super) fn lock_in_session(&self) -> Result<MutexGuard<'_, State>, AgentError> {
        let is_between =
            |state: &mut State| state.session.is_none() && state.stats.sessions > 0 && !state.stop;
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), NEXT_SESSION, is_between)
            .unwrap_or_else(PoisonError::into_inner);
        state.facts()?;
        Ok(state)
    }

    fn quiet(&self) -> MutexGuard<'_, ()> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message of the session with this number.
    pub(super) fn send_in(&self, session: u64, message: &ToAgent) -> Result<(), AgentError> {
        self.send_if(message, |state| state.number == session)
    }

    pub(super) fn send(&self, message: &ToAgent) -> Result<(), AgentError> {
        self.send_if(message, |_| true)
    }

    fn send_if(
        &self,
        message: &ToAgent,
        is_still: impl FnOnce(&State) -> bool,
    ) -> Result<(), AgentError> {
        memfold_wire::frame::Validate::validate(message)?;
        let bytes = encode(message)?;
        // A session may end while a save keeps everybody from sending.
        let _turn = self.quiet();
        let stream = {
            let state = self.lock();
            if !is_still(&state) {
                return Err(AgentError::Lost);
            }
            let stream = state.stream.as_ref().ok_or_else(|| state.no_session())?;
            stream.try_clone().map_err(AgentError::Write)?
        };
        (&stream).write_all(&bytes).map_err(|e| {
            // A part of the message may have been sent, so this connection cannot be used any more.
            let _ = stream.shutdown(Shutdown::Both);
            AgentError::Write(e)
        })
    }

    fn serve(&self, mut sink: impl FnMut(AgentEvent)) {
        let mut back_off = BACK_OFF.0;
        let mut silence = SILENCE.0;
        loop {
            let began = Instant::now();
            let connected = self.connect();
            let is_connected = connected.is_ok();
            let ended = match connected {
                Ok(stream) => self.converse_confined(stream, silence, &mut sink),
                Err(e) => Some(format!("cannot connect to {}: {e}", self.path.display())),
            };
            let mut state = self.lock();
            state.stream = None;
            state.end_session();
            if let Some(reason) = &ended {
                state.last_error.clone_from(reason);
            }
            if state.stop {
                return;
            }
            drop(state);
            let Some(reason) = ended else {
                silence = (silence * 2).min(SILENCE.1);
                if self.pause(BACK_OFF.0) {
                    return;
                }
                continue;
            };
            silence = SILENCE.0;
            if is_connected {
                sink(AgentEvent::Lost { reason });
            }
            if began.elapsed() >= GOOD_CONNECTION {
                back_off = BACK_OFF.0;
            }
            if self.pause(back_off) {
                return;
            }
            back_off = (back_off * 2).min(BACK_OFF.1);
        }
    }

    fn connect(&self) -> std::io::Result<UnixStream> {
        let stream = memfold_host::socket::connect(&self.path, CONNECT_TIMEOUT)?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        let mut state = self.lock();
        if state.stop {
            return Err(ErrorKind::Interrupted.into());
        }
        state.stream = Some(stream.try_clone()?);
        state.last_error =
            "connected to the agent's port, but the agent has not sent its hello".into();
        Ok(stream)
    }

    /// Sleeps for `time`, or until the link is dropped. Returns whether it was dropped.
    fn pause(&self, time: Duration) -> bool {
        let state = self.lock();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, time, |s| !s.stop)
            .unwrap_or_else(PoisonError::into_inner);
        state.stop
    }

    /// Counts an error of the protocol, and returns its text.
    fn broken(&self, reason: impl Into<String>) -> String {
        self.lock().stats.protocol_errors += 1;
        reason.into()
    }

    /// Makes a guest that exceeds its limits wait for `time`. Returns whether the link was dropped
    /// meanwhile.
    fn throttle(&self, time: Duration) -> bool {
        if time.is_zero() {
            return false;
        }
        self.lock().stats.throttled += 1;
        self.pause(time)
    }

    /// Like [`Self::converse`], in a thread that parses messages and has no rights beside its
    /// connection. Its events are passed to `sink` in this thread.
    fn converse_confined(
        &self,
        stream: UnixStream,
        silence: Duration,
        sink: &mut impl FnMut(AgentEvent),
    ) -> Option<String> {
        let (events, received) = sync_channel(0);
        let (done, sink_is_done) = sync_channel(0);
        std::thread::scope(|scope| {
            let parser = std::thread::Builder::new().name("agent-parser".into());
            let parser = parser.spawn_scoped(scope, move || {
                confine_thread_or_warn(Files::None);
                let mut pass = |event| {
                    // Fails only if the sink panicked, and then the connection is closed.
                    if events.send(event).is_ok() {
                        let _ = sink_is_done.recv();
                    }
                };
                caught(|| self.converse(stream, silence, &mut pass))
            });
            let parser = match parser {
                Ok(parser) => parser,
                Err(error) => {
                    return Some(format!(
                        "cannot start a thread for the agent's messages: {error}"
                    ));
                }
            };
            // A panic that a guest's message causes must end neither the daemon nor this link.
            let passed = caught(|| {
                for event in received {
                    sink(event);
                    // Fails only if the parser panicked.
                    let _ = done.send(());
                }
            });
            drop(done);
            if passed.is_err() {
                if let Some(stream) = &self.lock().stream {
                    // Fails only if the connection has ended.
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
            match (parser.join(), passed) {
                (Ok(Ok(reason)), Ok(())) => reason,
                _ => Some(self.broken(
                    "a message of the agent made this daemon panic; the daemon's log says where",
                )),
            }
        })
    }

    /// Processes messages until the connection ends, and returns why it ended. `None`: no Hello
    /// came within `silence`.
    fn converse(
        &self,
        mut stream: UnixStream,
        silence: Duration,
        sink: &mut impl FnMut(AgentEvent),
    ) -> Option<String> {
        // This limit applies until the agent's Hello. Without a Hello, an agent may go on with an
        // old session.
        let mut patience = Some(Instant::now() + silence);
        let mut decoder = Decoder::new();
        let mut chunk = vec![0; 64 << 10];
        let mut budget = Budget::new(self.options.max_bytes_per_s);
        let mut held = Held::new(self.options.max_pages_per_s);
        let mut others = Budget::new(self.options.max_pages_per_s);
        let mut greetings = VecDeque::new();
        loop {
            while let Some(message) = held.take_due() {
                held.spend(&message);
                self.handle(message, sink);
            }
            patience = patience.filter(|_| greetings.is_empty());
            let silent = patience.map(|until| until.saturating_duration_since(Instant::now()));
            if silent.is_some_and(|left| left.is_zero()) {
                return None;
            }
            if held.is_full() {
                if self.throttle(held.left()) {
                    return Some(ENDED.into());
                }
                continue;
            }
            // A read cannot wait for no time at all.
            let due = held.wait().map(|left| left.max(Duration::from_millis(1)));
            if let Err(e) = stream.set_read_timeout(silent.into_iter().chain(due).min()) {
                return Some(format!("cannot wait for the agent's port: {e}"));
            }
            let n = match stream.read(&mut chunk) {
                Ok(0) => return Some("QEMU closed the agent's port".into()),
                Ok(n) => n,
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {
                    continue;
                }
                Err(e) => return Some(format!("cannot read the agent's port: {e}")),
            };
            self.lock().stats.bytes += n as u64;
            decoder.push(&chunk[..n]);
            loop {
                let before = decoder.buffered();
                let message = match decoder.next::<FromAgent>() {
                    Ok(Some(message)) => message,
                    Ok(None) => break,
                    Err(e) => {
                        return Some(self.broken(format!("the agent broke the protocol: {e}")));
                    }
                };
                self.lock().stats.messages += 1;
                if matches!(message, FromAgent::Hello { .. }) {
                    let now = Instant::now();
                    greetings.push_back(now);
                    greetings.retain(|&at| now.duration_since(at) < GREETINGS.1);
                    if greetings.len() > GREETINGS.0 {
                        return Some(self.broken("the agent keeps sending hello"));
                    }
                    held.forget();
                }
                if is_about_pages(&message) {
                    if let Some(message) = held.pass(message, before - decoder.buffered()) {
                        held.spend(&message);
                        self.handle(message, sink);
                    }
                } else {
                    let wait = others.spend(weight(&message));
                    self.handle(message, sink);
                    if self.throttle(wait.unwrap_or_default()) {
                        return Some(ENDED.into());
                    }
                }
                if greetings.is_empty() {
                    // The agent goes on with an old session.
                    let soon = Instant::now() + SILENCE.0;
                    patience = patience.map(|until| until.min(soon));
                }
            }
            if self.throttle(budget.spend(n).unwrap_or_default()) {
                return Some(ENDED.into());
            }
        }
    }

    fn handle(&self, message: FromAgent, sink: &mut impl FnMut(AgentEvent)) {
        match message {
            FromAgent::Hello {
                version,
                agent,
                kernel,
                boot_id,
                host_name,
                problems,
            } => {
                self.lock().end_session();
                if version < OLDEST_VERSION {
                    let reason = format!(
                        "agent {agent} speaks protocol {version}, this memfold {OLDEST_VERSION} to {VERSION}; update the agent"
                    );
                    self.lock().last_error.clone_from(&reason);
                    self.answer(&ToAgent::Refused { reason });
                    return;
                }
                let facts = AgentFacts {
                    agent,
                    kernel,
                    boot_id,
                    host_name,
                    problems,
                };
                // An agent with a newer version speaks the older ones, too.
                let version = version.min(VERSION);
                {
                    let mut state = self.lock();
                    state.stats.sessions += 1;
                    state.version = version;
                }
                self.answer(&ToAgent::Welcome {
                    version,
                    include: self.options.include.clone(),
                    exclude: self.options.exclude.clone(),
                });
                // The sink gets the session before any of the session's messages.
                sink(AgentEvent::Session(facts.clone()));
                // The inventory is the first request to the agent.
                self.answer(&ToAgent::Inventory);
                let interval_ms = self.options.memory_interval_ms;
                if facts.reports_memory() && interval_ms > 0 {
                    self.answer(&ToAgent::ReportMemory { interval_ms });
                }
                let mut state = self.lock();
                // Until it has Welcome, an agent may repeat its Hello, which would end commands
                // that were sent meanwhile. Only then it says what is allowed.
                if version >= ORDERS_VERSION {
                    state.greeted = Some(facts);
                } else {
                    state.session = Some(facts);
                    self.changed.notify_all();
                }
            }
            FromAgent::Output {
                command,
                stream,
                bytes,
            } => {
                let event = StreamEvent::Output(stream, bytes);
                if let Some(StreamEvent::Output(stream, bytes)) = self.to_stream(command, event) {
                    self.to_command(command, CommandEvent::Output(stream, bytes));
                }
            }
            FromAgent::Exited { command, code } => {
                if self.to_stream(command, StreamEvent::Exited(code)).is_some() {
                    self.to_command(command, CommandEvent::Exited(code));
                    self.lock().commands.remove(&command);
                }
            }
            FromAgent::Allowed { words } => self.note_allowed(&words),
            FromAgent::NotAllowed { command, word } => {
                let Some(permission) = Permission::from_word(&word) else {
                    self.lock().stats.dropped += 1;
                    return;
                };
                let event = StreamEvent::NotAllowed(permission);
                if self.to_stream(command, event).is_some() {
                    self.to_command(command, CommandEvent::NotAllowed(permission));
                    self.lock().commands.remove(&command);
                }
            }
            FromAgent::InputRoom { command, bytes } => {
                if self
                    .to_stream(command, StreamEvent::InputRoom(bytes))
                    .is_some()
                {
                    self.lock().stats.dropped += 1;
                }
            }
            FromAgent::Trimmed(result) => {
                let sender = self.lock().trims.remove(&result.order);
                if sender.is_none_or(|s| s.send(result).is_err()) {
                    self.lock().stats.dropped += 1;
                }
            }
            other if self.lock().is_greeted() => sink(AgentEvent::Message(other)),
            _ => self.lock().stats.dropped += 1,
        }
    }

    /// Notes what the guest's owner allows. The session of an agent that tells it begins with that.
    fn note_allowed(&self, words: &[String]) {
        let mut state = self.lock();
        // A newer agent may know other permissions, which this daemon does not need.
        let words = words.iter().map(String::as_str);
        state.allowed = Some(words.filter_map(Permission::from_word).collect());
        if let Some(facts) = state.greeted.take() {
            state.session = Some(facts);
            self.changed.notify_all();
        }
    }

    /// Passes an event to a streamed command. Returns the event if there is no such streamed
    /// command. An agent that sends more output than it may loses the command.
    fn to_stream(&self, number: u32, event: StreamEvent) -> Option<StreamEvent> {
        let mut state = self.lock();
        let Some(stream) = state.streams.get_mut(&number) else {
            return Some(event);
        };
        let passed = stream.pass(event);
        if passed != Passed::GoesOn {
            state.streams.remove(&number);
        }
        if passed == Passed::TooMuch {
            state.stats.protocol_errors += 1;
            drop(state);
            self.answer(&ToAgent::HangUp { command: number });
        }
        None
    }

    fn to_command(&self, command: u32, event: CommandEvent) {
        let sender = self.lock().commands.get(&command).cloned();
        if sender.is_none_or(|s| s.send(event).is_err()) {
            self.lock().stats.dropped += 1;
        }
    }

    /// Sends a message from the reader's thread. A failure shuts the connection down, and the next
    /// read reports the failure.
    fn answer(&self, message: &ToAgent) {
        if let Err(error) = self.send(message) {
            tracing::debug!(path = %self.path.display(), %error, "cannot send an answer to the guest's agent");
        }
    }
}
