//! Asks the balloon drivers of guests for memory figures (`guest-stats`), without an agent, for two
//! purposes:
//!
//! - A VM whose guest has no agent that reports such figures gets them in the daemon's reports.
//! - If guests of this host are short of memory, the host lends less RAM to other hosts, because
//!   its own VMs will soon need the RAM.
//!
//! A guest can report false figures; then this host only lends less.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_vm::balloon::{self, BalloonError, GuestStats};
use memfold_vm::{Qmp, QmpError};

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

/// Time for which a guest that cannot be asked any more still counts as short of memory.
const REMEMBERED: Duration = Duration::from_secs(60);

/// Age from which figures of a guest that another program asks count as old, in seconds.
const OLD_S: u64 = 15;

/// A VM whose balloon driver is asked.
#[derive(Debug)]
struct Asked {
    /// Path of the balloon in QEMU's object tree; `None`: the VM has none.
    device: Option<String>,
    /// Figures of the last query.
    last: Option<GuestStats>,
    /// When the guest last answered, and whether it was short of memory then.
    answered: Option<(Instant, bool)>,
}

impl Asked {
    /// Returns whether a guest that cannot be asked at the time `now` counts as short of memory: if
    /// it was short when it last answered, and that was less than [`REMEMBERED`] ago.
    fn was_short(&self, now: Instant) -> bool {
        self.answered.is_some_and(|(at, is_short)| {
            is_short && now.saturating_duration_since(at) < REMEMBERED
        })
    }
}

fn is_short(now: &GuestStats, before: Option<&GuestStats>) -> bool {
    let swapped_in = |stats: &GuestStats| stats.swap_in.unwrap_or(0);
    let swaps = before
        .is_some_and(|before| swapped_in(now).saturating_sub(swapped_in(before)) >= SWAPPED_IN);
    swaps || now.available < now.total / SHORT_PART
}

/// Returns how long ago the guest reported these figures, at the time `unix` since 1970. `None`:
/// the query before returned the same report, so the guest has said nothing since.
fn age_of_new(now: &GuestStats, before: Option<&GuestStats>, unix: Duration) -> Option<Duration> {
    let is_new = before.is_none_or(|before| before.updated_s != now.updated_s);
    is_new.then(|| unix.saturating_sub(Duration::from_secs(now.updated_s)))
}

/// Starts the thread that queries guests until the daemon ends.
pub(crate) fn begin(below: &Arc<Mechanisms>) -> io::Result<()> {
    let mut known = BTreeMap::new();
    threads::repeat("guests", LOOK, below, move |below| look(below, &mut known))
}

/// Queries all guests once. `known`: the guests that are asked, by the machine's number.
fn look(below: &Mechanisms, known: &mut BTreeMap<u32, Asked>) {
    let lends = below.lending.status().is_some();
    let machines = below.registry.machines();
    known.retain(|id, _| machines.iter().any(|machine| machine.id() == *id));
    let mut short = 0;
    for machine in &machines {
        if !lends && machine.agent_reports_memory() {
            stop_asking(machine, known);
        } else if machine.state().is_running() {
            // A guest that cannot be asked now is asked again at the next query.
            let is_short = ask(machine, known).ok().flatten().unwrap_or_else(|| {
                let asked = known.get(&machine.id());
                asked.is_some_and(|asked| asked.was_short(Instant::now()))
            });
            short += u32::from(is_short);
        }
    }
    below.lending.set_short_guests(short);
}

/// Returns whether memfold started the VM. Of other VMs, the program that started them decides how
/// often the guest is asked.
fn is_ours(machine: &Machine) -> bool {
    machine.vm().spec().is_some()
}

/// Asks a guest for its figures, and keeps them. Returns whether the guest is short of memory;
/// `None` while QEMU's monitor is in use.
fn ask(machine: &Machine, known: &mut BTreeMap<u32, Asked>) -> Result<Option<bool>, QmpError> {
    // While the VM is saved, for example, its monitor is in use for a long time, and the other
    // guests must not wait for that.
    let Some(mut qmp) = machine.idle_monitor() else {
        return Ok(None);
    };
    let asked = if let Some(asked) = known.get_mut(&machine.id()) {
        asked
    } else {
        let device = qmp.briefly(|qmp| begin_polls(machine, qmp))?;
        let new = Asked {
            device,
            last: None,
            answered: None,
        };
        known.entry(machine.id()).or_insert(new)
    };
    let Some(device) = &asked.device else {
        return Ok(Some(false));
    };
    let now = qmp.briefly(|qmp| balloon::guest_stats(qmp, device))?;
    drop(qmp);
    let now = now.filter(|now| now.updated_s + OLD_S >= threads::unix_time().as_secs());
    let before = std::mem::replace(&mut asked.last, now);
    let is_short = now.is_some_and(|now| is_short(&now, before.as_ref()));
    asked.answered = Some((Instant::now(), is_short));
    if let Some(now) = now.filter(|_| !machine.agent_reports_memory()) {
        if let Some(age) = age_of_new(&now, before.as_ref(), threads::unix_time()) {
            machine.note_balloon_stats(&now, age);
        }
    }
    Ok(Some(is_short))
}

/// Returns the path of a VM's balloon; `None`: it has none. QEMU asks the guest from now on, unless
/// another program decides that.
fn begin_polls(machine: &Machine, qmp: &mut Qmp) -> Result<Option<String>, QmpError> {
    let device = find(machine, qmp)?;
    if let (Some(device), true) = (&device, is_ours(machine)) {
        balloon::poll_guest_stats(qmp, device, LOOK.as_secs())?;
    }
    Ok(device)
}

fn find(machine: &Machine, qmp: &mut Qmp) -> Result<Option<String>, QmpError> {
    if let Some(spec) = machine.vm().spec().filter(|spec| spec.foreign.is_none()) {
        return Ok(spec.balloon.then(|| BALLOON.to_owned()));
    }
    match balloon::find(qmp) {
        Ok(device) => Ok(Some(device)),
        Err(BalloonError::Qmp(error)) => Err(error),
        Err(_) => Ok(None),
    }
}

/// Ends the queries of a guest whose figures are not needed.
fn stop_asking(machine: &Machine, known: &mut BTreeMap<u32, Asked>) {
    if !known.contains_key(&machine.id()) {
        return;
    }
    // If the monitor is in use, the next query tries again.
    let Some(mut qmp) = machine.idle_monitor() else {
        return;
    };
    let asked = known.remove(&machine.id());
    let device = asked.and_then(|asked| asked.device);
    if let Some(device) = device.filter(|_| is_ours(machine)) {
        // If this fails, QEMU still asks the guest, which costs little.
        let _ = qmp.briefly(|qmp| balloon::poll_guest_stats(qmp, &device, 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_a_balloon_driver_that_is_read_twice_counts_once_and_from_when_it_was_made() {
        let report = |updated_s| GuestStats {
            updated_s,
            total: 1 << 30,
            ..GuestStats::default()
        };
        let age = |report: &GuestStats, before: Option<&GuestStats>, ms| {
            age_of_new(report, before, Duration::from_millis(ms))
        };
        let (first, second) = (report(100), report(105));
        let ms = |ms| Some(Duration::from_millis(ms));
        assert_eq!(age(&first, None, 103_200), ms(3200));
        assert_eq!(age(&first, Some(&first), 104_900), None);
        assert_eq!(age(&second, Some(&first), 108_200), ms(3200));
        // The host's clock was set back.
        assert_eq!(age(&second, Some(&first), 90_000), ms(0));
    }

    #[test]
    fn a_guest_that_cannot_be_asked_counts_as_short_for_a_minute_after_it_was_short() {
        let began = Instant::now();
        let after = |is_short, seconds| {
            let asked = Asked {
                device: None,
                last: None,
                answered: Some((began, is_short)),
            };
            asked.was_short(began + Duration::from_secs(seconds))
        };
        assert!(after(true, 59) && !after(true, 60));
        assert!(!after(false, 5));
    }

    #[test]
    fn a_guest_that_has_little_available_memory_or_swaps_in_is_short_of_memory() {
        const MIB: u64 = 1 << 20;
        let said = |available: u64, swap_in: Option<u64>| GuestStats {
            total: 512 * MIB,
            available,
            swap_in,
            ..GuestStats::default()
        };
        let calm = said(300 * MIB, Some(7 * MIB));
        assert!(!is_short(&calm, None) && !is_short(&calm, Some(&calm)));
        assert!(is_short(&said(31 * MIB, Some(0)), None));
        assert!(is_short(&said(300 * MIB, Some(8 * MIB)), Some(&calm)));
        // The counter is unknown because the guest's kernel has no swap, or restarted because the
        // guest booted anew.
        assert!(!is_short(&said(300 * MIB, None), Some(&calm)));
    }
}
