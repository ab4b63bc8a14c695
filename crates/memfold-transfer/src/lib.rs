//! Copies snapshots to object stores (push) and back (pull), and lists and removes them there. The
//! drawing shows the objects that a push writes.
//!
//! ```text
//!   snapshot's files --1 MiB--> chunk --BLAKE3--> name    --zstd--> chunks/HH/HASH           what is there is not sent again
//!                                  '--> table of all chunks' names  indexes/HASH
//!                     pages touched at once --zstd--> 2 MiB parts   first-pages/HASH         fetched before chunks
//!                                                 manifest, files   snapshots/NAME.json      written last
//!                                                 Ed25519 (if asked) signatures/HASH
//! ```
//! The page `docs/object-store-format.md` describes the objects. The store is not trusted: before
//! the bytes of a chunk or an index are used, their hash is compared with the object's name. A
//! signature, if required, covers the rest. After an interrupted push, the next push finds the
//! chunks that were sent. After an interrupted pull, the next pull keeps the chunks that have
//! arrived.

mod bring;
pub mod chunk;
mod description;
mod error;
mod first;
pub mod first_pages;
mod gather;
mod kept;
mod local;
pub mod nbd;
mod places;
mod pull;
mod push;
mod remote;
mod remove;
mod signature;
mod stream;
mod stream_state;

pub use description::{Description, FileEntry};
pub use error::TransferError;
pub use kept::{FetchedSnapshot, remove_kept};
pub use pull::{PullReport, PullRequest, pull};
pub use push::{PushReport, PushRequest, push};
pub use remote::{Remote, RemoteSnapshot, take_credentials};
pub use remove::{RemoveReport, remove};
pub use stream::{StreamStatus, StreamedSnapshot};
