//! Memory that this host lends, and the registry of who lends what to whom.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use memfold_api::{Borrowed, LeaseReport, LendRequest, registry_at};
use memfold_host::helper;
use memfold_lend::blast::blast;
use memfold_lend::calls::{Answer, Call, CallRegistry, answer};
use memfold_lend::distrust::{Distrust, Distrusted};
use memfold_lend::graph::Part;
use memfold_lend::registry::{check_bytes, check_name};
use memfold_lend::{
    Lease, LeaseId, Lender, LenderOptions, LenderStatus, Picture, Registry, RegistryAt,
    RegistryError, SqliteRegistry, Transport,
};
use memfold_vm::boot_id;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::volumes::Volumes;
use super::watched::Guard;
use super::{Daemon, DaemonError, DaemonOptions, chain, write_json};

/// Least amount that is worth lending.
const LEAST: u64 = 16 << 20;

/// How long a program may take to say what it can do.
const LOOK_LIMIT: Duration = Duration::from_secs(10);

/// A registry that wasn't asked for so long may have been away.
const GAP: Duration = Duration::from_secs(3);

/// What the daemon has of lending.
#[derive(Debug)]
pub(super) struct Lending {
    pub host: String,
    pub registry: Arc<dyn Registry>,
    /// Where that is, in words.
    place: String,
    /// Whether this daemon serves it.
    own: bool,
    /// Whether hosts that this one knows nothing of write there.
    pub elsewhere: bool,
    directory: PathBuf,
    /// What this host's VMs may call in at once, in bytes: the brake says so, and it is not lent.
    pub owed: Arc<AtomicU64>,
    /// How many of its guests lack memory themselves.
    pub short_guests: Arc<AtomicU32>,
    lender: Mutex<Option<Lender>>,
    /// When the registry began to answer without a gap, and when it did last.
    heard: Mutex<Option<(Instant, Instant)>>,
    guards: Mutex<BTreeMap<String, Arc<Guard>>>,
    /// Volumes of this host on lent RAM.
    pub volumes: Volumes,
    distrust: Mutex<Distrust>,
}

/// What somebody said by hand, which counts until the next boot.
#[derive(Debug, Serialize, Deserialize)]
struct ByHand {
    boot: String,
    /// Nothing, if unset.
    lend: Option<LendRequest>,
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
        let (registry, place): (Arc<dyn Registry>, String) = if let Some(at) = &options.registry {
            (registry_at(at), at.to_string())
        } else {
            let path = options.state.join("registry.db");
            let place = path.display().to_string();
            // VMs have to be served whatever this file holds.
            let registry: Arc<dyn Registry> = match SqliteRegistry::open(&path) {
                Ok(registry) => Arc::new(registry),
                Err(error) => {
                    warn!(%error, "memory can't be lent or borrowed here");
                    let why = error.to_string();
                    Arc::new(CallRegistry::new(place.clone(), move |_: &Call| {
                        Err(why.clone())
                    }))
                }
            };
            (registry, place)
        };
        Ok(Self {
            host,
            registry,
            place,
            own: options.registry.is_none(),
            // The daemon behind a socket is of this host, and takes no sockets of others.
            elsewhere: matches!(
                options.registry,
                Some(RegistryAt::Daemon { .. } | RegistryAt::Etcd { .. })
            ),
            directory,
            owed: Arc::default(),
            short_guests: Arc::default(),
            lender: Mutex::default(),
            heard: Mutex::default(),
            guards: Mutex::default(),
            volumes: Volumes::default(),
            distrust: Mutex::new(Distrust::open(&options.state.join("distrusted.json"))),
        })
    }

    fn lender(&self) -> MutexGuard<'_, Option<Lender>> {
        self.lender.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who lends what to whom, and for how long the registry has answered; `None`: it doesn't.
    pub fn heard(&self) -> Option<(Picture, Duration)> {
        let picture = self.registry.picture();
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(picture) = picture else {
            *heard = None;
            return None;
        };
        let now = Instant::now();
        let before = heard.filter(|(_, last)| now.duration_since(*last) < GAP);
        let since = before.map_or(now, |(since, _)| since);
        *heard = Some((since, now));
        Some((picture, now.duration_since(since)))
    }

    pub fn guards(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Guard>>> {
        self.guards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn distrust(&self) -> MutexGuard<'_, Distrust> {
        self.distrust.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names of lenders that aren't believed.
    pub fn distrusted(&self) -> Vec<String> {
        let now = self.distrust().now();
        now.into_iter().map(|one| one.lender).collect()
    }

    /// Processes between VMs and lenders.
    pub fn relays(&self) -> Vec<i32> {
        let guards: Vec<Arc<Guard>> = self.guards().values().cloned().collect();
        let of = |part: &Part| Some(part.relay.as_ref()?.process.pid);
        let parts = guards.iter().map(|guard| guard.borrowing());
        parts
            .flat_map(|b| b.reached().filter_map(|(_, p)| of(p)).collect::<Vec<_>>())
            .collect()
    }

    /// Ends exports; borrowed memory stays until its leases are over, or the next daemon takes over.
    pub fn shut_down(&self) {
        drop(self.lender().take());
        for guard in self.guards().values() {
            guard.stop();
        }
        self.volumes.stop();
    }

    /// What VMs and volumes of this host have borrowed.
    pub fn borrowed(&self) -> Vec<Borrowed> {
        let guards: Vec<Arc<Guard>> = self.guards().values().cloned().collect();
        let of_vms = guards.iter().map(|guard| guard.borrowed());
        of_vms.chain(self.volumes.borrowed()).collect()
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
    let mut command = Command::new("nbdkit");
    command.args(["data", "--dump-plugin"]).stdin(Stdio::null());
    let said = helper::output(&mut command, LOOK_LIMIT)
        .map_err(|error| lacks(format!("nbdkit can't be run ({error})")))?;
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
        "memory can't be lent by iSCSI: tgtd can't be run; install tgt (apt install tgt; its own service isn't needed), or lend by NBD (--transport nbd)".into(),
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
        check_server(request.transport)?;
        // Whether the registry can be used at all is better told now than in the log. Whoever asks what this host lends doesn't wait for it.
        if self.lending.lender().as_ref().is_none_or(Lender::has_ended) {
            self.lending.registry.picture()?;
        }
        let mut lender = self.lending.lender();
        if let Some(old) = lender.as_ref().filter(|old| !old.has_ended()) {
            let status = old.status();
            let listens = self.lender_options(request)?.listen.to_string();
            if status.is_ending || status.listens != listens {
                return Err(DaemonError::Lending {
                    why: format!("this host lends already, on {}", status.listens),
                    fix: "take everything back first (memfold lend --stop), and wait until it is; only --max can be changed meanwhile".into(),
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
        if let Err(error) = write_json(&self.lend_file(), &by_hand) {
            warn!(%error, "the next daemon won't know what this host is to lend");
        }
    }

    /// What is to be lent when the daemon begins: what somebody said since the boot, else what the configuration says, else what somebody said
    /// before.
    fn to_lend(&self) -> Option<LendRequest> {
        let configured = self.options.lend.clone();
        let Ok(bytes) = std::fs::read(self.lend_file()) else {
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
            warn!("what the daemon before has lent can't be read; it is not lent again");
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
            host: self.lending.host.clone(),
            max_bytes: request.max_bytes,
            listen: listen.map_err(|why| DaemonError::BadRequest(why.into()))?,
            directory: self.lending.directory.clone(),
            owed: self.lending.owed.clone(),
            short_guests: self.lending.short_guests.clone(),
        })
    }

    fn start_lender(&self, request: &LendRequest) -> Result<Lender, DaemonError> {
        let options = self.lender_options(request)?;
        Lender::start(options, self.lending.registry.clone()).map_err(|source| DaemonError::State {
            path: self.lending.directory.clone(),
            source,
        })
    }

    /// Lends as the daemon before did, or as is configured.
    pub(super) fn lend_again(&self) {
        let Some(request) = self.to_lend() else {
            return;
        };
        if let Err(error) =
            check_host(&self.lending.host).and_then(|()| check_server(request.transport))
        {
            warn!(error = chain(&error), "this host lends nothing");
            return;
        }
        // The registry may not be there yet: its daemon may start after this one. The lender's thread goes on asking.
        match self.start_lender(&request) {
            Ok(lender) => {
                // Somebody may have asked for another one meanwhile.
                self.lending.lender().get_or_insert(lender);
            }
            Err(error) => warn!(error = chain(&error), "this host lends no more"),
        }
    }

    /// Takes everything back and lends no more; `None`: it doesn't lend.
    pub fn lend_no_more(&self) -> Option<LenderStatus> {
        self.note_lending(None);
        let lender = self.lending.lender();
        let lender = lender.as_ref()?;
        lender.end();
        Some(lender.status())
    }

    /// Asks for one lease of this host back; gives it as it was.
    pub fn recall_lease(&self, id: LeaseId) -> Result<Lease, DaemonError> {
        let host = &self.lending.host;
        let leases = self.lending.registry.picture()?.leases;
        let lease = leases
            .into_iter()
            .find(|lease| lease.id == id && lease.lender.host == *host)
            .ok_or_else(|| RegistryError::NoLease {
                id,
                who: host.clone(),
            })?;
        let within = lease.durability.time_to_give_back(lease.bytes);
        self.lending.registry.recall(id, &lease.lender, within)?;
        Ok(lease)
    }

    /// Lends no more, because the daemon ends: the next one lends again. Borrowers have time to give back, unless `hurry`.
    pub fn end_lending(&self, hurry: &dyn Fn() -> bool) {
        let lender = self.lending.lender().take();
        if let Some(lender) = lender {
            lender.end_and_wait(hurry);
        }
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

    /// Believes a lender again that has served wrong bytes; whether it wasn't believed.
    pub fn trust_lender(&self, lender: &str) -> bool {
        self.lending.distrust().trust(lender)
    }

    /// Lenders that aren't believed now, and how often one has lied since this daemon began.
    pub fn lies(&self) -> (Vec<Distrusted>, u64) {
        let mut distrust = self.lending.distrust();
        (distrust.now(), distrust.lies())
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
        // Just then one wants to know what this host itself has borrowed.
        let (picture, registry_away) = match self.lending.registry.picture() {
            Ok(picture) => (picture, None),
            Err(away @ RegistryError::Unusable { .. }) => {
                (Picture::default(), Some(away.to_string()))
            }
            Err(error) => return Err(error.into()),
        };
        let (distrusted, lies) = self.lies();
        let guards = self.lending.guards().clone();
        let without_copy = |host: &str, vm: &str| {
            let guard = guards.get(vm).filter(|_| host == self.lending.host);
            guard.is_some_and(|guard| guard.borrowing().copy_failed)
        };
        let lending = self.lender_status();
        let lends = lending.as_ref().filter(|status| !status.is_ending);
        Ok(LeaseReport {
            host: self.lending.host.clone(),
            registry: self.lending.place.clone(),
            registry_away,
            lends_as: lends.and_then(|_| self.to_lend()),
            lending,
            borrowed: self.lending.borrowed(),
            again: self.borrow_again_later(),
            blast: blast(&picture, &without_copy),
            lenders: picture.lenders,
            leases: picture.leases,
            distrusted,
            lies,
        })
    }
}
