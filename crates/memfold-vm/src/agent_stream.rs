//! Streamed commands in a guest: their input and output are sent while they run.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memfold_wire::agent::{
    MAX_INPUT, MAX_STREAMS, OUTPUT_COST, OUTPUT_WINDOW, STREAMS_VERSION, Terminal, TerminalSize,
    ToAgent,
};

use super::agent_link::{AgentLink, Shared};
use super::agent_task::{AgentError, GuestTask, StreamEvent};
use super::agent_windows::LinkStream;

/// Cost of passed-on output after which the agent is told that it may send more.
const TELL_OUTPUT: usize = OUTPUT_WINDOW / 4;

/// What a streamed command is started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamRequest {
    /// What the guest runs.
    pub task: GuestTask,
    /// Whether the command gets standard input; otherwise its input is empty.
    pub has_input: bool,
    /// Terminal of the command; `None`: the command has pipes. An order has no terminal.
    pub terminal: Option<Terminal>,
}

/// A streamed command that was started in a guest. Dropping this value ends the command's
/// processes: `SIGHUP`, and `SIGKILL` two seconds later. Each method may block for up to five
/// seconds if the guest does not read.
#[derive(Debug)]
pub struct StreamedCommand {
    shared: Arc<Shared>,
    number: u32,
    /// Cost of output that was passed on, and that the agent does not know yet.
    passed_on: AtomicUsize,
}

impl AgentLink {
    /// Starts a command in the guest whose input and output are sent while it runs. `sink` gets the
    /// command's events; it must return at once, and must not call this link. If the connection to
    /// the agent ends, `sink` is dropped without [`StreamEvent::Exited`].
    ///
    /// # Errors
    ///
    /// [`AgentError::TooOld`] if the agent is too old; [`AgentError::TooManyStreams`].
    pub fn stream(
        &self,
        request: StreamRequest,
        sink: impl Fn(StreamEvent) + Send + 'static,
    ) -> Result<StreamedCommand, AgentError> {
        let (number, session, version) = self.shared.add_stream(sink)?;
        let command = StreamedCommand {
            number,
            shared: Arc::clone(&self.shared),
            passed_on: AtomicUsize::new(0),
        };
        let StreamRequest {
            task,
            has_input,
            terminal,
        } = request;
        let start = task.stream_message(number, version, has_input, terminal);
        command.shared.send_in(session, &start)?;
        Ok(command)
    }
}

impl Shared {
    /// Adds a streamed command, and returns its number, and number and protocol version of the
    /// session.
    fn add_stream(
        &self,
        sink: impl Fn(StreamEvent) + Send + 'static,
    ) -> Result<(u32, u64, u16), AgentError> {
        let mut state = self.lock_in_session()?;
        if state.version < STREAMS_VERSION {
            let version = state.facts()?.agent.clone();
            let what = "stream a command's input and output";
            return Err(AgentError::TooOld { version, what });
        }
        if state.streams.len() >= MAX_STREAMS {
            return Err(AgentError::TooManyStreams);
        }
        let number = state.new_number();
        state.streams.insert(number, LinkStream::new(sink));
        Ok((number, state.number, state.version))
    }

    /// Takes room for `bytes` bytes of input to a streamed command.
    fn take_input_room(&self, number: u32, bytes: usize) -> Result<(), AgentError> {
        let mut state = self.lock();
        // A command that has ended takes no input, which is no error.
        let stream = state.streams.get_mut(&number);
        stream.map_or(Ok(()), |stream| stream.take_input_room(bytes))
    }

    /// Allows the agent to send more output of a streamed command. Returns whether the command
    /// still runs.
    fn allow_output(&self, number: u32, cost: usize) -> bool {
        let mut state = self.lock();
        let stream = state.streams.get_mut(&number);
        stream.map(|stream| stream.allow_output(cost)).is_some()
    }

    /// Forgets a streamed command. Returns whether it still runs.
    fn forget_stream(&self, number: u32) -> bool {
        self.lock().streams.remove(&number).is_some()
    }
}

impl StreamedCommand {
    /// Sends standard input to the command.
    ///
    /// # Errors
    ///
    /// [`AgentError::TooMuchInput`] if there is no room for these bytes
    /// ([`StreamEvent::InputRoom`]).
    pub fn input(&self, bytes: &[u8]) -> Result<(), AgentError> {
        self.shared.take_input_room(self.number, bytes.len())?;
        for bytes in bytes.chunks(MAX_INPUT) {
            self.shared.send(&ToAgent::Input {
                command: self.number,
                bytes: bytes.to_vec(),
            })?;
        }
        Ok(())
    }

    /// Ends the command's standard input.
    pub fn end_input(&self) -> Result<(), AgentError> {
        let command = self.number;
        self.shared.send(&ToAgent::EndInput { command })
    }

    /// Changes the size of the command's terminal.
    pub fn resize(&self, size: TerminalSize) -> Result<(), AgentError> {
        let command = self.number;
        self.shared.send(&ToAgent::Resize { command, size })
    }

    /// Sends a signal to the command.
    pub fn signal(&self, signal: u8) -> Result<(), AgentError> {
        let command = self.number;
        self.shared.send(&ToAgent::Signal { command, signal })
    }

    /// Notes that the bytes of one [`StreamEvent::Output`] were passed on, so that the command may
    /// write more.
    pub fn passed_on(&self, bytes: usize) -> Result<(), AgentError> {
        let cost = bytes + OUTPUT_COST;
        let due = self.passed_on.fetch_add(cost, Ordering::Relaxed) + cost;
        if due < TELL_OUTPUT {
            return Ok(());
        }
        let cost = self.passed_on.swap(0, Ordering::Relaxed);
        if self.shared.allow_output(self.number, cost) {
            self.shared.send(&ToAgent::OutputRoom {
                command: self.number,
                cost: u32::try_from(cost).unwrap_or(u32::MAX),
            })?;
        }
        Ok(())
    }

    /// Returns whether [`Self::passed_on`] will send a message to the agent, and so may block.
    #[must_use]
    pub fn tells_agent(&self, bytes: usize) -> bool {
        self.passed_on.load(Ordering::Relaxed) + bytes + OUTPUT_COST >= TELL_OUTPUT
    }
}

impl Drop for StreamedCommand {
    fn drop(&mut self) {
        if self.shared.forget_stream(self.number) {
            let command = self.number;
            // If this fails, the connection has ended, and the agent ends the command.
            let _ = self.shared.send(&ToAgent::HangUp { command });
        }
    }
}
