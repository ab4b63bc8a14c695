//! Makes reports from the figures of several services: the ledger, the list of leases, and the
//! figures for metrics scrapes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use memfold_api::{Borrowed, FullReport, LeaseReport};
use memfold_fold::DomainStats;
use memfold_ledger::{self as ledger, ImageAccount, StoreAccount};
use memfold_lend::blast::blast;
use memfold_lend::{Picture, RegistryError};
use memfold_store::StoreIdentity;
use memfold_units::{ByteSize, PageCount};

use crate::error::DaemonError;
use crate::figures::{CachedFigures, Figures, OnShelf};
use crate::mechanisms::Mechanisms;
use crate::single_flight::SingleFlight;
use crate::threads::{on_all_cores, thread_cpu};
use crate::vms::Vms;

/// Service that makes the ledger's report, the report of leases, and the figures for metrics
/// scrapes.
#[derive(Debug)]
pub struct Reports {
    below: Arc<Mechanisms>,
    vms: Arc<Vms>,
    joint: SingleFlight<Arc<FullReport>>,
    /// Cached figures of the last scrape.
    kept: CachedFigures,
}

impl Reports {
    pub(crate) fn new(below: Arc<Mechanisms>, vms: Arc<Vms>) -> Self {
        Self {
            below,
            vms,
            joint: SingleFlight::default(),
            kept: CachedFigures::default(),
        }
    }

    /// Makes the ledger's report now. Reads the page maps of all VMs.
    pub fn report(&self) -> Result<FullReport, DaemonError> {
        Ok(self.report_and_cpu()?.0)
    }

    /// Makes the ledger's report. Also returns the CPU time of its worker threads: not the
    /// caller's, and not the engine's.
    pub(crate) fn report_and_cpu(&self) -> Result<(FullReport, Duration), DaemonError> {
        let (fold, owed) = self.below.folding.look()?;
        let store = |d: &DomainStats| StoreAccount {
            domain: d.domain.clone(),
            identity: d.store(),
            allocated_bytes: ByteSize(d.store_bytes),
        };
        let stores: Vec<StoreAccount> = fold.domains.iter().map(store).collect();
        let identities: Vec<StoreIdentity> = stores.iter().map(|s| s.identity).collect();
        let machines = self.below.registry.machines();
        // The kernel walks the page tables of each VM, which takes some milliseconds.
        let (vms, cpu) = on_all_cores(&machines, |machine| machine.account(&identities));
        // A VM that ends while the report is made is left out.
        let vms: Vec<_> = vms.into_iter().flatten().collect();
        let relays = self.below.swap_disks.relays();
        let own = ledger::take::own(ByteSize(fold.own_bytes), &identities, &relays)?;
        let zero: u64 = fold.vms.iter().map(|vm| vm.zero_saved_pages).sum();
        let images = self.below.snapshots.laid_out();
        let images = images
            .iter()
            .filter_map(|image| ImageAccount::of(image).ok());
        let mut host = ledger::take::host(&ledger::take::Parts {
            vms: &vms,
            stores: &stores,
            images: &images.collect::<Vec<_>>(),
            own,
            relays: &relays,
            zero_dropped_bytes: PageCount(zero).bytes(),
        })?;
        let lending = self.below.lending.status();
        host.lent_bytes = ByteSize(lending.map_or(0, |status| status.lent_bytes));
        let mut ledger = ledger::Report::new(host, vms);
        ledger.debt = Some(self.below.brake.debt_of(owed)?);
        Ok((FullReport { ledger, fold }, cpu))
    }

    /// Makes the ledger's report, for API requests. Concurrent requests share one report.
    pub fn joint_report(&self) -> Result<Arc<FullReport>, DaemonError> {
        self.joint.get(|| self.report().map(Arc::new))
    }

    /// Returns the swap disks and volumes of this host on lent RAM.
    pub(crate) fn borrowed(&self) -> Vec<Borrowed> {
        let mut all = self.below.swap_disks.borrowed();
        all.extend(self.below.swap_volumes.borrowed());
        all
    }

    /// Reports all leases and lenders, and what this host itself lends and borrows.
    pub fn leases(&self) -> Result<LeaseReport, DaemonError> {
        // While the registry does not answer, the part about this host is what users need most.
        let (picture, registry_away) = match self.below.leases.registry.picture() {
            Ok(picture) => (picture, None),
            Err(away @ RegistryError::Unusable { .. }) => {
                (Picture::default(), Some(away.to_string()))
            }
            Err(error) => return Err(error.into()),
        };
        let (distrusted, lies) = self.below.leases.lies();
        let ours = self.below.swap_disks.without_copy();
        let without_copy = |host: &str, vm: &str| {
            host == self.below.leases.host && ours.iter().any(|our| our == vm)
        };
        let lending = self.below.lending.status();
        let lends = lending.as_ref().filter(|status| !status.is_ending);
        Ok(LeaseReport {
            host: self.below.leases.host.clone(),
            registry: self.below.leases.place.clone(),
            registry_away,
            lends_as: lends.and_then(|_| self.below.lending.to_lend()),
            lending,
            borrowed: self.borrowed(),
            again: self.below.swap_disks.borrow_again_later(),
            blast: blast(&picture, &without_copy),
            lenders: picture.lenders,
            leases: picture.leases,
            distrusted,
            lies,
        })
    }

    /// Returns the figures for a metrics scrape, possibly cached; [`Figures::taken`] is the time at
    /// which they were read.
    pub fn figures(&self) -> Result<Arc<Figures>, DaemonError> {
        self.kept.get(|| self.take_figures())
    }

    fn take_figures(&self) -> Result<Figures, DaemonError> {
        let taken = Instant::now();
        let engine_before = self.below.folding.reports_cpu()?;
        let thread_before = thread_cpu();
        let (report, others) = self.report_and_cpu()?;
        // This also counts reports that the engine made for other callers meanwhile.
        let engine = Duration::from_secs_f64(report.fold.report_cpu_s.max(0.0));
        let engine = engine.saturating_sub(engine_before);
        let lies = self.below.leases.lies();
        let mut figures = Figures {
            taken,
            report,
            vms: self.vms.list(),
            steers_ksm: self.below.ksm.is_steered(),
            snapshots: OnShelf::of_snapshots(&self.below.snapshots),
            segments: OnShelf::of_segments(&self.below.segments.shelf),
            host: self.below.leases.host.clone(),
            lending: self.below.lending.status(),
            borrowed: self.borrowed(),
            leases: self.below.leases.registry.picture().ok().map(|p| p.leases),
            distrusted: lies.0.len() as u64,
            lies: lies.1,
            rightsizing: self.below.rightsizing.report(0),
            took: Duration::ZERO,
            cpu: Duration::ZERO,
        };
        figures.cpu = engine + others + thread_cpu().saturating_sub(thread_before);
        figures.took = taken.elapsed();
        Ok(figures)
    }
}
