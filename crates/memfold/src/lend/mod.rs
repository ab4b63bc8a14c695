//! Lending memory: spare RAM of one host is the swap disk of another's VM.
//!
//! ```text
//!   lender's daemon --offer, publish, ended--> registry <--take, renew, release-- borrower's daemon
//!         | supervises                    (one daemon serves it)                        | QMP
//!       nbdkit, one a lease <-------------------- NBD ---------------------------- QEMU of the VM
//! ```

pub mod calls;
pub mod registry;
pub mod sqlite;

#[cfg(test)]
mod registry_tests;

pub use registry::{
    Address, Endpoint, Incarnation, Key, Lease, LeaseId, LeaseState, LenderId, LenderView, Offer,
    Picture, Registry, RegistryError, Want,
};
pub use sqlite::SqliteRegistry;
