//! Checks that the copy of a swap disk on this host's disk contains all bytes that QEMU has written
//! to the swap disk. QEMU continues to write meanwhile.
//!
//! QEMU writes to the lender's RAM and to the copy at the same time. For a moment, one of them may
//! lack a write that the other has. So a block of the copy that does not match its checksum is read
//! again, until it matches, or until it has differed for far longer than a write takes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::super::connection::PATIENCE;
use super::super::nbd::BLOCK;
use super::sums::Sums;

const BLOCK_BYTES: usize = BLOCK as usize;

/// Number of blocks of one read.
const AT_ONCE: u64 = 64;

/// Time between two reads of a block that differs.
const LOOK: Duration = Duration::from_millis(5);

/// Time between two looks at the lender's answers before the first read.
const LOOK_AT_LENDER: Duration = Duration::from_millis(100);

/// Time limits for a comparison of the copy on disk with the relay's checksums.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long a lender's answer may take. While an answer takes longer, no other limit counts:
    /// the writes behind it are in the copy, but not yet in the checksums.
    pub answer: Duration,
    /// Delay before the first read of the copy. Only after the delay do the checksums contain every
    /// write that began before it.
    pub before: Duration,
    /// How long a block of the copy may differ from its checksum while QEMU does not write the
    /// block.
    pub stays: Duration,
    /// How long a block of the copy may differ from its checksum while QEMU keeps writing the
    /// block.
    pub most: Duration,
}

impl Limits {
    /// Time limits for lenders whose answers may take 3 s.
    pub const REAL: Self = Self {
        answer: PATIENCE,
        before: Duration::from_secs(10),
        stays: Duration::from_secs(10),
        most: Duration::from_secs(60),
    };
}

/// Compares the copy of the swap disk in `file` with the relay's checksums. Returns the number of
/// the first block that differs from what QEMU wrote, if there is one. `waited`: for how long the
/// oldest request to a lender has waited now.
///
/// # Errors
/// Fails if the file cannot be read or is too short.
pub fn compare(
    file: &File,
    sums: &Sums,
    limits: Limits,
    waited: &dyn Fn() -> Duration,
) -> io::Result<Option<u64>> {
    wait_for_answers(limits, waited);
    let mut bytes = vec![0; BLOCK_BYTES * usize::try_from(AT_ONCE).unwrap_or(1)];
    let mut next = 0;
    while next < sums.blocks() {
        let count = AT_ONCE.min(sums.blocks() - next);
        if sums.are_zero(next, count) && is_hole(file, next, count) {
            next += count;
            continue;
        }
        let bytes = &mut bytes[..BLOCK_BYTES * usize::try_from(count).unwrap_or(1)];
        file.read_exact_at(bytes, next * u64::from(BLOCK))?;
        for (block, bytes) in (next..).zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
            if sums.other_than(block, bytes).is_some()
                && stays_other(file, sums, block, bytes, limits, waited)?
            {
                return Ok(Some(block));
            }
        }
        next += count;
    }
    Ok(None)
}

/// Waits until all answers of the lenders have been quick for the time [`Limits::before`].
fn wait_for_answers(limits: Limits, waited: &dyn Fn() -> Duration) {
    let mut since = Instant::now();
    while since.elapsed() < limits.before {
        std::thread::sleep(LOOK_AT_LENDER);
        if waited() > limits.answer {
            since = Instant::now();
        }
    }
}

/// Returns whether these blocks of the file were never written. Reading such blocks would only fill
/// the page cache. (The file was created in its full size.)
fn is_hole(file: &File, block: u64, count: u64) -> bool {
    let [from, end] = [block, block + count].map(|block| block * u64::from(BLOCK));
    // Behind the last data, lseek(2) returns `ENXIO`, but also behind the end of the file.
    let is_there = file.metadata().is_ok_and(|facts| facts.len() >= end);
    is_there
        && match seek(file, SeekFrom::Data(from)) {
            Ok(data) => data >= end,
            Err(errno) => errno == Errno::NXIO,
        }
}

/// Returns whether a block that differed still differs after the time limits.
fn stays_other(
    file: &File,
    sums: &Sums,
    block: u64,
    bytes: &mut [u8],
    limits: Limits,
    waited: &dyn Fn() -> Duration,
) -> io::Result<bool> {
    let mut began = Instant::now();
    let mut seen: Option<(u64, Instant)> = None;
    loop {
        file.read_exact_at(bytes, block * u64::from(BLOCK))?;
        let Some(sum) = sums.other_than(block, bytes) else {
            return Ok(false);
        };
        let since = match seen {
            Some((before, since)) if before == sum => since,
            _ => Instant::now(),
        };
        seen = Some((sum, since));
        if waited() > limits.answer {
            (began, seen) = (Instant::now(), None);
        } else if since.elapsed() >= limits.stays || began.elapsed() >= limits.most {
            return Ok(true);
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const BLOCKS: u64 = 200;
    const QUICK: Limits = Limits {
        answer: Duration::from_millis(50),
        before: Duration::ZERO,
        stays: Duration::from_millis(300),
        most: Duration::from_secs(5),
    };

    fn block(seed: u64) -> Vec<u8> {
        seed.to_le_bytes().repeat(BLOCK_BYTES / 8)
    }

    fn compare(file: &File, sums: &Sums, limits: Limits) -> io::Result<Option<u64>> {
        super::compare(file, sums, limits, &|| Duration::ZERO)
    }

    /// Returns a file and its checksums; every third block was never written.
    fn copy() -> (File, Sums) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(BLOCKS * u64::from(BLOCK)).unwrap();
        let sums = Sums::new(BLOCKS * u64::from(BLOCK)).unwrap();
        for at in (0..BLOCKS).filter(|at| at % 3 != 0) {
            put(&file, at, at + 1);
            sums.written(at, &block(at + 1));
        }
        (file, sums)
    }

    fn put(file: &File, at: u64, seed: u64) {
        file.write_all_at(&block(seed), at * u64::from(BLOCK))
            .unwrap();
    }

    #[test]
    fn if_a_disk_copy_lacks_one_write_the_comparison_with_the_checksums_reports_the_block() {
        let (file, sums) = copy();
        assert_eq!(compare(&file, &sums, QUICK).unwrap(), None);
        for at in [0, 1, 64, BLOCKS - 1] {
            // A failed write leaves a checksum that the file does not match.
            sums.written(at, &block(999));
            assert_eq!(compare(&file, &sums, QUICK).unwrap(), Some(at));
            put(&file, at, 999);
            assert_eq!(compare(&file, &sums, QUICK).unwrap(), None);
        }
        // Blocks of zeroes must match, too.
        sums.zeroed(70, 2);
        assert_eq!(compare(&file, &sums, QUICK).unwrap(), Some(70));
        file.set_len(BLOCKS * u64::from(BLOCK) - 1).unwrap();
        put(&file, 70, 0);
        put(&file, 71, 0);
        assert!(compare(&file, &sums, QUICK).is_err());
    }

    #[test]
    fn while_a_lender_keeps_requests_waiting_no_block_of_a_disk_copy_counts_as_different() {
        let (file, sums) = copy();
        let silence = QUICK.stays * 3;
        // The lender is silent at first.
        let compare = |limits: Limits| {
            let began = Instant::now();
            let waited = || {
                let is_silent = began.elapsed() < silence;
                if is_silent {
                    QUICK.answer * 2
                } else {
                    Duration::ZERO
                }
            };
            let found = super::compare(&file, &sums, limits, &waited).unwrap();
            (found, began.elapsed() >= silence)
        };
        sums.written(5, &block(999));
        assert_eq!(compare(QUICK), (Some(5), true));
        put(&file, 5, 999);
        assert_eq!(compare(QUICK).0, None);
        // The first read waits for the lender, too.
        let late = Limits {
            before: QUICK.stays,
            ..QUICK
        };
        assert_eq!(compare(late), (None, true));
    }

    #[test]
    fn in_a_disk_copy_with_holes_the_comparison_with_the_checksums_finds_a_missing_write() {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        let sums = Sums::new(BLOCKS * u64::from(BLOCK)).unwrap();
        compare(&file, &sums, QUICK).unwrap_err();
        file.set_len(BLOCKS * u64::from(BLOCK)).unwrap();
        assert!(is_hole(&file, 0, BLOCKS) && !is_hole(&file, 0, BLOCKS + 1));
        assert_eq!(compare(&file, &sums, QUICK).unwrap(), None);
        sums.written(150, &block(7));
        assert_eq!(compare(&file, &sums, QUICK).unwrap(), Some(150));
        put(&file, 150, 7);
        assert_eq!(compare(&file, &sums, QUICK).unwrap(), None);
        assert!(!is_hole(&file, 128, 64) && is_hole(&file, 0, 64));
        // The block was zeroed after it was written, but the file's block is not zero.
        sums.zeroed(150, 1);
        assert_eq!(compare(&file, &sums, QUICK).unwrap(), Some(150));
    }

    #[test]
    fn a_block_written_while_a_disk_copy_is_compared_is_not_reported_as_a_difference() {
        let (file, sums) = copy();
        let done = AtomicBool::new(false);
        // On a busy machine, the writing thread may not run for a while.
        let patient = Limits {
            stays: Duration::from_secs(10),
            most: Duration::from_secs(60),
            ..QUICK
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut seed = 1_000_000;
                while !done.load(Ordering::Acquire) {
                    for at in 0..BLOCKS {
                        seed += 1;
                        // The file or the checksum is written first, in turn.
                        if seed % 2 == 0 {
                            put(&file, at, seed);
                            std::thread::sleep(Duration::from_micros(30));
                            sums.written(at, &block(seed));
                        } else {
                            sums.written(at, &block(seed));
                            std::thread::sleep(Duration::from_micros(30));
                            put(&file, at, seed);
                        }
                    }
                }
            });
            for _ in 0..20 {
                assert_eq!(compare(&file, &sums, patient).unwrap(), None);
            }
            done.store(true, Ordering::Release);
        });
    }
}
