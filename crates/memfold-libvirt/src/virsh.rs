//! Runs `virsh`, libvirt's command-line client, and parses its output.

use std::io::{self, Write as _};
use std::process::{Command, Stdio};
use std::time::Duration;

use memfold_host::helper;

/// The libvirt that is asked: the host's.
const CONNECTION: &str = "qemu:///system";

/// Seconds that libvirt may take for an answer. It asks a QEMU that it sees for the first time what
/// it can do, which takes some of them.
const PATIENCE_S: u64 = 120;

/// Error of a `virsh` command.
#[derive(Debug, thiserror::Error)]
pub enum VirshError {
    /// `virsh` is not installed.
    #[error("virsh is not installed; install it (Debian: apt install libvirt-clients)")]
    Missing,
    /// It could not be started.
    #[error("cannot run virsh")]
    Start(#[source] io::Error),
    /// `virsh` did not finish in time.
    #[error("libvirt did not answer 'virsh {command}' within {PATIENCE_S} s")]
    Timeout {
        /// What was asked.
        command: String,
    },
    /// `virsh` reported an error.
    #[error("virsh {command}: {words}")]
    Refused {
        /// What was asked.
        command: String,
        /// Its words.
        words: String,
    },
    /// libvirt says that it doesn't run.
    #[error("domain '{0}' does not run any more")]
    NotRunning(String),
    /// It took the name for another domain's number.
    #[error(
        "virsh answered for domain '{got}' instead of '{asked}'; rename the domain whose name is a number"
    )]
    Another {
        /// The name.
        asked: String,
        /// Whose XML came.
        got: String,
    },
    /// It answered something that is not known here.
    #[error("the answer of 'virsh {command}' lacks '{field}'")]
    Unknown {
        /// What was asked.
        command: String,
        /// What should have been there.
        field: &'static str,
    },
}

/// Facts about a domain, from `virsh dominfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainFacts {
    /// Its name.
    pub name: String,
    /// Whether it runs, or is paused.
    pub running: bool,
    /// Whether libvirt keeps its XML.
    pub persistent: bool,
    /// Whether libvirt has saved its memory for its next start.
    pub managed_save: bool,
}

/// Returns the names of all domains.
pub fn domains() -> Result<Vec<String>, VirshError> {
    let list = run(&["list", "--all", "--name"])?;
    let mut names: Vec<String> = list.lines().map(str::to_owned).collect();
    names.retain(|name| !name.is_empty());
    names.sort_unstable();
    Ok(names)
}

/// Returns the facts of a domain, by its name, id or UUID.
pub fn facts(domain: &str) -> Result<DomainFacts, VirshError> {
    let (command, option) = ("dominfo", option(domain));
    let text = run(&[command, &option])?;
    let field = |field: &'static str| {
        let line = text.lines().find_map(|line| line.strip_prefix(field));
        let value = line.map(|value| value.trim_start_matches(':').trim());
        value.ok_or_else(|| VirshError::Unknown {
            command: format!("{command} {option}"),
            field,
        })
    };
    Ok(DomainFacts {
        name: field("Name")?.to_owned(),
        // The others have no id.
        running: field("Id")? != "-",
        persistent: field("Persistent")? == "yes",
        managed_save: field("Managed save")? == "yes",
    })
}

/// Returns the XML for a domain's next start, including passwords.
pub fn inactive_xml(domain: &str) -> Result<String, VirshError> {
    let xml = run(&["dumpxml", "--inactive", "--security-info", &option(domain)])?;
    of_name(domain, xml)
}

/// Returns the XML of a running domain.
pub fn xml(domain: &str) -> Result<String, VirshError> {
    let xml = of_name(domain, run(&["dumpxml", &option(domain)])?)?;
    let runs = roxmltree::Document::parse(&xml)
        .is_ok_and(|document| document.root_element().has_attribute("id"));
    if runs {
        return Ok(xml);
    }
    // Its process number may be another's by now.
    Err(VirshError::NotRunning(domain.to_owned()))
}

/// A name that looks like a number or a UUID is taken for another domain's by virsh.
fn of_name(domain: &str, xml: String) -> Result<String, VirshError> {
    let document = roxmltree::Document::parse(&xml);
    let name = document.ok().and_then(|document| {
        let mut children = document.root_element().children();
        let name = children.find(|node| node.has_tag_name("name"))?;
        name.text().map(str::to_owned)
    });
    if name.as_deref() == Some(domain) {
        return Ok(xml);
    }
    Err(VirshError::Another {
        asked: domain.to_owned(),
        got: name.unwrap_or_default(),
    })
}

/// Stores a domain's XML in libvirt (`virsh define`).
pub fn define(xml: &str) -> Result<(), VirshError> {
    // Readable for its owner alone: there are passwords in it.
    let mut file = tempfile::NamedTempFile::new().map_err(VirshError::Start)?;
    file.write_all(xml.as_bytes()).map_err(VirshError::Start)?;
    let path = file.path().to_string_lossy();
    run(&["define", "--file", &path]).map(drop)
}

/// A domain's name may begin with a hyphen.
fn option(domain: &str) -> String {
    format!("--domain={domain}")
}

fn run(arguments: &[&str]) -> Result<String, VirshError> {
    let command = || arguments.join(" ");
    let Some(virsh) = memfold_host::files::program("virsh") else {
        return Err(VirshError::Missing);
    };
    let mut virsh = Command::new(virsh);
    virsh
        .args(["--quiet", "--connect", CONNECTION])
        .args(arguments)
        // Words are read here.
        .env("LC_ALL", "C")
        .stdin(Stdio::null());
    let output = match helper::output(&mut virsh, Duration::from_secs(PATIENCE_S)) {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            return Err(VirshError::Timeout { command: command() });
        }
        other => other.map_err(VirshError::Start)?,
    };
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    let words: Vec<&str> = words
        .lines()
        .map(|l| l.trim_start_matches("error: "))
        .collect();
    Err(VirshError::Refused {
        command: command(),
        words: words.join("; "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_xml_of_another_domain_is_refused() {
        let xml = "<domain id='3'><name>web</name></domain>".to_owned();
        assert_eq!(of_name("web", xml.clone()).unwrap(), xml);
        assert!(matches!(of_name("3", xml), Err(VirshError::Another { .. })));
        assert!(of_name("web", "<domain/>".into()).is_err());
    }
}
