//! Finds the places of a RAM image's pages in the files of a snapshot: the image's own file, and
//! files that the image refers to.

use std::ops::Range;
use std::path::Path;

use memfold_snapshot::image::ImageBlock;
use memfold_snapshot::manifest::RAM;
use memfold_snapshot::restore::{self, Piece};
use memfold_snapshot::shelf::CheckedImage;
use memfold_snapshot::{Manifest, working_set::WorkingSet};
use memfold_units::{Hva, PAGE_SIZE};

use super::description::FileEntry;

/// Most pages of a RAM block that is fetched before all others.
const SMALL: u64 = 4096;

/// Where each page of a RAM image lies.
#[derive(Debug)]
pub(crate) struct ImagePlaces {
    /// Pieces of the whole image; their addresses are places in the image.
    pieces: Vec<Piece>,
    /// For the files of [`Piece::file`], the number of the file in the description.
    numbers: Vec<Option<usize>>,
}

/// Returns the numbers of the files that [`Piece::file`] names. `number` finds a file by its path
/// in the manifest.
pub(crate) fn numbers_of(
    manifest: &Manifest,
    number: impl Fn(&Path) -> Option<usize>,
) -> Vec<Option<usize>> {
    let sources = manifest.references.iter().flat_map(|refs| &refs.sources);
    let paths = std::iter::once(Path::new(RAM)).chain(sources.map(AsRef::as_ref));
    paths.map(number).collect()
}

/// Returns the number of the file with the name that a path ends with.
pub(crate) fn number_by_name<'a>(
    mut files: impl Iterator<Item = &'a FileEntry>,
    path: &Path,
) -> Option<usize> {
    let name = path.file_name()?.to_str()?;
    files.position(|file| file.name == name)
}

impl ImagePlaces {
    pub(crate) fn new(
        manifest: &Manifest,
        image: &CheckedImage,
        numbers: Vec<Option<usize>>,
    ) -> Self {
        let whole = ImageBlock {
            name: String::new(),
            first_page: 0,
            pages: manifest.ram_bytes / PAGE_SIZE,
        };
        Self {
            pieces: restore::pieces_of(image, &whole, Hva(0)),
            numbers,
        }
    }

    /// Returns the files, and the pages in them, that hold these pages of the image.
    pub(crate) fn of(&self, page: u64, pages: u64) -> impl Iterator<Item = (usize, Range<u64>)> {
        let end = page.saturating_add(pages);
        let at = |piece: &Piece| piece.hva / PAGE_SIZE;
        let from = (self.pieces).partition_point(|piece| at(piece) + piece.pages <= page);
        let here = self.pieces[from..]
            .iter()
            .take_while(move |piece| at(piece) < end);
        here.filter_map(move |piece| {
            let first = page.max(at(piece)) - at(piece);
            let last = end.min(at(piece) + piece.pages) - at(piece);
            let file = self.numbers.get(piece.file).copied().flatten()?;
            Some((file, piece.file_page + first..piece.file_page + last))
        })
    }
}

/// Returns the runs of an image's pages that a start of a VM needs at once, in two groups: the
/// blocks that QEMU reads before the guest runs (firmware, tables), and the pages that VMs touched
/// at once.
pub(crate) fn at_once<'a>(
    manifest: &'a Manifest,
    set: Option<&'a WorkingSet>,
) -> impl Iterator<Item = (u64, u64)> + 'a {
    let small = manifest.blocks.iter().filter(|of| of.pages <= SMALL);
    let small = small.map(|of| (of.first_page, of.pages));
    let soonest = set.into_iter().flat_map(WorkingSet::soonest);
    small.chain(soonest.copied())
}
