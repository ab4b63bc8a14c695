//! Tests that another may run beside: what they hold doesn't depend on how fast guests are, and they leave the host's settings alone.
//!
//! They come first: test programs run tests in the order of their names, and whoever wants the machine for itself waits for both turns.

mod attached;
mod boot_snapshots;
mod daemon_killed;
mod disks;
mod domains;
mod guide;
mod integrity;
mod liars;
mod libvirt;
mod libvirt_host;
mod lvm;
mod nodes;
mod segments;
mod segments_killed;
mod snapshots;
mod snapshots_killed;
mod vm_killed;
