//! Freezes pages of a running guest. Guards thaw them when they are dropped.
//!
//! ```text
//!   guest RAM   | run: MISSING-registered, empty |  <- who touches it sleeps
//!                    |  UFFDIO_MOVE    ^
//!                    v                 | moved back: what was not replaced
//!   staging     | the run's pages      |            <- compared here, nobody else knows them
//! ```
//!
//! Between the first ioctl and the guard's `drop`, nothing may allocate: another thread may hold
//! the allocator's lock and wait for one of these pages. This thread must not touch the frozen
//! range, because it would wait for itself.

use std::time::{Duration, Instant};

use memfold_sys::pagemap::{Filter, Pagemap};
use memfold_sys::region::{Area, Mapping};
use memfold_sys::userfaultfd::{Mode, Userfaultfd};
use rustix::io::Errno;
use rustix::mm::Advice;

/// Size of the staging area in pages: four of the longest runs. Pages equal to the store stay there
/// until it is full or the order ends, because one `madvise` (and one TLB flush) for many runs is
/// cheaper than one for each.
const STAGING_PAGES: u64 = 2048;

/// Attempts of an operation that fails with `EAGAIN`, before a page counts as busy.
const PATIENCE: u32 = 64;

/// Staging area, which holds the frozen pages.
#[derive(Debug)]
pub struct Staging {
    mapping: Mapping,
    used: u64,
    pagemap: Pagemap,
}

impl Staging {
    /// Maps and registers the area.
    pub fn new(uffd: &Userfaultfd) -> Result<Self, Errno> {
        let mapping = Mapping::anonymous(STAGING_PAGES, true)?;
        let area = mapping.area();
        // Huge pages here would be memory never asked for; a fork or a core dump must not see
        // guests' pages twice. A kernel without huge pages refuses the first.
        let _ = area.advise(Advice::LinuxNoHugepage);
        area.advise(Advice::LinuxDontFork)?;
        area.advise(Advice::LinuxDontDump)?;
        // UFFDIO_MOVE wants its target registered, for anything. Write protection, which is never
        // set here, keeps a stray access to an empty page harmless; a missing-page registration
        // would let this thread wait for itself.
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

    /// Returns an empty place for `run`. A whole huge page gets an aligned place, so that it moves
    /// in one piece.
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

    /// Returns this process's page map.
    pub(crate) const fn pagemap(&self) -> &Pagemap {
        &self.pagemap
    }

    /// Frees the pages that were replaced by store pages.
    pub fn free(&mut self) {
        if self.used > 0 {
            // Fails only on locked memory, which `AddRam` refused; then the duplicates stay and
            // moves end with EEXIST.
            let _ = self
                .mapping
                .area()
                .part(0, self.used)
                .advise(Advice::LinuxDontNeed);
            self.used = 0;
        }
    }
}

/// Pages moved out of a run into staging. Dropping the guard puts back all pages that
/// [`Staged::finish`] did not report as replaced.
#[derive(Debug)]
pub struct Staged<'a> {
    uffd: &'a Userfaultfd,
    pagemap: &'a Pagemap,
    run: Area,
    slot: Area,
    pages: u64,
    /// Number of pages from the start that need not come back.
    gone: u64,
    /// Number of pages from the start with a new mapping, which is not registered.
    replaced: u64,
    began: Instant,
}

impl<'a> Staged<'a> {
    /// Freezes as much of `run` as can be moved to `slot`, from the start. Also returns why the
    /// move stopped early.
    ///
    /// # Errors
    ///
    /// The registration failed; nothing is frozen.
    pub fn freeze(
        uffd: &'a Userfaultfd,
        pagemap: &'a Pagemap,
        run: Area,
        slot: Area,
    ) -> Result<(Self, Option<Errno>), Errno> {
        let began = Instant::now();
        uffd.register(run, Mode::Missing)?;
        let mut staged = Self {
            uffd,
            pagemap,
            run,
            slot,
            pages: 0,
            gone: 0,
            replaced: 0,
            began,
        };
        let (pages, stop) = transfer(uffd, pagemap, run, slot);
        staged.pages = pages;
        Ok((staged, stop))
    }

    /// Returns the frozen pages, at their place in staging.
    #[must_use]
    pub fn contents(&self) -> Area {
        self.slot.part(0, self.pages)
    }

    /// Thaws the run. The first `gone` pages do not come back. `mapped`: a new mapping replaces
    /// them; else they become empty anonymous memory. Returns how long the run was frozen.
    pub fn finish(mut self, gone: u64, mapped: bool) -> Duration {
        self.gone = gone.min(self.pages);
        self.replaced = if mapped { self.gone } else { 0 };
        let began = self.began;
        drop(self);
        began.elapsed()
    }
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        put_back(
            self.uffd,
            self.pagemap,
            self.slot.part(self.gone, self.pages - self.gone),
            self.run.part(self.gone, self.pages - self.gone),
        );
        thaw(self.uffd, self.run, self.replaced);
    }
}

/// A run that is protected against writes. Dropping the guard lifts the protection.
#[derive(Debug)]
pub struct Protected<'a> {
    uffd: &'a Userfaultfd,
    run: Area,
    replaced: u64,
    began: Instant,
}

impl<'a> Protected<'a> {
    /// Protects all of `run` against writes.
    pub fn freeze(uffd: &'a Userfaultfd, run: Area) -> Result<Self, Errno> {
        let began = Instant::now();
        uffd.register(run, Mode::WriteProtect)?;
        let guard = Self {
            uffd,
            run,
            replaced: 0,
            began,
        };
        for _ in 0..PATIENCE {
            match uffd.write_protect(run) {
                Ok(()) => return Ok(guard),
                Err(Errno::AGAIN) => std::thread::yield_now(),
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::AGAIN)
    }

    /// Thaws the run. New mappings have replaced the first `replaced` pages. Returns how long the
    /// run was frozen.
    pub fn finish(mut self, replaced: u64) -> Duration {
        self.replaced = replaced;
        let began = self.began;
        drop(self);
        began.elapsed()
    }
}

impl Drop for Protected<'_> {
    fn drop(&mut self) {
        thaw(self.uffd, self.run, self.replaced);
    }
}

/// Moves pages until one cannot be moved. Returns how many were moved, and why the move stopped.
///
/// The kernel's own count can be too small. Linux 6.18 moves several pages in one step; if a page
/// migrates meanwhile (compaction), it returns `EAGAIN` without counting the pages moved already. A
/// page that wrongly counts as not moved would be lost in staging.
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
            // Asked whatever the error is: it may be the last that is looked at.
            Some(_) if is_moved(pagemap, from.part(done, 1), to.part(done, 1)) => {
                done += 1;
                tries = 0;
                chunk = from.pages() - done;
            }
            Some(Errno::AGAIN) => {
                if moved == 0 {
                    tries += 1;
                    if tries > PATIENCE {
                        return (done, Some(Errno::BUSY));
                    }
                    std::thread::yield_now();
                }
            }
            // Also the answer to a range that spans two mappings: try with less.
            Some(Errno::INVAL) if chunk > 1 => chunk /= 2,
            Some(errno) => return (done, Some(errno)),
        }
    }
    (done, None)
}

/// Returns whether a page is at its target and no longer at its source.
fn is_moved(pagemap: &Pagemap, from: Area, to: Area) -> bool {
    let is_there = |page: Area| pagemap.all_pass(page.start(), page.end(), Filter::THERE);
    // A page map that can't be read tells nothing: then the page counts as not moved.
    !from.is_empty() && matches!((is_there(from), is_there(to)), (Ok(false), Ok(true)))
}

/// Moves pages back. It repeats until it succeeds, and nothing prevents success: the target is
/// empty and registered (nobody can fill it), its page tables exist, and no other thread knows the
/// staged pages. Reclaim or migration holds a page only for a short time.
fn put_back(uffd: &Userfaultfd, pagemap: &Pagemap, from: Area, to: Area) {
    let mut done = 0;
    let mut tries = 0u32;
    while done < from.pages() {
        let (moved, stop) = transfer(uffd, pagemap, from.after(done), to.after(done));
        done += moved;
        tries = if moved > 0 { 0 } else { tries + 1 };
        match stop {
            // Both mean that the page is where it belongs: it left staging, or its place is taken.
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

/// Unregisters the pages that were not replaced, and wakes all waiting threads.
///
/// Exactly this range was registered, so no mapping must be split, and `ENOMEM` can only be
/// temporary. Waking is a separate call: the kernel's unregister wakes threads that wait for a
/// missing page, but not those that wait for the end of write protection (`userfaultfd_unregister`
/// in `fs/userfaultfd.c`).
fn thaw(uffd: &Userfaultfd, run: Area, replaced: u64) {
    let rest = run.after(replaced);
    if !rest.is_empty() {
        for _ in 0..1_000_000 {
            if uffd.unregister(rest).is_ok() {
                break;
            }
            std::thread::yield_now();
        }
    }
    let _ = uffd.wake(run);
}
