//! `memfold doctor`: what works on this host, what doesn't, and the command that fixes it.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use comfy_table::{Cell, ContentArrangement, Table, presets};
use memfold_api::{ClientError, DEFAULT_STATE};
use memfold_host::{Check, HostFacts, Report, Status, examine};
use memfold_ledger::DebtReport;
use serde::Serialize;
use serde_json::Value;
use tempfile::NamedTempFile;

use super::bench::find_bench;
use super::context::{Context, json_argument};
use super::failure::IMPOSSIBLE_HERE;

/// How long a daemon may take to say what it owes.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Directory that keeps what takes long to find out
    #[arg(long, env = "MEMFOLD_STATE", default_value = DEFAULT_STATE, value_name = "DIR")]
    state: PathBuf,
    /// Prove it too: fold memory of this process, and of two small guests, while it is written to (one to four minutes)
    #[arg(long)]
    self_test: bool,
}

/// The host's report and what the self-test proved.
#[derive(Serialize)]
struct Proved<'a> {
    #[serde(flatten)]
    host: &'a Report,
    self_test: Value,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mut report = examine(HostFacts::probe(&arguments.state));
    report.checks.extend(debt(context)?);
    if !arguments.self_test || !report.can_run {
        context.print(&report, text)?;
        return Ok(exit_code(&report));
    }
    self_test(context, &report)
}

/// Has `memfold-bench` do the self-test, and shows what it proved with the host's report.
fn self_test(context: &Context, host: &Report) -> anyhow::Result<ExitCode> {
    let program = find_bench()?;
    let figures = NamedTempFile::new().context("no file for what the self-test proves")?;
    let test = Command::new(&program)
        .arg("self-test")
        .arg(json_argument(figures.path().as_os_str()))
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let passed = test.status.success();
    let Ok(self_test) = serde_json::from_reader(figures) else {
        // It has said why.
        return Ok(ExitCode::FAILURE);
    };
    let proof = String::from_utf8_lossy(&test.stdout);
    context.print(&Proved { host, self_test }, |proved| {
        format!("{}\n\n{}", text(proved.host), proof.trim_end())
    })?;
    Ok(if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// What a daemon says of its debt, if one answers.
fn debt(context: &Context) -> anyhow::Result<Option<Check>> {
    match context.client()?.within(PATIENCE).get("/v1/debt") {
        Ok(report) => Ok(Some(DebtReport::check(&report))),
        Err(ClientError::NoDaemon { .. }) => Ok(None),
        Err(error) => Ok(Some(Check {
            name: "debt",
            status: Status::Warn,
            meaning: format!(
                "a daemon serves {}, and doesn't say what guests could call in: {:#}",
                context.socket.display(),
                anyhow::Error::from(error)
            ),
            fix: Some("memfold debt; then look at the daemon's log. It may be started anew at any time, VMs go on".into()),
        })),
    }
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
