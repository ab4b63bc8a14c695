//! The file that holds the page store of one trust domain: creates it, or adopts it from an earlier
//! daemon, appends pages, and frees pages (punches holes into the file).

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use memfold_sys::memory;
use memfold_units::{ByteSize, HUGE_PAGE_PAGES, Hva, PAGE_BYTES, PAGE_SIZE, StorePage};
use rustix::fs::{
    AtFlags, FallocateFlags, FileType, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom, seek,
};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

/// Kind of the file system tmpfs, which memfds are in as well (`linux/magic.h`).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Maximum number of pages of a page store's file (16 TiB), so that page numbers fit into 32 bits.
pub const MAX_PAGES: u64 = u32::MAX as u64 - 1;

/// Identity of a page store's file: the device and inode number, as in `/proc/PID/maps`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StoreIdentity {
    /// Device number of the store's file (`st_dev`).
    pub dev: u64,
    /// Inode number of the store's file (`st_ino`).
    pub ino: u64,
}

impl StoreIdentity {
    /// Returns the identity (device and inode number) of an open file.
    pub fn of(file: impl AsFd) -> std::io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        Ok(Self {
            dev: stat.st_dev,
            ino: stat.st_ino,
        })
    }

    /// Returns major and minor device number and inode number, as lines of `/proc/PID/maps` have
    /// them.
    #[must_use]
    pub fn in_maps(self) -> (u32, u32, u64) {
        (
            rustix::fs::major(self.dev),
            rustix::fs::minor(self.dev),
            self.ino,
        )
    }
}

impl From<&Metadata> for StoreIdentity {
    fn from(facts: &Metadata) -> Self {
        Self {
            dev: facts.dev(),
            ino: facts.ino(),
        }
    }
}

/// Reason why an operation on the page store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The page store has reached its cap: it holds as many bytes as it may.
    #[error(
        "page store is full: {held} of {cap} used; raise --store-cap to share more memory (shared memory stays shared)"
    )]
    Full {
        /// Number of bytes that the page store holds now.
        held: ByteSize,
        /// Maximum number of bytes that the page store may hold.
        cap: ByteSize,
    },
    /// The page store has no page numbers left, and no hole (range of freed pages) that is large
    /// enough.
    #[error(
        "page store is full: all {MAX_PAGES} page numbers were used, and no range of freed pages is long enough"
    )]
    Exhausted,
    /// The file of the page store could not be created, enlarged, filled or punched.
    #[error("cannot use the page store: {what} failed")]
    Io {
        /// Name of the operation on the file that failed.
        what: &'static str,
        /// Error of the system call that failed.
        #[source]
        source: io::Error,
    },
}

fn io_error<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> StoreError {
    move |error| {
        let source = error.into();
        StoreError::Io { what, source }
    }
}

/// Range of a process's memory to be copied into the page store. The process's memory may end
/// before the last page of the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Process from whose memory the pages are copied.
    pub pid: Pid,
    /// Address in the process of the first page to copy.
    pub from: Hva,
    /// Number of pages to copy.
    pub pages: u64,
}

/// Result of [`Store::fill`]: the store pages that were not filled.
#[derive(Debug, Default)]
pub struct Filled {
    /// Store pages whose bytes could not be read from the process or not be written. They read as
    /// zeroes.
    pub missing: Vec<Range<StorePage>>,
    /// Error that ended the copy before the last page; `None` if all pages that could be read were
    /// written.
    pub error: Option<StoreError>,
}

/// The page store of one trust domain. Only the daemon has its file open for writing.
#[derive(Debug)]
pub struct Store {
    file: File,
    read_only: OwnedFd,
    identity: StoreIdentity,
    frontier: StorePage,
    /// End of the free space that begins at the frontier.
    limit: StorePage,
    /// Further gaps to use when the space after the frontier is full; the next one to use comes
    /// last.
    gaps: Vec<Range<StorePage>>,
    file_bytes: u64,
    held_pages: u64,
    /// Part of `held_pages`: pages that are reserved and not filled yet.
    unfilled_pages: u64,
    cap: ByteSize,
    buffer: Vec<u8>,
}

impl Store {
    /// Creates an empty page store for trust domain `domain` that holds at most `cap` bytes.
    pub fn create(domain: &str, cap: ByteSize) -> Result<Self, StoreError> {
        let file = huge_file(domain).or_else(|error| {
            tracing::info!(
                domain,
                %error,
                "page store uses pages of the ordinary size: cannot mount a tmpfs with huge pages"
            );
            memfd(domain)
        })?;
        // Only root may open the file through /proc; other processes get a read-only descriptor.
        rustix::fs::fchmod(&file, Mode::RUSR).map_err(io_error("fchmod"))?;
        Self::from_file(file, cap)
    }

    /// Adopts the page store of trust domain `domain` that an earlier daemon created: opens the
    /// store's file through the QEMU process `pid`, which has it open. Returns `None` if the
    /// process has no such file, or if others could write to the file: a guest may control this
    /// QEMU, and so the names of its files and the numbers of its descriptors.
    pub fn adopt(pid: Pid, domain: &str, cap: ByteSize) -> Result<Option<Self>, StoreError> {
        let directory = format!("/proc/{}/fd", pid.as_raw_nonzero());
        let name = file_name(domain);
        let wanted = ["/", "/memfd:"].map(|kind| format!("{kind}{name} (deleted)"));
        let descriptors = std::fs::read_dir(directory)
            .map_err(io_error("listing a VM's descriptors"))?
            .flatten();
        for path in descriptors.map(|entry| entry.path()) {
            // A descriptor like this neither reads nor writes, and stays at its file, whatever the
            // process does with its own.
            let Ok(held) = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            else {
                continue;
            };
            let own = format!("/proc/self/fd/{}", held.as_raw_fd());
            let target = std::fs::read_link(&own).map_err(io_error("readlink"))?;
            if !wanted
                .iter()
                .any(|wanted| target.as_os_str() == wanted.as_str())
            {
                continue;
            }
            if !is_from_daemon(&held).map_err(io_error("fstat"))? {
                tracing::warn!(
                    pid = pid.as_raw_nonzero(),
                    domain,
                    "QEMU has a file with the name of a page store that no daemon of memfold has created; its guest may control this QEMU, so end the VM"
                );
                continue;
            }
            let file = File::options().read(true).write(true).open(own);
            let file = file.map_err(io_error("opening the store of a running VM"))?;
            return Self::from_file(file, cap).map(Some);
        }
        Ok(None)
    }

    fn from_file(file: File, cap: ByteSize) -> Result<Self, StoreError> {
        let facts = file.metadata().map_err(io_error("fstat"))?;
        let read_only = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .map_err(io_error("opening read-only"))?
            .into();
        Ok(Self {
            identity: StoreIdentity::from(&facts),
            frontier: StorePage(facts.size().div_ceil(PAGE_SIZE)),
            limit: StorePage(MAX_PAGES),
            gaps: Vec::new(),
            file_bytes: facts.size(),
            held_pages: facts.blocks() * 512 / PAGE_SIZE,
            read_only,
            file,
            unfilled_pages: 0,
            cap,
            buffer: vec![0; bytes_of(HUGE_PAGE_PAGES)],
        })
    }

    /// Returns the identity (device and inode number) of the page store's file.
    #[must_use]
    pub const fn identity(&self) -> StoreIdentity {
        self.identity
    }

    /// Returns the read-only descriptor of the page store's file, which VMs get.
    #[must_use]
    pub fn read_only(&self) -> BorrowedFd<'_> {
        self.read_only.as_fd()
    }

    /// Returns the number of the store page that will be reserved next.
    #[must_use]
    pub const fn frontier(&self) -> StorePage {
        self.frontier
    }

    /// Returns the number of bytes that the page store holds in memory or swap, by the kernel's
    /// count.
    pub fn held(&self) -> Result<ByteSize, StoreError> {
        let facts = self.file.metadata().map_err(io_error("fstat"))?;
        Ok(ByteSize(facts.blocks() * 512))
    }

    /// Returns the cap: the maximum number of bytes that the page store may hold.
    #[must_use]
    pub const fn cap(&self) -> ByteSize {
        self.cap
    }

    /// Reserves the next `pages` page numbers, to be filled by [`Store::fill`], and returns the
    /// first one. These pages read as zeroes until then. Fails if the cap or the last page number
    /// is reached.
    pub fn reserve(&mut self, pages: u64) -> Result<StorePage, StoreError> {
        let cap = self.cap;
        if self.held_pages.saturating_add(pages) > cap.pages().0 {
            let held = self.count_held()?;
            if self.held_pages.saturating_add(pages) > cap.pages().0 {
                return Err(StoreError::Full { held, cap });
            }
        }
        if self.room() < pages {
            return Err(StoreError::Exhausted);
        }
        let first = self.frontier;
        self.frontier = first.add_pages(pages);
        self.held_pages += pages;
        self.unfilled_pages += pages;
        Ok(first)
    }

    /// Sets `held_pages` to the kernel's count, plus the pages that are reserved and not filled
    /// yet, which that count does not include. Returns the kernel's count.
    fn count_held(&mut self) -> Result<ByteSize, StoreError> {
        let held = self.held()?;
        self.held_pages = held.pages().0 + self.unfilled_pages;
        Ok(held)
    }

    /// Makes the next reserved page begin a huge page (2 MiB) of the file. This is worthwhile if
    /// many pages are reserved before the next fill. Skipped pages stay holes, which cost nothing.
    pub const fn align(&mut self) {
        self.frontier = StorePage(self.frontier.0.next_multiple_of(HUGE_PAGE_PAGES));
    }

    /// Returns the number of consecutive page numbers that can be reserved now.
    #[must_use]
    pub const fn room(&self) -> u64 {
        self.limit.0.saturating_sub(self.frontier.0)
    }

    /// Makes [`Store::reserve`] continue in the next gap given to [`Store::reuse`]; returns `false`
    /// if there is no gap. Callers call this function only when every reserved page is filled.
    pub fn next_gap(&mut self) -> bool {
        let gap = (self.unfilled_pages == 0).then(|| self.gaps.pop());
        let Some(gap) = gap.flatten() else {
            return false;
        };
        (self.frontier, self.limit) = (gap.start, gap.end);
        true
    }

    /// Returns the holes (ranges of freed or skipped pages) that consist of whole huge pages, in
    /// ascending order. Smaller holes are not used again.
    pub fn holes(&self) -> Result<Vec<Range<StorePage>>, StoreError> {
        let mut holes = Vec::new();
        let mut from = StorePage(0);
        let end = StorePage(MAX_PAGES);
        for data in self.filled()?.into_iter().chain([end..end]) {
            let whole = StorePage(from.0.next_multiple_of(HUGE_PAGE_PAGES))
                ..StorePage(data.start.0 / HUGE_PAGE_PAGES * HUGE_PAGE_PAGES);
            if whole.start < whole.end {
                holes.push(whole);
            }
            from = data.end;
        }
        Ok(holes)
    }

    /// Sets the gaps, which are used when no page numbers are left at the end of the file: holes
    /// that no process maps, in ascending order.
    pub fn reuse(&mut self, mut gaps: Vec<Range<StorePage>>) {
        gaps.reverse();
        self.gaps = gaps;
    }

    /// Copies sources, one after another, to the reserved pages from `first` on, with few system
    /// calls. Whole huge pages are written as huge pages. A smaller piece gets ordinary pages,
    /// because the kernel would clear a huge page before a partial write, which takes several times
    /// as long as the copy. The guest may write to a page while it is copied; the comparison before
    /// folding detects that.
    pub fn fill(&mut self, first: StorePage, sources: &[Source]) -> Filled {
        // Each piece is within a huge page of the store, and has its first page in the store.
        let (mut pieces, mut end) = (Vec::new(), first);
        for &Source { pid, from, pages } in sources {
            let mut done = 0;
            while done < pages {
                let room = HUGE_PAGE_PAGES - end.0 % HUGE_PAGE_PAGES;
                let (from, pages) = (from.add_pages(done), room.min(pages - done));
                pieces.push((end, Source { pid, from, pages }));
                (end, done) = (end.add_pages(pages), done + pages);
            }
        }
        let mut filled = Filled::default();
        let mut buffer = std::mem::take(&mut self.buffer);
        let huge_page = |piece: &(StorePage, Source)| piece.0.0 / HUGE_PAGE_PAGES;
        for chunk in pieces.chunk_by(|a, b| huge_page(a) == huge_page(b)) {
            let at = chunk[0].0;
            let bytes = &mut buffer[..bytes_of(chunk.iter().map(|(_, s)| s.pages).sum())];
            read_chunk(chunk, bytes, &mut filled.missing);
            if let Err(error) = self.write_chunk(at, bytes) {
                filled.missing.retain(|missing| missing.start < at);
                filled.missing.push(at..end);
                filled.error = Some(error);
                break;
            }
        }
        self.buffer = buffer;
        self.unfilled_pages = self.unfilled_pages.saturating_sub(end.0 - first.0);
        let missing = filled.missing.iter().map(|m| m.end.0 - m.start.0).sum();
        self.held_pages = self.held_pages.saturating_sub(missing);
        filled
    }

    fn write_chunk(&mut self, at: StorePage, bytes: &[u8]) -> Result<(), StoreError> {
        let end = at.offset() + bytes.len() as u64;
        let whole = bytes.len() == bytes_of(HUGE_PAGE_PAGES);
        // A chunk in a gap is within the file's size already. The file must never shrink.
        if whole && end > self.file_bytes {
            // The tmpfs allocates a huge page only within the file's size (`huge=within_size`).
            self.file.set_len(end).map_err(io_error("growing"))?;
        }
        self.file_bytes = self.file_bytes.max(end);
        self.file
            .write_all_at(bytes, at.offset())
            .map_err(io_error("writing"))
    }

    /// Punches `pages` pages from `first` on out of the file, which frees their memory. Callers may
    /// punch only pages that no VM can need (see the reclaim of memfold-fold).
    pub fn punch(&mut self, first: StorePage, pages: u64) -> Result<(), StoreError> {
        rustix::fs::fallocate(
            &self.file,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            first.offset(),
            pages * PAGE_SIZE,
        )
        .map_err(io_error("punching"))?;
        // Some of the pages may have been holes already.
        self.count_held().map(drop)
    }

    /// Returns the ranges of store pages that hold data (all but holes), in ascending order.
    pub fn filled(&self) -> Result<Vec<Range<StorePage>>, StoreError> {
        let data = data_ranges(&self.file).map_err(io_error("looking for holes"))?;
        let page = |offset: u64| StorePage(offset.div_ceil(PAGE_SIZE));
        let pages = data
            .into_iter()
            .map(|part| page(part.start)..page(part.end));
        Ok(pages.collect())
    }
}

/// Returns the byte ranges of a file that are not holes, in ascending order (`SEEK_DATA` of
/// `lseek(2)`).
pub fn data_ranges(file: &File) -> io::Result<Vec<Range<u64>>> {
    let (mut parts, mut at) = (Vec::new(), 0);
    loop {
        let start = match seek(file, SeekFrom::Data(at)) {
            Err(Errno::NXIO) => return Ok(parts), // nothing behind it
            other => other?,
        };
        at = seek(file, SeekFrom::Hole(start))?;
        parts.push(start..at);
    }
}

/// Returns the size of `pages` pages in bytes; `pages` is at most a huge page's.
fn bytes_of(pages: u64) -> usize {
    usize::try_from(pages).unwrap_or(0) * PAGE_BYTES
}

/// Reads sources one after another into `buffer`, each with its first page in the store. Pages that
/// cannot be read become zeroes in `buffer` and are added to `missing`.
fn read_chunk(
    sources: &[(StorePage, Source)],
    buffer: &mut [u8],
    missing: &mut Vec<Range<StorePage>>,
) {
    let mut rest = buffer;
    for mut left in sources.chunk_by(|a, b| a.1.pid == b.1.pid) {
        while let Some(pid) = left.first().map(|(_, s)| s.pid) {
            let parts = left.iter().map(|(_, s)| (s.from, bytes_of(s.pages)));
            let ranges: Vec<(Hva, usize)> = parts.collect();
            let total: usize = ranges.iter().map(|r| r.1).sum();
            let mut read = memory::read_many(pid, &ranges, &mut rest[..total]).unwrap_or(0);
            // If reading ended early, the sources after the broken one are read in the next turn.
            while let Some(((at, source), behind)) = left.split_first() {
                let (own, more) = rest.split_at_mut(bytes_of(source.pages));
                let whole = own.len().min(read) / PAGE_BYTES;
                read -= own.len().min(read);
                let is_broken = whole * PAGE_BYTES < own.len();
                if is_broken {
                    own[whole * PAGE_BYTES..].fill(0);
                    missing.push(at.add_pages(whole as u64)..at.add_pages(source.pages));
                }
                (rest, left) = (more, behind);
                if is_broken {
                    break;
                }
            }
        }
    }
}

/// Returns the file's name in `/proc/PID/fd` and `/proc/PID/maps`, by which a new daemon finds the
/// page store.
fn file_name(domain: &str) -> String {
    format!("memfold:{domain}")
}

/// Creates an unlinked file in a tmpfs of its own, which is mounted nowhere and allocates huge
/// pages within the file's size. The tmpfs ends with the last descriptor and mapping of the file.
/// Compared with a memfd, huge pages take a quarter of the time to fill and half the time to
/// compare. Needs `CAP_SYS_ADMIN`. tmpfs cannot seal its files against shrinking
/// (`memfd_file_seals_ptr` in `mm/memfd.c`), but the VMs' read-only descriptor cannot shrink it.
fn huge_file(domain: &str) -> io::Result<File> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    // `size=0` means no limit, as for a memfd; the daemon itself keeps the cap.
    for (key, value) in [("huge", "within_size"), ("size", "0"), ("mode", "0700")] {
        fsconfig_set_string(context.as_fd(), key, value)?;
    }
    fsconfig_create(context.as_fd())?;
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let root = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, flags)?;
    let name = file_name(domain);
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&root, &name, flags, Mode::RUSR)?;
    rustix::fs::unlinkat(&root, &name, AtFlags::empty())?;
    Ok(file.into())
}

/// Returns whether a file is one that this user has created as [`Store::create`] does, and that
/// nobody else can open for writing: without a name, in the kernel's tmpfs, readable by its owner
/// only.
fn is_from_daemon(file: impl AsFd) -> io::Result<bool> {
    let facts = rustix::fs::fstat(&file)?;
    let kind = FileType::from_raw_mode(facts.st_mode);
    let is_private = Mode::from_raw_mode(facts.st_mode) == Mode::RUSR && facts.st_nlink == 0;
    let is_own = facts.st_uid == rustix::process::geteuid().as_raw();
    let is_memory = rustix::fs::fstatfs(&file)?.f_type == TMPFS_MAGIC;
    Ok(kind == FileType::RegularFile && is_private && is_own && is_memory)
}

/// Creates a memfd, for hosts where no tmpfs can be mounted.
fn memfd(domain: &str) -> Result<File, StoreError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd =
        rustix::fs::memfd_create(file_name(domain), flags).map_err(io_error("memfd_create"))?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK)
        .map_err(io_error("sealing against shrinking"))?;
    Ok(fd.into())
}

#[cfg(test)]
impl Store {
    /// Skips `pages` page numbers, as if that many more pages had been used.
    fn skip(&mut self, pages: u64) {
        self.frontier = self.frontier.add_pages(pages);
    }

    /// Appends a copy of `pages` pages at `from` in process `pid`. Returns the first new page and
    /// the number of pages copied.
    fn append(
        &mut self,
        pid: Pid,
        from: Hva,
        pages: u64,
    ) -> Result<(StorePage, memfold_units::PageCount), StoreError> {
        let first = self.reserve(pages)?;
        let filled = self.fill(first, &[Source { pid, from, pages }]);
        if let Some(error) = filled.error {
            return Err(error);
        }
        let missing: u64 = filled.missing.iter().map(|m| m.end.0 - m.start.0).sum();
        Ok((first, memfold_units::PageCount(pages - missing)))
    }

    fn read_page(&self, page: StorePage, buffer: &mut [u8; PAGE_BYTES]) -> io::Result<()> {
        self.file.read_exact_at(buffer, page.offset())
    }
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
