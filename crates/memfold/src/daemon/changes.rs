//! What changed between two samples, in words.

use std::collections::{BTreeMap, BTreeSet};

use crate::api::{FullReport, VmInfo};
use crate::history::Event;
use crate::ledger::Disagreement;
use crate::lend::distrust::Distrusted;

/// Most characters of an event.
const TEXT_LIMIT: usize = 300;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SeenVm {
    pid: i32,
    has_agent: bool,
    problems: BTreeSet<String>,
}

/// What a sample says of the things whose changes are events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    vms: BTreeMap<String, SeenVm>,
    paused: bool,
    ksm_runs: bool,
    full_stores: BTreeSet<String>,
    disagreements: BTreeSet<String>,
    /// Lenders that aren't believed: how often they lied, and how.
    distrusted: BTreeMap<String, (u64, String)>,
}

impl Seen {
    /// Of this sample.
    #[must_use]
    pub(super) fn of(report: &FullReport, vms: &[VmInfo], distrusted: &[Distrusted]) -> Self {
        let vm = |vm: &VmInfo| {
            let problems = vm.agent_problems.iter().chain(&vm.fold_problems);
            let seen = SeenVm {
                pid: vm.pid,
                has_agent: vm.agent.is_some(),
                problems: problems.cloned().collect(),
            };
            (vm.name.clone(), seen)
        };
        let full = report.fold.domains.iter().filter(|d| d.store_full);
        Self {
            vms: vms.iter().map(vm).collect(),
            paused: report.fold.paused,
            ksm_runs: report.ledger.host.ksm.is_some_and(|ksm| ksm.run == 1),
            full_stores: full.map(|d| d.domain.clone()).collect(),
            disagreements: report.ledger.disagreements.iter().map(sums).collect(),
            distrusted: distrusted
                .iter()
                .map(|one| {
                    let how = format!("to VM '{}': {}", one.vm, one.what);
                    (one.lender.clone(), (one.lies, how))
                })
                .collect(),
        }
    }
}

/// Which sums, without their figures: these differ from sample to sample.
fn sums(disagreement: &Disagreement) -> String {
    let of = disagreement.vm.as_deref().unwrap_or("host");
    format!("{of}: {}", disagreement.what)
}

fn event(kind: &str, warning: bool, vm: Option<&str>, text: impl AsRef<str>) -> Event {
    Event {
        at_unix_s: 0,
        kind: kind.to_owned(),
        warning,
        vm: vm.map(str::to_owned),
        text: text.as_ref().chars().take(TEXT_LIMIT).collect(),
    }
}

/// What changed from `old` to `new`. The caller says when.
#[must_use]
pub(super) fn changes(old: &Seen, new: &Seen) -> Vec<Event> {
    let mut events = Vec::new();
    for (name, was) in &old.vms {
        if new.vms.get(name).is_none_or(|is| is.pid != was.pid) {
            events.push(event("vm", false, Some(name), "ended"));
        }
    }
    for (name, is) in &new.vms {
        let was = old.vms.get(name).filter(|was| was.pid == is.pid);
        if was.is_none() {
            let text = format!("runs, QEMU is process {}", is.pid);
            events.push(event("vm", false, Some(name), text));
        }
        let was = was.cloned().unwrap_or_default();
        match (was.has_agent, is.has_agent) {
            (false, true) => events.push(event("agent", false, Some(name), "connected")),
            (true, false) => events.push(event("agent", true, Some(name), "lost")),
            _ => {}
        }
        for problem in is.problems.difference(&was.problems) {
            events.push(event("folding", true, Some(name), problem));
        }
        for problem in was.problems.difference(&is.problems) {
            let text = format!("no longer: {problem}");
            events.push(event("folding", false, Some(name), text));
        }
    }
    if old.paused != new.paused {
        let word = if new.paused { "paused" } else { "goes on" };
        events.push(event("folding", new.paused, None, word));
    }
    if old.ksm_runs != new.ksm_runs {
        let word = if new.ksm_runs { "runs" } else { "stopped" };
        events.push(event("ksm", false, None, word));
    }
    for domain in new.full_stores.difference(&old.full_stores) {
        let text = format!("the page store of trust domain '{domain}' is full");
        events.push(event("store", true, None, text));
    }
    for domain in old.full_stores.difference(&new.full_stores) {
        let text = format!("the page store of trust domain '{domain}' has room again");
        events.push(event("store", false, None, text));
    }
    for what in new.disagreements.difference(&old.disagreements) {
        events.push(event(
            "ledger",
            true,
            None,
            format!("does not agree: {what}"),
        ));
    }
    for what in old.disagreements.difference(&new.disagreements) {
        events.push(event(
            "ledger",
            false,
            None,
            format!("agrees again: {what}"),
        ));
    }
    for (lender, (lies, how)) in &new.distrusted {
        if old.distrusted.get(lender).is_none_or(|(old, _)| old < lies) {
            let text = format!("lender '{lender}' served wrong bytes {how}");
            events.push(event("lending", true, None, text));
        }
    }
    for lender in old.distrusted.keys() {
        if !new.distrusted.contains_key(lender) {
            let text = format!("lender '{lender}' is believed again");
            events.push(event("lending", false, None, text));
        }
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(pid: i32, has_agent: bool, problems: &[&str]) -> SeenVm {
        SeenVm {
            pid,
            has_agent,
            problems: problems.iter().map(|&p| p.to_owned()).collect(),
        }
    }

    fn words(events: &[Event]) -> Vec<String> {
        let word = |e: &Event| {
            let mark = if e.warning { "!" } else { "" };
            let vm = e.vm.as_deref().unwrap_or("-");
            format!("{mark}{} {vm} {}", e.kind, e.text)
        };
        events.iter().map(word).collect()
    }

    #[test]
    fn nothing_changed_is_no_event() {
        let mut seen = Seen::default();
        seen.vms.insert("a".into(), vm(1, true, &["x"]));
        assert_eq!(changes(&seen, &seen), []);
    }

    #[test]
    fn whatever_changed_is_one_event_and_a_vm_of_the_same_name_is_another() {
        let mut old = Seen::default();
        old.vms.insert("a".into(), vm(1, true, &["x"]));
        old.vms.insert("b".into(), vm(2, true, &[]));
        old.full_stores.insert("d".into());
        let mut new = Seen {
            paused: true,
            ksm_runs: true,
            ..Seen::default()
        };
        new.vms.insert("a".into(), vm(1, false, &["y"]));
        new.vms.insert("b".into(), vm(3, false, &[]));
        new.disagreements.insert("sums".into());
        assert_eq!(
            words(&changes(&old, &new)),
            [
                "vm b ended",
                "!agent a lost",
                "!folding a y",
                "folding a no longer: x",
                "vm b runs, QEMU is process 3",
                "!folding - paused",
                "ksm - runs",
                "store - the page store of trust domain 'd' has room again",
                "!ledger - does not agree: sums",
            ]
        );
    }
}
