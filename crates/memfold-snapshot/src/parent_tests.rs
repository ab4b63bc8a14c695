use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use memfold_host::progress::Progress;
use memfold_sys::region::Mapping;
use memfold_units::PAGE_BYTES;
use rustix::mm::Advice;
use rustix::process::Pid;

use memfold_sys::pagemap::{Filter, Pagemap};

use super::*;
use crate::candidates::Candidates;
use crate::copy_budget::COPIES;
use crate::image::bytes;
use crate::page_copies::{PageCopies, Room};
use crate::plan::Plan;
use crate::writer::Writer;
use crate::writer::tests::Swap;

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
        let sources = std::slice::from_ref(source);
        Self::try_save(sources, &[], parent, is_copied).unwrap()
    }

    /// Saves blocks without the pages in `free`. Returns the error of the writer.
    fn try_save(
        sources: &[Source],
        free: &[Range<Hva>],
        parent: Option<Arc<Parent>>,
        is_copied: bool,
    ) -> io::Result<Self> {
        let mut plan = Plan::new(me(), sources.to_vec(), free, parent.as_deref()).unwrap();
        if is_copied {
            // The room is too small, so that it has to grow.
            let share = COPIES
                .take(plan.pages().div_ceil(2), 4, Duration::ZERO)
                .unwrap();
            let mut room = Room::new(share.unwrap());
            assert!(room.fits(plan.pages()).unwrap());
            plan.copied =
                Some(PageCopies::take(plan.pid, (&plan.blocks, &plan.ranges), room).unwrap());
        }
        let (ram, sums) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let mut writer = Writer::new(&plan, &ram, parent).unwrap();
        if is_copied {
            // A fork compares few chunks of its parent, as other layers do.
            writer.trust_parent_if_large(&plan);
        }
        writer.compare_with(&plan, Candidates::default()).unwrap();
        let progress = Progress::default();
        let numbers: Vec<usize> = (0..sources.len()).collect();
        writer.blocks(&plan, &numbers, None, &progress)?;
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
        Ok(Self {
            blocks,
            sums: all,
            references,
            files,
            saved_bytes,
        })
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
        let mut own = vec![0; PAGE_BYTES];
        let block = self.blocks.iter().find(|block| block.name == source.name);
        let first = block.unwrap().first_page;
        for page in 0..source.pages {
            let at = source.hva.add_pages(page);
            memfold_sys::memory::read(me(), at, &mut own).unwrap();
            assert!(own == self.page(first + page), "page {page}");
        }
    }

    /// Returns the bytes of a page of the image.
    fn page(&self, number: u64) -> Vec<u8> {
        let mut page = vec![0; PAGE_BYTES];
        if !self.stored().read(number, &mut page).unwrap() {
            page.fill(0);
        }
        page
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

/// Returns the memory of a VM, each page of which has content of its own.
fn full_memory() -> (Mapping, Source) {
    let (ram, source) = memory();
    for page in 0..PAGES {
        ram.area().part(page, 1).write(&content(page, 0));
    }
    (ram, source)
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
    let (ram, source) = full_memory();
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
    let (ram, source) = full_memory();
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
fn a_layer_is_not_saved_on_a_damaged_parent() {
    // A page that the layer replaces, and another one of the same chunk.
    for damaged in [3, 7] {
        let (ram, source) = memory();
        for page in 0..PAGES {
            ram.area().part(page, 1).write(&content(page, 0));
        }
        let parent = Image::save(&source, None, false);
        parent.map(&ram);
        ram.area().part(3, 1).write(&content(3, 1));
        let file = &parent.files[0];
        file.write_all_at(b"!", damaged * PAGE_SIZE).unwrap();
        for is_copied in [false, true] {
            let sources = std::slice::from_ref(&source);
            let saved = Image::try_save(sources, &[], Some(parent.parent()), is_copied);
            let why = saved.err().expect("the damage is found").to_string();
            assert!(
                why.contains("snapshot 'p'") && why.contains("chunk 0"),
                "{why}"
            );
        }
        // Damage in a chunk that the layer does not change is found by its checksums.
        let whole = page_bytes(&content(damaged, 0));
        file.write_all_at(&whole, damaged * PAGE_SIZE).unwrap();
        file.write_all_at(b"!", 600 * PAGE_SIZE).unwrap();
        let layer = Image::save(&source, Some(parent.parent()), true);
        assert_eq!(layer.stored().verify(&Progress::default()).unwrap(), [1]);
    }
}

#[test]
fn blocks_that_are_neighbours_in_memory_may_be_in_another_order_in_the_layer() {
    let memory = Mapping::anonymous(2 * CHUNK_PAGES, true).unwrap();
    let block = |name: &str, first| Source {
        name: name.into(),
        hva: memory.area().start().add_pages(first),
        pages: CHUNK_PAGES,
    };
    let (a, b) = (block("a", 0), block("b", CHUNK_PAGES));
    for page in 0..2 * CHUNK_PAGES {
        memory.area().part(page, 1).write(&content(page, 0));
    }
    let order = [a.clone(), b.clone()];
    let parent = Image::try_save(&order, &[], None, false).unwrap();
    parent.map(&memory);
    // One run of unchanged pages begins in the first block and ends in the second.
    let changed = CHUNK_PAGES + 3;
    let new = content(changed, 1);
    memory.area().part(changed, 1).write(&new);
    let order = [b.clone(), a.clone()];
    let layer = Image::try_save(&order, &[], Some(parent.parent()), false).unwrap();
    layer.check(&a);
    layer.check(&b);
    assert_eq!(layer.saved_bytes, PAGE_SIZE);
}

#[test]
fn free_pages_of_a_layer_are_zeroes_if_the_vm_changed_them_and_else_the_parents() {
    for is_copied in [false, true] {
        let (ram, source) = memory();
        for page in 0..PAGES {
            ram.area().part(page, 1).write(&content(page, 0));
        }
        let parent = Image::save(&source, None, false);
        parent.map(&ram);
        for page in [3, 4, 8, 700] {
            ram.area().part(page, 1).write(&content(page, 1));
        }
        let at = |from, to| source.hva.add_pages(from)..source.hva.add_pages(to);
        let free = [at(2, 5), at(699, 702)];
        let sources = std::slice::from_ref(&source);
        let layer = Image::try_save(sources, &free, Some(parent.parent()), is_copied).unwrap();
        let stored = layer.stored();
        assert_eq!(stored.verify(&Progress::default()).unwrap(), [0_u64; 0]);
        for page in 0..PAGES {
            let expected = match page {
                3 | 4 | 700 => vec![0; PAGE_BYTES],
                8 => page_bytes(&content(8, 1)),
                _ => page_bytes(&content(page, 0)),
            };
            assert!(layer.page(page) == expected, "page {page}");
        }
        assert_eq!(layer.saved_bytes, PAGE_SIZE);
    }
}

/// Returns how many pages of a block are of this category.
fn count(source: &Source, category: u64) -> u64 {
    let filter = Filter {
        all_of: category,
        ..Filter::default()
    };
    let pagemap = Pagemap::open(me()).unwrap();
    let regions = pagemap.scan(source.hva, source.hva.add_pages(source.pages), filter);
    let regions = regions.unwrap();
    regions
        .iter()
        .map(memfold_sys::pagemap::Region::pages)
        .sum()
}

#[test]
fn changed_pages_of_a_layer_that_are_in_swap_are_saved() {
    let _swap = match Swap::on() {
        Ok(swap) => swap,
        Err(why) => memfold_testkit::skip!("no swap: {why}"),
    };
    let (ram, source) = full_memory();
    let parent = Image::save(&source, None, false);
    parent.map(&ram);
    for page in (100..400).chain([700]) {
        ram.area().part(page, 1).write(&content(page, 1));
    }
    ram.area().advise(Advice::LinuxPageOut).unwrap();
    assert!(count(&source, category::SWAPPED) > 0, "no page is in swap");
    let layer = Image::save(&source, Some(parent.parent()), false);
    layer.check(&source);
    assert_eq!(layer.saved_bytes, 301 * PAGE_SIZE);
}

/// KSM of this host, which merges as fast as it can for the lifetime of the value.
struct Ksm(Vec<(PathBuf, String)>);

impl Ksm {
    fn on() -> io::Result<Self> {
        let mut ksm = Self(Vec::new());
        for (name, value) in [
            ("use_zero_pages", "1"),
            ("pages_to_scan", "10000"),
            ("sleep_millisecs", "1"),
            ("run", "1"),
        ] {
            let path = Path::new("/sys/kernel/mm/ksm").join(name);
            let before = std::fs::read_to_string(&path)?;
            std::fs::write(&path, value)?;
            ksm.0.push((path, before));
        }
        Ok(ksm)
    }
}

impl Drop for Ksm {
    fn drop(&mut self) {
        for (path, before) in self.0.iter().rev() {
            let restored = std::fs::write(path, before.trim());
            assert!(std::thread::panicking() || restored.is_ok());
        }
    }
}

/// Returns a figure of KSM about this process.
fn ksm_figure(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/ksm_stat").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0, |rest| rest.trim().parse().unwrap())
}

#[test]
fn pages_of_a_layer_that_ksm_merged_or_replaced_by_the_zero_page_are_saved() {
    let (ram, source) = full_memory();
    let parent = Image::save(&source, None, false);
    parent.map(&ram);
    for page in 100..150 {
        ram.area().part(page, 1).write(&content(1, 1));
    }
    for page in 600..620 {
        ram.area().part(page, 1).write(&[0; 512]);
    }
    ram.area().advise(Advice::LinuxMergeable).unwrap();
    let ksm = match Ksm::on() {
        Ok(ksm) => ksm,
        Err(why) => memfold_testkit::skip!("no KSM: {why}"),
    };
    let limit = Duration::from_secs(60);
    memfold_testkit::wait_until("KSM has merged the pages", limit, || {
        ksm_figure("ksm_merging_pages ") >= 50 && count(&source, category::ZERO) >= 20
    });
    drop(ksm);
    let layer = Image::save(&source, Some(parent.parent()), false);
    layer.check(&source);
    assert_eq!(layer.saved_bytes, 50 * PAGE_SIZE);
}

#[test]
fn an_incremental_save_reads_pages_that_map_the_last_save_at_another_offset() {
    let (ram, source) = full_memory();
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
