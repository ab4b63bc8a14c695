//! Examines the host: kernel features, KVM, QEMU, control groups, and memfold's own files. Also has
//! small helpers for processes and sockets that other crates share.

pub mod caught;
pub mod doctor;
pub mod facts;
pub mod files;
mod fold_budget;
pub mod groups;
pub mod helper;
pub mod kernel_faults;
pub mod kernel_release;
pub mod kvm;
pub mod private_memory;
pub mod privileges;
pub mod progress;
pub mod qemu;
pub mod qemu_users;
pub mod socket;

pub use doctor::{Check, Report, Status, examine};
pub use facts::HostFacts;
pub use files::{GuestImage, guest_images, image_directory, library, own_program};
pub use fold_budget::{cores, default_fold_cpu_percent};
pub use groups::{Group, Room};
pub use kvm::KvmVerdict;
pub use qemu::{QemuError, QemuFacts};
pub use qemu_users::UsersError;

/// Prints a line to standard error, which is a log. Unlike `eprintln!`, this macro does not panic
/// if the line cannot be written.
#[macro_export]
macro_rules! say {
    ($($words:tt)*) => {{
        // A failure is ignored, because there is no other place to report it.
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{}\n", format_args!($($words)*)));
    }};
}

static COMMIT: std::sync::OnceLock<&str> = std::sync::OnceLock::new();

/// Sets the commit that the program was built from. Each program calls this function at its start,
/// because otherwise this library would be recompiled for each commit.
pub fn set_commit(commit: &'static str) {
    // A second call has no effect.
    let _ = COMMIT.set(commit);
}

/// Returns the commit that the program was built from; `unknown` if [`set_commit`] was not called.
#[must_use]
pub fn commit() -> &'static str {
    COMMIT.get().copied().unwrap_or("unknown")
}

/// Returns an error with all its causes, in one line.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let words: Vec<String> = causes.map(ToString::to_string).collect();
    words.join(": ")
}
