//! Layout of a VM's swap disk that is striped over the RAM of several lending hosts, in units of
//! [`UNIT`] bytes:
//!
//! ```text
//!   disk      | unit 0 | unit 1 | unit 2 | unit 3 | unit 4 | ...
//!   lender 0  | unit 0 | unit 2 | unit 4 |
//!   lender 1  | unit 1 | unit 3 |
//! ```
//! A lender stores its units one after the other, without gaps. Therefore a request for consecutive
//! blocks becomes at most one request to each lender.

use serde::{Deserialize, Serialize};

/// Number of contiguous bytes of a striped disk that one lender holds.
///
/// The pages that a guest swaps in at once (eight, by `vm.page-cluster`), and most of the pages
/// that it swaps out at once, then come from one lender. A second lender would cost more for its
/// request than it saves: 32 KiB take 0.26 ms on 1 Gbit/s. The copy of the whole disk during a
/// switch uses 1 MiB at a time, which spreads over up to 16 units.
pub const UNIT: u64 = 64 << 10;

/// Maximum number of lenders of one disk. Each additional lender makes it more likely that one of
/// them is lost.
pub const MOST: u64 = 8;

/// How a disk is striped: over how many lenders, and how large it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stripes {
    /// Number of lenders over which the disk is striped.
    pub count: u64,
    /// Size of the striped disk, in bytes.
    pub bytes: u64,
}

/// A range of a request that is contiguous both on the striped disk and at one lender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Number of the lender that stores this range of the disk, from 0.
    pub lender: usize,
    /// Offset of the chunk's first byte in the lender's memory.
    pub at: u64,
    /// Offset of the chunk's first byte from the start of the request.
    pub from: u64,
    /// Length of the chunk in bytes.
    pub length: u64,
}

/// One lender's share of a request, which is contiguous in the lender's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Number of the lender that stores the bytes of this share, from 0.
    pub lender: usize,
    /// Offset of the share's first byte in the lender's memory.
    pub at: u64,
    /// Length of the share in bytes.
    pub length: u64,
    /// Ranges of the share that are contiguous on the disk, in the order of the disk.
    pub chunks: Vec<Chunk>,
}

impl Stripes {
    /// Returns how many bytes each lender of the disk must lend.
    #[must_use]
    pub const fn of_each(&self) -> u64 {
        if self.count == 1 {
            self.bytes
        } else {
            self.bytes.div_ceil(UNIT * self.count) * UNIT
        }
    }

    /// Splits a request for `length` bytes at `offset` of the disk into ranges that are contiguous
    /// at one lender, in the order of the disk.
    pub fn chunks(&self, offset: u64, length: u64) -> impl Iterator<Item = Chunk> + use<> {
        let (count, end) = (self.count, offset + length);
        let mut next = offset;
        std::iter::from_fn(move || {
            if next >= end {
                return None;
            }
            let (unit, within) = (next / UNIT, next % UNIT);
            let (lender, at, length) = if count == 1 {
                (0, next, end - next)
            } else {
                let length = (UNIT - within).min(end - next);
                (unit % count, unit / count * UNIT + within, length)
            };
            let chunk = Chunk {
                // The number is always below [`MOST`].
                lender: usize::try_from(lender).unwrap_or(usize::MAX),
                at,
                from: next - offset,
                length,
            };
            next += length;
            Some(chunk)
        })
    }

    /// Splits a request for `length` bytes at `offset` of the disk into one share for each lender
    /// that has bytes of it.
    #[must_use]
    pub fn runs(&self, offset: u64, length: u64) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for chunk in self.chunks(offset, length) {
            match runs.iter_mut().find(|run| run.lender == chunk.lender) {
                Some(run) => {
                    run.length += chunk.length;
                    run.chunks.push(chunk);
                }
                None => runs.push(Run {
                    lender: chunk.lender,
                    at: chunk.at,
                    length: chunk.length,
                    chunks: vec![chunk],
                }),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_byte_of_a_disk_spread_over_several_lenders_has_its_own_place_at_one_lender() {
        const STEP: u64 = UNIT / 2;
        for count in 1..=MOST {
            for units in 1..=20 {
                let bytes = units * UNIT - STEP;
                let stripes = Stripes { count, bytes };
                let mut taken = std::collections::BTreeSet::new();
                for at in (0..bytes).step_by(usize::try_from(STEP).unwrap()) {
                    let chunks: Vec<Chunk> = stripes.chunks(at, STEP).collect();
                    let [chunk] = chunks[..] else {
                        panic!("{chunks:?}")
                    };
                    assert!(chunk.lender < usize::try_from(count).unwrap());
                    assert!(chunk.at + chunk.length <= stripes.of_each());
                    assert!(taken.insert((chunk.lender, chunk.at)), "{count} {units}");
                }
                assert!(stripes.of_each() * count < bytes + UNIT * (count + 1));
            }
        }
    }

    proptest! {
        #[test]
        fn a_request_to_a_disk_spread_over_several_lenders_is_contiguous_at_each_lender(count in 1..=MOST, offset in 0_u64..4096, blocks in 1_u64..256) {
            let (offset, length) = (offset * 4096, blocks * 4096);
            let stripes = Stripes { count, bytes: 64 << 20 };
            let runs = stripes.runs(offset, length);
            prop_assert!(runs.len() as u64 <= count);
            prop_assert_eq!(runs.iter().map(|run| run.length).sum::<u64>(), length);
            let mut next: Vec<u64> = runs.iter().map(|run| run.at).collect();
            let mut from = 0;
            for chunk in stripes.chunks(offset, length) {
                let of = runs.iter().position(|run| run.lender == chunk.lender).unwrap();
                prop_assert_eq!((chunk.at, chunk.from), (next[of], from));
                next[of] += chunk.length;
                from += chunk.length;
            }
            for (run, end) in runs.iter().zip(next) {
                prop_assert_eq!(run.at + run.length, end);
            }
        }
    }
}
