//! Runs `virsh`, libvirt's command-line client, and parses its output.

use std::io::{self, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use memfold_host::helper;

use super::xml;

/// URI of the libvirt that virsh connects to: the host's own.
const CONNECTION: &str = "qemu:///system";

/// Seconds that libvirt may take for an answer. If libvirt sees a QEMU program for the first time,
/// it probes the program's features, which takes some seconds.
const PATIENCE_S: u64 = 120;

/// Error of a `virsh` command.
#[derive(Debug, thiserror::Error)]
pub enum VirshError {
    /// `virsh` is not installed.
    #[error("virsh is not installed; install it (Debian: apt install libvirt-clients)")]
    Missing,
    /// `virsh` could not be started.
    #[error("cannot run virsh")]
    Start(#[source] io::Error),
    /// `virsh` with these arguments did not finish within 120 s.
    #[error("libvirt did not answer 'virsh {0}' within {PATIENCE_S} s")]
    Timeout(String),
    /// `virsh` with the arguments (first text) failed with an error message (second text).
    #[error("'virsh {0}' failed: {1}")]
    Refused(String, String),
    /// The libvirt domain with this name does not run.
    #[error("libvirt domain '{0}' no longer runs")]
    NotRunning(String),
    /// `virsh` took the name of a domain (first text) for the number or UUID of another domain, and
    /// answered for that domain (second text).
    #[error(
        "virsh answered for domain '{1}' instead of '{0}'; rename '{0}', which virsh takes for a domain's number or UUID"
    )]
    Another(String, String),
    /// The output of `virsh` with the arguments (first text) lacks a field (second text).
    #[error("the output of 'virsh {0}' lacks the field '{1}'")]
    Unknown(String, &'static str),
}

/// Facts about a libvirt domain, from the output of `virsh dominfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainFacts {
    /// Name of the libvirt domain.
    pub name: String,
    /// Whether the libvirt domain runs or is paused.
    pub running: bool,
    /// Whether libvirt keeps the domain's XML while the domain does not run.
    pub persistent: bool,
    /// Whether libvirt has saved the domain's memory (managed save), which the next start restores.
    pub managed_save: bool,
}

/// Returns the names of all libvirt domains, running or not, in alphabetical order.
pub fn domains() -> Result<Vec<String>, VirshError> {
    let list = run(&["list", "--all", "--name"])?;
    let names = list.lines().filter(|name| !name.is_empty());
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort_unstable();
    Ok(names)
}

/// Asks libvirt for the facts about a domain (`virsh dominfo`), given by name, ID or UUID.
pub fn facts(domain: &str) -> Result<DomainFacts, VirshError> {
    let (command, option) = ("dominfo", option(domain));
    let text = run(&[command, &option])?;
    let field = |field: &'static str| {
        let line = text.lines().find_map(|line| line.strip_prefix(field));
        let value = line.map(|value| value.trim_start_matches(':').trim());
        value.ok_or_else(|| VirshError::Unknown(format!("{command} {option}"), field))
    };
    Ok(DomainFacts {
        name: field("Name")?.to_owned(),
        // A domain that does not run has no ID.
        running: field("Id")? != "-",
        persistent: field("Persistent")? == "yes",
        managed_save: field("Managed save")? == "yes",
    })
}

/// Returns the XML with which libvirt will start a domain the next time, including passwords.
pub fn inactive_xml(domain: &str) -> Result<String, VirshError> {
    let xml = run(&["dumpxml", "--inactive", "--security-info", &option(domain)])?;
    of_name(domain, xml)
}

/// Returns the current XML of a running domain; an error if the domain does not run.
pub fn xml(domain: &str) -> Result<String, VirshError> {
    let xml = of_name(domain, run(&["dumpxml", &option(domain)])?)?;
    let runs = roxmltree::Document::parse(&xml)
        .is_ok_and(|document| document.root_element().has_attribute("id"));
    if runs {
        return Ok(xml);
    }
    // The domain has ended, and its process number may belong to another process by now.
    Err(VirshError::NotRunning(domain.to_owned()))
}

/// Checks that the XML is that of the named domain: virsh takes a name that looks like a number or
/// a UUID for that of another domain.
fn of_name(domain: &str, xml: String) -> Result<String, VirshError> {
    let document = roxmltree::Document::parse(&xml);
    let name = document.ok().and_then(|document| {
        let name = xml::child(document.root_element(), "name")?.text()?;
        Some(name.to_owned())
    });
    if name.as_deref() == Some(domain) {
        return Ok(xml);
    }
    let got = name.unwrap_or_default();
    Err(VirshError::Another(domain.to_owned(), got))
}

/// Makes libvirt probe the features of a QEMU program that it may not know yet, which takes some
/// seconds. Otherwise `virsh define` of a domain with this program would probe it.
pub fn probe(emulator: &Path) {
    let emulator = format!("--emulatorbin={}", emulator.display());
    // If libvirt cannot use the program, `virsh define` says why.
    let _ = run(&["domcapabilities", &emulator]);
}

/// Stores the XML of a domain in libvirt (`virsh define`). The XML names the domain.
pub fn define(xml: &str) -> Result<(), VirshError> {
    // Only its owner may read the file, because the XML contains passwords.
    let mut file = tempfile::NamedTempFile::new().map_err(VirshError::Start)?;
    file.write_all(xml.as_bytes()).map_err(VirshError::Start)?;
    let path = file.path().to_string_lossy();
    run(&["define", "--file", &path]).map(drop)
}

/// Returns a domain's name as the value of an option, because the name may begin with a hyphen.
fn option(domain: &str) -> String {
    format!("--domain={domain}")
}

fn run(arguments: &[&str]) -> Result<String, VirshError> {
    let command = || arguments.join(" ");
    let virsh = memfold_host::files::program("virsh").ok_or(VirshError::Missing)?;
    let mut virsh = Command::new(virsh);
    virsh
        .args(["--quiet", "--connect", CONNECTION])
        .args(arguments)
        // virsh's messages are parsed, so they must be in English.
        .env("LC_ALL", "C")
        .stdin(Stdio::null());
    let output = match helper::output(&mut virsh, Duration::from_secs(PATIENCE_S)) {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            return Err(VirshError::Timeout(command()));
        }
        other => other.map_err(VirshError::Start)?,
    };
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    let words = words.lines().map(|l| l.trim_start_matches("error: "));
    let words: Vec<&str> = words.collect();
    Err(VirshError::Refused(command(), words.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn if_virsh_returns_the_xml_of_another_libvirt_domain_it_is_refused() {
        let xml = "<domain id='3'><name>web</name></domain>".to_owned();
        assert_eq!(of_name("web", xml.clone()).unwrap(), xml);
        assert!(matches!(of_name("3", xml), Err(VirshError::Another { .. })));
        assert!(of_name("web", "<domain/>".into()).is_err());
    }
}
