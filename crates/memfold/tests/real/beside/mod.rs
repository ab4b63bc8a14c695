//! Tests that another may run beside: what they hold doesn't depend on how fast guests are, or they run ahead of the
//! other ([`crate::support::turn_ahead`]), and they leave the host's settings alone.
//!
//! They come first: test programs run tests in the order of their names, and whoever wants the machine for itself waits for both turns. The longest of
//! them have early names, so that none runs on alone at the end.

mod attached;
mod boot_snapshots;
mod cut_saves;
mod daemon_killed;
mod disks;
mod domains;
mod guide;
mod hosts;
mod integrity;
pub mod lend;
mod liars;
mod libvirt;
mod libvirt_host;
mod lvm;
mod nodes;
mod segments;
mod segments_killed;
mod snapshots;
mod vm_killed;
