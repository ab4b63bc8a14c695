//! Freezing pages of a running guest, and the guards that thaw them.
//!
//! ```text
//!   guest RAM   | run: MISSING-registered, empty |  <- who touches it sleeps
//!                    |  UFFDIO_MOVE    ^
//!                    v                 | moved back: what was not replaced
//!   staging     | the run's pages      |            <- compared here, nobody else knows them
//! ```
//!
//! Between the first ioctl and the guard's `drop` nothing may allocate (another thread may hold the
//! allocator's lock and wait for one of these pages), and this thread may not touch the frozen
//! range: it would wait for itself.

use std::time::{Duration, Instant};

use memfold_sys::pagemap::{Filter, Pagemap};
use memfold_sys::region::{Area, Mapping};
use memfold_sys::userfaultfd::{Mode, Userfaultfd};
use rustix::io::Errno;
use rustix::mm::Advice;

/// Pages that staging has room for: four of the longest runs. Duplicates stay until it is full or
/// the order ends, because one `madvise` (and one flush of the TLB) for many runs is cheaper than
/// one for each.
const STAGING_PAGES: u64 = 2048;

/// Tries of an operation that the kernel asks to repeat, before a page counts as busy.
const PATIENCE: u32 = 64;

/// Where frozen pages wait.
#[derive(Debug)]
pub struct Staging {
    mapping: Mapping,
    used: u64,
    pagemap: Pagemap,
}

impl Staging {
    /// Makes and registers the area.
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

    /// An empty place for `run`. Aligned like the run where that is a whole huge page, which then
    /// moves in one piece.
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

    /// This process's page map.
    pub(crate) const fn pagemap(&self) -> &Pagemap {
        &self.pagemap
    }

    /// Frees the duplicates.
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

/// Pages moved out of a run into staging. Dropping it puts back what [`Staged::finish`] was not
/// told to be replaced.
#[derive(Debug)]
pub struct Staged<'a> {
    uffd: &'a Userfaultfd,
    pagemap: &'a Pagemap,
    run: Area,
    slot: Area,
    pages: u64,
    /// Pages from the start that need not come back.
    gone: u64,
    /// Pages from the start whose mapping is new, hence not registered.
    replaced: u64,
    began: Instant,
}

impl<'a> Staged<'a> {
    /// Freezes as much of `run` as can be moved to `slot`, from the start; and why not all of it.
    /// An error: nothing is frozen.
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

    /// The frozen pages, where they can be read.
    #[must_use]
    pub fn contents(&self) -> Area {
        self.slot.part(0, self.pages)
    }

    /// Thaws. The first `gone` pages don't come back; `mapped` says that a new mapping is in their
    /// place (else they become empty anonymous memory). Gives the time of the freeze.
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

/// A run protected against writes. Dropping it lifts the protection.
#[derive(Debug)]
pub struct Protected<'a> {
    uffd: &'a Userfaultfd,
    run: Area,
    replaced: u64,
    began: Instant,
}

impl<'a> Protected<'a> {
    /// Protects all of `run`.
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

    /// Thaws; new mappings are in place of the first `replaced` pages. Gives the time of the
    /// freeze.
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

/// Moves pages until one can't be moved; how many, and why it stopped.
///
/// The kernel's own count can be too small: Linux 6.18 moves several pages in one step, and when a
/// page migrates meanwhile (compaction), it says EAGAIN without those that it has moved already. A
/// page that is taken for not moved would be lost in staging.
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

/// Whether a page is at its target and no more where it came from.
fn is_moved(pagemap: &Pagemap, from: Area, to: Area) -> bool {
    let is_there = |page: Area| pagemap.all_pass(page.start(), page.end(), Filter::THERE);
    // A page map that can't be read tells nothing: then the page counts as not moved.
    !from.is_empty() && matches!((is_there(from), is_there(to)), (Ok(false), Ok(true)))
}

/// Moves pages back. It must succeed, and nothing stands against it: the target is empty and
/// registered (nobody can fill it), its page tables exist, and no one else knows the staged pages.
/// A reclaimer or migration that holds one lets it go.
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

/// Unregisters what was not replaced, and wakes everybody.
///
/// The range is one that was registered as it is, so no mapping must be split, and ENOMEM can only
/// pass. Waking is by itself: the kernel's unregister wakes only who waits for a missing page, not
/// who waits for write protection to end (`userfaultfd_unregister` in `fs/userfaultfd.c`).
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
