//! Checksums by which the relay between QEMU and a lending host detects wrong bytes: 8 bytes for
//! each block of 4 KiB that QEMU has written to the host's RAM.
//!
//! A checksum is the beginning of the block's BLAKE3 hash, keyed with a secret of this process. If
//! a lender returns changed data, another block or an older version, the checksum matches with a
//! chance of 1 in 2^64. When it does not match, the relay ends. Simpler checksums do not protect
//! against a lender that wants to deceive: a lender could change data without changing their CRC,
//! and XXH3 promises nothing in such a case.
//!
//! A block that was never written, or was zeroed or trimmed, has no checksum. The relay answers its
//! reads with zeroes without asking a lender.
//!
//! One thread of the relay writes the checksums. Another thread may read them at the same time
//! without a lock ([`compare`](super::compare)).

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use zerocopy::FromZeros;

use super::super::nbd::BLOCK;

const BLOCK_BYTES: usize = BLOCK as usize;

/// Checksums of all blocks of a disk on lent RAM, 4 KiB a block.
pub struct Sums {
    key: [u8; blake3::KEY_LEN],
    /// One checksum for each block; 0 for a block of zeroes.
    of: Box<[AtomicU64]>,
}

impl std::fmt::Debug for Sums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sums of {} blocks", self.of.len())
    }
}

fn index(block: u64) -> usize {
    // The caller uses only block numbers of this disk, which fit.
    usize::try_from(block).unwrap_or(usize::MAX)
}

impl Sums {
    /// Creates the checksums of a disk of `bytes` bytes that holds only zeroes.
    ///
    /// # Errors
    /// Fails if no random key or no memory is available.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let key = crate::files::random()?;
        let blocks = usize::try_from(bytes / u64::from(BLOCK)).map_err(io::Error::other)?;
        // This memory is zero, and the kernel allocates it only when it is written.
        let of = <[AtomicU64]>::new_box_zeroed_with_elems(blocks)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { key, of })
    }

    fn at(&self, block: u64) -> u64 {
        self.of[index(block)].load(Ordering::Relaxed)
    }

    fn set(&self, block: u64, sum: u64) {
        self.of[index(block)].store(sum, Ordering::Relaxed);
    }

    /// Returns the checksum of a block's bytes; 0 for zeroes.
    fn sum_of(&self, block: &[u8]) -> u64 {
        if is_zero(block) { 0 } else { self.sum(block) }
    }

    /// Returns the number of 4 KiB blocks of the disk.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.of.len() as u64
    }

    /// Returns the recorded checksum of block number `block` if `bytes` have another one; `None` if
    /// they match.
    #[must_use]
    pub fn other_than(&self, block: u64, bytes: &[u8]) -> Option<u64> {
        let sum = self.at(block);
        (sum != self.sum_of(bytes)).then_some(sum)
    }

    fn sum(&self, block: &[u8]) -> u64 {
        let hash = blake3::keyed_hash(&self.key, block);
        let first = hash.as_bytes().first_chunk();
        first.map_or(1, |first| u64::from_le_bytes(*first).max(1))
    }

    /// Records the checksums of data that were written from block number `block` on. Returns
    /// whether a lender must store any of the data; zeroes need not be stored.
    pub fn written(&self, block: u64, data: &[u8]) -> bool {
        let mut any = false;
        for (block, data) in (block..).zip(data.chunks_exact(BLOCK_BYTES)) {
            let sum = self.sum_of(data);
            any |= sum != 0;
            self.set(block, sum);
        }
        any
    }

    /// Records that the `blocks` blocks from block number `block` on hold zeroes.
    pub fn zeroed(&self, block: u64, blocks: u64) {
        (block..block + blocks).for_each(|block| self.set(block, 0));
    }

    /// Returns whether all of the `blocks` blocks from block number `block` on hold zeroes.
    #[must_use]
    pub fn are_zero(&self, block: u64, blocks: u64) -> bool {
        (block..block + blocks).all(|block| self.at(block) == 0)
    }

    /// Compares data that a lender returned, from block number `block` on, with the checksums, and
    /// copies the data to `into`. Where a block holds zeroes, `into` is not changed.
    ///
    /// # Errors
    /// Fails with the number of the first block that differs from the block that was written.
    pub fn checked(&self, block: u64, said: &[u8], into: &mut [u8]) -> Result<(), u64> {
        let blocks = said.chunks_exact(BLOCK_BYTES);
        for (block, (said, into)) in (block..).zip(blocks.zip(into.chunks_exact_mut(BLOCK_BYTES))) {
            let sum = self.at(block);
            if sum == 0 {
                continue;
            }
            if self.sum(said) != sum {
                return Err(block);
            }
            into.copy_from_slice(said);
        }
        Ok(())
    }
}

fn is_zero(data: &[u8]) -> bool {
    // Most pages that are not zero have a nonzero byte within their first bytes.
    data.iter().take(64).all(|byte| *byte == 0)
        && data
            .chunks_exact(16)
            .all(|word| u128::from_ne_bytes(word.try_into().unwrap_or([1; 16])) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const B: usize = BLOCK_BYTES;

    fn block(seed: u8) -> Vec<u8> {
        (0..=255_u8)
            .cycle()
            .map(|i| i.wrapping_mul(seed))
            .take(B)
            .collect()
    }

    #[test]
    fn data_from_a_lender_passes_the_checksum_only_if_it_is_the_last_data_written() {
        let sums = Sums::new(16 * B as u64).unwrap();
        let (old, new) = (block(3), block(5));
        assert!(sums.written(2, &[old.clone(), new.clone()].concat()));
        let mut got = vec![0; 2 * B];
        sums.checked(2, &[old.clone(), new.clone()].concat(), &mut got)
            .unwrap();
        assert_eq!(got, [old.clone(), new.clone()].concat());
        // The lender returns another block, zeroes, or an older version.
        assert_eq!(sums.checked(2, &new, &mut got), Err(2));
        assert_eq!(sums.checked(3, &vec![0; B], &mut got), Err(3));
        sums.written(2, &new);
        assert_eq!(sums.checked(2, &old, &mut got), Err(2));
        // A change of any bit is detected.
        for bit in (0..B * 8).step_by(61) {
            let mut bad = new.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(sums.checked(2, &bad, &mut got), Err(2), "{bit}");
        }
    }

    #[test]
    fn a_block_known_to_be_zero_is_read_as_zeroes_whatever_the_lender_returns() {
        let sums = Sums::new(8 * B as u64).unwrap();
        assert!(sums.are_zero(0, 8));
        let mut got = vec![0; B];
        sums.checked(1, &block(3), &mut got).unwrap();
        assert_eq!(got, vec![0; B]);
        assert!(!sums.written(1, &vec![0; 2 * B]));
        assert!(sums.are_zero(0, 8));
        assert!(sums.written(1, &block(3)));
        assert!(!sums.are_zero(0, 8) && sums.are_zero(2, 6));
        sums.zeroed(0, 3);
        assert!(sums.are_zero(0, 8));
        let mut last = vec![0; B];
        last[B - 1] = 1;
        assert!(sums.written(7, &last));
    }

    #[test]
    fn each_borrower_of_memory_computes_checksums_with_a_key_of_its_own() {
        let [a, b] = [0, 1].map(|_| Sums::new(B as u64).unwrap());
        assert_ne!(a.sum(&block(3)), b.sum(&block(3)));
    }
}
