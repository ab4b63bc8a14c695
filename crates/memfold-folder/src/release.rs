//! Releases folded pages: replaces their mapping of the page store by anonymous memory of QEMU with
//! the same bytes.

use memfold_sys::region::Mapping;
use memfold_sys::userfaultfd::Userfaultfd;
use memfold_wire::library::{Freeze, Outcome, Range};
use rustix::io::Errno;

use crate::fold;
use crate::freeze::Unwritable;
use crate::ram::Kind;
use crate::state::{State, record_freeze};

impl State {
    /// Releases one range. Parts of the range that are anonymous already stay unchanged.
    pub(crate) fn release(
        &mut self,
        uffd: Option<&Userfaultfd>,
        freeze: Freeze,
        range: &Range,
    ) -> Outcome {
        let Some((block, area)) = self.ram.find(range.hva, range.pages) else {
            return Outcome::Refused;
        };
        let protect = |part| match (freeze, uffd) {
            (Freeze::Stopped { .. }, _) => Unwritable::in_stopped(uffd, part),
            (Freeze::WriteProtect, Some(uffd)) if uffd.protection_lasts() => {
                Unwritable::in_running(uffd, part)
            }
            _ => Err(Errno::INVAL),
        };
        let mut done = 0;
        while done < area.pages() {
            let (kind, part) = block.first_kind(area.after(done));
            if matches!(kind, Kind::Anonymous | Kind::Awaited) {
                done += part.pages();
                continue;
            }
            let failed = |errno| fold::failed(errno).at(u32::try_from(done).unwrap_or(u32::MAX));
            let fresh = match Mapping::anonymous(part.pages(), block.advice.noreserve) {
                Ok(fresh) => fresh,
                Err(errno) => return failed(errno),
            };
            // Give all advice now, while no vCPU waits; `mremap` keeps the advice.
            block.advise_anonymous(fresh.area());
            let guard = match protect(part) {
                Ok(guard) => guard,
                // A template's file that is not shmem cannot be write-protected; such a range can
                // be released only with `Stopped`.
                Err(Errno::INVAL | Errno::BUSY) if done == 0 => return Outcome::Refused,
                Err(errno) => return failed(errno),
            };
            part.copy_nonzero(fresh.area());
            let moved = fresh.move_over(part);
            let replaced = if moved.is_ok() { part.pages() } else { 0 };
            record_freeze(&mut self.stats, guard.finish(replaced));
            if let Err(errno) = moved {
                return failed(errno);
            }
            block.set(part, Kind::Anonymous);
            self.stats.released_pages += part.pages();
            done += part.pages();
        }
        Outcome::Done
    }
}
