//! The daemon's record of an LVM logical volume whose data is in RAM of another host. The lent RAM
//! appears as an iSCSI disk, and memfold recognizes the disk by its physical volume UUID.

use serde::{Deserialize, Serialize};

use super::session::Target;
use super::volume::Volume;
use crate::lease::{Durability, LeaseId};

/// Record of a logical volume that is on lent RAM, or is being moved there or back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loan {
    /// Name of the logical volume on lent RAM.
    pub volume: Volume,
    /// Size of the logical volume, in bytes.
    pub bytes: u64,
    /// Place where the volume's bytes survive if the lender dies.
    pub durability: Durability,
    /// Number of the volume's lease in the registry.
    pub lease: LeaseId,
    /// Host name of the volume's lender.
    pub lender: String,
    /// iSCSI target that this host's initiator is logged in to; `None` before the login.
    pub target: Option<Target>,
    /// UUID that the lent disk has as an LVM physical volume.
    pub uuid: String,
    /// How far the move of the volume to or from lent RAM has come.
    pub phase: Phase,
}

/// How far the move of a logical volume to or from lent RAM has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The volume is being put on lent RAM. A new daemon that finds this undoes the move.
    Beginning,
    /// The volume is on lent RAM.
    Lent,
    /// The volume is being moved off lent RAM. A new daemon that finds this continues the move.
    Ending,
}

/// Offset in bytes at which LVM's data begin on a lent disk; an option of `pvcreate`.
pub const DATA_START: u64 = 1 << 20;

/// Prefix of the UUIDs that memfold gives lent disks. LVM's own UUIDs begin with six letters or
/// digits.
const OURS: &str = "memfLd-";

/// Returns a new UUID for a lent disk as an LVM physical volume, with a prefix that marks lent
/// disks. `random`: 16 random bytes.
#[must_use]
pub fn new_uuid(random: [u8; 16]) -> String {
    use std::fmt::Write as _;
    let digits = random.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    });
    // The UUID has 6-4-4-4-4-4-6 characters, of which the prefix is the first six.
    let groups = [0..4, 4..8, 8..12, 12..16, 16..20, 20..26];
    let rest: Vec<&str> = groups.into_iter().map(|range| &digits[range]).collect();
    format!("{OURS}{}", rest.join("-"))
}

/// Returns whether the LVM physical volume with this UUID is a lent disk of memfold.
#[must_use]
pub fn is_lent(uuid: &str) -> bool {
    uuid.starts_with(OURS)
}

/// Returns how many bytes to borrow for a logical volume of `volume` bytes in a volume group with
/// extents of `extent` bytes. For a mirror, this includes one extent for LVM's metadata of the
/// image.
#[must_use]
pub const fn disk_bytes(volume: u64, extent: u64, durability: Durability) -> u64 {
    let image_notes = match durability {
        Durability::None => 0,
        Durability::Disk | Durability::Replica => extent,
    };
    // A volume's size is a multiple of the extent size. The last MiB allows for LVM's rounding.
    DATA_START + volume + image_notes + (1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_lvm_disk_in_lent_memory_is_recognised_by_its_uuid() {
        let uuid = new_uuid([0xa5; 16]);
        assert_eq!(uuid, "memfLd-a5a5-a5a5-a5a5-a5a5-a5a5-a5a5a5");
        let lengths: Vec<usize> = uuid.split('-').map(str::len).collect();
        assert_eq!(lengths, [6, 4, 4, 4, 4, 4, 6]);
        assert!(is_lent(&uuid) && !is_lent("Kd3lVn-b9pc-9dyB-5QXo-bWqp-ZQ0b-yXh2W1"));
    }

    #[test]
    fn an_lvm_disk_in_lent_memory_has_room_for_the_volume_and_its_mirror_metadata() {
        let extent = 4 << 20;
        for (durability, extents) in [(Durability::Disk, 65), (Durability::None, 64)] {
            let bytes = disk_bytes(64 * extent, extent, durability);
            assert_eq!((bytes - DATA_START) / extent, extents);
        }
    }
}
