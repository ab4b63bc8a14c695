//! Saving a VM that stands still.
//!
//! ```text
//!   1. device state    QEMU writes it to a descriptor of ours (xen-save-devices-state: any machine, no RAM)
//!   2. RAM image       from the page tables of QEMU's process
//!   3. disks           each temporary overlay is frozen, a new one on top, all in one transaction
//!   -- the VM goes on --
//!   4. frozen overlays get a name in the snapshot; manifest; the VM lets go of them
//! ```
//! Until step 3 nothing of the VM is changed. If anything fails behind it, the VM keeps the longer chain of overlays: nothing that
//! it has written is lost.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use memfold_units::PAGE_SIZE;
use serde_json::{Value, json};

use super::free::{self, Frames};
use super::image::{self, Source};
use super::manifest::{FORMAT, FileFacts, Keep, Manifest, SavedDisk, Steps};
use super::shelf::{DEVICES, Draft, RAM, SUMS, facts};
use super::{Shelf, SnapshotError};
use crate::vm::{Qmp, QmpError, Record, Vm, VmDirectory, VmSpec};

/// What is to be saved, and how.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of the snapshot.
    pub name: String,
    /// What the guest was told to keep, for the manifest.
    pub keep: Keep,
    /// Trust domain.
    pub domain: Option<String>,
    /// When the save began.
    pub began: Instant,
    /// Frames that the guest had free while its writes were tracked; or why that isn't known.
    pub free: Result<Vec<Frames>, String>,
    /// The steps that were before.
    pub steps: Steps,
    /// Whether memfold's agent runs in the guest.
    pub agent: bool,
    /// Whether the guest's kernel knows its VM generation ID.
    pub generation_id: bool,
}

/// Why a VM can't be saved, by what it is.
pub fn refuse(vm: &Vm) -> Result<(&VmSpec, &Record, &VmDirectory), SnapshotError> {
    let (Some(spec), Some(record), Some(directory)) = (vm.spec(), vm.record(), vm.directory())
    else {
        return Err(SnapshotError::Impossible(
            "the VM was not started by memfold: its disks can't be frozen without changing its command line; start it with 'memfold vm run'".into(),
        ));
    };
    for disk in &spec.disks {
        if !disk.read_only && !disk.snapshot {
            return Err(SnapshotError::Impossible(format!(
                "disk {} is written in place: only read-only disks and those with snapshot = true can be frozen",
                disk.path.display()
            )));
        }
    }
    if spec.user.is_some() {
        return Err(SnapshotError::Impossible(
            "its QEMU has given its rights up (user = ...) and can't open new overlays".into(),
        ));
    }
    Ok((spec, record, directory))
}

/// Saves a VM that stands still. `go_on` lets it run again, and is called as soon as it may.
pub fn save(
    vm: &Vm,
    qmp: &mut Qmp,
    shelf: &Shelf,
    request: &Request,
    go_on: impl FnOnce(),
    progress: impl FnMut(u64),
) -> Result<Manifest, SnapshotError> {
    let stopped = Instant::now();
    let (spec, record, directory) = refuse(vm)?;
    let mut steps = request.steps;
    let draft = shelf.draft(&request.name)?;
    let devices = device_state(qmp, &draft)?;
    steps.devices_ms = milliseconds(stopped.elapsed());
    let began = Instant::now();
    let sources = sources(qmp)?;
    let free = match &request.free {
        Ok(frames) => {
            let layout = vm.layout(qmp)?;
            let found = free::unwritten(vm.pid(), &layout, frames);
            found.map_err(|error| format!("their writes can't be read: {error}"))
        }
        Err(why) => Err(why.clone()),
    };
    let (ram, sums) = (draft.file(RAM)?, draft.file(SUMS)?);
    let failed = |part: &str, source| SnapshotError::Files {
        path: draft.path().join(part),
        source,
    };
    let (blocks, counts) = image::write(
        vm.pid(),
        &sources,
        free.as_deref().unwrap_or_default(),
        &ram,
        &sums,
        progress,
    )
    .map_err(|source| failed(RAM, source))?;
    steps.ram_ms = milliseconds(began.elapsed());
    let began = Instant::now();
    let before = record_now(directory, record).overlays;
    let note = |new: &[PathBuf]| {
        let all: Vec<PathBuf> = before.iter().chain(new).cloned().collect();
        write_overlays(directory, record, &all)
    };
    let frozen = freeze(qmp, spec, &draft, note)?;
    steps.disks_ms = milliseconds(began.elapsed());
    go_on();
    let pause = stopped.elapsed();
    // From here on the VM's chain of overlays is longer by one. What fails leaves it so, and nothing of it is lost.
    let mut overlays = record_now(directory, record).overlays;
    let finish = || -> Result<Manifest, SnapshotError> {
        let disks = take_over(spec, &frozen, &draft)?;
        Ok(Manifest {
            format: FORMAT,
            name: request.name.clone(),
            domain: request.domain.clone(),
            vm: vm.name().to_owned(),
            created_s: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |time| time.as_secs()),
            memfold: env!("CARGO_PKG_VERSION").to_owned(),
            keep: request.keep,
            spec: spec.clone(),
            qemu: record.version,
            machine: record.machine.clone(),
            accel: record.accel.clone(),
            blocks: blocks.clone(),
            counts,
            free_kept: free.as_ref().err().cloned(),
            agent: request.agent,
            generation_id: request.generation_id,
            ram_bytes: ram.metadata().map_err(|source| failed(RAM, source))?.len(),
            sums: facts(sums).map_err(|source| failed(SUMS, source))?,
            devices: devices.clone(),
            disks,
            pause_ms: milliseconds(pause),
            save_ms: milliseconds(request.began.elapsed()),
            steps,
        })
    };
    let made = finish().and_then(|manifest| draft.commit(&manifest).map(|()| manifest));
    if made.is_ok() {
        // The frozen ones are the snapshot's now.
        overlays.retain(|overlay| frozen.iter().all(|f| f.path != *overlay));
        // The snapshot is made, also if the VM has died meanwhile.
        if let Err(error) = write_overlays(directory, record, &overlays) {
            tracing::warn!(vm = vm.name(), %error, "its record names overlays that belong to a snapshot now");
        }
        for frozen in &frozen {
            // A name that stays costs nothing: the file is the snapshot's.
            let _ = fs::remove_file(&frozen.path);
        }
    } else {
        for frozen in &frozen {
            // The new overlay names the snapshot's file as its backing; now it is the old one for good.
            if let Err(error) = name_backing(qmp, &frozen.node, &frozen.path) {
                tracing::warn!(vm = vm.name(), %error, "the header of a disk's overlay names a file that isn't there");
            }
        }
    }
    made
}

/// A time in milliseconds.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// Has QEMU write its device state into the draft.
fn device_state(qmp: &mut Qmp, draft: &Draft) -> Result<FileFacts, SnapshotError> {
    let file = draft.file(DEVICES)?;
    let path = draft.path().join(DEVICES);
    let failed = |source| SnapshotError::Files {
        path: path.clone(),
        source,
    };
    let writable = File::options().write(true).open(&path).map_err(failed)?;
    let place = qmp.lend(writable.as_fd())?;
    let done = qmp.execute(
        "xen-save-devices-state",
        json!({ "filename": place.path(), "live": false }),
    );
    qmp.take_back(&place)?;
    done?;
    let facts = facts(file).map_err(failed)?;
    if facts.bytes == 0 {
        return Err(failed(io::Error::other("QEMU wrote no device state")));
    }
    Ok(facts)
}

/// Every RAM block of QEMU.
fn sources(qmp: &mut Qmp) -> Result<Vec<Source>, SnapshotError> {
    let blocks = crate::vm::ram::read_blocks(qmp)?;
    let sources = blocks.into_iter().map(|block| Source {
        name: block.name,
        hva: block.hva,
        pages: block.used_bytes.div_ceil(PAGE_SIZE),
    });
    Ok(sources.filter(|source| source.pages > 0).collect())
}

/// A disk whose overlay was frozen.
struct Frozen {
    /// Its number in the description.
    disk: usize,
    /// The overlay that is frozen now.
    path: PathBuf,
    /// The one that the VM writes now.
    overlay: PathBuf,
    /// Its block node.
    node: String,
}

/// Puts a new overlay over each temporary one, all at one instant. `note` keeps which new overlays there are, before the VM writes to
/// any: this daemon may die at any moment.
fn freeze(
    qmp: &mut Qmp,
    spec: &VmSpec,
    draft: &Draft,
    note: impl Fn(&[PathBuf]) -> Result<(), SnapshotError>,
) -> Result<Vec<Frozen>, SnapshotError> {
    drop_unused(qmp, spec)?;
    let devices = qmp.query("query-block")?;
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let mut frozen: Vec<Frozen> = Vec::new();
    let mut actives: Vec<Active> = Vec::new();
    for (disk, _) in spec.disks.iter().enumerate().filter(|(_, d)| d.snapshot) {
        let active = active(&devices, &nodes, disk)
            .ok_or_else(|| SnapshotError::Qemu(format!("QEMU doesn't tell of disk {disk}")))?;
        check_chain(qmp, disk, &active)?;
        // Node names have at most 31 bytes; the time makes them differ from save to save.
        let node = format!("disk{disk}-{:x}", unique());
        let place = active.file.parent().unwrap_or(Path::new("/var/tmp"));
        frozen.push(Frozen {
            disk,
            path: active.file.clone(),
            overlay: place.join(format!("memfold-{}-{node}.qcow2", spec.name)),
            node,
        });
        actives.push(active);
    }
    if frozen.is_empty() {
        return Ok(frozen);
    }
    let overlays: Vec<PathBuf> = frozen.iter().map(|f| f.overlay.clone()).collect();
    note(&overlays)?;
    let mut added: Vec<String> = Vec::new();
    let mut switch = || -> Result<(), SnapshotError> {
        let mut actions = Vec::new();
        for (new, active) in frozen.iter().zip(&actives) {
            new_overlay(
                active,
                &new.overlay,
                &draft.place().join(disk_name(new.disk)),
            )?;
            let (node, disk) = (&new.node, &spec.disks[new.disk]);
            let cache = json!({ "direct": disk.cache.direct(), "no-flush": disk.cache.no_flush() });
            added.push(node.clone());
            qmp.execute(
                "blockdev-add",
                json!({
                    "driver": "qcow2", "node-name": node, "backing": null, "discard": "unmap", "cache": cache,
                    "file": {
                        "driver": "file", "node-name": file_node(node), "filename": new.overlay, "discard": "unmap",
                        "cache": cache, "aio": disk.aio.name(),
                    },
                }),
            )?;
            actions.push(json!({
                "type": "blockdev-snapshot", "data": { "node": active.node, "overlay": node }
            }));
        }
        qmp.execute("transaction", json!({ "actions": actions }))?;
        Ok(())
    };
    if let Err(error) = switch() {
        // What QEMU doesn't let go of, it may be writing to: an answer that comes too late is no refusal.
        let mut in_use = |f: &&Frozen| {
            added.contains(&f.node)
                && match qmp.execute("blockdev-del", json!({ "node-name": f.node })) {
                    Ok(_) => false,
                    // It was not added.
                    Err(QmpError::Refused { description, .. }) => !description.contains("find"),
                    Err(_) => true,
                }
        };
        let in_use: Vec<PathBuf> = frozen
            .iter()
            .filter(|f| in_use(f))
            .map(|f| f.overlay.clone())
            .collect();
        for path in overlays.iter().filter(|path| !in_use.contains(path)) {
            let _ = fs::remove_file(path);
        }
        // If it can't be written now, it names files that are gone, which does no harm.
        let _ = note(&in_use);
        return Err(error);
    }
    Ok(frozen)
}

fn file_node(node: &str) -> String {
    format!("{node}-file")
}

/// Nanoseconds since 1970, in a width that a node's name has room for.
fn unique() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(0))
}

/// What a disk's device writes to.
struct Active {
    node: String,
    file: PathBuf,
    virtual_bytes: u64,
    /// What QEMU has below it, whatever its header says.
    backing: Option<PathBuf>,
}

fn active(devices: &Value, nodes: &Value, disk: usize) -> Option<Active> {
    let device = devices.as_array()?.iter().find(|device| {
        let qdev = device["qdev"].as_str().unwrap_or_default();
        qdev == format!("vd{disk}") || qdev.contains(&format!("/vd{disk}/"))
    })?;
    let inserted = &device["inserted"];
    let node = inserted["node-name"].as_str()?.to_owned();
    Some(Active {
        file: file_of(nodes, disk, &node)?,
        virtual_bytes: inserted["image"]["virtual-size"].as_u64()?,
        backing: below(nodes, disk, &node),
        node,
    })
}

/// The file of a node of a disk's chain. It is a node of its own, which `vm run` names so, and we.
fn file_of(nodes: &Value, disk: usize, node: &str) -> Option<PathBuf> {
    let name = if node == format!("disk{disk}") {
        format!("overlay-file{disk}")
    } else {
        file_node(node)
    };
    let file = nodes.as_array()?.iter().find(|n| n["node-name"] == name)?;
    Some(file["file"].as_str()?.into())
}

/// When a node of a disk's chain was added; 0 for the first.
fn age(disk: usize, name: &str) -> Option<u64> {
    let rest = name.strip_prefix(&format!("disk{disk}"))?;
    if rest.is_empty() {
        return Some(0);
    }
    u64::from_str_radix(rest.strip_prefix('-')?, 16).ok()
}

/// Has QEMU let go of overlays that a daemon added and was killed before they became part of a disk's chain. QEMU refuses that for
/// those that are.
fn drop_unused(qmp: &mut Qmp, spec: &VmSpec) -> Result<(), SnapshotError> {
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    for disk in 0..spec.disks.len() {
        for name in nodes.as_array().into_iter().flatten() {
            let name = name["node-name"].as_str().unwrap_or_default();
            if age(disk, name).is_none_or(|added| added == 0) {
                continue;
            }
            match qmp.execute("blockdev-del", json!({ "node-name": name })) {
                Ok(_) => {
                    tracing::info!(node = name, "an overlay that a killed save left is removed");
                    if let Some(file) = file_of(&nodes, disk, name) {
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

/// The file of the overlay right below `node`, as QEMU opened it: the youngest of the older ones, all of which are in the chain.
fn below(nodes: &Value, disk: usize, node: &str) -> Option<PathBuf> {
    let age = |name: &str| age(disk, name);
    let own = age(node)?;
    let names = nodes
        .as_array()?
        .iter()
        .filter_map(|n| n["node-name"].as_str());
    let older = names.filter_map(|name| Some((age(name)?, name)));
    let (_, name) = older.filter(|(time, _)| *time < own).max()?;
    file_of(nodes, disk, name)
}

/// Whether the files that a disk is built on are where the headers say. A header is put right that names a snapshot which never
/// became one, because the daemon that made it was killed.
fn check_chain(qmp: &mut Qmp, disk: usize, active: &Active) -> Result<(), SnapshotError> {
    let same = |a: &Path, b: &Path| {
        let inode = |path| {
            fs::metadata(path)
                .map(|facts| (facts.dev(), facts.ino()))
                .ok()
        };
        inode(a).is_some() && inode(a) == inode(b)
    };
    // The overlay below is still at its first place until it belongs to a snapshot.
    if let Some(backing) = active.backing.as_ref().filter(|file| file.exists()) {
        let named = chain(&active.file)
            .ok()
            .and_then(|files| files.get(1).cloned());
        // Another VM's snapshot may have got the name that this header was meant for.
        if !named.is_some_and(|named| same(&named, backing)) {
            name_backing(qmp, &active.node, backing)?;
        }
    }
    chain(&active.file).map(drop).map_err(|error| {
        SnapshotError::Impossible(format!(
            "disk {disk} builds on a snapshot that was removed; start the VM anew to save it again ({error})"
        ))
    })
}

/// Writes into the header of a node's file what it is built on.
fn name_backing(qmp: &mut Qmp, node: &str, backing: &Path) -> Result<(), SnapshotError> {
    qmp.execute(
        "change-backing-file",
        json!({ "device": node, "image-node-name": node, "backing-file": backing }),
    )?;
    Ok(())
}

/// Files that a qcow2 is built on, itself first. `-U`: a running VM may have it open.
pub(super) fn chain(disk: &Path) -> Result<Vec<PathBuf>, SnapshotError> {
    let output = Command::new("qemu-img")
        .args(["info", "-U", "--backing-chain", "--output=json"])
        .arg(disk)
        .output()
        .map_err(|source| SnapshotError::Files {
            path: disk.into(),
            source,
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

/// An empty overlay at `path`, over what `active` will be called.
fn new_overlay(active: &Active, path: &Path, backing: &Path) -> Result<(), SnapshotError> {
    let failed = |source| SnapshotError::Files {
        path: path.into(),
        source,
    };
    // In a directory that others may write to: a new file, and for nobody else to read. `qemu-img` writes into what is there.
    File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(failed)?;
    // `-u`: the backing file is where it says only when the snapshot is whole; QEMU is given the running node instead.
    let output = Command::new("qemu-img")
        .args(["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b"])
        .arg(backing)
        .arg(path)
        .arg(active.virtual_bytes.to_string())
        .output()
        .map_err(failed)?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(SnapshotError::Qemu(format!("qemu-img: {words}")));
    }
    Ok(())
}

fn disk_name(disk: usize) -> String {
    format!("disk{disk}.qcow2")
}

/// Moves frozen overlays into the draft, and says where every disk lies.
fn take_over(
    spec: &VmSpec,
    frozen: &[Frozen],
    draft: &Draft,
) -> Result<Vec<SavedDisk>, SnapshotError> {
    let mut disks = Vec::new();
    for (number, disk) in spec.disks.iter().enumerate() {
        let found = frozen.iter().find(|f| f.disk == number);
        let (at, path) = match found {
            Some(frozen) => {
                let name = PathBuf::from(disk_name(number));
                let to = draft.path().join(&name);
                keep_file(&frozen.path, &to).map_err(|source| SnapshotError::Files {
                    path: frozen.path.clone(),
                    source,
                })?;
                (to, name)
            }
            None => (disk.path.clone(), disk.path.clone()),
        };
        let facts = fs::metadata(&at).map_err(|source| SnapshotError::Files {
            path: at.clone(),
            source,
        })?;
        disks.push(SavedDisk {
            path,
            format: if found.is_some() {
                "qcow2".to_owned()
            } else {
                disk.format().driver().to_owned()
            },
            read_only: found.is_none(),
            bytes: facts.len(),
            modified_ns: modified_ns(&facts),
        });
    }
    Ok(disks)
}

/// Time of the last change of a file in nanoseconds since 1970.
pub(super) fn modified_ns(facts: &fs::Metadata) -> i128 {
    i128::from(facts.mtime()) * 1_000_000_000 + i128::from(facts.mtime_nsec())
}

/// Gives a file that is never written again a second name; on another file system, a copy.
fn keep_file(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => fs::copy(from, to).map(drop),
        other => other,
    }
}

fn record_now(directory: &VmDirectory, record: &Record) -> Record {
    VmDirectory::read_json(&directory.record()).unwrap_or_else(|_| record.clone())
}

/// Notes which temporary files go with the VM.
fn write_overlays(
    directory: &VmDirectory,
    record: &Record,
    overlays: &[PathBuf],
) -> Result<(), SnapshotError> {
    let mut record = record_now(directory, record);
    record.overlays = overlays.to_vec();
    directory
        .write_json(&directory.record(), &record)
        .map_err(|source| SnapshotError::Files {
            path: directory.record(),
            source,
        })
}
