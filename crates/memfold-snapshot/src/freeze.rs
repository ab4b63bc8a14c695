//! Freezes all disks of a VM that have a temporary overlay, at one instant, for a snapshot. Each
//! disk gets a new overlay on top, and the VM writes only to the new overlay from then on.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use memfold_vm::overlay::{self, Backing};
use memfold_vm::qemu_user::{self, QemuUser};
use memfold_vm::{Qmp, QmpError, VmSpec};
use rustix::process::Pid;
use serde_json::{Value, json};

use super::chain_check::{check_chain, check_exists, check_header, open_files};
use super::disk_chain::{
    Chains, age, delete_node, file_node, file_of, header, identity, nodes, reopen,
};
use super::draft::Draft;
use super::error::{SnapshotError, failed};
use super::links::real;
use super::manifest::disk_name;

/// A disk whose present overlay is frozen, or will be.
#[derive(Debug)]
pub(super) struct Frozen {
    /// Number of the disk in the description.
    pub(super) disk: usize,
    /// File of the frozen overlay.
    pub(super) path: PathBuf,
    /// File of the new overlay, to which the VM writes afterwards.
    overlay: PathBuf,
    /// Block node of the new overlay.
    pub(super) node: String,
    /// Block node that the VM writes to before the switch.
    active: String,
}

impl Frozen {
    /// Returns whether the frozen overlay's file is itself in the snapshot at this directory. The
    /// snapshot may contain a copy instead.
    pub(super) fn is_in(&self, snapshot: &Path) -> bool {
        let kept = identity(&snapshot.join(disk_name(self.disk)));
        kept.is_ok_and(|kept| identity(&self.path).is_ok_and(|own| own == kept))
    }
}

/// Adds a new overlay for each disk with a temporary overlay. The VM uses the new overlays only
/// after [`switch`]. Callers call [`drop_unused`] before. `note` records the new overlays before
/// they are created, because the daemon may die at any moment. `user`: user that QEMU runs as.
pub(super) fn prepare(
    qmp: &mut Qmp,
    (spec, user): (&VmSpec, Option<QemuUser>),
    draft: &Draft,
    overlays: &[PathBuf],
    note: impl Fn(&[PathBuf]) -> Result<(), SnapshotError>,
) -> Result<Vec<Frozen>, SnapshotError> {
    let chains = Chains::read(qmp)?;
    let (mut frozen, mut sizes) = (Vec::new(), Vec::new());
    for (disk, _) in spec.disks.iter().enumerate().filter(|(_, d)| d.snapshot) {
        let active = chains
            .active(spec, disk)
            .ok_or_else(|| SnapshotError::Qemu(format!("QEMU does not report disk {disk}")))?;
        check_exists(disk, &active)?;
        // The guest may control this QEMU, so root must not touch a file that QEMU names and that
        // is not the VM's.
        if !spec.keeps_rights() {
            if !overlays.contains(&active.file) {
                return Err(SnapshotError::Impossible(format!(
                    "disk {disk} writes to {}, which is not an overlay of this VM",
                    active.file.display()
                )));
            }
            check_header(&active.file, spec, disk, draft)?;
        }
        check_chain(disk, &active)?;
        // Node names have at most 31 bytes. The time in the name makes it unique for each save.
        let node = format!("disk{disk}-{:x}", overlay::unique());
        let place = active.file.parent().unwrap_or(Path::new("/var/tmp"));
        sizes.push(active.virtual_bytes);
        frozen.push(Frozen {
            disk,
            overlay: place.join(format!("memfold-{}-{node}.qcow2", spec.name)),
            path: active.file,
            node,
            active: active.node,
        });
    }
    if frozen.is_empty() {
        return Ok(frozen);
    }
    let overlays: Vec<PathBuf> = frozen.iter().map(|f| f.overlay.clone()).collect();
    note(&overlays)?;
    let mut new = frozen.iter().zip(sizes);
    let added = new.try_for_each(|(new, bytes)| add(qmp, (spec, user), draft, new, bytes));
    if let Err(error) = added {
        undo(qmp, &frozen, note);
        return Err(error);
    }
    Ok(frozen)
}

/// Creates an overlay and makes QEMU open it. The overlay's header names the path that the frozen
/// overlay will have in the finished snapshot.
fn add(
    qmp: &mut Qmp,
    (spec, user): (&VmSpec, Option<QemuUser>),
    draft: &Draft,
    new: &Frozen,
    virtual_bytes: u64,
) -> Result<(), SnapshotError> {
    let backing = Backing {
        file: &draft.place.join(disk_name(new.disk)),
        format: "qcow2",
        virtual_bytes: Some(virtual_bytes),
    };
    overlay::create(&new.overlay, &backing)
        .and_then(|()| qemu_user::give(&new.overlay, user))
        .map_err(failed(&new.overlay))?;
    let disk = &spec.disks[new.disk];
    let cache = json!({ "direct": disk.cache.direct(), "no-flush": disk.cache.no_flush() });
    qmp.execute_on_disks(
        "blockdev-add",
        json!({
            "driver": "qcow2", "node-name": new.node, "backing": null, "discard": "unmap", "cache": cache,
            "file": {
                "driver": "file", "node-name": file_node(&new.node), "filename": new.overlay, "discard": "unmap",
                "cache": cache, "aio": disk.aio.name(),
            },
        }),
    )?;
    Ok(())
}

/// Switches all disks to their new overlays at one instant.
pub(super) fn switch(qmp: &mut Qmp, frozen: &[Frozen]) -> Result<(), SnapshotError> {
    let action = |new: &Frozen| json!({ "type": "blockdev-snapshot", "data": { "node": new.active, "overlay": new.node } });
    if !frozen.is_empty() {
        let actions: Vec<Value> = frozen.iter().map(action).collect();
        qmp.execute_on_disks("transaction", json!({ "actions": actions }))?;
    }
    Ok(())
}

/// Checks that QEMU no longer has a frozen overlay open for writing. QEMU reports no error if it
/// cannot reopen an overlay read-only, for example in a directory that its user cannot access. QEMU
/// would then write to the snapshot's disk when it closes the overlay.
pub(super) fn check_frozen(qmp: &mut Qmp, frozen: &[Frozen]) -> Result<(), SnapshotError> {
    let nodes = nodes(qmp)?;
    let is_read_only = |name: &str| {
        let mut nodes = nodes.as_array().into_iter().flatten();
        nodes.any(|node| node["node-name"] == name && node["ro"] == true)
    };
    let Some(new) = frozen.iter().find(|new| !is_read_only(&new.active)) else {
        return Ok(());
    };
    Err(SnapshotError::Impossible(format!(
        "QEMU cannot reopen {} read-only; give QEMU's user access to that directory",
        new.path.display()
    )))
}

/// Makes QEMU close its writable descriptors of frozen overlays, if QEMU runs as another user.
pub(super) fn close_for_writing(qmp: &mut Qmp, spec: &VmSpec, frozen: &[Frozen]) {
    for Frozen {
        disk, path, active, ..
    } in frozen.iter().filter(|_| !spec.keeps_rights())
    {
        // Otherwise the snapshot gets a copy of the overlay.
        if let Err(error) = reopen(qmp, (spec, *disk), (active, path), true) {
            tracing::debug!(vm = spec.name, disk, %error, "QEMU keeps a frozen overlay open for writing");
        }
    }
}

/// Makes QEMU close new overlays that are not in use, and removes their files.
pub(super) fn undo(
    qmp: &mut Qmp,
    frozen: &[Frozen],
    note: impl Fn(&[PathBuf]) -> Result<(), SnapshotError>,
) {
    let mut used = Vec::new();
    for frozen in frozen {
        // If QEMU does not close an overlay, it may be writing to it: a late answer is not a
        // refusal.
        if delete_node(qmp, &frozen.node).is_ok() {
            let _ = fs::remove_file(&frozen.overlay);
            continue;
        }
        // If the VM uses the new overlay anyway, its header names a file of a snapshot that will
        // never exist.
        let _ = name_backing(qmp, (&frozen.node, &frozen.node), &frozen.path);
        used.push(frozen.overlay.clone());
    }
    // If the record cannot be written now, it names files that no longer exist, which is harmless.
    let _ = note(&used);
}

/// A VM's overlay that is in a snapshot now.
#[derive(Debug)]
pub(super) struct Lain {
    /// Block node at the top of the disk's chain.
    root: String,
    /// Block node directly above the overlay.
    above: String,
    /// Path of the overlay in the snapshot.
    kept: PathBuf,
    /// Path of the overlay before the snapshot, which QEMU still uses.
    pub(super) path: PathBuf,
}

/// Returns the overlays of a VM that are in the snapshot at directory `snapshot`. `overlays`:
/// temporary overlays of the VM that are in no snapshot.
pub(super) fn lain(
    pid: Pid,
    qmp: &mut Qmp,
    (spec, overlays): (&VmSpec, &[PathBuf]),
    snapshot: &Path,
) -> Result<Vec<Lain>, SnapshotError> {
    let open = open_files(pid)?;
    // The guest may control this QEMU, and root creates and later removes the files that are
    // returned.
    let is_trusted =
        |file: &Path| spec.keeps_rights() || is_overlay_place(file, &spec.name, overlays);
    let chains = Chains::read(qmp)?;
    let mut found = Vec::new();
    for (disk, _) in spec.disks.iter().enumerate().filter(|(_, d)| d.snapshot) {
        let kept = snapshot.join(disk_name(disk));
        let is_open = identity(&kept).is_ok_and(|file| open.contains(&file));
        let Some(top) = chains.active(spec, disk).filter(|_| is_open) else {
            continue;
        };
        let root = top.node.clone();
        let (mut above, mut file) = (top.node, top.file);
        // The search ends at overlays in other snapshots, because a snapshot on which others build
        // cannot be removed.
        while file.exists() {
            let Some(next) = chains.below(spec, disk, &above) else {
                break;
            };
            let named = header(&file).unwrap_or_default();
            if names_backing(&named, &kept) {
                let path = next.file;
                if !is_trusted(&path) {
                    break;
                }
                found.push(Lain {
                    root,
                    above,
                    kept,
                    path,
                });
                break;
            }
            (above, file) = (next.node, next.file);
        }
    }
    Ok(found)
}

/// Returns whether a disk's header from `qemu-img info` names a backing file, by whatever links.
fn names_backing(header: &Value, file: &Path) -> bool {
    let named = header["backing-filename"].as_str().map(Path::new);
    named.is_some_and(|named| named == file || real(named) == real(file))
}

/// Returns whether a path is one that a temporary overlay of the VM `name` could have had: the name
/// of such a file, in a directory with one of its other overlays.
fn is_overlay_place(path: &Path, name: &str, overlays: &[PathBuf]) -> bool {
    let file = path.file_name().and_then(OsStr::to_str);
    let mut directories = overlays.iter().map(|overlay| overlay.parent());
    file.and_then(memfold_vm::vm_of) == Some(name) && directories.any(|one| one == path.parent())
}

/// Gives overlays their former paths again, in addition to the paths in the snapshot, and writes
/// the former paths into the headers of the overlays above them.
pub(super) fn take_back(qmp: &mut Qmp, lain: &[Lain]) -> Result<(), SnapshotError> {
    for overlay in lain {
        let is_there = identity(&overlay.kept).ok() == identity(&overlay.path).ok();
        // The path may exist already, if a daemon was killed at this step.
        if !is_there {
            fs::hard_link(&overlay.kept, &overlay.path).map_err(failed(&overlay.path))?;
        }
        // The VM's next save finds the overlays by QEMU's nodes and merges them, so the old path in
        // a header does no harm if QEMU cannot write the file.
        let nodes = (&*overlay.root, &*overlay.above);
        if let Err(error) = name_backing(qmp, nodes, &overlay.path) {
            tracing::debug!(
                overlay = %overlay.path.display(),
                %error,
                "cannot write the overlay's new path into the header above it"
            );
        }
    }
    Ok(())
}

/// Makes QEMU close overlays that a killed daemon had added, and that never became part of a disk's
/// chain. QEMU refuses to close overlays that are part of a chain.
pub(super) fn drop_unused(
    qmp: &mut Qmp,
    spec: &VmSpec,
    overlays: &[PathBuf],
) -> Result<(), SnapshotError> {
    let nodes = nodes(qmp)?;
    for disk in 0..spec.disks.len() {
        for name in nodes.as_array().into_iter().flatten() {
            let name = name["node-name"].as_str().unwrap_or_default();
            if age(spec, disk, name).is_none_or(|added| added == 0) {
                continue;
            }
            match qmp.execute_on_disks("blockdev-del", json!({ "node-name": name })) {
                Ok(_) => {
                    tracing::info!(node = name, "overlay of an interrupted save removed");
                    let is_own = |file: &PathBuf| spec.keeps_rights() || overlays.contains(file);
                    let file = file_of(&nodes, spec, disk, name).filter(is_own);
                    let _ = file.map(fs::remove_file);
                }
                Err(QmpError::Refused { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// Writes the path of the backing file into the header of a node's file. `root` is the top of the
/// node's chain, and may be the node itself.
pub(super) fn name_backing(
    qmp: &mut Qmp,
    (root, node): (&str, &str),
    backing: &Path,
) -> Result<(), SnapshotError> {
    let names = json!({ "device": root, "image-node-name": node, "backing-file": backing });
    Ok(qmp
        .execute_on_disks("change-backing-file", names)
        .map(drop)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_names_a_backing_file_by_any_path_to_it_but_not_by_its_other_hard_link() {
        let directory = tempfile::tempdir().unwrap();
        let (root, link) = (directory.path().join("root"), directory.path().join("link"));
        fs::create_dir(&root).unwrap();
        fs::write(root.join("disk"), "").unwrap();
        fs::hard_link(root.join("disk"), root.join("former")).unwrap();
        std::os::unix::fs::symlink(&root, &link).unwrap();
        let names =
            |file: &Path| names_backing(&json!({ "backing-filename": file }), &link.join("disk"));
        assert!(names(&link.join("disk")) && names(&root.join("disk")));
        assert!(!names(&root.join("former")) && !names(&root.join("gone")));
        assert!(!names_backing(&json!({}), &root.join("disk")));
    }

    #[test]
    fn only_paths_of_the_vms_own_overlays_are_trusted_if_its_qemu_names_them() {
        let own = [PathBuf::from(
            "/var/tmp/memfold-web-disk0-18c2a5f3b7d4e601.qcow2",
        )];
        let is_place = |path: &str| is_overlay_place(Path::new(path), "web", &own);
        assert!(is_place("/var/tmp/memfold-web-0-18c2a5f3b7d4e600.qcow2"));
        for other in [
            "/var/tmp/memfold-db-0-18c2a5f3b7d4e600.qcow2",
            "/var/tmp/memfold-web-2-0-18c2a5f3b7d4e600.qcow2",
            "/srv/memfold-web-0-18c2a5f3b7d4e600.qcow2",
            "/var/tmp/../lib/memfold-web-0-18c2a5f3b7d4e600.qcow2",
            "/etc/shadow",
            "/",
        ] {
            assert!(!is_place(other), "{other}");
        }
        assert!(!is_overlay_place(&own[0], "web", &[]));
    }
}
