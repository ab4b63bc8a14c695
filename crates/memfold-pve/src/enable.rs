//! Enables and disables memfold for a VM, and says what will keep the VM from being folded.

use std::io;
use std::path::PathBuf;
use std::process::Command;

use serde::Serialize;

use super::mark::{Mark, MarkError};
use super::node::Node;

/// Reason why a VM could not be enabled or disabled.
#[derive(Debug, thiserror::Error)]
pub enum PveError {
    /// The cluster has no VM with this number.
    #[error(
        "/etc/pve has no configuration of VM {0}; run this command on a node of Proxmox VE, with a number that 'qm list' shows"
    )]
    NoVm(u32),
    /// A configuration or a process cannot be read.
    #[error("cannot read the configuration of VM {vmid}; run this command as root")]
    Config {
        /// Number of the VM.
        vmid: u32,
        /// Error of the kernel.
        source: io::Error,
    },
    /// `qm` cannot be run.
    #[error("cannot run 'qm showcmd'; install qemu-server")]
    NoQm(#[source] io::Error),
    /// `qm showcmd` failed, so the VM could not be started either.
    #[error("'qm showcmd {vmid}' failed, so the VM cannot start either; fix what it says: {said}")]
    Showcmd {
        /// Number of the VM.
        vmid: u32,
        /// Output of the command.
        said: String,
    },
    /// `/usr/bin/kvm` is not the script of memfold's package.
    #[error(
        "{0} is not memfold's script, or is one of an older version; install the package memfold-proxmox"
    )]
    NoScript(PathBuf),
    /// The mark cannot be read or changed.
    #[error(transparent)]
    Mark(#[from] MarkError),
    /// The name is not valid for a trust domain.
    #[error(transparent)]
    Name(#[from] memfold_vm::SpecError),
}

/// Result of enabling or disabling memfold for a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Number of the VM.
    pub vmid: u32,
    /// Trust domain of the VM; null: the VM has none, or memfold was disabled.
    pub domain: Option<String>,
    /// Whether this call changed anything.
    pub changed: bool,
    /// Whether the VM runs on this node. If so, the change takes effect at its next start.
    pub running: bool,
    /// Other node that has the VM; null: this node has the VM.
    pub node: Option<String>,
    /// Setting of the VM that keeps it from being folded; null: none.
    pub not_folded: Option<String>,
}

impl Node {
    /// Enables memfold for a VM on this node. The change takes effect at the VM's next start. Safe
    /// to repeat.
    pub fn enable(&self, vmid: u32, domain: Option<&str>) -> Result<Change, PveError> {
        if let Some(name) = domain {
            memfold_vm::check_name("domain", name)?;
        }
        let config = self.config(vmid);
        let config = config.map_err(|source| PveError::Config { vmid, source })?;
        let config = config.ok_or(PveError::NoVm(vmid))?;
        // Only its own node knows the arguments of a VM.
        let words = match config.node {
            None => showcmd(vmid)?,
            Some(_) => ["/usr/bin/kvm", "-id", &vmid.to_string()]
                .map(str::to_owned)
                .into(),
        };
        let not_folded = self.obstacle(&words)?;
        let mark = Mark {
            domain: domain.map(str::to_owned),
            uuid: config.uuid,
        };
        // A mark that cannot be read is replaced.
        let changed = self.mark(vmid).ok().flatten().as_ref() != Some(&mark);
        if changed {
            self.write_mark(vmid, &mark)?;
        }
        Ok(Change {
            vmid,
            domain: mark.domain,
            changed,
            running: self.process(vmid).is_some(),
            node: config.node,
            not_folded,
        })
    }

    /// Disables memfold for a VM on this node, which need not exist any more. A running VM keeps
    /// memfold until it ends. Safe to repeat.
    pub fn disable(&self, vmid: u32) -> Result<Change, PveError> {
        Ok(Change {
            vmid,
            domain: None,
            changed: self.remove_mark(vmid)?,
            running: self.process(vmid).is_some(),
            node: None,
            not_folded: None,
        })
    }

    /// Returns the setting in a VM's command line that keeps the VM from being folded; `None`:
    /// nothing does. The script, which decides at the VM's start, is asked.
    pub fn obstacle(&self, words: &[String]) -> Result<Option<String>, PveError> {
        let (program, arguments) = match words.split_first() {
            Some((program, arguments)) => (program.as_str(), arguments),
            None => ("", words),
        };
        // For example qemu-system-aarch64, for a VM of another architecture.
        if !program.ends_with("kvm") {
            let why = format!("Proxmox VE starts it with {program}, not with /usr/bin/kvm");
            return Ok(Some(why));
        }
        let script = self.kvm();
        let asked = Command::new(&script)
            .arg("--memfold-check")
            .args(arguments)
            .output();
        let said = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        let said = said.unwrap_or_default();
        match said.trim().strip_prefix("memfold: ") {
            Some("yes") => Ok(None),
            Some(no) => Ok(Some(no.trim_start_matches("no: ").to_owned())),
            None => Err(PveError::NoScript(script)),
        }
    }
}

/// Asks Proxmox VE for the command line of a VM's next start. If the VM does not run, this
/// activates its volumes, as a start does.
fn showcmd(vmid: u32) -> Result<Vec<String>, PveError> {
    let asked = Command::new("qm")
        .args(["showcmd", &vmid.to_string()])
        .output();
    let output = asked.map_err(PveError::NoQm)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let words = shlex::split(&text(&output.stdout));
    let words = words.filter(|words| output.status.success() && !words.is_empty());
    words.ok_or_else(|| PveError::Showcmd {
        vmid,
        said: text(&output.stderr),
    })
}
