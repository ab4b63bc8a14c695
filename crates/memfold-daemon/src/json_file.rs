//! Notes of the daemon: small files of JSON that are whole at any instant.

use std::path::Path;

/// Writes a file anew, in one step for whoever reads it.
pub(crate) fn write_json<T: serde::Serialize>(path: &Path, value: &T) -> std::io::Result<()> {
    let temporary = path.with_extension("new");
    std::fs::write(&temporary, serde_json::to_vec_pretty(value)?)?;
    std::fs::rename(temporary, path)
}
