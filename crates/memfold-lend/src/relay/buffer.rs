//! A byte buffer with which the relay between QEMU and a lending host reads from and writes to
//! nonblocking sockets.

use std::io::{self, Read, Write};

/// Number of bytes of one read.
pub(super) const READ: usize = 256 << 10;

/// Maximum number of unprocessed bytes in a buffer. It exceeds the size of the answers to all
/// requests in progress.
pub(super) const MOST: usize = 8 << 20;

/// A queue of bytes of one connection.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    pub(super) bytes: Vec<u8>,
    /// Number of bytes at the start that are processed already.
    done: usize,
}

impl Buffer {
    pub(super) fn rest(&self) -> &[u8] {
        &self.bytes[self.done..]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.done == self.bytes.len()
    }

    pub(super) fn skip(&mut self, count: usize) {
        self.done += count;
        if self.is_empty() {
            self.bytes.clear();
            self.done = 0;
        } else if self.done > READ {
            // Bytes are moved only after more than [`READ`] bytes were processed, so that each byte
            // is moved once on average.
            self.bytes.drain(..self.done);
            self.done = 0;
        }
    }

    pub(super) fn first<const N: usize>(&self) -> Option<[u8; N]> {
        self.rest().first_chunk().copied()
    }

    /// Reads the bytes that are available, until [`MOST`] are in the buffer. Returns whether the
    /// stream has ended. If `ahead` is set, the stream may hold bytes that its socket no longer
    /// shows.
    pub(super) fn fill(
        &mut self,
        from: &mut impl Read,
        scratch: &mut [u8],
        ahead: bool,
    ) -> io::Result<bool> {
        while self.rest().len() < MOST {
            match from.read(scratch) {
                Ok(0) => return Ok(true),
                Ok(count) => {
                    self.bytes.extend_from_slice(&scratch[..count]);
                    // The next poll reports bytes that arrive later, unless they have left the
                    // socket already.
                    if !ahead && count < scratch.len() {
                        return Ok(false);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Writes as many bytes as the socket accepts.
    pub(super) fn drain(&mut self, to: &mut impl Write) -> io::Result<()> {
        while !self.is_empty() {
            match to.write(self.rest()) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.skip(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
