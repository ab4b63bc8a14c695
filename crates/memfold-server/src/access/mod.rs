//! Who may ask the daemon for what.
//!
//! ```text
//!   Unix socket --- peer's user and groups (kernel) --------------------------------.
//!                                                                                    |--> role --> guard --> routes
//!   TCP [TLS] ----- Host header --- session cookie, or token --- Origin, own header -'               `--> audit log
//! ```
//! There are two roles of people: [`Role::Read`] sees everything that memfold shows, [`Role::Operate`] may change it. Whoever operates is root
//! in the guests and may start any QEMU as root on the host. Other hosts have the role [`Role::Host`]: each by a token of its own, with which
//! it may ask the registry of leases, in its own name, and nothing else.

mod audit;
mod counts;
mod door;
mod guard;
mod hosts;
mod keys;
mod origin;
mod peer;
mod tls;

use memfold_api::Role;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use audit::Audit;
use axum::http::HeaderMap;
use counts::{Refused, Why};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::live;
pub use audit::AuditEntry;
pub(super) use audit::{NewSession, Told};
pub(super) use counts::RefusedCounts;
pub use door::{Doors, TcpDoor, TcpDoorError};
pub(super) use door::{accept_tcp, accept_unix};
pub(super) use guard::{Visitor, guard};
pub(super) use hosts::Hosts;
pub(super) use keys::{CODE_LIFE, Keys, SESSION_LIFE};
pub use origin::{PublicUrl, PublicUrlError};
pub(super) use peer::Peer;
pub use peer::{Groups, GroupsError};
pub use tls::TlsFiles;

/// Requests over TCP at once; more are refused. Each may hold a thread of the daemon.
const TCP_REQUESTS: usize = 32;
/// The same of hosts with a token of theirs, whom browsers so can't keep from the registry.
const HOST_REQUESTS: usize = 64;

/// What all doors of one daemon have in common.
#[derive(Debug)]
pub(super) struct Access {
    keys: Mutex<Keys>,
    hosts: Mutex<Hosts>,
    audit: Audit,
    refused: Refused,
    /// Addresses of the TCP door, as `memfold dashboard` prints them; none: there is no such door.
    pub(super) urls: Vec<String>,
    /// Names by which browsers may call the daemon, beside addresses and `localhost`.
    names: Vec<String>,
    /// Where reverse proxies show the dashboard.
    public: Vec<PublicUrl>,
    /// Name of the cookie of sessions.
    cookie_name: String,
    /// Requests over TCP that are worked on at once.
    turns: Arc<Semaphore>,
    /// The same of hosts.
    host_turns: Arc<Semaphore>,
    /// Places for streams of samples: all, and those of who may only read.
    streams: [Arc<Semaphore>; 2],
    /// Turns to `true` when the daemon ends: streams end then.
    pub(super) ending: watch::Receiver<bool>,
}

impl Access {
    /// `records`: directory of the audit log.
    pub(super) fn new(
        keys: Keys,
        hosts: Hosts,
        records: PathBuf,
        tcp: Option<&TcpDoor>,
        ending: watch::Receiver<bool>,
    ) -> Arc<Self> {
        Arc::new(Self {
            keys: Mutex::new(keys),
            hosts: Mutex::new(hosts),
            refused: Refused::default(),
            audit: Audit::new(records),
            urls: tcp.map(TcpDoor::urls).unwrap_or_default(),
            names: tcp.map(TcpDoor::known_names).unwrap_or_default(),
            public: tcp.map(|t| t.public.clone()).unwrap_or_default(),
            cookie_name: tcp.map(TcpDoor::cookie_name).unwrap_or_default(),
            turns: Arc::new(Semaphore::new(TCP_REQUESTS)),
            host_turns: Arc::new(Semaphore::new(HOST_REQUESTS)),
            streams: [live::MOST_STREAMS, live::MOST_OF_READERS]
                .map(|most| Arc::new(Semaphore::new(most))),
            ending,
        })
    }

    pub(super) fn keys(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn hosts(&self) -> MutexGuard<'_, Hosts> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a stream of samples, until it is dropped.
    pub(super) fn stream_of(&self, role: Role) -> Option<Vec<OwnedSemaphorePermit>> {
        let [all, readers] = &self.streams;
        let take = |of: &Arc<Semaphore>| of.clone().try_acquire_owned().ok();
        let mut places = vec![take(all)?];
        if role != Role::Operate {
            places.push(take(readers)?);
        }
        Some(places)
    }

    /// Who was refused so far, by why.
    pub(super) fn refused(&self) -> RefusedCounts {
        self.refused.counts()
    }

    /// What a browser is to keep of a session, or to forget. `headers`: of its request.
    pub(super) fn set_cookie(&self, headers: &HeaderMap, value: &str, life: Duration) -> String {
        let is_secure = self.cookie_name.starts_with("__Host-")
            || origin::is_public_https(headers, &self.public);
        let secure = if is_secure { "; Secure" } else { "" };
        format!(
            "{}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={}{secure}",
            self.cookie_name,
            life.as_secs()
        )
    }

    pub(super) const fn audit(&self) -> &Audit {
        &self.audit
    }
}
