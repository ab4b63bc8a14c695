//! Protocol between the daemon and the guest agent, over a virtio-serial port.
//!
//! The agent sends [`FromAgent::Hello`] whenever the host side of the port opens. Each Hello starts
//! a new session: the daemon discards all that it received before. The daemon answers with
//! [`ToAgent::Welcome`] and asks for an inventory: hints for all pages that are in the guest's page
//! cache now. From then on, the agent reports changes of the page cache as they happen.
//!
//! If the daemon closes its side of the port and quickly opens it again, the agent may not notice
//! this, and sends no Hello. So if the first message that the daemon receives is not a Hello, the
//! daemon closes its side, waits, and opens it again.
//!
//! A *hint* says that a *run* of guest pages caches consecutive pages of a file. Everything in
//! [`FromAgent`] is untrusted: the daemon checks each hint against the VM's RAM layout and budget,
//! and the bytes of the pages are compared before any page is shared.
//!
//! The agent chooses file numbers ([`FileNumber`]), which are valid for one connection. The agent
//! introduces each number with [`FromAgent::Files`] before a hint uses the number.

use serde::{Deserialize, Serialize};

use crate::frame::{FrameError, Validate};
use crate::memory::{self, MemoryReading, TrimOrder, TrimResult};
use crate::order::GuestOrder;
use crate::permission::MAX_WORDS;

/// Newest version of the protocol between the daemon and the guest agent. A session has the older
/// one of the two sides' newest versions: [`ToAgent::Welcome`] tells it to the agent. Neither side
/// sends a message that the session's version does not have.
///
/// | version | new messages |
/// |---|---|
/// | 1 | |
/// | 2 | streamed commands, from [`ToAgent::Stream`] on, and [`FromAgent::InputRoom`] |
/// | 3 | orders ([`ToAgent::Order`], [`ToAgent::StreamOrder`]) and what the guest's owner allows ([`FromAgent::Allowed`], [`FromAgent::NotAllowed`]) |
pub const VERSION: u16 = 3;

/// Oldest version of the protocol that both sides still speak.
pub const OLDEST_VERSION: u16 = 1;

/// First version of the protocol that has streamed commands ([`ToAgent::Stream`]).
pub const STREAMS_VERSION: u16 = 2;

/// First version of the protocol that has orders ([`ToAgent::Order`]) and tells what the guest's
/// owner allows. Agents of older versions allow everything.
pub const ORDERS_VERSION: u16 = 3;

/// Name of the virtio-serial port between the agent and the daemon (`/dev/virtio-ports/<name>` in
/// the guest).
pub const PORT_NAME: &str = "org.memfold.agent.0";

/// Maximum number of runs, ranges or files in one message between agent and daemon.
pub const MAX_RUNS: usize = 4096;

/// Number of files that every agent may introduce in one session. An agent may introduce one more
/// for each page of the VM's RAM ([`max_files`]). The daemon ignores files beyond that, so an agent
/// begins a new session before.
pub const MIN_FILES: u32 = 1 << 16;

/// Maximum number of files that an agent may introduce in one session, however large the VM's RAM
/// is.
const MAX_FILES: u32 = 1 << 20;

/// Returns the number of files that the agent of a VM with `ram_pages` pages of RAM may introduce
/// in one session, 2^16 to 2^20.
#[must_use]
pub fn max_files(ram_pages: u32) -> u32 {
    MIN_FILES.saturating_add(ram_pages).min(MAX_FILES)
}

/// Maximum length of a file's path in a message, in bytes (Linux `PATH_MAX`).
pub const MAX_PATH: usize = 4096;

/// Maximum length in bytes of a text that is not a path, and of the command output in one message.
pub const MAX_TEXT: usize = 64 << 10;

/// Maximum number of problems in [`FromAgent::Hello`].
pub const MAX_PROBLEMS: usize = 64;

/// Maximum number of bytes of a streamed command's standard input in one message.
pub const MAX_INPUT: usize = 16 << 10;

/// Number of bytes of standard input that the daemon may send to a streamed command before the
/// agent allows more by [`FromAgent::InputRoom`]. The agent keeps at most so many bytes.
pub const INPUT_WINDOW: usize = 128 << 10;

/// Cost of the output that the agent may send from a streamed command before the daemon allows more
/// by [`ToAgent::OutputRoom`]. The daemon keeps at most so much.
pub const OUTPUT_WINDOW: usize = 256 << 10;

/// Cost of a message with output of a streamed command, in addition to its bytes: also many short
/// messages take little memory.
pub const OUTPUT_COST: usize = 128;

/// Maximum number of streamed commands that run at the same time in a guest.
pub const MAX_STREAMS: usize = 16;

/// Maximum length of a run in pages: 2^18 pages are 1 GiB, the size of the largest folio.
pub const MAX_RUN_PAGES: u32 = 1 << 18;

/// Number of a file in the guest, chosen by the agent and valid within one connection.
pub type FileNumber = u32;

/// Pages of the guest's page cache that are consecutive in a file and in guest-physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HintRun {
    /// Number of the file whose pages the run's frames cache.
    pub file: FileNumber,
    /// Position in the file of the run's first page, in pages.
    pub page: u64,
    /// Guest page frame number of the run's first page.
    pub pfn: u64,
    /// Length of the run in pages, 1 to [`MAX_RUN_PAGES`].
    pub pages: u32,
}

/// A run of consecutive guest page frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PfnRun {
    /// Guest page frame number of the run's first frame.
    pub pfn: u64,
    /// Length of the run in page frames, 1 to [`MAX_RUN_PAGES`].
    pub pages: u32,
}

/// Consecutive pages of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRange {
    /// Number of the file that contains the range.
    pub file: FileNumber,
    /// Position in the file of the range's first page, in pages.
    pub page: u64,
    /// Length of the range in pages, 1 to [`MAX_RUN_PAGES`].
    pub pages: u32,
}

/// Path and size of a file in the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFacts {
    /// Number by which later hints name the file.
    pub file: FileNumber,
    /// Absolute path of the file in the guest, not necessarily UTF-8. The path is empty if the
    /// agent found none, because the file is deleted or hidden by another mount.
    pub path: Vec<u8>,
    /// Size of the file in bytes (`st_size`) when the agent looked the file up; 0 with an empty
    /// path.
    pub size_bytes: u64,
}

/// Counters of the guest agent since its start. The agent never resets a counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentCounters {
    /// Number of page cache events that the agent read from the kernel's trace ring buffers.
    pub events: u64,
    /// Number of page cache events that the kernel overwrote before the agent read them.
    pub events_lost: u64,
    /// Number of inventories of the guest's page cache that the agent has made.
    pub inventories: u64,
    /// Number of files whose path the agent found.
    pub files_resolved: u64,
    /// Number of inodes whose path the agent did not find.
    pub files_unresolved: u64,
    /// Number of cached pages that the agent did not report because of an include or exclude rule.
    pub pages_excluded: u64,
    /// CPU time of the agent process in microseconds (user and system).
    pub cpu_us: u64,
    /// Resident set of the agent process in bytes.
    pub rss_bytes: u64,
}

/// Stream of a command's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OutputStream {
    /// Standard output of the command.
    Stdout,
    /// Standard error of the command.
    Stderr,
}

/// Size of a terminal in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Number of rows.
    pub rows: u16,
    /// Number of columns.
    pub columns: u16,
}

/// Terminal in which a streamed command runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terminal {
    /// Type of the terminal, for the environment variable `TERM`.
    pub kind: String,
    /// Size of the terminal at the command's start.
    pub size: TerminalSize,
}

/// Messages from the agent to the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromAgent {
    /// First message of every session.
    Hello {
        /// [`VERSION`] of the agent; [`OLDEST_VERSION`] after a [`ToAgent::Refused`].
        version: u16,
        /// Package version of the agent.
        agent: String,
        /// Release of the guest's kernel (`uname -r`).
        kernel: String,
        /// Boot ID of the guest as text (`/proc/sys/kernel/random/boot_id`).
        boot_id: String,
        /// Host name of the guest.
        host_name: String,
        /// Conditions that keep the agent from parts of its work, as text for people; empty if the
        /// agent can do all of its work. At most [`MAX_PROBLEMS`].
        problems: Vec<String>,
    },
    /// Introduces files that later messages refer to. The agent sends a number again, with a new
    /// path or size, when the file was renamed or has grown.
    Files(Vec<FileFacts>),
    /// Hints: pages of files that are in the page cache now.
    Hints(Vec<HintRun>),
    /// Page frames that no longer hold a page of a file.
    Gone(Vec<PfnRun>),
    /// Cached pages that the guest wrote to. The daemon must not fold these pages until the agent
    /// hints them again.
    Dirty(Vec<FileRange>),
    /// Cached pages that were written back to disk and may be folded again.
    Clean(Vec<FileRange>),
    /// Begin of an inventory of the page cache. When the inventory ends, earlier hints of this VM
    /// that the inventory did not repeat are obsolete.
    InventoryBegin,
    /// End of an inventory of the page cache.
    InventoryEnd {
        /// Number of files that the agent examined for the inventory.
        files: u64,
        /// Number of cached pages that the agent reported for the inventory.
        pages: u64,
    },
    /// Counters of the agent. The agent sends this message after a change, at most once a second
    /// (when [`Self::Memory`] is due, if the daemon wants that), and as the answer to
    /// [`ToAgent::Ping`].
    Counters(AgentCounters),
    /// Output of a command that the daemon started with [`ToAgent::Run`] or [`ToAgent::Stream`].
    Output {
        /// Number of the command, from [`ToAgent::Run`] or [`ToAgent::Stream`].
        command: u32,
        /// Stream to which the command wrote: standard output or standard error. What a command
        /// writes to its terminal is standard output.
        stream: OutputStream,
        /// Bytes that the command wrote, at most [`MAX_TEXT`].
        bytes: Vec<u8>,
    },
    /// End of a command that the daemon started with [`ToAgent::Run`] or [`ToAgent::Stream`].
    Exited {
        /// Number of the command, from [`ToAgent::Run`] or [`ToAgent::Stream`].
        command: u32,
        /// Exit code of the command: 128 + signal number if a signal killed the command; 127, with
        /// a text on stderr, if the agent could not start the command.
        code: i32,
    },
    /// Allows the daemon to send more standard input to a streamed command (version 2).
    InputRoom {
        /// Number of the command, from [`ToAgent::Stream`].
        command: u32,
        /// Number of bytes that the command has taken since the last such message.
        bytes: u32,
    },
    /// Figures of the guest's memory, as often as [`ToAgent::ReportMemory`] asks. While they do not
    /// change, the agent may leave messages out for up to 7 s.
    Memory(Box<MemoryReading>),
    /// End of a trim that the daemon ordered with [`ToAgent::Trim`].
    Trimmed(TrimResult),
    /// What the guest's owner allows the daemon (version 3): first message after
    /// [`ToAgent::Welcome`].
    Allowed {
        /// Words of the permissions ([`Permission::word`](crate::permission::Permission::word)).
        words: Vec<String>,
    },
    /// The guest's owner does not allow a command or an order (version 3). It was not started, and
    /// no other message about it follows.
    NotAllowed {
        /// Number of the command or order.
        command: u32,
        /// Word of the permission that it needs.
        word: String,
    },
}

/// Messages from the daemon to the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToAgent {
    /// Answer to [`FromAgent::Hello`]: the agent may start to report.
    Welcome {
        /// Version of the session: at most the agent's and at most the daemon's [`VERSION`].
        version: u16,
        /// Globs for the paths of files that the agent reports; an empty list means all files.
        include: Vec<String>,
        /// Globs for the paths of files that the agent does not report. An exclude glob wins over
        /// an include glob.
        exclude: Vec<String>,
    },
    /// Refusal of the session because of the agent's version. An agent that speaks older versions,
    /// too, sends a Hello with [`OLDEST_VERSION`]: a daemon of version 1 refuses newer agents. Any
    /// other agent waits until the host side opens the port anew.
    Refused {
        /// Reason of the refusal, for the guest's log.
        reason: String,
    },
    /// Asks for an inventory: hints for all pages that are in the page cache now.
    Inventory,
    /// Asks for [`FromAgent::Counters`].
    Ping,
    /// Runs `/bin/sh -c script`, with empty standard input.
    Run {
        /// Number of the command, chosen by the daemon, by which later messages name the command.
        command: u32,
        /// Shell script that the guest runs.
        script: String,
    },
    /// Kills a command that [`ToAgent::Run`] started, and its children.
    Kill {
        /// Number of the command, from [`ToAgent::Run`].
        command: u32,
    },
    /// Runs `/bin/sh -c script` as a streamed command (version 2): input and output are sent while
    /// the command runs. The command leads a session of its own (`setsid(2)`).
    Stream {
        /// Number of the command, chosen by the daemon, by which later messages name the command.
        command: u32,
        /// Shell script that the guest runs.
        script: String,
        /// Whether the daemon will send standard input; otherwise the input is empty.
        has_input: bool,
        /// Terminal of the command; `None`: the command has pipes.
        terminal: Option<Terminal>,
    },
    /// Standard input for a streamed command (version 2), within [`INPUT_WINDOW`].
    Input {
        /// Number of the command, from [`ToAgent::Stream`].
        command: u32,
        /// Bytes for the command to read, at most [`MAX_INPUT`].
        bytes: Vec<u8>,
    },
    /// End of a streamed command's standard input (version 2).
    EndInput {
        /// Number of the command, from [`ToAgent::Stream`].
        command: u32,
    },
    /// Allows the agent to send more output of a streamed command (version 2).
    OutputRoom {
        /// Number of the command, from [`ToAgent::Stream`].
        command: u32,
        /// Cost of the output that the daemon has passed on since the last such message.
        cost: u32,
    },
    /// New size of a streamed command's terminal (version 2).
    Resize {
        /// Number of the command, from [`ToAgent::Stream`].
        command: u32,
        /// Size of the terminal from now on.
        size: TerminalSize,
    },
    /// Sends a signal to a streamed command's process group, or to the foreground process group of
    /// its terminal (version 2).
    Signal {
        /// Number of the command, from [`ToAgent::Stream`].
        command: u32,
        /// Number of the signal in Linux (`signal(7)`).
        signal: u8,
    },
    /// Ends a streamed command whose client is gone (version 2): all processes of its session get
    /// `SIGHUP`, and `SIGKILL` two seconds later. The agent sends no more about this command.
    HangUp {
        /// Number of the command, from [`ToAgent::Stream`].
        command: u32,
    },
    /// Asks for [`FromAgent::Memory`] at this interval, from now on. Only for agents with
    /// [`memory::FEATURE`].
    ReportMemory {
        /// Interval in milliseconds, at least [`memory::MIN_INTERVAL_MS`]; 0 ends the reports.
        interval_ms: u32,
    },
    /// Orders to trim the guest's page cache. Only for agents with [`memory::FEATURE`].
    Trim(TrimOrder),
    /// Carries out an order, with empty standard input (version 3). Output, end and
    /// [`Self::Kill`] are those of a command.
    Order {
        /// Number by which later messages name the order: that of a command.
        command: u32,
        /// What the guest does.
        order: GuestOrder,
    },
    /// Carries out an order as a streamed command with pipes (version 3).
    StreamOrder {
        /// Number by which later messages name the order: that of a streamed command.
        command: u32,
        /// What the guest does.
        order: GuestOrder,
        /// Whether the daemon will send standard input; otherwise the input is empty.
        has_input: bool,
    },
}

fn runs(pages: impl IntoIterator<Item = u32>, count: usize) -> Result<(), FrameError> {
    if count > MAX_RUNS {
        return Err(FrameError::Limit("more than 4096 runs in a message"));
    }
    if pages.into_iter().any(|n| n == 0 || n > MAX_RUN_PAGES) {
        return Err(FrameError::Limit("a run of zero or more than 2^18 pages"));
    }
    Ok(())
}

fn text(length: usize) -> Result<(), FrameError> {
    if length > MAX_TEXT {
        Err(FrameError::Limit("a text of more than 64 KiB"))
    } else {
        Ok(())
    }
}

fn permission(word: &str) -> Result<(), FrameError> {
    if word.len() > MAX_WORDS.1 {
        Err(FrameError::Limit("a permission of more than 64 bytes"))
    } else {
        Ok(())
    }
}

impl Validate for FromAgent {
    fn validate(&self) -> Result<(), FrameError> {
        match self {
            Self::Hello { problems, .. } if problems.len() > MAX_PROBLEMS => {
                Err(FrameError::Limit("more than 64 problems"))
            }
            Self::Hello {
                agent,
                kernel,
                boot_id,
                host_name,
                problems,
                ..
            } => [agent, kernel, boot_id, host_name]
                .into_iter()
                .chain(problems)
                .try_for_each(|t| text(t.len())),
            Self::Files(files) => {
                runs([], files.len())?;
                if files.iter().any(|f| f.path.len() > MAX_PATH) {
                    return Err(FrameError::Limit("a path of more than 4096 bytes"));
                }
                Ok(())
            }
            Self::Hints(list) => runs(list.iter().map(|r| r.pages), list.len()),
            Self::Gone(list) => runs(list.iter().map(|r| r.pages), list.len()),
            Self::Dirty(list) | Self::Clean(list) => runs(list.iter().map(|r| r.pages), list.len()),
            Self::Output { bytes, .. } => text(bytes.len()),
            Self::Allowed { words } if words.len() > MAX_WORDS.0 => {
                Err(FrameError::Limit("more than 64 permissions"))
            }
            Self::Allowed { words } => words.iter().try_for_each(|word| permission(word)),
            Self::NotAllowed { word, .. } => permission(word),
            Self::InventoryBegin
            | Self::InventoryEnd { .. }
            | Self::Counters(_)
            | Self::Exited { .. }
            | Self::InputRoom { .. }
            | Self::Memory(_)
            | Self::Trimmed(_) => Ok(()),
        }
    }
}

impl Validate for ToAgent {
    fn validate(&self) -> Result<(), FrameError> {
        match self {
            Self::Welcome {
                include, exclude, ..
            } => {
                runs([], include.len())?;
                runs([], exclude.len())
            }
            Self::Refused { reason } => text(reason.len()),
            Self::Run { script, .. } => text(script.len()),
            Self::Stream {
                script, terminal, ..
            } => {
                text(script.len())?;
                text(terminal.as_ref().map_or(0, |terminal| terminal.kind.len()))
            }
            Self::Input { bytes, .. } if bytes.len() > MAX_INPUT => {
                Err(FrameError::Limit("input of more than 16 KiB"))
            }
            Self::Inventory
            | Self::Ping
            | Self::Kill { .. }
            | Self::Input { .. }
            | Self::EndInput { .. }
            | Self::OutputRoom { .. }
            | Self::Resize { .. }
            | Self::Signal { .. }
            | Self::HangUp { .. }
            | Self::Trim(_) => Ok(()),
            Self::ReportMemory { interval_ms } => memory::validate_interval(*interval_ms),
            Self::Order { order, .. } | Self::StreamOrder { order, .. } => order.validate(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{HEADER, decode_body, encode};

    #[test]
    fn a_hello_with_more_than_64_problems_does_not_decode() {
        let decoded = |problems: usize| {
            let hello = FromAgent::Hello {
                version: VERSION,
                agent: "0.1.0".into(),
                kernel: "6.12.0".into(),
                boot_id: String::new(),
                host_name: "guest".into(),
                problems: vec!["no trace events".into(); problems],
            };
            let frame = encode(&hello).unwrap();
            decode_body::<FromAgent>(&frame[HEADER..])
        };
        assert!(decoded(MAX_PROBLEMS).is_ok());
        let error = decoded(65).unwrap_err();
        assert!(matches!(error, FrameError::Limit("more than 64 problems")));
    }

    #[test]
    fn the_number_of_files_grows_with_the_ram_of_the_guest_and_has_an_upper_limit() {
        assert_eq!(max_files(0), 1 << 16);
        assert_eq!(max_files(1 << 18), (1 << 16) + (1 << 18));
        assert_eq!(max_files(1 << 24), 1 << 20);
        assert_eq!(max_files(u32::MAX), 1 << 20);
    }
}
