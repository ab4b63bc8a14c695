//! Keeps the memory of a running VM as it was at one moment, for a snapshot. All pages are
//! write-protected. Before the VM writes to a page, memfold's library in QEMU copies the page's
//! bytes into a free slot of a file that the daemon reads (format: [`memfold_wire::past`]).
//!
//! ```text
//!   vCPU, device    writes to a protected page: sleeps
//!                     | event
//!                     v
//!   this thread     copies the page into a slot, writes the slot's number into the page's table
//!                   entry, lifts the protection; the writer continues
//!   daemon          reads all pages and marks the table entry of each page that it has read
//! ```
//! A thread of the library makes the copies. It takes only one lock (`copying`), so that no holder
//! of another lock can delay the VM. If a page cannot be copied, the snapshot fails: the VM
//! continues to run, and the daemon reads the reason from the file.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use memfold_sys::pagemap::{Filter, Pagemap};
use memfold_sys::region::Area;
use memfold_sys::shared::SharedWords;
use memfold_sys::signals;
use memfold_sys::userfaultfd::{Mode, Userfaultfd};
use memfold_units::{HUGE_PAGE_PAGES, Hva, PAGE_SIZE};
use memfold_wire::past::{ERRNO_WORD, Layout, USED_WORD};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

/// Number of pages whose protection one call lifts.
const LIFT_PAGES: usize = 4096;

/// A running copy before write. [`Past::end`] ends the copy.
#[derive(Debug)]
pub(crate) struct Past {
    keeper: Arc<Keeper>,
    /// End of a pipe; closing it ends the thread.
    end: OwnedFd,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Keeper {
    uffd: Arc<Userfaultfd>,
    file: OwnedFd,
    words: SharedWords,
    pagemap: Arc<Pagemap>,
    layout: Layout,
    /// Ranges to copy, by ascending address, each with the table index of its first page.
    ranges: Vec<(Area, u64)>,
    /// Lock that lets only one page be copied at a time.
    copying: Mutex<()>,
    /// Areas that this copy has registered. QEMU may have a userfaultfd of its own on other areas.
    registered: Mutex<Vec<Area>>,
}

impl Past {
    /// Starts to save the old bytes of `ranges` (by ascending address, inside `blocks`) in `file`.
    pub(crate) fn start(
        uffd: &Arc<Userfaultfd>,
        blocks: &[Area],
        ranges: &[Area],
        pagemap: Arc<Pagemap>,
        file: OwnedFd,
    ) -> Result<Self, String> {
        if !uffd.protection_lasts() {
            return Err(
                "Linux 6.7 or newer is needed, and a QEMU whose memory is not all merged by KSM (systemd: MemoryKSM=no)"
                    .to_owned(),
            );
        }
        let keeper = Arc::new(Keeper::new(Arc::clone(uffd), ranges, pagemap, file)?);
        let (ended, end) = pipe_with(PipeFlags::CLOEXEC)
            .map_err(|errno| format!("cannot create a pipe: {errno}"))?;
        let watching = Arc::clone(&keeper);
        // The thread starts before the first page is protected, because a writer would wait forever
        // for a thread that could not be started.
        let thread = signals::with_all_blocked(|| {
            std::thread::Builder::new()
                .name("memfold-past".to_owned())
                .spawn(move || {
                    let watched = AssertUnwindSafe(|| watching.watch(&ended));
                    if catch_unwind(watched).is_err() {
                        watching.fail(Errno::IO);
                    }
                })
        })
        .map_err(|error| format!("cannot start a thread: {error}"))?;
        let past = Self {
            keeper,
            end,
            thread,
        };
        let Err(errno) = past.protect(blocks) else {
            return Ok(past);
        };
        past.end();
        Err(if errno == Errno::INVAL {
            "part of this VM's RAM maps a snapshot's image, which the kernel cannot write-protect"
                .to_owned()
        } else {
            format!("cannot write-protect the VM's RAM: {errno}")
        })
    }

    fn protect(&self, blocks: &[Area]) -> Result<(), Errno> {
        let uffd = &self.keeper.uffd;
        for &block in blocks {
            let registered = uffd.register(block, Mode::WriteProtect);
            // After ENOMEM, a part may be registered; after other errors, nothing.
            if matches!(registered, Ok(()) | Err(Errno::NOMEM)) {
                self.keeper.registered().push(block);
            }
            registered?;
        }
        for &(area, _) in &self.keeper.ranges {
            while_again(|| uffd.write_protect(area))?;
        }
        // The thread may have failed before these areas were registered, and then has not released
        // them.
        self.keeper.problem().map_or(Ok(()), Err)
    }

    /// Saves the pages between the addresses `start` and `end`, which are about to be discarded.
    pub(crate) fn keep(&self, start: u64, end: u64) {
        for &(area, first) in &self.keeper.ranges {
            let from = start.max(area.start().0);
            let to = end.min(area.end().0);
            if from >= to {
                continue;
            }
            let skip = (from - area.start().0) / PAGE_SIZE;
            for page in skip..skip + (to - from) / PAGE_SIZE {
                self.keeper.keep(area.part(page, 1), first + page);
            }
        }
    }

    /// Ends the copy and lifts all write protection.
    pub(crate) fn end(self) {
        // A daemon that still reads must not trust what it reads from now on.
        self.keeper.note(Errno::CANCELED);
        self.keeper.release();
        drop(self.end);
        let _ = self.thread.join();
    }
}

impl Keeper {
    fn new(
        uffd: Arc<Userfaultfd>,
        ranges: &[Area],
        pagemap: Arc<Pagemap>,
        file: OwnedFd,
    ) -> Result<Self, String> {
        let mut next = 0;
        let numbered = ranges.iter().map(|&area| {
            let first = next;
            next += area.pages();
            (area, first)
        });
        let ranges: Vec<(Area, u64)> = numbered.collect();
        if !ranges.is_sorted_by(|(a, _), (b, _)| a.end() <= b.start()) {
            return Err("the ranges are not in ascending order".to_owned());
        }
        let layout = Layout::new(next).ok_or("too many pages to number")?;
        let words = SharedWords::map(&file, layout.front_pages())
            .map_err(|errno| format!("cannot use the file for the saved pages: {errno}"))?;
        Ok(Self {
            uffd,
            file,
            words,
            pagemap,
            layout,
            ranges,
            copying: Mutex::default(),
            registered: Mutex::default(),
        })
    }

    /// Saves pages for waiting writers until the other end of `ended` is closed.
    fn watch(&self, ended: &OwnedFd) {
        loop {
            let mut ready = [
                PollFd::new(&*self.uffd, PollFlags::IN),
                PollFd::new(ended, PollFlags::IN),
            ];
            match poll(&mut ready, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return self.fail(errno),
            }
            if !ready[1].revents().is_empty() {
                return;
            }
            loop {
                match self.uffd.next_fault() {
                    Ok(Some(page)) => self.serve(page),
                    Ok(None) => break,
                    Err(errno) => return self.fail(errno),
                }
            }
        }
    }

    /// Saves a page whose writer waits, and lets the writer continue.
    fn serve(&self, page: Hva) {
        let at = self.ranges.partition_point(|(area, _)| area.end() <= page);
        let found = self.ranges.get(at).filter(|(area, _)| area.start() <= page);
        let Some(&(area, first)) = found else {
            // The page is in no range of this copy: the event is for another registration.
            return;
        };
        let at = page.pages_since(area.start());
        self.keep(area.part(at, 1), first + at);
        // Neighbouring pages that need no protection any more are lifted in the same call, so that
        // one event serves many pages.
        let free = |page: u64| {
            let entry = self.words.get(self.layout.entry_word(first + page));
            entry.is_some_and(|entry| entry.load(Ordering::Acquire) != 0)
        };
        let chunk = at - at % HUGE_PAGE_PAGES;
        let last = (chunk + HUGE_PAGE_PAGES).min(area.pages());
        let from = (chunk..at).rev().take_while(|&page| free(page)).last();
        let from = from.unwrap_or(at);
        let to = (at + 1..last).find(|&page| !free(page)).unwrap_or(last);
        self.lift(area.part(from, to - from), area.part(at, 1));
    }

    /// Lifts the protection of `area`, or of `page` (part of `area`) if that fails, and wakes the
    /// threads that wait for `page`.
    fn lift(&self, area: Area, page: Area) {
        for area in [area, page] {
            if while_again(|| self.uffd.lift(area)).is_ok() {
                return;
            }
            // A discard has replaced part of the area by another mapping. In this case the kernel
            // has woken no thread.
        }
        let _ = self.uffd.wake(page);
    }

    fn registered(&self) -> MutexGuard<'_, Vec<Area>> {
        self.registered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Lifts all write protection and unregisters all areas.
    fn release(&self) {
        // First lift the protection in pieces, under the address space lock that page faults share:
        // `unregister` takes the lock exclusively.
        for &(area, _) in &self.ranges {
            for piece in (0..area.pages()).step_by(LIFT_PAGES) {
                let _ = self.uffd.lift(area.part(piece, LIFT_PAGES as u64));
            }
        }
        for block in std::mem::take(&mut *self.registered()) {
            // If the area was unmapped meanwhile, no thread waits there.
            let _ = self.uffd.unregister(block);
            let _ = self.uffd.wake(block);
        }
    }

    /// Returns the reason why the copy has failed, if it has.
    fn problem(&self) -> Option<Errno> {
        let number = self.words.get(ERRNO_WORD)?.load(Ordering::Acquire);
        (number != 0).then(|| Errno::from_raw_os_error(i32::try_from(number).unwrap_or(libc::EIO)))
    }

    /// Saves the page with table index `index`, unless the page is saved already or needs no copy.
    /// Does nothing after a failure, because the daemon uses no page of a failed copy.
    fn keep(&self, page: Area, index: u64) {
        if self.problem().is_some() {
            return;
        }
        let _one = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        let word = |at| self.words.get(at);
        let (Some(entry), Some(used)) = (word(self.layout.entry_word(index)), word(USED_WORD))
        else {
            return;
        };
        if entry.load(Ordering::Acquire) != 0 {
            return;
        }
        let slot = used.load(Ordering::Relaxed);
        if let Err(errno) = page.save(&self.file, self.layout.slot_page(slot) * PAGE_SIZE) {
            return self.fail(errno);
        }
        // While the entry is 0, nobody lifts the page's protection or sets it again. So if the page
        // is protected now, it was protected during the copy. If not, its bytes may have changed
        // (KSM, for example, can replace a page by an unprotected one).
        let protected = self
            .pagemap
            .all_pass(page.start(), page.end(), Filter::PROTECTED);
        if !protected.is_ok_and(|protected| protected) {
            // No failure if the daemon has read the page meanwhile and its protection was lifted.
            if entry.load(Ordering::Acquire) == 0 {
                self.fail(Errno::STALE);
            }
            return;
        }
        let kept = entry.compare_exchange(0, slot + 1, Ordering::AcqRel, Ordering::Acquire);
        if kept.is_ok() {
            used.store(slot + 1, Ordering::Release);
        }
    }

    /// Writes the reason of a failure to the file, unless the file has a reason already.
    fn note(&self, errno: Errno) {
        if let Some(word) = self.words.get(ERRNO_WORD) {
            let number = u32::try_from(errno.raw_os_error()).unwrap_or(1);
            let _ = word.compare_exchange(0, number, Ordering::AcqRel, Ordering::Acquire);
        }
    }

    /// Marks the copy as failed and lifts all write protection.
    fn fail(&self, errno: Errno) {
        self.note(errno);
        self.release();
    }
}

/// Calls `call` again as long as it returns `EAGAIN`.
fn while_again(call: impl Fn() -> Result<(), Errno>) -> Result<(), Errno> {
    loop {
        match call() {
            Err(Errno::AGAIN) => std::thread::yield_now(),
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use memfold_sys::region::Mapping;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn after_a_failed_copy_of_a_page_no_further_page_is_copied() {
        // The pages are not write-protected, so that the copy of the first one fails.
        let ram = Mapping::anonymous(2, false).unwrap();
        ram.area().write(&[7; 1024]);
        let layout = Layout::new(2).unwrap();
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("past", flags).unwrap();
        ftruncate(&file, layout.slot_page(8) * PAGE_SIZE).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        let pagemap = Arc::new(Pagemap::open(rustix::process::getpid()).unwrap());
        let uffd = Arc::new(Userfaultfd::open(None).unwrap());
        let copy = file.try_clone().unwrap();
        let keeper = Keeper::new(uffd, &[ram.area()], pagemap, copy).unwrap();
        keeper.keep(ram.area().part(0, 1), 0);
        assert_eq!(keeper.problem(), Some(Errno::STALE));
        let used = || fstat(&file).unwrap().st_blocks;
        let before = used();
        // A second slot shows whether another page is copied.
        let word = keeper.words.get(USED_WORD).unwrap();
        word.store(1, Ordering::Release);
        keeper.keep(ram.area().part(1, 1), 1);
        assert_eq!(used(), before);
    }
}
