//! A QEMU that others have started: what another one with the same devices is started with, for a
//! VM that runs from its snapshot.
//!
//! ```text
//!   /proc/PID/cmdline --rewrite--> words that make the same devices      + QMP: machine type, disks, memory
//!                                      |
//!                     VmSpec { foreign: .. } --launch--> QEMU, with disks, monitors, console and agent's port of memfold's
//! ```
//! Its command line is believed as far as its own user could do what it says: a guest that has
//! taken its QEMU over may have written it. No disk of its host's is opened for another QEMU, and
//! other files are copied with that user's rights.

mod config;
mod describe;
mod drives;
mod files;
mod host_ends;
mod network;
mod options;
mod rewrite;
mod spec;
mod user;
mod value;
mod view;

pub use describe::{ForeignError, describe};
pub use files::copy_file;
pub use host_ends::{leave_out_taken, of_arguments};
pub use spec::{Foreign, ForeignDisk};
pub use view::{View, root_of};
