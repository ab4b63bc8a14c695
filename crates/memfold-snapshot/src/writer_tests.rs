use std::ops::Range;

use super::*;
use memfold_units::Hva;

use crate::candidates::{Run, SourceFile};
use crate::image::is_zero;
use crate::stored::{Pages, Stored};
use memfold_store::data_ranges;
use memfold_sys::pagemap::{Filter, category};
use memfold_sys::region::Mapping;

/// Writes an image of all blocks of a stopped process.
fn write(
    pid: Pid,
    blocks: &[Source],
    free: &[Range<Hva>],
    ram: &File,
    sums: &File,
    progress: &Progress,
) -> io::Result<(Vec<ImageBlock>, ImageCounts)> {
    let plan = Plan::new(pid, blocks.to_vec(), free, None)?;
    let mut writer = Writer::new(&plan, ram, None)?;
    writer.write_back()?;
    let all: Vec<usize> = (0..blocks.len()).collect();
    writer.blocks(&plan, &all, None, progress)?;
    writer.finish(sums)
}

/// Returns the numbers of the chunks whose checksums differ.
fn verify(ram: &File, sums: &File) -> Vec<u64> {
    let bytes = ram.metadata().unwrap().len();
    let mut all = vec![0; usize::try_from(sums.metadata().unwrap().len()).unwrap()];
    sums.read_exact_at(&mut all, 0).unwrap();
    let stored = Stored {
        bytes,
        sums: all,
        sums_of_pages: true,
        pages: Pages::plain(ram.try_clone().unwrap()).unwrap(),
        references: Vec::new(),
        sources: Vec::new(),
    };
    stored.verify(&Progress::default()).unwrap()
}

fn me() -> Pid {
    rustix::process::getpid()
}

fn file() -> File {
    tempfile::tempfile().unwrap()
}

/// Returns a block of memory of this process: some pages with data, some with zeroes, and
/// holes.
fn block(pages: u64) -> (Mapping, Source) {
    let memory = Mapping::anonymous(pages, true).unwrap();
    for page in (0..pages).filter(|page| page % 7 < 3) {
        let words: Vec<u64> = (0..512).map(|word| page << 32 | word | 1 << 63).collect();
        memory.area().part(page, 1).write(&words);
    }
    for page in (0..pages).filter(|page| page % 7 == 3) {
        memory.area().part(page, 1).write(&[0; 512]);
    }
    let source = Source {
        name: format!("block of {pages}"),
        hva: memory.area().start(),
        pages,
    };
    (memory, source)
}

fn is_saved(page: u64) -> bool {
    page % 7 < 3
}

#[test]
fn a_save_writes_present_pages_and_zero_pages_take_no_space_in_the_image() {
    let (a, b) = (block(700), block(10));
    let (ram, sums) = (file(), file());
    let told = Progress::default();
    told.begin("test", 1000 * PAGE_SIZE);
    let sources = [a.1, b.1];
    let (placed, counts) = write(me(), &sources, &[], &ram, &sums, &told).unwrap();
    assert_eq!(told.now().done_bytes, 710 * PAGE_SIZE);
    assert_eq!((placed[1].first_page, placed[1].pages), (1024, 10));
    let saved = (0..700).chain(0..10).filter(|&page| is_saved(page)).count();
    assert_eq!(counts.saved_pages, saved as u64);
    assert_eq!(
        counts.zero_pages,
        (0..700).chain(0..10).filter(|page| page % 7 == 3).count() as u64
    );
    // The size on disk is not compared, because a file system counts its own tables, too.
    let data = data_ranges(&ram).unwrap().into_iter();
    let data = data.map(|part| part.end - part.start);
    assert_eq!(data.sum::<u64>(), saved as u64 * PAGE_SIZE);
    let mut page = [0; PAGE_BYTES];
    for (place, source) in placed.iter().zip(&sources) {
        for at in 0..place.pages {
            ram.read_exact_at(&mut page, (place.first_page + at) * PAGE_SIZE)
                .unwrap();
            let mut expected = [0; PAGE_BYTES];
            memory::read(me(), source.hva.add_pages(at), &mut expected).unwrap();
            assert!(page == expected, "page {at} of {}", place.name);
        }
    }
    assert!(verify(&ram, &sums).is_empty());
}

/// Returns the memory of these blocks as it is now, one block after the other.
fn memory_of(sources: &[Source]) -> Vec<u8> {
    let mut all = Vec::new();
    for source in sources {
        let mut part = vec![0; bytes(source.pages)];
        memory::read(me(), source.hva, &mut part).unwrap();
        all.extend(part);
    }
    all
}

#[test]
fn parallel_workers_of_a_save_write_each_page_at_its_correct_image_offset() {
    // The blocks consist of whole chunks and parts of chunks, full pieces and pieces of single
    // pages.
    let made: Vec<(Mapping, Source)> = [5 * CHUNK_PAGES + 77, 3, 2 * CHUNK_PAGES]
        .into_iter()
        .map(block)
        .collect();
    for page in (CHUNK_PAGES..2 * CHUNK_PAGES).chain(900..4 * CHUNK_PAGES) {
        let words: Vec<u64> = (1..=512).map(|word| page << 10 | word).collect();
        made[0].0.area().part(page, 1).write(&words);
    }
    let sources: Vec<Source> = made.iter().map(|(_, source)| source.clone()).collect();
    let expected = memory_of(&sources);
    for _ in 0..5 {
        let (ram, sums) = (file(), file());
        let progress = Progress::default();
        let (placed, counts) = write(me(), &sources, &[], &ram, &sums, &progress).unwrap();
        let mut saved = Vec::new();
        for block in &placed {
            let mut part = vec![1; bytes(block.pages)];
            ram.read_exact_at(&mut part, block.first_page * PAGE_SIZE)
                .unwrap();
            saved.extend(part);
        }
        assert!(saved == expected);
        let full = expected.chunks_exact(PAGE_BYTES).filter(|p| !is_zero(p));
        assert_eq!(counts.saved_pages, full.count() as u64);
        assert!(verify(&ram, &sums).is_empty());
    }
}

/// A process that holds memory until this value is dropped: `tail` keeps the last bytes of its
/// input.
struct Holder(std::process::Child);

impl Holder {
    fn new(length: usize) -> Self {
        use std::io::Write as _;
        let mut command = std::process::Command::new("tail");
        command.args(["-c", &length.to_string()]);
        command.stdin(std::process::Stdio::piped());
        let mut holder = Self(command.spawn().unwrap());
        let bytes: Vec<u8> = (1..=251).cycle().take(length).collect();
        let input = holder.0.stdin.as_mut().unwrap();
        input.write_all(&bytes).unwrap();
        holder
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    fn heap(&self) -> Option<Source> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.0.id())).unwrap();
        let line = maps.lines().find(|line| line.ends_with("[heap]"))?;
        let (from, to) = line.split_once(' ')?.0.split_once('-')?;
        let at = |text| u64::from_str_radix(text, 16).ok().map(Hva);
        Some(Source {
            name: "heap".into(),
            hva: at(from)?,
            pages: at(to)?.pages_since(at(from)?),
        })
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_save_fails_if_the_qemu_process_dies_before_its_memory_is_read() {
    let holder = Holder::new(8 << 20);
    let mut heap = None;
    let limit = std::time::Duration::from_secs(20);
    memfold_testkit::wait_until("the process holds what it was given", limit, || {
        heap = holder.heap();
        heap.as_ref().is_some_and(|heap| heap.pages > 7 << 8)
    });
    let plan = Plan::new(holder.pid(), vec![heap.unwrap()], &[], None).unwrap();
    drop(holder);
    let ram = file();
    let mut writer = Writer::new(&plan, &ram, None).unwrap();
    writer.write_back().unwrap();
    let progress = Progress::default();
    let error = writer.blocks(&plan, &[0], None, &progress).unwrap_err();
    let gone = rustix::io::Errno::SRCH.raw_os_error();
    assert_eq!(error.raw_os_error(), Some(gone), "{error}");
}

#[test]
fn a_save_fails_with_the_write_error_of_the_image_file() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let (_memory, source) = block(20 * CHUNK_PAGES);
    let plan = Plan::new(me(), vec![source], &[], None).unwrap();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let ram = File::from(memfd_create("full", flags).unwrap());
    let mut writer = Writer::new(&plan, &ram, None).unwrap();
    fcntl_add_seals(&ram, SealFlags::WRITE).unwrap();
    let progress = Progress::default();
    let error = writer.blocks(&plan, &[0], None, &progress).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
}

#[test]
fn a_save_that_would_use_the_reserve_of_its_file_system_fails_before_it_writes() {
    let (_memory, source) = block(20 * CHUNK_PAGES);
    let plan = Plan::new(me(), vec![source], &[], None).unwrap();
    let ram = file();
    let mut writer = Writer::new(&plan, &ram, None).unwrap();
    // Nothing is free in a file system of the kernel's.
    writer.keep_reserve(Path::new("/proc"));
    let progress = Progress::default();
    let error = writer.blocks(&plan, &[0], None, &progress).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
    assert!(memfold_store::data_ranges(&ram).unwrap().is_empty());
}

#[test]
fn a_save_makes_free_guest_pages_holes_of_the_image_and_writes_all_other_pages() {
    let (_memory, source) = block(700);
    let at = |from, to| source.hva.add_pages(from)..source.hva.add_pages(to);
    // The ranges are within a chunk, across two chunks, before the block, and beyond its end.
    let free = [
        Hva(0)..source.hva.add_pages(2),
        at(7, 9),
        at(500, 530),
        at(690, 900),
    ];
    let is_free = |page| free.iter().any(|f| f.contains(&source.hva.add_pages(page)));
    let (ram, sums) = (file(), file());
    let (_, counts) = write(
        me(),
        std::slice::from_ref(&source),
        &free,
        &ram,
        &sums,
        &Progress::default(),
    )
    .unwrap();
    let saved = (0..700).filter(|&p| is_saved(p) && !is_free(p)).count();
    assert_eq!(counts.saved_pages, saved as u64);
    let there = (0..700).filter(|&p| p % 7 < 4 && is_free(p)).count();
    assert_eq!(counts.free_pages, there as u64);
    let mut page = [0; PAGE_BYTES];
    for at in 0..700 {
        ram.read_exact_at(&mut page, at * PAGE_SIZE).unwrap();
        assert_eq!(is_zero(&page), !is_saved(at) || is_free(at), "page {at}");
    }
    assert!(verify(&ram, &sums).is_empty());
}

#[test]
fn a_flipped_bit_at_any_position_of_a_snapshot_image_is_found_by_its_checksums() {
    let (_memory, source) = block(2000);
    let (ram, sums) = (file(), file());
    write(me(), &[source], &[], &ram, &sums, &Progress::default()).unwrap();
    let mut byte = [0];
    // The bytes are in a page, in a hole, and in the last page.
    for at in [5, 100 * PAGE_SIZE + 7 * PAGE_SIZE / 2, 2000 * PAGE_SIZE - 1] {
        ram.read_exact_at(&mut byte, at).unwrap();
        ram.write_all_at(&[byte[0] ^ 1], at).unwrap();
        let chunk = at / CHUNK_BYTES as u64;
        assert_eq!(verify(&ram, &sums), [chunk]);
        ram.write_all_at(&byte, at).unwrap();
    }
    assert!(verify(&ram, &sums).is_empty());
}

/// Writes pages `from` to `to` of a block to a file, from the file's page `block` on. Returns
/// the run.
fn holds(file: &File, source: &Source, (from, to): (u64, u64), block: u64) -> Run {
    let mut part = vec![0; bytes(to - from)];
    memory::read(me(), source.hva.add_pages(from), &mut part).unwrap();
    file.write_all_at(&part, block * PAGE_SIZE).unwrap();
    Run {
        hva: source.hva.add_pages(from),
        pages: to - from,
        file: 0,
        block,
    }
}

#[test]
fn pages_that_a_disk_contains_too_are_saved_as_references_and_restored_unchanged() {
    let (memory, source) = block(2000);
    for page in 100..1500 {
        let words: Vec<u64> = (1..=512).map(|word| page << 10 | word).collect();
        memory.area().part(page, 1).write(&words);
    }
    let (disk, ram, sums) = (file(), file(), file());
    let runs = vec![
        holds(&disk, &source, (98, 300), 58),
        // These pages are not in the file.
        Run {
            pages: 30,
            block: 1 << 40,
            ..holds(&disk, &source, (310, 312), 900)
        },
        // This run crosses two ends of chunks.
        holds(&disk, &source, (500, 1100), 1000),
    ];
    // On the disk, pages 150, 200 and 202 have changed, and the first page of a chunk.
    for page in [150, 200, 202] {
        disk.write_all_at(b"!", (page - 90 + 50) * PAGE_SIZE + 9)
            .unwrap();
    }
    disk.write_all_at(b"!", (1024 - 500 + 1000) * PAGE_SIZE)
        .unwrap();
    let plan = Plan::new(me(), vec![source.clone()], &[], None).unwrap();
    let mut writer = Writer::new(&plan, &ram, None).unwrap();
    let of_disk = SourceFile {
        overlay_of: None,
        in_parent: false,
        path: "disk".into(),
        file: disk.try_clone().unwrap(),
        stamp: None,
    };
    let candidates = Candidates::of(vec![of_disk], runs);
    writer.compare_with(&plan, candidates).unwrap();
    writer
        .blocks(&plan, &[0], None, &Progress::default())
        .unwrap();
    let (references, candidates) = writer.take_references();
    let (_, counts) = writer.finish(&sums).unwrap();
    let told: Vec<_> = references
        .iter()
        .map(|r| (r.page, r.pages, r.block))
        .collect();
    // Holes and short runs have no reference. References that only a chunk's end separates need
    // one mapping.
    assert_eq!(
        told,
        [
            (98, 52, 58),
            (151, 49, 111),
            (203, 97, 163),
            (500, 12, 1000),
            (512, 512, 1012),
            (1025, 75, 1525)
        ]
    );
    // There are five runs, and a gap precedes each.
    assert_eq!(crate::refer::mappings(&references), 10);
    let full = (0..2000)
        .filter(|&p| is_saved(p) || (100..1500).contains(&p))
        .count();
    assert_eq!(counts.saved_pages, full as u64);
    let referred: u64 = told.iter().map(|told| u64::from(told.1)).sum();
    let data = data_ranges(&ram).unwrap().into_iter();
    let data = data.map(|part| part.end - part.start);
    assert_eq!(data.sum::<u64>(), (full as u64 - referred) * PAGE_SIZE);
    let mut all = vec![0; usize::try_from(sums.metadata().unwrap().len()).unwrap()];
    sums.read_exact_at(&mut all, 0).unwrap();
    let stored = Stored {
        bytes: ram.metadata().unwrap().len(),
        sums: all,
        sums_of_pages: true,
        pages: Pages::plain(ram).unwrap(),
        references,
        sources: candidates
            .files
            .into_iter()
            .map(|source| source.file)
            .collect(),
    };
    let progress = Progress::default();
    assert!(stored.verify(&progress).unwrap().is_empty());
    let laid = stored.lay_out("test", &progress).unwrap().unwrap();
    let mut whole = vec![0; bytes(2000)];
    laid.read_exact_at(&mut whole, 0).unwrap();
    assert!(whole == memory_of(std::slice::from_ref(&source)));
    // A change of the disk is detected.
    disk.write_all_at(b"!", 1100 * PAGE_SIZE).unwrap();
    assert_eq!(stored.verify(&progress).unwrap(), [1]);
}

/// Swap space of this host for the lifetime of the value.
pub(crate) struct Swap(tempfile::NamedTempFile);

impl Swap {
    pub(crate) fn on() -> Result<Self, String> {
        // A swap file must not be on tmpfs, and must not have holes.
        let file = tempfile::NamedTempFile::new_in("/var/tmp").map_err(|e| e.to_string())?;
        let bytes = vec![0; 16 << 20];
        file.as_file().write_all_at(&bytes, 0).unwrap();
        for program in ["mkswap", "swapon"] {
            let said = std::process::Command::new(program)
                .arg(file.path())
                .output();
            let said = said.map_err(|error| format!("{program}: {error}"))?;
            if !said.status.success() {
                return Err(String::from_utf8_lossy(&said.stderr).into_owned());
            }
        }
        Ok(Self(file))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let off = std::process::Command::new("swapoff")
            .arg(self.0.path())
            .status();
        assert!(std::thread::panicking() || off.unwrap().success());
    }
}

#[test]
fn guest_pages_in_the_swap_of_the_host_are_saved() {
    let _swap = match Swap::on() {
        Ok(swap) => swap,
        Err(why) => memfold_testkit::skip!("no swap: {why}"),
    };
    let (memory, source) = block(700);
    memory
        .area()
        .advise(rustix::mm::Advice::LinuxPageOut)
        .unwrap();
    let pagemap = memfold_sys::pagemap::Pagemap::open(me()).unwrap();
    let filter = Filter {
        all_of: category::SWAPPED,
        ..Filter::default()
    };
    let end = source.hva.add_pages(700);
    let swapped = pagemap.scan(source.hva, end, filter).unwrap();
    let swapped: u64 = swapped
        .iter()
        .map(memfold_sys::pagemap::Region::pages)
        .sum();
    assert!(swapped > 0, "no page is in swap");
    let (ram, sums) = (file(), file());
    let (_, counts) = write(me(), &[source], &[], &ram, &sums, &Progress::default()).unwrap();
    let saved = (0..700).filter(|&page| is_saved(page)).count();
    assert_eq!(counts.saved_pages, saved as u64);
    let mut page = [0; PAGE_BYTES];
    for at in 0..700 {
        ram.read_exact_at(&mut page, at * PAGE_SIZE).unwrap();
        let first = u64::from_ne_bytes(page[..8].try_into().unwrap());
        let expected = if is_saved(at) { at << 32 | 1 << 63 } else { 0 };
        assert_eq!(first, expected, "page {at}");
    }
}

#[test]
fn guest_pages_that_map_a_file_are_saved_even_if_they_were_never_touched() {
    let content = file();
    let bytes: Vec<u8> = (1..=250).cycle().take(4 * PAGE_BYTES).collect();
    content.write_all_at(&bytes, 0).unwrap();
    let memory = Mapping::anonymous(16, true).unwrap();
    memory
        .area()
        .part(3, 4)
        .map_file(std::os::fd::AsFd::as_fd(&content), 0)
        .unwrap();
    let source = Source {
        name: "ram0".into(),
        hva: memory.area().start(),
        pages: 16,
    };
    let (ram, sums) = (file(), file());
    let (_, counts) = write(me(), &[source], &[], &ram, &sums, &Progress::default()).unwrap();
    assert_eq!(counts.saved_pages, 4);
    let mut saved = vec![0; 4 * PAGE_BYTES];
    ram.read_exact_at(&mut saved, 3 * PAGE_SIZE).unwrap();
    assert!(saved == bytes);
}
