//! Chooses how much of the guest's page cache a snapshot contains, if the user does not say
//! (`--keep auto`). The choice with the shortest save is taken.
//!
//! ```text
//!   none   dropped by the guest                          cached pages * time to drop one
//!   hot    compared with the disks, the rest is saved    pages on disks / comparing + rest / writing
//!   all    saved                                         cached pages / writing
//! ```
//! The choices are: all of the cache, none of it, or only pages that are not also on the guest's
//! disks (hot), with references to the disks for the others. If choices take about the same time,
//! hot is preferred to none, and none to all: with hot, the snapshot is small and a restored guest
//! has a warm cache; with none, the snapshot is only small.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use memfold_snapshot::Keep;
use memfold_units::{ByteSize, PAGE_BYTES, PAGE_SIZE};
use rustix::fs::OFlags;
use tracing::debug;

/// Seconds that a guest needs to drop a page of its page cache (docs/results/snapshots.md). The
/// first value is for an emulated guest, the second for a guest that runs as fast as the host.
const DROP_EMULATED_S: f64 = 2.4e-6;
const DROP_S: f64 = 0.5e-6;

/// Bytes a second that a save compares with files in the host's page cache. The next constant:
/// bytes a second that a save writes to the host's page cache. Both with two cores
/// (docs/results/snapshots.md).
const COMPARED_PER_S: f64 = 2.0e9;
const WRITTEN_PER_S: f64 = 1.2e9;

/// Two choices take about the same time if their times differ by at most this factor, or by at most
/// `ABOUT_S` seconds.
const ABOUT: f64 = 1.1;
const ABOUT_S: f64 = 0.05;

/// Shortest time limit for a guest to drop its page cache. The next constant: the longest.
const SHORTEST_DROP: Duration = Duration::from_secs(5);
const LONGEST_DROP: Duration = Duration::from_secs(120);

/// Longest time for which a disk is measured. The next constant: most bytes that a measurement
/// writes.
const PROBE_TIME: Duration = Duration::from_millis(100);
const PROBE_BYTES: u64 = 128 << 20;
/// Size of one write of a measurement, in bytes. The next constant: size of the file that is
/// written.
const PROBE_WRITE: usize = 1 << 20;
const PROBE_FILE: u64 = 16 << 20;
/// Free bytes that a disk needs to be measured.
const PROBE_ROOM: u64 = 256 << 20;

/// Properties of a guest, its disks and the host, from which the choice is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    /// Number of pages in the guest's page cache.
    pub(super) cached: u64,
    /// Number of pages in the guest's page cache that the guest's disks may also hold.
    pub(super) on_disks: u64,
    /// Fraction of these pages on the guest's disks that the host's page cache also holds, from 0
    /// to 1.
    pub(super) on_host: f64,
    /// Throughput of the disk with the snapshot directory, in bytes a second.
    pub(super) disk_per_s: f64,
    /// Whether the guest's CPU is emulated (TCG).
    pub(super) is_emulated: bool,
}

impl Facts {
    /// Estimated seconds that a save needs with each choice.
    fn estimates(&self) -> [(Keep, f64); 3] {
        let bytes = |pages: u64| (pages * PAGE_SIZE) as f64;
        let written_per_s = self.disk_per_s.min(WRITTEN_PER_S);
        let drop_s = if self.is_emulated {
            DROP_EMULATED_S
        } else {
            DROP_S
        };
        let on_disks = bytes(self.on_disks);
        // What the host has not cached comes from a disk, about as fast as this one.
        let compare = on_disks / COMPARED_PER_S + on_disks * (1.0 - self.on_host) / self.disk_per_s;
        let rest = bytes(self.cached.saturating_sub(self.on_disks)) / written_per_s;
        [
            (Keep::Hot, compare + rest),
            (Keep::None, self.cached as f64 * drop_s),
            (Keep::All, bytes(self.cached) / written_per_s),
        ]
    }

    /// Returns what to keep, and the reason for the choice as text.
    pub(super) fn choose(&self) -> (Keep, String) {
        let estimates = self.estimates();
        let soonest = estimates.iter().map(|way| way.1).fold(f64::MAX, f64::min);
        let about = (soonest * ABOUT).max(soonest + ABOUT_S);
        let chosen = estimates.iter().find(|way| way.1 <= about);
        let [hot, none, all] = estimates.map(|way| way.1);
        let reason = format!(
            "page cache of {}, of it {} on its disks: estimated {hot:.1} s to compare and refer, {none:.1} s to drop, {all:.1} s to save",
            ByteSize(self.cached * PAGE_SIZE),
            ByteSize(self.on_disks * PAGE_SIZE),
        );
        (chosen.map_or(Keep::All, |way| way.0), reason)
    }
}

/// Returns the time limit for a guest to drop its page cache: the time in which the disk with the
/// snapshot directory could store these pages, but 5 s to 120 s.
pub(super) fn drop_limit(cached: u64, disk_per_s: f64) -> Duration {
    let seconds = (cached * PAGE_SIZE) as f64 / disk_per_s.min(WRITTEN_PER_S);
    let limit = Duration::try_from_secs_f64(seconds).unwrap_or(LONGEST_DROP);
    limit.clamp(SHORTEST_DROP, LONGEST_DROP)
}

/// Returns the throughput of the disk that holds a directory, in bytes a second. If the throughput
/// cannot be measured (the disk is almost full), the disk is assumed to take all that a save
/// writes.
pub(super) fn disk_speed(directory: &Path) -> f64 {
    // The first save makes the directory of snapshots.
    let existing = directory.ancestors().find(|place| place.is_dir());
    let measured = measure_disk(existing.unwrap_or(directory));
    measured.unwrap_or_else(|error| {
        debug!(directory = %directory.display(), %error, "cannot measure the throughput of the disk that snapshots are saved to");
        WRITTEN_PER_S
    })
}

/// Measures the throughput of a disk: writes parts of a temporary file repeatedly, past the page
/// cache.
fn measure_disk(directory: &Path) -> io::Result<f64> {
    let room = rustix::fs::statvfs(directory)?;
    if room.f_bavail * room.f_frsize < PROBE_ROOM {
        return Err(io::ErrorKind::StorageFull.into());
    }
    let file = tempfile::tempfile_in(directory)?;
    let direct = direct(&file);
    // O_DIRECT wants aligned memory, offset and length.
    let buffer = vec![1; PROBE_WRITE + PAGE_BYTES];
    let skipped = buffer.as_ptr().align_offset(PAGE_BYTES);
    let bytes = &buffer[skipped..][..PROBE_WRITE];
    let began = Instant::now();
    let mut written = 0;
    while written < PROBE_BYTES && began.elapsed() < PROBE_TIME {
        let at = written % PROBE_FILE;
        if let Some(direct) = &direct {
            direct.write_all_at(bytes, at)?;
        } else {
            file.write_all_at(bytes, at)?;
            file.sync_data()?;
        }
        written += bytes.len() as u64;
    }
    Ok(written as f64 / began.elapsed().as_secs_f64())
}

/// Opens the file again, past the page cache (`O_DIRECT`); `None`: the file system does not support
/// that.
fn direct(file: &File) -> Option<File> {
    use std::os::fd::AsRawFd as _;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = i32::try_from(OFlags::DIRECT.bits()).ok()?;
    let mut options = File::options();
    options.write(true).custom_flags(flags).open(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = (1 << 30) / PAGE_SIZE;

    const FACTS: Facts = Facts {
        cached: GIB,
        on_disks: GIB,
        on_host: 1.0,
        disk_per_s: 70e6,
        is_emulated: true,
    };

    #[track_caller]
    fn assert_chosen(facts: Facts, keep: Keep) {
        let (chosen, reason) = facts.choose();
        assert_eq!(chosen, keep, "{reason}");
    }

    #[test]
    fn a_save_stores_page_cache_that_is_on_the_disks_as_references_to_the_disks() {
        assert_chosen(FACTS, Keep::Hot);
        let (_, reason) = FACTS.choose();
        assert_eq!(
            reason,
            "page cache of 1.00 GiB, of it 1.00 GiB on its disks: estimated 0.5 s to compare and refer, 0.6 s to drop, 15.3 s to save"
        );
    }

    #[test]
    fn a_save_drops_the_page_cache_if_this_is_faster_than_comparing_or_writing_it() {
        let cold = Facts {
            on_host: 0.0,
            ..FACTS
        };
        assert_chosen(cold, Keep::None);
        let elsewhere = Facts {
            on_disks: 0,
            ..FACTS
        };
        assert_chosen(elsewhere, Keep::None);
    }

    #[test]
    fn a_save_writes_page_cache_without_a_disk_copy_if_this_is_faster_than_dropping_it() {
        let fast = Facts {
            on_disks: 0,
            disk_per_s: 5e9,
            cached: 4 * GIB,
            is_emulated: true,
            ..FACTS
        };
        let (_, none) = fast.estimates()[1];
        let (_, all) = fast.estimates()[2];
        assert!(none < all, "an emulated guest drops 1.7 GB a second");
        let tiny = Facts {
            cached: 100,
            ..fast
        };
        assert_chosen(tiny, Keep::Hot);
    }

    #[test]
    fn the_time_limit_for_dropping_page_cache_is_the_estimated_time_to_write_it() {
        assert_eq!(drop_limit(0, 1e9), SHORTEST_DROP);
        assert_eq!(drop_limit(GIB, 107_374_182.4), Duration::from_secs(10));
        assert_eq!(drop_limit(GIB, 0.0), LONGEST_DROP);
        assert_eq!(drop_limit(100 * GIB, 70e6), LONGEST_DROP);
    }

    #[test]
    fn measuring_the_write_speed_of_a_disk_leaves_no_file_on_it() {
        let place = tempfile::tempdir_in("/var/tmp").unwrap();
        let began = Instant::now();
        let speed = measure_disk(place.path()).unwrap();
        assert!(speed > 1e5 && speed.is_finite(), "{speed}");
        assert!(disk_speed(&place.path().join("a/b")).is_finite());
        assert!(began.elapsed() < Duration::from_secs(60));
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
        let unknown = disk_speed(Path::new("/proc"));
        assert!((unknown - WRITTEN_PER_S).abs() < 1.0, "{unknown}");
    }
}
