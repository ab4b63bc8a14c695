//! `memfold fork`: starts VMs that continue a running VM from this instant, while that VM goes on.

use std::num::NonZeroU32;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use memfold_api::{ForkReport, ForkRequest, RestoreRequest, VmInfo};
use memfold_units::ByteSize;
use memfold_vm::Forward;
use serde::Serialize;

use super::context::{Context, write_line};
use super::snapshot::{Clone, renew, start_clones, wait_for_identities};
use super::vm_info::segment;

/// Start VMs that continue a running VM from this instant; the running VM goes on
#[derive(Args, Debug)]
#[allow(clippy::struct_excessive_bools)] // flags
pub(super) struct ForkArguments {
    /// VM to fork
    vm: String,
    /// Number of forks
    #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    number: u32,
    /// Prefix of the forks' names, which end with a number that is free; by default, the VM's name
    /// and '-fork'
    #[arg(long, value_name = "PREFIX")]
    name: Option<String>,
    /// Give each fork its own host name, machine ID and SSH host keys; random numbers and MAC
    /// addresses are always renewed
    #[arg(long)]
    identity: bool,
    /// Do not wait until the forks' agents have renewed their identities
    #[arg(long)]
    no_wait: bool,
    /// Wait until the VM shares its memory with the forks' snapshot before forks start; by default,
    /// that happens in the background
    #[arg(long)]
    wait_shared: bool,
    /// Keep the snapshot from which the forks start; by default, it is removed when no VM needs it
    #[arg(long)]
    keep: bool,
    /// Start the forks even if their identities cannot be renewed: the guest has neither an agent
    /// nor a driver for VM generation IDs
    #[arg(long)]
    force: bool,
    /// Start the forks even if the brake is on: guests could claim more memory than this host has
    /// available (see 'memfold debt')
    #[arg(long)]
    despite_brake: bool,
    /// Forward a port of this host (127.0.0.1 by default) to each guest; HOST-PORT 0 is a free port
    /// for each fork; several allowed
    #[arg(long = "forward", value_name = "HOST-PORT:GUEST-PORT")]
    forwards: Vec<Forward>,
    /// Switch each fork off when so many seconds have passed since its start, or since its time to
    /// live was last set ('vm set')
    #[arg(long, value_name = "SECONDS")]
    ttl: Option<NonZeroU32>,
}

/// Result of a fork, as it is printed.
#[derive(Debug, Serialize)]
struct Forked {
    #[serde(flatten)]
    report: ForkReport,
    forks: Vec<Clone>,
}

pub(super) fn run(context: &Context, arguments: &ForkArguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    let vm = &arguments.vm;
    let began = Instant::now();
    let request = ForkRequest {
        keep: arguments.keep,
        wait: arguments.wait_shared,
    };
    let report: ForkReport = client.post(&format!("/v1/vms/{}/fork", segment(vm)?), &request)?;
    if !context.json {
        write_line(&describe(
            &report,
            vm,
            began.elapsed().as_secs_f64() * 1000.0,
        ))?;
    }
    let vms: Vec<VmInfo> = client.get("/v1/vms")?;
    let prefix = arguments
        .name
        .clone()
        .unwrap_or_else(|| format!("{vm}-fork"));
    let names = (1..).map(|number: u32| format!("{prefix}-{number}"));
    let free = names.filter(|name| vms.iter().all(|vm| vm.name != *name));
    let number = usize::try_from(arguments.number)?;
    let restore = RestoreRequest {
        renew: renew(arguments.identity),
        force: arguments.force,
        despite_brake: arguments.despite_brake,
        forwards: arguments.forwards.clone(),
        ttl_s: arguments.ttl,
        ..RestoreRequest::new("")
    };
    let of = (report.snapshot.as_str(), "forked");
    let free = free.take(number);
    let mut forks = start_clones(context, &client, of, free, &restore, |forks| {
        let report = report.clone();
        let forked = Forked { report, forks };
        context.print(&forked, |_| String::new()).map(drop)
    })?;
    let left = if arguments.no_wait {
        Vec::new()
    } else {
        wait_for_identities(&client, &mut forks)?
    };
    let forked = Forked {
        report: report.clone(),
        forks,
    };
    context.print(&forked, |forked| {
        match (arguments.no_wait, left.is_empty()) {
            (true, _) => "each guest's identity is renewed when its agent answers".into(),
            (false, true) => format!("{} with renewed identity", forked.forks.len()),
            (false, false) => left.join("\n"),
        }
    })?;
    Ok(ExitCode::from(u8::from(!left.is_empty())))
}

/// Describes the snapshot from which forks start, as text.
fn describe(report: &ForkReport, vm: &str, ms: f64) -> String {
    let own = ByteSize(report.own_bytes);
    let saved = match &report.parent {
        Some(parent) => format!("{own} of {vm} differ from '{parent}' and were saved"),
        None => format!("{own} of {vm} were saved, because it ran from no snapshot"),
    };
    let shared = report.shared_bytes.map(ByteSize);
    let shared = shared.map_or_else(String::new, |shared| {
        format!(", and shares {shared} with its forks")
    });
    let why = report.not_shared.as_ref();
    let why = why.map_or_else(String::new, |why| format!(" ({why})"));
    format!(
        "{saved} as {} in {ms:.0} ms; it stood still for {:.0} ms{shared}{why}",
        report.snapshot, report.pause_ms
    )
}
