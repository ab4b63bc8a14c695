//! Fuzz targets of memfold: every parser of bytes that another program wrote.
//!
//! ```text
//!   guest  --FromAgent-->  daemon  --ToAgent-->  agent        kernel --ring pages, formats, mountinfo, memory files--> agent
//!   daemon --Order--> library in QEMU --Reply--> daemon       QEMU --info ramblock, info mtree, JSON--> daemon
//! ```
//! A [`Subject`] runs a parser on arbitrary bytes. The parser must not panic, and the values that
//! it accepts must satisfy its documentation. There are two ways of fuzzing with these subjects:
//! `fuzz/` (cargo-fuzz, needs nightly Rust) and `tests/mutate.rs` (stable Rust).

mod frames;
mod guest_kernel;
mod layout;
pub mod mutate;
mod nbd;
mod snapshot;
mod store;
mod streams;
mod subject;

use memfold_wire::agent::{FromAgent, ToAgent};
use memfold_wire::library::{Order, Reply};

pub use subject::Subject;

/// All fuzz targets: the name, parser and valid inputs of each.
pub const SUBJECTS: [Subject; 18] = [
    subject_of("from_agent", frames::run::<FromAgent>, frames::from_agent),
    subject_of("to_agent", frames::run::<ToAgent>, frames::to_agent),
    subject_of("order", frames::run::<Order>, frames::orders),
    subject_of("reply", frames::run::<Reply>, frames::replies),
    subject_of("ring", guest_kernel::ring, guest_kernel::rings),
    subject_of("format", guest_kernel::format, guest_kernel::formats),
    subject_of(
        "mountinfo",
        guest_kernel::mountinfo,
        guest_kernel::mountinfos,
    ),
    subject_of("memory", guest_kernel::memory, guest_kernel::memory_files),
    subject_of("glob", guest_kernel::glob, guest_kernel::globs),
    subject_of("layout", layout::layout, layout::layouts),
    subject_of("free_pages", snapshot::free_pages, snapshot::free_lists),
    subject_of("extents", snapshot::extents, snapshot::extent_lists),
    subject_of("nbd", nbd::both, nbd::streams),
    subject_of("description", store::description, store::descriptions),
    subject_of("chunk", store::chunk, store::chunks),
    subject_of("exec_frames", streams::exec_frames, streams::exec_streams),
    subject_of("copy_archive", streams::copy_archive, streams::archives),
    subject_of("sent_events", streams::sent_events, streams::event_streams),
];

const fn subject_of(
    name: &'static str,
    run: fn(&[u8]) -> u64,
    seeds: fn() -> Vec<Vec<u8>>,
) -> Subject {
    Subject { name, run, seeds }
}

/// Returns the fuzz target named `name`.
///
/// # Panics
/// If no fuzz target has this name.
#[must_use]
pub fn subject(name: &str) -> Subject {
    let found = SUBJECTS.into_iter().find(|s| s.name == name);
    found.unwrap_or_else(|| panic!("no subject '{name}'"))
}
