//! Frames of a connection that streams a command's input and output: `POST
//! /v1/vms/{name}/exec/stream` with the header `upgrade: memfold-exec`, after the response with
//! status 101.
//!
//! ```text
//!   u8 kind | u32 length of the payload, little-endian, at most 65,536 | payload
//! ```
//!
//! | kind | from the client | from the daemon |
//! |---|---|---|
//! | 0 | standard input, within the room | standard output |
//! | 1 | end of standard input | standard error |
//! | 2 | `u16` rows, `u16` columns: new size of the terminal | `u32`: room for so many bytes more of standard input |
//! | 3 | `u8`: number of a signal in Linux | `i32` exit code; the last frame |
//! | 4 | | UTF-8 text: why the command was ended; the last frame |
//!
//! Numbers are little-endian. The client begins without room for input, so that its other frames
//! never wait behind input that the command does not read.

use std::io::{self, Read};

/// Value of the header `upgrade` of `POST /v1/vms/{name}/exec/stream`.
pub const EXEC_PROTOCOL: &str = "memfold-exec";

/// Length of a frame's header in bytes.
pub const EXEC_HEADER: usize = 5;

/// Largest payload of a frame, in bytes.
pub const EXEC_PAYLOAD: usize = 64 << 10;

/// Why the bytes of a peer are not a valid frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum ExecFrameError {
    #[error("a frame of {0} bytes was received; at most {EXEC_PAYLOAD} are allowed")]
    TooLong(usize),
    #[error("a frame of the unknown kind {0} was received")]
    Kind(u8),
    #[error("a frame of kind {kind} with {length} bytes was received")]
    Length { kind: u8, length: usize },
}

/// A frame from the client to the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExecOrder {
    /// Standard input for the command.
    Input(Vec<u8>),
    /// End of the command's standard input.
    EndInput,
    /// New size of the terminal, in characters.
    Resize {
        /// Number of rows.
        rows: u16,
        /// Number of columns.
        columns: u16,
    },
    /// Number of a signal for the command.
    Signal(u8),
}

/// A frame from the daemon to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExecEvent {
    /// The command wrote this to its standard output or terminal.
    Stdout(Vec<u8>),
    /// The command wrote this to its standard error.
    Stderr(Vec<u8>),
    /// The client may send so many bytes more of standard input.
    InputRoom(u32),
    /// The command has ended with this exit code; 128 + signal if a signal killed the command.
    Exited(i32),
    /// The command was ended for this reason.
    Failed(String),
}

/// Parses a frame's header. Returns kind and length of the payload.
pub fn exec_header(header: [u8; EXEC_HEADER]) -> Result<(u8, usize), ExecFrameError> {
    let [kind, length @ ..] = header;
    let length = u32::from_le_bytes(length) as usize;
    if length > EXEC_PAYLOAD {
        return Err(ExecFrameError::TooLong(length));
    }
    Ok((kind, length))
}

fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    debug_assert!(payload.len() <= EXEC_PAYLOAD);
    // The caller keeps to the limit, which is far below 2^32.
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(EXEC_HEADER + payload.len());
    bytes.push(kind);
    bytes.extend(length.to_le_bytes());
    bytes.extend(payload);
    bytes
}

fn exact<const N: usize>(kind: u8, payload: &[u8]) -> Result<[u8; N], ExecFrameError> {
    let length = payload.len();
    let wrong = |_| ExecFrameError::Length { kind, length };
    payload.try_into().map_err(wrong)
}

impl ExecOrder {
    /// Encodes the frame. Input has at most [`EXEC_PAYLOAD`] bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Input(bytes) => frame(0, bytes),
            Self::EndInput => frame(1, &[]),
            Self::Resize { rows, columns } => {
                let ([a, b], [c, d]) = (rows.to_le_bytes(), columns.to_le_bytes());
                frame(2, &[a, b, c, d])
            }
            Self::Signal(number) => frame(3, &[*number]),
        }
    }

    /// Parses a frame.
    pub fn decode(kind: u8, payload: Vec<u8>) -> Result<Self, ExecFrameError> {
        Ok(match kind {
            0 => Self::Input(payload),
            1 => {
                exact::<0>(kind, &payload)?;
                Self::EndInput
            }
            2 => {
                let [a, b, c, d] = exact(kind, &payload)?;
                Self::Resize {
                    rows: u16::from_le_bytes([a, b]),
                    columns: u16::from_le_bytes([c, d]),
                }
            }
            3 => {
                let [number] = exact(kind, &payload)?;
                Self::Signal(number)
            }
            _ => return Err(ExecFrameError::Kind(kind)),
        })
    }
}

impl ExecEvent {
    /// Encodes the frame. Output has at most [`EXEC_PAYLOAD`] bytes; a longer text is cut.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Stdout(bytes) => frame(0, bytes),
            Self::Stderr(bytes) => frame(1, bytes),
            Self::InputRoom(bytes) => frame(2, &bytes.to_le_bytes()),
            Self::Exited(code) => frame(3, &code.to_le_bytes()),
            Self::Failed(text) => {
                let text = text.as_bytes();
                frame(4, &text[..text.len().min(EXEC_PAYLOAD)])
            }
        }
    }

    /// Parses a frame. Invalid UTF-8 in a text is replaced.
    pub fn decode(kind: u8, payload: Vec<u8>) -> Result<Self, ExecFrameError> {
        Ok(match kind {
            0 => Self::Stdout(payload),
            1 => Self::Stderr(payload),
            2 => Self::InputRoom(u32::from_le_bytes(exact(kind, &payload)?)),
            3 => Self::Exited(i32::from_le_bytes(exact(kind, &payload)?)),
            4 => Self::Failed(String::from_utf8_lossy(&payload).into_owned()),
            _ => return Err(ExecFrameError::Kind(kind)),
        })
    }

    /// Reads the next frame; `None` at the end of the connection.
    pub fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let wrong = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        let mut header = [0; EXEC_HEADER];
        match from.read_exact(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        let (kind, length) = exec_header(header).map_err(wrong)?;
        let mut payload = vec![0; length];
        from.read_exact(&mut payload)?;
        Self::decode(kind, payload).map(Some).map_err(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_frame_of_a_streamed_command_is_the_same_after_it_is_encoded_and_decoded() {
        for order in [
            ExecOrder::Input(vec![0, 255]),
            ExecOrder::EndInput,
            ExecOrder::Resize {
                rows: 50,
                columns: 513,
            },
            ExecOrder::Signal(2),
        ] {
            let bytes = order.encode();
            let (kind, length) = exec_header(*bytes.first_chunk().unwrap()).unwrap();
            assert_eq!(length, bytes.len() - EXEC_HEADER);
            let again = ExecOrder::decode(kind, bytes[EXEC_HEADER..].to_vec());
            assert_eq!(again, Ok(order));
        }
        for event in [
            ExecEvent::Stdout(vec![1; EXEC_PAYLOAD]),
            ExecEvent::Stderr(Vec::new()),
            ExecEvent::InputRoom(1 << 17),
            ExecEvent::Exited(-1),
            ExecEvent::Failed("gone".into()),
        ] {
            let bytes = event.encode();
            let read = ExecEvent::read(&mut &bytes[..]).unwrap();
            assert_eq!(read, Some(event));
        }
        assert_eq!(ExecEvent::read(&mut &[][..]).unwrap(), None);
    }

    #[test]
    fn a_frame_that_is_too_long_or_of_an_unknown_kind_is_an_error() {
        let long = [0, 1, 0, 1, 0];
        assert_eq!(exec_header(long), Err(ExecFrameError::TooLong(65_537)));
        assert_eq!(
            ExecOrder::decode(9, Vec::new()),
            Err(ExecFrameError::Kind(9))
        );
        let short = ExecOrder::decode(2, vec![1]);
        assert_eq!(short, Err(ExecFrameError::Length { kind: 2, length: 1 }));
        let error = ExecEvent::read(&mut &long[..]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
