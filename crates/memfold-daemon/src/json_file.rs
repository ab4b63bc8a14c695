//! Writes the daemon's JSON files. A file is replaced atomically: readers see the old or the new
//! contents.

use std::path::Path;

/// Writes `value` to a temporary file (`.new`) and renames the file to `path`, so that readers see
/// the old or the new contents. The file is not synced to disk.
pub(crate) fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> std::io::Result<()> {
    let temporary = path.with_extension("new");
    std::fs::write(&temporary, serde_json::to_vec_pretty(value)?)?;
    std::fs::rename(temporary, path)
}
