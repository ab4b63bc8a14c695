//! Format of a snapshot's *first pages* in an object store: the pages that a VM touches at once
//! after a start from the snapshot. They lie scattered over many chunks. Stored together, they
//! arrive before these chunks do.
//!
//! ```text
//!   description   first_pages: [ object, bytes ], ...               parts, each of at most 2 MiB of pages
//!   part          number of runs | run | run | ... | the runs' pages, one after the other
//!   run           first page (8 bytes), pages (4), file (4)         little endian, ascending over all parts
//! ```
//! A run lies within one chunk of a file. Each page of a part is also in a chunk. The chunk has the
//! last word: a part that says something else is an error, and no byte of the chunk is changed for
//! it.

use memfold_units::{PAGE_BYTES, PAGE_SIZE};
use serde::{Deserialize, Serialize};

use super::chunk::CHUNK_BYTES;

/// Number of pages of a chunk.
pub(crate) const CHUNK_PAGES: u64 = CHUNK_BYTES / PAGE_SIZE;

/// Most pages of a part.
pub(crate) const PART_PAGES: u64 = 512;

/// Most parts of a snapshot: 64 MiB of pages.
pub(crate) const MOST_PARTS: usize = 32;

/// Length in bytes of the number of runs, and of a run.
const COUNT_BYTES: usize = 4;
const RUN_BYTES: usize = 16;

/// Most bytes of a part: each page may be a run.
const MOST_BYTES: u64 = COUNT_BYTES as u64 + PART_PAGES * (RUN_BYTES as u64 + PAGE_SIZE);

/// Names a part of the first pages in the description of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartEntry {
    /// BLAKE3 hash of the part's bytes before compression: the name of its object.
    pub object: String,
    /// Length of the part in bytes before compression.
    pub bytes: u64,
}

impl PartEntry {
    /// Returns the hash of the part's bytes.
    pub(crate) fn hash(&self) -> Result<blake3::Hash, String> {
        let hash = blake3::Hash::from_hex(&self.object);
        hash.map_err(|_| "a part of its first pages has no valid name".to_owned())
    }
}

/// Consecutive pages of one of a snapshot's files, within one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageRun {
    /// Number of the file, in the order of the description.
    pub file: u32,
    /// Index in the file of the first page.
    pub first: u64,
    /// Number of pages.
    pub pages: u32,
}

impl PageRun {
    /// Returns the index in the file of the page after the last one.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.first.saturating_add(u64::from(self.pages))
    }

    /// Returns the number of the chunk that holds the run.
    #[must_use]
    pub fn chunk(&self) -> u64 {
        self.first / CHUNK_PAGES
    }

    /// Returns the length in bytes of the run's pages.
    #[must_use]
    pub fn bytes(&self) -> usize {
        usize::try_from(self.pages).unwrap_or(0) * PAGE_BYTES
    }
}

/// A part of the first pages: its runs, and the bytes of their pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// The runs, ascending.
    pub runs: Vec<PageRun>,
    /// Bytes of the pages, in the order of the runs.
    pub bytes: Vec<u8>,
}

impl Part {
    /// Returns each run with its bytes.
    pub fn pages(&self) -> impl Iterator<Item = (PageRun, &[u8])> {
        let mut rest = self.bytes.as_slice();
        self.runs.iter().map_while(move |run| {
            let (here, after) = rest.split_at_checked(run.bytes())?;
            rest = after;
            Some((*run, here))
        })
    }

    /// Returns the part as it is stored, before compression.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let count = u32::try_from(self.runs.len()).unwrap_or(u32::MAX);
        let mut part = count.to_le_bytes().to_vec();
        for run in &self.runs {
            part.extend(run.first.to_le_bytes());
            part.extend(run.pages.to_le_bytes());
            part.extend(run.file.to_le_bytes());
        }
        part.extend(&self.bytes);
        part
    }

    /// Decodes and checks a part. `file_pages`: for each file of the snapshot, the number of its
    /// whole pages.
    ///
    /// # Errors
    ///
    /// The reason why the part is refused, as text.
    pub fn decode(mut part: Vec<u8>, file_pages: &[u64]) -> Result<Self, String> {
        let count = part.first_chunk().map(|count| u32::from_le_bytes(*count));
        let count = count.and_then(|count| usize::try_from(count).ok());
        let table = count.and_then(|count| count.checked_mul(RUN_BYTES)?.checked_add(COUNT_BYTES));
        let table = table.filter(|&table| table > COUNT_BYTES && table <= part.len());
        let table = table.ok_or("its table of pages is not whole")?;
        let mut runs: Vec<PageRun> = Vec::new();
        let mut pages = 0;
        for record in part[COUNT_BYTES..table].chunks_exact(RUN_BYTES) {
            let short =
                |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| record[at + byte]));
            let run = PageRun {
                first: u64::from_le_bytes(std::array::from_fn(|byte| record[byte])),
                pages: short(8),
                file: short(12),
            };
            let file = usize::try_from(run.file).ok();
            let there = file.and_then(|file| file_pages.get(file)).copied();
            let is_right = run.pages > 0
                && there.is_some_and(|there| run.first < there && run.end() <= there)
                && (run.end() - 1) / CHUNK_PAGES == run.chunk()
                && runs.last().is_none_or(|before| is_before(before, &run));
            if !is_right {
                return Err(format!("its table has no valid run at page {}", run.first));
            }
            pages += u64::from(run.pages);
            runs.push(run);
        }
        if pages > PART_PAGES || (part.len() - table) as u64 != pages * PAGE_SIZE {
            return Err("its table names more or fewer pages than it has".into());
        }
        part.drain(..table);
        Ok(Self { runs, bytes: part })
    }
}

/// Returns whether a run begins after another one has ended.
fn is_before(run: &PageRun, next: &PageRun) -> bool {
    (run.file, run.end()) <= (next.file, next.first) && run.file <= next.file
}

/// Checks that all parts of a snapshot's first pages are ascending.
///
/// # Errors
///
/// The reason why the parts are refused, as text.
pub fn check_order(parts: &[Part]) -> Result<(), String> {
    for pair in parts.windows(2) {
        let ends = pair[0].runs.last().zip(pair[1].runs.first());
        if !ends.is_some_and(|(last, first)| is_before(last, first)) {
            return Err("it names pages that another part names".into());
        }
    }
    Ok(())
}

/// Checks how a description names the parts.
pub(crate) fn check_entries(entries: &[PartEntry]) -> Result<(), String> {
    let least = (COUNT_BYTES + RUN_BYTES + PAGE_BYTES) as u64;
    if entries.len() > MOST_PARTS
        || (entries.iter()).any(|entry| !(least..=MOST_BYTES).contains(&entry.bytes))
    {
        return Err("its first pages have too many parts, or too long ones".into());
    }
    entries.iter().try_for_each(|entry| entry.hash().map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE_PAGES: [u64; 3] = [2000, 0, 300];

    fn run(file: u32, first: u64, pages: u32) -> PageRun {
        PageRun { file, first, pages }
    }

    fn part(runs: &[PageRun]) -> Part {
        let page = |page: u64| [u8::try_from(page % 251).unwrap(); PAGE_BYTES];
        let pages = runs.iter().flat_map(|run| run.first..run.end());
        Part {
            runs: runs.to_vec(),
            bytes: pages.flat_map(page).collect(),
        }
    }

    fn decode(part: &Part) -> Result<Part, String> {
        Part::decode(part.encode(), &FILE_PAGES)
    }

    #[test]
    fn a_part_of_the_first_pages_is_decoded_as_it_was_encoded() {
        let part = part(&[run(0, 7, 2), run(0, 9, 1), run(0, 256, 256), run(2, 299, 1)]);
        let decoded = decode(&part).unwrap();
        assert_eq!(decoded, part);
        let pages: Vec<(PageRun, u8)> = decoded
            .pages()
            .map(|(run, bytes)| (run, bytes[0]))
            .collect();
        assert_eq!(pages[1], (run(0, 9, 1), 9));
        assert_eq!(pages[3], (run(2, 299, 1), 48));
    }

    #[test]
    fn a_part_of_the_first_pages_with_a_wrong_table_is_refused() {
        for runs in [
            &[][..],
            &[run(0, 7, 0)],
            &[run(0, 2000, 1)],
            &[run(0, 1999, 2)],
            &[run(0, u64::MAX, 1)],
            &[run(1, 0, 1)],
            &[run(3, 0, 1)],
            &[run(0, 255, 2)],
            &[run(0, 7, 2), run(0, 8, 1)],
            &[run(0, 7, 2), run(0, 7, 2)],
            &[run(0, 7, 1), run(0, 3, 1)],
            &[run(2, 7, 1), run(0, 9, 1)],
            // More pages than a part may have.
            &[run(0, 0, 256), run(0, 256, 256), run(0, 512, 1)],
        ] {
            assert!(decode(&part(runs)).is_err(), "{runs:?}");
        }
        let good = part(&[run(0, 7, 2), run(2, 9, 1)]).encode();
        for length in 0..good.len() {
            let short = good[..length].to_vec();
            assert!(Part::decode(short, &FILE_PAGES).is_err(), "{length} bytes");
        }
        let long = [&good[..], &[0; PAGE_BYTES]].concat();
        assert!(Part::decode(long, &FILE_PAGES).is_err());
        let mut many = good;
        many[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Part::decode(many, &FILE_PAGES).is_err());
    }

    #[test]
    fn parts_of_the_first_pages_that_name_a_page_twice_are_refused() {
        let parts = |second: PageRun| [part(&[run(0, 7, 2)]), part(&[second])];
        assert!(check_order(&parts(run(0, 9, 1))).is_ok());
        assert!(check_order(&parts(run(2, 0, 1))).is_ok());
        assert!(check_order(&parts(run(0, 8, 1))).is_err());
        assert!(check_order(&parts(run(0, 3, 1))).is_err());
    }

    #[test]
    fn a_description_that_names_too_many_or_too_long_parts_of_first_pages_is_refused() {
        let entry = |bytes| PartEntry {
            object: blake3::hash(b"part").to_hex().to_string(),
            bytes,
        };
        assert!(check_entries(&vec![entry(5000); MOST_PARTS]).is_ok());
        assert!(check_entries(&vec![entry(5000); MOST_PARTS + 1]).is_err());
        assert!(check_entries(&[entry(MOST_BYTES + 1)]).is_err());
        assert!(check_entries(&[entry(100)]).is_err());
        let nameless = PartEntry {
            object: "../../x".into(),
            bytes: 5000,
        };
        assert!(check_entries(&[nameless]).is_err());
    }
}
