//! Joins and subtracts lists of ranges (of pages, bytes or addresses). Saves use this to decide
//! which pages a snapshot must store.

use std::ops::Range;

/// Joins adjacent and overlapping ranges, which are ascending by their starts.
pub(super) fn joined<T: Copy + Ord>(ranges: impl IntoIterator<Item = Range<T>>) -> Vec<Range<T>> {
    let mut joined: Vec<Range<T>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// Returns the parts of `ranges` that are not in `out`. Both lists and the result are ascending and
/// without overlaps.
pub(super) fn without<T: Copy + Ord>(ranges: &[Range<T>], out: &[Range<T>]) -> Vec<Range<T>> {
    let (mut left, mut next) = (Vec::new(), 0);
    for range in ranges {
        let mut start = range.start;
        while out.get(next).is_some_and(|out| out.end <= start) {
            next += 1;
        }
        for out in out[next..].iter().take_while(|out| out.start < range.end) {
            left.extend((start < out.start).then_some(start..out.start));
            start = start.max(out.end);
        }
        left.extend((start < range.end).then_some(start..range.end));
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_or_overlapping_ranges_are_joined_into_one_range() {
        let ranges = vec![0..2, 2..4, 6..8, 7..9];
        assert_eq!(joined(ranges), [0..4, 6..9]);
        assert_eq!(joined(Vec::<Range<u64>>::new()), []);
    }
}
