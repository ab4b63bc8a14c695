//! The QEMU options in the description of a VM that memfold did not start. In such a VM's
//! snapshots, these options replace the command line that memfold makes for its own VMs.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::files;
use super::value::Value;
use crate::forward::Forward;

/// What memfold passes to QEMU instead of its own command line, for a snapshot of a VM that memfold
/// did not start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Foreign {
    /// Arguments for QEMU that create the VM's machine, memory and devices. Tokens stand for file
    /// paths.
    pub words: Vec<String>,
    /// How the device of each disk refers to its block node, in the order of the disks in the VM's
    /// description.
    pub disks: Vec<ForeignDisk>,
    /// ID of the character device of the agent's port; `None`: the VM has no such port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// ID of the character device of the VM's serial console; `None`: the VM has no console.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console: Option<String>,
    /// Whether another device of the VM also uses the console's character device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub console_shared: bool,
    /// Host resources of the original QEMU that a second QEMU cannot have (forwarded ports,
    /// sockets, displays), each as text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// Number of network cards of the VM.
    #[serde(default)]
    pub cards: usize,
    /// Paths of the files for which tokens in `words` stand (`/memfold/fileNNN`), in the order of
    /// NNN.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<PathBuf>,
}

impl Foreign {
    /// Returns the arguments for QEMU's command line, with file paths in place of tokens. The VM's
    /// user-mode network also forwards the ports of `forwards`.
    #[must_use]
    pub fn line(&self, forwards: &[Forward]) -> Vec<String> {
        let mut words = files::put_in(&self.words, &self.files);
        if let Some((at, mut network)) = self.user_network() {
            for forward in forwards {
                network.push("hostfwd", &forward.rule());
            }
            if !forwards.is_empty() {
                words[at] = network.render();
            }
        }
        words
    }

    /// Returns whether the VM has a user-mode network, through which host ports can be forwarded
    /// into the guest.
    #[must_use]
    pub fn takes_forwards(&self) -> bool {
        self.user_network().is_some()
    }

    /// Returns the first unrestricted user-mode network, and its index in `words`.
    fn user_network(&self) -> Option<(usize, Value)> {
        let pairs = self.words.windows(2).enumerate();
        let mut networks = pairs.filter_map(|(at, pair)| {
            ["-netdev", "-nic", "-net"]
                .contains(&pair[0].as_str())
                .then_some(())?;
            Some((at + 1, Value::parse("type", &pair[1])?))
        });
        networks.find(|(_, network)| network.kind() == "user" && !network.is_on("restrict"))
    }
}

/// A disk of a VM that memfold did not start: how the disk's device refers to its block node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForeignDisk {
    /// Path of the disk's device in QEMU's object tree (`qdev` in `query-block`).
    pub device: String,
    /// Name of the block node that the disk's device uses in the original QEMU.
    pub node: String,
    /// Name of the disk's block node on the command line, to which the disk's device refers.
    pub drive: String,
    /// Options of `-drive` that create the disk's device (interface, bus, unit, name); `None`: a
    /// separate `-device` creates it, and `-blockdev` the block node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub option: Option<String>,
}
