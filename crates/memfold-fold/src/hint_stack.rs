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

/// Time within which hints for consecutive pages are joined, in milliseconds.
const JOIN_MS: i32 = 200;

/// Time after which the times of hints become relative to a later one. 32 bits are enough for 24.8
/// days, and some hints wait for longer, below newer ones.
const LONGEST_BASE: Duration = Duration::from_secs(10 * 24 * 3600);

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

/// A hint in the stack, without the bytes that alignment would waste.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    file: FileNumber,
    page: u32,
    /// Length of the run in pages, and in the lowest 8 bits the number of tries.
    pages_and_tries: u32,
    /// Time at which the daemon received the hint, in milliseconds from the stack's `base` on.
    at_ms: i32,
}

impl Waiting {
    fn new(hint: Hint, base: Instant) -> Self {
        let ms = |duration: Duration| i32::try_from(duration.as_millis()).unwrap_or(i32::MAX);
        let before = ms(base.saturating_duration_since(hint.at));
        Self {
            file: hint.file,
            page: hint.page,
            pages_and_tries: hint.pages.min(u32::MAX >> 8) << 8 | u32::from(hint.tries),
            at_ms: ms(hint.at.saturating_duration_since(base)) - before,
        }
    }

    const fn pages(self) -> u32 {
        self.pages_and_tries >> 8
    }

    fn at(self, base: Instant) -> Instant {
        let ms = Duration::from_millis(u64::from(self.at_ms.unsigned_abs()));
        if self.at_ms < 0 {
            base.checked_sub(ms).unwrap_or(base)
        } else {
            base + ms
        }
    }

    fn hint(self, base: Instant) -> Hint {
        Hint {
            file: self.file,
            page: self.page,
            pages: self.pages(),
            at: self.at(base),
            tries: self.pages_and_tries.to_le_bytes()[0],
        }
    }
}

/// Hints of one VM: new hints, which wait for the settling time, and settled hints, which are ready
/// to be processed.
#[derive(Debug)]
pub struct HintStack {
    settling: VecDeque<Waiting>,
    ready: VecDeque<Waiting>,
    /// Time to which the times of the hints are relative: that of a hint that came when the stack
    /// was empty, or [`LONGEST_BASE`] after the time before.
    base: Instant,
    settle: Duration,
    limit: usize,
    pages: u64,
    dropped: u64,
}

impl HintStack {
    /// Creates an empty stack for at most `limit` settled and `limit` waiting hints. Each hint is
    /// settled after the time `settle`.
    #[must_use]
    pub fn new(limit: usize, settle: Duration) -> Self {
        Self {
            settling: VecDeque::new(),
            ready: VecDeque::new(),
            base: Instant::now(),
            settle,
            limit,
            pages: 0,
            dropped: 0,
        }
    }

    /// Changes the maximum number of settled hints and of waiting hints. Drops the oldest hints
    /// beyond it.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
        for old in [&mut self.ready, &mut self.settling] {
            let beyond = old.len().saturating_sub(limit);
            for hint in old.drain(..beyond) {
                self.pages -= u64::from(hint.pages());
                self.dropped += 1;
            }
            if old.capacity() / 2 > limit {
                old.shrink_to(limit);
            }
        }
    }

    /// Adds a hint. If the hint continues the last one in the same file, extends the last hint
    /// instead, so that a file that is read page by page becomes one run.
    pub fn push(&mut self, hint: Hint) {
        if self.len() == 0 {
            self.base = hint.at;
        } else if hint.at.saturating_duration_since(self.base) > LONGEST_BASE {
            self.move_base(hint.at);
        }
        let hint = Waiting::new(hint, self.base);
        self.pages += u64::from(hint.pages());
        if let Some(last) = self.settling.back_mut() {
            let pages = last.pages() + hint.pages();
            let continues = last.file == hint.file
                && last.pages_and_tries & 0xff == hint.pages_and_tries & 0xff
                && last.page.checked_add(last.pages()) == Some(hint.page)
                && hint.at_ms.saturating_sub(last.at_ms) < JOIN_MS
                && pages <= 4096;
            if continues {
                last.pages_and_tries += hint.pages() << 8;
                return;
            }
        }
        if self.settling.len() >= self.limit {
            let oldest = self.settling.pop_front();
            self.drop_hint(oldest);
        }
        self.settling.push_back(hint);
    }

    /// Makes the times of the hints relative to `base`. Hints that are much older become newer than
    /// they are, but are settled.
    fn move_base(&mut self, base: Instant) {
        let later = base.saturating_duration_since(self.base).as_millis();
        let later = i64::try_from(later).unwrap_or(i64::MAX);
        for hint in self.settling.iter_mut().chain(&mut self.ready) {
            let at_ms = i64::from(hint.at_ms).saturating_sub(later);
            hint.at_ms = i32::try_from(at_ms).unwrap_or(i32::MIN);
        }
        self.base = base;
    }

    /// Removes and returns the newest hint that has waited for the settling time; `None` if there
    /// is none.
    pub fn pop(&mut self, now: Instant) -> Option<Hint> {
        while let Some(&hint) = self.settling.front() {
            if now.saturating_duration_since(hint.at(self.base)) < self.settle {
                break;
            }
            self.settling.pop_front();
            if self.ready.len() >= self.limit {
                let oldest = self.ready.pop_front();
                self.drop_hint(oldest);
            }
            self.ready.push_back(hint);
        }
        let newest = self.ready.pop_back()?;
        self.pages -= u64::from(newest.pages());
        Some(newest.hint(self.base))
    }

    fn drop_hint(&mut self, hint: Option<Waiting>) {
        self.pages -= hint.map_or(0, |hint| u64::from(hint.pages()));
        self.dropped += 1;
    }

    /// Returns the number of pages in all hints, settled or waiting.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the time at which [`HintStack::pop`] can return a hint; `None` if there are no
    /// hints. If a hint has settled already, this is a time in the past.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        if self.ready.is_empty() {
            self.settling
                .front()
                .map(|hint| hint.at(self.base) + self.settle)
        } else {
            Some(self.base)
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
        assert_eq!(stack.due(), Some(start + Duration::from_millis(2500)));
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
    fn hints_come_back_from_the_stack_with_all_their_fields() {
        let start = Instant::now();
        let ms = Duration::from_millis;
        let mut stack = HintStack::new(8, SETTLE);
        let sent =
            [(0, 1, 0), (40, 4096, 7), (5, 1 << 23, 255)].map(|(age_ms, pages, tries)| Hint {
                file: u32::MAX,
                page: u32::MAX - pages,
                pages,
                at: start + ms(50 - age_ms),
                tries,
            });
        for hint in sent {
            stack.push(hint);
        }
        assert_eq!(stack.pages(), 1 + 4096 + (1 << 23));
        let got = sent.map(|_| stack.pop(start + ms(2000)).unwrap());
        assert_eq!(got, [sent[2], sent[1], sent[0]]);
        assert_eq!(
            (stack.pages(), stack.len(), size_of::<Waiting>()),
            (0, 0, 16)
        );
    }

    #[test]
    fn a_smaller_limit_drops_the_oldest_hints_and_their_memory() {
        let start = Instant::now();
        let mut stack = HintStack::new(4096, SETTLE);
        for file in 0..4096 {
            stack.push(hint(file, 0, start));
        }
        stack.set_limit(10);
        assert_eq!(
            (stack.len(), stack.dropped(), stack.pages()),
            (10, 4086, 10)
        );
        assert!(stack.settling.capacity() < 100);
        assert_eq!(stack.pop(start + SETTLE).map(|h| h.file), Some(4095));
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

    #[test]
    fn a_hint_that_waits_for_months_does_not_shorten_the_settling_time_of_later_hints() {
        let day = Duration::from_secs(24 * 3600);
        let start = Instant::now();
        let mut stack = HintStack::new(8, SETTLE);
        stack.push(hint(1, 0, start));
        for days in [9, 30, 90] {
            let now = start + days * day;
            stack.push(hint(2, 0, now));
            stack.push(hint(2, 1, now + Duration::from_millis(900)));
            assert_eq!(stack.len(), 3, "hints of different times are not joined");
            assert_eq!(
                stack.pop(now + SETTLE).map(|h| (h.page, h.at)),
                Some((0, now))
            );
            let later = now + SETTLE * 2;
            assert_eq!(stack.pop(later).map(|h| h.page), Some(1));
        }
        assert_eq!(stack.pop(start + 90 * day).map(|h| h.file), Some(1));
        assert_eq!(stack.len(), 0);
    }
}
