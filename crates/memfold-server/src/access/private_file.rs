//! Writes the daemon's secret files, such as the hashes of tokens, so that only their owner may
//! read them (mode 0600).

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Opens a private file, and creates it if it does not exist.
pub(super) fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.create(true).mode(0o600).open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    Ok(file)
}

/// Creates or replaces a private file. The text is first written under another name, so that a
/// daemon that dies leaves no incomplete file.
pub(super) fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(".new");
    let mut file = open(File::options().write(true).truncate(true), draft.as_ref())?;
    file.write_all(text)?;
    file.sync_all()?;
    std::fs::rename(&draft, path)?;
    // Otherwise the old file could be back after a power failure.
    match path.parent() {
        Some(place) => File::open(place)?.sync_all(),
        None => Ok(()),
    }
}
