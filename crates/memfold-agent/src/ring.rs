//! Decodes pages of the kernel's trace ring buffer, as read from `trace_pipe_raw`. A page has a
//! timestamp, a commit word and records:
//!
//! ```text
//!   +-----------+--------------+---------+--------------------+---------+-----
//!   | timestamp | commit       | header  | array[0] if len 0  | record  | ...
//!   | u64       | bytes + flags| 5 : 27  | length + 4         |         |
//!   +-----------+--------------+---------+--------------------+---------+-----
//! ```
//! Sources: `Documentation/trace/ring-buffer-design.rst`, `kernel/trace/ring_buffer.c`,
//! `include/linux/ring_buffer.h`. The decoder does not trust its input: malformed bytes give wrong
//! records or an early end, never a panic.

use crate::format::PageFormat;

/// Flag of the commit word: events were lost before this page (`RB_MISSED_EVENTS`).
const MISSED_EVENTS: u64 = 1 << 31;
/// Flag of the commit word: the number of lost events is stored after the page's data
/// (`RB_MISSED_STORED`).
const MISSED_STORED: u64 = 1 << 30;
/// Bits of the commit word that hold the length of the data (`RB_MISSED_MASK`).
const LENGTH_MASK: u64 = (1 << 20) - 1;

const PADDING: u32 = 29;
const TIME_EXTEND: u32 = 30;
const TIME_STAMP: u32 = 31;
/// Number of bits of the time difference in an event's header.
const TIME_BITS: u32 = 27;

/// One page of the kernel's trace ring buffer.
#[derive(Clone, Copy, Debug)]
pub struct RingPage<'a> {
    timestamp: u64,
    data: &'a [u8],
    /// Number of trace events that were lost before this page: `None` if none were lost, `Some(0)`
    /// if the number is unknown.
    pub lost: Option<u64>,
}

impl<'a> RingPage<'a> {
    /// Parses the header of a ring-buffer page; `None` if `bytes` is too short for one.
    pub fn parse(bytes: &'a [u8], format: &PageFormat) -> Option<Self> {
        let timestamp = u64_at(bytes, 0)?;
        let commit = format.commit.number(bytes)?;
        let data = bytes.get(format.data..)?;
        let length = usize::try_from(commit & LENGTH_MASK).ok()?;
        let lost = (commit & MISSED_EVENTS != 0).then(|| {
            if commit & MISSED_STORED != 0 {
                u64_at(data, length).unwrap_or(0)
            } else {
                0
            }
        });
        Some(Self {
            timestamp,
            data: &data[..length.min(data.len())],
            lost,
        })
    }

    /// Returns the records of the page, the oldest first.
    pub const fn records(&self) -> Records<'a> {
        Records {
            time: self.timestamp,
            rest: self.data,
        }
    }
}

fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    let bytes = bytes.get(offset..)?.first_chunk()?;
    Some(u64::from_ne_bytes(*bytes))
}

/// Iterator over the records of a ring-buffer page. An item is the record's time by the trace
/// clock, in ns, and the record's bytes.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    time: u64,
    rest: &'a [u8],
}

impl Records<'_> {
    fn word(&self, index: usize) -> Option<u32> {
        let bytes = self.rest.get(index * 4..)?.first_chunk()?;
        Some(u32::from_ne_bytes(*bytes))
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = (u64, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let header = self.word(0)?;
            // Bit fields `type_len:5, time_delta:27` of a little-endian machine.
            let (kind, delta) = (header & 31, u64::from(header >> 5));
            let (start, length, yields): (usize, usize, bool) = match kind {
                PADDING => {
                    let length = self.word(1)?;
                    // Without a time difference, the rest of the page is padding (`rb_null_event`);
                    // otherwise the event was discarded.
                    if delta == 0 {
                        self.rest = &[];
                        return None;
                    }
                    (4, length as usize, false)
                }
                TIME_EXTEND => {
                    let high = u64::from(self.word(1)?) << TIME_BITS;
                    self.time = self.time.wrapping_add(high);
                    (8, 0, false)
                }
                TIME_STAMP => {
                    // The time is absolute, but lacks the top five bits, which stay as they are.
                    let top = self.time & !((1 << 59) - 1);
                    self.time = top | u64::from(self.word(1)?) << TIME_BITS;
                    (8, 0, false)
                }
                // The length word includes its own length.
                0 => (8, (self.word(1)? as usize).checked_sub(4)?, true),
                words => (4, words as usize * 4, true),
            };
            self.time = self.time.wrapping_add(delta);
            let record = self.rest.get(start..start.checked_add(length)?);
            let Some(record) = record else {
                self.rest = &[];
                return None;
            };
            // Events are aligned to four bytes (`RB_ALIGNMENT`).
            let end = (start + length).next_multiple_of(4).min(self.rest.len());
            self.rest = &self.rest[end..];
            if yields {
                return Some((self.time, record));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page(commit: u64, body: &[u8]) -> Vec<u8> {
        let mut page = 1000_u64.to_ne_bytes().to_vec();
        page.extend(commit.to_ne_bytes());
        page.extend(body);
        page.resize(4096, 0);
        page
    }

    fn words(list: &[u32]) -> Vec<u8> {
        list.iter().flat_map(|w| w.to_ne_bytes()).collect()
    }

    #[test]
    fn every_kind_of_ring_buffer_record_header_is_decoded() {
        let body = words(&[
            2 | 5 << 5,
            0xaaaa,
            0xbbbb, // 8 bytes, 5 later
            TIME_EXTEND | 1 << 5,
            1, // time extend: 2^27 + 1
            PADDING | 7 << 5,
            8, // a discarded event: the length counts itself
            0xdddd,
            8 << 5,
            12,
            0xcccc,
            0xeeee, // length word: 8 bytes
            PADDING,
            0, // end
            1,
            0xffff,
        ]);
        let bytes = page(body.len() as u64, &body);
        let parsed = RingPage::parse(&bytes, &PageFormat::default()).unwrap();
        let records: Vec<_> = parsed.records().collect();
        assert_eq!(parsed.lost, None);
        assert_eq!(records.len(), 2);
        assert_eq!(records[0], (1005, &words(&[0xaaaa, 0xbbbb])[..]));
        assert_eq!(records[1].1, &words(&[0xcccc, 0xeeee])[..]);
        assert_eq!(records[1].0, 1005 + (1 << 27) + 1 + 7 + 8);
    }

    #[test]
    fn if_a_ring_buffer_page_stores_a_number_of_lost_events_they_are_counted() {
        let mut body = words(&[1, 0xaaaa]);
        body.extend(77_u64.to_ne_bytes());
        let flags = MISSED_EVENTS | MISSED_STORED;
        let stored = page(8 | flags, &body);
        let parsed = RingPage::parse(&stored, &PageFormat::default()).unwrap();
        assert_eq!(parsed.lost, Some(77));
        assert_eq!(parsed.records().count(), 1);
        let unknown = page(8 | MISSED_EVENTS, &body);
        let parsed = RingPage::parse(&unknown, &PageFormat::default()).unwrap();
        assert_eq!(parsed.lost, Some(0));
    }

    proptest! {
        #[test]
        fn parsing_arbitrary_bytes_as_a_ring_buffer_page_never_causes_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..4200)) {
            if let Some(page) = RingPage::parse(&bytes, &PageFormat::default()) {
                prop_assert!(page.records().count() <= bytes.len());
            }
        }

        #[test]
        fn a_ring_buffer_page_with_a_valid_length_and_an_arbitrary_body_never_causes_a_panic(body in proptest::collection::vec(any::<u8>(), 0..4080)) {
            let bytes = page(body.len() as u64, &body);
            let page = RingPage::parse(&bytes, &PageFormat::default()).unwrap();
            for (_, record) in page.records() {
                prop_assert!(record.len() <= body.len());
            }
        }
    }
}
