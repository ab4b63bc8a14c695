//! Orders that the daemon gives to the guest agent. An order says what is to be done, and the agent
//! itself knows the commands for it. So an order can do nothing else than its name says, and the
//! agent refuses what the guest's owner does not allow ([`Permission`]).
//!
//! ```text
//!   daemon: GuestOrder --> wire --> agent: validate, permission --> script() --> /bin/sh -c
//!                       \-> agent older than version 3: the daemon sends script() as a command
//! ```
//! Every text that becomes a part of a script is checked by [`GuestOrder::validate`], also in the
//! guest: it contains only characters that the shell does not interpret, or is quoted.

mod paths;
mod scripts;

use serde::{Deserialize, Serialize};

use crate::frame::FrameError;
use crate::permission::Permission;

pub use self::paths::PathList;

/// Serial number of a VM's swap disk in the guest, and label of the swap space on it.
pub const SWAP_SERIAL: &str = "memfold-swap";

/// Serial number of the disk to which a guest copies files for a segment.
pub const COPY_SERIAL: &str = "memfold-copy";

/// Prefix of the mount source of an overlay that shows a segment over a directory of the guest.
pub const LAID_SOURCE: &str = "memfold:";

/// Exit code of [`GuestOrder::DropCaches`] if the time was too short.
pub const DROP_LATE: i32 = 3;

/// Last line of the output of [`GuestOrder::Renew`].
pub const RENEWED: &str = "end";

/// Maximum length of the texts in one order, in bytes.
const MAX_ORDER_TEXT: usize = 32 << 10;

/// Nanoseconds in a second.
pub(crate) const SECOND: i128 = 1_000_000_000;

/// New identities for a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewIdentities {
    /// Seed for the guest's random numbers: 64 hexadecimal digits.
    pub seed: String,
    /// MAC addresses of the network cards; `None`: the guest keeps its addresses.
    pub network: Option<NewAddresses>,
    /// Names of the guest; `None`: the guest keeps host name, machine ID and SSH host keys.
    pub names: Option<NewNames>,
}

/// New MAC addresses for a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewAddresses {
    /// Last three bytes of the first card's address; further cards count up.
    pub mac: u32,
    /// Number of network cards, for which the guest waits.
    pub cards: u32,
}

/// New names for a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewNames {
    /// Host name: letters, digits, dots and hyphens.
    pub host_name: String,
    /// Machine ID: 32 hexadecimal digits.
    pub machine_id: String,
}

/// What the daemon tells the agent to do. The agent runs a shell script of its own for it, whose
/// output and exit code are those of a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GuestOrder {
    /// Prints the guest's boot ID.
    BootId,
    /// Waits until systemd has started everything, and prints its state. Fails if the state is
    /// neither `running` nor `degraded`.
    WaitBooted,
    /// Succeeds if the guest's kernel has found the VM generation ID that QEMU offers.
    HasGenerationId,
    /// Prints the free page frames: first frame and number of frames, a run on each line.
    ListFreePages,
    /// Prints where files are on the guest's disks (`memfold-agent --extents`).
    ListExtents(PathList),
    /// Prints `/proc/meminfo`.
    MemoryInfo,
    /// Prints the swap disk's line of `/proc/swaps`; fails if there is none.
    SwapUse,
    /// Prints the mounted segments as JSON.
    ListSegments,
    /// Writes dirty pages to the disks.
    Sync,
    /// Drops the page cache of these files, in this order, for at most the time; then the other
    /// caches, if the time was long enough ([`DROP_LATE`]).
    DropCaches {
        /// Files that are dropped first.
        files: PathList,
        /// Time limit in milliseconds.
        limit_ms: u32,
    },
    /// Drops the clean page cache.
    DropClean,
    /// Turns the agent's trace events on again after an interrupted [`Self::DropCaches`].
    ResumeTrace,
    /// Prints the guest's time: seconds since 1970, with nine decimals if its `date` has them.
    ReadClock,
    /// Corrects the guest's clock.
    StepClock {
        /// Nanoseconds that are added to the clock.
        behind_ns: i128,
        /// Time of the host in seconds since 1970, for a guest whose `date` knows only seconds.
        now_s: i128,
    },
    /// Corrects the guest's hardware clock (RTC) if it is wrong by more than 2 s.
    SetRtc,
    /// Renews identities. The output has a line for each, and ends with [`RENEWED`].
    Renew(NewIdentities),
    /// Activates the swap disk, unless it is active.
    SwapOn,
    /// Mounts a segment over the guest's files.
    MountSegment {
        /// Name of the segment, with its generation.
        name: String,
        /// Whether all bytes of the files are compared first.
        content: bool,
    },
    /// Unmounts a segment, whatever its generation.
    UnmountSegment {
        /// Name of the segment, without generation.
        base: String,
    },
    /// Shuts the guest down.
    PowerOff,
    /// Reboots the guest after 0.3 s, so that the result still reaches the daemon.
    Reboot,
    /// Copies directories and files to the disk with the serial number [`COPY_SERIAL`], also those
    /// over which a segment is mounted.
    CopyToDisk {
        /// Absolute paths of the directories and files.
        tops: Vec<String>,
    },
    /// Writes a file or directory to standard output, as an archive.
    SendArchive {
        /// Path of the file or directory.
        path: String,
    },
    /// Writes a file to standard output.
    SendFile {
        /// Path of the file.
        path: String,
    },
    /// Makes a file or directory from the archive on standard input.
    ReceiveArchive {
        /// Name of the copy if the destination is a directory.
        name: String,
        /// Path of the copy, or of the directory for it.
        destination: String,
    },
}

impl GuestOrder {
    /// Returns the permission that the order needs.
    #[must_use]
    pub const fn permission(&self) -> Permission {
        match self {
            Self::BootId
            | Self::WaitBooted
            | Self::HasGenerationId
            | Self::ListFreePages
            | Self::ListExtents(_)
            | Self::MemoryInfo
            | Self::SwapUse
            | Self::ListSegments => Permission::Inspect,
            Self::Sync => Permission::Sync,
            Self::DropCaches { .. } | Self::DropClean | Self::ResumeTrace => Permission::DropCaches,
            Self::ReadClock | Self::StepClock { .. } | Self::SetRtc => Permission::Clock,
            Self::Renew(_) => Permission::Identity,
            Self::SwapOn => Permission::Swap,
            Self::MountSegment { .. } | Self::UnmountSegment { .. } => Permission::Segments,
            Self::PowerOff | Self::Reboot => Permission::Power,
            Self::CopyToDisk { .. }
            | Self::SendArchive { .. }
            | Self::SendFile { .. }
            | Self::ReceiveArchive { .. } => Permission::Copy,
        }
    }

    /// Checks each text that becomes a part of a script.
    pub(crate) fn validate(&self) -> Result<(), FrameError> {
        let refused = |what| Err(FrameError::Limit(what));
        match self {
            Self::ListExtents(files) | Self::DropCaches { files, .. } => files.validate(),
            Self::Renew(new) => {
                let is_hex = |text: &str, digits| {
                    text.len() == digits && text.bytes().all(|b| b.is_ascii_hexdigit())
                };
                let has_names = new.names.as_ref().is_none_or(|names| {
                    is_hex(&names.machine_id, 32) && is_word(&names.host_name, b".-")
                });
                if is_hex(&new.seed, 64) && has_names {
                    Ok(())
                } else {
                    refused("an identity with other characters than its kind has")
                }
            }
            Self::MountSegment { name: segment, .. } | Self::UnmountSegment { base: segment } => {
                if is_word(segment, b"._@+-") {
                    Ok(())
                } else {
                    refused("a segment's name with other characters than names have")
                }
            }
            Self::CopyToDisk { tops } => quotable(tops),
            Self::SendArchive { path } | Self::SendFile { path } => quotable([path]),
            Self::ReceiveArchive { name, destination } => quotable([name, destination]),
            _ => Ok(()),
        }
    }
}

/// Returns whether a text has only letters, digits and `others`, and does not look like an option.
fn is_word(text: &str, others: &[u8]) -> bool {
    let is_fine = |b: u8| b.is_ascii_alphanumeric() || others.contains(&b);
    (1..=255).contains(&text.len()) && !text.starts_with('-') && text.bytes().all(is_fine)
}

fn quotable<'a>(texts: impl IntoIterator<Item = &'a String>) -> Result<(), FrameError> {
    let mut length = 0;
    for text in texts {
        // A quote takes three more bytes in quotes.
        length += text.len() + 3 * text.matches('\'').count() + 3;
        if text.contains('\0') {
            return Err(FrameError::Limit("a path with a zero byte"));
        }
    }
    if length > MAX_ORDER_TEXT {
        return Err(FrameError::Limit("paths of more than 32 KiB"));
    }
    Ok(())
}
