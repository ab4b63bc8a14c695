//! Fuzz targets of memfold: every parser of bytes that another program wrote.
//!
//! ```text
//!   guest  --FromAgent-->  daemon  --ToAgent-->  agent        kernel --ring pages, formats, mountinfo--> agent
//!   daemon --Order--> library in QEMU --Reply--> daemon       QEMU --info ramblock, info mtree, JSON--> daemon
//! ```
//! A [`Subject`] runs a parser on arbitrary bytes. The parser must not panic, and the values that
//! it accepts must satisfy its documentation. Both are asserted here, once, for the two ways of
//! fuzzing: `fuzz/` (cargo-fuzz, nightly) and `tests/mutate.rs` (stable, always there).

mod frames;
mod guest_kernel;
mod layout;
pub mod mutate;
mod nbd;
mod snapshot;
mod subject;

pub use subject::Subject;

/// All fuzz targets.
pub const SUBJECTS: [Subject; 12] = [
    frames::FROM_AGENT,
    frames::TO_AGENT,
    frames::ORDER,
    frames::REPLY,
    guest_kernel::RING,
    guest_kernel::FORMAT,
    guest_kernel::MOUNTINFO,
    guest_kernel::GLOB,
    layout::LAYOUT,
    snapshot::FREE_PAGES,
    snapshot::EXTENTS,
    nbd::NBD,
];

/// Returns the subject named `name`.
///
/// # Panics
/// If no subject has this name (a fuzz target without its subject).
#[must_use]
pub fn subject(name: &str) -> Subject {
    let found = SUBJECTS.into_iter().find(|s| s.name == name);
    found.unwrap_or_else(|| panic!("no subject '{name}'"))
}
