//! Measures how fast a daemon answers while clients flood its API with requests.

use std::io::Read;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Counts the responses in the data from `reader`, until the data ends.
pub fn count_answers(mut reader: TcpStream, count: &AtomicU64) {
    const BEGIN: &[u8] = b"HTTP/1.1 ";
    let (mut some, mut text) = (vec![0; 1 << 16], Vec::new());
    while let Ok(read @ 1..) = reader.read(&mut some) {
        text.extend_from_slice(&some[..read]);
        let begun = text.windows(BEGIN.len()).filter(|&part| part == BEGIN);
        count.fetch_add(begun.count() as u64, Ordering::Relaxed);
        // The end of the text may be the beginning of a response.
        text.drain(..text.len().saturating_sub(BEGIN.len() - 1));
    }
}

/// Returns the largest number in a second, of a count that was sampled often.
pub fn best_second(seen: &[(Instant, u64)]) -> f64 {
    let rates = seen.iter().enumerate().filter_map(|(i, (from, before))| {
        let mut later = seen[i..].iter();
        let (to, then) = later.find(|(at, _)| *at - *from >= Duration::from_secs(1))?;
        Some((then - before) as f64 / (*to - *from).as_secs_f64())
    });
    rates.fold(0.0, f64::max)
}
