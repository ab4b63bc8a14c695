//! Fuzzes memfold's parsers without compiler instrumentation: changes valid inputs at random. An
//! input that leads to a new kind of result is kept and changed further.

use std::time::{Duration, Instant};

use crate::subject::Subject;

/// Largest number of inputs that are kept.
const POOL: usize = 2048;
/// Longest input, in bytes.
const MAX_BYTES: usize = 16 << 10;

/// Counters of a fuzzing run.
#[derive(Clone, Copy, Debug)]
pub struct Fuzzed {
    /// Number of inputs on which the parser has run.
    pub inputs: u64,
    /// Number of different kinds of results of the parser.
    pub results: usize,
}

/// Random number generator (xorshift64).
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 3
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % (end.max(1) as u64)).unwrap_or(0)
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }
}

/// Runs a parser (`subject`) on randomly changed inputs for `time`. `before` is called with each
/// input before the parser runs, so that the caller knows which input caused a panic.
pub fn fuzz(subject: Subject, time: Duration, seed: u64, mut before: impl FnMut(&[u8])) -> Fuzzed {
    let mut random = Random(seed | 1);
    let mut pool = (subject.seeds)();
    let mut results = std::collections::BTreeSet::new();
    for input in &pool {
        before(input);
        results.insert((subject.run)(input));
    }
    let end = Instant::now() + time;
    let mut inputs = pool.len() as u64;
    while Instant::now() < end {
        let mut input = pool[random.below(pool.len())].clone();
        let other = random.below(pool.len());
        for _ in 0..=random.below(4) {
            change(&mut input, &pool[other], &mut random);
        }
        input.truncate(MAX_BYTES);
        if random.below(4) > 0 {
            repair_frame(&mut input);
        }
        before(&input);
        inputs += 1;
        if results.insert((subject.run)(&input)) && pool.len() < POOL {
            pool.push(input);
        }
    }
    Fuzzed {
        inputs,
        results: results.len(),
    }
}

/// Changes an input once, as faulty programs might: wrong bytes, wrong lengths, wrong copies.
fn change(input: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    const NUMBERS: [u64; 7] = [0, 1, 0xFFFF_FFFF, 1 << 31, 1 << 52, u64::MAX, !0xFFF];
    const EDGES: [u8; 12] = [0, 1, 4, 31, 127, 128, 129, 254, 255, b'0', b' ', b'\n'];
    let at = random.below(input.len());
    let length = 1 + random.below((input.len() - at).clamp(1, 64));
    let end = (at + length).min(input.len());
    match random.below(14) {
        0 if !input.is_empty() => input[at] ^= 1 << random.below(8),
        1 if !input.is_empty() => input[at] = EDGES[random.below(EDGES.len())],
        2 => {
            input.drain(at..end);
        }
        3 => {
            let copy = input[at..end].to_vec();
            input.splice(at..at, copy);
        }
        4 => {
            let more: Vec<u8> = (0..length).map(|_| random.byte()).collect();
            input.splice(at..at, more);
        }
        5 => input.truncate(at),
        // A number in eight bytes, at one of the edges of its range.
        6 => {
            let bytes = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
            let end = (at + bytes.len()).min(input.len());
            input.splice(at..end, bytes);
        }
        // The same, as postcard and texts write it.
        7 => {
            let more: &[u8] = match random.below(4) {
                0 => &[0xFF, 0xFF, 0xFF, 0xFF, 0x0F],
                1 => &[0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01],
                2 => b"18446744073709551615",
                _ => b"ffffffffffffffff",
            };
            input.splice(at..at, more.iter().copied());
        }
        8 => {
            let from = random.below(other.len());
            input.splice(at..end, other[from..].iter().copied().take(256));
        }
        _ => change_words(input, other, at, random),
    }
}

/// Changes an input that is a text: whole words, lines and fields, which changed bytes would break.
fn change_words(input: &mut Vec<u8>, other: &[u8], at: usize, random: &mut Random) {
    const NUMBERS: [&[u8]; 10] = [
        b"0",
        b"1",
        b"-1",
        b"4096",
        b"65536",
        b"4294967295",
        b"18446744073709551615",
        b"9223372036854775808",
        b"1e9",
        b"null",
    ];
    let is_line = |byte: u8| byte != b'\n' && byte != 0;
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    let is_field = |byte: u8| is_line(byte) && !matches!(byte, b',' | b' ' | b'{' | b'}');
    let here = |is_part: &dyn Fn(u8) -> bool| around(input, at, is_part);
    let there = |is_part: &dyn Fn(u8) -> bool, random: &mut Random| {
        let range = around(other, random.below(other.len()), is_part);
        other[range].to_vec()
    };
    match random.below(8) {
        0 => drop(input.splice(here(&is_word), there(&is_word, random))),
        1 => drop(input.splice(
            here(&is_word),
            NUMBERS[random.below(NUMBERS.len())].to_vec(),
        )),
        2 => drop(input.splice(here(&is_field), there(&is_field, random))),
        3 => drop(input.splice(here(&is_line), there(&is_line, random))),
        // A line or field twice, after another one, or not at all.
        4 => {
            let line = [there(&is_line, random), b"\n".to_vec()].concat();
            let start = here(&is_line).start;
            input.splice(start..start, line);
        }
        5 => {
            let field = [b",".to_vec(), there(&is_field, random)].concat();
            let end = here(&is_field).end;
            input.splice(end..end, field);
        }
        6 => drop(input.drain(here(&is_line))),
        _ => drop(input.drain(here(&is_field))),
    }
}

/// Returns the range of neighbouring bytes around `at` of which `is_part` is true.
fn around(bytes: &[u8], at: usize, is_part: &dyn Fn(u8) -> bool) -> std::ops::Range<usize> {
    let at = at.min(bytes.len());
    let start = bytes[..at].iter().rposition(|byte| !is_part(*byte));
    let length = bytes[at..].iter().position(|byte| !is_part(*byte));
    let end = length.map_or(bytes.len(), |length| at + length);
    start.map_or(0, |start| start + 1)..end
}

/// Writes the right length into the header of a frame. Otherwise most changed frames would be
/// refused because of their header.
fn repair_frame(input: &mut [u8]) {
    if let Some((header, body)) = input.split_first_chunk_mut::<4>() {
        if let (Ok(length), true) = (u32::try_from(body.len()), header[2] == 0 && header[3] == 0) {
            *header = length.to_le_bytes();
        }
    }
}
