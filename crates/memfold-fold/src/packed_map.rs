//! A sorted map from pairs of numbers to short strings of bytes, for tables with very many small
//! entries. An entry needs its bytes and usually three bytes more.
//!
//! Entries with neighbouring keys are stored together, in one allocation (a *leaf*):
//!
//! ```text
//!   first number of the key, relative to the entry before
//!   |   second number: relative to the entry before if the first number is the same
//!   |   |   number of bytes
//!   |   |   |   bytes
//! ```
//!
//! Each number is a varint, as in [`packed`](super::packed).

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use super::packed::{read_number, write_number};

/// Key of an entry.
pub(super) type Key = (u32, u32);

/// Length in bytes from which a leaf is split.
const LEAF: usize = 400;

/// Memory of a leaf besides its bytes: its place in the tree, whose nodes are filled to two thirds
/// on average, and the allocator's header.
const LEAF_OVERHEAD: usize = (size_of::<Key>() + size_of::<Box<[u8]>>()) * 3 / 2 + 8;

/// A sorted map from keys to strings of bytes. Empty strings are not stored.
#[derive(Clone, Debug, Default)]
pub(super) struct PackedMap {
    /// Leaves, each with a key that is at most the key of its first entry, and greater than all
    /// keys of the leaf before.
    leaves: BTreeMap<Key, Box<[u8]>>,
    entries: usize,
}

fn write_key(key: Key, before: Key, bytes: &mut Vec<u8>) {
    write_number(key.0.wrapping_sub(before.0), bytes);
    let is_same = key.0 == before.0;
    write_number(
        key.1.wrapping_sub(if is_same { before.1 } else { 0 }),
        bytes,
    );
}

/// An entry of a leaf, by its places in the leaf's bytes.
#[derive(Clone, Copy)]
struct Entry {
    key: Key,
    /// Begin of the key.
    begin: usize,
    /// Begin of the number of bytes, after the key.
    length: usize,
    value: usize,
    end: usize,
}

/// Reads the entries of a leaf, in order.
struct Entries<'a> {
    bytes: &'a [u8],
    at: usize,
    key: Key,
}

impl<'a> Entries<'a> {
    const fn new(first: Key, bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            key: first,
        }
    }

    fn number(&mut self) -> u32 {
        let (number, length) = read_number(&self.bytes[self.at..]);
        self.at += length;
        number
    }
}

impl Iterator for Entries<'_> {
    type Item = Entry;

    fn next(&mut self) -> Option<Entry> {
        if self.at >= self.bytes.len() {
            return None;
        }
        let begin = self.at;
        let (first, second) = (self.number(), self.number());
        let base = if first == 0 { self.key.1 } else { 0 };
        self.key = (self.key.0.wrapping_add(first), base.wrapping_add(second));
        let length = self.at;
        let bytes = self.number() as usize;
        let value = self.at;
        self.at = (value + bytes).min(self.bytes.len());
        Some(Entry {
            key: self.key,
            begin,
            length,
            value,
            end: self.at,
        })
    }
}

impl PackedMap {
    /// Returns the leaf that has the entry of this key, if the map has the entry.
    fn leaf(&self, key: Key) -> Option<(Key, &[u8])> {
        let (&first, bytes) = self.leaves.range(..=key).next_back()?;
        Some((first, bytes))
    }

    /// Returns the bytes of an entry; `None` if the map has no such entry.
    pub fn get(&self, key: Key) -> Option<&[u8]> {
        let (first, bytes) = self.leaf(key)?;
        let entry = Entries::new(first, bytes).find(|entry| entry.key >= key)?;
        (entry.key == key).then(|| &bytes[entry.value..entry.end])
    }

    /// Returns whether the map has an entry.
    pub fn has(&self, key: Key) -> bool {
        self.get(key).is_some()
    }

    /// Sets the bytes of an entry, or removes the entry if there are no bytes.
    pub fn set(&mut self, key: Key, value: &[u8]) {
        let first = self.leaf(key).map(|(first, _)| first);
        let first = first.or_else(|| self.leaves.first_key_value().map(|(&first, _)| first));
        let (first, old) = first
            .and_then(|first| self.leaves.remove_entry(&first))
            .unwrap_or((key, Box::default()));
        // Bytes before the entry, key of the entry before, and the next entry.
        let (mut kept, mut before, mut next) = (old.len(), first.min(key), None);
        let mut found = false;
        for entry in Entries::new(first, &old) {
            if entry.key > key {
                next = Some(entry);
            }
            if entry.key >= key {
                kept = kept.min(entry.begin);
                found |= entry.key == key;
            } else {
                before = entry.key;
            }
            if next.is_some() {
                break;
            }
        }
        self.entries += usize::from(!value.is_empty());
        self.entries -= usize::from(found);
        let mut bytes = Vec::with_capacity(old.len() + value.len() + 16);
        bytes.extend_from_slice(&old[..kept]);
        if !value.is_empty() {
            write_key(key, before, &mut bytes);
            write_number(u32::try_from(value.len()).unwrap_or(u32::MAX), &mut bytes);
            bytes.extend_from_slice(value);
            before = key;
        }
        if let Some(next) = next {
            write_key(next.key, before, &mut bytes);
            bytes.extend_from_slice(&old[next.length..]);
        }
        let is_last = next.is_none() && !value.is_empty();
        self.put(first.min(key), bytes, is_last.then_some(kept));
    }

    /// Stores a changed leaf: splits it if it is long, or joins it with the next one if both are
    /// short. `last`: begin of the last entry if it is new. Keys are often added in ascending
    /// order, so the leaf before stays full.
    fn put(&mut self, first: Key, mut bytes: Vec<u8>, last: Option<usize>) {
        if bytes.is_empty() {
            return;
        }
        if bytes.len() < LEAF / 4 {
            self.join_next(first, &mut bytes);
        }
        if bytes.len() > LEAF {
            let middle = last.unwrap_or(bytes.len() / 2);
            let mut split = None;
            for entry in Entries::new(first, &bytes).skip(1) {
                split = Some(entry);
                if entry.begin >= middle {
                    break;
                }
            }
            if let Some(entry) = split {
                let mut rest = Vec::with_capacity(bytes.len() - entry.begin);
                write_key(entry.key, entry.key, &mut rest);
                rest.extend_from_slice(&bytes[entry.length..]);
                self.leaves.insert(entry.key, rest.into());
                bytes.truncate(entry.begin);
            }
        }
        self.leaves.insert(first, bytes.into());
    }

    fn join_next(&mut self, first: Key, bytes: &mut Vec<u8>) {
        let mut after = self
            .leaves
            .range(first..)
            .map(|(&key, next)| (key, next.len()));
        let Some((key, _)) = after.next().filter(|(_, length)| *length < LEAF / 2) else {
            return;
        };
        let Some(next) = self.leaves.remove(&key) else {
            return;
        };
        let last = Entries::new(first, bytes)
            .last()
            .map_or(first, |entry| entry.key);
        if let Some(entry) = Entries::new(key, &next).next() {
            write_key(entry.key, last, bytes);
            bytes.extend_from_slice(&next[entry.length..]);
        }
    }

    /// Returns the entries with keys in a range, in ascending order.
    pub fn range(&self, keys: RangeInclusive<Key>) -> impl Iterator<Item = (Key, &[u8])> {
        let (from, to) = keys.into_inner();
        let first = self.leaf(from).map_or(from, |(first, _)| first);
        let leaves = self.leaves.range(first..=to.max(first));
        let entries = leaves.flat_map(|(&first, bytes)| {
            Entries::new(first, bytes).map(move |e| (e.key, &bytes[e.value..e.end]))
        });
        entries
            .skip_while(move |(key, _)| *key < from)
            .take_while(move |(key, _)| *key <= to)
    }

    /// Returns all entries, in ascending order.
    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = (Key, &[u8])> {
        self.range((0, 0)..=(u32::MAX, u32::MAX))
    }

    /// Returns the number of entries.
    pub const fn len(&self) -> usize {
        self.entries
    }

    /// Returns the memory use in bytes.
    pub fn own_bytes(&self) -> usize {
        let leaves = self.leaves.values();
        leaves.map(|bytes| bytes.len() + LEAF_OVERHEAD).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::tests::numbers;

    #[test]
    fn a_packed_map_agrees_with_a_tree_after_random_changes() {
        let mut random = numbers();
        let mut map = PackedMap::default();
        let mut model: BTreeMap<Key, Vec<u8>> = BTreeMap::new();
        let edges = [0, 1, 127, 128, 1 << 14, u32::MAX - 1, u32::MAX];
        for n in 0..40_000 {
            // Far keys, near keys, and phases in which entries are mostly removed.
            let key = match random(4) {
                0 => (edges[random(7) as usize], edges[random(7) as usize]),
                _ => (random(60), random(10)),
            };
            let is_removed = random(4) < if n / 5_000 % 2 == 0 { 1 } else { 3 };
            let length = if random(50) == 0 {
                2000
            } else {
                1 + random(40)
            };
            let length = if is_removed { 0 } else { length };
            let value: Vec<u8> = (0..length).map(|_| random(256).to_le_bytes()[0]).collect();
            map.set(key, &value);
            if value.is_empty() {
                model.remove(&key);
            } else {
                model.insert(key, value);
            }
            assert_eq!((map.len(), map.has(key)), (model.len(), !is_removed));
            if n % 97 == 0 {
                let wanted = || model.iter().map(|(key, value)| (*key, &value[..]));
                assert!(map.iter().eq(wanted()));
                let (from, to) = ((random(70), random(10)), (random(70), random(10)));
                if from <= to {
                    let wanted = wanted().filter(|(key, _)| (from..=to).contains(key));
                    assert!(map.range(from..=to).eq(wanted));
                }
                assert!(
                    model
                        .iter()
                        .all(|(key, value)| map.get(*key) == Some(value))
                );
                // Only an entry that is longer than a leaf may make a leaf long.
                let mut long = map.leaves.values().filter(|leaf| leaf.len() > 2 * LEAF);
                assert!(long.all(|leaf| leaf.len() > 2000));
            }
        }
        assert!(map.leaves.len() > 3);
        for key in model.keys() {
            map.set(*key, &[]);
        }
        assert_eq!((map.len(), map.own_bytes()), (0, 0));
    }

    #[test]
    fn entries_that_are_added_in_order_or_in_reverse_take_few_bytes_more_than_their_own() {
        for is_reverse in [false, true] {
            let mut map = PackedMap::default();
            for n in 0..10_000 {
                let key = if is_reverse { 10_000 - n } else { n };
                map.set((key, 0), &[7; 10]);
            }
            let most = if is_reverse { 18 } else { 15 };
            assert!(map.own_bytes() < 10_000 * most, "{}", map.own_bytes());
        }
    }
}
