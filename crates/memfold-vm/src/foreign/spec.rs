//! The part of a VM description that replaces memfold's own QEMU command line, for VMs that memfold
//! did not start originally.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::files;
use super::value::Value;
use crate::forward::Forward;

/// What a VM is started with in place of memfold's own command line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Foreign {
    /// Words of the command line that make machine, memory and devices.
    pub words: Vec<String>,
    /// Its disks, in the order of the description's.
    pub disks: Vec<ForeignDisk>,
    /// Character device of the agent's port, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Character device of its console, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console: Option<String>,
    /// Whether another device uses the console's character device, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub console_shared: bool,
    /// What the QEMU had of its host and no second one can have: forwarded ports, sockets,
    /// displays.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// Network cards.
    #[serde(default)]
    pub cards: usize,
    /// Files that words stand for (`/memfold/fileNNN`), in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<PathBuf>,
}

impl Foreign {
    /// The words, as QEMU is given them, with ports that lead into the guest.
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

    /// Whether ports can lead into the guest.
    #[must_use]
    pub fn takes_forwards(&self) -> bool {
        self.user_network().is_some()
    }

    /// The first network in user mode that isn't cut off from the host, and which of the words it
    /// is.
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

/// A disk that was not described by memfold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForeignDisk {
    /// Its device's place in QEMU's tree, as `query-block` says.
    pub device: String,
    /// The node that the running VM's device uses.
    pub node: String,
    /// What its device calls the node on the command line.
    pub drive: String,
    /// What `-drive` is given besides its node, where that makes it: interface, bus, unit, name.
    /// `None`: `-blockdev` makes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub option: Option<String>,
}
