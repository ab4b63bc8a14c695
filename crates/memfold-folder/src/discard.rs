//! Handles QEMU's discards of guest RAM (`MADV_DONTNEED`, `MADV_FREE`). After a discard, a page
//! must read as zeroes, even if it was folded before, or has yet to arrive.

use memfold_sys::region;
use memfold_units::PAGE_SIZE;
use rustix::io::Errno;

use crate::ram::Kind;
use crate::state::State;

impl State {
    /// Discards a range: replaces folded pages by fresh anonymous memory, then makes the system
    /// call. Both steps happen under one hold of the lock; otherwise a run folded between them
    /// would show the store's bytes again. Returns `None` if the range is outside RAM.
    pub(crate) fn discard(&mut self, start: u64, end: u64) -> Option<Result<(), Errno>> {
        if let Some(past) = &self.past {
            past.keep(start, end);
        }
        let mut inside = false;
        for block in &mut self.ram.blocks {
            let area = block.area;
            let from = start.max(area.start().0);
            let to = end.min(area.end().0);
            inside |= from < to;
            if from >= to || block.is_untouched() {
                continue;
            }
            let first = (from - area.start().0) / PAGE_SIZE;
            let mut rest = area.part(first, (to - from) / PAGE_SIZE);
            while !rest.is_empty() {
                let (kind, part) = block.first_kind(rest);
                if kind != Kind::Anonymous {
                    if let Err(errno) = block.refresh(part) {
                        // The process has too many mappings. QEMU then reports a failed discard;
                        // the guest's bytes are unchanged.
                        return Some(Err(errno));
                    }
                    if kind == Kind::Awaited {
                        if let Some(uffd) = &self.waiting {
                            // Only a range of QEMU's own RAM is woken, which cannot fail.
                            let _ = uffd.wake(part);
                        }
                    }
                    self.stats.discarded_pages += part.pages();
                }
                rest = rest.after(part.pages());
            }
        }
        if !inside {
            return None;
        }
        // If no page of the range is folded, the plain system call is enough, but under the lock.
        let (Ok(address), Ok(length)) = (usize::try_from(start), usize::try_from(end - start))
        else {
            return None;
        };
        // SAFETY: QEMU owns the range and has requested this call.
        Some(unsafe { region::madvise(address, length, libc::MADV_DONTNEED) })
    }
}
