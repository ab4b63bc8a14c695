//! Domains of libvirt that are enabled: taken on as they start.
//!
//! libvirt is asked only of a QEMU that was started by memfold's wrapper, and once each: looking
//! for new ones is a directory to read.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use memfold_api::{AttachRequest, VmInfo};
use memfold_host::chain;
use memfold_libvirt::{
    self as libvirt, Change, DomainStatus, LibvirtError, Mark, Running, VirshError, virsh, vm_name,
    xml,
};
use memfold_vm::{Identity, Qmp, Vm};
use tracing::{debug, info, warn};

use crate::error::DaemonError;
use crate::mechanisms::Mechanisms;
use crate::vm_registry::VmRegistry;
use crate::vms::Vms;

/// Time between two looks.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// How long a process may take to become QEMU.
const BEGINNING: Duration = Duration::from_secs(60);
/// Longest time until a domain that can't be taken on is tried again.
const LONGEST_PAUSE: Duration = Duration::from_secs(120);
/// Time that QEMU's monitor has for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a domain isn't taken on.
#[derive(Debug)]
enum Refusal {
    /// It has nothing to do with memfold.
    NotOurs(String),
    /// Its memory is still coming in, from a file or another host.
    Incoming,
    /// Something failed.
    Failed(DaemonError),
}

/// Of a QEMU that was looked at.
struct KnownQemu {
    first: Instant,
    again: Option<Instant>,
    pause: Duration,
}

/// Looks for new domains until the daemon ends.
fn watch(domains: &Weak<LibvirtDomains>, run: &Path) {
    let mut looked: BTreeMap<(i32, u64), KnownQemu> = BTreeMap::new();
    while let Some(domains) = domains.upgrade() {
        let running = Running::all(run).unwrap_or_else(|error| {
            debug!(%error, "cannot list libvirt's domains");
            Vec::new()
        });
        looked.retain(|key, _| running.iter().any(|r| key_of(r.process) == *key));
        for domain in running {
            let known = looked.entry(key_of(domain.process)).or_insert(KnownQemu {
                first: Instant::now(),
                again: Some(Instant::now()),
                pause: LOOK_INTERVAL,
            });
            if known.again.is_some_and(|again| again <= Instant::now()) {
                known.note(&domain, domains.take_on(&domain));
            }
        }
        drop(domains);
        std::thread::sleep(LOOK_INTERVAL);
    }
}

fn refused(error: &LibvirtError) -> DaemonError {
    DaemonError::BadRequest(chain(error))
}

const fn key_of(process: Identity) -> (i32, u64) {
    (process.pid, process.start_ticks)
}

impl KnownQemu {
    fn note(&mut self, domain: &Running, result: Result<VmInfo, Refusal>) {
        match result {
            Ok(vm) => {
                info!(
                    vm = vm.name,
                    libvirt = domain.domain,
                    "libvirt domain adopted"
                );
                self.again = None;
            }
            Err(Refusal::NotOurs(why)) => {
                debug!(libvirt = domain.domain, why, "libvirt domain not adopted");
                // libvirt notes the process before that is the wrapper, or QEMU.
                let begins = self.first.elapsed() < BEGINNING;
                self.again = begins.then(|| Instant::now() + LOOK_INTERVAL);
            }
            Err(Refusal::Incoming) => self.again = Some(Instant::now() + LOOK_INTERVAL),
            Err(Refusal::Failed(error)) => {
                // A QEMU that begins, or ends, may not answer; said once it is sure.
                if self.pause == LOOK_INTERVAL * 4 {
                    warn!(
                        libvirt = domain.domain,
                        error = &error as &dyn std::error::Error,
                        "cannot adopt the libvirt domain; retrying up to 2 minutes apart"
                    );
                }
                self.again = Some(Instant::now() + self.pause);
                self.pause = (self.pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

/// Domains of libvirt, as the daemon takes them on.
#[derive(Debug)]
pub struct LibvirtDomains {
    registry: Arc<VmRegistry>,
    vms: Arc<Vms>,
    /// Directory where libvirt notes its QEMUs; `None`: its domains are left alone.
    run: Option<PathBuf>,
}

impl LibvirtDomains {
    pub(crate) fn new(below: &Mechanisms, vms: Arc<Vms>, run: Option<PathBuf>) -> Self {
        let registry = below.registry.clone();
        Self { registry, vms, run }
    }

    /// Looks for domains from now on, unless libvirt is left alone.
    pub(crate) fn begin(self: &Arc<Self>) -> io::Result<()> {
        let Some(run) = self.run.clone() else {
            return Ok(());
        };
        let domains = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("libvirt".into());
        thread.spawn(move || watch(&domains, &run)).map(drop)
    }

    /// Where libvirt keeps what runs.
    fn place(&self) -> Result<&Path, DaemonError> {
        self.run.as_deref().ok_or_else(|| {
            DaemonError::BadRequest(
                "this daemon leaves libvirt alone; start it with --libvirt /run/libvirt/qemu"
                    .into(),
            )
        })
    }

    /// Domains of libvirt, and what becomes of them; `None`: there is no libvirt here, or this
    /// daemon leaves it alone.
    pub fn list(&self) -> Result<Option<Vec<DomainStatus>>, DaemonError> {
        if self.run.is_none() {
            return Ok(None);
        }
        let vms: Vec<_> = self
            .vms
            .list()
            .iter()
            .filter_map(VmInfo::of_libvirt)
            .collect();
        match libvirt::status(Some(&vms)) {
            Ok(domains) => Ok(Some(domains)),
            Err(LibvirtError::Virsh(VirshError::Missing)) => Ok(None),
            Err(error) => Err(refused(&error)),
        }
    }

    /// Has a domain start with memfold from now on.
    pub fn enable(&self, domain: &str, trust_domain: Option<&str>) -> Result<Change, DaemonError> {
        self.place()?;
        libvirt::enable(domain, trust_domain).map_err(|error| refused(&error))
    }

    /// Puts a domain's XML back to what it was.
    pub fn disable(&self, domain: &str) -> Result<Change, DaemonError> {
        self.place()?;
        libvirt::disable(domain).map_err(|error| refused(&error))
    }

    /// Takes a running domain of libvirt on now, or says why it can't be.
    pub fn attach(&self, domain: &str) -> Result<VmInfo, DaemonError> {
        let run = self.place()?;
        if let Some(known) = self
            .vms
            .list()
            .into_iter()
            .find(|vm| vm.libvirt.as_deref() == Some(domain))
        {
            return Ok(known);
        }
        let running = Running::all(run).map_err(|source| DaemonError::State {
            path: run.to_owned(),
            source,
        })?;
        let running = running.into_iter().find(|r| r.domain == domain);
        let running = running.ok_or_else(|| {
            DaemonError::BadRequest(format!(
                "libvirt runs no domain '{domain}'; 'memfold libvirt status' shows all domains"
            ))
        })?;
        self.take_on(&running).map_err(|refusal| match refusal {
            Refusal::NotOurs(why) => DaemonError::BadRequest(why),
            Refusal::Incoming => DaemonError::Busy {
                why: format!("memory of '{domain}' is still being received"),
                fix: "memfold adopts the domain by itself when it runs".into(),
            },
            Refusal::Failed(error) => error,
        })
    }

    fn take_on(&self, running: &Running) -> Result<VmInfo, Refusal> {
        let domain = &running.domain;
        let not_ours = |why: &str| Refusal::NotOurs(format!("domain '{domain}' {why}"));
        let Some(qmp) = running.qmp() else {
            return Err(not_ours(
                "was started without memfold: run 'memfold libvirt enable', then shut the domain down and start it (a reboot of the guest is not enough)",
            ));
        };
        let refused = |error: &dyn std::error::Error| {
            Refusal::Failed(DaemonError::BadRequest(format!(
                "cannot adopt domain '{domain}': {}",
                chain(error)
            )))
        };
        // What it is now, not what it will be at its next start.
        let xml = virsh::xml(domain).map_err(|error| refused(&error))?;
        let mark = Mark::read(&xml).map_err(|error| refused(&error))?;
        let mark = mark.ok_or_else(|| {
            not_ours("is not enabled: run 'memfold libvirt enable', then shut the domain down and start it")
        })?;
        let mut monitor = Qmp::connect(&qmp, ANSWER_TIMEOUT).map_err(failed)?;
        let status = monitor.query("query-status").map_err(failed)?;
        drop(monitor);
        if matches!(status["status"].as_str(), Some("inmigrate" | "prelaunch")) {
            return Err(Refusal::Incoming);
        }
        let vm = Vm::attach(&qmp).map_err(failed)?;
        // The path comes from QEMU's own environment, which a guest that has taken it over can
        // change.
        if vm.process().identity() != running.process {
            return Err(not_ours("names the QMP socket of another process"));
        }
        // As does the agent's port, and what is said there is believed to come from this domain's
        // guest.
        let agent = xml::agent_socket(&xml).map_err(|error| refused(&error))?;
        if !same_file(vm.agent_socket(), agent.as_deref()) {
            return Err(not_ours("has a port for the agent other than libvirt's"));
        }
        let mut request = AttachRequest {
            qmp,
            name: vm_name(domain),
            domain: mark.domain,
        };
        if self.registry.contains(&request.name) {
            // Of two domains that are called alike, or of one like a VM of memfold's.
            let pid = vm.pid().as_raw_nonzero();
            request.name = format!("{:.50}-{pid}", request.name);
        }
        self.vms
            .attach_as(vm, &request, Some(domain.clone()), None)
            .map_err(Refusal::Failed)
    }
}

/// Whether both are one file, or neither is there. `/var/run` is `/run`.
fn same_file(one: Option<&Path>, other: Option<&Path>) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    match (one, other) {
        (Some(one), Some(other)) => one == other || real(one).is_some() && real(one) == real(other),
        (one, other) => one.is_none() && other.is_none(),
    }
}

fn failed(error: impl Into<DaemonError>) -> Refusal {
    Refusal::Failed(error.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_the_one_that_libvirt_made_by_whatever_name() {
        let place = tempfile::tempdir().unwrap();
        let (real, other) = (place.path().join("real"), place.path().join("other"));
        std::fs::create_dir_all(&real).unwrap();
        std::os::unix::fs::symlink(&real, &other).unwrap();
        for name in ["own", "neighbour"] {
            std::fs::write(real.join(name), "").unwrap();
        }
        assert!(same_file(Some(&real.join("own")), Some(&other.join("own"))));
        assert!(!same_file(
            Some(&real.join("neighbour")),
            Some(&other.join("own"))
        ));
        assert!(!same_file(
            Some(&real.join("gone")),
            Some(&other.join("gone"))
        ));
        assert!(!same_file(Some(&real.join("own")), None));
        assert!(!same_file(None, Some(&real.join("own"))));
        assert!(same_file(None, None));
    }
}
