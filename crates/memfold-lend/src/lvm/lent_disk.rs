//! Lent disks as LVM physical volumes: their UUIDs and their size.

use crate::lease::Durability;

/// Where the data of a physical volume begin: what we tell `pvcreate`.
pub const DATA_START: u64 = 1 << 20;

/// What UUIDs of lent disks begin with; LVM's have six letters and digits there.
const OURS: &str = "memfLd-";

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

/// Bytes of a disk that has room for a volume and, with a mirror's image, for what LVM notes about
/// that.
#[must_use]
pub const fn disk_bytes(volume: u64, extent: u64, durability: Durability) -> u64 {
    let image_notes = match durability {
        Durability::None => 0,
        Durability::Disk | Durability::Replica => extent,
    };
    // A volume's size is whole extents; the last MiB is for what LVM rounds.
    DATA_START + volume + image_notes + (1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lent_disk_is_known_by_its_uuid() {
        let uuid = new_uuid([0xa5; 16]);
        assert_eq!(uuid, "memfLd-a5a5-a5a5-a5a5-a5a5-a5a5-a5a5a5");
        let lengths: Vec<usize> = uuid.split('-').map(str::len).collect();
        assert_eq!(lengths, [6, 4, 4, 4, 4, 4, 6]);
        assert!(is_lent(&uuid) && !is_lent("Kd3lVn-b9pc-9dyB-5QXo-bWqp-ZQ0b-yXh2W1"));
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
