//! Adopts libvirt domains that are enabled for memfold, as soon as they run, and enables domains by
//! the tag in their XML ([`tags`]).
//!
//! To find new QEMUs and changed tags, the daemon only reads two directories. It asks libvirt once
//! about each new QEMU that memfold's wrapper script started.

mod attempts;
mod tags;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{AttachRequest, VmInfo};
use memfold_host::chain;
use memfold_libvirt::{
    self as libvirt, Change, DEFAULT_STORED, DomainStatus, LibvirtError, Mark, Running, VirshError,
    virsh, vm_name, xml,
};
use memfold_vm::{Identity, Qmp, Vm};
use rustix::process::Pid;
use tracing::{debug, info, warn};

use self::attempts::{Attempts, LOOK_INTERVAL};
use self::tags::Tags;
use crate::error::{self, DaemonError, state_error};
use crate::threads;
use crate::vm_registry::VmRegistry;
use crate::vms::Vms;

/// Time within which a process that libvirt has just started must become QEMU.
const BEGINNING: Duration = Duration::from_secs(60);
/// Time limit for an answer of QEMU's monitor.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The reason why a domain is not adopted.
#[derive(Debug)]
enum Refusal {
    /// The domain does not use memfold.
    NotOurs(String),
    /// The domain's memory is still being loaded, from a file or another host.
    Incoming,
    /// An operation failed.
    Failed(DaemonError),
}

/// Attempts to adopt one QEMU, and the time of the first one.
struct KnownQemu {
    first: Instant,
    attempts: Attempts,
}

fn refused(error: &LibvirtError) -> DaemonError {
    DaemonError::BadRequest(chain(error))
}

const fn key_of(process: Identity) -> (i32, u64) {
    (process.pid, process.start_ticks)
}

impl KnownQemu {
    fn note(&mut self, domain: &Running, result: Result<VmInfo, Refusal>) {
        let libvirt = &domain.domain;
        match result {
            Ok(VmInfo { name: vm, .. }) => {
                info!(vm, libvirt, "libvirt domain adopted");
                self.attempts.next = None;
            }
            Err(Refusal::NotOurs(why)) => {
                debug!(libvirt, why, "libvirt domain not adopted");
                // libvirt records the PID before the process has executed the wrapper or QEMU.
                let begins = self.first.elapsed() < BEGINNING;
                self.attempts.next = begins.then(|| Instant::now() + LOOK_INTERVAL);
            }
            Err(Refusal::Incoming) => self.attempts.next = Some(Instant::now() + LOOK_INTERVAL),
            Err(Refusal::Failed(error)) => {
                // A QEMU that starts or ends may not answer, so only a lasting failure is logged.
                if self.attempts.failed(Instant::now()) {
                    warn!(
                        libvirt,
                        error = &error as &dyn std::error::Error,
                        "cannot adopt the libvirt domain; the daemon keeps retrying, at intervals of at most 2 minutes"
                    );
                }
            }
        }
    }
}

/// Adopts, enables and lists libvirt domains.
#[derive(Debug)]
pub struct LibvirtDomains {
    pub(crate) registry: Arc<VmRegistry>,
    pub(crate) vms: Arc<Vms>,
    /// Directory where libvirt records its QEMU processes; `None` if this daemon does not use
    /// libvirt.
    pub(crate) run: Option<PathBuf>,
}

impl LibvirtDomains {
    /// Starts the thread that searches for running libvirt domains and for tags, unless this daemon
    /// does not use libvirt.
    pub(crate) fn begin(self: &Arc<Self>) -> io::Result<()> {
        let Some(run) = self.run.clone() else {
            return Ok(());
        };
        let mut known = BTreeMap::new();
        let mut tags = Tags::default();
        threads::repeat("libvirt", LOOK_INTERVAL, self, move |domains| {
            domains.look(&run, &mut known);
            tags.look(Path::new(DEFAULT_STORED), Instant::now, libvirt::follow_tag);
        })
    }

    /// Searches for new libvirt domains, and adopts those that are due.
    fn look(&self, run: &Path, known: &mut BTreeMap<(i32, u64), KnownQemu>) {
        let running = Running::all(run).unwrap_or_else(|error| {
            debug!(%error, "cannot list libvirt's domains");
            Vec::new()
        });
        known.retain(|key, _| running.iter().any(|r| key_of(r.process) == *key));
        for domain in running {
            let now = Instant::now();
            let known = known.entry(key_of(domain.process)).or_insert(KnownQemu {
                first: now,
                attempts: Attempts::new(Some(now)),
            });
            if known.attempts.is_due(now) {
                known.note(&domain, self.take_on(&domain));
            }
        }
    }

    /// Returns the directory where libvirt records its QEMU processes.
    ///
    /// # Errors
    ///
    /// [`DaemonError::BadRequest`] if this daemon does not use libvirt.
    fn place(&self) -> Result<&Path, DaemonError> {
        let why = "this daemon leaves libvirt alone; start it with --libvirt /run/libvirt/qemu";
        let run = self.run.as_deref();
        run.ok_or_else(|| DaemonError::BadRequest(why.into()))
    }

    /// Returns all domains of libvirt and their state; `None` if libvirt is not installed or this
    /// daemon does not use it.
    pub fn list(&self) -> Result<Option<Vec<DomainStatus>>, DaemonError> {
        if self.run.is_none() {
            return Ok(None);
        }
        let vms = self.vms.list();
        let vms: Vec<_> = vms.iter().filter_map(VmInfo::of_libvirt).collect();
        match libvirt::status(Some(&vms)) {
            Ok(domains) => Ok(Some(domains)),
            Err(LibvirtError::Virsh(VirshError::Missing)) => Ok(None),
            Err(error) => Err(refused(&error)),
        }
    }

    /// Changes a domain's XML, so that the domain starts with memfold from now on.
    pub fn enable(&self, domain: &str, trust_domain: Option<&str>) -> Result<Change, DaemonError> {
        self.place()?;
        libvirt::enable(domain, trust_domain).map_err(|error| refused(&error))
    }

    /// Restores a domain's XML to its text before `enable`.
    pub fn disable(&self, domain: &str) -> Result<Change, DaemonError> {
        self.place()?;
        libvirt::disable(domain).map_err(|error| refused(&error))
    }

    /// Adopts a running libvirt domain now.
    ///
    /// # Errors
    ///
    /// A [`DaemonError`] that says why the domain cannot be adopted.
    pub fn attach(&self, domain: &str) -> Result<VmInfo, DaemonError> {
        let run = self.place()?;
        let mut known = self.vms.list().into_iter();
        if let Some(known) = known.find(|vm| vm.libvirt.as_deref() == Some(domain)) {
            return Ok(known);
        }
        let running = Running::all(run).map_err(state_error(run))?;
        let running = running.into_iter().find(|r| r.domain == domain);
        let running = running.ok_or_else(|| {
            DaemonError::BadRequest(format!(
                "libvirt runs no domain '{domain}'; 'memfold libvirt status' shows all domains"
            ))
        })?;
        self.take_on(&running).map_err(|refusal| match refusal {
            Refusal::NotOurs(why) => DaemonError::BadRequest(why),
            Refusal::Incoming => error::refused(
                format!("memory of '{domain}' is still being received"),
                "memfold adopts the domain by itself when it runs",
            ),
            Refusal::Failed(error) => error,
        })
    }

    fn take_on(&self, running: &Running) -> Result<VmInfo, Refusal> {
        let domain = &running.domain;
        // A request may have adopted the domain meanwhile.
        let pid = Pid::from_raw(running.process.pid);
        let known = pid.and_then(|pid| self.registry.with_pid(pid));
        if let Some(known) = known.filter(|known| known.libvirt() == Some(domain)) {
            return Ok(known.info());
        }
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
        // This is the XML of the running domain, which may differ from the XML of its next start.
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
        // The path comes from QEMU's own environment, which a guest that has taken over QEMU can
        // change.
        if vm.process().identity() != running.process {
            return Err(not_ours("names the QMP socket of another process"));
        }
        // The path of the agent's socket must be right, too: its messages are trusted to come from
        // this domain's guest.
        let agent = xml::agent_socket(&xml).map_err(|error| refused(&error))?;
        if !same_file(vm.agent_socket(), agent.as_deref()) {
            return Err(not_ours("has a port for the agent other than libvirt's"));
        }
        let mut request = AttachRequest {
            qmp,
            name: vm_name(domain),
            domain: mark.domain,
        };
        if self.registry.is_taken(&request.name) {
            // The name is taken if two domains have similar names, or if a VM of memfold has this
            // name.
            let pid = vm.pid().as_raw_nonzero();
            request.name = format!("{:.50}-{pid}", request.name);
        }
        self.vms
            .attach_as(vm, &request, Some(domain.clone()))
            .map_err(Refusal::Failed)
    }
}

/// Returns whether both paths lead to one file, or both are `None`. For example, `/var/run` is
/// `/run`.
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
    fn a_socket_path_through_a_symlink_is_the_same_file() {
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
