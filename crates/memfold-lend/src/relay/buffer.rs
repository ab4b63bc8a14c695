//! A byte buffer for reading from and writing to nonblocking sockets.

use std::io::{self, Read, Write};

/// Bytes that are read at a time.
pub(super) const READ: usize = 256 << 10;

/// Most bytes that are read ahead of what is done with them: more than answers to all that is under
/// way.
pub(super) const MOST: usize = 8 << 20;

/// Bytes that come or go, in order.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    pub(super) bytes: Vec<u8>,
    /// How many of them are done with.
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
            // Moved when it's as much as was read, so that a byte is moved once on average.
            self.bytes.drain(..self.done);
            self.done = 0;
        }
    }

    pub(super) fn first<const N: usize>(&self) -> Option<[u8; N]> {
        self.rest().first_chunk().copied()
    }

    /// Reads what is there, up to [`MOST`]; whether that was the end.
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
                    // More than that is told by the next look, unless it has left the socket
                    // already.
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

    /// Writes as much as goes.
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
