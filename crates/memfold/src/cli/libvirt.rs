//! `memfold libvirt`: enables, disables, lists and adopts libvirt domains.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Subcommand;

use memfold_api::{ClientError, LibvirtRequest, VmInfo};
use memfold_libvirt::{self as libvirt, Change, DomainStatus};

use super::context::Context;
use super::failure;
use super::table::table as format_table;
use super::vm_info::describe;

#[derive(Subcommand, Debug)]
pub(super) enum Arguments {
    /// Make domains start with memfold: change <emulator> in their XML, and add a channel for the
    /// agent and a mark with the trust domain
    Enable {
        /// Domains of libvirt, by name
        #[arg(required = true, value_name = "DOMAIN")]
        names: Vec<String>,
        /// Trust domain, whose VMs may share memory with each other. Without one, these VMs share
        /// with no other VM
        #[arg(long)]
        domain: Option<String>,
    },
    /// Restore domains' original XML
    Disable {
        /// Domains of libvirt, by name
        #[arg(required = true, value_name = "DOMAIN")]
        names: Vec<String>,
    },
    /// List domains: whether they are enabled (by hand, or by the tag in their XML), their trust
    /// domain, and whether they are folded
    Status,
    /// Adopt a running domain now, or say why that fails (the daemon also adopts domains by itself)
    Attach {
        /// Domain of libvirt, by name
        #[arg(value_name = "DOMAIN")]
        name: String,
    },
}

pub(super) fn run(context: &Context, arguments: Arguments) -> anyhow::Result<ExitCode> {
    match arguments {
        Arguments::Enable { names, domain } => {
            let enable = |name: &String| libvirt::enable(name, domain.as_deref());
            each(context, &names, "enable", enable)
        }
        Arguments::Disable { names } => {
            each(context, &names, "disable", |name| libvirt::disable(name))
        }
        Arguments::Status => context.print(&rows(context)?, |rows| table(rows)),
        Arguments::Attach { name } => {
            let request = LibvirtRequest { domain: name };
            let vm: VmInfo = context.client()?.post("/v1/libvirt/attach", &request)?;
            context.print(&vm, |vm| describe("has", vm))
        }
    }
}

/// Applies `work` (to `verb`: enable or disable) to all names in order. If it fails for some, the
/// other changes are made and printed, then the errors.
fn each(
    context: &Context,
    names: &[String],
    verb: &str,
    work: impl Fn(&String) -> Result<Change, libvirt::LibvirtError>,
) -> anyhow::Result<ExitCode> {
    let one = |name| work(name).with_context(|| format!("cannot {verb} '{name}'"));
    let (changes, errors) = failure::separate(names.iter().map(one));
    let mut code = ExitCode::SUCCESS;
    if !changes.is_empty() {
        code = context.print(&changes, |list| words(list, verb))?;
    }
    Ok(failure::fail_each(&errors, code))
}

fn words(changes: &[Change], verb: &str) -> String {
    let line = |change: &Change| {
        let already = if change.changed { "" } else { " already" };
        let domain = match &change.trust_domain {
            Some(domain) => format!(" in trust domain {domain}"),
            None => String::new(),
        };
        let when = if !change.changed {
            ""
        } else if change.running {
            "; the change takes effect when the running domain is shut down and started again (a reboot of the guest is not enough)"
        } else if change.managed_save {
            "; the domain's next start restores its saved memory unchanged, so the change takes effect at the start after that, or after 'virsh managedsave-remove'"
        } else {
            ""
        };
        let reasons = change.not_folded.iter();
        let reasons = reasons.map(|r| format!("\n  not folded: {r}"));
        let costs = change.costs.iter().map(|c| format!("\n  note: {c}"));
        let reasons: String = reasons.chain(costs).collect();
        format!("{}: {verb}d{already}{domain}{when}{reasons}", change.domain)
    };
    changes.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn rows(context: &Context) -> anyhow::Result<Vec<DomainStatus>> {
    let vms: Result<Vec<VmInfo>, ClientError> = context.client()?.get("/v1/vms");
    // Without a daemon, the list of enabled domains is still useful.
    let vms = match vms {
        Err(error @ ClientError::Refused { .. }) => return Err(error.into()),
        vms => vms.ok(),
    };
    let vms: Option<Vec<_>> = vms.map(|vms| vms.iter().filter_map(VmInfo::of_libvirt).collect());
    Ok(libvirt::status(vms.as_deref())?)
}

fn table(rows: &[DomainStatus]) -> String {
    if rows.is_empty() {
        return "libvirt has no domains".into();
    }
    let rows = rows.iter().map(|row| {
        let none = || "-".to_owned();
        let trust = row.mark.as_ref().and_then(|mark| mark.domain.clone());
        [
            row.domain.clone(),
            if row.running { "running" } else { "off" }.into(),
            row.enabled().into(),
            trust.unwrap_or_else(none),
            row.vm.clone().unwrap_or_else(none),
            row.folding.clone(),
        ]
    });
    format_table("DOMAIN  STATE  ENABLED  TRUST DOMAIN  VM  FOLDING", rows)
}
