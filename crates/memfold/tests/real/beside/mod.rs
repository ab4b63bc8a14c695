//! Tests on real guests of which two may run at the same time. Their results do not depend on the
//! speed of guests, or they have priority over the other test ([`crate::support::turn_ahead`]).
//! They do not change settings of the host.
//!
//! These tests start before the tests that need the whole machine (.config/nextest.toml).

mod attached;
mod attack;
mod boot_snapshots;
mod clocks;
mod cut_saves;
mod daemon_killed;
mod defined;
mod disks;
mod domains;
mod encrypted_snapshots;
#[path = "../../cli/fake_node.rs"]
mod fake_node;
mod forks;
mod guest_memory;
mod hot_snapshots;
mod integrity;
mod layers;
pub mod lend;
pub mod lend_short;
mod liars;
pub mod libvirt;
pub mod libvirt_enable;
pub mod libvirt_host;
mod networks;
mod object_store;
mod pve;
mod python;
mod rightsized;
mod segments;
mod segments_killed;
mod snapshots;
mod streamed;
mod streams;
mod taken_over;
mod vm_killed;
