//! `memfold debt`: shows how much memory guests could claim by writing to shared pages, and whether
//! the brake, which limits this memory, is on. Sets the brake's limits.

use std::process::ExitCode;

use clap::Args;

use memfold_api::DebtRequest;
use memfold_ledger::{BrakeEvent, DebtReport, Reserve};
use memfold_units::ByteSize;

use super::context::Context;
use super::number::number;
use super::table::table;

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Memory to keep for this host until the daemon ends: a size, or percent of its RAM
    #[arg(long, value_name = "SIZE|PERCENT%", value_parser = reserve)]
    reserve: Option<String>,
    /// Percent of shared memory that available memory must cover in case guests write to it, 0 to
    /// 100, until the daemon ends; 0 disables the brake
    #[arg(long, value_name = "PERCENT", value_parser = cover)]
    cover: Option<f64>,
}

/// Checks the text of a reserve, and returns it unchanged, because the daemon parses it again.
fn reserve(text: &str) -> Result<String, String> {
    text.parse::<Reserve>().map(|_| text.to_owned())
}

/// Parses a percentage from 0 to 100.
pub(super) fn cover(text: &str) -> Result<f64, String> {
    let fix = format!("'{text}' is not a percentage; give 0 to 100");
    number(text, 0.0..=100.0, &fix)
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    if arguments.reserve.is_none() && arguments.cover.is_none() {
        return context.print(&client.get("/v1/debt")?, render);
    }
    let request = DebtRequest {
        reserve: arguments.reserve.clone(),
        cover_percent: arguments.cover,
    };
    context.print(&client.put("/v1/debt", &request)?, render)
}

fn render(report: &DebtReport) -> String {
    let size = |bytes: u64| ByteSize(bytes).to_string();
    let needed = format!("needed at once ({} %)", report.cover_percent);
    let group = report.limited_by.as_ref();
    let group = group.map_or_else(String::new, |path| format!(" in control group {path}"));
    let available = format!("  available{group}");
    let starting = "  of VMs that are just starting";
    let sums = [
        ("shared, and owed when written to", report.debt_bytes),
        ("  folded", report.folded_bytes),
        ("  of snapshots' images", report.snapshot_bytes),
        ("  zero pages given back", report.zero_bytes),
        ("  merged by KSM", report.ksm_bytes),
        (starting, report.starting_bytes),
        (&needed, report.needed_bytes),
        ("available for it", report.absorbable_bytes),
        (&available, report.mem_available_bytes),
        ("  less the reserve", report.reserve_bytes),
        ("free swap, not counted", report.swap_free_bytes),
        ("page stores, back once all is written", report.store_bytes),
    ];
    let sums = sums.iter().filter(|sum| *sum != &(starting, 0));
    let sums = sums.map(|(name, bytes)| [(*name).to_owned(), size(*bytes)]);
    let held = if report.sharing_held {
        "; folding and KSM share no more memory until the level is ok"
    } else {
        ""
    };
    let sums = table("  >", sums);
    let rung = match (&report.rung, &report.rung_why) {
        (Some(rung), Some(why)) => format!("rung: {rung}: {why}\n"),
        _ => String::new(),
    };
    let mut parts = vec![format!("brake: {}{held}\n{rung}{sums}", report.level)];
    if report.vms.iter().any(|vm| vm.total_bytes() > 0) {
        let vms = report.vms.iter().map(|vm| {
            [
                vm.name.clone(),
                size(vm.total_bytes()),
                size(vm.folded_bytes),
                size(vm.snapshot_bytes),
                size(vm.zero_bytes),
            ]
        });
        parts.push(table("VM  >OWED  >FOLDED  >SNAPSHOT  >ZERO", vms));
    }
    if !report.events.is_empty() {
        let events: Vec<String> = report.events.iter().map(event).collect();
        parts.push(events.join("\n"));
    }
    parts.join("\n\n")
}

fn event(event: &BrakeEvent) -> String {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0.0, |now| now.as_secs_f64());
    format!(
        "{:.0} s ago: {}",
        (now - event.at_unix_s).max(0.0),
        event.what
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_ledger::{Level, VmDebt};

    #[test]
    fn memfold_debt_shows_the_level_of_the_brake_the_figures_of_the_debt_and_past_events() {
        let report = DebtReport {
            level: Level::Warning,
            sharing_held: true,
            debt_bytes: 3 << 30,
            cover_percent: 50.0,
            limited_by: Some("/sys/fs/cgroup/machine.slice".into()),
            rung: Some("trim".into()),
            rung_why: Some("2.00 GiB are available".into()),
            vms: vec![VmDebt {
                name: "web".into(),
                snapshot_bytes: 3 << 30,
                ..VmDebt::default()
            }],
            events: vec![BrakeEvent {
                at_unix_s: 0.0,
                level: Level::Braked,
                mem_available_bytes: 0,
                debt_bytes: 0,
                what: "ok -> BRAKED".into(),
            }],
            ..DebtReport::default()
        };
        let text = render(&report);
        for word in [
            "brake: warning; folding and KSM share no more memory until the level is ok",
            "3.00 GiB",
            "(50 %)",
            "rung: trim: 2.00 GiB are available",
            "available in control group /sys/fs/cgroup/machine.slice",
            "web",
            "s ago: ok -> BRAKED",
        ] {
            assert!(text.contains(word), "no '{word}' in\n{text}");
        }
        let empty = render(&DebtReport::default());
        assert!(
            empty.contains("brake: ok") && !empty.contains("VM ") && !empty.contains("rung"),
            "{empty}"
        );
    }

    #[test]
    fn memfold_debt_refuses_values_of_reserve_and_cover_that_are_out_of_range() {
        assert!(reserve("5%").is_ok() && reserve("2G").is_ok() && cover("0").is_ok());
        for wrong in ["", "101", "-1", "nan", "x"] {
            assert!(cover(wrong).is_err(), "{wrong}");
            assert!(reserve(&format!("{wrong}%")).is_err(), "{wrong}");
        }
    }
}
