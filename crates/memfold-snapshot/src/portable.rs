//! Takes a snapshot apart into files that can be copied to another host, and puts the snapshot
//! together there. The drawing shows the names and paths of the files on the first host, on the
//! way, and on the second host.
//!
//! ```text
//!   here          ram, ram.sums, ..., disk0.qcow2 --backing--> /images/debian.img      files in the snapshot, and outside it
//!   on the way    ram, ram.sums, ..., disk0.qcow2,              base0                  all have plain names (members)
//!   there         SHELF/NAME/disk0.qcow2          --backing--> SHELF/NAME/base0        paths in manifest and headers are set anew
//! ```
//! A snapshot that comes from another host must not make this host use other files of its own.
//! Therefore each file that the snapshot's manifest or the header of a disk names must belong to
//! the snapshot.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use memfold_host::helper;
use memfold_vm::qcow2::{self, NamedBacking};
use memfold_vm::{CloudInit, DiskFormat, DiskSpec};

use super::disk_chain::header;
use super::error::{SnapshotError, failed};
use super::file_facts::{backing_file, facts_at};
use super::manifest::{Manifest, SavedDisk, file_name};
use super::restore;
use super::shelf::Shelf;
use super::working_set;

/// Time limit for `qemu-img` to change a header.
const REBASE_LIMIT: Duration = Duration::from_secs(60);

/// A file that a snapshot needs, and that is copied to another host with the snapshot.
#[derive(Debug)]
pub struct Member {
    /// Name of the file while it is copied: its name in the snapshot, or `baseN` for a file from
    /// outside the snapshot.
    pub name: String,
    /// Path of the file on this host, if the file is outside the snapshot's directory.
    pub origin: Option<PathBuf>,
    /// The file, opened for reading, which stays readable after the snapshot was removed.
    pub file: File,
    /// Length of the file in bytes.
    pub bytes: u64,
}

/// Returns why a snapshot cannot leave its host; `None` if it can.
fn obstacle(manifest: &Manifest) -> Option<String> {
    for file in manifest.disks.iter().flat_map(SavedDisk::files) {
        if file.device.is_some() {
            return Some(format!(
                "its disk {} is a block device; only disks in files can be pushed",
                file.path.display()
            ));
        }
    }
    if let Some(segment) = manifest.spec.segments.first() {
        return Some(format!(
            "its VM maps segment '{}', which lies outside the snapshot; detach the segment before the save",
            segment.name
        ));
    }
    if let Some(medium) = manifest.media.first() {
        return Some(format!(
            "its VM has the medium {} inserted; eject the medium before the save",
            medium.path.display()
        ));
    }
    None
}

/// Checks that all files that a snapshot needs are unchanged, and opens them.
///
/// # Errors
///
/// [`SnapshotError::Impossible`] if the snapshot cannot be copied to another host, and the errors
/// of a restore if a file was changed.
pub fn members(shelf: &Shelf, manifest: &Manifest) -> Result<Vec<Member>, SnapshotError> {
    if let Some(why) = obstacle(manifest) {
        return Err(SnapshotError::Impossible(format!(
            "snapshot '{}' cannot be pushed: {why}",
            manifest.name
        )));
    }
    // The same checks as before a restore: disks and copied files are as they were saved.
    restore::spec(shelf, manifest, &manifest.vm)?;
    let place = shelf.path(&manifest.name)?;
    let open = |name: String, path: PathBuf, is_outside: bool| {
        let file = File::open(&path).map_err(failed(&path))?;
        let bytes = file.metadata().map_err(failed(&path))?.len();
        Ok(Member {
            name,
            origin: is_outside.then_some(path),
            file,
            bytes,
        })
    };
    let own_disks = manifest.disks.iter().filter(|d| d.file.path.is_relative());
    let mut inside: Vec<String> = manifest
        .parts()
        .iter()
        .map(|(part, ..)| (*part).to_owned())
        .collect();
    inside.extend(own_disks.map(|disk| disk.file.path.to_string_lossy().into_owned()));
    inside.extend((0..manifest.files.len()).map(file_name));
    if place.join(working_set::FILE).exists() {
        inside.push(working_set::FILE.to_owned());
    }
    let inside = inside.into_iter().map(|name| {
        let path = place.join(&name);
        open(name, path, false)
    });
    let outside = manifest.outside().into_iter().enumerate();
    let outside = outside.map(|(number, path)| open(base_name(number), path, true));
    inside.chain(outside).collect()
}

/// Returns the name under which file `number` from outside a snapshot is copied to another host:
/// `baseN`.
#[must_use]
pub fn base_name(number: usize) -> String {
    format!("base{number}")
}

/// Returns whether a file that comes with a snapshot from another host may have this name: one of
/// the plain names that snapshots use.
#[must_use]
pub fn is_member_name(manifest: &Manifest, name: &str) -> bool {
    let numbered = |prefix: &str, suffix: &str| {
        let number = name
            .strip_prefix(prefix)
            .and_then(|rest| rest.strip_suffix(suffix));
        number.is_some_and(|number| {
            !number.is_empty() && number.len() < 6 && number.bytes().all(|b| b.is_ascii_digit())
        })
    };
    manifest.parts().iter().any(|(part, ..)| *part == name)
        || name == working_set::FILE
        || numbered("disk", ".qcow2")
        || numbered("file", "")
        || numbered("base", "")
}

/// A file of a disk's chain while the snapshot arrives: its name in the snapshot, and its format.
pub type Layer = (String, DiskFormat);

/// A manifest that is being adapted to the files in a directory.
struct Arrival<'a> {
    /// Directory in which the files lie now.
    draft: &'a Path,
    /// Directory in which they will lie.
    place: &'a Path,
    /// Names of the members that came from outside, by their paths on the host of the save.
    bases: &'a BTreeMap<PathBuf, String>,
    name: &'a str,
}

/// Adapts a manifest from another host to the files in the directory `draft`, which will become the
/// directory `place`. Sets the paths in the manifest, and the backing files in the headers of
/// disks. `bases` has the names of the files from outside the snapshot, by their paths on the other
/// host. `name` and `domain` are the snapshot's name and trust domain on this host.
///
/// # Errors
///
/// [`SnapshotError::Broken`] if the manifest or the header of a disk names a file that is no
/// member.
pub fn adapt(
    manifest: &mut Manifest,
    (draft, place): (&Path, &Path),
    bases: &BTreeMap<PathBuf, String>,
    (name, domain): (&str, Option<&str>),
) -> Result<(), SnapshotError> {
    let arrival = Arrival {
        draft,
        place,
        bases,
        name,
    };
    arrival.set_paths(manifest, domain)?;
    // All headers are set before any file's time is recorded: disks may have a base in common.
    let spec = &mut manifest.spec;
    for (saved, disk) in manifest.disks.iter_mut().zip(&mut spec.disks) {
        arrival.disk(saved, disk)?;
        if disk.format == Some(DiskFormat::Qcow2) {
            let chain: Vec<PathBuf> = saved.files().map(|file| file.path.clone()).collect();
            arrival.join(&chain)?;
        }
    }
    for saved in &mut manifest.disks {
        for file in std::iter::once(&mut saved.file).chain(&mut saved.backing) {
            *file = backing_file(&arrival.now(&file.path), &file.path)?;
        }
        if saved.file.path.is_relative() {
            // The header was changed.
            let facts = facts_at(&arrival.draft.join(&saved.file.path))?;
            saved.xxh3_128 = Some(facts.xxh3_128);
        }
    }
    Ok(())
}

/// Adapts a manifest as [`adapt`] does, while most of its files are still being fetched: only of
/// each disk's files, the beginning is there. Files are not changed. Returns the chain of each disk
/// that VMs write to, from the top; `None` for other disks.
///
/// # Errors
///
/// As of [`adapt`], and [`SnapshotError::Impossible`] if a disk needs `qemu-img` to be understood.
pub fn adapt_arriving(
    manifest: &mut Manifest,
    (draft, place): (&Path, &Path),
    bases: &BTreeMap<PathBuf, String>,
    (name, domain): (&str, Option<&str>),
) -> Result<Vec<Option<Vec<Layer>>>, SnapshotError> {
    let arrival = Arrival {
        draft,
        place,
        bases,
        name,
    };
    let before = manifest.clone();
    arrival.set_paths(manifest, domain)?;
    let spec = &mut manifest.spec;
    let mut chains = Vec::new();
    for ((saved, disk), was) in (manifest.disks.iter_mut())
        .zip(&mut spec.disks)
        .zip(&before.disks)
    {
        arrival.disk(saved, disk)?;
        let chain = (!saved.read_only).then(|| arrival.chain(was));
        if saved.read_only && saved.format == "qcow2" {
            arrival.check_alone(was)?;
        }
        chains.push(chain.transpose()?);
    }
    Ok(chains)
}

impl Arrival<'_> {
    /// Sets the name, the trust domain and the paths in a manifest, except those of disks.
    fn set_paths(
        &self,
        manifest: &mut Manifest,
        domain: Option<&str>,
    ) -> Result<(), SnapshotError> {
        if let Some(why) = obstacle(manifest).or_else(|| strange(manifest).map(str::to_owned)) {
            return Err(self.broken(why));
        }
        self.name.clone_into(&mut manifest.name);
        manifest.domain = domain.map(str::to_owned);
        manifest.spec.domain = domain.map(str::to_owned);
        (manifest.of_boot, manifest.fork) = (None, false);
        // Its files arrive with the snapshot; a snapshot of its name here may be another.
        manifest.parent = None;
        let boot = &mut manifest.spec.boot;
        for path in [&mut boot.kernel, &mut boot.initrd, &mut boot.firmware]
            .into_iter()
            .flatten()
        {
            if path.is_relative() {
                return Err(self.broken(format!("its manifest names {}", path.display())));
            }
            *path = self.moved(path)?;
        }
        for source in manifest
            .references
            .iter_mut()
            .flat_map(|refs| &mut refs.sources)
        {
            *source = self.moved(source)?;
        }
        let spec = &mut manifest.spec;
        let of_foreign = spec.foreign.iter_mut().flat_map(|of| &mut of.files);
        for file in of_foreign.chain(&mut spec.files) {
            if file.is_absolute() {
                return Err(self.broken(format!("its manifest names {}", file.display())));
            }
            *file = self.moved(file)?;
        }
        if manifest.disks.len() != spec.disks.len() {
            return Err(self.broken("its VM has other disks than were saved".into()));
        }
        Ok(())
    }

    /// Refuses a qcow2 image with a backing file, which QEMU would open itself: the image's header
    /// could name any file of this host.
    fn check_alone(&self, was: &SavedDisk) -> Result<(), SnapshotError> {
        let name = match self.bases.get(&was.file.path) {
            Some(name) => Path::new(name),
            None => was.file.path.as_path(),
        };
        match qcow2::backing(&self.draft.join(name)) {
            Some(NamedBacking::None) if was.backing.is_empty() => Ok(()),
            _ => Err(SnapshotError::Impossible(format!(
                "snapshot '{}' cannot be used while it is being fetched, because its read-only disk {} has a backing file or a header that only qemu-img can read; pull it without --stream",
                self.name,
                name.display()
            ))),
        }
    }

    /// Returns the chain of a disk. The headers of its files tell their formats. What they name is
    /// not used: the manifest names the files. `was`: the disk in the manifest of the other host.
    fn chain(&self, was: &SavedDisk) -> Result<Vec<Layer>, SnapshotError> {
        let (mut chain, mut format) = (Vec::new(), Some(DiskFormat::Qcow2));
        for file in was.files() {
            let bad = |why: &str| Err(self.broken(format!("disk {} {why}", file.path.display())));
            let name = match self.bases.get(&file.path) {
                Some(name) => Some(name.as_str()),
                None => file.path.to_str().filter(|name| !name.contains('/')),
            };
            let (Some(name), Some(of_file)) = (name, format) else {
                return bad("is not part of a chain");
            };
            chain.push((name.to_owned(), of_file));
            if of_file == DiskFormat::Raw {
                format = None;
                continue;
            }
            format = match qcow2::backing(&self.draft.join(name)) {
                Some(NamedBacking::None) => None,
                Some(NamedBacking::Raw(_)) => Some(DiskFormat::Raw),
                Some(NamedBacking::Qcow2(_)) => Some(DiskFormat::Qcow2),
                None => {
                    return Err(SnapshotError::Impossible(format!(
                        "snapshot '{}' cannot be used while it is being fetched, because only qemu-img can read the header of its disk {name}; pull it without --stream",
                        self.name
                    )));
                }
            };
        }
        if format.is_some() {
            return Err(self.broken("its manifest lacks a backing file of a disk".into()));
        }
        Ok(chain)
    }
}

/// Returns why the description of a VM from elsewhere is refused; `None` if it is not. These texts
/// become parts of QEMU's options.
fn strange(manifest: &Manifest) -> Option<&'static str> {
    let spec = &manifest.spec;
    let is_word = |text: &str, more: &str| {
        let is_fine = |c: char| c.is_ascii_alphanumeric() || more.contains(c);
        !text.is_empty() && text.len() < 1024 && text.chars().all(is_fine)
    };
    let has_name = |text: &str| memfold_vm::check_name("VM", text).is_ok();
    // A machine has switches, such as `hpet=off`. Other values could name files.
    let mut machine = manifest.machine.split(',');
    let is_machine = machine.next().is_some_and(|name| is_word(name, ".-_"));
    let is_switch = |part: &str| {
        let value = part.split_once('=').filter(|(key, _)| is_word(key, "-_"));
        value.is_some_and(|(_, value)| ["auto", "off", "on"].contains(&value))
    };
    if !is_machine || !machine.all(is_switch) || !is_word(&manifest.accel, "") {
        return Some("its machine type is not a name with switches");
    }
    if spec
        .cpu
        .as_ref()
        .is_some_and(|cpu| !is_word(cpu, ".-_,=+:"))
    {
        return Some("its CPU model is not a name");
    }
    if !has_name(&manifest.vm) || !has_name(&spec.name) {
        return Some("its VM has no valid name");
    }
    if spec.swap.is_some() {
        return Some("its VM has a swap disk, which no snapshot holds");
    }
    // A saved VM has the texts themselves. Files would be read on this host, as root.
    let names_files =
        |of: &CloudInit| of.seed.is_none() || of.user_data.is_some() || !of.ssh_keys.is_empty();
    if spec.cloud_init.as_ref().is_some_and(names_files) {
        return Some("its data for cloud-init are in files outside the snapshot");
    }
    let user = spec.user.as_ref();
    if user.is_some_and(|user| !is_word(user, ".-_")) {
        return Some("its VM's user is not a name");
    }
    None
}

impl Arrival<'_> {
    fn broken(&self, why: String) -> SnapshotError {
        SnapshotError::Broken {
            name: self.name.to_owned(),
            why,
        }
    }

    /// Sets the paths of a disk. A snapshot has two kinds of disks: its own qcow2 files, and images
    /// that the VM could only read.
    fn disk(&self, saved: &mut SavedDisk, disk: &mut DiskSpec) -> Result<(), SnapshotError> {
        let format = match saved.format.as_str() {
            "raw" => DiskFormat::Raw,
            "qcow2" => DiskFormat::Qcow2,
            other => return Err(self.broken(format!("a disk has the format '{other}'"))),
        };
        let is_own = saved.file.path.is_relative();
        if is_own && format == DiskFormat::Raw || !is_own && !saved.read_only {
            return Err(self.broken("a disk is of a kind that no snapshot has".into()));
        }
        saved.file.path = self.moved(&saved.file.path)?;
        // A relative path stands for a file in the snapshot's directory.
        disk.path = self.place.join(&saved.file.path);
        (disk.format, disk.read_only) = (Some(format), saved.read_only);
        // It would name a socket of this host.
        disk.streamed = None;
        for file in &mut saved.backing {
            file.path = self.moved(&file.path)?;
        }
        if format == DiskFormat::Raw && !saved.backing.is_empty() {
            return Err(self.broken("a raw disk has a backing file".into()));
        }
        Ok(())
    }

    /// Returns the path on this host of a file that the manifest names. Files in the snapshot keep
    /// their names.
    fn moved(&self, path: &Path) -> Result<PathBuf, SnapshotError> {
        let unknown = || {
            self.broken(format!(
                "its manifest names {}, which is not among its files",
                path.display()
            ))
        };
        let name = if path.is_absolute() {
            self.bases.get(path).ok_or_else(unknown)?
        } else {
            let name = path.to_str().filter(|name| !name.contains('/'));
            let name = name.filter(|name| self.draft.join(name).is_file());
            return name.map(PathBuf::from).ok_or_else(unknown);
        };
        Ok(self.place.join(name))
    }

    /// Returns where a file lies now.
    fn now(&self, path: &Path) -> PathBuf {
        let name = path.strip_prefix(self.place).unwrap_or(path);
        self.draft.join(name)
    }

    /// Makes each file of a disk's chain the backing file of the one before it, and checks that the
    /// last one has none. A qcow2 header could otherwise name any file of this host.
    fn join(&self, chain: &[PathBuf]) -> Result<(), SnapshotError> {
        for (number, path) in chain.iter().enumerate() {
            let file = self.now(path);
            let image = header(&file).map_err(failed(path))?;
            let bad = |why: &str| Err(self.broken(format!("disk {} {why}", path.display())));
            let of_format = &image["format-specific"]["data"];
            if image.is_null() {
                return bad("has no header of a qcow2 image");
            }
            if !of_format["data-file"].is_null() || image["encrypted"] == true {
                return bad("has an external data file, or is encrypted");
            }
            let backing = image["backing-filename"].as_str();
            match (backing, chain.get(number + 1)) {
                (None, None) => return Ok(()),
                (None, Some(_)) => return bad("has no backing file, but its manifest names one"),
                (Some(_), None) => {
                    return bad("has a backing file that its manifest does not name");
                }
                (Some(_), Some(next)) => {
                    let format = image["backing-filename-format"]
                        .as_str()
                        .unwrap_or_default();
                    let next = if next.is_absolute() {
                        next.clone()
                    } else {
                        self.place.join(next)
                    };
                    let is_last = number + 2 == chain.len();
                    if format != "qcow2" && !(format == "raw" && is_last) {
                        return bad("has a backing file of an unknown format");
                    }
                    // Several disks may be built on one file, whose times must not change again.
                    if backing.map(Path::new) != Some(next.as_path()) {
                        rebase(&file, &next, format)?;
                    }
                    if format == "raw" {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }
}

/// Makes `backing` the backing file in the header of a qcow2 file. Neither file's data is read.
fn rebase(file: &Path, backing: &Path, format: &str) -> Result<(), SnapshotError> {
    let mut command = Command::new("qemu-img");
    command
        .args(["rebase", "-u", "-f", "qcow2", "-F", format, "-b"])
        .arg(backing)
        .arg(file)
        .stdin(Stdio::null());
    let output = helper::output(&mut command, REBASE_LIMIT).map_err(failed(file))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(SnapshotError::Qemu(format!("qemu-img: {}", words.trim())))
}
