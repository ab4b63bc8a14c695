//! The two protocols of memfold, between daemon and guest agent and between daemon and library in
//! QEMU: types, framing and limits, without I/O.
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
//! [`postcard`] encoding of one message. A peer that sends a longer frame than [`frame::MAX_BODY`],
//! or a body that cannot be decoded, has broken the protocol; the other side drops the connection,
//! never the VM. Every list has a limit, stated in [`agent`] and [`library`]. The decoder checks it
//! with `validate`, so the size of the frame bounds the memory for a message.

pub mod agent;
pub mod frame;
pub mod library;
pub mod past;

pub use frame::{Decoder, FrameError, encode};
