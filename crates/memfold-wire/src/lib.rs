//! The two protocols of memfold. Types, framing and limits; no I/O.
//!
//! ```text
//!   guest                        host
//!   +---------------+  agent   +--------+  library  +------+
//!   | memfold-agent | -------> | daemon | --------> | QEMU |
//!   +---------------+  virtio  +--------+  Unix     +------+
//!        untrusted     serial   decides    socket    carries out
//! ```
//!
//! Both use the same framing ([`frame`]): a little-endian `u32` body length, then the body, a
//! [`postcard`] encoding of one message. A peer that sends a longer frame than [`frame::MAX_BODY`]
//! or a body that doesn't decode has broken the protocol; the other side drops the connection,
//! never the VM. Every list has a limit that [`agent`] and [`library`] state and that the decoder's
//! caller checks with `validate`, so memory used for a message is bounded by its frame.

pub mod agent;
pub mod frame;
pub mod library;
pub mod past;

pub use frame::{Decoder, FrameError, encode};
