//! Lending memory: spare RAM of one host is the swap disk of another's VM.
//!
//! ```text
//!   lender's daemon --offer, publish, ended--> registry <--take, renew, release-- borrower's daemon
//!         | supervises             (one daemon serves it, or an etcd)                   | QMP
//!       nbdkit, one a lease <------------ NBD ----------- relay <------- NBD ------- QEMU of the VM
//!       or tgtd             <-- iSCSI --- see `iscsi` ----´
//! ```

pub mod blast;
mod borrowing;
pub mod calls;
pub mod distrust;
mod endpoint;
mod etcd;
mod etcd_api;
mod etcd_keys;
pub mod export;
pub mod graph;
pub mod https;
pub mod iscsi;
pub mod judge;
mod lease;
mod lender;
mod lender_options;
mod lender_status;
mod lender_thread;
mod listen;
pub mod lvm;
pub mod nbd;
mod offer;
pub mod place;
mod pressure;
pub mod registry;
mod registry_error;
pub mod relay;
mod sqlite;
mod tls;
pub mod tls_key;
pub mod waits;
pub mod wire;

#[cfg(test)]
mod etcd_tests;
#[cfg(test)]
mod registry_tests;

pub use endpoint::{Address, Endpoint, Key, Transport};
pub use etcd_keys::EtcdRegistry;
pub use lease::{
    Durability, Incarnation, Lease, LeaseId, LeaseState, LenderId, LenderView, Picture,
};
pub use lender::Lender;
pub use lender_options::LenderOptions;
pub use lender_status::LenderStatus;
pub use offer::{Offer, Want};
pub use place::{RegistryAt, RegistryFiles};
pub use registry::Registry;
pub use registry_error::RegistryError;
pub use sqlite::SqliteRegistry;
