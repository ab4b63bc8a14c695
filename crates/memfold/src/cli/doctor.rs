//! `memfold doctor`: what works on this host, what doesn't, and the command that fixes it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use comfy_table::{Cell, ContentArrangement, Table, presets};

use super::{Context, IMPOSSIBLE_HERE};
use crate::api::DEFAULT_STATE;
use crate::host::{HostFacts, Report, Status, examine};

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Directory that keeps what takes long to find out
    #[arg(long, env = "MEMFOLD_STATE", default_value = DEFAULT_STATE, value_name = "DIR")]
    state: PathBuf,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let report = examine(HostFacts::probe(&arguments.state));
    context.print(&report, text)?;
    Ok(exit_code(&report))
}

/// 0 when the main job can run, else 3.
pub(super) fn exit_code(report: &Report) -> ExitCode {
    if report.can_run {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(IMPOSSIBLE_HERE)
    }
}

/// The report for people.
pub(super) fn text(report: &Report) -> String {
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
    format!("{}\n\n{verdict}", rows.join("\n"))
}
