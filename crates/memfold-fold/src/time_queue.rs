//! A queue of keys sorted by time, in which each key occurs at most once.

use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::hash::Hash;
use std::time::Instant;

use foldhash::{HashMap, HashMapExt};

/// Keys and the time at which each is due. A change costs time in proportion to the logarithm of
/// the number of keys.
#[derive(Debug)]
pub(super) struct TimeQueue<K> {
    times: HashMap<K, Instant>,
    order: BTreeSet<(Instant, K)>,
}

impl<K> Default for TimeQueue<K> {
    fn default() -> Self {
        Self {
            times: HashMap::new(),
            order: BTreeSet::new(),
        }
    }
}

impl<K: Clone + Eq + Hash + Ord> TimeQueue<K> {
    /// Sets the time at which a key is due. `None` removes the key.
    pub fn set(&mut self, key: &K, due: Option<Instant>) {
        let before = self.times.get(key).copied();
        if before == due {
            return;
        }
        if let Some(before) = before {
            self.order.remove(&(before, key.clone()));
            self.times.remove(key);
        }
        if let Some(due) = due {
            self.order.insert((due, key.clone()));
            self.times.insert(key.clone(), due);
        }
    }

    /// Returns whether a time is set for a key.
    pub fn contains<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.times.contains_key(key)
    }

    /// Returns the time at which the first key is due; `None` if the queue is empty.
    pub fn first(&self) -> Option<Instant> {
        self.order.first().map(|(due, _)| *due)
    }

    /// Returns the keys that are due at `now`, the one that has been due for longest first.
    pub fn due(&self, now: Instant) -> impl Iterator<Item = &K> {
        let due = self.order.iter().take_while(move |(due, _)| *due <= now);
        due.map(|(_, key)| key)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::*;
    use crate::packed::tests::numbers;

    #[test]
    fn a_queue_by_time_agrees_with_a_search_of_all_keys_after_random_changes() {
        let start = Instant::now();
        let mut random = numbers();
        let mut queue = TimeQueue::default();
        let mut all: BTreeMap<u32, Instant> = BTreeMap::new();
        let mut most = 0;
        for _ in 0..5000 {
            let key = random(20);
            let time = start + Duration::from_millis(random(50).into());
            if random(4) == 0 {
                queue.set(&key, None);
                all.remove(&key);
            } else {
                queue.set(&key, Some(time));
                all.insert(key, time);
            }
            let now = start + Duration::from_millis(random(60).into());
            let mut sorted: Vec<(Instant, u32)> = all.iter().map(|(k, t)| (*t, *k)).collect();
            sorted.sort_unstable();
            assert_eq!(queue.first(), sorted.first().map(|(due, _)| *due));
            let due = sorted.iter().filter(|(due, _)| *due <= now);
            assert!(queue.due(now).eq(due.map(|(_, key)| key)));
            most = most.max(sorted.len());
        }
        assert!(most > 10);
    }
}
