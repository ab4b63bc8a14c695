//! Reports that combine several services: the ledger, the leases, and figures for metrics scrapes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{Borrowed, FullReport, LeaseReport};
use memfold_ledger::{self as ledger, StoreAccount};
use memfold_lend::blast::blast;
use memfold_lend::{Picture, RegistryError};
use memfold_store::StoreIdentity;
use memfold_units::{ByteSize, PageCount};

use crate::debt::brake::DebtBrake;
use crate::error::DaemonError;
use crate::figures::{CachedFigures, Figures};
use crate::folding::Folding;
use crate::ksm_steering::KsmSteering;
use crate::leases::Leases;
use crate::lending::Lending;
use crate::mechanisms::Mechanisms;
use crate::segments::Segments;
use crate::single_flight::SingleFlight;
use crate::snapshot_directory::SnapshotDirectory;
use crate::swap_disks::SwapDisks;
use crate::swap_volumes::SwapVolumes;
use crate::thread_cpu::thread_cpu;
use crate::vm_registry::VmRegistry;
use crate::vms::Vms;

/// Makes reports, and caches the figures for scrapes.
#[derive(Debug)]
pub struct Reports {
    registry: Arc<VmRegistry>,
    folding: Arc<Folding>,
    brake: Arc<DebtBrake>,
    ksm: Arc<KsmSteering>,
    leases: Arc<Leases>,
    lending: Arc<Lending>,
    swap_disks: Arc<SwapDisks>,
    swap_volumes: Arc<SwapVolumes>,
    segments: Arc<Segments>,
    snapshots: Arc<SnapshotDirectory>,
    vms: Arc<Vms>,
    joint: SingleFlight<Arc<FullReport>>,
    /// Cached figures of the last scrape.
    kept: CachedFigures,
}

impl Reports {
    pub(crate) fn new(below: &Mechanisms, vms: Arc<Vms>) -> Self {
        Self {
            registry: below.registry.clone(),
            folding: below.folding.clone(),
            brake: below.brake.clone(),
            ksm: below.ksm.clone(),
            leases: below.leases.clone(),
            lending: below.lending.clone(),
            swap_disks: below.swap_disks.clone(),
            swap_volumes: below.swap_volumes.clone(),
            segments: below.segments.clone(),
            snapshots: below.snapshots.clone(),
            vms,
            joint: SingleFlight::default(),
            kept: CachedFigures::default(),
        }
    }

    /// Makes the ledger's report now. Reads the page maps of all VMs.
    pub fn report(&self) -> Result<FullReport, DaemonError> {
        let (fold, owed) = self.folding.look()?;
        let stores: Vec<StoreAccount> = fold
            .domains
            .iter()
            .map(|d| StoreAccount {
                domain: d.domain.clone(),
                identity: d.store(),
                allocated_bytes: ByteSize(d.store_bytes),
            })
            .collect();
        let identities: Vec<StoreIdentity> = stores.iter().map(|s| s.identity).collect();
        let machines = self.registry.machines();
        // A VM that ends while the report is made is left out.
        let vms: Vec<_> = machines
            .iter()
            .filter_map(|m| m.account(&identities))
            .collect();
        let own = ledger::take::own(
            ByteSize(fold.own_bytes),
            &identities,
            &self.swap_disks.relays(),
        )?;
        let zero: u64 = fold.vms.iter().map(|vm| vm.zero_saved_pages).sum();
        let mut host = ledger::take::host(&vms, &stores, own, PageCount(zero).bytes())?;
        host.images_bytes = self.snapshots.laid_out_bytes();
        host.lent_bytes = ByteSize(self.lending.status().map_or(0, |status| status.lent_bytes));
        let mut ledger = ledger::Report::new(host, vms);
        ledger.debt = Some(self.brake.debt_of(owed)?);
        Ok(FullReport { ledger, fold })
    }

    /// Makes the ledger's report, for API requests. Concurrent requests share one report.
    pub fn joint_report(&self) -> Result<Arc<FullReport>, DaemonError> {
        self.joint.get(|| self.report().map(Arc::new))
    }

    /// Returns the swap disks and volumes of this host on lent RAM.
    pub(crate) fn borrowed(&self) -> Vec<Borrowed> {
        let mut all = self.swap_disks.borrowed();
        all.extend(self.swap_volumes.borrowed());
        all
    }

    /// Reports all leases and lenders, and this host's part in them.
    pub fn leases(&self) -> Result<LeaseReport, DaemonError> {
        // While the registry does not answer, the part about this host is what users need most.
        let (picture, registry_away) = match self.leases.picture() {
            Ok(picture) => (picture, None),
            Err(away @ RegistryError::Unusable { .. }) => {
                (Picture::default(), Some(away.to_string()))
            }
            Err(error) => return Err(error.into()),
        };
        let (distrusted, lies) = self.leases.lies();
        let ours = self.swap_disks.without_copy();
        let without_copy =
            |host: &str, vm: &str| host == self.leases.host() && ours.iter().any(|our| our == vm);
        let lending = self.lending.status();
        let lends = lending.as_ref().filter(|status| !status.is_ending);
        Ok(LeaseReport {
            host: self.leases.host().to_owned(),
            registry: self.leases.place().to_owned(),
            registry_away,
            lends_as: lends.and_then(|_| self.lending.to_lend()),
            lending,
            borrowed: self.borrowed(),
            again: self.swap_disks.borrow_again_later(),
            blast: blast(&picture, &without_copy),
            lenders: picture.lenders,
            leases: picture.leases,
            distrusted,
            lies,
        })
    }

    /// Returns the figures for a metrics scrape, possibly cached; [`Figures::taken`] is their time.
    pub fn figures(&self) -> Result<Arc<Figures>, DaemonError> {
        self.kept.get(|| self.take_figures())
    }

    fn take_figures(&self) -> Result<Figures, DaemonError> {
        let taken = Instant::now();
        let engine_before = self.folding.reports_cpu()?;
        let thread_before = thread_cpu();
        let report = self.report()?;
        // This also counts reports that the engine made for other callers meanwhile.
        let engine = Duration::from_secs_f64(report.fold.report_cpu_s.max(0.0));
        let engine = engine.saturating_sub(engine_before);
        let lies = self.leases.lies();
        let mut figures = Figures {
            taken,
            report,
            vms: self.vms.list(),
            steers_ksm: self.ksm.is_steered(),
            snapshots: self.snapshots.in_short(),
            segments: self.segments.in_short(),
            host: self.leases.host().to_owned(),
            lending: self.lending.status(),
            borrowed: self.borrowed(),
            leases: self.leases.picture().ok().map(|p| p.leases),
            distrusted: lies.0.len() as u64,
            lies: lies.1,
            took: Duration::ZERO,
            cpu: Duration::ZERO,
        };
        figures.cpu = engine + thread_cpu().saturating_sub(thread_before);
        figures.took = taken.elapsed();
        Ok(figures)
    }
}
