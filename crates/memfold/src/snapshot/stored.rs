//! An image as it is read again, chunk by chunk.
//!
//! ```text
//!   ram, or ram.zst + ram.index  --+
//!   disks, by ram.refs           --+-->  chunk  -- ram.sums: right? -->  mapped, or laid out in memory
//! ```
//! An image that lies in `ram` alone is mapped as it is. One that is compressed or refers to disks is *laid out* first: once for all VMs that
//! run from it, in sealed memory, which needs nothing of the files any more.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use memfold_units::PAGE_SIZE;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use xxhash_rust::xxh3::xxh3_128;

use super::image::{CHUNK_BYTES, CHUNK_PAGES, Data, SUM_BYTES, each_chunk, write_nonzero};
use super::pack::{self, Frame};
use super::progress::Progress;
use super::refer::Reference;

/// An image.
#[derive(Debug)]
pub struct Stored {
    /// Length, when it is whole.
    pub bytes: u64,
    /// What `ram.sums` holds.
    pub sums: Vec<u8>,
    /// What lies in files of its own.
    pub pages: Pages,
    /// What disks hold, ascending.
    pub references: Vec<Reference>,
    /// Their files.
    pub sources: Vec<File>,
}

/// What lies in an image's own files.
#[derive(Debug)]
pub enum Pages {
    /// A sparse file, and what of it is no hole.
    Plain(File, Vec<Range<u64>>),
    /// Frames of chunks.
    Packed(File, Vec<Frame>),
}

impl Pages {
    /// A sparse file.
    pub fn plain(ram: File) -> io::Result<Self> {
        let data = Data::of(&ram)?.collect();
        Ok(Self::Plain(ram, data))
    }

    /// Reads a chunk; whether there is anything in it.
    fn read(&self, chunk: u64, buffer: &mut [u8]) -> io::Result<bool> {
        let start = chunk * CHUNK_BYTES as u64;
        match self {
            Self::Plain(ram, data) => {
                let next = data.partition_point(|part| part.end <= start);
                let holds = data
                    .get(next)
                    .is_some_and(|part| part.start < start + CHUNK_BYTES as u64);
                if holds {
                    ram.read_exact_at(buffer, start)?;
                }
                Ok(holds)
            }
            Self::Packed(packed, frames) => {
                let number = usize::try_from(chunk).map_err(io::Error::other)?;
                let frame = frames.get(number).copied().unwrap_or_default();
                if frame.1 > 0 {
                    pack::unpack(packed, frame, buffer)?;
                }
                Ok(frame.1 > 0)
            }
        }
    }
}

impl Stored {
    fn chunks(&self) -> u64 {
        self.bytes.div_ceil(CHUNK_BYTES as u64)
    }

    /// Reads a chunk from all places that it lies in; whether there is anything in it.
    fn read(&self, chunk: u64, buffer: &mut [u8]) -> io::Result<bool> {
        let holds = self.pages.read(chunk, buffer)?;
        let first = chunk * CHUNK_PAGES;
        let from = self.references.partition_point(|r| r.page < first);
        let here = self.references[from..]
            .iter()
            .take_while(|r| r.page < first + CHUNK_PAGES);
        let mut refers = false;
        for reference in here {
            if !holds && !refers {
                buffer.fill(0);
            }
            refers = true;
            let at = usize::try_from((reference.page - first) * PAGE_SIZE);
            let at = at.map_err(io::Error::other)?;
            let file = usize::try_from(reference.file).map_err(io::Error::other)?;
            let part = &mut buffer[at..][..reference.length()];
            self.sources[file].read_exact_at(part, reference.block * PAGE_SIZE)?;
        }
        Ok(holds || refers)
    }

    fn sum(&self, chunk: u64) -> io::Result<u128> {
        let at = usize::try_from(chunk).map_err(io::Error::other)? * SUM_BYTES;
        let sum = self.sums.get(at..at + SUM_BYTES);
        let sum = sum.ok_or_else(|| io::Error::other("there is no checksum of it"))?;
        Ok(u128::from_le_bytes(std::array::from_fn(|byte| sum[byte])))
    }

    /// Reads the whole image and compares its checksums; numbers of the chunks that differ, or whose frames can't be read. What is right
    /// goes to `right`, unless it is all zeroes.
    fn check(
        &self,
        progress: &Progress,
        right: impl Fn(u64, &[u8]) -> io::Result<()> + Sync,
    ) -> io::Result<Vec<u64>> {
        let empty = xxh3_128(&vec![0; CHUNK_BYTES]);
        let wrong = Mutex::new(Vec::new());
        each_chunk(self.chunks(), |chunk, buffer| {
            let sum = match self.read(chunk, buffer) {
                Ok(true) => Some(xxh3_128(buffer)),
                Ok(false) => Some(empty),
                // Cut off, or no frame any more.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::UnexpectedEof
                            | io::ErrorKind::InvalidData
                            | io::ErrorKind::Other
                    ) =>
                {
                    None
                }
                Err(error) => return Err(error),
            };
            if sum != Some(self.sum(chunk)?) {
                wrong
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(chunk);
            } else if sum != Some(empty) {
                right(chunk, buffer)?;
            }
            progress.add(CHUNK_BYTES as u64);
            Ok(())
        })?;
        let mut wrong = wrong.into_inner().unwrap_or_else(PoisonError::into_inner);
        wrong.sort_unstable();
        Ok(wrong)
    }

    /// Numbers of the chunks that aren't what was saved.
    pub fn verify(&self, progress: &Progress) -> io::Result<Vec<u64>> {
        self.check(progress, |_, _| Ok(()))
    }

    /// Lays the image out in memory that nobody can change, called `name`; or numbers of the chunks that aren't what was saved.
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
