//! What the access control of the daemon's API needs for every request: secrets, the audit log, and
//! limits. The Unix socket and TCP share it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::HeaderMap;
use memfold_api::Role;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::audit::Audit;
use super::counts::{Refused, RefusedCounts};
use super::door::TcpDoor;
use super::hosts::Hosts;
use super::keys::Keys;
use super::origin::{self, PublicUrl};
use crate::limits::{MOST_OF_READERS, MOST_STREAMS};

/// Largest number of concurrent TCP requests; further requests are refused, because each one may
/// occupy a thread.
const TCP_REQUESTS: usize = 32;

/// Largest number of concurrent requests with a host's token. This limit is separate, so that
/// browsers cannot keep hosts from the registry.
const HOST_REQUESTS: usize = 64;

/// Largest number of concurrent requests with the token of one host, so that one host cannot keep
/// the others from the registry. A host sends requests for each of its VMs on lent RAM every
/// second, and all of them wait while the registry's disk is slow.
pub(super) const OF_ONE_HOST: usize = 48;

/// State shared by all endpoints of a daemon.
#[derive(Debug)]
pub(crate) struct Access {
    pub(super) keys: Mutex<Keys>,
    pub(super) hosts: Mutex<Hosts>,
    pub(crate) audit: Audit,
    pub(super) refused: Refused,
    /// URLs of the dashboard over TCP, as `memfold dashboard` prints them; empty: the daemon does
    /// not listen on TCP.
    pub(crate) urls: Vec<String>,
    /// Names by which browsers may address the daemon, beside IP addresses and `localhost`.
    pub(super) names: Vec<String>,
    /// URLs of the dashboard behind reverse proxies.
    pub(super) public: Vec<PublicUrl>,
    /// Name of the dashboard's session cookie.
    pub(super) cookie_name: String,
    /// Permits for requests over TCP; each request holds one while it runs.
    pub(super) turns: Arc<Semaphore>,
    /// Permits for requests with a host's token; each request holds one while it runs.
    pub(super) host_turns: Arc<Semaphore>,
    /// Permits for requests with the token of one host, by the host's name. A request needs a
    /// permit of its host beside that of all hosts.
    turns_by_host: Mutex<BTreeMap<String, Arc<Semaphore>>>,
    /// Permits for streams of live samples. The first semaphore is for all clients; readers also
    /// need a permit of the second.
    pub(super) streams: [Arc<Semaphore>; 2],
    /// Becomes `true` when the daemon ends, which ends the streams.
    pub(crate) ending: watch::Receiver<bool>,
}

impl Access {
    /// Creates the shared state. `records`: directory of the audit log.
    pub(crate) fn new(
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
            turns_by_host: Mutex::default(),
            streams: [MOST_STREAMS, MOST_OF_READERS].map(|most| Arc::new(Semaphore::new(most))),
            ending,
        })
    }

    pub(crate) fn keys(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn hosts(&self) -> MutexGuard<'_, Hosts> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the permits for requests with the token of `host`.
    pub(super) fn turns_of(&self, host: &str) -> Arc<Semaphore> {
        let all = self.turns_by_host.lock();
        let mut all = all.unwrap_or_else(PoisonError::into_inner);
        // Only hosts with a token get here, and their number is limited.
        let turns = all.entry(host.to_owned());
        let turns = turns.or_insert_with(|| Arc::new(Semaphore::new(OF_ONE_HOST)));
        turns.clone()
    }

    /// Takes the permits for a stream of live samples; `None` if too many streams are open.
    pub(crate) fn stream_of(&self, role: Role) -> Option<Vec<OwnedSemaphorePermit>> {
        let [all, readers] = &self.streams;
        let take = |of: &Arc<Semaphore>| of.clone().try_acquire_owned().ok();
        let mut places = vec![take(all)?];
        if role != Role::Operate {
            places.push(take(readers)?);
        }
        Some(places)
    }

    /// Returns the number of refusals so far, by reason.
    pub(crate) fn refused(&self) -> RefusedCounts {
        self.refused.counts()
    }

    /// Returns the `Set-Cookie` value that stores a session, or with a `life` of zero deletes it.
    /// `headers`: headers of the request.
    pub(crate) fn set_cookie(&self, headers: &HeaderMap, value: &str, life: Duration) -> String {
        let is_secure = self.cookie_name.starts_with("__Host-")
            || origin::is_public_https(headers, &self.public);
        let secure = if is_secure { "; Secure" } else { "" };
        format!(
            "{}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={}{secure}",
            self.cookie_name,
            life.as_secs()
        )
    }
}
