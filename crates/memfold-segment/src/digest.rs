//! Computes the digest that identifies the bytes of a segment's image.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use memfold_host::progress::Progress;

/// Returns the BLAKE3 digest of a file, 64 hexadecimal digits.
pub fn digest(path: &Path, progress: &Progress) -> io::Result<String> {
    let mut file = File::open(path)?;
    progress.begin("checksum made", file.metadata()?.len());
    let mut sum = blake3::Hasher::new();
    let mut piece = vec![0; 1 << 20];
    loop {
        let length = file.read(&mut piece)?;
        if length == 0 {
            return Ok(sum.finalize().to_hex().to_string());
        }
        sum.update(&piece[..length]);
        progress.add(length as u64);
    }
}
