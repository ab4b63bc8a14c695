//! Integrates libvirt domains: enables memfold in their XML, and finds their QEMU processes when
//! they run.
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

/// Error of enabling, disabling or adopting a domain.
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
    /// The domain exists only while it runs, so its XML cannot be changed.
    #[error(
        "domain '{0}' is transient, so libvirt stores no XML that memfold could change; define the domain first (virsh define)"
    )]
    Transient(String),
    /// The name of the trust domain is invalid.
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

/// Result of [`enable`] or [`disable`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Change {
    /// Name of the libvirt domain.
    pub domain: String,
    /// Trust domain of the domain, if it is enabled and has one.
    pub trust_domain: Option<String>,
    /// Whether the XML was changed by this call.
    pub changed: bool,
    /// Whether the domain runs; changes then take effect at its next start.
    pub running: bool,
    /// Whether libvirt has saved the domain's memory (managed save). If so, the next start
    /// continues with the old settings.
    pub managed_save: bool,
    /// Settings in the XML that prevent folding; empty: none.
    #[serde(default)]
    pub not_folded: Vec<String>,
    /// Settings that cost the host other resources, such as CPUs that the guest never yields.
    #[serde(default)]
    pub costs: Vec<String>,
}

/// Enables memfold for a libvirt domain, from the domain's next start on. Safe to repeat.
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

/// Undoes memfold's changes of a domain's XML. Safe to repeat.
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

/// Returns the name of a libvirt domain's VM in memfold, where fewer characters are allowed.
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
