//! Restores a VM from a snapshot: starts a new QEMU with the snapshot's RAM, disks and device
//! state.
//!
//! QEMU starts with `-incoming defer` and plain anonymous RAM. memfold's library in QEMU maps the
//! snapshot's RAM image privately over this RAM. QEMU still treats the RAM as anonymous, so balloon
//! and free page reporting work, and all clones share untouched pages in the page cache.
//!
//! For pages that are also in a disk of the snapshot, the image has only references. The library
//! maps these pages from the disk's file, over the mapped image. Nobody writes to that file any
//! more.
//!
//! Other RAM blocks (firmware, tables) are small, so they are copied. Then QEMU reads the device
//! state.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use memfold_host::progress::Progress;
use memfold_store::data_ranges;
use memfold_sys::memory;
use memfold_units::{Hva, PAGE_BYTES, PAGE_SIZE};
use memfold_vm::{
    DiskFormat, DiskSpec, Forward, Network, Qmp, QmpError, RamBlock, RamLayout, Vm, VmSpec,
    connection,
};
use memfold_wire::library::{MAX_RUNS, MapRun, Order};
use rustix::process::Pid;
use serde_json::json;

use super::disk_chain::chain;
use super::error::{SnapshotError, failed};
use super::file_facts::{device, facts_at, modified_ns};
use super::image::{CHUNK_BYTES, CHUNK_PAGES, ImageBlock, bytes};
use super::manifest::{BackingFile, Manifest, RAM, SavedDisk, file_name};
use super::rebase::is_of_another;
use super::refer::Reference;
use super::shelf::{CheckedImage, Shelf};

pub use super::built_on::built_on;
pub use super::own_disks::OwnDisks;
pub use super::users::{
    below, disk_users, holders, holders_of_each, in_maps, named_by, names_files_of, origin, users,
    users_of_each,
};

/// Maximum number of views of an image in one RAM block. Each view takes two mappings (with the gap
/// after it), and a process may have 65,530 mappings in all.
const MOST_VIEWS: usize = 4096;

/// Maximum number of ranges of one layer that its VM maps, too. Each takes two mappings.
const MOST_OWN_RUNS: usize = 4096;

/// Time limit for QEMU to read the device state.
const LOAD_TIMEOUT: Duration = Duration::from_secs(30);

/// The same if QEMU may have to wait for pages that are being fetched, such as those of its queues
/// in guest RAM.
const LOAD_WHILE_ARRIVING: Duration = Duration::from_secs(300);

/// Returns the description of a VM that will run from a snapshot under the name `name`. Checks that
/// the snapshot's disks and copied files are unchanged since the save.
pub fn spec(shelf: &Shelf, manifest: &Manifest, name: &str) -> Result<VmSpec, SnapshotError> {
    let place = shelf.path(&manifest.name)?;
    check_files(manifest, &place)?;
    for file in manifest.disks.iter().flat_map(SavedDisk::files) {
        check_file(manifest, &place, "disk", file)?;
    }
    for medium in &manifest.media {
        check_file(manifest, &place, "medium", medium)?;
    }
    Ok(unchecked_spec(&place, manifest, name))
}

/// Returns the description of a VM as [`spec`] does, for a snapshot in the directory `place`, whose
/// files are not checked.
#[must_use]
pub fn unchecked_spec(place: &Path, manifest: &Manifest, name: &str) -> VmSpec {
    let mut spec = manifest.spec.clone();
    // A clone has no boot snapshot, because only the saved VM was booted.
    spec.boot_snapshot &= name == manifest.vm;
    name.clone_into(&mut spec.name);
    if let Some(foreign) = &mut spec.foreign {
        for disk in &mut foreign.disks {
            disk.node.clone_from(&disk.drive);
        }
    }
    let of_foreign = spec.foreign.iter_mut().flat_map(|of| &mut of.files);
    for file in of_foreign.chain(&mut spec.files) {
        *file = place.join(&file);
    }
    for (disk, saved) in spec.disks.iter_mut().zip(&manifest.disks) {
        let (cache, aio) = (disk.cache, disk.aio);
        // Files in the snapshot have a checksum.
        let is_copied = saved.xxh3_128.is_some() && saved.file.path.is_relative();
        if is_copied || !saved.read_only {
            *disk = DiskSpec::new(place.join(&saved.file.path));
            disk.format = Some(DiskFormat::Qcow2);
        }
        if !saved.read_only {
            (disk.cache, disk.aio, disk.snapshot) = (cache, aio, true);
        } else if is_copied {
            disk.read_only = true;
        } else if saved.format == DiskFormat::Raw.driver() {
            // The disk keeps the format with which the VM was started, whatever a guest has written
            // to the disk.
            disk.format = Some(DiskFormat::Raw);
        }
    }
    spec
}

/// Chooses the forwarded host ports of a VM that will run from a snapshot: the ports in `asked`,
/// or, if `asked` is empty, those of the saved VM's ports that are free. Records in `spec` which
/// host resources of the saved VM the new VM does not get. Without the saved VM's bridge or
/// interface, the new VM's network card is connected to nothing.
pub fn choose_host_ends(spec: &mut VmSpec, asked: &[Forward]) -> Result<(), SnapshotError> {
    spec.left_out = match &spec.foreign {
        Some(foreign) => foreign.left_out.clone(),
        None => memfold_vm::foreign::leave_out_taken(&mut spec.qemu_args),
    };
    if let Err(error) = connection::check(&spec.network) {
        spec.left_out
            .push(format!("network {}: {error}", spec.network));
        spec.network = Network::Disconnected;
    }
    if asked.is_empty() {
        for forward in std::mem::take(&mut spec.forwards) {
            match forward.claim() {
                Ok(forward) => spec.forwards.push(forward),
                Err(_) => spec.left_out.push(format!("forwarded port {forward}")),
            }
        }
        return Ok(());
    }
    let claimed = asked.iter().map(|forward| {
        forward.claim().map_err(|error| {
            SnapshotError::Impossible(format!(
                "cannot forward port {forward} ({error}); use host port 0 to get any free host port"
            ))
        })
    });
    spec.forwards = claimed.collect::<Result<_, _>>()?;
    Ok(())
}

/// Checks that the copied files in the snapshot are unchanged.
fn check_files(manifest: &Manifest, place: &Path) -> Result<(), SnapshotError> {
    for (number, saved) in manifest.files.iter().enumerate() {
        let path = place.join(file_name(number));
        if facts_at(&path)? != *saved {
            let why = format!("{} was changed since the save", path.display());
            return Err(manifest.broken(why));
        }
    }
    Ok(())
}

/// Checks that a file or a block device is unchanged since the save.
fn check_file(
    manifest: &Manifest,
    place: &Path,
    what: &str,
    saved: &BackingFile,
) -> Result<(), SnapshotError> {
    let path = place.join(&saved.path);
    let facts = std::fs::metadata(&path).map_err(failed(&path))?;
    let is_same = facts.len() == saved.bytes && modified_ns(&facts) == saved.modified_ns;
    let changed = match &saved.device {
        Some(then) => match device(&path)? {
            Some(now) => then.differs(&now),
            None => Some("is not a block device any more".to_owned()),
        },
        None => (!is_same).then(|| "was changed since the save".to_owned()),
    };
    let path = path.display();
    changed.map_or(Ok(()), |why| {
        let why = format!("{what} {path} {why}; the saved RAM would not match it");
        Err(manifest.broken(why))
    })
}

/// Checks that a VM that was started to run from a snapshot has the features of the saved CPU, and
/// all saved RAM blocks.
pub fn fits(qmp: &mut Qmp, manifest: &Manifest) -> Result<(), SnapshotError> {
    if let Some(cpu) = &manifest.cpu {
        cpu.check(&manifest.name, qmp)?;
    }
    let there = memfold_vm::ram::read_blocks(qmp)?;
    let lacks =
        |saved: &&ImageBlock| saved.pages > 0 && !there.iter().any(|b| b.name == saved.name);
    if let Some(saved) = manifest.blocks.iter().find(lacks) {
        return Err(manifest.broken(format!(
            "the snapshot has a RAM block '{}' of {} pages that this QEMU lacks",
            saved.name, saved.pages
        )));
    }
    Ok(())
}

/// Part of a VM's RAM whose pages a file of the snapshot holds one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Host virtual address of the first page in QEMU.
    pub hva: u64,
    /// Number of pages.
    pub pages: u64,
    /// The file: 0 for `ram`, and then the files that the image's references name.
    pub file: usize,
    /// Index in the file of the first page.
    pub file_page: u64,
}

/// Files of a snapshot that is still being fetched.
pub trait PageSource {
    /// Waits until these bytes of a file ([`Piece::file`]) have arrived.
    fn wait(&self, file: usize, bytes: Range<u64>) -> io::Result<()>;

    /// Begins to announce pieces to the library at the other end of `socket`
    /// ([`Order::Await`]) as they arrive.
    fn begin(&self, pieces: Vec<Piece>, socket: UnixStream) -> io::Result<()>;
}

/// Returns all parts of the memory of a VM whose pages an image holds.
#[must_use]
pub fn pieces(manifest: &Manifest, layout: &RamLayout, image: &CheckedImage) -> Vec<Piece> {
    let saved = |block: &RamBlock| manifest.blocks.iter().find(|b| b.name == block.name);
    let blocks = layout.blocks.iter();
    let all = blocks.filter_map(|block| Some(pieces_of(image, saved(block)?, block.hva)));
    all.flatten().collect()
}

/// Returns where the pages of a block of an image are. The block begins at `hva` in QEMU.
#[must_use]
pub fn pieces_of(image: &CheckedImage, block: &ImageBlock, hva: Hva) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut next = block.first_page;
    let mut add = |pages: Range<u64>, file: usize, file_page: u64| {
        if !pages.is_empty() {
            pieces.push(Piece {
                hva: hva.add_pages(pages.start - block.first_page).0,
                pages: pages.end - pages.start,
                file,
                file_page,
            });
        }
    };
    for run in of_block(&image.references, block).chunk_by(Reference::goes_on_with) {
        let pages: u64 = run.iter().map(|part| u64::from(part.pages)).sum();
        let (first, end) = (run[0].page, run[0].page + pages);
        add(next..first, 0, next);
        let number = usize::try_from(run[0].file).unwrap_or(usize::MAX);
        add(first..end, number.saturating_add(1), run[0].block);
        next = end;
    }
    add(next..block.first_page + block.pages, 0, next);
    pieces
}

/// Fills the RAM of a VM, whose QEMU was started with `-incoming defer`, from a verified image
/// ([`Shelf::checked_image`]). Then loads the device state from the file `devices`, and starts the
/// VM. With `arriving`, the VM runs while pages of its memory are still being fetched.
pub fn fill(
    vm: &Vm,
    qmp: &mut Qmp,
    manifest: &Manifest,
    devices: &File,
    (image, arriving): (&CheckedImage, Option<&dyn PageSource>),
) -> Result<(), SnapshotError> {
    let ram: &File = &image.ram;
    fits(qmp, manifest)?;
    let layout = vm.layout(qmp)?;
    let no_library = || SnapshotError::Impossible("QEMU runs without memfold's library".into());
    let mut link = vm.library_link().ok_or_else(no_library)?.map_err(library)?;
    let mut ask =
        |order: &Order, descriptor| link.order(order, descriptor).map(drop).map_err(library);
    let (mut awaited, mut all_pieces) = (Vec::new(), Vec::new());
    for block in memfold_vm::ram::read_blocks(qmp)? {
        // A block without a name is a segment, whose file QEMU maps already.
        if block.name.is_empty() {
            continue;
        }
        let pages = block.used_bytes.div_ceil(PAGE_SIZE);
        let saved = manifest.blocks.iter().find(|b| b.name == block.name);
        let Some(saved) = saved.filter(|saved| saved.pages == pages) else {
            if pages == 0 {
                continue;
            }
            return Err(manifest.broken(format!(
                "this QEMU has a RAM block '{}' of {pages} pages that the snapshot lacks",
                block.name
            )));
        };
        if let Some(main) = layout.blocks.iter().find(|b| b.name == block.name) {
            let advice = vm.advice(main).map_err(library)?;
            let (hva, pages) = (main.hva.0, main.pages);
            ask(&Order::AddRam { hva, pages, advice }, None)?;
            if arriving.is_some() {
                awaited.push(memfold_wire::library::Range { hva, pages });
                all_pieces.extend(pieces_of(image, saved, main.hva));
                continue;
            }
            for (page, pages) in views(manifest, saved, ram).map_err(failed(RAM))? {
                let map = Order::Map {
                    hva: main.hva.add_pages(page).0,
                    pages,
                    file_page: saved.first_page + page,
                };
                ask(&map, Some(ram.as_fd()))?;
            }
            for (number, runs) in runs_by_file(&image.references, saved, main.hva) {
                let number = usize::try_from(number).unwrap_or(usize::MAX);
                let Some(source) = image.sources.get(number) else {
                    continue;
                };
                for runs in runs.chunks(MAX_RUNS) {
                    let runs = runs.to_vec();
                    ask(&Order::MapRuns { runs }, Some(source.as_fd()))?;
                }
            }
        } else {
            copy(vm.pid(), block.hva, saved, (image, arriving)).map_err(failed(RAM))?;
        }
    }
    if let Some(arriving) = arriving {
        let (socket, of_library) = UnixStream::pair().map_err(failed(RAM))?;
        let ranges = awaited;
        ask(&Order::Await { ranges }, Some(of_library.as_fd()))?;
        arriving.begin(all_pieces, socket).map_err(failed(RAM))?;
    }
    drop(link);
    let limit = if arriving.is_some() {
        LOAD_WHILE_ARRIVING
    } else {
        LOAD_TIMEOUT
    };
    load(qmp, devices, limit)
}

/// Returns the parts of a block that are mapped from the image: first page and number of pages. An
/// ordinary file is mapped as a whole. Of an image assembled in memory, only parts with data are
/// mapped, because touching a hole would allocate a page in the image that could not be reclaimed.
/// Holes smaller than a chunk (or larger, if needed) are mapped, too, to limit the number of
/// mappings.
fn views(manifest: &Manifest, block: &ImageBlock, ram: &File) -> io::Result<Vec<(u64, u64)>> {
    if manifest.is_mappable() {
        return Ok(vec![(0, block.pages)]);
    }
    let page = |byte: u64| (byte / PAGE_SIZE).saturating_sub(block.first_page);
    let parts: Vec<(u64, u64)> = data_ranges(ram)?
        .iter()
        .map(|data| (page(data.start), page(data.end).min(block.pages)))
        .filter(|(first, end)| first < end)
        .collect();
    let mut gap = CHUNK_PAGES;
    loop {
        let mut views: Vec<(u64, u64)> = Vec::new();
        for &(first, end) in &parts {
            match views.last_mut() {
                Some(before) if before.0 + before.1 + gap > first => before.1 = end - before.0,
                _ => views.push((first, end - first)),
            }
        }
        if views.len() <= MOST_VIEWS {
            return Ok(views);
        }
        gap *= 2;
    }
}

/// Returns the ranges of a VM's RAM whose pages a snapshot's `ram` holds, at most as many as
/// [`MOST_OWN_RUNS`], the longest.
pub fn own_runs(manifest: &Manifest, ram: &File, layout: &RamLayout) -> io::Result<Vec<MapRun>> {
    let mut runs = Vec::new();
    for block in &layout.blocks {
        let Some(saved) = manifest
            .blocks
            .iter()
            .find(|saved| saved.name == block.name)
        else {
            continue;
        };
        let (first, end) = (saved.first_page, saved.first_page + saved.pages);
        for data in data_ranges(ram)? {
            let from = (data.start / PAGE_SIZE).max(first);
            let to = data.end.div_ceil(PAGE_SIZE).min(end);
            if from < to {
                runs.push(MapRun {
                    hva: block.hva.add_pages(from - first).0,
                    pages: to - from,
                    file_page: from,
                });
            }
        }
    }
    runs.sort_unstable_by_key(|run| Reverse(run.pages));
    runs.truncate(MOST_OWN_RUNS);
    Ok(runs)
}

/// Returns the references to pages of a block.
fn of_block<'a>(references: &'a [Reference], block: &ImageBlock) -> &'a [Reference] {
    let (first, end) = (block.first_page, block.first_page + block.pages);
    let from = references.partition_point(|r| r.page < first);
    let to = references.partition_point(|r| r.page < end);
    &references[from..to]
}

fn library(error: impl Display) -> SnapshotError {
    SnapshotError::Library(error.to_string())
}

/// Returns the pages of a block that other files contain, as few mappings as possible, by the
/// files' numbers. The block is at `hva`.
fn runs_by_file(
    references: &[Reference],
    block: &ImageBlock,
    hva: Hva,
) -> BTreeMap<u32, Vec<MapRun>> {
    let mut by_file: BTreeMap<u32, Vec<MapRun>> = BTreeMap::new();
    for run in of_block(references, block).chunk_by(Reference::goes_on_with) {
        by_file.entry(run[0].file).or_default().push(MapRun {
            hva: hva.add_pages(run[0].page - block.first_page).0,
            pages: run.iter().map(|part| u64::from(part.pages)).sum(),
            file_page: run[0].block,
        });
    }
    by_file
}

/// Copies a small RAM block into a process.
fn copy(
    pid: Pid,
    hva: Hva,
    block: &ImageBlock,
    (image, arriving): (&CheckedImage, Option<&dyn PageSource>),
) -> io::Result<()> {
    if let Some(arriving) = arriving {
        for piece in pieces_of(image, block, hva) {
            let start = piece.file_page * PAGE_SIZE;
            arriving.wait(piece.file, start..start + piece.pages * PAGE_SIZE)?;
        }
    }
    let (mut saved, mut now) = (vec![0; CHUNK_BYTES], vec![0; CHUNK_BYTES]);
    for first in (0..block.pages).step_by(CHUNK_BYTES / PAGE_BYTES) {
        let length = bytes(CHUNK_PAGES.min(block.pages - first));
        let (saved, now) = (&mut saved[..length], &mut now[..length]);
        image.read(block.first_page + first, saved)?;
        let at = hva.add_pages(first);
        // ROM that QEMU has loaded from the same files has the right bytes already, and is not
        // written.
        let same = memory::read(pid, at, now)? == length && now == saved;
        if !same && memory::write(pid, at, saved)? != length {
            let why = format!("cannot write RAM block '{}'", block.name);
            return Err(io::Error::other(why));
        }
    }
    Ok(())
}

fn load(qmp: &mut Qmp, devices: &File, limit: Duration) -> Result<(), SnapshotError> {
    let place = qmp.lend(devices.as_fd())?;
    let uri = json!({ "uri": format!("file:{}", place.path()) });
    let begun = qmp.execute("migrate-incoming", uri);
    let loaded = begun.map_err(SnapshotError::from).and_then(|_| {
        let end = Instant::now() + limit;
        loop {
            // While QEMU's main loop waits for memory that is being fetched, it answers nothing.
            let status = qmp.execute_within(limit, "query-status", serde_json::Value::Null)?;
            match status["status"].as_str() {
                Some("inmigrate") if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Some("paused" | "running" | "prelaunch" | "postmigrate" | "save-vm") => {
                    break Ok(());
                }
                other => {
                    break Err(SnapshotError::Qemu(format!(
                        "QEMU did not load the device state (QEMU's state is {other:?})"
                    )));
                }
            }
        }
    });
    qmp.take_back(&place)?;
    loaded?;
    resume(qmp, limit)
}

/// Resumes a VM whose state is loaded. QEMU activates the VM's disks first, and answers late if its
/// host is busy or if a disk is still being fetched.
fn resume(qmp: &mut Qmp, limit: Duration) -> Result<(), SnapshotError> {
    match qmp.execute_within(limit, "cont", serde_json::Value::Null) {
        Err(QmpError::Timeout { .. }) => Err(SnapshotError::Qemu(format!(
            "QEMU has loaded the VM's state, and did not resume the VM within {} s; the host or the VM's disks are too slow, or the object store is gone: try again when they are not",
            limit.as_secs_f64()
        ))),
        resumed => Ok(resumed.map(drop)?),
    }
}

/// Reads the disks in a snapshot's directory, and returns a message for each disk that was changed
/// since the save.
pub fn changed_disks(shelf: &Shelf, manifest: &Manifest) -> Result<Vec<String>, SnapshotError> {
    let place = shelf.path(&manifest.name)?;
    let mut changed = Vec::new();
    for disk in &manifest.disks {
        let (path, saved) = (&disk.file.path, &disk.xxh3_128);
        if saved.is_some() && Some(facts_at(&place.join(path))?.xxh3_128) != *saved {
            changed.push(format!("{} was changed since it was saved", path.display()));
        }
    }
    Ok(changed)
}

/// Reads the disks of other snapshots on which a snapshot's disks are built, and returns a message
/// for each that was changed since it was saved, or cannot be compared.
#[must_use]
pub fn changed_disks_below(shelf: &Shelf, manifest: &Manifest) -> Vec<String> {
    let (mut owners, mut messages) = (BTreeSet::new(), Vec::new());
    match owners_below(shelf, manifest) {
        Ok(names) => owners = names,
        Err(error) => messages.push(memfold_host::chain(&error)),
    }
    for owner in owners {
        let of_owner = shelf
            .manifest(&owner)
            .and_then(|manifest| changed_disks(shelf, &manifest))
            .unwrap_or_else(|error| vec![memfold_host::chain(&error)]);
        let of_owner = of_owner.into_iter();
        messages.extend(
            of_owner.map(|what| format!("snapshot '{owner}', on which it is built: {what}")),
        );
    }
    messages
}

/// Returns the names of other snapshots on whose disks a snapshot's disks are built.
fn owners_below(shelf: &Shelf, manifest: &Manifest) -> Result<BTreeSet<String>, SnapshotError> {
    let place = shelf.path(&manifest.name)?;
    let mut owners = BTreeSet::new();
    for disk in &manifest.disks {
        let path = place.join(&disk.file.path);
        // The guest writes the contents of a raw disk, so even a header in it must not be believed.
        let files = if disk.format == DiskFormat::Qcow2.driver() {
            chain(&path)?
        } else {
            vec![path]
        };
        let others = files
            .iter()
            .filter(|file| is_of_another(shelf, &place, file));
        let names =
            others.filter_map(|file| Some(file.parent()?.file_name()?.to_str()?.to_owned()));
        // Base images of pulled snapshots belong to no snapshot.
        owners.extend(names.filter(|name| shelf.path(name).is_ok_and(|path| path.is_dir())));
    }
    Ok(owners)
}

/// Refuses a snapshot if one of its disks, of those on which they are built, or of its tables was
/// changed since it was saved.
pub(super) fn refuse_changed(shelf: &Shelf, manifest: &Manifest) -> Result<(), SnapshotError> {
    let disks = changed_disks(shelf, manifest)?.into_iter();
    let mut changed = disks.chain(changed_disks_below(shelf, manifest));
    if let Some(why) = changed.next() {
        return Err(manifest.broken(why));
    }
    match shelf.changed_parts(manifest)?.first() {
        Some(part) => Err(manifest.broken(format!("{part} was changed since it was saved"))),
        None => Ok(()),
    }
}

/// Reads the files in a snapshot that have checksums, and verifies them, before the snapshot is
/// copied to another host. The memory of an encrypted snapshot is left out: whoever decrypts it
/// finds each change.
pub fn check_all(
    shelf: &Shelf,
    manifest: &Manifest,
    progress: &Progress,
) -> Result<(), SnapshotError> {
    refuse_changed(shelf, manifest)?;
    if manifest.encryption.is_some() {
        return Ok(());
    }
    let stored = shelf.stored(manifest)?;
    progress.begin("checksums compared", stored.bytes);
    let path = shelf.root().join(&manifest.name);
    let wrong = stored.verify(progress).map_err(failed(&path))?;
    if wrong.is_empty() {
        return Ok(());
    }
    Err(Shelf::wrong(manifest, &wrong))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use memfold_units::ByteSize;

    use super::super::manifest::{Packed, tests::manifest};
    use super::*;
    use crate::fake_monitor;

    #[test]
    fn pieces_of_a_ram_block_cover_it_once_and_name_the_file_that_holds_each_page() {
        let file = || std::sync::Arc::new(tempfile::tempfile().unwrap());
        let reference = |page, pages, file, block| Reference {
            page,
            pages,
            file,
            block,
        };
        let image = CheckedImage {
            ram: file(),
            references: vec![
                reference(500, 12, 0, 7),
                // The block begins here. Two references are one piece.
                reference(512, 4, 1, 30),
                reference(516, 2, 1, 34),
                reference(600, 10, 0, 90),
            ],
            sources: vec![file(), file()],
        };
        let block = ImageBlock {
            name: "pc.ram".into(),
            first_page: 512,
            pages: 100,
        };
        let hva = Hva(0x10_0000);
        let found = pieces_of(&image, &block, hva);
        let told: Vec<_> = found
            .iter()
            .map(|p| ((p.hva - hva.0) / PAGE_SIZE, p.pages, p.file, p.file_page))
            .collect();
        assert_eq!(
            told,
            [
                (0, 6, 2, 30),
                (6, 82, 0, 518),
                (88, 10, 1, 90),
                (98, 2, 0, 610)
            ]
        );
    }

    #[test]
    fn if_qemu_does_not_resume_a_restored_vm_in_time_the_error_says_so_and_names_the_limit() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("qmp");
        let server = fake_monitor::serve(&path, |command| {
            (command == "qmp_capabilities").then(|| json!({ "return": {} }))
        });
        let mut qmp = Qmp::connect(&path, Duration::from_secs(10)).unwrap();
        let told = resume(&mut qmp, Duration::from_millis(50)).unwrap_err();
        assert!(
            matches!(&told, SnapshotError::Qemu(why) if why.contains("did not resume") && why.contains("0.05 s")),
            "{told}"
        );
        drop(qmp);
        assert_eq!(server.join().unwrap(), ["qmp_capabilities", "cont"]);
    }

    #[test]
    fn a_restore_maps_all_data_of_a_ram_block_and_leaves_out_large_holes() {
        let mut of = manifest("a", ByteSize::mib(1024));
        let pages = 12 << 18;
        let block = ImageBlock {
            name: "pc.ram".into(),
            first_page: 1024,
            pages,
        };
        let ram = tempfile::tempfile().unwrap();
        ram.set_len((1024 + pages + 512) * PAGE_SIZE).unwrap();
        let mut data = Vec::new();
        let mut put = |page: u64| {
            ram.write_all_at(&[1], page * PAGE_SIZE).unwrap();
            data.push(page);
        };
        // The references are in the block before and after, at both ends, near each other, and far
        // apart.
        let last = 1024 + pages - 1;
        for page in [0, 1023, 1024, last, last + 1, 2000, 2400, 4000] {
            put(page);
        }
        assert_eq!(views(&of, &block, &ram).unwrap(), [(0, pages)]);
        of.packed = Some(Packed {
            bytes: 0,
            index: of.sums.clone(),
        });
        let found = views(&of, &block, &ram).unwrap();
        assert_eq!(found, [(0, 1), (976, 401), (2976, 1), (pages - 1, 1)]);
        // The image has more parts than the maximum number of views.
        for number in 8..pages / 600 {
            put(number * 600);
        }
        let found = views(&of, &block, &ram).unwrap();
        assert!(found.len() <= MOST_VIEWS);
        let inside = |page: &u64| (1024..=last).contains(page);
        for page in data.into_iter().filter(inside) {
            let here =
                |&(first, pages): &(u64, u64)| (first..first + pages).contains(&(page - 1024));
            assert!(found.iter().any(here), "page {page}");
        }
    }
}
