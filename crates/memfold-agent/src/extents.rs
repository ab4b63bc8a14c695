//! Finds where files are stored on the guest's disks. A snapshot can then refer to blocks of a
//! disk, instead of containing the guest's page cache a second time.
//!
//! ```text
//!   standard input    one path in each line; any byte may be written as \ooo (octal), as in /proc/self/mountinfo
//!   FS_IOC_FIEMAP     page of the file -> byte on the file system's device
//!   /sys/dev/block    that device -> disk, and the device's position on the disk
//!   standard output   one run in each line: number of the path, first page of the file, pages, disk, first page on the disk
//! ```
//! For this, the agent reads no file and writes no dirty page to disk. It leaves out files whose
//! location the kernel does not know at once. The answer may be out of date, so the host compares
//! the bytes.

use std::io::{self, BufRead, BufWriter, Write};
use std::path::Path;

use memfold_sys::extents::{Extent, extents};
use memfold_units::PAGE_SIZE;

use crate::block_devices::{BlockDevices, Place};
use crate::file_list::{find, paths};

/// Most runs that are written for one file, and for all files together.
const MAX_RUNS: (usize, usize) = (1 << 13, 1 << 15);

/// Pages of a file that are contiguous on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    /// First page of the run, counted in the file.
    page: u64,
    pages: u64,
    /// First page of the run, counted on the disk.
    block: u64,
}

/// Reads paths from `input`, one in each line. Writes a line to `output` for each run of a file's
/// pages that is contiguous on a disk.
pub fn write(input: &mut impl BufRead, output: &mut impl Write) -> io::Result<()> {
    write_below(Path::new("/sys"), input, output)
}

fn write_below(sys: &Path, input: &mut impl BufRead, output: &mut impl Write) -> io::Result<()> {
    let mut devices = BlockDevices::new(sys);
    let mut output = BufWriter::new(output);
    let mut left = MAX_RUNS.1;
    for (number, path) in paths(input).enumerate() {
        // Files that no longer exist, or whose file system does not report locations, are left out.
        let Ok(Some((place, runs))) = look(&path?, &mut devices) else {
            continue;
        };
        for run in runs.iter().take(left) {
            let Run { page, pages, block } = run;
            writeln!(output, "{number} {page} {pages} {} {block}", place.disk)?;
        }
        left = left.saturating_sub(runs.len());
        if left == 0 {
            break;
        }
    }
    output.flush()
}

/// Returns where a regular file is stored; `None` if it is not on a disk.
fn look<'a>(
    path: &[u8],
    devices: &'a mut BlockDevices,
) -> io::Result<Option<(&'a Place, Vec<Run>)>> {
    let Some(named) = find(path)? else {
        return Ok(None);
    };
    let Some(place) = devices.place(named.facts.st_dev) else {
        return Ok(None);
    };
    let file = named.open()?;
    let mut runs = Vec::new();
    let mut from = 0;
    while runs.len() < MAX_RUNS.0 {
        let found = extents(&file, from)?;
        for extent in &found {
            add(&mut runs, place.start, extent);
        }
        let Some(last) = found.last().filter(|last| !last.is_last()) else {
            break;
        };
        let end = last.logical.saturating_add(last.length);
        if end <= from {
            break;
        }
        from = end;
    }
    Ok(Some((place, runs)))
}

/// Adds the whole pages of an extent to `runs`. `start`: byte of the disk at which the file's block
/// device begins.
fn add(runs: &mut Vec<Run>, start: u64, extent: &Extent) {
    let Some(byte) = start.checked_add(extent.physical) else {
        return;
    };
    let whole = extent.logical % PAGE_SIZE == 0 && byte % PAGE_SIZE == 0;
    let run = Run {
        page: extent.logical / PAGE_SIZE,
        pages: extent.length / PAGE_SIZE,
        block: byte / PAGE_SIZE,
    };
    if !extent.is_plain() || !whole || run.pages == 0 {
        return;
    }
    match runs.last_mut() {
        Some(last)
            if last.page + last.pages == run.page && last.block + last.pages == run.block =>
        {
            last.pages += run.pages;
        }
        _ => runs.push(run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file_list::{MAX_FILES, MAX_INPUT};
    use rustix::fs::{FileType, Mode};
    use std::fs::{self, File};
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::time::Instant;

    fn told(sys: &Path, input: &[u8]) -> String {
        let mut output = Vec::new();
        write_below(sys, &mut &input[..], &mut output).unwrap();
        String::from_utf8(output).unwrap()
    }

    /// Creates a `/sys` in which the device of `directory` is a partition that starts at
    /// sector 2048.
    fn sys(directory: &Path) -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        let number = fs::metadata(directory).unwrap().dev();
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let partition = sys.path().join("devices/vdx/vdx1");
        fs::create_dir_all(&partition).unwrap();
        fs::create_dir(sys.path().join("devices/vdx/device")).unwrap();
        fs::write(sys.path().join("devices/vdx/dev"), "254:16\n").unwrap();
        fs::write(partition.join("partition"), "1\n").unwrap();
        fs::write(partition.join("start"), "2048\n").unwrap();
        fs::create_dir_all(sys.path().join("dev/block")).unwrap();
        let link = sys.path().join(format!("dev/block/{major}:{minor}"));
        symlink(&partition, link).unwrap();
        sys
    }

    fn numbers(line: &str) -> Vec<u64> {
        let fields = line.split(' ').filter(|field| *field != "254:16");
        fields.map(|field| field.parse().unwrap()).collect()
    }

    #[test]
    fn disk_extents_are_reported_for_regular_files_and_not_for_links_or_pipes() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let at = |name: &str| directory.path().join(name);
        // The file begins with a hole of 64 pages and ends with a part of a page.
        let file = File::create(at("a\nfile\\")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![7; 40_000], 64 * 4096).unwrap();
        file.sync_all().unwrap();
        if extents(&file, 0).is_err() {
            memfold_testkit::skip!("needs a source tree on a file system with FIEMAP");
        }
        symlink(at("a\nfile\\"), at("link")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        let sys = sys(directory.path());
        let root = directory.path().as_os_str().as_bytes();
        let mut input = Vec::new();
        for name in [
            "link",
            "pipe",
            "",
            "nothing",
            "a\\012file\\134",
            "a\\012file\\134/x",
        ] {
            input.extend([root, b"/", name.as_bytes(), b"\n"].concat());
        }
        input.extend(b"etc/passwd\n\n/dev/null\n/proc/self/maps\n/\0\n");
        let begun = Instant::now();
        let told = told(sys.path(), &input);
        let limit = memfold_testkit::patience(std::time::Duration::from_secs(5));
        assert!(begun.elapsed() < limit, "waits for nothing");
        let runs: Vec<_> = told.lines().map(numbers).collect();
        assert!(!runs.is_empty());
        assert!(runs.iter().all(|run| run[0] == 4), "{told}");
        assert_eq!(runs[0][1], 64);
        let device: u64 = extents(&file, 0).unwrap()[0].physical;
        assert_eq!(runs[0][3], (device + (1 << 20)) / 4096);
        let pages: u64 = runs.iter().map(|run| run[2]).sum();
        assert!((9..=10).contains(&pages), "{told}");
    }

    #[test]
    fn extents_without_a_disk_block_are_skipped_and_adjacent_extents_are_joined() {
        let extent = |logical: u64, physical: u64, length: u64, flags: u32| Extent {
            logical,
            physical,
            length,
            flags,
            ..Extent::default()
        };
        let mut runs = Vec::new();
        for (logical, physical, flags) in [
            (0, 0x10_0000, 0),
            (0x2000, 0x10_2000, 0x1000),
            (0x4000, 0, 0x2 | 0x4),
            (0x6000, 0x20_0000, 0x800),
            (0x8000, 0x20_0200, 0),
            (0xa200, 0x30_0000, 0),
            (0xc000, u64::MAX - 0xfff, 0x2000),
            (0xe000, 0x40_0000, 0x8 | 0x80),
            (0x1_0000, 0x50_0000, 0x100 | 0x200),
            (0x1_2000, 0x60_0000, 0x1 | 0x4000),
            (0x1_4000, 0x70_0000, 0x1),
        ] {
            add(&mut runs, 0x1000, &extent(logical, physical, 0x2000, flags));
        }
        add(&mut runs, 0, &extent(0x1_6000, 0x80_0000, 0xfff, 0));
        let run = |page, pages, block| Run { page, pages, block };
        assert_eq!(runs, [run(0, 4, 0x101), run(0x14, 2, 0x701)]);
    }

    #[test]
    fn if_a_list_of_paths_exceeds_the_size_limit_only_the_paths_before_the_limit_are_processed() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let file = directory.path().join("f");
        fs::write(&file, vec![1; 8192]).unwrap();
        let file = File::open(&file).unwrap();
        file.sync_all().unwrap();
        if extents(&file, 0).is_err() {
            memfold_testkit::skip!("needs a source tree on a file system with FIEMAP");
        }
        let sys = sys(directory.path());
        let line = [directory.path().as_os_str().as_bytes(), b"/f\n"].concat();
        let told = told(sys.path(), &line.repeat(MAX_FILES + 10));
        let lines = told.lines().count();
        let fit = usize::try_from(MAX_INPUT).unwrap() / line.len();
        // The input may be cut right before the end of a line.
        let all = lines == fit || lines == fit + 1 || lines == MAX_FILES;
        assert!(all, "{lines} of {fit}");
    }
}
