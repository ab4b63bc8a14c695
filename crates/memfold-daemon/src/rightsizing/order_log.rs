//! Orders of right-sizing with their reasons and results, changes of the host's rung, and counts of
//! both, since the daemon's start.

use std::collections::{BTreeMap, VecDeque};

use memfold_api::{OrderCount, RightsizeEvent, RungChange};
use memfold_rightsize::{Action, Order, Reason};

use crate::threads;

/// Number of orders that are remembered.
const EVENTS: usize = 1000;

/// Number of changes of the rung that are remembered.
const RUNGS: usize = 64;

/// What an order is counted under: what was ordered, and why.
type Kind = (&'static str, &'static str);

/// Number of orders of one kind, and of those that could not be carried out.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    all: u64,
    failed: u64,
}

/// The last orders and changes of the rung, and counts of all orders since the daemon's start.
#[derive(Debug, Default)]
pub(super) struct OrderLog {
    events: VecDeque<(Kind, RightsizeEvent)>,
    /// Number of the oldest event in `events`, counted from the daemon's start.
    first: u64,
    rungs: VecDeque<RungChange>,
    counts: BTreeMap<Kind, Count>,
}

impl OrderLog {
    /// Notes an order, and returns its number.
    pub fn note(&mut self, vm: &str, order: Order, reason: Reason) -> u64 {
        if self.events.len() == EVENTS {
            self.events.pop_front();
            self.first += 1;
        }
        let kind = (order.action.name(), reason.name());
        self.counts.entry(kind).or_default().all += 1;
        let event = RightsizeEvent {
            at_unix_s: now_unix_s(),
            vm: vm.to_owned(),
            order: text(order),
            reason: reason.to_string(),
            result: None,
        };
        self.events.push_back((kind, event));
        self.first + self.events.len() as u64 - 1
    }

    /// Notes what became of an order.
    pub fn note_result(&mut self, number: u64, result: String, failed: bool) {
        let index = number.checked_sub(self.first);
        let index = index.and_then(|index| usize::try_from(index).ok());
        let Some((kind, event)) = index.and_then(|index| self.events.get_mut(index)) else {
            return;
        };
        event.result = Some(result);
        self.counts.entry(*kind).or_default().failed += u64::from(failed);
    }

    /// Notes that the host has come to another rung.
    pub fn note_rung(&mut self, rung: &str, why: String) {
        if self.rungs.len() == RUNGS {
            self.rungs.pop_front();
        }
        self.rungs.push_back(RungChange {
            at_unix_s: now_unix_s(),
            rung: rung.to_owned(),
            why,
        });
    }

    /// Returns the last `count` orders, oldest first.
    pub fn events(&self, count: usize) -> Vec<RightsizeEvent> {
        let skipped = self.events.len().saturating_sub(count);
        let events = self.events.iter().skip(skipped);
        events.map(|(_, event)| event.clone()).collect()
    }

    /// Returns the last changes of the rung, oldest first.
    pub fn rungs(&self) -> Vec<RungChange> {
        self.rungs.iter().cloned().collect()
    }

    /// Returns the numbers of orders.
    pub fn counts(&self) -> Vec<OrderCount> {
        let counts = self
            .counts
            .iter()
            .map(|((kind, reason), count)| OrderCount {
                kind: (*kind).to_owned(),
                reason: (*reason).to_owned(),
                count: count.all,
                failed: count.failed,
            });
        counts.collect()
    }
}

/// Describes an order.
pub(super) fn text(order: Order) -> String {
    match order.action {
        Action::Trim { bytes, .. } => format!("trim {bytes} of page cache"),
        Action::Balloon { target } => format!("set the balloon so that the guest has {target}"),
        Action::Plug { bytes } => format!("plug {bytes}"),
        Action::Unplug { bytes } => format!("unplug {bytes}"),
    }
}

fn now_unix_s() -> f64 {
    threads::unix_time().as_millis() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use memfold_units::ByteSize;

    use super::*;

    #[test]
    fn orders_of_right_sizing_are_counted_by_kind_and_reason_and_the_newest_are_kept() {
        let bytes = ByteSize::mib(64);
        let trim = Order {
            action: Action::Trim {
                bytes,
                may_drop_folded: false,
            },
            bytes,
        };
        let balloon = Order {
            action: Action::Balloon { target: bytes },
            bytes,
        };
        let mut log = OrderLog::default();
        let shortage = bytes;
        let first = log.note("web", balloon, Reason::HostShort { bytes, shortage });
        let mut last = 0;
        for _ in 0..EVENTS {
            last = log.note("db", trim, Reason::CacheNotMissed { bytes });
        }
        log.note_result(last, "refused".into(), true);
        // The first order is no longer kept.
        log.note_result(first, "done".into(), true);
        let counts = |kind: &str, reason: &str, count, failed| OrderCount {
            kind: kind.into(),
            reason: reason.into(),
            count,
            failed,
        };
        assert_eq!(
            log.counts(),
            [
                counts("balloon", "host_short", 1, 0),
                counts("trim", "cache_not_missed", EVENTS as u64, 1),
            ]
        );
        assert_eq!(log.events(2000).len(), EVENTS);
        let newest = &log.events(1)[0];
        assert_eq!(newest.result.as_deref(), Some("refused"));
        assert_eq!(newest.order, "trim 64.0 MiB of page cache");
        for _ in 0..=RUNGS {
            log.note_rung("trim", "little is left".into());
        }
        assert_eq!(log.rungs().len(), RUNGS);
    }
}
