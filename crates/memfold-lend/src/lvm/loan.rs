//! The daemon's record of a logical volume on lent RAM, and its lent disk as an LVM physical
//! volume.

use serde::{Deserialize, Serialize};

use super::session::Target;
use super::volume::Volume;
use crate::lease::{Durability, LeaseId};

/// Record of a logical volume that is on lent RAM, or is being moved there or back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loan {
    /// Name of the logical volume that is on loan.
    pub volume: Volume,
    /// Size of the logical volume, in bytes.
    pub bytes: u64,
    /// Place where the bytes survive if the lender dies.
    pub durability: Durability,
    /// Number of the lease in the registry.
    pub lease: LeaseId,
    /// Host name of the lender.
    pub lender: String,
    /// Target that the initiator is logged in to; `None` before the login.
    pub target: Option<Target>,
    /// UUID of the lent disk as a physical volume.
    pub uuid: String,
    /// Progress of the loan.
    pub phase: Phase,
}

/// Progress of a loan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The volume is being put on lent RAM. A daemon that finds this record undoes it.
    Beginning,
    /// The volume is on lent RAM.
    Lent,
    /// The volume is being moved off lent RAM. A daemon that finds this record continues.
    Ending,
}

/// Offset in bytes of the data on a lent disk, which `pvcreate` receives as an option.
pub const DATA_START: u64 = 1 << 20;

/// Prefix of the UUIDs that memfold gives lent disks. LVM's own UUIDs begin with six letters or
/// digits.
const OURS: &str = "memfLd-";

/// Returns a UUID for a lent disk as a physical volume, made from 16 random bytes.
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

/// Returns whether the physical volume with this UUID is a lent disk.
#[must_use]
pub fn is_lent(uuid: &str) -> bool {
    uuid.starts_with(OURS)
}

/// Returns how many bytes to borrow for a volume of `volume` bytes. For a mirror, they include one
/// extent (`extent` bytes) for LVM's metadata of the image.
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
    fn a_lent_lvm_disk_is_recognised_by_its_uuid() {
        let uuid = new_uuid([0xa5; 16]);
        assert_eq!(uuid, "memfLd-a5a5-a5a5-a5a5-a5a5-a5a5-a5a5a5");
        let lengths: Vec<usize> = uuid.split('-').map(str::len).collect();
        assert_eq!(lengths, [6, 4, 4, 4, 4, 4, 6]);
        assert!(is_lent(&uuid) && !is_lent("Kd3lVn-b9pc-9dyB-5QXo-bWqp-ZQ0b-yXh2W1"));
    }

    #[test]
    fn a_lent_disk_has_room_for_the_volume_and_its_mirror_metadata() {
        let extent = 4 << 20;
        for (durability, extents) in [(Durability::Disk, 65), (Durability::None, 64)] {
            let bytes = disk_bytes(64 * extent, extent, durability);
            assert_eq!((bytes - DATA_START) / extent, extents);
        }
    }
}
