//! Reads in which physical page frames of the host a VM's RAM is. memfold's self-test compares the
//! frame numbers of two VMs: if the two share a page, both have the same frame for it.

use std::io;

use memfold_sys::pagemap::Filter;
use memfold_units::Pfn;
use memfold_vm::RamLayout;

use super::memory::ram_ranges;
use super::read::{ReadError, pagemap_of};

/// Number of pages whose frame numbers are read at once.
const BATCH_PAGES: u64 = 1 << 16;

/// Returns the numbers of the host's page frames that hold the guest pages `[first, first + pages)`
/// of the VM whose QEMU is process `pid`. `None` stands for a page that is outside RAM, is not in
/// memory, or whose frame number may not be read (reading it needs root). The zero page has a frame
/// number like any other.
pub fn frames(
    pid: i32,
    layout: &RamLayout,
    first: Pfn,
    pages: u64,
) -> Result<Vec<Option<u64>>, ReadError> {
    let failed = |source| ReadError::Pagemap { pid, source };
    let pagemap = pagemap_of(pid)?;
    let mut found = Vec::new();
    let mut at = 0;
    while at < pages {
        let Some((hva, run)) = layout.hva_of(first.add_pages(at)) else {
            found.push(None);
            at += 1;
            continue;
        };
        let run = run.min(pages - at).min(BATCH_PAGES);
        let count = usize::try_from(run).unwrap_or(usize::MAX);
        found.extend(pagemap.frames(hva, count).map_err(failed)?);
        at += run;
    }
    Ok(found)
}

/// Returns the number of physical pages that are mapped in the guest RAM of both VMs, which are
/// given by QEMU's process number and the RAM layout. The zero page is not counted, because every
/// process on the host shares it.
pub fn shared_frames(a: (i32, &RamLayout), b: (i32, &RamLayout)) -> Result<u64, ReadError> {
    let (a, b) = (all_frames(a.0, a.1)?, all_frames(b.0, b.1)?);
    let mut b = b.iter().peekable();
    let mut shared = 0;
    for frame in &a {
        while b.next_if(|other| *other < frame).is_some() {}
        if b.next_if_eq(&frame).is_some() {
            shared += 1;
        }
    }
    Ok(shared)
}

/// Returns the frame numbers of all guest RAM in memory, sorted, each once, without the zero page.
fn all_frames(pid: i32, layout: &RamLayout) -> Result<Vec<u64>, ReadError> {
    let failed = |source| ReadError::Pagemap { pid, source };
    let pagemap = pagemap_of(pid)?;
    let (mut all, mut hidden) = (Vec::new(), 0);
    for (start, end) in ram_ranges(layout) {
        for region in pagemap.scan(start, end, Filter::RESIDENT).map_err(failed)? {
            let mut at = 0;
            while at < region.pages() {
                let run = (region.pages() - at).min(BATCH_PAGES);
                let count = usize::try_from(run).unwrap_or(usize::MAX);
                for frame in pagemap
                    .frames(region.start.add_pages(at), count)
                    .map_err(failed)?
                {
                    match frame {
                        Some(frame) => all.push(frame),
                        None => hidden += 1,
                    }
                }
                at += run;
            }
        }
    }
    // If frame numbers are hidden, the result "nothing shared" would be wrong.
    if all.is_empty() && hidden > 0 {
        return Err(failed(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "frame numbers need root (CAP_SYS_ADMIN)",
        )));
    }
    all.sort_unstable();
    all.dedup();
    Ok(all)
}
