//! Memory that this host lends.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use memfold_api::LendRequest;
use memfold_host::{chain, helper};
use memfold_lend::registry::check_bytes;
use memfold_lend::{Lender, LenderOptions, LenderStatus, Transport};
use memfold_vm::boot_id;
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::error::DaemonError;
use crate::json_file::write_json;
use crate::leases::Leases;

/// Least amount that is worth lending.
const LEAST: u64 = 16 << 20;

/// How long a program may take to say what it can do.
const LOOK_LIMIT: Duration = Duration::from_secs(10);

/// What this host lends.
#[derive(Debug)]
pub struct Lending {
    leases: Arc<Leases>,
    directory: PathBuf,
    /// What somebody said by hand ([`ByHand`]).
    note: PathBuf,
    /// What the configuration says.
    configured: Option<LendRequest>,
    /// What this host's VMs may call in at once, in bytes: the brake says so, and it is not lent.
    needed: Arc<AtomicU64>,
    /// How many of its guests lack memory themselves.
    short_guests: Arc<AtomicU32>,
    lender: Mutex<Option<Lender>>,
}

/// What somebody said by hand, which counts until the next boot.
#[derive(Debug, Serialize, Deserialize)]
struct ByHand {
    boot: String,
    /// Nothing, if unset.
    lend: Option<LendRequest>,
}

/// Whether nbdkit is there, and can lock what it lends.
fn check_nbdkit() -> Result<(), DaemonError> {
    let lacks = |why: String| {
        DaemonError::ImpossibleHere(format!(
            "cannot lend memory: {why}; install nbdkit (apt install nbdkit, or make setup)"
        ))
    };
    let mut command = Command::new("nbdkit");
    command.args(["data", "--dump-plugin"]).stdin(Stdio::null());
    let said = helper::output(&mut command, LOOK_LIMIT)
        .map_err(|error| lacks(format!("cannot run nbdkit ({error})")))?;
    let said = String::from_utf8_lossy(&said.stdout);
    if said.lines().any(|line| line == "mlock=yes") {
        return Ok(());
    }
    Err(lacks(
        "this nbdkit has no 'data' plugin that locks memory (mlock=yes)".into(),
    ))
}

/// Whether what exports is there.
fn check_server(transport: Transport) -> Result<(), DaemonError> {
    match transport {
        Transport::Nbd => check_nbdkit(),
        Transport::Iscsi => check_tgt(),
    }
}

/// Whether tgt is there.
fn check_tgt() -> Result<(), DaemonError> {
    let mut command = Command::new("tgtd");
    let said = helper::output(command.arg("--version").stdin(Stdio::null()), LOOK_LIMIT);
    if said.is_ok_and(|said| said.status.success()) {
        return Ok(());
    }
    Err(DaemonError::ImpossibleHere(
        "cannot lend memory by iSCSI: tgtd is not installed; install it (apt install tgt; tgt's own service is not needed), or lend by NBD (--transport nbd)".into(),
    ))
}

impl Lending {
    /// `needed`: what this host's VMs may call in at once, in bytes, which is not lent.
    pub(crate) fn new(
        leases: Arc<Leases>,
        state: &Path,
        configured: Option<LendRequest>,
        needed: Arc<AtomicU64>,
    ) -> Self {
        Self {
            leases,
            directory: state.join("lend"),
            note: state.join("lend.json"),
            configured,
            needed,
            short_guests: Arc::default(),
            lender: Mutex::default(),
        }
    }

    fn lender(&self) -> MutexGuard<'_, Option<Lender>> {
        self.lender.lock()
    }

    /// How many of this host's guests lack memory themselves.
    pub(crate) fn set_short_guests(&self, count: u32) {
        self.short_guests.store(count, Ordering::Relaxed);
    }

    /// Ends exports.
    pub(crate) fn shut_down(&self) {
        drop(self.lender().take());
    }

    /// Begins to lend, or changes how much: what is lent already is taken back then.
    pub fn lend(&self, request: &LendRequest) -> Result<LenderStatus, DaemonError> {
        self.leases.check_host()?;
        check_bytes(request.max_bytes, LEAST)?;
        check_server(request.transport)?;
        // Whether the registry can be used at all is better told now than in the log. Whoever asks
        // what this host lends doesn't wait for it.
        if self.lender().as_ref().is_none_or(Lender::has_ended) {
            self.leases.picture()?;
        }
        let mut lender = self.lender();
        if let Some(old) = lender.as_ref().filter(|old| !old.has_ended()) {
            let status = old.status();
            let listens = self.lender_options(request)?.listen.to_string();
            if status.is_ending || status.listens != listens {
                return Err(DaemonError::Lending {
                    why: format!("this host already lends, on {}", status.listens),
                    fix: "stop lending first (memfold lend --stop), and wait until all leases have ended; only --max can be changed while lending".into(),
                });
            }
            old.set_max(request.max_bytes);
            let status = old.status();
            drop(lender);
            self.note_lending(Some(request));
            return Ok(status);
        }
        // It has exported nothing yet, and is refused by the registry before it does.
        let started = self.start_lender(request)?;
        let status = started.status();
        *lender = Some(started);
        self.note_lending(Some(request));
        Ok(status)
    }

    /// For the next daemon.
    fn note_lending(&self, request: Option<&LendRequest>) {
        let by_hand = ByHand {
            boot: boot_id(),
            lend: request.cloned(),
        };
        if let Err(error) = write_json(&self.note, &by_hand) {
            warn!(%error, "cannot write lend.json; free space and repeat 'memfold lend'");
        }
    }

    /// What is to be lent when the daemon begins: what somebody said since the boot, else what the
    /// configuration says, else what somebody said before.
    pub(crate) fn to_lend(&self) -> Option<LendRequest> {
        let configured = self.configured.clone();
        let Ok(bytes) = std::fs::read(&self.note) else {
            return configured;
        };
        let Ok(said) = serde_json::from_slice::<ByHand>(&bytes)
            // Of a daemon before this note had a boot.
            .or_else(|_| {
                serde_json::from_slice(&bytes).map(|request: LendRequest| ByHand {
                    boot: boot_id(),
                    lend: Some(request),
                })
            })
        else {
            warn!("cannot read lend.json; repeat 'memfold lend'");
            return configured;
        };
        if said.boot == boot_id() {
            return said.lend;
        }
        configured.or(said.lend)
    }

    fn lender_options(&self, request: &LendRequest) -> Result<LenderOptions, DaemonError> {
        let listen = request.listens();
        Ok(LenderOptions {
            host: self.leases.host().to_owned(),
            max_bytes: request.max_bytes,
            listen: listen.map_err(|why| DaemonError::BadRequest(why.into()))?,
            directory: self.directory.clone(),
            owed: self.needed.clone(),
            short_guests: self.short_guests.clone(),
        })
    }

    fn start_lender(&self, request: &LendRequest) -> Result<Lender, DaemonError> {
        let options = self.lender_options(request)?;
        Lender::start(options, self.leases.registry().clone()).map_err(|source| {
            DaemonError::State {
                path: self.directory.clone(),
                source,
            }
        })
    }

    /// Lends as the daemon before did, or as is configured.
    pub(crate) fn resume(&self) {
        let Some(request) = self.to_lend() else {
            return;
        };
        if let Err(error) = self
            .leases
            .check_host()
            .and_then(|()| check_server(request.transport))
        {
            warn!(
                error = chain(&error),
                "lending not started; fix the cause and run 'memfold lend'"
            );
            return;
        }
        // The registry may not be there yet: its daemon may start after this one. The lender's
        // thread goes on asking.
        match self.start_lender(&request) {
            Ok(lender) => {
                // Somebody may have asked for another one meanwhile.
                self.lender().get_or_insert(lender);
            }
            Err(error) => warn!(
                error = chain(&error),
                "cannot start the lender; fix the cause and run 'memfold lend'"
            ),
        }
    }

    /// Takes everything back and lends no more; `None`: it doesn't lend.
    pub fn stop(&self) -> Option<LenderStatus> {
        self.note_lending(None);
        let lender = self.lender();
        let lender = lender.as_ref()?;
        lender.end();
        Some(lender.status())
    }

    /// Lends no more, because the daemon ends: the next one lends again. Borrowers have time to
    /// give back, unless `hurry`.
    pub fn end(&self, hurry: &dyn Fn() -> bool) {
        let lender = self.lender().take();
        if let Some(lender) = lender {
            lender.end_and_wait(hurry);
        }
    }

    /// What this host lends; `None`: nothing, and it will not.
    pub fn status(&self) -> Option<LenderStatus> {
        let mut lender = self.lender();
        // One that was superseded says so as long as nobody ended it.
        if lender
            .as_ref()
            .is_some_and(|l| l.has_ended() && l.status().problem.is_none())
        {
            *lender = None;
        }
        lender.as_ref().map(Lender::status)
    }
}
