//! Makes the description of a VM that memfold did not start, from its QEMU's command line and QMP
//! answers. A snapshot of the VM needs this description.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use memfold_units::ByteSize;
use serde_json::{Value as Json, json};

use super::rewrite::{self, Copy, Facts, Medium};
use super::spec::{Foreign, ForeignDisk};
use super::view::{View, user};
use super::{config, files, options};
use crate::directory::Record;
use crate::machine::Vm;
use crate::qmp::{Qmp, QmpError};
use crate::spec::{AccelChoice, DiskFormat, DiskSpec, VmSpec};

/// Longest name of a block node (QEMU: `BlockDriverState.node_name`).
const MAX_NODE_NAME: usize = 31;

/// Why a VM that memfold did not start cannot be described: no second QEMU with the same devices
/// can be started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum ForeignError {
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("cannot inspect process {pid}")]
    Process {
        pid: i32,
        #[source]
        source: io::Error,
    },
    #[error("cannot start another QEMU with this VM's devices: {0}")]
    Impossible(String),
}

/// Returns description and record of a running VM that memfold did not start. `name`, `domain`:
/// name and trust domain that the description gets.
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
    let refused = ForeignError::Impossible;
    let user = user(pid).map_err(look)?.map_err(refused)?;
    let is_kvm = qmp.query("query-kvm")?["enabled"] == true;
    let answers = Answers {
        machine: machine_type(qmp)?,
        accel: if is_kvm { "kvm" } else { "tcg" }.into(),
        block: qmp.query("query-block")?,
        nodes: qmp.execute("query-named-block-nodes", json!({ "flat": true }))?,
        view: View::of(pid).map_err(look)?,
    };
    let read = |path: &Path| files::read_as(path, &answers.view, user.as_deref());
    let copied = copy_line(&line, &answers, read).map_err(refused)?;
    let memory = qmp.query("query-memory-size-summary")?;
    let cpus = qmp.query("query-cpus-fast")?.as_array().map_or(1, Vec::len);
    let mut spec = VmSpec::new(name, ByteSize(memory["base-memory"].as_u64().unwrap_or(0)));
    spec.vcpus = u32::try_from(cpus).unwrap_or(1);
    spec.domain = domain.map(str::to_owned);
    spec.accel = if is_kvm {
        AccelChoice::Kvm
    } else {
        AccelChoice::Tcg
    };
    spec.balloon = copied.balloon;
    spec.user = user;
    spec.disks = copied.disks;
    let record = Record {
        process: vm.process().identity(),
        qemu: fs::read_link(format!("{place}/exe")).map_err(look)?,
        version: qmp.version(),
        machine: answers.machine,
        accel: answers.accel,
        library: None,
        overlays: Vec::new(),
        user: None,
    };
    spec.foreign = Some(copied.foreign);
    Ok((spec, record))
}

/// What QEMU's monitor and the kernel say about a running VM, beside its command line.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    /// Machine type, with its version.
    pub machine: String,
    /// Accelerator: `kvm` or `tcg`.
    pub accel: String,
    /// Answer to `query-block`.
    pub block: Json,
    /// Answer to `query-named-block-nodes`.
    pub nodes: Json,
    /// Working directory and mount namespace in which QEMU opens files.
    pub view: View,
}

/// A copied command line: the options for another QEMU, and what the description says beside them.
#[derive(Clone, Debug)]
pub struct CopiedLine {
    /// QEMU options that create the same machine, memory and devices.
    pub foreign: Foreign,
    /// Disks that a snapshot of the VM includes.
    pub disks: Vec<DiskSpec>,
    /// Whether the VM has a balloon device.
    pub balloon: bool,
}

/// Copies the command line of a running QEMU, the text of `/proc/PID/cmdline`. `read` returns the
/// contents of a file that the line names, read with the rights of QEMU's user.
///
/// # Errors
///
/// The reason why no QEMU with the same devices can be started, as text.
pub fn copy_line(
    line: &[u8],
    answers: &Answers,
    read: impl Fn(&Path) -> io::Result<String>,
) -> Result<CopiedLine, String> {
    let line = words(line).ok_or("QEMU's command line is not UTF-8 text")?;
    let facts = Facts {
        machine: answers.machine.clone(),
        accel: answers.accel.clone(),
        media: media(&answers.block),
        sizes: sizes(&answers.nodes),
        view: answers.view.clone(),
    };
    let line = options::read(&line).and_then(|line| config::expand(line, read))?;
    let mut copy = rewrite::copy(&line, &facts)?;
    copy.foreign.files = files::take_out(&mut copy.foreign.words, &facts.view)?;
    let (of_foreign, disks) = disks(&answers.block, &copy)?;
    copy.foreign.disks = of_foreign;
    Ok(CopiedLine {
        foreign: copy.foreign,
        disks,
        balloon: copy.balloon,
    })
}

/// Splits `/proc/PID/cmdline` into arguments, including empty ones.
fn words(line: &[u8]) -> Option<Vec<String>> {
    let line = line.strip_suffix(&[0]).unwrap_or(line);
    let words = line.split(|byte| *byte == 0).map(ToOwned::to_owned);
    words.map(|word| String::from_utf8(word).ok()).collect()
}

fn machine_type(qmp: &mut Qmp) -> Result<String, QmpError> {
    let kind = qmp.execute("qom-get", json!({ "path": "/machine", "property": "type" }))?;
    let kind = kind.as_str().unwrap_or_default();
    Ok(kind.strip_suffix("-machine").unwrap_or(kind).to_owned())
}

fn text(value: &Json) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn media(block: &Json) -> Vec<Medium> {
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

/// Returns the disks that a snapshot of the VM includes: all devices with a medium.
fn disks(block: &Json, copy: &Copy) -> Result<(Vec<ForeignDisk>, Vec<DiskSpec>), String> {
    let (mut disks, mut described) = (Vec::new(), Vec::new());
    for device in block.as_array().into_iter().flatten() {
        let inserted = &device["inserted"];
        let (at, node) = (text(&device["qdev"]), text(&inserted["node-name"]));
        let file = PathBuf::from(text(&inserted["image"]["filename"]));
        let Some(made) = copy.nodes.get(&at).cloned() else {
            continue;
        };
        let (drive, option) = (made.name, made.option);
        if drive.len() > MAX_NODE_NAME {
            return Err(format!(
                "the name of drive '{drive}' has more than {MAX_NODE_NAME} bytes, the limit of a block node's name"
            ));
        }
        let is_qcow2 = inserted["drv"] == "qcow2";
        let mut disk = DiskSpec::new(file);
        disk.read_only = inserted["ro"] == true;
        disk.format = Some(if is_qcow2 {
            DiskFormat::Qcow2
        } else {
            DiskFormat::Raw
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
