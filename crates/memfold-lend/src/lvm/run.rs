//! Runs programs of LVM and of the iSCSI initiator with a time limit.

use std::io;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use memfold_host::helper;

use super::error::LvmError;

/// Runs a program from Debian's `package` and waits for its end. A nonzero exit status is not an
/// error of this function.
pub(super) fn run(
    (program, package): (&'static str, &'static str),
    words: &[&str],
    limit: Duration,
) -> Result<Output, LvmError> {
    let began = Instant::now();
    let mut command = Command::new(program);
    command
        .args(words)
        .env("LC_ALL", "C")
        // The daemon's own descriptors are close-on-exec, but inherited ones may not be.
        .env("LVM_SUPPRESS_FD_WARNINGS", "1")
        .current_dir("/")
        .stdin(Stdio::null());
    let output = helper::output(&mut command, limit).map_err(|source| {
        if source.kind() == io::ErrorKind::TimedOut {
            return failed(program, words, source.to_string());
        }
        LvmError::Missing {
            program,
            package,
            source,
        }
    })?;
    let said = String::from_utf8_lossy(&output.stderr);
    let took = began.elapsed();
    tracing::debug!(program, ?words, ?took, status = %output.status, said = said.trim(), "ran");
    Ok(output)
}

pub(super) fn failed(program: &str, words: &[&str], said: String) -> LvmError {
    LvmError::Failed {
        command: format!("{program} {}", words.join(" ")),
        said,
    }
}

/// Returns the program's standard error as one line.
pub(super) fn said(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = said.lines().map(str::trim).collect();
    lines.join("; ")
}
