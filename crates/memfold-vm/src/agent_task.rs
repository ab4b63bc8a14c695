//! What the daemon asks a guest's agent to do (scripts and orders), and how that can end.

use std::sync::atomic::{AtomicUsize, Ordering};

use memfold_wire::agent::{
    INPUT_WINDOW, MAX_STREAMS, ORDERS_VERSION, OutputStream, Terminal, ToAgent,
};
use memfold_wire::order::GuestOrder;
use memfold_wire::permission::Permission;

/// Most output of a command that [`AgentLink::run`](super::AgentLink::run) keeps, in bytes, both
/// streams together.
pub(super) const MAX_OUTPUT: usize = 64 << 20;

/// Most output that the results of all commands keep together, in bytes. A command's first
/// [`ALWAYS_KEPT`] bytes are kept beyond that.
const MAX_KEPT: usize = 256 << 20;
const ALWAYS_KEPT: usize = 64 << 10;

static KEPT_BY_ALL: AtomicUsize = AtomicUsize::new(0);

/// Why a message to the agent could not be sent, or why a command in the guest gave no result.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum AgentError {
    #[error("the guest's agent is not connected ({0})")]
    NoSession(String),
    #[error("the agent in the guest disconnected while the command ran")]
    Lost,
    #[error(
        "the command in the guest took longer than its time limit of {seconds} s and was killed"
    )]
    Timeout { seconds: f64 },
    #[error("the command in the guest printed more than {} MiB and was killed", MAX_OUTPUT >> 20)]
    TooMuchOutput,
    #[error(
        "the command in the guest was killed: commands that run at once may print {} MiB together; run fewer at once, or stream the output",
        MAX_KEPT >> 20
    )]
    TooMuchOfAll,
    #[error("the agent in the guest has version {version}, which cannot {what}")]
    TooOld { version: String, what: &'static str },
    #[error("the agent in the guest did not end the trim of its page cache within {seconds} s")]
    TrimTimeout { seconds: f64 },
    #[error("cannot send the script to the guest's agent")]
    Frame(#[from] memfold_wire::FrameError),
    #[error("cannot write to the port of the guest's agent")]
    Write(#[source] std::io::Error),
    #[error("{MAX_STREAMS} streamed commands run in the guest already")]
    TooManyStreams,
    #[error("more than {} KiB of input were sent before the command had taken them", INPUT_WINDOW >> 10)]
    TooMuchInput,
    #[error("{}", .0.refusal())]
    NotAllowed(Permission),
}

/// What a guest is to do: a script of the user, or one of the daemon's orders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestTask {
    /// Script for `/bin/sh -c`, which needs [`Permission::Exec`].
    Script(String),
    /// Order, which needs its own permission.
    Order(GuestOrder),
}

impl From<&str> for GuestTask {
    fn from(script: &str) -> Self {
        Self::Script(script.to_owned())
    }
}

impl From<GuestOrder> for GuestTask {
    fn from(order: GuestOrder) -> Self {
        Self::Order(order)
    }
}

impl GuestTask {
    /// Returns the message for a command with this number. `version`: that of the session.
    pub(super) fn message(self, command: u32, version: u16) -> ToAgent {
        match self {
            Self::Order(order) if version >= ORDERS_VERSION => ToAgent::Order { command, order },
            task => ToAgent::Run {
                command,
                script: task.into_script(),
            },
        }
    }

    /// Returns the message for a streamed command with this number. `version`: that of the session.
    pub(super) fn stream_message(
        self,
        command: u32,
        version: u16,
        has_input: bool,
        terminal: Option<Terminal>,
    ) -> ToAgent {
        match self {
            Self::Order(order) if version >= ORDERS_VERSION => ToAgent::StreamOrder {
                command,
                order,
                has_input,
            },
            task => ToAgent::Stream {
                command,
                script: task.into_script(),
                has_input,
                terminal,
            },
        }
    }

    /// Returns the script that an agent runs that knows no orders.
    fn into_script(self) -> String {
        match self {
            Self::Script(script) => script,
            Self::Order(order) => order.script(),
        }
    }
}

/// What a command in the guest printed, and its exit code.
#[derive(Debug, Default)]
pub struct CommandResult {
    /// What the command wrote to its standard output.
    pub stdout: Vec<u8>,
    /// What the command wrote to its standard error.
    pub stderr: Vec<u8>,
    /// Exit code of the command, or 128 + signal if a signal killed the command.
    pub code: i32,
    pub(super) kept: Kept,
}

/// Number of bytes of output that a command's result keeps.
#[derive(Debug, Default)]
pub(super) struct Kept(usize);

impl Kept {
    /// Counts more output of the command; fails if it must not be kept.
    pub(super) fn add(&mut self, bytes: usize) -> Result<(), AgentError> {
        self.0 += bytes;
        let by_all = KEPT_BY_ALL.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if self.0 > MAX_OUTPUT {
            return Err(AgentError::TooMuchOutput);
        }
        if by_all > MAX_KEPT && self.0 > ALWAYS_KEPT {
            return Err(AgentError::TooMuchOfAll);
        }
        Ok(())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        KEPT_BY_ALL.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// What a streamed command did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamEvent {
    /// The command wrote these bytes. After they are passed on, call
    /// [`StreamedCommand::passed_on`](super::StreamedCommand::passed_on).
    Output(OutputStream, Vec<u8>),
    /// So many bytes more may be sent to [`StreamedCommand::input`](super::StreamedCommand::input),
    /// beside the first 128 KiB ([`INPUT_WINDOW`](memfold_wire::agent::INPUT_WINDOW)).
    InputRoom(u32),
    /// The command has ended with this exit code; no event follows.
    Exited(i32),
    /// The guest's owner does not allow the command, which was not started; no event follows.
    NotAllowed(Permission),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_one_command_and_that_of_all_together_are_limited() {
        let mut first = Kept::default();
        first.add(MAX_OUTPUT).unwrap();
        assert!(matches!(first.add(1), Err(AgentError::TooMuchOutput)));
        drop(first);
        let most = MAX_KEPT / MAX_OUTPUT;
        let mut all: Vec<Kept> = (0..most).map(|_| Kept::default()).collect();
        for kept in &mut all {
            kept.add(MAX_OUTPUT).unwrap();
        }
        let mut next = Kept::default();
        next.add(ALWAYS_KEPT).unwrap();
        assert!(matches!(next.add(1), Err(AgentError::TooMuchOfAll)));
        all.pop();
        next.add(1).unwrap();
    }
}
