//! Snapshots and clones of the daemon's VMs.

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use memfold_api::{RestoreRequest, SaveRequest, VerifyReport, VmInfo};
use memfold_fold::{Command, VmId};
use memfold_ksm::KsmError;
use memfold_snapshot::free::{self, Frames};
use memfold_snapshot::identity::{HAS_GENERATION_ID, Plan};
use memfold_snapshot::manifest::Steps;
use memfold_snapshot::restore::OwnDisks;
use memfold_snapshot::save::Subject;
use memfold_snapshot::working_set::{self, WorkingSet};
use memfold_snapshot::{
    Keep, Manifest, Progress, Shelf, SnapshotError, SnapshotInfo, Step, restore, save, shelf,
};
use memfold_units::PAGE_SIZE;
use memfold_vm::{AgentError, AgentLink, Incoming, LaunchError, Qmp, SegmentSpec};
use memfold_wire::library::Range;
use rustix::process::Pid;
use tracing::{debug, info};

use super::clock;
use super::cut_off::{self, Noted};
use super::ksm::Still;
use super::machine::Machine;
use super::segments::{being_saved, recall_segments};
use super::{Daemon, DaemonError, lock_within};

/// How long a guest may take to write back what is dirty, and, if nothing else is said, to drop its caches.
const DROP_TIMEOUT: Duration = Duration::from_secs(120);

/// What a guest runs first, once what is dirty is written back: its caches go. The agent's events are off meanwhile (`set_event`,
/// `Documentation/trace/events.rst`): telling each page that goes would take most of half the time.
const DROP: &str = r"saved=/run/memfold-events
on() { [ ! -s $saved ] || { cat $saved > set_event && rm $saved; }; }
if cd /sys/kernel/tracing/instances/memfold 2> /dev/null; then
    on
    trap on EXIT
    cat set_event > $saved && : > set_event
fi
echo 3 > /proc/sys/vm/drop_caches";

/// After a drop that was cut off.
const TRACE: &str = "saved=/run/memfold-events
    [ ! -s $saved ] || { cat $saved > /sys/kernel/tracing/instances/memfold/set_event && rm $saved; }";

/// How long it may take to say what it has.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// How long another restore of a guest that cannot be set apart may take.
const TWIN_PATIENCE: Duration = Duration::from_secs(60);

/// How long it may take to list what is free.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);

/// How long another daemon may keep KSM still for a live save of its own.
const MERGING_PATIENCE: Duration = Duration::from_secs(60);

impl Daemon {
    /// Saves a VM. It goes on afterwards, also if this fails.
    pub fn save_snapshot(&self, request: &SaveRequest) -> Result<Manifest, DaemonError> {
        self.save_marked(request, None)
    }

    /// The same; `of_boot` is for the manifest.
    pub(super) fn save_marked(
        &self,
        request: &SaveRequest,
        of_boot: Option<String>,
    ) -> Result<Manifest, DaemonError> {
        let began = Instant::now();
        let machine = self.machine(&request.vm)?;
        let Some(_saving) = machine.try_save() else {
            return Err(SnapshotError::Impossible(
                "a snapshot of this VM is being made; wait until it is done".into(),
            )
            .into());
        };
        let _noted = machine.note_saving();
        // Fails early, and for a name that is taken before the guest drops anything.
        if self.shelf.path(&request.name)?.exists() {
            return Err(SnapshotError::Taken(request.name.clone()).into());
        }
        cut_off::undo(&self.options.state, &machine)?;
        let subject = subject(&machine)?;
        save::mend(&subject, || machine.monitor())?;
        let progress = self.uses.begin(&request.name)?;
        // What its disks are built on isn't removed before the new snapshot says that it needs it.
        // Those of a VM that others started are copied.
        let below = match machine.vm().spec() {
            Some(spec) => restore::below(&self.shelf, spec),
            None => Vec::new(),
        };
        let _below = below
            .into_iter()
            .filter(|name| *name != request.name)
            .map(|name| self.uses.begin(&name))
            .collect::<Result<Vec<_>, _>>()?;
        // The VM may end before its snapshot is whole.
        let segments = machine.vm().segments();
        let kept = |segment: &SegmentSpec| self.uses.begin(&being_saved(&segment.name));
        let _segments = segments.iter().map(kept).collect::<Result<Vec<_>, _>>()?;
        let save = |kept| {
            let of = (&machine, &subject);
            self.save_dropped(of, request, of_boot, began, kept, &progress)
        };
        if request.keep == Keep::All {
            return save(None);
        }
        progress.begin("the guest writes back what is dirty", 0);
        write_back(&machine)?;
        if request.keep == Keep::Hot {
            return save(None);
        }
        progress.begin("the guest drops its caches", 0);
        let limit = request.drop_s.map_or(DROP_TIMEOUT, |seconds| {
            Duration::from_secs(seconds.max(1).into())
        });
        let dropped = drop_caches(&machine, limit);
        let events = match &dropped {
            Ok(None) => Ok(()),
            _ => machine.run(TRACE, LIST_TIMEOUT).map(drop),
        };
        let saved = dropped.and_then(save);
        // Of what went while events were off.
        if let Err(error) = events.and_then(|()| machine.take_inventory()) {
            info!(vm = request.vm, %error, "no inventory after the save");
        }
        saved
    }

    fn save_dropped(
        &self,
        (machine, subject): (&Arc<Machine>, &Subject),
        request: &SaveRequest,
        of_boot: Option<String>,
        began: Instant,
        cache_kept: Option<String>,
        progress: &Progress,
    ) -> Result<Manifest, DaemonError> {
        let mut steps = Steps {
            drop_ms: save::milliseconds(began.elapsed()),
            ..Steps::default()
        };
        // Asked again: what is noted now holds for ever, and a guest that has just dropped its caches may be slow.
        let ask = || machine.run(HAS_GENERATION_ID, ASK_TIMEOUT);
        let asked = ask().or_else(|_| ask());
        let generation_id = asked.is_ok_and(|answer| answer.code == 0);
        progress.begin("the guest lists what is free", 0);
        let listing = Instant::now();
        let merging = request.live.then(|| self.stop_merging()).transpose()?;
        let agent = machine.agent();
        let noted = (machine.vm().spec().is_none())
            .then(|| Noted::new(&self.options.state, machine, subject.spec()))
            .transpose()
            .map_err(|source| DaemonError::State {
                path: self.options.state.clone(),
                source,
            })?;
        let held = Held {
            daemon: self,
            machine,
            agent: agent.as_deref(),
            quiet: RefCell::default(),
            merging: RefCell::new(merging),
            stopped: Cell::new(None),
            stood: Cell::new(Duration::ZERO),
            noted,
        };
        let free = held.free_pages();
        // Devices that write past the page tables: nobody would keep what they write to.
        if let Some(problem) = machine.problem().filter(|_| request.live) {
            return Err(SnapshotError::Impossible(format!(
                "the VM can't be saved live: {problem}"
            ))
            .into());
        }
        if let Err(why) = &free {
            info!(vm = request.vm, why, "free pages are saved too");
        }
        steps.list_ms = save::milliseconds(listing.elapsed());
        let saving = save::Request {
            agent: agent.as_ref().is_some_and(|a| a.session().is_some()),
            generation_id,
            name: request.name.clone(),
            keep: request.keep,
            of_boot,
            live: request.live,
            compress: request.compress,
            domain: machine.domain().map(str::to_owned),
            began,
            free,
            cache_kept,
            steps,
        };
        let manifest = save::save(
            (machine.vm(), subject),
            || machine.monitor(),
            &self.shelf,
            &saving,
            &held,
            progress,
        );
        // For a full disk it stands still for longer than the save has stopped it.
        let may_be_full = matches!(
            manifest,
            Err(SnapshotError::Files { .. } | SnapshotError::Qemu(_))
        );
        let is_late = may_be_full || held.stood_still() >= clock::LONG;
        drop(held);
        if is_late && !request.keep_clock && agent.is_some_and(|a| a.session().is_some()) {
            machine.set_clock_soon();
        }
        let manifest = manifest?;
        info!(
            vm = request.vm,
            snapshot = request.name,
            pause_ms = manifest.pause_ms,
            saved_bytes = manifest.counts.saved_pages * PAGE_SIZE,
            "saved"
        );
        Ok(manifest)
    }

    /// Has KSM stand still, as long as this is kept: a page that it merges is not protected any more (`snapshot::past`).
    fn stop_merging(&self) -> Result<MergingStops<'_>, DaemonError> {
        let alone = self.merging.lock().unwrap_or_else(PoisonError::into_inner);
        let end = Instant::now() + MERGING_PATIENCE;
        loop {
            match self.still() {
                Ok(still) => {
                    return Ok(MergingStops {
                        _still: still,
                        _alone: alone,
                    });
                }
                // Another daemon may be saving a VM live, which is soon over.
                Err(KsmError::Busy(_)) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(error) => {
                    return Err(SnapshotError::Impossible(format!(
                        "KSM can't be stopped for a live snapshot ({error}); save it without --live"
                    ))
                    .into());
                }
            }
        }
    }

    /// How far what is done with a snapshot has come, if anything is.
    pub fn snapshot_progress(&self, name: &str) -> Option<Step> {
        self.uses.now(name)
    }

    /// All snapshots.
    pub fn snapshots(&self) -> Result<Vec<SnapshotInfo>, DaemonError> {
        let names = self.shelf.names().map_err(|source| SnapshotError::Files {
            path: self.options.shelf.clone(),
            source,
        })?;
        let in_maps = names
            .iter()
            .map(|name| restore::in_maps(&self.shelf, name).unwrap_or_default());
        let users = restore::users_of_each(&in_maps.collect::<Vec<_>>())?;
        let infos = names.iter().zip(&users);
        Ok(infos
            .map(|(name, pids)| self.snapshot_info(name, pids))
            .collect())
    }

    fn snapshot_info(&self, name: &str, pids: &[Pid]) -> SnapshotInfo {
        let manifest = self.shelf.manifest(name);
        let users = self
            .lock()
            .values()
            .filter(|m| pids.contains(&m.pid()))
            .map(|m| m.name().to_owned())
            .collect();
        let disk_bytes = self.shelf.disk_bytes(name).unwrap_or(0);
        match manifest {
            Ok(manifest) => SnapshotInfo {
                name: name.to_owned(),
                domain: manifest.domain.clone(),
                vm: manifest.vm.clone(),
                created_s: manifest.created_s,
                memory_bytes: manifest.memory().0,
                disk_bytes,
                users,
                problem: None,
            },
            Err(error) => SnapshotInfo {
                name: name.to_owned(),
                domain: None,
                vm: String::new(),
                created_s: 0,
                memory_bytes: 0,
                disk_bytes,
                users,
                problem: Some(error.to_string()),
            },
        }
    }

    /// What a snapshot says of itself.
    pub fn snapshot(&self, name: &str) -> Result<Manifest, DaemonError> {
        Ok(self.shelf.manifest(name)?)
    }

    /// Reads a snapshot whole and compares its checksums.
    pub fn verify_snapshot(&self, name: &str) -> Result<VerifyReport, DaemonError> {
        let progress = self.uses.begin(name)?;
        let manifest = self.shelf.manifest(name)?;
        let changed = self.shelf.changed_parts(&manifest)?;
        let mut problems: Vec<String> = changed
            .iter()
            .map(|part| format!("{part} was changed since it was saved"))
            .collect();
        // Tables that were changed lead nowhere.
        if changed.iter().all(|part| *part == shelf::DEVICES) {
            let stored = self.shelf.stored(&manifest)?;
            progress.begin("checksums compared", stored.bytes);
            let path = self.options.shelf.join(name).join(shelf::RAM);
            let wrong = stored
                .verify(&progress)
                .map_err(|source| SnapshotError::Files { path, source })?;
            let image = Shelf::image_of(&manifest);
            problems.extend(wrong.iter().map(|chunk| {
                format!("{image} was changed since it was saved, in its chunk {chunk}")
            }));
        }
        progress.begin("disks compared", 0);
        match restore::spec(&self.shelf, &manifest, &manifest.vm) {
            Ok(spec) => {
                problems.extend(restore::changed_disks(&self.shelf, &manifest)?);
                progress.begin("a start tried", 0);
                let tried = self.try_restore(spec, &manifest);
                problems.extend(
                    tried
                        .err()
                        .map(|error| format!("no VM of it can start: {}", super::chain(&error))),
                );
            }
            // Its words name the disk, if that is what is wrong.
            Err(error) => problems.push(error.to_string()),
        }
        Ok(VerifyReport {
            name: name.to_owned(),
            problems,
        })
    }

    /// Removes a snapshot that no VM runs from.
    pub fn remove_snapshot(&self, name: &str) -> Result<(), DaemonError> {
        let _removal = self.uses.remove(name)?;
        let pids = restore::users(&self.shelf, name)?;
        if !pids.is_empty() {
            let pids: Vec<String> = pids
                .iter()
                .map(|pid| pid.as_raw_nonzero().to_string())
                .collect();
            return Err(SnapshotError::InUse {
                name: name.to_owned(),
                pids: pids.join(", "),
            }
            .into());
        }
        let others = restore::built_on(&self.shelf, name)?;
        if !others.is_empty() {
            return Err(SnapshotError::BuiltOn {
                name: name.to_owned(),
                others: others.join(", "),
            }
            .into());
        }
        let saved = self.shelf.manifest(name);
        if let Ok(saved) = &saved {
            self.disks_taken_back(name, &saved.vm)?;
        }
        self.shelf.remove(name)?;
        // It may have been the last that needed an old generation.
        for segment in saved.map(|saved| saved.spec.segments).unwrap_or_default() {
            self.drop_old_segments(segment.base_name());
        }
        Ok(())
    }

    /// The VM that was saved in a snapshot, and goes on, keeps what lies there of its disks.
    fn disks_taken_back(&self, name: &str, vm: &str) -> Result<(), DaemonError> {
        let place = self.shelf.path(name)?;
        let machine = match self.machine(vm) {
            Ok(machine) => machine,
            // It runs, and nobody can ask its QEMU yet.
            Err(error @ DaemonError::Busy { .. }) => return Err(error),
            Err(_) => return Ok(()),
        };
        let _alone = machine.save_right_soon()?;
        // What others started writes its own disks, which are copies in a snapshot.
        if machine.vm().spec().is_none() {
            return Ok(());
        }
        let subject = subject(&machine)?;
        let taken = save::take_back((machine.vm(), &subject), || machine.monitor(), &place);
        if let Err(error) = taken {
            // It runs on with what QEMU has open.
            tracing::warn!(vm, snapshot = name, %error, "it can't be saved again until it is started anew");
        }
        Ok(())
    }

    /// A VM that runs from this snapshot's memory: restored from it, or the one that was saved and went on.
    fn twin(&self, manifest: &Manifest) -> Result<Option<String>, DaemonError> {
        let pids = restore::users(&self.shelf, &manifest.name)?;
        let vms = self.lock();
        let named = |pid: &Pid| {
            let vm = vms.values().find(|m| m.pid() == *pid);
            vm.map_or_else(
                || format!("of process {}", pid.as_raw_nonzero()),
                |m| m.name().to_owned(),
            )
        };
        let restored = pids.first().map(named);
        Ok(restored.or_else(|| vms.contains_key(&manifest.vm).then(|| manifest.vm.clone())))
    }

    /// Starts a VM from a snapshot.
    pub fn restore(
        self: &Arc<Self>,
        snapshot: &str,
        request: &RestoreRequest,
    ) -> Result<VmInfo, DaemonError> {
        // It isn't removed meanwhile, so that all its files are those of one save.
        let progress = self.uses.begin(snapshot)?;
        let manifest = self.shelf.manifest(snapshot)?;
        let mut spec = restore::spec(&self.shelf, &manifest, &request.vm)?;
        // Known here already: disks are long to copy.
        memfold_vm::check_name("name", &request.vm).map_err(LaunchError::from)?;
        if self.lock().contains_key(&request.vm) {
            return Err(DaemonError::NameTaken(request.vm.clone()));
        }
        restore::choose_host_ends(&mut spec, &request.forwards)?;
        let held = manifest.counts.saved_pages * PAGE_SIZE;
        let admitted = self.admit(&request.vm, held, request.despite_brake)?;
        let own_disks = match &request.disks {
            Some(place) => OwnDisks::make(&mut spec, place, &progress)?,
            None => OwnDisks::default(),
        };
        // One at a time, so that none misses the other.
        let _alone = if manifest.tells_twins_apart() {
            None
        } else {
            Some(lock_within(&self.twins, TWIN_PATIENCE).ok_or_else(|| {
                DaemonError::Busy {
                    why:
                        "another VM is being restored whose guest cannot be set apart from this one"
                            .into(),
                    fix: "wait until that is done, or stop that VM if its QEMU hangs".into(),
                }
            })?)
        };
        if !manifest.tells_twins_apart() && !request.force {
            if let Some(other) = self.twin(&manifest)? {
                let name = snapshot.to_owned();
                return Err(SnapshotError::Twin { name, other }.into());
            }
        }
        let plan =
            Plan::new(request.renew, request.keep_clock, &spec).map_err(|error| no_plan(&error))?;
        let ram = self.shelf.checked_ram(&manifest, &progress)?;
        let incoming = Incoming {
            qemu: manifest.qemu,
            machine: manifest.machine.clone(),
            accel: manifest.accel.clone(),
        };
        let launched = self.launch(spec, |state, spec, cancel| {
            let vm = memfold_vm::start_unless(cancel, state, spec, Some(&incoming))?;
            self.share_kernel(&vm);
            let noted = vm.directory().map_or(Ok(()), |place| plan.write(place));
            let filled = noted
                .map_err(|error| no_plan(&error))
                .and_then(|()| Ok(vm.daemon_qmp()?))
                .and_then(|mut qmp| restore::fill(&vm, &mut qmp, &self.shelf, &manifest, &ram));
            if let Err(error) = filled {
                // It goes with the VM's directory.
                let said = vm.directory().map(memfold_vm::log_tail).unwrap_or_default();
                // Nothing half restored stays.
                let _ = vm.stop(Duration::ZERO);
                return Err(match error {
                    SnapshotError::Qemu(why) if !said.is_empty() => {
                        SnapshotError::Qemu(format!("{why}; it said: {said}"))
                    }
                    other => other,
                }
                .into());
            }
            Ok(vm)
        });
        drop(ram);
        if launched.is_err() {
            self.shelf.let_go();
        }
        let info = launched?;
        admitted.started();
        own_disks.keep();
        let Ok(machine) = self.machine(&request.vm) else {
            // It has ended already, perhaps before we had done with its memory.
            self.shelf.let_go();
            return Ok(info);
        };
        self.find_boot_snapshot(&machine);
        recall_segments(&machine);
        self.mind_working_set(machine.clone(), manifest, request.prefetch);
        Ok(machine.info())
    }

    /// Has what VMs of this snapshot use first at hand for this one, or finds out what that is. Beside the VM, which runs.
    fn mind_working_set(
        self: &Arc<Self>,
        machine: Arc<Machine>,
        manifest: Manifest,
        prefetch: bool,
    ) {
        let Ok(place) = self.shelf.path(&manifest.name) else {
            return;
        };
        let known = WorkingSet::read(&place, &manifest.sums.xxh3_128);
        if known.is_some() && !prefetch {
            return;
        }
        let daemon = Arc::downgrade(self);
        let work = move || {
            if let Some(set) = known {
                let places = working_set::places(&manifest, &machine.layout());
                match set.prefetch(machine.pid(), &places) {
                    Ok(pages) => info!(vm = machine.name(), pages, "fetched"),
                    Err(error) => debug!(vm = machine.name(), %error, "not all was fetched"),
                }
                return;
            }
            let (id, name) = (machine.id(), machine.name().to_owned());
            // Who waits keeps nobody alive.
            drop(machine);
            let found = loop {
                std::thread::sleep(working_set::TIME);
                let machine = daemon.upgrade().and_then(|d| d.machine(&name).ok());
                let Some(machine) = machine.filter(|machine| machine.id() == id) else {
                    return;
                };
                // While it is saved, all of its pages may look touched.
                let Some(_saving) = machine.try_save() else {
                    continue;
                };
                let places = working_set::places(&manifest, &machine.layout());
                break WorkingSet::of(machine.pid(), &manifest.sums.xxh3_128, &places);
            };
            match found.and_then(|set| set.write(&place).map(|()| set)) {
                Ok(set) => info!(
                    vm = name,
                    snapshot = manifest.name,
                    bytes = set.bytes(),
                    "used first"
                ),
                Err(error) => debug!(vm = name, %error, "what it used first is not recorded"),
            }
        };
        if let Err(error) = std::thread::Builder::new()
            .name("working-set".into())
            .spawn(work)
        {
            debug!(%error, "no thread for the working set");
        }
    }
}

fn no_plan(error: &std::io::Error) -> SnapshotError {
    SnapshotError::Impossible(format!(
        "the VM can't be given an identity of its own: {error}"
    ))
}

fn subject(machine: &Machine) -> Result<Subject, SnapshotError> {
    let known = (machine.name(), machine.domain());
    Subject::of(machine.vm(), known, &mut machine.monitor())
}

/// Has the guest write what is dirty to its disks, which are to hold what it has cached.
fn write_back(machine: &Machine) -> Result<(), DaemonError> {
    let wrote = machine.run("sync", DROP_TIMEOUT)?;
    if wrote.code != 0 {
        let words = String::from_utf8_lossy(&wrote.stderr).trim().to_owned();
        return Err(DaemonError::BadRequest(format!(
            "the guest did not write back what is dirty ({words}); use --keep all"
        )));
    }
    Ok(())
}

/// Has the guest drop what it can have again. If it takes longer, it is saved with what it has left; says so.
fn drop_caches(machine: &Machine, limit: Duration) -> Result<Option<String>, DaemonError> {
    let dropped = match machine.run(DROP, limit) {
        Err(AgentError::Timeout { seconds }) => {
            return Ok(Some(format!("it took longer than {seconds} s")));
        }
        other => other?,
    };
    if dropped.code != 0 {
        let words = String::from_utf8_lossy(&dropped.stderr).trim().to_owned();
        return Err(DaemonError::BadRequest(format!(
            "the guest did not drop its caches ({words}); use --keep all"
        )));
    }
    Ok(None)
}

/// KSM stands still.
struct MergingStops<'a> {
    _still: Still<'a>,
    /// One live save at a time: the first to end would let KSM run under the others.
    _alone: MutexGuard<'a, ()>,
}

/// A VM whose writes are tracked, or that stands still, until this is dropped.
struct Held<'a> {
    daemon: &'a Daemon,
    machine: &'a Arc<Machine>,
    agent: Option<&'a AgentLink>,
    /// While the VM stands still.
    quiet: RefCell<Option<MutexGuard<'a, ()>>>,
    merging: RefCell<Option<MergingStops<'a>>>,
    /// Since when it stands still for this.
    stopped: Cell<Option<Instant>>,
    /// How long it stood still.
    stood: Cell<Duration>,
    /// Of a VM that memfold didn't start.
    noted: Option<Noted<'a>>,
}

impl Held<'_> {
    fn stood_still(&self) -> Duration {
        self.stood.get()
            + self
                .stopped
                .get()
                .map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Tracks the VM's writes, and then asks it what it has free; or says why that can't be used.
    fn free_pages(&self) -> Result<Vec<Frames>, String> {
        // Pinned memory, for one: devices write to it past the page tables.
        self.machine.look_again();
        if let Some(problem) = self.machine.problem() {
            return Err(problem);
        }
        if self.agent.is_none() {
            return Err("its guest has no agent of memfold's".to_owned());
        }
        self.tell("tracked", Command::Track)?;
        let listed = self.machine.run(free::LIST, LIST_TIMEOUT);
        let listed = listed.map_err(|error| error.to_string())?;
        if listed.code != 0 {
            let words = String::from_utf8_lossy(&listed.stderr).trim().to_owned();
            return Err(format!("the guest can't list them: {words}"));
        }
        free::parse(&listed.stdout, self.machine.ram_pages())
    }

    /// Has the engine do something with the VM that [`Command::Release`] undoes.
    fn tell(
        &self,
        what: &str,
        command: impl FnOnce(VmId, SyncSender<Result<(), String>>) -> Command,
    ) -> Result<(), String> {
        let (answer, answered) = sync_channel(1);
        let failed = |why: &str| format!("the VM can't be {what}: {why}");
        self.daemon
            .tell(command(self.machine.id(), answer))
            .map_err(|error| failed(&error.to_string()))?;
        answered
            .recv()
            .map_err(|_| failed("the fold engine has ended"))?
            .map_err(|why| failed(&why))
    }
}

impl save::Hold for Held<'_> {
    fn stop(&self, qmp: &mut Qmp) -> Result<(), String> {
        self.quiet.replace(self.agent.map(AgentLink::quiet));
        if self.machine.can_stop() {
            self.tell("stopped", Command::Hold)?;
            self.stopped.set(Some(Instant::now()));
            return Ok(());
        }
        // The library has no monitor, so that nobody in QEMU lets the VM go on when we die: the next daemon does.
        let failed = |error: &dyn std::fmt::Display| format!("the VM can't be stopped: {error}");
        if self.machine.vm().has_library() {
            self.tell("left alone", Command::LeaveAlone)?;
        }
        if let Some(noted) = &self.noted {
            noted.stopped(true).map_err(|error| failed(&error))?;
        }
        self.stopped.set(Some(Instant::now()));
        qmp.execute_on_disks("stop", serde_json::Value::Null)
            .map_err(|error| failed(&error))?;
        Ok(())
    }

    fn untrack(&self) -> Result<(), String> {
        if !self.machine.vm().has_library() {
            return Ok(());
        }
        self.tell("left untracked", Command::Untrack)
    }

    fn keep_past(&self, ranges: Vec<Range>, file: OwnedFd) -> Result<(), String> {
        self.tell("kept as it was while it goes on", |id, answer| {
            Command::KeepPast(id, ranges, file, answer)
        })
    }

    fn go_on(&self, qmp: &mut Qmp) -> Result<(), String> {
        let Some(since) = self.stopped.get() else {
            return Ok(());
        };
        if self.machine.can_stop() {
            self.tell("let go on", Command::GoOn)?;
        } else {
            qmp.query("cont").map_err(|error| error.to_string())?;
            if let Some(noted) = &self.noted {
                // If it can't be written, the next daemon lets a VM go on that runs.
                let _ = noted.stopped(false);
            }
        }
        self.stopped.set(None);
        self.stood.set(self.stood.get() + since.elapsed());
        self.quiet.take();
        Ok(())
    }

    fn let_go(&self) {
        // The engine ends only when the daemon does, and then the library lets the VM go on.
        let _ = self.daemon.tell(Command::Release(self.machine.id()));
        self.quiet.take();
        self.merging.take();
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        save::Hold::let_go(self);
    }
}
