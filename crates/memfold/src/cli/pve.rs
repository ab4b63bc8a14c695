//! `memfold pve`: enables, disables and lists VMs of Proxmox VE.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Subcommand;
use clap::builder::RangedI64ValueParser;
use memfold_api::{ClientError, VmInfo};
use memfold_pve::{Change, Config, Node, PveError};
use memfold_vm::endpoints;
use serde::Serialize;

use super::context::Context;
use super::table::table as format_table;

#[derive(Subcommand, Debug)]
pub(super) enum Arguments {
    /// Make a VM start with memfold on this node, and say what will keep it from being folded. The
    /// VM's configuration does not change
    Enable {
        /// Number of the VM
        #[arg(value_parser = vmid())]
        vmid: u32,
        /// Trust domain, whose VMs may share memory with each other. Without one, the VM shares
        /// with no other VM
        #[arg(long)]
        domain: Option<String>,
    },
    /// Make a VM start without memfold again
    Disable {
        /// Number of the VM, which need not exist any more
        #[arg(value_parser = vmid())]
        vmid: u32,
    },
    /// List VMs: whether they are enabled, their trust domain, and whether they are folded
    Status {
        /// Number of a VM; all VMs of this node by default
        #[arg(value_parser = vmid())]
        vmid: Option<u32>,
    },
}

/// Accepts the numbers that Proxmox VE gives to VMs (`pve-vmid`).
fn vmid() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(100..=999_999_999)
}

/// What memfold does with a VM of Proxmox VE.
#[derive(Debug, Serialize)]
struct VmStatus {
    vmid: u32,
    /// Whether the VM runs on this node.
    running: bool,
    /// Whether the VM is enabled on this node.
    enabled: bool,
    /// Trust domain in which the VM is enabled.
    domain: Option<String>,
    /// Whether the VM's QEMU was started with memfold's library; `None`: the VM does not run.
    started_with_memfold: Option<bool>,
    /// Name of the VM in memfold; `None`: the daemon does not manage the VM.
    vm: Option<String>,
    /// Whether the VM's memory is folded and, if not, why or what to do.
    folding: String,
}

pub(super) fn run(context: &Context, arguments: Arguments) -> anyhow::Result<ExitCode> {
    let node = Node::here();
    match arguments {
        Arguments::Enable { vmid, domain } => {
            let change = node.enable(vmid, domain.as_deref());
            let change = change.with_context(|| format!("cannot enable VM {vmid}"))?;
            context.print(&change, |change| words(change, "enabled"))
        }
        Arguments::Disable { vmid } => {
            let change = node.disable(vmid);
            let change = change.with_context(|| format!("cannot disable VM {vmid}"))?;
            context.print(&change, |change| words(change, "disabled"))
        }
        Arguments::Status { vmid } => {
            let rows = rows(context, &node, vmid)?;
            context.print(&rows, |rows| table(rows))
        }
    }
}

fn words(change: &Change, done: &str) -> String {
    let vmid = change.vmid;
    let already = if change.changed { "" } else { " already" };
    let domain = change.domain.as_ref();
    let domain = domain.map_or_else(String::new, |domain| format!(" in trust domain {domain}"));
    let when = match &change.node {
        Some(node) => format!(
            "; node '{node}' has this VM, and it will run with memfold when it is moved to this node"
        ),
        None if change.changed && change.running => format!(
            "; the change takes effect when the running VM is shut down and started again, or at 'qm reboot {vmid}' (a reboot inside the guest is not enough)"
        ),
        None => String::new(),
    };
    let obstacle = change.not_folded.as_ref();
    let obstacle = obstacle.map_or_else(String::new, |why| format!("\n  not folded: {why}"));
    format!("VM {vmid}: {done}{already}{domain}{when}{obstacle}")
}

/// Returns the status of one VM, or of all VMs that this node has or that are enabled on it.
fn rows(context: &Context, node: &Node, only: Option<u32>) -> anyhow::Result<Vec<VmStatus>> {
    let vms: Result<Vec<VmInfo>, ClientError> = context.client()?.get("/v1/vms");
    // Without a daemon, the list of enabled VMs is still useful.
    let vms = match vms {
        Err(error @ ClientError::Refused { .. }) => return Err(error.into()),
        vms => vms.ok(),
    };
    let listed = || anyhow::Ok([node.vms()?, node.marked()?].concat());
    let mut vmids = only.map_or_else(listed, |vmid| Ok(vec![vmid]))?;
    vmids.sort_unstable();
    vmids.dedup();
    let one = |vmid| {
        let row = row(node, vmid, vms.as_deref());
        row.with_context(|| format!("cannot show VM {vmid}"))
    };
    vmids.into_iter().map(one).collect()
}

fn row(node: &Node, vmid: u32, vms: Option<&[VmInfo]>) -> anyhow::Result<VmStatus> {
    let mark = node.mark(vmid)?;
    let process = node.process(vmid);
    let with = process.map(|pid| endpoints::library(pid).map(|library| library.loaded));
    let with = with.transpose();
    let with = with.context("cannot read the VM's QEMU process; run this command as root")?;
    let is_process = |vm: &&VmInfo| process.is_some_and(|pid| pid.as_raw_nonzero().get() == vm.pid);
    let vm = vms.unwrap_or_default().iter().find(is_process);
    let config = node.config(vmid)?;
    if mark.is_none() && process.is_none() && config.is_none() {
        return Err(PveError::NoVm(vmid).into());
    }
    let folding = if let Some(vm) = vm {
        match vm.fold_problems.first() {
            Some(problem) => format!("no: {problem}"),
            None if vm.refold_problems.is_empty() => "yes".into(),
            None => "yes, but not again pages that the guest has rewritten (direct I/O)".into(),
        }
    } else {
        match (&mark, &config, with) {
            (_, None, None) => {
                format!("no: the cluster has no such VM; run 'memfold pve disable {vmid}'")
            }
            (None, ..) => "no: not enabled".into(),
            (Some(mark), Some(Config { uuid, .. }), _) if !mark.fits(uuid.as_deref()) => format!(
                "no: the VM got another UUID after it was enabled; run 'memfold pve enable {vmid}' again"
            ),
            (
                _,
                Some(Config {
                    node: Some(other), ..
                }),
                None,
            ) => {
                format!("when it is moved here from node '{other}'")
            }
            (_, _, None) => "when it is started".into(),
            (_, _, Some(false)) => {
                let words = process.map(endpoints::command_line).transpose()?;
                let why = node.obstacle(&words.unwrap_or_default())?;
                let why = why.unwrap_or_else(|| {
                    "enabled after the VM's start; shut the VM down and start it again".into()
                });
                format!("no: {why}")
            }
            _ if vms.is_none() => {
                "no: the daemon does not answer; start it with 'memfold serve'".into()
            }
            _ => "no: not attached yet; if this lasts, the daemon's log says why".into(),
        }
    };
    Ok(VmStatus {
        vmid,
        running: process.is_some(),
        enabled: mark.is_some(),
        domain: mark.and_then(|mark| mark.domain),
        started_with_memfold: with,
        vm: vm.map(|vm| vm.name.clone()),
        folding,
    })
}

fn table(rows: &[VmStatus]) -> String {
    if rows.is_empty() {
        return "this node has no VMs of Proxmox VE".into();
    }
    let rows = rows.iter().map(|row| {
        let none = || "-".to_owned();
        [
            row.vmid.to_string(),
            if row.running { "running" } else { "off" }.into(),
            if row.enabled { "yes" } else { "no" }.into(),
            row.domain.clone().unwrap_or_else(none),
            row.vm.clone().unwrap_or_else(none),
            row.folding.clone(),
        ]
    });
    format_table(">VMID  STATE  ENABLED  TRUST DOMAIN  VM  FOLDING", rows)
}
