//! Tests that another may run beside: what they hold doesn't depend on how fast guests are, or they
//! run ahead of the other ([`crate::support::turn_ahead`]), and they leave the host's settings
//! alone.
//!
//! They begin before those that want the machine for themselves (.config/nextest.toml).

mod attached;
mod attack;
mod boot_snapshots;
mod clocks;
mod cut_saves;
mod daemon_killed;
mod disks;
mod domains;
mod hot_snapshots;
mod integrity;
pub mod lend;
mod lend_short;
mod liars;
pub mod libvirt;
mod libvirt_enable;
pub mod libvirt_host;
mod segments;
mod segments_killed;
mod snapshots;
mod vm_killed;
