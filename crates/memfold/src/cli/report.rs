//! `memfold report`: prints the ledger's report, which says how all RAM of the host is used.

use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use memfold_api::FullReport;
use memfold_ledger::table;

use super::context::Context;

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Show only this VM, and the host
    #[arg(long, value_name = "VM")]
    vm: Option<String>,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mut report: FullReport = context.client()?.get("/v1/report")?;
    if let Some(name) = &arguments.vm {
        report.ledger.vms.retain(|vm| vm.name == *name);
        report.fold.vms.retain(|vm| vm.name == *name);
        if report.ledger.vms.is_empty() {
            bail!("no VM named '{name}'; 'memfold vm list' shows all VMs");
        }
    }
    context.print(&report, |report| table::render(&report.ledger))
}
