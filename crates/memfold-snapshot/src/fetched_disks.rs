//! Makes a running VM read its disks from files on this host, after it has read them by NBD while
//! they were being fetched from another host.
//!
//! ```text
//!   disk0 (overlay)  -->  base0 (qcow2)  -->  base0-1 (raw)      block nodes, from the top
//!                            |                   |
//!                         file0 (nbd)         file0-1 (nbd)      before
//!                         file0-here (file)   file0-1-here       after: each format's node gets another file below
//! ```

use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;

use memfold_vm::command_line::layer_nodes;
use memfold_vm::{Qmp, VmSpec};
use serde_json::{Value, json};

use super::disk_chain::{delete_node, nodes};
use super::error::{SnapshotError, failed};
use super::manifest::Manifest;
use super::shelf::Shelf;

/// Makes QEMU read the disks of a VM, which was started from a snapshot while that was being
/// fetched, from the snapshot's files. Disks that it reads from files already are left alone.
pub fn use_files(
    qmp: &mut Qmp,
    spec: &VmSpec,
    shelf: &Shelf,
    manifest: &Manifest,
) -> Result<(), SnapshotError> {
    let place = shelf.path(&manifest.name)?;
    for (number, saved) in manifest.disks.iter().enumerate() {
        let files: Vec<PathBuf> = saved.files().map(|file| place.join(&file.path)).collect();
        let all = nodes(qmp)?;
        let find = |name: &str| {
            let mut nodes = all.as_array()?.iter();
            nodes.find(|node| node["node-name"] == name)
        };
        let Some(disk) = spec.disks.get(number) else {
            break;
        };
        let cache = json!({ "direct": disk.cache.direct(), "no-flush": disk.cache.no_flush() });
        for (depth, file) in files.iter().enumerate() {
            let (node, remote) = layer_nodes(number, depth);
            let is_remote = find(&remote).is_some_and(|node| node["drv"] == "nbd");
            let Some(format) = find(&node).map(|node| node["drv"].clone()) else {
                break;
            };
            if !is_remote {
                continue;
            }
            let here = format!("{remote}-here");
            // An earlier daemon may have added it.
            if find(&here).is_none() {
                // A QEMU that runs as another user cannot open files in the snapshot's directory.
                let filename = if spec.keeps_rights() {
                    file.display().to_string()
                } else {
                    let opened = File::open(file).map_err(failed(file))?;
                    qmp.lend(opened.as_fd())?.path()
                };
                qmp.execute_on_disks(
                    "blockdev-add",
                    json!({
                        "driver": "file", "node-name": here, "filename": filename, "read-only": true,
                        "discard": "unmap", "cache": cache, "aio": disk.aio.name(),
                    }),
                )?;
            }
            let mut options = json!({
                "driver": format, "node-name": node, "file": here, "read-only": true,
                "discard": "unmap", "cache": cache,
            });
            if format == "qcow2" {
                let below = layer_nodes(number, depth + 1).0;
                options["backing"] = match find(&below) {
                    Some(_) => below.into(),
                    None => Value::Null,
                };
            }
            qmp.execute_on_disks("blockdev-reopen", json!({ "options": [options] }))?;
            delete_node(qmp, &remote)?;
        }
    }
    Ok(())
}
