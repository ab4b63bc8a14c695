//! Segments in the guest: read-only images with files that equal the guest's own. The agent mounts
//! a segment over the guest's directories (it *lays* the segment), so that these files need no
//! guest memory.
//!
//! The mount over a directory D is an overlay (overlayfs) of four layers. UPPER has the files that
//! were written since, MASK hides unequal files, SEGMENT has the segment's files, and OWN is the
//! guest's own directory:
//!
//! ```text
//!   what programs see: D                          what is where
//!   +---------------------------------------+
//!   | UPPER    files written since          |     /var/lib/memfold/segments/NAME/layers/D/upper
//!   | MASK     hides unequal files          |     /var/lib/memfold/segments/NAME/layers/D/mask
//!   | SEGMENT  files equal to the guest's   |     /dev/pmemN, EROFS with DAX: host memory, no page cache
//!   | OWN      the guest's own tree         |     D itself, below the mount
//!   +---------------------------------------+
//! ```
//!
//! **Invariant: OWN with UPPER merged into it is the guest's true state.** SEGMENT shows nothing
//! that OWN does not hold, and MASK is made from OWN. So SEGMENT and MASK can be removed at any
//! time without a change of D. These rules follow from the invariant:
//!
//! * an entry of SEGMENT is shown only if it equals the entry of OWN ([`compare`]). Otherwise MASK
//!   hides it ([`mask`]): by a hard link to OWN's file, or by a whiteout if OWN has no such name.
//!   After mounting, both the overlay and OWN are checked: OWN must not have changed during the
//!   comparison, and no compared file may be open for writing ([`verify`]);
//! * while D is laid, no path leads to OWN. So UPPER holds all changes that must be merged back
//!   ([`merge`]). Merging renames files, so UPPER and OWN must be on one mount;
//! * UPPER only shrinks during a merge, so the same merge continues after a crash: at boot, before
//!   ordinary services ([`settle`](mod@settle));
//! * a segment that is missing, broken or made from another guest costs memory and nothing else.
//!
//! | module | purpose |
//! |---|---|
//! | [`command`] | the agent's options for segments |
//! | [`list`](mod@list), [`lay`](mod@lay), [`take_off`](mod@take_off), [`settle`](mod@settle) | one option each |
//! | [`device`], [`manifest`] | images and their manifests (untrusted) |
//! | [`compare`], [`mask`], [`layers`], [`verify`] | laying one directory |
//! | [`merge`] | merging the written files back |
//! | [`state`], [`mount_table`], [`tree`], [`json`], [`error`] | paths and lock, mounts, access to directories by descriptor, reports, errors |

pub mod command;
pub mod compare;
pub mod device;
pub mod error;
pub mod json;
pub mod lay;
pub mod layers;
pub mod list;
pub mod manifest;
pub mod mask;
pub mod merge;
pub mod mount_table;
pub mod settle;
pub mod state;
pub mod take_off;
pub mod tree;
pub mod verify;

use error::{Error, Result};

/// Parses a reference to a segment, `NAME@GENERATION`, into name and generation.
pub fn parse_reference(text: &str) -> Result<(String, u64)> {
    let (name, generation) = text
        .split_once('@')
        .ok_or_else(|| Error::Usage(format!("{text:?} is not NAME@GENERATION")))?;
    let digits = generation.bytes().all(|b| b.is_ascii_digit());
    let number = generation.parse().ok().filter(|_| digits);
    let number = number.ok_or_else(|| Error::Usage(format!("{text:?} is not NAME@GENERATION")))?;
    Ok((manifest::check_name(name.as_bytes())?, number))
}
