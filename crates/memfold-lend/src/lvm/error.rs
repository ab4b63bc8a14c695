//! Errors of LVM's tools and of the iSCSI initiator.

use std::io;
use std::net::SocketAddr;

use super::volume::Volume;

/// An error of LVM's tools or of the iSCSI initiator.
#[derive(Debug, thiserror::Error)]
pub enum LvmError {
    /// A program isn't there.
    #[error("cannot run '{program}'; install it (apt install {package})")]
    Missing {
        /// Which.
        program: &'static str,
        /// What has it.
        package: &'static str,
        /// From the kernel.
        #[source]
        source: io::Error,
    },
    /// A command failed.
    #[error("'{command}' failed: {said}")]
    Failed {
        /// With its arguments.
        command: String,
        /// What it said.
        said: String,
    },
    /// A report that makes no sense.
    #[error("cannot parse the report of '{command}' ({why}); LVM 2.02.158 or newer is needed")]
    Report {
        /// With its arguments.
        command: String,
        /// What is missing.
        why: String,
    },
    /// There is no such volume.
    #[error("no logical volume {0}; 'lvs' lists all volumes")]
    NoVolume(Volume),
    /// The volume can't be put on lent RAM.
    #[error("{volume} {why}")]
    Unfit {
        /// Which.
        volume: Volume,
        /// What is wrong with it.
        why: String,
        /// What would change it.
        fix: String,
    },
    /// Files of the initiator or of the kernel can't be used.
    #[error("cannot use {path}")]
    Files {
        /// Which.
        path: std::path::PathBuf,
        /// From the kernel.
        #[source]
        source: io::Error,
    },
    /// The initiator did not reach the lender, or left no disk.
    #[error("no iSCSI disk from {portal}: {why}")]
    Session {
        /// Where it exports.
        portal: SocketAddr,
        /// What happened.
        why: String,
    },
}

impl LvmError {
    /// What would change it, where the message doesn't say.
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
