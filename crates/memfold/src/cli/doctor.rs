//! `memfold doctor`: what works on this host, what doesn't, and the command that fixes it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use comfy_table::{Cell, ContentArrangement, Table, presets};
use memfold_api::{ClientError, DEFAULT_STATE};
use memfold_host::{Check, HostFacts, Report, Status, examine};
use memfold_ledger::DebtReport;
use serde::Serialize;

use super::context::Context;
use super::failure::IMPOSSIBLE_HERE;
use crate::bench::selftest::{self, SelfTest};

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
    self_test: SelfTest,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mut report = examine(HostFacts::probe(&arguments.state));
    report.checks.extend(debt(context)?);
    if !arguments.self_test || !report.can_run {
        context.print(&report, text)?;
        return Ok(exit_code(&report));
    }
    let began = Instant::now();
    let self_test = selftest::run(&|step| {
        memfold_host::say!("{:6.1} s  {step}", began.elapsed().as_secs_f64());
    })?;
    let passed = self_test.passed;
    let proved = Proved {
        host: &report,
        self_test,
    };
    context.print(&proved, |p| {
        format!("{}\n\n{}", text(p.host), proof(&p.self_test))
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

/// What was proved, for people.
fn proof(test: &SelfTest) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    for claim in &test.claims {
        let mark = if claim.holds { "ok" } else { "FAIL" };
        table.add_row([mark, claim.what, &claim.seen]);
    }
    let guests = &test.guests;
    let figures = [
        (
            "accelerator",
            format!("{}, by QEMU's word", test.accelerator),
        ),
        (
            "longest freeze",
            format!(
                "{:.0} us in guests, {:.0} us in this process",
                guests.freeze_max_us, test.library.freeze_max_us
            ),
        ),
        (
            "median freeze",
            format!("below {:.0} us in guests", guests.freeze_median_us),
        ),
        (
            "CPU",
            format!(
                "{:.2} s engine, {:.2} s in QEMUs",
                guests.engine_cpu_s, guests.library_cpu_s
            ),
        ),
        ("took", format!("{:.0} s", test.seconds)),
    ];
    for (name, value) in figures {
        table.add_row(["", name, &value]);
    }
    let rows: Vec<String> = table.lines().map(|l| l.trim_end().to_owned()).collect();
    let verdict = if test.passed {
        "Self-test passed: what memfold does to memory here, nobody loses a byte by."
    } else {
        "Self-test FAILED: don't fold VMs on this host, and report this."
    };
    format!("{}\n\n{verdict}", rows.join("\n"))
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
