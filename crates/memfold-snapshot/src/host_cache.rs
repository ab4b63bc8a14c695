//! Reports how much of a VM's disks the host's page cache holds.

use std::fs::File;

use memfold_sys::page_cache;
use memfold_vm::{DiskFormat, VmSpec};

use super::disk_chain::chain;

/// Returns the part, from 0 to 1, of so many pages of a VM's disks that the host's page cache
/// holds. It assumes that the host has cached what the guest has cached. Before Linux 6.5, which
/// does not report it, the disks' cache modes decide: all or nothing.
pub fn cached_part(spec: &VmSpec, pages: u64) -> f64 {
    cached_pages(spec).map_or_else(
        || f64::from(u8::from(spec.disks.iter().any(|disk| !disk.cache.direct()))),
        |cached| (cached as f64 / pages.max(1) as f64).min(1.0),
    )
}

/// Pages of a VM's disks, and of what these are built on, in the host's page cache. `None`: the
/// kernel does not report it.
fn cached_pages(spec: &VmSpec) -> Option<u64> {
    let mut pages = 0;
    for disk in &spec.disks {
        let files = match disk.format() {
            DiskFormat::Qcow2 => chain(&disk.path).unwrap_or_default(),
            DiskFormat::Raw => vec![disk.path.clone()],
        };
        for file in files.iter().filter_map(|path| File::open(path).ok()) {
            pages += page_cache::cached_pages(&file).ok()?;
        }
    }
    Some(pages)
}
