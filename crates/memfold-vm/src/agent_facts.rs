//! What a link to a guest's agent is started with, and what it tells: events, the guest's facts,
//! and counters.

use memfold_wire::agent::FromAgent;
use serde::Serialize;

/// Which paths a guest's agent reports, and how much it may send.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    /// Glob patterns of the paths in the guest that the agent reports; empty: all paths.
    pub include: Vec<String>,
    /// Glob patterns of the paths in the guest that the agent does not report.
    pub exclude: Vec<String>,
    /// Most bytes per second that the daemon reads from the agent. Beyond this limit, the guest
    /// waits.
    pub max_bytes_per_s: u32,
    /// Most pages per second that the agent's messages may name. Beyond this limit, the guest
    /// waits. A message that makes the daemon rebuild tables counts as many pages.
    pub max_pages_per_s: u32,
    /// Interval at which the agent reports the guest's memory figures, in milliseconds, at least
    /// 100; 0: never. While the figures do not change, the agent leaves reports out for up to 7 s.
    pub memory_interval_ms: u32,
}

impl Default for AgentOptions {
    fn default() -> Self {
        Self {
            include: Vec::new(),
            exclude: Vec::new(),
            max_bytes_per_s: 16 << 20,
            // A gigabyte of page cache a second.
            max_pages_per_s: 1 << 18,
            memory_interval_ms: 2000,
        }
    }
}

/// What the agent said about itself and its guest in its first message of a session (Hello).
/// Untrusted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AgentFacts {
    /// Package version of the agent, as the agent reports it.
    pub agent: String,
    /// Version of the guest's kernel (`uname -r`).
    pub kernel: String,
    /// Boot ID of the guest: a random UUID that the guest's kernel makes at each boot.
    pub boot_id: String,
    /// Host name of the guest.
    pub host_name: String,
    /// Conditions in the guest that prevent parts of the agent's work, each as a text for the
    /// operator.
    pub problems: Vec<String>,
}

/// Events that an agent link passes to its callback (the sink), in the order in which they happen.
#[derive(Clone, Debug, PartialEq)]
pub enum AgentEvent {
    /// A session with the agent began. File numbers and hints of earlier sessions are no longer
    /// valid.
    Session(AgentFacts),
    /// The agent sent a message in the current session; none that answers a command or a trim, and
    /// neither `Hello` nor `Allowed`.
    Message(FromAgent),
    /// The connection to the agent ended. The link connects again without the caller's help.
    Lost {
        /// Why the connection ended, as a text for the operator.
        reason: String,
    },
}

/// Counters of an agent link since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AgentStats {
    /// Bytes that the link read from the agent.
    pub bytes: u64,
    /// Number of the agent's messages that the link decoded.
    pub messages: u64,
    /// Number of sessions with the agent: how often the agent sent a valid Hello.
    pub sessions: u64,
    /// Number of connections that the link closed because the guest broke the protocol.
    pub protocol_errors: u64,
    /// Number of the agent's messages that the link dropped, because they came outside a session or
    /// belonged to no running command.
    pub dropped: u64,
    /// How often the link stopped reading because the guest exceeded its limits.
    pub throttled: u64,
}
