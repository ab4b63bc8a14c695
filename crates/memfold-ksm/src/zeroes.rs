//! Estimates, from a small sample, how many pages of a VM's mergeable memory contain only zeroes.
//! KSM itself counts zero pages only after it has merged them, and only with `use_zero_pages`.

use std::io;

use memfold_sys::memory;
use memfold_sys::pagemap::{Filter, Pagemap, Region, category};
use memfold_units::{Hva, PAGE_BYTES};
use rustix::process::Pid;

use super::ranges::Mapping;

/// Maximum number of pages that are read, one in each of equal steps. A single call reads all of
/// them (`IOV_MAX`).
const SAMPLE: u64 = 512;

/// 2^64 divided by the golden ratio. Its multiples are evenly spread (Knuth, The Art of Computer
/// Programming, 6.4).
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// Selects pages in memory that belong to no file and are not the kernel's zero page.
const ANONYMOUS: Filter = Filter {
    all_of: category::PRESENT,
    any_of: 0,
    none_of: category::FILE | category::ZERO,
};

/// Estimates, from a sample, the number of zero pages among the mergeable pages of `mappings` in
/// process `pid`.
///
/// # Errors
/// Fails if the process has ended or may not be read, or if the kernel has no `PAGEMAP_SCAN`
/// (before Linux 6.7).
pub fn pages(pid: i32, mappings: &[Mapping]) -> io::Result<u64> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    let pagemap = Pagemap::open(pid)?;
    let mut present = Vec::new();
    for mapping in mappings.iter().filter(|mapping| mapping.is_mergeable()) {
        present.extend(pagemap.scan(Hva(mapping.start), Hva(mapping.end), ANONYMOUS)?);
    }
    let all: u64 = present.iter().map(Region::pages).sum();
    let step = all.div_ceil(SAMPLE).max(1);
    let (mut chosen, mut before, mut number) = (Vec::new(), 0, 0_u64);
    for region in &present {
        // Each step has a pseudorandom place, so that a regular pattern of pages is sampled in
        // proportion.
        let place = |number: u64| number * step + (number.wrapping_mul(GOLDEN) >> 32) % step;
        while place(number) < before + region.pages() {
            let page = region.start.add_pages(place(number) - before);
            chosen.push((page, PAGE_BYTES));
            number += 1;
        }
        before += region.pages();
    }
    if chosen.is_empty() {
        return Ok(0);
    }
    let mut bytes = vec![0; chosen.len() * PAGE_BYTES];
    // Fewer bytes are read if some pages have disappeared meanwhile.
    let read = memory::read_many(pid, &chosen, &mut bytes)? / PAGE_BYTES;
    let pages = bytes.chunks_exact(PAGE_BYTES).take(read);
    let zeroes = pages.filter(|page| page.iter().all(|&byte| byte == 0));
    let share = zeroes.count() as f64 / read.max(1) as f64;
    // The result is at most `all`.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    Ok((all as f64 * share).round() as u64)
}

#[cfg(test)]
mod tests {
    use memfold_units::PAGE_SIZE;

    use super::*;

    #[test]
    fn zero_pages_in_a_sample_are_counted_only_if_their_memory_is_mergeable() {
        let page = PAGE_BYTES;
        let mut memory = vec![1_u8; 2001 * page];
        let first = (memory.as_ptr().expose_provenance() as u64).next_multiple_of(PAGE_SIZE);
        for zeroes in memory.chunks_exact_mut(page * 4) {
            zeroes[..page * 2].fill(0);
        }
        let mapping = Mapping {
            start: first,
            end: first + 2000 * PAGE_SIZE,
            flags: vec!["mg".into()],
            ..Mapping::default()
        };
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let found = pages(own, std::slice::from_ref(&mapping)).unwrap();
        // Of four pages that are not page-aligned, one or two pages are all zero.
        assert!((450..=1100).contains(&found), "{found} of 2000");
        memory.fill(1);
        assert_eq!(pages(own, std::slice::from_ref(&mapping)).unwrap(), 0);
        let not_offered = Mapping {
            flags: Vec::new(),
            ..mapping
        };
        memory.fill(0);
        assert_eq!(pages(own, &[not_offered]).unwrap(), 0);
        std::hint::black_box(memory);
    }
}
