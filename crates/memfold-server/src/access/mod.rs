//! Access control of the daemon's API: finds out who sent a request, and what role the sender has.
//!
//! ```text
//!   Unix socket --- peer's user and groups (kernel) --------------------------------.
//!                                                                                    |--> role --> guard --> routes
//!   TCP [TLS] ----- Host header --- session cookie, or token --- Origin, own header -'               `--> audit log
//! ```
//! There are two roles for people: `Role::Read` sees everything that memfold shows, and
//! `Role::Operate` may change it. An operator is root in the guests, and may start any QEMU as root
//! on the host. Other hosts have the role `Role::Host`. Each host has its own token, with which it
//! may only call the lease registry, in its own name.

mod accept;
mod audit;
mod counts;
mod door;
mod guard;
mod hosts;
mod keys;
mod origin;
mod peer;
mod private_file;
mod state;
mod tls;
mod unread;
mod upgrade;

pub(super) use accept::{accept_tcp, accept_unix};
pub use audit::AuditEntry;
pub(super) use audit::NewSession;
pub(super) use counts::RefusedCounts;
pub use door::{Doors, TcpDoor};
pub(super) use guard::{Visitor, guard, is_change};
pub(super) use hosts::Hosts;
pub(super) use keys::{CODE_LIFE, Keys, SESSION_LIFE};
pub use origin::{PublicUrl, PublicUrlError};
pub use peer::{Groups, GroupsError};
pub(super) use state::Access;
pub use tls::{TcpDoorError, TlsFiles};
pub(super) use upgrade::Upgrade;
