//! The agent's option `--segment-lay`: mounts directories of a segment over the guest's own
//! directories, so that programs use the segment's files instead.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::time::Instant;

use super::compare::{Plan, compare};
use super::device::Segment;
use super::error::{During, Error, Result, shown};
use super::json::{Object, string};
use super::layers::{self, Layer};
use super::manifest::{check_apart, check_directory};
use super::mount_table::MountTable;
use super::state::{Places, Record};
use super::tree;
use super::verify::{self, Verdict};

/// Number of attempts to compare a directory that changes meanwhile.
const ATTEMPTS: u32 = 3;

/// Parameters of `--segment-lay`, which mounts a segment over the guest's directories.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of the segment to mount, without its generation.
    pub name: String,
    /// Number of the segment's generation (build) to mount.
    pub generation: u64,
    /// Whether the bytes of files are compared; false: only their metadata.
    pub content: bool,
    /// Guest directories over which the segment is mounted; empty: the directories that the
    /// segment's manifest names.
    pub only: Vec<Vec<u8>>,
    /// Maximum percentage of the segment's files that may differ from the guest's, 0 to 100. If
    /// more differ, the request is refused.
    pub max_differing: u8,
}

impl Request {
    /// Creates a request with the defaults: the directories that the manifest names, no comparison
    /// of bytes, 25 percent.
    pub fn new(name: impl Into<String>, generation: u64) -> Self {
        Self {
            name: name.into(),
            generation,
            content: false,
            only: Vec::new(),
            max_differing: 25,
        }
    }
}

/// A directory over which this run has mounted the segment.
struct Done {
    directory: Vec<u8>,
    plan: Plan,
    took_ms: u64,
}

/// Mounts the segment's directories over the guest's, and returns a report in JSON. If one
/// directory fails, all are unmounted again.
pub fn lay(places: &Places, request: &Request) -> Result<String> {
    let _lock = places.lock()?;
    lay_locked(places, request)
}

/// Does the work of [`lay`]. The caller must hold the lock of segments.
pub fn lay_locked(places: &Places, request: &Request) -> Result<String> {
    let start = Instant::now();
    for directory in &request.only {
        check_directory(directory)?;
    }
    check_apart(&request.only)?;
    refuse_other_generation(&request.name, request.generation)?;
    let segment = Segment::mount(places, &request.name, request.generation)?;
    let mut run = Run {
        places,
        request,
        segment: &segment,
        done: Vec::new(),
        already: Vec::new(),
        skipped: Vec::new(),
    };
    match run.lay() {
        Ok(()) => Ok(run.report(start)),
        Err(error) => Err(run.undo(error)),
    }
}

/// Refuses if another generation of the segment is mounted, because the layers on disk have no
/// generation number.
fn refuse_other_generation(name: &str, generation: u64) -> Result<()> {
    let table = MountTable::read()?;
    let mut laid = table.0.iter().filter_map(|m| layers::generation(m, name));
    match laid.find(|g| *g != generation) {
        None => Ok(()),
        Some(other) => Err(Error::refused(
            format!("generation {other} of {name} is laid"),
            format!("take it off first: memfold-agent --segment-take-off {name}"),
        )),
    }
}

struct Run<'a> {
    places: &'a Places,
    request: &'a Request,
    segment: &'a Segment,
    done: Vec<Done>,
    already: Vec<Vec<u8>>,
    skipped: Vec<(Vec<u8>, &'static str)>,
}

impl Run<'_> {
    fn lay(&mut self) -> Result<()> {
        let wanted = if self.request.only.is_empty() {
            &self.segment.manifest.lay
        } else {
            &self.request.only
        };
        if wanted.is_empty() {
            return Err(Error::refused(
                "the image names no directory to lay",
                "name directories: --only /usr",
            ));
        }
        let table = MountTable::read()?;
        let image = tree::open(&self.segment.mounted)
            .during(|| format!("opening {}", self.segment.mounted.display()))?;
        let mut compared = Vec::new();
        for directory in wanted {
            let layer = self.layer(directory);
            if layer.laid(&table).is_some() {
                if layer.is_verified() {
                    self.already.push(directory.clone());
                    continue;
                }
                take_off_unverified(&layer)?;
            }
            layers::settle_overlapping(self.places, directory)?;
            let Some(own) = layer.open_own()? else {
                self.skipped
                    .push((directory.clone(), "the guest has no such file"));
                continue;
            };
            let inner = directory.strip_prefix(b"/").unwrap_or(directory);
            let theirs = match tree::directory_below(&image, inner) {
                Ok(theirs) => theirs,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                    self.skipped
                        .push((directory.clone(), "the segment has none"));
                    continue;
                }
                Err(e) => {
                    return Err(e).during(|| format!("opening the segment's {}", shown(directory)));
                }
            };
            let start = Instant::now();
            layer.prepare(&own, &table)?;
            let plan = compare(&theirs, &own, self.request.content, &BTreeSet::new())?;
            compared.push((directory.clone(), own, theirs, plan, start));
        }
        self.refuse_too_different(compared.iter().map(|c| (&c.0[..], &c.3)))?;
        for (directory, own, theirs, plan, start) in compared {
            let plan = self.lay_one(&directory, &own, &theirs, plan)?;
            self.done.push(Done {
                directory,
                plan,
                took_ms: millis(start),
            });
        }
        self.write_record()
    }

    fn layer<'b>(&'b self, directory: &'b [u8]) -> Layer<'b> {
        Layer::new(self.places, &self.request.name, directory)
    }

    fn refuse_too_different<'b>(
        &self,
        plans: impl Iterator<Item = (&'b [u8], &'b Plan)> + Clone,
    ) -> Result<()> {
        let files: u64 = plans.clone().map(|p| p.1.files).sum();
        let differing: u64 = plans.clone().map(|p| p.1.differing).sum();
        if differing * 100 <= files * u64::from(self.request.max_differing) {
            return Ok(());
        }
        let first: Vec<String> = plans
            .flat_map(|(directory, plan)| {
                let below = plan.first_differing.iter();
                below
                    .map(move |(path, why)| format!("{}/{} ({why})", shown(directory), shown(path)))
            })
            .take(10)
            .collect();
        Err(Error::refused(
            format!(
                "{differing} of the segment's {files} files differ from the guest's, more than {} %: {}",
                self.request.max_differing,
                first.join(", ")
            ),
            "build the segment from a guest with the same packages, or allow more with --max-differing PERCENT",
        ))
    }

    /// Mounts the segment over one directory. Files that are open for writing before the mount are
    /// never shown from the segment. Those that are opened meanwhile are hidden in the next
    /// attempt.
    fn lay_one(
        &self,
        directory: &[u8],
        own: &OwnedFd,
        theirs: &OwnedFd,
        mut plan: Plan,
    ) -> Result<Plan> {
        let layer = self.layer(directory);
        let mut hide = BTreeSet::new();
        let before = verify::unchanged(&plan, own)?;
        if before != Verdict::Unchanged {
            if let Verdict::Writers(paths) = before {
                hide.extend(paths);
            }
            plan = compare(theirs, own, self.request.content, &hide)?;
        }
        for attempt in 1.. {
            let laid = layer
                .build(&plan, own)
                .and_then(|()| layer.mount(&self.segment.mounted, self.request.generation, own))
                .and_then(|()| layer.verify(&plan, own));
            let verdict = match laid {
                Ok(Verdict::Unchanged) => return Ok(plan),
                Ok(verdict) => verdict,
                Err(error) => return Err(undone(&layer, error)),
            };
            layer.take_off()?;
            let path = match verdict {
                Verdict::Changed(path) => path,
                Verdict::Writers(paths) => {
                    let first = paths.first().cloned().unwrap_or_default();
                    hide.extend(paths);
                    first
                }
                Verdict::Unchanged => break,
            };
            if attempt == ATTEMPTS {
                return Err(Error::refused(
                    format!(
                        "{}/{} changed while it was compared",
                        shown(directory),
                        shown(&path)
                    ),
                    "try again when no packages are being installed",
                ));
            }
            layer.prepare(own, &MountTable::read()?)?;
            plan = compare(theirs, own, self.request.content, &hide)?;
        }
        Ok(plan)
    }

    fn write_record(&self) -> Result<()> {
        let before = self.places.record(&self.request.name);
        // A run that was killed may have mounted directories and not recorded them.
        let is_recorded = before.as_ref().is_some_and(|record| {
            record.generation == self.request.generation
                && self.already.iter().all(|d| record.lay.contains(d))
        });
        if self.done.is_empty() && (self.already.is_empty() || is_recorded) {
            return Ok(());
        }
        let mut lay = self.already.clone();
        lay.extend(self.done.iter().map(|d| d.directory.clone()));
        if let Some(before) = before {
            lay.extend(before.lay);
        }
        lay.sort();
        lay.dedup();
        // Directories in the record over which the segment is no longer mounted would be mounted
        // again at the next boot.
        let table = MountTable::read()?;
        lay.retain(|directory| self.layer(directory).laid(&table).is_some());
        let record = Record {
            generation: self.request.generation,
            content: self.request.content,
            max_differing: self.request.max_differing,
            lay,
        };
        self.places.write_record(&self.request.name, &record)
    }

    /// Unmounts the directories that this run has mounted.
    fn undo(&self, error: Error) -> Error {
        let mut error = error;
        for done in &self.done {
            error = undone(&self.layer(&done.directory), error);
        }
        // These directories were prepared, but the segment was not mounted over them.
        for directory in self
            .places
            .layer_directories(&self.request.name)
            .unwrap_or_default()
        {
            let layer = self.layer(&directory);
            if MountTable::read().is_ok_and(|t| layer.laid(&t).is_none()) {
                error = undone(&layer, error);
            }
        }
        self.places.forget_if_empty(&self.request.name);
        if self.segment.is_new {
            if let Err(e) = self.segment.unmount() {
                error = also(&error, &e);
            }
        }
        error
    }

    fn report(&self, start: Instant) -> String {
        let segment = self.segment;
        let dirs = self.done.iter().map(|done| {
            let plan = &done.plan;
            let first = plan.first_differing.iter();
            let first =
                first.map(|(path, why)| Object::new().text("path", path).text("why", why).end());
            Object::new()
                .text("dir", &done.directory)
                .number("files", plan.files)
                .number("bytes", plan.bytes)
                .number("same", plan.files - plan.differing)
                .number("differing", plan.differing)
                .number("hidden", plan.hidden.len() as u64)
                .number("masked_dirs", plan.masked.len() as u64)
                .number("regular_files", plan.regular_files)
                .number("dax_files", plan.dax_files)
                .list("first_differing", first)
                .number("took_ms", done.took_ms)
                .end()
        });
        let skipped = self.skipped.iter();
        let skipped = skipped
            .map(|(directory, why)| Object::new().text("dir", directory).text("why", why).end());
        let dax = match segment.dax {
            None => "null",
            Some(true) => "true",
            Some(false) => "false",
        };
        Object::new()
            .text("name", &segment.manifest.name)
            .number("generation", segment.manifest.generation)
            .text("device", segment.device.as_os_str().as_encoded_bytes())
            .text("mounted", segment.mounted.as_os_str().as_encoded_bytes())
            .raw("dax", dax)
            .maybe("dax_reason", segment.dax_reason.as_ref())
            .flag("content", self.request.content)
            .list("dirs", dirs)
            .list("already", self.already.iter().map(|d| string(d)))
            .list("skipped", skipped)
            .number("took_ms", millis(start))
            .end()
    }
}

/// Unmounts a layer that was mounted, but not checked to the end, so that it can be laid again. The
/// programs may see files of the segment that differ from the guest's own.
fn take_off_unverified(layer: &Layer<'_>) -> Result<()> {
    let what = format!(
        "{} was laid by an interrupted run or an earlier agent and never checked, and cannot be taken off",
        shown(layer.directory)
    );
    match layer.take_off() {
        Ok(_) => Ok(()),
        Err(Error::Refused { why, hint }) => Err(Error::refused(format!("{what}: {why}"), hint)),
        Err(e) => Err(Error::refused(
            format!("{what}: {e}"),
            "run --segment-settle, or reboot: either continues from here",
        )),
    }
}

/// Unmounts a layer after an error. If that fails too, adds this to the error.
fn undone(layer: &Layer<'_>, error: Error) -> Error {
    match layer.take_off() {
        Ok(_) => error,
        Err(e) => also(&error, &e),
    }
}

fn also(error: &Error, second: &Error) -> Error {
    Error::refused(
        format!("{error}; and undoing it failed: {second}"),
        "run --segment-settle, or reboot: either continues from here",
    )
}

/// Returns the time since `start`, in milliseconds.
pub fn millis(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX)
}
