//! `memfold doctor`: checks this host, and shows commands that fix problems.

use std::ffi::OsString;
use std::io::Seek as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;

use memfold_api::{ClientError, DEFAULT_STATE};
use memfold_host::{Check, HostFacts, Report, Status, examine};
use memfold_ledger::DebtReport;

use super::bench::become_bench;
use super::context::{Context, write_line};
use super::failure::IMPOSSIBLE_HERE;
use super::table::table;

/// Time limit for the daemon to report its debt.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Directory in which results of slow checks are cached
    #[arg(long, env = "MEMFOLD_STATE", default_value = DEFAULT_STATE, value_name = "DIR")]
    state: PathBuf,
    /// Also test folding: fold memory of this process and of two small guests while it is written
    /// to (one to four minutes)
    #[arg(long)]
    self_test: bool,
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

/// Replaces this process by `memfold-bench`, which prints the self-test's results together with the
/// host's report.
pub(super) fn self_test(context: &Context, host: &Report) -> anyhow::Result<ExitCode> {
    let mut report = tempfile::tempfile().context("cannot create a file for the host's report")?;
    serde_json::to_writer(&report, host)?;
    report.rewind()?;
    if !context.json {
        write_line(&format!("{}\n", text(host)))?;
    }
    let words = [OsString::from("self-test")].into_iter();
    become_bench(words.chain(context.json_argument()), report.into())
}

/// Returns the state of the copy-on-write debt as a check for the report; `None` if no daemon
/// answers.
fn debt(context: &Context) -> anyhow::Result<Option<Check>> {
    match context.client()?.within(PATIENCE).get("/v1/debt") {
        Ok(report) => Ok(Some(DebtReport::check(&report))),
        Err(ClientError::NoDaemon { .. }) => Ok(None),
        Err(error) => Ok(Some(Check {
            name: "debt",
            status: Status::Warn,
            meaning: format!(
                "a daemon serves {}, but does not report its debt: {:#}",
                context.socket.display(),
                anyhow::Error::from(error)
            ),
            fix: Some("run 'memfold debt', then read the daemon's log. The daemon can be restarted at any time, VMs go on".into()),
        })),
    }
}

/// Returns exit code 0 if VMs can be booted and folded on this host, else 3.
pub(super) fn exit_code(report: &Report) -> ExitCode {
    if report.can_run {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(IMPOSSIBLE_HERE)
    }
}

/// Formats the report as text.
pub(super) fn text(report: &Report) -> String {
    let mut rows = Vec::new();
    for check in &report.checks {
        let mark = match check.status {
            Status::Ok => "ok",
            Status::Warn => "warn",
            Status::Fail => "FAIL",
        };
        rows.push([mark, check.name, &check.meaning].map(str::to_owned));
        let fix = check.fix.iter();
        rows.extend(fix.map(|fix| [String::new(), String::new(), format!("-> {fix}")]));
    }
    let verdict = if report.can_run {
        "The main job can run here: VMs boot and are folded."
    } else {
        "The main job cannot run here: see FAIL above."
    };
    format!("{}\n\n{verdict}", table("", rows))
}
