//! Finds pages of a VM's memory that are probably also in the files of the VM's disks. A snapshot
//! can then refer to the disk, instead of storing such a page. The drawing shows who knows what, in
//! the order in which memfold asks:
//!
//! ```text
//!   guest's agent    "these pages cache 8 MiB of my second disk, from byte 3 GiB on"      Candidate
//!   some pages read  the guest's second disk is disk 0 of the VM's description            match_disks
//!   qemu-img         byte 3 GiB of disk 0 is byte 17 MiB of its backing file              DiskMap
//!   save             each page is compared with the file's bytes when the page is saved   Writer
//! ```
//! Only the comparison of bytes decides. All earlier steps yield guesses, which may be wrong or
//! outdated. A guest that lies only makes its own snapshot larger.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use memfold_host::helper;
use memfold_store::StoreIdentity;
use memfold_sys::memory;
use memfold_units::{Hva, PAGE_BYTES, PAGE_SIZE};
use memfold_vm::{DiskFormat, DiskSpec, RamLayout, VmSpec};
use rustix::fs::{Advice, OFlags, fadvise};
use rustix::process::Pid;
use serde::Deserialize;

use super::disk_chain::{chain, identity};
use super::file_facts::Stamp;
use super::freeze::Frozen;
use super::image::is_zero;
use super::ranges::without;

/// Maximum number of mappings that the runs to compare may need in a restored VM. A run that a
/// changed page splits needs more mappings ([`MOST_MAPPINGS`] is their limit).
///
/// [`MOST_MAPPINGS`]: super::manifest::MOST_MAPPINGS
pub(super) const MOST_COMPARED: usize = 24_576;

/// Minimum length, in pages, of a run that a snapshot keeps as a reference to a file. A single page
/// would cost two mappings of a restored VM and save 4 KiB.
pub const FEWEST_PAGES: u64 = 2;

/// Number of pages of a guest's disk that are compared with each disk of the VM to identify the
/// disk.
const SAMPLES: usize = 64;

/// Maximum number of a guest's disks that are identified.
const MOST_GUEST_DISKS: usize = 64;

/// Name by which `qemu-img` opens its standard input as a qcow2 image without a backing file.
const OVERLAY_ALONE: &str =
    r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"/dev/stdin"},"backing":null}"#;

/// Time limit for `qemu-img` to read the tables of a disk.
const MAP_LIMIT: Duration = Duration::from_secs(20);

/// Run of pages in a VM's memory that one of its disks contains, too, according to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Address in QEMU of the run's first page.
    pub hva: Hva,
    /// Number of pages in the run.
    pub pages: u64,
    /// Number of the guest's disk that contains the run, in the order of the guest's answer.
    pub guest_disk: usize,
    /// Offset on the guest's disk of the run's first page, in bytes; a multiple of 4096.
    pub byte: u64,
}

/// Run of pages in a VM's memory that a file may contain, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Address in QEMU's memory of the run's first page.
    pub(super) hva: Hva,
    /// Number of pages in the run.
    pub(super) pages: u64,
    /// Number of the file, an index into [`Candidates::files`].
    pub(super) file: u32,
    /// Offset in the file of the run's first page, in pages.
    pub(super) block: u64,
}

impl Run {
    pub(super) fn end(&self) -> Hva {
        self.hva.add_pages(self.pages)
    }

    /// Returns whether `next` continues this run, both in memory and in the file.
    fn goes_on_with(&self, next: &Self) -> bool {
        self.end() == next.hva && self.file == next.file && self.block + self.pages == next.block
    }
}

/// A file that nobody writes after the instant of the snapshot.
#[derive(Debug)]
pub(super) struct SourceFile {
    /// Number of the disk if the file is the disk's overlay, which will be frozen. `None` if the
    /// file is a backing file or a read-only disk.
    pub(super) overlay_of: Option<usize>,
    /// Whether the file belongs to the parent of a layer. A layer names such a file by its path.
    pub(super) in_parent: bool,
    /// Current path of the file.
    pub(super) path: PathBuf,
    pub(super) file: File,
    /// Stamp of the file before memory is compared with the file.
    pub(super) stamp: Option<Stamp>,
}

/// Runs that are compared while memory is read, and the files that may contain them.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    pub(super) files: Vec<SourceFile>,
    /// Runs by ascending address, without overlaps.
    runs: Vec<Run>,
}

/// Consecutive pages of a disk that are consecutive in a file, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    first: u64,
    pages: u64,
    file: u32,
    block: u64,
}

/// Places in files of a disk's pages, by ascending page of the disk.
#[derive(Debug, Default)]
struct DiskMap(Vec<Part>);

/// An entry of the output of `qemu-img map`.
#[derive(Debug, Deserialize)]
struct Extent {
    start: u64,
    length: u64,
    /// Index in the disk's chain of the file that contains the extent; 0 is the disk itself.
    depth: usize,
    data: bool,
    #[serde(default)]
    zero: bool,
    #[serde(default)]
    compressed: bool,
    /// Offset in the file in bytes; `None` for compressed or encrypted data.
    offset: Option<u64>,
}

impl DiskMap {
    /// Returns the map of the `extents` that files contain uncompressed and unencrypted. `numbers`
    /// are the numbers of the chain's files.
    fn new(extents: &[Extent], numbers: &[Option<u32>]) -> Self {
        let mut parts: Vec<Part> = Vec::new();
        let as_it_is = |e: &&Extent| e.data && !e.zero && !e.compressed;
        for extent in extents.iter().filter(as_it_is) {
            let file = numbers.get(extent.depth).copied().flatten();
            let (Some(offset), Some(file)) = (extent.offset, file) else {
                continue;
            };
            let skipped = extent.start.next_multiple_of(PAGE_SIZE) - extent.start;
            let pages = extent.length.saturating_sub(skipped) / PAGE_SIZE;
            let first = (extent.start + skipped) / PAGE_SIZE;
            let place = offset.saturating_add(skipped);
            let last = parts.last();
            let follows = last.is_none_or(|last| last.first + last.pages <= first);
            if pages > 0 && place % PAGE_SIZE == 0 && follows {
                parts.push(Part {
                    first,
                    pages,
                    file,
                    block: place / PAGE_SIZE,
                });
            }
        }
        Self(parts)
    }

    /// Returns this map with the parts of `below` for pages that this map lacks.
    fn over(self, below: Self) -> Self {
        let mut parts = Vec::new();
        let mut upper = self.0.into_iter().peekable();
        for mut part in below.0 {
            while part.pages > 0 {
                let next = upper.peek().copied();
                let next = next.filter(|next| next.first < part.first + part.pages);
                // Pages of this part that lie before the next part of the upper map, or under it.
                let (own, hidden) = match next {
                    None => (part.pages, 0),
                    Some(next) if next.first > part.first => (next.first - part.first, 0),
                    Some(next) => {
                        let end = next.first + next.pages;
                        (0, end.saturating_sub(part.first).min(part.pages))
                    }
                };
                if own > 0 {
                    parts.push(Part { pages: own, ..part });
                } else if hidden == 0 {
                    parts.extend(upper.next());
                }
                part.first += own + hidden;
                part.block += own + hidden;
                part.pages -= own + hidden;
            }
        }
        parts.extend(upper);
        parts.sort_unstable_by_key(|part| part.first);
        Self(parts)
    }

    /// Returns the known places in files of a candidate's pages.
    fn place(&self, candidate: &Candidate) -> impl Iterator<Item = Run> + '_ {
        let first = candidate.byte / PAGE_SIZE;
        let (end, hva) = (first.saturating_add(candidate.pages), candidate.hva);
        let next = (self.0).partition_point(|part| part.first + part.pages <= first);
        let here = self.0[next..].iter();
        let here = here.take_while(move |part| part.first < end);
        here.map(move |part| {
            let (from, to) = (first.max(part.first), end.min(part.first + part.pages));
            Run {
                hva: hva.add_pages(from - first),
                pages: to - from,
                file: part.file,
                block: part.block + (from - part.first),
            }
        })
    }
}

/// A disk whose map is read: the file and format that `qemu-img` opens.
struct Target<'a> {
    image: &'a Path,
    format: DiskFormat,
    overlay_of: Option<usize>,
    /// The disk below an overlay that a QEMU without root's rights writes. This QEMU could write
    /// any path into the overlay's header, so the header's backing file is not opened.
    below: Option<&'a DiskSpec>,
}

/// Returns the disks to whose files a snapshot can refer. Disks that are written in place will be
/// copied, and have no file in the snapshot yet.
fn targets<'a>(spec: &'a VmSpec, frozen: &'a [Frozen]) -> Vec<Target<'a>> {
    let target = |(number, disk): (usize, &'a DiskSpec)| {
        let own = frozen.iter().find(|frozen| frozen.disk == number);
        if own.is_none() && (!disk.read_only || spec.foreign.is_some()) {
            return None;
        }
        Some(Target {
            image: own.map_or(&disk.path, |frozen| &frozen.path),
            format: own.map_or(disk.format(), |_| DiskFormat::Qcow2),
            overlay_of: own.map(|_| number),
            below: own.filter(|_| !spec.keeps_rights()).map(|_| disk),
        })
    };
    spec.disks.iter().enumerate().filter_map(target).collect()
}

/// Reads a disk's extents with `qemu-img map`. (`-U` is needed because a running VM has the disk
/// open.)
fn extents(target: &Target<'_>) -> Result<Vec<Extent>, String> {
    let mut command = Command::new("qemu-img");
    command.args(["map", "-U", "--output=json"]);
    if target.below.is_some() {
        let overlay = open(target.image, OFlags::NOFOLLOW).ok_or("no regular file")?;
        command.arg(OVERLAY_ALONE).stdin(overlay);
    } else {
        command.args(["-f", target.format.driver()]);
        command.arg(target.image).stdin(Stdio::null());
    }
    let output = helper::output(&mut command, MAP_LIMIT).map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())
}

/// Opens a regular file. Other files have no mappable length, or block when they are opened.
fn open(path: &Path, more: OFlags) -> Option<File> {
    let flags = i32::try_from((OFlags::NONBLOCK | more).bits()).ok()?;
    let mut options = File::options();
    let file = options.read(true).custom_flags(flags).open(path).ok()?;
    let is_regular = file.metadata().is_ok_and(|facts| facts.is_file());
    is_regular.then_some(file)
}

impl Candidates {
    /// Finds the places of candidates on a VM's disks, at most as many as a restore can map.
    pub(super) fn find(
        pid: Pid,
        layout: &RamLayout,
        spec: &VmSpec,
        frozen: &[Frozen],
        candidates: &[Candidate],
    ) -> Self {
        let mut found = Self::default();
        if candidates.is_empty() {
            return found;
        }
        let mut maps = Vec::new();
        for target in targets(spec, frozen) {
            let map = found.map(&target).inspect_err(|why| {
                tracing::info!(vm = spec.name, disk = %target.image.display(), why, "disk not searched for the guest's cached pages, so the snapshot contains these pages");
            });
            maps.extend(map);
        }
        let is_ram = |candidate: &Candidate| {
            let end = candidate.hva.add_pages(candidate.pages);
            let mut blocks = layout.blocks.iter();
            blocks.any(|b| b.hva <= candidate.hva && end <= b.hva.add_pages(b.pages))
        };
        let mut candidates = candidates.to_vec();
        candidates.retain(is_ram);
        let read = |hva, page: &mut [u8]| {
            memory::read(pid, hva, page).is_ok_and(|read| read == PAGE_BYTES)
        };
        let disks = match_disks(&candidates, &maps, &found.files, read);
        let placed = candidates.iter().filter_map(|candidate| {
            let disk = disks.get(&candidate.guest_disk)?;
            Some(maps[*disk].place(candidate))
        });
        let placed: Vec<Run> = placed.flatten().collect();
        found.runs = choose(placed.iter().copied(), MOST_COMPARED);
        let pages = |runs: &[Run]| runs.iter().map(|run| run.pages).sum::<u64>();
        tracing::debug!(
            vm = spec.name,
            placed_pages = pages(&placed),
            compared_pages = pages(&found.runs),
            runs_and_mappings = ?found.counts(),
            "guest's cached pages chosen that the save compares with the VM's disks"
        );
        found.fetch();
        found
    }

    /// Reads the places in files of a disk's pages.
    fn map(&mut self, target: &Target<'_>) -> Result<DiskMap, String> {
        if let Some(disk) = target.below {
            let number = open(target.image, OFlags::NOFOLLOW)
                .and_then(|file| self.add(target, target.image, file));
            let overlay = DiskMap::new(&extents(target)?, &[number]);
            // Between overlay and disk may lie files of snapshots, whose pages are not found.
            return Ok(overlay.over(self.map(&Target {
                image: &disk.path,
                format: disk.format(),
                overlay_of: None,
                below: None,
            })?));
        }
        let files = match target.format {
            DiskFormat::Qcow2 => chain(target.image).map_err(|error| error.to_string())?,
            // The guest writes the contents of a raw disk, so even a header in it must not be
            // believed.
            DiskFormat::Raw => vec![target.image.to_owned()],
        };
        let numbers = files.iter();
        let numbers = numbers.map(|path| self.add(target, path, open(path, OFlags::empty())?));
        let numbers: Vec<Option<u32>> = numbers.collect();
        Ok(DiskMap::new(&extents(target)?, &numbers))
    }

    fn add(&mut self, target: &Target<'_>, path: &Path, file: File) -> Option<u32> {
        let own = StoreIdentity::of(&file).ok()?;
        let is_own = |other: &SourceFile| StoreIdentity::of(&other.file).is_ok_and(|id| id == own);
        if let Some(number) = self.files.iter().position(is_own) {
            return u32::try_from(number).ok();
        }
        let is_overlay = identity(target.image).is_ok_and(|image| image == own);
        self.files.push(SourceFile {
            overlay_of: target.overlay_of.filter(|_| is_overlay),
            in_parent: false,
            path: path.to_owned(),
            stamp: Stamp::of(&file).ok(),
            file,
        });
        u32::try_from(self.files.len() - 1).ok()
    }

    /// Makes the kernel read ahead the pages to compare, because the VM may be stopped during the
    /// comparison.
    fn fetch(&self) {
        for run in &self.runs {
            let (at, length) = (
                run.block * PAGE_SIZE,
                NonZeroU64::new(run.pages * PAGE_SIZE),
            );
            if let Some(SourceFile { file, .. }) = self.file(run) {
                // An error is harmless: without the advice, the comparison only takes longer.
                let _ = fadvise(file, at, length, Advice::WillNeed);
            }
        }
    }

    /// Adds the files of a layer's parent, and `runs` of them to compare with, by ascending
    /// address; [`Run::file`] counts the parent's files. They take precedence over other runs. All
    /// runs together need at most `most` mappings. Returns the number of the parent's first file.
    pub(super) fn add_parent(
        &mut self,
        files: Vec<SourceFile>,
        runs: Vec<Run>,
        most: usize,
    ) -> io::Result<u32> {
        let offset = u32::try_from(self.files.len()).map_err(io::Error::other)?;
        self.files.extend(files);
        let covered: Vec<Range<Hva>> = runs.iter().map(|run| run.hva..run.end()).collect();
        let all: Vec<Range<Hva>> = self.runs.iter().map(|run| run.hva..run.end()).collect();
        let left = without(&all, &covered).into_iter().map(|part| {
            let of = self.runs.partition_point(|run| run.end() <= part.start);
            let run = self.runs[of];
            Run {
                hva: part.start,
                pages: part.end.pages_since(part.start),
                block: run.block + part.start.pages_since(run.hva),
                ..run
            }
        });
        let of_parent = runs.into_iter().map(|run| Run {
            file: run.file + offset,
            ..run
        });
        let mut all: Vec<Run> = left.chain(of_parent).collect();
        all.sort_unstable_by_key(|run| run.hva);
        self.runs = choose(all.into_iter(), most);
        Ok(offset)
    }

    /// Returns the file that may contain a run.
    pub(super) fn file(&self, run: &Run) -> Option<&SourceFile> {
        self.files.get(usize::try_from(run.file).ok()?)
    }

    /// Returns the runs that overlap a range of addresses.
    pub(super) fn within(&self, range: Range<Hva>) -> impl Iterator<Item = &Run> + '_ {
        let first = self.runs.partition_point(|run| run.end() <= range.start);
        let runs = self.runs[first..].iter();
        runs.take_while(move |run| run.hva < range.end)
    }

    /// Returns the number of runs to compare, and the number of mappings that they need.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.runs.len(), mappings(&self.runs, 1))
    }

    #[cfg(test)]
    pub(super) fn of(files: Vec<SourceFile>, runs: Vec<Run>) -> Self {
        Self { files, runs }
    }
}

/// Identifies each of the guest's disks with the VM's disk that contains most of its samples.
/// Leaves out a guest's disk if no disk contains any of its samples.
fn match_disks(
    candidates: &[Candidate],
    maps: &[DiskMap],
    files: &[SourceFile],
    read: impl Fn(Hva, &mut [u8]) -> bool,
) -> BTreeMap<usize, usize> {
    let mut of_disk: BTreeMap<usize, Vec<&Candidate>> = BTreeMap::new();
    for candidate in candidates {
        let disk = candidate.guest_disk;
        if of_disk.len() < MOST_GUEST_DISKS || of_disk.contains_key(&disk) {
            of_disk.entry(disk).or_default().push(candidate);
        }
    }
    let mut found = BTreeMap::new();
    let (mut page, mut block) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
    for (guest_disk, candidates) in of_disk {
        let mut equal = vec![0_usize; maps.len()];
        let step = candidates.len().div_ceil(SAMPLES);
        for candidate in candidates.into_iter().step_by(step) {
            // Compare the middle of the run, because a guess is more often wrong at its ends.
            let before = candidate.pages / 2;
            let middle = Candidate {
                hva: candidate.hva.add_pages(before),
                pages: 1,
                byte: candidate.byte.saturating_add(before * PAGE_SIZE),
                ..*candidate
            };
            if !read(middle.hva, &mut page) || is_zero(&page) {
                continue;
            }
            for (map, equal) in maps.iter().zip(&mut equal) {
                let holds = map.place(&middle).any(|run| {
                    let file = usize::try_from(run.file).ok().and_then(|n| files.get(n));
                    file.is_some_and(|source| {
                        let at = run.block * PAGE_SIZE;
                        source.file.read_exact_at(&mut block, at).is_ok() && block == page
                    })
                });
                *equal += usize::from(holds);
            }
        }
        // If several disks contain equally many samples, the first is taken.
        let best = equal.into_iter().enumerate().rev().max_by_key(|(_, n)| *n);
        let best = best.filter(|(_, equal)| *equal > 0);
        found.extend(best.map(|(disk, _)| (guest_disk, disk)));
    }
    found
}

/// Returns how many mappings the runs of at least `shortest` pages need: one for each run, and one
/// for each gap between runs.
pub(super) fn mappings(runs: &[Run], shortest: u64) -> usize {
    let mut end = None;
    let wanted = runs.iter().filter(|run| run.pages >= shortest);
    let of_run = |run: &Run| 1 + usize::from(end.replace(run.end()) != Some(run.hva));
    wanted.map(of_run).sum()
}

/// Joins adjacent runs and drops the shortest ones, so that the remaining runs need at most `most`
/// mappings.
pub(super) fn choose(placed: impl Iterator<Item = Run>, most: usize) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for run in placed {
        match runs.last_mut() {
            Some(last) if last.goes_on_with(&run) => last.pages += run.pages,
            Some(last) if last.end() > run.hva => {}
            _ => runs.push(run),
        }
    }
    let mut lengths: Vec<u64> = runs.iter().map(|run| run.pages).collect();
    lengths.extend([FEWEST_PAGES, u64::MAX]);
    lengths.retain(|&length| length >= FEWEST_PAGES);
    lengths.sort_unstable();
    lengths.dedup();
    let is_too_many = |&length: &u64| mappings(&runs, length) > most;
    let shortest = lengths.partition_point(is_too_many);
    // The runs of the next shorter length are kept while there are mappings left for each of them
    // and its gap.
    let mut room = (most - mappings(&runs, lengths[shortest])) / 2;
    let next = shortest.checked_sub(1).map(|next| lengths[next]);
    runs.retain(|run| {
        let is_next = next == Some(run.pages) && room > 0;
        room -= usize::from(is_next);
        run.pages >= lengths[shortest] || is_next
    });
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlays_pages_hide_those_of_the_disk_below_and_all_others_stay() {
        let part = |first, pages, file, block| Part {
            first,
            pages,
            file,
            block,
        };
        let overlay = [
            part(0, 2, 0, 100),
            part(4, 2, 0, 102),
            part(7, 9, 0, 104),
            part(50, 1, 0, 7),
        ];
        let disk = [part(1, 8, 1, 1), part(10, 3, 1, 10), part(14, 6, 1, 14)];
        let all = DiskMap(overlay.to_vec()).over(DiskMap(disk.to_vec())).0;
        let ends = all
            .windows(2)
            .all(|two| two[0].first + two[0].pages <= two[1].first);
        assert!(ends, "{all:?}");
        let file = |page: u64| {
            let part = all
                .iter()
                .find(|p| (p.first..p.first + p.pages).contains(&page));
            part.map(|part| (part.file, part.block + (page - part.first)))
        };
        for page in 0..60 {
            let upper = overlay
                .iter()
                .find(|p| (p.first..p.first + p.pages).contains(&page));
            let lower = disk
                .iter()
                .find(|p| (p.first..p.first + p.pages).contains(&page));
            let wanted = upper
                .or(lower)
                .map(|part| (part.file, part.block + (page - part.first)));
            assert_eq!(file(page), wanted, "page {page}");
        }
    }

    /// Output of `qemu-img map` for an overlay over a raw file.
    const MAP: &str = r#"[
        { "start": 0, "length": 8192, "depth": 1, "present": true, "zero": false, "data": true, "offset": 0},
        { "start": 8192, "length": 57344, "depth": 1, "present": true, "zero": true, "data": false, "offset": 8192},
        { "start": 65536, "length": 65536, "depth": 0, "present": true, "zero": false, "data": true, "offset": 327680},
        { "start": 131072, "length": 65536, "depth": 0, "present": true, "zero": false, "data": true, "compressed": true},
        { "start": 196608, "length": 4096, "depth": 0, "present": true, "zero": false, "data": true, "offset": 393728},
        { "start": 200704, "length": 8192, "depth": 2, "present": true, "zero": false, "data": true, "offset": 401408},
        { "start": 262144, "length": 6144, "depth": 0, "present": true, "zero": false, "data": true, "offset": 458752}]"#;

    fn map() -> DiskMap {
        let extents: Vec<Extent> = serde_json::from_str(MAP).unwrap();
        // The last file of the chain cannot be opened.
        DiskMap::new(&extents, &[Some(1), Some(0), None])
    }

    fn candidate(page: u64, pages: u64, guest_disk: usize, disk_page: u64) -> Candidate {
        Candidate {
            hva: Hva(page * PAGE_SIZE),
            pages,
            guest_disk,
            byte: disk_page * PAGE_SIZE,
        }
    }

    fn run(page: u64, pages: u64, file: u32, block: u64) -> Run {
        Run {
            hva: Hva(page * PAGE_SIZE),
            pages,
            file,
            block,
        }
    }

    #[test]
    fn a_disk_page_is_located_in_the_image_file_only_if_it_is_aligned_and_uncompressed() {
        let map = map();
        let place = |disk_page, pages| {
            let found = map.place(&candidate(1000, pages, 0, disk_page));
            found.collect::<Vec<_>>()
        };
        // The result for the whole disk omits zeroes, compressed data, data that begin within a
        // page, data in other files, and incomplete pages.
        assert_eq!(
            place(0, 1 << 40),
            [
                run(1000, 2, 0, 0),
                run(1016, 16, 1, 80),
                run(1064, 1, 1, 112)
            ]
        );
        assert_eq!(place(20, 3), [run(1000, 3, 1, 84)]);
        assert_eq!(place(1, 20), [run(1000, 1, 0, 1), run(1015, 5, 1, 80)]);
        assert_eq!(place(32, 16), []);
        assert_eq!(place(u64::MAX / PAGE_SIZE, u64::MAX), []);
    }

    #[test]
    fn adjacent_runs_are_joined_and_if_there_are_too_many_the_shortest_are_left_out() {
        let touching = [
            run(10, 2, 0, 7),
            run(12, 3, 0, 9),
            // The runs differ in place or file, overlap the previous run, or are too short.
            run(15, 4, 0, 13),
            run(19, 4, 1, 17),
            run(20, 9, 1, 70),
            run(40, 1, 1, 17),
        ];
        assert_eq!(
            choose(touching.into_iter(), MOST_COMPARED),
            [run(10, 5, 0, 7), run(15, 4, 0, 13), run(19, 4, 1, 17)]
        );
        // A gap follows each run.
        let many = (0..MOST_COMPARED as u64).map(|n| run(n * 100, 4 + n % 40, 0, n * 200));
        let chosen = choose(many, MOST_COMPARED);
        assert_eq!(chosen.len(), MOST_COMPARED / 2);
        assert_eq!(mappings(&chosen, 1), MOST_COMPARED);
        assert!(chosen.iter().all(|run| run.pages >= 23));
        // Runs without gaps: twice as many are chosen.
        let adjacent = (1..MOST_COMPARED as u64).map(|n| run(n * 4, 4, 0, n * 200));
        assert_eq!(choose(adjacent, MOST_COMPARED).len(), MOST_COMPARED - 1);
        // All runs have the same length.
        let many = (0..MOST_COMPARED as u64).map(|n| run(n * 100, 63, 0, n * 200));
        assert_eq!(choose(many, MOST_COMPARED).len(), MOST_COMPARED / 2);
    }

    #[test]
    fn a_guest_disk_is_identified_by_the_content_that_the_guest_has_cached() {
        let page = |seed: u64| seed.to_le_bytes().repeat(PAGE_BYTES / 8);
        let source = |first: u64| {
            let file = tempfile::tempfile().unwrap();
            for number in 0..100 {
                file.write_all_at(&page(first + number), number * PAGE_SIZE)
                    .unwrap();
            }
            SourceFile {
                overlay_of: None,
                in_parent: false,
                path: PathBuf::new(),
                file,
                stamp: None,
            }
        };
        let files = [source(1000), source(2000)];
        let all = |file| {
            DiskMap(vec![Part {
                first: 0,
                pages: 100,
                file,
                block: 0,
            }])
        };
        let maps = [all(0), all(1)];
        // The guest's first disk is the VM's second. Half of the pages of the guest's second disk
        // have changed; none of its third disk match; its fourth disk is empty.
        let read = |hva: Hva, into: &mut [u8]| {
            let number = hva.0 / PAGE_SIZE;
            let seed = match number / 100 {
                0 => 2000 + number,
                1 if number % 8 < 4 => 900 + number,
                3 => 0,
                _ => 7,
            };
            into.copy_from_slice(&page(seed));
            number < 500
        };
        let candidates: Vec<Candidate> = (0..600)
            .step_by(4)
            .map(|at| candidate(at, 4, usize::try_from(at / 100).unwrap(), at % 100))
            .collect();
        let found = match_disks(&candidates, &maps, &files, read);
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [(0, 1), (1, 0)]);
    }

    #[test]
    fn with_qemu_img_map_disk_pages_are_located_in_an_overlay_and_in_its_base() {
        let place = tempfile::tempdir().unwrap();
        let (base, top) = (
            place.path().join("base.img"),
            place.path().join("top.qcow2"),
        );
        let disk: Vec<u8> = (0..256_u64)
            .flat_map(|page| (page + 1).to_le_bytes().repeat(PAGE_BYTES / 8))
            .collect();
        std::fs::write(&base, &disk).unwrap();
        let run = |program: &str, arguments: &[&str]| {
            let mut command = Command::new(program);
            command.args(arguments).arg(&top);
            command.output().is_ok_and(|output| output.status.success())
        };
        let backing = base.to_str().unwrap();
        let made = run(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", backing],
        );
        if !made || !run("qemu-io", &["-f", "qcow2", "-c", "write -P 77 256k 128k"]) {
            memfold_testkit::skip!("no qemu-img or qemu-io");
        }
        let mut expected = disk.clone();
        expected[256 << 10..384 << 10].fill(77);
        let mut below = DiskSpec::new(&base);
        below.format = Some(DiskFormat::Raw);
        // The second time, the overlay's header is not believed, and names a file that is missing.
        for below in [None, Some(&below)] {
            if below.is_some() {
                let missing = ["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", "/missing"];
                assert!(run("qemu-img", &missing));
            }
            let mut found = Candidates::default();
            let target = Target {
                image: &top,
                format: DiskFormat::Qcow2,
                overlay_of: Some(3),
                below,
            };
            let map = found.map(&target).unwrap();
            let runs: Vec<Run> = map.place(&candidate(0, 256, 0, 0)).collect();
            assert_eq!(runs.iter().map(|run| run.pages).sum::<u64>(), 256);
            let mut held = vec![0; disk.len()];
            for run in &runs {
                let at = usize::try_from(run.hva.0).unwrap();
                let length = usize::try_from(run.pages).unwrap() * PAGE_BYTES;
                let file = &found.files[run.file as usize];
                let is_overlay = (64..96).contains(&(run.hva.0 / PAGE_SIZE));
                assert_eq!(file.overlay_of, is_overlay.then_some(3));
                let part = &mut held[at..at + length];
                file.file
                    .read_exact_at(part, run.block * PAGE_SIZE)
                    .unwrap();
            }
            assert!(held == expected);
        }
        // A link in the overlay's place is not followed.
        let link = top.with_extension("link");
        std::os::unix::fs::symlink(&top, &link).unwrap();
        let target = Target {
            image: &link,
            format: DiskFormat::Qcow2,
            overlay_of: Some(3),
            below: Some(&below),
        };
        assert!(Candidates::default().map(&target).is_err());
    }
}
