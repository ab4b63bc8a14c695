//! Keeps the memory of processes with secrets (keys, tokens, bytes of guests) out of core dumps,
//! and this process's memory away from other processes of its user.

use std::io;

use rustix::io::Errno;
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, geteuid, set_dumpable_behavior, setrlimit,
};

/// No core dump, also with a program that collects them: for these programs, the kernel ignores a
/// limit of 0, but not a limit of 1 (`fs/coredump.c`).
const NO_CORE: Rlimit = Rlimit {
    current: Some(1),
    maximum: Some(1),
};

/// Protects this process: the kernel dumps no core of it, and only a process with `CAP_SYS_PTRACE`
/// can read its memory (`PR_SET_DUMPABLE`). A process of a user without root's rights stays as it
/// is, because it could not read its own page map any more (`proc_pid_pagemap(5)`).
///
/// # Errors
///
/// The kernel's error.
pub fn protect() -> io::Result<()> {
    if !geteuid().is_root() {
        return Ok(());
    }
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Protects this process, and dumps no core of the programs that it starts.
///
/// # Errors
///
/// The kernel's error.
pub fn protect_with_children() -> io::Result<()> {
    match setrlimit(Resource::Core, NO_CORE) {
        // The limit is 0, and only root's rights could raise it.
        Err(Errno::PERM) => {}
        set => set?,
    }
    protect()
}
