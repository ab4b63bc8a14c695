//! Writes and removes the small files through which the daemon and its child processes for lending
//! pass information to each other.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Writes a new file that only its owner can read, in place of the file that is there.
pub(crate) fn write_private(path: &Path, text: &str) -> io::Result<()> {
    remove(path)?;
    let mut options = File::options();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(text.as_bytes())
}

/// Writes a JSON file, so that readers see the old or the new contents, also after a power failure.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let part = path.with_extension("part");
    let mut file = File::create(&part)?;
    file.write_all(&serde_json::to_vec_pretty(value)?)?;
    file.sync_all()?;
    std::fs::rename(part, path)
}

/// Removes a file, if there is one.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Files that are removed on drop.
#[derive(Debug, Default)]
pub(crate) struct Removed(pub(crate) Vec<PathBuf>);

impl Removed {
    pub(crate) fn remove(&self) {
        for file in &self.0 {
            if let Err(error) = remove(file) {
                tracing::warn!(file = %file.display(), %error, "cannot remove a file of an ended export (server of lent memory); remove the file by hand");
            }
        }
    }
}

impl Drop for Removed {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Returns random bytes of the kernel (`random(4)`).
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    use std::io::Read as _;
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Returns bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
