//! When which VM is due for which work of the fold engine, in queues sorted by time. The engine
//! looks for due work at each message of an agent. A search of all VMs at each message would cost
//! time in proportion to the square of their number. The times come from [`super::due`].

use std::time::Instant;

use super::guest::VmId;
use super::time_queue::TimeQueue;

/// Kinds of work for which a VM can be due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Settled hints that suffice for a batch.
    FullBatch,
    /// Settled hints that should be gathered for a while.
    SmallBatch,
    /// A read of the kernel's page tables.
    Sync,
    /// A stop of the VM, to fold pages again.
    Pause,
    /// The next part of a search for zero pages.
    Zero,
    /// The next part of a fold-back pass.
    FoldBack,
}

/// Number of kinds of work.
pub(super) const KINDS: usize = 6;

/// The times at which VMs and trust domains are due.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    /// A queue of VMs for each [`Work`].
    vms: [TimeQueue<VmId>; KINDS],
    /// Trust domains with pairs of files that wait to be compared.
    pub pairs: TimeQueue<String>,
    /// Trust domains whose page stores may have pages that no VM needs any more.
    pub reclaims: TimeQueue<String>,
}

impl Schedule {
    /// Returns the time at which the first VM is due for a kind of work; `None` if no VM waits for
    /// it.
    pub fn first(&self, work: Work) -> Option<Instant> {
        self.vms[work as usize].first()
    }

    /// Returns the VMs that are due at `now`, the one that has been due for longest first.
    pub fn due(&self, work: Work, now: Instant) -> impl Iterator<Item = VmId> + '_ {
        self.vms[work as usize].due(now).copied()
    }

    /// Sets when a VM is due for each kind of work; `None`: not at all.
    pub fn set(&mut self, id: VmId, times: [Option<Instant>; KINDS]) {
        for (queue, due) in self.vms.iter_mut().zip(times) {
            queue.set(&id, due);
        }
    }
}
