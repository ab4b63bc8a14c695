//! State of memfold's library in QEMU: RAM blocks, page stores and statistics. The daemon's orders
//! and QEMU's discards of memory change this state.

use std::sync::Arc;
use std::time::Duration;

use memfold_sys::region::Area;
use memfold_sys::userfaultfd::Userfaultfd;
use memfold_wire::library::{HISTOGRAM_BUCKETS, Stats};

use crate::copy_before_write::Past;
use crate::freeze::Staging;
use crate::ram::Ram;
use crate::stores::Stores;

/// State of memfold's library that orders and discards change, protected by one lock.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) ram: Ram,
    pub(crate) stores: Stores,
    pub(crate) staging: Option<Staging>,
    pub(crate) stats: Stats,
    /// Areas that are registered for write tracking.
    pub(crate) tracked: Vec<Area>,
    pub(crate) past: Option<Past>,
    /// Userfaultfd on which threads wait for pages that have yet to arrive.
    pub(crate) waiting: Option<Arc<Userfaultfd>>,
}

/// Records in the statistics how long a run was frozen.
pub(crate) fn record_freeze(stats: &mut Stats, frozen: Duration) {
    let ns = u64::try_from(frozen.as_nanos()).unwrap_or(u64::MAX).max(1);
    let bucket = (ns.ilog2() as usize).min(HISTOGRAM_BUCKETS - 1);
    stats.freeze_histogram[bucket] += 1;
    stats.freeze_max_ns = stats.freeze_max_ns.max(ns);
}
