//! Keeps the hints of one VM's agent until the fold engine processes them: a queue in which new
//! hints wait, and a bounded stack from which the newest hint is taken first.
//!
//! A hint arrives when a page enters the guest's page cache, before the page's bytes are read from
//! disk. So each hint first waits for the settling time (1 s by default). Then the newest hint is
//! taken first, because old hints are most likely outdated. If the stack is full, the oldest hint
//! is dropped. The engine finds the pages of a dropped hint later, when it searches all its tables
//! (a sweep).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use memfold_wire::agent::FileNumber;

use super::vm_table::PIECE;

/// A hint: a run of file pages that a guest has put into its page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// Number of the cached file, assigned by the VM's agent.
    pub file: FileNumber,
    /// Offset of the run's first page in the file, in pages.
    pub page: u32,
    /// Length of the run in pages.
    pub pages: u32,
    /// Time at which the daemon received the hint.
    pub at: Instant,
    /// Number of times that the hint was queued again because its pages were busy.
    pub tries: u8,
}

impl Hint {
    /// Creates a hint whose pages the engine has not tried to fold yet.
    #[must_use]
    pub const fn new(file: FileNumber, page: u32, pages: u32, at: Instant) -> Self {
        Self {
            file,
            page,
            pages,
            at,
            tries: 0,
        }
    }

    /// Creates a hint for piece number `piece` of a file; a piece is 64 consecutive pages.
    #[must_use]
    pub const fn of_piece(file: FileNumber, piece: u32, at: Instant) -> Self {
        Self::new(file, piece * PIECE, PIECE, at)
    }
}

/// Hints of one VM: new hints, which wait for the settling time, and settled hints, which are ready
/// to be processed.
#[derive(Debug)]
pub struct HintStack {
    settling: VecDeque<Hint>,
    ready: VecDeque<Hint>,
    settle: Duration,
    limit: usize,
    pages: u64,
    dropped: u64,
}

impl HintStack {
    /// Creates an empty stack for at most `limit` settled and `limit` waiting hints. Each hint is
    /// settled after the time `settle`.
    #[must_use]
    pub const fn new(limit: usize, settle: Duration) -> Self {
        Self {
            settling: VecDeque::new(),
            ready: VecDeque::new(),
            settle,
            limit,
            pages: 0,
            dropped: 0,
        }
    }

    /// Adds a hint. If the hint continues the last one in the same file, extends the last hint
    /// instead, so that a file that is read page by page becomes one run.
    pub fn push(&mut self, hint: Hint) {
        self.pages += u64::from(hint.pages);
        if let Some(last) = self.settling.back_mut() {
            let continues = last.file == hint.file
                && last.tries == hint.tries
                && last.page.checked_add(last.pages) == Some(hint.page)
                && hint.at.saturating_duration_since(last.at) < Duration::from_millis(200)
                && last.pages + hint.pages <= 4096;
            if continues {
                last.pages += hint.pages;
                return;
            }
        }
        if self.settling.len() >= self.limit {
            let oldest = self.settling.pop_front();
            self.drop_hint(oldest);
        }
        self.settling.push_back(hint);
    }

    /// Removes and returns the newest hint that has waited for the settling time; `None` if there
    /// is none.
    pub fn pop(&mut self, now: Instant) -> Option<Hint> {
        while let Some(&hint) = self.settling.front() {
            if now.saturating_duration_since(hint.at) < self.settle {
                break;
            }
            self.settling.pop_front();
            if self.ready.len() >= self.limit {
                let oldest = self.ready.pop_front();
                self.drop_hint(oldest);
            }
            self.ready.push_back(hint);
        }
        let newest = self.ready.pop_back();
        self.pages -= newest.map_or(0, |hint| u64::from(hint.pages));
        newest
    }

    fn drop_hint(&mut self, hint: Option<Hint>) {
        self.pages -= hint.map_or(0, |hint| u64::from(hint.pages));
        self.dropped += 1;
    }

    /// Returns the number of pages in all hints, settled or waiting.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the time at which [`HintStack::pop`] can return a hint: `now` if a hint has settled
    /// already, `None` if there are no hints.
    #[must_use]
    pub fn due(&self, now: Instant) -> Option<Instant> {
        if self.ready.is_empty() {
            self.settling.front().map(|h| h.at + self.settle)
        } else {
            Some(now)
        }
    }

    /// Returns the number of hints, settled or waiting.
    #[must_use]
    pub fn len(&self) -> usize {
        self.settling.len() + self.ready.len()
    }

    /// Returns the number of hints that were dropped because the stack was full, since the VM was
    /// added.
    #[must_use]
    pub const fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Drops all hints of the VM, because its agent starts a new session.
    pub fn clear(&mut self) {
        self.settling.clear();
        self.ready.clear();
        self.pages = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTLE: Duration = Duration::from_secs(1);

    fn hint(file: u32, page: u32, at: Instant) -> Hint {
        Hint {
            file,
            page,
            pages: 1,
            at,
            tries: 0,
        }
    }

    #[test]
    fn of_the_hints_that_have_waited_long_enough_the_newest_is_processed_first() {
        let start = Instant::now();
        let mut stack = HintStack::new(8, SETTLE);
        stack.push(hint(1, 0, start));
        stack.push(hint(2, 0, start + Duration::from_millis(500)));
        stack.push(hint(3, 0, start + Duration::from_millis(1500)));
        assert_eq!(stack.pop(start), None);
        let later = start + Duration::from_millis(1600);
        assert_eq!(stack.pop(later).map(|h| h.file), Some(2));
        assert_eq!(stack.pop(later).map(|h| h.file), Some(1));
        assert_eq!(stack.pop(later), None);
        assert_eq!(stack.due(later), Some(start + Duration::from_millis(2500)));
    }

    #[test]
    fn if_too_many_hints_arrive_the_oldest_hints_are_dropped_and_counted() {
        let start = Instant::now();
        let mut stack = HintStack::new(4, SETTLE);
        for file in 0..10 {
            stack.push(hint(file, 0, start));
        }
        assert_eq!((stack.len(), stack.dropped()), (4, 6));
        assert_eq!(stack.pop(start + SETTLE).map(|h| h.file), Some(9));
    }

    #[test]
    fn hints_for_consecutive_pages_are_joined_into_one_run() {
        let start = Instant::now();
        let mut stack = HintStack::new(4, SETTLE);
        for page in 0..100 {
            stack.push(hint(1, page, start));
        }
        assert_eq!(
            stack.pop(start + SETTLE).map(|h| (h.page, h.pages)),
            Some((0, 100))
        );
    }
}
