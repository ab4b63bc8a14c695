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
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use memfold_store::mapped::{self, FileMapping};
use memfold_store::{StoreIdentity, data_ranges};
use memfold_sys::pagemap::{Region, category};
use memfold_units::{Hva, PAGE_SIZE};

use super::candidates::{MOST_COMPARED, Run, SourceFile, choose};
use super::image::{CHUNK_PAGES, ImageBlock, Source, bytes};
use super::manifest::ParentName;
use super::ranges::{joined, without};
use super::refer::Reference;
use super::stored::{Pages, Stored};

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
    /// Identities of these files, as `/proc/PID/maps` shows them.
    identities: Vec<StoreIdentity>,
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
            Pages::Sealed(_) => return Err(io::Error::other("the parent's image is encrypted")),
        };
        let places = places(&in_ram, &stored.references);
        let identities = files.iter().map(|of| mapped::identity_in_maps(&of.file));
        let identities = identities.collect::<io::Result<_>>()?;
        let mut data = vec![OnceLock::new(); files.len()];
        data[0] = in_ram.into();
        Ok(Self {
            name,
            blocks,
            stored,
            files,
            identities,
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
        let ram = self.identities.first().ok_or(io::ErrorKind::NotFound)?;
        let mapped = mapped::parse(maps, *ram);
        let mut found: Vec<_> = mapped.store.into_iter().map(|view| (0, view)).collect();
        for (number, identity) in self.identities.iter().enumerate().skip(1) {
            let views = mapped.others.iter();
            let views = views.filter(|view| view.file == identity.in_maps());
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

    /// Compares a checksum of the parent's chunk that begins at page `first` of the block with the
    /// recorded one. The layer's checksum follows from the recorded one and from the bytes that the
    /// layer replaces, so wrong bytes would make the layer's checksum wrong.
    pub(super) fn check(&self, first: u64, sum: u128) -> io::Result<()> {
        if self.sum(first)? == sum {
            return Ok(());
        }
        let (name, chunk) = (
            &self.parent.name.name,
            (self.first_page + first) / CHUNK_PAGES,
        );
        Err(io::Error::other(format!(
            "the parent, snapshot '{name}', was changed since it was saved, in its chunk {chunk}; run 'memfold snapshot verify {name}', and save the VM with --whole"
        )))
    }

    /// Reads the parent's pages from page `first` of the block on.
    pub(super) fn read(&self, first: u64, buffer: &mut [u8]) -> io::Result<()> {
        if !self.parent.stored.read(self.first_page + first, buffer)? {
            buffer.fill(0);
        }
        Ok(())
    }

    /// Reads the parent's pages in ranges of the block to their places in a buffer that begins at
    /// page `first` of the block. Leaves the rest of the buffer as it is.
    pub(super) fn read_ranges(
        &self,
        first: u64,
        ranges: &[(u64, u64)],
        buffer: &mut [u8],
    ) -> io::Result<()> {
        for &(from, to) in ranges {
            buffer[bytes(from - first)..bytes(to - first)].fill(0);
            for place in self.places(from..to) {
                let at = bytes(place.page - self.first_page - first);
                let part = &mut buffer[at..at + bytes(place.pages)];
                let file = &self.parent.files[place.file].file;
                file.read_exact_at(part, place.block * PAGE_SIZE)?;
            }
        }
        Ok(())
    }

    /// Returns the pages of a VM's block that are the parent's, by the mappings and page tables of
    /// a stopped process. `regions`: the block's pages that are in memory or in swap, ascending.
    /// `mappings` are those of the parent's files, ascending.
    pub(super) fn unchanged(
        &self,
        regions: &[Region],
        mappings: &[(usize, FileMapping)],
        block: &Source,
    ) -> io::Result<Unchanged> {
        let (start, end) = (block.hva, block.hva.add_pages(block.pages));
        let mut unchanged = Unchanged::default();
        // Private pages differ from the file that is mapped there, or may do so.
        let changed = regions
            .iter()
            .filter(|r| r.categories & category::FILE == 0);
        let changed = joined(changed.map(|region| region.start..region.end));
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
#[path = "parent_tests.rs"]
mod tests;
