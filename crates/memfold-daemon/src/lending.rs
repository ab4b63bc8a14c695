//! Lends this host's free memory to other hosts. The daemon saves the operator's last request
//! (`memfold lend`), and continues to lend after a restart.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use memfold_api::LendRequest;
use memfold_host::{chain, helper};
use memfold_lend::export::Listen;
use memfold_lend::registry::check_bytes;
use memfold_lend::{Lender, LenderOptions, LenderStatus, RegistryError, Transport};
use memfold_vm::boot_id;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::error::{DaemonError, refused, state_error};
use crate::json_file::write_json;
use crate::leases::Leases;

/// Smallest amount of memory that can be lent, in bytes.
const LEAST: u64 = 16 << 20;

/// Time limit for an export program's answer to a question about its features.
const LOOK_LIMIT: Duration = Duration::from_secs(10);

/// Service that lends this host's free memory to other hosts.
#[derive(Debug)]
pub struct Lending {
    leases: Arc<Leases>,
    directory: PathBuf,
    /// File with the last request of an operator ([`ByHand`]).
    note: PathBuf,
    /// The lending request in the configuration file.
    configured: Option<LendRequest>,
    /// Bytes that must stay available for the copy-on-write debt and are not lent. The brake sets
    /// this value.
    needed: Arc<AtomicU64>,
    /// Number of this host's guests that are short of memory.
    short_guests: Arc<AtomicU32>,
    /// Bytes that right-sizing wants back, and bytes that it wants to stay available.
    wanted_back: Arc<AtomicU64>,
    kept: Arc<AtomicU64>,
    lender: Mutex<Option<Arc<Lender>>>,
}

/// The last lending request of an operator. Until the next boot, it takes precedence over the
/// configuration.
#[derive(Debug, Serialize, Deserialize)]
struct ByHand {
    boot: String,
    /// The request; `None` if the operator stopped lending.
    lend: Option<LendRequest>,
}

/// Checks that nbdkit is installed and can lock memory.
///
/// # Errors
///
/// [`DaemonError::ImpossibleHere`] if nbdkit is missing or cannot lock memory.
fn check_nbdkit() -> Result<(), DaemonError> {
    let lacks = |why: &str| {
        DaemonError::ImpossibleHere(format!(
            "cannot lend memory: {why}; install nbdkit (apt install nbdkit, or make setup)"
        ))
    };
    let said = output("nbdkit", &["data", "--dump-plugin"])
        .map_err(|error| lacks(&format!("cannot run nbdkit ({error})")))?;
    let said = String::from_utf8_lossy(&said.stdout);
    let locks = said.lines().any(|line| line == "mlock=yes");
    locks
        .then_some(())
        .ok_or_else(|| lacks("this nbdkit has no 'data' plugin that locks memory (mlock=yes)"))
}

fn output(program: &str, arguments: &[&str]) -> io::Result<Output> {
    let mut command = Command::new(program);
    helper::output(command.args(arguments).stdin(Stdio::null()), LOOK_LIMIT)
}

/// Checks that the program which exports memory over `transport` is installed: nbdkit, or `tgtd`,
/// the iSCSI target daemon.
fn check_server(transport: Transport) -> Result<(), DaemonError> {
    if transport == Transport::Nbd {
        return check_nbdkit();
    }
    let said = output("tgtd", &["--version"]);
    let works = said.is_ok_and(|said| said.status.success());
    works.then_some(()).ok_or_else(|| DaemonError::ImpossibleHere(
        "cannot lend memory by iSCSI: tgtd is not installed; install it (apt install tgt; tgt's own service is not needed), or lend by NBD (--transport nbd)".into(),
    ))
}

/// Checks the maximum amount of memory to lend, in bytes.
///
/// # Errors
///
/// [`RegistryError::Value`], which names the option and the request's field, if the amount is too
/// small or too large.
fn check_max(bytes: u64) -> Result<(), RegistryError> {
    check_bytes(bytes, LEAST).map_err(|error| match error {
        RegistryError::Value { why, .. } => RegistryError::Value {
            field: "--max (max_bytes)".into(),
            why,
        },
        other => other,
    })
}

impl Lending {
    /// Creates the service, which lends nothing yet. `needed`: bytes that must stay available for
    /// this host's VMs.
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
            wanted_back: Arc::default(),
            kept: Arc::default(),
            lender: Mutex::default(),
        }
    }

    /// Sets the number of this host's guests that are short of memory.
    pub(crate) fn set_short_guests(&self, count: u32) {
        self.short_guests.store(count, Ordering::Relaxed);
    }

    /// Takes `wanted_back` bytes of lent memory back for this host's VMs, and offers no more than
    /// leaves `kept` bytes available. Both are 0 while right-sizing is not on.
    pub(crate) fn claim(&self, wanted_back: u64, kept: u64) {
        self.wanted_back.store(wanted_back, Ordering::Relaxed);
        self.kept.store(kept, Ordering::Relaxed);
    }

    /// Ends all exports of lent memory.
    pub(crate) fn shut_down(&self) {
        let lender = self.lender.lock().take();
        // Its thread may wait for the registry; requests for the status do not wait with it.
        drop(lender);
    }

    /// Begins to lend memory, or changes the amount. If the new amount is lower, the lender recalls
    /// leases that exceed it.
    pub fn lend(&self, request: &LendRequest) -> Result<LenderStatus, DaemonError> {
        self.leases.check_host()?;
        check_max(request.max_bytes)?;
        self.check_listen(request)?;
        check_server(request.transport)?;
        // If the registry cannot be used, this request fails instead of the lender's thread. The
        // lender is not locked meanwhile, so that status requests do not wait.
        if self
            .lender
            .lock()
            .as_ref()
            .is_none_or(|old| old.has_ended())
        {
            self.leases.registry.picture()?;
        }
        let mut lender = self.lender.lock();
        let status = if let Some(old) = lender.as_ref().filter(|old| !old.has_ended()) {
            let status = old.status();
            let listens = self.lender_options(request)?.listen.to_string();
            if status.is_ending || status.listens != listens {
                return Err(refused(
                    format!("this host already lends, on {}", status.listens),
                    "to change only the limit, run 'memfold lend --max SIZE' without other options (HTTP: repeat 'lends_as' of GET /v1/leases with another 'max_bytes'); to change how this host lends, first stop lending (memfold lend --stop), and wait until all leases have ended",
                ));
            }
            old.set_max(request.max_bytes);
            old.status()
        } else {
            // The new lender has exported nothing yet, and exports nothing if the registry refuses
            // it.
            let new = Arc::new(self.start_lender(request)?);
            lender.insert(new).status()
        };
        drop(lender);
        self.note_lending(Some(request));
        Ok(status)
    }

    /// Writes the operator's lending request to a file, for the next daemon.
    fn note_lending(&self, request: Option<&LendRequest>) {
        let by_hand = ByHand {
            boot: boot_id(),
            lend: request.cloned(),
        };
        if let Err(error) = write_json(&self.note, &by_hand) {
            warn!(%error, "cannot save the settings of 'memfold lend' in lend.json; free space in the state directory and repeat 'memfold lend'");
        }
    }

    /// Returns the request to follow at the daemon's start: the operator's last request since the
    /// host's boot, else the configuration, else the operator's last request before the boot.
    pub(crate) fn to_lend(&self) -> Option<LendRequest> {
        let configured = self.configured.clone();
        let Ok(bytes) = std::fs::read(&self.note) else {
            return configured;
        };
        // Earlier versions of memfold wrote no boot id.
        let old = || serde_json::from_slice(&bytes).map(|lend| (boot_id(), Some(lend)));
        let said = serde_json::from_slice::<ByHand>(&bytes).map(|said| (said.boot, said.lend));
        let Ok((boot, lend)) = said.or_else(|_| old()) else {
            warn!(
                "cannot read the settings of 'memfold lend' from lend.json; repeat 'memfold lend'"
            );
            return configured;
        };
        if boot == boot_id() {
            return lend;
        }
        configured.or(lend)
    }

    /// Checks that borrowers can reach the exports.
    ///
    /// # Errors
    ///
    /// [`DaemonError::BadRequest`] if the request contradicts itself; [`DaemonError::Refused`] if
    /// it asks for Unix sockets although borrowers of other hosts use the same registry.
    fn check_listen(&self, request: &LendRequest) -> Result<Listen, DaemonError> {
        let listen = request.listens();
        let listen = listen.map_err(|why| DaemonError::BadRequest(why.into()))?;
        if listen == Listen::Unix && self.leases.elsewhere {
            return Err(refused(
                format!(
                    "cannot lend on Unix sockets: borrowers of other hosts use the registry at {}, and cannot reach sockets of this host",
                    self.leases.place
                ),
                "name an address of this host: memfold lend --max SIZE --listen ADDRESS",
            ));
        }
        Ok(listen)
    }

    fn lender_options(&self, request: &LendRequest) -> Result<LenderOptions, DaemonError> {
        Ok(LenderOptions {
            host: self.leases.host.clone(),
            max_bytes: request.max_bytes,
            listen: self.check_listen(request)?,
            directory: self.directory.clone(),
            owed: self.needed.clone(),
            short_guests: self.short_guests.clone(),
            wanted_back: self.wanted_back.clone(),
            kept: self.kept.clone(),
        })
    }

    fn start_lender(&self, request: &LendRequest) -> Result<Lender, DaemonError> {
        let options = self.lender_options(request)?;
        let started = Lender::start(options, self.leases.registry.clone());
        started.map_err(state_error(&self.directory))
    }

    /// Begins to lend at the daemon's start, according to [`Lending::to_lend`].
    pub(crate) fn resume(&self) {
        let Some(request) = self.to_lend() else {
            return;
        };
        let checked = self.leases.check_host();
        let checked = checked.and_then(|()| self.check_listen(&request));
        if let Err(error) = checked.and_then(|_| check_server(request.transport)) {
            warn!(
                error = chain(&error),
                "cannot start lending on this host; fix the cause and run 'memfold lend'"
            );
            return;
        }
        if let Err(error) = self.begin(&request) {
            warn!(
                error = chain(&error),
                "cannot start the lender; fix the cause and run 'memfold lend'"
            );
        }
    }

    /// Starts the lender at the daemon's start, unless an operator's request has meanwhile started
    /// one, or has stopped lending.
    fn begin(&self, request: &LendRequest) -> Result<(), DaemonError> {
        // The lock is held until the lender runs: the start of a second lender would remove the
        // files of the first one's exports, and end its leases.
        let mut lender = self.lender.lock();
        if lender.is_none() && self.to_lend().as_ref() == Some(request) {
            // The registry may not answer yet: its daemon may start later. The lender's thread
            // retries.
            *lender = Some(Arc::new(self.start_lender(request)?));
        }
        Ok(())
    }

    /// Recalls all leases and ends lending, on an operator's request. Returns the lender's last
    /// status; `None` if this host does not lend.
    pub fn stop(&self) -> Option<LenderStatus> {
        self.note_lending(None);
        let lender = self.lender.lock();
        let lender = lender.as_ref()?;
        lender.end();
        Some(lender.status())
    }

    /// Ends lending because the daemon ends; the next daemon resumes lending. Borrowers get time to
    /// return the memory until `hurry` returns `true`.
    pub fn end(&self, hurry: &dyn Fn() -> bool) {
        // The lender stays known meanwhile. A second lender beside it would end the leases whose
        // memory borrowers are still copying.
        let lender = self.lender.lock().clone();
        if let Some(lender) = lender {
            lender.end_and_wait(hurry);
        }
        self.shut_down();
    }

    /// Returns the lender's status; `None` if this host does not lend. If the lender ended because
    /// of a problem, the status names the problem.
    pub fn status(&self) -> Option<LenderStatus> {
        let mut lender = self.lender.lock();
        // A lender that has ended stays only to report its problem: another daemon lends under this
        // host name.
        lender.take_if(|l| l.has_ended() && l.status().problem.is_none());
        lender.as_ref().map(|lender| lender.status())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use memfold_lend::{Durability, SqliteRegistry, Want};
    use memfold_testkit::{wait_for, wait_until};

    use super::*;

    fn request() -> LendRequest {
        LendRequest {
            max_bytes: LEAST,
            listen: None,
            announce: None,
            ports: None,
            transport: Transport::Nbd,
            cleartext: false,
        }
    }

    fn lending(state: &Path, configured: Option<LendRequest>) -> Lending {
        lending_with(leases(state), state, configured)
    }

    fn leases(state: &Path) -> Leases {
        let registry = SqliteRegistry::open(&state.join("registry.db")).unwrap();
        Leases::of_registry("lender", Arc::new(registry), state)
    }

    fn lending_with(leases: Leases, state: &Path, configured: Option<LendRequest>) -> Lending {
        Lending::new(Arc::new(leases), state, configured, Arc::default())
    }

    #[test]
    fn an_impossible_maximum_is_refused_by_the_options_name_with_readable_sizes() {
        for (bytes, size) in [
            (8 << 20, "8.00 MiB (8388608 bytes)"),
            (LEAST - 1, "16.0 MiB (16777215 bytes)"),
        ] {
            let error = check_max(bytes).unwrap_err().to_string();
            let wanted =
                format!("--max (max_bytes): {size} is not possible; give 16.0 MiB to 1.00 PiB");
            assert_eq!(error, wanted);
        }
        check_max(LEAST).unwrap();
    }

    #[test]
    fn unix_sockets_are_refused_if_another_host_or_an_etcd_serves_the_registry() {
        let directory = tempfile::tempdir().unwrap();
        let mut leases = leases(directory.path());
        leases.elsewhere = true;
        let lending = lending_with(leases, directory.path(), Some(request()));
        let error = lending.lend(&request()).unwrap_err();
        assert!(error.to_string().contains("Unix sockets"), "{error}");
        assert!(error.hint().unwrap().contains("--listen ADDRESS"));
        lending.resume();
        assert_eq!(lending.status(), None);
        let listen = Some([127, 0, 0, 1].into());
        let over_tcp = LendRequest {
            listen,
            ..request()
        };
        assert_ne!(lending.check_listen(&over_tcp).unwrap(), Listen::Unix);
    }

    #[test]
    fn at_its_start_the_daemon_starts_no_second_lender_beside_that_of_an_operator() {
        let directory = tempfile::tempdir().unwrap();
        let request = request();
        let lending = lending(directory.path(), Some(request.clone()));
        *lending.lender.lock() = Some(Arc::new(lending.start_lender(&request).unwrap()));
        // The start of a lender empties this directory.
        let export = directory.path().join("lend/export");
        std::fs::write(&export, "").unwrap();
        lending.begin(&request).unwrap();
        assert!(export.exists());
        lending.shut_down();
        lending.begin(&request).unwrap();
        assert!(lending.status().is_some() && !export.exists());
    }

    #[test]
    fn at_its_start_the_daemon_does_not_lend_if_an_operator_has_stopped_lending() {
        let directory = tempfile::tempdir().unwrap();
        let request = request();
        let lending = lending(directory.path(), Some(request.clone()));
        assert_eq!(lending.stop(), None);
        lending.begin(&request).unwrap();
        assert!(lending.status().is_none());
    }

    #[test]
    fn while_borrowers_copy_lent_memory_home_at_the_daemons_end_no_second_lender_begins() {
        if check_nbdkit().is_err() {
            return memfold_testkit::report_skip("nbdkit is not installed");
        }
        let directory = tempfile::tempdir().unwrap();
        let request = request();
        let lending = lending(directory.path(), None);
        lending.lend(&request).unwrap();
        let want = Want {
            borrower: "borrower".into(),
            vm: "v".into(),
            bytes: LEAST,
            disk_bytes: 0,
            durability: Durability::None,
            apart_from: Vec::new(),
        };
        let minute = Duration::from_secs(60);
        // Other tests may press this host, so that it offers less for a moment.
        wait_for("a lease", 2 * minute, || {
            lending.leases.registry.take(&want, minute)
        });
        wait_until("the memory is lent", minute, || {
            lending.status().is_some_and(|status| status.lent_bytes > 0)
        });
        let refused = Cell::new(false);
        lending.end(&|| {
            refused.set(lending.lend(&request).is_err());
            assert!(lending.status().is_some());
            true
        });
        assert!(refused.get());
        assert!(lending.status().is_none());
    }
}
