//! Pages that the disks of a snapshot hold anyhow: kept by reference, and found by their content.
//!
//! ```text
//!   ram        ####....##..     what no disk holds
//!   ram.refs   pages 4 to 7 = file 0, blocks 900 to 903
//! ```
//! A guest's file systems put file contents at multiples of 4 KiB, and disk images keep them there. So whatever the file system, what a
//! guest has cached is found by comparing: each block of the disks' files by a hash, then byte by byte. Anything else that is equal by
//! chance is as good.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use memfold_host::progress::Progress;
use memfold_units::{PAGE_BYTES, PAGE_SIZE};
use xxhash_rust::xxh3::xxh3_64;

use super::image::{CHUNK_BYTES, CHUNK_PAGES, Data, chunks_with_data, is_zero, punch};
use super::pipeline;

/// Bytes of disk files that are looked through for one snapshot: 24 bytes of memory for each 4 KiB, for as long as that takes.
pub const MOST_DISK_BYTES: u64 = 32 << 30;

/// Consecutive pages of an image that a file of a disk holds. They lie in one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The first, counted from the image's beginning.
    pub page: u64,
    /// How many.
    pub pages: u32,
    /// Which of the image's sources holds them.
    pub file: u32,
    /// Where, in pages.
    pub block: u64,
}

impl Reference {
    /// Bytes of one in `ram.refs`: page, pages, file, block; little endian.
    pub const BYTES: usize = 24;

    fn encode(&self) -> impl Iterator<Item = u8> {
        let parts = [
            self.page,
            u64::from(self.pages) | u64::from(self.file) << 32,
            self.block,
        ];
        parts.into_iter().flat_map(u64::to_le_bytes)
    }

    /// From [`Self::BYTES`] bytes.
    fn decode(bytes: &[u8]) -> Self {
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let short = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        Self {
            page: long(0),
            pages: short(8),
            file: short(12),
            block: long(16),
        }
    }

    /// Bytes that it stands for.
    #[must_use]
    pub fn length(&self) -> usize {
        usize::try_from(self.pages).unwrap_or(0) * PAGE_BYTES
    }
}

/// References as they lie in `ram.refs`.
#[must_use]
pub fn encode(references: &[Reference]) -> Vec<u8> {
    references.iter().flat_map(Reference::encode).collect()
}

/// The references of an image of `pages` pages that has `sources` sources; or what is wrong with them.
pub fn decode(bytes: &[u8], pages: u64, sources: usize) -> Result<Vec<Reference>, String> {
    let records = bytes.chunks_exact(Reference::BYTES);
    if !records.remainder().is_empty() {
        return Err("the file ends within a record".into());
    }
    let mut free = 0;
    let mut references = Vec::with_capacity(records.len());
    for record in records {
        let reference = Reference::decode(record);
        let Reference { page, pages: n, .. } = reference;
        let end = page.checked_add(u64::from(n)).filter(|&end| end <= pages);
        let right = end.is_some_and(|end| {
            n > 0
                && page >= free
                && page / CHUNK_PAGES == (end - 1) / CHUNK_PAGES
                && usize::try_from(reference.file).is_ok_and(|file| file < sources)
                && reference.block < u64::MAX / PAGE_SIZE
        });
        if !right {
            return Err(format!("page {page}: not a reference of this image"));
        }
        free = end.unwrap_or(pages);
        references.push(reference);
    }
    Ok(references)
}

/// What disks hold, by content.
#[derive(Debug, Default)]
pub struct DiskBlocks {
    files: Vec<Blocks>,
    /// Hash, file, and number among the hashes of the file; ascending.
    places: Vec<(u64, Place)>,
}

/// Which file, and which of its hashes.
type Place = (u32, u32);

/// Hashes of a file's blocks of 4 KiB; of those that aren't holes.
#[derive(Debug)]
struct Blocks {
    file: File,
    hashes: Vec<u64>,
    /// First block of a part without holes, and the number of its hash; ascending.
    parts: Vec<(u64, u32)>,
}

impl Blocks {
    fn read(file: File, progress: &Progress) -> io::Result<Self> {
        let index = |n: u64| usize::try_from(n).map_err(io::Error::other);
        let mut parts = Vec::new();
        let mut count = 0;
        for data in Data::of(&file)? {
            let first = data.start.div_ceil(PAGE_SIZE);
            let blocks = (data.end / PAGE_SIZE).saturating_sub(first);
            parts.push((first, u32::try_from(count).map_err(io::Error::other)?));
            count += blocks;
        }
        let mut hashes = vec![0; index(count)?];
        // Each piece of a part has its own place among the hashes.
        let mut pieces: Vec<(u64, Mutex<&mut [u64]>)> = Vec::new();
        let ends = parts.iter().skip(1).map(|&(_, number)| u64::from(number));
        let mut rest = hashes.as_mut_slice();
        for (&(first, number), end) in parts.iter().zip(ends.chain([count])) {
            let (part, behind) = rest.split_at_mut(index(end - u64::from(number))?);
            rest = behind;
            let places = part.chunks_mut(CHUNK_BYTES / PAGE_BYTES).map(Mutex::new);
            pieces.extend((first..).step_by(CHUNK_BYTES / PAGE_BYTES).zip(places));
        }
        pipeline::run(pieces.len() as u64, CHUNK_BYTES, |number, buffer| {
            let (first, hashes) = &pieces[index(number)?];
            let mut hashes = hashes.lock().unwrap_or_else(PoisonError::into_inner);
            let bytes = &mut buffer[..hashes.len() * PAGE_BYTES];
            file.read_exact_at(bytes, first * PAGE_SIZE)?;
            for (hash, block) in hashes.iter_mut().zip(bytes.chunks_exact(PAGE_BYTES)) {
                *hash = xxh3_64(block);
            }
            progress.add(bytes.len() as u64);
            Ok(())
        })?;
        drop(pieces);
        Ok(Self {
            file,
            hashes,
            parts,
        })
    }

    /// Where the block of a hash lies.
    fn block(&self, number: u32) -> u64 {
        let part = self.parts.partition_point(|&(_, first)| first <= number);
        let (block, first) = self.parts[part.saturating_sub(1)];
        block + u64::from(number - first)
    }

    fn hash(&self, number: u32) -> Option<u64> {
        self.hashes.get(usize::try_from(number).ok()?).copied()
    }
}

impl DiskBlocks {
    /// Looks through files that nobody writes to any more.
    pub fn read(files: Vec<File>, progress: &Progress) -> io::Result<Self> {
        let mut disks = Self::default();
        for (file, number) in files.into_iter().zip(0..) {
            let blocks = Blocks::read(file, progress)?;
            let hashes = blocks.hashes.iter().zip(0..);
            disks
                .places
                .extend(hashes.map(|(&hash, at)| (hash, (number, at))));
            disks.files.push(blocks);
        }
        disks.places.sort_unstable();
        Ok(disks)
    }

    /// Where a block of this hash lies: behind `last` if it is there.
    fn find(&self, hash: u64, last: Option<Place>) -> Option<Place> {
        let next = last.and_then(|(file, number)| {
            let blocks = &self.files[usize::try_from(file).ok()?];
            let next = number.checked_add(1)?;
            let follows =
                blocks.hash(next) == Some(hash) && blocks.block(next) == blocks.block(number) + 1;
            follows.then_some((file, next))
        });
        next.or_else(|| {
            let at = self.places.partition_point(|place| place.0 < hash);
            let (found, place) = self.places.get(at)?;
            (*found == hash).then_some(*place)
        })
    }

    /// Whether a file really holds these pages.
    fn holds(&self, reference: &Reference, pages: &[u8], buffer: &mut [u8]) -> io::Result<bool> {
        let blocks = usize::try_from(reference.file).map_err(io::Error::other)?;
        let part = &mut buffer[..pages.len()];
        let file = &self.files[blocks].file;
        file.read_exact_at(part, reference.block * PAGE_SIZE)?;
        Ok(part == pages)
    }

    /// References to all pages of a chunk that the disks hold; the chunk begins with page `first`.
    fn refer(&self, first: u64, chunk: &[u8]) -> io::Result<Vec<Reference>> {
        let mut found: Vec<Reference> = Vec::new();
        let mut last: Option<Place> = None;
        for (page, number) in chunk.chunks_exact(PAGE_BYTES).zip(first..) {
            let before = last.take();
            if is_zero(page) {
                continue;
            }
            let Some(place) = self.find(xxh3_64(page), before) else {
                continue;
            };
            last = Some(place);
            let blocks = usize::try_from(place.0).map_err(io::Error::other)?;
            let block = self.files[blocks].block(place.1);
            match found.last_mut() {
                Some(run)
                    if run.page + u64::from(run.pages) == number
                        && run.file == place.0
                        && run.block + u64::from(run.pages) == block =>
                {
                    run.pages += 1;
                }
                _ => found.push(Reference {
                    page: number,
                    pages: 1,
                    file: place.0,
                    block,
                }),
            }
        }
        let mut buffer = vec![0; chunk.len()];
        let mut held = Vec::with_capacity(found.len());
        for reference in found {
            let at = usize::try_from(reference.page - first).map_err(io::Error::other)?;
            let pages = &chunk[at * PAGE_BYTES..][..reference.length()];
            if self.holds(&reference, pages, &mut buffer)? {
                held.push(reference);
            }
        }
        Ok(held)
    }
}

/// Takes out of `ram` what the disks hold.
pub fn refer(ram: &File, disks: &DiskBlocks, progress: &Progress) -> io::Result<Vec<Reference>> {
    let chunks = chunks_with_data(ram)?;
    let all = Mutex::new(Vec::new());
    pipeline::run(chunks.len() as u64, CHUNK_BYTES, |number, buffer| {
        let chunk = chunks[usize::try_from(number).map_err(io::Error::other)?];
        ram.read_exact_at(buffer, chunk * CHUNK_BYTES as u64)?;
        let found = disks.refer(chunk * CHUNK_PAGES, buffer)?;
        for reference in &found {
            let length = u64::from(reference.pages) * PAGE_SIZE;
            punch(ram, reference.page * PAGE_SIZE, length)?;
        }
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(found);
        progress.add(CHUNK_BYTES as u64);
        Ok(())
    })?;
    let mut all = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    all.sort_unstable_by_key(|reference| reference.page);
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(seed: u64) -> Vec<u8> {
        (0..512_u64)
            .flat_map(|word| (seed << 32 | word | 1 << 63).to_le_bytes())
            .collect()
    }

    fn file(parts: &[(u64, &[u8])]) -> File {
        let file = tempfile::tempfile().unwrap();
        for (at, bytes) in parts {
            file.write_all_at(bytes, at * PAGE_SIZE).unwrap();
        }
        file
    }

    fn disks(files: Vec<File>) -> DiskBlocks {
        DiskBlocks::read(files, &Progress::default()).unwrap()
    }

    #[test]
    fn runs_are_found_where_they_lie_and_taken_out() {
        let run: Vec<u8> = (10..20).flat_map(page).collect();
        // The same single page earlier: the run is found whole all the same, behind its first page.
        let disk = file(&[(3, &page(15)), (100, &run), (5000, &page(30))]);
        let overlay = file(&[(7, &page(40))]);
        let mut ram = vec![0; CHUNK_BYTES * 2];
        let mut put = |at: usize, bytes: &[u8]| {
            ram[at * PAGE_BYTES..][..bytes.len()].copy_from_slice(bytes);
        };
        put(5, &run);
        put(20, &page(99));
        put(21, &page(30));
        put(23, &page(40));
        // Over the end of a chunk.
        put(508, &run);
        let image = file(&[(0, &ram)]);
        let disks = disks(vec![disk, overlay]);
        let found = refer(&image, &disks, &Progress::default()).unwrap();
        let told: Vec<_> = found
            .iter()
            .map(|r| (r.page, r.pages, r.file, r.block))
            .collect();
        assert_eq!(
            told,
            [
                (5, 10, 0, 100),
                (21, 1, 0, 5000),
                (23, 1, 1, 7),
                (508, 4, 0, 100),
                (512, 6, 0, 104)
            ]
        );
        let mut left = vec![0; CHUNK_BYTES * 2];
        image.read_exact_at(&mut left, 0).unwrap();
        for (at, now) in left.chunks_exact(PAGE_BYTES).enumerate() {
            let stays = at == 20;
            assert_eq!(!is_zero(now), stays, "page {at}");
        }
        let decoded = decode(&encode(&found), 1024, 2).unwrap();
        assert_eq!(decoded, found);
    }

    #[test]
    fn equal_hashes_are_not_believed() {
        let disk = file(&[(0, &page(1))]);
        let mut disks = disks(vec![disk]);
        let wanted = page(2);
        // As if both pages had one hash.
        disks.places = vec![(xxh3_64(&wanted), (0, 0))];
        let mut chunk = vec![0; CHUNK_BYTES];
        chunk[..PAGE_BYTES].copy_from_slice(&wanted);
        assert!(disks.refer(0, &chunk).unwrap().is_empty());
    }

    #[test]
    fn what_is_no_table_of_this_image_is_refused() {
        let good = Reference {
            page: 510,
            pages: 2,
            file: 0,
            block: 1,
        };
        let table = |references: &[Reference]| decode(&encode(references), 1024, 1);
        assert_eq!(table(&[good]).unwrap(), [good]);
        let with = |change: &dyn Fn(&mut Reference)| {
            let mut bad = good;
            change(&mut bad);
            table(&[bad])
        };
        assert!(with(&|r| r.pages = 0).is_err());
        assert!(with(&|r| r.pages = 3).is_err(), "over a chunk's end");
        assert!(with(&|r| r.page = 1023).is_err(), "over the image's end");
        assert!(with(&|r| (r.page, r.pages) = (1023, 1)).is_ok());
        assert!(with(&|r| r.page = u64::MAX).is_err());
        assert!(with(&|r| r.file = 1).is_err());
        assert!(with(&|r| r.block = u64::MAX).is_err());
        assert!(table(&[good, good]).is_err(), "one over the other");
        let bytes = encode(&[good]);
        for cut in 1..bytes.len() {
            assert!(decode(&bytes[..cut], 1024, 1).is_err(), "{cut} bytes");
        }
    }

    #[test]
    fn files_that_end_within_a_block_or_hold_nothing_are_read() {
        let odd = tempfile::tempfile().unwrap();
        odd.write_all_at(&page(1), 0).unwrap();
        odd.write_all_at(b"tail", PAGE_SIZE).unwrap();
        let empty = tempfile::tempfile().unwrap();
        empty.set_len(1 << 30).unwrap();
        let disks = disks(vec![odd, empty]);
        assert_eq!(disks.places.len(), 1);
        let mut chunk = vec![0; CHUNK_BYTES];
        chunk[PAGE_BYTES..PAGE_BYTES * 2].copy_from_slice(&page(1));
        let found = disks.refer(0, &chunk).unwrap();
        assert_eq!((found.len(), found[0].page, found[0].block), (1, 1, 0));
    }
}
