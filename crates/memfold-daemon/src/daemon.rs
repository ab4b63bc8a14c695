//! The daemon: owns the services, wires them together, and begins what goes on by itself.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use memfold_api::VersionInfo;
use memfold_fold::Command;
use memfold_segment as segment;

use crate::boots::Boots;
use crate::debt::DebtWatch;
use crate::debt::brake::DebtBrake;
use crate::error::DaemonError;
use crate::folding::Folding;
use crate::ksm_steering::{self, KsmSteering};
use crate::leases::Leases;
use crate::lending::Lending;
use crate::libvirt::LibvirtDomains;
use crate::options::{BorrowWhen, DaemonOptions};
use crate::reports::Reports;
use crate::sampling::Sampling;
use crate::segments::Segments;
use crate::snapshot_directory::SnapshotDirectory;
use crate::snapshot_locks::SnapshotLocks;
use crate::snapshots::{Snapshots, clear_trials};
use crate::swap_disks::SwapDisks;
use crate::swap_volumes::SwapVolumes;
use crate::views::Views;
use crate::vm_registry::VmRegistry;
use crate::vms::Vms;
use crate::{guest_pressure, reports, sampling, snapshots, vm_logs, vms};

/// The daemon.
#[derive(Debug)]
pub struct Daemon {
    folding: Arc<Folding>,
    ksm: Arc<KsmSteering>,
    brake: Arc<DebtBrake>,
    leases: Arc<Leases>,
    lending: Arc<Lending>,
    swap_disks: Arc<SwapDisks>,
    swap_volumes: Arc<SwapVolumes>,
    segments: Arc<Segments>,
    vms: Arc<Vms>,
    snapshots: Arc<Snapshots>,
    boots: Arc<Boots>,
    libvirt: Arc<LibvirtDomains>,
    reports: Arc<Reports>,
    sampling: Arc<Sampling>,
    views: Arc<Views>,
    /// Dropped last: with it the state directory is another daemon's to use.
    registry: Arc<VmRegistry>,
}

impl Daemon {
    /// Starts the engine and takes over the VMs that run under the state directory.
    pub fn start(options: &DaemonOptions) -> Result<Arc<Self>, DaemonError> {
        let state = &options.state;
        let files = |source| DaemonError::State {
            path: state.clone(),
            source,
        };
        let registry = Arc::new(VmRegistry::open(state)?);
        ksm_steering::restore();
        let folding = Folding::start(options.settings.clone(), registry.clone());
        let daemon = Arc::new(Self::wire(
            options,
            registry,
            Arc::new(folding.map_err(files)?),
        )?);
        if options.paused {
            daemon.folding.tell(Command::SetPaused(true))?;
        }
        clear_trials(state);
        daemon.vms.begin_adoption().map_err(files)?;
        daemon.begin_settling().map_err(files)?;
        daemon.sampling.begin()?;
        daemon.begin_watching(options.borrow).map_err(files)?;
        Ok(daemon)
    }

    /// Each service over those that it knows.
    fn wire(
        options: &DaemonOptions,
        registry: Arc<VmRegistry>,
        folding: Arc<Folding>,
    ) -> Result<Self, DaemonError> {
        let state = &options.state;
        let directory = Arc::new(SnapshotDirectory::open(&options.shelf));
        let locks = Arc::new(SnapshotLocks::default());
        let debt = Arc::new(DebtWatch::new(options.brake));
        let ksm = Arc::new(KsmSteering::new(registry.clone(), debt.clone()));
        let needed = Arc::new(AtomicU64::default());
        let brake = Arc::new(DebtBrake::new(
            registry.clone(),
            folding.clone(),
            debt.clone(),
            ksm.clone(),
            needed.clone(),
        ));
        let leases = Arc::new(Leases::open(options)?);
        let lending = Lending::new(leases.clone(), state, options.lend.clone(), needed);
        let lending = Arc::new(lending);
        let swap_disks = Arc::new(SwapDisks::new(registry.clone(), leases.clone()));
        let swap_volumes = Arc::new(SwapVolumes::new(leases.clone(), state));
        let segments = Arc::new(Segments::new(
            registry.clone(),
            folding.clone(),
            (
                segment::Shelf::open(&options.segments, &state.join("pinned")),
                directory.clone(),
            ),
            locks.clone(),
        ));
        let below = vms::Below {
            registry: registry.clone(),
            folding: folding.clone(),
            ksm: ksm.clone(),
            segments: segments.clone(),
            swap_disks: swap_disks.clone(),
            snapshots: directory.clone(),
        };
        let (include, exclude) = (options.include.clone(), options.exclude.clone());
        let vms = Arc::new(Vms::new(below, include, exclude));
        let snapshots = Arc::new(Snapshots::new(snapshots::Below {
            registry: registry.clone(),
            folding: folding.clone(),
            ksm: ksm.clone(),
            debt: debt.clone(),
            segments: segments.clone(),
            vms: vms.clone(),
            directory: directory.clone(),
            locks: locks.clone(),
        }));
        let boots = Arc::new(Boots::new(
            (registry.clone(), debt),
            (vms.clone(), snapshots.clone()),
            (directory.clone(), locks),
        ));
        let libvirt = LibvirtDomains::new(registry.clone(), vms.clone(), options.libvirt.clone());
        let reports = Arc::new(Reports::new(reports::Below {
            registry: registry.clone(),
            folding: folding.clone(),
            brake: brake.clone(),
            ksm: ksm.clone(),
            leases: leases.clone(),
            lending: lending.clone(),
            swap_disks: swap_disks.clone(),
            swap_volumes: swap_volumes.clone(),
            segments: segments.clone(),
            snapshots: directory.clone(),
            vms: vms.clone(),
        }));
        let below = sampling::Below {
            registry: registry.clone(),
            vms: vms.clone(),
            leases: leases.clone(),
            lending: lending.clone(),
            snapshots: directory,
            reports: reports.clone(),
        };
        let sampling = Arc::new(Sampling::new(below, options.history.as_deref()));
        let views = Arc::new(Views::new(
            (registry.clone(), folding.clone()),
            (brake.clone(), ksm.clone()),
            (reports.clone(), sampling.clone()),
        ));
        Ok(Self {
            folding,
            ksm,
            brake,
            leases,
            lending,
            swap_disks,
            swap_volumes,
            segments,
            vms,
            snapshots,
            boots,
            libvirt: Arc::new(libvirt),
            reports,
            sampling,
            views,
            registry,
        })
    }

    /// Takes up what the daemon before has left, once the VMs are known that are there: programs and other hosts may keep it waiting.
    fn begin_settling(&self) -> std::io::Result<()> {
        let (volumes, lending) = (self.swap_volumes.clone(), self.lending.clone());
        let (segments, arrivals) = (self.segments.clone(), self.registry.arrivals().clone());
        let unsettled = arrivals.unsettled();
        let work = move || {
            volumes.resume();
            lending.resume();
            drop(unsettled);
            arrivals.wait_for_adoption();
            segments.clean_up();
        };
        let thread = std::thread::Builder::new().name("settle".into());
        thread.spawn(work).map(drop)
    }

    /// Begins what goes on by itself until the daemon ends.
    fn begin_watching(&self, borrow: BorrowWhen) -> std::io::Result<()> {
        self.brake.begin()?;
        guest_pressure::begin(&self.registry, &self.lending)?;
        self.swap_disks.begin_borrowing_again()?;
        vm_logs::begin(&self.registry)?;
        if borrow == BorrowWhen::Auto {
            self.swap_disks.begin_borrowing_by_itself()?;
        }
        self.libvirt.begin()
    }

    /// What answers.
    #[must_use]
    pub fn version(&self) -> VersionInfo {
        VersionInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: rustix::process::getpid().as_raw_nonzero().get(),
            state: self.registry.state().to_owned(),
        }
    }

    /// Whether the daemon works: waits until nobody holds the table of VMs and the engine answers, or is known to wait for a VM. `false`: the
    /// engine has ended.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        drop(self.registry.names());
        self.folding.reports_cpu().is_ok()
    }

    /// Waits at the daemon's start, for two seconds at most, until the VMs are taken over whose QEMU answers: who asks right after a restart
    /// finds them.
    pub fn settle_first(&self) {
        self.registry.arrivals().settle_first();
    }

    /// Starts no more VMs, and waits for those that are being started: from then on the list is whole.
    pub fn close(&self) {
        self.registry.close();
    }

    /// Ends the engine and steering KSM. VMs go on.
    pub fn shut_down(&self) {
        self.sampling.end();
        self.ksm.end();
        self.lending.shut_down();
        self.swap_disks.stop();
        self.swap_volumes.stop();
        // It may have ended already.
        let _ = self.folding.tell(Command::Stop);
    }

    /// Folding, and its limits.
    pub const fn folding(&self) -> &Arc<Folding> {
        &self.folding
    }

    /// The kernel's own merging.
    pub const fn ksm(&self) -> &Arc<KsmSteering> {
        &self.ksm
    }

    /// What guests could call in, and the brake.
    pub const fn brake(&self) -> &Arc<DebtBrake> {
        &self.brake
    }

    /// The registry of leases.
    pub const fn leases(&self) -> &Arc<Leases> {
        &self.leases
    }

    /// What this host lends.
    pub const fn lending(&self) -> &Arc<Lending> {
        &self.lending
    }

    /// VMs' swap disks on lent RAM.
    pub const fn swap_disks(&self) -> &Arc<SwapDisks> {
        &self.swap_disks
    }

    /// Volumes of LVM on lent RAM.
    pub const fn swap_volumes(&self) -> &Arc<SwapVolumes> {
        &self.swap_volumes
    }

    /// Files that VMs execute in place.
    pub const fn segments(&self) -> &Arc<Segments> {
        &self.segments
    }

    /// VMs, and what is done with one.
    pub const fn vms(&self) -> &Arc<Vms> {
        &self.vms
    }

    /// VMs that are saved and restored.
    pub const fn snapshots(&self) -> &Arc<Snapshots> {
        &self.snapshots
    }

    /// VMs that boot and reboot.
    pub const fn boots(&self) -> &Arc<Boots> {
        &self.boots
    }

    /// Domains of libvirt.
    pub const fn libvirt(&self) -> &Arc<LibvirtDomains> {
        &self.libvirt
    }

    /// The ledger, leases, and figures for scrapes.
    pub const fn reports(&self) -> &Arc<Reports> {
        &self.reports
    }

    /// Samples, history and events.
    pub const fn sampling(&self) -> &Arc<Sampling> {
        &self.sampling
    }

    /// What is shown of memory.
    pub const fn views(&self) -> &Arc<Views> {
        &self.views
    }
}
