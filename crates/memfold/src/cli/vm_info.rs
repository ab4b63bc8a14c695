//! Describes a VM as text, and makes segments of API paths from names of VMs.

use memfold_api::VmInfo;
use memfold_snapshot::ClockStep;
use memfold_snapshot::clock::in_words;
use memfold_units::ByteSize;

/// Returns a VM's name as a segment of an API path. Names contain no character that needs escaping.
pub(super) fn segment(name: &str) -> anyhow::Result<&str> {
    memfold_vm::check_name("name", name)?;
    Ok(name)
}

pub(super) fn describe(what: &str, vm: &VmInfo) -> String {
    let mut lines = vec![format!(
        "{what} {} (pid {}, {} of RAM, QEMU {})",
        vm.name,
        vm.pid,
        ByteSize(vm.ram_bytes),
        vm.qemu
    )];
    if let (Some(network), Some(mac)) = (&vm.network, &vm.mac) {
        lines.push(format!("network: {network}, MAC address {mac}"));
    }
    if let Some(left) = vm.ttl_left_s {
        lines.push(format!("switched off in {left:.0} s unless it is extended"));
    }
    lines.extend(vm.clock.as_ref().and_then(clock));
    let folding = if vm.fold_problems.is_empty() {
        let at_pauses = "folded pages are folded again only at short pauses";
        (at_pauses, &vm.refold_problems)
    } else {
        ("not folded", &vm.fold_problems)
    };
    for (word, facts) in [folding, ("note", &vm.costs), ("forwarded", &vm.forwards)] {
        lines.extend(facts.iter().map(|fact| format!("{word}: {fact}")));
    }
    if !vm.left_out.is_empty() {
        lines.push(format!(
            "left out from the saved VM: {}",
            vm.left_out.join(", ")
        ));
    }
    lines.join("\n")
}

/// Describes the result of setting the guest's clock after a pause, as text.
fn clock(step: &ClockStep) -> Option<String> {
    if step.pending {
        return Some("guest's clock: will be set as soon as the agent answers".into());
    }
    let was = step.behind_ms.map(in_words);
    match (&step.problem, was) {
        (Some(problem), Some(was)) => Some(format!(
            "guest's clock was {was}; not all right now: {problem}"
        )),
        (Some(problem), None) => Some(format!("guest's clock unchanged: {problem}")),
        (None, Some(was)) if step.behind_ms != step.left_ms => {
            Some(format!("guest's clock was {was}, and was set"))
        }
        _ => None,
    }
}
