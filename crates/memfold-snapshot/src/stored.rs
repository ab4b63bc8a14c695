//! Reads the RAM image of a snapshot, chunk by chunk, and compares each chunk with its checksum.
//!
//! ```text
//!   ram, or ram.zst + ram.index  --+
//!   disks, by ram.refs           --+-->  chunk  -- checksum in ram.sums? -->  mapped, or assembled in memory
//! ```
//! If the image is neither compressed nor encrypted, QEMU maps the image's file directly, and the
//! referenced parts of disks. If the image is compressed or encrypted, or refers to many single
//! pages of disks, it is first assembled in sealed memory (*laid out*), once for all VMs that run
//! from the snapshot. The image's files are then no longer needed.

use std::fs::File;
use std::io;
use std::io::ErrorKind::{InvalidData, InvalidInput, Other, UnexpectedEof};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use memfold_host::progress::Progress;
use memfold_store::data_ranges;
use memfold_units::PAGE_SIZE;
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use xxhash_rust::xxh3::xxh3_128;

use super::encryption::SealedPages;
use super::image::{CHUNK_BYTES, CHUNK_PAGES, SUM_BYTES, pages_sum, write_nonzero};
use super::pack::{self, Frame};
use super::pipeline;
use super::refer::{self, Reference};

/// RAM image of a snapshot, opened for reading.
#[derive(Debug)]
pub struct Stored {
    /// Length of the uncompressed image, in bytes.
    pub bytes: u64,
    /// Contents of `ram.sums`: 16 bytes of checksum for each chunk of the image.
    pub sums: Vec<u8>,
    /// Whether the checksum of a chunk is the sum of its pages' checksums (format 3), and not the
    /// XXH3-128 of its bytes.
    pub sums_of_pages: bool,
    /// Pages that are in the image's own files.
    pub pages: Pages,
    /// References to pages whose bytes are in disks' files, by ascending page.
    pub references: Vec<Reference>,
    /// Disks' files that the references name by index.
    pub sources: Vec<File>,
}

/// The own files of a RAM image, which hold all pages except those held by reference.
#[derive(Debug)]
pub enum Pages {
    /// Sparse file `ram`, and the byte ranges of the file that are not holes.
    Plain(File, Vec<Range<u64>>),
    /// File `ram.zst`, and the place of each chunk's compressed frame in the file.
    Packed(File, Vec<Frame>),
    /// File `ram.sealed`, with the key and the places of its encrypted frames.
    Sealed(SealedPages),
}

impl Pages {
    /// Makes a value for the sparse file `ram`, after reading which of its ranges are not holes.
    pub fn plain(ram: File) -> io::Result<Self> {
        let data = data_ranges(&ram)?;
        Ok(Self::Plain(ram, data))
    }

    /// Reads pages from these files, from page `first` on; of a compressed or encrypted image, one
    /// chunk.
    /// Returns whether the files contain data of these pages.
    fn read(&self, first: u64, buffer: &mut [u8]) -> io::Result<bool> {
        match self {
            Self::Plain(ram, data) => {
                let start = first * PAGE_SIZE;
                let next = data.partition_point(|part| part.end <= start);
                let end = start + buffer.len() as u64;
                let holds = data.get(next).is_some_and(|part| part.start < end);
                if holds {
                    ram.read_exact_at(buffer, start)?;
                }
                Ok(holds)
            }
            Self::Packed(packed, frames) => {
                let number = usize::try_from(first / CHUNK_PAGES).map_err(io::Error::other)?;
                let frame = frames.get(number).copied().unwrap_or_default();
                if frame.1 > 0 {
                    pack::unpack(packed, frame, buffer)?;
                }
                Ok(frame.1 > 0)
            }
            Self::Sealed(sealed) => sealed.read(first / CHUNK_PAGES, buffer),
        }
    }
}

impl Stored {
    /// Returns the largest number of bytes of memory that the assembled image can take.
    #[must_use]
    pub fn most_bytes(&self) -> u64 {
        let own: u64 = match &self.pages {
            Pages::Plain(_, data) => data.iter().map(|part| part.end - part.start).sum(),
            Pages::Packed(_, frames) => {
                let frames = frames.iter().filter(|frame| frame.1 > 0);
                frames.count() as u64 * CHUNK_BYTES as u64
            }
            Pages::Sealed(sealed) => sealed.most_bytes(),
        };
        let referred: u64 = self.references.iter().map(|r| u64::from(r.pages)).sum();
        (own + referred * PAGE_SIZE).min(self.bytes)
    }

    /// Reads pages from all files that contain parts of them, from page `first` of the image on; of
    /// a compressed image, one chunk. Returns whether any file does.
    pub(super) fn read(&self, first: u64, buffer: &mut [u8]) -> io::Result<bool> {
        if !self.pages.read(first, buffer)? {
            if !refer::touches(&self.references, first, buffer) {
                return Ok(false);
            }
            buffer.fill(0);
        }
        let sources: Vec<&File> = self.sources.iter().collect();
        refer::fill(&self.references, &sources, first, buffer)?;
        Ok(true)
    }

    /// Returns the checksum of a chunk's bytes, as `ram.sums` has it.
    fn sum_of(&self, bytes: &[u8]) -> u128 {
        if self.sums_of_pages {
            pages_sum(0, bytes)
        } else {
            xxh3_128(bytes)
        }
    }

    pub(super) fn sum(&self, chunk: u64) -> io::Result<u128> {
        let at = usize::try_from(chunk).map_err(io::Error::other)? * SUM_BYTES;
        let sum = self.sums.get(at..at + SUM_BYTES);
        let sum = sum.ok_or_else(|| io::Error::other("the checksum is missing"))?;
        Ok(u128::from_le_bytes(std::array::from_fn(|byte| sum[byte])))
    }

    /// Reads the whole image and compares its checksums. Returns the numbers of the chunks that
    /// differ, or whose frames cannot be read. Passes each correct chunk to `right`, unless it is
    /// all zeroes; `right` may change the bytes.
    pub(super) fn check(
        &self,
        progress: &Progress,
        right: impl Fn(u64, &mut [u8]) -> io::Result<()> + Sync,
    ) -> io::Result<Vec<u64>> {
        let empty = self.sum_of(&vec![0; CHUNK_BYTES]);
        let wrong = Mutex::new(Vec::new());
        pipeline::run(
            self.bytes.div_ceil(CHUNK_BYTES as u64),
            CHUNK_BYTES,
            |chunk, buffer| {
                let sum = match self.read(chunk * CHUNK_PAGES, buffer) {
                    Ok(true) => Some(self.sum_of(buffer)),
                    Ok(false) => Some(empty),
                    Err(error) => match error.kind() {
                        // The file is too short, or the bytes are not a valid frame.
                        UnexpectedEof | InvalidInput | InvalidData | Other => None,
                        _ => return Err(error),
                    },
                };
                if sum != Some(self.sum(chunk)?) {
                    wrong.lock().push(chunk);
                } else if sum != Some(empty) {
                    right(chunk, buffer)?;
                }
                progress.add(CHUNK_BYTES as u64);
                Ok(())
            },
        )?;
        let mut wrong = wrong.into_inner();
        wrong.sort_unstable();
        Ok(wrong)
    }

    /// Reads the whole image, and returns the numbers of the chunks whose bytes do not match their
    /// checksums.
    pub fn verify(&self, progress: &Progress) -> io::Result<Vec<u64>> {
        self.check(progress, |_, _| Ok(()))
    }

    /// Assembles the image in a sealed memory file (`memfd_create(2)`) that is named `name`. If
    /// chunks do not match their checksums, the inner error contains the numbers of these chunks.
    pub fn lay_out(&self, name: &str, progress: &Progress) -> io::Result<Result<File, Vec<u64>>> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let laid = File::from(memfd_create(name, flags)?);
        ftruncate(&laid, self.bytes)?;
        let wrong = self.check(progress, |chunk, bytes| {
            let at = chunk * CHUNK_BYTES as u64;
            write_nonzero(bytes, &laid, at).map(drop)
        })?;
        if !wrong.is_empty() {
            return Ok(Err(wrong));
        }
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&laid, seals)?;
        Ok(Ok(laid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNKS: u64 = 5;

    fn random(state: &mut u64, bytes: &mut [u8]) {
        for word in bytes.chunks_exact_mut(8) {
            *state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            word.copy_from_slice(&(*state | 1).to_le_bytes());
        }
    }

    /// Returns an image, and a disk that contains some of its pages. The image has all kinds of
    /// chunks: with pages from the disk and others, with only pages from the disk, empty, full, and
    /// with a page at its end.
    fn image() -> (Vec<u8>, File) {
        let mut state = 7;
        let mut disk = vec![0; 256 << 10];
        random(&mut state, &mut disk);
        let mut ram = vec![0; CHUNK_BYTES * usize::try_from(CHUNKS).unwrap()];
        random(&mut state, &mut ram[100 << 12..200 << 12]);
        ram[300 << 12..310 << 12].copy_from_slice(&disk[4 << 12..14 << 12]);
        ram[600 << 12..664 << 12].copy_from_slice(&disk);
        random(&mut state, &mut ram[3 * CHUNK_BYTES..4 * CHUNK_BYTES]);
        let end = ram.len() - 4096;
        random(&mut state, &mut ram[end..]);
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&disk, 0).unwrap();
        (ram, file)
    }

    fn stored(ram: &[u8], disk: File, packed: bool) -> Stored {
        let file = tempfile::tempfile().unwrap();
        file.set_len(ram.len() as u64).unwrap();
        let progress = Progress::default();
        let references = [(300, 10, 4), (600, 64, 0)].map(|(page, pages, block)| Reference {
            page,
            pages,
            file: 0,
            block,
        });
        let mut rest = ram.to_vec();
        for reference in &references {
            let at = usize::try_from(reference.page * PAGE_SIZE).unwrap();
            rest[at..][..reference.length()].fill(0);
        }
        write_nonzero(&rest, &file, 0).unwrap();
        // Both kinds of checksums are read.
        let sums_of_pages = packed;
        let sum = |chunk: &[u8]| {
            if sums_of_pages {
                pages_sum(0, chunk)
            } else {
                xxh3_128(chunk)
            }
        };
        let sums = ram.chunks_exact(CHUNK_BYTES);
        let sums: Vec<u8> = sums.flat_map(|c| sum(c).to_le_bytes()).collect();
        assert_eq!(sums.len(), SUM_BYTES * usize::try_from(CHUNKS).unwrap());
        let pages = if packed {
            let frames = tempfile::tempfile().unwrap();
            let index = pack::pack(&file, &frames, &progress, |_| Ok(())).unwrap();
            Pages::Packed(frames, pack::frames(&index, CHUNKS).unwrap())
        } else {
            Pages::plain(file).unwrap()
        };
        Stored {
            bytes: ram.len() as u64,
            sums,
            sums_of_pages,
            pages,
            references: references.to_vec(),
            sources: vec![disk],
        }
    }

    fn laid_out(stored: &Stored) -> Result<File, Vec<u64>> {
        stored.lay_out("test", &Progress::default()).unwrap()
    }

    #[test]
    fn a_ram_image_with_references_or_compression_is_rebuilt_in_an_unwritable_file() {
        for packed in [false, true] {
            let (ram, disk) = image();
            let stored = stored(&ram, disk, packed);
            assert!(stored.verify(&Progress::default()).unwrap().is_empty());
            let laid = laid_out(&stored).unwrap();
            let mut whole = vec![1; ram.len()];
            laid.read_exact_at(&mut whole, 0).unwrap();
            assert!(whole == ram, "packed {packed}");
            let taken = std::os::unix::fs::MetadataExt::blocks(&laid.metadata().unwrap()) * 512;
            assert_eq!(taken, (100 + 10 + 64 + 512 + 1) * PAGE_SIZE);
            assert!(laid.write_at(&[1], 0).is_err());
            assert!(laid.set_len(0).is_err());
        }
    }

    #[test]
    fn if_a_disk_that_a_snapshot_refers_to_changed_the_affected_memory_is_reported() {
        let (ram, disk) = image();
        let stored = stored(&ram, disk.try_clone().unwrap(), false);
        disk.write_all_at(&[0x55], 5 << 12).unwrap();
        assert_eq!(laid_out(&stored).unwrap_err(), [0, 1]);
        disk.set_len(20 << 12).unwrap();
        assert_eq!(laid_out(&stored).unwrap_err(), [0, 1]);
        disk.set_len(0).unwrap();
        assert_eq!(stored.verify(&Progress::default()).unwrap(), [0, 1]);
    }

    #[test]
    fn if_compressed_snapshot_memory_is_changed_or_truncated_its_place_is_reported() {
        let (ram, disk) = image();
        let mut stored = stored(&ram, disk, true);
        let Pages::Packed(packed, frames) = &stored.pages else {
            panic!("it is packed")
        };
        let (packed, frames) = (packed.try_clone().unwrap(), frames.clone());
        let length = packed.metadata().unwrap().len();
        let (mut byte, mut unharmed) = ([0], 0);
        for (chunk, &(at, bytes)) in frames.iter().enumerate().filter(|(_, f)| f.1 > 0) {
            for at in [at, at + 5, at + bytes / 2, at + bytes - 1] {
                packed.read_exact_at(&mut byte, at).unwrap();
                packed.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
                // Some bits in a frame's header do not affect its contents.
                match laid_out(&stored) {
                    Err(wrong) => assert_eq!(wrong, [chunk as u64], "byte {at}"),
                    Ok(laid) => {
                        let mut whole = vec![1; ram.len()];
                        laid.read_exact_at(&mut whole, 0).unwrap();
                        assert!(whole == ram, "byte {at}");
                        unharmed += 1;
                    }
                }
                packed.write_all_at(&byte, at).unwrap();
            }
        }
        assert!(unharmed < 4, "{unharmed}");
        // These places of frames are invalid.
        if let Pages::Packed(_, frames) = &mut stored.pages {
            frames[0].0 = u64::MAX - 3;
            frames[3] = (0, 0);
            frames.pop();
        }
        let wrong = laid_out(&stored).unwrap_err();
        assert_eq!(wrong, [0, 3, 4]);
        packed.set_len(length / 2).unwrap();
        assert!(!laid_out(&stored).unwrap_err().is_empty());
    }

    #[test]
    fn a_malformed_index_of_compressed_frames_is_refused() {
        assert!(pack::frames(&[0; 80], 5).is_ok());
        let refused = |index: &[u8]| pack::frames(index, 5).unwrap_err();
        assert_eq!(refused(&[0; 79]), "the table does not have 5 chunks");
        assert_eq!(refused(&[0xff; 80]), "the frame of chunk 0 is too long");
    }
}
