//! Files of one VM that its agent has introduced: which content each has (its bytes, which other
//! files may share), and what comparisons of its pages have shown.

use std::collections::BTreeMap;

use memfold_wire::agent::FileNumber;

use super::member::ContentId;
use super::packed::{read_numbers, write_number};
use super::packed_map::PackedMap;

/// What the engine knows about one file of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct File {
    /// Content of the file; `None` if its path is unknown.
    pub content: Option<ContentId>,
    /// Whether the file shares its content with files of another path (but the same name and size).
    pub alias: bool,
    /// Number of compared pages of the file whose bytes equalled the page store's.
    pub equal: u32,
    /// Number of compared pages of the file whose bytes differed from the page store's.
    pub differing: u32,
}

/// Number of files with consecutive numbers that are stored together.
const CHUNK: u32 = 32;

/// The files of one VM. Agents number files without large gaps, so a file needs about five bytes;
/// one of which pages were compared needs about eight more.
#[derive(Debug, Default)]
pub(super) struct Files {
    /// For each file 0 if it is unknown, 1 if its path is unknown, or its content's number plus 2.
    contents: BTreeMap<u32, Box<[u32; CHUNK as usize]>>,
    known: usize,
    /// Files of which pages were compared: `alias`, `equal` and `differing`.
    compared: PackedMap,
}

impl Files {
    /// Returns the content of a file; `None` if its path is unknown.
    pub fn content(&self, file: FileNumber) -> Option<ContentId> {
        let chunk = self.contents.get(&(file / CHUNK))?;
        chunk[(file % CHUNK) as usize].checked_sub(2)
    }

    /// Returns whether the agent has introduced a file.
    pub fn is_known(&self, file: FileNumber) -> bool {
        let chunk = self.contents.get(&(file / CHUNK));
        chunk.is_some_and(|chunk| chunk[(file % CHUNK) as usize] > 0)
    }

    /// Returns what is known of a file; `None` if the agent has not introduced the file.
    pub fn get(&self, file: FileNumber) -> Option<File> {
        let content = self.content(file);
        if content.is_none() && !self.is_known(file) {
            return None;
        }
        let compared = self.compared.get((file, 0)).unwrap_or_default();
        let [alias, equal, differing] = read_numbers(compared);
        Some(File {
            content,
            alias: alias == 1,
            equal,
            differing,
        })
    }

    pub fn set(&mut self, file: FileNumber, facts: File) {
        let chunk = self.contents.entry(file / CHUNK).or_default();
        let entry = &mut chunk[(file % CHUNK) as usize];
        self.known += usize::from(*entry == 0);
        *entry = facts.content.map_or(1, |content| content + 2);
        let mut bytes = Vec::with_capacity(16);
        if (facts.alias, facts.equal, facts.differing) != (false, 0, 0) {
            for number in [u32::from(facts.alias), facts.equal, facts.differing] {
                write_number(number, &mut bytes);
            }
        }
        self.compared.set((file, 0), &bytes);
    }

    /// Returns the numbers of all files, in ascending order.
    pub fn numbers(&self) -> impl Iterator<Item = FileNumber> {
        let chunks = self.contents.iter();
        chunks.flat_map(|(number, chunk)| {
            let files = (number * CHUNK..).zip(chunk.iter());
            files.filter(|(_, entry)| **entry > 0).map(|(file, _)| file)
        })
    }

    /// Returns the number of files.
    pub const fn len(&self) -> usize {
        self.known
    }

    /// Returns the memory use in bytes.
    pub fn own_bytes(&self) -> usize {
        // With its place in the tree, whose nodes are filled to two thirds on average, and the
        // allocator's header.
        let chunk = CHUNK as usize * 4 + (size_of::<u32>() + size_of::<usize>()) * 3 / 2 + 8;
        self.contents.len() * chunk + self.compared.own_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_back_as_they_were_stored() {
        let mut files = Files::default();
        let facts = |n: u32| File {
            content: n.checked_sub(3),
            alias: n % 5 == 0,
            equal: if n % 7 == 0 { u32::MAX - n } else { 0 },
            differing: n / 100,
        };
        (0..1000).for_each(|n| files.set(n * 3, facts(n)));
        (0..1000).for_each(|n| assert_eq!(files.get(n * 3), Some(facts(n))));
        assert_eq!((files.get(1), files.len()), (None, 1000));
        assert!(files.numbers().eq((0..1000).map(|n| n * 3)));
    }

    #[test]
    fn a_file_of_which_no_page_was_compared_needs_at_most_six_bytes() {
        let mut files = Files::default();
        for n in 0..20_000 {
            let content = Some(n);
            files.set(
                n,
                File {
                    content,
                    ..File::default()
                },
            );
        }
        assert!(files.own_bytes() < 20_000 * 6, "{}", files.own_bytes());
    }
}
