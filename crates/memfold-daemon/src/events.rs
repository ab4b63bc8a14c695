//! Finds events for the history of memory use: for example, a VM has ended, or KSM was started. An
//! event is a difference between two consecutive samples of the daemon's state, described in one
//! line of text.

use std::collections::{BTreeMap, BTreeSet};

use memfold_units::ByteSize;

use memfold_api::{Borrowed, FullReport, SwapPlace, VmInfo};
use memfold_ledger::history::Event;
use memfold_ledger::{BrakeEvent, Disagreement, Level};
use memfold_lend::LenderStatus;
use memfold_lend::distrust::Distrusted;

/// Longest text of an event, in characters.
const TEXT_LIMIT: usize = 300;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SeenVm {
    pid: i32,
    has_agent: bool,
    /// Run state and cause, as text, if the VM is not running.
    still: Option<String>,
    problems: BTreeSet<String>,
}

/// Parts of a sample of the daemon's state that the ledger's report does not contain.
#[derive(Debug)]
pub(crate) struct Beside {
    pub vms: Vec<VmInfo>,
    pub distrusted: Vec<Distrusted>,
    pub borrowed: Vec<Borrowed>,
    pub lending: Option<LenderStatus>,
    /// Names of all snapshots; `None`: the snapshot directory cannot be read.
    pub snapshots: Option<Vec<String>>,
}

/// Values of a sample that are compared with those of the next sample. Each difference becomes an
/// event.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Seen {
    vms: BTreeMap<String, SeenVm>,
    paused: bool,
    ksm_runs: bool,
    full_stores: BTreeSet<String>,
    disagreements: BTreeSet<String>,
    /// Lenders that served wrong bytes, by name: number of times, and a description of the last
    /// time.
    distrusted: BTreeMap<String, (u64, String)>,
    /// Most recent events of the brake, oldest first.
    brake: Vec<BrakeEvent>,
    /// Swap disks that are or were lent, by VM name: the present place, and whether the place is a
    /// normal one.
    borrowed: BTreeMap<String, (String, bool)>,
    /// This host as a lender.
    lending: Option<LenderStatus>,
    snapshots: Option<BTreeSet<String>>,
}

impl Seen {
    /// Extracts the compared values from a sample.
    #[must_use]
    pub(crate) fn of(report: &FullReport, beside: &Beside) -> Self {
        let vm = |vm: &VmInfo| {
            let problems = vm.agent_problems.iter().chain(&vm.fold_problems);
            let runs = matches!(vm.state.as_str(), "" | "running" | "taking-over");
            let still = || match &vm.state_cause {
                Some(cause) => format!("{}: {cause}", vm.state),
                None => vm.state.clone(),
            };
            let seen = SeenVm {
                pid: vm.pid,
                has_agent: vm.agent.is_some(),
                still: (!runs).then(still),
                problems: problems.cloned().collect(),
            };
            (vm.name.clone(), seen)
        };
        let lied = |one: &Distrusted| {
            let how = format!("to VM '{}': {}", one.vm, one.what);
            (one.lender.clone(), (one.lies, how))
        };
        let borrowed = |one: &Borrowed| {
            let good = matches!(one.place, SwapPlace::Lent | SwapPlace::OnDisk);
            (one.vm.clone(), (one.where_it_is(), good))
        };
        let (ledger, fold) = (&report.ledger, &report.fold);
        let vms = beside.vms.iter().filter(|vm| vm.state != "starting");
        let full = fold.domains.iter().filter(|d| d.store_full);
        let debt = ledger.debt.as_ref();
        let snapshots = beside.snapshots.as_ref();
        Self {
            vms: vms.map(vm).collect(),
            paused: fold.paused,
            ksm_runs: ledger.host.ksm.is_some_and(|ksm| ksm.run == 1),
            full_stores: full.map(|d| d.domain.clone()).collect(),
            disagreements: ledger.disagreements.iter().map(sums).collect(),
            distrusted: beside.distrusted.iter().map(lied).collect(),
            brake: debt.map_or_else(Vec::new, |debt| debt.events.clone()),
            borrowed: beside.borrowed.iter().map(borrowed).collect(),
            lending: beside.lending.clone(),
            snapshots: snapshots.map(|names| names.iter().cloned().collect()),
        }
    }
}

/// Returns the name of a disagreement without its figures, which differ from sample to sample.
fn sums(disagreement: &Disagreement) -> String {
    let of = disagreement.vm.as_deref().unwrap_or("host");
    format!("{of}: {}", disagreement.what)
}

pub(crate) fn event(kind: &str, warning: bool, vm: Option<&str>, text: impl AsRef<str>) -> Event {
    Event {
        at_unix_s: 0,
        kind: kind.to_owned(),
        warning,
        vm: vm.map(str::to_owned),
        text: text.as_ref().chars().take(TEXT_LIMIT).collect(),
    }
}

/// Returns the events that lead from `old` to `new`. The caller sets the time of each event.
#[must_use]
pub(crate) fn changes(old: &Seen, new: &Seen) -> Vec<Event> {
    let mut events = of_vms(old, new);
    events.extend(of_host(old, new));
    events.extend(of_lending(old, new));
    events
}

/// Returns an event for each entry that came (a warning if `warns`) and for each that went; `came`
/// and `went` make the texts.
fn of_sets(
    (kind, warns, vm): (&'static str, bool, Option<&str>),
    old: &BTreeSet<String>,
    new: &BTreeSet<String>,
    came: impl Fn(&String) -> String,
    went: impl Fn(&String) -> String,
) -> Vec<Event> {
    let came = new
        .difference(old)
        .map(|one| event(kind, warns, vm, came(one)));
    let went = old
        .difference(new)
        .map(|one| event(kind, false, vm, went(one)));
    came.chain(went).collect()
}

fn of_vms(old: &Seen, new: &Seen) -> Vec<Event> {
    let mut events = Vec::new();
    for (name, was) in &old.vms {
        if new.vms.get(name).is_none_or(|is| is.pid != was.pid) {
            events.push(event("vm", false, Some(name), "ended"));
        }
    }
    for (name, is) in &new.vms {
        let was = old.vms.get(name).filter(|was| was.pid == is.pid);
        let mut add = |kind: &str, warning, text: &str| {
            events.push(event(kind, warning, Some(name), text));
        };
        if was.is_none() {
            add("vm", false, &format!("runs, QEMU is process {}", is.pid));
        }
        let was = was.cloned().unwrap_or_default();
        match (was.has_agent, is.has_agent) {
            (false, true) => add("agent", false, "connected"),
            (true, false) => add("agent", true, "lost"),
            _ => {}
        }
        match (&was.still, &is.still) {
            (before, Some(now)) if before.as_ref() != Some(now) => {
                add("vm", true, &format!("stands still ({now})"));
            }
            (Some(_), None) => add("vm", false, "runs again"),
            _ => {}
        }
        events.extend(of_sets(
            ("folding", true, Some(name)),
            &was.problems,
            &is.problems,
            String::clone,
            |problem| format!("no longer: {problem}"),
        ));
    }
    events
}

fn of_host(old: &Seen, new: &Seen) -> Vec<Event> {
    let mut events = Vec::new();
    if old.paused != new.paused {
        let word = if new.paused { "paused" } else { "goes on" };
        events.push(event("folding", new.paused, None, word));
    }
    if old.ksm_runs != new.ksm_runs {
        let word = if new.ksm_runs { "runs" } else { "stopped" };
        events.push(event("ksm", false, None, word));
    }
    events.extend(of_sets(
        ("store", true, None),
        &old.full_stores,
        &new.full_stores,
        |domain| format!("the page store of trust domain '{domain}' is full"),
        |domain| format!("the page store of trust domain '{domain}' has room again"),
    ));
    events.extend(of_sets(
        ("ledger", true, None),
        &old.disagreements,
        &new.disagreements,
        |what| format!("does not agree: {what}"),
        |what| format!("agrees again: {what}"),
    ));
    for done in new.brake.iter().filter(|done| !old.brake.contains(done)) {
        let text = format!("{}: {}", done.level, done.what);
        events.push(event("brake", done.level != Level::Ok, None, text));
    }
    if let (Some(were), Some(are)) = (&old.snapshots, &new.snapshots) {
        events.extend(of_sets(
            ("snapshot", false, None),
            were,
            are,
            |name| format!("'{name}' was made"),
            |name| format!("'{name}' was removed"),
        ));
    }
    events
}

fn of_lending(old: &Seen, new: &Seen) -> Vec<Event> {
    let mut events = Vec::new();
    let mut add = |warning, vm: Option<&str>, text: String| {
        events.push(event("lending", warning, vm, text));
    };
    for (vm, (place, good)) in &new.borrowed {
        if old.borrowed.get(vm).is_none_or(|(was, _)| was != place) {
            add(!good, Some(vm), format!("swap disk is on {place}"));
        }
    }
    for vm in old.borrowed.keys() {
        // A VM that has ended has no swap disk any more.
        if !new.borrowed.contains_key(vm) && (new.vms.contains_key(vm) || vm.contains('/')) {
            add(false, Some(vm), "swap disk is on this host's disk".into());
        }
    }
    let (was, is) = (old.lending.clone(), new.lending.clone());
    let (was, is) = (was.unwrap_or_default(), is.unwrap_or_default());
    if was.max_bytes != is.max_bytes {
        let text = match is.max_bytes {
            0 => "this host stopped lending".to_owned(),
            bytes => format!("this host lends {} at most", ByteSize(bytes)),
        };
        add(false, None, text);
    }
    if was.lent_bytes != is.lent_bytes {
        let lent = ByteSize(is.lent_bytes);
        add(false, None, format!("this host lends {lent} now"));
    }
    if let Some(problem) = is.problem.filter(|p| was.problem.as_ref() != Some(p)) {
        add(true, None, problem);
    }
    for (lender, (lies, how)) in &new.distrusted {
        if old.distrusted.get(lender).is_none_or(|(old, _)| old < lies) {
            add(
                true,
                None,
                format!("lender '{lender}' served wrong bytes {how}"),
            );
        }
    }
    for lender in old.distrusted.keys() {
        if !new.distrusted.contains_key(lender) {
            add(false, None, format!("lender '{lender}' is trusted again"));
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
            still: None,
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
    fn if_nothing_changed_on_the_host_no_event_is_recorded() {
        let mut seen = Seen::default();
        seen.vms.insert("a".into(), vm(1, true, &["x"]));
        assert_eq!(changes(&seen, &seen), []);
    }

    #[test]
    fn each_change_of_a_vm_is_one_event_and_a_restarted_vm_of_the_same_name_is_a_new_vm() {
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

    #[test]
    fn one_event_is_recorded_for_each_action_of_the_brake_and_each_snapshot_made_or_removed() {
        let done = |level, at_unix_s, what: &str| BrakeEvent {
            at_unix_s,
            level,
            mem_available_bytes: 0,
            debt_bytes: 0,
            what: what.to_owned(),
        };
        let names = |names: &[&str]| Some(names.iter().map(|&n| n.to_owned()).collect());
        let old = Seen {
            brake: vec![done(Level::Warning, 1.0, "x")],
            snapshots: names(&["a", "b"]),
            ..Seen::default()
        };
        let mut new = old.clone();
        new.brake.push(done(Level::Braked, 2.0, "x"));
        new.brake.push(done(Level::Ok, 3.0, "y"));
        new.snapshots = names(&["b", "c"]);
        assert_eq!(
            words(&changes(&old, &new)),
            [
                "!brake - BRAKED: x",
                "brake - ok: y",
                "snapshot - 'c' was made",
                "snapshot - 'a' was removed",
            ]
        );
        assert_eq!(changes(&new, &new), []);
        // If the directory cannot be read, snapshots are neither new nor removed.
        new.snapshots = None;
        assert_eq!(
            words(&changes(&old, &new)),
            ["!brake - BRAKED: x", "brake - ok: y"]
        );
    }

    #[test]
    fn an_event_is_recorded_if_a_swap_disk_moves_or_the_amount_of_lent_memory_changes() {
        let lender = |max_bytes, lent_bytes, problem: Option<&str>| {
            Some(LenderStatus {
                max_bytes,
                lent_bytes,
                problem: problem.map(str::to_owned),
                ..LenderStatus::default()
            })
        };
        let mut old = Seen {
            lending: lender(8 << 30, 0, None),
            ..Seen::default()
        };
        old.vms.insert("a".into(), vm(1, true, &[]));
        let mut new = old.clone();
        new.borrowed.insert("a".into(), ("RAM of h".into(), true));
        new.lending = lender(8 << 30, 1 << 30, Some("no room"));
        assert_eq!(
            words(&changes(&old, &new)),
            [
                "lending a swap disk is on RAM of h",
                "lending - this host lends 1.00 GiB now",
                "!lending - no room",
            ]
        );
        let mut lost = new.clone();
        lost.borrowed.insert("a".into(), ("nowhere".into(), false));
        assert_eq!(
            words(&changes(&new, &lost)),
            ["!lending a swap disk is on nowhere"]
        );
        let mut back = new.clone();
        back.borrowed.clear();
        back.lending = None;
        assert_eq!(
            words(&changes(&new, &back)),
            [
                "lending a swap disk is on this host's disk",
                "lending - this host stopped lending",
                "lending - this host lends 0 B now",
            ]
        );
        back.vms.clear();
        let of_a = changes(&new, &back);
        let of_a: Vec<&str> = of_a
            .iter()
            .filter(|e| e.vm.is_some())
            .map(|e| e.text.as_str())
            .collect();
        assert_eq!(of_a, ["ended"]);
    }
}
