//! What memfold's library in QEMU knows about the VM's RAM blocks: their addresses, and what each
//! page maps (anonymous memory, a page store, or a snapshot's file), or that it has yet to arrive.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};

use memfold_sys::region::Area;
use memfold_units::{Hva, PAGE_SIZE};
use memfold_wire::library::{Advice, MAX_BLOCKS, MapRun};
use rustix::io::Errno;
use rustix::mm::Advice as Madvise;

use crate::bitmap::Bitmap;
use crate::stores::identity;

/// Kind of memory that a page of a RAM block maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Anonymous memory, as QEMU has mapped it.
    Anonymous,
    /// A private mapping of a page store: the page is folded.
    Folded,
    /// A private mapping of a snapshot's file: its RAM image or a disk.
    Template,
    /// Anonymous memory without a page. Access waits until the page of a snapshot arrives.
    Awaited,
}

/// Private mapping of a snapshot's file over part of a RAM block: page 0 of `area` shows page
/// `file_page` of the file.
#[derive(Clone, Copy, Debug)]
pub struct TemplateMap {
    /// Part of the RAM block that maps the file.
    pub area: Area,
    /// Device and inode number of the mapped file.
    pub file: (u64, u64),
    /// Offset of the mapping in the file, in pages.
    pub file_page: u64,
}

/// Maximum number of pages between two areas that share one call of `madvise`.
const ADVISE_GAP_PAGES: u64 = 128;

/// One RAM block of the VM, and what each of its pages maps.
#[derive(Debug)]
pub struct Block {
    /// Address range of the RAM block in this process.
    pub area: Area,
    pub advice: Advice,
    folded: Bitmap,
    template: Bitmap,
    /// Empty until the first page is awaited.
    awaited: Bitmap,
    /// Mapped files of a template, by the first address of their area; areas do not overlap.
    templates: BTreeMap<Hva, TemplateMap>,
    /// Areas that were folded and have not received their advice yet: first page and end in the
    /// block.
    unadvised: Vec<(u64, u64)>,
}

impl Block {
    /// Returns whether every page of the block is anonymous memory, as QEMU has mapped it.
    #[must_use]
    pub const fn is_untouched(&self) -> bool {
        self.folded.count() + self.template.count() + self.awaited.count() == 0
    }

    /// Returns the number of pages that have yet to arrive.
    #[must_use]
    pub const fn awaited_pages(&self) -> u64 {
        self.awaited.count()
    }

    /// Records that the pages of `area` have yet to arrive.
    pub fn await_pages(&mut self, area: Area) {
        if self.awaited.count() == 0 {
            self.awaited = Bitmap::new(self.area.pages());
        }
        self.set(area, Kind::Awaited);
    }

    fn index(&self, at: Hva) -> u64 {
        at.pages_since(self.area.start())
    }

    /// Returns the kind of mapping of the first page of `area`, and the longest part from the start
    /// of `area` whose pages all have this kind.
    #[must_use]
    pub fn first_kind(&self, area: Area) -> (Kind, Area) {
        let from = self.index(area.start());
        let to = from + area.pages();
        let maps = [
            (&self.folded, Kind::Folded),
            (&self.template, Kind::Template),
            (&self.awaited, Kind::Awaited),
        ];
        let (mut kind, mut end) = (Kind::Anonymous, to);
        for (map, of_map) in maps {
            let is_set = map.get(from);
            end = end.min(map.find(!is_set, from, to));
            if is_set {
                kind = of_map;
            }
        }
        (kind, area.part(0, end - from))
    }

    /// Records that all pages of `area` have a mapping of this kind.
    pub fn set(&mut self, area: Area, kind: Kind) {
        let first = self.index(area.start());
        self.folded.fill(first, area.pages(), kind == Kind::Folded);
        self.template
            .fill(first, area.pages(), kind == Kind::Template);
        self.awaited
            .fill(first, area.pages(), kind == Kind::Awaited);
    }

    /// Records that a snapshot's file is now mapped at `map.area`, in place of earlier mappings
    /// there.
    pub fn add_template(&mut self, map: TemplateMap) {
        let (start, end) = (map.area.start(), map.area.end());
        let below = self.templates.range(..end).rev();
        let covered = below.take_while(|(_, old)| old.area.end() > start);
        for at in covered.map(|(&at, _)| at).collect::<Vec<_>>() {
            let Some(old) = self.templates.remove(&at) else {
                continue;
            };
            if at < start {
                let area = old.area.part(0, start.pages_since(at));
                self.templates.insert(at, TemplateMap { area, ..old });
            }
            if old.area.end() > end {
                let skipped = end.pages_since(at);
                let rest = TemplateMap {
                    area: old.area.after(skipped),
                    file_page: old.file_page + skipped,
                    ..old
                };
                self.templates.insert(end, rest);
            }
        }
        self.templates.insert(start, map);
        self.set(map.area, Kind::Template);
    }

    /// Returns whether the pages of `area` map a snapshot's file `file` (device, inode) from page
    /// `page` of the file on.
    #[must_use]
    pub fn shows(&self, area: Area, file: (u64, u64), page: u64) -> bool {
        let below = self.templates.range(..=area.start()).next_back();
        below.is_some_and(|(&start, map)| {
            area.end() <= map.area.end()
                && map.file == file
                && map.file_page + area.start().pages_since(start) == page
        })
    }

    /// Gives new anonymous memory the `madvise` advice of the block, so that its mapping merges
    /// with the neighbouring mappings. Errors are ignored: advice is optional, and a kernel without
    /// KSM or huge pages refused the same advice from QEMU.
    pub fn advise_anonymous(&self, area: Area) {
        let wishes = [
            (self.advice.mergeable, Madvise::LinuxMergeable),
            (self.advice.hugepage, Madvise::LinuxHugepage),
            (self.advice.nohugepage, Madvise::LinuxNoHugepage),
        ];
        for (_, advice) in wishes.into_iter().filter(|(wanted, _)| *wanted) {
            let _ = area.advise(advice);
        }
        self.advise_file(area);
    }

    /// Gives a file mapping the part of the block's `madvise` advice that matters for files.
    /// Huge-page advice is left out, because khugepaged would then rearrange the page store.
    pub fn advise_file(&self, area: Area) {
        if self.advice.dontfork {
            let _ = area.advise(Madvise::LinuxDontFork);
        }
        if self.advice.dontdump {
            let _ = area.advise(Madvise::LinuxDontDump);
        }
    }

    /// Records that [`Self::advise_now`] must call [`Self::advise_file`] for `area`.
    pub fn advise_later(&mut self, area: Area) {
        let first = self.index(area.start());
        self.unadvised.push((first, first + area.pages()));
    }

    /// Calls [`Self::advise_file`] for all areas that were folded since the last call. Areas near
    /// each other share a call; the pages between them have the same advice already. A single call
    /// for all areas would walk thousands of mappings.
    pub fn advise_now(&mut self) {
        self.unadvised.sort_unstable();
        for near in self
            .unadvised
            .chunk_by(|a, b| b.0 <= a.1 + ADVISE_GAP_PAGES)
        {
            let end = near.iter().fold(0, |end, area| end.max(area.1));
            self.advise_file(self.area.part(near[0].0, end - near[0].0));
        }
        self.unadvised.clear();
    }

    /// Replaces the mappings of `area` by fresh anonymous memory (zeroes).
    pub fn refresh(&mut self, area: Area) -> Result<(), Errno> {
        area.map_anonymous(self.advice.noreserve)?;
        self.advise_anonymous(area);
        self.set(area, Kind::Anonymous);
        Ok(())
    }
}

/// A snapshot's file that is mapped over parts of RAM.
#[derive(Debug)]
pub struct Mapped<'a> {
    file: &'a OwnedFd,
    identity: (u64, u64),
    pages: u64,
}

impl<'a> Mapped<'a> {
    /// Reads the identity and the length of a file.
    pub fn open(file: &'a OwnedFd) -> Result<Self, String> {
        let (identity, pages) = identity(file)?;
        Ok(Self {
            file,
            identity,
            pages,
        })
    }

    /// Checks that the file has all pages of `run`.
    pub fn check(&self, run: &MapRun) -> Result<(), String> {
        let end = run.file_page.checked_add(run.pages);
        if end.is_some_and(|end| end <= self.pages) {
            return Ok(());
        }
        Err(format!(
            "{} pages from page {} exceed the file's {} pages",
            run.pages, run.file_page, self.pages
        ))
    }

    /// Maps the file from page `file_page` on over `area` of a block.
    pub fn map(&self, block: &mut Block, area: Area, file_page: u64) -> Result<(), String> {
        area.map_file(self.file.as_fd(), file_page)
            .map_err(|errno| format!("cannot map the file at {}: {errno}", area.start()))?;
        block.advise_file(area);
        block.add_template(TemplateMap {
            area,
            file: self.identity,
            file_page,
        });
        Ok(())
    }
}

/// All RAM blocks of the VM.
#[derive(Debug, Default)]
pub struct Ram {
    pub blocks: Vec<Block>,
}

impl Ram {
    /// Adds the RAM block of `pages` pages at address `hva`, or changes the advice of a known
    /// block. Fails if the memory cannot be folded, for example because it is shared.
    pub fn add(&mut self, hva: u64, pages: u64, advice: Advice) -> Result<(), String> {
        // SAFETY: the daemon, whose socket only this user can open, vouches that the range is guest
        // RAM: memory that QEMU made with mmap and that no Rust code knows. The call below checks
        // that the range is private and writable.
        let area = unsafe { Area::new(Hva(hva), pages) }.ok_or_else(|| {
            format!(
                "RAM block at {hva:#x} with {pages} pages is empty, unaligned or not a user address"
            )
        })?;
        let mut blocks = self.blocks.iter_mut();
        let overlaps = |b: &&mut Block| b.area.start() < area.end() && area.start() < b.area.end();
        if let Some(block) = blocks.find(overlaps) {
            if block.area != area {
                return Err(format!(
                    "RAM block at {hva:#x} with {pages} pages overlaps the block at {} with {} pages",
                    block.area.start(),
                    block.area.pages()
                ));
            }
            block.advice = advice;
            return Ok(());
        }
        if self.blocks.len() >= MAX_BLOCKS {
            return Err(format!("more than {MAX_BLOCKS} RAM blocks"));
        }
        let mut block = Block {
            area,
            advice,
            folded: Bitmap::new(pages),
            template: Bitmap::new(pages),
            awaited: Bitmap::new(0),
            templates: BTreeMap::new(),
            unadvised: Vec::new(),
        };
        // These parts were folded when the block was known before: UFFDIO_MOVE would answer EINVAL
        // there.
        for part in file_mappings(area)? {
            block.set(part, Kind::Folded);
        }
        self.blocks.push(block);
        Ok(())
    }

    /// Removes the RAM block at `hva` from the records; its mappings stay. Fails if no block starts
    /// there.
    pub fn remove(&mut self, hva: u64) -> Result<(), String> {
        let before = self.blocks.len();
        self.blocks.retain(|b| b.area.start() != Hva(hva));
        if self.blocks.len() == before {
            return Err(format!("no RAM block starts at {hva:#x}"));
        }
        Ok(())
    }

    /// Removes the RAM blocks that have a page from address `start` to `end` from the records.
    pub fn forget(&mut self, start: u64, end: u64) {
        self.blocks
            .retain(|b| b.area.end().0 <= start || end <= b.area.start().0);
    }

    /// Returns the RAM block that contains the `pages` pages at `hva`, and the area of these pages;
    /// `None` if they are not inside one block.
    pub fn find(&mut self, hva: u64, pages: u64) -> Option<(&mut Block, Area)> {
        let start = Hva(hva);
        let end = hva.checked_add(pages.checked_mul(PAGE_SIZE)?)?;
        if pages == 0 || !start.is_page_aligned() {
            return None;
        }
        let block = self
            .blocks
            .iter_mut()
            .find(|b| b.area.start() <= start && end <= b.area.end().0)?;
        let area = block
            .area
            .part(start.pages_since(block.area.start()), pages);
        Some((block, area))
    }

    /// Returns the number of pages that have yet to arrive.
    #[must_use]
    pub fn awaited_pages(&self) -> u64 {
        self.blocks.iter().map(Block::awaited_pages).sum()
    }

    /// Returns the lowest address of RAM and the end of the highest RAM block.
    #[must_use]
    pub fn span(&self) -> (u64, u64) {
        let low = self.blocks.iter().map(|b| b.area.start().0).min();
        let high = self.blocks.iter().map(|b| b.area.end().0).max();
        (low.unwrap_or(u64::MAX), high.unwrap_or(0))
    }
}

/// Checks in `/proc/self/smaps` that all of `area` is private writable memory that can be folded.
/// Returns the parts of `area` that are mappings of files.
fn file_mappings(area: Area) -> Result<Vec<Area>, String> {
    let text = fs::read_to_string("/proc/self/smaps")
        .map_err(|error| format!("cannot read /proc/self/smaps: {error}"))?;
    let mut covered = area.start().0;
    let mut inside = false;
    let mut files = Vec::new();
    for line in text.lines() {
        if let Some((start, end, permissions, inode)) = mapping_line(line) {
            inside = start < area.end().0 && area.start().0 < end;
            if inside {
                if start > covered || !permissions.starts_with("rw") {
                    break;
                }
                if permissions.as_bytes().get(3) != Some(&b'p') {
                    return Err(format!(
                        "RAM at {start:#x} is shared memory; folding needs private anonymous RAM: \
                         use memory-backend-ram with share=off"
                    ));
                }
                covered = end;
                if inode != "0" {
                    let from = Hva(start.max(area.start().0));
                    let to = Hva(end.min(area.end().0));
                    files.push(area.part(from.pages_since(area.start()), to.pages_since(from)));
                }
            }
        } else if inside {
            let Some(flags) = line.strip_prefix("VmFlags:") else {
                continue;
            };
            for flag in flags.split_ascii_whitespace() {
                let problem = match flag {
                    "ht" => "lies in hugetlbfs pages; use memory-backend-ram without hugetlb",
                    "lo" => "is locked in memory; start QEMU without -overcommit mem-lock=on",
                    "um" | "uw" | "ui" => {
                        "has another userfaultfd registered (postcopy migration or a background snapshot); \
                         try again when that has ended"
                    }
                    _ => continue,
                };
                return Err(format!("RAM at {} {problem}", area.start()));
            }
        }
    }
    if covered < area.end().0 {
        return Err(format!(
            "no private writable memory at {covered:#x}, inside the RAM block at {}",
            area.start()
        ));
    }
    Ok(files)
}

/// Parses a line of `/proc/PID/smaps` (`start-end perms offset dev inode path`, `proc_pid_maps(5)`)
/// into first address, end, permissions and inode.
fn mapping_line(line: &str) -> Option<(u64, u64, &str, &str)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    Some((
        u64::from_str_radix(start, 16).ok()?,
        u64::from_str_radix(end, 16).ok()?,
        fields.next()?,
        fields.nth(2)?,
    ))
}
