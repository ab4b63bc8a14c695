//! Lending memory: spare RAM of one host serves as the swap disk of a VM on another host.
//!
//! ```text
//!   lender's daemon --offer, publish, ended--> registry <--take, renew, release-- borrower's daemon
//!         | supervises             (one daemon serves it, or an etcd)                   | QMP
//!       nbdkit, one a lease <------------ NBD ----------- relay <------- NBD ------- QEMU of the VM
//!       or tgtd             <-- iSCSI --- see `iscsi` ----´
//! ```
//! 1. A lender's daemon decides how much RAM it can spare ([`surplus`]) and offers it in the
//!    [`registry`].
//! 2. A borrower's daemon takes a *lease*: RAM of one lender for one VM.
//! 3. The lender exports the lease's RAM as a network disk ([`export`]).
//! 4. The borrower starts a [`relay`], which verifies every block that the lender returns, and lets
//!    QEMU mirror the VM's swap disk onto the lent RAM while the guest runs ([`graph`]).
//! 5. When lender or borrower wants to end the lease, the swap disk moves back, and the lease ends.
//!
//! [`lvm`] lends to a host's own swap volume instead of a VM's swap disk.

mod borrowing;
pub mod calls;
mod child;
pub mod connection;
mod copy_pace;
pub mod distrust;
mod endpoint;
mod etcd;
mod etcd_api;
mod etcd_keys;
pub mod export;
mod files;
pub mod graph;
pub mod https;
pub mod impact;
pub mod iscsi;
mod lease;
mod lender;
mod lender_status;
mod lender_thread;
pub mod lvm;
pub mod nbd;
pub mod place;
pub mod pressure;
pub mod registry;
mod registry_error;
pub mod relay;
mod sqlite;
pub mod surplus;
mod tls;
pub mod tls_key;
pub mod waits;

#[cfg(test)]
mod etcd_tests;
#[cfg(test)]
mod registry_tests;

// Names under which other crates use these modules.
pub use {connection as wire, impact as blast, surplus as judge};

pub use endpoint::{Address, Endpoint, Key, Transport};
pub use etcd_keys::EtcdRegistry;
pub use lease::{
    Durability, Incarnation, Lease, LeaseId, LeaseState, LenderId, LenderView, Picture,
};
pub use lender::Lender;
pub use lender_status::{LenderOptions, LenderStatus};
pub use place::{RegistryAt, RegistryFiles};
pub use registry::{Offer, Registry, Want};
pub use registry_error::RegistryError;
pub use sqlite::SqliteRegistry;
