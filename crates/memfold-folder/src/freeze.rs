//! Freezes pages of a running guest, so that they can be compared and replaced: no thread can
//! change a page until it is thawed. A guard thaws its pages when it is dropped.
//!
//! Anonymous pages are frozen by a move to a staging area, as drawn here. Pages that map a file are
//! frozen by write protection. In a stopped VM, where only QEMU's own threads write, pages that the
//! kernel cannot write-protect are made read-only instead ([`ReadOnly`]).
//!
//! ```text
//!   guest RAM   | run: MISSING-registered, empty |  <- a thread that touches the run sleeps
//!                    |  UFFDIO_MOVE    ^
//!                    v                 | pages that no mapping replaced move back
//!   staging     | the run's pages      |            <- compared here; no other thread knows them
//! ```
//!
//! While pages are frozen, the freezing thread must not allocate memory, because another thread may
//! hold the allocator's lock and wait for one of these pages. The freezing thread must not touch
//! the frozen range either, because it would wait for itself.

use std::time::{Duration, Instant};

use memfold_sys::pagemap::{Filter, Pagemap, category};
use memfold_sys::read_only::ReadOnly;
use memfold_sys::region::{Area, Mapping};
use memfold_sys::userfaultfd::{Mode, Userfaultfd};
use rustix::io::Errno;
use rustix::mm::Advice;

/// Size of the staging area in pages: four of the longest runs. Staged pages that equal the store
/// remain until the area is full or the order ends, because one `madvise` call (and one TLB flush)
/// for many runs is cheaper than one for each run.
const STAGING_PAGES: u64 = 2048;

/// Number of attempts of an operation that fails with `EAGAIN`, before a page counts as busy.
const PATIENCE: u32 = 64;

/// Staging area: memory that holds the pages of a run while they are frozen.
#[derive(Debug)]
pub struct Staging {
    mapping: Mapping,
    used: u64,
    /// Page map of this process.
    pub(crate) pagemap: Pagemap,
}

impl Staging {
    /// Maps the staging area and registers it with `uffd`.
    pub fn new(uffd: &Userfaultfd) -> Result<Self, Errno> {
        let mapping = Mapping::anonymous(STAGING_PAGES, true)?;
        let area = mapping.area();
        // Huge pages here would allocate memory that is not needed, and a fork or a core dump must
        // not copy guests' pages twice. A kernel without huge pages refuses the first advice.
        let _ = area.advise(Advice::LinuxNoHugepage);
        area.advise(Advice::LinuxDontFork)?;
        area.advise(Advice::LinuxDontDump)?;
        // The target of UFFDIO_MOVE must be registered, in any mode. Mode write protection is
        // harmless, because no page here is ever write-protected. With mode missing, this thread
        // would wait for itself if it touched an empty page.
        let mode = if uffd.can_write_protect() {
            Mode::WriteProtect
        } else {
            Mode::Missing
        };
        uffd.register(area, mode)?;
        let pagemap = Pagemap::open(rustix::process::getpid())
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        Ok(Self {
            mapping,
            used: 0,
            pagemap,
        })
    }

    /// Returns an empty part of the staging area for `run`. A whole huge page gets an aligned part,
    /// so that the kernel moves it in one piece.
    pub fn slot(&mut self, run: Area) -> Area {
        const HUGE: u64 = memfold_units::HUGE_PAGE_PAGES;
        let whole_huge =
            run.pages() == HUGE && run.start().0 % (HUGE * memfold_units::PAGE_SIZE) == 0;
        let mut first = if whole_huge {
            self.used.next_multiple_of(HUGE)
        } else {
            self.used
        };
        if first + run.pages() > STAGING_PAGES {
            self.free();
            first = 0;
        }
        self.used = first + run.pages();
        self.mapping.area().part(first, run.pages())
    }

    /// Frees the pages that stayed in the staging area, because mappings of the page store replaced
    /// them in the guest.
    pub fn free(&mut self) {
        if self.used > 0 {
            // The call fails only on locked memory, which `AddRam` refused. If it fails, the pages
            // stay and moves to their places end with EEXIST.
            let _ = self
                .mapping
                .area()
                .part(0, self.used)
                .advise(Advice::LinuxDontNeed);
            self.used = 0;
        }
    }
}

/// Guard of a frozen run: the run is registered with a userfaultfd, so that threads that touch it
/// wait. Dropping the guard thaws the run.
#[derive(Debug)]
pub struct Frozen<'a> {
    uffd: &'a Userfaultfd,
    run: Area,
    /// Number of pages from the start that have a new, unregistered mapping.
    replaced: u64,
    began: Instant,
}

impl<'a> Frozen<'a> {
    fn register(uffd: &'a Userfaultfd, run: Area, mode: Mode) -> Result<Self, Errno> {
        let began = Instant::now();
        // If the run has several mappings, the kernel registers one after another. After an error
        // (ENOMEM at vm.max_map_count), the first ones stay registered, and a thread that finds a
        // page of theirs missing would wait for ever.
        uffd.register(run, mode).inspect_err(|error| {
            // After another error, such as EBUSY, nothing is registered here. Kernels of before
            // 2025 would also end a registration with a userfaultfd of QEMU's.
            if *error == Errno::NOMEM {
                let _ = uffd.unregister(run);
                let _ = uffd.wake(run);
            }
        })?;
        Ok(Self {
            uffd,
            run,
            replaced: 0,
            began,
        })
    }

    /// Freezes `run` by write protection: threads that write to it wait, and reads continue.
    pub fn protect(uffd: &'a Userfaultfd, run: Area) -> Result<Self, Errno> {
        let guard = Self::register(uffd, run, Mode::WriteProtect)?;
        for _ in 0..PATIENCE {
            match uffd.write_protect(run) {
                Err(Errno::AGAIN) => std::thread::yield_now(),
                outcome => return outcome.map(|()| guard),
            }
        }
        Err(Errno::AGAIN)
    }

    /// Thaws the run, of which new mappings have replaced the first `replaced` pages. Returns how
    /// long the run was frozen.
    pub fn finish(mut self, replaced: u64) -> Duration {
        self.replaced = replaced;
        let began = self.began;
        drop(self);
        began.elapsed()
    }
}

impl Drop for Frozen<'_> {
    /// Unregisters the pages whose mapping was not replaced, and wakes all waiting threads.
    ///
    /// The range to unregister was registered as a whole, so no mapping must be split, and `ENOMEM`
    /// can only be temporary. Waking needs a separate call: the kernel's unregister wakes threads
    /// that wait for a missing page, but not threads that wait for the end of write protection
    /// (`userfaultfd_unregister` in `fs/userfaultfd.c`).
    fn drop(&mut self) {
        let rest = self.run.after(self.replaced);
        if !rest.is_empty() {
            for _ in 0..1_000_000 {
                if self.uffd.unregister(rest).is_ok() {
                    break;
                }
                std::thread::yield_now();
            }
        }
        let _ = self.uffd.wake(self.run);
    }
}

/// Guard of a run that no thread can write, of any kind of memory.
#[derive(Debug)]
pub enum Unwritable<'a> {
    Frozen(Frozen<'a>),
    ReadOnly { guard: ReadOnly, began: Instant },
}

impl<'a> Unwritable<'a> {
    /// Freezes a run of a running VM, whose vCPUs and devices write to it.
    pub fn in_running(uffd: &'a Userfaultfd, run: Area) -> Result<Self, Errno> {
        Frozen::protect(uffd, run).map(Self::Frozen)
    }

    /// Freezes a run of a stopped VM. Its vCPUs and disks are at rest, but QEMU's main loop writes
    /// what a port receives (virtio-serial).
    pub fn in_stopped(uffd: Option<&'a Userfaultfd>, run: Area) -> Result<Self, Errno> {
        match uffd.filter(|uffd| uffd.protection_lasts()) {
            Some(uffd) => match Frozen::protect(uffd, run) {
                // The kernel cannot write-protect a private view of a file that is not shmem.
                Err(Errno::INVAL) => Self::read_only(run),
                frozen => frozen.map(Self::Frozen),
            },
            None => Self::read_only(run),
        }
    }

    fn read_only(run: Area) -> Result<Self, Errno> {
        let began = Instant::now();
        let guard = ReadOnly::new(run)?;
        Ok(Self::ReadOnly { guard, began })
    }

    /// Thaws the run, of which new mappings have replaced the first `replaced` pages. Returns how
    /// long the run was frozen.
    pub fn finish(self, replaced: u64) -> Duration {
        match self {
            Self::Frozen(guard) => guard.finish(replaced),
            Self::ReadOnly { guard, began } => {
                guard.finish(replaced);
                began.elapsed()
            }
        }
    }
}

/// Guard of pages that were moved out of a run into the staging area. Dropping the guard puts back
/// all pages that [`Staged::finish`] did not report as replaced.
#[derive(Debug)]
pub struct Staged<'a> {
    /// Dropped, and thereby thawed, after the pages were put back.
    frozen: Frozen<'a>,
    pagemap: &'a Pagemap,
    slot: Area,
    pages: u64,
    /// Number of pages from the start that need not return to the run.
    gone: u64,
}

impl<'a> Staged<'a> {
    /// Freezes pages from the start of `run` by moving them to `slot`, as many as can be moved.
    /// Also returns the error that ended the move early, if one did.
    ///
    /// # Errors
    ///
    /// Fails if the run cannot be registered; then nothing is frozen.
    pub fn freeze(
        uffd: &'a Userfaultfd,
        pagemap: &'a Pagemap,
        run: Area,
        slot: Area,
    ) -> Result<(Self, Option<Errno>), Errno> {
        let frozen = Frozen::register(uffd, run, Mode::Missing)?;
        let (pages, stop) = if holds_huge_zero_page(pagemap, run) {
            (0, Some(Errno::NOENT))
        } else {
            transfer(uffd, pagemap, run, slot)
        };
        let staged = Self {
            frozen,
            pagemap,
            slot,
            pages,
            gone: 0,
        };
        Ok((staged, stop))
    }

    /// Returns the part of the staging area that holds the frozen pages.
    #[must_use]
    pub fn contents(&self) -> Area {
        self.slot.part(0, self.pages)
    }

    /// Thaws the run. The first `gone` pages do not return from the staging area. If `mapped` is
    /// set, a new mapping has replaced them; otherwise they become empty anonymous memory. Returns
    /// how long the run was frozen.
    pub fn finish(mut self, gone: u64, mapped: bool) -> Duration {
        self.gone = gone.min(self.pages);
        self.frozen.replaced = if mapped { self.gone } else { 0 };
        let began = self.frozen.began;
        drop(self);
        began.elapsed()
    }
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        let Frozen { uffd, run, .. } = self.frozen;
        let left = |area: Area| area.part(self.gone, self.pages - self.gone);
        put_back(uffd, self.pagemap, left(self.slot), left(run));
    }
}

/// Returns whether `run` is one huge page that maps the kernel's shared huge page of zeroes. Linux
/// 6.16 to 6.18.19 maps memory that does not exist when it moves that page as a whole
/// (CVE-2026-31397). Moving the page would free nothing. The run must be registered, so that no
/// thread can fault the page in after the check.
fn holds_huge_zero_page(pagemap: &Pagemap, run: Area) -> bool {
    const HUGE: u64 = memfold_units::HUGE_PAGE_PAGES;
    let filter = Filter {
        all_of: category::ZERO | category::HUGE,
        ..Filter::default()
    };
    let is_zero = |page: Area| pagemap.all_pass(page.start(), page.end(), filter);
    run.pages() == HUGE && is_zero(run.part(0, 1)).unwrap_or(true)
}

/// Moves pages until one cannot be moved. Returns the number of moved pages, and the error that
/// ended the move.
///
/// The kernel's own count can be too small. Linux 6.18 moves several pages in one step. If it had
/// to try again before (a page migrated, or its accessed bit changed), `move_pages` in
/// `mm/userfaultfd.c` moves pages without counting them, and then fails with `EEXIST` at the pages
/// that it has just moved (docs/kernel/uffdio-move-count.md). A page that wrongly counts as not
/// moved would be lost in staging.
fn transfer(uffd: &Userfaultfd, pagemap: &Pagemap, from: Area, to: Area) -> (u64, Option<Errno>) {
    let mut done = 0;
    let mut chunk = from.pages();
    let mut tries = 0;
    while done < from.pages() {
        let (moved, error) = uffd.move_pages(from.part(done, chunk), to.part(done, chunk));
        done += moved;
        if moved > 0 {
            tries = 0;
        }
        match error {
            None => chunk = from.pages() - done,
            // Check this after every error, because any error may be the last one that this loop
            // sees.
            Some(_) if is_moved(pagemap, from.part(done, 1), to.part(done, 1)) => {
                done += 1;
                tries = 0;
                chunk = from.pages() - done;
            }
            Some(Errno::AGAIN) if moved > 0 => {}
            Some(Errno::AGAIN) if tries < PATIENCE => {
                tries += 1;
                std::thread::yield_now();
            }
            Some(Errno::AGAIN) => return (done, Some(Errno::BUSY)),
            // EINVAL is also the answer to a range that spans two mappings, so a smaller range may
            // succeed.
            Some(Errno::INVAL) if chunk > 1 => chunk /= 2,
            Some(errno) => return (done, Some(errno)),
        }
    }
    (done, None)
}

/// Returns whether a page is at its target and no longer at its source.
fn is_moved(pagemap: &Pagemap, from: Area, to: Area) -> bool {
    let is_there = |page: Area| pagemap.all_pass(page.start(), page.end(), Filter::THERE);
    // If the page map cannot be read, the page counts as not moved.
    !from.is_empty() && matches!((is_there(from), is_there(to)), (Ok(false), Ok(true)))
}

/// Moves pages back, and repeats until all are back. Nothing prevents success: the target is empty
/// and registered (nobody can fill it), its page tables exist, and no other thread knows the staged
/// pages. Reclaim or migration holds a page only for a short time.
fn put_back(uffd: &Userfaultfd, pagemap: &Pagemap, from: Area, to: Area) {
    let mut done = 0;
    let mut tries = 0u32;
    while done < from.pages() {
        let (moved, stop) = transfer(uffd, pagemap, from.after(done), to.after(done));
        done += moved;
        tries = if moved > 0 { 0 } else { tries + 1 };
        match stop {
            // Both errors mean that the page is in its place already: staging is empty, or the
            // target is not.
            Some(Errno::NOENT | Errno::EXIST) => done += 1,
            Some(_) if tries > PATIENCE => {
                // The last resort gives the guest a copy of the bytes instead of the page.
                match uffd.copy(from.part(done, 1), to.part(done, 1)) {
                    Ok(()) | Err(Errno::EXIST) => {
                        done += 1;
                        tries = 0;
                    }
                    Err(_) => std::thread::yield_now(),
                }
            }
            _ => {}
        }
    }
}
