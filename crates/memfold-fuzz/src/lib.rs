//! Fuzz targets of memfold: every parser of bytes that another program wrote.
//!
//! ```text
//!   guest  --FromAgent-->  daemon  --ToAgent-->  agent        kernel --ring pages, formats, mountinfo, memory files--> agent
//!   daemon --Order--> library in QEMU --Reply--> daemon       QEMU --monitor, command line--> daemon
//!   object store, other hosts --snapshots, leases--> daemon   libvirt, Proxmox VE, users --descriptions--> daemon
//! ```
//! A [`Subject`] runs a parser on arbitrary bytes. The parser must not panic, and the values that
//! it accepts must satisfy its documentation. There are two ways of fuzzing with these subjects:
//! `fuzz/` (cargo-fuzz, needs nightly Rust) and `tests/mutate.rs` (stable Rust).
//! `scripts/fuzz-coverage` shows how much of each parser's code the second one runs.

mod command_lines;
mod frames;
mod guest_kernel;
mod images;
mod layout;
mod libvirt;
mod manifests;
mod monitor;
pub mod mutate;
mod nbd;
mod place;
mod proc_files;
mod registry;
mod snapshot;
mod store;
mod streams;
mod subject;
mod subjects;
mod texts;

pub use subject::Subject;
pub use subjects::SUBJECTS;

/// Returns the fuzz target named `name`.
///
/// # Panics
/// If no fuzz target has this name.
#[must_use]
pub fn subject(name: &str) -> Subject {
    let found = SUBJECTS.into_iter().find(|s| s.name == name);
    found.unwrap_or_else(|| panic!("no subject '{name}'"))
}
