//! Combines many page cache events of the guest's kernel into few messages to the daemon.
//!
//! The collected events (the batch) are sent as one message of each kind, in this order: files,
//! freed page frames, hints, dirty pages, clean pages. The entries of a message are sorted and
//! joined into runs. The batch is sent early if this order would contradict the order of the
//! events: if a page frame is freed after a hint about it, or if a page is written to after its
//! file was written back.

use memfold_wire::agent::{
    FileFacts, FileRange, FromAgent, HintRun, MAX_RUN_PAGES, MAX_RUNS, PfnRun,
};

/// Most bytes of paths in one message, well below the longest frame.
const MAX_PATHS: usize = 64 << 10;
/// Number of bits in the filter of frames that were hinted since the last flush.
const FILTER_BITS: u64 = 1 << 16;

/// Page cache events that are not messages yet, and messages that are ready to be sent.
#[derive(Debug)]
pub struct Batch {
    files: Vec<FileFacts>,
    path_bytes: usize,
    gone: Vec<PfnRun>,
    hints: Vec<HintRun>,
    dirty: Vec<FileRange>,
    clean: Vec<FileRange>,
    /// Filter with one bit for each hinted frame, by frame number modulo [`FILTER_BITS`].
    offered: Vec<u64>,
    ready: Vec<FromAgent>,
}

impl Default for Batch {
    fn default() -> Self {
        Self {
            files: Vec::new(),
            path_bytes: 0,
            gone: Vec::new(),
            hints: Vec::new(),
            dirty: Vec::new(),
            clean: Vec::new(),
            offered: vec![0; usize::try_from(FILTER_BITS / 64).unwrap_or(1024)],
            ready: Vec::new(),
        }
    }
}

impl Batch {
    /// Adds number, path and size of a file. They are sent before the hints that refer to the file.
    pub fn file(&mut self, facts: FileFacts) {
        if self.files.len() >= MAX_RUNS || self.path_bytes + facts.path.len() > MAX_PATHS {
            self.flush();
        }
        self.path_bytes += facts.path.len();
        self.files.push(facts);
    }

    /// Adds a run of pages that are in the page cache now.
    pub fn hint(&mut self, run: HintRun) {
        self.mark(run.pfn, run.pages);
        let last = self.hints.last_mut();
        if last.is_some_and(|last| join_hint(last, &run)) {
            return;
        }
        if self.hints.len() >= MAX_RUNS {
            self.flush();
            self.mark(run.pfn, run.pages);
        }
        self.hints.push(run);
    }

    fn mark(&mut self, pfn: u64, pages: u32) {
        for bit in bits(pfn, pages) {
            self.offered[bit / 64] |= 1 << (bit % 64);
        }
    }

    /// Adds a run of page frames that no longer hold a page of a file.
    pub fn gone(&mut self, run: PfnRun) {
        if !self.hints.is_empty()
            && bits(run.pfn, run.pages).any(|b| self.offered[b / 64] >> (b % 64) & 1 != 0)
        {
            self.flush();
        }
        let last = self.gone.last_mut();
        if last.is_some_and(|last| join_pfn(last, &run)) {
            return;
        }
        if self.gone.len() >= MAX_RUNS {
            self.flush();
        }
        self.gone.push(run);
    }

    /// Adds a range of file pages that were written to.
    pub fn dirty(&mut self, range: FileRange) {
        if !self.clean.is_empty() || self.dirty.len() >= MAX_RUNS {
            self.flush();
        }
        push_range(&mut self.dirty, range);
    }

    /// Adds a range of file pages that were written back to disk.
    pub fn clean(&mut self, range: FileRange) {
        if self.clean.len() >= MAX_RUNS {
            self.flush();
        }
        push_range(&mut self.clean, range);
    }

    /// Adds a message that is no page cache event. It is sent after everything that was added
    /// before.
    pub fn message(&mut self, message: FromAgent) {
        self.flush();
        self.ready.push(message);
    }

    /// Turns all events that were added into messages, which [`Self::take_ready`] returns.
    pub fn flush(&mut self) {
        self.path_bytes = 0;
        if !self.files.is_empty() {
            let files = std::mem::take(&mut self.files);
            self.ready.push(FromAgent::Files(files));
        }
        if !self.gone.is_empty() {
            let mut gone = std::mem::take(&mut self.gone);
            gone.sort_unstable_by_key(|r| r.pfn);
            gone.dedup_by(|next, last| join_pfn(last, next));
            self.ready.push(FromAgent::Gone(gone));
        }
        if !self.hints.is_empty() {
            let mut hints = std::mem::take(&mut self.hints);
            hints.sort_unstable_by_key(|r| (r.file, r.page));
            hints.dedup_by(|next, last| join_hint(last, next));
            self.ready.push(FromAgent::Hints(hints));
            self.offered.fill(0);
        }
        if !self.dirty.is_empty() {
            let mut dirty = std::mem::take(&mut self.dirty);
            sort_ranges(&mut dirty);
            self.ready.push(FromAgent::Dirty(dirty));
        }
        if !self.clean.is_empty() {
            let mut clean = std::mem::take(&mut self.clean);
            sort_ranges(&mut clean);
            self.ready.push(FromAgent::Clean(clean));
        }
    }

    /// Returns and removes the messages that are ready, in the order in which they must be sent.
    pub fn take_ready(&mut self) -> Vec<FromAgent> {
        std::mem::take(&mut self.ready)
    }
}

fn bits(pfn: u64, pages: u32) -> impl Iterator<Item = usize> {
    let count = u64::from(pages).min(FILTER_BITS);
    (0..count).map(move |i| usize::try_from(pfn.wrapping_add(i) % FILTER_BITS).unwrap_or(0))
}

/// Adds the pages of the next run to `pages` if it `follows` and a run can be that long. Returns
/// whether they were added.
fn join(pages: &mut u32, next: u32, follows: bool) -> bool {
    let sum = pages.checked_add(next).filter(|n| *n <= MAX_RUN_PAGES);
    let sum = sum.filter(|_| follows);
    *pages = sum.unwrap_or(*pages);
    sum.is_some()
}

/// Adds `next` to `last` if `next` continues that run. Returns whether it was added.
fn join_hint(last: &mut HintRun, next: &HintRun) -> bool {
    let n = u64::from(last.pages);
    let follows = next.file == last.file
        && Some(next.page) == last.page.checked_add(n)
        && Some(next.pfn) == last.pfn.checked_add(n);
    join(&mut last.pages, next.pages, follows)
}

fn join_pfn(last: &mut PfnRun, next: &PfnRun) -> bool {
    let follows = Some(next.pfn) == last.pfn.checked_add(last.pages.into());
    join(&mut last.pages, next.pages, follows)
}

fn join_range(last: &mut FileRange, next: &FileRange) -> bool {
    let follows =
        next.file == last.file && Some(next.page) == last.page.checked_add(last.pages.into());
    join(&mut last.pages, next.pages, follows)
}

fn push_range(list: &mut Vec<FileRange>, range: FileRange) {
    if !list.last_mut().is_some_and(|last| join_range(last, &range)) {
        list.push(range);
    }
}

fn sort_ranges(list: &mut Vec<FileRange>) {
    list.sort_unstable_by_key(|r| (r.file, r.page));
    list.dedup_by(|next, last| join_range(last, next));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(file: u32, page: u64, pfn: u64) -> HintRun {
        HintRun {
            file,
            page,
            pfn,
            pages: 1,
        }
    }

    #[test]
    fn interleaved_hints_of_two_files_are_joined_into_one_long_run_for_each_file() {
        let mut batch = Batch::default();
        for i in 0..64 {
            batch.hint(hint(1, i, 1000 + i));
            batch.hint(hint(0, i, 5000 + i));
        }
        batch.flush();
        let whole = |file, pfn| HintRun {
            file,
            page: 0,
            pfn,
            pages: 64,
        };
        assert_eq!(
            batch.take_ready(),
            [FromAgent::Hints(vec![whole(0, 5000), whole(1, 1000)])]
        );
    }

    #[test]
    fn removal_and_hint_messages_for_one_page_frame_are_sent_in_order() {
        let mut batch = Batch::default();
        batch.gone(PfnRun { pfn: 8, pages: 1 });
        batch.hint(hint(1, 0, 8));
        batch.gone(PfnRun { pfn: 8, pages: 1 });
        batch.hint(hint(1, 5, 8));
        batch.flush();
        let gone = FromAgent::Gone(vec![PfnRun { pfn: 8, pages: 1 }]);
        let hints = |page| FromAgent::Hints(vec![hint(1, page, 8)]);
        assert_eq!(batch.take_ready(), [gone.clone(), hints(0), gone, hints(5)]);
    }

    #[test]
    fn a_page_dirtied_again_after_writeback_is_reported_as_dirty() {
        let mut batch = Batch::default();
        let range = FileRange {
            file: 1,
            page: 0,
            pages: 1,
        };
        batch.dirty(range);
        batch.clean(range);
        batch.dirty(range);
        batch.flush();
        let (dirty, clean) = (FromAgent::Dirty(vec![range]), FromAgent::Clean(vec![range]));
        assert_eq!(batch.take_ready(), [dirty.clone(), clean, dirty]);
    }

    #[test]
    fn if_an_agent_has_20000_files_to_report_each_message_stays_within_the_size_limits() {
        let mut batch = Batch::default();
        for i in 0..20_000 {
            batch.file(FileFacts {
                file: i,
                path: vec![b'x'; 1000],
                size_bytes: 1,
            });
            batch.hint(hint(i, 0, u64::from(i) * 7));
            batch.gone(PfnRun {
                pfn: 1 << 40 | u64::from(i) << 18,
                pages: MAX_RUN_PAGES,
            });
            batch.dirty(FileRange {
                file: i,
                page: u64::MAX,
                pages: 1,
            });
            batch.clean(FileRange {
                file: i,
                page: u64::MAX,
                pages: 1,
            });
        }
        batch.flush();
        let ready = batch.take_ready();
        for message in &ready {
            let frame = memfold_wire::encode(message).unwrap();
            let decoded = memfold_wire::frame::decode_body::<FromAgent>(&frame[4..]).unwrap();
            assert_eq!(decoded, *message);
        }
        // The limits of messages do not cause a loss.
        let mut counts = [0; 5];
        for message in &ready {
            match message {
                FromAgent::Files(files) => counts[0] += files.len(),
                FromAgent::Hints(runs) => counts[1] += runs.len(),
                FromAgent::Gone(runs) => counts[2] += runs.len(),
                FromAgent::Dirty(ranges) => counts[3] += ranges.len(),
                FromAgent::Clean(ranges) => counts[4] += ranges.len(),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(counts, [20_000; 5]);
    }
}
