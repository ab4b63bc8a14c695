//! Allows snapshots of VMs that memfold did not start. From the command line of such a QEMU,
//! memfold makes the command line of a second QEMU with the same devices, which later runs the VM's
//! snapshots.
//!
//! ```text
//!   /proc/PID/cmdline --rewrite--> words that make the same devices      + QMP: machine type, disks, memory
//!                                      |
//!                     VmSpec { foreign: .. } --launch--> QEMU, with disks, monitors, console and agent's port of memfold's
//! ```
//! A guest that has taken over its QEMU may have rewritten the command line. With this command
//! line, memfold must not give the guest anything that QEMU's own user could not get. So the second
//! QEMU opens no disk that the command line names, and memfold copies other files with that user's
//! rights.

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

pub use describe::{Answers, CopiedLine, ForeignError, copy_line, describe};
pub use files::copy_file;
pub(crate) use host_ends::null_chardev;
pub use host_ends::{leave_out_taken, of_arguments};
pub use spec::{Foreign, ForeignDisk};
pub use view::{View, root_of};
