//! Saves what must be of one instant while the VM is stopped: device state, RAM (unless it is
//! copied later, in a live save), and the switch of the disks.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use memfold_host::progress::Progress;
use memfold_units::PAGE_SIZE;
use memfold_vm::{Qmp, RamLayout, Vm, VmSpec};
use memfold_wire::library::Range;
use rustix::io::Errno;
use serde_json::json;

use super::candidates::Candidates;
use super::disk_copy::{self, Copied};
use super::draft::Draft;
use super::error::{SnapshotError, failed};
use super::file_facts::facts;
use super::free;
use super::freeze::{self, Frozen};
use super::host_memory::host_available_pages;
use super::image::{Plan, Source};
use super::manifest::{DEVICES, FileFacts, RAM, Steps};
use super::past::Past;
use super::request::{Request, milliseconds};
use super::writer::Writer;

/// Stops and resumes a VM for its snapshot. Dropping the value resumes the VM and its folding.
pub trait Hold {
    /// Stops the VM, whose monitor this is.
    fn stop(&self, qmp: &mut Qmp) -> Result<(), String>;

    /// Makes the library keep the contents of these ranges in this file before they are
    /// overwritten.
    fn keep_past(&self, ranges: Vec<Range>, file: OwnedFd) -> Result<(), String>;

    /// Ends tracking of the VM's writes.
    fn untrack(&self) -> Result<(), String>;

    /// Resumes the VM, if it was stopped.
    fn go_on(&self, qmp: &mut Qmp) -> Result<(), String>;

    /// Releases the VM: the snapshot needs nothing more from it.
    fn let_go(&self);
}

/// What was saved while the VM stood still.
pub(super) struct Still<'a> {
    pub(super) steps: Steps,
    pub(super) devices: FileFacts,
    pub(super) free_kept: Option<String>,
    pub(super) plan: Plan,
    /// Blocks that are to be copied yet, and what they held.
    pub(super) past: Option<(Past, Vec<usize>)>,
    pub(super) writer: Writer<'a>,
    pub(super) pause: Duration,
}

/// Lets a VM go on. Its library does so in any case, at the latest when its connection ends.
pub(super) fn go_on(vm: &Vm, hold: &impl Hold, qmp: &mut Qmp) {
    if let Err(error) = hold.go_on(qmp) {
        tracing::warn!(
            vm = vm.name(),
            error,
            "cannot resume the VM after its save; run 'memfold vm resume'"
        );
    }
}

/// Stops the VM, does what has to be of one instant, and lets it go on.
#[allow(clippy::too_many_arguments)] // parts of one save
pub(super) fn stand_still<'a>(
    (vm, spec): (&Vm, &VmSpec),
    qmp: &mut Qmp,
    (draft, ram): (&Draft, &'a File),
    (frozen, copies): (&[Frozen], &[Copied]),
    request: &Request,
    hold: &impl Hold,
    progress: &Progress,
) -> Result<Still<'a>, SnapshotError> {
    let failed = draft.failed(RAM);
    let mut steps = request.steps;
    let began = Instant::now();
    let layout = vm.layout(qmp)?;
    let candidates = Candidates::find(vm.pid(), &layout, spec, frozen, &request.candidates);
    steps.refer_ms = milliseconds(began.elapsed());
    hold.stop(qmp).map_err(SnapshotError::Impossible)?;
    let stopped = Instant::now();
    let devices = device_state(qmp, draft)?;
    steps.devices_ms = milliseconds(stopped.elapsed());
    let began = Instant::now();
    let layout = vm.layout(qmp)?;
    let free = request.free.clone().and_then(|frames| {
        free::unwritten(vm.pid(), &layout, &frames)
            .map_err(|error| format!("cannot read which pages were written: {error}"))
    });
    // Of a page that was never touched, tracking leaves a mark that looks like a page in swap.
    hold.untrack().map_err(SnapshotError::Impossible)?;
    let given = free.as_deref().unwrap_or_default();
    let plan = Plan::new(vm.pid(), sources(qmp)?, given).map_err(&failed)?;
    let past = if request.live {
        keep_past(vm, &layout, &plan, hold)?
    } else {
        None
    };
    let mut writer = Writer::new(&plan, ram).map_err(&failed)?;
    writer.compare_with(candidates);
    // An image that is taken apart again would go to the disk in vain.
    if !request.compress {
        writer.write_back().map_err(&failed)?;
    }
    let pages = plan.blocks().iter().map(|block| block.pages);
    progress.begin("RAM saved", pages.sum::<u64>() * PAGE_SIZE);
    let is_live = |number: &usize| past.as_ref().is_some_and(|(_, live)| live.contains(number));
    let still: Vec<usize> = (0..plan.blocks().len())
        .filter(|number| !is_live(number))
        .collect();
    writer
        .blocks(&plan, &still, None, progress)
        .map_err(&failed)?;
    steps.ram_ms = milliseconds(began.elapsed());
    let began = Instant::now();
    disk_copy::begin(qmp, spec, copies)?;
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
        SnapshotError::Impossible(format!(
            "no space for copies of pages that the VM writes to: {error}"
        ))
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

/// Has QEMU write its device state into the draft.
fn device_state(qmp: &mut Qmp, draft: &Draft) -> Result<FileFacts, SnapshotError> {
    let file = draft.file(DEVICES)?;
    let path = draft.path().join(DEVICES);
    let failed = failed(path.as_path());
    let writable = File::options().write(true).open(&path).map_err(failed)?;
    let place = qmp.lend(writable.as_fd())?;
    let done = qmp.execute_on_disks(
        "xen-save-devices-state",
        json!({ "filename": place.path(), "live": false }),
    );
    qmp.take_back(&place)?;
    // QEMU does not say what was in its way.
    let is_full = || rustix::fs::fstatvfs(&writable).is_ok_and(|disk| disk.f_bavail == 0);
    if done.is_err() && is_full() {
        return Err(failed(Errno::NOSPC.into()));
    }
    done?;
    let facts = facts(file).map_err(failed)?;
    if facts.bytes == 0 {
        return Err(failed(io::Error::other("QEMU wrote no device state")));
    }
    Ok(facts)
}

/// Every RAM block of QEMU that goes with the VM: those without a name are files that it maps
/// (segments), which no migration would take either.
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
