//! Finds out which pages of a file are in the guest's page cache, and in which page frames. The
//! agent reports these to the daemon.

use std::io;
use std::os::fd::AsFd;

use memfold_sys::guest::FileView;
use memfold_sys::page_cache;
use memfold_sys::pagemap::Pagemap;

/// Number of pages examined in one step (4 MiB). This limits the agent's resident set, in which
/// mapped pages count.
const WINDOW: u64 = 1024;

/// Cached pages that are consecutive in the file and in memory: first page in the file, first
/// frame, number of pages.
pub type Run = (u64, u64, u32);

/// Finds out which pages of a file are cached, and in which page frames.
#[derive(Debug)]
pub struct Residency {
    pagemap: Pagemap,
    /// Whether the kernel has `cachestat`, as far as is known.
    has_cachestat: bool,
    states: Vec<u8>,
}

impl Residency {
    /// Opens `/proc/self/pagemap`, from which only root can read frame numbers.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            pagemap: Pagemap::open(rustix::process::getpid())?,
            has_cachestat: true,
            states: vec![0; usize::try_from(WINDOW).unwrap_or(1024)],
        })
    }

    /// Returns the number of cached pages of a file by `cachestat`; `None` if the call fails. Do
    /// not use this for files on an overlay: `cachestat` would examine the overlay's own mapping,
    /// which is empty.
    pub fn quick(&mut self, file: impl AsFd) -> Option<u64> {
        if !self.has_cachestat {
            return None;
        }
        match page_cache::cached_pages(file) {
            Ok(pages) => Some(pages),
            Err(e) => {
                self.has_cachestat =
                    e.raw_os_error() != Some(rustix::io::Errno::NOSYS.raw_os_error());
                None
            }
        }
    }

    /// Calls `run` for each run of cached pages of a file, until `run` returns false. `pages` is
    /// the file's length in pages. Calls `pause` after each step of 1,024 pages; `pause` may sleep.
    pub fn runs(
        &mut self,
        file: impl AsFd,
        pages: u64,
        mut pause: impl FnMut(),
        mut run: impl FnMut(Run) -> bool,
    ) -> io::Result<()> {
        if pages == 0 {
            return Ok(());
        }
        let view = FileView::new(file, pages)?;
        let mut current: Option<Run> = None;
        let mut first = 0;
        while first < pages {
            let count = WINDOW.min(pages - first);
            let states = &mut self.states[..usize::try_from(count).unwrap_or(0)];
            view.resident(first, states)?;
            let mut any = false;
            for part in states.chunk_by(|a, b| a & 1 == b & 1) {
                let offset = part.as_ptr().addr() - states.as_ptr().addr();
                if part[0] & 1 == 0 {
                    continue;
                }
                any = true;
                let page = first + offset as u64;
                // This fails if a page was truncated or evicted meanwhile. The pages before it are
                // reported all the same.
                let _ = view.populate(page, part.len() as u64);
                let frames = self.pagemap.frames(view.hva(page), part.len())?;
                for (page, frame) in (page..).zip(frames) {
                    let Some(frame) = frame else { continue };
                    match &mut current {
                        Some((p, f, n))
                            if page == *p + u64::from(*n)
                                && frame == *f + u64::from(*n)
                                && *n < memfold_wire::agent::MAX_RUN_PAGES =>
                        {
                            *n += 1;
                        }
                        _ => {
                            if !current.replace((page, frame, 1)).is_none_or(&mut run) {
                                return Ok(());
                            }
                        }
                    }
                }
            }
            if any {
                let _ = view.release(first, count);
            }
            first += count;
            pause();
        }
        if let Some(last) = current {
            run(last);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn cached_pages_of_a_sparse_file_are_found_and_holes_stay_uncached() {
        if !rustix::process::geteuid().is_root() {
            memfold_testkit::skip!("frame numbers need root");
        }
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.set_len(3000 * 4096).unwrap();
        for page in [0_u64, 1, 2, 1023, 1024, 2999] {
            file.write_all_at(&[7; 4096], page * 4096).unwrap();
        }
        let mut residency = Residency::new().unwrap();
        for _ in 0..2 {
            let mut found = Vec::new();
            residency
                .runs(
                    &file,
                    3000,
                    || (),
                    |(page, frame, count)| {
                        assert!(frame > 0);
                        found.extend(page..page + u64::from(count));
                        true
                    },
                )
                .unwrap();
            assert_eq!(found, [0, 1, 2, 1023, 1024, 2999]);
        }
    }
}
