//! Disks at one instant: a new overlay is put over each temporary one, which is frozen by that.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use memfold_host::helper;
use memfold_vm::overlay::{self, Backing};
use memfold_vm::{Qmp, QmpError, VmSpec};
use rustix::process::Pid;
use serde_json::{Value, json};

use super::SnapshotError;
use super::shelf::{Draft, MANIFEST};

/// How long `qemu-img` may take to read headers.
const LOOK_LIMIT: Duration = Duration::from_secs(60);

/// A disk whose overlay is frozen, or is to be.
#[derive(Debug)]
pub(super) struct Frozen {
    /// Its number in the description.
    pub(super) disk: usize,
    /// The overlay that is frozen.
    pub(super) path: PathBuf,
    /// The one that the VM writes then.
    overlay: PathBuf,
    /// Its block node.
    pub(super) node: String,
    /// What the VM writes before.
    active: String,
}

impl Frozen {
    /// Whether it is a file of the snapshot in this directory, which may hold a copy instead.
    pub(super) fn is_in(&self, snapshot: &Path) -> bool {
        let kept = identity(&snapshot.join(disk_name(self.disk)));
        kept.is_ok_and(|kept| identity(&self.path).is_ok_and(|own| own == kept))
    }
}

/// Adds an overlay for each temporary one, which the VM does not use before [`switch`]; [`drop_unused`] comes before. `note` keeps which there are before there are any:
/// this daemon may die at any moment.
pub(super) fn prepare(
    qmp: &mut Qmp,
    spec: &VmSpec,
    draft: &Draft,
    overlays: &[PathBuf],
    note: impl Fn(&[PathBuf]) -> Result<(), SnapshotError>,
) -> Result<Vec<Frozen>, SnapshotError> {
    let devices = qmp.query("query-block")?;
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let mut frozen: Vec<Frozen> = Vec::new();
    let mut sizes: Vec<u64> = Vec::new();
    for (disk, _) in spec.disks.iter().enumerate().filter(|(_, d)| d.snapshot) {
        let active = active(&devices, &nodes, spec, disk)
            .ok_or_else(|| SnapshotError::Qemu(format!("QEMU doesn't tell of disk {disk}")))?;
        // It may be in its guest's hands: what it names is no reason for root to touch a file that isn't the VM's.
        if spec.user.is_some() && !overlays.contains(&active.file) {
            return Err(SnapshotError::Impossible(format!(
                "disk {disk} writes to {}, which is no overlay of this VM's",
                active.file.display()
            )));
        }
        if spec.user.is_some() {
            check_header(&active.file, spec, disk, draft)?;
        }
        check_chain(disk, &active)?;
        // Node names have at most 31 bytes; the time makes them differ from save to save.
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
    let mut added = frozen
        .iter()
        .zip(sizes)
        .map(|(new, bytes)| add(qmp, spec, draft, new, bytes));
    if let Err(error) = added.try_for_each(|added| added) {
        undo(qmp, &frozen, note);
        return Err(error);
    }
    Ok(frozen)
}

/// Makes an overlay, over what the frozen one will be called when the snapshot is whole, and has QEMU open it.
fn add(
    qmp: &mut Qmp,
    spec: &VmSpec,
    draft: &Draft,
    new: &Frozen,
    virtual_bytes: u64,
) -> Result<(), SnapshotError> {
    let backing = Backing {
        file: &draft.place().join(disk_name(new.disk)),
        format: "qcow2",
        virtual_bytes: Some(virtual_bytes),
    };
    overlay::create(&new.overlay, &backing)
        .and_then(|()| overlay::give(&new.overlay, spec))
        .map_err(|source| SnapshotError::Files {
            path: new.overlay.clone(),
            source,
        })?;
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

/// Puts all overlays over those that the VM writes, at one instant.
pub(super) fn switch(qmp: &mut Qmp, frozen: &[Frozen]) -> Result<(), SnapshotError> {
    let action = |new: &Frozen| json!({ "type": "blockdev-snapshot", "data": { "node": new.active, "overlay": new.node } });
    if !frozen.is_empty() {
        let actions: Vec<Value> = frozen.iter().map(action).collect();
        qmp.execute_on_disks("transaction", json!({ "actions": actions }))?;
    }
    Ok(())
}

/// Whether QEMU writes to none of the frozen overlays any more. It doesn't fail if it can't open one again for reading alone, as after it has given up its
/// rights in a directory that is not open to its user; then it would write into the snapshot's disk when it lets go of it.
pub(super) fn check_frozen(qmp: &mut Qmp, frozen: &[Frozen]) -> Result<(), SnapshotError> {
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let is_read_only = |name: &str| {
        let mut nodes = nodes.as_array().into_iter().flatten();
        nodes.any(|node| node["node-name"] == name && node["ro"] == true)
    };
    match frozen.iter().find(|new| !is_read_only(&new.active)) {
        None => Ok(()),
        Some(new) => Err(SnapshotError::Impossible(format!(
            "QEMU can't open {} again for reading alone: let its user reach that directory",
            new.path.display()
        ))),
    }
}

/// Has QEMU let go of overlays that are not used.
pub(super) fn undo(
    qmp: &mut Qmp,
    frozen: &[Frozen],
    note: impl Fn(&[PathBuf]) -> Result<(), SnapshotError>,
) {
    // What QEMU doesn't let go of, it may be writing to: an answer that comes too late is no refusal.
    let mut in_use =
        |f: &&Frozen| match qmp.execute_on_disks("blockdev-del", json!({ "node-name": f.node })) {
            Ok(_) => false,
            // It was not added.
            Err(QmpError::Refused { description, .. }) => !description.contains("find"),
            Err(_) => true,
        };
    let (used, unused): (Vec<&Frozen>, Vec<&Frozen>) = frozen.iter().partition(|f| in_use(f));
    for frozen in unused {
        let _ = fs::remove_file(&frozen.overlay);
    }
    for frozen in &used {
        // If it was put over the old one all the same, its header names a snapshot that will never be.
        let _ = name_backing(qmp, &frozen.node, &frozen.path);
    }
    let used: Vec<PathBuf> = used.iter().map(|f| f.overlay.clone()).collect();
    // If it can't be written now, it names files that are gone, which does no harm.
    let _ = note(&used);
}

/// An overlay of a VM's that lies in a snapshot.
#[derive(Debug)]
pub(super) struct Lain {
    /// The node right above it.
    above: String,
    /// Where it lies.
    kept: PathBuf,
    /// What it was called before, and is called in QEMU.
    pub(super) path: PathBuf,
}

/// The overlays of a VM that lie in a snapshot, in its directory `snapshot`.
pub(super) fn lain(
    pid: Pid,
    qmp: &mut Qmp,
    spec: &VmSpec,
    snapshot: &Path,
) -> Result<Vec<Lain>, SnapshotError> {
    let open = open_files(pid)?;
    let devices = qmp.query("query-block")?;
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let mut found = Vec::new();
    for (disk, _) in spec.disks.iter().enumerate().filter(|(_, d)| d.snapshot) {
        let kept = snapshot.join(disk_name(disk));
        let is_open = identity(&kept).is_ok_and(|file| open.contains(&file));
        let Some(top) = active(&devices, &nodes, spec, disk).filter(|_| is_open) else {
            continue;
        };
        let (mut above, mut file) = (top.node, top.file);
        // What lies in other snapshots is built on by none that can be removed.
        while file.exists() {
            let Some(next) = below(&nodes, spec, disk, &above) else {
                break;
            };
            let named = header(&file).unwrap_or_default();
            if named["backing-filename"].as_str().map(Path::new) == Some(&kept) {
                found.push(Lain {
                    above,
                    kept,
                    path: next.file,
                });
                break;
            }
            (above, file) = (next.node, next.file);
        }
    }
    Ok(found)
}

/// Gives overlays their own names back, beside those in the snapshot, and has what is built on them say so.
pub(super) fn take_back(qmp: &mut Qmp, lain: &[Lain]) -> Result<(), SnapshotError> {
    for overlay in lain {
        let is_there = identity(&overlay.kept).ok() == identity(&overlay.path).ok();
        // A daemon that was killed here has left it.
        if !is_there {
            fs::hard_link(&overlay.kept, &overlay.path).map_err(|source| SnapshotError::Files {
                path: overlay.path.clone(),
                source,
            })?;
        }
        name_backing(qmp, &overlay.above, &overlay.path)?;
    }
    Ok(())
}

/// Name of a frozen disk in a snapshot.
pub(super) fn disk_name(disk: usize) -> String {
    format!("disk{disk}.qcow2")
}

fn file_node(node: &str) -> String {
    format!("{node}-file")
}

/// What a disk's device writes to.
pub(super) struct Active {
    pub(super) node: String,
    pub(super) file: PathBuf,
    virtual_bytes: u64,
    /// What QEMU has below it, whatever its header says.
    pub(super) below: Option<Below>,
}

/// An overlay below another one.
pub(super) struct Below {
    pub(super) node: String,
    pub(super) file: PathBuf,
}

/// The device of a disk, as `query-block` tells of it.
pub(super) fn device<'a>(devices: &'a Value, spec: &VmSpec, disk: usize) -> Option<&'a Value> {
    devices.as_array()?.iter().find(|device| {
        let place = device["qdev"].as_str().unwrap_or_default();
        spec.is_disk(disk, place)
    })
}

pub(super) fn active(devices: &Value, nodes: &Value, spec: &VmSpec, disk: usize) -> Option<Active> {
    let device = device(devices, spec, disk)?;
    let inserted = &device["inserted"];
    let node = inserted["node-name"].as_str()?.to_owned();
    Some(Active {
        file: file_of(nodes, spec, disk, &node)?,
        virtual_bytes: inserted["image"]["virtual-size"].as_u64()?,
        below: below(nodes, spec, disk, &node),
        node,
    })
}

/// The file of a node of a disk's chain. It is a node of its own, which `vm run` names so, and we.
fn file_of(nodes: &Value, spec: &VmSpec, disk: usize, node: &str) -> Option<PathBuf> {
    let name = if node == spec.disk_node(disk) {
        first_file_node(disk)
    } else {
        file_node(node)
    };
    let file = nodes.as_array()?.iter().find(|n| n["node-name"] == name)?;
    Some(file["file"].as_str()?.into())
}

/// The file of a disk's first overlay, as `vm run` names it.
fn first_file_node(disk: usize) -> String {
    format!("overlay-file{disk}")
}

/// When a node of a disk's chain was added; 0 for the first.
fn age(spec: &VmSpec, disk: usize, name: &str) -> Option<u64> {
    if name == spec.disk_node(disk) {
        return Some(0);
    }
    let added = name.strip_prefix(&format!("disk{disk}-"))?;
    u64::from_str_radix(added, 16).ok()
}

/// Has QEMU let go of overlays that a daemon added and was killed before they became part of a disk's chain. QEMU refuses that for
/// those that are.
pub(super) fn drop_unused(
    qmp: &mut Qmp,
    spec: &VmSpec,
    overlays: &[PathBuf],
) -> Result<(), SnapshotError> {
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    for disk in 0..spec.disks.len() {
        for name in nodes.as_array().into_iter().flatten() {
            let name = name["node-name"].as_str().unwrap_or_default();
            if age(spec, disk, name).is_none_or(|added| added == 0) {
                continue;
            }
            match qmp.execute_on_disks("blockdev-del", json!({ "node-name": name })) {
                Ok(_) => {
                    tracing::info!(node = name, "an overlay that a killed save left is removed");
                    let file = file_of(&nodes, spec, disk, name);
                    if let Some(file) =
                        file.filter(|file| spec.user.is_none() || overlays.contains(file))
                    {
                        let _ = fs::remove_file(file);
                    }
                }
                Err(QmpError::Refused { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// The overlay right below `node`, as QEMU opened it: the youngest of the older ones, all of which are in the chain.
fn below(nodes: &Value, spec: &VmSpec, disk: usize, node: &str) -> Option<Below> {
    let age = |name: &str| age(spec, disk, name);
    let own = age(node)?;
    let names = nodes
        .as_array()?
        .iter()
        .filter_map(|n| n["node-name"].as_str());
    let older = names.filter_map(|name| Some((age(name)?, name)));
    let (_, name) = older.filter(|(time, _)| *time < own).max()?;
    Some(Below {
        node: name.to_owned(),
        file: file_of(nodes, spec, disk, name)?,
    })
}

/// Whether the files that a disk is built on are where the headers say.
fn check_chain(disk: usize, active: &Active) -> Result<(), SnapshotError> {
    if !active.file.exists() {
        return Err(SnapshotError::Impossible(format!(
            "disk {disk}: its temporary overlay {} was removed while the VM runs (systemd-tmpfiles does that in /var/tmp unless \
             /usr/lib/tmpfiles.d/memfold.conf is there). The VM goes on, and what it wrote ends with it: copy what matters out of the guest",
            active.file.display()
        )));
    }
    let same = |a: &Path, b: &Path| {
        let inode = |path| {
            fs::metadata(path)
                .map(|facts| (facts.dev(), facts.ino()))
                .ok()
        };
        inode(a).is_some() && inode(a) == inode(b)
    };
    // The overlay below is still at its first place until it belongs to a snapshot.
    let below = active.below.as_ref().map(|below| &below.file);
    if let Some(backing) = below.filter(|file| file.exists()) {
        let named = chain(&active.file)
            .ok()
            .and_then(|files| files.get(1).cloned());
        // It is a snapshot's, or it would have been merged. A snapshot over one that goes with the VM would go with it too.
        if !named.is_some_and(|named| named != *backing && same(&named, backing)) {
            return Err(SnapshotError::Impossible(format!(
                "disk {disk} builds on {}, an overlay of a save that failed, which has a second name and so can't be merged: remove drafts of that save ('.NAME.draft') from other directories of snapshots, or start the VM anew",
                backing.display()
            )));
        }
    }
    chain(&active.file).map(drop).map_err(|error| {
        SnapshotError::Impossible(format!(
            "disk {disk} builds on a snapshot that was removed; start the VM anew to save it again ({error})"
        ))
    })
}

fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    fs::metadata(path).map(|facts| (facts.dev(), facts.ino()))
}

/// Device and inode number of every file that QEMU has open.
fn open_files(pid: Pid) -> Result<HashSet<(u64, u64)>, SnapshotError> {
    let place = PathBuf::from(format!("/proc/{}/fd", pid.as_raw_nonzero()));
    let entries = fs::read_dir(&place).map_err(|source| SnapshotError::Files {
        path: place,
        source,
    })?;
    Ok(entries
        .flatten()
        .filter_map(|entry| identity(&entry.path()).ok())
        .collect())
}

/// What `qemu-img info` says of an overlay; nothing else is opened (without '--backing-chain').
fn header(overlay: &Path) -> std::io::Result<Value> {
    let mut command = Command::new("qemu-img");
    command
        .args(["info", "-U", "--output=json", "-f", "qcow2"])
        .arg(overlay);
    let output = helper::output(command.stdin(Stdio::null()), LOOK_LIMIT)?;
    Ok(serde_json::from_slice(&output.stdout).unwrap_or_default())
}

/// Whether the files that a VM's disks are built on, by their names, are those that QEMU has open. What lies among the snapshots is not
/// looked at: it may be a copy.
pub(super) fn check_files(pid: Pid, qmp: &mut Qmp, spec: &VmSpec) -> Result<(), SnapshotError> {
    let open = open_files(pid)?;
    let devices = qmp.query("query-block")?;
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    for (number, disk) in spec.disks.iter().enumerate() {
        // QEMU copies what it has open, whatever is called so by now, or here.
        if spec.foreign.is_some() && !disk.snapshot {
            continue;
        }
        let files = match active(&devices, &nodes, spec, number) {
            Some(active) if disk.snapshot => chain(&active.file)?.into_iter().skip(1).collect(),
            _ => vec![disk.path.clone()],
        };
        for file in files {
            let ours = file.with_file_name(MANIFEST).exists();
            // A name that is none of a file can't have been replaced.
            if !ours && identity(&file).is_ok_and(|now| !open.contains(&now)) {
                return Err(SnapshotError::Impossible(format!(
                    "{} was replaced since the VM was started: its memory would not fit what is there now; start the VM anew to save it",
                    file.display()
                )));
            }
        }
    }
    Ok(())
}

/// Whether an overlay that a QEMU without root's rights writes is built on what we said: its header is QEMU's to write, and who reads it later, as root,
/// opens what it names. It has to be a plain file, and to name the disk's own file, or that of a snapshot of its trust domain.
pub(super) fn check_header(
    overlay: &Path,
    spec: &VmSpec,
    disk: usize,
    draft: &Draft,
) -> Result<(), SnapshotError> {
    let refused = |why: String| {
        SnapshotError::Impossible(format!(
            "{} {why}: is the VM's QEMU in its guest's hands? It is not saved",
            overlay.display()
        ))
    };
    let facts = fs::symlink_metadata(overlay).map_err(|source| SnapshotError::Files {
        path: overlay.into(),
        source,
    })?;
    if !facts.is_file() {
        return Err(refused("is no plain file".into()));
    }
    let image = header(overlay).map_err(|source| SnapshotError::Files {
        path: overlay.into(),
        source,
    })?;
    if image.is_null() {
        return Err(refused("has no header of a qcow2 image".into()));
    }
    let of_format = &image["format-specific"]["data"];
    if !of_format["data-file"].is_null() || image["encrypted"] == true {
        return Err(refused("names a file for its data, or is encrypted".into()));
    }
    let Some(backing) = image["backing-filename"].as_str().map(Path::new) else {
        return Err(refused("is built on nothing".into()));
    };
    let own = spec.disks.get(disk).map(|disk| disk.path.as_path());
    let format = image["backing-filename-format"].as_str();
    let own_format = spec.disks.get(disk).map(|disk| disk.format().driver());
    let is_own = own == Some(backing) && format == own_format;
    if is_own || format == Some("qcow2") && is_of_its_domain(backing, spec, disk, draft) {
        return Ok(());
    }
    Err(refused(format!(
        "is built on {} ({})",
        backing.display(),
        format.unwrap_or("no format")
    )))
}

/// Whether a file is this disk's part of a snapshot beside `draft`, of this VM or its trust domain: another's is none of its guest's business.
fn is_of_its_domain(backing: &Path, spec: &VmSpec, disk: usize, draft: &Draft) -> bool {
    let Some(name) = backing
        .parent()
        .and_then(Path::file_name)
        .and_then(|name| name.to_str())
    else {
        return false;
    };
    let place = draft.place().with_file_name(name).join(disk_name(disk));
    // Not `==`, for which `a/./b` is `a/b`.
    if memfold_vm::check_name("snapshot", name).is_err() || backing.as_os_str() != place.as_os_str()
    {
        return false;
    }
    draft
        .beside(name)
        .is_ok_and(|of| of.domain == spec.domain && (spec.domain.is_some() || of.vm == spec.name))
}

/// Writes into the header of a node's file what it is built on.
pub(super) fn name_backing(qmp: &mut Qmp, node: &str, backing: &Path) -> Result<(), SnapshotError> {
    qmp.execute_on_disks(
        "change-backing-file",
        json!({ "device": node, "image-node-name": node, "backing-file": backing }),
    )?;
    Ok(())
}

/// Files that a qcow2 is built on, itself first. `-U`: a running VM may have it open.
pub(super) fn chain(disk: &Path) -> Result<Vec<PathBuf>, SnapshotError> {
    let mut command = Command::new("qemu-img");
    command
        .args([
            "info",
            "-U",
            "--backing-chain",
            "--output=json",
            "-f",
            "qcow2",
        ])
        .arg(disk);
    let output = helper::output(command.stdin(Stdio::null()), LOOK_LIMIT).map_err(|source| {
        SnapshotError::Files {
            path: disk.into(),
            source,
        }
    })?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(SnapshotError::Qemu(format!("qemu-img: {words}")));
    }
    let images: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| SnapshotError::Qemu(format!("qemu-img: {error}")))?;
    let files = images.as_array().into_iter().flatten();
    Ok(files
        .filter_map(|image| Some(image["filename"].as_str()?.into()))
        .collect())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use memfold_units::ByteSize;

    use super::*;
    use crate::Manifest;
    use crate::manifest::tests::manifest;
    use crate::shelf::{DEVICES, RAM, SUMS, Shelf, facts};
    use memfold_vm::DiskSpec;

    /// A snapshot of a VM with one disk.
    fn save(shelf: &Shelf, name: &str, domain: Option<&str>) -> PathBuf {
        let draft = shelf.draft(name).unwrap();
        let file = |part: &str| {
            let mut file = draft.file(part).unwrap();
            file.write_all(b"x").unwrap();
            facts(file).unwrap()
        };
        let ram = file(RAM);
        let manifest = Manifest {
            domain: domain.map(str::to_owned),
            ram_bytes: ram.bytes,
            sums: file(SUMS),
            devices: file(DEVICES),
            ..manifest(name, ByteSize::mib(64))
        };
        draft.file(&disk_name(0)).unwrap();
        let disk = draft.place().join(disk_name(0));
        draft.commit(&manifest).unwrap();
        disk
    }

    /// An image with these options of `qemu-img create`.
    fn image(path: &Path, options: &[&str]) {
        let _ = fs::remove_file(path);
        let output = Command::new("qemu-img")
            .args(["create", "-q", "-u", "-f", "qcow2"])
            .args(options)
            .arg(path)
            .arg("1M")
            .output()
            .unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words}");
    }

    #[test]
    fn what_a_vm_s_user_put_in_its_overlay_s_place_is_not_saved() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        let shelf = Shelf::open(&path("shelf"));
        let ours = save(&shelf, "ours", Some("shop"));
        let others = save(&shelf, "others", Some("bank"));
        let draft = shelf.draft("new").unwrap();
        let mut spec = VmSpec::new("web1", ByteSize::mib(64));
        spec.domain = Some("shop".into());
        spec.user = Some("nobody".into());
        let mut disk = DiskSpec::new(path("disk"));
        disk.format = Some(memfold_vm::DiskFormat::Raw);
        spec.disks = vec![disk];
        let overlay = path("overlay");
        let check = |spec: &VmSpec| check_header(&overlay, spec, 0, &draft);
        let on = |backing: &Path, format: &str| {
            image(&overlay, &["-F", format, "-b", backing.to_str().unwrap()]);
        };
        on(&path("disk"), "raw");
        check(&spec).unwrap();
        on(&ours, "qcow2");
        check(&spec).unwrap();
        let refused = |spec: &VmSpec, word: &str| {
            let why = check(spec).unwrap_err().to_string();
            assert!(why.contains(word), "no '{word}' in: {why}");
        };
        // A VM without a domain shares with nobody.
        let loner = VmSpec {
            domain: None,
            ..spec.clone()
        };
        refused(&loner, "is built on");
        let root = path("shelf");
        for (backing, format) in [
            (others, "qcow2"),
            (PathBuf::from("/etc/shadow"), "raw"),
            // As the guest wrote it, it names files of the host.
            (path("disk"), "qcow2"),
            (ours.clone(), "raw"),
            (ours.with_file_name(RAM), "qcow2"),
            (root.join("ours/../others").join(disk_name(0)), "qcow2"),
            (root.join("./ours").join(disk_name(0)), "qcow2"),
            (root.join("ghost").join(disk_name(0)), "qcow2"),
            (root.join(".new.draft").join(disk_name(0)), "qcow2"),
        ] {
            on(&backing, format);
            refused(&spec, "is built on");
        }
        image(&overlay, &[]);
        refused(&spec, "is built on nothing");
        let data = format!("data_file={}", path("data").display());
        image(&overlay, &["-o", &data]);
        refused(&spec, "names a file for its data");
        fs::write(&overlay, b"no header").unwrap();
        refused(&spec, "no header of a qcow2 image");
        fs::remove_file(&overlay).unwrap();
        std::os::unix::fs::symlink(&ours, &overlay).unwrap();
        refused(&spec, "no plain file");
    }
}
