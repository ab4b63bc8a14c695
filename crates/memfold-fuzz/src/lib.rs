//! What is fuzzed of memfold: every reader of bytes that somebody else wrote.
//!
//! ```text
//!   guest  --FromAgent-->  daemon  --ToAgent-->  agent        kernel --ring pages, formats, mountinfo--> agent
//!   daemon --Order--> library in QEMU --Reply--> daemon       QEMU --info ramblock, info mtree, JSON--> daemon
//! ```
//! A [`Subject`] runs a reader on any bytes. It must not panic, and what it accepts must keep the
//! promises of its documentation; both are asserted here, once, for the two ways of fuzzing:
//! `fuzz/` (cargo-fuzz, nightly) and `tests/mutate.rs` (stable, always there).

mod frames;
mod guest_kernel;
mod layout;
pub mod mutate;
mod nbd;
mod snapshot;
mod subject;

pub use subject::Subject;

/// All of them.
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

/// The subject of this name.
///
/// # Panics
/// If there is none: a fuzz target without its subject.
#[must_use]
pub fn subject(name: &str) -> Subject {
    let found = SUBJECTS.into_iter().find(|s| s.name == name);
    found.unwrap_or_else(|| panic!("no subject '{name}'"))
}
