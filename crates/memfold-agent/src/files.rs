//! Table of the files that the agent has reported to the daemon in this connection. Messages name a
//! file by its number in the table.

use std::collections::HashMap;

/// Maximum number of files in the table (about 5 MB). When the table is full, the least recently
/// used half is removed; these files get new numbers when they are seen again.
pub const MAX_FILES: usize = 40_000;
/// Most dirty ranges that are kept for one file. If there are more, the two nearest ranges are
/// joined.
const MAX_RANGES: usize = 16;

/// Device number (`major << 20 | minor`) and inode number of a file.
pub type Inode = (u32, u64);

/// What the agent knows of a file and has told the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileEntry {
    /// Number of the file in messages to the daemon.
    pub number: u32,
    /// Hash of the file's path that was sent to the daemon; 0 if no path was sent.
    pub path_hash: u64,
    /// Size of the file that was sent to the daemon, in bytes.
    pub size: u64,
    /// Whether the daemon's rules allow hints of this file.
    pub allowed: bool,
    /// Number of further directory walks that may look for the file's path; 0 for a file whose path
    /// is known.
    pub walks: u8,
    /// Size of the file's largest folio that trace events have shown: log2 of the folio's pages.
    pub order: u8,
    used: u32,
    dirty: Vec<(u64, u64)>,
}

impl FileEntry {
    /// Records that the file's pages `[start, end)` are dirty. Returns false if all of them were
    /// already recorded.
    pub fn mark_dirty(&mut self, start: u64, end: u64) -> bool {
        if self.dirty.iter().any(|r| r.0 <= start && end <= r.1) {
            return false;
        }
        let (mut start, mut end) = (start, end);
        self.dirty.retain(|r| {
            let touches = r.0 <= end && start <= r.1;
            if touches {
                (start, end) = (start.min(r.0), end.max(r.1));
            }
            !touches
        });
        let at = self.dirty.partition_point(|r| r.0 < start);
        self.dirty.insert(at, (start, end));
        if self.dirty.len() > MAX_RANGES {
            let gap = |i: &usize| self.dirty[i + 1].0 - self.dirty[*i].1;
            if let Some(i) = (0..self.dirty.len() - 1).min_by_key(gap) {
                self.dirty[i].1 = self.dirty[i + 1].1;
                self.dirty.remove(i + 1);
            }
        }
        true
    }

    /// Returns and removes the file's dirty ranges `(start, end)`, in pages. These pages count as
    /// clean from now on.
    pub fn take_dirty(&mut self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.dirty)
    }

    /// Returns whether dirty pages of the file are recorded.
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }
}

/// Table of the files that the agent has reported, by inode.
#[derive(Debug, Default)]
pub struct Files {
    map: HashMap<Inode, FileEntry>,
    next: u32,
    now: u32,
}

impl Files {
    /// Removes all files from the table. A file gets a new number when it is seen again.
    pub fn forget_all(&mut self) {
        self.map = HashMap::new();
    }

    /// Returns how many numbers this table has given to files.
    pub const fn numbers_used(&self) -> u32 {
        self.next
    }

    /// Advances the clock by which the table knows the least recently used files.
    pub const fn tick(&mut self) {
        self.now = self.now.wrapping_add(1);
    }

    /// Returns the table's entry of an inode, and whether this call has created the entry.
    pub fn entry(&mut self, inode: Inode) -> (&mut FileEntry, bool) {
        if self.map.len() >= MAX_FILES && !self.map.contains_key(&inode) {
            self.forget_half();
        }
        let mut new = false;
        let (next, now) = (&mut self.next, self.now);
        let entry = self.map.entry(inode).or_insert_with(|| {
            new = true;
            let number = *next;
            *next = next.wrapping_add(1);
            FileEntry {
                number,
                allowed: true,
                used: now,
                ..FileEntry::default()
            }
        });
        entry.used = now;
        (entry, new)
    }

    /// Returns the table's entry of an inode; `None` if the inode is not in the table.
    pub fn get(&mut self, inode: Inode) -> Option<&mut FileEntry> {
        self.map.get_mut(&inode)
    }

    /// Forgets the entries older than the median age (all entries, if they have the same age).
    fn forget_half(&mut self) {
        let now = self.now;
        let mut ages: Vec<u32> = self
            .map
            .values()
            .map(|e| now.wrapping_sub(e.used))
            .collect();
        let half = ages.len() / 2;
        let (_, &mut median, _) = ages.select_nth_unstable(half);
        self.map.retain(|_, e| now.wrapping_sub(e.used) < median);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_dirty_ranges_are_merged_and_reported_once() {
        let mut files = Files::default();
        let (file, new) = files.entry((1, 2));
        assert!(new);
        assert!(file.mark_dirty(0, 1));
        assert!(file.mark_dirty(2, 3));
        assert!(!file.mark_dirty(2, 3));
        assert!(file.mark_dirty(1, 2));
        assert_eq!(file.take_dirty(), [(0, 3)]);
        assert!(!file.is_dirty());
        for i in 0..100 {
            file.mark_dirty(i * 10, i * 10 + 1);
        }
        let ranges = file.take_dirty();
        assert!(ranges.len() <= MAX_RANGES);
        assert!((0..100).all(|i| ranges.iter().any(|r| r.0 <= i * 10 && i * 10 < r.1)));
    }

    #[test]
    fn the_file_table_of_the_agent_stays_bounded_and_file_numbers_are_never_reused() {
        let mut files = Files::default();
        let mut last = None;
        for i in 0..3 * MAX_FILES as u64 {
            if i % 100 == 0 {
                files.tick();
            }
            let (entry, new) = files.entry((1, i));
            assert!(new && last < Some(entry.number));
            last = Some(entry.number);
        }
        assert!(files.map.len() <= MAX_FILES);
        assert!(files.get((1, 3 * MAX_FILES as u64 - 1)).is_some());
    }
}
