//! Finds the files of a VM's disk: the top overlay and its backing files. It reads them both from
//! QEMU, which knows the files that are open, and from the qcow2 headers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use memfold_host::helper;
use memfold_store::StoreIdentity;
use memfold_vm::qcow2::{self, NamedBacking};
use memfold_vm::{DiskSpec, Qmp, QmpError, VmSpec};
use serde_json::{Value, json};

use super::error::{SnapshotError, failed};
use super::links::is_in;

/// Time limit for `qemu-img` to read headers.
const LOOK_LIMIT: Duration = Duration::from_secs(60);

/// Longest chain that is read without `qemu-img`, which reports a chain that is a circle.
const MOST_PLAIN: usize = 200;

/// Top layer of a disk, to which the disk's device writes.
pub(super) struct Active {
    pub(super) node: String,
    pub(super) file: PathBuf,
    pub(super) virtual_bytes: u64,
    /// Overlay below the top layer, as QEMU has it open, whatever the header names.
    pub(super) below: Option<Below>,
}

/// Overlay directly below another layer of the same disk.
pub(super) struct Below {
    pub(super) node: String,
    pub(super) file: PathBuf,
}

/// Returns the entry for a disk's device in the answer to `query-block`.
pub(super) fn device<'a>(devices: &'a Value, spec: &VmSpec, disk: usize) -> Option<&'a Value> {
    devices.as_array()?.iter().find(|device| {
        let place = device["qdev"].as_str().unwrap_or_default();
        spec.is_disk(disk, place)
    })
}

/// Returns the image of a device from the answer to `query-block`, and its backing images.
pub(super) fn images(device: &Value) -> impl Iterator<Item = &Value> {
    let image = &device["inserted"]["image"];
    std::iter::successors(Some(image), |image| image.get("backing-image"))
}

/// All block devices and block nodes of a VM.
pub(super) struct Chains {
    devices: Value,
    nodes: Value,
}

impl Chains {
    /// Reads the current chains from QEMU.
    pub(super) fn read(qmp: &mut Qmp) -> Result<Self, QmpError> {
        Ok(Self {
            devices: qmp.query("query-block")?,
            nodes: nodes(qmp)?,
        })
    }

    /// Returns the top layer of a disk.
    pub(super) fn active(&self, spec: &VmSpec, disk: usize) -> Option<Active> {
        let inserted = &device(&self.devices, spec, disk)?["inserted"];
        let node = inserted["node-name"].as_str()?.to_owned();
        Some(Active {
            file: file_of(&self.nodes, spec, disk, &node)?,
            virtual_bytes: inserted["image"]["virtual-size"].as_u64()?,
            below: self.below(spec, disk, &node),
            node,
        })
    }

    /// Returns the overlay directly below `node`, as QEMU opened it: the newest of the older
    /// overlays, all of which are in the chain.
    pub(super) fn below(&self, spec: &VmSpec, disk: usize, node: &str) -> Option<Below> {
        let own = age(spec, disk, node)?;
        let names = self.nodes.as_array()?.iter();
        let names = names.filter_map(|n| n["node-name"].as_str());
        let older = names.filter_map(|name| Some((age(spec, disk, name)?, name)));
        let (_, name) = older.filter(|(time, _)| *time < own).max()?;
        Some(Below {
            node: name.to_owned(),
            file: file_of(&self.nodes, spec, disk, name)?,
        })
    }
}

/// Reads all block nodes of a VM, including nodes below other nodes.
pub(super) fn nodes(qmp: &mut Qmp) -> Result<Value, QmpError> {
    qmp.execute("query-named-block-nodes", json!({ "flat": true }))
}

/// Makes QEMU close the node with this name, if it exists.
pub(super) fn delete_node(qmp: &mut Qmp, node: &str) -> Result<(), QmpError> {
    match qmp.execute_on_disks("blockdev-del", json!({ "node-name": node })) {
        Err(QmpError::Refused { description, .. }) if description.contains("find") => Ok(()),
        other => other.map(drop),
    }
}

pub(super) fn file_node(node: &str) -> String {
    format!("{node}-file")
}

fn file_node_of(spec: &VmSpec, disk: usize, node: &str) -> String {
    match node {
        // `vm run` gives this name to the file node of the first overlay.
        node if node == spec.disk_node(disk) => format!("overlay-file{disk}"),
        node => file_node(node),
    }
}

/// Makes QEMU open the overlay file of a node in a disk's chain again, for reading only or for
/// reading and writing. QEMU itself keeps a frozen overlay open for writing.
pub(super) fn reopen(
    qmp: &mut Qmp,
    (spec, disk): (&VmSpec, usize),
    (node, file): (&str, &Path),
    read_only: bool,
) -> Result<(), QmpError> {
    let DiskSpec { cache, aio, .. } = &spec.disks[disk];
    // QEMU resets options that are left out to their defaults.
    let options = json!({
        "driver": "file", "node-name": file_node_of(spec, disk, node), "filename": file,
        "read-only": read_only, "discard": "unmap", "aio": aio.name(),
        "cache": { "direct": cache.direct(), "no-flush": cache.no_flush() },
    });
    qmp.execute_on_disks("blockdev-reopen", json!({ "options": [options] }))
        .map(drop)
}

/// Returns the file of a node in a disk's chain. The file has a node of its own, whose name follows
/// from the node's name.
pub(super) fn file_of(nodes: &Value, spec: &VmSpec, disk: usize, node: &str) -> Option<PathBuf> {
    let name = file_node_of(spec, disk, node);
    let file = nodes.as_array()?.iter().find(|n| n["node-name"] == name)?;
    Some(file["file"].as_str()?.into())
}

/// Returns when a disk's node was added, from the node's name; 0 for the first node. `None` if the
/// node does not belong to the disk.
pub(super) fn age(spec: &VmSpec, disk: usize, name: &str) -> Option<u64> {
    if name == spec.disk_node(disk) {
        return Some(0);
    }
    let added = name.strip_prefix(&format!("disk{disk}-"))?;
    u64::from_str_radix(added, 16).ok()
}

/// Returns the identity of the file at a path.
pub(super) fn identity(path: &Path) -> io::Result<StoreIdentity> {
    fs::metadata(path).map(|facts| (&facts).into())
}

/// Runs `qemu-img info` on a qcow2 file. (`-U` is needed because a running VM may have it open.)
fn info(disk: &Path, more: &[&str]) -> io::Result<Output> {
    let mut command = Command::new("qemu-img");
    command.args(["info", "-U", "--output=json", "-f", "qcow2"]);
    command.args(more).arg(disk).stdin(Stdio::null());
    helper::output(&mut command, LOOK_LIMIT)
}

/// Reads the header of an overlay. Without `--backing-chain`, `qemu-img` opens no other file.
pub(super) fn header(overlay: &Path) -> io::Result<Value> {
    let output = info(overlay, &[])?;
    Ok(serde_json::from_slice(&output.stdout).unwrap_or_default())
}

/// Returns the files of a qcow2 file's chain, beginning with the file itself.
pub(super) fn chain(disk: &Path) -> Result<Vec<PathBuf>, SnapshotError> {
    if let Some(files) = plain_chain(disk) {
        return Ok(files);
    }
    let output = info(disk, &["--backing-chain"]).map_err(failed(disk))?;
    let refused = |why: &str| SnapshotError::Qemu(format!("qemu-img: {why}"));
    if !output.status.success() {
        return Err(refused(String::from_utf8_lossy(&output.stderr).trim()));
    }
    let images: Result<Value, _> = serde_json::from_slice(&output.stdout);
    let images = images.map_err(|error| refused(&error.to_string()))?;
    let files = images.as_array().into_iter().flatten();
    let name = |image: &Value| Some(image["filename"].as_str()?.into());
    Ok(files.filter_map(name).collect())
}

/// Returns the files of a qcow2 file's chain as far as headers name them. The chain ends at a file
/// that is missing. The error says that a file is there whose header cannot be read, so nothing
/// tells what is below it.
pub(super) fn known_chain(disk: &Path) -> (Vec<PathBuf>, Option<SnapshotError>) {
    let error = match chain(disk) {
        Ok(files) => return (files, None),
        Err(error) => error,
    };
    let (mut files, mut next) = (Vec::new(), Some(disk.to_owned()));
    while let Some(file) = next.take().filter(|_| files.len() <= MOST_PLAIN) {
        let is_missing = !file.try_exists().unwrap_or(true);
        let backing = qcow2::backing(&file);
        // A name of another form than memfold's.
        let below = backing.is_none().then(|| qcow2::below(&file)).flatten();
        files.push(file);
        match backing {
            Some(NamedBacking::Raw(base)) => {
                files.push(base);
                return (files, None);
            }
            Some(NamedBacking::None) => return (files, None),
            Some(NamedBacking::Qcow2(file)) => next = Some(file),
            None if is_missing => return (files, None),
            None => next = below,
        }
    }
    let file = files.last().map_or(disk, PathBuf::as_path);
    let why = format!(
        "cannot read the header of {}: {}",
        file.display(),
        memfold_host::chain(&error)
    );
    (files, Some(SnapshotError::Impossible(why)))
}

/// Returns whether a qcow2 file, or a file that it is built on, is in a directory.
///
/// # Errors
///
/// That of [`known_chain`], which names the file whose header cannot be read.
pub(super) fn is_built_in(disk: &Path, directory: &Path) -> Result<bool, SnapshotError> {
    let (files, unknown) = known_chain(disk);
    if files.iter().any(|file| is_in(file, directory)) {
        return Ok(true);
    }
    unknown.map_or(Ok(false), Err)
}

/// Returns the files of a chain that consists of existing files and of headers without unusual
/// features; `None` if `qemu-img` has to tell.
fn plain_chain(disk: &Path) -> Option<Vec<PathBuf>> {
    let mut files = vec![disk.to_owned()];
    while files.len() <= MOST_PLAIN {
        match qcow2::backing(files.last()?)? {
            NamedBacking::None => return Some(files),
            NamedBacking::Raw(base) => {
                fs::metadata(&base).ok()?;
                files.push(base);
                return Some(files);
            }
            NamedBacking::Qcow2(next) => files.push(next),
        }
    }
    None
}
