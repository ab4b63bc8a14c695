//! Frames of memfold's two message protocols, with the guest agent and with memfold's library in
//! QEMU. A frame is a little-endian `u32`, the length of the body in bytes, and then the body.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum length of a frame's body in bytes, in both protocols and both directions.
pub const MAX_BODY: usize = 256 << 10;

/// Length of a frame's header in bytes.
pub const HEADER: usize = 4;

/// Reason why a frame could not be encoded or decoded.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The body is longer than [`MAX_BODY`].
    #[error("message of {0} bytes; at most {MAX_BODY} bytes are allowed")]
    TooLong(usize),
    /// The body is no message of the protocol.
    #[error("received bytes are not a valid message")]
    Malformed(#[source] postcard::Error),
    /// The message was decoded, but exceeds a limit of its protocol, which the text names.
    #[error("message exceeds a limit of the protocol: {0}")]
    Limit(&'static str),
}

/// A message whose protocol limits the lengths of its lists, ranges and texts.
pub trait Validate {
    /// Checks the message against every limit of the message's protocol.
    fn validate(&self) -> Result<(), FrameError>;
}

/// Encodes `message` as a frame: the header, then the body. Fails if the body is longer than
/// [`MAX_BODY`].
pub fn encode<M: Serialize>(message: &M) -> Result<Vec<u8>, FrameError> {
    let frame = postcard::to_extend(message, vec![0; HEADER]).map_err(FrameError::Malformed)?;
    seal(frame)
}

fn seal(mut frame: Vec<u8>) -> Result<Vec<u8>, FrameError> {
    let body = frame.len() - HEADER;
    let length = u32::try_from(body)
        .ok()
        .filter(|_| body <= MAX_BODY)
        .ok_or(FrameError::TooLong(body))?;
    frame[..HEADER].copy_from_slice(&length.to_le_bytes());
    Ok(frame)
}

/// Decoder that collects received bytes and returns whole messages. The decoder holds at most one
/// frame and the bytes of one read.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    start: usize,
}

impl Decoder {
    /// Creates an empty decoder.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes that were received from the peer to the decoder's buffer.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the number of received bytes whose message was not returned yet.
    #[must_use]
    pub fn buffered(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// Returns the next whole message; `None` while its frame is incomplete.
    ///
    /// # Errors
    ///
    /// Fails if the bytes are not a valid frame; the rest of the stream cannot be decoded either,
    /// so the caller must close the connection.
    #[allow(clippy::should_implement_trait)] // generic in the message, so it can't be an iterator
    pub fn next<M: DeserializeOwned + Validate>(&mut self) -> Result<Option<M>, FrameError> {
        let rest = &self.bytes[self.start..];
        let Some((header, rest)) = rest.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*header) as usize;
        if length > MAX_BODY {
            return Err(FrameError::TooLong(length));
        }
        let Some(body) = rest.get(..length) else {
            return Ok(None);
        };
        let message: M = decode_body(body)?;
        self.start += HEADER + length;
        Ok(Some(message))
    }
}

/// Decodes the body of a frame, without the header, and checks the message against the limits of
/// its protocol.
pub fn decode_body<M: DeserializeOwned + Validate>(body: &[u8]) -> Result<M, FrameError> {
    let (message, rest) = postcard::take_from_bytes::<M>(body).map_err(FrameError::Malformed)?;
    if !rest.is_empty() {
        return Err(FrameError::Limit("bytes after the message"));
    }
    message.validate()?;
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::{FromAgent, HintRun};
    use proptest::prelude::*;

    #[test]
    fn a_message_is_decoded_however_the_stream_is_split_into_pieces() {
        let sent = FromAgent::Hints(vec![
            HintRun {
                file: 7,
                page: 3,
                pfn: 0x1234,
                pages: 64
            };
            100
        ]);
        let frame = encode(&sent).unwrap();
        for chunk in [1, 3, 64, frame.len()] {
            let mut decoder = Decoder::new();
            let mut got = None;
            for piece in frame.chunks(chunk) {
                decoder.push(piece);
                got = got.or(decoder.next::<FromAgent>().unwrap());
            }
            assert_eq!(got, Some(sent.clone()));
        }
    }

    #[test]
    fn a_message_above_the_size_limit_is_an_error_before_its_body_arrives() {
        let mut decoder = Decoder::new();
        decoder.push(&u32::MAX.to_le_bytes());
        assert!(matches!(
            decoder.next::<FromAgent>(),
            Err(FrameError::TooLong(_))
        ));
    }

    proptest! {
        #[test]
        fn decoding_arbitrary_bytes_as_messages_never_causes_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2048)) {
            let mut decoder = Decoder::new();
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next::<FromAgent>() {}
        }
    }
}
