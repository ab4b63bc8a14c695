//! Messages of memfold's two protocols: between the daemon and the guest agent, and between the
//! daemon and memfold's library in QEMU. The crate defines types, framing and limits; it does no
//! I/O.
//!
//! The agent reports what the guest's page cache holds, the daemon decides which pages to fold, and
//! the library changes QEMU's mappings:
//!
//! ```text
//!   guest                        host
//!   +---------------+  agent   +--------+  library  +------+
//!   | memfold-agent | -------> | daemon | --------> | QEMU |
//!   +---------------+  virtio  +--------+  Unix     +------+
//!        untrusted     serial   decides    socket    carries out
//! ```
//!
//! Both protocols use the same framing ([`frame`]): a little-endian `u32` body length, then the
//! body, a [`postcard`] encoding of one message. A peer breaks the protocol if it sends a frame
//! longer than [`frame::MAX_BODY`], or a body that cannot be decoded. The other side then drops the
//! connection; the VM runs on. Every list has a limit, stated in [`agent`] and [`library`]. The
//! decoder checks the limits with `validate`, so the size of the frame bounds the memory for a
//! message.

pub mod agent;
pub mod frame;
pub mod library;
pub mod memory;
pub mod order;
pub mod past;
pub mod permission;

pub use frame::{Decoder, FrameError, encode};
