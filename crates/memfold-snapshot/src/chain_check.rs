//! Checks, before a VM is saved, that each disk's overlay and its backing files are in order: QEMU
//! has those files open that the qcow2 headers name, and all of them still exist.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use memfold_store::StoreIdentity;
use memfold_vm::qcow2::{self, NamedBacking};
use memfold_vm::{Qmp, VmSpec};
use rustix::process::Pid;

use super::disk_chain::{Active, Chains, chain, header, identity};
use super::draft::Draft;
use super::error::{SnapshotError, failed};
use super::manifest::{MANIFEST, Manifest, disk_name, read_manifest};

/// Checks that a disk's overlay was not removed.
pub(super) fn check_exists(disk: usize, active: &Active) -> Result<(), SnapshotError> {
    if !active.file.exists() {
        return Err(SnapshotError::Impossible(format!(
            "disk {disk}: its temporary overlay {} was removed while the VM runs (systemd-tmpfiles does that in /var/tmp unless \
             /usr/lib/tmpfiles.d/memfold.conf is there). The VM runs on, but what it wrote is lost when it ends: copy what matters out of the guest",
            active.file.display()
        )));
    }
    Ok(())
}

/// Checks that a disk's backing files exist at the paths in the headers.
pub(super) fn check_chain(disk: usize, active: &Active) -> Result<(), SnapshotError> {
    let same = |a: &Path, b: &Path| identity(a).is_ok_and(|a| identity(b).is_ok_and(|b| a == b));
    // The overlay below stays at its first place until it becomes part of a snapshot.
    let below = active.below.as_ref().map(|below| &below.file);
    if let Some(backing) = below.filter(|file| file.exists()) {
        let named = chain(&active.file).ok();
        let named = named.and_then(|files| files.get(1).cloned());
        // The overlay below must belong to a snapshot, otherwise it would have been merged. A new
        // snapshot must not build on a file that is removed with the VM.
        if !named.is_some_and(|named| named != *backing && same(&named, backing)) {
            return Err(SnapshotError::Impossible(format!(
                "disk {disk} builds on {}, an overlay of a failed save, which has a second name and so cannot be merged: remove drafts of that save ('.NAME.draft') from other directories of snapshots, or restart the VM",
                backing.display()
            )));
        }
    }
    chain(&active.file).map(drop).map_err(|error| {
        SnapshotError::Impossible(format!(
            "disk {disk} builds on a snapshot that was removed; restart the VM to save it again ({error})"
        ))
    })
}

/// Returns the identity of every file that QEMU has open.
pub(super) fn open_files(pid: Pid) -> Result<HashSet<StoreIdentity>, SnapshotError> {
    let place = PathBuf::from(format!("/proc/{}/fd", pid.as_raw_nonzero()));
    let entries = fs::read_dir(&place).map_err(failed(&place))?.flatten();
    let files = entries.map(|entry| identity(&entry.path()));
    Ok(files.flatten().collect())
}

/// Checks that the paths of a VM's backing files still lead to the files that QEMU has open. Files
/// in the snapshot directory are not checked, because they may be copies.
pub(super) fn check_files(pid: Pid, qmp: &mut Qmp, spec: &VmSpec) -> Result<(), SnapshotError> {
    let open = open_files(pid)?;
    let chains = Chains::read(qmp)?;
    for (number, disk) in spec.disks.iter().enumerate() {
        // QEMU copies the disk that it has open, whatever file has the disk's path now.
        if spec.foreign.is_some() && !disk.snapshot {
            continue;
        }
        let files = match chains.active(spec, number) {
            Some(active) if disk.snapshot => chain(&active.file)?.into_iter().skip(1).collect(),
            _ => vec![disk.path.clone()],
        };
        for file in files {
            let ours = file.with_file_name(MANIFEST).exists();
            // A path that leads to no file cannot have been replaced.
            if !ours && identity(&file).is_ok_and(|now| !open.contains(&now)) {
                return Err(SnapshotError::Impossible(format!(
                    "{} was replaced after the VM's start: the VM's memory would not match the new file; restart the VM to save it",
                    file.display()
                )));
            }
        }
    }
    Ok(())
}

/// Checks the header of an overlay that a QEMU without root's rights writes. This QEMU could write
/// any path into the header, and a later reader would open that path as root. The overlay must be a
/// regular file, and its header must name the disk's own file or a file of a snapshot of the VM's
/// trust domain.
pub(super) fn check_header(
    overlay: &Path,
    spec: &VmSpec,
    disk: usize,
    draft: &Draft,
) -> Result<(), SnapshotError> {
    let refused = |why: String| {
        SnapshotError::Impossible(format!(
            "{} {why}, perhaps because the guest controls QEMU; the VM is not saved",
            overlay.display()
        ))
    };
    let facts = fs::symlink_metadata(overlay).map_err(failed(overlay))?;
    if !facts.is_file() {
        return Err(refused("is not a regular file".into()));
    }
    // Starting `qemu-img` takes longer than a fork's pause.
    let plain = match qcow2::backing(overlay) {
        Some(NamedBacking::Raw(file)) => Some((file, "raw")),
        Some(NamedBacking::Qcow2(file)) => Some((file, "qcow2")),
        Some(NamedBacking::None) | None => None,
    };
    if plain.is_some_and(|(file, format)| is_allowed(&file, Some(format), spec, disk, draft)) {
        return Ok(());
    }
    let image = header(overlay).map_err(failed(overlay))?;
    if image.is_null() {
        return Err(refused("has no header of a qcow2 image".into()));
    }
    let of_format = &image["format-specific"]["data"];
    if !of_format["data-file"].is_null() || image["encrypted"] == true {
        return Err(refused("has an external data file, or is encrypted".into()));
    }
    let Some(backing) = image["backing-filename"].as_str().map(Path::new) else {
        return Err(refused("has no backing file".into()));
    };
    let format = image["backing-filename-format"].as_str();
    if is_allowed(backing, format, spec, disk, draft) {
        return Ok(());
    }
    let (file, format) = (backing.display(), format.unwrap_or("no format"));
    Err(refused(format!("has the backing file {file} ({format})")))
}

/// Checks the header of a copy of a disk, which QEMU has written. A copy is whole, so its header
/// must name no other file, which a later reader would open as root.
pub(super) fn check_alone(copy: &Path) -> Result<(), SnapshotError> {
    let is_alone = if let Some(backing) = qcow2::backing(copy) {
        backing == NamedBacking::None
    } else {
        let image = header(copy).map_err(failed(copy))?;
        let has_data_file = !image["format-specific"]["data"]["data-file"].is_null();
        !image.is_null() && image["backing-filename"].is_null() && !has_data_file
    };
    if is_alone {
        return Ok(());
    }
    Err(SnapshotError::Impossible(format!(
        "{} is no qcow2 image that stands alone, perhaps because the guest controls QEMU; the VM is not saved",
        copy.display()
    )))
}

/// Returns whether an overlay of a disk may have this backing file in this format.
fn is_allowed(
    backing: &Path,
    format: Option<&str>,
    spec: &VmSpec,
    disk: usize,
    draft: &Draft,
) -> bool {
    let own = spec.disks.get(disk);
    let is_own =
        own.is_some_and(|own| own.path == backing && Some(own.format().driver()) == format);
    is_own || format == Some("qcow2") && is_of_its_domain(backing, spec, disk, draft)
}

/// Returns whether a file is this disk's file in another snapshot of this VM or its trust domain.
/// Snapshots of other domains must stay inaccessible to the guest.
fn is_of_its_domain(backing: &Path, spec: &VmSpec, disk: usize, draft: &Draft) -> bool {
    let name = backing.parent().and_then(Path::file_name);
    let Some(name) = name.and_then(|name| name.to_str()) else {
        return false;
    };
    let home = draft.place.with_file_name(name);
    let place = home.join(disk_name(disk));
    // The paths are compared as text, because `==` treats `a/./b` and `a/b` as equal.
    if memfold_vm::check_name("snapshot", name).is_err() || backing.as_os_str() != place.as_os_str()
    {
        return false;
    }
    let is_own = |of: Manifest| spec.domain.is_some() || of.vm == spec.name;
    read_manifest(&home, name).is_ok_and(|of| of.domain == spec.domain && is_own(of))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use memfold_units::ByteSize;

    use super::*;
    use crate::file_facts::facts;
    use crate::image::SUMS;
    use crate::manifest::tests::manifest;
    use crate::manifest::{DEVICES, RAM};
    use crate::shelf::Shelf;
    use memfold_vm::DiskSpec;

    /// Saves a snapshot of a VM with one disk. Returns the path of the disk's file.
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
        let disk = draft.place.join(disk_name(0));
        draft.commit(&manifest).unwrap();
        disk
    }

    /// Creates an image with these options of `qemu-img create`.
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
    fn a_copy_of_a_disk_whose_header_names_another_file_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        let copy = path("disk0.qcow2");
        let is_refused = || {
            let refusal = check_alone(&copy).unwrap_err().to_string();
            assert!(refusal.contains("stands alone"), "{refusal}");
        };
        image(&copy, &[]);
        check_alone(&copy).unwrap();
        // Only `qemu-img` can read this header.
        image(&copy, &["-o", "extended_l2=on"]);
        check_alone(&copy).unwrap();
        fs::write(path("secret"), vec![0; 1 << 20]).unwrap();
        let secret = path("secret").display().to_string();
        for format in ["raw", "qcow2"] {
            image(&copy, &["-F", format, "-b", &secret]);
            is_refused();
        }
        image(&copy, &["-o", "extended_l2=on", "-F", "raw", "-b", &secret]);
        is_refused();
        let data = path("data").display().to_string();
        image(&copy, &["-o", &format!("data_file={data}")]);
        is_refused();
        fs::write(&copy, vec![7; 1 << 20]).unwrap();
        is_refused();
    }

    #[test]
    fn a_save_is_refused_if_an_overlay_was_replaced_by_a_file_with_another_backing_file() {
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
        // A VM without a domain shares with no other VM.
        let loner = VmSpec {
            domain: None,
            ..spec.clone()
        };
        refused(&loner, "has the backing file");
        let root = path("shelf");
        for (backing, format) in [
            (others, "qcow2"),
            (PathBuf::from("/etc/shadow"), "raw"),
            // The guest could have written such a header, which names files of the host.
            (path("disk"), "qcow2"),
            (ours.clone(), "raw"),
            (ours.with_file_name(RAM), "qcow2"),
            (root.join("ours/../others").join(disk_name(0)), "qcow2"),
            (root.join("./ours").join(disk_name(0)), "qcow2"),
            (root.join("ghost").join(disk_name(0)), "qcow2"),
            (root.join(".new.draft").join(disk_name(0)), "qcow2"),
        ] {
            on(&backing, format);
            refused(&spec, "has the backing file");
        }
        image(&overlay, &[]);
        refused(&spec, "has no backing file");
        let data = format!("data_file={}", path("data").display());
        image(&overlay, &["-o", &data]);
        refused(&spec, "external data file");
        fs::write(&overlay, b"no header").unwrap();
        refused(&spec, "no header of a qcow2 image");
        fs::remove_file(&overlay).unwrap();
        std::os::unix::fs::symlink(&ours, &overlay).unwrap();
        refused(&spec, "not a regular file");
    }
}
