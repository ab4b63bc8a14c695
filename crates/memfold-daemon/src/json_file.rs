//! JSON files that are replaced atomically.

use std::path::Path;

/// Writes a file under a temporary name (`.new`) and renames it, so that readers see the old or the
/// new contents. The file is not synced to disk.
pub(crate) fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> std::io::Result<()> {
    let temporary = path.with_extension("new");
    std::fs::write(&temporary, serde_json::to_vec_pretty(value)?)?;
    std::fs::rename(temporary, path)
}
