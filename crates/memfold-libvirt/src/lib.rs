//! Integrates libvirt domains: enables memfold in their XML, and finds their QEMU processes when
//! they run.
//!
//! Enabling changes the domain's XML: memfold's wrapper script as `<emulator>`, a `<channel>` for
//! the guest's agent, and the trust domain as `<metadata>`. At the domain's start, libvirt runs the
//! wrapper script, which starts QEMU with memfold's library.
//!
//! ```text
//!   memfold libvirt enable   ---virsh define--->  the domain's XML: <emulator> wrapper, <channel> of the agent, <metadata> trust domain
//!   virsh start: libvirt --> wrapper --> QEMU with the library, and a QMP socket for the daemon, in the domain's own directory
//!   daemon:  RUN/*.pid --> the QEMU process --> its sockets     virsh dumpxml --> trust domain
//! ```
//! All state about a domain is in its XML; memfold keeps no other record.

pub mod hindrances;
mod running;
pub mod status;
pub mod virsh;
pub mod wrapper;
pub mod xml;

pub use running::{DEFAULT_RUN, Running};
pub use status::{DomainStatus, KnownVm, status};
pub use virsh::{DomainFacts, VirshError};
pub use wrapper::WrapperError;
pub use xml::{Mark, XmlError};

use hindrances::Foretold;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Reason why a libvirt domain could not be enabled, disabled or adopted.
#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    /// libvirt refused the operation, or cannot be reached.
    #[error(transparent)]
    Virsh(#[from] VirshError),
    /// memfold does not support the domain's XML.
    #[error("domain '{domain}': {source}")]
    Xml {
        /// Name of the domain.
        domain: String,
        /// Reason why the XML is not supported.
        source: XmlError,
    },
    /// The wrapper script cannot be installed beside the domain's QEMU.
    #[error(transparent)]
    Wrapper(#[from] WrapperError),
    /// The domain with this name is transient: it exists only while it runs, so libvirt stores no
    /// XML that memfold could change.
    #[error(
        "domain '{0}' is transient, so libvirt stores no XML that memfold could change; define the domain first (virsh define)"
    )]
    Transient(String),
    /// The name is not valid for a trust domain.
    #[error(transparent)]
    Name(#[from] memfold_vm::SpecError),
}

impl LibvirtError {
    fn of_xml(domain: &str) -> impl Fn(XmlError) -> Self {
        move |source| Self::Xml {
            domain: domain.to_owned(),
            source,
        }
    }
}

/// Result of enabling or disabling memfold for a libvirt domain ([`enable`], [`disable`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Change {
    /// Name of the libvirt domain.
    pub domain: String,
    /// Trust domain of the libvirt domain; null: the domain has none, or memfold was disabled.
    pub trust_domain: Option<String>,
    /// Whether this call changed the libvirt domain's XML.
    pub changed: bool,
    /// Whether the libvirt domain runs. If so, the change takes effect at the domain's next start.
    pub running: bool,
    /// Whether libvirt has saved the domain's memory (managed save). If so, the domain's next start
    /// continues with the old settings.
    pub managed_save: bool,
    /// Settings in the libvirt domain's XML that prevent folding of the domain's memory; empty:
    /// none.
    #[serde(default)]
    pub not_folded: Vec<String>,
    /// Settings in the libvirt domain's XML that cost the host other resources, such as CPUs that
    /// the guest never yields.
    #[serde(default)]
    pub costs: Vec<String>,
}

/// Enables memfold for a libvirt domain, given by name, ID or UUID. The change takes effect at the
/// domain's next start. Safe to repeat.
pub fn enable(domain: &str, trust_domain: Option<&str>) -> Result<Change, LibvirtError> {
    if let Some(name) = trust_domain {
        memfold_vm::check_name("domain", name)?;
    }
    let facts = persistent(domain)?;
    let wrong = LibvirtError::of_xml(&facts.name);
    let before = virsh::inactive_xml(&facts.name)?;
    let emulator = xml::own_emulator(&before).map_err(&wrong)?;
    let wrapped = wrapper::ensure(&emulator)?;
    let enabled = xml::enable(&before, trust_domain, &wrapped).map_err(&wrong)?;
    if enabled != before {
        virsh::define(&enabled)?;
        // libvirt adds controllers for the agent's port if no controller is free. The mark records
        // them, so that they can be removed, too.
        let after = virsh::inactive_xml(&facts.name)?;
        let noted = xml::note_controllers(&after).map_err(&wrong)?;
        if noted != after {
            virsh::define(&noted)?;
        }
    }
    let found = hindrances::read(&enabled).map_err(&wrong)?;
    Ok(change(&facts, enabled != before, trust_domain, found))
}

/// Undoes memfold's changes of a libvirt domain's XML. The domain is given by name, ID or UUID.
/// Safe to repeat.
pub fn disable(domain: &str) -> Result<Change, LibvirtError> {
    let facts = persistent(domain)?;
    let before = virsh::inactive_xml(&facts.name)?;
    let disabled = xml::disable(&before).map_err(LibvirtError::of_xml(&facts.name))?;
    if disabled != before {
        virsh::define(&disabled)?;
    }
    Ok(change(
        &facts,
        disabled != before,
        None,
        Foretold::default(),
    ))
}

fn persistent(domain: &str) -> Result<DomainFacts, LibvirtError> {
    match virsh::facts(domain)? {
        facts if facts.persistent => Ok(facts),
        facts => Err(LibvirtError::Transient(facts.name)),
    }
}

fn change(facts: &DomainFacts, changed: bool, trust: Option<&str>, found: Foretold) -> Change {
    Change {
        domain: facts.name.clone(),
        trust_domain: trust.map(str::to_owned),
        changed,
        running: facts.running,
        managed_save: facts.managed_save,
        not_folded: found.not_folded,
        costs: found.costs,
    }
}

/// Converts the name of a libvirt domain to a valid name for the domain's VM in memfold: lower-case
/// letters, digits and `._-`, at most [`memfold_vm::MAX_NAME`] characters.
#[must_use]
pub fn vm_name(domain: &str) -> String {
    let letter = |c: char| match c.to_ascii_lowercase() {
        c if c.is_ascii_lowercase() || c.is_ascii_digit() || "._-".contains(c) => c,
        _ => '-',
    };
    let letters = domain.chars().map(letter);
    let letters = letters.skip_while(|c| "._-".contains(*c));
    let name: String = letters.take(memfold_vm::MAX_NAME).collect();
    if name.is_empty() {
        "domain".into()
    } else {
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_libvirt_domain_name_is_converted_to_a_valid_vm_name() {
        for (domain, vm) in [
            ("web1", "web1"),
            ("Win 11 (test)", "win-11--test-"),
            ("-x", "x"),
            ("müller", "m-ller"),
            ("日本", "domain"),
            (&"a".repeat(300), &"a".repeat(64)),
        ] {
            assert_eq!(vm_name(domain), vm);
            memfold_vm::check_name("name", vm).unwrap();
        }
    }
}
