//! Estimates how much of a VM's disks is in the host's page cache. The daemon uses this to predict
//! how long a save takes that compares the VM's memory with its disks.

use std::fs::File;

use memfold_sys::page_cache;
use memfold_vm::{DiskFormat, VmSpec};

use super::disk_chain::chain;

/// Estimates which part (0 to 1) of `pages` pages in the guest's page cache the host's page cache
/// holds, too: the number of the disks' pages in the host's page cache, divided by `pages`. Before
/// Linux 6.5, the kernel does not report this number. The result is then 0 if all disks use direct
/// I/O, otherwise 1.
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
