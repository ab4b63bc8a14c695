//! A directory for one run of a parser that reads files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A new directory, in memory if the host has a file system there. Its drop removes it.
pub struct Place(PathBuf);

impl Place {
    pub fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() {
            memory.to_owned()
        } else {
            std::env::temp_dir()
        };
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let place = parent.join(format!("memfold-fuzz-{}-{number}", std::process::id()));
        fs::create_dir_all(&place).expect("a directory for the test");
        Self(place)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file, in new directories if need be.
    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        let parent = path.parent().unwrap_or(&self.0);
        fs::create_dir_all(parent).expect("a directory for the test");
        fs::write(&path, bytes).expect("a file for the test");
        path
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A directory that stays is found by its name.
        let _ = fs::remove_dir_all(&self.0);
    }
}
