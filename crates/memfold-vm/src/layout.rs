//! Maps guest-physical addresses to QEMU's RAM blocks and to addresses in the QEMU process (HVA).
//!
//! A VM's RAM may consist of several guest-physical ranges, the slots. Each slot is backed by a
//! part of one RAM block:
//!
//! ```text
//!   GPA   0 ........ 2G   [hole: PCI, firmware]   4G ...... 6G
//!         |- slot 0 -|                            |- slot 1 -|
//!   block ram0: 0 .. 2G ........................... 2G .. 4G      (hva = block.hva + offset)
//! ```

use memfold_units::{Hva, PAGE_SIZE, Pfn};

/// One of QEMU's migratable RAM blocks (`info ramblock`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamBlock {
    /// QEMU's name of the RAM block.
    pub name: String,
    /// Address of the RAM block in the QEMU process.
    pub hva: Hva,
    /// Length of the RAM block in pages of 4 KiB.
    pub pages: u64,
}

/// A range of guest-physical addresses that a part of one RAM block backs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamSlot {
    /// First guest page frame of the range.
    pub pfn: Pfn,
    /// Length of the range in pages of 4 KiB.
    pub pages: u64,
    /// Address of the range's first page in the QEMU process.
    pub hva: Hva,
    /// Index of the range's RAM block in [`RamLayout::blocks`].
    pub block: usize,
}

/// The RAM of one VM, as QEMU reports it: RAM blocks, and the guest-physical ranges that they back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RamLayout {
    /// QEMU's RAM blocks that hold the VM's system RAM.
    pub blocks: Vec<RamBlock>,
    /// Guest-physical ranges of the VM's RAM, sorted by address. The ranges do not overlap.
    pub slots: Vec<RamSlot>,
}

impl RamLayout {
    /// Returns the layout of a VM whose RAM is one block of `pages` pages at address `hva`, from
    /// guest page frame 0 on.
    #[must_use]
    pub fn one_block(hva: Hva, pages: u64) -> Self {
        Self {
            blocks: vec![RamBlock {
                name: "ram0".into(),
                hva,
                pages,
            }],
            slots: vec![RamSlot {
                pfn: Pfn(0),
                pages,
                hva,
                block: 0,
            }],
        }
    }

    /// Returns the size of the guest's RAM in pages of 4 KiB.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.slots.iter().map(|s| s.pages).sum()
    }

    /// Returns the address of guest page frame `pfn` in the QEMU process, and the number of pages
    /// from there to the end of the range, `pfn` included; `None` if `pfn` is not RAM.
    #[must_use]
    pub fn hva_of(&self, pfn: Pfn) -> Option<(Hva, u64)> {
        let after = self.slots.partition_point(|s| s.pfn <= pfn);
        let slot = &self.slots[after.checked_sub(1)?];
        let inside = pfn.pages_since(slot.pfn);
        (inside < slot.pages).then(|| (slot.hva.add_pages(inside), slot.pages - inside))
    }

    /// Returns the guest page frame at address `hva` of the QEMU process; `None` if the address is
    /// not guest RAM.
    #[must_use]
    pub fn pfn_of(&self, hva: Hva) -> Option<Pfn> {
        let is_in = |s: &&RamSlot| hva >= s.hva && hva.0 - s.hva.0 < s.pages * PAGE_SIZE;
        let slot = self.slots.iter().find(is_in)?;
        Some(slot.pfn.add_pages(hva.pages_since(slot.hva)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split_at_4g() -> RamLayout {
        let hva = Hva(0x7f00_0000_0000);
        RamLayout {
            blocks: vec![RamBlock {
                name: "ram0".into(),
                hva,
                pages: 1 << 20,
            }],
            slots: vec![
                RamSlot {
                    pfn: Pfn(0),
                    pages: 1 << 19,
                    hva,
                    block: 0,
                },
                RamSlot {
                    pfn: Pfn(1 << 20),
                    pages: 1 << 19,
                    hva: hva.add_pages(1 << 19),
                    block: 0,
                },
            ],
        }
    }

    #[test]
    fn the_hole_below_4_gib_is_not_guest_ram() {
        let layout = split_at_4g();
        assert_eq!(
            layout.hva_of(Pfn((1 << 19) - 1)),
            Some((Hva(0x7f00_0000_0000).add_pages((1 << 19) - 1), 1))
        );
        assert_eq!(layout.hva_of(Pfn(1 << 19)), None);
        assert_eq!(
            layout.hva_of(Pfn(1 << 20)),
            Some((Hva(0x7f00_0000_0000).add_pages(1 << 19), 1 << 19))
        );
        assert_eq!(layout.hva_of(Pfn((1 << 20) + (1 << 19))), None);
    }

    #[test]
    fn guest_page_frames_convert_to_host_addresses_and_back() {
        let layout = split_at_4g();
        for pfn in [Pfn(0), Pfn(77), Pfn((1 << 20) + 5)] {
            assert_eq!(layout.pfn_of(layout.hva_of(pfn).unwrap().0), Some(pfn));
        }
        assert_eq!(layout.pfn_of(Hva(1)), None);
    }
}
