//! `memfold doctor`: what works on this host, what doesn't, and the command that fixes it.

use std::path::Path;
use std::process::ExitCode;

use comfy_table::{Cell, ContentArrangement, Table, presets};

use crate::host::{HostFacts, Report, Status, examine};

/// Exit code of a host on which the main job can't run.
pub const NOT_POSSIBLE: u8 = 3;

/// Looks at the host and prints the report. `state` keeps what takes long to find out.
pub fn run(state: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let report = examine(HostFacts::probe(state));
    if json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", text(&report));
    }
    Ok(if report.can_run {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(NOT_POSSIBLE)
    })
}

/// The report for people.
#[must_use]
pub fn text(report: &Report) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    for check in &report.checks {
        let mark = match check.status {
            Status::Ok => "ok",
            Status::Warn => "warn",
            Status::Fail => "FAIL",
        };
        table.add_row([
            Cell::new(mark),
            Cell::new(check.name),
            Cell::new(&check.meaning),
        ]);
        if let Some(fix) = &check.fix {
            table.add_row([Cell::new(""), Cell::new(""), Cell::new(format!("-> {fix}"))]);
        }
    }
    let rows: Vec<String> = table.lines().map(|l| l.trim_end().to_owned()).collect();
    let verdict = if report.can_run {
        "The main job can run here: VMs boot and are folded."
    } else {
        "The main job cannot run here: see FAIL above."
    };
    format!("{}\n\n{verdict}\n", rows.join("\n"))
}
