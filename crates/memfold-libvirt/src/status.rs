//! Reports for which libvirt domains memfold is enabled, and which of their VMs the daemon manages.

use std::path::Path;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{DEFAULT_RUN, LibvirtError, Mark, Running, virsh};

/// What memfold does with a libvirt domain, as `memfold libvirt status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DomainStatus {
    /// Name of the domain in libvirt.
    pub domain: String,
    /// Whether the libvirt domain runs.
    pub running: bool,
    /// memfold's settings in the metadata of the domain's XML; null: memfold is not enabled for the
    /// domain.
    #[schema(value_type = Option<Object>)]
    pub mark: Option<Mark>,
    /// Whether the domain's QEMU was started with memfold's library; null: the domain does not run.
    pub started_with_memfold: Option<bool>,
    /// Name of the domain's VM in memfold; null: the daemon does not manage the domain.
    pub vm: Option<String>,
    /// Text for the operator: whether the domain's memory is folded and, if not, why or what to do.
    pub folding: String,
}

/// What the daemon knows about a VM that libvirt started.
#[derive(Clone, Debug)]
pub struct KnownVm {
    /// Name of the VM in memfold.
    pub name: String,
    /// Name of the domain in libvirt.
    pub domain: String,
    /// The first reason why the VM's RAM is not folded; `None`: nothing prevents folding.
    pub fold_problem: Option<String>,
    /// Whether the VM's pages can be folded again while the VM runs, after the guest has rewritten
    /// them.
    pub folds_again: bool,
}

/// Returns the status of all libvirt domains. `vms`: the VMs that the daemon manages; `None`: the
/// daemon does not answer.
pub fn status(vms: Option<&[KnownVm]>) -> Result<Vec<DomainStatus>, LibvirtError> {
    let running = Running::all(Path::new(DEFAULT_RUN)).unwrap_or_default();
    let one = |domain: String| {
        let now = running.iter().find(|r| r.domain == domain);
        let xml = virsh::inactive_xml(&domain)?;
        let mark = Mark::read(&xml).map_err(LibvirtError::of_xml(&domain))?;
        let with = now.map(|running| running.qmp().is_some());
        let vm = vms
            .unwrap_or_default()
            .iter()
            .find(|vm| vm.domain == domain);
        Ok(DomainStatus {
            running: now.is_some(),
            folding: folding(&domain, (with, mark.is_some(), vm), vms.is_some()),
            started_with_memfold: with,
            vm: vm.map(|vm| vm.name.clone()),
            mark,
            domain,
        })
    };
    virsh::domains()?.into_iter().map(one).collect()
}

/// Describes the folding of a domain's memory, and what the operator can do. `found`: whether the
/// domain was started with memfold, whether it is enabled, and its VM. `answers`: whether a daemon
/// answers.
fn folding(domain: &str, found: (Option<bool>, bool, Option<&KnownVm>), answers: bool) -> String {
    match found {
        (None | Some(false), false, _) => "no: not enabled",
        (None, true, _) => "when it is started",
        (Some(false), true, _) => {
            "no: enabled after the domain's start; shut the domain down and start it again"
        }
        _ if !answers => "no: the daemon does not answer; start it with 'memfold serve'",
        (_, _, None) => {
            return format!("no: not adopted; 'memfold libvirt attach {domain}' says why");
        }
        (_, _, Some(vm)) => match &vm.fold_problem {
            Some(problem) => return format!("no: {problem}"),
            None if vm.folds_again => "yes",
            None => "yes, but not again pages that the guest has rewritten (direct I/O)",
        },
    }
    .into()
}
