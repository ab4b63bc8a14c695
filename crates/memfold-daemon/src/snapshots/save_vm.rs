//! Saves VMs as snapshots. Before a save, the guest writes dirty pages back, and may drop caches
//! that it can read again from its disks.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{KeepChoice, SaveRequest};
use memfold_snapshot::manifest::Steps;
use memfold_snapshot::save::{self, Encrypt, Subject};
use memfold_snapshot::{Candidate, Keep, Manifest, Progress, SnapshotError, cached_part, restore};
use memfold_units::PAGE_SIZE;
use memfold_vm::{AgentError, CommandResult, SegmentSpec};
use memfold_wire::order::{DROP_LATE, GuestOrder, PathList};
use tracing::info;

use crate::error::{DaemonError, state_error};
use crate::interrupted_save::{self, NotedSave};
use crate::locks::SaveRight;
use crate::machine::pauses::LONG;
use crate::machine::{Machine, text};
use crate::snapshot_locks::being_saved;
use crate::snapshots::candidates;
use crate::snapshots::choose::{Facts, disk_speed, drop_limit};
use crate::snapshots::hold::{HeldVm, NOT_ASKED};
use crate::snapshots::parent::Base;
use crate::snapshots::save_kind::SaveKind;
use crate::snapshots::{Snapshots, subject};

/// Time limit for a guest to report whether it has a VM generation ID.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

/// Time for which a measured throughput of the disk is valid.
const SPEED_LASTS: Duration = Duration::from_secs(600);

/// Result of preparing the guest for a save.
struct Prepared {
    keep: Keep,
    /// Why the guest still has caches that it was told to drop; `None` if it has dropped them.
    cache_kept: Option<String>,
    /// Pages of the VM's memory that the guest's disks may also hold.
    candidates: Vec<Candidate>,
    /// Why memfold chose `keep`; `None` if the request named it.
    keep_reason: Option<String>,
    /// Whether the guest's kernel knows its VM generation ID.
    generation_id: bool,
    /// Boot ID of the guest's kernel; `None` if no agent tells it.
    guest_boot: Option<String>,
    /// Why all pages are saved although the VM runs from a snapshot.
    whole_reason: Option<String>,
}

impl Snapshots {
    /// Saves a VM. The VM continues to run afterwards, even if the save fails.
    pub fn save(&self, request: &SaveRequest) -> Result<Manifest, DaemonError> {
        self.save_as(request, &SaveKind::Asked)
    }

    /// Saves a VM as [`Snapshots::save`] does, as a snapshot of this kind.
    pub(crate) fn save_as(
        &self,
        request: &SaveRequest,
        kind: &SaveKind,
    ) -> Result<Manifest, DaemonError> {
        let began = Instant::now();
        let machine = self.below.registry.machine(&request.vm)?;
        if let Some(why) = machine.arriving() {
            return Err(SnapshotError::Busy(format!(
                "the VM cannot be saved while its own snapshot is still {why}; wait until the snapshot is complete ('memfold snapshot list')"
            ))
            .into());
        }
        self.refuse_if_interrupted(&request.name)?;
        self.shared(&request.vm);
        let right = machine.save_right_unless_saved()?;
        let _noted = machine.note_saving();
        // A taken name is refused before the guest drops anything.
        if self.below.snapshots.path(&request.name)?.exists() {
            return Err(SnapshotError::Taken(request.name.clone()).into());
        }
        let encrypt = self.encryption(request)?;
        interrupted_save::undo(self.below.registry.state(), &machine, &right)?;
        let subject = subject(&machine)?;
        if let Some(encrypt) = &encrypt {
            save::check_disks(&subject, encrypt)?;
        }
        let progress = self.below.snapshot_locks.begin(&request.name)?;
        // Snapshots that the VM's disks are built on are not removed until the new snapshot records
        // that it needs them. Disks of a VM that memfold did not start are copied.
        let below = machine
            .vm()
            .spec()
            .map(|spec| restore::below(&self.below.snapshots, spec));
        let _below = below
            .into_iter()
            .flatten()
            .filter(|name| *name != request.name)
            .map(|name| self.below.snapshot_locks.begin(&name))
            .collect::<Result<Vec<_>, _>>()?;
        // The VM may end before its snapshot is complete.
        let segments = machine.vm().segments();
        let kept =
            |segment: &SegmentSpec| self.below.snapshot_locks.begin(&being_saved(&segment.name));
        let _segments = segments.iter().map(kept).collect::<Result<Vec<_>, _>>()?;
        let (mended, base) = std::thread::scope(|scope| {
            let mended = scope.spawn(|| save::mend(&subject, || machine.monitor()));
            let base = self.base(&machine, request, kind, &progress);
            (mended.join(), base)
        });
        mended.unwrap_or_else(|panic| resume_unwind(panic))?;
        let (base, whole_reason) = base?;
        let base = base.as_ref();
        if kind.is_fork() {
            let pages = match base {
                Some(base) => base.changed,
                None => save::changed_pages(machine.vm(), &mut machine.monitor(), None)?,
            };
            save::check_room(&self.below.snapshots, machine.name(), pages, base.is_some())?;
        } else {
            save::check_reserve(&self.below.snapshots, machine.name())?;
        }
        let save = |prepared| {
            let of = (&machine, &subject, &right);
            let request = (request, encrypt.clone());
            self.save_prepared(of, request, (kind, base), began, prepared, &progress)
        };
        let of_origin = base.filter(|base| base.is_origin);
        // Two questions to the guest at once, because each takes an emulated guest a while.
        let ((guest_boot, generation_id), prepared) = std::thread::scope(|scope| {
            let asked = scope.spawn(|| boot_and_generation_id(&machine, of_origin));
            let prepared = self.prepare(&machine, &subject, (request.keep, base), &progress);
            (asked.join().unwrap_or_default(), prepared)
        });
        let mut prepared = prepared?;
        (prepared.guest_boot, prepared.generation_id) = (guest_boot, generation_id);
        prepared.whole_reason = whole_reason;
        if prepared.keep != Keep::None {
            return save(prepared);
        }
        progress.begin("guest drops its caches", 0);
        let (cached, files) = candidates::most_cached_files(&self.below.folding, &machine);
        let limit = match request.drop_s {
            Some(seconds) => Duration::from_secs(seconds.max(1).into()),
            None => drop_limit(cached, self.disk_speed()),
        };
        let dropped = drop_caches(&machine, &files, limit);
        // A user who did not ask for this way gets a snapshot all the same.
        let dropped = match dropped {
            Err(error) if prepared.keep_reason.is_some() => Ok(Some(error.to_string())),
            dropped => dropped,
        };
        let is_done = matches!(dropped, Ok(None));
        let events = if is_done {
            Ok(())
        } else {
            trace_again(&machine)
        };
        let saved = dropped.and_then(|cache_kept| {
            prepared.cache_kept = cache_kept;
            save(prepared)
        });
        // The inventory reports pages that were dropped while events were off.
        if let Err(error) = events.and_then(|()| machine.take_inventory()) {
            info!(vm = request.vm, %error, "cannot have the guest report its cached files again after the save");
        }
        saved
    }

    /// Returns how a request's snapshot is encrypted. Fails before the guest drops anything if
    /// there is no such key, or if the request contradicts itself.
    fn encryption(&self, request: &SaveRequest) -> Result<Option<Encrypt>, DaemonError> {
        let no = |why: &str| Err(DaemonError::BadRequest(why.into()));
        if !request.encrypt {
            if request.key.is_some() || request.plain_disks {
                return no(
                    "'key' and 'plain_disks' are for encrypted snapshots; set 'encrypt', too",
                );
            }
            return Ok(None);
        }
        if request.parent.is_some() {
            return no(
                "an encrypted snapshot has all pages, and refers to no parent; leave out 'parent' or 'encrypt'",
            );
        }
        let keys = self.below.snapshots.keys();
        let key = keys.choose(request.key.as_deref());
        let key = key.map_err(SnapshotError::from)?;
        // The key may come from a program that fails.
        keys.load(&key).map_err(SnapshotError::from)?;
        Ok(Some(Encrypt {
            key,
            plain_disks: request.plain_disks,
        }))
    }

    /// Prepares a guest for a save that keeps `choice` of its page cache. Caches are not dropped
    /// here.
    fn prepare(
        &self,
        machine: &Machine,
        subject: &Subject,
        (choice, base): (KeepChoice, Option<&Base<'_>>),
        progress: &Progress,
    ) -> Result<Prepared, DaemonError> {
        let prepared = |keep, candidates, keep_reason| Prepared {
            keep,
            cache_kept: None,
            candidates,
            keep_reason,
            generation_id: false,
            guest_boot: None,
            whole_reason: None,
        };
        let all = |reason: String| Ok(prepared(Keep::All, Vec::new(), Some(reason)));
        let is_chosen = choice == KeepChoice::Auto;
        let has_agent = machine.agent().is_some_and(|a| a.session().is_some());
        if choice == KeepChoice::All {
            return Ok(prepared(Keep::All, Vec::new(), None));
        }
        if let Some(reason) = base.and_then(|base| base.needs_no_answers(choice)) {
            return all(reason);
        }
        if is_chosen && !has_agent {
            return all("the guest has no memfold-agent to say where its page cache lies".into());
        }
        progress.begin("guest writes back dirty pages", 0);
        match write_back(machine) {
            Err(error) if is_chosen => return all(error.to_string()),
            written => written?,
        }
        if choice == KeepChoice::None {
            return Ok(prepared(Keep::None, Vec::new(), None));
        }
        progress.begin("guest reports the places of its files", 0);
        let found = candidates::find(&self.below.folding, machine);
        if choice == KeepChoice::Hot {
            return Ok(prepared(Keep::Hot, found.candidates, None));
        }
        let on_disks = found.candidates.iter().map(|run| run.pages).sum();
        let facts = Facts {
            cached: found.cached,
            on_disks,
            on_host: cached_part(subject.spec(), on_disks),
            disk_per_s: self.disk_speed(),
            is_emulated: subject.is_emulated(),
        };
        let (keep, reason) = facts.choose();
        let candidates = match keep {
            Keep::Hot => found.candidates,
            Keep::None | Keep::All => Vec::new(),
        };
        Ok(prepared(keep, candidates, Some(reason)))
    }

    /// Returns the throughput of the disk with the snapshot directory, in bytes a second. A
    /// measurement is valid for [`SPEED_LASTS`].
    fn disk_speed(&self) -> f64 {
        let mut known = self.disk_speed.lock();
        if let Some((_, speed)) = known.filter(|(since, _)| since.elapsed() < SPEED_LASTS) {
            return speed;
        }
        let speed = disk_speed(self.below.snapshots.root());
        *known = Some((Instant::now(), speed));
        speed
    }

    fn save_prepared(
        &self,
        (machine, subject, right): (&Arc<Machine>, &Subject, &SaveRight<'_>),
        (request, encrypt): (&SaveRequest, Option<Encrypt>),
        (kind, base): (&SaveKind, Option<&Base<'_>>),
        began: Instant,
        prepared: Prepared,
        progress: &Progress,
    ) -> Result<Manifest, DaemonError> {
        let steps = Steps {
            drop_ms: save::milliseconds(began.elapsed()),
            ..Steps::default()
        };
        progress.begin("guest lists its free pages", 0);
        let merging = request
            .live
            .then(|| self.below.ksm.stop_merging())
            .transpose()?;
        let agent = machine.agent();
        let can_stop = machine.can_stop();
        let noted = (machine.vm().spec().is_none() || !can_stop)
            .then(|| NotedSave::new(self.below.registry.state(), machine, right, subject.spec()))
            .transpose()
            .map_err(state_error(self.below.registry.state()))?;
        let folding = &self.below.folding;
        let held = HeldVm::new(folding, machine, can_stop, agent.as_deref(), merging, noted);
        let is_small = base.is_some_and(|base| base.needs_no_answers(request.keep).is_some());
        if !is_small && *kind != SaveKind::Fork {
            held.ask_free_pages();
        }
        // Devices that write past the page tables: such writes cannot be tracked.
        if let Some(problem) = machine.problem().filter(|_| request.live) {
            return Err(
                SnapshotError::Impossible(format!("cannot save the VM live: {problem}")).into(),
            );
        }
        let saving = save::Request {
            agent: agent.as_ref().is_some_and(|a| a.session().is_some()),
            generation_id: prepared.generation_id,
            guest_boot: prepared.guest_boot,
            name: request.name.clone(),
            keep: prepared.keep,
            keep_reason: prepared.keep_reason,
            whole_reason: prepared.whole_reason,
            of_boot: match kind {
                SaveKind::Boot(mark) => mark.clone(),
                SaveKind::Asked | SaveKind::Fork | SaveKind::KeptFork => None,
            },
            fork: *kind == SaveKind::Fork,
            live: request.live,
            compress: request.compress,
            encrypt,
            domain: machine.domain().map(str::to_owned),
            began,
            cache_kept: prepared.cache_kept,
            parent: base.map(|base| base.parent.clone()),
            changed: base.map_or(0, |base| base.changed),
            cpu: base.and_then(|base| base.manifest.cpu.clone().filter(|_| base.is_origin)),
            candidates: prepared.candidates,
            steps,
        };
        let manifest = save::save(
            (machine.vm(), subject),
            || machine.monitor(),
            &self.below.snapshots,
            &saving,
            &held,
            progress,
        );
        // After an error with a full disk, the VM may be stopped for longer than by the save.
        let may_be_full = matches!(
            manifest,
            Err(SnapshotError::Files { .. } | SnapshotError::Qemu(_))
        );
        let is_late = may_be_full || held.stood_still() >= LONG;
        drop(held);
        if is_late && !request.keep_clock && agent.is_some_and(|a| a.session().is_some()) {
            machine.set_clock_soon();
        }
        let manifest = manifest?;
        let why = manifest.free_kept.as_ref();
        if let Some(why) = why.filter(|why| *why != NOT_ASKED) {
            info!(
                vm = request.vm,
                why,
                "cannot tell which of the guest's pages were free, so the snapshot contains free pages too"
            );
        }
        info!(
            vm = request.vm,
            snapshot = request.name,
            pause_ms = manifest.pause_ms,
            saved_bytes = manifest.counts.saved_pages.saturating_mul(PAGE_SIZE),
            "VM saved"
        );
        Ok(manifest)
    }
}

/// Returns the boot ID of the guest's kernel, and whether this kernel knows its VM generation ID.
/// The guest is asked only if it may have booted another kernel since the snapshot from which the
/// VM runs was saved.
fn boot_and_generation_id(machine: &Machine, origin: Option<&Base<'_>>) -> (Option<String>, bool) {
    let origin = origin.map(|base| &base.manifest);
    let agent = machine.agent();
    let session = agent.and_then(|agent| match agent.session() {
        // The agent of a VM that was just restored answers soon.
        None if origin.is_some_and(|origin| origin.agent) => agent.wait_session(ASK_TIMEOUT).ok(),
        session => session,
    });
    let boot = session.map(|facts| facts.boot_id);
    let boot = boot.filter(|id| !id.is_empty());
    let same_boot = origin.filter(|origin| boot.is_some() && origin.guest_boot == boot);
    let generation_id = match same_boot {
        Some(origin) => origin.generation_id,
        None => has_generation_id(machine),
    };
    (boot, generation_id)
}

/// Asks the guest whether its kernel knows its VM generation ID; twice, because the result is
/// recorded for good, and the guest may be slow.
fn has_generation_id(machine: &Machine) -> bool {
    let ask = || machine.run(GuestOrder::HasGenerationId, ASK_TIMEOUT);
    let asked = ask().or_else(|_| ask());
    asked.is_ok_and(|answer| answer.code == 0)
}

/// Time limit for a guest to write back dirty pages.
const WRITE_TIMEOUT: Duration = Duration::from_secs(120);

/// Additional time for the answer of the guest's agent to a command that has a time limit in the
/// guest.
const ANSWER: Duration = Duration::from_secs(2);

/// Time limit for a guest to turn its trace events on again.
const TRACE_TIMEOUT: Duration = Duration::from_secs(60);

/// Has the guest write dirty pages to its disks, so that the disks hold the content of its page
/// cache.
fn write_back(machine: &Machine) -> Result<(), DaemonError> {
    let wrote = machine.run(GuestOrder::Sync, WRITE_TIMEOUT)?;
    check_done(&wrote, "write back dirty pages")
}

/// Makes the guest drop its caches, those of `files` first. If that takes longer than `limit`,
/// returns the reason, and the VM is saved with the remaining caches.
fn drop_caches(
    machine: &Machine,
    files: &[Vec<u8>],
    limit: Duration,
) -> Result<Option<String>, DaemonError> {
    let order = GuestOrder::DropCaches {
        files: PathList::new(files.iter().map(Vec::as_slice)).0,
        limit_ms: u32::try_from(limit.as_millis()).unwrap_or(u32::MAX),
    };
    let dropped = match machine.run(order, limit + ANSWER) {
        Err(AgentError::Timeout { seconds }) => {
            return Ok(Some(format!("the command took longer than {seconds} s")));
        }
        other => other?,
    };
    if dropped.code == DROP_LATE {
        let seconds = limit.as_secs_f64();
        return Ok(Some(format!(
            "dropping them takes longer than {seconds:.0} s"
        )));
    }
    check_done(&dropped, "drop its caches").map(|()| None)
}

fn check_done(done: &CommandResult, what: &str) -> Result<(), DaemonError> {
    let words = text(&done.stderr);
    let failed = format!("the guest did not {what} ({words}); use --keep all");
    let is_done = (done.code == 0).then_some(());
    is_done.ok_or(DaemonError::BadRequest(failed))
}

/// Turns the agent's trace events on again after an interrupted drop.
fn trace_again(machine: &Machine) -> Result<(), AgentError> {
    machine
        .run(GuestOrder::ResumeTrace, TRACE_TIMEOUT)
        .map(drop)
}
