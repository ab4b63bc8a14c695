//! Tests that decode raw pages of real kernels' trace ring buffers.
//!
//! `fixtures/KERNEL/` was recorded in Debian guests by the tests in `guest/` (`MEMFOLD_FIXTURES`).
//! It contains event formats, and two pages with the events of a file of 40 pages that was written,
//! synced and removed.

use std::fs;
use std::path::{Path, PathBuf};

use memfold_agent::format::PageFormat;
use memfold_agent::trace::{Event, EventDecoder, Round, What, decode_page};
use proptest::prelude::*;

fn directory(kernel: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(kernel)
}

fn decoder(kernel: &str) -> (EventDecoder, PageFormat) {
    let directory = directory(kernel);
    let decoder = EventDecoder::new(|event| {
        fs::read_to_string(directory.join(event.rsplit('/').next()?)).ok()
    });
    let header = fs::read_to_string(directory.join("header_page")).unwrap();
    (decoder.unwrap(), PageFormat::parse(&header).unwrap())
}

fn base64(text: &str) -> Vec<u8> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits: Vec<u8> = text.bytes().filter_map(digit).collect();
    let bytes = digits.chunks(4).flat_map(|four| {
        let word = four.iter().fold(0_u32, |w, d| w << 6 | u32::from(*d)) << (6 * (4 - four.len()));
        word.to_be_bytes()[1..four.len()].to_vec()
    });
    bytes.collect()
}

fn pages(kernel: &str) -> Vec<u8> {
    base64(&fs::read_to_string(directory(kernel).join("pages.base64")).unwrap())
}

fn events(kernel: &str) -> Vec<Event> {
    let (decoder, format) = decoder(kernel);
    let mut round = Round::default();
    for page in pages(kernel).chunks(4096) {
        decode_page(page, &format, &decoder, &mut round);
    }
    assert_eq!(round.lost, 0);
    assert!(round.events.windows(2).all(|w| w[0].time <= w[1].time));
    round.events
}

#[test]
fn trace_events_of_added_dirtied_and_deleted_pages_are_decoded_for_linux_6_1_and_6_12() {
    for kernel in ["6.1", "6.12"] {
        let events = events(kernel);
        let adds = |inode| {
            events
                .iter()
                .filter(move |e| e.what == What::Add && e.inode == inode)
        };
        let written = events
            .iter()
            .find(|e| e.what == What::Dirty && adds(e.inode).count() == 40);
        let inode = written.expect("the file of 40 pages").inode;
        let pages = |what| -> Vec<u64> {
            events
                .iter()
                .filter(|e| e.what == what && e.inode == inode)
                .map(|e| e.page)
                .collect()
        };
        let all: Vec<u64> = (0..40).collect();
        assert_eq!(pages(What::Add), all, "{kernel}");
        assert_eq!(pages(What::Dirty), all, "{kernel}");
        // A disk of Debian's guests: virtio's major number 254.
        assert!(adds(inode).all(|e| e.device == 254 << 20 && e.order == 0 && e.pfn > 0));
        let removed = pages(What::Delete);
        assert!(removed.iter().all(|p| all.contains(p)));
        let at = |what| {
            events
                .iter()
                .position(|e| e.what == what && e.inode == inode)
        };
        assert!(at(What::Add) < at(What::Dirty));
        if let Some(written) = at(What::Written) {
            assert!(at(What::Dirty) < Some(written));
        }
    }
}

proptest! {
    #[test]
    fn a_damaged_ring_buffer_page_never_causes_a_panic(at in 0_usize..8192, value: u8, cut in 0_usize..8192) {
        let (decoder, format) = decoder("6.12");
        let mut bytes = pages("6.12");
        let length = bytes.len();
        bytes[at % length] = value;
        bytes.truncate(cut.max(1));
        let mut round = Round::default();
        for page in bytes.chunks(4096) {
            decode_page(page, &format, &decoder, &mut round);
        }
        prop_assert!(round.events.len() <= 8192 / 8);
    }
}
