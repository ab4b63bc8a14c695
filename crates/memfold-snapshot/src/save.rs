//! Saves a VM's memory, devices and disks as of one instant.
//!
//! ```text
//!   1. overlays        a new one for each temporary overlay, added to QEMU, not used yet; files for copies of other disks
//!                      --keep hot: what the guest has cached of its disks is looked for in their files (candidates)
//!   -- the VM stands still --
//!   2. device state    QEMU writes it to a descriptor of ours (xen-save-devices-state: any machine, no RAM)
//!   3. RAM image       from the page tables of QEMU's process; live: RAM is looked at and protected, small blocks are copied;
//!                      what a disk's file holds is not written (refer): QEMU has written to it what there was, and stands still
//!   4. disks           what is written in place is put aside from now on before it is written over (disk_copy);
//!                      the temporary overlays are frozen under the new ones, all in one transaction
//!   -- the VM goes on --
//!   5. live: the RAM image, of what the library keeps too (past); disks that are written in place are copied
//!   6. --keep hot: where the disks hold pages is written down (parts); --compress: the rest is compressed (pack)
//!   7. frozen overlays get a name in the snapshot; manifest; the VM lets go of them
//! ```
//! Before step 4 the VM is not changed. If a later step fails, the VM is switched back to its older
//! overlays (`merge_overlays`), or keeps the longer chain until the next save. No write of the VM
//! is lost.

use std::fs::{self, File};
use std::io;
use std::ops::DerefMut;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use memfold_host::progress::Progress;
use memfold_units::PAGE_SIZE;
use memfold_vm::{Qmp, Vm, VmSpec, foreign, trial};
use memfold_wire::library::MAX_BLOCKS;
use serde_json::json;

use super::beside::Beside;
use super::chain_check::check_files;
use super::disk_copy::{self, Copied};
use super::draft::Draft;
use super::error::SnapshotError;
use super::file_facts::{Stamp, facts};
use super::freeze::{self, Frozen};
use super::hardware;
use super::image::Plan;
use super::manifest::{FORMAT, FORMAT_IN_PARTS, Manifest, RAM, SUMS};
use super::merge_overlays::merge_overlays;
use super::parts;
use super::past::Past;
use super::saved_disks::take_over;
use super::shelf::Shelf;
use super::still::{Still, go_on, stand_still};
use super::writer::Writer;

pub use super::request::{Request, milliseconds};
pub use super::still::Hold;
pub use super::subject::Subject;

/// Refuses a VM that cannot be saved now, and cleans up after an interrupted save. The VM runs
/// meanwhile.
pub fn mend<M: DerefMut<Target = Qmp>>(
    subject: &Subject,
    monitor: impl Fn() -> M,
) -> Result<(), SnapshotError> {
    let spec = &subject.spec;
    hardware::check(&mut monitor(), spec)?;
    disk_copy::remove(&monitor, spec)?;
    merge_overlays(&monitor, spec, &subject.record_now().overlays)
}

/// Saves a VM. `monitor` returns its monitor, which other tasks may use while RAM is copied.
pub fn save<M: DerefMut<Target = Qmp>>(
    (vm, subject): (&Vm, &Subject),
    monitor: impl Fn() -> M,
    shelf: &Shelf,
    request: &Request,
    hold: &impl Hold,
    progress: &Progress,
) -> Result<Manifest, SnapshotError> {
    let attempt = Attempt {
        vm,
        subject,
        monitor: &monitor,
        request,
        hold,
        progress,
    };
    let made = attempt.run(shelf);
    if made.is_err() {
        let_go_of_disks(&subject.spec, &monitor);
        go_on_with_room(vm, &monitor);
    }
    made
}

/// The description of what is saved, and what a snapshot needs besides memory and disks. Others may
/// use the monitor before the VM stands still.
fn take_beside<M: DerefMut<Target = Qmp>>(
    (vm, subject): (&Vm, &Subject),
    monitor: &impl Fn() -> M,
    draft: &Draft,
) -> Result<(VmSpec, Beside), SnapshotError> {
    let mut qmp = monitor();
    // What a killed save left is open for writing, and is no file of the VM's.
    freeze::drop_unused(&mut qmp, &subject.spec, &subject.overlays_now())?;
    let mut now = spec_now(vm, &subject.spec, &mut qmp)?;
    let beside = Beside::take(vm, subject, &mut qmp, &mut now, draft)?;
    drop(qmp);
    start_once(subject, &now, draft, monitor)?;
    Ok((now, beside))
}

/// A save that is under way: of whom, and how.
struct Attempt<'a, F, H> {
    vm: &'a Vm,
    subject: &'a Subject,
    monitor: &'a F,
    request: &'a Request,
    hold: &'a H,
    progress: &'a Progress,
}

impl<F: Fn() -> M, M: DerefMut<Target = Qmp>, H: Hold> Attempt<'_, F, H> {
    fn run(&self, shelf: &Shelf) -> Result<Manifest, SnapshotError> {
        let who = (self.vm, self.subject);
        let draft = shelf.draft(&self.request.name)?;
        let (ram, sums) = (draft.file(RAM)?, draft.file(SUMS)?);
        let before = self.subject.overlays_now();
        let described = take_beside(who, self.monitor, &draft)?;
        let (frozen, copies, still) = self.stand_still(&before, &draft, &ram)?;
        // From here on the VM's chain of overlays is longer by one.
        let place = draft.place().to_owned();
        let mut compared = Vec::new();
        let disks = (frozen.as_slice(), copies.as_slice());
        let made = match self.finish((&draft, &ram, sums), described, disks, still, &mut compared) {
            Ok(manifest) => draft.commit(&manifest).map(|()| manifest),
            // Its names of the frozen overlays go: they are the VM's alone again.
            Err(error) => {
                drop(draft);
                Err(error)
            }
        };
        let snapshot = made.is_ok().then_some(&place);
        // A copy of an overlay was not compared with memory.
        let no_copy = frozen.iter().all(|frozen| frozen.is_in(&place));
        share_out(who, self.monitor, frozen, snapshot);
        if let Some(manifest) = made.as_ref().ok().filter(|_| no_copy) {
            shelf.trust(manifest, &compared);
        }
        made
    }

    /// Performs the steps that must be of one instant. After an error, the VM runs as before.
    fn stand_still<'r>(
        &self,
        before: &[PathBuf],
        draft: &Draft,
        ram: &'r File,
    ) -> Result<(Vec<Frozen>, Vec<Copied>, Still<'r>), SnapshotError> {
        let (vm, spec, hold) = (self.vm, &self.subject.spec, self.hold);
        let note = |new: &[PathBuf]| {
            let all: Vec<PathBuf> = before.iter().chain(new).cloned().collect();
            self.subject.write_overlays(&all)
        };
        let mut qmp = (self.monitor)();
        let frozen = freeze::prepare(&mut qmp, spec, draft, before, note)?;
        let stood = check_files(vm.pid(), &mut qmp, spec)
            .and_then(|()| disk_copy::prepare(&mut qmp, spec, draft))
            .and_then(|copies| {
                let disks = (frozen.as_slice(), copies.as_slice());
                let (request, progress) = (self.request, self.progress);
                let files = (draft, ram);
                let still =
                    stand_still((vm, spec), &mut qmp, files, disks, request, hold, progress)?;
                Ok((copies, still))
            });
        match stood {
            Ok((copies, still)) => Ok((frozen, copies, still)),
            Err(error) => {
                // First of all: what follows may wait for QEMU.
                go_on(vm, hold, &mut qmp);
                hold.let_go();
                freeze::undo(&mut qmp, &frozen, note);
                Err(error)
            }
        }
    }

    /// Performs the steps after the VM has resumed. `compared` gets the stamps of the files that
    /// memory was compared with.
    fn finish(
        &self,
        (draft, ram, sums): (&Draft, &File, File),
        (spec_now, beside): (VmSpec, Beside),
        (frozen, copies): (&[Frozen], &[Copied]),
        mut still: Still<'_>,
        compared: &mut Vec<Stamp>,
    ) -> Result<Manifest, SnapshotError> {
        let Subject { spec, record, .. } = self.subject;
        let (request, progress) = (self.request, self.progress);
        let (began, mut steps) = (Instant::now(), still.steps);
        let live = still.past.is_some();
        let (writer, plan) = (&mut still.writer, &still.plan);
        let copied = still
            .past
            .map_or(Ok(0), |past| copy_ram(past, writer, plan, progress));
        // First of all: what follows a failure may wait for QEMU.
        self.hold.let_go();
        freeze::check_frozen(&mut (self.monitor)(), frozen)?;
        let kept_pages = copied.map_err(draft.failed(RAM))?;
        let references = still.writer.take_references();
        compared.extend(references.1.files.iter().filter_map(|file| file.stamp));
        let (blocks, counts) = still.writer.finish(&sums).map_err(draft.failed(SUMS))?;
        steps.copy_ms = milliseconds(began.elapsed());
        let took = disk_copy::finish(self.monitor, copies, spec, draft, progress)?;
        steps.disks_copy_ms = milliseconds(took);
        let disks = take_over(spec, frozen, copies, draft)?;
        let ram_bytes = ram.metadata().map_err(draft.failed(RAM))?.len();
        let references = parts::write_references(draft, references, &disks)?;
        let packed = if request.compress {
            let began = Instant::now();
            let packed = parts::compress(draft, ram, progress)?;
            steps.pack_ms = milliseconds(began.elapsed());
            Some(packed)
        } else {
            None
        };
        let is_in_parts = references.is_some() || packed.is_some();
        Ok(Manifest {
            format: if is_in_parts { FORMAT_IN_PARTS } else { FORMAT },
            name: request.name.clone(),
            domain: request.domain.clone(),
            vm: spec.name.clone(),
            created_s: seconds_now(),
            memfold: env!("CARGO_PKG_VERSION").to_owned(),
            keep: request.keep,
            keep_reason: request.keep_reason.clone(),
            of_boot: request.of_boot.clone(),
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
            ram_bytes,
            packed,
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
}

/// Whose the frozen overlays are: the snapshot's whose files they are; else the VM's, which could
/// not be saved again without them. There is a copy instead on another file system, and of a VM's
/// user.
fn share_out<M: DerefMut<Target = Qmp>>(
    (vm, subject): (&Vm, &Subject),
    monitor: &impl Fn() -> M,
    frozen: Vec<Frozen>,
    snapshot: Option<&PathBuf>,
) {
    let is_there = |frozen: &Frozen| snapshot.is_some_and(|place| frozen.is_in(place));
    let (lain, own): (Vec<Frozen>, Vec<Frozen>) = frozen.into_iter().partition(is_there);
    if snapshot.is_some() {
        hand_over(vm, subject, &lain);
    }
    if !own.is_empty() || snapshot.is_none() {
        go_back(monitor, subject, &own);
    }
}

/// Lets a VM go on that stands still because a write to its disk has failed during a save: it ran
/// before, and what had used up the room of its disk, on the same file system, is gone. The write
/// is tried again.
fn go_on_with_room<M: DerefMut<Target = Qmp>>(vm: &Vm, monitor: &impl Fn() -> M) {
    let status = monitor().query("query-status");
    if status.is_ok_and(|now| now["status"] == "io-error") {
        let on = monitor().execute("cont", json!({}));
        tracing::warn!(
            vm = vm.name(),
            went_on = on.is_ok(),
            "disk write of the VM failed during its save; free space, then 'memfold vm resume' if it stands still"
        );
    }
}

/// Removes the filters of a failed or interrupted save from the disks that a VM writes in place.
/// Returns whether all are removed.
pub fn let_go_of_disks<M: DerefMut<Target = Qmp>>(spec: &VmSpec, monitor: &impl Fn() -> M) -> bool {
    let gone = disk_copy::remove(monitor, spec);
    if let Err(error) = &gone {
        tracing::warn!(vm = spec.name, %error, "copy-before-write job of a disk not removed; the VM's next save or its end removes it");
    }
    gone.is_ok()
}

/// Copies what was kept for a VM that has gone on; how many pages it wrote to before. What that
/// takes is freed.
fn copy_ram(
    (past, blocks): (Past, Vec<usize>),
    writer: &mut Writer<'_>,
    plan: &Plan,
    progress: &Progress,
) -> io::Result<u64> {
    let copied = blocks.iter().map(|&number| plan.blocks()[number].pages);
    progress.begin("RAM copied", copied.sum::<u64>() * PAGE_SIZE);
    writer.blocks(plan, &blocks, Some(&past), progress)?;
    Ok(past.kept_pages())
}

/// Has the VM write to the overlays again that were frozen for a snapshot which will never be, or
/// has copies of them.
fn go_back<M: DerefMut<Target = Qmp>>(
    monitor: &impl Fn() -> M,
    subject: &Subject,
    frozen: &[Frozen],
) {
    let back = || -> Result<(), SnapshotError> {
        for frozen in frozen {
            // The newer one's header names the snapshot's file, until it goes too.
            freeze::name_backing(&mut monitor(), &frozen.node, &frozen.path)?;
        }
        merge_overlays(monitor, &subject.spec, &subject.record_now().overlays)?;
        subject.write_overlays(&subject.overlays_now())
    };
    if let Err(error) = back() {
        tracing::warn!(vm = subject.spec.name, %error, "extra overlay of the VM's disks not merged; the VM's next save or its end removes it");
    }
}

/// The snapshot is made, also if the VM has died meanwhile: the frozen overlays are the snapshot's
/// now.
fn hand_over(vm: &Vm, subject: &Subject, frozen: &[Frozen]) {
    let mut overlays = subject.record_now().overlays;
    overlays.retain(|overlay| frozen.iter().all(|f| f.path != *overlay));
    if let Err(error) = subject.write_overlays(&overlays) {
        tracing::warn!(vm = vm.name(), %error, "cannot remove the snapshot's overlays from process.json; nothing is needed");
    }
    for frozen in frozen {
        // A name that stays costs nothing: the file is the snapshot's.
        let _ = fs::remove_file(&frozen.path);
    }
}

/// Returns frozen overlays to a VM whose snapshot is about to be removed. Its next save merges them
/// with newer overlays. Nothing is done if the VM's disks are not in the snapshot.
pub fn take_back<M: DerefMut<Target = Qmp>>(
    (vm, subject): (&Vm, &Subject),
    monitor: impl Fn() -> M,
    snapshot: &Path,
) -> Result<(), SnapshotError> {
    let mut qmp = monitor();
    let lain = freeze::lain(vm.pid(), &mut qmp, &subject.spec, snapshot)?;
    if lain.is_empty() {
        return Ok(());
    }
    // Noted first: what is noted and isn't there does no harm.
    let mut overlays = subject.overlays_now();
    overlays.extend(lain.iter().map(|overlay| overlay.path.clone()));
    subject.write_overlays(&overlays)?;
    freeze::take_back(&mut qmp, &lain)
}

fn seconds_now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |time| time.as_secs())
}

/// The VM's description with the segments that it maps now, and where it sees them.
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
    let ram_blocks = vm.layout(qmp)?.blocks.len();
    if ram_blocks > MAX_BLOCKS {
        return Err(SnapshotError::Impossible(format!(
            "the VM's RAM has {ram_blocks} blocks, and a snapshot holds at most {MAX_BLOCKS}; start the VM with fewer memory devices"
        )));
    }
    Ok(now)
}

/// What a VM has of its host that one VM alone can have.
fn of_one_vm(spec: &VmSpec) -> Vec<String> {
    let forwards = spec.forwards.iter();
    let forwards = forwards.map(|forward| format!("forwarded port {forward}"));
    let of_others = spec.foreign.iter().flat_map(|of| of.left_out.clone());
    let mut all: Vec<String> = forwards
        .chain(foreign::of_arguments(&spec.qemu_args))
        .collect();
    // A VM of a snapshot has none of those.
    all.extend(of_others.filter(|_| spec.left_out.is_empty()));
    all
}

/// Starts a VM of what is saved, if memfold has never started one.
fn start_once<M: DerefMut<Target = Qmp>>(
    subject: &Subject,
    spec: &VmSpec,
    draft: &Draft,
    monitor: &impl Fn() -> M,
) -> Result<(), SnapshotError> {
    if subject.directory.is_some() {
        return Ok(());
    }
    let parts = trial::MachineParts::of(&mut monitor())?;
    let mut spec = spec.clone();
    for file in spec.foreign.iter_mut().flat_map(|of| &mut of.files) {
        *file = draft.path().join(&file);
    }
    trial::start_once(&spec, &parts).map_err(|why| {
        SnapshotError::Impossible(format!(
            "a snapshot of this VM could not be restored, as a test start shows: {why}"
        ))
    })
}
