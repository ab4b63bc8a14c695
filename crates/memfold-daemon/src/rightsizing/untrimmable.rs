//! Remembers guests that could not trim their page cache, so that the controller does not count on
//! them for a while and moves their balloons instead.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use memfold_wire::memory::TrimEnd;

/// Time after which a guest is asked again. Its kernel may have been updated, for example.
const AGAIN: Duration = Duration::from_secs(600);

/// Guests that could not trim, by the machine's number, with the time of the last attempt.
#[derive(Debug, Default)]
pub(super) struct Untrimmable {
    since: BTreeMap<u32, Instant>,
}

impl Untrimmable {
    /// Notes how a guest's trim ended.
    pub fn note(&mut self, id: u32, end: TrimEnd) {
        if is_refusal(end) {
            self.since.insert(id, Instant::now());
        }
    }

    /// Forgets VMs that are not there any more, and guests that are asked again.
    pub fn keep(&mut self, is_there: impl Fn(&u32) -> bool) {
        self.since
            .retain(|id, since| is_there(id) && since.elapsed() < AGAIN);
    }

    pub fn contains(&self, id: u32) -> bool {
        self.since.contains_key(&id)
    }
}

/// Returns whether the guest will end its next trim in the same way.
pub(super) fn is_refusal(end: TrimEnd) -> bool {
    matches!(
        end,
        TrimEnd::Forbidden | TrimEnd::Unsupported | TrimEnd::Failed(_)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_could_not_trim_is_left_out_until_it_is_asked_again_or_ends() {
        let mut guests = Untrimmable::default();
        guests.note(1, TrimEnd::Unsupported);
        guests.note(2, TrimEnd::Failed(22));
        guests.note(3, TrimEnd::Deadline);
        guests.note(4, TrimEnd::Forbidden);
        assert_eq!(
            [1, 2, 3, 4].map(|id| guests.contains(id)),
            [true, true, false, true]
        );
        guests.keep(|id| *id != 2);
        assert_eq!([1, 2, 4].map(|id| guests.contains(id)), [true, false, true]);
        let long_ago = Instant::now().checked_sub(AGAIN).unwrap();
        guests.since.insert(1, long_ago);
        guests.keep(|_| true);
        assert_eq!([1, 4].map(|id| guests.contains(id)), [false, true]);
    }
}
