//! The daemon's interface: HTTP/JSON over a Unix socket, and over TCP where that is asked for.
//!
//! `GET /openapi.json` describes it. The command line is a client like any other.

mod access;
mod hosts;
mod lending;
mod libvirt;
mod live;
mod metrics;
mod planning;
mod reference;
mod server;
mod session;
mod web;

pub use access::{
    AuditEntry, Doors, Groups, GroupsError, PublicUrl, PublicUrlError, TcpDoor, TcpDoorError,
    TlsFiles,
};
pub use reference::reference;
pub use server::{ServeError, openapi, serve};
