//! Standard output, whose reader may go away.

use std::io::{ErrorKind, Write as _};

/// Writes a line to standard output. A reader that went away (`| head`) is no failure.
pub(super) fn write_line(text: &str) -> anyhow::Result<()> {
    write_on(text).map(drop)
}

/// Writes a line to standard output; `false` when nobody reads it any more.
pub(super) fn write_on(text: &str) -> anyhow::Result<bool> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        result => Ok(result.map(|()| true)?),
    }
}
