//! A small QMP client that returns QEMU's answers as plain JSON.
//!
//! Source: QEMU `docs/interop/qmp-spec.rst`. The client does not check answers against a schema, so
//! older and newer QEMUs work. QEMU serves one client per socket at a time; a second client waits
//! and gets no greeting.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use serde_json::{Value, json};

use memfold_host::socket;
use memfold_sys::descriptor;

use super::process::peer_pid;

/// Largest accepted answer of QEMU, in bytes.
const MAX_MESSAGE: usize = 64 << 20;
/// Most bytes that QEMU may send by itself between two looks at its events.
const MAX_UNASKED: usize = 1 << 20;
/// Most events that are kept until a caller takes them; the oldest are dropped first.
const MAX_EVENTS: usize = 1024;
/// Timeout of commands that wait for the host's disks, which other processes may keep busy.
const DISKS_TIMEOUT: Duration = Duration::from_secs(120);

/// Timeout of the next command after QEMU has missed a deadline, so that later callers do not wait
/// as long as the first.
const SILENT_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout for answers to questions that are asked again soon ([`Qmp::briefly`]), while the caller
/// has other VMs to look after.
const BRIEF_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a QMP connection could not be made, or why a command failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum QmpError {
    #[error("cannot connect to QMP socket {path}")]
    Connect {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// QEMU sent no greeting, because another client holds the socket or because QEMU hangs.
    #[error(
        "no QMP greeting on {path} within {seconds} s; disconnect other QMP clients from this socket"
    )]
    NoGreeting { path: PathBuf, seconds: f64 },
    #[error("QMP connection lost during {command}")]
    Lost {
        command: String,
        #[source]
        source: std::io::Error,
    },
    #[error("QEMU did not answer {command} within {seconds} s")]
    Timeout { command: String, seconds: f64 },
    /// Another task of this process used the connection for the whole waiting time.
    #[error("another task has used QMP socket {path} for {seconds} s; QEMU may be hanging")]
    Busy { path: PathBuf, seconds: f64 },
    #[error("QEMU refused {command}: {description}")]
    Refused {
        command: String,
        class: String,
        description: String,
    },
    #[error("QEMU's answer to {command} is not valid QMP: {text}")]
    Unexpected { command: String, text: String },
}

/// A connection to QEMU's monitor (QMP).
#[derive(Debug)]
pub struct Qmp {
    path: PathBuf,
    timeout: Duration,
    stream: Option<UnixStream>,
    buffer: Vec<u8>,
    events: VecDeque<Value>,
    greeting: Value,
    next_id: u64,
    /// Descriptor to send with the next command.
    pass: Option<OwnedFd>,
    connections: u64,
    /// Whether QEMU has missed a deadline and has not answered since.
    is_silent: bool,
    /// Whether a missed deadline says nothing about QEMU ([`Self::briefly`]).
    is_brief: bool,
    /// How long the caller waited, if this value only stands for a connection that another task
    /// holds; else `None`.
    busy: Option<Duration>,
}

/// A file descriptor that was passed to QEMU. QEMU's options refer to it by a path.
#[derive(Debug)]
pub struct Lent {
    set: u64,
    /// Number of the descriptor in the QEMU process. `set`: number of QEMU's descriptor set with
    /// it.
    number: u64,
}

impl Lent {
    /// Returns the path of the descriptor for QEMU's file options (`/dev/fdset/N`).
    #[must_use]
    pub fn path(&self) -> String {
        format!("/dev/fdset/{}", self.set)
    }

    /// Returns the path of the descriptor for options that do not support descriptor sets, such as
    /// memory backends. Opening the path requires permission for the file only, not for its parent
    /// directories.
    #[must_use]
    pub fn plain_path(&self) -> String {
        format!("/proc/self/fd/{}", self.number)
    }
}

impl Qmp {
    /// Connects to the QMP socket at `path` and negotiates capabilities. `timeout` also applies to
    /// each later answer.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, QmpError> {
        let mut qmp = Self::unconnected(path, timeout);
        qmp.reconnect()?;
        Ok(qmp)
    }

    fn unconnected(path: &Path, timeout: Duration) -> Self {
        Self {
            path: path.into(),
            timeout,
            stream: None,
            buffer: Vec::new(),
            events: VecDeque::new(),
            greeting: Value::Null,
            next_id: 1,
            pass: None,
            connections: 0,
            is_silent: false,
            is_brief: false,
            busy: None,
        }
    }

    /// Returns a placeholder for the connection at `path`, which another task did not release
    /// within `waited`. Every command on the placeholder fails with [`QmpError::Busy`].
    #[must_use]
    pub fn busy(path: &Path, waited: Duration) -> Self {
        Self {
            busy: Some(waited),
            ..Self::unconnected(path, waited)
        }
    }

    /// Returns the path of QEMU's QMP socket, which may no longer exist.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether QEMU did not answer a command in time and has not answered since.
    #[must_use]
    pub const fn is_silent(&self) -> bool {
        self.is_silent
    }

    /// Closes the connection to QEMU and opens a new one. Events that were received before are
    /// kept.
    pub fn reconnect(&mut self) -> Result<(), QmpError> {
        if let Some(waited) = self.busy {
            return Err(QmpError::Busy {
                path: self.path.clone(),
                seconds: waited.as_secs_f64(),
            });
        }
        let connected = self.connect_anew();
        if connected.is_err() {
            // QEMU accepts no other command before the capabilities are negotiated.
            self.stream = None;
        }
        connected
    }

    fn connect_anew(&mut self) -> Result<(), QmpError> {
        self.stream = None;
        self.buffer.clear();
        self.connections += 1;
        let limit = if self.is_silent {
            self.timeout.min(SILENT_TIMEOUT)
        } else {
            self.timeout
        };
        let deadline = Instant::now() + limit;
        let connected = socket::connect(&self.path, limit)
            .and_then(|s| s.set_write_timeout(Some(self.timeout)).map(|()| s));
        let greeting = match connected {
            Ok(stream) => {
                self.stream = Some(stream);
                self.read_message("the greeting", deadline)?
            }
            // QEMU has not accepted the connection, so the socket's queue is full.
            Err(error) if error.kind() == ErrorKind::TimedOut => None,
            Err(source) => {
                let path = self.path.clone();
                return Err(QmpError::Connect { path, source });
            }
        };
        let Some(greeting) = greeting else {
            self.give_up();
            return Err(QmpError::NoGreeting {
                path: self.path.clone(),
                seconds: limit.as_secs_f64(),
            });
        };
        if greeting.get("QMP").is_none() {
            return Err(unexpected("the greeting", &greeting));
        }
        self.greeting = greeting;
        // QEMU sends its greeting from a separate thread, but executes commands on the one that may
        // hang.
        self.once("qmp_capabilities", &Value::Null, limit).map(drop)
    }

    /// Closes the connection after a missed deadline. QEMU then drops commands that it has not
    /// begun (`monitor/qmp.c`, `monitor_qmp_event`).
    fn give_up(&mut self) {
        self.stream = None;
        self.is_silent |= !self.is_brief;
    }

    /// Returns QEMU's version from its greeting: major, minor, micro. Zeroes if the greeting lacks
    /// it.
    #[must_use]
    pub fn version(&self) -> (u64, u64, u64) {
        let version = &self.greeting["QMP"]["version"]["qemu"];
        let part = |name: &str| version[name].as_u64().unwrap_or(0);
        (part("major"), part("minor"), part("micro"))
    }

    /// Returns the ID of the process that created the QMP socket (`SO_PEERCRED`).
    pub fn peer_pid(&self) -> Option<rustix::process::Pid> {
        peer_pid(self.stream.as_ref()?)
    }

    /// Executes the QMP command `command` and returns its result. If the connection breaks, queries
    /// (`query-...`, `qom-get`, `qom-list`) are repeated on a new connection; commands that may
    /// change something are not.
    #[allow(clippy::needless_pass_by_value)] // callers write json!({...}) in place
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        if self.stream.is_none() {
            self.reconnect()?;
        }
        match self.once(command, &arguments, self.timeout) {
            Err(QmpError::Lost { .. }) if is_question(command) => {
                self.reconnect()?;
                self.once(command, &arguments, self.timeout)
            }
            other => other,
        }
    }

    /// Executes a QMP command like [`execute`](Self::execute), with a timeout of at least 120 s.
    /// For commands that wait for the host's disks: QEMU drains pending requests, flushes, and
    /// opens files on its main thread.
    pub fn execute_on_disks(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let timeout = self.timeout.max(DISKS_TIMEOUT);
        self.execute_within(timeout, command, arguments)
    }

    /// Executes a QMP command like [`execute`](Self::execute), with another timeout.
    pub fn execute_within(
        &mut self,
        timeout: Duration,
        command: &str,
        arguments: Value,
    ) -> Result<Value, QmpError> {
        let usual = std::mem::replace(&mut self.timeout, timeout);
        let answer = self.execute(command, arguments);
        self.timeout = usual;
        answer
    }

    /// Calls `ask`, whose commands have a timeout of one second, for questions that are asked again
    /// soon. A QEMU that only answers later than that is not silent ([`Self::is_silent`]), and the
    /// connection stays open: later commands skip the late answer by its id.
    pub fn briefly<T>(&mut self, ask: impl FnOnce(&mut Self) -> T) -> T {
        let usual = std::mem::replace(&mut self.timeout, BRIEF_TIMEOUT);
        self.is_brief = true;
        let answer = ask(self);
        self.is_brief = false;
        self.timeout = usual;
        answer
    }

    /// Executes a QMP command without arguments; see [`execute`](Self::execute).
    pub fn query(&mut self, command: &str) -> Result<Value, QmpError> {
        self.execute(command, Value::Null)
    }

    /// Passes a file descriptor to QEMU (`add-fd`), so that options of later commands can refer to
    /// it.
    pub fn lend(&mut self, descriptor: BorrowedFd<'_>) -> Result<Lent, QmpError> {
        if self.stream.is_none() {
            self.reconnect()?;
        }
        self.pass = descriptor
            .try_clone_to_owned()
            .map(Some)
            .map_err(|source| self.lost("add-fd", source))?;
        let answer = self.once("add-fd", &Value::Null, self.timeout);
        self.pass = None;
        let answer = answer?;
        match (answer["fdset-id"].as_u64(), answer["fd"].as_u64()) {
            (Some(set), Some(number)) => Ok(Lent { set, number }),
            _ => Err(unexpected("add-fd", &answer)),
        }
    }

    /// Passes a file descriptor to QEMU (`getfd`). The next command that uses `name` as a socket
    /// address of type `fd` takes the descriptor; it is not closed before.
    pub fn pass(&mut self, name: &str, descriptor: BorrowedFd<'_>) -> Result<(), QmpError> {
        if self.stream.is_none() {
            self.reconnect()?;
        }
        self.pass = descriptor
            .try_clone_to_owned()
            .map(Some)
            .map_err(|source| self.lost("getfd", source))?;
        let answer = self.once("getfd", &json!({ "fdname": name }), self.timeout);
        self.pass = None;
        answer.map(drop)
    }

    /// Makes QEMU close a file descriptor that was passed with [`lend`](Self::lend).
    pub fn take_back(&mut self, lent: &Lent) -> Result<(), QmpError> {
        self.execute("remove-fd", json!({ "fdset-id": lent.set }))
            .map(drop)
    }

    /// Executes a command of QEMU's human monitor (HMP) and returns its output.
    pub fn human(&mut self, line: &str) -> Result<String, QmpError> {
        let answer = self.execute("human-monitor-command", json!({ "command-line": line }))?;
        match answer {
            Value::String(text) => Ok(text),
            other => Err(unexpected(line, &other)),
        }
    }

    fn once(
        &mut self,
        command: &str,
        arguments: &Value,
        limit: Duration,
    ) -> Result<Value, QmpError> {
        let id = self.next_id;
        self.next_id += 1;
        let mut request = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            request["arguments"] = arguments.clone();
        }
        let mut line = request.to_string();
        line.push('\n');
        let deadline = Instant::now() + limit;
        let pass = self.pass.take();
        let sent = match &self.stream {
            Some(stream) => {
                descriptor::send(stream, line.as_bytes(), pass.as_ref().map(AsFd::as_fd))
            }
            None => Err(ErrorKind::NotConnected.into()),
        };
        sent.map_err(|source| self.lost(command, source))?;
        loop {
            let Some(mut message) = self.read_message(command, deadline)? else {
                if !self.is_brief {
                    self.give_up();
                }
                return Err(QmpError::Timeout {
                    command: command.into(),
                    seconds: limit.as_secs_f64(),
                });
            };
            if message.get("event").is_some() {
                self.keep(message);
                continue;
            }
            if message["id"] != id {
                continue;
            }
            self.is_silent = false;
            if let Some(error) = message.get("error") {
                return Err(QmpError::Refused {
                    command: command.into(),
                    class: text_of(&error["class"]),
                    description: text_of(&error["desc"]),
                });
            }
            let value = message.get_mut("return").map(Value::take);
            return value.ok_or_else(|| unexpected(command, &message));
        }
    }

    /// Returns how often this value has connected to QEMU. Events that QEMU sends between two
    /// connections are lost.
    #[must_use]
    pub const fn connections(&self) -> u64 {
        self.connections
    }

    /// Removes the received events with one of these names and returns them, oldest first. Other
    /// events are kept for later calls.
    pub fn take_events_named(&mut self, names: &[&str]) -> Vec<Value> {
        let is_named = |event: &Value| event["event"].as_str().is_some_and(|n| names.contains(&n));
        let (named, others) = self.events.drain(..).partition(is_named);
        self.events = others;
        let named: VecDeque<Value> = named;
        named.into()
    }

    /// Receives what QEMU has sent by itself, without waiting and without asking QEMU. Returns
    /// whether one of the kept events has one of these names, the connection is lost, or QEMU sends
    /// more than [`MAX_UNASKED`] at once.
    pub fn has_event(&mut self, names: &[&str]) -> bool {
        let mut unasked = 0;
        loop {
            match self.received("an event") {
                Ok(Some(message)) if message.get("event").is_some() => self.keep(message),
                // A late answer to a command.
                Ok(Some(_)) => {}
                Ok(None) => {
                    let Some(stream) = &self.stream else {
                        return true;
                    };
                    let mut chunk = [0; 16 << 10];
                    match recv(stream, &mut chunk[..], RecvFlags::DONTWAIT) {
                        Ok((n, _)) if n > 0 && unasked < MAX_UNASKED => {
                            self.buffer.extend_from_slice(&chunk[..n]);
                            unasked += n;
                        }
                        Ok((n, _)) if n > 0 => {
                            self.buffer.extend_from_slice(&chunk[..n]);
                            return true;
                        }
                        Err(Errno::AGAIN | Errno::INTR) => break,
                        Ok(_) | Err(_) => return true,
                    }
                }
                Err(_) => return true,
            }
        }
        let is_named = |event: &Value| event["event"].as_str().is_some_and(|n| names.contains(&n));
        self.events.iter().any(is_named)
    }

    /// Waits for an event with one of these names, which may already have been received. Returns
    /// the event and drops earlier ones; `None` if there is no such event within `timeout`.
    pub fn wait_event(
        &mut self,
        names: &[&str],
        timeout: Duration,
    ) -> Result<Option<Value>, QmpError> {
        let deadline = Instant::now() + timeout;
        loop {
            while let Some(event) = self.events.pop_front() {
                if event["event"].as_str().is_some_and(|n| names.contains(&n)) {
                    return Ok(Some(event));
                }
            }
            match self.read_message("an event", deadline)? {
                Some(message) if message.get("event").is_some() => self.keep(message),
                Some(_) => {}
                None => return Ok(None),
            }
        }
    }

    fn keep(&mut self, event: Value) {
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// Returns the next message; `None` at the deadline.
    fn read_message(
        &mut self,
        command: &str,
        deadline: Instant,
    ) -> Result<Option<Value>, QmpError> {
        loop {
            if let Some(message) = self.received(command)? {
                return Ok(Some(message));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let mut chunk = [0; 16 << 10];
            let got = match &mut self.stream {
                Some(stream) => stream
                    .set_read_timeout(Some(left))
                    .and_then(|()| stream.read(&mut chunk)),
                None => Err(ErrorKind::NotConnected.into()),
            };
            match got.map_err(|error| (error.kind(), error)) {
                Ok(0) => return Err(self.lost(command, ErrorKind::UnexpectedEof.into())),
                Ok(n) => self.buffer.extend_from_slice(&chunk[..n]),
                Err((ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted, _)) => {}
                Err((_, error)) => return Err(self.lost(command, error)),
            }
        }
    }

    /// Takes the next message out of the received bytes; `None` if it is not complete yet.
    fn received(&mut self, command: &str) -> Result<Option<Value>, QmpError> {
        while let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.buffer.drain(..=end).collect();
            if line.trim_ascii().is_empty() {
                continue;
            }
            let message = serde_json::from_slice(&line);
            return message.map(Some).map_err(|_| QmpError::Unexpected {
                command: command.into(),
                text: String::from_utf8_lossy(&line).chars().take(200).collect(),
            });
        }
        if self.buffer.len() > MAX_MESSAGE {
            return Err(self.lost(command, ErrorKind::FileTooLarge.into()));
        }
        Ok(None)
    }

    fn lost(&mut self, command: &str, source: std::io::Error) -> QmpError {
        self.stream = None;
        self.buffer.clear();
        QmpError::Lost {
            command: command.into(),
            source,
        }
    }
}

fn unexpected(command: &str, value: &Value) -> QmpError {
    QmpError::Unexpected {
        command: command.into(),
        text: value.to_string().chars().take(200).collect(),
    }
}

fn is_question(command: &str) -> bool {
    command.starts_with("query-")
        || command.starts_with("x-query-")
        || matches!(command, "qom-get" | "qom-list")
}

fn text_of(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use memfold_testkit::wait_until;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}}, "capabilities": []}}"#;

    /// Starts a simulated QEMU, which sends one list of lines for each line that it reads. `ID`
    /// stands for the request's id.
    pub fn server(connections: Vec<Vec<&'static str>>) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            for script in connections {
                let (mut stream, _) = listener.accept().unwrap();
                writeln!(stream, "{GREETING}").unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                for answer in std::iter::once(r#"{"return": {}, "id": ID}"#).chain(script) {
                    let Some(Ok(line)) = lines.next() else { return };
                    let id = serde_json::from_str::<Value>(&line).unwrap()["id"].to_string();
                    // The answer is sent in two pieces, which the client must put together.
                    let answer = answer.replace("ID", &id) + "\n";
                    let (a, b) = answer.as_bytes().split_at(answer.len() / 2);
                    stream.write_all(a).unwrap();
                    std::thread::sleep(Duration::from_millis(5));
                    stream.write_all(b).unwrap();
                }
            }
        });
        (dir, path)
    }

    #[test]
    fn qmp_events_and_replies_to_other_commands_are_skipped() {
        let (_dir, path) = server(vec![vec![
            "{\"event\": \"STOP\"}\r\n{\"return\": 1, \"id\": 999}\r\n{\"return\": 7, \"id\": ID}",
        ]]);
        let mut qmp = Qmp::connect(&path, Duration::from_secs(5)).unwrap();
        assert_eq!(qmp.version(), (10, 0, 2));
        assert_eq!(qmp.query("query-status").unwrap(), 7);
        let event = qmp.wait_event(&["STOP"], Duration::ZERO).unwrap().unwrap();
        assert_eq!(event["event"], "STOP");
    }

    #[test]
    fn an_event_from_qemu_and_a_lost_connection_are_noticed_without_a_question() {
        let answer = "{\"return\": 7, \"id\": ID}\r\n{\"event\": \"STOP\"}";
        let (_dir, path) = server(vec![vec![answer, r#"{"return": 8, "id": ID}"#]]);
        let mut qmp = Qmp::connect(&path, Duration::from_secs(5)).unwrap();
        assert!(!qmp.has_event(&["STOP", "RESUME"]), "nothing was sent yet");
        assert_eq!(qmp.query("query-status").unwrap(), 7);
        wait_until("the event is here", Duration::from_secs(10), || {
            qmp.has_event(&["STOP"])
        });
        assert!(!qmp.has_event(&["RESUME"]));
        assert_eq!(qmp.take_events_named(&["STOP"]).len(), 1);
        assert!(
            !qmp.has_event(&["STOP"]),
            "events are noticed until they are taken"
        );
        // After this answer, the simulated QEMU ends.
        assert_eq!(qmp.query("query-status").unwrap(), 8);
        let is_noticed = || qmp.has_event(&["NEVER"]);
        wait_until(
            "the lost connection is noticed",
            Duration::from_secs(10),
            is_noticed,
        );
    }

    #[test]
    fn after_a_lost_qmp_connection_queries_are_repeated_and_commands_are_not() {
        let (_dir, path) = server(vec![vec![], vec![r#"{"return": 3, "id": ID}"#]]);
        let mut qmp = Qmp::connect(&path, Duration::from_secs(5)).unwrap();
        assert_eq!(qmp.query("query-status").unwrap(), 3);
        assert!(matches!(qmp.query("cont"), Err(QmpError::Lost { .. })));
    }

    #[test]
    fn qmp_refusals_and_malformed_answers_are_errors() {
        let (_dir, path) = server(vec![vec![
            r#"{"error": {"class": "GenericError", "desc": "no such thing"}, "id": ID}"#,
            "this is not JSON",
        ]]);
        let mut qmp = Qmp::connect(&path, Duration::from_secs(5)).unwrap();
        let refused = qmp.query("nonsense").unwrap_err().to_string();
        assert_eq!(refused, "QEMU refused nonsense: no such thing");
        assert!(matches!(
            qmp.query("query-kvm"),
            Err(QmpError::Unexpected { .. })
        ));
    }

    #[test]
    fn a_qmp_command_without_an_answer_fails_and_the_error_names_the_time_limit() {
        // An event comes, and then no answer, because the simulated QEMU waits for a second
        // request.
        let (_dir, path) = server(vec![vec!["{\"event\": \"STOP\"}", "never"]]);
        let mut qmp = Qmp::connect(&path, Duration::from_secs(5)).unwrap();
        let limit = Duration::from_millis(50);
        let error = qmp.execute_within(limit, "blockdev-backup", json!({}));
        assert_eq!(
            error.unwrap_err().to_string(),
            "QEMU did not answer blockdev-backup within 0.05 s"
        );
        assert_eq!(qmp.timeout, Duration::from_secs(5));
    }

    #[test]
    fn after_a_greeting_that_cannot_be_read_the_next_qmp_command_connects_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut first, _) = listener.accept().unwrap();
            writeln!(first, "no greeting").unwrap();
            // The client closes this connection, and sends no command on it.
            let mut sent = String::new();
            first.read_to_string(&mut sent).unwrap();
            assert_eq!(sent, "");
            listener.accept().unwrap();
        });
        let mut qmp = Qmp::unconnected(&path, Duration::from_secs(5));
        for connections in 1..=2 {
            assert!(qmp.query("query-status").is_err());
            assert_eq!(qmp.connections(), connections);
        }
        server.join().unwrap();
    }

    #[test]
    fn a_late_answer_to_a_brief_qmp_question_is_skipped_and_the_connection_stays() {
        // The first question gets only an event. Its answer comes with that to the second one.
        let late = "{\"return\": 6, \"id\": 2}\r\n{\"return\": 7, \"id\": ID}";
        let (_dir, path) = server(vec![vec!["{\"event\": \"STOP\"}", late]]);
        let mut qmp = Qmp::connect(&path, Duration::from_secs(5)).unwrap();
        let missed = qmp.briefly(|qmp| qmp.query("query-balloon"));
        assert!(matches!(missed, Err(QmpError::Timeout { .. })));
        assert!(!qmp.is_silent());
        assert_eq!(qmp.query("query-status").unwrap(), 7);
        assert_eq!(
            (qmp.connections(), qmp.timeout),
            (1, Duration::from_secs(5))
        );
    }

    #[test]
    fn after_a_missed_qmp_deadline_the_next_wait_is_short_until_qemu_answers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        let mut qmp = Qmp::unconnected(&path, Duration::from_secs(600));
        qmp.is_silent = true;
        assert!(matches!(
            qmp.query("query-status"),
            Err(QmpError::NoGreeting { .. })
        ));
        drop(listener);
        let (_dir, path) = server(vec![vec![r#"{"return": 7, "id": ID}"#]]);
        qmp.path = path;
        assert_eq!(qmp.query("query-status").unwrap(), 7);
        assert!(!qmp.is_silent());
    }

    #[test]
    fn a_qmp_connection_without_a_greeting_times_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let _listener = UnixListener::bind(&path).unwrap();
        let error = Qmp::connect(&path, Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, QmpError::NoGreeting { .. }), "{error}");
    }
}
