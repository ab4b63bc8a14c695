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
//! All state about a domain is in its XML; memfold keeps no other record. The domain's owner can
//! also write a tag into the XML; then the daemon enables the domain by itself.

pub mod hindrances;
mod running;
pub mod status;
mod stored;
pub mod tag;
pub mod virsh;
pub mod wrapper;
pub mod xml;

pub use running::{DEFAULT_RUN, Running};
pub use status::{DomainStatus, KnownVm, status};
pub use stored::{DEFAULT_STORED, Stored, Version};
pub use tag::{Due, Tag};
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
    /// The libvirt domain (first text) has a tag for a trust domain (second text), which forbids
    /// the change.
    #[error(
        "the XML of domain '{0}' has a tag for trust domain '{1}', which the daemon follows; change the tag (virsh edit '{0}'), or remove it: virsh metadata '{0}' {namespace} --config --remove",
        namespace = tag::NAMESPACE
    )]
    Tagged(String, String),
    /// Another program has changed the XML of the domain with this name, each time between
    /// memfold's reading and its writing.
    #[error(
        "the XML of domain '{0}' was changed by another program while memfold changed it, {ATTEMPTS} times; try again when no program changes the domain"
    )]
    Changed(String),
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

/// Number of attempts to change a domain's XML while other programs change it.
const ATTEMPTS: u32 = 5;

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
///
/// If the domain has a tag, it is enabled by this tag, as the daemon does it.
///
/// # Errors
///
/// [`LibvirtError::Tagged`] if the domain's tag names another trust domain.
pub fn enable(domain: &str, trust_domain: Option<&str>) -> Result<Change, LibvirtError> {
    if let Some(name) = trust_domain {
        memfold_vm::check_name("domain", name)?;
    }
    until_unchanged(|| {
        let (facts, before) = stored(domain)?;
        match tag_domain(&facts.name, &before)? {
            Some(tag) if Some(tag.as_str()) == trust_domain => {
                enable_xml(&facts, &before, trust_domain, true)
            }
            Some(tag) => Err(LibvirtError::Tagged(facts.name, tag)),
            None => enable_xml(&facts, &before, trust_domain, false),
        }
    })
}

/// Undoes memfold's changes of a libvirt domain's XML. The domain is given by name, ID or UUID.
/// Safe to repeat.
///
/// # Errors
///
/// [`LibvirtError::Tagged`] if the domain has a valid tag: the daemon would enable the domain
/// again.
pub fn disable(domain: &str) -> Result<Change, LibvirtError> {
    until_unchanged(|| {
        let (facts, before) = stored(domain)?;
        match tag_domain(&facts.name, &before)? {
            Some(tag) => Err(LibvirtError::Tagged(facts.name, tag)),
            None => disable_xml(&facts, &before),
        }
    })
}

/// Enables or disables memfold for the libvirt domain with this name, as its tag says; returns
/// `None` if nothing had to be done. Safe to repeat.
pub fn follow_tag(domain: &str) -> Result<Option<Change>, LibvirtError> {
    until_unchanged(|| {
        let (facts, before) = stored(domain)?;
        // virsh takes a name that looks like a number or a UUID for that of another domain.
        if facts.name != domain {
            return Err(VirshError::Another(domain.to_owned(), facts.name).into());
        }
        let (_, due) = Due::read(&before).map_err(LibvirtError::of_xml(domain))?;
        match due {
            Due::Nothing => Ok(None),
            Due::Enable(trust) => enable_xml(&facts, &before, Some(&trust), true).map(Some),
            Due::Disable => disable_xml(&facts, &before).map(Some),
        }
    })
}

/// Repeats a change of a domain's XML until no other program changes the XML meanwhile.
fn until_unchanged<T>(change: impl Fn() -> Result<T, LibvirtError>) -> Result<T, LibvirtError> {
    for _ in 1..ATTEMPTS {
        match change() {
            Err(LibvirtError::Changed(_)) => {}
            result => return result,
        }
    }
    change()
}

/// Stores the XML `new` for the domain `name`, unless the stored XML is no longer `before`.
///
/// libvirt cannot compare and store in one step. So a change of another program is lost only if it
/// comes in the milliseconds between the two calls of virsh.
fn define(name: &str, before: &str, new: &str) -> Result<(), LibvirtError> {
    if virsh::inactive_xml(name)? != before {
        return Err(LibvirtError::Changed(name.to_owned()));
    }
    Ok(virsh::define(new)?)
}

/// Returns the facts about a persistent domain, and the XML with which it will start.
fn stored(domain: &str) -> Result<(DomainFacts, String), LibvirtError> {
    let facts = virsh::facts(domain)?;
    if !facts.persistent {
        return Err(LibvirtError::Transient(facts.name));
    }
    let xml = virsh::inactive_xml(&facts.name)?;
    Ok((facts, xml))
}

/// Returns the trust domain in the tag of a domain's XML; `None` if there is no valid tag.
fn tag_domain(domain: &str, xml: &str) -> Result<Option<String>, LibvirtError> {
    let tag = Tag::read(xml).map_err(LibvirtError::of_xml(domain))?;
    Ok(tag.as_ref().and_then(Tag::domain).map(str::to_owned))
}

fn enable_xml(
    facts: &DomainFacts,
    before: &str,
    trust_domain: Option<&str>,
    by_tag: bool,
) -> Result<Change, LibvirtError> {
    let wrong = LibvirtError::of_xml(&facts.name);
    let emulator = xml::own_emulator(before).map_err(&wrong)?;
    let wrapped = wrapper::ensure(&emulator)?;
    let enabled = xml::enable(before, trust_domain, by_tag, &wrapped).map_err(&wrong)?;
    if enabled != before {
        virsh::probe(&wrapped);
        define(&facts.name, before, &enabled)?;
        // libvirt adds controllers for the agent's port if no controller is free. The mark records
        // them, so that they can be removed, too.
        until_unchanged(|| {
            let after = virsh::inactive_xml(&facts.name)?;
            let noted = xml::note_controllers(&after).map_err(&wrong)?;
            if noted == after {
                return Ok(());
            }
            define(&facts.name, &after, &noted)
        })?;
    }
    let found = hindrances::read(&enabled).map_err(&wrong)?;
    Ok(change(facts, enabled != before, trust_domain, found))
}

fn disable_xml(facts: &DomainFacts, before: &str) -> Result<Change, LibvirtError> {
    let disabled = xml::disable(before).map_err(LibvirtError::of_xml(&facts.name))?;
    if disabled != before {
        define(&facts.name, before, &disabled)?;
    }
    let nothing = Foretold::default();
    Ok(change(facts, disabled != before, None, nothing))
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
