//! Segments: built, attached to VMs and laid over their files, removed.
//!
//! Attaching is three steps, each of which can be repeated: QEMU maps the image (a device of the VM from then on), the note of the VM's
//! segments, and the agent lays it over the guest's files. What the guest refuses leaves the device, which the next try uses.

mod in_guest;

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::sync::{Arc, PoisonError};

use memfold_api::{
    AttachSegmentRequest, AttachedSegment, BuildRequest, BuildResult, RankRequest, SegmentState,
    VmSegment,
};
use memfold_fold::Command;
use memfold_segment::{
    self as segment, Manifest, Ranked, Reference, Request, SegmentError, SegmentInfo, rank,
};
use memfold_vm::segments::{MAX_SLOTS, plug, unplug_backend};
use memfold_vm::{SegmentSpec, VmDirectory, VmSpec};
use tracing::{info, warn};

pub(super) use self::in_guest::says;
use self::in_guest::{lay, take_off};
use super::booted::when_booted;
use super::copy_out;
use super::machine::Machine;
use super::{Daemon, DaemonError};

impl Daemon {
    /// Builds a new generation of a segment.
    pub fn build_segment(&self, request: &BuildRequest) -> Result<BuildResult, DaemonError> {
        // Before it is part of any path.
        Reference::parse(&request.name)?;
        let progress = self.uses.begin(&format!("segment {}", request.name))?;
        let vm = match request.from.as_slice() {
            [from] => from.strip_prefix("vm:"),
            _ => None,
        };
        if let Some(writer) = self.writer(&request.name).filter(|w| vm != Some(w)) {
            return Err(SegmentError::Written {
                name: request.name.clone(),
                writer,
            }
            .into());
        }
        let top = match request.top_files_bytes {
            None => None,
            Some(bytes) => {
                let ranked = self.rank_files(&RankRequest {
                    domain: Some(request.domain.clone()),
                    for_vms: request.for_vms,
                    include: request.include.clone(),
                    ..RankRequest::default()
                })?;
                Some((memfold_units::ByteSize(bytes), ranked))
            }
        };
        let copy = vm
            .map(|vm| self.copy_out(vm, request, &progress))
            .transpose()?;
        let request = Request {
            name: request.name.clone(),
            domain: request.domain.clone(),
            from: copy.as_ref().map_or_else(
                || request.from.clone(),
                |copy| vec![copy.image().display().to_string()],
            ),
            origin: copy.is_some().then(|| request.from.join(" ")),
            include: request.include.clone(),
            exclude: request.exclude.clone(),
            top,
            root: request.root,
            pinned: request.pinned,
        };
        let (segment, is_new) = segment::build(&self.segments, &request, &progress)?;
        if is_new {
            info!(
                segment = segment.reference(),
                bytes = segment.image_bytes,
                files = segment.files,
                "built"
            );
            self.drop_old_segments(&segment.name);
        }
        Ok(BuildResult { segment, is_new })
    }

    /// Lets the images of segments be removed like other files: for a laboratory's end.
    pub fn unprotect_segments(&self) {
        self.segments.unprotect();
    }

    /// How far a build has come; `None`: none is under way.
    #[must_use]
    pub fn segment_progress(&self, name: &str) -> Option<memfold_host::progress::Step> {
        self.uses.now(&format!("segment {name}"))
    }

    /// All segments.
    pub fn list_segments(&self) -> Result<Vec<SegmentInfo>, DaemonError> {
        let all = self.segments.all()?;
        let users = self.segments.users(&all)?;
        // Nobody waits for the VMs' table while files are looked at.
        let known: Vec<(rustix::process::Pid, String)> = self
            .lock()
            .values()
            .map(|machine| (machine.pid(), machine.name().to_owned()))
            .collect();
        let named = |pid: rustix::process::Pid| {
            let vm = known.iter().find(|(known, _)| *known == pid);
            vm.map_or_else(
                || format!("process {}", pid.as_raw_nonzero()),
                |(_, name)| name.clone(),
            )
        };
        Ok(all
            .into_iter()
            .zip(users)
            .map(|(segment, users)| SegmentInfo {
                writer: self.writer(&segment.name),
                users: users.into_iter().map(named).collect(),
                resident_bytes: self.segments.resident_bytes(&segment),
                struct_page_bytes: segment.struct_page_bytes().0,
                protection: self.segments.protection(&segment).to_owned(),
                problem: self.segments.problem(&segment),
                segment,
            })
            .collect())
    }

    /// Compares a segment's image with its digest; what is wrong with it, if anything is.
    pub fn verify_segment(&self, name: &str) -> Result<Option<String>, DaemonError> {
        let _kept = self.removing.read().unwrap_or_else(PoisonError::into_inner);
        match self.segments.verify(&Reference::parse(name)?) {
            Ok(()) => Ok(None),
            Err(SegmentError::Broken { why, .. }) => Ok(Some(why)),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes a generation, or all of a segment, that nobody uses.
    pub fn remove_segment(&self, name: &str) -> Result<Vec<String>, DaemonError> {
        let reference = Reference::parse(name)?;
        let _alone = self
            .removing
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let mut chosen = self.segments.all()?;
        chosen.retain(|m| {
            m.name == reference.name && reference.generation.is_none_or(|g| g == m.generation)
        });
        if chosen.is_empty() {
            return Err(SegmentError::Unknown(name.to_owned()).into());
        }
        // All or none.
        for manifest in &chosen {
            let users = self.segment_users(manifest)?;
            if !users.is_empty() {
                return Err(SegmentError::InUse {
                    name: manifest.reference(),
                    users: users.join(", "),
                }
                .into());
            }
        }
        for manifest in &chosen {
            self.segments.remove(manifest)?;
        }
        Ok(chosen.iter().map(Manifest::reference).collect())
    }

    /// Who needs a generation: VMs that map it, and snapshots of such. What can't be read is taken for one.
    fn segment_users(&self, manifest: &Manifest) -> Result<Vec<String>, DaemonError> {
        let reference = manifest.reference();
        let pids = self.segments.users(std::slice::from_ref(manifest))?;
        let machines: Vec<Arc<Machine>> = self.lock().values().cloned().collect();
        let mut users = BTreeSet::new();
        if self.uses.now(&being_saved(&reference)).is_some() {
            users.insert("a snapshot or a VM that is being made".to_owned());
        }
        for pid in pids.into_iter().flatten() {
            let vm = machines.iter().find(|machine| machine.pid() == pid);
            users.insert(vm.map_or_else(
                || format!("process {}", pid.as_raw_nonzero()),
                |machine| format!("VM {}", machine.name()),
            ));
        }
        let named = |segments: &[SegmentSpec]| segments.iter().any(|s| s.name == reference);
        // Where the kernel tells mappings by another device number than files, as on btrfs.
        for machine in machines {
            if named(&machine.vm().segments()) {
                users.insert(format!("VM {}", machine.name()));
            }
        }
        for arrival in self.arriving.all() {
            let place = VmDirectory::of(&self.options.state, arrival.name());
            if VmDirectory::read_json::<Vec<SegmentSpec>>(&place.segments())
                .is_ok_and(|now| named(&now))
            {
                users.insert(format!("VM {}", arrival.name()));
            }
        }
        let names = self.shelf.names().map_err(|source| SegmentError::Files {
            path: self.options.shelf.clone(),
            source,
        })?;
        for name in names {
            match self.shelf.manifest(&name) {
                Ok(saved) if named(&saved.spec.segments) => {
                    users.insert(format!("snapshot {name}"));
                }
                Ok(_) => {}
                Err(_) => {
                    users.insert(format!("snapshot {name}, perhaps: it can't be read"));
                }
            }
        }
        Ok(users.into_iter().collect())
    }

    /// The VM that writes a segment's next generation. One that has ended, or taken the segment off, doesn't any more.
    fn writer(&self, name: &str) -> Option<String> {
        let vm = self.segments.writer(name)?;
        // What it has is seen when it is there.
        if self.arriving.get(&vm).is_some() {
            return Some(vm);
        }
        let machine = self.machine(&vm).ok();
        let has_it = |machine: &Arc<Machine>| {
            let segments = machine.vm().segments();
            segments.iter().any(|s| s.base_name() == name)
        };
        machine.is_some_and(|m| has_it(&m)).then_some(vm)
    }

    /// Whether no other VM maps any generation of a segment, so that this one may be its writer.
    fn check_alone(&self, name: &str, vm: &str) -> Result<(), DaemonError> {
        let me = format!("VM {vm}");
        let mut others = BTreeSet::new();
        for manifest in self.segments.all()?.iter().filter(|m| m.name == name) {
            others.extend(self.segment_users(manifest)?);
        }
        // Snapshots keep the generation that they were taken with.
        others.retain(|user| *user != me && !user.contains("snapshot "));
        if others.is_empty() {
            return Ok(());
        }
        Err(SegmentError::InUse {
            name: name.to_owned(),
            users: others.into_iter().collect::<Vec<_>>().join(", "),
        }
        .into())
    }

    /// Removes generations that are not the newest and that nobody uses any more.
    pub(super) fn drop_old_segments(&self, name: &str) {
        let _alone = self
            .removing
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let Ok(Some(newest)) = self.segments.newest(name) else {
            return;
        };
        for old in self.segments.all().unwrap_or_default() {
            let is_old = old.name == name && old.generation < newest.generation;
            if is_old && self.segment_users(&old).is_ok_and(|users| users.is_empty()) {
                match self.segments.remove(&old) {
                    Ok(()) => info!(
                        segment = old.reference(),
                        "removed: a newer one is there, and nobody uses this one"
                    ),
                    Err(error) => warn!(
                        segment = old.reference(),
                        error = &error as &dyn std::error::Error,
                        "cannot be removed"
                    ),
                }
            }
        }
    }

    /// What a daemon that died has left to do: writers that have ended meanwhile, generations that nobody uses any more.
    pub(super) fn tidy_segments(&self) {
        let all = self.segments.all().unwrap_or_default();
        for name in all
            .iter()
            .map(|manifest| manifest.name.as_str())
            .collect::<BTreeSet<_>>()
        {
            if self.segments.writer(name).is_some() && self.writer(name).is_none() {
                self.no_writer(name);
            }
            self.drop_old_segments(name);
        }
    }

    /// A segment has no writer any more.
    fn no_writer(&self, name: &str) {
        if let Err(error) = self.segments.set_writer(name, None) {
            warn!(
                segment = name,
                error = &error as &dyn std::error::Error,
                "its writer has ended, and is noted still"
            );
        }
    }

    /// A VM that maps these ends, and its name is not free yet: the next one of that name would be the writer, unasked.
    pub(super) fn end_writer(&self, vm: &str, segments: &[SegmentSpec]) {
        for segment in segments {
            if self.segments.writer(segment.base_name()).as_deref() == Some(vm) {
                self.no_writer(segment.base_name());
            }
        }
    }

    /// A VM that mapped these has ended.
    pub(super) fn left_segments(&self, segments: &[SegmentSpec]) {
        if segments.is_empty() {
            return;
        }
        for name in segments
            .iter()
            .map(SegmentSpec::base_name)
            .collect::<BTreeSet<_>>()
        {
            self.drop_old_segments(name);
        }
        // A VM that is being started would lose what it has looked up before it is mapped; its own end comes, too.
        if !self.arriving.is_empty() {
            return;
        }
        // Who looks one up now would lose it before it is mapped.
        let _alone = self
            .removing
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        self.segments.let_go();
    }

    /// Ranks files by what they would bring in a segment.
    pub fn rank_files(&self, request: &RankRequest) -> Result<Vec<Ranked>, DaemonError> {
        let (answer, uses) = std::sync::mpsc::sync_channel(1);
        self.tell(Command::FileUses(answer))?;
        let mut uses = uses
            .recv()
            .map_err(|_| DaemonError::Internal("the fold engine has ended"))?;
        for vm in &request.vms {
            self.machine(vm)?;
        }
        uses.retain(|used| {
            let of_domain = request
                .domain
                .as_ref()
                .is_none_or(|domain| *domain == used.domain);
            let of_vm = request.vms.is_empty() || request.vms.contains(&used.vm);
            of_domain && of_vm
        });
        let looked_at: BTreeSet<String> = uses.iter().map(|used| used.vm.clone()).collect();
        let chosen = rank::chosen(&request.include)?;
        uses.retain(|used| chosen(&used.path));
        Ok(rank::rank(&uses, looked_at.len() as u64, request.for_vms))
    }

    /// Finds the images of a description's segments, after comparing their bytes, and whether this VM may map them.
    pub(super) fn find_segments(&self, spec: &mut VmSpec) -> Result<(), DaemonError> {
        let (vm, domain) = (spec.name.clone(), spec.domain.clone());
        for segment in &mut spec.segments {
            let found = self.find_segment(&segment.name, &vm, domain.as_deref())?;
            if segment.root && !found.0.root {
                return Err(SegmentError::Impossible(format!(
                    "segment '{}' holds no root file system; build one with --root",
                    found.0.reference()
                ))
                .into());
            }
            if segment
                .digest
                .as_ref()
                .is_some_and(|then| *then != found.0.digest)
            {
                return Err(SegmentError::Broken {
                    name: found.0.reference(),
                    why: "it is another one than this VM was saved with".into(),
                }
                .into());
            }
            segment.digest = Some(found.0.digest.clone());
            segment.name = found.0.reference();
            segment.bytes = found.0.image_bytes;
            segment.image = Some(found.1);
        }
        Ok(())
    }

    fn find_segment(
        &self,
        name: &str,
        vm: &str,
        domain: Option<&str>,
    ) -> Result<(Manifest, std::path::PathBuf), DaemonError> {
        let reference = Reference::parse(name)?;
        let manifest = self.segments.manifest(&reference)?;
        if domain != Some(&manifest.domain) {
            return Err(SegmentError::Foreign {
                segment: manifest.reference(),
                domain: manifest.domain,
                vm: vm.to_owned(),
                other: domain.map_or_else(|| "none".to_owned(), |domain| format!("'{domain}'")),
            }
            .into());
        }
        if let Some(writer) = self.writer(&manifest.name).filter(|writer| writer != vm) {
            return Err(SegmentError::Written {
                name: manifest.name,
                writer,
            }
            .into());
        }
        // Of the same generation, whatever is built meanwhile.
        let reference = Reference::parse(&manifest.reference())?;
        Ok(self.segments.image(&reference)?)
    }

    /// Attaches a segment to a running VM and has its guest lay it over its files. One of the same name that lies there is taken off first.
    pub fn attach_segment(
        &self,
        vm: &str,
        request: &AttachSegmentRequest,
    ) -> Result<AttachedSegment, DaemonError> {
        let machine = self.machine(vm)?;
        let directory = directory(&machine)?;
        let slots = machine.vm().spec().map_or(0, VmSpec::slots);
        // One at a time: two would take the same slot, and a snapshot would be of something half done. Before the other lock, which is held
        // only until QEMU maps the image: guests take their time.
        let _alone = machine.save_right_soon()?;
        let shared = || self.removing.read().unwrap_or_else(PoisonError::into_inner);
        let exclusive = || {
            self.removing
                .write()
                .unwrap_or_else(PoisonError::into_inner)
        };
        // A writer's check holds until it is noted.
        let mut kept = if request.writer {
            (None, Some(exclusive()))
        } else {
            (Some(shared()), None)
        };
        let mut now = noted(&machine, directory)?;
        let (manifest, image) = self.find_segment(&request.segment, vm, machine.domain())?;
        let name = manifest.reference();
        if request.writer {
            self.check_alone(&manifest.name, vm)?;
        }
        if !now.iter().any(|segment| segment.name == name) {
            let slot = u32::try_from(now.len()).unwrap_or(MAX_SLOTS);
            if slot >= slots {
                return Err(SegmentError::Impossible(format!(
                    "VM '{vm}' has no free slot for a segment ({slots} in all); start it with --segment-slots {} (or segment_slots = {0} in its description)",
                    slot + 1
                ))
                .into());
            }
            let mut segment = SegmentSpec::new(&name);
            segment.bytes = manifest.image_bytes;
            segment.image = Some(image.clone());
            segment.digest = Some(manifest.digest.clone());
            memfold_vm::segments::check_one(&segment)
                .map_err(|error| SegmentError::Impossible(error.to_string()))?;
            let file = std::fs::File::open(&image);
            // Noted first: a device that nobody knows of would take its slot for ever. What is noted and not there is put right later.
            now.push(segment.clone());
            note(directory, &now)?;
            // A user of the segment from now on: nobody waits for QEMU with the lock.
            kept = (None, None);
            let plugged = match &file {
                Ok(file) => plug(&mut machine.monitor(), slot, &segment, file.as_fd())
                    .map_err(DaemonError::from),
                Err(error) => Err(SegmentError::Files {
                    path: image,
                    source: std::io::Error::new(error.kind(), error.to_string()),
                }
                .into()),
            };
            if let Err(error) = plugged {
                now.pop();
                note(directory, &now)?;
                return Err(error);
            }
            info!(vm, segment = name, "attached");
        }
        if request.writer {
            self.segments.set_writer(&manifest.name, Some(vm))?;
            info!(vm, segment = manifest.name, "writes the next generation");
        }
        drop(kept);
        let report = if request.no_lay {
            None
        } else {
            Some(lay_instead(
                &machine,
                &now,
                &manifest.name,
                &name,
                request.content,
            )?)
        };
        Ok(AttachedSegment {
            segment: VmSegment {
                state: machine
                    .segment_state(&name)
                    .unwrap_or(SegmentState::Attached),
                segment: name,
            },
            report,
        })
    }

    /// Has a guest take a segment off its files, keeping what was written there. The device stays until the VM ends.
    pub fn detach_segment(&self, vm: &str, name: &str) -> Result<AttachedSegment, DaemonError> {
        let machine = self.machine(vm)?;
        let reference = Reference::parse(name)?;
        let _alone = machine.save_right_soon()?;
        let now = machine.vm().segments();
        let of = |s: &&SegmentSpec| match reference.generation {
            Some(_) => s.name == reference.to_string(),
            None => s.base_name() == reference.name,
        };
        // The one that lies there is the last that was attached.
        let Some(at) = now.iter().rposition(|s| of(&s)) else {
            return Err(
                SegmentError::Impossible(format!("VM '{vm}' has no segment '{name}'")).into(),
            );
        };
        let segment = &now[at];
        let is_newer = |s: &&SegmentSpec| s.base_name() == segment.base_name();
        if let Some(newer) = now[at + 1..].iter().rev().find(is_newer) {
            return Err(SegmentError::Impossible(format!(
                "over the files of VM '{vm}' lies '{}', no longer '{}'; to take it off: memfold segment detach {vm} {}",
                newer.name,
                segment.name,
                segment.base_name()
            ))
            .into());
        }
        if segment.root {
            return Err(SegmentError::Impossible(format!(
                "'{}' is the root file system of VM '{vm}'; it goes when the VM ends",
                segment.name
            ))
            .into());
        }
        let report = take_off(&machine, segment.base_name())?;
        if self.segments.writer(segment.base_name()).as_deref() == Some(vm) {
            self.segments.set_writer(segment.base_name(), None)?;
        }
        Ok(AttachedSegment {
            segment: VmSegment {
                segment: segment.name.clone(),
                state: SegmentState::TakenOff,
            },
            report: Some(report),
        })
    }
}

/// What snapshots that are being made of VMs with a segment are noted under, in [`super::uses::Uses`].
pub(super) fn being_saved(reference: &str) -> String {
    format!("saved with segment {reference}")
}

/// Has a guest that boots lay its segments over its files, unless it has done that by itself.
pub(super) fn lay_when_booted(machine: &Arc<Machine>) {
    if machine.vm().segments().iter().any(|segment| !segment.root) {
        when_booted(machine, "segments", lay_all);
    }
}

/// Asks a guest that this daemon hasn't booted what lies over its files, and takes out a disk that it was to copy files to: the daemon
/// that plugged it is dead.
pub(super) fn recall_segments(machine: &Arc<Machine>) {
    if machine.vm().spec().is_none_or(|spec| spec.slots() == 0) {
        return;
    }
    when_booted(machine, "segments", |machine| {
        if let Err(error) = recall(machine) {
            warn!(
                vm = machine.name(),
                error = &error as &dyn std::error::Error,
                "its guest does not say which segments lie over its files"
            );
        }
    });
}

fn recall(machine: &Machine) -> Result<(), DaemonError> {
    // Nothing is laid or taken off meanwhile.
    let _alone = machine.save_right();
    copy_out::unplug(machine);
    if machine.vm().segments().iter().all(|segment| segment.root) {
        return Ok(());
    }
    let there = in_guest::list(machine)?;
    for segment in machine.vm().segments().iter().filter(|s| !s.root) {
        let lies = |entry: &serde_json::Value| {
            let name = format!(
                "{}@{}",
                entry["name"].as_str()?,
                entry["generation"].as_u64()?
            );
            let layers = entry["layers"].as_array()?;
            let is_mounted = entry["mounted"].is_string();
            (name == segment.name && is_mounted && !layers.is_empty()).then_some(())
        };
        let is_laid = there
            .as_array()
            .into_iter()
            .flatten()
            .any(|e| lies(e).is_some());
        // A guest that has just laid it was asked by this daemon.
        if is_laid && machine.segment_state(&segment.name).is_none() {
            machine.set_segment_state(&segment.name, SegmentState::Laid);
        }
    }
    Ok(())
}

/// Has a guest that runs lay its segments over its files. What fails is said where VMs are listed, and in the log.
pub(super) fn lay_all(machine: &Machine) {
    let _alone = machine.save_right();
    let segments = machine.vm().segments();
    for (number, segment) in segments.iter().enumerate() {
        let is_newer = |other: &SegmentSpec| other.base_name() == segment.base_name();
        // Of two generations, the one that was attached last.
        if segment.root || segments[number + 1..].iter().any(is_newer) {
            continue;
        }
        if let Err(error) = lay(machine, &segment.name, false) {
            warn!(
                vm = machine.name(),
                segment = segment.name,
                error = &error as &dyn std::error::Error,
                "is not laid over the guest's files"
            );
        }
    }
}

/// Takes off another generation that lies there, and lays this one; if that fails, lays the other again.
fn lay_instead(
    machine: &Machine,
    now: &[SegmentSpec],
    base: &str,
    name: &str,
    content: bool,
) -> Result<serde_json::Value, DaemonError> {
    let may_lie = |segment: &&SegmentSpec| {
        segment.base_name() == base
            && segment.name != name
            && machine.segment_state(&segment.name) != Some(SegmentState::TakenOff)
    };
    let other = now.iter().rev().find(may_lie);
    if other.is_some() {
        take_off(machine, base)?;
    }
    let laid = lay(machine, name, content);
    if let (Err(error), Some(other)) = (&laid, other) {
        let again = lay(machine, &other.name, false);
        warn!(
            vm = machine.name(),
            segment = name,
            error = error as &dyn std::error::Error,
            other = other.name,
            is_laid_again = again.is_ok(),
            "could not be laid"
        );
    }
    laid
}

/// The VM's segments as QEMU has them: what a daemon that died had noted and not plugged is forgotten.
pub(super) fn noted(
    machine: &Machine,
    directory: &VmDirectory,
) -> Result<Vec<SegmentSpec>, DaemonError> {
    let mut now = machine.vm().segments();
    let mut qmp = machine.monitor();
    let before = now.len();
    while let Some(slot) = now.len().checked_sub(1) {
        if memfold_vm::segments::address(&mut qmp, slot)?.is_some() {
            break;
        }
        unplug_backend(&mut qmp, slot);
        now.pop();
    }
    drop(qmp);
    if now.len() != before {
        note(directory, &now)?;
    }
    Ok(now)
}

fn note(directory: &VmDirectory, now: &[SegmentSpec]) -> Result<(), DaemonError> {
    let path = directory.segments();
    directory
        .write_json(&path, &now)
        .map_err(|source| SegmentError::Files { path, source }.into())
}

pub(super) fn directory(machine: &Machine) -> Result<&VmDirectory, DaemonError> {
    machine.vm().directory().ok_or_else(|| {
        SegmentError::Impossible(format!(
            "VM '{}' was not started by memfold, so it has no slots for segments; start it with 'memfold vm run'",
            machine.name()
        ))
        .into()
    })
}
