//! Copies the changed pages of a stopped VM into memory of this process. If a VM runs from a
//! snapshot, its next snapshot stores only the pages that have changed since (a layer). These pages
//! are few, so they are copied at once, and are hashed and written after the VM has resumed.
//!
//! Other live saves write-protect memory with userfaultfd, and copy it while the VM runs.
//! userfaultfd cannot write-protect pages of a private file mapping, which these VMs have.

use std::io;
use std::thread;

use memfold_sys::memory;
use memfold_units::{Hva, PAGE_BYTES};
use parking_lot::Mutex;
use rustix::process::Pid;

use super::copy_budget::CopyShare;
use super::image::{Ranges, Source, bytes};
use super::pipeline;

/// Most ranges that one system call copies (`IOV_MAX`), and most pages.
const TASK_RANGES: usize = 1024;
const TASK_PAGES: u64 = 1024;

/// Least number of bytes that a thread allocates.
const LEAST_PART: usize = 4 << 20;

/// Memory for copies of pages, which the kernel has allocated already.
#[derive(Debug)]
pub(super) struct Room {
    bytes: Vec<u8>,
    share: CopyShare,
}

impl Room {
    /// Allocates room for as many pages as the share allows, while the VM still runs.
    pub(super) fn new(mut share: CopyShare) -> Self {
        let mut room = vec![0; bytes(share.pages())];
        // The kernel fills new pages with zeroes, which takes as long as the copying does.
        let part = room.len().div_ceil(pipeline::workers()).max(LEAST_PART);
        thread::scope(|scope| {
            for part in room.chunks_mut(part) {
                // Without the thread, the pages are allocated when they are written.
                drop(thread::Builder::new().spawn_scoped(scope, || allocate(part)));
            }
        });
        share.note_allocated();
        Self { bytes: room, share }
    }

    /// Makes room for `pages` pages. Returns whether there is room; there is none for more than
    /// twice as many pages as at first, which would take long to allocate now.
    pub(super) fn fits(&mut self, pages: u64) -> io::Result<bool> {
        Ok(pages <= 2 * self.share.pages() && self.share.grow_to(pages)?)
    }
}

/// Makes the kernel allocate the pages of a buffer.
fn allocate(part: &mut [u8]) {
    if memory::populate(part).is_err() {
        // The kernel allocates a page when it is written for the first time.
        (part.iter_mut().step_by(PAGE_BYTES)).for_each(|byte| *byte = 1);
    }
}

/// Copies of the pages that a plan reads.
#[derive(Debug)]
pub(super) struct PageCopies {
    bytes: Vec<u8>,
    _share: CopyShare,
    /// For each block and each of its ranges, the number of pages copied before it.
    before: Vec<Vec<u64>>,
}

impl PageCopies {
    /// Copies pages of a stopped process into `room`, where they fit. `ranges` are the pages of
    /// each block.
    pub(super) fn take(
        pid: Pid,
        (blocks, ranges): (&[Source], &[Ranges]),
        Room {
            bytes: mut room,
            share,
        }: Room,
    ) -> io::Result<Self> {
        let pages = ranges.iter().flatten().map(|(from, to)| to - from);
        room.resize(bytes(pages.sum()), 0);
        let mut parts = Vec::new();
        let (mut before, mut count) = (Vec::new(), 0);
        for (block, ranges) in blocks.iter().zip(ranges) {
            let mut firsts = Vec::with_capacity(ranges.len());
            for &(from, to) in ranges {
                firsts.push(count);
                count += to - from;
                for first in (from..to).step_by(bytes(TASK_PAGES) / PAGE_BYTES) {
                    let pages = TASK_PAGES.min(to - first);
                    parts.push((block.hva.add_pages(first), pages));
                }
            }
            before.push(firsts);
        }
        copy(pid, &parts, &mut room)?;
        Ok(Self {
            bytes: room,
            _share: share,
            before,
        })
    }

    /// Returns the copies of the pages `first..end` of block `block`, if all of them were copied.
    pub(super) fn piece(
        &self,
        (block, of_block): (usize, &Ranges),
        first: u64,
        end: u64,
    ) -> Option<&[u8]> {
        let of = of_block.partition_point(|range| range.1 <= first);
        let &(from, to) = of_block.get(of)?;
        let is_whole = from <= first && end <= to;
        let place = bytes(*self.before.get(block)?.get(of)? + first.checked_sub(from)?);
        let piece = self.bytes.get(place..place + bytes(end - first));
        piece.filter(|_| is_whole)
    }

    /// Copies ranges of block `block` to their places in a buffer that begins at page `first`.
    /// `ranges` are parts of the plan's.
    pub(super) fn read(
        &self,
        (block, of_block): (usize, &Ranges),
        first: u64,
        ranges: &[(u64, u64)],
        buffer: &mut [u8],
    ) {
        for &(from, to) in ranges {
            let of = of_block.partition_point(|range| range.1 <= from);
            let place = bytes(self.before[block][of] + (from - of_block[of].0));
            let part = &mut buffer[bytes(from - first)..bytes(to - first)];
            part.copy_from_slice(&self.bytes[place..place + part.len()]);
        }
    }
}

/// Copies parts of the process's memory, one after the other, on all cores.
fn copy(pid: Pid, parts: &[(Hva, u64)], mut rest: &mut [u8]) -> io::Result<()> {
    let mut tasks = Vec::new();
    let mut next = 0;
    while next < parts.len() {
        let (mut end, mut pages) = (next, 0);
        while end < parts.len() && end - next < TASK_RANGES && pages < TASK_PAGES {
            pages += parts[end].1;
            end += 1;
        }
        let (own, others) = rest.split_at_mut(bytes(pages));
        let own_parts = parts[next..end].iter();
        let ranges: Vec<_> = own_parts.map(|&(at, pages)| (at, bytes(pages))).collect();
        tasks.push(Mutex::new((ranges, own)));
        (rest, next) = (others, end);
    }
    pipeline::run(tasks.len() as u64, 0, |number, _| {
        let mut task = tasks[usize::try_from(number).map_err(io::Error::other)?].lock();
        let (ranges, into) = &mut *task;
        if memory::read_many(pid, ranges, into)? != into.len() {
            return Err(io::Error::other("a part of the VM's memory is gone"));
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::copy_budget::COPIES;
    use super::*;

    #[test]
    fn copies_of_pages_are_found_at_their_places_in_a_block() {
        let pages = 300;
        let mut memory = vec![0_u8; bytes(pages)];
        for (page, bytes) in (0_u8..=250).cycle().zip(memory.chunks_mut(PAGE_BYTES)) {
            bytes.fill(page);
        }
        let block = Source {
            name: "ram".into(),
            hva: Hva(memory.as_ptr().addr() as u64),
            pages,
        };
        let ranges: Ranges = vec![(3, 5), (10, 300)];
        let share = COPIES.take(pages, 2, Duration::ZERO).unwrap().unwrap();
        let of = (std::slice::from_ref(&block), std::slice::from_ref(&ranges));
        let pid = rustix::process::getpid();
        let copies = PageCopies::take(pid, of, Room::new(share)).unwrap();
        for (first, end) in [(10, 74), (64, 128), (236, 300), (3, 5)] {
            let copy = copies.piece((0, &ranges), first, end);
            assert!(copy == Some(&memory[bytes(first)..bytes(end)]), "{first}");
        }
        for (first, end) in [(0, 64), (4, 6), (5, 10), (9, 20), (250, 301), (300, 364)] {
            assert!(copies.piece((0, &ranges), first, end).is_none(), "{first}");
        }
        let mut buffer = vec![255; bytes(64)];
        copies.read((0, &ranges), 0, &[(3, 5), (10, 64)], &mut buffer);
        assert!(buffer[bytes(3)..bytes(5)] == memory[bytes(3)..bytes(5)]);
        assert!(buffer[bytes(10)..] == memory[bytes(10)..bytes(64)]);
        assert!(buffer[bytes(5)..bytes(10)].iter().all(|byte| *byte == 255));
    }
}
