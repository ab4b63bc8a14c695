//! Copies files and directories between host and guest, as a tar archive over a stream. The host's
//! program and the guest's agent use this crate for both directions.
//!
//! ```text
//!   pack: file or directory --> content, content/..., end   (tar, GNU long names)
//!   unpack: archive --> DIRECTORY/.memfold-copy-PID-N/content --rename--> DIRECTORY/NAME
//! ```
//! What must hold:
//!
//! - The destination appears whole, by a rename, or not at all. An archive without its last entry,
//!   `end`, was cut short, and is refused.
//! - [`unpack`] does not trust the archive, because a guest may have made it. It writes nothing
//!   outside its temporary directory: a path has only plain components, symbolic links are made
//!   after everything else, nothing is written twice, and there are no other kinds of entries than
//!   files, directories and symbolic links.
//! - Permission bits and modification times (seconds) are kept; owner, set-user-ID bits and holes
//!   are not. A symbolic link in a directory is copied as a link, with its text unchanged.

mod pack;
mod unpack;

use std::io;
use std::path::PathBuf;

pub use pack::pack;
pub use unpack::{Destination, unpack};

/// Name of the archive's first entry: the file, or the directory whose files follow.
const CONTENT: &str = "content";
/// Name of the archive's last entry.
const END: &str = "end";

/// Most components of a path in an archive, with [`CONTENT`]. While a tree is packed or removed,
/// each level takes a file descriptor, and a process often may have only 1,024 (`RLIMIT_NOFILE`).
const MAX_DEPTH: usize = 256;

/// What was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of files.
    pub files: u64,
    /// Number of directories.
    pub directories: u64,
    /// Number of symbolic links.
    pub links: u64,
    /// Number of bytes in the files.
    pub bytes: u64,
}

/// Why a copy was refused or failed. The destination is unchanged.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what is the case
pub enum CopyError {
    #[error("cannot {doing} {path}")]
    File {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{0} is neither a file nor a directory nor a symbolic link; only these are copied")]
    Kind(PathBuf),
    #[error("{0} changed its size while it was copied; copy it again when it is not in use")]
    Changed(PathBuf),
    #[error("the path {0} has no last component; name a file or a directory")]
    NoName(PathBuf),
    #[error("{0} exists and is a directory; remove it, or copy to another place")]
    Exists(PathBuf),
    #[error("{0} exists and is not a directory; remove it, or copy to another place")]
    NoDirectory(PathBuf),
    #[error(
        "the tree is deeper than {MAX_DEPTH} directories; make an archive of it, such as with tar, and copy the archive"
    )]
    Deep,
    #[error("{error}; the temporary directory {path} is left, remove it by hand")]
    Left {
        error: Box<CopyError>,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write the archive")]
    Write(#[source] io::Error),
    #[error("cannot read the archive")]
    Read(#[source] io::Error),
    #[error("the copy ended before it was complete")]
    Cut,
    #[error("the archive is not one of memfold's: {0}")]
    Archive(&'static str),
}

/// Returns a function that makes a [`CopyError::File`].
fn failed(doing: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> CopyError {
    let path = path.to_owned();
    move |source| CopyError::File {
        doing,
        path,
        source,
    }
}
