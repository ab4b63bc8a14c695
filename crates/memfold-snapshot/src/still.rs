//! Does the part of a save that needs the VM to be stopped: saves the devices' state and RAM, and
//! switches the VM to new disk overlays. With `--live`, RAM is only write-protected now, and copied
//! after the VM has resumed.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use memfold_host::groups::Group;
use memfold_host::progress::Progress;
use memfold_units::PAGE_SIZE;
use memfold_vm::{Qmp, RamLayout, Vm};
use memfold_wire::library::Range;
use rustix::io::Errno;
use serde_json::json;

use super::candidates::Candidates;
use super::copy_budget::{COPIES, CopyShare};
use super::disk_copy::{self, Copied};
use super::draft::Draft;
use super::encryption::{self, DataKey};
use super::error::{SnapshotError, failed};
use super::file_facts::facts;
use super::free::{self, Frames};
use super::freeze::{self, Frozen};
use super::image::Source;
use super::manifest::{DEVICES, FileFacts, RAM, Steps};
use super::page_copies::{PageCopies, Room};
use super::parent::Parent;
use super::past::Past;
use super::plan::{Plan, read_maps};
use super::request::{Request, milliseconds};
use super::subject::Subject;
use super::writer::Writer;

/// Parts of the memory that no other save has, of what the host has available: the part that copies
/// of a layer's pages may take, and the part for old contents of a live save's pages. The rest is
/// for the guests.
const COPIED_PART: u64 = 4;
const PAST_PART: u64 = 2;

/// Longest wait for memory of other saves that run at once.
const PATIENCE: Duration = Duration::from_secs(5);

/// Pages that a VM is expected to write between a look at it and its stop.
const MORE_PAGES: u64 = 2048;

/// Stops and resumes a VM for its snapshot. Dropping the value resumes the VM and the folding of
/// its memory.
pub trait Hold {
    /// Returns the page frames that the guest listed as free after tracking of its writes began, or
    /// the reason why there is no list. Called once, before the VM is stopped.
    fn free_pages(&self) -> Result<Vec<Frames>, String>;

    /// Stops the VM. `qmp` is the VM's monitor.
    fn stop(&self, qmp: &mut Qmp) -> Result<(), String>;

    /// Makes the library in QEMU copy pages of `ranges` into `file` before the VM overwrites them.
    fn keep_past(&self, ranges: Vec<Range>, file: OwnedFd) -> Result<(), String>;

    /// Ends tracking of the VM's writes.
    fn untrack(&self) -> Result<(), String>;

    /// Resumes the VM, if `stop` has stopped it.
    fn go_on(&self, qmp: &mut Qmp) -> Result<(), String>;

    /// Releases the VM, because the snapshot needs nothing more from it.
    fn let_go(&self);
}

/// Protected memory of a live save, and its share of the host's memory for old contents.
type KeptPast = (Past, CopyShare);

/// Parts of a snapshot that were saved while the VM was stopped.
pub(super) struct Still<'a> {
    pub(super) steps: Steps,
    pub(super) devices: FileFacts,
    pub(super) free_kept: Option<String>,
    pub(super) plan: Plan,
    /// For a live save, the protected memory.
    pub(super) past: Option<KeptPast>,
    /// Numbers of the blocks that must still be written.
    pub(super) later: Vec<usize>,
    pub(super) writer: Writer<'a>,
    pub(super) pause: Duration,
}

/// A running save: the VM, and the options of the save.
pub(super) struct Attempt<'a, M, H> {
    pub(super) vm: &'a Vm,
    pub(super) subject: &'a Subject,
    pub(super) monitor: &'a M,
    pub(super) request: &'a Request,
    pub(super) hold: &'a H,
    pub(super) progress: &'a Progress,
    /// The snapshot's data key, if its memory is encrypted.
    pub(super) key: Option<&'a DataKey>,
}

impl<M, H: Hold> Attempt<'_, M, H> {
    /// Resumes the VM. If this fails, the library resumes the VM when its connection ends.
    pub(super) fn go_on(&self, qmp: &mut Qmp) {
        if let Err(error) = self.hold.go_on(qmp) {
            tracing::warn!(
                vm = self.vm.name(),
                error,
                "cannot resume the VM after its save; run 'memfold vm resume'"
            );
        }
    }

    /// Begins to allocate room for copies of the pages that a layer has to save, while the save is
    /// prepared. `None` if they are no layer's, or too many.
    pub(super) fn begin_room(&self) -> io::Result<Option<JoinHandle<Room>>> {
        if self.request.parent.is_none() {
            return Ok(None);
        }
        // Some more, because the VM goes on writing.
        let pages = self.request.changed + self.request.changed / 8 + MORE_PAGES;
        let share = COPIES.take(pages, COPIED_PART, PATIENCE)?;
        let room = share.map(|share| thread::Builder::new().spawn(move || Room::new(share)));
        room.transpose()
    }

    /// Stops the VM, saves the parts that must be from one instant, and resumes the VM.
    pub(super) fn save_still<'r>(
        &self,
        qmp: &mut Qmp,
        (draft, ram): (&Draft, &'r File),
        (frozen, copies): (&[Frozen], &[Copied]),
        room: Option<JoinHandle<Room>>,
    ) -> Result<Still<'r>, SnapshotError> {
        let (vm, spec, hold) = (self.vm, &self.subject.spec, self.hold);
        let (request, progress) = (self.request, self.progress);
        let failed = draft.failed(RAM);
        let mut steps = request.steps;
        let began = Instant::now();
        let candidates = if request.candidates.is_empty() {
            Candidates::default()
        } else {
            let layout = vm.layout(qmp)?;
            Candidates::find(vm.pid(), &layout, spec, frozen, &request.candidates)
        };
        steps.refer_ms = milliseconds(began.elapsed());
        let room = room.and_then(|room| room.join().ok());
        let waiting = Instant::now();
        let free = hold.free_pages();
        steps.list_ms = milliseconds(waiting.elapsed());
        let blocks = sources(qmp)?;
        hold.stop(qmp).map_err(SnapshotError::Impossible)?;
        let stopped = Instant::now();
        // A VM with thousands of mappings takes milliseconds to list them. QEMU maps nothing else
        // meanwhile.
        let (devices, maps) = thread::scope(|scope| {
            let maps = scope.spawn(|| read_maps(vm.pid()));
            (device_state(qmp, draft, self.key), maps.join())
        });
        let (devices, maps) = (devices?, maps.unwrap_or_else(|_| read_maps(vm.pid())));
        let maps = maps.map_err(&failed)?;
        steps.devices_ms = milliseconds(stopped.elapsed());
        let began = Instant::now();
        // QEMU is asked only for what is needed, because the VM stands still.
        let free = match free {
            Ok(frames) => free::unwritten(vm.pid(), &vm.layout(qmp)?, &frames)
                .map_err(|error| format!("cannot read which pages were written: {error}")),
            Err(why) => Err(why),
        };
        // Write tracking leaves a mark on untouched pages that looks like a page in swap.
        hold.untrack().map_err(SnapshotError::Impossible)?;
        let given = free.as_deref().unwrap_or_default();
        let parent = request.parent.clone();
        let plan = Plan::with_maps(vm.pid(), &maps, blocks, given, parent.as_deref());
        let mut plan = plan.map_err(&failed)?;
        // A VM that has written much more since the look is written to the disk at once.
        if let Some(mut room) = room {
            if room.fits(plan.pages()).map_err(&failed)? {
                let copied = PageCopies::take(plan.pid, (&plan.blocks, &plan.ranges), room);
                plan.copied = Some(copied.map_err(&failed)?);
            }
        }
        let protect = || keep_past(vm, &vm.layout(qmp)?, &plan, hold);
        let past = (request.live && plan.copied.is_none()).then(protect);
        let (past, mut later) = past.transpose()?.flatten().unzip();
        if plan.copied.is_some() {
            later = Some((0..plan.blocks.len()).collect());
        }
        let later: Vec<usize> = later.unwrap_or_default();
        let mut writer = Writer::new(&plan, ram, parent).map_err(&failed)?;
        writer.keep_reserve(&draft.path);
        if let Some(key) = self.key {
            writer.seal(key, request.compress).map_err(&failed)?;
        }
        if request.fork {
            // Forks must start soon, and their layer is removed with them.
            writer.trust_parent_if_large(&plan);
        }
        writer.compare_with(&plan, candidates).map_err(&failed)?;
        // An image that will be compressed should not be written to the disk before, and a fork
        // should not wait for the disk.
        if !request.fork && (!request.compress || self.key.is_some()) {
            writer.write_back().map_err(&failed)?;
        }
        let pages = plan.blocks.iter().map(|block| block.pages);
        progress.begin("RAM saved", pages.sum::<u64>() * PAGE_SIZE);
        let mut still: Vec<usize> = (0..plan.blocks.len()).collect();
        still.retain(|number| !later.contains(number));
        let written = writer.blocks(&plan, &still, None, progress);
        written.map_err(&failed)?;
        steps.ram_ms = milliseconds(began.elapsed());
        let began = Instant::now();
        disk_copy::begin(qmp, spec, copies)?;
        freeze::switch(qmp, frozen)?;
        if qmp.query("query-status")?["running"] == true {
            return Err(SnapshotError::Impossible(
                "another program resumed the VM during the save, so the saved disks may not match the saved RAM; save the VM again, and let no other program resume it meanwhile".into(),
            ));
        }
        steps.disks_ms = milliseconds(began.elapsed());
        self.go_on(qmp);
        Ok(Still {
            steps,
            devices,
            free_kept: free.err(),
            plan,
            past,
            later,
            writer,
            pause: stopped.elapsed(),
        })
    }
}

/// Returns how many pages of a running VM are not its parent's now; without a parent, how many
/// pages it has.
pub fn changed_pages(
    vm: &Vm,
    qmp: &mut Qmp,
    parent: Option<&Parent>,
) -> Result<u64, SnapshotError> {
    let plan = Plan::new(vm.pid(), sources(qmp)?, &[], parent);
    Ok(plan.map_err(failed(RAM))?.pages())
}

/// Makes the library keep old contents of the VM's RAM. Returns the protected memory with the share
/// of the host's memory for its old contents, and the numbers of its blocks.
fn keep_past(
    vm: &Vm,
    layout: &RamLayout,
    plan: &Plan,
    hold: &impl Hold,
) -> Result<Option<(KeptPast, Vec<usize>)>, SnapshotError> {
    let failed = |error: io::Error| {
        let why = format!("no space for copies of pages that the VM writes to: {error}");
        SnapshotError::Impossible(why)
    };
    let is_ram = |source: &Source| layout.blocks.iter().any(|block| block.hva == source.hva);
    let all = plan.blocks.iter().enumerate();
    let mut live: Vec<(usize, &Source)> = all.filter(|(_, block)| is_ram(block)).collect();
    live.sort_by_key(|(_, block)| block.hva);
    let ends = |block: &Source| block.hva..block.hva.add_pages(block.pages);
    let blocks: Vec<_> = live.iter().map(|(_, block)| ends(block)).collect();
    let wanted: Vec<_> = live.iter().flat_map(|(n, _)| plan.wanted(*n)).collect();
    let most = wanted
        .iter()
        .map(|range| range.end.pages_since(range.start));
    // QEMU keeps the old contents, so the limits of its control groups count, too.
    let groups = Group::of_all(&[vm.pid().as_raw_nonzero().get()]);
    let left = groups.iter().filter_map(Group::room);
    let left = left
        .map(|room| room.available / PAGE_SIZE / PAST_PART)
        .min();
    let most = most.sum::<u64>().min(left.unwrap_or(u64::MAX));
    let share = COPIES.take_up_to(most, PAST_PART).map_err(failed)?;
    let past = Past::new(vm.pid(), &blocks, &wanted, share.pages());
    let Some(past) = past.map_err(failed)? else {
        return Ok(None);
    };
    let file = past.descriptor().map_err(failed)?;
    hold.keep_past(past.ranges(), file)
        .map_err(SnapshotError::Impossible)?;
    let numbers = live.into_iter().map(|(number, _)| number).collect();
    Ok(Some(((past, share), numbers)))
}

/// Makes QEMU write its device state into the draft. State that is to be encrypted with `key` is
/// written to memory first.
fn device_state(
    qmp: &mut Qmp,
    draft: &Draft,
    key: Option<&DataKey>,
) -> Result<FileFacts, SnapshotError> {
    let mut file = draft.file(DEVICES)?;
    let path = draft.path.join(DEVICES);
    let failed = failed(path.as_path());
    let plain = key.map(|_| encryption::memory_file()).transpose();
    let plain = plain.map_err(failed)?;
    // QEMU takes only a descriptor that cannot be read.
    let at = match &plain {
        Some(plain) => PathBuf::from(format!("/proc/self/fd/{}", plain.as_raw_fd())),
        None => path.clone(),
    };
    let writable = File::options().write(true).open(&at).map_err(failed)?;
    let place = qmp.lend(writable.as_fd())?;
    let into = json!({ "filename": place.path(), "live": false });
    let done = qmp.execute_on_disks("xen-save-devices-state", into);
    qmp.take_back(&place)?;
    // QEMU does not report the reason of a failed write.
    let is_full = || rustix::fs::fstatvfs(&file).is_ok_and(|disk| disk.f_bavail == 0);
    if done.is_err() && is_full() {
        return Err(failed(Errno::NOSPC.into()));
    }
    done?;
    if writable.metadata().map_err(failed)?.len() == 0 {
        return Err(failed(io::Error::other("QEMU wrote no device state")));
    }
    if let Some((key, mut plain)) = key.zip(plain) {
        let mut state = Vec::new();
        let read = plain.read_to_end(&mut state);
        let sealed = read.and_then(|_| key.seal_file(DEVICES, &[], state));
        let written = sealed.and_then(|sealed| file.write_all(&sealed));
        written.map_err(failed)?;
    }
    facts(file).map_err(failed)
}

/// Returns all RAM blocks of QEMU that belong to the VM. Blocks without a name are files that QEMU
/// maps (segments), which QEMU's migration would not include either.
fn sources(qmp: &mut Qmp) -> Result<Vec<Source>, SnapshotError> {
    let mut blocks = memfold_vm::ram::read_blocks(qmp)?;
    blocks.retain(|block| block.used_bytes > 0 && !block.name.is_empty());
    let sources = blocks.into_iter().map(|block| Source {
        name: block.name,
        hva: block.hva,
        pages: block.used_bytes.div_ceil(PAGE_SIZE),
    });
    Ok(sources.collect())
}
