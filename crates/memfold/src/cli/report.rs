//! `memfold report`: the ledger.

use std::process::ExitCode;

use anyhow::bail;
use clap::Args;

use super::{Context, write_line};
use crate::api::FullReport;
use crate::ledger::{Report, table};

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Show this VM alone, beside the host
    #[arg(long, value_name = "VM")]
    vm: Option<String>,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mut report: FullReport = context.client()?.get("/v1/report")?;
    if let Some(name) = &arguments.vm {
        report.ledger.vms.retain(|vm| vm.name == *name);
        report.fold.vms.retain(|vm| vm.name == *name);
        if report.ledger.vms.is_empty() {
            bail!("no VM '{name}'; 'memfold vm list' shows them");
        }
    }
    if context.json {
        write_line(&serde_json::to_string_pretty(&report)?)?;
    } else {
        print(&report.ledger, false)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a ledger taken without a daemon: a table for persons, or the whole of it as JSON.
pub(crate) fn print(report: &Report, json: bool) -> anyhow::Result<()> {
    write_line(&if json {
        serde_json::to_string_pretty(report)?
    } else {
        table::render(report)
    })
}
