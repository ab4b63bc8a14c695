//! Writes to standard output, whose reader may close it.

use std::io::{ErrorKind, Write as _};

/// Writes a line to standard output. It is no error if the reader has closed it (`| head`).
pub(super) fn write_line(text: &str) -> anyhow::Result<()> {
    write_on(text).map(drop)
}

/// Writes a line to standard output. Returns `false` if the reader has closed it.
pub(super) fn write_on(text: &str) -> anyhow::Result<bool> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        result => Ok(result.map(|()| true)?),
    }
}
