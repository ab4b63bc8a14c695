//! Pairs of files of the same name and size that wait to be compared.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::content::ContentId;

/// Most pairs that wait to be sampled in one domain.
const MAX_CANDIDATES: usize = 4096;

/// How often a pair is looked at before both have a page in memory that can be compared.
const MAX_TRIES: u8 = 5;

/// Two contents whose names and sizes are equal, to be sampled.
pub(super) struct Candidate {
    pub content: ContentId,
    pub other: ContentId,
    tries: u8,
}

/// Pairs by when they are due.
#[derive(Default)]
pub(super) struct Candidates {
    waiting: BTreeMap<(Instant, u64), Candidate>,
    next: u64,
}

impl Candidates {
    /// A new pair.
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

    /// When the first is due.
    pub fn due(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(key, _)| key.0)
    }

    pub fn take(&mut self, now: Instant) -> Option<Candidate> {
        self.due().filter(|&due| due <= now)?;
        self.waiting.pop_first().map(|(_, candidate)| candidate)
    }

    /// Later again, unless it has been tried often.
    pub fn put_back(&mut self, mut candidate: Candidate, now: Instant) {
        if candidate.tries < MAX_TRIES {
            candidate.tries += 1;
            let due = now + Duration::from_secs(4 << candidate.tries);
            self.insert(candidate, due);
        }
    }
}
