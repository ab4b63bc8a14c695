//! Counts the guests of this host that are short of memory. If there are any, the host lends less
//! RAM to other hosts, because its own VMs will soon need the RAM.
//!
//! QEMU gets the figures from the guest's balloon driver (`guest-stats` of `virtio-balloon-pci`,
//! `docs/interop/virtio-balloon-stats.rst` in QEMU), without an agent. A guest can report false
//! figures; then this host only lends less.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use memfold_vm::{Qmp, QmpError};
use serde_json::{Value, json};

use crate::machine::Machine;
use crate::mechanisms::Mechanisms;
use crate::threads;

/// Time between two queries of guests' memory figures.
const LOOK: Duration = Duration::from_secs(5);

/// QOM path of the balloon in VMs that memfold starts.
const BALLOON: &str = "/machine/peripheral/balloon0";

/// Divisor: a guest is short of memory if less than 1/`SHORT_PART` of its memory is available.
const SHORT_PART: u64 = 16;

/// A guest is short of memory if it read this many bytes from its swap between two queries (0.2
/// MiB/s).
const SWAPPED_IN: u64 = 1 << 20;

/// Memory figures that a guest reports, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct GuestMemory {
    total: u64,
    available: u64,
    /// Bytes read from swap since the guest's boot.
    swapped_in: u64,
}

impl GuestMemory {
    /// Reads QEMU's answer; `None` if the guest has reported nothing yet, or if its kernel lacks
    /// these figures.
    fn read(answer: &Value) -> Option<Self> {
        let stats = &answer["stats"];
        // QEMU reports an unknown value as the largest number.
        let number = |name: &str| stats[name].as_u64().filter(|value| *value != u64::MAX);
        Some(Self {
            total: number("stat-total-memory").filter(|total| *total > 0)?,
            available: number("stat-available-memory")?,
            swapped_in: number("stat-swap-in").unwrap_or(0),
        })
    }

    fn is_short(&self, before: Option<&Self>) -> bool {
        let swaps = before
            .is_some_and(|before| self.swapped_in.saturating_sub(before.swapped_in) >= SWAPPED_IN);
        swaps || self.available < self.total / SHORT_PART
    }
}

fn ask(qmp: &mut Qmp) -> Result<Option<GuestMemory>, QmpError> {
    let answer = qmp.execute(
        "qom-get",
        json!({ "path": BALLOON, "property": "guest-stats" }),
    )?;
    Ok(GuestMemory::read(&answer))
}

/// Sets how often QEMU asks the guest for figures, in seconds; 0 stops the queries.
fn ask_each(qmp: &mut Qmp, seconds: u64) -> Result<(), QmpError> {
    let property = "guest-stats-polling-interval";
    qmp.execute(
        "qom-set",
        json!({ "path": BALLOON, "property": property, "value": seconds }),
    )
    .map(drop)
}

/// Starts the thread that queries guests until the daemon ends.
pub(crate) fn begin(below: &Arc<Mechanisms>) -> io::Result<()> {
    let mut known = BTreeMap::new();
    threads::repeat("guests", LOOK, below, move |below| look(below, &mut known))
}

/// Queries all guests once. `known`: figures of the last query, by the machine's number.
fn look(below: &Mechanisms, known: &mut BTreeMap<u32, Option<GuestMemory>>) {
    let lends = below.lending.status().is_some();
    let has_balloon = |machine: &Machine| machine.vm().spec().is_some_and(|spec| spec.balloon);
    let machines = below.registry.machines();
    known.retain(|id, _| machines.iter().any(|machine| machine.id() == *id));
    let mut short = 0;
    for machine in machines.iter().filter(|machine| has_balloon(machine)) {
        let mut qmp = machine.monitor();
        if !lends {
            if known.remove(&machine.id()).is_some() {
                // If this fails, QEMU still asks the guest, which costs little.
                let _ = ask_each(&mut qmp, 0);
            }
            continue;
        }
        if !known.contains_key(&machine.id()) && ask_each(&mut qmp, LOOK.as_secs()).is_err() {
            continue;
        }
        // A guest that cannot be asked now is asked again at the next query.
        let said = ask(&mut qmp).ok().flatten();
        drop(qmp);
        let before = known.insert(machine.id(), said).flatten();
        short += u32::from(said.is_some_and(|said| said.is_short(before.as_ref())));
    }
    below.lending.set_short_guests(short);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_has_little_available_memory_or_swaps_in_is_short_of_memory() {
        const MIB: u64 = 1 << 20;
        let answer = |available: u64, swapped_in: u64| {
            json!({ "last-update": 1, "stats": {
                "stat-total-memory": 512 * MIB, "stat-available-memory": available,
                "stat-swap-in": swapped_in, "stat-htlb-pgfail": u64::MAX,
            } })
        };
        let said =
            |available, swapped_in| GuestMemory::read(&answer(available, swapped_in)).unwrap();
        let calm = said(300 * MIB, 7 * MIB);
        assert!(!calm.is_short(None) && !calm.is_short(Some(&calm)));
        assert!(said(31 * MIB, 0).is_short(None));
        assert!(said(300 * MIB, 8 * MIB).is_short(Some(&calm)));
        // The counter is unknown because the guest's kernel has no swap, or restarted because the
        // guest booted anew.
        let none = said(300 * MIB, u64::MAX);
        assert!(!none.is_short(Some(&calm)));
        assert_eq!(GuestMemory::read(&answer(u64::MAX, 0)), None);
        assert_eq!(
            GuestMemory::read(&json!({ "stats": {}, "last-update": 0 })),
            None
        );
    }
}
