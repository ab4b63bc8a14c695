//! Gathers the first pages of a snapshot that is being pushed: the pages that VMs touched at once
//! after a start from it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use memfold_snapshot::working_set::WorkingSet;
use memfold_snapshot::{Manifest, Shelf, SnapshotError};
use memfold_units::PAGE_SIZE;

use super::chunk::ChunkName;
use super::description::FileEntry;
use super::first_pages::{CHUNK_PAGES, MOST_PARTS, PART_PAGES, PageRun, Part};
use super::places::{self, ImagePlaces, number_by_name, numbers_of};

/// Compression level of parts. They are compressed once, and each start waits for them.
const LEVEL: i32 = 9;

/// Returns the runs of a snapshot's first pages, ascending. There are none if it is not known which
/// pages VMs touch at once, or if no VM can run from the snapshot while it is being fetched.
pub(crate) fn runs(
    shelf: &Shelf,
    manifest: &Manifest,
    (files, chunks): (&[FileEntry], &[Vec<ChunkName>]),
) -> Result<Vec<PageRun>, SnapshotError> {
    if !manifest.is_mappable() || manifest.spec.foreign.is_some() {
        return Ok(Vec::new());
    }
    let place = shelf.path(&manifest.name)?;
    let set = WorkingSet::read(&place, &manifest.sums.xxh3_128);
    if set.as_ref().is_none_or(|set| set.soonest().is_empty()) {
        return Ok(Vec::new());
    }
    let image = shelf.arriving_image(&place, manifest)?;
    let number = |path: &Path| {
        let of_outside = |file: &FileEntry| file.origin.as_deref() == Some(path);
        let outside = files.iter().position(of_outside);
        outside.or_else(|| number_by_name(files.iter(), path))
    };
    let places = ImagePlaces::new(manifest, &image, numbers_of(manifest, number));
    let (mut runs, mut left) = (Vec::new(), PART_PAGES * MOST_PARTS as u64);
    for (page, pages) in places::at_once(manifest, set.as_ref()) {
        for (file, pages) in places.of(page, pages) {
            let whole = files[file].bytes / PAGE_SIZE;
            let mut first = pages.start;
            let end = pages.end.min(whole);
            while first < end {
                let next = (first / CHUNK_PAGES + 1) * CHUNK_PAGES;
                let last = next.min(end).min(first + left);
                let chunk = usize::try_from(first / CHUNK_PAGES).ok();
                let name = chunk.and_then(|chunk| chunks[file].get(chunk)).copied();
                // Chunks of zeroes are there before anything is fetched.
                if name.flatten().is_some() {
                    runs.push((file, first, last));
                    left -= last - first;
                }
                if left == 0 {
                    return Ok(joined(runs));
                }
                first = last;
            }
        }
    }
    Ok(joined(runs))
}

/// Sorts runs, and joins those that overlap or touch within a chunk.
fn joined(mut runs: Vec<(usize, u64, u64)>) -> Vec<PageRun> {
    runs.sort_unstable();
    let mut joined: Vec<(usize, u64, u64)> = Vec::new();
    for (file, first, end) in runs {
        match joined.last_mut() {
            Some(last)
                if last.0 == file
                    && last.2 >= first
                    && last.1 / CHUNK_PAGES == first / CHUNK_PAGES =>
            {
                last.2 = last.2.max(end);
            }
            _ => joined.push((file, first, end)),
        }
    }
    let run = |(file, first, end): (usize, u64, u64)| {
        Some(PageRun {
            file: u32::try_from(file).ok()?,
            first,
            pages: u32::try_from(end - first).ok()?,
        })
    };
    joined.into_iter().filter_map(run).collect()
}

/// Distributes runs to parts of equal size.
pub(crate) fn split(runs: &[PageRun]) -> Vec<Vec<PageRun>> {
    let (mut parts, mut pages) = (Vec::<Vec<PageRun>>::new(), PART_PAGES);
    for run in runs {
        let mut run = *run;
        while run.pages > 0 {
            if pages == PART_PAGES {
                parts.push(Vec::new());
                pages = 0;
            }
            let here = u64::from(run.pages).min(PART_PAGES - pages);
            let here = u32::try_from(here).unwrap_or(run.pages);
            if let Some(part) = parts.last_mut() {
                part.push(PageRun { pages: here, ..run });
            }
            pages += u64::from(here);
            run.first += u64::from(here);
            run.pages -= here;
        }
    }
    parts
}

/// Reads the pages of a part. `files`: the files of the snapshot, in the order of the description.
pub(crate) fn read(runs: Vec<PageRun>, files: &[std::sync::Arc<File>]) -> io::Result<Part> {
    let mut bytes = vec![0; runs.iter().map(PageRun::bytes).sum()];
    let mut at = 0;
    for run in &runs {
        let file = usize::try_from(run.file).ok();
        let file = file.and_then(|file| files.get(file));
        let file = file.ok_or(io::ErrorKind::InvalidInput)?;
        let part = &mut bytes[at..at + run.bytes()];
        file.read_exact_at(part, run.first * PAGE_SIZE)?;
        at += run.bytes();
    }
    Ok(Part { runs, bytes })
}

/// Compresses a part for the object store.
pub(crate) fn pack(part: &[u8]) -> io::Result<Vec<u8>> {
    zstd::bulk::compress(part, LEVEL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_first_pages_are_joined_within_chunks_and_split_into_parts_of_2_mib() {
        let runs = joined(vec![
            (1, 0, 4),
            (0, 250, 256),
            (0, 256, 260),
            (0, 10, 20),
            (0, 15, 18),
            (0, 20, 22),
        ]);
        let all: Vec<_> = runs
            .iter()
            .map(|run| (run.file, run.first, run.pages))
            .collect();
        assert_eq!(all, [(0, 10, 12), (0, 250, 6), (0, 256, 4), (1, 0, 4)]);
        assert_eq!(split(&runs), [runs]);
        assert_eq!(split(&[]), Vec::<Vec<PageRun>>::new());

        let whole = (0..8).map(|chunk| (0, chunk * CHUNK_PAGES + 1, (chunk + 1) * CHUNK_PAGES));
        let runs = joined(whole.collect());
        let pages: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
        let parts = split(&runs);
        assert_eq!((pages, parts.len()), (8 * 255, 4));
        for part in &parts {
            let pages: u64 = part.iter().map(|run| u64::from(run.pages)).sum();
            assert!(pages <= PART_PAGES);
        }
        let again: u64 = parts.iter().flatten().map(|run| u64::from(run.pages)).sum();
        assert_eq!(again, pages);
    }
}
