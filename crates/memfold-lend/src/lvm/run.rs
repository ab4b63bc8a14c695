//! Runs programs of LVM, and of the iSCSI initiator.

use std::io;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use memfold_host::helper;

use super::error::LvmError;

/// Runs a program from Debian's `package`, waits for its end, and returns its output. At the time
/// `limit`, the program is killed; `None`: it is never killed. An exit status other than 0 and
/// `accepted` is an error.
pub(super) fn run(
    (program, package): (&'static str, &'static str),
    words: &[&str],
    limit: Option<Duration>,
    accepted: i32,
) -> Result<String, LvmError> {
    let failed = |said: String| LvmError::Failed {
        command: format!("{program} {}", words.join(" ")),
        said,
    };
    let began = Instant::now();
    let mut command = Command::new(program);
    command
        .args(words)
        .env("LC_ALL", "C")
        // The daemon's own descriptors are close-on-exec, but inherited ones may not be.
        .env("LVM_SUPPRESS_FD_WARNINGS", "1")
        .current_dir("/")
        .stdin(Stdio::null());
    let done = match limit {
        Some(limit) => helper::output(&mut command, limit),
        None => helper::output_unlimited(&mut command),
    };
    let output = done.map_err(|source| match source.kind() {
        io::ErrorKind::TimedOut => failed(source.to_string()),
        _ => LvmError::Missing {
            program,
            package,
            source,
        },
    })?;
    let (said, status) = (String::from_utf8_lossy(&output.stderr), output.status);
    let took = began.elapsed();
    tracing::debug!(program, ?words, ?took, %status, said = said.trim(), "ran");
    if status.success() || status.code() == Some(accepted) {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let lines: Vec<&str> = said.lines().map(str::trim).collect();
    let said = Some(lines.join("; ")).filter(|said| !said.is_empty());
    Err(failed(said.unwrap_or_else(|| status.to_string())))
}
