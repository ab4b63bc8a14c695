//! Finds the pages that a VM has in common with the snapshot from which it runs, its parent. The
//! VM's next snapshot is a layer: it stores only pages that differ from the parent, and refers to
//! the parent's files for all others.
//!
//! ```text
//!   mappings of the VM   | ram of the parent       | disk of the parent | anonymous |    /proc/PID/maps
//!   page tables          | ...xx......x........... | ......x........... | xxx...... |    x: private page (PAGEMAP_SCAN)
//!   kept                 | ###..######.########### | ######.########### |           |    a reference to the parent's file
//!   read and compared    |    ..      .            |       .            | ...       |    a reference if equal, else bytes
//! ```
//! Pages that the VM has not written need not be read: QEMU maps the parent's file privately, and a
//! page that is no private copy shows the file's bytes. A reference goes straight to the file that
//! holds the bytes, so a layer of a layer takes no longer to restore.

use std::io;
use std::ops::Range;
use std::sync::OnceLock;

use memfold_store::mapped::{self, FileMapping};
use memfold_store::{StoreIdentity, data_ranges};
use memfold_sys::pagemap::{Filter, Pagemap, category};
use memfold_units::{Hva, PAGE_SIZE};

use super::candidates::{MOST_COMPARED, Run, SourceFile, choose};
use super::image::{CHUNK_PAGES, ImageBlock, Source};
use super::manifest::ParentName;
use super::ranges::{joined, without};
use super::refer::Reference;
use super::stored::{Pages, Stored};

/// Pages of a process that differ from the file that is mapped there, or may do so: private pages
/// in memory and in swap.
const CHANGED: Filter = Filter {
    all_of: 0,
    any_of: category::PRESENT | category::SWAPPED,
    none_of: category::FILE,
};

/// Consecutive pages of the parent's image that are consecutive in a file, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    page: u64,
    pages: u64,
    file: usize,
    block: u64,
}

impl Place {
    const fn end(&self) -> u64 {
        self.page + self.pages
    }

    /// Returns whether a mapping that shows page `block` of file `file` at page `page` of the image
    /// shows the parent's own bytes.
    fn is_shown(&self, (file, page, block): (usize, u64, u64)) -> bool {
        self.file == file && self.block + page == block + self.page
    }
}

/// The snapshot whose pages a layer need not hold.
#[derive(Debug)]
pub struct Parent {
    name: ParentName,
    blocks: Vec<ImageBlock>,
    stored: Stored,
    /// The parent's `ram`, and then the files that the parent refers to.
    files: Vec<SourceFile>,
    /// For each file, the pages that are no holes, ascending; read when they are needed first.
    data: Vec<OnceLock<Vec<Range<u64>>>>,
    /// Where all pages of the image are that are not zeroes, ascending.
    places: Vec<Place>,
}

/// A block of the parent: where a layer's block of the same name begins in the parent's image.
#[derive(Clone, Copy, Debug)]
pub(super) struct ParentBlock<'a> {
    parent: &'a Parent,
    first_page: u64,
}

/// Pages of a VM that are the parent's.
#[derive(Debug, Default)]
pub(super) struct Unchanged {
    /// Pages that one of the parent's files holds; [`Run::file`] counts the parent's files.
    pub(super) held: Vec<Run>,
    /// Pages of zeroes.
    pub(super) zeroes: Vec<Range<Hva>>,
}

impl Unchanged {
    pub(super) fn add(&mut self, more: Self) {
        self.held.extend(more.held);
        self.zeroes.extend(more.zeroes);
    }

    /// Returns the runs that are referred to, and all address ranges that need not be read. If the
    /// runs need too many mappings, the shortest are read after all.
    pub(super) fn limited(mut self) -> (Vec<Run>, Vec<Range<Hva>>) {
        self.held.sort_unstable_by_key(|run| run.hva);
        let kept = choose(self.held.into_iter(), MOST_COMPARED);
        let mut same: Vec<Range<Hva>> = kept.iter().map(|run| run.hva..run.end()).collect();
        same.extend(self.zeroes);
        same.sort_unstable_by_key(|range| range.start);
        (kept, joined(same))
    }
}

impl Parent {
    /// Returns the parent with this image. `files` are its `ram` and the files that it refers to.
    pub(super) fn new(
        name: ParentName,
        blocks: Vec<ImageBlock>,
        stored: Stored,
        files: Vec<SourceFile>,
    ) -> io::Result<Self> {
        let in_ram = match &stored.pages {
            Pages::Plain(_, data) => page_ranges(data),
            Pages::Packed(..) => return Err(io::Error::other("the parent's image is compressed")),
        };
        let places = places(&in_ram, &stored.references);
        let mut data = vec![OnceLock::new(); files.len()];
        data[0] = in_ram.into();
        Ok(Self {
            name,
            blocks,
            stored,
            files,
            data,
            places,
        })
    }

    /// Returns the parts of `pages` of a file that are holes, which read as zeroes.
    fn holes(&self, file: usize, pages: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let data = if let Some(data) = self.data[file].get() {
            data
        } else {
            let data = page_ranges(&data_ranges(&self.files[file].file)?);
            self.data[file].get_or_init(|| data)
        };
        let from = data.partition_point(|part| part.end <= pages.start);
        Ok(without(&[pages], &data[from..]))
    }

    /// Returns the parent's name, for the manifest of a layer.
    pub(super) fn name(&self) -> ParentName {
        self.name.clone()
    }

    /// Returns the files that a layer refers to, opened anew.
    pub(super) fn files(&self) -> io::Result<Vec<SourceFile>> {
        let again = |of: &SourceFile| {
            Ok(SourceFile {
                overlay_of: None,
                in_parent: true,
                path: of.path.clone(),
                file: of.file.try_clone()?,
                stamp: of.stamp,
            })
        };
        self.files.iter().map(again).collect()
    }

    /// Returns the block of the parent that a VM's RAM block corresponds to.
    pub(super) fn block(&self, block: &Source) -> Option<ParentBlock<'_>> {
        let same = |saved: &&ImageBlock| saved.name == block.name && saved.pages == block.pages;
        let saved = self.blocks.iter().find(same)?;
        Some(ParentBlock {
            parent: self,
            first_page: saved.first_page,
        })
    }

    /// Returns the private mappings of the parent's files in `maps` (`/proc/PID/maps`), ascending,
    /// with the numbers of the files.
    pub(super) fn mappings(&self, maps: &str) -> io::Result<Vec<(usize, FileMapping)>> {
        let of = |source: &SourceFile| StoreIdentity::of(&source.file);
        let ram = self.files.first().ok_or(io::ErrorKind::NotFound)?;
        let mapped = mapped::parse(maps, of(ram)?);
        let mut found: Vec<_> = mapped.store.into_iter().map(|view| (0, view)).collect();
        for (number, source) in self.files.iter().enumerate().skip(1) {
            let id = of(source)?.in_maps();
            let views = mapped.others.iter().filter(|view| view.file == id);
            found.extend(views.map(|&view| (number, view)));
        }
        found.sort_unstable_by_key(|(_, mapping)| mapping.hva);
        Ok(found)
    }
}

impl ParentBlock<'_> {
    fn places(&self, pages: Range<u64>) -> impl Iterator<Item = Place> + '_ {
        let places = &self.parent.places;
        let (first, end) = (self.first_page + pages.start, self.first_page + pages.end);
        let from = places.partition_point(|place| place.end() <= first);
        let here = places[from..].iter().take_while(move |p| p.page < end);
        here.map(move |place| {
            let (from, to) = (place.page.max(first), place.end().min(end));
            Place {
                page: from,
                pages: to - from,
                file: place.file,
                block: place.block + (from - place.page),
            }
        })
    }

    /// Returns the places of pages of the block in the parent's files, as runs of a VM whose block
    /// begins at `hva`. `pages` are numbers in the block.
    pub(super) fn runs(&self, hva: Hva, pages: Range<u64>) -> impl Iterator<Item = Run> + '_ {
        self.places(pages).map(move |place| Run {
            hva: hva.add_pages(place.page - self.first_page),
            pages: place.pages,
            file: u32::try_from(place.file).unwrap_or(u32::MAX),
            block: place.block,
        })
    }

    /// Returns the checksum of the parent's chunk that begins at page `first` of the block.
    pub(super) fn sum(&self, first: u64) -> io::Result<u128> {
        let chunk = (self.first_page + first) / CHUNK_PAGES;
        self.parent.stored.sum(chunk)
    }

    /// Reads the parent's pages from page `first` of the block on.
    pub(super) fn read(&self, first: u64, buffer: &mut [u8]) -> io::Result<()> {
        if !self.parent.stored.read(self.first_page + first, buffer)? {
            buffer.fill(0);
        }
        Ok(())
    }

    /// Returns the pages of a VM's block that are the parent's, by the mappings and page tables of
    /// a stopped process. `mappings` are those of the parent's files, ascending.
    pub(super) fn unchanged(
        &self,
        pagemap: &Pagemap,
        mappings: &[(usize, FileMapping)],
        block: &Source,
    ) -> io::Result<Unchanged> {
        let (start, end) = (block.hva, block.hva.add_pages(block.pages));
        let mut unchanged = Unchanged::default();
        // One scan for all mappings, because a VM may have thousands, and stands still meanwhile.
        let changed = pagemap.scan(start, end, CHANGED)?;
        let changed: Vec<Range<Hva>> = changed.iter().map(|r| r.start..r.end).collect();
        for (file, mapping) in mappings {
            let view = mapping.hva.max(start)..mapping.hva.add_pages(mapping.pages).min(end);
            if view.start >= view.end {
                continue;
            }
            let from = changed.partition_point(|part| part.end <= view.start);
            for part in without(&[view], &changed[from..]) {
                let in_file = mapping.file_page + part.start.pages_since(mapping.hva);
                self.note(&mut unchanged, block, *file, part, in_file)?;
            }
        }
        Ok(unchanged)
    }

    /// Notes the pages of `part`, which the process sees as in a file from page `in_file` on, if
    /// the parent's image has the same pages of that file there, or if both are zeroes.
    fn note(
        &self,
        unchanged: &mut Unchanged,
        block: &Source,
        file: usize,
        part: Range<Hva>,
        in_file: u64,
    ) -> io::Result<()> {
        let first = self.first_page + part.start.pages_since(block.hva);
        let end = first + (part.end.pages_since(part.start));
        let hva = |page: u64| block.hva.add_pages(page - self.first_page);
        let mut next = first;
        // Pages without a place are zeroes in the parent's image.
        let mut note_zeroes = |pages: Range<u64>| -> io::Result<()> {
            if pages.start < pages.end {
                let seen = in_file + (pages.start - first)..in_file + (pages.end - first);
                let holes = self.parent.holes(file, seen)?.into_iter();
                let at = |page: u64| hva(first + (page - in_file));
                unchanged
                    .zeroes
                    .extend(holes.map(|hole| at(hole.start)..at(hole.end)));
            }
            Ok(())
        };
        let in_block = first - self.first_page..end - self.first_page;
        for place in self.places(in_block) {
            note_zeroes(next..place.page)?;
            next = place.end();
            if place.is_shown((file, first, in_file)) {
                unchanged.held.push(Run {
                    hva: hva(place.page),
                    pages: place.pages,
                    file: u32::try_from(file).unwrap_or(u32::MAX),
                    block: place.block,
                });
            }
        }
        note_zeroes(next..end)
    }
}

/// Returns the pages of ranges of bytes.
fn page_ranges(data: &[Range<u64>]) -> Vec<Range<u64>> {
    let pages = |data: &Range<u64>| data.start / PAGE_SIZE..data.end.div_ceil(PAGE_SIZE);
    data.iter().map(pages).collect()
}

/// Returns where the pages of an image are: in `ram`, or where its references say.
fn places(in_ram: &[Range<u64>], references: &[Reference]) -> Vec<Place> {
    let joined = references.chunk_by(Reference::goes_on_with);
    let referred = joined.filter_map(|run| {
        Some(Place {
            page: run[0].page,
            pages: run.iter().map(|part| u64::from(part.pages)).sum(),
            file: usize::try_from(run[0].file).ok()? + 1,
            block: run[0].block,
        })
    });
    let referred: Vec<Place> = referred.collect();
    let covered: Vec<Range<u64>> = referred.iter().map(|p| p.page..p.end()).collect();
    let own = without(in_ram, &covered).into_iter().map(|pages| Place {
        page: pages.start,
        pages: pages.end - pages.start,
        file: 0,
        block: pages.start,
    });
    let mut places: Vec<Place> = own.chain(referred).collect();
    places.sort_unstable_by_key(|place| place.page);
    places
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;
    use std::sync::Arc;

    use memfold_host::progress::Progress;
    use memfold_sys::region::Mapping;
    use memfold_units::PAGE_BYTES;
    use rustix::process::Pid;

    use super::*;
    use crate::candidates::Candidates;
    use crate::image::bytes;
    use crate::page_copies::{PageCopies, Room};
    use crate::plan::Plan;
    use crate::writer::Writer;

    /// Pages of the test's memory: two chunks and a part of a third.
    const PAGES: u64 = 2 * CHUNK_PAGES + 100;

    fn me() -> Pid {
        rustix::process::getpid()
    }

    fn content(page: u64, generation: u64) -> Vec<u64> {
        (0..512)
            .map(|word| page << 32 | generation << 16 | word | 1)
            .collect()
    }

    fn page_bytes(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// An image in memory: a layer, or a snapshot with all pages.
    struct Image {
        blocks: Vec<ImageBlock>,
        sums: Vec<u8>,
        references: Vec<Reference>,
        /// `ram`, and then the files that the references name.
        files: Vec<File>,
        saved_bytes: u64,
    }

    impl Image {
        fn save(source: &Source, parent: Option<Arc<Parent>>, is_copied: bool) -> Self {
            let mut plan = Plan::new(me(), vec![source.clone()], &[], parent.as_deref()).unwrap();
            if is_copied {
                // The room is too small, so that it has to grow.
                let room = Room::new(plan.pages() / 2);
                plan.copied =
                    Some(PageCopies::take(plan.pid, (&plan.blocks, &plan.ranges), room).unwrap());
            }
            let (ram, sums) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
            let mut writer = Writer::new(&plan, &ram, parent).unwrap();
            writer.compare_with(&plan, Candidates::default()).unwrap();
            let progress = Progress::default();
            writer.blocks(&plan, &[0], None, &progress).unwrap();
            let (mut references, candidates) = writer.take_references();
            let (blocks, _) = writer.finish(&sums).unwrap();
            // Only files that are referred to are kept, as `write_references` does.
            let mut numbers = BTreeMap::new();
            for reference in &mut references {
                let next = u32::try_from(numbers.len()).unwrap();
                reference.file = *numbers.entry(reference.file).or_insert(next);
            }
            let mut sources: Vec<(u32, u32)> = numbers.into_iter().map(|(of, n)| (n, of)).collect();
            sources.sort_unstable();
            let mut all = vec![0; usize::try_from(sums.metadata().unwrap().len()).unwrap()];
            sums.read_exact_at(&mut all, 0).unwrap();
            let data = data_ranges(&ram).unwrap().into_iter();
            let saved_bytes = data.map(|part| part.end - part.start).sum();
            let of = |&(_, of): &(u32, u32)| {
                candidates.files[usize::try_from(of).unwrap()]
                    .file
                    .try_clone()
                    .unwrap()
            };
            let files = std::iter::once(ram).chain(sources.iter().map(of)).collect();
            Self {
                blocks,
                sums: all,
                references,
                files,
                saved_bytes,
            }
        }

        fn stored(&self) -> Stored {
            let file = |file: &File| file.try_clone().unwrap();
            Stored {
                bytes: self.files[0].metadata().unwrap().len(),
                sums: self.sums.clone(),
                sums_of_pages: true,
                pages: Pages::plain(file(&self.files[0])).unwrap(),
                references: self.references.clone(),
                sources: self.files[1..].iter().map(file).collect(),
            }
        }

        fn parent(&self) -> Arc<Parent> {
            let files = self.files.iter().map(|file| SourceFile {
                overlay_of: None,
                in_parent: true,
                path: PathBuf::new(),
                file: file.try_clone().unwrap(),
                stamp: None,
            });
            let name = ParentName {
                name: "p".into(),
                sums: String::new(),
                depth: 1,
            };
            let parent = Parent::new(name, self.blocks.clone(), self.stored(), files.collect());
            Arc::new(parent.unwrap())
        }

        /// Maps the image over `memory`, as a restore does.
        fn map(&self, memory: &Mapping) {
            let area = memory.area();
            area.map_file(self.files[0].as_fd(), 0).unwrap();
            for run in self.references.chunk_by(Reference::goes_on_with) {
                let pages = run.iter().map(|part| u64::from(part.pages)).sum();
                let file = &self.files[1 + usize::try_from(run[0].file).unwrap()];
                let part = area.part(run[0].page, pages);
                part.map_file(file.as_fd(), run[0].block).unwrap();
            }
        }

        /// Checks all checksums, and that the image holds the memory as it is now.
        fn check(&self, source: &Source) {
            let stored = self.stored();
            assert_eq!(stored.verify(&Progress::default()).unwrap(), [0_u64; 0]);
            let (mut own, mut saved) = (vec![0; PAGE_BYTES], vec![0; PAGE_BYTES]);
            for page in 0..source.pages {
                let at = source.hva.add_pages(page);
                memfold_sys::memory::read(me(), at, &mut own).unwrap();
                if !stored.read(page, &mut saved).unwrap() {
                    saved.fill(0);
                }
                assert!(own == saved, "page {page}");
            }
        }
    }

    fn memory() -> (Mapping, Source) {
        let memory = Mapping::anonymous(PAGES, true).unwrap();
        let source = Source {
            name: "ram0".into(),
            hva: memory.area().start(),
            pages: PAGES,
        };
        (memory, source)
    }

    #[test]
    fn each_of_ten_incremental_saves_stores_only_changed_pages_and_shows_all_memory() {
        for is_copied in [false, true] {
            let (ram, source) = memory();
            // Data, zeroes and holes.
            for page in (0..PAGES).filter(|page| page % 5 != 4) {
                ram.area().part(page, 1).write(&content(page, 0));
            }
            let mut image = Image::save(&source, None, is_copied);
            image.check(&source);
            for generation in 1..=10 {
                image.map(&ram);
                let write = |page: u64| {
                    ram.area().part(page, 1).write(&content(page, generation));
                };
                // Runs, single pages, a page that was a hole, one written with the same bytes, one
                // of zeroes, pages at a chunk's end, and a range that is discarded.
                (generation * 20..generation * 20 + 9).for_each(write);
                for page in [generation * 37, CHUNK_PAGES - 1, CHUNK_PAGES, PAGES - 1, 4] {
                    write(page);
                }
                let same = CHUNK_PAGES + 50;
                let now = content(same, 0);
                ram.area().part(same, 1).write(&now);
                ram.area().part(300 + generation, 1).write(&[0; 512]);
                let gone = ram.area().part(600 + 3 * generation, 3);
                gone.map_anonymous(true).unwrap();
                let parent = image.parent();
                image = Image::save(&source, Some(parent), is_copied);
                image.check(&source);
                // Single pages between changed ones and holes have no reference.
                let most = (9 + 5 + 10) * PAGE_SIZE;
                let saved = image.saved_bytes;
                assert!(saved <= most, "generation {generation}: {saved} bytes");
            }
        }
    }

    #[test]
    fn an_incremental_save_refers_to_equal_pages_of_the_last_save_even_if_the_vm_maps_none() {
        let (ram, source) = memory();
        for page in 0..PAGES {
            ram.area().part(page, 1).write(&content(page, 0));
        }
        let parent = Image::save(&source, None, false);
        for page in [0, 7, 8, 700] {
            ram.area().part(page, 1).write(&content(page, 1));
        }
        let layer = Image::save(&source, Some(parent.parent()), false);
        layer.check(&source);
        assert_eq!(layer.saved_bytes, 4 * PAGE_SIZE);
    }

    #[test]
    fn if_an_earlier_save_is_damaged_the_checksums_of_a_save_built_on_it_fail() {
        let (ram, source) = memory();
        for page in 0..PAGES {
            ram.area().part(page, 1).write(&content(page, 0));
        }
        let parent = Image::save(&source, None, false);
        parent.map(&ram);
        ram.area().part(3, 1).write(&content(3, 1));
        let layer = Image::save(&source, Some(parent.parent()), true);
        layer.check(&source);
        // A page that the layer replaces may be damaged.
        parent.files[0].write_all_at(b"!", 3 * PAGE_SIZE).unwrap();
        assert!(
            layer
                .stored()
                .verify(&Progress::default())
                .unwrap()
                .is_empty()
        );
        // Two pages that change places are found, although the sum of their checksums would not
        // change without the pages' places.
        let (a, b) = (page_bytes(&content(600, 0)), page_bytes(&content(601, 0)));
        parent.files[0].write_all_at(&b, 600 * PAGE_SIZE).unwrap();
        parent.files[0].write_all_at(&a, 601 * PAGE_SIZE).unwrap();
        assert_eq!(layer.stored().verify(&Progress::default()).unwrap(), [1]);
    }

    #[test]
    fn an_incremental_save_reads_pages_that_map_the_last_save_at_another_offset() {
        let (ram, source) = memory();
        for page in 0..PAGES {
            ram.area().part(page, 1).write(&content(page, 0));
        }
        let parent = Image::save(&source, None, false);
        parent.map(&ram);
        let moved = ram.area().part(100, 10);
        moved.map_file(parent.files[0].as_fd(), 200).unwrap();
        let layer = Image::save(&source, Some(parent.parent()), false);
        layer.check(&source);
        assert_eq!(layer.saved_bytes, 10 * PAGE_SIZE);
    }

    #[test]
    fn an_incremental_save_does_not_read_holes_of_an_older_save_that_the_vm_maps() {
        let (ram, source) = memory();
        for page in 10..20 {
            ram.area().part(page, 1).write(&content(page, 0));
        }
        let first = Image::save(&source, None, false);
        first.map(&ram);
        for page in [12, 13] {
            ram.area().part(page, 1).write(&content(page, 1));
        }
        let second = Image::save(&source, Some(first.parent()), false);
        // A fork maps only the pages that the new layer holds; all else shows the first image.
        ram.area()
            .part(12, 2)
            .map_file(second.files[0].as_fd(), 12)
            .unwrap();
        ram.area().part(700, 1).write(&content(700, 2));
        let parent = second.parent();
        let plan = Plan::new(me(), vec![source.clone()], &[], Some(&parent)).unwrap();
        assert_eq!(plan.pages(), 1);
        let third = Image::save(&source, Some(parent), false);
        third.check(&source);
        assert_eq!(third.saved_bytes, PAGE_SIZE);
    }

    #[test]
    fn the_data_ranges_of_a_snapshot_image_exclude_pages_stored_as_disk_references() {
        let ram = tempfile::tempfile().unwrap();
        ram.set_len(bytes(1024) as u64).unwrap();
        ram.write_all_at(&vec![1; bytes(10)], 100 * PAGE_SIZE)
            .unwrap();
        let reference = |page, pages, block| Reference {
            page,
            pages,
            file: 2,
            block,
        };
        let references = [
            reference(104, 2, 7),
            reference(511, 1, 30),
            reference(512, 3, 31),
        ];
        let place = |page, pages, file, block| Place {
            page,
            pages,
            file,
            block,
        };
        assert_eq!(
            places(&page_ranges(&data_ranges(&ram).unwrap()), &references),
            [
                place(100, 4, 0, 100),
                place(104, 2, 3, 7),
                place(106, 4, 0, 106),
                place(511, 4, 3, 30),
            ]
        );
    }
}
