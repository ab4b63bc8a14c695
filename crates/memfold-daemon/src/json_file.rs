//! Writes the daemon's JSON files. A file is replaced atomically: readers see the old or the new
//! contents. Only the daemon's user may read them: they name VMs, sockets and options of QEMU.

use std::fs::{File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// Writes `value` to a temporary file (`.new`) and renames the file to `path`, so that readers see
/// the old or the new contents, also after a power failure. The new name is not synced: the old
/// contents may be back then.
pub(crate) fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> std::io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = private(&temporary)?;
    file.write_all(&serde_json::to_vec_pretty(value)?)?;
    file.sync_all()?;
    std::fs::rename(temporary, path)
}

/// Creates or empties a file that only its owner may open, whatever it was before.
pub(crate) fn private(path: &Path) -> std::io::Result<File> {
    let mut options = File::options();
    let file = options.write(true).create(true).mode(0o600).open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.set_len(0)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_the_daemon_can_be_opened_by_its_user_only_also_if_it_was_open_to_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("attached.json");
        let mode = || path.metadata().unwrap().permissions().mode() & 0o777;
        write_json(&path, &[1, 2]).unwrap();
        assert_eq!(mode(), 0o600);
        std::fs::write(path.with_extension("new"), "of an earlier daemon").unwrap();
        write_json(&path, &[3]).unwrap();
        assert_eq!(
            (mode(), std::fs::read_to_string(&path).unwrap()),
            (0o600, "[\n  3\n]".into())
        );
        let lock = directory.path().join("daemon.lock");
        File::create(&lock).unwrap();
        private(&lock).unwrap();
        assert_eq!(lock.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }
}
