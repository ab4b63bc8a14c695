//! Errors of LVM's commands and of the iSCSI initiator, which put a swap volume on lent RAM.

use std::io;
use std::net::SocketAddr;

use super::volume::Volume;

/// Reason why a swap volume could not be moved to or from lent RAM: an error of LVM's tools or of
/// the iSCSI initiator.
#[derive(Debug, thiserror::Error)]
pub enum LvmError {
    /// A program that memfold needs is not installed.
    #[error("cannot run '{program}'; install it (apt install {package})")]
    Missing {
        /// Name of the program.
        program: &'static str,
        /// Debian package that contains the program.
        package: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A command of LVM or of the iSCSI initiator failed.
    #[error("'{command}' failed: {said}")]
    Failed {
        /// The command that failed, with its arguments.
        command: String,
        /// What the command wrote to its standard error.
        said: String,
    },
    /// A report of LVM cannot be parsed.
    #[error("cannot parse the report of '{command}' ({why}); LVM 2.02.158 or newer is needed")]
    Report {
        /// The command whose report is wrong, with its arguments.
        command: String,
        /// The missing or wrong part of the report.
        why: String,
    },
    /// The logical volume with this name does not exist.
    #[error("no logical volume {0}; 'lvs' lists all volumes")]
    NoVolume(Volume),
    /// The logical volume cannot be put on lent RAM.
    #[error("volume {volume} {why}")]
    Unfit {
        /// Name of the logical volume.
        volume: Volume,
        /// Property of the logical volume that does not allow lent RAM.
        why: String,
        /// What the operator can do so that the volume can be put on lent RAM.
        fix: String,
    },
    /// A file of the iSCSI initiator or of the kernel cannot be used.
    #[error("cannot use {path}, a file of the iSCSI initiator or of the kernel")]
    Files {
        /// Path of the file that cannot be used.
        path: std::path::PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The iSCSI initiator did not reach the lender, or the kernel found no disk there.
    #[error("cannot attach the iSCSI disk of {portal}: {why}")]
    Session {
        /// Address of the lender's export.
        portal: SocketAddr,
        /// Message of `iscsiadm`, or the step that exceeded its time limit.
        why: String,
    },
}

impl LvmError {
    /// Returns what the operator can do about the error, if the error message does not say so
    /// itself.
    #[must_use]
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Unfit { fix, .. } => Some(fix.clone()),
            Self::Session { .. } => Some(
                "check 'journalctl -u iscsid', the lender's log and the network between the hosts"
                    .into(),
            ),
            _ => None,
        }
    }
}
