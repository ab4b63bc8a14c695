//! Builds the mask, a layer of the overlay that shows a segment's files in a guest directory. The
//! mask is above the layer with the segment's files, and hides those that differ from the guest's
//! own.
//!
//! Instead of a hidden file, the mask shows the guest's own file, by a hard link. So a program that
//! already has this file open and a program that opens it later use the same file.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode};

use super::compare::{Plan, split};
use super::error::{During, Result, shown};
use super::state::Steps;
use super::tree;

/// Returns the directories that the mask needs, sorted, so that a directory comes before its
/// entries.
fn directories(plan: &Plan) -> BTreeSet<&[u8]> {
    let mut found = BTreeSet::new();
    let hidden = plan.hidden.iter().filter_map(|h| parent(&h.path));
    for path in plan.masked.iter().map(Vec::as_slice).chain(hidden) {
        let mut next = Some(path);
        while let Some(path) = next.filter(|p| found.insert(*p)) {
            next = parent(path);
        }
    }
    found
}

fn parent(path: &[u8]) -> Option<&[u8]> {
    let at = path.iter().rposition(|b| *b == b'/')?;
    Some(&path[..at])
}

/// Fills the empty directory `mask` with a hard link or whiteout for each entry that `plan` hides.
/// `own` is the guest's own directory.
pub fn build(plan: &Plan, own: &OwnedFd, mask: &Path, steps: &Steps) -> Result<()> {
    let mask = tree::open(mask).during(|| format!("opening {}", mask.display()))?;
    let directories = directories(plan);
    for path in &directories {
        let what = || format!("creating the mask's directory {}", shown(path));
        steps.step().during(what)?;
        rustix::fs::mkdirat(&mask, *path, Mode::RWXU).during(what)?;
    }
    for hidden in &plan.hidden {
        let what = || format!("hiding {}", shown(&hidden.path));
        steps.step().during(what)?;
        let (parent, name) = split(&hidden.path);
        if hidden.own.is_some() {
            let parent = tree::directory_below(own, parent).during(what)?;
            let to = &hidden.path[..];
            rustix::fs::linkat(&parent, &name, &mask, to, AtFlags::empty()).during(what)?;
        } else {
            let kind = FileType::CharacterDevice;
            rustix::fs::mknodat(&mask, &hidden.path[..], kind, Mode::empty(), 0).during(what)?;
        }
    }
    // Owner, mode and times are copied last and from the deepest directory up, so that later
    // changes do not alter the times.
    for path in directories.iter().rev() {
        let what = || format!("copying owner, mode and times of {}", shown(path));
        let from = tree::directory_below(own, path).during(what)?;
        let to = tree::directory_below(&mask, path).during(what)?;
        tree::copy_directory_facts(&from, &to, None).during(what)?;
    }
    Ok(())
}
