//! Creates and connects the daemon's basic services, such as folding, lending and segments. The
//! services that start, stop, save and restore VMs use them.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use memfold_segment::Shelf;
use memfold_snapshot::Shelf as SnapshotShelf;
use parking_lot::RwLock;

use crate::debt::DebtWatch;
use crate::debt::brake::DebtBrake;
use crate::definition_files::DefinitionFiles;
use crate::error::DaemonError;
use crate::folding::Folding;
use crate::ksm_steering::KsmSteering;
use crate::leases::Leases;
use crate::lending::Lending;
use crate::options::DaemonOptions;
use crate::rightsizing::Rightsizing;
use crate::segments::Segments;
use crate::size_records::SizeRecords;
use crate::snapshot_locks::SnapshotLocks;
use crate::swap_disks::SwapDisks;
use crate::swap_volumes::SwapVolumes;
use crate::vm_registry::VmRegistry;

/// Services that all VM services use.
#[derive(Debug)]
pub(crate) struct Mechanisms {
    pub folding: Arc<Folding>,
    pub debt: Arc<DebtWatch>,
    pub ksm: Arc<KsmSteering>,
    pub brake: Arc<DebtBrake>,
    pub leases: Arc<Leases>,
    pub lending: Arc<Lending>,
    pub rightsizing: Arc<Rightsizing>,
    pub swap_disks: Arc<SwapDisks>,
    pub swap_volumes: Arc<SwapVolumes>,
    pub segments: Arc<Segments>,
    pub definitions: Arc<DefinitionFiles>,
    pub snapshots: Arc<SnapshotShelf>,
    pub snapshot_locks: Arc<SnapshotLocks>,
    /// Table of VMs, which locks the state directory. This field is dropped last: another daemon
    /// can use the state directory afterwards.
    pub registry: Arc<VmRegistry>,
}

impl Mechanisms {
    /// Creates the services, and passes to each the services that it uses.
    pub fn wire(
        options: &DaemonOptions,
        registry: Arc<VmRegistry>,
        folding: Arc<Folding>,
    ) -> Result<Self, DaemonError> {
        let state = &options.state;
        let snapshots = SnapshotShelf::open(&options.shelf);
        let snapshots = Arc::new(snapshots.with_keys(options.snapshot_keys.clone()));
        let snapshot_locks = Arc::new(SnapshotLocks::default());
        let debt = Arc::new(DebtWatch::new(options.brake));
        let ksm = Arc::new(KsmSteering::new(registry.clone(), debt.clone()));
        let needed = Arc::new(AtomicU64::default());
        let records = Arc::new(SizeRecords::open(state));
        let brake = DebtBrake {
            registry: registry.clone(),
            folding: folding.clone(),
            debt: debt.clone(),
            ksm: ksm.clone(),
            records: records.clone(),
            needed: needed.clone(),
        };
        let leases = Arc::new(Leases::open(options)?);
        let lending = Lending::new(leases.clone(), state, options.lend.clone(), needed);
        let lending = Arc::new(lending);
        let rightsizing = Rightsizing::new(
            registry.clone(),
            debt.clone(),
            lending.clone(),
            records,
            options.rightsize,
        );
        let swap_disks = SwapDisks::new(registry.clone(), leases.clone());
        let swap_volumes = SwapVolumes::new(leases.clone(), state);
        let definitions = Arc::new(DefinitionFiles::new(options.definitions.clone()));
        let segments = Segments {
            registry: registry.clone(),
            folding: folding.clone(),
            shelf: Shelf::open(&options.segments, &state.join("pinned")),
            snapshots: snapshots.clone(),
            definitions: definitions.clone(),
            locks: snapshot_locks.clone(),
            removing: RwLock::default(),
        };
        Ok(Self {
            folding,
            debt,
            ksm,
            brake: Arc::new(brake),
            leases,
            lending,
            rightsizing: Arc::new(rightsizing),
            swap_disks: Arc::new(swap_disks),
            swap_volumes: Arc::new(swap_volumes),
            segments: Arc::new(segments),
            definitions,
            snapshots,
            snapshot_locks,
            registry,
        })
    }
}
