//! The part of a VM description that replaces memfold's own QEMU command line, for VMs that memfold
//! did not start originally.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::files;
use super::value::Value;
use crate::forward::Forward;

/// Replaces memfold's own QEMU command line for a VM that memfold did not start originally.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Foreign {
    /// Words of QEMU's command line that create machine, memory and devices.
    pub words: Vec<String>,
    /// Disks, in the order of the description's disks.
    pub disks: Vec<ForeignDisk>,
    /// Name of the character device of the agent's port; `None`: the VM has no such port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Name of the character device of the console; `None`: the VM has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console: Option<String>,
    /// Whether another device also uses the console's character device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub console_shared: bool,
    /// Host resources of the original QEMU that no second one can have (forwarded ports, sockets,
    /// displays), as text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// Number of network cards of the VM.
    #[serde(default)]
    pub cards: usize,
    /// Paths of the files that tokens in `words` stand for (`/memfold/fileNNN`), in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<PathBuf>,
}

impl Foreign {
    /// Returns the words for QEMU's command line, with file paths in place of tokens and with
    /// forwarded ports.
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

    /// Returns whether host ports can be forwarded into the guest.
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

/// A disk of a VM that memfold did not start originally.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForeignDisk {
    /// Path of the disk's device in QEMU's object tree (`qdev` in `query-block`).
    pub device: String,
    /// Block node that the running VM's device uses.
    pub node: String,
    /// Name by which the device refers to its block node on the command line.
    pub drive: String,
    /// Options of `-drive` other than the node, if `-drive` creates the disk: interface, bus, unit,
    /// name. `None`: `-blockdev` creates the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub option: Option<String>,
}
