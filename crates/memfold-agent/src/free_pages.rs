//! Lists the page frames that are free in the guest's kernel, so that a snapshot can leave them
//! out.
//!
//! Source: `/proc/kpageflags`, `Documentation/admin-guide/mm/pagemap.rst`. The host begins to track
//! writes before this list is made, so it notices every frame that is used afterwards.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// `KPF_BUDDY`: the page is in a free block of the page allocator. The kernel reads this flag
/// without a lock, so it may be stale while a block is being allocated. Pages that are used
/// otherwise have another flag, or neighbours that are not free.
const FREE: u64 = 1 << 10;

/// Size of a group in frames. A group is listed only if all its frames are free. A group is larger
/// than any block that the kernel allocates without marking each page.
const TOGETHER: usize = 16;

/// Number of frames whose flags are read in one call.
const CHUNK: u64 = 64 << 10;

/// Size of a flag word in `/proc/kpageflags`, in bytes.
const WORD: usize = 8;

/// Options of the kernel's command line that make the kernel check the bytes of free pages.
const CHECKED: [&str; 3] = ["page_poison", "debug_pagealloc", "slub_debug"];

/// Writes the runs of page frames that the guest's kernel has free, one run in each line: first
/// frame and number of frames.
///
/// # Errors
///
/// An I/O error if the kernel checks the bytes of free pages, or if `/proc/kpageflags` cannot be
/// read.
pub fn write(out: &mut impl Write) -> io::Result<()> {
    let line = std::fs::read_to_string("/proc/cmdline")?;
    if let Some(option) = checks_free_pages(&line) {
        return Err(io::Error::other(format!(
            "this kernel checks the bytes of free pages ({option} on its command line)"
        )));
    }
    let flags = File::open("/proc/kpageflags")?;
    let mut out = BufWriter::new(out);
    for ram in ram(&std::fs::read_to_string("/proc/iomem")?) {
        let mut last: Option<Range<u64>> = None;
        let mut at = ram.start;
        while at < ram.end {
            let end = ram.end.min(at + CHUNK);
            for run in free_runs(at, &read(&flags, at..end)?) {
                last = match last {
                    Some(before) if before.end == run.start => Some(before.start..run.end),
                    before => {
                        put(&mut out, before)?;
                        Some(run)
                    }
                };
            }
            at = end;
        }
        put(&mut out, last)?;
    }
    out.flush()
}

fn put(out: &mut impl Write, run: Option<Range<u64>>) -> io::Result<()> {
    run.map_or(Ok(()), |run| {
        writeln!(out, "{} {}", run.start, run.end - run.start)
    })
}

/// Reads the flag words of these frames as bytes.
fn read(flags: &File, frames: Range<u64>) -> io::Result<Vec<u8>> {
    let count = usize::try_from(frames.end - frames.start).unwrap_or(0);
    let mut words = vec![0; count * WORD];
    flags.read_exact_at(&mut words, frames.start * WORD as u64)?;
    Ok(words)
}

/// Returns the runs of free groups in `words`, the flags of the frames from `first` on. `first` is
/// a multiple of [`TOGETHER`].
fn free_runs(first: u64, words: &[u8]) -> Vec<Range<u64>> {
    let mut free_group = [0; TOGETHER * WORD];
    for word in free_group.chunks_exact_mut(WORD) {
        word.copy_from_slice(&FREE.to_ne_bytes());
    }
    let together = TOGETHER as u64;
    let mut runs: Vec<Range<u64>> = Vec::new();
    let groups = words.chunks_exact(free_group.len());
    for (start, group) in (first..).step_by(TOGETHER).zip(groups) {
        // Comparing bytes is fast, which matters in an emulated guest.
        if group != free_group {
            continue;
        }
        match runs.last_mut().filter(|run| run.end == start) {
            Some(run) => run.end += together,
            None => runs.push(start..start + together),
        }
    }
    runs
}

/// Returns the frames of the lines "System RAM" of `/proc/iomem`, rounded inwards to groups.
fn ram(iomem: &str) -> Vec<Range<u64>> {
    const FRAMES: u64 = TOGETHER as u64;
    const GROUP: u64 = FRAMES * 4096;
    let range = |line: &str| {
        let (range, what) = line.split_once(" : ")?;
        let (first, last) = range.split_once('-')?;
        let first = u64::from_str_radix(first, 16).ok()?;
        let end = u64::from_str_radix(last, 16).ok()?.checked_add(1)?;
        let frames = first.div_ceil(GROUP) * FRAMES..end / GROUP * FRAMES;
        (what == "System RAM" && end > 1 && frames.start < frames.end).then_some(frames)
    };
    iomem.lines().filter_map(range).collect()
}

/// Returns the option of the kernel's command line that makes the kernel check the bytes of free
/// pages.
fn checks_free_pages(line: &str) -> Option<&str> {
    line.split_ascii_whitespace().find(|option| {
        let name = option.split('=').next().unwrap_or_default();
        CHECKED.contains(&name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_of_pages_is_reported_as_free_only_if_all_its_pages_are_free() {
        let mut flags = vec![FREE; 100];
        // Frame 20 is in use. Frame 50 looks free because of a race, but is part of a larger page
        // (KPF_COMPOUND_TAIL).
        flags[20] = 0;
        flags[50] = FREE | 1 << 16;
        let words: Vec<u8> = flags.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(
            free_runs(1600, &words),
            [1600..1616, 1632..1648, 1664..1696]
        );
    }

    #[test]
    fn system_ram_ranges_are_parsed_from_proc_iomem() {
        let text = "00000000-00000fff : Reserved\n00001000-0009fbff : System RAM\n00100000-1ffdefff : System RAM\n  \
            01000000-01ffffff : Kernel code\nfeffc000-feffffff : Reserved\n100000000-17fffffff : System RAM\n";
        assert_eq!(ram(text), [16..144, 256..131_024, 1_048_576..1_572_864]);
        assert!(
            ram("00000000-00000000 : System RAM\n").is_empty(),
            "as others than root see it"
        );
    }

    #[test]
    fn page_poisoning_is_detected_from_the_kernel_command_line() {
        assert_eq!(
            checks_free_pages("root=/dev/vda page_poison=1 quiet"),
            Some("page_poison=1")
        );
        assert_eq!(checks_free_pages("root=/dev/vda init_on_free=1"), None);
    }
}
