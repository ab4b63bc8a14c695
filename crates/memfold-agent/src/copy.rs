//! Copies of files between guest and host: `memfold vm cp` runs the agent's program in the guest,
//! with an archive on its standard input or output.

use std::error::Error;
use std::ffi::OsStr;
use std::io::{self, BufWriter};
use std::path::Path;

use memfold_copy::{CopyError, Destination, pack, unpack};
use memfold_sys::guest;

/// Size of the buffer before standard output, in bytes.
const BUFFER: usize = 64 << 10;

/// Writes the file or directory `path` to standard output, as an archive.
pub fn send(path: &str) -> io::Result<()> {
    let out = BufWriter::with_capacity(BUFFER, io::stdout().lock());
    pack(Path::new(path), out).map(drop).map_err(told)
}

/// Makes a file or a directory from the archive on standard input. `name`: its name if
/// `destination` is a directory.
pub fn receive(name: &str, destination: &str) -> io::Result<()> {
    // When the host's side is gone, the end of the input ends the copy, which then removes its
    // temporary files.
    let _signals = guest::signal_descriptor(&[guest::signal::HUP])?;
    let destination = Destination::new(OsStr::new(name), Path::new(destination)).map_err(told)?;
    unpack(io::stdin().lock(), &destination)
        .map(drop)
        .map_err(told)
}

/// Returns an error whose message has the cause, too.
fn told(error: CopyError) -> io::Error {
    match error.source() {
        Some(source) => io::Error::other(format!("{error}: {source}")),
        None => io::Error::other(error),
    }
}
