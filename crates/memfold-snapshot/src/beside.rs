//! Saves the parts of a snapshot other than memory and disks: copies of files that QEMU's command
//! line names, such as firmware, facts about read-only media, and the features of the VM's CPU.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use memfold_vm::{Qmp, Vm, VmSpec, foreign};

use super::cpu::Cpu;
use super::draft::Draft;
use super::error::{SnapshotError, failed};
use super::file_facts::{backing_files, facts};
use super::hardware::{self, check_memory};
use super::manifest::{BackingFile, FileFacts, file_name};
use super::subject::Subject;
use super::written_files;

pub(super) struct Beside {
    pub(super) files: Vec<FileFacts>,
    pub(super) media: Vec<BackingFile>,
    pub(super) cpu: Option<Cpu>,
}

impl Beside {
    /// Saves the parts other than memory and disks into the draft, and changes the description
    /// `now` so that it names the copies. `cpu` is the VM's CPU if it is known.
    pub(super) fn take(
        vm: &Vm,
        subject: &Subject,
        qmp: &mut Qmp,
        now: &mut VmSpec,
        (draft, cpu, may_be_plain): (&Draft, Option<&Cpu>, bool),
    ) -> Result<Self, SnapshotError> {
        let draft = (draft, may_be_plain);
        let mut files = take_files(vm, subject, now, draft)?;
        files.extend(take_own_files(vm, subject, qmp, now, draft)?);
        // This check comes after the copies have got their names in the description.
        check_memory(now, qmp)?;
        Ok(Self {
            files,
            media: media(now, qmp)?,
            // QEMU is asked for each of 350 features.
            cpu: cpu.map_or_else(|| Cpu::of(qmp), |cpu| Ok(Some(cpu.clone())))?,
        })
    }
}

/// Refuses to copy `count` files unencrypted into an encrypted snapshot whose user did not accept
/// that. Nothing of them may have been copied.
fn refuse_plain(count: usize, may_be_plain: bool) -> Result<(), SnapshotError> {
    if count == 0 || may_be_plain {
        return Ok(());
    }
    Err(SnapshotError::Impossible(
        "the snapshot would hold copies of files that the VM writes (such as variables of its firmware) unencrypted; pass --plain-disks if that may be".into(),
    ))
}

/// For a VM that memfold did not start, copies the files that its command line names.
fn take_files(
    vm: &Vm,
    subject: &Subject,
    now: &mut VmSpec,
    (draft, may_be_plain): (&Draft, bool),
) -> Result<Vec<FileFacts>, SnapshotError> {
    let Some(of) = &mut now.foreign else {
        return Ok(Vec::new());
    };
    refuse_plain(of.files.len(), may_be_plain)?;
    let mut taken = Vec::new();
    // The files of a VM that memfold started are files of a snapshot on this host.
    let view = match subject.directory {
        None => foreign::View::of(vm.pid()).map_err(failed("/proc"))?,
        Some(_) => foreign::View::default(),
    };
    for (number, path) in of.files.iter_mut().enumerate() {
        let failed = failed(path.as_path());
        let name = file_name(number);
        let to = draft.file(&name)?;
        let user = subject.spec().user.as_deref();
        let user = user.filter(|_| subject.directory.is_none());
        foreign::copy_file(path, &view, &to, user).map_err(failed)?;
        taken.push(facts(to).map_err(failed)?);
        *path = name.into();
    }
    Ok(taken)
}

/// For a VM that memfold started, copies the files other than disks that it writes.
fn take_own_files(
    vm: &Vm,
    subject: &Subject,
    qmp: &mut Qmp,
    now: &mut VmSpec,
    (draft, may_be_plain): (&Draft, bool),
) -> Result<Vec<FileFacts>, SnapshotError> {
    // The command line of a VM that memfold did not start names no files of this host.
    let Some(directory) = subject.directory.as_ref().filter(|_| now.foreign.is_none()) else {
        return Ok(Vec::new());
    };
    let mut files = Vec::new();
    for number in 0..now.files.len() {
        let path = directory.own_file(number);
        let file = File::open(&path).map_err(failed(&path))?;
        files.push((path, file));
    }
    let mut disks = subject.overlays_now();
    disks.extend(now.disks.iter().map(|disk| disk.path.clone()));
    let open = written_files::of(vm.pid()).map_err(failed("/proc"))?;
    let devices = qmp.query("query-block")?;
    let all = devices.as_array().into_iter().flatten();
    let known = all.filter(|device| hardware::is_known(device, now));
    disks.extend(known.flat_map(written_files::chain).map(PathBuf::from));
    disks.extend(files.iter().map(|(path, _)| path.clone()));
    for path in written_files::foreign(open, &disks, directory.path()) {
        let file = written_files::take(vm.pid(), &path, &mut now.qemu_args, files.len())?;
        files.push((path, file));
    }
    refuse_plain(files.len(), may_be_plain)?;
    now.files.clear();
    let mut taken = Vec::new();
    for (number, (path, mut from)) in files.into_iter().enumerate() {
        let name = file_name(number);
        let mut to = draft.file(&name)?;
        io::copy(&mut from, &mut to).map_err(failed(&path))?;
        taken.push(facts(to).map_err(failed(&path))?);
        now.files.push(name.into());
    }
    Ok(taken)
}

/// Records the read-only media other than disks. A restored VM reads the media by their paths. The
/// media of a VM that memfold did not start are copied like its disks.
fn media(spec: &VmSpec, qmp: &mut Qmp) -> Result<Vec<BackingFile>, SnapshotError> {
    if spec.foreign.is_some() {
        return Ok(Vec::new());
    }
    let devices = qmp.query("query-block")?;
    let all = devices.as_array().into_iter().flatten();
    // The contents of firmware flash are also in RAM, so a later change of its file does not
    // matter.
    let media = all.filter(|device| {
        device["inserted"]["ro"] == true
            && !hardware::is_known(device, spec)
            && !hardware::is_flash(device, spec)
    });
    let files = media.flat_map(written_files::chain).map(PathBuf::from);
    backing_files(files)
}
