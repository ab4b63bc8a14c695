//! Reports for which libvirt domains memfold is enabled, and which of their VMs the daemon manages.

use std::path::Path;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{DEFAULT_RUN, LibvirtError, Mark, Running, Tag, virsh};

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
    /// Trust domain in the tag of the domain's XML, by which the daemon enables the domain; null:
    /// there is no tag, or it is wrong.
    pub tag: Option<String>,
    /// Reason why the tag is wrong, so that it enables nothing; null: there is no tag, or it is
    /// valid.
    pub tag_problem: Option<String>,
    /// Whether the domain's QEMU was started with memfold's library; null: the domain does not run.
    pub started_with_memfold: Option<bool>,
    /// Name of the domain's VM in memfold; null: the daemon does not manage the domain.
    pub vm: Option<String>,
    /// Text for the operator: whether the domain's memory is folded and, if not, why or what to do.
    pub folding: String,
}

impl DomainStatus {
    /// Returns whether and why the domain is enabled, as a text for the operator.
    #[must_use]
    pub const fn enabled(&self) -> &'static str {
        match (&self.mark, &self.tag_problem) {
            (Some(mark), None) if mark.by_tag => "by tag",
            (Some(mark), Some(_)) if mark.by_tag => "by tag, now wrong",
            (Some(_), None) => "by hand",
            (Some(_), Some(_)) => "by hand; wrong tag",
            (None, None) => "no",
            (None, Some(_)) => "no: wrong tag",
        }
    }
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
        let tag = Tag::read(&xml).map_err(LibvirtError::of_xml(&domain))?;
        let with = now.map(|running| running.qmp().is_some());
        let vm = vms
            .unwrap_or_default()
            .iter()
            .find(|vm| vm.domain == domain);
        Ok(DomainStatus {
            running: now.is_some(),
            folding: match (&tag, &mark) {
                (Some(tag), None) if with != Some(true) => not_enabled_by(&domain, tag),
                _ => folding(&domain, (with, mark.is_some(), vm), vms.is_some()),
            },
            started_with_memfold: with,
            vm: vm.map(|vm| vm.name.clone()),
            mark,
            tag: tag.as_ref().and_then(Tag::domain).map(str::to_owned),
            tag_problem: tag.as_ref().and_then(Tag::problem).map(str::to_owned),
            domain,
        })
    };
    virsh::domains()?.into_iter().map(one).collect()
}

/// Says why a domain with a tag is not enabled, and what the operator can do.
fn not_enabled_by(domain: &str, tag: &Tag) -> String {
    match tag {
        Tag::Wrong(why) => format!("no: not enabled, because its tag is wrong: {why}"),
        Tag::Domain(name) => format!(
            "no: not yet enabled by its tag; if this lasts, 'memfold libvirt enable {domain} --domain {name}' says why"
        ),
    }
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
