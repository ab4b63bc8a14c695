//! The daemon library: VMs, fold engine, ledger, lending and snapshots in one process.
//!
//! [`Daemon`] owns the services and connects them. Each service has its own state, and knows only
//! the services above it in this list:
//!
//! ```text
//!   VmRegistry       which VMs run (Machine), which are on their way, and the rights that belong to names
//!   Folding          the fold engine's thread
//!   DebtWatch        what guests could call in, and whether a VM may be started
//!   KsmSteering      the kernel's own merging
//!   DebtBrake        a thread: watches the debt, holds folding and KSM, asks guests for page cache
//!   Leases           the registry of who lends what to whom
//!   Lending          what this host lends
//!   SwapDisks        VMs' swap disks on lent RAM: a thread for each
//!   SwapVolumes      volumes of LVM on lent RAM: a thread for each
//!   Segments         files that VMs execute in place
//!   Vms              VMs that are started, attached to, taken over, stopped: a watch thread for each
//!   Snapshots        VMs that are saved and restored
//!   Boots            VMs that boot and reboot
//!   LibvirtDomains   a thread: takes domains of libvirt on
//!   Reports          the ledger, leases, figures for scrapes
//!   Sampling         a thread: samples, of which history and events are made
//!   Views            what is shown of memory
//! ```
//! The daemon holds no state that a new daemon could not find: VMs are in the state directory,
//! mappings and the page store in the kernel. It may be killed at any instant.

mod arrivals;
mod backoff;
mod boot_snapshot;
mod boots;
mod daemon;
mod debt;
mod error;
mod events;
mod figures;
mod folding;
mod guest;
mod guest_pressure;
mod interrupted_save;
mod json_file;
mod ksm_steering;
mod lease_times;
mod leases;
mod lending;
mod libvirt;
mod locks;
mod machine;
mod mechanisms;
mod on_agent_ready;
mod on_shelf;
mod options;
mod reports;
mod run_state;
mod sampling;
mod segments;
mod semaphore;
mod single_flight;
mod snapshot_directory;
mod snapshot_locks;
mod snapshots;
mod swap_disks;
mod swap_volumes;
mod thread_cpu;
mod views;
mod vm_logs;
mod vm_registry;
mod vms;

pub use boots::Boots;
pub use daemon::Daemon;
pub use debt::brake::DebtBrake;
pub use error::DaemonError;
pub use figures::{Figures, LEAST_AGE};
pub use folding::Folding;
pub use ksm_steering::KsmSteering;
pub use leases::Leases;
pub use lending::Lending;
pub use libvirt::LibvirtDomains;
pub use memfold_host::chain;
pub use on_shelf::OnShelf;
pub use options::{BorrowWhen, DaemonOptions};
pub use reports::Reports;
pub use sampling::{Live, Sampling};
pub use segments::Segments;
pub use snapshots::Snapshots;
pub use swap_disks::SwapDisks;
pub use swap_volumes::SwapVolumes;
pub use views::{EstimateOrder, PlaceOrder, SwapUse, Views};
pub use vms::Vms;
