//! Which chunks and pages of a snapshot that is being fetched are here, and which chunk is fetched
//! next.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use super::first_pages::CHUNK_PAGES;

/// Number of chunks that are fetched at once for no VM that waits, so that one which begins to wait
/// need not share the link with many others. Chunks that VMs touch at once are not counted.
const IN_ADVANCE: usize = 4;

/// Number of a file, and number of a chunk in the file.
pub(super) type Place = (usize, u64);

/// Pages of a file: the number of the file, and the pages' indexes in it.
pub(super) type FilePages = (usize, Range<u64>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    Missing,
    OnItsWay,
    Here,
}

/// What has arrived.
#[derive(Clone, Debug)]
pub(super) enum Arrival {
    Chunk(Place),
    /// Pages, before their chunks.
    Pages(Vec<FilePages>),
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) chunks: Vec<Vec<Chunk>>,
    /// Pages that VMs see already, of chunks that are not here: ascending for each chunk.
    first: BTreeMap<Place, Vec<Range<u64>>>,
    /// Number of pages that VMs saw before their chunks were here.
    pub(super) shown: u64,
    /// Whether first pages are being fetched, so that other chunks wait for which no VM waits.
    pub(super) awaits_first: bool,
    /// Whether VMs of an earlier daemon may have mapped first pages. Until it is known which, no
    /// chunk is fetched.
    pub(super) is_resumed: bool,
    /// Until when nothing is fetched that no VM waits for, because a VM starts.
    pub(super) quiet_until: Option<Instant>,
    pub(super) missing: u64,
    pub(super) total: u64,
    /// Chunks for which VMs wait, and since when.
    pub(super) waiting: BTreeMap<Place, Instant>,
    pub(super) wanted: VecDeque<Place>,
    pub(super) soon: VecDeque<Place>,
    pub(super) rest: VecDeque<Place>,
    pub(super) in_advance: usize,
    pub(super) urgent: usize,
    pub(super) failures: u32,
    pub(super) trouble: Option<String>,
    pub(super) listeners: Vec<Sender<Arrival>>,
    pub(super) is_stopped: bool,
}

impl State {
    /// Returns the state of a chunk. Chunks of files that need no fetching are here.
    pub(super) fn get(&self, (file, chunk): Place) -> Chunk {
        let chunks = self.chunks.get(file);
        let found = chunks.and_then(|chunks| chunks.get(usize::try_from(chunk).ok()?));
        found.copied().unwrap_or(Chunk::Here)
    }

    pub(super) fn set(&mut self, (file, chunk): Place, now: Chunk) {
        let chunks = self.chunks.get_mut(file);
        let found = chunks.and_then(|chunks| chunks.get_mut(usize::try_from(chunk).ok()?));
        if let Some(found) = found {
            *found = now;
        }
    }

    /// Returns whether all of these pages of a chunk are here.
    pub(super) fn has(&self, place: Place, pages: &Range<u64>) -> bool {
        let covers = |run: &Range<u64>| run.start <= pages.start && pages.end <= run.end;
        self.get(place) == Chunk::Here || self.first(place).iter().any(covers)
    }

    /// Returns the pages of a chunk that were here before it.
    pub(super) fn first(&self, place: Place) -> &[Range<u64>] {
        self.first.get(&place).map_or(&[], Vec::as_slice)
    }

    /// Returns all pages that are here before their chunks.
    pub(super) fn all_first(&self) -> Vec<FilePages> {
        let all = self.first.iter();
        all.flat_map(|(place, runs)| runs.iter().map(|run| (place.0, run.clone())))
            .collect()
    }

    /// Notes that pages are here before their chunks, and tells all listeners. The pages are
    /// ascending, and each run lies within one chunk that is not here.
    pub(super) fn note_first(&mut self, pages: Vec<FilePages>) {
        for (file, run) in &pages {
            let place = (*file, run.start / CHUNK_PAGES);
            let runs = self.first.entry(place).or_default();
            match runs.last_mut() {
                Some(last) if last.end == run.start => last.end = run.end,
                _ => runs.push(run.clone()),
            }
        }
        let count = |(_, run): &FilePages| run.end - run.start;
        self.shown += pages.iter().map(count).sum::<u64>();
        self.tell(&Arrival::Pages(pages));
    }

    /// Notes that a chunk is here, and tells all listeners.
    pub(super) fn note_here(&mut self, place: Place) {
        self.set(place, Chunk::Here);
        self.first.remove(&place);
        self.missing = self.missing.saturating_sub(1);
        self.waiting.remove(&place);
        self.tell(&Arrival::Chunk(place));
    }

    fn tell(&mut self, arrival: &Arrival) {
        self.listeners
            .retain(|listener| listener.send(arrival.clone()).is_ok());
    }

    /// Returns the number of pages that are here before their chunks.
    pub(super) fn first_pages(&self) -> u64 {
        let runs = self.first.values().flatten();
        runs.map(|run| run.end - run.start).sum()
    }

    /// Makes a chunk one of those that are fetched first, because somebody waits for it.
    pub(super) fn want(&mut self, place: Place) {
        if self.get(place) == Chunk::Here {
            return;
        }
        let is_new = self.waiting.insert(place, Instant::now()).is_none();
        if is_new && self.get(place) == Chunk::Missing {
            self.wanted.push_back(place);
        }
    }

    /// Returns for how long nothing is fetched that no VM waits for.
    pub(super) fn quiet(&self) -> Option<Duration> {
        let left = self.quiet_until?.checked_duration_since(Instant::now())?;
        (!left.is_zero()).then_some(left)
    }

    /// Returns the next chunk to fetch, and whether somebody waits for it.
    pub(super) fn next(&mut self) -> Option<(Place, bool)> {
        if self.awaits_first && self.is_resumed {
            return None;
        }
        while let Some(place) = self.wanted.pop_front() {
            if self.get(place) == Chunk::Missing {
                self.urgent += 1;
                self.set(place, Chunk::OnItsWay);
                return Some((place, true));
            }
        }
        if self.awaits_first {
            return None;
        }
        let is_quiet = self.quiet().is_some();
        loop {
            let next = match self.soon.pop_front() {
                Some(soon) => Some(soon),
                None if self.urgent > 0 || self.in_advance >= IN_ADVANCE || is_quiet => None,
                None => self.rest.pop_front(),
            };
            let place = next?;
            if self.get(place) == Chunk::Missing {
                self.in_advance += 1;
                self.set(place, Chunk::OnItsWay);
                return Some((place, false));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn state() -> State {
        State {
            chunks: vec![vec![Chunk::Missing; 4]],
            missing: 4,
            total: 4,
            soon: [(0, 3)].into(),
            rest: [(0, 0), (0, 1)].into(),
            ..State::default()
        }
    }

    #[test]
    fn only_chunks_that_vms_wait_for_are_fetched_beside_the_first_pages() {
        let mut state = state();
        state.awaits_first = true;
        assert_eq!(state.next(), None);
        state.want((0, 2));
        assert_eq!(state.next(), Some(((0, 2), true)));
        state.awaits_first = false;
        assert_eq!(state.next(), Some(((0, 3), false)));
        // A VM waits, so nothing else is fetched in advance.
        assert_eq!(state.next(), None);
        state.urgent = 0;
        assert_eq!(state.next(), Some(((0, 0), false)));
    }

    #[test]
    fn no_chunk_is_fetched_before_it_is_known_which_of_its_pages_vms_see_since_an_earlier_daemon() {
        let mut state = state();
        (state.awaits_first, state.is_resumed) = (true, true);
        state.want((0, 2));
        assert_eq!(state.next(), None);
        state.awaits_first = false;
        assert_eq!(state.next(), Some(((0, 2), true)));
    }

    #[test]
    fn a_first_page_is_here_before_its_chunk_and_is_told_to_vms() {
        let mut state = state();
        let (listener, arrivals) = channel();
        state.listeners.push(listener);
        state.note_first(vec![(0, 256..258), (0, 258..259), (0, 300..301)]);
        assert_eq!(state.first((0, 1)), [256..259, 300..301]);
        assert!(state.has((0, 1), &(257..259)) && !state.has((0, 1), &(257..260)));
        assert_eq!((state.first_pages(), state.all_first().len()), (4, 2));
        assert!(matches!(arrivals.recv().unwrap(), Arrival::Pages(pages) if pages.len() == 3));
        state.note_here((0, 1));
        assert!(state.has((0, 1), &(257..260)));
        assert_eq!((state.first_pages(), state.missing, state.shown), (0, 3, 4));
        assert!(matches!(arrivals.recv().unwrap(), Arrival::Chunk((0, 1))));
    }
}
