//! The daemon's main object. It owns all services of the daemon, such as folding and snapshots,
//! connects them with each other, and starts their background threads.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use memfold_api::VersionInfo;
use memfold_fold::Command;
use memfold_pve::Node;
use memfold_vm::remove_orphans;
use tracing::{info, warn};

use crate::boots::Boots;
use crate::debt::brake::DebtBrake;
use crate::definitions::Definitions;
use crate::error::{DaemonError, state_error};
use crate::folding::Folding;
use crate::ksm_steering::{self, KsmSteering};
use crate::leases::Leases;
use crate::lending::Lending;
use crate::libvirt::LibvirtDomains;
use crate::mechanisms::Mechanisms;
use crate::options::{BorrowWhen, DaemonOptions};
use crate::pve::PveVms;
use crate::reports::Reports;
use crate::rightsizing::Rightsizing;
use crate::sampling::Sampling;
use crate::segments::Segments;
use crate::snapshots::{Snapshots, clear_trials};
use crate::swap_disks::SwapDisks;
use crate::swap_volumes::SwapVolumes;
use crate::views::Views;
use crate::vm_registry::VmRegistry;
use crate::vms::Vms;
use crate::{guest_pressure, threads, vm_logs};

/// All services of the daemon for one state directory. `docs/daemon.md` draws the services.
#[derive(Debug)]
pub struct Daemon {
    vms: Arc<Vms>,
    snapshots: Arc<Snapshots>,
    boots: Arc<Boots>,
    definitions: Arc<Definitions>,
    libvirt: Arc<LibvirtDomains>,
    pve: Arc<PveVms>,
    reports: Arc<Reports>,
    sampling: Arc<Sampling>,
    views: Arc<Views>,
    began: Instant,
    below: Arc<Mechanisms>,
}

/// Removes temporary overlays and swap disks of VMs that ended with the host.
fn clear_orphans(state: &Path) {
    let orphans = match remove_orphans(state) {
        Ok(orphans) => orphans,
        Err(error) => {
            return warn!(%error, "cannot look for temporary overlays that VMs of an earlier boot of the host have left; remove files named memfold-VM-... in TMPDIR or /var/tmp by hand");
        }
    };
    for path in orphans.removed {
        info!(path = %path.display(), "temporary overlay or swap disk removed, because its VM ended with the host");
    }
    for (path, error) in orphans.failed {
        warn!(path = %path.display(), %error, "cannot remove a temporary overlay that a VM of an earlier boot of the host has left; remove the file by hand");
    }
}

impl Daemon {
    /// Starts the fold engine and the services, and begins to adopt the VMs that run under the
    /// state directory.
    pub fn start(options: &DaemonOptions) -> Result<Arc<Self>, DaemonError> {
        let state = &options.state;
        let files = state_error(state);
        let registry = Arc::new(VmRegistry::open(state)?);
        ksm_steering::restore();
        let folding = Folding::start(options.settings.clone(), registry.clone());
        let folding = Arc::new(folding.map_err(files)?);
        let below = Arc::new(Mechanisms::wire(options, registry, folding)?);
        let daemon = Arc::new(Self::over(below, options));
        if options.paused {
            daemon.below.folding.tell(Command::SetPaused(true))?;
        }
        clear_trials(state);
        clear_orphans(state);
        daemon.snapshots.find_streaming_vms();
        daemon.snapshots.begin_streams().map_err(files)?;
        daemon.vms.begin_adoption().map_err(files)?;
        daemon.begin_settling().map_err(files)?;
        daemon.sampling.begin()?;
        daemon.begin_watching(options.borrow).map_err(files)?;
        daemon.definitions.begin_autostart().map_err(files)?;
        Ok(daemon)
    }

    /// Creates the remaining services, which use the services in `below`.
    fn over(below: Arc<Mechanisms>, options: &DaemonOptions) -> Self {
        let vms = Arc::new(Vms::new(below.clone(), options));
        let snapshots = Arc::new(Snapshots::new(below.clone(), vms.clone()));
        let boots = Arc::new(Boots {
            below: below.clone(),
            vms: vms.clone(),
            snapshots: snapshots.clone(),
        });
        let definitions = Definitions::new(boots.clone(), options);
        let libvirt = LibvirtDomains {
            registry: below.registry.clone(),
            vms: vms.clone(),
            run: options.libvirt.clone(),
        };
        let pve = PveVms {
            registry: below.registry.clone(),
            vms: vms.clone(),
            node: options.pve.clone().map(Node::at),
        };
        let reports = Arc::new(Reports::new(below.clone(), vms.clone()));
        let history = options.history.as_deref();
        let sampling = Sampling::new(below.clone(), vms.clone(), reports.clone(), history);
        let sampling = Arc::new(sampling);
        let views = Views::new(below.clone(), reports.clone(), sampling.clone());
        Self {
            vms,
            snapshots,
            boots,
            definitions: Arc::new(definitions),
            libvirt: Arc::new(libvirt),
            pve: Arc::new(pve),
            reports,
            sampling,
            views: Arc::new(views),
            began: Instant::now(),
            below,
        }
    }

    /// Resumes leases and lending of the earlier daemon on a thread, and removes unused segments
    /// after the VMs are adopted. This needs a thread, because programs and other hosts may answer
    /// late.
    fn begin_settling(&self) -> std::io::Result<()> {
        let (volumes, lending) = (self.below.swap_volumes.clone(), self.below.lending.clone());
        let segments = self.below.segments.clone();
        let arrivals = self.below.registry.arrivals().clone();
        let unsettled = arrivals.unsettled();
        let snapshots = self.snapshots.clone();
        let work = move || {
            volumes.resume();
            lending.resume();
            drop(unsettled);
            arrivals.wait_for_adoption();
            segments.clean_up();
            if let Err(error) = snapshots.begin_removing_forks() {
                warn!(%error, "cannot start the thread that removes unused layers of forks; remove them with 'memfold snapshot remove', or restart the daemon");
            }
        };
        threads::begin("settle", work)
    }

    /// Starts the background threads, which run until the daemon ends.
    fn begin_watching(&self, borrow: BorrowWhen) -> std::io::Result<()> {
        self.below.brake.begin()?;
        guest_pressure::begin(&self.below)?;
        self.below.rightsizing.begin()?;
        self.below.swap_disks.begin_borrowing_again()?;
        vm_logs::begin(&self.below.registry)?;
        if borrow == BorrowWhen::Auto {
            self.below.swap_disks.begin_borrowing_by_itself()?;
        }
        self.libvirt.begin()?;
        self.pve.begin()
    }

    /// Returns version, PID and state directory of this daemon.
    #[must_use]
    pub fn version(&self) -> VersionInfo {
        VersionInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: rustix::process::getpid().as_raw_nonzero().get(),
            state: self.below.registry.state().to_owned(),
        }
    }

    /// Returns whether the daemon's services work. Waits until the table of VMs can be locked, and
    /// until the fold engine answers or is known to wait for a VM. Returns `false` if the engine
    /// has ended.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        drop(self.below.registry.names());
        self.below.folding.reports_cpu().is_ok()
    }

    /// Waits at the daemon's start, for two seconds at most, until the VMs whose QEMU answers are
    /// adopted. A request right after a restart then finds them.
    pub fn settle_first(&self) {
        let arrivals = self.below.registry.arrivals();
        arrivals.settle_first(self.began.elapsed());
    }

    /// Refuses to start VMs from now on, and waits until VMs that are being started run or have
    /// failed. Afterwards no VM is added to the list of VMs.
    pub fn close(&self) {
        self.below.registry.close();
    }

    /// Ends the fold engine, KSM steering, lending, and the threads that watch loans of memory to
    /// swap disks and volumes. VMs keep running.
    pub fn shut_down(&self) {
        self.sampling.end();
        self.below.ksm.end();
        self.below.lending.shut_down();
        self.below.swap_disks.stop();
        self.below.swap_volumes.stop();
        // The engine may have ended already.
        let _ = self.below.folding.tell(Command::Stop);
    }

    /// Returns the service that decides how much memory each VM should have.
    #[must_use]
    pub fn rightsizing(&self) -> &Arc<Rightsizing> {
        &self.below.rightsizing
    }

    /// Returns the service that reads the fold engine's figures and sets its limits.
    pub fn folding(&self) -> &Arc<Folding> {
        &self.below.folding
    }

    /// Returns the service that steers KSM, the kernel's own page merging.
    pub fn ksm(&self) -> &Arc<KsmSteering> {
        &self.below.ksm
    }

    /// Returns the service that measures and limits the copy-on-write debt.
    pub fn brake(&self) -> &Arc<DebtBrake> {
        &self.below.brake
    }

    /// Returns the service that takes and renews leases at the lease registry. A lease records
    /// which host lends memory to which swap disk.
    pub fn leases(&self) -> &Arc<Leases> {
        &self.below.leases
    }

    /// Returns the service that lends this host's memory.
    pub fn lending(&self) -> &Arc<Lending> {
        &self.below.lending
    }

    /// Returns the service that moves VMs' swap disks to lent RAM and back.
    pub fn swap_disks(&self) -> &Arc<SwapDisks> {
        &self.below.swap_disks
    }

    /// Returns the service that moves LVM volumes to lent RAM and back.
    pub fn swap_volumes(&self) -> &Arc<SwapVolumes> {
        &self.below.swap_volumes
    }

    /// Returns the service for segments (file system images whose files VMs execute in place).
    pub fn segments(&self) -> &Arc<Segments> {
        &self.below.segments
    }

    /// Returns the service that starts, attaches, adopts and stops VMs.
    pub fn vms(&self) -> &Arc<Vms> {
        &self.vms
    }

    /// Returns the service that saves and restores VMs.
    pub fn snapshots(&self) -> &Arc<Snapshots> {
        &self.snapshots
    }

    /// Returns the service that runs and reboots VMs, with boot snapshots.
    pub fn boots(&self) -> &Arc<Boots> {
        &self.boots
    }

    /// Returns the service for definitions of VMs.
    pub fn definitions(&self) -> &Arc<Definitions> {
        &self.definitions
    }

    /// Returns the service that adopts libvirt's domains.
    pub fn libvirt(&self) -> &Arc<LibvirtDomains> {
        &self.libvirt
    }

    /// Returns the service that makes the ledger's report, the list of leases, and the figures for
    /// metrics scrapes.
    pub fn reports(&self) -> &Arc<Reports> {
        &self.reports
    }

    /// Returns the service that samples the ledger, and makes history and events from the samples.
    pub fn sampling(&self) -> &Arc<Sampling> {
        &self.sampling
    }

    /// Returns the service that makes maps and tables of memory for user interfaces.
    pub fn views(&self) -> &Arc<Views> {
        &self.views
    }
}
