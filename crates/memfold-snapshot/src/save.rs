//! Saving a VM at one instant.
//!
//! ```text
//!   1. overlays        a new one for each temporary overlay, added to QEMU, not used yet; files for copies of other disks
//!   -- the VM stands still --
//!   2. device state    QEMU writes it to a descriptor of ours (xen-save-devices-state: any machine, no RAM)
//!   3. RAM image       from the page tables of QEMU's process; live: RAM is looked at and protected, small blocks are copied
//!   4. disks           what is written in place is put aside from now on before it is written over (copy);
//!                      the temporary overlays are frozen under the new ones, all in one transaction
//!   -- the VM goes on --
//!   5. live: the RAM image, of what the library keeps too (past); disks that are written in place are copied
//!   6. --keep hot: what the disks hold is taken out of the image (refer); --compress: the rest is compressed (pack)
//!   7. frozen overlays get a name in the snapshot; manifest; the VM lets go of them
//! ```
//! Until step 4 nothing of the VM is changed. If anything fails behind it, the VM goes back to its older overlays (shorten), or keeps the
//! longer chain until the next save: nothing that it has written is lost.

use std::fs::{self, File};
use std::io;
use std::ops::DerefMut;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use memfold_host::progress::Progress;
use memfold_units::PAGE_SIZE;
use memfold_vm::block_device::BlockDevice;
use memfold_vm::{DiskFormat, Qmp, RamLayout, Record, Vm, VmDirectory, VmSpec, foreign, trial};
use memfold_wire::library::{MAX_BLOCKS, Range};
use rustix::fs::{Mode, OFlags};
use serde_json::json;

use super::beside::{Beside, backing_files};
use super::copy::{self, Copied};
use super::free::{self, Frames};
use super::freeze::{self, Frozen, disk_name};
use super::hardware;
use super::image::{Plan, Source};
use super::manifest::{FORMAT, FORMAT_IN_PARTS, FileFacts, Keep, Manifest, SavedDisk, Steps};
use super::past::Past;
use super::shelf::{DEVICES, Draft, RAM, SUMS, facts};
use super::shorten::shorten;
use super::writer::Writer;
use super::{Shelf, SnapshotError, parts};

/// What is to be saved, and how.
#[allow(clippy::struct_excessive_bools)] // what was asked for, and what the guest has
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of the snapshot.
    pub name: String,
    /// What the guest was told to keep, for the manifest.
    pub keep: Keep,
    /// Trust domain.
    pub domain: Option<String>,
    /// For the manifest.
    pub of_boot: Option<String>,
    /// Whether the VM goes on while its RAM is copied.
    pub live: bool,
    /// Whether the image is compressed.
    pub compress: bool,
    /// When the save began.
    pub began: Instant,
    /// Frames that the guest had free while its writes were tracked; or why that isn't known.
    pub free: Result<Vec<Frames>, String>,
    /// Why the guest has caches that it was to drop.
    pub cache_kept: Option<String>,
    /// The steps that were before.
    pub steps: Steps,
    /// Whether memfold's agent runs in the guest.
    pub agent: bool,
    /// Whether the guest's kernel knows its VM generation ID.
    pub generation_id: bool,
}

/// The VM that is saved: what it is, and what was started.
#[derive(Clone, Debug)]
pub struct Subject {
    spec: VmSpec,
    record: Record,
    /// Its files; none of one that memfold didn't start. Its disks are all its own.
    pub(super) directory: Option<VmDirectory>,
}

impl Subject {
    /// A VM, of which the daemon knows name and trust domain; or why it can't be saved, by what it is.
    pub fn of(
        vm: &Vm,
        (name, domain): (&str, Option<&str>),
        qmp: &mut Qmp,
    ) -> Result<Self, SnapshotError> {
        let (Some(spec), Some(record)) = (vm.spec(), vm.record()) else {
            let (spec, record) = foreign::describe(vm, name, domain, qmp)?;
            return Ok(Self {
                spec,
                record,
                directory: None,
            });
        };
        if spec.swap.is_some() {
            return Err(SnapshotError::Impossible(
                "it has a swap disk (swap = ...), and a snapshot would lack what lies in it; start it without one".into(),
            ));
        }
        Ok(Self {
            spec: spec.clone(),
            record: record.clone(),
            directory: vm.directory().cloned(),
        })
    }

    /// Its description.
    #[must_use]
    pub const fn spec(&self) -> &VmSpec {
        &self.spec
    }

    fn record_now(&self) -> Record {
        let directory = self.directory.as_ref();
        directory
            .and_then(|place| VmDirectory::read_json(&place.record()).ok())
            .filter(|now: &Record| now.process == self.record.process)
            .unwrap_or_else(|| self.record.clone())
    }

    /// Its temporary overlays that are there.
    pub(super) fn overlays_now(&self) -> Vec<PathBuf> {
        let mut overlays = self.record_now().overlays;
        overlays.retain(|overlay| overlay.exists());
        overlays
    }

    /// Notes which temporary files go with the VM.
    fn write_overlays(&self, overlays: &[PathBuf]) -> Result<(), SnapshotError> {
        let Some(directory) = &self.directory else {
            return Ok(());
        };
        // The VM may have ended meanwhile, and another may have got its name.
        let is_other = |now: Record| now.process != self.record.process;
        if VmDirectory::read_json(&directory.record()).is_ok_and(is_other) {
            return Ok(());
        }
        let mut record = self.record_now();
        record.overlays = overlays.to_vec();
        directory
            .write_json(&directory.record(), &record)
            .map_err(|source| SnapshotError::Files {
                path: directory.record(),
                source,
            })
    }
}

/// How a VM is stopped for its snapshot. What is dropped lets it go on, and folds it again.
pub trait Hold {
    /// Stops the VM, whose monitor this is.
    fn stop(&self, qmp: &mut Qmp) -> Result<(), String>;

    /// Has the library keep what these ranges hold, in this file.
    fn keep_past(&self, ranges: Vec<Range>, file: OwnedFd) -> Result<(), String>;

    /// Tracks the VM's writes no more.
    fn untrack(&self) -> Result<(), String>;

    /// Lets the VM go on, if it was stopped.
    fn go_on(&self, qmp: &mut Qmp) -> Result<(), String>;

    /// Nothing more is needed of the VM.
    fn let_go(&self);
}

/// Refuses a VM that can't be saved as it is now, and puts right what an earlier save has left that was cut off. The VM runs meanwhile.
pub fn mend<M: DerefMut<Target = Qmp>>(
    subject: &Subject,
    monitor: impl Fn() -> M,
) -> Result<(), SnapshotError> {
    let spec = &subject.spec;
    hardware::check(&mut monitor(), spec)?;
    copy::remove(&monitor, spec)?;
    shorten(&monitor, spec, &subject.record_now().overlays)
}

/// Saves a VM. `monitor` gives its monitor, which others may use while RAM is copied.
pub fn save<M: DerefMut<Target = Qmp>>(
    (vm, subject): (&Vm, &Subject),
    monitor: impl Fn() -> M,
    shelf: &Shelf,
    request: &Request,
    hold: &impl Hold,
    progress: &Progress,
) -> Result<Manifest, SnapshotError> {
    let made = attempt((vm, subject), &monitor, shelf, request, hold, progress);
    if made.is_err() {
        let_go_of_disks(&subject.spec, &monitor);
        go_on_with_room(vm, &monitor);
    }
    made
}

/// The description of what is saved, and what a snapshot needs besides memory and disks. Others may use the monitor before the VM stands still.
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

fn attempt<M: DerefMut<Target = Qmp>>(
    (vm, subject): (&Vm, &Subject),
    monitor: &impl Fn() -> M,
    shelf: &Shelf,
    request: &Request,
    hold: &impl Hold,
    progress: &Progress,
) -> Result<Manifest, SnapshotError> {
    let Subject { spec, record, .. } = subject;
    let draft = shelf.draft(&request.name)?;
    let (ram, sums) = (draft.file(RAM)?, draft.file(SUMS)?);
    let failed = |part: &str, source| SnapshotError::Files {
        path: draft.path().join(part),
        source,
    };
    let before = subject.overlays_now();
    let note = |new: &[PathBuf]| {
        let all: Vec<PathBuf> = before.iter().chain(new).cloned().collect();
        subject.write_overlays(&all)
    };
    let (spec_now, beside) = take_beside((vm, subject), monitor, &draft)?;
    let mut qmp = monitor();
    let frozen = freeze::prepare(&mut qmp, spec, &draft, &before, note)?;
    let stood = freeze::check_files(vm.pid(), &mut qmp, spec)
        .and_then(|()| copy::prepare(&mut qmp, spec, &draft))
        .and_then(|copies| {
            let (who, files) = ((vm, spec), (&draft, &ram));
            let disks = (frozen.as_slice(), copies.as_slice());
            let still = stand_still(who, &mut qmp, files, disks, request, hold, progress)?;
            Ok((still, copies))
        });
    let (mut still, copies) = match stood {
        Ok(still) => still,
        Err(error) => {
            // First of all: what follows may wait for QEMU.
            go_on(vm, hold, &mut qmp);
            hold.let_go();
            freeze::undo(&mut qmp, &frozen, note);
            return Err(error);
        }
    };
    drop(qmp);
    // From here on the VM's chain of overlays is longer by one.
    let is_live = still.past.is_some();
    let finish = || -> Result<Manifest, SnapshotError> {
        let (began, mut steps) = (Instant::now(), still.steps);
        let (writer, plan) = (&mut still.writer, &still.plan);
        let copied = still
            .past
            .map_or(Ok(0), |past| copy_ram(past, writer, plan, progress));
        // First of all: what follows a failure may wait for QEMU.
        hold.let_go();
        freeze::check_frozen(&mut monitor(), &frozen)?;
        let kept_pages = copied.map_err(|source| failed(RAM, source))?;
        let (blocks, counts) = still.writer.finish(&sums).map_err(|e| failed(SUMS, e))?;
        steps.copy_ms = milliseconds(began.elapsed());
        steps.disks_copy_ms = milliseconds(copy::finish(monitor, &copies, spec, &draft, progress)?);
        let disks = take_over(spec, &frozen, &copies, &draft)?;
        let ram_bytes = ram.metadata().map_err(|e| failed(RAM, e))?.len();
        let (references, packed) =
            parts::take_apart(&draft, &ram, &disks, request, &mut steps, progress)?;
        let is_in_parts = references.is_some() || packed.is_some();
        Ok(Manifest {
            format: if is_in_parts { FORMAT_IN_PARTS } else { FORMAT },
            name: request.name.clone(),
            domain: request.domain.clone(),
            vm: spec.name.clone(),
            created_s: seconds_now(),
            memfold: env!("CARGO_PKG_VERSION").to_owned(),
            keep: request.keep,
            of_boot: request.of_boot.clone(),
            live: is_live,
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
            sums: facts(sums).map_err(|source| failed(SUMS, source))?,
            devices: still.devices,
            disks,
            media: beside.media,
            files: beside.files,
            of_one_vm: of_one_vm(spec),
            pause_ms: milliseconds(still.pause),
            save_ms: milliseconds(request.began.elapsed()),
            steps,
        })
    };
    let place = draft.place().to_owned();
    let made = match finish() {
        Ok(manifest) => draft.commit(&manifest).map(|()| manifest),
        // Its names of the frozen overlays go: they are the VM's alone again.
        Err(error) => {
            drop(draft);
            Err(error)
        }
    };
    let snapshot = made.is_ok().then_some(&place);
    share_out((vm, subject), monitor, frozen, snapshot);
    made
}

/// Whose the frozen overlays are: the snapshot's whose files they are; else the VM's, which could not be saved again without them. There is a copy
/// instead on another file system, and of a VM's user.
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

/// Lets a VM go on that stands still because a write to its disk has failed during a save: it ran before, and what had used up the room
/// of its disk, on the same file system, is gone. The write is tried again.
fn go_on_with_room<M: DerefMut<Target = Qmp>>(vm: &Vm, monitor: &impl Fn() -> M) {
    let status = monitor().query("query-status");
    if status.is_ok_and(|now| now["status"] == "io-error") {
        let on = monitor().execute("cont", json!({}));
        tracing::warn!(
            vm = vm.name(),
            went_on = on.is_ok(),
            "a write to its disk failed while it was saved"
        );
    }
}

/// Has a VM use the disks that it writes in place as before a save that has failed, or was cut off with its daemon. Whether it does.
pub fn let_go_of_disks<M: DerefMut<Target = Qmp>>(spec: &VmSpec, monitor: &impl Fn() -> M) -> bool {
    let gone = copy::remove(monitor, spec);
    if let Err(error) = &gone {
        tracing::warn!(vm = spec.name, %error, "what it writes over is still put aside; the next save, or its end, ends that");
    }
    gone.is_ok()
}

/// Copies what was kept for a VM that has gone on; how many pages it wrote to before. What that takes is freed.
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

/// Has the VM write to the overlays again that were frozen for a snapshot which will never be, or has copies of them.
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
        shorten(monitor, &subject.spec, &subject.record_now().overlays)?;
        subject.write_overlays(&subject.overlays_now())
    };
    if let Err(error) = back() {
        tracing::warn!(vm = subject.spec.name, %error, "its disks have an overlay more; the next save, or its end, removes that");
    }
}

/// The snapshot is made, also if the VM has died meanwhile: the frozen overlays are the snapshot's now.
fn hand_over(vm: &Vm, subject: &Subject, frozen: &[Frozen]) {
    let mut overlays = subject.record_now().overlays;
    overlays.retain(|overlay| frozen.iter().all(|f| f.path != *overlay));
    if let Err(error) = subject.write_overlays(&overlays) {
        tracing::warn!(vm = vm.name(), %error, "its record names overlays that belong to a snapshot now");
    }
    for frozen in frozen {
        // A name that stays costs nothing: the file is the snapshot's.
        let _ = fs::remove_file(&frozen.path);
    }
}

/// A snapshot is to be removed, and a VM goes on that was saved in it: what is frozen of its disks is its own again. Its next save merges that with what
/// it has written since. Nothing is done for a VM whose disks aren't there.
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

/// What was saved while the VM stood still.
struct Still<'a> {
    steps: Steps,
    devices: FileFacts,
    free_kept: Option<String>,
    plan: Plan,
    /// Blocks that are to be copied yet, and what they held.
    past: Option<(Past, Vec<usize>)>,
    writer: Writer<'a>,
    pause: Duration,
}

/// Lets a VM go on. Its library does so in any case, at the latest when its connection ends.
fn go_on(vm: &Vm, hold: &impl Hold, qmp: &mut Qmp) {
    if let Err(error) = hold.go_on(qmp) {
        tracing::warn!(vm = vm.name(), error, "the VM was not let go on");
    }
}

/// Stops the VM, does what has to be of one instant, and lets it go on.
#[allow(clippy::too_many_arguments)] // parts of one save
fn stand_still<'a>(
    (vm, spec): (&Vm, &VmSpec),
    qmp: &mut Qmp,
    (draft, ram): (&Draft, &'a File),
    (frozen, copies): (&[Frozen], &[Copied]),
    request: &Request,
    hold: &impl Hold,
    progress: &Progress,
) -> Result<Still<'a>, SnapshotError> {
    let failed = |source| SnapshotError::Files {
        path: draft.path().join(RAM),
        source,
    };
    hold.stop(qmp).map_err(SnapshotError::Impossible)?;
    let stopped = Instant::now();
    let mut steps = request.steps;
    let devices = device_state(qmp, draft)?;
    steps.devices_ms = milliseconds(stopped.elapsed());
    let began = Instant::now();
    let layout = vm.layout(qmp)?;
    let free = request.free.clone().and_then(|frames| {
        free::unwritten(vm.pid(), &layout, &frames)
            .map_err(|error| format!("their writes can't be read: {error}"))
    });
    // Of a page that was never touched, tracking leaves a mark that looks like a page in swap.
    hold.untrack().map_err(SnapshotError::Impossible)?;
    let given = free.as_deref().unwrap_or_default();
    let plan = Plan::new(vm.pid(), sources(qmp)?, given).map_err(failed)?;
    let past = if request.live {
        keep_past(vm, &layout, &plan, hold)?
    } else {
        None
    };
    let mut writer = Writer::new(&plan, ram).map_err(failed)?;
    // An image that is taken apart again would go to the disk in vain.
    if request.keep != Keep::Hot && !request.compress {
        writer.write_back().map_err(failed)?;
    }
    let pages = plan.blocks().iter().map(|block| block.pages);
    progress.begin("RAM saved", pages.sum::<u64>() * PAGE_SIZE);
    let is_live = |number: &usize| past.as_ref().is_some_and(|(_, live)| live.contains(number));
    let still: Vec<usize> = (0..plan.blocks().len())
        .filter(|number| !is_live(number))
        .collect();
    writer
        .blocks(&plan, &still, None, progress)
        .map_err(failed)?;
    steps.ram_ms = milliseconds(began.elapsed());
    let began = Instant::now();
    copy::begin(qmp, spec, copies)?;
    freeze::switch(qmp, frozen)?;
    steps.disks_ms = milliseconds(began.elapsed());
    go_on(vm, hold, qmp);
    Ok(Still {
        steps,
        devices,
        free_kept: free.err(),
        plan,
        past,
        writer,
        pause: stopped.elapsed(),
    })
}

/// Has the library keep what the VM's RAM holds, and says which blocks that are.
fn keep_past(
    vm: &Vm,
    layout: &RamLayout,
    plan: &Plan,
    hold: &impl Hold,
) -> Result<Option<(Past, Vec<usize>)>, SnapshotError> {
    let failed = |error: io::Error| {
        SnapshotError::Impossible(format!("no place for what the VM writes to: {error}"))
    };
    let is_ram = |source: &Source| layout.blocks.iter().any(|block| block.hva == source.hva);
    let mut live: Vec<usize> = (0..plan.blocks().len())
        .filter(|&number| is_ram(&plan.blocks()[number]))
        .collect();
    live.sort_by_key(|&number| plan.blocks()[number].hva);
    let blocks: Vec<_> = live
        .iter()
        .map(|&number| {
            let block = &plan.blocks()[number];
            block.hva..block.hva.add_pages(block.pages)
        })
        .collect();
    let wanted: Vec<_> = live
        .iter()
        .flat_map(|&number| plan.wanted(number))
        .collect();
    // The rest is for the guests.
    let room = host_available_pages().map_err(failed)? / 2;
    let Some(past) = Past::new(vm.pid(), &blocks, &wanted, room).map_err(failed)? else {
        return Ok(None);
    };
    let file = past.descriptor().map_err(failed)?;
    hold.keep_past(past.ranges(), file)
        .map_err(SnapshotError::Impossible)?;
    Ok(Some((past, live)))
}

/// Seconds since 1970.
fn seconds_now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |time| time.as_secs())
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
    let done = qmp.execute_on_disks(
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

/// Every RAM block of QEMU that goes with the VM: those without a name are files that it maps (segments), which no migration would take either.
fn sources(qmp: &mut Qmp) -> Result<Vec<Source>, SnapshotError> {
    let blocks = memfold_vm::ram::read_blocks(qmp)?;
    let sources = blocks.into_iter().map(|block| Source {
        name: block.name,
        hva: block.hva,
        pages: block.used_bytes.div_ceil(PAGE_SIZE),
    });
    Ok(sources
        .filter(|source| source.pages > 0 && !source.name.is_empty())
        .collect())
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
                "segment '{}' is noted and QEMU has no such device: an attach was cut off; attach it again",
                segment.name
            )));
        }
    }
    let ram_blocks = vm.layout(qmp)?.blocks.len();
    if ram_blocks > MAX_BLOCKS {
        return Err(SnapshotError::Impossible(format!(
            "its RAM has {ram_blocks} blocks, and a VM of a snapshot can have {MAX_BLOCKS}; start it with fewer memory devices"
        )));
    }
    Ok(now)
}

/// Refuses device memory that is no segment, which would not be saved.
pub(super) fn check_memory(spec: &VmSpec, qmp: &mut Qmp) -> Result<(), SnapshotError> {
    let blocks = memfold_vm::ram::read_blocks(qmp)?;
    let unnamed = blocks
        .iter()
        .filter(|b| b.name.is_empty() && b.used_bytes > 0);
    if unnamed.count() > spec.segments.len() {
        return Err(SnapshotError::Impossible(
            "it maps device memory that is no segment of memfold's, which QEMU itself would not save either".into(),
        ));
    }
    Ok(())
}

/// Gives frozen overlays a name in the draft, and says where every disk lies.
fn take_over(
    spec: &VmSpec,
    frozen: &[Frozen],
    copies: &[Copied],
    draft: &Draft,
) -> Result<Vec<SavedDisk>, SnapshotError> {
    let mut disks = Vec::new();
    for (number, disk) in spec.disks.iter().enumerate() {
        let own = draft.path().join(disk_name(number));
        let found = frozen.iter().find(|f| f.disk == number);
        if let Some(frozen) = found {
            let kept = if spec.user.is_some() {
                copy_own(&frozen.path, &own)
            } else {
                keep_file(&frozen.path, &own)
            };
            kept.map_err(|source| SnapshotError::Files {
                path: frozen.path.clone(),
                source,
            })?;
            if spec.user.is_some() {
                freeze::check_header(&own, spec, number, draft)?;
            }
        }
        let is_ours = found.is_some() || copies.iter().any(|copy| copy.disk == number);
        let (at, path) = if is_ours {
            (own, PathBuf::from(disk_name(number)))
        } else {
            (disk.path.clone(), disk.path.clone())
        };
        let facts = fs::metadata(&at).map_err(|source| SnapshotError::Files {
            path: at.clone(),
            source,
        })?;
        let is_qcow2 = is_ours || disk.format() == DiskFormat::Qcow2;
        // What a raw disk holds is the guest's: it may look like a header that names files of the host.
        let files = if is_qcow2 {
            freeze::chain(&at)?
        } else {
            Vec::new()
        };
        // The first is the disk itself.
        let backing = backing_files(files.into_iter().skip(1))?;
        disks.push(SavedDisk {
            path,
            format: if is_ours {
                "qcow2".to_owned()
            } else {
                disk.format().driver().to_owned()
            },
            read_only: !is_ours || disk.read_only,
            bytes: facts.len(),
            modified_ns: modified_ns(&facts),
            device: device(&at)?,
            xxh3_128: is_ours.then(|| sum(&at)).transpose()?,
            backing,
        });
    }
    Ok(disks)
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
            "no VM could be started from a snapshot of it, as a trial shows: {why}"
        ))
    })
}

/// A disk's checksum.
pub(super) fn sum(disk: &Path) -> Result<String, SnapshotError> {
    let facts = File::open(disk).and_then(facts);
    let facts = facts.map_err(|source| SnapshotError::Files {
        path: disk.to_owned(),
        source,
    })?;
    Ok(facts.xxh3_128)
}

/// What a path leads to, if that is a block device.
pub(super) fn device(path: &Path) -> Result<Option<BlockDevice>, SnapshotError> {
    BlockDevice::of(path).map_err(|source| SnapshotError::Files {
        path: path.into(),
        source,
    })
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

/// Copies a file that belongs to a VM's user: that user has it open, and could go on writing to it, or put another in its place.
fn copy_own(from: &Path, to: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut from = File::from(rustix::fs::open(from, flags, Mode::empty())?);
    if !from.metadata()?.is_file() {
        return Err(io::Error::other("it is no plain file"));
    }
    let mut to = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(to)?;
    // Shares blocks where the file system can.
    io::copy(&mut from, &mut to)?;
    to.sync_all()
}

/// `MemAvailable` of `/proc/meminfo`.
pub(super) fn host_available_pages() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib * 1024 / PAGE_SIZE)
        .ok_or_else(|| io::Error::other("/proc/meminfo has no MemAvailable"))
}
