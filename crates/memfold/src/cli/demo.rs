//! `memfold demo`: folds real VMs, and compares the memory saved with what KSM saves on the same
//! VMs. The program `memfold-bench` runs the demo.

use std::ffi::OsString;
use std::process::{ExitCode, Stdio};

use clap::Args;
use memfold_api::DEFAULT_STATE;
use memfold_host::{HostFacts, examine};
use memfold_units::ByteSize;

use super::bench::become_bench;
use super::context::Context;
use super::doctor;

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Seconds that KSM runs at the kernel's default rate
    #[arg(long, default_value_t = 45, value_name = "SECONDS")]
    ksm: u64,
    /// RAM of each VM
    #[arg(long, default_value = "512M", value_name = "SIZE")]
    memory: ByteSize,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let host = examine(HostFacts::probe(DEFAULT_STATE.as_ref()));
    if !host.can_run {
        context.print(&host, doctor::text)?;
        return Ok(doctor::exit_code(&host));
    }
    let words = [
        "demo".to_owned(),
        format!("--ksm={}", arguments.ksm),
        format!("--memory={}", arguments.memory.0),
    ];
    let words = words.map(OsString::from).into_iter();
    become_bench(words.chain(context.json_argument()), Stdio::inherit())
}
