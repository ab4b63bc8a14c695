//! The agent's option `--segment-settle`: when the guest boots, merges the files that were written
//! while segments were mounted, and mounts the segments again.
//!
//! If the guest went down while a segment was mounted, files that were written meanwhile are still
//! in the overlay's upper layer. So the agent first moves them into the guest's own directories,
//! and then mounts the recorded segments again. A failure must not keep the guest from booting, so
//! it is reported and skipped. If the guest's owner does not allow segments, the files are merged,
//! but no segment is mounted.

use std::collections::HashSet;
use std::fs;
use std::process::Command;

use memfold_wire::permission::{CONFIGURATION, Permission};

use super::device::{Segment, devices, load_modules, open, protect, run_quietly};
use super::error::{Error, Result, shown};
use super::json::{Object, array, string};
use super::lay::{Request, lay_locked};
use super::layers::Layer;
use super::manifest::{Manifest, overlap};
use super::mount_table::MountTable;
use super::state::Places;
use super::take_off::in_short;
use crate::consent::Consent;

/// Result of merging and mounting segments at boot.
#[derive(Debug, Default)]
pub struct Settled {
    /// Number of names that were moved into the guest's own directories or removed from them.
    pub merged: u64,
    /// One report for each segment that was mounted, as JSON.
    pub laid: Vec<String>,
    /// Error messages about segments that could not be merged or mounted.
    pub problems: Vec<String>,
}

impl Settled {
    /// Returns the result of `--segment-settle` as JSON.
    pub fn report(self) -> String {
        Object::new()
            .number("merged", self.merged)
            .raw("laid", &array(self.laid))
            .list(
                "problems",
                self.problems.iter().map(|p| string(p.as_bytes())),
            )
            .end()
    }
}

/// Merges written files and mounts segments at boot. `command_line` is the kernel's command line.
/// Without the permission `segments` in `consent`, mounts nothing.
pub fn settle(places: &Places, command_line: &str, consent: &Consent) -> Settled {
    let mut settled = Settled::default();
    if let Err(e) = try_settle(places, command_line, consent, &mut settled) {
        settled.problems.push(in_short(&e));
    }
    settled
}

fn try_settle(
    places: &Places,
    command_line: &str,
    consent: &Consent,
    settled: &mut Settled,
) -> Result<()> {
    // This includes a segment that is the root file system and is mounted over nothing.
    for device in devices(places) {
        let _ = protect(&device);
    }
    let known = places.known()?;
    let wanted = Wanted::parse(command_line);
    if known.is_empty() && wanted.is_nothing() {
        return Ok(());
    }
    let _lock = places.lock()?;
    let mut failed = HashSet::new();
    let mut unmerged = Vec::new();
    for name in &known {
        if !merge_left_over(places, name, settled) {
            failed.insert(name.clone());
            // If the directories cannot be read, no segment can be laid either.
            unmerged.extend(left_over(places, name).unwrap_or_default());
        }
    }
    if !consent.allows(Permission::Segments) {
        let is_recorded = known.iter().any(|name| places.record(name).is_some());
        if is_recorded || !wanted.is_nothing() {
            settled.problems.extend(consent.problems.iter().cloned());
            settled.problems.push(not_allowed());
        }
        return Ok(());
    }
    let mut requests: Vec<Request> = Vec::new();
    let images = images(places, &mut settled.problems);
    for name in known.iter().filter(|n| !failed.contains(*n)) {
        let Some(record) = places.record(name) else {
            continue;
        };
        // The recorded generation is preferred, else the newest.
        let of_name = images.iter().filter(|i| i.name == *name);
        let best = of_name.max_by_key(|i| (i.generation == record.generation, i.generation));
        if let Some(image) = best {
            requests.push(Request {
                content: record.content,
                only: record.lay,
                max_differing: record.max_differing,
                ..Request::new(name.clone(), image.generation)
            });
        }
    }
    for image in &images {
        let has = |r: &Request| r.name == image.name;
        let asked = wanted.has(&image.name) && !image.lay.is_empty();
        if asked && !failed.contains(&image.name) && !requests.iter().any(has) {
            requests.push(Request::new(image.name.clone(), image.generation));
        }
    }
    for request in requests {
        let done = match unmerged_below(&request, &images, &unmerged) {
            None => lay_locked(places, &request).map_err(|e| in_short(&e)),
            Some(directory) => Err(format!(
                "not mounted, because files that were written to {} are not merged yet",
                shown(directory)
            )),
        };
        match done {
            Ok(report) => settled.laid.push(report),
            Err(why) => {
                let text = format!("{}@{}: {why}", request.name, request.generation);
                settled.problems.push(text);
            }
        }
    }
    Ok(())
}

/// Returns a directory of `unmerged` that overlaps a directory over which the request would mount
/// its segment; `None` if there is none.
fn unmerged_below<'a>(
    request: &Request,
    images: &[Manifest],
    unmerged: &'a [Vec<u8>],
) -> Option<&'a [u8]> {
    let is_image = |i: &&Manifest| i.name == request.name && i.generation == request.generation;
    let lay = match images.iter().find(is_image) {
        Some(image) if request.only.is_empty() => &image.lay,
        _ => &request.only,
    };
    let found = unmerged.iter().find(|u| lay.iter().any(|d| overlap(d, u)));
    found.map(Vec::as_slice)
}

/// Returns the message for segments that are not mounted, because the guest's owner does not allow
/// it.
fn not_allowed() -> String {
    format!(
        "no segment is mounted, because the guest's owner does not allow it; to allow it, add \"{}\" to 'allow' in {CONFIGURATION}",
        Permission::Segments.word()
    )
}

/// Merges the directories for which the segment `name` has files on disk, but is not mounted. A
/// directory that cannot be merged does not keep others from it. Returns whether all are merged.
fn merge_left_over(places: &Places, name: &str, settled: &mut Settled) -> bool {
    let before = settled.problems.len();
    let mut note = |e: &Error| settled.problems.push(format!("{name}: {}", in_short(e)));
    let directories = left_over(places, name).inspect_err(&mut note);
    for directory in directories.iter().flatten() {
        match Layer::new(places, name, directory).take_off() {
            Ok(merged) => settled.merged += merged.moved + merged.removed,
            Err(e) => note(&e),
        }
    }
    places.forget_if_empty(name);
    settled.problems.len() == before
}

/// Returns the directories for which the segment `name` has files on disk, but is not mounted.
fn left_over(places: &Places, name: &str) -> Result<Vec<Vec<u8>>> {
    let table = MountTable::read()?;
    let mut directories = places.layer_directories(name)?;
    directories.retain(|d| Layer::new(places, name, d).laid(&table).is_none());
    Ok(directories)
}

/// Returns the manifests of the segments that the guest has, on mounts and on devices, the newest
/// generation first.
fn images(places: &Places, problems: &mut Vec<String>) -> Vec<Manifest> {
    let mut found: Vec<Manifest> = mounted(places).into_iter().map(|s| s.manifest).collect();
    load_modules(places);
    for device in devices(places) {
        match open(&device) {
            Ok((_, manifest)) => found.push(manifest),
            Err(e) => problems.push(format!("{}: {}", device.display(), in_short(&e))),
        }
    }
    found.sort_by(|a, b| (&a.name, b.generation).cmp(&(&b.name, a.generation)));
    found.dedup();
    found
}

/// Returns the segments whose images are mounted in `/run/memfold/segments`.
pub fn mounted(places: &Places) -> Vec<Segment> {
    let entries = fs::read_dir(places.segments());
    let names = entries.into_iter().flatten().flatten();
    names
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let (name, generation) = super::parse_reference(&name).ok()?;
            let table = MountTable::read().ok()?;
            table.at(&entry.path())?;
            Segment::mount(places, &name, generation).ok()
        })
        .collect()
}

/// Names of the segments to mount, from `memfold.lay=web,db` or `memfold.lay=*` on the kernel's
/// command line.
struct Wanted<'a>(Vec<&'a str>);

impl<'a> Wanted<'a> {
    fn parse(command_line: &'a str) -> Self {
        let words = command_line.split_ascii_whitespace();
        let lists = words.filter_map(|w| w.strip_prefix("memfold.lay="));
        Self(
            lists
                .flat_map(|l| l.split(','))
                .filter(|n| !n.is_empty())
                .collect(),
        )
    }

    fn is_nothing(&self) -> bool {
        self.0.is_empty()
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|w| *w == "*" || *w == name)
    }
}

/// Makes systemd reload its units and start the units that the merge has added. Both calls only
/// queue jobs, so a unit that runs before ordinary services may make them. If the kernel's command
/// line names a boot target, nothing is done, so that a rescue shell stays one.
pub fn tell_systemd(command_line: &str) {
    let chosen = |word: &str| {
        word.starts_with("systemd.unit=")
            || matches!(word, "rescue" | "emergency" | "single" | "s" | "S" | "1")
    };
    if command_line.split_ascii_whitespace().any(chosen) {
        return;
    }
    for arguments in [
        &["--no-block", "daemon-reload"][..],
        &["--no-block", "start", "default.target"],
    ] {
        run_quietly(Command::new("systemctl").args(arguments));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_command_line_selects_the_segments_that_are_mounted_at_boot() {
        let wanted = Wanted::parse("quiet memfold.lay=web,db x.memfold.lay=no");
        assert!(wanted.has("web") && wanted.has("db") && !wanted.has("no"));
        assert!(Wanted::parse("memfold.lay=*").has("anything"));
        assert!(Wanted::parse("quiet").is_nothing());
    }

    #[test]
    fn a_directory_that_cannot_be_merged_at_boot_does_not_keep_others_from_it() {
        let directory = tempfile::tempdir().unwrap();
        let places = Places {
            root: directory.path().join("root"),
            state: directory.path().join("state"),
            ..Places::default()
        };
        fs::create_dir_all(places.own(b"/b")).unwrap();
        let uppers = [b"/a", b"/b"].map(|of| places.layer("web", of).join("upper"));
        for upper in &uppers {
            fs::create_dir_all(upper).unwrap();
            fs::write(upper.join("written"), "").unwrap();
        }
        let mut settled = Settled::default();
        assert!(!merge_left_over(&places, "web", &mut settled));
        // The guest's own directory /a is gone.
        assert_eq!(settled.problems.len(), 1);
        let told = &settled.problems[0];
        assert!(told.starts_with("web: /a is gone"), "{told}");
        assert!(uppers[0].join("written").exists());
        assert!(places.own(b"/b/written").exists() && !uppers[1].exists());
        assert_eq!(settled.merged, 1);
        fs::create_dir(places.own(b"/a")).unwrap();
        assert!(merge_left_over(&places, "web", &mut settled));
        assert!(places.own(b"/a/written").exists());
    }
}
