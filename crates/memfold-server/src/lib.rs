//! The daemon's interface: HTTP/JSON over a Unix socket, and over TCP where that is asked for.
//!
//! `GET /openapi.json` describes it. The command line is a client like any other.

mod access;
mod answer;
mod hosts;
mod lending;
mod libvirt;
mod limits;
mod live;
mod metrics;
mod paths;
mod planning;
mod reference;
mod reports;
mod routes;
mod segments;
mod server;
mod session;
mod snapshots;
mod vms;
mod web;

pub use access::{
    AuditEntry, Doors, Groups, GroupsError, PublicUrl, PublicUrlError, TcpDoor, TcpDoorError,
    TlsFiles,
};
pub use reference::reference;
pub use routes::openapi;
pub use server::{ServeError, serve};
