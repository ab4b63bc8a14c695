//! Compares paths without the symbolic links that lead to them: a directory of snapshots may have
//! moved, with a link in its old place.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns whether a file is in a directory, whatever links lead to either.
pub(super) fn is_in(path: &Path, directory: &Path) -> bool {
    path.starts_with(directory) || real(path).starts_with(real(directory))
}

/// Returns a path without links; the path itself if there is no such file.
pub(super) fn real(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}
