//! Queue of pairs of guests' files that have the same name and size but different paths. Each pair
//! waits to be compared, because the two files may have the same content.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::member::ContentId;

/// Maximum number of pairs that wait in one trust domain.
const MAX_CANDIDATES: usize = 4096;

/// Number of attempts to compare a pair whose files have no cached page in common yet.
const MAX_TRIES: u8 = 5;

/// Two contents of files with the same name and size, of which some pages will be compared.
pub(super) struct Candidate {
    pub content: ContentId,
    pub other: ContentId,
    tries: u8,
}

/// Pairs that wait for their comparison, sorted by the time at which it is due.
#[derive(Default)]
pub(super) struct Candidates {
    waiting: BTreeMap<(Instant, u64), Candidate>,
    next: u64,
}

impl Candidates {
    /// Adds a pair of contents, to be compared at time `due`. Drops the pair if too many pairs
    /// wait.
    pub fn add(&mut self, content: ContentId, other: ContentId, due: Instant) {
        let new = Candidate {
            content,
            other,
            tries: 0,
        };
        self.insert(new, due);
    }

    fn insert(&mut self, candidate: Candidate, due: Instant) {
        if self.waiting.len() < MAX_CANDIDATES {
            self.next += 1;
            self.waiting.insert((due, self.next), candidate);
        }
    }

    /// Returns the time at which the next comparison is due; `None` if no pair waits.
    pub fn due(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(key, _)| key.0)
    }

    pub fn take(&mut self, now: Instant) -> Option<Candidate> {
        self.due().filter(|&due| due <= now)?;
        self.waiting.pop_first().map(|(_, candidate)| candidate)
    }

    /// Queues a pair of contents again, with a longer delay, unless it was tried [`MAX_TRIES`]
    /// times.
    pub fn put_back(&mut self, mut candidate: Candidate, now: Instant) {
        if candidate.tries < MAX_TRIES {
            candidate.tries += 1;
            let due = now + Duration::from_secs(4 << candidate.tries);
            self.insert(candidate, due);
        }
    }
}
