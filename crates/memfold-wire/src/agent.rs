//! Protocol between the daemon and the guest agent.
//!
//! The agent speaks first, with [`FromAgent::Hello`], whenever the host side of its port opens.
//! Every Hello starts a new session and discards everything sent before. The daemon answers
//! [`ToAgent::Welcome`] and asks for an inventory. From then on the agent reports changes of its
//! page cache as they happen. If the host side closes and quickly opens again, the agent notices
//! late or, rarely, never, and may be in the middle of a frame. So a daemon that first receives
//! anything but a Hello closes its side, waits, and opens it again. Everything in [`FromAgent`] is
//! untrusted: the daemon checks it against the VM's RAM layout and budget, and the bytes themselves
//! are compared before any page is shared.
//!
//! The agent chooses file numbers ([`FileNumber`]), which are valid for one connection. It
//! introduces each with [`FromAgent::Files`] before a hint uses it.

use serde::{Deserialize, Serialize};

use crate::frame::{FrameError, Validate};

/// Version of this protocol. Both sides must have the same version; otherwise the older side needs
/// an update.
pub const VERSION: u16 = 1;

/// Name of the virtio-serial port (`/dev/virtio-ports/<name>` in the guest).
pub const PORT_NAME: &str = "org.memfold.agent.0";

/// Most runs, ranges or files in one message.
pub const MAX_RUNS: usize = 4096;

/// Most bytes of a path (Linux `PATH_MAX`).
pub const MAX_PATH: usize = 4096;

/// Most bytes of any other text, and of one message of command output.
pub const MAX_TEXT: usize = 64 << 10;

/// Longest run in pages: 1 GiB, the largest folio there is.
pub const MAX_RUN_PAGES: u32 = 1 << 18;

/// Number of a file, chosen by the agent and valid within one connection.
pub type FileNumber = u32;

/// Cached pages that are consecutive in the file and in guest-physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HintRun {
    /// File whose pages they cache.
    pub file: FileNumber,
    /// Index of the first page in the file, in pages.
    pub page: u64,
    /// Guest page frame of the first page.
    pub pfn: u64,
    /// Length in pages, 1 to [`MAX_RUN_PAGES`].
    pub pages: u32,
}

/// Consecutive guest page frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PfnRun {
    /// First page frame.
    pub pfn: u64,
    /// Length in pages, 1 to [`MAX_RUN_PAGES`].
    pub pages: u32,
}

/// Consecutive pages of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRange {
    /// File that contains the pages.
    pub file: FileNumber,
    /// Index of the first page in the file.
    pub page: u64,
    /// Length in pages, 1 to [`MAX_RUN_PAGES`].
    pub pages: u32,
}

/// Path and size of a file in the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFacts {
    /// Number that later hints use.
    pub file: FileNumber,
    /// Absolute path in the guest's root, not necessarily UTF-8; empty when it could not be found
    /// (file deleted, hidden by another mount).
    pub path: Vec<u8>,
    /// `st_size` in bytes at the time of the look-up; 0 with an empty path.
    pub size_bytes: u64,
}

/// Counters of the agent since its start. They are never reset while it lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentCounters {
    /// Ring-buffer events read.
    pub events: u64,
    /// Ring-buffer events that the kernel overwrote before they were read.
    pub events_lost: u64,
    /// Inventories made.
    pub inventories: u64,
    /// Files whose path was found.
    pub files_resolved: u64,
    /// Inodes whose path was not found.
    pub files_unresolved: u64,
    /// Pages left out by an include or exclude rule.
    pub pages_excluded: u64,
    /// CPU time of the agent process in microseconds (user and system).
    pub cpu_us: u64,
    /// Resident set of the agent process in bytes.
    pub rss_bytes: u64,
}

/// Stream of a command's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Messages from the agent to the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromAgent {
    /// First message of every session.
    Hello {
        /// [`VERSION`] of the agent.
        version: u16,
        /// The agent's package version.
        agent: String,
        /// `uname -r`.
        kernel: String,
        /// `/proc/sys/kernel/random/boot_id`, as text.
        boot_id: String,
        /// Host name.
        host_name: String,
        /// Conditions that keep the agent from parts of its work, as text; empty if there are none.
        problems: Vec<String>,
    },
    /// Introduces files that later messages refer to. A number may be sent again with a new path or
    /// size, when the file was renamed or has grown.
    Files(Vec<FileFacts>),
    /// Pages that are in the page cache now.
    Hints(Vec<HintRun>),
    /// Page frames that no longer cache a file page.
    Gone(Vec<PfnRun>),
    /// Cached pages that were written to. They must not be folded until they are offered again.
    Dirty(Vec<FileRange>),
    /// Cached pages that were written back to disk and may be folded again.
    Clean(Vec<FileRange>),
    /// Begin of an inventory. Earlier hints of this VM that are not repeated before its end are
    /// obsolete.
    InventoryBegin,
    /// End of an inventory.
    InventoryEnd {
        /// Files looked at.
        files: u64,
        /// Cached pages that were hinted.
        pages: u64,
    },
    /// Counters, at most once a second and only after a change, and as the answer to a ping.
    Counters(AgentCounters),
    /// Output of a command.
    Output {
        /// Number of the command.
        command: u32,
        /// Stream of the output.
        stream: OutputStream,
        /// Output, at most [`MAX_TEXT`] bytes.
        bytes: Vec<u8>,
    },
    /// End of a command.
    Exited {
        /// Number of the command.
        command: u32,
        /// Exit code; 128 + signal number if it was killed; 127, with a text on stderr, if it could
        /// not be started.
        code: i32,
    },
}

/// Messages from the daemon to the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToAgent {
    /// Answer to Hello: the agent may start to report.
    Welcome {
        /// [`VERSION`] of the daemon.
        version: u16,
        /// Globs of paths to report; empty means all.
        include: Vec<String>,
        /// Globs of paths to leave out, stronger than `include`.
        exclude: Vec<String>,
    },
    /// Refusal because the versions differ. The agent waits until the port is opened anew.
    Refused {
        /// Reason, for the guest's log.
        reason: String,
    },
    /// Asks for an inventory of everything that is cached now.
    Inventory,
    /// Asks for `Counters`.
    Ping,
    /// Runs `/bin/sh -c script`, with empty standard input.
    Run {
        /// Number of the command, chosen by the daemon.
        command: u32,
        /// Text for the shell.
        script: String,
    },
    /// Kills a running command and its children.
    Kill {
        /// Number of the command.
        command: u32,
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

impl Validate for FromAgent {
    fn validate(&self) -> Result<(), FrameError> {
        match self {
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
            Self::InventoryBegin
            | Self::InventoryEnd { .. }
            | Self::Counters(_)
            | Self::Exited { .. } => Ok(()),
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
            Self::Inventory | Self::Ping | Self::Kill { .. } => Ok(()),
        }
    }
}
