//! `memfold rightsize`: shows how much memory each VM should have, whether the daemon changes it,
//! and sets limits of a VM's size.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};

use memfold_api::{
    RightsizeEvent, RightsizeMode, RightsizeReport, RightsizeRequest, Sizing, VmRightsize,
};
use memfold_units::ByteSize;

use super::context::Context;
use super::table::table;
use super::vm_info::segment;

/// Number of the last orders that are shown by default.
const EVENTS: u32 = 10;

/// Number of the last changes of the rung that the text shows.
const RUNGS: usize = 3;

#[derive(Subcommand, Debug)]
pub(super) enum Arguments {
    /// Show how much memory each VM should have, the host's rung, and the last orders with their
    /// reasons
    Status {
        /// Number of the last orders to show, at most 1000
        #[arg(long, value_name = "NUMBER", default_value_t = EVENTS, value_parser = clap::value_parser!(u32).range(0..=1000))]
        events: u32,
    },
    /// Size VMs: trim page caches of guests, move their balloons, and plug memory
    On,
    /// Say what would be done, and do nothing
    Watch,
    /// Leave the memory of VMs alone; guests get back what is in their balloons
    Off,
    /// Set the limits of a VM's size, until the VM ends
    Set(SetArguments),
}

#[derive(Args, Debug)]
pub(super) struct SetArguments {
    /// Name of the VM
    vm: String,
    /// Smallest size of the VM (a quarter of its RAM by default, but at least 256 MiB)
    #[arg(long, value_name = "SIZE")]
    min: Option<ByteSize>,
    /// Largest size of the VM (by default all of its RAM, and what can be plugged)
    #[arg(long, value_name = "SIZE")]
    max: Option<ByteSize>,
    /// Memory beyond the working set, in percent of it, 0 to 1000 (20 by default)
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u16).range(0..=1000))]
    buffer: Option<u16>,
    /// Weight of what the VM loses, 1 to 10000 (100 by default); VMs with a small weight give
    /// memory first
    #[arg(long, value_name = "WEIGHT", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    priority: Option<u16>,
    /// Never change the VM's size
    #[arg(long, conflicts_with = "unpin")]
    pin: bool,
    /// Change the VM's size again
    #[arg(long)]
    unpin: bool,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    let mode = match arguments {
        Arguments::Status { events } => {
            let path = format!("/v1/rightsize?events={events}");
            return context.print(&client.get(&path)?, render);
        }
        Arguments::Set(set) => {
            let request = Sizing {
                min_bytes: set.min.map(|size| size.0),
                max_bytes: set.max.map(|size| size.0),
                buffer_percent: set.buffer,
                priority: set.priority,
                pinned: (set.pin || set.unpin).then_some(set.pin),
            };
            let path = format!("/v1/vms/{}/sizing", segment(&set.vm)?);
            return context.print(&client.put(&path, &request)?, |sizing| {
                limits(&set.vm, sizing)
            });
        }
        Arguments::On => RightsizeMode::On,
        Arguments::Watch => RightsizeMode::Watch,
        Arguments::Off => RightsizeMode::Off,
    };
    context.print(
        &client.put("/v1/rightsize", &RightsizeRequest { mode })?,
        render,
    )
}

fn limits(vm: &str, sizing: &Sizing) -> String {
    let size = |bytes: Option<u64>| bytes.map_or("default".into(), |b| ByteSize(b).to_string());
    let buffer = sizing
        .buffer_percent
        .map_or("default".into(), |n| format!("{n} %"));
    let priority = sizing.priority.map_or("default".into(), |n| n.to_string());
    let pinned = if sizing.pinned == Some(true) {
        "; pinned"
    } else {
        ""
    };
    format!(
        "'{vm}': min {}, max {}, buffer {buffer}, priority {priority}{pinned}",
        size(sizing.min_bytes),
        size(sizing.max_bytes)
    )
}

fn render(report: &RightsizeReport) -> String {
    let mode = match report.mode {
        RightsizeMode::Off => return "right-sizing: off; the memory of VMs is left alone".into(),
        RightsizeMode::Watch => "watch; nothing is changed",
        RightsizeMode::On => "on",
    };
    let Some(rung) = &report.rung else {
        return format!("right-sizing: {mode}; the first look follows in 2 s");
    };
    let mut parts = vec![format!(
        "right-sizing: {mode}\nhost: rung {rung}: {}; {} available, {} in reserve",
        report.why,
        ByteSize(report.available_bytes),
        ByteSize(report.reserve_bytes)
    )];
    if report.vms.is_empty() {
        parts.push("no running VMs".into());
    } else {
        let vms = report.vms.iter().map(|vm| {
            [
                vm.vm.clone(),
                size(vm),
                ByteSize(vm.working_set_bytes).to_string(),
                ByteSize(vm.target_bytes).to_string(),
                vm.pressure
                    .map_or("?".into(), |share| format!("{:.2} %", share * 100.0)),
                vm.order.clone().unwrap_or_default(),
                vm.reason.clone(),
            ]
        });
        parts.push(table(
            "VM  >SIZE  >WORKING SET  >TARGET  >PRESSURE  ORDER  REASON",
            vms,
        ));
    }
    let first = report.rungs.len().saturating_sub(RUNGS);
    let rungs = report.rungs[first..].iter();
    let rungs: Vec<String> = rungs
        .map(|change| {
            let (rung, why) = (&change.rung, &change.why);
            format!("{}: rung {rung}: {why}", ago(change.at_unix_s))
        })
        .collect();
    let events: Vec<String> = report.events.iter().map(event).collect();
    for lines in [rungs, events].iter().filter(|lines| !lines.is_empty()) {
        parts.push(lines.join("\n"));
    }
    parts.join("\n\n")
}

/// Formats a VM's size, and what of it is plugged.
fn size(vm: &VmRightsize) -> String {
    let size = ByteSize(vm.size_bytes);
    match vm.plugged_bytes {
        None | Some(0) => size.to_string(),
        Some(plugged) => format!("{size} ({} plugged)", ByteSize(plugged)),
    }
}

/// Says how long ago a moment was.
fn ago(unix_s: f64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0.0, |now| now.as_secs_f64());
    format!("{:.0} s ago", (now - unix_s).max(0.0))
}

fn event(event: &RightsizeEvent) -> String {
    let result = event.result.as_ref();
    format!(
        "{}: '{}': {}, because {}{}",
        ago(event.at_unix_s),
        event.vm,
        event.order,
        event.reason,
        result.map_or_else(String::new, |result| format!("; {result}"))
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_api::RungChange;

    #[test]
    fn memfold_rightsize_shows_size_need_and_reason_of_each_vm_and_the_last_orders() {
        let report = RightsizeReport {
            mode: RightsizeMode::Watch,
            rung: Some("ample".into()),
            why: "the host has room".into(),
            vms: vec![VmRightsize {
                vm: "db".into(),
                size_bytes: 2 << 30,
                plugged_bytes: Some(1 << 29),
                working_set_bytes: 1 << 30,
                target_bytes: 3 << 29,
                pressure: Some(0.0012),
                order: Some("would trim 64.0 MiB of page cache".into()),
                reason: "page cache grew beyond the working set".into(),
                ..VmRightsize::default()
            }],
            events: vec![RightsizeEvent {
                vm: "db".into(),
                order: "trim 16.0 MiB of page cache".into(),
                reason: "it was not missed".into(),
                result: Some("16.0 MiB reclaimed".into()),
                ..RightsizeEvent::default()
            }],
            rungs: vec![RungChange {
                rung: "ample".into(),
                why: "the host recovers".into(),
                ..RungChange::default()
            }],
            ..RightsizeReport::default()
        };
        let text = render(&report);
        for words in [
            "watch; nothing is changed",
            "rung ample: the host has room",
            "s ago: rung ample: the host recovers",
            "2.00 GiB (512 MiB plugged)",
            "0.12 %",
            "trim 64.0 MiB of page cache  page cache grew",
            "'db': trim 16.0 MiB of page cache, because it was not missed; 16.0 MiB reclaimed",
        ] {
            assert!(text.contains(words), "{words:?} is not in\n{text}");
        }
        assert!(
            render(&RightsizeReport {
                mode: RightsizeMode::Off,
                ..report
            })
            .contains("off")
        );
    }
}
