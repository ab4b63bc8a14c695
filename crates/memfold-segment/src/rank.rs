//! Ranks files of the VMs by the memory that they would save if they were in a segment, from the
//! pages that VMs cache now.
//!
//! Let a file have `n` pages, and let `u` of `v` VMs cache `t` pages of it each: together `u * t`
//! pages. In a segment, these pages exist once for all VMs of a trust domain (at least `t` pages).
//! But every VM that maps the segment spends 64 bytes (`struct page`) on each of the `n` pages. So
//! the segment saves `u * t - t - v * n / 64` pages. A file that only one VM uses saves nothing.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use memfold_fold::FileUse;
use memfold_units::{ByteSize, PAGE_SIZE};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::error::SegmentError;
use super::tree::{self, PROGRAMS};

/// A file that guests cache, and the memory that the host would save if the file were in a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Ranked {
    /// Absolute path of the file in the guests.
    pub path: String,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Average number of the file's bytes that a VM caches, over the VMs that cache a part of the
    /// file.
    pub touched_bytes: u64,
    /// Number of VMs that cache a part of the file.
    pub vms: u64,
    /// Memory that the host would save if the file were in a segment, in bytes. The RAM that guests
    /// need to describe the segment's pages is subtracted, so the value may be negative.
    pub net_bytes: i64,
}

/// Returns a function that tells whether a path matches one of the glob patterns in `include`.
/// Without patterns, the function tells whether the path belongs to programs and libraries (`/usr`,
/// `/opt`).
pub fn chosen(include: &[String]) -> Result<impl Fn(&[u8]) -> bool + use<>, SegmentError> {
    let globs = if include.is_empty() {
        tree::globs(&PROGRAMS.map(String::from))?
    } else {
        tree::globs(include)?
    };
    Ok(move |path: &[u8]| globs.is_match(Path::new(OsStr::from_bytes(path))))
}

/// Numbers of pages of one file that VMs cache.
#[derive(Debug, Default)]
struct Cached<'a> {
    file_bytes: u64,
    vms: u64,
    pages: u64,
    /// Most pages that one VM caches, by trust domain, because each domain has a segment of its
    /// own.
    most: BTreeMap<&'a str, u64>,
}

/// Ranks files by the memory that they would save in a segment for each byte of the image, best
/// first. `looked_at` is the number of VMs whose caches `uses` describes. `vms` is the number of
/// similar VMs that will map the segment, by default `looked_at`. Paths that are not UTF-8 are left
/// out, because no glob pattern or list could name them.
#[must_use]
pub fn rank(uses: &[FileUse], looked_at: u64, vms: Option<u64>) -> Vec<Ranked> {
    let mut files: BTreeMap<&[u8], Cached> = BTreeMap::new();
    for used in uses.iter().filter(|used| used.cached_pages > 0) {
        let file = files.entry(&used.path).or_default();
        // VMs may have different versions of a file; the largest one counts.
        file.file_bytes = file.file_bytes.max(used.file_bytes);
        file.vms += 1;
        file.pages = file.pages.saturating_add(used.cached_pages);
        let most = file.most.entry(&used.domain).or_default();
        *most = (*most).max(used.cached_pages);
    }
    let mut ranked: Vec<Ranked> = files
        .into_iter()
        .filter_map(|(path, cached)| {
            let path = String::from_utf8(path.to_vec()).ok()?;
            // There are at least as many VMs as cache the file.
            let looked_at = looked_at.max(cached.vms);
            let users = i128::from(vms.unwrap_or(looked_at));
            let pages = cached.file_bytes.div_ceil(PAGE_SIZE);
            let pages = pages.max(cached.most.values().max().copied().unwrap_or(0));
            // The numbers are wide, because guests report the lengths of files. The part of VMs
            // that caches the file is assumed to be that of the examined VMs.
            let page = i128::from(PAGE_SIZE);
            let without = users * i128::from(cached.pages) * page / i128::from(looked_at);
            let once: i128 = cached.most.values().map(|&most| i128::from(most)).sum();
            let cost = users * i128::from(pages) * page / 64;
            let net = without - once * page - cost;
            let net = net.clamp(i128::from(i64::MIN), i128::from(i64::MAX));
            Some(Ranked {
                path,
                file_bytes: cached.file_bytes,
                touched_bytes: (cached.pages / cached.vms).saturating_mul(PAGE_SIZE),
                vms: cached.vms,
                net_bytes: i64::try_from(net).unwrap_or(i64::MIN),
            })
        })
        .collect();
    let density = |file: &Ranked| file.net_bytes as f64 / file.file_bytes.max(PAGE_SIZE) as f64;
    ranked.sort_by(|a, b| {
        density(b)
            .total_cmp(&density(a))
            .then_with(|| a.path.cmp(&b.path))
    });
    ranked
}

/// Returns two totals over those ranked files that would save memory in a segment: their size in
/// the image, and the saved bytes.
#[must_use]
pub fn sums(ranked: &[Ranked]) -> (ByteSize, i64) {
    let gaining = || ranked.iter().filter(|file| file.net_bytes > 0);
    let bytes = gaining()
        .map(|file| file.file_bytes.div_ceil(PAGE_SIZE))
        .fold(0_u64, u64::saturating_add)
        .saturating_mul(PAGE_SIZE);
    let net = gaining().map(|file| file.net_bytes);
    (ByteSize(bytes), net.fold(0, i64::saturating_add))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(vm: &str, path: &str, file_pages: u64, cached_pages: u64) -> FileUse {
        FileUse {
            vm: vm.into(),
            domain: "blue".into(),
            path: path.into(),
            file_bytes: file_pages * PAGE_SIZE,
            cached_pages,
        }
    }

    #[test]
    fn the_saving_of_a_segment_file_is_its_cached_size_minus_one_copy_and_metadata() {
        let uses = [
            used("a", "/usr/lib/x", 64, 40),
            used("b", "/usr/lib/x", 64, 40),
        ];
        let ranked = rank(&uses, 2, None);
        assert_eq!(ranked[0].net_bytes, (80 - 40 - 2) * 4096);
        assert_eq!((ranked[0].vms, ranked[0].touched_bytes), (2, 40 * 4096));
        // The segment is for ten VMs.
        assert_eq!(
            rank(&uses, 2, Some(10))[0].net_bytes,
            (400 - 40 - 10) * 4096
        );
        // Two of four VMs do not cache the file, but also describe its pages.
        assert_eq!(rank(&uses, 4, None)[0].net_bytes, (80 - 40 - 4) * 4096);
        assert_eq!(rank(&uses, 4, Some(8))[0].net_bytes, (160 - 40 - 8) * 4096);
    }

    #[test]
    fn files_that_several_vms_use_and_cache_completely_rank_first_for_a_segment() {
        let uses = [
            used("a", "/usr/alone", 10, 10),
            used("a", "/usr/sparse", 10_000, 200),
            used("b", "/usr/sparse", 10_000, 200),
            used("a", "/usr/dense", 10, 10),
            used("b", "/usr/dense", 10, 10),
            used("b", "/usr/untouched", 10, 0),
        ];
        let ranked = rank(&uses, 2, None);
        let order: Vec<&str> = ranked.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(order, ["/usr/dense", "/usr/sparse", "/usr/alone"]);
        assert!(ranked[0].net_bytes > 0 && ranked[1].net_bytes < 0 && ranked[2].net_bytes < 0);
        let (bytes, net) = sums(&ranked);
        assert_eq!((bytes.0, net), (10 * 4096, ranked[0].net_bytes));
    }

    #[test]
    fn each_trust_domain_needs_a_separate_copy_of_a_segment_file() {
        let mut uses = [used("a", "/usr/x", 64, 64), used("b", "/usr/x", 64, 64)];
        assert_eq!(rank(&uses, 2, None)[0].net_bytes, (128 - 64 - 2) * 4096);
        uses[1].domain = "red".into();
        assert_eq!(rank(&uses, 2, None)[0].net_bytes, -2 * 4096);
    }

    #[test]
    fn a_file_cached_by_one_of_six_vms_saves_nothing_in_a_segment() {
        let uses = [used("a", "/usr/rare", 64, 64)];
        assert!(rank(&uses, 6, Some(6))[0].net_bytes < 0);
        assert!(rank(&uses, 1, Some(6))[0].net_bytes > 0);
    }
}
