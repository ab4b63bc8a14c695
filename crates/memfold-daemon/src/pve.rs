//! Attaches to VMs of Proxmox VE that are enabled for memfold, as these VMs start.
//!
//! The search reads one directory. On a host without Proxmox VE, the directory does not exist.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use memfold_api::{AttachRequest, VmInfo};
use memfold_host::chain;
use memfold_pve::Node;
use memfold_vm::{Qmp, QmpError, Vm};
use tracing::{debug, info, warn};

use crate::error::DaemonError;
use crate::threads;
use crate::vm_registry::VmRegistry;
use crate::vms::Vms;

/// Time between two searches for VMs that have started.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// Time limit for an answer of QEMU's monitor.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of failures to attach to a VM after which the log shows the error. A QEMU that starts or
/// ends may not answer, so only a lasting failure is logged.
const LASTING: u32 = 3;

/// One start of a VM: the VM's number, and the time when its QEMU made the QMP socket.
type Start = (u32, SystemTime);

/// Attaches to VMs of Proxmox VE.
#[derive(Debug)]
pub(crate) struct PveVms {
    pub registry: Arc<VmRegistry>,
    pub vms: Arc<Vms>,
    /// Node whose VMs are attached; `None` if this daemon does not use Proxmox VE.
    pub node: Option<Node>,
}

impl PveVms {
    /// Starts the thread that searches for VMs, unless this daemon does not use Proxmox VE.
    pub fn begin(self: &Arc<Self>) -> io::Result<()> {
        let Some(node) = self.node.clone() else {
            return Ok(());
        };
        let mut failures = BTreeMap::new();
        threads::repeat("pve", LOOK_INTERVAL, self, move |vms| {
            vms.look(&node, &mut failures);
        })
    }

    /// Searches for enabled VMs that run, and attaches to those that are not attached yet.
    /// `failures`: the number of failures for each start of a VM.
    fn look(&self, node: &Node, failures: &mut BTreeMap<Start, u32>) {
        let marked = node.marked().unwrap_or_else(|error| {
            debug!(%error, "cannot list the enabled VMs of Proxmox VE");
            Vec::new()
        });
        let started = |vmid| {
            let socket = std::fs::metadata(node.qmp(vmid)).ok()?;
            Some((vmid, socket.modified().ok()?))
        };
        let starts: Vec<Start> = marked.into_iter().filter_map(started).collect();
        failures.retain(|start, _| starts.contains(start));
        for start in starts {
            let vmid = start.0;
            match self.attach(node, vmid) {
                Ok(None) => {}
                Ok(Some(VmInfo { name: vm, .. })) => info!(vm, vmid, "VM of Proxmox VE attached"),
                Err(error) => {
                    let count = failures.entry(start).or_default();
                    *count = count.saturating_add(1);
                    if *count == LASTING {
                        warn!(
                            vmid,
                            error = &error as &dyn std::error::Error,
                            "cannot attach the VM of Proxmox VE; the daemon keeps retrying every 2 s"
                        );
                    }
                }
            }
        }
    }

    /// Returns whether a VM is attached, or was attached by an earlier daemon and is to be attached
    /// again.
    fn is_attached(&self, node: &Node, vmid: u32) -> bool {
        let qmp = node.qmp(vmid);
        let machines = self.registry.machines();
        let mut known = machines.iter().filter_map(|m| m.attached());
        let arrivals = self.registry.arrivals().all();
        let mut arriving = arrivals.iter().filter_map(|a| a.attached());
        known.any(|vm| vm.request.qmp == qmp) || arriving.any(|vm| vm.request.qmp == qmp)
    }

    /// Attaches to a VM. Returns `None` if that is not necessary, or not possible yet: no QEMU
    /// runs, or the VM's memory is still being loaded, from a file or another host.
    fn attach(&self, node: &Node, vmid: u32) -> Result<Option<VmInfo>, DaemonError> {
        // The daemon holds the only monitor of an attached VM.
        if self.is_attached(node, vmid) {
            return Ok(None);
        }
        let mark = node.mark(vmid);
        let mark = mark.map_err(|error| DaemonError::BadRequest(chain(&error)))?;
        // 'memfold pve disable' may have removed the mark meanwhile.
        let Some(mark) = mark else {
            return Ok(None);
        };
        let qmp = node.qmp(vmid);
        let mut monitor = match Qmp::connect(&qmp, ANSWER_TIMEOUT) {
            // A QEMU that was killed leaves its socket behind.
            Err(QmpError::Connect { source, .. })
                if source.kind() == ErrorKind::ConnectionRefused =>
            {
                return Ok(None);
            }
            monitor => monitor?,
        };
        let status = monitor.query("query-status")?;
        if matches!(status["status"].as_str(), Some("inmigrate" | "prelaunch")) {
            return Ok(None);
        }
        let uuid = monitor.query("query-uuid")?;
        if !mark.fits(uuid["UUID"].as_str()) {
            return Err(DaemonError::BadRequest(format!(
                "VM {vmid} got another UUID (smbios1) after it was enabled, so it may be a new VM with the number of a deleted one; run 'memfold pve enable {vmid}' again"
            )));
        }
        drop(monitor);
        let vm = Vm::attach(&qmp)?;
        let mut request = AttachRequest {
            qmp,
            name: format!("vm{vmid}"),
            domain: mark.domain,
        };
        if self.registry.is_taken(&request.name) {
            let pid = vm.pid().as_raw_nonzero();
            request.name = format!("{}-{pid}", request.name);
        }
        self.vms.attach_as(vm, &request, None).map(Some)
    }
}
