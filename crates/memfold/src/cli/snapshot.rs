//! `memfold snapshot` and `memfold clone`.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use memfold_units::{ByteSize, PAGE_SIZE};

use super::Context;
use super::vm::segment;
use crate::api::{Client, RestoreRequest, SaveRequest, VerifyReport, VmInfo};
use crate::snapshot::{Keep, Manifest, SnapshotInfo};

#[derive(Subcommand, Debug)]
pub(super) enum Arguments {
    /// Save a VM: memory, devices and disks at one instant; it goes on
    Save {
        /// The VM
        vm: String,
        /// Name of the snapshot
        name: String,
        /// What to keep of what the guest can get again
        #[arg(long, value_enum, default_value_t)]
        keep: Keep,
    },
    /// Start a VM from a snapshot
    Restore {
        /// The snapshot
        name: String,
        /// Name of the VM; the saved one's by default
        #[arg(long = "as", value_name = "NAME")]
        vm: Option<String>,
    },
    /// All snapshots
    List,
    /// What a snapshot says of itself
    Inspect {
        /// The snapshot
        name: String,
    },
    /// Read a snapshot whole and compare its checksums
    Verify {
        /// The snapshot
        name: String,
    },
    /// Remove snapshots that no VM runs from
    Remove {
        /// The snapshots
        #[arg(required = true)]
        names: Vec<String>,
    },
}

/// Start VMs from one snapshot: what they write is their own, the rest they share
#[derive(Args, Debug)]
pub(super) struct CloneArguments {
    /// The snapshot
    snapshot: String,
    /// How many
    #[arg(short = 'n', long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    number: u32,
    /// Names begin so, and end with a number; the snapshot's name by default
    #[arg(long)]
    prefix: Option<String>,
}

pub(super) fn run(context: &Context, arguments: Arguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    match arguments {
        Arguments::Save { vm, name, keep } => {
            let manifest: Manifest =
                client.post("/v1/snapshots", &SaveRequest { vm, name, keep })?;
            context.print(&manifest, |m| {
                let free = m.free_kept.as_ref().map_or(String::new(), |why| {
                    format!("\nwhat the guest had free was saved too: {why}")
                });
                format!(
                    "saved {} as {} in {:.0} ms ({} of {}; the VM stood still for {:.0} ms){free}",
                    m.vm,
                    m.name,
                    m.save_ms,
                    ByteSize(m.counts.saved_pages * PAGE_SIZE),
                    ByteSize(m.counts.pages * PAGE_SIZE),
                    m.pause_ms
                )
            })?;
        }
        Arguments::Restore { name, vm } => {
            let vm = match vm {
                Some(vm) => vm,
                None => client.get::<Manifest>(&path(&name)?)?.vm,
            };
            let info = restore(&client, &name, vm)?;
            context.print(&info, |vm| super::vm::describe("restored", vm))?;
        }
        Arguments::List => {
            let list: Vec<SnapshotInfo> = client.get("/v1/snapshots")?;
            context.print(&list, |list| table(list))?;
        }
        Arguments::Inspect { name } => {
            let manifest: Manifest = client.get(&path(&name)?)?;
            context.print(&manifest, |m| {
                serde_json::to_string_pretty(m).unwrap_or_default()
            })?;
        }
        Arguments::Verify { name } => {
            let report: VerifyReport = client.post(&format!("{}/verify", path(&name)?), &())?;
            let right = report.problems.is_empty();
            context.print(&report, |report| {
                if right {
                    format!("{}: as it was saved", report.name)
                } else {
                    report.problems.join("\n")
                }
            })?;
            return Ok(ExitCode::from(u8::from(!right)));
        }
        Arguments::Remove { names } => {
            for name in &names {
                client
                    .delete::<()>(&path(name)?)
                    .with_context(|| format!("cannot remove '{name}'"))?;
            }
            let removed = serde_json::json!({ "removed": names });
            context.print(&removed, |_| format!("removed {}", names.join(", ")))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn clone(context: &Context, arguments: &CloneArguments) -> anyhow::Result<ExitCode> {
    let client = context.client()?;
    let prefix = arguments.prefix.as_ref().unwrap_or(&arguments.snapshot);
    let mut clones = Vec::new();
    for number in 1..=arguments.number {
        let name = format!("{prefix}-{number}");
        let info = restore(&client, &arguments.snapshot, name.clone())
            .with_context(|| format!("clone '{name}' did not start; {} run", clones.len()))?;
        clones.push(info);
    }
    context.print(&clones, |clones| {
        let lines: Vec<String> = clones
            .iter()
            .map(|vm| super::vm::describe("cloned", vm))
            .collect();
        lines.join("\n")
    })?;
    Ok(ExitCode::SUCCESS)
}

fn path(name: &str) -> anyhow::Result<String> {
    Ok(format!("/v1/snapshots/{}", segment(name)?))
}

fn restore(client: &Client, snapshot: &str, vm: String) -> anyhow::Result<VmInfo> {
    Ok(client.post(
        &format!("{}/restore", path(snapshot)?),
        &RestoreRequest { vm },
    )?)
}

fn table(list: &[SnapshotInfo]) -> String {
    if list.is_empty() {
        return "no snapshots; 'memfold snapshot save VM NAME' makes one".into();
    }
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header([
        "NAME", "VM", "DOMAIN", "RAM", "ON DISK", "RUNS IN", "PROBLEM",
    ]);
    for snapshot in list {
        table.add_row([
            snapshot.name.clone(),
            snapshot.vm.clone(),
            snapshot.domain.clone().unwrap_or_default(),
            ByteSize(snapshot.memory_bytes).to_string(),
            ByteSize(snapshot.disk_bytes).to_string(),
            snapshot.users.join(", "),
            snapshot.problem.clone().unwrap_or_default(),
        ]);
    }
    table.to_string()
}
