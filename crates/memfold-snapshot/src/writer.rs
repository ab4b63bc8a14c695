//! Writes the RAM image of a snapshot. All cores work in parallel ([`pipeline`]): they read the
//! VM's memory, compute checksums, compare pages with the disks, and write the pages that no disk
//! contains.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_host::progress::Progress;
use memfold_sys::memory;
use memfold_units::{PAGE_BYTES, PAGE_SIZE};
use parking_lot::Mutex;
use rustix::process::Pid;

use super::candidates::{Candidates, MOST_COMPARED, mappings};
use super::compare::{Comparison, PIECE_PAGES, Piece};
use super::encryption::{BODY_BYTES, Body, DataKey, SealedImage, bound_layout};
use super::image::{
    CHUNK_BYTES, CHUNK_PAGES, ImageBlock, ImageCounts, SUM_BYTES, Source, bytes, page_change,
    pages_sum, place, write_nonzero, zero_chunk_sum,
};
use super::manifest::{INDEX, MOST_MAPPINGS, SEALED};
use super::parent::Parent;
use super::past::Past;
use super::pipeline::{self, PIECE_BYTES, Writeback};
use super::plan::{Chunk, Plan, within};
use super::refer::Reference;
use super::room::ReserveGuard;

/// Most chunks of the parent that a fork reads and compares with their checksums. Reading and
/// hashing one from the page cache takes 0.25 ms of a core, so these take 16 ms, after the VM has
/// resumed. Changed pages that are scattered over 2 GiB are in 1,024 chunks, which would take
/// longer than the fork itself.
const MOST_CHECKED: usize = 64;

/// Time of each stage of writing an image, summed over all workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    /// Time for reading the VM's memory.
    pub read: Duration,
    /// Time for computing checksums of the image.
    pub hash: Duration,
    /// Time for reading pages from disks and comparing them with the VM's memory.
    pub compare: Duration,
    /// Time for finding pages that hold only zeroes, and writing the others to the page cache.
    pub write: Duration,
}

fn measure<T>(time: &mut Duration, work: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let done = work();
    *time += began.elapsed();
    done
}

/// Writer of a RAM image, which writes one or more RAM blocks at a time.
#[derive(Debug)]
pub struct Writer<'a> {
    ram: &'a File,
    placed: Vec<ImageBlock>,
    parent: Option<Arc<Parent>>,
    /// Whether the parent's chunks that the layer changes are not compared with their checksums.
    trusts_parent: bool,
    writeback: Option<Writeback>,
    /// Set if the image is encrypted: the file holds frames.
    sealed: Option<SealedImage>,
    /// Set if free space must be left on the file system of the image.
    reserve: Option<ReserveGuard>,
    comparison: Comparison,
    sums: Vec<u8>,
    written: Written,
}

/// Result of writing chunks.
#[derive(Debug, Default)]
struct Written {
    counts: ImageCounts,
    references: Vec<Reference>,
    stages: Stages,
}

impl Written {
    fn add(&mut self, more: Self) {
        self.counts.saved_pages += more.counts.saved_pages;
        self.counts.zero_pages += more.counts.zero_pages;
        self.references.extend(more.references);
        self.stages.read += more.stages.read;
        self.stages.hash += more.stages.hash;
        self.stages.compare += more.stages.compare;
        self.stages.write += more.stages.write;
    }
}

impl<'a> Writer<'a> {
    /// Starts to write an image into `ram`, an empty file. The plan was made with the same parent.
    pub fn new(plan: &Plan, ram: &'a File, parent: Option<Arc<Parent>>) -> io::Result<Self> {
        let placed = place(&plan.blocks);
        let mut sums = Vec::new();
        for block in &plan.blocks {
            let of_parent = parent.as_ref().and_then(|parent| parent.block(block));
            for first in (0..block.pages).step_by(CHUNK_BYTES / PAGE_BYTES) {
                // Pages that are not read are zeroes, or the parent's.
                let sum = of_parent.map_or_else(|| Ok(zero_chunk_sum()), |of| of.sum(first))?;
                sums.extend(sum.to_le_bytes());
            }
        }
        ram.set_len((sums.len() / SUM_BYTES * CHUNK_BYTES) as u64)?;
        Ok(Self {
            ram,
            placed,
            parent,
            trusts_parent: false,
            writeback: None,
            sealed: None,
            reserve: None,
            comparison: Comparison::new(Candidates::default(), 0),
            sums,
            written: Written {
                counts: plan.counts,
                ..Written::default()
            },
        })
    }

    /// Leaves out the comparison of the parent's chunks that the layer changes with their checksums
    /// if there are many of them. The comparison has to read these chunks completely.
    pub(super) fn trust_parent_if_large(&mut self, plan: &Plan) {
        let chunks = (0..plan.blocks.len()).map(|number| plan.chunks(number).len());
        self.trusts_parent = chunks.sum::<usize>() > MOST_CHECKED;
    }

    /// Leaves the reserve of the file system free on which the image is. `place`: its directory.
    pub(super) fn keep_reserve(&mut self, place: &Path) {
        self.reserve = Some(ReserveGuard::new(place));
    }

    /// Takes room in the image's file system for the pages of these ranges.
    fn take_room(&self, ranges: &[(u64, u64)]) -> io::Result<()> {
        let pages: u64 = ranges.iter().map(|(from, to)| to - from).sum();
        let take = |reserve: &ReserveGuard| reserve.take(pages * PAGE_SIZE);
        self.reserve.as_ref().map_or(Ok(()), take)
    }

    /// Makes a thread write the image from the page cache to the disk while the image is written.
    /// Not useful for images that are compressed afterwards.
    pub fn write_back(&mut self) -> io::Result<()> {
        self.writeback = Some(Writeback::start(self.ram)?);
        Ok(())
    }

    /// Makes the file an encrypted image, `ram.sealed`, whose chunks are compressed if `compress`
    /// is set. Called before anything is written.
    pub(super) fn seal(&mut self, key: &DataKey, compress: bool) -> io::Result<()> {
        let chunks = self.sums.len() / SUM_BYTES;
        self.sealed = Some(SealedImage::new(key.clone(), SEALED, compress, chunks)?);
        self.ram.set_len(0)
    }

    /// Returns the length in bytes of the image, before it is compressed or encrypted.
    pub(super) fn image_bytes(&self) -> u64 {
        (self.sums.len() / SUM_BYTES * CHUNK_BYTES) as u64
    }

    /// Returns the length in bytes of the encrypted image, and its encrypted table of frames;
    /// `None` if the image is not encrypted.
    pub(super) fn sealed_index(&self) -> io::Result<Option<(u64, Vec<u8>)>> {
        let Some(sealed) = &self.sealed else {
            return Ok(None);
        };
        let layout = bound_layout(self.image_bytes(), &self.placed);
        Ok(Some((sealed.bytes(), sealed.index(&layout, INDEX)?)))
    }

    /// Sets the candidates. Pages that files contain are then kept by reference, and so are the
    /// pages of the plan that are the parent's.
    pub(super) fn compare_with(
        &mut self,
        plan: &Plan,
        mut candidates: Candidates,
    ) -> io::Result<()> {
        let kept = mappings(&plan.kept, 1);
        if let Some(parent) = &self.parent {
            let mut runs = Vec::new();
            for (block, ranges) in plan.blocks.iter().zip(&plan.ranges) {
                let of = parent.block(block);
                let pages = ranges.iter().map(|&(from, to)| from..to);
                runs.extend(
                    of.iter()
                        .flat_map(|of| pages.clone().flat_map(|pages| of.runs(block.hva, pages))),
                );
            }
            runs.sort_unstable_by_key(|run| run.hva);
            let most = MOST_COMPARED.min(MOST_MAPPINGS - kept);
            let first = candidates.add_parent(parent.files()?, runs, most)?;
            let references = plan.references(&self.placed, first);
            self.written.references.extend(references);
        }
        self.comparison = Comparison::new(candidates, kept);
        Ok(())
    }

    /// Returns the references, sorted by page, and the files that the references name.
    pub(super) fn take_references(&mut self) -> (Vec<Reference>, Candidates) {
        let mut references = std::mem::take(&mut self.written.references);
        references.sort_unstable_by_key(|reference| reference.page);
        (references, std::mem::take(&mut self.comparison.candidates))
    }

    /// Writes the blocks of the plan with these numbers. The process must be stopped, the plan's
    /// pages copied, or `past` must keep old contents of its memory.
    pub fn blocks(
        &mut self,
        plan: &Plan,
        numbers: &[usize],
        past: Option<&Past>,
        progress: &Progress,
    ) -> io::Result<()> {
        let pages: u64 = numbers.iter().map(|&n| plan.blocks[n].pages).sum();
        let chunks: Vec<Chunk> = numbers.iter().flat_map(|&n| plan.chunks(n)).collect();
        let chunk_pages =
            |chunk: &Chunk| CHUNK_PAGES.min(plan.blocks[chunk.block].pages - chunk.first);
        // The other pages need no work.
        let wanted: u64 = chunks.iter().map(chunk_pages).sum();
        progress.add((pages - wanted) * PAGE_SIZE);
        let sums = std::mem::take(&mut self.sums);
        let made = Mutex::new((sums, std::mem::take(&mut self.written)));
        let of_frame = self.sealed.as_ref().map_or(0, |_| BODY_BYTES);
        let buffer_bytes = 3 * PIECE_BYTES + of_frame;
        let done = pipeline::run(chunks.len() as u64, buffer_bytes, |number, buffers| {
            let chunk = &chunks[usize::try_from(number).map_err(io::Error::other)?];
            let (change, written) = self.chunk(plan, chunk, past, buffers)?;
            let at = self.placed[chunk.block].first_page + chunk.first;
            let sum_at = usize::try_from(at / CHUNK_PAGES).map_err(io::Error::other)? * SUM_BYTES;
            let mut made = made.lock();
            let sum = &mut made.0[sum_at..][..SUM_BYTES];
            let before = u128::from_le_bytes(std::array::from_fn(|byte| sum[byte]));
            sum.copy_from_slice(&before.wrapping_add(change).to_le_bytes());
            made.1.add(written);
            drop(made);
            if let Some(writeback) = self.writeback.as_ref().filter(|_| self.sealed.is_none()) {
                writeback.add(at * PAGE_SIZE..(at + CHUNK_PAGES) * PAGE_SIZE);
            }
            progress.add(chunk_pages(chunk) * PAGE_SIZE);
            Ok(())
        });
        (self.sums, self.written) = made.into_inner();
        done
    }

    /// Writes the pages of a chunk that must be saved. `buffers` has space for three pieces, and
    /// for the frame of an encrypted image. Returns also what the chunk's checksum changes by.
    fn chunk(
        &self,
        plan: &Plan,
        chunk: &Chunk,
        past: Option<&Past>,
        buffers: &mut [u8],
    ) -> io::Result<(u128, Written)> {
        let (number, block) = (chunk.block, &plan.blocks[chunk.block]);
        let of_parent = self.parent.as_ref().and_then(|parent| parent.block(block));
        let place = self.placed[number].first_page;
        let (buffer, other) = buffers.split_at_mut(PIECE_BYTES);
        let (other, old) = other.split_at_mut(PIECE_BYTES);
        let (old, frame) = old.split_at_mut(PIECE_BYTES);
        let mut frame = self
            .sealed
            .as_ref()
            .map(|sealed| (sealed, Body::new(frame)));
        let (mut change, mut of_old, mut written) = (0_u128, 0_u128, Written::default());
        let times = &mut written.stages;
        for first in (chunk.first..chunk.first + CHUNK_PAGES).step_by(PIECE_BYTES / PAGE_BYTES) {
            let end = first + PIECE_PAGES;
            let differing = within(&plan.differing[number], first, end);
            let is_checked = !self.trusts_parent;
            if let Some(of_parent) = &of_parent {
                measure(&mut times.read, || {
                    if is_checked {
                        of_parent.read(first, old)
                    } else {
                        of_parent.read_ranges(first, &differing, old)
                    }
                })?;
            }
            if of_parent.is_some() && is_checked {
                let sum = measure(&mut times.hash, || pages_sum(first % CHUNK_PAGES, old));
                of_old = of_old.wrapping_add(sum);
            }
            if differing.is_empty() {
                continue;
            }
            let here = within(&plan.ranges[number], first, end);
            let of_block = (number, &plan.ranges[number]);
            let new: &[u8] = measure(&mut times.read, || {
                if let Some(copied) = &plan.copied {
                    if let Some(copy) = copied.piece(of_block, first, end) {
                        return Ok(copy);
                    }
                    buffer.fill(0);
                    copied.read(of_block, first, &here, buffer);
                } else {
                    read(plan.pid, block, first, &here, buffer)?;
                }
                for &(from, to) in &here {
                    let part = &mut buffer[bytes(from - first)..bytes(to - first)];
                    past.map_or(Ok(()), |past| past.settle(block.hva.add_pages(from), part))?;
                }
                io::Result::Ok(&*buffer)
            })?;
            let old = of_parent.is_some().then_some(&*old);
            measure(&mut times.hash, || {
                for page in differing.iter().flat_map(|&(from, to)| from..to) {
                    let at = bytes(page - first)..bytes(page + 1 - first);
                    let (new, old) = (&new[at.clone()], old.map(|old| &old[at]));
                    change = change.wrapping_add(page_change(page % CHUNK_PAGES, old, new));
                }
            });
            let piece = Piece {
                block,
                place,
                first,
                bytes: new,
                of_parent: old,
            };
            let references = &mut written.references;
            let left = measure(&mut times.compare, || {
                self.comparison.refer(&piece, &here, other, references)
            });
            self.take_room(&left)?;
            let at = (place + first) * PAGE_SIZE;
            let counts = &mut written.counts;
            measure(&mut times.write, || {
                left.iter().try_for_each(|&(from, to)| {
                    let (start, end) = (bytes(from - first), bytes(to - first));
                    let part = &new[start..end];
                    let saved = match &mut frame {
                        Some((_, frame)) => frame.add(from % CHUNK_PAGES, part)?,
                        None => write_nonzero(part, self.ram, at + start as u64)?,
                    };
                    counts.saved_pages += saved;
                    counts.zero_pages += to - from - saved;
                    io::Result::Ok(())
                })
            })?;
        }
        if let Some((sealed, frame)) = frame {
            let number = (place + chunk.first) / CHUNK_PAGES;
            let writeback = self.writeback.as_ref();
            measure(&mut written.stages.write, || {
                sealed.write(number, frame, self.ram, writeback)
            })?;
        }
        if let Some(of_parent) = of_parent.filter(|_| !self.trusts_parent) {
            of_parent.check(chunk.first, of_old)?;
        }
        let referred = written.references.iter().map(|r| u64::from(r.pages));
        written.counts.saved_pages += referred.sum::<u64>();
        Ok((change, written))
    }

    /// Returns the time that each stage has taken so far.
    #[must_use]
    pub const fn stages(&self) -> Stages {
        self.written.stages
    }

    /// Completes the image and writes its checksums to the file `sums`, encrypted like the image.
    /// Returns the places of the
    /// RAM blocks in the image, and the numbers of pages by kind.
    pub fn finish(self, sums: &File) -> io::Result<(Vec<ImageBlock>, ImageCounts)> {
        let times = self.stages();
        tracing::debug!(
            read = ?times.read,
            hash = ?times.hash,
            compare = ?times.compare,
            write = ?times.write,
            "RAM image written; the fields are the total times of all workers"
        );
        let all = match &self.sealed {
            Some(sealed) => sealed.sums(self.sums)?,
            None => self.sums,
        };
        sums.write_all_at(&all, 0)?;
        Ok((self.placed, self.written.counts))
    }
}

/// Reads ranges of a piece that begins at page `first` to their places in `buffer`. Fills the rest
/// of the buffer with zeroes.
fn read(
    pid: Pid,
    block: &Source,
    first: u64,
    ranges: &[(u64, u64)],
    buffer: &mut [u8],
) -> io::Result<()> {
    let mut parts = Vec::with_capacity(ranges.len());
    let (mut rest, mut next, mut length) = (buffer, first, 0);
    for &(from, to) in ranges {
        let (gap, behind) = rest.split_at_mut(bytes(from - next));
        let (part, behind) = behind.split_at_mut(bytes(to - from));
        gap.fill(0);
        length += part.len();
        parts.push((block.hva.add_pages(from), part));
        (rest, next) = (behind, to);
    }
    rest.fill(0);
    if memory::read_parts(pid, &mut parts)? != length {
        return Err(io::Error::other(format!(
            "RAM block '{}' ends before its page {next}",
            block.name
        )));
    }
    Ok(())
}

#[cfg(test)]
#[path = "writer_tests.rs"]
pub(super) mod tests;
