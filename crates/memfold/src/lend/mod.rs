//! Lending memory: spare RAM of one host is the swap disk of another's VM.
//!
//! ```text
//!   lender's daemon --offer, publish, ended--> registry <--take, renew, release-- borrower's daemon
//!         | supervises                    (one daemon serves it)                        | QMP
//!       nbdkit, one a lease <-------------------- NBD ---------------------------- QEMU of the VM
//! ```

pub mod blast;
pub mod calls;
pub mod export;
pub mod graph;
pub mod judge;
pub mod lender;
pub mod pressure;
pub mod registry;
pub mod sqlite;
pub mod wire;

#[cfg(test)]
mod registry_tests;

pub use lender::{Lender, LenderOptions, LenderStatus};
pub use registry::{
    Address, Durability, Endpoint, Incarnation, Key, Lease, LeaseId, LeaseState, LenderId,
    LenderView, Offer, Picture, Registry, RegistryError, Want,
};
pub use sqlite::SqliteRegistry;
