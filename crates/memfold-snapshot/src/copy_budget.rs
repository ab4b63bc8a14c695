//! Limits the memory that saves which run at once take for copies of pages. Each save gets a part
//! of what is left of the host's available memory, so all of them together never take more than is
//! available. Without a common account, each of many forks would take its part of the same memory.

use std::io;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::host_memory::host_available_pages;

/// Account of this process, which does all saves of the host.
pub(super) static COPIES: CopyBudget = CopyBudget::new();

/// Account of the pages that running saves may take for copies.
#[derive(Debug)]
pub(super) struct CopyBudget {
    taken: Mutex<Taken>,
    returned: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    /// Pages of all shares.
    pages: u64,
    /// The part of `pages` that the kernel has allocated, so that it is not available any more.
    allocated: u64,
}

impl Taken {
    /// Returns how many pages no save has, of `available` pages of the host.
    const fn left(self, available: u64) -> u64 {
        (available + self.allocated).saturating_sub(self.pages)
    }
}

/// Pages that one save may take for copies. Dropping the value gives them back.
#[derive(Debug)]
pub(super) struct CopyShare {
    budget: &'static CopyBudget,
    pages: u64,
    is_allocated: bool,
}

impl CopyBudget {
    const fn new() -> Self {
        Self {
            taken: Mutex::new(Taken {
                pages: 0,
                allocated: 0,
            }),
            returned: Condvar::new(),
        }
    }

    /// Takes `pages` pages, which must be at most 1/`part` of what is left. `None` if they are
    /// more. Waits for at most `patience` for shares of other saves, if they are the reason.
    pub(super) fn take(
        &'static self,
        pages: u64,
        part: u64,
        patience: Duration,
    ) -> io::Result<Option<CopyShare>> {
        self.take_of(host_available_pages, pages, part, patience)
    }

    fn take_of(
        &'static self,
        available: impl Fn() -> io::Result<u64>,
        pages: u64,
        part: u64,
        patience: Duration,
    ) -> io::Result<Option<CopyShare>> {
        let end = Instant::now() + patience;
        let mut taken = self.taken.lock();
        loop {
            let available = available()?;
            if pages <= taken.left(available) / part {
                return Ok(Some(self.share(&mut taken, pages)));
            }
            // With nothing taken there would not be enough either.
            let alone = (available + taken.allocated) / part;
            if pages > alone || self.returned.wait_until(&mut taken, end).timed_out() {
                return Ok(None);
            }
        }
    }

    /// Takes at most `most` pages, and at most 1/`part` of what is left.
    pub(super) fn take_up_to(&'static self, most: u64, part: u64) -> io::Result<CopyShare> {
        let available = host_available_pages()?;
        let mut taken = self.taken.lock();
        let pages = most.min(taken.left(available) / part);
        Ok(self.share(&mut taken, pages))
    }

    const fn share(&'static self, taken: &mut Taken, pages: u64) -> CopyShare {
        taken.pages += pages;
        CopyShare {
            budget: self,
            pages,
            is_allocated: false,
        }
    }
}

impl CopyShare {
    pub(super) const fn pages(&self) -> u64 {
        self.pages
    }

    /// Notes that the kernel has allocated these pages.
    pub(super) fn note_allocated(&mut self) {
        if !self.is_allocated {
            self.budget.taken.lock().allocated += self.pages;
            self.is_allocated = true;
        }
    }

    /// Takes more pages, so that there are `pages`. Returns whether there are as many. Does not
    /// wait.
    pub(super) fn grow_to(&mut self, pages: u64) -> io::Result<bool> {
        let more = pages.saturating_sub(self.pages);
        if more == 0 {
            return Ok(true);
        }
        let available = host_available_pages()?;
        let mut taken = self.budget.taken.lock();
        if more > taken.left(available) {
            return Ok(false);
        }
        taken.pages += more;
        if self.is_allocated {
            taken.allocated += more;
        }
        self.pages = pages;
        Ok(true)
    }
}

impl Drop for CopyShare {
    fn drop(&mut self) {
        let mut taken = self.budget.taken.lock();
        taken.pages -= self.pages;
        if self.is_allocated {
            taken.allocated -= self.pages;
        }
        drop(taken);
        self.budget.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;
    const LONG: Duration = Duration::from_secs(60);

    fn budget() -> &'static CopyBudget {
        Box::leak(Box::new(CopyBudget::new()))
    }

    #[test]
    fn saves_that_run_at_once_take_together_no_more_memory_for_copies_than_is_available() {
        let budget = budget();
        let take = |available: u64, pages| budget.take_of(|| Ok(available), pages, 4, NOW).unwrap();
        let mut first = take(1000, 250).unwrap();
        assert!(
            take(1000, 188).is_none(),
            "a quarter of the other 750 pages"
        );
        let second = take(1000, 187).unwrap();
        // Allocated pages are missing in what the host has available.
        first.note_allocated();
        assert!(take(750, 141).is_none());
        let third = take(750, 140).unwrap();
        drop((first, second, third));
        assert!(take(1000, 251).is_none());
        assert_eq!(take(1000, 250).unwrap().pages(), 250);
        let taken = *budget.taken.lock();
        assert_eq!((taken.pages, taken.allocated), (0, 0));
    }

    #[test]
    fn a_save_waits_for_the_memory_of_another_but_not_for_memory_that_the_host_does_not_have() {
        let budget = budget();
        let take = |pages, patience| budget.take_of(|| Ok(1000), pages, 4, patience).unwrap();
        assert!(take(251, LONG).is_none());
        let first = take(250, NOW).unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| take(250, LONG).map(|share| share.pages()));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!second.is_finished());
            drop(first);
            assert_eq!(second.join().unwrap(), Some(250));
        });
    }

    #[test]
    fn a_share_of_the_memory_for_copies_grows_only_into_what_no_other_save_has() {
        let available = host_available_pages().unwrap();
        let budget = budget();
        let mut share = budget.take(16, 4, NOW).unwrap().unwrap();
        assert!(share.grow_to(32).unwrap());
        assert_eq!((share.pages(), budget.taken.lock().pages), (32, 32));
        assert!(!share.grow_to(available * 2).unwrap());
        let half = budget.take_up_to(u64::MAX, 2).unwrap();
        assert!(half.pages() > 0 && half.pages() < available);
        assert_eq!(budget.take_up_to(3, 2).unwrap().pages(), 3);
        drop((half, share));
        assert_eq!(budget.taken.lock().pages, 0);
    }
}
