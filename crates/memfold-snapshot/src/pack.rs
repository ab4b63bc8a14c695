//! Reads and writes compressed RAM images. A compressed image consists of the file `ram.zst`, which
//! holds compressed chunks, and the file `ram.index`, which locates them:
//!
//! ```text
//!   ram.zst     frame | frame | ...               each a chunk of 2 MiB, holes as zeroes; in any order
//!   ram.index   chunk 0: offset, length | ...     8 bytes each, little endian; length 0: all zeroes
//! ```

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use memfold_host::progress::Progress;
use parking_lot::Mutex;

use super::image::{CHUNK_BYTES, chunks_with_data};
use super::pipeline::{self, Writeback};

/// Compression level: Zstandard's fastest usual level. Higher levels take twice the time to save a
/// tenth of the bytes.
const LEVEL: i32 = 1;

/// Place of a chunk's compressed frame in `ram.zst`: offset and length, in bytes. Length 0: the
/// chunk holds only zeroes.
pub type Frame = (u64, u64);

/// Length in bytes of a chunk's entry in `ram.index`: offset and length of its frame, 8 bytes each.
pub const FRAME_BYTES: usize = 16;

/// Compresses the RAM image `ram` into the empty file `packed` (`ram.zst`). Returns the contents of
/// `ram.index`. `take_room`: called with the number of bytes before they are written; ends the work
/// by an error.
pub fn pack(
    ram: &File,
    packed: &File,
    progress: &Progress,
    take_room: impl Fn(u64) -> io::Result<()> + Sync,
) -> io::Result<Vec<u8>> {
    let chunks = ram.metadata()?.len().div_ceil(CHUNK_BYTES as u64);
    let holds = chunks_with_data(ram)?;
    let writeback = Writeback::start(packed)?;
    let end = AtomicU64::new(0);
    let chunks = usize::try_from(chunks).map_err(io::Error::other)?;
    let frames = Mutex::new(vec![(0, 0); chunks]);
    pipeline::run(holds.len() as u64, CHUNK_BYTES, |number, buffer| {
        let number = usize::try_from(number).map_err(io::Error::other)?;
        let chunk = holds[number];
        ram.read_exact_at(buffer, chunk * CHUNK_BYTES as u64)?;
        let frame = zstd::bulk::compress(buffer, LEVEL)?;
        take_room(frame.len() as u64)?;
        let at = end.fetch_add(frame.len() as u64, Ordering::Relaxed);
        pipeline::write_all_at(packed, &frame, at)?;
        writeback.add(at..at + frame.len() as u64);
        let chunk = usize::try_from(chunk).map_err(io::Error::other)?;
        frames.lock()[chunk] = (at, frame.len() as u64);
        progress.add(CHUNK_BYTES as u64);
        Ok(())
    })?;
    let numbers = frames
        .into_inner()
        .into_iter()
        .flat_map(|(at, length)| [at, length]);
    Ok(numbers.flat_map(u64::to_le_bytes).collect())
}

/// Parses `index`, the contents of `ram.index` of an image with `chunks` chunks. An error tells why
/// the index is refused.
pub fn frames(index: &[u8], chunks: u64) -> Result<Vec<Frame>, String> {
    if index.len() as u64 != chunks * FRAME_BYTES as u64 {
        return Err(format!("the table does not have {chunks} chunks"));
    }
    let long = |bytes: &[u8]| u64::from_le_bytes(std::array::from_fn(|byte| bytes[byte]));
    let frame = |bytes: &[u8]| (long(bytes), long(&bytes[8..]));
    let all: Vec<Frame> = index.chunks_exact(FRAME_BYTES).map(frame).collect();
    match all.iter().position(|&(_, length)| length > LARGEST_FRAME) {
        Some(chunk) => Err(format!("the frame of chunk {chunk} is too long")),
        None => Ok(all),
    }
}

/// Maximum length of a frame: Zstandard makes incompressible data a little longer
/// (`ZSTD_COMPRESSBOUND`).
const LARGEST_FRAME: u64 = CHUNK_BYTES as u64 + (64 << 10);

/// Decompresses the frame of one chunk from `packed` (`ram.zst`) into `buffer`, which must have the
/// length of a chunk.
pub fn unpack(packed: &File, (at, length): Frame, buffer: &mut [u8]) -> io::Result<()> {
    let mut frame = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    packed.read_exact_at(&mut frame, at)?;
    match zstd::bulk::decompress_to_buffer(&frame, buffer)? {
        bytes if bytes == buffer.len() => Ok(()),
        bytes => {
            let why = format!("a chunk of {bytes} bytes");
            Err(io::Error::new(io::ErrorKind::InvalidData, why))
        }
    }
}
