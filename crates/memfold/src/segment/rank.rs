//! Which files are worth their place in a segment, by the pages that VMs really cache.
//!
//! A file of `n` pages of which each of `v` VMs caches `t` costs `v * t` pages in guest page caches. In a segment, its touched pages are
//! there once (at most `n`, at least the `t` that most have), and each VM spends 64 bytes on describing each of its `n` pages:
//! `net = v * t - t - v * n / 64`. What one VM alone uses gains nothing. This is the choice by file that study A leaves open.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use memfold_units::{ByteSize, PAGE_SIZE};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::SegmentError;
use crate::fold::FileUse;

/// A file, and what it would bring in a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Ranked {
    /// Absolute path in the guests.
    pub path: String,
    /// Its length in bytes.
    pub file_bytes: u64,
    /// Bytes of it that VMs cache, on average over those that cache any.
    pub touched_bytes: u64,
    /// VMs that cache any of it.
    pub vms: u64,
    /// Memory that it would save over all of these VMs, what describing it costs taken off; negative: it costs more than it saves.
    pub net_bytes: i64,
}

/// Whether a path is one of those that `include` names, or of programs and libraries if it names none.
pub fn chosen(include: &[String]) -> Result<impl Fn(&[u8]) -> bool + use<>, SegmentError> {
    let globs = if include.is_empty() {
        super::tree::globs(&super::build::PROGRAMS.map(String::from))?
    } else {
        super::tree::globs(include)?
    };
    Ok(move |path: &[u8]| globs.is_match(Path::new(OsStr::from_bytes(path))))
}

/// Ranks files by their gain for each byte of the image, best first; `vms`: how many VMs are to map the segment, by default as many as cache
/// a file. Paths that are not UTF-8 are left out, as no glob or list could name them.
#[must_use]
pub fn rank(uses: &[FileUse], vms: Option<u64>) -> Vec<Ranked> {
    let mut files: BTreeMap<&[u8], (u64, Vec<u64>)> = BTreeMap::new();
    for used in uses.iter().filter(|used| used.cached_pages > 0) {
        let file = files.entry(&used.path).or_default();
        // Versions of a file differ; the largest has room for all.
        file.0 = file.0.max(used.file_bytes);
        file.1.push(used.cached_pages);
    }
    let mut ranked: Vec<Ranked> = files
        .into_iter()
        .filter_map(|(path, (file_bytes, cached))| {
            let path = String::from_utf8(path.to_vec()).ok()?;
            let most = cached.iter().max().copied().unwrap_or(0);
            let mean = cached.iter().sum::<u64>() / cached.len() as u64;
            let users = vms.unwrap_or(cached.len() as u64);
            let pages = file_bytes.div_ceil(PAGE_SIZE).max(most);
            // Wide: guests say how long their files are.
            let (users, page) = (i128::from(users), i128::from(PAGE_SIZE));
            let gain = (users * i128::from(mean) - i128::from(most)) * page;
            let cost = users * i128::from(pages) * page / 64;
            let net = (gain - cost).clamp(i128::from(i64::MIN), i128::from(i64::MAX));
            Some(Ranked {
                path,
                file_bytes,
                touched_bytes: mean.saturating_mul(PAGE_SIZE),
                vms: cached.len() as u64,
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

/// What the ranked files bring together: bytes in an image, and memory saved, of those that gain anything.
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
    fn gain_is_what_all_cache_less_one_copy_and_less_what_describes_it() {
        let uses = [
            used("a", "/usr/lib/x", 64, 40),
            used("b", "/usr/lib/x", 64, 40),
        ];
        let ranked = rank(&uses, None);
        assert_eq!(ranked[0].net_bytes, (80 - 40 - 2) * 4096);
        assert_eq!((ranked[0].vms, ranked[0].touched_bytes), (2, 40 * 4096));
        // Ten VMs like these.
        assert_eq!(rank(&uses, Some(10))[0].net_bytes, (400 - 40 - 10) * 4096);
    }

    #[test]
    fn what_one_vm_alone_uses_gains_nothing_and_dense_files_come_first() {
        let uses = [
            used("a", "/usr/alone", 10, 10),
            used("a", "/usr/sparse", 10_000, 200),
            used("b", "/usr/sparse", 10_000, 200),
            used("a", "/usr/dense", 10, 10),
            used("b", "/usr/dense", 10, 10),
            used("b", "/usr/untouched", 10, 0),
        ];
        let ranked = rank(&uses, None);
        let order: Vec<&str> = ranked.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(order, ["/usr/dense", "/usr/sparse", "/usr/alone"]);
        assert!(ranked[0].net_bytes > 0 && ranked[1].net_bytes < 0 && ranked[2].net_bytes < 0);
        let (bytes, net) = sums(&ranked);
        assert_eq!((bytes.0, net), (10 * 4096, ranked[0].net_bytes));
    }
}
