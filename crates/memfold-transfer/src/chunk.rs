//! Splits a snapshot's files into chunks, in which they are stored in an object store. A chunk is
//! named by the BLAKE3 hash of its bytes.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};

/// Length in bytes of a chunk; the last chunk of a file may be shorter. RAM images are aligned to
/// two chunks.
pub(crate) const CHUNK_BYTES: u64 = 1 << 20;

/// Level of compression: the fastest of Zstandard's usual ones.
const LEVEL: i32 = 1;

/// Length in bytes of a chunk's name in an index.
pub(crate) const NAME_BYTES: usize = 32;

/// Name of a chunk; `None` for a chunk of zeroes, which is not stored.
pub(crate) type ChunkName = Option<blake3::Hash>;

/// Returns the number of chunks of a file with `bytes` bytes.
pub(crate) const fn count(bytes: u64) -> u64 {
    bytes.div_ceil(CHUNK_BYTES)
}

/// Returns the length of chunk `number` of a file with `bytes` bytes.
pub(crate) fn length(bytes: u64, number: u64) -> usize {
    let left = bytes.saturating_sub(number * CHUNK_BYTES);
    usize::try_from(left.min(CHUNK_BYTES)).unwrap_or(0)
}

/// Reads chunk `number` of a file with `bytes` bytes. Returns `None` if it holds only zeroes.
/// Holes are not read.
pub(crate) fn read(file: &File, bytes: u64, number: u64) -> io::Result<Option<Vec<u8>>> {
    let (start, length) = (number * CHUNK_BYTES, length(bytes, number));
    match seek(file, SeekFrom::Data(start)) {
        Ok(data) if data >= start + length as u64 => return Ok(None),
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        // A file system without holes, or data in the chunk.
        _ => {}
    }
    let mut buffer = vec![0; length];
    file.read_exact_at(&mut buffer, start)?;
    Ok((!is_zero(&buffer)).then_some(buffer))
}

fn is_zero(bytes: &[u8]) -> bool {
    const ZEROES: [u8; 4096] = [0; 4096];
    bytes
        .chunks(ZEROES.len())
        .all(|part| part == &ZEROES[..part.len()])
}

/// Compresses a chunk or an index for the object store (Zstandard).
pub fn pack(bytes: &[u8]) -> io::Result<Vec<u8>> {
    zstd::bulk::compress(bytes, LEVEL)
}

/// Decompresses an object of the store, and checks that the bytes have the BLAKE3 hash `name`.
/// `length` is the expected number of bytes; decompression stops if there are more.
///
/// # Errors
///
/// The reason why the object is not used, as text.
pub fn unpack(packed: &[u8], length: usize, name: &blake3::Hash) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(length);
    let decoder = zstd::Decoder::new(packed).map_err(|error| error.to_string())?;
    let most = length as u64 + 1;
    decoder
        .take(most)
        .read_to_end(&mut bytes)
        .map_err(|error| format!("it cannot be decompressed: {error}"))?;
    if bytes.len() != length {
        return Err(format!("it does not have {length} bytes"));
    }
    if blake3::hash(&bytes) != *name {
        return Err("its bytes do not match its name".into());
    }
    Ok(bytes)
}

/// Returns the index of these chunks: 32 bytes for each, zeroes for a chunk of zeroes.
pub(crate) fn encode(chunks: &[ChunkName]) -> Vec<u8> {
    let name = |chunk: &ChunkName| chunk.map_or([0; NAME_BYTES], |name| *name.as_bytes());
    chunks.iter().flat_map(name).collect()
}

/// Returns the chunks of an index.
pub(crate) fn decode(index: &[u8]) -> Vec<ChunkName> {
    let names = index.chunks_exact(NAME_BYTES);
    names
        .map(|name| {
            let bytes: [u8; NAME_BYTES] = name.try_into().unwrap_or_default();
            (bytes != [0; NAME_BYTES]).then(|| blake3::Hash::from_bytes(bytes))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_push_to_an_object_store_leaves_out_chunks_of_zeroes_and_holes() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 * CHUNK_BYTES + 10).unwrap();
        file.write_all_at(&[0; 4096], CHUNK_BYTES).unwrap();
        file.write_all_at(&[7], 2 * CHUNK_BYTES + 5).unwrap();
        file.write_all_at(&[8; 10], 4 * CHUNK_BYTES).unwrap();
        let bytes = file.metadata().unwrap().len();
        assert_eq!(count(bytes), 5);
        let read: Vec<_> = (0..5).map(|n| read(&file, bytes, n).unwrap()).collect();
        assert!(read[0].is_none() && read[1].is_none() && read[3].is_none());
        assert_eq!(read[2].as_ref().unwrap()[5], 7);
        assert_eq!(read[4].as_deref(), Some(&[8; 10][..]));
    }

    #[test]
    fn an_object_from_an_object_store_is_refused_if_its_digest_or_length_does_not_match() {
        let bytes: Vec<u8> = (0..10_000_u32).flat_map(u32::to_le_bytes).collect();
        let (packed, name) = (pack(&bytes).unwrap(), blake3::hash(&bytes));
        assert_eq!(unpack(&packed, bytes.len(), &name).unwrap(), bytes);
        assert!(unpack(&packed, bytes.len() - 1, &name).is_err());
        assert!(unpack(&packed, bytes.len() + 1, &name).is_err());
        let other = blake3::hash(b"other");
        assert!(
            unpack(&packed, bytes.len(), &other)
                .unwrap_err()
                .contains("match")
        );
        for at in 0..packed.len() {
            let mut bad = packed.clone();
            bad[at] ^= 0x10;
            // Some bits of a frame's header do not matter; the bytes do.
            let unpacked = unpack(&bad, bytes.len(), &name);
            assert!(unpacked.is_err() || unpacked.unwrap() == bytes, "byte {at}");
        }
        // 1 GiB of zeroes is some 32 KiB of Zstandard.
        let bomb = pack(&vec![0; 64 << 20]).unwrap();
        assert!(unpack(&bomb, 10, &name).is_err());
    }

    #[test]
    fn the_index_of_a_file_in_an_object_store_has_32_bytes_for_each_chunk() {
        let chunks = [Some(blake3::hash(b"a")), None, Some(blake3::hash(b"b"))];
        let index = encode(&chunks);
        assert_eq!(index.len(), 96);
        assert_eq!(decode(&index), chunks);
    }
}
