//! Memory that this host lends, and the registry of who lends what to whom.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tracing::warn;

use super::watched::Guard;
use super::{Daemon, DaemonError, DaemonOptions, write_json};
use crate::api::{LeaseReport, LendRequest, remote_registry};
use crate::lend::blast::blast;
use crate::lend::calls::{Answer, Call, CallRegistry, answer};
use crate::lend::export::Listen;
use crate::lend::registry::{check_bytes, check_name};
use crate::lend::{Lender, LenderOptions, LenderStatus, Registry, SqliteRegistry};

/// Least amount that is worth lending.
const LEAST: u64 = 16 << 20;

/// What the daemon has of lending.
#[derive(Debug)]
pub(super) struct Lending {
    pub host: String,
    pub registry: Arc<dyn Registry>,
    /// Where that is, in words.
    place: String,
    /// Whether this daemon serves it.
    own: bool,
    directory: PathBuf,
    lender: Mutex<Option<Lender>>,
    guards: Mutex<BTreeMap<String, Arc<Guard>>>,
}

impl Lending {
    pub fn open(options: &DaemonOptions) -> Result<Self, DaemonError> {
        let directory = options.state.join("lend");
        let host = match &options.host {
            Some(host) => host.clone(),
            // Names that the kernel takes and we don't are for --host to change, once somebody lends or borrows.
            None => std::fs::read_to_string("/proc/sys/kernel/hostname")
                .map(|name| name.trim().to_owned())
                .unwrap_or_default(),
        };
        if options.host.is_some() {
            check_host(&host)?;
        }
        let (registry, place): (Arc<dyn Registry>, PathBuf) =
            if let Some(socket) = &options.registry {
                (remote_registry(socket), socket.clone())
            } else {
                let path = options.state.join("registry.db");
                // VMs have to be served whatever this file holds.
                let registry: Arc<dyn Registry> = match SqliteRegistry::open(&path) {
                    Ok(registry) => Arc::new(registry),
                    Err(error) => {
                        warn!(%error, "memory can't be lent or borrowed here");
                        let place = path.display().to_string();
                        let why = error.to_string();
                        Arc::new(CallRegistry::new(place, move |_: &Call| Err(why.clone())))
                    }
                };
                (registry, path)
            };
        Ok(Self {
            host,
            registry,
            place: place.display().to_string(),
            own: options.registry.is_none(),
            directory,
            lender: Mutex::default(),
            guards: Mutex::default(),
        })
    }

    fn lender(&self) -> MutexGuard<'_, Option<Lender>> {
        self.lender.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn guards(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Guard>>> {
        self.guards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends exports; borrowed memory stays until its leases are over, or the next daemon takes over.
    pub fn shut_down(&self) {
        drop(self.lender().take());
        for guard in self.guards().values() {
            guard.stop();
        }
    }
}

pub(super) fn check_host(host: &str) -> Result<(), DaemonError> {
    check_name("host", host).map_err(|error| {
        DaemonError::BadRequest(format!(
            "'{host}' can't be this host's name among lenders and borrowers ({error}); give another one with 'memfold serve --host'"
        ))
    })
}

/// Whether nbdkit is there, and can lock what it lends.
fn check_nbdkit() -> Result<(), DaemonError> {
    let lacks = |why: String| {
        DaemonError::ImpossibleHere(format!(
            "memory can't be lent: {why}; install nbdkit (apt install nbdkit, or make setup)"
        ))
    };
    let said = Command::new("nbdkit")
        .args(["data", "--dump-plugin"])
        .output()
        .map_err(|error| lacks(format!("nbdkit can't be run ({error})")))?;
    let said = String::from_utf8_lossy(&said.stdout);
    if said.lines().any(|line| line == "mlock=yes") {
        return Ok(());
    }
    Err(lacks(
        "this nbdkit has no 'data' plugin that locks memory (mlock=yes)".into(),
    ))
}

impl Daemon {
    fn lend_file(&self) -> PathBuf {
        self.options.state.join("lend.json")
    }

    /// Begins to lend, or changes how much: what is lent already is taken back then.
    pub fn lend(&self, request: &LendRequest) -> Result<LenderStatus, DaemonError> {
        check_host(&self.lending.host)?;
        check_bytes(request.max_bytes, LEAST)?;
        check_nbdkit()?;
        let mut lender = self.lending.lender();
        if lender.as_ref().is_some_and(|old| !old.has_ended()) {
            return Err(DaemonError::Lending {
                why: "this host lends already".into(),
                fix: "take everything back first: memfold lend --stop".into(),
            });
        }
        // It has exported nothing yet, and is refused by the registry before it does.
        let started = self.start_lender(request)?;
        let status = started.status();
        *lender = Some(started);
        // For the next daemon.
        if let Err(error) = write_json(&self.lend_file(), request) {
            warn!(%error, "the next daemon won't lend by itself");
        }
        Ok(status)
    }

    fn start_lender(&self, request: &LendRequest) -> Result<Lender, DaemonError> {
        // Whether the registry can be used at all is better told now than in the log.
        self.lending.registry.picture()?;
        let options = LenderOptions {
            host: self.lending.host.clone(),
            max_bytes: request.max_bytes,
            listen: request.listen.map_or(Listen::Unix, Listen::Tcp),
            directory: self.lending.directory.clone(),
        };
        Lender::start(options, self.lending.registry.clone()).map_err(|source| DaemonError::State {
            path: self.lending.directory.clone(),
            source,
        })
    }

    /// Lends as the daemon before did.
    pub(super) fn lend_again(&self) {
        let Ok(bytes) = std::fs::read(self.lend_file()) else {
            return;
        };
        let Ok(request) = serde_json::from_slice::<LendRequest>(&bytes) else {
            warn!("what the daemon before has lent can't be read; it is not lent again");
            return;
        };
        // The registry may not be there yet: its daemon may start after this one. The lender's thread goes on asking.
        let options = LenderOptions {
            host: self.lending.host.clone(),
            max_bytes: request.max_bytes,
            listen: request.listen.map_or(Listen::Unix, Listen::Tcp),
            directory: self.lending.directory.clone(),
        };
        match Lender::start(options, self.lending.registry.clone()) {
            Ok(lender) => *self.lending.lender() = Some(lender),
            Err(error) => warn!(%error, "this host lends no more"),
        }
    }

    /// Takes everything back and lends no more; `None`: it doesn't lend.
    pub fn lend_no_more(&self) -> Option<LenderStatus> {
        // Gone already if it never lent.
        let _ = std::fs::remove_file(self.lend_file());
        let lender = self.lending.lender();
        let lender = lender.as_ref()?;
        lender.end();
        Some(lender.status())
    }

    /// What this host lends; `None`: nothing, and it will not.
    pub fn lender_status(&self) -> Option<LenderStatus> {
        let mut lender = self.lending.lender();
        // One that was superseded says so as long as nobody ended it.
        if lender
            .as_ref()
            .is_some_and(|l| l.has_ended() && l.status().problem.is_none())
        {
            *lender = None;
        }
        lender.as_ref().map(Lender::status)
    }

    /// Carries out what another daemon asks of the registry that this one serves.
    pub fn registry_call(&self, call: &Call) -> Result<Answer, DaemonError> {
        if !self.lending.own {
            return Err(DaemonError::BadRequest(format!(
                "this daemon serves no registry, it uses that of {}; name that one with --registry",
                self.lending.place
            )));
        }
        Ok(answer(&*self.lending.registry, call))
    }

    /// Who lends what to whom.
    pub fn leases(&self) -> Result<LeaseReport, DaemonError> {
        let picture = self.lending.registry.picture()?;
        let guards: Vec<Arc<Guard>> = self.lending.guards().values().cloned().collect();
        Ok(LeaseReport {
            host: self.lending.host.clone(),
            registry: self.lending.place.clone(),
            lending: self.lender_status(),
            borrowed: guards.iter().map(|guard| guard.borrowed()).collect(),
            blast: blast(&picture),
            lenders: picture.lenders,
            leases: picture.leases,
        })
    }
}
