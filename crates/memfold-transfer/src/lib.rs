//! Snapshots in object stores: push, pull, list and remove.
//!
//! ```text
//!   snapshot's files --1 MiB--> chunk --BLAKE3--> name    --zstd--> chunks/HH/HASH           what is there is not sent again
//!                                  '--> table of all chunks' names  indexes/HASH
//!                                                 manifest, files   snapshots/NAME.json      written last
//!                                                 Ed25519 (if asked) signatures/HASH
//! ```
//! The layout is in `docs/object-store-format.md`. The store is not trusted: each chunk and each
//! index is compared with its name before its bytes are used, and a signature covers the rest.
//! A push that is interrupted leaves chunks that the next push finds; a pull that is interrupted
//! continues with the chunks that have arrived.

pub mod chunk;
mod description;
mod error;
mod pull;
mod push;
mod remote;
mod remove;
mod signature;

pub use description::{Description, FileEntry};
pub use error::TransferError;
pub use pull::{PullReport, PullRequest, pull};
pub use push::{PushReport, PushRequest, push};
pub use remote::{Remote, RemoteSnapshot};
pub use remove::{RemoveReport, remove};
