//! Reads the memory of VMs twice from outside, to find out how many pages have equal content and do
//! not change. The two reads keep to a CPU budget.
//!
//! 1. The page maps show which pages exist. Pages that are shared already or not in memory are
//!    counted but not read: pages of files or shared memory, the kernel's zero page, swapped pages
//!    and holes.
//! 2. First read: every other page is read and hashed, in random order.
//! 3. Second read, at least one second later: the sampled pages whose content occurs more than
//!    once, and one in eight of the others. KSM does not merge pages that change between two of its
//!    passes, so a page that changed is not counted as a possible saving.
//!
//! Reading 64 bytes of each page costs three quarters of reading the whole page (0.55 against 0.74
//! us a page), because finding the page is the expensive part. Therefore whole pages are read, and
//! sampled by all of their bytes.

use std::io;
use std::time::Duration;

use foldhash::HashMap;
use memfold_sys::memory;
use memfold_sys::pagemap::{Filter, Pagemap, Region, category};
use memfold_units::{Hva, PAGE_SIZE};
use rustix::process::Pid;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::error::{EstimateError, has_ended};
use super::options::Options;
use super::pace::{Pace, Told};
use super::sample::{Again, Frequent, Sample, Seen};
use super::targets::{Range, Target};

/// Number of pages that one system call reads. They fit into a core's cache until they are hashed.
const BATCH: usize = 128;

/// Least size of the sample, in pages.
const LEAST_SAMPLE: usize = 1 << 16;

/// Least time between the two reads of a page.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

/// Part of a limited time that the first read of all pages may take.
const FIRST_LOOK: f64 = 0.75;

/// One in this many sampled pages whose content occurs only once is read a second time.
pub const LONERS: u32 = 8;

const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_SIZE);

/// Numbers of a VM's pages, by class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// Number of pages of the VM's memory, whether or not the host holds them in RAM.
    pub memory: u64,
    /// Number of pages of files or shared memory: of a page store, a snapshot's image, a segment.
    pub file: u64,
    /// Number of pages mapped to the kernel's zero page.
    pub kernel_zero: u64,
    /// Number of pages in swap.
    pub swapped: u64,
    /// Number of pages of hugetlbfs, in pages of 4 KiB.
    pub hugetlb: u64,
    /// Number of pages in memory that belong to this VM only or were merged by KSM. The estimate
    /// reads these pages.
    pub private: u64,
    /// Number of private pages that huge pages map.
    pub huge: u64,
    /// Number of private pages that are offered to KSM.
    pub mergeable: u64,
    /// Number of private pages that were read.
    pub read: u64,
    /// Number of private pages that disappeared before they could be read.
    pub gone: u64,
}

/// Result of reading the VMs' memory twice.
#[derive(Debug)]
pub struct Looked {
    /// The VMs that were read, without those that ended meanwhile.
    pub targets: Vec<Target>,
    /// Numbers of pages of each VM in `targets`, by class, in the same order.
    pub vms: Vec<Pages>,
    /// The sampled pages of all VMs, sorted by content.
    pub sample: Sample,
    /// Whether the first read covered every private page; false: the time limit ended the first
    /// read.
    pub complete: bool,
    /// Number of pages that were read a second time.
    pub again_pages: u64,
}

/// A piece of consecutive pages, by page number.
#[derive(Clone, Copy, Debug)]
struct Piece {
    first: u64,
    pages: u32,
    huge: bool,
}

/// Pages of one VM that are read together: number of the VM, and its pages.
type Batch = (u32, Vec<Piece>);

/// Reads the memory of the VMs `targets` twice, within the CPU budget `pace`. `told` is called with
/// the progress.
///
/// # Errors
///
/// An [`EstimateError`] if no VM is left, if memory may not be read, if the kernel lacks
/// `PAGEMAP_SCAN`, or if the user interrupted.
pub fn look(
    targets: Vec<Target>,
    options: &Options,
    pace: &Pace<'_>,
    told: Told<'_>,
) -> Result<Looked, EstimateError> {
    let mut open = Vec::new();
    let (mut kept, mut vms) = (Vec::new(), Vec::new());
    let mut batches = Vec::new();
    for target in targets {
        let pagemap = pid(&target).and_then(Pagemap::open);
        let Some(pagemap) = unless_ended(&target, pagemap)? else {
            continue;
        };
        let vm = u32::try_from(kept.len()).unwrap_or(u32::MAX);
        let of_vm = (vm, options.reads_files);
        let Some(pages) = scan(&target, &pagemap, of_vm, &mut batches)? else {
            continue;
        };
        open.push(pagemap);
        kept.push(target);
        vms.push(pages);
        pace.keep(first_end(pace))?;
    }
    if kept.is_empty() {
        return Err(EstimateError::NoVms);
    }
    shuffle(&mut batches, options.seed);
    let mut looked = Looked {
        sample: Sample::new(room(&vms, options)),
        targets: kept,
        vms,
        complete: true,
        again_pages: 0,
    };
    first(&mut looked, &open, &batches, options, pace, told)?;
    second(&mut looked, options, pace, told)?;
    looked.sample.pages.sort_unstable_by_key(|seen| seen.hash);
    mark_merged(&mut looked.sample.zero);
    looked.sample.frequent.values_mut().for_each(mark_merged);
    Ok(looked)
}

/// Returns the size of the sample in pages: a quarter of all pages, so that the second read costs
/// little beside the first. A quarter of a gigabyte leaves an error bar of about one percent.
fn room(vms: &[Pages], options: &Options) -> usize {
    let private: u64 = vms.iter().map(|pages| pages.private).sum();
    let quarter = usize::try_from(private / 4).unwrap_or(usize::MAX);
    quarter.max(LEAST_SAMPLE).min(options.sample_pages)
}

/// Returns the time at which the first read must end, if the time is limited.
fn first_end(pace: &Pace<'_>) -> Option<Duration> {
    pace.limit.map(|limit| limit.mul_f64(FIRST_LOOK))
}

fn pid(target: &Target) -> io::Result<Pid> {
    Pid::from_raw(target.pid).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Returns `None` if the VM has ended meanwhile.
fn unless_ended<T>(target: &Target, found: io::Result<T>) -> Result<Option<T>, EstimateError> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if has_ended(&error) => Ok(None),
        Err(source) => Err(EstimateError::of(target.pid, source)),
    }
}

/// Counts a VM's pages, and lists the pages to be read. Returns `None` if the VM has ended.
fn scan(
    target: &Target,
    pagemap: &Pagemap,
    (vm, reads_files): (u32, bool),
    batches: &mut Vec<Batch>,
) -> Result<Option<Pages>, EstimateError> {
    let mut pages = Pages::default();
    let (mut pieces, mut room) = (Vec::new(), BATCH as u64);
    for range in &target.ranges {
        pages.memory += (range.end - range.start) / PAGE_SIZE;
        let regions = pagemap.scan(Hva(range.start), Hva(range.end), Filter::THERE);
        let Some(regions) = unless_ended(target, regions)? else {
            return Ok(None);
        };
        for region in regions {
            if !count(&mut pages, range, &region, reads_files) {
                continue;
            }
            let (mut at, mut left) = (region.start.0 / PAGE_SIZE, region.pages());
            while left > 0 {
                let take = left.min(room);
                pieces.push(Piece {
                    first: at,
                    pages: u32::try_from(take).unwrap_or(u32::MAX),
                    huge: region.is(category::HUGE),
                });
                at += take;
                left -= take;
                room -= take;
                if room == 0 {
                    batches.push((vm, std::mem::take(&mut pieces)));
                    room = BATCH as u64;
                }
            }
        }
    }
    if !pieces.is_empty() {
        batches.push((vm, pieces));
    }
    Ok(Some(pages))
}

/// Counts the pages of a region. Returns whether they are to be read.
fn count(pages: &mut Pages, range: &Range, region: &Region, reads_files: bool) -> bool {
    let n = region.pages();
    if reads_files && !range.hugetlb && region.is(category::FILE) && region.is(category::PRESENT) {
        pages.file += n;
        return true;
    }
    let place = if range.hugetlb {
        &mut pages.hugetlb
    } else if !region.is(category::PRESENT) {
        &mut pages.swapped
    } else if region.is(category::ZERO) {
        &mut pages.kernel_zero
    } else if region.is(category::FILE) {
        &mut pages.file
    } else {
        pages.huge += if region.is(category::HUGE) { n } else { 0 };
        pages.mergeable += if range.mergeable { n } else { 0 };
        pages.private += n;
        return true;
    };
    *place += n;
    false
}

/// Shuffles a list (method of Fisher and Yates).
fn shuffle<T>(all: &mut [T], seed: u64) {
    for at in (1..all.len()).rev() {
        let chance = xxh3_64_with_seed(&at.to_ne_bytes(), seed);
        let other = chance % (at as u64 + 1);
        all.swap(at, usize::try_from(other).unwrap_or(at));
    }
}

/// Returns the frame numbers of all pages of these pieces; 0 for a page without a frame, or whose
/// frame may not be read. Pieces that lie close together are read at once.
fn frames(pagemap: &Pagemap, pieces: &[Piece]) -> Vec<u64> {
    let end = |piece: &Piece| piece.first + u64::from(piece.pages);
    let near = |from: &Piece, to: &Piece| end(to) - from.first <= 8 * BATCH as u64;
    let mut found = Vec::with_capacity(BATCH);
    let mut rest = pieces;
    while let Some(first) = rest.first() {
        let (together, behind) = rest.split_at(rest.partition_point(|piece| near(first, piece)));
        let (together, behind) = match together {
            // The first piece alone may be longer than the limit.
            [] => rest.split_at(1),
            _ => (together, behind),
        };
        let length = together.last().map_or(0, |last| end(last) - first.first);
        let count = usize::try_from(length).unwrap_or(0);
        let all = pagemap.frames(Hva(first.first * PAGE_SIZE), count);
        let all = all.unwrap_or_default();
        for piece in together {
            let from = usize::try_from(piece.first - first.first).unwrap_or(usize::MAX);
            let frame = |at| all.get(from.saturating_add(at)).copied().flatten();
            found.extend((0..piece.pages as usize).map(|at| frame(at).unwrap_or(0)));
        }
        rest = behind;
    }
    found
}

fn first(
    looked: &mut Looked,
    pagemaps: &[Pagemap],
    batches: &[Batch],
    options: &Options,
    pace: &Pace<'_>,
    told: Told<'_>,
) -> Result<(), EstimateError> {
    let total: u64 = looked.vms.iter().map(|pages| pages.private).sum();
    let zero = xxh3_64_with_seed(&[0; PAGE], options.seed);
    let mut reader = Reader::new(options.seed);
    let (mut numbers, mut seen) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
    let mut done = 0;
    for &(vm, ref of_batch) in batches {
        numbers.clear();
        seen.clear();
        let frames = frames(&pagemaps[vm as usize], of_batch);
        for piece in of_batch {
            for page in piece.first..piece.first + u64::from(piece.pages) {
                let frame = frames[seen.len()];
                numbers.push(page);
                seen.push(Seen {
                    page,
                    frame,
                    vm,
                    huge: piece.huge,
                    ..Seen::default()
                });
            }
        }
        let pages = &mut looked.vms[vm as usize];
        let sample = &mut looked.sample;
        reader.read(&looked.targets[vm as usize], &numbers, |at, hash| {
            let Some(hash) = hash else {
                pages.gone += 1;
                return;
            };
            pages.read += 1;
            let seen = Seen { hash, ..seen[at] };
            if hash == zero {
                sample.zero.add(seen);
            } else {
                sample.add(seen);
            }
        })?;
        done += numbers.len() as u64;
        told("first look", done, total);
        if !pace.keep(first_end(pace))? && done < total {
            looked.complete = false;
            break;
        }
    }
    Ok(())
}

/// Reads pages again: those with a twin, and some of the others.
fn second(
    looked: &mut Looked,
    options: &Options,
    pace: &Pace<'_>,
    told: Told<'_>,
) -> Result<(), EstimateError> {
    let read: u64 = looked.vms.iter().map(|pages| pages.read).sum();
    // Reading single pages takes longer than reading consecutive ones.
    let cost = pace.cpu().mul_f64(1.5 / read.max(1) as f64);
    let from = pace.elapsed() + BETWEEN_LOOKS;
    let from = pace.limit.map_or(from, |limit| from.min(limit));
    let sample = &mut looked.sample;
    sample.pages.sort_unstable_by_key(|seen| seen.hash);
    // If there is no time to read all of the sample again, the sample shrinks.
    if let Some(limit) = pace.limit {
        while sample.pages.len() > 1024 && cost.mul_f64(wanted(sample) as f64) > pace.left(limit) {
            sample.halve();
            sample.zero.halve();
        }
    }
    pace.wait_until(from)?;
    let zero = sample.zero.kept.iter_mut();
    let frequent = sample.frequent.values_mut();
    let frequent = frequent.flat_map(|frequent| frequent.kept.iter_mut());
    let groups = sample.pages.chunk_by_mut(|a, b| a.hash == b.hash);
    let groups = groups.filter(|group| is_wanted(group)).flatten();
    let mut again: Vec<&mut Seen> = zero.chain(frequent).chain(groups).collect();
    again.sort_unstable_by_key(|seen| (seen.vm, seen.page));
    let total = again.len() as u64;
    let mut reader = Reader::new(options.seed);
    let mut numbers = Vec::with_capacity(BATCH);
    for of_vm in again.chunk_by_mut(|a, b| a.vm == b.vm) {
        for batch in of_vm.chunks_mut(BATCH) {
            numbers.clear();
            numbers.extend(batch.iter().map(|seen| seen.page));
            let target = &looked.targets[batch[0].vm as usize];
            reader.read(target, &numbers, |at, hash| {
                let same = hash == Some(batch[at].hash);
                batch[at].again = if same { Again::Same } else { Again::Changed };
            })?;
            looked.again_pages += numbers.len() as u64;
            told("second look", looked.again_pages, total);
            if !pace.keep(pace.limit)? {
                // Pages that were not read again count as unchanged.
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Returns whether the pages of one content are read again.
fn is_wanted(group: &[Seen]) -> bool {
    group.len() > 1 || group[0].hash % u64::from(LONERS) == 0
}

fn wanted(sample: &Sample) -> usize {
    let groups = sample.pages.chunk_by(|a, b| a.hash == b.hash);
    let groups = groups.filter(|group| is_wanted(group)).map(<[Seen]>::len);
    let frequent = sample.frequent.values().map(|frequent| frequent.kept.len());
    sample.zero.kept.len() + groups.chain(frequent).sum::<usize>()
}

/// Marks copies of a frequent content that share a frame with other copies, because KSM has merged
/// them. If the places of all copies are known, one copy of each frame stays unmarked. If only some
/// are known, a frame that shows two of them holds many more.
fn mark_merged(frequent: &mut Frequent) {
    let whole = frequent.is_whole();
    let mut first: HashMap<u64, usize> = HashMap::default();
    for at in 0..frequent.kept.len() {
        let frame = frequent.kept[at].frame;
        if frame == 0 {
            continue;
        }
        if let Some(&before) = first.get(&frame) {
            frequent.kept[at].merged = true;
            frequent.kept[before].merged |= !whole;
        } else {
            first.insert(frame, at);
        }
    }
}

/// Reads and hashes pages of a VM.
struct Reader {
    buffer: Vec<u8>,
    ranges: Vec<(Hva, usize)>,
    seed: u64,
}

impl Reader {
    fn new(seed: u64) -> Self {
        Self {
            buffer: vec![0; BATCH * PAGE],
            ranges: Vec::with_capacity(BATCH),
            seed,
        }
    }

    /// Reads pages. Calls `each` with the index of each page in `pages`, ascending, and the page's
    /// hash (`None` for a page that no longer exists).
    fn read(
        &mut self,
        target: &Target,
        pages: &[u64],
        mut each: impl FnMut(usize, Option<u64>),
    ) -> Result<(), EstimateError> {
        let Ok(process) = pid(target) else {
            return Ok(());
        };
        let mut at = 0;
        while at < pages.len() {
            self.ranges.clear();
            for &page in &pages[at..] {
                let start = Hva(page * PAGE_SIZE);
                match self.ranges.last_mut() {
                    Some((first, length)) if first.0 + *length as u64 == start.0 => *length += PAGE,
                    _ => self.ranges.push((start, PAGE)),
                }
            }
            let buffer = &mut self.buffer[..(pages.len() - at) * PAGE];
            let copied = match memory::read_many(process, &self.ranges, buffer) {
                Ok(copied) => copied / PAGE,
                Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(EstimateError::of(target.pid, source));
                }
                Err(_) => 0,
            };
            for page in buffer[..copied * PAGE].chunks_exact(PAGE) {
                each(at, Some(xxh3_64_with_seed(page, self.seed)));
                at += 1;
            }
            if at < pages.len() {
                each(at, None);
                at += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffled_list_contains_every_item_once() {
        let mut all: Vec<u32> = (0..1000).collect();
        shuffle(&mut all, 5);
        assert_ne!(all[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        all.sort_unstable();
        assert_eq!(all, (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn of_the_copies_in_one_page_frame_all_but_the_first_count_as_merged_already() {
        let merged = |room: usize| {
            let mut frequent = Frequent::new(1.0, room);
            for page in 0..1000 {
                // Half of the copies lie in frames of 50 copies, half have their own frame.
                let frame = if page < 500 {
                    1 + page / 50
                } else {
                    1000 + page
                };
                frequent.add(Seen {
                    page,
                    frame,
                    ..Seen::default()
                });
            }
            mark_merged(&mut frequent);
            let merged = frequent.kept.iter().filter(|seen| seen.merged).count();
            (merged as f64, frequent.kept.len() as f64)
        };
        assert_eq!(merged(1000), (490.0, 1000.0));
        let (found, kept) = merged(500);
        assert!((0.4..0.6).contains(&(found / kept)), "{found} of {kept}");
    }

    #[test]
    fn when_memory_is_hashed_for_an_estimate_unmapped_pages_get_no_hash() {
        let mapping = memfold_sys::region::Mapping::anonymous(4, true).unwrap();
        mapping.area().write(&[7; 4 * 512]);
        let first = mapping.area().start().0 / PAGE_SIZE;
        let target = Target {
            pid: rustix::process::getpid().as_raw_nonzero().get(),
            ..Target::default()
        };
        let mut found = Vec::new();
        let pages = [1, first, first + 1, 2, first + 3, 3];
        let mut reader = Reader::new(0);
        reader
            .read(&target, &pages, |at, hash| found.push((at, hash)))
            .unwrap();
        let hash = Some(xxh3_64_with_seed(&7_u64.to_ne_bytes().repeat(512), 0));
        let wanted = [None, hash, hash, None, hash, None];
        assert_eq!(found, wanted.into_iter().enumerate().collect::<Vec<_>>());
    }
}
