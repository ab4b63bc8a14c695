//! Segments in the guest: read-only images whose files stand for the guest's own, so that they need
//! none of its memory.
//!
//! ```text
//!   what programs see: D                          what is where
//!   +---------------------------------------+
//!   | UPPER    what was written since       |     /var/lib/memfold/segments/NAME/layers/D/upper
//!   | MASK     where the next is not equal  |     /var/lib/memfold/segments/NAME/layers/D/mask
//!   | SEGMENT  files equal to the guest's   |     /dev/pmemN, EROFS with DAX: host memory, no page cache
//!   | OWN      the guest's own tree         |     D itself, below the mount
//!   +---------------------------------------+
//! ```
//!
//! **Invariant: OWN with UPPER merged into it is the guest's truth.** SEGMENT shows nothing that
//! OWN doesn't hold, and MASK is made from OWN, so both can be left out at any time: D is the same
//! without them. From this follows all else:
//!
//! * an entry of SEGMENT is shown only if OWN has its equal ([`compare`]); else MASK hides it
//!   ([`mask`]), OWN's file by a hard link, a missing one by a whiteout. The overlay is checked
//!   after mounting, and so is OWN: nothing changed while it was compared, nothing is open for
//!   writing ([`verify`]);
//! * nothing reaches OWN by a path while D is laid, so UPPER is all there is to bring back, by
//!   renaming ([`merge`]). UPPER and OWN are on one mount for that reason;
//! * UPPER only shrinks while it is merged, so after a crash the same merge ends it: at boot,
//!   before ordinary services ([`settle`](mod@settle));
//! * a segment that is gone, of another guest, or broken costs memory and nothing else.
//!
//! | module | what it is about |
//! |---|---|
//! | [`command`] | the agent's options for all this |
//! | [`list`](mod@list), [`lay`](mod@lay), [`take_off`](mod@take_off), [`settle`](mod@settle) | one option each |
//! | [`device`], [`manifest`] | images and what they say of themselves (hostile) |
//! | [`compare`], [`mask`], [`layers`], [`verify`] | laying one directory |
//! | [`merge`] | bringing back what was written |
//! | [`state`], [`mount_table`], [`tree`], [`json`], [`error`] | what lies where, mounts, directories by descriptor, reports, refusals |

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

/// `NAME@GENERATION`.
pub fn parse_reference(text: &str) -> Result<(String, u64)> {
    let (name, generation) = text
        .split_once('@')
        .ok_or_else(|| Error::Usage(format!("{text:?} is not NAME@GENERATION")))?;
    let digits = generation.bytes().all(|b| b.is_ascii_digit());
    let number = generation.parse().ok().filter(|_| digits);
    let number = number.ok_or_else(|| Error::Usage(format!("{text:?} is not NAME@GENERATION")))?;
    Ok((manifest::check_name(name.as_bytes())?, number))
}
