//! Finds out who uses a snapshot, because a used snapshot cannot be removed: processes that map its
//! RAM image or its disks, and VMs whose disks have its disks as backing files. Other snapshots
//! that need it: `built_on.rs`.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use memfold_store::{SEALED_IMAGE_PREFIX, mapped};
use memfold_vm::{DiskFormat, VmSpec};
use rustix::process::Pid;

use super::disk_chain::{chain, identity, is_built_in, known_chain};
use super::error::{SnapshotError, failed};
use super::links::{is_in, real};
use super::manifest::{Manifest, RAM, SEALED};
use super::shelf::Shelf;

/// Returns the names of the snapshots whose files are backing files of a VM's disks.
#[must_use]
pub fn below(shelf: &Shelf, spec: &VmSpec) -> Vec<String> {
    let chains = spec.disks.iter().filter_map(|disk| chain(&disk.path).ok());
    let files: Vec<PathBuf> = chains.flatten().map(|file| real(&file)).collect();
    let holds = |place: PathBuf| files.iter().any(|file| is_in(file, &place));
    let mut names = shelf.names().unwrap_or_default();
    names.retain(|name| shelf.path(name).is_ok_and(holds));
    names
}

/// Returns whether a VM's description names files of the snapshot at `place`: as disks or their
/// backing files, as kernel, initramfs or firmware.
///
/// # Errors
///
/// [`SnapshotError::Impossible`] if the header of a disk, or of a backing file, cannot be read; the
/// error names the file.
pub fn names_files_of(spec: &VmSpec, place: &Path) -> Result<bool, SnapshotError> {
    let place = real(place);
    if named_alone(spec).any(|file| file.starts_with(&place)) {
        return Ok(true);
    }
    for disk in qcow2_disks(spec) {
        if is_built_in(disk, &place)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the names of the snapshots whose files a VM's description names.
#[must_use]
pub fn named_by(shelf: &Shelf, spec: &VmSpec) -> Vec<String> {
    let files = named_files(spec);
    let root = real(shelf.root());
    let mut names = shelf.names().unwrap_or_default();
    names.retain(|name| files.iter().any(|file| file.starts_with(root.join(name))));
    names
}

/// Returns the files that a VM's description names, and the backing files of its disks as far as
/// headers can be read.
fn named_files(spec: &VmSpec) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = named_alone(spec).collect();
    for disk in qcow2_disks(spec) {
        files.extend(known_chain(disk).0.iter().map(|file| real(file)));
    }
    files
}

/// Returns the files that a VM's description names, without links.
fn named_alone(spec: &VmSpec) -> impl Iterator<Item = PathBuf> {
    let boot = [&spec.boot.kernel, &spec.boot.initrd, &spec.boot.firmware];
    let boot = boot.into_iter().flatten().chain(&spec.files);
    let disks = spec.disks.iter().map(|disk| &disk.path);
    boot.chain(disks).map(|file| real(file))
}

/// Returns the disks that have a header. A raw disk has none, whatever its guest has written there.
fn qcow2_disks(spec: &VmSpec) -> impl Iterator<Item = &Path> {
    let disks = spec.disks.iter();
    let disks = disks.filter(|disk| disk.format() == DiskFormat::Qcow2);
    disks.map(|disk| disk.path.as_path())
}

/// Returns the processes that map the RAM image of snapshot `name`: the file `ram`, or the image
/// assembled in memory.
pub fn users(shelf: &Shelf, name: &str) -> Result<Vec<Pid>, SnapshotError> {
    Ok(users_of_each(&[in_maps(shelf, name)?])?.concat())
}

/// Returns the processes whose memory maps a file of snapshot `name`: its [`users`], and processes
/// that map one of its disks (VMs that run from other snapshots that are built on this one). A
/// write to such a file would change the memory of these processes.
pub fn holders(shelf: &Shelf, name: &str) -> Result<Vec<Pid>, SnapshotError> {
    Ok(holders_of_each(shelf, &[name.to_owned()])?.concat())
}

/// Returns the [`holders`] of each of several snapshots, in the same order. The mappings of all
/// processes are read once.
pub fn holders_of_each(shelf: &Shelf, names: &[String]) -> Result<Vec<Vec<Pid>>, SnapshotError> {
    let texts = names.iter().map(|name| texts_of_holders(shelf, name));
    users_of_each(&texts.collect::<Result<Vec<_>, _>>()?)
}

/// Returns the texts that identify a snapshot's RAM image and its disks in lines of
/// `/proc/PID/maps`.
fn texts_of_holders(shelf: &Shelf, name: &str) -> Result<Vec<String>, SnapshotError> {
    let mut texts = in_maps(shelf, name)?;
    // A broken snapshot may lack any of its files.
    let disks = shelf.manifest(name).map_or(Vec::new(), |saved| saved.disks);
    let files = disks.iter().map(|disk| &disk.file.path);
    for file in files.filter(|file| file.is_relative()) {
        let path = shelf.path(name)?.join(file);
        texts.extend(text_of(&path).map_err(failed(&path))?);
    }
    Ok(texts)
}

/// Returns the processes (except this one) that have a disk in a snapshot's directory open.
pub fn disk_users(shelf: &Shelf, name: &str) -> Result<Vec<Pid>, SnapshotError> {
    let place = shelf.path(name)?;
    let entries = match fs::read_dir(&place) {
        // An interrupted pull has no directory yet, and so no disk that anybody has open.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.and_then(Iterator::collect::<io::Result<Vec<_>>>),
    };
    let entries = entries.map_err(failed(&place))?.into_iter();
    let disks = entries.filter(|entry| entry.path().extension() == Some("qcow2".as_ref()));
    let identities = disks.map(|entry| identity(&entry.path()).map_err(failed(&place)));
    let identities = identities.collect::<Result<Vec<_>, _>>()?;
    mapped::processes_with_open(&identities).map_err(failed(Path::new("/proc")))
}

/// Returns the processes whose memory maps a file.
pub(super) fn mappers(file: &Path) -> Result<Vec<Pid>, SnapshotError> {
    let text = text_of(file).map_err(failed(file))?;
    Ok(users_of_each(&[Vec::from_iter(text)])?.concat())
}

/// Returns the text that identifies a file in lines of `/proc/PID/maps`; `None` if the file does
/// not exist.
fn text_of(path: &Path) -> io::Result<Option<String>> {
    match File::open(path).and_then(|file| mapped::identity_in_maps(&file)) {
        Ok(identity) => Ok(Some(mapped::identity_text(identity))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the [`users`] of each of several snapshots, in the same order. Each snapshot is given by
/// the texts from [`in_maps`].
pub fn users_of_each(snapshots: &[Vec<String>]) -> Result<Vec<Vec<Pid>>, SnapshotError> {
    mapped::processes_with(snapshots).map_err(failed("/proc"))
}

/// Returns the manifest of the snapshot from which a process runs: of those whose image it maps,
/// the newest, because a VM of a layer maps the images of the layer's parents, too.
///
/// # Errors
///
/// A [`SnapshotError`] if the process maps the memory of an encrypted snapshot that is not in the
/// shelf or cannot be read: the caller must not take it for a process whose memory may be saved
/// unencrypted.
pub fn origin(shelf: &Shelf, pid: Pid) -> Result<Option<Manifest>, SnapshotError> {
    let maps = format!("/proc/{}/maps", pid.as_raw_nonzero());
    let maps = fs::read_to_string(&maps).map_err(failed(Path::new(&maps)))?;
    let names = shelf.names().map_err(failed(shelf.root()))?.into_iter();
    let mapped = names.filter_map(|name| {
        let texts = in_maps(shelf, &name).ok()?;
        let is_mapped = texts.iter().any(|text| maps.contains(text));
        is_mapped.then_some((name, texts))
    });
    let (mut manifests, mut known) = (Vec::new(), Vec::new());
    for (name, texts) in mapped {
        match shelf.manifest(&name) {
            Ok(manifest) => manifests.push(manifest),
            Err(error) if shelf.path(&name)?.join(SEALED).exists() => return Err(error),
            // A broken snapshot cannot be a parent.
            Err(_) => continue,
        }
        known.extend(texts);
    }
    let sealed = format!("/memfd:{SEALED_IMAGE_PREFIX}");
    let mut sealed = maps.lines().filter(|line| line.contains(&sealed));
    if sealed.any(|line| !known.iter().any(|text| line.contains(text))) {
        return Err(SnapshotError::Impossible(format!(
            "the VM runs from an encrypted snapshot that is not in {} or cannot be read, and its memory would be saved unencrypted; save it with 'snapshot save --encrypt'",
            shelf.root().display()
        )));
    }
    let newest = manifests.into_iter();
    Ok(newest.max_by_key(|manifest| (manifest.created_s, manifest.depth())))
}

/// Returns the texts that identify a snapshot's RAM image, and its image assembled in memory, in
/// lines of `/proc/PID/maps`.
pub fn in_maps(shelf: &Shelf, name: &str) -> Result<Vec<String>, SnapshotError> {
    let path = shelf.path(name)?.join(RAM);
    let mut texts = Vec::from_iter(text_of(&path).map_err(failed(&path))?);
    // The manifest that says whether the snapshot is encrypted may be unreadable.
    for is_encrypted in [false, true] {
        match shelf.laid_out_name(name, is_encrypted) {
            Ok(laid_out) => texts.push(format!("/memfd:{laid_out} ")),
            // Without the checksums no image can be assembled. VMs that run from an image that was
            // assembled before need only the snapshot's disks.
            Err(SnapshotError::Files { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::os::fd::AsFd as _;
    use std::process::{Command, Stdio};

    use memfold_store::StoreIdentity;
    use memfold_sys::region::Mapping;
    use memfold_units::{ByteSize, PAGE_SIZE};
    use memfold_vm::DiskSpec;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::image::SUMS;

    /// Shell script that maps a file of an overlay file system whose layers are on two others. The
    /// mounts exist only for this process.
    const MAP: &str = "set -e; cd $1; mount -t tmpfs none .; cd $1; mkdir a b m; mount -t tmpfs none a; mount -t tmpfs none b; \
        mkdir a/l b/u b/w; head -c 4096 /dev/zero > a/l/ram; mount -t overlay none -o lowerdir=a/l,upperdir=b/u,workdir=b/w m; \
        exec python3 -c 'import mmap, time; file = open(\"m/ram\"); \
        view = mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ); print(\"mapped\", flush=True); time.sleep(600)'";

    #[test]
    fn a_vms_disk_may_need_a_snapshot_if_its_header_cannot_be_read_and_does_not_if_it_is_missing() {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("own.qcow2");
        let place = directory.path().join("warm");
        let mut spec = VmSpec::new("web", ByteSize::mib(64));
        spec.disks = vec![DiskSpec::new(&disk)];
        spec.disks[0].format = Some(DiskFormat::Qcow2);
        assert!(!names_files_of(&spec, &place).unwrap());
        fs::write(&disk, "no header").unwrap();
        let told = names_files_of(&spec, &place).unwrap_err().to_string();
        assert!(told.contains(disk.to_str().unwrap()), "{told}");
        // Whatever the header says, the disk itself is there.
        assert!(names_files_of(&spec, directory.path()).unwrap());
    }

    #[test]
    fn a_process_that_maps_a_damaged_encrypted_snapshot_has_no_plain_origin() {
        let directory = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(directory.path());
        let place = directory.path().join("sealed");
        fs::create_dir(&place).unwrap();
        fs::write(place.join(SUMS), "").unwrap();
        // The memory of a VM that runs from the snapshot.
        let map = |is_encrypted| {
            let name = shelf.laid_out_name("sealed", is_encrypted).unwrap();
            let image = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&image, PAGE_SIZE).unwrap();
            let memory = Mapping::anonymous(1, true).unwrap();
            memory.area().map_file(image.as_fd(), 0).unwrap();
            memory
        };
        let me = rustix::process::getpid();
        // A daemon of before has given the image no name of its own.
        let memory = map(false);
        assert_eq!(origin(&shelf, me).unwrap(), None);
        fs::write(place.join(SEALED), "").unwrap();
        let told = origin(&shelf, me).unwrap_err().to_string();
        assert!(told.contains("sealed"), "{told}");
        drop(memory);
        assert_eq!(origin(&shelf, me).unwrap(), None);
        // Now the snapshot can be gone, or in another directory.
        let _memory = map(true);
        fs::remove_dir_all(&place).unwrap();
        let told = origin(&shelf, me).unwrap_err().to_string();
        assert!(told.contains("save --encrypt"), "{told}");
    }

    #[test]
    fn users_are_found_on_file_systems_whose_mappings_show_another_device_number() {
        let place = tempfile::tempdir().unwrap();
        let mut unshare = Command::new("unshare");
        unshare
            .args(["-m", "sh", "-c", MAP, "sh"])
            .arg(place.path());
        let mut child = unshare.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        said.read_line(&mut line).unwrap();
        if line != "mapped\n" {
            child.wait().unwrap();
            memfold_testkit::skip!("no overlay file system, or no python3");
        }
        // The file as this process sees it, which has none of the mounts.
        let inside = place.path().strip_prefix("/").unwrap();
        let root = PathBuf::from(format!("/proc/{}/root", child.id()));
        let path = root.join(inside).join("m/ram");
        let by_stat = StoreIdentity::from(&fs::metadata(&path).unwrap());
        let maps = fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap();
        let found = mappers(&path);
        let pid = Pid::from_child(&child);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!maps.contains(&mapped::identity_text(by_stat)), "{maps}");
        assert_eq!(found.unwrap(), [pid]);
    }
}
