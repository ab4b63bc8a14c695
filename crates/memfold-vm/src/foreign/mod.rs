//! VMs that memfold did not start. From such a QEMU's command line, memfold makes the command line
//! of a second QEMU with the same devices, which runs the VM's snapshots.
//!
//! ```text
//!   /proc/PID/cmdline --rewrite--> words that make the same devices      + QMP: machine type, disks, memory
//!                                      |
//!                     VmSpec { foreign: .. } --launch--> QEMU, with disks, monitors, console and agent's port of memfold's
//! ```
//! A guest that has taken over its QEMU may have rewritten the command line, so it is trusted only
//! as far as QEMU's own user could act on it. No disk that it names is opened for the second QEMU;
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
pub(crate) mod value;
mod view;

pub use describe::{ForeignError, describe};
pub use files::copy_file;
pub(crate) use host_ends::null_chardev;
pub use host_ends::{leave_out_taken, of_arguments};
pub use spec::{Foreign, ForeignDisk};
pub(crate) use view::user_ids;
pub use view::{View, root_of};
