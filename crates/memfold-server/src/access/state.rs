//! What all doors of one daemon have in common.

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

/// Requests over TCP at once; more are refused. Each may hold a thread of the daemon.
const TCP_REQUESTS: usize = 32;

/// The same of hosts with a token of theirs, whom browsers so can't keep from the registry.
const HOST_REQUESTS: usize = 64;

/// What all doors of one daemon have in common.
#[derive(Debug)]
pub(crate) struct Access {
    pub(super) keys: Mutex<Keys>,
    pub(super) hosts: Mutex<Hosts>,
    pub(super) audit: Audit,
    pub(super) refused: Refused,
    /// Addresses of the TCP door, as `memfold dashboard` prints them; none: there is no such door.
    pub(crate) urls: Vec<String>,
    /// Names by which browsers may call the daemon, beside addresses and `localhost`.
    pub(super) names: Vec<String>,
    /// Where reverse proxies show the dashboard.
    pub(super) public: Vec<PublicUrl>,
    /// Name of the cookie of sessions.
    pub(super) cookie_name: String,
    /// Requests over TCP that are worked on at once.
    pub(super) turns: Arc<Semaphore>,
    /// The same of hosts.
    pub(super) host_turns: Arc<Semaphore>,
    /// Places for streams of samples: all, and those of who may only read.
    pub(super) streams: [Arc<Semaphore>; 2],
    /// Turns to `true` when the daemon ends: streams end then.
    pub(crate) ending: watch::Receiver<bool>,
}

impl Access {
    /// `records`: directory of the audit log.
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

    /// A place for a stream of samples, until it is dropped.
    pub(crate) fn stream_of(&self, role: Role) -> Option<Vec<OwnedSemaphorePermit>> {
        let [all, readers] = &self.streams;
        let take = |of: &Arc<Semaphore>| of.clone().try_acquire_owned().ok();
        let mut places = vec![take(all)?];
        if role != Role::Operate {
            places.push(take(readers)?);
        }
        Some(places)
    }

    /// Who was refused so far, by why.
    pub(crate) fn refused(&self) -> RefusedCounts {
        self.refused.counts()
    }

    /// What a browser is to keep of a session, or to forget. `headers`: of its request.
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

    pub(crate) const fn audit(&self) -> &Audit {
        &self.audit
    }
}
