//! A QEMU that others have started: what another one with the same devices is started with, for a VM that runs from its snapshot.
//!
//! ```text
//!   /proc/PID/cmdline --rewrite--> words that make the same devices      + QMP: machine type, disks, memory
//!                                      |
//!                     VmSpec { foreign: .. } --launch--> QEMU, with disks, monitors, console and agent's port of memfold's
//! ```
//! Its command line is believed as far as its own user could do what it says: a guest that has taken its QEMU over may have written it. No disk of
//! its host's is opened for another QEMU, and other files are copied with that user's rights.

mod config;
mod drives;
mod files;
mod host_ends;
mod network;
mod options;
mod rewrite;
mod value;
mod view;

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memfold_units::ByteSize;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

pub use self::host_ends::{leave_out_taken, of_arguments};
use self::rewrite::{Copy, Facts, Medium};
use self::value::Value;
pub use self::view::{View, root_of};
use super::directory::Record;
use super::forward::Forward;
use super::machine::Vm;
use super::qmp::{Qmp, QmpError};
use super::spec::{AccelChoice, DiskFormat, DiskSpec, VmSpec};

/// Longest name of a block node (QEMU: `BlockDriverState.node_name`).
const MAX_NODE_NAME: usize = 31;

/// What is read of a file of options, in bytes.
const MOST_OPTIONS: u64 = 1 << 20;

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
    /// What the QEMU had of its host and no second one can have: forwarded ports, sockets, displays.
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

    /// The first network in user mode that isn't cut off from the host, and which of the words it is.
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
    /// What `-drive` is given besides its node, where that makes it: interface, bus, unit, name. `None`: `-blockdev` makes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub option: Option<String>,
}

/// Why a QEMU can't be started a second time.
#[derive(Debug, thiserror::Error)]
pub enum ForeignError {
    /// Its monitor failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Its process can't be looked at.
    #[error("process {pid} can't be looked at")]
    Process {
        /// Its number.
        pid: i32,
        /// From the kernel.
        #[source]
        source: io::Error,
    },
    /// What it is.
    #[error("memfold can't start another QEMU with its devices: {0}")]
    Impossible(String),
}

/// The description, and the record, of a VM that others have started.
pub fn describe(
    vm: &Vm,
    name: &str,
    domain: Option<&str>,
    qmp: &mut Qmp,
) -> Result<(VmSpec, Record), ForeignError> {
    let pid = vm.pid();
    let look = |source| ForeignError::Process {
        pid: pid.as_raw_nonzero().get(),
        source,
    };
    let place = format!("/proc/{}", pid.as_raw_nonzero());
    let line = fs::read(format!("{place}/cmdline")).map_err(look)?;
    let line = words(&line).ok_or_else(|| {
        ForeignError::Impossible("its command line is no text (UTF-8)".to_owned())
    })?;
    let user = user(pid).map_err(look)?.map_err(ForeignError::Impossible)?;
    let block = qmp.query("query-block")?;
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let facts = Facts {
        machine: machine_type(qmp)?,
        accel: if qmp.query("query-kvm")?["enabled"] == true {
            "kvm".into()
        } else {
            "tcg".into()
        },
        media: media(&block),
        sizes: sizes(&nodes),
        view: View::of(pid).map_err(look)?,
    };
    let refused = ForeignError::Impossible;
    let read = |path: &Path| read_as(path, &facts.view, user.as_deref());
    let line = options::read(&line).and_then(|line| config::expand(line, read));
    let mut copy = rewrite::copy(&line.map_err(refused)?, &facts).map_err(refused)?;
    let files = files::take_out(&mut copy.words, &facts.view).map_err(refused)?;
    let memory = qmp.query("query-memory-size-summary")?;
    let cpus = qmp.query("query-cpus-fast")?;
    let mut spec = VmSpec::new(name, ByteSize(memory["base-memory"].as_u64().unwrap_or(0)));
    spec.vcpus = cpus
        .as_array()
        .map_or(1, |all| u32::try_from(all.len()).unwrap_or(1));
    spec.domain = domain.map(str::to_owned);
    spec.accel = if facts.accel == "kvm" {
        AccelChoice::Kvm
    } else {
        AccelChoice::Tcg
    };
    spec.balloon = copy.balloon;
    spec.user = user;
    let (disks, described) = disks(&block, &copy).map_err(ForeignError::Impossible)?;
    spec.disks = described;
    let record = Record {
        process: vm.process().identity(),
        qemu: fs::read_link(format!("{place}/exe")).map_err(look)?,
        version: qmp.version(),
        machine: facts.machine,
        accel: facts.accel,
        library: None,
        overlays: Vec::new(),
    };
    spec.foreign = Some(Foreign {
        words: copy.words,
        disks,
        agent: copy.agent,
        console: copy.console,
        console_shared: copy.is_console_shared,
        left_out: copy.left_out,
        cards: copy.cards,
        files,
    });
    Ok((spec, record))
}

/// The words of a command line; empty ones are words, too.
fn words(line: &[u8]) -> Option<Vec<String>> {
    let line = line.strip_suffix(&[0]).unwrap_or(line);
    let words = line.split(|byte| *byte == 0);
    words
        .map(|word| String::from_utf8(word.to_owned()).ok())
        .collect()
}

fn machine_type(qmp: &mut Qmp) -> Result<String, QmpError> {
    let kind = qmp.execute("qom-get", json!({ "path": "/machine", "property": "type" }))?;
    let kind = kind.as_str().unwrap_or_default();
    Ok(kind.strip_suffix("-machine").unwrap_or(kind).to_owned())
}

fn media(block: &Json) -> Vec<Medium> {
    let text = |value: &Json| value.as_str().unwrap_or_default().to_owned();
    let devices = block.as_array().into_iter().flatten();
    let with_medium = devices.filter(|device| device["inserted"].is_object());
    with_medium
        .map(|device| Medium {
            backend: text(&device["device"]),
            device: text(&device["qdev"]),
            node: text(&device["inserted"]["node-name"]),
        })
        .collect()
}

fn sizes(nodes: &Json) -> std::collections::BTreeMap<String, u64> {
    let nodes = nodes.as_array().into_iter().flatten();
    let facts = nodes.filter_map(|node| {
        let name = node["node-name"].as_str()?.to_owned();
        Some((name, node["image"]["virtual-size"].as_u64()?))
    });
    facts.collect()
}

/// The disks that go with a snapshot: all that have a medium.
fn disks(block: &Json, copy: &Copy) -> Result<(Vec<ForeignDisk>, Vec<DiskSpec>), String> {
    let (mut disks, mut described) = (Vec::new(), Vec::new());
    for device in block.as_array().into_iter().flatten() {
        let inserted = &device["inserted"];
        let text = |value: &Json| value.as_str().unwrap_or_default().to_owned();
        let (at, node) = (text(&device["qdev"]), text(&inserted["node-name"]));
        let file = PathBuf::from(text(&inserted["image"]["filename"]));
        let Some(rewrite::Node {
            name: drive,
            option,
        }) = copy.nodes.get(&at).cloned()
        else {
            continue;
        };
        if drive.len() > MAX_NODE_NAME {
            return Err(format!(
                "its drive '{drive}' has a name of more than {MAX_NODE_NAME} bytes, which no node can have"
            ));
        }
        let mut disk = DiskSpec::new(file);
        disk.read_only = inserted["ro"] == true;
        disk.format = Some(match inserted["drv"].as_str() {
            Some("qcow2") => DiskFormat::Qcow2,
            _ => DiskFormat::Raw,
        });
        disks.push(ForeignDisk {
            device: at,
            node,
            drive,
            option,
        });
        described.push(disk);
    }
    Ok((disks, described))
}

/// What a text file holds that a QEMU has named, with the rights of its user.
fn read_as(path: &Path, view: &View, user: Option<&str>) -> io::Result<String> {
    let mut copy = tempfile::tempfile()?;
    copy_file(path, view, &copy, user)?;
    copy.rewind()?;
    let mut text = String::new();
    copy.take(MOST_OPTIONS).read_to_string(&mut text)?;
    Ok(text)
}

/// Copies a file that a QEMU has named, with the rights of its user; `None`: root.
pub fn copy_file(from: &Path, view: &View, to: &File, user: Option<&str>) -> io::Result<()> {
    let (name, (uid, gid)) = match user {
        None => ("root", (0, 0)),
        Some(name) => {
            let none = || io::Error::other(format!("there is no user '{name}' on this host"));
            (name, memfold_sys::peer::user_ids(name)?.ok_or_else(none)?)
        }
    };
    let name = name.to_owned();
    files::copy(from, view, to, &User { name, uid, gid })
}

/// The user that a QEMU runs as.
struct User {
    name: String,
    uid: u32,
    gid: u32,
}

/// Its name; `None`: root.
fn user(pid: Pid) -> io::Result<Result<Option<String>, String>> {
    let facts = fs::metadata(format!("/proc/{}", pid.as_raw_nonzero()))?;
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()))?;
    // The directory of a process that can't be dumped is root's.
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let effective = line.and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok());
    let uid = effective.unwrap_or_else(|| facts.uid());
    if uid == 0 {
        return Ok(Ok(None));
    }
    let name = memfold_sys::peer::user_name(uid)?;
    Ok(name.map(Some).ok_or_else(|| {
        format!("its user {uid} has no name here, so that no other QEMU can become it")
    }))
}

impl VmSpec {
    /// The node that a disk's device uses as long as no overlay was put over it.
    #[must_use]
    pub fn disk_node(&self, disk: usize) -> String {
        match self.foreign.as_ref().and_then(|f| f.disks.get(disk)) {
            Some(foreign) => foreign.node.clone(),
            None => format!("disk{disk}"),
        }
    }

    /// Whether a place in QEMU's tree of devices (`query-block`: `qdev`) is that of a disk.
    #[must_use]
    pub fn is_disk(&self, disk: usize, place: &str) -> bool {
        match &self.foreign {
            Some(foreign) => foreign.disks.get(disk).is_some_and(|d| d.device == place),
            None => place == format!("vd{disk}") || place.contains(&format!("/vd{disk}/")),
        }
    }

    /// Network cards.
    #[must_use]
    pub fn cards(&self) -> usize {
        let own = usize::from(self.network != super::spec::Network::None);
        self.foreign.as_ref().map_or(own, |foreign| foreign.cards)
    }
}
