//! The daemon library: VMs, fold engine, ledger, lending and snapshots in one process.
//!
//! [`Daemon`] owns the services and connects them. Each service has its own state, and knows only
//! the services above it in this list:
//!
//! ```text
//!   VmRegistry       running VMs (Machine), VMs that are being started or adopted, and their names
//!   Folding          the fold engine's thread
//!   DebtWatch        memory that the host would need if guests wrote to all shared pages; decides whether a VM may start
//!   KsmSteering      KSM, the kernel's own page merging
//!   DebtBrake        a thread: measures the debt, stops folding and KSM, asks guests to drop page cache
//!   Leases           the lease registry: which host lends to which VM or volume
//!   Lending          lending of this host's memory
//!   Rightsizing      a thread: how much memory each VM should have; trims page caches and moves balloons
//!   SwapDisks        VMs' swap disks on lent RAM: a thread for each
//!   SwapVolumes      LVM volumes on lent RAM: a thread for each
//!   Segments         file system images whose files VMs execute in place
//!   Vms              starts a QEMU process, attaches to it, adopts it, stops it: a watch thread for each VM
//!   Snapshots        saves and restores VMs
//!   Boots            requests to run or reboot a VM: brake, segments, boot snapshot
//!   Definitions      definitions of VMs; a thread starts VMs after a boot of the host
//!   LibvirtDomains   a thread: adopts libvirt's domains, and enables them by their tags
//!   PveVms           a thread: attaches to VMs of Proxmox VE
//!   Reports          the ledger, the list of leases, figures for metrics scrapes
//!   Sampling         a thread: samples, which become history and events
//!   Views            views of memory for user interfaces
//! ```
//! The daemon may be killed at any instant. A new daemon finds everything again: the VMs in the
//! state directory, their memory mappings and the page store in the kernel.

mod advice;
mod arrivals;
mod backoff;
mod boot_snapshot;
mod boot_work;
mod boots;
mod daemon;
mod debt;
mod definition_files;
mod definitions;
mod error;
mod events;
mod figures;
mod folding;
mod guest_pressure;
mod interrupted_save;
mod json_file;
mod ksm_steering;
mod leases;
mod lending;
mod libvirt;
mod locks;
mod machine;
mod mechanisms;
mod move_progress;
mod options;
mod pve;
mod reports;
mod rightsizing;
mod run_state;
mod sampling;
mod segments;
mod single_flight;
mod size_records;
mod snapshot_locks;
mod snapshots;
mod swap_disks;
mod swap_volumes;
mod threads;
mod views;
mod vm_logs;
mod vm_registry;
mod vms;

pub use boots::Boots;
pub use daemon::Daemon;
pub use debt::brake::DebtBrake;
pub use definitions::Definitions;
pub use error::DaemonError;
pub use figures::{Figures, LEAST_AGE, OnShelf};
pub use folding::Folding;
pub use ksm_steering::KsmSteering;
pub use leases::Leases;
pub use lending::Lending;
pub use libvirt::LibvirtDomains;
pub use memfold_host::chain;
pub use options::{BorrowWhen, DaemonOptions};
pub use reports::Reports;
pub use rightsizing::{EVENTS as RIGHTSIZE_EVENTS, Rightsizing};
pub use sampling::{Live, Sampling};
pub use segments::Segments;
pub use snapshots::Snapshots;
pub use swap_disks::SwapDisks;
pub use swap_volumes::SwapVolumes;
pub use views::{EstimateOrder, PlaceOrder, SwapUse, Views};
pub use vms::{Console, Vms};
