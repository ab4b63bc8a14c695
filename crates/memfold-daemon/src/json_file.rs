//! Writes the daemon's JSON files. A file is replaced atomically: readers see the old or the new
//! contents.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

/// Writes `value` to a temporary file (`.new`) and renames the file to `path`, so that readers see
/// the old or the new contents, also after a power failure. The new name is not synced: the old
/// contents may be back then.
pub(crate) fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> std::io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = File::create(&temporary)?;
    file.write_all(&serde_json::to_vec_pretty(value)?)?;
    file.sync_all()?;
    std::fs::rename(temporary, path)
}
