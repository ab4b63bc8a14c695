//! Encrypts the memory of a snapshot: the RAM image, its tables, and the device state.
//!
//! ```text
//!   operator's key --(BLAKE3, with a salt)--> wrapping key --> data key of the snapshot, in the file `key`
//!   data key -------(BLAKE3, by file name)--> one key for each file --> AES-256-GCM
//!
//!   ram.sealed   frame | frame | ...    each the pages of a chunk of 2 MiB that are not zeroes; in any order
//!   ram.index    where the frame of each chunk is; sealed as a whole, like ram.sums, ram.refs and devices
//! ```
//! Invariants: each snapshot has a data key of its own, and each of its files a key of its own, so
//! no nonce is used twice. The nonce of a frame is the number of its chunk; that of a whole file is
//! 0. A frame that is missing, moved or changed does not open.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicU64, Ordering};

use memfold_units::PAGE_BYTES;
use parking_lot::Mutex;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use rustix::fs::{MemfdFlags, memfd_create};
use zeroize::Zeroizing;

use super::image::{CHUNK_BYTES, CHUNK_PAGES, ImageBlock, SUMS, is_zero};
use super::pack::{FRAME_BYTES, Frame};
use super::pipeline::{self, Writeback};

/// Length in bytes of a key: of the operator's, and of a snapshot's data key.
pub const KEY_BYTES: usize = 32;

/// Length in bytes of the file `key`.
pub const HEADER_BYTES: usize = 112;

/// First bytes of the file `key`.
const MAGIC: &[u8; 8] = b"MFOLDKEY";

/// Version of the file `key`.
const VERSION: u32 = 1;

/// Length in bytes of the tag by which AES-256-GCM finds changes.
const TAG_BYTES: usize = 16;

/// Length in bytes of the list at the beginning of a frame: one bit for each page of the chunk.
const BITS_BYTES: usize = CHUNK_BYTES / PAGE_BYTES / 8;

/// Largest length in bytes of a frame before it is sealed.
const MOST_BODY_BYTES: usize = BITS_BYTES + CHUNK_BYTES;

/// Length in bytes of the buffer in which a frame is made.
pub(super) const BODY_BYTES: usize = MOST_BODY_BYTES + TAG_BYTES;

/// Compression level of frames, as of compressed images.
const LEVEL: i32 = 1;

/// Offsets of the fields of the file `key`.
const ID_AT: usize = 16;
const SALT_AT: usize = 32;
const WRAPPED_AT: usize = 64;

/// Why the file `key` of a snapshot does not give the data key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The file has another length.
    #[error("it has {0} bytes instead of {HEADER_BYTES}")]
    Length(usize),
    /// The file does not begin as the key of a snapshot.
    #[error("it is not the key of a snapshot, or it is damaged")]
    Magic,
    /// A newer memfold wrote the file.
    #[error("its version is {0}, and this memfold reads version {VERSION}")]
    Version(u32),
    /// The file names another key.
    #[error("the snapshot was encrypted with another key")]
    OtherKey,
    /// The file was changed.
    #[error("it was changed since it was saved")]
    Damaged,
}

/// A key that the operator keeps, and that the data keys of snapshots are encrypted with.
#[derive(Clone)]
pub struct OperatorKey(Zeroizing<[u8; KEY_BYTES]>);

impl fmt::Debug for OperatorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OperatorKey")
    }
}

impl OperatorKey {
    /// Parses a key: 64 hexadecimal digits, with white space around them. An error tells what is
    /// wrong, without the text.
    pub fn parse(text: &[u8]) -> Result<Self, &'static str> {
        let wrong = "it is not 64 hexadecimal digits; 'openssl rand -hex 32' makes a key";
        let digits = text.trim_ascii();
        if digits.len() != 2 * KEY_BYTES {
            return Err(wrong);
        }
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        for (byte, pair) in key.iter_mut().zip(digits.chunks_exact(2)) {
            let value = digit(pair[0]).zip(digit(pair[1]));
            let value = value.and_then(|(high, low)| u8::try_from(high << 4 | low).ok());
            *byte = value.ok_or(wrong)?;
        }
        if key.iter().all(|&byte| byte == key[0]) {
            return Err("it is one byte again and again; 'openssl rand -hex 32' makes a key");
        }
        Ok(Self(key))
    }

    /// Returns what tells this key from others, and does not reveal it.
    fn id(&self) -> [u8; SALT_AT - ID_AT] {
        let id = blake3::derive_key("memfold 2026-11-27 snapshot: name of a key", &*self.0);
        std::array::from_fn(|byte| id[byte])
    }

    /// Returns the key that encrypts the data key of the snapshot with this salt.
    fn wrapping(&self, salt: &[u8]) -> io::Result<Sealer> {
        let mut hasher = blake3::Hasher::new_derive_key("memfold 2026-11-27 snapshot: wrapping");
        hasher.update(&*self.0).update(salt);
        Sealer::new(&Zeroizing::new(*hasher.finalize().as_bytes()))
    }
}

/// The random key of one snapshot.
#[derive(Clone)]
pub struct DataKey(Zeroizing<[u8; KEY_BYTES]>);

impl fmt::Debug for DataKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DataKey")
    }
}

impl DataKey {
    /// Makes a key of the kernel's random numbers.
    ///
    /// # Errors
    ///
    /// Fails if the kernel gives none.
    pub fn random() -> io::Result<Self> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        fill(&mut *key)?;
        Ok(Self(key))
    }

    /// Encrypts the key. Returns the contents of the file `key`.
    ///
    /// # Errors
    ///
    /// Fails if the kernel gives no random numbers.
    pub fn wrap(&self, with: &OperatorKey) -> io::Result<Vec<u8>> {
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend([0; 4]);
        header.extend(with.id());
        let mut salt = [0; WRAPPED_AT - SALT_AT];
        fill(&mut salt)?;
        header.extend(salt);
        let mut wrapped = self.0.to_vec();
        let sealer = with.wrapping(&salt)?;
        let tag = sealer.seal(0, &header, &mut wrapped)?;
        header.extend(wrapped);
        header.extend(tag);
        Ok(header)
    }

    /// Decrypts the key in the contents of the file `key`.
    ///
    /// # Errors
    ///
    /// [`HeaderError`] if the file was made with another key, or was changed in any byte.
    pub fn unwrap(header: &[u8], with: &OperatorKey) -> Result<Self, HeaderError> {
        if header.len() != HEADER_BYTES {
            return Err(HeaderError::Length(header.len()));
        }
        if !header.starts_with(MAGIC) {
            return Err(HeaderError::Magic);
        }
        let version = u32::from_le_bytes(std::array::from_fn(|byte| header[MAGIC.len() + byte]));
        if version != VERSION {
            return Err(HeaderError::Version(version));
        }
        if header[ID_AT..SALT_AT] != with.id() {
            return Err(HeaderError::OtherKey);
        }
        let (known, wrapped) = header.split_at(WRAPPED_AT);
        let sealer = with.wrapping(&known[SALT_AT..]);
        let mut wrapped = Zeroizing::new(wrapped.to_vec());
        let opened = sealer.and_then(|sealer| sealer.open(0, known, &mut wrapped).map(drop));
        opened.map_err(|_| HeaderError::Damaged)?;
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        key.copy_from_slice(&wrapped[..KEY_BYTES]);
        Ok(Self(key))
    }

    /// Returns the key of the snapshot's file `part`.
    ///
    /// # Errors
    ///
    /// Never, unless the cipher changes.
    pub(super) fn of_file(&self, part: &str) -> io::Result<Sealer> {
        let mut hasher = blake3::Hasher::new_derive_key("memfold 2026-11-27 snapshot: file");
        hasher.update(&*self.0).update(part.as_bytes());
        Sealer::new(&Zeroizing::new(*hasher.finalize().as_bytes()))
    }

    /// Seals the whole contents of the file `part`. `bound` must be the same when the file is
    /// opened.
    pub(super) fn seal_file(
        &self,
        part: &str,
        bound: &[u8],
        mut bytes: Vec<u8>,
    ) -> io::Result<Vec<u8>> {
        let tag = self.of_file(part)?.seal(0, bound, &mut bytes)?;
        bytes.extend(tag);
        Ok(bytes)
    }

    /// Opens the sealed contents of the file `part`.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidData`] if they were changed.
    pub(super) fn open_file(
        &self,
        part: &str,
        bound: &[u8],
        mut bytes: Vec<u8>,
    ) -> io::Result<Vec<u8>> {
        let length = self.of_file(part)?.open(0, bound, &mut bytes)?.len();
        bytes.truncate(length);
        Ok(bytes)
    }
}

/// Fills a buffer with random numbers of the kernel.
fn fill(buffer: &mut [u8]) -> io::Result<()> {
    let filled = SystemRandom::new().fill(buffer);
    filled.map_err(|_| io::Error::other("the kernel gives no random numbers"))
}

/// The key of one file.
#[derive(Debug)]
pub(super) struct Sealer(Box<LessSafeKey>);

impl Sealer {
    fn new(key: &[u8; KEY_BYTES]) -> io::Result<Self> {
        let key = UnboundKey::new(&AES_256_GCM, key);
        let key = key.map_err(|_| io::Error::other("the key does not fit the cipher"))?;
        Ok(Self(Box::new(LessSafeKey::new(key))))
    }

    fn nonce(number: u64) -> Nonce {
        let mut nonce = [0; 12];
        nonce[..8].copy_from_slice(&number.to_le_bytes());
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts message `number` in place, and returns its tag. No other message of this key may
    /// have the same number.
    fn seal(&self, number: u64, bound: &[u8], bytes: &mut [u8]) -> io::Result<[u8; TAG_BYTES]> {
        let nonce = Self::nonce(number);
        let tag = self
            .0
            .seal_in_place_separate_tag(nonce, Aad::from(bound), bytes);
        let tag = tag.map_err(|_| io::Error::other("the bytes are too many for the cipher"))?;
        let mut all = [0; TAG_BYTES];
        all.copy_from_slice(tag.as_ref());
        Ok(all)
    }

    /// Decrypts message `number` in place, which ends with its tag, and returns it without the tag.
    fn open<'a>(&self, number: u64, bound: &[u8], bytes: &'a mut [u8]) -> io::Result<&'a mut [u8]> {
        let opened = self
            .0
            .open_in_place(Self::nonce(number), Aad::from(bound), bytes);
        opened.map_err(|_| invalid("the bytes were changed, or belong elsewhere"))
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Returns a file in memory with these bytes, open for reading only, as QEMU takes it.
pub(super) fn in_memory(bytes: &[u8]) -> io::Result<File> {
    let file = memory_file()?;
    pipeline::write_all_at(&file, bytes, 0)?;
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Returns an empty file in memory, for bytes that must not be on a disk.
pub(super) fn memory_file() -> io::Result<File> {
    Ok(memfd_create("memfold-secret", MemfdFlags::CLOEXEC)?.into())
}

/// Returns what the table of frames is bound to: which page of the image belongs to which page of
/// which RAM block. Length of the image and number of blocks, and of each block: length of its
/// name, name, first page, number of pages. Numbers have 8 bytes, little endian.
pub(super) fn bound_layout(ram_bytes: u64, blocks: &[ImageBlock]) -> Vec<u8> {
    let mut bound = ram_bytes.to_le_bytes().to_vec();
    bound.extend((blocks.len() as u64).to_le_bytes());
    for block in blocks {
        bound.extend((block.name.len() as u64).to_le_bytes());
        bound.extend(block.name.as_bytes());
        bound.extend(block.first_page.to_le_bytes());
        bound.extend(block.pages.to_le_bytes());
    }
    bound
}

/// A frame that is being made: the list of its pages, and the pages.
#[derive(Debug)]
pub(super) struct Body<'a> {
    buffer: &'a mut [u8],
    pages: usize,
    /// First page of the chunk that may still be added.
    next: u64,
}

impl<'a> Body<'a> {
    /// Begins a frame in a buffer of [`BODY_BYTES`] bytes.
    pub(super) fn new(buffer: &'a mut [u8]) -> Self {
        buffer[..BITS_BYTES].fill(0);
        Self {
            buffer,
            pages: 0,
            next: 0,
        }
    }

    /// Adds the pages that are not zeroes, from page `first` of the chunk on. Pages must be added
    /// in ascending order. Returns the number of added pages.
    pub(super) fn add(&mut self, first: u64, bytes: &[u8]) -> io::Result<u64> {
        if first < self.next {
            return Err(io::Error::other("a page of the image would be saved twice"));
        }
        let before = self.pages;
        for (page, bytes) in (first..CHUNK_PAGES).zip(bytes.chunks_exact(PAGE_BYTES)) {
            self.next = page + 1;
            if is_zero(bytes) {
                continue;
            }
            let bit = usize::try_from(page).map_err(io::Error::other)?;
            self.buffer[bit / 8] |= 1 << (bit % 8);
            self.buffer[BITS_BYTES + self.pages * PAGE_BYTES..][..PAGE_BYTES]
                .copy_from_slice(bytes);
            self.pages += 1;
        }
        Ok((self.pages - before) as u64)
    }
}

/// Puts the pages of an opened frame at their places in `buffer`, which has the length of a chunk.
/// All other pages become zeroes.
///
/// # Errors
///
/// [`io::ErrorKind::InvalidData`] if the frame's list does not fit its length.
pub fn expand(body: &[u8], buffer: &mut [u8]) -> io::Result<()> {
    let wrong = || invalid("the frame's list of pages does not fit its length");
    let (bits, mut pages) = body.split_at_checked(BITS_BYTES).ok_or_else(wrong)?;
    let listed: u32 = bits.iter().map(|byte| byte.count_ones()).sum();
    let length = usize::try_from(listed).map_err(io::Error::other)? * PAGE_BYTES;
    if pages.len() != length || buffer.len() != CHUNK_BYTES {
        return Err(wrong());
    }
    for (page, to) in buffer.chunks_exact_mut(PAGE_BYTES).enumerate() {
        if bits[page / 8] >> (page % 8) & 1 == 0 {
            to.fill(0);
            continue;
        }
        let (from, rest) = pages.split_at(PAGE_BYTES);
        to.copy_from_slice(from);
        pages = rest;
    }
    Ok(())
}

/// A RAM image that is being encrypted, chunk by chunk, while it is written.
#[derive(Debug)]
pub struct SealedImage {
    key: DataKey,
    sealer: Sealer,
    compress: bool,
    /// Length of the file so far.
    end: AtomicU64,
    /// For each chunk, the place of its frame.
    frames: Mutex<Vec<Frame>>,
}

impl SealedImage {
    /// Begins an image of `chunks` chunks. With `compress`, frames are compressed before they are
    /// encrypted.
    pub(super) fn new(key: DataKey, part: &str, compress: bool, chunks: usize) -> io::Result<Self> {
        Ok(Self {
            sealer: key.of_file(part)?,
            key,
            compress,
            end: AtomicU64::new(0),
            frames: Mutex::new(vec![(0, 0); chunks]),
        })
    }

    /// Encrypts the frame of a chunk, and appends it to `file`. Each chunk may be written once.
    pub(super) fn write(
        &self,
        chunk: u64,
        body: Body<'_>,
        file: &File,
        writeback: Option<&Writeback>,
    ) -> io::Result<()> {
        let Body { buffer, pages, .. } = body;
        if pages == 0 {
            return Ok(());
        }
        let number = usize::try_from(chunk).map_err(io::Error::other)?;
        // The same number twice would reveal the bytes of both frames.
        let is_written = self
            .frames
            .lock()
            .get(number)
            .is_none_or(|frame| frame.1 > 0);
        if is_written {
            return Err(io::Error::other(
                "a chunk of the image would be saved twice",
            ));
        }
        let mut length = BITS_BYTES + pages * PAGE_BYTES;
        let mut compressed;
        let buffer = if self.compress {
            compressed = zstd::bulk::compress(&buffer[..length], LEVEL)?;
            length = compressed.len();
            compressed.resize(length + TAG_BYTES, 0);
            &mut compressed[..]
        } else {
            buffer
        };
        let tag = self.sealer.seal(chunk, &[], &mut buffer[..length])?;
        buffer[length..length + TAG_BYTES].copy_from_slice(&tag);
        let frame = &buffer[..length + TAG_BYTES];
        let at = self.end.fetch_add(frame.len() as u64, Ordering::Relaxed);
        pipeline::write_all_at(file, frame, at)?;
        if let Some(writeback) = writeback {
            writeback.add(at..at + frame.len() as u64);
        }
        self.frames.lock()[number] = (at, frame.len() as u64);
        Ok(())
    }

    /// Returns the sealed table of frames, `ram.index`.
    pub(super) fn index(&self, layout: &[u8], part: &str) -> io::Result<Vec<u8>> {
        let frames = self.frames.lock();
        let mut table = Vec::with_capacity(frames.len() * FRAME_BYTES + TAG_BYTES);
        for (at, length) in frames.iter() {
            table.extend(at.to_le_bytes());
            table.extend(length.to_le_bytes());
        }
        drop(frames);
        self.key.seal_file(part, layout, table)
    }

    /// Returns the sealed checksums of the image, `ram.sums`.
    pub(super) fn sums(&self, sums: Vec<u8>) -> io::Result<Vec<u8>> {
        self.key.seal_file(SUMS, &[], sums)
    }

    /// Returns the length of the image's file.
    pub(super) fn bytes(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }
}

/// An encrypted RAM image that is read.
#[derive(Debug)]
pub struct SealedPages {
    pub(super) file: File,
    pub(super) frames: Vec<Frame>,
    pub(super) sealer: Sealer,
    pub(super) is_compressed: bool,
}

impl SealedPages {
    /// Reads a chunk into `buffer`. Returns whether the image holds pages of it.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidData`] if the frame was changed.
    pub(super) fn read(&self, chunk: u64, buffer: &mut [u8]) -> io::Result<bool> {
        use std::os::unix::fs::FileExt as _;
        let number = usize::try_from(chunk).map_err(io::Error::other)?;
        let (at, length) = self.frames.get(number).copied().unwrap_or_default();
        if length == 0 {
            return Ok(false);
        }
        let mut frame = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut frame, at)?;
        let body = self.sealer.open(chunk, &[], &mut frame)?;
        if self.is_compressed {
            expand(&zstd::bulk::decompress(body, MOST_BODY_BYTES)?, buffer)?;
        } else {
            expand(body, buffer)?;
        }
        Ok(true)
    }

    /// Returns the largest number of bytes of memory that the image can take.
    pub(super) fn most_bytes(&self) -> u64 {
        let held = self.frames.iter().filter(|frame| frame.1 > 0);
        let of_frame = |frame: &Frame| {
            if self.is_compressed {
                CHUNK_BYTES as u64
            } else {
                frame.1
            }
        };
        held.map(of_frame).sum()
    }
}

#[cfg(test)]
#[path = "encryption_tests.rs"]
mod tests;
