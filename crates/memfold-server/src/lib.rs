//! The daemon's API: HTTP/JSON over a Unix socket, and optionally over TCP.
//!
//! `GET /openapi.json` describes the API. The command line is an ordinary client.

mod access;
mod answer;
mod definitions;
mod event_stream;
mod exec_stream;
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
mod rightsize;
mod routes;
mod runtimes;
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
pub use runtimes::{HTTP_THREAD, REQUEST_THREAD, Runtimes};
pub use server::{ServeError, serve};
