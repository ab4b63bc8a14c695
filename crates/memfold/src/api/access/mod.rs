//! Who may ask the daemon for what.
//!
//! ```text
//!   Unix socket --- peer's user and groups (kernel) --------------------------------.
//!                                                                                    |--> role --> guard --> routes
//!   TCP [TLS] ----- Host header --- session cookie, or token --- Origin, own header -'               `--> audit log
//! ```
//! There are two roles: [`Role::Read`] sees everything that memfold shows, [`Role::Operate`] may change it. Whoever operates is root in the
//! guests and may start any QEMU as root on the host.

mod audit;
mod door;
mod guard;
mod keys;
mod origin;
mod peer;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, watch};
use utoipa::ToSchema;

use audit::Audit;
pub use audit::AuditEntry;
pub(super) use audit::{NewSession, Told};
pub use door::{Doors, TcpDoor, TcpDoorError, TlsFiles};
pub(super) use door::{accept_tcp, accept_unix};
pub(super) use guard::{Visitor, guard};
pub(super) use keys::{CODE_LIFE, Keys, SESSION_LIFE};
pub(super) use peer::Peer;
pub use peer::{Groups, GroupsError};

/// Requests over TCP at once; more are refused. Each may hold a thread of the daemon.
const TCP_REQUESTS: usize = 32;

/// What somebody may do.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    ToSchema,
    clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// See everything that memfold shows, but not the audit log.
    Read,
    /// Change everything, too.
    Operate,
}

impl Role {
    /// In words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
        }
    }
}

/// What all doors of one daemon have in common.
#[derive(Debug)]
pub(super) struct Access {
    keys: Mutex<Keys>,
    audit: Audit,
    /// Addresses of the TCP door, as `memfold dashboard` prints them; none: there is no such door.
    pub(super) urls: Vec<String>,
    /// Names by which browsers may call the daemon, beside addresses and `localhost`.
    names: Vec<String>,
    /// Name of the cookie of sessions.
    cookie_name: String,
    /// Requests over TCP that are worked on at once.
    turns: Arc<Semaphore>,
    /// Turns to `true` when the daemon ends: streams end then.
    pub(super) ending: watch::Receiver<bool>,
}

impl Access {
    /// `records`: directory of the audit log.
    pub(super) fn new(
        keys: Keys,
        records: PathBuf,
        tcp: Option<&TcpDoor>,
        ending: watch::Receiver<bool>,
    ) -> Arc<Self> {
        Arc::new(Self {
            keys: Mutex::new(keys),
            audit: Audit::new(records),
            urls: tcp.map(TcpDoor::urls).unwrap_or_default(),
            names: tcp.map(|t| t.names.clone()).unwrap_or_default(),
            cookie_name: tcp.map(TcpDoor::cookie_name).unwrap_or_default(),
            turns: Arc::new(Semaphore::new(TCP_REQUESTS)),
            ending,
        })
    }

    pub(super) fn keys(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a browser is to keep of a session, or to forget.
    pub(super) fn set_cookie(&self, value: &str, life: Duration) -> String {
        let secure = if self.cookie_name.starts_with("__Host-") {
            "; Secure"
        } else {
            ""
        };
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
