//! Messages about a guest's page cache that wait because the guest reported more pages than it may.
//! Answers to commands don't wait behind them: the inventory of a large guest takes a minute.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use memfold_wire::agent::FromAgent;

use super::agent_budget::{Budget, weight};

/// Most bytes of waiting messages, as they were sent, and [`MESSAGE_BYTES`] for each; in memory
/// they take up to fifteen times as many (files without a path). The inventory of 64 GiB of page
/// cache in large files takes 0.3 MiB.
const MOST_BYTES: usize = 1 << 20;
const MESSAGE_BYTES: usize = size_of::<(FromAgent, usize)>();

/// Messages that wait, and the budget for which they wait.
pub(super) struct Held {
    messages: VecDeque<(FromAgent, usize)>,
    bytes: usize,
    pages: Budget,
    /// The next message about pages may be handled from then on.
    due: Instant,
}

impl Held {
    pub(super) fn new(max_pages_per_s: u32) -> Self {
        Self {
            messages: VecDeque::new(),
            bytes: 0,
            pages: Budget::new(max_pages_per_s),
            due: Instant::now(),
        }
    }

    /// Counts a message about pages that is handled now against the budget.
    pub(super) fn spend(&mut self, message: &FromAgent) {
        let wait = self.pages.spend(weight(message));
        self.due = Instant::now() + wait.unwrap_or_default();
    }

    /// Returns the message if it is to be handled now. Otherwise the message is kept; `bytes` is
    /// its length.
    pub(super) fn pass(&mut self, message: FromAgent, bytes: usize) -> Option<FromAgent> {
        if self.messages.is_empty() && self.due <= Instant::now() {
            return Some(message);
        }
        let bytes = bytes + MESSAGE_BYTES;
        self.bytes += bytes;
        self.messages.push_back((message, bytes));
        None
    }

    /// Takes the first message that waits, if it is due.
    pub(super) fn take_due(&mut self) -> Option<FromAgent> {
        if self.due > Instant::now() {
            return None;
        }
        let (message, bytes) = self.messages.pop_front()?;
        self.bytes -= bytes;
        Some(message)
    }

    /// Forgets all messages that wait: they are of an earlier session.
    pub(super) fn forget(&mut self) {
        self.messages.clear();
        self.bytes = 0;
    }

    /// Returns how long it takes until the first message is due; `None` if none waits.
    pub(super) fn wait(&self) -> Option<Duration> {
        (!self.messages.is_empty()).then(|| self.left())
    }

    /// Returns how long the guest has to wait before it may report more pages.
    pub(super) fn left(&self) -> Duration {
        self.due.saturating_duration_since(Instant::now())
    }

    /// Returns whether no more messages may wait, so that nothing more may be read.
    pub(super) fn is_full(&self) -> bool {
        self.bytes > MOST_BYTES
    }
}

/// Returns whether a message is about the guest's page cache. Such messages stay in order.
pub(super) const fn is_about_pages(message: &FromAgent) -> bool {
    matches!(
        message,
        FromAgent::InventoryBegin
            | FromAgent::InventoryEnd { .. }
            | FromAgent::Files(_)
            | FromAgent::Hints(_)
            | FromAgent::Gone(_)
            | FromAgent::Dirty(_)
            | FromAgent::Clean(_)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_reports_pages_without_end_fills_a_bounded_part_of_the_daemons_memory() {
        let mut held = Held::new(1);
        held.spend(&FromAgent::InventoryBegin);
        let mut kept = 0;
        while !held.is_full() {
            assert_eq!(held.pass(FromAgent::InventoryBegin, 5), None);
            kept += 1;
        }
        // The smallest message counts for the memory that it takes.
        assert!(kept <= MOST_BYTES / MESSAGE_BYTES, "{kept}");
        assert!(held.take_due().is_none() && held.wait() > Some(Duration::ZERO));
        held.forget();
        assert!(!held.is_full() && held.wait().is_none());
    }
}
