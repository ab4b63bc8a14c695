//! Lent RAM under a swap volume of LVM's: the path of the study, for hosts whose swap is no disk of a VM of ours (`borrow --lvm VG/LV`).
//!
//! ```text
//!   lender                          borrower's host
//!   tgtd, one a lease <-- iSCSI --> kernel's initiator (iscsi_tcp, iscsid) --> /dev/sdX, a physical volume of VG
//!                                                                                | image 1: reads
//!                                                             VG/LV (raid1) -----+
//!                                                                                | image 0: written only, while image 1 is there
//!                                                                              VG's own disks
//! ```
//! Durability `disk` makes the volume a mirror whose own image is marked write-mostly: what is read comes from lent RAM, what is written goes
//! to both, and what is on this host's disk is whole at every moment. Durability `none` moves the volume (`pvmove`), as the study did.
//!
//! What LVM's metadata say is the truth: a lent disk is known by its physical volume's UUID ([`new_uuid`]), which also who comes after a
//! reboot finds. Everything here is the kernel's and LVM's business once it stands: no process of ours is on the way of a page.
//!
//! Nobody compares what a lender serves with what was written, as the relay does for VMs.

pub mod session;
pub mod tools;

use std::fmt;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::registry::{Durability, LeaseId, MAX_NAME};

/// Where the data of a physical volume begin: what we tell `pvcreate`.
pub const DATA_START: u64 = 1 << 20;

/// What UUIDs of lent disks begin with; LVM's have six letters and digits there.
const OURS: &str = "memfLd-";

/// Where the signature of swap space is (`include/linux/swap.h`, `union swap_header`), with pages of 4 KiB.
const SWAP_SIGNATURE: (u64, &[u8; 10]) = (4096 - 10, b"SWAPSPACE2");

/// Longest name of a group or volume (`lvm(8)`).
const LONGEST: usize = 127;

/// Why LVM or the initiator did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum LvmError {
    /// A program isn't there.
    #[error("'{program}' can't be run; install {package} (apt install {package})")]
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
    #[error("what '{command}' reports makes no sense ({why}); is this LVM older than 2.02.158?")]
    Report {
        /// With its arguments.
        command: String,
        /// What is missing.
        why: String,
    },
    /// There is no such volume.
    #[error("there is no logical volume {0}; 'lvs' shows those there are")]
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
    #[error("no disk of {portal}: {why}")]
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
                "look at 'journalctl -u iscsid', at the lender's log, and at what is between the hosts".into(),
            ),
            _ => None,
        }
    }
}

/// A logical volume: `VG/LV`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Volume {
    /// Its volume group.
    pub group: String,
    /// Its own name.
    pub name: String,
}

impl fmt::Display for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.group, self.name)
    }
}

impl From<Volume> for String {
    fn from(volume: Volume) -> Self {
        volume.to_string()
    }
}

impl TryFrom<String> for Volume {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Volume {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // `lvm(8)`, "VALID NAMES".
        let is_name = |name: &str| {
            (1..=LONGEST).contains(&name.len())
                && !name.starts_with('-')
                && !["..", "."].contains(&name)
                && name
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "+_.-".contains(c))
        };
        let path = text.strip_prefix("/dev/").unwrap_or(text);
        match path.split_once('/') {
            Some((group, name)) if is_name(group) && is_name(name) => Ok(Self {
                group: group.to_owned(),
                name: name.to_owned(),
            }),
            _ => Err(format!(
                "'{text}' is no logical volume: give VG/LV, the names of its volume group and its own"
            )),
        }
    }
}

impl Volume {
    /// What the registry calls it, where VMs have their names.
    #[must_use]
    pub fn holder(&self) -> String {
        let mut name = format!("lvm.{}.{}", self.group, self.name).replace('+', "_");
        name.truncate(MAX_NAME);
        name
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> String {
        format!("/dev/{self}")
    }
}

/// What is noted of a volume that is on lent RAM, or on its way there or back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loan {
    /// Which.
    pub volume: Volume,
    /// Its bytes.
    pub bytes: u64,
    /// What keeps them if the lender dies.
    pub durability: Durability,
    /// The lease.
    pub lease: LeaseId,
    /// Who lends.
    pub lender: String,
    /// Where the initiator is logged in; unset: nowhere yet.
    pub target: Option<session::Target>,
    /// UUID of the lent disk as a physical volume.
    pub uuid: String,
    /// How far it is.
    pub phase: Phase,
}

/// How far a loan is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// It is put on lent RAM; who finds this undoes it.
    Beginning,
    /// It is there.
    Lent,
    /// It is taken off; who finds this goes on.
    Ending,
}

/// A UUID for a physical volume that is a lent disk, of 16 random bytes.
#[must_use]
pub fn new_uuid(random: [u8; 16]) -> String {
    use std::fmt::Write as _;
    let digits = random.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    });
    // 6-4-4-4-4-4-6 characters in all.
    let groups = [0..4, 4..8, 8..12, 12..16, 16..20, 20..26];
    let rest: Vec<&str> = groups.into_iter().map(|range| &digits[range]).collect();
    format!("{OURS}{}", rest.join("-"))
}

/// Whether a physical volume is a lent disk.
#[must_use]
pub fn is_lent(uuid: &str) -> bool {
    uuid.starts_with(OURS)
}

/// Bytes of a disk that has room for a volume and, with a mirror's image, for what LVM notes about that.
#[must_use]
pub const fn disk_bytes(volume: u64, extent: u64, durability: Durability) -> u64 {
    let image_notes = match durability {
        Durability::None => 0,
        Durability::Disk | Durability::Replica => extent,
    };
    // A volume's size is whole extents; the last MiB is for what LVM rounds.
    DATA_START + volume + image_notes + (1 << 20)
}

/// Whether a device holds swap space.
pub fn is_swap(device: &str) -> io::Result<bool> {
    let (at, signature) = SWAP_SIGNATURE;
    let mut bytes = [0; 10];
    File::open(device)?.read_exact_at(&mut bytes, at)?;
    Ok(&bytes == signature)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::check_name;

    #[test]
    fn a_volume_is_named_as_lvm_does_and_so_that_registries_take_it() {
        let volume: Volume = "vg0/swap_1".parse().unwrap();
        assert_eq!(volume, "/dev/vg0/swap_1".parse().unwrap());
        assert_eq!(
            (volume.device().as_str(), volume.holder().as_str()),
            ("/dev/vg0/swap_1", "lvm.vg0.swap_1")
        );
        let long = format!("{}/+a", "v".repeat(100));
        for name in ["a+b/c", "_x/y", long.as_str()] {
            let volume: Volume = name.parse().unwrap();
            check_name("vm", &volume.holder()).unwrap();
        }
        for bad in [
            "", "swap", "a/", "/b", "a/b/c", "-a/b", "a/-b", "../b", "a/b c", "a/é",
        ] {
            bad.parse::<Volume>().unwrap_err();
        }
    }

    #[test]
    fn a_lent_disk_is_known_by_its_uuid() {
        let uuid = new_uuid([0xa5; 16]);
        assert_eq!(uuid, "memfLd-a5a5-a5a5-a5a5-a5a5-a5a5-a5a5a5");
        let lengths: Vec<usize> = uuid.split('-').map(str::len).collect();
        assert_eq!(lengths, [6, 4, 4, 4, 4, 4, 6]);
        assert!(is_lent(&uuid) && !is_lent("Kd3lVn-b9pc-9dyB-5QXo-bWqp-ZQ0b-yXh2W1"));
    }

    #[test]
    fn swap_space_is_known_by_its_signature() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("d");
        let path = path.to_str().unwrap();
        std::fs::write(path, vec![0; 8192]).unwrap();
        assert!(!is_swap(path).unwrap());
        let mut bytes = vec![0; 8192];
        bytes[4086..4096].copy_from_slice(b"SWAPSPACE2");
        std::fs::write(path, bytes).unwrap();
        assert!(is_swap(path).unwrap());
        std::fs::write(path, "short").unwrap();
        is_swap(path).unwrap_err();
    }

    #[test]
    fn a_lent_disk_has_room_for_the_volume_and_its_notes() {
        let extent = 4 << 20;
        for (durability, extents) in [(Durability::Disk, 65), (Durability::None, 64)] {
            let bytes = disk_bytes(64 * extent, extent, durability);
            assert_eq!((bytes - DATA_START) / extent, extents);
        }
    }
}
