//! State of the main loop of the agent in the guest (connection, page cache, running commands), and
//! the functions that send messages to the daemon.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use memfold_wire::agent::{AgentCounters, FromAgent};

use crate::backoff::Backoff;
use crate::commands::Commands;
use crate::consent::Consent;
use crate::memory::{Reports, Trimmer};
use crate::page_cache::PageCache;
use crate::port::Port;
use crate::throttle::process_cpu;
use crate::trace::{Round, Tracer};
use crate::worker::Worker;

/// Shortest interval between two messages with counters that the daemon did not ask for.
const COUNTERS: Duration = Duration::from_secs(1);

/// Destination of messages.
pub(super) enum Sink {
    /// A virtio-serial port, from which the daemon reads.
    Port(Port),
    /// Standard output, as text.
    Text,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The host side of the port is closed. The next check is due at this time.
    Absent(Instant),
    /// Hello was sent; the daemon's answer is awaited until this time, then Hello is sent again.
    Waiting(Instant),
    /// The daemon refused this agent. The agent is silent until the daemon closes its side.
    Refused,
    /// Welcome was received; events are reported.
    Working,
}

/// State of the agent's main loop: the connection to the daemon, and the agent's knowledge of the
/// guest's page cache.
// The flags are independent of each other: any combination occurs.
#[allow(clippy::struct_excessive_bools)]
pub struct Agent {
    pub(super) signals: OwnedFd,
    pub(super) mountinfo: Option<File>,
    pub(super) statm: Option<File>,
    pub(super) sink: Sink,
    pub(super) state: State,
    /// Version of the protocol: of the next Hello, or of the session.
    pub(super) version: u16,
    pub(super) retry: Duration,
    /// Time to wait for the answer to the next Hello.
    pub(super) patience: Duration,
    /// Time of the last data from the host.
    pub(super) heard: Instant,
    /// Whether data came since the last poll began.
    pub(super) has_heard: bool,
    pub(super) tracer: Option<Tracer>,
    pub(super) problems: Vec<String>,
    pub(super) round: Round,
    /// Time at which waiting trace events are to be read; `None` if none wait.
    pub(super) gather: Option<Instant>,
    pub(super) busy: bool,
    pub(super) cache: PageCache,
    pub(super) worker: Worker,
    pub(super) commands: Commands,
    pub(super) consent: Consent,
    pub(super) inventory_running: bool,
    pub(super) inventory_wanted: bool,
    pub(super) repair: Backoff,
    pub(super) find: Backoff,
    pub(super) finding: bool,
    pub(super) counters_sent: (Instant, AgentCounters),
    /// Number of files that the daemon takes in one session.
    pub(super) most_files: u32,
    /// When the next session may begin although the connection lasts.
    pub(super) renewal: Backoff,
    pub(super) memory: Reports,
    pub(super) trimmer: Trimmer,
}

impl Agent {
    pub(super) fn has_room(&self) -> bool {
        match &self.sink {
            Sink::Port(port) => port.has_room(),
            Sink::Text => true,
        }
    }

    pub(super) fn has_room_for_answer(&self) -> bool {
        match &self.sink {
            Sink::Port(port) => port.has_room_for_answer(),
            Sink::Text => true,
        }
    }

    pub(super) fn say(&mut self, message: &FromAgent) -> bool {
        match &mut self.sink {
            Sink::Port(port) => {
                // Sending a part of the queue makes space for the message.
                port.push(message) || (port.send().is_ok() && port.push(message))
            }
            Sink::Text => {
                print(message);
                true
            }
        }
    }

    /// Returns when the counters are to be sent; `None` if they have not changed. If the daemon
    /// wants memory figures, the counters wait for these, so that the guest does not wake up for
    /// the counters alone.
    pub(super) fn counters_due(&self) -> Option<Instant> {
        let sent = &self.counters_sent;
        let soonest = sent.0 + COUNTERS;
        let due = self.memory.due().map_or(soonest, |due| due.max(soonest));
        (self.cache.counters != sent.1).then_some(due)
    }

    pub(super) fn say_counters(&mut self, asked: bool) {
        if !asked && self.counters_due().is_none_or(|due| due > Instant::now()) {
            return;
        }
        let message = FromAgent::Counters(AgentCounters {
            cpu_us: u64::try_from(process_cpu().as_micros()).unwrap_or(u64::MAX),
            rss_bytes: resident_bytes(self.statm.as_ref()),
            ..self.cache.counters
        });
        self.counters_sent = (Instant::now(), self.cache.counters);
        self.say(&message);
    }
}

/// Prints a message as one line, with paths as text.
fn print(message: &FromAgent) {
    match message {
        FromAgent::Files(files) => {
            for f in files {
                let path = String::from_utf8_lossy(&f.path);
                println!("File {} {} bytes {path:?}", f.file, f.size_bytes);
            }
        }
        other => println!("{other:?}"),
    }
}

/// Returns the resident set of this process in bytes (`proc_pid_statm(5)`: the second field, in
/// pages). `statm` is that file.
fn resident_bytes(statm: Option<&File>) -> u64 {
    let mut buffer = [0; 128];
    let length = statm.and_then(|file| file.read_at(&mut buffer, 0).ok());
    let text = String::from_utf8_lossy(&buffer[..length.unwrap_or(0)]);
    let pages = text
        .split_whitespace()
        .nth(1)
        .and_then(|f| f.parse::<u64>().ok());
    pages.unwrap_or(0) * memfold_units::PAGE_SIZE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resident_memory_of_the_agent_is_read_again_from_the_open_file() {
        let statm = File::open("/proc/self/statm").unwrap();
        for _ in 0..2 {
            assert!(resident_bytes(Some(&statm)) >= 1 << 16);
        }
        assert_eq!(resident_bytes(None), 0);
    }
}
