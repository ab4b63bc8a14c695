//! Saves a VM's memory, devices and disks as of one instant.
//!
//! ```text
//!   1. overlays        QEMU opens a new overlay for each temporary overlay, unused yet; files for copies of other disks
//!                      --keep hot: pages that the guest has cached are searched in the disks' files (candidates)
//!   -- the VM is stopped --
//!   2. device state    QEMU writes it to a descriptor from memfold (xen-save-devices-state: any machine, no RAM)
//!   3. RAM image       from the page tables of QEMU's process; live: RAM is examined and protected, small blocks are copied;
//!                      pages that a disk's file contains are not written (refer): the file cannot change while the VM is stopped
//!   4. disks           disks written in place: from now on, old data are saved before they are overwritten (disk_copy);
//!                      the temporary overlays are frozen under the new ones, all in one transaction
//!   -- the VM resumes --
//!   5. live: the RAM image, with old contents from the library (past); disks written in place are copied
//!   6. --keep hot: the table of references to disks is written (parts); --compress: the image is compressed (pack)
//!      --encrypt: device state, image and tables are encrypted in memory, before they are written (encryption)
//!   7. frozen overlays get a name in the snapshot; manifest; the VM's names of these overlays are removed
//! ```
//! Until its disks are frozen, the VM is not changed. If the save fails afterwards, the VM is
//! switched back to its older overlays (`merge_overlays`), or keeps the additional overlays until
//! the next save. No write of the VM is lost.

use std::fs::{self, File};
use std::io::Write as _;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Instant, SystemTime};

use memfold_host::progress::Progress;
use memfold_units::PAGE_SIZE;
use memfold_vm::{DiskSpec, Qmp, Vm, VmSpec, foreign, trial};
use memfold_wire::library::MAX_BLOCKS;
use serde_json::json;

use super::beside::Beside;
use super::chain_check::check_files;
use super::disk_copy::{self, Copied};
use super::draft::Draft;
use super::encryption::DataKey;
use super::error::{SnapshotError, failed};
use super::file_facts::{Stamp, facts};
use super::freeze::{self, Frozen};
use super::hardware;
use super::image::SUMS;
use super::manifest::{
    Encryption, FORMAT_OF_ENCRYPTION, FORMAT_OF_LAYERS, FileFacts, INDEX, KEY, Manifest, RAM,
    SEALED,
};
use super::merge_overlays::merge_overlays;
use super::page_copies::Room;
use super::parts;
use super::past::Past;
use super::saved_disks::take_over;
use super::shelf::Shelf;
use super::still::{Attempt, Still};

pub use super::block_job::Monitor;
pub use super::request::{Encrypt, Request, milliseconds};
pub use super::room::{check_reserve, check_room};
pub use super::still::{Hold, changed_pages};
pub use super::subject::Subject;

/// Checks that a VM can be saved now, and removes what an interrupted save has left in the running
/// VM: filters, copy jobs and surplus overlays. Returns an error if the VM cannot be saved.
#[allow(clippy::needless_pass_by_value)] // callers pass a closure
pub fn mend(subject: &Subject, monitor: impl Monitor) -> Result<(), SnapshotError> {
    let spec = &subject.spec;
    hardware::check(&mut monitor.qmp(), spec)?;
    disk_copy::remove(&monitor, spec)?;
    merge_overlays(
        &monitor,
        (spec, subject.user()),
        &subject.record_now().overlays,
    )?;
    // An overlay that a killed save left is open for writing, but is not one of the VM's files.
    let overlays = subject.overlays_now();
    freeze::drop_unused(&mut monitor.qmp(), spec, &overlays)
}

/// Saves a VM as a snapshot in `shelf`, and returns its manifest. `monitor` gives access to the
/// VM's QMP monitor, which other tasks may use while RAM is copied. After an error, no snapshot
/// exists, and the VM continues.
#[allow(clippy::needless_pass_by_value)] // callers pass a closure
pub fn save(
    (vm, subject): (&Vm, &Subject),
    monitor: impl Monitor + Sync,
    shelf: &Shelf,
    request: &Request,
    hold: &impl Hold,
    progress: &Progress,
) -> Result<Manifest, SnapshotError> {
    let key = request.encrypt.as_ref();
    let key = key.map(|of| new_key(subject, shelf, of)).transpose()?;
    let attempt = Attempt {
        vm,
        subject,
        monitor: &monitor,
        request,
        hold,
        progress,
        key: key.as_ref().map(|(key, _)| key),
    };
    let header = key.as_ref().map(|(_, header)| header.as_slice());
    attempt.run(shelf, header).inspect_err(|_| {
        let_go_of_disks(&subject.spec, &monitor);
        attempt.go_on_with_room();
    })
}

/// Fails if an encrypted snapshot would hold disks unencrypted, and the user did not accept that.
pub fn check_disks(subject: &Subject, encrypt: &Encrypt) -> Result<(), SnapshotError> {
    let spec = &subject.spec;
    // Of a VM that memfold did not start, all disks are copied.
    let is_held = |disk: &&DiskSpec| !disk.read_only || spec.foreign.is_some();
    let disks = spec.disks.iter().filter(is_held);
    let disks: Vec<String> = disks.map(|disk| disk.path.display().to_string()).collect();
    if !disks.is_empty() && !encrypt.plain_disks {
        return Err(SnapshotError::Impossible(format!(
            "the snapshot would hold contents of {} unencrypted, because memfold encrypts only memory and device state; pass --plain-disks if the guest encrypts its disks, or if that may be",
            disks.join(", ")
        )));
    }
    Ok(())
}

/// Makes the data key of a new snapshot, and encrypts it: the contents of the file `key`.
fn new_key(
    subject: &Subject,
    shelf: &Shelf,
    encrypt: &Encrypt,
) -> Result<(DataKey, Vec<u8>), SnapshotError> {
    check_disks(subject, encrypt)?;
    let operator = shelf.keys().load(&encrypt.key)?;
    let made = DataKey::random().and_then(|key| Ok((key.wrap(&operator)?, key)));
    let (header, key) = made.map_err(failed(KEY))?;
    Ok((key, header))
}

impl<M: Monitor + Sync, H: Hold> Attempt<'_, M, H> {
    fn run(&self, shelf: &Shelf, header: Option<&[u8]>) -> Result<Manifest, SnapshotError> {
        let draft = shelf.draft(&self.request.name)?;
        let image = if self.key.is_some() { SEALED } else { RAM };
        let (ram, sums) = (draft.file(image)?, draft.file(SUMS)?);
        let header = header.map(|header| {
            let mut file = draft.file(KEY)?;
            let written = file.write_all(header).and_then(|()| facts(file));
            written.map_err(draft.failed(KEY))
        });
        let header = header.transpose()?;
        let before = self.subject.overlays_now();
        let room = self.begin_room().map_err(draft.failed(RAM))?;
        let described = self.take_beside(&draft)?;
        let (frozen, copies, still) = self.stand_still(&before, (&draft, &ram), room)?;
        // From here on, the VM's chain of overlays is longer by one.
        let place = draft.place.clone();
        let mut compared = Vec::new();
        let (files, disks) = (
            (&draft, &ram, sums, header),
            (frozen.as_slice(), copies.as_slice()),
        );
        // Dropping the draft after an error removes its names of the frozen overlays, so they
        // belong only to the VM again.
        let made = self
            .finish(files, described, disks, still, &mut compared)
            .and_then(|manifest| draft.commit(&manifest).map(|()| manifest));
        // The frozen overlays belong to the snapshot if their files are in it; otherwise to the VM,
        // which could not be saved again without them. The snapshot has copies instead if it is on
        // another file system, or if the VM's QEMU runs as a user.
        let is_there = |frozen: &Frozen| made.is_ok() && frozen.is_in(&place);
        let (lain, own): (Vec<Frozen>, Vec<Frozen>) = frozen.into_iter().partition(is_there);
        if made.is_ok() {
            self.hand_over(&lain);
        }
        if !own.is_empty() || made.is_err() {
            self.go_back(&own);
        }
        // A copy of an overlay was not compared with memory.
        if let Some(manifest) = made.as_ref().ok().filter(|_| own.is_empty()) {
            shelf.trust(manifest, &compared);
        }
        made
    }

    /// Returns the description of the VM that is saved, and the parts of the snapshot other than
    /// memory and disks. Other tasks may use the monitor before the VM is stopped.
    fn take_beside(&self, draft: &Draft) -> Result<(VmSpec, Beside), SnapshotError> {
        let (vm, subject) = (self.vm, self.subject);
        let mut qmp = self.monitor.qmp();
        let mut now = spec_now(vm, &subject.spec, &mut qmp)?;
        let cpu = self.request.cpu.as_ref();
        let encrypt = self.request.encrypt.as_ref();
        let may_be_plain = encrypt.is_none_or(|encrypt| encrypt.plain_disks);
        let into = (draft, cpu, may_be_plain);
        let beside = Beside::take(vm, subject, &mut qmp, &mut now, into)?;
        drop(qmp);
        self.start_once(&now, draft)?;
        Ok((now, beside))
    }

    /// Does the steps that must happen at one instant. After an error, the VM runs as before.
    fn stand_still<'r>(
        &self,
        before: &[PathBuf],
        (draft, ram): (&Draft, &'r File),
        room: Option<JoinHandle<Room>>,
    ) -> Result<(Vec<Frozen>, Vec<Copied>, Still<'r>), SnapshotError> {
        let spec = &self.subject.spec;
        let note = |new: &[PathBuf]| {
            let all: Vec<PathBuf> = before.iter().chain(new).cloned().collect();
            self.subject.write_overlays(&all)
        };
        let mut qmp = self.monitor.qmp();
        let frozen = freeze::prepare(&mut qmp, (spec, self.subject.user()), draft, before, note)?;
        let stood = check_files(self.vm.pid(), &mut qmp, spec)
            .and_then(|()| disk_copy::prepare(&mut qmp, spec, draft))
            .and_then(|copies| {
                let disks = (frozen.as_slice(), copies.as_slice());
                let still = self.save_still(&mut qmp, (draft, ram), disks, room)?;
                Ok((copies, still))
            });
        match stood {
            Ok((copies, still)) => Ok((frozen, copies, still)),
            Err(error) => {
                // The VM resumes first, because the following steps may wait for QEMU.
                self.go_on(&mut qmp);
                self.hold.let_go();
                freeze::undo(&mut qmp, &frozen, note);
                Err(error)
            }
        }
    }

    /// Does the steps after the VM has resumed. `compared` receives the stamps of the files with
    /// which memory was compared.
    fn finish(
        &self,
        (draft, ram, sums, header): (&Draft, &File, File, Option<FileFacts>),
        (spec_now, beside): (VmSpec, Beside),
        (frozen, copies): (&[Frozen], &[Copied]),
        mut still: Still<'_>,
        compared: &mut Vec<Stamp>,
    ) -> Result<Manifest, SnapshotError> {
        let Subject { spec, record, .. } = self.subject;
        let (request, progress) = (self.request, self.progress);
        let (began, mut steps) = (Instant::now(), still.steps);
        let live = !still.later.is_empty();
        let (writer, plan) = (&mut still.writer, &still.plan);
        // The old contents of the VM's RAM were protected, or copied, before the VM resumed.
        let past = still.past.as_ref().map(|(past, _)| past);
        let (copied, closed) = thread::scope(|scope| {
            let monitor = self.monitor;
            let closed = scope.spawn(move || close_frozen(monitor, spec, frozen));
            let copied = if live {
                let pages = still.later.iter().map(|&number| plan.blocks[number].pages);
                progress.begin("RAM copied", pages.sum::<u64>() * PAGE_SIZE);
                let written = writer.blocks(plan, &still.later, past, progress);
                written.map(|()| past.map_or(0, Past::kept_pages))
            } else {
                Ok(0)
            };
            // The VM is released first, because QEMU may not answer.
            self.hold.let_go();
            (copied, closed.join())
        });
        // Freeing hundreds of MiB takes milliseconds.
        let done_with = (still.past, still.plan);
        let _ = thread::Builder::new().spawn(move || drop(done_with));
        closed.unwrap_or_else(|panic| resume_unwind(panic))?;
        let kept_pages = copied.map_err(draft.failed(RAM))?;
        let references = still.writer.take_references();
        compared.extend(references.1.files.iter().filter_map(|file| file.stamp));
        let ram_bytes = still.writer.image_bytes();
        let sealed = still.writer.sealed_index().map_err(draft.failed(INDEX))?;
        let (blocks, counts) = still.writer.finish(&sums).map_err(draft.failed(SUMS))?;
        steps.copy_ms = milliseconds(began.elapsed());
        let took = disk_copy::finish(self.monitor, copies, spec, draft, progress)?;
        steps.disks_copy_ms = milliseconds(took);
        let disks = take_over(spec, frozen, copies, draft)?;
        let references = parts::write_references((draft, self.key), references, &disks)?;
        let began = Instant::now();
        let packed = if let Some((bytes, index)) = sealed {
            Some(parts::write_index(draft, bytes, &index)?)
        } else if request.compress {
            let packed = parts::compress(draft, ram, progress)?;
            steps.pack_ms = milliseconds(began.elapsed());
            Some(packed)
        } else {
            None
        };
        let encryption = header.zip(request.encrypt.as_ref());
        let encryption = encryption.map(|(header, of)| Encryption {
            key: of.key.clone(),
            header,
            compressed: request.compress,
            plain_disks: of.plain_disks,
        });
        let parent = request.parent.as_ref().map(|parent| parent.name());
        Ok(Manifest {
            format: match &encryption {
                Some(_) => FORMAT_OF_ENCRYPTION,
                None => FORMAT_OF_LAYERS,
            },
            parent,
            name: request.name.clone(),
            domain: request.domain.clone(),
            vm: spec.name.clone(),
            created_s: SystemTime::UNIX_EPOCH
                .elapsed()
                .map_or(0, |time| time.as_secs()),
            memfold: env!("CARGO_PKG_VERSION").to_owned(),
            keep: request.keep,
            keep_reason: request.keep_reason.clone(),
            whole_reason: request.whole_reason.clone(),
            of_boot: request.of_boot.clone(),
            fork: request.fork,
            live,
            kept_pages,
            spec: spec_now,
            qemu: record.version,
            machine: record.machine.clone(),
            accel: record.accel.clone(),
            cpu: beside.cpu,
            blocks,
            counts,
            free_kept: still.free_kept,
            cache_kept: request.cache_kept.clone(),
            agent: request.agent,
            generation_id: request.generation_id,
            guest_boot: request.guest_boot.clone(),
            ram_bytes,
            packed,
            encryption,
            references,
            sums: facts(sums).map_err(draft.failed(SUMS))?,
            devices: still.devices,
            disks,
            media: beside.media,
            files: beside.files,
            of_one_vm: of_one_vm(spec),
            pause_ms: milliseconds(still.pause),
            save_ms: milliseconds(request.began.elapsed()),
            steps,
        })
    }

    /// Resumes the VM if it was stopped because a write to its disk failed during the save. The VM
    /// ran before the save, and the files that used up the space on its disk's file system are
    /// gone, so QEMU tries the write again.
    fn go_on_with_room(&self) {
        let status = self.monitor.qmp().query("query-status");
        if status.is_ok_and(|now| now["status"] == "io-error") {
            let on = self.monitor.qmp().execute("cont", json!({}));
            tracing::warn!(
                vm = self.vm.name(),
                went_on = on.is_ok(),
                "a disk write of the VM failed during its save; free space, then run 'memfold vm resume' if the VM is paused"
            );
        }
    }

    /// Makes the VM write to its older overlays again, which were frozen for a snapshot that
    /// failed, or that has copies of them.
    fn go_back(&self, frozen: &[Frozen]) {
        let (monitor, subject) = (self.monitor, self.subject);
        let back = || -> Result<(), SnapshotError> {
            for frozen in frozen {
                // The newer overlay's header names the snapshot's file, so it is corrected before
                // the merge.
                let nodes = (&*frozen.node, &*frozen.node);
                freeze::name_backing(&mut monitor.qmp(), nodes, &frozen.path)?;
            }
            merge_overlays(
                monitor,
                (&subject.spec, subject.user()),
                &subject.record_now().overlays,
            )?;
            subject.write_overlays(&subject.overlays_now())
        };
        if let Err(error) = back() {
            tracing::warn!(vm = subject.spec.name, %error, "cannot merge the extra overlay of a failed save; the overlay ends with the VM's next save or with the VM");
        }
    }

    /// Hands the frozen overlays over to the finished snapshot, even if the VM has died meanwhile.
    fn hand_over(&self, frozen: &[Frozen]) {
        let mut overlays = self.subject.record_now().overlays;
        overlays.retain(|overlay| frozen.iter().all(|f| f.path != *overlay));
        if let Err(error) = self.subject.write_overlays(&overlays) {
            tracing::warn!(vm = self.vm.name(), %error, "cannot remove the names of the snapshot's overlays from process.json; no action is needed");
        }
        for frozen in frozen {
            // If the name remains, it takes no space, because the file belongs to the snapshot.
            let _ = fs::remove_file(&frozen.path);
        }
    }

    /// Does a trial start of the saved description, if memfold has never started the VM.
    fn start_once(&self, spec: &VmSpec, draft: &Draft) -> Result<(), SnapshotError> {
        if self.subject.directory.is_some() {
            return Ok(());
        }
        let parts = trial::MachineParts::of(&mut self.monitor.qmp())?;
        let mut spec = spec.clone();
        for file in spec.foreign.iter_mut().flat_map(|of| &mut of.files) {
            *file = draft.path.join(&file);
        }
        trial::start_once(&spec, &parts).map_err(|why| {
            SnapshotError::Impossible(format!(
                "a snapshot of this VM could not be restored: its trial start failed: {why}"
            ))
        })
    }
}

/// Checks that QEMU no longer writes to frozen overlays, and makes it close its writable
/// descriptors of them.
fn close_frozen(
    monitor: &impl Monitor,
    spec: &VmSpec,
    frozen: &[Frozen],
) -> Result<(), SnapshotError> {
    freeze::check_frozen(&mut monitor.qmp(), frozen)?;
    freeze::close_for_writing(&mut monitor.qmp(), spec, frozen);
    Ok(())
}

/// Removes the filters of a failed or interrupted save from the disks that a VM writes in place.
/// Returns whether all of these filters are removed.
pub fn let_go_of_disks(spec: &VmSpec, monitor: &impl Monitor) -> bool {
    let gone = disk_copy::remove(monitor, spec);
    if let Err(error) = &gone {
        tracing::warn!(vm = spec.name, %error, "cannot remove the copy-before-write job of a disk; the job ends with the VM's next save or with the VM");
    }
    gone.is_ok()
}

/// Gives overlays that were frozen in the snapshot's directory `snapshot` back to the running VM,
/// before the snapshot is removed. The VM's next save merges these overlays with newer ones. Does
/// nothing if the VM uses no file of the snapshot.
#[allow(clippy::needless_pass_by_value)] // callers pass a closure
pub fn take_back(
    (vm, subject): (&Vm, &Subject),
    monitor: impl Monitor,
    snapshot: &Path,
) -> Result<(), SnapshotError> {
    let mut qmp = monitor.qmp();
    let mut overlays = subject.overlays_now();
    let lain = freeze::lain(vm.pid(), &mut qmp, (&subject.spec, &overlays), snapshot)?;
    if lain.is_empty() {
        return Ok(());
    }
    // The overlays are recorded first, because a record of a file that does not exist is harmless.
    overlays.extend(lain.iter().map(|overlay| overlay.path.clone()));
    subject.write_overlays(&overlays)?;
    freeze::take_back(&mut qmp, &lain)
}

/// Returns the VM's description with the segments that the VM maps now, and their addresses in the
/// guest.
fn spec_now(vm: &Vm, spec: &VmSpec, qmp: &mut Qmp) -> Result<VmSpec, SnapshotError> {
    hardware::check(qmp, spec)?;
    let mut now = spec.clone();
    now.segments = vm.segments();
    for (slot, segment) in now.segments.iter_mut().enumerate() {
        segment.address = memfold_vm::segments::address(qmp, slot)?;
        if segment.address.is_none() {
            return Err(SnapshotError::Impossible(format!(
                "segment '{}' is recorded, but QEMU has no such device: an attach was interrupted; attach the segment again",
                segment.name
            )));
        }
    }
    // Each RAM block has a backend, and listing the backends is faster than reading the layout.
    let mut ram_blocks = memfold_vm::ram::read_backends(qmp)?.len();
    if ram_blocks > MAX_BLOCKS {
        ram_blocks = vm.layout(qmp)?.blocks.len();
    }
    if ram_blocks > MAX_BLOCKS {
        return Err(SnapshotError::Impossible(format!(
            "the VM's RAM has {ram_blocks} blocks, and a snapshot holds at most {MAX_BLOCKS}; start the VM with fewer memory devices"
        )));
    }
    Ok(now)
}

/// Returns the host resources of the VM that only one VM can have.
fn of_one_vm(spec: &VmSpec) -> Vec<String> {
    let forwards = spec.forwards.iter();
    let forwards = forwards.map(|forward| format!("forwarded port {forward}"));
    let of_others = spec.foreign.iter().flat_map(|of| of.left_out.clone());
    let mut all: Vec<String> = forwards
        .chain(foreign::of_arguments(&spec.qemu_args))
        .collect();
    // A VM that runs from a snapshot has none of these resources.
    all.extend(of_others.filter(|_| spec.left_out.is_empty()));
    all
}
