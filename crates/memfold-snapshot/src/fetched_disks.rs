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
use std::path::{Path, PathBuf};

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
                let node = json!({
                    "driver": "file", "node-name": here, "read-only": true,
                    "discard": "unmap", "cache": cache, "aio": disk.aio.name(),
                });
                add_file(qmp, spec, file, node)?;
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

/// Adds the block node of a file to QEMU.
fn add_file(
    qmp: &mut Qmp,
    spec: &VmSpec,
    file: &Path,
    mut node: Value,
) -> Result<(), SnapshotError> {
    // A QEMU that runs as another user cannot open files in the snapshot's directory.
    let lent = if spec.keeps_rights() {
        None
    } else {
        let opened = File::open(file).map_err(failed(file))?;
        Some(qmp.lend(opened.as_fd())?)
    };
    node["filename"] = match &lent {
        Some(lent) => lent.path().into(),
        None => file.display().to_string().into(),
    };
    let added = qmp.execute_on_disks("blockdev-add", node);
    if let Some(lent) = lent {
        // A node has a descriptor of its own. After an error the caller tries again every second,
        // and each try would leave a descriptor in QEMU.
        qmp.take_back(&lent)?;
    }
    Ok(added.map(drop)?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use memfold_units::ByteSize;
    use memfold_vm::DiskSpec;

    use super::*;
    use crate::fake_monitor;
    use crate::manifest::{BackingFile, SavedDisk, tests::manifest};

    /// Switches one disk to its file in a simulated QEMU, and returns the commands that QEMU got.
    fn commands(refuses: &'static str) -> (Result<(), SnapshotError>, Vec<String>) {
        let directory = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(directory.path());
        let place = directory.path().join("warm");
        fs::create_dir(&place).unwrap();
        fs::write(place.join("disk0.raw"), "").unwrap();
        let socket = directory.path().join("qmp");
        let server = fake_monitor::serve(&socket, move |command| {
            if command == refuses {
                return Some(json!({ "error": { "class": "GenericError", "desc": "no" } }));
            }
            let base = json!({ "node-name": "base0", "drv": "raw" });
            let result = match command {
                "query-named-block-nodes" => json!([base, { "node-name": "file0", "drv": "nbd" }]),
                "add-fd" => json!({ "fdset-id": 4, "fd": 9 }),
                _ => json!({}),
            };
            Some(json!({ "return": result }))
        });
        let mut qmp = Qmp::connect(&socket, Duration::from_secs(10)).unwrap();
        let mut spec = VmSpec::new("web", ByteSize::mib(64));
        spec.user = Some("nobody".into());
        spec.disks = vec![DiskSpec::new("disk0.raw")];
        let mut manifest = manifest("warm", ByteSize::mib(64));
        manifest.disks = vec![SavedDisk {
            file: BackingFile {
                path: "disk0.raw".into(),
                bytes: 0,
                modified_ns: 0,
                device: None,
            },
            format: "raw".into(),
            read_only: false,
            xxh3_128: None,
            backing: Vec::new(),
        }];
        let used = use_files(&mut qmp, &spec, &shelf, &manifest);
        drop(qmp);
        (used, server.join().unwrap())
    }

    #[test]
    fn qemu_keeps_no_lent_descriptor_whether_it_adds_the_file_of_a_fetched_disk_or_not() {
        let first = [
            "qmp_capabilities",
            "query-named-block-nodes",
            "add-fd",
            "blockdev-add",
            "remove-fd",
        ];
        let (used, told) = commands("blockdev-add");
        assert!(matches!(used, Err(SnapshotError::Qmp(_))), "{used:?}");
        assert_eq!(told, first);
        let (used, told) = commands("nothing");
        used.unwrap();
        assert_eq!(told[..first.len()], first);
        assert_eq!(told[first.len()..], ["blockdev-reopen", "blockdev-del"]);
    }
}
