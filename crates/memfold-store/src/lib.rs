//! Page store: a file of immutable pages that many VMs of one trust domain map.
//!
//! ```text
//!   file "memfold:DOMAIN"       grows at its end; after 16 TiB, holes that no process maps are used
//!   +------+------+------+------+------+------+
//!   | page | page | hole | page | page | page |<- frontier = file size
//!   +------+------+------+------+------+------+
//!      ^      ^      ^                    ^
//!      |      |      punched: no VM can need it      appended by the daemon, then never written again
//!      mapped privately by QEMU processes through a read-only descriptor
//! ```
//!
//! Invariants:
//! 1. A page that any process maps is never written again. It can only be punched out, when no
//!    mapping can need it any more.
//! 2. The file never shrinks, so a mapping of pages below the frontier cannot fault with `SIGBUS`.
//!    Only the daemon can write to it, and a memfd (where no tmpfs can be mounted) is also sealed
//!    against shrinking.
//! 3. The kernel knows the file's size, so a new daemon that adopts the store appends after its
//!    last page.
//! 4. The file has no name and lives as long as a VM or the daemon has it open: it leaves nothing
//!    behind.

mod file;
pub mod mapped;

/// How the names of memory files begin that contain the RAM image of a compressed or encrypted
/// snapshot.
pub const IMAGE_PREFIX: &str = "memfold-image:";

/// The same for images of encrypted snapshots, so that their bytes are recognised without the
/// snapshot.
pub const SEALED_IMAGE_PREFIX: &str = "memfold-image:sealed:";

pub use file::{Filled, MAX_PAGES, Source, Store, StoreError, StoreIdentity, data_ranges};
